//! One lane's results: the file that a run leaves behind.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
    time::Duration,
};

use lockcore::backend::{Capabilities, Consistency, FenceSource, WakeUp};
use serde::{Deserialize, Serialize};

use super::Verdict;
use crate::history::Judged;

/// One run of all cases against one profile.
///
/// # Units
/// `seconds` are real seconds, also where the store's time is virtual.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Lane {
    /// [`Lane::SCHEMA`].
    pub schema: String,
    /// The version of this form.
    pub version: u32,
    /// The version of the suite.
    pub suite: String,
    /// A backend in one of its set-ups.
    pub profile: String,
    /// The server's name and version, where the service tells it.
    #[serde(default)]
    pub server: Option<String>,
    /// Profile and the server's major and minor version: the key under which verdicts are compared.
    pub column: String,
    /// When the run began, UTC.
    pub date: String,
    /// The seed of the run: `LOCK_SEED` replays it.
    pub seed: u64,
    /// How long the run took.
    pub seconds: f64,
    /// The TTL of cases that wait for its end.
    pub ttl_ms: f64,
    /// A test owned the time, so measured times are not those of a machine.
    #[serde(default)]
    pub virtual_time: bool,
    /// What the backend promises.
    pub promises: Promises,
    /// What became of each case, in the order of the catalogue.
    pub cases: Vec<CaseRun>,
}

/// What a backend promises: the capabilities that a reader of a comparison needs.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Promises {
    /// Short name of the backend.
    pub backend: String,
    /// Whose agreement stands behind a grant: `process`, `replicated`, `single-server`, `linearizable`.
    pub consistency: String,
    /// How far the fence can be trusted: `volatile`, `clock-bounded`, `durable`.
    pub fence: String,
    /// How waiters wake: `poll`, `push`.
    pub wake_up: String,
    /// Grants in order of arrival.
    pub fair: bool,
    /// What a held lock outlives: `restart`, `failover`, `clock-step`, `pause`.
    pub survives: Vec<String>,
    /// Least TTL.
    pub ttl_least_ms: f64,
    /// Greatest TTL.
    pub ttl_most_ms: f64,
    /// TTLs are rounded up to a multiple of this.
    pub ttl_step_ms: f64,
    /// Honours a fence floor.
    pub fence_floor: bool,
    /// Keeps the lock closed for a while after an unclean end.
    pub lock_delay: bool,
    /// Tells by event that the store ended a lease.
    pub pushes_loss: bool,
}

/// What became of one case.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CaseRun {
    /// Id of the catalogue, such as `c02`.
    pub id: String,
    /// Topic.
    pub topic: String,
    /// Name: the id and a promise.
    pub name: String,
    /// The promise as a sentence.
    #[serde(default)]
    pub promise: String,
    /// Rows of the comparison that this case feeds.
    pub rows: Vec<String>,
    /// What it needs beyond the verbs.
    #[serde(default)]
    pub needs: Vec<String>,
    /// What was expected: `holds`, `breaks (S2)`, `may break (S2)`.
    pub expected: String,
    /// What was found.
    pub verdict: Verdict,
    /// Why it was not run or does not apply, or how it failed.
    #[serde(default)]
    pub reason: Option<String>,
    /// How long it took.
    pub seconds: f64,
    /// Numbers that the case handed in.
    #[serde(default)]
    pub measures: Vec<Measure>,
    /// What stood in its history.
    #[serde(default)]
    pub evidence: Evidence,
    /// The history, if it was kept; relative to this file.
    #[serde(default)]
    pub history: Option<PathBuf>,
}

/// Numbers of one kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Measure {
    /// What was measured.
    pub what: String,
    /// `ms`, `/s` or empty.
    #[serde(default)]
    pub unit: String,
    /// How often.
    pub count: u64,
    /// The least.
    pub least: f64,
    /// The median.
    pub median: f64,
    /// The greatest.
    pub greatest: f64,
}

/// What stood in a history.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Evidence {
    /// With how many seeds the case was played; the other numbers are sums over them.
    pub seeds: u64,
    /// Grants.
    pub grants: u64,
    /// Confirmed renewals.
    pub renewals: u64,
    /// Operations that the resource accepted.
    pub accepted: u64,
    /// Operations that the resource refused as stale.
    pub stale: u64,
    /// Faults.
    pub faults: u64,
    /// Breaks that were expected or allowed, each in one sentence.
    pub breaks: Vec<String>,
}

