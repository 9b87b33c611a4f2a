//! What the suite needs of etcd: a connection, and a second road to the keys.

use std::{
    net::{SocketAddr, ToSocketAddrs},
    process::ExitCode,
    sync::{Arc, OnceLock},
    time::Duration,
};

use etcd_client::{Client, DeleteOptions, GetOptions, KeyValue, SortOrder, SortTarget};
use lockcore::{
    LockName,
    backend::{LockBackend, Owner, OwnerDigest, async_trait},
};
use lockcore_conformance::{Servers, Service, Suite, programs::Provider};
use lockcore_etcd::{EtcdBackend, EtcdConfig, Renewal};
use rustix::process::Signal;
use tokio::sync::{Mutex, MutexGuard};

use super::common::{Cluster, ETCD, WATCHDOG, call, is_skipped};

/// A cluster under the suite, in a namespace of its own for each case.
pub(crate) struct Etcd {
    urls: Vec<String>,
    /// The members, where they are this case's own.
    own: Option<Mutex<Own>>,
    namespace: OnceLock<String>,
}

/// Members to kill and to stop.
struct Own {
    cluster: Cluster,
    alive: Vec<bool>,
}

impl Etcd {
    pub(crate) fn on(urls: Vec<String>) -> Self {
        Self { urls, own: None, namespace: OnceLock::new() }
    }

    async fn own(size: usize) -> Self {
        let cluster = Cluster::start(size).expect("asked for before");
        for url in cluster.urls() {
            comes_up(&url).await;
        }
        let urls = cluster.urls();
        let own = Own { cluster, alive: vec![true; size] };
        Self { urls, own: Some(Mutex::new(own)), namespace: OnceLock::new() }
    }

    async fn members(&self) -> MutexGuard<'_, Own> {
        self.own.as_ref().expect("the members are this case's own").lock().await
    }

    /// The second road: the keys of a queue, by the shape that the crate's README gives.
    fn queue(&self, name: &LockName) -> String {
        let name = name.as_str().replace('%', "%25").replace(':', "%3A");
        format!("lockcore/{}/q/{name}:", self.namespace.get().map_or("", String::as_str))
    }

    async fn places(&self, name: &LockName) -> Vec<KeyValue> {
        let in_order = GetOptions::new().with_prefix().with_sort(SortTarget::Create, SortOrder::Ascend);
        let mut client = Client::connect(&self.urls, None).await.expect("a plain address");
        client.get(self.queue(name), Some(in_order)).await.expect("the server answers").take_kvs()
    }
}

#[async_trait]
impl Service for Etcd {
    async fn connect(&self) -> Arc<dyn LockBackend> {
        connect(self.urls.join(",")).await
    }

    async fn holder(&self, name: &LockName) -> Option<OwnerDigest> {
        let places = self.places(name).await;
        let key = std::str::from_utf8(places.first()?.key()).ok()?;
        let (_, hex) = key.rsplit_once(':')?;
        let mut bytes = [0; 16];
        for (n, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(hex.get(2 * n..2 * n + 2)?, 16).ok()?;
        }
        Some(Owner::from_bytes(bytes).digest())
    }

    async fn steal(&self, name: &LockName) {
        if let Some(first) = self.places(name).await.first() {
            let mut client = Client::connect(&self.urls, None).await.expect("a plain address");
            client.delete(first.key(), None::<DeleteOptions>).await.expect("the server answers");
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
        let listens = |url: &String| url.rsplit('/').next()?.to_socket_addrs().ok()?.next();
        self.urls.iter().map(|url| listens(url).expect("a plain address")).collect()
    }

    async fn connect_through(&self, addresses: &[SocketAddr]) -> Arc<dyn LockBackend> {
        let urls: Vec<String> = addresses.iter().map(|address| format!("http://{address}")).collect();
        connect(urls.join(",")).await
    }

    async fn version(&self) -> Option<String> {
        let mut client = Client::connect(&self.urls, None).await.expect("a plain address");
        let status = client.status().await.expect("the server answers");
        Some(format!("etcd {}", status.version()))
    }

    fn power(&self) -> Option<&dyn Servers> {
        self.own.as_ref().map(|_| self as &dyn Servers)
    }

    fn address(&self) -> Option<String> {
        Some(self.urls.join(","))
    }
}

#[async_trait]
impl Servers for Etcd {
    fn count(&self) -> usize {
        self.urls.len()
    }

