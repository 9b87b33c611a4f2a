//! The backend against servers of its own.

#![expect(clippy::print_stdout, reason = "what is measured is printed, not asserted")]
#![expect(clippy::large_futures, reason = "tests join whole stories")]

use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
    time::{Duration, Instant},
};

use lockcore::{EventKind, LockClient, backend::*};
use lockcore_conformance::faultline::{Direction, Fate, Faultline};
use rustix::process::Signal;

use crate::{
    RedisBackend, RedisConfig,
    wire::{self, Acquired, Ask, FENCE_LIMIT, Keys, hex},
};

mod cluster;
mod errors;
mod phases;
mod redlock;
mod replicas;
mod sentinel;
mod server;
#[cfg(feature = "tls")]
mod tls;

use server::{Server, WATCHDOG};

const TTL: Duration = Duration::from_secs(30);
const MARGIN: Duration = Duration::from_secs(7 * 86_400);

fn config(server: &Server) -> RedisConfig {
    RedisConfig::new("127.0.0.1", server.port)
}

async fn start() -> Option<(Server, RedisBackend)> {
    let server = Server::start().await?;
    let backend = RedisBackend::connect(config(&server)).await.unwrap();
    Some((server, backend))
}

fn call() -> Call {
    budget(Duration::from_secs(10))
}

fn budget(budget: Duration) -> Call {
    Call::for_tests(Arc::new(BootClock), budget)
}

fn name(text: &str) -> LockName {
    LockName::parse(text).unwrap()
}

fn request(text: &str) -> AcquireRequest {
    AcquireRequest::new(name(text), TTL)
}

fn waiting(text: &str, budget: Duration) -> (Call, AcquireRequest) {
    let call = self::budget(budget);
    let end = call.deadline();
    (call, request(text).waiting_until(end))
}

fn keys(text: &str) -> Keys {
    Keys::new("", &name(text))
}

fn gone(text: &str, request: &AcquireRequest) -> String {
    format!("lockcore::{{{text}}}:gone:{}", hex(request.owner()))
}

async fn in_time<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(WATCHDOG, future).await.expect("it did not end")
}

/// One copy of a request, as it may reach the server at any time.
async fn copy(backend: &RedisBackend, request: &AcquireRequest, not_after: u64) -> Result<Acquired> {
    let call = call();
    let ask = Ask {
        owner: request.owner(),
        ttl: request.ttl(),
        floor: request.floor(),
        not_after,
        margin: MARGIN,
        label: request.label(),
    };
    let keys = Keys::new("", request.name());
    let answer = wire::acquire(&mut backend.road().to(&keys.lock), &call, &keys, &ask).await?;
    Ok(answer.expect("a single server sends nothing on").1)
}

async fn server_us(backend: &RedisBackend) -> u64 {
    let call = call();
    backend.standing_link(&call).await.server_time(call.now())
}

fn in_a_minute(us: u64) -> u64 {
    us + 60_000_000
}

#[tokio::test]
async fn a_grant_writes_the_documented_keys_and_a_fence_of_the_servers_time() {
    let Some((server, backend)) = start().await else { return };
    let before = server_us(&backend).await;
    let request = request("a").labelled("web:1");
    let lease = backend.acquire(&call(), &request).await.unwrap();
    let fence = lease.fence.get();
    assert!(u64::try_from(fence).unwrap().abs_diff(before) < 5_000_000, "{fence} is not near {before}");
    let value = server.get("lockcore::{a}:lock").await.unwrap();
    assert_eq!(value, format!("{}|{fence}|{fence}|web:1", hex(request.owner())));
    assert_eq!(server.get("lockcore::{a}:fence").await.unwrap(), format!("{fence}|{}", hex(request.owner())));
    let left = server.pttl("lockcore::{a}:lock").await;
    assert!((20_000..=30_000).contains(&left), "{left} ms are left");
    let kept = server.pttl("lockcore::{a}:fence").await;
    assert!((604_700_000..=604_800_001).contains(&kept), "the fence is kept for {kept} ms");
    let all: Vec<String> = server.raw(&["KEYS", "*"]).await.unwrap();
    assert_eq!(all.len(), 2, "{all:?}");
}

#[tokio::test]
async fn asked_again_the_same_owner_is_told_the_same_grant_and_what_is_left() {
    let Some((server, backend)) = start().await else { return };
    let request = request("a");
    let first = backend.acquire(&call(), &request).await.unwrap();
    let _: i64 = server.raw(&["PEXPIRE", "lockcore::{a}:lock", "7000"]).await.unwrap();
    let again = backend.acquire(&call(), &request).await.unwrap();
    assert_eq!((first.owner, first.fence), (again.owner, again.fence));
    let left = call().now().until(again.deadline);
    assert!(left < Duration::from_secs(7), "the second answer believes in {left:?}");
    assert!(server.pttl("lockcore::{a}:lock").await <= 7000, "the TTL was set anew");
    let other = backend.acquire(&call(), &self::request("a").labelled("x")).await.unwrap_err();
    assert_eq!(other.kind(), ErrorKind::Held);
    let holder = other.holder().unwrap();
    assert_eq!((holder.owner, holder.fence), (first.owner.digest(), first.fence));
    assert!(holder.remaining <= Duration::from_secs(7) && holder.since.is_some(), "{holder:?}");
}

#[tokio::test]
async fn a_request_asked_again_after_a_raise_is_told_its_own_fence() {
    let Some((_server, backend)) = start().await else { return };
    let request = request("a");
    let lease = backend.acquire(&call(), &request).await.unwrap();
    let floor = Fence::new(lease.fence.get() + 1000).unwrap();
    backend.raise(&call(), &lease, floor).await.unwrap();
    assert_eq!(backend.raise_fence(&call(), &name("a"), floor).await.unwrap(), floor);
    assert_eq!(backend.acquire(&call(), &request).await.unwrap().fence, lease.fence);
    let _ = backend.renew(&call(), &lease, TTL).await.unwrap();
    backend.release(&call(), &lease).await.unwrap();
    let next = backend.acquire(&call(), &self::request("a")).await.unwrap();
    assert!(next.fence > floor, "{:?} is not above {floor:?}", next.fence);
}

#[tokio::test]
async fn a_cancel_that_overtakes_its_acquire_keeps_it_from_being_granted() {
    let Some((server, backend)) = start().await else { return };
    let request = request("a");
    let us = server_us(&backend).await;
    // The request is held up; the cancel arrives first, from a backend that knows nothing of the request.
    let other = RedisBackend::connect(config(&server)).await.unwrap();
    assert_eq!(other.resolve(&call(), &request).await.unwrap(), Resolution::Gone);
    let late = copy(&backend, &request, in_a_minute(us)).await.unwrap();
    assert!(matches!(late, Acquired::Over), "{late:?}");
    assert_eq!(server.get("lockcore::{a}:lock").await, None);
    assert_eq!(server.get("lockcore::{a}:fence").await, None);
    let kept = server.pttl(&gone("a", &request)).await;
    assert!((29_000..=31_000).contains(&kept), "the mark stays for {kept} ms");
    assert_eq!(backend.acquire(&call(), &request).await.unwrap_err().kind(), ErrorKind::Unavailable);
}

#[tokio::test]
async fn an_abandoned_grant_is_removed_and_never_comes_back() {
    let Some((server, backend)) = start().await else { return };
    let request = request("a");
    let us = server_us(&backend).await;
    assert!(matches!(copy(&backend, &request, in_a_minute(us)).await.unwrap(), Acquired::Ours { .. }));
    backend.abandon(&call(), &request).await.unwrap();
    assert_eq!(server.get("lockcore::{a}:lock").await, None);
    assert!(matches!(copy(&backend, &request, in_a_minute(us)).await.unwrap(), Acquired::Over));
    backend.abandon(&call(), &request).await.unwrap();
    let next = backend.acquire(&call(), &self::request("a")).await.unwrap();
    // Nor does it touch the next holder.
    backend.abandon(&call(), &request).await.unwrap();
    let _ = backend.renew(&call(), &next, TTL).await.unwrap();
}