/// Why results cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The file system said no.
    #[error("{}: {source}", path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// What it said.
        source: io::Error,
    },
    /// The file holds something else.
    #[error("{}: these are not results of a lane: {source}", path.display())]
    Form {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// The file is of a newer form.
    #[error("{}: written in version {version} of the form, this program reads up to {}", path.display(), Lane::VERSION)]
    Version {
        /// Which file.
        path: PathBuf,
        /// Its version.
        version: u32,
    },
    /// The folder holds no results.
    #[error("{}: no results are here; run the lanes first: cargo test --test conformance", path.display())]
    Empty {
        /// Which folder.
        path: PathBuf,
    },
}

impl Lane {
    /// What the file calls itself.
    pub const SCHEMA: &'static str = "lockcore-conformance-results";
    /// The version of the form that this suite writes.
    pub const VERSION: u32 = 1;

    /// Reads one file.
    ///
    /// # Errors
    /// The file is missing, holds something else, or is of a newer form.
    pub fn read(path: &Path) -> Result<Self, ReadError> {
        let text =
            fs::read_to_string(path).map_err(|source| ReadError::File { path: path.into(), source })?;
        let form = |source| ReadError::Form { path: path.into(), source };
        let value: serde_json::Value = serde_json::from_str(&text).map_err(form)?;
        let version = value.get("version").and_then(serde_json::Value::as_u64).unwrap_or_default();
        if version > u64::from(Self::VERSION) {
            let version = u32::try_from(version).unwrap_or(u32::MAX);
            return Err(ReadError::Version { path: path.into(), version });
        }
        serde_json::from_value(value).map_err(form)
    }

    /// Reads all lanes of a folder, sorted by profile; those in virtual time come last.
    ///
    /// # Errors
    /// As [`read`](Self::read); also if there is none.
    pub fn read_all(folder: &Path) -> Result<Vec<Self>, ReadError> {
        let empty = || ReadError::Empty { path: folder.into() };
        let entries = fs::read_dir(folder).map_err(|_| empty())?;
        let mut paths: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
        paths.retain(|path| path.extension().is_some_and(|end| end == "json"));
        paths.sort();
        let mut lanes = paths.iter().map(|path| Self::read(path)).collect::<Result<Vec<_>, _>>()?;
        lanes.sort_by(|a, b| (a.virtual_time, &a.profile).cmp(&(b.virtual_time, &b.profile)));
        if lanes.is_empty() { Err(empty()) } else { Ok(lanes) }
    }

    /// Writes the file of this column into a folder, whole or not at all.
    ///
    /// # Errors
    /// The file system's.
    pub fn write(&self, folder: &Path) -> io::Result<PathBuf> {
        fs::create_dir_all(folder)?;
        let path = Self::path(folder, &self.column);
        let half = path.with_extension("half");
        let mut text = serde_json::to_string_pretty(self)?;
        text.push('\n');
        fs::write(&half, text)?;
        fs::rename(&half, &path)?;
        Ok(path)
    }

    /// Returns where the results of a column are: `redis-single@8.0.json`.
    pub(crate) fn path(folder: &Path, column: &str) -> PathBuf {
        folder.join(format!("{}.json", column.replace('/', "@").replace(['\\', ':'], "-")))
    }
}

/// Names the column of a profile: with the server's major and minor version, if it is known.
pub(crate) fn column(profile: &str, server: Option<&str>) -> String {
    let version = server.and_then(|server| {
        let number =
            server.split_whitespace().rev().find(|word| word.starts_with(|c: char| c.is_ascii_digit()))?;
        let parts: Vec<&str> = number.split('.').take(2).collect();
        Some(parts.join("."))
    });
    version.map_or_else(|| profile.to_owned(), |version| format!("{profile}/{version}"))
}

impl Promises {
    pub(crate) fn of(capabilities: &Capabilities) -> Self {
        let survives = capabilities.survives;
        Self {
            backend: capabilities.backend.into(),
            consistency: match capabilities.consistency {
                Consistency::Process => "process",
                Consistency::Replicated => "replicated",
                Consistency::SingleServer => "single-server",
                Consistency::Linearizable => "linearizable",
                _ => "unknown",
            }
            .into(),
            fence: match capabilities.fence {
                FenceSource::Volatile => "volatile",
                FenceSource::ClockBounded => "clock-bounded",
                FenceSource::Durable => "durable",
                _ => "unknown",
            }
            .into(),
            wake_up: match capabilities.wake_up {
                WakeUp::Poll => "poll",
                WakeUp::Push => "push",
                _ => "unknown",
            }
            .into(),
            fair: capabilities.fair,
            survives: [
                ("restart", survives.restart),
                ("failover", survives.failover),
                ("clock-step", survives.clock_step),
                ("pause", survives.pause),
            ]
            .into_iter()
            .filter(|(_, kept)| *kept)
            .map(|(name, _)| name.to_owned())
            .collect(),
            ttl_least_ms: milliseconds(*capabilities.ttl.start()),
            ttl_most_ms: milliseconds(*capabilities.ttl.end()),
            ttl_step_ms: milliseconds(capabilities.ttl_step),
            fence_floor: capabilities.fence_floor,
            lock_delay: capabilities.lock_delay,
            pushes_loss: capabilities.pushes_loss,
        }
    }
}

