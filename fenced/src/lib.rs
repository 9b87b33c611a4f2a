#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod register;
pub mod sql;
#[cfg(feature = "sqlite")]
pub mod sqlite;
mod stale;
mod value;

pub use lockcore::{Fence, OwnerDigest, Stamp};

pub use register::Register;
pub use stale::{Stale, Verdict};
pub use value::Fenced;
