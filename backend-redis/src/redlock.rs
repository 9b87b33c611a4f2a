//! Redlock: several independent servers decide together, by majority.
//!
//! # Shape
//! On each server the keys of a single one; see the README. A lock is taken in two rounds: the first takes it on a
//! majority, without a fence; the second settles a fence above every one that the first saw, on a majority of servers where
//! the lock still is the owner's. Any two majorities share a server, whose fence only rises, so fences grow whatever the
//! clocks say, as long as no server forgets.
//!
//! # Source
//! Redis manual: Distributed locks (the first round). The second round is this crate's.

use std::{
    collections::BTreeSet,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use lockcore::{StoreUrl, backend::*};

use crate::{
    backend::{check_floor, check_ttl, foreign, in_doubt},
    config::{Address, RedisConfig, WaitReplicas, misconfigured},
    connection::connecting,
    error::{self, Phase},
    preflight,
    road::{Node, one_of_many},
    wire::{
        self, CANCEL, FENCE_LIMIT, INSPECT, Keys, RAISE, RAISE_FENCE, RELEASE, Standing, decimal, hex, millis,
    },
};

mod members;
mod steps;

use members::{Known, Member, Votes, ask};
use steps::{CUT, Found, SETTLE, Seen, Settled, Shown, TAKE, Taken, too_few};

const BACKEND: &str = "redlock";
/// What clocks of servers are granted beyond the drift, for the granularity of their timers.
const TIMERS: Duration = Duration::from_millis(2);
/// Whoever answers so much later than the others is waited for.
const GRACE: Duration = Duration::from_millis(5);
/// The same in the first round: a server that is left out keeps nobody else out, until the lease ends.
const JOINING: Duration = Duration::from_millis(20);
/// So often a try starts over when nobody got a majority.
const SPLITS: u32 = 5;
/// So often a fence is raised above one that came between the rounds.
const RAISES: u32 = 8;
const LIST_PAGE: usize = 1000;
const RENEW_BATCH: usize = 512;
/// So close to the end of a wait, no answer would come in time.
const TOO_LATE: Duration = Duration::from_millis(2);

/// Says which servers decide together.
///
/// # Example
/// ```
/// use lockcore_redis::RedlockConfig;
///
/// let config = RedlockConfig::new([("redis-a", 6379), ("redis-b", 6379), ("redis-c", 6379)]);
/// assert_eq!(config.servers.len(), 3);
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RedlockConfig {
    /// The servers: an odd number, at least three, independent of each other, without replicas.
    pub servers: Vec<RedisConfig>,
    /// How long a server that was started grants nothing: it may have forgotten locks that are still held. TTLs are no
    /// longer than this then. Zero leaves it to whoever restarts servers to wait for the longest TTL, or to
    /// `appendfsync always`. Default zero.
    pub restart_delay: Duration,
    /// How long a waiter sleeps between two looks. Default 100 ms.
    pub poll: Duration,
    /// How long the fence of an idle lock is kept; see [`RedisConfig::fence_margin`]. Default 7 days.
    pub fence_margin: Duration,
}

impl RedlockConfig {
    /// Starts from hosts, ports and the defaults.
    pub fn new<H: Into<String>>(servers: impl IntoIterator<Item = (H, u16)>) -> Self {
        Self::of(servers.into_iter().map(|(host, port)| RedisConfig::new(host, port)).collect())
    }

    /// Starts from servers that differ in more than their address, and the defaults.
    pub fn of(servers: Vec<RedisConfig>) -> Self {
        let defaults = RedisConfig::new("", 0);
        Self {
            servers,
            restart_delay: Duration::ZERO,
            poll: defaults.poll,
            fence_margin: defaults.fence_margin,
        }
    }

    /// Reads `redlock://[user[:password]@]host[:port],host[:port],…[/db]`; `redlocks://` speaks TLS.
    ///
    /// # Errors
    /// `Misconfigured`: not such an address. It is not repeated, because it may hold a password.
    pub fn from_url(url: &str) -> Result<Self> {
        let url = StoreUrl::parse(url).map_err(|error| {
            misconfigured(format!("not the address of several servers: {}", error.message()))
        })?;
        if let Some((key, _)) = url.queries().next() {
            return Err(misconfigured(format!("an address of Redlock has no {key} here; set the field")));
        }
        let mut config = Self::of_url(&url)?;
        for server in &mut config.servers {
            server.user = url.user().map(str::to_owned);
            server.password = url.expose_password().map(str::to_owned);
        }
        Ok(config)
    }

    pub(crate) fn of_url(url: &StoreUrl) -> Result<Self> {
        let tls = match url.scheme() {
            "redlock" => false,
            "redlocks" => true,
            _ => return Err(misconfigured("several servers look like redlock://redis-a,redis-b,redis-c")),
        };
        let db = match url.path().trim_start_matches('/') {
            "" => 0,
            number => number.parse().map_err(|_| {
                misconfigured("the path of redlock:// is the number of a database, on all servers the same")
            })?,
        };
        let server = |(host, port): (&str, Option<u16>)| {
            RedisConfig::new(host, port.unwrap_or(6379)).with(|c| (c.db, c.tls) = (db, tls))
        };
        Ok(Self::of(url.hosts().map(server).collect()))
    }

    /// Sets fields in one expression.
    #[must_use]
    pub fn with(mut self, set: impl FnOnce(&mut Self)) -> Self {
        set(&mut self);
        self
    }

    pub(crate) fn check(&self) -> Result<()> {
        let count = self.servers.len();
        if count < 3 || count.is_multiple_of(2) {
            return Err(misconfigured(format!(
                "Redlock needs an odd number of servers, at least three, not {count}: an even one stands no more losses"
            )));
        }
        for (n, server) in self.servers.iter().enumerate() {
            if !matches!(server.address, Address::Tcp(..) | Address::Unix(_)) {
                return Err(misconfigured(
                    "the servers of Redlock are single servers, each by its own address",
                ));
            }
            if server.wait_replicas != WaitReplicas::None || server.wait_fsync {
                return Err(misconfigured("the servers of Redlock wait for no replicas; they have none"));
            }
            if self.servers[..n].iter().any(|other| other.address == server.address) {
                return Err(misconfigured(format!("Redlock lists one server twice: {:?}", server.address)));
            }
            server.clone().with(|c| c.fence_margin = self.fence_margin).check()?;
        }
        if self.poll.is_zero() {
            return Err(misconfigured("poll is zero; nothing would ever come in time"));
        }
        let shortest = Duration::from_secs(1);
        if !self.restart_delay.is_zero() && self.restart_delay < shortest {
            return Err(misconfigured("restart_delay is a second or more, or zero: servers count seconds"));
        }
        Ok(())
    }
}

/// Locks that a majority of independent servers grants.
///
/// # Shape
/// On each server three keys a lock; see the README.
///
/// # Units
/// TTLs are rounded up to the millisecond and end by the servers' clocks, each by its own. Fences are microseconds since
/// 1970 by the fastest of these clocks, or one more than the highest that a majority knows.
///
/// # Example
/// ```no_run
/// use std::time::Duration;
/// use lockcore::LockClient;
/// use lockcore_redis::{RedlockBackend, RedlockConfig};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockcore::Result<()> {
/// let config = RedlockConfig::from_url("redlock://redis-a,redis-b,redis-c")?;
/// let locks = LockClient::new(RedlockBackend::connect(config).await?);
/// let guard = locks.named("nightly/report").ttl(Duration::from_secs(30)).acquire().await?;
/// println!("write with {}", guard.stamp()?);
/// guard.release().await?;
/// # Ok(())
/// # }
/// ```
pub struct RedlockBackend {
    config: Arc<RedlockConfig>,
    members: Vec<Arc<Member>>,
}

impl RedlockBackend {
    /// Connects to a majority, within the longest [`RedisConfig::connect_timeout`], and sees that they are different
    /// servers.
    ///
    /// # Errors
    /// `Misconfigured`: the configuration cannot work, or two addresses lead to one server. `Unauthorized`: credentials
    /// were refused. `Unavailable`: fewer than a majority can be reached.
    pub async fn connect(config: RedlockConfig) -> Result<Self> {
        let backend = Self::lazy(config)?;
        let longest = backend.config.servers.iter().map(|server| server.connect_timeout).max();
        let budget = longest.unwrap_or_default().saturating_add(Duration::from_millis(100));
        // There is no client yet whose call this could be.
        let call = Call::for_tests(Arc::new(BootClock), budget);
        backend.meet(&call).await.map_err(connecting)?;
        Ok(backend)
    }

    /// Connects when a call needs it.
    ///
    /// # Errors
    /// `Misconfigured`: the configuration cannot work.
    pub fn lazy(config: RedlockConfig) -> Result<Self> {
        config.check().map_err(connecting)?;
        let known = config.servers.iter().map(|_| Arc::default()).collect();
        Ok(Self::sharing(Arc::new(config), known))
    }

    fn sharing(config: Arc<RedlockConfig>, known: Vec<Arc<Known>>) -> Self {
        let member = |(at, (server, known)): (usize, (&RedisConfig, Arc<Known>))| {
            let server = Arc::new(server.clone());
            let node = Node::new(&server, None, &known.learnt);
            Arc::new(Member::new(at, node, known, config.restart_delay))
        };
        let members = config.servers.iter().zip(known).enumerate().map(member).collect();
        Self { config, members }
    }

    /// Says how many are a majority.
    fn quorum(&self) -> usize {
        self.members.len() / 2 + 1
    }

    /// Says how many must agree that something is not, so that no majority can say that it is.
    fn veto(&self) -> usize {
        self.members.len() - self.quorum() + 1
    }

    fn all(&self) -> impl Iterator<Item = Arc<Member>> {
        self.members.iter().cloned()
    }

    /// Connects to a majority, and to all that come up in time: two addresses of one server show only when both answer.
    async fn meet(&self, call: &Call) -> Result<()> {
        let quorum = self.quorum();
        let enough = |votes: &Votes<()>| votes.iter().filter(|(_, vote)| vote.is_ok()).count() >= quorum;
        let votes = ask(
            call,
            call.exchange_timeout(),
            GRACE,
            self.all(),
            |_: &Votes<()>| false,
            |member| {
                let call = call.clone();
                async move { member.link(&call).await.map(drop) }
            },
        );
        let votes = votes.await;
        self.are_different()?;
        if enough(&votes) {
            return Ok(());
        }
        Err(self.too_few(&votes, quorum))
    }

    /// Sees that no two addresses lead to one server, as far as they answered.
    fn are_different(&self) -> Result<()> {
        let runs: Vec<_> = self.members.iter().map(|member| member.run_id()).collect();
        for (n, run) in runs.iter().enumerate().filter(|(_, run)| run.is_some()) {
            if let Some(other) = runs[..n].iter().position(|other| other == run) {
                return Err(misconfigured(format!(
                    "{} and {} are one server, whose voice would count twice",
                    self.members[other].node.name(),
                    self.members[n].node.name()
                )));
            }
        }
        Ok(())
    }

    /// Says why too few agreed; what can be told for good is told for good.
    fn too_few<T>(&self, votes: &Votes<T>, wanted: usize) -> Error {
        let errors: Vec<&Error> = votes.iter().filter_map(|(_, vote)| vote.as_ref().err()).collect();
        let silent = self.members.len() - votes.len();
        // So many that the others are not enough, whoever comes back.
        let is_lasting = |error: &&&Error| error.kind().had_no_effect() && !error.kind().is_transient();
        let lasting: Vec<&Error> = errors.iter().filter(is_lasting).copied().collect();
        if let Some(error) = lasting.first().filter(|_| lasting.len() + wanted > self.members.len()) {
            return Error::new(error.kind(), error.message().to_owned());
        }
        let unknown = errors.iter().find(|error| !error.kind().had_no_effect());
        let kind = if unknown.is_some() || silent > 0 { ErrorKind::Unknown } else { ErrorKind::Unavailable };
        // A mistake in the set-up explains more than a server that is away.
        let last = unknown.copied().or(lasting.first().copied()).or(errors.first().copied());
        too_few(kind, wanted, self.members.len(), last)
    }

    /// Runs one step on all servers, and waits until a majority `says` yes, or so many say no that none can; for all where
    /// many say neither.
    async fn on_all<T, F>(
        &self,
        call: &Call,
        says: impl Fn(&T) -> Option<bool>,
        step: impl Fn(Arc<Member>, Call) -> F,
    ) -> Votes<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        self.on_all_within(call, call.exchange_timeout(), says, step).await
    }

    async fn on_all_within<T, F>(
        &self,
        call: &Call,
        patience: Duration,
        says: impl Fn(&T) -> Option<bool>,
        step: impl Fn(Arc<Member>, Call) -> F,
    ) -> Votes<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + Send + 'static,
    {
        let enough = |votes: &Votes<T>| {
            let answers = votes.iter().filter_map(|(_, vote)| says(vote.as_ref().ok()?));
            let (yes, no): (Vec<bool>, Vec<bool>) = answers.partition(|yes| *yes);
            yes.len() >= self.quorum() || no.len() >= self.veto()
        };
        ask(call, patience, GRACE, self.all(), enough, |member| step(member, call.clone())).await
    }

    /// The first round.
    async fn take_all(&self, call: &Call, request: &AcquireRequest, keys: &Arc<Keys>) -> Votes<Taken> {
        // Also where nobody has a majority: a server that is silent is not worth more than another try.
        let quorum = self.quorum();
        let enough = |votes: &Votes<Taken>| votes.iter().filter(|(_, vote)| vote.is_ok()).count() >= quorum;
        // Who connects only when the round is over does not take part: nobody would know of it.
        let round = Round::default();
        let over = round.0.clone();
        ask(call, half(call), JOINING, self.all(), enough, |member| {
            let (call, request, keys, over) = (call.clone(), request.clone(), keys.clone(), over.clone());
            async move { take_on(&member, &call, &request, &keys, &over).await }
        })
        .await
    }

    /// The second round, on the servers where the lock is ours; `None`: it found no majority, and reached none.
    ///
    /// # Errors
    /// `Unknown`: it may have.
    async fn settle_all(
        &self,
        call: &Call,
        request: &AcquireRequest,
        keys: &Arc<Keys>,
        ours: &[usize],
        mut fence: i64,
    ) -> Result<Option<(Moment, Fence)>> {
        let quorum = self.quorum();
        for _ in 0..RAISES {
            if fence >= FENCE_LIMIT {
                return Err(wire::full());
            }
            if call.remaining().is_zero() {
                break;
            }
            let sent = call.now();
            let yes = |votes: &Votes<Settled>| {
                votes.iter().filter(|(_, vote)| matches!(vote, Ok(Settled::Yes))).count()
            };
            let members = ours.iter().map(|at| self.members[*at].clone());
            let votes = ask(
                call,
                half(call),
                GRACE,
                members,
                |votes| yes(votes) >= quorum,
                |member| {
                    let (call, owner, ttl) = (call.clone(), *request.owner(), request.ttl());
                    let (keys, margin) = (keys.clone(), self.config.fence_margin);
                    async move {
                        let request = steps::settling(&keys, &owner, fence, ttl, margin);
                        let (_, answer) = member.ask(&call, &SETTLE, &request).await?;
                        Settled::read(&answer)
                    }
                },
            );
            let votes = votes.await;
            if yes(&votes) >= quorum {
                return Ok(Some((sent, Fence::new(fence)?)));
            }
            let low = votes.iter().filter_map(|(_, vote)| match vote {
                Ok(Settled::Low(high)) => Some(*high),
                _ => None,
            });
            let missing = ours.len() - votes.len();
            let lost = votes.iter().filter(|(_, vote)| matches!(vote, Err(e) if !e.kind().had_no_effect()));
            match low.max() {
                Some(high) => fence = high + 1,
                None if yes(&votes) + missing + lost.count() >= quorum => {
                    return Err(Error::new(
                        ErrorKind::Unknown,
                        "a majority may have settled the fence, but did not say so in time",
                    ));
                }
                None => break,
            }
        }
        Ok(None)
    }

    /// Takes back what the first round took where it was answered, so that others need not wait for its end. Leaves no mark:
    /// the acquisition may be asked for again.
    ///
    /// It may arrive late, when that was granted. So it ends no lock with a fence: one that a minority has settled ends with
    /// its TTL, and leaves a majority to others.
    async fn clean_up(&self, call: &Call, owner: &Owner, keys: &Arc<Keys>, ours: &[usize]) {
        let members = ours.iter().map(|at| self.members[*at].clone());
        let enough = |_: &Votes<bool>| false;
        ask(call, half(call), GRACE, members, enough, |member| {
            let (call, owner, keys) = (call.clone(), *owner, keys.clone());
            async move { give_back(&member, &call, &owner, &keys, Back::Begun).await }
        })
        .await;
    }

    /// Tells servers off that have a request of this acquisition which they did not answer. Nobody waits for them: without
    /// the second round what they may yet take is no grant, and ends with the TTL.
    fn tell_off(&self, call: &Call, owner: &Owner, keys: &Arc<Keys>) {
        for member in self.all().filter(|member| member.known.operations.in_doubt(owner).is_some()) {
            let (call, owner, keys) = (call.clone(), *owner, keys.clone());
            tokio::spawn(async move { give_back(&member, &call, &owner, &keys, Back::InDoubt).await });
        }
    }

    /// Asks all servers once.
    /// `since`: from when the deadline counts at the latest, for a try.
    async fn attempt(
        &self,
        call: &Call,
        request: &AcquireRequest,
        keys: &Arc<Keys>,
        since: Moment,
    ) -> Result<Attempt> {
        let owner = request.owner();
        let now = call.now();
        let votes = self.take_all(call, request, keys).await;
        if let Err(error) = self.are_different() {
            self.cancel(call, request).await?;
            return Err(error);
        }

        let mut ours = Vec::new();
        let mut before: Vec<(i64, Duration)> = Vec::new();
        let (mut highest, mut settled, mut clock) = (0, 0, 0);
        let mut held: Vec<(Option<&Shown>, Duration, u64)> = Vec::new();
        for (at, vote) in &votes {
            match vote {
                Ok(Taken::Ours { high, own, settled: is_settled, left, us }) => {
                    ours.push(*at);
                    before.extend(own.map(|fence| (fence.get(), *left)));
                    settled = settled.max(own.map_or(0, Fence::get));
                    highest = highest.max(if *is_settled { 0 } else { *high });
                    clock = clock.max(i64::try_from(*us).unwrap_or(i64::MAX));
                }
                Ok(Taken::Held { shown, left, us }) => held.push((shown.as_ref(), *left, *us)),
                Ok(Taken::Late | Taken::Over) | Err(_) => {}
            }
        }
        // It was granted to an earlier request: the same is told again, with what is left.
        let mut lefts: Vec<Duration> =
            before.iter().filter(|(fence, _)| *fence == settled).map(|(_, left)| *left).collect();
        if let Some(at) = lefts.len().checked_sub(self.quorum()) {
            lefts.sort_unstable();
            let left = lefts[at].saturating_sub(TIMERS);
            return request.granted(call, now.min(since), left, Fence::new(settled)?).map(Attempt::Granted);
        }
        if ours.len() >= self.quorum() {
            let floor = request.floor().map_or(0, Fence::get);
            // A fence of an earlier request serves as well, unless somebody came between.
            let fence = match settled > highest.max(floor) {
                true => settled,
                false => (highest + 1).max(settled + 1).max(floor + 1).max(clock),
            };
            match self.settle_all(call, request, keys, &ours, fence).await {
                Ok(Some((sent, fence))) => {
                    let left = request.ttl().saturating_sub(TIMERS);
                    match request.granted(call, sent.min(since), left, fence) {
                        Ok(lease) => return Ok(Attempt::Granted(lease)),
                        // It is on record; who asked gives it back, or asks again.
                        Err(error) => return Err(error),
                    }
                }
                Ok(None) => {}
                // It may be settled on a majority.
                Err(error) if !error.kind().had_no_effect() => return Err(error),
                Err(error) => {
                    self.clean_up(call, owner, keys, &ours).await;
                    return Err(error);
                }
            }
        }

        self.clean_up(call, owner, keys, &ours).await;
        let holder = self.holder_of(&held);
        let mut ends: Vec<Duration> = held.iter().map(|(_, left, _)| *left).collect();
        ends.sort_unstable();
        // When so many leases have ended that a majority can be had; not before the next look, where servers are away.
        let needed = self.quorum().saturating_sub(votes.len() - held.len()).saturating_sub(1);
        let ends = ends.get(needed).map(|left| now.saturating_add(*left));
        if held.len() >= self.veto() {
            // Nobody else can have a majority where several have parts of it.
            let split = holder.is_none() && held.iter().all(|(shown, ..)| shown.is_some());
            return Ok(if split { Attempt::Split } else { Attempt::Held { holder, ends } });
        }
        if !held.is_empty() && ours.len() + held.len() >= self.quorum() {
            return Ok(Attempt::Split);
        }
        let over = votes.iter().filter(|(_, vote)| matches!(vote, Ok(Taken::Over))).count();
        if over >= self.veto() {
            return Err(Error::new(
                ErrorKind::Unavailable,
                "this acquisition was given up before it arrived",
            ));
        }
        let late = votes.iter().filter(|(_, vote)| matches!(vote, Ok(Taken::Late))).count();
        if late >= self.veto() {
            let ended = request.wait_until().is_some_and(|end| call.now() >= end);
            return Err(match ended {
                true => Error::held_by(ErrorKind::WaitTimeout, None),
                false => Error::new(ErrorKind::Unavailable, "the request reached the servers after its time"),
            });
        }
        Err(self.too_few(&votes, self.quorum()))
    }

    /// Names who has a majority, of what servers show.
    fn holder_of(&self, held: &[(Option<&Shown>, Duration, u64)]) -> Option<Holder> {
        let shown = held.iter().filter_map(|(shown, left, us)| Some(((*shown)?, *left, *us)));
        let shown: Vec<_> =
            shown.filter_map(|(shown, left, us)| Some((shown, shown.fence?, left, us))).collect();
        shown.iter().find_map(|(candidate, fence, _, us)| {
            let mut lefts: Vec<Duration> = shown
                .iter()
                .filter(|(shown, other, ..)| shown.owner == candidate.owner && other == fence)
                .map(|(_, _, left, _)| *left)
                .collect();
            // Who is seen on a veto holds, as far as these servers can tell: the others did not answer.
            if lefts.len() < self.veto() {
                return None;
            }
            lefts.sort_unstable();
            let left = lefts[lefts.len() - self.veto()];
            Some(Holder::new(candidate.owner.digest(), *fence, left).with(|holder| {
                holder.since = Some(Duration::from_micros(us.saturating_sub(candidate.since)));
                holder.label.clone_from(&candidate.label);
            }))
        })
    }

    async fn take(&self, call: &Call, request: &AcquireRequest) -> Result<Lease> {
        let keys = Arc::new(Keys::new(call.namespace(), request.name()));
        let mut doubt = false;
        let taken = self.take_in_turns(call, request, &keys, &mut doubt).await;
        let taken = taken.map_err(|error| if doubt { in_doubt(error) } else { error });
        // Who is told that it may be granted settles it, and others on the way.
        if taken.as_ref().is_err_and(|error| error.kind().had_no_effect()) {
            self.tell_off(call, request.owner(), &keys);
        }
        taken
    }

    /// `doubt`: a round went unanswered on the way, and what comes at the end does not speak for it.
    async fn take_in_turns(
        &self,
        call: &Call,
        request: &AcquireRequest,
        keys: &Arc<Keys>,
        doubt: &mut bool,
    ) -> Result<Lease> {
        self.check_ttl(request.ttl())?;
        if let Some(floor) = request.floor() {
            check_floor(floor)?;
        }
        let mut spread = request.owner().digest().to_i64() as u64;
        let mut splits = 0;
        // A try is one request to who asks for it, whatever it takes here; a waiter knows that it is many.
        let since = if request.wait_until().is_none() { call.now() } else { Moment::MAX };
        let mut waited = false;
        loop {
            let begun = call.now();
            let attempt = self.attempt(call, request, keys, since).await;
            let (holder, ends, split, error) = match attempt {
                Ok(Attempt::Granted(lease)) => return Ok(lease),
                Ok(Attempt::Held { holder, ends }) => (holder, ends, false, None),
                Ok(Attempt::Split) => (None, None, true, None),
                // A waiter asks so often that a line which is torn down is torn down under a request: it asks again.
                Err(error)
                    if waited
                        && matches!(error.kind(), ErrorKind::Unknown | ErrorKind::Unavailable)
                        && call.remaining() > self.config.poll =>
                {
                    *doubt |= error.kind() == ErrorKind::Unknown;
                    (None, None, false, Some(error))
                }
                Err(error) => return Err(error),
            };
            waited = true;
            spread = spread.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let jitter = |most: Duration| most.mul_f64((spread >> 40) as f64 / (1u64 << 24) as f64);
            let now = call.now();
            // Those who met leave each other room, more each time.
            splits = if split { splits + 1 } else { 0 };
            let took = begun.until(now).max(Duration::from_millis(2));
            let nap = match split {
                true => jitter(took * 2u32.pow(splits.min(6))).min(self.config.poll),
                false => self.config.poll.mul_f64(0.5) + jitter(self.config.poll.mul_f64(0.5)),
            };
            let after_end = Duration::from_millis(1) + jitter(Duration::from_millis(4));
            let wake =
                ends.map_or(Moment::MAX, |ends| ends.saturating_add(after_end)).min(now.saturating_add(nap));
            let Some(end) = request.wait_until() else {
                if split && splits <= SPLITS && wake.saturating_add(took * 2) < call.deadline() {
                    call.clock().sleep_until(wake).await;
                    continue;
                }
                return Err(Error::held_by(ErrorKind::Held, holder));
            };
            // A round that cannot be over in time would only put in doubt what the last one has seen.
            let room = TOO_LATE.max(took * 2);
            let timed_out = |now: Moment| now.saturating_add(room) >= end;
            let is_last = timed_out(now) || timed_out(wake);
            call.clock().sleep_until(if is_last { end } else { wake }).await;
            if is_last {
                return Err(error.unwrap_or_else(|| Error::held_by(ErrorKind::WaitTimeout, holder)));
            }
        }
    }

    fn check_ttl(&self, ttl: Duration) -> Result<()> {
        check_ttl(ttl)?;
        let delay = self.config.restart_delay;
        if delay.is_zero() || ttl <= delay {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Invalid,
            format!("a TTL is no longer than the restart_delay here, {delay:?}, not {ttl:?}"),
        ))
    }

    /// Judges what all servers say about one holding.
    fn judge<T>(&self, call: &Call, lease: &Lease, votes: Votes<Standing<T>>) -> Result<Vec<T>> {
        let mut ours = Vec::new();
        let (mut no, mut broken) = (0, false);
        let mut others: Votes<()> = Vec::new();
        for (at, vote) in votes {
            others.push((
                at,
                vote.map(|standing| match standing {
                    Standing::Ours(found) => ours.push(found),
                    Standing::Broken => (no, broken) = (no + 1, true),
                    Standing::Taken | Standing::None => no += 1,
                }),
            ));
        }
        if ours.len() >= self.quorum() {
            return Ok(ours);
        }
        if no >= self.veto() {
            return Err(Error::lost(match broken {
                true => LostReason::Broken,
                false if call.now() >= lease.deadline => LostReason::Expired,
                false => LostReason::Taken,
            }));
        }
        // Some did it, perhaps.
        let error = self.too_few(&others, self.quorum());
        Err(match error.kind() {
            ErrorKind::Unavailable if !ours.is_empty() => {
                Error::new(ErrorKind::Unknown, error.message().to_owned())
            }
            _ => error,
        })
    }

    /// Makes sure that an acquisition is granted on no majority, now and later.
    async fn cancel(&self, call: &Call, request: &AcquireRequest) -> Result<()> {
        let keys = Arc::new(Keys::new(call.namespace(), request.name()));
        let votes = self.on_all(
            call,
            |_| Some(true),
            |member, call| {
                let (owner, ttl, keys) = (*request.owner(), request.ttl(), keys.clone());
                async move {
                    let (_, found) = cancel_on(&member, &call, &owner, ttl, &keys, false).await?;
                    member.known.operations.forget(&owner);
                    Ok(found)
                }
            },
        );
        let votes = votes.await;
        let gone = votes.iter().filter(|(_, vote)| vote.is_ok()).count();
        if gone >= self.veto() { Ok(()) } else { Err(self.too_few(&votes, self.veto())) }
    }

    async fn settle(&self, call: &Call, request: &AcquireRequest) -> Result<Option<Lease>> {
        let keys = Arc::new(Keys::new(call.namespace(), request.name()));
        // A fence that reached only some is to be seen, if it can be: it may yet reach the others.
        let says = |(_, found): &(u64, Found)| match found {
            Some((Some(_), _)) => Some(true),
            Some((None, _)) => None,
            None => Some(false),
        };
        let sent = call.now();
        let votes = self.on_all_within(call, half(call), says, |member, call| {
            let (owner, ttl, keys) = (*request.owner(), request.ttl(), keys.clone());
            async move { cancel_on(&member, &call, &owner, ttl, &keys, true).await }
        });
        let votes = votes.await;
        let clock = votes.iter().filter_map(|(_, vote)| i64::try_from(vote.as_ref().ok()?.0).ok()).max();
        let ours: Vec<(usize, Option<Fence>, Duration)> = votes
            .iter()
            .filter_map(|(at, vote)| {
                let (fence, left) = vote.as_ref().ok()?.1?;
                Some((*at, fence, left))
            })
            .collect();
        let settled = ours.iter().filter_map(|(_, fence, _)| *fence).max();
        let mut lefts: Vec<Duration> = ours
            .iter()
            .filter(|(_, fence, _)| fence.is_some() && *fence == settled)
            .map(|(_, _, left)| *left)
            .collect();
        if let (Some(fence), Some(at)) = (settled, lefts.len().checked_sub(self.quorum())) {
            lefts.sort_unstable();
            return request.granted(call, sent, lefts[at].saturating_sub(TIMERS), fence).map(Some);
        }
        if ours.len() >= self.quorum() {
            // It is finished, with the fence that some may have already.
            let floor = request.floor().map_or(0, |floor| floor.get() + 1);
            let fence = settled.map_or_else(|| floor.max(clock.unwrap_or(1)), Fence::get);
            let ours: Vec<usize> = ours.iter().map(|(at, ..)| *at).collect();
            if let Some((_, fence)) = self.settle_all(call, request, &keys, &ours, fence).await? {
                return request.granted(call, sent, request.ttl().saturating_sub(TIMERS), fence).map(Some);
            }
        }
        self.cancel(call, request).await.map(|()| None)
    }
}

