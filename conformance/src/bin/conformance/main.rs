//! `conformance`: judges recorded histories, and puts results side by side.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

mod check;
mod report;

/// Judges what lock clients and stores did.
#[derive(Debug, Parser)]
#[command(name = "conformance", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Check(check::Check),
    Report(report::Report),
}

/// Wrong use, as `lockctl` and `env` have it: no verdict was reached.
const WRONG_USE: u8 = 125;

fn main() -> ExitCode {
    let arguments = match Arguments::try_parse() {
        Ok(arguments) => arguments,
        Err(error) => {
            // Help and version are no wrong use; a closed pipe is nobody's fault.
            let _ = error.print();
            return if error.use_stderr() { WRONG_USE.into() } else { ExitCode::SUCCESS };
        }
    };
    match arguments.command {
        Command::Check(check) => check.run(),
        Command::Report(report) => report.run(),
    }
}
