//! Lanes side by side: for each row and profile a verdict, a sentence and numbers.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde::Serialize;

use super::{
    CaseRun, Kills, Lane, Measure, Row, Verdict,
    lane::{Promises, time},
};
use crate::history::{History, Property, check, timeline};

/// Lanes side by side. Serialized, it is `report.json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Comparison {
    /// [`Comparison::SCHEMA`].
    pub schema: &'static str,
    /// The version of this form: [`Comparison::VERSION`].
    pub version: u32,
    /// The version of the suite that wrote it.
    pub suite: &'static str,
    /// Which program wrote it, for the texts.
    #[serde(skip)]
    pub by: &'static str,
    /// The rows, in order.
    pub rows: &'static [Row],
    /// One for each lane.
    pub backends: Vec<Backend>,
    /// Which case caught which mutant, if that was played.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kills: Option<Kills>,
}

/// One lane in a comparison: its results, and what they come to.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Backend {
    /// The most important things, in a sentence or two.
    pub headline: String,
    /// How many cases have which verdict.
    pub counts: BTreeMap<&'static str, usize>,
    /// One for each row, in order.
    pub cells: Vec<Cell>,
    /// The results.
    #[serde(flatten)]
    pub lane: Lane,
}

/// One cell: a row for one lane.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Cell {
    /// Id of the row.
    pub row: &'static str,
    /// The worst verdict among the cases that ran; if none ran, why.
    pub verdict: Verdict,
    /// What that verdict does not say: `2 not run`, `1 unsupported`.
    pub besides: Vec<String>,
    /// One plain sentence.
    pub sentence: String,
    /// Numbers of its cases.
    pub measures: Vec<Measure>,
    /// Names of its cases.
    pub cases: Vec<String>,
}

/// A kept history, drawn.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Timeline {
    /// Column of the lane.
    pub column: String,
    /// Name of the case.
    pub case: String,
    /// Where the history is.
    pub path: PathBuf,
    /// The picture, to stand in a page; or why there is none.
    pub svg: Result<String, String>,
    /// The same as text.
    pub text: String,
}

impl Comparison {
    /// What the file calls itself.
    pub const SCHEMA: &'static str = "lockcore-conformance-report";
    /// The version of the form: it grows when a field changes its meaning or goes; a new field does not change it.
    pub const VERSION: u32 = 1;

    /// Puts lanes side by side, in the order given.
    pub fn new(lanes: Vec<Lane>) -> Self {
        Self {
            schema: Self::SCHEMA,
            version: Self::VERSION,
            suite: env!("CARGO_PKG_VERSION"),
            by: "conformance report",
            rows: Row::ALL,
            backends: lanes.into_iter().map(Backend::new).collect(),
            kills: None,
        }
    }

    /// Names the program that wrote it, for the texts.
    #[must_use]
    pub fn written_by(self, program: &'static str) -> Self {
        Self { by: program, ..self }
    }

    /// Returns the text of `report.json`.
    pub fn to_json(&self) -> String {
        // String keys and finite numbers only.
        let mut text = serde_json::to_string_pretty(self).expect("a comparison fits into JSON");
        text.push('\n');
        text
    }

    /// Says whether a case fails anywhere.
    pub fn fails(&self) -> bool {
        self.backends.iter().any(|backend| backend.counts.contains_key(Verdict::Fails.word()))
    }

    /// Draws the histories that the lanes kept; `results` is the folder that their paths start from.
    pub fn timelines(&self, results: &Path) -> Vec<Timeline> {
        let runs = self.backends.iter().flat_map(|b| b.lane.cases.iter().map(|run| (&b.lane.column, run)));
        let kept = runs.filter_map(|(column, run)| Some((column, run, results.join(run.history.as_ref()?))));
        kept.enumerate()
            .map(|(number, (column, run, path))| {
                let (column, case) = (column.clone(), run.name.clone());
                match draw(&path, &format!("t{number}")) {
                    Ok((svg, text)) => Timeline { column, case, path, svg: Ok(svg), text },
                    Err(why) => Timeline { column, case, path, svg: Err(why), text: String::new() },
                }
            })
            .collect()
    }
}

fn draw(path: &Path, id: &str) -> Result<(String, String), String> {
    let history = History::read([path]).map_err(|error| error.to_string())?;
    let rules = history.rules().cloned().unwrap_or_default();
    let report = check(&history, &rules);
    let found =
        report.violations.iter().chain(&report.expected).find(|v| !v.key.is_empty()).map(|v| v.key.as_str());
    let key = found.or_else(|| history.keys().first().copied()).ok_or("the history names no lock")?;
    let text = timeline::text(&history, Some(&report), key);
    Ok((timeline::svg_in_a_page(&history, Some(&report), key, id), text))
}

