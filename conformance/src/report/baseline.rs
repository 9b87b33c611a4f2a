//! The short form of a golden copy: one line a cell, for stores that a page of their own would be too much for.
//!
//! `redis/7.0 · expiry · c02_never_early = holds`. Lines are sorted, so that a change is one line of a diff.

use std::fmt::Write as _;

use super::{Golden, Lane};

const MARK: &str = "# lockcore-conformance baseline 1";
const DOT: &str = " · ";

impl Golden {
    /// Says whether a text is a golden copy in the short form.
    pub(super) fn is_in_lines(text: &str) -> bool {
        text.lines().next() == Some(MARK)
    }

    /// Returns the text of the short form.
    pub fn to_lines(&self) -> String {
        let mut lines: Vec<String> = self
            .cells()
            .map(|(column, topic, name, verdict)| format!("{column}{DOT}{topic}{DOT}{name} = {verdict}"))
            .collect();
        lines.sort();
        let mut text = format!("{MARK}\n");
        for line in lines {
            let _ = writeln!(text, "{line}");
        }
        text
    }

    pub(super) fn parse_lines(text: &str) -> Result<Self, String> {
        let mut golden = Self::default();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let number = number + 1;
            let no_cell = || {
                format!(
                    "line {number}: {line:?} is no cell, like \"redis/7.0 · expiry · c02_never_early = holds\""
                )
            };
            let (cell, verdict) = line.split_once(" = ").ok_or_else(no_cell)?;
            let parts: Vec<&str> = cell.split(DOT).map(str::trim).collect();
            let [column, topic, name] = parts[..] else { return Err(no_cell()) };
            let verdict = verdict.parse().map_err(|error| format!("line {number}: {error}"))?;
            golden.set(column, topic, name, verdict);
        }
        Ok(golden)
    }

    /// As [`update`](Self::update), and cells of cases that these lanes did not choose stay.
    ///
    /// # Errors
    /// A case fails: that is nothing to agree to.
    pub fn update_chosen(&mut self, lanes: &[Lane]) -> Result<(), String> {
        let before = self.clone();
        self.update(lanes)?;
        for (column, topic, name, verdict) in before.cells() {
            let has_it = |lane: &Lane| {
                lane.column == column && lane.cases.iter().any(|run| run.topic == topic && run.name == name)
            };
            if !lanes.iter().any(has_it) {
                self.set(column, topic, name, verdict.clone());
            }
        }
        Ok(())
    }

    /// Leaves out the cases that none of these lanes has, because it did not choose them.
    pub fn keep_cases_of(&mut self, lanes: &[Lane]) {
        self.retain(|topic, name| {
            lanes.iter().flat_map(|lane| &lane.cases).any(|run| run.topic == topic && run.name == name)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_they_were_written_and_a_wrong_one_is_named() {
        let text = format!(
            "{MARK}\nredis/7.0 · expiry · c02_a = holds\nredis/7.0 · pause · d01_b = breaks (S2)\nsqlite · pause · d01_b = n/a\n"
        );
        let golden = Golden::parse(&text).unwrap();
        assert_eq!(golden.to_lines(), text);
        assert_eq!(golden.columns(), ["redis/7.0", "sqlite"]);
        for (wrong, says) in [("redis · a", "line 2"), ("redis · a · b = fine", "\"fine\" is not a verdict")]
        {
            let error = Golden::parse(&format!("{MARK}\n{wrong}\n")).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }
}
