//! The client: one store, one set of options, and everything that its locks share.

use std::{
    collections::HashMap,
    future::poll_fn,
    pin::pin,
    sync::{
        Arc, Mutex, OnceLock, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering, fence},
    },
    task::Poll,
    time::Duration,
};

use tokio::{
    runtime::Handle,
    sync::{Notify, broadcast},
};
use tokio_util::sync::CancellationToken;

use crate::{
    backend::{AcquireRequest, BootClock, Call, Clock, LockBackend, Moment, OwnerDigest},
    call::Frame,
    capabilities::{Capabilities, Preflight},
    error::{Error, ErrorKind, Result, Verb},
    events::{Event, EventKind},
    fence::Fence,
    lock::{Lock, LockSet},
    name::{IntoLockName, LockName, check_namespace},
    observe::About,
    queue::Queue,
    renewal::Engines,
    sync::LockExt,
};

/// Takes locks on one backend. `Clone + Send + Sync + 'static`; sends nothing and needs no runtime until the first
/// `await`.
///
/// Clones share connections, renewals and the queue of this process. A client belongs to no runtime: renewals run
/// where the lock was acquired.
///
/// # Example
/// ```
/// use lockcore::{LockClient, memory::MemoryBackend};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockcore::Result<()> {
/// let locks = LockClient::new(MemoryBackend::default());
/// let fence = locks
///     .named("order/42")
///     .run(async |held| -> lockcore::Result<_> {
///         // Pass `held.stamp()?` to the resource: it refuses whoever comes with an older one.
///         Ok(held.stamp()?.fence)
///     })
///     .await?;
/// assert_eq!(fence.get(), 1);
/// locks.close().await;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct LockClient {
    pub(crate) inner: Arc<Inner>,
}

/// Where renewals run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RenewalHome {
    /// On the runtime that acquired.
    Shared,
    /// On a thread of its own, with a connection of its own where the backend opens one: a busy runtime cannot starve
    /// it.
    OwnThread,
}

/// Defaults and bounds of a client; start from `default()` and change with [`with`](Self::with).
///
/// Mistakes are reported by the first call that uses the client, so that constructors do not fail.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ClientOptions {
    /// Keeps deployments apart that share a store; becomes part of every key. At most 64 bytes of `A-Z a-z 0-9 . _ -`.
    /// Empty.
    pub namespace: String,
    /// TTL of a lease that does not ask for another. 30 s.
    pub ttl: Duration,
    /// Wait budget of an acquire that does not ask for another. 10 s: a service never waits for ever by default.
    pub wait: Duration,
    /// Longest hold, renewals included. None.
    pub max_hold: Option<Duration>,
    /// How long before its deadline a lease counts as lost, so that work can stop in time. Zero.
    pub stop_margin: Duration,
    /// How long nobody gets the lock after an unclean end: a crash, a panic, a loss. Becomes part of the TTL on the
    /// server; a clean release ends it. Zero.
    pub lock_delay: Duration,
    /// Bound on one exchange with the store. 5 s, never more than a third of the TTL.
    pub call_timeout: Duration,
    /// Share of the TTL given to clocks that run at different rates. 0.01.
    pub drift: f64,
    /// Tasks of this client that may queue for one name before `Overloaded`. 10,000.
    pub max_local_waiters: usize,
    /// Where renewals run. On the caller's runtime; its lateness is measured and reported.
    pub renewal: RenewalHome,
    /// What operators read beside the owner's digest: at most 1024 bytes, no control characters. `host:pid`.
    pub label: Option<Arc<str>>,
    /// Lets [`Lock::acquire_or_open`] go on without the lock. False.
    pub allow_open: bool,
    /// Warns, once a name, when a lease ends and nobody read its fence. False.
    pub warn_unused_fence: bool,
    /// The application's own shutdown: waiters end as `Closed`, held leases as `Lost(Closed)`, bodies get to finish.
    pub shutdown: CancellationToken,
    /// Numbers for single locks, from a configuration.
    #[cfg(feature = "config")]
    pub(crate) numbers: Option<Arc<std::collections::BTreeMap<String, crate::config::LockConfig>>>,
}