    async fn kill(&self, server: usize) {
        let mut own = self.members().await;
        own.cluster.members[server].kill();
        own.alive[server] = false;
    }

    async fn restart(&self, server: usize) {
        let mut own = self.members().await;
        own.cluster.members[server].restart();
        own.alive[server] = true;
        if own.alive.iter().filter(|alive| **alive).count() * 2 <= own.alive.len() {
            return;
        }
        drop(own);
        comes_up(&self.urls[server]).await;
    }

    async fn stop(&self, server: usize) {
        self.members().await.cluster.members[server].signal(Signal::STOP);
    }

    async fn go_on(&self, server: usize) {
        self.members().await.cluster.members[server].signal(Signal::CONT);
    }

    async fn leader(&self) -> usize {
        // A member that is down does not answer, and another may not know yet who follows it.
        loop {
            for (at, url) in self.urls.iter().enumerate() {
                if leads(url).await {
                    return at;
                }
            }
        }
    }
}

async fn comes_up(url: &str) {
    let up = async {
        while !serves(url).await {
            // Between two looks at a process that is starting.
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(WATCHDOG, up).await.expect("the member serves in time");
}

async fn serves(url: &str) -> bool {
    let asked = async { Client::connect([url], None).await?.get("unrelated", None).await };
    matches!(tokio::time::timeout(Duration::from_millis(500), asked).await, Ok(Ok(_)))
}

async fn leads(url: &str) -> bool {
    let asked = async { Client::connect([url], None).await?.status().await };
    let answer = tokio::time::timeout(Duration::from_millis(500), asked).await;
    answer.is_ok_and(|status| status.is_ok_and(|s| s.header().is_some_and(|h| h.member_id() == s.leader())))
}

/// Says whether `LOCK_ETCD_RENEWAL` asks for renewals by swap.
fn by_swap() -> bool {
    std::env::var("LOCK_ETCD_RENEWAL").is_ok_and(|renewal| renewal == "swap")
}

/// Connects to the members of a list with commas.
pub(crate) async fn connect(urls: String) -> Arc<dyn LockBackend> {
    let config = EtcdConfig::new(urls.split(',')).with(|c| {
        if by_swap() {
            c.renewal = Renewal::Swap;
        }
    });
    let backend = EtcdBackend::lazy(config).expect("a plain address");
    let up = tokio::time::timeout(Duration::from_secs(20), async {
        while backend.high_water(&call()).await.is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    up.await.expect("the server comes up");
    Arc::new(backend)
}

/// Runs every case on a cluster of this run's own.
pub(crate) fn suite(profile: &'static str, size: usize) -> ExitCode {
    // A client process of a case needs no server of its own.
    if let Some(code) = lockcore_conformance::child_main(connect) {
        return code;
    }
    if is_skipped() {
        return ExitCode::SUCCESS;
    }
    let profile = if by_swap() { "etcd-swap" } else { profile };
    if let Provider::External(urls) = ETCD.provider() {
        let urls: Vec<String> = urls.split(',').map(str::to_owned).collect();
        if (urls.len() > 1) != (size > 1) {
            return not_this_lane(profile, urls.len());
        }
        return Suite::new(profile, async move || Etcd::on(urls.clone())).main();
    }
    let Some(cluster) = Cluster::start(size) else { return ExitCode::SUCCESS };
    let urls = cluster.urls();
    let suite = Suite::new(profile, async move || Etcd::on(urls.clone()));
    suite.own_servers(size, async move || Etcd::own(size).await).main()
}

/// Says that the address in the environment belongs to another lane.
#[allow(clippy::print_stderr)]
fn not_this_lane(profile: &str, servers: usize) -> ExitCode {
    eprintln!("{profile}: not run: {} names {servers} of them", ETCD.url);
    ExitCode::SUCCESS
}
