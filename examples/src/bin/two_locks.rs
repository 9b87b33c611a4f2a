//! Two locks in order: clerks move boxes between two shelves in opposite directions, and none waits for the other for ever.
//! Whoever needs several locks takes them in the order of their names; each shelf checks the fence of its own lock.
//! Run with the URL of a store to try another than a SQLite file.
#![allow(clippy::print_stdout)]

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use lockcore::{LockClient, Stamp};
use lockcore_fenced::{Fenced, Verdict};

type Anything = Box<dyn std::error::Error + Send + Sync>;
const MOVES: usize = 12;

/// Boxes on each shelf, each behind a floor of its own.
type Shelves = Arc<BTreeMap<&'static str, Mutex<Fenced<i64>>>>;

/// Puts boxes on a shelf or takes them; the shelf refuses whoever held its lock before the present holder.
fn put(shelves: &Shelves, shelf: &str, stamp: Stamp, op: &str, boxes: i64) -> Result<(), Anything> {
    let mut shelf = shelves[shelf].lock().unwrap_or_else(PoisonError::into_inner);
    // Asked again by the same holder it is a duplicate, and nothing moves twice.
    let _: Verdict = shelf.write(stamp, op, |there| *there += boxes)?;
    Ok(())
}

async fn clerk(
    locks: LockClient,
    shelves: Shelves,
    who: &'static str,
    from: &'static str,
    to: &'static str,
) -> Result<(), Anything> {
    // The order is that of the names, whichever way the boxes go. In the order of the move, one clerk would hold `east`
    // and wait for `west` while the other holds `west` and waits for `east`.
    let (first, second) = if from < to { (from, to) } else { (to, from) };
    let lock =
        |shelf: &str| locks.named(["shelf", shelf]).ttl(Duration::from_secs(5)).wait(Duration::from_secs(60));
    for n in 0..MOVES {
        let (outer, inner) = (lock(first).acquire().await?, lock(second).acquire().await?);
        let op = format!("{who}/{n}");
        for (shelf, boxes) in [(from, -1), (to, 1)] {
            let guard = if shelf == first { &outer } else { &inner };
            put(&shelves, shelf, guard.stamp()?, &op, boxes)?;
        }
        inner.release().await?;
        outer.release().await?;
    }
    println!("{who}: moved {MOVES} boxes from {from} to {to}");
    locks.close().await;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Anything> {
    let directory = tempfile::tempdir()?;
    let store = std::env::args().nth(1).unwrap_or_else(|| lockcore_examples::sqlite_in(directory.path()));
    let shelves: Shelves = Arc::new(BTreeMap::from([
        ("east", Mutex::new(Fenced::new(50))),
        ("west", Mutex::new(Fenced::new(50))),
    ]));
    let mut clerks = Vec::new();
    for (who, from, to) in [("ann", "east", "west"), ("bob", "west", "east")] {
        let locks = LockClient::new(lockcore_examples::connect(&store).await?);
        clerks.push(tokio::spawn(clerk(locks, shelves.clone(), who, from, to)));
    }
    for clerk in clerks {
        clerk.await??;
    }
    let there = |shelf: &str| *shelves[shelf].lock().unwrap_or_else(PoisonError::into_inner).peek();
    println!("east {}, west {}", there("east"), there("west"));
    if (there("east"), there("west")) == (50, 50) { Ok(()) } else { Err("a box is lost".into()) }
}
