//! `compare`: stores that run already, side by side, and nothing left behind.
#![cfg(feature = "compare")]

use std::{fs, net::TcpListener, path::Path};

mod stage;
use rustix::process::Signal;
use stage::{Actor, Answer, Stage, redis::Redis, until};

/// Cases that take no time.
const QUICK: [&str; 6] = ["--only", "acquire::a0", "--only", "ownership::b0", "--only", "servers::"];

fn compare(stage: &Stage, words: &[&str]) -> Answer {
    let mut all = vec!["compare"];
    all.extend(words);
    Actor::of(stage.bare(&all)).end()
}

/// What is in the store, past the code under test.
fn rows(path: &Path) -> i64 {
    let db = rusqlite::Connection::open(path).unwrap();
    db.query_row("SELECT count(*) FROM lockcore_leases", [], |row| row.get(0)).unwrap()
}

#[test]
fn a_baseline_that_matches_is_0_and_one_that_differs_is_1() {
    let Some(server) = Redis::start() else { return };
    let stage = Stage::new();
    let stores = [format!("redis={}", server.url()), format!("sqlite={}", stage.url())];
    let mut words = vec!["--store", &*stores[0], "--store", &*stores[1], "--baseline", "stores.baseline"];
    words.extend(QUICK);
    let with = |more: &[&str]| compare(&stage, &[&words, more].concat());

    with(&[]).says(125, "stores.baseline");
    let first = with(&["--update"]);
    assert_eq!(first.code, 0, "{first:?}");
    let baseline = fs::read_to_string(stage.path("stores.baseline")).unwrap();
    let lines: Vec<&str> = baseline.lines().skip(1).collect();
    assert!(lines.is_sorted() && lines.len() > 20, "{baseline}");
    for cell in [
        " · acquire · a02_contended_try = holds",
        " · ownership · b05_a_release_after_a_takeover_ends_nothing = holds",
    ] {
        assert_eq!(
            lines.iter().filter(|line| line.ends_with(cell)).count(),
            2,
            "{cell} is not twice in {baseline}"
        );
    }
    let of = |store: &str| lines.iter().filter(|line| line.starts_with(store)).count();
    assert!(of("redis/") > 0 && of("sqlite/3.") > 0, "no column has a version: {baseline}");

    let same = with(&[]);
    assert_eq!((same.code, &*same.stderr), (0, ""), "{same:?}");
    for part in ["Exclusion", "holds", "redis/", "sqlite/3."] {
        assert!(same.stdout.contains(part), "{part:?} is not in {same:?}");
    }
    assert_eq!(server.ask("DBSIZE").unwrap(), ":0\r\n", "records are left in Redis");
    assert_eq!(rows(&stage.path("locks.db")), 0, "records are left in SQLite");

    let changed = baseline.replacen("a02_contended_try = holds", "a02_contended_try = unsupported", 1);
    fs::write(stage.path("stores.baseline"), changed).unwrap();
    let differs = with(&["--out", "out"]);
    assert_eq!(differs.code, 1, "{differs:?}");
    assert!(
        differs.stdout.contains("acquire::a02_contended_try: changed: unsupported -> holds"),
        "{differs:?}"
    );
    for name in ["report.json", "junit.xml", "SEMANTICS.md", "index.html"] {
        assert!(stage.path("out").join(name).exists(), "{name} was not written");
    }
    // Kept by store and version of its server.
    let results = fs::read_dir(stage.path("out").join("results")).unwrap();
    let names: Vec<_> = results.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert!(
        names.iter().any(|name| name.starts_with("redis@")),
        "the results of Redis are not among {names:?}"
    );
    let summary = stage.path("summary");
    let mut github = stage.bare(&[&["compare"][..], &words, &["--format", "github"]].concat());
    github.env("GITHUB_STEP_SUMMARY", &summary);
    let github = Actor::of(github).end();
    assert_eq!(github.code, 1, "{github:?}");
    assert!(github.stdout.contains("::error file=stores.baseline,title=redis/"), "{github:?}");
    assert!(fs::read_to_string(summary).unwrap().contains("unsupported -> holds"));

    // A case that this file has never seen is new and no change; a store that was not asked is one.
    let fewer: String =
        baseline.lines().filter(|line| !line.contains("a02_")).map(|l| format!("{l}\n")).collect();
    fs::write(stage.path("stores.baseline"), fewer).unwrap();
    let new = with(&["--json"]);
    assert_eq!(new.code, 0, "{new:?}");
    let whole = new.json();
    assert_eq!(whole["backends"].as_array().unwrap().len(), 2);
    let runs = whole["backends"][0]["cases"].as_array().unwrap();
    let restart = runs.iter().find(|run| run["topic"] == "servers").unwrap();
    assert_eq!(
        (&restart["verdict"], &restart["reason"]),
        (&"not run".into(), &"needs control of the server".into())
    );
    let alone: Vec<&str> =
        ["--store", &*stores[1], "--baseline", "stores.baseline"].into_iter().chain(QUICK).collect();
    let alone = compare(&stage, &alone);
    assert_eq!(alone.code, 1, "{alone:?}");
    assert!(alone.stdout.contains("redis: not run, and stores.baseline has it"), "{alone:?}");
}

