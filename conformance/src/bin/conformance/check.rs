//! `conformance check`: judges recorded histories offline.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use clap::Args;
use lockcore_conformance::history::{Expect, History, Outcome, Property, Report, Rules, check, timeline};

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
    #[arg(long, value_name = "TIME", value_parser = lockcore::text::parse_duration)]
    loss_notice: Option<Duration>,
    /// How long before their deadlines the guards stop (`stop_margin`).
    #[arg(long, value_name = "TIME", value_parser = lockcore::text::parse_duration)]
    stop_margin: Option<Duration>,
    /// Expects a property to be violated (may be repeated).
    #[arg(long, value_name = "PROPERTY")]
    breaks: Vec<Property>,
    /// Tells violations of a property, and does not fail for them (may be repeated).
    #[arg(long, value_name = "PROPERTY")]
    may: Vec<Property>,
    /// Leaves a property out (may be repeated).
    #[arg(long, value_name = "PROPERTY")]
    skip: Vec<Property>,
    /// Prints a timeline of each name with a finding, or of the names that `--key` gives.
    #[arg(long, conflicts_with = "json")]
    text: bool,
    /// Draws the timeline of one name: the one of `--key`, or the first with a finding, or the first.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Draws this name (may be repeated).
    #[arg(long, value_name = "NAME")]
    key: Vec<String>,
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
        let keys = self.keys(&history, &report)?;
        if let Some(path) = &self.svg {
            let key = keys.first().ok_or("there is no name to draw")?;
            fs::write(path, timeline::svg(&history, Some(&report), key))
                .map_err(|e| format!("{}: {e}", path.display()))?;
        }
        self.print(&history, &report, &keys).or_else(closed_pipe)?;
        Ok(report.outcome)
    }

    /// Returns the names to draw: those that were asked for, or else those with a finding, or else the first.
    fn keys(&self, history: &History, report: &Report) -> Result<Vec<String>, String> {
        let all = history.keys();
        if let Some(missing) = self.key.iter().find(|k| !all.contains(&k.as_str())) {
            return Err(format!("no event is about {missing:?}"));
        }
        if !self.key.is_empty() {
            return Ok(self.key.clone());
        }
        let found = report.violations.iter().chain(&report.expected).map(|v| v.key.clone());
        let mut keys: Vec<String> = found.filter(|k| !k.is_empty()).collect();
        keys.sort_unstable();
        keys.dedup();
        if keys.is_empty() {
            keys.extend(all.first().map(|k| (*k).to_owned()));
        }
        Ok(keys)
    }

    fn rules(&self, history: &History) -> Result<Rules, String> {
        let mut rules = match &self.rules {
            Some(path) => read_rules(path)?,
            None => history.rules().cloned().unwrap_or_default(),
        };
        rules.closed_world |= self.complete;
        rules.loss_notice = self.loss_notice.or(rules.loss_notice);
        rules.stop_margin = self.stop_margin.unwrap_or(rules.stop_margin);
        let named =
            [(&self.breaks, Expect::Breaks), (&self.may, Expect::May), (&self.skip, Expect::NotJudged)];
        for (properties, expect) in named {
            for property in properties {
                rules.expect.insert(*property, expect);
            }
        }
        Ok(rules)
    }

    fn print(&self, history: &History, report: &Report, keys: &[String]) -> io::Result<()> {
        let mut out = io::stdout().lock();
        if self.text {
            for key in keys {
                writeln!(out, "{}", timeline::text(history, Some(report), key))?;
            }
        }
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
