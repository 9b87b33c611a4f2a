//! The in-memory backend under the suite, in virtual time.

use std::process::ExitCode;

use lockcore_conformance::MemoryService;

fn main() -> ExitCode {
    lockcore_conformance::run("memory", async || MemoryService::start())
}
