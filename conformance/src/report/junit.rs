//! `junit.xml`: for programs that show tests and know nothing of locks.

use std::fmt::Write as _;

use super::{Comparison, Verdict};

impl Comparison {
    /// Returns the text of `junit.xml`: a suite for each lane. What was not run is skipped there, with its reason.
    pub fn to_junit(&self) -> String {
        let mut text =
            String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<testsuites name=\"conformance\">\n");
        for backend in &self.backends {
            let lane = &backend.lane;
            let failures = lane.cases.iter().filter(|run| run.verdict == Verdict::Fails).count();
            let skipped = lane.cases.iter().filter(|run| !run.verdict.ran()).count();
            let _ = writeln!(
                text,
                "  <testsuite name=\"{}\" tests=\"{}\" failures=\"{failures}\" errors=\"0\" skipped=\"{skipped}\" \
                 time=\"{:.3}\" timestamp=\"{}\">",
                escape(&lane.column),
                lane.cases.len(),
                lane.seconds,
                escape(lane.date.trim_end_matches('Z'))
            );
            for run in &lane.cases {
                let _ = write!(
                    text,
                    "    <testcase classname=\"{}.{}\" name=\"{}\" time=\"{:.3}\"",
                    escape(&lane.column),
                    escape(&run.topic),
                    escape(&run.name),
                    run.seconds
                );
                let reason = escape(run.reason.as_deref().unwrap_or_default());
                let _ = match &run.verdict {
                    Verdict::Holds => writeln!(text, "/>"),
                    Verdict::Fails => {
                        let first = reason.lines().next().unwrap_or_default();
                        writeln!(
                            text,
                            ">\n      <failure message=\"{first}\">{reason}</failure>\n    </testcase>"
                        )
                    }
                    Verdict::NotRun | Verdict::NotApplicable => {
                        let message = format!("{}: {reason}", run.verdict);
                        writeln!(text, ">\n      <skipped message=\"{message}\"/>\n    </testcase>")
                    }
                    other => {
                        let breaks = run.evidence.breaks.iter().map(|said| format!("\n{}", escape(said)));
                        let said = format!("{}{}", escape(&other.to_string()), breaks.collect::<String>());
                        writeln!(text, ">\n      <system-out>{said}</system-out>\n    </testcase>")
                    }
                };
            }
            text += "  </testsuite>\n";
        }
        text + "</testsuites>\n"
    }
}

/// Makes a text safe in XML, and drops what XML cannot hold.
pub(crate) fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\n' | '\t' => safe.push(c),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => safe.push('\u{fffd}'),
            c => safe.push(c),
        }
    }
    safe
}
