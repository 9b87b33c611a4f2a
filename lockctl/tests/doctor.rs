//! `doctor`: what a look at the stores finds, and what it costs the levels.

use std::{fs, net::TcpListener};

mod stage;
use stage::{Actor, Stage, redis::Redis};

#[test]
fn a_store_that_is_named_is_looked_at_alone() {
    let stage = Stage::new();
    let answer = stage.ask(&["doctor"]);
    assert_eq!((answer.code, &*answer.stderr), (0, ""), "{answer:?}");
    for part in [&*stage.url(), "SQLite 3.", "single-server store"] {
        assert!(answer.stdout.contains(part), "{part:?} is not in {answer:?}");
    }
    let whole = stage.ask(&["doctor", "--json"]).json();
    assert_eq!((&whole["schema"], &whole["code"]), (&"lockctl/doctor/1".into(), &0.into()));
    let store = &whole["stores"][0];
    assert_eq!(store["store"], stage.url());
    assert_eq!(store["promises"]["consistency"], "single-server");
    assert!(store["findings"].is_array() && store["levels"] == serde_json::json!([]), "{store}");
}

#[test]
fn a_finding_says_how_to_put_it_right() {
    let Some(redis) = Redis::start() else { return };
    let (stage, url) = (Stage::new(), redis.url());
    let remedy = "set maxmemory-policy noeviction";
    let before = stage.ask(&["doctor", "--store", &url]);
    assert!(before.code == 0 && !before.stdout.contains(remedy), "{before:?}");
    redis.ask("CONFIG SET maxmemory 100mb").unwrap();
    redis.ask("CONFIG SET maxmemory-policy allkeys-lru").unwrap();
    let answer = stage.ask(&["doctor", "--store", &url]);
    assert_eq!((answer.code, &*answer.stderr), (0, ""), "{answer:?}");
    assert!(answer.stdout.contains(remedy), "{answer:?}");
    assert!(answer.stdout.contains("replicated store"), "the finding lowered nothing: {answer:?}");
    let whole = stage.ask(&["doctor", "--json", "--store", &url]).json();
    let store = &whole["stores"][0];
    assert!(store["server"].as_str().is_some_and(|server| server.contains(' ')), "{store}");
    let findings = store["findings"].as_array().unwrap();
    assert!(findings.iter().any(|finding| finding.as_str().unwrap().contains(remedy)), "{store}");
    assert_eq!(redis.ask("DBSIZE").unwrap(), ":0\r\n", "a look left something");
}

#[test]
fn every_store_of_the_file_is_looked_at_also_when_one_is_away() {
    let stage = Stage::new();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let away = format!("redis://127.0.0.1:{port}");
    let file = |critical: &str| {
        let text = format!(
            "namespace = \"shop\"\n[backend]\naway = \"{away}\"\nmain = \"{}\"\n[risk.efficiency]\nbackend = \"away\"\n\
             [risk.guarded]\nbackend = \"main\"\nmax-hold = \"1h\"\n{critical}",
            stage.url()
        );
        fs::write(stage.path("locks.toml"), text).unwrap();
        // The option names the file, and nothing in the environment names a store.
        |words: &[&str]| Actor::of(stage.bare(words)).end()
    };
    let answer = file("")(&["doctor", "-c", "locks.toml"]);
    assert_eq!((answer.code, &*answer.stderr), (115, ""), "{answer:?}");
    let lines: Vec<&str> = answer.stdout.lines().collect();
    assert_eq!(lines[0], format!("away: {away}"));
    assert!(lines[1].starts_with("  unreachable "), "{answer:?}");
    assert!(answer.stdout.contains("guarded: kept"), "{answer:?}");

    // One file on one machine is no majority.
    let critical = "[risk.critical]\nbackend = \"main\"\nttl = \"15s\"\nmax-hold = \"10m\"\n";
    let ask = file(critical);
    let answer = ask(&["doctor", "-c", "locks.toml"]);
    assert_eq!(answer.code, 116, "{answer:?}");
    assert!(answer.stdout.contains("critical: not kept: consistency: needs Linearizable"), "{answer:?}");
    let whole = ask(&["doctor", "-c", "locks.toml", "--json"]).json();
    let stores = whole["stores"].as_array().unwrap();
    assert_eq!(stores.len(), 2);
    assert!(stores[0]["error"].is_string() && stores[0]["levels"][0]["kept"].is_null(), "{whole}");
    let level = |name: &str| {
        let levels = stores[1]["levels"].as_array().unwrap();
        levels.iter().find(|level| level["level"] == name).unwrap()["kept"].clone()
    };
    assert_eq!((level("guarded"), level("critical")), (true.into(), false.into()));
    ask(&["doctor", "-c", "missing.toml"]).says(125, "missing.toml");
}

