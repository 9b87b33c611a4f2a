//! Backends that are broken on purpose: each must be caught by the case that guards the promise, in its words.

use std::process::ExitCode;

fn main() -> ExitCode {
    lockcore_conformance::kill_all()
}
