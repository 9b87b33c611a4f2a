//! The `lockctl` command; everything is in the library, so that tests can reach it.

#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    lockctl::main()
}
