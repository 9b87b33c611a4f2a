//! Lost, held and late answers for a store whose wire cannot be reached: they happen at the backend's door.
//!
//! What the library, `resolve`, `abandon` and a repeated request make of them is tested on the real store all the same.
//! What the backend makes of its own connection is not; cases about that need a wire of the service's own.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use lockcore::backend::*;
use tokio::sync::Notify;

use super::Wire;

/// The switches, shared by all clients of a case.
#[derive(Debug, Default)]
pub(crate) struct Door {
    switches: Mutex<Switches>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Switches {
    lost_requests: Vec<Verb>,
    lost_replies: Vec<Verb>,
    held: Vec<Verb>,
    delay: Duration,
    cut: bool,
    refuse: bool,
}

impl Door {
    fn switches(&self) -> MutexGuard<'_, Switches> {
        self.switches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Switches)) {
        change(&mut self.switches());
        self.changed.notify_waiters();
    }

    async fn until(&self, open: impl Fn(&Switches) -> bool) {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            // Enabled before the look, so that a change after it is heard.
            changed.as_mut().enable();
            if open(&self.switches()) {
                return;
            }
            changed.await;
        }
    }

    /// Lets a request through and its reply back, or not.
    async fn pass<T>(&self, call: &Call, verb: Verb, exchange: impl Future<Output = Result<T>>) -> Result<T> {
        let (lost_request, lost_reply) = {
            let mut s = self.switches();
            (use_up(&mut s.lost_requests, verb), use_up(&mut s.lost_replies, verb))
        };
        if self.switches().cut {
            // It went into the cut: the backend counts from when it sends, so a request cannot wait here and go on.
            self.until(|s| !s.cut).await;
            return Err(Error::new(ErrorKind::Unknown, "the line was cut at the door"));
        }
        if self.switches().refuse {
            return Err(Error::new(ErrorKind::Unavailable, "refused at the door"));
        }
        if lost_request {
            return Err(Error::new(ErrorKind::Unknown, "the request was lost at the door"));
        }
        let answer = exchange.await;
        self.until(|s| !s.cut && !s.held.contains(&verb)).await;
        let delay = self.switches().delay;
        if !delay.is_zero() {
            call.clock().sleep_until(call.now().saturating_add(delay)).await;
        }
        if lost_reply {
            return Err(Error::new(ErrorKind::Unknown, "the reply was lost at the door"));
        }
        answer
    }
}

fn use_up(armed: &mut Vec<Verb>, verb: Verb) -> bool {
    armed.iter().position(|v| *v == verb).map(|at| armed.swap_remove(at)).is_some()
}

impl Wire for Door {
    fn lose_request(&self, verb: Verb) {
        self.change(|s| s.lost_requests.push(verb));
    }
    fn lose_reply(&self, verb: Verb) {
        self.change(|s| s.lost_replies.push(verb));
    }
    fn hold_replies(&self, verb: Verb) {
        self.change(|s| s.held.push(verb));
    }
    fn deliver(&self) {
        self.change(|s| s.held.clear());
    }
    fn delay_replies(&self, by: Duration) {
        self.change(|s| s.delay = by);
    }
    fn cut(&self, on: bool) {
        self.change(|s| s.cut = on);
    }
    fn refuse(&self, on: bool) {
        self.change(|s| s.refuse = on);
    }
    fn heal(&self) {
        self.change(|s| *s = Switches::default());
    }
}

/// A backend behind the door.
#[derive(Debug)]
pub(crate) struct Behind {
    pub(crate) door: Arc<Door>,
    pub(crate) backend: Arc<dyn LockBackend>,
}

// A verb left out here would fall back to its body, and the real one would go untested.
#[deny(clippy::missing_trait_methods)]
#[async_trait]
impl LockBackend for Behind {
    fn capabilities(&self) -> Capabilities {
        self.backend.capabilities()
    }

    async fn acquire(&self, call: &Call, request: &AcquireRequest) -> Result<Lease> {
        let lease = self.door.pass(call, Verb::Acquire, self.backend.acquire(call, request)).await?;
        // The backend judged its answer before the door held it up; a late one is no more use than from a slow wire.
        if call.now() >= lease.deadline {
            return Err(Error::lost(LostReason::Expired));
        }
        Ok(lease)
    }

