//! The Redis backend against its own two scripts through the client library alone, and beside another lock.

use std::time::{Duration, Instant};

use futures_util::StreamExt;
use lockcore::{LockClient, backend::Owner};
use lockcore_redis::{RedisBackend, RedisConfig, RedlockBackend, RedlockConfig};
use redis::{Client, RedisResult, Value, aio::MultiplexedConnection};
use rslock::LockManager;
use tokio::runtime::Runtime;

use crate::{
    harness::{Bench, Target, alternate, in_turns, micros_each, one_thread},
    servers::{REDIS, Server, not_run},
    work::{Many, SETTLE, crowd, hand_off, patient, rounds, side_by_side},
};

const ONE: &str = "redis/acquire-release";
const TASKS: &str = "redis/acquire-release/64-tasks";
const PEER: &str = "redis/acquire-release/rslock";
const REDLOCK: &str = "redis/redlock-3/rslock";
const HAND_OFF: &str = "redis/hand-off";
const CROWD: &str = "redis/hand-off/requests-of-50";
const ALLOCATIONS: &str = "redis/allocations";
const MANY: Many = Many {
    cpu: "redis/leases/cpu",
    bytes: "redis/leases/bytes-per-lease",
    messages: "redis/leases/messages",
    leases: 100_000,
};
const ROWS: [&str; 10] =
    [ONE, TASKS, PEER, REDLOCK, HAND_OFF, CROWD, ALLOCATIONS, MANY.cpu, MANY.bytes, MANY.messages];

const TURNS: usize = 61;
const PAIRS: usize = 100;
const AT_ONCE: usize = 64;
const COUNTED: usize = 1_000;
const WAITERS: usize = 50;
const TTL: Duration = Duration::from_secs(30);

pub(crate) fn run(bench: &mut Bench) {
    if !bench.wants_any(&ROWS) {
        return;
    }
    if let Some(reason) = not_run(&REDIS) {
        return bench.not_run(&ROWS, &reason);
    }
    if bench.wants_any(&[ONE, TASKS, PEER, HAND_OFF, ALLOCATIONS]) {
        Beside::start().run(bench);
    }
    if bench.wants(REDLOCK) {
        redlock(bench);
    }
    if bench.wants(CROWD) {
        let server = Server::redis();
        let requests = one_thread().block_on(requests_of_a_crowd(&server)).expect("the server answers");
        bench.row(CROWD, "requests", requests, None, Target::Shown);
    }
    if bench.wants_any(&[MANY.cpu, MANY.bytes, MANY.messages]) {
        let server = Server::redis();
        MANY.run(
            bench,
            async || backend(&server).await,
            async || requests(&server).await.expect("the server answers"),
        );
    }
}

async fn backend(server: &Server) -> RedisBackend {
    RedisBackend::connect(RedisConfig::new("127.0.0.1", server.port)).await.expect("the server is there")
}

fn raw_client(server: &Server) -> Client {
    Client::open(format!("redis://127.0.0.1:{}", server.port)).expect("an address")
}

/// Ours and the scripts by hand, on one server and one runtime.
struct Beside {
    runtime: Runtime,
    client: LockClient,
    raw: Raw,
    server: Server,
}

impl Beside {
    fn start() -> Self {
        let (server, runtime) = (Server::redis(), one_thread());
        let (client, raw) = runtime.block_on(async {
            let client = LockClient::new(backend(&server).await);
            let raw = Raw::learn(&server, &client).await.expect("the server answers");
            (client, raw)
        });
        Self { runtime, client, raw, server }
    }

