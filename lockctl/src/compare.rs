//! `compare`: the cases of the suite against stores that run already, side by side.

mod show;

use std::{
    ops::ControlFlow,
    panic,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
    thread,
    time::Duration,
};

use lockcore::{
    ErrorKind, StoreUrl,
    backend::{BootClock, Call, Preflight},
    config::BackendConfig,
};
use lockcore_conformance::{
    Foreign, Plan, Progress, Suite, child_main,
    report::{Comparison, Difference, Golden, Lane, Verdict},
};
use tokio::{
    runtime::Runtime,
    signal::unix::{SignalKind, signal},
    sync::{mpsc, watch},
};

use crate::{
    cli::{Compare, Format, StoreArgs},
    exit,
    failure::Failure,
    file,
    store::{self, registry},
    voice::{Voice, print},
};

/// So long a store may take to connect and to be looked at.
const PATIENCE: Duration = Duration::from_secs(20);
/// What was under way when a run ended may arrive later than this only if it hung for as long.
const LATE: Duration = Duration::from_millis(200);
/// So often the namespaces are swept until nothing more arrives.
const SWEEPS: u32 = 25;
/// So long the sweeps of one store may take together.
const SWEEPING: Duration = Duration::from_secs(60);

/// One store, under the name that its column has.
#[derive(Clone)]
struct Candidate {
    name: String,
    backend: BackendConfig,
}

/// What the lanes tell the main thread.
enum News {
    Line(String),
    Done(usize, Box<Result<Lane, Failure>>),
}

/// Plays, writes, compares.
pub(crate) fn main(options: &Compare, voice: &Voice) -> Result<u8, Failure> {
    let candidates = candidates(options)?;
    let mut golden = options.baseline.as_deref().map(|path| baseline(path, options.update)).transpose()?;
    let histories = options.out.as_ref().map(|out| out.join("history"));
    if let Some(histories) = &histories {
        std::fs::create_dir_all(histories)
            .map_err(|error| Failure::usage(format!("{}: {error}", histories.display())))?;
    }
    let (halt, halted) = watch::channel(false);
    let plan = Plan::default().with(|plan| {
        plan.only.clone_from(&options.only);
        plan.histories = histories;
        plan.halt = Some(halted);
        if !options.heavy {
            let why = "too much load for a server that others use; --heavy plays it";
            plan.leave_out = ["scale::", "soak::"].map(|topic| (topic.to_owned(), why.to_owned())).into();
        }
    });
    if let Some(text) = plan.unknown() {
        return Err(Failure::usage(format!("no case has {text:?} in its name")));
    }
    quiet_cases();
    let run = format!("compare-{:08x}", random());
    let (ttl, rate) = (options.ttl, options.rate);
    let ended = play(&candidates, &halt, voice, move |candidate, tell| {
        lane(candidate, &run, ttl, rate, plan.clone(), tell)
    })?;
    let mut lanes = Vec::new();
    let mut unasked = Vec::new();
    for lane in ended {
        match lane {
            Ok(lane) => lanes.push(lane),
            Err(failure) => unasked.push(failure),
        }
    }
    let comparison = Comparison::new(lanes).written_by("lockctl compare");
    if let Some(out) = &options.out {
        write_all(out, &comparison).map_err(|error| Failure::usage(format!("{}: {error}", out.display())))?;
    }
    let lanes: Vec<Lane> = comparison.backends.iter().map(|backend| backend.lane.clone()).collect();
    let mut differences = Vec::new();
    let mut not_run: Vec<String> = Vec::new();
    if let Some(golden) = golden.as_mut().filter(|_| !options.update) {
        if !options.only.is_empty() {
            golden.keep_cases_of(&lanes);
        }
        differences = lanes.iter().map(|lane| golden.compare(lane)).collect();
        not_run = golden.not_run(&lanes).into_iter().map(str::to_owned).collect();
    }
    show(options, voice, &comparison, &differences, &not_run)?;
    for failure in &unasked {
        voice.failure(&failure.sentence);
    }
    if let Some(worst) = unasked.iter().map(|failure| failure.code).max() {
        return Ok(worst);
    }
    if let (Some(path), Some(golden), true) = (&options.baseline, golden.as_mut(), options.update) {
        if let Err(why) = golden.update_chosen(&lanes) {
            voice.failure(format_args!("{}: {why}; nothing was written", path.display()));
            return Ok(1);
        }
        let whole = write_whole(path, &golden.to_lines());
        whole.map_err(|error| Failure::usage(format!("{}: {error}", path.display())))?;
        voice.progress(format_args!("{}: written; review what has changed", path.display()));
    }
    let changed = !not_run.is_empty() || differences.iter().any(Difference::is_change);
    Ok(u8::from(changed || comparison.fails()))
}

