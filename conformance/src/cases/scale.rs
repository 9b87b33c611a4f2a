//! Scale: many leases and many rounds change nothing but the count.

use std::time::Duration;

use crate::{
    bench::Bench,
    case::{Outcome, Verdict::Kept, cases},
    history::Demand,
};

cases![l01_many_leases_of_one_client_are_all_renewed, l02_rounds_with_cancellations_leave_nothing];

/// One client holds many locks for many TTLs, and loses none.
async fn l01_many_leases_of_one_client_are_all_renewed(bench: Bench) -> Outcome {
    let (count, ttls) = if bench.stage.service.virtual_time() { (1000, 5) } else { (50, 3) };
    // A batch of renewals may take a moment on a store with a disk.
    let ttl = bench.ttl() * 4;
    let locks = bench.locks("alice", |o| o.ttl = ttl).await;
    let mut guards = Vec::new();
    for _ in 0..count {
        guards.push(locks.named(bench.fresh_name()).acquire().await?);
    }
    bench.pass(ttl * ttls).await;
    for guard in &guards {
        guard.stamp()?;
    }
    for guard in guards {
        guard.release().await?;
    }
    bench.judge(|rules| rules.demand(Demand::Renewals(u64::from(count * ttls))));
    Ok(Kept)
}

/// Rounds of acquiring, releasing, dropping and cancelling leave no holder and no waiter, and closing ends soon.
async fn l02_rounds_with_cancellations_leave_nothing(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let locks = bench.locks("alice", |o| o.ttl = bench.ttl() * 20).await;
    let rivals = bench.locks("bob", |o| o.ttl = bench.ttl() * 20).await;
    let rounds = if bench.stage.service.virtual_time() { 500 } else { 40 };
    for round in 0..rounds {
        let guard = locks.named(&name).wait(bench.ttl() * 20).acquire().await?;
        let waiter = tokio::spawn(rivals.named(&name).wait_forever().acquire());
        for _ in 0..bench.draw(round, 4) {
            tokio::task::yield_now().await;
        }
        waiter.abort();
        match round % 2 {
            0 => drop(guard.release().await?),
            _ => drop(guard),
        }
        let _ = waiter.await;
    }
    let start = bench.now();
    locks.close().await;
    rivals.close().await;
    let took = start.until(bench.now());
    assert!(took < Duration::from_secs(2), "closing took {took:?}");
    bench.measure_time("closing two clients", took);
    bench.until("nobody holds", async || bench.holder(&name).await.is_none()).await;
    let last = bench.client("carol").await;
    let lease = last.try_acquire(&name).await?;
    let left = last.inspect(&name).await?.waiters.unwrap_or(0);
    assert_eq!(left, 0, "{left} waiters are left in the queue");
    last.release(&lease).await?;
    bench.judge(|rules| rules.demand(Demand::Grants(rounds)));
    Ok(Kept)
}
