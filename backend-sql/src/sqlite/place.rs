//! Which machine is this, and may its locks lie in that file?
//!
//! The file excludes whoever shares this kernel: leases end by its clock, and "another boot id" means "its machine was
//! started anew, so the holder is gone". On a file system that another kernel has mounted as well, that sentence would
//! take a live lease away.

use std::{fs, io, path::Path};

use lockcore::backend::{BootClock, Error, ErrorKind, Result};

use super::config::SqliteConfig;

/// What is asked of the machine. Tests answer for it.
#[derive(Clone, Debug)]
pub(super) struct Host {
    /// Stands in for the machine's boot id.
    pub(super) boot: Option<String>,
    /// Stands in for the process's time namespace.
    pub(super) time_namespace: Option<i64>,
    /// Returns the kind of file system that a path lies on.
    pub(super) file_system: fn(&Path) -> io::Result<FileSystem>,
    /// Bounds the file, in pages: a disk that is full.
    pub(super) max_pages: Option<i64>,
}

impl Default for Host {
    fn default() -> Self {
        Self { boot: None, time_namespace: None, file_system, max_pages: None }
    }
}

impl Host {
    /// Finds out on which clock the leases of this process end.
    ///
    /// # Errors
    /// `Misconfigured`: the system does not tell its boot id.
    pub(super) fn clock(&self) -> Result<ClockId> {
        let boot = match &self.boot {
            Some(boot) => boot.clone(),
            None => boot_id().map_err(|source| {
                Error::new(
                    ErrorKind::Misconfigured,
                    "the system does not tell its boot id, without which a lease from before a reboot would look alive",
                )
                .with_source(source)
            })?,
        };
        Ok(ClockId { boot, time_namespace: self.time_namespace.unwrap_or_else(time_namespace) })
    }
}

/// Names the clock that a moment was read on: moments of different clocks do not compare.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ClockId {
    /// This start of this machine.
    pub(super) boot: String,
    /// The inode of the time namespace, which shifts `CLOCK_BOOTTIME`; zero where there is none.
    pub(super) time_namespace: i64,
}

/// Reads the clock by which leases end, in nanoseconds since boot.
pub(super) fn now() -> i64 {
    // 63 bits of nanoseconds are 292 years of uptime.
    BootClock::read().as_nanos() as i64
}

/// Draws a random number: for jitter.
pub(super) fn random() -> u32 {
    // Without random numbers there is no jitter; nothing else depends on them here.
    getrandom::u32().unwrap_or(u32::MAX / 2)
}

#[cfg(target_os = "linux")]
fn boot_id() -> io::Result<String> {
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    match text.trim() {
        "" => Err(io::Error::other("the boot id is empty")),
        id => Ok(id.to_owned()),
    }
}

#[cfg(not(target_os = "linux"))]
fn boot_id() -> io::Result<String> {
    let answer =
        std::process::Command::new("/usr/sbin/sysctl").args(["-n", "kern.bootsessionuuid"]).output()?;
    match String::from_utf8_lossy(&answer.stdout).trim() {
        "" => Err(io::Error::other("sysctl does not know kern.bootsessionuuid")),
        id => Ok(id.to_owned()),
    }
}

fn time_namespace() -> i64 {
    #[cfg(target_os = "linux")]
    {
        use std::os::unix::fs::MetadataExt;
        // Kernels before 5.6 have no time namespaces.
        fs::metadata("/proc/self/ns/time").map_or(0, |m| m.ino() as i64)
    }
    #[cfg(not(target_os = "linux"))]
    0
}

/// What kind of file system a path lies on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileSystem {
    /// Only this kernel has it mounted.
    Local,
    /// Only this kernel has it, and it is gone with a reboot.
    Memory,
    /// Another kernel may have it mounted, or does.
    Shared(&'static str),
    /// On neither list; the system's number for it.
    Unlisted(u32),
}

#[cfg(target_os = "linux")]
fn file_system(path: &Path) -> io::Result<FileSystem> {
    // The width and sign of the field differ between architectures; the numbers have 32 bits.
    Ok(judge(rustix::fs::statfs(path)?.f_type as u32))
}

#[cfg(target_vendor = "apple")]
fn file_system(path: &Path) -> io::Result<FileSystem> {
    const MNT_LOCAL: u32 = 0x1000;
    let flags = rustix::fs::statfs(path)?.f_flags as u32;
    Ok(if flags & MNT_LOCAL != 0 { FileSystem::Local } else { FileSystem::Shared("network") })
}

#[cfg(not(any(target_os = "linux", target_vendor = "apple")))]
fn file_system(_path: &Path) -> io::Result<FileSystem> {
    Ok(FileSystem::Unlisted(0))
}

