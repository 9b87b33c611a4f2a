//! SQL for any driver: the statements and the judgement, no driver type in sight.
//!
//! For sqlx, diesel, sea-orm, postgres or any version of rusqlite. The texts are for PostgreSQL and SQLite (3.24 or
//! newer): `on conflict` and double-quoted names.
//!
//! # The side table
//! One transaction, in this order, for a write that is named `op`:
//!
//! 1. [`RAISE`]: it must be the **first statement** of the transaction. It takes the row's lock (PostgreSQL) or the
//!    file's (SQLite), so that nobody moves the floor before the commit. A plain `select` there checks nothing: at
//!    READ COMMITTED and REPEATABLE READ the stale write is committed.
//! 2. If it changed a row: [`PRUNE_OPS`].
//! 3. [`READ`] and [`KNOWN_OP`], then [`verdict`]. On [`Stale`] roll back everything. On
//!    [`Duplicate`](Verdict::Duplicate) report success without doing the work again.
//! 4. [`RECORD_OP`], the work itself, commit. A serialisation failure (SQLSTATE 40001, `SQLITE_BUSY`) at any point
//!    means: again from the first statement, in a new transaction.
//!
//! For a read that a later write depends on: 1 to 3 with [`judge`], then read. For several names: step 1 for all of
//! them, sorted by resource, then the others; all or none. Begin with `BEGIN IMMEDIATE` on SQLite. Not inside a
//! savepoint that may be undone on its own, and not on a replica.
//!
//! # A fence column
//! [`ColumnGuard`] writes the text of one `update` that compares and sets the row's own columns.
//!
//! # Units
//! Fences and owner digests are signed 64-bit integers in `bigint` columns, exact over the whole range. A column of
//! a floating type would round above 2^53.

use std::fmt::Write as _;

use lockcore::{Fence, OwnerDigest, Stamp};

use crate::stale::{Place, check, counted};
pub use crate::stale::{Stale, Verdict};

/// Creates the table of floors: one row a resource, kept for good, because deleting it forgets the floor.
pub const CREATE_FENCES: &str = "create table if not exists fences(resource text primary key, fence bigint not null, owner bigint not null)";

/// Creates the table of operations.
pub const CREATE_OPS: &str = "create table if not exists fence_ops(resource text not null, fence bigint not null, owner bigint not null, op text not null, primary key(resource, fence, owner, op))";

/// Raises the floor of `$1` to fence `$2`, owner `$3`; changes a row only when the fence is newer.
pub const RAISE: &str = "insert into fences(resource, fence, owner) values($1, $2, $3) on conflict(resource) do update set fence = excluded.fence, owner = excluded.owner where fences.fence < excluded.fence";

/// Reads `fence, owner` of `$1`.
pub const READ: &str = "select fence, owner from fences where resource = $1";

/// Finds a row if resource `$1` saw, from fence `$2` and owner `$3`, the operation `$4`.
pub const KNOWN_OP: &str =
    "select 1 from fence_ops where resource = $1 and fence = $2 and owner = $3 and op = $4";

/// Records for resource `$1`, fence `$2`, owner `$3` the operation `$4`; changes no row when it is known.
pub const RECORD_OP: &str =
    "insert into fence_ops(resource, fence, owner, op) values($1, $2, $3, $4) on conflict do nothing";

/// Forgets of resource `$1`, when the floor has moved to fence `$2`, every operation but those of the last holder
/// before that wrote.
pub const PRUNE_OPS: &str = "delete from fence_ops where resource = $1 and fence < (select max(p.fence) from fence_ops p where p.resource = $1 and p.fence < $2)";

/// Forgets of resource `$1`, fence `$2`, owner `$3` the operation `$4`, whose retry can no longer come.
pub const FORGET_OP: &str =
    "delete from fence_ops where resource = $1 and fence = $2 and owner = $3 and op = $4";

/// Judges what [`READ`] returned in the same transaction, after [`RAISE`].
///
/// # Errors
/// `Stale`: roll back everything.
pub fn judge(stamp: Stamp, row: Option<(i64, i64)>) -> Result<(), Stale> {
    check(stamp, floor(row)).map_err(|stale| counted(stale, Place::Sql))
}

