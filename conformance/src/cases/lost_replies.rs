//! Lost replies: three outcomes, and none of them is a guess.

use lockcore::{
    ErrorKind, LostReason, Released, Verb,
    backend::{Consistency, Resolution},
};

use crate::{
    bench::{Bench, assert_refused},
    case::{Outcome, Verdict::Kept, cases},
    history::{Demand, FaultClass},
};

cases![
    i01_a_lost_reply_is_recovered,
    i01_a_lost_reply_is_unknown_and_resolves,
    i02_asking_again_is_one_grant,
    i03_a_lost_renewal_reply_overstates_nothing,
    i04_a_lost_release_reply_is_settled,
    i04_a_release_asked_again_after_a_takeover_claims_nothing,
    i05_a_store_that_is_gone_is_unknown_within_the_budget,
    i06_a_recovery_that_comes_too_late_claims_nothing,
    i07_what_was_given_up_never_comes,
    i07_a_late_copy_of_what_was_given_up_is_granted_nothing[Wire],
];

/// The library asks again by the same owner after a lost reply, and is told the same grant.
async fn i01_a_lost_reply_is_recovered(bench: Bench) -> Outcome {
    let (name, bob) = (bench.fresh_name(), bench.client("bob").await);
    let locks = bench.locks("alice", |_| {}).await;
    bench.wire().lose_reply(Verb::Acquire);
    let guard = locks.named(&name).acquire().await?;
    assert_refused(bob.try_acquire(&name).await, ErrorKind::Held, "two grants from one acquire");
    assert_eq!(guard.release().await?, Released::Now);
    let next = bob.try_acquire(&name).await?;
    bob.release(&next).await?;
    Ok(Kept)
}

/// At the backend a lost reply is `Unknown`, never a failure without effect; `resolve` adopts what was granted, with
/// the same fence.
async fn i01_a_lost_reply_is_unknown_and_resolves(bench: Bench) -> Outcome {
    let (name, alice, bob) = (bench.fresh_name(), bench.client("alice").await, bench.client("bob").await);
    bench.wire().lose_reply(Verb::Acquire);
    let request = alice.request(&name);
    let lost = alice.ask(&request, alice.budget()).await;
    assert_refused(lost, ErrorKind::Unknown, "a lost reply is not unknown");
    // A store of several servers that asks them in rounds clears up behind a round that it lost.
    let clears_up = bench.stage.service.servers().len() > 1
        && bench.capabilities().consistency != Consistency::Linearizable;
    let held = bench.holder(&name).await;
    assert!(
        clears_up || held == Some(request.owner().digest()),
        "the fault did not bite: nothing was granted, but {held:?}"
    );
    match alice.resolve(&request).await? {
        Resolution::Adopted(lease) => {
            let answer = bob.try_acquire(&name).await;
            assert_refused(answer, ErrorKind::Held, "an adopted grant does not hold");
            assert_eq!(alice.release(&lease).await?, Released::Now);
        }
        Resolution::Gone if clears_up => assert_eq!(bench.holder(&name).await, None, "what is gone holds"),
        other => panic!("a live grant was not adopted: {other:?}"),
    }

    bench.wire().lose_request(Verb::Acquire);
    let request = alice.request(&name);
    assert_refused(
        alice.ask(&request, alice.budget()).await,
        ErrorKind::Unknown,
        "a lost request is not unknown",
    );
    let gone = alice.resolve(&request).await?;
    assert_eq!(gone, Resolution::Gone, "a request that never arrived was adopted");
    bench.judge(|rules| rules.demand(Demand::Unknowns(2)));
    Ok(Kept)
}

