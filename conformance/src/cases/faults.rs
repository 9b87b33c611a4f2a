//! Faults: what a store may lose, and that the resource stays right.

use lockcore::{ErrorKind, LostReason};

use crate::{
    bench::{Bench, assert_refused},
    case::{Outcome, Verdict::Kept, cases},
    history::{Demand, Expect, Property, Verdict},
};

cases![
    j08_a_removed_record_gives_two_holders_and_the_resource_one[Removal],
    j11_a_store_that_refuses_is_unavailable,
];

/// An operator's delete breaks exclusion until the holder notices: two believe. The resource still takes one.
async fn j08_a_removed_record_gives_two_holders_and_the_resource_one(bench: Bench) -> Outcome {
    let (name, bob) = (bench.fresh_name(), bench.client("bob").await);
    let mut register = bench.register(&name);
    let locks = bench.locks("alice", |_| {}).await;
    let guard = locks.named(&name).acquire().await?;
    let stale = guard.stamp()?;
    assert_eq!(register.write(stale, "alice/1", 1), Verdict::Accepted);
    bench.steal(&name).await;
    let stolen = bench.now();
    let live = bob.try_acquire(&name).await?;
    assert_eq!(register.write(live.stamp(), "bob/1", 2), Verdict::Accepted);
    assert_eq!(register.write(stale, "alice/2", 3), Verdict::Stale, "the stale fence was let through");
    assert_eq!(guard.lost().await, LostReason::Taken);
    bench.measure_time("the former holder learnt it after", stolen.until(bench.now()));
    bob.release(&live).await?;
    bench.judge(|rules| rules.expect(Property::S2, Expect::Breaks).demand(Demand::StaleVerdicts(1)));
    Ok(Kept)
}

/// A store that refuses everything is `Unavailable`: not busy, not granted, and well again afterwards.
async fn j11_a_store_that_refuses_is_unavailable(bench: Bench) -> Outcome {
    let (name, alice) = (bench.fresh_name(), bench.client("alice").await);
    bench.wire().refuse(true);
    let mut refused = alice.try_acquire(&name).await;
    let torn = !bench.stage.service.servers().is_empty();
    if torn && refused.as_ref().is_err_and(|error| error.kind() == ErrorKind::Unknown) {
        // The line that stood was cut with the request on it, and nobody can say how far that came.
        refused = alice.try_acquire(&name).await;
    }
    assert_refused(refused, ErrorKind::Unavailable, "a store that refuses granted");
    bench.wire().refuse(false);
    let lease = alice.try_acquire(&name).await?;
    alice.release(&lease).await?;
    Ok(Kept)
}
