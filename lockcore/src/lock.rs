//! A lock by name, and several together.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    acquire::{self, Numbers, Wait},
    backend::Moment,
    client::Inner,
    error::{Error, ErrorKind, Result, Verb},
    fence::Fence,
    guard::{Busy, Guard, GuardRef, body_until_stopped},
    lease::{Holder, LockState, LostReason, Released},
    name::LockName,
    observe,
};

/// One lock and how to take it: a name and numbers. Cheap to clone, reusable, holds nothing by itself.
///
/// # Example
/// ```
/// use lockcore::{Attempt, LockClient, memory::MemoryBackend};
/// use std::time::Duration;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockcore::Result<()> {
/// let locks = LockClient::new(MemoryBackend::default());
/// let nightly = locks.named("report/nightly").ttl(Duration::from_secs(60)).max_hold(Duration::from_secs(3600));
/// match nightly.try_run(async |held| -> lockcore::Result<_> { Ok(held.fence()) }).await? {
///     Attempt::Granted(fence) => println!("done under {fence:?}"),
///     Attempt::Busy(holder) => println!("another machine is at it: {holder:?}"),
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
#[must_use = "takes nothing until `.acquire()`, `.try_acquire()`, `.run()` or `.try_run()`"]
pub struct Lock {
    client: Arc<Inner>,
    name: Result<LockName, Arc<Error>>,
    said: Said,
}

/// What the code says itself. All else comes from the client, at the moment of the acquire: a reload may change it.
#[derive(Clone, Debug, Default)]
struct Said {
    ttl: Option<Duration>,
    delay: Option<Duration>,
    margin: Option<Duration>,
    max_hold: Option<Duration>,
    floor: Option<Fence>,
    budget: Option<Budget>,
}

#[derive(Clone, Copy, Debug)]
enum Budget {
    For(Duration),
    Until(Instant),
    Forever,
}

/// Where no configuration is compiled in, none has numbers.
#[cfg(not(feature = "config"))]
#[derive(Default)]
struct NoConfig {
    ttl: Option<Duration>,
    wait: Option<Duration>,
    max_hold: Option<Duration>,
    stop_margin: Option<Duration>,
    lock_delay: Option<Duration>,
}

impl Budget {
    fn end(self, now: Moment) -> Moment {
        match self {
            Self::For(budget) => now.saturating_add(budget),
            Self::Until(end) => now.saturating_add(end.saturating_duration_since(Instant::now())),
            Self::Forever => Moment::MAX,
        }
    }
}

/// What trying once gave. No `Option`: `.is_some()` on a guard would release it in the same breath.
#[derive(Debug)]
#[must_use = "holds the lock, or says who does"]
pub enum Attempt<T> {
    /// The lock was free: the guard, or what the body returned.
    Granted(T),
    /// Someone else has it, as far as the store tells.
    Busy(Option<Holder>),
}

/// What failing open gave.
#[derive(Debug)]
#[must_use = "holds the lock, or says why not"]
pub enum Entry {
    /// The lock is held.
    Locked(Guard),
    /// The store could not be asked; nobody holds anything and there is no fence.
    Open(Error),
}

impl Lock {
    pub(crate) fn new(client: Arc<Inner>, name: Result<LockName>) -> Self {
        Self { name: name.map_err(Arc::new), said: Said::default(), client }
    }

