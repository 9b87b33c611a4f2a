//! How to reach the cluster.

use std::{fmt, time::Duration};

use lockcore::backend::{Error, ErrorKind, Result};

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
    /// Client addresses of the members, `http://host:port`. No default.
    pub endpoints: Vec<String>,
    /// The user. Default none.
    pub user: Option<String>,
    /// The password. Default none.
    pub password: Option<String>,
    /// How long a connection may take to come up. Default 2 s.
    pub connect_timeout: Duration,
    /// How often an open connection is probed, and how long the probe may take. Default 2 s.
    pub keep_alive: Duration,
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
        if self.endpoints.iter().any(|e| e.starts_with("https:")) {
            return bad("this version of the etcd backend speaks no TLS; use http://");
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

impl fmt::Debug for EtcdConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdConfig")
            .field("endpoints", &self.endpoints)
            .field("user", &self.user)
            .field("password", &self.password.as_ref().map(|_| "***"))
            .field("connect_timeout", &self.connect_timeout)
            .field("keep_alive", &self.keep_alive)
            .finish()
    }
}
