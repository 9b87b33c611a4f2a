//! The file that tells the command, at any moment, until when the lock is held: written by `run`, read by `check`.
//!
//! A variable could not: the deadline moves with every renewal. The file is replaced as a whole, and whoever reads it
//! compares it with the clock, so it is right also while its writer is stopped.

use std::{
    fs, io,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::Duration,
};

use lockcore::{LockName, LostReason, Stamp, backend::Moment};
use serde::{Deserialize, Serialize};

const SCHEMA: &str = "lockctl/state/1";

/// What stands in the file. Numbers of 64 bits are text, because not every reader of JSON keeps them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Snapshot {
    schema: String,
    name: String,
    stamp: String,
    pid: i32,
    /// The clock below counts from this boot.
    boot_id: String,
    /// The clock below may be shifted in another namespace.
    time_namespace: Option<String>,
    deadline_ns: String,
    stop_ns: String,
    over: Option<String>,
}

/// The writer's side. Removes the file when dropped.
#[derive(Debug)]
pub struct StateFile {
    path: PathBuf,
    snapshot: Snapshot,
}

impl StateFile {
    /// Chooses the file for a grant; writes nothing yet.
    ///
    /// # Errors
    /// The system does not tell which boot this is.
    pub fn new(directory: &Path, name: &LockName, stamp: Stamp) -> io::Result<Self> {
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        let snapshot = Snapshot {
            schema: SCHEMA.into(),
            name: name.as_str().into(),
            stamp: stamp.to_string(),
            pid,
            boot_id: boot_id()?,
            time_namespace: time_namespace(),
            deadline_ns: "0".into(),
            stop_ns: "0".into(),
            over: None,
        };
        Ok(Self { path: directory.join(format!("run-{pid}-{stamp}.json")), snapshot })
    }

    /// Returns where the file is.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Writes the present deadline, and the moment from which on the command is asked to stop.
    ///
    /// # Errors
    /// The file system's. The file is then as it was.
    pub fn write(&mut self, deadline: Moment, stop: Moment) -> io::Result<()> {
        self.snapshot.deadline_ns = deadline.as_nanos().to_string();
        self.snapshot.stop_ns = stop.as_nanos().to_string();
        self.replace()
    }

    /// Writes that the lock is over. Where that fails, the file is removed: `check` then fails, too.
    pub fn end(&mut self, reason: LostReason) {
        self.snapshot.over = Some(reason.to_string());
        if self.replace().is_err() {
            let _ = fs::remove_file(&self.path);
        }
    }

    fn replace(&self) -> io::Result<()> {
        let draft = self.path.with_extension("draft");
        let text = serde_json::to_vec(&self.snapshot)?;
        let write = || {
            let mut options = fs::OpenOptions::new();
            options.write(true).create(true).truncate(true).mode(0o600);
            io::Write::write_all(&mut options.open(&draft)?, &text)?;
            fs::rename(&draft, &self.path)
        };
        write().inspect_err(|_| {
            let _ = fs::remove_file(&draft);
        })
    }
}

impl Drop for StateFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// What a reader learns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reading {
    pub(crate) name: String,
    pub(crate) stamp: String,
    /// Time until the command is asked to stop, if nothing is renewed; zero when the lock is over.
    pub(crate) undisturbed: Duration,
    /// Time until the deadline; zero when the lock is over.
    pub(crate) remaining: Duration,
    /// Why it is over, where that was written down.
    pub(crate) over: Option<String>,
}

/// Reads the file, at a moment of this machine's clock.
///
/// # Errors
/// A sentence: the file is missing, torn, not ours, or from another boot or clock.
pub(crate) fn read(path: &Path, stamp: Option<&str>, now: Moment) -> Result<Reading, String> {
    let shown = path.display();
    let file = fs::OpenOptions::new()
        .read(true)
        .custom_flags(nofollow())
        .open(path)
        .map_err(|error| format!("cannot read LOCK_STATE ({shown}): {error}"))?;
    let owner = file.metadata().map_err(|error| format!("cannot look at {shown}: {error}"))?.uid();
    if owner != rustix::process::geteuid().as_raw() && owner != 0 {
        return Err(format!(
            "{shown} belongs to user {owner}; the file of another user says nothing about this run"
        ));
    }
    let snapshot: Snapshot = serde_json::from_reader(io::BufReader::new(file))
        .map_err(|error| format!("{shown} is torn or not a state file: {error}"))?;
    judge(&snapshot, stamp, now, &boot_id().map_err(|error| error.to_string())?, time_namespace())
        .map_err(|why| format!("{shown} {why}"))
}

