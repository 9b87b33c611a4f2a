//! A Redis server of a test's own: on a free port of the loopback, gone with the test.

use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    process::{Child, Command, Stdio},
};

use super::until;

pub(crate) struct Redis {
    process: Child,
    port: u16,
}

impl Redis {
    /// Starts one; `None` if the environment asks in words for no test of Redis.
    pub(crate) fn start() -> Option<Self> {
        if std::env::var("LOCK_TEST_SKIP").is_ok_and(|list| list.split(',').any(|store| store == "redis")) {
            // Past the capture of the test harness, which shows nothing of a test that did not fail.
            let _ = std::io::stderr().write_all(b"not run: a test on Redis: LOCK_TEST_SKIP names redis\n");
            return None;
        }
        let program = std::env::var("LOCK_REDIS_SERVER").unwrap_or_else(|_| "redis-server".into());
        if let Err(error) = Command::new(&program).arg("--version").stdout(Stdio::null()).status() {
            panic!(
                "{program}: {error}; run: sudo apt-get install redis-server (or set LOCK_TEST_SKIP=redis)"
            );
        }
        let server = until("a port that nobody takes meanwhile", || {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            // `setpriv` lets the server die with the thread that started it, should the test be killed.
            let process = Command::new("setpriv")
                .args(["--pdeathsig", "KILL", &program, "--port", &port.to_string(), "--bind", "127.0.0.1"])
                .args(["--save", "", "--appendonly", "no", "--loglevel", "warning", "--dir", "/"])
                .stdout(Stdio::null())
                .spawn()
                .expect("setpriv is a part of util-linux");
            let mut server = Self { process, port };
            until("an answer of the server", || {
                if server.process.try_wait().unwrap().is_some() {
                    return Some(false);
                }
                let itself = format!("process_id:{}\r", server.process.id());
                server.ask("INFO server")?.contains(&itself).then_some(true)
            })
            .then_some(server)
        });
        Some(server)
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}", self.port)
    }

    /// Sends one command past the code under test.
    pub(crate) fn ask(&self, command: &str) -> Option<String> {
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
