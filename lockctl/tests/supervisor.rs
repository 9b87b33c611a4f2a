//! The supervisor under a made-up lease, with real processes.
//!
//! A supervisor reaps every child of its process, hears its signals and starts its command from the main thread, so
//! each runs in a process of its own: this very program, started again with `act`.

use std::{
    env, fs,
    io::Write,
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, Stdio},
    time::{Duration, Instant},
};

use libtest_mimic::{Arguments, Failed, Trial};
use lockcore::{
    LockName, LostReason,
    backend::{BootClock, Moment},
};
use lockctl::for_tests::{Hold, Job, Standing, StateFile, run};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};

fn main() -> ExitCode {
    let words: Vec<String> = env::args().collect();
    if words.get(1).is_some_and(|word| word == "act") {
        return act(&words[2..]);
    }
    let arguments = Arguments::from_args();
    let trials = TRIALS.iter().map(|(name, body)| {
        Trial::test(*name, move || {
            let stage = Stage { directory: tempfile::tempdir()? };
            body(&stage);
            Ok::<(), Failed>(())
        })
    });
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}

type Body = fn(&Stage);

macro_rules! trials {
    ($($name:ident),* $(,)?) => { const TRIALS: &[(&str, Body)] = &[$((stringify!($name), $name)),*]; };
}

trials![
    a_code_is_passed_on,
    a_death_by_signal_is_passed_on,
    arguments_arrive_byte_for_byte,
    a_missing_command_and_a_plain_file_are_told_apart,
    nothing_is_started_after_the_loss,
    a_command_that_ignores_term_is_dead_before_the_deadline,
    a_command_gets_term_a_grace_before_the_deadline,
    a_renewal_keeps_the_command,
    a_broken_lock_stops_the_command_and_its_detached_grandchild,
    a_daemonised_grandchild_keeps_the_lock,
    a_child_of_an_earlier_life_does_not,
    the_second_term_kills,
    signals_are_passed_on_to_the_group,
    the_loss_pipe_ends_with_the_lock,
    the_loss_pipe_and_the_command_end_with_a_killed_lockctl,
    a_stopped_supervisor_acts_by_the_clock_on_waking,
    the_state_file_follows_the_lease_and_goes_at_the_end,
    configuration_is_kept_from_the_command,
    process_number_one_reaps_orphans_and_hears_term,
];

