//! Tables whose rows carry the fence that last changed them.

use std::fmt::Display;

use lockcore::Stamp;
use rusqlite::{Connection, OptionalExtension, ToSql, Transaction, params_from_iter};

use super::{
    Error,
    fence_table::{raise_all, read, take_write_lock},
};
use crate::sql::{self, BadStatement, Bind, Placeholders, RowRefusal, Set, Statement};

/// Guards a table whose rows carry the fence that last changed them: one `update` compares, writes and raises.
///
/// # Shape
/// The columns `last_fence integer` and `last_owner integer`, null in rows that no holder has written. A row that was
/// deleted, or that a holder has looked for in vain, leaves its floor in the side table under `table/key`, so that a
/// late `insert` is refused too: call [`FenceTable::create`](super::FenceTable::create) once.
///
/// It guards *its row*: rows that the new holder has not touched still take the old holder's writes. Touch them all
/// before reading, or use [`FenceTable`](super::FenceTable) where an invariant spans rows. It knows no operations:
/// the same holder's retry is let through and applied again.
///
/// # Example
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use lockcore_fenced::{sql::Set, sqlite::{ColumnGuard, FenceTable}};
/// use rusqlite::{Connection, TransactionBehavior};
///
/// let mut db = Connection::open_in_memory()?;
/// FenceTable.create(&db)?;
/// db.execute_batch(
///     "create table orders(id integer primary key, state text, last_fence integer, last_owner integer);
///      insert into orders(id, state) values(7, 'open')",
/// )?;
/// let orders = ColumnGuard::new("orders", "id")?;
/// orders.verify(&db)?;
///
/// let stamp = "42.9f3c52d1a07be664".parse()?; // in a program: held.stamp()?
/// let tx = db.transaction_with_behavior(TransactionBehavior::Immediate)?;
/// orders.update(&tx, &7, stamp, &[Set::to("state")], &[&"closed"])?;
/// tx.commit()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct ColumnGuard {
    sql: sql::ColumnGuard,
    fence: String,
    owner: String,
}

impl ColumnGuard {
    /// Guards `table`, whose rows are found by the column `key`, with the columns `last_fence` and `last_owner`.
    ///
    /// # Errors
    /// A name is not a plain identifier.
    pub fn new(table: &str, key: &str) -> Result<Self, BadStatement> {
        let sql = sql::ColumnGuard::new(table, key)?.placeholders(Placeholders::Numbered);
        Ok(Self { sql, fence: "last_fence".into(), owner: "last_owner".into() })
    }

    /// Names the two columns. Both are needed: without the owner, a fence that a store granted twice lets both in.
    ///
    /// # Errors
    /// A name is not a plain identifier.
    pub fn columns(self, fence: &str, owner: &str) -> Result<Self, BadStatement> {
        Ok(Self { sql: self.sql.columns(fence, owner)?, fence: fence.to_owned(), owner: owner.to_owned() })
    }

    /// Checks that the table has both columns, and that they hold 64-bit integers exactly: a `real` column rounds
    /// fences above 2^53. Once, at start.
    ///
    /// # Errors
    /// [`Error::Column`].
    pub fn verify(&self, db: &Connection) -> Result<(), Error> {
        for column in [&self.fence, &self.owner] {
            let declared: Option<String> = db
                .query_row(
                    "select type from pragma_table_info(?1) where name = ?2 collate nocase",
                    [self.sql.table(), column],
                    |row| row.get(0),
                )
                .optional()?;
            // SQLite's rule: a declared type with INT in it stores integers as they are.
            let found = match declared {
                Some(declared) if declared.to_ascii_uppercase().contains("INT") => continue,
                Some(declared) if declared.is_empty() => "it has no type".to_owned(),
                Some(declared) => format!("it is {declared:?}"),
                None => "it is missing".to_owned(),
            };
            return Err(Error::Column { table: self.sql.table().to_owned(), column: column.clone(), found });
        }
        Ok(())
    }

    /// Raises the row's floor, and says whether the row is there: before a read that a later write depends on. A row
    /// that is not there is guarded too, against a late `insert`.
    ///
    /// # Errors
    /// [`Error::Stale`].
    pub fn touch<K: ToSql + Display>(
        &self,
        tx: &Transaction<'_>,
        key: &K,
        stamp: Stamp,
    ) -> Result<bool, Error> {
        match self.guarded(tx, key, stamp, &self.sql.touch(), &[]) {
            Ok(()) => Ok(true),
            Err(Error::NoSuchRow { .. }) => {
                raise_all(tx, &[(&self.resource(key), stamp)])?;
                Ok(false)
            }
            Err(e) => Err(e),
        }
    }

