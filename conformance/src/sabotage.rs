//! Mistakes put into a backend under test: on its own server, the cases must notice them.
//!
//! The mutants of the in-memory backend prove the cases; these prove that the cases also bite through this backend's
//! connections and clocks. A few seconds of each lane.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use lockcore::{LockName, backend::*};

use crate::bench::{Flaw, Servers, Service, Wire};

/// One mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mistake {
    /// Ends whatever is held under the name.
    ReleaseByName,
    /// Says that it released.
    ReleaseForgets,
    /// Says that it renewed.
    RenewForgets,
    /// Counts the deadline from the answer.
    DeadlineFromTheAnswer,
    /// Takes silence for a refusal.
    SilenceIsBusy,
    /// Leaves what was given up.
    AbandonForgets,
    /// Asks again as somebody else.
    RetryIsAnother,
    /// Hears no notification.
    WaiterSleeps,
}

use Mistake::*;

/// Which case notices which mistake, and in which words.
pub(crate) const NOTICED: &[(Mistake, &str, &str)] = &[
    (ReleaseByName, "b05_", "a stale release"),
    (ReleaseForgets, "a03_", "unexpected Held"),
    (RenewForgets, "f08_", "a renewal of a removed record went through"),
    (DeadlineFromTheAnswer, "c04_", "after the request left"),
    (SilenceIsBusy, "i01_a_lost_reply_is_unknown", "a lost reply is not unknown"),
    (AbandonForgets, "h03_", "a grant that nobody heard is left"),
    (RetryIsAnother, "i02_", "unexpected Held"),
    (WaiterSleeps, "g01_", "after the release"),
];

/// A service whose connections make a mistake.
pub(crate) struct Sabotaged {
    pub(crate) inner: Arc<dyn Service>,
    pub(crate) mistake: Mistake,
}

impl Sabotaged {
    fn spoil(&self, backend: Arc<dyn LockBackend>) -> Arc<dyn LockBackend> {
        Arc::new(Spoilt { backend, service: self.inner.clone(), mistake: self.mistake })
    }
}

// A method left out here would fall back to its body, and another service than the lane's would be tested.
#[deny(clippy::missing_trait_methods)]
#[async_trait]
impl Service for Sabotaged {
    async fn connect(&self) -> Arc<dyn LockBackend> {
        self.spoil(self.inner.connect().await)
    }
    async fn connect_through(&self, addresses: &[SocketAddr]) -> Arc<dyn LockBackend> {
        self.spoil(self.inner.connect_through(addresses).await)
    }
    fn servers(&self) -> Vec<SocketAddr> {
        self.inner.servers()
    }
    async fn holder(&self, name: &LockName) -> Option<OwnerDigest> {
        self.inner.holder(name).await
    }
    async fn steal(&self, name: &LockName) {
        self.inner.steal(name).await;
    }
    fn namespace(&self, seed: u64) -> String {
        self.inner.namespace(seed)
    }
    fn namespace_beside(&self, seed: u64, word: &str) -> String {
        self.inner.namespace_beside(seed, word)
    }
    fn foreign(&self) -> bool {
        self.inner.foreign()
    }
    async fn admit(&self, may_wait: bool) {
        self.inner.admit(may_wait).await;
    }
    fn ttl(&self) -> Duration {
        self.inner.ttl()
    }
    fn clock(&self) -> Arc<dyn Clock> {
        self.inner.clock()
    }
    fn virtual_time(&self) -> bool {
        self.inner.virtual_time()
    }
    fn embedded(&self) -> bool {
        self.inner.embedded()
    }
    async fn queued(&self, name: &LockName) -> Option<u32> {
        self.inner.queued(name).await
    }
    fn wire(&self) -> Option<&dyn Wire> {
        self.inner.wire()
    }
    fn power(&self) -> Option<&dyn Servers> {
        self.inner.power()
    }
    fn address(&self) -> Option<String> {
        self.inner.address()
    }
    async fn version(&self) -> Option<String> {
        self.inner.version().await
    }
    fn flaw(&self) -> Option<Flaw> {
        self.inner.flaw()
    }
}

/// A backend with one mistake.
struct Spoilt {
    backend: Arc<dyn LockBackend>,
    service: Arc<dyn Service>,
    mistake: Mistake,
}

impl std::fmt::Debug for Spoilt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} with {:?}", self.backend, self.mistake)
    }
}

#[async_trait]
impl LockBackend for Spoilt {
    fn capabilities(&self) -> Capabilities {
        self.backend.capabilities()
    }

    async fn acquire(&self, call: &Call, request: &AcquireRequest) -> Result<Lease> {
        match self.mistake {
            RetryIsAnother if call.attempt() > 1 => {
                self.backend.acquire(call, &AcquireRequest::new(request.name().clone(), request.ttl())).await
            }
            WaiterSleeps => match request.wait_until() {
                Some(end) => loop {
                    let once = request.clone().waiting_until(call.now());
                    match self.backend.acquire(call, &once).await {
                        Err(error) if error.kind() == ErrorKind::WaitTimeout && call.now() < end => {
                            let nap = call.now().saturating_add(request.ttl() * 6);
                            call.clock().sleep_until(nap.min(end)).await;
                        }
                        answer => return answer,
                    }
                },
                None => self.backend.acquire(call, request).await,
            },
            DeadlineFromTheAnswer => {
                let granted = self.backend.acquire(call, request).await?;
                request.granted(call, call.now(), request.ttl(), granted.fence)
            }
            SilenceIsBusy => match self.backend.acquire(call, request).await {
                Err(error) if error.kind() == ErrorKind::Unknown => {
                    Err(Error::held_by(ErrorKind::Held, None))
                }
                answer => answer,
            },
            _ => self.backend.acquire(call, request).await,
        }
    }

    async fn renew(&self, call: &Call, lease: &Lease, ttl: Duration) -> Result<Lease> {
        match self.mistake {
            RenewForgets => Ok(call.renewed(lease, call.now(), ttl)),
            _ => self.backend.renew(call, lease, ttl).await,
        }
    }

    async fn release(&self, call: &Call, lease: &Lease) -> Result<Released> {
        match self.mistake {
            ReleaseForgets => Ok(Released::Now),
            ReleaseByName => {
                self.service.steal(&lease.name).await;
                Ok(Released::Now)
            }
            _ => self.backend.release(call, lease).await,
        }
    }

    async fn resolve(&self, call: &Call, request: &AcquireRequest) -> Result<Resolution> {
        self.backend.resolve(call, request).await
    }

    async fn inspect(&self, call: &Call, name: &LockName) -> Result<LockState> {
        self.backend.inspect(call, name).await
    }

    async fn abandon(&self, call: &Call, request: &AcquireRequest) -> Result<()> {
        match self.mistake {
            AbandonForgets => Ok(()),
            _ => self.backend.abandon(call, request).await,
        }
    }

    async fn ended(&self, call: &Call, lease: &Lease) -> LostReason {
        self.backend.ended(call, lease).await
    }

    async fn close(&self) {
        self.backend.close().await;
    }
}
