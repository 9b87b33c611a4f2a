//! What only shows from inside, against a real etcd.

use std::time::Duration;

use lockcore::backend::*;

use self::common::*;

#[path = "../tests/common/mod.rs"]
mod common;

const TTL: Duration = Duration::from_secs(5);

#[tokio::test]
async fn an_etcd_lease_id_that_others_have_is_left_to_them() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let theirs = server.admin().await.lease_grant(600, None).await.unwrap().id();
    let asked = request("k");
    backend.draws.lock().unwrap().push(theirs);
    let held = backend.acquire(&call(), &asked).await.unwrap();
    assert_ne!(server.lease_of(&hex(&asked)).await, theirs);
    assert!(backend.draws.lock().unwrap().is_empty(), "it was tried");
    assert_eq!(backend.release(&call(), &held).await.unwrap(), Released::Now);
    backend.close().await;
    assert_eq!(server.leases().await, 1, "theirs lives on");
}

#[tokio::test]
async fn a_second_connection_knows_the_leases_of_the_first() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let held = backend.acquire(&call(), &request("k")).await.unwrap();
    let second = backend.second_connection(&call()).await.unwrap().unwrap();
    let renewed = second.renew(&call(), &held, TTL).await.unwrap();
    assert!(renewed.deadline > held.deadline);
    assert_eq!(backend.release(&call(), &renewed).await.unwrap(), Released::Now);
    assert_eq!(server.leases().await, 1, "at hand again, not doubled");
    assert_eq!(second.renew(&call(), &renewed, TTL).await.unwrap_err().kind(), ErrorKind::Lost);
    second.close().await;
    assert_eq!(server.leases().await, 0);
}
