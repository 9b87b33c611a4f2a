//! What the steps report and the verbs decide, with faults injected where the machine will not provide them.

use std::{future::Future, io, path::Path, pin::pin, sync::Arc, task::Poll, time::Duration};

use lockcore::backend::*;
use rusqlite::{Connection, params};
use tempfile::TempDir;

use super::{
    SqliteBackend, SqliteConfig,
    error::{Failure, Phase},
    place::{FileSystem, judge},
    wire::{APPLICATION_ID, Key, Standing},
};

const SECOND: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(60);

struct Fixture {
    directory: TempDir,
}

impl Fixture {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap() }
    }

    fn config(&self) -> SqliteConfig {
        SqliteConfig::new(self.directory.path().join("locks.db"))
    }

    async fn open(&self) -> SqliteBackend {
        SqliteBackend::open(self.config()).await.unwrap()
    }

    /// A second road to the file, past the backend.
    fn raw(&self) -> Connection {
        let db = Connection::open(self.config().path).unwrap();
        db.busy_timeout(Duration::from_secs(5)).unwrap();
        db
    }
}

fn call() -> Call {
    call_for(Duration::from_secs(5))
}

fn call_for(budget: Duration) -> Call {
    Call::for_tests(Arc::new(BootClock), budget)
}

fn name(text: &str) -> LockName {
    LockName::parse(text).unwrap()
}

fn request(text: &str, ttl: Duration) -> AcquireRequest {
    AcquireRequest::new(name(text), ttl)
}

/// Acquires for a TTL so short that a busy machine may be too late to use the grant, and then asks anew.
async fn acquire_short(backend: &SqliteBackend, text: &str, ttl: Duration) -> (Moment, Lease) {
    loop {
        let before = BootClock::read();
        match backend.acquire(&call(), &request(text, ttl)).await {
            Ok(lease) => return (before, lease),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Lost, "{error:?}"),
        }
    }
}

async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let end = BootClock::read().saturating_add(Duration::from_secs(20));
    while !is_so().await {
        assert!(BootClock::read() < end, "waited in vain: {what}");
        BootClock.sleep_until(BootClock::read().saturating_add(Duration::from_millis(2))).await;
    }
}

async fn refused(config: SqliteConfig) -> Error {
    SqliteBackend::open(config).await.expect_err("the file was opened")
}

// The verbs.

#[tokio::test]
async fn a_lease_is_granted_seen_renewed_and_released() {
    let fixture = Fixture::new();
    let backend = fixture.open().await;
    let before = BootClock::read();
    let asked = request("a/b", LONG).labelled("web-3:4711");
    let lease = backend.acquire(&call(), &asked).await.unwrap();
    assert!(lease.deadline > before.saturating_add(LONG * 98 / 100));
    assert!(lease.deadline <= BootClock::read().saturating_add(LONG));

    let state = backend.inspect(&call(), &name("a/b")).await.unwrap();
    let holder = state.holder.expect("somebody holds it");
    assert_eq!(holder.stamp(), lease.stamp());
    assert_eq!(holder.label.as_deref(), Some("web-3:4711"));
    assert!(holder.since.unwrap() < LONG && holder.remaining <= LONG && holder.remaining > LONG / 2);
    assert_eq!(state.last_fence, Some(lease.fence));
    assert_eq!(state.waiters, None);

    let renewed = backend.renew(&call(), &lease, LONG * 2).await.unwrap();
    assert!(renewed.deadline > lease.deadline);
    assert_eq!((renewed.fence, renewed.owner), (lease.fence, lease.owner));
    assert_eq!(backend.release(&call(), &renewed).await.unwrap(), Released::Now);
    assert_eq!(backend.release(&call(), &renewed).await.unwrap(), Released::AlreadyOver);
    let state = backend.inspect(&call(), &name("a/b")).await.unwrap();
    assert_eq!((state.holder, state.last_fence), (None, Some(lease.fence)));
}

#[tokio::test]
async fn a_held_lock_is_refused_and_the_refusal_changes_nothing() {
    let fixture = Fixture::new();
    let (one, two) = (fixture.open().await, fixture.open().await);
    let lease = one.acquire(&call(), &request("a", LONG)).await.unwrap();
    for backend in [&one, &two] {
        let error = backend.acquire(&call(), &request("a", LONG)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Held);
        assert_eq!(error.holder().unwrap().stamp(), lease.stamp());
    }
    assert_eq!(one.renew(&call(), &lease, LONG).await.unwrap().fence, lease.fence);
    assert_eq!(one.release(&call(), &lease).await.unwrap(), Released::Now);
    let next = two.acquire(&call(), &request("a", LONG)).await.unwrap();
    assert!(next.fence > lease.fence);
}

#[tokio::test]
async fn the_same_owner_is_answered_the_same_grant_and_what_is_left_of_it() {
    let fixture = Fixture::new();
    let backend = fixture.open().await;
    let asked = request("a", LONG);
    let first = backend.acquire(&call(), &asked).await.unwrap();
    // When the record ends: not before the one, not after the other.
    let end_of_record = async || {
        let before = BootClock::read();
        let left = backend.inspect(&call(), &name("a")).await.unwrap().holder.unwrap().remaining;
        (before.saturating_add(left), BootClock::read().saturating_add(left))
    };
    let (_, latest) = end_of_record().await;
    BootClock.sleep_until(BootClock::read().saturating_add(Duration::from_millis(50))).await;
    let again = fixture.open().await.acquire(&call().attempt_number(2), &asked).await.unwrap();
    assert_eq!(again.fence, first.fence);
    let (earliest, _) = end_of_record().await;
    assert!(earliest <= latest, "the lease was armed anew");
    assert!(again.deadline <= latest);
}

