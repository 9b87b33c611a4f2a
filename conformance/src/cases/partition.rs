//! Partition: what the network holds up, silences in one direction or tears down, also while somebody waits.

use lockcore::{
    ErrorKind, LostReason, Verb,
    backend::{AcquireRequest, Lease},
};
use tokio::task::JoinHandle;

use crate::{
    bench::{Bench, Client, assert_refused},
    case::{Outcome, Verdict::Kept, cases},
    faultline::Direction,
    history::FaultClass,
};

cases![
    b03_a_release_held_up_by_the_network_ends_nothing[Line],
    f07_a_renewal_held_up_by_the_network_moves_nothing[Line],
    g05_a_lost_notification_is_made_up_for[Line],
    g10_a_line_torn_down_while_waiting_costs_no_wake_up[Line],
    j13_silent_replies_are_a_loss_at_the_deadline[Line],
    j14_silent_requests_are_a_loss_at_the_deadline[Line],
];

/// A release that the network held up until the same client holds the lock again does not end the new lease.
async fn b03_a_release_held_up_by_the_network_ends_nothing(bench: Bench) -> Outcome {
    let (name, alice) = (bench.fresh_name(), bench.client("alice").await);
    let bob = bench.unharmed("bob").await;
    let first = alice.try_acquire(&name).await?;
    bench.wire().hold_request(Verb::Release);
    if let Err(unknown) = alice.release_within(&first, bench.ttl() / 4).await {
        assert_eq!(
            unknown.kind(),
            ErrorKind::Unknown,
            "a release without an answer is not unknown: {unknown}"
        );
    }
    let (ttl, wait) = (bench.ttl() * 20, bench.ttl() * 4);
    let again = bench
        .until_ok("the client has the lock once more", async || {
            let end = bench.now().saturating_add(wait);
            let request = AcquireRequest::new(name.clone(), ttl).waiting_until(end);
            alice.ask(&request, wait).await
        })
        .await;
    bench.wire().deliver();
    for _ in 0..10 {
        bench.pass(bench.ttl() / 40).await;
        assert_eq!(
            bench.holder(&name).await,
            Some(again.owner.digest()),
            "a late release ended a newer lease"
        );
    }
    assert_refused(bob.try_acquire(&name).await, ErrorKind::Held, "a late release freed the lock");
    drop(alice.renew(&again).await?);
    bench.until_ok("the release gets through", async || alice.release(&again).await).await;
    Ok(Kept)
}

/// A renewal that the network held up until another holds the lock neither comes back to life nor prolongs the other's
/// lease.
async fn f07_a_renewal_held_up_by_the_network_moves_nothing(bench: Bench) -> Outcome {
    let (name, alice) = (bench.fresh_name(), bench.client("alice").await);
    let bob = bench.unharmed("bob").await;
    let stale = alice.try_acquire(&name).await?;
    bench.wire().hold_request(Verb::Renew);
    if let Err(unknown) = alice.renew_within(&stale, bench.ttl() / 4).await {
        assert_eq!(
            unknown.kind(),
            ErrorKind::Unknown,
            "a renewal without an answer is not unknown: {unknown}"
        );
    }
    let live = bob.acquire(&name, bench.ttl() * 20).await?;
    let before = bob.inspect(&name).await?.holder.expect("bob holds").remaining;
    bench.wire().deliver();
    for _ in 0..10 {
        bench.pass(bench.ttl() / 50).await;
        let after = bob.inspect(&name).await?.holder.expect("bob holds");
        assert_eq!(after.stamp(), live.stamp(), "a late renewal changed the holder");
        assert!(after.remaining <= before, "a late renewal prolonged another's lease");
    }
    bob.release(&live).await?;
    Ok(Kept)
}

/// A waiter whose notification was lost is granted the lock all the same, long before the lease would have ended.
async fn g05_a_lost_notification_is_made_up_for(bench: Bench) -> Outcome {
    let queue = Queue::form(&bench).await?;
    let fault = bench.recorder().fault("silent replies", "bob", "", FaultClass::A1, "by the proxy");
    bench.wire().one_way(Direction::ToClient, true);
    let released = bench.now();
    queue.alice.release(&queue.lease).await?;
    bench.pass(bench.ttl() / 4).await;
    bench.wire().reset();
    bench.wire().one_way(Direction::ToClient, false);
    fault.end("by the proxy");
    let (granted, bob) = queue.waiting.await.expect("the task lives");
    let next = granted?;
    let took = released.until(bench.now());
    assert!(took < bench.ttl() * 20, "a waiter without its notification was granted after {took:?}");
    bench.until_ok("the release gets through", async || bob.release(&next).await).await;
    Ok(Kept)
}

