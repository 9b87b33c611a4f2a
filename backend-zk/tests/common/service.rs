//! What the suite needs of ZooKeeper: a connection, a second road to the nodes, and power over the servers.

use std::{
    net::{SocketAddr, ToSocketAddrs},
    process::ExitCode,
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use lockcore::{
    LockName,
    backend::{LockBackend, Owner, OwnerDigest, async_trait},
};
use lockcore_conformance::{Servers, Service, Suite, programs::Provider};
use lockcore_zk::{ZkBackend, ZkConfig};
use rustix::process::Signal;
use tokio::sync::Mutex;
use zookeeper_client::Client;

use super::common::{Ensemble, WATCHDOG, ZOOKEEPER, call, clocks_are_offered, is_skipped, says};

/// An ensemble under the suite, in a namespace of its own for each case.
pub(crate) struct Zk {
    addresses: String,
    namespace: OnceLock<String>,
    admin: Mutex<Option<Client>>,
    own: Option<Mutex<Ensemble>>,
}

impl Zk {
    pub(crate) fn on(addresses: String) -> Self {
        Self { addresses, namespace: OnceLock::new(), admin: Mutex::default(), own: None }
    }

    /// Starts on servers that are one case's own.
    pub(crate) fn owning(ensemble: Ensemble) -> Self {
        let own = Self::on(ensemble.addresses());
        Self { own: Some(Mutex::new(ensemble)), ..own }
    }

    /// The second road: the queue's node, by the shape that the crate's README gives.
    fn queue(&self, name: &LockName) -> String {
        let refused = |c: char| matches!(c, '%' | '/') || c.is_control() || c >= '\u{e000}';
        let node = name.as_str().chars().map(|c| match c {
            c if refused(c) => c.to_string().bytes().map(|byte| format!("%{byte:02X}")).collect(),
            c => c.to_string(),
        });
        let space = self.namespace.get().map_or("", String::as_str);
        format!("/lockcore/@{space}/locks/{}", node.collect::<String>())
    }

    /// Returns a session for looks, made anew where the last one failed.
    async fn admin(&self, failed: bool) -> Client {
        let begun = Instant::now();
        let mut admin = self.admin.lock().await;
        if failed {
            *admin = None;
        }
        loop {
            if let Some(client) = &*admin {
                return client.clone();
            }
            assert!(begun.elapsed() < WATCHDOG, "the ensemble does not answer");
            *admin = Client::connect(&self.addresses).await.ok();
        }
    }

    /// Places in order of arrival; fewer than 2^31 were made, so their sequence does not wrap.
    async fn places(&self, name: &LockName) -> Vec<String> {
        let (queue, begun, mut failed) = (self.queue(name), Instant::now(), false);
        loop {
            let admin = self.admin(failed).await;
            let synced = admin.sync("/").await;
            let listed = match synced {
                Ok(()) => admin.list_children(&queue).await,
                Err(error) => Err(error),
            };
            match listed {
                Ok(mut places) => {
                    places.sort_by_key(|place| place[32..].to_owned());
                    return places;
                }
                Err(zookeeper_client::Error::NoNode) => return Vec::new(),
                Err(error) => assert!(begun.elapsed() < WATCHDOG, "the ensemble does not answer: {error}"),
            }
            failed = true;
        }
    }
}

#[async_trait]
impl Service for Zk {
    async fn connect(&self) -> Arc<dyn LockBackend> {
        connect(self.addresses.clone()).await
    }

    async fn holder(&self, name: &LockName) -> Option<OwnerDigest> {
        let places = self.places(name).await;
        let (hex, mut bytes) = (&places.first()?[..32], [0; 16]);
        for (n, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(hex.get(2 * n..2 * n + 2)?, 16).ok()?;
        }
        Some(Owner::from_bytes(bytes).digest())
    }

    async fn steal(&self, name: &LockName) {
        if let Some(first) = self.places(name).await.first() {
            let path = format!("{}/{first}", self.queue(name));
            self.admin(false).await.delete(&path, None).await.expect("the place stands");
        }
    }

    fn namespace(&self, seed: u64) -> String {
        self.namespace.get_or_init(|| format!("c{seed:x}")).clone()
    }

    fn ttl(&self) -> Duration {
        Duration::from_secs(1)
    }

    async fn queued(&self, name: &LockName) -> Option<u32> {
        u32::try_from(self.places(name).await.len().saturating_sub(1)).ok()
    }

    fn servers(&self) -> Vec<SocketAddr> {
        let listens = |address: &str| address.to_socket_addrs().ok()?.next();
        self.addresses.split(',').map(|address| listens(address).expect("a plain address")).collect()
    }

    async fn connect_through(&self, addresses: &[SocketAddr]) -> Arc<dyn LockBackend> {
        let addresses: Vec<String> = addresses.iter().map(SocketAddr::to_string).collect();
        connect(addresses.join(",")).await
    }

    fn power(&self) -> Option<&dyn Servers> {
        self.own.is_some().then_some(self)
    }

    async fn version(&self) -> Option<String> {
        let said = says(self.addresses.split(',').next()?, "srvr")?;
        let (version, _) = said.strip_prefix("Zookeeper version: ")?.split_once('-')?;
        Some(format!("ZooKeeper {version}"))
    }

    fn address(&self) -> Option<String> {
        Some(self.addresses.clone())
    }
}

impl Zk {
    async fn own(&self) -> tokio::sync::MutexGuard<'_, Ensemble> {
        self.own.as_ref().expect("power was offered").lock().await
    }
}

