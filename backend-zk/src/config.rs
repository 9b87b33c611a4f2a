//! How to reach the ensemble.

use std::{fmt, path::PathBuf, time::Duration};

use lockcore::backend::{Error, ErrorKind, Result};

/// Files for servers that speak TLS; read when a session is opened, so what replaces them counts from the next one on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TlsFiles {
    /// Certificates of the authorities that are trusted, PEM. No default: the system's are not asked.
    pub ca_file: Option<PathBuf>,
    /// The client's certificate, PEM. Default none.
    pub cert_file: Option<PathBuf>,
    /// The key of the client's certificate, PEM. Default none.
    pub key_file: Option<PathBuf>,
}

/// Says where the servers are and below which node the locks live. `Debug` shows no password.
///
/// # Example
/// ```
/// use lockcore_zk::ZkConfig;
///
/// let config = ZkConfig::parse("zk-a:2181,zk-b,[::1]:2182/shop")?;
/// assert_eq!(config.servers, ["zk-a:2181", "zk-b:2181", "[::1]:2182"]);
/// assert_eq!(config.root, "/shop");
/// # Ok::<(), lockcore::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct ZkConfig {
    /// Client addresses of the servers, `host:port`. No default.
    pub servers: Vec<String>,
    /// The node below which everything is kept, as `/shop/locks`; made if it is missing. Default: the root, empty.
    pub root: String,
    /// All servers speak TLS at these addresses; needs the feature `tls`. Default no.
    pub secure: bool,
    /// Files for TLS.
    pub tls: TlsFiles,
    /// The user of the scheme `digest`. With one, every node that is made here is open to this user alone. Default none: open
    /// to everybody.
    pub user: Option<String>,
    /// The password. Default none.
    pub password: Option<String>,
    /// How long a new session may take to come up. Default 2 s.
    pub connect_timeout: Duration,
    /// How long a session without a lock stays open. Default 60 s.
    pub idle_timeout: Duration,
}

impl ZkConfig {
    /// Starts from addresses and the defaults; the port is 2181 where none is said.
    pub fn new<S: Into<String>>(servers: impl IntoIterator<Item = S>) -> Self {
        Self {
            servers: servers.into_iter().map(|server| with_port(server.into())).collect(),
            root: String::new(),
            secure: false,
            tls: TlsFiles::default(),
            user: None,
            password: None,
            connect_timeout: Duration::from_secs(2),
            idle_timeout: Duration::from_secs(60),
        }
    }

    /// Reads a connection string as other clients of ZooKeeper write it: `host:port,host:port/root`.
    ///
    /// # Errors
    /// `Misconfigured`: an address or the root cannot be used.
    pub fn parse(text: &str) -> Result<Self> {
        let (servers, root) = match text.find('/') {
            Some(at) => text.split_at(at),
            None => (text, ""),
        };
        let config =
            Self::new(servers.split(',').map(str::trim)).with(|c| c.root = root.trim_end_matches('/').into());
        config.check()?;
        Ok(config)
    }

    /// Sets fields in one expression.
    #[must_use]
    pub fn with(mut self, set: impl FnOnce(&mut Self)) -> Self {
        set(&mut self);
        self
    }

