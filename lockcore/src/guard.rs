//! What a holder has in hand: a guard that ends the lease when it is dropped, and watchers that only look.

use std::{
    fmt,
    pin::pin,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{runtime::Handle, sync::Notify};
use tokio_util::sync::CancellationToken;

use crate::{
    backend::{Call, Moment, Owner},
    client::{InUse, Inner},
    error::{Error, ErrorKind, Result, Verb},
    events::EventKind,
    fence::{Fence, Stamp},
    lease::{Holder, Lease, LostReason, Released},
    machine::{
        Backoff,
        renewal::{Event, Renewal, Todo},
    },
    name::LockName,
    observe::{self, About},
    queue::{Seat, Seen, Stage},
    renewal::Engine,
    sync::LockExt,
};

/// What the guard knows. `Held` and `Uncertain` alternate; `Lost` is final.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum State {
    /// The last renewal was confirmed.
    Held,
    /// A renewal is unconfirmed; the lease stands until its deadline.
    Uncertain,
    /// Over.
    Lost(LostReason),
}

/// Holds a lock: renews it, tells when it is lost, releases it when dropped. Owned, `Send + Sync + 'static`, not
/// `Clone`.
///
/// Dropping it releases in the background; [`LockClient::flush`](crate::LockClient::flush) and
/// [`close`](crate::LockClient::close) wait for that. Dropped while panicking counts as an unclean end: a lock-delay
/// applies.
#[must_use = "dropping the guard releases the lock; bind it to a name (`let _ = …` drops at once)"]
#[clippy::has_significant_drop]
pub struct Guard {
    watch: GuardRef,
}

/// Watches a guard from anywhere: `Clone + 'static`; cannot end the lease, does not keep it alive.
#[derive(Clone)]
pub struct GuardRef {
    pub(crate) held: Arc<Held>,
}

impl Guard {
    pub(crate) fn new(held: Arc<Held>) -> Self {
        Self { watch: GuardRef { held } }
    }

    pub(crate) fn held(&self) -> &Arc<Held> {
        &self.watch.held
    }

    /// Returns a watcher for other tasks and threads.
    pub fn watch(&self) -> GuardRef {
        self.watch.held.use_it();
        self.watch.clone()
    }

    /// Renews now, beside the automatic renewals.
    ///
    /// # Errors
    /// `Lost`: the lease is over. `Unknown` or `Unavailable`: not confirmed; the old deadline stands.
    ///
    /// # Cancel safety
    /// A renewal that left may be done; the deadline moves only by an answer.
    pub async fn renew(&self) -> Result<()> {
        self.watch.held.use_it();
        self.watch.held.renew_now().await
    }

    /// Ends the lease and waits for the store's word.
    ///
    /// It waits first for work that declared itself [`busy`](GuardRef::busy), until the deadline at most.
    ///
    /// # Errors
    /// `Unknown` or `Unavailable`: not heard within the call timeout; the release goes on in the background until
    /// the deadline.
    ///
    /// # Cancel safety
    /// A dropped or failed release goes on in the background until the deadline.
    pub async fn release(self) -> Result<Released> {
        self.watch.held.use_it();
        // From here on `Ending` is what gives the lease back; the guard's own drop finds it ended.
        self.watch.held.release().await
    }

    // The same as on a watcher, so that a guard is as convenient.

    /// Returns the lock.
    pub fn name(&self) -> &LockName {
        self.watch.name()
    }
    /// Returns the number that orders this holder: a term, an attempt, something to log.
    pub fn fence(&self) -> Fence {
        self.watch.fence()
    }
    /// Returns what to send with a write, if the lease is still held: check and stamp in one.
    ///
    /// # Errors
    /// `Lost`.
    pub fn stamp(&self) -> Result<Stamp> {
        self.watch.stamp()
    }
    /// Refuses once the lease is over. No network.
    ///
    /// # Errors
    /// `Lost`.
    pub fn ensure_held(&self) -> Result<()> {
        self.watch.ensure_held()
    }
    /// Refuses unless at least `need` is left: ask before a step that takes this long.
    ///
    /// # Errors
    /// `Lost`; `Unavailable` when it is held, but not for long enough.
    pub fn ensure_held_for(&self, need: Duration) -> Result<()> {
        self.watch.ensure_held_for(need)
    }
    /// Returns the time left; zero once lost. No network.
    pub fn remaining(&self) -> Duration {
        self.watch.remaining()
    }
    /// Returns what is known right now. No network.
    pub fn state(&self) -> State {
        self.watch.state()
    }
    /// Returns at the next change of state.
    pub async fn changed(&self) -> State {
        self.watch.changed().await
    }
    /// Returns once the lease is over, and why. Cancel safe; may be awaited by many.
    pub async fn lost(&self) -> LostReason {
        self.watch.lost().await
    }
    /// Returns a token that is cancelled when the lease is over: a child, so that cancelling it stops only the
    /// caller's own work.
    pub fn cancellation(&self) -> CancellationToken {
        self.watch.cancellation()
    }
    /// Returns the grant as data, with the present deadline.
    pub fn lease(&self) -> Lease {
        self.watch.lease()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let held = &self.watch.held;
        if !held.used.load(Ordering::Relaxed)
            && held.granted.until(held.client.now()) < Duration::from_millis(1)
        {
            observe::dropped_unused(held.about());
        }
        held.end(std::thread::panicking());
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.watch.fmt_as("Guard", f)
    }
}

