//! The traces that break simpler forms of the bridge, each by its name, and the flaws that they must notice.

use super::{
    membership::Flaw,
    testbed::{Stores, TTL, again, name, poll_once},
    *,
};
use crate::backend::*;

const ALL: [Stage; 5] = [Stage::From, Stage::FromBoth, Stage::Both, Stage::BothTo, Stage::To];

/// A monthly job: nobody locks the name while the fleet moves. Returns the fence before and after.
async fn untouched(stores: &Stores, flaw: Flaw, start: &[Stage], rest: &[Stage]) -> (Fence, Fence) {
    stores.steps(start).await;
    let first = stores.flawed(start.last().unwrap().open()[0], flaw);
    for _ in 0..40 {
        let lease = first.acquire(&stores.call(), &again("monthly")).await.unwrap();
        first.release(&stores.call(), &lease).await.unwrap();
    }
    let before = first.acquire(&stores.call(), &again("monthly")).await.unwrap();
    first.release(&stores.call(), &before).await.unwrap();
    first.close().await;
    stores.steps(rest).await;
    let last = *rest.last().unwrap().open().last().unwrap();
    let last = if rest.last() < start.last() { rest.last().unwrap().open()[0] } else { last };
    let second = stores.flawed(last, flaw);
    let after = second.acquire(&stores.call(), &again("monthly")).await.unwrap();
    (before.fence, after.fence)
}

const FORWARD: [Stage; 3] = [Stage::FromBoth, Stage::Both, Stage::BothTo];
const BACK: [Stage; 3] = [Stage::BothTo, Stage::Both, Stage::FromBoth];

#[test]
fn untouched_name_starts_above_every_fence_of_the_store_that_was_left() {
    Stores::with(async |stores| {
        let (before, after) = untouched(&stores, Flaw::None, &ALL[..1], &FORWARD).await;
        assert!(after > before, "{after} after {before}");
    });
    Stores::with(async |stores| {
        let (before, after) = untouched(&stores, Flaw::None, &ALL, &BACK).await;
        assert!(after > before, "{after} after {before}, on the way back");
    });
}

#[test]
fn without_the_floor_of_the_namespace_an_untouched_name_starts_low() {
    for (start, rest) in [(&ALL[..1], FORWARD), (&ALL[..], BACK)] {
        Stores::with(async |stores| {
            let (before, after) = untouched(&stores, Flaw::NoNamespaceFloor, start, &rest).await;
            assert!(after <= before, "the flaw was not seen: {after} after {before}");
        });
    }
}

#[test]
fn an_end_of_the_way_leaves_its_fences_to_plain_clients() {
    Stores::with(async |stores| {
        let (before, _) = untouched(&stores, Flaw::None, &ALL[..1], &FORWARD).await;
        // Whoever is in phase `both` or `to` is gone.
        stores.pass(stores.membership() * 2);
        stores.steps(&[Stage::To]).await;
        stores.new.steal(&name("monthly"));
        let plain = stores.new.acquire(&stores.call(), &again("monthly")).await.unwrap();
        assert!(plain.fence > before);
    });
}

/// A process of phase `from` is stopped; the fleet moves on to `to`; it wakes up. Returns who may write then, by the
/// resource's word.
async fn zombie(stores: &Stores, flaw: Flaw) -> (Result<Lease>, Lease) {
    stores.steps(&ALL[..1]).await;
    let zombie = stores.flawed(Phase::From, flaw);
    let first = zombie.acquire(&stores.call(), &again("x")).await.unwrap();
    zombie.release(&stores.call(), &first).await.unwrap();
    // Stopped: it renews nothing.
    let refused = stores.migration().step(&stores.call(), Stage::FromBoth).await.unwrap();
    assert_eq!(refused.stage, Stage::FromBoth);
    let refused = stores.migration().step(&stores.call(), Stage::Both).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Held, "closed over a member: {refused}");
    stores.pass(stores.membership() * 2);
    stores.steps(&[Stage::Both, Stage::BothTo, Stage::To]).await;
    let live = stores.bridge(Phase::To).acquire(&stores.call(), &again("x")).await.unwrap();
    (zombie.acquire(&stores.call(), &again("x")).await, live)
}

