//! The etcd backend against bare transactions through the client library, and beside the server's own lock.

use std::time::Instant;

use etcd_client::{
    Client, CompactionOptions, Compare, CompareOp, Error, GetOptions, KvClient, LockOptions, PutOptions,
    SortOrder, SortTarget, Txn, TxnOp, WatchStream,
};
use lockcore::{
    LockClient, LockName,
    backend::{LockBackend, Owner},
};
use lockcore_etcd::{EtcdBackend, EtcdConfig};
use tokio::runtime::Runtime;

use crate::{
    harness::{Bench, Target, alternate, in_turns, micros_each, one_thread},
    servers::{ETCD, Server, not_run},
    work::{Many, SETTLE, crowd, hand_off, patient, rounds, side_by_side},
};

const BARE: &str = "etcd/acquire-release";
const OWN: &str = "etcd/acquire-release/own-transactions";
const SERVER_LOCK: &str = "etcd/acquire-release/server-lock";
const LEASE_EACH: &str = "etcd/acquire-release/lease-each";
const TASKS: &str = "etcd/acquire-release/64-tasks";
const HAND_OFF: &str = "etcd/hand-off";
const CROWD: &str = "etcd/hand-off/watch-events-of-100";
const MANY: Many = Many {
    cpu: "etcd/leases/cpu",
    bytes: "etcd/leases/bytes-per-lease",
    messages: "etcd/leases/messages",
    leases: 10_000,
};
const ROWS: [&str; 10] =
    [BARE, OWN, SERVER_LOCK, LEASE_EACH, TASKS, HAND_OFF, CROWD, MANY.cpu, MANY.bytes, MANY.messages];

const TURNS: usize = 61;
const PAIRS: usize = 50;
const AT_ONCE: usize = 64;
const WAITERS: usize = 100;
/// Of the leases by hand: longer than any run.
const LONG: i64 = 3600;

pub(crate) fn run(bench: &mut Bench) {
    if !bench.wants_any(&ROWS) {
        return;
    }
    if let Some(reason) = not_run(&ETCD) {
        return bench.not_run(&ROWS, &reason);
    }
    if bench.wants_any(&[BARE, OWN, SERVER_LOCK, LEASE_EACH, TASKS, HAND_OFF]) {
        Beside::start().run(bench);
    }
    if bench.wants(CROWD) {
        let server = Server::etcd();
        let events = one_thread().block_on(events_of_a_crowd(&server)).expect("everybody gets its turn");
        bench.row(CROWD, "watch events", events, None, Target::Shown);
    }
    if bench.wants_any(&[MANY.cpu, MANY.bytes, MANY.messages]) {
        let server = Server::etcd();
        MANY.run(
            bench,
            async || backend(&server),
            async || server.etcd_counter("grpc_server_msg_received_total"),
        );
    }
}

fn backend(server: &Server) -> EtcdBackend {
    EtcdBackend::lazy(EtcdConfig::new([server.url()])).expect("an address")
}

async fn raw_client(server: &Server) -> Client {
    Client::connect([server.url()], None).await.expect("the server is there")
}

/// Ours and the transactions by hand, on one server and one runtime.
struct Beside {
    runtime: Runtime,
    client: LockClient,
    raw: Raw,
    server: Server,
}

impl Beside {
    fn start() -> Self {
        let (server, runtime) = (Server::etcd(), one_thread());
        let (client, raw) = runtime.block_on(async {
            let client = LockClient::new(backend(&server));
            rounds(client.clone(), 0, 1).await.expect("the server answers");
            (client, Raw::connect(&server).await.expect("the server answers"))
        });
        Self { runtime, client, raw, server }
    }

