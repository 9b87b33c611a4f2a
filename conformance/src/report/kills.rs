//! The kill matrix: which case caught which backend that was broken on purpose.

use std::{fmt::Write as _, fs, path::Path};

use serde::{Deserialize, Serialize};

use super::{Comparison, ReadError, junit::escape};

/// Backends that are broken on purpose, and the cases that caught them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Kills {
    /// [`Kills::SCHEMA`].
    pub schema: String,
    /// The version of this form.
    pub version: u32,
    /// The version of the suite.
    pub suite: String,
    /// When it was played, UTC.
    pub date: String,
    /// Every mutant was played through every case that its store can play; otherwise only through those that guard what it
    /// breaks.
    #[serde(default = "yes")]
    pub whole: bool,
    /// The cases that were played.
    pub cases: Vec<String>,
    /// One for each mutant.
    pub mutants: Vec<Killed>,
}

/// One mutant.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Killed {
    /// The mistake, named.
    pub mutant: String,
    /// The cases that caught it.
    pub killed_by: Vec<String>,
    /// How many of [`SOAKS`](Kills::SOAKS) seeds of the soak caught it: how much a random search would be worth alone.
    /// `None`: not tried.
    #[serde(default)]
    pub soaks: Option<u32>,
}

/// Those that were written before the field was.
fn yes() -> bool {
    true
}

impl Kills {
    /// What the file calls itself.
    pub const SCHEMA: &'static str = "lockcore-conformance-kills";
    /// The version of the form.
    pub const VERSION: u32 = 1;

    /// With how many seeds the soak is tried on each mutant.
    pub const SOAKS: u32 = 20;

    pub(crate) fn of(whole: bool, cases: Vec<String>, mutants: Vec<Killed>) -> Self {
        Self {
            schema: Self::SCHEMA.into(),
            version: Self::VERSION,
            suite: env!("CARGO_PKG_VERSION").into(),
            date: humantime::format_rfc3339_seconds(std::time::SystemTime::now()).to_string(),
            whole,
            cases,
            mutants,
        }
    }

    /// Reads the matrix that lies in a folder, if one does.
    ///
    /// # Errors
    /// The file holds something else.
    pub fn read(folder: &Path) -> Result<Option<Self>, ReadError> {
        let path = folder.join("kills.json");
        let Ok(text) = fs::read_to_string(&path) else { return Ok(None) };
        serde_json::from_str(&text).map(Some).map_err(|source| ReadError::Form { path, source })
    }

    pub(crate) fn write(&self, folder: &Path) -> std::io::Result<()> {
        fs::create_dir_all(folder)?;
        let text = serde_json::to_string_pretty(self)?;
        fs::write(folder.join("kills.json"), text + "\n")
    }

    /// Counts the mutants that a case caught.
    fn by(&self, case: &str) -> usize {
        self.mutants.iter().filter(|killed| killed.killed_by.iter().any(|name| name == case)).count()
    }

    /// Returns the mutants that a single case caught, and those that none did.
    fn thin(&self) -> Vec<&str> {
        let thin = self.mutants.iter().filter(|killed| killed.killed_by.len() < 2);
        thin.map(|killed| killed.mutant.as_str()).collect()
    }

    /// Returns the cases that caught nothing.
    fn idle(&self) -> Vec<&str> {
        self.cases.iter().map(String::as_str).filter(|case| self.by(case) == 0).collect()
    }

    fn summary(&self) -> String {
        if !self.whole {
            return format!(
                "{} backends that are broken on purpose ({}), each played through the cases that guard the promise it breaks, and \
                 caught in their words. ./dev semantics --kills plays each through every case.",
                self.mutants.len(),
                self.date,
            );
        }
        format!(
            "{} backends that are broken on purpose, played through {} cases ({}). A mistake that a single case catches marks \
             a thin spot ({} here). A case that catches none ({} here) watches over what no backend can break, such as the \
             library's own budget, or guards nothing that was tried.",
            self.mutants.len(),
            self.cases.len(),
            self.date,
            self.thin().len(),
            self.idle().len()
        )
    }

