//! A real etcd for one test, and what tests ask of it beside the backend.

#![allow(dead_code, reason = "no test file uses all of it")]

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::Duration,
};

use etcd_client::{Client, GetOptions};
use lockcore::backend::*;
use lockcore_conformance::programs::{Program, Provider, Running, answers, free_port};
use lockcore_etcd::{EtcdBackend, EtcdConfig};
use rustix::process::Signal;

/// Nothing here takes as long, on any machine.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(20);

pub(crate) const ETCD: Program = Program {
    store: "etcd",
    url: "LOCK_TEST_ETCD_URL",
    is_here: || answers("etcd", "--version"),
    install: "sudo apt-get install etcd-server etcd-client",
    image: "lockcore/etcd:3.5",
};

/// One member: a server, where it listens, what it keeps.
pub(crate) struct Member {
    child: Running,
    name: String,
    pub(crate) url: String,
    pub(crate) peer: String,
    cluster: String,
    pub(crate) data: PathBuf,
    more: Vec<String>,
}

impl Member {
    fn spawn(name: &str, url: &str, peer: &str, cluster: &str, data: PathBuf, more: &[&str]) -> Self {
        let more: Vec<String> = more.iter().map(|&flag| flag.to_owned()).collect();
        let child = start(name, url, peer, cluster, &data, &more);
        let (name, url, peer) = (name.to_owned(), url.to_owned(), peer.to_owned());
        Self { child, name, url, peer, cluster: cluster.to_owned(), data, more }
    }

    /// Starts one beside others that are named like in `--initial-cluster`, and waits until it listens.
    pub(crate) fn spawn_at(dir: &Path, name: &str, peer: &str, others: &str, more: &[&str]) -> Self {
        let cluster = format!("{name}={peer},{others}");
        let mut member = Self::spawn(name, &free(), peer, &cluster, dir.join(name), more);
        assert!(member.is_up(), "{name} ended");
        member
    }

    /// Starts one alone whose clients speak TLS, by the flags given, and waits until it listens.
    pub(crate) fn spawn_secure(dir: &Path, more: &[&str]) -> Self {
        let (url, peer) = (free().replace("http:", "https:"), free());
        let mut member = Self::spawn("m0", &url, &peer, &format!("m0={peer}"), dir.join("m0"), more);
        assert!(member.is_up(), "the server ended");
        member
    }

    /// Waits until it listens; false: it ended, because somebody else took its port.
    fn is_up(&mut self) -> bool {
        let begun = std::time::Instant::now();
        let address = self.url.rsplit('/').next().unwrap().to_owned();
        while std::net::TcpStream::connect(&address).is_err() {
            if self.child.has_ended() {
                return false;
            }
            assert!(begun.elapsed() < WATCHDOG, "{} does not listen", self.url);
            // Between two looks at a process that is starting, not a wait for an effect.
            std::thread::sleep(Duration::from_millis(2));
        }
        true
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill();
    }

    pub(crate) fn restart(&mut self) {
        self.kill();
        self.child = start(&self.name, &self.url, &self.peer, &self.cluster, &self.data, &self.more);
    }

    /// Stops it or lets it go on; a stop is awaited.
    pub(crate) fn signal(&self, signal: Signal) {
        if signal == Signal::STOP { self.child.stop() } else { self.child.go_on() }
    }

    pub(crate) async fn admin(&self) -> Client {
        Client::connect([&self.url], None).await.unwrap()
    }
}

/// Three members of one cluster, or another number; their end is this value's.
pub(crate) struct Cluster {
    pub(crate) members: Vec<Member>,
    pub(crate) dir: tempfile::TempDir,
}

impl Cluster {
    /// Starts one; `None` if `LOCK_TEST_SKIP` names etcd.
    pub(crate) fn start(size: usize) -> Option<Self> {
        Self::with(size, &[])
    }

