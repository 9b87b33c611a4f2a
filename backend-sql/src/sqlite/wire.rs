//! The atomic steps, one function each: they report, they do not decide.
//!
//! A step is one statement wherever possible. In WAL mode a single writing statement takes the write lock before it
//! reads anything, as `BEGIN IMMEDIATE` does, and commits when it has been stepped to its end. So a failure before the
//! first row is a failure before the commit, and [`Phase`](super::error::Phase) can tell the two apart.
//!
//! Time is read by SQL functions inside the statements. A parameter would be read before the wait for the write lock,
//! and a lease that ended during the wait would be renewed.

use std::{cell::Cell, thread, time::Duration, time::Instant};

use lockcore::backend::{Fence, LockName, Owner};
use rusqlite::{
    CachedStatement, Connection, OptionalExtension as _, Params, Row, TransactionBehavior,
    functions::FunctionFlags, named_params,
};

use super::{
    error::Failure,
    place::{ClockId, now, random},
};

/// `LkCr`: what marks a file as ours, in the header and for file(1).
pub(super) const APPLICATION_ID: i32 = 0x4c6b_4372;
/// The version of the tables below.
pub(super) const SCHEMA_VERSION: i32 = 1;

pub(super) const META_TABLE: &str = "CREATE TABLE lockcore_meta (
    id INTEGER PRIMARY KEY CHECK (id = 1),
    floor INTEGER NOT NULL,
    boot TEXT NOT NULL,
    time_namespace INTEGER NOT NULL,
    collected INTEGER NOT NULL,
    settled INTEGER NOT NULL
) STRICT";

pub(super) const LEASES_TABLE: &str = "CREATE TABLE lockcore_leases (
    namespace TEXT NOT NULL,
    name TEXT NOT NULL,
    owner BLOB CHECK (length(owner) = 16),
    fence INTEGER NOT NULL CHECK (fence >= 0),
    floor INTEGER NOT NULL CHECK (floor >= 0),
    granted INTEGER NOT NULL,
    expires INTEGER NOT NULL,
    boot TEXT NOT NULL,
    time_namespace INTEGER NOT NULL,
    label TEXT,
    broken INTEGER,
    used INTEGER NOT NULL,
    PRIMARY KEY (namespace, name)
) STRICT, WITHOUT ROWID";

// Grants a name that nobody holds. The row stays when a lease ends, so the fence only grows; a new row starts above what
// collected rows have left in `lockcore_meta.floor`. The seed by time covers what a file cannot know: that it was
// restored from a copy, or that an administrator deleted rows. A row whose clock has the same boot and another time
// namespace is never over for us, because its moments do not compare with ours.
const GRANT: &str = "INSERT INTO lockcore_leases AS l
    (namespace, name, owner, fence, floor, granted, expires, boot, time_namespace, label, broken, used)
VALUES (:namespace, :name, :owner,
    max((SELECT floor FROM lockcore_meta) + 1, :floor + 1, lockcore_seed()), 0,
    lockcore_now(), lockcore_now() + :ttl, :boot, :time_namespace, :label, NULL, lockcore_seed() / 1000000)
ON CONFLICT (namespace, name) DO UPDATE SET
    owner = excluded.owner, fence = max(l.fence + 1, l.floor + 1, excluded.fence), granted = excluded.granted,
    expires = excluded.expires, boot = excluded.boot, time_namespace = excluded.time_namespace,
    label = excluded.label, used = excluded.used
WHERE l.owner IS NULL OR l.boot <> excluded.boot
    OR (l.time_namespace = excluded.time_namespace AND l.expires <= excluded.granted)
RETURNING fence";

const LOOK: &str =
    "SELECT owner, fence, floor, granted, expires, boot, time_namespace, label, broken, lockcore_now()
FROM lockcore_leases WHERE namespace = :namespace AND name = :name";

// Owner and fence: the owner alone would let a late renewal of an earlier holding pass. `max`: a renewal never shortens.
const RENEW: &str = "UPDATE lockcore_leases SET expires = max(expires, lockcore_now() + :ttl)
WHERE namespace = :namespace AND name = :name AND owner = :owner AND fence = :fence
    AND boot = :boot AND time_namespace = :time_namespace AND expires > lockcore_now()