impl Backend {
    fn new(lane: Lane) -> Self {
        let mut counts = BTreeMap::new();
        for run in &lane.cases {
            *counts.entry(run.verdict.word()).or_insert(0) += 1;
        }
        let cells = Row::ALL.iter().map(|row| cell(row, &lane)).collect();
        Self { headline: headline(&lane), counts, cells, lane }
    }

    /// Returns the cases of a cell.
    pub fn cases<'a>(&'a self, cell: &'a Cell) -> impl Iterator<Item = &'a CaseRun> {
        self.lane.cases.iter().filter(|run| cell.cases.contains(&run.name))
    }
}

/// Sums up verdicts: the worst, and what that one does not say. `None`: there are none.
pub(crate) fn summary<'a>(verdicts: impl Iterator<Item = &'a Verdict>) -> Option<(Verdict, Vec<String>)> {
    let verdicts: Vec<_> = verdicts.collect();
    let mut worst = (*verdicts.iter().max_by_key(|verdict| verdict.rank())?).clone();
    if let Verdict::Breaks(all) | Verdict::MayBreak(all) = &mut worst {
        for verdict in &verdicts {
            if let Verdict::Breaks(more) | Verdict::MayBreak(more) = verdict {
                all.extend(more);
            }
        }
        all.sort();
        all.dedup();
    }
    let besides =
        [Verdict::Unsupported, Verdict::NotRun].into_iter().filter(|verdict| verdict.rank() < worst.rank());
    let besides = besides.filter_map(|verdict| {
        let count = verdicts.iter().filter(|other| ***other == verdict).count();
        (count > 0).then(|| format!("{count} {verdict}"))
    });
    let besides = besides.collect();
    Some((worst, besides))
}

fn cell(row: &Row, lane: &Lane) -> Cell {
    let cases: Vec<&CaseRun> =
        lane.cases.iter().filter(|run| run.rows.iter().any(|id| id == row.id)).collect();
    let (verdict, besides) =
        summary(cases.iter().map(|run| &run.verdict)).unwrap_or((Verdict::NotRun, Vec::new()));
    Cell {
        row: row.id,
        sentence: sentence(row, lane, &cases, &verdict),
        verdict,
        besides,
        measures: cases.iter().flat_map(|run| run.measures.clone()).collect(),
        cases: cases.iter().map(|run| run.name.clone()).collect(),
    }
}

fn sentence(row: &Row, lane: &Lane, cases: &[&CaseRun], worst: &Verdict) -> String {
    let mut said = match worst {
        Verdict::Fails => {
            let failing: Vec<_> = cases.iter().filter(|run| run.verdict == Verdict::Fails).collect();
            let first = failing.first().map_or("", |run| run.name.as_str());
            return format!("{} of {} cases fail, the first is {first}.", failing.len(), cases.len());
        }
        Verdict::Breaks(properties) => {
            let found: Vec<_> = properties.iter().map(|property| breaking(*property)).collect();
            let word = format!("{} {}", row.fault, found.join(", and "));
            format!("{word}{}.", refused(cases.iter().copied()))
        }
        Verdict::MayBreak(properties) => {
            let seen = cases.iter().any(|run| !run.evidence.breaks.is_empty());
            let found: Vec<_> = properties.iter().map(|property| breaking(*property)).collect();
            let chance = if seen { "this run showed it" } else { "this run did not show it" };
            format!("{} it may be that {}; {chance}.", row.fault, found.join(", and "))
        }
        Verdict::Holds => holds(row, &lane.promises),
        Verdict::Unsupported => "The backend refuses it by a typed error, which was checked.".into(),
        Verdict::NotRun | Verdict::NotApplicable => String::new(),
    };
    let mut reasons: Vec<String> = Vec::new();
    for (verdict, word) in [(Verdict::NotRun, "Not run"), (Verdict::NotApplicable, "Does not apply")] {
        for run in cases.iter().filter(|run| run.verdict == verdict) {
            let reason = format!("{word}: {}.", run.reason.as_deref().unwrap_or("no reason given"));
            // What does not apply is worth a word only where nothing else is there to be said.
            if !reasons.contains(&reason) && (verdict == Verdict::NotRun || !worst.ran()) {
                reasons.push(reason);
            }
        }
    }
    if cases.is_empty() {
        reasons.push("No case of the suite covers it yet.".into());
    }
    for reason in reasons {
        if !said.is_empty() {
            said.push(' ');
        }
        said += &reason;
    }
    said
}

