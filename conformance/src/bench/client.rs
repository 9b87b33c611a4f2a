//! A client that speaks the backend's own verbs: what it asks and hears goes into the history.

use std::{sync::Arc, time::Duration};

use lockcore::{
    Error, ErrorKind, LockName, LostReason, Stamp,
    backend::{
        AcquireRequest, Broken, Call, Lease, LockBackend, LockState, Moment, Owner, Released, Resolution,
    },
};

use super::Bench;
use crate::history::{Answer, Call as Asked, ClientLog, Ended, Pending, Why};

/// Speaks the verbs of one connection and records them. It renews nothing by itself: left alone, its leases run out.
#[derive(Debug)]
pub struct Client {
    bench: Bench,
    backend: Arc<dyn LockBackend>,
    log: ClientLog,
}

type Result<T> = lockcore::Result<T>;

impl Client {
    pub(crate) fn new(bench: &Bench, name: &str, backend: Arc<dyn LockBackend>) -> Self {
        Self { bench: bench.clone(), backend, log: bench.stage.recorder.client(name) }
    }

    /// Returns the backend.
    pub fn backend(&self) -> &Arc<dyn LockBackend> {
        &self.backend
    }

    /// Frames a call with a budget.
    pub fn call(&self, budget: Duration) -> Call {
        Call::for_tests(self.bench.clock(), budget)
            .in_namespace(&self.bench.stage.namespace)
            .expect("the service's namespace is well formed")
    }

    /// Starts a request with the bench's TTL.
    pub fn request(&self, name: &LockName) -> AcquireRequest {
        let request = AcquireRequest::new(name.clone(), self.bench.ttl());
        match self.bench.capabilities().labels {
            true => request.labelled(self.log.name().to_owned()),
            false => request,
        }
    }

    /// Takes the lock if it is free now.
    ///
    /// # Errors
    /// As the backend says.
    pub async fn try_acquire(&self, name: &LockName) -> Result<Lease> {
        self.ask(&self.request(name), self.budget()).await
    }

    /// Takes the lock, waiting for so long.
    ///
    /// # Errors
    /// As the backend says.
    pub async fn acquire(&self, name: &LockName, wait: Duration) -> Result<Lease> {
        let end = self.bench.now().saturating_add(wait);
        self.ask(&self.request(name).waiting_until(end), wait).await
    }

    /// Sends one request as it is, as a new operation of the history.
    ///
    /// # Errors
    /// As the backend says.
    pub async fn ask(&self, request: &AcquireRequest, budget: Duration) -> Result<Lease> {
        let pending = self.invoke(request);
        self.answer(pending, self.call(budget), request).await
    }

    /// Begins an acquire of the history that the case carries on itself.
    pub fn invoke(&self, request: &AcquireRequest) -> Pending {
        let (owner, ttl) = (request.owner().digest(), request.ttl());
        let wait = request.wait_until().map(|end| self.bench.now().until(end));
        self.log.invoke_as(request.name().as_str(), owner.to_string(), 1, Asked::Acquire { owner, ttl, wait })
    }

    /// Sends a request and records the answer to an acquire that has begun.
    ///
    /// # Errors
    /// As the backend says.
    pub async fn answer(&self, pending: Pending, call: Call, request: &AcquireRequest) -> Result<Lease> {
        pending.sent();
        let answer = self.backend.acquire(&call, request).await;
        match &answer {
            Ok(lease) => pending.ok(Answer::granted(lease.stamp(), lease.deadline, None)),
            // Granted, but too late to be used: the record may still stand.
            Err(error) if error.kind() == ErrorKind::Lost => pending.unknown("granted too late"),
            Err(error) => pending.error(error),
        }
        answer
    }

    /// Renews a lease for the bench's TTL.
    ///
    /// # Errors
    /// As the backend says.
    pub async fn renew(&self, lease: &Lease) -> Result<Lease> {
        self.renew_for(lease, self.bench.ttl()).await
    }

    /// Renews a lease for a TTL.
    ///
    /// # Errors
    /// As the backend says.
    pub async fn renew_for(&self, lease: &Lease, ttl: Duration) -> Result<Lease> {
        self.renews(lease, ttl, self.budget()).await
    }

    /// Renews a lease for the bench's TTL, within a budget.
    ///
    /// # Errors
    /// As the backend says.
    pub async fn renew_within(&self, lease: &Lease, budget: Duration) -> Result<Lease> {
        self.renews(lease, self.bench.ttl(), budget).await
    }

    async fn renews(&self, lease: &Lease, ttl: Duration, budget: Duration) -> Result<Lease> {
        let asked = Asked::Renew { fence: lease.fence, owner: Some(lease.owner.digest()), ttl };
        let pending = self.log.invoke(lease.name.as_str(), asked);
        pending.sent();
        let answer = self.backend.renew(&self.call(budget), lease, ttl).await;
        match &answer {
            Ok(renewed) => pending.ok(Answer::renewed(renewed.deadline, None)),
            Err(error) if error.kind() == ErrorKind::Lost => pending.fail(Why::Lost),
            Err(error) => pending.error(error),
        }
        answer
    }

