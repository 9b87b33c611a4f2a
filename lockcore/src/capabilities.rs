//! What a backend promises. The suite checks every promise both ways.

use std::{ops::RangeInclusive, time::Duration};

/// Whose agreement stands behind a grant, weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "config",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "kebab-case")
)]
#[non_exhaustive]
pub enum Consistency {
    /// One process; nobody outside it is excluded.
    Process,
    /// One server decides, and a failover may forget what it decided.
    Replicated,
    /// One server or one file decides; while it is away, nobody does.
    SingleServer,
    /// A majority agreed before the grant was answered.
    Linearizable,
}

/// How far the fence can be trusted, weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "config",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "kebab-case")
)]
#[non_exhaustive]
pub enum FenceSource {
    /// Forgotten with the process.
    Volatile,
    /// Survives loss of data as long as the servers' clocks keep within the gap between two grants.
    ClockBounded,
    /// Part of what the store has agreed on and keeps.
    Durable,
}

/// How a waiter learns that its turn has come, weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(
    feature = "config",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "kebab-case")
)]
#[non_exhaustive]
pub enum WakeUp {
    /// It asks again.
    Poll,
    /// It is told, and asks again as a safety net.
    Push,
}

/// What a held lock outlives. Starts with nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Survives {
    /// The server or the machine restarts.
    pub restart: bool,
    /// Another server takes over.
    pub failover: bool,
    /// The server's wall clock steps.
    pub clock_step: bool,
    /// The server stops for a while and goes on.
    pub pause: bool,
}

/// Limits and promises. Starts at the weakest; a backend raises what it keeps.
///
/// Fields may be added; a new field starts at the weakest promise, and lockcore refuses what a capability does not
/// cover before the backend is asked. So an old backend never ignores a new demand in silence.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// Short name for messages, logs and metrics.
    pub backend: &'static str,
    /// Whose agreement stands behind a grant.
    pub consistency: Consistency,
    /// How far the fence can be trusted.
    pub fence: FenceSource,
    /// How waiters wake.
    pub wake_up: WakeUp,
    /// Grants in order of arrival.
    pub fair: bool,
    /// What a held lock outlives.
    pub survives: Survives,
    /// TTLs that are accepted; others are refused before the backend is asked.
    pub ttl: RangeInclusive<Duration>,
    /// TTLs are rounded up to a multiple of this.
    pub ttl_step: Duration,
    /// Honours a fence floor.
    pub fence_floor: bool,
    /// Keeps labels.
    pub labels: bool,
    /// Keeps the lock closed for a while after an unclean end.
    pub lock_delay: bool,
    /// Tells by event that the store ended a lease, before the deadline.
    pub pushes_loss: bool,
    /// Largest useful batch of `renew_many`; 1 when there is nothing to gain.
    pub renew_batch: usize,
}

impl Capabilities {
    /// The weakest promises: this process, forgetful fence, polling, unfair, TTL 1 ms to a day.
    pub fn weakest(backend: &'static str) -> Self {
        Self {
            backend,
            consistency: Consistency::Process,
            fence: FenceSource::Volatile,
            wake_up: WakeUp::Poll,
            fair: false,
            survives: Survives::default(),
            ttl: Duration::from_millis(1)..=Duration::from_secs(86_400),
            ttl_step: Duration::from_millis(1),
            fence_floor: false,
            labels: false,
            lock_delay: false,
            pushes_loss: false,
            renew_batch: 1,
        }
    }

    /// Raises promises in one expression.
    #[must_use]
    pub fn with(mut self, raise: impl FnOnce(&mut Self)) -> Self {
        raise(&mut self);
        self
    }
}

/// The claims that stand after a look at the server, and what lowered them.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Preflight {
    /// The claims that stand.
    pub capabilities: Capabilities,
    /// What lowered them and how to fix it, one sentence each.
    pub findings: Vec<String>,
    /// The server's name and version, such as `Redis 7.0.15`, where it tells.
    pub server: Option<String>,
}

impl Preflight {
    /// Starts from claims that nothing lowered.
    pub fn clean(capabilities: Capabilities) -> Self {
        Self { capabilities, findings: Vec::new(), server: None }
    }

    /// Lowers a claim and says why and how to fix it.
    pub fn lower(&mut self, finding: impl Into<String>, change: impl FnOnce(&mut Capabilities)) {
        change(&mut self.capabilities);
        self.findings.push(finding.into());
    }
}