impl Default for ClientOptions {
    fn default() -> Self {
        Self {
            namespace: String::new(),
            ttl: Duration::from_secs(30),
            wait: Duration::from_secs(10),
            max_hold: None,
            stop_margin: Duration::ZERO,
            lock_delay: Duration::ZERO,
            call_timeout: Duration::from_secs(5),
            drift: 0.01,
            max_local_waiters: 10_000,
            renewal: RenewalHome::Shared,
            label: None,
            allow_open: false,
            warn_unused_fence: false,
            shutdown: CancellationToken::new(),
            #[cfg(feature = "config")]
            numbers: None,
        }
    }
}

impl ClientOptions {
    /// Changes fields in one expression: `ClientOptions::default().with(|o| o.ttl = …)`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }

    /// Says what no call can succeed with.
    fn mistake(&self) -> Option<String> {
        if let Err(error) = check_namespace(&self.namespace) {
            return Some(error.message().to_owned());
        }
        if !(0.0..0.5).contains(&self.drift) {
            return Some(format!("`drift` is the share of a TTL, from 0 to below 0.5, not {}", self.drift));
        }
        if self.call_timeout.is_zero() {
            return Some("`call_timeout` is zero, so no call can succeed".into());
        }
        if let Some(label) = &self.label
            && (label.len() > LABEL_LIMIT || label.chars().any(char::is_control))
        {
            return Some(format!(
                "`label` has control characters or more than {LABEL_LIMIT} bytes; it is shown to people"
            ));
        }
        None
    }
}

impl LockClient {
    /// Makes a client with default options; takes a backend, an `Arc<B>` or an `Arc<dyn LockBackend>`.
    pub fn new(backend: impl LockBackend) -> Self {
        Self::with_options(backend, ClientOptions::default())
    }

    /// Makes a client with options of its own.
    pub fn with_options(backend: impl LockBackend, options: ClientOptions) -> Self {
        Self::with_clock(backend, options, BootClock)
    }

    /// Makes a client whose time a test owns.
    pub fn with_clock(backend: impl LockBackend, options: ClientOptions, clock: impl Clock) -> Self {
        let clock: Arc<dyn Clock> = Arc::new(clock);
        let backend: Arc<dyn LockBackend> = Arc::new(backend);
        let label = options.label.clone().unwrap_or_else(default_label);
        let closing = options.shutdown.child_token();
        let inner = Arc::new(Inner {
            capabilities: backend.capabilities(),
            mistake: options.mistake(),
            namespace: options.namespace.as_str().into(),
            label,
            clock,
            backend,
            closing,
            options,
            closed: AtomicBool::new(false),
            queue: Arc::default(),
            engines: Engines::default(),
            background: Background::default(),
            warned: Mutex::default(),
            family: Arc::default(),
            successor: OnceLock::new(),
        });
        Self { inner }
    }

    /// Returns what takes the acquires that begin now: this client, or the one that a reload has put in its place.
    pub(crate) fn current(&self) -> &Arc<Inner> {
        self.inner.newest()
    }

    /// Makes a client, of which there is no clone yet, one that may [follow](Self::replace_by) another.
    #[cfg(feature = "config")]
    pub(crate) fn inherit(&mut self, other: &Self) {
        let inner = Arc::get_mut(&mut self.inner).expect("nobody else has the client yet");
        inner.family = other.inner.family.clone();
    }

    /// Lets another client take what begins from now on. What was granted before stays here, and when the last of it has
    /// ended the backend is closed.
    #[cfg(feature = "config")]
    pub(crate) fn replace_by(&self, next: &Self) {
        let old = self.current().clone();
        old.family.retiring.grab().push(Arc::downgrade(&old));
        // One reload at a time, so nobody else has set it.
        let _ = old.successor.set(next.inner.clone());
        fence(Ordering::SeqCst);
        tokio::spawn(async move {
            old.background.unused().await;
            old.closed.store(true, Ordering::Release);
            old.engines.stop();
            old.backend.close().await;
            // Until here a `close` finds it, and waits for it.
            old.family.retiring.grab().retain(|inner| !std::ptr::eq(inner.as_ptr(), Arc::as_ptr(&old)));
        });
    }

