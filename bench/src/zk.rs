//! The ZooKeeper backend against bare requests through the client library, and beside that library's own lock.

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

use lockcore::{
    LockClient, LockName,
    backend::{LockBackend, Owner},
};
use lockcore_zk::{ZkBackend, ZkConfig};
use tokio::runtime::Runtime;
use zookeeper_client::{Acls, Client, CreateMode, Error, LockPrefix};

use crate::{
    harness::{Bench, Target, alternate, in_turns, micros_each, one_thread},
    servers::{Server, ZOOKEEPER, not_run},
    work::{Many, SETTLE, crowd, hand_off, patient, rounds, side_by_side},
};

const BARE: &str = "zk/acquire-release";
const OWN: &str = "zk/acquire-release/own-requests";
const APART: &str = "zk/acquire-release/thread-apart";
const RECIPE: &str = "zk/acquire-release/recipe";
const TASKS: &str = "zk/acquire-release/64-tasks";
const HAND_OFF: &str = "zk/hand-off";
const CROWD: &str = "zk/hand-off/watch-events-of-100";
const MANY: Many = Many {
    cpu: "zk/leases/cpu",
    bytes: "zk/leases/bytes-per-lease",
    messages: "zk/leases/messages",
    leases: 10_000,
};
const ROWS: [&str; 10] =
    [BARE, OWN, APART, RECIPE, TASKS, HAND_OFF, CROWD, MANY.cpu, MANY.bytes, MANY.messages];

const TURNS: usize = 61;
const PAIRS: usize = 50;
const AT_ONCE: usize = 64;
const WAITERS: usize = 100;

pub(crate) fn run(bench: &mut Bench) {
    if !bench.wants_any(&ROWS) {
        return;
    }
    if let Some(reason) = not_run(&ZOOKEEPER) {
        return bench.not_run(&ROWS, &reason);
    }
    if bench.wants_any(&[BARE, OWN, APART, RECIPE, TASKS, HAND_OFF]) {
        Beside::start().run(bench);
    }
    if bench.wants(CROWD) {
        let server = Server::zookeeper();
        let events = one_thread().block_on(events_of_a_crowd(&server)).expect("everybody gets its turn");
        bench.row(CROWD, "watch events", events, None, Target::Shown);
    }
    if bench.wants_any(&[MANY.cpu, MANY.bytes, MANY.messages]) {
        let server = Server::zookeeper();
        MANY.run(
            bench,
            async || backend(&server),
            async || server.zookeeper_counters(["zk_packets_received"])[0],
        );
    }
}

fn backend(server: &Server) -> ZkBackend {
    ZkBackend::lazy(ZkConfig::new([server.address()])).expect("an address")
}

/// Ours and the requests by hand, on one server and one runtime.
struct Beside {
    runtime: Runtime,
    client: LockClient,
    raw: Raw,
    /// Its session is served on a thread of its own, as those of the backend are.
    apart: Raw,
    server: Server,
}

impl Beside {
    fn start() -> Self {
        let (server, runtime) = (Server::zookeeper(), one_thread());
        let (client, raw) = runtime.block_on(async {
            let client = LockClient::new(backend(&server));
            rounds(client.clone(), 0, 1).await.expect("the server answers");
            (client, Raw::connect(&server.address()).await.expect("the server answers"))
        });
        let apart = Raw::connect_apart(&runtime, &server);
        Self { runtime, client, raw, apart, server }
    }

    fn run(&self, bench: &mut Bench) {
        if bench.wants_any(&[BARE, OWN, APART, RECIPE]) {
            let [ours, bare, own, apart, recipe] = in_turns(
                TURNS,
                [
                    &mut || self.timed(PAIRS, rounds(self.client.clone(), 0, PAIRS)),
                    &mut || self.timed(PAIRS, self.raw.bare(PAIRS)),
                    &mut || self.timed(PAIRS, self.raw.own(0, PAIRS)),
                    &mut || self.timed(PAIRS, self.apart.own(0, PAIRS)),
                    &mut || self.timed(PAIRS, self.raw.recipe(PAIRS)),
                ],
            );
            bench.row(BARE, "us", ours, Some(bare), Target::Ratio(0.90));
            bench.row(OWN, "us", ours, Some(own), Target::Ratio(0.90));
            bench.row(APART, "us", ours, Some(apart), Target::Shown);
            bench.beside(RECIPE, "us", ours, recipe, Target::Ratio(1.2));
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
                (to, Raw::connect(&self.server.address()).await.expect("the server answers"))
            });
            let (ours, limit) = alternate(
                TURNS,
                || self.runtime.block_on(hand_off(&self.client, &to)).expect("the server answers"),
                || self.runtime.block_on(self.raw.hand_off(&other)).expect("the server answers"),
            );
            bench.row(HAND_OFF, "us, median", ours, Some(limit), Target::Times(1.5));
        }
    }

    /// Returns the microseconds of one of so many pieces.
    fn timed<E: std::fmt::Debug>(&self, pieces: usize, work: impl Future<Output = Result<(), E>>) -> f64 {
        let start = Instant::now();
        self.runtime.block_on(work).expect("the server answers");
        micros_each(start.elapsed(), pieces)
    }
}

