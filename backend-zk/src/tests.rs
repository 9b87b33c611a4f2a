//! What takes a look inside to bring about: another that ends a session by its id and password.

#[path = "../tests/common/mod.rs"]
mod common;

use std::{sync::Arc, time::Duration};

use common::*;
use lockcore::backend::*;
use zookeeper_client::Client;

use crate::{
    ZkBackend,
    places::{Place, Stage, key},
    session::Session,
};

impl ZkBackend {
    fn place(&self, asked: &AcquireRequest) -> Option<Place> {
        let queue = self.inner.space(&call()).queue(asked.name());
        self.inner.places.get(&key(&queue, asked.owner()))
    }
}

fn place_of(backend: &ZkBackend, lease: &Lease) -> Place {
    let queue = backend.inner.space(&call()).queue(&lease.name);
    backend.inner.places.get(&key(&queue, &lease.owner)).expect("it is known")
}

fn session_of(backend: &ZkBackend, lease: &Lease) -> Arc<Session> {
    place_of(backend, lease).session
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
    let line = line_to(&server.address);
    let (backend, other) = (backend_at(&line.address().to_string()).await, server.backend().await);
    let held = other.acquire(&call(), &request_of("w", Duration::from_secs(60))).await.unwrap();
    let waiting = request_of("w", Duration::from_millis(600)).waiting_until(Moment::MAX);
    let waiter = waits(&backend, waiting.clone(), 1).await;
    let session = backend.place(&waiting).unwrap().session;
    line.refuse(true);
    line.reset();
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
    line.refuse(false);
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
async fn sessions_are_renewed_side_by_side_and_each_lease_is_told_its_own_cause() {
    let Some(server) = Server::start() else { return };
    let line = line_to(&server.address);
    let backend = backend_at(&line.address().to_string()).await;
    let (short, long) = (Duration::from_secs(40), Duration::from_secs(80));
    let mut leases = Vec::new();
    for (name, ttl) in [("a", short), ("b", short), ("c", long)] {
        let asked = request_of(name, ttl);
        leases.push(backend.acquire(&call(), &asked).await.unwrap());
        if name != "b" {
            leases.push(backend.acquire(&call(), &request_of(&format!("{name}2"), ttl)).await.unwrap());
        }
    }
    let mut sessions: Vec<_> = leases.iter().map(|lease| session_of(&backend, lease)).collect();
    sessions.dedup_by_key(|session| session.id);
    assert_eq!(sessions.len(), 2);
    let admin = server.admin().await;
    let versions = async || {
        let mut versions = Vec::new();
        for session in &sessions {
            versions.push(admin.check_stat(&session.beat).await.unwrap().unwrap().version);
        }
        versions
    };

    // No answer comes, and both heartbeats have left. Nobody but a renewal writes one in this time.
    let before = versions().await;
    line.hold(Direction::ToClient, true);
    let renews = tokio::spawn({
        let (backend, leases) = (backend.clone(), leases.clone());
        async move { backend.renew_many(&call_of(Duration::from_secs(20)), &leases, short).await }
    });
    let began = BootClock.now();
    eventually("both heartbeats are written", async || {
        versions().await.iter().zip(&before).all(|(now, before)| now > before)
    })
    .await;
    assert!(began.until(BootClock.now()) < sessions[0].pace(), "one waited for the other");
    line.hold(Direction::ToClient, false);
    assert!(renews.await.unwrap().iter().all(Result::is_ok));

    // One node is closed to us, one is gone, and the others are renewed.
    let path = |lease: &Lease| place_of(&backend, lease).path().unwrap();
    let nobody = [zookeeper_client::Acl::new(
        zookeeper_client::Permission::READ,
        zookeeper_client::AuthId::new("digest", "nobody:x"),
    )];
    admin.set_acl(&path(&leases[1]), &nobody, None).await.unwrap();
    admin.delete(&path(&leases[2]), None).await.unwrap();
    let kinds = async |leases: &[Lease]| {
        let renewed = backend.renew_many(&call(), leases, short).await;
        renewed.iter().map(|one| one.as_ref().err().map(Error::kind)).collect::<Vec<_>>()
    };
    let told = kinds(&leases).await;
    assert_eq!(told, [None, Some(ErrorKind::Unauthorized), Some(ErrorKind::Lost), None, None]);

    // Where nothing can be sent, all are told so, and not that something may have been done.
    line.refuse(true);
    line.reset();
    eventually("no session is connected", async || sessions.iter().all(|session| !session.is_connected()))
        .await;
    drop(leases.remove(2));
    let renewed = backend.renew_many(&call_of(Duration::from_millis(600)), &leases, short).await;
    for answer in renewed {
        let error = answer.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
        assert!(error.to_string().contains("no connection"), "{error}");
    }
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
