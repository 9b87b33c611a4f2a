//! One client a risk level, connected and checked.

use std::{collections::BTreeMap, fmt, sync::Arc};

use futures_util::future::join_all;

use super::{
    Config, Demands, Registry, RiskConfig, Start, WhenUnavailable, lazy::Lazy, listed, source::Source,
};
use crate::{
    backend::{BootClock, Clock, FenceSource, LockBackend},
    client::{ClientOptions, LockClient, RenewalHome},
    error::{Error, ErrorKind, Result},
};

/// Clients by risk level, connected and checked.
///
/// Each level has a connection of its own, so that a level which waits for its store does not hold up another.
///
/// # Example
/// ```
/// use lockcore::config::{Config, LockManager, Memory, Registry};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let config: Config = toml::from_str(
///     r#"
///     namespace = "shop-test"
///     backend.cache = "memory://cache"
///     [risk.efficiency]
///     backend = "cache"
///     ttl = "30s"
///     "#,
/// )?;
/// let registry = Registry::new().with(Memory::new());
/// let manager = LockManager::start(&config, &registry).await?;
///
/// let reports = manager.level("efficiency")?; // once, at start: a typing error shows then
/// reports.named("report/nightly").run(async |_| -> lockcore::Result<()> { Ok(()) }).await?;
///
/// let error = manager.level("efficency").unwrap_err();
/// assert_eq!(error.to_string(), "there is no risk level \"efficency\"; have efficiency");
/// manager.close().await;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct LockManager {
    levels: Arc<BTreeMap<String, LockClient>>,
}

impl LockManager {
    /// Connects what the levels use, looks at the real servers, refuses the whole when one level is not met, and says
    /// all that is missing.
    ///
    /// # Errors
    /// `Misconfigured`: the configuration has problems, or a store does not keep what its level demands. As a
    /// connector tells, for a store that cannot be reached and whose level is not lazy.
    pub async fn start(config: &Config, registry: &Registry) -> Result<Self> {
        Self::start_with(config, registry, ClientOptions::default()).await
    }

    /// As [`start`](Self::start); what a configuration does not know (shutdown, label, call timeout) comes from
    /// `options`, and so does every number that neither level nor lock has.
    pub async fn start_with(config: &Config, registry: &Registry, options: ClientOptions) -> Result<Self> {
        let problems = config.problems(registry);
        if !problems.is_empty() {
            let all: Vec<String> = problems.iter().map(ToString::to_string).collect();
            return Err(Error::new(ErrorKind::Misconfigured, all.join("; ")));
        }
        let started = join_all(config.risk.iter().map(async |(name, risk)| {
            let level = Level { name, risk, config, registry, demands: Demands::of(name, risk) };
            (name.clone(), level.start(&options).await)
        }));
        let mut levels = BTreeMap::new();
        let mut refused = Vec::new();
        for (name, started) in started.await {
            match started {
                Ok(client) => drop(levels.insert(name, client)),
                Err(error) => refused.push(error),
            }
        }
        let manager = Self { levels: Arc::new(levels) };
        if refused.is_empty() {
            return Ok(manager);
        }
        manager.close().await;
        Err(together(refused))
    }

    /// Returns the client of a level. Ask at start: a typing error shows then.
    ///
    /// # Errors
    /// `Misconfigured`: there is no such level; the message lists them.
    pub fn level(&self, risk: &str) -> Result<LockClient> {
        self.levels.get(risk).cloned().ok_or_else(|| {
            let have = listed(self.levels.keys().map(String::as_str));
            Error::new(ErrorKind::Misconfigured, format!("there is no risk level {risk:?}; have {have}"))
        })
    }

    /// Closes every client. Last line of `main`.
    pub async fn close(&self) {
        join_all(self.levels.values().map(LockClient::close)).await;
    }
}

impl fmt::Debug for LockManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.levels.iter()).finish()
    }
}

