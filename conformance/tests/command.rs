//! The command: exit statuses, and what it prints.

#![forbid(unsafe_code)]

use std::{
    path::PathBuf,
    process::{Command, Output},
};

use lockcore_conformance::history::{Demand, History, Rules};

fn conformance(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_conformance")).args(arguments).output().unwrap()
}

fn scratch(name: &str, text: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{}-{name}", std::process::id()));
    std::fs::write(&path, text).unwrap();
    path
}

const HEADER: &str = r#"{"schema":"lockcore-history","version":1,"clock":"boot","pid":1}"#;

/// Alice gets fence 5 and releases it; then Bob gets the other.
fn history(second: i64) -> String {
    let mut text = format!("{HEADER}\n");
    let grant = |client: &str, fence: i64, ms: u64| {
        let (ts, ok, deadline) = (ms * 1_000_000, (ms + 1) * 1_000_000, (ms + 300) * 1_000_000);
        format!(
            r#"{{"ts":{ts},"pid":1,"client":"{client}","key":"order/42","op":"{client}","ev":"invoke","verb":"acquire","owner":"{fence:016x}","ttl":300000000}}
{{"ts":{ok},"pid":1,"client":"{client}","key":"order/42","op":"{client}","ev":"ok","fence":{fence},"owner":"{fence:016x}","deadline":{deadline}}}
"#
        )
    };
    text.push_str(&grant("alice", 5, 1000));
    text.push_str(concat!(
        r#"{"ts":1010000000,"pid":1,"client":"alice","key":"order/42","op":"r","ev":"invoke","verb":"release","fence":5}"#,
        "\n",
        r#"{"ts":1011000000,"pid":1,"client":"alice","key":"order/42","op":"r","ev":"ok","released":true}"#,
        "\n"
    ));
    text.push_str(&grant("bob", second, 1020));
    text
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn a_good_history_passes() {
    let good = scratch("good.jsonl", &history(6));
    let output = conformance(&["check", good.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    assert!(text(&output.stdout).starts_with("passed: 6 events of 1 name, 2 grants, 0 renewals, 1 release"));
    std::fs::remove_file(good).unwrap();
}

#[test]
fn a_bad_history_fails_and_says_why() {
    let bad = scratch("bad.jsonl", &history(3));
    let svg = bad.with_extension("svg");
    let output = conformance(&["check", bad.to_str().unwrap(), "--text", "--svg", svg.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    let page = text(&output.stdout);
    assert!(
        page.contains("S1 fence order, order/42: bob began to acquire at +0.020000 s and got fence 3"),
        "{page}"
    );
    assert!(page.contains("┏ ·  alice  is granted fence 5, until +0.300000 s"), "{page}");
    assert!(std::fs::read_to_string(&svg).unwrap().contains("Timeline of order/42"));

    let output = conformance(&["check", bad.to_str().unwrap(), "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["outcome"], "fail");
    assert_eq!(
        (&report["violations"][0]["property"], &report["judged"]["grants"]),
        (&"S1".into(), &2.into())
    );
    assert_eq!(report["violations"][0]["events"][0]["fence"], 5);
    std::fs::remove_file(bad).unwrap();
    std::fs::remove_file(svg).unwrap();
}

#[test]
fn expectations_turn_a_verdict() {
    let bad = scratch("expected.jsonl", &history(3));
    let good = scratch("unexpected.jsonl", &history(6));
    let status = |file: &PathBuf, arguments: &[&str]| {
        let mut all = vec!["check", file.to_str().unwrap()];
        all.extend(arguments);
        conformance(&all).status.code()
    };
    assert_eq!(status(&bad, &["--breaks", "S1"]), Some(0));
    assert_eq!(status(&good, &["--breaks", "S1"]), Some(1), "a break that did not come is a failure");
    assert_eq!(status(&bad, &["--may", "s1"]), Some(0));
    assert_eq!(status(&good, &["--may", "s1"]), Some(0));
    assert_eq!(status(&bad, &["--skip", "S1"]), Some(0));
    assert_eq!(status(&bad, &["--skip", "S2"]), Some(1));
    std::fs::remove_file(bad).unwrap();
    std::fs::remove_file(good).unwrap();
}

#[test]
fn the_recorders_own_rules_apply_unless_others_are_given() {
    let mut recorded = History::parse(&history(6)).unwrap();
    recorded.headers[0].rules = Some(Box::new(Rules::default().demand(Demand::Renewals(1))));
    let strict = scratch("strict.jsonl", &recorded.to_text());
    let output = conformance(&["check", strict.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("not seen: 1 confirmed renewals were to be seen, 0 were"));
    let mild = scratch("mild.json", "{}");
    let output = conformance(&["check", strict.to_str().unwrap(), "--rules", mild.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    std::fs::remove_file(strict).unwrap();
    std::fs::remove_file(mild).unwrap();
}

#[test]
fn files_of_several_processes_are_judged_together() {
    let whole = history(3);
    let lines: Vec<&str> = whole.lines().collect();
    let first = scratch("first.jsonl", &format!("{}\n", lines[..5].join("\n")));
    let second = scratch("second.jsonl", &format!("{HEADER}\n{}\n", lines[5..].join("\n")));
    assert_eq!(conformance(&["check", first.to_str().unwrap()]).status.code(), Some(0));
    assert_eq!(conformance(&["check", second.to_str().unwrap()]).status.code(), Some(0));
    let both = conformance(&["check", second.to_str().unwrap(), first.to_str().unwrap()]);
    assert_eq!(both.status.code(), Some(1));
    std::fs::remove_file(first).unwrap();
    std::fs::remove_file(second).unwrap();
}

#[test]
fn missing_events_are_inconclusive() {
    let gap =
        format!("{}{}\n", history(6), r#"{"ts":1030000000,"pid":1,"client":"bob","ev":"missed","count":7}"#);
    let gap = scratch("gap.jsonl", &gap);
    let output = conformance(&["check", gap.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stdout).contains("at least 7 events are missing"));
    std::fs::remove_file(gap).unwrap();
}

#[test]
fn wrong_use_has_a_status_of_its_own_and_says_what_is_wrong() {
    let good = scratch("use.jsonl", &history(6));
    let file = good.to_str().unwrap();
    let torn = scratch("torn.jsonl", &format!("{HEADER}\n{{\"ts\":1}}\n{{}}\n"));
    for (arguments, says) in [
        (vec![], "Usage"),
        (vec!["check"], "<FILE>"),
        (vec!["check", "/no/such/file"], "/no/such/file: "),
        (vec!["check", torn.to_str().unwrap()], "line 2"),
        (vec!["check", file, "--breaks", "S99"], "S99"),
        (vec!["check", file, "--key", "nobody"], "no event is about \"nobody\""),
        (vec!["check", file, "--rules", file], "use.jsonl"),
        (vec!["check", file, "--loss-notice", "250"], "250ms"),
        (vec!["check", file, "--svg", "/no/such/dir/x.svg"], "/no/such/dir/x.svg"),
    ] {
        let output = conformance(&arguments);
        assert_eq!(output.status.code(), Some(125), "{arguments:?}");
        assert!(text(&output.stderr).contains(says), "{arguments:?}: {}", text(&output.stderr));
    }
    assert_eq!(conformance(&["--help"]).status.code(), Some(0));
    std::fs::remove_file(good).unwrap();
    std::fs::remove_file(torn).unwrap();
}
