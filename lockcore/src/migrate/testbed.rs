//! Two stores, a clock that only the test moves, and no runtime: nothing happens that the test did not ask for.

use std::{
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll, Waker},
    time::Duration,
};

use super::{Bridge, Migration, Phase, Stage, membership::Flaw};
use crate::{backend::*, call::Frame, memory::MemoryBackend, sync::LockExt};

pub(super) const TTL: Duration = Duration::from_secs(8);
const MEMBERSHIP: Duration = Duration::from_secs(24);

/// Moves when told, and, while a test awaits, to the next moment that somebody sleeps for.
#[derive(Clone, Debug, Default)]
pub(super) struct HandClock(Arc<Mutex<(u64, u64)>>);

impl HandClock {
    pub(super) fn pass(&self, by: Duration) {
        self.0.grab().0 += by.as_nanos() as u64;
    }

    /// Goes on to the next alarm; says whether there was one.
    pub(super) fn ring(&self) -> bool {
        let mut clock = self.0.grab();
        let next = std::mem::replace(&mut clock.1, u64::MAX);
        if next == u64::MAX {
            return false;
        }
        clock.0 = clock.0.max(next);
        true
    }

    pub(super) fn forget_alarms(&self) {
        self.0.grab().1 = u64::MAX;
    }
}

#[async_trait]
impl Clock for HandClock {
    fn now(&self) -> Moment {
        Moment::from_nanos(self.0.grab().0)
    }
    async fn sleep_until(&self, moment: Moment) {
        std::future::poll_fn(|_| {
            let mut clock = self.0.grab();
            if clock.0 >= moment.as_nanos() {
                return Poll::Ready(());
            }
            clock.1 = clock.1.min(moment.as_nanos());
            Poll::Pending
        })
        .await;
    }
}

pub(super) fn poll_once<T>(future: &mut Pin<Box<impl Future<Output = T> + ?Sized>>) -> Option<T> {
    match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

pub(super) fn block_on<T>(clock: &HandClock, future: impl Future<Output = T>) -> T {
    let mut future = Box::pin(future);
    loop {
        clock.forget_alarms();
        if let Some(value) = poll_once(&mut future) {
            return value;
        }
        assert!(clock.ring(), "it waits for nothing that will ever come");
    }
}

pub(super) fn name(text: &str) -> LockName {
    LockName::parse(text).unwrap()
}

pub(super) fn again(text: &str) -> AcquireRequest {
    AcquireRequest::new(name(text), TTL)
}

pub(super) struct Stores {
    pub(super) old: MemoryBackend,
    pub(super) new: MemoryBackend,
    pub(super) clock: HandClock,
}

impl Stores {
    pub(super) fn new() -> Self {
        Self { old: MemoryBackend::default(), new: MemoryBackend::default(), clock: HandClock::default() }
    }

    pub(super) fn with(test: impl AsyncFnOnce(Self)) {
        let stores = Self::new();
        let clock = stores.clock.clone();
        block_on(&clock, test(stores));
    }

    pub(super) fn membership(&self) -> Duration {
        MEMBERSHIP
    }

    pub(super) fn pass(&self, by: Duration) {
        self.clock.pass(by);
    }

    pub(super) fn call(&self) -> Call {
        Call::for_tests(Arc::new(self.clock.clone()), Duration::from_secs(2)).labelled("web-1:4711")
    }

    /// A call whose TTLs have a lock-delay in them.
    pub(super) fn delayed(&self, lock_delay: Duration) -> Call {
        let exchange = Duration::from_secs(2);
        let deadline = self.call().now().saturating_add(exchange);
        let clock = Arc::new(self.clock.clone());
        let frame = Frame { clock, namespace: "".into(), label: "".into(), drift: 0.01, exchange };
        Call::new(Arc::new(frame), deadline, 1, lock_delay)
    }

    pub(super) fn arc_old(&self) -> Arc<dyn LockBackend> {
        Arc::new(self.old.clone())
    }

    pub(super) fn arc_new(&self) -> Arc<dyn LockBackend> {
        Arc::new(self.new.clone())
    }

    pub(super) fn bridge(&self, phase: Phase) -> Bridge {
        self.flawed(phase, Flaw::None)
    }

    pub(super) fn flawed(&self, phase: Phase, flaw: Flaw) -> Bridge {
        let bridge = Bridge::new("moving", phase, self.arc_old(), self.arc_new()).unwrap();
        bridge.flawed(flaw).with_membership(MEMBERSHIP).unwrap()
    }

    pub(super) fn migration(&self) -> Migration {
        Migration::new("moving", self.arc_old(), self.arc_new()).unwrap()
    }

    pub(super) async fn steps(&self, stages: &[Stage]) {
        for stage in stages {
            let status = self.migration().step(&self.call(), *stage).await.unwrap();
            assert_eq!((status.stage, status.settled), (*stage, true));
        }
    }
}
