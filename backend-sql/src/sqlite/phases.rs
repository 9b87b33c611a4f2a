//! The record of a migration's phases, and the memberships that bind to it: the atomic steps, one function each.
//!
//! Both tables are made by the first step that writes a record. A file that never takes part in a migration has neither.

use std::time::Duration;

use lockcore::backend::{Fence, Member, Owner, PhaseRecord};
use rusqlite::{Connection, OptionalExtension as _, named_params};

use super::{
    error::Failure,
    wire::{Step, Store, cached, transact},
};

const TABLES: &str = "CREATE TABLE IF NOT EXISTS lockcore_phases (
    namespace TEXT NOT NULL PRIMARY KEY,
    migration TEXT NOT NULL,
    epoch INTEGER NOT NULL CHECK (epoch >= 0),
    open TEXT NOT NULL,
    floor INTEGER CHECK (floor > 0)
) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS lockcore_members (
    namespace TEXT NOT NULL,
    owner BLOB NOT NULL CHECK (length(owner) = 16),
    phase TEXT NOT NULL,
    expires INTEGER NOT NULL,
    boot TEXT NOT NULL,
    time_namespace INTEGER NOT NULL,
    label TEXT,
    PRIMARY KEY (namespace, owner)
) STRICT, WITHOUT ROWID";

// As for leases: a row of another boot is over, and one whose clock does not compare with ours never is.
const OVER: &str = "(boot <> :boot OR (time_namespace = :time_namespace AND expires <= lockcore_now()))";

impl Store {
    /// Reads the record.
    pub(super) fn phase(&self, namespace: &str) -> Step<Option<PhaseRecord>> {
        if has_tables(&self.db)? { read(&self.db, namespace) } else { Ok(None) }
    }

    /// Replaces the record if it still is `expect`; says whether it did.
    pub(super) fn replace_phase(
        &mut self,
        namespace: &str,
        expect: Option<&PhaseRecord>,
        new: &PhaseRecord,
    ) -> Step<bool> {
        let answer = transact(&mut self.db, |db| {
            db.execute_batch(TABLES).map_err(Failure::work)?;
            if read(db, namespace)?.as_ref() != expect {
                return Ok(false);
            }
            let open: String = new.open.iter().map(|phase| format!("\n{}", escape(phase))).collect();
            cached(
                db,
                "INSERT OR REPLACE INTO lockcore_phases (namespace, migration, epoch, open, floor)
                 VALUES (:namespace, :migration, :epoch, :open, :floor)",
            )?
            .execute(named_params! {
                ":namespace": namespace, ":migration": new.migration,
                ":epoch": i64::try_from(new.epoch).unwrap_or(i64::MAX), ":open": open,
                ":floor": new.floor.map(Fence::get),
            })
            .map_err(Failure::work)?;
            Ok(true)
        });
        self.note(answer)
    }

    /// Adds a member if the phase is open; says whether it is. Members that are over go.
    pub(super) fn join(
        &mut self,
        namespace: &str,
        owner: &Owner,
        phase: &str,
        ttl: i64,
        label: Option<&str>,
    ) -> Step<bool> {
        let clock = &self.clock;
        let answer = transact(&mut self.db, |db| {
            if !has_tables(db)?
                || read(db, namespace)?.is_none_or(|record| !record.open.iter().any(|open| open == phase))
            {
                return Ok(false);
            }
            cached(db, &format!("DELETE FROM lockcore_members WHERE {OVER}"))?
                .execute(named_params! { ":boot": clock.boot, ":time_namespace": clock.time_namespace })
                .map_err(Failure::work)?;
            cached(
                db,
                "INSERT INTO lockcore_members (namespace, owner, phase, expires, boot, time_namespace, label)
                 VALUES (:namespace, :owner, :phase, lockcore_now() + :ttl, :boot, :time_namespace, :label)",
            )?
            .execute(named_params! {
                ":namespace": namespace, ":owner": owner.expose().as_slice(), ":phase": phase, ":ttl": ttl,
                ":boot": clock.boot, ":time_namespace": clock.time_namespace, ":label": label,
            })
            .map_err(Failure::work)?;
            Ok(true)
        });
        self.note(answer)
    }

