//! The demos with their locks on real servers: the same programs, other URLs.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpStream},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use lockcore_conformance::programs::free_port;

/// A server of this test's own: on a free port of the loopback, gone with the test.
struct Redis {
    process: Child,
    port: u16,
}

impl Redis {
    /// Starts one; `None` if the environment asks in words for no test of Redis.
    fn start() -> Option<Self> {
        if is_skipped("redis") {
            return None;
        }
        let program = std::env::var("LOCK_REDIS_SERVER").unwrap_or_else(|_| "redis-server".into());
        if let Err(error) = Command::new(&program).arg("--version").stdout(Stdio::null()).status() {
            panic!(
                "{program}: {error}; run: sudo apt-get install redis-server (or set LOCK_TEST_SKIP=redis)"
            );
        }
        // Between the look for a free port and its use somebody else may take it: that server ends at once.
        for _ in 0..20 {
            let port = free_port();
            // `setpriv` lets the server die with the thread that started it, should the test be killed.
            let process = Command::new("setpriv")
                .args(["--pdeathsig", "KILL", &program, "--port", &port.to_string(), "--bind", "127.0.0.1"])
                .args(["--save", "", "--appendonly", "no", "--loglevel", "warning", "--dir", "/"])
                .stdout(Stdio::null())
                .spawn()
                .expect("setpriv is a part of util-linux");
            let mut server = Self { process, port };
            if server.is_up() {
                return Some(server);
            }
        }
        panic!("no server came up");
    }

    fn is_up(&mut self) -> bool {
        let begun = Instant::now();
        let itself = format!("process_id:{}\r", self.process.id());
        while self.process.try_wait().unwrap().is_none() {
            if self.ask("INFO server").is_some_and(|answer| answer.contains(&itself)) {
                return true;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "the server does not answer");
            // Between two looks at a process that is starting, not a wait for an effect.
            std::thread::sleep(Duration::from_millis(3));
        }
        false
    }

    fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Sends one command past the code under test.
    fn ask(&self, command: &str) -> Option<String> {
        let mut line = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        line.write_all(format!("{command}\r\n").as_bytes()).ok()?;
        line.shutdown(Shutdown::Write).ok()?;
        let mut answer = String::new();
        line.read_to_string(&mut answer).ok()?;
        Some(answer)
    }
}