#[test]
fn zombie_from_takes_no_lock_when_it_wakes_up_in_a_closed_phase() {
    Stores::with(async |stores| {
        let (woken, _) = zombie(&stores, Flaw::None).await;
        let error = woken.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
        assert!(error.to_string().contains("`from` of the migration \"moving\" is not open"), "{error}");
    });
    // Where membership does not bind there are two holders, and the wrong one is let through.
    Stores::with(async |stores| {
        let (woken, _live) = zombie(&stores, Flaw::MembershipNotBinding).await;
        let _second = woken.expect("the flaw was not seen");
    });
}

#[test]
fn zombie_from_that_held_a_lock_can_neither_use_nor_renew_it() {
    Stores::with(async |stores| {
        stores.steps(&ALL[..1]).await;
        let zombie = stores.bridge(Phase::From);
        let held = zombie.acquire(&stores.call(), &again("x")).await.unwrap();
        stores.pass(stores.membership() * 2);
        assert!(held.deadline < stores.call().now());
        stores.steps(&ALL[1..]).await;
        let error = zombie.renew(&stores.call(), &held, TTL).await.unwrap_err();
        assert_eq!((error.kind(), error.lost_reason()), (ErrorKind::Lost, Some(LostReason::SessionEnded)));
    });
}

#[test]
fn a_grant_from_before_a_gap_in_the_membership_is_given_back() {
    Stores::with(async |stores| {
        stores.steps(&ALL[..2]).await;
        let (bridge, other) = (stores.bridge(Phase::From), stores.bridge(Phase::From));
        let held = other.acquire(&stores.call(), &again("x")).await.unwrap();
        // It waits in the old store's queue, and the membership ends meanwhile.
        let request = again("x").waiting_until(Moment::MAX);
        let call = stores.call();
        let mut waiting = Box::pin(bridge.acquire(&call, &request));
        assert!(testbed::poll_once(&mut waiting).is_none());
        other.release(&stores.call(), &held).await.unwrap();
        stores.pass(stores.membership() * 2);
        let error = waiting.await.unwrap_err();
        assert_eq!((error.kind(), error.lost_reason()), (ErrorKind::Lost, Some(LostReason::SessionEnded)));
        assert_eq!(stores.old.holder(&name("x"), stores.call().now()), None);
    });
}

#[test]
fn raise_after_loss_raises_nothing_and_gives_up_the_new_side() {
    Stores::with(async |stores| {
        stores.steps(&ALL[..2]).await;
        let (both, from) = (stores.bridge(Phase::Both), stores.bridge(Phase::From));
        let warm = both.acquire(&stores.call(), &again("other")).await.unwrap();
        both.release(&stores.call(), &warm).await.unwrap();
        stores.new.raise_fence(&stores.call(), &name("x"), Fence::new(900).unwrap()).await.unwrap();
        // The old record is lost between the grant of the new side and the raise.
        stores.old.faults().lose_before(Verb::Raise, 1);
        stores.old.faults().hold_replies(Verb::Acquire);
        let request = again("x");
        let call = stores.call();
        let mut asked = Box::pin(both.acquire(&call, &request));
        assert!(testbed::poll_once(&mut asked).is_none());
        stores.old.steal(&name("x"));
        stores.old.faults().deliver();
        stores.old.faults().heal();
        let live = from.acquire(&stores.call(), &again("x")).await.unwrap();
        let error = asked.await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
        assert_eq!(stores.new.holder(&name("x"), stores.call().now()), None, "the new side was kept");
        let _ = from.release(&stores.call(), &live).await.unwrap();
        let next = from.acquire(&stores.call(), &again("x")).await.unwrap();
        assert!(next.fence.get() < 900, "a former holder raised the old side to {}", next.fence);
    });
}