    fn run(&self, bench: &mut Bench) {
        if bench.wants_any(&[BARE, OWN, SERVER_LOCK, LEASE_EACH]) {
            let [ours, bare, own, server_lock, lease_each] = in_turns(
                TURNS,
                [
                    &mut || self.timed(PAIRS, rounds(self.client.clone(), 0, PAIRS)),
                    &mut || self.timed(PAIRS, self.raw.bare(PAIRS)),
                    &mut || self.timed(PAIRS, self.raw.own(0, PAIRS)),
                    &mut || self.timed(PAIRS, self.raw.server_lock(PAIRS)),
                    &mut || self.timed(PAIRS, self.raw.lease_each(PAIRS)),
                ],
            );
            bench.row(BARE, "us", ours, Some(bare), Target::Ratio(0.90));
            bench.row(OWN, "us", ours, Some(own), Target::Ratio(0.90));
            bench.beside(SERVER_LOCK, "us", ours, server_lock, Target::Shown);
            bench.beside(LEASE_EACH, "us", ours, lease_each, Target::Shown);
        }
        if bench.wants(TASKS) {
            let ours = |task| rounds(self.client.clone(), task, 1);
            let limit = |task| {
                let raw = self.raw.clone();
                async move { raw.own(task, 1).await }
            };
            let (ours, limit) = alternate(
                TURNS,
                || self.timed(AT_ONCE, side_by_side(AT_ONCE, ours)),
                || self.timed(AT_ONCE, side_by_side(AT_ONCE, limit)),
            );
            bench.row(TASKS, "us", ours, Some(limit), Target::Shown);
        }
        if bench.wants(HAND_OFF) {
            let (to, other) = self.runtime.block_on(async {
                let to = LockClient::new(backend(&self.server));
                rounds(to.clone(), 0, 1).await.expect("the server answers");
                (to, Raw::connect(&self.server).await.expect("the server answers"))
            });
            let (ours, limit) = alternate(
                TURNS,
                || {
                    self.compact();
                    self.runtime.block_on(hand_off(&self.client, &to)).expect("the server answers")
                },
                || self.runtime.block_on(self.raw.hand_off(&other)).expect("the server answers"),
            );
            bench.row(HAND_OFF, "us, median", ours, Some(limit), Target::Times(1.5));
        }
    }

    /// Returns the microseconds of one of so many pieces.
    fn timed<E: std::fmt::Debug>(&self, pieces: usize, work: impl Future<Output = Result<(), E>>) -> f64 {
        self.compact();
        let start = Instant::now();
        self.runtime.block_on(work).expect("the server answers");
        micros_each(start.elapsed(), pieces)
    }

    /// Drops what is past: a look at the first of a queue goes through every key that was in it since.
    fn compact(&self) {
        self.runtime.block_on(self.raw.compact()).expect("the server answers");
    }
}

/// What can be had from the client library without us.
#[derive(Clone)]
struct Raw {
    client: Client,
    kv: KvClient,
    /// Shared by all that is put by hand.
    lease: i64,
}

impl Raw {
    async fn connect(server: &Server) -> Result<Self, Error> {
        let mut client = raw_client(server).await;
        let lease = client.lease_grant(LONG, None).await?.id();
        client.put("raw/base", "1", None).await?;
        Ok(Self { kv: client.kv_client(), client, lease })
    }

    async fn compact(&self) -> Result<(), Error> {
        let mut kv = self.kv.clone();
        let newest = kv.put("raw/newest", "", None).await?.header().map_or(0, |header| header.revision());
        kv.compact(newest, Some(CompactionOptions::new().with_physical())).await.map(drop)
    }

    /// A key that nobody has, and its end.
    async fn bare(&self, pairs: usize) -> Result<(), Error> {
        let mut kv = self.kv.clone();
        for _ in 0..pairs {
            self.put_if_absent(&mut kv, "raw/bare", self.lease).await?;
            kv.delete("raw/bare", None).await?;
        }
        Ok(())
    }

    async fn put_if_absent(&self, kv: &mut KvClient, key: &str, lease: i64) -> Result<(), Error> {
        let txn = Txn::new()
            .when([Compare::create_revision(key, CompareOp::Equal, 0)])
            .and_then([TxnOp::put(key, hex(), Some(PutOptions::new().with_lease(lease)))]);
        assert!(kv.txn(txn).await?.succeeded(), "nobody else wants it");
        Ok(())
    }

