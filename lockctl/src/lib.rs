//! Runs commands under a distributed lock, and looks after the locks.
//!
//! This library is the program `lockctl`, reachable for its tests; it makes no promise to anybody else.

mod break_lock;
mod check;
pub mod cli;
#[cfg(feature = "compare")]
mod compare;
mod config;
mod doctor;
pub mod duration;
pub mod exit;
mod failure;
mod fence;
mod file;
#[doc(hidden)]
pub mod for_tests;
mod inspect;
mod list;
mod manual;
mod migrate;
mod numbers;
mod run;
mod state_file;
mod store;
mod supervisor;
mod voice;

use std::{
    ffi::OsString,
    io::{self, Write},
    process::ExitCode,
};

use clap::{ArgMatches, ColorChoice, CommandFactory, FromArgMatches, error::ErrorKind, parser::ValueSource};

use cli::{Cli, Command};
use failure::Failure;
use store::Written;
use voice::Voice;

/// Runs the program.
pub fn main() -> ExitCode {
    #[cfg(feature = "compare")]
    if let Some(code) = compare::client_of_a_case() {
        return code;
    }
    let words: Vec<OsString> = std::env::args_os().collect();
    let mut definitions = Cli::command().color(colour_of(&words));
    let matches = match definitions.try_get_matches_from_mut(&words) {
        Ok(matches) => matches,
        Err(error) => return wrong_use(&error),
    };
    let cli = match Cli::from_arg_matches(&matches) {
        Ok(cli) => cli,
        Err(error) => return wrong_use(&error.format(&mut definitions)),
    };
    let written = written(&matches);
    let voice = Voice::new(&cli.common);
    match dispatch(&cli.command, written, &voice) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            // What was asked for by `-E 0` is no trouble, and cron mails every line.
            if failure.code != 0 {
                voice.failure(&failure.sentence);
            }
            ExitCode::from(failure.code)
        }
    }
}

fn dispatch(command: &Command, written: Written, voice: &Voice) -> Result<u8, Failure> {
    match command {
        Command::Run(options) => {
            let loss = supervisor::LossPipe::new()?;
            block_on(run::main(options, loss, written, voice))
        }
        Command::Check(options) => check::main(options, voice),
        Command::Inspect(options) => block_on(inspect::main(options, written, voice)),
        Command::List(options) => block_on(list::main(options, written, voice)),
        Command::Break(options) => block_on(break_lock::main(options, written, voice)),
        Command::Fence(options) => block_on(fence::main(options, written, voice)),
        Command::Migrate(options) => block_on(migrate::main(options, voice)),
        Command::Doctor(options) => block_on(doctor::main(options, written, voice)),
        #[cfg(feature = "compare")]
        Command::Compare(options) => compare::main(options, voice),
        Command::Config(options) => config::main(options, written, voice),
        Command::Completions(options) => manual::completions(options),
        Command::Man => manual::man(),
    }
}

/// Runs on the main thread: the kernel ends a command when the *thread* that started it ends.
fn block_on(work: impl Future<Output = Result<u8, Failure>>) -> Result<u8, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(work)
}

/// Help and version go to stdout with 0; anything else is wrong use, 125, and not clap's own 2.
fn wrong_use(error: &clap::Error) -> ExitCode {
    if matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) {
        // The reader may have gone, as in `lockctl --help | head -1`.
        let _ = error.print();
        return ExitCode::SUCCESS;
    }
    let text = error.render().to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    let _ = io::stderr().lock().write_all(format!("lockctl: {text}").as_bytes());
    ExitCode::from(exit::USAGE)
}

/// Reads `--color` before anything else is read, because help and mistakes are shown while reading.
fn colour_of(words: &[OsString]) -> ColorChoice {
    let words = words.iter().map_while(|word| word.to_str()).take_while(|word| *word != "--");
    let mut choice = ColorChoice::Auto;
    let mut is_next = false;
    for word in words {
        let value = if std::mem::take(&mut is_next) { Some(word) } else { word.strip_prefix("--color=") };
        match value {
            Some("always") => choice = ColorChoice::Always,
            Some("never") => choice = ColorChoice::Never,
            _ => is_next = word == "--color",
        }
    }
    choice
}

/// Says which options about the store stand on the command line.
fn written(matches: &ArgMatches) -> Written {
    let mut innermost = matches;
    while let Some((_, inner)) = innermost.subcommand() {
        innermost = inner;
    }
    let is_written = |id: &str| {
        innermost.ids().any(|known| known == id)
            && innermost.value_source(id) == Some(ValueSource::CommandLine)
    };
    Written { store: is_written("store"), risk: is_written("risk") }
}
