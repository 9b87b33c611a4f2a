//! Deliberately broken siblings of the reference: the suite is itself under test.
//!
//! Each mutant wraps the in-memory backend, is played through the case that guards the promise it breaks, and must be
//! caught with the words of that promise; a crash or another failure does not count.

use std::{
    process::ExitCode,
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    time::Duration,
};

use libtest_mimic::{Arguments, Failed, Trial};
use lockcore::{LockName, backend::*, memory::MemoryBackend};

use crate::{
    Case, MemoryService, Need, Semantics, Service, SimulatedService, Wire,
    bench::Flaw,
    cases,
    report::{self, Killed, Kills},
    simulated::Fault,
    suite::play,
};

/// One deliberate mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mutant {
    ReleaseWithoutOwner,
    ReleaseDoesNothing,
    ReleaseAnswersNowTwice,
    RenewWithoutOwner,
    RenewRecreates,
    RenewShortens,
    FenceForgottenOnRelease,
    FenceDoesNotGrow,
    DeadlineFromTheReply,
    LateReplyIsGranted,
    DeadlineFromTwiceTheTtl,
    UnknownIsUnavailable,
    LostReplyIsGranted,
    ReaskIsAnotherGrant,
    ReaskArmsTheTtlAgain,
    ResolveClaimsAnothers,
    ResolveFindsNothing,
    AbandonDoesNothing,
    CancelledWaiterStays,
    WaitTimeoutIsGranted,
    WaitIgnoresItsBudget,
    WaitNeverWakes,
    ReentrantForOneClient,
    RefusalNamesNobody,
    FloorIgnored,
    NamesFoldCase,
    NamespaceIgnored,
    BusyWhenUnavailable,
    ResourceReadsAreNoTouch,
    ResourceNoTieBreak,
    ResourceNoOperations,
    ResourceStrictlyGreater,
    ResourceFloorInMemory,
    RetryByAnotherOwner,
    RenewalGivesUpAfterAnError,
    FirstErrorIsALoss,
    LostRenewalReplyCounts,
    RenewOnlyHere,
    RenewChangesTheFence,
    LeavingWaiterFreesTheLock,
    WaiterGrantedByPatience,
    WaiterGoesToTheEnd,
    LockDelayIgnored,
    ServerEndsEarly,
    ServerNeverEnds,
    RefusedTryStays,
    ReleaseTakesNeighbours,
    AbandonForgetsLateCopies,
    DeadlineOnTheWallClock,
    RestartForgets,
    RestartForgetsFences,
    MinorityGrants,
    LeaderTakesItsLocks,
    StopForgetsFences,
    OwnerInDebug,
    LookProlongs,
    BreakIgnoresTheExpectation,
    BreakKeepsTheFence,
    ListIgnoresTheSegment,
    ListRepeats,
    RaiseDoesNothing,
    RaiseByAnybody,
    RaiseLowers,
    HighWaterOfTheHeldOnly,
    PreflightClaimsMore,
    StoreForgetsAtRandom,
}

use Mutant::*;

