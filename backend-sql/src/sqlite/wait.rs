//! How a waiter learns that its turn has come: it looks again, and a release through the same backend wakes one early.

use std::{
    collections::HashMap,
    ops::RangeInclusive,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::sync::Notify;

use super::{place::random, wire::Key};

/// How long a waiter sleeps between looks: at random between the shortest and a bound that grows, so that waiters which
/// began together do not look together.
#[derive(Debug)]
pub(super) struct Pace {
    shortest: Duration,
    longest: Duration,
    bound: Duration,
}

impl Pace {
    pub(super) fn new(poll: &RangeInclusive<Duration>) -> Self {
        Self { shortest: *poll.start(), longest: *poll.end(), bound: (*poll.start() * 2).min(*poll.end()) }
    }

    /// Returns the next nap, which ends with the holder's lease at the latest, or within a few milliseconds after it.
    pub(super) fn next(&mut self, left_of_holder: Duration) -> Duration {
        let nap = self.shortest + (self.bound - self.shortest).mul_f64(share());
        self.bound = (self.bound * 3 / 2).min(self.longest);
        nap.min(left_of_holder + self.shortest.mul_f64(share()))
    }
}

fn share() -> f64 {
    f64::from(random()) / f64::from(u32::MAX)
}

/// Waiters of this process, so that a release here need not be found by looking.
///
/// A hint only: it says "look now", never "it is yours".
#[derive(Debug, Default)]
pub(super) struct Hints {
    // Most backends have no waiter at most times; a release then costs one load.
    waiting: AtomicUsize,
    names: Mutex<HashMap<Key, Arc<Notify>>>,
}

impl Hints {
    /// Registers a waiter until the answer is dropped.
    pub(super) fn register(self: &Arc<Self>, key: &Key) -> Waiter {
        let notify = self.names().entry(key.clone()).or_default().clone();
        self.waiting.fetch_add(1, Ordering::SeqCst);
        Waiter { hints: self.clone(), key: key.clone(), notify }
    }

    /// Tells one waiter of the name to look now.
    pub(super) fn tell(&self, key: &Key) {
        if self.waiting.load(Ordering::SeqCst) == 0 {
            return;
        }
        if let Some(notify) = self.names().get(key) {
            notify.notify_one();
        }
    }

    fn names(&self) -> MutexGuard<'_, HashMap<Key, Arc<Notify>>> {
        // The map is whole between any two of its operations.
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One registered waiter.
#[derive(Debug)]
pub(super) struct Waiter {
    hints: Arc<Hints>,
    key: Key,
    notify: Arc<Notify>,
}

impl Waiter {
    /// Returns when a release was seen in this process.
    pub(super) async fn told(&self) {
        self.notify.notified().await;
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        let mut names = self.hints.names();
        self.hints.waiting.fetch_sub(1, Ordering::SeqCst);
        // The map and this waiter: nobody else is registered, and nobody can be while the map is ours.
        if Arc::strong_count(&self.notify) == 2 {
            names.remove(&self.key);
        } else {
            // A hint that came while this waiter was leaving goes on to the next.
            self.notify.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use lockcore::backend::LockName;

    use super::*;

    fn key(name: &str) -> Key {
        Key { namespace: "".into(), name: LockName::parse(name).unwrap() }
    }

    #[test]
    fn naps_grow_and_end_with_the_holders_lease() {
        let (shortest, longest) = (Duration::from_millis(5), Duration::from_millis(50));
        let mut pace = Pace::new(&(shortest..=longest));
        let far = Duration::from_secs(60);
        let naps: Vec<Duration> = (0..200).map(|_| pace.next(far)).collect();
        assert!(naps.iter().all(|nap| (shortest..=longest).contains(nap)), "{naps:?}");
        assert!(naps[0] <= shortest * 2, "the first nap is long: {:?}", naps[0]);
        assert!(naps[20..].iter().any(|nap| *nap > longest / 2), "naps do not grow: {naps:?}");
        assert!(naps[20..].windows(2).any(|two| two[0] != two[1]), "naps have no jitter");
        let left = Duration::from_millis(3);
        assert!((0..200).all(|_| pace.next(left) <= left + shortest), "a nap outlasts the holder's lease");
    }

    #[tokio::test]
    async fn one_release_wakes_one_waiter_of_that_name_and_hints_are_forgotten() {
        let hints = Arc::new(Hints::default());
        let (first, second, other) =
            (hints.register(&key("a")), hints.register(&key("a")), hints.register(&key("b")));
        hints.tell(&key("a"));
        first.told().await;
        let quiet = tokio::time::timeout(Duration::from_millis(5), async {
            tokio::select! { () = second.told() => "second", () = other.told() => "other" }
        });
        assert!(quiet.await.is_err(), "one release woke two");
        drop((first, second, other));
        assert!(hints.names().is_empty());
        assert_eq!(hints.waiting.load(Ordering::SeqCst), 0);
        hints.tell(&key("a"));
    }

    #[tokio::test]
    async fn a_hint_to_a_waiter_that_leaves_reaches_the_next() {
        let hints = Arc::new(Hints::default());
        let (first, second) = (hints.register(&key("a")), hints.register(&key("a")));
        hints.tell(&key("a"));
        drop(first);
        second.told().await;
    }
}
