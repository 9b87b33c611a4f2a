//! Locks on a ZooKeeper ensemble, for [`lockcore`].
//!
//! | question | answer |
//! |---|---|
//! | stored where | one ephemeral sequential node an acquisition, its owner in the name, under a container node per lock |
//! | fence from what | a base kept once a namespace plus the zxid that created the node |
//! | waiters wake how | each watches the node before its own; a look at least every third of the TTL is the net |
//! | a crash costs what | of the holder: the session's timeout, a third longer than its TTL; of a server: nothing but a reconnection |
//! | a clock step costs what | nothing: sessions count by monotonic clocks |
//! | who is first | who came first: the queue is in order of the nodes' sequence |

#![forbid(unsafe_code)]

mod backend;
mod config;
#[cfg(feature = "config")]
mod connector;
mod error;
mod keys;
mod places;
mod preflight;
mod session;
mod steps;
mod touch;
mod wait;
mod wire;
mod worker;

pub use backend::ZkBackend;
pub use config::{TlsFiles, ZkConfig};
#[cfg(feature = "config")]
pub use connector::Zk;

#[cfg(test)]
extern crate self as lockcore_zk;
#[cfg(test)]
mod tests;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
