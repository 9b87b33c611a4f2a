//! The texts of the column guard, run through a driver that knows nothing of them but text and binds.

use lockcore_fenced::{
    Fence, OwnerDigest, Stamp,
    sql::{BadStatement, Bind, ColumnGuard, Placeholders, RowRefusal, Set, Statement},
};
use rusqlite::{Connection, OptionalExtension, ToSql, params_from_iter, types::Value};

fn stamp(fence: i64, owner: i64) -> Stamp {
    Stamp::new(Fence::new(fence).unwrap(), OwnerDigest::from_i64(owner))
}

fn run(db: &Connection, statement: &Statement, key: i64, stamp: Stamp, values: &[Value]) -> u64 {
    let parameters = statement.binds.iter().map(|bind| match bind {
        Bind::Value(at) => values[*at].clone(),
        Bind::Key => Value::Integer(key),
        Bind::Fence => Value::Integer(stamp.fence.get()),
        Bind::Owner => Value::Integer(stamp.owner.to_i64()),
        other => panic!("a new kind of parameter: {other:?}"),
    });
    db.execute(&statement.text, params_from_iter(parameters)).unwrap() as u64
}

fn probe(db: &Connection, guard: &ColumnGuard, key: i64) -> Option<(Option<i64>, Option<i64>)> {
    let statement = guard.probe();
    assert_eq!(statement.binds, [Bind::Key]);
    db.query_row(&statement.text, [&key as &dyn ToSql], |row| Ok((row.get(0)?, row.get(1)?)))
        .optional()
        .unwrap()
}

/// Runs a guarded statement and judges it, as a program does.
fn guarded(
    db: &Connection,
    guard: &ColumnGuard,
    statement: &Statement,
    key: i64,
    stamp: Stamp,
    values: &[Value],
) -> Result<(), RowRefusal> {
    let changed = run(db, statement, key, stamp, values);
    ColumnGuard::judge(stamp, changed, probe(db, guard, key))
}

#[test]
fn every_style_of_parameters_means_the_same() {
    for style in [Placeholders::Dollar, Placeholders::Numbered, Placeholders::Question] {
        let db = Connection::open_in_memory().unwrap();
        db.execute_batch(
            "create table t(id integer primary key, n integer, s text, f integer, o integer);
             insert into t(id, n) values(1, 10), (2, 20)",
        )
        .unwrap();
        let guard = ColumnGuard::new("t", "id").unwrap().columns("f", "o").unwrap().placeholders(style);
        let sets = [Set::expression("n", "n + {}"), Set::to("s"), Set::expression("n", "n")];
        assert!(guard.update(&sets).is_ok());
        let update = guard.update(&sets[..2]).unwrap();
        let values = [Value::Integer(5), Value::Text("x".into())];
        let (alice, bob, twin) = (stamp(41, 1), stamp(i64::MAX, -2), stamp(i64::MAX, -1));

        guarded(&db, &guard, &update, 1, alice, &values).unwrap();
        guarded(&db, &guard, &update, 1, bob, &values).unwrap();
        guarded(&db, &guard, &update, 1, bob, &values).unwrap();
        for stale in [alice, twin] {
            match guarded(&db, &guard, &update, 1, stale, &values) {
                Err(RowRefusal::Stale(answer)) => assert_eq!((answer.presented, answer.floor), (stale, bob)),
                other => panic!("{style:?}: a stale stamp was answered {other:?}"),
            }
        }
        assert_eq!(guarded(&db, &guard, &update, 9, bob, &values), Err(RowRefusal::NoSuchRow));

        let row: (i64, String, i64, i64) = db
            .query_row("select n, s, f, o from t where id = 1", [], |r| {
                Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?))
            })
            .unwrap();
        assert_eq!(row, (25, "x".into(), i64::MAX, -2), "{style:?}");

        // Row 2: touched, then deleted by the newer holder only.
        guarded(&db, &guard, &guard.touch(), 2, bob, &[]).unwrap();
        assert!(matches!(guarded(&db, &guard, &guard.delete(), 2, alice, &[]), Err(RowRefusal::Stale(_))));
        guarded(&db, &guard, &guard.delete(), 2, bob, &[]).unwrap();
        assert_eq!(probe(&db, &guard, 2), None);

        let insert = guard.insert(&["n", "s"]).unwrap();
        assert_eq!(run(&db, &insert, 3, alice, &values), 1);
        assert_eq!(probe(&db, &guard, 3), Some((Some(41), Some(1))));
        let n: i64 = db.query_row("select n from t where id = 3", [], |row| row.get(0)).unwrap();
        assert_eq!(n, 5);
    }
}

#[test]
fn a_row_that_came_in_between_is_neither_stale_nor_missing() {
    let row = Some((Some(40), Some(1)));
    assert_eq!(ColumnGuard::judge(stamp(41, 1), 0, row), Err(RowRefusal::Raced));
    assert_eq!(ColumnGuard::judge(stamp(41, 1), 0, Some((None, None))), Err(RowRefusal::Raced));
    assert_eq!(ColumnGuard::judge(stamp(41, 1), 1, None), Ok(()));
}

#[test]
fn a_missing_column_is_an_error_and_not_a_string() {
    let db = Connection::open_in_memory().unwrap();
    db.execute_batch("create table t(id integer primary key)").unwrap();
    let guard = ColumnGuard::new("t", "id").unwrap();
    for statement in [guard.touch(), guard.delete(), guard.probe()] {
        let e = db.prepare(&statement.text).unwrap_err();
        assert!(e.to_string().contains("no such column"), "{e}");
    }
}

#[test]
fn texts_are_made_of_plain_names_only() {
    let guard = ColumnGuard::new("shop.orders", "id").unwrap();
    assert!(guard.delete().text.starts_with("delete from \"shop\".\"orders\" where \"orders\".\"id\" = $1"));
    assert_eq!(
        guard.update(&[Set::to("last_owner")]).unwrap_err(),
        BadStatement::Guarded("last_owner".into())
    );
    assert!(matches!(guard.insert(&["a, b"]), Err(BadStatement::Name(_))));
    assert!(matches!(ColumnGuard::new("o", "id").unwrap().columns("a b", "c"), Err(BadStatement::Name(_))));
    assert!(matches!(guard.update(&[Set::expression("n", "{}+{}")]), Err(BadStatement::Expression(_))));
}