impl fmt::Debug for GuardRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.fmt_as("GuardRef", f)
    }
}

impl GuardRef {
    fn fmt_as(&self, what: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(what)
            .field("name", &self.held.name)
            .field("owner", &self.held.owner.digest())
            .field("fence", &self.held.fence.get())
            .field("state", &self.state())
            .finish_non_exhaustive()
    }

    /// Returns the lock.
    pub fn name(&self) -> &LockName {
        &self.held.name
    }

    /// Returns the number that orders this holder: a term, an attempt, something to log.
    pub fn fence(&self) -> Fence {
        self.held.read_fence();
        self.held.fence
    }

    /// Returns what to send with a write, if the lease is still held: check and stamp in one.
    ///
    /// # Errors
    /// `Lost`: the lease is over; the resource would refuse a newer holder's predecessor anyway.
    pub fn stamp(&self) -> Result<Stamp> {
        self.held.read_fence();
        self.ensure_held()?;
        Ok(Stamp::new(self.held.fence, self.held.owner.digest()))
    }

    /// Refuses once the lease is over. No network.
    ///
    /// # Errors
    /// `Lost`, with the reason.
    pub fn ensure_held(&self) -> Result<()> {
        match self.state() {
            State::Lost(reason) => Err(self.held.error_lost(reason)),
            State::Held | State::Uncertain => Ok(()),
        }
    }

    /// Refuses unless at least `need` is left: ask before a step that takes this long.
    ///
    /// # Errors
    /// `Lost`; `Unavailable` when it is held, but not for long enough right now: a renewal may help.
    pub fn ensure_held_for(&self, need: Duration) -> Result<()> {
        self.ensure_held()?;
        let left = self.remaining();
        if left >= need {
            return Ok(());
        }
        Err(self.held.client.error(
            ErrorKind::Unavailable,
            format!("the lease lasts {left:?} more, {need:?} are needed"),
            Verb::Renew,
            Some(&self.held.name),
        ))
    }

    /// Returns the time left before it counts as lost; zero once lost. No network.
    pub fn remaining(&self) -> Duration {
        self.held.use_it();
        let now = self.held.client.now();
        match self.held.state(now) {
            State::Lost(_) => Duration::ZERO,
            State::Held | State::Uncertain => now.until(self.held.renewal.grab().ends()),
        }
    }

    /// Returns what is known right now. No network.
    pub fn state(&self) -> State {
        self.held.use_it();
        self.held.state(self.held.client.now())
    }

    /// Returns at the next change of state.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing but the wait; [`state`](Self::state) has the present.
    pub async fn changed(&self) -> State {
        let before = self.state();
        loop {
            let mut changed = pin!(self.held.changed.notified());
            changed.as_mut().enable();
            let now = self.state();
            if now != before {
                return now;
            }
            self.held.until_change_or_end(changed).await;
        }
    }