RETURNING expires - lockcore_now()";

const RELEASE: &str = "UPDATE lockcore_leases SET owner = NULL, used = lockcore_seed() / 1000000
WHERE namespace = :namespace AND name = :name AND owner = :owner AND fence = :fence
    AND boot = :boot AND time_namespace = :time_namespace AND expires > lockcore_now()
RETURNING fence";

// Whatever fence this owner got, alive or not: nothing of the acquisition is left.
const ABANDON: &str = "UPDATE lockcore_leases SET owner = NULL, used = lockcore_seed() / 1000000
WHERE namespace = :namespace AND name = :name AND owner = :owner
RETURNING fence";

const RAISE_HOLDING: &str = "UPDATE lockcore_leases SET floor = max(floor, :floor)
WHERE namespace = :namespace AND name = :name AND owner = :owner AND fence = :fence
    AND boot = :boot AND time_namespace = :time_namespace AND expires > lockcore_now()
RETURNING floor";

const RAISE_NAME: &str = "INSERT INTO lockcore_leases AS l
    (namespace, name, owner, fence, floor, granted, expires, boot, time_namespace, label, broken, used)
VALUES (:namespace, :name, NULL, 0, max(:floor, (SELECT floor FROM lockcore_meta)), 0, 0, :boot, :time_namespace,
    NULL, NULL, lockcore_seed() / 1000000)
ON CONFLICT (namespace, name) DO UPDATE SET floor = max(l.floor, l.fence, :floor), used = excluded.used
RETURNING floor";

// A break is itself a grant, to nobody: its number lies above the broken fence and below the next one.
const BREAK: &str = "INSERT INTO lockcore_leases AS l
    (namespace, name, owner, fence, floor, granted, expires, boot, time_namespace, label, broken, used)
VALUES (:namespace, :name, NULL, 0, max((SELECT floor FROM lockcore_meta) + 1, lockcore_seed()), 0, 0, :boot,
    :time_namespace, NULL, NULL, lockcore_seed() / 1000000)
ON CONFLICT (namespace, name) DO UPDATE SET
    broken = iif(l.owner IS NULL, l.broken, l.fence), owner = NULL,
    floor = max(l.fence + 1, l.floor + 1, excluded.floor), used = excluded.used
RETURNING floor";

const HIGH_WATER: &str = "SELECT max(
    (SELECT floor FROM lockcore_meta),
    coalesce((SELECT max(max(fence, floor)) FROM lockcore_leases WHERE namespace = :namespace), 0))";

const NAMES: &str = "SELECT name FROM lockcore_leases WHERE namespace = :namespace AND name > :after
ORDER BY name LIMIT :page";

// `0` follows `/`: the range is the prefix, what lies below it, and what merely begins like it (`a!` beside `a`).
const NAMES_UNDER: &str = "SELECT name FROM lockcore_leases WHERE namespace = :namespace AND name > :after
    AND name >= :prefix AND name < :prefix || '0' AND (name = :prefix OR name >= :prefix || '/')
ORDER BY name LIMIT :page";

// The condition of an idle row is written twice on purpose: the candidates are found without the write lock.
const IDLE: &str = "SELECT namespace, name FROM lockcore_leases
WHERE used < :before AND (owner IS NULL OR boot <> :boot
    OR (time_namespace = :time_namespace AND expires <= lockcore_now()))
LIMIT :page";

const COLLECT: &str = "DELETE FROM lockcore_leases
WHERE namespace = :namespace AND name = :name AND used < :before AND (owner IS NULL OR boot <> :boot
    OR (time_namespace = :time_namespace AND expires <= lockcore_now()))
RETURNING max(fence, floor)";

/// One name in one namespace. Two columns, so no two pairs share a key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) namespace: Box<str>,
    pub(super) name: LockName,
}

