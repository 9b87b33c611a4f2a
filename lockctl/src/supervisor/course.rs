//! When to stop the command: decisions by clock and lease alone, without a process in sight.

use std::time::Duration;

use lockcore::{LostReason, backend::Moment};

use super::{Hold, Standing};

/// What to do to the command now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Ask it to end: TERM.
    Ask,
    /// End it: KILL.
    Kill,
}

/// How far the end has come. It never goes back: a renewal that is confirmed after the command was asked to stop comes
/// too late.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Running,
    Asked { kill_at: Moment },
    Killing,
}

/// The course of one run.
#[derive(Debug)]
pub(super) struct Course {
    kill_after: Duration,
    reap: Duration,
    hold_until: Option<Moment>,
    phase: Phase,
    over: Option<LostReason>,
}

impl Course {
    /// Starts a run with this long between TERM and KILL, which is stopped at `hold_until` at the latest.
    pub(super) fn new(kill_after: Duration, hold_until: Option<Moment>) -> Self {
        Self { kill_after, reap: reap_time(kill_after), hold_until, phase: Phase::Running, over: None }
    }

    fn is_at_limit(&self, now: Moment) -> bool {
        self.hold_until.is_some_and(|limit| now >= limit)
    }

    /// Returns the moment from which on the command is asked to stop if nothing is renewed.
    pub(super) fn stop_at(&self, hold: &Hold) -> Moment {
        hold.deadline.saturating_sub(margin(self.kill_after)).min(self.hold_until.unwrap_or(Moment::MAX))
    }

    /// Returns the last moment to send KILL, so that everything is reaped before the deadline.
    fn kill_by(&self, hold: &Hold) -> Moment {
        hold.deadline.saturating_sub(self.reap)
    }

    /// Looks at clock and lease; says what is to be done, once each.
    pub(super) fn look(&mut self, now: Moment, hold: &Hold) -> Option<Step> {
        if self.over.is_none() {
            self.over = match hold.standing {
                // Both ends may fall together: the limit is the one that was asked for.
                Standing::Over(LostReason::Expired) if self.is_at_limit(now) => Some(LostReason::HoldLimit),
                Standing::Over(reason) => Some(reason),
                _ if self.is_at_limit(now) => Some(LostReason::HoldLimit),
                _ if now >= self.stop_at(hold) => Some(LostReason::Expired),
                _ => None,
            };
            if self.over.is_some() {
                let kill_at = now.saturating_add(self.kill_after).min(self.kill_by(hold));
                match &mut self.phase {
                    phase @ Phase::Running => {
                        *phase = Phase::Asked { kill_at };
                        if now < kill_at {
                            return Some(Step::Ask);
                        }
                    }
                    // Asked by a signal before: that grace ends no later than the lease.
                    Phase::Asked { kill_at: earlier } => *earlier = kill_at.min(*earlier),
                    Phase::Killing => {}
                }
            }
        }
        match self.phase {
            Phase::Asked { kill_at } if now >= kill_at => {
                self.phase = Phase::Killing;
                Some(Step::Kill)
            }
            _ => None,
        }
    }

    /// Takes note that somebody asked lockctl itself to stop; says whether the signal is passed on (`Ask`) or has
    /// become KILL because it is not the first.
    pub(super) fn asked(&mut self, now: Moment) -> Step {
        match self.phase {
            Phase::Running => {
                self.phase = Phase::Asked { kill_at: now.saturating_add(self.kill_after) };
                Step::Ask
            }
            Phase::Asked { .. } | Phase::Killing => {
                self.phase = Phase::Killing;
                Step::Kill
            }
        }
    }

    /// Returns when to look again if nothing else happens.
    pub(super) fn next_look(&self, hold: &Hold) -> Moment {
        let stop_at = if self.over.is_none() { self.stop_at(hold) } else { Moment::MAX };
        match self.phase {
            Phase::Asked { kill_at } => kill_at.min(stop_at),
            Phase::Running | Phase::Killing => stop_at,
        }
    }

    /// Says whether KILL was sent.
    pub(super) fn is_killing(&self) -> bool {
        self.phase == Phase::Killing
    }

    /// Returns why the lease is over, if it is.
    pub(super) fn over(&self) -> Option<LostReason> {
        self.over
    }
}

/// Returns how long before its deadline a lease counts as lost, so that the command gets its grace and is reaped.
pub(crate) fn margin(kill_after: Duration) -> Duration {
    kill_after.max(reap_time(kill_after))
}