impl Evidence {
    pub(crate) fn of(judged: &Judged) -> Self {
        Self {
            seeds: 1,
            grants: judged.grants,
            renewals: judged.renewals,
            accepted: judged.accepted,
            stale: judged.stale,
            faults: judged.faults,
            breaks: Vec::new(),
        }
    }

    /// Adds what stood in the histories of other seeds.
    pub(crate) fn add(&mut self, other: &Self) {
        let Self { seeds, grants, renewals, accepted, stale, faults, breaks } = other;
        self.seeds += seeds;
        self.grants += grants;
        self.renewals += renewals;
        self.accepted += accepted;
        self.stale += stale;
        self.faults += faults;
        // One witness tells the story.
        if !breaks.is_empty() {
            self.breaks.clone_from(breaks);
        }
    }
}

impl Measure {
    /// Sums up what a case handed in.
    pub(crate) fn sum_up(handed_in: &[(&'static str, f64, &'static str)]) -> Vec<Self> {
        let mut kinds: BTreeMap<(&str, &str), Vec<f64>> = BTreeMap::new();
        // A number that JSON cannot hold says nothing.
        for &(what, value, unit) in handed_in.iter().filter(|(_, value, _)| value.is_finite()) {
            kinds.entry((what, unit)).or_default().push(value);
        }
        let sum = |((what, unit), mut values): ((&str, &str), Vec<f64>)| {
            values.sort_by(f64::total_cmp);
            Self {
                what: what.into(),
                unit: unit.into(),
                count: values.len() as u64,
                least: round(values[0]),
                median: round(values[values.len() / 2]),
                greatest: round(values[values.len() - 1]),
            }
        };
        kinds.into_iter().map(sum).collect()
    }
}

impl std::fmt::Display for Measure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let amount = |value: f64| match self.unit.as_str() {
            "ms" => time(value),
            "" => number(value),
            unit => format!("{}{unit}", number(value)),
        };
        write!(f, "{}: {}", self.what, amount(self.median))?;
        if self.count > 1 {
            write!(f, " (median of {}; {} to {})", self.count, amount(self.least), amount(self.greatest))?;
        }
        Ok(())
    }
}

pub(crate) fn milliseconds(time: Duration) -> f64 {
    round(time.as_secs_f64() * 1000.0)
}

/// Keeps what a reader can use: microseconds of milliseconds.
fn round(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// Writes milliseconds as people do.
pub(crate) fn time(ms: f64) -> String {
    match ms {
        _ if ms >= 86_400_000.0 && ms % 86_400_000.0 == 0.0 => format!("{} d", number(ms / 86_400_000.0)),
        _ if ms >= 3_600_000.0 => format!("{} h", number(ms / 3_600_000.0)),
        _ if ms >= 1000.0 => format!("{} s", number(ms / 1000.0)),
        _ => format!("{} ms", number(ms)),
    }
}

/// Three digits are enough.
fn number(value: f64) -> String {
    let places = match value.abs() {
        v if v >= 100.0 => 0,
        v if v >= 10.0 => 1,
        _ => 2,
    };
    let text = format!("{value:.places$}");
    if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.').to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_is_the_profile_and_two_numbers_of_the_version() {
        for (server, expected) in [
            (None, "redis-single"),
            (Some("Redis 7.0.15"), "redis-single/7.0"),
            (Some("SQLite 3.50.2 (bundled)"), "redis-single/3.50"),
            (Some("9"), "redis-single/9"),
            (Some("nightly"), "redis-single"),
        ] {
            assert_eq!(column("redis-single", server), expected);
        }
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!(
            [0.0, 0.312, 3.0, 12.34, 600.0, 1500.0, 86_400_000.0].map(time),
            ["0 ms", "0.31 ms", "3 ms", "12.3 ms", "600 ms", "1.5 s", "1 d"]
        );
        let measures =
            Measure::sum_up(&[("b", 3.0, "ms"), ("a", 9.0, "/s"), ("b", 1.0, "ms"), ("b", f64::NAN, "ms")]);
        let told: Vec<String> = measures.iter().map(ToString::to_string).collect();
        assert_eq!(told, ["a: 9/s", "b: 3 ms (median of 2; 1 ms to 3 ms)"]);
    }
}