    /// Returns once the lease is over, and why. May be awaited by many.
    ///
    /// It needs no engine: a guard whose runtime has ended is lost at its deadline by the clock alone.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub async fn lost(&self) -> LostReason {
        loop {
            let mut changed = pin!(self.held.changed.notified());
            changed.as_mut().enable();
            if let State::Lost(reason) = self.state() {
                return reason;
            }
            self.held.until_change_or_end(changed).await;
        }
    }

    /// Returns a token that is cancelled when the lease is over: a child, so that cancelling it stops only the
    /// caller's own work.
    pub fn cancellation(&self) -> CancellationToken {
        self.held.use_it();
        let token = self.held.token.get_or_init(CancellationToken::new).child_token();
        // The end may have come between the last look and the first token.
        if let State::Lost(_) = self.state() {
            token.cancel();
        }
        token
    }

    /// Returns the grant as data, with the present deadline.
    pub fn lease(&self) -> Lease {
        self.held.read_fence();
        self.held.lease()
    }

    /// Holds the release back while the value lives: for a thread or a child process that outlives a dropped future.
    ///
    /// # Errors
    /// `Lost`.
    pub fn busy(&self) -> Result<Busy> {
        let busy = Busy::begin(&self.held);
        self.ensure_held()?;
        Ok(busy)
    }

    /// Runs `work` on a blocking thread; the lock is not given back before it has ended, whatever becomes of the
    /// caller, but never later than the deadline.
    ///
    /// # Errors
    /// The work's own; `Lost` when the lease is over before it begins; `Closed` when the runtime shuts down.
    ///
    /// # Cancel safety
    /// The work goes on; ask `held.ensure_held()?` between its steps.
    ///
    /// # Panics
    /// With the work's own panic.
    pub async fn run_blocking<T: Send + 'static, E: From<Error> + Send + 'static>(
        &self,
        work: impl FnOnce(&GuardRef) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E> {
        let busy = self.busy()?;
        let watch = self.clone();
        let job = tokio::task::spawn_blocking(move || {
            let _busy = busy;
            work(&watch)
        });
        match job.await {
            Ok(answer) => answer,
            Err(failed) => match failed.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => Err(self
                    .held
                    .client
                    .error(
                        ErrorKind::Closed,
                        "the runtime is shutting down",
                        Verb::Acquire,
                        Some(&self.held.name),
                    )
                    .into()),
            },
        }
    }
}

/// Work that nobody can interrupt is under way; holds the release back, does not prolong the lease.
#[must_use = "holds the release back only while it lives"]
pub struct Busy {
    held: Arc<Held>,
}

impl Busy {
    pub(crate) fn begin(held: &Arc<Held>) -> Self {
        held.busy.fetch_add(1, Ordering::AcqRel);
        Self { held: held.clone() }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        if self.held.busy.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.held.idle.notify_waiters();
        }
    }
}

impl fmt::Debug for Busy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Busy").field("name", &self.held.name).finish_non_exhaustive()
    }
}

/// A lease younger than this is not watched for loss: most locks are held for less, and a watch costs the store.
const WATCH_AFTER: Duration = Duration::from_millis(50);

/// One lease in this process: shared by its guard, its watchers and the engine that renews it.
pub(crate) struct Held {
    pub(crate) client: Arc<Inner>,
    pub(crate) name: LockName,
    pub(crate) owner: Owner,
    pub(crate) fence: Fence,
    /// As the holder counts it, without the lock-delay.
    pub(crate) ttl: Duration,
    pub(crate) delay: Duration,
    pub(crate) granted: Moment,
    pub(crate) renewal: Mutex<Renewal>,
    /// The moment under which the engine has it, in nanoseconds; changed only under the engine's own lock.
    pub(crate) scheduled: AtomicU64,
    pub(crate) number: u64,
    engine: Arc<Engine>,
    runtime: Handle,
    watching: AtomicBool,
    changed: Notify,
    token: OnceLock<CancellationToken>,
    seat: Mutex<Option<Seat>>,
    in_use: Mutex<Option<InUse>>,
    busy: AtomicUsize,
    idle: Notify,
    used: AtomicBool,
    fence_read: AtomicBool,
    /// The holder's side is over; set once, by whoever ends it.
    ended: AtomicBool,
}

impl Seen for Held {
    fn seen(&self) -> Holder {
        let now = self.client.now();
        Holder::new(self.owner.digest(), self.fence, now.until(self.renewal.grab().deadline())).with(|h| {
            h.since = Some(self.granted.until(now));
            h.label = Some(self.client.label.to_string());
        })
    }
}

/// What a new lease starts with.
pub(crate) struct Grant {
    pub(crate) lease: Lease,
    pub(crate) ttl: Duration,
    pub(crate) delay: Duration,
    pub(crate) margin: Duration,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) seat: Option<Seat>,
    pub(crate) in_use: InUse,
    pub(crate) runtime: Handle,
}