    /// Renews a lease that the history must not know: a forgery.
    ///
    /// # Errors
    /// As the backend says.
    pub async fn renew_unrecorded(&self, lease: &Lease, ttl: Duration) -> Result<Lease> {
        self.backend.renew(&self.call(self.budget()), lease, ttl).await
    }

    /// Releases a lease that the history must not know: a forgery.
    ///
    /// # Errors
    /// As the backend says.
    pub async fn release_unrecorded(&self, lease: &Lease) -> Result<Released> {
        self.backend.release(&self.call(self.budget()), lease).await
    }

    /// Releases a lease.
    ///
    /// # Errors
    /// As the backend says.
    pub async fn release(&self, lease: &Lease) -> Result<Released> {
        self.release_within(lease, self.budget()).await
    }

    /// Releases a lease, within a budget.
    ///
    /// # Errors
    /// As the backend says.
    pub async fn release_within(&self, lease: &Lease, budget: Duration) -> Result<Released> {
        let asked = Asked::Release { fence: lease.fence, owner: Some(lease.owner.digest()) };
        let pending = self.log.invoke(lease.name.as_str(), asked);
        pending.sent();
        let answer = self.backend.release(&self.call(budget), lease).await;
        match &answer {
            Ok(Released::AlreadyOver) => pending.fail(Why::NotHeld),
            Ok(released) => pending.ok(Answer::released(*released)),
            Err(error) => pending.error(error),
        }
        answer
    }

    /// Settles an acquire whose outcome is unknown.
    ///
    /// # Errors
    /// As the backend says.
    pub async fn resolve(&self, request: &AcquireRequest) -> Result<Resolution> {
        let id = request.owner().digest().to_string();
        let pending = self.log.invoke_as(request.name().as_str(), id, 2, Asked::Resolve);
        pending.sent();
        let answer = self.backend.resolve(&self.call(self.budget()), request).await;
        match &answer {
            Ok(Resolution::Adopted(lease)) => {
                pending.ok(Answer::granted(lease.stamp(), lease.deadline, None))
            }
            Ok(_) => pending.fail(Why::NotHeld),
            Err(error) => pending.unknown(error.message()),
        }
        answer
    }

    /// Makes sure that nothing of an acquire is left.
    ///
    /// # Errors
    /// As the backend says.
    pub async fn abandon(&self, request: &AcquireRequest) -> Result<()> {
        self.backend.abandon(&self.call(self.budget()), request).await
    }

    /// Looks from outside.
    ///
    /// # Errors
    /// As the backend says.
    pub async fn inspect(&self, name: &LockName) -> Result<LockState> {
        self.backend.inspect(&self.call(self.budget()), name).await
    }

    /// Takes the lock from its holder, as an operator; `expect` guards a newer holder.
    ///
    /// # Errors
    /// As the backend says.
    pub async fn break_lock(&self, name: &LockName, expect: Option<Stamp>) -> Result<Broken> {
        self.backend.break_lock(&self.call(self.budget()), name, expect).await
    }

    /// Does nothing until the lease is over by its own deadline and by the server's clock, and tells the history: what
    /// a holder that was paused sees when it wakes up.
    pub async fn freeze_past(&self, lease: &Lease) {
        let slack = self.bench.ttl() / 20;
        let over = lease.deadline.saturating_add(slack);
        self.bench.clock().sleep_until(over).await;
        self.log.lost(lease.name.as_str(), lease.stamp(), Ended::from(LostReason::Expired));
    }

    /// Makes a lease with another owner and the same fence: a forgery.
    pub fn forged(&self, lease: &Lease) -> Lease {
        let mut forged = lease.clone();
        forged.owner = Owner::random();
        forged
    }

    /// Says whether a lease is still held, without asking anybody.
    pub fn believes(&self, lease: &Lease) -> bool {
        self.bench.now() < lease.deadline
    }

    /// Returns the budget of one exchange.
    pub fn budget(&self) -> Duration {
        super::WATCHDOG / 4
    }

    /// Returns the history's log of this client.
    pub fn log(&self) -> &ClientLog {
        &self.log
    }

    /// Returns now.
    pub fn now(&self) -> Moment {
        self.bench.now()
    }
}

/// Asserts that a call was refused with this kind.
#[track_caller]
pub(crate) fn assert_refused<T: std::fmt::Debug>(answer: Result<T>, kind: ErrorKind, what: &str) -> Error {
    match answer {
        Ok(value) => panic!("{what}: {value:?}"),
        Err(error) => {
            assert_eq!(error.kind(), kind, "{what}, refused otherwise: {error}");
            error
        }
    }
}