/// Judges a write from what [`READ`] returned and from whether [`KNOWN_OP`] found a row.
///
/// A known operation is a duplicate also under an old fence: the retry of a former holder learns that it was applied.
///
/// # Errors
/// `Stale`: roll back everything.
pub fn verdict(stamp: Stamp, row: Option<(i64, i64)>, known: bool) -> Result<Verdict, Stale> {
    if known {
        return Ok(Verdict::Duplicate);
    }
    judge(stamp, row).map(|()| Verdict::Accepted)
}

/// Reads a floor from its two columns. A fence that no lock can have granted (zero and below) is no floor.
pub fn floor(row: Option<(i64, i64)>) -> Option<Stamp> {
    let (fence, owner) = row?;
    Fence::new(fence).ok().map(|fence| Stamp::new(fence, OwnerDigest::from_i64(owner)))
}

/// Writes the statements for a table whose rows carry the fence that last changed them.
///
/// # Shape
/// Two columns, `last_fence bigint` and `last_owner bigint` unless named otherwise, both null in rows that no holder
/// has written yet. They belong to one lock, or to one lock a row, on one store: fences of different names do not
/// compare.
///
/// It guards *its row*. Rows that the new holder has not touched still take the old holder's writes: [`touch`] them
/// all before reading, or use the side table where an invariant spans rows. The same holder's retry is let through
/// and applied again; set values rather than add to them, or use the side table, which knows operations.
///
/// An `insert` has no row to compare with, and a `delete` takes the floor away with its row. Raise a row of the side
/// table for both, in the same transaction, as `sqlite::ColumnGuard` does.
///
/// # Example
/// ```
/// use lockcore_fenced::sql::{Bind, ColumnGuard, Set};
///
/// let orders = ColumnGuard::new("orders", "id")?;
/// let close = orders.update(&[Set::to("state")])?;
/// assert_eq!(
///     close.text,
///     "update \"orders\" set \"state\" = $1, \"last_fence\" = $2, \"last_owner\" = $3 where \"orders\".\"id\" = $4 \
///      and (coalesce(\"orders\".\"last_fence\", 0) < $2 \
///      or (\"orders\".\"last_fence\" = $2 and \"orders\".\"last_owner\" = $3))"
/// );
/// assert_eq!(close.binds, [Bind::Value(0), Bind::Fence, Bind::Owner, Bind::Key]);
/// # Ok::<(), lockcore_fenced::sql::BadStatement>(())
/// ```
///
/// [`touch`]: Self::touch
#[derive(Clone, Debug)]
pub struct ColumnGuard {
    table: String,
    schema: Option<String>,
    key: String,
    fence: String,
    owner: String,
    placeholders: Placeholders,
}

/// How a driver writes its parameters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Placeholders {
    /// `$1`: PostgreSQL, and SQLite, where each number first appears in order.
    #[default]
    Dollar,
    /// `?1`: SQLite.
    Numbered,
    /// `?`: one value for each mark, in the order of the text.
    Question,
}

/// What to bind at one parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Bind {
    /// The caller's value with this index, from zero.
    Value(usize),
    /// The row's key.
    Key,
    /// `stamp.fence.get()`.
    Fence,
    /// `stamp.owner.to_i64()`.
    Owner,
}

/// A statement, and what to bind to its parameters, in their order.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Statement {
    /// The text.
    pub text: String,
    /// One entry for each parameter.
    pub binds: Vec<Bind>,
}

/// One assignment of an `update`.
#[derive(Clone, Copy, Debug)]
pub struct Set<'a> {
    column: &'a str,
    expression: &'a str,
}

impl<'a> Set<'a> {
    /// Sets `column` to a value.
    pub fn to(column: &'a str) -> Self {
        Self { column, expression: "{}" }
    }

    /// Sets `column` to an SQL expression of the program's own, in which `{}` stands for at most one value:
    /// `Set::expression("n", "n + {}")`. Never from user data.
    pub fn expression(column: &'a str, expression: &'a str) -> Self {
        Self { column, expression }
    }
}

/// A name or an expression from which no statement is made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BadStatement {
    /// Not a plain identifier.
    #[error(
        "{0:?} is not a plain SQL name: one to 63 of A-Z a-z 0-9 and _, beginning with a letter or _ (a table may \
         have a schema in front, with a dot)"
    )]
    Name(String),
    /// More than one value in an expression.
    #[error("the expression {0:?} takes more than one value")]
    Expression(String),
    /// The guard's own column among the caller's.
    #[error("column {0:?} is set by the guard")]
    Guarded(String),
}