/// Reads which stores are meant.
fn candidates(options: &Compare) -> Result<Vec<Candidate>, Failure> {
    let mut candidates: Vec<Candidate> = Vec::new();
    let mut config = None;
    for text in &options.stores {
        let (name, backend) = match text.split_once('=') {
            Some((name, url)) if !name.contains("://") => (name, BackendConfig::new(address(name, url)?)),
            _ if text.contains("://") => {
                return Err(Failure::usage(
                    "a store has a name before its address, like redis=redis://redis-a:6379",
                ));
            }
            _ => {
                let file = match config.take() {
                    Some(file) => file,
                    None => of_file(options)?,
                };
                let backend = file.config.backend.get(text).cloned();
                let known: Vec<String> = file.config.backend.keys().cloned().collect();
                let missing = || {
                    let path = file.path.display();
                    Failure::usage(format!("{path} has no backend {text:?}; it has {}", known.join(", ")))
                };
                let backend = backend.ok_or_else(missing)?;
                config = Some(file);
                (text.as_str(), backend)
            }
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        if name.is_empty() || !name.chars().all(plain) {
            return Err(Failure::usage(format!(
                "the name {name:?} of a store is made of A-Z a-z 0-9 . _ and -"
            )));
        }
        if candidates.iter().any(|known| known.name == name) {
            return Err(Failure::usage(format!("two stores are called {name:?}")));
        }
        registry()
            .check(&backend)
            .map_err(|error| Failure::usage(format!("{name}: {}: {}", backend.url, error.message())))?;
        candidates.push(Candidate { name: name.to_owned(), backend });
    }
    Ok(candidates)
}

fn address(name: &str, url: &str) -> Result<StoreUrl, Failure> {
    // What cannot be read is not repeated: it may hold a password.
    let url = StoreUrl::parse(url)
        .map_err(|error| Failure::usage(format!("the address of {name}: {}", error.message())))?;
    if url.has_secret() {
        return Err(Failure::usage(format!(
            "the address of {name} holds a password, which every user of this machine can read in the list of \
             processes; put the store into a configuration file and name it here"
        )));
    }
    Ok(url)
}

fn of_file(options: &Compare) -> Result<file::File, Failure> {
    let args = StoreArgs {
        store: None,
        risk: None,
        config: options.config.clone(),
        namespace: None,
        user: None,
        password_file: None,
    };
    let path = file::find(&args, store::variable).ok_or_else(|| {
        Failure::usage(
            "--store names a backend of a configuration file, and there is none; name one with --config",
        )
    })?;
    file::load(&path, &registry())
}

fn baseline(path: &Path, update: bool) -> Result<Golden, Failure> {
    if update && !path.exists() {
        return Ok(Golden::default());
    }
    Golden::read(path).map_err(Failure::usage)
}

/// A case that fails panics, and what it says is part of the results; a panic of ours is told as ever.
fn quiet_cases() {
    let usual = panic::take_hook();
    panic::set_hook(Box::new(move |what| {
        if thread::current().name() != Some("case") {
            usual(what);
        }
    }));
}

/// Plays all stores at the same time, each on a thread of its own, and the cases of each one after the other.
fn play(
    candidates: &[Candidate],
    halt: &watch::Sender<bool>,
    voice: &Voice,
    lane: impl Fn(&Candidate, &mpsc::UnboundedSender<News>) -> Result<Lane, Failure> + Clone + Send + 'static,
) -> Result<Vec<Result<Lane, Failure>>, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let (tell, mut news) = mpsc::unbounded_channel();
    let mut ended: Vec<Option<Result<Lane, Failure>>> = candidates.iter().map(|_| None).collect();
    runtime.block_on(async {
        // Heard before the first thread writes anything.
        let mut signals = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()]
            .map(|kind| (kind, signal(kind)));
        for (at, candidate) in candidates.iter().enumerate() {
            let (candidate, lane, tell) = (candidate.clone(), lane.clone(), tell.clone());
            let lane = move || {
                let played = lane(&candidate, &tell);
                // The main thread waits for this.
                let _ = tell.send(News::Done(at, Box::new(played)));
            };
            thread::Builder::new().name(format!("store {}", candidates[at].name)).spawn(lane)?;
        }
        // A lane that ends without a word is heard of, too.
        drop(tell);
        let mut by_signal = None;
        while ended.iter().any(Option::is_none) {
            let [(_, first), (_, second), (_, third)] = &mut signals;
            let kind = tokio::select! {
                told = news.recv() => {
                    match told {
                        Some(News::Line(line)) => voice.progress(line),
                        Some(News::Done(at, lane)) => ended[at] = Some(*lane),
                        None => break,
                    }
                    continue;
                }
                () = heard(first) => SignalKind::interrupt(),
                () = heard(second) => SignalKind::terminate(),
                () = heard(third) => SignalKind::hangup(),
            };
            by_signal.get_or_insert(kind);
            voice.progress("ending; removing what the cases have written");
            halt.send_replace(true);
        }
        match by_signal {
            Some(kind) => {
                let left: Vec<String> = ended
                    .iter()
                    .flatten()
                    .filter_map(|lane| lane.as_ref().err().map(|failure| failure.sentence.clone()))
                    .filter(|sentence| !sentence.is_empty())
                    .collect();
                Err(Failure::new(
                    exit::of_signal(kind.as_raw_value()),
                    std::iter::once("interrupted".to_owned()).chain(left).collect::<Vec<_>>().join("; "),
                ))
            }
            None => Ok(()),
        }
    })?;
    let missing = |at: usize| {
        let sentence = format!("{}: the run ended without a result", candidates[at].name);
        Err(Failure::usage(sentence))
    };
    Ok(ended.into_iter().enumerate().map(|(at, lane)| lane.unwrap_or_else(|| missing(at))).collect())
}

