//! `migrate`: the whole way between two stores and back, with processes in the way.

use std::fs;

mod stage;
use stage::{Actor, Stage, until};

fn file(stage: &Stage, phase: &str) {
    let text = format!(
        "namespace = \"shop\"\n[backend]\nold = \"sqlite://{old}\"\nnew = \"sqlite://{new}\"\n\
         [bridge.moving]\nfrom = \"old\"\nto = \"new\"\nphase = \"{phase}\"\nmembership = \"2s\"\n\
         [risk.own]\nbackend = \"moving\"\nttl = \"1s\"\n",
        old = stage.path("old.db").display(),
        new = stage.path("new.db").display(),
    );
    fs::write(stage.path(&format!("{phase}.toml")), text).unwrap();
}

fn staged() -> Stage {
    let stage = Stage::new();
    for phase in ["from", "both", "to"] {
        file(&stage, phase);
    }
    stage
}

/// Runs a script under the lock `a` in a phase.
fn run(stage: &Stage, phase: &str, script: &str) -> Actor {
    let config = stage.path(&format!("{phase}.toml"));
    Actor::of(stage.bare(&["run", "--config", config.to_str().unwrap(), "a", "--", "sh", "-c", script]))
}

fn migrate(stage: &Stage, arguments: &[&str]) -> stage::Answer {
    let config = stage.path("from.toml");
    let mut all = vec!["migrate"];
    all.extend(arguments);
    all.extend(["-c", config.to_str().unwrap()]);
    stage::Answer::of(stage.bare(&all).output().unwrap())
}

fn fence(stage: &Stage, phase: &str) -> i64 {
    run(stage, phase, "echo $LOCK_FENCE").end().stdout.trim().parse().unwrap()
}

#[test]
fn the_way_there_and_back_and_fences_that_only_grow() {
    let stage = staged();
    let plan = migrate(&stage, &["plan"]);
    assert_eq!(plan.code, 0, "{plan:?}");
    assert!(plan.stdout.contains("from+both") && plan.stdout.contains("suit both stores"), "{plan:?}");
    let status = migrate(&stage, &["--json", "status", "moving"]).json();
    assert_eq!((&status["schema"], &status["stage"]), (&"lockctl/migrate/1".into(), &"plain".into()));
    run(&stage, "from", "true").end().says(116, "lockctl migrate advance moving");
    migrate(&stage, &["rollback"]).says(125, "nothing before it");

    let mut last = 0;
    let mut grows = |phase: &str| {
        let next = fence(&stage, phase);
        assert!(next > last, "{next} in phase {phase} after {last}");
        last = next;
    };
    let mut go = |way: &str, to: &str, phases: &[&str]| {
        let dry = migrate(&stage, &[way, "--dry-run"]);
        assert!(dry.stdout.contains(&format!("to {to}; nothing was changed")), "{dry:?}");
        let record = stage.path("record.jsonl");
        let taken = migrate(
            &stage,
            &["--json", way, "--wait", "30s", "--reason", "a test", "--record", record.to_str().unwrap()],
        );
        let step = taken.json();
        assert_eq!((&step["after"], &step["reason"]), (&to.into(), &"a test".into()), "{step}");
        for phase in phases.iter().chain(phases) {
            grows(phase);
        }
    };
    go("advance", "from", &["from"]);
    go("advance", "from+both", &["from", "both"]);
    go("advance", "both", &["both"]);
    go("advance", "both+to", &["both", "to"]);
    go("advance", "to", &["to"]);
    migrate(&stage, &["advance"]).says(125, "nothing beyond it");
    run(&stage, "both", "true").end().says(116, "is not open");
    go("rollback", "both+to", &["to", "both"]);
    go("rollback", "both", &["both"]);
    go("rollback", "from+both", &["both", "from"]);
    go("rollback", "from", &["from"]);
    run(&stage, "to", "true").end().says(116, "is not open");
    let lines = fs::read_to_string(stage.path("record.jsonl")).unwrap();
    assert_eq!(lines.lines().count(), 9, "{lines}");
    // The old store alone, without the bridge.
    let plain = stage
        .bare(&["run", "--namespace", "shop", "a", "--", "sh", "-c", "echo $LOCK_FENCE"])
        .env("LOCKCTL_STORE", format!("sqlite://{}", stage.path("old.db").display()))
        .output()
        .unwrap();
    let plain: i64 = String::from_utf8(plain.stdout).unwrap().trim().parse().unwrap();
    assert!(plain > last, "{plain} after {last}");
}

#[test]
fn who_is_in_the_way_is_named_and_waited_for() {
    let stage = staged();
    for _ in 0..2 {
        assert_eq!(migrate(&stage, &["advance"]).code, 0);
    }
    let holder = run(&stage, "from", "echo $$ > holding; while [ ! -e go ]; do sleep 0.01; done");
    stage.wait_for("holding");
    let dry = migrate(&stage, &["advance", "--dry-run"]);
    assert_eq!(dry.code, 111, "{dry:?}");
    assert!(dry.stdout.contains("in the way: from"), "{dry:?}");
    let settled = migrate(&stage, &["--json", "status"]).json();
    assert_eq!(
        (&settled["stage"], &settled["settled"]),
        (&"from+both".into(), &true.into()),
        "a dry run changed it"
    );

    migrate(&stage, &["advance"]).says(111, "in a phase that closes");
    let begun = migrate(&stage, &["--json", "status"]).json();
    assert_eq!((&begun["stage"], &begun["settled"]), (&"both".into(), &false.into()));
    assert_eq!(begun["members"][0]["phase"], "from");
    migrate(&stage, &["advance", "--wait", "300ms"]).says(112, "in a phase that closes");
    // Closed for others, and taken back.
    run(&stage, "from", "true").end().says(116, "is not open");
    assert!(migrate(&stage, &["rollback"]).stdout.contains("-> from+both"));
    let config = stage.path("from.toml");
    let waiting =
        Actor::of(stage.bare(&["migrate", "advance", "--wait", "forever", "-c", config.to_str().unwrap()]));
    until("the step is under way", || {
        (migrate(&stage, &["--json", "status"]).json()["settled"] == false).then_some(())
    });
    stage.go();
    assert_eq!(holder.end().code, 0);
    let done = waiting.end();
    assert!(done.code == 0 && done.stdout.contains("-> both"), "{done:?}");
}

