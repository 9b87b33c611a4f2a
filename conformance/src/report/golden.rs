//! The golden copy: the verdicts that were reviewed. What differs from it is a change, and somebody must look.
//!
//! It holds verdicts only, so it changes only when what a store promises does. A column is a profile at one version of its
//! server; another version is a new column, not a change.

use std::{
    collections::BTreeMap,
    fmt::{self, Write as _},
    path::{Path, PathBuf},
};

use super::{CaseRun, Lane, Row, Verdict};

/// Verdicts by case and column.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Golden {
    /// Where it was read.
    pub path: PathBuf,
    columns: Vec<String>,
    cases: Vec<Entry>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    topic: String,
    name: String,
    verdicts: BTreeMap<String, Verdict>,
}

/// One cell that is not as it was.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Change {
    /// Topic and name of the case.
    pub case: String,
    /// What it was; `None`: the case is new.
    pub was: Option<Verdict>,
    /// What it is; `None`: the case is gone.
    pub is: Option<Verdict>,
    /// Why, where the lane says it.
    pub reason: Option<String>,
}

/// How one lane differs from the golden copy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Difference {
    /// The lane.
    pub column: String,
    /// The golden copy has no such column yet.
    pub is_new_column: bool,
    /// Cells that changed.
    pub changed: Vec<Change>,
    /// Cases that the golden copy does not know.
    pub new: Vec<Change>,
    golden: PathBuf,
}

impl Golden {
    /// By this line a file is known to be a golden copy.
    const MARK: &'static str = "<!-- lockcore-conformance golden 1 -->";
    /// What stands where a column has no verdict yet.
    const BLANK: &'static str = "–";

    /// Finds the golden copy of the project that runs the suite: the file that `LOCK_GOLDEN` names (`none`: nothing is
    /// compared), or `docs/SEMANTICS.md` in a folder above the working directory or the program.
    pub(crate) fn find() -> Option<Result<Self, String>> {
        if let Some(named) = std::env::var_os("LOCK_GOLDEN").filter(|named| !named.is_empty()) {
            return (named != "none").then(|| Self::read(Path::new(&named)));
        }
        let roads = [std::env::current_dir(), std::env::current_exe()];
        let path = roads.iter().flatten().flat_map(|road| road.ancestors()).find_map(|folder| {
            let path = folder.join("docs").join("SEMANTICS.md");
            // Another project may have a page of this name for its own ends.
            let text = std::fs::read_to_string(&path).ok()?;
            text.lines().any(|line| line == Self::MARK).then_some(path)
        });
        path.map(|path| Self::read(&path))
    }

    /// Reads a golden copy.
    ///
    /// # Errors
    /// The file is missing, or a line of a table cannot be read; the message says which.
    pub fn read(path: &Path) -> Result<Self, String> {
        let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
        let golden = Self::parse(&text).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(Self { path: path.into(), ..golden })
    }

    /// Reads the text of a golden copy, a page or lines.
    ///
    /// # Errors
    /// The mark is missing, or a line of a table cannot be read.
    pub fn parse(text: &str) -> Result<Self, String> {
        if Self::is_in_lines(text) {
            return Self::parse_lines(text);
        }
        let mut golden = Self::default();
        let (mut topic, mut header, mut marked) = (None, Vec::new(), false);
        for (number, line) in text.lines().enumerate() {
            let number = number + 1;
            marked |= line == Self::MARK;
            if let Some(title) = line.strip_prefix("### ") {
                (topic, header) = (Some(title.trim().to_owned()), Vec::new());
                continue;
            }
            let Some(topic) = topic.as_ref().filter(|_| line.starts_with('|')) else { continue };
            let cells: Vec<&str> = line.trim().trim_matches('|').split('|').map(str::trim).collect();
            if header.is_empty() {
                header = cells[1..].iter().map(|cell| apart(cell)).collect();
                for column in header.iter().flatten() {
                    if !golden.columns.contains(column) {
                        golden.columns.push(column.clone());
                    }
                }
            } else if !cells[0].starts_with("---") {
                if cells.len() != header.len() + 1 {
                    return Err(format!(
                        "line {number}: {} cells, the table has {}",
                        cells.len(),
                        header.len() + 1
                    ));
                }
                let mut entry = Entry {
                    topic: topic.clone(),
                    name: cells[0].trim_matches('`').to_owned(),
                    verdicts: BTreeMap::new(),
                };
                for (columns, cell) in header.iter().zip(&cells[1..]) {
                    if *cell != Self::BLANK {
                        let verdict: Verdict =
                            cell.parse().map_err(|error| format!("line {number}: {error}"))?;
                        entry.verdicts.extend(columns.iter().map(|column| (column.clone(), verdict.clone())));
                    }
                }
                golden.cases.push(entry);
            }
        }
        if marked { Ok(golden) } else { Err(format!("the line {:?} is missing", Self::MARK)) }
    }

