//! A store that need not be there when the application starts.

use std::{fmt, sync::Arc, time::Duration};

use tokio::sync::OnceCell;

use super::{Demands, Registry, source::Source};
use crate::{
    backend::*,
    error::{Error, ErrorKind, Result, Verb},
};

/// Connects at the first verb that needs the store, and looks at it as a strict start would.
///
/// Until then it answers the widest range, so that lockcore refuses nothing that the store may keep; what the store
/// does not keep is refused here.
pub(super) struct Lazy {
    scheme: &'static str,
    source: Source,
    registry: Registry,
    demands: Demands,
    // Demands that are not met are final: asking again would open a connection for every acquire.
    store: OnceCell<std::result::Result<Store, String>>,
}

struct Store {
    backend: Arc<dyn LockBackend>,
    capabilities: Capabilities,
}

impl Lazy {
    pub(super) fn new(scheme: &'static str, source: Source, registry: Registry, demands: Demands) -> Self {
        Self { scheme, source, registry, demands, store: OnceCell::new() }
    }

    async fn ready(&self, call: &Call) -> Result<&Store> {
        let connect = async || -> Result<_> {
            let backend = self.source.connect(&self.registry).await?;
            let found = backend.preflight(call).await?;
            let misses = self.demands.misses(&found.capabilities);
            if misses.is_empty() {
                return Ok(Ok(Store { backend, capabilities: found.capabilities }));
            }
            backend.close().await;
            Ok(Err(misses.join("; ")))
        };
        match self.store.get_or_try_init(connect).await {
            Ok(Ok(store)) => Ok(store),
            Ok(Err(misses)) => Err(Error::new(ErrorKind::Misconfigured, misses.clone())),
            // Whatever went wrong on the way to the store, the verb itself was not sent.
            Err(error) if error.kind() == ErrorKind::Unknown => {
                Err(Error::new(ErrorKind::Unavailable, "the store cannot be reached").with_source(error))
            }
            Err(error) => Err(error),
        }
    }

    fn connected(&self) -> Option<&Store> {
        self.store.get().and_then(|store| store.as_ref().ok())
    }
}

fn covers(store: &Store, call: &Call, request: &AcquireRequest) -> Result<()> {
    let promised = &store.capabilities;
    let (least, most) = (promised.ttl.start(), promised.ttl.end());
    if !promised.ttl.contains(&request.ttl()) {
        return Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "a TTL must be from {least:?} to {most:?} on {}, not {:?}",
                promised.backend,
                request.ttl()
            ),
        ));
    }
    if request.floor().is_some() && !promised.fence_floor {
        return Err(Error::new(
            ErrorKind::Unsupported,
            format!("{} honours no fence floor", promised.backend),
        ));
    }
    if !call.lock_delay().is_zero() && !promised.lock_delay {
        return Err(Error::new(ErrorKind::Unsupported, format!("{} keeps no lock-delay", promised.backend)));
    }
    Ok(())
}

impl fmt::Debug for Lazy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lazy")
            .field("source", &self.source)
            .field("connected", &self.connected().map(|store| &store.backend))
            .finish_non_exhaustive()
    }
}

#[deny(clippy::missing_trait_methods)]
#[async_trait]
impl LockBackend for Lazy {
    fn capabilities(&self) -> Capabilities {
        if let Some(store) = self.connected() {
            return store.capabilities.clone();
        }
        Capabilities::weakest(self.scheme).with(|c| {
            c.ttl = Duration::ZERO..=Duration::MAX;
            c.fence_floor = true;
            c.labels = true;
            c.lock_delay = true;
            c.pushes_loss = true;
        })
    }

    async fn acquire(&self, call: &Call, request: &AcquireRequest) -> Result<Lease> {
        let store = self.ready(call).await?;
        covers(store, call, request)?;
        store.backend.acquire(call, request).await
    }