/// What the supervisor's process does: `act DIRECTORY TTL_MS KILL_AFTER_MS COMMAND...`.
///
/// The lease is moved by lines appended to `DIRECTORY/lease`: `renew MS`, `uncertain`, `broken`.
fn act(words: &[String]) -> ExitCode {
    let directory = PathBuf::from(&words[0]);
    let millis = |text: &str| Duration::from_millis(text.parse().expect("a number"));
    let from_now = |ttl| BootClock::read().saturating_add(ttl);
    let job = Job {
        command: words[3..].iter().map(Into::into).collect(),
        variables: vec![("LOCK_NAME", "a".into())],
        pass_config: false,
        kill_after: millis(&words[2]),
        hold_until: None,
    };
    let first = Hold { deadline: from_now(millis(&words[1])), standing: Standing::Held };
    let name = LockName::parse("a").expect("a name");
    let stamp = "7.00000000000000aa".parse().expect("a stamp");
    let state = StateFile::new(&directory, &name, stamp).expect("a state file");
    let lease = directory.join("lease");
    let outcome = run(&job, first, state, async |sender| {
        let mut done = 0;
        loop {
            let script = fs::read_to_string(&lease).unwrap_or_default();
            for line in script.lines().skip(done) {
                done += 1;
                sender.send_modify(|hold| match line.split_once(' ') {
                    Some(("renew", ms)) => hold.deadline = from_now(millis(ms)),
                    None if line == "uncertain" => hold.standing = Standing::Uncertain,
                    None if line == "broken" => hold.standing = Standing::Over(LostReason::Broken),
                    _ => panic!("{line:?} is not a move of a lease"),
                });
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    let text = match outcome {
        Ok(ended) => format!("{:?} {:?} {}", ended.end, ended.over, ended.gone_in_time),
        Err(refusal) => format!("{refusal:?}"),
    };
    fs::write(directory.join("outcome"), text).expect("the directory is there");
    ExitCode::SUCCESS
}

struct Stage {
    directory: tempfile::TempDir,
}

impl Stage {
    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn command(&self, ttl_ms: u64, kill_after_ms: u64, command: &[&str]) -> Command {
        let mut act = Command::new(env::current_exe().unwrap());
        act.arg("act").arg(self.directory.path()).arg(ttl_ms.to_string()).arg(kill_after_ms.to_string());
        act.args(command).current_dir(self.directory.path()).stdin(Stdio::null()).stdout(Stdio::null());
        act.stderr(fs::File::create(self.path("stderr")).unwrap());
        act
    }

    fn start(&self, ttl_ms: u64, kill_after_ms: u64, script: &str) -> Actor<'_> {
        Actor {
            stage: self,
            child: self.command(ttl_ms, kill_after_ms, &["sh", "-c", script]).spawn().unwrap(),
        }
    }

    fn outcome_of(&self, command: &[&str]) -> String {
        let child = self.command(60_000, 1000, command).spawn().unwrap();
        Actor { stage: self, child }.outcome()
    }

    fn lease(&self, line: &str) {
        let mut file = fs::OpenOptions::new().append(true).create(true).open(self.path("lease")).unwrap();
        writeln!(file, "{line}").unwrap();
    }

    /// Waits until the command has written its mark.
    fn wait_for(&self, name: &str) -> String {
        until(&format!("the file {name}"), || {
            fs::read_to_string(self.path(name)).ok().filter(|text| text.ends_with('\n'))
        })
    }

    fn pid(&self, name: &str) -> Pid {
        Pid::from_raw(self.wait_for(name).trim().parse().unwrap()).unwrap()
    }

    fn go(&self) {
        fs::write(self.path("go"), "").unwrap();
    }
}

struct Actor<'a> {
    stage: &'a Stage,
    child: Child,
}

impl Actor<'_> {
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    fn outcome(mut self) -> String {
        until("the end of the supervisor", || self.child.try_wait().unwrap());
        fs::read_to_string(self.stage.path("outcome")).unwrap_or_else(|_| {
            panic!(
                "no outcome; stderr: {}",
                fs::read_to_string(self.stage.path("stderr")).unwrap_or_default()
            )
        })
    }
}

impl Drop for Actor<'_> {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Polls a probe until it answers; the watchdog is generous, because it says nothing about speed.
fn until<T>(what: &str, mut probe: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = probe() {
            return found;
        }
        assert!(start.elapsed() < Duration::from_secs(30), "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(3));
    }
}

fn is_gone(pid: Pid) -> bool {
    // A zombie that its new parent has not collected yet does nothing any more.
    test_kill_process(pid).is_err()
        || fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()))
            .map_or(true, |stat| stat.rsplit_once(')').is_some_and(|(_, rest)| rest.starts_with(" Z")))
}

fn a_code_is_passed_on(stage: &Stage) {
    for code in [0, 1, 7, 255] {
        let outcome = stage.outcome_of(&["sh", "-c", &format!("exit {code}")]);
        assert_eq!(outcome, format!("Some(Code({code})) None true"));
    }
}

fn a_death_by_signal_is_passed_on(stage: &Stage) {
    assert_eq!(stage.outcome_of(&["sh", "-c", "kill -9 $$"]), "Some(Signal(9)) None true");
    // A real-time signal has no name, but a number.
    assert_eq!(stage.outcome_of(&["sh", "-c", "kill -40 $$"]), "Some(Signal(40)) None true");
}

fn arguments_arrive_byte_for_byte(stage: &Stage) {
    let script = r#"printf '%s\n' "$@" > seen"#;
    stage.outcome_of(&["sh", "-c", script, "sh", "-v", "--ttl", "a b", "", "$HOME", "--"]);
    assert_eq!(fs::read_to_string(stage.path("seen")).unwrap(), "-v\n--ttl\na b\n\n$HOME\n--\n");
}

