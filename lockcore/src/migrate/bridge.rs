//! The bridge's verbs, in the order of the trait.

use std::{fmt, sync::Arc, time::Duration};

use futures_util::future::join;
use tokio::join;

use super::{
    Phase,
    grants::Grant,
    membership::{Membership, Shared, in_time},
    operate::Side,
    weaker,
};
use crate::backend::*;

mod acquire;
mod carry;

use carry::Renewal;

/// Two stores as one, while locks move from one to the other.
///
/// # Shape
/// Nothing of its own: a lock is a record on each store that the phase uses, under one owner; a membership of the phase
/// lies beside them. The lease's fence is the new side's; the old side's is raised above it in one step that works only
/// while this holding is on record there. So every later grant on either side is above it.
///
/// # Units
/// TTLs and steps: the coarser of both, and no TTL is longer than a membership. A lease ends with the first of: its
/// record on either side, and the membership it was granted under.
///
/// | phase | acquire | renew | release | both stores must be up |
/// |---|---|---|---|---|
/// | `from`, `to` | as the store | as the store | as the store | no |
/// | `both` | old, then new, then raise the old: one step more than the two stores' own | both at once | both at once | yes |
///
/// A membership takes one renewal in a third of its TTL, in the background.
///
/// What is kept is the weaker of both stores. Grants are not in order of arrival across phases: who is in `to` waits on
/// the new store alone.
///
/// # Errors
/// Besides the stores' own: `Misconfigured`, when the phase is not open. `Lost(SessionEnded)`, when a lease outlived its
/// membership.
///
/// # Cancel safety
/// As for every backend: what a dropped acquire left on either side, [`abandon`](LockBackend::abandon) clears away.
///
/// # Example
/// ```
/// use std::{sync::Arc, time::Duration};
/// use lockcore::{LockClient, backend::*, memory::MemoryBackend, migrate::{Bridge, Migration, Phase, Stage}};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> lockcore::Result<()> {
/// let old: Arc<dyn LockBackend> = Arc::new(MemoryBackend::default());
/// let new: Arc<dyn LockBackend> = Arc::new(MemoryBackend::default());
/// // An operator opens the phases one after the other; `lockctl migrate` does it for stores that are servers.
/// let call = Call::for_tests(Arc::new(BootClock), Duration::from_secs(5));
/// let migration = Migration::new("moving", old.clone(), new.clone())?;
/// for stage in [Stage::From, Stage::FromBoth] {
///     migration.step(&call, stage).await?;
/// }
/// let locks = LockClient::new(Bridge::new("moving", Phase::Both, old, new)?);
/// locks.named("order/42").run(async |_| -> lockcore::Result<()> { Ok(()) }).await?;
/// locks.close().await;
/// # Ok(())
/// # }
/// ```
pub struct Bridge {
    from: Arc<dyn LockBackend>,
    to: Arc<dyn LockBackend>,
    shared: Arc<Shared>,
}

impl Bridge {
    /// Joins two stores in one phase of a migration. Sends nothing.
    ///
    /// # Errors
    /// `Invalid`: the migration's name is not 1 to 64 bytes of `A-Z a-z 0-9 . _ -`.
    pub fn new(
        migration: &str,
        phase: Phase,
        from: Arc<dyn LockBackend>,
        to: Arc<dyn LockBackend>,
    ) -> Result<Self> {
        super::operate::check_name(migration)?;
        let shared = Arc::new(Shared::new(migration.into(), phase, from.clone(), to.clone()));
        Ok(Self { from, to, shared })
    }

    /// Sets how long a membership lives without a renewal: the longest TTL of a lock, and how long a process that is
    /// stopped holds up the closing of its phase. 60 s, or what both stores allow.
    ///
    /// # Errors
    /// `Invalid`: the bridge is in use already.
    pub fn with_membership(mut self, ttl: Duration) -> Result<Self> {
        match Arc::get_mut(&mut self.shared) {
            Some(shared) => shared.ttl = Some(ttl),
            None => return Err(Error::new(ErrorKind::Invalid, "the bridge is in use already")),
        }
        Ok(self)
    }