/// Mutant, the case that must catch it, and what the failure must say.
const KILLS: &[(Mutant, &str, &str)] = &[
    (ReleaseWithoutOwner, "b05_", "a stale release"),
    (ReleaseWithoutOwner, "b01_", "a forged owner"),
    (ReleaseWithoutOwner, "b03_", "a stale release"),
    (ReleaseDoesNothing, "a01_", "a released lock has a holder"),
    (ReleaseAnswersNowTwice, "b04_", "AlreadyOver"),
    (RenewWithoutOwner, "b01_", "a forged owner renewed"),
    (RenewWithoutOwner, "f07_", "a renewal after a takeover went through"),
    (RenewWithoutOwner, "d01_frozen", "a lost lease was renewed"),
    (RenewRecreates, "f08_", "a renewal of a removed record went through"),
    (RenewShortens, "f09_", "a renewal shortened the lease"),
    (FenceForgottenOnRelease, "e05_", "the fence did not grow"),
    (FenceForgottenOnRelease, "a06_", "the fence did not grow"),
    (FenceDoesNotGrow, "d01_frozen", "the fence did not grow"),
    (DeadlineFromTheReply, "c04_", "after the request left"),
    (LateReplyIsGranted, "c05_", "a lease that is over was handed out"),
    (LateReplyIsGranted, "d03_", "a lease that is over was handed out"),
    (DeadlineFromTwiceTheTtl, "c03_", "stretched"),
    (DeadlineFromTwiceTheTtl, "c02_", "before the holder's deadline"),
    (UnknownIsUnavailable, "i01_a_lost_reply_is_unknown", "a lost reply is not unknown"),
    (LostReplyIsGranted, "i01_a_lost_reply_is_unknown", "a lost reply is not unknown"),
    (ReaskIsAnotherGrant, "i02_", "asked again"),
    (ReaskArmsTheTtlAgain, "i02_", "armed the TTL again"),
    (ResolveClaimsAnothers, "i06_", "a recovery claimed"),
    (ResolveFindsNothing, "i01_a_lost_reply_is_unknown", "was not adopted"),
    (AbandonDoesNothing, "i07_", "an abandoned acquisition still holds"),
    (AbandonDoesNothing, "h03_", "a grant that nobody heard is left"),
    (CancelledWaiterStays, "h01_", "someone else has it"),
    (WaitTimeoutIsGranted, "g03_a_wait_ends_with", "a wait that ended is no grant"),
    (WaitIgnoresItsBudget, "g03_a_wait_ends_with", "took"),
    (WaitNeverWakes, "g01_", "after the release"),
    (ReentrantForOneClient, "a05_", "one client entered twice"),
    (RefusalNamesNobody, "a02_", "does not name the holder"),
    (FloorIgnored, "e06_", "is not above the floor"),
    (NamesFoldCase, "n02_", "meets another name"),
    (NamespaceIgnored, "n03_", "wait budget"),
    (BusyWhenUnavailable, "j11_", "refused otherwise"),
    (ResourceReadsAreNoTouch, "e03_", "a write fell between read and write"),
    (ResourceNoTieBreak, "e02_", "an equal fence of another owner was let through"),
    (ResourceNoOperations, "e02_", "a retry was applied twice"),
    (ResourceStrictlyGreater, "e02_", "the holder's next write was refused"),
    (ResourceFloorInMemory, "e04_", "a restart let the stale fence through"),
    (RetryByAnotherOwner, "i01_a_lost_reply_is_recovered", "unexpected Unknown"),
    (RenewalGivesUpAfterAnError, "f03_", "was not made up for"),
    (FirstErrorIsALoss, "f03_", "one lost renewal is told as something else"),
    (LostRenewalReplyCounts, "i03_", "a lost reply is not unknown"),
    (RenewOnlyHere, "f01_", "are left on the server"),
    (RenewOnlyHere, "f02_", "a renewed lock was granted"),
    (RenewChangesTheFence, "f01_", "a renewal changed the holding"),
    (LeavingWaiterFreesTheLock, "g07_", "granted while the lock is held"),
    (WaiterGrantedByPatience, "g07_", "granted while the lock is held"),
    (WaiterGoesToTheEnd, "g04_", "served out of order"),
    (LockDelayIgnored, "c06_", "after the deadline of an unclean end"),
    (ServerEndsEarly, "c02_", "granted before the holder's deadline"),
    (ServerNeverEnds, "c01_", "unexpected WaitTimeout"),
    (RefusedTryStays, "a02_", "a refused try stands in the queue"),
    (ReleaseTakesNeighbours, "a04_", "went with another"),
    (AbandonForgetsLateCopies, "i07_a_late_copy", "a late copy"),
    (DeadlineOnTheWallClock, "k03_", "are left of"),
    (RestartForgets, "j01_", "a lock that outlives a restart was granted to another"),
    (RestartForgetsFences, "j01_", "the fence fell behind"),
    (MinorityGrants, "j11_without", "granted without a majority"),
    (LeaderTakesItsLocks, "j10_the_death_of_a_leader", "a lock that outlives its leader was granted"),
    (StopForgetsFences, "d07_", "after"),
    (OwnerInDebug, "b06_", "an owner shows"),
    (LookProlongs, "p01_", "a look prolonged the lease"),
    (BreakIgnoresTheExpectation, "p03_", "a break hit another holder"),
    (BreakKeepsTheFence, "p02_", "is not above"),
    (ListIgnoresTheSegment, "p04_", "listed under"),
    (ListRepeats, "p04_", "the pages do not end"),
    (RaiseDoesNothing, "o02_", "a lower number lowered the floor"),
    (RaiseByAnybody, "o05_", "a former holder raised the fence"),
    (RaiseLowers, "o02_", "a lower number lowered the floor"),
    (HighWaterOfTheHeldOnly, "o06_", "above the high water"),
    (PreflightClaimsMore, "m03_", "preflight claims more"),
    (ReleaseWithoutOwner, "j17_", "S3 no foreign effect"),
    (StoreForgetsAtRandom, "j17_", "S2 exclusion"),
];

