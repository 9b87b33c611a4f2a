//! The verbs, in the order of the trait.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use lockcore::backend::*;

use super::{
    config::SqliteConfig,
    place::FileSystem,
    wait::{Hints, Pace},
    wire::{Key, Record, Standing},
    worker::{Asker, Desk, Stop, Worker},
};

const BACKEND: &str = "sqlite";
const TTL_STEP: Duration = Duration::from_millis(1);
const RENEW_BATCH: usize = 512;
const LIST_PAGE: i64 = 256;

/// Locks in a SQLite file: for the processes of one machine, with no server to run.
///
/// # Shape
/// One row a name in the table `lockcore_leases`, in a file of its own. The row stays when a lease ends.
///
/// # Units
/// Leases end by `CLOCK_BOOTTIME`, to the nanosecond; TTLs are rounded up to the millisecond. A row of another boot is
/// over.
///
/// # Example
/// ```
/// use std::{sync::Arc, time::Duration};
/// use lockcore::{LockName, backend::*};
/// use lockcore_sql::{SqliteBackend, SqliteConfig};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockcore::Result<()> {
/// # let directory = tempfile::tempdir().unwrap();
/// # let path = directory.path().join("locks.db");
/// let backend = SqliteBackend::open(SqliteConfig::new(path)).await?;
/// let call = Call::for_tests(Arc::new(BootClock), Duration::from_secs(1));
/// let request = AcquireRequest::new(LockName::parse("nightly/report")?, Duration::from_secs(30));
/// let lease = backend.acquire(&call, &request).await?;
/// println!("write with {}", lease.stamp());
/// assert_eq!(backend.release(&call, &lease).await?, lockcore::Released::Now);
/// # Ok(())
/// # }
/// ```
pub struct SqliteBackend {
    worker: Worker,
    hints: Arc<Hints>,
    config: SqliteConfig,
}

impl SqliteBackend {
    /// Opens the file and creates it if there is none, on a thread of this backend's own.
    ///
    /// # Errors
    /// `Misconfigured`: the path is relative, its directory does not exist, it lies where other machines may have it
    /// mounted, or the file is damaged, somebody else's, newer than this program, or used in another time namespace.
    /// `Unauthorized`: this user may not write it. `Unavailable`: the disk is full, or the file stayed busy for 5 s.
    pub async fn open(config: SqliteConfig) -> Result<Self> {
        Self::open_with(config, Arc::default()).await
    }

    async fn open_with(config: SqliteConfig, hints: Arc<Hints>) -> Result<Self> {
        let worker =
            Worker::start(config.clone()).await.map_err(|e| e.about(Verb::Connect, None, BACKEND))?;
        Ok(Self { worker, hints, config })
    }

    /// Returns the file.
    pub fn path(&self) -> &Path {
        &self.config.path
    }

    /// Deletes the rows of names that nobody has used for longer than [`SqliteConfig::idle`], and says how many. Their
    /// fences live on in the floor of the file. A backend does this by itself, at most once a day and file.
    ///
    /// # Errors
    /// `Unknown`: some may be gone. Asking again is safe.
    pub async fn collect(&self, call: &Call) -> Result<usize> {
        self.ask(call, Verb::List, None, |desk: &mut Desk| Ok(desk.collect()?)).await.map(|(_, n)| n)
    }

    /// Deletes every row of a scratch namespace; says how many there were.
    #[cfg(feature = "config")]
    pub(super) async fn sweep(&self, call: &Call) -> Result<u64> {
        let namespace: Arc<str> = call.scratch()?.into();
        let job = move |desk: &mut Desk| Ok(desk.store.sweep(&namespace)?);
        self.ask(call, Verb::List, None, job).await.map(|(_, n)| n as u64)
    }

    async fn ask<T, J>(&self, call: &Call, verb: Verb, name: Option<&LockName>, job: J) -> Result<(Moment, T)>
    where
        T: Send + 'static,
        J: Fn(&mut Desk) -> Result<T, Stop> + Clone + Send + 'static,
    {
        // Renewing for nobody would keep a lease that nobody uses; ending it is right in any case.
        let asker = if verb == Verb::Release { Asker::CleansUp } else { Asker::MayLeave };
        self.worker.ask(call, call.deadline(), asker, job).await.map_err(|e| e.about(verb, name, BACKEND))
    }

