//! A real ZooKeeper for one test, and what tests ask of it beside the backend.

#![allow(dead_code, unused_imports, reason = "no test file uses all of it")]

use std::{
    io::{Read, Write},
    net::TcpStream,
    path::Path,
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use lockcore::backend::*;
pub(crate) use lockcore_conformance::{faultline::Direction, programs::free_port};
use lockcore_conformance::{
    faultline::Faultline,
    programs::{Program, Provider, Running, answers},
    wall_clock::WallClock,
};
use lockcore_zk::{ZkBackend, ZkConfig};
use rustix::process::Signal;
use zookeeper_client::{Client, Stat};

/// Where Debian's package puts the server; another class path may be named in `LOCK_ZOOKEEPER_CLASSPATH`.
///
/// Its manifest leaves out a part of netty, which only servers that speak TLS need.
const CLASSES: &str = "/etc/zookeeper/conf:/usr/share/java/zookeeper.jar:/usr/share/java/netty-codec.jar:\
                       /usr/share/java/netty-handler.jar";
/// Nothing here takes as long, on any machine.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(30);

pub(crate) const ZOOKEEPER: Program = Program {
    store: "zookeeper",
    url: "LOCK_TEST_ZK_URL",
    is_here: || {
        let classes = std::env::var_os("LOCK_ZOOKEEPER_CLASSPATH").is_some();
        (classes || Path::new("/usr/share/java/zookeeper.jar").exists()) && answers("java", "-version")
    },
    install: "sudo apt-get install zookeeper",
    image: "lockcore/zookeeper:3.9",
};

/// One server; its end is this value's.
pub(crate) struct Server {
    child: Running,
    clock: Option<WallClock>,
    pub(crate) address: String,
    pub(crate) dir: tempfile::TempDir,
}

impl Server {
    /// Starts one; `None` if `LOCK_TEST_SKIP` names zookeeper, which the test then says. A missing server is a failure
    /// that names the line that installs it.
    pub(crate) fn start() -> Option<Self> {
        Self::with("maxSessionTimeout=120000\n")
    }

    /// Starts one with more lines in its configuration.
    pub(crate) fn with(more: &str) -> Option<Self> {
        if is_skipped() {
            return None;
        }
        let port = free_port();
        let dir = tempfile::tempdir().unwrap();
        let config = format!("clientPort={port}\n{}{more}", plain(dir.path()));
        std::fs::write(dir.path().join("zoo.cfg"), config).unwrap();
        let clock = clock_of(dir.path());
        let child = spawn(dir.path(), clock.as_ref());
        let mut server = Self { child, clock, address: format!("127.0.0.1:{port}"), dir };
        server.wait();
        Some(server)
    }

    fn wait(&mut self) {
        let begun = Instant::now();
        while !self.says("srvr").is_some_and(|said| said.contains("Mode:")) {
            assert!(!self.child.has_ended(), "the server ended: {}", self.log());
            assert!(begun.elapsed() < WATCHDOG, "the server does not answer: {}", self.log());
            // Between two looks at a process that is starting, not a wait for an effect.
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn log(&self) -> String {
        self.child.said() + &std::fs::read_to_string(self.dir.path().join("log")).unwrap_or_default()
    }

    /// Asks by a four-letter word.
    pub(crate) fn says(&self, word: &str) -> Option<String> {
        says(&self.address, word)
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill();
    }

    pub(crate) fn restart(&mut self) {
        self.kill();
        self.start_again();
        self.wait();
    }

    /// Starts again without any data: an ensemble that was set up anew.
    pub(crate) fn forget(&mut self) {
        self.kill();
        std::fs::remove_dir_all(self.dir.path().join("data")).unwrap();
        self.start_again();
        self.wait();
    }

    fn start_again(&mut self) {
        self.child = spawn(self.dir.path(), self.clock.as_ref());
    }

    /// Sets its wall clock so many seconds ahead of the machine's.
    pub(crate) fn set_clock_ahead(&self, seconds: i64) {
        self.clock.as_ref().expect("it was started under a clock").set_ahead(seconds).unwrap();
    }

    pub(crate) fn signal(&self, signal: Signal) {
        if signal == Signal::STOP { self.child.stop() } else { self.child.go_on() }
    }

    pub(crate) async fn admin(&self) -> Client {
        Client::connect(&self.address).await.unwrap()
    }

    pub(crate) async fn backend(&self) -> Arc<ZkBackend> {
        backend_at(&self.address).await
    }

    /// Returns a number of `mntr`.
    pub(crate) fn number(&self, name: &str) -> u64 {
        let said = self.says("mntr").expect("the server answers");
        let line = said.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('\t'));
        line.unwrap_or_else(|| panic!("no {name} in {said}")).trim().parse::<f64>().unwrap() as u64
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

/// Says whether `LOCK_TEST_SKIP` names zookeeper; the test then says that it did not run. A missing server is a failure
/// that names the line that installs it.
pub(crate) fn is_skipped() -> bool {
    let skipped = std::env::var("LOCK_TEST_SKIP")
        .is_ok_and(|list| list.split(',').any(|s| s == "zookeeper" || s == "zk"));
    if skipped {
        let test = std::thread::current();
        let line = format!("not run: {}: LOCK_TEST_SKIP names zookeeper\n", test.name().unwrap_or("a test"));
        // Past the capture of the test harness, which shows nothing of a test that did not fail.
        std::io::stderr().write_all(line.as_bytes()).unwrap();
    }
    skipped
}

fn plain(dir: &Path) -> String {
    format!(
        "tickTime=200\ndataDir={}\nclientPortAddress=127.0.0.1\nadmin.enableServer=false\n4lw.commands.whitelist=*\n\
         forceSync=no\npreAllocSize=512\nmaxClientCnxns=0\n",
        dir.join("data").display()
    )
}

/// Asks the server at an address by a four-letter word.
pub(crate) fn says(address: &str, word: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
    stream.write_all(word.as_bytes()).ok()?;
    let mut said = String::new();
    stream.read_to_string(&mut said).ok()?;
    Some(said)
}

/// Says whether servers run under a wall clock of their own: programs of this machine do.
pub(crate) fn clocks_are_offered() -> bool {
    WallClock::is_offered() && ZOOKEEPER.own_servers() == Provider::Process
}

fn clock_of(dir: &Path) -> Option<WallClock> {
    clocks_are_offered().then(|| WallClock::inside(dir).unwrap().expect("it is offered"))
}

fn spawn(dir: &Path, clock: Option<&WallClock>) -> Running {
    // Servers that missed each other's votes ask again after this, and not after up to a minute.
    const SMALL: &str = "-Xmx96m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -Xshare:auto \
                         -Dzookeeper.fastleader.maxNotificationInterval=1000";
    let (config, log) = (dir.join("zoo.cfg"), dir.join("log"));
    let mut command = match ZOOKEEPER.own_servers() {
        Provider::Process => {
            let classes = std::env::var("LOCK_ZOOKEEPER_CLASSPATH").unwrap_or_else(|_| CLASSES.into());
            let mut command = Command::new("java");
            command.args(SMALL.split(' ')).args(["-Dzookeeper.root.logger=WARN,CONSOLE", "-cp", &classes]);
            command.arg("org.apache.zookeeper.server.quorum.QuorumPeerMain");
            command
        }
        // Where the classes are is the image's affair.
        _ => {
            let mut command = Command::new("zkServer.sh");
            command.arg("start-foreground").env("SERVER_JVMFLAGS", SMALL).env("ZOO_LOG_DIR", dir);
            command
        }
    };
    command.arg(config);
    if let Some(clock) = clock {
        clock.put_under(&mut command);
    }
    ZOOKEEPER.spawn(&command, dir, Some(&log))
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

pub(crate) async fn backend_at(address: &str) -> Arc<ZkBackend> {
    let backend = Arc::new(ZkBackend::lazy(ZkConfig::new([address])).unwrap());
    eventually("the server serves", async || backend.high_water(&call()).await.is_ok()).await;
    backend
}

/// Lets a request wait in a task, and comes back when it stands in the queue.
pub(crate) async fn waits(
    backend: &Arc<ZkBackend>,
    request: AcquireRequest,
    place: u32,
) -> tokio::task::JoinHandle<Result<Lease>> {
    let (other, name) = (backend.clone(), request.name().clone());
    let waiter =
        tokio::spawn(async move { other.acquire(&call_of(Duration::from_secs(20)), &request).await });
    eventually("it stands in the queue", async || {
        backend.inspect(&call(), &name).await.unwrap().waiters == Some(place)
    })
    .await;
    waiter
}

/// A line between a backend and a server that a test can hold up and break.
pub(crate) fn line_to(server: &str) -> Faultline {
    Faultline::start(server.parse().expect("an address with numbers")).expect("a free port")
}

/// Servers that elect one of them, or one alone.
pub(crate) struct Ensemble {
    servers: Vec<Server>,
}

impl Ensemble {
    pub(crate) fn start(size: usize) -> Option<Self> {
        if size == 1 {
            return Some(Self { servers: vec![Server::start()?] });
        }
        if is_skipped() {
            return None;
        }
        let ports: Vec<[u16; 3]> = (0..size).map(|_| [free_port(), free_port(), free_port()]).collect();
        let mut members = String::new();
        for (n, [_, peer, election]) in ports.iter().enumerate() {
            members.push_str(&format!("server.{}=127.0.0.1:{peer}:{election}\n", n + 1));
        }
        let mut servers = Vec::new();
        for (n, [port, ..]) in ports.iter().enumerate() {
            let dir = tempfile::tempdir().unwrap();
            let config = format!(
                "clientPort={port}\n{}maxSessionTimeout=120000\ninitLimit=50\nsyncLimit=5\n{members}",
                plain(dir.path())
            );
            std::fs::write(dir.path().join("zoo.cfg"), config).unwrap();
            std::fs::create_dir(dir.path().join("data")).unwrap();
            std::fs::write(dir.path().join("data/myid"), (n + 1).to_string()).unwrap();
            let clock = clock_of(dir.path());
            let child = spawn(dir.path(), clock.as_ref());
            servers.push(Server { child, clock, address: format!("127.0.0.1:{port}"), dir });
        }
        for server in &mut servers {
            server.wait();
        }
        Some(Self { servers })
    }

    pub(crate) fn addresses(&self) -> String {
        self.servers.iter().map(|server| server.address.as_str()).collect::<Vec<_>>().join(",")
    }

    pub(crate) fn address(&self, at: usize) -> &str {
        &self.servers[at].address
    }

    /// Returns which server leads, as soon as one does.
    pub(crate) fn leader(&self) -> usize {
        let begun = Instant::now();
        loop {
            let leads =
                |server: &Server| server.says("srvr").is_some_and(|said| said.contains("Mode: leader"));
            if let Some(leader) = self.servers.iter().position(leads) {
                return leader;
            }
            assert!(begun.elapsed() < WATCHDOG, "nobody leads");
            // Between two looks at an election, not a wait for an effect.
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub(crate) fn kill(&mut self, at: usize) {
        self.servers[at].kill();
    }

    /// Starts one again, and waits until it serves if there are enough to serve.
    pub(crate) fn restart(&mut self, at: usize) {
        self.servers[at].kill();
        self.servers[at].start_again();
        let up = self.servers.iter_mut().filter_map(|server| (!server.child.has_ended()).then_some(()));
        if 2 * up.count() > self.servers.len() {
            self.servers[at].wait();
        }
    }

    pub(crate) fn set_clock_ahead(&self, at: usize, seconds: i64) {
        self.servers[at].set_clock_ahead(seconds);
    }

    pub(crate) fn signal(&self, at: usize, signal: Signal) {
        self.servers[at].signal(signal);
    }
}
