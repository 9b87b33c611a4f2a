//! A Redis server by configuration.

use std::sync::Arc;

use lockcore::{
    backend::{LockBackend, Result, async_trait},
    config::{BackendConfig, Connector, OptionValue, Options},
};

use crate::config::misconfigured;
use crate::{
    Address, PasswordSource, RedisBackend, RedisConfig, RedlockBackend, RedlockConfig, WaitReplicas,
};

/// Takes `redis://[user[:password]@]host[:port][/db]` and `redis+unix:///path`, and the same with `valkey`.
///
/// Options: `connect-timeout`, `recheck`, `poll` and `fence-margin` (durations), as in [`RedisConfig`], and for a socket
/// `db` (a number).
///
/// # Example
/// ```
/// use lockcore::{StoreUrl, config::{BackendConfig, Registry}};
/// use lockcore_redis::Redis;
///
/// let registry = Registry::new().with(Redis);
/// let config = BackendConfig::new(StoreUrl::parse("redis://redis-a:6379/0?connect-timeout=1s")?);
/// registry.check(&config)?;
/// # Ok::<(), lockcore::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Redis;

#[async_trait]
impl Connector for Redis {
    fn schemes(&self) -> &'static [&'static str] {
        &[
            "redis",
            "rediss",
            "redis+unix",
            "redis+sentinel",
            "rediss+sentinel",
            "redis+cluster",
            "rediss+cluster",
            "valkey",
            "valkeys",
            "valkey+unix",
            "valkey+sentinel",
            "valkeys+sentinel",
            "valkey+cluster",
            "valkeys+cluster",
            "redlock",
            "redlocks",
        ]
    }

    fn check(&self, config: &BackendConfig) -> Result<()> {
        if is_redlock(config) { read_redlock(config).map(drop) } else { read(config).map(drop) }
    }

    async fn connect(&self, config: &BackendConfig) -> Result<Arc<dyn LockBackend>> {
        if is_redlock(config) {
            return Ok(Arc::new(RedlockBackend::connect(read_redlock(config)?).await?));
        }
        Ok(Arc::new(RedisBackend::connect(read(config)?).await?))
    }
}

fn is_redlock(config: &BackendConfig) -> bool {
    config.url.scheme().starts_with("redlock")
}

fn read_redlock(config: &BackendConfig) -> Result<RedlockConfig> {
    let mut read = RedlockConfig::of_url(&config.url)?;
    let mut options = config.options()?;
    let restart_delay = options.duration("restart-delay")?;
    // What all servers share is read once.
    let mut shared = RedisConfig::new("", 0);
    share(config, &mut options, &mut shared)?;
    options.finish()?;
    read.restart_delay = restart_delay.unwrap_or(read.restart_delay);
    (read.poll, read.fence_margin) = (shared.poll, shared.fence_margin);
    for server in &mut read.servers {
        *server = shared.clone().with(|c| {
            c.address = server.address.clone();
            (c.db, c.tls) = (server.db, server.tls);
        });
    }
    read.check()?;
    Ok(read)
}

fn read(config: &BackendConfig) -> Result<RedisConfig> {
    let mut read = RedisConfig::of_url(&config.url)?;
    let mut options = config.options()?;
    if let Some(db) = options.whole("db")? {
        if !matches!(read.address, Address::Unix(_)) {
            return Err(misconfigured(
                "the number of the database stands in the path, like redis://redis-a:6379/0",
            ));
        }
        read.db = u32::try_from(db).map_err(|_| misconfigured("there is no database with that number"))?;
    }
    share(config, &mut options, &mut read)?;
    options.finish()?;
    read.check()?;
    Ok(read)
}

/// Reads what every set-up has.
fn share(config: &BackendConfig, options: &mut Options<'_>, read: &mut RedisConfig) -> Result<()> {
    let credentials = config.credentials()?;
    read.user = credentials.user().map(str::to_owned);
    read.password = credentials.expose_password().map(str::to_owned);
    // From a file or a variable: read anew at every connect, because it may change.
    if config.password_file.is_some() || config.password_env.is_some() {
        let config = config.clone();
        read.password_source = Some(PasswordSource::new(move || {
            let credentials = config.credentials()?;
            Ok(credentials.expose_password().unwrap_or_default().to_owned())
        }));
    }
    read.sentinel_user = options.text("sentinel-user")?;
    read.sentinel_password = options.text("sentinel-password-file")?.map(PasswordSource::file);
    read.ca_file = options.text("ca-file")?.map(Into::into);
    read.cert_file = options.text("cert-file")?.map(Into::into);
    read.key_file = options.text("key-file")?.map(Into::into);
    let replicas = match config.options.get("wait-replicas") {
        Some(OptionValue::Whole(_)) => options.whole("wait-replicas")?.map(|number| number.to_string()),
        _ => options.text("wait-replicas")?,
    };
    if let Some(replicas) = replicas {
        read.wait_replicas = WaitReplicas::read(&replicas)?;
    }
    read.wait_fsync = options.flag("wait-fsync")?.unwrap_or(read.wait_fsync);
    for (key, field) in [
        ("wait-timeout", &mut read.wait_timeout),
        ("connect-timeout", &mut read.connect_timeout),
        ("recheck", &mut read.recheck),
        ("poll", &mut read.poll),
        ("fence-margin", &mut read.fence_margin),
    ] {
        if let Some(duration) = options.duration(key)? {
            *field = duration;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use lockcore::{StoreUrl, config::Registry};

    use super::*;

    fn config(url: &str) -> BackendConfig {
        BackendConfig::new(StoreUrl::parse(url).unwrap())
    }

    #[test]
    fn addresses_become_configurations() {
        let tcp = read(&config("redis://locks:s3cret@redis-a/3?recheck=2s")).unwrap();
        assert_eq!(tcp.address, Address::Tcp("redis-a".into(), 6379));
        assert_eq!((tcp.db, tcp.recheck), (3, Duration::from_secs(2)));
        assert_eq!((tcp.user.as_deref(), tcp.password.as_deref()), (Some("locks"), Some("s3cret")));
        let socket = read(&config("valkey+unix:///run/v.sock?db=1")).unwrap();
        assert_eq!((socket.address, socket.db), (Address::Unix("/run/v.sock".into()), 1));
    }

    #[test]
    fn what_this_version_cannot_reach_is_refused_by_name() {
        let registry = Registry::new().with(Redis);
        for (url, says) in [
            ("redis://a,b", "single server"),
            ("redis://a/locks", "number of a database"),
            ("redis://a?pol=1s", "pol"),
            ("redis://a?poll=0s", "poll"),
            ("redis://locks@a", "needs a password"),
            ("redis+unix://a/run.sock", "three slashes"),
        ] {
            let refused = match StoreUrl::parse(url) {
                Ok(url) => registry.check(&BackendConfig::new(url)).unwrap_err(),
                Err(error) => error,
            };
            assert!(refused.to_string().contains(says), "{url}: {refused}");
        }
    }
}
