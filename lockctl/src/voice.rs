//! What lockctl says. The command owns stdout; lockctl speaks on stderr, one line an event.

use std::{
    fmt,
    io::{self, IsTerminal, Write},
    time::Duration,
};

use lockcore::LostReason;
use rustix::process::Signal;
use serde_json::{Map, Value, json};

use crate::{
    cli::{Color, Common},
    duration::show,
};

/// Speaks as the options ask.
#[derive(Clone, Debug)]
pub struct Voice {
    json: bool,
    is_quiet: bool,
    is_verbose: bool,
    on_terminal: bool,
    in_colour: bool,
}

impl Voice {
    /// Takes the options that every sub-command has.
    pub(crate) fn new(common: &Common) -> Self {
        Self {
            json: common.json,
            is_quiet: common.quiet,
            is_verbose: common.verbose > 0,
            on_terminal: io::stderr().is_terminal(),
            in_colour: match common.color {
                Color::Always => true,
                Color::Never => false,
                Color::Auto => {
                    io::stdout().is_terminal()
                        && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
                }
            },
        }
    }

    /// Says whether JSON was asked for.
    pub(crate) fn is_json(&self) -> bool {
        self.json
    }

    /// Makes a word on stdout bold, where colours are wanted.
    pub(crate) fn bold(&self, word: &str) -> String {
        if self.in_colour { format!("\x1b[1m{word}\x1b[0m") } else { word.to_owned() }
    }

    /// Makes a voice that says everything: for tests.
    #[doc(hidden)]
    pub fn for_tests() -> Self {
        Self { json: false, is_quiet: false, is_verbose: true, on_terminal: false, in_colour: false }
    }

    /// Says why this ends with a code of our own.
    pub(crate) fn failure(&self, sentence: impl fmt::Display) {
        if self.json {
            self.event("failed", json!({ "message": sentence.to_string() }));
        } else if !self.is_quiet {
            line(format_args!("{sentence}"));
        }
    }

    /// Says what somebody who watches wants to know: on a terminal or with `-v`.
    pub(crate) fn progress(&self, sentence: impl fmt::Display) {
        if !self.json && !self.is_quiet && (self.is_verbose || self.on_terminal) {
            line(format_args!("{sentence}"));
        }
    }

    /// Says what only `-v` asks for.
    pub(crate) fn detail(&self, sentence: impl fmt::Display) {
        if !self.json && self.is_verbose {
            line(format_args!("{sentence}"));
        }
    }

    /// Writes one event as a line of JSON, when JSON was asked for.
    pub(crate) fn event(&self, event: &str, fields: Value) {
        if !self.json || self.is_quiet {
            return;
        }
        let mut whole = Map::new();
        whole.insert("schema".into(), "lockctl/run/1".into());
        whole.insert("event".into(), event.into());
        if let Value::Object(fields) = fields {
            whole.extend(fields);
        }
        // Whoever read this may be gone; that must not end a run.
        let _ = writeln!(io::stderr().lock(), "{}", Value::Object(whole));
    }

    /// Says that a renewal is unconfirmed.
    pub(crate) fn uncertain(&self, left: Duration) {
        self.event("uncertain", json!({ "remaining_ms": millis(left) }));
        self.detail(format_args!("a renewal is not confirmed; the lease stands for {}", show(left)));
    }

    /// Says that the lease is over, or about to be.
    pub(crate) fn lost(&self, reason: LostReason, left: Duration) {
        self.event("lost", json!({ "reason": reason.to_string(), "remaining_ms": millis(left) }));
        self.detail(format_args!("{reason}; {} left until the deadline", show(left)));
    }

    /// Says that the command is asked to stop, or stopped.
    pub(crate) fn stopping(&self, signal: Signal) {
        self.event("stopping", json!({ "signal": signal.as_raw() }));
        self.detail(format_args!("stopping the command with {}", signal_name(signal)));
    }

    /// Says that processes outlive the deadline.
    pub(crate) fn still_there(&self, pids: &[i32]) {
        if self.json {
            self.event("overdue", json!({ "pids": pids }));
        } else if !self.is_quiet {
            line(format_args!(
                "the deadline has passed and processes {pids:?} do not end, KILL notwithstanding"
            ));
        }
    }
}

fn signal_name(signal: Signal) -> String {
    match signal {
        Signal::TERM => "TERM".into(),
        Signal::INT => "INT".into(),
        Signal::KILL => "KILL".into(),
        other => format!("signal {}", other.as_raw()),
    }
}

/// Returns milliseconds as JSON has them.
pub(crate) fn millis(d: Duration) -> u64 {
    u64::try_from(d.as_millis()).unwrap_or(u64::MAX)
}

fn line(sentence: fmt::Arguments<'_>) {
    // In one write, so that lines of several processes do not mix; nobody may be reading.
    let _ = io::stderr().lock().write_all(format!("lockctl: {sentence}\n").as_bytes());
}

/// Writes to stdout; says whether somebody still reads.
///
/// # Errors
/// The stream's, but for a closed pipe, which is no failure of ours.
pub(crate) fn print(text: &str) -> io::Result<bool> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(false),
        Err(error) => Err(error),
    }
}
