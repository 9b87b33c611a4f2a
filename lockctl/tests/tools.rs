//! The sub-commands around `run`: looking, breaking, fences, configuration, manual.

use std::{fs, time::UNIX_EPOCH};

mod stage;
use stage::{Actor, Stage, until};

#[test]
fn inspect_shows_the_holder_and_later_the_last_fence() {
    let stage = Stage::new();
    let never = stage.ask(&["--json", "inspect", "a"]).json();
    assert_eq!((&never["held"], &never["last_fence"]), (&false.into(), &serde_json::Value::Null));
    let holder = stage.hold(&["--label", "web-3", "--ttl", "20s"]);
    let held = stage.ask(&["--json", "inspect", "a"]).json();
    assert_eq!(held["schema"], "lockctl/inspect/1");
    assert_eq!(held["holder"]["label"], "web-3");
    assert!(held["holder"]["fence"].is_string(), "a 64-bit value is not text: {held}");
    assert!((1..=20_000).contains(&held["holder"]["remaining_ms"].as_u64().unwrap()), "{held}");
    let shown = stage.ask(&["inspect", "a"]);
    assert_eq!(shown.code, 0);
    for part in ["held", "web-3", held["holder"]["stamp"].as_str().unwrap(), &stage.url()] {
        assert!(shown.stdout.contains(part), "{part:?} is not in {shown:?}");
    }
    assert!(!shown.stdout.contains('\x1b'), "colours on a pipe: {shown:?}");
    assert!(stage.ask(&["inspect", "--color", "always", "a"]).stdout.contains("\x1b[1mheld"));
    stage.ask(&["inspect", "--test", "a"]).is_silent(0);
    stage.go();
    holder.end().is_silent(0);
    stage.ask(&["inspect", "--test", "a"]).is_silent(1);
    let free = stage.ask(&["--json", "inspect", "a"]).json();
    assert_eq!(free["last_fence"], held["holder"]["fence"]);
}

#[test]
fn inspect_goes_on_and_says_what_changes() {
    let stage = Stage::new();
    let log = fs::File::create(stage.path("log")).unwrap();
    let watch = Actor::quiet(stage.lockctl(&["inspect", "--watch", "--json", "a"]), log);
    let lines = || fs::read_to_string(stage.path("log")).unwrap().lines().count();
    until("the first look", || (lines() == 1).then_some(()));
    let holder = stage.hold(&[]);
    until("the grant", || (lines() == 2).then_some(()));
    stage.go();
    holder.end().is_silent(0);
    until("the release", || (lines() == 3).then_some(()));
    drop(watch);
}

#[test]
fn list_shows_names_in_order_and_below_a_prefix() {
    let stage = Stage::new();
    for name in ["b", "a/2", "a/1", "ab"] {
        stage.ask(&["run", name, "--", "true"]).is_silent(0);
    }
    assert_eq!(stage.ask(&["list"]).stdout, "a/1\na/2\nab\nb\n");
    assert_eq!(stage.ask(&["list", "a"]).stdout, "a/1\na/2\n");
    assert_eq!(stage.ask(&["list", "a/"]).stdout, "a/1\na/2\n");
    assert_eq!(stage.ask(&["list", "c"]).stdout, "");
    let line = stage.ask(&["--json", "list", "b"]).json();
    assert_eq!((&line["schema"], &line["name"]), (&"lockctl/list/1".into(), &"b".into()));
}

#[test]
fn fence_seed_brings_every_lock_up_to_the_clock_also_those_that_nobody_knows() {
    let stage = Stage::new();
    let fence = |name: &str| -> i64 {
        let ran = stage.ask(&["run", "--namespace", "shop", name, "--", "sh", "-c", "echo $LOCK_FENCE"]);
        ran.stdout.trim().parse().unwrap_or_else(|_| panic!("{ran:?}"))
    };
    let before = ["a", "b/1"].map(fence);
    let now = || i64::try_from(UNIX_EPOCH.elapsed().unwrap().as_micros()).unwrap();
    let least = now();
    let seeded = stage.ask(&["--json", "fence", "--seed", "--namespace", "shop"]).json();
    assert_eq!(
        (&seeded["schema"], &seeded["names"]),
        (&"lockctl/fence-seed/1".into(), &2.into()),
        "{seeded}"
    );
    let floor: i64 = seeded["floor"].as_str().unwrap().parse().unwrap();
    assert!(least <= floor && floor <= now(), "{floor} is not the time");
    let stands = |name: &str| -> i64 {
        let raised = stage.ask(&["fence", name, "--raise", "1", "--namespace", "shop"]);
        raised.stdout.trim().parse().unwrap_or_else(|_| panic!("{raised:?}"))
    };
    for name in ["a", "b/1"] {
        assert!(stands(name) >= floor, "{name} was left at {}", stands(name));
    }
    for (name, before) in [("a", before[0]), ("b/1", before[1]), ("never locked before", 0)] {
        let next = fence(name);
        assert!(next > floor && next > before, "{name}: {next} after {before} and {floor}");
    }
    // It only goes up.
    let ahead = now() + 3_600_000_000;
    assert_eq!(stage.ask(&["fence", "a", "--raise", &ahead.to_string(), "--namespace", "shop"]).code, 0);
    assert_eq!(stage.ask(&["fence", "--seed", "--namespace", "shop"]).code, 0);
    assert_eq!(stands("a"), ahead);
    stage.ask(&["fence", "--seed", "a"]).says(125, "cannot be used with");
    stage.ask(&["fence", "a", "--raise", "7", "--seed"]).says(125, "cannot be used with");
    stage.ask(&["fence"]).says(125, "NAME");
}