/// A row, as it was at one moment.
#[derive(Clone, Debug)]
pub(super) struct Record {
    pub(super) owner: Option<Owner>,
    /// The highest fence that was granted; zero when none was.
    pub(super) fence: i64,
    pub(super) standing: Standing,
    pub(super) since: Duration,
    pub(super) label: Option<String>,
    /// The fence of the last lease that was broken.
    pub(super) broken: Option<i64>,
}

/// What the clock says about a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Held for so much longer.
    Live(Duration),
    /// Released, expired, or from another boot.
    Over,
    /// Written under this boot on a clock that does not compare with ours.
    Foreign,
}

/// An open file, and the clock its leases are judged by.
pub(super) struct Store {
    pub(super) db: Connection,
    pub(super) clock: ClockId,
    /// A commit failed in a way that a later recovery might undo: see [`settle`](Store::settle).
    in_doubt: bool,
}

pub(super) type Step<T> = Result<T, Failure>;

impl Store {
    pub(super) fn new(db: Connection, clock: ClockId) -> Self {
        Self { db, clock, in_doubt: false }
    }

    /// Grants the name if nobody holds it, and returns the fence.
    pub(super) fn grant(
        &mut self,
        key: &Key,
        owner: &Owner,
        ttl: i64,
        floor: i64,
        label: Option<&str>,
    ) -> Step<Option<i64>> {
        let clock = &self.clock;
        let answer = change(
            &self.db,
            GRANT,
            named_params! {
                ":namespace": key.namespace, ":name": key.name.as_str(), ":owner": owner.expose().as_slice(),
                ":floor": floor, ":ttl": ttl, ":boot": clock.boot, ":time_namespace": clock.time_namespace,
                ":label": label,
            },
            |row| row.get(0),
        );
        self.note(answer)
    }

    /// Reads the row, without the write lock.
    pub(super) fn look(&self, key: &Key) -> Step<Option<Record>> {
        let clock = &self.clock;
        let mut statement = cached(&self.db, LOOK)?;
        statement
            .query_row(named_params! { ":namespace": key.namespace, ":name": key.name.as_str() }, |row| {
                record(row, clock)
            })
            .optional()
            .map_err(Failure::work)
    }

    /// Moves the end of this very lease, if it is live; returns what is left of it.
    pub(super) fn renew(&mut self, key: &Key, owner: &Owner, fence: Fence, ttl: i64) -> Step<Option<i64>> {
        let answer = renew(&self.db, &self.clock, key, owner, fence, ttl);
        self.note(answer)
    }

    /// Renews several in one transaction: one commit, in order.
    pub(super) fn renew_many(&mut self, leases: &[(Key, Owner, Fence)], ttl: i64) -> Step<Vec<Option<i64>>> {
        let clock = &self.clock;
        let answer = transact(&mut self.db, |db| {
            leases.iter().map(|(key, owner, fence)| renew(db, clock, key, owner, *fence, ttl)).collect()
        });
        self.note(answer)
    }

    /// Ends this very lease, if it is live; says whether it was.
    pub(super) fn release(&mut self, key: &Key, owner: &Owner, fence: Fence) -> Step<bool> {
        let clock = &self.clock;
        let answer = change(
            &self.db,
            RELEASE,
            named_params! {
                ":namespace": key.namespace, ":name": key.name.as_str(), ":owner": owner.expose().as_slice(),
                ":fence": fence.get(), ":boot": clock.boot, ":time_namespace": clock.time_namespace,
            },
            |row| row.get::<_, i64>(0),
        );
        self.note(answer).map(|fence| fence.is_some())
    }

    /// Ends whatever this owner holds of the name; says whether there was something.
    pub(super) fn abandon(&mut self, key: &Key, owner: &Owner) -> Step<bool> {
        let answer = change(
            &self.db,
            ABANDON,
            named_params! {
                ":namespace": key.namespace, ":name": key.name.as_str(), ":owner": owner.expose().as_slice(),
            },
            |row| row.get::<_, i64>(0),
        );
        self.note(answer).map(|fence| fence.is_some())
    }