    /// Names a lock. Sends nothing; a bad name is reported by the call that uses it.
    pub fn named(&self, name: impl IntoLockName) -> Lock {
        Lock::new(self.current().clone(), name.into_lock_name())
    }

    /// Names several locks that are taken together or not at all.
    pub fn named_all<N: IntoLockName>(&self, names: impl IntoIterator<Item = N>) -> LockSet {
        LockSet::new(self.current().clone(), names.into_iter().map(IntoLockName::into_lock_name).collect())
    }

    /// Returns what the backend promised when the client was made, or its configuration reloaded.
    pub fn capabilities(&self) -> &Capabilities {
        &self.current().capabilities
    }

    /// Looks at the real server and returns the claims that stand.
    ///
    /// # Errors
    /// As the backend tells: `Unavailable`, `Unauthorized`, `Misconfigured`. `Unknown`: no answer within the call
    /// timeout.
    pub async fn preflight(&self) -> Result<Preflight> {
        let inner = self.current();
        inner.check_options(Verb::Preflight)?;
        let call = inner.call(inner.options.call_timeout);
        inner.bounded(Verb::Preflight, None, &call, inner.backend.preflight(&call)).await
    }

    /// Returns the backend and the frame of one call with this client's clock, namespace and timeout: for tools that
    /// need the verbs behind the door.
    ///
    /// # Errors
    /// `Misconfigured`: the options hold a mistake.
    pub fn backend(&self) -> Result<(Arc<dyn LockBackend>, Call)> {
        let inner = self.current();
        inner.check_options(Verb::Connect)?;
        Ok((inner.backend.clone(), inner.call(inner.options.call_timeout)))
    }

    /// Returns what happens from now on: grants, renewals, losses, releases, refusals.
    pub fn events(&self) -> Events {
        let family = &self.inner.family;
        let mut watchers = family.watchers.grab();
        if self.current().closed.load(Ordering::Acquire) {
            return Events { receiver: None };
        }
        let sender = watchers.get_or_insert_with(|| broadcast::channel(EVENTS_KEPT).0);
        family.watched.store(true, Ordering::Release);
        Events { receiver: Some(sender.subscribe()) }
    }

    /// Waits for the releases of dropped guards, and for the clean-up of dropped acquires, that are still under way.
    pub async fn flush(&self) {
        for inner in self.generations() {
            inner.background.idle().await;
        }
    }

    /// Lists the clients that a reload has replaced and that still have something under way, and the one that took their
    /// place.
    fn generations(&self) -> Vec<Arc<Inner>> {
        // In this order: what a reload replaces in between is then in one of the two, or in both.
        let current = self.current().clone();
        let mut all: Vec<_> = self.inner.family.retiring.grab().iter().filter_map(Weak::upgrade).collect();
        all.retain(|inner| !Arc::ptr_eq(inner, &current));
        all.push(current);
        all
    }

    /// Refuses new acquires, ends held leases as `Lost(Closed)`, flushes, closes the backend. Last line of `main`.
    ///
    /// Bodies of `run` and work that declared itself busy get to finish, until their deadline. A store that does not
    /// answer is not waited for longer than one exchange: the TTL ends what it still shows.
    ///
    /// # Cancel safety
    /// Call it again.
    pub async fn close(&self) {
        let generations = self.generations();
        for inner in &generations {
            inner.closed.store(true, Ordering::Release);
            inner.closing.cancel();
            for held in inner.engines.held() {
                held.close();
            }
        }
        for inner in &generations {
            inner.background.idle().await;
            inner.engines.stop();
            inner.backend.close().await;
        }
        self.inner.family.watched.store(false, Ordering::Release);
        self.inner.family.watchers.grab().take();
    }
}