#[test]
fn break_takes_only_from_the_holder_that_was_meant() {
    let stage = Stage::new();
    let holder = stage.hold(&["--ttl", "2s"]);
    let stamp = stage.ask(&["--json", "inspect", "a"]).json()["holder"]["stamp"].as_str().unwrap().to_owned();
    let (fence, _) = stamp.split_once('.').unwrap();
    stage
        .ask(&["break", "a", "--expect", "1.0000000000000001", "--reason", "a test"])
        .says(111, "nothing was broken");
    assert!(stage.is_held());
    let broken = stage.ask(&["--json", "break", "a", "--expect", &stamp, "--reason", "a test"]).json();
    assert_eq!((&broken["broken"]["stamp"], &broken["reason"]), (&stamp.as_str().into(), &"a test".into()));
    let floor: i64 = broken["floor"].as_str().unwrap().parse().unwrap();
    assert!(floor > fence.parse().unwrap(), "the floor is not above the broken fence: {broken}");
    assert_eq!(holder.end().code, 113);
    let next = stage.run(&[], r#"echo "$LOCK_FENCE""#).end();
    assert!(next.stdout.trim().parse::<i64>().unwrap() > floor, "the next fence is not above the floor");
    stage.ask(&["break", "a", "--anyone", "--reason", " "]).says(125, "--reason is empty");
}

#[test]
fn a_raised_fence_stays_below_every_later_one() {
    let stage = Stage::new();
    stage.ask(&["-q", "fence", "a"]).is_silent(0);
    stage.run(&[], "true").end().is_silent(0);
    let shown = stage.ask(&["fence", "a"]).stdout;
    assert!(shown.trim().parse::<i64>().unwrap() > 0);
    let floor = "4000000000000000000";
    let raised = stage.ask(&["--json", "fence", "a", "--raise", floor]).json();
    assert!(raised["fence"].as_str().unwrap().parse::<i64>().unwrap() >= floor.parse().unwrap(), "{raised}");
    let next = stage.run(&[], r#"echo "$LOCK_FENCE""#).end();
    assert!(next.stdout.trim().parse::<i64>().unwrap() > floor.parse().unwrap(), "{next:?}");
    stage.ask(&["fence", "a", "--raise", "0"]).says(125, "positive");
}

const LEVELS: &str = r#"
namespace = "shop"
[backend]
main = "sqlite://DIR/file.db"
[risk.efficiency]
backend = "main"
ttl = "12s"
wait = "3s"
[risk.critical]
backend = "main"
ttl = "15s"
max-hold = "10m"
[lock."pay/*"]
max-hold = "2m"
"#;

#[test]
fn a_level_of_the_file_names_store_and_numbers() {
    let stage = Stage::new();
    let file = stage.path("locks.toml");
    fs::write(&file, LEVELS.replace("DIR", stage.directory().to_str().unwrap())).unwrap();
    let file = file.to_str().unwrap();
    let ask = |words: &[&str]| {
        let mut command = stage.bare(words);
        command.env("LOCKCTL_CONFIG", file);
        Actor::of(command).end()
    };
    ask(&["config", "check"]).is_silent(0);
    let shown = ask(&["--json", "config", "show", "--risk", "efficiency"]).json();
    assert_eq!((&shown["ttl_ms"], &shown["wait_ms"]), (&12_000.into(), &3000.into()));
    assert_eq!((&shown["namespace"], &shown["risk"]), (&"shop".into(), &"efficiency".into()));
    let shown =
        ask(&["--json", "config", "show", "--risk", "efficiency", "--ttl", "5s", "--namespace", "x"]).json();
    assert_eq!((&shown["ttl_ms"], &shown["namespace"]), (&5000.into(), &"x".into()));
    let run =
        ["run", "--risk", "efficiency", "pay/1", "--", "sh", "-c", "echo $LOCK_TTL_MS $LOCK_HOLD_UNTIL"];
    let answer = ask(&run);
    assert!(answer.stdout.starts_with("12000 2") && answer.stdout.ends_with("Z\n"), "{answer:?}");
    assert!(stage.path("file.db").exists(), "the store of the file was not used");
    // One file on one machine is no majority.
    ask(&["run", "--risk", "critical", "a", "--", "touch", "ran"]).says(116, "demands: consistency");
    assert!(!stage.path("ran").exists());
    ask(&["run", "a", "--", "true"]).says(125, "name one with --risk: critical, efficiency");
}

#[test]
fn config_check_names_every_problem_with_its_line() {
    let stage = Stage::new();
    fs::write(
        stage.path("locks.toml"),
        "namespace = \"shop\"\n[backend]\nmain = \"sqlite:///srv/locks.db\"\n[risk.efficiency]\nbackend = \"mian\"\n\
         [risk.critical]\nbackend = \"main\"\n",
    )
    .unwrap();
    let answer = stage.ask(&["config", "check", "locks.toml"]);
    assert_eq!((answer.code, &*answer.stderr), (125, ""));
    assert!(answer.stdout.contains("locks.toml:5: risk.efficiency.backend: "), "{answer:?}");
    assert!(answer.stdout.contains("locks.toml:6: risk.critical.max-hold: "), "{answer:?}");
    stage.ask(&["run", "--config", "locks.toml", "a", "--", "true"]).says(125, "locks.toml:5: ");
    stage.ask(&["config", "check", "missing.toml"]).says(125, "missing.toml");
}

#[test]
fn secrets_are_masked_everywhere() {
    let stage = Stage::new();
    for words in [
        &["config", "show"][..],
        &["run", "--help"],
        &["config", "show", "--help"],
        &["run", "a"],
        &["run", "-v", "a", "--", "true"],
        &["inspect", "a"],
        &["man"],
    ] {
        let mut command = stage.bare(words);
        command
            .env("LOCKCTL_STORE", "sqlite://u:s3cret@host/locks.db")
            .env("LOCKCTL_PASSWORD_FILE", "/run/s3cret");
        let answer = Actor::of(command).end();
        assert!(
            !answer.stdout.contains("s3cret") && !answer.stderr.contains("u:s3cret"),
            "{words:?}: {answer:?}"
        );
    }
}

#[test]
fn help_has_examples_and_ends_with_0() {
    let stage = Stage::new();
    for words in [
        &["--help"][..],
        &["run", "--help"],
        &["check", "--help"],
        &["inspect", "--help"],
        &["list", "--help"],
        &["break", "--help"],
        &["fence", "--help"],
        &["doctor", "--help"],
        &["compare", "--help"],
        &["completions", "--help"],
        &["man", "--help"],
    ] {
        let answer = stage.ask(words);
        assert_eq!((answer.code, &*answer.stderr), (0, ""), "{words:?}");
        assert!(answer.stdout.contains("Example"), "{words:?}: {answer:?}");
    }
    let version = stage.ask(&["--version"]);
    assert_eq!((version.code, &*version.stdout), (0, concat!("lockctl ", env!("CARGO_PKG_VERSION"), "\n")));
}

#[test]
fn completions_are_scripts_that_their_shell_accepts() {
    let stage = Stage::new();
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let answer = stage.ask(&["completions", shell]);
        assert_eq!((answer.code, &*answer.stderr), (0, ""));
        assert!(answer.stdout.contains("kill-after"), "{shell} does not complete --kill-after");
        if shell == "bash" {
            fs::write(stage.path("script"), answer.stdout).unwrap();
            let mut bash = stage.program("bash");
            bash.args(["-n", "script"]);
            Actor::of(bash).end().is_silent(0);
        }
    }
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let stage = Stage::new();
    for name in 0..50 {
        stage.ask(&["fence", &format!("n/{name}"), "--raise", "1"]);
    }
    let mut shell = stage.program("bash");
    let script = r#"
        set -o pipefail
        "$LOCKCTL" man | head -1 > /dev/null || echo "man: $?"
        "$LOCKCTL" run --help | head -1 > /dev/null || echo "help: $?"
        "$LOCKCTL" inspect --watch n/1 | head -1 > /dev/null & watch=$!
        "$LOCKCTL" list | head -1 > /dev/null || echo "list: $?"
        until [ -e go ]; do "$LOCKCTL" run n/1 -- true; kill -0 $watch 2> /dev/null || touch go; done
        wait $watch || echo "watch: $?""#;
    shell.args(["-c", script]).env("LOCKCTL_STORE", stage.url());
    Actor::of(shell).end().is_silent(0);
}
