//! Servers: what becomes of a lock when those that keep it are stopped, killed and started again.

use std::time::Duration;

use lockcore::{
    ErrorKind, LostReason,
    backend::{AcquireRequest, Consistency},
};

use crate::{
    bench::{Bench, WATCHDOG, assert_refused},
    case::{Outcome, Verdict::Kept, cases},
    history::{Demand, Expect, Property, Verdict},
};

cases![
    d07_stopped_servers_give_nobody_two_locks[Servers],
    j01_a_restart_keeps_the_lock_or_the_resource_stands_in[Servers],
    j10_the_death_of_a_leader_loses_no_lock[Servers, Members],
    j10_the_death_of_any_server_stops_nobody[Servers, Members],
    j11_without_servers_nothing_is_granted_and_the_holder_is_told[Servers],
];

/// Servers that stop for longer than a TTL and go on: nobody believes together with another, and everybody gets on.
async fn d07_stopped_servers_give_nobody_two_locks(bench: Bench) -> Outcome {
    let (name, bob) = (bench.fresh_name(), bench.client("bob").await);
    let mut register = bench.register(&name);
    let locks = bench.locks("alice", |_| {}).await;
    let guard = locks.named(&name).acquire().await?;
    assert_eq!(register.write(guard.stamp()?, "alice/1", 1), Verdict::Accepted);
    let (lock, wait) = (name.clone(), WATCHDOG);
    let waiting = tokio::spawn(async move {
        let end = bob.now().saturating_add(wait);
        loop {
            match bob.acquire(&lock, bob.now().until(end)).await {
                // A line may have been given up while nothing answered.
                Err(error)
                    if (is_no_answer(&error) || error.kind() == ErrorKind::Lost) && bob.now() < end => {}
                ended => return (ended, bob),
            }
        }
    });
    bench.pass(bench.ttl() / 4).await;
    let mut faults = Vec::new();
    for server in 0..bench.servers().count() {
        faults.push(bench.stop(server).await);
    }
    assert_eq!(guard.lost().await, LostReason::Expired, "a guard without a server holds on");
    bench.pass(bench.ttl() / 2).await;
    for (server, fault) in faults.into_iter().enumerate() {
        bench.servers().go_on(server).await;
        fault.end("SIGCONT");
    }
    let (granted, bob) = waiting.await.expect("the task lives");
    let live = granted?;
    assert!(live.fence > guard.fence(), "{:?} after {:?}", live.fence, guard.fence());
    assert_eq!(register.write(live.stamp(), "bob/1", 2), Verdict::Accepted);
    bench.until_ok("the release gets through", async || bob.release(&live).await).await;
    Ok(Kept)
}

/// All servers are killed and come back with their data. A store that promises to outlive that keeps the lock with its
/// holder; another grants it again, above the old fence, and the resource lets the old holder in no more.
async fn j01_a_restart_keeps_the_lock_or_the_resource_stands_in(bench: Bench) -> Outcome {
    let (name, alice, bob) = (bench.fresh_name(), bench.client("alice").await, bench.client("bob").await);
    let mut register = bench.register(&name);
    let long = AcquireRequest::new(name.clone(), bench.ttl() * 40);
    let lease = alice.ask(&long, alice.budget()).await?;
    assert_eq!(register.write(lease.stamp(), "alice/1", 1), Verdict::Accepted);
    let mut faults = Vec::new();
    for server in 0..bench.servers().count() {
        faults.push(bench.kill(server).await);
    }
    for (server, fault) in faults.into_iter().enumerate() {
        bench.servers().restart(server).await;
        fault.end("it was started again");
    }
    bench.until("the store answers", async || bob.inspect(&name).await.is_ok()).await;
    let answer = settled(async || bob.try_acquire(&name).await).await;
    if bench.capabilities().survives.restart {
        assert_refused(answer, ErrorKind::Held, "a lock that outlives a restart was granted to another");
        let renewed = settled(async || alice.renew_for(&lease, long.ttl()).await).await?;
        assert_eq!(register.write(renewed.stamp(), "alice/2", 2), Verdict::Accepted);
        alice.release(&renewed).await?;
        return Ok(Kept);
    }
    let live = answer?;
    assert!(live.fence > lease.fence, "the fence fell behind: {:?} after {:?}", live.fence, lease.fence);
    assert_eq!(register.write(live.stamp(), "bob/1", 2), Verdict::Accepted);
    assert_eq!(
        register.write(lease.stamp(), "alice/2", 3),
        Verdict::Stale,
        "the stale fence was let through"
    );
    // Two believe for a while.
    bench.pass(bench.ttl() / 20).await;
    bob.release(&live).await?;
    bench.judge(|rules| rules.expect(Property::S2, Expect::Breaks).demand(Demand::StaleVerdicts(1)));
    Ok(Kept)
}

/// Asks until there is an answer: the first requests after a restart may find lines that died with the servers.
async fn settled<T>(mut ask: impl AsyncFnMut() -> lockcore::Result<T>) -> lockcore::Result<T> {
    for _ in 0..20 {
        match ask().await {
            Err(error) if is_no_answer(&error) => {}
            answer => return answer,
        }
    }
    ask().await
}

