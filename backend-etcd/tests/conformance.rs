//! An etcd server of the test's own under the suite: one server a run, a namespace of its own for each case.

mod common;

use std::{
    process::ExitCode,
    sync::{Arc, OnceLock},
    time::Duration,
};

use common::{Server, call};
use etcd_client::{Client, DeleteOptions, GetOptions, KeyValue, SortOrder, SortTarget};
use lockcore::{
    LockName,
    backend::{LockBackend, Owner, async_trait},
};
use lockcore_conformance::{Service, Suite};
use lockcore_etcd::{EtcdBackend, EtcdConfig};

struct Etcd {
    url: String,
    namespace: OnceLock<String>,
}

impl Etcd {
    /// The second road: the keys of a queue, by the shape that the crate's README gives.
    fn queue(&self, name: &LockName) -> String {
        let name = name.as_str().replace('%', "%25").replace(':', "%3A");
        format!("lockcore/{}/q/{name}:", self.namespace.get().map_or("", String::as_str))
    }

    async fn places(&self, name: &LockName) -> Vec<KeyValue> {
        let in_order = GetOptions::new().with_prefix().with_sort(SortTarget::Create, SortOrder::Ascend);
        let mut client = Client::connect([&self.url], None).await.expect("a plain address");
        client.get(self.queue(name), Some(in_order)).await.expect("the server answers").take_kvs()
    }
}

#[async_trait]
impl Service for Etcd {
    async fn connect(&self) -> Arc<dyn LockBackend> {
        connect(self.url.clone()).await
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
            let mut client = Client::connect([&self.url], None).await.expect("a plain address");
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

    async fn version(&self) -> Option<String> {
        let mut client = Client::connect([&self.url], None).await.expect("a plain address");
        let status = client.status().await.expect("the server answers");
        Some(format!("etcd {}", status.version()))
    }

    fn address(&self) -> Option<String> {
        Some(self.url.clone())
    }
}

async fn connect(url: String) -> Arc<dyn LockBackend> {
    let backend = EtcdBackend::lazy(EtcdConfig::new([url])).expect("a plain address");
    let up = tokio::time::timeout(Duration::from_secs(20), async {
        while backend.high_water(&call()).await.is_err() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    up.await.expect("the server comes up");
    Arc::new(backend)
}

fn main() -> ExitCode {
    // A client process of a case needs no server of its own.
    if let Some(code) = lockcore_conformance::child_main(connect) {
        return code;
    }
    let Some(server) = Server::start() else { return ExitCode::SUCCESS };
    let url = server.url.clone();
    Suite::new("etcd", async move || Etcd { url: url.clone(), namespace: OnceLock::new() }).main()
}