    /// Lists the cells: column, topic, case, verdict.
    pub(super) fn cells(&self) -> impl Iterator<Item = (&str, &str, &str, &Verdict)> {
        self.cases.iter().flat_map(|entry| {
            entry.verdicts.iter().map(|(column, verdict)| (&**column, &*entry.topic, &*entry.name, verdict))
        })
    }

    pub(super) fn set(&mut self, column: &str, topic: &str, name: &str, verdict: Verdict) {
        if !self.columns.iter().any(|known| known == column) {
            self.columns.push(column.to_owned());
        }
        let known = self.cases.iter().position(|entry| entry.topic == topic && entry.name == name);
        let at = known.unwrap_or_else(|| {
            self.cases.push(Entry { topic: topic.into(), name: name.into(), verdicts: BTreeMap::new() });
            self.cases.len() - 1
        });
        self.cases[at].verdicts.insert(column.to_owned(), verdict);
    }

    pub(super) fn retain(&mut self, keeps: impl Fn(&str, &str) -> bool) {
        self.cases.retain(|entry| keeps(&entry.topic, &entry.name));
    }

    /// Returns the columns, in their order.
    pub fn columns(&self) -> &[String] {
        &self.columns
    }

    /// Returns the profiles of which no lane ran: they are *not run*, which is never a pass.
    pub fn not_run<'a>(&'a self, lanes: &[Lane]) -> Vec<&'a str> {
        let mut profiles: Vec<&str> = self.columns.iter().map(|column| profile(column)).collect();
        profiles.dedup();
        profiles.retain(|profile| lanes.iter().all(|lane| lane.profile != *profile));
        profiles
    }

    /// Says how a lane differs.
    pub fn compare(&self, lane: &Lane) -> Difference {
        let mut difference = Difference {
            column: lane.column.clone(),
            is_new_column: !self.columns.contains(&lane.column),
            golden: self.path.clone(),
            ..Difference::default()
        };
        if difference.is_new_column {
            return difference;
        }
        for run in &lane.cases {
            let was = self.entry(run).and_then(|entry| entry.verdicts.get(&lane.column)).cloned();
            if was.as_ref() == Some(&run.verdict) {
                continue;
            }
            let change = Change {
                case: format!("{}::{}", run.topic, run.name),
                is: Some(run.verdict.clone()),
                // A failure has been told at length.
                reason: run.reason.clone().filter(|_| run.verdict != Verdict::Fails),
                was,
            };
            let list = if change.was.is_none() { &mut difference.new } else { &mut difference.changed };
            list.push(change);
        }
        for entry in &self.cases {
            let Some(was) = entry.verdicts.get(&lane.column) else { continue };
            if !lane.cases.iter().any(|run| run.topic == entry.topic && run.name == entry.name) {
                let case = format!("{}::{}", entry.topic, entry.name);
                difference.changed.push(Change { case, was: Some(was.clone()), is: None, reason: None });
            }
        }
        difference
    }

    fn entry(&self, run: &CaseRun) -> Option<&Entry> {
        self.cases.iter().find(|entry| entry.topic == run.topic && entry.name == run.name)
    }

    /// Takes over the verdicts of lanes: their columns are replaced, others stay, and cases that no column has any more go.
    ///
    /// # Errors
    /// A case fails: that is nothing to agree to.
    pub fn update(&mut self, lanes: &[Lane]) -> Result<(), String> {
        let mut failing = lanes.iter().flat_map(|lane| {
            let failing = lane.cases.iter().filter(|run| run.verdict == Verdict::Fails);
            failing.map(|run| format!("{}::{}::{}", lane.profile, run.topic, run.name))
        });
        if let Some(case) = failing.next() {
            return Err(format!("{case} fails, and a failure cannot become the golden copy"));
        }
        for lane in lanes {
            if !self.columns.contains(&lane.column) {
                // Versions of one profile stand side by side.
                let after = self.columns.iter().rposition(|known| profile(known) == lane.profile);
                self.columns.insert(after.map_or(self.columns.len(), |at| at + 1), lane.column.clone());
            }
            for entry in &mut self.cases {
                entry.verdicts.remove(&lane.column);
            }
        }
        // The order is that of the catalogue; what no lane has keeps its place at the end of its topic.
        let mut cases: Vec<Entry> = Vec::new();
        for run in lanes.iter().flat_map(|lane| &lane.cases) {
            if !cases.iter().any(|entry| entry.topic == run.topic && entry.name == run.name) {
                let known = self.entry(run).map(|entry| entry.verdicts.clone());
                cases.push(Entry {
                    topic: run.topic.clone(),
                    name: run.name.clone(),
                    verdicts: known.unwrap_or_default(),
                });
            }
        }
        for entry in &self.cases {
            if !entry.verdicts.is_empty()
                && !cases.iter().any(|e| e.topic == entry.topic && e.name == entry.name)
            {
                let at = cases.iter().rposition(|known| known.topic == entry.topic);
                cases.insert(at.map_or(cases.len(), |at| at + 1), entry.clone());
            }
        }
        for lane in lanes {
            for run in &lane.cases {
                if let Some(entry) = cases.iter_mut().find(|e| e.topic == run.topic && e.name == run.name) {
                    entry.verdicts.insert(lane.column.clone(), run.verdict.clone());
                }
            }
        }
        self.cases = cases;
        Ok(())
    }

    /// Returns the text: a summary by row, which nobody reads back, and a table of cases for each topic.
    pub fn to_text(&self) -> String {
        let mut text =
            format!("# What each store promises, as the suite saw it\n\n{}\n{INTRODUCTION}\n", Self::MARK);
        text += "## In short\n\n";
        let rows: Vec<(String, Vec<String>)> = Row::ALL
            .iter()
            .map(|row| {
                let cells = self.columns.iter().map(|column| self.summary(row, column)).collect();
                (format!("**{}**<br>{}", row.title, row.asks), cells)
            })
            .filter(|(_, cells): &(_, Vec<String>)| cells.iter().any(|cell| cell != Self::BLANK))
            .collect();
        self.table(" ", &rows, &mut text);
        text += "\n## Case by case\n";
        for topic in self.cases.chunk_by(|a, b| a.topic == b.topic) {
            let _ = write!(text, "\n### {}\n\n", topic[0].topic);
            let cell = |entry: &Entry, column| {
                entry.verdicts.get(column).map_or(Self::BLANK.into(), ToString::to_string)
            };
            let row = |entry: &Entry| {
                let cells = self.columns.iter().map(|column| cell(entry, column)).collect();
                (format!("`{}`", entry.name), cells)
            };
            let rows: Vec<(String, Vec<String>)> = topic.iter().map(row).collect();
            self.table(" case ", &rows, &mut text);
        }
        text
    }

    /// Writes a table. Versions of a server that agree in all its rows share a column, so that those which differ stand out.
    fn table(&self, corner: &str, rows: &[(String, Vec<String>)], text: &mut String) {
        let mut together: Vec<Vec<usize>> = Vec::new();
        for (at, column) in self.columns.iter().enumerate() {
            let same = |other: &Vec<usize>| {
                profile(&self.columns[other[0]]) == profile(column)
                    && rows.iter().all(|(_, cells)| cells[other[0]] == cells[at])
            };
            match together.iter().position(same) {
                Some(known) => together[known].push(at),
                None => together.push(vec![at]),
            }
        }
        let heads: Vec<String> = together
            .iter()
            .map(|columns| {
                let versions = columns[1..].iter().map(|at| version(&self.columns[*at]));
                std::iter::once(&*self.columns[columns[0]]).chain(versions).collect::<Vec<_>>().join(", ")
            })
            .collect();
        let rule = "|---".repeat(heads.len() + 1);
        let _ = writeln!(text, "|{corner}| {} |\n{rule}|", heads.join(" | "));
        for (head, cells) in rows {
            let cells: Vec<&str> = together.iter().map(|columns| &*cells[columns[0]]).collect();
            let _ = writeln!(text, "| {head} | {} |", cells.join(" | "));
        }
    }

    fn summary(&self, row: &Row, column: &str) -> String {
        let verdicts = self.cases.iter().filter(|entry| row.has(&entry.name));
        let verdicts = verdicts.filter_map(|entry| entry.verdicts.get(column));
        super::comparison::summary(verdicts).map_or(Self::BLANK.into(), |(worst, left)| {
            if left.is_empty() { worst.to_string() } else { format!("{worst}, {}", left.join(", ")) }
        })
    }
}

