//! `conformance report`: puts the results of all lanes side by side.

use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::Args;
use lockcore_conformance::report::{Comparison, Golden, Kills, Lane};

use crate::WRONG_USE;

/// Puts the results of all lanes side by side.
///
/// Reads what the lanes left (`cargo test --test conformance`, for each backend) and writes report.json, junit.xml,
/// SEMANTICS.md and index.html.
///
/// Exit status: 0 all well; 1 a case fails, or differs from the golden copy, or a profile of the golden copy was not run;
/// 125 wrong use.
#[derive(Debug, Args)]
pub(crate) struct Report {
    /// Where the lanes left their results [default: target/conformance/results].
    #[arg(long, value_name = "DIR")]
    results: Option<PathBuf>,
    /// Where the report goes [default: the folder above the results].
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Compares with the verdicts that were reviewed, such as docs/SEMANTICS.md.
    #[arg(long, value_name = "FILE")]
    golden: Option<PathBuf>,
    /// Takes the verdicts of these lanes over into the golden copy instead.
    #[arg(long, requires = "golden")]
    update: bool,
    /// Does not expect this profile of the golden copy to have run here (may be repeated).
    #[arg(long, requires = "golden", value_name = "PROFILE")]
    absent: Vec<String>,
}

impl Report {
    /// Writes, compares, and returns the exit status.
    pub(crate) fn run(self) -> ExitCode {
        match self.write() {
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::from(1),
            Err(message) => {
                // Nobody is left to tell if this fails.
                let _ = writeln!(io::stderr(), "conformance report: {message}");
                WRONG_USE.into()
            }
        }
    }

    fn write(&self) -> Result<bool, String> {
        let results = self.results.clone().unwrap_or_else(|| {
            let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| "target".into(), PathBuf::from);
            target.join("conformance").join("results")
        });
        let lanes = Lane::read_all(&results).map_err(|error| error.to_string())?;
        let out = self.out.clone().unwrap_or_else(|| results.join(".."));
        let kills = Kills::read(&results.join("..")).map_err(|error| error.to_string())?;
        let comparison = Comparison::new(lanes).with_kills(kills);
        fs::create_dir_all(&out).map_err(|error| format!("{}: {error}", out.display()))?;
        let out = out.canonicalize().unwrap_or(out);
        let mut told = io::stdout().lock();
        for (name, text) in [
            ("report.json", comparison.to_json()),
            ("junit.xml", comparison.to_junit()),
            ("SEMANTICS.md", comparison.to_markdown()),
            ("index.html", comparison.to_page(&comparison.timelines(&results))),
        ] {
            let path = out.join(name);
            fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))?;
            let _ = writeln!(told, "wrote {}", path.display());
        }
        for backend in &comparison.backends {
            let _ = writeln!(told, "{}: {}", backend.lane.column, backend.headline);
        }
        let mut well = !comparison.fails();
        if let Some(path) = &self.golden {
            well &= self.compare(path, &comparison, &mut told)?;
        }
        Ok(well)
    }

    /// Compares with the golden copy, or rewrites it; says whether nothing has changed.
    fn compare(&self, path: &Path, comparison: &Comparison, told: &mut impl Write) -> Result<bool, String> {
        let lanes: Vec<Lane> = comparison.backends.iter().map(|backend| backend.lane.clone()).collect();
        if self.update {
            let mut golden = if path.exists() { Golden::read(path)? } else { Golden::default() };
            golden.update(&lanes)?;
            fs::write(path, golden.to_text()).map_err(|error| format!("{}: {error}", path.display()))?;
            let _ = writeln!(told, "wrote {}; review what has changed", path.display());
            return Ok(true);
        }
        let golden = Golden::read(path)?;
        let mut same = true;
        for difference in lanes.iter().map(|lane| golden.compare(lane)) {
            same &= !difference.is_change();
            let _ = write!(told, "{difference}");
            if difference.is_new_column {
                let _ = writeln!(told);
            }
        }
        for profile in golden.not_run(&lanes) {
            if self.absent.iter().any(|absent| absent == profile) {
                let _ =
                    writeln!(told, "{profile}: not run here, as --absent says; its column was not compared");
                continue;
            }
            same = false;
            let _ = writeln!(told, "{profile}: not run: it left no results, and the golden copy has it");
        }
        Ok(same)
    }
}