fn judge(
    snapshot: &Snapshot,
    stamp: Option<&str>,
    now: Moment,
    boot_id: &str,
    time_namespace: Option<String>,
) -> Result<Reading, String> {
    if snapshot.schema != SCHEMA {
        return Err(format!("has the form {:?}, and this lockctl reads {SCHEMA:?}", snapshot.schema));
    }
    if snapshot.boot_id != boot_id {
        return Err("was written before this machine was started, or on another one".into());
    }
    if snapshot.time_namespace != time_namespace {
        return Err("counts on the clock of another time namespace".into());
    }
    if let Some(stamp) = stamp.filter(|stamp| *stamp != snapshot.stamp) {
        return Err(format!("is about the grant {}, and LOCK_STAMP is {stamp}", snapshot.stamp));
    }
    let moment =
        |text: &str| text.parse().map(Moment::from_nanos).map_err(|_| format!("has the moment {text:?}"));
    let (deadline, stop) = (moment(&snapshot.deadline_ns)?, moment(&snapshot.stop_ns)?);
    let left = |end: Moment| if snapshot.over.is_some() { Duration::ZERO } else { now.until(end) };
    Ok(Reading {
        name: snapshot.name.clone(),
        stamp: snapshot.stamp.clone(),
        undisturbed: left(stop),
        remaining: left(deadline),
        over: snapshot.over.clone(),
    })
}

/// Finds the directory for state files, and makes it where it is ours to make.
///
/// # Errors
/// No candidate can be used; the sentence names the last one.
pub(crate) fn directory(var: impl Fn(&str) -> Option<PathBuf>) -> Result<PathBuf, String> {
    let uid = rustix::process::geteuid().as_raw();
    // systemd may list several, with colons between them.
    let first = |list: PathBuf| {
        let text = list.into_os_string().into_string().ok()?;
        text.split(':').next().filter(|path| path.starts_with('/')).map(PathBuf::from)
    };
    let candidates = [
        var("RUNTIME_DIRECTORY").and_then(first),
        var("XDG_RUNTIME_DIR").filter(|path| path.is_absolute()).map(|path| path.join("lockctl")),
        (uid == 0).then(|| PathBuf::from("/run/lockctl")),
        Some(var("TMPDIR").filter(|path| path.is_absolute()).unwrap_or_else(|| "/tmp".into()))
            .map(|path| path.join(format!("lockctl-{uid}"))),
    ];
    let mut why = String::new();
    for candidate in candidates.into_iter().flatten() {
        match usable(&candidate, uid) {
            Ok(()) => return Ok(candidate),
            Err(error) => why = format!("{}: {error}", candidate.display()),
        }
    }
    Err(format!("no directory for the state file ({why}); set XDG_RUNTIME_DIR or TMPDIR"))
}

/// Makes the directory, or checks that nobody else can write to it.
fn usable(path: &Path, uid: u32) -> io::Result<()> {
    match fs::DirBuilder::new().mode(0o700).create(path) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        Err(error) => return Err(error),
    }
    let found = fs::symlink_metadata(path)?;
    if !found.is_dir() || found.uid() != uid {
        return Err(io::Error::other("not a directory of this user"));
    }
    if found.mode() & 0o022 != 0 {
        return Err(io::Error::other("others can write to it"));
    }
    rustix::fs::access(path, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK)?;
    Ok(())
}

fn nofollow() -> i32 {
    rustix::fs::OFlags::NOFOLLOW.bits() as i32
}