#[test]
fn waiter_queued_before_raise_is_granted_above_it() {
    Stores::with(async |stores| {
        stores.steps(&ALL[..2]).await;
        let (both, from) = (stores.bridge(Phase::Both), stores.bridge(Phase::From));
        stores.new.raise_fence(&stores.call(), &name("x"), Fence::new(5_000).unwrap()).await.unwrap();
        let call = stores.call();
        let holder = from.acquire(&call, &again("x")).await.unwrap();
        let (first, second) = (again("x").waiting_until(Moment::MAX), again("x").waiting_until(Moment::MAX));
        let mut both_waits = Box::pin(both.acquire(&call, &first));
        assert!(testbed::poll_once(&mut both_waits).is_none());
        let mut from_waits = Box::pin(from.acquire(&call, &second));
        assert!(testbed::poll_once(&mut from_waits).is_none());
        from.release(&call, &holder).await.unwrap();
        let raised = both_waits.await.unwrap();
        assert!(raised.fence.get() > 5_000);
        assert!(testbed::poll_once(&mut from_waits).is_none());
        both.release(&call, &raised).await.unwrap();
        let queued = from_waits.await.unwrap();
        assert!(queued.fence > raised.fence, "{} after {}", queued.fence, raised.fence);
    });
}

#[test]
fn lock_ttl_above_membership_is_refused_and_no_lease_outlives_it() {
    Stores::with(async |stores| {
        stores.steps(&ALL[..1]).await;
        let bridge = stores.bridge(Phase::From);
        let membership = stores.membership();
        assert_eq!(*bridge.capabilities().ttl.end(), membership);
        // Also where lockcore's own check was gone around.
        let long = AcquireRequest::new(name("x"), membership * 20);
        let error = bridge.acquire(&stores.call(), &long).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        let lease =
            bridge.acquire(&stores.call(), &AcquireRequest::new(name("x"), membership)).await.unwrap();
        let error = bridge.renew(&stores.call(), &lease, membership * 20).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        // Half of the membership is over and the store cannot be asked to prolong it: what follows ends with it.
        stores.pass(membership / 8 * 5);
        stores.old.faults().lose_before(Verb::Migrate, 2);
        let member_ends = lease.deadline;
        let second =
            bridge.acquire(&stores.call(), &AcquireRequest::new(name("y"), membership)).await.unwrap();
        assert_eq!(second.deadline, member_ends, "a lease outlives its membership");
    });
}

#[test]
fn one_side_expires_and_the_lease_is_lost_and_the_other_side_given_back() {
    for old_side in [true, false] {
        Stores::with(async |stores| {
            stores.steps(&ALL[..3]).await;
            let both = stores.bridge(Phase::Both);
            let lease = both.acquire(&stores.call(), &again("x")).await.unwrap();
            let store = if old_side { &stores.old } else { &stores.new };
            // What an operator removes looks like what expired: not on record.
            store.steal(&name("x"));
            let error = both.renew(&stores.call(), &lease, TTL).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
            let now = stores.call().now();
            assert_eq!(stores.old.holder(&name("x"), now), None);
            assert_eq!(stores.new.holder(&name("x"), now), None);
            assert_eq!(both.release(&stores.call(), &lease).await.unwrap(), Released::AlreadyOver);
        });
    }
}

#[test]
fn a_renewal_that_one_side_does_not_answer_moves_no_deadline() {
    Stores::with(async |stores| {
        stores.steps(&ALL[..3]).await;
        let both = stores.bridge(Phase::Both);
        let lease = both.acquire(&stores.call(), &again("x")).await.unwrap();
        stores.pass(TTL / 2);
        for store in [&stores.old, &stores.new] {
            store.faults().lose_after(Verb::Renew, 1);
            assert_eq!(both.renew(&stores.call(), &lease, TTL).await.unwrap_err().kind(), ErrorKind::Unknown);
        }
        let renewed = both.renew(&stores.call(), &lease, TTL).await.unwrap();
        assert!(renewed.deadline > lease.deadline);
        assert_eq!((renewed.fence, renewed.owner), (lease.fence, lease.owner));
    });
}