#[tokio::test]
async fn renew_and_release_compare_owner_and_fence() {
    let fixture = Fixture::new();
    let backend = fixture.open().await;
    let asked = request("a", LONG);
    let old = backend.acquire(&call(), &asked).await.unwrap();
    backend.release(&call(), &old).await.unwrap();
    // The same owner once more: only the fence tells the two holdings apart.
    let live = backend.acquire(&call(), &asked).await.unwrap();
    assert!(live.fence > old.fence);
    let mut forged = live.clone();
    forged.owner = Owner::random();
    for stale in [&old, &forged] {
        let error = backend.renew(&call(), stale, LONG).await.unwrap_err();
        assert_eq!(error.lost_reason(), Some(LostReason::Taken), "{error}");
        assert_eq!(backend.release(&call(), stale).await.unwrap(), Released::AlreadyOver);
        assert_eq!(backend.raise(&call(), stale, Fence::MAX).await.unwrap_err().kind(), ErrorKind::Lost);
    }
    assert_eq!(backend.release(&call(), &live).await.unwrap(), Released::Now);
}

#[tokio::test]
async fn an_expired_lease_is_lost_although_nobody_took_it() {
    let fixture = Fixture::new();
    let backend = fixture.open().await;
    let (_, lease) = acquire_short(&backend, "a", Duration::from_millis(40)).await;
    until("the lease is over", async || backend.inspect(&call(), &name("a")).await.unwrap().holder.is_none())
        .await;
    let error = backend.renew(&call(), &lease, SECOND).await.unwrap_err();
    assert_eq!(error.lost_reason(), Some(LostReason::Expired));
    assert_eq!(backend.release(&call(), &lease).await.unwrap(), Released::AlreadyOver);
    let next = backend.acquire(&call(), &request("a", LONG)).await.unwrap();
    assert!(next.fence > lease.fence);
    let error = backend.renew(&call(), &lease, SECOND).await.unwrap_err();
    assert_eq!(error.lost_reason(), Some(LostReason::Taken));
}

#[tokio::test]
async fn a_renewal_never_shortens() {
    let fixture = Fixture::new();
    let backend = fixture.open().await;
    let lease = backend.acquire(&call(), &request("a", LONG)).await.unwrap();
    let renewed = backend.renew(&call(), &lease, SECOND).await.unwrap();
    assert_eq!(renewed.deadline, lease.deadline);
    let holder = backend.inspect(&call(), &name("a")).await.unwrap().holder.unwrap();
    assert!(holder.remaining > LONG / 2, "the row was shortened: {holder}");
}

#[tokio::test]
async fn a_renewal_that_waited_past_the_end_of_the_lease_finds_it_lost() {
    let fixture = Fixture::new();
    let backend = fixture.open().await;
    let (_, lease) = acquire_short(&backend, "a", Duration::from_millis(100)).await;
    let raw = fixture.raw();
    raw.execute_batch("BEGIN IMMEDIATE").unwrap();
    let patient = call();
    let renewal = backend.renew(&patient, &lease, LONG);
    let release = async {
        BootClock.sleep_until(lease.deadline.saturating_add(Duration::from_millis(20))).await;
        raw.execute_batch("COMMIT").unwrap();
    };
    let (renewed, ()) = tokio::join!(renewal, release);
    assert_eq!(renewed.unwrap_err().lost_reason(), Some(LostReason::Expired));
}

#[tokio::test]
async fn several_renewals_are_one_commit_with_an_answer_each() {
    let fixture = Fixture::new();
    let backend = fixture.open().await;
    let mut leases = Vec::new();
    for n in 0..600 {
        leases.push(backend.acquire(&call_for(LONG), &request(&format!("n/{n}"), LONG)).await.unwrap());
    }
    backend.release(&call(), &leases[3]).await.unwrap();
    let answers = backend.renew_many(&call(), &leases, LONG * 2).await;
    assert_eq!(answers.len(), leases.len());
    for (n, (lease, answer)) in leases.iter().zip(&answers).enumerate() {
        match answer {
            Ok(renewed) => assert!(renewed.deadline > lease.deadline && renewed.name == lease.name),
            Err(error) => {
                assert_eq!((n, error.lost_reason()), (3, Some(LostReason::Taken)));
                assert_eq!(error.name(), Some(&leases[3].name));
            }
        }
    }
    assert!(answers[3].is_err(), "a released lease was renewed");
    backend.close().await;
    let closed = backend.renew_many(&call(), &leases[..2], LONG).await;
    assert!(closed.iter().all(|a| a.as_ref().is_err_and(|e| e.kind() == ErrorKind::Closed)), "{closed:?}");
}

#[tokio::test]
async fn resolve_adopts_a_grant_or_says_that_it_is_gone() {
    let fixture = Fixture::new();
    let backend = fixture.open().await;
    let asked = request("a", LONG);
    assert!(matches!(backend.resolve(&call(), &asked).await.unwrap(), Resolution::Gone));
    let lease = backend.acquire(&call(), &asked).await.unwrap();
    match backend.resolve(&call(), &asked).await.unwrap() {
        Resolution::Adopted(found) => assert_eq!(found.stamp(), lease.stamp()),
        other => panic!("a live grant was said to be {other:?}"),
    }
    let other = request("a", LONG);
    assert!(matches!(backend.resolve(&call(), &other).await.unwrap(), Resolution::Gone));
    backend.abandon(&call(), &other).await.unwrap();
    assert!(backend.renew(&call(), &lease, LONG).await.is_ok(), "an abandon ended a foreign lease");
    backend.abandon(&call(), &asked).await.unwrap();
    backend.abandon(&call(), &asked).await.unwrap();
    assert_eq!(backend.inspect(&call(), &name("a")).await.unwrap().holder, None);
}

