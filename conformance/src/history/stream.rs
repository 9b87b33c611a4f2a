//! The event stream of a lockcore client as a history: an application records what its own guards do.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use lockcore::{EventKind, LockName, OwnerDigest, Stamp, backend::Moment};

use super::{Answer, Call, ClientLog, What, Why};

/// Turns the events of one lockcore client into events of a history, with the client's own stamps.
///
/// # Example
/// ```no_run
/// # use lockcore_conformance::history::{Recorder, Rules};
/// # fn start(locks: lockcore::LockClient) -> std::io::Result<()> {
/// let recorder = Recorder::builder().rules(Rules::application()).file("history.jsonl").file_only().build()?;
/// let (mut log, mut events) = (recorder.stream("orders-7"), locks.events());
/// tokio::spawn(async move { log.follow(&mut events).await });
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct StreamLog {
    log: ClientLog,
    acquisitions: HashMap<OwnerDigest, Acquisition>,
    /// Acquisitions that are over, oldest first. An answer may still come late, so the newest are kept.
    over: VecDeque<OwnerDigest>,
}

#[derive(Debug)]
struct Acquisition {
    lock: LockName,
    ttl: Duration,
    wait_until: Option<Moment>,
    attempt: u32,
    /// The acquire has not ended.
    asking: bool,
    /// The holder was told that the lease is over.
    lost: bool,
    renewals: Calls,
    releases: Calls,
}

/// Calls of one kind under one lease. Several may be under way: an application renews beside the automatic renewals,
/// and a lease that was renewed too late is given back beside its release.
#[derive(Debug, Default)]
struct Calls {
    count: u32,
    /// Those without an answer, oldest first: number, and when they began.
    open: Vec<(u32, Moment)>,
}

impl Calls {
    fn begin(&mut self, at: Moment) -> u32 {
        self.count += 1;
        self.open.push((self.count, at));
        self.count
    }

    /// Returns the call that an answer belongs to: the one that began nearest to `sent`, or else the oldest, whose
    /// interval is the widest.
    fn answered(&mut self, sent: Option<Moment>) -> u32 {
        let apart = |began: Moment| sent.map(|sent| sent.until(began).max(began.until(sent)));
        let nearest = (0..self.open.len()).min_by_key(|&n| apart(self.open[n].1));
        nearest.map_or(self.count, |n| self.open.remove(n).0)
    }
}

impl StreamLog {
    const REMEMBERED: usize = 4096;

    pub(super) fn new(log: ClientLog) -> Self {
        Self { log, acquisitions: HashMap::new(), over: VecDeque::new() }
    }

    /// Records one event. Acquisitions that began before the recording are left out; kinds that say nothing about a lease become notes.
    pub fn record(&mut self, event: &lockcore::Event) {
        self.record_parts(event.at, &event.lock, event.owner, &event.kind);
    }

    /// Records everything that a client tells, until it is closed.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing that was told before.
    pub async fn follow(&mut self, events: &mut lockcore::Events) {
        while let Some(event) = events.next().await {
            self.record(&event);
        }
    }

