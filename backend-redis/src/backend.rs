//! The verbs, in the order of the trait.

use std::{collections::BTreeSet, fmt, sync::Arc, time::Duration};

use lockcore::backend::*;

use crate::{
    config::{Address, RedisConfig},
    connection::connecting,
    greeting::Learnt,
    operations::Operations,
    phases::{self, Joined, Memberships, PhaseKeys},
    preflight,
    replicas::Wait,
    road::{Road, Trip},
    wait::{Pushes, Waiter},
    wire::{self, Acquired, Ask, FENCE_LIMIT, Keys, Record, Standing},
};

pub(crate) const BACKEND: &str = "redis";
const TTL_STEP: Duration = Duration::from_millis(1);
const RENEW_BATCH: usize = 512;
/// So close to the end of a wait, no answer would come in time.
const TOO_LATE: Duration = Duration::from_millis(2);

/// Locks on Redis or Valkey, where one server decides about each lock: a single one, the master that Sentinels watch, or
/// the nodes of a Cluster. [`RedlockBackend`](crate::RedlockBackend) is for several that decide together.
///
/// # Shape
/// Three keys a lock under one hash tag; see the README.
///
/// # Units
/// TTLs are rounded up to the millisecond and end by the server's wall clock. Fences are microseconds since 1970, or one
/// more than the last.
///
/// # Example
/// ```no_run
/// use std::time::Duration;
/// use lockcore::LockClient;
/// use lockcore_redis::{RedisBackend, RedisConfig};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockcore::Result<()> {
/// let backend = RedisBackend::connect(RedisConfig::new("localhost", 6379)).await?;
/// let locks = LockClient::new(backend);
/// let guard = locks.named("nightly/report").ttl(Duration::from_secs(30)).acquire().await?;
/// println!("write with {}", guard.stamp()?);
/// guard.release().await?;
/// # Ok(())
/// # }
/// ```
pub struct RedisBackend {
    config: Arc<RedisConfig>,
    road: Road,
    pushes: Pushes,
    operations: Arc<Operations>,
    memberships: Arc<Memberships>,
    learnt: Arc<Learnt>,
}

impl RedisBackend {
    /// Connects, within [`RedisConfig::connect_timeout`].
    ///
    /// # Errors
    /// `Misconfigured`: the configuration cannot work, or what answers is no server that locks can be taken on.
    /// `Unauthorized`: the credentials were refused. `Unavailable`: it cannot be reached, or is a replica.
    pub async fn connect(config: RedisConfig) -> Result<Self> {
        let backend = Self::lazy(config)?;
        backend.road.connect(&backend.config, Arc::new(BootClock)).await.map_err(connecting)?;
        Ok(backend)
    }

    /// Connects when a call needs it, and again after every end of the connection.
    ///
    /// # Errors
    /// `Misconfigured`: the configuration cannot work.
    pub fn lazy(config: RedisConfig) -> Result<Self> {
        Self::sharing(Arc::new(config), Arc::default(), Arc::default(), Arc::default())
    }

    fn sharing(
        config: Arc<RedisConfig>,
        operations: Arc<Operations>,
        memberships: Arc<Memberships>,
        learnt: Arc<Learnt>,
    ) -> Result<Self> {
        config.check().map_err(connecting)?;
        Ok(Self {
            road: Road::new(&config, &learnt),
            pushes: Pushes::new(&config),
            operations,
            memberships,
            learnt,
            config,
        })
    }

