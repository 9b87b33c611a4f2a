//! One lease, from its grant to its end: when to renew, what to tell the holder, when it is over.

use std::time::Duration;

use super::Backoff;
use crate::{deadline::Moment, guard::State, lease::LostReason};

/// What the holder's side knows of one lease. `Held` and `Uncertain` alternate, `Lost` is final.
#[derive(Clone, Debug)]
pub(crate) struct Renewal {
    /// The lease ends for this holder: moves only by answered renewals.
    deadline: Moment,
    /// Counts as lost this long before the deadline.
    margin: Duration,
    /// The longest hold ends; `MAX` without one.
    hold_until: Moment,
    /// Between two renewals.
    every: Duration,
    /// When the next renewal is due.
    next: Moment,
    in_flight: bool,
    uncertain: bool,
    retry: Backoff,
    over: Option<LostReason>,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// Time has passed. `early`: a renewal that is due this soon may leave now, in the company of others.
    Tick { early: Duration },
    /// A renewal is leaving that the holder asked for.
    Asked,
    /// The store confirmed a renewal; the lease now ends then.
    Renewed(Moment),
    /// The renewal has no answer, or was certainly not done: the old deadline stands.
    Failed,
    /// The lease is over, for this reason.
    Ended(LostReason),
}

/// What to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Todo {
    /// Send a renewal; the machine counts it as under way.
    pub(crate) renew: bool,
    /// The holder's state has changed.
    pub(crate) tell: bool,
    /// A renewal was confirmed for a lease that is over here: end it in the store.
    pub(crate) give_back: bool,
}

impl Renewal {
    /// Starts with a grant. `spread` in 0..1 sets the phase, so that leases taken together are not renewed together.
    pub(crate) fn new(
        now: Moment,
        deadline: Moment,
        ttl: Duration,
        margin: Duration,
        max_hold: Option<Duration>,
        spread: f64,
    ) -> Self {
        // A third of the TTL leaves room for two retries; the spread only ever makes it earlier.
        let every = ttl.mul_f64((1.0 - 0.1 * spread) / 3.0);
        let retry = Self::retry(ttl);
        let next = deadline.saturating_sub(ttl).saturating_add(every).max(now);
        let hold_until = max_hold.map_or(Moment::MAX, |cap| now.saturating_add(cap));
        let mut new = Self {
            deadline,
            margin,
            hold_until,
            every,
            next,
            in_flight: false,
            uncertain: false,
            retry,
            over: None,
        };
        // A grant with little left is renewed early.
        new.next = new.next.min(now.saturating_add(now.until(new.ends()) / 2));
        new
    }

    fn retry(ttl: Duration) -> Backoff {
        Backoff::new(ttl / 20, ttl / 6, 0)
    }

    /// Returns the moment from which the lease counts as lost, if nothing happens.
    pub(crate) fn ends(&self) -> Moment {
        self.deadline.min(self.hold_until).saturating_sub(self.margin)
    }

    /// Returns the moment at which work must have stopped: the margin is part of it.
    pub(crate) fn hard_end(&self) -> Moment {
        self.deadline.min(self.hold_until)
    }

    /// Returns the lease's own deadline: when the store may give the lock away.
    pub(crate) fn deadline(&self) -> Moment {
        self.deadline
    }

    /// Returns when to step next without an event.
    pub(crate) fn wake_at(&self) -> Moment {
        match (self.over, self.in_flight) {
            (Some(_), _) => Moment::MAX,
            (None, true) => self.ends(),
            (None, false) => self.next.min(self.ends()),
        }
    }

    /// Returns what is known at `now`, also when no step has looked since.
    pub(crate) fn state(&self, now: Moment) -> State {
        match self.over {
            Some(reason) => State::Lost(reason),
            None if now >= self.ends() => State::Lost(self.why()),
            None if self.uncertain => State::Uncertain,
            None => State::Held,
        }
    }

    /// Names the end that comes first: whoever looks later learns the same.
    fn why(&self) -> LostReason {
        if self.deadline <= self.hold_until { LostReason::Expired } else { LostReason::HoldLimit }
    }

