//! A comparison as text for a terminal, and as annotations for a workflow.

use std::{
    fmt::Write as _,
    io::{self, Write as _},
    path::Path,
};

use lockcore_conformance::report::{Cell, Change, Comparison, Difference, Verdict};

use crate::voice::Voice;

/// Draws the table, says where the stores differ, and what fails.
pub(super) fn table(comparison: &Comparison, voice: &Voice) -> String {
    let mut text = String::new();
    let columns: Vec<&str> = comparison.backends.iter().map(|backend| backend.lane.column.as_str()).collect();
    if columns.is_empty() {
        return text;
    }
    let rows: Vec<(&str, Vec<String>)> = comparison
        .rows
        .iter()
        .enumerate()
        .filter(|(at, _)| comparison.backends.iter().any(|backend| !backend.cells[*at].cases.is_empty()))
        .map(|(at, row)| {
            (row.title, comparison.backends.iter().map(|backend| in_short(&backend.cells[at])).collect())
        })
        .collect();
    let first = rows.iter().map(|(title, _)| title.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = columns
        .iter()
        .enumerate()
        .map(|(at, column)| {
            let cells = rows.iter().map(|(_, cells)| cells[at].chars().count());
            cells.chain([column.chars().count()]).max().unwrap_or(0)
        })
        .collect();
    let mut line = |title: &str, cells: &[&str], bold: bool| {
        let mut whole = format!("{title:<first$}");
        for (cell, width) in cells.iter().zip(&widths) {
            let _ = write!(whole, "  {cell:<width$}");
        }
        let whole = whole.trim_end();
        let _ = writeln!(text, "{}", if bold { voice.bold(whole) } else { whole.to_owned() });
    };
    line("", &columns, true);
    for (title, cells) in &rows {
        line(title, &cells.iter().map(String::as_str).collect::<Vec<_>>(), false);
    }
    for backend in &comparison.backends {
        let _ = write!(text, "\n{}: {}\n", voice.bold(&backend.lane.column), backend.headline);
    }
    if columns.len() > 1 {
        apart(comparison, voice, &mut text);
    }
    failures(comparison, voice, &mut text);
    text
}

fn in_short(cell: &Cell) -> String {
    let mut text = cell.verdict.to_string();
    for besides in &cell.besides {
        let _ = write!(text, ", {besides}");
    }
    text
}

/// Says in sentences where the stores differ.
fn apart(comparison: &Comparison, voice: &Voice, text: &mut String) {
    let mut begun = false;
    for (at, row) in comparison.rows.iter().enumerate() {
        let cells: Vec<&Cell> = comparison.backends.iter().map(|backend| &backend.cells[at]).collect();
        if cells.iter().all(|cell| cell.cases.is_empty() || cell.verdict == cells[0].verdict) {
            continue;
        }
        if !std::mem::replace(&mut begun, true) {
            let _ = write!(text, "\n{}\n", voice.bold("Where they differ"));
        }
        let _ = writeln!(text, "  {}", row.asks);
        for (backend, cell) in comparison.backends.iter().zip(cells) {
            let _ = writeln!(text, "    {}: {}: {}", backend.lane.column, cell.verdict, cell.sentence);
        }
    }
}

fn failures(comparison: &Comparison, voice: &Voice, text: &mut String) {
    for backend in &comparison.backends {
        for run in backend.lane.cases.iter().filter(|run| run.verdict == Verdict::Fails) {
            let reason = run.reason.as_deref().unwrap_or_default().replace('\n', "\n  ");
            let title = format!("{} {}::{} fails", backend.lane.column, run.topic, run.name);
            let _ = write!(text, "\n{}\n  {reason}\n", voice.bold(&title));
        }
    }
}

/// Says what is not as the baseline has it; nothing, if all is.
pub(super) fn differences(path: &str, differences: &[Difference], not_run: &[String]) -> String {
    let mut text = String::new();
    for difference in differences {
        if difference.is_new_column {
            let _ =
                writeln!(text, "{}: a new column, not yet in {path}; --update adds it", difference.column);
        }
        for (list, what) in [(&difference.changed, "changed"), (&difference.new, "new, --update adds it")] {
            for change in list {
                let _ = writeln!(text, "{}: {}: {what}: {}", difference.column, change.case, from_to(change));
            }
        }
    }
    for profile in not_run {
        let _ = writeln!(text, "{profile}: not run, and {path} has it");
    }
    let changed = differences.iter().map(|difference| difference.changed.len()).sum::<usize>();
    if changed > 0 {
        let _ = writeln!(
            text,
            "{changed} cells differ from {path}; if that is meant, --update, and review the file"
        );
    }
    if text.is_empty() { text } else { format!("\n{text}") }
}

fn from_to(change: &Change) -> String {
    let gone = || "gone".to_owned();
    let is = change.is.as_ref().map_or_else(gone, ToString::to_string);
    let why = change.reason.as_ref().map(|reason| format!(" ({reason})")).unwrap_or_default();
    match &change.was {
        Some(was) => format!("{was} -> {is}{why}"),
        None => format!("{is}{why}"),
    }
}

/// Puts what [`differences`] says below the tables.
pub(super) fn differences_in_markdown(told: &str) -> String {
    if told.is_empty() {
        return String::new();
    }
    let lines: Vec<String> =
        told.trim().lines().map(|line| format!("* {}\n", line.replace('<', "&lt;"))).collect();
    format!("\n## Against the baseline\n\n{}", lines.concat())
}

/// Writes one workflow command for each thing that somebody must look at.
pub(super) fn annotations(
    path: &str,
    comparison: &Comparison,
    differences: &[Difference],
    not_run: &[String],
) -> String {
    let mut text = String::new();
    let mut say = |level: &str, title: &str, message: &str| {
        let file = if path.is_empty() { String::new() } else { format!("file={},", property(path)) };
        let _ = writeln!(text, "::{level} {file}title={}::{}", property(title), data(message));
    };
    for backend in &comparison.backends {
        for run in backend.lane.cases.iter().filter(|run| run.verdict == Verdict::Fails) {
            let title = format!("{} {}::{}", backend.lane.column, run.topic, run.name);
            say("error", &title, run.reason.as_deref().unwrap_or("fails"));
        }
    }
    for difference in differences {
        if difference.is_new_column {
            say("warning", &difference.column, "a new column, not yet in the baseline");
        }
        for change in &difference.changed {
            say("error", &format!("{} {}", difference.column, change.case), &from_to(change));
        }
        for change in &difference.new {
            say("notice", &format!("{} {}", difference.column, change.case), &from_to(change));
        }
    }
    for profile in not_run {
        say("error", profile, "not run, and the baseline has it");
    }
    for backend in &comparison.backends {
        say("notice", &backend.lane.column, &backend.headline);
    }
    text
}

fn data(text: &str) -> String {
    text.replace('%', "%25").replace('\r', "%0D").replace('\n', "%0A")
}

fn property(text: &str) -> String {
    data(text).replace(':', "%3A").replace(',', "%2C")
}

/// Appends to a file that other steps write, too.
pub(super) fn append(path: &Path, text: &str) -> io::Result<()> {
    let mut file = std::fs::OpenOptions::new().create(true).append(true).open(path)?;
    file.write_all(text.as_bytes())
}