    /// The two transactions of the backend: a place in the queue with a look, and its end if it is still this place.
    async fn own(&self, task: usize, pairs: usize) -> Result<(), Error> {
        let mut kv = self.kv.clone();
        let queue = format!("raw/q/bench/{task}:");
        for _ in 0..pairs {
            let key = format!("{queue}{}", hex());
            let first = GetOptions::new()
                .with_prefix()
                .with_sort(SortTarget::Create, SortOrder::Ascend)
                .with_limit(1);
            let gets = [
                TxnOp::get(key.clone(), None),
                TxnOp::get(queue.clone(), Some(first)),
                TxnOp::get("raw/base", None),
            ];
            let options = PutOptions::new().with_lease(self.lease);
            let put = TxnOp::put(key.clone(), "1:host:1", Some(options));
            let free = Compare::create_revision(key.clone(), CompareOp::Equal, 0);
            let recorded = Compare::create_revision("raw/base", CompareOp::Greater, 0);
            let all: Vec<_> = std::iter::once(put).chain(gets.clone()).collect();
            let taken = kv.txn(Txn::new().when([free, recorded]).and_then(all).or_else(gets)).await?;
            assert!(taken.succeeded(), "nobody else wants it");
            let r = taken.header().map_or(0, |header| header.revision());
            let same = Compare::create_revision(key.clone(), CompareOp::Equal, r);
            let gone = kv.txn(Txn::new().when([same]).and_then([TxnOp::delete(key, None)])).await?;
            assert!(gone.succeeded(), "the place was somebody else's");
        }
        Ok(())
    }

    /// The lock that the server has, on a shared lease.
    async fn server_lock(&self, pairs: usize) -> Result<(), Error> {
        let mut lock = self.client.lock_client();
        for _ in 0..pairs {
            let options = LockOptions::new().with_lease(self.lease);
            let held = lock.lock("raw/server-lock", Some(options)).await?;
            lock.unlock(held.key()).await?;
        }
        Ok(())
    }

    /// A lease for each lock, which ends with it.
    async fn lease_each(&self, pairs: usize) -> Result<(), Error> {
        let (mut kv, mut leases) = (self.kv.clone(), self.client.lease_client());
        for _ in 0..pairs {
            let lease = leases.grant(30, None).await?.id();
            self.put_if_absent(&mut kv, "raw/lease-each", lease).await?;
            leases.revoke(lease).await?;
        }
        Ok(())
    }

    /// One deletion, one event, and one read of who heard it: what no hand-off can do without.
    async fn hand_off(&self, other: &Self) -> Result<f64, Error> {
        let (mut from, mut to) = (self.kv.clone(), other.kv.clone());
        let key = "raw/handed";
        self.put_if_absent(&mut from, key, self.lease).await?;
        let mut watched: WatchStream = other.client.watch_client().watch(key, None).await?;
        // The first message says that the watch stands.
        watched.message().await?;
        tokio::time::sleep(SETTLE).await;
        let start = Instant::now();
        let waits = async {
            watched.message().await?;
            assert!(to.get(key, None).await?.kvs().is_empty(), "the key is gone");
            Ok::<_, Error>(Instant::now())
        };
        let (deleted, granted) = tokio::join!(from.delete(key, None), waits);
        deleted?;
        Ok(micros_each(granted? - start, 1))
    }
}

fn hex() -> String {
    Owner::random().expose().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Counts the events that the server sends for each hand-off, with so many clients in line.
async fn events_of_a_crowd(server: &Server) -> lockcore::Result<f64> {
    let holder = patient(backend(server));
    let waiters: Vec<_> = (0..WAITERS).map(|_| patient(backend(server))).collect();
    let name = LockName::parse("bench/wanted")?;
    crowd(
        &holder,
        &waiters,
        async || {
            let (backend, call) = holder.backend().expect("no mistake in the options");
            let state = backend.inspect(&call, &name).await.expect("the server answers");
            state.waiters == Some(WAITERS as u32)
        },
        async || server.etcd_counter("etcd_debugging_mvcc_events_total"),
    )
    .await
}