    #[cfg(test)]
    pub(super) fn flawed(mut self, flaw: super::membership::Flaw) -> Self {
        Arc::get_mut(&mut self.shared).expect("nobody else has it").flaw = flaw;
        self
    }

    /// Returns the phase.
    pub fn phase(&self) -> Phase {
        self.shared.phase
    }

    /// Looks at both stores as a preflight does, and joins nothing: for tools.
    ///
    /// # Errors
    /// As the stores tell. `Misconfigured`: locks cannot move between them, or no TTL suits both.
    pub async fn look(&self, call: &Call) -> Result<Preflight> {
        let (from, to) = join(self.from.preflight(call), self.to.preflight(call)).await;
        let (from, to) = (from?, to?);
        let mut preflight = Preflight::clean(self.combined(&from.capabilities, &to.capabilities));
        let (from_server, to_server) = (from.server.clone(), to.server.clone());
        for (side, found) in [("from", from), ("to", to)] {
            preflight.findings.extend(found.findings.iter().map(|finding| format!("{side}: {finding}")));
        }
        preflight.server = match (from_server, to_server) {
            (Some(from), Some(to)) => Some(format!("{from} and {to}")),
            (one, other) => one.or(other),
        };
        let refuse = |message: String| Err(Error::new(ErrorKind::Misconfigured, message));
        let (least, most) = preflight.capabilities.ttl.clone().into_inner();
        if least > most {
            return refuse(format!(
                "no TTL suits both stores and the membership: at least {least:?}, at most {most:?}"
            ));
        }
        if !preflight.capabilities.fence_floor {
            return refuse("one of the stores honours no fence floor, so locks cannot move".into());
        }
        if let Some(membership) = self.shared.ttl.filter(|ttl| *ttl > most) {
            return refuse(format!(
                "a membership of {membership:?} is longer than a TTL that both stores take ({most:?})"
            ));
        }
        Ok(preflight)
    }

    fn combined(&self, from: &Capabilities, to: &Capabilities) -> Capabilities {
        weaker(from, to).with(|c| {
            // No lease outlives its membership, so a longer TTL would be a promise that nobody keeps.
            let (least, most) = c.ttl.clone().into_inner();
            c.ttl = least..=most.min(self.shared.membership_ttl());
        })
    }

    /// Bounds a lease by its membership.
    fn bound(&self, deadline: Moment, member: &Membership) -> Moment {
        #[cfg(test)]
        if self.shared.flaw == super::membership::Flaw::MembershipNotBinding {
            return deadline;
        }
        deadline.min(member.deadline())
    }

    /// No lease outlives its membership, so nobody may count on a longer one.
    fn check_ttl(&self, ttl: Duration) -> Result<()> {
        let membership = self.shared.membership_ttl();
        if ttl <= membership {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::Invalid,
            format!("a TTL of {ttl:?} is longer than a membership of the phase, which lasts {membership:?}"),
        ))
    }

    fn store(&self, side: Side) -> &Arc<dyn LockBackend> {
        match side {
            Side::From => &self.from,
            Side::To => &self.to,
        }
    }
}

/// One side has changed, so "no effect" is true of the other alone.
fn beside_a_change(error: Error, what: &'static str) -> Error {
    if !error.kind().had_no_effect() {
        return error;
    }
    Error::new(ErrorKind::Unknown, what).with_source(error)
}

// A verb that is left out would fall back to a body that knows nothing of two stores.
#[deny(clippy::missing_trait_methods)]
#[async_trait]
impl LockBackend for Bridge {
    fn capabilities(&self) -> Capabilities {
        self.combined(&self.from.capabilities(), &self.to.capabilities())
    }

