//! What stands behind the name of a store: one store, or the bridge between two.

use std::sync::Arc;

use super::{BackendConfig, BridgeConfig, Config, Registry};
use crate::{backend::LockBackend, error::Result, migrate::Bridge};

/// What a level's `backend` leads to.
#[derive(Clone, Debug)]
pub(super) enum Source {
    Store(BackendConfig),
    Bridge { name: String, bridge: BridgeConfig, from: BackendConfig, to: BackendConfig },
}

impl Source {
    /// Looks a name up; `None` where it leads nowhere, or to a bridge of bridges.
    pub(super) fn of(config: &Config, name: &str) -> Option<Self> {
        let Some(bridge) = config.bridge.get(name) else {
            return config.backend.get(name).cloned().map(Self::Store);
        };
        let (from, to) = (config.backend.get(&bridge.from)?, config.backend.get(&bridge.to)?);
        Some(Self::Bridge {
            name: name.to_owned(),
            bridge: bridge.clone(),
            from: from.clone(),
            to: to.clone(),
        })
    }

    /// Returns what messages call it before anything is connected.
    pub(super) fn scheme(&self, registry: &Registry) -> Result<&'static str> {
        match self {
            Self::Store(store) => registry.scheme(store.url.scheme()),
            Self::Bridge { .. } => Ok("bridge"),
        }
    }

    pub(super) async fn connect(&self, registry: &Registry) -> Result<Arc<dyn LockBackend>> {
        match self {
            Self::Store(store) => registry.connect(store).await,
            Self::Bridge { name, bridge, from, to } => {
                let (old, new) = tokio::join!(registry.connect(from), registry.connect(to));
                let (old, new) = match (old, new) {
                    (Ok(old), Ok(new)) => (old, new),
                    (Ok(one), Err(error)) | (Err(error), Ok(one)) => {
                        one.close().await;
                        return Err(error);
                    }
                    (Err(error), Err(_)) => return Err(error),
                };
                let joined = Bridge::new(name, bridge.phase, old, new)?;
                Ok(Arc::new(match bridge.membership {
                    Some(ttl) => joined.with_membership(ttl)?,
                    None => joined,
                }))
            }
        }
    }
}
