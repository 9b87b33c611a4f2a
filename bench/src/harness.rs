//! Rounds, medians, the table and the report.

use std::{fs, io, path::Path, time::Duration};

use serde::Serialize;

/// Rounds of everything that is measured; a median of fewer would move with one disturbance.
pub(crate) const ROUNDS: usize = 7;

/// One line of the table.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) ours: f64,
    pub(crate) limit: Option<f64>,
    /// Another lock library at the same work on the same store.
    pub(crate) peer: Option<f64>,
    pub(crate) ratio_to_limit: Option<f64>,
    pub(crate) ratio_to_peer: Option<f64>,
    pub(crate) target: Option<String>,
    pub(crate) kept: Option<bool>,
}

/// What a row has to keep.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    /// Less than this many units.
    Below(f64),
    /// This many units, exactly.
    Exactly(f64),
    /// At least this share of the limit's speed.
    Ratio(f64),
    /// Nothing: it is shown.
    Shown,
}

impl Target {
    fn text(self, unit: &str) -> Option<String> {
        match self {
            Self::Below(bound) => Some(format!("under {bound} {unit}")),
            Self::Exactly(value) => Some(format!("exactly {value}")),
            Self::Ratio(ratio) => Some(format!("at least {ratio:.2}")),
            Self::Shown => None,
        }
    }

    fn kept(self, ours: f64, ratio: Option<f64>) -> Option<bool> {
        match self {
            Self::Below(bound) => Some(ours < bound),
            Self::Exactly(value) => Some(ours == value),
            Self::Ratio(least) => Some(ratio.is_some_and(|ratio| ratio >= least)),
            Self::Shown => None,
        }
    }
}

/// The rows so far, and which are wanted.
#[derive(Debug)]
pub(crate) struct Bench {
    filter: String,
    rows: Vec<Row>,
}

impl Bench {
    pub(crate) fn new(filter: String) -> Self {
        println!("{:<34} {:>12} {:>12} {:>8}  {:<18} target", "row", "ours", "limit", "ratio", "unit");
        Self { filter, rows: Vec::new() }
    }

    /// Says whether a row is wanted.
    pub(crate) fn wants(&self, name: &str) -> bool {
        name.contains(&self.filter)
    }

    /// Adds a row where less is better.
    pub(crate) fn row(
        &mut self,
        name: &'static str,
        unit: &'static str,
        ours: f64,
        limit: Option<f64>,
        target: Target,
    ) {
        if !self.wants(name) {
            return;
        }
        // Speed is the inverse of time: half the limit's speed is 0.5.
        let ratio = limit.filter(|_| ours > 0.0).map(|limit| limit / ours);
        let row = Row {
            name,
            unit,
            ours,
            limit,
            peer: None,
            ratio_to_limit: ratio,
            ratio_to_peer: None,
            target: target.text(unit),
            kept: target.kept(ours, ratio),
        };
        print(&row);
        self.rows.push(row);
    }

    pub(crate) fn into_rows(self) -> Vec<Row> {
        self.rows
    }
}

fn print(row: &Row) {
    let number = |value: Option<f64>| match value {
        Some(value) if value >= 1000.0 => format!("{value:.0}"),
        Some(value) => format!("{value:.2}"),
        None => "-".into(),
    };
    let verdict = match row.kept {
        Some(true) => "ok",
        Some(false) => "MISSED",
        None => "",
    };
    println!(
        "{:<34} {:>12} {:>12} {:>8}  {:<18} {} {verdict}",
        row.name,
        number(Some(row.ours)),
        number(row.limit),
        number(row.ratio_to_limit),
        row.unit,
        row.target.as_deref().unwrap_or("-"),
    );
}