const EVENTS_KEPT: usize = 4096;
/// Fences remembered to notice a store that went back; the oldest knowledge goes first.
const FENCES_KEPT: usize = 16_384;

/// Bytes of the longest label: what every store keeps.
const LABEL_LIMIT: usize = 1024;

fn default_label() -> Arc<str> {
    let name = rustix::system::uname();
    format!("{}:{}", name.nodename().to_string_lossy(), std::process::id()).into()
}

/// What all locks and guards of a client share.
pub(crate) struct Inner {
    pub(crate) backend: Arc<dyn LockBackend>,
    pub(crate) capabilities: Capabilities,
    pub(crate) options: ClientOptions,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) namespace: Arc<str>,
    pub(crate) label: Arc<str>,
    /// Cancelled by the application's shutdown and by `close`.
    pub(crate) closing: CancellationToken,
    pub(crate) queue: Arc<Queue>,
    pub(crate) engines: Engines,
    pub(crate) background: Background,
    mistake: Option<String>,
    closed: AtomicBool,
    warned: Mutex<std::collections::HashSet<LockName>>,
    family: Arc<Family>,
    /// What has taken its place, set once by a reload.
    successor: OnceLock<Arc<Inner>>,
}

/// What a client has in common with those that take its place when a configuration is reloaded.
#[derive(Default)]
struct Family {
    fences: Mutex<HashMap<LockName, Fence>>,
    watched: AtomicBool,
    watchers: Mutex<Option<broadcast::Sender<Event>>>,
    retiring: Mutex<Vec<Weak<Inner>>>,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inner")
            .field("backend", &self.backend)
            .field("label", &self.label)
            .finish_non_exhaustive()
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.engines.stop();
    }
}

/// How a bounded call ended.
pub(crate) enum Bounded<T> {
    Done(T),
    Late,
    Closing,
}

impl Inner {
    /// Returns what has taken its place, or itself.
    fn newest(self: &Arc<Self>) -> &Arc<Self> {
        let mut newest = self;
        while let Some(next) = newest.successor.get() {
            newest = next;
        }
        newest
    }

    /// Begins to use what takes the acquires that begin now.
    pub(crate) fn begin_use(self: &Arc<Self>) -> InUse {
        let mut newest = self.newest().clone();
        loop {
            newest.background.uses.fetch_add(1, Ordering::SeqCst);
            let in_use = InUse(newest);
            // A reload says first that it has a successor and then looks for users: one of the two sees the other.
            fence(Ordering::SeqCst);
            match in_use.0.successor.get() {
                None => return in_use,
                Some(next) => newest = next.newest().clone(),
            }
        }
    }

    pub(crate) fn now(&self) -> Moment {
        self.clock.now()
    }

    pub(crate) fn check_options(&self, verb: Verb) -> Result<()> {
        match &self.mistake {
            None => Ok(()),
            Some(mistake) => Err(self.error(ErrorKind::Misconfigured, mistake.clone(), verb, None)),
        }
    }

    pub(crate) fn error(
        &self,
        kind: ErrorKind,
        message: impl Into<std::borrow::Cow<'static, str>>,
        verb: Verb,
        name: Option<&LockName>,
    ) -> Error {
        Error::new(kind, message).about(verb, name, self.capabilities.backend)
    }