const INTRODUCTION: &str = "
This is the golden copy: verdicts that were reviewed, by profile and by the server's version. Versions that agree in a whole
table share its column (`etcd/3.4, 3.5`). Each lane of the suite compares its own column and fails where a cell has changed.
`./dev semantics` runs all lanes and writes the same with measured numbers, sentences and timelines to `target/conformance`;
`./dev semantics --update` rewrites this page.

* **holds**: the promise was kept.
* **breaks (S2)**: the case breaks that property on purpose, as this store must let it; the resource stayed right. The
  properties are listed in [conformance/README.md](../conformance/README.md).
* **may break (S2)**: a run may show it or not.
* **unsupported**: the backend refuses what the case asks, by a typed error, and the case checked that.
* **n/a**: the case does not apply to this store, by design.
* **not run**: the case needs something that the lane does not have. It is never a pass.
* **–**: this column is older than the case.
";

/// Returns the columns that a head of a table names: `etcd/3.4, 3.5` are two of one profile.
fn apart(head: &str) -> Vec<String> {
    let mut columns: Vec<String> = Vec::new();
    for part in head.split(", ") {
        let whole = match columns.first() {
            Some(first) if !part.contains('/') => format!("{}/{part}", profile(first)),
            _ => part.to_owned(),
        };
        columns.push(whole);
    }
    columns
}

