//! How to reach the servers, and how patiently.

use std::{borrow::Cow, fmt, path::PathBuf, sync::Arc, time::Duration};

use lockcore::{
    StoreUrl,
    backend::{Error, ErrorKind, Result},
};

/// Which servers decide about a lock, and where they listen.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Address {
    /// One server: host name or IP address, and port.
    Tcp(String, u16),
    /// One server: a socket file.
    Unix(PathBuf),
    /// The master that Sentinels watch under a name. They are asked in turn, at every connect.
    Sentinel {
        /// Hosts and ports of the Sentinels.
        sentinels: Vec<(String, u16)>,
        /// The name of the master.
        master: String,
    },
    /// The nodes of a Cluster; some of them suffice, the others are learnt.
    Cluster(Vec<(String, u16)>),
}

/// How many replicas must have a grant or a renewal before it counts.
///
/// A replica that takes over without having it forgets the lock. Only `AtLeast` the number of *all* replicas is safe
/// whichever of them takes over; fewer acknowledgements make it less likely that the one without is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum WaitReplicas {
    /// The master's word counts alone.
    #[default]
    None,
    /// So many replicas, at least one.
    AtLeast(u32),
    /// A majority of the master and its replicas, the master included; at least one replica. Counted are the most
    /// replicas that this process has seen, so that one which is away still counts.
    Majority,
}

/// Reads the password anew at every connect, for passwords that change while a process runs.
#[derive(Clone)]
pub struct PasswordSource(Arc<dyn Fn() -> Result<String> + Send + Sync>);

impl PasswordSource {
    /// Wraps what reads it. It must not block for long.
    pub fn new(read: impl Fn() -> Result<String> + Send + Sync + 'static) -> Self {
        Self(Arc::new(read))
    }

    /// Reads a file, without the newline behind the password.
    pub fn file(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        Self::new(move || {
            let text = std::fs::read_to_string(&path).map_err(|error| {
                misconfigured(format!("the password file {} cannot be read: {error}", path.display()))
            })?;
            Ok(text.trim_end_matches(['\n', '\r']).to_owned())
        })
    }
}

impl fmt::Debug for PasswordSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PasswordSource(***)")
    }
}

