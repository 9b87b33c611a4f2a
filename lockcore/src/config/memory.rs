//! The in-memory store by configuration.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
};

use async_trait::async_trait;

use super::{BackendConfig, Connector};
use crate::{
    backend::LockBackend,
    error::{Error, ErrorKind, Result},
    memory::MemoryBackend,
    sync::LockExt,
};

/// Takes `memory://` and `memory://NAME`: a store inside this process, for development and tests.
///
/// Clones of one value, and so one registry, hand out the same store under the same name.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    stores: Arc<Mutex<HashMap<String, MemoryBackend>>>,
}

impl Memory {
    /// Starts without a store.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the store under a name, for a test that provokes its faults.
    pub fn store(&self, name: &str) -> MemoryBackend {
        self.stores.grab().entry(name.to_owned()).or_default().clone()
    }

    /// Puts a store under a name, for a test that wants one with other promises.
    pub fn insert(&self, name: &str, store: MemoryBackend) {
        self.stores.grab().insert(name.to_owned(), store);
    }
}

#[async_trait]
impl Connector for Memory {
    fn schemes(&self) -> &'static [&'static str] {
        &["memory"]
    }

    fn check(&self, config: &BackendConfig) -> Result<()> {
        config.options()?.finish()?;
        let url = &config.url;
        if url.hosts().len() > 1 || url.hosts().any(|(_, port)| port.is_some()) || !url.path().is_empty() {
            return Err(Error::new(
                ErrorKind::Misconfigured,
                "memory:// takes at most a name, like memory://cache",
            ));
        }
        Ok(())
    }

    async fn connect(&self, config: &BackendConfig) -> Result<Arc<dyn LockBackend>> {
        let name = config.url.hosts().next().map_or("", |(name, _)| name);
        Ok(Arc::new(self.store(name)))
    }
}
