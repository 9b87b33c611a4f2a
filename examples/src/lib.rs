//! What the examples share: the store behind `--store URL`. And the guide, whose blocks are compiled and run as tests.
#![doc = include_str!("../../docs/guide.md")]

use std::{path::Path, sync::Arc};

use lockcore::{
    StoreUrl,
    backend::LockBackend,
    config::{BackendConfig, Memory, Registry},
};
use lockcore_sql::Sqlite;

pub mod toy_backend;

/// Connects to the store that a URL names; what an application compiles in is its own choice.
///
/// # Errors
/// What the URL or the store says.
pub async fn connect(url: &str) -> lockcore::Result<Arc<dyn LockBackend>> {
    let registry = Registry::new().with(Sqlite).with(Memory::new());
    #[cfg(feature = "redis")]
    let registry = registry.with(lockcore_redis::Redis);
    #[cfg(feature = "zk")]
    let registry = registry.with(lockcore_zk::Zk);
    #[cfg(feature = "etcd")]
    let registry = registry.with(lockcore_etcd::Etcd);
    registry.connect(&BackendConfig::new(StoreUrl::parse(url)?)).await
}

/// Returns the URL of a SQLite file in a directory.
pub fn sqlite_in(directory: &Path) -> String {
    format!("sqlite://{}/locks.db", directory.display())
}
