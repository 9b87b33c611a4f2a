//! Locks that move to a ZooKeeper ensemble and away from it, under a bridge.

mod common;

use std::{sync::Arc, time::Duration};

use common::*;
use lockcore::{backend::*, memory::MemoryBackend};
use lockcore_conformance::crossing;
use lockcore_zk::{ZkBackend, ZkConfig};

const LONG: Duration = Duration::from_secs(20);

#[tokio::test]
async fn locks_cross_to_zookeeper_and_return() {
    let Some(server) = Server::start() else { return };
    let memory = MemoryBackend::default();
    let from = async || Arc::new(memory.clone()) as Arc<dyn LockBackend>;
    let to = async || server.backend().await as Arc<dyn LockBackend>;
    crossing::crosses_and_returns(from, to).await;
    assert_eq!(server.places().await, [""; 0]);
}

#[tokio::test]
async fn locks_cross_from_zookeeper_and_return() {
    let Some(server) = Server::start() else { return };
    let memory = MemoryBackend::default();
    let from = async || server.backend().await as Arc<dyn LockBackend>;
    let to = async || Arc::new(memory.clone()) as Arc<dyn LockBackend>;
    crossing::crosses_and_returns(from, to).await;
    assert_eq!(server.places().await, [""; 0]);
}

#[tokio::test]
async fn locks_cross_between_ensembles_and_return() {
    let Some(old) = Server::start() else { return };
    let Some(new) = Ensemble::start(3) else { return };
    let config = ZkConfig::parse(&new.addresses()).unwrap();
    let from = async || old.backend().await as Arc<dyn LockBackend>;
    let to = async || Arc::new(ZkBackend::lazy(config.clone()).unwrap()) as Arc<dyn LockBackend>;
    crossing::crosses_and_returns(from, to).await;
}

#[tokio::test]
async fn members_are_listed_with_their_labels_until_they_leave_or_their_sessions_end() {
    let Some(server) = Server::start() else { return };
    let (backend, other) = (server.backend().await, server.backend().await);
    assert_eq!(backend.members(&call()).await.unwrap(), []);
    let mut record = PhaseRecord::new("moving", 1);
    record.open = vec!["from".into(), "both".into()];
    assert!(backend.phase_cas(&call(), None, &record).await.unwrap());
    let one = backend.join(&call().labelled("web-3:4711"), "from", LONG).await.unwrap();
    let two = other.join(&call(), "both", LONG).await.unwrap();
    let ended = tokio::spawn({
        let (other, two) = (other.clone(), two.clone());
        async move { other.ended(&call(), &two).await }
    });
    let elsewhere = call().in_namespace("other").unwrap();
    assert_eq!(backend.members(&elsewhere).await.unwrap(), []);
    // Any process sees all.
    let found = server.backend().await.members(&call()).await.unwrap();
    let [both, from] = &found[..] else { panic!("{found:?}") };
    assert_eq!((both.phase.as_str(), both.owner, &both.label), ("both", two.owner.digest(), &None));
    assert_eq!((from.phase.as_str(), from.owner), ("from", one.owner.digest()));
    assert_eq!(from.label.as_deref(), Some("web-3:4711"));
    let one = backend.renew(&call(), &one, LONG).await.unwrap();
    assert_eq!(backend.members(&call()).await.unwrap().len(), 2);
    assert_eq!(backend.leave(&call(), &one).await.unwrap(), Released::Now);
    assert!(!ended.is_finished(), "it was told of a loss that did not happen");
    let (admin, members) = (server.admin().await, "/lockcore/@/members/phase%2Fboth");
    let node = admin.list_children(members).await.unwrap().remove(0);
    admin.delete(&format!("{members}/{node}"), None).await.unwrap();
    assert_eq!(ended.await.unwrap(), LostReason::Taken);
    assert_eq!(other.renew(&call(), &two, LONG).await.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(backend.members(&call()).await.unwrap(), []);
    // As a process that ends.
    let three = other.join(&call(), "both", LONG).await.unwrap();
    other.close().await;
    eventually("its session took it along", async || backend.members(&call()).await.unwrap().is_empty())
        .await;
    assert_eq!(backend.leave(&call(), &three).await.unwrap(), Released::AlreadyOver);
}

#[tokio::test]
async fn the_floor_of_a_record_holds_for_who_knows_of_no_migration() {
    let Some(server) = Server::start() else { return };
    let (operator, plain) = (server.backend().await, server.backend().await);
    // One holds, and one waits who stands there already.
    let held = plain.acquire(&call(), &request_of("k", LONG)).await.unwrap();
    let waiter = waits(&plain, request_of("k", LONG).waiting_until(Moment::MAX), 1).await;
    let mut record = PhaseRecord::new("moving", 1);
    record.floor = Some(Fence::new(held.fence.get() + 1_000_000_000).unwrap());
    assert!(operator.phase_cas(&call(), None, &record).await.unwrap());
    assert!(plain.high_water(&call()).await.unwrap() > record.floor);
    let held = plain.renew(&call(), &held, LONG).await.unwrap();
    assert_eq!(plain.release(&call(), &held).await.unwrap(), Released::Now);
    let next = waiter.await.unwrap().unwrap();
    assert!(Some(next.fence) > record.floor);
    plain.release(&call(), &next).await.unwrap();
    let other = plain.acquire(&call(), &request("other")).await.unwrap();
    assert!(Some(other.fence) > record.floor);
    // Who is refused raises nothing.
    let mut higher = record.clone();
    higher.floor = Some(Fence::new(other.fence.get() + 1_000_000_000).unwrap());
    assert!(!operator.phase_cas(&call(), None, &higher).await.unwrap());
    plain.release(&call(), &other).await.unwrap();
    let last = plain.acquire(&call(), &request("other")).await.unwrap();
    assert!(Some(last.fence) < higher.floor);
}
