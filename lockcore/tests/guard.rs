//! Guards and watchers: what they know, what they tell, how they end.

mod common;

use std::time::Duration;

use common::{SECOND, TTL, World, name, pass, poll_once};
use lockcore::{Attempt, ErrorKind, LostReason, Released, State, Verb};

#[tokio::test(start_paused = true)]
async fn a_lease_is_renewed_twenty_ttls_long_with_one_renewal_at_a_time() {
    let world = World::new();
    let locks = world.client();
    let guard = locks.named("x").acquire().await.unwrap();
    let fence = guard.fence();
    pass(20 * TTL).await;
    assert_eq!((guard.state(), guard.fence()), (State::Held, fence));
    let renewals = world.store.requests(Verb::Renew);
    assert!((60..=80).contains(&renewals), "{renewals} renewals in 20 TTLs");
    assert_eq!(guard.release().await.unwrap(), Released::Now);
    pass(10 * TTL).await;
    assert_eq!(world.store.requests(Verb::Renew), renewals, "a renewal after the release");
}

#[tokio::test(start_paused = true)]
async fn a_lost_renewal_makes_it_uncertain_and_the_next_one_held_again() {
    let world = World::new();
    let locks = world.client();
    let guard = locks.named("x").acquire().await.unwrap();
    world.store.faults().lose_before(Verb::Renew, 1);
    assert_eq!(guard.changed().await, State::Uncertain);
    guard.ensure_held().expect("uncertain is not lost");
    guard.stamp().expect("uncertain is not lost");
    let before = world.now();
    assert_eq!(guard.changed().await, State::Held);
    assert!(before.until(world.now()) < 6 * SECOND, "the retry is not faster than the schedule");
    pass(20 * TTL).await;
    assert_eq!(guard.state(), State::Held, "one failed renewal ended renewing for good (R13)");
}

#[tokio::test(start_paused = true)]
async fn a_second_lease_of_the_same_name_is_renewed_after_the_first_was_lost() {
    let world = World::new();
    let locks = world.client();
    let first = locks.named("x").acquire().await.unwrap();
    world.store.faults().cut(true);
    assert_eq!(first.lost().await, LostReason::Expired);
    world.store.faults().cut(false);
    let second = locks.named("x").acquire().await.unwrap();
    assert!(second.fence() > first.fence());
    pass(10 * TTL).await;
    assert_eq!(second.state(), State::Held, "bookkeeping of the first lease stopped the second (R13)");
    drop(first);
    world.settle().await;
    assert!(world.is_held("x"), "the first lease's release ended the second");
}

#[tokio::test(start_paused = true)]
async fn loss_is_told_at_the_deadline_whatever_the_network_does() {
    // R02: packets are swallowed without a word.
    for phase in 0..20 {
        let world = World::new();
        let (alice, bob) = (world.client(), world.client());
        let guard = alice.named("x").acquire().await.unwrap();
        pass(Duration::from_millis(1500 * phase)).await;
        let deadline = guard.lease().deadline;
        world.store.faults().cut(true);
        let watcher = guard.watch();
        assert_eq!(watcher.lost().await, LostReason::Expired);
        let late = deadline.until(world.now());
        assert!(
            world.now() >= deadline && late < Duration::from_millis(10),
            "told {late:?} after the deadline"
        );
        assert_eq!(guard.remaining(), Duration::ZERO);
        assert_eq!(guard.ensure_held().unwrap_err().kind(), ErrorKind::Lost);
        assert_eq!(guard.stamp().unwrap_err().lost_reason(), Some(LostReason::Expired));
        assert!(guard.cancellation().is_cancelled());
        world.store.faults().cut(false);
        let next = bob.named("x").acquire().await.unwrap();
        assert!(next.fence() > guard.fence());
        assert_eq!(guard.renew().await.unwrap_err().kind(), ErrorKind::Lost);
    }
}

#[tokio::test(start_paused = true)]
async fn a_taken_lease_is_lost_at_the_next_renewal_and_creates_nothing() {
    // R07: the key is free when the late renewal comes.
    let world = World::new();
    let (alice, carol) = (world.client(), world.client());
    let guard = alice.named("x").acquire().await.unwrap();
    world.store.steal(&name("x"));
    assert_eq!(guard.lost().await, LostReason::Taken);
    assert!(!world.is_held("x"), "a renewal created the record again");
    let next = carol.named("x").acquire().await.unwrap();
    assert!(next.fence() > guard.fence());
    assert_eq!(guard.release().await.unwrap(), Released::AlreadyOver);
    next.ensure_held().unwrap();
    assert!(world.is_held("x"), "the loser's release ended the next holder's lease");
}