    /// Asks once whether the lock can be had, and once more where the server's clock is not where it was thought to be.
    /// `since`: from when the deadline counts at the latest. `is_member`: what was asked before was bound by a membership.
    async fn attempt(
        &self,
        call: &Call,
        request: &AcquireRequest,
        keys: &Keys,
        since: Moment,
        is_member: &mut bool,
    ) -> Result<Attempt> {
        let owner = request.owner();
        let mut corrected = false;
        let mut trip = self.road.to(&keys.lock);
        loop {
            let waits = trip.demand().is_some();
            let link = trip.link(call, waits).await?;
            // No copy of a request runs after the call, nor after the end of the lease that an earlier copy of this
            // acquisition may have made: it would be a second grant of it.
            let now = call.now();
            let last = self.operations.first_unanswered(owner, now).saturating_add(request.ttl());
            if now >= last {
                match self.operations.in_doubt(owner).filter(|_| request.wait_until().is_some()) {
                    // A waiter was told nothing yet: once no copy can run any more, it is as if none had left.
                    Some(bound) => match self.outlive(&mut trip, call, keys, bound).await? {
                        Some(held) => return Ok(held),
                        None => {
                            self.operations.forget(owner);
                            continue;
                        }
                    },
                    None => {
                        return Err(Error::new(
                            ErrorKind::Unavailable,
                            "an earlier request of this acquisition was never answered, and its time is over",
                        ));
                    }
                }
            }
            let mut until = last.min(call.deadline());
            // A member of a migration's phase may be stopped here, and the phase be closed when it goes on.
            match self.memberships.bound(call.namespace(), now) {
                Some(bound) => (until, *is_member) = (until.min(bound), true),
                None if *is_member => {
                    return Err(Error::new(
                        ErrorKind::Unavailable,
                        "the membership of the phase that this was asked under is over",
                    ));
                }
                None => {}
            }
            let not_after = link.server_time(until);
            let ask = Ask {
                owner,
                ttl: request.ttl(),
                floor: request.floor(),
                not_after,
                margin: self.config.fence_margin,
                label: request.label(),
            };
            self.operations.sends(owner, now, request.ttl(), not_after);
            let answer = wire::acquire(&mut trip, call, keys, &ask).await;
            if !matches!(&answer, Err(error) if !error.kind().had_no_effect()) {
                self.operations.answered(owner);
            }
            // It was sent on to another server, whose clock is another.
            let Some((sent, acquired)) = answer? else { continue };
            return match acquired {
                Acquired::Ours { fence, short: Some(short), .. } => {
                    Err(self.take_back(call, request, keys, fence, &short).await)
                }
                Acquired::Ours { fence, left, short: None } => {
                    request.granted(call, sent.min(since), left, fence).map(Attempt::Granted)
                }
                Acquired::Held { record, left, us } => Ok(Attempt::Held {
                    holder: record.map(|record| holder(&record, left, us)),
                    ends: sent.saturating_add(left),
                }),
                // The answer corrected the estimate. It did nothing.
                Acquired::Late if !corrected && call.now() < until => {
                    corrected = true;
                    continue;
                }
                Acquired::Late if request.wait_until().is_some_and(|end| call.now() >= end) => {
                    Err(Error::held_by(ErrorKind::WaitTimeout, None))
                }
                // One that waits has time for another.
                Acquired::Late if request.wait_until().is_some() => Ok(Attempt::Late),
                Acquired::Late => {
                    Err(Error::new(ErrorKind::Unavailable, "the request reached the server after its time"))
                }
                Acquired::Over => {
                    Err(Error::new(ErrorKind::Unavailable, "this acquisition was given up before it arrived"))
                }
            };
        }
    }

    /// Looks whether the time of requests that were never answered is over by the clock that they are checked against.
    /// `None`: it is, and what one of them took, the next request is told.
    async fn outlive(
        &self,
        trip: &mut Trip<'_>,
        call: &Call,
        keys: &Keys,
        bound: u64,
    ) -> Result<Option<Attempt>> {
        let sent = call.now();
        let seen = wire::inspect(trip, call, keys).await?;
        if seen.us > bound {
            return Ok(None);
        }
        let over = sent.saturating_add(Duration::from_micros(bound - seen.us));
        let holder = seen.record.map(|record| holder(&record, seen.left, seen.us));
        Ok(Some(Attempt::Held { holder, ends: over }))
    }

    /// Takes back a grant that too few replicas have; returns what is to be said.
    async fn take_back(
        &self,
        call: &Call,
        request: &AcquireRequest,
        keys: &Keys,
        fence: Fence,
        short: &Error,
    ) -> Error {
        let owner = request.owner();
        let in_doubt = self.operations.in_doubt(owner);
        let mut trip = self.road.to(&keys.lock);
        match wire::release(&mut trip, call, keys, owner, fence, in_doubt).await {
            Ok(_) => taken_back(short, "grant"),
            Err(_) => not_taken_back(short, "grant"),
        }
    }

    async fn take(&self, call: &Call, request: &AcquireRequest) -> Result<Lease> {
        let mut doubt = false;
        let taken = self.take_in_turns(call, request, &mut doubt).await;
        taken.map_err(|error| if doubt { in_doubt(error) } else { error })
    }

