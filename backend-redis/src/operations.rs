//! Acquisitions that have a request without an answer: until when a copy of one may still take the lock.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use lockcore::backend::{Moment, Owner};

/// When there are more, those that are over anyway are forgotten.
const MANY: usize = 1024;

/// Beyond its TTL nothing of an acquisition is left; the rest is for clocks that differ a little.
const SLACK: Duration = Duration::from_secs(60);

/// The acquisitions of one backend that have requests under way, or had one that was never answered.
#[derive(Debug, Default)]
pub(crate) struct Operations(Mutex<HashMap<Owner, Operation>>);

#[derive(Debug)]
struct Operation {
    first: Moment,
    over: Moment,
    /// The latest bound that a copy was sent with, by the server's clock.
    not_after: u64,
    copies: u32,
}

impl Operations {
    fn map(&self) -> MutexGuard<'_, HashMap<Owner, Operation>> {
        // The map is whole between any two of its operations.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns when the first request of this acquisition left that has no answer: `now`, if there is none.
    pub(crate) fn first_unanswered(&self, owner: &Owner, now: Moment) -> Moment {
        self.map().get(owner).map_or(now, |operation| operation.first)
    }

    /// Notes a request that is about to leave. Without an [`answered`](Self::answered) it stays in doubt.
    pub(crate) fn sends(&self, owner: &Owner, now: Moment, ttl: Duration, not_after: u64) {
        let mut map = self.map();
        if map.len() > MANY {
            map.retain(|_, operation| now < operation.over);
        }
        let over = now.saturating_add(ttl).saturating_add(SLACK);
        let operation = map.entry(*owner).or_insert(Operation { first: now, over, not_after, copies: 0 });
        operation.copies += 1;
        operation.not_after = operation.not_after.max(not_after);
    }

    /// Notes that a request was answered, or certainly did nothing.
    pub(crate) fn answered(&self, owner: &Owner) {
        let mut map = self.map();
        if let Some(operation) = map.get_mut(owner) {
            operation.copies = operation.copies.saturating_sub(1);
            if operation.copies == 0 {
                map.remove(owner);
            }
        }
    }

    /// Returns until when a copy may take the lock, if one has no answer.
    pub(crate) fn in_doubt(&self, owner: &Owner) -> Option<u64> {
        self.map().get(owner).map(|operation| operation.not_after)
    }

    /// Forgets an acquisition whose copies are all told off.
    pub(crate) fn forget(&self, owner: &Owner) {
        self.map().remove(owner);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unanswered_request_binds_all_later_ones_of_its_owner() {
        let operations = Operations::default();
        let (owner, ttl) = (Owner::random(), Duration::from_secs(5));
        let at = |ms: u64| Moment::from_nanos(ms * 1_000_000);
        assert_eq!(operations.first_unanswered(&owner, at(1)), at(1));
        operations.sends(&owner, at(1), ttl, 100);
        operations.answered(&owner);
        assert_eq!(operations.in_doubt(&owner), None, "an answered request is in doubt");
        operations.sends(&owner, at(2), ttl, 200);
        operations.sends(&owner, at(3), ttl, 150);
        operations.answered(&owner);
        assert_eq!(operations.first_unanswered(&owner, at(9)), at(2));
        assert_eq!(operations.in_doubt(&owner), Some(200), "the latest bound was forgotten");
        operations.forget(&owner);
        assert_eq!(operations.in_doubt(&owner), None);
    }

    #[test]
    fn what_is_over_is_forgotten_when_there_is_much() {
        let operations = Operations::default();
        let ttl = Duration::from_secs(1);
        for _ in 0..=MANY {
            operations.sends(&Owner::random(), Moment::from_nanos(0), ttl, 1);
        }
        let late = Moment::from_nanos(0).saturating_add(ttl + SLACK);
        operations.sends(&Owner::random(), late, ttl, 1);
        assert_eq!(operations.map().len(), 1);
    }
}
