//! The verbs against a real etcd.

mod common;
#[path = "common/wire.rs"]
mod wire;

use std::time::Duration;

use common::*;
use lockcore::backend::*;
use lockcore_etcd::{EtcdBackend, EtcdConfig, Renewal};
use wire::Wire;

#[tokio::test]
async fn a_floor_that_no_base_reaches_is_refused_before_anything_is_asked() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let beyond = request("a").above(Fence::new((1 << 62) + 1).unwrap());
    assert_eq!(backend.acquire(&call(), &beyond).await.unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(backend.inspect(&call(), beyond.name()).await.unwrap().holder, None, "a refusal holds a lock");
    assert_eq!(backend.inspect(&call(), beyond.name()).await.unwrap().waiters.unwrap_or(0), 0);
}

#[tokio::test]
async fn a_lock_is_taken_renewed_and_released_beside_a_longer_name() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let first = backend.acquire(&call(), &request("a")).await.unwrap();
    let refused = backend.acquire(&call(), &request("a")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Held);
    assert_eq!(refused.holder().unwrap().stamp(), first.stamp());
    let _held = backend.acquire(&call(), &request("a/b")).await.expect("a longer name is another lock");
    let renewed = backend.renew(&call(), &first, Duration::from_secs(5)).await.unwrap();
    assert!(renewed.deadline >= first.deadline);
    assert_eq!(backend.release(&call(), &first).await.unwrap(), Released::Now);
    assert_eq!(backend.release(&call(), &first).await.unwrap(), Released::AlreadyOver);
    let names = backend.list(&call(), None, None).await.unwrap();
    assert_eq!(names, [LockName::parse("a/b").unwrap()]);
    let second = backend.acquire(&call(), &request("a").above(Fence::new(1 << 61).unwrap())).await.unwrap();
    assert!(second.fence.get() > 1 << 61);
}

#[tokio::test]
async fn waiters_are_served_in_order_with_growing_fences() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let mut held = backend.acquire(&call(), &request("q")).await.unwrap();
    let mut waiters = Vec::new();
    for place in 1..=4 {
        let backend = backend.clone();
        let waiting = request("q").waiting_until(Moment::MAX);
        let other = backend.clone();
        waiters.push(tokio::spawn(async move { other.acquire(&call(), &waiting).await }));
        while backend.inspect(&call(), &held.name).await.unwrap().waiters != Some(place) {
            tokio::task::yield_now().await;
        }
    }
    for waiter in waiters {
        assert_eq!(backend.release(&call(), &held).await.unwrap(), Released::Now);
        let next = waiter.await.unwrap().unwrap();
        assert!(next.fence > held.fence);
        held = next;
    }
}

#[tokio::test]
async fn a_break_takes_a_fence_of_its_own_and_tells_the_holder() {
    let Some(server) = Server::start() else { return };
    let (backend, operator) = (server.backend().await, server.backend().await);
    let name = LockName::parse("b").unwrap();
    let held = backend.acquire(&call(), &request("b")).await.unwrap();
    let other = backend.acquire(&call(), &request("other")).await.unwrap();
    let refused = operator.break_lock(&call(), &name, Some(other.stamp())).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Held);
    assert_eq!(refused.holder().unwrap().stamp(), held.stamp());

    let ended = tokio::spawn({
        let (backend, held) = (backend.clone(), held.clone());
        async move { backend.ended(&call(), &held).await }
    });
    let broken = operator.break_lock(&call(), &name, Some(held.stamp())).await.unwrap();
    assert_eq!(broken.holder.unwrap().stamp(), held.stamp());
    assert!(broken.floor > held.fence);
    assert_eq!(ended.await.unwrap(), LostReason::Broken);
    let lost = backend.renew(&call(), &held, Duration::from_secs(5)).await.unwrap_err();
    assert_eq!(lost.lost_reason(), Some(LostReason::Broken));
    let next = operator.acquire(&call(), &request("b")).await.unwrap();
    assert!(next.fence > broken.floor);
    assert_eq!(backend.release(&call(), &held).await.unwrap(), Released::AlreadyOver);
    let _live = operator.renew(&call(), &next, Duration::from_secs(5)).await.expect("the next holder stays");
    operator.release(&call(), &next).await.unwrap();

    let empty = operator.break_lock(&call(), &name, None).await.unwrap();
    assert!(empty.holder.is_none() && empty.floor > next.fence);
    let last = backend.acquire(&call(), &request("b")).await.unwrap();
    assert!(last.fence > empty.floor);
    backend.release(&call(), &last).await.unwrap();
    backend.release(&call(), &other).await.unwrap();
    assert_eq!(server.places().await, [""; 0], "the mark goes with the lease");
}

