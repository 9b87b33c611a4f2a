//! One acquire, from the first request to the last word: ask, ask again, start over, give up.

use std::time::Duration;

use super::Backoff;
use crate::{deadline::Moment, error::ErrorKind};

/// What an acquire decides. One machine a call of `acquire` or `try_acquire`.
#[derive(Clone, Debug)]
pub(crate) struct Acquire {
    /// The end of the budget.
    end: Moment,
    /// Whether it stands in a queue; a try does not.
    waits: bool,
    ttl: Duration,
    attempt: u32,
    /// When the first request of this owner left that has no answer. No copy of it is asked again once a lease it
    /// may have created could be over: the operation is over then, and a new owner starts a new one.
    unanswered_since: Option<Moment>,
    /// The operation of this owner is over; what comes next has a new one.
    over: bool,
    backoff: Backoff,
    /// The last thing that was seen, for the error at the end.
    seen: Option<ErrorKind>,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// The pause is over.
    Woke,
    /// The store granted it, and there is time to use it.
    Granted,
    /// The store answered with an error.
    Failed(ErrorKind),
    /// No answer came in the time of the call.
    Silent,
}

/// What to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Ask the store, as the `attempt`th request of this owner.
    Ask {
        attempt: u32,
        /// Take a new owner first, and abandon the old one in the background.
        anew: bool,
    },
    /// Pause until then, with nothing under way.
    Pause(Moment),
    /// Hand out the grant.
    Return,
    /// Give the error back as it is. `abandon`: the old request may have left something.
    Fail { abandon: bool },
    /// The budget is over and nothing is known to be left: the last error, or a time-out.
    TimedOut,
    /// The budget is over and the last request has no answer: clear away in the background, say `Unknown`.
    GiveUp,
}

impl Acquire {
    /// Starts one that ends by `end`; `seed` spreads its retries.
    pub(crate) fn new(end: Moment, waits: bool, ttl: Duration, seed: u64) -> Self {
        let backoff = Backoff::new(Duration::from_millis(20), Duration::from_millis(500), seed);
        Self { end, waits, ttl, attempt: 1, unanswered_since: None, over: false, backoff, seen: None }
    }

    /// Returns the first thing to do.
    pub(crate) fn start(&self) -> Step {
        Step::Ask { attempt: 1, anew: false }
    }

    /// Returns the last error that the store gave.
    pub(crate) fn seen(&self) -> Option<ErrorKind> {
        self.seen
    }

    /// Decides. `sent` is when the request left that this event answers.
    pub(crate) fn step(&mut self, event: Event, sent: Moment, now: Moment) -> Step {
        if let Event::Failed(kind) = event {
            self.seen = Some(kind);
        }
        match event {
            Event::Granted => Step::Return,
            Event::Woke => self.ask_again(now),
            Event::Silent | Event::Failed(ErrorKind::Unknown) => {
                self.unanswered_since.get_or_insert(sent);
                self.seen = Some(ErrorKind::Unknown);
                self.pause_or(Step::GiveUp, now)
            }
            // Certainly no effect of this request; an earlier one of this owner may still be without an answer.
            Event::Failed(ErrorKind::Unavailable | ErrorKind::Overloaded) => match self.unanswered_since {
                Some(_) => self.pause_or(Step::GiveUp, now),
                None if self.waits => self.pause_or(Step::TimedOut, now),
                None => Step::Fail { abandon: false },
            },
            // Granted, but too late to be of use: what is left of it is given back before the next try.
            Event::Failed(ErrorKind::Lost) => {
                self.unanswered_since.get_or_insert(sent);
                self.over = true;
                if self.waits { self.pause_or(Step::GiveUp, now) } else { Step::Fail { abandon: true } }
            }
            // A grant that broke a promise stays on the server until it is cleared away.
            Event::Failed(ErrorKind::FenceRegression) => Step::Fail { abandon: true },
            // Final. An earlier request of this owner that has no answer may still arrive.
            Event::Failed(_) => Step::Fail { abandon: self.unanswered_since.is_some() },
        }
    }

    fn pause_or(&mut self, over: Step, now: Moment) -> Step {
        let pause = self.backoff.next();
        let until = now.saturating_add(pause);
        if until >= self.end { over } else { Step::Pause(until) }
    }

