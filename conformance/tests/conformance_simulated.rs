//! Stores by their semantics under the suite, in virtual time: one profile each.

use std::process::ExitCode;

use lockcore_conformance::{Semantics, SimulatedService, Suite};

fn main() -> ExitCode {
    let mut worst = ExitCode::SUCCESS;
    for &(profile, semantics) in Semantics::ALL {
        let start = async move || SimulatedService::start(semantics);
        let ended = Suite::new(profile, start).own_servers(semantics.servers(), start).seeds(100).main();
        if ended != ExitCode::SUCCESS {
            worst = ended;
        }
    }
    worst
}
