//! Servers for tests, in three ways: programs of this machine, containers, and servers of somebody else's that the
//! environment names.
//!
//! A test writes down one command, as for a process; whether it runs here or in an image is decided in this file alone.

use std::{
    fs::File,
    net::TcpListener,
    path::Path,
    process::{Child, Command, Stdio},
    sync::{
        LazyLock, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

#[cfg(feature = "containers")]
use crate::containers::{self, Container};

/// A kind of server, before one runs.
#[derive(Clone, Copy, Debug)]
pub struct Program {
    /// The word for the store, in `LOCK_TEST_SKIP` and in what is told.
    pub store: &'static str,
    /// Names the variable with the address of a server that is there already.
    pub url: &'static str,
    /// Says whether this machine has the program.
    pub is_here: fn() -> bool,
    /// The line that installs it.
    pub install: &'static str,
    /// The image to take if `LOCK_TEST_IMAGE` names none.
    pub image: &'static str,
}

/// Where servers come from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Provider {
    /// A program of this machine.
    Process,
    /// A container of this image.
    Container(String),
    /// Servers at this address, over which a test has no power.
    External(String),
}

impl std::fmt::Display for Provider {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Process => f.write_str("programs of this machine"),
            Self::Container(image) => write!(f, "containers of {image}"),
            // An address may hold a password.
            Self::External(_) => f.write_str("the address that the environment names"),
        }
    }
}

impl Program {
    /// Decides where servers come from, and says so once: what `LOCK_TEST_SERVERS` asks for (`process`, `container` or
    /// `external`), or else the first that there is, in the order external, process, container. An image in
    /// `LOCK_TEST_IMAGE` asks for containers.
    ///
    /// # Panics
    /// There is none: the message says how to get one.
    pub fn provider(&self) -> Provider {
        self.decide(variable(self.url))
    }

    /// Decides where the servers come from that a test hurts: they are its own, whatever address the environment names.
    ///
    /// # Panics
    /// There are none, or only somebody else's may be used.
    pub fn own_servers(&self) -> Provider {
        self.decide(None)
    }

    fn decide(&self, url: Option<String>) -> Provider {
        let (forced, named) = (variable("LOCK_TEST_SERVERS"), variable("LOCK_TEST_IMAGE"));
        let image = || has_image(named.as_deref().unwrap_or(self.image));
        let forced = forced.or_else(|| named.as_ref().filter(|_| url.is_none()).map(|_| "container".into()));
        match self.choose(forced.as_deref(), url, self.is_here, image) {
            Ok(provider) => {
                tell(format!("{}: servers are {provider} (LOCK_TEST_SERVERS chooses)", self.store));
                provider
            }
            Err(why) => panic!("{why}"),
        }
    }

    fn choose(
        &self,
        forced: Option<&str>,
        url: Option<String>,
        is_here: impl Fn() -> bool,
        image: impl FnOnce() -> Result<String, String>,
    ) -> Result<Provider, String> {
        let Self { store, url: variable, install, .. } = self;
        let leave_out = format!("or leave its tests out: LOCK_TEST_SKIP={store}");
        match (forced, url) {
            (Some("external"), None) => Err(format!(
                "LOCK_TEST_SERVERS=external, and this needs {store} servers of its own or an address in {variable}"
            )),
            (Some("external") | None, Some(url)) => Ok(Provider::External(url)),
            (Some("process"), _) if is_here() => Ok(Provider::Process),
            (Some("process"), _) => Err(format!("there is no server of {store}; run: {install} ({leave_out})")),
            (Some("container"), _) => image().map(Provider::Container).map_err(|why| format!("{why} ({leave_out})")),
            (Some(other), _) => {
                Err(format!("LOCK_TEST_SERVERS={other}: it is one of process, container and external"))
            }
            (None, None) if is_here() => Ok(Provider::Process),
            (None, None) => image().map(Provider::Container).map_err(|why| {
                format!("there is no server of {store}; run: {install} (or name one in {variable}, {leave_out}); no container stands in: {why}")
            }),
        }
    }

    /// Starts a server that a test may stop and kill. It ends with the test.
    ///
    /// In a container the command is the same, the network is this machine's, and of its files there are those of the
    /// folder, and to read those of the folder for temporary files, in the same places. Where a log is named, a process writes into it what it says.
    ///
    /// # Panics
    /// It cannot be started: the message says what is missing.
    pub fn spawn(&self, command: &Command, folder: &Path, log: Option<&Path>) -> Running {
        match self.own_servers() {
            #[cfg(feature = "containers")]
            Provider::Container(image) => {
                Running(Kind::Container(Container::start(self.store, &image, command, folder)))
            }
            _ => {
                // A process sees every folder of this machine.
                let _ = folder;
                Running(Kind::Process(process(command, log, self.install)))
            }
        }
    }