    fn ask_again(&mut self, now: Moment) -> Step {
        let too_old = |since: Moment| now >= since.saturating_add(self.ttl);
        if self.over || self.unanswered_since.is_some_and(too_old) {
            (self.unanswered_since, self.over) = (None, false);
            self.attempt = 1;
            return Step::Ask { attempt: 1, anew: true };
        }
        self.attempt += 1;
        Step::Ask { attempt: self.attempt, anew: false }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const TTL: Duration = Duration::from_secs(1);
    fn at(ms: u64) -> Moment {
        Moment::from_nanos(ms * 1_000_000)
    }

    #[test]
    fn a_try_that_is_refused_ends_at_once() {
        let mut acquire = Acquire::new(at(5000), false, TTL, 1);
        assert_eq!(acquire.step(Event::Failed(ErrorKind::Held), at(0), at(1)), Step::Fail { abandon: false });
        let mut acquire = Acquire::new(at(5000), false, TTL, 1);
        assert_eq!(
            acquire.step(Event::Failed(ErrorKind::Unavailable), at(0), at(1)),
            Step::Fail { abandon: false }
        );
    }

    #[test]
    fn an_unanswered_request_is_asked_again_by_the_same_owner_and_later_by_a_new_one() {
        let mut acquire = Acquire::new(at(10_000), true, TTL, 1);
        let Step::Pause(until) = acquire.step(Event::Failed(ErrorKind::Unknown), at(0), at(1)) else {
            panic!("no pause");
        };
        assert_eq!(acquire.step(Event::Woke, at(0), until), Step::Ask { attempt: 2, anew: false });
        let Step::Pause(_) = acquire.step(Event::Silent, until, at(999)) else { panic!("no pause") };
        assert_eq!(acquire.step(Event::Woke, until, at(1000)), Step::Ask { attempt: 1, anew: true });
    }

    #[test]
    fn an_unanswered_request_is_never_reported_as_a_time_out() {
        // Exhaustive to a depth: whatever the store answers, an acquire that has a request without an answer ends by
        // a grant, by an error that abandons, or by giving up; and it ends by its budget.
        let events = [
            Event::Granted,
            Event::Silent,
            Event::Failed(ErrorKind::Unknown),
            Event::Failed(ErrorKind::Unavailable),
            Event::Failed(ErrorKind::Lost),
            Event::Failed(ErrorKind::Held),
            Event::Failed(ErrorKind::WaitTimeout),
            Event::Failed(ErrorKind::FenceRegression),
            Event::Failed(ErrorKind::Unauthorized),
        ];
        let (mut seen, mut ends) = (0u64, HashSet::new());
        for waits in [true, false] {
            let mut paths =
                vec![(Acquire::new(at(400), waits, Duration::from_millis(150), 7), at(0), false, 0)];
            while let Some((acquire, sent, open, depth)) = paths.pop() {
                for event in events {
                    for took in [1, 60, 160] {
                        let mut next = acquire.clone();
                        let now = sent.saturating_add(Duration::from_millis(took));
                        let mut open = open
                            || matches!(
                                event,
                                Event::Silent | Event::Failed(ErrorKind::Unknown | ErrorKind::Lost)
                            );
                        let mut step = next.step(event, sent, now);
                        let mut then = now;
                        if let Step::Pause(until) = step {
                            assert!(until < at(400), "a pause beyond the budget");
                            then = until;
                            step = next.step(Event::Woke, sent, until);
                        }
                        seen += 1;
                        ends.insert(std::mem::discriminant(&step));
                        match step {
                            Step::Ask { anew, .. } => {
                                open &= !anew;
                                assert!(depth < 60, "an acquire that never ends");
                                if depth < 6 {
                                    paths.push((next, then, open, depth + 1));
                                }
                            }
                            Step::Return => assert_eq!(event, Event::Granted),
                            Step::TimedOut => {
                                assert!(!open, "a request without an answer was reported as a time-out")
                            }
                            Step::Fail { abandon } => {
                                assert!(abandon || !open, "something may be left behind")
                            }
                            Step::GiveUp => assert!(open),
                            Step::Pause(_) => unreachable!("a pause after a pause"),
                        }
                    }
                }
            }
        }
        assert!(seen > 10_000 && ends.len() == 5, "explored {seen} steps and {} ends", ends.len());
    }
}