    async fn acquire(&self, call: &Call, request: &AcquireRequest) -> Result<Lease> {
        let usable = request.ttl().saturating_sub(call.lock_delay());
        self.check_ttl(usable)?;
        let member = self.shared.member(call, usable).await?;
        let until = request.wait_until().unwrap_or(call.deadline()).max(call.deadline());
        let asked =
            Grant { from: None, to: None, member: member.id, until: until.saturating_add(request.ttl()) };
        let grants = &self.shared.grants;
        // Asked again, it may have been granted under an earlier membership, which the first request has noted.
        match grants.find(request.owner()) {
            Some(known) if known.member != member.id => {
                let again = call.again(call.exchange());
                let _ = in_time(&again, self.abandon(&again, request)).await;
                return Err(Error::lost(LostReason::SessionEnded));
            }
            Some(_) => {}
            None => grants.put(*request.owner(), asked, call.now()),
        }
        let asking = async {
            match self.shared.phase {
                Phase::From => self.acquire_on(call, request, &member, Side::From).await,
                Phase::Both => self.acquire_on_both(call, request, &member).await,
                Phase::To => self.acquire_on(call, request, &member, Side::To).await,
            }
        };
        let granted = self.staying(call, &member, usable, asking).await;
        match granted {
            Ok(grant) => self.hand_out(call, request, &member, grant).await,
            Err(error) => {
                if error.kind().had_no_effect() && call.attempt() == 1 {
                    grants.remove(request.owner());
                }
                Err(error)
            }
        }
    }

    async fn renew(&self, call: &Call, lease: &Lease, ttl: Duration) -> Result<Lease> {
        let member = self.carrier(call, lease, ttl).await?;
        let (lo, ln) = self.behind(call, lease).await?;
        if self.shared.phase == Phase::Both && lo.is_none() {
            let renewal = Renewal { lo, ln, from: Some(Err(Error::lost(LostReason::Taken))), to: None };
            return self.renewed(call, lease, &member, renewal).await;
        }
        let one = async |store: &Arc<dyn LockBackend>, lease: &Option<Lease>| match lease {
            Some(lease) => Some(store.renew(call, lease, ttl).await),
            None => None,
        };
        let (from, to) = join!(one(&self.from, &lo), one(&self.to, &ln));
        self.renewed(call, lease, &member, Renewal { lo, ln, from, to }).await
    }

    async fn release(&self, call: &Call, lease: &Lease) -> Result<Released> {
        let (lo, ln) = self.behind(call, lease).await?;
        // Either order is safe, and so is none.
        let one = async |store: &Arc<dyn LockBackend>, lease: &Option<Lease>| match lease {
            Some(lease) => store.release(call, lease).await.map(Some),
            None => Ok(None),
        };
        let (from, to) = join!(one(&self.from, &lo), one(&self.to, &ln));
        match (from, to) {
            (Ok(from), Ok(to)) => {
                self.shared.grants.remove(&lease.owner);
                // Half a record was no lease any more.
                let half = self.shared.phase == Phase::Both && from.is_none();
                let over = half || [from, to].contains(&Some(Released::AlreadyOver));
                Ok(if over { Released::AlreadyOver } else { Released::Now })
            }
            (Err(error), Ok(Some(_))) | (Ok(Some(_)), Err(error)) => {
                Err(beside_a_change(error, "one side was released, and the other was not"))
            }
            (Err(error), Err(other)) if other.kind() == ErrorKind::Unknown => Err(other.with_source(error)),
            (Err(error), _) | (_, Err(error)) => Err(error),
        }
    }