    /// Runs a command of the store's tools to its end, where servers of a test's own run; says whether it succeeded. In a
    /// container it has the same files as a server.
    ///
    /// # Panics
    /// It cannot be started: the message says what is missing.
    pub fn run(&self, command: &Command, folder: &Path) -> bool {
        // What a tool says matters to nobody: its end tells.
        let mut running = self.spawn(command, folder, Some(&folder.join("tool.log")));
        match &mut running.0 {
            Kind::Process(child) => child.wait().is_ok_and(|status| status.success()),
            #[cfg(feature = "containers")]
            Kind::Container(container) => container.succeeds(),
        }
    }

    /// Returns the image that servers of a test's own run in; none if they are processes.
    pub fn image_in_use(&self) -> Option<String> {
        match self.own_servers() {
            Provider::Container(image) => Some(image),
            _ => None,
        }
    }
}

/// A server that runs, or has run. Its end is this value's.
#[derive(Debug)]
pub struct Running(Kind);

#[derive(Debug)]
enum Kind {
    Process(Child),
    #[cfg(feature = "containers")]
    Container(Container),
}

impl Running {
    /// Says whether it has ended by itself or was killed.
    pub fn has_ended(&mut self) -> bool {
        match &mut self.0 {
            Kind::Process(child) => child.try_wait().map_or(true, |status| status.is_some()),
            #[cfg(feature = "containers")]
            Kind::Container(container) => container.has_ended(),
        }
    }

    /// Kills it, and returns when it is dead.
    pub fn kill(&mut self) {
        match &mut self.0 {
            Kind::Process(child) => {
                let _ = child.kill();
                let _ = child.wait();
            }
            #[cfg(feature = "containers")]
            Kind::Container(container) => container.kill(),
        }
    }

    /// Stops it without its knowing, and returns when it stands still.
    ///
    /// # Panics
    /// The system refuses.
    pub fn stop(&self) {
        match &self.0 {
            Kind::Process(child) => {
                let pid = Pid::from_child(child);
                kill_process(pid, Signal::STOP).expect("a child can be stopped");
                waitpid(Some(pid), WaitOptions::UNTRACED).expect("a child can be waited for");
            }
            #[cfg(feature = "containers")]
            Kind::Container(container) => container.pause(),
        }
    }

    /// Lets it go on.
    ///
    /// # Panics
    /// The system refuses.
    pub fn go_on(&self) {
        match &self.0 {
            Kind::Process(child) => {
                kill_process(Pid::from_child(child), Signal::CONT).expect("a child can go on");
            }
            #[cfg(feature = "containers")]
            Kind::Container(container) => container.unpause(),
        }
    }

    /// Returns what a container said; of a process, this is in the log that it was given.
    pub fn said(&self) -> String {
        match &self.0 {
            Kind::Process(_) => String::new(),
            #[cfg(feature = "containers")]
            Kind::Container(container) => container.said(),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        match &mut self.0 {
            Kind::Process(child) => {
                let _ = child.kill();
                let _ = child.wait();
            }
            // Goes with its own value.
            #[cfg(feature = "containers")]
            Kind::Container(_) => {}
        }
    }
}

/// Starts a process that dies with the thread that started it, should the test be killed.
fn process(command: &Command, log: Option<&Path>, install: &str) -> Child {
    static SETPRIV: LazyLock<bool> = LazyLock::new(|| answers("setpriv", "--version"));
    let mut child = if *SETPRIV {
        let mut child = Command::new("setpriv");
        child.args(["--pdeathsig", "KILL"]).arg(command.get_program());
        child
    } else {
        Command::new(command.get_program())
    };
    child.args(command.get_args()).stdin(Stdio::null()).stdout(Stdio::null());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => child.env(name, value),
            None => child.env_remove(name),
        };
    }
    if let Some(log) = log {
        let file = File::options().create(true).append(true).open(log).expect("the log can be written");
        child.stdout(file.try_clone().expect("a file can be shared")).stderr(file);
    }
    child.spawn().unwrap_or_else(|error| panic!("{:?}: {error}; run: {install}", command.get_program()))
}

