//! Redis of the test's own under the suite, in every set-up: one a run, a namespace of its own for each case.

use std::{
    net::{SocketAddr, ToSocketAddrs},
    process::ExitCode,
    sync::{Arc, OnceLock},
};

use lockcore::{
    LockName,
    backend::{LockBackend, Owner, OwnerDigest, async_trait},
};
use lockcore_conformance::{Servers, Service, Suite, programs::Provider};
use lockcore_redis::{RedisBackend, RedisConfig, RedlockBackend, RedlockConfig};
use rustix::process::Signal;

#[path = "../src/tests/server.rs"]
#[allow(dead_code, unreachable_pub)]
mod server;

use server::{ClusterOf, Fleet, REDIS, Server, clocks_are_offered, is_skipped};

/// How a set-up is reached by the code under test, and past it.
#[derive(Clone)]
struct Store {
    url: String,
    /// The servers that may have a lock, as the address has them.
    hosts: String,
    /// Where these are.
    servers: Vec<SocketAddr>,
    /// Name and password with their `@`, if the address has them.
    login: String,
    /// On so many of them it is held.
    majority: usize,
    namespace: OnceLock<String>,
}

impl Store {
    fn new(url: String) -> Self {
        let (_, rest) = url.split_once("://").expect("an address with a scheme");
        let place = rest.split(['/', '?']).next().unwrap_or_default();
        let (login, hosts) = place
            .rsplit_once('@')
            .map_or(("", place), |(_, hosts)| place.split_at(place.len() - hosts.len()));
        let resolve = |host: &str| {
            let host = if host.contains(':') { host.to_owned() } else { format!("{host}:6379") };
            let mut found = host.to_socket_addrs().unwrap_or_else(|error| panic!("{host}: {error}"));
            found.next().unwrap_or_else(|| panic!("{host} has no address"))
        };
        let servers: Vec<SocketAddr> = hosts.split(',').map(resolve).collect();
        let majority = if is_redlock(&url) { servers.len() / 2 + 1 } else { 1 };
        let (login, hosts) = (login.to_owned(), hosts.to_owned());
        Self { url, hosts, servers, login, majority, namespace: OnceLock::new() }
    }

    /// Returns the set-up that an address means, with the server's own name.
    async fn profile(&self) -> &'static str {
        let valkey = self.version().await.is_some_and(|version| version.starts_with("Valkey"));
        let set_up = match self.url.split("://").next() {
            _ if is_redlock(&self.url) => "redlock",
            Some(scheme) if scheme.contains("cluster") => "cluster",
            _ if self.url.contains("wait-replicas=") => "replicated",
            _ => "single",
        };
        format!("{}-{set_up}", if valkey { "valkey" } else { "redis" }).leak()
    }

    /// The second road: the key itself, by the shape that the crate's README gives.
    fn key(&self, name: &LockName) -> String {
        let name = name.as_str().replace('{', "%7B").replace('}', "%7D");
        format!("lockcore:{}:{{{name}}}:lock", self.namespace.get().map_or("", String::as_str))
    }

    /// Asks every server; one that does not decide about the key has nothing to say.
    fn raw<T: redis::FromRedisValue>(&self, command: &str, key: &str) -> Vec<T> {
        let ask = |server: &SocketAddr| {
            let client =
                redis::Client::open(format!("redis://{}{server}/", self.login)).expect("a plain address");
            let mut connection = client.get_connection().expect("the server answers");
            match redis::cmd(command).arg(key).query(&mut connection) {
                Ok(answer) => Some(answer),
                Err(error) if error.code() == Some("MOVED") => None,
                Err(error) => panic!("the server {server} answers: {error}"),
            }
        };
        self.servers.iter().filter_map(ask).collect()
    }
}

#[async_trait]
impl Service for Store {
    async fn connect(&self) -> Arc<dyn LockBackend> {
        connect(self.url.clone()).await
    }

    /// The nodes of a Cluster tell clients where they are themselves, past every proxy.
    fn servers(&self) -> Vec<SocketAddr> {
        if self.url.starts_with("redis+cluster:") {
            return Vec::new();
        }
        self.servers.clone()
    }