async fn heard(signal: &mut std::io::Result<tokio::signal::unix::Signal>) {
    match signal {
        Ok(signal) => drop(signal.recv().await),
        Err(_) => std::future::pending().await,
    }
}

/// Plays one store, and sweeps whatever happens.
fn lane(
    candidate: &Candidate,
    run: &str,
    ttl: Duration,
    rate: u32,
    plan: Plan,
    tell: &mpsc::UnboundedSender<News>,
) -> Result<Lane, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let found = runtime.block_on(look(candidate))?;
    let least = *found.capabilities.ttl.start();
    let config = candidate.backend.clone();
    let connect = move || {
        let config = config.clone();
        async move { registry().connect(&config).await }
    };
    let foreign = Foreign::new(run, connect)
        .server(found.server)
        .ttl(ttl.max(least))
        .embedded(matches!(candidate.backend.url.scheme(), "sqlite" | "memory"))
        .processes(portable(&candidate.backend))
        .per_second(rate);
    let suite = Suite::new(candidate.name.as_str(), async move || foreign.for_a_case());
    let mut trouble = None;
    let say = |line: String| drop(tell.send(News::Line(line)));
    let mut place = (0, 0);
    let played = suite.play_all(&plan, |progress| match progress {
        Progress::Begins { number, of, .. } => {
            place = (number, of);
            ControlFlow::Continue(())
        }
        Progress::Ended { run } => {
            let (number, of) = place;
            say(format!(
                "{}: {number} of {of}: {}::{}: {}",
                candidate.name, run.topic, run.name, run.verdict
            ));
            if run.verdict == Verdict::Fails
                && let Err(failure) = runtime.block_on(look(candidate))
            {
                // It is the store that failed, and not the case.
                trouble = Some(failure);
                return ControlFlow::Break(());
            }
            ControlFlow::Continue(())
        }
        _ => ControlFlow::Continue(()),
    });
    let swept = sweep(&runtime, candidate, run);
    match (played, trouble) {
        (Ok(lane), None) => swept.map(|()| lane),
        (_, Some(trouble)) => Err(trouble),
        (Err(_), None) if plan.halt.as_ref().is_some_and(|halt| *halt.borrow()) => {
            // Nothing more to say than what could not be removed.
            swept.and_then(|()| Err(Failure::new(exit::UNAVAILABLE, "")))
        }
        (Err(unplayed), None) => {
            Err(Failure::new(exit::UNAVAILABLE, format!("{}: {unplayed}", candidate.name)))
        }
    }
}

