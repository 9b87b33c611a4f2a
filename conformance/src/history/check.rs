//! The check: every property has its own validator and its own words.

pub(super) mod belief;
mod deadline;
mod honesty;
mod identity;
pub(super) mod index;
mod isolation;
mod liveness;
mod loss;
mod resource;
mod tenure;

use super::{
    Answer, Demand, Event, Expect, History, Judged, Property, Report, Rules, Verdict, Violation, What, Why,
};
use index::{Index, KeyView};

/// Judges a history under `rules`.
///
/// The cost is that of a sort: n log n for n events, with one pass per property.
pub fn check(history: &History, rules: &Rules) -> Report {
    let mut court = Court {
        index: Index::new(history),
        rules,
        found: Vec::new(),
        judged: Judged { events: history.events.len() as u64, ..Judged::default() },
    };
    court.count();

    identity::check(&mut court);
    isolation::check(&mut court);
    for key in 0..court.index.keys.len() {
        tenure::check(&mut court, key);
        belief::check(&mut court, key);
        resource::check(&mut court, key);
        deadline::check(&mut court, key);
        loss::check(&mut court, key);
        honesty::check(&mut court, key);
        liveness::check(&mut court, key);
    }
    liveness::check_clients(&mut court);

    let unmet = court.unmet();
    let missed = court.index.missed;
    Report::settle(court.found, court.judged, missed, unmet, |p| rules.expectation(p))
}

/// What the validators share: the history, sorted into calls and grants, and the place for what they find.
struct Court<'h> {
    index: Index<'h>,
    rules: &'h Rules,
    found: Vec<Violation>,
    judged: Judged,
}

impl<'h> Court<'h> {
    /// Returns one name's part of the history.
    fn key(&self, key: usize) -> &KeyView<'h> {
        &self.index.keys[key]
    }

    /// Says whether a property is worth its pass.
    fn wants(&self, property: Property) -> bool {
        self.rules.expectation(property) != Expect::NotJudged
    }

    /// Counts that a property was put to the test, if it is judged.
    fn tested(&mut self, property: Property, times: usize) {
        if times > 0 && self.wants(property) {
            *self.judged.properties.entry(property).or_default() += times as u64;
        }
    }

    /// Notes a violation that no slow machine can excuse.
    fn violation(&mut self, property: Property, key: usize, says: String, events: &[usize]) {
        let name = self.index.keys[key].name;
        self.accuse(property, name, says, events, false);
    }

    /// Notes a violation of something that is bounded from above in time: between `from` and `to` a stall of a
    /// quarter of `scale` excuses it.
    fn late(
        &mut self,
        property: Property,
        key: usize,
        says: String,
        events: &[usize],
        (from, to, scale): (u64, u64, u64),
    ) {
        let stalled = self.index.stalled(from, to, scale / 4);
        let name = self.index.keys[key].name;
        self.accuse(property, name, says, events, stalled);
    }

    fn accuse(&mut self, property: Property, key: &str, says: String, events: &[usize], stalled: bool) {
        let events = events.iter().map(|e| self.index.events[*e].clone()).collect();
        self.found.push(Violation { property, key: key.to_owned(), says, stalled, events });
    }

    fn count(&mut self) {
        let judged = &mut self.judged;
        judged.keys = self.index.keys.len() as u64;
        for key in &self.index.keys {
            judged.grants += key.grants.len() as u64;
            for &op in &key.ops {
                let op = &self.index.ops[op];
                for &done in &op.done {
                    match &self.index.events[done].what {
                        What::Ok { answer: Answer { released: Some(true), .. } } => judged.releases += 1,
                        What::Ok { .. } if op.is_renew() => judged.renewals += 1,
                        What::Fail { why: Why::Held | Why::WaitTimeout } => judged.refusals += 1,
                        What::Unknown { .. } => judged.unknowns += 1,
                        _ => {}
                    }
                }
            }
        }
        for event in self.index.events {
            match &event.what {
                What::Lost { .. } => judged.losses += 1,
                What::Probe { .. } => judged.probes += 1,
                What::Resource { verdict: Verdict::Accepted, .. } => judged.accepted += 1,
                What::Resource { verdict: Verdict::Duplicate, .. } => judged.duplicates += 1,
                What::Resource { verdict: Verdict::Stale, .. } => judged.stale += 1,
                _ => {}
            }
        }
        judged.faults = self.index.faults.len() as u64;
    }

    /// Says which demands were not met.
    fn unmet(&self) -> Vec<String> {
        let j = &self.judged;
        let mut unmet = Vec::new();
        let mut least = |what: &str, seen: u64, least: u64| {
            if seen < least {
                unmet.push(format!("{least} {what} were to be seen, {seen} were"));
            }
        };
        for demand in &self.rules.demands {
            match *demand {
                Demand::Grants(n) => least("grants", j.grants, n),
                Demand::Renewals(n) => least("confirmed renewals", j.renewals, n),
                Demand::Releases(n) => least("releases", j.releases, n),
                Demand::StaleVerdicts(n) => least("stale verdicts", j.stale, n),
                Demand::AcceptedVerdicts(n) => least("accepted operations", j.accepted, n),
                Demand::Unknowns(n) => least("calls without an answer", j.unknowns, n),
                Demand::Judged(property, n) => {
                    let seen = j.properties.get(&property).copied().unwrap_or(0);
                    least(&format!("tests of {property} ({})", property.title()), seen, n);
                }
                Demand::FaultsHitCalls => {}
            }
        }
        if self.rules.demands.contains(&Demand::FaultsHitCalls) {
            for fault in &self.index.faults {
                let hits = self.index.ops.iter().any(|op| op.inv <= fault.end && op.last >= fault.begin);
                if !hits {
                    unmet.push(format!("a call during the fault {}", fault.words()));
                }
            }
            if self.index.faults.is_empty() {
                unmet.push("a fault".into());
            }
        }
        unmet
    }
}

/// Names an event's position for a sentence.
fn who(event: &Event) -> &str {
    if event.client.is_empty() { "the test bench" } else { &event.client }
}