/// Says where the servers are and how patiently they are asked. `Debug` shows no password.
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
    /// Which servers, and where. No default.
    pub address: Address,
    /// The number of the database. Default 0; a Cluster has no other.
    pub db: u32,
    /// The user of the access list. Default none, which is the user `default`.
    pub user: Option<String>,
    /// The password. Default none.
    pub password: Option<String>,
    /// Reads the password at every connect, in place of `password`. Default none.
    pub password_source: Option<PasswordSource>,
    /// The user that the Sentinels want. Default none.
    pub sentinel_user: Option<String>,
    /// The password that the Sentinels want. Default none: that of the server is not shown to them.
    pub sentinel_password: Option<PasswordSource>,
    /// Speaks TLS with the servers, and with Sentinels. Needs the feature `tls`. Default no.
    pub tls: bool,
    /// The certificates of the authorities that the servers are believed by, in PEM. Default the system's.
    pub ca_file: Option<PathBuf>,
    /// The client's own certificate, in PEM, for servers that want one (`tls-auth-clients yes`). Default none.
    pub cert_file: Option<PathBuf>,
    /// The key of `cert_file`, in PEM. Default none.
    pub key_file: Option<PathBuf>,
    /// How many replicas must have a grant or a renewal before it counts. Default none.
    pub wait_replicas: WaitReplicas,
    /// How long replicas may take; never more than half of an exchange. Default 500 ms.
    pub wait_timeout: Duration,
    /// Wants grants and renewals on the disk of the master, and of the replicas that are waited for. Needs Redis 7.2 and
    /// `appendonly yes`. Default no.
    pub wait_fsync: bool,
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

    /// Starts from Sentinels, the name of a master and the defaults.
    pub fn sentinel<H: Into<String>>(
        sentinels: impl IntoIterator<Item = (H, u16)>,
        master: impl Into<String>,
    ) -> Self {
        let sentinels = sentinels.into_iter().map(|(host, port)| (host.into(), port)).collect();
        Self::at(Address::Sentinel { sentinels, master: master.into() })
    }

    /// Starts from some nodes of a Cluster and the defaults.
    pub fn cluster<H: Into<String>>(nodes: impl IntoIterator<Item = (H, u16)>) -> Self {
        Self::at(Address::Cluster(nodes.into_iter().map(|(host, port)| (host.into(), port)).collect()))
    }

    pub(crate) fn at(address: Address) -> Self {
        Self {
            address,
            db: 0,
            user: None,
            password: None,
            password_source: None,
            sentinel_user: None,
            sentinel_password: None,
            tls: false,
            ca_file: None,
            cert_file: None,
            key_file: None,
            wait_replicas: WaitReplicas::None,
            wait_timeout: Duration::from_millis(500),
            wait_fsync: false,
            connect_timeout: Duration::from_secs(2),
            recheck: Duration::from_secs(5),
            poll: Duration::from_millis(100),
            fence_margin: Duration::from_secs(7 * 86_400),
        }
    }

    /// Reads an address; what it does not say has its default.
    ///
    /// # Shape
    /// * `redis://[user[:password]@]host[:port][/db]`
    /// * `redis+unix:///path[?db=0&user=…&pass=…]`
    /// * `redis+sentinel://[user[:password]@]sentinel[:port][,sentinel…]/master[/db]`
    /// * `redis+cluster://[user[:password]@]node[:port][,node…]`
    ///
    /// The same with `rediss` speaks TLS, and `valkey` is another word for `redis`. All take
    /// `?wait-replicas=none`, a number or `majority`.
    ///
    /// # Errors
    /// `Misconfigured`: not such an address. It is not repeated, because it may hold a password.
    pub fn from_url(url: &str) -> Result<Self> {
        let url = StoreUrl::parse(url).map_err(|error| {
            misconfigured(format!("not the address of a Redis server: {}", error.message()))
        })?;
        let mut config = Self::of_url(&url)?;
        config.user = url.user().map(str::to_owned);
        config.password = url.expose_password().map(str::to_owned);
        for (key, value) in url.queries() {
            match key {
                "db" => config.db = number_of_db(value)?,
                "user" => config.user = Some(value.to_owned()),
                "pass" => config.password = Some(value.to_owned()),
                "wait-replicas" => config.wait_replicas = WaitReplicas::read(value)?,
                _ => {
                    return Err(misconfigured(format!(
                        "an address of Redis takes db, user, pass and wait-replicas here, not {key}"
                    )));
                }
            }
        }
        Ok(config)
    }

    /// Reads scheme, hosts and path.
    pub(crate) fn of_url(url: &StoreUrl) -> Result<Self> {
        let (family, kind) = url.scheme().split_once('+').unwrap_or((url.scheme(), ""));
        let tls = match family {
            "redis" | "valkey" => false,
            "rediss" | "valkeys" => true,
            _ => {
                return Err(misconfigured(
                    "not the address of a Redis server; one looks like redis://host:6379/0",
                ));
            }
        };
        let hosts = |port: u16| -> Vec<(String, u16)> {
            url.hosts().map(|(host, given)| (host.to_owned(), given.unwrap_or(port))).collect()
        };
        let path = url.path().trim_start_matches('/');
        let mut config = match kind {
            "" => {
                let mut hosts = hosts(6379).into_iter();
                let (Some((host, port)), None) = (hosts.next(), hosts.next()) else {
                    return Err(misconfigured(
                        "redis:// is for a single server: one host, like redis://redis-a:6379/0; several are a matter of \
                         redis+sentinel://, redis+cluster:// or redlock://",
                    ));
                };
                let db = if path.is_empty() { 0 } else { number_of_db(path)? };
                Self::new(host, port).with(|c| c.db = db)
            }
            "unix" if !tls => {
                if url.hosts().len() > 0 || path.is_empty() {
                    return Err(misconfigured(
                        "a socket is on this machine: three slashes and an absolute path, like \
                         redis+unix:///run/redis.sock",
                    ));
                }
                Self::unix(url.path())
            }
            "sentinel" => {
                let (master, db) = path.split_once('/').unwrap_or((path, "0"));
                let db = number_of_db(db)?;
                Self::sentinel(hosts(26379), master).with(|c| c.db = db)
            }
            "cluster" => {
                if !path.is_empty() && path != "0" {
                    return Err(misconfigured("a Cluster has one database: redis+cluster://node-1,node-2"));
                }
                Self::cluster(hosts(6379))
            }
            _ => {
                return Err(misconfigured(
                    "not the address of a Redis server; one looks like redis://host:6379/0",
                ));
            }
        };
        config.tls = tls;
        Ok(config)
    }

    /// Sets fields in one expression.
    #[must_use]
    pub fn with(mut self, set: impl FnOnce(&mut Self)) -> Self {
        set(&mut self);
        self
    }

    /// Reads the password, from wherever it comes.
    pub(crate) fn current_password(&self) -> Result<Option<String>> {
        match &self.password_source {
            Some(source) => (source.0)().map(Some),
            None => Ok(self.password.clone()),
        }
    }

    pub(crate) fn current_sentinel_password(&self) -> Result<Option<String>> {
        self.sentinel_password.as_ref().map(|source| (source.0)()).transpose()
    }

    /// Checks what needs no server.
    pub(crate) fn check(&self) -> Result<()> {
        if self.user.is_some() && self.password.is_none() && self.password_source.is_none() {
            return Err(misconfigured("a user of a Redis server needs a password"));
        }
        match &self.address {
            Address::Tcp(..) => {}
            Address::Unix(_) if self.tls => return Err(misconfigured("a socket file speaks no TLS")),
            Address::Unix(_) => {}
            Address::Sentinel { sentinels, master } => {
                if sentinels.is_empty() || master.is_empty() {
                    return Err(misconfigured(
                        "Sentinels have hosts and the master that they watch has a name: \
                         redis+sentinel://sentinel-1,sentinel-2,sentinel-3/mymaster",
                    ));
                }
            }
            Address::Cluster(nodes) => {
                if nodes.is_empty() {
                    return Err(misconfigured("a Cluster has nodes: redis+cluster://node-1,node-2"));
                }
                if self.db != 0 {
                    return Err(misconfigured("a Cluster has no database but 0"));
                }
            }
        }
        if cfg!(not(feature = "tls")) && self.tls {
            return Err(misconfigured("TLS is not compiled in; build lockcore-redis with the feature `tls`"));
        }
        if !self.tls && (self.ca_file.is_some() || self.cert_file.is_some() || self.key_file.is_some()) {
            return Err(misconfigured("certificates without TLS; write rediss:// or leave them out"));
        }
        if self.cert_file.is_some() != self.key_file.is_some() {
            return Err(misconfigured("a certificate of the client and its key go together"));
        }
        if self.wait_replicas == WaitReplicas::AtLeast(0) {
            return Err(misconfigured("waiting for no replica is wait_replicas `none`"));
        }
        for (what, duration) in [
            ("connect_timeout", self.connect_timeout),
            ("recheck", self.recheck),
            ("poll", self.poll),
            ("wait_timeout", self.wait_timeout),
        ] {
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
            .field("password_source", &self.password_source)
            .field("sentinel_user", &self.sentinel_user)
            .field("sentinel_password", &self.sentinel_password)
            .field("tls", &self.tls)
            .field("ca_file", &self.ca_file)
            .field("cert_file", &self.cert_file)
            .field("key_file", &self.key_file)
            .field("wait_replicas", &self.wait_replicas)
            .field("wait_timeout", &self.wait_timeout)
            .field("wait_fsync", &self.wait_fsync)
            .field("connect_timeout", &self.connect_timeout)
            .field("recheck", &self.recheck)
            .field("poll", &self.poll)
            .field("fence_margin", &self.fence_margin)
            .finish()
    }
}

