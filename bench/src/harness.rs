//! Rounds, medians, the table and the report.

use std::{
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use serde::Serialize;

/// Rounds of everything that is measured; a median of fewer would move with one disturbance.
pub(crate) const ROUNDS: usize = 7;

/// One line of the table.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) ours: Option<f64>,
    pub(crate) limit: Option<f64>,
    /// Another lock library at the same work on the same store.
    pub(crate) peer: Option<f64>,
    pub(crate) ratio_to_limit: Option<f64>,
    pub(crate) ratio_to_peer: Option<f64>,
    pub(crate) target: Option<String>,
    pub(crate) kept: Option<bool>,
    /// Why it was not measured.
    pub(crate) not_run: Option<String>,
    /// Nobody asked to leave it out.
    #[serde(skip)]
    missing: bool,
}

/// Why the rows of a store are not measured.
#[derive(Debug)]
pub(crate) struct NotRun {
    pub(crate) why: String,
    /// The environment says so, in words.
    pub(crate) asked_for: bool,
}

/// What a row has to keep.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    /// Less than this many units.
    Below(f64),
    /// This many units, exactly.
    Exactly(f64),
    /// At least this share of the limit's speed; of the other lock's, where the row has no limit.
    Ratio(f64),
    /// At most so many times as long as the limit.
    Times(f64),
    /// Nothing: it is shown.
    Shown,
}

impl Target {
    fn text(self, unit: &str) -> Option<String> {
        match self {
            Self::Below(bound) => Some(format!("under {bound} {unit}")),
            Self::Exactly(value) => Some(format!("exactly {value}")),
            Self::Ratio(ratio) => Some(format!("at least {ratio:.2}")),
            Self::Times(times) => Some(format!("at most {times:.2} x the limit")),
            Self::Shown => None,
        }
    }