/// The first round of one attempt; over when this is dropped.
#[derive(Default)]
struct Round(Arc<AtomicBool>);

impl Drop for Round {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// The rounds one by one, as requests that were held up may arrive.
#[cfg(test)]
impl RedlockBackend {
    /// Says on how many servers the first round takes the lock.
    pub(crate) async fn first_round(&self, call: &Call, request: &AcquireRequest) -> usize {
        let keys = Keys::new(call.namespace(), request.name());
        let mut ours = 0;
        for member in &self.members {
            let taken = take_on(member, call, request, &keys, &AtomicBool::new(false)).await.unwrap();
            ours += usize::from(matches!(taken, Taken::Ours { .. }));
        }
        ours
    }

    /// Returns what the second round finds on each server that does not settle: a fence that is not below, or not the
    /// owner's lock.
    pub(crate) async fn second_round(
        &self,
        call: &Call,
        request: &AcquireRequest,
        fence: i64,
    ) -> Vec<Option<i64>> {
        let keys = Keys::new(call.namespace(), request.name());
        let mut found = Vec::new();
        for member in &self.members {
            let (ttl, margin) = (request.ttl(), self.config.fence_margin);
            let settling = steps::settling(&keys, request.owner(), fence, ttl, margin);
            let (_, answer) = member.ask(call, &SETTLE, &settling).await.unwrap();
            match Settled::read(&answer).unwrap() {
                Settled::Yes => {}
                Settled::NotOurs => found.push(None),
                Settled::Low(high) => found.push(Some(high)),
            }
        }
        found
    }

