//! Sessions: one for each class of TTLs, kept alive and kept honest by a keeper of its own.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use lockcore::backend::{Clock, Error, ErrorKind, Moment, Result};
use zookeeper_client::{Acls, Client, CreateMode, Error as Said, SessionState, Stat};

use crate::{keys::beats, steps::Inner, touch::Touches};

/// One session. Dropped by all, it closes.
pub(crate) struct Session {
    pub(crate) client: Client,
    pub(crate) id: i64,
    /// What the server agreed to.
    pub(crate) timeout: Duration,
    pub(crate) clock: Arc<dyn Clock>,
    /// The node that its heartbeat writes.
    pub(crate) beat: String,
    /// Who may do what with the nodes that it makes.
    pub(crate) acls: Acls<'static>,
    touches: Mutex<Touches>,
    used: Mutex<Moment>,
}

impl Session {
    pub(crate) fn new(
        client: Client,
        clock: Arc<dyn Clock>,
        connect: Moment,
        beat: String,
        acls: Acls<'static>,
    ) -> Self {
        let (id, timeout) = (client.session_id().0, client.session_timeout());
        Self {
            client,
            id,
            timeout,
            beat,
            acls,
            touches: Mutex::new(Touches::new(connect, timeout)),
            used: Mutex::new(clock.now()),
            clock,
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.client.state().is_terminated()
    }

    pub(crate) fn is_connected(&self) -> bool {
        matches!(self.client.state(), SessionState::SyncConnected | SessionState::ConnectedReadOnly)
    }

    /// Says whether its next grants are good for about their TTL, or soon will be: a server that is slow to answer is not
    /// helped by one session more.
    pub(crate) fn is_fresh(&self) -> bool {
        let now = self.clock.now();
        let (from, newest) = (self.from(), self.newest());
        let good = now < from.saturating_add(self.timeout.mul_f64(0.6));
        let at_work =
            now < newest.saturating_add(self.timeout / 4) && now < from.saturating_add(self.timeout);
        self.is_connected() && (good || at_work)
    }

    /// Between two heartbeats. Every write that was answered counts as one.
    pub(crate) fn pace(&self) -> Duration {
        self.timeout / 8
    }

    /// Takes note of a write that left then and has been answered.
    pub(crate) fn wrote(&self, sent: Moment) {
        let now = self.clock.now();
        self.touches.lock().unwrap_or_else(PoisonError::into_inner).wrote(sent, now);
    }

    /// Returns the moment from which the session lives for its whole timeout.
    pub(crate) fn from(&self) -> Moment {
        self.touches.lock().unwrap_or_else(PoisonError::into_inner).from()
    }

    fn newest(&self) -> Moment {
        self.touches.lock().unwrap_or_else(PoisonError::into_inner).newest()
    }

    pub(crate) fn uses(&self) {
        *self.used.lock().unwrap_or_else(PoisonError::into_inner) = self.clock.now();
    }

    fn unused_for(&self) -> Duration {
        self.used.lock().unwrap_or_else(PoisonError::into_inner).until(self.clock.now())
    }

    /// Says from when on and how long a lease is good that was proven by a request which left then.
    ///
    /// The session outlives the TTL; what it has above makes up for the rule's older start. A tenth of that is left to
    /// the drift margin.
    pub(crate) fn dated(&self, sent: Moment, ttl: Duration) -> (Moment, Duration) {
        let ttl = ttl.min(self.timeout);
        let above = (self.timeout - ttl).mul_f64(0.9);
        (sent.min(self.from().saturating_add(above)), ttl)
    }

    /// Waits for a connection, before anything is queued: the client library would send it whenever it is connected again.
    /// Returns what is left of the bound.
    pub(crate) async fn ready(&self, bound: Duration) -> Result<Duration> {
        let began = self.clock.now();
        if self.client.state() == SessionState::Disconnected {
            self.settled(began.saturating_add(bound)).await;
        }
        match self.client.state() {
            SessionState::SyncConnected | SessionState::ConnectedReadOnly => {
                Ok(bound.saturating_sub(began.until(self.clock.now())))
            }
            SessionState::Disconnected => {
                Err(Error::new(ErrorKind::Unavailable, "the session has no connection at the moment"))
            }
            SessionState::AuthFailed => {
                Err(Error::new(ErrorKind::Unauthorized, "the ensemble refused the user"))
            }
            SessionState::Expired | SessionState::Closed => {
                Err(Error::new(ErrorKind::Unavailable, "the session is over"))
            }
        }
    }

    /// Bounds requests that are on their way. The inner error is what the server said.
    pub(crate) async fn ask<T>(&self, bound: Duration, asked: impl Future<Output = T>) -> Result<T> {
        tokio::time::timeout(bound, asked)
            .await
            .map_err(|_| Error::new(ErrorKind::Unknown, "the ensemble did not answer in time"))
    }

    /// Writes the heartbeat; returns the zxid of the write.
    pub(crate) async fn write_beat(&self, bound: Duration) -> Result<i64> {
        let bound = self.ready(bound).await?;
        loop {
            let sent = self.clock.now();
            match self.ask(bound, self.client.set_data(&self.beat, b"", None)).await? {
                Ok(stat) => {
                    self.wrote(sent);
                    return Ok(stat.mzxid);
                }
                // Somebody removed it.
                Err(Said::NoNode) => self.make_beat(bound).await?,
                Err(said) => return Err(crate::error::error(said)),
            }
        }
    }

    /// Makes the heartbeat's node.
    pub(crate) async fn make_beat(&self, bound: Duration) -> Result<()> {
        let parent = self.beat.rsplit_once('/').map_or("", |(parent, _)| parent);
        loop {
            let sent = self.clock.now();
            let options = CreateMode::Ephemeral.with_acls(self.acls);
            match self.ask(bound, self.client.create(&self.beat, b"", &options)).await? {
                Ok(_) => self.wrote(sent),
                Err(Said::NodeExists) => {}
                Err(Said::NoNode) => {
                    self.make_all(bound, parent).await?;
                    continue;
                }
                Err(said) => return Err(crate::error::error(said)),
            }
            return Ok(());
        }
    }

    /// Makes a node and those above it, where they are missing.
    pub(crate) async fn make_all(&self, bound: Duration, path: &str) -> Result<()> {
        let options = CreateMode::Persistent.with_acls(self.acls);
        self.ask(bound, self.client.mkdir(path, &options)).await?.map_err(crate::error::error)
    }

    /// Returns once the session is connected or over, or the moment has come.
    pub(crate) async fn settled(&self, until: Moment) {
        let mut watcher = self.client.state_watcher();
        let changed = async {
            while watcher.peek_state() == SessionState::Disconnected {
                watcher.changed().await;
            }
        };
        tokio::select! {
            () = changed => {}
            () = self.clock.sleep_until(until) => {}
        }
    }

    /// Looks whether a node is there.
    pub(crate) async fn stat(&self, bound: Duration, path: &str) -> Result<Option<Stat>> {
        let bound = self.ready(bound).await?;
        self.ask(bound, self.client.check_stat(path)).await?.map_err(crate::error::error)
    }

    /// Removes one node. Says whether it stood.
    pub(crate) async fn delete(&self, bound: Duration, path: &str) -> Result<bool> {
        let bound = self.ready(bound).await?;
        let sent = self.clock.now();
        match self.ask(bound, self.client.delete(path, None)).await? {
            Ok(()) => {
                self.wrote(sent);
                Ok(true)
            }
            Err(Said::NoNode) => Ok(false),
            Err(said) => Err(crate::error::error(said)),
        }
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("id", &format_args!("{:#x}", self.id))
            .field("timeout", &self.timeout)
            .field("state", &self.client.state())
            .finish_non_exhaustive()
    }
}

/// The timeout to ask of the server for a TTL, in milliseconds: a third longer, because the two-write rule takes a
/// quarter off, and rounded up to three binary digits, so that near TTLs share a session.
pub(crate) fn class(ttl: Duration) -> u64 {
    let ms = u64::try_from(ttl.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX / 4);
    let longer = ms.saturating_add(ms.div_ceil(3)).clamp(1, i32::MAX as u64 / 2);
    let digits = 64 - longer.leading_zeros();
    let step = 1u64 << digits.saturating_sub(3);
    longer.div_ceil(step) * step
}

/// Keeps a session for as long as anybody has it: heartbeats, places whose time has come, nodes that nobody claims.
pub(crate) async fn keep(backend: Weak<Inner>, session: Weak<Session>) {
    let mut swept = None;
    loop {
        let pause = {
            let (Some(backend), Some(session)) = (backend.upgrade(), session.upgrade()) else { return };
            let now = session.clock.now();
            if session.is_over() {
                backend.retire(&session);
                if backend.places.session_ended(&session, now) == 0 {
                    return;
                }
                session.timeout
            } else {
                let pause = turn(&backend, &session, now, &mut swept).await;
                let (places, _) = backend.places.of_session(&session);
                if places == 0 && session.unused_for() > backend.config.idle_timeout {
                    backend.retire(&session);
                }
                pause
            }
        };
        tokio::time::sleep(pause).await;
    }
}

async fn turn(
    backend: &Arc<Inner>,
    session: &Arc<Session>,
    now: Moment,
    swept: &mut Option<Moment>,
) -> Duration {
    let (least, most) = (Duration::from_millis(5), session.pace());
    if !session.is_connected() {
        return (most / 4).max(least);
    }
    let due = backend.places.due(session, now, now.saturating_add(session.timeout / 2));
    if !due.is_empty() {
        let (backend, session) = (backend.clone(), session.clone());
        tokio::spawn(async move {
            for (due, path) in due {
                // Where this fails the next turn asks again.
                let _ = backend.remove_due(&session, &due, path.as_deref()).await;
            }
        });
    }
    if session.newest().until(now) + most / 16 >= most {
        let _ = session.write_beat(session.timeout / 4).await;
    }
    if swept.is_none_or(|last| last.until(now) >= session.timeout) {
        *swept = Some(now);
        backend.sweep(session).await;
    }
    let now = session.clock.now();
    let (_, first) = backend.places.of_session(session);
    let beat = session.newest().saturating_add(most);
    now.until(first.min(beat)).clamp(least, most)
}

impl Inner {
    /// Removes what a place left, wherever its request got to.
    async fn remove_due(
        &self,
        session: &Session,
        due: &crate::places::Due,
        path: Option<&str>,
    ) -> Result<()> {
        let bound = session.timeout / 4;
        if let Some(path) = path {
            session.delete(bound, path).await?;
        } else {
            for node in crate::wire::nodes_of(session, bound, &due.queue, &due.owner).await? {
                session.delete(bound, &format!("{}/{node}", due.queue)).await?;
            }
        }
        self.places.remove(&due.key);
        Ok(())
    }