fn a_missing_command_and_a_plain_file_are_told_apart(stage: &Stage) {
    let missing = stage.outcome_of(&["./missing"]);
    assert!(missing.starts_with("Exec(") && missing.contains("NotFound"), "{missing}");
    fs::write(stage.path("plain"), "not a program").unwrap();
    let plain = stage.outcome_of(&["./plain"]);
    assert!(plain.starts_with("Exec(") && plain.contains("PermissionDenied"), "{plain}");
}

fn nothing_is_started_after_the_loss(stage: &Stage) {
    let child = stage.command(0, 1000, &["sh", "-c", "echo x > ran"]).spawn().unwrap();
    assert_eq!(Actor { stage, child }.outcome(), "Over(Expired)");
    assert!(!stage.path("ran").exists());
}

fn a_command_that_ignores_term_is_dead_before_the_deadline(stage: &Stage) {
    let script = r#"trap "" TERM; echo $$ > pid; while :; do sleep 0.01; done"#;
    let actor = stage.start(1500, 500, script);
    let pid = stage.pid("pid");
    assert_eq!(actor.outcome(), "Some(Signal(9)) Some(Expired) true");
    assert!(is_gone(pid));
}

fn a_command_gets_term_a_grace_before_the_deadline(stage: &Stage) {
    let script = r#"trap "echo x > term; exit 5" TERM; echo x > ready; while :; do sleep 0.01; done"#;
    let actor = stage.start(3000, 2000, script);
    stage.wait_for("ready");
    assert_eq!(actor.outcome(), "Some(Code(5)) Some(Expired) true");
    assert!(stage.path("term").exists());
}

fn a_renewal_keeps_the_command(stage: &Stage) {
    let actor = stage.start(2000, 200, "echo x > ready; while [ ! -e go ]; do sleep 0.01; done");
    stage.wait_for("ready");
    let first_deadline = BootClock::read().saturating_add(Duration::from_millis(2000));
    stage.lease("renew 60000");
    until("the first deadline", || (BootClock::read() > first_deadline).then_some(()));
    stage.go();
    assert_eq!(actor.outcome(), "Some(Code(0)) None true");
}

fn a_broken_lock_stops_the_command_and_its_detached_grandchild(stage: &Stage) {
    let script = r#"
        setsid sh -c 'trap "" TERM; echo $$ > detached; while :; do sleep 0.01; done' &
        sh -c 'trap "" TERM; echo $$ > stubborn; while :; do sleep 0.01; done' &
        wait"#;
    let actor = stage.start(60_000, 200, script);
    let (detached, stubborn) = (stage.pid("detached"), stage.pid("stubborn"));
    stage.lease("broken");
    assert_eq!(actor.outcome(), "Some(Signal(15)) Some(Broken) true");
    assert!(is_gone(detached), "the detached grandchild lives on");
    assert!(is_gone(stubborn), "the stubborn grandchild lives on");
}

fn a_daemonised_grandchild_keeps_the_lock(stage: &Stage) {
    let script = r#"
        (setsid sh -c 'echo $$ > daemon; while [ ! -e go ]; do sleep 0.01; done; echo x > done' &)
        echo x > leaving; exit 3"#;
    let mut actor = stage.start(60_000, 200, script);
    stage.wait_for("leaving");
    let daemon = stage.pid("daemon");
    let own = Pid::from_child(&actor.child).as_raw_nonzero().to_string();
    until("the daemon's new parent", || {
        let stat = fs::read_to_string(format!("/proc/{}/stat", daemon.as_raw_nonzero())).unwrap();
        (stat.rsplit_once(')').unwrap().1.split_whitespace().nth(1) == Some(&*own)).then_some(())
    });
    assert!(actor.is_running(), "the lock was given back while the daemon runs");
    stage.go();
    assert_eq!(actor.outcome(), "Some(Code(3)) None true");
    assert!(stage.path("done").exists(), "the run ended before the daemon");
}

