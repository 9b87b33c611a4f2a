//! Which families of stores a process can reach.

use std::{fmt, sync::Arc, time::Duration};

use async_trait::async_trait;

use super::{BackendConfig, listed};
use crate::{
    backend::{BootClock, Call, LockBackend},
    error::{Error, ErrorKind, Result, Verb},
};

/// Knows how to reach one family of stores; each backend crate has one.
#[async_trait]
pub trait Connector: Send + Sync + 'static {
    /// Returns the URL schemes it takes, in lower case.
    fn schemes(&self) -> &'static [&'static str];

    /// Checks what needs no server: hosts, path, options. Body: all is well.
    ///
    /// # Errors
    /// `Misconfigured`: an unknown option, or an address this family cannot have; the message names it.
    fn check(&self, _config: &BackendConfig) -> Result<()> {
        Ok(())
    }

    /// Connects; an unknown option is `Misconfigured` and named.
    async fn connect(&self, config: &BackendConfig) -> Result<Arc<dyn LockBackend>>;

    /// Removes every record of the call's namespace, fences included, and says how many there were. Only for a
    /// [scratch](Call::scratch) namespace that nobody uses any more. Idempotent. Body: `Unsupported`.
    ///
    /// # Errors
    /// `Invalid`: the namespace is not for scratch. `Unknown`, `Unavailable`: some may be left; asking again is safe.
    async fn sweep(&self, _config: &BackendConfig, _call: &Call) -> Result<u64> {
        Err(Error::new(ErrorKind::Unsupported, "this kind of store is not swept by program"))
    }
}

/// The connectors that an application compiles in. Starts empty; nothing is global.
#[derive(Clone, Default)]
pub struct Registry {
    connectors: Vec<Arc<dyn Connector>>,
    duplicates: Vec<&'static str>,
}

impl Registry {
    /// Starts empty.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds one. A scheme that another connector takes already is refused by the first use, since which of the two
    /// would answer is nobody's choice.
    #[must_use]
    pub fn with(mut self, connector: impl Connector) -> Self {
        for scheme in connector.schemes() {
            if self.schemes().any(|taken| taken == *scheme) {
                self.duplicates.push(scheme);
            }
        }
        self.connectors.push(Arc::new(connector));
        self
    }

    /// Lists the schemes, in the order in which they were added.
    pub fn schemes(&self) -> impl Iterator<Item = &'static str> {
        self.connectors.iter().flat_map(|connector| connector.schemes().iter().copied())
    }

    /// Checks what needs no server.
    ///
    /// # Errors
    /// `Misconfigured`: nobody takes the scheme, two take it, or the connector refuses the address or an option.
    pub fn check(&self, config: &BackendConfig) -> Result<()> {
        self.find(config.url.scheme())?.1.check(config)
    }

    /// Connects to one store.
    ///
    /// # Errors
    /// `Misconfigured`: as [`check`](Self::check). The connector's own for what the store says.
    pub async fn connect(&self, config: &BackendConfig) -> Result<Arc<dyn LockBackend>> {
        let (scheme, connector) = self.find(config.url.scheme())?;
        connector.check(config)?;
        connector.connect(config).await.map_err(|error| error.about(Verb::Connect, None, scheme))
    }

    /// Removes every record of a namespace that begins with `scratch-`, fences included; says how many there were.
    ///
    /// # Errors
    /// As [`Connector::sweep`].
    pub async fn sweep(&self, config: &BackendConfig, namespace: &str, budget: Duration) -> Result<u64> {
        let (scheme, connector) = self.find(config.url.scheme())?;
        let call = Call::for_tests(Arc::new(BootClock), budget).in_namespace(namespace)?;
        call.scratch()?;
        connector.sweep(config, &call).await.map_err(|error| error.about(Verb::List, None, scheme))
    }

    pub(super) fn scheme(&self, scheme: &str) -> Result<&'static str> {
        Ok(self.find(scheme)?.0)
    }

    fn find(&self, scheme: &str) -> Result<(&'static str, &dyn Connector)> {
        if self.duplicates.contains(&scheme) {
            return Err(Error::new(
                ErrorKind::Misconfigured,
                format!("scheme {scheme:?} is taken by two connectors; register one of them"),
            ));
        }
        self.connectors
            .iter()
            .find_map(|c| Some((*c.schemes().iter().find(|s| **s == scheme)?, &**c)))
            .ok_or_else(|| {
                Error::new(
                    ErrorKind::Misconfigured,
                    format!("scheme {scheme:?} is not compiled in; have {}", listed(self.schemes())),
                )
            })
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.schemes()).finish()
    }
}
