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
/// # use lockcore_conformance::history::Recorder;
/// # fn events() -> Vec<lockcore::Event> { vec![] }
/// let recorder = Recorder::builder().file("history.jsonl").file_only().build()?;
/// let mut log = recorder.stream("orders-7");
/// for event in events() {
///     log.record(&event);
/// }
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct StreamLog {
    log: ClientLog,
    acquisitions: HashMap<OwnerDigest, Acquisition>,
    /// Acquisitions that are over, oldest first. An answer may still come late, so the newest are kept.
    over: VecDeque<OwnerDigest>,
}

#[derive(Debug, Default)]
struct Acquisition {
    ttl: Duration,
    attempt: u32,
    /// Numbers of the newest renewal and release; 0 for none. An answer belongs to the newest: a guard sends one at
    /// a time.
    renewals: u32,
    releases: u32,
}

impl StreamLog {
    const REMEMBERED: usize = 4096;

    pub(super) fn new(log: ClientLog) -> Self {
        Self { log, acquisitions: HashMap::new(), over: VecDeque::new() }
    }

    /// Records one event. Kinds that say nothing about a lease become notes.
    pub fn record(&mut self, event: &lockcore::Event) {
        self.record_parts(event.at, &event.lock, event.owner, &event.kind);
    }

    /// Records the parts of an event, for a source of events other than a lockcore client.
    pub fn record_parts(&mut self, at: Moment, lock: &LockName, owner: OwnerDigest, kind: &EventKind) {
        let acquisition = self.acquisitions.entry(owner).or_default();
        let acquire = owner.to_string();
        let renewal = format!("{owner}-renew-{}", acquisition.renewals);
        let release = format!("{owner}-release-{}", acquisition.releases);
        let mut over = false;
        let (op, attempt, what) = match kind {
            EventKind::AcquireStarted { ttl, wait } => {
                acquisition.ttl = *ttl;
                let call = Call::Acquire { owner, ttl: *ttl, wait: *wait };
                (acquire, 1, What::Invoke { call })
            }
            EventKind::Asked { attempt } => {
                acquisition.attempt = *attempt;
                (acquire, *attempt, What::Sent { wire: false })
            }
            EventKind::Granted { fence, deadline, .. } => {
                let answer = Answer::granted(Stamp::new(*fence, owner), *deadline, None);
                (acquire, acquisition.attempt, What::Ok { answer })
            }
            EventKind::NotGranted { kind } => {
                over = true;
                // A grant that came too late to use is told as a loss: the store may show it for a while.
                let what = match Why::from_kind(*kind) {
                    Some(why) if why != Why::Lost => What::Fail { why },
                    _ => What::Unknown { cause: format!("{kind:?}") },
                };
                (acquire, acquisition.attempt, what)
            }
            EventKind::RenewStarted { fence } => {
                acquisition.renewals += 1;
                let call = Call::Renew { fence: *fence, owner: Some(owner), ttl: acquisition.ttl };
                (format!("{owner}-renew-{}", acquisition.renewals), 1, What::Invoke { call })
            }
            EventKind::Renewed { deadline, .. } => {
                (renewal, 1, What::Ok { answer: Answer::renewed(*deadline, None) })
            }
            EventKind::RenewFailed { kind, .. } => (renewal, 1, failure(*kind)),
            EventKind::Lost { fence, reason } => {
                let why = (*reason).into();
                (String::new(), 0, What::Lost { fence: *fence, owner: Some(owner), why })
            }
            EventKind::ReleaseStarted { fence } => {
                acquisition.releases += 1;
                let call = Call::Release { fence: *fence, owner: Some(owner) };
                (format!("{owner}-release-{}", acquisition.releases), 1, What::Invoke { call })
            }
            EventKind::Released { released, .. } => {
                over = true;
                (release, 1, What::Ok { answer: Answer::released(*released) })
            }
            EventKind::ReleaseFailed { kind, .. } => (release, 1, failure(*kind)),
            EventKind::Missed { count } => (String::new(), 0, What::Missed { count: *count }),
            EventKind::Abandoned => {
                (String::new(), 0, What::Note { text: format!("{owner}: cleared away what was left") })
            }
            EventKind::Late { by } => {
                (String::new(), 0, What::Note { text: format!("{owner}: renewals are late by {by:?}") })
            }
            other => (String::new(), 0, What::Note { text: format!("{owner}: {other:?}") }),
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
