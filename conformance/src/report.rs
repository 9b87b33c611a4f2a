//! Results: what each lane found, side by side, for people and for programs.
//!
//! A *lane* is one run of all cases against one profile. It leaves a [`Lane`] in `target/conformance/results`, unless the
//! command line chose among the cases. A [`Comparison`] puts lanes side by side: `report.json`, `junit.xml`,
//! `SEMANTICS.md` and `index.html`. The [`Golden`] copy holds the verdicts that were reviewed; a lane whose verdicts
//! differ from it fails.

mod baseline;
mod comparison;
mod golden;
mod junit;
mod kills;
mod lane;
mod log;
mod markdown;
mod page;
mod promise;
mod rows;
mod verdict;

pub use comparison::{Backend, Cell, Comparison, Timeline};
pub use golden::{Change, Difference, Golden};
pub use kills::{Killed, Kills};
pub use lane::{CaseRun, Evidence, Lane, Measure, Promises, ReadError};
pub(crate) use log::{About, Log, Seen};
pub use rows::Row;
pub use verdict::Verdict;

/// Returns `target/conformance`: cargo runs a test in its package's folder and puts it into `target/*/deps`.
pub(crate) fn folder() -> std::path::PathBuf {
    let program = std::env::current_exe().unwrap_or_default();
    let target = program.ancestors().skip_while(|folder| !folder.ends_with("deps")).nth(2);
    target.map_or_else(|| "target".into(), std::path::Path::to_path_buf).join("conformance")
}
