//! Expiry: a lease that nobody renews ends, not too early and not much too late, and its deadline is honest.

use std::time::Duration;

use lockcore::{ErrorKind, Released, backend::AcquireRequest};

use crate::{
    bench::{Bench, assert_refused},
    case::{
        Outcome,
        Verdict::{Kept, Refused},
        cases,
    },
    history::{Demand, Property},
};

cases![
    c01_a_silent_holder_is_followed,
    c02_never_early,
    c03_the_deadline_counts_what_was_granted,
    c04_a_slow_reply_counts_from_the_request[Wire],
    c05_a_reply_after_the_ttl_is_no_grant[Wire],
    c06_a_lock_delay_holds_after_an_unclean_end,
];

/// A holder that falls silent is followed by a waiter; its lease can then be neither renewed nor released, also while
/// nobody has taken the lock.
async fn c01_a_silent_holder_is_followed(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let (alice, bob) = (bench.client("alice").await, bench.client("bob").await);
    let stale = alice.try_acquire(&name).await?;
    let live = bob.acquire(&name, bench.ttl() * 20).await?;
    assert!(live.fence > stale.fence, "{:?} after {:?}", live.fence, stale.fence);
    assert!(!alice.believes(&stale), "granted while the first holder's deadline had not come");
    bench.measure_time("grant after a silent holder's deadline", stale.deadline.until(bench.now()));
    assert_refused(alice.renew(&stale).await, ErrorKind::Lost, "a lost lease was renewed");
    bob.release(&live).await?;
    let quiet = bob.try_acquire(&name).await?;
    bob.freeze_past(&quiet).await;
    bench.until("the server ends a silent lease", async || bench.holder(&name).await.is_none()).await;
    assert_refused(bob.renew(&quiet).await, ErrorKind::Lost, "an expired lease was renewed");
    assert_eq!(bob.release(&quiet).await?, Released::AlreadyOver, "an expired lease was released");
    assert_eq!(bench.holder(&name).await, None, "a renewal of an expired lease created a record");
    Ok(Kept)
}

/// Again and again: a lock is never granted to another before the holder's own deadline.
async fn c02_never_early(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let (alice, bob) = (bench.client("alice").await, bench.client("bob").await);
    let rounds = if bench.stage.service.virtual_time() { 20 } else { 5 };
    for round in 0..rounds {
        let mut lease = alice.acquire(&name, bench.ttl() * 20).await?;
        for step in 0..bench.draw(round, 3) {
            bench.pass(bench.ttl().mul_f64(0.1 + 0.05 * step as f64)).await;
            lease = alice.renew(&lease).await?;
        }
        let next = bob.acquire(&name, bench.ttl() * 20).await?;
        assert!(bench.now() >= lease.deadline, "round {round}: granted before the holder's deadline");
        bench.measure_time("grant after the deadline", lease.deadline.until(bench.now()));
        bob.release(&next).await?;
    }
    bench.judge(|rules| rules.demand(Demand::Judged(Property::S2, 2)));
    Ok(Kept)
}

/// Odd TTLs are rounded up on the server and never stretched for the holder: its deadline counts what it asked.
async fn c03_the_deadline_counts_what_was_granted(bench: Bench) -> Outcome {
    let alice = bench.client("alice").await;
    let least = *bench.capabilities().ttl.start();
    for extra in [Duration::from_micros(1), Duration::from_micros(1500), Duration::from_millis(333)] {
        let (name, ttl) = (bench.fresh_name(), least.max(bench.ttl()) + extra);
        let sent = bench.now();
        let lease = alice.ask(&AcquireRequest::new(name.clone(), ttl), alice.budget()).await?;
        let answered = bench.now();
        // The backend reads the clock between the two.
        assert!(lease.deadline <= answered.saturating_add(ttl), "asked {ttl:?}, stretched to {lease:?}");
        assert!(sent.until(lease.deadline) >= ttl / 2, "asked {ttl:?}, over too soon: {lease:?}");
        let on_server = alice.inspect(&name).await?.holder.expect("alice holds").remaining;
        let local = bench.now().until(lease.deadline);
        assert!(
            on_server + Duration::from_millis(2) >= local.mul_f64(0.99),
            "the server ends it before the holder"
        );
        alice.release(&lease).await?;
    }
    Ok(Kept)
}

/// The deadline counts from the moment the request left, not from the reply.
async fn c04_a_slow_reply_counts_from_the_request(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let alice = bench.client("alice").await;
    // A connection that has served an acquire needs one exchange for the next.
    let first = alice.try_acquire(&name).await?;
    alice.release(&first).await?;
    let sent = bench.now();
    // Three times this is less than the TTL: some stores ask in rounds.
    bench.wire().delay_replies(bench.ttl().mul_f64(0.3));
    let lease = alice.try_acquire(&name).await?;
    bench.wire().delay_replies(Duration::ZERO);
    let promised = sent.until(lease.deadline);
    assert!(promised <= bench.ttl(), "the deadline lies {promised:?} after the request left");
    alice.release(&lease).await?;
    Ok(Kept)
}

/// A reply that comes after the TTL is no grant, and what is left of it is cleared away.
async fn c05_a_reply_after_the_ttl_is_no_grant(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let (alice, bob) = (bench.client("alice").await, bench.client("bob").await);
    bench.wire().delay_replies(bench.ttl().mul_f64(1.2));
    let request = alice.request(&name);
    let late = alice.ask(&request, bench.ttl() * 10).await;
    bench.wire().delay_replies(Duration::ZERO);
    assert!(late.is_err(), "a lease that is over was handed out: {late:?}");
    alice.abandon(&request).await?;
    let next = bob.try_acquire(&name).await?;
    bob.release(&next).await?;
    Ok(Kept)
}

/// After an unclean end nobody gets the lock for the lock-delay; a clean release frees it at once.
async fn c06_a_lock_delay_holds_after_an_unclean_end(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let delay = bench.ttl();
    let locks = bench.locks("alice", |o| o.lock_delay = delay).await;
    if !bench.capabilities().lock_delay {
        assert_refused(
            locks.named(&name).acquire().await,
            ErrorKind::Unsupported,
            "an unpromised lock-delay",
        );
        return Ok(Refused);
    }
    bench.judge(|rules| rules.with(|r| r.lock_delay = delay));
    let bob = bench.client("bob").await;
    locks.named(&name).acquire().await?.release().await?;
    let at_once = bob.try_acquire(&name).await?;
    bob.release(&at_once).await?;

    let guard = locks.named(&name).acquire().await?;
    let over = guard.lease().deadline;
    let crash = std::thread::spawn(move || {
        let _guard = guard;
        std::panic::resume_unwind(Box::new("half done"));
    });
    assert!(crash.join().is_err());
    let next = bob.acquire(&name, bench.ttl() * 40).await?;
    let passed = over.until(bench.now());
    assert!(passed >= delay.mul_f64(0.9), "granted {passed:?} after the deadline of an unclean end");
    bob.release(&next).await?;
    Ok(Kept)
}