    async fn resolve(&self, call: &Call, request: &AcquireRequest) -> Result<Resolution> {
        let known = self.shared.grants.find(request.owner());
        let usable = request.ttl().saturating_sub(call.lock_delay());
        let member = match self.shared.member(call, usable).await {
            Ok(member) if known.is_some_and(|known| known.member == member.id) => member,
            // Asked for under a membership that is over, or by another bridge: nobody can say how old the fence is.
            Ok(_) => return self.abandon(call, request).await.map(|()| Resolution::Gone),
            Err(error) if error.kind() == ErrorKind::Misconfigured => {
                return self.abandon(call, request).await.map(|()| Resolution::Gone);
            }
            Err(error) => return Err(error),
        };
        let find = async |side: Side, used: bool| match used {
            true => self.store(side).resolve(call, &request.also_above(member.floor(side))).await.map(Some),
            false => Ok(None),
        };
        let phase = self.shared.phase;
        let (from, to) = join!(find(Side::From, phase.on_from()), find(Side::To, phase.on_to()));
        let lease = |found: Option<Resolution>| match found {
            Some(Resolution::Adopted(lease)) => Some(lease),
            Some(Resolution::Gone) | None => None,
        };
        let (from, to) = match (from, to) {
            (Ok(from), Ok(to)) => (lease(from), lease(to)),
            // Found, and of no use any more: it is cleared away, and then it is gone.
            (Err(error), _) | (_, Err(error))
                if matches!(error.kind(), ErrorKind::Lost | ErrorKind::FenceRegression) =>
            {
                self.abandon(call, request).await?;
                return Err(Error::lost(LostReason::Expired));
            }
            (Err(error), _) | (_, Err(error)) => return Err(error),
        };
        let whole = from.is_some() == phase.on_from() && to.is_some() == phase.on_to();
        if !whole || from.as_ref().zip(to.as_ref()).is_some_and(|(lo, ln)| ln.fence <= lo.fence) {
            // Half a grant is none.
            self.abandon(call, request).await?;
            return Ok(Resolution::Gone);
        }
        if let (Some(lo), Some(ln)) = (&from, &to) {
            match self.raise_old(call, lo, ln.fence).await {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::Lost => {
                    self.abandon(call, request).await?;
                    return Ok(Resolution::Gone);
                }
                Err(error) => return Err(error),
            }
        }
        let ends = |lease: &Option<Lease>| lease.as_ref().map_or(Moment::MAX, |lease| lease.deadline);
        let until = ends(&from).min(ends(&to));
        let grant = Grant { from, to, member: member.id, until };
        self.hand_out(call, request, &member, grant).await.map(Resolution::Adopted)
    }

    async fn inspect(&self, call: &Call, name: &LockName) -> Result<LockState> {
        match self.shared.phase {
            Phase::From => self.from.inspect(call, name).await,
            Phase::To => self.to.inspect(call, name).await,
            Phase::Both => {
                let (from, to) = join(self.from.inspect(call, name), self.to.inspect(call, name)).await;
                let (from, to) = (from?, to?);
                // Who has the old side alone is in phase `from`, or waits for the new one. Who has the new side has the lock.
                let holder = match (from.holder, to.holder) {
                    (Some(lo), Some(ln)) if lo.owner == ln.owner => {
                        let remaining = lo.remaining.min(ln.remaining);
                        Some(Holder { remaining, ..ln })
                    }
                    (lo, ln) => ln.or(lo),
                };
                Ok(LockState::default().with(|state| {
                    state.holder = holder;
                    state.last_fence = from.last_fence.max(to.last_fence);
                    state.waiters = match (from.waiters, to.waiters) {
                        (Some(from), Some(to)) => Some(from.saturating_add(to)),
                        _ => None,
                    };
                }))
            }
        }
    }

    async fn abandon(&self, call: &Call, request: &AcquireRequest) -> Result<()> {
        let one = async |store: &Arc<dyn LockBackend>, used: bool| match used {
            true => store.abandon(call, request).await,
            false => Ok(()),
        };
        let phase = self.shared.phase;
        let (from, to) = join!(one(&self.from, phase.on_from()), one(&self.to, phase.on_to()));
        from.and(to)?;
        self.shared.grants.remove(request.owner());
        Ok(())
    }

    async fn preflight(&self, call: &Call) -> Result<Preflight> {
        let preflight = self.look(call).await?;
        // A process that starts in a phase that is not open should know now, and operators see who has started.
        self.shared.member(call, Duration::ZERO).await?;
        Ok(preflight)
    }

