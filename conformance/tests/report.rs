//! `conformance report`: what it writes, and its exit statuses.

#![forbid(unsafe_code)]

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};

use serde_json::{Value, json};

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("report-{name}"));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(path.join("results")).unwrap();
        Self(path)
    }

    fn lane(&self, profile: &str, verdicts: &[(&str, &str)]) {
        let time = json!({ "what": "hand-off", "unit": "ms", "count": 1, "least": 1.0, "median": 1.0, "greatest": 1.0 });
        let cases: Vec<Value> = verdicts
            .iter()
            .map(|(name, verdict)| {
                json!({
                    "id": &name[..3], "topic": "faults", "name": name, "promise": "A | promise <b>.", "rows": ["removal"],
                    "needs": ["Wire"], "expected": verdict, "verdict": verdict, "reason": "no & wire\u{1b}", "seconds": 0.5,
                    "measures": [time], "evidence": { "stale": 2, "breaks": ["S2 exclusion: both believed"] },
                    "history": null,
                })
            })
            .collect();
        let lane = json!({
            "schema": "lockcore-conformance-results", "version": 1, "suite": "0.1.0", "profile": profile,
            "server": "Store 7.0.1", "column": format!("{profile}/7.0"), "date": "2026-11-30T12:00:00Z", "seed": 7,
            "seconds": 2.5, "ttl_ms": 600.0, "virtual_time": false,
            "promises": { "fence": "durable", "wake_up": "push", "fair": true }, "cases": cases,
        });
        std::fs::write(self.0.join(format!("results/{profile}.json")), lane.to_string()).unwrap();
    }

    fn report(&self, more: &[&str]) -> Output {
        let results = self.0.join("results");
        Command::new(env!("CARGO_BIN_EXE_conformance"))
            .args(["report", "--results", results.to_str().unwrap()])
            .args(more)
            .output()
            .unwrap()
    }

    fn read(&self, name: &str) -> String {
        std::fs::read_to_string(self.0.join(name)).unwrap()
    }
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