impl Held {
    pub(crate) fn start(client: Arc<Inner>, grant: Grant) -> Arc<Self> {
        let Grant { lease, ttl, delay, margin, max_hold, seat, in_use, runtime } = grant;
        let now = client.now();
        // The owner is random, so it spreads as well as anything.
        let spread = f64::from(lease.owner.expose()[0]) / 256.0;
        let renewal = Renewal::new(now, lease.deadline, ttl, margin, max_hold, spread);
        let engine = client.engines.of(&client, &runtime);
        let held = Arc::new(Self {
            name: lease.name,
            owner: lease.owner,
            fence: lease.fence,
            ttl,
            delay,
            granted: now,
            scheduled: AtomicU64::new(0),
            number: engine.next_number(),
            engine,
            runtime,
            watching: AtomicBool::new(false),
            renewal: Mutex::new(renewal),
            changed: Notify::new(),
            token: OnceLock::new(),
            seat: Mutex::new(seat),
            in_use: Mutex::new(Some(in_use)),
            busy: AtomicUsize::new(0),
            idle: Notify::new(),
            used: AtomicBool::new(false),
            fence_read: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            client,
        });
        let seen: Arc<dyn Seen> = held.clone();
        if let Some(seat) = &*held.seat.grab() {
            seat.stage(Stage::Holding(Arc::downgrade(&seen)));
        }
        held.engine.add(&held);
        held
    }