    /// Returns the matrix as text.
    pub fn to_markdown(&self) -> String {
        let mut text = format!("# Mutants, and the cases that kill them\n\n{}\n\n", self.summary());
        let _ = writeln!(
            text,
            "| mutant | kills | killed by | soak, of {} seeds |\n|---|---|---|---|",
            Self::SOAKS
        );
        for killed in &self.mutants {
            let ids: Vec<&str> = killed.killed_by.iter().map(|name| id(name)).collect();
            let soaks = killed.soaks.map_or_else(String::new, |soaks| soaks.to_string());
            let _ = writeln!(text, "| {} | {} | {} | {soaks} |", killed.mutant, ids.len(), ids.join(" "));
        }
        text += "\n| case | kills |\n|---|---|\n";
        for case in &self.cases {
            let _ = writeln!(text, "| `{case}` | {} |", self.by(case));
        }
        text
    }

    /// Writes the section of the page.
    pub(crate) fn section(&self, page: &mut String) {
        let _ = writeln!(
            page,
            "<section id=\"kills\">\n<h2>Who catches a broken backend</h2>\n<p class=\"lead\">{}</p>\n<details>\
             <summary><b>Mistakes, and the cases that caught them</b></summary>\n<div class=\"scroll\" role=\"region\" \
             tabindex=\"0\" aria-label=\"Mistakes and cases\"><table class=\"kills\"><thead><tr><th scope=\"col\">Mistake\
             </th><th scope=\"col\">Caught by</th></tr></thead><tbody>",
            escape(&self.summary())
        );
        for killed in &self.mutants {
            let ids: Vec<String> = killed
                .killed_by
                .iter()
                .map(|name| format!("<abbr title=\"{}\">{}</abbr>", escape(name), escape(id(name))))
                .collect();
            let caught = if ids.is_empty() { "none".into() } else { ids.join(" ") };
            let _ = writeln!(
                page,
                "<tr><th scope=\"row\"><code>{}</code></th><td>{} · {caught}{}</td></tr>",
                escape(&killed.mutant),
                ids.len(),
                killed.soaks.map_or_else(String::new, |soaks| format!(
                    " <span class=\"quiet\">· soak: {soaks} of {} seeds</span>",
                    Self::SOAKS
                ))
            );
        }
        page.push_str("</tbody></table></div></details>\n");
        let idle = self.idle();
        if self.whole && !idle.is_empty() {
            let list: String =
                idle.iter().map(|case| format!("<li><code>{}</code></li>", escape(case))).collect();
            let _ = writeln!(
                page,
                "<details><summary><b>Cases that caught none</b> <span class=\"quiet\">{}</span></summary>\
                 <ul class=\"idle\">{list}</ul></details>",
                idle.len()
            );
        }
        page.push_str("</section>\n");
    }
}

fn id(case: &str) -> &str {
    case.split('_').next().unwrap_or(case)
}

impl Comparison {
    /// Adds the kill matrix.
    #[must_use]
    pub fn with_kills(self, kills: Option<Kills>) -> Self {
        Self { kills, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thin_spots_and_idle_cases_are_told() {
        let cases = ["a01_x", "a02_y", "a03_z"].map(str::to_owned).to_vec();
        let mutants = [
            ("Both", vec!["a01_x".to_owned(), "a02_y".to_owned()], Some(7)),
            ("One", vec!["a01_x".to_owned()], None),
        ];
        let mutants =
            mutants.map(|(mutant, killed_by, soaks)| Killed { mutant: mutant.into(), killed_by, soaks });
        let kills = Kills::of(true, cases, mutants.to_vec());
        assert_eq!((kills.thin(), kills.idle()), (vec!["One"], vec!["a03_z"]));
        let text = kills.to_markdown();
        assert!(text.contains("| Both | 2 | a01 a02 | 7 |") && text.contains("| `a01_x` | 2 |"), "{text}");
        assert!(text.contains("thin spot"), "{text}");

        // What was not played caught nothing for that reason, and is not told to be idle.
        let mapped = Kills { whole: false, ..kills };
        let mut page = String::new();
        mapped.section(&mut page);
        assert!(page.contains("caught in their words") && !page.contains("caught none"), "{page}");
    }
}