    /// `doubt`: a request went unanswered on the way, and what comes at the end does not speak for it.
    async fn take_in_turns(&self, call: &Call, request: &AcquireRequest, doubt: &mut bool) -> Result<Lease> {
        check_ttl(request.ttl())?;
        if let Some(floor) = request.floor() {
            check_floor(floor)?;
        }
        let keys = Keys::new(call.namespace(), request.name());
        let mut waiter: Option<Waiter<'_>> = None;
        // A try is one request to who asks for it, also where it takes a new connection, or several servers; a waiter knows
        // that it is many.
        let since = if request.wait_until().is_none() { call.now() } else { Moment::MAX };
        // Waiters that are woken by the same end of a lease do not all look at once.
        let mut spread = request.owner().digest().to_i64() as u64;
        let (mut holder, mut is_member) = (None, false);
        loop {
            let ends = match self.attempt(call, request, &keys, since, &mut is_member).await {
                Ok(Attempt::Granted(lease)) => {
                    waiter.iter_mut().for_each(Waiter::took);
                    return Ok(lease);
                }
                Ok(Attempt::Held { holder: seen, ends }) => {
                    holder = seen;
                    ends
                }
                Ok(Attempt::Late) => call.now(),
                // A line that is torn down wakes the waiter, who may look on another that is torn down with it: the same
                // owner asks again.
                Err(error)
                    if waiter.is_some()
                        && error.kind() == ErrorKind::Unknown
                        && call.remaining() > self.config.poll * 2 =>
                {
                    *doubt = true;
                    call.clock().sleep_until(call.now().saturating_add(self.config.poll)).await;
                    continue;
                }
                Err(error) => return Err(error),
            };
            let Some(end) = request.wait_until() else {
                return Err(Error::held_by(ErrorKind::Held, holder));
            };
            let timed_out = |now: Moment| now.saturating_add(TOO_LATE) >= end;
            let give_up = |holder| {
                let error = Error::held_by(ErrorKind::WaitTimeout, holder);
                // Also one of an earlier call.
                match self.operations.in_doubt(request.owner()) {
                    None => error,
                    Some(_) => in_doubt(error),
                }
            };
            if timed_out(call.now()) {
                return Err(give_up(holder));
            }
            let waiter = waiter.get_or_insert_with(|| self.pushes.register(&keys.channel));
            if waiter.listen(call).await {
                continue;
            }
            spread = spread.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let jitter = |most: Duration| most.mul_f64((spread >> 40) as f64 / (1u64 << 24) as f64);
            let now = call.now();
            let longest = if waiter.hears() { self.config.recheck } else { self.config.poll };
            let nap = longest.mul_f64(0.5) + jitter(longest.mul_f64(0.5));
            let after_end = Duration::from_millis(1) + jitter(Duration::from_millis(4));
            let wake = now.saturating_add(nap).min(ends.saturating_add(after_end)).min(end);
            tokio::select! {
                () = waiter.told() => {}
                () = call.clock().sleep_until(wake) => {}
            }
            if timed_out(call.now()) {
                return Err(give_up(holder));
            }
        }
    }

    /// Says why a holding is not on record.
    fn lost<T>(call: &Call, lease: &Lease, standing: Standing<T>) -> Result<T> {
        Err(Error::lost(match standing {
            Standing::Ours(found) => return Ok(found),
            Standing::Broken => LostReason::Broken,
            Standing::None if call.now() >= lease.deadline => LostReason::Expired,
            Standing::None | Standing::Taken => LostReason::Taken,
        }))
    }

    /// Makes sure that nothing of an acquisition is left, or adopts what was granted.
    async fn settle(&self, call: &Call, request: &AcquireRequest, adopt: bool) -> Result<Option<Lease>> {
        let owner = request.owner();
        let begun = call.now();
        let keys = Keys::new(call.namespace(), request.name());
        let in_doubt = self.operations.in_doubt(owner);
        let mut trip = self.road.to(&keys.lock);
        let found = wire::cancel(&mut trip, call, &keys, owner, adopt, in_doubt, request.ttl()).await?;
        match found {
            // It stays in doubt: a copy may still be under way, and its release has to know.
            Some((fence, left)) => request.granted(call, begun, left, fence).map(Some),
            None => {
                self.operations.forget(owner);
                Ok(None)
            }
        }
    }
}

