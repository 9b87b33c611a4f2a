//! Closes expired orders in SQL: a lock per batch keeps workers apart, the fence keeps late ones out.
//! Check, work and stock are one transaction, on a blocking thread, with the stamp taken inside it.
//! Run with the URL of a store to try another than a SQLite file.
#![allow(clippy::print_stdout)]

use std::{path::Path, path::PathBuf, time::Duration};

use lockcore::{Attempt, GuardRef, LockClient, Stamp};
use lockcore_fenced::{Verdict, sqlite::FenceTable};
use rusqlite::{Connection, TransactionBehavior::Immediate};

type Anything = Box<dyn std::error::Error + Send + Sync>;
const BATCHES: u32 = 3;
const ORDERS: u32 = 30;

#[derive(Debug, thiserror::Error)]
enum ScanError {
    #[error(transparent)]
    Lock(#[from] lockcore::Error),
    #[error(transparent)]
    Fence(#[from] lockcore_fenced::sqlite::Error),
    #[error(transparent)]
    Sql(#[from] rusqlite::Error),
}

/// The day's run for one batch. The operation is named after the day: run again by the same holder, it is a duplicate.
fn close_batch(shop: &Path, batch: u32, day: &str, stamp: Stamp) -> Result<usize, ScanError> {
    let mut db = open(shop)?;
    let tx = db.transaction_with_behavior(Immediate)?;
    // The guard first: nothing that this transaction reads can be older than the floor.
    if FenceTable.admit(&tx, &format!("orders/{batch}"), stamp, &format!("close/{day}"))?
        == Verdict::Duplicate
    {
        return Ok(0);
    }
    let closed =
        tx.execute("update orders set state = 'closed' where batch = ?1 and state = 'expired'", [batch])?;
    tx.execute("update stock set n = n + ?1", [closed as i64])?;
    tx.commit()?;
    Ok(closed)
}

async fn scan(locks: &LockClient, shop: &Path, day: &'static str) -> Result<usize, ScanError> {
    let mut closed = 0;
    for batch in 0..BATCHES {
        let shop = PathBuf::from(shop);
        let ran = locks
            .named(["orders", &batch.to_string()])
            .ttl(Duration::from_secs(5))
            .try_run(async |held| -> Result<usize, ScanError> {
                // A transaction of rusqlite cannot cross an await: all of it goes to a blocking thread, and the
                // watcher goes with it, so that the stamp is taken as late as possible.
                held.run_blocking(move |held: &GuardRef| close_batch(&shop, batch, day, held.stamp()?)).await
            })
            .await?;
        match ran {
            Attempt::Granted(orders) => {
                println!("batch {batch}: closed {orders}");
                closed += orders;
            }
            Attempt::Busy(holder) => println!("batch {batch}: somebody is at it: {holder:?}"),
        }
    }
    Ok(closed)
}

fn open(shop: &Path) -> rusqlite::Result<Connection> {
    let db = Connection::open(shop)?;
    db.busy_timeout(Duration::from_secs(5))?;
    Ok(db)
}

fn stock(shop: &Path) -> rusqlite::Result<u32> {
    open(shop)?.query_row("select n from stock", [], |row| row.get(0))
}

#[tokio::main]
async fn main() -> Result<(), Anything> {
    let directory = tempfile::tempdir()?;
    let store = std::env::args().nth(1).unwrap_or_else(|| lockcore_examples::sqlite_in(directory.path()));
    let shop = directory.path().join("shop.db");
    let db = open(&shop)?;
    FenceTable.create(&db)?;
    db.execute_batch(
        "create table orders(id integer primary key, batch int, state text);
         create table stock(n int);
         insert into stock values(0);",
    )?;
    for id in 0..ORDERS {
        db.execute("insert into orders values(?1, ?2, 'expired')", [id, id % BATCHES])?;
    }

    let locks = LockClient::new(lockcore_examples::connect(&store).await?);
    let first = scan(&locks, &shop, "2026-11-29").await?;
    let second = scan(&locks, &shop, "2026-11-30").await?;
    println!("closed {first}, then {second}; stock {}", stock(&shop)?);

    // A holder of the past: paused since before the scans, it comes with the first fence there ever was.
    let old: Stamp = "1.00000000000000aa".parse()?;
    let refused = match close_batch(&shop, 0, "2026-11-28", old) {
        Err(ScanError::Fence(lockcore_fenced::sqlite::Error::Stale(stale))) => {
            println!("late: {stale}");
            true
        }
        other => {
            println!("late: {other:?}");
            false
        }
    };
    locks.close().await;
    match (first == ORDERS as usize, second, stock(&shop)? == ORDERS, refused) {
        (true, 0, true, true) => Ok(()),
        _ => Err("every order was to be closed once, and the late holder refused".into()),
    }
}
