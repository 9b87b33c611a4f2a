//! How to reach the server, and how patiently.

use std::{fmt, path::PathBuf, time::Duration};

use lockcore::backend::{Error, ErrorKind, Result};
use redis::{ConnectionAddr, IntoConnectionInfo};

/// Where the server listens.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Address {
    /// Host name or IP address, and port.
    Tcp(String, u16),
    /// A socket file.
    Unix(PathBuf),
}

/// Says where the server is and how patiently it is asked. `Debug` shows no password.
///
/// # Example
/// ```
/// use std::time::Duration;
/// use lockcore_redis::RedisConfig;
///
/// let config = RedisConfig::new("redis-a", 6379).with(|c| {
///     c.user = Some("locks".into());
///     c.password = Some("s3cret".into());
///     c.connect_timeout = Duration::from_secs(2);
/// });
/// assert!(!format!("{config:?}").contains("s3cret"));
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct RedisConfig {
    /// Where the server listens. No default.
    pub address: Address,
    /// The number of the database. Default 0.
    pub db: u32,
    /// The user of the access list. Default none, which is the user `default`.
    pub user: Option<String>,
    /// The password. Default none.
    pub password: Option<String>,
    /// How long a connection may take to come up, name resolution and greeting included. A call waits for it no
    /// longer than for an answer. Default 2 s.
    pub connect_timeout: Duration,
    /// How long a waiter trusts in being told of a release before it looks by itself; it also looks when the holder's
    /// lease ends. Default 5 s.
    pub recheck: Duration,
    /// How long a waiter sleeps between two looks while nobody can tell it of a release. Default 100 ms.
    pub poll: Duration,
    /// How long the fence of an idle lock is kept. Later the server's time alone keeps fences growing, so this must be
    /// above every step back that its clock may ever make. At least a day; default 7 days.
    pub fence_margin: Duration,
}

impl RedisConfig {
    /// Starts from a host, a port and the defaults.
    pub fn new(host: impl Into<String>, port: u16) -> Self {
        Self::at(Address::Tcp(host.into(), port))
    }

    /// Starts from a socket file and the defaults.
    pub fn unix(path: impl Into<PathBuf>) -> Self {
        Self::at(Address::Unix(path.into()))
    }

    fn at(address: Address) -> Self {
        Self {
            address,
            db: 0,
            user: None,
            password: None,
            connect_timeout: Duration::from_secs(2),
            recheck: Duration::from_secs(5),
            poll: Duration::from_millis(100),
            fence_margin: Duration::from_secs(7 * 86_400),
        }
    }

    /// Reads `redis://[user[:password]@]host[:port][/db]` or `redis+unix:///path[?db=0&user=…&pass=…]`.
    ///
    /// # Errors
    /// `Misconfigured`: not such an address, or `rediss://`, which this version does not speak. The address is not
    /// repeated, because it may hold a password.
    pub fn from_url(url: &str) -> Result<Self> {
        if url.starts_with("rediss:") || url.starts_with("valkeys:") {
            return Err(misconfigured("this version of the Redis backend speaks no TLS; use redis://"));
        }
        let info = url.into_connection_info().map_err(|_| {
            misconfigured(
                "not the address of a Redis server; one looks like redis://user:password@host:6379/0 or \
                 redis+unix:///run/redis.sock",
            )
        })?;
        let address = match info.addr() {
            ConnectionAddr::Tcp(host, port) => Address::Tcp(host.clone(), *port),
            ConnectionAddr::Unix(path) => Address::Unix(path.clone()),
            _ => return Err(misconfigured("this version of the Redis backend speaks no TLS; use redis://")),
        };
        let settings = info.redis_settings();
        let db = u32::try_from(settings.db())
            .map_err(|_| misconfigured("the number of a Redis database is not negative"))?;
        Ok(Self {
            db,
            user: settings.username().map(str::to_owned),
            password: settings.password().map(str::to_owned),
            ..Self::at(address)
        })
    }

    /// Sets fields in one expression.
    #[must_use]
    pub fn with(mut self, set: impl FnOnce(&mut Self)) -> Self {
        set(&mut self);
        self
    }

    /// Checks what needs no server.
    pub(crate) fn check(&self) -> Result<()> {
        if self.user.is_some() && self.password.is_none() {
            return Err(misconfigured("a user of a Redis server needs a password"));
        }
        for (what, duration) in
            [("connect_timeout", self.connect_timeout), ("recheck", self.recheck), ("poll", self.poll)]
        {
            if duration.is_zero() {
                return Err(misconfigured(format!("{what} is zero; nothing would ever come in time")));
            }
        }
        if !(Duration::from_secs(86_400)..=Duration::from_secs(3650 * 86_400)).contains(&self.fence_margin) {
            return Err(misconfigured("fence_margin is from one day to ten years"));
        }
        Ok(())
    }
}

impl fmt::Debug for RedisConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisConfig")
            .field("address", &self.address)
            .field("db", &self.db)
            .field("user", &self.user)
            .field("password", &self.password.as_ref().map(|_| "***"))
            .field("connect_timeout", &self.connect_timeout)
            .field("recheck", &self.recheck)
            .field("poll", &self.poll)
            .field("fence_margin", &self.fence_margin)
            .finish()
    }
}

fn misconfigured(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Misconfigured, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_and_never_show_their_password() {
        let config = RedisConfig::from_url("redis://locks:s3cret@redis-a:6380/3").unwrap();
        assert_eq!(config.address, Address::Tcp("redis-a".into(), 6380));
        assert_eq!((config.db, config.user.as_deref()), (3, Some("locks")));
        assert_eq!(config.password.as_deref(), Some("s3cret"));
        assert!(!format!("{config:?}").contains("s3cret"), "{config:?}");
        let socket = RedisConfig::from_url("redis+unix:///run/redis.sock").unwrap();
        assert_eq!(socket.address, Address::Unix("/run/redis.sock".into()));
        for bad in [
            "rediss://:s3cret@h",
            "http://:s3cret@h",
            "redis://:s3cret@h/x",
            "s3cret",
            "redis://:s3cret@h/-1",
        ] {
            let error = RedisConfig::from_url(bad).expect_err(bad);
            assert_eq!(error.kind(), ErrorKind::Misconfigured, "{bad}");
            assert!(!format!("{error:?}").contains("s3cret"), "{error:?}");
        }
    }

    #[test]
    fn numbers_that_cannot_work_are_refused() {
        let fine = RedisConfig::new("h", 1);
        fine.check().unwrap();
        assert!(fine.clone().with(|c| c.poll = Duration::ZERO).check().is_err());
        assert!(fine.clone().with(|c| c.fence_margin = Duration::from_secs(60)).check().is_err());
        assert!(fine.with(|c| c.user = Some("u".into())).check().is_err());
    }
}