/// Returns a port of the loopback for a server of a test's own: nobody listens on it, this process is given it once, and no
/// system gives it to an outgoing connection while the server is dead.
///
/// It is below 22,000, so that 10,000 more, where Redis Cluster has its bus, is such a port as well.
///
/// # Panics
/// All of them are taken.
pub fn free_port() -> u16 {
    const FIRST: u32 = 12_000;
    const COUNT: u32 = 10_000;
    static NEXT: LazyLock<AtomicU32> =
        // Processes that run side by side begin far from each other.
        LazyLock::new(|| AtomicU32::new(std::process::id().wrapping_mul(2_654_435_761) % COUNT));
    for _ in 0..COUNT {
        let port = FIRST + NEXT.fetch_add(1, Ordering::Relaxed) % COUNT;
        let port = u16::try_from(port).expect("22,000 is a port");
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("no port between {FIRST} and {} is free", FIRST + COUNT);
}

/// Says whether a program of this machine starts; it is given one argument, such as `--version`.
pub fn answers(program: &str, argument: &str) -> bool {
    let mut ask = Command::new(program);
    ask.arg(argument).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    ask.status().is_ok_and(|status| status.success())
}

#[cfg(feature = "containers")]
fn has_image(image: &str) -> Result<String, String> {
    containers::has_image(image)
}

#[cfg(not(feature = "containers"))]
fn has_image(_: &str) -> Result<String, String> {
    Err("these tests were built without containers; add: --features lockcore-conformance/containers".into())
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Says each line once, past the capture of the test harness, which shows nothing of a test that did not fail.
fn tell(line: String) {
    static TOLD: Mutex<Vec<String>> = Mutex::new(Vec::new());
    let mut told = TOLD.lock().unwrap_or_else(PoisonError::into_inner);
    if !told.contains(&line) {
        let _ = std::io::Write::write_all(&mut std::io::stderr(), format!("{line}\n").as_bytes());
        told.push(line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const REDIS: Program = Program {
        store: "redis",
        url: "LOCK_TEST_REDIS_URL",
        is_here: || true,
        install: "sudo apt-get install redis-server",
        image: "lockcore/redis:8.0",
    };

    fn choose(forced: Option<&str>, url: Option<&str>, here: bool, image: bool) -> Result<Provider, String> {
        let found = || if image { Ok("i:1".to_owned()) } else { Err("Docker does not answer".to_owned()) };
        REDIS.choose(forced, url.map(str::to_owned), || here, found)
    }

    #[test]
    fn without_a_word_the_first_that_there_is_is_taken() {
        assert_eq!(choose(None, Some("u"), true, true), Ok(Provider::External("u".into())));
        assert_eq!(choose(None, None, true, true), Ok(Provider::Process));
        assert_eq!(choose(None, None, false, true), Ok(Provider::Container("i:1".into())));
    }

    #[test]
    fn a_word_is_obeyed_or_refused_and_never_replaced() {
        assert_eq!(choose(Some("container"), Some("u"), true, true), Ok(Provider::Container("i:1".into())));
        assert_eq!(choose(Some("process"), Some("u"), true, true), Ok(Provider::Process));
        for (forced, why) in [
            ("container", "Docker does not answer"),
            ("process", "sudo apt-get install redis-server"),
            ("external", "LOCK_TEST_REDIS_URL"),
            ("contaner", "one of process, container and external"),
        ] {
            let refused = choose(Some(forced), None, false, false).unwrap_err();
            assert!(refused.contains(why), "{refused}");
        }
    }

    #[test]
    fn a_port_is_given_once_and_only_if_nobody_listens_there() {
        let taken = TcpListener::bind(("127.0.0.1", free_port())).unwrap();
        let ports: std::collections::BTreeSet<u16> = (0..100).map(|_| free_port()).collect();
        assert_eq!(ports.len(), 100);
        assert!(!ports.contains(&taken.local_addr().unwrap().port()));
        assert!(ports.iter().all(|port| (12_000..22_000).contains(port)));
    }

    #[test]
    fn where_there_is_none_every_way_out_is_named() {
        let refused = choose(None, None, false, false).unwrap_err();
        for part in
            ["apt-get install", "LOCK_TEST_REDIS_URL", "LOCK_TEST_SKIP=redis", "Docker does not answer"]
        {
            assert!(refused.contains(part), "{refused}");
        }
    }
}