    /// Decides.
    pub(crate) fn step(&mut self, event: Event, now: Moment) -> Todo {
        let before = (self.over, self.uncertain);
        // Time comes first: an answer that arrives after the end does not undo it.
        if self.over.is_none() && now >= self.ends() {
            self.over = Some(self.why());
        }
        let mut todo = Todo::default();
        match event {
            Event::Tick { early }
                if self.over.is_none() && !self.in_flight && now.saturating_add(early) >= self.next =>
            {
                // Near the hold limit the lease already lasts long enough.
                if self.deadline >= self.hold_until {
                    self.next = Moment::MAX;
                } else {
                    todo.renew = true;
                    self.in_flight = true;
                }
            }
            Event::Tick { .. } => {}
            Event::Asked => self.in_flight = true,
            Event::Renewed(deadline) => {
                self.in_flight = false;
                if self.over.is_none() {
                    self.uncertain = false;
                    // A renewal never shortens: an older answer may come last.
                    self.deadline = self.deadline.max(deadline);
                    self.next = now.saturating_add(self.every);
                    self.retry = Self::retry(self.every * 3);
                } else {
                    todo.give_back = true;
                }
            }
            Event::Failed => {
                self.in_flight = false;
                self.uncertain = true;
                self.next = now.saturating_add(self.retry.next());
            }
            Event::Ended(reason) => {
                self.in_flight = false;
                self.over.get_or_insert(reason);
            }
        }
        todo.tell = before != (self.over, self.uncertain);
        todo
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{HashSet, VecDeque};

    use super::*;

    const TICK: Event = Event::Tick { early: Duration::ZERO };
    const TTL: Duration = Duration::from_millis(900);
    fn at(ms: u64) -> Moment {
        Moment::from_nanos(ms * 1_000_000)
    }
    fn granted() -> Renewal {
        Renewal::new(at(0), at(900), TTL, Duration::ZERO, None, 0.0)
    }

    #[test]
    fn one_failed_renewal_does_not_end_renewing() {
        let mut lease = granted();
        assert!(lease.step(TICK, at(300)).renew);
        assert!(!lease.step(TICK, at(310)).renew, "two renewals under way");
        let todo = lease.step(Event::Failed, at(320));
        assert_eq!((todo.tell, lease.state(at(320))), (true, State::Uncertain));
        assert!(lease.wake_at() < at(380), "the retry is not faster than the schedule");
        assert!(lease.step(TICK, lease.wake_at()).renew);
        assert!(lease.step(Event::Renewed(at(1300)), at(400)).tell);
        assert_eq!(lease.state(at(400)), State::Held);
        assert_eq!(lease.wake_at(), at(700));
    }

    #[test]
    fn a_late_answer_does_not_revive_a_lost_lease() {
        let mut lease = granted();
        lease.step(TICK, at(300));
        let todo = lease.step(Event::Renewed(at(1900)), at(901));
        assert!(todo.give_back && todo.tell);
        assert_eq!(lease.state(at(901)), State::Lost(LostReason::Expired));
    }

    #[test]
    fn a_look_that_comes_late_finds_the_reason_that_an_early_one_finds() {
        let mut lease =
            Renewal::new(at(0), at(900), TTL, Duration::ZERO, Some(Duration::from_millis(800)), 0.0);
        assert_eq!(lease.state(at(800)), State::Lost(LostReason::HoldLimit));
        // Nobody looked until the deadline had passed as well.
        assert_eq!(lease.state(at(950)), State::Lost(LostReason::HoldLimit));
        assert!(lease.step(TICK, at(950)).tell);
        assert_eq!(lease.state(at(950)), State::Lost(LostReason::HoldLimit));
    }

    #[test]
    fn an_older_answer_does_not_shorten() {
        let mut lease = granted();
        lease.step(Event::Renewed(at(2000)), at(100));
        lease.step(Event::Renewed(at(1000)), at(110));
        assert_eq!(lease.deadline(), at(2000));
    }

    #[test]
    fn the_hold_limit_is_told_ahead_by_the_margin() {
        let cap = Some(Duration::from_millis(1500));
        let mut lease = Renewal::new(at(0), at(900), TTL, Duration::from_millis(100), cap, 0.0);
        lease.step(TICK, at(300));
        lease.step(Event::Renewed(at(1200)), at(300));
        lease.step(TICK, at(600));
        lease.step(Event::Renewed(at(1500)), at(600));
        assert!(!lease.step(TICK, at(900)).renew, "renewed beyond the hold limit");
        assert_eq!(lease.wake_at(), at(1400));
        assert_eq!(lease.state(at(1399)), State::Held);
        lease.step(TICK, at(1400));
        // Deadline and limit fall together here; what counts is that it is over by then.
        assert!(matches!(lease.state(at(1400)), State::Lost(_)));
        assert_eq!(lease.hard_end(), at(1500));
    }

    #[test]
    fn no_order_of_events_revives_overstates_or_doubles() {
        // Every sequence of events to depth 12 over a coarse clock, states merged.
        let events = [
            TICK,
            Event::Failed,
            Event::Renewed(at(0)), // stands for "now + TTL", filled in below
            Event::Ended(LostReason::Taken),
        ];
        let mut queue = VecDeque::from([(granted(), 0u64, 900u64, 0)]);
        let mut seen = HashSet::new();
        let mut lost = 0;
        while let Some((lease, now, best, depth)) = queue.pop_front() {
            if depth == 12 || !seen.insert((format!("{lease:?}"), now)) {
                continue;
            }
            for event in events {
                for pass in [0, 100, 450] {
                    let (mut next, now) = (lease.clone(), now + pass);
                    let was_lost = matches!(lease.state(at(now)), State::Lost(_));
                    let mut best = best;
                    let event = match event {
                        Event::Renewed(_) => {
                            best = best.max(now + 900);
                            Event::Renewed(at(now + 900))
                        }
                        Event::Failed if !lease.in_flight => continue,
                        other => other,
                    };
                    let todo = next.step(event, at(now));
                    let is_lost = matches!(next.state(at(now)), State::Lost(_));
                    assert!(is_lost || !was_lost, "a lost lease came back");
                    assert!(next.deadline() <= at(best), "the deadline is later than any answer allows");
                    assert!(!(todo.renew && lease.in_flight), "two renewals under way");
                    assert!(!(todo.renew && is_lost), "a lost lease is renewed");
                    assert!(is_lost || next.wake_at() <= next.ends(), "it would sleep through its end");
                    assert!(next.state(next.ends()) != State::Held, "held at its end");
                    lost += u32::from(is_lost);
                    queue.push_back((next, now, best, depth + 1));
                }
            }
        }
        assert!(seen.len() > 1000 && lost > 0, "explored only {} states", seen.len());
    }
}