    /// Returns the numbers that hold on a client: what the code says, else what a configuration has for this very lock,
    /// else the client's own.
    fn numbers(&self, client: &Inner) -> (Numbers, Budget) {
        let (said, options) = (&self.said, &client.options);
        #[cfg(feature = "config")]
        let found = self.name.as_ref().ok().zip(options.numbers.as_deref());
        #[cfg(feature = "config")]
        let found = found.and_then(|(name, locks)| crate::config::numbers_of(locks, name).copied());
        #[cfg(feature = "config")]
        let found = found.unwrap_or_default();
        #[cfg(not(feature = "config"))]
        let found = NoConfig::default();
        let numbers = Numbers {
            ttl: said.ttl.or(found.ttl).unwrap_or(options.ttl),
            delay: said.delay.or(found.lock_delay).unwrap_or(options.lock_delay),
            margin: said.margin.or(found.stop_margin).unwrap_or(options.stop_margin),
            max_hold: said.max_hold.or(found.max_hold).or(options.max_hold),
            floor: said.floor,
        };
        let wait = || Budget::For(found.wait.unwrap_or(options.wait));
        (numbers, said.budget.unwrap_or_else(wait))
    }

    /// Sets how long the lease lives without a renewal.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.said.ttl = Some(ttl);
        self
    }

    /// Sets the wait budget: connecting, queueing, retries and clean-up together.
    pub fn wait(mut self, budget: Duration) -> Self {
        self.said.budget = Some(Budget::For(budget));
        self
    }

    /// Sets the wait budget by the end of the caller's own, a request's deadline for instance.
    pub fn wait_until(mut self, end: Instant) -> Self {
        self.said.budget = Some(Budget::Until(end));
        self
    }

    /// Waits as long as the future is kept.
    pub fn wait_forever(mut self) -> Self {
        self.said.budget = Some(Budget::Forever);
        self
    }

    /// Caps the hold, renewals included.
    pub fn max_hold(mut self, cap: Duration) -> Self {
        self.said.max_hold = Some(cap);
        self
    }

    /// Counts the lease as lost this long before its deadline; [`run`](Self::run) lets the body use the margin to
    /// finish.
    pub fn stop_margin(mut self, margin: Duration) -> Self {
        self.said.margin = Some(margin);
        self
    }

    /// Keeps the lock closed for this long after an unclean end: a crash, a panic, a loss.
    pub fn lock_delay(mut self, delay: Duration) -> Self {
        self.said.delay = Some(delay);
        self
    }

    /// Demands a fence above `floor`.
    pub fn above(mut self, floor: Fence) -> Self {
        self.said.floor = Some(floor);
        self
    }

    fn name(&self) -> Result<LockName> {
        match &self.name {
            Ok(name) => Ok(name.clone()),
            Err(error) => Err(Error::new(error.kind(), error.message().to_owned())),
        }
    }

    /// Takes the lock, waiting within the budget.
    ///
    /// The future is `'static`, so it can be spawned, or pinned outside a `select!` loop, where it keeps its place in
    /// the queue:
    ///
    /// ```
    /// # use lockcore::{LockClient, memory::MemoryBackend};
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> lockcore::Result<()> {
    /// # let locks = LockClient::new(MemoryBackend::default());
    /// let mut turn = std::pin::pin!(locks.named("x").acquire());
    /// let guard = loop {
    ///     tokio::select! {
    ///         guard = &mut turn => break guard?,
    ///         () = tokio::time::sleep(std::time::Duration::from_secs(1)) => { /* say that we still wait */ }
    ///     }
    /// };
    /// guard.release().await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `WaitTimeout`: the budget is used up, nothing changed. `Unavailable`: the store refused until then. `Unknown`:
    /// the store did not answer; what it may have granted is being cleared away. `Overloaded`: too many tasks of this
    /// client wait. `Closed`, `Invalid`, `Unsupported`, `Unauthorized`, `Misconfigured`, `FenceRegression`: final.
    ///
    /// # Cancel safety
    /// Dropping the future gives up the place in the queue; a grant on its way is released in the background.
    pub fn acquire(&self) -> impl Future<Output = Result<Guard>> + Send + use<> {
        let lock = self.clone();
        async move {
            let (name, in_use) = (lock.name()?, lock.client.begin_use());
            let (numbers, budget) = lock.numbers(in_use.client());
            let end = budget.end(in_use.client().now());
            acquire::acquire(in_use, name, numbers, Wait::Until(end)).await
        }
    }

    /// Takes the lock if it is free now. A store that cannot be asked is an error, never `Busy`.
    ///
    /// A release of this process that is under way is waited for; only foreign holders, and guards that live in this
    /// process, are `Busy`.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire), without the time-out; it returns within the call timeout.
    ///
    /// # Cancel safety
    /// As [`acquire`](Self::acquire).
    pub fn try_acquire(&self) -> impl Future<Output = Result<Attempt<Guard>>> + Send + use<> {
        let lock = self.clone();
        async move {
            let (name, in_use) = (lock.name()?, lock.client.begin_use());
            let (numbers, _) = lock.numbers(in_use.client());
            match acquire::acquire(in_use, name, numbers, Wait::Try).await {
                Ok(guard) => Ok(Attempt::Granted(guard)),
                Err(error) if error.kind() == ErrorKind::Held => Ok(Attempt::Busy(error.holder().cloned())),
                Err(error) => Err(error),
            }
        }
    }

    /// Runs `body` under the lock, then releases it. On loss the body is told, gets the stop margin, and is dropped at
    /// the deadline.
    ///
    /// | body | lease | result |
    /// |---|---|---|
    /// | `Ok(v)` | held, or told to stop and finished before the deadline | `Ok(v)`, also when the release is not heard |
    /// | `Ok(v)` | deadline passed, or the store shows that it was taken | `Err(Lost)`: finished, but not under the lock |
    /// | `Err(e)` | any | `Err(e)`: the body's own error says more |
    /// | not finished | deadline passed, or taken | dropped, `Err(Lost)` |
    /// | panics | any | unwinds; counts as an unclean end |
    ///
    /// Where the call is not the tail of a function, annotate the closure:
    /// `async |held| -> Result<_, MyError> { … }`.
    ///
    /// # Cancel safety
    /// Dropping the future drops the body and releases in the background.
    pub fn run<T, E, F, Fut>(&self, body: F) -> impl Future<Output = Result<T, E>> + use<T, E, F, Fut>
    where
        F: FnOnce(GuardRef) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        E: From<Error>,
    {
        let acquire = self.acquire();
        async move { under(vec![acquire.await?], |mut held| body(held.remove(0))).await }
    }

    /// As [`run`](Self::run), if the lock is free now; the body does not run when it is `Busy`.
    pub fn try_run<T, E, F, Fut>(
        &self,
        body: F,
    ) -> impl Future<Output = Result<Attempt<T>, E>> + use<T, E, F, Fut>
    where
        F: FnOnce(GuardRef) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        E: From<Error>,
    {
        let attempt = self.try_acquire();
        async move {
            match attempt.await? {
                Attempt::Granted(guard) => {
                    under(vec![guard], |mut held| body(held.remove(0))).await.map(Attempt::Granted)
                }
                Attempt::Busy(holder) => Ok(Attempt::Busy(holder)),
            }
        }
    }

    /// Takes the lock, or goes on without where the options allow it: the one way to fail open, and it says so in its
    /// type.
    ///
    /// # Errors
    /// `Misconfigured`: the options do not allow it. `WaitTimeout`: someone else has it, which is no reason to go on.
    /// All that is not a matter of reaching the store.
    pub async fn acquire_or_open(&self) -> Result<Entry> {
        let in_use = self.client.begin_use();
        let client = in_use.client();
        if !client.options.allow_open {
            let message = "going on without the lock is not allowed; set `ClientOptions::allow_open`";
            let name = self.name()?;
            return Err(client.error(ErrorKind::Misconfigured, message, Verb::Acquire, Some(&name)));
        }
        match self.acquire().await {
            Ok(guard) => Ok(Entry::Locked(guard)),
            Err(error) if matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Unknown) => {
                let name = self.name()?;
                let nobody = crate::OwnerDigest::from_i64(0);
                observe::opened(client.about(&name, nobody), &error);
                Ok(Entry::Open(error))
            }
            Err(error) => Err(error),
        }
    }

    /// Looks at the lock from outside; for people and dashboards, never to decide.
    ///
    /// # Errors
    /// As the backend tells; `Unknown`: no answer within the call timeout.
    pub async fn inspect(&self) -> Result<LockState> {
        let in_use = self.client.begin_use();
        let client = in_use.client();
        client.check_options(Verb::Inspect)?;
        let name = self.name()?;
        let call = client.call(client.options.call_timeout);
        client.bounded(Verb::Inspect, Some(&name), &call, client.backend.inspect(&call, &name)).await
    }
}

