//! What the examples share: the store behind `--store URL`. And the guide, whose blocks are compiled and run as tests.
#![doc = include_str!("../../docs/guide.md")]

use std::{path::Path, sync::Arc, time::Duration};

use lockcore::{
    StoreUrl,
    backend::LockBackend,
    config::{BackendConfig, Memory, Registry},
    text::{parse_duration, show_duration},
};
use lockcore_sql::Sqlite;

pub mod toy_backend;

/// Lists the families of stores that the examples reach; what an application compiles in is its own choice.
pub fn registry() -> Registry {
    let registry = Registry::new().with(Sqlite).with(Memory::new());
    #[cfg(feature = "redis")]
    let registry = registry.with(lockcore_redis::Redis);
    #[cfg(feature = "zk")]
    let registry = registry.with(lockcore_zk::Zk);
    #[cfg(feature = "etcd")]
    let registry = registry.with(lockcore_etcd::Etcd);
    registry
}

/// Connects to the store that a URL names.
///
/// # Errors
/// What the URL or the store says.
pub async fn connect(url: &str) -> lockcore::Result<Arc<dyn LockBackend>> {
    registry().connect(&BackendConfig::new(StoreUrl::parse(url)?)).await
}

/// Reads the TTL of a demo. Shorter ones end while the machine does something else, longer ones outlast the patience of
/// who watches.
///
/// # Errors
/// It is no duration, or not from `least` to 30 s.
pub fn parse_ttl(text: &str, least: Duration) -> Result<Duration, String> {
    let ttl = parse_duration(text).map_err(|error| error.message().to_owned())?;
    if (least..=Duration::from_secs(30)).contains(&ttl) {
        Ok(ttl)
    } else {
        Err(format!("{} is not from {} to 30s", show_duration(ttl), show_duration(least)))
    }
}

/// Returns the URL of a SQLite file in a directory.
pub fn sqlite_in(directory: &Path) -> String {
    format!("sqlite://{}/locks.db", directory.display())
}
