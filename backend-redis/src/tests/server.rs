//! A server of a test's own: on a free port of the loopback, in a directory of its own, gone with the test.

use std::{
    io::Write,
    path::PathBuf,
    process::Command,
    time::{Duration, Instant},
};

use lockcore_conformance::{
    programs::{Program, Provider, Running, answers, free_port},
    wall_clock::WallClock,
};
use redis::{FromRedisValue, aio::MultiplexedConnection};
use rustix::process::Signal;

/// Nothing here takes as long, on any machine.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(20);

/// Redis, or Valkey: whatever `LOCK_REDIS_SERVER` or `LOCK_TEST_IMAGE` names.
pub(crate) const REDIS: Program = Program {
    store: "redis",
    url: "LOCK_TEST_REDIS_URL",
    is_here: || answers(&program(), "--version"),
    install: "sudo apt-get install redis-server (or name a server in LOCK_REDIS_SERVER)",
    image: "lockcore/redis:8.0",
};

#[derive(Debug)]
pub(crate) struct Server {
    process: Running,
    pub(crate) port: u16,
    options: Vec<String>,
    clock: Option<WallClock>,
    directory: tempfile::TempDir,
}

impl Server {
    /// Starts one; `None` if the environment asks in words for no test of Redis.
    pub(crate) async fn start() -> Option<Self> {
        Self::with(&[]).await
    }

    /// Starts one with more options; all of them keep no data unless an option says so.
    pub(crate) async fn with(options: &[&str]) -> Option<Self> {
        Self::launch(options, false).await
    }

    /// Starts one under a wall clock of its own, if [`clocks_are_offered`].
    #[allow(dead_code, reason = "the suite uses it, the other tests do not")]
    pub(crate) async fn under_a_clock(options: &[&str]) -> Option<Self> {
        Self::launch(options, clocks_are_offered()).await
    }

    async fn launch(options: &[&str], with_clock: bool) -> Option<Self> {
        if is_skipped() {
            return None;
        }
        let mut directory = tempfile::tempdir().unwrap();
        let options: Vec<String> = options.iter().map(|option| (*option).to_owned()).collect();
        // Between the look for a free port and its use somebody else may take it: that server ends at once.
        for _ in 0..20 {
            let port = free_port();
            let clock =
                with_clock.then(|| WallClock::inside(directory.path()).unwrap().expect("it is offered"));
            let process = spawn(port, &directory, &options, clock.as_ref());
            let mut server = Self { process, port, options: options.clone(), clock, directory };
            if server.is_up().await {
                return Some(server);
            }
            directory = std::mem::replace(&mut server.directory, tempfile::tempdir().unwrap());
        }
        panic!("no server came up; its log is above");
    }

