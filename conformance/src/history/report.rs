//! What a check found, for people and for programs.

use std::{collections::BTreeMap, fmt};

use serde::Serialize;

use super::{Event, Expect, Property};

/// One broken promise.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Violation {
    /// Which.
    pub property: Property,
    /// Of which lock; empty where it concerns none alone.
    pub key: String,
    /// What happened, in one sentence.
    pub says: String,
    /// The machine may have been too slow for the bound: the process stalled around it. Not proof of anything.
    pub stalled: bool,
    /// What shows it.
    pub events: Vec<Event>,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.property, self.property.title())?;
        if !self.key.is_empty() {
            write!(f, ", {}", self.key)?;
        }
        write!(f, ": {}", self.says)?;
        if self.stalled {
            f.write_str(" (inconclusive: the process itself stalled)")?;
        }
        Ok(())
    }
}

/// What was there to be judged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Judged {
    /// Events.
    pub events: u64,
    /// Names.
    pub keys: u64,
    /// Grants.
    pub grants: u64,
    /// Confirmed renewals.
    pub renewals: u64,
    /// Releases that ended a lease.
    pub releases: u64,
    /// Acquires that were refused or timed out.
    pub refusals: u64,
    /// Calls without an answer.
    pub unknowns: u64,
    /// Losses told to an application.
    pub losses: u64,
    /// Operations that a resource accepted.
    pub accepted: u64,
    /// Operations that a resource knew already.
    pub duplicates: u64,
    /// Operations that a resource refused.
    pub stale: u64,
    /// Faults.
    pub faults: u64,
    /// Probes.
    pub probes: u64,
    /// Grants that overtook an earlier waiter, where order is not promised.
    pub bypasses: u64,
    /// How many times each property was put to the test.
    pub properties: BTreeMap<Property, u64>,
}

/// The three results of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// Everything that was expected, and nothing else.
    Pass,
    /// Neither pass nor fail: events are missing, or the machine stalled.
    Inconclusive,
    /// Something that must not be.
    Fail,
}

/// What a check found.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// The result.
    pub outcome: Outcome,
    /// Violations that fail the history or make it inconclusive.
    pub violations: Vec<Violation>,
    /// Violations that were expected or allowed.
    pub expected: Vec<Violation>,
    /// Violations beyond those listed, by property; only the first of each property are kept.
    pub more: BTreeMap<Property, u64>,
    /// Properties that should have broken and did not.
    pub unbroken: Vec<Property>,
    /// Demands that were not met, in words.
    pub unmet: Vec<String>,
    /// Events that are missing from the history.
    pub missed: u64,
    /// What was there to be judged.
    pub judged: Judged,
}

impl Report {
    /// How many violations of one property are kept.
    pub(crate) const KEPT: usize = 100;

    /// Says whether the history is as expected, conclusively.
    pub fn passed(&self) -> bool {
        self.outcome == Outcome::Pass
    }

    /// Says whether `property` was violated, expected or not.
    pub fn breaks(&self, property: Property) -> bool {
        self.violations.iter().chain(&self.expected).any(|v| v.property == property && !v.stalled)
    }

    /// Returns the properties that were violated, expected or not, each once.
    pub fn broken(&self) -> Vec<Property> {
        let mut all: Vec<_> =
            self.violations.iter().chain(&self.expected).filter(|v| !v.stalled).map(|v| v.property).collect();
        all.sort();
        all.dedup();
        all
    }

    pub(crate) fn settle(
        found: Vec<Violation>,
        judged: Judged,
        missed: u64,
        unmet: Vec<String>,
        expectation: impl Fn(Property) -> Expect,
    ) -> Self {
        let mut report = Self {
            outcome: Outcome::Pass,
            violations: Vec::new(),
            expected: Vec::new(),
            more: BTreeMap::new(),
            unbroken: Vec::new(),
            unmet,
            missed,
            judged,
        };
        let mut kept: BTreeMap<Property, usize> = BTreeMap::new();
        let mut broken: BTreeMap<Property, bool> = BTreeMap::new();
        for violation in found {
            let allowed = match expectation(violation.property) {
                Expect::NotJudged => continue,
                Expect::Holds => false,
                Expect::Breaks | Expect::May => true,
            };
            *broken.entry(violation.property).or_default() |= !violation.stalled;
            if !allowed {
                // What looks like a violation may be one of the events that are missing.
                let sure = !violation.stalled && missed == 0;
                let weight = if sure { Outcome::Fail } else { Outcome::Inconclusive };
                report.outcome = report.outcome.max(weight);
            }
            let count = kept.entry(violation.property).or_default();
            *count += 1;
            if *count > Self::KEPT {
                *report.more.entry(violation.property).or_default() += 1;
            } else if allowed {
                report.expected.push(violation);
            } else {
                report.violations.push(violation);
            }
        }
        report.unbroken = Property::ALL
            .iter()
            .copied()
            .filter(|p| expectation(*p) == Expect::Breaks && !broken.get(p).copied().unwrap_or(false))
            .collect();
        if !report.unbroken.is_empty() || !report.unmet.is_empty() {
            report.outcome = Outcome::Fail;
        }
        if report.missed > 0 {
            report.outcome = report.outcome.max(Outcome::Inconclusive);
        }
        report
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for violation in &self.violations {
            writeln!(f, "{violation}")?;
        }
        for violation in &self.expected {
            writeln!(f, "as expected: {violation}")?;
        }
        for (property, count) in &self.more {
            writeln!(f, "{property} {}: {count} more like these", property.title())?;
        }
        for property in &self.unbroken {
            writeln!(
                f,
                "{property} {}: should have been broken and was not: the fault did not bite, or the store has \
                 changed",
                property.title()
            )?;
        }
        for unmet in &self.unmet {
            writeln!(f, "not seen: {unmet}")?;
        }
        if self.missed > 0 {
            writeln!(f, "incomplete: at least {} events are missing from this history", self.missed)?;
        }
        let j = &self.judged;
        let word = match self.outcome {
            Outcome::Pass => "passed",
            Outcome::Inconclusive => "inconclusive",
            Outcome::Fail => "failed",
        };
        write!(
            f,
            "{word}: {} of {}, {}, {}, {}, {}, {} by the resource ({} stale)",
            count(j.events, "event"),
            count(j.keys, "name"),
            count(j.grants, "grant"),
            count(j.renewals, "renewal"),
            count(j.releases, "release"),
            count(j.faults, "fault"),
            count(j.accepted + j.duplicates + j.stale, "verdict"),
            j.stale,
        )
    }
}

fn count(n: u64, noun: &str) -> String {
    if n == 1 { format!("1 {noun}") } else { format!("{n} {noun}s") }
}
