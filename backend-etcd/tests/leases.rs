//! The etcd leases behind the locks: how many commits they cost, and that none of them serves two locks.

mod common;
#[path = "common/wire.rs"]
mod wire;

use std::time::Duration;

use common::*;
use etcd_client::{LeaseTimeToLiveOptions, PutOptions};
use lockcore::backend::*;
use lockcore_etcd::{EtcdBackend, EtcdConfig, Renewal};
use wire::Wire;

const TTL: Duration = Duration::from_secs(5);

async fn log_entries(server: &Server) -> u64 {
    server.admin().await.status().await.unwrap().raft_index()
}

#[tokio::test]
async fn an_acquire_and_its_release_are_one_commit_each() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    // The first one meets the namespace and grants the etcd lease.
    let first = backend.acquire(&call(), &request("k")).await.unwrap();
    backend.release(&call(), &first).await.unwrap();
    let before = log_entries(&server).await;
    for _ in 0..50 {
        let held = backend.acquire(&call(), &request("k")).await.unwrap();
        assert_eq!(backend.release(&call(), &held).await.unwrap(), Released::Now);
    }
    let after = log_entries(&server).await;
    assert_eq!(after - before, 100, "entries of the log for 50 rounds");
    assert_eq!(server.leases().await, 1);

    // A try that finds the lock held takes nothing, and gives its lease back.
    let _held = backend.acquire(&call(), &request("held")).await.unwrap();
    backend.acquire(&call(), &request("held")).await.unwrap_err();
    let before = log_entries(&server).await;
    for _ in 0..20 {
        backend.acquire(&call(), &request("held")).await.unwrap_err();
    }
    assert_eq!(log_entries(&server).await - before, 20);
    backend.close().await;
    assert_eq!(server.leases().await, 1, "only the one that is held is left");
}

#[tokio::test]
async fn a_lease_at_hand_is_dated_by_its_last_answer() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    for _ in 0..3 {
        let asked = request_of("k", TTL);
        let now = call().now();
        let held = backend.acquire(&call(), &asked).await.unwrap();
        // Less than a tenth of the TTL has passed, which leaves some room for the drift margin and a slow machine, and never more
        // is believed than the server has.
        assert!(now.until(held.deadline) >= TTL.mul_f64(0.85), "{:?}", now.until(held.deadline));
        let lease = server.lease_of(&hex(&asked)).await;
        let left = server.admin().await.lease_time_to_live(lease, None).await.unwrap().ttl();
        let believed = call().now().until(held.deadline);
        assert!(believed < Duration::from_secs(left.unsigned_abs() + 1), "{believed:?} {left}");
        backend.release(&call(), &held).await.unwrap();
    }
}

#[tokio::test]
async fn a_late_enqueue_never_comes_back_on_a_lease_that_lives_on() {
    let Some(server) = Server::start() else { return };
    let wire = Wire::to(&server.url).await;
    let backend = EtcdBackend::lazy(EtcdConfig::new([wire.url.as_str(), &server.url])).unwrap();
    let first = backend.acquire(&call(), &request("k")).await.unwrap();
    backend.release(&call(), &first).await.unwrap();
    assert_eq!(server.leases().await, 1, "one is at hand");

    // The request that takes the place stays on the wire; asked again by another way, it is granted.
    let asked = request("late");
    wire.hold(&hex(&asked));
    let unknown = backend.acquire(&call_of(Duration::from_millis(600)), &asked).await.unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::Unknown, "{unknown:?}");
    wire.holds().await;
    let held = backend.acquire(&call(), &asked).await.unwrap();
    let lease = server.lease_of(&hex(&asked)).await;
    assert_eq!(backend.release(&call(), &held).await.unwrap(), Released::Now);
    let gone = server.admin().await.lease_time_to_live(lease, None).await.unwrap();
    assert_eq!(gone.ttl(), -1, "its lease is not kept for another");

    // The copy arrives, and finds no lease.
    let revision = async || server.admin().await.get("x", None).await.unwrap().header().unwrap().revision();
    let before = revision().await;
    wire.deliver();
    let direct = server.backend().await;
    for _ in 0..3 {
        let next = direct.acquire(&call(), &request("late")).await.expect("nothing stands in the way");
        direct.release(&call(), &next).await.unwrap();
    }
    assert_eq!(revision().await - before, 7, "the base, three places and their ends");
    assert_eq!(server.places().await, [""; 0]);
}