#[async_trait]
impl Servers for Zk {
    fn count(&self) -> usize {
        self.servers().len()
    }

    async fn kill(&self, server: usize) {
        self.own().await.kill(server);
    }

    async fn restart(&self, server: usize) {
        self.own().await.restart(server);
    }

    async fn stop(&self, server: usize) {
        self.own().await.signal(server, Signal::STOP);
    }

    async fn go_on(&self, server: usize) {
        self.own().await.signal(server, Signal::CONT);
    }

    async fn set_clock_ahead(&self, server: usize, seconds: i64) {
        self.own().await.set_clock_ahead(server, seconds);
    }

    async fn leader(&self) -> usize {
        self.own().await.leader()
    }
}

/// Connects to the servers of a list with commas.
pub(crate) async fn connect(addresses: String) -> Arc<dyn LockBackend> {
    let backend = ZkBackend::lazy(ZkConfig::new(addresses.split(','))).expect("a plain address");
    let begun = Instant::now();
    while let Err(error) = backend.high_water(&call()).await {
        assert!(begun.elapsed() < WATCHDOG, "the ensemble does not answer: {error}");
        // Between two looks at servers that are starting, not a wait for an effect.
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    Arc::new(backend)
}

/// Runs every case on an ensemble of this run's own; cases that hurt servers have theirs.
pub(crate) fn suite(profile: &'static str, size: usize) -> ExitCode {
    // A client process of a case needs no server of its own.
    if let Some(code) = lockcore_conformance::child_main(connect) {
        return code;
    }
    if is_skipped() {
        return ExitCode::SUCCESS;
    }
    if let Provider::External(addresses) = ZOOKEEPER.provider() {
        let servers = addresses.split(',').count();
        if (servers > 1) != (size > 1) {
            return not_this_lane(profile, servers);
        }
        return Suite::new(profile, async move || Zk::on(addresses.clone())).main();
    }
    let Some(ensemble) = Ensemble::start(size) else { return ExitCode::SUCCESS };
    let addresses = ensemble.addresses();
    Suite::new(profile, async move || Zk::on(addresses.clone()))
        .own_servers(size, async move || {
            Zk::owning(Ensemble::start(size).expect("what could be started once can be started again"))
        })
        .server_clocks(clocks_are_offered())
        .main()
}

/// Says that the address in the environment belongs to another lane.
#[allow(clippy::print_stderr)]
fn not_this_lane(profile: &str, servers: usize) -> ExitCode {
    eprintln!("{profile}: not run: {} names {servers} of them", ZOOKEEPER.url);
    ExitCode::SUCCESS
}
