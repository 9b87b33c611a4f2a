//! A store that the suite does not own: reached by the backend's own verbs alone, in namespaces that are swept later.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use lockcore::{
    LockName,
    backend::{BootClock, Call, Clock, LockBackend, Moment, OwnerDigest, Result, async_trait},
};
use tokio::sync::OnceCell;

use super::Service;

type Connecting = std::pin::Pin<Box<dyn Future<Output = Result<Arc<dyn LockBackend>>> + Send>>;

/// A store that others use, under the suite.
///
/// It is asked by the backend's verbs alone; who holds a lock is read on a connection of its own. The cases of a run have
/// namespaces that begin with `scratch-`; [`namespaces`](Self::namespaces) lists those to be swept.
///
/// # Units
/// At most [`per_second`](Self::per_second) verbs are begun in a second. An acquire or a renewal is not held up, because
/// its lease is dated from when it left; it counts, and the next other verb waits for it.
#[derive(Clone)]
pub struct Foreign {
    connect: Arc<dyn Fn() -> Connecting + Send + Sync>,
    run: String,
    server: Option<String>,
    ttl: Duration,
    embedded: bool,
    address: Option<String>,
    pace: Arc<Pace>,
    second_road: Arc<OnceCell<Arc<dyn LockBackend>>>,
}

/// A bound on load: the moments at which verbs may begin.
#[derive(Debug)]
struct Pace {
    apart: Duration,
    next: Mutex<Moment>,
}

/// So many verbs may begin at once after a while without any.
const BURST: u32 = 64;

impl Foreign {
    /// Takes a way to connect. `run` tells this run's namespaces from those of others.
    pub fn new<F>(run: &str, connect: impl Fn() -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<Arc<dyn LockBackend>>> + Send + 'static,
    {
        Self {
            connect: Arc::new(move || Box::pin(connect())),
            run: run.to_owned(),
            server: None,
            ttl: Duration::from_secs(1),
            embedded: false,
            address: None,
            pace: Arc::new(Pace::of(500)),
            second_road: Arc::default(),
        }
    }

    /// Names the server and its version.
    #[must_use]
    pub fn server(mut self, server: Option<String>) -> Self {
        self.server = server;
        self
    }

    /// Sets the TTL of cases that wait for its end. Default: 1 s.
    #[must_use]
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = ttl;
        self
    }

    /// Says that the store lives in its clients' processes. Default: it has a server.
    #[must_use]
    pub fn embedded(mut self, embedded: bool) -> Self {
        self.embedded = embedded;
        self
    }

    /// Says by what address a process started from this program reaches the store: what the program hands to
    /// [`child_main`](super::child_main). It stands in that process's environment, so it holds no secret. Default: by none.
    #[must_use]
    pub fn processes(mut self, address: Option<String>) -> Self {
        self.address = address;
        self
    }

    /// Sets how many verbs may be begun in a second. Default: 500.
    #[must_use]
    pub fn per_second(mut self, verbs: u32) -> Self {
        self.pace = Arc::new(Pace::of(verbs));
        self
    }

    /// Lists the namespaces that cases of a run may have written to.
    pub fn namespaces(run: &str) -> [String; 3] {
        [format!("scratch-{run}"), format!("scratch-{run}-one"), format!("scratch-{run}-two")]
    }

    /// Returns the store for one case, with connections of its own.
    pub fn for_a_case(&self) -> Self {
        Self { second_road: Arc::default(), ..self.clone() }
    }

    /// Reads who holds and how many wait, past the connections under test.
    async fn look(&self, name: &LockName) -> (Option<OwnerDigest>, Option<u32>) {
        self.admit(true).await;
        let backend = self.second_road.get_or_try_init(|| (self.connect)()).await;
        let backend = backend.unwrap_or_else(|error| panic!("a second connection: {error}"));
        let call = Call::for_tests(Arc::new(BootClock), Duration::from_secs(5))
            .in_namespace(&self.namespace(0))
            .expect("its parts are short and plain");
        let state = backend.inspect(&call, name).await;
        let state = state.unwrap_or_else(|error| panic!("a look on a second connection: {error}"));
        (state.holder.map(|holder| holder.owner), state.waiters)
    }
}

impl Pace {
    fn of(verbs: u32) -> Self {
        Self { apart: Duration::from_secs(1) / verbs.max(1), next: Mutex::new(BootClock::read()) }
    }

    /// Takes a turn. What may not wait is paid for by the next that may.
    async fn admit(&self, may_wait: bool) {
        let turn = {
            let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
            let turn = (*next).max(BootClock::read());
            *next = turn.saturating_add(self.apart);
            turn
        };
        let ahead = BootClock::read().until(turn);
        let allowed = self.apart * BURST;
        if may_wait && ahead > allowed {
            BootClock.sleep_until(BootClock::read().saturating_add(ahead - allowed)).await;
        }
    }
}

impl std::fmt::Debug for Foreign {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Foreign")
            .field("run", &self.run)
            .field("server", &self.server)
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl Service for Foreign {
    async fn connect(&self) -> Arc<dyn LockBackend> {
        (self.connect)().await.unwrap_or_else(|error| panic!("cannot connect: {error}"))
    }

    async fn holder(&self, name: &LockName) -> Option<OwnerDigest> {
        self.look(name).await.0
    }

    /// Nobody asks: a case that removes records needs `Removal`, which is not offered here.
    async fn steal(&self, name: &LockName) {
        panic!("{name}: records of a foreign store are not removed");
    }

    fn namespace(&self, _seed: u64) -> String {
        format!("scratch-{}", self.run)
    }

    fn namespace_beside(&self, _seed: u64, word: &str) -> String {
        format!("scratch-{}-{word}", self.run)
    }

    fn foreign(&self) -> bool {
        true
    }

    async fn admit(&self, may_wait: bool) {
        self.pace.admit(may_wait).await;
    }

    fn ttl(&self) -> Duration {
        self.ttl
    }

    fn embedded(&self) -> bool {
        self.embedded
    }

    async fn queued(&self, name: &LockName) -> Option<u32> {
        self.look(name).await.1
    }

    fn address(&self) -> Option<String> {
        self.address.clone()
    }

    async fn version(&self) -> Option<String> {
        self.server.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn no_more_verbs_begin_than_the_bound_allows() {
        let pace = Pace::of(1000);
        let began = BootClock::read();
        for n in 0..BURST + 100 {
            pace.admit(n % 2 == 1).await;
        }
        assert!(began.until(BootClock::read()) >= Duration::from_millis(99), "164 verbs in less than 99 ms");
    }
}