#[tokio::test]
async fn a_break_spares_a_place_that_is_not_the_one_that_was_meant() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let mut admin = server.admin().await;
    let name = &LockName::parse("b").unwrap();
    let other = backend.acquire(&call(), &request("other")).await.unwrap();
    // An operator's, or of another version: no owner can be read from its name, so nobody knows its fence.
    admin.put("lockcore//q/b:odd", "", None).await.unwrap();
    let refused = backend.break_lock(&call(), name, Some(other.stamp())).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Held, "{refused:?}");
    assert!(refused.holder().is_none(), "{refused:?}");
    assert_eq!(server.places().await.len(), 2, "nothing was broken");
    let broken = backend.break_lock(&call(), name, None).await.unwrap();
    assert!(broken.holder.is_none());
    assert_eq!(server.places().await.len(), 1, "whoever it is was to go");
    backend.release(&call(), &other).await.unwrap();
}

#[tokio::test]
async fn a_break_looks_again_where_a_renewal_has_swapped_the_lease() {
    let Some(server) = Server::start() else { return };
    let wire = Wire::to(&server.url).await;
    let operator = EtcdBackend::lazy(EtcdConfig::new([&wire.url])).unwrap();
    let holder =
        EtcdBackend::lazy(EtcdConfig::new([&server.url]).with(|c| c.renewal = Renewal::Swap)).unwrap();
    let held = holder.acquire(&call(), &request("b")).await.unwrap();
    // The look is done, and what breaks the lock is on its way, with a mark for a lease that is gone by then.
    wire.hold("/broken/");
    let breaks = tokio::spawn({
        let (name, stamp) = (held.name.clone(), held.stamp());
        async move { operator.break_lock(&call(), &name, Some(stamp)).await }
    });
    wire.holds().await;
    let held = holder.renew(&call(), &held, Duration::from_secs(5)).await.unwrap();
    wire.deliver();
    let broken = breaks.await.unwrap().unwrap();
    assert_eq!(broken.holder.unwrap().stamp(), held.stamp());
    let lost = holder.renew(&call(), &held, Duration::from_secs(5)).await.unwrap_err();
    assert_eq!(lost.lost_reason(), Some(LostReason::Broken), "{lost:?}");
}

