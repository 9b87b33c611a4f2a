//! The in-memory backend: the reference of the suite, and what an application's own tests use.
//!
//! With [`TokioClock`] and tokio's paused time a test of hours takes milliseconds, and the
//! [`Faults`] lose, delay, hold and refuse requests at exactly the place that is to be tested.
//!
//! ```
//! # use lockcore::{ClientOptions, Error, ErrorKind, LockClient, LockName, LostReason, TokioClock};
//! # use lockcore::memory::MemoryBackend;
//! # use std::time::Duration;
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() {
//! let store = MemoryBackend::default();
//! let locks = LockClient::with_clock(store.clone(), ClientOptions::default(), TokioClock::start());
//! let run = tokio::spawn(async move {
//!     locks.named("x").run(async |_| -> Result<(), Error> { std::future::pending().await }).await
//! });
//! tokio::time::sleep(Duration::from_secs(1)).await;
//! store.steal(&LockName::parse("x").unwrap());
//! let error = run.await.unwrap().unwrap_err();
//! assert_eq!((error.kind(), error.lost_reason()), (ErrorKind::Lost, Some(LostReason::Taken)));
//! # }
//! ```

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    fmt,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::sync::Notify;

use crate::{backend::*, sync::LockExt};

mod faults;

pub use faults::Faults;

/// A lock service inside this process. Clones share it.
///
/// Grants in order of arrival; the fence is a counter that outlives release and expiry and ends with the process.
#[derive(Clone)]
pub struct MemoryBackend {
    service: Arc<Service>,
    capabilities: Capabilities,
}

impl Default for MemoryBackend {
    fn default() -> Self {
        let capabilities = Capabilities::weakest("memory").with(|c| {
            c.wake_up = WakeUp::Push;
            c.fair = true;
            c.survives.clock_step = true;
            c.survives.pause = true;
            c.fence_floor = true;
            c.labels = true;
            c.lock_delay = true;
            c.renew_batch = 1024;
        });
        Self { service: Arc::default(), capabilities }
    }
}

impl MemoryBackend {
    /// Changes what this handle promises, for a test of what lockcore makes of it. Clones made before keep theirs.
    #[must_use]
    pub fn promising(mut self, change: impl FnOnce(&mut Capabilities)) -> Self {
        change(&mut self.capabilities);
        self
    }

    /// Returns the switches for faults, shared by all clones.
    pub fn faults(&self) -> &Faults {
        &self.service.faults
    }

    /// Removes the record of a lock in every namespace, as an operator might. The fence is kept.
    pub fn steal(&self, name: &LockName) {
        let mut locks = self.service.locks.grab();
        for ((_, held), slot) in locks.iter_mut() {
            if held == name {
                slot.holder = None;
                slot.changed();
            }
        }
    }

    /// Forgets everything, fences included: a store that lost its data.
    pub fn forget(&self) {
        let mut locks = self.service.locks.grab();
        for (_, slot) in locks.iter_mut() {
            slot.changed();
            *slot = Slot { queue: std::mem::take(&mut slot.queue), ..Slot::default() };
        }
        drop(locks);
        self.service.phases.grab().clear();
    }

    /// Forgets every holder and keeps the fences: a store that lost its data and seeds its fences by the time.
    pub fn forget_holders(&self) {
        let mut locks = self.service.locks.grab();
        for slot in locks.values_mut() {
            slot.holder = None;
            slot.changed();
        }
    }

    /// Sets the end of a lease as a server does that does not compare: for a broken sibling in a suite.
    #[doc(hidden)]
    pub fn cut_short(&self, lease: &Lease, now: Moment, ttl: Duration) -> Lease {
        let mut locks = self.service.locks.grab();
        for slot in locks.values_mut() {
            if let Some(record) = slot.holder.as_mut().filter(|record| record.owner == lease.owner) {
                record.expires = now.saturating_add(ttl);
            }
        }
        lease.clone()
    }

    /// Returns the owner on record, looking past the backend's verbs. Expired records are not shown.
    pub fn holder(&self, name: &LockName, now: Moment) -> Option<Owner> {
        let locks = self.service.locks.grab();
        locks
            .iter()
            .filter(|((_, held), _)| held == name)
            .find_map(|(_, slot)| slot.live(now).map(|record| record.owner))
    }

    /// Counts the acquirers that stand in a queue of the store.
    pub fn waiters(&self, name: &LockName) -> usize {
        let locks = self.service.locks.grab();
        locks.iter().filter(|((_, held), _)| held == name).map(|(_, slot)| slot.queue.len()).sum()
    }

    /// Counts the requests that reached the store so far.
    pub fn requests(&self, verb: Verb) -> u64 {
        self.service.faults.counter(verb).load(Ordering::Relaxed)
    }
}

impl fmt::Debug for MemoryBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryBackend").finish_non_exhaustive()
    }
}

