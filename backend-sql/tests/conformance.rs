//! A SQLite file under the suite: processes of one machine, each with a file of its own.

use std::{path::PathBuf, process::ExitCode, sync::Arc, time::Duration};

use lockcore::{
    LockName,
    backend::{BootClock, LockBackend, Owner, OwnerDigest, async_trait},
};
use lockcore_conformance::{Service, Suite};
use lockcore_sql::{SqliteBackend, SqliteConfig};
use rusqlite::{Connection, OptionalExtension, params};

struct SqliteFile {
    path: PathBuf,
    _directory: tempfile::TempDir,
}

impl SqliteFile {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("there is room for a temporary directory");
        Self { path: directory.path().join("locks.db"), _directory: directory }
    }

    /// The second road: the table itself.
    fn table(&self) -> Connection {
        let db = Connection::open(&self.path).expect("the file opens");
        db.busy_timeout(Duration::from_secs(5)).expect("a busy timeout");
        db
    }
}

#[async_trait]
impl Service for SqliteFile {
    async fn connect(&self) -> Arc<dyn LockBackend> {
        connect(self.path.display().to_string()).await
    }

    async fn holder(&self, name: &LockName) -> Option<OwnerDigest> {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("Linux has a boot id");
        let now = i64::try_from(BootClock::read().as_nanos()).expect("within 292 years of boot");
        let owner: Option<[u8; 16]> = self
            .table()
            .query_row(
                "SELECT owner FROM lockcore_leases
                 WHERE namespace = '' AND name = ?1 AND owner IS NOT NULL AND expires > ?2 AND boot = ?3",
                params![name.as_str(), now, boot.trim()],
                |row| row.get(0),
            )
            .optional()
            .expect("the table can be read");
        owner.map(|bytes| Owner::from_bytes(bytes).digest())
    }

    fn embedded(&self) -> bool {
        true
    }
    async fn steal(&self, name: &LockName) {
        self.table()
            .execute("DELETE FROM lockcore_leases WHERE namespace = '' AND name = ?1", [name.as_str()])
            .expect("an operator may delete");
    }

    async fn version(&self) -> Option<String> {
        Some(format!("SQLite {}", rusqlite::version()))
    }

    fn address(&self) -> Option<String> {
        Some(self.path.display().to_string())
    }
}

async fn connect(path: String) -> Arc<dyn LockBackend> {
    Arc::new(SqliteBackend::open(SqliteConfig::new(path)).await.expect("the file can be opened"))
}

fn main() -> ExitCode {
    Suite::new("sqlite", async || SqliteFile::new()).processes(connect).main()
}