/// Returns the version of a column, or all of it where there is none.
fn version(column: &str) -> &str {
    column.split_once('/').map_or(column, |(_, version)| version)
}

/// Returns the profile of a column.
fn profile(column: &str) -> &str {
    column.split_once('/').map_or(column, |(profile, _)| profile)
}

impl Difference {
    /// Says whether somebody must look before this may pass.
    pub fn is_change(&self) -> bool {
        !self.changed.is_empty()
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let golden = self.golden.display();
        if self.is_new_column {
            let column = &self.column;
            return write!(
                f,
                "{column}: a new column, not yet in {golden}; ./dev semantics --update adds it"
            );
        }
        if !self.changed.is_empty() {
            writeln!(f, "{}: differs from {golden}", self.column)?;
            for change in &self.changed {
                write!(f, "{change}")?;
            }
            let count = self.changed.len();
            let cells =
                if count == 1 { "1 cell has changed" } else { &format!("{count} cells have changed") };
            writeln!(
                f,
                "{}: {cells}; if that is meant, ./dev semantics --update, and review the file",
                self.column
            )?;
        }
        if !self.new.is_empty() {
            writeln!(f, "{}: new, not yet in {golden}; ./dev semantics --update adds them", self.column)?;
            for change in &self.new {
                write!(f, "{change}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "  {}", self.case)?;
        if let Some(was) = &self.was {
            writeln!(f, "    - {was}")?;
        }
        let is =
            self.is.as_ref().map_or("gone: the suite has no such case any more".into(), ToString::to_string);
        let why = self.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
        writeln!(f, "    + {is}{why}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane(column: &str, verdicts: &[(&str, &str)]) -> Lane {
        let cases: Vec<_> = verdicts
            .iter()
            .map(|(name, verdict)| {
                serde_json::json!({
                    "id": &name[..3], "topic": "pause", "name": name, "rows": ["holder-paused"],
                    "expected": "holds", "verdict": verdict, "seconds": 0.0,
                })
            })
            .collect();
        serde_json::from_value(serde_json::json!({
            "schema": Lane::SCHEMA, "version": 1, "suite": "0.1.0", "profile": profile(column), "column": column,
            "date": "2026-11-30T00:00:00Z", "seed": 1, "seconds": 1.0, "ttl_ms": 600.0,
            "promises": {}, "cases": cases,
        }))
        .unwrap()
    }

    fn golden(lanes: &[Lane]) -> Golden {
        let mut golden = Golden::default();
        golden.update(lanes).unwrap();
        golden
    }

    #[test]
    fn a_golden_copy_is_read_as_it_was_written() {
        let lanes = [
            lane("memory", &[("d01_a", "holds"), ("d02_b", "n/a")]),
            lane("redis/7.0", &[("d01_a", "breaks (S1, S2)"), ("d02_b", "not run")]),
        ];
        let golden = golden(&lanes);
        let text = golden.to_text();
        assert_eq!(Golden::parse(&text).unwrap(), golden, "{text}");
        assert!(text.contains("| `d01_a` | holds | breaks (S1, S2) |"), "{text}");
        assert!(text.contains("| **Holder paused**"), "{text}");
        assert!(lanes.iter().all(|lane| golden.compare(lane).to_string().is_empty()));
    }

    #[test]
    fn versions_that_agree_share_a_column_and_others_stand_out() {
        let at = |column, second| lane(column, &[("d01_a", "holds"), ("d02_b", second)]);
        let lanes = [at("etcd/3.4", "holds"), at("etcd/3.5", "holds"), at("etcd/3.6", "breaks (S2)")];
        let lanes: Vec<_> = lanes.into_iter().chain([at("redis/8.0", "holds")]).collect();
        let golden = golden(&lanes);
        let text = golden.to_text();
        assert!(text.contains("| case | etcd/3.4, 3.5 | etcd/3.6 | redis/8.0 |"), "{text}");
        assert!(text.contains("| `d02_b` | holds | breaks (S2) | holds |"), "{text}");
        let again = Golden::parse(&text).unwrap();
        assert_eq!(again, golden, "{text}");
        assert!(lanes.iter().all(|lane| again.compare(lane).to_string().is_empty()));
        assert!(again.compare(&at("etcd/3.5", "n/a")).is_change());
    }

    #[test]
    fn changed_and_gone_fail_and_new_does_not() {
        let golden =
            golden(&[lane("memory", &[("d01_a", "holds"), ("d02_b", "holds"), ("d03_c", "not run")])]);
        let now = lane("memory", &[("d01_a", "not run"), ("d03_c", "holds"), ("d04_d", "holds")]);
        let difference = golden.compare(&now);
        assert!(difference.is_change());
        let told = difference.to_string();
        assert!(told.contains("  pause::d01_a\n    - holds\n    + not run\n"), "{told}");
        assert!(told.contains("  pause::d02_b\n    - holds\n    + gone"), "{told}");
        assert!(told.contains("  pause::d03_c\n    - not run\n    + holds\n"), "{told}");
        assert!(told.contains("3 cells have changed"), "{told}");
        let new = golden.compare(&lane(
            "memory",
            &[("d01_a", "holds"), ("d02_b", "holds"), ("d03_c", "not run"), ("d04_d", "breaks (S2)")],
        ));
        assert!(!new.is_change());
        assert_eq!(new.new.len(), 1, "{new}");
    }

    #[test]
    fn another_version_is_a_column_to_review() {
        let mut golden =
            golden(&[lane("redis/7.0", &[("d01_a", "holds")]), lane("zk/3.8", &[("d01_a", "holds")])]);
        let newer = lane("redis/8.2", &[("d01_a", "breaks (S2)")]);
        let difference = golden.compare(&newer);
        assert!(difference.is_new_column && !difference.is_change());
        assert_eq!(golden.not_run(std::slice::from_ref(&newer)), ["zk"]);
        golden.update(std::slice::from_ref(&newer)).unwrap();
        assert_eq!(golden.columns(), ["redis/7.0", "redis/8.2", "zk/3.8"]);
        assert!(
            golden.to_text().contains("| `d01_a` | holds | breaks (S2) | holds |"),
            "{}",
            golden.to_text()
        );
    }

    #[test]
    fn an_update_drops_what_no_column_has_and_refuses_failures() {
        let mut golden = golden(&[lane("memory", &[("d01_a", "holds"), ("d02_b", "holds")])]);
        golden.update(&[lane("memory", &[("d02_b", "holds")])]).unwrap();
        assert!(!golden.to_text().contains("d01_a"));
        let refused = golden.update(&[lane("memory", &[("d02_b", "FAILS")])]).unwrap_err();
        assert!(refused.contains("memory::pause::d02_b fails"), "{refused}");
    }

    #[test]
    fn what_is_no_golden_copy_is_refused_with_its_line() {
        assert!(Golden::parse("# Semantics\n").unwrap_err().contains("is missing"));
        let text = golden(&[lane("memory", &[("d01_a", "holds")])]).to_text();
        let wrong = Golden::parse(&text.replace("| `d01_a` | holds |", "| `d01_a` | fine |")).unwrap_err();
        assert!(wrong.starts_with("line ") && wrong.contains("\"fine\" is not a verdict"), "{wrong}");
        let torn = Golden::parse(&text.replace("| `d01_a` | holds |", "| `d01_a` |")).unwrap_err();
        assert!(torn.contains("1 cells, the table has 2"), "{torn}");
    }

    #[test]
    fn the_projects_own_copy_is_as_an_update_would_write_it() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/SEMANTICS.md");
        // A copy of this package alone has none.
        let Ok(text) = std::fs::read_to_string(path) else { return };
        assert_eq!(
            Golden::parse(&text).unwrap().to_text(),
            text,
            "written by hand? ./dev semantics --update"
        );
    }
}