#[tokio::test]
async fn a_break_is_a_grant_to_nobody_and_the_holder_learns_of_it() {
    let fixture = Fixture::new();
    let backend = fixture.open().await;
    let lease = backend.acquire(&call(), &request("a", LONG)).await.unwrap();
    let wrong = Stamp::new(lease.fence, Owner::random().digest());
    let error = backend.break_lock(&call(), &name("a"), Some(wrong)).await.unwrap_err();
    assert_eq!((error.kind(), error.holder().unwrap().stamp()), (ErrorKind::Held, lease.stamp()));
    assert!(backend.renew(&call(), &lease, LONG).await.is_ok(), "a refused break broke the lock");

    let broken = backend.break_lock(&call(), &name("a"), Some(lease.stamp())).await.unwrap();
    assert_eq!(broken.holder.unwrap().stamp(), lease.stamp());
    assert!(broken.floor > lease.fence);
    let error = backend.renew(&call(), &lease, LONG).await.unwrap_err();
    assert_eq!(error.lost_reason(), Some(LostReason::Broken));
    assert_eq!(backend.release(&call(), &lease).await.unwrap(), Released::AlreadyOver);
    // The seed by time may carry the next fence past the break; without it, the floor must.
    fixture
        .raw()
        .execute("UPDATE lockcore_leases SET floor = ?1", params![broken.floor.get() + 10_000_000_000])
        .unwrap();
    let next = backend.acquire(&call(), &request("a", LONG)).await.unwrap();
    assert_eq!(next.fence.get(), broken.floor.get() + 10_000_000_001);
    // The former holder is told the same while somebody else has it.
    let error = backend.renew(&call(), &lease, LONG).await.unwrap_err();
    assert_eq!(error.lost_reason(), Some(LostReason::Broken));
    // A break of a name that nobody ever had gives a number, too.
    let never = backend.break_lock(&call(), &name("never"), None).await.unwrap();
    assert_eq!(never.holder, None);
    assert!(backend.acquire(&call(), &request("never", LONG)).await.unwrap().fence > never.floor);
}

#[tokio::test]
async fn floors_are_honoured_wherever_they_come_from() {
    let fixture = Fixture::new();
    let backend = fixture.open().await;
    let far = |n: i64| Fence::new(4_000_000_000_000_000 + n).unwrap();
    let asked = request("asked", LONG).above(far(0));
    assert_eq!(backend.acquire(&call(), &asked).await.unwrap().fence, far(1));

    assert_eq!(backend.raise_fence(&call(), &name("named"), far(100)).await.unwrap(), far(100));
    assert_eq!(backend.raise_fence(&call(), &name("named"), far(50)).await.unwrap(), far(100));
    let lease = backend.acquire(&call(), &request("named", LONG)).await.unwrap();
    assert_eq!(lease.fence, far(101));
    assert_eq!(backend.raise_fence(&call(), &name("named"), far(50)).await.unwrap(), far(101));

    backend.raise(&call(), &lease, far(200)).await.unwrap();
    backend.raise(&call(), &lease, far(200)).await.unwrap();
    assert_eq!(backend.renew(&call(), &lease, LONG).await.unwrap().fence, far(101));
    assert_eq!(backend.high_water(&call()).await.unwrap(), Some(far(200)));
    assert_eq!(backend.high_water(&call().in_namespace("empty").unwrap()).await.unwrap(), None);
    backend.release(&call(), &lease).await.unwrap();
    assert_eq!(backend.acquire(&call(), &request("named", LONG)).await.unwrap().fence, far(201));
}

#[tokio::test]
async fn the_largest_fence_is_an_error_and_never_a_wrap() {
    let fixture = Fixture::new();
    let backend = fixture.open().await;
    let error = backend.acquire(&call(), &request("a", LONG).above(Fence::MAX)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    backend.raise_fence(&call(), &name("a"), Fence::new(i64::MAX - 1).unwrap()).await.unwrap();
    let last = backend.acquire(&call(), &request("a", LONG)).await.unwrap();
    assert_eq!(last.fence, Fence::MAX);
    backend.release(&call(), &last).await.unwrap();
    for error in [
        backend.acquire(&call(), &request("a", LONG)).await.unwrap_err(),
        backend.break_lock(&call(), &name("a"), None).await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error:?}");
        assert!(error.to_string().contains("largest value"), "{error}");
    }
}

#[tokio::test]
async fn idle_rows_are_collected_and_their_fences_live_on() {
    let fixture = Fixture::new();
    let backend = SqliteBackend::open(fixture.config().with(|c| c.idle = LONG)).await.unwrap();
    let high = Fence::new(4_000_000_000_000_000).unwrap();
    for n in 0..300 {
        let lease =
            backend.acquire(&call_for(LONG), &request(&format!("idle/{n}"), LONG).above(high)).await.unwrap();
        backend.release(&call(), &lease).await.unwrap();
    }
    let kept = backend.acquire(&call(), &request("held", LONG)).await.unwrap();
    assert_eq!(backend.collect(&call()).await.unwrap(), 0, "rows in use were collected");
    let raw = fixture.raw();
    raw.execute("UPDATE lockcore_leases SET used = used - 3600", []).unwrap();
    assert_eq!(backend.collect(&call()).await.unwrap(), 300);
    raw.execute_batch("VACUUM").unwrap();
    assert_eq!(backend.list(&call(), None, None).await.unwrap(), [name("held")]);
    assert!(backend.renew(&call(), &kept, LONG).await.is_ok(), "a held row was collected");
    // `high + 1` was granted under each of them; the new row starts above.
    let next = backend.acquire(&call(), &request("idle/7", LONG)).await.unwrap();
    assert!(next.fence.get() > high.get() + 1, "{:?}", next.fence);
    assert!(backend.high_water(&call()).await.unwrap() >= Some(next.fence));
}

#[tokio::test]
async fn a_deleted_row_costs_the_lease_and_not_the_order_of_fences() {
    let fixture = Fixture::new();
    let backend = fixture.open().await;
    let lease = backend.acquire(&call(), &request("a", LONG)).await.unwrap();
    fixture.raw().execute("DELETE FROM lockcore_leases", []).unwrap();
    let error = backend.renew(&call(), &lease, LONG).await.unwrap_err();
    assert_eq!(error.lost_reason(), Some(LostReason::Taken));
    assert_eq!(backend.list(&call(), None, None).await.unwrap(), [], "a renewal created a row");
    let next = backend.acquire(&call(), &request("a", LONG)).await.unwrap();
    assert!(next.fence > lease.fence, "the seed by time did not cover a deleted row");
}