/// Why a row was not changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RowRefusal {
    /// A newer holder has been at this row.
    #[error(transparent)]
    Stale(#[from] Stale),
    /// There is no such row: nothing to do with the fence.
    #[error("no such row")]
    NoSuchRow,
    /// The row changed between the two statements; run the whole transaction again.
    #[error("the row changed between the update and the look at it")]
    Raced,
}

impl ColumnGuard {
    /// Guards `table` (`orders`, or `shop.orders`), whose rows are found by `key`, with the columns `last_fence` and
    /// `last_owner`.
    ///
    /// # Errors
    /// A name is not a plain identifier. Names are quoted, so they are matched as the database stores them: in
    /// PostgreSQL, in lower case unless they were created in quotes.
    pub fn new(table: &str, key: &str) -> Result<Self, BadStatement> {
        let (schema, table) = match table.split_once('.') {
            Some((schema, table)) => (Some(name(schema)?), table),
            None => (None, table),
        };
        Ok(Self {
            table: name(table)?,
            schema,
            key: name(key)?,
            fence: "last_fence".into(),
            owner: "last_owner".into(),
            placeholders: Placeholders::default(),
        })
    }

    /// Names the two columns. Both are needed: without the owner, a fence that a store granted twice lets both in.
    ///
    /// # Errors
    /// A name is not a plain identifier.
    pub fn columns(self, fence: &str, owner: &str) -> Result<Self, BadStatement> {
        Ok(Self { fence: name(fence)?, owner: name(owner)?, ..self })
    }

    /// Chooses the style of parameters.
    #[must_use]
    pub fn placeholders(self, placeholders: Placeholders) -> Self {
        Self { placeholders, ..self }
    }

