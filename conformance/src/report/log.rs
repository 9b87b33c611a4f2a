//! What a lane writes down while it runs, and how it ends.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use libtest_mimic::{Arguments, Conclusion};
use lockcore::backend::Capabilities;

use super::{
    CaseRun, Evidence, Golden, Lane, Measure, Promises, Row, Verdict, folder,
    lane::{column, milliseconds},
    promise::promise,
};
use crate::{
    Bench, Service,
    case::{Case, Need},
    cases,
    history::{Expect, Property, Report, Rules},
    suite::Played,
};

/// What is known about a store before the first case.
#[derive(Clone, Debug)]
pub(crate) struct About {
    capabilities: Capabilities,
    server: Option<String>,
    ttl: Duration,
    virtual_time: bool,
    embedded: bool,
    foreign: bool,
}

impl About {
    pub(crate) fn is_foreign(&self) -> bool {
        self.foreign
    }

    pub(crate) async fn ask(service: &dyn Service, capabilities: &Capabilities) -> Self {
        Self {
            capabilities: capabilities.clone(),
            server: service.version().await,
            ttl: service.ttl(),
            virtual_time: service.virtual_time(),
            embedded: service.embedded(),
            foreign: service.foreign(),
        }
    }
}

/// What a played case leaves for the report.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    refused: bool,
    breaks: Vec<Property>,
    may: Vec<Property>,
    evidence: Evidence,
    measures: Vec<Measure>,
    history: Option<PathBuf>,
}

impl Seen {
    /// A history of so few events is kept although its case holds, if the resource had the last word in it: drawn, it
    /// shows what a fence is for.
    pub(crate) const SHORT: usize = 120;

    pub(crate) fn new(bench: &Bench, rules: &Rules, report: &Report, refused: bool) -> Self {
        let expected = |expect| {
            let found = rules.expect.iter().filter(move |(_, rule)| **rule == expect);
            found.map(|(property, _)| *property).collect::<Vec<_>>()
        };
        let mut evidence = Evidence::of(&report.judged);
        for violation in &report.expected {
            // One witness of each property tells the story.
            let sentence =
                format!("{} {}: {}", violation.property, violation.property.title(), violation.says);
            if !evidence.breaks.iter().any(|known| known.starts_with(&format!("{} ", violation.property))) {
                evidence.breaks.push(sentence);
            }
        }
        let measures = bench.stage.measures.lock().unwrap_or_else(PoisonError::into_inner);
        Self {
            refused,
            breaks: expected(Expect::Breaks),
            may: expected(Expect::May),
            evidence,
            measures: Measure::sum_up(&measures),
            history: None,
        }
    }

    /// Adds what was seen with the seeds before.
    pub(crate) fn after(mut self, before: Option<&Self>) -> Self {
        if let Some(before) = before {
            self.evidence.add(&before.evidence);
            // Medians cannot be added; those of one seed are true.
            self.measures.clone_from(&before.measures);
            self.history = self.history.or_else(|| before.history.clone());
        }
        self
    }

    pub(crate) fn kept(mut self, path: Option<&Result<PathBuf, String>>) -> Self {
        let name = path.and_then(|path| path.as_ref().ok()?.file_name());
        self.history = name.map(|name| Path::new("../history").join(name));
        self
    }

    /// Returns what was expected of the case, and what is said of it if nothing failed.
    fn expected(&self) -> Verdict {
        match (self.refused, &*self.breaks, &*self.may) {
            (true, ..) => Verdict::Unsupported,
            (_, [_, ..], _) => Verdict::Breaks(self.breaks.clone()),
            // Whether it shows is chance, and a verdict that changes by chance is worth nothing.
            (_, _, [_, ..]) => Verdict::MayBreak(self.may.clone()),
            _ => Verdict::Holds,
        }
    }
}

/// Collects what becomes of the cases of one lane.
#[derive(Debug)]
pub(crate) struct Log {
    profile: Arc<str>,
    about: Option<About>,
    /// The command line did not choose among the cases.
    whole: bool,
    list: bool,
    date: SystemTime,
    began: Instant,
    cases: Mutex<Vec<CaseRun>>,
}

impl Log {
    pub(crate) fn begin(profile: &Arc<str>, about: Option<About>, arguments: &Arguments) -> Arc<Self> {
        let a = arguments;
        let chosen = a.filter.is_some() || !a.skip.is_empty() || a.ignored || a.include_ignored || a.bench;
        let log = Self { whole: !chosen && !a.list, list: a.list, ..Self::of(profile, about) };
        if log.whole {
            // A lane that is killed half way leaves nothing rather than the results of another day.
            let _ = std::fs::remove_file(Lane::path(&folder().join("results"), &log.column()));
            // Of another day, or of a suite that kept one version only.
            let _ = std::fs::remove_file(Lane::path(&folder().join("results"), profile));
        }
        Arc::new(log)
    }

    /// Names the column that the results belong to.
    pub(crate) fn column(&self) -> String {
        column(&self.profile, self.about.as_ref().and_then(|about| about.server.as_deref()))
    }