    /// Says on how many servers a request of this acquisition has no answer.
    pub(crate) fn in_doubt(&self, owner: &Owner) -> usize {
        self.members.iter().filter(|member| member.known.operations.in_doubt(owner).is_some()).count()
    }

    /// Takes back on every server what the first round took there, as a clean-up that comes late.
    pub(crate) async fn clean_up_late(&self, call: &Call, owner: &Owner, name: &LockName) {
        let keys = Arc::new(Keys::new(call.namespace(), name));
        let all: Vec<usize> = (0..self.members.len()).collect();
        self.clean_up(call, owner, &keys, &all).await;
        for member in &self.members {
            give_back(member, call, owner, &keys, Back::InDoubt).await.unwrap();
        }
    }

    /// Tells one server off.
    pub(crate) async fn tell_off_on(&self, call: &Call, at: usize, request: &AcquireRequest) {
        let keys = Keys::new(call.namespace(), request.name());
        cancel_on(&self.members[at], call, request.owner(), request.ttl(), &keys, false).await.unwrap();
    }
}

enum Attempt {
    Granted(Lease),
    Held {
        holder: Option<Holder>,
        ends: Option<Moment>,
    },
    /// Nobody has a majority.
    Split,
}

/// Leaves as much time as it takes: for another round, and for taking back what was taken.
fn half(call: &Call) -> Duration {
    call.exchange_timeout().min(call.remaining() / 2)
}

/// What is given back on one server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Back {
    /// What the first round took.
    Begun,
    /// The same, and what of it is still under way takes nothing later.
    InDoubt,
    /// Whatever the owner has, for good.
    All,
}

