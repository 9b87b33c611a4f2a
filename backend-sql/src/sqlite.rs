//! Locks in a SQLite file, for the processes of one machine.

mod backend;
mod config;
#[cfg(feature = "config")]
mod connector;
mod error;
mod open;
mod phases;
mod place;
mod wait;
mod wire;
mod worker;

#[cfg(test)]
mod tests;

pub use backend::SqliteBackend;
pub use config::SqliteConfig;
#[cfg(feature = "config")]
pub use connector::Sqlite;
