//! A real ZooKeeper for one test, and what tests ask of it beside the backend.

#![allow(dead_code, reason = "no test file uses all of it")]

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use lockcore::backend::*;
use lockcore_zk::{ZkBackend, ZkConfig};
use rustix::process::{Pid, Signal, kill_process};
use zookeeper_client::{Client, Stat};

/// Where Debian's package puts the server; another class path may be named in `LOCK_ZOOKEEPER_CLASSPATH`.
const CLASSES: &str = "/etc/zookeeper/conf:/usr/share/java/zookeeper.jar";
/// Nothing here takes as long, on any machine.
const WATCHDOG: Duration = Duration::from_secs(30);

/// One server; its end is this value's.
pub(crate) struct Server {
    child: Child,
    pub(crate) address: String,
    pub(crate) dir: tempfile::TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Server {
    /// Starts one; `None` if `LOCK_TEST_SKIP` names zookeeper, which the test then says. A missing server is a failure
    /// that names the line that installs it.
    pub(crate) fn start() -> Option<Self> {
        if std::env::var("LOCK_TEST_SKIP").is_ok_and(|list| list.split(',').any(|s| s == "zookeeper")) {
            let test = std::thread::current();
            let line =
                format!("not run: {}: LOCK_TEST_SKIP names zookeeper\n", test.name().unwrap_or("a test"));
            // Past the capture of the test harness, which shows nothing of a test that did not fail.
            std::io::stderr().write_all(line.as_bytes()).unwrap();
            return None;
        }
        assert!(
            Command::new("java")
                .arg("-version")
                .stderr(Stdio::null())
                .status()
                .is_ok_and(|java| java.success())
                && (std::env::var_os("LOCK_ZOOKEEPER_CLASSPATH").is_some()
                    || Path::new("/usr/share/java/zookeeper.jar").exists()),
            "there is no ZooKeeper; run: sudo apt-get install zookeeper (or set LOCK_TEST_SKIP=zookeeper)"
        );
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let dir = tempfile::tempdir().unwrap();
        let config = format!(
            "tickTime=200\ndataDir={}\nclientPort={port}\nclientPortAddress=127.0.0.1\nadmin.enableServer=false\n\
             4lw.commands.whitelist=*\nforceSync=no\npreAllocSize=512\nmaxClientCnxns=0\nmaxSessionTimeout=120000\n",
            dir.path().join("data").display()
        );
        std::fs::write(dir.path().join("zoo.cfg"), config).unwrap();
        let child = spawn(dir.path());
        let mut server = Self { child, address: format!("127.0.0.1:{port}"), dir };
        server.wait();
        Some(server)
    }

    fn wait(&mut self) {
        let begun = Instant::now();
        while !self.says("srvr").is_some_and(|said| said.contains("Mode:")) {
            assert!(self.child.try_wait().unwrap().is_none(), "the server ended: {}", self.log());
            assert!(begun.elapsed() < WATCHDOG, "the server does not answer: {}", self.log());
            // Between two looks at a process that is starting, not a wait for an effect.
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// Asks by a four-letter word.
    pub(crate) fn says(&self, word: &str) -> Option<String> {
        let mut stream = TcpStream::connect(&self.address).ok()?;
        stream.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
        stream.write_all(word.as_bytes()).ok()?;
        let mut said = String::new();
        stream.read_to_string(&mut said).ok()?;
        Some(said)
    }

    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    pub(crate) fn restart(&mut self) {
        self.kill();
        self.child = spawn(self.dir.path());
        self.wait();
    }

    /// Starts again without any data: an ensemble that was set up anew.
    pub(crate) fn forget(&mut self) {
        self.kill();
        std::fs::remove_dir_all(self.dir.path().join("data")).unwrap();
        self.child = spawn(self.dir.path());
        self.wait();
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub(crate) async fn admin(&self) -> Client {
        Client::connect(&self.address).await.unwrap()
    }

    pub(crate) async fn backend(&self) -> Arc<ZkBackend> {
        let backend = Arc::new(ZkBackend::lazy(ZkConfig::new([&self.address])).unwrap());
        eventually("the server serves", async || backend.high_water(&call()).await.is_ok()).await;
        backend
    }

    /// Returns the paths of all places, in every queue.
    pub(crate) async fn places(&self) -> Vec<String> {
        let client = self.admin().await;
        let mut places = Vec::new();
        let locks = "/lockcore/@/locks";
        for queue in client.list_children(locks).await.unwrap_or_default() {
            for place in client.list_children(&format!("{locks}/{queue}")).await.unwrap_or_default() {
                places.push(format!("{locks}/{queue}/{place}"));
            }
        }
        places
    }

    /// Returns the path of the only place whose name contains `part`.
    pub(crate) async fn place_of(&self, part: &str) -> (String, Stat) {
        let places = self.places().await;
        let mut of = places.into_iter().filter(|path| path.contains(part));
        let path = of.next().expect("the place exists");
        assert!(of.next().is_none(), "one place only");
        let stat = self.admin().await.check_stat(&path).await.unwrap().expect("the place stands");
        (path, stat)
    }
}

fn spawn(dir: &Path) -> Child {
    let classes = std::env::var("LOCK_ZOOKEEPER_CLASSPATH").unwrap_or_else(|_| CLASSES.into());
    let log = std::fs::File::create(dir.join("log")).unwrap();
    // `setpriv` lets the server die with the thread that started it, should the test be killed.
    Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "java", "-Xmx96m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"])
        .args(["-Xshare:auto", "-Dzookeeper.root.logger=WARN,CONSOLE", "-cp", &classes])
        .arg("org.apache.zookeeper.server.quorum.QuorumPeerMain")
        .arg(dir.join("zoo.cfg"))
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn()
        .expect("setpriv is part of every Debian")
}

/// Polls a probe, under a watchdog.
pub(crate) async fn eventually(what: &str, mut probe: impl AsyncFnMut() -> bool) {
    let done = tokio::time::timeout(WATCHDOG, async {
        while !probe().await {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    done.await.unwrap_or_else(|_| panic!("in time: {what}"));
}

pub(crate) fn call() -> Call {
    call_of(Duration::from_secs(10))
}

pub(crate) fn call_of(budget: Duration) -> Call {
    Call::for_tests(Arc::new(BootClock), budget)
}

pub(crate) fn request(name: &str) -> AcquireRequest {
    request_of(name, Duration::from_secs(2))
}

pub(crate) fn request_of(name: &str, ttl: Duration) -> AcquireRequest {
    AcquireRequest::new(LockName::parse(name).unwrap(), ttl)
}

/// Returns an owner as it appears in the name of its place.
pub(crate) fn hex(request: &AcquireRequest) -> String {
    request.owner().expose().iter().map(|byte| format!("{byte:02x}")).collect()
}
