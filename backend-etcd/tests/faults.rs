//! What goes wrong around a holder and a queue, against a real etcd.

mod common;
#[path = "common/wire.rs"]
mod wire;

use std::{
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::{Duration, Instant},
};

use common::*;
use etcd_client::CompactionOptions;
use lockcore::backend::*;
use lockcore_etcd::{EtcdBackend, EtcdConfig};
use rustix::process::Signal;
use wire::Wire;

type Waiter = tokio::task::JoinHandle<Result<Lease>>;

/// Lets a request wait in a task, and comes back when it stands in the queue.
async fn waits(backend: &Arc<EtcdBackend>, request: AcquireRequest, place: u32) -> Waiter {
    let (other, name) = (backend.clone(), request.name().clone());
    let waiter =
        tokio::spawn(async move { other.acquire(&call_of(Duration::from_secs(20)), &request).await });
    eventually("it stands in the queue", async || {
        backend.inspect(&call(), &name).await.unwrap().waiters == Some(place)
    })
    .await;
    waiter
}

#[tokio::test]
async fn a_waiter_whose_lease_is_revoked_queues_again_behind_the_others() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let held = backend.acquire(&call(), &request("w")).await.unwrap();
    let revoked = request("w").waiting_until(Moment::MAX);
    let ticket = hex(&revoked);
    let second = waits(&backend, revoked, 1).await;
    let third = waits(&backend, request("w").waiting_until(Moment::MAX), 2).await;
    let old = server.lease_of(&ticket).await;
    server.admin().await.lease_revoke(old).await.unwrap();
    eventually("it stands in the queue with a new lease", async || {
        backend.inspect(&call(), &held.name).await.unwrap().waiters == Some(2)
            && server.lease_of(&ticket).await != old
    })
    .await;
    backend.release(&call(), &held).await.unwrap();
    let third = third.await.unwrap().unwrap();
    assert!(third.fence > held.fence);
    assert!(!second.is_finished());
    backend.release(&call(), &third).await.unwrap();
    let second = second.await.unwrap().unwrap();
    assert!(second.fence > third.fence);
    let _live = backend.renew(&call(), &second, Duration::from_secs(5)).await.unwrap();
}

#[tokio::test]
async fn a_holder_whose_lease_is_revoked_is_told_before_its_deadline() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let asked = request_of("h", Duration::from_secs(30));
    let held = backend.acquire(&call(), &asked).await.unwrap();
    let ended = tokio::spawn({
        let (backend, held) = (backend.clone(), held.clone());
        async move { backend.ended(&call(), &held).await }
    });
    let lease = server.lease_of(&hex(&asked)).await;
    server.admin().await.lease_revoke(lease).await.unwrap();
    let reason = tokio::time::timeout(Duration::from_secs(5), ended).await.expect("in time").unwrap();
    assert_eq!(reason, LostReason::Taken);
    let lost = backend.renew(&call(), &held, Duration::from_secs(30)).await.unwrap_err();
    assert_eq!(lost.lost_reason(), Some(LostReason::Taken));
    assert_eq!(backend.release(&call(), &held).await.unwrap(), Released::AlreadyOver);
}

#[tokio::test]
async fn a_compaction_while_two_wait_leaves_the_queue_as_it_is() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let held = backend.acquire(&call(), &request("c")).await.unwrap();
    let second = waits(&backend, request("c").waiting_until(Moment::MAX), 1).await;
    let third = waits(&backend, request("c").waiting_until(Moment::MAX), 2).await;
    let mut admin = server.admin().await;
    let mut newest = 0;
    for at in 0..20 {
        newest = admin.put("unrelated", at.to_string(), None).await.unwrap().header().unwrap().revision();
    }
    admin.compact(newest, Some(CompactionOptions::new().with_physical())).await.unwrap();
    assert_eq!(backend.inspect(&call(), &held.name).await.unwrap().waiters, Some(2));
    backend.release(&call(), &held).await.unwrap();
    let second = second.await.unwrap().unwrap();
    backend.release(&call(), &second).await.unwrap();
    let third = third.await.unwrap().unwrap();
    assert!(held.fence < second.fence && second.fence < third.fence);
    backend.release(&call(), &third).await.unwrap();
    assert_eq!(server.places().await, [""; 0]);
}

#[tokio::test]
async fn a_holder_survives_a_restart_of_the_server_and_the_other_stays_out() {
    let Some(mut server) = Server::start() else { return };
    let backend = server.backend().await;
    let held = backend.acquire(&call(), &request_of("s", Duration::from_secs(20))).await.unwrap();
    server.kill();
    let down = backend.acquire(&call_of(Duration::from_secs(2)), &request("x")).await.unwrap_err();
    assert!(matches!(down.kind(), ErrorKind::Unavailable | ErrorKind::Unknown), "{down:?}");
    server.restart();
    serves(&backend).await;
    let renewed = backend.renew(&call(), &held, Duration::from_secs(20)).await.unwrap();
    assert!(renewed.deadline > held.deadline && renewed.fence == held.fence);
    assert_eq!(backend.acquire(&call(), &request("s")).await.unwrap_err().kind(), ErrorKind::Held);
    assert_eq!(backend.release(&call(), &renewed).await.unwrap(), Released::Now);
    let next = backend.acquire(&call(), &request("s")).await.unwrap();
    assert!(next.fence > held.fence);
}

