//! Ownership: only this very holding can be renewed or released.

use std::collections::HashSet;

use lockcore::{ErrorKind, Released, backend::Owner};

use crate::{
    bench::{Bench, assert_refused},
    case::{Outcome, Verdict::Kept, cases},
    history::{Demand, Property},
};

cases![
    b01_a_forged_owner_changes_nothing,
    b02_an_earlier_lease_of_the_same_client_changes_nothing,
    b03_a_late_copy_of_a_release_ends_nothing,
    b04_a_second_release_finds_it_over,
    b05_a_release_after_a_takeover_ends_nothing,
    b06_owners_are_distinct_and_not_shown,
];

/// Renewing or releasing with the right fence and another owner is refused, and the holder keeps what it had.
async fn b01_a_forged_owner_changes_nothing(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let (alice, mallory) = (bench.client("alice").await, bench.client("mallory").await);
    let lease = alice.try_acquire(&name).await?;
    let forged = mallory.forged(&lease);
    let before = alice.inspect(&name).await?.holder.expect("alice holds").remaining;
    let long = bench.ttl() * 10;
    assert_refused(mallory.renew_unrecorded(&forged, long).await, ErrorKind::Lost, "a forged owner renewed");
    let released = mallory.release_unrecorded(&forged).await?;
    assert_eq!(released, Released::AlreadyOver, "a forged owner released");
    let after = alice.inspect(&name).await?.holder.expect("a forged owner ended the lease").remaining;
    assert!(after <= before, "a forged owner prolonged the lease from {before:?} to {after:?}");
    assert_eq!(bench.holder(&name).await, Some(lease.owner.digest()), "a forged owner ended the lease");
    assert_eq!(alice.release(&lease).await?, Released::Now);
    Ok(Kept)
}

/// The handle of lease n - 1 does nothing to lease n of the same client.
async fn b02_an_earlier_lease_of_the_same_client_changes_nothing(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let alice = bench.client("alice").await;
    let first = alice.try_acquire(&name).await?;
    alice.release(&first).await?;
    let second = alice.try_acquire(&name).await?;
    assert_refused(alice.renew(&first).await, ErrorKind::Lost, "a lease that is over was renewed");
    assert_eq!(alice.release(&first).await?, Released::AlreadyOver, "a stale release went through");
    assert_eq!(
        bench.holder(&name).await,
        Some(second.owner.digest()),
        "the earlier lease's release ended the later"
    );
    drop(alice.renew(&second).await?);
    alice.release(&second).await?;
    Ok(Kept)
}

/// A release that is asked again after the lock was taken anew, by the same client, ends nothing (R03).
async fn b03_a_late_copy_of_a_release_ends_nothing(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let (alice, carol) = (bench.client("alice").await, bench.client("carol").await);
    let first = alice.try_acquire(&name).await?;
    alice.release(&first).await?;
    let second = alice.try_acquire(&name).await?;
    // The copy that was held up on the way arrives now.
    assert_eq!(alice.release(&first).await?, Released::AlreadyOver, "a stale release went through");
    drop(alice.renew(&second).await?);
    assert_refused(carol.try_acquire(&name).await, ErrorKind::Held, "the late copy freed the lock");
    assert!(second.fence > first.fence, "{:?} after {:?}", second.fence, first.fence);
    alice.release(&second).await?;
    Ok(Kept)
}

/// Releasing twice is no error: the second finds the lease over.
async fn b04_a_second_release_finds_it_over(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let alice = bench.client("alice").await;
    let lease = alice.try_acquire(&name).await?;
    assert_eq!(alice.release(&lease).await?, Released::Now);
    assert_eq!(alice.release(&lease).await?, Released::AlreadyOver);
    assert_eq!(alice.release(&lease).await?, Released::AlreadyOver);
    Ok(Kept)
}

/// A holder whose lease ran out and was taken over cannot end the new holder's lease.
async fn b05_a_release_after_a_takeover_ends_nothing(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let (alice, bob, carol) =
        (bench.client("alice").await, bench.client("bob").await, bench.client("carol").await);
    let stale = alice.try_acquire(&name).await?;
    alice.freeze_past(&stale).await;
    let live = bob.acquire(&name, bench.ttl() * 20).await?;
    assert_eq!(alice.release(&stale).await?, Released::AlreadyOver, "a stale release went through");
    assert_refused(carol.try_acquire(&name).await, ErrorKind::Held, "a stale release freed the lock");
    drop(bob.renew(&live).await?);
    bob.release(&live).await?;
    bench.judge(|rules| rules.demand(Demand::Judged(Property::S3, 1)));
    Ok(Kept)
}

/// No two acquisitions share an owner, and neither `Debug` nor an error shows one in full.
async fn b06_owners_are_distinct_and_not_shown(bench: Bench) -> Outcome {
    let mut owners = HashSet::new();
    for _ in 0..100_000 {
        assert!(owners.insert(*Owner::random().expose()), "an owner came twice");
    }
    let name = bench.fresh_name();
    let (alice, bob) = (bench.client("alice").await, bench.client("bob").await);
    let lease = alice.try_acquire(&name).await?;
    let refused = assert_refused(bob.try_acquire(&name).await, ErrorKind::Held, "a held lock was granted");
    let state = alice.inspect(&name).await?;
    let shown = format!("{lease:?} {refused} {refused:?} {state:?} {:?}", alice.backend()).to_lowercase();
    let hex: String = lease.owner.expose().iter().map(|byte| format!("{byte:02x}")).collect();
    assert!(!shown.contains(&hex), "an owner shows in {shown}");
    alice.release(&lease).await?;
    Ok(Kept)
}
