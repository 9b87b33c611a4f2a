//! A bridge of two in-memory stores in phase `both` under the suite, in virtual time.
//!
//! Faults that are counted hit the new side, whose grant is the whole one. What half a grant on the old side does is
//! explored in lockcore's own tests, every order of it.

use std::{process::ExitCode, sync::Arc, time::Duration};

use lockcore::{
    TokioClock,
    backend::*,
    memory::MemoryBackend,
    migrate::{Bridge, Migration, Phase, Stage},
};
use lockcore_conformance::{Service, Suite, Wire};

struct BridgeService {
    old: MemoryBackend,
    new: MemoryBackend,
    clock: TokioClock,
    wire: BridgeWire,
}

/// What is counted hits one side; what lasts hits the way to both.
struct BridgeWire {
    faulty: MemoryBackend,
    both: [MemoryBackend; 2],
}

impl BridgeService {
    fn start() -> Self {
        let (old, new) = (MemoryBackend::default(), MemoryBackend::default());
        let clock = TokioClock::start();
        let wire = BridgeWire { faulty: new.clone(), both: [old.clone(), new.clone()] };
        Self { old, new, clock, wire }
    }
}

/// One side, on which every namespace has got as far as phase `both`.
#[derive(Clone, Debug)]
struct Begun {
    stores: [MemoryBackend; 2],
    side: usize,
}

impl Begun {
    fn store(&self) -> &MemoryBackend {
        &self.stores[self.side]
    }
}

#[async_trait]
impl LockBackend for Begun {
    async fn join(&self, call: &Call, phase: &str, ttl: Duration) -> Result<Lease> {
        let [old, new] = self.stores.clone().map(|store| Arc::new(store) as Arc<dyn LockBackend>);
        let migration = Migration::new("moving", old, new)?;
        if migration.status(call).await?.stage == Stage::Plain {
            for stage in [Stage::From, Stage::FromBoth, Stage::Both] {
                migration.step(call, stage).await?;
            }
        }
        self.store().join(call, phase, ttl).await
    }

    fn capabilities(&self) -> Capabilities {
        self.store().capabilities()
    }
    async fn acquire(&self, call: &Call, request: &AcquireRequest) -> Result<Lease> {
        self.store().acquire(call, request).await
    }
    async fn renew(&self, call: &Call, lease: &Lease, ttl: Duration) -> Result<Lease> {
        self.store().renew(call, lease, ttl).await
    }
    async fn release(&self, call: &Call, lease: &Lease) -> Result<Released> {
        self.store().release(call, lease).await
    }
    async fn resolve(&self, call: &Call, request: &AcquireRequest) -> Result<Resolution> {
        self.store().resolve(call, request).await
    }
    async fn inspect(&self, call: &Call, name: &LockName) -> Result<LockState> {
        self.store().inspect(call, name).await
    }
    async fn abandon(&self, call: &Call, request: &AcquireRequest) -> Result<()> {
        self.store().abandon(call, request).await
    }
    async fn preflight(&self, call: &Call) -> Result<Preflight> {
        self.store().preflight(call).await
    }
    async fn renew_many(&self, call: &Call, leases: &[Lease], ttl: Duration) -> Vec<Result<Lease>> {
        self.store().renew_many(call, leases, ttl).await
    }
    async fn ended(&self, call: &Call, lease: &Lease) -> LostReason {
        self.store().ended(call, lease).await
    }
    async fn raise(&self, call: &Call, lease: &Lease, floor: Fence) -> Result<()> {
        self.store().raise(call, lease, floor).await
    }
    async fn raise_fence(&self, call: &Call, name: &LockName, floor: Fence) -> Result<Fence> {
        self.store().raise_fence(call, name, floor).await
    }
    async fn high_water(&self, call: &Call) -> Result<Option<Fence>> {
        self.store().high_water(call).await
    }
    async fn break_lock(&self, call: &Call, name: &LockName, expect: Option<Stamp>) -> Result<Broken> {
        self.store().break_lock(call, name, expect).await
    }
    async fn list(
        &self,
        call: &Call,
        prefix: Option<&LockName>,
        after: Option<&LockName>,
    ) -> Result<Vec<LockName>> {
        self.store().list(call, prefix, after).await
    }
    async fn phase_read(&self, call: &Call) -> Result<Option<PhaseRecord>> {
        self.store().phase_read(call).await
    }
    async fn leave(&self, call: &Call, member: &Lease) -> Result<Released> {
        self.store().leave(call, member).await
    }
}

#[async_trait]
impl Service for BridgeService {
    async fn connect(&self) -> Arc<dyn LockBackend> {
        let stores = [&self.old, &self.new].map(Clone::clone);
        let [old, new] = [0, 1].map(|side| Arc::new(Begun { stores: stores.clone(), side }));
        let bridge = Bridge::new("moving", Phase::Both, old, new).expect("a plain name");
        // Some cases hold for minutes of virtual time.
        let bridge = bridge.with_membership(Duration::from_secs(3600)).expect("it is not in use yet");
        // As a start from a configuration does it: whoever is there has joined.
        let call = Call::for_tests(self.clock(), Duration::from_secs(5));
        bridge.preflight(&call).await.expect("both stores are there");
        Arc::new(bridge)
    }
    async fn holder(&self, name: &LockName) -> Option<lockcore::OwnerDigest> {
        // Half a record is nobody's lock.
        let now = self.clock.now();
        let both = self.new.holder(name, now).filter(|owner| self.old.holder(name, now) == Some(*owner));
        both.map(|owner| owner.digest())
    }
    async fn steal(&self, name: &LockName) {
        self.old.steal(name);
        self.new.steal(name);
    }
    fn embedded(&self) -> bool {
        true
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
        u32::try_from(self.old.waiters(name) + self.new.waiters(name)).ok()
    }
    fn wire(&self) -> Option<&dyn Wire> {
        Some(&self.wire)
    }
}

impl Wire for BridgeWire {
    fn lose_request(&self, verb: Verb) {
        self.faulty.faults().lose_before(verb, 1);
    }
    fn lose_reply(&self, verb: Verb) {
        self.faulty.faults().lose_after(verb, 1);
    }
    fn hold_replies(&self, verb: Verb) {
        self.faulty.faults().hold_replies(verb);
    }
    fn deliver(&self) {
        self.faulty.faults().deliver();
    }
    fn delay_replies(&self, by: Duration) {
        self.faulty.faults().delay_replies(by);
    }
    fn cut(&self, on: bool) {
        self.both.iter().for_each(|store| store.faults().cut(on));
    }
    fn refuse(&self, on: bool) {
        self.both.iter().for_each(|store| store.faults().unavailable(on));
    }
    fn heal(&self) {
        self.both.iter().for_each(|store| store.faults().heal());
    }
}

fn main() -> ExitCode {
    Suite::new("memory-bridge", async || BridgeService::start()).seeds(100).main()
}
