//! What takes a look inside to bring about: another that ends a session by its id and password.

#[path = "../tests/common/mod.rs"]
mod common;

use std::time::Duration;

use common::*;
use lockcore::backend::*;
use zookeeper_client::Client;

use crate::{
    ZkBackend,
    places::{Place, Stage, key},
};

impl ZkBackend {
    fn place(&self, asked: &AcquireRequest) -> Option<Place> {
        let queue = self.inner.space(&call()).queue(asked.name());
        self.inner.places.get(&key(&queue, asked.owner()))
    }
}

#[tokio::test]
async fn a_session_that_somebody_closed_is_a_loss_and_the_next_acquire_opens_another() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let long = Duration::from_secs(20);
    let asked = request_of("closed", long);
    let held = backend.acquire(&call(), &asked).await.unwrap();
    let ended = tokio::spawn({
        let (backend, held) = (backend.clone(), held.clone());
        async move { backend.ended(&call(), &held).await }
    });
    let session = backend.place(&asked).unwrap().session;
    // Our own client may win the session back before it is closed: then it is taken again.
    eventually("the session is over", async || {
        let info = session.client.session().clone();
        if let Ok(other) = Client::connector().with_session(info).connect(&server.address).await {
            drop(other);
        }
        session.is_over()
    })
    .await;
    assert_eq!(ended.await.unwrap(), LostReason::SessionEnded);
    let lost = backend.renew(&call(), &held, long).await.unwrap_err();
    assert_eq!(lost.lost_reason(), Some(LostReason::SessionEnded));
    let again = request_of("closed", long);
    let next = backend.acquire(&call(), &again).await.unwrap();
    assert!(next.fence > held.fence);
    assert_ne!(backend.place(&again).unwrap().session.id, session.id);
    assert_eq!(backend.release(&call(), &held).await.unwrap(), Released::AlreadyOver);
    assert_eq!(backend.release(&call(), &next).await.unwrap(), Released::Now);
}

#[tokio::test]
async fn a_waiter_outlives_its_session_also_where_no_other_can_be_had_for_a_while() {
    let Some(server) = Server::start() else { return };
    let wire = Wire::to(&server.address).await;
    let (backend, other) = (backend_at(&wire.address).await, server.backend().await);
    let held = other.acquire(&call(), &request_of("w", Duration::from_secs(60))).await.unwrap();
    let waiting = request_of("w", Duration::from_millis(600)).waiting_until(Moment::MAX);
    let waiter = waits(&backend, waiting.clone(), 1).await;
    let session = backend.place(&waiting).unwrap().session;
    wire.refuse(true);
    wire.cut();
    eventually("the session is over, and with it the place", async || {
        session.is_over() && backend.place(&waiting).is_none()
    })
    .await;
    // Whoever asks for a session in turns with the waiter gets none.
    for _ in 0..2 {
        let none = backend.acquire(&call(), &request_of("x", Duration::from_millis(600))).await.unwrap_err();
        assert_eq!(none.kind(), ErrorKind::Unavailable, "{none:?}");
    }
    assert!(!waiter.is_finished(), "it gave up");
    wire.refuse(false);
    eventually("it stands in the queue again", async || {
        backend.place(&waiting).is_some_and(|place| matches!(place.stage, Stage::Stands(_)))
    })
    .await;
    assert_eq!(other.release(&call(), &held).await.unwrap(), Released::Now);
    let next = waiter.await.unwrap().unwrap();
    assert!(next.fence > held.fence);
    assert_eq!(backend.release(&call(), &next).await.unwrap(), Released::Now);
}

#[tokio::test]
async fn ephemeral_nodes_that_no_place_stands_for_are_swept() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let asked = request_of("held", Duration::from_secs(3));
    let mut held = backend.acquire(&call(), &asked).await.unwrap();
    let place = backend.place(&asked).unwrap();
    // As a create does that lands when its acquire is forgotten.
    let options =
        zookeeper_client::CreateMode::EphemeralSequential.with_acls(zookeeper_client::Acls::anyone_all());
    let stray = format!("{}/{}-", place.queue, "f".repeat(32));
    let (_, sequence) = place.session.client.create(&stray, b"0:1:", &options).await.unwrap();
    let stray = format!("{stray}{sequence}");
    assert!(server.places().await.contains(&stray));
    eventually("the stray node is gone", async || {
        held = backend.renew(&call(), &held, Duration::from_secs(3)).await.unwrap();
        !server.places().await.contains(&stray)
    })
    .await;
    assert_eq!(backend.release(&call(), &held).await.unwrap(), Released::Now);
}
