//! Membership of a phase: a lease on each store that the phase uses. It binds every acquire and bounds every lease.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use super::{
    Phase,
    grants::Grants,
    operate::{Side, check_part},
};
use crate::{
    backend::{Call, Fence, Lease, LockBackend, LostReason, Moment, Owner},
    error::{Error, ErrorKind, Result},
    sync::LockExt,
};

/// How long a membership lives without a renewal, unless told otherwise and as far as both stores allow: a process that
/// is stopped or gone holds up a step for so long.
pub(crate) const MEMBERSHIP: Duration = Duration::from_secs(60);

/// What the handles of one bridge share.
pub(super) struct Shared {
    pub(super) migration: Arc<str>,
    pub(super) phase: Phase,
    pub(super) from: Arc<dyn LockBackend>,
    pub(super) to: Arc<dyn LockBackend>,
    pub(super) ttl: Option<Duration>,
    pub(super) grants: Grants,
    memberships: Mutex<HashMap<Box<str>, Arc<Membership>>>,
    joining: tokio::sync::Mutex<()>,
    /// Who is joining, or was given up on the way.
    begun: Mutex<Option<Arc<Membership>>>,
    closed: AtomicBool,
    #[cfg(test)]
    pub(super) flaw: Flaw,
}

/// What is wrong with a bridge, for the tests that must notice.
#[cfg(test)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Flaw {
    #[default]
    None,
    /// Looks whether the old side is still held, and raises it then.
    VerifyThenRaise,
    /// Acquires without the floor of the namespace.
    NoNamespaceFloor,
    /// Takes locks, and holds them, without caring whether the membership stands.
    MembershipNotBinding,
    /// Takes the new side without the old one's fence as floor, and raises nothing.
    NoWriteBack,
}

/// One stay in a phase. What was begun in it is good in no other: between two stays the phase may have been closed,
/// and opened again.
pub(super) struct Membership {
    pub(super) id: Owner,
    /// The frame of calls that nobody asked for: its namespace, its clock.
    call: Call,
    seats: Mutex<Seats>,
}

#[derive(Clone, Debug, Default)]
struct Seats {
    from: Option<Lease>,
    to: Option<Lease>,
    floor_from: Option<Fence>,
    floor_to: Option<Fence>,
    /// Left, or given up: from now on it binds everything and carries nothing.
    over: bool,
}

impl Membership {
    /// Returns until when it stands at least.
    pub(super) fn deadline(&self) -> Moment {
        let seats = self.seats.grab();
        if seats.over {
            return Moment::from_nanos(0);
        }
        let deadline = |seat: &Option<Lease>| seat.as_ref().map_or(Moment::MAX, |seat| seat.deadline);
        deadline(&seats.from).min(deadline(&seats.to))
    }

    /// Returns what every fence on a side must be above.
    pub(super) fn floor(&self, side: Side) -> Option<Fence> {
        match side {
            Side::From => self.seats.grab().floor_from,
            Side::To => self.seats.grab().floor_to,
        }
    }

    /// Takes a seat, unless everybody has been told to leave meanwhile.
    fn sit(&self, side: Side, seat: Lease, floor: Option<Fence>) -> Result<(), Lease> {
        let mut seats = self.seats.grab();
        if seats.over {
            return Err(seat);
        }
        match side {
            Side::From => (seats.from, seats.floor_from) = (Some(seat), floor),
            Side::To => (seats.to, seats.floor_to) = (Some(seat), floor),
        }
        Ok(())
    }
}

impl Shared {
    pub(super) fn new(
        migration: Arc<str>,
        phase: Phase,
        from: Arc<dyn LockBackend>,
        to: Arc<dyn LockBackend>,
    ) -> Self {
        Self {
            migration,
            phase,
            from,
            to,
            ttl: None,
            grants: Grants::default(),
            memberships: Mutex::default(),
            joining: tokio::sync::Mutex::default(),
            begun: Mutex::default(),
            closed: AtomicBool::new(false),
            #[cfg(test)]
            flaw: Flaw::None,
        }
    }

    fn store(&self, side: Side) -> &Arc<dyn LockBackend> {
        match side {
            Side::From => &self.from,
            Side::To => &self.to,
        }
    }

    /// Lists the sides that the phase uses, old before new.
    pub(super) fn sides(&self) -> impl Iterator<Item = Side> + use<> {
        let phase = self.phase;
        [(Side::From, phase.on_from()), (Side::To, phase.on_to())]
            .into_iter()
            .filter_map(|(side, used)| used.then_some(side))
    }