impl fmt::Debug for Lock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (numbers, budget) = self.numbers(self.client.begin_use().client());
        f.debug_struct("Lock")
            .field("name", &self.name)
            .field("numbers", &numbers)
            .field("wait", &budget)
            .finish_non_exhaustive()
    }
}

/// Runs a body under guards and ends them; what `run` promises, in one place.
async fn under<T, E, F, Fut>(guards: Vec<Guard>, body: F) -> Result<T, E>
where
    F: FnOnce(Vec<GuardRef>) -> Fut,
    Fut: Future<Output = Result<T, E>>,
    E: From<Error>,
{
    let watches = guards.iter().map(Guard::watch).collect();
    let busy: Vec<Busy> = guards.iter().map(|guard| Busy::begin(guard.held())).collect();
    let answer = until_any_stopped(&guards, body(watches)).await;
    drop(busy);
    match answer {
        Ok(Ok(value)) => {
            let overtaken =
                guards.iter().find_map(|g| g.held().overtaken().map(|why| g.held().lost_error(why)));
            let mut lost = overtaken;
            for guard in guards.into_iter().rev() {
                let held = guard.held().clone();
                // Found over although nobody had noticed: it was taken, and the work was not alone.
                if let Ok(Released::AlreadyOver) = guard.release().await
                    && lost.is_none()
                {
                    lost = Some(held.lost_error(LostReason::Taken));
                }
            }
            lost.map_or(Ok(value), |error| Err(error.into()))
        }
        Ok(Err(error)) => {
            for guard in guards.into_iter().rev() {
                // Not heard: it goes on in the background, and the body's own error says more.
                let _ = guard.release().await;
            }
            Err(error)
        }
        Err(error) => Err(error.into()),
    }
}