/// Sorts a file system by its number.
///
/// # Source
/// statfs(2), Linux man-pages 6, linux/magic.h, and the sources of the file systems outside the kernel.
#[cfg_attr(not(target_os = "linux"), allow(dead_code))]
pub(super) fn judge(magic: u32) -> FileSystem {
    use FileSystem::{Local, Memory, Shared, Unlisted};
    match magic {
        0x0000_ef53 => Local,  // ext2, ext3, ext4
        0x5846_5342 => Local,  // XFS
        0x9123_683e => Local,  // Btrfs
        0xf2f5_2010 => Local,  // F2FS
        0x2fc1_2fc1 => Local,  // ZFS
        0xca45_1a4e => Local,  // bcachefs
        0x794c_7630 => Local,  // overlayfs: a container's own layer
        0x0000_f15f => Local,  // eCryptfs
        0x3153_464a => Local,  // JFS
        0x5265_4973 => Local,  // ReiserFS
        0x0000_3434 => Local,  // NILFS
        0x2405_1905 => Local,  // UBIFS
        0x0102_1994 => Memory, // tmpfs
        0x8584_58f6 => Memory, // ramfs
        0x0000_6969 => Shared("NFS"),
        0x0000_517b => Shared("SMB"),
        0xff53_4d42 => Shared("CIFS"),
        0xfe53_4d42 => Shared("SMB 2"),
        0x0102_1997 => Shared("9p"),
        // One number for all of FUSE: sshfs and a virtual machine's virtiofs as well as a local encrypted directory.
        0x6573_5546 => Shared("FUSE or virtiofs"),
        0x786f_4256 => Shared("VirtualBox shared folder"),
        0xbacb_acbc => Shared("VMware shared folder"),
        0x7c7c_6673 => Shared("Parallels shared folder"),
        0x00c3_6400 => Shared("Ceph"),
        0x0bd0_0bd0 => Shared("Lustre"),
        0x4750_4653 => Shared("GPFS"),
        0x1983_0326 => Shared("BeeGFS"),
        0x2003_0528 => Shared("OrangeFS"),
        0xaad7_aaea => Shared("PanFS"),
        0x0116_1970 => Shared("GFS2"),
        0x7461_636f => Shared("OCFS2"),
        0x5346_414f | 0x6b41_4653 => Shared("AFS"),
        0x7375_7245 => Shared("Coda"),
        0x0000_564c => Shared("NCP"),
        magic => Unlisted(magic),
    }
}

/// The file, found and judged.
#[derive(Clone, Debug)]
pub(super) struct Place {
    /// What it lies on.
    pub(super) file_system: FileSystem,
}

/// Looks at the place before anything is opened there, and creates the file with its permissions.
///
/// # Errors
/// `Misconfigured`: it can never work there. `Unauthorized`: this user may not.
pub(super) fn survey(config: &SqliteConfig) -> Result<Place> {
    config.check()?;
    let path = &config.path;
    // A link is followed here, because SQLite follows it, too: what counts is where the file is in the end.
    let (found, file) = match fs::canonicalize(path) {
        Ok(found) => {
            let about = fs::metadata(&found).map_err(|e| refusal(&found, "cannot be looked at", e))?;
            if about.is_dir() {
                return Err(misconfigured(format!(
                    "{path:?} is a directory; the path must name a file in it"
                )));
            }
            if !about.is_file() {
                return Err(misconfigured(format!("{path:?} is not an ordinary file")));
            }
            (found, true)
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => (path.clone(), false),
        Err(e) => return Err(refusal(path, "cannot be reached", e)),
    };
    let Some(directory) = found.parent() else {
        return Err(misconfigured(format!("{path:?} does not name a file")));
    };
    match fs::metadata(directory) {
        Ok(about) if about.is_dir() => {}
        Ok(_) => return Err(misconfigured(format!("{directory:?} is not a directory"))),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            return Err(misconfigured(format!(
                "the directory {directory:?} does not exist; create it, or correct the path"
            )));
        }
        Err(e) => return Err(refusal(directory, "cannot be reached", e)),
    }
    let file_system = (config.host.file_system)(if file { &found } else { directory })
        .map_err(|e| refusal(directory, "does not tell its file system", e))?;
    match file_system {
        FileSystem::Local | FileSystem::Memory => {}
        FileSystem::Shared(kind) => {
            return Err(misconfigured(format!(
                "{path:?} lies on a file system that another machine may have mounted ({kind}); a file of locks \
                 excludes the processes of one machine only: choose a path on a local disk, or a store with a server"
            )));
        }
        FileSystem::Unlisted(_) if config.trust_file_system => {}
        FileSystem::Unlisted(magic) => {
            return Err(misconfigured(format!(
                "{path:?} lies on a file system that is not known to be local (number {magic:#010x}); set \
                 trust_file_system if no other machine has it mounted"
            )));
        }
    }
    writable(directory)?;
    if file {
        writable(&found)?;
    } else {
        create(&found, config.mode)?;
    }
    Ok(Place { file_system })
}

// SQLite makes its side files, the log and the shared memory, with the permissions of the file. The descriptor is closed
// before SQLite opens the file; later it would take along the POSIX locks that the process has on it.
fn create(path: &Path, mode: u32) -> Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    match fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(path) {
        Ok(_) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        Err(e) => Err(refusal(path, "cannot be created", e)),
    }
}

fn writable(path: &Path) -> Result<()> {
    let both = rustix::fs::Access::READ_OK | rustix::fs::Access::WRITE_OK;
    rustix::fs::access(path, both).map_err(|e| refusal(path, "cannot be written", e.into()))
}

fn refusal(path: &Path, what: &str, source: io::Error) -> Error {
    let (kind, why) = match source.kind() {
        io::ErrorKind::PermissionDenied => (ErrorKind::Unauthorized, "this user may not"),
        io::ErrorKind::ReadOnlyFilesystem => {
            (ErrorKind::Misconfigured, "its file system is mounted read-only")
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            (ErrorKind::Unavailable, "its disk is full")
        }
        _ => (ErrorKind::Misconfigured, "the system refuses"),
    };
    Error::new(kind, format!("{path:?} {what}: {why}")).with_source(source)
}

fn misconfigured(message: String) -> Error {
    Error::new(ErrorKind::Misconfigured, message)
}

/// Tells one file from another that took its path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    /// Looks at the path now. Does not open the file: closing it would take along this process's POSIX locks.
    pub(super) fn of(path: &Path) -> io::Result<Self> {
        use std::os::unix::fs::MetadataExt;
        let about = fs::metadata(path)?;
        Ok(Self { device: about.dev(), inode: about.ino() })
    }
}