/// Ends what an owner has on one server; says whether it had.
async fn give_back(member: &Member, call: &Call, owner: &Owner, keys: &Keys, back: Back) -> Result<bool> {
    let own = format!("{}|{}", hex(owner), if back == Back::All { "" } else { "0|" });
    let in_doubt = member.known.operations.in_doubt(owner).filter(|_| back != Back::Begun);
    let request = wire::giving_back(keys, owner, own, in_doubt);
    let (_, answer) = member.ask(call, &RELEASE, &request).await?;
    if back != Back::Begun {
        member.known.operations.forget(owner);
    }
    Ok(answer.int(0)? == 1)
}

/// The first round on one server; `over`: too late for it.
async fn take_on(
    member: &Member,
    call: &Call,
    request: &AcquireRequest,
    keys: &Keys,
    over: &AtomicBool,
) -> Result<Taken> {
    let owner = request.owner();
    let mut corrected = false;
    loop {
        let link = member.link(call).await?;
        let now = call.now();
        member.check_ready(now)?;
        let operations = &member.known.operations;
        // No copy runs after the call, nor after the end of what an earlier copy may have taken here. When
        // that is past, none is under way any more.
        let mut first = operations.first_unanswered(owner, now);
        if now >= first.saturating_add(request.ttl()) {
            operations.forget(owner);
            first = now;
        }
        let last = first.saturating_add(request.ttl());
        let not_after = link.server_time(last.min(call.deadline()));
        let hex = hex(owner);
        let gone = keys.gone(&hex);
        let args: [&[u8]; 4] = [
            hex.as_bytes(),
            &decimal(millis(request.ttl())),
            &decimal(not_after),
            request.label().unwrap_or_default().as_bytes(),
        ];
        operations.sends(owner, now, request.ttl(), not_after);
        // After it was noted: either this sees that the round is over, or who clears up sees the note.
        if over.load(Ordering::SeqCst) {
            operations.answered(owner);
            return Err(Error::new(ErrorKind::Unavailable, "the server was not connected to in time"));
        }
        let keys: [&str; 3] = [&keys.lock, &keys.fence, &gone];
        let answer = member.run_on(&link, call, &TAKE, &keys, &args).await;
        if !matches!(&answer, Err(error) if !error.kind().had_no_effect()) {
            operations.answered(owner);
        }
        match Taken::read(&answer?.1)? {
            // The answer corrected the estimate of its clock. It did nothing.
            Taken::Late if !corrected && call.now() < last.min(call.deadline()) => corrected = true,
            taken => return Ok(taken),
        }
    }
}