    /// Stands behind the holder: looks again and again, and takes the lock when nobody holds it.
    async fn wait(&self, call: &Call, request: &AcquireRequest, end: Moment, first: Holder) -> Result<Lease> {
        let waiter = self.hints.register(&key(call, request.name()));
        let mut pace = Pace::new(&self.config.poll);
        let mut holder = first;
        loop {
            let now = call.now();
            if now >= end {
                return Err(Error::held_by(ErrorKind::WaitTimeout, Some(holder)));
            }
            if now >= call.deadline() {
                return Err(Error::new(ErrorKind::Unavailable, "the call was over before the wait"));
            }
            let wake = now.saturating_add(pace.next(holder.remaining)).min(end).min(call.deadline());
            tokio::select! {
                () = call.clock().sleep_until(wake) => {}
                () = waiter.told() => {}
            }
            match self.attempt(call, request, end.min(call.deadline()), true).await {
                Ok(Attempt::Granted(lease)) => return Ok(lease),
                Ok(Attempt::Held(now_held)) => holder = now_held,
                // Nothing was done, and the loop decides whose time is over.
                Err(error) if error.kind() == ErrorKind::Unavailable && call.now() >= end => {}
                Err(error) => return Err(error),
            }
        }
    }

    async fn attempt(
        &self,
        call: &Call,
        request: &AcquireRequest,
        end: Moment,
        look_first: bool,
    ) -> Result<Attempt> {
        let (key, asked) = (key(call, request.name()), request.clone());
        let ttl = nanos(request.ttl());
        let job = move |desk: &mut Desk| attempt(desk, &key, &asked, ttl, look_first);
        let (sent, seen) = self.worker.ask(call, end, Asker::MayLeave, job).await?;
        match seen {
            Seen::Free { fence, ttl } => match request.granted(call, sent, ttl, Fence::new(fence)?) {
                Ok(lease) => Ok(Attempt::Granted(lease)),
                Err(error) => {
                    // Too late to be used: nobody should have to wait for its end.
                    self.leave_nothing(call, request);
                    Err(error)
                }
            },
            Seen::Held(holder) => Ok(Attempt::Held(holder)),
        }
    }

    fn leave_nothing(&self, call: &Call, request: &AcquireRequest) {
        let (key, owner, hints) = (key(call, request.name()), *request.owner(), self.hints.clone());
        self.worker.leave(call, move |desk| {
            if let Ok(true) = desk.store.abandon(&key, &owner) {
                hints.tell(&key);
            }
        });
    }
}

#[async_trait]
impl LockBackend for SqliteBackend {
    fn capabilities(&self) -> Capabilities {
        Capabilities::weakest(BACKEND).with(|c| {
            c.consistency = Consistency::SingleServer;
            c.fence = FenceSource::Durable;
            c.wake_up = WakeUp::Poll;
            // Not a restart: a reboot of the machine ends every lease, as it ends every holder.
            c.survives.clock_step = true;
            c.ttl = Duration::from_millis(10)..=Duration::from_secs(86_400);
            c.ttl_step = TTL_STEP;
            c.fence_floor = true;
            c.labels = true;
            // The TTL that arrives has it in it; nothing here ends a lease sooner.
            c.lock_delay = true;
            c.renew_batch = RENEW_BATCH;
        })
    }

    async fn acquire(&self, call: &Call, request: &AcquireRequest) -> Result<Lease> {
        let outcome = async {
            check_ttl(request.ttl(), &self.capabilities())?;
            if request.floor() == Some(Fence::MAX) {
                return Err(Error::new(ErrorKind::Invalid, "no fence is above the largest one"));
            }
            // Also an empty wait budget has its one look.
            let end = request.wait_until().filter(|end| *end > call.now()).unwrap_or(Moment::MAX);
            match self.attempt(call, request, end.min(call.deadline()), false).await? {
                Attempt::Granted(lease) => Ok(lease),
                Attempt::Held(holder) => match request.wait_until() {
                    None => Err(Error::held_by(ErrorKind::Held, Some(holder))),
                    Some(end) => self.wait(call, request, end, holder).await,
                },
            }
        };
        outcome.await.map_err(|e| e.about(Verb::Acquire, Some(request.name()), BACKEND))
    }

