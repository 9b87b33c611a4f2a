//! Clocks: the wall clock of a client moves nothing.

use lockcore::{LostReason, State};

use crate::{
    bench::Bench,
    case::{Outcome, Verdict::Kept, cases},
    history::Verdict,
};

cases![k03_deadlines_are_on_the_clock_since_boot, k05_a_suspend_counts[VirtualTime]];

/// A deadline lies on the clock that the bench reads, which is the one since boot: a step of the wall clock cannot
/// move it.
async fn k03_deadlines_are_on_the_clock_since_boot(bench: Bench) -> Outcome {
    let (name, alice) = (bench.fresh_name(), bench.client("alice").await);
    let lease = alice.try_acquire(&name).await?;
    let wall = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
    let left = bench.now().until(lease.deadline);
    assert!(left <= bench.ttl() && left > bench.ttl() / 4, "{left:?} are left of {:?}", bench.ttl());
    let nanos = u128::from(lease.deadline.as_nanos());
    assert!(nanos.abs_diff(wall.as_nanos()) > 1_000_000_000_000, "the deadline lies on the wall clock");
    alice.release(&lease).await?;
    Ok(Kept)
}

/// A machine that was suspended past the deadline wakes up without its locks: no timer rang meanwhile, and the first
/// look says so all the same.
async fn k05_a_suspend_counts(bench: Bench) -> Outcome {
    let (name, bob) = (bench.fresh_name(), bench.client("bob").await);
    let mut register = bench.register(&name);
    let locks = bench.locks("alice", |_| {}).await;
    let guard = locks.named(&name).acquire().await?;
    let stale = guard.stamp()?;
    let mut suspend = std::pin::pin!(tokio::time::advance(bench.ttl() * 2));
    // Polled once: the clock has jumped, and no other task ran before the look.
    assert!(crate::bench::poll_once(&mut suspend).await.is_pending());
    let refusal = guard.stamp().expect_err("a stamp after a suspend past the deadline");
    assert_eq!(refusal.lost_reason(), Some(LostReason::Expired), "{refusal}");
    assert_eq!(guard.state(), State::Lost(LostReason::Expired));
    suspend.await;
    let live = bob.acquire(&name, bench.ttl()).await?;
    assert_eq!(register.write(live.stamp(), "bob/1", 1), Verdict::Accepted, "the live holder was refused");
    assert_eq!(register.write(stale, "alice/1", 2), Verdict::Stale, "the stale fence was let through");
    bob.release(&live).await?;
    Ok(Kept)
}
