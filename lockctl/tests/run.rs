//! `run` and `check` on a real store: exit codes, loss, waiting, and what the command gets.

use std::{fs, os::unix::ffi::OsStrExt, path::PathBuf, time::Duration};

use lockcore::backend::{BootClock, Moment};
use rustix::process::{Signal, kill_process};

mod stage;
use stage::{Actor, Stage, is_gone, until};

#[test]
fn the_code_of_the_command_is_passed_on_and_nothing_is_said() {
    let stage = Stage::new();
    for code in [0, 1, 7, 113, 255] {
        stage.run(&[], &format!("exit {code}")).end().is_silent(code);
    }
    stage.run(&[], "kill -9 $$").end().is_silent(137);
    stage.run(&[], "kill -TERM $$").end().is_silent(143);
    assert!(!stage.is_held(), "the lock was not given back");
}

#[test]
fn stdout_belongs_to_the_command() {
    let stage = Stage::new();
    let answer = stage.run(&[], "echo out; echo err >&2").end();
    assert_eq!((answer.code, &*answer.stdout, &*answer.stderr), (0, "out\n", "err\n"));
}

#[test]
fn arguments_are_passed_on_byte_for_byte() {
    let stage = Stage::new();
    let answer = stage.ask(&["run", "a", "--ttl", "5s", "--", "printf", "%s\\n", "-v", "--ttl", "a b"]);
    assert_eq!((answer.code, &*answer.stdout, &*answer.stderr), (0, "-v\n--ttl\na b\n", ""));
    let mut command = stage.lockctl(&["run", "a", "--", "printf", "%s"]);
    command.arg(std::ffi::OsStr::from_bytes(b"\xff\xfe"));
    assert_eq!(command.output().unwrap().stdout, b"\xff\xfe");
}

#[test]
fn a_missing_command_is_127_and_a_plain_file_126() {
    let stage = Stage::new();
    stage.ask(&["run", "a", "--", "no-such-command"]).says(127, "\"no-such-command\": command not found");
    fs::write(stage.path("plain"), "not a program").unwrap();
    stage.ask(&["run", "a", "--", "./plain"]).says(126, "cannot execute \"./plain\"");
    assert!(!stage.is_held(), "the lock was not given back");
}

#[test]
fn a_busy_lock_is_111_and_names_its_holder_and_the_store() {
    let stage = Stage::new();
    let holder = stage.hold(&["--label", "web-3"]);
    let busy = stage.run(&[], "echo x > ran").end();
    busy.says(111, "\"a\" is held by web-3");
    assert!(busy.stderr.contains(&stage.url()), "{busy:?}");
    stage.run(&["-E", "0"], "echo x > ran").end().is_silent(0);
    assert_eq!(stage.run(&["-E", "42"], "echo x > ran").end().code, 42);
    stage.run(&["-q"], "echo x > ran").end().is_silent(111);
    stage.go();
    holder.end().is_silent(0);
    assert!(!stage.path("ran").exists(), "a command ran without the lock");
}

#[test]
fn nobody_who_waited_in_vain_runs() {
    let stage = Stage::new();
    let holder = stage.hold(&[]);
    let start = BootClock::read();
    let waiters: Vec<_> = (0..20).map(|_| stage.run(&["--wait", "500ms"], "echo x > ran")).collect();
    let mut in_vain = 0;
    for waiter in waiters {
        let answer = waiter.end();
        // On a busy machine the store may answer one of twenty too late: then the outcome is unknown, and not a wait in
        // vain. Neither is a lock.
        assert!(matches!(answer.code, 112 | 115), "{answer:?}");
        in_vain += usize::from(answer.code == 112);
    }
    assert!(in_vain > 10, "only {in_vain} of 20 waited in vain");
    assert!(start.until(BootClock::read()) >= Duration::from_millis(500), "gave up earlier than was asked");
    stage.run(&["--wait", "2s"], "echo x > ran").end().says(112, "waited in vain; \"a\" is held by ");
    stage.run(&["--wait", "2s", "-E", "0"], "echo x > ran").end().is_silent(0);
    stage.go();
    holder.end().is_silent(0);
    assert!(!stage.path("ran").exists(), "a command ran without the lock");
}

