//! Cancellation: a dropped future leaves nothing behind, wherever it was dropped.

use std::time::Duration;

use lockcore::{Attempt, LostReason, Verb};

use crate::{
    bench::Bench,
    case::{Outcome, Verdict::Kept, cases},
    history::Ended,
};

cases![
    h01_a_dropped_waiter_leaves_the_queue,
    h02_an_acquire_dropped_at_any_await_leaves_nothing,
    h03_a_grant_on_its_way_to_a_dropped_future_is_cleared_away,
    h04_a_dropped_guard_is_released,
    h05_a_release_dropped_at_any_await_goes_on,
    h05_a_runtime_that_ends_leaves_nothing_behind[RealTime],
];

/// A waiter whose future is dropped leaves no place, and does not delay the next.
async fn h01_a_dropped_waiter_leaves_the_queue(bench: Bench) -> Outcome {
    let (name, alice) = (bench.fresh_name(), bench.client("alice").await);
    let locks = bench.locks("bob", |_| {}).await;
    let long = lockcore::backend::AcquireRequest::new(name.clone(), bench.ttl() * 40);
    let lease = alice.ask(&long, alice.budget()).await?;
    let waiter = tokio::spawn(locks.named(&name).wait_forever().acquire());
    bench.pass(bench.ttl() / 4).await;
    waiter.abort();
    let _ = waiter.await;
    locks.flush().await;
    alice.release(&lease).await?;
    let next = alice.try_acquire(&name).await?;
    alice.release(&next).await?;
    Ok(Kept)
}

/// An acquire that is polled k times and dropped leaves no lease, for every k until it ends.
async fn h02_an_acquire_dropped_at_any_await_leaves_nothing(bench: Bench) -> Outcome {
    let locks = bench.locks("alice", |_| {}).await;
    let bob = bench.client("bob").await;
    // Without a delay the in-memory store answers at the first poll, and there is no await to be dropped at.
    bench.wire().delay_replies(Duration::from_millis(4));
    let mut dropped = 0;
    for k in 0..12 {
        let name = bench.fresh_name();
        let mut acquire = Box::pin(locks.named(&name).acquire());
        let mut ended = false;
        for _ in 0..k {
            if crate::bench::poll_once(&mut acquire).await.is_ready() {
                ended = true;
                break;
            }
            bench.pass(Duration::from_millis(1)).await;
        }
        dropped += u32::from(!ended);
        drop(acquire);
        locks.flush().await;
        bench.until("nothing is left", async || bench.holder(&name).await.is_none()).await;
        let next = bob.try_acquire(&name).await?;
        bob.release(&next).await?;
        if ended {
            break;
        }
    }
    assert!(dropped >= 2, "the acquire ended before it could be dropped on its way: {dropped}");
    Ok(Kept)
}

/// A grant that was executed but not yet heard when its future was dropped is gone within moments, not after its TTL
/// (R14).
async fn h03_a_grant_on_its_way_to_a_dropped_future_is_cleared_away(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let locks = bench.locks("alice", |o| o.ttl = bench.ttl() * 40).await;
    bench.wire().hold_replies(Verb::Acquire);
    let acquire = tokio::spawn(locks.named(&name).acquire());
    bench.until("the grant is on record", async || bench.holder(&name).await.is_some()).await;
    acquire.abort();
    let _ = acquire.await;
    bench.wire().deliver();
    locks.flush().await;
    assert_eq!(bench.holder(&name).await, None, "a grant that nobody heard is left");
    let Attempt::Granted(guard) = locks.named(&name).try_acquire().await? else {
        panic!("the lock is not free")
    };
    guard.release().await?;
    Ok(Kept)
}

/// A guard that is dropped is released in the background, also when its task panics.
async fn h04_a_dropped_guard_is_released(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let locks = bench.locks("alice", |o| o.ttl = bench.ttl() * 40).await;
    let guard = locks.named(&name).acquire().await?;
    guard.stamp()?;
    drop(guard);
    locks.flush().await;
    assert_eq!(bench.holder(&name).await, None, "a dropped guard was not released");
    let lock = locks.named(&name);
    let crash = tokio::spawn(async move {
        let _guard = lock.acquire().await.expect("the lock is free");
        std::panic::resume_unwind(Box::new("in the critical section"));
    });
    assert!(crash.await.is_err());
    locks.flush().await;
    assert_eq!(bench.holder(&name).await, None, "a guard dropped by a panic was not released");
    Ok(Kept)
}

/// A release that is polled k times and dropped goes on in the background (R16).
async fn h05_a_release_dropped_at_any_await_goes_on(bench: Bench) -> Outcome {
    let locks = bench.locks("alice", |o| o.ttl = bench.ttl() * 40).await;
    bench.wire().delay_replies(Duration::from_millis(4));
    let mut dropped = 0;
    for k in 0..8 {
        let name = bench.fresh_name();
        let guard = locks.named(&name).acquire().await?;
        let mut release = Box::pin(guard.release());
        let mut ended = false;
        for _ in 0..k {
            if crate::bench::poll_once(&mut release).await.is_ready() {
                ended = true;
                break;
            }
            bench.pass(Duration::from_millis(1)).await;
        }
        dropped += u32::from(!ended);
        drop(release);
        locks.flush().await;
        assert_eq!(bench.holder(&name).await, None, "a release dropped after {k} polls was forgotten");
        if ended {
            break;
        }
    }
    assert!(dropped >= 2, "the release ended before it could be dropped on its way: {dropped}");
    Ok(Kept)
}

/// A runtime that is dropped with guards and waiters on it ends at once and without a panic, and the store is clean when
/// the TTL has passed.
async fn h05_a_runtime_that_ends_leaves_nothing_behind(bench: Bench) -> Outcome {
    let names: Vec<_> = (0..8).map(|_| bench.fresh_name()).collect();
    let (stage, locked) = (bench.clone(), names.clone());
    let (told, ended) = tokio::sync::oneshot::channel();
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let guards = runtime.block_on(async {
            let locks = stage.locks("alice", |_| {}).await;
            let mut guards = Vec::new();
            for name in &locked {
                guards.push(locks.named(name).acquire().await.expect("the lock is free"));
                tokio::spawn(locks.named(name).wait_forever().acquire());
            }
            // Until the waiters have asked.
            stage.pass(stage.ttl() / 4).await;
            guards
        });
        let begun = std::time::Instant::now();
        drop(runtime);
        // The runtime that writes the history of these guards is gone, so their end is noted here: before it, so that a
        // store which frees them at once frees nothing that is believed in.
        let log = stage.recorder().client("alice");
        for guard in guards {
            log.lost(guard.name().as_str(), guard.lease().stamp(), Ended::from(LostReason::Closed));
            drop(guard);
        }
        let _ = told.send(begun.elapsed());
    });
    let took = ended.await.expect("a runtime that ended with guards on it panicked");
    thread.join().expect("a runtime that ended with guards on it panicked");
    assert!(took < Duration::from_secs(5), "a runtime with guards on it took {took:?} to end");
    for name in &names {
        bench.until("the store is clean", async || bench.holder(name).await.is_none()).await;
    }
    let bob = bench.client("bob").await;
    for name in &names {
        let next = bob.try_acquire(name).await?;
        bob.release(&next).await?;
    }
    Ok(Kept)
}