    async fn is_up(&mut self) -> bool {
        let begun = Instant::now();
        loop {
            if self.process.has_ended() {
                return false;
            }
            assert!(begun.elapsed() < WATCHDOG, "the server on port {} does not answer", self.port);
            // Also a refusal is an answer, of a server that wants a password.
            match self.try_raw().await {
                Ok(mut raw) => match redis::cmd("PING").query_async::<String>(&mut raw).await {
                    Ok(_) => return true,
                    Err(e) if e.code() == Some("NOAUTH") => return true,
                    Err(_) => {}
                },
                Err(e) if e.code() == Some("NOAUTH") => return true,
                Err(_) => {}
            }
            // Between two looks at a process that is starting, not a wait for an effect.
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Ends the server at once, without a chance to save, and starts it again on the same port.
    pub(crate) async fn restart(&mut self) {
        self.process.kill();
        self.process = spawn(self.port, &self.directory, &self.options, self.clock.as_ref());
        assert!(self.is_up().await, "the server did not start again");
    }

    /// Ends the server at once, for good.
    pub(crate) fn kill(&mut self) {
        self.process.kill();
    }

    /// Starts a Sentinel that watches a master under the name `shop`.
    pub(crate) async fn sentinel(master: &Self, quorum: usize) -> Option<Self> {
        let lines = [
            "--sentinel".to_owned(),
            format!("sentinel monitor shop 127.0.0.1 {} {quorum}", master.port),
            "sentinel down-after-milliseconds shop 1000".to_owned(),
            "sentinel failover-timeout shop 3000".to_owned(),
        ];
        Self::with(&lines.each_ref().map(String::as_str)).await
    }

    /// Ends the server at once, and starts it again so that each key takes so many microseconds to load; it still loads when
    /// this returns.
    pub(crate) async fn restart_loading(&mut self, microseconds: &str) {
        self.process.kill();
        let slow = ["--key-load-delay", microseconds, "--loading-process-events-interval-bytes", "1024"];
        let options: Vec<String> =
            self.options.iter().cloned().chain(slow.iter().map(|option| (*option).to_owned())).collect();
        self.process = spawn(self.port, &self.directory, &options, self.clock.as_ref());
        self.until("it loads", async |server| {
            server.raw::<String>(&["PING"]).await.is_err_and(|error| error.to_string().contains("oading"))
        })
        .await;
    }

    /// Starts a server that was killed, on the same port and with what it wrote.
    #[allow(dead_code, reason = "the suite uses it, the other tests do not")]
    pub(crate) async fn start_again(&mut self) {
        self.process = spawn(self.port, &self.directory, &self.options, self.clock.as_ref());
        assert!(self.is_up().await, "the server did not start again");
    }

    /// Sets its wall clock so many seconds ahead of the machine's.
    #[allow(dead_code, reason = "the suite uses it, the other tests do not")]
    pub(crate) fn set_clock_ahead(&self, seconds: i64) {
        self.clock.as_ref().expect("it was started under a clock").set_ahead(seconds).unwrap();
    }

    /// Takes away the directory that it writes to.
    pub(crate) fn lose_directory(&self) {
        std::fs::remove_dir_all(self.directory.path()).unwrap();
    }

    /// Makes it a master.
    pub(crate) async fn promote(&self) {
        let _: () = self.raw(&["REPLICAOF", "NO", "ONE"]).await.unwrap();
    }

    /// Makes it a replica, and waits until it is in step.
    pub(crate) async fn follow(&self, master: &Self) {
        let _: () = self.raw(&["REPLICAOF", "127.0.0.1", &master.port.to_string()]).await.unwrap();
        // A master that calls its replica online may still hold back the stream until the first acknowledgement.
        let mark = self.port.to_string();
        let _: () = master.raw(&["SET", "in-step", &mark]).await.unwrap();
        let has = |mark: Option<String>| {
            move |found: redis::RedisResult<Option<String>>| found.is_ok_and(|found| found == mark)
        };
        self.until("it follows its master", async |server| {
            has(Some(mark.clone()))(server.raw(&["GET", "in-step"]).await)
        })
        .await;
        let _: () = master.raw(&["DEL", "in-step"]).await.unwrap();
        self.until("it follows its master", async |server| has(None)(server.raw(&["GET", "in-step"]).await))
            .await;
    }

    /// Asks until it is so.
    pub(crate) async fn until(&self, what: &str, is: impl AsyncFn(&Self) -> bool) {
        let begun = Instant::now();
        while !is(self).await {
            assert!(begun.elapsed() < WATCHDOG, "it never came that {what}, on port {}", self.port);
            // Between two looks at another process, which has no event to wait for.
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        if signal == Signal::STOP { self.process.stop() } else { self.process.go_on() }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.path().join("redis.sock")
    }

    async fn try_raw(&self) -> redis::RedisResult<MultiplexedConnection> {
        let client = redis::Client::open(format!("redis://127.0.0.1:{}/", self.port))?;
        client.get_multiplexed_async_connection().await
    }

    /// Sends one command past the code under test.
    pub(crate) async fn raw<T: FromRedisValue>(&self, command: &[&str]) -> redis::RedisResult<T> {
        let mut connection = self.try_raw().await?;
        redis::cmd(command[0]).arg(&command[1..]).query_async(&mut connection).await
    }

    pub(crate) async fn get(&self, key: &str) -> Option<String> {
        self.raw(&["GET", key]).await.unwrap()
    }

    pub(crate) async fn pttl(&self, key: &str) -> i64 {
        self.raw(&["PTTL", key]).await.unwrap()
    }
}

/// A master and its replicas.
#[derive(Debug)]
pub(crate) struct Fleet {
    pub(crate) master: Server,
    pub(crate) replicas: Vec<Server>,
}

impl Fleet {
    /// Starts them all with the same options; the replicas are in step.
    pub(crate) async fn start(replicas: usize, options: &[&str]) -> Option<Self> {
        // A replica that asks is served at once.
        let options: Vec<&str> = [&["--repl-diskless-sync-delay", "0"], options].concat();
        let master = Server::with(&options).await?;
        let mut fleet = Self { master, replicas: Vec::new() };
        for _ in 0..replicas {
            let replica = Server::with(&options).await?;
            replica.follow(&fleet.master).await;
            fleet.replicas.push(replica);
        }
        Some(fleet)
    }
}

/// A Cluster of masters, each with so many replicas.
#[derive(Debug)]
pub(crate) struct ClusterOf {
    /// The masters first, then a replica of each, and so on.
    pub(crate) nodes: Vec<Server>,
    pub(crate) masters: usize,
}

impl ClusterOf {
    /// Starts one whose nodes all know that it is whole.
    pub(crate) async fn start(masters: usize, replicas: usize) -> Option<Self> {
        let mut cluster = Self { nodes: Vec::new(), masters };
        let mut buses = Vec::new();
        for _ in 0..masters * (1 + replicas) {
            let bus = free_port().to_string();
            let options = [
                "--cluster-enabled",
                "yes",
                "--cluster-node-timeout",
                "1500",
                "--cluster-port",
                &bus,
                "--repl-diskless-sync-delay",
                "0",
            ];
            cluster.nodes.push(Server::with(&options).await?);
            buses.push(bus);
        }
        let first = &cluster.nodes[0];
        for (n, node) in cluster.nodes[..masters].iter().enumerate() {
            let (low, high) = (n * 16_384 / masters, (n + 1) * 16_384 / masters - 1);
            let _: () =
                node.raw(&["CLUSTER", "ADDSLOTSRANGE", &low.to_string(), &high.to_string()]).await.unwrap();
        }
        for (node, bus) in cluster.nodes.iter().zip(&buses).skip(1) {
            let port = node.port.to_string();
            let _: () = first.raw(&["CLUSTER", "MEET", "127.0.0.1", &port, bus]).await.unwrap();
        }
        let count = cluster.nodes.len();
        for node in &cluster.nodes {
            node.until("all nodes are known", async |node| {
                node.cluster_info().await.contains(&format!("cluster_known_nodes:{count}\r"))
            })
            .await;
        }
        for (n, replica) in cluster.nodes.iter().enumerate().skip(masters) {
            let master = &cluster.nodes[n % masters];
            let id = master.id().await;
            replica
                .until("its master is known", async |replica| {
                    replica.raw::<()>(&["CLUSTER", "REPLICATE", &id]).await.is_ok()
                })
                .await;
        }
        for node in &cluster.nodes {
            node.until("the Cluster is whole", async |node| {
                let slots: redis::Value = node.raw(&["CLUSTER", "SLOTS"]).await.unwrap();
                let redis::Value::Array(ranges) = slots else { return false };
                let whole =
                    |range: &redis::Value| matches!(range, redis::Value::Array(r) if r.len() == 3 + replicas);
                ranges.len() == masters
                    && ranges.iter().all(whole)
                    && node.cluster_info().await.contains("cluster_state:ok")
            })
            .await;
        }
        for replica in &cluster.nodes[masters..] {
            replica
                .until("it follows its master", async |replica| {
                    let info: String = replica.raw(&["INFO", "replication"]).await.unwrap();
                    info.contains("master_link_status:up")
                })
                .await;
        }
        Some(cluster)
    }

    pub(crate) fn places(&self) -> Vec<(String, u16)> {
        self.nodes.iter().map(|node| ("127.0.0.1".to_owned(), node.port)).collect()
    }

    /// Returns the master that a slot was given to.
    pub(crate) fn owner(&self, slot: u16) -> usize {
        (0..self.masters).find(|n| usize::from(slot) < (n + 1) * 16_384 / self.masters).unwrap()
    }
}

impl Server {
    pub(crate) async fn id(&self) -> String {
        self.raw(&["CLUSTER", "MYID"]).await.unwrap()
    }

    pub(crate) async fn cluster_info(&self) -> String {
        self.raw(&["CLUSTER", "INFO"]).await.unwrap()
    }
}

/// Says whether `LOCK_TEST_SKIP`, a list with commas, names Redis; the test then says that it did not run.
pub(crate) fn is_skipped() -> bool {
    let skipped =
        std::env::var("LOCK_TEST_SKIP").is_ok_and(|list| list.split(',').any(|store| store == "redis"));
    if skipped {
        // Past the capture of the test harness, which shows nothing of a test that did not fail.
        let test = std::thread::current();
        let line = format!("not run: {}: LOCK_TEST_SKIP names redis\n", test.name().unwrap_or("a test"));
        std::io::stderr().write_all(line.as_bytes()).unwrap();
    }
    skipped
}

/// Says whether a server can be given a wall clock of its own: a program of this machine can.
#[allow(dead_code, reason = "the suite uses it, the other tests do not")]
pub(crate) fn clocks_are_offered() -> bool {
    WallClock::is_offered() && REDIS.own_servers() == Provider::Process
}

/// The program of the server on this machine.
fn program() -> String {
    std::env::var("LOCK_REDIS_SERVER").unwrap_or_else(|_| "redis-server".into())
}

fn spawn(port: u16, directory: &tempfile::TempDir, options: &[String], clock: Option<&WallClock>) -> Running {
    let mut command = match REDIS.image_in_use() {
        Some(image) if image.contains("valkey") => Command::new("valkey-server"),
        Some(_) => Command::new("redis-server"),
        None => Command::new(program()),
    };
    if let Some(clock) = clock {
        clock.put_under(&mut command);
    }
    // A Sentinel writes what it learns into the file that it was started with.
    if options.first().is_some_and(|option| option == "--sentinel") {
        let file = directory.path().join("sentinel.conf");
        let lines = format!(
            "port {port}\nbind 127.0.0.1\nloglevel warning\ndir {}\n{}\n",
            directory.path().display(),
            options[1..].join("\n")
        );
        std::fs::write(&file, lines).unwrap();
        command.arg(file).arg("--sentinel");
        return REDIS.spawn(&command, directory.path(), None);
    }
    command
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
        .args(["--loglevel", "warning", "--unixsocket"])
        .arg(directory.path().join("redis.sock"))
        .arg("--dir")
        .arg(directory.path())
        .args(options);
    REDIS.spawn(&command, directory.path(), None)
}
