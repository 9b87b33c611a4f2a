//! A wall clock that a test steps under a server, and under nothing else on the machine.

use std::{
    fs::File,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
};

/// The library that stands between a program and its clock; empty where the build made none.
const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/clockshim.so"));

/// The wall clock of the programs that are started under it. It begins with the machine's time, and steps when it is told to.
///
/// It reaches a program that asks its C library for the time, such as Redis and the virtual machine of Java, and none that
/// asks the kernel itself, such as etcd. Clocks that count from boot are the machine's.
#[derive(Debug)]
pub struct WallClock {
    step: File,
    file: PathBuf,
    library: PathBuf,
}

impl WallClock {
    /// Says whether there is one here: on Linux with the GNU C library, on x86-64 and 64-bit ARM.
    pub fn is_offered() -> bool {
        !LIBRARY.is_empty()
    }

    /// Makes one that keeps its two files in a folder; `None` where there is none to be had.
    ///
    /// # Errors
    /// The files cannot be written.
    pub fn inside(folder: &Path) -> std::io::Result<Option<Self>> {
        if !Self::is_offered() {
            return Ok(None);
        }
        let (library, file) = (folder.join("clockshim.so"), folder.join("clock-step"));
        std::fs::write(&library, LIBRARY)?;
        let step = File::create(&file)?;
        step.write_all_at(&[0; 8], 0)?;
        Ok(Some(Self { step, file, library }))
    }

    /// Puts a program under it, before the program starts.
    pub fn put_under(&self, command: &mut Command) {
        command.env("LD_PRELOAD", &self.library).env("LOCK_CLOCK_SHIM_OFFSET", &self.file);
    }

    /// Sets it so many seconds ahead of the machine's, or behind. The programs see it at their next look.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn set_ahead(&self, seconds: i64) -> std::io::Result<()> {
        self.step.write_all_at(&seconds.to_ne_bytes(), 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_under_it_sees_its_steps_and_no_other() {
        let folder = std::env::temp_dir().join(format!("wall-clock-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let clock = WallClock::inside(&folder).unwrap().expect("this machine builds the shim");
        let told = |command: &mut Command| -> i64 {
            let out = command.args(["-u", "+%s"]).output().expect("`date` is everywhere");
            String::from_utf8(out.stdout).unwrap().trim().parse().unwrap()
        };
        for step in [0, 3600, -3600] {
            clock.set_ahead(step).unwrap();
            let before = told(&mut Command::new("date"));
            let mut under = Command::new("date");
            clock.put_under(&mut under);
            let seen = told(&mut under);
            let after = told(&mut Command::new("date"));
            assert!((before + step..=after + step).contains(&seen), "{seen} is not {step} from {before}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