/// Becomes a client of a case, if the environment says so: cases stop and kill such processes.
pub(crate) fn client_of_a_case() -> Option<ExitCode> {
    child_main(async |address| {
        let config: BackendConfig = serde_json::from_str(&address).expect("lockctl compare wrote it");
        let connected = registry().connect(&config).await;
        connected.unwrap_or_else(|error| panic!("a client of a case: {error}"))
    })
}

/// Writes how a store is reached for another process's environment, unless a secret is a part of it.
fn portable(config: &BackendConfig) -> Option<String> {
    let text = serde_json::to_string(config).ok()?;
    let read: BackendConfig = serde_json::from_str(&text).ok()?;
    // What is masked does not come back.
    (read == *config && !config.url.has_secret()).then_some(text)
}

async fn look(candidate: &Candidate) -> Result<Preflight, Failure> {
    let (name, url) = (&candidate.name, &candidate.backend.url);
    let about = |error: &lockcore::Error| {
        let failure = Failure::store(error, url);
        // Whatever a store says to a look, it was not asked what it promises.
        let code = if error.kind() == ErrorKind::Invalid { exit::UNAVAILABLE } else { failure.code };
        Failure::new(code, format!("{name}: {}", failure.sentence))
    };
    let looked = tokio::time::timeout(PATIENCE, async {
        let backend = registry().connect(&candidate.backend).await.map_err(|error| about(&error))?;
        // The namespace of a look is one that may be swept, too: some stores keep a record for each.
        let call = Call::for_tests(Arc::new(BootClock), PATIENCE / 2)
            .in_namespace("scratch-compare-look")
            .map_err(|error| about(&error))?;
        let found = backend.preflight(&call).await.map_err(|error| about(&error));
        backend.close().await;
        found
    });
    looked.await.unwrap_or_else(|_| {
        let sentence = format!("{name}: no answer within {} s (store {url})", PATIENCE.as_secs());
        Err(Failure::new(exit::UNAVAILABLE, sentence))
    })
}

/// Removes what the cases wrote, again until nothing more arrives: requests that were given up may be under way.
fn sweep(runtime: &Runtime, candidate: &Candidate, run: &str) -> Result<(), Failure> {
    let namespaces = Foreign::namespaces(run);
    let swept = runtime.block_on(until_clean(async || {
        let mut removed = 0;
        for namespace in namespaces.iter().map(String::as_str).chain(["scratch-compare-look"]) {
            removed += registry().sweep(&candidate.backend, namespace, PATIENCE).await?;
        }
        Ok(removed)
    }));
    let left = |why: String| {
        Failure::new(
            exit::UNAVAILABLE,
            format!(
                "{}: {why}; records below {} may be left (store {})",
                candidate.name, namespaces[0], candidate.backend.url
            ),
        )
    };
    match swept {
        Ok(Swept::Clean) => Ok(()),
        Ok(Swept::Coming) => Err(left("records keep coming into the namespace of this run".into())),
        Ok(Swept::Late) => Err(left(format!("the sweep was not over within {} s", SWEEPING.as_secs()))),
        Err(error) => Err(left(lockcore::Error::to_string(&error))),
    }
}

/// How the sweeps of one store ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Swept {
    Clean,
    Coming,
    Late,
}

/// Sweeps until two sweeps in a row find nothing. A store that hangs must not keep the others' results back.
async fn until_clean(mut sweep: impl AsyncFnMut() -> lockcore::Result<u64>) -> lockcore::Result<Swept> {
    let sweeps = async {
        let mut clean = 0;
        for _ in 0..SWEEPS {
            clean = if sweep().await? == 0 { clean + 1 } else { 0 };
            if clean == 2 {
                return Ok(Swept::Clean);
            }
            tokio::time::sleep(LATE).await;
        }
        Ok(Swept::Coming)
    };
    tokio::time::timeout(SWEEPING, sweeps).await.unwrap_or(Ok(Swept::Late))
}

