//! How to reach the cluster.

use std::{fmt, path::PathBuf, time::Duration};

use lockcore::backend::{Error, ErrorKind, Result};

/// How a holder's lease is prolonged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Renewal {
    /// By a keep-alive and a look at the own key: cheap, no write. Below 3.4.31 and 3.5.13 a leader that was stopped and
    /// goes on may end the lease all the same, and may confirm a keep-alive that counts for nothing.
    #[default]
    KeepAlive,
    /// By a new etcd lease that takes the place of the old one: two writes a renewal, which no leader of the past can undo
    /// or confirm. For old servers, where the lock must survive such a pause.
    Swap,
}

/// Files for `https://` endpoints; each is read when a connection is made, so what replaces it counts from the next one on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TlsFiles {
    /// Certificates of the authorities that are trusted, PEM. Default: the system's.
    pub ca_file: Option<PathBuf>,
    /// The client's certificate, PEM. Default none.
    pub cert_file: Option<PathBuf>,
    /// The key of the client's certificate, PEM. Default none.
    pub key_file: Option<PathBuf>,
    /// The name that the members' certificates carry, where it is not the host of the endpoint. Default none.
    pub server_name: Option<String>,
}

/// Says where the members are. `Debug` shows no password.
///
/// # Example
/// ```
/// use lockcore_etcd::EtcdConfig;
///
/// let config = EtcdConfig::new(["http://etcd-a:2379"]).with(|c| {
///     c.user = Some("locks".into());
///     c.password = Some("s3cret".into());
/// });
/// assert!(!format!("{config:?}").contains("s3cret"));
/// ```
#[derive(Clone)]
#[non_exhaustive]
pub struct EtcdConfig {
    /// Client addresses of the members, `http://host:port`, or `https://` with the feature `tls`. All of one cluster: name
    /// every voting member, so that no single one is missed. No default.
    pub endpoints: Vec<String>,
    /// The user. Default none.
    pub user: Option<String>,
    /// The password. Default none.
    pub password: Option<String>,
    /// How long a connection may take to come up. Default 2 s.
    pub connect_timeout: Duration,
    /// How often an open connection is probed, and how long the probe may take. Default 2 s.
    pub keep_alive: Duration,
    /// How a holder's lease is prolonged. Default by keep-alives.
    pub renewal: Renewal,
    /// Files for `https://` endpoints.
    pub tls: TlsFiles,
}

impl EtcdConfig {
    /// Starts from addresses and the defaults.
    pub fn new<S: Into<String>>(endpoints: impl IntoIterator<Item = S>) -> Self {
        Self {
            endpoints: endpoints.into_iter().map(Into::into).collect(),
            user: None,
            password: None,
            connect_timeout: Duration::from_secs(2),
            keep_alive: Duration::from_secs(2),
            renewal: Renewal::default(),
            tls: TlsFiles::default(),
        }
    }

    /// Sets fields in one expression.
    #[must_use]
    pub fn with(mut self, set: impl FnOnce(&mut Self)) -> Self {
        set(&mut self);
        self
    }

    /// Checks what needs no server.
    pub(crate) fn check(&self) -> Result<()> {
        let bad = |message| Err(Error::new(ErrorKind::Misconfigured, message));
        if self.endpoints.is_empty() {
            return bad("an etcd cluster needs at least one endpoint");
        }
        if self.endpoints.iter().any(|endpoint| endpoint.contains('@')) {
            // Not shown: what stands before it is likely to be a password.
            return bad("an endpoint has no user or password in it; set `user` and `password` instead");
        }
        let is = |scheme: &str| self.endpoints.iter().filter(|e| e.starts_with(scheme)).count();
        if is("http://") + is("https://") != self.endpoints.len() {
            return bad("an endpoint of an etcd cluster begins with http:// or https://");
        }
        if is("https://") > 0 && !cfg!(feature = "tls") {
            return bad("https:// needs the feature `tls` of lockcore-etcd, which is not compiled in");
        }
        if is("https://") == 0 && self.tls != TlsFiles::default() {
            return bad("files for TLS are for https:// endpoints, and there is none");
        }
        if self.tls.cert_file.is_some() != self.tls.key_file.is_some() {
            return bad("a client's certificate and its key go together");
        }
        if self.user.is_some() != self.password.is_some() {
            return bad("user and password of an etcd cluster go together");
        }
        if self.connect_timeout.is_zero() || self.keep_alive.is_zero() {
            return bad("connect_timeout and keep_alive are above zero");
        }
        Ok(())
    }
}

#[cfg(feature = "tls")]
impl TlsFiles {
    /// Reads the files.
    pub(crate) fn read(&self) -> std::io::Result<etcd_client::TlsOptions> {
        let read = |path: &PathBuf| {
            std::fs::read(path)
                .map_err(|error| std::io::Error::new(error.kind(), format!("{}: {error}", path.display())))
        };
        let mut options = etcd_client::TlsOptions::new();
        options = match &self.ca_file {
            Some(path) => options.ca_certificate(etcd_client::Certificate::from_pem(read(path)?)),
            None => options.with_native_roots(),
        };
        if let (Some(cert), Some(key)) = (&self.cert_file, &self.key_file) {
            options = options.identity(etcd_client::Identity::from_pem(read(cert)?, read(key)?));
        }
        if let Some(name) = &self.server_name {
            options = options.domain_name(name);
        }
        Ok(options)
    }
}

impl fmt::Debug for EtcdConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdConfig")
            .field("endpoints", &self.endpoints.iter().map(|endpoint| shown(endpoint)).collect::<Vec<_>>())
            .field("user", &self.user)
            .field("password", &self.password.as_ref().map(|_| "***"))
            .field("connect_timeout", &self.connect_timeout)
            .field("keep_alive", &self.keep_alive)
            .field("renewal", &self.renewal)
            .field("tls", &self.tls)
            .finish()
    }
}

/// Hides what may be a secret that stands in the wrong place.
fn shown(endpoint: &str) -> String {
    match endpoint.rsplit_once('@') {
        Some((_, rest)) => format!("***@{rest}"),
        None => endpoint.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_work_is_refused_before_any_request() {
        let plain = EtcdConfig::new(["http://a:1"]);
        plain.check().unwrap();
        for bad in [
            EtcdConfig::new([""; 0]),
            EtcdConfig::new(["a:2379"]),
            plain.clone().with(|c| c.user = Some("u".into())),
            plain.clone().with(|c| c.keep_alive = Duration::ZERO),
            plain.clone().with(|c| c.tls.ca_file = Some("/ca".into())),
            EtcdConfig::new(["https://a:1"]).with(|c| c.tls.cert_file = Some("/cert".into())),
        ] {
            assert_eq!(bad.check().unwrap_err().kind(), ErrorKind::Misconfigured, "{bad:?}");
        }
        assert_eq!(EtcdConfig::new(["https://a:1"]).check().is_ok(), cfg!(feature = "tls"));
    }

    #[test]
    fn a_password_in_an_endpoint_is_refused_and_not_shown() {
        let config = EtcdConfig::new(["http://a:1", "http://locks:s3cret@b:2"]);
        let refused = config.check().unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Misconfigured);
        assert!(refused.to_string().contains("set `user` and `password`"), "{refused}");
        for shown in [format!("{refused:?}"), format!("{config:?}")] {
            assert!(!shown.contains("s3cret"), "{shown}");
        }
    }
}