impl WaitReplicas {
    /// Reads `none`, `majority` or a number.
    pub(crate) fn read(text: &str) -> Result<Self> {
        match text {
            "none" | "0" => Ok(Self::None),
            "majority" => Ok(Self::Majority),
            number => number
                .parse()
                .map(Self::AtLeast)
                .map_err(|_| misconfigured("wait-replicas is `none`, `majority` or a number of replicas")),
        }
    }
}

fn number_of_db(text: &str) -> Result<u32> {
    text.parse().map_err(|_| {
        misconfigured("the path of a Redis address is the number of a database, like redis://redis-a:6379/0")
    })
}

pub(crate) fn misconfigured(message: impl Into<Cow<'static, str>>) -> Error {
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
        let sentinel =
            RedisConfig::from_url("rediss+sentinel://a,b:1/shop/2?wait-replicas=majority").unwrap();
        let sentinels = vec![("a".to_owned(), 26379), ("b".to_owned(), 1)];
        assert_eq!(sentinel.address, Address::Sentinel { sentinels, master: "shop".into() });
        assert_eq!((sentinel.db, sentinel.tls, sentinel.wait_replicas), (2, true, WaitReplicas::Majority));
        let cluster = RedisConfig::from_url("valkey+cluster://a,[::1]:7000?wait-replicas=2").unwrap();
        assert_eq!(cluster.address, Address::Cluster(vec![("a".into(), 6379), ("::1".into(), 7000)]));
        assert_eq!(cluster.wait_replicas, WaitReplicas::AtLeast(2));
        for bad in [
            "redis://:s3cret@h,i",
            "redis+cluster://:s3cret@h/1",
            "redis://:s3cret@h?wait-replicas=all",
            "redis://:s3cret@h?protocol=3",
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
        assert!(fine.clone().with(|c| c.wait_replicas = WaitReplicas::AtLeast(0)).check().is_err());
        assert!(fine.clone().with(|c| c.ca_file = Some("/ca".into())).check().is_err());
        assert!(RedisConfig::sentinel([("s", 1)], "").check().is_err());
        assert!(RedisConfig::cluster([("n", 1)]).with(|c| c.db = 1).check().is_err());
        assert!(fine.with(|c| c.user = Some("u".into())).check().is_err());
    }
}