    pub(crate) fn about<'a>(&self, lock: &'a LockName, owner: OwnerDigest) -> About<'a> {
        About { backend: self.capabilities.backend, lock, owner }
    }

    /// Returns the bound on one exchange for leases of this TTL.
    pub(crate) fn exchange(&self, ttl: Duration) -> Duration {
        self.options.call_timeout.min(ttl / 3)
    }

    pub(crate) fn frame(&self, exchange: Duration) -> Arc<Frame> {
        Arc::new(Frame {
            clock: self.clock.clone(),
            namespace: self.namespace.clone(),
            label: self.label.clone(),
            drift: self.options.drift,
            exchange,
        })
    }

    /// Frames one exchange that belongs to no lease.
    pub(crate) fn call(&self, budget: Duration) -> Call {
        let deadline = self.now().saturating_add(budget);
        Call::new(self.frame(budget), deadline, 1, Duration::ZERO)
    }

    /// Waits for a call, but not beyond its deadline: no client library bounds an operation end to end.
    pub(crate) async fn bounded<T>(
        &self,
        verb: Verb,
        name: Option<&LockName>,
        call: &Call,
        answer: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        match self.until(call.deadline(), false, answer).await {
            Bounded::Done(answer) => answer.map_err(|e| e.about(verb, name, self.capabilities.backend)),
            Bounded::Late | Bounded::Closing => {
                Err(self.error(ErrorKind::Unknown, "the store did not answer in time", verb, name))
            }
        }
    }

    /// Drives a future until a moment, or until the client closes. The alarm is set only if the future has to wait.
    pub(crate) async fn until<T>(
        &self,
        moment: Moment,
        unless_closing: bool,
        future: impl Future<Output = T>,
    ) -> Bounded<T> {
        let mut future = pin!(future);
        if let Poll::Ready(value) = poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx))).await {
            return Bounded::Done(value);
        }
        tokio::select! {
            biased;
            value = future => Bounded::Done(value),
            () = self.closing.cancelled(), if unless_closing => Bounded::Closing,
            () = self.clock.sleep_until(moment) => Bounded::Late,
        }
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.closing.is_cancelled()
    }

    /// Says whether `close` was called: what is retried in the background then has its last try.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Remembers the fence of a grant; an error if this process has seen a higher one.
    pub(crate) fn fence_seen(&self, name: &LockName, fence: Fence) -> Result<()> {
        let mut fences = self.family.fences.grab();
        match fences.get_mut(name) {
            Some(highest) if fence <= *highest => Err(self.error(
                ErrorKind::FenceRegression,
                format!(
                    "the store granted fence {fence}, but this process has seen {highest}; it was restored or wiped. \
                     Find out what it lost, then raise the fence above every fence in use"
                ),
                Verb::Acquire,
                Some(name),
            )),
            Some(highest) => {
                *highest = fence;
                Ok(())
            }
            None => {
                if fences.len() >= FENCES_KEPT {
                    // Arbitrary, which is as good as old for a map that is full of names used once.
                    if let Some(some) = fences.keys().next().cloned() {
                        fences.remove(&some);
                    }
                }
                fences.insert(name.clone(), fence);
                Ok(())
            }
        }
    }

    /// Says whether a warning about this name is the first.
    pub(crate) fn warn_once(&self, name: &LockName) -> bool {
        let mut warned = self.warned.grab();
        warned.len() < FENCES_KEPT && warned.insert(name.clone())
    }

    pub(crate) fn is_watched(&self) -> bool {
        self.family.watched.load(Ordering::Acquire)
    }

    pub(crate) fn tell(&self, lock: &LockName, owner: OwnerDigest, kind: impl FnOnce() -> EventKind) {
        if self.is_watched()
            && let Some(sender) = &*self.family.watchers.grab()
        {
            let event = Event { at: self.now(), lock: lock.clone(), owner, kind: kind() };
            // No reader right now is no error.
            let _ = sender.send(event);
        }
    }

    /// Makes sure in the background that nothing of an acquire is left in the store.
    pub(crate) fn abandon(self: &Arc<Self>, runtime: &Handle, request: AcquireRequest, lock_delay: Duration) {
        // The future may be dropped where no runtime is; on one that has ended the TTL does the work.
        let runtime = Handle::try_current().unwrap_or_else(|_| runtime.clone());
        let task = self.begin_task();
        let inner = self.clone();
        runtime.spawn(async move {
            let _task = task;
            inner.abandon_now(request, lock_delay).await;
        });
    }

    async fn abandon_now(&self, request: AcquireRequest, lock_delay: Duration) {
        let owner = request.owner().digest();
        // A grant that nobody renews is over after its TTL; there is nothing to clear away then.
        let over = self.now().saturating_add(request.ttl()).saturating_add(self.exchange(request.ttl()));
        let mut pause = crate::machine::Backoff::new(
            Duration::from_millis(20),
            Duration::from_secs(1),
            owner.to_i64() as u64,
        );
        let mut attempt = 0;
        loop {
            attempt += 1;
            let exchange = self.exchange(request.ttl());
            let deadline = self.now().saturating_add(exchange);
            let call = Call::new(self.frame(exchange), deadline, attempt, lock_delay);
            let answer = self.bounded(
                Verb::Resolve,
                Some(request.name()),
                &call,
                self.backend.abandon(&call, &request),
            );
            match answer.await {
                Ok(()) => break,
                Err(error) if !error.kind().is_transient() => break,
                Err(_) => {}
            }
            let next = self.now().saturating_add(pause.next());
            if next >= over || self.is_closed() {
                return;
            }
            self.clock.sleep_until(next).await;
        }
        self.tell(request.name(), owner, || EventKind::Abandoned);
    }
}