/// Ends an acquisition on one server, or tells what it has there; and that server's time.
async fn cancel_on(
    member: &Member,
    call: &Call,
    owner: &Owner,
    ttl: Duration,
    keys: &Keys,
    adopt: bool,
) -> Result<(u64, Found)> {
    let request = wire::cancelling(keys, owner, adopt, member.known.operations.in_doubt(owner), ttl);
    let (_, answer) = member.ask(call, &CANCEL, &request).await?;
    Ok((answer.us, steps::read_found(&answer)?))
}

#[async_trait]
impl LockBackend for RedlockBackend {
    fn capabilities(&self) -> Capabilities {
        let keeps = self.members.iter().all(|member| !member.known.learnt.forgets());
        let delay = self.config.restart_delay;
        let day = Duration::from_secs(86_400);
        Capabilities::weakest(BACKEND).with(|c| {
            c.survives.restart = keeps || !delay.is_zero();
            c.survives.failover = true;
            c.survives.pause = true;
            // Servers that forget are not a majority that stands by its word.
            c.consistency = match c.survives.restart {
                true => Consistency::SingleServer,
                false => Consistency::Replicated,
            };
            c.fence = FenceSource::ClockBounded;
            c.wake_up = WakeUp::Poll;
            c.ttl = Duration::from_millis(20)..=if delay.is_zero() { day } else { delay.min(day) };
            c.ttl_step = Duration::from_millis(1);
            c.fence_floor = true;
            c.labels = true;
            c.lock_delay = true;
            c.renew_batch = RENEW_BATCH;
        })
    }

