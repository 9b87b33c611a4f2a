//! TLS: certificates of both sides, and what is said when they do not fit.
#![cfg(feature = "tls")]

mod common;

use std::{path::Path, sync::Arc, time::Duration};

use common::{Member, *};
use lockcore::backend::*;
use lockcore_conformance::authority::Authority;
use lockcore_etcd::{EtcdBackend, EtcdConfig};

/// Starts a server that speaks TLS and wants certificates of this authority.
fn secure_server(authority: &Authority, dir: &Path) -> Option<Member> {
    if is_skipped() {
        return None;
    }
    let path = |name: &str| authority.file(name).into_os_string().into_string().unwrap();
    let (cert, key, ca) = (path("server.pem"), path("server.key"), path("ca.pem"));
    let flags = ["--cert-file", &cert, "--key-file", &key, "--trusted-ca-file", &ca, "--client-cert-auth"];
    Some(Member::spawn_secure(dir, &flags))
}

fn backend(url: &str, ca: &Path, client: Option<(&Path, &Path)>) -> Arc<EtcdBackend> {
    let config = EtcdConfig::new([url]).with(|c| {
        c.tls.ca_file = Some(ca.to_owned());
        c.tls.cert_file = client.map(|(cert, _)| cert.to_owned());
        c.tls.key_file = client.map(|(_, key)| key.to_owned());
    });
    Arc::new(EtcdBackend::lazy(config).unwrap())
}

#[tokio::test]
async fn both_sides_show_certificates_and_a_wrong_one_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let authority = Authority::new(dir.path(), &["server", "client"]);
    let Some(server) = secure_server(&authority, dir.path()) else { return };
    let (ca, cert, key) =
        (authority.file("ca.pem"), authority.file("client.pem"), authority.file("client.key"));
    let ours = backend(&server.url, &ca, Some((&cert, &key)));
    serves(&ours).await;
    let held = ours.acquire(&call(), &request("k")).await.unwrap();
    let held = ours.renew(&call(), &held, Duration::from_secs(5)).await.unwrap();
    assert_eq!(ours.release(&call(), &held).await.unwrap(), Released::Now);

    // Without a certificate of its own a client is not served; what it sent came to nothing, but it cannot know.
    let nameless = backend(&server.url, &ca, None);
    let refused = nameless.acquire(&call_of(Duration::from_secs(2)), &request("k")).await.unwrap_err();
    assert!(matches!(refused.kind(), ErrorKind::Unknown | ErrorKind::Unavailable), "{refused:?}");

    // A server of another authority is not trusted, which no waiting cures.
    let elsewhere = tempfile::tempdir().unwrap();
    let strangers = Authority::new(elsewhere.path(), &[]);
    let wary = backend(&server.url, &strangers.file("ca.pem"), Some((&cert, &key)));
    let refused = wary.acquire(&call_of(Duration::from_secs(2)), &request("k")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Misconfigured, "{refused:?}");

    // A file that is not there, or holds something else, is named.
    let missing = backend(&server.url, Path::new("/nowhere/ca.pem"), None);
    let refused = missing.acquire(&call(), &request("k")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Misconfigured, "{refused:?}");
    assert!(format!("{refused:?}").contains("/nowhere/ca.pem"), "{refused:?}");
    let odd = backend(&server.url, &ca, Some((&ca, &ca)));
    let refused = odd.acquire(&call(), &request("k")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Misconfigured, "{refused:?}");

    // Plain text to a port that speaks TLS is no grant either.
    let plain = EtcdBackend::lazy(EtcdConfig::new([server.url.replace("https", "http")])).unwrap();
    let refused = plain.acquire(&call_of(Duration::from_secs(2)), &request("k")).await.unwrap_err();
    assert!(matches!(refused.kind(), ErrorKind::Unknown | ErrorKind::Unavailable), "{refused:?}");
}