#[tokio::test]
async fn a_renewal_under_way_keeps_its_lease_from_the_next_lock() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let held = backend.acquire(&call(), &request("k")).await.unwrap();
    {
        let call = call();
        let mut renewal = Box::pin(backend.renew(&call, &held, TTL));
        std::future::poll_fn(|cx| {
            assert!(renewal.as_mut().poll(cx).is_pending());
            std::task::Poll::Ready(())
        })
        .await;
    }
    assert_eq!(backend.release(&call(), &held).await.unwrap(), Released::Now);
    assert_eq!(server.leases().await, 0, "revoked, not at hand");
    assert_eq!(backend.renew(&call(), &held, TTL).await.unwrap_err().kind(), ErrorKind::Lost);
}

#[tokio::test]
async fn a_lease_at_hand_that_ended_or_carries_a_key_is_not_used() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let round = async |name: &str| {
        let asked = request_of(name, TTL);
        let held = backend.acquire(&call(), &asked).await.unwrap();
        let lease = server.lease_of(&hex(&asked)).await;
        backend.release(&call(), &held).await.unwrap();
        lease
    };
    let first = round("k").await;
    assert_eq!(round("other").await, first, "it serves one lock after the other");
    server.admin().await.lease_revoke(first).await.unwrap();
    let second = round("k").await;
    assert_ne!(second, first);

    // Somebody hangs a key on it: an operator's script, or a request of which nobody knew.
    server.admin().await.put("odd", "", Some(PutOptions::new().with_lease(second))).await.unwrap();
    // From a tenth of its TTL on a lease is asked whether it is what it was.
    eventually("it is old enough to be asked", async || {
        let options = LeaseTimeToLiveOptions::new();
        server.admin().await.lease_time_to_live(second, Some(options)).await.unwrap().ttl() <= 3
    })
    .await;
    assert_ne!(round("k").await, second);
}

#[tokio::test]
async fn a_renewal_by_swap_keeps_place_and_fence_and_leaves_one_lease() {
    let Some(server) = Server::start() else { return };
    let config = || EtcdConfig::new([&server.url]).with(|c| c.renewal = Renewal::Swap);
    let (backend, second) = (EtcdBackend::lazy(config()).unwrap(), EtcdBackend::lazy(config()).unwrap());
    let asked = request("k").labelled("host:1");
    let mut held = backend.acquire(&call(), &asked).await.unwrap();
    let mut lease = server.lease_of(&hex(&asked)).await;
    // In turns by two connections: each finds the other's lease in the record.
    for by in [&backend, &backend, &second, &backend, &second] {
        let renewed = by.renew(&call(), &held, TTL).await.unwrap();
        assert!(renewed.deadline > held.deadline && renewed.fence == held.fence);
        let next = server.lease_of(&hex(&asked)).await;
        assert_ne!(next, lease);
        (held, lease) = (renewed, next);
        let state = backend.inspect(&call(), &held.name).await.unwrap();
        let holder = state.holder.unwrap();
        assert_eq!((holder.stamp(), holder.label.as_deref()), (held.stamp(), Some("host:1")));
    }
    // Asking for less takes nothing away, whoever asks.
    for by in [&backend, &second] {
        let kept = by.renew(&call(), &held, Duration::from_secs(1)).await.unwrap();
        assert_eq!(kept.deadline, held.deadline);
        let lease = server.lease_of(&hex(&asked)).await;
        let left = server.admin().await.lease_time_to_live(lease, None).await.unwrap();
        assert_eq!(left.granted_ttl(), 5);
    }
    assert_eq!(backend.release(&call(), &held).await.unwrap(), Released::Now);
    assert_eq!(second.renew(&call(), &held, TTL).await.unwrap_err().kind(), ErrorKind::Lost);
    let next = second.acquire(&call(), &request("k")).await.unwrap();
    assert!(next.fence > held.fence);
    second.release(&call(), &next).await.unwrap();
    backend.close().await;
    second.close().await;
    eventually("no lease is left", async || server.leases().await == 0).await;
}