/// Returns how long before the deadline KILL is sent: a fifth of the grace, at least 20 ms, at most half a second. The
/// kernel ends and reaps an ordinary process within a few milliseconds; a starved machine needs more.
fn reap_time(kill_after: Duration) -> Duration {
    (kill_after / 5).clamp(Duration::from_millis(20), Duration::from_millis(500))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn at(ms: u64) -> Moment {
        Moment::from_nanos(ms * MS)
    }

    fn held_until(ms: u64) -> Hold {
        Hold { deadline: at(ms), standing: Standing::Held }
    }

    fn course() -> Course {
        Course::new(Duration::from_millis(1000), None)
    }

    #[test]
    fn term_comes_a_grace_before_the_deadline_and_kill_before_the_deadline() {
        let (mut course, hold) = (course(), held_until(4000));
        assert_eq!(course.next_look(&hold), at(3000));
        assert_eq!(course.look(at(2999), &hold), None);
        assert_eq!(course.look(at(3000), &hold), Some(Step::Ask));
        assert_eq!(course.over(), Some(LostReason::Expired));
        assert_eq!(course.next_look(&hold), at(3800));
        assert_eq!(course.look(at(3799), &hold), None);
        assert_eq!(course.look(at(3800), &hold), Some(Step::Kill));
        assert_eq!(course.look(at(3900), &hold), None);
    }

    #[test]
    fn a_renewal_moves_the_end() {
        let mut course = course();
        assert_eq!(course.look(at(2999), &held_until(4000)), None);
        assert_eq!(course.look(at(3000), &held_until(7000)), None);
        assert_eq!(course.next_look(&held_until(7000)), at(6000));
    }

    #[test]
    fn a_renewal_after_the_stop_was_asked_comes_too_late() {
        let mut course = course();
        assert_eq!(course.look(at(3000), &held_until(4000)), Some(Step::Ask));
        assert_eq!(course.look(at(3100), &held_until(9000)), None);
        assert_eq!(course.next_look(&held_until(9000)), at(3800));
        assert_eq!(course.look(at(3800), &held_until(9000)), Some(Step::Kill));
    }

    #[test]
    fn a_lock_that_was_taken_stops_the_command_at_once() {
        let mut course = course();
        let hold = Hold { deadline: at(40_000), standing: Standing::Over(LostReason::Broken) };
        assert_eq!(course.look(at(100), &hold), Some(Step::Ask));
        assert_eq!(course.next_look(&hold), at(1100));
        assert_eq!(course.look(at(1100), &hold), Some(Step::Kill));
    }

    #[test]
    fn whoever_wakes_past_the_deadline_kills_without_asking() {
        let (mut course, hold) = (course(), held_until(4000));
        assert_eq!(course.look(at(9000), &hold), Some(Step::Kill));
        assert!(course.is_killing());
    }

    #[test]
    fn the_second_request_to_stop_kills() {
        let (mut course, hold) = (course(), held_until(40_000));
        assert_eq!(course.asked(at(100)), Step::Ask);
        assert_eq!(course.next_look(&hold), at(1100));
        assert_eq!(course.asked(at(200)), Step::Kill);
        assert_eq!(course.over(), None);
    }

    #[test]
    fn a_grace_asked_by_a_signal_ends_with_the_lease() {
        let mut course = course();
        assert_eq!(course.asked(at(3500)), Step::Ask);
        let hold = held_until(4000);
        assert_eq!(course.look(at(3501), &hold), None);
        assert_eq!(course.next_look(&hold), at(3800));
        assert_eq!(course.look(at(3800), &hold), Some(Step::Kill));
        assert_eq!(course.over(), Some(LostReason::Expired));
    }

    #[test]
    fn without_a_grace_kill_still_comes_before_the_deadline() {
        let (mut course, hold) = (Course::new(Duration::ZERO, None), held_until(4000));
        assert_eq!(course.next_look(&hold), at(3980));
        assert_eq!(course.look(at(3980), &hold), Some(Step::Kill));
    }

    #[test]
    fn the_hold_limit_stops_the_command_and_is_named() {
        let mut course = Course::new(Duration::from_millis(1000), Some(at(2000)));
        let hold = held_until(9000);
        assert_eq!(course.next_look(&hold), at(2000));
        assert_eq!(course.look(at(1999), &hold), None);
        assert_eq!(course.look(at(2000), &hold), Some(Step::Ask));
        assert_eq!(course.over(), Some(LostReason::HoldLimit));
        assert_eq!(course.look(at(3000), &hold), Some(Step::Kill));
    }
}
