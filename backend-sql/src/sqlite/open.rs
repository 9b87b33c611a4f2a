//! Opens the file, or says why it will not do.

use std::{path::Path, thread, time::Duration, time::Instant};

use lockcore::backend::{Error, ErrorKind, Result};
use rusqlite::{Connection, OpenFlags, OptionalExtension as _, TransactionBehavior, named_params};

use super::{
    config::SqliteConfig,
    error::Failure,
    place::{self, ClockId, FileId, Place, random},
    wire::{self, APPLICATION_ID, LEASES_TABLE, META_TABLE, SCHEMA_VERSION, Store},
};

/// `RETURNING` came with 3.35, `STRICT` with 3.37.
const OLDEST_SQLITE: i32 = 3_037_000;

/// Processes that open a new file at the same time find it busy in ways that no busy handler is asked about.
const OPENING: Duration = Duration::from_secs(5);

/// A file that will do.
pub(super) struct Opened {
    pub(super) store: Store,
    pub(super) place: Place,
    pub(super) file: FileId,
}

/// Opens the file, creates what is missing in it, and refuses what is not ours.
///
/// # Errors
/// `Misconfigured`, `Unauthorized`: it will not do, and the message says why. `Unavailable`: the disk is full, or the
/// file stayed busy.
pub(super) fn open(config: &SqliteConfig) -> Result<Opened> {
    if rusqlite::version_number() < OLDEST_SQLITE {
        return Err(misconfigured(format!(
            "SQLite {} is too old, 3.37 is needed; build with the feature `sqlite`, which brings its own",
            rusqlite::version()
        )));
    }
    let place = place::survey(config)?;
    let clock = config.host.clock()?;
    let end = Instant::now() + OPENING;
    loop {
        wire::be_patient(end.saturating_duration_since(Instant::now()));
        match try_open(config, &clock) {
            Ok(db) => {
                let file = FileId::of(&config.path)
                    .map_err(|e| misconfigured(format!("{:?} has vanished", config.path)).with_source(e))?;
                return Ok(Opened { store: Store::new(db, clock), place, file });
            }
            Err(Refusal::Sqlite(failure)) if failure.is_busy() && Instant::now() < end => {
                thread::sleep(Duration::from_micros(500 + u64::from(random() % 5_000)));
            }
            Err(Refusal::Sqlite(failure)) => {
                let error = Error::from(failure);
                // Nothing is held yet: an unconfirmed commit here created tables, at most.
                let kind = match error.kind() {
                    ErrorKind::Unknown => ErrorKind::Unavailable,
                    kind => kind,
                };
                let message = format!("{:?}: {}", config.path, error.message());
                return Err(Error::new(kind, message).with_source(error));
            }
            Err(Refusal::Ours(error)) => return Err(error),
        }
    }
}

enum Refusal {
    Sqlite(Failure),
    Ours(Error),
}

impl From<rusqlite::Error> for Refusal {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sqlite(Failure::work(error))
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self::Ours(error)
    }
}

fn try_open(config: &SqliteConfig, clock: &ClockId) -> Result<Connection, Refusal> {
    let path = &config.path;
    // No URI: a path may contain a question mark. No mutex: the connection stays on one thread.
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let mut db = Connection::open_with_flags(path, flags)?;
    wire::equip(&mut db)?;
    // Hostile file: its schema may not call functions with side effects.
    db.execute_batch("PRAGMA trusted_schema = OFF")?;

    // Read everything that may refuse the file before the first write to it.
    look_at_owner(&mut db, path)?;
    if let Some(pages) = config.host.max_pages {
        db.execute_batch(&format!("PRAGMA max_page_count = {pages}"))?;
    }
    let mode: String = db.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0))?;
    if !mode.eq_ignore_ascii_case("wal") {
        return Err(misconfigured(format!(
            "{path:?} cannot be switched to a write-ahead log (its journal mode stays {mode:?}); its file system does \
             not offer shared memory, so choose a path on a local disk"
        ))
        .into());
    }
    // The fence must be on the disk before anybody carries it to a resource.
    db.execute_batch("PRAGMA synchronous = FULL")?;
    let synchronous: i64 = db.query_row("PRAGMA synchronous", [], |row| row.get(0))?;
    if synchronous < 2 {
        return Err(misconfigured(format!("{path:?} cannot be written with synchronous = FULL")).into());
    }

    create_tables(&mut db, path, clock)?;
    check_tables(&db, path)?;
    adopt_clock(&mut db, path, clock)?;
    Ok(db)
}