/// What can be had from the client library without us.
#[derive(Clone)]
struct Raw(Client);

impl Raw {
    async fn connect(address: &str) -> Result<Self, Error> {
        let client =
            Client::connector().with_session_timeout(Duration::from_secs(40)).connect(address).await?;
        let options = CreateMode::Persistent.with_acls(Acls::anyone_all());
        client.mkdir("/raw/recipe", &options).await?;
        for task in 0..AT_ONCE {
            client.mkdir(&format!("/raw/queue-{task}"), &options).await?;
        }
        if client.check_stat("/raw/base").await?.is_none() {
            client.create("/raw/base", b"1", &options).await?;
        }
        Ok(Self(client))
    }

    fn connect_apart(runtime: &Runtime, server: &Server) -> Self {
        let (address, apart) = (server.address(), one_thread());
        let handle = apart.handle().clone();
        std::thread::spawn(move || apart.block_on(std::future::pending::<()>()));
        let connected = handle.spawn(async move { Self::connect(&address).await });
        runtime.block_on(connected).expect("no panic").expect("the server answers")
    }

    /// A node that nobody has, and its end.
    async fn bare(&self, pairs: usize) -> Result<(), Error> {
        let options = CreateMode::Ephemeral.with_acls(Acls::anyone_all());
        for _ in 0..pairs {
            self.0.create("/raw/bare", hex().as_bytes(), &options).await?;
            self.0.delete("/raw/bare", None).await?;
        }
        Ok(())
    }

    /// The requests of the backend: a place in the queue with a look behind it, and its end.
    async fn own(&self, task: usize, pairs: usize) -> Result<(), Error> {
        let queue = format!("/raw/queue-{task}");
        let options = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
        for _ in 0..pairs {
            let prefix = format!("{queue}/{}-", hex());
            let made = self.0.create(&prefix, b"1:30000:host:1", &options);
            let mut look = self.0.new_multi_reader();
            look.add_get_children(&queue)?;
            look.add_get_data("/raw/base")?;
            look.add_get_children(&queue)?;
            let looked = look.commit();
            let (_, sequence) = made.await?;
            looked.await?;
            self.0.delete(&format!("{prefix}{sequence}"), None).await?;
        }
        Ok(())
    }

    /// The lock of the client library.
    async fn recipe(&self, pairs: usize) -> Result<(), Error> {
        for _ in 0..pairs {
            let prefix = LockPrefix::new_curator("/raw/recipe", "lock-")?;
            let lock = self.0.lock(prefix, b"host:1", Acls::anyone_all()).await?;
            self.0.delete(lock.lock_path(), None).await?;
            // Dropped, it would delete the node once more, behind our back.
            std::mem::forget(lock);
        }
        Ok(())
    }

    /// One deletion, one event, and one read of who heard it: what no hand-off can do without.
    async fn hand_off(&self, other: &Self) -> Result<f64, Error> {
        let options = CreateMode::Ephemeral.with_acls(Acls::anyone_all());
        self.0.create("/raw/handed", hex().as_bytes(), &options).await?;
        let (_, watcher) = other.0.check_and_watch_stat("/raw/handed").await?;
        tokio::time::sleep(SETTLE).await;
        let start = Instant::now();
        let waits = async {
            watcher.changed().await;
            other.0.get_children("/raw/queue-0").await?;
            Ok::<_, Error>(Instant::now())
        };
        let (deleted, granted) = tokio::join!(self.0.delete("/raw/handed", None), waits);
        deleted?;
        Ok(micros_each(granted? - start, 1))
    }
}

fn hex() -> String {
    Owner::random().expose().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Counts the watchers that the server tells for each hand-off, with so many clients in line: every request has one
/// answer, so what it sends beyond that are events. (Its own count of watchers told of a deletion, in 3.8.0, misses most.)
async fn events_of_a_crowd(server: &Server) -> lockcore::Result<f64> {
    let holder = patient(backend(server));
    let waiters: Vec<_> = (0..WAITERS).map(|_| patient(backend(server))).collect();
    let name = LockName::parse("bench/wanted")?;
    let beyond = || {
        let [sent, received] = server.zookeeper_counters(["zk_packets_sent", "zk_packets_received"]);
        sent - received
    };
    // A question is counted, too, and its answer as several packets.
    let first = beyond();
    let (question, asked) = (beyond() - first, Cell::new(0.0));
    crowd(
        &holder,
        &waiters,
        async || {
            let (backend, call) = holder.backend().expect("no mistake in the options");
            let state = backend.inspect(&call, &name).await.expect("the server answers");
            state.waiters == Some(WAITERS as u32)
        },
        async || {
            asked.set(asked.get() + question);
            beyond() - asked.get()
        },
    )
    .await
}
