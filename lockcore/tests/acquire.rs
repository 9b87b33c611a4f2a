//! Acquiring: waiting, trying, lost replies, dropped futures, bad input.

mod common;

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use common::{SECOND, TTL, World, name, pass, poll_once};
use lockcore::{
    Attempt, ClientOptions, Entry, ErrorKind, EventKind, Fence, LockClient, Verb, memory::MemoryBackend,
};

#[tokio::test(start_paused = true)]
async fn waiters_are_granted_in_order_with_growing_fences() {
    let world = World::new();
    let first = world.client().named("x").acquire().await.unwrap();
    let mut last = first.fence();
    let mut waiting = Vec::new();
    for n in 0..5 {
        waiting.push(tokio::spawn(world.client().named("x").wait_forever().acquire()));
        while world.store.waiters(&name("x")) < n + 1 {
            tokio::task::yield_now().await;
        }
    }
    first.release().await.unwrap();
    for waiter in waiting {
        let guard = waiter.await.unwrap().unwrap();
        assert!(guard.fence() > last, "{:?} after {last:?}", guard.fence());
        last = guard.fence();
        guard.release().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn ten_thousand_tasks_on_one_name_are_one_waiter_in_the_store() {
    let world = World::new();
    let other = world.client().named("x").acquire().await.unwrap();
    let locks = world.client();
    let inside = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let tasks: Vec<_> = (0..10_000)
        .map(|_| {
            let (lock, inside) = (locks.named("x").wait_forever(), inside.clone());
            tokio::spawn(async move {
                lock.run(async |held| -> lockcore::Result<_> {
                    assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0, "two at once");
                    tokio::task::yield_now().await;
                    inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                    Ok(held.fence())
                })
                .await
            })
        })
        .collect();
    for _ in 0..20 {
        world.settle().await;
    }
    assert_eq!(world.store.waiters(&name("x")), 1);
    let asked = world.store.requests(Verb::Acquire);
    assert!(asked <= 2, "{asked} requests for one waiter");
    other.release().await.unwrap();
    let mut fences = BTreeSet::new();
    for task in tasks {
        assert!(fences.insert(task.await.unwrap().unwrap()), "a fence was given twice");
    }
    assert_eq!(fences.len(), 10_000);
}

#[tokio::test(start_paused = true)]
async fn a_waiting_future_is_small() {
    let world = World::new();
    let waiting = world.client().named("x").acquire();
    assert!(size_of_val(&waiting) < 2048, "{} bytes", size_of_val(&waiting));
}

#[tokio::test(start_paused = true)]
async fn tasks_that_share_a_client_exclude_each_other() {
    // R15: identity is per acquisition, not per connection.
    let world = World::new();
    let locks = world.client();
    let inside = Arc::new(std::sync::atomic::AtomicUsize::new(0));
    let grants = Arc::new(std::sync::Mutex::new(Vec::new()));
    let tasks: Vec<_> = (0..50)
        .map(|_| {
            let (locks, inside, grants) = (locks.clone(), inside.clone(), grants.clone());
            tokio::spawn(async move {
                for _ in 0..100 {
                    let guard = locks.named("k").wait(60 * SECOND).acquire().await.unwrap();
                    assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                    grants.lock().unwrap().push(guard.stamp().unwrap());
                    tokio::task::yield_now().await;
                    inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                    guard.release().await.unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    let grants = grants.lock().unwrap();
    assert_eq!(grants.len(), 5000);
    assert!(grants.windows(2).all(|pair| pair[0].fence < pair[1].fence), "fences do not follow the grants");
    assert_eq!(
        grants.iter().map(|s| s.owner).collect::<BTreeSet<_>>().len(),
        5000,
        "an owner was used twice"
    );
}

#[tokio::test(start_paused = true)]
async fn a_held_lock_is_not_entered_again() {
    let world = World::new();
    let locks = world.client();
    let guard = locks.named("x").acquire().await.unwrap();
    let asked = world.store.requests(Verb::Acquire);
    let Attempt::Busy(Some(holder)) = locks.named("x").try_acquire().await.unwrap() else {
        panic!("entered twice")
    };
    assert_eq!(holder.stamp(), guard.stamp().unwrap());
    assert_eq!(world.store.requests(Verb::Acquire), asked, "the store was asked what this process knows");
}

#[tokio::test(start_paused = true)]
async fn twenty_waiters_all_time_out_within_their_budget() {
    // R06
    let world = World::new();
    let _holder = world.client().named("x").acquire().await.unwrap();
    let clients: Vec<_> = (0..20).map(|_| world.client()).collect();
    let start = world.now();
    let waiters: Vec<_> = clients
        .iter()
        .map(|c| tokio::spawn(c.named("x").wait(Duration::from_millis(500)).acquire()))
        .collect();
    for waiter in waiters {
        let error = waiter.await.unwrap().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WaitTimeout, "{error}");
        assert!(error.holder().is_some(), "the holder is not named: {error}");
    }
    let took = start.until(world.now());
    assert!(took >= Duration::from_millis(500) && took <= Duration::from_millis(600), "{took:?}");
    assert_eq!(world.store.waiters(&name("x")), 0, "a timed-out waiter stands in the queue");
}

#[tokio::test(start_paused = true)]
async fn a_lost_reply_is_asked_for_again_by_the_same_owner() {
    let world = World::new();
    let locks = world.client();
    let mut events = locks.events();
    world.store.faults().lose_after(Verb::Acquire, 2);
    let guard = locks.named("x").acquire().await.unwrap();
    assert_eq!(guard.fence().get(), 1, "a retry was granted anew");
    let mut attempts = Vec::new();
    let mut owners = BTreeSet::new();
    while let Some(event) = events.try_next() {
        owners.insert(event.owner);
        if let EventKind::Asked { attempt } = event.kind {
            attempts.push(attempt);
        }
    }
    assert_eq!((attempts, owners.len()), (vec![1, 2, 3], 1));
    guard.release().await.unwrap();
    assert!(!world.is_held("x"), "one release does not free it (R09)");
}

#[tokio::test(start_paused = true)]
async fn a_try_whose_reply_is_lost_settles_within_the_call_timeout() {
    let world = World::new();
    let locks = world.client();
    world.store.faults().lose_after(Verb::Acquire, 1);
    let Attempt::Granted(guard) = locks.named("x").try_acquire().await.unwrap() else {
        panic!("busy with itself")
    };
    assert_eq!(guard.fence().get(), 1);
    drop(guard);
    locks.flush().await;

    world.store.faults().cut(true);
    let start = world.now();
    let error = locks.named("x").try_acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
    assert!(start.until(world.now()) <= 5 * SECOND, "a try took longer than the call timeout");
    world.store.faults().cut(false);
    locks.flush().await;
    assert!(!world.is_held("x"));
}

#[tokio::test(start_paused = true)]
async fn a_store_that_refuses_is_neither_busy_nor_granted() {
    // D20
    let world = World::new();
    let locks = world.client();
    world.store.faults().unavailable(true);
    assert_eq!(locks.named("x").try_acquire().await.unwrap_err().kind(), ErrorKind::Unavailable);
    let start = world.now();
    let error = locks.named("x").wait(3 * SECOND).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(start.until(world.now()) <= 3 * SECOND + Duration::from_millis(100));
    // It comes back within the budget: nobody hears of it.
    let waiting = tokio::spawn(locks.named("x").wait(10 * SECOND).acquire());
    pass(2 * SECOND).await;
    world.store.faults().unavailable(false);
    waiting.await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_reply_that_comes_after_the_ttl_is_not_a_grant_and_is_given_back() {
    // R22, second half; mutant 11.
    let world = World::new();
    let locks = world.client_with(|o| o.call_timeout = 60 * SECOND);
    world.store.faults().delay_replies(31 * SECOND);
    let error = locks.named("x").ttl(TTL).wait(40 * SECOND).acquire().await.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Unknown | ErrorKind::Unavailable), "{error}");
    world.store.faults().delay_replies(Duration::ZERO);
    locks.flush().await;
    assert!(!world.is_held("x"));
}

#[tokio::test(start_paused = true)]
async fn the_deadline_counts_from_the_request_that_was_answered() {
    // R22: not from the start of a long wait, and not from the reply.
    let world = World::new();
    let holder = world.client().named("x").acquire().await.unwrap();
    let waiter = tokio::spawn(world.client().named("x").wait(60 * SECOND).acquire());
    pass(12 * SECOND).await;
    holder.release().await.unwrap();
    let guard = waiter.await.unwrap().unwrap();
    assert_eq!(guard.remaining(), TTL.mul_f64(0.99));
    drop(guard);
    world.store.faults().delay_replies(6 * SECOND);
    let guard = world.client_with(|o| o.call_timeout = 9 * SECOND).named("y").acquire().await.unwrap();
    assert_eq!(guard.remaining(), TTL.mul_f64(0.99) - 6 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn an_acquire_dropped_at_any_await_leaves_nothing() {
    for fault in 0..3 {
        for k in 0.. {
            let world = World::new();
            let locks = world.client();
            let holder = (fault == 2).then(|| world.client().named("x"));
            let holder = match holder {
                Some(lock) => Some(lock.acquire().await.unwrap()),
                None => None,
            };
            match fault {
                0 => world.store.faults().delay_requests(SECOND),
                1 => world.store.faults().delay_replies(SECOND),
                _ => {}
            }
            let mut acquire = Box::pin(locks.named("x").acquire());
            let mut done = false;
            for _ in 0..k {
                if poll_once(&mut acquire).await.is_ready() {
                    done = true;
                    break;
                }
                pass(Duration::from_millis(400)).await;
            }
            drop(acquire);
            world.store.faults().delay_requests(Duration::ZERO);
            world.store.faults().delay_replies(Duration::ZERO);
            locks.flush().await;
            world.settle().await;
            assert_eq!(
                world.store.waiters(&name("x")),
                0,
                "fault {fault}, dropped after {k} polls: a waiter is left"
            );
            if holder.is_none() {
                assert!(!world.is_held("x"), "fault {fault}, dropped after {k} polls: a lease is left");
            }
            if let Some(holder) = holder {
                holder.release().await.unwrap();
            }
            let next = world.client().named("x").try_acquire().await.unwrap();
            assert!(
                matches!(next, Attempt::Granted(_)),
                "fault {fault}, dropped after {k} polls: blocked for the next"
            );
            if done || k > 40 {
                break;
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_dropped_waiter_of_this_process_leaves_its_place_to_the_next() {
    let world = World::new();
    let locks = world.client();
    let guard = locks.named("x").acquire().await.unwrap();
    let second = tokio::spawn(locks.named("x").wait_forever().acquire());
    world.settle().await;
    let third = tokio::spawn(locks.named("x").wait_forever().acquire());
    world.settle().await;
    second.abort();
    drop(guard);
    third.await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn too_many_waiters_shed_load() {
    let world = World::new();
    let locks = world.client_with(|o| o.max_local_waiters = 2);
    let _guard = locks.named("x").acquire().await.unwrap();
    let _waiting: Vec<_> = (0..2).map(|_| tokio::spawn(locks.named("x").acquire())).collect();
    world.settle().await;
    assert_eq!(locks.named("x").acquire().await.unwrap_err().kind(), ErrorKind::Overloaded);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_forgot_its_past_is_refused() {
    let world = World::new();
    let locks = world.client();
    for _ in 0..3 {
        locks.named("x").acquire().await.unwrap().release().await.unwrap();
    }
    world.store.forget();
    let error = locks.named("x").acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::FenceRegression, "{error}");
    locks.flush().await;
    assert!(!world.is_held("x"), "the refused grant is left");
}

#[tokio::test(start_paused = true)]
async fn a_floor_is_honoured() {
    let world = World::new();
    let floor = Fence::new(1_000).unwrap();
    let guard = world.client().named("x").above(floor).acquire().await.unwrap();
    assert!(guard.fence() > floor);
}

#[tokio::test(start_paused = true)]
async fn several_locks_are_taken_in_one_order_all_or_none() {
    let world = World::new();
    let (alice, bob) = (world.client(), world.client());
    let both = alice.named_all(["b", "a", "b"]).acquire().await.unwrap();
    assert_eq!(both.fences().map(|(n, _)| n.to_string()).collect::<Vec<_>>(), ["a", "b"]);
    both.ensure_held().unwrap();
    let refused = bob.named_all(["a0", "b"]).wait(SECOND).acquire().await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::WaitTimeout);
    assert_eq!(refused.name().map(ToString::to_string), Some("b".into()));
    assert!(!world.is_held("a0"), "half of a set is left");
    world.store.steal(&name("b"));
    let (lost, _) = both.lost().await;
    assert_eq!(lost, name("b"));
    both.release().await.unwrap();
    // Two sets in opposite orders do not wait for each other in a circle.
    let one = tokio::spawn({
        let alice = alice.clone();
        async move { alice.named_all(["p", "q"]).run(async |_| -> lockcore::Result<()> { Ok(()) }).await }
    });
    let two = tokio::spawn({
        let bob = bob.clone();
        async move { bob.named_all(["q", "p"]).run(async |_| -> lockcore::Result<()> { Ok(()) }).await }
    });
    one.await.unwrap().unwrap();
    two.await.unwrap().unwrap();
    assert_eq!(alice.named_all([] as [&str; 0]).acquire().await.unwrap_err().kind(), ErrorKind::Invalid);
}

#[tokio::test(start_paused = true)]
async fn a_set_ends_its_body_when_one_is_lost() {
    let world = World::new();
    let locks = world.client();
    let store = world.store.clone();
    let answer = locks
        .named_all(["a", "b"])
        .run(async |held| -> lockcore::Result<()> {
            assert_eq!(held.len(), 2);
            store.steal(&name("b"));
            std::future::pending().await
        })
        .await;
    let error = answer.unwrap_err();
    assert_eq!((error.kind(), error.name().cloned()), (ErrorKind::Lost, Some(name("b"))));
    locks.flush().await;
    assert!(!world.is_held("a"));
}

#[tokio::test(start_paused = true)]
async fn going_on_without_the_lock_has_to_be_allowed_and_shows_in_the_type() {
    let world = World::new();
    world.store.faults().unavailable(true);
    let strict = world.client();
    assert_eq!(strict.named("x").acquire_or_open().await.unwrap_err().kind(), ErrorKind::Misconfigured);
    let lenient = world.client_with(|o| o.allow_open = true);
    let Entry::Open(error) = lenient.named("x").wait(SECOND).acquire_or_open().await.unwrap() else {
        panic!("locked")
    };
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    world.store.faults().unavailable(false);
    let _other = world.client().named("x").acquire().await.unwrap();
    let held = lenient.named("x").wait(SECOND).acquire_or_open().await;
    assert_eq!(held.unwrap_err().kind(), ErrorKind::WaitTimeout, "someone else's lock is no reason to go on");
}

#[tokio::test(start_paused = true)]
async fn bad_numbers_are_refused_with_the_limit() {
    let world = World::new();
    let locks = world.client();
    let lock = locks.named("x");
    let huge = Duration::from_secs(u64::MAX);
    for (bad, says) in [
        (lock.clone().ttl(Duration::ZERO), "zero"),
        (lock.clone().ttl(Duration::from_micros(1)), "from 1ms"),
        (lock.clone().ttl(huge), "86400s"),
        (lock.clone().ttl(SECOND).lock_delay(huge), "together"),
        (lock.clone().ttl(SECOND).stop_margin(SECOND), "stop margin"),
        (lock.clone().max_hold(Duration::ZERO), "longest hold"),
    ] {
        let error = bad.acquire().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(says), "{error}");
    }
    assert_eq!(world.store.requests(Verb::Acquire), 0, "a bad number reached the store");
    for bad in ["", "a//b", "a\0"] {
        assert_eq!(locks.named(bad).acquire().await.unwrap_err().kind(), ErrorKind::Invalid);
    }
    assert_eq!(locks.named("x".repeat(1 << 20)).inspect().await.unwrap_err().kind(), ErrorKind::Invalid);
    // The extremes of waiting are no mistakes.
    lock.clone().wait(Duration::ZERO).acquire().await.unwrap().release().await.unwrap();
    lock.clone().wait(Duration::MAX).acquire().await.unwrap().release().await.unwrap();
    lock.clone().ttl(Duration::from_millis(500)).acquire().await.unwrap().release().await.unwrap();
    for bad in [
        ClientOptions::default().with(|o| o.drift = 1.0),
        ClientOptions::default().with(|o| o.drift = f64::NAN),
        ClientOptions::default().with(|o| o.call_timeout = Duration::ZERO),
        ClientOptions::default().with(|o| o.label = Some("web\nstamp 1.0000000000000001\x1b]0;owned".into())),
        ClientOptions::default().with(|o| o.label = Some("x".repeat(1025).into())),
        ClientOptions::default().with(|o| o.namespace = "a/b".into()),
    ] {
        let locks = LockClient::with_clock(world.store.clone(), bad, world.clock);
        assert_eq!(locks.named("x").acquire().await.unwrap_err().kind(), ErrorKind::Misconfigured);
        assert_eq!(locks.preflight().await.unwrap_err().kind(), ErrorKind::Misconfigured);
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_backend_does_not_promise_is_refused_before_it_is_asked() {
    let world = World::new();
    let store = world.store.clone().promising(|c| {
        c.fence_floor = false;
        c.lock_delay = false;
    });
    let locks = LockClient::with_clock(store, ClientOptions::default(), world.clock);
    let floor = locks.named("x").above(Fence::MIN).acquire().await;
    assert_eq!(floor.unwrap_err().kind(), ErrorKind::Unsupported);
    let delay = locks.named("x").lock_delay(SECOND).acquire().await;
    assert_eq!(delay.unwrap_err().kind(), ErrorKind::Unsupported);
    assert_eq!(world.store.requests(Verb::Acquire), 0);
}

#[tokio::test(start_paused = true)]
async fn namespaces_do_not_meet() {
    let world = World::new();
    let shop = world.client_with(|o| o.namespace = "shop".into());
    let farm = world.client_with(|o| o.namespace = "farm".into());
    let _one = shop.named("x").acquire().await.unwrap();
    let Attempt::Granted(_two) = farm.named("x").try_acquire().await.unwrap() else {
        panic!("another namespace's lock")
    };
}

#[test]
fn without_a_runtime_the_answer_is_an_error_and_not_a_panic() {
    let locks = LockClient::new(MemoryBackend::default());
    let mut acquire = Box::pin(locks.named("x").acquire());
    let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
    let std::task::Poll::Ready(Err(error)) = acquire.as_mut().poll(&mut cx) else { panic!("no error") };
    assert_eq!(error.kind(), ErrorKind::Misconfigured);
    assert!(error.to_string().contains("blocking"), "{error}");
}