    /// Removes own ephemeral nodes that no place stands for: what a lost request made after it was given up.
    async fn sweep(&self, session: &Session) {
        let asked = session.client.list_ephemerals(&beats_parent(&self.config.root));
        let Ok(Ok(paths)) = session.ask(session.timeout / 4, asked).await else { return };
        for path in paths {
            if path != session.beat && !self.places.claims(&path) {
                let _ = session.delete(session.timeout / 4, &path).await;
            }
        }
    }
}

fn beats_parent(root: &str) -> String {
    let beats = beats(root);
    beats.strip_suffix("/sessions").unwrap_or(&beats).to_owned()
}

/// Says whether a stat is of a node that this session made.
pub(crate) fn is_own(session: &Session, stat: &Stat) -> bool {
    stat.ephemeral_owner == session.id
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_is_a_third_longer_and_classes_are_few() {
        assert_eq!(class(Duration::from_millis(600)), 896);
        assert_eq!(class(Duration::from_secs(10)), 14336);
        let mut classes = std::collections::HashSet::new();
        for ms in 400..4000 {
            let class = class(Duration::from_millis(ms));
            assert!(class * 3 >= ms * 4 && class * 3 <= ms * 5 + 3, "{ms}: {class}");
            classes.insert(class);
        }
        assert!(classes.len() <= 16, "{}", classes.len());
    }
}
