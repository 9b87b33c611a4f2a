//! Runs cases: each pair of backend and case is a named test, for `cargo test` and nextest.

use std::{
    ops::ControlFlow,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::{Arc, Mutex},
};

use libtest_mimic::{Arguments, Failed, Trial};
use lockcore::backend::LockBackend;
use tokio::sync::watch;

use crate::{
    bench::{Bench, Service, child_main},
    case::{Case, Need, Verdict},
    cases,
    history::{History, Outcome, check, timeline},
    report::{About, CaseRun, Lane, Log, Seen},
    sabotage::{Mistake, NOTICED, Sabotaged},
};

/// Runs every case against a service: the `main` of a backend's `tests/conformance.rs` (`harness = false`).
///
/// `start` is called once for each case, on the runtime that the case runs on.
pub fn run<S: Service>(
    profile: &'static str,
    start: impl AsyncFn() -> S + Send + Sync + 'static,
) -> ExitCode {
    Suite::new(profile, start).main()
}

type Start = Arc<dyn Fn() -> std::pin::Pin<Box<dyn Future<Output = Arc<dyn Service>>>> + Send + Sync>;
type Connect = Box<dyn FnOnce(String) -> std::pin::Pin<Box<dyn Future<Output = Arc<dyn LockBackend>>>>>;

/// The cases against one profile of one store.
pub struct Suite {
    profile: Arc<str>,
    start: Start,
    connect: Option<Connect>,
    own_servers: Option<(usize, Start)>,
    server_clocks: bool,
    seeds: u64,
}

impl std::fmt::Debug for Suite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Suite").field("profile", &self.profile).finish_non_exhaustive()
    }
}

/// Which cases [`Suite::play_all`] plays, and what it keeps of them. Starts with all cases, and keeps no history.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Plan {
    /// Only cases with one of these texts in `topic::name`; all, if it is empty. Others do not stand in the results.
    pub only: Vec<String>,
    /// Cases whose `topic::name` begins with the text are *not run*, and the sentence says why.
    pub leave_out: Vec<(String, String)>,
    /// Where histories worth keeping go.
    pub histories: Option<PathBuf>,
    /// Ends the run, and the case under way at its next await, once it is true.
    pub halt: Option<watch::Receiver<bool>>,
}

impl Plan {
    /// Sets fields in one expression.
    #[must_use]
    pub fn with(mut self, set: impl FnOnce(&mut Self)) -> Self {
        set(&mut self);
        self
    }

    /// Says whether a text of [`only`](Self::only) names no case.
    pub fn unknown(&self) -> Option<&str> {
        let names = |text: &&String| !cases::all().any(|case| full_name(case).contains(text.as_str()));
        self.only.iter().find(names).map(String::as_str)
    }

    fn chooses(&self, case: &Case) -> bool {
        let name = full_name(case);
        self.only.is_empty() || self.only.iter().any(|text| name.contains(text.as_str()))
    }

    fn reason_against(&self, case: &Case) -> Option<&str> {
        let name = full_name(case);
        self.leave_out.iter().find(|(text, _)| name.starts_with(text.as_str())).map(|(_, why)| why.as_str())
    }
}

fn full_name(case: &Case) -> String {
    format!("{}::{}", case.topic(), case.name())
}

/// What [`Suite::play_all`] tells while it runs.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Progress<'a> {
    /// A case begins.
    Begins {
        /// Which.
        case: &'a Case,
        /// Its place, from 1, among those chosen.
        number: usize,
        /// How many are chosen.
        of: usize,
    },
    /// A case ended.
    Ended {
        /// What became of it.
        run: &'a CaseRun,
    },
}

/// Why [`Suite::play_all`] has no results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unplayed {
    /// The service did not start, or did not connect.
    #[error("the store could not be reached before the first case")]
    NotStarted,
    /// The run was ended before its last case.
    #[error("the run was ended before its last case")]
    Halted,
}

/// What became of one case.
#[derive(Clone, Debug)]
pub(crate) struct Played {
    /// Why it failed, if it did.
    pub(crate) failure: Option<String>,
    /// The history itself breaks a promise.
    pub(crate) broken: bool,
    /// What an earlier attempt said, if this is not the first.
    pub(crate) earlier: Option<String>,
    /// Neither kept nor broken: the machine stalled.
    pub(crate) inconclusive: bool,
    /// The case drew at random: another seed is another play.
    drew: bool,
    /// What was there to be told; `None`: the service did not start.
    pub(crate) seen: Option<Seen>,
}