#[cfg(test)]
impl RedisBackend {
    pub(crate) async fn standing_link(&self, call: &Call) -> Arc<crate::connection::Link> {
        self.road.masters(call).await.unwrap()[0].link(call).await.unwrap()
    }

    pub(crate) fn road(&self) -> &Road {
        &self.road
    }

    pub(crate) fn learnt(&self) -> &Learnt {
        &self.learnt
    }

    pub(crate) fn is_in_doubt(&self, owner: &Owner) -> bool {
        self.operations.in_doubt(owner).is_some()
    }
}

enum Attempt {
    Granted(Lease),
    Held {
        holder: Option<Holder>,
        ends: Moment,
    },
    /// The request of a waiter came after its time.
    Late,
}

#[async_trait]
impl LockBackend for RedisBackend {
    fn capabilities(&self) -> Capabilities {
        Capabilities::weakest(BACKEND).with(|c| {
            c.consistency = match self.config.address {
                Address::Tcp(..) | Address::Unix(_) => Consistency::SingleServer,
                // Made to fail over.
                Address::Sentinel { .. } | Address::Cluster(_) => Consistency::Replicated,
            };
            c.fence = FenceSource::ClockBounded;
            c.wake_up = WakeUp::Push;
            // Whichever replica takes over has it.
            let replicas = self.learnt.replicas();
            c.survives.failover =
                Wait::demanded(&self.config, replicas).is_some_and(|wait| wait.covers(replicas));
            c.survives.restart = !self.learnt.forgets();
            c.survives.pause = true;
            c.ttl = Duration::from_millis(20)..=Duration::from_secs(86_400);
            c.ttl_step = TTL_STEP;
            c.fence_floor = true;
            c.labels = true;
            // The TTL that arrives has it in it; nothing here ends a lease sooner.
            c.lock_delay = true;
            c.renew_batch = RENEW_BATCH;
        })
    }

    async fn acquire(&self, call: &Call, request: &AcquireRequest) -> Result<Lease> {
        self.take(call, request).await.map_err(|e| e.about(Verb::Acquire, Some(request.name()), BACKEND))
    }

    async fn renew(&self, call: &Call, lease: &Lease, ttl: Duration) -> Result<Lease> {
        let renewed = async {
            check_ttl(ttl)?;
            if is_membership(lease) {
                return self.stay(call, lease, ttl).await;
            }
            let begun = call.now();
            let keys = Keys::new(call.namespace(), &lease.name);
            let mut trip = self.road.to(&keys.lock);
            let standing = wire::renew(&mut trip, call, &keys, &lease.owner, lease.fence, ttl).await?;
            let left = Self::lost(call, lease, standing)?;
            Ok(call.renewed(lease, begun, left.min(ttl)))
        };
        renewed.await.map_err(|e: Error| e.about(Verb::Renew, Some(&lease.name), BACKEND))
    }

    async fn release(&self, call: &Call, lease: &Lease) -> Result<Released> {
        let released = async {
            let keys = Keys::new(call.namespace(), &lease.name);
            let in_doubt = self.operations.in_doubt(&lease.owner);
            let mut trip = self.road.to(&keys.lock);
            let ended = wire::release(&mut trip, call, &keys, &lease.owner, lease.fence, in_doubt).await?;
            self.operations.forget(&lease.owner);
            Ok(if ended { Released::Now } else { Released::AlreadyOver })
        };
        released.await.map_err(|e: Error| e.about(Verb::Release, Some(&lease.name), BACKEND))
    }

    async fn resolve(&self, call: &Call, request: &AcquireRequest) -> Result<Resolution> {
        let settled = self.settle(call, request, true).await;
        let found = settled.map_err(|e| e.about(Verb::Resolve, Some(request.name()), BACKEND))?;
        Ok(found.map_or(Resolution::Gone, Resolution::Adopted))
    }

    async fn inspect(&self, call: &Call, name: &LockName) -> Result<LockState> {
        let looked = async {
            let keys = Keys::new(call.namespace(), name);
            let seen = wire::inspect(&mut self.road.to(&keys.lock), call, &keys).await?;
            if seen.held && seen.record.is_none() {
                return Err(foreign());
            }
            Ok(LockState::default().with(|state| {
                state.holder = seen.record.map(|record| holder(&record, seen.left, seen.us));
                state.last_fence = seen.last_fence;
            }))
        };
        looked.await.map_err(|e: Error| e.about(Verb::Inspect, Some(name), BACKEND))
    }

