//! A directory, a store in it, and the real program with a clean environment.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::{
    env,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process, test_kill_process};

#[cfg(feature = "etcd")]
pub(crate) mod etcd;
pub(crate) mod redis;

/// Where one test plays.
pub(crate) struct Stage {
    directory: tempfile::TempDir,
}

impl Stage {
    pub(crate) fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("runtime")).unwrap();
        Self { directory }
    }

    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn url(&self) -> String {
        format!("sqlite://{}", self.path("locks.db").display())
    }

    /// Starts a program with nothing in its environment but what it needs.
    pub(crate) fn program(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command
            .env_clear()
            .env("PATH", env::var_os("PATH").unwrap_or_default())
            .env("HOME", self.directory.path())
            .env("XDG_RUNTIME_DIR", self.path("runtime"))
            .env("LOCKCTL", env!("CARGO_BIN_EXE_lockctl"))
            .current_dir(self.directory.path())
            .stdin(Stdio::null());
        command
    }

    /// The program without a store.
    pub(crate) fn bare(&self, arguments: &[&str]) -> Command {
        let mut command = self.program(env!("CARGO_BIN_EXE_lockctl"));
        command.args(arguments);
        command
    }

    /// The program on this stage's store.
    pub(crate) fn lockctl(&self, arguments: &[&str]) -> Command {
        let mut command = self.bare(arguments);
        command.env("LOCKCTL_STORE", self.url());
        command
    }

    /// Runs it to its end.
    pub(crate) fn ask(&self, arguments: &[&str]) -> Answer {
        Answer::of(self.lockctl(arguments).output().unwrap())
    }

    /// Runs a script under the lock `a`.
    pub(crate) fn run(&self, options: &[&str], script: &str) -> Actor {
        Actor::of(self.run_command(options, script))
    }

    pub(crate) fn run_command(&self, options: &[&str], script: &str) -> Command {
        let mut arguments = vec!["run"];
        arguments.extend(options);
        arguments.extend(["a", "--", "sh", "-c", script]);
        self.lockctl(&arguments)
    }

    /// Holds the lock `a` until [`go`](Self::go).
    pub(crate) fn hold(&self, options: &[&str]) -> Actor {
        let holder = self.run(options, "echo $$ > holding; while [ ! -e go ]; do sleep 0.01; done");
        self.wait_for("holding");
        holder
    }

    pub(crate) fn go(&self) {
        fs::write(self.path("go"), "").unwrap();
    }

    /// Waits until a file is there and whole.
    pub(crate) fn wait_for(&self, name: &str) -> String {
        until(&format!("the file {name}"), || {
            fs::read_to_string(self.path(name)).ok().filter(|text| text.ends_with('\n'))
        })
    }

    pub(crate) fn pid(&self, name: &str) -> Pid {
        Pid::from_raw(self.wait_for(name).trim().parse().unwrap()).unwrap()
    }

    /// Says whether somebody holds the lock `a`.
    pub(crate) fn is_held(&self) -> bool {
        match self.ask(&["inspect", "--test", "a"]).code {
            0 => true,
            1 => false,
            other => panic!("inspect --test said {other}"),
        }
    }
}

/// A process under way, with its output caught; killed should the test fail.
pub(crate) struct Actor {
    child: Option<Child>,
}

impl Actor {
    pub(crate) fn of(mut command: Command) -> Self {
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        Self { child: Some(child) }
    }

    /// As [`of`](Self::of), with stdout in a file that can be read meanwhile.
    pub(crate) fn quiet(mut command: Command, stdout: fs::File) -> Self {
        let child = command.stdout(stdout).stderr(Stdio::piped()).spawn().unwrap();
        Self { child: Some(child) }
    }

    /// As [`of`](Self::of), on a terminal.
    pub(crate) fn on(mut command: Command, terminal: std::os::fd::OwnedFd) -> Self {
        let child = command.stdout(terminal.try_clone().unwrap()).stderr(terminal).spawn().unwrap();
        Self { child: Some(child) }
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(self.child.as_ref().unwrap())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.as_mut().unwrap().try_wait().unwrap().is_none()
    }

    pub(crate) fn end(mut self) -> Answer {
        until("the end of the program", || self.child.as_mut().unwrap().try_wait().unwrap());
        Answer::of(self.child.take().unwrap().wait_with_output().unwrap())
    }
}

impl Drop for Actor {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What came out.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Answer {
    pub(crate) fn of(output: Output) -> Self {
        Self {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// Checks the code, and that lockctl said this in one line of its own.
    #[track_caller]
    pub(crate) fn says(&self, code: i32, sentence: &str) {
        assert_eq!(self.code, code, "{self:?}");
        assert!(self.stderr.contains(sentence), "{sentence:?} is not in {self:?}");
        // A shell may say a word of its own before.
        assert!(self.stderr.lines().any(|line| line.starts_with("lockctl: ")), "{self:?}");
    }

    /// Checks the code, and that nothing was said.
    #[track_caller]
    pub(crate) fn is_silent(&self, code: i32) {
        assert_eq!((self.code, &*self.stdout, &*self.stderr), (code, "", ""));
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

/// Polls a probe until it answers; the watchdog is generous, because it says nothing about speed.
#[track_caller]
pub(crate) fn until<T>(what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = probe() {
            return found;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(3));
    }
}

pub(crate) fn is_gone(pid: Pid) -> bool {
    // A zombie that its new parent has not collected yet does nothing any more.
    test_kill_process(pid).is_err()
        || fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()))
            .map_or(true, |stat| stat.rsplit_once(')').is_some_and(|(_, rest)| rest.starts_with(" Z")))
}
