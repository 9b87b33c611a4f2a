//! Connections to the members, and one bounded exchange over them.

use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicI64, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use etcd_client::{Client, ConnectOptions, Error as Said, WatchFilterType, WatchOptions};
use lockcore::backend::*;
use tokio::{sync::Notify, task::JoinHandle, time::Instant};

use crate::{
    config::EtcdConfig,
    error::{Auth, auth_trouble, error, is_of_the_cluster, lease_exists, lease_is_gone, lost_connection},
};

/// A member that has said nothing for this long, while somebody waited for it, is not asked first any more.
const SILENCE: Duration = Duration::from_millis(250);

/// One client a member. One member is asked by everybody until there is evidence against it: it refuses or loses the
/// connection, it knows no leader, or it is silent. Then the next one is. A refusal that any other would give as well is
/// none: it is an answer.
pub(crate) struct Members {
    config: EtcdConfig,
    current: AtomicUsize,
    turned: Notify,
    seats: Vec<Seat>,
    /// The highest revision and the highest term that any answer showed.
    revision: AtomicI64,
    term: AtomicU64,
    life: Arc<AtomicU64>,
}

#[derive(Default)]
struct Seat {
    link: Mutex<Option<Link>>,
    /// Held by who makes a connection: others wait for it instead of making more.
    dialling: tokio::sync::Mutex<()>,
    answers: AtomicU64,
    /// Connections made so far.
    made: AtomicU64,
}

/// Which connection to which member something is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Post {
    at: usize,
    number: u64,
}

struct Link {
    client: Arc<Client>,
    /// Counts the connections to this member.
    number: u64,
    /// Ends with the connection, and with the runtime whose tasks drive the client.
    guard: JoinHandle<()>,
    life: Arc<AtomicU64>,
}

impl Drop for Link {
    /// Nobody stands guard between this connection and the next, and the cluster may be restored meanwhile.
    fn drop(&mut self) {
        self.guard.abort();
        self.life.fetch_add(1, Ordering::AcqRel);
    }
}

/// What may be done with an exchange that got no answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Repeat {
    /// It may have been executed, which the caller must know.
    Never,
    /// It only looks, or doing it twice is doing it once: the next member may be asked.
    Freely,
}

/// An exchange that waits. Dropped without an answer, it is evidence against a member that was silent meanwhile: who waits
/// may be dropped before our own bound is reached.
struct Waiting<'a> {
    members: &'a Members,
    at: usize,
    /// The connection, once there is one.
    on: Option<Post>,
    since: Instant,
    answers: u64,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        let silent = self.members.seats[self.at].answers.load(Ordering::Relaxed) == self.answers;
        if silent && self.since.elapsed() >= SILENCE {
            // The connection may be dead without a word, and the member well: the next exchange with it dials anew.
            if let Some(post) = self.on {
                self.members.hang_up(post);
            }
            self.members.turn(self.at);
        }
    }
}

impl Seat {
    fn standing(&self, at: usize) -> Option<(Arc<Client>, Post)> {
        let link = self.link.lock().unwrap_or_else(PoisonError::into_inner);
        let link = link.as_ref().filter(|link| !link.guard.is_finished())?;
        Some((link.client.clone(), Post { at, number: link.number }))
    }
}

impl Members {
    pub(crate) fn new(config: EtcdConfig) -> Self {
        let seats = config.endpoints.iter().map(|_| Seat::default()).collect();
        Self {
            config,
            current: AtomicUsize::new(0),
            turned: Notify::new(),
            seats,
            revision: AtomicI64::new(0),
            term: AtomicU64::new(0),
            life: Arc::default(),
        }
    }

    pub(crate) fn config(&self) -> &EtcdConfig {
        &self.config
    }

    /// Returns the client of one member.
    pub(crate) async fn client(&self, at: usize) -> std::result::Result<Arc<Client>, Said> {
        self.link(at).await.map(|(client, _)| client)
    }