    async fn renew(&self, call: &Call, lease: &Lease, ttl: Duration) -> Result<Lease> {
        let name = &lease.name;
        check_ttl(ttl, &self.capabilities()).map_err(|e| e.about(Verb::Renew, Some(name), BACKEND))?;
        let (key, owner, fence, ttl_ns) = (key(call, name), lease.owner, lease.fence, nanos(ttl));
        let job = move |desk: &mut Desk| {
            in_place_or_lost(desk)?;
            match desk.store.renew(&key, &owner, fence, ttl_ns)? {
                Some(_) => Ok(()),
                // Not a lock: a membership of a phase, perhaps.
                None if desk.store.renew_member(&key.namespace, &owner, ttl_ns)? => Ok(()),
                None => Err(why_lost(desk, &key, &owner, fence)?.into()),
            }
        };
        let (sent, ()) = self.ask(call, Verb::Renew, Some(name), job).await?;
        Ok(call.renewed(lease, sent, ttl))
    }

    async fn release(&self, call: &Call, lease: &Lease) -> Result<Released> {
        let (key, owner, fence) = (key(call, &lease.name), lease.owner, lease.fence);
        let hints = self.hints.clone();
        let job = move |desk: &mut Desk| {
            let ended = desk.store.release(&key, &owner, fence)?;
            if ended {
                hints.tell(&key);
            } else {
                // An unconfirmed release may have been asked again: "over" must not be undone by a recovery.
                desk.store.settle()?;
            }
            Ok(if ended { Released::Now } else { Released::AlreadyOver })
        };
        self.ask(call, Verb::Release, Some(&lease.name), job).await.map(|(_, released)| released)
    }

    async fn resolve(&self, call: &Call, request: &AcquireRequest) -> Result<Resolution> {
        let name = request.name();
        let (key, owner) = (key(call, name), *request.owner());
        // No later copy of the acquire can exist: it ran before this in the queue, or never will.
        let job = move |desk: &mut Desk| {
            if !desk.file_is_in_place() {
                return Ok(None);
            }
            let found = desk.store.look(&key)?;
            match found {
                Some(record) if record.owner == Some(owner) => match record.standing {
                    Standing::Live(left) => return Ok(Some((record.fence, left))),
                    Standing::Foreign => return Err(foreign().into()),
                    Standing::Over => {}
                },
                _ => {}
            }
            desk.store.settle()?;
            Ok(None)
        };
        let (sent, found) = self.ask(call, Verb::Resolve, Some(name), job).await?;
        let Some((fence, left)) = found else { return Ok(Resolution::Gone) };
        Fence::new(fence)
            .and_then(|fence| request.granted(call, sent, left, fence))
            .map(Resolution::Adopted)
            .map_err(|e| e.about(Verb::Resolve, Some(name), BACKEND))
    }

    async fn inspect(&self, call: &Call, name: &LockName) -> Result<LockState> {
        let key = key(call, name);
        let job = move |desk: &mut Desk| {
            in_place(desk)?;
            Ok(match desk.store.look(&key)? {
                Some(record) => LockState::default().with(|state| {
                    state.holder = holder(&record);
                    state.last_fence = Fence::new(record.fence).ok();
                }),
                None => LockState::default(),
            })
        };
        self.ask(call, Verb::Inspect, Some(name), job).await.map(|(_, state)| state)
    }

    async fn abandon(&self, call: &Call, request: &AcquireRequest) -> Result<()> {
        let (key, owner, hints) = (key(call, request.name()), *request.owner(), self.hints.clone());
        let job = move |desk: &mut Desk| {
            if desk.store.abandon(&key, &owner)? {
                hints.tell(&key);
            } else {
                desk.store.settle()?;
            }
            Ok(())
        };
        self.ask(call, Verb::Release, Some(request.name()), job).await.map(drop)
    }

    async fn preflight(&self, call: &Call) -> Result<Preflight> {
        let path = self.config.path.clone();
        let job = move |desk: &mut Desk| {
            in_place(desk)?;
            Ok((desk.store.pragma("quick_check(1)")?, mode(&path)))
        };
        let (_, (check, mode)) = self.ask(call, Verb::Preflight, None, job).await?;
        if check != "ok" {
            return Err(Error::new(
                ErrorKind::Misconfigured,
                format!("the file is damaged ({check}); stop its users and restore or remove it"),
            )
            .about(Verb::Preflight, None, BACKEND));
        }
        let mut preflight = Preflight::clean(self.capabilities());
        preflight.server = Some(format!("SQLite {}", rusqlite::version()));
        if self.worker.place == FileSystem::Memory {
            preflight.lower(
                "the file lies in memory and is gone with a reboot; the fence then goes on from the wall clock alone. \
                 Choose a path on a disk",
                |c| c.fence = FenceSource::ClockBounded,
            );
        }
        if mode.is_some_and(|mode| mode & 0o004 != 0) {
            preflight.lower(
                "every user can read the file, and with it the secrets of the holders: chmod o-r it",
                |_| {},
            );
        }
        Ok(preflight)
    }

