//! The in-memory backend under the suite, in virtual time.

use std::process::ExitCode;

use lockcore_conformance::{MemoryService, Suite};

fn main() -> ExitCode {
    Suite::new("memory", async || MemoryService::start()).seeds(100).main()
}
