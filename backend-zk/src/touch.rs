//! From when on a session certainly lives for its timeout: the two-write rule.

use std::time::Duration;

use lockcore::backend::Moment;

/// The writes of one session that were answered.
///
/// A write that a follower hands to the leader does not itself prolong the session there; the follower reports which
/// sessions were heard with the leader's next ping, at most half a tick later, if it lives to do so. A later write that
/// was answered proves that it did. So the session lives for its timeout from the departure of the newest write whose
/// answer came a quarter of the timeout before another answered write left; half a tick is never more than that, as the
/// shortest timeout is two ticks. It is the answer that counts back, not the departure: a write that was held up on its
/// way is heard late, and just as late reported. The connect that made the session was the leader's own and counts at
/// once; a reconnect asks the leader again.
///
/// # Source
/// ZooKeeper 3.8, `LearnerHandler`, `LearnerSessionTracker.touchSession`; a lease that counted from one write was seen to
/// end at 0.44 of its timeout when the follower died.
#[derive(Debug)]
pub(crate) struct Touches {
    connect: Moment,
    quarter: Duration,
    /// In order of departure and of answer, no closer than a part of the timeout, but for the last.
    answered: Vec<Write>,
    apart: Duration,
}

#[derive(Clone, Copy, Debug)]
struct Write {
    sent: Moment,
    answered: Moment,
}

impl Touches {
    pub(crate) fn new(connect: Moment, timeout: Duration) -> Self {
        Self { connect, quarter: timeout / 4, answered: Vec::new(), apart: timeout / 32 }
    }

    /// Takes note of a write that left then and was answered now.
    pub(crate) fn wrote(&mut self, sent: Moment, answered: Moment) {
        if self.answered.last().is_some_and(|newest| sent <= newest.sent) {
            // Answers may be looked at in another order than requests left; an older one adds nothing.
            return;
        }
        let write = Write { sent, answered };
        if let [.., before, last] = &mut self.answered[..]
            && before.sent.until(last.sent) < self.apart
        {
            *last = write;
        } else {
            self.answered.push(write);
        }
        let from = self.from();
        let useless = self.answered.partition_point(|known| known.sent < from);
        self.answered.drain(..useless);
    }

    /// Returns the moment from which the session lives for its whole timeout.
    pub(crate) fn from(&self) -> Moment {
        let Some(newest) = self.answered.last() else { return self.connect };
        let proven = newest.sent.saturating_sub(self.quarter);
        let before = self.answered.partition_point(|known| known.answered <= proven);
        before.checked_sub(1).map_or(self.connect, |at| self.answered[at].sent).max(self.connect)
    }

    /// Returns when the newest answered write left.
    pub(crate) fn newest(&self) -> Moment {
        self.answered.last().map_or(self.connect, |newest| newest.sent)
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
        let mut wrote = |sent, answered| {
            touches.wrote(at(sent), at(answered));
            touches.from()
        };
        assert_eq!(wrote(1500, 1501), at(1000), "one write after a silence");
        assert_eq!(wrote(1600, 1601), at(1000), "less than a quarter of the timeout apart");
        assert_eq!(wrote(1601, 1602), at(1500));
        assert_eq!(wrote(1550, 1603), at(1500), "an answer out of order moves nothing back");
    }

    #[test]
    fn a_write_that_was_held_up_on_its_way_counts_from_its_answer_only() {
        // Left at 1050, heard at 1150 together with the one that left then; the follower dies before it reports either.
        let mut touches = Touches::new(at(1000), Duration::from_millis(400));
        touches.wrote(at(1050), at(1150));
        touches.wrote(at(1150), at(1151));
        assert_eq!(touches.from(), at(1000));
        touches.wrote(at(1250), at(1251));
        assert_eq!(touches.from(), at(1050));
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
            let late = now + (x >> 40) % 3;
            touches.wrote(at(now), at(late));
            all.push((now, late));
            let exact = all.iter().rev().find(|(_, late)| *late + 800 <= now).map_or(0, |(sent, _)| *sent);
            let from = touches.from();
            assert!(from <= at(exact), "{from:?} is later than the rule allows: {exact}");
            assert!(from.until(at(exact)) <= timeout / 16, "{from:?} is far before {exact}");
            assert!(touches.answered.len() <= 40, "{} moments are kept", touches.answered.len());
            all.drain(..all.len().saturating_sub(2000));
        }
    }
}