    async fn link(&self, at: usize) -> std::result::Result<(Arc<Client>, Post), Said> {
        let seat = &self.seats[at];
        if let Some(standing) = seat.standing(at) {
            return Ok(standing);
        }
        let _alone = seat.dialling.lock().await;
        if let Some(standing) = seat.standing(at) {
            return Ok(standing);
        }
        let endpoint = &self.config.endpoints[at];
        let mut options = ConnectOptions::new()
            .with_connect_timeout(self.config.connect_timeout)
            .with_keep_alive(self.config.keep_alive, self.config.keep_alive)
            .with_keep_alive_while_idle(true)
            .with_require_leader(true)
            .with_auto_token_refresh(true);
        if let (Some(user), Some(password)) = (&self.config.user, &self.config.password) {
            options = options.with_user(user, password);
        }
        #[cfg(feature = "tls")]
        if endpoint.starts_with("https:") {
            options = options.with_tls(self.config.tls.read().map_err(|e| Said::InvalidArgs(e.to_string()))?);
        }
        let client = match Client::connect([endpoint], Some(options)).await {
            // Nothing is dialled here but to log in, which answers with a status: this is about the files.
            Err(Said::TransportError(error)) => {
                let cause = std::error::Error::source(&error).map_or_else(String::new, ToString::to_string);
                return Err(Said::InvalidArgs(format!("{endpoint}: {error}: {cause}")));
            }
            made => made?,
        };
        let client = Arc::new(client);
        let number = seat.made.fetch_add(1, Ordering::Relaxed);
        let guard = tokio::spawn(stands_guard(client.clone(), self.life.clone()));
        let link = Link { client: client.clone(), number, guard, life: self.life.clone() };
        *seat.link.lock().unwrap_or_else(PoisonError::into_inner) = Some(link);
        Ok((client, Post { at, number }))
    }

    /// Lets go of a connection, unless there is another in its place already. What is under way on it goes on.
    fn hang_up(&self, post: Post) {
        let mut link = self.seats[post.at].link.lock().unwrap_or_else(PoisonError::into_inner);
        if link.as_ref().is_some_and(|link| link.number == post.number) {
            link.take();
            drop(link);
            self.turned.notify_waiters();
        }
    }

    fn is_manned(&self, post: Post) -> bool {
        let link = self.seats[post.at].link.lock().unwrap_or_else(PoisonError::into_inner);
        self.current() == post.at && link.as_ref().is_some_and(|link| link.number == post.number)
    }

    /// Returns which member is asked.
    pub(crate) fn current(&self) -> usize {
        self.current.load(Ordering::Relaxed) % self.seats.len()
    }

    /// Turns to the next member, if nobody did since.
    pub(crate) fn turn(&self, from: usize) {
        let next = (from + 1) % self.seats.len();
        if self.current.compare_exchange(from, next, Ordering::Relaxed, Ordering::Relaxed).is_ok()
            && next != from
        {
            self.turned.notify_waiters();
        }
    }

    /// Returns once others are asked by another connection than this.
    pub(crate) async fn moved_from(&self, post: Post) {
        loop {
            let mut turned = std::pin::pin!(self.turned.notified());
            turned.as_mut().enable();
            if !self.is_manned(post) {
                return;
            }
            turned.await;
        }
    }

    /// Counts the times that the cluster may have gone back: what this process knows of it has to be compared anew.
    pub(crate) fn life(&self) -> u64 {
        self.life.load(Ordering::Acquire)
    }

    /// Returns the highest revision and term seen so far, to hand to [`saw`](Self::saw) with an answer to a request that
    /// leaves after this.
    pub(crate) fn seen(&self) -> (i64, u64) {
        (self.revision.load(Ordering::Acquire), self.term.load(Ordering::Acquire))
    }

    /// Takes down what an answer shows; false: the cluster has gone back behind what was seen before the request left,
    /// which only a restore does. A new term is no proof of one, but a restored cluster counts its terms anew.
    pub(crate) fn saw(&self, before: (i64, u64), revision: i64, term: u64) -> bool {
        if revision < before.0 || term < before.1 {
            self.revision.store(revision, Ordering::Release);
            self.term.store(term, Ordering::Release);
            self.life.fetch_add(1, Ordering::AcqRel);
            return false;
        }
        self.revision.fetch_max(revision, Ordering::AcqRel);
        let known = self.term.fetch_max(term, Ordering::AcqRel);
        if known != 0 && known < term {
            self.life.fetch_add(1, Ordering::AcqRel);
        }
        true
    }

    pub(crate) fn close(&self) {
        for seat in &self.seats {
            seat.link.lock().unwrap_or_else(PoisonError::into_inner).take();
        }
    }

    /// Asks the current member; the next ones where the request certainly had no effect, or may be repeated. The inner
    /// error is a refusal that the caller wants to look at.
    pub(crate) async fn ask<T, F>(
        &self,
        bound: Duration,
        repeat: Repeat,
        send: impl Fn(Arc<Client>) -> F,
    ) -> Result<std::result::Result<T, Said>>
    where
        F: Future<Output = std::result::Result<T, Said>>,
    {
        self.ask_at(bound, repeat, send).await.map(|(_, answer)| answer)
    }

