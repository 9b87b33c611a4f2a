//! A side table of floors, for resources that have no fence column of their own.

use lockcore::Stamp;
use rusqlite::{Connection, OptionalExtension, Transaction, params};

use super::Error;
use crate::{
    sql,
    stale::{Stale, Verdict, check},
};

/// A `fences` table for resources that have no fence column of their own: whole tables, invariants over several rows,
/// inserts and deletes.
///
/// The caller's statements run in the same transaction, after the guard. A resource is whatever the lock protects;
/// usually it is called like the lock.
///
/// # Shape
/// `fences(resource, fence, owner)`: one row a resource, for good, because deleting it forgets the floor.
/// `fence_ops(resource, fence, owner, op)`: the operations of the newest holder, and of the last one before it that
/// wrote; older ones go when the floor moves. A business-wide idempotency key is the application's own column.
///
/// # Example
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use lockcore_fenced::{Verdict, sqlite::FenceTable};
/// use rusqlite::{Connection, TransactionBehavior};
///
/// let mut db = Connection::open_in_memory()?;
/// FenceTable.create(&db)?;
/// db.execute_batch("create table stock(n integer not null); insert into stock values(5)")?;
///
/// let stamp = "42.9f3c52d1a07be664".parse()?; // in a program: held.stamp()?
/// let tx = db.transaction_with_behavior(TransactionBehavior::Immediate)?;
/// if FenceTable.admit(&tx, "stock", stamp, "sell/7")? == Verdict::Accepted {
///     tx.execute("update stock set n = n - 1", [])?;
/// }
/// tx.commit()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct FenceTable;

impl FenceTable {
    /// Creates the tables if they are missing.
    ///
    /// # Errors
    /// Those of the database.
    pub fn create(self, db: &Connection) -> rusqlite::Result<()> {
        db.execute(sql::CREATE_FENCES, [])?;
        db.execute(sql::CREATE_OPS, [])?;
        Ok(())
    }

    /// Raises the floor of `resource`: before a read that a later write depends on. It counts when the transaction
    /// commits.
    ///
    /// # Errors
    /// [`Error::Stale`]: a newer holder, or another one with the same fence, has been here.
    pub fn touch(self, tx: &Transaction<'_>, resource: &str, stamp: Stamp) -> Result<(), Error> {
        self.touch_all(tx, &[(resource, stamp)])
    }

    /// Raises the floors of several resources, or of none.
    ///
    /// # Errors
    /// [`Error::Stale`]: one of them refused; nothing changed.
    pub fn touch_all(self, tx: &Transaction<'_>, resources: &[(&str, Stamp)]) -> Result<(), Error> {
        let resources = ordered(resources)?;
        take_write_lock(tx)?;
        for (resource, stamp) in &resources {
            sql::judge(*stamp, read(tx, resource)?)?;
        }
        raise_all(tx, &resources)
    }

    /// Judges a write, and records it as done. Takes a transaction and not a connection: a check outside it checks
    /// nothing.
    ///
    /// `op` names the operation in the caller's own terms and is the same when the caller retries. When applying it
    /// fails, roll back: check, record and effect stand or fall together.
    ///
    /// # Errors
    /// [`Error::Stale`]: a newer holder, or another one with the same fence, has been here.
    pub fn admit(
        self,
        tx: &Transaction<'_>,
        resource: &str,
        stamp: Stamp,
        op: &str,
    ) -> Result<Verdict, Error> {
        self.admit_all(tx, &[(resource, stamp)], op)
    }

