//! TLS: certificates of both sides, and what is said when they do not fit.
#![cfg(feature = "tls")]

mod common;

use std::{path::Path, time::Duration};

use common::*;
use lockcore::backend::*;
use lockcore_conformance::authority::Authority;
use lockcore_zk::{ZkBackend, ZkConfig};

/// Starts a server that speaks TLS at the second address and wants certificates of this authority there.
fn secure_server(authority: &Authority) -> Option<(Server, String)> {
    let read = |name: &str| std::fs::read_to_string(authority.file(name)).unwrap();
    std::fs::write(authority.file("both.pem"), read("server.key") + &read("server.pem")).unwrap();
    let port = free_port();
    let server = Server::with(&format!(
        "maxSessionTimeout=120000\nsecureClientPort={port}\nsecureClientPortAddress=127.0.0.1\n\
         serverCnxnFactory=org.apache.zookeeper.server.NettyServerCnxnFactory\n\
         ssl.keyStore.location={}\nssl.keyStore.type=PEM\nssl.trustStore.location={}\nssl.trustStore.type=PEM\n",
        authority.file("both.pem").display(),
        authority.file("ca.pem").display()
    ))?;
    Some((server, format!("127.0.0.1:{port}")))
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
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new(dir.path(), &["server", "client"]);
    let Some((_server, address)) = secure_server(&authority) else { return };
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
    let elsewhere = tempfile::tempdir().unwrap();
    let strangers = Authority::new(elsewhere.path(), &[]);
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
