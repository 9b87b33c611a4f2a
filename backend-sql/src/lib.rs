//! Locks in SQL databases, for [`lockcore`].
//!
//! # SQLite (feature `sqlite`)
//!
//! | question | answer |
//! |---|---|
//! | stored where | one row a name in one file, for the processes of one machine |
//! | fence from what | `max(previous + 1, floor + 1, microseconds since 1970)`, committed with `synchronous=FULL` before it is answered |
//! | waiters wake how | by asking again, with jitter, and at once when the holder released through the same backend |
//! | a crash costs what | of the holder: its TTL; of the machine: nothing, because its leases end with it |
//! | a clock step costs what | nothing: leases end by the clock that counts from boot, and a row of another boot is over |
//! | who is first | nobody knows: there is no queue |
//!
//! # Features
//!
//! None is on by default. `sqlite` compiles SQLite along (`rusqlite/bundled`); `sqlite-system` alone links the one of
//! the system, 3.37 or later; `config` adds the connector for `sqlite://`. `rusqlite` is taken as a range (0.32 to
//! 0.43), so that it resolves beside sqlx and diesel, which insist on versions of their own.

#![forbid(unsafe_code)]

#[cfg(feature = "sqlite-system")]
mod sqlite;

#[cfg(all(feature = "sqlite-system", feature = "config"))]
pub use sqlite::Sqlite;
#[cfg(feature = "sqlite-system")]
pub use sqlite::{SqliteBackend, SqliteConfig};