#[cfg(target_os = "linux")]
fn boot_id() -> io::Result<String> {
    Ok(fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

#[cfg(not(target_os = "linux"))]
fn boot_id() -> io::Result<String> {
    // There the clock starts anew with every boot and state files are in a directory that does not outlive it.
    Ok(String::new())
}

/// Names the time namespace; `None` before Linux 5.6, and elsewhere.
fn time_namespace() -> Option<String> {
    fs::read_link("/proc/self/ns/time").ok().map(|link| link.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moment(ms: u64) -> Moment {
        Moment::from_nanos(ms * 1_000_000)
    }

    fn written(directory: &Path) -> StateFile {
        let name = LockName::parse("a/b").unwrap();
        let mut state = StateFile::new(directory, &name, "7.00000000000000aa".parse().unwrap()).unwrap();
        state.write(moment(9000), moment(7000)).unwrap();
        state
    }

    #[test]
    fn what_was_written_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let mut state = written(directory.path());
        let reading = read(state.path(), Some("7.00000000000000aa"), moment(5000)).unwrap();
        assert_eq!(reading.remaining, Duration::from_secs(4));
        assert_eq!(reading.undisturbed, Duration::from_secs(2));
        assert_eq!(reading.name, "a/b");
        state.write(moment(19_000), moment(17_000)).unwrap();
        assert_eq!(read(state.path(), None, moment(5000)).unwrap().remaining, Duration::from_secs(14));
        state.end(LostReason::Broken);
        let reading = read(state.path(), None, moment(5000)).unwrap();
        assert_eq!(reading.remaining, Duration::ZERO);
        assert_eq!(reading.over.as_deref(), Some("an operator broke the lock"));
    }

    #[test]
    fn the_file_is_private_and_goes_with_its_writer() {
        let directory = tempfile::tempdir().unwrap();
        let state = written(directory.path());
        let path = state.path().to_owned();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        drop(state);
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        assert!(read(&path, None, moment(0)).unwrap_err().contains("cannot read LOCK_STATE"));
    }

    #[test]
    fn a_torn_file_is_an_error_and_not_a_lost_lock() {
        let directory = tempfile::tempdir().unwrap();
        let state = written(directory.path());
        let whole = fs::read(state.path()).unwrap();
        for end in 0..whole.len() {
            fs::write(state.path(), &whole[..end]).unwrap();
            let error = read(state.path(), None, moment(5000)).unwrap_err();
            assert!(error.contains("torn"), "cut at {end}: {error}");
        }
    }

    #[test]
    fn a_foreign_file_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let state = written(directory.path());
        let about = |snapshot: &Snapshot, stamp| {
            judge(snapshot, stamp, moment(5000), &boot_id().unwrap(), time_namespace()).unwrap_err()
        };
        assert!(about(&state.snapshot, Some("8.00000000000000aa")).contains("about the grant"));
        let other = Snapshot { boot_id: "x".into(), ..state.snapshot.clone() };
        assert!(about(&other, None).contains("before this machine was started"));
        let other = Snapshot { time_namespace: Some("time:[1]".into()), ..state.snapshot.clone() };
        assert!(about(&other, None).contains("another time namespace"));
        let other = Snapshot { schema: "lockctl/state/9".into(), ..state.snapshot.clone() };
        assert!(about(&other, None).contains("has the form"));
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(state.path(), &link).unwrap();
        assert!(read(&link, None, moment(0)).is_err(), "a symbolic link was followed");
    }

    #[test]
    fn a_directory_that_others_can_write_to_is_not_used() {
        let root = tempfile::tempdir().unwrap();
        let shared = root.path().join("lockctl");
        fs::create_dir(&shared).unwrap();
        fs::set_permissions(&shared, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        let error = usable(&shared, rustix::process::geteuid().as_raw()).unwrap_err();
        assert!(error.to_string().contains("others can write"), "{error}");
        let private = root.path().join("private");
        let chosen = directory(|name| (name == "XDG_RUNTIME_DIR").then(|| private.clone()));
        assert_ne!(chosen.unwrap(), private.join("lockctl"), "a directory was made under a missing one");
        fs::create_dir(&private).unwrap();
        let chosen = directory(|name| (name == "XDG_RUNTIME_DIR").then(|| private.clone()));
        assert_eq!(chosen.unwrap(), private.join("lockctl"));
    }
}
