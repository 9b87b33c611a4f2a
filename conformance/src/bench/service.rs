//! What the suite needs from a backend's author.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use lockcore::{
    LockName, Verb,
    backend::{BootClock, Clock, LockBackend, OwnerDigest, async_trait},
};

use crate::faultline::Direction;

/// A store under test: a way to connect, and two roads around the code under test. The rest has bodies.
#[async_trait]
pub trait Service: Send + Sync + 'static {
    /// Opens a new connection, with a session of its own.
    async fn connect(&self) -> Arc<dyn LockBackend>;

    /// Reads who holds without the code under test, in the namespace of [`namespace`](Self::namespace).
    async fn holder(&self, name: &LockName) -> Option<OwnerDigest>;

    /// Removes the record, as an operator might.
    async fn steal(&self, name: &LockName);

    /// Returns the namespace of the cases of one run. Body: empty, for a store of the run's own.
    fn namespace(&self, _seed: u64) -> String {
        String::new()
    }

    /// Returns a namespace beside [`namespace`](Self::namespace), for a case that needs several. Body: the word and the
    /// seed.
    fn namespace_beside(&self, seed: u64, word: &str) -> String {
        format!("{word}-{:x}", seed & 0xffff_ffff)
    }

    /// Says that the store is somebody else's, who goes on using it: cases that need power over its servers or its records
    /// are not run. Body: no.
    fn foreign(&self) -> bool {
        false
    }

    /// Counts a request, and waits, if it `may_wait`, until the store may be asked once more: a bound on load for a store that
    /// others use. Body: no bound.
    async fn admit(&self, _may_wait: bool) {}

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

    /// Says that the store lives in its clients' processes: no server and no network are there to fail. Body: no.
    fn embedded(&self) -> bool {
        false
    }

    /// Counts the waiters in the store's own queue. Body: not offered.
    async fn queued(&self, _name: &LockName) -> Option<u32> {
        None
    }

    /// Returns where the store's servers listen for TCP. The suite then puts a [`Faultline`](crate::faultline::Faultline) before
    /// each of them for each client. Body: none, for a store that is not reached by TCP, or whose servers tell clients
    /// other addresses than these.
    fn servers(&self) -> Vec<SocketAddr> {
        Vec::new()
    }

    /// Opens a new connection through other addresses that lead to the [`servers`](Self::servers), in their order. Body:
    /// [`connect`](Self::connect), for a store without servers.
    async fn connect_through(&self, _addresses: &[SocketAddr]) -> Arc<dyn LockBackend> {
        self.connect().await
    }

    /// Returns switches of the service's own for lost, held and late replies. Body: none; the suite then uses proxies before
    /// the [`servers`](Self::servers), or, where there are none, loses and holds at the backend's door.
    fn wire(&self) -> Option<&dyn Wire> {
        None
    }

    /// Returns power over the store's servers. Body: none.
    ///
    /// A service that offers it is one case's own, with servers of its own: see [`Suite::own_servers`](crate::Suite::own_servers).
    fn power(&self) -> Option<&dyn Servers> {
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

/// Power over the servers of a store, each known by its number from 0. What it says is done is done: confirmed by the
/// system or by the server.
#[async_trait]
pub trait Servers: Send + Sync {
    /// Counts the servers, dead ones included.
    fn count(&self) -> usize;
    /// Kills one at once, with what it has not written.
    async fn kill(&self, server: usize);
    /// Starts one that was killed again, on its address and with what its data directory has, and waits until it serves, if a
    /// majority of the others does.
    async fn restart(&self, server: usize);
    /// Stops one without its knowing: SIGSTOP.
    async fn stop(&self, server: usize);
    /// Lets one that was stopped go on.
    async fn go_on(&self, server: usize);
    /// Returns the one whose death takes the others longest to get over: the leader, or any where all are alike.
    async fn leader(&self) -> usize {
        0
    }
    /// Sets the wall clock of one so many seconds ahead of the machine's, or behind. Body: not offered; who offers it says so
    /// by [`Suite::server_clocks`](crate::Suite::server_clocks).
    async fn set_clock_ahead(&self, _server: usize, _seconds: i64) {
        panic!("no clock of a server can be stepped here");
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
    /// Lets nothing through and says nothing. What was sent over a wire comes late, when the cut ends.
    fn cut(&self, on: bool);
    /// Refuses every request, certainly without an effect.
    fn refuse(&self, on: bool);
    /// Holds the next request of a verb until [`deliver`](Self::deliver), while later connections overtake it. Says
    /// whether this can be done here. Body: no.
    fn hold_request(&self, _verb: Verb) -> bool {
        false
    }
    /// Holds everything that goes one way. Says whether this can be done here. Body: no.
    fn one_way(&self, _direction: Direction, _on: bool) -> bool {
        false
    }
    /// Resets all connections. Says whether this can be done here. Body: no.
    fn reset(&self) -> bool {
        false
    }
    /// Ends every fault, also those that were armed and have hit nobody.
    fn heal(&self);
}