    async fn connect_through(&self, addresses: &[SocketAddr]) -> Arc<dyn LockBackend> {
        let through: Vec<String> = addresses.iter().map(SocketAddr::to_string).collect();
        connect(self.url.replace(&self.hosts, &through.join(","))).await
    }

    async fn holder(&self, name: &LockName) -> Option<OwnerDigest> {
        let values: Vec<Option<String>> = self.raw("GET", &self.key(name));
        let owners: Vec<Owner> = values.into_iter().flatten().filter_map(|value| owner(&value)).collect();
        let count = |owner: &Owner| owners.iter().filter(|other| *other == owner).count();
        owners.iter().find(|owner| count(owner) >= self.majority).map(Owner::digest)
    }

    async fn steal(&self, name: &LockName) {
        let _: Vec<i64> = self.raw("DEL", &self.key(name));
    }

    fn namespace(&self, seed: u64) -> String {
        self.namespace.get_or_init(|| format!("c{seed:x}")).clone()
    }

    async fn version(&self) -> Option<String> {
        let told: String = self.raw("INFO", "server").into_iter().next()?;
        let field = |name: &str| told.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
        // Valkey goes on saying 7.2 where programs look for the Redis that it came from.
        let valkey = field("valkey_version:").map(|version| format!("Valkey {version}"));
        valkey.or_else(|| Some(format!("Redis {}", field("redis_version:")?)))
    }

    fn address(&self) -> Option<String> {
        Some(self.url.clone())
    }
}

/// A set-up of one case's own, with power over its servers.
struct Own {
    store: Store,
    servers: tokio::sync::Mutex<Vec<Server>>,
}

impl Own {
    async fn start(count: usize, options: &[&str], url: impl Fn(&str) -> String) -> Self {
        let mut servers = Vec::new();
        for _ in 0..count {
            servers.push(Server::under_a_clock(options).await.expect("Redis is not skipped: the suite runs"));
        }
        let ports: Vec<u16> = servers.iter().map(|server| server.port).collect();
        let store = Store::new(url(&list(&ports)));
        Self { store, servers: tokio::sync::Mutex::new(servers) }
    }
}

#[async_trait]
impl Servers for Own {
    fn count(&self) -> usize {
        self.store.servers.len()
    }

    async fn kill(&self, server: usize) {
        self.servers.lock().await[server].kill();
    }

    async fn restart(&self, server: usize) {
        self.servers.lock().await[server].start_again().await;
    }

    async fn stop(&self, server: usize) {
        self.servers.lock().await[server].signal(Signal::STOP);
    }

    async fn go_on(&self, server: usize) {
        self.servers.lock().await[server].signal(Signal::CONT);
    }

    async fn set_clock_ahead(&self, server: usize, seconds: i64) {
        self.servers.lock().await[server].set_clock_ahead(seconds);
    }
}

#[async_trait]
impl Service for Own {
    async fn connect(&self) -> Arc<dyn LockBackend> {
        self.store.connect().await
    }

    fn servers(&self) -> Vec<SocketAddr> {
        self.store.servers()
    }

    async fn connect_through(&self, addresses: &[SocketAddr]) -> Arc<dyn LockBackend> {
        self.store.connect_through(addresses).await
    }

    async fn holder(&self, name: &LockName) -> Option<OwnerDigest> {
        self.store.holder(name).await
    }

    async fn steal(&self, name: &LockName) {
        self.store.steal(name).await;
    }

    fn namespace(&self, seed: u64) -> String {
        self.store.namespace(seed)
    }

    fn power(&self) -> Option<&dyn Servers> {
        Some(self)
    }
}

fn owner(value: &str) -> Option<Owner> {
    let hex = value.split('|').next()?;
    let mut bytes = [0; 16];
    for (n, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(hex.get(2 * n..2 * n + 2)?, 16).ok()?;
    }
    Some(Owner::from_bytes(bytes))
}