/// Checks whose file it is, all of it in one transaction: between two looks another process may create its tables.
fn look_at_owner(db: &mut Connection, path: &Path) -> Result<(), Refusal> {
    let snapshot = db.transaction_with_behavior(TransactionBehavior::Deferred)?;
    check_owner(&snapshot, path)
}

/// Refuses a file that is somebody else's, before anything is changed in it.
fn check_owner(db: &Connection, path: &Path) -> Result<(), Refusal> {
    let (application, version): (i32, i32) = db.query_row(
        "SELECT application_id, user_version FROM pragma_application_id, pragma_user_version",
        [],
        |row| Ok((row.get(0)?, row.get(1)?)),
    )?;
    if application == APPLICATION_ID {
        return match version {
            SCHEMA_VERSION => Ok(()),
            newer if newer > SCHEMA_VERSION => Err(misconfigured(format!(
                "{path:?} was written by a newer version (its tables have version {newer}, this program knows \
                 {SCHEMA_VERSION}); update this program"
            ))
            .into()),
            other => Err(misconfigured(format!(
                "{path:?} has tables of version {other}, which never was; restore or remove the file"
            ))
            .into()),
        };
    }
    let tables: i64 = db.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    if application != 0 || version != 0 || tables > 0 {
        return Err(misconfigured(format!(
            "{path:?} is a database of something else; locks need a file of their own, because other transactions \
             would make holders wait"
        ))
        .into());
    }
    Ok(())
}

fn create_tables(db: &mut Connection, path: &Path, clock: &ClockId) -> Result<(), Refusal> {
    let exists = |db: &Connection| -> Result<bool, Refusal> {
        let id: i32 = db.query_row("PRAGMA application_id", [], |row| row.get(0))?;
        Ok(id == APPLICATION_ID)
    };
    if exists(db)? {
        return Ok(());
    }
    let transaction = db.transaction_with_behavior(TransactionBehavior::Immediate)?;
    // Another process may have been faster, and need not have been one of ours.
    if exists(&transaction)? {
        return Ok(());
    }
    check_owner(&transaction, path)?;
    transaction.execute_batch(META_TABLE)?;
    transaction.execute_batch(LEASES_TABLE)?;
    transaction.execute(
        "INSERT INTO lockcore_meta (id, floor, boot, time_namespace, collected, settled)
         VALUES (1, 0, :boot, :time_namespace, lockcore_seed() / 1000000, 0)",
        named_params! { ":boot": clock.boot, ":time_namespace": clock.time_namespace },
    )?;
    transaction.execute_batch(&format!(
        "PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION}"
    ))?;
    transaction.commit().map_err(|e| Refusal::Sqlite(Failure::commit(e)))?;
    // The pages get their room in the file now, so that a disk which is full later can be worked on in place. That others
    // are at it already is no harm.
    db.query_row("PRAGMA wal_checkpoint(RESTART)", [], |_| Ok(()))?;
    Ok(())
}

