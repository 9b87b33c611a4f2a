//! The guards on SQLite: every way in which a holder of the past has got a write through elsewhere, tried here.

#![cfg(feature = "sqlite")]

use lockcore::{Fence, Stamp, backend::Owner};
use lockcore_fenced::{
    Verdict,
    sql::Set,
    sqlite::{ColumnGuard, Error, FenceTable},
};
use rusqlite::{Connection, ToSql, TransactionBehavior, params};
use std::{path::PathBuf, time::Duration};

fn holder(fence: i64) -> Stamp {
    Stamp::new(Fence::new(fence).unwrap(), Owner::random().digest())
}

/// A database file, so that several connections meet in it.
struct File {
    _dir: tempfile::TempDir,
    path: PathBuf,
}

impl File {
    fn new(journal: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = Self { path: dir.path().join("shop.db"), _dir: dir };
        let db = file.open();
        let mode: String =
            db.query_row(&format!("pragma journal_mode = {journal}"), [], |row| row.get(0)).unwrap();
        assert_eq!(mode, journal);
        FenceTable.create(&db).unwrap();
        db.execute_batch(
            "create table stock(id integer primary key, n integer not null); insert into stock values(1, 5);
             create table orders(id integer primary key, state text not null, last_fence integer, last_owner integer);
             insert into orders(id, state) values(1, 'open'), (2, 'open')",
        )
        .unwrap();
        file
    }

    fn open(&self) -> Connection {
        let db = Connection::open(&self.path).unwrap();
        db.busy_timeout(Duration::from_secs(20)).unwrap();
        db
    }

    fn stock(&self) -> i64 {
        stock(&self.open())
    }

    fn state(&self, order: i64) -> Option<String> {
        use rusqlite::OptionalExtension;
        let db = self.open();
        db.query_row("select state from orders where id = ?1", [order], |row| row.get(0)).optional().unwrap()
    }
}

fn stock(db: &Connection) -> i64 {
    db.query_row("select n from stock where id = 1", [], |row| row.get(0)).unwrap()
}

fn orders() -> ColumnGuard {
    ColumnGuard::new("orders", "id").unwrap()
}

