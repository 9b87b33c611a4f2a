//! Pause: a holder that stops past its deadline has lost the lock.

use std::time::Duration;

use lockcore::{ErrorKind, LostReason, Released, State, Verb};

use crate::{
    bench::{Bench, assert_refused},
    case::{Outcome, Verdict::Kept, cases},
    history::{Demand, Expect, Property, Verdict},
};

cases![
    d01_frozen_holder_is_fenced_out,
    d01_stopped_process_is_fenced_out[Processes],
    d02_a_chain_of_stale_holders_is_fenced_out,
    d02_a_check_before_the_pause_does_not_help[Processes],
    d03_a_grant_read_after_its_end_is_none[Wire],
    d04_a_short_pause_loses_nothing[Processes],
    d05_a_starved_runtime_knows_its_loss,
    d06_a_killed_process_is_followed[Processes],
];

/// A holder that was frozen past its deadline is fenced out: its lease can be neither renewed nor used to write once
/// the lock has a new owner.
async fn d01_frozen_holder_is_fenced_out(bench: Bench) -> Outcome {
    let (name, alice, bob) = (bench.fresh_name(), bench.client("alice").await, bench.client("bob").await);
    let mut register = bench.register(&name);
    let stale = alice.try_acquire(&name).await?;
    alice.freeze_past(&stale).await;
    let live = bob.acquire(&name, bench.ttl() * 20).await?;

    assert!(stale.fence < live.fence, "the fence did not grow: {stale:?}, then {live:?}");
    assert_eq!(register.write(live.stamp(), "bob/1", 2), Verdict::Accepted, "the live holder was refused");
    assert_eq!(
        register.write(stale.stamp(), "alice/1", 1),
        Verdict::Stale,
        "the stale fence was let through"
    );

    let refusal = assert_refused(alice.renew(&stale).await, ErrorKind::Lost, "a lost lease was renewed");
    assert!(refusal.lost_reason().is_some(), "a loss without a reason: {refusal}");
    assert_eq!(alice.release(&stale).await?, Released::AlreadyOver, "a stale release went through");
    assert_eq!(bench.holder(&name).await, Some(live.owner.digest()), "the refusal changed the holder");
    drop(bob.renew(&live).await?);
    bob.release(&live).await?;
    bench.judge(|rules| rules.demand(Demand::StaleVerdicts(1)));
    Ok(Kept)
}

/// The same with a process that SIGSTOP stops, heartbeats and all (R01): its guard says so the moment it wakes up.
async fn d01_stopped_process_is_fenced_out(bench: Bench) -> Outcome {
    let (name, bob) = (bench.fresh_name(), bench.client("bob").await);
    let mut register = bench.register(&name);
    let mut other = bench.child("other").await;
    let theirs = other.acquire(&name, Duration::from_secs(5)).await.expect("the lock is free");
    let pause = other.stop();
    let mine = bob.acquire(&name, bench.ttl() * 20).await?;
    assert!(mine.fence > theirs.fence(), "the fence did not grow: {mine:?} after {theirs:?}");
    assert_eq!(register.write(mine.stamp(), "bob/1", 2), Verdict::Accepted, "the live holder was refused");
    other.go_on(pause);
    let refusal =
        other.stamp(&theirs).await.expect_err("a guard that was stopped past its deadline says yes");
    assert!(refusal.starts_with("Lost"), "{refusal}");
    assert_eq!(register.write(theirs.stamp, "other/1", 1), Verdict::Stale, "the stale fence was let through");
    assert!(!other.release(&theirs).await, "a stale release went through");
    assert_eq!(bench.holder(&name).await, Some(mine.owner.digest()), "the stale holder changed the holder");
    bob.release(&mine).await?;
    bench.judge(|rules| rules.demand(Demand::StaleVerdicts(1)));
    Ok(Kept)
}

/// Two stale holders in a row, waking in the wrong order, are both refused.
async fn d02_a_chain_of_stale_holders_is_fenced_out(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let (alice, bob, carol) =
        (bench.client("alice").await, bench.client("bob").await, bench.client("carol").await);
    let mut register = bench.register(&name);
    let first = alice.try_acquire(&name).await?;
    alice.freeze_past(&first).await;
    let second = bob.acquire(&name, bench.ttl() * 20).await?;
    bob.freeze_past(&second).await;
    let third = carol.acquire(&name, bench.ttl() * 20).await?;
    assert_eq!(register.write(third.stamp(), "carol/1", 3), Verdict::Accepted, "the live holder was refused");
    assert_eq!(register.write(second.stamp(), "bob/1", 2), Verdict::Stale, "the stale fence was let through");
    assert_eq!(
        register.write(first.stamp(), "alice/1", 1),
        Verdict::Stale,
        "the stale fence was let through"
    );
    assert_eq!(register.value(), 3);
    carol.release(&third).await?;
    bench.judge(|rules| rules.demand(Demand::StaleVerdicts(2)));
    Ok(Kept)
}

