//! Distributed locks with fences: one interface over several stores.

#![forbid(unsafe_code)]

pub mod backend;
mod call;
mod capabilities;
mod clock;
#[cfg(feature = "config")]
pub mod config;
mod deadline;
mod error;
mod events;
mod fence;
mod lease;
mod name;
mod owner;
pub mod text;
mod url;

pub use capabilities::Capabilities;
pub use error::{Error, ErrorKind, Result, Verb};
pub use events::{Event, EventKind};
pub use fence::{Fence, Stamp};
pub use lease::{Holder, Lease, LockState, LostReason, Released};
pub use name::{IntoLockName, LockName};
pub use owner::OwnerDigest;
pub use url::StoreUrl;