async fn until_any_stopped<T>(guards: &[Guard], body: impl Future<Output = T>) -> Result<T, Error> {
    let lost = |guard: &Guard, why| guard.held().lost_error(why);
    match guards {
        [one] => body_until_stopped(one.held(), body).await.map_err(|why| lost(one, why)),
        [] => Ok(body.await),
        several => {
            let mut body = std::pin::pin!(body);
            let mut stops: futures_util::stream::FuturesUnordered<_> =
                several.iter().map(|guard| async move { (guard, guard.held().stopped().await) }).collect();
            tokio::select! {
                biased;
                answer = &mut body => Ok(answer),
                Some((guard, why)) = futures_util::StreamExt::next(&mut stops) => Err(lost(guard, why)),
            }
        }
    }
}

/// Several locks and how to take them: one global order, one budget, all or none.
#[must_use = "takes nothing until `.acquire()` or `.run()`"]
#[derive(Clone, Debug)]
pub struct LockSet {
    client: Arc<Inner>,
    names: Result<Vec<LockName>, Arc<Error>>,
    template: Lock,
}

impl LockSet {
    pub(crate) fn new(client: Arc<Inner>, names: Result<Vec<LockName>>) -> Self {
        let names = names.map_err(Arc::new).map(|mut names| {
            // One global order, so that two sets never wait for each other in a circle.
            names.sort();
            names.dedup();
            names
        });
        // Stands for the numbers that all of them share; its own name is never used.
        let template = Lock::new(client.clone(), LockName::parse("set"));
        Self { client, names, template }
    }