#[tokio::test(start_paused = true)]
async fn loss_is_pushed_where_the_store_tells() {
    let world = World::new();
    let store = world.store.clone().promising(|c| c.pushes_loss = true);
    let locks = lockcore::LockClient::with_clock(store, lockcore::ClientOptions::default(), world.clock);
    let guard = locks.named("x").acquire().await.unwrap();
    pass(SECOND).await;
    world.store.steal(&name("x"));
    let before = world.now();
    assert_eq!(guard.lost().await, LostReason::Taken);
    assert!(before.until(world.now()) < Duration::from_millis(200), "the loss was not pushed");
}

#[tokio::test(start_paused = true)]
async fn an_operator_who_breaks_the_lock_is_the_reason() {
    let world = World::new();
    let locks = world.client();
    let guard = locks.named("x").acquire().await.unwrap();
    let (backend, call) = locks.backend().unwrap();
    let wrong = lockcore::Stamp::new(lockcore::Fence::new(77).unwrap(), guard.stamp().unwrap().owner);
    let refused = backend.break_lock(&call, &name("x"), Some(wrong)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Held, "a break that expected another holder went through");
    let broken = backend.break_lock(&call, &name("x"), Some(guard.stamp().unwrap())).await.unwrap();
    assert!(broken.floor > guard.fence());
    assert_eq!(guard.lost().await, LostReason::Broken);
    let next = world.client().named("x").acquire().await.unwrap();
    assert!(next.fence() > broken.floor, "the next fence does not lie above the break's own");
}

#[tokio::test(start_paused = true)]
async fn a_dropped_guard_is_waited_for_by_the_next_try_of_this_process() {
    let world = World::new();
    let locks = world.client();
    world.store.faults().delay_replies(SECOND);
    let Attempt::Granted(guard) = locks.named("x").try_acquire().await.unwrap() else { panic!("busy") };
    drop(guard);
    let again = locks.named("x").try_acquire().await.unwrap();
    assert!(matches!(again, Attempt::Granted(_)), "busy with itself: {again:?}");
}

#[tokio::test(start_paused = true)]
async fn closing_waits_for_the_releases_of_dropped_guards() {
    let world = World::new();
    let locks = world.client();
    let guards: Vec<_> =
        [locks.named("a").acquire().await.unwrap(), locks.named("b").acquire().await.unwrap()].into();
    world.store.faults().delay_requests(SECOND);
    drop(guards);
    assert!(world.is_held("a"));
    locks.flush().await;
    assert!(!world.is_held("a") && !world.is_held("b"), "flush returned before the releases");
    world.store.faults().delay_requests(Duration::ZERO);
    let guard = locks.named("c").acquire().await.unwrap();
    locks.close().await;
    assert_eq!(guard.state(), State::Lost(LostReason::Closed));
    assert!(!world.is_held("c"), "close left a lock behind");
    locks.close().await;
    assert_eq!(locks.named("c").acquire().await.unwrap_err().kind(), ErrorKind::Closed);
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_or_unheard_release_goes_on() {
    // R16: polled once and dropped; the reply lost; the connection gone for a while.
    let world = World::new();
    let locks = world.client();
    let guard = locks.named("x").acquire().await.unwrap();
    world.store.faults().delay_requests(SECOND);
    let mut release = Box::pin(guard.release());
    assert!(poll_once(&mut release).await.is_pending());
    drop(release);
    locks.flush().await;
    assert!(!world.is_held("x"), "a cancelled release was forgotten");
    world.store.faults().delay_requests(Duration::ZERO);

    let guard = locks.named("x").acquire().await.unwrap();
    world.store.faults().lose_after(Verb::Release, 1);
    assert_eq!(guard.release().await.unwrap(), Released::Now, "its own lost release was taken for another's");

    let guard = locks.named("x").acquire().await.unwrap();
    world.store.faults().cut(true);
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Unknown);
    pass(SECOND).await;
    world.store.faults().cut(false);
    locks.flush().await;
    assert!(!world.is_held("x"), "an unheard release was given up");
}

#[tokio::test(start_paused = true)]
async fn busy_work_holds_the_release_back_but_not_beyond_the_deadline() {
    let world = World::new();
    let locks = world.client();
    let guard = locks.named("x").acquire().await.unwrap();
    let busy = guard.watch().busy().unwrap();
    let watch = guard.watch();
    drop(guard);
    pass(10 * SECOND).await;
    assert!(world.is_held("x"), "given away while work goes on");
    assert_eq!(watch.state(), State::Lost(LostReason::Released));
    assert!(watch.stamp().is_err());
    drop(busy);
    locks.flush().await;
    assert!(!world.is_held("x"));

    let guard = locks.named("x").acquire().await.unwrap();
    let _busy = guard.watch().busy().unwrap();
    drop(guard);
    pass(TTL + SECOND).await;
    assert!(!world.is_held("x"), "busy work prolonged the lease");
    assert!(watch.busy().is_err(), "busy under a lease that is over");
}

