//! Renewal: it moves the deadline of a live lease, and never brings anything back.

use lockcore::{ErrorKind, LostReason, Released, State, Verb, backend::AcquireRequest};

use crate::{
    bench::{Bench, assert_refused},
    case::{Outcome, Verdict::Kept, cases},
    history::{Demand, FaultClass},
};

cases![
    f01_a_renewal_moves_the_deadline_and_nothing_else,
    f02_a_guard_holds_for_many_ttls,
    f03_one_lost_renewal_loses_nothing,
    f04_an_unreachable_store_is_a_loss_at_the_deadline,
    f05_nothing_renews_what_has_ended,
    f06_a_second_lease_is_renewed_after_a_loss,
    f07_a_renewal_after_a_takeover_is_refused,
    f08_a_renewal_never_creates[Removal],
    f09_a_renewal_never_shortens,
    f09_a_renewal_that_races_a_release_leaves_nothing,
    f10_a_hold_limit_ends_renewals,
];

/// A renewal prolongs the lease on the server; owner and fence stay.
async fn f01_a_renewal_moves_the_deadline_and_nothing_else(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let alice = bench.client("alice").await;
    let lease = alice.try_acquire(&name).await?;
    bench.pass(bench.ttl() / 4).await;
    let renewed = alice.renew(&lease).await?;
    assert!(renewed.deadline > lease.deadline, "the deadline did not move");
    assert_eq!((renewed.owner, renewed.fence), (lease.owner, lease.fence), "a renewal changed the holding");
    let left = alice.inspect(&name).await?.holder.expect("alice holds").remaining;
    let local = bench.now().until(renewed.deadline);
    assert!(
        left + bench.ttl() / 50 >= local.mul_f64(0.98),
        "{left:?} are left on the server, {local:?} here"
    );
    alice.release(&renewed).await?;
    bench.judge(|rules| rules.demand(Demand::Renewals(1)));
    Ok(Kept)
}

/// A guard that renews by itself holds for many TTLs, under one fence.
async fn f02_a_guard_holds_for_many_ttls(bench: Bench) -> Outcome {
    let (name, bob) = (bench.fresh_name(), bench.client("bob").await);
    let locks = bench.locks("alice", |_| {}).await;
    let guard = locks.named(&name).acquire().await?;
    let fence = guard.fence();
    let ttls = if bench.stage.service.virtual_time() { 20 } else { 4 };
    for _ in 0..ttls {
        bench.pass(bench.ttl()).await;
        guard.stamp()?;
        assert_refused(bob.try_acquire(&name).await, ErrorKind::Held, "a renewed lock was granted");
    }
    assert_eq!(guard.fence(), fence);
    assert_eq!(guard.release().await?, Released::Now);
    bench.judge(|rules| rules.demand(Demand::Renewals(ttls)));
    Ok(Kept)
}

/// One renewal that is lost on the way is made up for; nobody is told of a loss (R13).
async fn f03_one_lost_renewal_loses_nothing(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let locks = bench.locks("alice", |_| {}).await;
    let guard = locks.named(&name).acquire().await?;
    bench.wire().lose_request(Verb::Renew);
    assert_eq!(guard.changed().await, State::Uncertain, "one lost renewal is told as something else");
    guard.stamp()?;
    assert_eq!(guard.changed().await, State::Held, "one lost renewal was not made up for");
    bench.pass(bench.ttl() * 3).await;
    guard.stamp()?;
    guard.release().await?;
    Ok(Kept)
}

/// A store that cannot be reached is a loss at the deadline: not at the first error, and not later (R02).
async fn f04_an_unreachable_store_is_a_loss_at_the_deadline(bench: Bench) -> Outcome {
    let (name, bob) = (bench.fresh_name(), bench.client("bob").await);
    let locks = bench.locks("alice", |_| {}).await;
    let guard = locks.named(&name).acquire().await?;
    let fault = bench.recorder().fault("cut", "alice", "", FaultClass::A1, "by the wire");
    bench.wire().cut(true);
    let reason = guard.lost().await;
    let (now, deadline) = (bench.now(), guard.lease().deadline);
    bench.wire().cut(false);
    fault.end("by the wire");
    assert_eq!(reason, LostReason::Expired);
    assert!(now >= deadline, "a loss was told {:?} before the deadline", now.until(deadline));
    bench.measure_time("loss told after the deadline", deadline.until(now));
    assert!(
        deadline.until(now) < bench.ttl() / 4,
        "a loss was told {:?} after the deadline",
        deadline.until(now)
    );
    let next = bob.acquire(&name, bench.ttl() * 20).await?;
    assert!(next.fence > guard.fence(), "{:?} after {:?}", next.fence, guard.fence());
    bob.release(&next).await?;
    Ok(Kept)
}

/// After a release, a drop or a cancelled acquire, no renewal keeps anything alive (R19).
async fn f05_nothing_renews_what_has_ended(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let locks = bench.locks("alice", |_| {}).await;
    locks.named(&name).acquire().await?.release().await?;
    drop(locks.named(&name).acquire().await?);
    let mut polled = Box::pin(locks.named(&name).acquire());
    let _ = crate::bench::poll_once(&mut polled).await;
    drop(polled);
    locks.flush().await;
    bench.until("the lock is free", async || bench.holder(&name).await.is_none()).await;
    bench.pass(bench.ttl() * 2).await;
    assert_eq!(bench.holder(&name).await, None, "something renewed what had ended");
    Ok(Kept)
}

