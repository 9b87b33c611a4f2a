//! The resource of the suite: compares stamps, raises its floor at the first touch, knows operations.
//!
//! It is written here again, apart from the guards that applications use, because it is the oracle of the suite.

use std::collections::HashSet;

use lockcore::Stamp;

use crate::history::{Access, ResourceLog, Verdict};

/// A number in memory that a lock guards.
#[derive(Debug)]
pub struct Register {
    log: ResourceLog,
    floor: Option<Stamp>,
    value: i64,
    operations: HashSet<(Stamp, String)>,
    pub(crate) flaw: Option<Flaw>,
}

/// What a broken resource does wrong: for the mutants of the suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub enum Flaw {
    /// Reading does not raise the floor.
    ReadsAreNoTouch,
    /// An equal fence of another owner is let through.
    NoTieBreak,
    /// Operations are not remembered.
    NoOperations,
    /// The same holder's second operation is refused.
    StrictlyGreater,
    /// The floor is not on disk.
    FloorInMemory,
}

impl Register {
    pub(crate) fn new(log: ResourceLog) -> Self {
        Self { log, floor: None, value: 0, operations: HashSet::new(), flaw: None }
    }

    /// Reads the value under a stamp; `None`: refused.
    pub fn read(&mut self, stamp: Stamp) -> Option<i64> {
        let stale = self.is_stale(stamp);
        if !stale && self.flaw != Some(Flaw::ReadsAreNoTouch) {
            self.floor = Some(stamp);
        }
        let verdict = if stale { Verdict::Stale } else { Verdict::Accepted };
        self.log.judged(stamp, "", Access::Read, verdict, self.floor, Some(self.value));
        (!stale).then_some(self.value)
    }

    /// Writes the value once per operation.
    pub fn write(&mut self, stamp: Stamp, op: &str, value: i64) -> Verdict {
        let known =
            self.flaw != Some(Flaw::NoOperations) && self.operations.contains(&(stamp, op.to_owned()));
        let verdict = if known {
            Verdict::Duplicate
        } else if self.is_stale(stamp) {
            Verdict::Stale
        } else {
            self.floor = Some(stamp);
            self.value = value;
            self.operations.insert((stamp, op.to_owned()));
            Verdict::Accepted
        };
        self.log.judged(stamp, op, Access::Write, verdict, self.floor, Some(self.value));
        verdict
    }

    /// Stops and starts again from what is on disk: text, so that nothing but what was written comes back.
    #[must_use]
    pub fn restarted(self) -> Self {
        let mut disk = self.floor.map(|stamp| format!("floor {stamp}\n")).unwrap_or_default();
        disk += &format!("value {}\n", self.value);
        for (stamp, op) in &self.operations {
            disk += &format!("op {stamp} {op}\n");
        }
        let mut started = Self::new(self.log);
        started.flaw = self.flaw;
        for line in disk.lines() {
            match line.split_once(' ').expect("a word and its value") {
                ("floor", _) if started.flaw == Some(Flaw::FloorInMemory) => {}
                ("floor", stamp) => started.floor = Some(stamp.parse().expect("a stamp")),
                ("value", value) => started.value = value.parse().expect("a number"),
                (_, done) => {
                    let (stamp, op) = done.split_once(' ').expect("a stamp and an operation");
                    started.operations.insert((stamp.parse().expect("a stamp"), op.to_owned()));
                }
            }
        }
        started
    }

    /// Returns the value, for the case's own arithmetic.
    pub fn value(&self) -> i64 {
        self.value
    }

    fn is_stale(&self, stamp: Stamp) -> bool {
        self.floor.is_some_and(|floor| {
            let equal_but_foreign = stamp.fence == floor.fence && stamp.owner != floor.owner;
            let again = self.flaw == Some(Flaw::StrictlyGreater) && stamp == floor;
            stamp.fence < floor.fence || again || (equal_but_foreign && self.flaw != Some(Flaw::NoTieBreak))
        })
    }
}
