//! What the suite needs of etcd: a connection, and a second road to the keys.

use std::{
    net::SocketAddr,
    process::ExitCode,
    sync::{Arc, OnceLock},
    time::Duration,
};

use etcd_client::{Client, DeleteOptions, GetOptions, KeyValue, SortOrder, SortTarget};
use lockcore::{
    LockName,
    backend::{LockBackend, Owner, async_trait},
};
use lockcore_conformance::{Service, Suite};
use lockcore_etcd::{EtcdBackend, EtcdConfig};

use super::common::{Cluster, call};

/// A cluster under the suite, in a namespace of its own for each case.
pub(crate) struct Etcd {
    urls: Vec<String>,
    namespace: OnceLock<String>,
}

impl Etcd {
    pub(crate) fn on(urls: Vec<String>) -> Self {
        Self { urls, namespace: OnceLock::new() }
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

    async fn holder(&self, name: &LockName) -> Option<Owner> {
        let places = self.places(name).await;
        let key = std::str::from_utf8(places.first()?.key()).ok()?;
        let (_, hex) = key.rsplit_once(':')?;
        let mut bytes = [0; 16];
        for (n, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(hex.get(2 * n..2 * n + 2)?, 16).ok()?;
        }
        Some(Owner::from_bytes(bytes))
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
        let listens = |url: &String| url.rsplit('/').next()?.parse().ok();
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

    fn address(&self) -> Option<String> {
        Some(self.urls.join(","))
    }
}

/// Connects to the members of a list with commas.
pub(crate) async fn connect(urls: String) -> Arc<dyn LockBackend> {
    let backend = EtcdBackend::lazy(EtcdConfig::new(urls.split(','))).expect("a plain address");
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
    let Some(cluster) = Cluster::start(size) else { return ExitCode::SUCCESS };
    let urls = cluster.urls();
    Suite::new(profile, async move || Etcd::on(urls.clone())).main()
}
