//! TLS: certificates of both sides, and what is said when they do not fit.
#![cfg(feature = "tls")]

mod common;

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use common::*;
use lockcore::backend::*;
use lockcore_zk::{ZkBackend, ZkConfig};

/// Makes an authority, and a certificate by it for each name.
struct Authority(tempfile::TempDir);

impl Authority {
    fn new(names: &[&str]) -> Self {
        let this = Self(tempfile::tempdir().unwrap());
        this.openssl(
            &["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=tests"],
            &["-keyout", "ca.key", "-out", "ca.pem"],
        );
        for name in names {
            let (key, csr, pem) = (format!("{name}.key"), format!("{name}.csr"), format!("{name}.pem"));
            let subject = format!("/CN={name}");
            this.openssl(
                &["req", "-newkey", "rsa:2048", "-nodes", "-subj", &subject],
                &["-keyout", &key, "-out", &csr],
            );
            let usage = "subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage=serverAuth,clientAuth\n";
            std::fs::write(this.file("extensions"), usage).unwrap();
            this.openssl(
                &["x509", "-req", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2"],
                &["-in", &csr, "-out", &pem, "-extfile", "extensions"],
            );
        }
        this
    }

    fn openssl(&self, command: &[&str], files: &[&str]) {
        let done = Command::new("openssl")
            .args(command)
            .args(files)
            .current_dir(self.0.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()
            .unwrap_or_else(|error| panic!("openssl: {error}; run: sudo apt-get install openssl"));
        assert!(done.success(), "{command:?}");
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Starts a server that speaks TLS at the second address and wants certificates of this authority there.
    fn server(&self) -> Option<(Server, String)> {
        let read = |name: &str| std::fs::read_to_string(self.file(name)).unwrap();
        std::fs::write(self.file("both.pem"), read("server.key") + &read("server.pem")).unwrap();
        let port = free_port();
        let server = Server::with(&format!(
            "maxSessionTimeout=120000\nsecureClientPort={port}\nsecureClientPortAddress=127.0.0.1\n\
             serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory\n\
             ssl.keyStore.location={}\nssl.keyStore.type=PEM\nssl.trustStore.location={}\nssl.trustStore.type=PEM\n",
            self.file("both.pem").display(),
            self.file("ca.pem").display()
        ))?;
        Some((server, format!("127.0.0.1:{port}")))
    }
}

fn backend(address: &str, ca: &Path, client: Option<(&Path, &Path)>) -> ZkBackend {
    let config = ZkConfig::new([address]).with(|c| {
        c.secure = true;
        c.tls.ca_file = Some(ca.to_owned());
        c.tls.cert_file = client.map(|(cert, _)| cert.to_owned());
        c.tls.key_file = client.map(|(_, key)| key.to_owned());
    });
    ZkBackend::lazy(config).unwrap()
}

#[tokio::test]
async fn both_sides_show_certificates_and_a_wrong_one_gets_no_session() {
    let authority = Authority::new(&["server", "client"]);
    let Some((_server, address)) = authority.server() else { return };
    let (ca, cert, key) =
        (authority.file("ca.pem"), authority.file("client.pem"), authority.file("client.key"));
    let ours = backend(&address, &ca, Some((&cert, &key)));
    eventually("the server serves", async || ours.high_water(&call()).await.is_ok()).await;
    let ttl = Duration::from_secs(5);
    let held = ours.acquire(&call(), &request_of("k", ttl)).await.unwrap();
    let held = ours.renew(&call(), &held, ttl).await.unwrap();
    assert_eq!(ours.release(&call(), &held).await.unwrap(), Released::Now);
    let told = ours.preflight(&call()).await.unwrap().findings;
    assert!(told.iter().any(|finding| finding.contains("unknown behind TLS")), "{told:?}");

    // Without a certificate of its own, or with a server that it does not trust, a client gets no session: nothing of its
    // own was sent. The client library does not say which it was.
    let strangers = Authority::new(&[]);
    for refused in [backend(&address, &ca, None), backend(&address, &strangers.file("ca.pem"), None)] {
        let refused = refused.acquire(&call_of(Duration::from_secs(2)), &request("k")).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused:?}");
    }

    // A file that is not there, or holds something else, is named.
    let missing = backend(&address, Path::new("/nowhere/ca.pem"), None);
    let odd = backend(&address, &key, None);
    for (backend, file) in [(missing, "/nowhere/ca.pem"), (odd, "client.key")] {
        let refused = backend.acquire(&call(), &request("k")).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Misconfigured, "{refused:?}");
        assert!(refused.to_string().contains(file), "{refused:?}");
    }
}