    /// Changes one row: `values` go to the `{}` of `sets`, in order.
    ///
    /// # Errors
    /// [`Error::Stale`], or [`Error::NoSuchRow`]: nothing changed.
    pub fn update<K: ToSql + Display>(
        &self,
        tx: &Transaction<'_>,
        key: &K,
        stamp: Stamp,
        sets: &[Set<'_>],
        values: &[&dyn ToSql],
    ) -> Result<(), Error> {
        self.guarded(tx, key, stamp, &self.sql.update(sets)?, values)
    }

    /// Inserts a row with its key and its fence.
    ///
    /// # Errors
    /// [`Error::Stale`]: a newer holder has deleted the row, or looked for it, or has written it. [`Error::RowExists`].
    pub fn insert<K: ToSql + Display>(
        &self,
        tx: &Transaction<'_>,
        key: &K,
        stamp: Stamp,
        columns: &[&str],
        values: &[&dyn ToSql],
    ) -> Result<(), Error> {
        let insert = self.sql.insert(columns)?;
        take_write_lock(tx)?;
        if let Some(row) = self.probe(tx, key)? {
            sql::judge(stamp, sql::row_floor(row))?;
            return Err(Error::RowExists { table: self.sql.table().to_owned(), key: key.to_string() });
        }
        sql::judge(stamp, read(tx, &self.resource(key))?)?;
        execute(tx, &insert, key, stamp, values)?;
        Ok(())
    }

    /// Deletes one row, and keeps its floor in the side table.
    ///
    /// # Errors
    /// [`Error::Stale`], or [`Error::NoSuchRow`]: nothing changed.
    pub fn delete<K: ToSql + Display>(
        &self,
        tx: &Transaction<'_>,
        key: &K,
        stamp: Stamp,
    ) -> Result<(), Error> {
        self.guarded(tx, key, stamp, &self.sql.delete(), &[])?;
        raise_all(tx, &[(&self.resource(key), stamp)])
    }

    /// Runs one guarded statement. It is a write, so it takes the write lock before it looks at anything.
    fn guarded<K: ToSql + Display>(
        &self,
        tx: &Transaction<'_>,
        key: &K,
        stamp: Stamp,
        statement: &Statement,
        values: &[&dyn ToSql],
    ) -> Result<(), Error> {
        let changed = execute(tx, statement, key, stamp, values)?;
        if changed > 0 {
            return Ok(());
        }
        match sql::ColumnGuard::judge(stamp, 0, self.probe(tx, key)?) {
            Err(RowRefusal::Stale(stale)) => Err(stale.into()),
            // Under the write lock nobody can have come in between: a trigger has swallowed the change.
            Ok(()) | Err(RowRefusal::Raced) => Err(rusqlite::Error::StatementChangedRows(0).into()),
            Err(RowRefusal::NoSuchRow) => {
                sql::judge(stamp, read(tx, &self.resource(key))?)?;
                Err(Error::NoSuchRow { table: self.sql.table().to_owned(), key: key.to_string() })
            }
        }
    }

    fn probe<K: ToSql>(
        &self,
        tx: &Transaction<'_>,
        key: &K,
    ) -> rusqlite::Result<Option<(Option<i64>, Option<i64>)>> {
        tx.prepare_cached(&self.sql.probe().text)?
            .query_row([key], |row| Ok((row.get(0)?, row.get(1)?)))
            .optional()
    }

    /// Names the row in the side table. Table names have no slash, so no two rows share a name.
    fn resource<K: Display>(&self, key: &K) -> String {
        format!("{}/{key}", self.sql.table())
    }
}

fn execute<K: ToSql>(
    tx: &Transaction<'_>,
    statement: &Statement,
    key: &K,
    stamp: Stamp,
    values: &[&dyn ToSql],
) -> rusqlite::Result<usize> {
    let (fence, owner) = (stamp.fence.get(), stamp.owner.to_i64());
    // One value short or over would shift what the statement means; the driver only counts parameters.
    let wanted = statement.binds.iter().filter(|bind| matches!(bind, Bind::Value(_))).count();
    if wanted != values.len() {
        return Err(rusqlite::Error::InvalidParameterCount(values.len(), wanted));
    }
    let parameters: Vec<&dyn ToSql> = statement
        .binds
        .iter()
        .map(|bind| match bind {
            Bind::Value(at) => values[*at],
            Bind::Key => key as &dyn ToSql,
            Bind::Fence => &fence,
            Bind::Owner => &owner,
        })
        .collect();
    tx.prepare_cached(&statement.text)?.execute(params_from_iter(parameters))
}