    /// Judges a write that touches several resources, each under its own lock: all of them let it through, or none.
    ///
    /// If any of them knows the operation, it was applied to all: `Duplicate`.
    ///
    /// # Errors
    /// [`Error::Stale`]: one of them refused; nothing changed.
    pub fn admit_all(
        self,
        tx: &Transaction<'_>,
        resources: &[(&str, Stamp)],
        op: &str,
    ) -> Result<Verdict, Error> {
        let resources = ordered(resources)?;
        take_write_lock(tx)?;
        // All questions before the first change, so that a refusal leaves nothing behind even if the caller commits.
        let mut known = false;
        for (resource, stamp) in &resources {
            known |= is_known(tx, resource, *stamp, op)?;
        }
        if known {
            return Ok(Verdict::Duplicate);
        }
        for (resource, stamp) in &resources {
            sql::judge(*stamp, read(tx, resource)?)?;
        }
        raise_all(tx, &resources)?;
        for (resource, stamp) in &resources {
            tx.prepare_cached(sql::RECORD_OP)?.execute(params![
                resource,
                stamp.fence.get(),
                stamp.owner.to_i64(),
                op
            ])?;
        }
        Ok(Verdict::Accepted)
    }

    /// Returns the highest stamp that `resource` has seen.
    ///
    /// # Errors
    /// Those of the database.
    pub fn floor(self, db: &Connection, resource: &str) -> Result<Option<Stamp>, Error> {
        Ok(sql::floor(read(db, resource)?))
    }

    /// Says whether a write under `stamp` would be let through right now. Raises nothing, takes no lock and promises
    /// nothing: for a former holder that only wants to look.
    ///
    /// # Errors
    /// [`Error::Stale`]: it would be refused.
    pub fn peek(self, db: &Connection, resource: &str, stamp: Stamp) -> Result<(), Error> {
        Ok(check(stamp, self.floor(db, resource)?)?)
    }

    /// Forgets one operation whose retry can no longer come, and says whether it was known: for a holder that stays
    /// so long that its operations pile up.
    ///
    /// A retry that comes after all is applied again if its holder is still the newest.
    ///
    /// # Errors
    /// Those of the database.
    pub fn forget(self, tx: &Transaction<'_>, resource: &str, stamp: Stamp, op: &str) -> Result<bool, Error> {
        let mut statement = tx.prepare_cached(sql::FORGET_OP)?;
        Ok(statement.execute(params![resource, stamp.fence.get(), stamp.owner.to_i64(), op])? > 0)
    }
}

/// Sorts by resource, the order that every transaction keeps, and refuses two different stamps for one resource: of
/// these one is stale already.
fn ordered<'a>(resources: &[(&'a str, Stamp)]) -> Result<Vec<(&'a str, Stamp)>, Error> {
    let mut sorted = resources.to_vec();
    sorted.sort_by_key(|(resource, stamp)| (*resource, stamp.fence, stamp.owner));
    sorted.dedup();
    if sorted.is_empty() {
        return Err(Error::NoResource);
    }
    match sorted.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        Some(pair) => Err(Stale { presented: pair[0].1, floor: pair[1].1 }.into()),
        None => Ok(sorted),
    }
}

/// Takes the file's write lock with a statement that changes nothing. A deferred transaction then looks at the newest
/// state or, if it has read an older one before, is refused here.
pub(super) fn take_write_lock(tx: &Transaction<'_>) -> rusqlite::Result<()> {
    tx.prepare_cached("update fences set fence = fence where 0")?.execute([])?;
    Ok(())
}

pub(super) fn read(db: &Connection, resource: &str) -> rusqlite::Result<Option<(i64, i64)>> {
    db.prepare_cached(sql::READ)?.query_row([resource], |row| Ok((row.get(0)?, row.get(1)?))).optional()
}

/// Raises floors that were judged before, under the write lock.
pub(super) fn raise_all(tx: &Transaction<'_>, resources: &[(&str, Stamp)]) -> Result<(), Error> {
    for (resource, stamp) in resources {
        let (fence, owner) = (stamp.fence.get(), stamp.owner.to_i64());
        if tx.prepare_cached(sql::RAISE)?.execute(params![resource, fence, owner])? > 0 {
            tx.prepare_cached(sql::PRUNE_OPS)?.execute(params![resource, fence])?;
        }
    }
    Ok(())
}

fn is_known(tx: &Transaction<'_>, resource: &str, stamp: Stamp, op: &str) -> rusqlite::Result<bool> {
    tx.prepare_cached(sql::KNOWN_OP)?.exists(params![resource, stamp.fence.get(), stamp.owner.to_i64(), op])
}