    /// Returns how long a membership lives without a renewal.
    pub(super) fn membership_ttl(&self) -> Duration {
        let (from, to) = (self.from.capabilities(), self.to.capabilities());
        self.ttl.unwrap_or_else(|| MEMBERSHIP.min(*from.ttl.end()).min(*to.ttl.end()))
    }

    fn current(&self, namespace: &str) -> Option<Arc<Membership>> {
        self.memberships.grab().get(namespace).cloned()
    }

    fn forget(&self, member: &Membership) {
        let mut memberships = self.memberships.grab();
        if memberships.get(member.call.namespace()).is_some_and(|known| known.id == member.id) {
            memberships.remove(member.call.namespace());
        }
    }

    /// Returns a membership that stands for so much longer, or as long as it can: the one there is, renewed if need be,
    /// or a new one.
    ///
    /// # Errors
    /// `Misconfigured`: the phase is not open, or the stores are in another migration. `Unavailable`: a store cannot be
    /// asked; nothing that needs a membership was sent.
    pub(super) async fn member(self: &Arc<Self>, call: &Call, need: Duration) -> Result<Arc<Membership>> {
        let ttl = self.membership_ttl();
        // A wait may be long, and a lock-delay belongs to locks.
        let call = &call.beside(call.exchange());
        // A fresh membership must satisfy every need, or each call would renew it.
        let need = need.min(ttl / 3 * 2);
        let stands = |member: &Membership| call.now().until(member.deadline()) > need;
        if let Some(member) = self.current(call.namespace()).filter(|m| self.unbound() || stands(m)) {
            return Ok(member);
        }
        let _one_at_a_time = self.joining.lock().await;
        if let Some(member) = self.current(call.namespace()) {
            if stands(&member) {
                return Ok(member);
            }
            match self.renew(call, &member, ttl).await {
                Ok(()) => return Ok(member),
                // Over for good: what follows is another stay.
                Err(error) if error.kind() == ErrorKind::Lost => {
                    self.forget(&member);
                    self.leave(&member).await;
                }
                // Shorter than asked for, and it will do.
                Err(_) if call.now() < member.deadline() => return Ok(member),
                Err(error) => return Err(not_sent(error)),
            }
        }
        let given_up = self.begun.grab().take();
        if let Some(given_up) = given_up {
            self.leave(&given_up).await;
        }
        let member = self.join(call, ttl).await?;
        if tokio::runtime::Handle::try_current().is_ok() {
            tokio::spawn(keep(Arc::downgrade(self), member.clone(), ttl));
        }
        Ok(member)
    }

    fn unbound(&self) -> bool {
        #[cfg(test)]
        return self.flaw == Flaw::MembershipNotBinding;
        #[cfg(not(test))]
        false
    }

    async fn renew(&self, call: &Call, member: &Membership, ttl: Duration) -> Result<()> {
        let seats = member.seats.grab().clone();
        if seats.over {
            return Err(Error::lost(LostReason::SessionEnded));
        }
        let renew = async |side, seat: Option<Lease>| match seat {
            Some(seat) => in_time(call, self.store(side).renew(call, &seat, ttl)).await.map(Some),
            None => Ok(None),
        };
        let (from, to) = tokio::join!(renew(Side::From, seats.from), renew(Side::To, seats.to));
        let seats = &mut *member.seats.grab();
        let mut worst = None;
        for (seat, answer) in [(&mut seats.from, from), (&mut seats.to, to)] {
            match answer {
                // An older answer may come last.
                Ok(Some(renewed)) => {
                    if let Some(seat) = seat.as_mut().filter(|seat| seat.deadline < renewed.deadline) {
                        *seat = renewed;
                    }
                }
                Ok(None) => {}
                Err(error) if error.kind() == ErrorKind::Lost => return Err(error),
                Err(error) => worst = Some(error),
            }
        }
        worst.map_or(Ok(()), Err)
    }

