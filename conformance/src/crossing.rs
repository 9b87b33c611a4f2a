//! A move between two stores and back, as a fleet takes it: for a backend's own tests, with real servers.

use std::{collections::HashMap, sync::Arc, time::Duration};

use lockcore::{
    ErrorKind, Fence, Lease, LockName, Released,
    backend::{AcquireRequest, BootClock, Call, LockBackend, Moment},
    migrate::{Bridge, Migration, Phase, Stage},
};

const MIGRATION: &str = "moving";
const TTL: Duration = Duration::from_secs(5);
const MEMBERSHIP: Duration = Duration::from_secs(20);
const BUDGET: Duration = Duration::from_secs(10);
/// Nothing here takes as long, on any machine.
const WATCHDOG: Duration = Duration::from_secs(30);

/// Opens a connection of its own to a store, as one more process does.
pub trait Connect: AsyncFn() -> Arc<dyn LockBackend> {}

impl<F: AsyncFn() -> Arc<dyn LockBackend>> Connect for F {}

/// Moves locks from one store to the other and back, and panics where a promise of the move is broken: neighbouring phases
/// exclude each other, a step waits for who is in its way and names them, and every fence of a name is above all before it,
/// also of a name that nobody locks while both stores are in use, and for plain clients at either end.
///
/// Both stores must take a TTL of 5 s and a membership of 20 s.
pub async fn crosses_and_returns(from: impl Connect, to: impl Connect) {
    let stores = (&from, &to);
    let operator = Migration::new(MIGRATION, from().await, to().await).expect("a plain name");
    let mut locks = Locks::default();
    let (busy, idle) = (name("crossing/busy"), name("crossing/idle"));

    let plain = from().await;
    locks.round(&*plain, &busy).await;
    locks.round(&*plain, &idle).await;
    plain.close().await;

    step(&operator, Stage::From).await;
    let one = process(stores, Phase::From, "one:1").await;
    locks.round(&one, &busy).await;
    locks.round(&one, &idle).await;
    step(&operator, Stage::FromBoth).await;
    let two = process(stores, Phase::Both, "two:2").await;
    locks.exclude_each_other(&one, &two, &busy).await;
    waits_for(&operator, Stage::Both, "one:1").await;
    one.close().await;
    step(&operator, Stage::Both).await;
    locks.round(&two, &busy).await;
    step(&operator, Stage::BothTo).await;
    let three = process(stores, Phase::To, "three:3").await;
    locks.exclude_each_other(&two, &three, &busy).await;
    waits_for(&operator, Stage::To, "two:2").await;
    two.close().await;
    step(&operator, Stage::To).await;
    locks.round(&three, &busy).await;
    // Nobody locked it while both stores were in use.
    locks.round(&three, &idle).await;
    let plain = to().await;
    for name in [&busy, &idle] {
        locks.round(&*plain, name).await;
    }
    plain.close().await;

    step(&operator, Stage::BothTo).await;
    let four = process(stores, Phase::Both, "four:4").await;
    locks.exclude_each_other(&three, &four, &busy).await;
    waits_for(&operator, Stage::Both, "three:3").await;
    three.close().await;
    step(&operator, Stage::Both).await;
    locks.round(&four, &busy).await;
    step(&operator, Stage::FromBoth).await;
    let five = process(stores, Phase::From, "five:5").await;
    locks.exclude_each_other(&four, &five, &busy).await;
    waits_for(&operator, Stage::From, "four:4").await;
    four.close().await;
    step(&operator, Stage::From).await;
    locks.round(&five, &busy).await;
    locks.round(&five, &idle).await;
    five.close().await;
    let plain = from().await;
    for name in [&busy, &idle] {
        locks.round(&*plain, name).await;
    }
    plain.close().await;
    let status = operator.status(&call("operator")).await.expect("it can be looked at");
    assert_eq!((status.stage, status.settled, status.members.len()), (Stage::From, true, 0), "{status:?}");
}

fn name(text: &str) -> LockName {
    LockName::parse(text).expect("a plain name")
}

