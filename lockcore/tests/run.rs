//! `run`: what it returns, row by row of its table.

mod common;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use common::{SECOND, TTL, World, name, pass};
use lockcore::{Attempt, Error, ErrorKind, LostReason, State};

#[derive(Debug)]
enum Mine {
    Lock(Error),
    Own(&'static str),
}
impl From<Error> for Mine {
    fn from(error: Error) -> Self {
        Self::Lock(error)
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_that_ends_in_time_gives_its_value_and_the_lock_is_free() {
    let world = World::new();
    let locks = world.client();
    let text = String::from("borrowed");
    let value = locks
        .named("x")
        .run(async |held| -> Result<_, Error> {
            held.stamp()?;
            pass(100 * SECOND).await; // three renewals long
            Ok(text.len())
        })
        .await;
    assert_eq!(value.unwrap(), 8);
    assert!(!world.is_held("x"), "the lock is still held after `run`");
}

#[tokio::test(start_paused = true)]
async fn a_release_that_is_not_heard_costs_nobody_the_result() {
    let world = World::new();
    let locks = world.client();
    world.store.faults().lose_after(lockcore::Verb::Release, 1);
    let value = locks.named("x").run(async |_| -> Result<_, Error> { Ok(7) }).await;
    assert_eq!(value.unwrap(), 7);
}

#[tokio::test(start_paused = true)]
async fn the_bodys_own_error_wins() {
    let world = World::new();
    let locks = world.client();
    let answer = locks.named("x").run(async |_| -> Result<(), Mine> { Err(Mine::Own("stale")) }).await;
    assert!(matches!(answer, Err(Mine::Own("stale"))), "{answer:?}");
    assert!(!world.is_held("x"));
    let mistake = locks.named("").run(async |_| -> Result<(), Mine> { Err(Mine::Own("ran")) }).await;
    assert!(matches!(&mistake, Err(Mine::Lock(error)) if error.kind() == ErrorKind::Invalid), "{mistake:?}");
}

#[tokio::test(start_paused = true)]
async fn a_body_is_dropped_when_the_lock_is_taken_away() {
    let world = World::new();
    let locks = world.client();
    let dropped = Arc::new(AtomicBool::new(false));
    struct Flag(Arc<AtomicBool>);
    impl Drop for Flag {
        fn drop(&mut self) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let flag = Flag(dropped.clone());
    let store = world.store.clone();
    let answer = locks
        .named("x")
        .run(async move |_| -> Result<(), Error> {
            let _flag = flag;
            pass(SECOND).await;
            store.steal(&name("x"));
            std::future::pending().await
        })
        .await;
    let error = answer.unwrap_err();
    assert_eq!((error.kind(), error.lost_reason()), (ErrorKind::Lost, Some(LostReason::Taken)), "{error}");
    assert!(dropped.load(Ordering::SeqCst), "the body lives on");
}

#[tokio::test(start_paused = true)]
async fn a_body_is_told_before_the_deadline_and_may_finish_within_the_margin() {
    let world = World::new();
    let locks = world.client();
    let store = world.store.clone();
    let start = world.now();
    let answer = locks
        .named("x")
        .stop_margin(5 * SECOND)
        .run(async |held| -> Result<_, Error> {
            store.faults().cut(true);
            let reason = held.lost().await;
            assert!(held.stamp().is_err(), "a stamp after the loss");
            pass(4 * SECOND).await; // hand things over
            Ok((reason, start.until(world.now())))
        })
        .await;
    let (reason, took) = answer.expect("finished before the deadline");
    assert_eq!(reason, LostReason::Expired);
    assert!(took < TTL, "finished after the deadline: {took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_body_that_does_not_stop_is_dropped_at_the_deadline_and_not_before() {
    let world = World::new();
    let locks = world.client();
    let start = world.now();
    world.store.faults().cut(false);
    let store = world.store.clone();
    let answer = locks
        .named("x")
        .stop_margin(5 * SECOND)
        .run(async |_| -> Result<(), Error> {
            store.faults().cut(true);
            std::future::pending().await
        })
        .await;
    let took = start.until(world.now());
    assert_eq!(answer.unwrap_err().lost_reason(), Some(LostReason::Expired));
    let deadline = TTL.mul_f64(0.99);
    assert!(took >= deadline && took <= deadline + Duration::from_millis(10), "dropped after {took:?}");
}

#[tokio::test(start_paused = true)]
async fn a_value_that_comes_after_the_deadline_is_an_error() {
    // The body holds up its own task, so that nobody could drop it.
    let world = World::new();
    let locks = world.client();
    let store = world.store.clone();
    let answer = locks
        .named("x")
        .run(async |held| -> Result<_, Error> {
            store.faults().cut(true);
            held.lost().await;
            Ok("late")
        })
        .await;
    assert_eq!(answer.unwrap_err().kind(), ErrorKind::Lost);
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_vanished_unnoticed_is_found_out_at_the_release() {
    let world = World::new();
    let locks = world.client();
    let store = world.store.clone();
    let answer = locks
        .named("x")
        .run(async |_| -> Result<_, Error> {
            store.steal(&name("x"));
            Ok(())
        })
        .await;
    let error = answer.expect_err("finished, but not under the lock");
    assert_eq!(error.lost_reason(), Some(LostReason::Taken), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_hold_limit_tells_the_body_and_lets_it_finish() {
    let world = World::new();
    let locks = world.client();
    let answer = locks
        .named("x")
        .max_hold(100 * SECOND)
        .stop_margin(2 * SECOND)
        .run(async |held| -> Result<_, Error> { Ok(held.lost().await) })
        .await;
    assert_eq!(answer.unwrap(), LostReason::HoldLimit);
    assert!(!world.is_held("x"), "the lock outlived its longest hold");
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_tells_the_body_and_lets_it_finish() {
    let world = World::new();
    let shutdown = lockcore::CancellationToken::new();
    let locks = world.client_with(|o| o.shutdown = shutdown.clone());
    let waiter = world.client_with(|o| o.shutdown = shutdown.clone());
    let leader = tokio::spawn({
        let locks = locks.clone();
        async move {
            locks
                .named("leader")
                .run(async |held| -> Result<_, Error> {
                    let stop = held.cancellation();
                    stop.cancelled().await;
                    pass(SECOND).await; // steps down in order
                    Ok(held.state())
                })
                .await
        }
    });
    pass(SECOND).await;
    let queued = tokio::spawn(waiter.named("leader").wait_forever().acquire());
    pass(SECOND).await;
    shutdown.cancel();
    assert_eq!(leader.await.unwrap().unwrap(), State::Lost(LostReason::Closed));
    assert_eq!(queued.await.unwrap().unwrap_err().kind(), ErrorKind::Closed);
    assert!(!world.is_held("leader"), "the lock was not given back at shutdown");
    let refused = locks.named("leader").acquire().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Closed);
}

#[tokio::test(start_paused = true)]
async fn a_panic_in_the_body_gives_the_lock_back_at_once_or_after_the_lock_delay() {
    for (delay, free_after) in [(Duration::ZERO, Duration::ZERO), (20 * SECOND, 50 * SECOND)] {
        let world = World::new();
        let locks = world.client();
        let job = tokio::spawn(async move {
            locks
                .named("x")
                .lock_delay(delay)
                .run(async |held| -> Result<(), Error> {
                    held.stamp()?;
                    panic!("half done");
                })
                .await
        });
        assert!(job.await.unwrap_err().is_panic());
        world.settle().await;
        assert_eq!(world.is_held("x"), !delay.is_zero(), "lock-delay {delay:?}");
        pass(free_after).await;
        assert!(!world.is_held("x"), "the lock-delay never ends");
    }
}

#[tokio::test(start_paused = true)]
async fn a_busy_lock_does_not_run_the_body() {
    let world = World::new();
    let (alice, bob) = (world.client(), world.client());
    let held = alice.named("x").acquire().await.unwrap();
    let attempt = bob
        .named("x")
        .try_run(async |_| -> Result<(), Error> { panic!("the body ran without the lock") })
        .await
        .unwrap();
    let Attempt::Busy(Some(holder)) = attempt else { panic!("{attempt:?}") };
    assert_eq!(holder.fence, held.fence());
    assert!(holder.label.is_some_and(|label| label.ends_with(&format!(":{}", std::process::id()))));
    // A wait that ends is an error, never a body that runs (R06).
    let waited = bob
        .named("x")
        .wait(SECOND)
        .run(async |_| -> Result<(), Error> { panic!("the body ran without the lock") })
        .await;
    assert_eq!(waited.unwrap_err().kind(), ErrorKind::WaitTimeout);
}

#[tokio::test(start_paused = true)]
async fn a_slow_renewal_does_not_stall_the_body() {
    let world = World::new();
    let locks = world.client();
    let store = world.store.clone();
    let beats = locks
        .named("x")
        .run(async |_| -> Result<_, Error> {
            store.faults().delay_replies(4 * SECOND);
            let mut beats = 0;
            for _ in 0..100 {
                pass(SECOND).await;
                beats += 1;
            }
            store.faults().delay_replies(Duration::ZERO);
            Ok(beats)
        })
        .await;
    assert_eq!(beats.unwrap(), 100);
}

#[tokio::test]
async fn run_fits_what_web_frameworks_ask_for() {
    fn route<F, Fut>(f: F) -> F
    where
        F: Fn(lockcore::LockClient, u64) -> Fut + Clone + Send + Sync + 'static,
        Fut: Future<Output = Result<u64, Error>> + Send + 'static,
    {
        f
    }
    async fn pay(locks: lockcore::LockClient, invoice: u64) -> Result<u64, Error> {
        let total = &invoice;
        locks
            .named(format!("invoice/{invoice}"))
            .run(async |held| {
                held.stamp()?;
                tokio::task::yield_now().await;
                Ok(*total)
            })
            .await
    }
    let handler = route(pay);
    let locks = lockcore::LockClient::new(lockcore::memory::MemoryBackend::default());
    let answer = tokio::spawn(handler(locks, 9)).await.unwrap();
    assert_eq!(answer.unwrap(), 9);
}