    /// Raises the floor of the name while this very lease is live; returns the floor.
    pub(super) fn raise_holding(
        &mut self,
        key: &Key,
        owner: &Owner,
        fence: Fence,
        floor: Fence,
    ) -> Step<Option<i64>> {
        let clock = &self.clock;
        let answer = change(
            &self.db,
            RAISE_HOLDING,
            named_params! {
                ":namespace": key.namespace, ":name": key.name.as_str(), ":owner": owner.expose().as_slice(),
                ":fence": fence.get(), ":floor": floor.get(), ":boot": clock.boot,
                ":time_namespace": clock.time_namespace,
            },
            |row| row.get(0),
        );
        self.note(answer)
    }

    /// Raises the floor of the name, held or not; returns it.
    pub(super) fn raise_name(&mut self, key: &Key, floor: Fence) -> Step<Option<i64>> {
        let clock = &self.clock;
        let answer = change(
            &self.db,
            RAISE_NAME,
            named_params! {
                ":namespace": key.namespace, ":name": key.name.as_str(), ":floor": floor.get(),
                ":boot": clock.boot, ":time_namespace": clock.time_namespace,
            },
            |row| row.get(0),
        );
        self.note(answer)
    }

    /// Takes the name from whoever `allowed` accepts, and returns what the row was and the number of the break; the
    /// number is missing where `allowed` refused.
    pub(super) fn take_away(
        &mut self,
        key: &Key,
        allowed: impl FnOnce(Option<&Record>) -> bool,
    ) -> Step<(Option<Record>, Option<i64>)> {
        let clock = &self.clock;
        let answer = transact(&mut self.db, |db| {
            let before = cached(db, LOOK)?
                .query_row(named_params! { ":namespace": key.namespace, ":name": key.name.as_str() }, |row| {
                    record(row, clock)
                })
                .optional()
                .map_err(Failure::work)?;
            if !allowed(before.as_ref()) {
                return Ok((before, None));
            }
            let floor = change(
                db,
                BREAK,
                named_params! {
                    ":namespace": key.namespace, ":name": key.name.as_str(), ":boot": clock.boot,
                    ":time_namespace": clock.time_namespace,
                },
                |row| row.get(0),
            )?;
            Ok((before, floor))
        });
        self.note(answer)
    }

    /// Reads the highest number that the namespace may have given out; zero when it has not.
    pub(super) fn high_water(&self, namespace: &str) -> Step<i64> {
        cached(&self.db, HIGH_WATER)?
            .query_row(named_params! { ":namespace": namespace }, |row| row.get(0))
            .map_err(Failure::work)
    }

    /// Reads a page of names, in order.
    pub(super) fn names(
        &self,
        namespace: &str,
        prefix: Option<&LockName>,
        after: Option<&LockName>,
        page: i64,
    ) -> Step<Vec<String>> {
        let after = after.map_or("", LockName::as_str);
        let read = |row: &Row<'_>| row.get(0);
        let names = match prefix {
            Some(prefix) => cached(&self.db, NAMES_UNDER)?
                .query_map(
                    named_params! {
                        ":namespace": namespace, ":after": after, ":prefix": prefix.as_str(), ":page": page,
                    },
                    read,
                )
                .and_then(Iterator::collect),
            None => cached(&self.db, NAMES)?
                .query_map(named_params! { ":namespace": namespace, ":after": after, ":page": page }, read)
                .and_then(Iterator::collect),
        };
        names.map_err(Failure::work)
    }