    /// Writes the guarded `update` of one row. It changes no row when the stamp is stale or the row is missing; ask
    /// [`probe`](Self::probe) and [`judge`](Self::judge) which.
    ///
    /// # Errors
    /// A column is not a plain identifier or belongs to the guard, or an expression takes more than one value.
    pub fn update(&self, sets: &[Set<'_>]) -> Result<Statement, BadStatement> {
        let mut w = Writer::new(self.placeholders);
        w.push(&format!("update {} set ", self.qualified()));
        let mut values = 0;
        for set in sets {
            let column = self.own(set.column)?;
            w.push(&format!("\"{column}\" = "));
            match set.expression.split_once("{}") {
                None => w.push(set.expression),
                Some((_, after)) if after.contains("{}") => {
                    return Err(BadStatement::Expression(set.expression.to_owned()));
                }
                Some((before, after)) => {
                    w.push(before);
                    w.bind(Bind::Value(values));
                    w.push(after);
                    values += 1;
                }
            }
            w.push(", ");
        }
        w.push(&format!("\"{}\" = ", self.fence));
        w.bind(Bind::Fence);
        w.push(&format!(", \"{}\" = ", self.owner));
        w.bind(Bind::Owner);
        self.guarded_row(&mut w);
        Ok(w.done())
    }

    /// Writes the `update` that only raises the row's floor: before a read that a later write depends on.
    pub fn touch(&self) -> Statement {
        self.update(&[]).expect("no caller's column can be bad")
    }

    /// Writes the guarded `delete`. The floor goes with the row: raise the side table's in the same transaction.
    pub fn delete(&self) -> Statement {
        let mut w = Writer::new(self.placeholders);
        w.push(&format!("delete from {}", self.qualified()));
        self.guarded_row(&mut w);
        w.done()
    }

    /// Writes the `insert` of a row with its key, its fence columns and the caller's columns. Nothing is compared:
    /// judge the side table first, in the same transaction.
    ///
    /// # Errors
    /// A column is not a plain identifier or belongs to the guard.
    pub fn insert(&self, columns: &[&str]) -> Result<Statement, BadStatement> {
        let mut w = Writer::new(self.placeholders);
        w.push(&format!(
            "insert into {}(\"{}\", \"{}\", \"{}\"",
            self.qualified(),
            self.key,
            self.fence,
            self.owner
        ));
        for column in columns {
            w.push(&format!(", \"{}\"", self.own(column)?));
        }
        w.push(") values(");
        w.bind(Bind::Key);
        w.push(", ");
        w.bind(Bind::Fence);
        w.push(", ");
        w.bind(Bind::Owner);
        for value in 0..columns.len() {
            w.push(", ");
            w.bind(Bind::Value(value));
        }
        w.push(")");
        Ok(w.done())
    }

    /// Writes the `select` of a row's two columns, either of which may be null.
    pub fn probe(&self) -> Statement {
        let mut w = Writer::new(self.placeholders);
        let table = &self.table;
        w.push(&format!(
            "select \"{table}\".\"{}\", \"{table}\".\"{}\" from {} where \"{table}\".\"{}\" = ",
            self.fence,
            self.owner,
            self.qualified(),
            self.key
        ));
        w.bind(Bind::Key);
        w.done()
    }

    /// Judges a guarded statement from the number of rows it changed and, when that is zero, from what
    /// [`probe`](Self::probe) found in the same transaction.
    ///
    /// # Errors
    /// Why the row was not changed.
    pub fn judge(
        stamp: Stamp,
        changed: u64,
        row: Option<(Option<i64>, Option<i64>)>,
    ) -> Result<(), RowRefusal> {
        if changed > 0 {
            return Ok(());
        }
        let Some(columns) = row else { return Err(RowRefusal::NoSuchRow) };
        judge(stamp, row_floor(columns))?;
        // The row would take the stamp now, but the statement saw another row or none.
        Err(RowRefusal::Raced)
    }

    /// Returns the table's name, without its schema.
    pub fn table(&self) -> &str {
        &self.table
    }

    fn qualified(&self) -> String {
        match &self.schema {
            Some(schema) => format!("\"{schema}\".\"{}\"", self.table),
            None => format!("\"{}\"", self.table),
        }
    }

    /// Checks a caller's column.
    fn own(&self, column: &str) -> Result<String, BadStatement> {
        let taken =
            [&self.fence, &self.owner, &self.key].into_iter().any(|own| own.eq_ignore_ascii_case(column));
        if taken { Err(BadStatement::Guarded(column.to_owned())) } else { name(column) }
    }

    /// Writes the condition. A null fence is below every fence: `null < $1` alone would match nothing, and the row
    /// would be "stale" for ever. Columns carry the table's name, because SQLite takes an unknown bare name in double
    /// quotes for a string.
    fn guarded_row(&self, w: &mut Writer) {
        let (table, fence, owner) = (&self.table, &self.fence, &self.owner);
        w.push(&format!(" where \"{table}\".\"{}\" = ", self.key));
        w.bind(Bind::Key);
        w.push(&format!(" and (coalesce(\"{table}\".\"{fence}\", 0) < "));
        w.bind(Bind::Fence);
        w.push(&format!(" or (\"{table}\".\"{fence}\" = "));
        w.bind(Bind::Fence);
        w.push(&format!(" and \"{table}\".\"{owner}\" = "));
        w.bind(Bind::Owner);
        w.push("))");
    }
}

/// Reads a row's floor; a missing owner is nobody's digest, so an equal fence is refused.
pub(crate) fn row_floor((fence, owner): (Option<i64>, Option<i64>)) -> Option<(i64, i64)> {
    fence.map(|fence| (fence, owner.unwrap_or(0)))
}

fn name(text: &str) -> Result<String, BadStatement> {
    let plain = matches!(text.len(), 1..=63)
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
        && !text.starts_with(|c: char| c.is_ascii_digit());
    if plain { Ok(text.to_owned()) } else { Err(BadStatement::Name(text.to_owned())) }
}

struct Writer {
    style: Placeholders,
    text: String,
    binds: Vec<Bind>,
}

impl Writer {
    fn new(style: Placeholders) -> Self {
        Self { style, text: String::new(), binds: Vec::new() }
    }

    fn push(&mut self, text: &str) {
        self.text.push_str(text);
    }

    /// Writes a parameter. Numbered styles use one number for every appearance of the same thing.
    fn bind(&mut self, bind: Bind) {
        let sign = match self.style {
            Placeholders::Question => {
                self.binds.push(bind);
                self.text.push('?');
                return;
            }
            Placeholders::Dollar => '$',
            Placeholders::Numbered => '?',
        };
        let at = self.binds.iter().position(|b| *b == bind).unwrap_or_else(|| {
            self.binds.push(bind);
            self.binds.len() - 1
        });
        write!(self.text, "{sign}{}", at + 1).expect("writing to a string does not fail");
    }

    fn done(self) -> Statement {
        Statement { text: self.text, binds: self.binds }
    }
}
