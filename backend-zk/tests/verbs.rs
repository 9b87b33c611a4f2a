//! The verbs against a real ZooKeeper.

mod common;

use std::time::Duration;

use common::*;
use lockcore::backend::*;
use lockcore_zk::{ZkBackend, ZkConfig};

const TTL: Duration = Duration::from_secs(2);

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
    let first = backend.acquire(&call(), &request("a").labelled("web-3:4711")).await.unwrap();
    let refused = backend.acquire(&call(), &request("a")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Held);
    let holder = refused.holder().unwrap();
    assert_eq!((holder.stamp(), holder.label.as_deref()), (first.stamp(), Some("web-3:4711")));
    let _held = backend.acquire(&call(), &request("a/b")).await.expect("a longer name is another lock");
    let renewed = backend.renew(&call(), &first, TTL).await.unwrap();
    assert!(renewed.deadline >= first.deadline);
    assert_eq!(server.places().await.len(), 2, "a refused try leaves no place");
    assert_eq!(backend.release(&call(), &first).await.unwrap(), Released::Now);
    assert_eq!(backend.release(&call(), &first).await.unwrap(), Released::AlreadyOver);
    let names = backend.list(&call(), None, None).await.unwrap();
    assert_eq!(names, ["a", "a/b"].map(|name| LockName::parse(name).unwrap()));
    let below = backend.list(&call(), Some(&names[0]), Some(&names[0])).await.unwrap();
    assert_eq!(below, [names[1].clone()]);
    let second = backend.acquire(&call(), &request("a").above(Fence::new(1 << 61).unwrap())).await.unwrap();
    assert!(second.fence.get() > 1 << 61);
}

#[tokio::test]
async fn a_label_that_no_server_would_take_is_refused_and_costs_nobody_the_session() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let held = backend.acquire(&call(), &request("held").labelled("ü".repeat(512))).await.unwrap();
    let (_, before) = server.place_of(&hex_of(&held)).await;
    for length in [1025, 4 << 20] {
        let asked = request("a").labelled("x".repeat(length));
        let refused = backend.acquire(&call(), &asked).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused:?}");
        assert!(refused.to_string().contains("1024"), "{refused}");
    }
    let state = backend.inspect(&call(), &held.name).await.unwrap();
    assert_eq!(state.holder.unwrap().label, Some("ü".repeat(512)));
    let held = backend.renew(&call(), &held, TTL).await.unwrap();
    assert_eq!(server.place_of(&hex_of(&held)).await.1.ephemeral_owner, before.ephemeral_owner);
    assert_eq!(backend.release(&call(), &held).await.unwrap(), Released::Now);
}

#[tokio::test]
async fn waiters_are_served_in_order_with_growing_fences() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let mut held = backend.acquire(&call(), &request("q")).await.unwrap();
    let mut waiters = Vec::new();
    for place in 1..=4 {
        waiters.push(waits(&backend, request("q").waiting_until(Moment::MAX), place).await);
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
    let long = Duration::from_secs(20);
    let held = backend.acquire(&call(), &request_of("b", long)).await.unwrap();
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
    let lost = backend.renew(&call(), &held, long).await.unwrap_err();
    assert_eq!(lost.lost_reason(), Some(LostReason::Broken));
    let next = operator.acquire(&call(), &request("b")).await.unwrap();
    assert!(next.fence > broken.floor);
    assert_eq!(backend.release(&call(), &held).await.unwrap(), Released::AlreadyOver);
    let _live = operator.renew(&call(), &next, TTL).await.expect("the next holder stays");
    operator.release(&call(), &next).await.unwrap();

    let empty = operator.break_lock(&call(), &name, None).await.unwrap();
    assert!(empty.holder.is_none() && empty.floor > next.fence);
    let last = backend.acquire(&call(), &request("b")).await.unwrap();
    assert!(last.fence > empty.floor);
    backend.release(&call(), &last).await.unwrap();
}