/// After a loss the same client takes the same lock again, and that lease is renewed (R13).
async fn f06_a_second_lease_is_renewed_after_a_loss(bench: Bench) -> Outcome {
    let (name, bob) = (bench.fresh_name(), bench.client("bob").await);
    let locks = bench.locks("alice", |_| {}).await;
    let first = locks.named(&name).acquire().await?;
    bench.wire().cut(true);
    first.lost().await;
    bench.wire().cut(false);
    let second = locks.named(&name).wait(bench.ttl() * 20).acquire().await?;
    bench.pass(bench.ttl() * 3).await;
    second.stamp()?;
    assert_refused(bob.try_acquire(&name).await, ErrorKind::Held, "the second lease is not renewed");
    second.release().await?;
    Ok(Kept)
}

/// A renewal that arrives after a takeover is refused, and the new holder's lease is not prolonged (R04).
async fn f07_a_renewal_after_a_takeover_is_refused(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let (alice, bob) = (bench.client("alice").await, bench.client("bob").await);
    let stale = alice.try_acquire(&name).await?;
    alice.freeze_past(&stale).await;
    let live = bob.acquire(&name, bench.ttl() * 20).await?;
    let before = bob.inspect(&name).await?.holder.expect("bob holds").remaining;
    let long = bench.ttl() * 10;
    assert_refused(
        alice.renew_for(&stale, long).await,
        ErrorKind::Lost,
        "a renewal after a takeover went through",
    );
    let after = bob.inspect(&name).await?.holder.expect("bob holds");
    assert_eq!(after.stamp(), live.stamp(), "a stale renewal changed the holder");
    assert!(after.remaining <= before, "a stale renewal prolonged the lease");
    bob.release(&live).await?;
    Ok(Kept)
}

/// A record that is gone stays gone: renewing answers `Lost`, also while the lock is free (R07).
async fn f08_a_renewal_never_creates(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let (alice, bob) = (bench.client("alice").await, bench.client("bob").await);
    let lease = alice.try_acquire(&name).await?;
    bench.steal(&name).await;
    assert_refused(alice.renew(&lease).await, ErrorKind::Lost, "a renewal of a removed record went through");
    assert_eq!(bench.holder(&name).await, None, "a renewal created a record");
    assert_eq!(alice.release(&lease).await?, Released::AlreadyOver);
    let next = bob.try_acquire(&name).await?;
    assert!(next.fence > lease.fence, "the fence did not grow: {:?} after {:?}", next.fence, lease.fence);
    bob.release(&next).await?;
    bench.judge(|rules| rules.expect(crate::history::Property::S2, crate::history::Expect::NotJudged));
    Ok(Kept)
}

/// A renewal with a shorter TTL than the grant's does not shorten what the server has.
async fn f09_a_renewal_never_shortens(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let alice = bench.client("alice").await;
    let request = AcquireRequest::new(name.clone(), bench.ttl() * 10);
    let long = alice.ask(&request, alice.budget()).await?;
    let after = alice.renew_for(&long, bench.ttl()).await?;
    assert!(after.deadline >= long.deadline, "a renewal shortened the lease here");
    let left = alice.inspect(&name).await?.holder.expect("alice holds").remaining;
    assert!(left >= bench.ttl() * 9, "a renewal shortened the lease on the server to {left:?}");
    alice.release(&after).await?;
    Ok(Kept)
}

/// A renewal and a release at once: whichever comes first, nothing is left, and nothing is renewed after its release.
async fn f09_a_renewal_that_races_a_release_leaves_nothing(bench: Bench) -> Outcome {
    let (name, alice) = (bench.fresh_name(), bench.client("alice").await);
    let rounds = if bench.stage.service.virtual_time() { 500 } else { 50 };
    for round in 0..rounds {
        let request = AcquireRequest::new(name.clone(), bench.ttl() * 20);
        let lease = alice.ask(&request, alice.budget()).await?;
        let (renew, release) = (alice.renew_for(&lease, request.ttl()), alice.release(&lease));
        let (renewed, released) = if bench.draw(round, 2) == 0 {
            tokio::join!(biased; renew, release)
        } else {
            let (released, renewed) = tokio::join!(biased; release, renew);
            (renewed, released)
        };
        assert_eq!(released?, Released::Now, "round {round}: a renewal took the lease from its release");
        if let Err(refused) = renewed {
            assert_eq!(refused.kind(), ErrorKind::Lost, "round {round}: {refused}");
        }
        assert_eq!(bench.holder(&name).await, None, "round {round}: a renewal left a record");
    }
    bench.judge(|rules| rules.demand(Demand::Grants(rounds)));
    Ok(Kept)
}

/// A guard with a longest hold is told at its limit, and the lock becomes free.
async fn f10_a_hold_limit_ends_renewals(bench: Bench) -> Outcome {
    let (name, bob) = (bench.fresh_name(), bench.client("bob").await);
    let locks = bench.locks("alice", |_| {}).await;
    let guard = locks.named(&name).max_hold(bench.ttl() * 2).acquire().await?;
    assert_eq!(guard.lost().await, LostReason::HoldLimit);
    let next = bob.acquire(&name, bench.ttl() * 20).await?;
    assert!(next.fence > guard.fence(), "{:?} after {:?}", next.fence, guard.fence());
    bob.release(&next).await?;
    Ok(Kept)
}