struct Level<'a> {
    name: &'a str,
    risk: &'a RiskConfig,
    config: &'a Config,
    registry: &'a Registry,
    demands: Demands,
}

impl Level<'_> {
    async fn start(self, base: &ClientOptions) -> Result<LockClient> {
        let source = Source::of(self.config, &self.risk.backend)
            .expect("`problems` found no name that leads nowhere, and no bridge of bridges");
        let options = self.options(base);
        match self.connect(&source, &options).await {
            Ok(client) => Ok(client),
            Err(error) if self.risk.start == Start::Lazy && may_come_later(error.kind()) => {
                let scheme = source.scheme(self.registry)?;
                let lazy = Lazy::new(scheme, source, self.registry.clone(), self.demands.clone());
                Ok(LockClient::with_options(lazy, options))
            }
            Err(error) => Err(self.refused(error)),
        }
    }

    async fn connect(&self, source: &Source, options: &ClientOptions) -> Result<LockClient> {
        let end = BootClock.now().saturating_add(options.call_timeout);
        let backend: Arc<dyn LockBackend> = tokio::select! {
            backend = source.connect(self.registry) => backend?,
            () = BootClock.sleep_until(end) => {
                return Err(Error::new(ErrorKind::Unavailable, "no connection within the call timeout"));
            }
        };
        let mut client = LockClient::with_options(backend.clone(), options.clone());
        let found = match client.preflight().await {
            Ok(found) => found,
            Err(error) => {
                backend.close().await;
                return Err(error);
            }
        };
        let misses = self.demands.misses(&found.capabilities);
        if !misses.is_empty() {
            backend.close().await;
            let mut message = misses.join("; ");
            if !found.findings.is_empty() {
                message += &format!(" ({})", found.findings.join("; "));
            }
            return Err(Error::new(ErrorKind::Misconfigured, message));
        }
        // What the look at the server lowered stays lowered.
        let inner = Arc::get_mut(&mut client.inner).expect("nobody else has the client yet");
        inner.capabilities = found.capabilities;
        Ok(client)
    }

    fn options(&self, base: &ClientOptions) -> ClientOptions {
        let risk = self.risk;
        base.clone().with(|o| {
            o.namespace.clone_from(&self.config.namespace);
            o.ttl = risk.ttl.unwrap_or(o.ttl);
            o.wait = risk.wait.unwrap_or(o.wait);
            o.max_hold = risk.max_hold.or(o.max_hold);
            o.stop_margin = risk.stop_margin.unwrap_or(o.stop_margin);
            o.lock_delay = risk.lock_delay.unwrap_or(o.lock_delay);
            o.allow_open = risk.when_unavailable == WhenUnavailable::AllowOpen;
            o.warn_unused_fence = self.demands.fence > FenceSource::Volatile;
            if self.name == "critical" {
                o.renewal = RenewalHome::OwnThread;
            }
            o.numbers = Some(Arc::new(self.config.lock.clone()));
        })
    }

    fn refused(&self, error: Error) -> Error {
        let message = format!("risk level {:?} on backend {:?}: {error}", self.name, self.risk.backend);
        let refused = Error::new(error.kind(), message);
        match std::error::Error::source(&error) {
            Some(_) => refused.with_source(error),
            None => refused,
        }
    }
}

fn may_come_later(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Unavailable | ErrorKind::Unknown | ErrorKind::Overloaded)
}

/// Joins what several levels said. A mistake weighs more than a store that is away: it will not go away by itself.
fn together(mut refused: Vec<Error>) -> Error {
    if refused.len() == 1 {
        return refused.remove(0);
    }
    let kinds = || refused.iter().map(Error::kind);
    let kind = kinds().find(|kind| !may_come_later(*kind)).or_else(|| kinds().next());
    let all: Vec<&str> = refused.iter().map(Error::message).collect();
    Error::new(kind.unwrap_or(ErrorKind::Misconfigured), all.join("; "))
}