    fn run(&self, bench: &mut Bench) {
        if bench.wants(ONE) {
            let (ours, limit) = alternate(
                TURNS,
                || self.timed(PAIRS, rounds(self.client.clone(), 0, PAIRS)),
                || self.timed(PAIRS, self.raw.pairs(0, PAIRS)),
            );
            bench.row(ONE, "us", ours, Some(limit), Target::Ratio(0.95));
        }
        if bench.wants(TASKS) {
            let ours = |task| rounds(self.client.clone(), task, 1);
            let limit = |task| {
                let raw = self.raw.clone();
                async move { raw.pairs(task, 1).await }
            };
            let (ours, limit) = alternate(
                TURNS,
                || self.timed(AT_ONCE, side_by_side(AT_ONCE, ours)),
                || self.timed(AT_ONCE, side_by_side(AT_ONCE, limit)),
            );
            bench.row(TASKS, "us", ours, Some(limit), Target::Ratio(0.85));
        }
        if bench.wants(PEER) {
            let peer = LockManager::from_clients(vec![raw_client(&self.server)]);
            let [ours, peer] = in_turns(
                TURNS,
                [&mut || self.timed(PAIRS, rounds(self.client.clone(), 0, PAIRS)), &mut || {
                    self.timed(PAIRS, peer_rounds(&peer))
                }],
            );
            bench.beside(PEER, "us", ours, peer, Target::Shown);
        }
        if bench.wants(HAND_OFF) {
            self.hand_off(bench);
        }
        if bench.wants(ALLOCATIONS) {
            let each =
                |counted: allocation_counter::AllocationInfo| counted.count_total as f64 / COUNTED as f64;
            let ours = allocation_counter::measure(|| {
                self.timed(COUNTED, rounds(self.client.clone(), 0, COUNTED));
            });
            let limit = allocation_counter::measure(|| {
                self.timed(COUNTED, self.raw.pairs(0, COUNTED));
            });
            bench.row(ALLOCATIONS, "allocations", each(ours), Some(each(limit)), Target::Shown);
        }
    }

    fn hand_off(&self, bench: &mut Bench) {
        let (to, mut listener, other) = self.runtime.block_on(async {
            let raw = raw_client(&self.server);
            let mut listener = raw.get_async_pubsub().await.expect("the server is there");
            listener.subscribe(self.raw.name(HANDED).channel).await.expect("the server answers");
            let connection = raw.get_multiplexed_async_connection().await.expect("the server is there");
            let other = Raw { connection, ..self.raw.clone() };
            (LockClient::new(backend(&self.server).await), listener.into_on_message(), other)
        });
        let (ours, limit) = alternate(
            TURNS,
            || self.runtime.block_on(hand_off(&self.client, &to)).expect("the server answers"),
            || self.runtime.block_on(self.raw.hand_off(&other, &mut listener)).expect("the server answers"),
        );
        bench.row(HAND_OFF, "us, median", ours, Some(limit), Target::Times(1.5));
    }

    /// Returns the microseconds of one of so many pieces.
    fn timed<E: std::fmt::Debug>(&self, pieces: usize, work: impl Future<Output = Result<(), E>>) -> f64 {
        let start = Instant::now();
        self.runtime.block_on(work).expect("the server answers");
        micros_each(start.elapsed(), pieces)
    }
}

async fn peer_rounds(peer: &LockManager) -> Result<(), rslock::LockError> {
    for _ in 0..PAIRS {
        let lock = peer.lock(b"rslock/one", TTL).await?;
        peer.unlock(&lock).await;
    }
    Ok(())
}

fn redlock(bench: &mut Bench) {
    let servers = [Server::redis(), Server::redis(), Server::redis()];
    let runtime = one_thread();
    let config = RedlockConfig::new(servers.iter().map(|server| ("127.0.0.1", server.port)));
    let backend = runtime.block_on(RedlockBackend::connect(config)).expect("the servers are there");
    let client = LockClient::new(backend);
    let peer = LockManager::from_clients(servers.iter().map(raw_client).collect());
    let (ours, peer) = alternate(
        TURNS,
        || {
            let start = Instant::now();
            runtime.block_on(rounds(client.clone(), 0, PAIRS)).expect("the servers answer");
            micros_each(start.elapsed(), PAIRS)
        },
        || {
            let start = Instant::now();
            runtime.block_on(peer_rounds(&peer)).expect("the servers answer");
            micros_each(start.elapsed(), PAIRS)
        },
    );
    bench.beside(REDLOCK, "us", ours, peer, Target::Shown);
    runtime.block_on(client.close());
}

/// The name of the raw hand-off, behind those of the tasks.
const HANDED: usize = AT_ONCE;

/// The backend's own two scripts, by digest, with the keys and arguments that it sends: seen on the server while it took
/// a lock and gave it back.
#[derive(Clone)]
struct Raw {
    connection: MultiplexedConnection,
    acquire: Seen,
    release: Seen,
}