#[tokio::test]
async fn names_and_namespaces_never_share_a_row() {
    let fixture = Fixture::new();
    let backend = fixture.open().await;
    let hostile = [
        LockName::from_segments(["a/b"]).unwrap(),
        LockName::from_segments(["a", "b"]).unwrap(),
        name("a"),
        name("A"),
        name("é"),
        name("e\u{301}"),
        name("'; DROP TABLE lockcore_leases; --"),
        name("lockcore_meta"),
        name(&"x".repeat(512)),
        name("🔒"),
    ];
    let mut held = Vec::new();
    for namespace in ["", "a", "b"] {
        let call = call().in_namespace(namespace).unwrap();
        for name in &hostile {
            let lease = backend.acquire(&call, &AcquireRequest::new(name.clone(), LONG)).await.unwrap();
            held.push((call.clone(), lease));
        }
        let mut expected = hostile.to_vec();
        expected.sort();
        assert_eq!(backend.list(&call, None, None).await.unwrap(), expected);
    }
    for (call, lease) in &held {
        assert_eq!(backend.release(call, lease).await.unwrap(), Released::Now, "{lease:?}");
    }
}

#[tokio::test]
async fn lists_come_in_pages_and_a_prefix_ends_at_a_segment() {
    let fixture = Fixture::new();
    let backend = fixture.open().await;
    for text in ["a", "a!", "a/1", "a/2", "a/2/x", "a0", "ab", "b"] {
        backend.raise_fence(&call(), &name(text), Fence::MIN).await.unwrap();
    }
    for n in 0..400 {
        backend.raise_fence(&call_for(LONG), &name(&format!("p/{n:03}")), Fence::MIN).await.unwrap();
    }
    let under = backend.list(&call(), Some(&name("a")), None).await.unwrap();
    assert_eq!(under, ["a", "a/1", "a/2", "a/2/x"].map(name));
    let rest = backend.list(&call(), Some(&name("a")), Some(&name("a/1"))).await.unwrap();
    assert_eq!(rest, ["a/2", "a/2/x"].map(name));
    let mut seen = Vec::new();
    loop {
        let page = backend.list(&call(), Some(&name("p")), seen.last()).await.unwrap();
        if page.is_empty() {
            break;
        }
        seen.extend(page);
    }
    assert_eq!(seen.len(), 400);
    assert!(seen.is_sorted());
}

#[tokio::test]
async fn ttls_out_of_range_are_refused() {
    let fixture = Fixture::new();
    let backend = fixture.open().await;
    let lease = backend.acquire(&call(), &request("held", LONG)).await.unwrap();
    for ttl in [Duration::ZERO, Duration::from_millis(9), Duration::from_secs(86_401), Duration::MAX] {
        let error = backend.acquire(&call(), &request("a", ttl)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        assert_eq!(backend.renew(&call(), &lease, ttl).await.unwrap_err().kind(), ErrorKind::Invalid);
        let many = backend.renew_many(&call(), std::slice::from_ref(&lease), ttl).await;
        assert!(many[0].as_ref().is_err_and(|e| e.kind() == ErrorKind::Invalid), "{many:?}");
    }
    assert_eq!(backend.inspect(&call(), &name("a")).await.unwrap(), LockState::default());
    let odd = backend.acquire(&call(), &request("odd", Duration::from_micros(10_001))).await.unwrap();
    assert!(odd.deadline <= BootClock::read().saturating_add(Duration::from_micros(10_001)));
}

// Waiting and dropping.

#[tokio::test]
async fn a_waiter_gets_the_lock_after_a_release_through_another_backend() {
    let fixture = Fixture::new();
    let (one, two) = (fixture.open().await, fixture.open().await);
    let lease = one.acquire(&call(), &request("a", LONG)).await.unwrap();
    let patient = call_for(LONG);
    let asked = request("a", LONG).waiting_until(Moment::MAX);
    let release = async {
        BootClock.sleep_until(BootClock::read().saturating_add(Duration::from_millis(60))).await;
        one.release(&call(), &lease).await.unwrap()
    };
    let (next, _) = tokio::join!(two.acquire(&patient, &asked), release);
    assert!(next.unwrap().fence > lease.fence);
}

#[tokio::test]
async fn a_waiter_of_the_same_backend_is_woken_by_the_release() {
    let fixture = Fixture::new();
    let hour = Duration::from_secs(3600);
    // Looking alone would take an hour.
    let backend = SqliteBackend::open(fixture.config().with(|c| c.poll = hour..=hour)).await.unwrap();
    let lease = backend.acquire(&call(), &request("a", hour)).await.unwrap();
    let (patient, asked) = (call_for(hour), request("a", LONG).waiting_until(Moment::MAX));
    let mut waiting = pin!(backend.acquire(&patient, &asked));
    // The first look has been answered once a later question of the same queue has.
    for _ in 0..3 {
        assert!(futures_poll(waiting.as_mut()).await.is_none(), "two hold the lock");
        backend.inspect(&call(), &name("a")).await.unwrap();
    }
    backend.release(&call(), &lease).await.unwrap();
    let next = tokio::time::timeout(Duration::from_secs(10), waiting).await.expect("nobody woke the waiter");
    assert!(next.unwrap().fence > lease.fence);
}

#[tokio::test]
async fn a_waiter_gets_the_lock_when_the_holder_expires_and_not_before() {
    let fixture = Fixture::new();
    let (one, two) = (fixture.open().await, fixture.open().await);
    let ttl = Duration::from_millis(120);
    for _ in 0..5 {
        let (before, lease) = acquire_short(&one, "a", ttl).await;
        let patient = call_for(LONG);
        let next = two.acquire(&patient, &request("a", LONG).waiting_until(Moment::MAX)).await.unwrap();
        let now = BootClock::read();
        assert!(before.until(now) >= ttl, "granted {:?} after the grant before it", before.until(now));
        assert!(lease.deadline < now);
        two.release(&call(), &next).await.unwrap();
    }
}

#[tokio::test]
async fn a_wait_ends_with_its_budget_and_names_the_holder() {
    let fixture = Fixture::new();
    let backend = fixture.open().await;
    let lease = backend.acquire(&call(), &request("a", LONG)).await.unwrap();
    for budget in [0, 1, 30, 150].map(Duration::from_millis) {
        let (patient, start) = (call(), BootClock::read());
        let asked = request("a", LONG).waiting_until(start.saturating_add(budget));
        let error = backend.acquire(&patient, &asked).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WaitTimeout, "{error}");
        assert_eq!(error.holder().unwrap().stamp(), lease.stamp());
        assert!(start.until(BootClock::read()) >= budget, "the wait ended early");
    }
    // The call may end before the wait does; that is not the waiter's budget.
    let asked = request("a", LONG).waiting_until(Moment::MAX);
    let error = backend.acquire(&call_for(Duration::from_millis(30)), &asked).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}