    /// Moves the end of a membership, if it is live; says whether it is.
    pub(super) fn renew_member(&mut self, namespace: &str, owner: &Owner, ttl: i64) -> Step<bool> {
        if !has_tables(&self.db)? {
            return Ok(false);
        }
        let clock = &self.clock;
        let answer = transact(&mut self.db, |db| {
            cached(
                db,
                "UPDATE lockcore_members SET expires = max(expires, lockcore_now() + :ttl)
                 WHERE namespace = :namespace AND owner = :owner AND boot = :boot
                     AND time_namespace = :time_namespace AND expires > lockcore_now()",
            )?
            .execute(named_params! {
                ":namespace": namespace, ":owner": owner.expose().as_slice(), ":ttl": ttl,
                ":boot": clock.boot, ":time_namespace": clock.time_namespace,
            })
            .map_err(Failure::work)
        });
        self.note(answer).map(|moved| moved > 0)
    }

    /// Ends a membership; says whether there was one.
    pub(super) fn leave_phase(&mut self, namespace: &str, owner: &Owner) -> Step<bool> {
        if !has_tables(&self.db)? {
            return Ok(false);
        }
        let answer = transact(&mut self.db, |db| {
            cached(db, "DELETE FROM lockcore_members WHERE namespace = :namespace AND owner = :owner")?
                .execute(named_params! { ":namespace": namespace, ":owner": owner.expose().as_slice() })
                .map_err(Failure::work)
        });
        self.note(answer).map(|gone| gone > 0)
    }

    /// Lists who has joined and is not over.
    pub(super) fn members(&self, namespace: &str) -> Step<Vec<Member>> {
        if !has_tables(&self.db)? {
            return Ok(Vec::new());
        }
        let clock = &self.clock;
        let mut statement = cached(
            &self.db,
            &format!(
                "SELECT phase, owner, label, expires - lockcore_now(), time_namespace FROM lockcore_members
                 WHERE namespace = :namespace AND NOT {OVER} ORDER BY phase, label, owner"
            ),
        )?;
        let member = |row: &rusqlite::Row<'_>| {
            let (phase, owner): (String, [u8; 16]) = (row.get(0)?, row.get(1)?);
            let (label, left, time_namespace): (Option<String>, i64, i64) =
                (row.get(2)?, row.get(3)?, row.get(4)?);
            Ok(Member::new(phase, Owner::from_bytes(owner).digest()).with(|member| {
                member.label = label;
                member.remaining = (time_namespace == clock.time_namespace)
                    .then(|| Duration::from_nanos(left.max(0).unsigned_abs()));
            }))
        };
        statement
            .query_map(
                named_params! {
                    ":namespace": namespace, ":boot": clock.boot, ":time_namespace": clock.time_namespace,
                },
                member,
            )
            .and_then(Iterator::collect)
            .map_err(Failure::work)
    }
}

fn has_tables(db: &Connection) -> Step<bool> {
    cached(
        db,
        "SELECT count(*) = 2 FROM sqlite_schema WHERE name IN ('lockcore_phases', 'lockcore_members')",
    )?
    .query_row([], |row| row.get(0))
    .map_err(Failure::work)
}

fn read(db: &Connection, namespace: &str) -> Step<Option<PhaseRecord>> {
    cached(db, "SELECT migration, epoch, open, floor FROM lockcore_phases WHERE namespace = :namespace")?
        .query_row(named_params! { ":namespace": namespace }, |row| {
            let (migration, epoch, open): (String, i64, String) = (row.get(0)?, row.get(1)?, row.get(2)?);
            let mut record = PhaseRecord::new(migration, epoch.unsigned_abs());
            record.open = open.split('\n').skip(1).map(unescape).collect();
            record.floor = row.get::<_, Option<i64>>(3)?.and_then(|floor| Fence::new(floor).ok());
            Ok(record)
        })
        .optional()
        .map_err(Failure::work)
}

fn escape(phase: &str) -> String {
    phase.replace('%', "%25").replace('\n', "%0A")
}

fn unescape(phase: &str) -> String {
    phase.replace("%0A", "\n").replace("%25", "%")
}