fn call(label: &str) -> Call {
    Call::for_tests(Arc::new(BootClock), BUDGET).labelled(label)
}

/// Starts a process of the fleet in a phase, with connections of its own.
async fn process((from, to): (&impl Connect, &impl Connect), phase: Phase, label: &str) -> Bridge {
    let bridge = Bridge::new(MIGRATION, phase, from().await, to().await).expect("a plain name");
    let bridge = bridge.with_membership(MEMBERSHIP).expect("it is not in use yet");
    bridge.preflight(&call(label)).await.expect("its phase is open");
    bridge
}

async fn step(operator: &Migration, goal: Stage) {
    let status = operator.step(&call("operator"), goal).await.unwrap_or_else(|e| panic!("to {goal}: {e:?}"));
    assert_eq!((status.stage, status.settled), (goal, true), "{status:?}");
}

/// Steps, and expects to be told who is in the way; then undoes nothing, for the next step goes on from there.
async fn waits_for(operator: &Migration, goal: Stage, label: &str) {
    let refused = operator.step(&call("operator"), goal).await.expect_err("a step left somebody behind");
    assert_eq!(refused.kind(), ErrorKind::Held, "{refused:?}");
    assert!(refused.to_string().contains(label), "{refused}");
    let status = operator.status(&call("operator")).await.expect("it can be looked at");
    let named = status.in_the_way(goal).all(|(_, member)| member.label.as_deref() == Some(label));
    assert!(named && status.in_the_way(goal).next().is_some(), "{status:?}");
}

#[derive(Default)]
struct Locks {
    /// By name: the highest fence of any grant so far.
    highest: HashMap<LockName, Fence>,
}

impl Locks {
    fn granted(&mut self, lease: &Lease) {
        let before = self.highest.insert(lease.name.clone(), lease.fence);
        assert!(Some(lease.fence) > before, "after {before:?}: {lease:?}");
    }

    /// Takes a free lock, renews it, and gives it back.
    async fn round(&mut self, store: &dyn LockBackend, name: &LockName) {
        let lease =
            store.acquire(&call(""), &AcquireRequest::new(name.clone(), TTL)).await.expect("it is free");
        self.granted(&lease);
        let renewed = store.renew(&call(""), &lease, TTL).await.expect("it is held");
        assert!(
            renewed.fence == lease.fence && renewed.deadline >= lease.deadline,
            "{renewed:?} of {lease:?}"
        );
        let released = store.release(&call(""), &renewed).await.expect("it can be given back");
        assert_eq!(released, Released::Now, "{lease:?}");
    }

    /// Lets each hold a lock while the other tries, and waits.
    async fn exclude_each_other(&mut self, one: &Bridge, other: &Bridge, name: &LockName) {
        for (holder, other) in [(one, other), (other, one)] {
            let lease =
                holder.acquire(&call(""), &AcquireRequest::new(name.clone(), TTL)).await.expect("it is free");
            self.granted(&lease);
            let tries = other.acquire(&call(""), &AcquireRequest::new(name.clone(), TTL)).await;
            let refused = tries.expect_err("two phases granted one lock");
            assert_eq!(refused.kind(), ErrorKind::Held, "{refused:?}");

            let (waiting, calls) =
                (AcquireRequest::new(name.clone(), TTL).waiting_until(Moment::MAX), call(""));
            let waits = other.acquire(&calls, &waiting);
            let releases = async {
                // Whether it stands in the queue by then or comes after: it is next.
                tokio::task::yield_now().await;
                holder.release(&call(""), &lease).await
            };
            let both = tokio::time::timeout(WATCHDOG, async { tokio::join!(waits, releases) }).await;
            let (next, released) = both.expect("the waiter is next");
            assert_eq!(released.expect("it can be given back"), Released::Now, "{lease:?}");
            let next = next.expect("the waiter is next");
            self.granted(&next);
            let released = other.release(&call(""), &next).await.expect("it can be given back");
            assert_eq!(released, Released::Now, "{next:?}");
        }
    }
}