    async fn join(&self, call: &Call, ttl: Duration) -> Result<Arc<Membership>> {
        let member = Arc::new(Membership {
            id: Owner::random(),
            call: call.beside(call.exchange()),
            seats: Mutex::default(),
        });
        *self.begun.grab() = Some(member.clone());
        let joined = async {
            for side in self.sides() {
                if self.closed.load(Ordering::Acquire) {
                    return Err(closed());
                }
                let (seat, floor) = self.join_side(call, side, ttl).await?;
                #[cfg(test)]
                let floor = floor.filter(|_| self.flaw != Flaw::NoNamespaceFloor);
                if let Err(seat) = member.sit(side, seat, floor) {
                    self.leave_side(&member, side, &seat).await;
                    return Err(closed());
                }
            }
            // It is in one of the two at any moment, so whoever closes the bridge finds it.
            self.memberships.grab().insert(call.namespace().into(), member.clone());
            Ok(())
        };
        let joined = match (joined.await, self.closed.load(Ordering::Acquire)) {
            (Ok(()), true) => Err(closed()),
            (joined, _) => joined,
        };
        self.begun.grab().take();
        if joined.is_err() {
            self.forget(&member);
            self.leave(&member).await;
        }
        joined.map(|()| member)
    }

    async fn join_side(&self, call: &Call, side: Side, ttl: Duration) -> Result<(Lease, Option<Fence>)> {
        let store = self.store(side);
        let seat = match in_time(call, store.join(call, self.phase.as_str(), ttl)).await {
            Ok(seat) => seat,
            Err(error) => return Err(self.why_not(call, side, error).await),
        };
        // Read behind the join: the floor changes only while the phase has no members.
        let found = match in_time(call, store.phase_read(call)).await {
            Ok(Some(record)) => check_part(side, &record, &self.migration).map(|()| record.floor),
            Ok(None) => Err(self.not_begun(side)),
            Err(error) => Err(not_sent(error)),
        };
        match found {
            Ok(floor) => Ok((seat, floor)),
            Err(error) => {
                // If this fails, its TTL ends it.
                let _ = in_time(call, store.leave(call, &seat)).await;
                Err(error)
            }
        }
    }

    fn not_begun(&self, side: Side) -> Error {
        Error::new(
            ErrorKind::Misconfigured,
            format!(
                "the store at {side} knows of no migration; begin it with `lockctl migrate advance {}`",
                self.migration
            ),
        )
    }

    /// Tells a phase that is closed from a store that cannot be asked.
    async fn why_not(&self, call: &Call, side: Side, error: Error) -> Error {
        match error.kind() {
            ErrorKind::Unsupported => Error::new(
                ErrorKind::Misconfigured,
                format!("the store at {side} keeps no phases, and locks cannot move to it or from it"),
            )
            .with_source(error),
            ErrorKind::Unavailable | ErrorKind::Unknown => {
                let store = self.store(side);
                match in_time(call, store.phase_read(call)).await {
                    Ok(None) => self.not_begun(side),
                    Ok(Some(record)) => match check_part(side, &record, &self.migration) {
                        Err(error) => error,
                        Ok(()) if record.open.iter().any(|open| open == self.phase.as_str()) => {
                            not_sent(error)
                        }
                        Ok(()) => Error::new(
                            ErrorKind::Misconfigured,
                            format!(
                                "the phase `{}` of the migration {:?} is not open at {side}, open are: {}; restart with \
                                 one of them, or open it with `lockctl migrate`",
                                self.phase.as_str(),
                                self.migration,
                                if record.open.is_empty() { "none".into() } else { record.open.join(", ") }
                            ),
                        ),
                    },
                    Err(_) => not_sent(error),
                }
            }
            _ => error,
        }
    }

    async fn leave(&self, member: &Membership) {
        let gone = Seats { over: true, ..Seats::default() };
        let seats = std::mem::replace(&mut *member.seats.grab(), gone);
        for (side, seat) in [(Side::From, seats.from), (Side::To, seats.to)] {
            if let Some(seat) = seat {
                self.leave_side(member, side, &seat).await;
            }
        }
    }

    async fn leave_side(&self, member: &Membership, side: Side, seat: &Lease) {
        let call = member.call.beside(member.call.exchange());
        // If this fails, its TTL ends it.
        let _ = in_time(&call, self.store(side).leave(&call, seat)).await;
    }

    /// Leaves the phase, in every namespace.
    pub(super) async fn leave_all(&self) {
        self.closed.store(true, Ordering::Release);
        let begun = self.begun.grab().take();
        let memberships = std::mem::take(&mut *self.memberships.grab());
        for member in begun.iter().chain(memberships.values()) {
            self.leave(member).await;
        }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("migration", &self.migration).finish_non_exhaustive()
    }
}