impl Suite {
    /// Sets up the cases for a profile: the name of a backend in one of its set-ups.
    pub fn new<S: Service>(
        profile: impl Into<Arc<str>>,
        start: impl AsyncFn() -> S + Send + Sync + 'static,
    ) -> Self {
        Self {
            profile: profile.into(),
            start: boxed(start),
            connect: None,
            own_servers: None,
            server_clocks: false,
            seeds: 1,
        }
    }

    /// Says how to start a service whose servers are one case's own, to stop and kill, and how many servers that are.
    #[must_use]
    pub fn own_servers<S: Service>(
        mut self,
        count: usize,
        start: impl AsyncFn() -> S + Send + Sync + 'static,
    ) -> Self {
        self.own_servers = Some((count, boxed(start)));
        self
    }

    /// Says whether the wall clock of a case's own servers can be stepped, as under a
    /// [`WallClock`](crate::wall_clock::WallClock).
    #[must_use]
    pub fn server_clocks(mut self, offered: bool) -> Self {
        self.server_clocks = offered;
        self
    }

    /// Plays each case that draws at random with so many seeds, one after the other, until one fails: for stores in virtual
    /// time, where a play costs milliseconds. `LOCK_SEEDS` says another number. `LOCK_SOAK` (`30m`) goes on for so long, on
    /// any store.
    #[must_use]
    pub fn seeds(mut self, count: u64) -> Self {
        self.seeds = count;
        self
    }

    /// Says how a process started from this binary reaches the store by the service's address.
    #[must_use]
    pub fn processes(mut self, connect: impl AsyncFnOnce(String) -> Arc<dyn LockBackend> + 'static) -> Self {
        self.connect = Some(Box::new(move |address| Box::pin(connect(address))));
        self
    }

    /// Runs what the command line asks for.
    pub fn main(mut self) -> ExitCode {
        if let Some(connect) = self.connect.take()
            && let Some(code) = child_main(async move |address| connect(address).await)
        {
            return code;
        }
        let mut arguments = Arguments::from_args();
        hush_expected_panics();
        let (offers, about) = self.offers();
        let virtual_time = offers.contains(&Need::VirtualTime);
        if !virtual_time && arguments.test_threads.is_none() {
            // Most cases wait for a lease to end. More at a time would load the machine until leases end by themselves.
            let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
            arguments.test_threads = Some(2 * cores);
        }
        let often = match Often::of_tests(self.seeds) {
            Ok(often) => often,
            Err(why) => {
                say(&why);
                return ExitCode::from(101);
            }
        };
        let log = Log::begin(&self.profile, about, &arguments);
        // Histories of several versions are kept side by side.
        let column: Arc<str> = log.column().into();
        let mut missing: Vec<(&'static str, &'static str, usize)> = Vec::new();
        let trials = cases::all()
            .map(|case| {
                let name = format!("{}::{}::{}", self.profile, case.topic(), case.name());
                let lacks = case.needs.iter().find(|need| !offers.contains(need));
                let (kind, why) = lacks.map_or(("", ""), |need| log.lacking(case, *need));
                if lacks.is_some() {
                    match missing.iter_mut().find(|(word, known, _)| (*word, *known) == (kind, why)) {
                        Some((.., count)) => *count += 1,
                        None => missing.push((kind, why, 1)),
                    }
                }
                let (column, log, start) = (column.clone(), log.clone(), self.start_for(case).clone());
                Trial::test(name, move || {
                    let began = std::time::Instant::now();
                    let played = play_often(&column, case, &start, virtual_time, often);
                    log.played(case, &played, began.elapsed());
                    played.failure.map_or(Ok(()), |failure| Err(Failed::from(failure)))
                })
                .with_kind(kind)
                .with_ignored_flag(lacks.is_some())
            })
            .chain(self.sabotage(&offers))
            .collect();
        if !arguments.list {
            for (word, why, count) in &missing {
                say(&format!("{}: {count} cases are {word}, because {why}", self.profile));
            }
        }
        log.end(&libtest_mimic::run(&arguments, trials), seed())
    }