#[tokio::test]
async fn floors_are_raised_by_a_holder_and_from_outside_with_a_waiter_in_the_queue() {
    let Some(server) = Server::start() else { return };
    let (backend, other) = (server.backend().await, server.backend().await);
    let long = Duration::from_secs(20);
    let held = backend.acquire(&call(), &request_of("f", long)).await.unwrap();
    let waiter = waits(&other, request_of("f", long).waiting_until(Moment::MAX), 1).await;
    let floor = Fence::new(held.fence.get() + 1_000_000_000_000).unwrap();
    backend.raise(&call(), &held, floor).await.unwrap();
    backend.raise(&call(), &held, floor).await.expect("raising again is nothing");
    let state = backend.inspect(&call(), &held.name).await.unwrap();
    assert_eq!(state.holder.unwrap().stamp(), held.stamp(), "the holder keeps its fence");
    let _live = backend.renew(&call(), &held, long).await.expect("and its lease");
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
    let high = backend.high_water(&call()).await.unwrap().expect("the namespace has a base");
    assert!(high >= last.fence);
    backend.release(&call(), &last).await.unwrap();
    let free = backend.inspect(&call(), &held.name).await.unwrap();
    assert!(free.holder.is_none() && free.last_fence.is_some_and(|bound| bound >= last.fence));
}

#[tokio::test]
async fn another_connection_releases_by_the_record_and_neither_renews_nor_adopts() {
    let Some(server) = Server::start() else { return };
    let (first, second) = (server.backend().await, server.backend().await);
    let asked = request_of("r", Duration::from_secs(10));
    let held = first.acquire(&call(), &asked).await.unwrap();
    let refused = second.renew(&call(), &held, TTL).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported, "a session renews its own nodes only");
    assert_eq!(second.release(&call(), &held).await.unwrap(), Released::Now);
    assert_eq!(second.release(&call(), &held).await.unwrap(), Released::AlreadyOver);
    let lost = first.renew(&call(), &held, TTL).await.unwrap_err();
    assert_eq!(lost.lost_reason(), Some(LostReason::Taken));

    let asked = request_of("r", Duration::from_secs(10));
    let held = first.acquire(&call(), &asked).await.unwrap();
    let resolved = first.resolve(&call(), &asked).await.unwrap();
    assert_eq!(resolved, Resolution::Adopted(held.clone()), "its own session adopts the same grant");
    // A session that this process does not have may end at any moment: what stands on it is removed.
    assert_eq!(second.resolve(&call(), &asked).await.unwrap(), Resolution::Gone);
    assert_eq!(server.places().await, [""; 0]);
    let late = second.acquire(&call(), &asked).await.unwrap_err();
    assert_eq!(late.kind(), ErrorKind::Unavailable, "a late copy of what was given up");
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
        let lost = old.renew(&call(), &first, TTL).await.unwrap_err();
        assert_eq!(lost.lost_reason(), Some(LostReason::Taken));
    }
    let _live = backend.renew(&call(), &second, TTL).await.expect("the newer holding stays");
    assert_eq!(backend.acquire(&call(), &request("again")).await.unwrap_err().kind(), ErrorKind::Held);
}

#[tokio::test]
async fn many_leases_are_renewed_in_one_exchange_and_the_one_that_is_gone_alone_is_lost() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let long = Duration::from_secs(10);
    let mut leases = Vec::new();
    for n in 0..300 {
        leases.push(backend.acquire(&call(), &request_of(&format!("many/{n}"), long)).await.unwrap());
    }
    let (victim, _) = server.place_of(&hex_of(&leases[7])).await;
    server.admin().await.delete(&victim, None).await.unwrap();
    let before = server.number("zk_packets_received");
    let renewed = backend.renew_many(&call(), &leases, long).await;
    let packets = server.number("zk_packets_received") - before;
    assert!(packets < 20, "{packets} requests for one batch");
    for (n, answer) in renewed.into_iter().enumerate() {
        match answer {
            Ok(lease) => assert!(n != 7 && lease.deadline >= leases[n].deadline),
            Err(error) => assert_eq!((n, error.lost_reason()), (7, Some(LostReason::Taken)), "{error:?}"),
        }
    }
}