/// A stamp that was taken before the pause, when the guard still said yes, is refused by the resource alone.
async fn d02_a_check_before_the_pause_does_not_help(bench: Bench) -> Outcome {
    let (name, bob) = (bench.fresh_name(), bench.client("bob").await);
    let mut register = bench.register(&name);
    let mut other = bench.child("other").await;
    let theirs = other.acquire(&name, Duration::from_secs(5)).await.expect("the lock is free");
    let checked = other.stamp(&theirs).await.expect("the lease is fresh");
    let pause = other.stop();
    let mine = bob.acquire(&name, bench.ttl() * 20).await?;
    assert_eq!(register.write(mine.stamp(), "bob/1", 2), Verdict::Accepted, "the live holder was refused");
    other.go_on(pause);
    // The write that was on its way when the process stopped arrives now.
    assert_eq!(register.write(checked, "other/1", 1), Verdict::Stale, "the stale fence was let through");
    bob.release(&mine).await?;
    Ok(Kept)
}

/// A grant whose reply is read after its end is not handed out.
async fn d03_a_grant_read_after_its_end_is_none(bench: Bench) -> Outcome {
    let (name, alice, bob) = (bench.fresh_name(), bench.client("alice").await, bench.client("bob").await);
    bench.wire().hold_replies(Verb::Acquire);
    let request = alice.request(&name);
    let (backend, call) = (alice.backend().clone(), alice.call(bench.ttl() * 20));
    let pending = alice.invoke(&request);
    pending.sent();
    let asked = request.clone();
    let reading = tokio::spawn(async move { backend.acquire(&call, &asked).await });
    bench
        .until("the grant is on record", async || bench.holder(&name).await == Some(request.owner().digest()))
        .await;
    bench.pass(bench.ttl() * 2).await;
    bench.wire().deliver();
    let late = reading.await.expect("the task lives");
    assert!(late.is_err(), "a lease that is over was handed out: {late:?}");
    pending.unknown("read too late");
    let next = bob.try_acquire(&name).await?;
    bob.release(&next).await?;
    Ok(Kept)
}

/// A pause much shorter than the TTL loses nothing: the process goes on renewing.
async fn d04_a_short_pause_loses_nothing(bench: Bench) -> Outcome {
    let (name, bob) = (bench.fresh_name(), bench.client("bob").await);
    let mut other = bench.child("other").await;
    let theirs = other.acquire(&name, Duration::from_secs(5)).await.expect("the lock is free");
    let pause = other.stop();
    bench.pass(bench.ttl().mul_f64(0.25)).await;
    other.go_on(pause);
    bench.pass(bench.ttl() * 2).await;
    other.stamp(&theirs).await.expect("a short pause lost the lease");
    assert_refused(bob.try_acquire(&name).await, ErrorKind::Held, "a short pause freed the lock");
    // Its renewals are not in the history, so neither is how long it held.
    bench.judge(|rules| rules.expect(Property::S11, Expect::NotJudged).with(|r| r.closed_world = false));
    assert!(other.release(&theirs).await, "its own release ended nothing");
    Ok(Kept)
}

/// A holder whose renewals did not run until after the deadline knows its loss at the first look (R21).
async fn d05_a_starved_runtime_knows_its_loss(bench: Bench) -> Outcome {
    let (name, bob) = (bench.fresh_name(), bench.client("bob").await);
    let locks = bench.locks("alice", |_| {}).await;
    let guard = locks.named(&name).acquire().await?;
    if bench.stage.service.virtual_time() {
        // What a starved runtime looks like from the store: nothing comes.
        let cut = bench.recorder().fault("starve", "alice", "", crate::history::FaultClass::A1, "by design");
        bench.wire().cut(true);
        bench.clock().sleep_until(guard.lease().deadline).await;
        bench.wire().cut(false);
        cut.end("by design");
    } else {
        let starve =
            bench.recorder().fault("starve", "alice", "", crate::history::FaultClass::A1, "by design");
        while bench.now() < guard.lease().deadline {
            std::hint::spin_loop();
        }
        starve.end("by design");
    }
    assert_eq!(guard.remaining(), Duration::ZERO, "time is left after the deadline");
    let refusal = guard.stamp().expect_err("a stamp after the deadline");
    assert_eq!(refusal.lost_reason(), Some(LostReason::Expired), "{refusal}");
    assert_eq!(guard.state(), State::Lost(LostReason::Expired));
    let next = bob.acquire(&name, bench.ttl() * 20).await?;
    assert!(next.fence > guard.fence(), "{:?} after {:?}", next.fence, guard.fence());
    bob.release(&next).await?;
    Ok(Kept)
}

/// A holder that is killed is followed after its TTL, under a higher fence.
async fn d06_a_killed_process_is_followed(bench: Bench) -> Outcome {
    let (name, bob) = (bench.fresh_name(), bench.client("bob").await);
    let mut other = bench.child("other").await;
    let theirs = other.acquire(&name, Duration::from_secs(5)).await.expect("the lock is free");
    other.kill().await;
    let mine = bob.acquire(&name, bench.ttl() * 20).await?;
    assert!(mine.fence > theirs.fence(), "{:?} after {:?}", mine.fence, theirs.fence());
    assert!(bench.now() >= theirs.deadline, "granted before the dead holder's deadline");
    bench.measure_time("grant after a killed holder's deadline", theirs.deadline.until(bench.now()));
    bob.release(&mine).await?;
    Ok(Kept)
}
