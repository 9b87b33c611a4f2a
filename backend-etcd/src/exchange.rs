//! Connections to the members, and one bounded exchange over them.

use std::{
    fmt,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use etcd_client::{Client, ConnectOptions, Error as Said};
use lockcore::backend::*;
use tokio::task::JoinHandle;

use crate::config::EtcdConfig;

/// One client a member; the one that answered last is asked first, and the next when it fails.
pub(crate) struct Members {
    config: EtcdConfig,
    current: AtomicUsize,
    links: Vec<Mutex<Option<Link>>>,
    /// The highest revision any answer showed.
    seen: AtomicI64,
    life: AtomicU64,
}

struct Link {
    client: Client,
    /// Ends with the runtime whose tasks drive the client.
    runtime: JoinHandle<()>,
}

impl Drop for Link {
    fn drop(&mut self) {
        self.runtime.abort();
    }
}

impl Members {
    pub(crate) fn new(config: EtcdConfig) -> Self {
        let links = config.endpoints.iter().map(|_| Mutex::new(None)).collect();
        Self { config, current: AtomicUsize::new(0), links, seen: AtomicI64::new(0), life: AtomicU64::new(0) }
    }

    pub(crate) fn endpoints(&self) -> &[String] {
        &self.config.endpoints
    }

    /// Returns the client of one member.
    pub(crate) async fn client(&self, at: usize) -> std::result::Result<Client, Said> {
        if let Some(link) = &*self.links[at].lock().unwrap_or_else(PoisonError::into_inner)
            && !link.runtime.is_finished()
        {
            return Ok(link.client.clone());
        }
        let mut options = ConnectOptions::new()
            .with_connect_timeout(self.config.connect_timeout)
            .with_keep_alive(self.config.keep_alive, self.config.keep_alive)
            .with_keep_alive_while_idle(true)
            .with_require_leader(true);
        if let (Some(user), Some(password)) = (&self.config.user, &self.config.password) {
            options = options.with_user(user, password);
        }
        let client = Client::connect([&self.config.endpoints[at]], Some(options)).await?;
        let link = Link { client: client.clone(), runtime: tokio::spawn(std::future::pending()) };
        *self.links[at].lock().unwrap_or_else(PoisonError::into_inner) = Some(link);
        Ok(client)
    }

    /// Turns to the next member, if nobody did since.
    pub(crate) fn turn(&self, from: usize) {
        let next = (from + 1) % self.links.len();
        let _ = self.current.compare_exchange(from, next, Ordering::Relaxed, Ordering::Relaxed);
    }

    pub(crate) fn seen(&self) -> i64 {
        self.seen.load(Ordering::Acquire)
    }

    pub(crate) fn sees(&self, revision: i64) {
        self.seen.fetch_max(revision, Ordering::AcqRel);
    }

    /// Counts the times that the cluster was seen to go back.
    pub(crate) fn life(&self) -> u64 {
        self.life.load(Ordering::Acquire)
    }

    /// Starts over after the cluster went back to `revision`.
    pub(crate) fn begin_life(&self, revision: i64) {
        self.seen.store(revision, Ordering::Release);
        self.life.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn close(&self) {
        for link in &self.links {
            link.lock().unwrap_or_else(PoisonError::into_inner).take();
        }
    }

    /// Asks once. The inner error is a refusal that the caller wants to look at.
    pub(crate) async fn ask<T, F>(
        &self,
        bound: Duration,
        send: impl FnOnce(Client) -> F,
    ) -> Result<std::result::Result<T, Said>>
    where
        F: Future<Output = std::result::Result<T, Said>>,
    {
        let at = self.current.load(Ordering::Relaxed) % self.links.len();
        let began = tokio::time::Instant::now();
        // Until there is a client nothing was sent: whatever goes wrong is definite.
        let client = match tokio::time::timeout(bound, self.client(at)).await {
            Ok(Ok(client)) => client,
            Ok(Err(said)) => {
                self.turn(at);
                let error = crate::error::error(said);
                return Err(match error.kind() {
                    ErrorKind::Unknown => {
                        Error::new(ErrorKind::Unavailable, "the member cannot be reached").with_source(error)
                    }
                    _ => error,
                });
            }
            Err(_) => {
                self.turn(at);
                return Err(Error::new(ErrorKind::Unavailable, "the member cannot be reached in time"));
            }
        };
        let asked = tokio::time::timeout(bound.saturating_sub(began.elapsed()), send(client));
        match asked.await {
            Err(_) => {
                self.turn(at);
                Err(Error::new(ErrorKind::Unknown, "the cluster did not answer in time"))
            }
            Ok(Ok(answer)) => Ok(Ok(answer)),
            Ok(Err(said)) if crate::error::lease_is_gone(&said) || crate::error::lease_exists(&said) => {
                Ok(Err(said))
            }
            Ok(Err(said)) => {
                let error = crate::error::error(said);
                if matches!(error.kind(), ErrorKind::Unknown | ErrorKind::Unavailable) {
                    self.turn(at);
                }
                Err(error)
            }
        }
    }
}

impl fmt::Debug for Members {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Members")
            .field("config", &self.config)
            .field("seen", &self.seen)
            .finish_non_exhaustive()
    }
}
