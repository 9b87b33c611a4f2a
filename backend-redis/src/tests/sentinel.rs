//! Sentinels of the test's own: who is found, and who is followed.

use super::{server::Fleet, *};
use crate::WaitReplicas;

fn of(sentinels: &[&Server]) -> RedisConfig {
    RedisConfig::sentinel(sentinels.iter().map(|sentinel| ("127.0.0.1", sentinel.port)), "shop")
}

#[tokio::test]
async fn a_client_follows_the_master_that_sentinels_elect_and_its_lock_is_still_there() {
    let Some(mut fleet) = Fleet::start(2, &[]).await else { return };
    let mut sentinels = Vec::new();
    for _ in 0..3 {
        let Some(sentinel) = Server::sentinel(&fleet.master, 2).await else { return };
        sentinels.push(sentinel);
    }
    for sentinel in &sentinels {
        sentinel
            .until("the others and the replicas are known", async |sentinel| {
                let facts: Vec<String> = sentinel.raw(&["SENTINEL", "MASTER", "shop"]).await.unwrap();
                let has = |fact: [&str; 2]| facts.windows(2).any(|pair| pair == fact);
                has(["num-other-sentinels", "2"]) && has(["num-slaves", "2"])
            })
            .await;
    }
    let [a, b, c] = &sentinels[..] else { panic!("three Sentinels") };
    let config = of(&[a, b, c]).with(|c| {
        c.wait_replicas = WaitReplicas::AtLeast(1);
        c.connect_timeout = Duration::from_millis(1500);
    });
    let backend = RedisBackend::connect(config).await.unwrap();
    assert_eq!(backend.capabilities().consistency, Consistency::Replicated);
    let preflight = backend.preflight(&call()).await.unwrap();
    assert!(preflight.findings.iter().any(|finding| finding.contains("wait-replicas to 2")), "{preflight:?}");

    let lease = backend.acquire(&call(), &request("a")).await.unwrap();
    for replica in &fleet.replicas {
        replica.until("it has the lock", async |r| r.get("lockcore::{a}:lock").await.is_some()).await;
    }
    let waiting = tokio::spawn({
        let other = RedisBackend::connect(of(&[a, b, c])).await.unwrap();
        async move {
            // As lockcore does: what had no effect, or may have had one, is asked again.
            let begun = Instant::now();
            loop {
                let (call, request) = waiting("a", WATCHDOG);
                match other.acquire(&call, &request).await {
                    Ok(lease) => return lease,
                    Err(error) if error.kind().is_transient() && begun.elapsed() < WATCHDOG => {
                        let _ = other.abandon(&call, &request).await;
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                    Err(error) => panic!("{error:?}"),
                }
            }
        }
    });

    fleet.master.kill();
    let begun = Instant::now();
    let renewed = loop {
        match backend.renew(&budget(Duration::from_secs(2)), &lease, TTL).await {
            Ok(lease) => break lease,
            Err(error) => {
                assert!(error.kind() != ErrorKind::Lost, "{error:?}");
                assert!(begun.elapsed() < WATCHDOG, "no master was found again: {error:?}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    };
    assert_eq!(renewed.fence, lease.fence);
    println!("followed after {:?}", begun.elapsed());
    assert!(!waiting.is_finished(), "the lock was granted twice");
    assert_eq!(backend.release(&call(), &renewed).await.unwrap(), Released::Now);
    let next = in_time(waiting).await.unwrap();
    assert!(next.fence > lease.fence);
}

#[tokio::test]
async fn sentinels_that_are_away_or_name_a_replica_are_passed_over() {
    let Some(fleet) = Fleet::start(1, &[]).await else { return };
    let Some(good) = Server::sentinel(&fleet.master, 1).await else { return };
    let Some(wrong) = Server::sentinel(&fleet.replicas[0], 9).await else { return };
    let Some(mut away) = Server::sentinel(&fleet.master, 9).await else { return };
    away.kill();
    let backend = RedisBackend::connect(of(&[&away, &wrong, &good])).await.unwrap();
    let lease = backend.acquire(&call(), &request("a")).await.unwrap();
    assert!(fleet.master.get("lockcore::{a}:lock").await.is_some());
    backend.release(&call(), &lease).await.unwrap();
    let refused = RedisBackend::connect(of(&[&away])).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
}

#[tokio::test]
async fn a_name_that_nobody_watches_and_a_server_that_is_no_sentinel_are_named() {
    let Some(fleet) = Fleet::start(0, &[]).await else { return };
    let Some(sentinel) = Server::sentinel(&fleet.master, 1).await else { return };
    let unknown = RedisConfig::sentinel([("127.0.0.1", sentinel.port)], "shoe");
    let refused = RedisBackend::connect(unknown).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Misconfigured);
    assert!(refused.to_string().contains("\"shoe\""), "{refused}");
    let refused = RedisBackend::connect(of(&[&fleet.master])).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Misconfigured);
    assert!(refused.to_string().contains("is no Sentinel"), "{refused}");
    // And the other way round.
    let refused = RedisBackend::connect(config(&sentinel)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Misconfigured);
    assert!(refused.to_string().contains("redis+sentinel"), "{refused}");
}

#[tokio::test]
async fn a_master_that_was_demoted_is_left_with_the_next_request() {
    let Some(fleet) = Fleet::start(1, &[]).await else { return };
    let Some(before) = Server::sentinel(&fleet.master, 1).await else { return };
    let backend = RedisBackend::connect(of(&[&before])).await.unwrap();
    let lease = backend.acquire(&call(), &request("a")).await.unwrap();
    fleet.replicas[0].until("it has the lock", async |r| r.get("lockcore::{a}:lock").await.is_some()).await;
    // A failover by hand; its connections stand.
    before
        .until("the replica is known", async |s| s.raw::<()>(&["SENTINEL", "FAILOVER", "shop"]).await.is_ok())
        .await;
    fleet.replicas[0]
        .until("it is the master", async |r| {
            // A Sentinel ends connections while it makes a replica.
            let role: redis::RedisResult<Vec<redis::Value>> = r.raw(&["ROLE"]).await;
            role.is_ok_and(|role| role[0] == redis::Value::BulkString(b"master".to_vec()))
        })
        .await;
    fleet
        .master
        .until("it is a replica", async |r| {
            // A Sentinel ends connections while it makes a replica.
            let role: redis::RedisResult<Vec<redis::Value>> = r.raw(&["ROLE"]).await;
            role.is_ok_and(|role| role[0] == redis::Value::BulkString(b"slave".to_vec()))
        })
        .await;
    let renewed = backend.renew(&call(), &lease, TTL).await.unwrap();
    assert_eq!(renewed.fence, lease.fence);
    assert_eq!(backend.release(&call(), &renewed).await.unwrap(), Released::Now);
    assert_eq!(fleet.replicas[0].get("lockcore::{a}:lock").await, None);
}

#[tokio::test]
async fn a_master_that_others_have_replaced_is_believed_only_when_most_sentinels_agree() {
    let Some(fleet) = Fleet::start(0, &[]).await else { return };
    let Some(sentinel) = Server::sentinel(&fleet.master, 1).await else { return };
    let Some(mut away) = Server::sentinel(&fleet.master, 1).await else { return };
    away.kill();
    // One of three answers, and it has not heard of the newest master.
    let backend = RedisBackend::lazy(of(&[&away, &sentinel, &away])).unwrap();
    backend.learnt().saw_epoch(100);
    let refused = backend.acquire(&call(), &request("a")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    // All that there are begin to count anew.
    let backend = RedisBackend::lazy(of(&[&sentinel])).unwrap();
    backend.learnt().saw_epoch(100);
    let lease = backend.acquire(&call(), &request("a")).await.unwrap();
    assert_eq!(backend.release(&call(), &lease).await.unwrap(), Released::Now);
}