#[test]
fn a_level_on_a_bridge_is_judged_by_the_weaker_side_and_by_the_phase() {
    let stage = Stage::new();
    let text = format!(
        "namespace = \"shop\"\n[backend]\nold = \"sqlite://{old}\"\nnew = \"sqlite://{new}\"\n\
         [bridge.moving]\nfrom = \"old\"\nto = \"new\"\nphase = \"from\"\n\
         [risk.guarded]\nbackend = \"moving\"\nmax-hold = \"1h\"\n\
         [risk.critical]\nbackend = \"moving\"\nttl = \"15s\"\nmax-hold = \"10m\"\n",
        old = stage.path("old.db").display(),
        new = stage.path("new.db").display(),
    );
    fs::write(stage.path("locks.toml"), text).unwrap();
    let ask = |words: &[&str]| Actor::of(stage.bare(&[words, &["-c", "locks.toml"]].concat())).end();
    let closed = ask(&["doctor"]);
    assert_eq!(closed.code, 116, "{closed:?}");
    let why = "guarded: not kept: the phase `from` is not open: the migration is at plain";
    assert!(closed.stdout.contains(why), "{closed:?}");
    assert!(closed.stdout.contains("bridge moving from sqlite://"), "{closed:?}");

    assert_eq!(ask(&["migrate", "advance"]).code, 0);
    let open = ask(&["doctor"]);
    assert_eq!(open.code, 116, "{open:?}");
    assert!(open.stdout.contains("guarded: kept"), "{open:?}");
    assert!(open.stdout.contains("critical: not kept: consistency: needs Linearizable"), "{open:?}");
    let one = ask(&["doctor", "--risk", "guarded"]);
    assert!(one.code == 0 && one.stdout.contains("guarded: kept"), "{one:?}");
    let whole = ask(&["doctor", "--json"]).json();
    let bridge = whole["stores"].as_array().unwrap().iter().find(|store| store["name"] == "moving").unwrap();
    assert_eq!(bridge["levels"][1]["kept"], true, "{bridge}");
    let members = ask(&["--json", "migrate", "status"]).json()["members"].clone();
    assert_eq!(members, serde_json::json!([]), "a look joined the phase");
}

/// The file and the answers of the page about levels, taken from it.
#[test]
fn the_page_about_levels_says_what_the_commands_say() {
    let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/choose.md");
    // A copy of this package alone has none.
    let Ok(page) = fs::read_to_string(page) else { return };
    let block = |kind: &str, n: usize| {
        let text = page.split(&format!("```{kind}\n")).nth(n + 1).expect("the page has the block");
        text.split("```").next().unwrap().to_owned()
    };
    let (stage, file) = (Stage::new(), block("toml", 0));
    let check = |text: &str| {
        fs::write(stage.path("locks.toml"), text).unwrap();
        stage.ask(&["config", "check", "locks.toml"])
    };
    let well = check(&file);
    assert_eq!((well.code, well.stdout.as_str(), well.stderr.as_str()), (0, "", ""), "{well:?}");
    let mistakes = [
        file.replace("max-hold = \"1h\"", "max_hold = \"1h\""),
        file.replace("backend = \"cache\"", "backend = \"cash\""),
    ];
    for (mistake, line) in mistakes.iter().zip(block("text", 0).lines()) {
        let answer = check(mistake);
        assert!(answer.code == 125 && answer.stdout.contains(line), "{line:?} is not in {answer:?}");
    }

    let disk =
        |level: &str| format!("[risk.{level}]\nbackend = \"disk\"\nttl = \"30s\"\nmax-hold = \"1h\"\n");
    let file = format!(
        "namespace = \"shop\"\n[backend]\ndisk = \"{}\"\n{}{}",
        stage.url(),
        disk("guarded"),
        disk("critical")
    );
    fs::write(stage.path("locks.toml"), file).unwrap();
    let answer = stage.bare(&["doctor", "-c", "locks.toml"]).output().unwrap();
    let said = String::from_utf8(answer.stdout).unwrap();
    assert_eq!(answer.status.code(), Some(116), "{said}");
    for line in block("text", 1).lines() {
        assert!(said.contains(line), "{line:?} is not in\n{said}");
    }
}
