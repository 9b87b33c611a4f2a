//! One client a risk level, connected and checked.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{Arc, Mutex},
};

use futures_util::future::join_all;

use super::{
    Config, Demands, Problem, Registry, RiskConfig, Start, WhenUnavailable, lazy::Lazy, listed,
    source::Source,
};
use crate::{
    backend::{BootClock, Clock, FenceSource, LockBackend},
    capabilities::Preflight,
    client::{ClientOptions, LockClient, RenewalHome},
    error::{Error, ErrorKind, Result},
    sync::LockExt,
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
    shared: Arc<Shared>,
}

struct Shared {
    registry: Registry,
    options: ClientOptions,
    table: Mutex<Table>,
    one_at_a_time: tokio::sync::Mutex<()>,
}

struct Table {
    config: Config,
    levels: BTreeMap<String, LockClient>,
    /// The levels that somebody has a client of.
    asked: BTreeSet<String>,
    closed: bool,
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
        check(config, registry, Vec::new())?;
        let levels = start_levels(config, registry, &options, config.risk.keys()).await?;
        let table = Table { config: config.clone(), levels, asked: BTreeSet::new(), closed: false };
        let shared = Shared {
            registry: registry.clone(),
            options,
            table: Mutex::new(table),
            one_at_a_time: tokio::sync::Mutex::default(),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Returns the client of a level. Ask at start: a typing error shows then. It follows every
    /// [`reload`](Self::reload).
    ///
    /// # Errors
    /// `Misconfigured`: there is no such level; the message lists them.
    pub fn level(&self, risk: &str) -> Result<LockClient> {
        let mut table = self.shared.table.grab();
        match table.levels.get(risk).cloned() {
            Some(client) => {
                table.asked.insert(risk.to_owned());
                Ok(client)
            }
            None => {
                let have = listed(table.levels.keys().map(String::as_str));
                Err(Error::new(
                    ErrorKind::Misconfigured,
                    format!("there is no risk level {risk:?}; have {have}"),
                ))
            }
        }
    }

    /// Applies a new configuration to acquires that begin later, also by clients and locks that were handed out before;
    /// held leases stay where they are and are renewed, and waiters go on waiting there.
    ///
    /// A level that has changed is connected and looked at as at the start; its former connection is closed when the
    /// last of its leases has ended. All of it is applied, or nothing.
    ///
    /// What holds now and what is held must exclude each other, so a level stays with its store. It may follow the phase
    /// of its bridge to a neighbouring one, and leave the bridge at either end. Whatever else would move it is for a
    /// restart.
    ///
    /// # Errors
    /// As [`start`](Self::start), and nothing has changed then. `Misconfigured`, too: another namespace, a level that
    /// would move, a level that is in use and that the new configuration does not have. `Closed`: after
    /// [`close`](Self::close).
    ///
    /// # Cancel safety
    /// Dropped, it has applied everything or nothing.
    pub async fn reload(&self, config: &Config) -> Result<()> {
        let Shared { registry, options, table, one_at_a_time } = &*self.shared;
        let _alone = one_at_a_time.lock().await;
        let (old, levels, asked) = {
            let table = table.grab();
            if table.closed {
                return Err(Error::new(ErrorKind::Closed, "the lock manager was closed"));
            }
            (table.config.clone(), table.levels.clone(), table.asked.clone())
        };
        check(config, registry, moves(&old, config, &asked))?;
        let is_new = |name: &&String| match levels.get(*name) {
            // Closed by who had it: it stays closed.
            Some(client) if client.current().is_closed() => false,
            Some(_) => has_changed(&old, config, name),
            None => true,
        };
        let mut started = start_levels(config, registry, options, config.risk.keys().filter(is_new)).await?;
        for (name, client) in &mut started {
            if let Some(former) = levels.get(name) {
                client.inherit(former);
            }
        }
        let mut gone = Vec::new();
        let overtaken = {
            let mut table = table.grab();
            let overtaken = moves(&old, config, &table.asked);
            if !overtaken.is_empty() {
                gone.extend(started.into_values());
                overtaken
            } else {
                for (name, client) in started {
                    if let Some(former) = table.levels.insert(name, client.clone()) {
                        former.replace_by(&client);
                    }
                }
                let left: Vec<String> =
                    table.levels.keys().filter(|name| !config.risk.contains_key(*name)).cloned().collect();
                gone.extend(left.iter().filter_map(|name| table.levels.remove(name)));
                table.config = config.clone();
                Vec::new()
            }
        };
        // Nobody has ever asked for these.
        join_all(gone.iter().map(LockClient::close)).await;
        check(config, registry, overtaken)
    }

    /// Closes every client. Last line of `main`.
    pub async fn close(&self) {
        let _alone = self.shared.one_at_a_time.lock().await;
        let levels = {
            let mut table = self.shared.table.grab();
            table.closed = true;
            table.levels.clone()
        };
        join_all(levels.values().map(LockClient::close)).await;
    }
}

impl fmt::Debug for LockManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.shared.table.grab().levels.iter()).finish()
    }
}

