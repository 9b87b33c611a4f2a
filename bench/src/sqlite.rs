//! The SQLite backend against two prepared statements at the same settings.

use std::{cell::Cell, path::Path, time::Instant};

use lockcore::{
    LockClient, Result,
    backend::{BootClock, Owner},
};
use lockcore_sql::{SqliteBackend, SqliteConfig};
use rusqlite::{Connection, OpenFlags, params};
use tokio::{runtime::Runtime, task::JoinSet};

use crate::harness::{Bench, Target, alternate, micros_each, one_thread};

// A disk that others use, too, changes its speed from one second to the next: many short turns, not a few long ones.
const TURNS: usize = 41;
const PAIRS: usize = 20;
const TASKS: usize = 64;

pub(crate) fn run(bench: &mut Bench) {
    let one = "sqlite/acquire-release";
    let many = "sqlite/acquire-release/64-tasks";
    let no_disk = "sqlite/acquire-release/no-disk";
    if bench.wants(one) || bench.wants(many) {
        // Beside the build and not in /tmp, which is memory on many machines, where a commit costs nothing.
        let home = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bench");
        std::fs::create_dir_all(&home).expect("the target directory can be written");
        let files = Files::open(&home);
        if bench.wants(one) {
            let (ours, limit) = files.one_task();
            bench.row(one, "us", ours, Some(limit), Target::Ratio(0.90));
        }
        if bench.wants(many) {
            let (ours, limit) = files.many_tasks();
            bench.row(many, "us", ours, Some(limit), Target::Ratio(0.85));
        }
        files.close();
    }
    let memory = Path::new("/dev/shm");
    if bench.wants(no_disk) && memory.is_dir() {
        let files = Files::open(memory);
        let (ours, limit) = files.one_task();
        bench.row(no_disk, "us", ours, Some(limit), Target::Shown);
        files.close();
    }
}

/// Ours and the hand-written file, side by side.
struct Files {
    runtime: Runtime,
    client: LockClient,
    raw: Raw,
    // Last, so that the files are closed before their directory goes.
    _folder: tempfile::TempDir,
}

impl Files {
    fn open(home: &Path) -> Self {
        let folder = tempfile::tempdir_in(home).expect("the directory can be written");
        let path = folder.path().canonicalize().expect("it was just made");
        let runtime = one_thread();
        let config = SqliteConfig::new(path.join("ours.db")).with(|c| c.trust_file_system = true);
        let backend = runtime.block_on(SqliteBackend::open(config)).expect("the file can be opened");
        let raw = Raw::open(&path.join("raw.db")).expect("the file can be opened");
        Self { runtime, client: LockClient::new(backend), raw, _folder: folder }
    }

    fn one_task(&self) -> (f64, f64) {
        alternate(
            TURNS,
            || {
                let start = Instant::now();
                self.runtime
                    .block_on(guards(self.client.clone(), 0, PAIRS))
                    .expect("the file can be written");
                micros_each(start.elapsed(), PAIRS)
            },
            || {
                let start = Instant::now();
                self.raw.pairs(PAIRS, |_| 0).expect("the file can be written");
                micros_each(start.elapsed(), PAIRS)
            },
        )
    }

    fn many_tasks(&self) -> (f64, f64) {
        alternate(
            TURNS,
            || {
                let start = Instant::now();
                self.runtime.block_on(async {
                    let mut tasks = JoinSet::new();
                    for task in 0..TASKS {
                        tasks.spawn(guards(self.client.clone(), task, 1));
                    }
                    while let Some(done) = tasks.join_next().await {
                        done.expect("no panic").expect("the file can be written");
                    }
                });
                micros_each(start.elapsed(), TASKS)
            },
            || {
                let start = Instant::now();
                self.raw.pairs(TASKS, |i| i).expect("the file can be written");
                micros_each(start.elapsed(), TASKS)
            },
        )
    }

    fn close(self) {
        self.runtime.block_on(self.client.close());
    }
}

async fn guards(client: LockClient, task: usize, pairs: usize) -> Result<()> {
    let lock = client.named(format!("bench/{task}"));
    for _ in 0..pairs {
        lock.acquire().await?.release().await?;
    }
    Ok(())
}

/// What a careful person would write by hand: a row a name, a fence that grows, a release that compares the owner.
struct Raw {
    db: Connection,
    fence: Cell<i64>,
}

const GRANT: &str = "INSERT INTO leases AS l (namespace, name, owner, fence, granted, expires)
VALUES (?1, ?2, ?3, ?4, ?5, ?6)
ON CONFLICT (namespace, name) DO UPDATE SET owner = excluded.owner, fence = max(l.fence + 1, excluded.fence),
    granted = excluded.granted, expires = excluded.expires
WHERE l.owner IS NULL OR l.expires <= excluded.granted
RETURNING fence";

const RELEASE: &str = "UPDATE leases SET owner = NULL
WHERE namespace = ?1 AND name = ?2 AND owner = ?3 AND fence = ?4 RETURNING fence";

impl Raw {
    fn open(path: &Path) -> rusqlite::Result<Self> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE;
        let db = Connection::open_with_flags(path, flags | OpenFlags::SQLITE_OPEN_NO_MUTEX)?;
        let _: String = db.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0))?;
        db.execute_batch(
            "PRAGMA synchronous = FULL;
             PRAGMA trusted_schema = OFF;
             CREATE TABLE leases (
                namespace TEXT NOT NULL, name TEXT NOT NULL, owner BLOB, fence INTEGER NOT NULL,
                granted INTEGER NOT NULL, expires INTEGER NOT NULL, PRIMARY KEY (namespace, name)
             ) STRICT, WITHOUT ROWID;",
        )?;
        Ok(Self { db, fence: Cell::new(1) })
    }

    fn pairs(&self, pairs: usize, name: impl Fn(usize) -> usize) -> rusqlite::Result<()> {
        for i in 0..pairs {
            let owner = Owner::random();
            let owner = owner.expose().as_slice();
            let name = format!("bench/{}", name(i));
            let now = BootClock::read().as_nanos() as i64;
            let fence: i64 =
                self.db.prepare_cached(GRANT)?.query_row(
                    params!["", name, owner, self.fence.get(), now, now + 30_000_000_000],
                    |row| row.get(0),
                )?;
            let ended: i64 = self
                .db
                .prepare_cached(RELEASE)?
                .query_row(params!["", name, owner, fence], |row| row.get(0))?;
            self.fence.set(ended + 1);
        }
        Ok(())
    }
}