/// The same request sent three times is one grant: same owner, same fence, and the TTL is not armed again.
async fn i02_asking_again_is_one_grant(bench: Bench) -> Outcome {
    let (name, alice) = (bench.fresh_name(), bench.client("alice").await);
    let request = alice.request(&name);
    let pending = alice.invoke(&request);
    let first = alice.answer(pending, alice.call(alice.budget()), &request).await?;
    bench.pass(bench.ttl() / 4).await;
    for attempt in 2..=3 {
        let call = alice.call(alice.budget()).attempt_number(attempt);
        let again = alice.backend().acquire(&call, &request).await?;
        assert_eq!(
            (again.fence, again.owner),
            (first.fence, first.owner),
            "asked again, another grant was told"
        );
        let left = bench.now().until(again.deadline);
        assert!(left <= bench.ttl().mul_f64(0.76), "asking again armed the TTL again: {left:?} are left");
    }
    assert_eq!(alice.release(&first).await?, Released::Now);
    assert_eq!(bench.holder(&name).await, None, "one release does not free it");
    Ok(Kept)
}

/// A renewal whose reply is lost leaves the deadline where it was, and the next one moves it.
async fn i03_a_lost_renewal_reply_overstates_nothing(bench: Bench) -> Outcome {
    let (name, alice) = (bench.fresh_name(), bench.client("alice").await);
    let lease = alice.try_acquire(&name).await?;
    bench.wire().lose_reply(Verb::Renew);
    assert_refused(alice.renew(&lease).await, ErrorKind::Unknown, "a lost reply is not unknown");
    let renewed = alice.renew(&lease).await?;
    assert!(renewed.deadline >= lease.deadline);
    alice.release(&renewed).await?;
    Ok(Kept)
}

/// A release whose reply is lost is unknown, or settled by a backend that has another way to look; one that was lost on its
/// way is never told as done. Asked again, the lease is over and the lock is free.
async fn i04_a_lost_release_reply_is_settled(bench: Bench) -> Outcome {
    let (name, alice, bob) = (bench.fresh_name(), bench.client("alice").await, bench.client("bob").await);
    let lease = alice.try_acquire(&name).await?;
    bench.wire().lose_reply(Verb::Release);
    match alice.release(&lease).await {
        Ok(settled) => assert_eq!(settled, Released::Now),
        lost => drop(assert_refused(lost, ErrorKind::Unknown, "a lost reply is not unknown")),
    }
    assert_eq!(alice.release(&lease).await?, Released::AlreadyOver);
    let next = bob.try_acquire(&name).await?;
    bob.release(&next).await?;

    // The twin keeps the first half honest: who takes silence for success is found out here.
    let lease = alice.try_acquire(&name).await?;
    bench.wire().lose_request(Verb::Release);
    let told = alice.release(&lease).await;
    let holder = bench.holder(&name).await;
    match told {
        Ok(_) => assert_eq!(holder, None, "a release that was lost on its way was told as done"),
        lost => {
            assert_refused(lost, ErrorKind::Unknown, "a lost request is not unknown");
            // Of a lock in two halves one may be gone, and then it is nobody's.
            let over = if holder.is_some() { Released::Now } else { Released::AlreadyOver };
            assert_eq!(alice.release(&lease).await?, over, "held by {holder:?} when asked again");
        }
    }
    assert_eq!(bench.holder(&name).await, None, "a settled release left a record");
    Ok(Kept)
}

/// A release that is asked again after the lease ran out and was taken over does not say that it ended something.
async fn i04_a_release_asked_again_after_a_takeover_claims_nothing(bench: Bench) -> Outcome {
    let (name, bob) = (bench.fresh_name(), bench.client("bob").await);
    let locks = bench.locks("alice", |_| {}).await;
    let guard = locks.named(&name).acquire().await?;
    let fault = bench.recorder().fault("cut", "alice", "", FaultClass::A1, "by the wire");
    bench.wire().cut(true);
    assert_eq!(guard.lost().await, LostReason::Expired);
    bench.wire().cut(false);
    fault.end("by the wire");
    let live = bob.acquire(&name, bench.ttl() * 20).await?;
    bench.wire().lose_request(Verb::Release);
    let released = guard.release().await?;
    assert_eq!(released, Released::AlreadyOver, "a release after a takeover says that it ended something");
    assert_eq!(bench.holder(&name).await, Some(live.owner.digest()), "a stale release changed the holder");
    bob.release(&live).await?;
    Ok(Kept)
}

