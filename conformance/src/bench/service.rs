//! What the suite needs from a backend's author.

use std::{sync::Arc, time::Duration};

use lockcore::{
    LockName, Verb,
    backend::{BootClock, Clock, LockBackend, Owner, async_trait},
};

/// A store under test: a way to connect, and two roads around the code under test. The rest has bodies.
#[async_trait]
pub trait Service: Send + Sync + 'static {
    /// Opens a new connection, with a session of its own.
    async fn connect(&self) -> Arc<dyn LockBackend>;

    /// Reads the holder without the code under test, in the namespace of [`namespace`](Self::namespace).
    async fn holder(&self, name: &LockName) -> Option<Owner>;

    /// Removes the record, as an operator might.
    async fn steal(&self, name: &LockName);

    /// Returns the namespace of the cases of one run. Body: empty, for a store of the run's own.
    fn namespace(&self, _seed: u64) -> String {
        String::new()
    }

    /// Returns the TTL of cases that wait for its end. Body: 600 ms.
    fn ttl(&self) -> Duration {
        Duration::from_millis(600)
    }

    /// Returns the clock that the store's leases follow. Body: the machine's.
    fn clock(&self) -> Arc<dyn Clock> {
        Arc::new(BootClock)
    }

    /// Says whether a test owns the time, so that waiting costs nothing. Body: no.
    fn virtual_time(&self) -> bool {
        false
    }

    /// Counts the waiters in the store's own queue. Body: not offered.
    async fn queued(&self, _name: &LockName) -> Option<u32> {
        None
    }

    /// Returns the switches for lost, held and late replies between backend and store. Body: not offered; the suite then
    /// loses and holds them at the backend's door.
    fn wire(&self) -> Option<&dyn Wire> {
        None
    }

    /// Returns by what address a process started from this test binary reaches the store; it is handed to
    /// [`child_main`](super::child_main). Body: not offered.
    fn address(&self) -> Option<String> {
        None
    }

    /// Returns the server's name and version, such as `Redis 7.0.15`; results are kept by its first two numbers. Body: not
    /// offered.
    async fn version(&self) -> Option<String> {
        None
    }

    /// Returns what is wrong with the resource, for the suite's own mutants.
    #[doc(hidden)]
    fn flaw(&self) -> Option<super::Flaw> {
        None
    }
}

/// Loses, holds and delays requests and replies between clients and the store.
pub trait Wire: Send + Sync {
    /// Loses the next request of a verb: no effect, and the client cannot know.
    fn lose_request(&self, verb: Verb);
    /// Loses the next reply to a verb: the effect is there, and the client cannot know.
    fn lose_reply(&self, verb: Verb);
    /// Holds the replies to a verb, after their effect, until [`deliver`](Self::deliver).
    fn hold_replies(&self, verb: Verb);
    /// Delivers what is held.
    fn deliver(&self);
    /// Lets every reply come later, after its effect.
    fn delay_replies(&self, by: Duration);
    /// Swallows everything without a word.
    fn cut(&self, on: bool);
    /// Refuses every request, certainly without an effect.
    fn refuse(&self, on: bool);
    /// Ends every fault, also those that were armed and have hit nobody.
    fn heal(&self);
}
