//! Conformance suite for lock backends: runs the same cases against each, records what happens, and judges it.
//!
//! Testing a backend of your own is one file, `tests/conformance.rs` with `harness = false`:
//!
//! ```no_run
//! # use std::{process::ExitCode, sync::Arc};
//! # use lockcore::{LockName, backend::{LockBackend, OwnerDigest, async_trait}, memory::MemoryBackend};
//! use lockcore_conformance::Service;
//!
//! struct ToyServer(MemoryBackend);
//!
//! #[async_trait]
//! impl Service for ToyServer {
//!     async fn connect(&self) -> Arc<dyn LockBackend> {
//!         Arc::new(self.0.clone())
//!     }
//!     async fn holder(&self, name: &LockName) -> Option<OwnerDigest> {
//!         self.0.holder(name, self.clock().now()).map(|owner| owner.digest()) // a second road: not the code under test
//!     }
//!     async fn steal(&self, name: &LockName) {
//!         self.0.steal(name)
//!     }
//! }
//!
//! fn main() -> ExitCode {
//!     lockcore_conformance::run("toy", async || ToyServer(MemoryBackend::default()))
//! }
//! ```

#![forbid(unsafe_code)]

pub mod authority;
pub mod bench;
mod case;
mod cases;
#[cfg(feature = "containers")]
mod containers;
pub mod crossing;
pub mod faultline;
pub mod history;
mod memory;
mod mutants;
pub mod programs;
pub mod report;
mod sabotage;
mod simulated;
mod suite;
pub mod wall_clock;

pub use bench::{Bench, Foreign, Servers, Service, Wire, child_main};
pub use case::{Case, Need, Outcome, Unexpected, Verdict};
pub use memory::MemoryService;
pub use mutants::kill_all;
pub use simulated::{Semantics, SimulatedService};
pub use suite::{Plan, Progress, Suite, Unplayed, run};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
