//! Fences on an etcd server.
#![cfg(feature = "etcd")]

mod stage;
use stage::{Stage, etcd::Etcd};

#[test]
fn fence_seed_brings_the_base_of_the_namespace_up_to_the_clock() {
    let Some(etcd) = Etcd::start() else { return };
    let (stage, url) = (Stage::new(), etcd.url());
    let store = ["--store", &url, "--namespace", "shop"];
    let fence = |name: &str| -> i64 {
        let script = ["--", "sh", "-c", "echo $LOCK_FENCE"];
        let ran = stage.ask(&[&["run"], &store[..], &[name], &script[..]].concat());
        ran.stdout.trim().parse().unwrap_or_else(|_| panic!("{ran:?}"))
    };
    let before = fence("a");
    let seeded = stage.ask(&[&["--json", "fence", "--seed"], &store[..]].concat()).json();
    let floor: i64 = seeded["floor"].as_str().unwrap().parse().unwrap();
    assert!(floor > before, "{floor} is not above {before}");
    for name in ["a", "never locked before"] {
        assert!(fence(name) > floor, "{name} is below {floor}");
    }
    // The name that stands for all leaves no lock behind.
    let listed = stage.ask(&[&["list"], &store[..]].concat());
    assert!(!listed.stdout.contains("seed"), "{listed:?}");
}