/// Draws what tells this run from others.
fn random() -> u32 {
    use std::hash::{BuildHasher as _, Hasher as _};
    // The standard library's hasher is seeded by the system, once a process.
    let mut hasher = std::hash::RandomState::new().build_hasher();
    hasher.write_u32(std::process::id());
    hasher.finish() as u32
}

/// Writes every form, and the results that they were made from.
fn write_all(out: &Path, comparison: &Comparison) -> std::io::Result<()> {
    let results = out.join("results");
    for backend in &comparison.backends {
        backend.lane.write(&results)?;
    }
    for (name, text) in [
        ("report.json", comparison.to_json()),
        ("junit.xml", comparison.to_junit()),
        ("SEMANTICS.md", comparison.to_markdown()),
        ("index.html", comparison.to_page(&comparison.timelines(&results))),
    ] {
        std::fs::write(out.join(name), text)?;
    }
    Ok(())
}

/// Writes a file whole or not at all.
fn write_whole(path: &Path, text: &str) -> std::io::Result<()> {
    let mut half = path.as_os_str().to_owned();
    half.push(".half");
    let half = PathBuf::from(half);
    std::fs::write(&half, text)?;
    std::fs::rename(&half, path)
}

fn show(
    options: &Compare,
    voice: &Voice,
    comparison: &Comparison,
    differences: &[Difference],
    not_run: &[String],
) -> Result<(), Failure> {
    let format = if voice.is_json() { Format::Json } else { options.format };
    let path = options.baseline.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
    let told = show::differences(&path, differences, not_run);
    let text = match format {
        Format::Text => show::table(comparison, voice) + &told,
        Format::Markdown => comparison.to_markdown() + &show::differences_in_markdown(&told),
        Format::Json => comparison.to_json(),
        Format::Junit => comparison.to_junit(),
        Format::Html => {
            let results = options.out.as_ref().map(|out| out.join("results")).unwrap_or_default();
            comparison.to_page(&comparison.timelines(&results))
        }
        Format::Github => {
            if let Some(summary) = store::variable("GITHUB_STEP_SUMMARY") {
                let whole = comparison.to_markdown() + &show::differences_in_markdown(&told);
                show::append(&summary, &whole)
                    .map_err(|error| Failure::usage(format!("{}: {error}", summary.display())))?;
            }
            show::annotations(&path, comparison, differences, not_run)
        }
    };
    print(&text)?;
    // What changed must be seen, whatever the form on stdout is.
    if matches!(format, Format::Json | Format::Junit | Format::Html) && !told.is_empty() {
        voice.failure(told.trim_end());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(name: &str) -> Candidate {
        Candidate { name: name.into(), backend: BackendConfig::new(StoreUrl::parse("memory://").unwrap()) }
    }

    #[test]
    fn a_lane_that_ends_without_a_word_is_a_failure_and_holds_nobody_up() {
        let (halt, _halted) = watch::channel(false);
        let all = [candidate("a"), candidate("b")];
        let ended = play(&all, &halt, &Voice::for_tests(), |candidate, _| match candidate.name.as_str() {
            "a" => panic!("a lane of this test"),
            _ => Err(Failure::new(exit::UNAVAILABLE, "told")),
        })
        .unwrap();
        let told: Vec<_> = ended.iter().map(|lane| lane.as_ref().err().unwrap()).collect();
        assert_eq!((told[0].code, told[1].code), (exit::USAGE, exit::UNAVAILABLE));
        assert!(told[0].sentence.contains("a: the run ended without a result"), "{}", told[0].sentence);
    }

    #[tokio::test(start_paused = true)]
    async fn a_sweep_ends_although_its_store_hangs_or_fills_up_again() {
        let left = std::cell::Cell::new(3_u64);
        let emptied = until_clean(async || Ok(left.replace(left.get().saturating_sub(1))));
        assert_eq!(emptied.await.unwrap(), Swept::Clean);
        assert_eq!(until_clean(async || Ok(1)).await.unwrap(), Swept::Coming);
        assert_eq!(until_clean(async || std::future::pending().await).await.unwrap(), Swept::Late);
        let refused = || lockcore::Error::new(ErrorKind::Unavailable, "away");
        assert_eq!(until_clean(async || Err(refused())).await.unwrap_err().kind(), ErrorKind::Unavailable);
    }
}
