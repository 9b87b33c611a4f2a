//! The frame of one call to a backend, the request it carries, and the arithmetic of deadlines, written once.

use std::{fmt, sync::Arc, time::Duration};

use crate::{
    clock::Clock,
    deadline::Moment,
    error::{Error, ErrorKind, Result},
    fence::Fence,
    lease::{Lease, LostReason},
    name::LockName,
    owner::Owner,
};

/// What stays the same for every call of one client.
#[derive(Clone, Debug)]
pub(crate) struct Frame {
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) namespace: Arc<str>,
    pub(crate) label: Arc<str>,
    pub(crate) drift: f64,
    pub(crate) exchange: Duration,
}

/// The frame of one call: clock, last moment, attempt, namespace. Made by lockcore, read by backends; can grow.
#[derive(Clone, Debug)]
pub struct Call {
    frame: Arc<Frame>,
    deadline: Moment,
    attempt: u32,
    lock_delay: Duration,
}

impl Call {
    pub(crate) fn new(frame: Arc<Frame>, deadline: Moment, attempt: u32, lock_delay: Duration) -> Self {
        Self { frame, deadline, attempt, lock_delay }
    }

    /// Returns now. Take it right before a request leaves and hand it to [`AcquireRequest::granted`] or
    /// [`renewed`](Self::renewed).
    pub fn now(&self) -> Moment {
        self.frame.clock.now()
    }

    /// Returns the moment by which the call ends; a request that reaches the server later must do nothing.
    pub fn deadline(&self) -> Moment {
        self.deadline
    }

    /// Returns what is left of the budget.
    pub fn remaining(&self) -> Duration {
        self.now().until(self.deadline)
    }

    /// Returns the bound on one exchange with the store: what an answer that is only late may take, never more than
    /// what is left of the call.
    pub fn exchange_timeout(&self) -> Duration {
        self.frame.exchange.min(self.remaining())
    }

    /// Counts from 1; a retry has the next number and the same owner.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Returns the clock, for a backend that sleeps.
    pub fn clock(&self) -> &dyn Clock {
        &*self.frame.clock
    }

    /// Returns the clock, for a backend that hands it to a task of its own.
    pub fn clock_arc(&self) -> Arc<dyn Clock> {
        self.frame.clock.clone()
    }

    /// Returns what keeps deployments apart that share a store. It is part of every key; may be empty. At most 64
    /// bytes of `A-Z a-z 0-9 . _ -`.
    pub fn namespace(&self) -> &str {
        &self.frame.namespace
    }

    /// Returns what the client calls itself for people, like `host:pid`; may be empty. A request's own label goes
    /// before it.
    pub fn label(&self) -> &str {
        &self.frame.label
    }

    /// Frames a request that belongs to no lease, with a budget of its own.
    pub(crate) fn beside(&self, budget: Duration) -> Self {
        let deadline = self.now().saturating_add(budget);
        Self { frame: self.frame.clone(), deadline, attempt: 1, lock_delay: Duration::ZERO }
    }

    /// Frames another request for the lease of this call, with a budget of its own. Its TTL is counted as before.
    pub(crate) fn again(&self, budget: Duration) -> Self {
        Self { lock_delay: self.lock_delay, ..self.beside(budget) }
    }

    /// Ends the call earlier.
    pub(crate) fn ending_by(&self, deadline: Moment) -> Self {
        Self { deadline: self.deadline.min(deadline), ..self.clone() }
    }

    /// Returns how long one exchange may take, whatever is left of this call.
    pub(crate) fn exchange(&self) -> Duration {
        self.frame.exchange
    }

    /// Returns how long the store keeps a lock closed after an unclean end. It is already part of the TTL that
    /// verbs are given; only a backend that ends leases by itself needs to know.
    pub fn lock_delay(&self) -> Duration {
        self.lock_delay
    }

    /// Moves a lease's deadline, counting from `sent`, never backwards; keeps owner and fence. `ttl` is what the
    /// server granted.
    pub fn renewed(&self, lease: &Lease, sent: Moment, ttl: Duration) -> Lease {
        let deadline = self.deadline_of(sent, ttl).max(lease.deadline);
        Lease { deadline, ..lease.clone() }
    }

    fn deadline_of(&self, sent: Moment, ttl: Duration) -> Moment {
        let usable = ttl.saturating_sub(self.lock_delay);
        sent.saturating_add(usable.mul_f64(1.0 - self.frame.drift))
    }

    /// Makes a call with a budget and the default drift margin: for a backend's own unit tests.
    pub fn for_tests(clock: Arc<dyn Clock>, budget: Duration) -> Self {
        let deadline = clock.now().saturating_add(budget);
        let frame = Frame { clock, namespace: "".into(), label: "".into(), drift: 0.01, exchange: budget };
        Self::new(Arc::new(frame), deadline, 1, Duration::ZERO)
    }

    /// Puts the call into a namespace: for a backend's own unit tests, and for tools that go around a client.
    ///
    /// # Errors
    /// `Invalid`: the namespace breaks its limits.
    pub fn in_namespace(&self, namespace: &str) -> Result<Self> {
        crate::name::check_namespace(namespace)?;
        let frame = Frame { namespace: namespace.into(), ..(*self.frame).clone() };
        Ok(Self { frame: Arc::new(frame), ..self.clone() })
    }