    async fn renew_many(&self, call: &Call, leases: &[Lease], ttl: Duration) -> Vec<Result<Lease>> {
        let mut answers: Vec<Option<Result<Lease>>> = leases.iter().map(|_| None).collect();
        let (mut lows, mut tops, mut whole) = (Vec::new(), Vec::new(), Vec::new());
        let mut member = None;
        for (at, lease) in leases.iter().enumerate() {
            let found = match self.carrier(call, lease, ttl).await {
                Ok(carrier) => {
                    member = Some(carrier);
                    self.behind(call, lease).await
                }
                Err(error) => Err(error),
            };
            match found {
                Ok((lo, ln)) if self.shared.phase != Phase::Both || lo.is_some() => {
                    lows.extend(lo);
                    tops.extend(ln);
                    whole.push(at);
                }
                Ok(_) => answers[at] = Some(self.renew(call, lease, ttl).await),
                Err(error) => answers[at] = Some(Err(error)),
            }
        }
        if let Some(member) = member {
            let many = async |store: &Arc<dyn LockBackend>, leases: &[Lease]| match leases {
                [] => Vec::new(),
                leases => store.renew_many(call, leases, ttl).await,
            };
            let (from, to) = join!(many(&self.from, &lows), many(&self.to, &tops));
            let (mut from, mut to) = (from.into_iter(), to.into_iter());
            let (mut lows, mut tops) = (lows.into_iter(), tops.into_iter());
            let silent = || Err(Error::new(ErrorKind::Unknown, "the store did not answer for this lease"));
            for at in whole {
                let phase = self.shared.phase;
                let renewal = Renewal {
                    lo: phase.on_from().then(|| lows.next()).flatten(),
                    ln: phase.on_to().then(|| tops.next()).flatten(),
                    from: phase.on_from().then(|| from.next().unwrap_or_else(silent)),
                    to: phase.on_to().then(|| to.next().unwrap_or_else(silent)),
                };
                answers[at] = Some(self.renewed(call, &leases[at], &member, renewal).await);
            }
        }
        let unasked = || Err(Error::new(ErrorKind::Unavailable, "the lease was not asked for"));
        answers.into_iter().map(|answer| answer.unwrap_or_else(unasked)).collect()
    }

    async fn ended(&self, call: &Call, lease: &Lease) -> LostReason {
        let (lo, ln) = match self.behind(call, lease).await {
            Ok(behind) => behind,
            // For nobody to decide by: the next renewal tells.
            Err(_) => std::future::pending().await,
        };
        let one = async |store: &Arc<dyn LockBackend>, lease: &Option<Lease>| match lease {
            Some(lease) => store.ended(call, lease).await,
            None => std::future::pending().await,
        };
        tokio::select! {
            reason = one(&self.to, &ln) => reason,
            reason = one(&self.from, &lo) => reason,
        }
    }

    async fn raise(&self, call: &Call, lease: &Lease, floor: Fence) -> Result<()> {
        let (lo, ln) = self.behind(call, lease).await?;
        if self.shared.phase == Phase::Both && lo.is_none() {
            return Err(Error::lost(LostReason::Taken));
        }
        // The new side first: while this holding is there, nobody in `to` is granted.
        if let Some(ln) = &ln {
            self.to.raise(call, ln, floor).await?;
        }
        match (&lo, &ln) {
            (None, _) => Ok(()),
            (Some(lo), None) => self.from.raise(call, lo, floor).await,
            (Some(lo), Some(_)) => {
                let raised = self.from.raise(call, lo, floor).await;
                raised.map_err(|e| beside_a_change(e, "the new side was raised, and the old side was not"))
            }
        }
    }

    async fn raise_fence(&self, call: &Call, name: &LockName, floor: Fence) -> Result<Fence> {
        let mut stands = floor;
        for side in self.sides() {
            stands = stands.max(self.store(side).raise_fence(call, name, floor).await?);
        }
        Ok(stands)
    }

    async fn high_water(&self, call: &Call) -> Result<Option<Fence>> {
        let mut highest = None;
        for side in self.sides() {
            highest = highest.max(self.store(side).high_water(call).await?);
        }
        Ok(highest)
    }