#[test]
fn lost_reply_of_raise_is_asked_again_and_in_the_end_resolved() {
    Stores::with(async |stores| {
        stores.steps(&ALL[..3]).await;
        let both = stores.bridge(Phase::Both);
        stores.new.raise_fence(&stores.call(), &name("x"), Fence::new(70).unwrap()).await.unwrap();
        for lost in [Faults::lose_before as fn(&Faults, Verb, u32), Faults::lose_after] {
            lost(stores.old.faults(), Verb::Raise, 1);
            let lease = both.acquire(&stores.call(), &again("x")).await.unwrap();
            both.release(&stores.call(), &lease).await.unwrap();
            // Never heard: the outcome is unknown, nobody else gets it, and it can be adopted.
            lost(stores.old.faults(), Verb::Raise, 100_000);
            let request = again("x");
            let error = both.acquire(&stores.call(), &request).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
            stores.old.faults().heal();
            if stores.new.holder(&name("x"), stores.call().now()).is_some() {
                let other = both.acquire(&stores.call(), &again("x")).await.unwrap_err();
                assert_eq!(other.kind(), ErrorKind::Held);
            }
            match both.resolve(&stores.call(), &request).await.unwrap() {
                Resolution::Adopted(adopted) => {
                    both.release(&stores.call(), &adopted).await.unwrap();
                    let from = stores.old.acquire(&stores.call(), &again("x")).await.unwrap();
                    assert!(from.fence > adopted.fence, "the old side was not raised");
                    stores.old.release(&stores.call(), &from).await.unwrap();
                }
                Resolution::Gone => {}
            }
        }
    });
}

use crate::memory::Faults;

#[test]
fn back_with_fence_ahead_of_time_keeps_growing() {
    Stores::with(async |stores| {
        stores.steps(&ALL).await;
        // A store whose numbers are from the clock: far above what the old one counts.
        let ahead = Fence::new(1_795_980_434_715_925).unwrap();
        stores.new.raise_fence(&stores.call(), &name("x"), ahead).await.unwrap();
        let to = stores.bridge(Phase::To);
        let last = to.acquire(&stores.call(), &again("x")).await.unwrap();
        to.release(&stores.call(), &last).await.unwrap();
        to.close().await;
        stores.steps(&[Stage::BothTo, Stage::Both, Stage::FromBoth, Stage::From]).await;
        let from = stores.bridge(Phase::From);
        let other = from.acquire(&stores.call(), &again("never locked before")).await.unwrap();
        let back = from.acquire(&stores.call(), &again("x")).await.unwrap();
        assert!(back.fence > last.fence && other.fence > ahead, "{} and {}", back.fence, other.fence);
        from.release(&stores.call(), &back).await.unwrap();
        from.close().await;
        // Plain clients of the old store keep to it.
        let plain = stores.old.acquire(&stores.call(), &again("x")).await.unwrap();
        assert!(plain.fence > back.fence);
    });
}

#[test]
fn o01_a_record_of_somebody_else_is_held_and_stays() {
    for (phase, stage, on_old) in [
        (Phase::From, Stage::From, true),
        (Phase::Both, Stage::Both, true),
        (Phase::Both, Stage::Both, false),
        (Phase::To, Stage::To, false),
    ] {
        Stores::with(async |stores| {
            let until = ALL.iter().position(|known| *known == stage).unwrap();
            stores.steps(&ALL[..=until]).await;
            let store = if on_old { &stores.old } else { &stores.new };
            let foreign = store.acquire(&stores.call(), &again("x")).await.unwrap();
            let bridge = stores.bridge(phase);
            let error = bridge.acquire(&stores.call(), &again("x")).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Held, "{error}");
            let now = stores.call().now();
            assert_eq!(store.holder(&name("x"), now), Some(foreign.owner));
            let other = if on_old { &stores.new } else { &stores.old };
            assert_eq!(other.holder(&name("x"), now), None, "a refusal left half a grant");
            assert_eq!(store.release(&stores.call(), &foreign).await.unwrap(), Released::Now);
        });
    }
}