    pub(crate) fn about(&self) -> About<'_> {
        self.client.about(&self.name, self.owner.digest())
    }

    pub(crate) fn lease(&self) -> Lease {
        Lease::new(self.name.clone(), self.owner, self.renewal.grab().deadline(), self.fence)
    }

    fn error_lost(&self, reason: LostReason) -> Error {
        Error::lost(reason).about(Verb::Renew, Some(&self.name), self.client.capabilities.backend)
    }

    fn use_it(&self) {
        if !self.used.load(Ordering::Relaxed) {
            self.used.store(true, Ordering::Relaxed);
        }
    }

    fn read_fence(&self) {
        self.use_it();
        if !self.fence_read.load(Ordering::Relaxed) {
            self.fence_read.store(true, Ordering::Relaxed);
        }
    }

    /// Steps the machine and does what concerns the holder; what concerns the store is left to the caller.
    pub(crate) fn step(&self, event: Event) -> Todo {
        let now = self.client.now();
        let (todo, state) = {
            let mut renewal = self.renewal.grab();
            let todo = renewal.step(event, now);
            (todo, renewal.state(now))
        };
        if todo.tell {
            self.changed.notify_waiters();
            if let State::Lost(reason) = state {
                if let Some(token) = self.token.get() {
                    token.cancel();
                }
                self.client
                    .tell(&self.name, self.owner.digest(), || EventKind::Lost { fence: self.fence, reason });
                observe::lost(self.about(), self.fence, reason);
                if reason.is_gone_from_store() || reason == LostReason::Expired {
                    // Others of this process may ask the store again: it decides, not this lease.
                    self.seat.grab().take();
                }
            }
        }
        todo
    }

    fn state(&self, now: Moment) -> State {
        let state = self.renewal.grab().state(now);
        if let State::Lost(_) = state {
            // The clock knows before the engine does: record it, so that everybody is told once.
            self.step(Event::Tick { early: Duration::ZERO });
        }
        state
    }

    async fn until_change_or_end(&self, changed: impl Future<Output = ()>) {
        let ends = self.renewal.grab().ends();
        tokio::select! {
            () = changed => {}
            () = self.client.clock.sleep_until(ends) => {}
        }
    }

    /// Returns when work must have stopped: at the deadline or the hold limit, or when the store gave the lock away.
    pub(crate) async fn stopped(&self) -> LostReason {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            let now = self.client.now();
            let (state, end) = {
                let renewal = self.renewal.grab();
                (renewal.state(now), renewal.hard_end())
            };
            match state {
                State::Lost(reason) if reason.is_gone_from_store() || now >= end => return reason,
                _ => {}
            }
            tokio::select! {
                () = changed => {}
                () = self.client.clock.sleep_until(end) => {}
            }
        }
    }

    /// Says why a body that has just finished did not finish under the lock, if so.
    pub(crate) fn overtaken(&self) -> Option<LostReason> {
        let now = self.client.now();
        let renewal = self.renewal.grab();
        match renewal.state(now) {
            State::Lost(reason) if reason.is_gone_from_store() || now >= renewal.deadline() => Some(reason),
            _ => None,
        }
    }

    pub(crate) fn lost_error(&self, reason: LostReason) -> Error {
        self.error_lost(reason)
    }

    async fn renew_now(self: &Arc<Self>) -> Result<()> {
        if let State::Lost(reason) = self.state(self.client.now()) {
            return Err(self.error_lost(reason));
        }
        self.step(Event::Asked);
        match crate::renewal::renew(&self.client, self).await {
            Ok(()) => match self.state(self.client.now()) {
                State::Lost(reason) => Err(self.error_lost(reason)),
                State::Held | State::Uncertain => Ok(()),
            },
            Err(error) => Err(error),
        }
    }

    /// Ends the lease: watchers are told now, the store in the background.
    pub(crate) fn end(self: &Arc<Self>, unclean: bool) {
        if let Some(ending) = self.begin_end(unclean) {
            drop(ending);
        }
    }

    /// Ends the lease and waits for the store's word, for one exchange.
    pub(crate) async fn release(self: &Arc<Self>) -> Result<Released> {
        let Some(ending) = self.begin_end(false) else { return Ok(Released::AlreadyOver) };
        self.until_idle().await;
        let answer = self.give_back(false).await;
        if answer.is_ok() {
            ending.settled();
        }
        answer
    }

    /// Ends the lease because the client closes. Bodies and busy work get to finish before it is given back.
    pub(crate) fn close(self: &Arc<Self>) {
        self.step(Event::Ended(LostReason::Closed));
        let (task, held) = (self.client.begin_task(), self.clone());
        self.runtime.spawn(async move {
            let _task = task;
            held.until_idle().await;
            held.end(false);
        });
    }

    /// Stops renewing and tells watchers. Returns what remains to be done in the store, to the first who asks.
    fn begin_end(self: &Arc<Self>, unclean: bool) -> Option<Ending> {
        if self.ended.swap(true, Ordering::AcqRel) {
            return None;
        }
        let now = self.client.now();
        let (state, ends) = {
            let renewal = self.renewal.grab();
            (renewal.state(now), renewal.ends())
        };
        self.engine.remove(self);
        if let Some(seat) = &*self.seat.grab() {
            seat.stage(Stage::Leaving);
        }
        let after_loss = matches!(state, State::Lost(_)).then(|| ends.until(now));
        observe::over(self.about(), self.granted.until(now), self.ttl, after_loss);
        if self.client.options.warn_unused_fence
            && !self.fence_read.load(Ordering::Relaxed)
            && self.client.warn_once(&self.name)
        {
            observe::fence_unused(self.about());
        }
        self.step(Event::Ended(LostReason::Released));
        let gone = matches!(state, State::Lost(reason) if reason.is_gone_from_store());
        // After an unclean end the lock stays closed for the lock-delay: the record's TTL has it.
        let unclean = unclean || matches!(state, State::Lost(LostReason::Expired));
        if gone || (unclean && !self.delay.is_zero()) {
            self.leave_seat();
            return None;
        }
        Some(Ending { held: self.clone(), settled: false })
    }

    /// Says, once, that the lease is old enough to be watched for loss.
    pub(crate) fn start_watching(&self, now: Moment) -> bool {
        self.granted.until(now) >= WATCH_AFTER && !self.watching.swap(true, Ordering::AcqRel)
    }

    /// Returns when the engine has something to do for this lease, if nothing happens.
    pub(crate) fn wake_at(&self) -> Moment {
        let wake_at = self.renewal.grab().wake_at();
        match self.client.capabilities.pushes_loss && !self.watching.load(Ordering::Acquire) {
            true => wake_at.min(self.granted.saturating_add(WATCH_AFTER)),
            false => wake_at,
        }
    }

    /// Returns when the lease is over for its holder.
    pub(crate) async fn over(&self) {
        loop {
            let mut changed = pin!(self.changed.notified());
            changed.as_mut().enable();
            if let State::Lost(_) = self.renewal.grab().state(self.client.now()) {
                return;
            }
            changed.await;
        }
    }

    /// Tells the engine that the machine's next moment has moved.
    pub(crate) fn reschedule(self: &Arc<Self>) {
        if !self.ended.load(Ordering::Acquire) {
            self.engine.reschedule(self);
        }
    }

    /// Gives the seat to the next task of this process. The client has nothing more to do for this lease.
    fn leave_seat(&self) {
        self.seat.grab().take();
        self.in_use.grab().take();
    }

    async fn until_idle(&self) {
        loop {
            let mut idle = pin!(self.idle.notified());
            idle.as_mut().enable();
            let end = self.renewal.grab().deadline();
            if self.busy.load(Ordering::Acquire) == 0 || self.client.now() >= end {
                return;
            }
            tokio::select! {
                () = idle => {}
                () = self.client.clock.sleep_until(end) => {}
            }
        }
    }

    /// Asks the store to end the lease. `patient`: until the lease is over there anyway; else for one exchange.
    async fn give_back(&self, patient: bool) -> Result<Released> {
        let lease = self.lease();
        let digest = self.owner.digest();
        self.client.tell(&self.name, digest, || EventKind::ReleaseStarted { fence: self.fence });
        let exchange = self.client.exchange(self.ttl);
        let start = self.client.now();
        let end = if patient {
            // One exchange is tried even at the deadline: it spares the next holder a slow server's extra time.
            lease.deadline.saturating_add(self.delay).max(start.saturating_add(exchange))
        } else {
            start.saturating_add(exchange)
        };
        let mut retry =
            Backoff::new(Duration::from_millis(10), Duration::from_millis(500), digest.to_i64() as u64);
        let (mut attempt, mut unheard) = (0, false);
        loop {
            attempt += 1;
            let until = self.client.now().saturating_add(exchange).min(end);
            let call = Call::new(self.client.frame(exchange), until, attempt, self.delay);
            let answer = self
                .client
                .bounded(Verb::Release, Some(&self.name), &call, self.client.backend.release(&call, &lease))
                .await;
            match answer {
                Ok(released) => {
                    // While its TTL lasts, only an earlier try that was not heard can have ended it; after that
                    // the TTL may have, and the next holder may be on record.
                    let by_us = unheard && self.client.now() < lease.deadline.saturating_add(self.delay);
                    let released = if by_us { Released::Now } else { released };
                    self.client
                        .tell(&self.name, digest, || EventKind::Released { fence: self.fence, released });
                    return Ok(released);
                }
                Err(error) => {
                    unheard |= error.kind() == ErrorKind::Unknown;
                    let next = self.client.now().saturating_add(retry.next());
                    if next >= end || !error.kind().is_transient() || self.client.is_closed() {
                        let kind = error.kind();
                        self.client.tell(&self.name, digest, || EventKind::ReleaseFailed {
                            fence: self.fence,
                            kind,
                        });
                        observe::release_unheard(self.about(), &error);
                        return Err(error);
                    }
                    self.client.clock.sleep_until(next).await;
                }
            }
        }
    }

    /// Ends a lease in the store that was renewed although it is over here.
    pub(crate) async fn take_back(&self) {
        // With a lock-delay the record is wanted; while work goes on, its end gives the lease back.
        if self.delay.is_zero() && self.busy.load(Ordering::Acquire) == 0 {
            // Not heard: the TTL ends it.
            let _ = self.give_back(false).await;
        }
    }
}