/// Says what can be said where a row holds: what was seen, and which promise stands behind it.
fn holds(row: &Row, promises: &Promises) -> String {
    let known = match (row.id, promises.fence.as_str(), promises.wake_up.as_str()) {
        ("fence", "durable", _) => "It is part of what the store keeps, and grew with every grant.",
        ("fence", "clock-bounded", _) => {
            "It grew with every grant, and outlives a loss of data as long as the server's clock does not go back."
        }
        ("fence", "volatile", _) => "It grew with every grant, and is forgotten with the process.",
        ("waiting", _, "push") => "Waiters are told, and look again as a safety net; no wake-up was lost.",
        ("waiting", _, "poll") => "Waiters look again and again; none was forgotten.",
        _ => row.holds,
    };
    if row.id == "ttl" && promises.ttl_most_ms > 0.0 {
        let [least, most, step] =
            [promises.ttl_least_ms, promises.ttl_most_ms, promises.ttl_step_ms].map(time);
        return format!("{least} to {most} in steps of {step}. {known}");
    }
    known.into()
}

/// Says what a broken property looks like.
fn breaking(property: Property) -> String {
    match property {
        Property::S1 | Property::S1q => "the fence went back".into(),
        Property::S2 => "two clients believed that they held it".into(),
        Property::S4 => "the resource took an earlier holder".into(),
        Property::L1 => "it was free later than promised".into(),
        other => format!("{} did not hold", other.title()),
    }
}

/// Says how the resource stood in the cases that break.
fn refused<'a>(cases: impl Iterator<Item = &'a CaseRun>) -> String {
    let stale: u64 =
        cases.filter(|run| matches!(run.verdict, Verdict::Breaks(_))).map(|run| run.evidence.stale).sum();
    match stale {
        0 => String::new(),
        // A stale write that was let through breaks S4, which fails the case.
        1 => "; the resource refused 1 of 1 stale writes".into(),
        n => format!("; the resource refused {n} of {n} stale writes"),
    }
}

fn headline(lane: &Lane) -> String {
    let failing = lane.cases.iter().filter(|run| run.verdict == Verdict::Fails).count();
    let breaks = |property| {
        lane.cases.iter().filter(
            move |run| matches!(&run.verdict, Verdict::Breaks(properties) if properties.contains(&property)),
        )
    };
    let mut faults: Vec<String> = Vec::new();
    for row in breaks(Property::S2).filter_map(|run| Row::by_id(run.rows.first()?)) {
        let fault = small(row.fault);
        if !faults.contains(&fault) {
            faults.push(fault);
        }
    }
    let mut said = match failing {
        0 => String::new(),
        1 => "1 case FAILS. ".into(),
        n => format!("{n} cases FAIL. "),
    };
    if faults.is_empty() {
        said += "No case made two clients hold the lock at once";
    } else {
        let _ = std::fmt::Write::write_fmt(
            &mut said,
            format_args!(
                "Two clients can hold the lock {}{}",
                faults.join(", or "),
                refused(breaks(Property::S2))
            ),
        );
    }
    let promises = &lane.promises;
    said += match promises.fence.as_str() {
        "durable" => ". The fence is part of what the store keeps",
        "clock-bounded" => {
            ". The fence outlives a loss of data as long as the server's clock does not go back"
        }
        "volatile" => ". The fence is forgotten with the process",
        _ => "",
    };
    said += match (promises.wake_up.as_str(), promises.fair) {
        ("push", true) => "; waiters are told, in order of arrival.",
        ("push", false) => "; waiters are told, in no promised order.",
        ("poll", true) => "; waiters look again and again, and are served in order of arrival.",
        ("poll", false) => "; waiters look again and again, in no promised order.",
        _ => ".",
    };
    let not_run = lane.cases.iter().filter(|run| run.verdict == Verdict::NotRun).count();
    if not_run > 0 {
        said += &format!(" {not_run} of {} cases were not run.", lane.cases.len());
    }
    said
}

fn small(text: &str) -> String {
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_lowercase().chain(letters).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn verdicts(words: &[&str]) -> Vec<Verdict> {
        words.iter().map(|word| word.parse().unwrap()).collect()
    }

    #[test]
    fn a_summary_is_the_worst_that_ran_and_hides_nothing() {
        for (words, expected, besides) in [
            (&["holds", "n/a"][..], "holds", vec![]),
            (&["holds", "not run", "not run", "unsupported"], "holds", vec!["1 unsupported", "2 not run"]),
            (&["breaks (S2)", "holds", "breaks (S1)"], "breaks (S1, S2)", vec![]),
            (&["not run", "n/a"], "not run", vec![]),
            (&["unsupported", "not run"], "unsupported", vec!["1 not run"]),
            (&["FAILS", "breaks (S2)"], "FAILS", vec![]),
        ] {
            let (worst, told) = summary(verdicts(words).iter()).unwrap();
            assert_eq!(
                (worst.to_string().as_str(), told),
                (expected, besides.iter().map(|b| (*b).to_owned()).collect())
            );
        }
        assert_eq!(summary([].iter()), None);
    }
}
