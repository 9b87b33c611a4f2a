//! Stores by their semantics, in virtual time and without a server: what a real store of that kind must show, too.

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use lockcore::{
    LockName, OwnerDigest,
    backend::{Capabilities, Clock, Consistency, FenceSource, LockBackend, WakeUp, async_trait},
};

use crate::{
    MemoryService,
    bench::{Servers, Service, Wire},
};

/// The semantics that stores differ by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Semantics {
    /// One server that keeps nothing over a restart; its fences are seeded by the time. As Redis without a log on disk.
    Forgetful,
    /// A leader that answers before its two followers know; its death loses what it has granted. As Redis with replicas.
    AsyncReplicated,
    /// Three members that agree before they answer. As etcd and ZooKeeper.
    Quorum,
    /// Waiters look again in no order, and TTLs are whole seconds.
    UnfairAndCoarse,
}

impl Semantics {
    /// All of them, with the names of their profiles.
    pub const ALL: &'static [(&'static str, Self)] = &[
        ("sim-forgetful", Self::Forgetful),
        ("sim-async-replicated", Self::AsyncReplicated),
        ("sim-quorum", Self::Quorum),
        ("sim-unfair-coarse", Self::UnfairAndCoarse),
    ];

    /// Counts the servers.
    pub fn servers(self) -> usize {
        match self {
            Self::Forgetful | Self::UnfairAndCoarse => 1,
            Self::AsyncReplicated | Self::Quorum => 3,
        }
    }

    fn promises(self, c: &mut Capabilities) {
        c.survives.pause = true;
        match self {
            Self::Forgetful => {
                c.consistency = Consistency::SingleServer;
                c.fence = FenceSource::ClockBounded;
            }
            Self::AsyncReplicated => {
                c.consistency = Consistency::Replicated;
                c.fence = FenceSource::ClockBounded;
            }
            Self::Quorum => {
                c.consistency = Consistency::Linearizable;
                c.fence = FenceSource::Durable;
                c.survives.restart = true;
                c.survives.failover = true;
            }
            Self::UnfairAndCoarse => {
                c.consistency = Consistency::SingleServer;
                c.fair = false;
                c.wake_up = WakeUp::Poll;
                c.ttl = Duration::from_secs(1)..=*c.ttl.end();
                c.ttl_step = Duration::from_secs(1);
                c.survives.restart = true;
            }
        }
    }
}

/// What is wrong with a simulated store, for the suite's own mutants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// Its data is gone after a restart that it promises to outlive.
    ForgetsOverARestart,
    /// Its fences begin again after a restart.
    ForgetsFences,
    /// One member grants without the others.
    GrantsWithoutMajority,
    /// What was granted goes with the leader that granted it.
    LosesWithItsLeader,
    /// A stop costs it everything, fences included.
    ForgetsOverAStop,
}

/// A store by its semantics: the in-memory backend, with servers that can be stopped, killed and started again.
#[derive(Debug)]
pub struct SimulatedService {
    memory: MemoryService,
    semantics: Semantics,
    away: Mutex<Away>,
    fault: Option<Fault>,
}

#[derive(Debug, Default)]
struct Away {
    dead: BTreeSet<usize>,
    stopped: BTreeSet<usize>,
}

impl SimulatedService {
    /// Starts an empty store; needs a runtime with time.
    pub fn start(semantics: Semantics) -> Self {
        Self { memory: MemoryService::start(), semantics, away: Mutex::default(), fault: None }
    }

    pub(crate) fn broken(semantics: Semantics, fault: Fault) -> Self {
        Self { fault: Some(fault), ..Self::start(semantics) }
    }

    fn away(&self) -> MutexGuard<'_, Away> {
        self.away.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets requests through while enough servers are there.
    fn settle(&self) {
        let (dead, gone) = {
            let away = self.away();
            (away.dead.len(), away.dead.union(&away.stopped).count())
        };
        let needed = match self.semantics {
            // The followers take over one by one, down to the last.
            Semantics::AsyncReplicated => 1,
            _ => self.semantics.servers() / 2 + 1,
        };
        let servers = self.semantics.servers();
        let alone = self.fault == Some(Fault::GrantsWithoutMajority);
        let refuses = servers - dead < needed && !alone;
        self.memory.store().faults().unavailable(refuses);
        self.memory.store().faults().cut(servers - gone < needed && !refuses && !alone);
    }
}

#[async_trait]
impl Service for SimulatedService {
    async fn connect(&self) -> Arc<dyn LockBackend> {
        Arc::new(self.memory.store().clone().promising(|c| self.semantics.promises(c)))
    }
    async fn holder(&self, name: &LockName) -> Option<OwnerDigest> {
        self.memory.holder(name).await
    }
    async fn steal(&self, name: &LockName) {
        self.memory.steal(name).await;
    }
    fn ttl(&self) -> Duration {
        self.memory.ttl()
    }
    fn clock(&self) -> Arc<dyn Clock> {
        self.memory.clock()
    }
    fn virtual_time(&self) -> bool {
        true
    }
    fn embedded(&self) -> bool {
        true
    }
    async fn queued(&self, name: &LockName) -> Option<u32> {
        match self.semantics {
            Semantics::UnfairAndCoarse => None,
            _ => self.memory.queued(name).await,
        }
    }
    fn wire(&self) -> Option<&dyn Wire> {
        self.memory.wire()
    }
    fn power(&self) -> Option<&dyn Servers> {
        Some(self)
    }
}

#[async_trait]
impl Servers for SimulatedService {
    fn count(&self) -> usize {
        self.semantics.servers()
    }

    async fn kill(&self, server: usize) {
        let first = self.away().dead.insert(server);
        let loses =
            self.semantics == Semantics::AsyncReplicated || self.fault == Some(Fault::LosesWithItsLeader);
        if first && server == self.leader().await && loses && self.count() > 1 {
            self.memory.store().forget_holders();
        }
        self.settle();
    }

    async fn restart(&self, server: usize) {
        self.away().dead.remove(&server);
        match self.fault {
            Some(Fault::ForgetsFences) => self.memory.store().forget(),
            Some(Fault::ForgetsOverARestart) => self.memory.store().forget_holders(),
            _ if self.semantics == Semantics::Forgetful => self.memory.store().forget_holders(),
            _ => {}
        }
        self.settle();
    }

    async fn stop(&self, server: usize) {
        self.away().stopped.insert(server);
        if self.fault == Some(Fault::ForgetsOverAStop) {
            self.memory.store().forget();
        }
        self.settle();
    }

    async fn go_on(&self, server: usize) {
        self.away().stopped.remove(&server);
        if self.fault == Some(Fault::ForgetsOverAStop) {
            self.memory.store().forget();
        }
        self.settle();
    }
}
