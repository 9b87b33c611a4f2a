//! Servers of the run's own, each on a free port of this machine. They end with their values.

use std::{
    fs::File,
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use tempfile::TempDir;

use crate::harness::NotRun;

/// No server takes as long to come up.
const WATCHDOG: Duration = Duration::from_secs(60);

/// A kind of server, before one runs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Program {
    /// The word for the store in `LOCK_TEST_SKIP`.
    store: &'static str,
    /// Says whether this machine has the program.
    is_here: fn() -> bool,
    /// The line that installs it.
    install: &'static str,
}

pub(crate) const REDIS: Program = Program {
    store: "redis",
    is_here: || answers("redis-server", "--version"),
    install: "sudo apt-get install redis-server",
};

pub(crate) const ETCD: Program = Program {
    store: "etcd",
    is_here: || answers("etcd", "--version"),
    install: "sudo apt-get install etcd-server",
};

pub(crate) const ZOOKEEPER: Program = Program {
    store: "zookeeper",
    is_here: || Path::new("/usr/share/java/zookeeper.jar").exists() && answers("java", "-version"),
    install: "sudo apt-get install zookeeper",
};

/// Says why the rows of a store cannot be measured here; `None`: they can.
pub(crate) fn not_run(program: &Program) -> Option<NotRun> {
    let Program { store, install, .. } = program;
    let skip = std::env::var("LOCK_TEST_SKIP").unwrap_or_default();
    if skip.split(',').any(|left_out| left_out == *store || (left_out == "zk" && *store == "zookeeper")) {
        return Some(NotRun { why: format!("LOCK_TEST_SKIP names {store}"), asked_for: true });
    }
    if (program.is_here)() {
        return None;
    }
    Some(NotRun { why: format!("there is no server of {store}; run: {install}"), asked_for: false })
}