    /// Plays the cases that a plan chooses, one after the other, and returns what became of them. `watch` hears of each
    /// case before it begins and after it ended, and may end the run.
    ///
    /// # Errors
    /// The service did not start, or the run was ended before its last case.
    pub fn play_all(
        self,
        plan: &Plan,
        mut watch: impl FnMut(Progress<'_>) -> ControlFlow<()>,
    ) -> Result<Lane, Unplayed> {
        let (offers, about) = self.offers();
        let about = about.ok_or(Unplayed::NotStarted)?;
        let virtual_time = offers.contains(&Need::VirtualTime);
        let manner = Manner {
            seed: seed(),
            histories: plan.histories.clone(),
            halt: plan.halt.clone(),
            patient: about.is_foreign(),
        };
        let log = Log::apart(&self.profile, about);
        let chosen: Vec<&'static Case> = cases::all().filter(|case| plan.chooses(case)).collect();
        for (at, case) in chosen.iter().enumerate() {
            if let Some(need) = case.needs.iter().find(|need| !offers.contains(need)) {
                log.lacking(case, *need);
                continue;
            }
            if let Some(why) = plan.reason_against(case) {
                log.left_out(case, why);
                continue;
            }
            let begins = Progress::Begins { case, number: at + 1, of: chosen.len() };
            if watch(begins).is_break() || manner.is_halted() {
                return Err(Unplayed::Halted);
            }
            let began = std::time::Instant::now();
            let played = play_patiently(&self.profile, case, self.start_for(case), virtual_time, &manner);
            if manner.is_halted() {
                return Err(Unplayed::Halted);
            }
            let run = log.played(case, &played, began.elapsed());
            if watch(Progress::Ended { run: &run }).is_break() {
                return Err(Unplayed::Halted);
            }
        }
        Ok(log.lane(manner.seed))
    }

    fn start_for(&self, case: &Case) -> &Start {
        match &self.own_servers {
            Some((_, start)) if case.needs.contains(&Need::Servers) => start,
            _ => &self.start,
        }
    }

    /// Lists the mistakes that the cases must notice on this very store.
    fn sabotage(&self, offers: &[Need]) -> Vec<Trial> {
        let virtual_time = offers.contains(&Need::VirtualTime);
        let mut trials = Vec::new();
        for &(mistake, prefix, words) in NOTICED {
            let case = cases::all().find(|case| case.name().starts_with(prefix));
            let case = case.expect("the list names cases that exist");
            // What is lost at the backend's door is lost outside of the mistake.
            let needs = case.needs.iter().chain(match mistake {
                Mistake::SilenceIsBusy => &[Need::Wire][..],
                _ => &[],
            });
            if !needs.into_iter().all(|need| offers.contains(need)) {
                continue;
            }
            let (profile, start) = (&self.profile, self.start.clone());
            let start: Start = Arc::new(move || {
                let started = start();
                Box::pin(
                    async move { Arc::new(Sabotaged { inner: started.await, mistake }) as Arc<dyn Service> },
                )
            });
            let name = format!("{profile}::sabotage::{mistake:?}_is_noticed_by_{}", case.id().to_lowercase());
            trials.push(Trial::test(name, move || {
                match play(SABOTAGE, case, start, virtual_time, seed()).failure {
                    None => Err(format!("{mistake:?} survives {}", case.name()).into()),
                    Some(failure) if failure.contains(words) => Ok(()),
                    Some(failure) => {
                        Err(format!("{mistake:?} was noticed, but not by {words:?}:\n{failure}").into())
                    }
                }
            }));
        }
        trials
    }

    fn offers(&self) -> (Vec<Need>, Option<About>) {
        let start = self.start.clone();
        let servers = self.own_servers.as_ref().map_or(0, |(count, _)| *count);
        let clocks = self.server_clocks;
        on_a_runtime("offers", false, move || async move {
            let service = start().await;
            let capabilities = service.connect().await.capabilities();
            let name = lockcore::LockName::parse("offers").expect("a plain name");
            let mut offers = Vec::new();
            let mut offer = |need, offered| {
                if offered {
                    offers.push(need);
                }
            };
            offer(Need::Wire, service.wire().is_some() || !service.servers().is_empty());
            offer(Need::Line, !service.servers().is_empty());
            offer(Need::Servers, servers > 0);
            offer(Need::Members, servers > 1);
            offer(Need::ServerClock, servers > 0 && clocks);
            offer(Need::Removal, !service.foreign());
            offer(Need::Fair, capabilities.fair);
            offer(Need::Queue, service.queued(&name).await.is_some());
            offer(Need::Processes, service.address().is_some());
            offer(Need::Floor, capabilities.fence_floor);
            offer(Need::VirtualTime, service.virtual_time());
            offer(Need::RealTime, !service.virtual_time());
            (offers, Some(About::ask(&*service, &capabilities).await))
        })
        .unwrap_or_default()
    }
}

fn boxed<S: Service>(start: impl AsyncFn() -> S + Send + Sync + 'static) -> Start {
    let start = Arc::new(start);
    Arc::new(move || {
        let start = start.clone();
        Box::pin(async move { Arc::new(start().await) as Arc<dyn Service> })
    })
}

#[allow(clippy::print_stderr)]
fn say(line: &str) {
    eprintln!("{line}");
}

/// Runs a future on a thread and a runtime of its own; `None`: it panicked.
fn on_a_runtime<T, F, W>(thread: &str, virtual_time: bool, work: W) -> Option<T>
where
    T: Send + 'static,
    F: Future<Output = T>,
    W: FnOnce() -> F + Send + 'static,
{
    let thread = std::thread::Builder::new().name(thread.into()).spawn(move || {
        let mut builder = tokio::runtime::Builder::new_current_thread();
        builder.enable_all().start_paused(virtual_time);
        builder.build().expect("a runtime can be made").block_on(work())
    });
    thread.expect("a thread can be started").join().ok()
}

/// Returns the seed of this run: `LOCK_SEED`, or the time.
fn seed() -> u64 {
    static SEED: std::sync::OnceLock<u64> = std::sync::OnceLock::new();
    *SEED.get_or_init(|| {
        let given = std::env::var("LOCK_SEED").ok().and_then(|text| text.parse().ok());
        given.unwrap_or_else(|| lockcore::backend::BootClock::read().as_nanos() & 0xffff_ffff)
    })
}

/// How cases are played.
#[derive(Clone, Debug)]
struct Manner {
    seed: u64,
    /// Where histories worth keeping go; `None`: nowhere.
    histories: Option<PathBuf>,
    /// Ends the case under way.
    halt: Option<watch::Receiver<bool>>,
    /// The store and the way to it belong to others, too: what was merely late is played again.
    patient: bool,
}

impl Manner {
    fn of_tests() -> Self {
        Self { seed: seed(), histories: Some(kept_in()), halt: None, patient: false }
    }

