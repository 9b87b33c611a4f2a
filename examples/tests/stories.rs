//! Every story runs, says what it is there to say, and ends well.

use std::process::Command;

fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    let said = String::from_utf8(output.stdout).unwrap();
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{} from\n{said}{complained}", output.status);
    said
}

/// Asserts that the lines come in this order, with anything between them.
#[track_caller]
fn assert_tells(said: &str, lines: &[&str]) {
    let mut rest = said;
    for line in lines {
        match rest.find(line) {
            Some(at) => rest = &rest[at + line.len()..],
            None => panic!("{line:?} is missing, or too early, in\n{said}"),
        }
    }
}

#[test]
fn one_of_n_runs_the_job_once() {
    let said = run(env!("CARGO_BIN_EXE_one_of_n"), &[]);
    assert_eq!(said.matches("not tonight, machine-").count(), 2, "{said}");
    assert_tells(&said, &["builds the report under fence", ": done", "1 report from 3 machines"]);
}

#[test]
fn order_scanner_closes_each_order_once_and_refuses_the_late_one() {
    let said = run(env!("CARGO_BIN_EXE_order_scanner"), &[]);
    assert_tells(&said, &["closed 30, then 0; stock 30", "late: stale fence 1.00000000000000aa"]);
}

#[test]
fn two_locks_in_order_are_never_waited_for_in_a_circle() {
    let said = run(env!("CARGO_BIN_EXE_two_locks"), &[]);
    assert_tells(&said, &["moved 12 boxes", "moved 12 boxes", "east 50, west 50"]);
}

#[test]
fn risk_levels_choose_the_store_and_refuse_one_that_promises_too_little() {
    let said = run(env!("CARGO_BIN_EXE_risk_levels"), &[]);
    assert_tells(
        &said,
        &[
            "[risk.guarded]",
            "efficiency: drew 1",
            "guarded: order/42 under fence",
            "still held",
            "critical: ",
            "scratch",
        ],
    );
}

#[test]
fn leader_steps_down_in_order_and_terms_grow() {
    let said = run(env!("CARGO_BIN_EXE_leader"), &[]);
    assert_tells(
        &said,
        &["ann: leads", "-- ann", "ann: steps down", "leads", "-- an operator breaks", "leads", "terms ["],
    );
}

#[test]
fn job_takeover_goes_on_where_the_first_worker_stopped() {
    let said = run(env!("CARGO_BIN_EXE_job_takeover"), &[]);
    assert_tells(
        &said,
        &[
            "ann: step 2",
            "-- ann stops in step 3",
            "bob: begins after step 2",
            "bob: step 6",
            "ann: stale fence",
        ],
    );
}

#[test]
fn order_demo_shows_the_refusal_and_what_happens_without_it() {
    let said = run(env!("CARGO_BIN_EXE_order_demo"), &["--orders", "120", "--ttl", "800ms"]);
    assert_tells(
        &said,
        &["is frozen (SIGSTOP)", "wakes up (SIGCONT)", "REFUSED by the database", "without the fence"],
    );
}

#[test]
fn migrate_demo_moves_there_and_back_and_breaks_no_promise() {
    let said = run(env!("CARGO_BIN_EXE_migrate_demo"), &["--workers", "3", "--ttl", "800ms"]);
    assert_tells(
        &said,
        &[
            "stage from+both",
            "falls asleep in phase `from`",
            "stage both+to",
            "the move is over",
            "the phase `from` of the migration \"moving\" is not open",
            "and back",
            "back on the old store",
            "double holds                   0",
            "fences that went back          0",
            "writes of live holders refused 0",
            "processes sent away            1",
        ],
    );
}

#[test]
fn migrate_demo_without_the_bridge_has_two_holders() {
    let said = run(env!("CARGO_BIN_EXE_migrate_demo"), &["--naive", "--workers", "6"]);
    assert_tells(&said, &["did not exclude each other"]);
}