/// One server; its end is this value's.
#[derive(Debug)]
pub(crate) struct Server {
    child: Child,
    pub(crate) port: u16,
    folder: TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Server {
    /// Starts Redis without a disk: what it keeps is not what is measured.
    pub(crate) fn redis() -> Self {
        Self::start(
            &REDIS,
            |port, folder| {
                let mut command = Command::new("redis-server");
                command
                    .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", ""])
                    .args(["--appendonly", "no", "--loglevel", "warning", "--dir"])
                    .arg(folder);
                command
            },
            |port| exchange(port, "PING\r\nQUIT\r\n").is_some_and(|said| said.starts_with("+PONG")),
        )
    }

    /// Starts etcd, alone and without waiting for the disk.
    pub(crate) fn etcd() -> Self {
        Self::start(
            &ETCD,
            |port, folder| {
                let (url, peer) =
                    (format!("http://127.0.0.1:{port}"), format!("http://127.0.0.1:{}", free_port()));
                let mut command = Command::new("etcd");
                command
                    .args(["--name", "m0", "--unsafe-no-fsync", "--log-level", "error"])
                    .args(["--listen-client-urls", &url, "--advertise-client-urls", &url])
                    .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
                    .args(["--initial-cluster", &format!("m0={peer}"), "--data-dir"])
                    .arg(folder.join("data"));
                command
            },
            |port| page(port, "/health").contains("\"true\""),
        )
    }

    /// Starts ZooKeeper, alone and without waiting for the disk.
    pub(crate) fn zookeeper() -> Self {
        Self::start(
            &ZOOKEEPER,
            |port, folder| {
                let lines = format!(
                    "tickTime=2000\ndataDir={}\nclientPort={port}\nclientPortAddress=127.0.0.1\nadmin.enableServer=false\n\
                     4lw.commands.whitelist=*\nforceSync=no\nmaxClientCnxns=0\nmaxSessionTimeout=120000\n",
                    folder.join("data").display()
                );
                let config = folder.join("zoo.cfg");
                std::fs::write(&config, lines).expect("the folder was just made");
                let mut command = Command::new("java");
                command
                    .args(["-Xmx512m", "-Dzookeeper.root.logger=WARN,CONSOLE", "-cp"])
                    .arg("/etc/zookeeper/conf:/usr/share/java/zookeeper.jar")
                    .arg("org.apache.zookeeper.server.quorum.QuorumPeerMain")
                    .arg(config);
                command
            },
            |port| exchange(port, "srvr").is_some_and(|said| said.contains("Mode:")),
        )
    }

    /// Starts a program and waits until it serves.
    fn start(
        program: &Program,
        command: impl Fn(u16, &Path) -> Command,
        serves: impl Fn(u16) -> bool,
    ) -> Self {
        let begun = Instant::now();
        loop {
            let folder = tempfile::tempdir().expect("a folder can be made");
            let port = free_port();
            let command = command(port, folder.path());
            let child = spawn(&command, &folder.path().join("log"))
                .unwrap_or_else(|error| panic!("{error}; run: {}", program.install));
            let mut server = Self { child, port, folder };
            while !server.has_ended() && !serves(port) {
                assert!(begun.elapsed() < WATCHDOG, "{} does not serve: {}", program.store, server.log());
                std::thread::sleep(Duration::from_millis(10));
            }
            // Between the look for a free port and its use somebody else may take it: then it ends at once.
            if !server.has_ended() {
                return server;
            }
            assert!(begun.elapsed() < WATCHDOG, "{} ended: {}", program.store, server.log());
        }
    }

    fn has_ended(&mut self) -> bool {
        self.child.try_wait().map_or(true, |status| status.is_some())
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    pub(crate) fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    pub(crate) fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Returns the sum of what etcd counts under a name, whatever the labels.
    pub(crate) fn etcd_counter(&self, name: &str) -> f64 {
        sum(&page(self.port, "/metrics"), |line| {
            let rest = line.strip_prefix(name)?;
            // A label may have a space in it; a number has none.
            rest.starts_with(['{', ' ']).then(|| rest.rsplit_once(' '))?.map(|(_, number)| number)
        })
    }

    /// Returns what ZooKeeper counts under these names, at one time.
    pub(crate) fn zookeeper_counters<const N: usize>(&self, names: [&str; N]) -> [f64; N] {
        let said = exchange(self.port, "mntr").expect("the server answers");
        names.map(|name| sum(&said, |line| line.strip_prefix(name)?.strip_prefix('\t')))
    }
}

/// Starts a process that dies with the run, should that be killed.
fn spawn(command: &Command, log: &Path) -> std::io::Result<Child> {
    let mut child = if answers("setpriv", "--version") {
        let mut child = Command::new("setpriv");
        child.args(["--pdeathsig", "KILL"]).arg(command.get_program());
        child
    } else {
        Command::new(command.get_program())
    };
    let log = File::create(log)?;
    child.args(command.get_args()).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log).spawn()
}

/// Says whether a program of this machine starts; it is given one argument, such as `--version`.
fn answers(program: &str, argument: &str) -> bool {
    let mut ask = Command::new(program);
    ask.arg(argument).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    ask.status().is_ok_and(|status| status.success())
}

/// Adds up the lines that have a number.
fn sum<'a>(text: &'a str, number: impl Fn(&'a str) -> Option<&'a str>) -> f64 {
    let mut numbers = text.lines().filter_map(|line| number(line)?.trim().parse::<f64>().ok()).peekable();
    assert!(numbers.peek().is_some(), "the server does not count this");
    numbers.sum()
}

fn page(port: u16, path: &str) -> String {
    exchange(port, &format!("GET {path} HTTP/1.0\r\n\r\n")).unwrap_or_default()
}

/// Says something on a connection of its own, and hears the answer to its end.
fn exchange(port: u16, words: &str) -> Option<String> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).ok()?;
    stream.write_all(words.as_bytes()).ok()?;
    let mut said = String::new();
    stream.read_to_string(&mut said).ok()?;
    Some(said)
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    listener.local_addr().expect("it is bound").port()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_with_labels_is_added_up_and_others_are_left_out() {
        let text = "# HELP n counts\nn{a=\"b c\"} 2\nn{a=\"d\"} 3\nn_more 7\n";
        let of = |name: &'static str| {
            sum(text, move |line| {
                let rest = line.strip_prefix(name)?;
                rest.starts_with(['{', ' ']).then(|| rest.rsplit_once(' '))?.map(|(_, number)| number)
            })
        };
        assert_eq!((of("n"), of("n_more")), (5.0, 7.0));
    }
}