    async fn abandon(&self, call: &Call, request: &AcquireRequest) -> Result<()> {
        let settled = self.settle(call, request, false).await;
        settled.map(drop).map_err(|e| e.about(Verb::Resolve, Some(request.name()), BACKEND))
    }

    async fn preflight(&self, call: &Call) -> Result<Preflight> {
        let claims = self.capabilities().with(|c| c.survives.restart = true);
        let looked = preflight::look(call, &self.config, &self.road, &self.learnt, claims).await;
        looked.map_err(|e: Error| e.about(Verb::Preflight, None, BACKEND))
    }

    async fn renew_many(&self, call: &Call, leases: &[Lease], ttl: Duration) -> Vec<Result<Lease>> {
        let mut answers = Vec::with_capacity(leases.len());
        for batch in leases.chunk_by(|one, next| is_membership(one) == is_membership(next)) {
            if batch.first().is_some_and(is_membership) {
                for member in batch {
                    answers.push(self.renew(call, member, ttl).await);
                }
                continue;
            }
            for batch in batch.chunks(RENEW_BATCH) {
                answers.extend(self.renew_batch(call, batch, ttl).await);
            }
        }
        answers
    }

    async fn raise(&self, call: &Call, lease: &Lease, floor: Fence) -> Result<()> {
        let raised = async {
            check_floor(floor)?;
            let keys = Keys::new(call.namespace(), &lease.name);
            let margin = self.config.fence_margin;
            let mut trip = self.road.to(&keys.lock);
            let standing =
                wire::raise(&mut trip, call, &keys, &lease.owner, lease.fence, floor, margin).await?;
            Self::lost(call, lease, standing)
        };
        raised.await.map_err(|e: Error| e.about(Verb::Raise, Some(&lease.name), BACKEND))
    }

    async fn raise_fence(&self, call: &Call, name: &LockName, floor: Fence) -> Result<Fence> {
        let raised = async {
            check_floor(floor)?;
            let keys = Keys::new(call.namespace(), name);
            let mut trip = self.road.to(&keys.lock);
            wire::raise_fence(&mut trip, call, &keys, floor, self.config.fence_margin).await
        };
        raised.await.map_err(|e: Error| e.about(Verb::Raise, Some(name), BACKEND))
    }

    /// Looks at all fences of the namespace. What was collected is below the server's time, which is therefore the
    /// least answer.
    async fn high_water(&self, call: &Call) -> Result<Option<Fence>> {
        let looked = async {
            let pattern = Keys::fences(call.namespace());
            let mut highest = 0;
            // A fence that moves from a node that is yet to be walked to one that was is seen the second time.
            let walks = if matches!(self.road, Road::Many(_)) { 2 } else { 1 };
            for _ in 0..walks {
                for node in self.road.masters(call).await? {
                    let link = node.link(call).await?;
                    highest = highest.max(wire::highest_fence(&link, call, &pattern).await?);
                }
            }
            Fence::new(highest).map(Some)
        };
        looked.await.map_err(|e: Error| e.about(Verb::Migrate, None, BACKEND))
    }

    async fn break_lock(&self, call: &Call, name: &LockName, expect: Option<Stamp>) -> Result<Broken> {
        let broken = async {
            let keys = Keys::new(call.namespace(), name);
            loop {
                let mut trip = self.road.to(&keys.lock);
                let seen = wire::inspect(&mut trip, call, &keys).await?;
                if seen.held && seen.record.is_none() {
                    return Err(foreign());
                }
                let holder = seen.record.as_ref().map(|record| holder(record, seen.left, seen.us));
                if let (Some(expect), Some(holder)) = (expect, &holder)
                    && holder.stamp() != expect
                {
                    return Err(Error::held_by(ErrorKind::Held, Some(holder.clone())));
                }
                let margin = self.config.fence_margin;
                let floor = wire::break_lock(&mut trip, call, &keys, seen.record.as_ref(), margin).await?;
                if let Some(floor) = floor {
                    return Ok(Broken::new(holder, floor));
                }
                // It changed hands between the look and the break; each turn is somebody else's lease.
                if call.remaining().is_zero() {
                    return Err(Error::new(ErrorKind::Unavailable, "the lock changed hands at every look"));
                }
            }
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
            // The smallest names so far: the servers have no order, and no end that memory could be counted on for.
            let mut page = BTreeSet::new();
            for node in self.road.masters(call).await? {
                let link = node.link(call).await?;
                wire::names(&link, call, prefix, after, &mut page).await?;
            }
            Ok(page.into_iter().collect())
        };
        listed.await.map_err(|e: Error| e.about(Verb::List, None, BACKEND))
    }

