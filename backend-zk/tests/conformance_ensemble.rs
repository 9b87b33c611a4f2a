//! An ensemble of three servers under the suite.

mod common;
#[path = "common/service.rs"]
mod service;

use std::process::ExitCode;

fn main() -> ExitCode {
    service::suite("zk-ensemble", 3)
}
