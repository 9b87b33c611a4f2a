//! Operators: who looks, lists or breaks from outside gets the truth, and can never hurt a newer holder by mistake.

use lockcore::{ErrorKind, LockName, LostReason, Stamp, Verb, backend::Owner};

use crate::{
    bench::{Bench, assert_refused},
    case::{Outcome, Verdict::Kept, Verdict::Refused, cases},
    history::{Demand, FaultClass, Verdict},
};

cases![
    p01_a_look_shows_the_holder_and_changes_nothing,
    p02_a_broken_holder_learns_it_and_is_fenced_out,
    p03_a_break_that_expects_another_holder_changes_nothing,
    p04_names_are_listed_in_order_and_under_a_prefix,
];

/// A look from outside shows stamp, remaining time and the highest fence; looking again and again prolongs nothing.
async fn p01_a_look_shows_the_holder_and_changes_nothing(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let (alice, bob) = (bench.client("alice").await, bench.client("bob").await);
    let free = bob.inspect(&name).await?;
    assert!(free.holder.is_none(), "a lock that nobody took has a holder: {free:?}");
    let lease = alice.try_acquire(&name).await?;
    let first = bob.inspect(&name).await?;
    let holder = first.holder.clone().expect("the holder is not shown");
    assert_eq!(holder.stamp(), lease.stamp(), "another holder is shown");
    assert!(first.last_fence >= Some(lease.fence), "the highest fence is not shown: {first:?}");
    if bench.capabilities().labels {
        assert_eq!(holder.label.as_deref(), Some("alice"), "the label is not shown");
    }
    bench.pass(bench.ttl() / 4).await;
    let second = bob.inspect(&name).await?.holder.expect("the holder is not shown any more");
    assert!(second.remaining <= holder.remaining, "a look prolonged the lease: {second:?} after {holder:?}");
    alice.freeze_past(&lease).await;
    bench.until("the lease has ended", async || bench.holder(&name).await.is_none()).await;
    let after = bob.inspect(&name).await?;
    assert!(after.holder.is_none(), "a lease that is over is shown: {after:?}");
    Ok(Kept)
}

/// A holder that an operator cuts off learns why; the floor of the break lies between its fence and the next, so the
/// operator can shut it out of the resource at once.
async fn p02_a_broken_holder_learns_it_and_is_fenced_out(bench: Bench) -> Outcome {
    let (name, bob) = (bench.fresh_name(), bench.client("bob").await);
    let mut register = bench.register(&name);
    let locks = bench.locks("alice", |_| {}).await;
    let guard = locks.named(&name).acquire().await?;
    let stale = guard.stamp()?;
    assert_eq!(register.write(stale, "alice/1", 1), Verdict::Accepted);
    let fault = bench.recorder().fault("break", "server", name.as_str(), FaultClass::A6, "");
    let broken = match bob.break_lock(&name, Some(stale)).await {
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            fault.end("refused");
            guard.release().await?;
            return Ok(Refused);
        }
        broken => broken?,
    };
    fault.end("by the answer");
    assert_eq!(broken.holder.map(|h| h.stamp()), Some(stale), "another holder was cut off");
    assert!(broken.floor > stale.fence, "the floor {:?} is not above {:?}", broken.floor, stale.fence);
    assert_eq!(bench.holder(&name).await, None, "a broken lock has a holder");
    let operator = Stamp::new(broken.floor, Owner::random().digest());
    assert!(register.read(operator).is_some(), "the operator's floor was refused");
    assert_eq!(register.write(stale, "alice/2", 2), Verdict::Stale, "the stale fence was let through");
    let reason = guard.lost().await;
    assert!(
        matches!(reason, LostReason::Broken | LostReason::Taken),
        "a holder that was cut off learnt {reason:?}"
    );
    let next = bob.try_acquire(&name).await?;
    assert!(next.fence > broken.floor, "the fence {:?} is not above the break's floor", next.fence);
    assert_eq!(register.write(next.stamp(), "bob/1", 3), Verdict::Accepted, "the live holder was refused");
    bob.release(&next).await?;
    bench.judge(|rules| rules.demand(Demand::StaleVerdicts(1)));
    Ok(Kept)
}

/// An operator who looked, thought, and breaks a holder that has gone meanwhile does not hit its successor.
async fn p03_a_break_that_expects_another_holder_changes_nothing(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let (alice, bob, carol) =
        (bench.client("alice").await, bench.client("bob").await, bench.client("carol").await);
    let seen = alice.try_acquire(&name).await?;
    alice.release(&seen).await?;
    let live = bob.try_acquire(&name).await?;
    match carol.break_lock(&name, Some(seen.stamp())).await {
        Err(error) if error.kind() == ErrorKind::Unsupported => {
            assert_eq!(error.verb(), Some(Verb::Break), "{error}");
            bob.release(&live).await?;
            return Ok(Refused);
        }
        broken => {
            let refusal = assert_refused(broken, ErrorKind::Held, "a break hit another holder");
            let holder = refusal.holder().map(|h| h.stamp());
            assert_eq!(holder, Some(live.stamp()), "the refusal does not name the holder: {refusal}");
        }
    }
    assert_eq!(bench.holder(&name).await, Some(live.owner.digest()), "a refused break changed the holder");
    let live = bob.renew(&live).await?;
    bob.release(&live).await?;
    Ok(Kept)
}

/// Listing goes in order, page by page, and a prefix ends at a segment: `a` does not list `ab`.
async fn p04_names_are_listed_in_order_and_under_a_prefix(bench: Bench) -> Outcome {
    let alice = bench.client("alice").await;
    let top = bench.fresh_name();
    let under = |path: &str| LockName::parse(&format!("{top}/{path}"));
    let (inside, beside) = ([under("a")?, under("a/b")?, under("a/c")?], [under("ab")?, under("a!")?]);
    let mut leases = Vec::new();
    for name in inside.iter().chain(&beside) {
        leases.push(alice.try_acquire(name).await?);
    }
    let call = alice.call(alice.budget());
    let mut listed: Vec<LockName> = Vec::new();
    loop {
        let page = match alice.backend().list(&call, Some(&inside[0]), listed.last()).await {
            Err(error) if error.kind() == ErrorKind::Unsupported => return Ok(Refused),
            page => page?,
        };
        if page.is_empty() {
            break;
        }
        listed.extend(page);
        assert!(listed.len() <= 100, "the pages do not end: {listed:?}");
    }
    assert_eq!(listed, inside, "listed under {:?}", inside[0]);
    for lease in &leases {
        alice.release(lease).await?;
    }
    Ok(Kept)
}