/// A lease that is over for its holder and not yet in the store. Dropped unsettled, it is given back in the
/// background: a cancelled or unheard release is not forgotten.
struct Ending {
    held: Arc<Held>,
    settled: bool,
}

impl Ending {
    fn settled(mut self) {
        self.settled = true;
        self.held.leave_seat();
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        if self.settled {
            return;
        }
        let runtime = Handle::try_current().unwrap_or_else(|_| self.held.runtime.clone());
        let job = InBackground { _task: self.held.client.begin_task(), held: self.held.clone(), done: false };
        // On a runtime that has ended the job is dropped at once, which says so in the log.
        runtime.spawn(async move {
            let mut job = job;
            job.held.until_idle().await;
            // Not heard until the deadline: the TTL has ended it.
            let _ = job.held.give_back(true).await;
            job.done = true;
        });
    }
}

struct InBackground {
    _task: crate::client::Task,
    held: Arc<Held>,
    done: bool,
}

impl Drop for InBackground {
    fn drop(&mut self) {
        self.held.leave_seat();
        if !self.done {
            observe::dropped_without_runtime(self.held.about());
        }
    }
}

/// Runs a body until it ends, or until its lease is over for good.
pub(crate) async fn body_until_stopped<T>(
    held: &Held,
    body: impl Future<Output = T>,
) -> Result<T, LostReason> {
    let mut body = pin!(body);
    tokio::select! {
        biased;
        answer = &mut body => Ok(answer),
        reason = held.stopped() => Err(reason),
    }
}
