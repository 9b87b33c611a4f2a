//! A bug of the past, on a real server: what this backend does not do, and why.
//!
//! The server has a lock of its own (the v3lock service). Before 3.5 a waiter's lease was not looked at again after the wait:
//! a client whose lease had ended in the queue, and with it its key, was told that it held the lock, and the next client was
//! told the same. Here one and the same case runs against that lock and against this backend: the first breaks it, which
//! shows that the case can fail, and the second keeps it.
//!
//! Source: etcd issues 9921 and 11457; the fix, pull request 11408, is in 3.5 and was not brought back to 3.4.

mod common;

use std::{sync::Arc, time::Duration};

use common::*;
use etcd_client::{Client, LockOptions};
use lockcore::backend::{AcquireRequest, LockBackend, Moment};
use lockcore_etcd::EtcdBackend;

/// What the case needs of a lock.
trait Locks {
    /// Starts to wait; `true`: the lock is held.
    fn wait(&self, who: &'static str) -> tokio::task::JoinHandle<bool>;
    /// Ends the lease of one who waits, as its end in the queue does.
    async fn end_lease(&self, who: &'static str);
    /// Counts those in the queue, the holder among them.
    async fn in_queue(&self) -> usize;
    /// Lets the first one go.
    async fn release_first(&self);
    /// Says whether the record shows this one as the holder.
    async fn is_on_record(&self, who: &'static str) -> bool;
}

/// How the case ended.
#[derive(Debug, PartialEq, Eq)]
enum Verdict {
    Kept,
    /// A waiter whose lease had ended was told that it holds the lock.
    GrantedOnADeadLease,
}

/// G09: a waiter's own lease ends while it waits: it is never told that it holds the lock on the strength of that lease.
async fn a_waiters_own_lease_dies(locks: &impl Locks) -> Verdict {
    let first = locks.wait("first");
    assert!(first.await.unwrap(), "a free lock is granted");
    let second = locks.wait("second");
    eventually("the second waits", async || locks.in_queue().await == 2).await;
    locks.end_lease("second").await;
    locks.release_first().await;
    // It may queue again with a new lease, or fail; what it may not is hold the lock without a record.
    match tokio::time::timeout(WATCHDOG, second).await.expect("an answer").unwrap() {
        true if !locks.is_on_record("second").await => Verdict::GrantedOnADeadLease,
        _ => Verdict::Kept,
    }
}

/// The server's own lock.
struct ServerLock {
    server: Server,
    leases: [(&'static str, i64); 2],
}

impl ServerLock {
    async fn keys(&self) -> Vec<etcd_client::KeyValue> {
        let options = etcd_client::GetOptions::new()
            .with_prefix()
            .with_sort(etcd_client::SortTarget::Create, etcd_client::SortOrder::Ascend);
        self.server.admin().await.get("lock/", Some(options)).await.unwrap().take_kvs()
    }

    fn lease(&self, who: &str) -> i64 {
        self.leases.iter().find(|(name, _)| *name == who).unwrap().1
    }
}

impl Locks for ServerLock {
    fn wait(&self, who: &'static str) -> tokio::task::JoinHandle<bool> {
        let (url, lease) = (self.server.url.clone(), self.lease(who));
        tokio::spawn(async move {
            let mut client = Client::connect([url], None).await.unwrap();
            client.lock("lock", Some(LockOptions::new().with_lease(lease))).await.is_ok()
        })
    }

    async fn end_lease(&self, who: &'static str) {
        self.server.admin().await.lease_revoke(self.lease(who)).await.unwrap();
    }

    async fn in_queue(&self) -> usize {
        self.keys().await.len()
    }

    async fn release_first(&self) {
        let first = self.keys().await.remove(0);
        self.server.admin().await.unlock(first.key()).await.unwrap();
    }

    async fn is_on_record(&self, who: &'static str) -> bool {
        self.keys().await.first().is_some_and(|first| first.lease() == self.lease(who))
    }
}

/// This backend.
struct Ours {
    server: Server,
    backend: Arc<EtcdBackend>,
    requests: [(&'static str, AcquireRequest); 2],
}

impl Ours {
    fn asked(&self, who: &str) -> &AcquireRequest {
        &self.requests.iter().find(|(name, _)| *name == who).unwrap().1
    }
}

impl Locks for Ours {
    fn wait(&self, who: &'static str) -> tokio::task::JoinHandle<bool> {
        let (backend, asked) = (self.backend.clone(), self.asked(who).clone());
        tokio::spawn(async move { backend.acquire(&call(), &asked).await.is_ok() })
    }

    async fn end_lease(&self, who: &'static str) {
        let lease = self.server.lease_of(&hex(self.asked(who))).await;
        self.server.admin().await.lease_revoke(lease).await.unwrap();
    }

    async fn in_queue(&self) -> usize {
        self.server.places().await.len()
    }

    async fn release_first(&self) {
        let name = self.asked("first").name();
        self.backend.break_lock(&call(), name, None).await.unwrap();
    }

    async fn is_on_record(&self, who: &'static str) -> bool {
        let state = self.backend.inspect(&call(), self.asked(who).name()).await.unwrap();
        state.holder.is_some_and(|holder| holder.owner == self.asked(who).owner().digest())
    }
}

#[tokio::test]
async fn the_servers_own_lock_grants_on_a_dead_lease_before_3_5_and_this_backend_never_does() {
    let Some(server) = Server::start() else { return };
    let version = server.admin().await.status().await.unwrap().version().to_owned();
    let mut leases = [("first", 0), ("second", 0)];
    for (_, lease) in &mut leases {
        *lease = server.admin().await.lease_grant(60, None).await.unwrap().id();
    }
    let verdict = a_waiters_own_lease_dies(&ServerLock { server, leases }).await;
    let broken = version.starts_with("3.4.");
    let expected = if broken { Verdict::GrantedOnADeadLease } else { Verdict::Kept };
    assert_eq!(verdict, expected, "the server's own lock of {version}");

    let Some(server) = Server::start() else { return };
    let asked = || request_of("lock", Duration::from_secs(20)).waiting_until(Moment::MAX);
    let requests = [("first", asked()), ("second", asked())];
    let ours = Ours { backend: server.backend().await, server, requests };
    assert_eq!(a_waiters_own_lease_dies(&ours).await, Verdict::Kept);
}
