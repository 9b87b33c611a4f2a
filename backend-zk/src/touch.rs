//! From when on a session certainly lives for its timeout: the two-write rule.

use std::time::Duration;

use lockcore::backend::Moment;

/// The writes of one session that were answered, by when they left.
///
/// A write that a follower hands to the leader does not itself prolong the session there; the follower reports which
/// sessions were heard with the leader's next ping, at most half a tick later, if it lives to do so. A later write that
/// was answered proves that it did. So the session lives for its timeout from the newest answered write that is at
/// least a quarter of the timeout older than some other answered write; half a tick is never more than that, as the
/// shortest timeout is two ticks. The connect that made the session was the leader's own and counts at once.
///
/// # Source
/// ZooKeeper 3.8, `LearnerHandler`, `LearnerSessionTracker.touchSession`; a lease that counted from one write was seen to
/// end at 0.44 of its timeout when the follower died.
#[derive(Debug)]
pub(crate) struct Touches {
    connect: Moment,
    quarter: Duration,
    /// In order of departure, no closer than a part of the timeout, but for the last.
    answered: Vec<Moment>,
    apart: Duration,
}

impl Touches {
    pub(crate) fn new(connect: Moment, timeout: Duration) -> Self {
        Self { connect, quarter: timeout / 4, answered: Vec::new(), apart: timeout / 32 }
    }

    /// Takes note of a write that left then and was answered.
    pub(crate) fn wrote(&mut self, sent: Moment) {
        let after = self.answered.partition_point(|known| *known <= sent);
        if after < self.answered.len() {
            // Answers may come in another order than requests; an older one adds nothing but a finer grid.
            return;
        }
        if let [.., before, last] = &mut self.answered[..]
            && before.until(*last) < self.apart
        {
            *last = sent;
        } else {
            self.answered.push(sent);
        }
        let from = self.from();
        let useless = self.answered.partition_point(|known| *known < from);
        self.answered.drain(..useless);
    }

    /// Returns the moment from which the session lives for its whole timeout.
    pub(crate) fn from(&self) -> Moment {
        let Some(newest) = self.answered.last() else { return self.connect };
        let proven = newest.saturating_sub(self.quarter);
        let before = self.answered.partition_point(|known| *known <= proven);
        before.checked_sub(1).map_or(self.connect, |at| self.answered[at]).max(self.connect)
    }

    /// Returns when the newest answered write left.
    pub(crate) fn newest(&self) -> Moment {
        self.answered.last().copied().unwrap_or(self.connect)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Moment {
        Moment::from_nanos(ms * 1_000_000)
    }

    #[test]
    fn one_write_proves_nothing_and_the_second_proves_the_first() {
        let mut touches = Touches::new(at(1000), Duration::from_millis(400));
        assert_eq!(touches.from(), at(1000));
        touches.wrote(at(1500));
        assert_eq!(touches.from(), at(1000), "one write after a silence");
        touches.wrote(at(1599));
        assert_eq!(touches.from(), at(1000), "less than a quarter of the timeout apart");
        touches.wrote(at(1600));
        assert_eq!(touches.from(), at(1500));
        touches.wrote(at(1550));
        assert_eq!(touches.from(), at(1500), "an answer out of order moves nothing back");
    }

    #[test]
    fn the_rule_is_that_of_the_whole_list_and_the_list_stays_short() {
        // Against the rule read off a list that forgets nothing.
        let timeout = Duration::from_millis(3200);
        let (mut touches, mut all, mut now, mut x) = (Touches::new(at(0), timeout), vec![], 0, 7u64);
        for _ in 0..20_000 {
            x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            now += match x >> 60 {
                0 => 900,
                n => n * 3,
            };
            touches.wrote(at(now));
            all.push(now);
            let exact = all.iter().rev().find(|w| **w + 800 <= now).copied().unwrap_or(0);
            let from = touches.from();
            assert!(from <= at(exact), "{from:?} is later than the rule allows: {exact}");
            assert!(from.until(at(exact)) <= timeout / 16, "{from:?} is far before {exact}");
            assert!(touches.answered.len() <= 40, "{} moments are kept", touches.answered.len());
            all.drain(..all.len().saturating_sub(2000));
        }
    }
}