#[derive(Default)]
struct Service {
    locks: Mutex<HashMap<Key, Slot>>,
    phases: Mutex<HashMap<Box<str>, Phases>>,
    /// Somebody has joined a phase: until then a renewal does not look whether it is a member's.
    joined: AtomicBool,
    faults: Faults,
}

/// What one namespace knows of a migration.
#[derive(Default)]
struct Phases {
    record: Option<PhaseRecord>,
    members: Vec<(Owner, Member, Moment)>,
}

type Key = (Box<str>, LockName);

#[derive(Default)]
struct Slot {
    holder: Option<Record>,
    last_fence: Option<Fence>,
    queue: VecDeque<Arc<Ticket>>,
    /// Owners whose acquire was given up, until no copy of it can still be under way.
    given_up: BTreeMap<[u8; 16], Moment>,
    /// The holder that was broken last, so that it learns why.
    broken: Option<Owner>,
    /// Rings at every change of holder.
    change: Option<Arc<Notify>>,
}

struct Record {
    owner: Owner,
    fence: Fence,
    granted: Moment,
    expires: Moment,
    label: Option<String>,
}

struct Ticket {
    owner: Owner,
    turn: Notify,
}

impl Slot {
    fn live(&self, now: Moment) -> Option<&Record> {
        self.holder.as_ref().filter(|record| now < record.expires)
    }

    fn seen(&self, now: Moment) -> Option<Holder> {
        self.live(now).map(|record| {
            Holder::new(record.owner.digest(), record.fence, now.until(record.expires)).with(|h| {
                h.since = Some(record.granted.until(now));
                h.label.clone_from(&record.label);
            })
        })
    }

    fn changed(&mut self) {
        if let Some(first) = self.queue.front() {
            first.turn.notify_one();
        }
        if let Some(change) = &self.change {
            change.notify_waiters();
        }
    }

    fn leave(&mut self, owner: &Owner) {
        let was_first = self.queue.front().is_some_and(|t| t.owner == *owner);
        self.queue.retain(|t| t.owner != *owner);
        if was_first {
            self.changed();
        }
    }

    /// Why a lease is over that is not on record, or `None` if it is.
    fn gone(&self, lease: &Lease, now: Moment) -> Option<LostReason> {
        match &self.holder {
            Some(r) if r.owner == lease.owner && r.fence == lease.fence && now < r.expires => None,
            Some(r) if r.owner == lease.owner && r.fence == lease.fence => Some(LostReason::Expired),
            _ if self.broken == Some(lease.owner) => Some(LostReason::Broken),
            _ => Some(LostReason::Taken),
        }
    }
}

impl MemoryBackend {
    fn with_slot<T>(&self, call: &Call, name: &LockName, change: impl FnOnce(&mut Slot) -> T) -> T {
        let mut locks = self.service.locks.grab();
        change(locks.entry((call.namespace().into(), name.clone())).or_default())
    }

    /// One request and its answer, through the faults.
    async fn exchange<T>(&self, call: &Call, verb: Verb, effect: impl FnOnce(Moment) -> T) -> Result<T> {
        let fault = self.service.faults.next(verb);
        let Some(fault) = fault else {
            return Ok(effect(call.now()));
        };
        fault.request(call).await?;
        // A request that reaches the server after the call has ended does nothing.
        if call.now() > call.deadline() {
            return Err(Error::new(ErrorKind::Unavailable, "the request arrived after its call had ended"));
        }
        let answer = effect(call.now());
        fault.reply(call).await?;
        Ok(answer)
    }

    fn with_phases<T>(&self, call: &Call, change: impl FnOnce(&mut Phases) -> T) -> T {
        let mut phases = self.service.phases.grab();
        let phases = phases.entry(call.namespace().into()).or_default();
        let now = call.now();
        phases.members.retain(|(_, _, until)| now < *until);
        change(phases)
    }

    /// Moves the end of a membership; `None`: this lease is none.
    fn renew_member(&self, call: &Call, member: &Lease, ttl: Duration) -> Option<()> {
        self.with_phases(call, |phases| {
            let (_, _, until) = phases.members.iter_mut().find(|(owner, ..)| *owner == member.owner)?;
            *until = (*until).max(call.now().saturating_add(ttl));
            Some(())
        })
    }