    fn is_halted(&self) -> bool {
        self.halt.as_ref().is_some_and(|halt| *halt.borrow())
    }
}

/// Returns when the run is to end; never, if nobody can say so.
async fn halted(halt: Option<watch::Receiver<bool>>) {
    if let Some(mut halt) = halt
        && halt.wait_for(|halt| *halt).await.is_ok()
    {
        return;
    }
    std::future::pending().await
}

/// The profile of cases that must fail.
const SABOTAGE: &str = "sabotage";

/// Keeps panics that a test waits for out of its output: people take them for failures.
fn hush_expected_panics() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let tell = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if std::thread::current().name() != Some(SABOTAGE) {
                tell(panic);
            }
        }));
    });
}

/// How often a case that draws at random is played, each time with another seed.
#[derive(Clone, Copy, Debug)]
struct Often {
    seeds: u64,
    /// Goes on for so long in any case.
    time: std::time::Duration,
}

impl Often {
    fn of_tests(seeds: u64) -> Result<Self, String> {
        let given = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
        let seeds = given("LOCK_SEEDS").map_or(Ok(seeds), |text| {
            text.parse().map_err(|_| format!("LOCK_SEEDS={text} is no number of seeds, such as 1000"))
        })?;
        let time = given("LOCK_SOAK").map_or(Ok(std::time::Duration::ZERO), |text| {
            humantime::parse_duration(&text).map_err(|_| format!("LOCK_SOAK={text} is no time, such as 30m"))
        })?;
        Ok(Self { seeds, time })
    }
}