    /// As [`ask`](Self::ask), and tells where the answer came from.
    pub(crate) async fn ask_at<T, F>(
        &self,
        bound: Duration,
        repeat: Repeat,
        send: impl Fn(Arc<Client>) -> F,
    ) -> Result<(Post, std::result::Result<T, Said>)>
    where
        F: Future<Output = std::result::Result<T, Said>>,
    {
        let until = Instant::now() + bound;
        let mut left = self.seats.len();
        loop {
            let at = self.current();
            let time = until.saturating_duration_since(Instant::now());
            // What may be repeated leaves time for the others; the rest waits as long as it may.
            let share = match repeat {
                Repeat::Freely => (time / u32::try_from(left.max(1)).unwrap_or(1)).max(time.min(SILENCE)),
                Repeat::Never => time,
            };
            left = left.saturating_sub(1);
            // In a box, so that who waits between exchanges does not carry the room for one.
            let answer = Box::pin(self.ask_one(at, share, &send)).await;
            let again = left > 0 && Instant::now() < until;
            match answer {
                Err(refused) if again && refused.kind() == ErrorKind::Unavailable => {}
                Err(unknown) if again && unknown.kind() == ErrorKind::Unknown && repeat == Repeat::Freely => {
                }
                answer => return answer,
            }
            // Alone, asking the same member at once tells nothing new.
            if self.current() == at {
                self.turn(at);
            }
        }
    }

    async fn ask_one<T, F>(
        &self,
        at: usize,
        bound: Duration,
        send: impl Fn(Arc<Client>) -> F,
    ) -> Result<(Post, std::result::Result<T, Said>)>
    where
        F: Future<Output = std::result::Result<T, Said>>,
    {
        let since = Instant::now();
        let answers = self.seats[at].answers.load(Ordering::Relaxed);
        let mut waiting = Waiting { members: self, at, on: None, since, answers };
        // Until there is a client nothing was sent: whatever goes wrong is definite.
        let (client, post) = match tokio::time::timeout(bound, self.link(at)).await {
            Ok(Ok(link)) => link,
            Ok(Err(said)) => {
                self.turn(at);
                self.note(&said);
                let error = error(said);
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
        waiting.on = Some(post);
        let asked = tokio::time::timeout(bound.saturating_sub(since.elapsed()), async {
            let answer = send(client.clone()).await;
            match &answer {
                // Refused before anything was done; with a fresh token the same request is in order.
                Err(said) if self.config.user.is_some() && auth_trouble(said) == Auth::Stale => {
                    client.refresh_token().await?;
                    send(client).await
                }
                _ => answer,
            }
        });
        match asked.await {
            Err(_) => {
                self.turn(at);
                Err(Error::new(ErrorKind::Unknown, "the cluster did not answer in time"))
            }
            Ok(Ok(answer)) => {
                self.seats[at].answers.fetch_add(1, Ordering::Relaxed);
                Ok((post, Ok(answer)))
            }
            Ok(Err(said)) if lease_is_gone(&said) || lease_exists(&said) => {
                self.seats[at].answers.fetch_add(1, Ordering::Relaxed);
                Ok((post, Err(said)))
            }
            Ok(Err(said)) => {
                self.note(&said);
                if !lost_connection(&said) {
                    self.seats[at].answers.fetch_add(1, Ordering::Relaxed);
                }
                let speaks_for_all = is_of_the_cluster(&said);
                let error = error(said);
                if !speaks_for_all && matches!(error.kind(), ErrorKind::Unknown | ErrorKind::Unavailable) {
                    self.turn(at);
                }
                Err(error)
            }
        }
    }

    /// A connection that broke may have broken because the cluster was taken down and restored.
    fn note(&self, said: &Said) {
        if lost_connection(said) {
            self.life.fetch_add(1, Ordering::AcqRel);
        }
    }
}

/// Returns when a connection has ended, and counts that. The client library dials again without a word; but a cluster can
/// only be restored while its members are down, and who is idle meanwhile would never hear of it.
///
/// A watch on a key that nobody writes ends with the connection.
async fn stands_guard(client: Arc<Client>, life: Arc<AtomicU64>) {
    let options = WatchOptions::new().with_filters([WatchFilterType::NoPut, WatchFilterType::NoDelete]);
    if let Ok(mut stream) = client.watch_client().watch("lockcore/nothing", Some(options)).await {
        while let Ok(Some(message)) = stream.message().await {
            if message.canceled() {
                // Not allowed to watch: the connection is fine.
                return std::future::pending().await;
            }
        }
    }
    life.fetch_add(1, Ordering::AcqRel);
}

impl fmt::Debug for Members {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Members")
            .field("config", &self.config)
            .field("asks", &self.config.endpoints[self.current()])
            .field("revision", &self.revision)
            .finish_non_exhaustive()
    }
}
