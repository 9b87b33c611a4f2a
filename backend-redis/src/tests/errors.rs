//! What servers refuse, each from a real one: typed, without effect, and saying what to do.

use super::{server::Fleet, *};
use crate::PasswordSource;

async fn refusal(backend: &RedisBackend) -> Error {
    backend.acquire(&budget(Duration::from_millis(500)), &request("a")).await.unwrap_err()
}

#[track_caller]
fn says(error: &Error, kind: ErrorKind, what: &str) {
    assert_eq!(error.kind(), kind, "{error:?}");
    assert!(format!("{error:?}").contains(what), "{error:?}");
}

#[tokio::test]
async fn a_server_that_still_loads_its_data_is_unavailable_and_then_there() {
    let Some(mut server) = Server::start().await else { return };
    let backend = RedisBackend::connect(config(&server)).await.unwrap();
    let lease = backend.acquire(&call(), &request("a")).await.unwrap();
    // So many keys, each two milliseconds to load.
    for n in 0..1500 {
        let _: () = server.raw(&["SET", &format!("filler/{n}"), "x"]).await.unwrap();
    }
    let _: () = server.raw(&["SAVE"]).await.unwrap();
    server.restart_loading("2000").await;
    // It greets already.
    let other = RedisBackend::connect(config(&server)).await.unwrap();
    says(&refusal(&other).await, ErrorKind::Unavailable, "loads its data");
    let loading = other.renew(&call(), &lease, TTL).await.unwrap_err();
    says(&loading, ErrorKind::Unavailable, "loads its data");
    server
        .until("it has loaded", async |server| server.raw::<String>(&["GET", "filler/0"]).await.is_ok())
        .await;
    let renewed = other.renew(&call(), &lease, TTL).await.unwrap();
    assert_eq!(renewed.fence, lease.fence);
}

#[tokio::test]
async fn a_replica_without_its_master_is_unavailable() {
    let Some(mut fleet) = Fleet::start(1, &["--replica-serve-stale-data", "no"]).await else { return };
    let backend = RedisBackend::connect(config(&fleet.master)).await.unwrap();
    let standing = backend.acquire(&call(), &request("a")).await.unwrap();
    fleet.master.kill();
    let replica = &fleet.replicas[0];
    replica
        .until("its master is missed", async |replica| {
            let missed: redis::RedisResult<Option<String>> = replica.raw(&["GET", "x"]).await;
            missed.is_err_and(|error| error.code() == Some("MASTERDOWN"))
        })
        .await;
    // The greeting asks for the role, which a replica without a master tells.
    let refused = RedisBackend::connect(config(replica)).await.unwrap_err();
    says(&refused, ErrorKind::Unavailable, "replica");
    // A connection from before says so itself.
    replica.promote().await;
    let there = RedisBackend::connect(config(replica)).await.unwrap();
    let _: () = replica.raw(&["REPLICAOF", "127.0.0.1", &fleet.master.port.to_string()]).await.unwrap();
    let refused = there.inspect(&call(), &name("a")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused:?}");
    let refused = there.renew(&call(), &standing, TTL).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused:?}");
}

#[tokio::test]
async fn a_server_that_cannot_write_its_disk_grants_nothing() {
    let Some(server) = Server::with(&["--save", "3600 1000000"]).await else { return };
    let backend = RedisBackend::connect(config(&server)).await.unwrap();
    let lease = backend.acquire(&call(), &request("b")).await.unwrap();
    // A snapshot into a directory that is not there any more.
    server.lose_directory();
    let _: String = server.raw(&["BGSAVE"]).await.unwrap();
    server
        .until("the snapshot failed", async |server| {
            let info: String = server.raw(&["INFO", "persistence"]).await.unwrap();
            info.contains("rdb_last_bgsave_status:err")
        })
        .await;
    says(&refusal(&backend).await, ErrorKind::Unavailable, "cannot write its disk");
    let refused = backend.renew(&call(), &lease, TTL).await.unwrap_err();
    says(&refused, ErrorKind::Unavailable, "cannot write its disk");
}

