//! Which servers decide together, and how long one that was started waits.

use std::time::Duration;

use lockcore::{StoreUrl, backend::Result};

use crate::config::{Address, RedisConfig, WaitReplicas, misconfigured};

/// Says which servers decide together.
///
/// # Example
/// ```
/// use lockcore_redis::RedlockConfig;
///
/// let config = RedlockConfig::new([("redis-a", 6379), ("redis-b", 6379), ("redis-c", 6379)]);
/// assert_eq!(config.servers.len(), 3);
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct RedlockConfig {
    /// The servers: an odd number, at least three, independent of each other, without replicas.
    pub servers: Vec<RedisConfig>,
    /// How long a server that was started grants nothing: it may have forgotten locks that are still held. TTLs are no
    /// longer than this then. Zero leaves it to whoever restarts servers to wait for the longest TTL, or to
    /// `appendfsync always`. Default zero.
    pub restart_delay: Duration,
    /// How long a waiter sleeps between two looks. Default 100 ms.
    pub poll: Duration,
    /// How long the fence of an idle lock is kept; see [`RedisConfig::fence_margin`]. Default 7 days.
    pub fence_margin: Duration,
}

impl RedlockConfig {
    /// Starts from hosts, ports and the defaults.
    pub fn new<H: Into<String>>(servers: impl IntoIterator<Item = (H, u16)>) -> Self {
        Self::of(servers.into_iter().map(|(host, port)| RedisConfig::new(host, port)).collect())
    }

    /// Starts from servers that differ in more than their address, and the defaults.
    pub fn of(servers: Vec<RedisConfig>) -> Self {
        let defaults = RedisConfig::new("", 0);
        Self {
            servers,
            restart_delay: Duration::ZERO,
            poll: defaults.poll,
            fence_margin: defaults.fence_margin,
        }
    }

    /// Reads `redlock://[user[:password]@]host[:port],host[:port],…[/db]`; `redlocks://` speaks TLS.
    ///
    /// # Errors
    /// `Misconfigured`: not such an address. It is not repeated, because it may hold a password.
    pub fn from_url(url: &str) -> Result<Self> {
        let url = StoreUrl::parse(url).map_err(|error| {
            misconfigured(format!("not the address of several servers: {}", error.message()))
        })?;
        if let Some((key, _)) = url.queries().next() {
            return Err(misconfigured(format!("an address of Redlock has no {key} here; set the field")));
        }
        let mut config = Self::of_url(&url)?;
        for server in &mut config.servers {
            server.user = url.user().map(str::to_owned);
            server.password = url.expose_password().map(str::to_owned);
        }
        Ok(config)
    }

    pub(crate) fn of_url(url: &StoreUrl) -> Result<Self> {
        let tls = match url.scheme() {
            "redlock" => false,
            "redlocks" => true,
            _ => return Err(misconfigured("several servers look like redlock://redis-a,redis-b,redis-c")),
        };
        let db = match url.path().trim_start_matches('/') {
            "" => 0,
            number => number.parse().map_err(|_| {
                misconfigured("the path of redlock:// is the number of a database, on all servers the same")
            })?,
        };
        let server = |(host, port): (&str, Option<u16>)| {
            RedisConfig::new(host, port.unwrap_or(6379)).with(|c| (c.db, c.tls) = (db, tls))
        };
        Ok(Self::of(url.hosts().map(server).collect()))
    }

    /// Sets fields in one expression.
    #[must_use]
    pub fn with(mut self, set: impl FnOnce(&mut Self)) -> Self {
        set(&mut self);
        self
    }

    pub(crate) fn check(&self) -> Result<()> {
        let count = self.servers.len();
        if count < 3 || count.is_multiple_of(2) {
            return Err(misconfigured(format!(
                "Redlock needs an odd number of servers, at least three, not {count}: an even one stands no more losses"
            )));
        }
        for (n, server) in self.servers.iter().enumerate() {
            if !matches!(server.address, Address::Tcp(..) | Address::Unix(_)) {
                return Err(misconfigured(
                    "the servers of Redlock are single servers, each by its own address",
                ));
            }
            if server.wait_replicas != WaitReplicas::None || server.wait_fsync {
                return Err(misconfigured("the servers of Redlock wait for no replicas; they have none"));
            }
            if self.servers[..n].iter().any(|other| other.address == server.address) {
                return Err(misconfigured(format!("Redlock lists one server twice: {:?}", server.address)));
            }
            server.clone().with(|c| c.fence_margin = self.fence_margin).check()?;
        }
        if self.poll.is_zero() {
            return Err(misconfigured("poll is zero; nothing would ever come in time"));
        }
        let shortest = Duration::from_secs(1);
        if !self.restart_delay.is_zero() && self.restart_delay < shortest {
            return Err(misconfigured("restart_delay is a second or more, or zero: servers count seconds"));
        }
        Ok(())
    }
}