/// Plays a case, and again with other seeds if it draws.
fn play_often(profile: &str, case: &'static Case, start: &Start, virtual_time: bool, often: Often) -> Played {
    let manner = Manner::of_tests();
    let began = std::time::Instant::now();
    let mut all = play_patiently(profile, case, start, virtual_time, &manner);
    let mut seeds = 1;
    while all.drew && all.failure.is_none() && (seeds < often.seeds || began.elapsed() < often.time) {
        let other = Manner { seed: manner.seed.wrapping_add(seeds), ..manner.clone() };
        // One history tells what a case is about; of the others only a failure is kept.
        let quiet = Manner { histories: None, ..other.clone() };
        let mut played = play_patiently(profile, case, start, virtual_time, &quiet);
        if played.failure.is_some() && virtual_time {
            played = play_patiently(profile, case, start, virtual_time, &other);
        }
        seeds += 1;
        let before = all.seen.take();
        all = Played { seen: played.seen.map(|seen| seen.after(before.as_ref())), ..played };
    }
    all
}

/// Plays a case; a case that only a stall of the machine spoilt is played again, twice at most. On a foreign store, so is one
/// that failed while its history breaks no promise: what is wrong fails each time.
fn play_patiently(
    profile: &str,
    case: &'static Case,
    start: &Start,
    virtual_time: bool,
    manner: &Manner,
) -> Played {
    let mut played = play_as(profile, case, start.clone(), virtual_time, manner);
    for attempt in 1..=2 {
        let late = manner.patient && played.failure.is_some() && !played.broken;
        if !(played.inconclusive || late) || manner.is_halted() {
            break;
        }
        let earlier = played.earlier.or_else(|| Some(played.failure?.lines().next()?.to_owned()));
        // Other names: the attempt before may have left a lease on its own.
        let other = if late { attempt } else { 0 };
        let manner = Manner { seed: manner.seed.wrapping_add(other), ..manner.clone() };
        played = Played { earlier, ..play_as(profile, case, start.clone(), virtual_time, &manner) };
    }
    if played.inconclusive {
        played.failure.get_or_insert_with(|| "inconclusive three times: the machine stalls".into());
    }
    played
}

/// Plays one case once, as tests do: body, then checker.
pub(crate) fn play(
    profile: &str,
    case: &'static Case,
    start: Start,
    virtual_time: bool,
    seed: u64,
) -> Played {
    play_as(profile, case, start, virtual_time, &Manner { seed, ..Manner::of_tests() })
}

/// No case takes as long, on any machine; one that waits for what never comes ends here.
const END_OF_A_CASE: std::time::Duration = std::time::Duration::from_secs(600);