#[tokio::test]
async fn a_refused_connection_is_definite() {
    let backend = EtcdBackend::lazy(EtcdConfig::new(["http://127.0.0.1:1"])).unwrap();
    let refused = backend.acquire(&call(), &request("u")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused:?}");
}

#[tokio::test]
async fn a_stopped_server_gives_unknown_in_bounds_and_the_acquire_settles_afterwards() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let held = backend.acquire(&call(), &request_of("held", Duration::from_secs(30))).await.unwrap();
    server.signal(Signal::STOP);
    let asked = request("stopped");
    let began = Instant::now();
    let bound = Duration::from_millis(700);
    let unknown = backend.acquire(&call_of(bound), &asked).await.unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::Unknown, "{unknown:?}");
    let unknown = backend.renew(&call_of(bound), &held, Duration::from_secs(30)).await.unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::Unknown, "{unknown:?}");
    let took = began.elapsed();
    assert!(took < Duration::from_secs(3), "{took:?}");
    server.signal(Signal::CONT);
    eventually("the acquire settles", async || backend.abandon(&call(), &asked).await.is_ok()).await;
    let next = backend.acquire(&call(), &request("stopped")).await.expect("nothing was left");
    assert_eq!(backend.release(&call(), &next).await.unwrap(), Released::Now);
    assert_eq!(backend.release(&call(), &held).await.unwrap(), Released::Now);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn six_clients_hand_a_lock_off_three_hundred_times_with_growing_fences() {
    let Some(server) = Server::start() else { return };
    let (resource, inside) = (Arc::new(AtomicI64::new(0)), Arc::new(AtomicI64::new(0)));
    let mut clients = Vec::new();
    for _ in 0..6 {
        let backend = server.backend().await;
        let (resource, inside) = (resource.clone(), inside.clone());
        clients.push(tokio::spawn(async move {
            for _ in 0..50 {
                let asked = request("hot").waiting_until(Moment::MAX);
                let held = backend.acquire(&call_of(Duration::from_secs(60)), &asked).await.unwrap();
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "alone inside");
                let before = resource.swap(held.fence.get(), Ordering::SeqCst);
                assert!(held.fence.get() > before, "{} after {before}", held.fence);
                inside.fetch_sub(1, Ordering::SeqCst);
                assert_eq!(backend.release(&call(), &held).await.unwrap(), Released::Now);
            }
            backend
        }));
    }
    let mut backends = Vec::new();
    for client in clients {
        backends.push(client.await.unwrap());
    }
    assert_eq!(server.places().await, [""; 0]);
    // Each takes one place at a time, so it has one lease at hand at most.
    let at_hand = server.leases().await;
    assert!(at_hand <= backends.len(), "{at_hand} leases are left, of {} clients", backends.len());
    for backend in backends {
        assert!(format!("{backend:?}").contains("places: 0"), "{backend:?}");
        backend.close().await;
    }
    assert_eq!(server.leases().await, 0);
}

#[tokio::test]
async fn an_acquire_dropped_at_any_poll_leaves_nothing_once_abandoned() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let held = backend.acquire(&call(), &request("d")).await.unwrap();
    let mut longest = 0;
    for polls in 1..=40 {
        for name in ["d", "free"] {
            let asked = request_of(name, Duration::from_secs(2)).waiting_until(Moment::MAX);
            let call = call();
            let mut acquire = Box::pin(backend.acquire(&call, &asked));
            let mut polled = 0;
            // A waiter is not polled again until something happens: the clock ends the round then.
            let dropped = std::future::poll_fn(|cx| {
                if polled == polls {
                    return std::task::Poll::Ready(None);
                }
                polled += 1;
                acquire.as_mut().poll(cx).map(Some)
            });
            let ended = tokio::time::timeout(Duration::from_millis(60), dropped).await;
            longest = longest.max(polled);
            drop(acquire);
            backend.abandon(&call, &asked).await.unwrap();
            drop(ended);
        }
    }
    assert!(longest > 4, "several exchanges were cut");
    backend.release(&call(), &held).await.unwrap();
    eventually("no place is left", async || server.places().await.is_empty()).await;
    backend.close().await;
    eventually("no lease is left", async || server.leases().await == 0).await;
    let next = backend.acquire(&call(), &request("d")).await.unwrap();
    backend.release(&call(), &next).await.unwrap();
    assert!(format!("{backend:?}").contains("places: 0"), "{backend:?}");
}

