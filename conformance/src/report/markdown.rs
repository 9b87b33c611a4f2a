//! `SEMANTICS.md` of a run: the comparison with sentences and measured numbers.

use std::fmt::Write as _;

use super::{Backend, Cell, Comparison, Verdict};

impl Comparison {
    /// Returns the text of `SEMANTICS.md`: the comparison first, then case by case.
    pub fn to_markdown(&self) -> String {
        let mut text = String::from("# What each store promises, as this run saw it\n\n");
        let _ = writeln!(
            text,
            "Written by `{}`. The reviewed verdicts, without numbers, are in `docs/SEMANTICS.md`.\n",
            self.by
        );
        let columns: Vec<&str> = self.backends.iter().map(|backend| backend.lane.column.as_str()).collect();
        let rule = "|---".repeat(columns.len() + 1);
        let _ = writeln!(text, "| | {} |\n{rule}|", columns.join(" | "));
        for (at, row) in self.rows.iter().enumerate() {
            let cells: Vec<String> =
                self.backends.iter().map(|backend| cell(backend, &backend.cells[at])).collect();
            let _ = writeln!(text, "| **{}**<br>{} | {} |", row.title, row.asks, cells.join(" | "));
        }
        text += "\n## In a sentence\n\n";
        for backend in &self.backends {
            let _ = writeln!(text, "* **{}**: {}", backend.lane.column, backend.headline);
        }
        text += "\n## Runs\n\n| | server | began | took | seed | TTL of the cases | verdicts |\n|---|---|---|---|---|---|---|\n";
        for Backend { lane, counts, .. } in &self.backends {
            let counts: Vec<String> = counts.iter().map(|(word, count)| format!("{count} {word}")).collect();
            let _ = writeln!(
                text,
                "| {} | {} | {} | {:.1} s | {} | {}{} | {} |",
                lane.column,
                lane.server.as_deref().unwrap_or("–"),
                lane.date,
                lane.seconds,
                lane.seed,
                super::lane::time(lane.ttl_ms),
                if lane.virtual_time { ", virtual" } else { "" },
                counts.join(", ")
            );
        }
        text += "\n## Case by case\n";
        let mut topic = String::new();
        for (case_topic, name, promise) in self.catalogue() {
            if topic != case_topic {
                topic = case_topic.into();
                let _ = write!(text, "\n### {topic}\n\n| case | {} |\n{rule}|\n", columns.join(" | "));
            }
            let cells: Vec<String> = self.backends.iter().map(|backend| found(backend, name)).collect();
            let _ = writeln!(text, "| `{name}`<br>{} | {} |", plain(promise), cells.join(" | "));
        }
        if let Some(kills) = &self.kills {
            text += &kills.to_markdown().replace("# Mutants", "\n## Mutants");
        }
        text
    }

    /// Lists the cases of all lanes, each once: topic, name, promise.
    pub(crate) fn catalogue(&self) -> Vec<(&str, &str, &str)> {
        let mut cases: Vec<(&str, &str, &str)> = Vec::new();
        for run in self.backends.iter().flat_map(|backend| &backend.lane.cases) {
            if !cases.iter().any(|(topic, name, _)| *topic == run.topic && *name == run.name) {
                // A case that only a later lane knows stands with its topic.
                let at = cases
                    .iter()
                    .rposition(|(topic, ..)| *topic == run.topic)
                    .map_or(cases.len(), |at| at + 1);
                cases.insert(at, (&run.topic, &run.name, &run.promise));
            }
        }
        cases
    }
}

fn cell(backend: &Backend, cell: &Cell) -> String {
    let mut text = format!("**{}**", cell.verdict);
    for besides in &cell.besides {
        let _ = write!(text, ", {besides}");
    }
    let _ = write!(text, "<br>{}", plain(&cell.sentence));
    for measure in &cell.measures {
        let _ = write!(text, "<br>{}{}", plain(&measure.to_string()), virtually(backend));
    }
    text
}

fn found(backend: &Backend, name: &str) -> String {
    let Some(run) = backend.lane.cases.iter().find(|run| run.name == name) else { return "–".into() };
    let mut text = run.verdict.to_string();
    if !run.verdict.ran()
        && let Some(reason) = &run.reason
    {
        let _ = write!(text, ": {}", plain(reason));
    }
    if run.verdict == Verdict::Fails {
        let reason = run.reason.as_deref().unwrap_or_default();
        let _ = write!(text, ": {}", plain(reason.lines().next().unwrap_or_default()));
    }
    for measure in &run.measures {
        let _ = write!(text, "<br>{}{}", plain(&measure.to_string()), virtually(backend));
    }
    text
}

/// Marks numbers that no machine has shown.
fn virtually(backend: &Backend) -> &'static str {
    if backend.lane.virtual_time { ", virtual" } else { "" }
}

/// Makes a text safe inside a cell of a table.
fn plain(text: &str) -> String {
    text.replace('|', "\\|").replace('<', "&lt;").replace('\n', " ")
}
