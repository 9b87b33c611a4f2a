//! Compares an acquire and a release with the two bare transactions that they cannot do without, on the same kind of
//! thread and with the same settings of the file.
//!
//! `cargo bench -p lockcore-sql --features sqlite`. The directory is `$LOCKCORE_BENCH_DIR`, or a temporary one.

#![allow(clippy::print_stdout)]

use std::{
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use lockcore::backend::*;
use lockcore_sql::{SqliteBackend, SqliteConfig};
use rusqlite::Connection;
use tokio::sync::oneshot;

const ROUNDS: usize = 400;
const SERIES: usize = 7;

/// The bare transactions, behind a queue and a thread like the backend's.
struct Bare {
    queue: mpsc::Sender<(bool, oneshot::Sender<i64>)>,
}

impl Bare {
    fn open(path: &Path) -> Self {
        let db = Connection::open(path).unwrap();
        db.execute_batch(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;
             CREATE TABLE leases (name TEXT PRIMARY KEY, owner BLOB, fence INTEGER, expires INTEGER) WITHOUT ROWID;",
        )
        .unwrap();
        let (queue, asked) = mpsc::channel::<(bool, oneshot::Sender<i64>)>();
        thread::spawn(move || {
            for (take, reply) in asked {
                let sql = if take {
                    "INSERT INTO leases VALUES ('a', x'00', 1, 1) ON CONFLICT (name)
                     DO UPDATE SET owner = x'00', fence = fence + 1 WHERE owner IS NULL RETURNING fence"
                } else {
                    "UPDATE leases SET owner = NULL WHERE name = 'a' AND owner = x'00' RETURNING fence"
                };
                db.prepare_cached("BEGIN IMMEDIATE").unwrap().execute([]).unwrap();
                let fence = db.prepare_cached(sql).unwrap().query_row([], |row| row.get(0)).unwrap();
                db.prepare_cached("COMMIT").unwrap().execute([]).unwrap();
                let _ = reply.send(fence);
            }
        });
        Self { queue }
    }

    async fn round(&self) {
        for take in [true, false] {
            let (reply, answer) = oneshot::channel();
            self.queue.send((take, reply)).unwrap();
            answer.await.unwrap();
        }
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let own = tempfile::tempdir().unwrap();
    let directory =
        std::env::var_os("LOCKCORE_BENCH_DIR").map_or_else(|| own.path().to_owned(), PathBuf::from);
    let bare = Bare::open(&directory.join("bare.db"));
    let backend = SqliteBackend::open(SqliteConfig::new(directory.join("locks.db"))).await.unwrap();
    let name = LockName::parse("a").unwrap();
    let ours = async || {
        let call = Call::for_tests(Arc::new(BootClock), Duration::from_secs(5));
        let request = AcquireRequest::new(name.clone(), Duration::from_secs(30));
        let lease = backend.acquire(&call, &request).await.unwrap();
        let _ = backend.release(&call, &lease).await.unwrap();
    };
    // The two take turns, so that whatever else the disk does falls on both, and medians forget its hiccups.
    let mut ratios = Vec::new();
    for _ in 0..SERIES {
        let (mut of_bare, mut of_ours) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let start = Instant::now();
            bare.round().await;
            of_bare.push(start.elapsed());
            let start = Instant::now();
            ours().await;
            of_ours.push(start.elapsed());
        }
        of_bare.sort();
        of_ours.sort();
        let (of_bare, of_ours) = (of_bare[of_bare.len() / 2], of_ours[of_ours.len() / 2]);
        let ratio = of_bare.as_secs_f64() / of_ours.as_secs_f64();
        println!("bare {of_bare:?}, acquire and release {of_ours:?}, ratio {ratio:.3}");
        ratios.push(ratio);
    }
    ratios.sort_by(f64::total_cmp);
    println!("median ratio {:.3}", ratios[SERIES / 2]);
}