#[test]
fn a_store_that_cannot_be_asked_is_115_and_the_others_are_played() {
    let stage = Stage::new();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let stores = [format!("away=redis://127.0.0.1:{port}"), format!("sqlite={}", stage.url())];
    let answer = compare(&stage, &["--store", &stores[0], "--store", &stores[1], "--only", "acquire::a0"]);
    answer.says(115, "away: ");
    assert!(answer.stdout.contains("sqlite/3."), "{answer:?}");
}

#[test]
fn an_interrupt_leaves_nothing_in_the_store() {
    let Some(server) = Redis::start() else { return };
    let stage = Stage::new();
    // The cases that hold leases for long, so that one is held when the signal comes.
    let store = format!("redis={}", server.url());
    let words = ["compare", "--store", &store, "--ttl", "20s", "--only", "expiry::", "--only", "renewal::"];
    let run = Actor::of(stage.bare(&words));
    let held = || server.ask("KEYS lockcore:scratch-compare-*:lock").unwrap();
    until("a lease of a case", || (held() != "*0\r\n").then_some(()));
    run.signal(Signal::INT);
    let answer = run.end();
    answer.says(130, "interrupted");
    assert_eq!(
        server.ask("DBSIZE").unwrap(),
        ":0\r\n",
        "records are left: {}",
        server.ask("KEYS *").unwrap()
    );
}

#[test]
fn wrong_use_is_told_before_any_store_is_asked() {
    let stage = Stage::new();
    let url = stage.url();
    let named = format!("a={url}");
    for (words, says) in [
        (&["--store", &*url][..], "a store has a name before its address"),
        (&["--store", &*named, "--store", &*named], "two stores are called \"a\""),
        (&["--store", &*named, "--only", "nothing-like-this"], "no case has \"nothing-like-this\""),
        (&["--store", "a=redis://u:s3cret@h/0"], "holds a password"),
        (&["--store", "a b=redis://h"], "the name \"a b\""),
        (&["--store", "main"], "name one with --config"),
        (&["--store", &*named, "--baseline", "missing"], "missing"),
        (&["--store", &*named, "--update"], "--baseline"),
        (&[], "--store"),
    ] {
        let answer = compare(&stage, words);
        answer.says(125, says);
        assert!(!answer.stderr.contains("s3cret"), "{answer:?}");
    }
    assert!(!stage.path("locks.db").exists(), "a store was opened");
}

/// The commands of the page, taken from it and run, on stores of the test's own and with few cases.
#[test]
fn the_commands_of_the_page_run() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/compare.md");
    // A copy of this package alone has none.
    let Ok(page) = fs::read_to_string(page) else { return };
    let Some(server) = Redis::start() else { return };
    let stage = Stage::new();
    let file = "namespace = \"shop\"\n[backend]\nredis = \"redis://redis-a:6379\"\nsqlite = \"sqlite:///var/lib/shop/locks.db\"\n";
    let mine = |text: &str| {
        let only = ["lockctl compare", &QUICK[..2].join(" ")].join(" ");
        let text = text.replace("redis://redis-a:6379", &server.url());
        text.replace("sqlite:///var/lib/shop/locks.db", &stage.url()).replace("lockctl compare", &only)
    };
    fs::write(stage.path("locks.toml"), mine(file)).unwrap();
    let mut blocks = 0;
    for block in page.split("```sh\n").skip(1) {
        let script = mine(block.split("```").next().unwrap());
        let mut shell = stage.program("sh");
        let road = format!("{}:{}", stage.directory().display(), std::env::var("PATH").unwrap());
        let _ = std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_lockctl"), stage.path("lockctl"));
        shell.args(["-euc", &script]).env("PATH", road);
        let answer = Actor::of(shell).end();
        assert_eq!(answer.code, 0, "{script}\n{answer:?}");
        blocks += 1;
    }
    assert!(blocks >= 5, "the page has {blocks} blocks");
}