    async fn acquire(&self, call: &Call, request: &AcquireRequest) -> Result<Lease> {
        let acquired = self.take(call, request).await;
        acquired.map_err(|e| e.about(Verb::Acquire, Some(request.name()), BACKEND))
    }

    async fn renew(&self, call: &Call, lease: &Lease, ttl: Duration) -> Result<Lease> {
        let renewed = async {
            self.check_ttl(ttl)?;
            let sent = call.now();
            let votes = self.on_all(
                call,
                |standing: &Standing<_>| Some(matches!(standing, Standing::Ours(_))),
                |member, call| {
                    let keys = Keys::new(call.namespace(), &lease.name);
                    let renewal = wire::renewal(keys, &lease.owner, lease.fence, ttl, false);
                    async move {
                        let (_, answer) = member.ask(&call, &wire::RENEW, &renewal).await?;
                        wire::read_renewal(&answer)
                    }
                },
            );
            self.judge(call, lease, votes.await)?;
            Ok(call.renewed(lease, sent, ttl.saturating_sub(TIMERS)))
        };
        renewed.await.map_err(|e: Error| e.about(Verb::Renew, Some(&lease.name), BACKEND))
    }

    async fn release(&self, call: &Call, lease: &Lease) -> Result<Released> {
        let released = async {
            let keys = Arc::new(Keys::new(call.namespace(), &lease.name));
            let votes = self.on_all(
                call,
                |ended: &bool| Some(*ended),
                |member, call| {
                    let (owner, keys) = (lease.owner, keys.clone());
                    async move { give_back(&member, &call, &owner, &keys, Back::All).await }
                },
            );
            let votes = votes.await;
            let answered = votes.iter().filter(|(_, vote)| vote.is_ok()).count();
            if answered < self.veto() {
                return Err(self.too_few(&votes, self.veto()));
            }
            let ended = votes.iter().filter(|(_, vote)| matches!(vote, Ok(true))).count();
            Ok(if ended >= self.quorum() { Released::Now } else { Released::AlreadyOver })
        };
        released.await.map_err(|e: Error| e.about(Verb::Release, Some(&lease.name), BACKEND))
    }

    async fn resolve(&self, call: &Call, request: &AcquireRequest) -> Result<Resolution> {
        let settled = self.settle(call, request).await;
        let found = settled.map_err(|e| e.about(Verb::Resolve, Some(request.name()), BACKEND))?;
        Ok(found.map_or(Resolution::Gone, Resolution::Adopted))
    }

    async fn inspect(&self, call: &Call, name: &LockName) -> Result<LockState> {
        let looked = async {
            let seen = self.look(call, name).await?;
            let foreigners = seen.iter().filter(|(_, seen)| seen.held && seen.shown.is_none()).count();
            if foreigners >= self.veto() {
                return Err(foreign());
            }
            let held: Vec<_> =
                seen.iter().map(|(_, seen)| (seen.shown.as_ref(), seen.left, seen.us)).collect();
            Ok(LockState::default().with(|state| {
                state.holder = self.holder_of(&held);
                state.last_fence = seen.iter().filter_map(|(_, seen)| Fence::new(seen.high).ok()).max();
            }))
        };
        looked.await.map_err(|e: Error| e.about(Verb::Inspect, Some(name), BACKEND))
    }