/// A waiter whose line is torn down stands in the queue once, and is woken by the release.
async fn g10_a_line_torn_down_while_waiting_costs_no_wake_up(bench: Bench) -> Outcome {
    let queue = Queue::form(&bench).await?;
    for _ in 0..3 {
        let fault = bench.recorder().fault("reset", "bob", "", FaultClass::A1, "by the proxy");
        bench.wire().reset();
        bench.pass(bench.ttl() / 4).await;
        fault.end("by the proxy");
    }
    if let Some(places) = bench.queue_of(&queue.lease.name).await {
        assert!(places <= 1, "one waiter has {places} places");
    }
    assert!(!queue.waiting.is_finished(), "a waiter gave up, or was granted what another holds");
    let released = bench.now();
    queue.alice.release(&queue.lease).await?;
    let (granted, bob) = queue.waiting.await.expect("the task lives");
    let next = granted?;
    let took = released.until(bench.now());
    assert!(took < bench.ttl() * 10, "a waiter was granted {took:?} after the release");
    bench.until_ok("the release gets through", async || bob.release(&next).await).await;
    Ok(Kept)
}

/// A holder whom no fault meets, and a waiter behind it on a line with faults.
struct Queue {
    alice: Client,
    lease: Lease,
    waiting: JoinHandle<(lockcore::Result<Lease>, Client)>,
}

impl Queue {
    async fn form(bench: &Bench) -> lockcore::Result<Self> {
        let (name, bob) = (bench.fresh_name(), bench.client("bob").await);
        let (alice, long) = (bench.unharmed("alice").await, bench.ttl() * 40);
        let lease = alice.ask(&AcquireRequest::new(name.clone(), long), alice.budget()).await?;
        let waiting = tokio::spawn(async move { (bob.acquire(&name, long).await, bob) });
        bench.pass(bench.ttl() / 2).await;
        Ok(Self { alice, lease, waiting })
    }
}

/// Renewals that are done and never confirmed are a loss at the holder's deadline; nobody else is granted before it.
async fn j13_silent_replies_are_a_loss_at_the_deadline(bench: Bench) -> Outcome {
    a_silent_direction(bench, Direction::ToClient).await
}

/// Renewals that never arrive are a loss at the holder's deadline, and change nothing when they come late.
async fn j14_silent_requests_are_a_loss_at_the_deadline(bench: Bench) -> Outcome {
    a_silent_direction(bench, Direction::ToServer).await
}

async fn a_silent_direction(bench: Bench, direction: Direction) -> Outcome {
    let name = bench.fresh_name();
    let (locks, bob) = (bench.locks("alice", |_| {}).await, bench.unharmed("bob").await);
    let guard = locks.named(&name).acquire().await?;
    // One renewal, so that the line is in use.
    bench.pass(bench.ttl() / 2).await;
    let (lock, wait) = (name.clone(), bench.ttl() * 40);
    let waiting = tokio::spawn(async move { (bob.acquire(&lock, wait).await, bob) });
    let fault = bench.recorder().fault("one way", "alice", "", FaultClass::A1, "by the proxy");
    bench.wire().one_way(direction, true);
    let reason = guard.lost().await;
    let (now, deadline) = (bench.now(), guard.lease().deadline);
    assert_eq!(reason, LostReason::Expired);
    assert!(now >= deadline, "a loss was told {:?} before the deadline", now.until(deadline));
    assert_refused(guard.stamp(), ErrorKind::Lost, "a guard without confirmation says yes");
    let (granted, bob) = waiting.await.expect("the task lives");
    let live = granted?;
    assert!(bench.now() >= deadline, "granted before the holder's deadline");
    bench.wire().one_way(direction, false);
    fault.end("by the proxy");
    for _ in 0..5 {
        bench.pass(bench.ttl() / 20).await;
        assert_eq!(bench.holder(&name).await, Some(live.owner.digest()), "what came late changed the holder");
    }
    bob.release(&live).await?;
    Ok(Kept)
}