/// Runs ours and the limit in turns and returns both medians. The first round of each warms up and is not counted.
pub(crate) fn alternate(
    rounds: usize,
    mut ours: impl FnMut() -> f64,
    mut limit: impl FnMut() -> f64,
) -> (f64, f64) {
    let (mut our_rounds, mut limit_rounds) = (Vec::new(), Vec::new());
    for round in 0..=rounds {
        // Whoever comes second finds warmer caches, or a busier disk; so the order changes, too.
        let (our, their) = if round % 2 == 0 {
            let our = ours();
            (our, limit())
        } else {
            let their = limit();
            (ours(), their)
        };
        if round > 0 {
            our_rounds.push(our);
            limit_rounds.push(their);
        }
    }
    (median(our_rounds), median(limit_rounds))
}

/// Runs something several times and returns the median.
pub(crate) fn repeated(rounds: usize, mut measure: impl FnMut() -> f64) -> f64 {
    median((0..rounds).map(|_| measure()).collect())
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Microseconds that one of `count` pieces took.
pub(crate) fn micros_each(took: Duration, count: usize) -> f64 {
    took.as_secs_f64() * 1e6 / count as f64
}

/// The processor time that this process has used.
pub(crate) fn processor_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// A runtime of one thread, as most measurements use it.
pub(crate) fn one_thread() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime can be built")
}

/// The whole run.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    schema: &'static str,
    version: &'static str,
    machine: Machine,
    pub(crate) rows: Vec<Row>,
}

/// What the numbers belong to.
#[derive(Debug, Serialize)]
struct Machine {
    processor: String,
    cores: usize,
    memory_mib: Option<u64>,
    system: String,
    optimised: bool,
}

impl Machine {
    fn look() -> Self {
        let field = |file: &str, key: &str| {
            let text = fs::read_to_string(file).unwrap_or_default();
            let line = text.lines().find(|line| line.starts_with(key))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        let system = rustix::system::uname();
        let memory = field("/proc/meminfo", "MemTotal")
            .and_then(|text| text.split_whitespace().next()?.parse::<u64>().ok());
        Self {
            processor: field("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown".into()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_mib: memory.map(|kib| kib / 1024),
            system: format!(
                "{} {} {}",
                system.sysname().to_string_lossy(),
                system.release().to_string_lossy(),
                system.machine().to_string_lossy()
            ),
            optimised: !cfg!(debug_assertions),
        }
    }
}

impl Report {
    pub(crate) fn new(rows: Vec<Row>) -> Self {
        Self {
            schema: "lockcore-bench/1",
            version: env!("CARGO_PKG_VERSION"),
            machine: Machine::look(),
            rows,
        }
    }

    pub(crate) fn missed(&self) -> usize {
        self.rows.iter().filter(|row| row.kept == Some(false)).count()
    }

    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        let text = serde_json::to_string_pretty(self).map_err(io::Error::other)?;
        fs::write(path, text + "\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_is_a_share_of_the_limits_speed() {
        let mut bench = Bench::new(String::new());
        bench.row("a", "us", 10.0, Some(9.0), Target::Ratio(0.9));
        bench.row("b", "us", 10.0, Some(8.9), Target::Ratio(0.9));
        bench.row("c", "us", 5.0, None, Target::Below(5.0));
        bench.row("d", "waiters", 1.0, None, Target::Exactly(1.0));
        bench.row("e", "s", 1.0, None, Target::Shown);
        let rows = bench.into_rows();
        assert_eq!(
            rows.iter().map(|row| row.kept).collect::<Vec<_>>(),
            [Some(true), Some(false), Some(false), Some(true), None]
        );
        assert_eq!(Report::new(rows).missed(), 2);
    }

    #[test]
    fn ours_and_the_limit_take_turns() {
        let order = std::cell::RefCell::new(String::new());
        let note = |c: char| {
            order.borrow_mut().push(c);
            1.0
        };
        alternate(ROUNDS, || note('o'), || note('l'));
        assert_eq!(*order.borrow(), "ollo".repeat(ROUNDS.div_ceil(2)));
    }

    #[test]
    fn a_median_ignores_one_disturbance() {
        assert_eq!(median(vec![1.0, 100.0, 2.0]), 2.0);
    }
}