/// One request as the server saw it.
#[derive(Clone)]
struct Seen {
    digest: String,
    keys: Vec<String>,
    args: Vec<String>,
}

/// What the requests for one lock have in common.
struct Name {
    lock: String,
    fence: String,
    gone: String,
    none: String,
    channel: String,
}

impl Raw {
    async fn learn(server: &Server, ours: &LockClient) -> RedisResult<Self> {
        // The first round loads the scripts.
        rounds(ours.clone(), 0, 1).await.expect("the server answers");
        let raw = raw_client(server);
        let mut seen = Box::pin(raw.get_async_monitor().await?.into_on_message::<String>());
        rounds(ours.clone(), 0, 1).await.expect("the server answers");
        let mut requests = Vec::new();
        while requests.len() < 2 {
            let line = seen.next().await.expect("the server goes on");
            requests.extend(Seen::read(&line));
        }
        let release = requests.pop().expect("two were seen");
        let acquire = requests.pop().expect("two were seen");
        assert_eq!((acquire.keys.len(), acquire.args.len()), (3, 6), "an acquire is not what it was");
        assert_eq!((release.keys.len(), release.args.len()), (3, 3), "a release is not what it was");
        let connection = raw.get_multiplexed_async_connection().await?;
        Ok(Self { connection, acquire, release })
    }

    fn name(&self, task: usize) -> Name {
        let base = self.acquire.keys[0].strip_suffix("lock").expect("the key of a lock");
        let base = base.replace("bench/0", &format!("raw/{task}"));
        let of = |part: &str| format!("{base}{part}");
        Name {
            lock: of("lock"),
            fence: of("fence"),
            gone: of("gone:"),
            none: of("none"),
            channel: of("free"),
        }
    }

    async fn pairs(&self, task: usize, pairs: usize) -> RedisResult<()> {
        let name = self.name(task);
        let mut connection = self.connection.clone();
        for _ in 0..pairs {
            let held = self.acquire(&mut connection, &name).await?;
            self.release(&mut connection, &name, &held).await?;
        }
        Ok(())
    }

    /// Takes the lock; returns what its value begins with.
    async fn acquire(&self, connection: &mut MultiplexedConnection, name: &Name) -> RedisResult<String> {
        let owner = hex();
        let [_, ttl, floor, not_after, margin, label] = &self.acquire.args[..] else { unreachable!() };
        // By an hour, so that a copy of an old request is not refused as late.
        let not_after = not_after.parse::<u64>().expect("a number") + 3_600_000_000;
        let mut request = redis::cmd("EVALSHA");
        request.arg(&self.acquire.digest).arg(3).arg(&name.lock).arg(&name.fence);
        request.arg(format!("{}{owner}", name.gone)).arg(&owner).arg(ttl).arg(floor);
        request.arg(not_after).arg(margin).arg(label);
        let answer: Value = request.query_async(connection).await?;
        let Value::Array(parts) = answer else { panic!("not an answer of the script: {answer:?}") };
        match &parts[..] {
            [Value::BulkString(word), _, Value::Int(fence), ..] if word == b"ok" => {
                Ok(format!("{owner}|{fence}|"))
            }
            other => panic!("nobody else wants it: {other:?}"),
        }
    }

    async fn release(
        &self,
        connection: &mut MultiplexedConnection,
        name: &Name,
        held: &str,
    ) -> RedisResult<()> {
        let owner = held.split('|').next().expect("it was just put together");
        let mut request = redis::cmd("EVALSHA");
        request.arg(&self.release.digest).arg(3).arg(&name.lock).arg(format!("{}{owner}", name.gone));
        request.arg(&name.none).arg(held).arg(&self.release.args[1]).arg(&name.channel);
        let answer: Value = request.query_async(connection).await?;
        let Value::Array(parts) = answer else { panic!("not an answer of the script: {answer:?}") };
        assert_eq!(parts.last(), Some(&Value::Int(1)), "the lock was somebody else's");
        Ok(())
    }