/// Polls once; `Some` when it is done.
async fn futures_poll<F: Future>(mut future: std::pin::Pin<&mut F>) -> Option<F::Output> {
    std::future::poll_fn(|cx| match future.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending => Poll::Ready(None),
    })
    .await
}

/// Polls until done or `polls` times; between two polls it waits for the future to ask for the next.
async fn poll_times<F: Future>(future: F, polls: usize) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut done = 0;
    std::future::poll_fn(|cx| {
        if done == polls {
            return Poll::Ready(None);
        }
        done += 1;
        match future.as_mut().poll(cx) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if done == polls => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

#[tokio::test]
async fn an_acquire_dropped_at_any_await_and_abandoned_leaves_no_lease() {
    let fixture = Fixture::new();
    let backend = fixture.open().await;
    for held in [false, true] {
        for polls in 0..12 {
            let name_text = format!("drop/{held}/{polls}");
            if held {
                let _ = acquire_short(&backend, &name_text, Duration::from_millis(30)).await;
            }
            let (patient, asked) = (call(), request(&name_text, LONG).waiting_until(Moment::MAX));
            let outcome = poll_times(backend.acquire(&patient, &asked), polls).await;
            match outcome {
                Some(granted) => assert_eq!(&granted.unwrap().owner, asked.owner()),
                None => backend.abandon(&call(), &asked).await.unwrap(),
            }
            backend.abandon(&call(), &asked).await.unwrap();
            let state = backend.inspect(&call(), &name(&name_text)).await.unwrap();
            let left = state.holder.filter(|holder| holder.owner == asked.owner().digest());
            assert_eq!(left, None, "after {polls} polls, held before: {held}");
            let next = backend
                .acquire(&call(), &request(&name_text, LONG).waiting_until(Moment::MAX))
                .await
                .unwrap();
            assert!(state.last_fence.is_none_or(|last| next.fence > last));
        }
    }
}

#[tokio::test]
async fn a_dropped_release_still_ends_the_lease_and_a_dropped_renewal_harms_nothing() {
    let fixture = Fixture::new();
    let backend = fixture.open().await;
    for polls in 1..4 {
        let lease = backend.acquire(&call(), &request("a", LONG)).await.unwrap();
        let _ = poll_times(backend.renew(&call(), &lease, LONG), polls).await;
        assert!(backend.renew(&call(), &lease, LONG).await.is_ok());
        let _ = poll_times(backend.release(&call(), &lease), polls).await;
        assert_eq!(backend.inspect(&call(), &name("a")).await.unwrap().holder, None, "{polls} polls");
    }
}

#[tokio::test]
async fn waiting_writes_nothing() {
    let fixture = Fixture::new();
    let backend = fixture.open().await;
    let _lease = backend.acquire(&call(), &request("a", LONG)).await.unwrap();
    let raw = fixture.raw();
    let version = || raw.query_row("PRAGMA data_version", [], |row| row.get::<_, i64>(0)).unwrap();
    let before = version();
    let end = BootClock::read().saturating_add(Duration::from_millis(100));
    let error = backend.acquire(&call(), &request("a", LONG).waiting_until(end)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WaitTimeout);
    assert_eq!(version(), before, "a waiter wrote to the file");
}

// Busy, late, closed.

#[tokio::test]
async fn a_file_that_stays_busy_is_unavailable_and_nothing_was_done() {
    let fixture = Fixture::new();
    let backend = fixture.open().await;
    let lease = backend.acquire(&call(), &request("held", LONG)).await.unwrap();
    let raw = fixture.raw();
    raw.execute_batch("BEGIN IMMEDIATE").unwrap();
    let short = || call_for(Duration::from_millis(150));
    let start = BootClock::read();
    assert_eq!(
        backend.acquire(&short(), &request("a", LONG)).await.unwrap_err().kind(),
        ErrorKind::Unavailable
    );
    assert!(
        start.until(BootClock::read()) >= Duration::from_millis(140),
        "it gave up before its budget was used"
    );
    assert_eq!(backend.renew(&short(), &lease, LONG * 2).await.unwrap_err().kind(), ErrorKind::Unavailable);
    assert_eq!(backend.release(&short(), &lease).await.unwrap_err().kind(), ErrorKind::Unavailable);
    // Looking needs no write lock.
    assert!(backend.inspect(&short(), &name("held")).await.unwrap().holder.is_some());
    raw.execute_batch("COMMIT").unwrap();
    assert_eq!(backend.inspect(&call(), &name("a")).await.unwrap(), LockState::default());
    assert_eq!(backend.release(&call(), &lease).await.unwrap(), Released::Now);
}

#[tokio::test]
async fn a_lease_counts_from_the_request_also_where_the_file_was_busy_first() {
    let fixture = Fixture::new();
    let config = fixture.config().with(|c| c.busy = Duration::from_millis(20));
    let backend = SqliteBackend::open(config).await.unwrap();
    let raw = fixture.raw();
    raw.execute_batch("BEGIN IMMEDIATE").unwrap();
    let ttl = Duration::from_secs(2);
    let (call, asked) = (call(), request("a", ttl));
    let (sent, mut asking) = (BootClock::read(), std::pin::pin!(backend.acquire(&call, &asked)));
    tokio::select! {
        granted = &mut asking => panic!("granted while another had the file: {granted:?}"),
        // Several times as long as one attempt at a busy file.
        () = BootClock.sleep_until(sent.saturating_add(Duration::from_millis(200))) => {}
    }
    raw.execute_batch("COMMIT").unwrap();
    let lease = asking.await.unwrap();
    let promised = sent.until(lease.deadline);
    assert!(promised <= ttl, "{promised:?} of {ttl:?} were promised since the request");
    assert!(promised > ttl / 4, "{promised:?} of {ttl:?}");
}

#[tokio::test]
async fn a_call_whose_time_is_over_does_nothing() {
    let fixture = Fixture::new();
    let backend = fixture.open().await;
    let late = call_for(Duration::ZERO);
    BootClock.sleep_until(late.deadline().saturating_add(Duration::from_millis(1))).await;
    let error = backend.acquire(&late, &request("a", LONG)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(backend.inspect(&call(), &name("a")).await.unwrap(), LockState::default());
}

#[tokio::test]
async fn a_closed_backend_says_so_and_its_thread_is_gone() {
    let fixture = Fixture::new();
    let backend = fixture.open().await;
    let lease = backend.acquire(&call(), &request("a", LONG)).await.unwrap();
    let second = backend.second_connection(&call()).await.unwrap().expect("a second connection");
    backend.close().await;
    backend.close().await;
    assert_eq!(backend.acquire(&call(), &request("b", LONG)).await.unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(second.renew(&call(), &lease, LONG).await.unwrap().fence, lease.fence);
    second.close().await;
    // The last connection to leave removes the log: the file was really closed.
    assert!(!fixture.directory.path().join("locks.db-wal").exists());
}

#[tokio::test]
async fn the_deadline_counts_from_before_the_request_was_queued() {
    let fixture = Fixture::new();
    let backend = fixture.open().await;
    let raw = fixture.raw();
    raw.execute_batch("BEGIN IMMEDIATE").unwrap();
    let (patient, asked) = (call(), request("a", SECOND));
    let finish = async {
        BootClock.sleep_until(BootClock::read().saturating_add(Duration::from_millis(60))).await;
        raw.execute_batch("COMMIT").unwrap();
    };
    let (lease, ()) = tokio::join!(backend.acquire(&patient, &asked), finish);
    let lease = lease.unwrap();
    let holder = backend.inspect(&call(), &name("a")).await.unwrap().holder.unwrap();
    let server_end = BootClock::read().saturating_add(holder.remaining);
    assert!(lease.deadline < server_end, "the lease outlives its record");
}

// Clocks and machines.

#[tokio::test]
async fn a_lease_of_another_boot_is_over_and_its_holder_is_told() {
    let fixture = Fixture::new();
    let before = fixture.open().await;
    let lease = before.acquire(&call(), &request("a", LONG)).await.unwrap();
    before.close().await;
    let after = SqliteBackend::open(fixture.config().with_boot_id("another start")).await.unwrap();
    assert_eq!(after.inspect(&call(), &name("a")).await.unwrap().holder, None);
    assert_eq!(
        after.renew(&call(), &lease, LONG).await.unwrap_err().lost_reason(),
        Some(LostReason::Expired)
    );
    assert_eq!(after.release(&call(), &lease).await.unwrap(), Released::AlreadyOver);
    let next = after.acquire(&call(), &request("a", LONG)).await.unwrap();
    assert!(next.fence > lease.fence, "the fence did not survive the reboot");
    assert_eq!(after.renew(&call(), &lease, LONG).await.unwrap_err().lost_reason(), Some(LostReason::Taken));
    assert!(after.renew(&call(), &next, LONG).await.is_ok());
}

#[tokio::test]
async fn another_time_namespace_is_refused_while_leases_are_on_record() {
    let fixture = Fixture::new();
    let backend = fixture.open().await;
    let foreign = fixture.config().with(|c| c.host.time_namespace = Some(7));
    let lease = backend.acquire(&call(), &request("a", LONG)).await.unwrap();
    let error = refused(foreign.clone()).await;
    assert_eq!(error.kind(), ErrorKind::Misconfigured);
    assert!(error.to_string().contains("time namespace"), "{error}");
    backend.release(&call(), &lease).await.unwrap();
    let there = SqliteBackend::open(foreign).await.unwrap();
    // A backend that was open before: each row says whose clock it goes by.
    let lease = there.acquire(&call(), &request("a", LONG)).await.unwrap();
    assert_eq!(
        backend.acquire(&call(), &request("a", LONG)).await.unwrap_err().kind(),
        ErrorKind::Misconfigured
    );
    assert_eq!(backend.renew(&call(), &lease, LONG).await.unwrap_err().kind(), ErrorKind::Misconfigured);
    assert!(there.renew(&call(), &lease, LONG).await.is_ok());
}

#[tokio::test]
async fn a_file_that_was_replaced_is_noticed() {
    let fixture = Fixture::new();
    let backend = fixture.open().await;
    let lease = backend.acquire(&call(), &request("a", LONG)).await.unwrap();
    std::fs::rename(fixture.config().path, fixture.directory.path().join("moved.db")).unwrap();
    let error = backend.acquire(&call(), &request("b", LONG)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::FenceRegression);
    assert!(error.to_string().contains("removed or replaced"), "{error}");
    assert_eq!(
        backend.renew(&call(), &lease, LONG).await.unwrap_err().lost_reason(),
        Some(LostReason::Taken)
    );
    let many = backend.renew_many(&call(), std::slice::from_ref(&lease), LONG).await;
    assert!(many[0].as_ref().is_err_and(|e| e.lost_reason() == Some(LostReason::Taken)), "{many:?}");
}

// Files that will not do.

#[tokio::test]
async fn paths_that_cannot_work_are_refused_with_what_to_do() {
    let fixture = Fixture::new();
    let here = fixture.directory.path();
    std::fs::write(here.join("file"), "").unwrap();
    for (path, says) in [
        ("locks.db".into(), "sqlite:///var/lib/shop/locks.db"),
        (here.join("missing/locks.db"), "does not exist; create it"),
        (here.to_path_buf(), "is a directory"),
        ("/dev/null".into(), "not an ordinary file"),
        ("/".into(), "is a directory"),
    ] {
        let error = refused(SqliteConfig::new(path)).await;
        assert_eq!(error.kind(), ErrorKind::Misconfigured);
        assert!(error.to_string().contains(says), "{error}");
    }
    let error = refused(SqliteConfig::new(here.join("file/locks.db"))).await;
    assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
    let error = refused(fixture.config().with(|c| c.poll = Duration::ZERO..=SECOND)).await;
    assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
}

#[tokio::test]
async fn shared_file_systems_are_refused_and_unlisted_ones_need_a_word() {
    for (magic, kind) in [
        (0x6969, "NFS"),
        (0xff53_4d42, "CIFS"),
        (0xfe53_4d42, "SMB"),
        (0x0102_1997, "9p"),
        (0x6573_5546, "virtiofs"),
        (0x786f_4256, "VirtualBox"),
        (0x00c3_6400, "Ceph"),
        (0x0bd0_0bd0, "Lustre"),
    ] {
        match judge(magic) {
            FileSystem::Shared(name) => assert!(name.contains(kind), "{magic:#x} is {name}"),
            other => panic!("{kind} was judged {other:?}"),
        }
    }
    fn shared(_: &Path) -> io::Result<FileSystem> {
        Ok(FileSystem::Shared("NFS"))
    }
    fn unlisted(_: &Path) -> io::Result<FileSystem> {
        Ok(FileSystem::Unlisted(0xabcd))
    }
    let fixture = Fixture::new();
    for trust in [false, true] {
        let error = refused(fixture.config().with(|c| {
            c.host.file_system = shared;
            c.trust_file_system = trust;
        }))
        .await;
        assert_eq!(error.kind(), ErrorKind::Misconfigured);
        assert!(error.to_string().contains("NFS"), "{error}");
    }
    let error = refused(fixture.config().with(|c| c.host.file_system = unlisted)).await;
    assert!(error.to_string().contains("trust_file_system"), "{error}");
    assert!(!fixture.config().path.exists(), "a refused place was written to");
    let trusted = fixture.config().with(|c| {
        c.host.file_system = unlisted;
        c.trust_file_system = true;
    });
    SqliteBackend::open(trusted).await.unwrap();
}

#[tokio::test]
async fn files_that_are_not_ours_are_refused_and_left_alone() {
    async fn case(says: &str, prepare: impl FnOnce(&Path)) {
        let fixture = Fixture::new();
        let path = fixture.config().path;
        prepare(&path);
        let before = std::fs::read(&path).unwrap();
        let error = refused(fixture.config()).await;
        assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error:?}");
        assert!(error.to_string().contains(says), "{error}");
        assert!(error.to_string().contains("locks.db"), "the file is not named: {error}");
        assert_eq!(std::fs::read(&path).unwrap(), before, "a file that is not ours was changed");
    }
    let db = |path: &Path, sql: &str| Connection::open(path).unwrap().execute_batch(sql).unwrap();
    case("not a SQLite database", |p| std::fs::write(p, "x".repeat(4096)).unwrap()).await;
    case("something else", |p| db(p, "CREATE TABLE orders (id)")).await;
    case("something else", |p| db(p, "PRAGMA application_id = 7")).await;
    case("something else", |p| db(p, "CREATE TABLE lockcore_leases (id)")).await;
    case("newer version", |p| {
        db(p, &format!("PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = 99"))
    })
    .await;
    case("never was", |p| db(p, &format!("PRAGMA application_id = {APPLICATION_ID}"))).await;
}

#[tokio::test]
async fn a_file_that_somebody_changed_is_refused() {
    for (change, says) in [
        ("DROP TABLE lockcore_leases", "is missing"),
        ("DROP TABLE lockcore_leases; CREATE TABLE lockcore_leases (id)", "not as this version creates it"),
        ("DELETE FROM lockcore_meta", "floor of all fences"),
        ("CREATE TRIGGER t AFTER UPDATE ON lockcore_leases BEGIN DELETE FROM lockcore_meta; END", "triggers"),
    ] {
        let fixture = Fixture::new();
        fixture.open().await.close().await;
        fixture.raw().execute_batch(change).unwrap();
        let error = refused(fixture.config()).await;
        assert_eq!(error.kind(), ErrorKind::Misconfigured);
        assert!(error.to_string().contains(says), "{error}");
    }
}

#[tokio::test]
async fn a_damaged_file_is_a_typed_error() {
    let fixture = Fixture::new();
    let backend = fixture.open().await;
    for n in 0..200 {
        backend.raise_fence(&call_for(LONG), &name(&format!("n/{n}")), Fence::MIN).await.unwrap();
    }
    backend.close().await;
    let path = fixture.config().path;
    let mut bytes = std::fs::read(&path).unwrap();
    // All pages but the first, which holds the schema.
    bytes[4096..].fill(0xff);
    std::fs::write(&path, bytes).unwrap();
    let error = match SqliteBackend::open(fixture.config()).await {
        Err(error) => error,
        Ok(backend) => backend.acquire(&call(), &request("n/1", LONG)).await.unwrap_err(),
    };
    assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error:?}");
    assert!(format!("{error:?}").contains("damaged"), "{error:?}");
}

#[tokio::test]
async fn a_full_file_is_unavailable_and_what_is_held_can_be_released() {
    let fixture = Fixture::new();
    let backend = SqliteBackend::open(fixture.config().with(|c| c.host.max_pages = Some(6))).await.unwrap();
    let mut held = Vec::new();
    let error = loop {
        let asked = request(&format!("{}{}", "x".repeat(400), held.len()), LONG);
        match backend.acquire(&call(), &asked).await {
            Ok(lease) => held.push(lease),
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    assert!(error.to_string().contains("disk is full"), "{error}");
    for lease in &held {
        assert!(backend.renew(&call(), lease, LONG).await.is_ok());
        assert_eq!(backend.release(&call(), lease).await.unwrap(), Released::Now);
    }
}

#[tokio::test]
async fn new_files_are_for_their_user_alone() {
    use std::os::unix::fs::PermissionsExt;
    let fixture = Fixture::new();
    let backend = fixture.open().await;
    let _lease = backend.acquire(&call(), &request("a", LONG)).await.unwrap();
    for file in ["locks.db", "locks.db-wal", "locks.db-shm"] {
        let mode = std::fs::metadata(fixture.directory.path().join(file)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{file}");
    }
}

#[tokio::test]
async fn preflight_looks_at_the_file() {
    use std::os::unix::fs::PermissionsExt;
    fn local(_: &Path) -> io::Result<FileSystem> {
        Ok(FileSystem::Local)
    }
    fn memory(_: &Path) -> io::Result<FileSystem> {
        Ok(FileSystem::Memory)
    }
    let fixture = Fixture::new();
    let backend = SqliteBackend::open(fixture.config().with(|c| c.host.file_system = local)).await.unwrap();
    let preflight = backend.preflight(&call()).await.unwrap();
    assert_eq!(preflight.capabilities, backend.capabilities());
    assert!(preflight.findings.is_empty(), "{:?}", preflight.findings);
    std::fs::set_permissions(backend.path(), std::fs::Permissions::from_mode(0o644)).unwrap();
    let preflight = backend.preflight(&call()).await.unwrap();
    assert!(preflight.findings.iter().any(|f| f.contains("chmod")), "{:?}", preflight.findings);
    let backend = SqliteBackend::open(fixture.config().with(|c| c.host.file_system = memory)).await.unwrap();
    let preflight = backend.preflight(&call()).await.unwrap();
    assert_eq!(preflight.capabilities.fence, FenceSource::ClockBounded);
}

// Errors, arm by arm.

fn failure(code: i32, phase: Phase) -> Failure {
    let error = rusqlite::Error::SqliteFailure(rusqlite::ffi::Error::new(code), None);
    match phase {
        Phase::Work => Failure::work(error),
        Phase::Commit => Failure::commit(error),
    }
}

#[test]
fn before_the_commit_every_failure_is_definite() {
    for code in 1..=28 {
        let error = Error::from(failure(code, Phase::Work));
        assert!(error.kind().had_no_effect(), "code {code}: {error:?}");
        assert!(!failure(code, Phase::Work).is_in_doubt());
    }
}

#[test]
fn a_failed_commit_is_unknown_unless_it_did_not_begin_or_did_not_fit() {
    use rusqlite::ffi;
    // The codes of failed statements; 27 and 28 are notices, 100 and above are answers.
    for code in (1..=26).chain([27, 28, 99]) {
        let definite = [ffi::SQLITE_BUSY, ffi::SQLITE_LOCKED, ffi::SQLITE_FULL].contains(&code);
        let failure = failure(code, Phase::Commit);
        let kind = Error::from(failure.clone()).kind();
        assert_eq!(kind == ErrorKind::Unknown, !definite, "code {code}: {kind:?}");
        assert_eq!(failure.is_in_doubt(), !definite);
        assert!(!failure.is_busy(), "a commit must not be repeated");
    }
    let flush = failure(ffi::SQLITE_IOERR_FSYNC, Phase::Commit);
    assert_eq!(Error::from(flush).kind(), ErrorKind::Unknown);
    let flush = failure(ffi::SQLITE_IOERR_FSYNC, Phase::Work);
    assert_eq!(Error::from(flush).kind(), ErrorKind::Unavailable);
}

#[test]
fn an_unconfirmed_commit_is_overwritten_before_anything_is_called_gone() {
    let fixture = Fixture::new();
    let mut store = super::open::open(&fixture.config()).unwrap().store;
    let settled = |store: &super::wire::Store| {
        store.raw().query_row("SELECT settled FROM lockcore_meta", [], |row| row.get::<_, i64>(0)).unwrap()
    };
    store.settle().unwrap();
    assert_eq!(settled(&store), 0, "a settled store was written to");
    store.doubt();
    store.settle().unwrap();
    store.settle().unwrap();
    assert_eq!(settled(&store), 1);
    let key = Key { namespace: "".into(), name: name("a") };
    assert!(store.look(&key).unwrap().is_none());
    store.grant(&key, &Owner::random(), 1_000_000_000, 0, None).unwrap();
    assert!(matches!(store.look(&key).unwrap().unwrap().standing, Standing::Live(_)));
}

#[tokio::test]
async fn the_phases_of_a_migration_bind_their_members() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("locks.db");
    let open = async || SqliteBackend::open(SqliteConfig::new(path.clone())).await.unwrap();
    let (backend, operator) = (open().await, open().await);
    let (call, ttl) = (call().labelled("web-1:4711"), Duration::from_secs(20));
    assert_eq!(backend.phase_read(&call).await.unwrap(), None);
    assert_eq!(backend.members(&call).await.unwrap(), []);
    assert_eq!(backend.join(&call, "from", ttl).await.unwrap_err().kind(), ErrorKind::Unavailable);

    let mut first = PhaseRecord::new("moving", 1);
    first.open = vec!["from".into(), "b%\n0".into()];
    assert!(operator.phase_cas(&call, None, &first).await.unwrap());
    assert!(!operator.phase_cas(&call, None, &first).await.unwrap(), "it is there already");
    assert_eq!(backend.phase_read(&call).await.unwrap().as_ref(), Some(&first));
    let elsewhere = call.in_namespace("elsewhere").unwrap();
    assert_eq!(backend.phase_read(&elsewhere).await.unwrap(), None);

    let member = backend.join(&call, "from", ttl).await.unwrap();
    let short = backend.join(&call, "from", Duration::from_millis(10)).await;
    let seen = operator.members(&call).await.unwrap();
    assert!(seen.iter().any(|m| m.owner == member.owner.digest() && m.phase == "from"), "{seen:?}");
    assert_eq!(seen[0].label.as_deref(), Some("web-1:4711"));
    // It is renewed like a lock, and it is none: the name is free for one.
    let renewed = backend.renew(&call, &member, ttl * 2).await.unwrap();
    assert!(renewed.deadline > member.deadline);
    let lock = backend.acquire(&call, &request("from", ttl)).await.unwrap();
    if let Ok(short) = short {
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert_eq!(backend.renew(&call, &short, ttl).await.unwrap_err().kind(), ErrorKind::Lost);
    }

    let mut second = first.clone();
    (second.epoch, second.open, second.floor) = (2, Vec::new(), Some(lock.fence));
    assert!(!operator.phase_cas(&call, Some(&second), &second).await.unwrap());
    assert!(operator.phase_cas(&call, Some(&first), &second).await.unwrap());
    assert_eq!(backend.phase_read(&call).await.unwrap(), Some(second));
    assert_eq!(backend.join(&call, "from", ttl).await.unwrap_err().kind(), ErrorKind::Unavailable);
    let renewed = backend.renew(&call, &renewed, ttl).await.expect("who is in stays until it leaves");
    assert_eq!(backend.leave(&call, &renewed).await.unwrap(), Released::Now);
    assert_eq!(backend.leave(&call, &renewed).await.unwrap(), Released::AlreadyOver);
    assert_eq!(operator.members(&call).await.unwrap(), []);
}