    fn kept(self, ours: f64, ratio: Option<f64>) -> Option<bool> {
        match self {
            Self::Below(bound) => Some(ours < bound),
            Self::Exactly(value) => Some(ours == value),
            Self::Ratio(least) => Some(ratio.is_some_and(|ratio| ratio >= least)),
            Self::Times(most) => Some(ratio.is_some_and(|ratio| ratio * most >= 1.0)),
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
        println!(
            "{:<38} {:>12} {:>12} {:>12} {:>8}  {:<18} target",
            "row", "ours", "limit", "peer", "ratio", "unit"
        );
        Self { filter, rows: Vec::new() }
    }

    /// Says whether a row is wanted.
    pub(crate) fn wants(&self, name: &str) -> bool {
        name.contains(&self.filter)
    }

    /// Says whether one of these rows is wanted.
    pub(crate) fn wants_any(&self, names: &[&str]) -> bool {
        names.iter().any(|name| self.wants(name))
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
        self.add(name, unit, ours, (limit, None), target);
    }

    /// Adds a row where less is better, beside another lock.
    pub(crate) fn beside(
        &mut self,
        name: &'static str,
        unit: &'static str,
        ours: f64,
        peer: f64,
        target: Target,
    ) {
        self.add(name, unit, ours, (None, Some(peer)), target);
    }

    fn add(
        &mut self,
        name: &'static str,
        unit: &'static str,
        ours: f64,
        (limit, peer): (Option<f64>, Option<f64>),
        target: Target,
    ) {
        if !self.wants(name) {
            return;
        }
        // Speed is the inverse of time: half the limit's speed is 0.5.
        let ratio = |to: Option<f64>| to.filter(|_| ours > 0.0).map(|to| to / ours);
        let row = Row {
            name,
            unit,
            ours: Some(ours),
            limit,
            peer,
            ratio_to_limit: ratio(limit),
            ratio_to_peer: ratio(peer),
            target: target.text(unit),
            kept: target.kept(ours, ratio(limit.or(peer))),
            not_run: None,
            missing: false,
        };
        print(&row);
        self.rows.push(row);
    }

    /// Adds rows that could not be measured, with the reason.
    pub(crate) fn not_run(&mut self, names: &[&'static str], reason: &NotRun) {
        for &name in names {
            if !self.wants(name) {
                continue;
            }
            println!("{name:<38} not run: {}", reason.why);
            self.rows.push(Row {
                name,
                unit: "",
                ours: None,
                limit: None,
                peer: None,
                ratio_to_limit: None,
                ratio_to_peer: None,
                target: None,
                kept: None,
                not_run: Some(reason.why.clone()),
                missing: !reason.asked_for,
            });
        }
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
        "{:<38} {:>12} {:>12} {:>12} {:>8}  {:<18} {} {verdict}",
        row.name,
        number(row.ours),
        number(row.limit),
        number(row.peer),
        number(row.ratio_to_limit.or(row.ratio_to_peer)),
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
    let [ours, limit] = in_turns(rounds, [&mut ours, &mut limit]);
    (ours, limit)
}

/// Runs several in turns and returns their medians. The first round of each warms up and is not counted.
pub(crate) fn in_turns<const N: usize>(rounds: usize, those: [&mut dyn FnMut() -> f64; N]) -> [f64; N] {
    let mut measured: [Vec<f64>; N] = std::array::from_fn(|_| Vec::new());
    for round in 0..=rounds {
        for turn in 0..N {
            // Whoever comes later finds warmer caches, or a busier disk; so the order changes, too.
            let at = if round % 2 == 0 { turn } else { N - 1 - turn };
            let value = those[at]();
            if round > 0 {
                measured[at].push(value);
            }
        }
    }
    measured.map(median)
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

/// Where reports go, and files that must be on a disk.
pub(crate) fn home() -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a member lies in its workspace");
    workspace.join("target/bench")
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
            schema: "lockcore-bench/2",
            version: env!("CARGO_PKG_VERSION"),
            machine: Machine::look(),
            rows,
        }
    }

    pub(crate) fn missed(&self) -> usize {
        self.rows.iter().filter(|row| row.kept == Some(false)).count()
    }

    pub(crate) fn not_run(&self) -> usize {
        self.rows.iter().filter(|row| row.not_run.is_some()).count()
    }

    /// Counts the rows that were not measured although nobody asked to leave them out.
    pub(crate) fn missing(&self) -> usize {
        self.rows.iter().filter(|row| row.missing).count()
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
    fn several_take_turns_and_each_has_its_own_median() {
        let order = std::cell::RefCell::new(String::new());
        let note = |c: char| {
            order.borrow_mut().push(c);
            f64::from(u32::from(c))
        };
        let medians = in_turns(3, [&mut || note('a'), &mut || note('b'), &mut || note('c')]);
        assert_eq!(*order.borrow(), "abccba".repeat(2));
        assert_eq!(medians, [97.0, 98.0, 99.0]);
    }

    #[test]
    fn a_bound_on_time_is_a_multiple_of_the_limit_and_a_peer_stands_in_for_it() {
        let mut bench = Bench::new(String::new());
        bench.row("a", "us", 15.0, Some(10.0), Target::Times(1.5));
        bench.row("b", "us", 15.1, Some(10.0), Target::Times(1.5));
        bench.beside("c", "us", 10.0, 12.0, Target::Ratio(1.2));
        bench.beside("d", "us", 10.0, 11.9, Target::Ratio(1.2));
        let rows = bench.into_rows();
        assert_eq!(
            rows.iter().map(|row| row.kept).collect::<Vec<_>>(),
            [Some(true), Some(false), Some(true), Some(false)]
        );
        assert_eq!((rows[2].ratio_to_limit, rows[2].ratio_to_peer), (None, Some(1.2)));
    }

    #[test]
    fn rows_that_are_not_run_say_why_and_count_unless_they_were_left_out() {
        let mut bench = Bench::new("x/".into());
        let why = |why: &str, asked_for| NotRun { why: why.into(), asked_for };
        bench.not_run(&["x/a", "x/b", "y/a"], &why("no server", false));
        bench.not_run(&["x/c"], &why("LOCK_TEST_SKIP names x", true));
        let report = Report::new(bench.into_rows());
        assert_eq!((report.rows.len(), report.not_run(), report.missing(), report.missed()), (3, 3, 2, 0));
        assert_eq!(report.rows[0].not_run.as_deref(), Some("no server"));
        assert_eq!(report.rows[0].ours, None);
    }

    #[test]
    fn a_median_ignores_one_disturbance() {
        assert_eq!(median(vec![1.0, 100.0, 2.0]), 2.0);
    }
}
