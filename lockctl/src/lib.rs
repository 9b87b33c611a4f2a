//! Runs commands under a distributed lock, and looks after the locks.
//!
//! This library is the program `lockctl`, reachable for its tests; it makes no promise to anybody else.

pub mod cli;
pub mod duration;
pub mod exit;
mod state_file;
mod supervisor;
mod voice;

use std::process::ExitCode;

/// Runs the program.
pub fn main() -> ExitCode {
    ExitCode::SUCCESS
}

#[doc(hidden)]
pub mod for_tests;
