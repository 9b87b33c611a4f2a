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

use std::{collections::BTreeSet, fmt, sync::Arc, time::Duration};

use lockcore::backend::*;

use crate::{
    backend::{check_floor, check_ttl, foreign},
    config::{RedisConfig, misconfigured},
    connection::connecting,
    error::{self, Phase},
    preflight,
    road::{Node, one_of_many},
    wire::{self, INSPECT, Keys, RAISE, RAISE_FENCE, Standing, hex},
};

mod acquire;
mod config;
mod members;
mod rounds;
mod steps;

pub use config::RedlockConfig;

use members::{Known, Member, Votes, ask};
use rounds::{Back, give_back};
use steps::{CUT, Seen, Shown, too_few};

const BACKEND: &str = "redlock";
/// What clocks of servers are granted beyond the drift, for the granularity of their timers.
const TIMERS: Duration = Duration::from_millis(2);
/// Whoever answers so much later than the others is waited for.
const GRACE: Duration = Duration::from_millis(5);
const LIST_PAGE: usize = 1000;
const RENEW_BATCH: usize = 512;

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