/// Compares the tables with what this version creates, letter by letter: a table of the same name is not enough.
fn check_tables(db: &Connection, path: &Path) -> Result<(), Refusal> {
    for (table, expected) in [("lockcore_meta", META_TABLE), ("lockcore_leases", LEASES_TABLE)] {
        let found: Option<String> = db
            .query_row(
                "SELECT sql FROM sqlite_schema WHERE type = 'table' AND name = :table",
                named_params! { ":table": table },
                |row| row.get(0),
            )
            .optional()?;
        if found.as_deref() != Some(expected) {
            let what = if found.is_some() { "is not as this version creates it" } else { "is missing" };
            return Err(misconfigured(format!(
                "the table {table} in {path:?} {what}; somebody changed the file, so restore or remove it"
            ))
            .into());
        }
    }
    let strangers: i64 = db.query_row(
        "SELECT count(*) FROM sqlite_schema WHERE type = 'trigger' AND tbl_name LIKE 'lockcore!_%' ESCAPE '!'",
        [],
        |row| row.get(0),
    )?;
    if strangers > 0 {
        return Err(
            misconfigured(format!("somebody put triggers on the tables in {path:?}; remove them")).into()
        );
    }
    let rows: i64 = db.query_row("SELECT count(*) FROM lockcore_meta WHERE id = 1", [], |row| row.get(0))?;
    if rows != 1 {
        return Err(misconfigured(format!(
            "the row of lockcore_meta in {path:?} is missing, and with it the floor of all fences; restore or remove \
             the file"
        ))
        .into());
    }
    Ok(())
}

/// Writes down whose clock the file goes by, or refuses to share it with processes that have another.
///
/// After a reboot the first to come adopts the file: every lease in it is over. Under the same boot another time
/// namespace is adopted only when no lease of the old one is on record, because nobody here can tell when it ends.
fn adopt_clock(db: &mut Connection, path: &Path, clock: &ClockId) -> Result<(), Refusal> {
    let read = |db: &Connection| {
        db.query_row("SELECT boot, time_namespace FROM lockcore_meta", [], |row| {
            Ok(ClockId { boot: row.get(0)?, time_namespace: row.get(1)? })
        })
    };
    if read(db)? == *clock {
        return Ok(());
    }
    let transaction = db.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let found = read(&transaction)?;
    if found == *clock {
        return Ok(());
    }
    if found.boot == clock.boot {
        let held: i64 = transaction.query_row(
            "SELECT count(*) FROM lockcore_leases WHERE owner IS NOT NULL AND boot = :boot",
            named_params! { ":boot": clock.boot },
            |row| row.get(0),
        )?;
        if held > 0 {
            return Err(misconfigured(format!(
                "{path:?} is used in another time namespace, whose clock does not compare with this one's; run its \
                 users in one time namespace (nsenter --time, or no `--time` for the container), or give each its own \
                 file"
            ))
            .into());
        }
    }
    transaction.execute(
        "UPDATE lockcore_meta SET boot = :boot, time_namespace = :time_namespace",
        named_params! { ":boot": clock.boot, ":time_namespace": clock.time_namespace },
    )?;
    transaction.commit().map_err(|e| Refusal::Sqlite(Failure::commit(e)))
}

fn misconfigured(message: String) -> Error {
    Error::new(ErrorKind::Misconfigured, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_being_created_is_never_taken_for_somebody_elses() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("locks.db");
        let writer = Connection::open(&path).unwrap();
        writer.execute_batch("PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF").unwrap();
        let mut reader = Connection::open(&path).unwrap();
        std::thread::scope(|scope| {
            let creating = scope.spawn(move || {
                // Each of the two transactions leaves a file that will do: one of ours, and an empty one.
                for _ in 0..2_000 {
                    writer
                        .execute_batch(&format!(
                            "BEGIN IMMEDIATE; CREATE TABLE lockcore_meta (id); PRAGMA application_id = {APPLICATION_ID};
                             PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;
                             BEGIN IMMEDIATE; DROP TABLE lockcore_meta; PRAGMA application_id = 0;
                             PRAGMA user_version = 0; COMMIT"
                        ))
                        .unwrap();
                }
            });
            while !creating.is_finished() {
                match look_at_owner(&mut reader, &path) {
                    Ok(()) => {}
                    Err(Refusal::Sqlite(failure)) if failure.is_busy() => {}
                    Err(Refusal::Sqlite(failure)) => panic!("{}", Error::from(failure)),
                    Err(Refusal::Ours(error)) => panic!("a file of ours was refused: {error}"),
                }
            }
        });
    }
}