    async fn renew_many(&self, call: &Call, leases: &[Lease], ttl: Duration) -> Vec<Result<Lease>> {
        let mut answers = Vec::with_capacity(leases.len());
        for batch in leases.chunks(RENEW_BATCH) {
            let (verb, ttl_ns) = (Verb::Renew, nanos(ttl));
            let keys: Arc<[(Key, Owner, Fence)]> =
                batch.iter().map(|l| (key(call, &l.name), l.owner, l.fence)).collect();
            let asked = check_ttl(ttl, &self.capabilities());
            let job = move |desk: &mut Desk| {
                in_place_or_lost(desk)?;
                let renewed = desk.store.renew_many(&keys, ttl_ns)?;
                keys.iter()
                    .zip(renewed)
                    .map(|((key, owner, fence), left)| match left {
                        Some(_) => Ok(None),
                        None => why_lost(desk, key, owner, *fence).map(Some),
                    })
                    .collect::<Result<Vec<Option<Error>>, Stop>>()
            };
            let outcome = match asked {
                Ok(()) => self.ask(call, verb, None, job).await,
                Err(error) => Err(error),
            };
            match outcome {
                Ok((sent, losses)) => {
                    answers.extend(batch.iter().zip(losses).map(|(lease, loss)| match loss {
                        None => Ok(call.renewed(lease, sent, ttl)),
                        Some(error) => Err(error.about(verb, Some(&lease.name), BACKEND)),
                    }))
                }
                Err(error) => {
                    // One commit, one answer for all of them.
                    let source = Arc::new(error);
                    answers.extend(batch.iter().map(|lease| {
                        let error = match source.lost_reason() {
                            Some(reason) => Error::lost(reason),
                            None => Error::new(source.kind(), source.message().to_owned()),
                        };
                        Err(error.with_source(source.clone()).about(verb, Some(&lease.name), BACKEND))
                    }));
                }
            }
        }
        answers
    }

    async fn raise(&self, call: &Call, lease: &Lease, floor: Fence) -> Result<()> {
        let (key, owner, fence) = (key(call, &lease.name), lease.owner, lease.fence);
        let job = move |desk: &mut Desk| {
            in_place_or_lost(desk)?;
            match desk.store.raise_holding(&key, &owner, fence, floor)? {
                Some(_) => Ok(()),
                None => Err(why_lost(desk, &key, &owner, fence)?.into()),
            }
        };
        self.ask(call, Verb::Raise, Some(&lease.name), job).await.map(drop)
    }

    async fn raise_fence(&self, call: &Call, name: &LockName, floor: Fence) -> Result<Fence> {
        let key = key(call, name);
        let job = move |desk: &mut Desk| {
            in_place(desk)?;
            Ok(desk.store.raise_name(&key, floor)?)
        };
        let (_, stands) = self.ask(call, Verb::Raise, Some(name), job).await?;
        // The statement has a row to return in every case.
        Fence::new(stands.unwrap_or(0)).map_err(|e| e.about(Verb::Raise, Some(name), BACKEND))
    }

    async fn high_water(&self, call: &Call) -> Result<Option<Fence>> {
        let namespace: Box<str> = call.namespace().into();
        let job = move |desk: &mut Desk| {
            in_place(desk)?;
            Ok(desk.store.high_water(&namespace)?)
        };
        let (_, highest) = self.ask(call, Verb::Migrate, None, job).await?;
        Ok(Fence::new(highest).ok())
    }