async fn connect(url: String) -> Arc<dyn LockBackend> {
    if is_redlock(&url) {
        let config = RedlockConfig::from_url(&url).expect("an address");
        return Arc::new(RedlockBackend::connect(config).await.expect("the servers answer"));
    }
    let config = RedisConfig::from_url(&url).expect("an address");
    Arc::new(RedisBackend::connect(config).await.expect("the server answers"))
}

/// Says whether several servers decide together.
fn is_redlock(url: &str) -> bool {
    matches!(url.split_once("://"), Some(("redlock" | "redlocks", _)))
}

fn list(ports: &[u16]) -> String {
    ports.iter().map(|port| format!("127.0.0.1:{port}")).collect::<Vec<_>>().join(",")
}

/// Says whether this set-up is asked for: by `LOCK_TEST_PROFILES`, a list with commas, and by the command line: by its name,
/// by a topic or a case of any, or by nothing. What Valkey serves has Redis's set-ups.
fn is_wanted(profile: &str) -> bool {
    let plain = |name: &str| name.replacen("valkey-", "redis-", 1);
    if let Ok(list) = std::env::var("LOCK_TEST_PROFILES")
        && !list.split(',').any(|name| plain(name) == profile)
    {
        return false;
    }
    let filters: Vec<String> =
        std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).map(|arg| plain(&arg)).collect();
    let names = |filter: &String| filter.starts_with(profile) || !filter.starts_with("redis-");
    filters.is_empty() || filters.iter().any(names)
}

fn main() -> ExitCode {
    // A client process of a case needs no server of its own.
    if let Some(code) = lockcore_conformance::child_main(connect) {
        return code;
    }
    if is_skipped() {
        return ExitCode::SUCCESS;
    }
    let runtime = tokio::runtime::Runtime::new().expect("a runtime can be made");
    let mut failed = false;
    let suite = |store: Store| {
        let profile = runtime.block_on(store.profile());
        Suite::new(profile, async move || store.clone())
    };
    let mut play = |suite: Suite| failed |= suite.main() != ExitCode::SUCCESS;
    if let Provider::External(url) = REDIS.provider() {
        play(suite(Store::new(url)));
        return if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS };
    }
    // Each set-up ends before the next begins: the machine is small.
    if is_wanted("redis-single") {
        let Some(server) = runtime.block_on(Server::start()) else { return ExitCode::SUCCESS };
        let suite = suite(Store::new(format!("redis://{}", list(&[server.port]))));
        // Without a disk: a restart forgets.
        let suite = suite.own_servers(1, async || Own::start(1, &[], |list| format!("redis://{list}")).await);
        play(suite.server_clocks(clocks_are_offered()));
    }
    if is_wanted("redis-replicated") {
        let Some(fleet) = runtime.block_on(Fleet::start(2, &[])) else { return ExitCode::SUCCESS };
        let url = format!("redis://{}?wait-replicas=majority", list(&[fleet.master.port]));
        play(suite(Store::new(url)));
    }
    if is_wanted("redis-cluster") {
        let Some(cluster) = runtime.block_on(ClusterOf::start(3, 0)) else { return ExitCode::SUCCESS };
        let ports: Vec<u16> = cluster.nodes.iter().map(|node| node.port).collect();
        play(suite(Store::new(format!("redis+cluster://{}", list(&ports)))));
    }
    if is_wanted("redis-redlock") {
        let mut servers = Vec::new();
        for _ in 0..3 {
            let Some(server) = runtime.block_on(Server::start()) else { return ExitCode::SUCCESS };
            servers.push(server);
        }
        let ports: Vec<u16> = servers.iter().map(|server| server.port).collect();
        let suite = suite(Store::new(format!("redlock://{}", list(&ports))));
        // With a disk: a server that forgets is a test of the crate's own.
        let durable = ["--appendonly", "yes", "--appendfsync", "always"];
        let suite = suite
            .own_servers(3, async move || Own::start(3, &durable, |list| format!("redlock://{list}")).await);
        play(suite.server_clocks(clocks_are_offered()));
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}
