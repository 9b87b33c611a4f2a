//! Several processes on one file: each test starts its own binary again and plays the child where it is told to.

use std::{
    env, fs,
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::Arc,
    time::Duration,
};

use lockcore::backend::*;
use lockcore_sql::{SqliteBackend, SqliteConfig};
use rustix::process::{Pid, Signal, kill_process};

const CHILD_OF: &str = "LOCKCORE_SQL_TEST_CHILD_OF";
const PROCESSES: u32 = 4;
const TURNS: u32 = 200;

/// Returns the directory of the test, if this process is to play its child.
fn directory_of_parent() -> Option<PathBuf> {
    env::var_os(CHILD_OF).map(PathBuf::from)
}

struct Player {
    process: Child,
    says: BufReader<ChildStdout>,
    hears: ChildStdin,
}

impl Player {
    fn start(test: &str, directory: &Path) -> Self {
        let mut process = Command::new(env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(CHILD_OF, directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let says = BufReader::new(process.stdout.take().unwrap());
        let hears = process.stdin.take().unwrap();
        Self { process, says, hears }
    }

    /// Reads on to the next line that a child wrote for its parent; what the test harness prints is passed over.
    fn line(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.says.read_line(&mut line).unwrap() > 0, "the child ended without a word");
            if let Some((_, word)) = line.split_once("child: ") {
                return word.trim().to_owned();
            }
        }
    }

    fn go_on(&mut self) {
        self.hears.write_all(b"go on\n").unwrap();
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process), signal).unwrap();
    }

    fn succeed(mut self) {
        drop(self.hears);
        let mut rest = String::new();
        while self.says.read_line(&mut rest).unwrap() > 0 {}
        assert!(self.process.wait().unwrap().success(), "a child failed:\n{rest}");
    }
}

fn tell_parent(word: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "child: {word}").unwrap();
    out.flush().unwrap();
}

fn wait_for_parent() {
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).unwrap();
}

async fn open(directory: &Path) -> SqliteBackend {
    let config = SqliteConfig::new(directory.join("locks.db"))
        .with(|c| c.poll = Duration::from_millis(1)..=Duration::from_millis(5));
    SqliteBackend::open(config).await.unwrap()
}

fn call() -> Call {
    Call::for_tests(Arc::new(BootClock), Duration::from_secs(60))
}

fn patient(ttl: Duration) -> AcquireRequest {
    AcquireRequest::new(LockName::parse("storm").unwrap(), ttl).waiting_until(Moment::MAX)
}

/// The resource: a number that is read, and written one higher, in two steps that only the lock keeps together.
async fn take_turns(directory: &Path) {
    let backend = open(directory).await;
    let (inside, tally) = (directory.join("inside"), directory.join("tally"));
    for _ in 0..TURNS {
        let call = call();
        let lease = backend.acquire(&call, &patient(Duration::from_secs(30))).await.unwrap();
        fs::OpenOptions::new().write(true).create_new(true).open(&inside).expect("nobody else is inside");
        let text = fs::read_to_string(&tally).unwrap();
        let (count, last) = text.split_once(' ').unwrap();
        let (count, last): (u32, i64) = (count.parse().unwrap(), last.parse().unwrap());
        assert!(lease.fence.get() > last, "{:?} was granted after {last}", lease.fence);
        fs::write(&tally, format!("{} {}", count + 1, lease.fence)).unwrap();
        fs::remove_file(&inside).unwrap();
        assert_eq!(backend.release(&call, &lease).await.unwrap(), Released::Now);
    }
    backend.close().await;
}

#[tokio::test]
async fn processes_that_storm_one_lock_exclude_each_other_in_order_of_fences() {
    if let Some(directory) = directory_of_parent() {
        return take_turns(&directory).await;
    }
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("tally"), "0 0").unwrap();
    // Nobody has created the file: the children open it at the same time.
    let players: Vec<Player> = (0..PROCESSES)
        .map(|_| {
            Player::start(
                "processes_that_storm_one_lock_exclude_each_other_in_order_of_fences",
                directory.path(),
            )
        })
        .collect();
    for player in players {
        player.succeed();
    }
    let tally = fs::read_to_string(directory.path().join("tally")).unwrap();
    let (count, last) = tally.split_once(' ').unwrap();
    assert_eq!(count.parse::<u32>().unwrap(), PROCESSES * TURNS, "turns were lost");
    let state =
        open(directory.path()).await.inspect(&call(), &LockName::parse("storm").unwrap()).await.unwrap();
    assert_eq!(state.holder, None);
    assert_eq!(state.last_fence.unwrap().get(), last.parse::<i64>().unwrap());
}

#[tokio::test]
async fn a_waiter_gets_the_lock_of_a_killed_process_when_its_lease_ends() {
    let ttl = Duration::from_millis(400);
    if let Some(directory) = directory_of_parent() {
        let backend = open(&directory).await;
        let lease = backend.acquire(&call(), &patient(ttl)).await.unwrap();
        tell_parent(lease.fence);
        wait_for_parent();
        unreachable!("the parent kills this process");
    }
    let directory = tempfile::tempdir().unwrap();
    let backend = open(directory.path()).await;
    let mut player =
        Player::start("a_waiter_gets_the_lock_of_a_killed_process_when_its_lease_ends", directory.path());
    let fence: Fence = player.line().parse().unwrap();
    player.signal(Signal::KILL);
    player.process.wait().unwrap();
    let dead = BootClock::read();
    let lease = backend.acquire(&call(), &patient(Duration::from_secs(30))).await.unwrap();
    assert!(lease.fence > fence);
    let took = dead.until(BootClock::read());
    assert!(took < ttl + Duration::from_secs(5), "the takeover took {took:?}");
}

#[tokio::test]
async fn a_holder_that_was_stopped_past_its_deadline_has_lost_the_lock() {
    if let Some(directory) = directory_of_parent() {
        let backend = open(&directory).await;
        let lease = backend.acquire(&call(), &patient(Duration::from_millis(300))).await.unwrap();
        tell_parent(lease.fence);
        wait_for_parent();
        let renewed = backend.renew(&call(), &lease, Duration::from_secs(30)).await;
        tell_parent(renewed.map_or_else(|e| format!("{:?}", e.lost_reason()), |_| "renewed".into()));
        tell_parent(format!("{:?}", backend.release(&call(), &lease).await.unwrap()));
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let backend = open(directory.path()).await;
    let mut player =
        Player::start("a_holder_that_was_stopped_past_its_deadline_has_lost_the_lock", directory.path());
    let stale: Fence = player.line().parse().unwrap();
    player.signal(Signal::STOP);
    let live = backend.acquire(&call(), &patient(Duration::from_secs(30))).await.unwrap();
    assert!(live.fence > stale);
    player.signal(Signal::CONT);
    player.go_on();
    assert_eq!(player.line(), "Some(Taken)");
    assert_eq!(player.line(), "AlreadyOver");
    player.succeed();
    assert!(
        backend.renew(&call(), &live, Duration::from_secs(30)).await.is_ok(),
        "the stale release ended it"
    );
}