#[test]
fn all_four_files_are_written_and_say_the_same() {
    let folder = Folder::new("files");
    folder.lane("one", &[("j08_removed", "breaks (S2)"), ("j09_full", "not run")]);
    folder.lane("two", &[("j08_removed", "holds"), ("j09_full", "unsupported")]);
    let output = folder.report(&[]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    let headline = "one/7.0: Two clients can hold the lock after its record was removed; the resource refused 2 of 2 stale \
                    writes. The fence is part of what the store keeps; waiters are told, in order of arrival. 1 of 2 \
                    cases were not run.";
    assert!(said.contains(headline), "{said}");
    let report: Value = serde_json::from_str(&folder.read("report.json")).unwrap();
    assert_eq!((&report["schema"], &report["version"]), (&json!("lockcore-conformance-report"), &json!(1)));
    let cells = report["backends"][0]["cells"].as_array().unwrap();
    let cell = cells.iter().find(|cell| cell["row"] == "removal").unwrap();
    assert_eq!((&cell["verdict"], &cell["besides"]), (&json!("breaks (S2)"), &json!(["1 not run"])));
    assert_eq!(report["backends"][0]["counts"], json!({ "breaks": 1, "not run": 1 }));
    assert_eq!(cells.len(), report["rows"].as_array().unwrap().len());
    let semantics = folder.read("SEMANTICS.md");
    assert!(semantics.contains("**breaks (S2)**, 1 not run"), "{semantics}");
    assert!(semantics.contains("A \\| promise &lt;b>."), "{semantics}");
    let junit = folder.read("junit.xml");
    assert!(junit.contains("<skipped message=\"not run: no &amp; wire\u{fffd}\"/>"), "{junit}");
    assert!(
        junit.contains("<testsuite name=\"one/7.0\" tests=\"2\" failures=\"0\" errors=\"0\" skipped=\"1\""),
        "{junit}"
    );
    assert!(folder.read("index.html").contains("data-open=\"one-7-0--removal\""));
}

#[test]
fn a_failure_is_status_1() {
    let folder = Folder::new("failure");
    folder.lane("one", &[("j08_removed", "FAILS")]);
    let output = folder.report(&[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stdout).contains("1 case FAILS."), "{}", text(&output.stdout));
    assert!(folder.read("junit.xml").contains("<failure message="));
}

#[test]
fn the_golden_copy_is_made_kept_and_compared() {
    let folder = Folder::new("golden");
    let golden = folder.0.join("GOLDEN.md");
    let with = ["--golden", golden.to_str().unwrap()];
    let update = [&with[..], &["--update"]].concat();
    folder.lane("one", &[("j08_removed", "breaks (S2)"), ("j09_full", "holds")]);
    folder.lane("two", &[("j08_removed", "holds")]);
    assert_eq!(folder.report(&with).status.code(), Some(125), "a golden copy that is not there");
    assert_eq!(folder.report(&update).status.code(), Some(0));
    assert_eq!(folder.report(&with).status.code(), Some(0), "{}", folder.read("GOLDEN.md"));

    // A promise that is kept all at once is a change, like one that is not.
    folder.lane("one", &[("j08_removed", "holds"), ("j09_full", "not run"), ("j10_more", "holds")]);
    let changed = folder.report(&with);
    assert_eq!(changed.status.code(), Some(1));
    let said = text(&changed.stdout);
    for expected in [
        "faults::j08_removed\n    - breaks (S2)\n    + holds",
        "faults::j09_full\n    - holds\n    + not run: no & wire",
        "2 cells have changed",
        "faults::j10_more\n    + holds",
    ] {
        assert!(said.contains(expected), "{expected}: {said}");
    }

    // A profile that left nothing was not run, and that is no pass.
    folder.lane("one", &[("j08_removed", "breaks (S2)"), ("j09_full", "holds")]);
    std::fs::remove_file(folder.0.join("results/two.json")).unwrap();
    let missing = folder.report(&with);
    assert_eq!(missing.status.code(), Some(1));
    assert!(text(&missing.stdout).contains("two: not run"), "{}", text(&missing.stdout));

    folder.lane("one", &[("j08_removed", "FAILS")]);
    let before = folder.read("GOLDEN.md");
    let refused = folder.report(&update);
    assert_eq!(refused.status.code(), Some(125));
    assert!(text(&refused.stderr).contains("one::faults::j08_removed fails"), "{}", text(&refused.stderr));
    assert_eq!(folder.read("GOLDEN.md"), before);
}

#[test]
fn wrong_use_says_what_is_wrong() {
    let folder = Folder::new("use");
    let empty = folder.report(&[]);
    assert_eq!(empty.status.code(), Some(125));
    assert!(text(&empty.stderr).contains("no results are here"), "{}", text(&empty.stderr));
    for (content, says) in [
        ("{", "these are not results of a lane"),
        (r#"{"version":1}"#, "these are not results of a lane"),
        (r#"{"version":2}"#, "written in version 2 of the form"),
    ] {
        std::fs::write(folder.0.join("results/one.json"), content).unwrap();
        let wrong = folder.report(&[]);
        assert_eq!(wrong.status.code(), Some(125));
        assert!(text(&wrong.stderr).contains(says), "{}", text(&wrong.stderr));
    }
    assert_eq!(folder.report(&["--update"]).status.code(), Some(125), "an update of nothing");
}

/// Adds the names of all fields below a value.
fn fields<'a>(value: &'a Value, names: &mut Vec<&'a str>) {
    match value {
        Value::Object(map) => {
            for (name, value) in map {
                names.push(name);
                // These have words for names.
                if name != "counts" {
                    fields(value, names);
                }
            }
        }
        Value::Array(list) => list.iter().for_each(|value| fields(value, names)),
        _ => {}
    }
}

#[test]
fn the_readme_names_every_field() {
    let folder = Folder::new("fields");
    folder.lane("one", &[("j08_removed", "breaks (S2)")]);
    let kills = json!({
        "schema": "lockcore-conformance-kills", "version": 1, "suite": "0.1.0", "date": "2026-11-30T12:00:00Z",
        "cases": ["j08_removed"], "mutants": [{ "mutant": "Broken", "killed_by": ["j08_removed"] }],
    });
    std::fs::write(folder.0.join("kills.json"), kills.to_string()).unwrap();
    assert_eq!(folder.report(&[]).status.code(), Some(0));
    let report: Value = serde_json::from_str(&folder.read("report.json")).unwrap();
    let mut names = Vec::new();
    fields(&report, &mut names);
    assert!(names.contains(&"killed_by") && names.contains(&"ttl_step_ms"), "{names:?}");
    let readme = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    let section = readme.split("### report.json").nth(1).and_then(|rest| rest.split("\n## ").next()).unwrap();
    let described =
        |name: &&&str| section.contains(&format!("`{name}")) || section.contains(&format!("[].{name}"));
    let unnamed: Vec<_> = names.iter().filter(|name| !described(name)).collect();
    assert!(unnamed.is_empty(), "fields that conformance/README.md does not describe: {unnamed:?}");
}