    async fn abandon(&self, call: &Call, request: &AcquireRequest) -> Result<()> {
        self.cancel(call, request).await.map_err(|e| e.about(Verb::Resolve, Some(request.name()), BACKEND))
    }

    async fn preflight(&self, call: &Call) -> Result<Preflight> {
        let looked = async {
            self.meet(call).await?;
            let mut preflight = Preflight::clean(self.capabilities().with(|c| {
                c.survives.restart = true;
                c.consistency = Consistency::SingleServer;
            }));
            let mut clocks = Vec::new();
            for member in &self.members {
                let config = &self.config.servers[member.at];
                let delayed = !self.config.restart_delay.is_zero();
                let looked = preflight::look_at_member(
                    call,
                    config,
                    &member.node,
                    &member.known.learnt,
                    delayed,
                    &mut preflight,
                );
                match looked.await {
                    Ok(us) => clocks.push((member.node.name(), us)),
                    Err(error) => preflight.findings.push(format!(
                        "{} cannot be looked at ({}); one more that is away may be one too many",
                        member.node.name(),
                        error.message()
                    )),
                }
            }
            if !preflight.capabilities.survives.restart {
                preflight.capabilities.consistency = Consistency::Replicated;
            }
            preflight::judge_clocks_of_members(&mut preflight, &clocks);
            Ok(preflight)
        };
        looked.await.map_err(|e: Error| e.about(Verb::Preflight, None, BACKEND))
    }

    async fn renew_many(&self, call: &Call, leases: &[Lease], ttl: Duration) -> Vec<Result<Lease>> {
        let mut answers = Vec::with_capacity(leases.len());
        for batch in leases.chunks(RENEW_BATCH) {
            answers.extend(self.renew_batch(call, batch, ttl).await);
        }
        answers
    }

    async fn raise(&self, call: &Call, lease: &Lease, floor: Fence) -> Result<()> {
        let raised = async {
            check_floor(floor)?;
            let votes = self.raise_on_all(call, &lease.name, &lease.owner, lease.fence, floor).await;
            self.judge(call, lease, votes).map(drop)
        };
        raised.await.map_err(|e: Error| e.about(Verb::Raise, Some(&lease.name), BACKEND))
    }

    async fn raise_fence(&self, call: &Call, name: &LockName, floor: Fence) -> Result<Fence> {
        let raised = async {
            check_floor(floor)?;
            self.raise_for_all(call, name, floor).await
        };
        raised.await.map_err(|e: Error| e.about(Verb::Raise, Some(name), BACKEND))
    }

    async fn high_water(&self, call: &Call) -> Result<Option<Fence>> {
        let looked = async {
            let votes = self.on_all(
                call,
                |_| Some(true),
                |member, call| async move {
                    let link = member.link(&call).await?;
                    wire::highest_fence(&link, &call, &Keys::fences(call.namespace())).await
                },
            );
            let votes = votes.await;
            let highest: Vec<i64> =
                votes.iter().filter_map(|(_, vote)| vote.as_ref().ok().copied()).collect();
            // Each majority that granted one has a server among so many.
            if highest.len() < self.veto() {
                return Err(self.too_few(&votes, self.veto()));
            }
            highest.into_iter().max().map(Fence::new).transpose()
        };
        looked.await.map_err(|e: Error| e.about(Verb::Migrate, None, BACKEND))
    }

    /// Raises the fence above the holder's on a majority while that holder still keeps others out, and then ends it.
    async fn break_lock(&self, call: &Call, name: &LockName, expect: Option<Stamp>) -> Result<Broken> {
        let broken = async {
            let seen = self.look(call, name).await?;
            let held: Vec<_> =
                seen.iter().map(|(_, seen)| (seen.shown.as_ref(), seen.left, seen.us)).collect();
            if seen.iter().filter(|(_, seen)| seen.held && seen.shown.is_none()).count() >= self.veto() {
                return Err(foreign());
            }
            let holder = self.holder_of(&held);
            if let (Some(expect), Some(holder)) = (expect, &holder)
                && holder.stamp() != expect
            {
                return Err(Error::held_by(ErrorKind::Held, Some(holder.clone())));
            }
            let highest = seen.iter().map(|(_, seen)| seen.high).max().unwrap_or(0);
            let clock = seen.iter().filter_map(|(_, seen)| i64::try_from(seen.us).ok()).max().unwrap_or(0);
            let floor = Fence::new((highest + 1).max(clock))?;
            check_floor(floor)?;
            let Some(held_by) = &holder else {
                return self.raise_for_all(call, name, floor).await.map(|floor| Broken::new(None, floor));
            };
            let shown = held.iter().find_map(|(shown, ..)| {
                shown.filter(|shown| {
                    shown.owner.digest() == held_by.owner && shown.fence == Some(held_by.fence)
                })
            });
            let Some(owner) = shown.map(|shown| shown.owner) else {
                return Err(Error::new(ErrorKind::Unavailable, "the holder changed while it was looked at"));
            };
            let votes = self.raise_on_all(call, name, &owner, held_by.fence, floor).await;
            let raised = votes.iter().filter(|(_, vote)| matches!(vote, Ok(Standing::Ours(())))).count();
            if raised < self.quorum() {
                // A number is used up on some; the holder still is the holder.
                return Err(match self.too_few(&votes, self.quorum()) {
                    error if error.kind().had_no_effect() => error,
                    error => Error::new(ErrorKind::Unknown, error.message().to_owned()),
                });
            }
            let keys = Arc::new(Keys::new(call.namespace(), name));
            let fence = held_by.fence;
            let votes = self.on_all(
                call,
                |_| Some(true),
                |member, call| {
                    let keys = keys.clone();
                    async move {
                        let own = wire::own(&owner, fence);
                        let gone = keys.gone(&hex(&owner));
                        let names: [&str; 3] = [&keys.lock, &gone, &keys.none()];
                        member.run(&call, &CUT, &names, &[own.as_bytes()]).await.map(drop)
                    }
                },
            );
            let votes = votes.await;
            if votes.iter().filter(|(_, vote)| vote.is_ok()).count() < self.veto() {
                return Err(Error::new(
                    ErrorKind::Unknown,
                    "the fence was raised, but the holder may still be on record",
                ));
            }
            Ok(Broken::new(holder, floor))
        };
        broken.await.map_err(|e: Error| e.about(Verb::Break, Some(name), BACKEND))
    }

