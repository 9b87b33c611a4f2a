//! Waiting: budgets hold, wake-ups are not lost, and where an order is promised it is kept.

use std::time::Duration;

use lockcore::{ErrorKind, backend::AcquireRequest};

use crate::{
    bench::{Bench, assert_refused},
    case::{Outcome, Verdict::Kept, cases},
    history::{Demand, Verdict},
};

cases![
    g01_a_release_wakes_a_waiter,
    g02_an_end_without_a_release_wakes_a_waiter,
    g03_a_wait_ends_with_its_budget,
    g03_a_wait_ends_also_when_nothing_answers,
    g04_waiters_are_served_in_order[Fair, Queue],
    g06_a_storm_of_hand_offs_counts_right,
    g07_a_waiter_that_leaves_frees_nobody_and_blocks_nobody,
    g08_tasks_of_one_client_are_one_waiter[Queue],
];

/// A release is followed by a grant to a waiter, well before the released lease would have ended.
async fn g01_a_release_wakes_a_waiter(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let (alice, bob) = (bench.client("alice").await, bench.client("bob").await);
    let long = bench.ttl() * 20;
    let lease = alice.ask(&AcquireRequest::new(name.clone(), long), alice.budget()).await?;
    let (lock, wait) = (name.clone(), bench.ttl() * 200);
    let waiting = tokio::spawn(async move { (bob.acquire(&lock, wait).await, bob) });
    bench.pass(bench.ttl() / 4).await;
    let released = bench.now();
    alice.release(&lease).await?;
    let (granted, bob) = waiting.await.expect("the task lives");
    let next = granted?;
    let took = released.until(bench.now());
    assert!(took < bench.ttl() * 5, "a waiter was granted {took:?} after the release");
    bench.measure_time("hand-off", took);
    bob.release(&next).await?;
    Ok(Kept)
}

/// A waiter that stands behind a holder which falls silent is granted soon after the lease's end, and not before.
async fn g02_an_end_without_a_release_wakes_a_waiter(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let (alice, bob) = (bench.client("alice").await, bench.client("bob").await);
    let lease = alice.try_acquire(&name).await?;
    let (lock, wait) = (name.clone(), bench.ttl() * 200);
    let waiting = tokio::spawn(async move { (bob.acquire(&lock, wait).await, bob) });
    bench.pass(bench.ttl() / 4).await;
    let renewed = alice.renew(&lease).await?;
    let (granted, bob) = waiting.await.expect("the task lives");
    let next = granted?;
    let now = bench.now();
    assert!(now >= renewed.deadline, "granted {:?} before the deadline", now.until(renewed.deadline));
    let took = renewed.deadline.until(now);
    assert!(took < bench.ttl() * 5, "a waiter was granted {took:?} after the lease had ended");
    bob.release(&next).await?;
    Ok(Kept)
}

/// A wait ends with its budget, names the holder, and leaves no place in the queue (R06).
async fn g03_a_wait_ends_with_its_budget(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let (alice, bob) = (bench.client("alice").await, bench.client("bob").await);
    let long = AcquireRequest::new(name.clone(), bench.ttl() * 40);
    let lease = alice.ask(&long, alice.budget()).await?;
    let (start, budget) = (bench.now(), bench.ttl());
    let refused = bob.acquire(&name, budget).await;
    let refused = assert_refused(refused, ErrorKind::WaitTimeout, "a wait that ended is no grant");
    let took = start.until(bench.now());
    assert!(took >= budget, "gave up {:?} early", budget - took);
    bench.measure_time("return after the wait budget", took - budget);
    assert!(took <= budget + bench.ttl(), "a budget of {budget:?} took {took:?}");
    assert!(refused.holder().is_some(), "the refusal does not name the holder: {refused}");
    assert_eq!(bench.holder(&name).await, Some(lease.owner.digest()), "a time-out changed the holder");
    alice.release(&lease).await?;
    let next = bob.try_acquire(&name).await?;
    bob.release(&next).await?;
    Ok(Kept)
}

/// The library's budget holds although no answer comes.
async fn g03_a_wait_ends_also_when_nothing_answers(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let locks = bench.locks("alice", |_| {}).await;
    bench.wire().cut(true);
    let budget = bench.ttl();
    let waiting = locks.named(&name).wait(budget).acquire();
    let bound = budget + Duration::from_millis(100);
    let refused = bench.within(bound, "a wait that nobody answers", waiting).await;
    bench.wire().cut(false);
    assert_refused(refused, ErrorKind::Unknown, "granted over a line that is cut");
    locks.flush().await;
    bench.until("nothing is left", async || bench.holder(&name).await.is_none()).await;
    Ok(Kept)
}