    fn is_member(&self, call: &Call, lease: &Lease) -> bool {
        self.service.joined.load(Ordering::Acquire)
            && self.with_phases(call, |phases| phases.members.iter().any(|(owner, ..)| *owner == lease.owner))
    }

    fn try_grant(&self, call: &Call, request: &AcquireRequest, ticket: Option<&Arc<Ticket>>) -> Answer {
        self.with_slot(call, request.name(), |slot| {
            let now = call.now();
            slot.given_up.retain(|_, until| now < *until);
            if slot.given_up.contains_key(request.owner().expose()) {
                return Answer::GivenUp;
            }
            if let Some(record) = slot.live(now).filter(|record| record.owner == *request.owner()) {
                return Answer::Granted(record.fence, now.until(record.expires));
            }
            let in_turn = match slot.queue.front() {
                None => true,
                Some(first) => first.owner == *request.owner(),
            };
            if in_turn && slot.live(now).is_none() {
                let least = slot.last_fence.max(request.floor()).map_or(0, Fence::get);
                let Some(fence) = least.checked_add(1).and_then(|n| Fence::new(n).ok()) else {
                    return Answer::Overflow;
                };
                slot.queue.retain(|t| t.owner != *request.owner());
                slot.last_fence = Some(fence);
                slot.holder = Some(Record {
                    owner: *request.owner(),
                    fence,
                    granted: now,
                    expires: now.saturating_add(request.ttl()),
                    label: request.label().map(str::to_owned),
                });
                return Answer::Granted(fence, request.ttl());
            }
            if let Some(ticket) = ticket.filter(|ticket| !slot.queue.iter().any(|t| t.owner == ticket.owner))
            {
                slot.queue.push_back(ticket.clone());
            }
            let is_first = slot.queue.front().is_some_and(|first| first.owner == *request.owner());
            let look_again = if is_first { slot.live(now).map(|record| record.expires) } else { None };
            Answer::Held { holder: slot.seen(now), look_again }
        })
    }
}

enum Answer {
    Granted(Fence, Duration),
    Held { holder: Option<Holder>, look_again: Option<Moment> },
    GivenUp,
    Overflow,
}

/// Leaves the queue when the acquire ends or is dropped.
struct InQueue<'a> {
    backend: &'a MemoryBackend,
    call: &'a Call,
    name: &'a LockName,
    ticket: Arc<Ticket>,
}

impl Drop for InQueue<'_> {
    fn drop(&mut self) {
        self.backend.with_slot(self.call, self.name, |slot| slot.leave(&self.ticket.owner));
    }
}

#[async_trait]
impl LockBackend for MemoryBackend {
    fn capabilities(&self) -> Capabilities {
        self.capabilities.clone()
    }

    async fn acquire(&self, call: &Call, request: &AcquireRequest) -> Result<Lease> {
        let mut sent = call.now();
        let mut place = request.wait_until().map(|_| InQueue {
            backend: self,
            call,
            name: request.name(),
            ticket: Arc::new(Ticket { owner: *request.owner(), turn: Notify::new() }),
        });
        let mut answer = self
            .exchange(call, Verb::Acquire, |_| {
                self.try_grant(call, request, place.as_ref().map(|p| &p.ticket))
            })
            .await?;
        loop {
            match answer {
                Answer::Granted(fence, ttl) => {
                    place.take();
                    return request.granted(call, sent, ttl, fence);
                }
                Answer::GivenUp => {
                    return Err(Error::new(
                        ErrorKind::Unavailable,
                        "this acquisition was given up before it arrived",
                    ));
                }
                Answer::Overflow => {
                    return Err(Error::new(ErrorKind::Invalid, "the fence has reached the largest number"));
                }
                Answer::Held { holder, look_again } => {
                    let Some((end, ticket)) = request.wait_until().zip(place.as_ref().map(|p| &p.ticket))
                    else {
                        return Err(Error::held_by(ErrorKind::Held, holder));
                    };
                    if call.now() >= end {
                        return Err(Error::held_by(ErrorKind::WaitTimeout, holder));
                    }
                    let until = look_again.unwrap_or(Moment::MAX).min(end);
                    tokio::select! {
                        () = ticket.turn.notified() => {}
                        () = call.clock().sleep_until(until) => {}
                    }
                }
            }
            // The server decides on its own from here on: what is lost or delayed is its answer.
            sent = call.now();
            answer = self.try_grant(call, request, place.as_ref().map(|p| &p.ticket));
            if matches!(answer, Answer::Granted(..)) {
                self.service.faults.granted_late(call).await?;
            }
        }
    }

