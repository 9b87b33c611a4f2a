//! A cluster of three members under the suite.

mod common;
#[path = "common/service.rs"]
mod service;

use std::process::ExitCode;

fn main() -> ExitCode {
    service::suite("etcd-cluster", 3)
}
