//! Migration: fences keep growing when locks move from one store to another.

use lockcore::{ErrorKind, Fence, Released};

use crate::{
    bench::{Bench, assert_refused},
    case::{Outcome, Verdict::Kept, Verdict::Refused, cases},
};

cases![
    o02_a_name_that_was_raised_grants_above,
    o05_a_raise_by_a_former_holder_raises_nothing,
    o06_nothing_was_granted_above_the_high_water,
];

/// A number that the old store has reached is carried over: every later grant is above it, held or not, and a lower
/// number lowers nothing.
async fn o02_a_name_that_was_raised_grants_above(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let alice = bench.client("alice").await;
    let (backend, call) = (alice.backend().clone(), alice.call(alice.budget()));
    let held = alice.try_acquire(&name).await?;
    let reached = Fence::new(held.fence.get() + 1_000_000)?;
    let stands = match backend.raise_fence(&call, &name, reached).await {
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            alice.release(&held).await?;
            return Ok(Refused);
        }
        stands => stands?,
    };
    assert!(stands >= reached, "asked for {reached:?}, {stands:?} stands");
    let again = backend.raise_fence(&call, &name, held.fence).await?;
    assert!(again >= reached, "a lower number lowered the floor to {again:?}");
    assert_eq!(bench.holder(&name).await, Some(held.owner.digest()), "a raise changed the holder");
    let held = alice.renew(&held).await?;
    assert_eq!(alice.release(&held).await?, Released::Now, "a raise ended the lease");
    let next = alice.try_acquire(&name).await?;
    assert!(next.fence > reached, "the fence {:?} is not above {reached:?}", next.fence);
    alice.release(&next).await?;
    Ok(Kept)
}

/// Raising is part of holding: who does not hold any more raises nothing, and who holds raises what comes after.
async fn o05_a_raise_by_a_former_holder_raises_nothing(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let (alice, bob) = (bench.client("alice").await, bench.client("bob").await);
    let old = alice.try_acquire(&name).await?;
    alice.release(&old).await?;
    let live = bob.try_acquire(&name).await?;
    let (call, far) = (alice.call(alice.budget()), Fence::new(live.fence.get() + 1_000_000_000_000)?);
    match alice.backend().raise(&call, &old, far).await {
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            bob.release(&live).await?;
            return Ok(Refused);
        }
        raised => drop(assert_refused(raised, ErrorKind::Lost, "a former holder raised the fence")),
    }
    let floor = Fence::new(live.fence.get() + 1_000)?;
    bob.backend().raise(&call, &live, floor).await?;
    bob.backend().raise(&call, &live, floor).await?;
    bob.release(&live).await?;
    let next = alice.try_acquire(&name).await?;
    assert!(next.fence > floor, "the fence {:?} is not above the holder's floor {floor:?}", next.fence);
    assert!(next.fence < far, "the refused raise left its mark: {:?}", next.fence);
    alice.release(&next).await?;
    Ok(Kept)
}

/// The number that a migration starts from covers every grant so far, of names that are free again, too.
async fn o06_nothing_was_granted_above_the_high_water(bench: Bench) -> Outcome {
    let alice = bench.client("alice").await;
    let mut highest = Fence::MIN;
    for _ in 0..5 {
        let name = bench.fresh_name();
        let lease = alice.try_acquire(&name).await?;
        highest = highest.max(lease.fence);
        alice.release(&lease).await?;
    }
    match alice.backend().high_water(&alice.call(alice.budget())).await {
        Err(error) if error.kind() == ErrorKind::Unsupported => Ok(Refused),
        water => {
            let water = water?;
            assert!(water >= Some(highest), "{highest:?} was granted above the high water {water:?}");
            Ok(Kept)
        }
    }
}
