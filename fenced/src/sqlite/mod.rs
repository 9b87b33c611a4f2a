//! SQLite through rusqlite, in the caller's own transaction.
//!
//! Every guard takes a [`Transaction`](rusqlite::Transaction): a check outside it checks nothing, and a savepoint
//! that is undone later would undo the check. Begin with
//! [`TransactionBehavior::Immediate`](rusqlite::TransactionBehavior::Immediate), make the guard the first statement,
//! and let `?` carry any error past the commit.
//!
//! The guard's own first statement is a write, so it takes the file's write lock also in a deferred transaction. If
//! that transaction has read something before, and somebody has committed since, SQLite refuses
//! ([`Error::Snapshot`]): nothing wrong was written, but the busy timeout does not help, and the whole transaction
//! has to run again.

mod column_guard;
mod error;
mod fence_table;

pub use column_guard::ColumnGuard;
pub use error::Error;
pub use fence_table::FenceTable;