#[tokio::test]
async fn blocking_work_keeps_the_lock_when_its_caller_is_dropped() {
    let store = lockcore::memory::MemoryBackend::default();
    let (alice, bob) = (lockcore::LockClient::new(store.clone()), lockcore::LockClient::new(store));
    let (started, has_started) = tokio::sync::oneshot::channel();
    let (finish, may_finish) = std::sync::mpsc::channel::<()>();
    let caller = tokio::spawn(async move {
        alice
            .named("x")
            .run(async |held| {
                held.run_blocking(move |held| -> lockcore::Result<()> {
                    held.ensure_held()?;
                    started.send(()).unwrap();
                    may_finish.recv().unwrap();
                    Ok(())
                })
                .await
            })
            .await
    });
    has_started.await.unwrap();
    caller.abort();
    assert!(caller.await.unwrap_err().is_cancelled());
    let attempt = bob.named("x").try_acquire().await.unwrap();
    assert!(matches!(attempt, Attempt::Busy(_)), "given away while a thread still works");
    finish.send(()).unwrap();
    bob.named("x").acquire().await.unwrap().release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_forgotten_guard_ends_at_its_cap() {
    let world = World::new();
    let locks = world.client();
    let guard = locks.named("x").max_hold(5 * TTL).acquire().await.unwrap();
    let watch = guard.watch();
    std::mem::forget(guard);
    pass(4 * TTL).await;
    assert_eq!(watch.state(), State::Held);
    assert_eq!(watch.lost().await, LostReason::HoldLimit);
    pass(2 * TTL).await;
    assert!(!world.is_held("x"), "renewed for ever");
}

#[tokio::test(start_paused = true)]
async fn a_step_that_does_not_fit_is_not_begun() {
    let world = World::new();
    let guard = world.client().named("x").acquire().await.unwrap();
    guard.ensure_held_for(20 * SECOND).unwrap();
    assert_eq!(guard.ensure_held_for(TTL).unwrap_err().kind(), ErrorKind::Unavailable);
}

#[tokio::test(start_paused = true)]
async fn a_users_cancel_stops_only_the_users_own_work() {
    let world = World::new();
    let guard = world.client().named("x").acquire().await.unwrap();
    let (mine, others) = (guard.cancellation(), guard.cancellation());
    mine.cancel();
    assert!(!others.is_cancelled());
    guard.ensure_held().unwrap();
    world.store.steal(&name("x"));
    others.cancelled().await;
    assert_eq!(guard.state(), State::Lost(LostReason::Taken));
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_comes_after_the_deadline_does_not_revive() {
    let world = World::new();
    // A call may take as long as a third of the TTL; three late answers in a row reach beyond the deadline.
    let locks = world.client();
    let guard = locks.named("x").acquire().await.unwrap();
    world.store.faults().hold_replies(Verb::Renew);
    assert_eq!(guard.lost().await, LostReason::Expired);
    world.store.faults().deliver();
    pass(SECOND).await;
    assert_eq!(guard.state(), State::Lost(LostReason::Expired));
    drop(guard);
    locks.flush().await;
    assert!(!world.is_held("x"), "the executed renewals keep the lock although its holder is over");
}

#[tokio::test(start_paused = true)]
async fn a_renewal_by_hand_moves_the_deadline() {
    let world = World::new();
    let guard = world.client().named("x").acquire().await.unwrap();
    pass(5 * SECOND).await;
    let before = guard.lease();
    guard.renew().await.unwrap();
    let after = guard.lease();
    assert_eq!(before.deadline.until(after.deadline), 5 * SECOND);
    assert_eq!((before.owner, before.fence), (after.owner, after.fence));
}

#[tokio::test(start_paused = true)]
async fn closing_does_not_wait_for_a_store_that_does_not_answer() {
    let world = World::new();
    let locks = world.client();
    let guard = locks.named("x").acquire().await.unwrap();
    world.store.faults().cut(true);
    drop(guard);
    let start = world.now();
    locks.close().await;
    let took = start.until(world.now());
    assert!(took <= 6 * SECOND, "close took {took:?}");
}

#[tokio::test(start_paused = true)]
async fn an_acquire_dropped_where_no_runtime_is_leaves_nothing() {
    let world = World::new();
    let locks = world.client();
    world.store.faults().hold_replies(Verb::Acquire);
    let mut acquire = Box::pin(locks.named("x").acquire());
    assert!(poll_once(&mut acquire).await.is_pending());
    assert!(world.is_held("x"));
    std::thread::spawn(move || drop(acquire)).join().unwrap();
    world.store.faults().deliver();
    locks.flush().await;
    assert!(!world.is_held("x"), "an acquire dropped on a plain thread was forgotten");
}