    async fn renew(&self, call: &Call, lease: &Lease, ttl: Duration) -> Result<Lease> {
        self.door.pass(call, Verb::Renew, self.backend.renew(call, lease, ttl)).await
    }

    async fn release(&self, call: &Call, lease: &Lease) -> Result<Released> {
        self.door.pass(call, Verb::Release, self.backend.release(call, lease)).await
    }

    async fn resolve(&self, call: &Call, request: &AcquireRequest) -> Result<Resolution> {
        self.door.pass(call, Verb::Resolve, self.backend.resolve(call, request)).await
    }

    async fn inspect(&self, call: &Call, name: &LockName) -> Result<LockState> {
        self.door.pass(call, Verb::Inspect, self.backend.inspect(call, name)).await
    }

    async fn abandon(&self, call: &Call, request: &AcquireRequest) -> Result<()> {
        self.door.pass(call, Verb::Resolve, self.backend.abandon(call, request)).await
    }

    async fn preflight(&self, call: &Call) -> Result<Preflight> {
        self.door.pass(call, Verb::Preflight, self.backend.preflight(call)).await
    }

    async fn renew_many(&self, call: &Call, leases: &[Lease], ttl: Duration) -> Vec<Result<Lease>> {
        let batch = async { Ok(self.backend.renew_many(call, leases, ttl).await) };
        match self.door.pass(call, Verb::Renew, batch).await {
            Ok(answers) => answers,
            Err(error) => {
                leases.iter().map(|_| Err(Error::new(error.kind(), error.message().to_owned()))).collect()
            }
        }
    }

    async fn ended(&self, call: &Call, lease: &Lease) -> LostReason {
        let reason = self.backend.ended(call, lease).await;
        self.door.until(|s| !s.cut).await;
        reason
    }

    async fn raise(&self, call: &Call, lease: &Lease, floor: Fence) -> Result<()> {
        self.door.pass(call, Verb::Raise, self.backend.raise(call, lease, floor)).await
    }

    async fn raise_fence(&self, call: &Call, name: &LockName, floor: Fence) -> Result<Fence> {
        self.door.pass(call, Verb::Raise, self.backend.raise_fence(call, name, floor)).await
    }

    async fn high_water(&self, call: &Call) -> Result<Option<Fence>> {
        self.door.pass(call, Verb::Migrate, self.backend.high_water(call)).await
    }

    async fn break_lock(&self, call: &Call, name: &LockName, expect: Option<Stamp>) -> Result<Broken> {
        self.door.pass(call, Verb::Break, self.backend.break_lock(call, name, expect)).await
    }

    async fn list(
        &self,
        call: &Call,
        prefix: Option<&LockName>,
        after: Option<&LockName>,
    ) -> Result<Vec<LockName>> {
        self.door.pass(call, Verb::List, self.backend.list(call, prefix, after)).await
    }

    async fn phase_read(&self, call: &Call) -> Result<Option<PhaseRecord>> {
        self.door.pass(call, Verb::Migrate, self.backend.phase_read(call)).await
    }

    async fn phase_cas(&self, call: &Call, expect: Option<&PhaseRecord>, new: &PhaseRecord) -> Result<bool> {
        self.door.pass(call, Verb::Migrate, self.backend.phase_cas(call, expect, new)).await
    }

    async fn join(&self, call: &Call, phase: &str, ttl: Duration) -> Result<Lease> {
        self.door.pass(call, Verb::Migrate, self.backend.join(call, phase, ttl)).await
    }

    async fn leave(&self, call: &Call, member: &Lease) -> Result<Released> {
        self.door.pass(call, Verb::Migrate, self.backend.leave(call, member)).await
    }

    async fn second_connection(&self, call: &Call) -> Result<Option<Arc<dyn LockBackend>>> {
        let second = self.door.pass(call, Verb::Connect, self.backend.second_connection(call)).await?;
        let door = self.door.clone();
        Ok(second.map(|backend| Arc::new(Self { door, backend }) as Arc<dyn LockBackend>))
    }

    async fn close(&self) {
        self.backend.close().await;
    }

    fn unsupported(&self, verb: Verb) -> Error {
        self.backend.unsupported(verb)
    }
}
