//! A Redis server by configuration.

use std::sync::Arc;

use lockcore::{
    backend::{Error, ErrorKind, LockBackend, Result, async_trait},
    config::{BackendConfig, Connector},
};

use crate::{Address, RedisBackend, RedisConfig};

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
        &["redis", "valkey", "redis+unix", "valkey+unix"]
    }

    fn check(&self, config: &BackendConfig) -> Result<()> {
        read(config).map(drop)
    }

    async fn connect(&self, config: &BackendConfig) -> Result<Arc<dyn LockBackend>> {
        Ok(Arc::new(RedisBackend::connect(read(config)?).await?))
    }
}

fn read(config: &BackendConfig) -> Result<RedisConfig> {
    let url = &config.url;
    let mut options = config.options()?;
    let (address, db) = if url.scheme().ends_with("+unix") {
        if url.hosts().len() > 0 || url.path().is_empty() {
            return Err(misconfigured(
                "a socket is on this machine: three slashes and an absolute path, like redis+unix:///run/redis.sock",
            ));
        }
        let db = options.whole("db")?.unwrap_or(0);
        (Address::Unix(url.path().into()), u32::try_from(db).ok())
    } else {
        let mut hosts = url.hosts();
        let (Some((host, port)), None) = (hosts.next(), hosts.next()) else {
            return Err(misconfigured(
                "this version of the Redis backend speaks to a single server: one host, like redis://redis-a:6379/0",
            ));
        };
        let db = match url.path().trim_start_matches('/') {
            "" => Some(0),
            number => number.parse().ok(),
        };
        (Address::Tcp(host.to_owned(), port.unwrap_or(6379)), db)
    };
    let db = db.ok_or_else(|| {
        misconfigured("the path of a Redis address is the number of a database, like redis://redis-a:6379/0")
    })?;
    let credentials = config.credentials()?;
    let connect_timeout = options.duration("connect-timeout")?;
    let (recheck, poll) = (options.duration("recheck")?, options.duration("poll")?);
    let fence_margin = options.duration("fence-margin")?;
    options.finish()?;
    let read = RedisConfig::new("", 0).with(|c| {
        c.address = address;
        c.db = db;
        c.user = credentials.user().map(str::to_owned);
        c.password = credentials.expose_password().map(str::to_owned);
        c.connect_timeout = connect_timeout.unwrap_or(c.connect_timeout);
        c.recheck = recheck.unwrap_or(c.recheck);
        c.poll = poll.unwrap_or(c.poll);
        c.fence_margin = fence_margin.unwrap_or(c.fence_margin);
    });
    read.check()?;
    Ok(read)
}

fn misconfigured(message: &'static str) -> Error {
    Error::new(ErrorKind::Misconfigured, message)
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
