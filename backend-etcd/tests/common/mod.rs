//! A real etcd for one test, and what tests ask of it beside the backend.

#![allow(dead_code, reason = "no test file uses all of it")]

use std::{
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use etcd_client::{Client, GetOptions};
use lockcore::backend::*;
use lockcore_etcd::{EtcdBackend, EtcdConfig};
use rustix::process::{Pid, Signal, kill_process};

/// One server; its end is this value's.
pub(crate) struct Server {
    child: Child,
    data: PathBuf,
    peer: String,
    pub(crate) url: String,
    pub(crate) dir: tempfile::TempDir,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Server {
    /// Starts one; `None` if `LOCK_TEST_SKIP` names etcd, which the test then says. A missing server is a failure that
    /// names the line that installs it.
    pub(crate) fn start() -> Option<Self> {
        if std::env::var("LOCK_TEST_SKIP").is_ok_and(|list| list.split(',').any(|store| store == "etcd")) {
            let test = std::thread::current();
            let line = format!("not run: {}: LOCK_TEST_SKIP names etcd\n", test.name().unwrap_or("a test"));
            // Past the capture of the test harness, which shows nothing of a test that did not fail.
            std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes()).unwrap();
            return None;
        }
        for program in ["etcd", "etcdctl"] {
            let mut ask = Command::new(program);
            ask.arg("--version").stdout(Stdio::null()).stderr(Stdio::null());
            if let Err(error) = ask.status() {
                panic!(
                    "{program}: {error}; run: sudo apt-get install etcd-server etcd-client (or set LOCK_TEST_SKIP=etcd)"
                );
            }
        }
        let free = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let (url, peer) = (format!("http://127.0.0.1:{}", free()), format!("http://127.0.0.1:{}", free()));
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("data");
        let child = spawn(&url, &peer, &data);
        Some(Self { child, data, peer, url, dir })
    }

    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    pub(crate) fn restart(&mut self) {
        self.kill();
        self.child = spawn(&self.url, &self.peer, &self.data);
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Goes on from a snapshot with the same name, token and addresses.
    pub(crate) fn restore(&mut self, snapshot: &Path) {
        self.kill();
        self.data = self.dir.path().join("restored");
        let done = Command::new("etcdctl")
            .env("ETCDCTL_API", "3")
            .args(["snapshot", "restore"])
            .arg(snapshot)
            .args(["--name", "default", "--initial-cluster", &format!("default={}", self.peer)])
            .args(["--initial-advertise-peer-urls", &self.peer, "--data-dir"])
            .arg(&self.data)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .unwrap();
        assert!(done.success());
        self.child = spawn(&self.url, &self.peer, &self.data);
    }

    pub(crate) fn snapshot(&self) -> PathBuf {
        let file = self.dir.path().join("snapshot");
        let done = Command::new("etcdctl")
            .env("ETCDCTL_API", "3")
            .args(["--endpoints", &self.url, "snapshot", "save"])
            .arg(&file)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .unwrap();
        assert!(done.success());
        file
    }

    pub(crate) async fn admin(&self) -> Client {
        Client::connect([&self.url], None).await.unwrap()
    }

    pub(crate) async fn backend(&self) -> Arc<EtcdBackend> {
        let backend = Arc::new(EtcdBackend::lazy(EtcdConfig::new([&self.url])).unwrap());
        serves(&backend).await;
        backend
    }

    /// Returns the keys of places and marks.
    pub(crate) async fn places(&self) -> Vec<String> {
        let options = GetOptions::new().with_prefix().with_keys_only();
        let found = self.admin().await.get("lockcore/", Some(options)).await.unwrap();
        let keys = found.kvs().iter().map(|kv| String::from_utf8_lossy(kv.key()).into_owned());
        keys.filter(|key| !key.ends_with("/base")).collect()
    }

    pub(crate) async fn leases(&self) -> usize {
        self.admin().await.leases().await.unwrap().leases().len()
    }

    /// Returns the etcd lease of the only place whose key contains `part`.
    pub(crate) async fn lease_of(&self, part: &str) -> i64 {
        let options = GetOptions::new().with_prefix();
        let found = self.admin().await.get("lockcore/", Some(options)).await.unwrap();
        let mut of = found.kvs().iter().filter(|kv| String::from_utf8_lossy(kv.key()).contains(part));
        let lease = of.next().expect("the place exists").lease();
        assert!(of.next().is_none(), "one place only");
        lease
    }
}

fn spawn(url: &str, peer: &str, data: &Path) -> Child {
    start("default", url, peer, &format!("default={peer}"), data, &[])
}

/// Starts one member, which dies with the thread that started it, should the test be killed.
fn start(name: &str, url: &str, peer: &str, cluster: &str, data: &Path, more: &[&str]) -> Child {
    let mut command = match Command::new("setpriv").arg("--version").stdout(Stdio::null()).status() {
        Ok(status) if status.success() => {
            let mut command = Command::new("setpriv");
            command.args(["--pdeathsig", "KILL", "etcd"]);
            command
        }
        _ => Command::new("etcd"),
    };
    command
        .args(["--name", name, "--unsafe-no-fsync", "--heartbeat-interval", "30", "--election-timeout", "300"])
        .args(["--listen-client-urls", url, "--advertise-client-urls", url])
        .args(["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer])
        .args(["--initial-cluster", cluster])
        .arg("--data-dir")
        .arg(data)
        .args(more)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("etcd is installed")
}

/// Waits until the cluster answers.
pub(crate) async fn serves(backend: &EtcdBackend) {
    eventually("the server serves", async || backend.high_water(&call()).await.is_ok()).await;
}

/// Polls a probe, under a watchdog.
pub(crate) async fn eventually(what: &str, mut probe: impl AsyncFnMut() -> bool) {
    let done = tokio::time::timeout(Duration::from_secs(20), async {
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
    request_of(name, Duration::from_secs(5))
}

pub(crate) fn request_of(name: &str, ttl: Duration) -> AcquireRequest {
    AcquireRequest::new(LockName::parse(name).unwrap(), ttl)
}

/// Returns an owner as it appears in the key of its place.
pub(crate) fn hex(request: &AcquireRequest) -> String {
    request.owner().expose().iter().map(|byte| format!("{byte:02x}")).collect()
}