    async fn renew(&self, call: &Call, lease: &Lease, ttl: Duration) -> Result<Lease> {
        let sent = call.now();
        if self.is_member(call, lease) {
            let renewed = self.exchange(call, Verb::Migrate, |_| self.renew_member(call, lease, ttl)).await?;
            let expired = || Error::lost(LostReason::Expired);
            return renewed.map(|()| call.renewed(lease, sent, ttl)).ok_or_else(expired);
        }
        let gone = self
            .exchange(call, Verb::Renew, |now| {
                self.with_slot(call, &lease.name, |slot| {
                    let gone = slot.gone(lease, now);
                    if let (None, Some(record)) = (gone, &mut slot.holder) {
                        record.expires = record.expires.max(now.saturating_add(ttl));
                    }
                    gone
                })
            })
            .await?;
        match gone {
            None => Ok(call.renewed(lease, sent, ttl)),
            Some(reason) => Err(Error::lost(reason)),
        }
    }

    async fn release(&self, call: &Call, lease: &Lease) -> Result<Released> {
        self.exchange(call, Verb::Release, |now| {
            self.with_slot(call, &lease.name, |slot| match slot.gone(lease, now) {
                None => {
                    slot.holder = None;
                    slot.changed();
                    Released::Now
                }
                Some(_) => Released::AlreadyOver,
            })
        })
        .await
    }

    async fn resolve(&self, call: &Call, request: &AcquireRequest) -> Result<Resolution> {
        let sent = call.now();
        let found = self
            .exchange(call, Verb::Resolve, |now| {
                self.with_slot(call, request.name(), |slot| {
                    let found = slot
                        .live(now)
                        .filter(|record| record.owner == *request.owner())
                        .map(|record| (record.fence, now.until(record.expires)));
                    if found.is_none() {
                        slot.leave(request.owner());
                        let no_copy_after = now.saturating_add(request.ttl()).max(call.deadline());
                        slot.given_up.insert(*request.owner().expose(), no_copy_after);
                    }
                    found
                })
            })
            .await?;
        match found {
            Some((fence, ttl)) => request.granted(call, sent, ttl, fence).map(Resolution::Adopted),
            None => Ok(Resolution::Gone),
        }
    }

    async fn inspect(&self, call: &Call, name: &LockName) -> Result<LockState> {
        self.exchange(call, Verb::Inspect, |now| {
            self.with_slot(call, name, |slot| {
                LockState::default().with(|state| {
                    state.holder = slot.seen(now);
                    state.last_fence = slot.last_fence;
                    state.waiters = Some(u32::try_from(slot.queue.len()).unwrap_or(u32::MAX));
                })
            })
        })
        .await
    }

    async fn abandon(&self, call: &Call, request: &AcquireRequest) -> Result<()> {
        self.exchange(call, Verb::Resolve, |now| {
            self.with_slot(call, request.name(), |slot| {
                slot.leave(request.owner());
                if slot.live(now).is_some_and(|record| record.owner == *request.owner()) {
                    slot.holder = None;
                    slot.changed();
                }
                let no_copy_after = now.saturating_add(request.ttl()).max(call.deadline());
                slot.given_up.insert(*request.owner().expose(), no_copy_after);
            });
        })
        .await
    }

    async fn preflight(&self, _call: &Call) -> Result<Preflight> {
        Ok(Preflight::clean(self.capabilities()))
    }

    async fn ended(&self, call: &Call, lease: &Lease) -> LostReason {
        loop {
            let (gone, expires, change) = self.with_slot(call, &lease.name, |slot| {
                let change = slot.change.get_or_insert_default().clone();
                let expires = slot.holder.as_ref().map_or(Moment::MAX, |record| record.expires);
                (slot.gone(lease, call.now()), expires, change)
            });
            let mut changed = std::pin::pin!(change.notified());
            changed.as_mut().enable();
            // A change between the look and `enable` rang for nobody.
            let still = self.with_slot(call, &lease.name, |slot| slot.gone(lease, call.now())) == gone;
            match gone {
                Some(reason) => return reason,
                None if still => tokio::select! {
                    () = changed => {}
                    () = call.clock().sleep_until(expires) => {}
                },
                None => {}
            }
        }
    }

    async fn raise(&self, call: &Call, lease: &Lease, floor: Fence) -> Result<()> {
        let gone = self
            .exchange(call, Verb::Raise, |now| {
                self.with_slot(call, &lease.name, |slot| {
                    let gone = slot.gone(lease, now);
                    if gone.is_none() {
                        slot.last_fence = slot.last_fence.max(Some(floor));
                    }
                    gone
                })
            })
            .await?;
        gone.map_or(Ok(()), |reason| Err(Error::lost(reason)))
    }