    /// Deletes rows that nobody has used since `before` (seconds since 1970), at most a page, and keeps their fences
    /// in the floor of the file, in one transaction. Returns how many.
    pub(super) fn collect(&mut self, before: i64, page: i64) -> Step<usize> {
        let clock = &self.clock;
        let idle: Vec<(String, String)> = cached(&self.db, IDLE)?
            .query_map(
                named_params! {
                    ":before": before, ":boot": clock.boot, ":time_namespace": clock.time_namespace,
                    ":page": page,
                },
                |row| Ok((row.get(0)?, row.get(1)?)),
            )
            .and_then(Iterator::collect)
            .map_err(Failure::work)?;
        let answer = transact(&mut self.db, |db| {
            let mut deleted = 0;
            let mut floor = 0;
            for (namespace, name) in &idle {
                let highest: Option<i64> = change(
                    db,
                    COLLECT,
                    named_params! {
                        ":namespace": namespace, ":name": name, ":before": before, ":boot": clock.boot,
                        ":time_namespace": clock.time_namespace,
                    },
                    |row| row.get(0),
                )?;
                if let Some(highest) = highest {
                    deleted += 1;
                    floor = highest.max(floor);
                }
            }
            cached(
                db,
                "UPDATE lockcore_meta SET floor = max(floor, :floor), collected = lockcore_seed() / 1000000",
            )?
            .execute(named_params! { ":floor": floor })
            .map_err(Failure::work)?;
            Ok(deleted)
        });
        self.note(answer)
    }

    /// Deletes all rows of a namespace, and keeps nothing of them. Returns how many.
    #[cfg(feature = "config")]
    pub(super) fn sweep(&mut self, namespace: &str) -> Step<usize> {
        let answer = transact(&mut self.db, |db| {
            cached(db, "DELETE FROM lockcore_leases WHERE namespace = :namespace")?
                .execute(named_params! { ":namespace": namespace })
                .map_err(Failure::work)
        });
        self.note(answer)
    }

    /// Reads when rows were last collected, in seconds since 1970.
    pub(super) fn collected(&self) -> Step<i64> {
        cached(&self.db, "SELECT collected FROM lockcore_meta")?
            .query_row([], |row| row.get(0))
            .map_err(Failure::work)
    }

    /// Makes sure that a commit which was not confirmed never comes.
    ///
    /// After a failed commit the frames may stand complete in the log, although no reader sees them: the recovery after
    /// a crash of all users would. The next commit overwrites them, and this is one. Until it succeeds, "gone" is not
    /// known.
    pub(super) fn settle(&mut self) -> Step<()> {
        if !self.in_doubt {
            return Ok(());
        }
        change(&self.db, "UPDATE lockcore_meta SET settled = settled + 1 RETURNING settled", [], |row| {
            row.get::<_, i64>(0)
        })?;
        self.in_doubt = false;
        Ok(())
    }

    /// Moves the log into the file, so that the log is written from its beginning again and needs no more room; says
    /// whether that was possible.
    pub(super) fn make_room(&self) -> Step<bool> {
        self.db
            .query_row("PRAGMA wal_checkpoint(RESTART)", [], |row| Ok(row.get::<_, i64>(0)? == 0))
            .map_err(Failure::work)
    }

    /// Reads a setting of the connection: for a look at the set-up.
    pub(super) fn pragma(&self, name: &str) -> Step<String> {
        self.db
            .query_row(&format!("PRAGMA {name}"), [], |row| {
                row.get_ref(0).map(|value| match value {
                    rusqlite::types::ValueRef::Integer(number) => number.to_string(),
                    value => String::from_utf8_lossy(value.as_bytes().unwrap_or_default()).into_owned(),
                })
            })
            .map_err(Failure::work)
    }

    pub(super) fn note<T>(&mut self, answer: Step<T>) -> Step<T> {
        if let Err(failure) = &answer {
            self.in_doubt |= failure.is_in_doubt();
        }
        answer
    }

    #[cfg(test)]
    pub(super) fn doubt(&mut self) {
        self.in_doubt = true;
    }

    #[cfg(test)]
    pub(super) fn raw(&self) -> &Connection {
        &self.db
    }
}

fn renew(
    db: &Connection,
    clock: &ClockId,
    key: &Key,
    owner: &Owner,
    fence: Fence,
    ttl: i64,
) -> Step<Option<i64>> {
    change(
        db,
        RENEW,
        named_params! {
            ":namespace": key.namespace, ":name": key.name.as_str(), ":owner": owner.expose().as_slice(),
            ":fence": fence.get(), ":ttl": ttl, ":boot": clock.boot, ":time_namespace": clock.time_namespace,
        },
        |row| row.get(0),
    )
}

