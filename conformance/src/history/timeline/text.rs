//! The timeline as text: time runs down, one column for each client, words to the right.

use std::fmt::Write as _;

use super::scene::{Mark, Row, Scene};
use crate::history::{History, Report};

/// Columns of the page.
const WIDTH: usize = 100;
/// Rows beyond which only what surrounds the findings is shown.
const LONG: usize = 400;
/// Rows shown on each side of a finding.
const AROUND: usize = 25;

/// Draws what happened to one lock as text of 100 columns.
///
/// # Shape
/// One row for each event: the moment, a column for each client and resource, and what happened. A column shows `┃`
/// while its client believes that it holds the lock, and `┆` while a call is under way. Two `┃` in one row are two
/// holders. What `report` found stands below the last row that shows it.
pub fn text(history: &History, report: Option<&Report>, key: &str) -> String {
    let scene = Scene::new(history, report, key);
    let mut page = String::new();
    header(&mut page, &scene);
    let name_width = scene.lanes.iter().map(|l| l.name.chars().count()).max().unwrap_or(0).clamp(1, 16);
    let mut left_out = 0;
    let shown = shown(&scene);
    // The last row that shows a finding carries it.
    let mut carried: Vec<Vec<usize>> = vec![Vec::new(); scene.rows.len()];
    for finding in 0..scene.findings.len() {
        if let Some(row) = scene.rows.iter().rposition(|r| r.shows.contains(&finding)) {
            carried[row].push(finding);
        }
    }
    for (at, row) in scene.rows.iter().enumerate() {
        if !shown[at] {
            left_out += 1;
            continue;
        }
        if left_out > 0 {
            let _ = writeln!(page, "{:>15}  {left_out} events left out", "…");
            left_out = 0;
        }
        line(&mut page, &scene, row, name_width);
        for &finding in &carried[at] {
            let (property, says) = &scene.findings[finding];
            wrap(&mut page, &format!("{:>15}  ", "▲"), &format!("{property} {says}"));
        }
    }
    if left_out > 0 {
        let _ = writeln!(page, "{:>15}  {left_out} events left out", "…");
    }
    let told = carried.concat();
    for (finding, (property, says)) in scene.findings.iter().enumerate() {
        if !told.contains(&finding) {
            wrap(&mut page, &format!("{:>15}  ", "▲"), &format!("{property} {says}"));
        }
    }
    page
}

fn header(page: &mut String, scene: &Scene) {
    let key = if scene.key.is_empty() { "(no name)" } else { &scene.key };
    let _ = writeln!(page, "{key}");
    for (number, lane) in scene.lanes.iter().enumerate() {
        let kind = if lane.is_resource { "resource" } else { "client" };
        let _ = writeln!(page, "  {} {} ({kind})", letter(number), lane.name);
    }
    for legend in [
        "┏ granted  ┃ believes it holds  ↻ renewed  ┗ releases  ╹ deadline  ╳ lost  ▲ finding",
        "? asks  ┆ call under way  ✓ accepted  = duplicate  ✗ stale or refused  ~ no answer",
    ] {
        let _ = writeln!(page, "  {legend}");
    }
    let _ = write!(page, "{:>15}  ", "time");
    for number in 0..scene.lanes.len() {
        let _ = write!(page, "{} ", letter(number));
    }
    page.truncate(page.trim_end().len());
    page.push('\n');
}

/// Names a lane by one character; the 62 first have one of their own.
fn letter(lane: usize) -> char {
    const LETTERS: &[u8] = b"123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
    LETTERS.get(lane).map_or('*', |&b| b.into())
}

/// Chooses the rows: all, or those around findings, or both ends.
fn shown(scene: &Scene) -> Vec<bool> {
    let rows = scene.rows.len();
    let mut shown = vec![rows <= LONG; rows];
    if rows <= LONG {
        return shown;
    }
    let evidence: Vec<usize> = (0..rows).filter(|&r| !scene.rows[r].shows.is_empty()).collect();
    let mut left = LONG;
    for &row in evidence.iter().chain(evidence.is_empty().then_some(&0)) {
        let around = if evidence.is_empty() { LONG / 2 } else { AROUND };
        for shown in &mut shown[row.saturating_sub(around)..(row + around).min(rows)] {
            // A history full of findings is told by its first ones.
            if !*shown && left > 0 {
                *shown = true;
                left -= 1;
            }
        }
    }
    if evidence.is_empty() {
        shown[rows - LONG / 2..].fill(true);
    }
    shown
}

fn line(page: &mut String, scene: &Scene, row: &Row, name_width: usize) {
    let mut start = format!("{:>15}  ", scene.at(row.ts));
    for lane in 0..scene.lanes.len() {
        let held =
            scene.held.iter().any(|h| h.span.lane == lane && h.span.from <= row.ts && row.ts < h.span.to);
        let busy = scene.pending.iter().any(|p| p.lane == lane && p.from <= row.ts && row.ts <= p.to);
        let own = row.lane == Some(lane);
        start.push(match own.then(|| mark(row.mark)).flatten() {
            Some(mark) => mark,
            None if held => '┃',
            None if own => '•',
            None if busy => '┆',
            None => '·',
        });
        start.push(' ');
    }
    start.push(' ');
    let name = row.lane.map_or("", |l| scene.lanes[l].name.as_str());
    let name: String = name.chars().take(name_width).collect();
    let _ = write!(start, "{name:<name_width$}  ");
    wrap(page, &start, &row.words);
}

fn mark(mark: Mark) -> Option<char> {
    Some(match mark {
        Mark::Asks => '?',
        Mark::Granted => '┏',
        Mark::Renewed => '↻',
        Mark::Released => '┗',
        Mark::DeadlinePassed => '╹',
        Mark::Lost => '╳',
        Mark::Failed | Mark::Stale => '✗',
        Mark::Unknown | Mark::GaveUp => '~',
        Mark::Accepted => '✓',
        Mark::Duplicate => '=',
        Mark::Fault | Mark::Probe | Mark::Other => return None,
    })
}

/// Writes words behind `start`, and goes on below them where the page ends.
fn wrap(page: &mut String, start: &str, words: &str) {
    let indent = start.chars().count();
    let room = WIDTH.saturating_sub(indent).max(24);
    let mut line = start.to_owned();
    let mut used = 0;
    for word in words.split(' ') {
        let length = word.chars().count();
        if used > 0 && used + length > room {
            page.push_str(line.trim_end());
            page.push('\n');
            line = " ".repeat(indent);
            used = 0;
        }
        line.push_str(word);
        line.push(' ');
        used += length + 1;
    }
    page.push_str(line.trim_end());
    page.push('\n');
}
