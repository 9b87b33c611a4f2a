//! The verbs, in the order of the trait.

use std::{collections::BTreeSet, fmt, sync::Arc, time::Duration};

use lockcore::backend::*;
use redis::Value;

use crate::{
    config::RedisConfig,
    connection::{self, Connection, Learnt, Link, connecting},
    operations::Operations,
    wait::{Pushes, Waiter},
    wire::{self, Acquired, Ask, FENCE_LIMIT, Keys, Record, Renewal, Standing},
};

pub(crate) const BACKEND: &str = "redis";
const TTL_STEP: Duration = Duration::from_millis(1);
const RENEW_BATCH: usize = 512;
const LIST_PAGE: usize = 1000;
/// How many keys one step of a scan looks at: a fraction of a millisecond of the server's time.
const SCAN_STEP: usize = 1000;
/// So close to the end of a wait, no answer would come in time.
const TOO_LATE: Duration = Duration::from_millis(2);

/// Locks on one Redis or Valkey server.
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
    config: RedisConfig,
    connection: Connection,
    pushes: Pushes,
    operations: Arc<Operations>,
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
        let patience = backend.config.connect_timeout.saturating_add(Duration::from_millis(100));
        backend.connection.connect(patience, Arc::new(BootClock)).await.map_err(connecting)?;
        Ok(backend)
    }

    /// Connects when a call needs it, and again after every end of the connection.
    ///
    /// # Errors
    /// `Misconfigured`: the configuration cannot work.
    pub fn lazy(config: RedisConfig) -> Result<Self> {
        Self::sharing(config, Arc::default(), Arc::default())
    }

    fn sharing(config: RedisConfig, operations: Arc<Operations>, learnt: Arc<Learnt>) -> Result<Self> {
        config.check().map_err(connecting)?;
        Ok(Self {
            connection: Connection::new(config.clone(), learnt.clone()),
            pushes: Pushes::new(&config),
            operations,
            learnt,
            config,
        })
    }

    /// Asks once whether the lock can be had, and once more where the server's clock is not where it was thought to be.
    async fn attempt(&self, call: &Call, request: &AcquireRequest, keys: &Keys) -> Result<Attempt> {
        let owner = request.owner();
        let mut corrected = false;
        loop {
            let link = self.connection.link(call).await?;
            // No copy of a request runs after the call, nor after the end of the lease that an earlier copy of this
            // acquisition may have made: it would be a second grant of it.
            let now = call.now();
            let last = self.operations.first_unanswered(owner, now).saturating_add(request.ttl());
            if now >= last {
                return Err(Error::new(
                    ErrorKind::Unavailable,
                    "an earlier request of this acquisition was never answered, and its time is over",
                ));
            }
            let not_after = link.server_time(last.min(call.deadline()));
            let ask = Ask {
                owner,
                ttl: request.ttl(),
                floor: request.floor(),
                not_after,
                margin: self.config.fence_margin,
                label: request.label(),
            };
            self.operations.sends(owner, now, request.ttl(), not_after);
            let answer = wire::acquire(&link, call, keys, &ask).await;
            if !matches!(&answer, Err(error) if !error.kind().had_no_effect()) {
                self.operations.answered(owner);
            }
            let (sent, acquired) = answer?;
            return match acquired {
                Acquired::Ours { fence, left } => {
                    request.granted(call, sent, left, fence).map(Attempt::Granted)
                }
                Acquired::Held { record, left, us } => Ok(Attempt::Held {
                    holder: record.map(|record| holder(&record, left, us)),
                    ends: sent.saturating_add(left),
                }),
                // The answer corrected the estimate. It did nothing.
                Acquired::Late if !corrected && call.now() < last.min(call.deadline()) => {
                    corrected = true;
                    continue;
                }
                Acquired::Late if request.wait_until().is_some_and(|end| call.now() >= end) => {
                    Err(Error::held_by(ErrorKind::WaitTimeout, None))
                }
                Acquired::Late => {
                    Err(Error::new(ErrorKind::Unavailable, "the request reached the server after its time"))
                }
                Acquired::Over => {
                    Err(Error::new(ErrorKind::Unavailable, "this acquisition was given up before it arrived"))
                }
            };
        }
    }

    async fn take(&self, call: &Call, request: &AcquireRequest) -> Result<Lease> {
        check_ttl(request.ttl())?;
        if let Some(floor) = request.floor() {
            check_floor(floor)?;
        }
        let keys = Keys::new(call.namespace(), request.name());
        let mut waiter: Option<Waiter<'_>> = None;
        // Waiters that are woken by the same end of a lease do not all look at once.
        let mut spread = request.owner().digest().to_i64() as u64;
        loop {
            let (holder, ends) = match self.attempt(call, request, &keys).await? {
                Attempt::Granted(lease) => {
                    waiter.iter_mut().for_each(Waiter::took);
                    return Ok(lease);
                }
                Attempt::Held { holder, ends } => (holder, ends),
            };
            let Some(end) = request.wait_until() else {
                return Err(Error::held_by(ErrorKind::Held, holder));
            };
            let timed_out = |now: Moment| now.saturating_add(TOO_LATE) >= end;
            if timed_out(call.now()) {
                return Err(Error::held_by(ErrorKind::WaitTimeout, holder));
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
                return Err(Error::held_by(ErrorKind::WaitTimeout, holder));
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
        let link = self.connection.link(call).await?;
        let keys = Keys::new(call.namespace(), request.name());
        let in_doubt = self.operations.in_doubt(owner);
        let (sent, found) = wire::cancel(&link, call, &keys, owner, adopt, in_doubt, request.ttl()).await?;
        match found {
            // It stays in doubt: a copy may still be under way, and its release has to know.
            Some((fence, left)) => request.granted(call, sent, left, fence).map(Some),
            None => {
                self.operations.forget(owner);
                Ok(None)
            }
        }
    }

    /// Takes one step over the keys of a pattern: the next cursor, unless it is the end, and keys, some perhaps twice.
    async fn scan(
        &self,
        link: &Link,
        call: &Call,
        pattern: &str,
        cursor: &[u8],
    ) -> Result<(Option<Vec<u8>>, Vec<Vec<u8>>)> {
        if call.remaining().is_zero() {
            return Err(Error::new(ErrorKind::Unavailable, "the call was over before all keys were seen"));
        }
        let mut command = redis::cmd("SCAN");
        command.arg(cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(SCAN_STEP);
        let not_a_scan = || Error::new(ErrorKind::Unknown, "SCAN answered with something else");
        let Value::Array(parts) = link.command(call, &command).await? else { return Err(not_a_scan()) };
        let mut parts = parts.into_iter();
        let (Some(Value::BulkString(next)), Some(Value::Array(keys))) = (parts.next(), parts.next()) else {
            return Err(not_a_scan());
        };
        let keys = keys.into_iter().filter_map(|key| match key {
            Value::BulkString(key) => Some(key),
            _ => None,
        });
        Ok(((next != b"0").then_some(next), keys.collect()))
    }
}

#[cfg(test)]
impl RedisBackend {
    pub(crate) async fn standing_link(&self, call: &Call) -> Arc<Link> {
        self.connection.link(call).await.unwrap()
    }
}

enum Attempt {
    Granted(Lease),
    Held { holder: Option<Holder>, ends: Moment },
}

#[async_trait]
impl LockBackend for RedisBackend {
    fn capabilities(&self) -> Capabilities {
        Capabilities::weakest(BACKEND).with(|c| {
            c.consistency = Consistency::SingleServer;
            c.fence = FenceSource::ClockBounded;
            c.wake_up = WakeUp::Push;
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
            let link = self.connection.link(call).await?;
            let renewal =
                Renewal::new(Keys::new(call.namespace(), &lease.name), &lease.owner, lease.fence, ttl);
            let (sent, standing) = wire::renew(&link, call, &renewal).await?;
            let left = Self::lost(call, lease, standing)?;
            Ok(call.renewed(lease, sent, left.min(ttl)))
        };
        renewed.await.map_err(|e: Error| e.about(Verb::Renew, Some(&lease.name), BACKEND))
    }

    async fn release(&self, call: &Call, lease: &Lease) -> Result<Released> {
        let released = async {
            let link = self.connection.link(call).await?;
            let keys = Keys::new(call.namespace(), &lease.name);
            let in_doubt = self.operations.in_doubt(&lease.owner);
            let ended = wire::release(&link, call, &keys, &lease.owner, lease.fence, in_doubt).await?;
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
            let link = self.connection.link(call).await?;
            let seen = wire::inspect(&link, call, &Keys::new(call.namespace(), name)).await?;
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
        let looked = async {
            let link = self.connection.link(call).await?;
            let mut questions = redis::pipe();
            questions.cmd("INFO").arg("persistence");
            questions.cmd("CONFIG").arg("GET").arg("appendfsync");
            questions.cmd("INFO").arg("memory");
            questions.cmd("INFO").arg("replication");
            questions.cmd("INFO").arg("server");
            let mut answers = link.commands(call, &questions, 5).await?.into_iter();
            let mut next = || answers.next().unwrap_or_default();
            let facts = Facts {
                persistence: connection::text(Some(next())),
                fsync: connection::config_value(next()),
                memory: connection::text(Some(next())),
                replication: connection::text(Some(next())),
                server: connection::text(Some(next())),
            };
            Ok(facts)
        };
        let facts = looked.await.map_err(|e: Error| e.about(Verb::Preflight, None, BACKEND))?;
        let keeps = connection::keeps(facts.persistence.as_deref(), facts.fsync.as_deref());
        self.learnt.set_forgets(!keeps);
        let claims = self.capabilities().with(|c| c.survives.restart = true);
        Ok(facts.judge(Preflight::clean(claims), keeps))
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
            let link = self.connection.link(call).await?;
            let keys = Keys::new(call.namespace(), &lease.name);
            let margin = self.config.fence_margin;
            let standing = wire::raise(&link, call, &keys, &lease.owner, lease.fence, floor, margin).await?;
            Self::lost(call, lease, standing)
        };
        raised.await.map_err(|e: Error| e.about(Verb::Raise, Some(&lease.name), BACKEND))
    }

    async fn raise_fence(&self, call: &Call, name: &LockName, floor: Fence) -> Result<Fence> {
        let raised = async {
            check_floor(floor)?;
            let link = self.connection.link(call).await?;
            let keys = Keys::new(call.namespace(), name);
            wire::raise_fence(&link, call, &keys, floor, self.config.fence_margin).await
        };
        raised.await.map_err(|e: Error| e.about(Verb::Raise, Some(name), BACKEND))
    }

    /// Looks at all fences of the namespace. What was collected is below the server's time, which is therefore the
    /// least answer.
    async fn high_water(&self, call: &Call) -> Result<Option<Fence>> {
        let looked = async {
            let link = self.connection.link(call).await?;
            let pattern = Keys::fences(call.namespace());
            let (mut cursor, mut highest) = (Some(b"0".to_vec()), 0);
            while let Some(from) = cursor {
                let keys;
                (cursor, keys) = self.scan(&link, call, &pattern, &from).await?;
                if keys.is_empty() {
                    continue;
                }
                let Value::Array(values) = link.command(call, redis::cmd("MGET").arg(keys)).await? else {
                    return Err(Error::new(ErrorKind::Unknown, "MGET answered with something else"));
                };
                for value in values {
                    let fence = connection::text(Some(value)).and_then(|text| {
                        text.split_once('|').and_then(|(fence, _)| fence.parse::<i64>().ok())
                    });
                    highest = highest.max(fence.unwrap_or(0));
                }
            }
            // After the walk: a grant that it missed was made before now.
            let time = link.command(call, &redis::cmd("TIME")).await?;
            let us = connection::server_time(&time)
                .and_then(|us| i64::try_from(us).ok())
                .ok_or_else(|| Error::new(ErrorKind::Unknown, "TIME answered with something else"))?;
            Fence::new(highest.max(us)).map(Some)
        };
        looked.await.map_err(|e: Error| e.about(Verb::Migrate, None, BACKEND))
    }

    async fn break_lock(&self, call: &Call, name: &LockName, expect: Option<Stamp>) -> Result<Broken> {
        let broken = async {
            let link = self.connection.link(call).await?;
            let keys = Keys::new(call.namespace(), name);
            loop {
                let seen = wire::inspect(&link, call, &keys).await?;
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
                let floor = wire::break_lock(&link, call, &keys, seen.record.as_ref(), margin).await?;
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
            let link = self.connection.link(call).await?;
            // The smallest names so far: the server has no order, and no end that memory could be counted on for.
            let mut page = BTreeSet::new();
            let pattern = Keys::pattern(call.namespace());
            let mut cursor = Some(b"0".to_vec());
            while let Some(from) = cursor {
                let keys;
                (cursor, keys) = self.scan(&link, call, &pattern, &from).await?;
                for key in keys {
                    let name = Keys::name(call.namespace(), &key)
                        .filter(|name| prefix.is_none_or(|prefix| name.is_under(prefix)))
                        .filter(|name| after.is_none_or(|after| name > after));
                    if let Some(name) = name {
                        page.insert(name);
                        if page.len() > LIST_PAGE {
                            page.pop_last();
                        }
                    }
                }
            }
            Ok(page.into_iter().collect())
        };
        listed.await.map_err(|e: Error| e.about(Verb::List, None, BACKEND))
    }

    async fn second_connection(&self, call: &Call) -> Result<Option<Arc<dyn LockBackend>>> {
        let second = Self::sharing(self.config.clone(), self.operations.clone(), self.learnt.clone())?;
        second.connection.link(call).await.map_err(connecting)?;
        Ok(Some(Arc::new(second)))
    }

    async fn close(&self) {
        self.pushes.close();
        self.connection.close();
    }
}

impl RedisBackend {
    async fn renew_batch(&self, call: &Call, leases: &[Lease], ttl: Duration) -> Vec<Result<Lease>> {
        let about = |lease: &Lease, error: Error| error.about(Verb::Renew, Some(&lease.name), BACKEND);
        if let Err(error) = check_ttl(ttl) {
            let again = || Error::new(error.kind(), error.message().to_owned());
            return leases.iter().map(|lease| Err(about(lease, again()))).collect();
        }
        let link = match self.connection.link(call).await {
            Ok(link) => link,
            Err(error) => {
                let again = || Error::new(error.kind(), error.message().to_owned());
                return leases.iter().map(|lease| Err(about(lease, again()))).collect();
            }
        };
        let mut requests = Vec::with_capacity(leases.len());
        for lease in leases {
            let keys = Keys::new(call.namespace(), &lease.name);
            requests.push(Renewal::new(keys, &lease.owner, lease.fence, ttl).into_request());
        }
        let (sent, answers) = link.run_many(call, Renewal::script(), &requests).await;
        let one = |(lease, answer): (&Lease, Result<wire::Answer>)| {
            let left = answer.and_then(|answer| Self::lost(call, lease, Renewal::read(&answer)?));
            left.map(|left| call.renewed(lease, sent, left.min(ttl))).map_err(|e| about(lease, e))
        };
        leases.iter().zip(answers).map(one).collect()
    }
}

impl fmt::Debug for RedisBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisBackend")
            .field("config", &self.config)
            .field("connection", &self.connection)
            .finish_non_exhaustive()
    }
}

/// What the server says about itself. `None`: it may not be asked.
#[derive(Debug, Default)]
struct Facts {
    persistence: Option<String>,
    fsync: Option<String>,
    memory: Option<String>,
    replication: Option<String>,
    server: Option<String>,
}

impl Facts {
    fn judge(&self, mut preflight: Preflight, keeps: bool) -> Preflight {
        if !keeps {
            let why = match (self.persistence.is_some(), self.fsync.as_deref()) {
                (false, _) => {
                    "the server does not let this user read INFO, so nobody knows what a restart loses"
                }
                (true, None) => {
                    "the server does not let this user read appendfsync, so nobody knows what a restart loses"
                }
                (true, Some(_)) => {
                    "a restart of the server loses what it granted last, and with it held locks; set appendonly yes and \
                     appendfsync always, or keep the server down for the longest TTL before it starts again"
                }
            };
            preflight.lower(why, |c| c.survives.restart = false);
        }
        match fact(&self.memory, "maxmemory").zip(fact(&self.memory, "maxmemory_policy")) {
            None => preflight.findings.push("the server does not tell its memory policy; it must be noeviction".into()),
            Some(("0", _) | (_, "noeviction")) => {}
            Some((_, policy)) => preflight.lower(
                format!(
                    "the server removes keys when its memory is full ({policy}), and with them held locks; set \
                     maxmemory-policy noeviction"
                ),
                |c| c.consistency = Consistency::Replicated,
            ),
        }
        let replicas = fact(&self.replication, "connected_slaves");
        match (fact(&self.replication, "role"), replicas) {
            (Some("slave"), _) => preflight.lower(
                "the server is a replica and refuses every lock; use the address of its master",
                |c| c.consistency = Consistency::Replicated,
            ),
            (Some(_), Some("0")) => {}
            (Some(_), Some(replicas)) => preflight.lower(
                format!(
                    "the server has {replicas} replicas; if one of them takes over, locks that were granted last are \
                     forgotten, and only the fence stops their holders"
                ),
                |c| c.consistency = Consistency::Replicated,
            ),
            _ => preflight.findings.push("the server does not tell its role; it must be a master".into()),
        }
        if fact(&self.server, "redis_mode") == Some("cluster") {
            preflight.lower(
                "the server is a node of a Cluster; this backend speaks to a single server only",
                |c| c.consistency = Consistency::Replicated,
            );
        }
        preflight
    }
}

/// Reads one line of what INFO says.
fn fact<'a>(info: &'a Option<String>, name: &str) -> Option<&'a str> {
    info.as_deref()?.lines().find_map(|line| line.trim_end().strip_prefix(name)?.strip_prefix(':'))
}

fn holder(record: &Record, left: Duration, us: u64) -> Holder {
    Holder::new(record.owner.digest(), record.fence, left).with(|holder| {
        holder.since = Some(Duration::from_micros(us.saturating_sub(record.since)));
        holder.label.clone_from(&record.label);
    })
}

fn foreign() -> Error {
    Error::new(
        ErrorKind::Misconfigured,
        "the key of this lock holds something that is not ours; find out whose it is and remove it, or use another \
         namespace",
    )
}

fn check_ttl(ttl: Duration) -> Result<()> {
    let (least, most) = (Duration::from_millis(20), Duration::from_secs(86_400));
    if (least..=most).contains(&ttl) {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Invalid, format!("a TTL is {least:?} to {most:?} here, not {ttl:?}")))
}

fn check_floor(floor: Fence) -> Result<()> {
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