/// Five waiters that came one after another are served in that order.
async fn g04_waiters_are_served_in_order(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let alice = bench.client("alice").await;
    let lease = alice.try_acquire(&name).await?;
    let mut waiting = Vec::new();
    for (n, who) in ["bob", "carol", "dave", "eve", "frank"].into_iter().enumerate() {
        let (client, lock, wait) = (bench.client(who).await, name.clone(), bench.ttl() * 100);
        waiting.push(tokio::spawn(async move {
            let lease = client.acquire(&lock, wait).await?;
            client.release(&lease).await.map(|_| lease.fence)
        }));
        bench
            .until("the waiter stands in the queue", async || bench.queued(&name).await == n as u32 + 1)
            .await;
    }
    alice.release(&lease).await?;
    let mut last = lease.fence;
    for waiter in waiting {
        let fence = waiter.await.expect("the task lives")?;
        assert!(fence > last, "served out of order: {fence:?} after {last:?}");
        last = fence;
    }
    Ok(Kept)
}

/// Eight clients pass a lock on hundreds of times while they count at the resource: no count is lost.
async fn g06_a_storm_of_hand_offs_counts_right(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let rounds: u32 = if bench.stage.service.virtual_time() { 250 } else { 25 };
    let register = std::rc::Rc::new(std::cell::RefCell::new(bench.register(&name)));
    let tasks = tokio::task::LocalSet::new();
    for who in 0..8 {
        let (client, lock, register) =
            (bench.client(&format!("client-{who}")).await, name.clone(), register.clone());
        // Short hand-offs under a TTL that a busy machine does not outlast.
        let (ttl, wait) = (bench.ttl() * 20, bench.ttl() * 200);
        tasks.spawn_local(async move {
            for round in 0..rounds {
                let end = client.now().saturating_add(wait);
                let request = AcquireRequest::new(lock.clone(), ttl).waiting_until(end);
                let lease = client.ask(&request, wait).await.expect("a turn comes");
                let seen = register.borrow_mut().read(lease.stamp()).expect("the holder was refused");
                tokio::task::yield_now().await;
                let op = format!("{who}/{round}");
                let verdict = register.borrow_mut().write(lease.stamp(), &op, seen + 1);
                assert_eq!(verdict, Verdict::Accepted, "the holder was refused");
                client.release(&lease).await.expect("a release is answered");
            }
        });
    }
    let start = bench.now();
    tasks.await;
    let took = start.until(bench.now()).as_secs_f64();
    if !bench.stage.service.virtual_time() {
        bench.measure("hand-offs among 8 clients", 8.0 * f64::from(rounds) / took, "/s");
    }
    assert_eq!(register.borrow().value(), 8 * i64::from(rounds), "counts were lost");
    bench.judge(|rules| rules.demand(Demand::Grants(8 * u64::from(rounds))));
    Ok(Kept)
}

/// A waiter in the middle that is cancelled frees nobody: the one behind it is granted after the holder, not before.
async fn g07_a_waiter_that_leaves_frees_nobody_and_blocks_nobody(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let (alice, locks) = (bench.client("alice").await, bench.locks("bob", |_| {}).await);
    let long = AcquireRequest::new(name.clone(), bench.ttl() * 40);
    let lease = alice.ask(&long, alice.budget()).await?;
    let middle = tokio::spawn(locks.named(&name).wait_forever().acquire());
    bench.pass(bench.ttl() / 4).await;
    let carol = bench.client("carol").await;
    let (lock, wait) = (name.clone(), bench.ttl() * 200);
    let last = tokio::spawn(async move { (carol.acquire(&lock, wait).await, carol) });
    bench.pass(bench.ttl() / 4).await;
    middle.abort();
    locks.flush().await;
    bench.pass(bench.ttl()).await;
    assert!(!last.is_finished(), "granted while the lock is held");
    assert_eq!(
        bench.holder(&name).await,
        Some(lease.owner.digest()),
        "a cancelled waiter changed the holder"
    );
    alice.release(&lease).await?;
    let (granted, carol) = last.await.expect("the task lives");
    let next = granted?;
    assert!(next.fence > lease.fence, "{:?} after {:?}", next.fence, lease.fence);
    carol.release(&next).await?;
    Ok(Kept)
}

/// A thousand tasks of one client that want one lock are one waiter in the store, and all get their turn.
async fn g08_tasks_of_one_client_are_one_waiter(bench: Bench) -> Outcome {
    let (name, alice) = (bench.fresh_name(), bench.client("alice").await);
    let long = AcquireRequest::new(name.clone(), bench.ttl() * 40);
    let lease = alice.ask(&long, alice.budget()).await?;
    let locks = bench.locks("bob", |_| {}).await;
    let tasks: Vec<_> = (0..1000)
        .map(|_| {
            let lock = locks.named(&name).wait_forever();
            tokio::spawn(async move { lock.run(async |held| -> lockcore::Result<_> { held.stamp() }).await })
        })
        .collect();
    bench.until("a waiter stands in the queue", async || bench.queued(&name).await > 0).await;
    bench.pass(bench.ttl() / 4).await;
    assert_eq!(bench.queued(&name).await, 1, "one process is more than one waiter");
    alice.release(&lease).await?;
    for task in tasks {
        task.await.expect("the task lives")?;
    }
    Ok(Kept)
}