#[test]
fn a_waiter_runs_when_the_holder_is_done_also_through_an_outage_of_the_store() {
    let stage = Stage::new();
    let holder = stage.hold(&[]);
    let mut waiter = stage.run(&["--wait", "50s"], "echo ran");
    let cut = stage.cut();
    // Longer than any single exchange with the store is allowed to take.
    let later = BootClock::read().saturating_add(Duration::from_millis(5500));
    until("the outage's end", || (BootClock::read() > later).then_some(()));
    assert!(waiter.is_running(), "the waiter gave up: {:?}", waiter.end());
    drop(cut);
    stage.go();
    holder.end().is_silent(0);
    let answer = waiter.end();
    assert_eq!((answer.code, &*answer.stdout, &*answer.stderr), (0, "ran\n", ""));
}

#[test]
fn a_broken_lock_is_113_even_if_the_command_ends_with_0() {
    let stage = Stage::new();
    let script = r#"trap "exit 0" TERM; echo x > ready; while :; do sleep 0.01; done"#;
    let run = stage.run(&["--ttl", "2s"], script);
    stage.wait_for("ready");
    assert_eq!(stage.ask(&["break", "a", "--anyone", "--reason", "a test"]).code, 0);
    run.end().says(113, "an operator broke the lock; somebody else may have run at the same time");
}

#[test]
fn a_loss_that_shows_at_the_release_is_113() {
    let stage = Stage::new();
    let script = r#""$LOCKCTL" break a --anyone --reason "a test" > broken"#;
    stage.run(&["--ttl", "60s", "--pass-config"], script).end().says(113, "lost \"a\"");
    assert!(fs::read_to_string(stage.path("broken")).unwrap().contains("broke \"a\""));
}

#[test]
fn a_holder_without_its_store_is_dead_before_its_deadline_and_ends_with_114() {
    let stage = Stage::new();
    // Ignores TERM, so that only KILL ends it; its grandchild has left the group.
    let script = r#"
        trap "" TERM
        setsid sh -c 'trap "" TERM; echo $$ > detached; while :; do sleep 0.01; done' &
        echo "$LOCK_STATE" > state; echo $$ > leader; while :; do sleep 0.01; done"#;
    let run = stage.run(&["--ttl", "3s"], script);
    let (leader, detached) = (stage.pid("leader"), stage.pid("detached"));
    let state = PathBuf::from(stage.wait_for("state").trim());
    let cut = stage.cut();
    // No renewal can be confirmed any more; the last one that was may still be on its way into the file.
    let mut deadline = deadline_in(&state).unwrap();
    until("the death of the command", || {
        deadline = deadline_in(&state).unwrap_or(deadline);
        (is_gone(leader) && is_gone(detached)).then_some(())
    });
    let dead_at = BootClock::read();
    assert!(dead_at < deadline, "the command lived {:?} past its deadline", deadline.until(dead_at));
    run.end().says(114, "the command was stopped before that: run it again");
    drop(cut);
}

fn deadline_in(state: &std::path::Path) -> Option<Moment> {
    let state: serde_json::Value = serde_json::from_slice(&fs::read(state).ok()?).unwrap();
    Some(Moment::from_nanos(state["deadline_ns"].as_str()?.parse().unwrap()))
}

#[test]
fn a_holder_without_its_store_never_overlaps_with_the_next() {
    let stage = Stage::new();
    let script = r#"trap "" TERM; echo x > ready; while :; do cat /proc/uptime >> first; sleep 0.01; done"#;
    let run = stage.run(&["--ttl", "2s"], script);
    stage.wait_for("ready");
    let cut = stage.cut();
    let next = stage.run(&["--wait", "50s"], "cat /proc/uptime > second");
    let answer = run.end();
    drop(cut);
    assert_eq!(answer.code, 114, "{answer:?}");
    next.end().is_silent(0);
    let uptime = |line: &str| line.split(' ').next().unwrap().parse::<f64>().unwrap();
    let (first, second) = (stage.wait_for("first"), stage.wait_for("second"));
    let last = first.lines().rfind(|line| line.contains(' ')).unwrap();
    assert!(uptime(last) < uptime(&second), "both ran at once: {last:?} and {second:?}");
}