    /// Begins a lane that is no test: nothing is written, and nothing compared.
    pub(crate) fn apart(profile: &Arc<str>, about: About) -> Self {
        Self::of(profile, Some(about))
    }

    fn of(profile: &Arc<str>, about: Option<About>) -> Self {
        Self {
            profile: profile.clone(),
            about,
            whole: false,
            list: false,
            date: SystemTime::now(),
            began: Instant::now(),
            cases: Mutex::default(),
        }
    }

    /// Notes a case that lacks something; returns the word for it, and what it lacks.
    pub(crate) fn lacking(&self, case: &Case, need: Need) -> (&'static str, &'static str) {
        let about = self.about.as_ref();
        let by_design = about.is_some_and(|about| need.by_design(&about.capabilities, about.embedded));
        let verdict = if by_design { Verdict::NotApplicable } else { Verdict::NotRun };
        let (word, why) =
            (verdict.word(), need.missing(!by_design && about.is_some_and(|about| about.foreign)));
        self.note(CaseRun { reason: Some(why.into()), ..run(case, verdict) });
        (word, why)
    }

    /// Notes a case that somebody chose to leave out.
    pub(crate) fn left_out(&self, case: &Case, why: &str) {
        self.note(CaseRun { reason: Some(why.into()), ..run(case, Verdict::NotRun) });
    }

    /// Notes a case that was played, and returns the note.
    pub(crate) fn played(&self, case: &Case, played: &Played, took: Duration) -> CaseRun {
        let expected = played.seen.as_ref().map_or(Verdict::Holds, Seen::expected);
        let verdict = if played.failure.is_some() { Verdict::Fails } else { expected.clone() };
        let seen = played.seen.clone();
        let run = CaseRun {
            expected: expected.to_string(),
            reason: played.failure.clone().or_else(|| {
                played.earlier.as_ref().map(|said| format!("as expected when played again; at first: {said}"))
            }),
            seconds: milliseconds(took) / 1000.0,
            measures: seen.as_ref().map(|seen| seen.measures.clone()).unwrap_or_default(),
            evidence: seen.as_ref().map(|seen| seen.evidence.clone()).unwrap_or_default(),
            history: seen.and_then(|seen| seen.history),
            ..run(case, verdict)
        };
        self.note(run.clone());
        run
    }

    fn note(&self, run: CaseRun) {
        self.cases.lock().unwrap_or_else(PoisonError::into_inner).push(run);
    }

    /// Writes the results and compares them with the golden copy; returns the exit status of the lane.
    pub(crate) fn end(&self, conclusion: &Conclusion, seed: u64) -> ExitCode {
        let status = conclusion.exit_code();
        if !self.whole || self.about.is_none() {
            if !self.list && self.about.is_some() {
                say(&format!("{}: some cases were chosen, so no results are written", self.profile));
            }
            return status;
        }
        let lane = self.lane(seed);
        match lane.write(&folder().join("results")) {
            Ok(path) => say(&format!("{}: results in {}", self.profile, path.display())),
            Err(error) => say(&format!("{}: results could not be written: {error}", self.profile)),
        }
        match Golden::find() {
            None => status,
            Some(Err(error)) => {
                say(&error);
                ExitCode::from(101)
            }
            Some(Ok(golden)) => {
                let difference = golden.compare(&lane);
                for line in difference.to_string().lines() {
                    say(line);
                }
                if difference.is_change() { ExitCode::from(101) } else { status }
            }
        }
    }

    /// Sums up; nothing is known of a store that did not start.
    pub(crate) fn lane(&self, seed: u64) -> Lane {
        let about = self.about.as_ref();
        let mut runs = self.cases.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let place = |run: &CaseRun| cases::all().position(|case| case.name() == run.name);
        runs.sort_by_key(place);
        Lane {
            schema: Lane::SCHEMA.into(),
            version: Lane::VERSION,
            suite: env!("CARGO_PKG_VERSION").into(),
            profile: self.profile.to_string(),
            server: about.and_then(|about| about.server.clone()),
            column: column(&self.profile, about.and_then(|about| about.server.as_deref())),
            date: humantime::format_rfc3339_seconds(self.date).to_string(),
            seed,
            seconds: milliseconds(self.began.elapsed()) / 1000.0,
            ttl_ms: about.map_or(0.0, |about| milliseconds(about.ttl)),
            virtual_time: about.is_some_and(|about| about.virtual_time),
            promises: about.map(|about| Promises::of(&about.capabilities)).unwrap_or_default(),
            cases: runs,
        }
    }
}

/// Begins the entry of a case.
fn run(case: &Case, verdict: Verdict) -> CaseRun {
    CaseRun {
        id: case.id().to_lowercase(),
        topic: case.topic().into(),
        name: case.name().into(),
        promise: promise(case),
        rows: Row::of(case).map(|row| row.id.to_owned()).collect(),
        needs: case.needs.iter().map(|need| format!("{need:?}")).collect(),
        expected: Verdict::Holds.to_string(),
        verdict,
        reason: None,
        seconds: 0.0,
        measures: Vec::new(),
        evidence: Evidence::default(),
        history: None,
    }
}

#[allow(clippy::print_stderr)]
fn say(line: &str) {
    eprintln!("{line}");
}
