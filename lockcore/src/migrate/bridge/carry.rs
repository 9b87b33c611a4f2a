//! How the two leases behind one are found and renewed, and which membership carries them on.

use std::{sync::Arc, time::Duration};

use super::{Bridge, Grant, Membership, Phase, in_time};
use crate::backend::*;

/// What two sides have, and what each said of its renewal.
pub(super) struct Renewal {
    pub(super) lo: Option<Lease>,
    pub(super) ln: Option<Lease>,
    pub(super) from: Option<Result<Lease>>,
    pub(super) to: Option<Result<Lease>>,
}

impl Bridge {
    /// Returns the two leases behind one. On the old side it has a fence of its own; where this bridge has not granted
    /// it, the record tells.
    pub(super) async fn behind(&self, call: &Call, lease: &Lease) -> Result<(Option<Lease>, Option<Lease>)> {
        if let Some(Grant { from, to, .. }) = self.shared.grants.find(&lease.owner)
            && (from.is_some() || to.is_some())
            && to.as_ref().or(from.as_ref()).is_some_and(|known| known.fence == lease.fence)
        {
            return Ok((from, to));
        }
        match self.shared.phase {
            Phase::From => Ok((Some(lease.clone()), None)),
            Phase::To => Ok((None, Some(lease.clone()))),
            Phase::Both => {
                let holder = self.from.inspect(call, &lease.name).await?.holder;
                let ours = holder.filter(|holder| holder.owner == lease.owner.digest());
                let lo = ours.map(|holder| Lease { fence: holder.fence, ..lease.clone() });
                Ok((lo, Some(lease.clone())))
            }
        }
    }

    /// Decides what two renewals make of one lease.
    pub(super) async fn renewed(
        &self,
        call: &Call,
        lease: &Lease,
        member: &Membership,
        renewal: Renewal,
    ) -> Result<Lease> {
        let Renewal { lo, ln, from, to } = renewal;
        let mut moved = (lo.clone(), ln.clone());
        let mut worst: Option<Error> = None;
        for (seat, answer) in [(&mut moved.0, from), (&mut moved.1, to)] {
            match answer {
                None => {}
                Some(Ok(renewed)) => *seat = Some(renewed),
                // One side lost is the lease lost, always and in every phase; the other side is given back.
                Some(Err(error)) if error.kind() == ErrorKind::Lost => {
                    self.shared.grants.remove(&lease.owner);
                    let call = call.again(call.exchange());
                    for (store, other) in [(&self.to, &ln), (&self.from, &lo)] {
                        if let Some(other) = other {
                            let _ = in_time(&call, store.release(&call, other)).await;
                        }
                    }
                    return Err(error);
                }
                Some(Err(error)) if worst.as_ref().is_none_or(|known| known.kind() != ErrorKind::Unknown) => {
                    worst = Some(error);
                }
                Some(Err(_)) => {}
            }
        }
        let ends = |seat: &Option<Lease>| seat.as_ref().map_or(Moment::MAX, |seat| seat.deadline);
        let both = ends(&moved.0).min(ends(&moved.1));
        let until = both.saturating_add(call.exchange());
        let grant = Grant { from: moved.0, to: moved.1, member: member.id, until };
        self.shared.grants.put(lease.owner, grant, call.now());
        match worst {
            // The other side has moved, and that is remembered; the lease ends with the one that has not.
            Some(error) => Err(error),
            None => Ok(Lease { deadline: self.bound(both, member).max(lease.deadline), ..lease.clone() }),
        }
    }

    /// Says whether a lease may be carried on: by the membership that it was granted under, or by one that follows
    /// without a gap. In a gap the phase may have been closed.
    pub(super) fn carries(&self, call: &Call, lease: &Lease, member: &Membership) -> bool {
        call.now() < lease.deadline
            || self.shared.grants.find(&lease.owner).is_some_and(|grant| grant.member == member.id)
    }

    /// Returns the membership that carries a lease on.
    pub(super) async fn carrier(&self, call: &Call, lease: &Lease, ttl: Duration) -> Result<Arc<Membership>> {
        let usable = ttl.saturating_sub(call.lock_delay());
        self.check_ttl(usable)?;
        match self.shared.member(call, usable).await {
            Ok(member) if self.carries(call, lease, &member) => Ok(member),
            Ok(_) => Err(Error::lost(LostReason::SessionEnded)),
            // Out of the phase for good: this lease is not renewed any more.
            Err(error) if error.kind() == ErrorKind::Misconfigured => {
                Err(Error::lost(LostReason::SessionEnded).with_source(error))
            }
            Err(error) => Err(error),
        }
    }
}