    async fn phase_read(&self, call: &Call) -> Result<Option<PhaseRecord>> {
        let keys = PhaseKeys::new(call.namespace());
        let read = phases::read(&mut self.road.to(&keys.record), call, &keys).await;
        read.map_err(|e| e.about(Verb::Migrate, None, BACKEND))
    }

    async fn phase_cas(&self, call: &Call, expect: Option<&PhaseRecord>, new: &PhaseRecord) -> Result<bool> {
        let keys = PhaseKeys::new(call.namespace());
        let replaced = phases::replace(&mut self.road.to(&keys.record), call, &keys, expect, new).await;
        replaced.map_err(|e| e.about(Verb::Migrate, None, BACKEND))
    }

    async fn join(&self, call: &Call, phase: &str, ttl: Duration) -> Result<Lease> {
        let joined = self.enter(call, phase, ttl).await;
        joined.map_err(|e| e.about(Verb::Migrate, None, BACKEND))
    }

    async fn leave(&self, call: &Call, member: &Lease) -> Result<Released> {
        self.memberships.over(&member.owner);
        let keys = PhaseKeys::new(call.namespace());
        let left = phases::leave(&mut self.road.to(&keys.members), call, &keys, &member.owner).await;
        let left = left.map_err(|e| e.about(Verb::Release, None, BACKEND))?;
        Ok(if left { Released::Now } else { Released::AlreadyOver })
    }

    async fn members(&self, call: &Call) -> Result<Vec<Member>> {
        let keys = PhaseKeys::new(call.namespace());
        let members = phases::members(&mut self.road.to(&keys.members), call, &keys).await;
        members.map_err(|e| e.about(Verb::Migrate, None, BACKEND))
    }

    async fn second_connection(&self, call: &Call) -> Result<Option<Arc<dyn LockBackend>>> {
        let (operations, memberships) = (self.operations.clone(), self.memberships.clone());
        let second = Self::sharing(self.config.clone(), operations, memberships, self.learnt.clone())?;
        if let Road::One(node) = &second.road {
            node.link(call).await.map_err(connecting)?;
        }
        Ok(Some(Arc::new(second)))
    }

    async fn close(&self) {
        self.pushes.close();
        self.road.close();
    }
}

impl RedisBackend {
    /// Removes every key of a scratch namespace, on every server that decides; says how many there were.
    #[cfg(feature = "config")]
    pub(crate) async fn sweep(&self, call: &Call) -> Result<u64> {
        let mut removed = 0;
        for node in self.road.masters(call).await? {
            let link = node.link(call).await?;
            removed += wire::sweep(&link, call).await?;
        }
        Ok(removed)
    }

    async fn enter(&self, call: &Call, phase: &str, ttl: Duration) -> Result<Lease> {
        check_ttl(ttl)?;
        let request = AcquireRequest::new(LockName::parse(phase)?, ttl);
        let (owner, keys) = (request.owner(), PhaseKeys::new(call.namespace()));
        let begun = call.now();
        let short = match phases::join(&mut self.road.to(&keys.record), call, &keys, owner, phase, ttl)
            .await?
        {
            Joined::Closed => {
                return Err(Error::new(ErrorKind::Unavailable, format!("the phase {phase:?} is not open")));
            }
            Joined::Member { short: None } => {
                let lease = request.granted(call, begun, ttl, Fence::MIN)?;
                self.memberships.stands(call.namespace(), owner, lease.deadline);
                return Ok(lease);
            }
            Joined::Member { short: Some(short) } => short,
        };
        let left = phases::leave(&mut self.road.to(&keys.members), call, &keys, owner).await;
        Err(match left {
            Ok(_) => taken_back(&short, "membership"),
            Err(_) => not_taken_back(&short, "membership"),
        })
    }