    async fn renew(&self, call: &Call, lease: &Lease, ttl: Duration) -> Result<Lease> {
        self.ready(call).await?.backend.renew(call, lease, ttl).await
    }

    async fn release(&self, call: &Call, lease: &Lease) -> Result<Released> {
        self.ready(call).await?.backend.release(call, lease).await
    }

    async fn resolve(&self, call: &Call, request: &AcquireRequest) -> Result<Resolution> {
        match self.connected() {
            Some(store) => store.backend.resolve(call, request).await,
            // Never sent, so never granted.
            None => Ok(Resolution::Gone),
        }
    }

    async fn inspect(&self, call: &Call, name: &LockName) -> Result<LockState> {
        self.ready(call).await?.backend.inspect(call, name).await
    }

    async fn abandon(&self, call: &Call, request: &AcquireRequest) -> Result<()> {
        match self.connected() {
            Some(store) => store.backend.abandon(call, request).await,
            None => Ok(()),
        }
    }

    async fn preflight(&self, call: &Call) -> Result<Preflight> {
        self.ready(call).await?.backend.preflight(call).await
    }

    async fn renew_many(&self, call: &Call, leases: &[Lease], ttl: Duration) -> Vec<Result<Lease>> {
        match self.ready(call).await {
            Ok(store) => store.backend.renew_many(call, leases, ttl).await,
            Err(error) => {
                leases.iter().map(|_| Err(Error::new(error.kind(), error.message().to_owned()))).collect()
            }
        }
    }

    async fn ended(&self, call: &Call, lease: &Lease) -> LostReason {
        match self.connected() {
            Some(store) => store.backend.ended(call, lease).await,
            None => std::future::pending().await,
        }
    }

    async fn raise(&self, call: &Call, lease: &Lease, floor: Fence) -> Result<()> {
        self.ready(call).await?.backend.raise(call, lease, floor).await
    }

    async fn raise_fence(&self, call: &Call, name: &LockName, floor: Fence) -> Result<Fence> {
        self.ready(call).await?.backend.raise_fence(call, name, floor).await
    }

    async fn high_water(&self, call: &Call) -> Result<Option<Fence>> {
        self.ready(call).await?.backend.high_water(call).await
    }

    async fn break_lock(&self, call: &Call, name: &LockName, expect: Option<Stamp>) -> Result<Broken> {
        self.ready(call).await?.backend.break_lock(call, name, expect).await
    }

    async fn list(
        &self,
        call: &Call,
        prefix: Option<&LockName>,
        after: Option<&LockName>,
    ) -> Result<Vec<LockName>> {
        self.ready(call).await?.backend.list(call, prefix, after).await
    }

    async fn phase_read(&self, call: &Call) -> Result<Option<PhaseRecord>> {
        self.ready(call).await?.backend.phase_read(call).await
    }

    async fn phase_cas(&self, call: &Call, expect: Option<&PhaseRecord>, new: &PhaseRecord) -> Result<bool> {
        self.ready(call).await?.backend.phase_cas(call, expect, new).await
    }

    async fn join(&self, call: &Call, phase: &str, ttl: Duration) -> Result<Lease> {
        self.ready(call).await?.backend.join(call, phase, ttl).await
    }

    async fn leave(&self, call: &Call, member: &Lease) -> Result<Released> {
        self.ready(call).await?.backend.leave(call, member).await
    }

    async fn members(&self, call: &Call) -> Result<Vec<Member>> {
        self.ready(call).await?.backend.members(call).await
    }

    async fn second_connection(&self, call: &Call) -> Result<Option<Arc<dyn LockBackend>>> {
        self.ready(call).await?.backend.second_connection(call).await
    }

    async fn close(&self) {
        if let Some(store) = self.connected() {
            store.backend.close().await;
        }
    }

    fn unsupported(&self, verb: Verb) -> Error {
        let backend = self.capabilities().backend;
        Error::new(ErrorKind::Unsupported, "this backend does not do that").about(verb, None, backend)
    }
}
