//! TLS with certificates of the test's own.

use std::{
    path::PathBuf,
    process::{Command, Stdio},
};

use super::*;

/// An authority, and what it signed for a server at 127.0.0.1.
struct Certificates {
    directory: tempfile::TempDir,
}

impl Certificates {
    fn make() -> Self {
        let certificates = Self { directory: tempfile::tempdir().unwrap() };
        let file = |name: &str| certificates.file(name).display().to_string();
        let openssl = |arguments: &[&str]| {
            let run =
                Command::new("openssl").args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).status();
            match run {
                Ok(status) => assert!(status.success(), "openssl {arguments:?}"),
                Err(error) => panic!("openssl: {error}; run: sudo apt-get install openssl"),
            }
        };
        for authority in ["ca", "other"] {
            let subject = format!("/CN={authority}");
            openssl(&[
                "req",
                "-x509",
                "-newkey",
                "rsa:2048",
                "-nodes",
                "-days",
                "2",
                "-subj",
                &subject,
                "-keyout",
                &file(&format!("{authority}.key")),
                "-out",
                &file(&format!("{authority}.pem")),
            ]);
        }
        openssl(&[
            "req",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-subj",
            "/CN=redis",
            "-keyout",
            &file("own.key"),
            "-out",
            &file("own.csr"),
        ]);
        std::fs::write(certificates.file("names"), "subjectAltName=IP:127.0.0.1,DNS:localhost\n").unwrap();
        openssl(&[
            "x509",
            "-req",
            "-days",
            "2",
            "-in",
            &file("own.csr"),
            "-CA",
            &file("ca.pem"),
            "-CAkey",
            &file("ca.key"),
            "-CAcreateserial",
            "-extfile",
            &file("names"),
            "-out",
            &file("own.pem"),
        ]);
        certificates
    }

    fn file(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Starts a server that speaks TLS on a second port; `clients`: whether it wants certificates of them.
    async fn server(&self, clients: &str) -> Option<(Server, u16)> {
        let port = lockcore_conformance::programs::free_port();
        let files = ["own.pem", "own.key", "ca.pem"].map(|name| self.file(name).display().to_string());
        let number = port.to_string();
        let options = [
            "--tls-port",
            &number,
            "--tls-cert-file",
            &files[0],
            "--tls-key-file",
            &files[1],
            "--tls-ca-cert-file",
            &files[2],
            "--tls-auth-clients",
            clients,
        ];
        Some((Server::with(&options).await?, port))
    }
}

#[tokio::test]
async fn a_server_whose_authority_is_known_is_spoken_to_by_tls() {
    let certificates = Certificates::make();
    let Some((server, port)) = certificates.server("no").await else { return };
    let tls = RedisConfig::new("127.0.0.1", port).with(|c| {
        c.tls = true;
        c.ca_file = Some(certificates.file("ca.pem"));
    });
    let backend = RedisBackend::connect(tls.clone()).await.unwrap();
    let lease = backend.acquire(&call(), &request("a")).await.unwrap();
    assert!(server.get("lockcore::{a}:lock").await.is_some());
    // A waiter listens by TLS, too.
    let (call, request) = waiting("a", WATCHDOG);
    let releasing = async {
        server
            .until("somebody listens", async |server| {
                let count: Vec<redis::Value> =
                    server.raw(&["PUBSUB", "NUMSUB", "lockcore::{a}:free"]).await.unwrap();
                count[1] == redis::Value::Int(1)
            })
            .await;
        backend.release(&self::call(), &lease).await
    };
    let (next, released) = in_time(async { tokio::join!(backend.acquire(&call, &request), releasing) }).await;
    assert_eq!(released.unwrap(), Released::Now);
    assert!(next.unwrap().fence > lease.fence);

    let refused =
        RedisBackend::connect(tls.clone().with(|c| c.ca_file = Some(certificates.file("other.pem"))));
    let refused = refused.await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Misconfigured, "{refused}");
    assert!(refused.to_string().contains("not to be believed"), "{refused}");
    let refused = RedisBackend::connect(tls.clone().with(|c| c.ca_file = None)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Misconfigured, "{refused}");
    let refused =
        RedisBackend::connect(tls.clone().with(|c| c.ca_file = Some("/nowhere".into()))).await.unwrap_err();
    assert!(refused.to_string().contains("/nowhere"), "{refused}");
    // TLS to the plain port, and plain words to the port of TLS.
    let mixed = tls.with(|c| {
        c.address = crate::Address::Tcp("127.0.0.1".into(), server.port);
        c.connect_timeout = Duration::from_millis(500);
    });
    let refused = RedisBackend::connect(mixed).await.unwrap_err();
    assert!(matches!(refused.kind(), ErrorKind::Misconfigured | ErrorKind::Unavailable), "{refused}");
    let refused = RedisBackend::connect(RedisConfig::new("127.0.0.1", port)).await.unwrap_err();
    assert!(matches!(refused.kind(), ErrorKind::Misconfigured | ErrorKind::Unavailable), "{refused}");
}

#[tokio::test]
async fn a_server_that_wants_a_certificate_gets_it() {
    let certificates = Certificates::make();
    let Some((_server, port)) = certificates.server("yes").await else { return };
    let without = RedisConfig::new("localhost", port).with(|c| {
        c.tls = true;
        c.ca_file = Some(certificates.file("ca.pem"));
    });
    let refused = RedisBackend::connect(without.clone()).await.unwrap_err();
    assert!(refused.kind().had_no_effect(), "{refused:?}");
    let with = without.with(|c| {
        c.cert_file = Some(certificates.file("own.pem"));
        c.key_file = Some(certificates.file("own.key"));
    });
    let backend = RedisBackend::connect(with).await.unwrap();
    let lease = backend.acquire(&call(), &request("a")).await.unwrap();
    assert_eq!(backend.release(&call(), &lease).await.unwrap(), Released::Now);
}
