//! What stands behind the name of a store: one store, or the bridge between two.

use std::sync::Arc;

use super::{BackendConfig, BridgeConfig, Config, Registry};
use crate::{
    backend::LockBackend,
    error::Result,
    migrate::{Bridge, Phase},
};

/// What a level's `backend` leads to.
#[derive(Clone, Debug, PartialEq)]
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

    /// Says why locks must not go on here while others of this process are still held there; nothing if both exclude each
    /// other.
    pub(super) fn why_not_after(&self, before: &Self) -> Option<String> {
        let apart = |what: &str| Some(format!("{what}; restart for that, or move by a bridge"));
        match (before, self) {
            (Self::Store(old), Self::Store(new)) if old.url == new.url => None,
            (Self::Store(old), Self::Store(new)) => {
                apart(&format!("would go from {} to {}, which know nothing of each other", old.url, new.url))
            }
            (Self::Bridge { name, bridge, from, to }, Self::Bridge { name: n, bridge: b, from: f, to: t }) => {
                if name != n || from.url != f.url || to.url != t.url {
                    return apart("would go from one bridge to another");
                }
                let (from, to) = (bridge.phase, b.phase);
                (!from.is_beside(to)).then(|| {
                    let (from, to) = (from.as_str(), to.as_str());
                    format!("would go from phase `{from}` to `{to}`, which do not exclude each other; take `both` first")
                })
            }
            (Self::Bridge { bridge, from, to, .. }, Self::Store(new)) => {
                let alone = match bridge.phase {
                    Phase::From => Some(&from.url),
                    Phase::To => Some(&to.url),
                    Phase::Both => None,
                };
                match alone {
                    Some(url) if *url == new.url => None,
                    _ => apart("would leave a bridge for a store that its phase does not have alone"),
                }
            }
            (Self::Store(_), Self::Bridge { .. }) => Some(
                "would go from a store to a bridge; restart for that: no step of a migration sees the locks that were \
                 taken before"
                    .into(),
            ),
        }
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
