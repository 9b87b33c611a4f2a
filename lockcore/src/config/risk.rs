//! What a risk demands of a store, and whether a store keeps it.

use std::{fmt, time::Duration};

use serde::{Deserialize, Serialize};

use super::duration;
use crate::{
    capabilities::{Capabilities, Consistency, FenceSource, Survives, WakeUp},
    text::show_duration,
};

/// One risk level: which store, and with which numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[non_exhaustive]
pub struct RiskConfig {
    /// The store, by name: a backend or a bridge.
    pub backend: String,
    /// TTL of a lease that does not ask for another. The client's default where missing.
    #[serde(default, with = "duration", skip_serializing_if = "Option::is_none")]
    pub ttl: Option<Duration>,
    /// Wait budget of an acquire that does not ask for another. The client's default where missing.
    #[serde(default, with = "duration", skip_serializing_if = "Option::is_none")]
    pub wait: Option<Duration>,
    /// Longest hold, renewals included. Required at `guarded` and `critical`: a forgotten guard would be renewed for
    /// ever.
    #[serde(default, with = "duration", skip_serializing_if = "Option::is_none")]
    pub max_hold: Option<Duration>,
    /// How long before its deadline a lease counts as lost, so that work can stop in time.
    #[serde(default, with = "duration", skip_serializing_if = "Option::is_none")]
    pub stop_margin: Option<Duration>,
    /// How long the store keeps a lock closed after an unclean end.
    #[serde(default, with = "duration", skip_serializing_if = "Option::is_none")]
    pub lock_delay: Option<Duration>,
    /// Whether the store must be there when the application starts.
    #[serde(default)]
    pub start: Start,
    /// Whether an application may go on without the lock when the store cannot be asked.
    #[serde(default)]
    pub when_unavailable: WhenUnavailable,
    /// What this level demands beyond its built-in demands.
    #[serde(default)]
    pub require: Requirements,
}

impl RiskConfig {
    /// Starts from a store.
    pub fn new(backend: impl Into<String>) -> Self {
        Self {
            backend: backend.into(),
            ttl: None,
            wait: None,
            max_hold: None,
            stop_margin: None,
            lock_delay: None,
            start: Start::default(),
            when_unavailable: WhenUnavailable::default(),
            require: Requirements::default(),
        }
    }

    /// Sets fields in one expression.
    #[must_use]
    pub fn with(mut self, set: impl FnOnce(&mut Self)) -> Self {
        set(&mut self);
        self
    }
}

/// Whether the store must be there when the application starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Start {
    /// Yes: connect and look at it, or refuse to start.
    #[default]
    Strict,
    /// No: connect when the first lock is taken, so that a cache that is down does not take the service with it.
    Lazy,
}

/// Whether an application may go on without the lock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum WhenUnavailable {
    /// No: an error.
    #[default]
    Fail,
    /// Yes, by the one call that says so in its type.
    AllowOpen,
}

/// Demands that a file adds to those of the level.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
#[non_exhaustive]
pub struct Requirements {
    /// Whose agreement must stand behind a grant, at least.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub consistency: Option<Consistency>,
    /// How far the fence must be trusted, at least.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fence: Option<FenceSource>,
    /// How waiters must wake, at least.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wake_up: Option<WakeUp>,
    /// Grants in order of arrival.
    #[serde(default)]
    pub fair: bool,
    /// What a held lock must outlive.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub survives: Vec<Survival>,
}

/// One thing that a held lock may have to outlive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Survival {
    /// The server or the machine restarts.
    Restart,
    /// Another server takes over.
    Failover,
    /// The server's wall clock steps.
    ClockStep,
    /// The server stops for a while and goes on.
    Pause,
}

/// What a level demands of a store: the built-in demands, raised by the file's.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Demands {
    /// Whose agreement must stand behind a grant, at least.
    pub consistency: Consistency,
    /// How far the fence must be trusted, at least.
    pub fence: FenceSource,
    /// How waiters must wake, at least.
    pub wake_up: WakeUp,
    /// Grants in order of arrival.
    pub fair: bool,
    /// What a held lock must outlive.
    pub survives: Survives,
    /// The level's TTL, lock-delay included, which must be accepted.
    pub ttl: Option<Duration>,
    /// Keeps a lock closed after an unclean end.
    pub lock_delay: bool,
}

/// What a built-in level is, beside its demands of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Built {
    pub(super) name: &'static str,
    pub(super) needs_max_hold: bool,
    pub(super) may_be_lazy: bool,
}

pub(super) const LEVELS: [Built; 3] = [
    Built { name: "efficiency", needs_max_hold: false, may_be_lazy: true },
    Built { name: "guarded", needs_max_hold: true, may_be_lazy: true },
    Built { name: "critical", needs_max_hold: true, may_be_lazy: false },
];

pub(super) fn built(level: &str) -> Option<Built> {
    LEVELS.into_iter().find(|built| built.name == level)
}

impl Demands {
    /// Demands nothing.
    pub fn none() -> Self {
        Self {
            consistency: Consistency::Process,
            fence: FenceSource::Volatile,
            wake_up: WakeUp::Poll,
            fair: false,
            survives: Survives::default(),
            ttl: None,
            lock_delay: false,
        }
    }

    /// Returns the built-in demands of a level; a level of another name has none.
    ///
    /// `efficiency`: none, double work is only a waste. `guarded`: a fence that outlives a restart of the store, for
    /// the resource to check. `critical`: a linearizable store whose durable fence and held locks outlive restart and
    /// failover.
    pub fn of_level(level: &str) -> Self {
        let mut demands = Self::none();
        match level {
            "guarded" => demands.fence = FenceSource::ClockBounded,
            "critical" => {
                demands.consistency = Consistency::Linearizable;
                demands.fence = FenceSource::Durable;
                demands.survives.restart = true;
                demands.survives.failover = true;
            }
            _ => {}
        }
        demands
    }