fn hex_of(lease: &Lease) -> String {
    lease.owner.expose().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test]
async fn a_lease_that_nobody_renews_ends_at_its_deadline_while_its_session_lives() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let ttl = Duration::from_millis(900);
    let quiet = backend.acquire(&call(), &request_of("quiet", ttl)).await.unwrap();
    let mut busy = backend.acquire(&call(), &request_of("busy", ttl)).await.unwrap();
    let (owner, deadline) = (server.place_of(&hex_of(&quiet)).await.1.ephemeral_owner, quiet.deadline);
    eventually("the silent lease is removed", async || {
        busy = backend.renew(&call(), &busy, ttl).await.unwrap();
        !server.places().await.iter().any(|path| path.contains(&hex_of(&quiet)))
    })
    .await;
    let now = BootClock.now();
    assert!(now >= deadline, "{:?} before its deadline", now.until(deadline));
    assert!(deadline.until(now) < ttl * 3, "{:?} after its deadline", deadline.until(now));
    assert_eq!(server.place_of(&hex_of(&busy)).await.1.ephemeral_owner, owner, "both stood on one session");
    let lost = backend.renew(&call(), &quiet, ttl).await.unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::Lost);
}

#[tokio::test]
async fn a_ttl_beyond_the_servers_limit_is_refused_by_name_and_the_limit_is_learnt() {
    let Some(server) = Server::with("") else { return };
    let backend = ZkBackend::lazy(ZkConfig::new([&server.address])).unwrap();
    assert_eq!(*backend.capabilities().ttl.end(), Duration::from_secs(86_400));
    let refused = backend.acquire(&call(), &request_of("x", Duration::from_secs(30))).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    assert!(refused.to_string().contains("4s"), "{refused}");
    assert_eq!(*backend.capabilities().ttl.end(), Duration::from_secs(4));
    let longest = Duration::from_secs(4);
    let sent = BootClock.now();
    let held = backend.acquire(&call(), &request_of("x", longest)).await.unwrap();
    assert!(sent.until(held.deadline) <= longest);
    assert_eq!(backend.release(&call(), &held).await.unwrap(), Released::Now);
}

#[tokio::test]
async fn a_preflight_tells_of_a_lonely_server_a_dead_one_and_learns_the_limits() {
    let Some(server) = Server::with("") else { return };
    let backend = ZkBackend::lazy(ZkConfig::new([server.address.as_str(), "127.0.0.1:1"])).unwrap();
    let found = backend.preflight(&call()).await.unwrap();
    assert_eq!(*found.capabilities.ttl.end(), Duration::from_secs(4));
    let tells = |text: &str| found.findings.iter().any(|finding| finding.contains(text));
    assert!(tells("127.0.0.1:1 does not answer") && tells("stand alone"), "{:?}", found.findings);
    assert_eq!(found.findings.len(), 2, "{:?}", found.findings);
}

