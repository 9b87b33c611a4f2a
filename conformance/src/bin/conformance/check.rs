//! `conformance check`: judges recorded histories offline.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::Args;
use lockcore_conformance::history::{Expect, History, Outcome, Property, Report, Rules, check};

use crate::WRONG_USE;

/// Judges recorded histories.
///
/// Files of several processes of one run are judged together. The rules are those of `--rules`, or else those that
/// the recorder wrote into the file, or else the mildest.
///
/// Exit status: 0 as expected, 1 violations, 2 inconclusive (events are missing, or the machine stalled), 125 wrong
/// use.
#[derive(Debug, Args)]
pub(crate) struct Check {
    /// Histories, one event a line.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Judges under the rules in this JSON file.
    #[arg(long, value_name = "FILE")]
    rules: Option<PathBuf>,
    /// Every client of these names is in the files, so refusals and waiting can be judged.
    #[arg(long)]
    complete: bool,
    /// The files were recorded through guards: a lost lease must have been reported this soon after its deadline.
    #[arg(long, value_name = "TIME", value_parser = time)]
    loss_notice: Option<Duration>,
    /// Expects a property to be violated (may be repeated).
    #[arg(long, value_name = "PROPERTY")]
    breaks: Vec<Property>,
    /// Tells violations of a property, and does not fail for them (may be repeated).
    #[arg(long, value_name = "PROPERTY")]
    may: Vec<Property>,
    /// Leaves a property out (may be repeated).
    #[arg(long, value_name = "PROPERTY")]
    skip: Vec<Property>,
    /// Prints the report as JSON.
    #[arg(long)]
    json: bool,
}

impl Check {
    /// Judges, prints, and returns the exit status.
    pub(crate) fn run(self) -> ExitCode {
        match self.judge() {
            Ok(Outcome::Pass) => ExitCode::SUCCESS,
            Ok(Outcome::Fail) => ExitCode::from(1),
            Ok(Outcome::Inconclusive) => ExitCode::from(2),
            Err(message) => {
                // Nobody is left to tell if this fails.
                let _ = writeln!(io::stderr(), "conformance check: {message}");
                WRONG_USE.into()
            }
        }
    }

    fn judge(&self) -> Result<Outcome, String> {
        let history = History::read(&self.files).map_err(|e| e.to_string())?;
        let rules = self.rules(&history)?;
        let report = check(&history, &rules);
        self.print(&report).or_else(closed_pipe)?;
        Ok(report.outcome)
    }

    fn rules(&self, history: &History) -> Result<Rules, String> {
        let mut rules = match &self.rules {
            Some(path) => read_rules(path)?,
            None => history.rules().cloned().unwrap_or_default(),
        };
        rules.closed_world |= self.complete;
        rules.loss_notice = self.loss_notice.or(rules.loss_notice);
        let named =
            [(&self.breaks, Expect::Breaks), (&self.may, Expect::May), (&self.skip, Expect::NotJudged)];
        for (properties, expect) in named {
            for property in properties {
                rules.expect.insert(*property, expect);
            }
        }
        Ok(rules)
    }

    fn print(&self, report: &Report) -> io::Result<()> {
        let mut out = io::stdout().lock();
        if self.json {
            serde_json::to_writer_pretty(&mut out, report)?;
            writeln!(out)?;
        } else {
            writeln!(out, "{report}")?;
        }
        out.flush()
    }
}

/// Takes a reader that has seen enough for no error.
fn closed_pipe(error: io::Error) -> Result<(), String> {
    if error.kind() == io::ErrorKind::BrokenPipe { Ok(()) } else { Err(error.to_string()) }
}

fn read_rules(path: &Path) -> Result<Rules, String> {
    let text = fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))
}

/// Reads a span: a number and its unit.
fn time(text: &str) -> Result<Duration, String> {
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let wrong = || format!("{text:?} is not a time; write 250ms or 1.5s");
    let number: f64 = number.parse().map_err(|_| wrong())?;
    let scale = match unit {
        "us" => 1e-6,
        "ms" => 1e-3,
        "s" => 1.0,
        "m" => 60.0,
        _ => return Err(wrong()),
    };
    Duration::try_from_secs_f64(number * scale).map_err(|_| wrong())
}