/// Plays every mutant through its cases: the `main` of a test that proves the suite.
///
/// With `LOCK_KILL_MATRIX=FILE` it plays every mutant through every case instead, and writes who killed whom: a case
/// that kills nothing guards nothing that was tried, and a mutant that a single case kills marks a thin spot. The report
/// shows either.
pub fn kill_all() -> ExitCode {
    let arguments = Arguments::from_args();
    // A mutant is meant to make cases panic; what they said is in the verdict.
    std::panic::set_hook(Box::new(|_| {}));
    if let Ok(row) = std::env::var(MATRIX_ROW) {
        return print_row(&row);
    }
    if let Some(path) = std::env::var_os("LOCK_KILL_MATRIX") {
        let written = matrix().and_then(|kills| {
            kills.write(&report::folder())?;
            std::fs::write(&path, kills.to_markdown())
        });
        return if written.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let killed: Arc<Mutex<Vec<(Mutant, &'static Case)>>> = Arc::default();
    let trials = KILLS
        .iter()
        .map(|&(mutant, case, says)| {
            let name = format!("{mutant:?} is killed by {}", case.trim_end_matches('_'));
            let killed = killed.clone();
            Trial::test(name, move || {
                let case = kill(mutant, case, says)?;
                killed.lock().unwrap_or_else(PoisonError::into_inner).push((mutant, case));
                Ok(())
            })
        })
        .collect();
    let conclusion = libtest_mimic::run(&arguments, trials);
    if conclusion.num_filtered_out == 0 && conclusion.num_passed > 0 {
        let written = mapped(&killed.lock().unwrap_or_else(PoisonError::into_inner)).write(&report::folder());
        if let Err(error) = written {
            say(&format!("the kills could not be written for the report: {error}"));
        }
    }
    conclusion.exit_code()
}

#[allow(clippy::print_stderr)]
fn say(line: &str) {
    eprintln!("{line}");
}

/// Returns what a run of the tests has shown: each mutant, and those of its mapped cases that caught it.
fn mapped(killed: &[(Mutant, &'static Case)]) -> Kills {
    let mut rows: Vec<Killed> = Vec::new();
    for (mutant, ..) in KILLS {
        let mutant_name = format!("{mutant:?}");
        if rows.iter().all(|row| row.mutant != mutant_name) {
            let by = killed.iter().filter(|(other, _)| other == mutant);
            let killed_by = by.map(|(_, case)| case.name().to_owned()).collect();
            rows.push(Killed { mutant: mutant_name, killed_by, soaks: None });
        }
    }
    let guards = |case: &&Case| KILLS.iter().any(|(_, prefix, _)| case.name().starts_with(prefix));
    Kills::of(false, cases::all().filter(guards).map(|case| case.name().to_owned()).collect(), rows)
}

fn kill(mutant: Mutant, prefix: &str, says: &str) -> Result<&'static Case, Failed> {
    let Some(case) = cases::all().find(|case| case.name().starts_with(prefix)) else {
        return Err(format!("there is no case {prefix}").into());
    };
    match play_mutant(mutant, case, 1) {
        None => Err(format!("{mutant:?} survives {}", case.name()).into()),
        Some(failure) if failure.contains(says) => Ok(case),
        Some(failure) => Err(format!("{mutant:?} was killed, but not by {says:?}:\n{failure}").into()),
    }
}

/// Returns the simulated store that a mutant lives in, if that has servers.
fn simulated(mutant: Mutant) -> Option<(Semantics, Fault)> {
    Some(match mutant {
        RestartForgets => (Semantics::Quorum, Fault::ForgetsOverARestart),
        RestartForgetsFences => (Semantics::Forgetful, Fault::ForgetsFences),
        MinorityGrants => (Semantics::Quorum, Fault::GrantsWithoutMajority),
        LeaderTakesItsLocks => (Semantics::Quorum, Fault::LosesWithItsLeader),
        StopForgetsFences => (Semantics::Quorum, Fault::ForgetsOverAStop),
        _ => return None,
    })
}

/// How long a case may take under a mutant; in virtual time they take milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);

/// Plays a mutant through a case, and returns why it failed. Virtual time may stand still under a mutant, so real time
/// bounds it.
fn play_mutant(mutant: Mutant, case: &'static Case, seed: u64) -> Option<String> {
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || {
        let start = Arc::new(move || -> std::pin::Pin<Box<dyn Future<Output = Arc<dyn Service>>>> {
            Box::pin(async move {
                match simulated(mutant) {
                    Some((semantics, fault)) => {
                        Arc::new(SimulatedService::broken(semantics, fault)) as Arc<dyn Service>
                    }
                    None => Arc::new(BrokenService { inner: MemoryService::start(), mutant }),
                }
            })
        });
        let _ = tell.send(play("mutant", case, start, true, seed).failure);
    });
    told.recv_timeout(PATIENCE).unwrap_or_else(|_| Some(format!("no end after {PATIENCE:?}")))
}

/// Makes this program play one row of the matrix: a mutant under which virtual time runs on for ever ends with it.
const MATRIX_ROW: &str = "LOCK_KILL_MATRIX_ROW";

/// Begins the line of a row that says how many seeds of the soak killed.
const SOAKS: &str = "soaks ";

/// Returns the cases that the store of a mutant can play.
fn playable(mutant: Mutant) -> impl Iterator<Item = &'static Case> {
    let servers = simulated(mutant).map_or(0, |(semantics, _)| semantics.servers());
    let embedded = [Need::Wire, Need::Fair, Need::Queue, Need::Floor, Need::VirtualTime, Need::Removal];
    let offers = move |need: &Need| match need {
        Need::Servers => servers > 0,
        Need::Members => servers > 1,
        need => embedded.contains(need),
    };
    cases::all().filter(move |case| case.needs.iter().all(offers))
}

#[allow(clippy::print_stdout)]
fn print_row(row: &str) -> ExitCode {
    let Some((mutant, ..)) = KILLS.iter().find(|(mutant, ..)| format!("{mutant:?}") == row) else {
        return ExitCode::FAILURE;
    };
    for case in playable(*mutant).filter(|case| play_mutant(*mutant, case, 1).is_some()) {
        println!("{}", case.name());
    }
    if let Some(soak) = playable(*mutant).find(|case| case.topic() == "soak") {
        let soaks = (1..=Kills::SOAKS.into()).filter(|seed| play_mutant(*mutant, soak, *seed).is_some());
        println!("{SOAKS}{}", soaks.count());
    }
    ExitCode::SUCCESS
}

/// Plays every mutant through every case that its store can play: memory, or a simulated one with servers.
fn matrix() -> std::io::Result<Kills> {
    let mut rows: Vec<Killed> = Vec::new();
    for (mutant, ..) in KILLS {
        let mutant = format!("{mutant:?}");
        if rows.iter().all(|row| row.mutant != mutant) {
            let row =
                std::process::Command::new(std::env::current_exe()?).env(MATRIX_ROW, &mutant).output()?;
            let text = String::from_utf8_lossy(&row.stdout);
            let (soaks, killers): (Vec<_>, Vec<_>) = text.lines().partition(|line| line.starts_with(SOAKS));
            let soaks = soaks.first().and_then(|line| line.strip_prefix(SOAKS)?.parse().ok());
            rows.push(Killed { mutant, killed_by: killers.into_iter().map(str::to_owned).collect(), soaks });
        }
    }
    let played = |case: &&Case| {
        KILLS.iter().any(|(mutant, ..)| playable(*mutant).any(|other| std::ptr::eq(other, *case)))
    };
    Ok(Kills::of(true, cases::all().filter(played).map(|case| case.name().to_owned()).collect(), rows))
}

struct BrokenService {
    inner: MemoryService,
    mutant: Mutant,
}

#[async_trait]
impl Service for BrokenService {
    async fn connect(&self) -> Arc<dyn LockBackend> {
        Arc::new(Broken { store: self.inner.store().clone(), mutant: self.mutant, seen: Mutex::default() })
    }
    async fn holder(&self, name: &LockName) -> Option<OwnerDigest> {
        self.inner.holder(&folded(self.mutant, name)).await
    }
    async fn steal(&self, name: &LockName) {
        self.inner.steal(name).await;
    }
    fn ttl(&self) -> Duration {
        self.inner.ttl()
    }
    fn clock(&self) -> Arc<dyn Clock> {
        self.inner.clock()
    }
    fn virtual_time(&self) -> bool {
        true
    }
    async fn queued(&self, name: &LockName) -> Option<u32> {
        self.inner.queued(name).await
    }
    fn wire(&self) -> Option<&dyn Wire> {
        self.inner.wire()
    }
    fn flaw(&self) -> Option<Flaw> {
        match self.mutant {
            ResourceReadsAreNoTouch => Some(Flaw::ReadsAreNoTouch),
            ResourceNoTieBreak => Some(Flaw::NoTieBreak),
            ResourceNoOperations => Some(Flaw::NoOperations),
            ResourceStrictlyGreater => Some(Flaw::StrictlyGreater),
            ResourceFloorInMemory => Some(Flaw::FloorInMemory),
            _ => None,
        }
    }
}

/// The in-memory backend with one mistake.
struct Broken {
    store: MemoryBackend,
    mutant: Mutant,
    /// Owners for which something went wrong, and what a careless `Debug` shows.
    seen: Mutex<Vec<Owner>>,
}

impl std::fmt::Debug for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut shown = f.debug_struct("Broken");
        if self.is(OwnerInDebug) {
            let hex = |owner: &Owner| owner.expose().iter().map(|b| format!("{b:02x}")).collect::<String>();
            shown.field("seen", &self.seen().iter().map(hex).collect::<Vec<_>>());
        }
        shown.field("mutant", &self.mutant).finish()
    }
}

