//! The in-memory backend in virtual time: the reference, which passes everything.

use std::{sync::Arc, time::Duration};

use lockcore::{
    LockName, TokioClock, Verb,
    backend::{Clock, LockBackend, OwnerDigest, async_trait},
    memory::MemoryBackend,
};

use crate::bench::{Service, Wire};

/// A [`MemoryBackend`] in virtual time, with all its faults.
#[derive(Debug)]
pub struct MemoryService {
    store: MemoryBackend,
    clock: TokioClock,
    wire: MemoryWire,
}

#[derive(Debug)]
struct MemoryWire(MemoryBackend);

impl MemoryService {
    /// Starts an empty store; needs a runtime with time.
    pub fn start() -> Self {
        let store = MemoryBackend::default();
        Self { clock: TokioClock::start(), wire: MemoryWire(store.clone()), store }
    }

    pub(crate) fn store(&self) -> &MemoryBackend {
        &self.store
    }
}

#[async_trait]
impl Service for MemoryService {
    async fn connect(&self) -> Arc<dyn LockBackend> {
        Arc::new(self.store.clone())
    }
    async fn holder(&self, name: &LockName) -> Option<OwnerDigest> {
        self.store.holder(name, self.clock.now()).map(|owner| owner.digest())
    }
    fn embedded(&self) -> bool {
        true
    }
    async fn steal(&self, name: &LockName) {
        self.store.steal(name);
    }
    fn ttl(&self) -> Duration {
        Duration::from_secs(10)
    }
    fn clock(&self) -> Arc<dyn Clock> {
        Arc::new(self.clock)
    }
    fn virtual_time(&self) -> bool {
        true
    }
    async fn queued(&self, name: &LockName) -> Option<u32> {
        u32::try_from(self.store.waiters(name)).ok()
    }
    fn wire(&self) -> Option<&dyn Wire> {
        Some(&self.wire)
    }
}

impl Wire for MemoryWire {
    fn lose_request(&self, verb: Verb) {
        self.0.faults().lose_before(verb, 1);
    }
    fn lose_reply(&self, verb: Verb) {
        self.0.faults().lose_after(verb, 1);
    }
    fn hold_replies(&self, verb: Verb) {
        self.0.faults().hold_replies(verb);
    }
    fn deliver(&self) {
        self.0.faults().deliver();
    }
    fn delay_replies(&self, by: Duration) {
        self.0.faults().delay_replies(by);
    }
    fn cut(&self, on: bool) {
        self.0.faults().cut(on);
    }
    fn refuse(&self, on: bool) {
        self.0.faults().unavailable(on);
    }
    fn heal(&self) {
        self.0.faults().heal();
    }
}