/// Refuses a configuration with all that is wrong with it.
fn check(config: &Config, registry: &Registry, mut problems: Vec<Problem>) -> Result<()> {
    let mut all = config.problems(registry);
    all.append(&mut problems);
    if all.is_empty() {
        return Ok(());
    }
    let all: Vec<String> = all.iter().map(ToString::to_string).collect();
    Err(Error::new(ErrorKind::Misconfigured, all.join("; ")))
}

/// Lists what a reload cannot do while leases are held.
fn moves(old: &Config, new: &Config, asked: &BTreeSet<String>) -> Vec<Problem> {
    let mut problems = Vec::new();
    if old.namespace != new.namespace {
        let was = &old.namespace;
        problems.push(Problem::new("namespace", format!("stays {was:?} until a restart: locks do not move")));
    }
    for (name, risk) in &old.risk {
        let Some(next) = new.risk.get(name) else {
            if asked.contains(name) {
                let message = "is in use; a level can be left out only by a restart";
                problems.push(Problem::new(format!("risk.{name}"), message));
            }
            continue;
        };
        let (before, after) = (Source::of(old, &risk.backend), Source::of(new, &next.backend));
        if let Some((before, after)) = before.zip(after)
            && let Some(why) = after.why_not_after(&before)
        {
            problems.push(Problem::new(format!("risk.{name}.backend"), why));
        }
    }
    problems
}

/// Says whether a level that was there is another one now: its store, its numbers, or those of single locks.
fn has_changed(old: &Config, new: &Config, level: &str) -> bool {
    let source = |config: &Config| Source::of(config, &config.risk[level].backend);
    old.risk[level] != new.risk[level] || old.lock != new.lock || source(old) != source(new)
}

/// Starts levels, or says what is wrong with all that are refused.
async fn start_levels<'a>(
    config: &Config,
    registry: &Registry,
    options: &ClientOptions,
    names: impl Iterator<Item = &'a String>,
) -> Result<BTreeMap<String, LockClient>> {
    let started = join_all(names.map(async |name| {
        let risk = &config.risk[name];
        let level = Level { name, risk, config, registry, demands: Demands::of(name, risk) };
        (name.clone(), level.start(options).await)
    }));
    let mut levels = BTreeMap::new();
    let mut refused = Vec::new();
    for (name, started) in started.await {
        match started {
            Ok(client) => drop(levels.insert(name, client)),
            Err(error) => refused.push(error),
        }
    }
    if refused.is_empty() {
        return Ok(levels);
    }
    join_all(levels.values().map(LockClient::close)).await;
    Err(together(refused))
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
        let (mut client, found) = self.look(source, options).await?;
        let misses = self.demands.misses(&found.capabilities);
        if !misses.is_empty() {
            client.inner.backend.close().await;
            let mut message = misses.join("; ");
            if !found.findings.is_empty() {
                message += &format!(" ({})", found.findings.join("; "));
            }
            let others = self.others_that_do(options).await;
            if !others.is_empty() {
                message += &format!(
                    "; of the backends that are configured, this level would be kept on {}",
                    others.join(", ")
                );
            }
            return Err(Error::new(ErrorKind::Misconfigured, message));
        }
        // What the look at the server lowered stays lowered.
        let inner = Arc::get_mut(&mut client.inner).expect("nobody else has the client yet");
        inner.capabilities = found.capabilities;
        Ok(client)
    }

    /// Connects, and looks at the real server.
    async fn look(&self, source: &Source, options: &ClientOptions) -> Result<(LockClient, Preflight)> {
        let end = BootClock.now().saturating_add(options.call_timeout);
        let backend: Arc<dyn LockBackend> = tokio::select! {
            backend = source.connect(self.registry) => backend?,
            () = BootClock.sleep_until(end) => {
                return Err(Error::new(ErrorKind::Unavailable, "no connection within the call timeout"));
            }
        };
        let client = LockClient::with_options(backend.clone(), options.clone());
        match client.preflight().await {
            Ok(found) => Ok((client, found)),
            Err(error) => {
                backend.close().await;
                Err(error)
            }
        }
    }

    /// Returns the names of the other backends that keep what the level demands, as far as they answer.
    async fn others_that_do(&self, options: &ClientOptions) -> Vec<&str> {
        let others = self.config.backend.keys().filter(|name| **name != self.risk.backend);
        let found = join_all(others.map(async |name| {
            let source = Source::of(self.config, name)?;
            let (client, found) = self.look(&source, options).await.ok()?;
            client.inner.backend.close().await;
            self.demands.misses(&found.capabilities).is_empty().then_some(name.as_str())
        }));
        found.await.into_iter().flatten().collect()
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