fn record(row: &Row<'_>, clock: &ClockId) -> rusqlite::Result<Record> {
    let owner: Option<[u8; 16]> = row.get(0)?;
    let (granted, expires, now): (i64, i64, i64) = (row.get(3)?, row.get(4)?, row.get(9)?);
    let boot = row.get_ref(5)?.as_str()?;
    let time_namespace: i64 = row.get(6)?;
    let standing = if owner.is_none() || boot != clock.boot {
        Standing::Over
    } else if time_namespace != clock.time_namespace {
        Standing::Foreign
    } else if expires <= now {
        Standing::Over
    } else {
        Standing::Live(span(now, expires))
    };
    Ok(Record {
        owner: owner.map(Owner::from_bytes),
        fence: row.get(1)?,
        standing,
        since: span(granted, now),
        label: row.get(7)?,
        broken: row.get(8)?,
    })
}

fn span(from: i64, to: i64) -> Duration {
    Duration::from_nanos(to.saturating_sub(from).max(0) as u64)
}

pub(super) fn cached<'db>(db: &'db Connection, sql: &str) -> Step<CachedStatement<'db>> {
    db.prepare_cached(sql).map_err(Failure::work)
}

/// Runs a statement that changes at most one row, and reads what it returns of it.
///
/// `query_row` would not do: it resets the statement after the first row, the commit happens in the reset, and its
/// failure is not reported.
fn change<T>(
    db: &Connection,
    sql: &str,
    values: impl Params,
    read: impl FnOnce(&Row<'_>) -> rusqlite::Result<T>,
) -> Step<Option<T>> {
    // Inside a transaction the end of a statement commits nothing.
    let at_the_end = if db.is_autocommit() { Failure::commit } else { Failure::work };
    let mut statement = cached(db, sql)?;
    let mut rows = statement.query(values).map_err(Failure::work)?;
    let Some(row) = rows.next().map_err(Failure::work)? else {
        return Ok(None);
    };
    let value = read(row).map_err(at_the_end)?;
    match rows.next() {
        Ok(_) => Ok(Some(value)),
        Err(error) => Err(at_the_end(error)),
    }
}

pub(super) fn transact<T>(db: &mut Connection, work: impl FnOnce(&Connection) -> Step<T>) -> Step<T> {
    let transaction = db.transaction_with_behavior(TransactionBehavior::Immediate).map_err(Failure::work)?;
    let value = work(&transaction)?;
    transaction.commit().map_err(Failure::commit)?;
    Ok(value)
}

thread_local! {
    // SQLite's busy handler is a plain function; each connection stays on its own thread.
    static PATIENCE: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Bounds how long the steps of this thread stand at the write lock from now on.
pub(super) fn be_patient(patience: Duration) {
    PATIENCE.set(Instant::now().checked_add(patience));
}

// A transaction here takes as long as one flush to the disk, so looks are closer together than SQLite's own.
fn stand_at_the_file(looks: i32) -> bool {
    if PATIENCE.get().is_none_or(|end| Instant::now() >= end) {
        return false;
    }
    let longest = if looks < 10 { 500 } else { 3_000 };
    thread::sleep(Duration::from_micros(100 + u64::from(random() % longest)));
    true
}

/// Gives a connection its clocks and its manner of waiting.
pub(super) fn equip(db: &mut Connection) -> rusqlite::Result<()> {
    // Not deterministic: a deterministic function may be evaluated once for many rows, or before the write lock is held.
    let flags = FunctionFlags::SQLITE_UTF8 | FunctionFlags::SQLITE_DIRECTONLY;
    db.create_scalar_function("lockcore_now", 0, flags, |_| Ok(now()))?;
    db.create_scalar_function("lockcore_seed", 0, flags, |_| Ok(micros_since_1970()))?;
    db.set_prepared_statement_cache_capacity(32);
    db.busy_handler(Some(stand_at_the_file as fn(i32) -> bool))
}

/// Reads the wall clock: for the seed of the fence and for idleness, never for a lease.
pub(super) fn micros_since_1970() -> i64 {
    std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |age| i64::try_from(age.as_micros()).unwrap_or(0))
}