fn play_as(profile: &str, case: &'static Case, start: Start, virtual_time: bool, manner: &Manner) -> Played {
    let name = format!("{profile}::{}::{}", case.topic(), case.name());
    // The case's own seed: the same for the same run seed, and different from its neighbours'.
    let seed = case
        .name()
        .bytes()
        .fold(manner.seed, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
    let stage: Arc<Mutex<Option<Bench>>> = Arc::default();
    let kept = stage.clone();
    let refused = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let refuses = refused.clone();
    let halt = manner.halt.clone();
    let thread = if profile == SABOTAGE { SABOTAGE } else { "case" };
    let outcome = on_a_runtime(thread, virtual_time, move || async move {
        let service = start().await;
        let bench = Bench::new(service, seed).await;
        *kept.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Some(bench.clone());
        let meter = (!bench.stage.service.virtual_time())
            .then(|| bench.recorder().meter_stalls(bench.ttl() / 4))
            .and_then(Result::ok);
        let body = async {
            let result = (case.run)(bench.clone()).await;
            // What runs in the background gets to say its last word.
            for _ in 0..20 {
                tokio::task::yield_now().await;
            }
            result
        };
        let result = tokio::select! {
            biased;
            () = halted(halt) => Err("halted".into()),
            result = CatchUnwind(Box::pin(body)) => result,
            () = tokio::time::sleep(END_OF_A_CASE), if !virtual_time => Err(format!("no end after {END_OF_A_CASE:?}")),
        };
        drop(meter);
        match result {
            Ok(Ok(Verdict::Kept)) => None,
            Ok(Ok(Verdict::Refused)) => {
                refuses.store(true, std::sync::atomic::Ordering::Relaxed);
                None
            }
            Ok(Err(unexpected)) => Some(unexpected.to_string()),
            Err(panic) => Some(panic),
        }
    });
    let failure = outcome.unwrap_or_else(|| Some("the case's own thread panicked".into()));
    let Some(bench) = stage.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take() else {
        return Played {
            failure: Some(failure.unwrap_or_else(|| "the service did not start".into())),
            broken: false,
            earlier: None,
            inconclusive: false,
            drew: false,
            seen: None,
        };
    };
    judge(&name, &bench, failure, refused.load(std::sync::atomic::Ordering::Relaxed), manner)
}

fn judge(name: &str, bench: &Bench, mut failure: Option<String>, refused: bool, manner: &Manner) -> Played {
    let history = bench.recorder().history();
    let rules = bench.stage.rules.lock().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
    let report = check(&history, &rules);
    let inconclusive = failure.is_none() && report.outcome == Outcome::Inconclusive;
    if report.outcome == Outcome::Fail {
        let found = format!("the history breaks a promise:\n{report}");
        failure = Some(failure.map_or(found.clone(), |failure| format!("{failure}\n{found}")));
    }
    let seen = Seen::new(bench, &rules, &report, refused);
    // A break that the case expects is evidence, too; so is a short history in which the resource had the last word.
    let telling = report.judged.stale > 0 && history.events.len() <= Seen::SHORT;
    let worth = failure.is_some() || !report.expected.is_empty() || telling;
    let folder = manner.histories.as_ref().filter(|_| worth);
    let kept = folder.map(|folder| keep(folder, name, history.clone().under(rules)));
    let seen = Some(seen.kept(kept.as_ref()));
    if let Some(text) = &mut failure {
        let path = kept.map_or_else(
            || "not kept".to_owned(),
            |kept| kept.map_or_else(|why| format!("could not be kept: {why}"), |p| p.display().to_string()),
        );
        let drawn = history.keys().first().map(|key| timeline::text(&history, Some(&report), key));
        *text = format!(
            "{text}\n  seed {} (LOCK_SEED replays the run), history {path}\n{}",
            manner.seed,
            drawn.unwrap_or_default()
        );
    }
    let broken = report.outcome == Outcome::Fail;
    let drew = bench.stage.drew.load(std::sync::atomic::Ordering::Relaxed);
    Played { failure, broken, earlier: None, inconclusive, drew, seen }
}

/// Keeps a history for people and for `conformance check`; returns where, or why not.
fn keep(folder: &Path, name: &str, history: History) -> Result<PathBuf, String> {
    let path = folder.join(format!("{}.jsonl", name.replace("::", "-").replace(['/', '\\'], "@")));
    std::fs::create_dir_all(folder).map_err(|e| e.to_string())?;
    history.write(&path).map_err(|e| e.to_string())?;
    Ok(path)
}

/// Returns `target/conformance/history`.
fn kept_in() -> PathBuf {
    crate::report::folder().join("history")
}

/// A future whose panic is a value: the case's words, not a dead thread.
struct CatchUnwind<F>(F);

impl<F: Future + Unpin> Future for CatchUnwind<F> {
    type Output = Result<F::Output, String>;

    fn poll(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Self::Output> {
        let inner = std::pin::Pin::new(&mut self.0);
        match catch_unwind(AssertUnwindSafe(|| inner.poll(cx))) {
            Ok(poll) => poll.map(Ok),
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
                std::task::Poll::Ready(Err(text.unwrap_or_else(|| "a panic without words".into())))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{MemoryService, history::Property};

    #[test]
    fn an_expected_break_is_kept_and_judged_again_as_it_was() {
        let case =
            cases::all().find(|case| case.name().starts_with("j08_")).expect("the case of a removed record");
        let start: Start =
            Arc::new(|| Box::pin(async { Arc::new(MemoryService::start()) as Arc<dyn Service> }));
        assert_eq!(play("kept", case, start, true, 1).failure, None);
        let path = kept_in().join(format!("kept-{}-{}.jsonl", case.topic(), case.name()));
        let history = History::read([&path]).expect("the history was kept");
        let rules = history.rules().expect("the rules stand beside it");
        let report = check(&history, rules);
        assert!(report.passed() && report.breaks(Property::S2), "{report}");
    }
}
