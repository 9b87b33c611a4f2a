//! An etcd server of a test's own: on free ports of the loopback, gone with the test.

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    process::{Child, Command, Stdio},
    time::Duration,
};

use super::until;

pub(crate) struct Etcd {
    process: Child,
    port: u16,
    _directory: tempfile::TempDir,
}

impl Etcd {
    /// Starts one; `None` if the environment asks in words for no test of etcd.
    pub(crate) fn start() -> Option<Self> {
        if std::env::var("LOCK_TEST_SKIP").is_ok_and(|list| list.split(',').any(|store| store == "etcd")) {
            // Past the capture of the test harness, which shows nothing of a test that did not fail.
            let _ = std::io::stderr().write_all(b"not run: a test on etcd: LOCK_TEST_SKIP names etcd\n");
            return None;
        }
        if let Err(error) = Command::new("etcd").arg("--version").stdout(Stdio::null()).status() {
            panic!("etcd: {error}; run: sudo apt-get install etcd-server (or set LOCK_TEST_SKIP=etcd)");
        }
        let server = until("ports that nobody takes meanwhile", || {
            let free = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let (port, peer, directory) = (free(), free(), tempfile::tempdir().unwrap());
            let (client, peer) = (format!("http://127.0.0.1:{port}"), format!("http://127.0.0.1:{peer}"));
            // `setpriv` lets the server die with the thread that started it, should the test be killed.
            let process = Command::new("setpriv")
                .args(["--pdeathsig", "KILL", "etcd", "--unsafe-no-fsync"])
                .args(["--heartbeat-interval", "30", "--election-timeout", "300"])
                .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
                .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
                .args(["--initial-cluster", &format!("default={peer}"), "--data-dir"])
                .arg(directory.path().join("data"))
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .expect("setpriv is a part of util-linux");
            let mut server = Self { process, port, _directory: directory };
            until("an answer of the server", || {
                if server.process.try_wait().unwrap().is_some() {
                    return Some(false);
                }
                server.health()?.contains("true").then_some(true)
            })
            .then_some(server)
        });
        Some(server)
    }

    pub(crate) fn url(&self) -> String {
        format!("etcd://127.0.0.1:{}", self.port)
    }

    fn health(&self) -> Option<String> {
        let mut line = TcpStream::connect(("127.0.0.1", self.port)).ok()?;
        line.set_read_timeout(Some(Duration::from_secs(2))).ok()?;
        line.write_all(b"GET /health HTTP/1.0\r\n\r\n").ok()?;
        let mut answer = String::new();
        line.read_to_string(&mut answer).ok()?;
        Some(answer)
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
