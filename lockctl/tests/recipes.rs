//! The recipes of the README, taken from it and run.

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    process::Command,
};

mod stage;
use stage::{Actor, Stage};

const README: &str = include_str!("../README.md");

/// Returns the code blocks of one kind.
fn blocks(kind: &str) -> Vec<String> {
    let mut blocks = Vec::new();
    let mut lines = README.lines();
    while let Some(line) = lines.next() {
        if line == format!("```{kind}") {
            let block: Vec<&str> = lines.by_ref().take_while(|line| *line != "```").collect();
            blocks.push(block.join("\n"));
        }
    }
    blocks
}

/// Returns the one block of a kind that mentions a word.
fn block(kind: &str, word: &str) -> String {
    let mut found: Vec<String> = blocks(kind).into_iter().filter(|block| block.contains(word)).collect();
    assert_eq!(found.len(), 1, "the README has {} {kind} blocks with {word:?}", found.len());
    found.remove(0)
}

/// A machine with what the recipes expect: lockctl on the path, a shop, a database client that says what it got.
fn shop() -> Stage {
    let stage = Stage::new();
    for directory in ["bin", "opt"] {
        fs::create_dir(stage.path(directory)).unwrap();
    }
    symlink(env!("CARGO_BIN_EXE_lockctl"), stage.path("bin/lockctl")).unwrap();
    let program = |name: &str, text: &str| {
        fs::write(stage.path(name), format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(stage.path(name), fs::Permissions::from_mode(0o755)).unwrap();
    };
    program("opt/report.sh", r#"echo "${LOCK_NAME-none} ${LOCK_STAMP-none}" >> reports"#);
    program("opt/scheduler", r#"echo "$LOCK_NAME" > scheduled"#);
    program("bin/psql", r#"echo "$@" > psql"#);
    // What the recipe asks of jq, in case that is not installed.
    program("bin/jq", r#"sed -n 's/.*"stamp":"\([^"]*\)".*/\1/p'"#);
    stage
}

/// Prepares a program of a recipe: the shop's directory is a temporary one.
fn prepare(stage: &Stage, words: &[&str]) -> Command {
    let opt = stage.path("opt");
    let mut command = stage.program("env");
    let path = format!("{}:{}", stage.path("bin").display(), std::env::var("PATH").unwrap());
    command.env("PATH", path).env("LOCKCTL_STORE", stage.url());
    command.args(words.iter().map(|word| word.replace("/opt/shop", opt.to_str().unwrap())));
    command
}

fn script(stage: &Stage, text: &str) -> Command {
    prepare(stage, &["sh", "-c", text])
}

#[test]
fn cron_runs_the_report_and_is_quiet_when_somebody_else_does() {
    let stage = shop();
    let line = block("cron", "lockctl");
    let recipe = line.split_once("* * *").unwrap().1.trim();
    Actor::of(script(&stage, recipe)).end().is_silent(0);
    assert!(stage.wait_for("reports").starts_with("nightly/report "));
    let holder = Actor::of(script(
        &stage,
        "lockctl run nightly/report -- sh -c 'echo x > holding; while [ ! -e go ]; do sleep 0.01; done'",
    ));
    stage.wait_for("holding");
    Actor::of(script(&stage, recipe)).end().is_silent(0);
    stage.go();
    holder.end().is_silent(0);
    assert_eq!(stage.wait_for("reports").lines().count(), 1, "the report ran without the lock");
}

#[test]
fn systemd_starts_the_scheduler_and_lists_the_codes_that_a_restart_does_not_help() {
    let stage = shop();
    let unit = block("ini", "ExecStart");
    let value = |key: &str| unit.lines().find_map(|line| line.strip_prefix(key)).unwrap().to_owned();
    let start = value("ExecStart=");
    let mut run = prepare(&stage, &start.split(' ').collect::<Vec<_>>());
    run.env("RUNTIME_DIRECTORY", stage.path("runtime"));
    Actor::of(run).end().is_silent(0);
    assert_eq!(stage.wait_for("scheduled"), "leader/scheduler\n");
    assert_eq!(value("KillMode="), "mixed");
    assert_eq!(value("RestartPreventExitStatus="), "116 125 127");
}

#[test]
fn kubernetes_runs_the_command_with_the_store_of_the_secret() {
    let stage = shop();
    let job = block("yaml", "command:");
    let words = job.lines().find_map(|line| line.trim().strip_prefix("command: ")).unwrap();
    let words: Vec<String> = serde_json::from_str(words).unwrap();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let mut run = prepare(&stage, &words);
    run.env("KUBERNETES_SERVICE_HOST", "10.0.0.1");
    Actor::of(run).end().is_silent(0);
    assert_eq!(stage.wait_for("reports").lines().count(), 1);
    // Without the secret nothing runs.
    let mut run = prepare(&stage, &words);
    run.env("KUBERNETES_SERVICE_HOST", "10.0.0.1").env_remove("LOCKCTL_STORE");
    Actor::of(run).end().says(125, "excludes nobody outside it");
    assert_eq!(stage.wait_for("reports").lines().count(), 1);
}

#[test]
fn a_script_asks_before_it_commits_and_hands_the_stamp_on() {
    let stage = shop();
    let recipe = block("sh", "lockctl check");
    Actor::of(prepare(&stage, &["lockctl", "run", "stock", "--", "sh", "-c", &recipe])).end().is_silent(0);
    let psql = stage.wait_for("psql");
    assert!(psql.starts_with("-v stamp=") && psql.ends_with(" -f publish.sql\n"), "{psql:?}");
    fs::remove_file(stage.path("psql")).unwrap();
    // A lease that is too short for what comes next.
    let short = prepare(&stage, &["lockctl", "run", "--ttl", "4s", "stock", "--", "sh", "-c", &recipe]);
    Actor::of(short).end().says(113, "and 5s are needed");
    assert!(!stage.path("psql").exists(), "committed without asking");
}

#[test]
fn a_job_hears_at_once_that_the_lock_is_over() {
    let stage = shop();
    let recipe = block("sh", "LOCK_LOSS_FD");
    Actor::of(prepare(&stage, &["lockctl", "run", "a", "--", "sh", "-c", &recipe])).end().is_silent(0);
    assert_eq!(stage.wait_for("reports").lines().count(), 1);
    // The same with a step that does not end by itself, in a job that heeds no TERM.
    let slow = recipe.replace("/opt/shop/report.sh", "echo x > slow; sleep 600");
    let slow = format!("trap '' TERM\n{slow}");
    let run = Actor::of(prepare(&stage, &["lockctl", "run", "--ttl", "2s", "a", "--", "sh", "-c", &slow]));
    stage.wait_for("slow");
    assert_eq!(stage.ask(&["break", "a", "--anyone", "--reason", "a test"]).code, 0);
    let answer = run.end();
    assert_eq!(answer.code, 113);
    assert!(answer.stderr.contains("the lock is over\n"), "{answer:?}");
}

#[test]
fn a_lock_of_a_holder_that_is_gone_is_broken() {
    let stage = shop();
    let holder = Actor::of(script(
        &stage,
        "lockctl run --ttl 10m nightly/report -- sh -c 'echo x > holding; sleep 600'",
    ));
    stage.wait_for("holding");
    holder.signal(rustix::process::Signal::KILL);
    let answer = Actor::of(script(&stage, &block("sh", "lockctl break"))).end();
    assert_eq!(answer.code, 0, "{answer:?}");
    Actor::of(prepare(&stage, &["lockctl", "run", "nightly/report", "--", "true"])).end().is_silent(0);
}

#[test]
fn the_first_example_runs() {
    let stage = shop();
    let first = &blocks("sh")[0];
    Actor::of(script(&stage, first)).end().is_silent(0);
    assert_eq!(stage.wait_for("reports").lines().count(), 1);
}