    async fn break_lock(&self, call: &Call, name: &LockName, expect: Option<Stamp>) -> Result<Broken> {
        let (key, hints) = (key(call, name), self.hints.clone());
        let job = move |desk: &mut Desk| {
            in_place(desk)?;
            // A free lock is broken, too: the operator gets a number that shuts out its former holders.
            let (before, floor) = desk.store.take_away(&key, |record| {
                record
                    .and_then(holder)
                    .is_none_or(|holder| expect.is_none_or(|stamp| holder.stamp() == stamp))
            })?;
            let before = before.as_ref().and_then(holder);
            match floor {
                Some(floor) => {
                    hints.tell(&key);
                    Ok(Broken::new(before, Fence::new(floor)?))
                }
                None => Err(Error::held_by(ErrorKind::Held, before).into()),
            }
        };
        self.ask(call, Verb::Break, Some(name), job).await.map(|(_, broken)| broken)
    }

    async fn list(
        &self,
        call: &Call,
        prefix: Option<&LockName>,
        after: Option<&LockName>,
    ) -> Result<Vec<LockName>> {
        let namespace: Box<str> = call.namespace().into();
        let (prefix, after) = (prefix.cloned(), after.cloned());
        let job = move |desk: &mut Desk| {
            in_place(desk)?;
            let names = desk.store.names(&namespace, prefix.as_ref(), after.as_ref(), LIST_PAGE)?;
            Ok(names.iter().map(|name| LockName::parse(name)).collect::<Result<Vec<_>>>()?)
        };
        self.ask(call, Verb::List, None, job).await.map(|(_, names)| names)
    }

    async fn phase_read(&self, call: &Call) -> Result<Option<PhaseRecord>> {
        let namespace: Box<str> = call.namespace().into();
        let job = move |desk: &mut Desk| {
            in_place(desk)?;
            Ok(desk.store.phase(&namespace)?)
        };
        self.ask(call, Verb::Migrate, None, job).await.map(|(_, record)| record)
    }

    async fn phase_cas(&self, call: &Call, expect: Option<&PhaseRecord>, new: &PhaseRecord) -> Result<bool> {
        let namespace: Box<str> = call.namespace().into();
        let (expect, new) = (expect.cloned(), new.clone());
        let job = move |desk: &mut Desk| {
            in_place(desk)?;
            Ok(desk.store.replace_phase(&namespace, expect.as_ref(), &new)?)
        };
        self.ask(call, Verb::Migrate, None, job).await.map(|(_, replaced)| replaced)
    }

    async fn join(&self, call: &Call, phase: &str, ttl: Duration) -> Result<Lease> {
        check_ttl(ttl, &self.capabilities()).map_err(|e| e.about(Verb::Migrate, None, BACKEND))?;
        let namespace: Box<str> = call.namespace().into();
        let label = Some(call.label().to_owned()).filter(|label| !label.is_empty());
        let request = AcquireRequest::new(LockName::parse(phase)?, ttl);
        let (owner, ttl_ns, asked) = (*request.owner(), nanos(ttl), phase.to_owned());
        let job = move |desk: &mut Desk| {
            in_place(desk)?;
            Ok(desk.store.join(&namespace, &owner, &asked, ttl_ns, label.as_deref())?)
        };
        let (sent, joined) = self.ask(call, Verb::Migrate, None, job).await?;
        if !joined {
            let closed = Error::new(ErrorKind::Unavailable, format!("the phase {phase:?} is not open"));
            return Err(closed.about(Verb::Migrate, None, BACKEND));
        }
        request.granted(call, sent, ttl, Fence::MIN).map_err(|e| e.about(Verb::Migrate, None, BACKEND))
    }

    async fn leave(&self, call: &Call, member: &Lease) -> Result<Released> {
        let (namespace, owner): (Box<str>, _) = (call.namespace().into(), member.owner);
        let job = move |desk: &mut Desk| Ok(desk.store.leave_phase(&namespace, &owner)?);
        let (_, left) = self.ask(call, Verb::Release, None, job).await?;
        Ok(if left { Released::Now } else { Released::AlreadyOver })
    }

    async fn members(&self, call: &Call) -> Result<Vec<Member>> {
        let namespace: Box<str> = call.namespace().into();
        let job = move |desk: &mut Desk| {
            in_place(desk)?;
            Ok(desk.store.members(&namespace)?)
        };
        self.ask(call, Verb::Migrate, None, job).await.map(|(_, members)| members)
    }

    async fn second_connection(&self, _call: &Call) -> Result<Option<Arc<dyn LockBackend>>> {
        let second = Self::open_with(self.config.clone(), self.hints.clone()).await?;
        Ok(Some(Arc::new(second)))
    }

    async fn close(&self) {
        self.worker.close().await;
    }
}