#[test]
fn o02_a_floor_that_was_asked_for_holds_on_both_sides() {
    Stores::with(async |stores| {
        stores.steps(&ALL[..3]).await;
        let both = stores.bridge(Phase::Both);
        let floor = Fence::new(1 << 40).unwrap();
        let lease = both.acquire(&stores.call(), &again("x").above(floor)).await.unwrap();
        assert!(lease.fence > floor);
        both.release(&stores.call(), &lease).await.unwrap();
        for store in [&stores.old, &stores.new] {
            let next = store.acquire(&stores.call(), &again("x")).await.unwrap();
            assert!(next.fence > lease.fence, "{} after {}", next.fence, lease.fence);
        }
    });
}

#[test]
fn o03_a_store_that_forgot_its_record_is_left_alone() {
    Stores::with(async |stores| {
        stores.steps(&ALL[..3]).await;
        let both = stores.bridge(Phase::Both);
        let lease = both.acquire(&stores.call(), &again("x")).await.unwrap();
        stores.new.forget();
        assert_eq!(both.renew(&stores.call(), &lease, TTL).await.unwrap_err().kind(), ErrorKind::Lost);
        stores.pass(stores.membership() * 2);
        let error = both.acquire(&stores.call(), &again("x")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
        let error = stores.migration().status(&stores.call()).await.unwrap_err();
        assert!(error.to_string().contains("restored or wiped"), "{error}");
    });
}

#[test]
fn o04_neighbouring_phases_exclude_each_other_and_their_fences_grow() {
    for (stage, phases) in [(1, [Phase::From, Phase::Both]), (3, [Phase::Both, Phase::To])] {
        Stores::with(async |stores| {
            stores.steps(&ALL[..=stage]).await;
            let bridges = phases.map(|phase| stores.bridge(phase));
            let mut last = None;
            for turn in 0..8 {
                let (here, there) = (&bridges[turn % 2], &bridges[(turn + 1) % 2]);
                let lease = here.acquire(&stores.call(), &again("x")).await.unwrap();
                assert!(Some(lease.fence) > last, "{:?} after {last:?}", lease.fence);
                last = Some(lease.fence);
                let error = there.acquire(&stores.call(), &again("x")).await.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Held, "{error}");
                let lease = here.renew(&stores.call(), &lease, TTL).await.unwrap();
                assert_eq!(here.release(&stores.call(), &lease).await.unwrap(), Released::Now);
            }
        });
    }
}

#[test]
fn an_operator_skips_no_stage_and_closes_nothing_over_a_member() {
    Stores::with(async |stores| {
        let (migration, call) = (stores.migration(), stores.call());
        assert_eq!(migration.status(&call).await.unwrap().stage, Stage::Plain);
        let refused = migration.step(&call, Stage::FromBoth).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
        let error = stores.bridge(Phase::From).acquire(&call, &again("x")).await.unwrap_err();
        assert!(error.to_string().contains("lockctl migrate advance moving"), "{error}");
        stores.steps(&ALL[..2]).await;
        let from = stores.bridge(Phase::From);
        let held = from.acquire(&call, &again("x")).await.unwrap();
        let refused = migration.step(&call, Stage::Both).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Held);
        assert!(refused.to_string().contains("web-1:4711"), "{refused}");
        let status = migration.status(&call).await.unwrap();
        assert_eq!((status.stage, status.settled), (Stage::Both, false));
        assert_eq!((status.forward(), status.backward()), (Some(Stage::Both), Some(Stage::FromBoth)));
        // Closed is closed; who is in stays, and goes on.
        let error = stores.bridge(Phase::From).acquire(&call, &again("y")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured);
        let held = from.renew(&call, &held, TTL).await.unwrap();
        // Undone, and done again.
        assert_eq!(migration.step(&call, Stage::FromBoth).await.unwrap().stage, Stage::FromBoth);
        let _ = stores.bridge(Phase::From).acquire(&call, &again("y")).await.unwrap();
        from.release(&call, &held).await.unwrap();
        from.close().await;
        stores.pass(stores.membership() * 2);
        let status = migration.step(&call, Stage::Both).await.unwrap();
        assert_eq!((status.stage, status.settled), (Stage::Both, true));
        assert!(status.floor_to >= Some(held.fence));
        assert!(status.members.is_empty());
    });
}