    /// Starts one with more flags for each member.
    pub(crate) fn with(size: usize, more: &[&str]) -> Option<Self> {
        if is_skipped() {
            return None;
        }
        // Between the look for a free port and its use somebody else may take it: that member ends at once.
        for _ in 0..20 {
            let dir = tempfile::tempdir().unwrap();
            let at: Vec<(String, String)> = (0..size).map(|_| (free(), free())).collect();
            let cluster: Vec<String> =
                at.iter().enumerate().map(|(n, (_, peer))| format!("m{n}={peer}")).collect();
            let cluster = cluster.join(",");
            let mut members: Vec<Member> = (at.iter().enumerate())
                .map(|(n, (url, peer))| {
                    let data = dir.path().join(format!("m{n}"));
                    Member::spawn(&format!("m{n}"), url, peer, &cluster, data, more)
                })
                .collect();
            if members.iter_mut().all(Member::is_up) {
                return Some(Self { members, dir });
            }
        }
        panic!("no cluster came up");
    }

    pub(crate) fn urls(&self) -> Vec<String> {
        self.members.iter().map(|member| member.url.clone()).collect()
    }

    /// Returns the addresses, one of them first: the one that is asked until there is evidence against it.
    pub(crate) fn urls_from(&self, first: usize) -> Vec<String> {
        let mut urls = self.urls();
        urls.rotate_left(first);
        urls
    }

    pub(crate) async fn backend(&self) -> Arc<EtcdBackend> {
        self.backend_with(0, |_| {}).await
    }

    pub(crate) async fn backend_with(
        &self,
        first: usize,
        set: impl FnOnce(&mut EtcdConfig),
    ) -> Arc<EtcdBackend> {
        let config = EtcdConfig::new(self.urls_from(first)).with(set);
        let backend = Arc::new(EtcdBackend::lazy(config).unwrap());
        serves(&backend).await;
        backend
    }

    /// Returns which member leads, as one of those sees it that answer.
    pub(crate) async fn leader(&self) -> usize {
        let mut found = None;
        eventually("a leader is known", async || {
            for member in &self.members {
                let mut admin = member.admin().await;
                let asked = tokio::time::timeout(Duration::from_millis(200), admin.status()).await;
                let Ok(Ok(status)) = asked else { continue };
                for (at, other) in self.members.iter().enumerate() {
                    let mut admin = other.admin().await;
                    let asked = tokio::time::timeout(Duration::from_millis(200), admin.status()).await;
                    let Ok(Ok(other)) = asked else { continue };
                    if other.header().unwrap().member_id() == status.leader() {
                        found = Some(at);
                        return true;
                    }
                }
            }
            false
        })
        .await;
        found.unwrap()
    }

    /// Waits until every member serves and follows the same leader.
    pub(crate) async fn is_whole(&self) {
        eventually("every member follows one leader", async || {
            let mut leaders = std::collections::HashSet::new();
            for member in &self.members {
                let mut admin = member.admin().await;
                let asked = tokio::time::timeout(Duration::from_millis(500), async {
                    admin.get("unrelated", None).await?;
                    admin.status().await
                });
                match asked.await {
                    Ok(Ok(status)) => leaders.insert(status.leader()),
                    _ => return false,
                };
            }
            leaders.len() == 1 && !leaders.contains(&0)
        })
        .await;
    }
}

/// One server; its end is this value's.
pub(crate) struct Server {
    member: Member,
    pub(crate) url: String,
    pub(crate) dir: tempfile::TempDir,
}

impl Server {
    /// Starts one; `None` if `LOCK_TEST_SKIP` names etcd, which the test then says. A missing server is a failure that
    /// names the line that installs it.
    pub(crate) fn start() -> Option<Self> {
        Self::with(&[])
    }

    pub(crate) fn with(more: &[&str]) -> Option<Self> {
        let Cluster { mut members, dir } = Cluster::with(1, more)?;
        let member = members.pop().unwrap();
        Some(Self { url: member.url.clone(), member, dir })
    }

    pub(crate) fn kill(&mut self) {
        self.member.kill();
    }

    pub(crate) fn restart(&mut self) {
        self.member.restart();
    }

    pub(crate) fn signal(&self, signal: Signal) {
        self.member.signal(signal);
    }

    pub(crate) fn peer(&self) -> &str {
        &self.member.peer
    }