impl fmt::Debug for SqliteBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteBackend").field("path", &self.config.path).finish_non_exhaustive()
    }
}

enum Attempt {
    Granted(Lease),
    Held(Holder),
}

enum Seen {
    Free { fence: i64, ttl: Duration },
    Held(Holder),
}

/// One try: takes the lock, or says who has it. A waiter looks before it takes, because a look needs no write lock.
fn attempt(
    desk: &mut Desk,
    key: &Key,
    request: &AcquireRequest,
    ttl: i64,
    mut look_first: bool,
) -> Result<Seen, Stop> {
    in_place(desk)?;
    loop {
        if !look_first {
            let floor = request.floor().map_or(0, Fence::get);
            if let Some(fence) = desk.store.grant(key, request.owner(), ttl, floor, request.label())? {
                return Ok(Seen::Free { fence, ttl: Duration::from_nanos(ttl.unsigned_abs()) });
            }
        }
        look_first = false;
        let Some(record) = desk.store.look(key)? else { continue };
        match record.standing {
            Standing::Foreign => return Err(foreign().into()),
            // Asked again by the same owner: the same grant, with what is left of it.
            Standing::Live(left) if record.owner == Some(*request.owner()) => {
                return Ok(Seen::Free { fence: record.fence, ttl: left });
            }
            Standing::Live(_) => match holder(&record) {
                Some(holder) => return Ok(Seen::Held(holder)),
                None => continue,
            },
            // It ended between the two statements; each turn of this loop is somebody else's lease.
            Standing::Over => continue,
        }
    }
}

fn holder(record: &Record) -> Option<Holder> {
    let Standing::Live(remaining) = record.standing else { return None };
    let owner = record.owner.as_ref()?;
    let fence = Fence::new(record.fence).ok()?;
    Some(Holder::new(owner.digest(), fence, remaining).with(|holder| {
        holder.since = Some(record.since);
        holder.label.clone_from(&record.label);
    }))
}

/// Says why a lease is over that could not be touched.
fn why_lost(desk: &mut Desk, key: &Key, owner: &Owner, fence: Fence) -> Result<Error, Stop> {
    let Some(record) = desk.store.look(key)? else { return Ok(Error::lost(LostReason::Taken)) };
    let is_this = record.owner.as_ref() == Some(owner) && record.fence == fence.get();
    Ok(match record.standing {
        Standing::Foreign if is_this => foreign(),
        Standing::Over | Standing::Live(_) if is_this => Error::lost(LostReason::Expired),
        Standing::Foreign | Standing::Over | Standing::Live(_) if record.broken == Some(fence.get()) => {
            Error::lost(LostReason::Broken)
        }
        Standing::Foreign | Standing::Over | Standing::Live(_) => Error::lost(LostReason::Taken),
    })
}

fn in_place(desk: &Desk) -> Result<(), Stop> {
    if desk.file_is_in_place() {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::FenceRegression,
        "the file was removed or replaced while it was open, and with it what was granted; find out by whom, then \
         start anew",
    )
    .into())
}

// Whoever opens the path now finds another file, in which the lock is free.
fn in_place_or_lost(desk: &Desk) -> Result<(), Stop> {
    if desk.file_is_in_place() { Ok(()) } else { Err(Error::lost(LostReason::Taken).into()) }
}

fn foreign() -> Error {
    Error::new(
        ErrorKind::Misconfigured,
        "the lease was granted in another time namespace, whose clock does not compare with this one's; run all users \
         of the file in one",
    )
}

fn check_ttl(ttl: Duration, capabilities: &Capabilities) -> Result<()> {
    if capabilities.ttl.contains(&ttl) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Invalid,
        format!("a TTL is {:?} to {:?} here, not {ttl:?}", capabilities.ttl.start(), capabilities.ttl.end()),
    ))
}

/// Rounds up to the step. What is out of range was refused before.
fn nanos(ttl: Duration) -> i64 {
    let step = TTL_STEP.as_nanos();
    i64::try_from(ttl.as_nanos().div_ceil(step) * step).unwrap_or(i64::MAX)
}

fn key(call: &Call, name: &LockName) -> Key {
    Key { namespace: call.namespace().into(), name: name.clone() }
}

fn mode(path: &PathBuf) -> Option<u32> {
    use std::os::unix::fs::PermissionsExt;
    Some(std::fs::metadata(path).ok()?.permissions().mode())
}