#[test]
fn a_store_that_cannot_be_asked_is_115_and_nothing_runs() {
    let stage = Stage::new();
    stage.run(&[], "true").end().is_silent(0);
    let cut = stage.cut();
    stage.run(&[], "echo x > ran").end().says(115, &stage.url());
    drop(cut);
    assert!(!stage.path("ran").exists());
}

#[test]
fn a_store_that_is_not_one_is_refused_with_116() {
    let stage = Stage::new();
    fs::write(stage.path("locks.db"), "this is no database, and long enough to show it").unwrap();
    stage.run(&[], "echo x > ran").end().says(116, "locks.db");
    assert!(!stage.path("ran").exists());
}

#[test]
fn the_hold_limit_stops_the_command_with_117() {
    let stage = Stage::new();
    let start = BootClock::read();
    let run = stage.run(&["--max-hold", "500ms"], r#"echo "$LOCK_HOLD_UNTIL" > until; sleep 600"#);
    run.end().says(117, "after its longest hold of 500ms");
    assert!(start.until(BootClock::read()) >= Duration::from_millis(500), "stopped earlier than was asked");
    let limit = stage.wait_for("until");
    assert!(limit.len() == 21 && limit.ends_with("Z\n") && limit.contains('T'), "{limit:?} is not RFC 3339");
    assert!(!stage.is_held());
}

#[test]
fn wrong_use_is_125_and_says_what_is_right() {
    let stage = Stage::new();
    for (arguments, sentence) in [
        (&["run", "a"][..], "were not provided"),
        (&["run", "a", "true"], "unexpected argument"),
        (&["run", "--", "true"], "NAME"),
        (&["nonsense"], "nonsense"),
        (&["run", "--wait", "10", "a", "--", "true"], "write \"10s\" for seconds"),
        (&["run", "--ttl", "x", "a", "--", "true"], "--ttl"),
        (&["run", "--ttl", "10ms", "a", "--", "true"], "write 200ms or more"),
        (&["run", "--ttl", "10s", "--kill-after", "9s", "a", "--", "true"], "at most half of it"),
        (&["run", "a//b", "--", "true"], "\"a//b\""),
        (&["run", "-E", "256", "a", "--", "true"], "256"),
        (&["run", "--store", "redis://u:s3cret@h", "a", "--", "true"], "--password-file"),
        (&["run", "--store", "nosuch://host", "a", "--", "true"], "\"nosuch\" is not compiled in"),
        (&["run", "--risk", "guarded", "--store", "sqlite:///x", "a", "--", "true"], "--store and --risk"),
        (&["run", "--max-hold", "0", "a", "--", "true"], "nothing could run"),
        (&["run", "--config", "/nonexistent", "a", "--", "true"], "cannot read the configuration file"),
        (&["run", "--store", "sqlite://locks.db", "a", "--", "true"], "sqlite:///"),
        (&["break", "a", "--expect", "42", "--reason", "x"], "is not a stamp"),
    ] {
        let answer = stage.ask(arguments);
        answer.says(125, sentence);
        assert!(!answer.stderr.contains("s3cret"), "{answer:?}");
        assert_eq!(answer.stdout, "");
    }
    let mut command = stage.lockctl(&["run"]);
    command.arg(std::ffi::OsStr::from_bytes(b"a\xff")).args(["--", "true"]);
    Actor::of(command).end().says(125, "not UTF-8");
    assert!(!stage.path("locks.db").exists(), "a store was opened for a wrong call");
}

#[test]
fn the_default_store_is_refused_in_a_container() {
    let stage = Stage::new();
    let mut command = stage.bare(&["run", "a", "--", "touch", "ran"]);
    command.env("KUBERNETES_SERVICE_HOST", "10.0.0.1").env("STATE_DIRECTORY", stage.directory());
    Actor::of(command).end().says(125, "excludes nobody outside it");
    let mut named = stage.lockctl(&["run", "a", "--", "true"]);
    named.env("KUBERNETES_SERVICE_HOST", "10.0.0.1");
    Actor::of(named).end().is_silent(0);
}

#[test]
fn a_signal_while_waiting_leaves_the_queue_and_starts_nothing() {
    let stage = Stage::new();
    let holder = stage.hold(&[]);
    for signal in [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT] {
        // Whoever runs this test may ignore signals, and lockctl would heed that.
        let mut waiter = stage.program("env");
        waiter.args([
            "--default-signal",
            env!("CARGO_BIN_EXE_lockctl"),
            "run",
            "-v",
            "--wait",
            "forever",
            "a",
            "--",
        ]);
        waiter.args(["sh", "-c", "echo x > ran"]).env("LOCKCTL_STORE", stage.url());
        let log = fs::File::create(stage.path("log")).unwrap();
        let mut waiter = waiter.stderr(log).spawn().unwrap();
        until("the line that says it waits", || {
            fs::read_to_string(stage.path("log")).unwrap().contains("waiting; ").then_some(())
        });
        kill_process(rustix::process::Pid::from_child(&waiter), signal).unwrap();
        let status = until("its end", || waiter.try_wait().unwrap());
        assert_eq!(status.code(), Some(128 + signal.as_raw()));
        let log = fs::read_to_string(stage.path("log")).unwrap();
        assert!(log.contains("nothing was started"), "{log}");
    }
    stage.go();
    holder.end().is_silent(0);
    assert!(!stage.is_held(), "a waiter that left got the lock");
    assert!(!stage.path("ran").exists());
}

#[test]
fn a_daemonised_grandchild_keeps_the_lock() {
    let stage = Stage::new();
    let script = "(setsid sh -c 'echo $$ > daemon; while [ ! -e go ]; do sleep 0.01; done' &)";
    let run = stage.run(&[], script);
    stage.pid("daemon");
    assert_eq!(stage.run(&[], "true").end().code, 111, "the lock was given back while the daemon runs");
    stage.go();
    run.end().is_silent(0);
    assert!(!stage.is_held());
}

#[test]
fn a_killed_lockctl_takes_the_command_with_it_and_the_lease_runs_out() {
    let stage = Stage::new();
    let run = stage.run(&["--ttl", "1s"], "echo $$ > leader; while :; do sleep 0.01; done");
    let leader = stage.pid("leader");
    run.signal(Signal::KILL);
    until("the death of the command", || is_gone(leader).then_some(()));
    stage.run(&["--wait", "50s"], "true").end().is_silent(0);
}

#[test]
fn the_command_learns_about_its_lock() {
    let stage = Stage::new();
    let script = r#"
        "$LOCKCTL" --json inspect --store "$URL" a > inspected
        env | grep "^LOCK" | sort > seen
        stat -c "%a" "$LOCK_STATE" > mode"#;
    let mut run = stage.run_command(&["--ttl", "20s"], script);
    run.env("URL", stage.url()).env("LOCKCTL_TTL", "10s").env("LOCK_HOLD_UNTIL", "of an outer run");
    Actor::of(run).end().is_silent(0);
    let seen = stage.wait_for("seen");
    let value = |name: &str| {
        let line = seen.lines().find_map(|line| line.strip_prefix(&format!("{name}=")));
        line.unwrap_or_else(|| panic!("no {name} in {seen}")).to_owned()
    };
    let inspected: serde_json::Value = serde_json::from_str(&stage.wait_for("inspected")).unwrap();
    assert_eq!(value("LOCK_NAME"), "a");
    assert_eq!(value("LOCK_STAMP"), format!("{}.{}", value("LOCK_FENCE"), value("LOCK_OWNER_DIGEST")));
    assert_eq!(value("LOCK_STAMP"), inspected["holder"]["stamp"]);
    assert_eq!(value("LOCK_TTL_MS"), "20000", "the option does not come before the environment");
    // Some shells know no descriptor of two digits.
    assert!((3..=9).contains(&value("LOCK_LOSS_FD").parse::<u32>().unwrap()), "{seen}");
    assert_eq!(stage.wait_for("mode"), "600\n");
    assert!(!seen.contains("LOCK_HOLD_UNTIL"), "{seen}");
    assert!(!seen.contains("LOCKCTL_"), "{seen}");
}

#[test]
fn configuration_is_passed_on_when_asked() {
    let stage = Stage::new();
    // A nested run needs the store; what it does is up to it.
    stage.run(&["--pass-config"], r#""$LOCKCTL" run inner -- true"#).end().is_silent(0);
    let answer = stage.run(&["-E", "0"], r#"echo "${LOCKCTL_STORE-none}""#).end();
    assert_eq!(answer.stdout, "none\n");
}

#[test]
fn check_says_whether_the_lock_is_held_for_long_enough() {
    let stage = Stage::new();
    let script = r#"
        "$CTL" check; echo $?
        "$CTL" check --for 5s; echo $?
        "$CTL" check --for 40s; echo $?
        "$CTL" --json check | grep -c '"held":true'"#;
    let mut run = stage.run_command(&["--ttl", "30s"], script);
    run.env("CTL", env!("CARGO_BIN_EXE_lockctl"));
    let answer = Actor::of(run).end();
    assert_eq!(answer.stdout, "0\n0\n113\n1\n");
    assert_eq!(answer.stderr.lines().count(), 1);
    assert!(answer.stderr.contains("and 40s are needed"), "{answer:?}");
}

#[test]
fn check_is_right_while_lockctl_is_stopped() {
    let stage = Stage::new();
    let script = r#"
        echo "$LOCK_STATE" > state; echo "$LOCK_STAMP" > stamp; while :; do sleep 0.01; done"#;
    let run = stage.run(&["--ttl", "1s"], script);
    let (state, stamp) = (stage.wait_for("state"), stage.wait_for("stamp"));
    let check = || {
        let mut check = stage.bare(&["check"]);
        check.env("LOCK_STATE", state.trim()).env("LOCK_STAMP", stamp.trim());
        Actor::of(check).end()
    };
    assert_eq!(check().code, 0);
    run.signal(Signal::STOP);
    let over = until("a check that fails", || Some(check()).filter(|answer| answer.code != 0));
    over.says(113, "the lock \"a\" is");
    until("the deadline itself", || check().stderr.contains("its deadline has passed").then_some(()));
    run.signal(Signal::CONT);
    // The command outlived its deadline while nobody could stop it: that is not merely uncertain.
    run.end().says(113, "the command was still there");
}

#[test]
fn check_cannot_tell_without_a_whole_state_of_its_own_run() {
    let stage = Stage::new();
    stage.ask(&["check"]).says(125, "LOCK_STATE is not set");
    let check = |path: &std::path::Path| {
        let mut check = stage.bare(&["check"]);
        check.env("LOCK_STATE", path);
        Actor::of(check).end()
    };
    check(&stage.path("missing")).says(125, "cannot read LOCK_STATE");
    fs::write(stage.path("torn"), r#"{"schema":"lockctl/state/1","na"#).unwrap();
    check(&stage.path("torn")).says(125, "torn");
    let script = r#"cp "$LOCK_STATE" other; "$CTL" check"#;
    let mut run = stage.run_command(&[], script);
    run.env("CTL", env!("CARGO_BIN_EXE_lockctl"));
    assert_eq!(Actor::of(run).end().code, 0);
    let mut foreign = stage.bare(&["check"]);
    foreign.env("LOCK_STATE", stage.path("other")).env("LOCK_STAMP", "1.0000000000000000");
    Actor::of(foreign).end().says(125, "is about the grant");
}

#[test]
fn the_status_file_tells_a_code_of_the_command_from_ours() {
    let stage = Stage::new();
    let status = || -> serde_json::Value {
        let text = fs::read_to_string(stage.path("status")).unwrap();
        fs::remove_file(stage.path("status")).unwrap();
        serde_json::from_str(&text).unwrap()
    };
    let options = ["--status-file", "status", "--ttl", "2s"];
    stage.run(&options, "exit 113").end().is_silent(113);
    let own = status();
    assert_eq!((&own["outcome"], &own["exit_code"]), (&"ended".into(), &113.into()));
    assert_eq!(own["command"]["code"], 113);
    assert_eq!(own["name"], "a");

    let run = stage.run(&options, "echo x > ready; sleep 600");
    stage.wait_for("ready");
    stage.ask(&["break", "a", "--anyone", "--reason", "a test"]);
    assert_eq!(run.end().code, 113);
    let lost = status();
    assert_eq!((&lost["outcome"], &lost["exit_code"]), (&"lost".into(), &113.into()));
    assert_eq!(lost["command"]["signal"], 15);
    assert!(lost["message"].as_str().unwrap().contains("look at the data"));

    let holder = stage.hold(&[]);
    assert_eq!(stage.run(&["--status-file", "status", "-E", "0"], "true").end().code, 0);
    let busy = status();
    assert_eq!((&busy["outcome"], &busy["exit_code"]), (&"busy".into(), &0.into()));
    assert!(busy["command"].is_null());
    stage.go();
    holder.end().is_silent(0);

    let nowhere = stage.run(&["--status-file", "no/such/directory"], "exit 3").end();
    nowhere.says(3, "cannot write the status file");
}

#[test]
fn a_status_file_that_is_a_pipe_or_a_link_is_not_replaced() {
    let stage = Stage::new();
    let (target, link, pipe) = (stage.path("real.json"), stage.path("link.json"), stage.path("pipe"));
    std::fs::write(&target, "").unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    let run = |file: &std::path::Path| {
        let file = file.to_str().unwrap();
        assert_eq!(stage.ask(&["run", "--status-file", file, "a", "--", "true"]).code, 0);
    };
    run(&link);
    assert!(link.is_symlink(), "the link was replaced");
    assert!(std::fs::read_to_string(&target).unwrap().contains("lockctl/status/1"));
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let reader = std::thread::spawn({
        let pipe = pipe.clone();
        move || std::fs::read_to_string(pipe).unwrap()
    });
    run(&pipe);
    assert!(reader.join().unwrap().contains("lockctl/status/1"), "the pipe was not written to");
}

#[test]
fn events_are_lines_of_json_when_asked() {
    let stage = Stage::new();
    let mut run =
        stage.run(&["--json", "--ttl", "1s"], r#"echo x > ready; while [ ! -e go ]; do sleep 0.01; done"#);
    stage.wait_for("ready");
    let later = BootClock::read().saturating_add(Duration::from_millis(1100));
    until("a renewal", || (BootClock::read() > later).then_some(()));
    assert!(run.is_running());
    stage.go();
    let answer = run.end();
    assert_eq!(answer.code, 0, "{answer:?}");
    let events: Vec<serde_json::Value> =
        answer.stderr.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let names: Vec<&str> = events.iter().map(|event| event["event"].as_str().unwrap()).collect();
    assert_eq!((names[0], names[1], names[names.len() - 1]), ("granted", "renewed", "released"));
    assert!(events.iter().all(|event| event["schema"] == "lockctl/run/1"));
    assert!(events[0]["fence"].is_string(), "a 64-bit value is not text: {}", events[0]);
}

#[test]
fn runs_under_one_lock_exclude_each_other() {
    let stage = Stage::new();
    fs::write(stage.path("count"), "0").unwrap();
    // Reading and writing apart: two at once would lose an increment.
    let script = "n=$(cat count); sleep 0.005; echo $((n + 1)) > count";
    let runs: Vec<_> = (0..30).map(|_| stage.run(&["--wait", "forever"], script)).collect();
    for run in runs {
        run.end().is_silent(0);
    }
    assert_eq!(stage.wait_for("count"), "30\n");
}

#[test]
fn namespaces_keep_deployments_apart() {
    let stage = Stage::new();
    let holder = stage.hold(&["--namespace", "one"]);
    stage.run(&["--namespace", "two"], "true").end().is_silent(0);
    assert_eq!(stage.run(&["--namespace", "one"], "true").end().code, 111);
    stage.go();
    holder.end().is_silent(0);
}

#[test]
fn a_demanded_floor_is_kept() {
    let stage = Stage::new();
    let floor = "5000000000000000000";
    let answer = stage.run(&["--above", floor], r#"echo "$LOCK_FENCE""#).end();
    assert_eq!(answer.code, 0, "{answer:?}");
    assert!(answer.stdout.trim().parse::<i64>().unwrap() > floor.parse().unwrap());
}

impl Stage {
    /// Cuts everybody off from the store: a writer that does not end its transaction.
    fn cut(&self) -> rusqlite::Connection {
        let connection = rusqlite::Connection::open(self.path("locks.db")).unwrap();
        connection.busy_timeout(Duration::from_secs(30)).unwrap();
        connection.execute_batch("BEGIN IMMEDIATE").unwrap();
        connection
    }
}
