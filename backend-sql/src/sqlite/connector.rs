//! A SQLite file by configuration.

use std::sync::Arc;

use lockcore::{
    backend::{Call, Error, ErrorKind, LockBackend, Result, async_trait},
    config::{BackendConfig, Connector},
};

use super::{SqliteBackend, SqliteConfig};

/// Takes `sqlite:///absolute/path`.
///
/// Options: `busy` and `idle` (durations), `trust-file-system` (true or false), as in [`SqliteConfig`].
///
/// # Example
/// ```
/// use lockcore::{StoreUrl, config::{BackendConfig, Registry}};
/// use lockcore_sql::Sqlite;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockcore::Result<()> {
/// # let directory = tempfile::tempdir().unwrap();
/// # let url = format!("sqlite://{}/locks.db", directory.path().display());
/// let registry = Registry::new().with(Sqlite);
/// let store = registry.connect(&BackendConfig::new(StoreUrl::parse(&url)?)).await?;
/// assert_eq!(store.capabilities().backend, "sqlite");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Sqlite;

#[async_trait]
impl Connector for Sqlite {
    fn schemes(&self) -> &'static [&'static str] {
        &["sqlite"]
    }

    fn check(&self, config: &BackendConfig) -> Result<()> {
        read(config).map(drop)
    }

    async fn connect(&self, config: &BackendConfig) -> Result<Arc<dyn LockBackend>> {
        Ok(Arc::new(SqliteBackend::open(read(config)?).await?))
    }

    async fn sweep(&self, config: &BackendConfig, call: &Call) -> Result<u64> {
        let backend = SqliteBackend::open(read(config)?).await?;
        let swept = backend.sweep(call).await;
        backend.close().await;
        swept
    }
}

fn read(config: &BackendConfig) -> Result<SqliteConfig> {
    if config.url.hosts().next().is_some() {
        return Err(Error::new(
            ErrorKind::Misconfigured,
            "a SQLite file is on this machine: three slashes and an absolute path, like sqlite:///var/lib/shop/locks.db",
        ));
    }
    if config.credentials()?.user().is_some() {
        return Err(Error::new(ErrorKind::Misconfigured, "a SQLite file takes no user"));
    }
    let mut options = config.options()?;
    let (busy, idle) = (options.duration("busy")?, options.duration("idle")?);
    let trust = options.flag("trust-file-system")?;
    options.finish()?;
    Ok(SqliteConfig::new(config.url.path()).with(|c| {
        c.busy = busy.unwrap_or(c.busy);
        c.idle = idle.unwrap_or(c.idle);
        c.trust_file_system = trust.unwrap_or(c.trust_file_system);
    }))
}

#[cfg(test)]
mod tests {
    use lockcore::{StoreUrl, config::Registry};

    use super::*;

    #[test]
    fn what_is_no_file_of_this_machine_is_refused_by_name() {
        let registry = Registry::new().with(Sqlite);
        for (url, says) in [
            ("sqlite:///var/lib/locks.db?bussy=1s", "bussy"),
            ("sqlite:///var/lib/locks.db?busy=1", "1s"),
            ("sqlite://locks.db", "three slashes"),
        ] {
            let refused = match StoreUrl::parse(url) {
                Ok(url) => registry.check(&BackendConfig::new(url)).unwrap_err(),
                Err(error) => error,
            };
            assert!(refused.to_string().contains(says), "{url}: {refused}");
        }
        let fine =
            BackendConfig::new(StoreUrl::parse("sqlite:///var/lib/locks.db?idle=1d&busy=50ms").unwrap());
        registry.check(&fine).unwrap();
    }
}
