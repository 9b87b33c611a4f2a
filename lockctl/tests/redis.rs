//! `run` on a Redis server.

mod stage;
use stage::{Stage, redis::Redis};

#[test]
fn a_redis_server_keeps_the_second_out_until_the_first_has_ended() {
    let Some(redis) = Redis::start() else { return };
    let (stage, url) = (Stage::new(), redis.url());
    let holder = stage.hold(&["--store", &url, "--label", "web-3"]);
    let record = redis.ask("GET lockcore::{a}:lock").unwrap();
    assert!(record.contains("|web-3"), "the server has {record:?}");
    let busy = stage.run(&["--store", &url], "echo x > ran").end();
    busy.says(111, "\"a\" is held by web-3");
    assert!(busy.stderr.contains(&url), "{busy:?}");
    assert!(!stage.path("ran").exists(), "a command ran without the lock");

    let waiter = stage.run(&["--store", &url, "--wait", "60s"], "echo $LOCK_FENCE > ran");
    stage.go();
    holder.end().is_silent(0);
    waiter.end().is_silent(0);
    assert!(stage.wait_for("ran").trim().parse::<u64>().is_ok(), "the command was given no fence");
    assert_eq!(redis.ask("EXISTS lockcore::{a}:lock").unwrap(), ":0\r\n", "the lock was not given back");
}