    async fn raise_fence(&self, call: &Call, name: &LockName, floor: Fence) -> Result<Fence> {
        self.exchange(call, Verb::Raise, |_| {
            self.with_slot(call, name, |slot| {
                *slot.last_fence.insert(slot.last_fence.map_or(floor, |f| f.max(floor)))
            })
        })
        .await
    }

    async fn high_water(&self, call: &Call) -> Result<Option<Fence>> {
        self.exchange(call, Verb::Migrate, |_| {
            let locks = self.service.locks.grab();
            locks
                .iter()
                .filter(|((ns, _), _)| **ns == *call.namespace())
                .filter_map(|(_, s)| s.last_fence)
                .max()
        })
        .await
    }

    async fn break_lock(&self, call: &Call, name: &LockName, expect: Option<Stamp>) -> Result<Broken> {
        self.exchange(call, Verb::Break, |now| {
            self.with_slot(call, name, |slot| {
                let holder = slot.seen(now);
                if let Some(expect) = expect
                    && holder.as_ref().is_some_and(|h| h.stamp() != expect)
                {
                    return Err(Error::held_by(ErrorKind::Held, holder));
                }
                // A break is itself a grant: it takes a fence of its own.
                let floor = Fence::new(slot.last_fence.map_or(0, Fence::get).saturating_add(1))?;
                slot.broken = slot.holder.take().map(|record| record.owner);
                slot.last_fence = Some(floor);
                slot.changed();
                Ok(Broken::new(holder, floor))
            })
        })
        .await?
    }

    async fn list(
        &self,
        call: &Call,
        prefix: Option<&LockName>,
        after: Option<&LockName>,
    ) -> Result<Vec<LockName>> {
        self.exchange(call, Verb::List, |_| {
            let locks = self.service.locks.grab();
            let mut names: Vec<LockName> = locks
                .keys()
                .filter(|(ns, _)| **ns == *call.namespace())
                .map(|(_, name)| name)
                .filter(|name| prefix.is_none_or(|prefix| name.is_under(prefix)))
                .filter(|name| after.is_none_or(|after| *name > after))
                .cloned()
                .collect();
            names.sort();
            names.truncate(1000);
            names
        })
        .await
    }

    async fn phase_read(&self, call: &Call) -> Result<Option<PhaseRecord>> {
        self.exchange(call, Verb::Migrate, |_| self.with_phases(call, |phases| phases.record.clone())).await
    }

    async fn phase_cas(&self, call: &Call, expect: Option<&PhaseRecord>, new: &PhaseRecord) -> Result<bool> {
        self.exchange(call, Verb::Migrate, |_| {
            self.with_phases(call, |phases| {
                let same = phases.record.as_ref() == expect;
                if same {
                    phases.record = Some(new.clone());
                }
                same
            })
        })
        .await
    }

    async fn join(&self, call: &Call, phase: &str, ttl: Duration) -> Result<Lease> {
        let request = AcquireRequest::new(LockName::parse(phase)?, ttl);
        let sent = call.now();
        let joined = self
            .exchange(call, Verb::Migrate, |now| {
                self.with_phases(call, |phases| {
                    let open = phases.record.as_ref().is_some_and(|r| r.open.iter().any(|p| p == phase));
                    if open {
                        let member = Member::new(phase, request.owner().digest())
                            .with(|m| m.label = Some(call.label().to_owned()).filter(|l| !l.is_empty()));
                        self.service.joined.store(true, Ordering::Release);
                        phases.members.push((*request.owner(), member, now.saturating_add(ttl)));
                    }
                    open
                })
            })
            .await?;
        match joined {
            true => request.granted(call, sent, ttl, Fence::MIN),
            false => Err(Error::new(ErrorKind::Unavailable, format!("the phase {phase:?} is not open"))),
        }
    }

    async fn leave(&self, call: &Call, member: &Lease) -> Result<Released> {
        self.exchange(call, Verb::Migrate, |_| {
            self.with_phases(call, |phases| {
                let before = phases.members.len();
                phases.members.retain(|(owner, ..)| *owner != member.owner);
                if phases.members.len() < before { Released::Now } else { Released::AlreadyOver }
            })
        })
        .await
    }

    async fn members(&self, call: &Call) -> Result<Vec<Member>> {
        self.exchange(call, Verb::Migrate, |now| {
            self.with_phases(call, |phases| {
                let member = |(_, member, until): &(Owner, Member, Moment)| {
                    member.clone().with(|m| m.remaining = Some(now.until(*until)))
                };
                phases.members.iter().map(member).collect()
            })
        })
        .await
    }
}