#[tokio::test]
async fn an_unanswered_acquire_is_adopted_with_what_is_left() {
    let Some((server, backend)) = start().await else { return };
    let request = request("a");
    let us = server_us(&backend).await;
    let Acquired::Ours { fence, .. } = copy(&backend, &request, in_a_minute(us)).await.unwrap() else {
        panic!()
    };
    let _: i64 = server.raw(&["PEXPIRE", "lockcore::{a}:lock", "9000"]).await.unwrap();
    let Resolution::Adopted(lease) = backend.resolve(&call(), &request).await.unwrap() else { panic!() };
    assert_eq!((lease.fence, &lease.owner), (fence, request.owner()));
    assert!(call().now().until(lease.deadline) < Duration::from_secs(9));
}

#[tokio::test]
async fn a_third_copy_after_the_release_is_granted_nothing() {
    let Some((server, backend)) = start().await else { return };
    let request = request("a");
    // The first copy is not answered in time, the second is; the third is still under way.
    server.signal(Signal::STOP);
    let error = backend.acquire(&budget(Duration::from_millis(100)), &request).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
    server.signal(Signal::CONT);
    let lease = in_time(async {
        loop {
            match backend.acquire(&call(), &request).await {
                Ok(lease) => return lease,
                Err(error) => assert!(error.kind().is_transient(), "{error}"),
            }
        }
    })
    .await;
    let us = server_us(&backend).await;
    assert_eq!(backend.release(&call(), &lease).await.unwrap(), Released::Now);
    let third = copy(&backend, &request, in_a_minute(us)).await.unwrap();
    assert!(matches!(third, Acquired::Over), "{third:?}");
    assert_eq!(server.get(&gone("a", &request)).await.as_deref(), Some("gone"));
}

#[tokio::test]
async fn a_release_without_doubt_leaves_no_mark() {
    let Some((server, backend)) = start().await else { return };
    let request = request("a");
    let lease = backend.acquire(&call(), &request).await.unwrap();
    assert_eq!(backend.release(&call(), &lease).await.unwrap(), Released::Now);
    assert_eq!(backend.release(&call(), &lease).await.unwrap(), Released::AlreadyOver);
    let all: Vec<String> = server.raw(&["KEYS", "*"]).await.unwrap();
    assert_eq!(all, ["lockcore::{a}:fence"]);
}

#[tokio::test]
async fn a_copy_after_its_time_does_nothing() {
    let Some((server, backend)) = start().await else { return };
    let us = server_us(&backend).await;
    let late = copy(&backend, &request("a"), us - 1_000_000).await.unwrap();
    assert!(matches!(late, Acquired::Late), "{late:?}");
    let all: Vec<String> = server.raw(&["KEYS", "*"]).await.unwrap();
    assert!(all.is_empty(), "{all:?}");
}

#[tokio::test]
async fn a_wrong_estimate_of_the_servers_clock_costs_one_more_exchange() {
    let Some((_server, backend)) = start().await else { return };
    const HOUR: i64 = 3_600_000_000;
    for (step, lock) in [(-HOUR, "behind"), (HOUR, "ahead")] {
        backend.standing_link(&call()).await.misjudge(step);
        let lease = backend.acquire(&call(), &request(lock)).await.unwrap();
        backend.release(&call(), &lease).await.unwrap();
        let us = server_us(&backend).await;
        let fence = u64::try_from(lease.fence.get()).unwrap();
        assert!(us.abs_diff(fence) < 5_000_000, "the answer did not correct the estimate: {us}, {fence}");
    }
}

#[tokio::test]
async fn a_renewal_moves_the_end_never_shortens_and_never_creates() {
    let Some((server, backend)) = start().await else { return };
    let lease = backend.acquire(&call(), &request("a")).await.unwrap();
    let shorter = backend.renew(&call(), &lease, Duration::from_secs(2)).await.unwrap();
    assert!(server.pttl("lockcore::{a}:lock").await > 20_000, "a renewal shortened the lease");
    assert!(shorter.deadline >= lease.deadline);
    let longer = backend.renew(&call(), &lease, Duration::from_secs(90)).await.unwrap();
    assert!(server.pttl("lockcore::{a}:lock").await > 80_000);
    assert!(longer.deadline > lease.deadline);
    assert_eq!((longer.owner, longer.fence), (lease.owner, lease.fence));

    let _: i64 = server.raw(&["DEL", "lockcore::{a}:lock"]).await.unwrap();
    let error = backend.renew(&call(), &lease, TTL).await.unwrap_err();
    assert_eq!((error.kind(), error.lost_reason()), (ErrorKind::Lost, Some(LostReason::Taken)));
    assert_eq!(server.get("lockcore::{a}:lock").await, None, "a renewal created the lock");

    let next = backend.acquire(&call(), &request("a")).await.unwrap();
    let error = backend.renew(&call(), &lease, TTL).await.unwrap_err();
    assert_eq!(error.lost_reason(), Some(LostReason::Taken));
    assert_eq!(backend.release(&call(), &lease).await.unwrap(), Released::AlreadyOver);
    let _ = backend.renew(&call(), &next, TTL).await.unwrap();
}

#[tokio::test]
async fn a_lease_that_ended_by_its_ttl_is_lost_as_expired_and_free() {
    let Some((server, backend)) = start().await else { return };
    let short = AcquireRequest::new(name("a"), Duration::from_millis(40));
    let lease = backend.acquire(&call(), &short).await.unwrap();
    in_time(async { while server.get("lockcore::{a}:lock").await.is_some() {} }).await;
    let error = backend.renew(&call(), &lease, TTL).await.unwrap_err();
    assert_eq!(error.lost_reason(), Some(LostReason::Expired));
    assert_eq!(backend.release(&call(), &lease).await.unwrap(), Released::AlreadyOver);
    let next = backend.acquire(&call(), &request("a")).await.unwrap();
    assert!(next.fence > lease.fence);
}

#[tokio::test]
async fn many_renewals_are_answered_in_order_also_by_a_server_that_forgot_the_script() {
    let Some((server, backend)) = start().await else { return };
    let mut leases = Vec::new();
    for i in 0..20 {
        leases.push(backend.acquire(&call(), &request(&format!("many/{i}"))).await.unwrap());
    }
    backend.release(&call(), &leases[7]).await.unwrap();
    for flush in [false, true] {
        if flush {
            let _: String = server.raw(&["SCRIPT", "FLUSH"]).await.unwrap();
        }
        let answers = backend.renew_many(&call(), &leases, TTL).await;
        assert_eq!(answers.len(), leases.len());
        for (i, (lease, answer)) in leases.iter().zip(answers).enumerate() {
            match answer {
                Ok(renewed) => assert_eq!((renewed.name, renewed.fence), (lease.name.clone(), lease.fence)),
                Err(error) => assert_eq!((i, error.kind()), (7, ErrorKind::Lost), "{error}"),
            }
        }
    }
}

#[tokio::test]
async fn every_verb_survives_a_flush_of_the_scripts() {
    let Some((server, backend)) = start().await else { return };
    let flush = async || server.raw::<String>(&["SCRIPT", "FLUSH"]).await.unwrap();
    let request = request("a");
    flush().await;
    let lease = backend.acquire(&call(), &request).await.unwrap();
    flush().await;
    let _ = backend.renew(&call(), &lease, TTL).await.unwrap();
    flush().await;
    backend.raise(&call(), &lease, lease.fence).await.unwrap();
    flush().await;
    backend.inspect(&call(), &name("a")).await.unwrap();
    flush().await;
    assert!(matches!(backend.resolve(&call(), &request).await.unwrap(), Resolution::Adopted(_)));
    flush().await;
    assert_eq!(backend.release(&call(), &lease).await.unwrap(), Released::Now);
    flush().await;
    backend.raise_fence(&call(), &name("a"), lease.fence).await.unwrap();
    flush().await;
    backend.break_lock(&call(), &name("a"), None).await.unwrap();
}