#[tokio::test]
async fn phases_are_replaced_in_one_step_and_bind_their_members() {
    let Some(server) = Server::start() else { return };
    let (backend, operator) = (server.backend().await, server.backend().await);
    assert_eq!(backend.phase_read(&call()).await.unwrap(), None);
    let closed = backend.join(&call(), "from", TTL).await.unwrap_err();
    assert_eq!(closed.kind(), ErrorKind::Unavailable);
    assert_eq!(backend.high_water(&call()).await.unwrap().map(|_| ()), Some(()));

    let mut first = PhaseRecord::new("redis to zookeeper", 1);
    first.open = vec!["from".into(), "both".into()];
    assert!(operator.phase_cas(&call(), None, &first).await.unwrap());
    assert!(!operator.phase_cas(&call(), None, &first).await.unwrap(), "it is there already");
    assert_eq!(backend.phase_read(&call()).await.unwrap().as_ref(), Some(&first));

    let member = backend.join(&call(), "from", TTL).await.unwrap();
    let _another = operator.join(&call(), "from", TTL).await.expect("members do not exclude each other");
    let member = backend.renew(&call(), &member, TTL).await.unwrap();
    let mut second = first.clone();
    (second.epoch, second.open) = (2, vec!["both".into()]);
    second.floor = Some(Fence::new(77).unwrap());
    let wrong = PhaseRecord::new("another", 1);
    assert!(!operator.phase_cas(&call(), Some(&wrong), &second).await.unwrap());
    assert!(operator.phase_cas(&call(), Some(&first), &second).await.unwrap());
    assert_eq!(backend.phase_read(&call()).await.unwrap().as_ref(), Some(&second));
    let closed = backend.join(&call(), "from", TTL).await.unwrap_err();
    assert_eq!(closed.kind(), ErrorKind::Unavailable);
    let member = backend.renew(&call(), &member, TTL).await.expect("who is in stays until it leaves");
    assert_eq!(backend.leave(&call(), &member).await.unwrap(), Released::Now);
    assert_eq!(backend.leave(&call(), &member).await.unwrap(), Released::AlreadyOver);
}

#[tokio::test]
async fn namespaces_and_roots_keep_locks_apart() {
    let Some(server) = Server::start() else { return };
    let rooted = ZkConfig::parse(&format!("{}/shop/locks", server.address)).unwrap();
    let (plain, rooted) = (server.backend().await, ZkBackend::lazy(rooted).unwrap());
    let there = call().in_namespace("prod").unwrap();
    let asked = request("same");
    let held = [
        plain.acquire(&call(), &asked).await.unwrap(),
        plain.acquire(&there, &request("same")).await.unwrap(),
        rooted.acquire(&call(), &request("same")).await.unwrap(),
    ];
    assert_eq!(plain.acquire(&there, &request("same")).await.unwrap_err().kind(), ErrorKind::Held);
    assert_eq!(rooted.acquire(&call(), &request("same")).await.unwrap_err().kind(), ErrorKind::Held);
    assert_eq!(plain.release(&there, &held[0]).await.unwrap(), Released::AlreadyOver);
    assert_eq!(plain.release(&call(), &held[0]).await.unwrap(), Released::Now);
}

#[tokio::test]
async fn a_backend_that_is_closed_or_dropped_leaves_nothing() {
    let Some(server) = Server::start() else { return };
    let long = Duration::from_secs(60);
    let (closed, dropped) = (server.backend().await, server.backend().await);
    let _one = closed.acquire(&call(), &request_of("one", long)).await.unwrap();
    let _two = dropped.acquire(&call(), &request_of("two", long)).await.unwrap();
    assert_eq!(server.places().await.len(), 2);
    closed.close().await;
    drop(dropped);
    eventually("no place is left", async || server.places().await.is_empty()).await;
    let refused = closed.acquire(&call(), &request("one")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Closed);
}

#[tokio::test]
async fn a_user_has_its_nodes_for_itself() {
    let Some(server) = Server::start() else { return };
    let of = |user: &str, password: &str| {
        let config = ZkConfig::new([&server.address]).with(|c| {
            c.user = Some(user.into());
            c.password = Some(password.into());
        });
        ZkBackend::lazy(config).unwrap()
    };
    let (owner, wrong) = (of("locks", "s3cret"), of("locks", "guessed"));
    let held = owner.acquire(&call(), &request("mine")).await.unwrap();
    assert!(!format!("{owner:?}").contains("s3cret"), "{owner:?}");
    for stranger in [&wrong, &ZkBackend::lazy(ZkConfig::new([&server.address])).unwrap()] {
        let refused = stranger.acquire(&call(), &request("mine")).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unauthorized, "{refused:?}");
        assert_eq!(stranger.release(&call(), &held).await.unwrap_err().kind(), ErrorKind::Unauthorized);
    }
    assert_eq!(of("locks", "s3cret").release(&call(), &held).await.unwrap(), Released::Now);
}
