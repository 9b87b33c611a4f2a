//! A ZooKeeper server of the test's own under the suite: one server a run, a namespace of its own for each case.

mod common;

use std::{
    process::ExitCode,
    sync::{Arc, OnceLock},
    time::Duration,
};

use common::{Server, call};
use lockcore::{
    LockName,
    backend::{LockBackend, Owner, async_trait},
};
use lockcore_conformance::{Service, Suite};
use lockcore_zk::{ZkBackend, ZkConfig};
use tokio::sync::OnceCell;
use zookeeper_client::Client;

struct Zk {
    address: String,
    namespace: OnceLock<String>,
    admin: OnceCell<Client>,
}

impl Zk {
    fn new(address: String) -> Self {
        Self { address, namespace: OnceLock::new(), admin: OnceCell::new() }
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

    async fn admin(&self) -> &Client {
        let connect = async || Client::connect(&self.address).await.expect("the server answers");
        self.admin.get_or_init(connect).await
    }

    /// Places in order of arrival; fewer than 2^31 were made, so their sequence does not wrap.
    async fn places(&self, name: &LockName) -> Vec<String> {
        let (admin, queue) = (self.admin().await, self.queue(name));
        admin.sync("/").await.expect("the server answers");
        let mut places = admin.list_children(&queue).await.unwrap_or_default();
        places.sort_by_key(|place| place[32..].to_owned());
        places
    }
}

#[async_trait]
impl Service for Zk {
    async fn connect(&self) -> Arc<dyn LockBackend> {
        connect(self.address.clone()).await
    }

    async fn holder(&self, name: &LockName) -> Option<Owner> {
        let places = self.places(name).await;
        let (hex, mut bytes) = (&places.first()?[..32], [0; 16]);
        for (n, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(hex.get(2 * n..2 * n + 2)?, 16).ok()?;
        }
        Some(Owner::from_bytes(bytes))
    }

    async fn steal(&self, name: &LockName) {
        if let Some(first) = self.places(name).await.first() {
            let path = format!("{}/{first}", self.queue(name));
            self.admin().await.delete(&path, None).await.expect("the place stands");
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
        let said = common::says(&self.address, "srvr")?;
        let (version, _) = said.strip_prefix("Zookeeper version: ")?.split_once('-')?;
        Some(format!("ZooKeeper {version}"))
    }

    fn address(&self) -> Option<String> {
        Some(self.address.clone())
    }
}

async fn connect(address: String) -> Arc<dyn LockBackend> {
    let backend = ZkBackend::lazy(ZkConfig::new([address])).expect("a plain address");
    backend.high_water(&call()).await.expect("the server answers");
    Arc::new(backend)
}

fn main() -> ExitCode {
    // A client process of a case needs no server of its own.
    if let Some(code) = lockcore_conformance::child_main(connect) {
        return code;
    }
    let Some(server) = Server::start() else { return ExitCode::SUCCESS };
    let address = server.address.clone();
    Suite::new("zk-single", async move || Zk::new(address.clone())).main()
}