    /// Goes on from a snapshot with the same name, token and addresses.
    pub(crate) fn restore(&mut self, snapshot: &Path) {
        self.kill();
        let Member { name, peer, cluster, .. } = &self.member;
        let data = self.dir.path().join("restored");
        let mut restore = etcdctl();
        restore.args(["snapshot", "restore"]).arg(snapshot).args([
            "--name",
            name,
            "--initial-cluster",
            cluster,
        ]);
        restore.args(["--initial-advertise-peer-urls", peer, "--data-dir"]).arg(&data);
        assert!(ETCD.run(&restore, self.dir.path()), "the snapshot was not restored");
        self.member.data = data;
        self.member.restart();
    }

    pub(crate) fn snapshot(&self) -> PathBuf {
        let file = self.dir.path().join("snapshot");
        let mut save = etcdctl();
        save.args(["--endpoints", &self.url, "snapshot", "save"]).arg(&file);
        assert!(ETCD.run(&save, self.dir.path()), "no snapshot was saved");
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
        keys.filter(|key| !key.ends_with("/base") && !key.ends_with("/phase")).collect()
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

/// Says whether `LOCK_TEST_SKIP`, a list with commas, names etcd; the test then says that it did not run.
pub(crate) fn is_skipped() -> bool {
    if std::env::var("LOCK_TEST_SKIP").is_ok_and(|list| list.split(',').any(|store| store == "etcd")) {
        let test = std::thread::current();
        let line = format!("not run: {}: LOCK_TEST_SKIP names etcd\n", test.name().unwrap_or("a test"));
        // Past the capture of the test harness, which shows nothing of a test that did not fail.
        std::io::Write::write_all(&mut std::io::stderr(), line.as_bytes()).unwrap();
        return true;
    }
    // `etcdctl` saves and restores the snapshots of tests whose servers are processes.
    if ETCD.own_servers() == Provider::Process {
        assert!(
            answers("etcdctl", "version"),
            "etcdctl is missing; run: {} (or set LOCK_TEST_SKIP=etcd)",
            ETCD.install
        );
    }
    false
}

/// Begins a command of etcd's own tool.
fn etcdctl() -> Command {
    let mut command = Command::new("etcdctl");
    command.env("ETCDCTL_API", "3");
    command
}

/// Returns an address on a port that nobody listens on.
pub(crate) fn free() -> String {
    format!("http://127.0.0.1:{}", free_port())
}

fn start(name: &str, url: &str, peer: &str, cluster: &str, data: &Path, more: &[String]) -> Running {
    let mut command = Command::new("etcd");
    command
        .args([
            "--name",
            name,
            "--unsafe-no-fsync",
            "--heartbeat-interval",
            "30",
            "--election-timeout",
            "300",
        ])
        .args(["--listen-client-urls", url, "--advertise-client-urls", url])
        .args(["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer])
        .args(["--initial-cluster", cluster])
        .arg("--data-dir")
        .arg(data)
        .args(more);
    let folder = data.parent().expect("the data is in a folder of the test's own");
    ETCD.spawn(&command, folder, Some(&folder.join(format!("{name}.log"))))
}

/// Waits until the cluster answers.
pub(crate) async fn serves(backend: &EtcdBackend) {
    eventually("the server serves", async || backend.high_water(&call()).await.is_ok()).await;
}

/// Says whether a server of this version may end live leases when a stopped leader goes on.
pub(crate) fn revokes_live_leases(version: &str) -> bool {
    let number = |part: &str| part.parse::<u32>().unwrap_or_else(|_| panic!("a version: {version}"));
    let plain = version.split(['-', '+']).next().unwrap();
    match plain.split('.').map(number).collect::<Vec<_>>()[..] {
        [3, 4, patch] => patch < 31,
        [3, 5, patch] => patch < 13,
        [major, minor, _] => (major, minor) < (3, 4),
        _ => panic!("a version: {version}"),
    }
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
    request_of(name, Duration::from_secs(5))
}

pub(crate) fn request_of(name: &str, ttl: Duration) -> AcquireRequest {
    AcquireRequest::new(LockName::parse(name).unwrap(), ttl)
}

/// Returns an owner as it appears in the key of its place.
pub(crate) fn hex(request: &AcquireRequest) -> String {
    request.owner().expose().iter().map(|byte| format!("{byte:02x}")).collect()
}
