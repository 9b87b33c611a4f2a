//! Clocks: the wall clock of a client moves nothing.

use crate::{
    bench::Bench,
    case::{Outcome, Verdict::Kept, cases},
};

cases![k03_deadlines_are_on_the_clock_since_boot];

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