    /// Names the caller: for a backend's own unit tests, and for tools that go around a client.
    #[must_use]
    pub fn labelled(&self, label: impl Into<Arc<str>>) -> Self {
        let frame = Frame { label: label.into(), ..(*self.frame).clone() };
        Self { frame: Arc::new(frame), ..self.clone() }
    }

    /// Returns the namespace if it is one that nothing depends on: its name begins with `scratch-`. Only there may
    /// records be removed together with their fences.
    ///
    /// # Errors
    /// `Invalid`: it is not.
    pub fn scratch(&self) -> Result<&str> {
        let namespace = self.namespace();
        if namespace.starts_with("scratch-") {
            return Ok(namespace);
        }
        Err(Error::new(
            ErrorKind::Invalid,
            "records are removed with their fences only in a namespace that begins with scratch-",
        ))
    }

    /// Numbers the attempt: for the suite and for a backend's own unit tests.
    #[must_use]
    pub fn attempt_number(&self, attempt: u32) -> Self {
        Self { attempt, ..self.clone() }
    }
}

/// One acquisition: name, owner, TTL, wait, floor, label.
#[derive(Clone)]
pub struct AcquireRequest {
    name: LockName,
    owner: Owner,
    ttl: Duration,
    wait_until: Option<Moment>,
    floor: Option<Fence>,
    label: Option<Arc<str>>,
}

impl AcquireRequest {
    /// Starts a request with a new owner, no waiting, no floor.
    pub fn new(name: LockName, ttl: Duration) -> Self {
        Self { name, owner: Owner::random(), ttl, wait_until: None, floor: None, label: None }
    }

    /// Lets it stand in the queue until then.
    #[must_use]
    pub fn waiting_until(mut self, end: Moment) -> Self {
        self.wait_until = Some(end);
        self
    }

    /// Demands a fence above `floor`; sent only to backends with `fence_floor`.
    #[must_use]
    pub fn above(mut self, floor: Fence) -> Self {
        self.floor = Some(floor);
        self
    }

    /// Adds what operators read beside the owner's digest.
    #[must_use]
    pub fn labelled(mut self, label: impl Into<Arc<str>>) -> Self {
        self.label = Some(label.into());
        self
    }

    /// Demands a fence above a floor as well, if there is one.
    pub(crate) fn also_above(&self, floor: Option<Fence>) -> Self {
        Self { floor: self.floor.max(floor), ..self.clone() }
    }

    /// Starts the same acquisition over with a new owner: what follows an operation that is over.
    #[must_use]
    pub(crate) fn renamed(&self) -> Self {
        Self { owner: Owner::random(), ..self.clone() }
    }

    /// Returns the lock.
    pub fn name(&self) -> &LockName {
        &self.name
    }

    /// Returns the identity of this acquisition.
    pub fn owner(&self) -> &Owner {
        &self.owner
    }

    /// Returns the TTL to ask of the server, already checked against the capabilities.
    pub fn ttl(&self) -> Duration {
        self.ttl
    }

    /// Returns until when it may queue; `None`: try once. Waiting for ever is `Moment::MAX`.
    pub fn wait_until(&self) -> Option<Moment> {
        self.wait_until
    }

    /// Returns the floor.
    pub fn floor(&self) -> Option<Fence> {
        self.floor
    }

    /// Returns the label.
    pub fn label(&self) -> Option<&str> {
        self.label.as_deref()
    }

    /// Turns the server's answer into a lease, the only way to make one: the smaller of the TTLs asked and granted,
    /// counted from `sent`, less the drift margin.
    ///
    /// # Errors
    /// `FenceRegression`: the fence is not above the floor. `Lost(Expired)`: less than a tenth of the TTL (and less
    /// than 10 ms, or half of a TTL below 20 ms) is left, so nothing useful can be done under it.
    pub fn granted(&self, call: &Call, sent: Moment, ttl: Duration, fence: Fence) -> Result<Lease> {
        if let Some(floor) = self.floor.filter(|floor| fence <= *floor) {
            return Err(Error::new(
                ErrorKind::FenceRegression,
                format!(
                    "the store granted fence {fence}, which is not above the floor {floor} that was asked for"
                ),
            ));
        }
        let deadline = call.deadline_of(sent, ttl.min(self.ttl));
        self.usable(call, Lease::new(self.name.clone(), self.owner, deadline, fence))
    }

    /// Refuses a lease with nothing useful left.
    pub(crate) fn usable(&self, call: &Call, lease: Lease) -> Result<Lease> {
        let usable = self.ttl.saturating_sub(call.lock_delay);
        let least = (usable / 10).max(Duration::from_millis(10).min(usable / 2));
        if call.now().until(lease.deadline) < least {
            return Err(Error::lost(LostReason::Expired));
        }
        Ok(lease)
    }
}

impl fmt::Debug for AcquireRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AcquireRequest")
            .field("name", &self.name)
            .field("owner", &self.owner)
            .field("ttl", &self.ttl)
            .field("wait_until", &self.wait_until)
            .field("floor", &self.floor)
            .field("label", &self.label)
            .finish()
    }
}
