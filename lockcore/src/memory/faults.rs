//! Requests that are lost, late, held or refused, where a test wants them.

use std::{
    fmt,
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::sync::Notify;

use crate::{backend::*, sync::LockExt};

/// What can go wrong between a client and the store, switched on by a test.
///
/// Counted faults hit the next requests of their verb; the others last until they are switched off. A request that was
/// dropped by its caller still counts.
#[derive(Default)]
pub struct Faults {
    switches: Mutex<Switches>,
    /// True while any switch is on: the path without faults is one load.
    armed: AtomicBool,
    served: [AtomicU64; 12],
    changed: Notify,
}

#[derive(Default)]
struct Switches {
    lose_before: Vec<(Verb, u32)>,
    lose_after: Vec<(Verb, u32)>,
    refuse_next: Vec<(Verb, u32, ErrorKind)>,
    hold_replies: Vec<Verb>,
    request_delay: Duration,
    reply_delay: Duration,
    unavailable: bool,
    cut: bool,
}

impl Switches {
    fn any(&self) -> bool {
        !(self.lose_before.is_empty()
            && self.lose_after.is_empty()
            && self.refuse_next.is_empty()
            && self.hold_replies.is_empty()
            && self.request_delay.is_zero()
            && self.reply_delay.is_zero())
            || self.unavailable
            || self.cut
    }
}

impl Faults {
    /// Loses the next requests of a verb: no effect, and the caller cannot know.
    pub fn lose_before(&self, verb: Verb, times: u32) {
        self.change(|s| s.lose_before.push((verb, times)));
    }

    /// Loses the next replies to a verb: the effect is there, and the caller cannot know.
    pub fn lose_after(&self, verb: Verb, times: u32) {
        self.change(|s| s.lose_after.push((verb, times)));
    }

    /// Answers the next requests of a verb with an error of this kind and no effect.
    pub fn refuse_next(&self, verb: Verb, times: u32, kind: ErrorKind) {
        self.change(|s| s.refuse_next.push((verb, times, kind)));
    }

    /// Holds the replies to a verb, after their effect, until [`deliver`](Self::deliver).
    pub fn hold_replies(&self, verb: Verb) {
        self.change(|s| s.hold_replies.push(verb));
    }

    /// Delivers the replies that are held.
    pub fn deliver(&self) {
        self.change(|s| s.hold_replies.clear());
    }

    /// Lets every request arrive later.
    pub fn delay_requests(&self, by: Duration) {
        self.change(|s| s.request_delay = by);
    }

    /// Lets every reply arrive later, after its effect.
    pub fn delay_replies(&self, by: Duration) {
        self.change(|s| s.reply_delay = by);
    }

    /// Refuses every request, certainly without an effect.
    pub fn unavailable(&self, on: bool) {
        self.change(|s| s.unavailable = on);
    }

    /// Swallows every request without a word, as a cut cable does.
    pub fn cut(&self, on: bool) {
        self.change(|s| s.cut = on);
    }

    /// Ends every fault, also those that were counted and have hit nobody.
    pub fn heal(&self) {
        self.change(|s| *s = Switches::default());
    }

    fn change(&self, change: impl FnOnce(&mut Switches)) {
        let mut switches = self.switches.grab();
        change(&mut switches);
        self.armed.store(switches.any(), Ordering::Release);
        drop(switches);
        self.changed.notify_waiters();
    }

    pub(super) fn counter(&self, verb: Verb) -> &AtomicU64 {
        &self.served[verb as usize]
    }

    pub(super) fn next(&self, verb: Verb) -> Option<Fault<'_>> {
        self.counter(verb).fetch_add(1, Ordering::Relaxed);
        if !self.armed.load(Ordering::Acquire) {
            return None;
        }
        let mut s = self.switches.grab();
        let fault = Fault {
            faults: self,
            verb,
            lost_before: use_up(&mut s.lose_before, verb),
            lost_after: use_up(&mut s.lose_after, verb),
            refused: s.refuse_next.iter().position(|(v, times, _)| *v == verb && *times > 0).map(|at| {
                s.refuse_next[at].1 -= 1;
                s.refuse_next[at].2
            }),
        };
        s.refuse_next.retain(|(_, times, _)| *times > 0);
        self.armed.store(s.any(), Ordering::Release);
        Some(fault)
    }

    async fn until(&self, over: impl Fn(&Switches) -> bool) {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            if over(&self.switches.grab()) {
                return;
            }
            changed.await;
        }
    }

    /// The reply that tells a waiter of its grant.
    pub(super) async fn granted_late(&self, call: &Call) -> Result<()> {
        if !self.armed.load(Ordering::Acquire) {
            return Ok(());
        }
        let lost_after = use_up(&mut self.switches.grab().lose_after, Verb::Acquire);
        Fault { faults: self, verb: Verb::Acquire, lost_before: false, lost_after, refused: None }
            .reply(call)
            .await
    }
}

fn use_up(counted: &mut Vec<(Verb, u32)>, verb: Verb) -> bool {
    let hit = counted.iter_mut().find(|(v, times)| *v == verb && *times > 0);
    let hit = hit.map(|(_, times)| *times -= 1).is_some();
    counted.retain(|(_, times)| *times > 0);
    hit
}

pub(super) struct Fault<'a> {
    faults: &'a Faults,
    verb: Verb,
    lost_before: bool,
    lost_after: bool,
    refused: Option<ErrorKind>,
}

impl Fault<'_> {
    pub(super) async fn request(&self, call: &Call) -> Result<()> {
        let delay = self.faults.switches.grab().request_delay;
        if !delay.is_zero() {
            call.clock().sleep_until(call.now().saturating_add(delay)).await;
        }
        self.faults.until(|s| !s.cut).await;
        if self.faults.switches.grab().unavailable {
            return Err(Error::new(ErrorKind::Unavailable, "the store refuses connections"));
        }
        if let Some(kind) = self.refused {
            return Err(Error::new(kind, "the store refused"));
        }
        if self.lost_before {
            return Err(Error::new(ErrorKind::Unknown, "the connection was lost before an answer"));
        }
        Ok(())
    }

    pub(super) async fn reply(&self, call: &Call) -> Result<()> {
        self.faults.until(|s| !s.hold_replies.contains(&self.verb) && !s.cut).await;
        let delay = self.faults.switches.grab().reply_delay;
        if !delay.is_zero() {
            call.clock().sleep_until(call.now().saturating_add(delay)).await;
        }
        if self.lost_after {
            return Err(Error::new(ErrorKind::Unknown, "the connection was lost before an answer"));
        }
        Ok(())
    }
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faults").field("armed", &self.armed).finish_non_exhaustive()
    }
}