    async fn break_lock(&self, call: &Call, name: &LockName, expect: Option<Stamp>) -> Result<Broken> {
        match self.shared.phase {
            Phase::From => return self.from.break_lock(call, name, expect).await,
            Phase::To => return self.to.break_lock(call, name, expect).await,
            Phase::Both => {}
        }
        let (from, to) = join(self.from.inspect(call, name), self.to.inspect(call, name)).await;
        let (lo, ln) = (from?.holder, to?.holder);
        let holder = ln.clone().or(lo.clone());
        if let (Some(expect), Some(holder)) = (expect, &holder)
            && holder.stamp() != expect
        {
            return Err(Error::held_by(ErrorKind::Held, Some(holder.clone())));
        }
        // Each side is broken only from the holder that was seen: a newer one is another's. Where nobody was seen on the
        // new side, whoever has come since is not the one that was meant.
        let on_new = self.to.break_lock(call, name, ln.as_ref().map(Holder::stamp).or(expect)).await?;
        let half = |error| beside_a_change(error, "the new side was broken, and the old side was not");
        let same = |lo: &Holder| holder.as_ref().is_some_and(|holder| holder.owner == lo.owner);
        let on_old = match lo.as_ref().filter(|lo| same(lo)) {
            Some(lo) => Some(self.from.break_lock(call, name, Some(lo.stamp())).await.map_err(half)?),
            None => None,
        };
        let floor = on_old.map_or(on_new.floor, |old| old.floor.max(on_new.floor));
        // Both sides grant above what the operator gets to shut the old holder out with.
        let raised = self.raise_fence(call, name, floor).await;
        let floor =
            raised.map_err(|e| beside_a_change(e, "the lock was broken, and its floor was not raised"))?;
        Ok(Broken::new(holder, floor))
    }

    async fn list(
        &self,
        call: &Call,
        prefix: Option<&LockName>,
        after: Option<&LockName>,
    ) -> Result<Vec<LockName>> {
        match self.shared.phase {
            Phase::From => self.from.list(call, prefix, after).await,
            Phase::To => self.to.list(call, prefix, after).await,
            Phase::Both => {
                let (from, to) =
                    join(self.from.list(call, prefix, after), self.to.list(call, prefix, after)).await;
                let (from, to) = (from?, to?);
                // Beyond the shorter page a name of that side may be missing. An empty page is a side's end.
                let end = match (from.last(), to.last()) {
                    (Some(from), Some(to)) => Some(from.min(to).clone()),
                    _ => None,
                };
                let mut names: Vec<LockName> = from.into_iter().chain(to).collect();
                names.sort();
                names.dedup();
                names.retain(|name| end.as_ref().is_none_or(|end| name <= end));
                Ok(names)
            }
        }
    }

    // A bridge is no side of another: the records of two migrations would lie in one place.
    async fn phase_read(&self, _call: &Call) -> Result<Option<PhaseRecord>> {
        Err(self.unsupported(Verb::Migrate))
    }

    async fn phase_cas(
        &self,
        _call: &Call,
        _expect: Option<&PhaseRecord>,
        _new: &PhaseRecord,
    ) -> Result<bool> {
        Err(self.unsupported(Verb::Migrate))
    }

    async fn join(&self, _call: &Call, _phase: &str, _ttl: Duration) -> Result<Lease> {
        Err(self.unsupported(Verb::Migrate))
    }

    async fn leave(&self, _call: &Call, _member: &Lease) -> Result<Released> {
        Err(self.unsupported(Verb::Migrate))
    }

    async fn members(&self, _call: &Call) -> Result<Vec<Member>> {
        Err(self.unsupported(Verb::Migrate))
    }

    async fn second_connection(&self, call: &Call) -> Result<Option<Arc<dyn LockBackend>>> {
        let (from, to) = join(self.from.second_connection(call), self.to.second_connection(call)).await;
        let (from, to) = (from?, to?);
        if from.is_none() && to.is_none() {
            return Ok(None);
        }
        // The membership and what was granted are the same.
        Ok(Some(Arc::new(Self {
            from: from.unwrap_or_else(|| self.from.clone()),
            to: to.unwrap_or_else(|| self.to.clone()),
            shared: self.shared.clone(),
        })))
    }

    async fn close(&self) {
        self.shared.leave_all().await;
        join(self.from.close(), self.to.close()).await;
    }

    fn unsupported(&self, verb: Verb) -> Error {
        Error::new(ErrorKind::Unsupported, "this backend does not do that").about(verb, None, "bridge")
    }
}

impl Bridge {
    fn sides(&self) -> impl Iterator<Item = Side> + use<> {
        self.shared.sides()
    }
}

impl fmt::Debug for Bridge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bridge")
            .field("migration", &self.shared.migration)
            .field("phase", &self.shared.phase)
            .field("from", &self.from)
            .field("to", &self.to)
            .finish_non_exhaustive()
    }
}
