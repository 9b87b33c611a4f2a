//! Locks on an etcd cluster, for [`lockcore`].
//!
//! | question | answer |
//! |---|---|
//! | stored where | one key an acquisition, tied to an etcd lease of its own, under a prefix that names the lock |
//! | fence from what | a base kept once a namespace plus the create revision of the key, both from one transaction |
//! | waiters wake how | each watches the key before its own; a look at least every third of the TTL is the net |
//! | a crash costs what | of the holder: its TTL; of a member: nothing but a new leader's election |
//! | a clock step costs what | nothing: leases count by monotonic clocks |
//! | who is first | who came first: the queue is in order of create revisions |

#![forbid(unsafe_code)]

mod backend;
mod config;
#[cfg(feature = "config")]
mod connector;
mod error;
mod exchange;
mod keys;
mod leases;
mod phase;
mod preflight;
mod steps;
mod wait;

pub use config::{EtcdConfig, Renewal, TlsFiles};
#[cfg(feature = "config")]
pub use connector::Etcd;
pub use steps::EtcdBackend;

#[cfg(test)]
extern crate self as lockcore_etcd;
#[cfg(test)]
mod tests;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