#[tokio::test]
async fn a_swap_without_an_answer_is_settled_by_the_next_renewal() {
    let Some(server) = Server::start() else { return };
    let wire = Wire::to(&server.url).await;
    let config = EtcdConfig::new([wire.url.as_str(), &server.url]).with(|c| c.renewal = Renewal::Swap);
    let backend = EtcdBackend::lazy(config).unwrap();
    for lost in ["request", "reply"] {
        let asked = request(lost);
        let held = backend.acquire(&call(), &asked).await.unwrap();
        let old = server.lease_of(&hex(&asked)).await;
        let short = call_of(Duration::from_millis(600));
        if lost == "request" {
            wire.hold(&hex(&asked));
            let unknown = backend.renew(&short, &held, TTL).await.unwrap_err();
            assert_eq!(unknown.kind(), ErrorKind::Unknown, "{unknown:?}");
        } else {
            // The grant is answered, then the lease changes hands, and nobody hears of it.
            let mut renewal = Box::pin(backend.renew(&short, &held, TTL));
            let swapped = async {
                eventually("the lease is swapped", async || server.lease_of(&hex(&asked)).await != old).await;
            };
            tokio::select! {
                biased;
                () = swapped => {}
                _ = &mut renewal => {}
            }
        }
        let renewed = backend.renew(&call(), &held, TTL).await.unwrap();
        assert!(renewed.deadline > held.deadline && renewed.fence == held.fence);
        let lease = server.lease_of(&hex(&asked)).await;
        assert_ne!(lease, old);
        // The copy that was held arrives now, and changes nothing.
        wire.deliver();
        let renewed = backend.renew(&call(), &renewed, TTL).await.unwrap();
        assert_eq!(backend.release(&call(), &renewed).await.unwrap(), Released::Now);
    }
    backend.close().await;
    assert_eq!(server.places().await, [""; 0]);
}

#[tokio::test]
async fn a_renewal_may_ask_for_more_than_the_acquire_did() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let held = backend.acquire(&call(), &request_of("k", Duration::from_secs(2))).await.unwrap();
    let longer = Duration::from_secs(20);
    let renewed = backend.renew(&call(), &held, longer).await.unwrap();
    assert!(call().now().until(renewed.deadline) > Duration::from_secs(18), "{renewed:?}");
    assert_eq!(renewed.fence, held.fence);
    let renewed = backend.renew(&call(), &renewed, longer).await.unwrap();
    assert_eq!(backend.release(&call(), &renewed).await.unwrap(), Released::Now);
}

#[tokio::test]
async fn many_are_renewed_together_and_the_lost_ones_are_told_apart() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let mut leases = Vec::new();
    let mut asked = Vec::new();
    for n in 0..250 {
        let request = request_of(&format!("many/{n}"), TTL);
        leases.push(backend.acquire(&call(), &request).await.unwrap());
        asked.push(request);
    }
    // One is revoked, one is deleted, one is released, one hangs on another lease now, one was granted elsewhere.
    let mut admin = server.admin().await;
    admin.lease_revoke(server.lease_of(&hex(&asked[3])).await).await.unwrap();
    admin.delete(format!("lockcore//q/many/120:{}", hex(&asked[120])), None).await.unwrap();
    backend.release(&call(), &leases[249]).await.unwrap();
    let swapping =
        EtcdBackend::lazy(EtcdConfig::new([&server.url]).with(|c| c.renewal = Renewal::Swap)).unwrap();
    let _swapped = swapping.renew(&call(), &leases[7], TTL).await.unwrap();
    leases.push(swapping.acquire(&call(), &request("elsewhere")).await.unwrap());
    let lost = [3, 120, 249];
    let before = log_entries(&server).await;
    let answers = backend.renew_many(&call(), &leases, TTL).await;
    let entries = log_entries(&server).await - before;
    assert_eq!(answers.len(), leases.len());
    for (n, (answer, lease)) in answers.iter().zip(&leases).enumerate() {
        match answer {
            Ok(renewed) => {
                assert!(!lost.contains(&n), "{n} was renewed");
                assert!(renewed.deadline > lease.deadline && renewed.stamp() == lease.stamp());
            }
            Err(error) => {
                assert!(lost.contains(&n), "{n}: {error:?}");
                assert_eq!(error.kind(), ErrorKind::Lost);
            }
        }
    }
    assert!(entries < 30, "{entries} entries of the log for 251 renewals");
    let again = swapping.renew_many(&call(), &leases[8..50], TTL).await;
    assert!(again.iter().all(Result::is_ok), "{again:?}");
    for lease in &leases {
        let _ = backend.release(&call(), lease).await.unwrap();
    }
    assert_eq!(server.places().await, [""; 0]);
}