#[test]
fn a_bridge_that_is_not_there_is_refused_with_what_is() {
    let stage = staged();
    migrate(&stage, &["status", "mooving"]).says(125, "has no bridge \"mooving\"; it has moving");
    stage::Answer::of(stage.bare(&["migrate", "status"]).output().unwrap()).says(125, "--config");
    let config = stage.path("both.toml");
    let shown = stage::Answer::of(
        stage.bare(&["config", "show", "--config", config.to_str().unwrap()]).output().unwrap(),
    );
    assert!(
        shown.stdout.contains("bridge moving from sqlite://") && shown.stdout.contains("phase both"),
        "{shown:?}"
    );
}

#[test]
fn two_addresses_do_where_there_is_no_file() {
    let stage = Stage::new();
    let url = |name: &str| format!("sqlite://{}", stage.path(name).display());
    let (old, new) = (url("old.db"), url("new.db"));
    let ask =
        |words: &[&str]| stage::Answer::of(stage.bare(&[&["migrate"], words].concat()).output().unwrap());
    let stores = ["moving", "--from", &old, "--to", &new, "--namespace", "shop"];
    let status = || ask(&[&["--json", "status"], &stores[..]].concat()).json();
    assert_eq!(status()["stage"], "plain");
    assert!(ask(&[&["advance"], &stores[..]].concat()).stdout.contains("plain -> from"));
    let after = status();
    assert_eq!((&after["stage"], &after["from"], &after["to"]), (&"from".into(), &old.into(), &new.into()));
    // One without the other, a password in the open, and a namespace that nobody named.
    ask(&["status", "moving", "--to", "sqlite:///x.db", "--namespace", "shop"]).says(125, "--from");
    ask(&["status", "moving", "--from", "sqlite:///x.db", "--to", "sqlite:///y.db"]).says(125, "--namespace");
    let secret =
        ["status", "moving", "--from", "redis://:secret@h", "--to", "sqlite:///y.db", "--namespace", "shop"];
    let refused = ask(&secret);
    assert!(!refused.stderr.contains("secret"), "{refused:?}");
    refused.says(125, "--from holds a password");
}

#[test]
fn the_page_for_operators_works_as_it_is_written() {
    let files = tempfile::tempdir().unwrap();
    let url = |name: &str| format!("sqlite://{}", files.path().join(name).display());
    follow_the_page(&url("old.db"), &url("new.db"));
}

#[cfg(feature = "etcd")]
#[test]
fn the_page_for_operators_works_from_redis_to_etcd_and_back() {
    let (Some(redis), Some(etcd)) = (stage::redis::Redis::start(), stage::etcd::Etcd::start()) else {
        return;
    };
    follow_the_page(&redis.url(), &etcd.url());
}

/// Runs the operator's page as it is written, on other addresses: its file, and then its commands in their order.
fn follow_the_page(old: &str, new: &str) {
    let page = include_str!("../../docs/migrate.md");
    let blocks = |kind: &str| -> Vec<String> {
        let begin = format!("```{kind}\n");
        page.split(&begin).skip(1).map(|rest| rest.split("```").next().unwrap().to_owned()).collect()
    };
    let stage = Stage::new();
    let config = stage.path("locks.toml");
    let mut text = blocks("toml").concat();
    for (written, here) in
        [("redis://redis-a:6379/0", old), ("etcd://etcd-1:2379,etcd-2:2379,etcd-3:2379", new)]
    {
        assert!(text.contains(written), "{text}");
        text = text.replace(written, here);
    }
    fs::write(&config, text).unwrap();
    fs::create_dir(stage.path("bin")).unwrap();
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_lockctl"), stage.path("bin/lockctl")).unwrap();
    let mut shell = stage.program("sh");
    let path = format!("{}:{}", stage.path("bin").display(), std::env::var("PATH").unwrap());
    shell.env("PATH", path).env("LOCKCTL_CONFIG", &config).args(["-e", "-u", "-c", &blocks("sh").concat()]);
    let ran = stage::Answer::of(shell.output().unwrap());
    assert_eq!(ran.code, 0, "{ran:?}");
    let last: serde_json::Value = serde_json::from_str(ran.stdout.lines().last().unwrap()).unwrap();
    assert_eq!((&last["stage"], &last["settled"]), (&"from".into(), &true.into()), "{ran:?}");
    let steps = fs::read_to_string(stage.path("steps.jsonl")).unwrap();
    assert_eq!(steps.lines().count(), 5, "{steps}");
    assert!(steps.contains("leaving Redis"), "{steps}");
}