    /// One release with its push, and one request of who heard it: what no hand-off can do without.
    async fn hand_off<S: StreamExt<Item = redis::Msg> + Unpin>(
        &self,
        other: &Self,
        listener: &mut S,
    ) -> RedisResult<f64> {
        let (name, mut from, mut to) = (self.name(HANDED), self.connection.clone(), other.connection.clone());
        let held = self.acquire(&mut from, &name).await?;
        tokio::time::sleep(SETTLE).await;
        let start = Instant::now();
        let waits = async {
            listener.next().await.expect("the server goes on");
            let held = other.acquire(&mut to, &name).await?;
            RedisResult::Ok((Instant::now(), held))
        };
        let (released, granted) = tokio::join!(self.release(&mut from, &name, &held), waits);
        released?;
        let (granted, held) = granted?;
        other.release(&mut to, &name, &held).await?;
        // Of this release nobody is to be told.
        listener.next().await.expect("the server goes on");
        Ok(micros_each(granted - start, 1))
    }
}

impl Seen {
    /// Reads a line of MONITOR; `None`: it is no script, or a script's own command.
    fn read(line: &str) -> Option<Self> {
        let (head, rest) = line.split_once("] ")?;
        if head.ends_with(" lua") {
            return None;
        }
        // Nothing that is sent here has a quote in it.
        let words: Vec<&str> = rest.trim().strip_prefix('"')?.strip_suffix('"')?.split("\" \"").collect();
        let [command, digest, keys, rest @ ..] = &words[..] else { return None };
        if !command.eq_ignore_ascii_case("evalsha") {
            return None;
        }
        let (keys, args) = rest.split_at_checked(keys.parse().ok()?)?;
        let owned = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect();
        Some(Self { digest: (*digest).to_owned(), keys: owned(keys), args: owned(args) })
    }
}

fn hex() -> String {
    let mut text = String::with_capacity(32);
    for byte in Owner::random().expose() {
        for digit in [byte >> 4, byte & 15] {
            text.push(char::from(b"0123456789abcdef"[usize::from(digit)]));
        }
    }
    text
}

/// Counts the requests of clients for each hand-off, with so many clients in line.
async fn requests_of_a_crowd(server: &Server) -> RedisResult<f64> {
    let holder = patient(backend(server).await);
    let mut waiters = Vec::new();
    for _ in 0..WAITERS {
        waiters.push(patient(backend(server).await));
    }
    let raw = raw_client(server).get_multiplexed_async_connection().await?;
    let channel = "lockcore::{bench/wanted}:free";
    let counted = crowd(
        &holder,
        &waiters,
        async || {
            let mut raw = raw.clone();
            let heard: RedisResult<(String, usize)> =
                redis::cmd("PUBSUB").arg("NUMSUB").arg(channel).query_async(&mut raw).await;
            heard.expect("the server answers").1 == WAITERS
        },
        async || requests(server).await.expect("the server answers"),
    );
    Ok(counted.await.expect("everybody gets its turn"))
}

/// Counts what clients have asked of the server about locks: scripts, and what they listen to.
async fn requests(server: &Server) -> RedisResult<f64> {
    let mut raw = raw_client(server).get_multiplexed_async_connection().await?;
    let stats: String = redis::cmd("INFO").arg("commandstats").query_async(&mut raw).await?;
    let calls = stats.lines().filter_map(|line| {
        let (command, numbers) = line.strip_prefix("cmdstat_")?.split_once(':')?;
        let of_clients = ["evalsha", "eval", "subscribe", "unsubscribe"];
        of_clients.contains(&command).then_some(numbers.strip_prefix("calls=")?.split_once(',')?.0)
    });
    Ok(calls.filter_map(|calls| calls.parse::<f64>().ok()).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_is_read_out_of_what_the_server_saw_and_its_own_commands_are_not() {
        let line = r#"1700.1 [0 127.0.0.1:4] "EVALSHA" "abc" "2" "k{1}" "k{2}" "o" "30000" """#;
        let seen = Seen::read(line).unwrap();
        assert_eq!(seen.digest, "abc");
        assert_eq!(
            (seen.keys, seen.args),
            (vec!["k{1}".into(), "k{2}".into()], vec!["o".into(), "30000".into(), String::new()])
        );
        assert!(Seen::read(r#"1700.1 [0 lua] "EVALSHA" "abc" "0""#).is_none());
        assert!(Seen::read(r#"1700.1 [0 127.0.0.1:4] "GET" "k""#).is_none());
    }
}