    async fn list(
        &self,
        call: &Call,
        prefix: Option<&LockName>,
        after: Option<&LockName>,
    ) -> Result<Vec<LockName>> {
        let listed = async {
            let votes = self.on_all(
                call,
                |_| Some(true),
                |member, call| {
                    let (prefix, after) = (prefix.cloned(), after.cloned());
                    async move {
                        let link = member.link(&call).await?;
                        let mut page = BTreeSet::new();
                        wire::names(&link, &call, prefix.as_ref(), after.as_ref(), &mut page).await?;
                        Ok(page)
                    }
                },
            );
            let votes = votes.await;
            if votes.iter().filter(|(_, vote)| vote.is_ok()).count() < self.veto() {
                return Err(self.too_few(&votes, self.veto()));
            }
            let all: BTreeSet<LockName> =
                votes.into_iter().filter_map(|(_, vote)| vote.ok()).flatten().collect();
            Ok(all.into_iter().take(LIST_PAGE).collect())
        };
        listed.await.map_err(|e: Error| e.about(Verb::List, None, BACKEND))
    }

    async fn second_connection(&self, call: &Call) -> Result<Option<Arc<dyn LockBackend>>> {
        let known = self.members.iter().map(|member| member.known.clone()).collect();
        let second = Self::sharing(self.config.clone(), known);
        second.meet(call).await.map_err(connecting)?;
        Ok(Some(Arc::new(second)))
    }

    async fn close(&self) {
        for member in &self.members {
            member.node.close();
        }
    }

    fn unsupported(&self, verb: Verb) -> Error {
        Error::new(
            ErrorKind::Unsupported,
            "several servers that decide together keep no phases of a migration; locks move between a single server, one \
             with replicas, a Cluster and other stores",
        )
        .about(verb, None, BACKEND)
    }
}

impl RedlockBackend {
    /// Renews in one round trip to each server.
    async fn renew_batch(&self, call: &Call, leases: &[Lease], ttl: Duration) -> Vec<Result<Lease>> {
        let again = |error: &Error| Error::new(error.kind(), error.message().to_owned());
        if let Err(error) = self.check_ttl(ttl) {
            let about = |lease: &Lease| again(&error).about(Verb::Renew, Some(&lease.name), BACKEND);
            return leases.iter().map(|lease| Err(about(lease))).collect();
        }
        let request = |lease: &Lease| {
            let keys = Keys::new(call.namespace(), &lease.name);
            wire::renewal(keys, &lease.owner, lease.fence, ttl, false)
        };
        let requests: Arc<Vec<_>> = Arc::new(leases.iter().map(request).collect());
        // Each lease for itself: a server that has lost one still speaks for the others.
        let enough = |votes: &Votes<Vec<Result<Standing<Duration>>>>| {
            (0..leases.len()).all(|n| {
                let answers = votes.iter().filter_map(|(_, vote)| vote.as_ref().ok()?.get(n)?.as_ref().ok());
                let ours: Vec<bool> = answers.map(|standing| matches!(standing, Standing::Ours(_))).collect();
                let yes = ours.iter().filter(|ours| **ours).count();
                yes >= self.quorum() || ours.len() - yes >= self.veto()
            })
        };
        let sent = call.now();
        let votes = ask(call, call.exchange_timeout(), GRACE, self.all(), enough, |member| {
            let (call, requests) = (call.clone(), requests.clone());
            async move {
                let link = member.link(&call).await?;
                let (_, replies) = link.scripts(&call, &wire::RENEW, &requests, None).await;
                let (replies, _) = replies.map_err(|refusal| error::error(Phase::Sent, refusal))?;
                let one = |reply| wire::read_renewal(&one_of_many(reply)?);
                Ok(replies.into_iter().map(one).collect::<Vec<_>>())
            }
        });
        let mut votes: Vec<(usize, Result<_>)> =
            votes.await.into_iter().map(|(at, vote)| (at, vote.map(Vec::into_iter))).collect();
        let renewed = leases.iter().map(|lease| {
            let own = votes.iter_mut().map(|(at, vote)| {
                let own = match vote {
                    Ok(standings) => standings.next().unwrap_or_else(|| Err(wire::unreadable())),
                    Err(error) => Err(again(error)),
                };
                (*at, own)
            });
            let own: Votes<Standing<Duration>> = own.collect();
            let judged = self.judge(call, lease, own);
            judged
                .map(|_| call.renewed(lease, sent, ttl.saturating_sub(TIMERS)))
                .map_err(|e| e.about(Verb::Renew, Some(&lease.name), BACKEND))
        });
        renewed.collect()
    }

    /// Asks all servers what they show; a majority must answer.
    async fn look(&self, call: &Call, name: &LockName) -> Result<Vec<(usize, Seen)>> {
        let keys = Arc::new(Keys::new(call.namespace(), name));
        let votes = self.on_all(
            call,
            |seen: &Seen| Some(seen.held),
            |member, call| {
                let keys = keys.clone();
                async move {
                    let (_, answer) = member.run(&call, &INSPECT, &[&keys.lock, &keys.fence], &[]).await?;
                    Seen::read(&answer)
                }
            },
        );
        let votes = votes.await;
        if votes.iter().filter(|(_, vote)| vote.is_ok()).count() < self.quorum() {
            return Err(self.too_few(&votes, self.quorum()));
        }
        Ok(votes.into_iter().filter_map(|(at, vote)| Some((at, vote.ok()?))).collect())
    }

    async fn raise_on_all(
        &self,
        call: &Call,
        name: &LockName,
        owner: &Owner,
        fence: Fence,
        floor: Fence,
    ) -> Votes<Standing<()>> {
        let keys = Arc::new(Keys::new(call.namespace(), name));
        self.on_all(
            call,
            |standing: &Standing<_>| Some(matches!(standing, Standing::Ours(_))),
            |member, call| {
                let (keys, owner, margin) = (keys.clone(), *owner, self.config.fence_margin);
                async move {
                    let request = wire::raising(&keys, &owner, fence, floor, margin);
                    let (_, answer) = member.ask(&call, &RAISE, &request).await?;
                    Standing::read(&answer, || Ok(()))
                }
            },
        )
        .await
    }

    async fn raise_for_all(&self, call: &Call, name: &LockName, floor: Fence) -> Result<Fence> {
        let keys = Arc::new(Keys::new(call.namespace(), name));
        let votes = self.on_all(
            call,
            |_| Some(true),
            |member, call| {
                let (keys, margin) = (keys.clone(), self.config.fence_margin);
                async move {
                    let request = wire::raising_fence(&keys, floor, margin);
                    let (_, answer) = member.ask(&call, &RAISE_FENCE, &request).await?;
                    wire::read_raised(&answer)
                }
            },
        );
        let votes = votes.await;
        let raised: Vec<Fence> = votes.iter().filter_map(|(_, vote)| vote.as_ref().ok().copied()).collect();
        if raised.len() < self.quorum() {
            return Err(match self.too_few(&votes, self.quorum()) {
                // Some did it.
                error if error.kind() == ErrorKind::Unavailable && !raised.is_empty() => {
                    Error::new(ErrorKind::Unknown, error.message().to_owned())
                }
                error => error,
            });
        }
        Ok(raised.into_iter().max().unwrap_or(floor))
    }
}

impl fmt::Debug for RedlockBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedlockBackend").field("config", &self.config).finish_non_exhaustive()
    }
}