fn is_no_answer(error: &lockcore::Error) -> bool {
    [ErrorKind::Unknown, ErrorKind::Unavailable].contains(&error.kind())
}

/// The leader dies while one holds and another waits. Where a lock outlives that, the holder's guard goes on and the waiter follows
/// its release. Elsewhere the waiter may be granted meanwhile, above the old fence, and the resource lets the old holder in
/// no more.
async fn j10_the_death_of_a_leader_loses_no_lock(bench: Bench) -> Outcome {
    let (name, ttl) = (bench.fresh_name(), bench.ttl().max(Duration::from_secs(1)) * 8);
    let mut register = bench.register(&name);
    let locks = bench.locks("alice", |o| o.ttl = ttl).await;
    let others = bench.locks("bob", |o| o.ttl = ttl).await;
    let guard = locks.named(&name).acquire().await?;
    let stamp = guard.stamp()?;
    assert_eq!(register.write(stamp, "alice/1", 1), Verdict::Accepted);
    let waiting = tokio::spawn(others.named(&name).wait(WATCHDOG * 2 + ttl * 4).acquire());
    bench.pass(bench.ttl() / 2).await;
    let leader = bench.servers().leader().await;
    let fault = bench.kill(leader).await;
    let look = bench.unharmed("carol").await;
    bench.until("the others answer", async || look.inspect(&name).await.is_ok()).await;
    // Long enough for renewals that the new leader has to confirm.
    bench.pass(ttl).await;
    let outlived = !waiting.is_finished();
    if outlived {
        assert_eq!(guard.stamp()?, stamp);
        let holder = look.inspect(&name).await?.holder.expect("alice holds");
        assert_eq!(holder.stamp(), stamp, "the death of a leader changed the holder");
        // Where its answer is lost, the rest is the TTL's.
        let _ = guard.release().await;
    } else {
        let promised = bench.capabilities().survives.failover;
        assert!(!promised, "a lock that outlives its leader was granted to another");
        bench.judge(|rules| rules.expect(Property::S2, Expect::May).demand(Demand::StaleVerdicts(1)));
    }
    let next = waiting.await.expect("the task lives")?;
    assert!(next.fence() > stamp.fence, "{:?} after {stamp:?}", next.fence());
    assert_eq!(register.write(next.stamp()?, "bob/1", 2), Verdict::Accepted);
    assert_eq!(register.write(stamp, "alice/2", 3), Verdict::Stale, "the stale fence was let through");
    bench.servers().restart(leader).await;
    fault.end("it was started again");
    next.release().await?;
    Ok(Kept)
}

/// One server after the other dies and comes back: meanwhile locks are taken, renewed and released.
async fn j10_the_death_of_any_server_stops_nobody(bench: Bench) -> Outcome {
    let (name, alice) = (bench.fresh_name(), bench.client("alice").await);
    let mut last = None;
    for server in 0..bench.servers().count() {
        let fault = bench.kill(server).await;
        let lease = bench
            .until_ok("a lock is granted without one server", async || {
                alice.acquire(&name, bench.ttl() * 20).await
            })
            .await;
        assert!(Some(lease.fence) > last, "{:?} after {last:?}", lease.fence);
        last = Some(lease.fence);
        bench.until_ok("a release without one server", async || alice.release(&lease).await).await;
        bench.servers().restart(server).await;
        fault.end("it was started again");
    }
    bench.judge(|rules| rules.demand(Demand::Grants(bench.servers().count() as u64)));
    Ok(Kept)
}

/// Without a majority of the servers nothing is granted, within the budget; the holder is told at its deadline; and with the
/// servers back there are locks again.
async fn j11_without_servers_nothing_is_granted_and_the_holder_is_told(bench: Bench) -> Outcome {
    let (name, alice) = (bench.fresh_name(), bench.locks("alice", |_| {}).await);
    let guard = alice.named(&name).acquire().await?;
    let count = bench.servers().count();
    let needless = match bench.capabilities().consistency {
        // The last one left takes over.
        Consistency::Replicated => 0,
        _ => count / 2,
    };
    let mut faults = Vec::new();
    for server in 0..count - needless {
        faults.push(bench.kill(server).await);
    }
    let (free, budget) = (bench.fresh_name(), bench.ttl());
    let waiting = alice.named(&free).wait(budget).acquire();
    let bound = budget + Duration::from_millis(100);
    let refused = bench.within(bound, "a wait without servers", waiting).await;
    let refused = refused.expect_err("granted without a majority");
    assert!(is_no_answer(&refused), "a store without a majority is told as something else: {refused}");
    assert_eq!(guard.lost().await, LostReason::Expired);
    let (now, deadline) = (bench.now(), guard.lease().deadline);
    assert!(now >= deadline, "a loss was told {:?} before the deadline", now.until(deadline));
    for (server, fault) in faults.into_iter().enumerate() {
        bench.servers().restart(server).await;
        fault.end("it was started again");
    }
    let bob = bench.client("bob").await;
    let next =
        bench.until_ok("a lock is granted again", async || bob.acquire(&name, bench.ttl() * 20).await).await;
    assert!(next.fence > guard.fence(), "{:?} after {:?}", next.fence, guard.fence());
    bench.until_ok("the release gets through", async || bob.release(&next).await).await;
    Ok(Kept)
}
