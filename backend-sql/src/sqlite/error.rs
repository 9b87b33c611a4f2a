//! What SQLite says, and what is known then.

use std::sync::Arc;

use lockcore::backend::{Error, ErrorKind};
use rusqlite::ffi;

/// How far a statement had come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Its commit had not begun. What it did is rolled back, and nothing of it is in the log behind a commit mark.
    Work,
    /// Its commit had begun.
    Commit,
}

/// A statement that failed, and how far it had come.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    phase: Phase,
    source: Arc<rusqlite::Error>,
}

impl Failure {
    pub(super) fn work(source: rusqlite::Error) -> Self {
        Self { phase: Phase::Work, source: Arc::new(source) }
    }

    pub(super) fn commit(source: rusqlite::Error) -> Self {
        Self { phase: Phase::Commit, source: Arc::new(source) }
    }

    /// Says whether another process has the file and nothing was done: asking again may succeed.
    pub(super) fn is_busy(&self) -> bool {
        matches!(self.code(), Some(ffi::SQLITE_BUSY | ffi::SQLITE_LOCKED | ffi::SQLITE_PROTOCOL))
            && self.phase == Phase::Work
    }

    /// Says whether there was no room for it. Nothing was done.
    pub(super) fn is_full(&self) -> bool {
        self.code() == Some(ffi::SQLITE_FULL)
    }

    /// Says whether the commit may be in the log although it was not answered.
    pub(super) fn is_in_doubt(&self) -> bool {
        kind(self.phase, self.code()) == ErrorKind::Unknown
    }

    fn code(&self) -> Option<i32> {
        // The low byte is the primary code.
        self.source.sqlite_error().map(|e| e.extended_code & 0xff)
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let code = failure.code();
        let kind = kind(failure.phase, code);
        let message = match (kind, code) {
            (ErrorKind::Unknown, _) => "the commit was not confirmed",
            (_, Some(ffi::SQLITE_BUSY | ffi::SQLITE_LOCKED | ffi::SQLITE_PROTOCOL)) => {
                "another process did not let go of the file in time"
            }
            (_, Some(ffi::SQLITE_FULL)) => "the disk is full",
            (_, Some(ffi::SQLITE_IOERR)) => "the disk cannot be read or written",
            (_, Some(ffi::SQLITE_NOMEM)) => "out of memory",
            (_, Some(ffi::SQLITE_INTERRUPT | ffi::SQLITE_ABORT)) => "the statement was interrupted",
            (_, Some(ffi::SQLITE_READONLY)) => "the file cannot be written",
            (_, Some(ffi::SQLITE_PERM | ffi::SQLITE_AUTH)) => "this user may not use the file",
            (_, Some(ffi::SQLITE_CANTOPEN)) => "the file cannot be opened",
            (_, Some(ffi::SQLITE_CORRUPT)) => {
                "the file is damaged; stop its users, restore or remove it, and read what the log of the disk says"
            }
            (_, Some(ffi::SQLITE_NOTADB)) => "the file is not a SQLite database",
            (_, Some(ffi::SQLITE_CONSTRAINT | ffi::SQLITE_MISMATCH)) => {
                "the fence of this lock has reached its largest value; there is none above it"
            }
            _ => "SQLite refused the statement; the file may not be ours, or is another version's",
        };
        Error::new(kind, message).with_source(failure.source)
    }
}

/// Decides what is known.
///
/// Before the commit, everything is definite: a statement that fails takes back what it did. In the commit two answers
/// are definite. `BUSY`: it did not begin. `FULL`: the frame with the commit mark is written last, and this one or an
/// earlier one did not fit (nothing is padded behind it, because the default `psow` is on). Any other failure may leave
/// a complete commit in the log, which the next recovery of the file would read.
///
/// # Source
/// SQLite 3.4x, `wal.c`: `sqlite3WalFrames`; <https://sqlite.org/rescode.html>.
fn kind(phase: Phase, code: Option<i32>) -> ErrorKind {
    // Not an answer of SQLite but of the client library: a value of a type that the column cannot have.
    let Some(code) = code else {
        return match phase {
            Phase::Work => ErrorKind::Misconfigured,
            Phase::Commit => ErrorKind::Unknown,
        };
    };
    match (code, phase) {
        (ffi::SQLITE_BUSY | ffi::SQLITE_LOCKED | ffi::SQLITE_FULL, _) => ErrorKind::Unavailable,
        (
            ffi::SQLITE_PROTOCOL
            | ffi::SQLITE_IOERR
            | ffi::SQLITE_NOMEM
            | ffi::SQLITE_INTERRUPT
            | ffi::SQLITE_ABORT,
            Phase::Work,
        ) => ErrorKind::Unavailable,
        (ffi::SQLITE_PERM | ffi::SQLITE_AUTH, Phase::Work) => ErrorKind::Unauthorized,
        (
            ffi::SQLITE_READONLY
            | ffi::SQLITE_CANTOPEN
            | ffi::SQLITE_CORRUPT
            | ffi::SQLITE_NOTADB
            | ffi::SQLITE_CONSTRAINT
            | ffi::SQLITE_MISMATCH
            | ffi::SQLITE_ERROR
            | ffi::SQLITE_INTERNAL
            | ffi::SQLITE_NOTFOUND
            | ffi::SQLITE_EMPTY
            | ffi::SQLITE_SCHEMA
            | ffi::SQLITE_TOOBIG
            | ffi::SQLITE_MISUSE
            | ffi::SQLITE_NOLFS
            | ffi::SQLITE_FORMAT
            | ffi::SQLITE_RANGE,
            Phase::Work,
        ) => ErrorKind::Misconfigured,
        // A number that SQLite has not given out yet: before the commit it had no effect, whatever it means.
        (_, Phase::Work) => ErrorKind::Unavailable,
        (
            ffi::SQLITE_PROTOCOL
            | ffi::SQLITE_IOERR
            | ffi::SQLITE_NOMEM
            | ffi::SQLITE_INTERRUPT
            | ffi::SQLITE_ABORT
            | ffi::SQLITE_PERM
            | ffi::SQLITE_AUTH
            | ffi::SQLITE_READONLY
            | ffi::SQLITE_CANTOPEN
            | ffi::SQLITE_CORRUPT
            | ffi::SQLITE_NOTADB
            | ffi::SQLITE_CONSTRAINT
            | ffi::SQLITE_MISMATCH
            | ffi::SQLITE_ERROR
            | ffi::SQLITE_INTERNAL
            | ffi::SQLITE_NOTFOUND
            | ffi::SQLITE_EMPTY
            | ffi::SQLITE_SCHEMA
            | ffi::SQLITE_TOOBIG
            | ffi::SQLITE_MISUSE
            | ffi::SQLITE_NOLFS
            | ffi::SQLITE_FORMAT
            | ffi::SQLITE_RANGE,
            Phase::Commit,
        ) => ErrorKind::Unknown,
        // The same, and nothing is known about it.
        (_, Phase::Commit) => ErrorKind::Unknown,
    }
}
