//! The thread on which sessions are served, apart from the application's runtimes.
//!
//! A session is served by a task that must run every few milliseconds. On a runtime of its own it is neither starved by
//! the application nor ended with a runtime that made the first call; what a starved application does not renew is
//! given up there at its deadline all the same.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use lockcore::backend::{Error, ErrorKind, Result};
use tokio::{
    runtime::{Builder, Handle},
    sync::mpsc,
    task::JoinHandle,
};
use zookeeper_client::StateWatcher;

/// How long the thread stays after its backend is gone, to close sessions in order.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// One thread with one runtime; it ends with this value.
pub(crate) struct Worker {
    handle: Handle,
    open: Arc<Mutex<Vec<StateWatcher>>>,
    /// Dropped, it lets the thread end.
    _alive: mpsc::Sender<()>,
}

impl Worker {
    pub(crate) fn start() -> Result<Self> {
        let no_thread =
            |e: std::io::Error| Error::new(ErrorKind::Unavailable, "no thread for sessions").with_source(e);
        let runtime = Builder::new_current_thread().enable_time().build().map_err(no_thread)?;
        let handle = runtime.handle().clone();
        let open: Arc<Mutex<Vec<StateWatcher>>> = Arc::default();
        let (alive, mut ended) = mpsc::channel(1);
        let closing = open.clone();
        let serve = move || {
            runtime.block_on(async {
                ended.recv().await;
                let watchers = std::mem::take(&mut *closing.lock().unwrap_or_else(PoisonError::into_inner));
                let _ = tokio::time::timeout(LAST_WORDS, all_ended(watchers)).await;
            });
        };
        std::thread::Builder::new().name("lockcore-zk".into()).spawn(serve).map_err(no_thread)?;
        Ok(Self { handle, open, _alive: alive })
    }

    /// Runs a future here.
    pub(crate) fn spawn<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        self.handle.spawn(task)
    }

    /// Takes note of a session that wants to be closed before the thread ends.
    pub(crate) fn serves(&self, watcher: StateWatcher) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|watcher| !watcher.peek_state().is_terminated());
        open.push(watcher);
    }

    /// Returns once every session so far has ended.
    pub(crate) async fn quiet(&self) {
        let watchers = self.open.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let _ = tokio::time::timeout(LAST_WORDS, all_ended(watchers)).await;
    }
}

async fn all_ended(watchers: Vec<StateWatcher>) {
    for mut watcher in watchers {
        while !watcher.peek_state().is_terminated() {
            watcher.changed().await;
        }
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").finish_non_exhaustive()
    }
}