    /// Renews a membership.
    async fn stay(&self, call: &Call, member: &Lease, ttl: Duration) -> Result<Lease> {
        let keys = PhaseKeys::new(call.namespace());
        let begun = call.now();
        let mut trip = self.road.to(&keys.members);
        match phases::stay(&mut trip, call, &keys, &member.owner, ttl).await? {
            Some(left) => {
                let renewed = call.renewed(member, begun, left.min(ttl));
                self.memberships.stands(call.namespace(), &member.owner, renewed.deadline);
                Ok(renewed)
            }
            None => {
                self.memberships.over(&member.owner);
                let reason =
                    if call.now() >= member.deadline { LostReason::Expired } else { LostReason::Taken };
                Err(Error::lost(reason))
            }
        }
    }

    async fn renew_batch(&self, call: &Call, leases: &[Lease], ttl: Duration) -> Vec<Result<Lease>> {
        let about = |lease: &Lease, error: Error| error.about(Verb::Renew, Some(&lease.name), BACKEND);
        if let Err(error) = check_ttl(ttl) {
            let again = || Error::new(error.kind(), error.message().to_owned());
            return leases.iter().map(|lease| Err(about(lease, again()))).collect();
        }
        let in_cluster = matches!(self.road, Road::Many(_));
        let keys = |lease: &Lease| Keys::new(call.namespace(), &lease.name);
        let request = |lease: &Lease| wire::renewal(keys(lease), &lease.owner, lease.fence, ttl, in_cluster);
        let requests = leases.iter().map(request).collect();
        let begun = call.now();
        let answers = self.road.run_many(call, &wire::RENEW, requests).await;
        let mut renewed = Vec::with_capacity(leases.len());
        for (lease, answer) in leases.iter().zip(answers) {
            let one = async {
                let answer = answer?;
                let mut standing = wire::read_renewal(&answer)?;
                // The mark of a break was not looked at.
                if in_cluster && !matches!(standing, Standing::Ours(_)) {
                    let keys = keys(lease);
                    let mut trip = self.road.to(&keys.lock);
                    standing = wire::renew(&mut trip, call, &keys, &lease.owner, lease.fence, ttl).await?;
                }
                let left = Self::lost(call, lease, standing)?;
                Ok(call.renewed(lease, begun, left.min(ttl)))
            };
            renewed.push(one.await.map_err(|e| about(lease, e)));
        }
        renewed
    }
}

impl fmt::Debug for RedisBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisBackend")
            .field("config", &self.config)
            .field("road", &self.road)
            .finish_non_exhaustive()
    }
}

pub(crate) fn holder(record: &Record, left: Duration, us: u64) -> Holder {
    Holder::new(record.owner.digest(), record.fence, left).with(|holder| {
        holder.since = Some(Duration::from_micros(us.saturating_sub(record.since)));
        holder.label.clone_from(&record.label);
    })
}

/// Says that something counts for nothing because too few replicas have it, and is gone.
fn taken_back(short: &Error, what: &str) -> Error {
    let kind = if short.kind().had_no_effect() { short.kind() } else { ErrorKind::Unavailable };
    Error::new(kind, format!("{}; the {what} was taken back", short.message()))
}

fn not_taken_back(short: &Error, what: &str) -> Error {
    let message = format!("{}, and taking the {what} back was not confirmed", short.message());
    Error::new(ErrorKind::Unknown, message)
}

/// Says whether a lease is a membership of a phase. No lock has the least fence: the server's time is above it.
fn is_membership(lease: &Lease) -> bool {
    lease.fence == Fence::MIN
}

/// Says what an error is worth where a request before it was never answered.
pub(crate) fn in_doubt(error: Error) -> Error {
    if !error.kind().had_no_effect() {
        return error;
    }
    let message = format!("a request on the way was never answered; at the end: {}", error.message());
    Error::new(ErrorKind::Unknown, message).with_source(error)
}

pub(crate) fn foreign() -> Error {
    Error::new(
        ErrorKind::Misconfigured,
        "the key of this lock holds something that is not ours; find out whose it is and remove it, or use another \
         namespace",
    )
}

pub(crate) fn check_ttl(ttl: Duration) -> Result<()> {
    let (least, most) = (Duration::from_millis(20), Duration::from_secs(86_400));
    if (least..=most).contains(&ttl) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Invalid, format!("a TTL is {least:?} to {most:?} here, not {ttl:?}")))
}

pub(crate) fn check_floor(floor: Fence) -> Result<()> {
    if floor.get() < FENCE_LIMIT - 1 {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Invalid,
        format!(
            "a floor is below {} here, because the server counts exactly only to 2^53, not {floor}",
            FENCE_LIMIT - 1
        ),
    ))
}
