//! Acknowledgements of replicas: what is asked for behind a write, and whether it came.
//!
//! `WAIT` counts replicas that have what its connection wrote before it, and moves with every command of that connection. So
//! it stands directly behind the script, on a connection that nobody else uses meanwhile: it holds up whatever comes after.
//!
//! # Source
//! Redis 7.0 manual: WAIT. Redis 7.2 manual: WAITAOF.

use std::{
    fmt,
    ops::Deref,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use lockcore::backend::{Call, Clock, Error, ErrorKind, Result};
use redis::Value;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::{
    config::{RedisConfig, WaitReplicas},
    connection::{Connection, Link},
    error::{self, Phase},
    greeting::Learnt,
};

/// So many writes of one backend wait for replicas of one server at the same time; others stand in line.
const LANES: usize = 8;

/// What is asked for behind a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wait {
    pub(crate) replicas: u32,
    fsync: bool,
    timeout: Duration,
}

impl Wait {
    /// Returns what the configuration demands, of a server that had at most so many replicas. `None`: nothing.
    pub(crate) fn demanded(config: &RedisConfig, known: u32) -> Option<Self> {
        let replicas = match config.wait_replicas {
            WaitReplicas::None => 0,
            WaitReplicas::AtLeast(n) => n,
            // Of `known + 1` servers, without the master itself.
            WaitReplicas::Majority => known.saturating_add(1).div_euclid(2).max(1),
        };
        let wait = Self { replicas, fsync: config.wait_fsync, timeout: config.wait_timeout };
        (replicas > 0 || config.wait_fsync).then_some(wait)
    }

    /// Says whether every replica that there was is waited for.
    pub(crate) fn covers(&self, known: u32) -> bool {
        self.replicas >= known
    }

    pub(crate) fn command(&self, call: &Call) -> redis::Cmd {
        // Its answer must come within the exchange. Zero would mean: for ever.
        let timeout = self.timeout.min(call.exchange_timeout() / 2).as_millis().max(1);
        let timeout = u64::try_from(timeout).unwrap_or(u64::MAX);
        let mut command = redis::cmd(if self.fsync { "WAITAOF" } else { "WAIT" });
        if self.fsync {
            command.arg(1);
        }
        command.arg(self.replicas).arg(timeout);
        command
    }

    /// Judges the answer. An error says why the write does not count; what it did is still there.
    pub(crate) fn judge(&self, acknowledged: Option<Value>) -> Result<()> {
        let (local, replicas) = match acknowledged {
            Some(Value::Int(replicas)) if !self.fsync => (1, replicas),
            Some(Value::Array(counts)) if self.fsync => match counts[..] {
                [Value::Int(local), Value::Int(replicas)] => (local, replicas),
                _ => return Err(Error::new(ErrorKind::Unknown, "WAITAOF answered with something else")),
            },
            Some(Value::ServerError(refusal)) => return Err(error::error(Phase::Sent, refusal.into())),
            _ => return Err(Error::new(ErrorKind::Unknown, "WAIT answered with something else")),
        };
        if replicas < i64::from(self.replicas) {
            return Err(Error::new(
                ErrorKind::Unavailable,
                format!(
                    "{replicas} of the {} replicas that are waited for acknowledged it in time",
                    self.replicas
                ),
            ));
        }
        if self.fsync && local < 1 {
            return Err(Error::new(
                ErrorKind::Unavailable,
                "the master did not write it to its disk in time",
            ));
        }
        Ok(())
    }
}

/// Connections for writes that wait for replicas, each lent to one call at a time.
pub(crate) struct Lanes {
    connections: Vec<Connection>,
    free: Mutex<Vec<usize>>,
    turns: Arc<Semaphore>,
}

impl Lanes {
    pub(crate) fn new(config: &Arc<RedisConfig>, node: Option<&(String, u16)>, learnt: &Arc<Learnt>) -> Self {
        let connection = || Connection::new(config.clone(), node.cloned(), learnt.clone());
        Self {
            connections: (0..LANES).map(|_| connection()).collect(),
            free: Mutex::new((0..LANES).rev().collect()),
            turns: Arc::new(Semaphore::new(LANES)),
        }
    }

    /// Lends a connection, within the time of one exchange.
    pub(crate) async fn lend(self: &Arc<Self>, call: &Call) -> Result<Lent> {
        let turn = tokio::time::timeout(call.exchange_timeout(), self.turns.clone().acquire_owned()).await;
        let Ok(Ok(turn)) = turn else {
            return Err(Error::new(ErrorKind::Unavailable, "other writes are still waiting for replicas"));
        };
        // There are as many as turns.
        let at = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
        let lane = Lane { lanes: self.clone(), at, _turn: turn };
        let link = lane.lanes.connections[at].link(call).await?;
        Ok(Lent { link, lane: Some(lane) })
    }

    /// Makes one connection, so that the first write does not wait for it.
    pub(crate) async fn connect(&self, patience: Duration, clock: Arc<dyn Clock>) -> Result<()> {
        // The one that is lent first.
        self.connections[0].connect(patience, clock).await.map(drop)
    }

    pub(crate) fn close(&self) {
        self.connections.iter().for_each(Connection::close);
    }
}

impl fmt::Debug for Lanes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lanes").field("free", &self.turns.available_permits()).finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Lane {
    lanes: Arc<Lanes>,
    at: usize,
    _turn: OwnedSemaphorePermit,
}

impl Drop for Lane {
    fn drop(&mut self) {
        self.lanes.free.lock().unwrap_or_else(PoisonError::into_inner).push(self.at);
    }
}

/// A connection, perhaps for one call alone.
#[derive(Debug)]
pub(crate) struct Lent {
    link: Arc<Link>,
    #[expect(dead_code, reason = "it is given back when this is dropped")]
    lane: Option<Lane>,
}

impl From<Arc<Link>> for Lent {
    fn from(link: Arc<Link>) -> Self {
        Self { link, lane: None }
    }
}

impl Deref for Lent {
    type Target = Arc<Link>;

    fn deref(&self) -> &Arc<Link> {
        &self.link
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_majority_counts_the_master_and_is_never_nobody() {
        let config = RedisConfig::new("h", 1).with(|c| c.wait_replicas = WaitReplicas::Majority);
        let demanded = |known| Wait::demanded(&config, known).unwrap().replicas;
        assert_eq!([0, 1, 2, 3, 4, 5].map(demanded), [1, 1, 1, 2, 2, 3]);
        assert_eq!(Wait::demanded(&RedisConfig::new("h", 1), 9), None);
    }

    #[test]
    fn what_replicas_acknowledged_is_judged() {
        let config = RedisConfig::new("h", 1).with(|c| c.wait_replicas = WaitReplicas::AtLeast(2));
        let wait = Wait::demanded(&config, 2).unwrap();
        assert!(wait.covers(2) && !wait.covers(3));
        wait.judge(Some(Value::Int(2))).unwrap();
        assert_eq!(wait.judge(Some(Value::Int(1))).unwrap_err().kind(), ErrorKind::Unavailable);
        assert_eq!(wait.judge(None).unwrap_err().kind(), ErrorKind::Unknown);
        let fsync = Wait::demanded(&config.with(|c| c.wait_fsync = true), 2).unwrap();
        fsync.judge(Some(Value::Array(vec![Value::Int(1), Value::Int(2)]))).unwrap();
        let unwritten = Value::Array(vec![Value::Int(0), Value::Int(2)]);
        assert_eq!(fsync.judge(Some(unwritten)).unwrap_err().kind(), ErrorKind::Unavailable);
    }
}
