//! The order demo with its locks on a Redis server.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// A server of this test's own: on a free port of the loopback, gone with the test.
struct Redis {
    process: Child,
    port: u16,
}

impl Redis {
    /// Starts one; `None` if the environment asks in words for no test of Redis.
    fn start() -> Option<Self> {
        if std::env::var("LOCK_TEST_SKIP").is_ok_and(|list| list.split(',').any(|store| store == "redis")) {
            // Past the capture of the test harness, which shows nothing of a test that did not fail.
            let _ = std::io::stderr().write_all(b"not run: the demo on Redis: LOCK_TEST_SKIP names redis\n");
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
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
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

#[test]
fn order_demo_refuses_the_late_holder_when_its_locks_are_on_redis() {
    let Some(redis) = Redis::start() else { return };
    let output = Command::new(env!("CARGO_BIN_EXE_order_demo"))
        .args(["--orders", "120", "--ttl", "800ms", "--store", &format!("redis://127.0.0.1:{}", redis.port)])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{} from\n{said}", output.status);
    assert!(said.contains("REFUSED by the database"), "{said}");
    // The locks really were there: their fences are kept for a while.
    let kept = redis.ask("KEYS lockcore:*:fence").unwrap();
    assert!(kept.contains("orders/0"), "the server has {kept:?}");
}