/// Work that outlives the call that began it: releases of dropped guards, clean-up of dropped acquires.
#[derive(Debug, Default)]
pub(crate) struct Background {
    tasks: AtomicUsize,
    /// Acquires under way, and leases that are not given back yet.
    uses: AtomicUsize,
    ended: Notify,
}

/// Keeps a client open that a reload may replace.
pub(crate) struct InUse(Arc<Inner>);

impl InUse {
    /// Begins another use of the same client.
    pub(crate) fn again(&self) -> Self {
        self.0.background.uses.fetch_add(1, Ordering::SeqCst);
        Self(self.0.clone())
    }

    pub(crate) fn client(&self) -> &Arc<Inner> {
        &self.0
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        if self.0.background.uses.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.background.ended.notify_waiters();
        }
    }
}

/// Counts as under way while it lives.
pub(crate) struct Task(Arc<Inner>);

impl Background {
    async fn idle(&self) {
        self.until(|| self.tasks.load(Ordering::Acquire) == 0).await;
    }

    /// Returns when nothing is held or asked for any more. What a use leaves to a task is begun before the use ends.
    #[cfg(feature = "config")]
    async fn unused(&self) {
        let none = |count: &AtomicUsize| count.load(Ordering::SeqCst) == 0;
        self.until(|| none(&self.uses) && none(&self.tasks)).await;
    }

    async fn until(&self, over: impl Fn() -> bool) {
        loop {
            let mut ended = pin!(self.ended.notified());
            ended.as_mut().enable();
            if over() {
                return;
            }
            ended.await;
        }
    }
}

impl Inner {
    pub(crate) fn begin_task(self: &Arc<Self>) -> Task {
        self.background.tasks.fetch_add(1, Ordering::AcqRel);
        Task(self.clone())
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        if self.0.background.tasks.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.background.ended.notify_waiters();
        }
    }
}

/// What the client does, as it happens; slow readers are told how many they missed.
#[derive(Debug)]
pub struct Events {
    receiver: Option<broadcast::Receiver<Event>>,
}

impl Events {
    /// Returns the next event; `None` once the client is closed.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing.
    pub async fn next(&mut self) -> Option<Event> {
        match self.receiver.as_mut()?.recv().await {
            Ok(event) => Some(event),
            Err(broadcast::error::RecvError::Closed) => None,
            Err(broadcast::error::RecvError::Lagged(count)) => Some(Event::missed(count)),
        }
    }

    /// Returns the next event if one is there.
    pub fn try_next(&mut self) -> Option<Event> {
        match self.receiver.as_mut()?.try_recv() {
            Ok(event) => Some(event),
            Err(broadcast::error::TryRecvError::Lagged(count)) => Some(Event::missed(count)),
            Err(_) => None,
        }
    }
}