#[test]
fn a_step_that_has_begun_never_says_that_nothing_was_done() {
    Stores::with(async |stores| {
        let (migration, call) = (stores.migration(), stores.call());
        stores.steps(&ALL[..1]).await;
        stores.old.faults().hold_replies(Verb::Migrate);
        let mut step = Box::pin(migration.step(&call, Stage::FromBoth));
        // Both records were read; the old one's answer is on its way.
        assert!(poll_once(&mut step).is_none());
        stores.new.faults().refuse_next(Verb::Migrate, 1, ErrorKind::Unavailable);
        stores.old.faults().deliver();
        let error = step.await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
        assert!(!migration.status(&call).await.unwrap().settled, "the old record was not replaced");
        assert_eq!(migration.step(&call, Stage::FromBoth).await.unwrap().stage, Stage::FromBoth);
    });
}

#[test]
fn two_operators_never_open_both_ends() {
    // Each operator's store requests, in every order, with every reply lost once.
    super::explore::operators();
}

#[test]
fn a_bridge_is_as_weak_as_its_weaker_side() {
    Stores::with(async |stores| {
        let strong = stores.old.clone().promising(|c| {
            c.consistency = Consistency::Linearizable;
            c.survives.failover = true;
            c.ttl = Duration::from_secs(2)..=Duration::from_secs(3600);
            c.ttl_step = Duration::from_secs(1);
        });
        let bridge =
            Bridge::new("moving", Phase::Both, Arc::new(strong), Arc::new(stores.new.clone())).unwrap();
        let promised = bridge.capabilities();
        assert_eq!(promised.consistency, Consistency::Process);
        assert_eq!(promised.ttl, Duration::from_secs(2)..=Duration::from_secs(60));
        assert_eq!(promised.ttl_step, Duration::from_secs(1));
        assert!(!promised.survives.failover && !promised.fair && promised.survives.pause);
    });
}

use std::{sync::Arc, time::Duration};