    /// Checks what needs no server.
    pub(crate) fn check(&self) -> Result<()> {
        let bad = |message: String| Err(Error::new(ErrorKind::Misconfigured, message));
        if self.servers.is_empty() {
            return bad("a ZooKeeper ensemble needs at least one server".into());
        }
        for server in &self.servers {
            let port = server.rsplit_once(':').and_then(|(host, port)| {
                let plain = !host.is_empty() && !host.contains(['/', ',', '@', ' ']);
                port.parse::<u16>().ok().filter(|port| *port > 0 && plain)
            });
            if port.is_none() {
                return bad(format!("{server:?} is not the address of a server; write host:port"));
            }
        }
        let whole = self.root.strip_prefix('/').is_some_and(|path| {
            path.split('/')
                .all(|part| !matches!(part, "" | "." | "..") && part.chars().all(crate::keys::is_plain))
        });
        if !self.root.is_empty() && !whole {
            return bad(format!("{:?} is not a node; write a path like /shop/locks", self.root));
        }
        if self.root == "/zookeeper" || self.root.starts_with("/zookeeper/") {
            return bad("the node /zookeeper belongs to the server".into());
        }
        if self.secure && !cfg!(feature = "tls") {
            return bad("TLS needs the feature `tls` of lockcore-zk, which is not compiled in".into());
        }
        if !self.secure && self.tls != TlsFiles::default() {
            return bad("files for TLS are for servers that speak it, and these do not".into());
        }
        if self.secure && self.tls.ca_file.is_none() {
            return bad("TLS needs a file with the authorities that are trusted: ca_file".into());
        }
        if self.tls.cert_file.is_some() != self.tls.key_file.is_some() {
            return bad("a client's certificate and its key go together".into());
        }
        if self.user.is_some() != self.password.is_some() {
            return bad("user and password of a ZooKeeper ensemble go together".into());
        }
        if self.user.as_ref().is_some_and(|user| user.is_empty() || user.contains(':')) {
            return bad("a user of the scheme digest has a name, without a colon".into());
        }
        if self.connect_timeout.is_zero() || self.idle_timeout.is_zero() {
            return bad("connect_timeout and idle_timeout are above zero".into());
        }
        Ok(())
    }
}

#[cfg(feature = "tls")]
impl TlsFiles {
    /// Reads the files.
    pub(crate) fn read(&self) -> Result<zookeeper_client::TlsOptions> {
        let read = |path: &PathBuf| {
            std::fs::read_to_string(path).map_err(|error| {
                Error::new(ErrorKind::Misconfigured, format!("{} cannot be read", path.display()))
                    .with_source(error)
            })
        };
        let unfit = |path: &PathBuf, said: zookeeper_client::Error| {
            Error::new(ErrorKind::Misconfigured, format!("{} holds nothing that TLS can use", path.display()))
                .with_source(said)
        };
        // Where two libraries of a program bring providers of their own, the client library would panic without one that
        // is installed. Another that is installed already stays.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let mut options = zookeeper_client::TlsOptions::new();
        if let Some(path) = &self.ca_file {
            options = options.with_pem_ca(&read(path)?).map_err(|said| unfit(path, said))?;
        }
        if let (Some(cert), Some(key)) = (&self.cert_file, &self.key_file) {
            let identity = options.with_pem_identity(&read(cert)?, &read(key)?);
            options = identity.map_err(|said| unfit(cert, said))?;
        }
        Ok(options)
    }
}

impl fmt::Debug for ZkConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZkConfig")
            .field("servers", &self.servers)
            .field("root", &self.root)
            .field("secure", &self.secure)
            .field("tls", &self.tls)
            .field("user", &self.user)
            .field("password", &self.password.as_ref().map(|_| "***"))
            .field("connect_timeout", &self.connect_timeout)
            .field("idle_timeout", &self.idle_timeout)
            .finish()
    }
}

fn with_port(server: String) -> String {
    let bare = match server.rfind(']') {
        Some(end) => end + 1 == server.len(),
        None => !server.contains(':'),
    };
    if bare { format!("{server}:2181") } else { server }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_strings_read_and_what_cannot_work_is_refused_by_name() {
        let config = ZkConfig::parse("a,b:99/x/y/").unwrap();
        assert_eq!((config.servers, config.root.as_str()), (vec!["a:2181".into(), "b:99".into()], "/x/y"));
        for (text, says) in [
            ("", "address of a server"),
            ("a:x", "a:x"),
            ("a,,b", "address of a server"),
            ("a/x//y", "not a node"),
            ("a/../y", "not a node"),
            ("a/zookeeper", "belongs to the server"),
        ] {
            let refused = ZkConfig::parse(text).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Misconfigured);
            assert!(refused.to_string().contains(says), "{text}: {refused}");
        }
        for bad in [
            ZkConfig::new(["a"]).with(|c| c.tls.ca_file = Some("/ca".into())),
            ZkConfig::new(["a"]).with(|c| c.secure = true),
        ] {
            assert_eq!(bad.check().unwrap_err().kind(), ErrorKind::Misconfigured, "{bad:?}");
        }
        let half = ZkConfig::new(["a"]).with(|c| c.password = Some("s3cret".into()));
        assert!(half.check().unwrap_err().to_string().contains("go together"));
        assert!(!format!("{half:?}").contains("s3cret"), "{half:?}");
    }
}