    /// Returns what a level of a file demands: the built-in demands and the file's, whichever is more.
    pub fn of(level: &str, risk: &RiskConfig) -> Self {
        let mut demands = Self::of_level(level);
        let Requirements { consistency, fence, wake_up, fair, survives } = &risk.require;
        demands.consistency = demands.consistency.max(consistency.unwrap_or(Consistency::Process));
        demands.fence = demands.fence.max(fence.unwrap_or(FenceSource::Volatile));
        demands.wake_up = demands.wake_up.max(wake_up.unwrap_or(WakeUp::Poll));
        demands.fair |= fair;
        for survival in survives {
            match survival {
                Survival::Restart => demands.survives.restart = true,
                Survival::Failover => demands.survives.failover = true,
                Survival::ClockStep => demands.survives.clock_step = true,
                Survival::Pause => demands.survives.pause = true,
            }
        }
        let delay = risk.lock_delay.unwrap_or_default();
        demands.lock_delay = !delay.is_zero();
        demands.ttl = risk.ttl.map(|ttl| ttl.saturating_add(delay));
        demands
    }

    /// Compares with what a store promises and names everything that is missing; nothing when the demands are met.
    pub fn misses(&self, has: &Capabilities) -> Vec<String> {
        let mut misses = Vec::new();
        at_least("consistency", self.consistency, has.consistency, &mut misses);
        at_least("fence", self.fence, has.fence, &mut misses);
        at_least("wake-up", self.wake_up, has.wake_up, &mut misses);
        if self.fair && !has.fair {
            misses.push("must grant in order of arrival, does not".into());
        }
        for (needs, has, what) in [
            (self.survives.restart, has.survives.restart, "a server restart"),
            (self.survives.failover, has.survives.failover, "a failover"),
            (self.survives.clock_step, has.survives.clock_step, "a step of the server's clock"),
            (self.survives.pause, has.survives.pause, "a pause of the server"),
        ] {
            if needs && !has {
                misses.push(format!("must survive {what}, does not"));
            }
        }
        if let Some(ttl) = self.ttl.filter(|ttl| !has.ttl.contains(ttl)) {
            let (least, most) = has.ttl.clone().into_inner();
            misses.push(format!(
                "ttl: needs {}, accepts {} to {}",
                show_duration(ttl),
                show_duration(least),
                show_duration(most)
            ));
        }
        if self.lock_delay && !has.lock_delay {
            misses.push("must keep a lock closed for its lock-delay after an unclean end, does not".into());
        }
        misses
    }
}

fn at_least<T: PartialOrd + fmt::Debug>(what: &str, needs: T, has: T, misses: &mut Vec<String>) {
    if has < needs {
        misses.push(format!("{what}: needs {needs:?}, has {has:?}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strong() -> Capabilities {
        Capabilities::weakest("strong").with(|c| {
            c.consistency = Consistency::Linearizable;
            c.fence = FenceSource::Durable;
            c.wake_up = WakeUp::Push;
            c.fair = true;
            c.survives.restart = true;
            c.survives.failover = true;
            c.survives.clock_step = true;
            c.survives.pause = true;
            c.lock_delay = true;
        })
    }

    fn everything() -> RiskConfig {
        RiskConfig::new("x").with(|r| {
            r.ttl = Some(Duration::from_secs(86_400));
            r.lock_delay = Some(Duration::from_secs(5));
            r.require = Requirements {
                consistency: Some(Consistency::Linearizable),
                fence: Some(FenceSource::Durable),
                wake_up: Some(WakeUp::Push),
                fair: true,
                survives: vec![Survival::Restart, Survival::Failover, Survival::ClockStep, Survival::Pause],
            };
        })
    }

    #[test]
    fn every_miss_is_named() {
        let demands = Demands::of("own", &everything());
        assert_eq!(
            demands.misses(&Capabilities::weakest("weak")),
            [
                "consistency: needs Linearizable, has Process",
                "fence: needs Durable, has Volatile",
                "wake-up: needs Push, has Poll",
                "must grant in order of arrival, does not",
                "must survive a server restart, does not",
                "must survive a failover, does not",
                "must survive a step of the server's clock, does not",
                "must survive a pause of the server, does not",
                "ttl: needs 1d5s, accepts 1ms to 1d",
                "must keep a lock closed for its lock-delay after an unclean end, does not",
            ]
        );
        assert_eq!(demands.misses(&strong()), ["ttl: needs 1d5s, accepts 1ms to 1d"]);
    }

    #[test]
    fn built_in_levels_rise_from_nothing() {
        let weak = Capabilities::weakest("weak");
        assert_eq!(Demands::of_level("efficiency").misses(&weak), [""; 0]);
        assert_eq!(Demands::of_level("own").misses(&weak), [""; 0]);
        assert_eq!(Demands::of_level("guarded").misses(&weak), ["fence: needs ClockBounded, has Volatile"]);
        assert_eq!(Demands::of_level("critical").misses(&weak).len(), 4);
        assert_eq!(Demands::of_level("critical").misses(&strong()), [""; 0]);
    }

    #[test]
    fn a_file_raises_demands_and_cannot_lower_them() {
        let lower = RiskConfig::new("x").with(|r| {
            r.require.consistency = Some(Consistency::Process);
            r.require.fence = Some(FenceSource::Volatile);
        });
        assert_eq!(Demands::of("critical", &lower), Demands::of_level("critical"));
        let raise = RiskConfig::new("x").with(|r| r.require.fence = Some(FenceSource::Durable));
        assert_eq!(Demands::of("guarded", &raise).fence, FenceSource::Durable);
    }
}