    /// Sets one budget for all of them together.
    pub fn wait(mut self, budget: Duration) -> Self {
        self.template = self.template.wait(budget);
        self
    }

    /// Sets how long the leases live without a renewal.
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.template = self.template.ttl(ttl);
        self
    }

    /// Takes all in the order of their names; gives back what it has when one fails.
    ///
    /// # Errors
    /// As [`Lock::acquire`], of the first that failed. `Invalid`: no name at all.
    ///
    /// # Cancel safety
    /// As [`Lock::acquire`]: what is held already is released in the background.
    pub async fn acquire(&self) -> Result<MultiGuard> {
        let names = match &self.names {
            Ok(names) => names.clone(),
            Err(error) => return Err(Error::new(error.kind(), error.message().to_owned())),
        };
        if names.is_empty() {
            return Err(self.client.error(ErrorKind::Invalid, "a set of no locks", Verb::Acquire, None));
        }
        // All of them on one client, also when a reload comes in between.
        let in_use = self.client.begin_use();
        let client = in_use.client();
        let (numbers, budget) = self.template.numbers(client);
        let end = budget.end(client.now());
        let mut guards: Vec<Guard> = Vec::with_capacity(names.len());
        for name in names {
            let taken = acquire::acquire(in_use.again(), name, numbers.clone(), Wait::Until(end));
            let failure = match taken.await {
                Ok(guard) => match guards.iter().find_map(|earlier| earlier.ensure_held().err()) {
                    // Taken while the first was lost: all or none.
                    None => {
                        guards.push(guard);
                        continue;
                    }
                    Some(lost) => {
                        guards.push(guard);
                        lost
                    }
                },
                Err(error) => error,
            };
            for guard in guards.into_iter().rev() {
                // Not heard: it goes on in the background.
                let _ = guard.release().await;
            }
            return Err(failure);
        }
        Ok(MultiGuard { guards })
    }

    /// Runs `body` under all of them; the watchers come in the order of the names.
    ///
    /// # Errors
    /// As [`Lock::run`]: the first that is lost ends all.
    pub async fn run<T, E, F, Fut>(&self, body: F) -> Result<T, E>
    where
        F: FnOnce(Vec<GuardRef>) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        E: From<Error>,
    {
        let guards = self.acquire().await?;
        under(guards.guards, body).await
    }
}

/// Guards that live and end together.
#[must_use = "dropping it releases all of them"]
#[derive(Debug)]
pub struct MultiGuard {
    guards: Vec<Guard>,
}

impl MultiGuard {
    /// Returns the guard of one name.
    pub fn get(&self, name: &LockName) -> Option<&Guard> {
        self.guards.iter().find(|guard| guard.name() == name)
    }

    /// Lists names and fences.
    pub fn fences(&self) -> impl Iterator<Item = (&LockName, Fence)> {
        self.guards.iter().map(|guard| (guard.name(), guard.fence()))
    }

    /// Refuses unless every one is held.
    ///
    /// # Errors
    /// `Lost`, of the first that is not.
    pub fn ensure_held(&self) -> Result<()> {
        self.guards.iter().try_for_each(Guard::ensure_held)
    }

    /// Returns once the first of them is over.
    ///
    /// # Cancel safety
    /// Dropping the future changes nothing.
    pub async fn lost(&self) -> (LockName, LostReason) {
        let mut losses: futures_util::stream::FuturesUnordered<_> = self
            .guards
            .iter()
            .map(|guard| async move { (guard.name().clone(), guard.lost().await) })
            .collect();
        match futures_util::StreamExt::next(&mut losses).await {
            Some(first) => first,
            None => std::future::pending().await,
        }
    }

    /// Releases all, last first; the first error.
    ///
    /// # Errors
    /// As [`Guard::release`]; the others are released all the same.
    pub async fn release(self) -> Result<()> {
        let mut answer = Ok(());
        for guard in self.guards.into_iter().rev() {
            answer = answer.and(guard.release().await.map(drop));
        }
        answer
    }
}