#[test]
fn a_bridge_is_no_side_of_another_and_its_name_is_checked() {
    Stores::with(async |stores| {
        let bridge: Arc<dyn LockBackend> = Arc::new(stores.bridge(Phase::From));
        let nested = Bridge::new("outer", Phase::From, bridge, Arc::new(stores.new.clone())).unwrap();
        let error = nested.acquire(&stores.call(), &again("x")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
        for bad in ["", "a b", &"x".repeat(65)] {
            assert_eq!(
                Migration::new(bad, stores.arc_old(), stores.arc_new()).unwrap_err().kind(),
                ErrorKind::Invalid
            );
        }
        stores.steps(&ALL[..1]).await;
        let other = Bridge::new("other", Phase::From, stores.arc_old(), stores.arc_new()).unwrap();
        let error = other.acquire(&stores.call(), &again("x")).await.unwrap_err();
        assert!(error.to_string().contains("part of the migration \"moving\""), "{error}");
    });
}

#[test]
fn a_break_ends_the_holding_on_both_sides_and_every_later_grant_is_above_it() {
    Stores::with(async |stores| {
        stores.steps(&ALL[..3]).await;
        let both = stores.bridge(Phase::Both);
        let call = stores.call();
        let lease = both.acquire(&call, &again("x")).await.unwrap();
        let seen = both.inspect(&call, &name("x")).await.unwrap();
        assert_eq!(seen.holder.as_ref().unwrap().stamp(), lease.stamp());
        let wrong = Stamp::new(Fence::MAX, lease.owner.digest());
        let error = both.break_lock(&call, &name("x"), Some(wrong)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Held);
        let broken = both.break_lock(&call, &name("x"), Some(lease.stamp())).await.unwrap();
        assert_eq!(broken.holder.unwrap().stamp(), lease.stamp());
        assert_eq!(both.renew(&call, &lease, TTL).await.unwrap_err().lost_reason(), Some(LostReason::Broken));
        for store in [&stores.old, &stores.new] {
            let next = store.acquire(&call, &again("x")).await.unwrap();
            assert!(next.fence > broken.floor && broken.floor > lease.fence);
        }
    });
}

#[test]
fn leases_are_renewed_together_and_each_has_its_own_answer() {
    Stores::with(async |stores| {
        stores.steps(&ALL[..3]).await;
        let both = stores.bridge(Phase::Both);
        let call = stores.call();
        let mut leases = Vec::new();
        for n in ["a", "b", "c"] {
            leases.push(both.acquire(&call, &again(n)).await.unwrap());
        }
        stores.old.steal(&name("b"));
        stores.pass(TTL / 4);
        let before = (stores.old.requests(Verb::Renew), stores.new.requests(Verb::Renew));
        let answers = both.renew_many(&call, &leases, TTL).await;
        assert!(answers[0].is_ok() && answers[2].is_ok(), "{answers:?}");
        assert_eq!(answers[1].as_ref().unwrap_err().kind(), ErrorKind::Lost);
        assert_eq!(stores.new.holder(&name("b"), call.now()), None);
        // Another bridge reads the old side's fence off the record.
        let other = stores.bridge(Phase::Both);
        let carried = other.renew(&call, answers[0].as_ref().unwrap(), TTL).await.unwrap();
        assert_eq!(other.release(&call, &carried).await.unwrap(), Released::Now);
        assert!(stores.old.requests(Verb::Renew) > before.0 && stores.new.requests(Verb::Renew) > before.1);
    });
}

#[test]
fn a_wait_for_the_new_side_keeps_the_old_one() {
    Stores::with(async |stores| {
        stores.steps(&ALL[..4]).await;
        let (both, to) = (stores.bridge(Phase::Both), stores.bridge(Phase::To));
        let call = stores.call();
        let mut held = to.acquire(&call, &again("x")).await.unwrap();
        let request = again("x").waiting_until(Moment::MAX);
        let mut waiting = Box::pin(both.acquire(&call, &request));
        for _ in 0..40 {
            stores.pass(TTL / 8);
            assert!(testbed::poll_once(&mut waiting).is_none());
            held = to.renew(&call, &held, TTL).await.unwrap();
            assert_eq!(
                stores.old.holder(&name("x"), call.now()),
                Some(*request.owner()),
                "the old side ran out"
            );
        }
        to.release(&call, &held).await.unwrap();
        let lease = waiting.await.unwrap();
        assert!(lease.fence > held.fence);
        assert!(call.now().until(lease.deadline) > TTL / 4);
        assert_eq!(both.release(&call, &lease).await.unwrap(), Released::Now);
    });
}

#[test]
fn a_wait_for_the_new_side_keeps_the_lock_delay_out_of_the_lease() {
    Stores::with(async |stores| {
        stores.steps(&ALL[..4]).await;
        let (both, to) = (stores.bridge(Phase::Both), stores.bridge(Phase::To));
        let delay = TTL / 2;
        let call = stores.delayed(delay);
        let held = to.acquire(&stores.call(), &again("x")).await.unwrap();
        let request = again("x").waiting_until(Moment::MAX);
        let mut waiting = Box::pin(both.acquire(&call, &request));
        // The old side is renewed once, and some time later the new one is free.
        for _ in 0..4 {
            stores.pass(TTL / 8);
            assert!(testbed::poll_once(&mut waiting).is_none());
        }
        to.release(&stores.call(), &held).await.unwrap();
        let lease = waiting.await.unwrap();
        let record = stores.old.inspect(&call, &name("x")).await.unwrap().holder.unwrap();
        let kept_closed = lease.deadline.until(call.now().saturating_add(record.remaining));
        assert!(kept_closed >= delay, "the old side is open {kept_closed:?} after the lease, not {delay:?}");
    });
}

#[test]
fn a_refusal_beside_a_side_that_was_released_is_unknown() {
    for on_old in [true, false] {
        for kind in [ErrorKind::Unavailable, ErrorKind::Overloaded, ErrorKind::Unauthorized] {
            Stores::with(async |stores| {
                stores.steps(&ALL[..3]).await;
                let both = stores.bridge(Phase::Both);
                let lease = both.acquire(&stores.call(), &again("x")).await.unwrap();
                let store = if on_old { &stores.old } else { &stores.new };
                store.faults().refuse_next(Verb::Release, 1, kind);
                let error = both.release(&stores.call(), &lease).await.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
                assert_eq!(both.release(&stores.call(), &lease).await.unwrap(), Released::AlreadyOver);
                assert_eq!(store.holder(&name("x"), stores.call().now()), None);
            });
        }
    }
}

#[test]
fn a_break_that_names_a_holder_takes_the_lock_from_nobody_else() {
    Stores::with(async |stores| {
        stores.steps(&ALL[..4]).await;
        let (both, to) = (stores.bridge(Phase::Both), stores.bridge(Phase::To));
        let call = stores.call();
        // Half a holding: on the old side alone.
        let half = stores.old.acquire(&call, &again("x")).await.unwrap();
        stores.new.faults().hold_replies(Verb::Inspect);
        let name = name("x");
        let mut breaking = Box::pin(both.break_lock(&call, &name, Some(half.stamp())));
        assert!(testbed::poll_once(&mut breaking).is_none());
        let newer = to.acquire(&call, &again("x")).await.unwrap();
        stores.new.faults().deliver();
        let error = breaking.await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Held, "{error}");
        assert_eq!(error.holder().map(Holder::stamp), Some(newer.stamp()));
        assert_eq!(stores.new.holder(&name, call.now()), Some(newer.owner), "another holder was cut off");
    });
}

