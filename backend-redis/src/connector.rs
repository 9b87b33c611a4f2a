//! A Redis server by configuration.

use std::sync::Arc;

use lockcore::{
    backend::{Call, LockBackend, Result, async_trait},
    config::{BackendConfig, Connector, OptionValue, Options},
};

use crate::{
    Address, PasswordSource, RedisBackend, RedisConfig, RedlockBackend, RedlockConfig, WaitReplicas,
    config::misconfigured,
};

/// Takes every set-up by its address; `valkey` is another word for `redis`, and `rediss` speaks TLS.
///
/// # Shape
/// * `redis://[user[:password]@]host[:port][/db]`: one server
/// * `redis+unix:///path`: one server, by a socket file
/// * `redis+sentinel://[user[:password]@]sentinel[:port],…/master[/db]`: the master that Sentinels watch
/// * `redis+cluster://[user[:password]@]node[:port],…`: a Cluster
/// * `redlock://[user[:password]@]host[:port],host[:port],…[/db]` and `redlocks://`: several servers that decide together
///
/// Options, in the query or in `options`: `connect-timeout`, `recheck`, `poll`, `fence-margin`, `wait-timeout`
/// (durations), `wait-replicas` (`none`, a number or `majority`), `wait-fsync` (yes or no), `ca-file`, `cert-file`,
/// `key-file`, `sentinel-user`, `sentinel-password-file`, as in [`RedisConfig`]; for a socket `db` (a number); for Redlock
/// `restart-delay` (a duration), as in [`RedlockConfig`].
///
/// A password from a file or from a variable is read anew at every connect.
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

    async fn sweep(&self, config: &BackendConfig, call: &Call) -> Result<u64> {
        if !is_redlock(config) {
            let backend = RedisBackend::connect(read(config)?).await?;
            let swept = backend.sweep(call).await;
            backend.close().await;
            return swept;
        }
        // Each server has its own copy, and none of them alone is the store.
        let mut removed = 0;
        for server in read_redlock(config)?.servers {
            let backend = RedisBackend::connect(server).await?;
            let swept = backend.sweep(call).await;
            backend.close().await;
            removed += swept?;
        }
        Ok(removed)
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
    fn options_of_every_set_up_are_read() {
        let sentinel =
            "redis+sentinel://a,b,c/shop/2?wait-replicas=majority&wait-timeout=300ms&sentinel-user=u";
        let sentinel = read(&config(sentinel)).unwrap();
        assert!(matches!(&sentinel.address, Address::Sentinel { sentinels, master }
            if sentinels.len() == 3 && master == "shop"));
        assert_eq!((sentinel.db, sentinel.wait_replicas), (2, WaitReplicas::Majority));
        assert_eq!(sentinel.wait_timeout, Duration::from_millis(300));
        assert_eq!(sentinel.sentinel_user.as_deref(), Some("u"));

        let mut table = config("redis+cluster://locks@a,b:7000");
        table.options.insert("wait-replicas".into(), OptionValue::Whole(2));
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("password");
        std::fs::write(&file, "first\n").unwrap();
        table.password_file = Some(file.clone());
        let cluster = read(&table).unwrap();
        assert_eq!(cluster.wait_replicas, WaitReplicas::AtLeast(2));
        assert_eq!(cluster.current_password().unwrap().as_deref(), Some("first"));
        std::fs::write(&file, "second\n").unwrap();
        assert_eq!(cluster.current_password().unwrap().as_deref(), Some("second"), "it is read once");
        assert!(!format!("{cluster:?}").contains("first"), "{cluster:?}");

        let redlock = "redlock://locks:s3cret@a,b:1,c/3?restart-delay=30s&poll=50ms";
        let redlock = read_redlock(&config(redlock)).unwrap();
        assert_eq!(
            (redlock.restart_delay, redlock.poll),
            (Duration::from_secs(30), Duration::from_millis(50))
        );
        let last = &redlock.servers[2];
        assert_eq!((&last.address, last.db), (&Address::Tcp("c".into(), 6379), 3));
        assert_eq!(last.password.as_deref(), Some("s3cret"));
        assert!(!format!("{redlock:?}").contains("s3cret"));

        let tls = read(&config("rediss://a?ca-file=/etc/ca.pem"));
        assert_eq!(tls.is_ok(), cfg!(feature = "tls"), "{tls:?}");
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
            ("redis+sentinel://a,b", "the master that they watch has a name"),
            ("redis+cluster://a,b/3", "one database"),
            ("redis://a?wait-replicas=all", "majority"),
            ("redis://a?ca-file=/ca", "without TLS"),
            ("redlock://a,b", "odd number"),
            ("redlock://a,b,a", "one server twice"),
            ("redlock://a,b,c?wait-replicas=1", "wait for no replicas"),
            ("redlock://a,b,c?restart-delay=10ms", "a second or more"),
        ] {
            let refused = match StoreUrl::parse(url) {
                Ok(url) => registry.check(&BackendConfig::new(url)).unwrap_err(),
                Err(error) => error,
            };
            assert!(refused.to_string().contains(says), "{url}: {refused}");
        }
    }
}