impl Drop for Redis {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Any other server of a test's own: a process and a port, gone with the test.
struct Server {
    process: Child,
    port: u16,
    _directory: tempfile::TempDir,
}

impl Server {
    /// Starts one by a command that is made for a port and a directory; `up` says whether it serves.
    fn start(command: impl Fn(u16, &std::path::Path) -> Command, up: impl Fn(u16) -> bool) -> Self {
        for _ in 0..20 {
            let directory = tempfile::tempdir().unwrap();
            let port = free_port();
            let mut made = command(port, directory.path());
            let mut process = made
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("setpriv is a part of util-linux");
            let begun = Instant::now();
            while process.try_wait().unwrap().is_none() {
                if up(port) {
                    return Self { process, port, _directory: directory };
                }
                assert!(begun.elapsed() < Duration::from_secs(60), "the server does not answer");
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        panic!("no server came up");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Says whether the environment asks in words for no test of a store.
fn is_skipped(store: &str) -> bool {
    let skipped = std::env::var("LOCK_TEST_SKIP").is_ok_and(|list| list.split(',').any(|name| name == store));
    if skipped {
        // Past the capture of the test harness, which shows nothing of a test that did not fail.
        let line = format!("not run: the demo on {store}: LOCK_TEST_SKIP names it\n");
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
    skipped
}

/// Moves a fleet from one store to another and back; the demo's own checks decide, and what it counts is read.
fn assert_moves(from: &str, to: &str, ttl: &str) {
    let output = Command::new(env!("CARGO_BIN_EXE_migrate_demo"))
        .args(["--workers", "3", "--ttl", ttl, "--from", from, "--to", to])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{} from\n{said}\n{complained}", output.status);
    for part in [
        "is killed",
        "is paused for longer than its TTL",
        "falls asleep in phase `from`",
        "the move is over",
        "back on the old store",
        "double holds                   0",
        "fences that went back          0",
        "writes of live holders refused 0",
        "availability",
        "processes sent away            1",
    ] {
        assert!(said.contains(part), "{part:?} is not in\n{said}");
    }
}

/// Runs the demo on a store; its own checks decide, and the database must have refused the late holder.
fn assert_refused_on(store: &str, ttl: &str) {
    let output = Command::new(env!("CARGO_BIN_EXE_order_demo"))
        .args(["--orders", "120", "--ttl", ttl, "--store", store])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{} from\n{said}\n{complained}", output.status);
    assert!(said.contains("REFUSED by the database"), "{said}");
}

#[test]
fn order_demo_refuses_the_late_holder_when_its_locks_are_on_redis() {
    let Some(redis) = Redis::start() else { return };
    assert_refused_on(&redis.url(), "800ms");
    // The locks really were there: their fences are kept for a while.
    let kept = redis.ask("KEYS lockcore:*:fence").unwrap();
    assert!(kept.contains("orders/0"), "the server has {kept:?}");
}

#[cfg(feature = "etcd")]
#[test]
fn order_demo_refuses_the_late_holder_when_its_locks_are_on_etcd() {
    let Some(etcd) = etcd() else { return };
    assert_refused_on(&format!("etcd://127.0.0.1:{}", etcd.port), "2s");
}

/// Processes that hold, wait, are paused and killed, under rolling restarts.
#[cfg(feature = "etcd")]
#[test]
fn migrate_demo_moves_a_fleet_from_redis_to_etcd_and_back() {
    let (Some(redis), Some(etcd)) = (Redis::start(), etcd()) else { return };
    assert_moves(&redis.url(), &format!("etcd://127.0.0.1:{}", etcd.port), "1s");
    // The locks really were on both: fences are kept for a while, and so is what the migration wrote.
    let kept = redis.ask("KEYS lockcore:*").unwrap();
    assert!(kept.contains("account/1}:fence") && kept.contains("{phases}:record"), "the server has {kept:?}");
}

#[test]
fn migrate_demo_moves_a_fleet_from_zookeeper_to_redis_and_back() {
    let (Some(redis), Some(zookeeper)) = (Redis::start(), zookeeper()) else { return };
    assert_moves(&format!("zk://127.0.0.1:{}", zookeeper.port), &redis.url(), "2s");
}

#[cfg(feature = "etcd")]
fn etcd() -> Option<Server> {
    if is_skipped("etcd") {
        return None;
    }
    assert!(
        Command::new("etcd").arg("--version").stdout(Stdio::null()).status().is_ok(),
        "etcd is missing; run: sudo apt-get install etcd-server (or set LOCK_TEST_SKIP=etcd)"
    );
    let up = |port: u16| http_get(port, "/health").is_some_and(|said| said.contains("true"));
    Some(Server::start(
        |port, directory| {
            let (client, peer) =
                (format!("http://127.0.0.1:{port}"), format!("http://127.0.0.1:{}", free_port()));
            let mut command = Command::new("setpriv");
            command
                .args(["--pdeathsig", "KILL", "etcd", "--unsafe-no-fsync"])
                .args(["--heartbeat-interval", "30", "--election-timeout", "300"])
                .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
                .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
                .args(["--initial-cluster", &format!("default={peer}"), "--data-dir"])
                .arg(directory.join("data"));
            command
        },
        up,
    ))
}

#[cfg(feature = "etcd")]
fn http_get(port: u16, path: &str) -> Option<String> {
    let mut line = TcpStream::connect(("127.0.0.1", port)).ok()?;
    line.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
    line.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).ok()?;
    let mut answer = String::new();
    line.read_to_string(&mut answer).ok()?;
    Some(answer)
}

#[test]
fn order_demo_refuses_the_late_holder_when_its_locks_are_on_zookeeper() {
    let Some(zookeeper) = zookeeper() else { return };
    assert_refused_on(&format!("zk://127.0.0.1:{}", zookeeper.port), "2s");
}

fn zookeeper() -> Option<Server> {
    if is_skipped("zk") || is_skipped("zookeeper") {
        return None;
    }
    let classes = std::env::var("LOCK_ZOOKEEPER_CLASSPATH")
        .unwrap_or_else(|_| "/etc/zookeeper/conf:/usr/share/java/zookeeper.jar".into());
    assert!(
        classes.split(':').any(|part| std::path::Path::new(part).is_file()),
        "ZooKeeper is missing; run: sudo apt-get install zookeeper (or set LOCK_TEST_SKIP=zk)"
    );
    let says = |port: u16| {
        let mut line = TcpStream::connect(("127.0.0.1", port)).ok()?;
        // A server that is starting may take the connection and forget it.
        line.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
        line.write_all(b"srvr").ok()?;
        let mut answer = String::new();
        line.read_to_string(&mut answer).ok()?;
        Some(answer)
    };
    Some(Server::start(
        |port, directory| {
            let data = directory.join("data");
            let config = format!(
                "tickTime=200\nclientPort={port}\nclientPortAddress=127.0.0.1\ndataDir={}\nadmin.enableServer=false\n\
                 4lw.commands.whitelist=srvr\nmaxSessionTimeout=120000\n",
                data.display()
            );
            std::fs::write(directory.join("zoo.cfg"), config).unwrap();
            let mut command = Command::new("setpriv");
            command
                .args(["--pdeathsig", "KILL", "java", "-Xmx96m", "-cp", &classes])
                .args(["-Dzookeeper.forceSync=no", "org.apache.zookeeper.server.quorum.QuorumPeerMain"])
                .arg(directory.join("zoo.cfg"))
                .current_dir(directory);
            command
        },
        |port| says(port).is_some_and(|said| said.contains("Mode:")),
    ))
}
