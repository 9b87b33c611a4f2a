//! Everything that can be wrong in a configuration before any server is asked.

use std::{collections::BTreeSet, time::Duration};

use super::{
    Config, LockConfig, Problem, Registry, RiskConfig, Start, WhenUnavailable, listed,
    risk::{Demands, LEVELS, built},
};
use crate::{
    capabilities::{Consistency, FenceSource},
    name::{LockName, check_namespace},
    url::is_secret,
};

/// TTL of a lease where neither file nor code says another; the client's default.
const DEFAULT_TTL: Duration = Duration::from_secs(30);

pub(super) fn problems(config: &Config, registry: &Registry) -> Vec<Problem> {
    let mut checker = Checker { config, registry, problems: Vec::new() };
    checker.namespace();
    checker.backends();
    checker.bridges();
    checker.levels();
    checker.locks();
    checker.problems
}

struct Checker<'a> {
    config: &'a Config,
    registry: &'a Registry,
    problems: Vec<Problem>,
}

impl Checker<'_> {
    fn add(&mut self, path: impl Into<String>, message: impl Into<String>) {
        self.problems.push(Problem::new(path, message));
    }

    fn namespace(&mut self) {
        let namespace = &self.config.namespace;
        if namespace.is_empty() {
            self.add(
                "namespace",
                "is required; it keeps deployments apart that share a store, like \"shop-prod\"",
            );
        } else if let Err(error) = check_namespace(namespace) {
            self.add("namespace", error.message());
        }
    }

    fn backends(&mut self) {
        for (name, backend) in &self.config.backend {
            let path = format!("backend.{}", key(name));
            if name.is_empty() {
                self.add(&path, "a backend needs a name");
            }
            let mut doubts = 0;
            if backend.url.has_secret() {
                doubts += 1;
                self.add(format!("{path}.url"), "holds a password; use password-file or password-env");
            }
            for option in backend.options.keys().filter(|option| is_secret(option)) {
                doubts += 1;
                self.add(
                    format!("{path}.options.{}", key(option)),
                    "holds a secret; use password-file or password-env",
                );
            }
            if backend.user.is_some() && backend.url.user().is_some() {
                self.add(format!("{path}.user"), "stands in the URL, too; once is enough");
            }
            if backend.password_file.is_some() && backend.password_env.is_some() {
                self.add(format!("{path}.password-env"), "stands beside password-file; use one of them");
            }
            if backend.password_file.as_ref().is_some_and(|f| f.is_relative() && f.components().count() != 1)
            {
                self.add(
                    format!("{path}.password-file"),
                    "is relative; write an absolute path, or one name below $CREDENTIALS_DIRECTORY",
                );
            }
            let compiled_in = self.registry.schemes().any(|scheme| scheme == backend.url.scheme());
            match self.registry.check(backend) {
                Err(error) if !compiled_in => self.add(format!("{path}.url"), error.message()),
                // A connector would report the same option a second time.
                Err(error) if doubts == 0 => self.add(&path, error.message()),
                _ => {}
            }
        }
    }

    fn bridges(&mut self) {
        for (name, bridge) in &self.config.bridge {
            let path = format!("bridge.{}", key(name));
            if name.is_empty() {
                self.add(&path, "a bridge needs a name");
            } else if let Err(error) = crate::migrate::check_name(name) {
                self.add(&path, error.message());
            }
            if self.config.backend.contains_key(name) {
                self.add(&path, "has the name of a backend; a level could mean either");
            }
            let circle = bridge.from != bridge.to && self.leads_back(name);
            for (side, target) in [("from", &bridge.from), ("to", &bridge.to)] {
                let path = format!("{path}.{side}");
                self.reference(&path, target);
                if self.config.bridge.contains_key(target)
                    && !self.config.backend.contains_key(target)
                    && !circle
                {
                    self.add(path, "is a bridge; it joins two stores, so end one move before the next");
                }
            }
            let url = |target: &String| self.config.backend.get(target).map(|backend| &backend.url);
            if bridge.from == bridge.to {
                self.add(format!("{path}.to"), "is the store that locks come from; a bridge needs two");
            } else if circle {
                self.add(&path, "leads back to itself");
            } else if url(&bridge.from).is_some() && url(&bridge.from) == url(&bridge.to) {
                self.add(
                    format!("{path}.to"),
                    "has the address of the store that locks come from; a bridge needs two",
                );
            }
            if bridge.membership == Some(Duration::ZERO) {
                self.add(format!("{path}.membership"), "must be more than zero");
            }
        }
    }

    /// No lease outlives its membership, so a longer TTL can never be granted.
    fn fits_membership(&mut self, path: &str, backend: &str, ttl: Duration) {
        let Some(bridge) = self.config.bridge.get(backend) else { return };
        let membership = bridge.membership.unwrap_or(crate::migrate::MEMBERSHIP);
        if ttl > membership && !membership.is_zero() {
            self.add(
                format!("{path}.ttl"),
                format!(
                    "{} (lock-delay included) is longer than a membership of bridge.{}, which lasts {}; no lease \
                     outlives it: shorten the one, or lengthen the other with `membership`",
                    crate::text::show_duration(ttl),
                    key(backend),
                    crate::text::show_duration(membership)
                ),
            );
        }
    }

    // Follows a bridge to the stores below it; every bridge of a circle is reported.
    fn leads_back(&self, start: &str) -> bool {
        let mut seen = BTreeSet::new();
        let mut ahead = vec![start];
        while let Some(name) = ahead.pop() {
            if let Some(bridge) = self.config.bridge.get(name) {
                for target in [bridge.from.as_str(), bridge.to.as_str()] {
                    if target == start {
                        return true;
                    }
                    if seen.insert(target) {
                        ahead.push(target);
                    }
                }
            }
        }
        false
    }

    fn reference(&mut self, path: &str, target: &str) {
        let Config { backend, bridge, .. } = self.config;
        if !backend.contains_key(target) && !bridge.contains_key(target) {
            let have =
                listed(backend.keys().chain(bridge.keys()).map(String::as_str).collect::<BTreeSet<_>>());
            self.add(path, format!("{target:?} is not defined; have {have}"));
        }
    }

    fn levels(&mut self) {
        for (name, risk) in &self.config.risk {
            let path = format!("risk.{}", key(name));
            if name.is_empty() {
                self.add(&path, "a level needs a name");
            }
            self.reference(&format!("{path}.backend"), &risk.backend);
            self.level(&path, name, risk);
            let RiskConfig { ttl, wait, max_hold, stop_margin, lock_delay, .. } = risk;
            let numbers = LockConfig {
                ttl: *ttl,
                wait: *wait,
                max_hold: *max_hold,
                stop_margin: *stop_margin,
                lock_delay: *lock_delay,
            };
            self.numbers(&path, &numbers, DEFAULT_TTL);
            let ttl = ttl.unwrap_or(DEFAULT_TTL).saturating_add(lock_delay.unwrap_or_default());
            self.fits_membership(&path, &risk.backend, ttl);
        }
    }

    fn level(&mut self, path: &str, name: &str, risk: &RiskConfig) {
        let demands = Demands::of(name, risk);
        match built(name) {
            Some(level) => {
                if level.needs_max_hold && risk.max_hold.is_none() {
                    self.add(format!("{path}.max-hold"), "is required at this level");
                }
                if !level.may_be_lazy && risk.start == Start::Lazy {
                    self.add(format!("{path}.start"), "must be \"strict\" at this level");
                }
                let least = Demands::of_level(name);
                if let Some(asked) = risk.require.consistency.filter(|asked| *asked < least.consistency) {
                    self.lowers(
                        &format!("{path}.require.consistency"),
                        consistency(asked),
                        consistency(least.consistency),
                    );
                }
                if let Some(asked) = risk.require.fence.filter(|asked| *asked < least.fence) {
                    self.lowers(&format!("{path}.require.fence"), fence(asked), fence(least.fence));
                }
            }
            None => {
                // A misspelt level would have none of the demands that its author counts on.
                if let Some(meant) = LEVELS.iter().find(|level| distance(level.name, name) <= 2) {
                    self.add(
                        path,
                        format!(
                            "is not the built-in level {:?} and has none of its demands; a level of your own needs a \
                             name that nobody can mistake for it",
                            meant.name
                        ),
                    );
                }
            }
        }
        if risk.when_unavailable == WhenUnavailable::AllowOpen && demands.fence > FenceSource::Volatile {
            self.add(
                format!("{path}.when-unavailable"),
                "cannot be \"allow-open\" at a level that demands a fence: who goes on without the lock has none",
            );
        }
    }

    fn lowers(&mut self, path: &str, asked: &str, least: &str) {
        self.add(
            path,
            format!(
                "{asked:?} lowers what this level demands ({least:?}); a weaker level needs a name of its own"
            ),
        );
    }

    fn numbers(&mut self, path: &str, numbers: &LockConfig, default_ttl: Duration) {
        for (name, number) in [("ttl", numbers.ttl), ("max-hold", numbers.max_hold)] {
            if number == Some(Duration::ZERO) {
                self.add(format!("{path}.{name}"), "must be more than zero");
            }
        }
        let ttl = numbers.ttl.unwrap_or(default_ttl);
        if !ttl.is_zero() && numbers.stop_margin.is_some_and(|margin| margin >= ttl) {
            self.add(
                format!("{path}.stop-margin"),
                format!("leaves nothing of a TTL of {}", crate::text::show_duration(ttl)),
            );
        }
    }

    fn locks(&mut self) {
        // A lock may be taken at any level, so its margin need only fit the longest TTL that a level gives.
        let longest = self.config.risk.values().map(|risk| risk.ttl.unwrap_or(DEFAULT_TTL)).max();
        for (pattern, numbers) in &self.config.lock {
            let path = format!("lock.{}", key(pattern));
            let name = pattern.strip_suffix("/*").unwrap_or(pattern);
            if name.contains('*') || name.is_empty() {
                self.add(
                    &path,
                    "is neither a name nor `prefix/*`; numbers for all locks of a level stand at the level",
                );
            } else if let Err(error) = LockName::parse(name) {
                self.add(&path, error.message());
            }
            self.numbers(&path, numbers, longest.unwrap_or(DEFAULT_TTL));
            // With one level there is no other at which it could be taken.
            let mut levels = self.config.risk.values();
            if let (Some(only), None, Some(ttl)) = (levels.next(), levels.next(), numbers.ttl) {
                let delay = numbers.lock_delay.or(only.lock_delay).unwrap_or_default();
                self.fits_membership(&path, &only.backend, ttl.saturating_add(delay));
            }
        }
    }
}

fn consistency(value: Consistency) -> &'static str {
    match value {
        Consistency::Process => "process",
        Consistency::Replicated => "replicated",
        Consistency::SingleServer => "single-server",
        Consistency::Linearizable => "linearizable",
    }
}

fn fence(value: FenceSource) -> &'static str {
    match value {
        FenceSource::Volatile => "volatile",
        FenceSource::ClockBounded => "clock-bounded",
        FenceSource::Durable => "durable",
    }
}

// Keys that TOML needs in quotes are shown in quotes, so that a path can be searched for in the file.
fn key(name: &str) -> String {
    let bare =
        !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'));
    if bare { name.into() } else { format!("{name:?}") }
}

// Levenshtein's, over two rows.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], i + 1);
        for (j, y) in b.iter().enumerate() {
            let change = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = change.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_count_changes() {
        for (a, b, expected) in [
            ("critical", "critical", 0),
            ("critical", "critcal", 1),
            ("guarded", "guraded", 2),
            ("a", "", 1),
            ("", "", 0),
        ] {
            assert_eq!(distance(a, b), expected, "{a} {b}");
        }
    }
}
