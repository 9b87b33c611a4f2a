//! Which store each risk runs on, from a file: the code names a risk, the file says what provides it.
//!
//! lockcore reads no file itself. These structs take any serde format and stand under a key of the application's own
//! file; what one process compiles in is a [`Registry`].
//!
//! ```
//! use lockcore::config::Config;
//!
//! #[derive(serde::Deserialize)]
//! struct AppConfig {
//!     port: u16,
//!     locks: Config, // one table of the application's own file; nest it, never `flatten` it
//! }
//!
//! let app: AppConfig = toml::from_str(
//!     r#"
//!     port = 8080
//!     [locks]
//!     namespace = "shop-prod"                 # keeps deployments apart that share a store
//!     [locks.backend]
//!     cache = "redis://redis-a:6379/0"        # short form: a URL without a password
//!     [locks.risk.efficiency]                 # double work is only a waste
//!     backend = "cache"
//!     ttl = "30s"
//!     "#,
//! )?;
//! assert_eq!(app.port, 8080);
//! assert_eq!(app.locks.backend["cache"].url.scheme(), "redis");
//! # Ok::<(), toml::de::Error>(())
//! ```

use std::{collections::BTreeMap, fmt, time::Duration};

use serde::{Deserialize, Serialize};

use crate::{backend::LockBackend, name::LockName};

mod backend;
mod check;
mod duration;
mod lazy;
mod manager;
mod memory;
mod registry;
mod risk;
mod source;

pub use backend::{BackendConfig, Credentials, OptionValue, Options};
pub use manager::LockManager;
pub use memory::Memory;
pub use registry::{Connector, Registry};
pub use risk::{Demands, Requirements, RiskConfig, Start, Survival, WhenUnavailable};

pub use crate::{migrate::Phase, url::StoreUrl};

/// The whole table. Any serde format; unknown keys are errors; durations are text with a unit.
///
/// Nest it, never `#[serde(flatten)]` it: flattening loses line numbers and accepts unknown keys in silence.
///
/// What a format's own error prints may quote the line that is wrong. A file that breaks the rule and holds a password
/// is better reported by message and line number alone.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[non_exhaustive]
pub struct Config {
    /// Keeps deployments apart that share a store: part of every key. Required.
    pub namespace: String,
    /// Stores by name: a URL, or a table with a URL.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub backend: BTreeMap<String, BackendConfig>,
    /// Two stores as one while locks move; may stand wherever a backend may.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub bridge: BTreeMap<String, BridgeConfig>,
    /// Risk levels by name; `efficiency`, `guarded` and `critical` have built-in demands that a file can raise, not
    /// lower.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub risk: BTreeMap<String, RiskConfig>,
    /// Numbers for single locks, by name or `prefix/*`; the longest match wins; never changes the level.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub lock: BTreeMap<String, LockConfig>,
}

impl Config {
    /// Sets fields in one expression, for a configuration that is code.
    #[must_use]
    pub fn with(mut self, set: impl FnOnce(&mut Self)) -> Self {
        set(&mut self);
        self
    }

    /// Checks all that needs no server and returns every problem, not the first.
    pub fn problems(&self, registry: &Registry) -> Vec<Problem> {
        check::problems(self, registry)
    }

    /// Connects what a name stands for: a store, or a bridge in its phase. For tools; an application has its
    /// [`LockManager`], which also looks at the servers.
    ///
    /// # Errors
    /// `Misconfigured`: there is no such name. The connector's own for what a store says.
    pub async fn connect(
        &self,
        name: &str,
        registry: &Registry,
    ) -> crate::Result<std::sync::Arc<dyn LockBackend>> {
        match source::Source::of(self, name) {
            Some(source) => source.connect(registry).await,
            None => Err(crate::Error::new(
                crate::ErrorKind::Misconfigured,
                format!("there is no store {name:?} that is whole"),
            )),
        }
    }

    /// Returns the numbers that the file has for one lock: those under its own name, else those of its longest prefix.
    pub fn numbers(&self, name: &LockName) -> Option<&LockConfig> {
        numbers_of(&self.lock, name)
    }
}

/// Two stores as one, while locks move from one to the other: a [`Bridge`](crate::migrate::Bridge), whose migration has
/// the table's name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[non_exhaustive]
pub struct BridgeConfig {
    /// The store that locks leave, by name.
    pub from: String,
    /// The store that they go to, by name.
    pub to: String,
    /// How far the move has come, for the processes that read this.
    pub phase: Phase,
    /// How long a membership of the phase lives without a renewal: the longest TTL of a lock, and how long a process
    /// that is stopped holds up the move. 60 s, or what both stores allow.
    #[serde(default, with = "duration", skip_serializing_if = "Option::is_none")]
    pub membership: Option<Duration>,
}

/// Numbers for single locks. What is missing comes from the level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[non_exhaustive]
pub struct LockConfig {
    /// TTL of a lease.
    #[serde(default, with = "duration", skip_serializing_if = "Option::is_none")]
    pub ttl: Option<Duration>,
    /// Wait budget of an acquire.
    #[serde(default, with = "duration", skip_serializing_if = "Option::is_none")]
    pub wait: Option<Duration>,
    /// Longest hold, renewals included.
    #[serde(default, with = "duration", skip_serializing_if = "Option::is_none")]
    pub max_hold: Option<Duration>,
    /// How long before its deadline a lease counts as lost, so that work can stop in time.
    #[serde(default, with = "duration", skip_serializing_if = "Option::is_none")]
    pub stop_margin: Option<Duration>,
    /// How long the store keeps a lock closed after an unclean end.
    #[serde(default, with = "duration", skip_serializing_if = "Option::is_none")]
    pub lock_delay: Option<Duration>,
}

impl LockConfig {
    /// Sets fields in one expression, for a configuration that is code.
    #[must_use]
    pub fn with(mut self, set: impl FnOnce(&mut Self)) -> Self {
        set(&mut self);
        self
    }
}

/// One thing that is wrong: where, what, and what would be right. A loader that knows lines adds them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Problem {
    /// Where: keys joined with dots, like `risk.critical.backend`.
    pub path: String,
    /// What is wrong, and what would be right.
    pub message: String,
}

impl Problem {
    /// Joins the two.
    pub fn new(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self { path: path.into(), message: message.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.message)
    }
}

pub(crate) fn numbers_of<'a>(
    locks: &'a BTreeMap<String, LockConfig>,
    name: &LockName,
) -> Option<&'a LockConfig> {
    let mut key = name.as_str();
    if let Some(own) = locks.get(key) {
        return Some(own);
    }
    while let Some((prefix, _)) = key.rsplit_once('/') {
        if let Some(found) = locks.get(&format!("{prefix}/*")) {
            return Some(found);
        }
        key = prefix;
    }
    None
}

/// Lists names for a message: `a, b and c` would be harder to copy than `a, b, c`.
fn listed<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.into_iter().collect();
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

#[cfg(test)]
mod manager_tests;
#[cfg(test)]
mod tests;