    /// Records the parts of an event, for a source of events other than a lockcore client.
    pub fn record_parts(&mut self, at: Moment, lock: &LockName, owner: OwnerDigest, kind: &EventKind) {
        if let EventKind::Missed { count } = kind {
            // It concerns no lock, and the client has no moment for it.
            let what = What::Missed { count: *count };
            return self.log.record(self.log.now(), String::new(), String::new(), 0, what);
        }
        if !self.acquisitions.contains_key(&owner) {
            self.begin(at, lock, owner, kind);
        }
        let Some(acquisition) = self.acquisitions.get_mut(&owner) else { return };
        let renewal = |n: u32| format!("{owner}-renew-{n}");
        // One operation, however often it is asked: an answer may tell what an earlier request did.
        let release = format!("{owner}-release");
        let acquire = owner.to_string();
        let note = |text: String| (String::new(), 0, What::Note { text });
        let mut over = false;
        let (op, attempt, what) = match kind {
            EventKind::AcquireStarted { ttl, wait } => {
                (acquire, 1, What::Invoke { call: Call::Acquire { owner, ttl: *ttl, wait: *wait } })
            }
            EventKind::Asked { attempt } => {
                acquisition.attempt = *attempt;
                (acquire, *attempt, What::Sent { wire: false })
            }
            EventKind::Granted { fence, deadline, .. } => {
                acquisition.asking = false;
                let answer = Answer::granted(Stamp::new(*fence, owner), *deadline, None);
                (acquire, acquisition.attempt, What::Ok { answer })
            }
            EventKind::NotGranted { kind } => {
                acquisition.asking = false;
                over = true;
                // A grant that came too late to use is told as a loss: the store may show it for a while.
                let what = match Why::from_kind(*kind) {
                    Some(why) if why != Why::Lost => What::Fail { why },
                    _ => What::Unknown { cause: format!("{kind:?}") },
                };
                (acquire, acquisition.attempt, what)
            }
            EventKind::RenewStarted { fence } => {
                let call = Call::Renew { fence: *fence, owner: Some(owner), ttl: acquisition.ttl };
                (renewal(acquisition.renewals.begin(at)), 1, What::Invoke { call })
            }
            // The guard stays lost and gives the lease back; nobody is told that it holds.
            EventKind::Renewed { took, .. } if acquisition.lost => {
                let cause = "answered after the loss".to_owned();
                (
                    renewal(acquisition.renewals.answered(Some(at.saturating_sub(*took)))),
                    1,
                    What::Unknown { cause },
                )
            }
            EventKind::Renewed { deadline, took, .. } => {
                let answer = Answer::renewed(*deadline, None);
                let sent = at.saturating_sub(*took);
                (renewal(acquisition.renewals.answered(Some(sent))), 1, What::Ok { answer })
            }
            EventKind::RenewFailed { kind, .. } => {
                (renewal(acquisition.renewals.answered(None)), 1, failure(*kind))
            }
            EventKind::Lost { fence, reason } => {
                (acquisition.lost, over) = (true, true);
                (String::new(), 0, What::Lost { fence: *fence, owner: Some(owner), why: (*reason).into() })
            }
            EventKind::ReleaseStarted { fence } => {
                let call = Call::Release { fence: *fence, owner: Some(owner) };
                (release, acquisition.releases.begin(at), What::Invoke { call })
            }
            EventKind::Released { released, .. } => {
                over = true;
                (
                    release,
                    acquisition.releases.answered(None),
                    What::Ok { answer: Answer::released(*released) },
                )
            }
            EventKind::ReleaseFailed { kind, .. } => {
                (release, acquisition.releases.answered(None), failure(*kind))
            }
            EventKind::Abandoned => note(format!("{owner}: cleared away what was left")),
            EventKind::Late { by } => note(format!("{owner}: renewals are late by {by:?}")),
            other => note(format!("{owner}: {other:?}")),
        };
        if over {
            self.over.push_back(owner);
            if self.over.len() > Self::REMEMBERED
                && let Some(oldest) = self.over.pop_front()
            {
                self.acquisitions.remove(&oldest);
            }
        }
        self.log.record(at, lock.as_str().to_owned(), op, attempt, what);
    }
}

impl StreamLog {
    /// Notes an owner that is seen for the first time.
    fn begin(&mut self, at: Moment, lock: &LockName, owner: OwnerDigest, kind: &EventKind) {
        let mut acquisition = Acquisition {
            lock: lock.clone(),
            ttl: Duration::ZERO,
            wait_until: None,
            attempt: 0,
            asking: true,
            lost: false,
            renewals: Calls::default(),
            releases: Calls::default(),
        };
        match kind {
            EventKind::AcquireStarted { ttl, wait } => {
                acquisition.ttl = *ttl;
                acquisition.wait_until = wait.map(|wait| at.saturating_add(wait));
            }
            EventKind::Asked { .. } => {
                // An acquire that goes on as a new operation: the old one may have left something behind.
                let old = self.acquisitions.iter_mut().find(|(_, a)| a.asking && a.lock == *lock);
                let Some((old_owner, old)) = old else { return };
                old.asking = false;
                (acquisition.ttl, acquisition.wait_until) = (old.ttl, old.wait_until);
                let (ttl, wait) = (old.ttl, old.wait_until.map(|end| at.until(end)));
                let (old_op, attempt, old_owner) = (old_owner.to_string(), old.attempt, *old_owner);
                let unknown = What::Unknown { cause: "goes on as a new operation".into() };
                let key = lock.as_str();
                self.log.record(at, key.to_owned(), old_op, attempt, unknown);
                self.over.push_back(old_owner);
                let call = Call::Acquire { owner, ttl, wait };
                self.log.record(at, key.to_owned(), owner.to_string(), 1, What::Invoke { call });
            }
            // The reader came too late for its beginning.
            _ => return,
        }
        self.acquisitions.insert(owner, acquisition);
    }
}

impl Extend<lockcore::Event> for StreamLog {
    fn extend<I: IntoIterator<Item = lockcore::Event>>(&mut self, events: I) {
        for event in events {
            self.record(&event);
        }
    }
}

fn failure(kind: lockcore::ErrorKind) -> What {
    match Why::from_kind(kind) {
        Some(why) => What::Fail { why },
        None => What::Unknown { cause: format!("{kind:?}") },
    }
}
