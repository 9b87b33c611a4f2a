//! What a guard on SQLite answers when it does not let a write through.

use rusqlite::ffi;

use crate::{sql::BadStatement, stale::Stale};

/// Refused by the fence, or failed in the database. In every case: do not commit.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A newer holder has been here.
    #[error(transparent)]
    Stale(#[from] Stale),
    /// There is no such row: nothing to do with the fence.
    #[error("no row {key} in {table}")]
    NoSuchRow {
        /// The table.
        table: String,
        /// The key, as text.
        key: String,
    },
    /// The row is there already, and the stamp would be allowed to change it.
    #[error("row {key} is in {table} already")]
    RowExists {
        /// The table.
        table: String,
        /// The key, as text.
        key: String,
    },
    /// The transaction had read before it came to the guard, and somebody has committed since. Roll back and run all
    /// of it again; begun with `TransactionBehavior::Immediate` it cannot happen.
    #[error(
        "the database changed after this transaction's first read: roll back and run the whole transaction again, \
         begun with TransactionBehavior::Immediate"
    )]
    Snapshot(#[source] rusqlite::Error),
    /// Another connection was writing for longer than the busy timeout. Roll back and run the whole transaction
    /// again.
    #[error("the database is busy: roll back and run the whole transaction again")]
    Busy(#[source] rusqlite::Error),
    /// A column that cannot hold a fence exactly, or is missing.
    #[error("column {column} of {table} cannot hold a fence: {found}, and it has to be an integer column")]
    Column {
        /// The table.
        table: String,
        /// The column.
        column: String,
        /// What it is instead.
        found: String,
    },
    /// A name or an expression from which no statement is made.
    #[error(transparent)]
    Statement(#[from] BadStatement),
    /// No resource was named, so nothing would have been checked.
    #[error("no resource was named")]
    NoResource,
    /// The database said no.
    #[error("fence guard: {0}")]
    Sql(#[source] rusqlite::Error),
}

impl Error {
    /// Says whether the whole transaction may run again as it is. Never after [`Stale`].
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Snapshot(_) | Self::Busy(_))
    }
}

impl From<rusqlite::Error> for Error {
    fn from(e: rusqlite::Error) -> Self {
        match &e {
            rusqlite::Error::SqliteFailure(code, _) if code.extended_code == ffi::SQLITE_BUSY_SNAPSHOT => {
                Self::Snapshot(e)
            }
            rusqlite::Error::SqliteFailure(code, _)
                if matches!(code.code, ffi::ErrorCode::DatabaseBusy | ffi::ErrorCode::DatabaseLocked) =>
            {
                Self::Busy(e)
            }
            _ => Self::Sql(e),
        }
    }
}