/// Restores a snapshot under a living process, lets `meanwhile` unrelated writes pass, and acquires.
async fn restores_below_a_live_process(meanwhile: usize) {
    let Some(mut server) = Server::start() else { return };
    let backend = server.backend().await;
    let first = backend.acquire(&call(), &request("k")).await.unwrap();
    backend.release(&call(), &first).await.unwrap();
    let snapshot = server.snapshot();
    let mut highest = first.fence.get();
    // A floor takes the fence far ahead of the clock: only what this process saw tells.
    for ahead in [0, 1 << 40, 1 << 50] {
        let floor = Fence::new(highest + ahead + 1).unwrap();
        let held = backend.acquire(&call(), &request("k").above(floor)).await.unwrap();
        assert!(held.fence.get() > highest);
        highest = held.fence.get();
        backend.release(&call(), &held).await.unwrap();
    }
    server.restore(&snapshot);
    let mut admin = server.admin().await;
    eventually("the restored server serves", async || admin.get("unrelated", None).await.is_ok()).await;
    for at in 0..meanwhile {
        admin.put("unrelated", at.to_string(), None).await.unwrap();
    }
    let mut next = None;
    eventually("it is granted again", async || {
        let asked = request("k");
        match backend.acquire(&call(), &asked).await {
            Ok(lease) => next = Some(lease),
            Err(error) => {
                assert!(error.kind().is_transient(), "{error:?}");
                let _ = backend.abandon(&call(), &asked).await;
            }
        }
        next.is_some()
    })
    .await;
    let next = next.unwrap();
    assert!(next.fence.get() > highest, "{} after {highest}", next.fence);
}

#[tokio::test]
async fn a_restored_snapshot_never_brings_a_fence_back() {
    restores_below_a_live_process(0).await;
}

#[tokio::test]
async fn a_base_that_went_down_is_noticed_where_revisions_have_caught_up() {
    restores_below_a_live_process(100).await;
}

#[tokio::test]
async fn a_process_that_starts_after_a_restore_goes_by_the_clock() {
    let Some(mut server) = Server::start() else { return };
    let mut before = 0;
    let backend = server.backend().await;
    let first = backend.acquire(&call(), &request("k")).await.unwrap();
    backend.release(&call(), &first).await.unwrap();
    let snapshot = server.snapshot();
    for _ in 0..20 {
        let held = backend.acquire(&call(), &request("k")).await.unwrap();
        before = held.fence.get();
        backend.release(&call(), &held).await.unwrap();
    }
    backend.close().await;
    server.restore(&snapshot);
    let fresh = server.backend().await;
    let held = fresh.acquire(&call(), &request("k")).await.unwrap();
    assert!(held.fence.get() > before, "{} after {before}", held.fence);
}

#[tokio::test]
async fn a_process_that_was_idle_over_a_restore_goes_by_the_clock() {
    let Some(mut server) = Server::start() else { return };
    let (idle, busy) = (server.backend().await, server.backend().await);
    let first = idle.acquire(&call(), &request("k")).await.unwrap();
    idle.release(&call(), &first).await.unwrap();
    // What is taken back is nothing that the idle one saw: neither a revision nor a term goes down before its eyes.
    let snapshot = server.snapshot();
    let mut before = first.fence;
    for _ in 0..20 {
        let held = busy.acquire(&call(), &request("k")).await.unwrap();
        before = held.fence;
        busy.release(&call(), &held).await.unwrap();
    }
    drop(busy);
    server.restore(&snapshot);
    let mut admin = server.admin().await;
    eventually("the restored server serves", async || admin.get("unrelated", None).await.is_ok()).await;
    let mut next = None;
    eventually("it is granted again", async || {
        let asked = request("k");
        match idle.acquire(&call(), &asked).await {
            Ok(lease) => next = Some(lease),
            Err(_) => drop(idle.abandon(&call(), &asked).await),
        }
        next.is_some()
    })
    .await;
    let next = next.unwrap();
    assert!(next.fence > before, "{} after {before}", next.fence);
}

#[tokio::test]
async fn a_process_that_gave_up_a_silent_connection_before_a_restore_goes_by_the_clock() {
    let Some(mut server) = Server::start() else { return };
    let wire = Wire::to(&server.url).await;
    let idle = EtcdBackend::lazy(EtcdConfig::new([&wire.url])).unwrap();
    let busy = server.backend().await;
    let first = idle.acquire(&call(), &request("k")).await.unwrap();
    idle.release(&call(), &first).await.unwrap();
    let snapshot = server.snapshot();
    let mut before = first.fence;
    for _ in 0..20 {
        let held = busy.acquire(&call(), &request("k")).await.unwrap();
        before = held.fence;
        busy.release(&call(), &held).await.unwrap();
    }
    drop(busy);
    // A look whose answer does not come: the connection is given up, and whatever ends it is not heard any more.
    wire.hold_replies();
    let unknown = idle.inspect(&call_of(Duration::from_millis(600)), &first.name).await.unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::Unknown, "{unknown:?}");
    server.restore(&snapshot);
    let mut admin = server.admin().await;
    eventually("the restored server serves", async || admin.get("unrelated", None).await.is_ok()).await;
    wire.deliver();
    // By a new connection, which sees nothing odd.
    let next = idle.acquire(&call(), &request("k")).await.unwrap();
    assert!(next.fence > before, "{} after {before}", next.fence);
}