#[tokio::test]
async fn floors_are_exact_and_kept_without_end_while_they_are_ahead_of_the_clock() {
    let Some((server, backend)) = start().await else { return };
    let far = 9_000_000_000_000_001_i64;
    let floor = Fence::new(far).unwrap();
    let lease = backend.acquire(&call(), &request("a").above(floor)).await.unwrap();
    assert_eq!(lease.fence.get(), far + 1);
    let value = server.get("lockcore::{a}:fence").await.unwrap();
    assert!(value.starts_with("9000000000000002|"), "{value}");
    assert!(server.get("lockcore::{a}:lock").await.unwrap().contains("|9000000000000002|"));
    assert_eq!(server.pttl("lockcore::{a}:fence").await, -1, "a fence ahead of the clock is collected");
    backend.release(&call(), &lease).await.unwrap();
    assert_eq!(backend.acquire(&call(), &request("a")).await.unwrap().fence.get(), far + 2);
    // A floor below the clock does not hold the fence back.
    let low = backend.acquire(&call(), &request("b").above(Fence::MIN)).await.unwrap();
    assert!(low.fence.get() > 1_600_000_000_000_000);
}

#[tokio::test]
async fn a_fence_at_the_limit_is_refused_and_never_wraps() {
    let Some((server, backend)) = start().await else { return };
    for floor in [FENCE_LIMIT - 1, FENCE_LIMIT, i64::MAX] {
        let floor = Fence::new(floor).unwrap();
        let error = backend.acquire(&call(), &request("a").above(floor)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert_eq!(
            backend.raise_fence(&call(), &name("a"), floor).await.unwrap_err().kind(),
            ErrorKind::Invalid
        );
        // The script refuses by itself, too.
        let us = server_us(&backend).await;
        let error = copy(&backend, &request("a").above(floor), in_a_minute(us)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
    let all: Vec<String> = server.raw(&["KEYS", "*"]).await.unwrap();
    assert!(all.is_empty(), "{all:?}");
    let highest = Fence::new(FENCE_LIMIT - 2).unwrap();
    backend.raise_fence(&call(), &name("a"), highest).await.unwrap();
    let lease = backend.acquire(&call(), &request("a")).await.unwrap();
    assert_eq!(lease.fence.get(), FENCE_LIMIT - 1);
    backend.release(&call(), &lease).await.unwrap();
    assert_eq!(backend.acquire(&call(), &request("a")).await.unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(backend.break_lock(&call(), &name("a"), None).await.unwrap_err().kind(), ErrorKind::Invalid);
}

#[tokio::test]
async fn a_raise_is_for_the_holder_on_record_only_and_never_lowers() {
    let Some((server, backend)) = start().await else { return };
    let lease = backend.acquire(&call(), &request("a")).await.unwrap();
    let high = Fence::new(lease.fence.get() + 1_000_000_000_000).unwrap();
    backend.raise(&call(), &lease, high).await.unwrap();
    backend.raise(&call(), &lease, Fence::MIN).await.unwrap();
    let value = server.get("lockcore::{a}:fence").await.unwrap();
    assert_eq!(value, format!("{high}|{}", hex(&lease.owner)));
    backend.release(&call(), &lease).await.unwrap();
    let higher = Fence::new(high.get() + 5).unwrap();
    assert_eq!(backend.raise(&call(), &lease, higher).await.unwrap_err().kind(), ErrorKind::Lost);
    assert!(server.get("lockcore::{a}:fence").await.unwrap().starts_with(&high.to_string()));
    assert_eq!(backend.raise_fence(&call(), &name("a"), Fence::MIN).await.unwrap(), high);
    assert_eq!(backend.raise_fence(&call(), &name("a"), higher).await.unwrap(), higher);
    assert_eq!(backend.raise_fence(&call(), &name("new"), Fence::MIN).await.unwrap(), Fence::MIN);
}

#[tokio::test]
async fn a_break_takes_a_fence_of_its_own_and_tells_the_holder_why() {
    let Some((server, backend)) = start().await else { return };
    let victim = request("a").labelled("web:1");
    let lease = backend.acquire(&call(), &victim).await.unwrap();
    let other = Stamp::new(lease.fence, Owner::random().digest());
    let refused = backend.break_lock(&call(), &name("a"), Some(other)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Held);
    assert_eq!(refused.holder().unwrap().label.as_deref(), Some("web:1"));
    let _ = backend.renew(&call(), &lease, TTL).await.unwrap();

    let broken = backend.break_lock(&call(), &name("a"), Some(lease.stamp())).await.unwrap();
    assert_eq!(broken.holder.unwrap().stamp(), lease.stamp());
    assert!(broken.floor > lease.fence);
    let error = backend.renew(&call(), &lease, TTL).await.unwrap_err();
    assert_eq!(error.lost_reason(), Some(LostReason::Broken));
    let error = backend.raise(&call(), &lease, lease.fence).await.unwrap_err();
    assert_eq!(error.lost_reason(), Some(LostReason::Broken));
    let many = backend.renew_many(&call(), std::slice::from_ref(&lease), TTL).await;
    assert_eq!(many[0].as_ref().unwrap_err().lost_reason(), Some(LostReason::Broken));
    // A copy of the broken acquire does not bring it back.
    let us = server_us(&backend).await;
    assert!(matches!(copy(&backend, &victim, in_a_minute(us)).await.unwrap(), Acquired::Over));
    let next = backend.acquire(&call(), &request("a")).await.unwrap();
    assert!(next.fence > broken.floor);
    let error = backend.renew(&call(), &lease, TTL).await.unwrap_err();
    assert_eq!(error.lost_reason(), Some(LostReason::Broken));
    assert_eq!(backend.release(&call(), &lease).await.unwrap(), Released::AlreadyOver);
    let kept = server.pttl(&gone("a", &victim)).await;
    assert!((1..=31_000).contains(&kept), "the mark stays for {kept} ms");

    // Also where nobody holds, a break raises the fence.
    backend.release(&call(), &next).await.unwrap();
    let free = backend.break_lock(&call(), &name("a"), None).await.unwrap();
    assert!(free.holder.is_none() && free.floor > next.fence);
}

#[tokio::test]
async fn a_replica_grants_nothing_and_says_nothing_about_holders() {
    let Some((server, backend)) = start().await else { return };
    let held = backend.acquire(&call(), &request("held")).await.unwrap();
    let _: String = server.raw(&["REPLICAOF", "127.0.0.1", "1"]).await.unwrap();
    // The first goes by the connection that stood, the second by a new one.
    for lock in ["held", "free"] {
        let error = backend.acquire(&call(), &request(lock)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{lock}: {error}");
        assert_eq!(error.message().contains("at its master"), lock == "free", "{lock}: {error}");
    }
    let error = backend.renew(&call(), &held, TTL).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let refused = RedisBackend::connect(config(&server)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    assert!(refused.to_string().contains("replica"), "{refused}");
    let _: String = server.raw(&["REPLICAOF", "NO", "ONE"]).await.unwrap();
    let _ = backend.renew(&call(), &held, TTL).await.unwrap();
    let _ = backend.acquire(&call(), &request("free")).await.unwrap();
}

#[tokio::test]
async fn a_renewal_by_a_standing_connection_to_a_replica_is_refused() {
    let Some((server, backend)) = start().await else { return };
    let lease = backend.acquire(&call(), &request("a")).await.unwrap();
    let _: String = server.raw(&["REPLICAOF", "127.0.0.1", "1"]).await.unwrap();
    // Not even one that would not move the end.
    let error = backend.renew(&call(), &lease, Duration::from_secs(1)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}

#[tokio::test]
async fn a_standing_connection_to_a_replica_settles_nothing() {
    let Some(server) = Server::start().await else { return };
    let master = async || server.raw::<String>(&["REPLICAOF", "NO", "ONE"]).await.unwrap();
    for verb in 0..6 {
        let backend = RedisBackend::connect(config(&server)).await.unwrap();
        let (request, absent) = (request(&format!("a/{verb}")), request("never"));
        let lease = backend.acquire(&call(), &request).await.unwrap();
        let other = backend.acquire(&call(), &self::request(&format!("b/{verb}"))).await.unwrap();
        backend.release(&call(), &other).await.unwrap();
        let _: String = server.raw(&["REPLICAOF", "127.0.0.1", "1"]).await.unwrap();
        let call = call();
        let error = match verb {
            0 => backend.release(&call, &other).await.map(drop),
            1 => backend.release(&call, &lease).await.map(drop),
            2 => backend.resolve(&call, &request).await.map(drop),
            3 => backend.abandon(&call, &absent).await,
            4 => backend.raise(&call, &lease, Fence::MIN).await,
            _ => backend.raise_fence(&call, &lease.name, Fence::MIN).await.map(drop),
        }
        .expect_err("a replica settled something");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{verb}: {error}");
        master().await;
    }
}

#[tokio::test]
async fn keys_of_somebody_else_are_never_overwritten() {
    let Some((server, backend)) = start().await else { return };
    let _: i64 = server.raw(&["LPUSH", "lockcore::{list}:lock", "x"]).await.unwrap();
    let _: String = server.raw(&["SET", "lockcore::{text}:lock", "mine"]).await.unwrap();
    for lock in ["list", "text"] {
        let error = backend.acquire(&call(), &request(lock)).await.unwrap_err();
        assert_eq!((error.kind(), error.holder()), (ErrorKind::Held, None), "{error}");
        for error in [
            backend.inspect(&call(), &name(lock)).await.unwrap_err(),
            backend.break_lock(&call(), &name(lock), None).await.unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
        }
        assert_eq!(backend.resolve(&call(), &request(lock)).await.unwrap(), Resolution::Gone);
    }
    let _: i64 = server.raw(&["LPUSH", "lockcore::{list2}:fence", "x"]).await.unwrap();
    let _: String = server.raw(&["SET", "lockcore::{text2}:fence", "mine"]).await.unwrap();
    for lock in ["list2", "text2"] {
        for error in [
            backend.acquire(&call(), &request(lock)).await.unwrap_err(),
            backend.raise_fence(&call(), &name(lock), Fence::MIN).await.unwrap_err(),
            backend.break_lock(&call(), &name(lock), None).await.unwrap_err(),
            backend.inspect(&call(), &name(lock)).await.unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
        }
        assert_eq!(server.get(&keys(lock).lock).await, None);
    }
    let (list, text): (i64, Option<String>) = (
        server.raw(&["LLEN", "lockcore::{list}:lock"]).await.unwrap(),
        server.get("lockcore::{text}:lock").await,
    );
    assert_eq!((list, text.as_deref()), (1, Some("mine")));
    assert_eq!(server.get("lockcore::{text2}:fence").await.as_deref(), Some("mine"));
}

#[tokio::test]
async fn a_full_server_grants_nothing_and_still_renews_and_releases() {
    let Some((server, backend)) = start().await else { return };
    let lease = backend.acquire(&call(), &request("held")).await.unwrap();
    let _: String = server.raw(&["CONFIG", "SET", "maxmemory", "1"]).await.unwrap();
    let error = backend.acquire(&call(), &request("a")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    let all: Vec<String> = server.raw(&["KEYS", "*{a}*"]).await.unwrap();
    assert!(all.is_empty(), "a refused acquire left {all:?}");
    let _ = backend.renew(&call(), &lease, TTL).await.unwrap();
    assert_eq!(backend.release(&call(), &lease).await.unwrap(), Released::Now);
    // What was not granted can be told off, too.
    backend.abandon(&call(), &request("a")).await.unwrap();
}

#[tokio::test]
async fn a_server_that_stops_answers_unknown_in_time_and_is_usable_when_it_goes_on() {
    let Some((server, backend)) = start().await else { return };
    let lease = backend.acquire(&call(), &request("held")).await.unwrap();
    let before = backend.standing_link(&call()).await.id;
    server.signal(Signal::STOP);
    let patience = Duration::from_millis(150);
    let mut kinds = Vec::new();
    let requests: Vec<_> = (0..4).map(|i| request(&format!("a/{i}"))).collect();
    for request in &requests {
        let error = in_time(backend.acquire(&budget(patience), request)).await.unwrap_err();
        kinds.push(error.kind());
    }
    // Two silences are evidence; what comes after them finds nobody to connect to, and has certainly sent nothing.
    use ErrorKind::{Unavailable, Unknown};
    assert_eq!(kinds, [Unknown, Unknown, Unavailable, Unavailable]);
    server.signal(Signal::CONT);
    let _ = backend.renew(&call(), &lease, TTL).await.unwrap();
    assert_ne!(backend.standing_link(&call()).await.id, before, "the connection was not replaced");
    // The requests had their time while the server stood: it ran none of them.
    for request in &requests {
        assert_eq!(backend.resolve(&call(), request).await.unwrap(), Resolution::Gone);
    }
}

#[tokio::test]
async fn a_connection_that_was_closed_while_idle_is_replaced_before_the_next_request() {
    let Some((server, backend)) = start().await else { return };
    let lease = backend.acquire(&call(), &request("a")).await.unwrap();
    let link = backend.standing_link(&call()).await;
    let _: i64 = server.raw(&["CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"]).await.unwrap();
    in_time(async {
        while link.is_usable() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    let _ = backend.renew(&call(), &lease, TTL).await.unwrap();
    assert_eq!(backend.release(&call(), &lease).await.unwrap(), Released::Now);
}

#[tokio::test]
async fn a_connection_that_drops_under_a_request_is_unknown_and_settled_by_resolve() {
    let Some((server, backend)) = start().await else { return };
    server.signal(Signal::STOP);
    let request = request("a");
    let call = call();
    let mut acquire = pin!(backend.acquire(&call, &request));
    // Sent, and not answered.
    let first = poll_fn(|cx| Poll::Ready(acquire.as_mut().poll(cx))).await;
    assert!(first.is_pending());
    let port = server.port;
    let mut server = server;
    let restarted = async {
        server.restart().await;
        server
    };
    let (outcome, server) = in_time(async { tokio::join!(acquire, restarted) }).await;
    assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Unknown);
    assert_eq!(server.port, port);
    assert_eq!(backend.resolve(&self::call(), &request).await.unwrap(), Resolution::Gone);
}

#[tokio::test]
async fn a_server_that_lost_its_memory_grants_higher_fences_still() {
    let Some((mut server, backend)) = start().await else { return };
    let old = backend.acquire(&call(), &request("a")).await.unwrap();
    server.restart().await;
    let new = in_time(async {
        loop {
            match backend.acquire(&call(), &request("a")).await {
                Ok(lease) => return lease,
                Err(error) => assert!(error.kind().is_transient(), "{error}"),
            }
        }
    })
    .await;
    assert!(new.fence > old.fence, "{new:?} after {old:?}");
    assert_eq!(backend.renew(&call(), &old, TTL).await.unwrap_err().kind(), ErrorKind::Lost);
}

#[tokio::test]
async fn a_server_that_is_not_there_is_unavailable_and_named() {
    let Some((server, backend)) = start().await else { return };
    let config = config(&server);
    drop(server);
    let refused = RedisBackend::connect(config.clone()).await.unwrap_err();
    assert_eq!((refused.kind(), refused.verb()), (ErrorKind::Unavailable, Some(Verb::Connect)));
    let lazy = RedisBackend::lazy(config).unwrap();
    assert_eq!(lazy.acquire(&call(), &request("a")).await.unwrap_err().kind(), ErrorKind::Unavailable);
    let error = in_time(backend.acquire(&call(), &request("a"))).await.unwrap_err();
    assert!(error.to_string().starts_with("acquire \"a\" on redis: "), "{error}");
}

#[tokio::test]
async fn a_closed_backend_stays_closed() {
    let Some((_server, backend)) = start().await else { return };
    backend.close().await;
    assert_eq!(backend.acquire(&call(), &request("a")).await.unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn a_runtime_that_ended_takes_its_connection_along_and_the_next_call_makes_another() {
    let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let first = runtime();
    let Some((server, backend)) = first.block_on(start()) else { return };
    let lease = first.block_on(backend.acquire(&call(), &request("a"))).unwrap();
    drop(first);
    let second = runtime();
    second.block_on(async {
        let _ = backend.renew(&call(), &lease, TTL).await.unwrap();
        assert_eq!(backend.release(&call(), &lease).await.unwrap(), Released::Now);
        drop(server);
    });
}

#[tokio::test]
async fn a_second_connection_is_one_and_knows_what_is_in_doubt() {
    let Some((server, backend)) = start().await else { return };
    let lease = backend.acquire(&call(), &request("a")).await.unwrap();
    let count = async || -> usize {
        let clients: String = server.raw(&["CLIENT", "LIST", "TYPE", "normal"]).await.unwrap();
        clients.lines().count()
    };
    let before = count().await;
    let second = backend.second_connection(&call()).await.unwrap().unwrap();
    assert_eq!(count().await, before + 1);
    let _ = second.renew(&call(), &lease, TTL).await.unwrap();
    assert_eq!(second.release(&call(), &lease).await.unwrap(), Released::Now);
}

#[tokio::test]
async fn credentials_are_needed_and_never_shown() {
    let Some(server) = Server::with(&["--requirepass", "s3cret"]).await else { return };
    let without = RedisBackend::connect(config(&server)).await.unwrap_err();
    assert_eq!(without.kind(), ErrorKind::Unauthorized, "{without:?}");
    let wrong =
        RedisBackend::connect(config(&server).with(|c| c.password = Some("wr0ng".into()))).await.unwrap_err();
    assert_eq!(wrong.kind(), ErrorKind::Unauthorized, "{wrong:?}");
    let backend =
        RedisBackend::connect(config(&server).with(|c| c.password = Some("s3cret".into()))).await.unwrap();
    let _ = backend.acquire(&call(), &request("a")).await.unwrap();
    for shown in [format!("{without:?}"), format!("{wrong:?}"), format!("{backend:?}")] {
        assert!(!shown.contains("s3cret") && !shown.contains("wr0ng"), "{shown}");
    }
}

#[tokio::test]
async fn a_socket_file_and_another_database_work() {
    let Some(server) = Server::start().await else { return };
    let socket = RedisBackend::connect(RedisConfig::unix(server.socket()).with(|c| c.db = 3)).await.unwrap();
    let lease = socket.acquire(&call(), &request("a")).await.unwrap();
    let zero = RedisBackend::connect(config(&server)).await.unwrap();
    assert!(zero.inspect(&call(), &name("a")).await.unwrap().holder.is_none());
    socket.release(&call(), &lease).await.unwrap();
    let none = RedisBackend::connect(config(&server).with(|c| c.db = 999)).await.unwrap_err();
    assert_eq!(none.kind(), ErrorKind::Misconfigured, "{none}");
}

#[tokio::test]
async fn a_user_without_channels_releases_and_waits_by_looking() {
    let Some((server, admin)) = start().await else { return };
    let _: String = server
        .raw(&[
            "ACL",
            "SETUSER",
            "locks",
            "on",
            ">pw",
            "~lockcore:*",
            "resetchannels",
            "+@all",
            "-config",
            "-info",
            "-role",
        ])
        .await
        .unwrap();
    let user = RedisBackend::connect(config(&server).with(|c| {
        c.user = Some("locks".into());
        c.password = Some("pw".into());
        c.poll = Duration::from_millis(10);
    }))
    .await
    .unwrap();
    let lease = user.acquire(&call(), &request("a")).await.unwrap();
    assert_eq!(user.release(&call(), &lease).await.unwrap(), Released::Now);
    let held = admin.acquire(&call(), &request("a")).await.unwrap();
    let (call_w, request_w) = waiting("a", WATCHDOG / 2);
    let wait = user.acquire(&call_w, &request_w);
    let release = async { admin.release(&call(), &held).await.unwrap() };
    let (lease, _) = in_time(async { tokio::join!(wait, release) }).await;
    let _ = lease.unwrap();
    let preflight = user.preflight(&call()).await.unwrap();
    assert!(!preflight.capabilities.survives.restart);
    assert!(preflight.findings.iter().any(|f| f.contains("INFO")), "{preflight:?}");
}

#[tokio::test]
async fn the_permissions_that_the_readme_lists_suffice() {
    let Some((server, _admin)) = start().await else { return };
    let readme = include_str!("../README.md");
    let (_, list) = readme.split_once("The user needs").unwrap();
    let (list, _) = list.split_once("the keys").unwrap();
    let commands = list.split('`').skip(1).step_by(2).flat_map(str::split_whitespace);
    let commands = commands.filter(|word| !word.contains(|c: char| c.is_ascii_lowercase()));
    let rules: Vec<String> = commands.map(|command| format!("+{}", command.to_lowercase())).collect();
    assert!(rules.len() > 15, "{rules:?}");
    let mut command =
        vec!["ACL", "SETUSER", "locks", "on", ">pw", "~lockcore:*", "resetchannels", "&lockcore:*"];
    command.extend(["-@all"].into_iter().chain(rules.iter().map(String::as_str)));
    let _: String = server.raw(&command).await.unwrap();
    let backend = RedisBackend::connect(config(&server).with(|c| {
        c.user = Some("locks".into());
        c.password = Some("pw".into());
        c.recheck = WATCHDOG * 4;
    }))
    .await
    .unwrap();
    let victim = request("a");
    let lease = backend.acquire(&call(), &victim).await.unwrap();
    let _ = backend.renew(&call(), &lease, TTL).await.unwrap();
    backend.raise(&call(), &lease, lease.fence).await.unwrap();
    let (call_w, request_w) = waiting("a", WATCHDOG);
    let release = async {
        loop {
            let (_, count): (String, i64) =
                server.raw(&["PUBSUB", "NUMSUB", &keys("a").channel]).await.unwrap();
            if count == 1 {
                break;
            }
        }
        backend.release(&call(), &lease).await.unwrap();
    };
    let (next, ()) = in_time(async { tokio::join!(backend.acquire(&call_w, &request_w), release) }).await;
    backend.break_lock(&call(), &name("a"), Some(next.unwrap().stamp())).await.unwrap();
    backend.abandon(&call(), &request("b")).await.unwrap();
    backend.raise_fence(&call(), &name("b"), Fence::MIN).await.unwrap();
    backend.inspect(&call(), &name("a")).await.unwrap();
    assert_eq!(backend.list(&call(), None, None).await.unwrap(), [name("a"), name("b")]);
    backend.high_water(&call()).await.unwrap();
    let mut record = PhaseRecord::new("moving", 1);
    record.open = vec!["from".into()];
    assert!(backend.phase_cas(&call(), None, &record).await.unwrap());
    let member = backend.join(&call(), "from", TTL).await.unwrap();
    let member = backend.renew(&call(), &member, TTL).await.unwrap();
    assert_eq!(backend.members(&call()).await.unwrap().len(), 1);
    backend.leave(&call(), &member).await.unwrap();
    let preflight = backend.preflight(&call()).await.unwrap();
    assert_eq!(preflight.findings.len(), 1, "{preflight:?}");
}

#[tokio::test]
async fn preflight_lowers_what_the_server_does_not_keep() {
    let Some((server, backend)) = start().await else { return };
    let preflight = backend.preflight(&call()).await.unwrap();
    assert!(!preflight.capabilities.survives.restart && !backend.capabilities().survives.restart);
    assert_eq!(preflight.capabilities.consistency, Consistency::SingleServer);
    assert_eq!(preflight.findings.len(), 1, "{preflight:?}");
    let _: String =
        server.raw(&["CONFIG", "SET", "maxmemory", "1gb", "maxmemory-policy", "allkeys-lru"]).await.unwrap();
    let preflight = backend.preflight(&call()).await.unwrap();
    assert_eq!(preflight.capabilities.consistency, Consistency::Replicated);
    assert!(preflight.findings.iter().any(|f| f.contains("allkeys-lru")), "{preflight:?}");

    let Some(durable) = Server::with(&["--appendonly", "yes", "--appendfsync", "always"]).await else {
        return;
    };
    let backend = RedisBackend::connect(config(&durable)).await.unwrap();
    assert!(backend.capabilities().survives.restart);
    let preflight = backend.preflight(&call()).await.unwrap();
    assert!(preflight.capabilities.survives.restart && preflight.findings.is_empty(), "{preflight:?}");
}

#[tokio::test]
async fn a_held_lock_outlives_a_restart_of_a_server_that_writes_everything() {
    let Some(mut server) = Server::with(&["--appendonly", "yes", "--appendfsync", "always"]).await else {
        return;
    };
    let backend = RedisBackend::connect(config(&server)).await.unwrap();
    let lease = backend.acquire(&call(), &request("a")).await.unwrap();
    server.restart().await;
    let renewed = in_time(async {
        loop {
            match backend.renew(&call(), &lease, TTL).await {
                Ok(lease) => return lease,
                Err(error) => assert!(error.kind().is_transient(), "{error}"),
            }
        }
    })
    .await;
    assert_eq!(renewed.fence, lease.fence);
}

#[tokio::test]
async fn names_are_listed_in_order_by_prefix_and_page() {
    let Some((server, backend)) = start().await else { return };
    let call = call().in_namespace("shop").unwrap();
    let odd = LockName::from_segments(["b", "{x}", "*?"]).unwrap();
    let mut names = vec![name("a"), name("b/1"), name("b/2"), name("bb"), odd];
    for name in &names {
        let lease = backend.acquire(&call, &AcquireRequest::new(name.clone(), TTL)).await.unwrap();
        backend.release(&call, &lease).await.unwrap();
    }
    let held = backend.acquire(&call, &request("b/1")).await.unwrap();
    backend.abandon(&call, &request("zz")).await.unwrap();
    let _ = backend.acquire(&self::call(), &request("elsewhere")).await.unwrap();
    let _: String = server.raw(&["SET", "lockcore:shop:{a}x}:lock", "x"]).await.unwrap();
    names.sort();
    assert_eq!(backend.list(&call, None, None).await.unwrap(), names);
    let under: Vec<_> = names.iter().filter(|n| n.is_under(&name("b"))).cloned().collect();
    assert_eq!(backend.list(&call, Some(&name("b")), None).await.unwrap(), under);
    assert_eq!(backend.list(&call, None, Some(&names[2])).await.unwrap(), names[3..]);
    assert!(backend.list(&call, None, names.last()).await.unwrap().is_empty());

    let state = backend.inspect(&call, &name("b/1")).await.unwrap();
    assert_eq!(state.holder.unwrap().stamp(), held.stamp());
    assert_eq!(state.last_fence, Some(held.fence));
    let free = backend.inspect(&call, &name("a")).await.unwrap();
    assert!(free.holder.is_none() && free.last_fence.is_some());
    assert_eq!(backend.inspect(&call, &name("never")).await.unwrap(), LockState::default());
}

#[tokio::test]
async fn the_high_water_is_above_every_grant() {
    let Some((_server, backend)) = start().await else { return };
    let mut highest = Fence::MIN;
    for i in 0..30 {
        highest = highest.max(backend.acquire(&call(), &request(&format!("n/{i}"))).await.unwrap().fence);
    }
    let water = backend.high_water(&call()).await.unwrap().unwrap();
    assert!(water >= highest, "{water:?} is below {highest:?}");
    let far = Fence::new(9_000_000_000_000_000).unwrap();
    backend.raise_fence(&call(), &name("n/3"), far).await.unwrap();
    assert_eq!(backend.high_water(&call()).await.unwrap(), Some(far));
    let elsewhere = call().in_namespace("other").unwrap();
    assert!(backend.high_water(&elsewhere).await.unwrap().unwrap() < far);
}

#[tokio::test]
async fn a_high_water_that_may_not_be_looked_for_is_none() {
    let Some((server, backend)) = start().await else { return };
    let far = Fence::new(9_000_000_000_000_000).unwrap();
    backend.raise_fence(&call(), &name("a"), far).await.unwrap();
    // Somebody else's key is no fence.
    let _: i64 = server.raw(&["LPUSH", "lockcore::{list}:fence", "x"]).await.unwrap();
    assert_eq!(backend.high_water(&call()).await.unwrap(), Some(far));
    let _: String =
        server.raw(&["ACL", "SETUSER", "blind", "on", ">pw", "~*", "&*", "+@all", "-get"]).await.unwrap();
    let blind = config(&server).with(|c| (c.user, c.password) = (Some("blind".into()), Some("pw".into())));
    let blind = RedisBackend::connect(blind).await.unwrap();
    let refused = blind.high_water(&call()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unauthorized, "{refused}");
}

#[tokio::test]
async fn namespaces_do_not_see_each_other() {
    let Some((_server, backend)) = start().await else { return };
    let one = backend.acquire(&call().in_namespace("one").unwrap(), &request("a")).await.unwrap();
    let _ = backend.acquire(&call().in_namespace("two").unwrap(), &request("a")).await.unwrap();
    let _ = backend.acquire(&call(), &request("a")).await.unwrap();
    let error = backend.renew(&call().in_namespace("two").unwrap(), &one, TTL).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost);
}

#[tokio::test]
async fn what_is_out_of_range_is_refused_before_anything_is_sent() {
    let Some((server, backend)) = start().await else { return };
    for ttl in [Duration::ZERO, Duration::from_micros(10), Duration::from_secs(86_401)] {
        let request = AcquireRequest::new(name("a"), ttl);
        assert_eq!(
            backend.acquire(&call(), &request).await.unwrap_err().kind(),
            ErrorKind::Invalid,
            "{ttl:?}"
        );
    }
    let odd = AcquireRequest::new(name("a"), Duration::from_micros(20_001));
    backend.acquire(&call(), &odd).await.ok();
    assert!(server.get("lockcore::{a}:fence").await.is_some(), "a TTL of a fraction was not rounded up");
}

#[tokio::test]
async fn a_waiter_is_told_of_the_release() {
    let Some((server, holder)) = start().await else { return };
    // A waiter that only looked would sleep for longer than the watchdog.
    let patient = config(&server).with(|c| c.recheck = WATCHDOG * 4);
    let backend = RedisBackend::connect(patient).await.unwrap();
    let mut took = Vec::new();
    for round in 0..60 {
        let lock = format!("round/{}", round % 3);
        let held = holder.acquire(&call(), &AcquireRequest::new(name(&lock), WATCHDOG * 5)).await.unwrap();
        let (call_w, request_w) = waiting(&lock, WATCHDOG * 2);
        let wait = async {
            let lease = backend.acquire(&call_w, &request_w).await.unwrap();
            (lease, Instant::now())
        };
        let release = async {
            // It sleeps as soon as its channel has a subscriber and it has looked once more.
            in_time(async {
                loop {
                    let (_, count): (String, i64) =
                        server.raw(&["PUBSUB", "NUMSUB", &keys(&lock).channel]).await.unwrap();
                    if count == 1 {
                        break;
                    }
                }
            })
            .await;
            let begun = Instant::now();
            holder.release(&call(), &held).await.unwrap();
            begun
        };
        let ((lease, woke), begun) = in_time(async { tokio::join!(wait, release) }).await;
        assert!(lease.fence > held.fence);
        took.push(woke.duration_since(begun));
        backend.release(&call(), &lease).await.unwrap();
    }
    took.sort();
    println!("from release to grant: median {:?}, worst {:?}", took[took.len() / 2], took[took.len() - 1]);
}

#[tokio::test]
async fn a_release_at_any_moment_of_a_wait_is_not_missed() {
    let Some((server, holder)) = start().await else { return };
    let patient = config(&server).with(|c| c.recheck = WATCHDOG * 4);
    for round in 0..150u32 {
        // Each waiter has to subscribe, and the release comes at another step of it.
        let backend = RedisBackend::connect(patient.clone()).await.unwrap();
        let held = holder.acquire(&call(), &AcquireRequest::new(name("a"), WATCHDOG * 5)).await.unwrap();
        let (call_w, request_w) = waiting("a", WATCHDOG * 2);
        let wait = backend.acquire(&call_w, &request_w);
        let release = async {
            for _ in 0..round % 30 {
                tokio::task::yield_now().await;
            }
            holder.release(&call(), &held).await.unwrap();
        };
        let (lease, ()) = in_time(async { tokio::join!(wait, release) }).await;
        backend.release(&call(), &lease.unwrap()).await.unwrap();
    }
}

#[tokio::test]
async fn a_waiter_gets_the_lock_of_a_holder_that_vanished() {
    let Some((_server, backend)) = start().await else { return };
    let lost =
        backend.acquire(&call(), &AcquireRequest::new(name("a"), Duration::from_millis(150))).await.unwrap();
    let (call_w, request_w) = waiting("a", WATCHDOG);
    let begun = Instant::now();
    let lease = in_time(backend.acquire(&call_w, &request_w)).await.unwrap();
    assert!(lease.fence > lost.fence);
    println!("after an end by TTL of 150 ms: {:?}", begun.elapsed());
}

#[tokio::test]
async fn a_waiter_whose_subscription_is_cut_listens_anew() {
    let Some((server, holder)) = start().await else { return };
    let backend = RedisBackend::connect(config(&server).with(|c| c.recheck = WATCHDOG * 4)).await.unwrap();
    let held = holder.acquire(&call(), &AcquireRequest::new(name("a"), WATCHDOG * 5)).await.unwrap();
    let (call_w, request_w) = waiting("a", WATCHDOG * 2);
    let wait = backend.acquire(&call_w, &request_w);
    let listeners = async || -> i64 {
        let (_, count): (String, i64) = server.raw(&["PUBSUB", "NUMSUB", &keys("a").channel]).await.unwrap();
        count
    };
    let fault = async {
        while listeners().await == 0 {}
        let cut: i64 = server.raw(&["CLIENT", "KILL", "TYPE", "pubsub"]).await.unwrap();
        assert_eq!(cut, 1);
        while listeners().await == 0 {}
        holder.release(&call(), &held).await.unwrap();
    };
    let (lease, ()) = in_time(async { tokio::join!(wait, fault) }).await;
    let _ = lease.unwrap();
}

#[tokio::test]
async fn a_wait_ends_with_its_budget_and_leaves_nothing() {
    let Some((server, backend)) = start().await else { return };
    let held = backend.acquire(&call(), &request("a")).await.unwrap();
    let patience = Duration::from_millis(200);
    let (call_w, request_w) = waiting("a", patience);
    let begun = Instant::now();
    let error = in_time(backend.acquire(&call_w, &request_w)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WaitTimeout, "{error}");
    assert_eq!(error.holder().unwrap().stamp(), held.stamp());
    let took = begun.elapsed();
    assert!((patience.mul_f64(0.9)..WATCHDOG / 4).contains(&took), "a wait of {patience:?} took {took:?}");
    let all: Vec<String> = server.raw(&["KEYS", "*"]).await.unwrap();
    assert_eq!(all.len(), 2, "{all:?}");
}

/// A waiter behind a line of its own that can only look, so that every reply on it, but for the first, is that of a look.
async fn looking(server: &Server) -> (Faultline, RedisBackend) {
    let _: String = server
        .raw(&["ACL", "SETUSER", "deaf", "on", ">pw", "~lockcore:*", "resetchannels", "+@all"])
        .await
        .unwrap();
    let line = Faultline::start(([127, 0, 0, 1], server.port).into()).unwrap();
    let config = RedisConfig::new("127.0.0.1", line.address().port()).with(|c| {
        (c.user, c.password) = (Some("deaf".into()), Some("pw".into()));
        c.poll = Duration::from_millis(2);
    });
    let backend = RedisBackend::connect(config).await.unwrap();
    (line, backend)
}

/// Loses the reply to one look of a waiter that has looked for a while.
async fn lose_a_look(line: &Faultline) {
    let mut replies = line.judge();
    for _ in 0..12 {
        replies.next().await.decide(Fate::Pass);
    }
    replies.next().await.decide(Fate::Lose);
}

#[tokio::test]
async fn a_waiter_whose_look_went_unanswered_is_granted_the_lock_long_after() {
    let Some((server, holder)) = start().await else { return };
    let (line, backend) = looking(&server).await;
    let held = holder.acquire(&call(), &AcquireRequest::new(name("a"), WATCHDOG * 5)).await.unwrap();
    let call_w = budget(WATCHDOG);
    let request = AcquireRequest::new(name("a"), Duration::from_millis(60)).waiting_until(call_w.deadline());
    let fault = async {
        lose_a_look(&line).await;
        // The holder holds on until a lease of the lost request would be over, and it is known that none came of it.
        while backend.is_in_doubt(request.owner()) {
            tokio::task::yield_now().await;
        }
        holder.release(&call(), &held).await.unwrap();
    };
    let (lease, ()) = in_time(async { tokio::join!(backend.acquire(&call_w, &request), fault) }).await;
    assert!(lease.unwrap().fence > held.fence);
}

#[tokio::test]
async fn a_waiter_with_an_unanswered_look_ends_in_doubt() {
    let Some((server, holder)) = start().await else { return };
    let _ = holder.acquire(&call(), &AcquireRequest::new(name("a"), WATCHDOG * 5)).await.unwrap();
    for away in [false, true] {
        let (line, backend) = looking(&server).await;
        let (call_w, request) = waiting("a", if away { WATCHDOG } else { Duration::from_secs(3) });
        let fault = async {
            lose_a_look(&line).await;
            line.refuse(away);
        };
        let (ended, ()) = in_time(async { tokio::join!(backend.acquire(&call_w, &request), fault) }).await;
        let error = ended.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unknown, "{error:?}");
        line.refuse(false);
        assert_eq!(backend.resolve(&call(), &request).await.unwrap(), Resolution::Gone);
    }
}

#[tokio::test]
async fn a_waiter_whose_look_came_late_looks_again() {
    let Some((server, _)) = start().await else { return };
    let (line, backend) = looking(&server).await;
    let call_w = budget(WATCHDOG);
    let request = AcquireRequest::new(name("a"), Duration::from_millis(200)).waiting_until(call_w.deadline());
    let late = async {
        line.hold(Direction::ToServer, true);
        while !backend.is_in_doubt(request.owner()) {
            tokio::task::yield_now().await;
        }
        let over = call_w.now().saturating_add(request.ttl() * 2);
        while call_w.now() < over {
            tokio::task::yield_now().await;
        }
        line.hold(Direction::ToServer, false);
    };
    // Not before the line is held.
    let asked = async { backend.acquire(&call_w, &request).await };
    let ((), lease) = in_time(async { tokio::join!(late, asked) }).await;
    let _ = lease.unwrap();
}

#[tokio::test]
async fn channels_that_nobody_waits_on_are_given_up() {
    let Some((server, backend)) = start().await else { return };
    for i in 0..100 {
        let lock = format!("n/{i}");
        let held = backend.acquire(&call(), &request(&lock)).await.unwrap();
        let (call_w, request_w) = waiting(&lock, WATCHDOG);
        let release = async {
            loop {
                let (_, count): (String, i64) =
                    server.raw(&["PUBSUB", "NUMSUB", &keys(&lock).channel]).await.unwrap();
                if count == 1 {
                    break;
                }
            }
            backend.release(&call(), &held).await.unwrap();
        };
        let (lease, ()) =
            in_time(async { tokio::join!(backend.acquire(&call_w, &request_w), release) }).await;
        let _ = lease.unwrap();
    }
    let channels: Vec<String> = server.raw(&["PUBSUB", "CHANNELS"]).await.unwrap();
    assert!(channels.len() <= 40, "{} channels are still subscribed", channels.len());
}

#[tokio::test]
async fn an_acquire_dropped_at_any_poll_leaves_nothing_after_it_was_abandoned() {
    let Some((server, backend)) = start().await else { return };
    let mut granted = false;
    for k in 0..24 {
        for held in [false, true] {
            let lock = format!("k/{k}/{held}");
            let holder = match held {
                true => Some(backend.acquire(&call(), &request(&lock)).await.unwrap()),
                false => None,
            };
            let (call_w, request_w) = waiting(&lock, WATCHDOG);
            {
                let mut acquire = pin!(backend.acquire(&call_w, &request_w));
                for _ in 0..k {
                    let polled = poll_fn(|cx| Poll::Ready(acquire.as_mut().poll(cx))).await;
                    if polled.is_ready() {
                        granted = true;
                        break;
                    }
                    tokio::task::yield_now().await;
                }
            }
            backend.abandon(&call(), &request_w).await.unwrap();
            if let Some(holder) = holder {
                assert_eq!(backend.release(&call(), &holder).await.unwrap(), Released::Now, "{lock}");
            }
            // Whatever was under way goes by the same connection, and before this.
            assert_eq!(server.get(&keys(&lock).lock).await, None, "{lock}: something holds it");
            let _ = backend.acquire(&call(), &request(&lock)).await.unwrap();
        }
    }
    assert!(granted, "no acquire came far enough to be granted");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn eight_clients_hand_over_with_strictly_growing_fences() {
    const CLIENTS: usize = 8;
    const TURNS: usize = 500;
    let Some(server) = Server::start().await else { return };
    let begun = Instant::now();
    let fences = Arc::new(Mutex::new(Vec::with_capacity(CLIENTS * TURNS)));
    let held = Arc::new(AtomicBool::new(false));
    let mut tasks = Vec::new();
    for _ in 0..CLIENTS {
        let backend = RedisBackend::connect(config(&server)).await.unwrap();
        let (fences, held) = (fences.clone(), held.clone());
        tasks.push(tokio::spawn(async move {
            for _ in 0..TURNS {
                let (call_w, request_w) = waiting("hot", Duration::from_secs(120));
                let lease = backend.acquire(&call_w, &request_w).await.unwrap();
                assert!(!held.swap(true, Ordering::SeqCst), "two hold it");
                fences.lock().unwrap().push(lease.fence);
                assert!(held.swap(false, Ordering::SeqCst));
                assert_eq!(backend.release(&call(), &lease).await.unwrap(), Released::Now);
            }
        }));
    }
    for task in tasks {
        tokio::time::timeout(Duration::from_secs(120), task).await.expect("hand-offs stalled").unwrap();
    }
    let fences = fences.lock().unwrap();
    assert_eq!(fences.len(), CLIENTS * TURNS);
    assert!(fences.windows(2).all(|two| two[0] < two[1]), "a fence did not grow");
    println!("{} hand-offs between {CLIENTS} clients in {:?}", fences.len(), begun.elapsed());
}

#[tokio::test]
async fn a_client_waits_through_a_pause_of_the_server_and_leaves_nothing_behind() {
    let Some((server, backend)) = start().await else { return };
    let locks = LockClient::new(backend);
    let warm = locks.named("a").ttl(Duration::from_secs(2)).acquire().await.unwrap();
    warm.release().await.unwrap();
    server.signal(Signal::STOP);
    let acquire = locks.named("a").ttl(Duration::from_secs(2)).wait(WATCHDOG).acquire();
    let mut events = locks.events();
    let go_on = async {
        // Two requests went unanswered, a third is under way or was not even sent.
        loop {
            let event = events.next().await.unwrap();
            if matches!(event.kind, EventKind::Asked { attempt } if attempt >= 3) {
                break;
            }
        }
        server.signal(Signal::CONT);
    };
    let (guard, ()) = in_time(async { tokio::join!(acquire, go_on) }).await;
    guard.unwrap().release().await.unwrap();
    locks.close().await;
    let held: Vec<String> = server.raw(&["KEYS", "*:lock"]).await.unwrap();
    assert!(held.is_empty(), "{held:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_exclude_each_other_while_connections_drop_and_the_server_stops_and_forgets_scripts() {
    const CLIENTS: usize = 4;
    const TURNS: usize = 500;
    let Some(server) = Server::start().await else { return };
    let fences = Arc::new(Mutex::new(Vec::with_capacity(CLIENTS * TURNS)));
    let held = Arc::new(AtomicBool::new(false));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..CLIENTS {
        let locks = LockClient::new(RedisBackend::connect(config(&server)).await.unwrap());
        let (fences, held) = (fences.clone(), held.clone());
        tasks.spawn(async move {
            let lock = locks.named("hot").ttl(Duration::from_secs(5)).wait(WATCHDOG * 2);
            for _ in 0..TURNS {
                let guard = lock.acquire().await.unwrap();
                assert!(!held.swap(true, Ordering::SeqCst), "two hold it");
                fences.lock().unwrap().push(guard.stamp().unwrap().fence);
                tokio::task::yield_now().await;
                // Whether the guard still believes is its business; here nobody else may have come in.
                assert!(held.swap(false, Ordering::SeqCst));
                // An unanswered release is cleared away in the background, or by the TTL.
                let _ = guard.release().await;
            }
            locks.close().await;
        });
    }
    let mut faults = 0;
    let all = tokio::time::timeout(WATCHDOG * 3, async {
        loop {
            tokio::select! {
                done = tasks.join_next() => match done {
                    Some(done) => done.unwrap(),
                    None => break,
                },
                // The distance of the faults, and how long a stop lasts: nothing waits for either.
                () = tokio::time::sleep(Duration::from_millis(3)) => {
                    faults += 1;
                    match faults % 4 {
                        0 => drop(server.raw::<i64>(&["CLIENT", "KILL", "TYPE", "normal"]).await),
                        1 => drop(server.raw::<i64>(&["CLIENT", "KILL", "TYPE", "pubsub"]).await),
                        2 => drop(server.raw::<String>(&["SCRIPT", "FLUSH"]).await),
                        _ => {
                            server.signal(Signal::STOP);
                            tokio::time::sleep(Duration::from_millis(20)).await;
                            server.signal(Signal::CONT);
                        }
                    }
                }
            }
        }
    });
    all.await.expect("hand-offs stalled");
    let fences = fences.lock().unwrap().clone();
    assert_eq!(fences.len(), CLIENTS * TURNS);
    assert!(fences.windows(2).all(|two| two[0] < two[1]), "a fence did not grow");
    println!("{} hand-offs under {faults} faults", fences.len());
    // What a release without an answer left ends with its TTL.
    in_time(async { while !server.raw::<Vec<String>>(&["KEYS", "*:lock"]).await.unwrap().is_empty() {} })
        .await;
}

#[tokio::test]
async fn a_client_runs_its_work_under_a_lease_and_a_stolen_one_is_noticed() {
    let Some((server, backend)) = start().await else { return };
    let locks = LockClient::new(backend);
    let fence = locks
        .named("job")
        .ttl(Duration::from_secs(5))
        .run(async |held| -> Result<i64> { Ok(held.stamp()?.fence.get()) })
        .await
        .unwrap();
    let guard = locks.named("job").ttl(Duration::from_millis(600)).acquire().await.unwrap();
    assert!(guard.stamp().unwrap().fence.get() > fence);
    let key = "lockcore:default:{job}:lock";
    let all: Vec<String> = server.raw(&["KEYS", "*{job}:lock"]).await.unwrap();
    let key = all.first().map_or(key, String::as_str);
    let _: i64 = server.raw(&["DEL", key]).await.unwrap();
    let reason = in_time(guard.lost()).await;
    assert_eq!(reason, LostReason::Taken);
    locks.close().await;
}
