//! Locks on Redis or Valkey, for [`lockcore`]: on one server, on a master with replicas, behind Sentinels, on a Cluster,
//! and on several independent servers by majority.
//!
//! | question | answer |
//! |---|---|
//! | stored where | one key a lock with an expiry, beside a key that keeps its highest fence |
//! | fence from what | `max(previous + 1, floor + 1, the server's clock in microseconds)`, in the same script as the grant; of several servers, in a second round |
//! | waiters wake how | the release is pushed to them; a look at the end of the holder's lease is the net; with several servers they ask |
//! | a crash costs what | of the holder: its TTL; of the server: every lock that is not on its disk, or on the replica that takes over |
//! | a clock step costs what | forwards: leases end early; backwards: they end late; fences keep growing |
//! | who is first | nobody knows: there is no queue |
//!
//! [`RedisBackend`] is for set-ups in which one server decides about each lock, [`RedlockBackend`] for several that decide
//! together. What each may lose stands in the README.

#![forbid(unsafe_code)]

mod backend;
mod cluster;
mod config;
mod connection;
#[cfg(feature = "config")]
mod connector;
mod error;
mod greeting;
mod operations;
mod phases;
mod pieces;
mod preflight;
mod redlock;
mod replicas;
mod road;
mod sentinel;
#[cfg(feature = "tls")]
mod tls;
mod wait;
mod wire;

pub use backend::RedisBackend;
pub use config::{Address, PasswordSource, RedisConfig, WaitReplicas};
#[cfg(feature = "config")]
pub use connector::Redis;
pub use redlock::{RedlockBackend, RedlockConfig};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(test)]
mod tests;
