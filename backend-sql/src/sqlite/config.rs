//! Where the file is, and how patient its users are.

use std::{ops::RangeInclusive, path::PathBuf, time::Duration};

use lockcore::backend::{Error, ErrorKind, Result};

use super::place::Host;

/// Says where the file is and how patiently it is used.
///
/// # Example
/// ```
/// use std::time::Duration;
/// use lockcore_sql::SqliteConfig;
///
/// let config = SqliteConfig::new("/var/lib/shop/locks.db").with(|c| c.idle = Duration::from_secs(86_400));
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct SqliteConfig {
    /// The file, as an absolute path: a relative one would be another file in another working directory. It is
    /// created when it does not exist; its directory is not. No default.
    pub path: PathBuf,
    /// How long one attempt stands at the file while another process writes, before it queues again behind the other
    /// calls of this backend. A call as a whole is bounded by its own budget. Default 100 ms.
    pub busy: Duration,
    /// How long a waiter sleeps between two looks: random between the bounds, from short to long as the wait goes on,
    /// and never past the end of the holder's lease. Default 5 ms to 50 ms.
    pub poll: RangeInclusive<Duration>,
    /// How long nobody has used a name before its row is collected; its fence lives on in the floor of the file.
    /// Default 7 days.
    pub idle: Duration,
    /// The permissions a new file gets. It holds the secrets of the holders: who can read it can release their locks.
    /// Default `0o600`, the user alone.
    pub mode: u32,
    /// Uses a file system that is on neither of the lists, of local and of shared ones. True promises that no other
    /// machine (or virtual machine) has the same file open. Default false.
    pub trust_file_system: bool,
    pub(super) host: Host,
}

impl SqliteConfig {
    /// Starts from the defaults.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            busy: Duration::from_millis(100),
            poll: Duration::from_millis(5)..=Duration::from_millis(50),
            idle: Duration::from_secs(7 * 86_400),
            mode: 0o600,
            trust_file_system: false,
            host: Host::default(),
        }
    }

    /// Sets fields in one expression.
    #[must_use]
    pub fn with(mut self, set: impl FnOnce(&mut Self)) -> Self {
        set(&mut self);
        self
    }

    /// Pretends that the machine was started anew, under this boot id: for tests of what a reboot does.
    #[doc(hidden)]
    #[must_use]
    pub fn with_boot_id(mut self, boot: impl Into<String>) -> Self {
        self.host.boot = Some(boot.into());
        self
    }

    /// Checks what needs no file system.
    pub(super) fn check(&self) -> Result<()> {
        if !self.path.is_absolute() {
            return Err(misconfigured(format!(
                "the path {:?} is relative and would be another file in another working directory; give it in full, \
                 as in sqlite:///var/lib/shop/locks.db (three slashes)",
                self.path
            )));
        }
        if self.poll.start().is_zero() || self.poll.is_empty() {
            return Err(misconfigured(format!(
                "the bounds of the poll interval are {:?} and {:?}; the first is above zero and not above the second",
                self.poll.start(),
                self.poll.end()
            )));
        }
        Ok(())
    }
}

fn misconfigured(message: String) -> Error {
    Error::new(ErrorKind::Misconfigured, message)
}