#[test]
fn a_break_of_one_side_alone_is_unknown() {
    // Another holder of the old side, a side that refuses, and a floor that is not raised.
    for story in 0..3 {
        Stores::with(async |stores| {
            stores.steps(&ALL[..3]).await;
            let both = stores.bridge(Phase::Both);
            let call = stores.call();
            let lease = both.acquire(&call, &again("x")).await.unwrap();
            let name = name("x");
            match story {
                0 => stores.old.faults().hold_replies(Verb::Inspect),
                1 => stores.old.faults().refuse_next(Verb::Break, 1, ErrorKind::Unavailable),
                _ => stores.old.faults().refuse_next(Verb::Raise, 1, ErrorKind::Unavailable),
            }
            let mut breaking = Box::pin(both.break_lock(&call, &name, Some(lease.stamp())));
            if story == 0 {
                assert!(testbed::poll_once(&mut breaking).is_none());
                stores.old.steal(&name);
                let _newer = stores.old.acquire(&call, &again("x")).await.unwrap();
                stores.old.faults().deliver();
            }
            let error = breaking.await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
            assert_eq!(stores.new.holder(&name, call.now()), None);
        });
    }
}

#[test]
fn a_raise_of_one_side_alone_is_unknown() {
    Stores::with(async |stores| {
        stores.steps(&ALL[..3]).await;
        let both = stores.bridge(Phase::Both);
        let lease = both.acquire(&stores.call(), &again("x")).await.unwrap();
        stores.old.faults().refuse_next(Verb::Raise, 1, ErrorKind::Unavailable);
        let floor = Fence::new(1 << 40).unwrap();
        let error = both.raise(&stores.call(), &lease, floor).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
        both.raise(&stores.call(), &lease, floor).await.unwrap();
    });
}
