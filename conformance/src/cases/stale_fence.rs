//! Fences at the resource: the last word is there.

use lockcore::{Fence, Released, Stamp, backend::Owner};

use crate::{
    bench::Bench,
    case::{Outcome, Verdict::Kept, cases},
    history::{Demand, Property, Verdict},
};

cases![
    e01_a_stale_write_is_refused,
    e02_a_retry_is_a_duplicate_and_a_foreign_equal_is_stale,
    e03_a_read_under_a_fence_shuts_the_former_holder_out,
    e04_a_resource_that_restarts_remembers_its_floor,
    e05_the_fence_outlives_release_and_expiry,
    e06_a_grant_is_above_its_floor[Floor],
];

/// After a newer holder has written, an older fence is refused and changes nothing.
async fn e01_a_stale_write_is_refused(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let (alice, bob) = (bench.client("alice").await, bench.client("bob").await);
    let mut register = bench.register(&name);
    let old = alice.try_acquire(&name).await?;
    alice.release(&old).await?;
    let new = bob.try_acquire(&name).await?;
    assert_eq!(register.write(new.stamp(), "bob/1", 42), Verdict::Accepted, "the live holder was refused");
    assert_eq!(register.write(old.stamp(), "alice/1", 41), Verdict::Stale, "the stale fence was let through");
    assert_eq!(register.read(old.stamp()), None, "a read under a stale fence was let through");
    assert_eq!(register.value(), 42);
    bob.release(&new).await?;
    bench.judge(|rules| rules.demand(Demand::StaleVerdicts(2)));
    Ok(Kept)
}

/// The same operation twice is a duplicate, another operation of the same holder is accepted, and an equal fence of
/// another owner is stale.
async fn e02_a_retry_is_a_duplicate_and_a_foreign_equal_is_stale(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let alice = bench.client("alice").await;
    let mut register = bench.register(&name);
    let lease = alice.try_acquire(&name).await?;
    assert_eq!(register.write(lease.stamp(), "pay/1", 1), Verdict::Accepted);
    assert_eq!(register.write(lease.stamp(), "pay/1", 1), Verdict::Duplicate, "a retry was applied twice");
    assert_eq!(
        register.write(lease.stamp(), "pay/2", 2),
        Verdict::Accepted,
        "the holder's next write was refused"
    );
    let twin = Stamp::new(lease.fence, Owner::random().digest());
    assert_eq!(
        register.write(twin, "pay/3", 3),
        Verdict::Stale,
        "an equal fence of another owner was let through"
    );
    alice.release(&lease).await?;
    Ok(Kept)
}

/// A read under a fence raises the floor: the former holder's late write cannot fall between that read and the write
/// that depends on it.
async fn e03_a_read_under_a_fence_shuts_the_former_holder_out(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let (alice, bob) = (bench.client("alice").await, bench.client("bob").await);
    let mut register = bench.register(&name);
    let stale = alice.try_acquire(&name).await?;
    assert_eq!(register.write(stale.stamp(), "alice/1", 1), Verdict::Accepted);
    alice.freeze_past(&stale).await;
    let live = bob.acquire(&name, bench.ttl() * 20).await?;
    let seen = register.read(live.stamp()).expect("the live holder was refused");
    assert_eq!(
        register.write(stale.stamp(), "alice/2", 10),
        Verdict::Stale,
        "a write fell between read and write"
    );
    assert_eq!(register.write(live.stamp(), "bob/1", seen + 1), Verdict::Accepted);
    assert_eq!(register.value(), 2, "an update was lost");
    bob.release(&live).await?;
    bench.judge(|rules| rules.demand(Demand::Judged(Property::S14, 1)));
    Ok(Kept)
}

/// A resource that restarts has its floor, its value and its operations on disk: the old fence stays refused, and a
/// retry stays a duplicate.
async fn e04_a_resource_that_restarts_remembers_its_floor(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let (alice, bob) = (bench.client("alice").await, bench.client("bob").await);
    let mut register = bench.register(&name);
    let old = alice.try_acquire(&name).await?;
    alice.release(&old).await?;
    let new = bob.try_acquire(&name).await?;
    assert_eq!(register.write(new.stamp(), "bob/1", 42), Verdict::Accepted, "the live holder was refused");
    let mut register = register.restarted();
    assert_eq!(
        register.write(old.stamp(), "alice/1", 41),
        Verdict::Stale,
        "a restart let the stale fence through"
    );
    assert_eq!(register.write(new.stamp(), "bob/1", 42), Verdict::Duplicate, "a restart let a retry through");
    assert_eq!(register.read(new.stamp()), Some(42), "a restart forgot the value");
    bob.release(&new).await?;
    bench.judge(|rules| rules.demand(Demand::StaleVerdicts(1)));
    Ok(Kept)
}

/// Fences grow over release, expiry and idleness of a name.
async fn e05_the_fence_outlives_release_and_expiry(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let alice = bench.client("alice").await;
    let released = alice.try_acquire(&name).await?;
    assert_eq!(alice.release(&released).await?, Released::Now);
    let expired = alice.try_acquire(&name).await?;
    alice.freeze_past(&expired).await;
    bench.until("the lease has ended", async || bench.holder(&name).await.is_none()).await;
    bench.pass(bench.ttl() * 3).await;
    let last = alice.try_acquire(&name).await?;
    let fences = [released.fence, expired.fence, last.fence];
    assert!(fences.is_sorted_by(|a, b| a < b), "the fence did not grow: {fences:?}");
    alice.release(&last).await?;
    let seen = alice.inspect(&name).await?;
    assert!(seen.last_fence >= Some(last.fence), "the highest fence was forgotten: {seen:?}");
    Ok(Kept)
}

/// A grant is above the floor that was asked for, and so are all later grants.
async fn e06_a_grant_is_above_its_floor(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let alice = bench.client("alice").await;
    let first = alice.try_acquire(&name).await?;
    alice.release(&first).await?;
    let floor = Fence::new(first.fence.get() + 1_000)?;
    let above = alice.ask(&alice.request(&name).above(floor), alice.budget()).await?;
    assert!(above.fence > floor, "{:?} is not above the floor {floor:?}", above.fence);
    alice.release(&above).await?;
    let next = alice.try_acquire(&name).await?;
    assert!(next.fence > above.fence, "the fence did not grow: {:?} after {:?}", next.fence, above.fence);
    alice.release(&next).await?;
    Ok(Kept)
}