#[tokio::test]
async fn users_that_may_not_and_passwords_that_are_wrong_are_unauthorized() {
    let Some(server) = Server::start().await else { return };
    let rule = ["ACL", "SETUSER", "reader", "on", ">s3cret", "~*", "&*", "+@read", "+@connection", "+time"];
    let _: () = server.raw(&rule).await.unwrap();
    let user = |password: &str| {
        config(&server).with(|c| (c.user, c.password) = (Some("reader".into()), Some(password.into())))
    };
    let refused = RedisBackend::connect(user("wr0ng")).await.unwrap_err();
    says(&refused, ErrorKind::Unauthorized, "refused the credentials");
    assert!(!format!("{refused:?}").contains("wr0ng"), "{refused:?}");
    // It may greet, and no more.
    let backend = RedisBackend::connect(user("s3cret")).await.unwrap();
    let refused = refusal(&backend).await;
    says(&refused, ErrorKind::Unauthorized, "access list forbids");
    assert!(!format!("{backend:?} {refused:?}").contains("s3cret"));
    // Keys elsewhere.
    let rule = ["ACL", "SETUSER", "other", "on", ">s3cret", "~other:*", "&*", "+@all"];
    let _: () = server.raw(&rule).await.unwrap();
    let other = user("s3cret").with(|c| c.user = Some("other".into()));
    let backend = RedisBackend::connect(other).await.unwrap();
    says(&refusal(&backend).await, ErrorKind::Unauthorized, "access list forbids");
}

#[tokio::test]
async fn a_password_that_changes_is_read_anew_by_the_next_connection() {
    let Some(server) = Server::start().await else { return };
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("password");
    std::fs::write(&file, "first\n").unwrap();
    let _: () = server.raw(&["ACL", "SETUSER", "locks", "on", ">first", "~*", "&*", "+@all"]).await.unwrap();
    let config = config(&server).with(|c| {
        c.user = Some("locks".into());
        c.password_source = Some(PasswordSource::file(&file));
    });
    let backend = RedisBackend::connect(config).await.unwrap();
    let lease = backend.acquire(&call(), &request("a")).await.unwrap();
    let _: () = server.raw(&["ACL", "SETUSER", "locks", "resetpass", ">second"]).await.unwrap();
    std::fs::write(&file, "second").unwrap();
    let closed: i64 = server.raw(&["CLIENT", "KILL", "USER", "locks"]).await.unwrap();
    assert!(closed >= 1);
    let renewed = loop {
        match backend.renew(&call(), &lease, TTL).await {
            Ok(lease) => break lease,
            // The end of the old connection was not seen yet.
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unknown, "{error:?}"),
        }
    };
    assert_eq!(renewed.fence, lease.fence);
    std::fs::remove_file(&file).unwrap();
    let _: i64 = server.raw(&["CLIENT", "KILL", "USER", "locks"]).await.unwrap();
    let refused = loop {
        match backend.renew(&call(), &lease, TTL).await {
            Err(error) if error.kind() == ErrorKind::Unknown => {}
            other => break other.unwrap_err(),
        }
    };
    says(&refused, ErrorKind::Misconfigured, "cannot be read");
}

#[tokio::test]
async fn sentinels_with_a_password_of_their_own_get_it_and_not_the_servers() {
    let Some(fleet) = Fleet::start(0, &[]).await else { return };
    let Some(sentinel) = Server::sentinel(&fleet.master, 1).await else { return };
    let rule = ["ACL", "SETUSER", "client", "on", ">watch", "resetchannels", "+@all"];
    let _: () = sentinel.raw(&rule).await.unwrap();
    let _: () = sentinel.raw(&["ACL", "SETUSER", "default", "resetpass", ">other"]).await.unwrap();
    let of = RedisConfig::sentinel([("127.0.0.1", sentinel.port)], "shop");
    let refused = RedisBackend::connect(of.clone()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unauthorized, "{refused:?}");
    let with = of.with(|c| {
        c.sentinel_user = Some("client".into());
        c.sentinel_password = Some(PasswordSource::new(|| Ok("watch".into())));
    });
    let backend = RedisBackend::connect(with).await.unwrap();
    let lease = backend.acquire(&call(), &request("a")).await.unwrap();
    assert_eq!(backend.release(&call(), &lease).await.unwrap(), Released::Now);
}