fn a_child_of_an_earlier_life_does_not(stage: &Stage) {
    let act = stage.command(60_000, 200, &["sh", "-c", "exit 4"]);
    let words: Vec<_> = act.get_args().map(|word| word.to_str().unwrap().to_owned()).collect();
    let mut shell = Command::new("sh");
    shell.args(["-c", r#"sleep 600 & echo $! > stranger; exec "$@""#, "sh"]);
    shell
        .arg(act.get_program())
        .args(words)
        .current_dir(stage.directory.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    let child = shell.spawn().unwrap();
    let outcome = Actor { stage, child }.outcome();
    let stranger = stage.pid("stranger");
    assert!(!is_gone(stranger), "a process that is not the command's was killed");
    kill_process(stranger, Signal::KILL).unwrap();
    assert_eq!(outcome, "Some(Code(4)) None true");
}

fn the_second_term_kills(stage: &Stage) {
    let script = r#"trap "echo x >> terms" TERM; echo x > ready; while :; do sleep 0.01; done"#;
    let mut actor = stage.start(600_000, 300_000, script);
    stage.wait_for("ready");
    actor.signal(Signal::TERM);
    stage.wait_for("terms");
    assert!(actor.is_running());
    actor.signal(Signal::TERM);
    assert_eq!(actor.outcome(), "Some(Signal(9)) None true");
}

fn signals_are_passed_on_to_the_group(stage: &Stage) {
    let script = r#"
        for s in USR1 USR2 HUP QUIT WINCH; do trap "echo x > $s" $s; done
        sh -c 'trap "echo x > child" USR1; echo x > child-ready; while :; do sleep 0.01; done' &
        trap 'exit 9' TERM
        echo x > ready; while :; do sleep 0.01; done"#;
    let actor = stage.start(600_000, 200, script);
    stage.wait_for("ready");
    stage.wait_for("child-ready");
    // The parent of this test may have left them ignored; then they stay so, and there is nothing to pass on.
    let ignored = ignored_signals();
    for (signal, name) in [
        (Signal::USR1, "USR1"),
        (Signal::USR2, "USR2"),
        (Signal::HUP, "HUP"),
        (Signal::QUIT, "QUIT"),
        (Signal::WINCH, "WINCH"),
    ] {
        if ignored & (1 << (signal.as_raw() - 1)) == 0 {
            actor.signal(signal);
            stage.wait_for(name);
        }
    }
    stage.wait_for("child");
    actor.signal(Signal::TERM);
    assert_eq!(actor.outcome(), "Some(Code(9)) None true");
}

fn ignored_signals() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(line.trim(), 16).unwrap()
}

fn the_loss_pipe_ends_with_the_lock(stage: &Stage) {
    let script = r#"trap "" TERM; echo x > ready; cat <&$LOCK_LOSS_FD; echo x > eof; exit 6"#;
    let actor = stage.start(600_000, 60_000, script);
    stage.wait_for("ready");
    assert!(!stage.path("eof").exists());
    stage.lease("broken");
    stage.wait_for("eof");
    assert_eq!(actor.outcome(), "Some(Code(6)) Some(Broken) true");
}

fn the_loss_pipe_and_the_command_end_with_a_killed_lockctl(stage: &Stage) {
    let script = r#"
        echo $$ > leader
        setsid sh -c 'echo $$ > watcher; cat <&$LOCK_LOSS_FD; echo x > eof' &
        while :; do sleep 0.01; done"#;
    let actor = stage.start(600_000, 200, script);
    let (leader, watcher) = (stage.pid("leader"), stage.pid("watcher"));
    actor.signal(Signal::KILL);
    stage.wait_for("eof");
    until("the death of the command", || is_gone(leader).then_some(()));
    until("the end of the watcher", || is_gone(watcher).then_some(()));
}

fn a_stopped_supervisor_acts_by_the_clock_on_waking(stage: &Stage) {
    let script = r#"trap "echo x > cont" CONT; echo $$ > leader; while :; do sleep 0.01; done"#;
    let actor = stage.start(1500, 300, script);
    let leader = stage.pid("leader");
    actor.signal(Signal::STOP);
    // The deadline lies within this from now; nobody is there to keep it.
    let past = BootClock::read().saturating_add(Duration::from_millis(1600));
    until("the deadline", || (BootClock::read() > past).then_some(()));
    assert!(!is_gone(leader), "the supervisor was not stopped");
    actor.signal(Signal::CONT);
    assert_eq!(actor.outcome(), "Some(Signal(9)) Some(Expired) false");
    assert!(!stage.path("cont").exists(), "the command was woken before the clock was asked");
}

fn the_state_file_follows_the_lease_and_goes_at_the_end(stage: &Stage) {
    let actor =
        stage.start(60_000, 1000, r#"echo "$LOCK_STATE" > path; while [ ! -e go ]; do sleep 0.01; done"#);
    let path = PathBuf::from(stage.wait_for("path").trim());
    let deadline = |path: &Path| -> Moment {
        let state: serde_json::Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        Moment::from_nanos(state["deadline_ns"].as_str().unwrap().parse().unwrap())
    };
    let first = deadline(&path);
    stage.lease("renew 120000");
    until("a later deadline in the file", || (deadline(&path) > first).then_some(()));
    stage.go();
    assert_eq!(actor.outcome(), "Some(Code(0)) None true");
    assert!(!path.exists());
}

fn configuration_is_kept_from_the_command(stage: &Stage) {
    let mut act = stage.command(60_000, 1000, &["sh", "-c", "env > seen"]);
    act.env("LOCKCTL_STORE", "secret").env("LOCKCTL_ANYTHING", "x").env("LOCK_HOLD_UNTIL", "outer");
    assert_eq!(Actor { stage, child: act.spawn().unwrap() }.outcome(), "Some(Code(0)) None true");
    let seen = fs::read_to_string(stage.path("seen")).unwrap();
    assert!(!seen.contains("LOCKCTL_"), "{seen}");
    assert!(!seen.contains("LOCK_HOLD_UNTIL"), "a variable of an outer run leaked: {seen}");
    assert!(seen.contains("LOCK_NAME=a\n"), "{seen}");
}

fn process_number_one_reaps_orphans_and_hears_term(stage: &Stage) {
    let script = r#"
        trap 'exit 8' TERM
        (sh -c 'echo x > orphan-born; exit 0' &)
        echo $$ > ready; while :; do sleep 0.01; done"#;
    let act = stage.command(600_000, 300_000, &["sh", "-c", script]);
    let mut unshare = Command::new("unshare");
    unshare.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
    if !rustix::process::geteuid().is_root() {
        unshare.args(["--user", "--map-root-user"]);
    }
    unshare
        .arg(act.get_program())
        .args(act.get_args())
        .current_dir(stage.directory.path())
        .stdin(Stdio::null());
    let child = unshare.spawn().unwrap();
    let actor = Actor { stage, child };
    stage.wait_for("ready");
    stage.wait_for("orphan-born");
    let inner = until("the process inside", || {
        let text = format!("/proc/{0}/task/{0}/children", Pid::from_child(&actor.child).as_raw_nonzero());
        fs::read_to_string(text).ok()?.split_whitespace().next()?.parse().ok().and_then(Pid::from_raw)
    });
    until("no zombie", || zombies_below(inner).is_empty().then_some(()));
    kill_process(inner, Signal::TERM).unwrap();
    assert_eq!(actor.outcome(), "Some(Code(8)) None true");
}

fn zombies_below(parent: Pid) -> Vec<String> {
    let number = parent.as_raw_nonzero();
    let children = fs::read_to_string(format!("/proc/{number}/task/{number}/children")).unwrap();
    children
        .split_whitespace()
        .filter(|pid| fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") Z ")))
        .map(str::to_owned)
        .collect()
}
