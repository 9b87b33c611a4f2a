//! The register against its promise, and every guard against the register, on random sequences.

use std::collections::BTreeSet;

use lockcore_fenced::{Fence, OwnerDigest, Register, Stamp, Verdict};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    Touch(Stamp),
    Admit(Stamp, &'static str),
    Forget(Stamp, &'static str),
    /// The resource stops and comes back with what it saved.
    Restart,
}

fn stamps() -> impl Strategy<Value = Stamp> {
    // Few fences and owners, so that they meet; the far end of the range, so that nothing rounds or wraps.
    let fences = prop_oneof![1..=5_i64, (1_i64 << 53)..=((1 << 53) + 2), (i64::MAX - 2)..=i64::MAX];
    (fences, prop_oneof![Just(i64::MIN), Just(0), Just(-1), Just(7)])
        .prop_map(|(fence, owner)| Stamp::new(Fence::new(fence).unwrap(), OwnerDigest::from_i64(owner)))
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let op = prop_oneof![Just("a"), Just("b"), Just(""), Just("a'); --")];
    let step = prop_oneof![
        3 => stamps().prop_map(Step::Touch),
        8 => (stamps(), op.clone()).prop_map(|(stamp, op)| Step::Admit(stamp, op)),
        1 => (stamps(), op).prop_map(|(stamp, op)| Step::Forget(stamp, op)),
        1 => Just(Step::Restart),
    ];
    // Mostly rising, or everything after the first high fence would be stale.
    prop::collection::vec(step, 1..60).prop_perturb(|mut steps, mut rng| {
        if rng.random_bool(0.7) {
            let window = rng.random_range(2..8_usize);
            for chunk in 0..steps.len().div_ceil(window) {
                let end = (chunk * window + 2 * window).min(steps.len());
                steps[chunk * window..end].sort_by_key(|step| match step {
                    Step::Touch(s) | Step::Admit(s, _) | Step::Forget(s, _) => s.fence.get(),
                    Step::Restart => 4,
                });
            }
        }
        steps
    })
}

fn restarted(register: &Register) -> Register {
    let saved: Vec<(Stamp, String)> = register.operations().map(|(s, op)| (s, op.to_owned())).collect();
    Register::restore(register.floor(), saved)
}

/// Remembers everything for ever, and compares in the plainest way.
#[derive(Default)]
struct Naive {
    floor: Option<Stamp>,
    before: Option<Stamp>,
    applied: BTreeSet<(i64, i64, &'static str)>,
}

impl Naive {
    fn key(stamp: Stamp, op: &'static str) -> (i64, i64, &'static str) {
        (stamp.fence.get(), stamp.owner.to_i64(), op)
    }

    fn is_stale(&self, stamp: Stamp) -> bool {
        self.floor.is_some_and(|floor| {
            stamp.fence.get() < floor.fence.get()
                || (stamp.fence == floor.fence && stamp.owner != floor.owner)
        })
    }

    fn raise(&mut self, stamp: Stamp) {
        if self.floor != Some(stamp) {
            self.before = self.floor.replace(stamp);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_register_keeps_its_promise(steps in steps()) {
        let mut register = Register::default();
        let mut naive = Naive::default();
        for step in &steps {
            let floor = register.floor();
            match *step {
                Step::Restart => register = restarted(&register),
                Step::Touch(stamp) => {
                    let stale = naive.is_stale(stamp);
                    prop_assert_eq!(register.peek(stamp).is_err(), stale);
                    prop_assert_eq!(register.floor(), floor, "peeking raised the floor");
                    prop_assert_eq!(register.touch(stamp).is_err(), stale);
                    if !stale {
                        naive.raise(stamp);
                    }
                }
                Step::Forget(stamp, op) => {
                    if register.forget(stamp, op) {
                        prop_assert!(naive.applied.remove(&Naive::key(stamp, op)), "forgot what was not known");
                    }
                }
                Step::Admit(stamp, op) => match register.admit(stamp, op) {
                    Ok(Verdict::Accepted) => {
                        prop_assert!(!naive.is_stale(stamp), "a stale write was let through");
                        prop_assert!(naive.applied.insert(Naive::key(stamp, op)), "applied twice");
                        naive.raise(stamp);
                    }
                    Ok(Verdict::Duplicate) => {
                        prop_assert!(naive.applied.contains(&Naive::key(stamp, op)), "never applied");
                    }
                    Err(stale) => {
                        prop_assert!(naive.is_stale(stamp), "the newest holder was refused");
                        prop_assert_eq!((Some(stale.floor), stale.presented), (naive.floor, stamp));
                        // The newest holder and the one before it always learn that a write was applied.
                        let remembered = naive.before == Some(stamp);
                        prop_assert!(!remembered || !naive.applied.contains(&Naive::key(stamp, op)));
                    }
                },
            }
            prop_assert_eq!(register.floor(), naive.floor);
            prop_assert!(register.floor().map(|s| s.fence) >= floor.map(|s| s.fence), "the floor fell");
            let holders: BTreeSet<i64> = register.operations().map(|(s, _)| s.fence.get()).collect();
            prop_assert!(holders.len() <= 2, "operations of {} holders are kept", holders.len());
        }
    }

    #[test]
    fn a_restored_register_is_the_one_that_was_saved(steps in steps()) {
        let mut register = Register::default();
        for step in &steps {
            match *step {
                Step::Touch(stamp) => drop(register.touch(stamp)),
                Step::Admit(stamp, op) => drop(register.admit(stamp, op).is_ok()),
                Step::Forget(stamp, op) => drop(register.forget(stamp, op)),
                Step::Restart => {}
            }
        }
        let back = restarted(&register);
        prop_assert_eq!(back.floor(), register.floor());
        prop_assert!(back.operations().eq(register.operations()));
    }
}

/// What a program does that has a driver of its own: the texts of `sql`, bound by position.
mod driver_free {
    use super::*;
    use lockcore_fenced::{Stale, sql};
    use rusqlite::{Connection, OptionalExtension, params};

    pub(super) fn open() -> Connection {
        let db = Connection::open_in_memory().unwrap();
        db.execute(sql::CREATE_FENCES, []).unwrap();
        db.execute(sql::CREATE_OPS, []).unwrap();
        db
    }

    fn raise_and_read(db: &Connection, stamp: Stamp) -> Option<(i64, i64)> {
        let (fence, owner) = (stamp.fence.get(), stamp.owner.to_i64());
        if db.execute(sql::RAISE, params!["r", fence, owner]).unwrap() > 0 {
            db.execute(sql::PRUNE_OPS, params!["r", fence]).unwrap();
        }
        read(db)
    }

    pub(super) fn read(db: &Connection) -> Option<(i64, i64)> {
        db.query_row(sql::READ, ["r"], |row| Ok((row.get(0)?, row.get(1)?))).optional().unwrap()
    }

    pub(super) fn touch(db: &mut Connection, stamp: Stamp) -> Result<(), Stale> {
        let tx = db.transaction().unwrap();
        sql::judge(stamp, raise_and_read(&tx, stamp))?;
        tx.commit().unwrap();
        Ok(())
    }

    pub(super) fn admit(db: &mut Connection, stamp: Stamp, op: &str) -> Result<Verdict, Stale> {
        let (fence, owner) = (stamp.fence.get(), stamp.owner.to_i64());
        let tx = db.transaction().unwrap();
        let row = raise_and_read(&tx, stamp);
        let known = tx.prepare(sql::KNOWN_OP).unwrap().exists(params!["r", fence, owner, op]).unwrap();
        let verdict = sql::verdict(stamp, row, known)?;
        if verdict == Verdict::Accepted {
            assert_eq!(tx.execute(sql::RECORD_OP, params!["r", fence, owner, op]).unwrap(), 1);
        }
        tx.commit().unwrap();
        Ok(verdict)
    }

    pub(super) fn forget(db: &Connection, stamp: Stamp, op: &str) -> bool {
        db.execute(sql::FORGET_OP, params!["r", stamp.fence.get(), stamp.owner.to_i64(), op]).unwrap() > 0
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn the_statements_agree_with_the_register(steps in steps()) {
            let (mut register, mut db) = (Register::default(), open());
            for step in &steps {
                match *step {
                    Step::Touch(stamp) => prop_assert_eq!(touch(&mut db, stamp), register.touch(stamp)),
                    Step::Admit(stamp, op) => {
                        prop_assert_eq!(admit(&mut db, stamp, op), register.admit(stamp, op), "{:?}", step);
                    }
                    Step::Forget(stamp, op) => prop_assert_eq!(forget(&db, stamp, op), register.forget(stamp, op)),
                    Step::Restart => {}
                }
                prop_assert_eq!(sql::floor(read(&db)), register.floor());
            }
        }
    }
}

#[cfg(feature = "sqlite")]
mod fence_table {
    use super::*;
    use lockcore_fenced::{
        Stale,
        sqlite::{Error, FenceTable},
    };
    use rusqlite::{Connection, Transaction};

    fn within<T>(
        db: &mut Connection,
        work: impl FnOnce(&Transaction<'_>) -> Result<T, Error>,
    ) -> Result<T, Stale> {
        let tx = db.transaction().unwrap();
        match work(&tx) {
            Ok(value) => {
                tx.commit().unwrap();
                Ok(value)
            }
            Err(Error::Stale(stale)) => Err(stale),
            Err(e) => panic!("{e}"),
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn the_table_agrees_with_the_register(steps in steps()) {
            let mut register = Register::default();
            let mut db = Connection::open_in_memory().unwrap();
            FenceTable.create(&db).unwrap();
            for step in &steps {
                match *step {
                    Step::Touch(stamp) => prop_assert_eq!(
                        within(&mut db, |tx| FenceTable.touch(tx, "r", stamp)),
                        register.touch(stamp)
                    ),
                    Step::Admit(stamp, op) => prop_assert_eq!(
                        within(&mut db, |tx| FenceTable.admit(tx, "r", stamp, op)),
                        register.admit(stamp, op),
                        "{:?}", step
                    ),
                    Step::Forget(stamp, op) => prop_assert_eq!(
                        within(&mut db, |tx| FenceTable.forget(tx, "r", stamp, op)).unwrap(),
                        register.forget(stamp, op)
                    ),
                    Step::Restart => register = restarted(&register),
                }
                prop_assert_eq!(FenceTable.floor(&db, "r").unwrap(), register.floor());
            }
        }
    }
}