/// Renews a membership while its bridge lives, so that an idle process is still seen in its phase. Nothing depends on
/// it but how long a wait may last: every call renews what it needs.
async fn keep(shared: Weak<Shared>, member: Arc<Membership>, ttl: Duration) {
    let call = &member.call;
    let mut next = call.now().saturating_add(ttl / 3);
    loop {
        call.clock().sleep_until(next).await;
        let Some(shared) = shared.upgrade() else { return };
        if shared.current(call.namespace()).is_none_or(|known| known.id != member.id) {
            return;
        }
        let now = call.now();
        let pause = match shared.renew(&call.beside(call.exchange()), &member, ttl).await {
            Ok(()) => ttl / 3,
            Err(error) if error.kind() == ErrorKind::Lost => {
                shared.forget(&member);
                shared.leave(&member).await;
                return;
            }
            Err(_) => ttl / 12,
        };
        next = now.saturating_add(pause);
    }
}

/// Bounds one exchange: no client library bounds an operation end to end.
pub(super) async fn in_time<T>(call: &Call, answer: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::select! {
        biased;
        answer = answer => answer,
        () = call.clock().sleep_until(call.deadline()) => {
            Err(Error::new(ErrorKind::Unknown, "the store did not answer in time"))
        }
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the bridge was closed")
}

/// Whatever became of a membership, the verb that needs it was not sent.
fn not_sent(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Unknown | ErrorKind::Lost => {
            Error::new(ErrorKind::Unavailable, "the membership of the phase could not be had")
                .with_source(error)
        }
        _ => error,
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{
            Stage,
            testbed::{Stores, poll_once},
        },
        *,
    };
    use crate::{backend::Verb, memory::MemoryBackend};

    fn shared(stores: &Stores) -> Arc<Shared> {
        Arc::new(Shared::new("moving".into(), Phase::Both, stores.arc_old(), stores.arc_new()))
    }

    async fn members(stores: &Stores, store: &MemoryBackend) -> usize {
        store.members(&stores.call()).await.unwrap().len()
    }

    #[test]
    fn a_membership_that_was_left_bounds_everything_and_carries_nothing() {
        Stores::with(async |stores| {
            stores.steps(&[Stage::From, Stage::FromBoth]).await;
            let shared = shared(&stores);
            let call = stores.call();
            stores.pass(Duration::from_secs(1));
            let member = shared.member(&call, Duration::ZERO).await.unwrap();
            assert!(member.deadline() > call.now());
            shared.leave_all().await;
            assert!(member.deadline() < call.now(), "whoever has left is bound by nothing");
            let error = shared.renew(&call, &member, shared.membership_ttl()).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
            let error = shared.member(&call, Duration::ZERO).await.err().expect("joined after the end");
            assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
        });
    }

    #[test]
    fn who_leaves_leaves_no_seat_of_a_join_that_is_under_way() {
        Stores::with(async |stores| {
            stores.steps(&[Stage::From, Stage::FromBoth]).await;
            let shared = shared(&stores);
            let call = stores.call();
            stores.new.faults().hold_replies(Verb::Migrate);
            let mut joining = Box::pin(shared.member(&call, Duration::ZERO));
            assert!(poll_once(&mut joining).is_none());
            assert_eq!(members(&stores, &stores.old).await, 1);
            shared.leave_all().await;
            assert_eq!(members(&stores, &stores.old).await, 0, "a seat was left behind");
            stores.new.faults().deliver();
            let error = joining.await.err().expect("joined after the end");
            assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
            assert_eq!(members(&stores, &stores.new).await, 0, "the seat that came late was kept");
        });
    }

    #[test]
    fn a_join_that_was_given_up_halfway_leaves_its_seat_to_nobody() {
        Stores::with(async |stores| {
            stores.steps(&[Stage::From, Stage::FromBoth]).await;
            let shared = shared(&stores);
            let call = stores.call();
            stores.new.faults().hold_replies(Verb::Migrate);
            let mut joining = Box::pin(shared.member(&call, Duration::ZERO));
            assert!(poll_once(&mut joining).is_none());
            drop(joining);
            stores.new.faults().heal();
            shared.member(&call, Duration::ZERO).await.unwrap();
            assert_eq!(members(&stores, &stores.old).await, 1, "the seat of the first is still there");
        });
    }
}