/// Runs a whole transaction as a program should: immediate, guard first, `?` past the commit.
fn within<T>(
    db: &mut Connection,
    work: impl FnOnce(&rusqlite::Transaction<'_>) -> Result<T, Error>,
) -> Result<T, Error> {
    let tx = db.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let value = work(&tx)?;
    tx.commit()?;
    Ok(value)
}

fn sell(db: &mut Connection, stamp: Stamp, op: &str) -> Result<Verdict, Error> {
    within(db, |tx| {
        let verdict = FenceTable.admit(tx, "stock", stamp, op)?;
        if verdict == Verdict::Accepted {
            tx.execute("update stock set n = n - 1 where id = 1", [])?;
        }
        Ok(verdict)
    })
}

fn close(db: &mut Connection, order: i64, stamp: Stamp) -> Result<(), Error> {
    within(db, |tx| orders().update(tx, &order, stamp, &[Set::to("state")], &[&"closed"]))
}

#[track_caller]
fn assert_stale<T: std::fmt::Debug>(answer: Result<T, Error>, presented: Stamp, floor: Stamp) {
    match answer {
        Err(Error::Stale(stale)) => assert_eq!((stale.presented, stale.floor), (presented, floor)),
        other => panic!("a stale stamp was answered {other:?}"),
    }
}

/// The guard is the first statement, and what a transaction read before it does not count.
mod check_first_statement {
    use super::*;

    #[test]
    fn a_stale_writer_that_read_first_is_refused_and_told_to_start_again() {
        let file = File::new("wal");
        let (mut old, mut new) = (file.open(), file.open());
        let (alice, bob) = (holder(41), holder(42));

        let tx = old.transaction_with_behavior(TransactionBehavior::Deferred).unwrap();
        assert_eq!(stock(&tx), 5, "the read that pins the snapshot");
        assert_eq!(sell(&mut new, bob, "sell/1").unwrap(), Verdict::Accepted);
        let answer = FenceTable.admit(&tx, "stock", alice, "sell/2").unwrap_err();
        assert!(matches!(answer, Error::Snapshot(_)), "{answer:?}");
        assert!(answer.is_transient());
        assert!(answer.to_string().contains("TransactionBehavior::Immediate"), "{answer}");
        drop(tx);

        // The retry of the whole transaction gets the true answer.
        assert_stale(sell(&mut old, alice, "sell/2"), alice, bob);
        assert_eq!(file.stock(), 4);
    }

    #[test]
    fn a_new_holder_that_read_first_loses_no_update() {
        let file = File::new("wal");
        let (mut old, mut new) = (file.open(), file.open());
        let (alice, bob) = (holder(41), holder(42));

        // Bob reads 5, and alice, not fenced out yet, sells one.
        let tx = new.transaction_with_behavior(TransactionBehavior::Deferred).unwrap();
        let seen = stock(&tx);
        assert_eq!(sell(&mut old, alice, "sell/1").unwrap(), Verdict::Accepted);
        let answer = FenceTable.admit(&tx, "stock", bob, "sell/2").unwrap_err();
        assert!(matches!(answer, Error::Snapshot(_)), "{answer:?} after reading {seen}");
        drop(tx);

        assert_eq!(sell(&mut new, bob, "sell/2").unwrap(), Verdict::Accepted);
        assert_eq!(file.stock(), 3, "5 - 1 - 1");
    }

    #[test]
    fn a_rollback_journal_lets_nobody_in_behind_a_reader() {
        let file = File::new("delete");
        let (mut old, mut new) = (file.open(), file.open());
        new.busy_timeout(Duration::ZERO).unwrap();
        let (alice, bob) = (holder(41), holder(42));

        let tx = old.transaction_with_behavior(TransactionBehavior::Deferred).unwrap();
        assert_eq!(stock(&tx), 5);
        let answer = sell(&mut new, bob, "sell/1").unwrap_err();
        assert!(matches!(answer, Error::Busy(_)), "{answer:?}");
        assert!(answer.is_transient());
        assert_eq!(FenceTable.admit(&tx, "stock", alice, "sell/2").unwrap(), Verdict::Accepted);
        tx.execute("update stock set n = n - 1 where id = 1", []).unwrap();
        tx.commit().unwrap();
        assert_eq!(sell(&mut new, bob, "sell/1").unwrap(), Verdict::Accepted);
        assert_stale(sell(&mut old, alice, "sell/3"), alice, bob);
        assert_eq!(file.stock(), 3);
    }

    #[test]
    fn the_guard_itself_takes_the_write_lock_of_a_deferred_transaction() {
        let file = File::new("wal");
        let (mut old, mut new) = (file.open(), file.open());
        new.busy_timeout(Duration::ZERO).unwrap();
        let (alice, bob) = (holder(41), holder(42));
        type Guard<'a> = &'a dyn Fn(&rusqlite::Transaction<'_>) -> Result<(), Error>;
        let guards: [Guard<'_>; 4] = [
            &|tx| FenceTable.touch(tx, "stock", alice),
            &|tx| FenceTable.admit(tx, "stock", alice, "sell/1").map(drop),
            &|tx| orders().touch(tx, &1, alice).map(drop),
            &|tx| orders().insert(tx, &9, alice, &["state"], &[&"open"]),
        ];
        for guard in guards {
            let tx = old.transaction_with_behavior(TransactionBehavior::Deferred).unwrap();
            guard(&tx).unwrap();
            assert_eq!(stock(&tx), 5);
            let answer = sell(&mut new, bob, "sell/2").unwrap_err();
            assert!(matches!(answer, Error::Busy(_)), "somebody could move the floor: {answer:?}");
            tx.rollback().unwrap();
        }
    }

    #[test]
    fn a_deferred_transaction_that_begins_with_the_guard_never_has_to_start_again() {
        let file = File::new("wal");
        let begin = std::sync::Barrier::new(4);
        std::thread::scope(|scope| {
            for worker in 0..4 {
                let (file, begin) = (&file, &begin);
                scope.spawn(move || {
                    let mut db = file.open();
                    begin.wait();
                    for round in 0..100 {
                        // Each under a resource of its own: none is stale, and all meet in the file.
                        let tx = db.transaction_with_behavior(TransactionBehavior::Deferred).unwrap();
                        let resource = format!("stock/{worker}");
                        let verdict = FenceTable.admit(&tx, &resource, holder(round + 1), "op").unwrap();
                        assert_eq!(verdict, Verdict::Accepted);
                        tx.commit().unwrap();
                    }
                });
            }
        });
    }

    #[test]
    fn a_stale_writer_in_a_deferred_transaction_leaves_nothing_even_if_it_commits() {
        let file = File::new("wal");
        let mut db = file.open();
        let (alice, bob) = (holder(41), holder(42));
        assert_eq!(sell(&mut db, bob, "sell/1").unwrap(), Verdict::Accepted);
        let tx = db.transaction().unwrap();
        assert_stale(FenceTable.admit(&tx, "stock", alice, "sell/2"), alice, bob);
        tx.commit().unwrap();
        assert_eq!(FenceTable.floor(&db, "stock").unwrap(), Some(bob));
        let recorded: i64 = db.query_row("select count(*) from fence_ops", [], |row| row.get(0)).unwrap();
        assert_eq!(recorded, 1);
    }
}

/// A row that no holder has written yet carries nulls.
mod null_fence {
    use super::*;

    #[test]
    fn a_row_without_a_fence_takes_the_first_holder() {
        let file = File::new("wal");
        let mut db = file.open();
        let (alice, bob) = (holder(41), holder(42));
        close(&mut db, 1, bob).unwrap();
        assert_eq!(file.state(1).unwrap(), "closed");
        assert_stale(close(&mut db, 1, alice), alice, bob);
    }

    #[test]
    fn a_fence_without_an_owner_refuses_an_equal_fence() {
        let file = File::new("wal");
        let mut db = file.open();
        db.execute("update orders set last_fence = 42, last_owner = null where id = 1", []).unwrap();
        let answer = close(&mut db, 1, holder(42)).unwrap_err();
        assert!(matches!(answer, Error::Stale(_)), "{answer:?}");
        close(&mut db, 1, holder(43)).unwrap();
    }

    #[test]
    fn a_missing_row_is_not_called_stale() {
        let file = File::new("wal");
        let answer = close(&mut file.open(), 77, holder(1)).unwrap_err();
        assert_eq!(answer.to_string(), "no row 77 in orders");
        assert!(matches!(answer, Error::NoSuchRow { .. }));
    }
}

/// Inserts have no row to compare with, and deletes take the floor away with the row.
mod stale_insert {
    use super::*;

    fn insert(db: &mut Connection, order: i64, stamp: Stamp) -> Result<(), Error> {
        within(db, |tx| orders().insert(tx, &order, stamp, &["state"], &[&"open"]))
    }

    fn delete(db: &mut Connection, order: i64, stamp: Stamp) -> Result<(), Error> {
        within(db, |tx| orders().delete(tx, &order, stamp))
    }

    #[test]
    fn a_row_deleted_by_the_new_holder_is_not_brought_back_by_the_old_one() {
        let file = File::new("wal");
        let mut db = file.open();
        let (alice, bob) = (holder(41), holder(42));
        close(&mut db, 1, alice).unwrap();
        delete(&mut db, 1, bob).unwrap();
        assert_stale(insert(&mut db, 1, alice), alice, bob);
        assert_stale(close(&mut db, 1, alice), alice, bob);
        assert_stale(delete(&mut db, 1, alice), alice, bob);
        assert_eq!(file.state(1), None);
        insert(&mut db, 1, bob).unwrap();
        assert_stale(delete(&mut db, 1, alice), alice, bob);
        assert_eq!(file.state(1).unwrap(), "open");
    }

    #[test]
    fn a_row_the_new_holder_looked_for_in_vain_is_not_inserted_by_the_old_one() {
        let file = File::new("wal");
        let mut db = file.open();
        let (alice, bob) = (holder(41), holder(42));
        assert!(!within(&mut db, |tx| orders().touch(tx, &9, bob)).unwrap());
        assert_stale(insert(&mut db, 9, alice), alice, bob);
        assert_eq!(file.state(9), None);
        insert(&mut db, 9, bob).unwrap();
        assert!(within(&mut db, |tx| orders().touch(tx, &9, bob)).unwrap());
    }

    #[test]
    fn a_row_that_is_there_is_judged_before_it_is_called_a_conflict() {
        let file = File::new("wal");
        let mut db = file.open();
        let (alice, bob) = (holder(41), holder(42));
        insert(&mut db, 9, bob).unwrap();
        assert_stale(insert(&mut db, 9, alice), alice, bob);
        let answer = insert(&mut db, 9, bob).unwrap_err();
        assert!(matches!(answer, Error::RowExists { .. }), "{answer:?}");
        let answer = delete(&mut db, 99, bob).unwrap_err();
        assert!(matches!(answer, Error::NoSuchRow { .. }), "{answer:?}");
    }

    #[test]
    fn inserts_under_the_side_table_are_refused_by_its_floor() {
        let file = File::new("wal");
        let mut db = file.open();
        let (alice, bob) = (holder(41), holder(42));
        within(&mut db, |tx| FenceTable.touch(tx, "orders", bob)).unwrap();
        let answer = within(&mut db, |tx| {
            let _ = FenceTable.admit(tx, "orders", alice, "new/9")?;
            tx.execute("insert into orders(id, state) values(9, 'open')", [])?;
            Ok(())
        });
        assert_stale(answer, alice, bob);
        assert_eq!(file.state(9), None);
    }
}

/// A column guards its row, and no other.
mod untouched_row {
    use super::*;

    #[test]
    fn a_row_the_new_holder_has_not_touched_still_takes_the_old_holders_write() {
        let file = File::new("wal");
        let mut db = file.open();
        let (alice, bob) = (holder(41), holder(42));
        close(&mut db, 1, bob).unwrap();
        close(&mut db, 2, alice).expect("the limit of a column, and why it is documented");
        assert_stale(close(&mut db, 1, alice), alice, bob);
    }

    #[test]
    fn touching_all_rows_first_keeps_the_old_holder_out_of_all() {
        let file = File::new("wal");
        let mut db = file.open();
        let (alice, bob) = (holder(41), holder(42));
        within(&mut db, |tx| {
            for order in [1, 2] {
                assert!(orders().touch(tx, &order, bob)?);
            }
            Ok(())
        })
        .unwrap();
        for order in [1, 2] {
            assert_stale(close(&mut db, order, alice), alice, bob);
        }
    }

    #[test]
    fn the_side_table_keeps_the_old_holder_out_of_rows_nobody_touched() {
        let file = File::new("wal");
        let mut db = file.open();
        let (alice, bob) = (holder(41), holder(42));
        assert_eq!(sell(&mut db, bob, "sell/1").unwrap(), Verdict::Accepted);
        assert_stale(sell(&mut db, alice, "sell/2"), alice, bob);
    }
}

/// A retry whose first answer was lost learns what became of it.
mod retry_after_takeover_is_duplicate {
    use super::*;

    #[test]
    fn a_former_holder_learns_that_its_write_was_applied() {
        let file = File::new("wal");
        let mut db = file.open();
        let (alice, bob, carol) = (holder(41), holder(42), holder(43));
        assert_eq!(sell(&mut db, alice, "sell/1").unwrap(), Verdict::Accepted);
        assert_eq!(
            sell(&mut db, bob, "sell/1").unwrap(),
            Verdict::Accepted,
            "the same words of another holder"
        );
        assert_eq!(sell(&mut db, alice, "sell/1").unwrap(), Verdict::Duplicate);
        assert_stale(sell(&mut db, alice, "sell/2"), alice, bob);
        assert_eq!(file.stock(), 3);

        // Two takeovers later the answer is no longer known; it is refused, never applied again.
        assert_eq!(sell(&mut db, carol, "sell/1").unwrap(), Verdict::Accepted);
        assert_stale(sell(&mut db, alice, "sell/1"), alice, carol);
        assert_eq!(sell(&mut db, bob, "sell/1").unwrap(), Verdict::Duplicate);
        assert_eq!(file.stock(), 2);
    }

    #[test]
    fn holders_that_only_read_do_not_make_the_last_writer_forgotten() {
        let file = File::new("wal");
        let mut db = file.open();
        let alice = holder(41);
        assert_eq!(sell(&mut db, alice, "sell/1").unwrap(), Verdict::Accepted);
        for fence in 42..50 {
            within(&mut db, |tx| FenceTable.touch(tx, "stock", holder(fence))).unwrap();
        }
        assert_eq!(sell(&mut db, alice, "sell/1").unwrap(), Verdict::Duplicate);
        assert_eq!(file.stock(), 4);
    }

    #[test]
    fn operations_of_two_holders_are_kept_and_no_more() {
        let file = File::new("wal");
        let mut db = file.open();
        for fence in 1..=20 {
            let stamp = holder(fence);
            for op in 0..5 {
                let _ =
                    within(&mut db, |tx| FenceTable.admit(tx, "stock", stamp, &format!("op/{op}"))).unwrap();
            }
        }
        let kept: i64 = db.query_row("select count(*) from fence_ops", [], |row| row.get(0)).unwrap();
        assert_eq!(kept, 10);
    }

    #[test]
    fn a_rolled_back_write_is_not_remembered() {
        let file = File::new("wal");
        let mut db = file.open();
        let alice = holder(41);
        let tx = db.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        assert_eq!(FenceTable.admit(&tx, "stock", alice, "sell/1").unwrap(), Verdict::Accepted);
        drop(tx);
        assert_eq!(sell(&mut db, alice, "sell/1").unwrap(), Verdict::Accepted);
        assert_eq!(file.stock(), 4);
    }

    #[test]
    fn a_forgotten_operation_is_new_again_for_the_newest_holder_only() {
        let file = File::new("wal");
        let mut db = file.open();
        let (alice, bob) = (holder(41), holder(42));
        assert_eq!(sell(&mut db, alice, "sell/1").unwrap(), Verdict::Accepted);
        assert!(within(&mut db, |tx| FenceTable.forget(tx, "stock", alice, "sell/1")).unwrap());
        assert!(!within(&mut db, |tx| FenceTable.forget(tx, "stock", alice, "sell/1")).unwrap());
        assert_eq!(sell(&mut db, alice, "sell/1").unwrap(), Verdict::Accepted);
        assert_eq!(sell(&mut db, bob, "sell/1").unwrap(), Verdict::Accepted);
        assert!(within(&mut db, |tx| FenceTable.forget(tx, "stock", alice, "sell/1")).unwrap());
        assert_stale(sell(&mut db, alice, "sell/1"), alice, bob);
    }
}

/// One transaction under several locks.
mod two_names_one_transaction {
    use super::*;

    fn transfer(db: &mut Connection, names: &[(&str, Stamp)], op: &str) -> Result<Verdict, Error> {
        within(db, |tx| FenceTable.admit_all(tx, names, op))
    }

    #[test]
    fn all_names_let_it_through_or_none() {
        let file = File::new("wal");
        let mut db = file.open();
        let (a, old_b, new_b) = (holder(5), holder(41), holder(42));
        within(&mut db, |tx| FenceTable.touch(tx, "account/b", new_b)).unwrap();

        // The first name in order would pass. Commit on purpose: the refusal has left nothing to commit.
        let tx = db.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        let answer = FenceTable.admit_all(&tx, &[("account/b", old_b), ("account/a", a)], "move/1");
        assert_stale(answer, old_b, new_b);
        let answer = FenceTable.touch_all(&tx, &[("account/b", old_b), ("account/a", a)]);
        assert_stale(answer, old_b, new_b);
        tx.commit().unwrap();
        assert_eq!(FenceTable.floor(&db, "account/a").unwrap(), None);

        let names = [("account/b", new_b), ("account/a", a)];
        assert_eq!(transfer(&mut db, &names, "move/1").unwrap(), Verdict::Accepted);
        assert_eq!(transfer(&mut db, &names, "move/1").unwrap(), Verdict::Duplicate);
        assert_eq!(FenceTable.floor(&db, "account/a").unwrap(), Some(a));
        assert_eq!(FenceTable.floor(&db, "account/b").unwrap(), Some(new_b));
    }

    #[test]
    fn a_retry_after_one_of_the_locks_moved_on_is_a_duplicate() {
        let file = File::new("wal");
        let mut db = file.open();
        let (a, b, next_b) = (holder(5), holder(41), holder(42));
        assert_eq!(
            transfer(&mut db, &[("account/a", a), ("account/b", b)], "move/1").unwrap(),
            Verdict::Accepted
        );
        within(&mut db, |tx| FenceTable.touch(tx, "account/b", next_b)).unwrap();
        // With the old stamps, and with a new one for the lock that was taken again.
        assert_eq!(
            transfer(&mut db, &[("account/a", a), ("account/b", b)], "move/1").unwrap(),
            Verdict::Duplicate
        );
        assert_eq!(
            transfer(&mut db, &[("account/a", a), ("account/b", next_b)], "move/1").unwrap(),
            Verdict::Duplicate
        );
        assert_stale(transfer(&mut db, &[("account/a", a), ("account/b", b)], "move/2"), b, next_b);
    }

    #[test]
    fn one_name_twice_is_one_name_or_a_stale_stamp() {
        let file = File::new("wal");
        let mut db = file.open();
        let (a, newer) = (holder(5), holder(6));
        assert_eq!(transfer(&mut db, &[("x", a), ("x", a)], "op").unwrap(), Verdict::Accepted);
        assert_stale(transfer(&mut db, &[("x", newer), ("x", a)], "op/2"), a, newer);
        assert!(matches!(transfer(&mut db, &[], "op"), Err(Error::NoResource)), "nothing would be checked");
    }
}

/// Reading under a fence is enough to keep the former holder out.
mod first_touch {
    use super::*;

    #[test]
    fn a_holder_that_only_read_is_not_overwritten() {
        let file = File::new("wal");
        let mut db = file.open();
        let (alice, bob) = (holder(41), holder(42));
        let seen = within(&mut db, |tx| {
            FenceTable.touch(tx, "stock", bob)?;
            Ok(stock(tx))
        })
        .unwrap();
        assert_stale(sell(&mut db, alice, "sell/1"), alice, bob);
        within(&mut db, |tx| {
            assert_eq!(FenceTable.admit(tx, "stock", bob, "sell/2")?, Verdict::Accepted);
            tx.execute("update stock set n = ?1 where id = 1", [seen - 1])?;
            Ok(())
        })
        .unwrap();
        assert_eq!(file.stock(), 4);
    }

    #[test]
    fn peeking_raises_nothing() {
        let file = File::new("wal");
        let mut db = file.open();
        let (alice, bob) = (holder(41), holder(42));
        assert_eq!(sell(&mut db, alice, "sell/1").unwrap(), Verdict::Accepted);
        FenceTable.peek(&db, "stock", bob).unwrap();
        assert_eq!(sell(&mut db, alice, "sell/2").unwrap(), Verdict::Accepted);
        assert_eq!(sell(&mut db, bob, "sell/3").unwrap(), Verdict::Accepted);
        assert_stale(FenceTable.peek(&db, "stock", alice), alice, bob);
    }

    /// Several holders in turn, each with the former ones still writing: the stock loses exactly what was accepted.
    #[test]
    fn read_modify_write_under_a_storm_of_takeovers_loses_nothing() {
        for journal in ["wal", "delete"] {
            let file = File::new(journal);
            let accepted: i64 = std::thread::scope(|scope| {
                let workers: Vec<_> = (1..=4_i64)
                    .map(|worker| {
                        let file = &file;
                        scope.spawn(move || {
                            let mut db = file.open();
                            let mut accepted = 0;
                            for round in 0..25 {
                                let stamp = holder(round * 4 + worker);
                                // Twice per holder, the second time perhaps after the next has begun.
                                for op in ["sell/1", "sell/2"] {
                                    let sold = within(&mut db, |tx| {
                                        FenceTable.touch(tx, "stock", stamp)?;
                                        let seen = stock(tx);
                                        let verdict = FenceTable.admit(tx, "stock", stamp, op)?;
                                        assert_eq!(verdict, Verdict::Accepted);
                                        tx.execute("update stock set n = ?1 where id = 1", [seen - 1])?;
                                        Ok(())
                                    });
                                    match sold {
                                        Ok(()) => accepted += 1,
                                        Err(Error::Stale(_)) => {}
                                        Err(e) => panic!("{e}"),
                                    }
                                }
                            }
                            accepted
                        })
                    })
                    .collect();
                workers.into_iter().map(|worker| worker.join().unwrap()).sum()
            });
            assert!(accepted >= 1);
            assert_eq!(file.stock(), 5 - accepted, "{journal}");
        }
    }
}

mod same_fence {
    use super::*;

    #[test]
    fn a_retry_is_applied_once_and_another_operation_is_new() {
        let file = File::new("wal");
        let mut db = file.open();
        let alice = holder(42);
        assert_eq!(sell(&mut db, alice, "sell/1").unwrap(), Verdict::Accepted);
        assert_eq!(sell(&mut db, alice, "sell/1").unwrap(), Verdict::Duplicate);
        assert_eq!(sell(&mut db, alice, "sell/2").unwrap(), Verdict::Accepted);
        assert_eq!(file.stock(), 3);
        close(&mut db, 1, alice).unwrap();
        close(&mut db, 1, alice).unwrap();
    }

    #[test]
    fn another_owner_is_stale_whoever_of_the_two_came_first() {
        let file = File::new("wal");
        let mut db = file.open();
        let (alice, bob) = (holder(42), holder(42));
        assert_eq!(sell(&mut db, alice, "sell/1").unwrap(), Verdict::Accepted);
        assert_stale(sell(&mut db, bob, "sell/1"), bob, alice);
        close(&mut db, 1, bob).unwrap();
        assert_stale(close(&mut db, 1, alice), alice, bob);
        assert_eq!(file.stock(), 4);
    }
}

mod resource {
    use super::*;

    #[test]
    fn a_restart_goes_on_refusing() {
        let file = File::new("wal");
        let (alice, bob) = (holder(41), holder(42));
        {
            let mut db = file.open();
            assert_eq!(sell(&mut db, alice, "sell/1").unwrap(), Verdict::Accepted);
            assert_eq!(sell(&mut db, bob, "sell/2").unwrap(), Verdict::Accepted);
        }
        let mut db = file.open();
        FenceTable.create(&db).unwrap();
        assert_stale(sell(&mut db, alice, "sell/3"), alice, bob);
        assert_eq!(sell(&mut db, alice, "sell/1").unwrap(), Verdict::Duplicate);
        assert_eq!(sell(&mut db, bob, "sell/2").unwrap(), Verdict::Duplicate);
        assert_eq!(file.stock(), 3);
    }

    #[test]
    fn fences_are_exact_to_the_end_of_the_column() {
        for fence in [(1 << 53) - 1, 1 << 53, (1 << 53) + 1, i64::MAX - 1] {
            let file = File::new("wal");
            let mut db = file.open();
            let (old, new) = (holder(fence), holder(fence + 1));
            for stamp in [old, new] {
                assert_eq!(sell(&mut db, stamp, "sell/1").unwrap(), Verdict::Accepted);
                close(&mut db, 1, stamp).unwrap();
            }
            assert_stale(sell(&mut db, old, "sell/2"), old, new);
            assert_stale(close(&mut db, 1, old), old, new);
            assert_eq!(FenceTable.floor(&db, "stock").unwrap(), Some(new));
        }
    }

    #[test]
    fn a_column_that_rounds_or_is_missing_is_refused_at_start() {
        let db = Connection::open_in_memory().unwrap();
        db.execute_batch(
            "create table good(id integer primary key, last_fence bigint, last_owner INTEGER);
             create table rounds(id integer primary key, last_fence real, last_owner integer);
             create table misses(id integer primary key, last_fence integer);
             create table untyped(id integer primary key, last_fence, last_owner integer)",
        )
        .unwrap();
        let verify = |table: &str| ColumnGuard::new(table, "id").unwrap().verify(&db);
        verify("good").unwrap();
        for (table, column) in [("rounds", "last_fence"), ("misses", "last_owner"), ("untyped", "last_fence")]
        {
            match verify(table).unwrap_err() {
                Error::Column { column: at, .. } => assert_eq!(at, column, "{table}"),
                e => panic!("{table}: {e}"),
            }
        }
        verify("nowhere").unwrap_err();
    }

    #[test]
    fn names_that_are_not_plain_make_no_statement() {
        for table in ["", "a b", "a\"b", "1a", "a;drop table a", "a.b.c", "é", &"x".repeat(64)] {
            ColumnGuard::new(table, "id").unwrap_err();
            ColumnGuard::new("t", table).unwrap_err();
        }
        ColumnGuard::new("main.orders", "id").unwrap();
        let mut db = Connection::open_in_memory().unwrap();
        let tx = db.transaction().unwrap();
        for set in
            [Set::to("last_fence"), Set::to("ID"), Set::to("a = 1 --"), Set::expression("n", "{} + {}")]
        {
            let answer = orders().update(&tx, &1, holder(1), &[set], &[&1]).unwrap_err();
            assert!(matches!(answer, Error::Statement(_)), "{answer:?}");
        }
    }

    #[test]
    fn reserved_words_and_expressions_work_and_values_are_counted() {
        let mut db = Connection::open_in_memory().unwrap();
        FenceTable.create(&db).unwrap();
        db.execute_batch(
            "create table \"order\"(\"key\" text primary key, n integer, last_fence integer, last_owner integer);
             insert into \"order\"(\"key\", n) values('a/1', 5)",
        )
        .unwrap();
        let guard = ColumnGuard::new("main.order", "key").unwrap();
        let add = [Set::expression("n", "n + {}")];
        let values: [&dyn ToSql; 1] = [&3];
        within(&mut db, |tx| guard.update(tx, &"a/1", holder(1), &add, &values)).unwrap();
        let n: i64 = db.query_row("select n from \"order\"", params![], |row| row.get(0)).unwrap();
        assert_eq!(n, 8);
        for values in [&[][..], &[&1 as &dyn ToSql, &2][..]] {
            let answer = within(&mut db, |tx| guard.update(tx, &"a/1", holder(2), &add, values)).unwrap_err();
            assert!(matches!(answer, Error::Sql(_)), "{answer:?}");
        }
    }

    #[test]
    fn other_failures_keep_their_cause() {
        use std::error::Error as _;
        let mut db = Connection::open_in_memory().unwrap();
        let tx = db.transaction().unwrap();
        let answer = FenceTable.admit(&tx, "stock", holder(1), "op").unwrap_err();
        assert!(matches!(answer, Error::Sql(_)), "{answer:?}");
        assert!(!answer.is_transient());
        assert!(answer.source().unwrap().to_string().contains("no such table"), "{answer}");
    }
}
