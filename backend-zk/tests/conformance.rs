//! One server under the suite.

mod common;
#[path = "common/service.rs"]
mod service;

use std::process::ExitCode;

fn main() -> ExitCode {
    service::suite("zk-single", 1)
}