/// A store that is gone after the request is `Unknown` within the budget, and nothing is left later.
async fn i05_a_store_that_is_gone_is_unknown_within_the_budget(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let locks = bench.locks("alice", |_| {}).await;
    bench.wire().hold_replies(Verb::Acquire);
    let refused = locks.named(&name).wait(bench.ttl() / 2).acquire().await;
    assert_refused(refused, ErrorKind::Unknown, "a grant that nobody heard was handed out");
    let fault = bench.recorder().fault("cut", "alice", "", FaultClass::A1, "by the wire");
    bench.wire().deliver();
    fault.end("by the wire");
    locks.flush().await;
    bench.until("nothing is left", async || bench.holder(&name).await.is_none()).await;
    Ok(Kept)
}

/// A recovery that comes after the lease has ended and another has the lock claims nothing.
async fn i06_a_recovery_that_comes_too_late_claims_nothing(bench: Bench) -> Outcome {
    let (name, alice, bob) = (bench.fresh_name(), bench.client("alice").await, bench.client("bob").await);
    bench.wire().lose_reply(Verb::Acquire);
    let request = alice.request(&name);
    assert_refused(
        alice.ask(&request, alice.budget()).await,
        ErrorKind::Unknown,
        "a lost reply is not unknown",
    );
    let live = bob.acquire(&name, bench.ttl() * 20).await?;
    let late = alice.resolve(&request).await?;
    assert_eq!(late, Resolution::Gone, "a recovery claimed what another holds");
    assert_eq!(bench.holder(&name).await, Some(live.owner.digest()));
    drop(bob.renew(&live).await?);
    bob.release(&live).await?;
    Ok(Kept)
}

/// An acquisition that was given up holds nothing, also when that is said twice, and the next grant is above it.
async fn i07_what_was_given_up_never_comes(bench: Bench) -> Outcome {
    let (name, alice) = (bench.fresh_name(), bench.client("alice").await);
    let request = alice.request(&name);
    let lease = alice.ask(&request, alice.budget()).await?;
    alice.abandon(&request).await?;
    assert_eq!(bench.holder(&name).await, None, "an abandoned acquisition still holds");
    alice.abandon(&request).await?;
    let next = alice.try_acquire(&name).await?;
    assert!(next.fence > lease.fence, "{:?} after {:?}", next.fence, lease.fence);
    alice.release(&next).await?;
    bench.judge(|rules| {
        // The abandoned lease ends without a release of its own.
        rules.expect(crate::history::Property::S2, crate::history::Expect::NotJudged)
    });
    Ok(Kept)
}

/// A request that the network held up until its acquisition was given up is granted nothing when it arrives.
async fn i07_a_late_copy_of_what_was_given_up_is_granted_nothing(bench: Bench) -> Outcome {
    let (name, alice) = (bench.fresh_name(), bench.client("alice").await);
    let bob = bench.unharmed("bob").await;
    // The line is warm: what is held is the request itself, not a greeting.
    let warm = alice.try_acquire(&name).await?;
    alice.release(&warm).await?;
    let request = alice.request(&name);
    if bench.wire().hold_request(Verb::Acquire) {
        let held = alice.ask(&request, bench.ttl() / 4).await;
        assert_refused(held, ErrorKind::Unknown, "a request that is held up was answered");
        bench.until("giving up gets through", async || alice.abandon(&request).await.is_ok()).await;
        bench.wire().deliver();
    } else {
        alice.abandon(&request).await?;
        let late = alice.backend().acquire(&alice.call(alice.budget()), &request).await;
        assert!(late.is_err(), "a late copy of what was given up was granted: {late:?}");
    }
    for _ in 0..10 {
        bench.pass(bench.ttl() / 40).await;
        assert_eq!(bench.holder(&name).await, None, "a late copy of what was given up holds");
    }
    let next = bob.try_acquire(&name).await?;
    assert!(next.fence > warm.fence, "{:?} after {:?}", next.fence, warm.fence);
    bob.release(&next).await?;
    Ok(Kept)
}
