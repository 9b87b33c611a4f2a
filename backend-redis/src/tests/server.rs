//! A server of a test's own: on a free port of the loopback, in a directory of its own, gone with the test.

use std::{
    io::Write,
    net::TcpListener,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use redis::{FromRedisValue, aio::MultiplexedConnection};
use rustix::process::{Pid, Signal, kill_process};

/// Nothing here takes as long, on any machine.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(20);

#[derive(Debug)]
pub(crate) struct Server {
    process: Child,
    pub(crate) port: u16,
    options: Vec<String>,
    directory: tempfile::TempDir,
}

impl Server {
    /// Starts one; `None` if the environment asks in words for no test of Redis.
    pub(crate) async fn start() -> Option<Self> {
        Self::with(&[]).await
    }

    /// Starts one with more options; all of them keep no data unless an option says so.
    pub(crate) async fn with(options: &[&str]) -> Option<Self> {
        if is_skipped() {
            return None;
        }
        let mut directory = tempfile::tempdir().unwrap();
        let options: Vec<String> = options.iter().map(|option| (*option).to_owned()).collect();
        // Between the look for a free port and its use somebody else may take it: that server ends at once.
        for _ in 0..20 {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let process = spawn(port, &directory, &options);
            let mut server = Self { process, port, options: options.clone(), directory };
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
            if self.process.try_wait().unwrap().is_some() {
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
        let _ = self.process.kill();
        self.process.wait().unwrap();
        self.process = spawn(self.port, &self.directory, &self.options);
        assert!(self.is_up().await, "the server did not start again");
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
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

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Says whether `LOCK_TEST_SKIP`, a list with commas, names Redis; the test then says that it did not run.
fn is_skipped() -> bool {
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

/// The program of the server. A missing one is a failure that names the line that installs it.
fn program() -> String {
    let program = std::env::var("LOCK_REDIS_SERVER").unwrap_or_else(|_| "redis-server".into());
    // Asked first, because `setpriv` below can be started without it.
    if let Err(error) = Command::new(&program).arg("--version").stdout(Stdio::null()).status() {
        panic!(
            "{program}: {error}; run: sudo apt-get install redis-server (or name a server in LOCK_REDIS_SERVER, or set \
             LOCK_TEST_SKIP=redis)"
        );
    }
    program
}

fn spawn(port: u16, directory: &tempfile::TempDir, options: &[String]) -> Child {
    let program = program();
    // `setpriv` lets the server die with the thread that started it, should the test be killed.
    let mut command = match Command::new("setpriv").arg("--version").stdout(Stdio::null()).status() {
        Ok(status) if status.success() => {
            let mut command = Command::new("setpriv");
            command.args(["--pdeathsig", "KILL"]).arg(program);
            command
        }
        _ => Command::new(program),
    };
    command
        .args(["--port", &port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"])
        .args(["--loglevel", "warning", "--unixsocket"])
        .arg(directory.path().join("redis.sock"))
        .arg("--dir")
        .arg(directory.path())
        .args(options)
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}