#[tokio::test]
async fn floors_are_raised_by_a_holder_and_from_outside_with_a_waiter_in_the_queue() {
    let Some(server) = Server::start() else { return };
    let (backend, other) = (server.backend().await, server.backend().await);
    let held = backend.acquire(&call(), &request("f")).await.unwrap();
    let waiting = request("f").waiting_until(Moment::MAX);
    let waiter = tokio::spawn(async move { other.acquire(&call(), &waiting).await });
    eventually("one waits", async || backend.inspect(&call(), &held.name).await.unwrap().waiters == Some(1))
        .await;
    let floor = Fence::new(held.fence.get() + 1_000_000_000_000).unwrap();
    backend.raise(&call(), &held, floor).await.unwrap();
    backend.raise(&call(), &held, floor).await.expect("raising again is nothing");
    let state = backend.inspect(&call(), &held.name).await.unwrap();
    assert_eq!(state.holder.unwrap().stamp(), held.stamp(), "the holder keeps its fence");
    let _live = backend.renew(&call(), &held, Duration::from_secs(5)).await.expect("and its lease");
    backend.release(&call(), &held).await.unwrap();
    let next = waiter.await.unwrap().unwrap();
    assert!(next.fence > floor, "{next:?} {floor:?}");
    let lost = backend.raise(&call(), &held, floor).await.unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::Lost);

    let floor = Fence::new(next.fence.get() + 7).unwrap();
    let stands = backend.raise_fence(&call(), &held.name, floor).await.unwrap();
    assert!(stands >= floor);
    assert!(backend.raise_fence(&call(), &held.name, Fence::MIN).await.unwrap() >= stands);
    // Its own backend granted it; this one finds it in the record.
    assert_eq!(backend.release(&call(), &next).await.unwrap(), Released::Now);
    let last = backend.acquire(&call(), &request("f")).await.unwrap();
    assert!(last.fence > stands);
}

#[tokio::test]
async fn another_connection_renews_resolves_and_releases_by_the_record() {
    let Some(server) = Server::start() else { return };
    let (first, second) = (server.backend().await, server.backend().await);
    let asked = request_of("r", Duration::from_secs(3));
    let held = first.acquire(&call(), &asked).await.unwrap();
    let Resolution::Adopted(adopted) = second.resolve(&call(), &asked).await.unwrap() else {
        panic!("the grant is on record")
    };
    assert!(adopted.deadline >= held.deadline);
    let third = server.backend().await;
    let renewed = third.renew(&call(), &adopted, Duration::from_secs(3)).await.unwrap();
    assert!(renewed.deadline > adopted.deadline && renewed.fence == adopted.fence);
    let fourth = server.backend().await;
    assert_eq!(fourth.release(&call(), &adopted).await.unwrap(), Released::Now);
    assert!(matches!(second.resolve(&call(), &asked).await.unwrap(), Resolution::Gone));
    assert_eq!(server.places().await, [""; 0]);
}

#[tokio::test]
async fn a_late_release_or_renewal_spares_the_same_owners_next_holding() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let asked = request("again");
    let first = backend.acquire(&call(), &asked).await.unwrap();
    assert_eq!(backend.release(&call(), &first).await.unwrap(), Released::Now);
    let second = backend.acquire(&call(), &asked).await.unwrap();
    assert!(second.fence > first.fence);
    for old in [&backend, &server.backend().await] {
        assert_eq!(old.release(&call(), &first).await.unwrap(), Released::AlreadyOver);
        let lost = old.renew(&call(), &first, Duration::from_secs(5)).await.unwrap_err();
        assert_eq!(lost.lost_reason(), Some(LostReason::Taken));
    }
    let _live =
        backend.renew(&call(), &second, Duration::from_secs(5)).await.expect("the newer holding stays");
    assert_eq!(backend.acquire(&call(), &request("again")).await.unwrap_err().kind(), ErrorKind::Held);
}

#[tokio::test]
async fn a_preflight_tells_of_old_versions_dead_members_and_the_shortest_ttl() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let version = server.admin().await.status().await.unwrap().version().to_owned();
    let found = backend.preflight(&call()).await.unwrap();
    assert_eq!(*found.capabilities.ttl.start(), Duration::from_secs(1));
    let told = found.findings.iter().any(|finding| finding.contains(&version));
    assert_eq!(told, revokes_live_leases(&version), "{:?}", found.findings);
    assert_eq!(server.leases().await, 0, "the probe is gone");

    let dead = "http://127.0.0.1:1";
    let pair = EtcdBackend::lazy(EtcdConfig::new([server.url.as_str(), dead])).unwrap();
    let found = pair.preflight(&call()).await.unwrap();
    assert!(found.findings.iter().any(|finding| finding.contains(dead)), "{:?}", found.findings);
    assert!(!found.capabilities.survives.pause, "nobody knows which version the dead one has");
}
