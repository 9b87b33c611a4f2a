//! Deliberately broken siblings of the reference: the suite is itself under test.
//!
//! Each mutant wraps the in-memory backend, is played through the case that guards the promise it breaks, and must be
//! caught with the words of that promise; a crash or another failure does not count.

use std::{process::ExitCode, sync::Arc, time::Duration};

use libtest_mimic::{Arguments, Failed, Trial};
use lockcore::{LockName, backend::*, memory::MemoryBackend};

use crate::{MemoryService, Service, Wire, bench::Flaw, cases, suite::play};

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
];

/// Plays every mutant through its cases: the `main` of a test that proves the suite. Prints which case killed which.
pub fn kill_all() -> ExitCode {
    let arguments = Arguments::from_args();
    let trials = KILLS
        .iter()
        .map(|&(mutant, case, says)| {
            let name = format!("{mutant:?} is killed by {}", case.trim_end_matches('_'));
            Trial::test(name, move || kill(mutant, case, says))
        })
        .collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn kill(mutant: Mutant, prefix: &str, says: &str) -> Result<(), Failed> {
    let Some(case) = cases::all().find(|case| case.name().starts_with(prefix)) else {
        return Err(format!("there is no case {prefix}").into());
    };
    let start = Arc::new(move || -> std::pin::Pin<Box<dyn Future<Output = Arc<dyn Service>>>> {
        Box::pin(async move {
            Arc::new(BrokenService { inner: MemoryService::start(), mutant }) as Arc<dyn Service>
        })
    });
    match play("mutant", case, start, 1).failure {
        None => Err(format!("{mutant:?} survives {}", case.name()).into()),
        Some(failure) if failure.contains(says) => Ok(()),
        Some(failure) => Err(format!("{mutant:?} was killed, but not by {says:?}:\n{failure}").into()),
    }
}

struct BrokenService {
    inner: MemoryService,
    mutant: Mutant,
}

#[async_trait]
impl Service for BrokenService {
    async fn connect(&self) -> Arc<dyn LockBackend> {
        Arc::new(Broken { store: self.inner.store().clone(), mutant: self.mutant })
    }
    async fn holder(&self, name: &LockName) -> Option<Owner> {
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
            _ => None,
        }
    }
}

/// The in-memory backend with one mistake.
#[derive(Debug)]
struct Broken {
    store: MemoryBackend,
    mutant: Mutant,
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
        let owned = self.store.holder(request.name(), call.now()) == Some(*request.owner());
        match self.store.acquire(call, &asked).await {
            Ok(lease) => match self.mutant {
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
        match self.store.renew(call, lease, ttl).await {
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
        self.store.inspect(call, name).await
    }

    async fn abandon(&self, call: &Call, request: &AcquireRequest) -> Result<()> {
        match self.mutant {
            AbandonDoesNothing | CancelledWaiterStays => Ok(()),
            _ => self.store.abandon(call, request).await,
        }
    }

    async fn preflight(&self, call: &Call) -> Result<Preflight> {
        self.store.preflight(call).await
    }
}