fn folded(mutant: Mutant, name: &LockName) -> LockName {
    match mutant {
        NamesFoldCase => LockName::parse(&name.as_str().to_lowercase()).unwrap_or_else(|_| name.clone()),
        _ => name.clone(),
    }
}

impl Broken {
    fn is(&self, mutant: Mutant) -> bool {
        self.mutant == mutant
    }

    fn seen(&self) -> MutexGuard<'_, Vec<Owner>> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a lease that the server never granted like this.
    fn made_up(&self, call: &Call, request: &AcquireRequest, ttl: Duration, fence: Fence) -> Result<Lease> {
        request.granted(call, call.now(), ttl, fence)
    }

    async fn last_fence(&self, call: &Call, name: &LockName) -> Fence {
        let state = self.store.inspect(call, name).await;
        state.ok().and_then(|state| state.last_fence).unwrap_or(Fence::MIN)
    }
}

#[async_trait]
impl LockBackend for Broken {
    fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }

    async fn acquire(&self, call: &Call, request: &AcquireRequest) -> Result<Lease> {
        let mut call = call.clone();
        if self.is(NamespaceIgnored) {
            call = call.in_namespace("")?;
        }
        let call = &call;
        let mut asked = request.clone();
        if self.is(NamesFoldCase) && folded(self.mutant, request.name()) != *request.name() {
            let lower = folded(self.mutant, request.name());
            drop(self.store.acquire(call, &AcquireRequest::new(lower, request.ttl())).await?);
            return self.store.acquire(call, request).await;
        }
        if self.is(FloorIgnored) && request.floor().is_some() {
            let plain = AcquireRequest::new(request.name().clone(), request.ttl());
            return self.store.acquire(call, &plain).await;
        }
        if self.is(WaitNeverWakes) && request.wait_until().is_some() {
            let end = request.wait_until().unwrap_or(Moment::MAX);
            let nap = call.now().saturating_add(request.ttl() * 7).min(end);
            call.clock().sleep_until(nap).await;
        }
        if self.is(WaitIgnoresItsBudget)
            && let Some(end) = request.wait_until()
        {
            asked = asked.waiting_until(end.saturating_add(request.ttl() * 3));
        }
        if self.is(CancelledWaiterStays) && request.wait_until().is_some() {
            let (store, call, asked) = (self.store.clone(), call.clone(), asked.clone());
            let detached = tokio::spawn(async move { store.acquire(&call, &asked).await });
            return detached.await.map_err(|_| Error::new(ErrorKind::Unknown, "gone"))?;
        }
        if self.is(RetryByAnotherOwner) && call.attempt() > 1 {
            asked = AcquireRequest::new(request.name().clone(), request.ttl());
            if let Some(end) = request.wait_until() {
                asked = asked.waiting_until(end);
            }
        }
        if self.is(StoreForgetsAtRandom) && self.store.requests(Verb::Acquire) % 16 == 15 {
            self.store.steal(request.name());
        }
        let owned = self.store.holder(request.name(), call.now()) == Some(*request.owner());
        let sent = call.now();
        let answer = match request.wait_until() {
            Some(_) if self.is(WaiterGrantedByPatience) => {
                let patience = call.now().saturating_add(request.ttl());
                tokio::select! {
                    answer = self.store.acquire(call, &asked) => answer,
                    () = call.clock().sleep_until(patience) => {
                        let fence = self.last_fence(call, request.name()).await;
                        return self.made_up(call, request, request.ttl(), Fence::new(fence.get() + 1)?);
                    }
                }
            }
            _ => self.store.acquire(call, &asked).await,
        };
        match answer {
            Ok(lease) => match self.mutant {
                LockDelayIgnored => {
                    Ok(self.store.cut_short(&lease, sent, request.ttl().saturating_sub(call.lock_delay())))
                }
                ServerEndsEarly => Ok(self.store.cut_short(&lease, sent, request.ttl() / 2)),
                ServerNeverEnds => Ok(self.store.cut_short(&lease, sent, request.ttl() * 10_000)),
                WaiterGoesToTheEnd
                    if lease.fence.get() % 2 == 0 && self.store.waiters(request.name()) > 0 =>
                {
                    self.store.release(call, &lease).await?;
                    self.store.acquire(call, &asked).await
                }
                DeadlineOnTheWallClock => {
                    let wall = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
                    let wall = wall.map_or(u64::MAX, |wall| wall.as_nanos() as u64);
                    request.granted(call, Moment::from_nanos(wall), request.ttl(), lease.fence)
                }
                OwnerInDebug => {
                    self.seen().push(lease.owner);
                    Ok(lease)
                }
                DeadlineFromTheReply => self.made_up(call, request, request.ttl(), lease.fence),
                DeadlineFromTwiceTheTtl => Ok(call.renewed(&lease, call.now(), request.ttl() * 2)),
                FenceDoesNotGrow => self.made_up(call, request, request.ttl(), Fence::MIN),
                ReaskIsAnotherGrant if owned => {
                    self.made_up(call, request, request.ttl() / 2, Fence::new(lease.fence.get() + 1)?)
                }
                ReaskArmsTheTtlAgain if owned => self.made_up(call, request, request.ttl(), lease.fence),
                _ => Ok(lease),
            },
            Err(error) => match (self.mutant, error.kind()) {
                (LateReplyIsGranted, ErrorKind::Lost) => {
                    let fence = self.last_fence(call, request.name()).await;
                    self.made_up(call, request, request.ttl(), fence)
                }
                (LostReplyIsGranted, ErrorKind::Unknown) => {
                    let fence = self.last_fence(call, request.name()).await;
                    self.made_up(call, request, request.ttl(), fence)
                }
                (UnknownIsUnavailable, ErrorKind::Unknown) => {
                    Err(Error::new(ErrorKind::Unavailable, "timed out"))
                }
                (WaitTimeoutIsGranted, ErrorKind::WaitTimeout) => {
                    self.made_up(call, request, request.ttl(), Fence::MAX)
                }
                (ReentrantForOneClient, ErrorKind::Held) => {
                    let fence = self.last_fence(call, request.name()).await;
                    self.made_up(call, request, request.ttl(), Fence::new(fence.get() + 1)?)
                }
                (RefusedTryStays, ErrorKind::Held) => {
                    let (store, call) = (self.store.clone(), call.clone());
                    let stays = asked.clone().waiting_until(Moment::MAX);
                    let mut stays = Box::pin(async move { store.acquire(&call, &stays).await });
                    let _ = crate::bench::poll_once(&mut stays).await;
                    tokio::spawn(stays);
                    Err(error)
                }
                (RefusalNamesNobody, ErrorKind::Held) => Err(Error::held_by(ErrorKind::Held, None)),
                (BusyWhenUnavailable, ErrorKind::Unavailable) => Err(Error::held_by(ErrorKind::Held, None)),
                _ => Err(error),
            },
        }
    }

    async fn renew(&self, call: &Call, lease: &Lease, ttl: Duration) -> Result<Lease> {
        let sent = call.now();
        if self.is(NamespaceIgnored) {
            return self.store.renew(&call.in_namespace("")?, lease, ttl).await;
        }
        if self.is(RenewOnlyHere) {
            return Ok(call.renewed(lease, sent, ttl));
        }
        if self.is(RenewalGivesUpAfterAnError) && self.seen().contains(&lease.owner) {
            return Err(Error::new(ErrorKind::Unknown, "gave up renewing"));
        }
        match self.store.renew(call, lease, ttl).await {
            Err(error) if error.kind() == ErrorKind::Unknown => match self.mutant {
                FirstErrorIsALoss => Err(Error::lost(LostReason::Taken)),
                LostRenewalReplyCounts => Ok(call.renewed(lease, call.now(), ttl)),
                _ => {
                    self.seen().push(lease.owner);
                    Err(error)
                }
            },
            Ok(mut renewed) if self.is(RenewChangesTheFence) => {
                renewed.fence = Fence::new(renewed.fence.get() + 1)?;
                Ok(renewed)
            }
            Ok(renewed) if self.is(RenewShortens) => Ok(self.store.cut_short(&renewed, sent, ttl)),
            Err(error) if error.kind() == ErrorKind::Lost => match self.mutant {
                RenewWithoutOwner => Ok(call.renewed(lease, sent, ttl)),
                RenewRecreates => {
                    let request = AcquireRequest::new(lease.name.clone(), ttl);
                    drop(self.store.acquire(call, &request).await?);
                    Ok(call.renewed(lease, sent, ttl))
                }
                _ => Err(error),
            },
            other => other,
        }
    }

    async fn release(&self, call: &Call, lease: &Lease) -> Result<Released> {
        match self.mutant {
            ReleaseWithoutOwner => {
                self.store.steal(&lease.name);
                Ok(Released::Now)
            }
            ReleaseTakesNeighbours => {
                for name in self.store.list(call, None, None).await? {
                    self.store.steal(&name);
                }
                Ok(Released::Now)
            }
            ReleaseDoesNothing => Ok(Released::Now),
            ReleaseAnswersNowTwice => self.store.release(call, lease).await.map(|_| Released::Now),
            FenceForgottenOnRelease => {
                let answer = self.store.release(call, lease).await;
                self.store.forget();
                answer
            }
            NamespaceIgnored => self.store.release(&call.in_namespace("")?, lease).await,
            _ => self.store.release(call, lease).await,
        }
    }

    async fn resolve(&self, call: &Call, request: &AcquireRequest) -> Result<Resolution> {
        match self.mutant {
            ResolveFindsNothing => Ok(Resolution::Gone),
            ResolveClaimsAnothers if self.store.holder(request.name(), call.now()).is_some() => {
                let fence = self.last_fence(call, request.name()).await;
                self.made_up(call, request, request.ttl(), fence).map(Resolution::Adopted)
            }
            _ => self.store.resolve(call, request).await,
        }
    }

    async fn inspect(&self, call: &Call, name: &LockName) -> Result<LockState> {
        let state = self.store.inspect(call, name).await?;
        if self.is(LookProlongs)
            && let (Some(owner), Some(holder)) = (self.store.holder(name, call.now()), &state.holder)
        {
            let mut request = AcquireRequest::new(name.clone(), holder.remaining * 4).granted(
                call,
                call.now(),
                holder.remaining * 4,
                holder.fence,
            )?;
            request.owner = owner;
            let _ = self.store.renew(call, &request, holder.remaining * 4).await;
        }
        Ok(state)
    }

    async fn raise(&self, call: &Call, lease: &Lease, floor: Fence) -> Result<()> {
        match self.mutant {
            RaiseDoesNothing => Ok(()),
            RaiseByAnybody => self.store.raise_fence(call, &lease.name, floor).await.map(drop),
            _ => self.store.raise(call, lease, floor).await,
        }
    }

    async fn raise_fence(&self, call: &Call, name: &LockName, floor: Fence) -> Result<Fence> {
        match self.mutant {
            RaiseDoesNothing => Ok(floor),
            RaiseLowers => self.store.raise_fence(call, name, floor).await.map(|_| floor),
            _ => self.store.raise_fence(call, name, floor).await,
        }
    }

    async fn high_water(&self, call: &Call) -> Result<Option<Fence>> {
        match self.mutant {
            HighWaterOfTheHeldOnly => Ok(None),
            _ => self.store.high_water(call).await,
        }
    }

    async fn break_lock(
        &self,
        call: &Call,
        name: &LockName,
        expect: Option<Stamp>,
    ) -> Result<lockcore::backend::Broken> {
        let expect = if self.is(BreakIgnoresTheExpectation) { None } else { expect };
        let mut broken = self.store.break_lock(call, name, expect).await?;
        if self.is(BreakKeepsTheFence)
            && let Some(holder) = &broken.holder
        {
            broken.floor = holder.fence;
        }
        Ok(broken)
    }

    async fn list(
        &self,
        call: &Call,
        prefix: Option<&LockName>,
        after: Option<&LockName>,
    ) -> Result<Vec<LockName>> {
        match (self.mutant, prefix) {
            (ListIgnoresTheSegment, Some(prefix)) => {
                let mut names = self.store.list(call, None, after).await?;
                names.retain(|name| name.as_str().starts_with(prefix.as_str()));
                Ok(names)
            }
            (ListRepeats, _) => self.store.list(call, prefix, None).await,
            _ => self.store.list(call, prefix, after).await,
        }
    }

    async fn abandon(&self, call: &Call, request: &AcquireRequest) -> Result<()> {
        match self.mutant {
            AbandonDoesNothing | CancelledWaiterStays => Ok(()),
            LeavingWaiterFreesTheLock => {
                self.store.steal(request.name());
                self.store.abandon(call, request).await
            }
            AbandonForgetsLateCopies => {
                if self.store.holder(request.name(), call.now()) == Some(*request.owner()) {
                    self.store.steal(request.name());
                }
                Ok(())
            }
            _ => self.store.abandon(call, request).await,
        }
    }

    async fn preflight(&self, call: &Call) -> Result<Preflight> {
        let mut preflight = self.store.preflight(call).await?;
        if self.is(PreflightClaimsMore) {
            preflight.capabilities.consistency = Consistency::Linearizable;
        }
        Ok(preflight)
    }
}
