//! Distributed locks with fences: one interface over several stores.
//!
//! A lock in a distributed system is a **lease**: the holder may use the resource until a deadline. That protects
//! nothing by itself. A process that is paused past its deadline wakes up inside its critical section and goes on; only
//! the **fence**, a number that grows with every grant and that the *resource* compares, stops it. So:
//!
//! 1. take the lock: [`LockClient::named`], then [`Lock::run`] or [`Lock::acquire`];
//! 2. send [`GuardRef::stamp`] with every write; it fails once the lease is over;
//! 3. let the resource refuse what is older than it has seen (package `lockcore-fenced`).
//!
//! ```
//! use lockcore::{LockClient, memory::MemoryBackend};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> lockcore::Result<()> {
//! let locks = LockClient::new(MemoryBackend::default());
//! locks
//!     .named("invoice/7")
//!     .run(async |held| -> lockcore::Result<()> {
//!         let stamp = held.stamp()?;
//!         // update invoices set …, fence = stamp.fence where id = 7 and fence < stamp.fence …
//!         # let _ = stamp;
//!         Ok(())
//!     })
//!     .await?;
//! locks.close().await;
//! # Ok(())
//! # }
//! ```
//!
//! What every call returns is one [`Error`], whose [`ErrorKind`] says what the caller may do next. Authors of backends
//! find their door in [`backend`].
//!
//! # Features
//! `tracing` (default): spans and events. `metrics`: counters and histograms. `config`: configuration structs, registry
//! and risk levels. `blocking`: locks for ordinary threads.

#![forbid(unsafe_code)]

mod acquire;
pub mod backend;
#[cfg(feature = "blocking")]
pub mod blocking;
mod call;
mod capabilities;
mod client;
mod clock;
#[cfg(feature = "config")]
pub mod config;
mod deadline;
mod error;
mod events;
mod fence;
mod guard;
mod lease;
mod lock;
mod machine;
pub mod memory;
pub mod migrate;
mod name;
mod observe;
mod owner;
mod queue;
mod renewal;
mod sync;
pub mod text;
mod url;

pub use capabilities::{Capabilities, Preflight};
pub use client::{ClientOptions, Events, LockClient, RenewalHome};
pub use clock::TokioClock;
pub use error::{Error, ErrorKind, Result, Verb};
pub use events::{Event, EventKind};
pub use fence::{Fence, Stamp};
pub use guard::{Busy, Guard, GuardRef, State};
pub use lease::{Holder, Lease, LockState, LostReason, Released};
pub use lock::{Attempt, Entry, Lock, LockSet, MultiGuard};
pub use name::{IntoLockName, LockName};
pub use owner::OwnerDigest;
pub use tokio_util::sync::CancellationToken;
pub use url::StoreUrl;
