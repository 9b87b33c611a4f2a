//! What an acquire takes on either side, in which order, and what it gives back.

use std::{pin::pin, time::Duration};

use super::{Bridge, Grant, Membership, Side, in_time};
use crate::backend::*;

const SHORTEST_PAUSE: Duration = Duration::from_millis(10);

impl Bridge {
    /// Does something that may take long, and stays in the phase meanwhile.
    pub(super) async fn staying<T>(
        &self,
        call: &Call,
        member: &Membership,
        need: Duration,
        work: impl Future<Output = T>,
    ) -> T {
        let mut work = pin!(work);
        loop {
            let now = call.now();
            let left = now.until(member.deadline()).max(self.shared.membership_ttl() / 12);
            tokio::select! {
                biased;
                done = &mut work => return done,
                () = call.clock().sleep_until(now.saturating_add(left / 2)) => {}
            }
            // What comes of it is seen when the work is done.
            tokio::select! {
                biased;
                done = &mut work => return done,
                _ = self.shared.member(call, need.max(left / 2)) => {}
            }
        }
    }

    /// Asks one store alone: phases `from` and `to`.
    pub(super) async fn acquire_on(
        &self,
        call: &Call,
        request: &AcquireRequest,
        member: &Membership,
        side: Side,
    ) -> Result<Grant> {
        // A try has no business beyond the membership; a wait may be longer, and is looked at when it ends.
        let call = match request.wait_until() {
            None => call.ending_by(member.deadline()),
            Some(_) => call.clone(),
        };
        let asked = request.also_above(member.floor(side));
        let store = self.store(side);
        match store.acquire(&call, &asked).await {
            Ok(lease) => {
                let until = lease.deadline;
                let (from, to) = match side {
                    Side::From => (Some(lease), None),
                    Side::To => (None, Some(lease)),
                };
                Ok(Grant { from, to, member: member.id, until })
            }
            Err(error) => Err(self.asked_again(&call, request, error).await),
        }
    }

    /// Takes the old side, and the new one behind it: phase `both`.
    pub(super) async fn acquire_on_both(
        &self,
        call: &Call,
        request: &AcquireRequest,
        member: &Membership,
    ) -> Result<Grant> {
        let lo = self.from.acquire(call, &request.also_above(member.floor(Side::From))).await;
        let lo = match lo {
            Ok(lo) => lo,
            Err(error) if error.holder().is_some() => return Err(self.held(call, request, error).await),
            Err(error) => return Err(self.asked_again(call, request, error).await),
        };
        let floor = Some(lo.fence).max(member.floor(Side::To));
        #[cfg(test)]
        let floor =
            if self.shared.flaw == super::super::membership::Flaw::NoWriteBack { None } else { floor };
        let asked = request.also_above(floor);
        let (lo, answer) = self.acquire_behind(call, request, &asked, lo).await;
        let ln = match answer {
            Ok(ln) => ln,
            // The grant may exist on the new side: the old one stays, for whoever resolves it.
            Err(error) if error.kind() == ErrorKind::Unknown => return Err(error),
            Err(error) if error.kind() == ErrorKind::FenceRegression => {
                return Err(self.asked_again(call, request, error).await);
            }
            Err(error) => {
                let settled = !matches!(error.kind(), ErrorKind::Lost);
                let call = call.again(call.exchange());
                let given_back = in_time(&call, self.from.release(&call, &lo)).await;
                return Err(match given_back {
                    Err(source) if settled => {
                        let kind = error.kind();
                        Error::new(
                            ErrorKind::Unknown,
                            format!(
                                "the new side answered {kind:?}, and the old side could not be given back"
                            ),
                        )
                        .with_source(source)
                    }
                    _ => error,
                });
            }
        };
        let until = lo.deadline.min(ln.deadline);
        self.write_back(call, request, &lo, &ln).await?;
        Ok(Grant { from: Some(lo), to: Some(ln), member: member.id, until })
    }

    /// Names the holder by the fence that it has: the new side's, where it is there, too. One look more than a store
    /// alone.
    pub(super) async fn held(&self, call: &Call, request: &AcquireRequest, error: Error) -> Error {
        let beside = call.beside(call.exchange());
        let on_new = in_time(&beside, self.to.inspect(&beside, request.name())).await;
        match (error.holder(), on_new.ok().and_then(|state| state.holder)) {
            (Some(lo), Some(ln)) if lo.owner == ln.owner => {
                let remaining = lo.remaining.min(ln.remaining);
                Error::held_by(error.kind(), Some(Holder { remaining, ..ln }))
            }
            _ => error,
        }
    }

    /// Takes the new side, and keeps the old one renewed for as long as that takes.
    pub(super) async fn acquire_behind(
        &self,
        call: &Call,
        request: &AcquireRequest,
        asked: &AcquireRequest,
        mut lo: Lease,
    ) -> (Lease, Result<Lease>) {
        let mut acquire = pin!(self.to.acquire(call, asked));
        loop {
            let now = call.now();
            if now >= lo.deadline {
                break;
            }
            let half = now.saturating_add(now.until(lo.deadline) / 2).max(now.saturating_add(SHORTEST_PAUSE));
            tokio::select! {
                biased;
                answer = &mut acquire => return (lo, answer),
                () = call.clock().sleep_until(half) => {}
            }
            let again = call.again(call.exchange());
            // The grant of the new side must not wait for an answer of the old one.
            let renewed = tokio::select! {
                biased;
                answer = &mut acquire => return (lo, answer),
                renewed = in_time(&again, self.from.renew(&again, &lo, request.ttl())) => renewed,
            };
            match renewed {
                Ok(renewed) => lo.deadline = lo.deadline.max(renewed.deadline),
                Err(error) if error.kind() == ErrorKind::Lost => break,
                // Unconfirmed: the old deadline stands, and the next try comes sooner.
                Err(_) => {}
            }
        }
        // The caller abandons what is lost; the place on the new side must not outlive the old one by much.
        let again = call.again(call.exchange());
        let _ = in_time(&again, self.to.abandon(&again, request)).await;
        (lo, Err(Error::lost(LostReason::Taken)))
    }

    /// Makes every later grant of the old side be above the new side's fence, while this holding is on record there.
    pub(super) async fn write_back(
        &self,
        call: &Call,
        request: &AcquireRequest,
        lo: &Lease,
        ln: &Lease,
    ) -> Result<()> {
        let end = call.deadline().min(lo.deadline).min(ln.deadline);
        let mut tries = 0;
        loop {
            let asked = call.again(call.exchange());
            let error = match in_time(&asked, self.raise_old(&asked, lo, ln.fence)).await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            tries += 1;
            match error.kind() {
                // It is idempotent, so it is asked again until somebody says what became of it.
                ErrorKind::Unknown | ErrorKind::Unavailable | ErrorKind::Overloaded => {
                    let pause = SHORTEST_PAUSE * (tries - 1);
                    let again = call.now().saturating_add(pause);
                    if tries > 1 && again >= end {
                        return Err(Error::new(
                            ErrorKind::Unknown,
                            "both sides were granted, and the old side did not confirm the new fence",
                        )
                        .with_source(error));
                    }
                    if !pause.is_zero() {
                        call.clock().sleep_until(again).await;
                    }
                }
                // The old record is gone, and somebody else may have been granted there with a lower fence.
                _ => {
                    self.give_back(call, request, Some(lo), Some(ln)).await;
                    return Err(error);
                }
            }
        }
    }

    pub(super) async fn raise_old(&self, call: &Call, lo: &Lease, floor: Fence) -> Result<()> {
        #[cfg(test)]
        match self.shared.flaw {
            super::super::membership::Flaw::NoWriteBack => return Ok(()),
            super::super::membership::Flaw::VerifyThenRaise => {
                let holder = self.from.inspect(call, &lo.name).await?.holder;
                if holder.is_none_or(|holder| holder.stamp() != lo.stamp()) {
                    return Err(Error::lost(LostReason::Taken));
                }
                return self.from.raise_fence(call, &lo.name, floor).await.map(drop);
            }
            _ => {}
        }
        self.from.raise(call, lo, floor).await
    }

    /// Ends what an acquire was granted and cannot use. What fails here, the caller's `abandon` or the TTL ends.
    pub(super) async fn give_back(
        &self,
        call: &Call,
        request: &AcquireRequest,
        lo: Option<&Lease>,
        ln: Option<&Lease>,
    ) {
        self.shared.grants.remove(request.owner());
        let call = call.again(call.exchange());
        for (store, lease) in [(&self.to, ln), (&self.from, lo)] {
            if let Some(lease) = lease {
                let _ = in_time(&call, store.release(&call, lease)).await;
            }
        }
    }

    /// Tells a store that went back from one that was asked again: an earlier request of this owner may have been
    /// granted below a floor that stands since. Such a grant is of no use, and a new owner starts anew.
    pub(super) async fn asked_again(&self, call: &Call, request: &AcquireRequest, error: Error) -> Error {
        if error.kind() != ErrorKind::FenceRegression || call.attempt() == 1 {
            return error;
        }
        let again = call.again(call.exchange());
        let _ = in_time(&again, self.abandon(&again, request)).await;
        Error::lost(LostReason::Expired)
    }

    /// Makes a lease of what both sides granted, under the membership that it was asked for under.
    pub(super) async fn hand_out(
        &self,
        call: &Call,
        request: &AcquireRequest,
        member: &Membership,
        grant: Grant,
    ) -> Result<Lease> {
        let outcome = async {
            // A wait may have been longer than the membership lasted then.
            let usable = request.ttl().saturating_sub(call.lock_delay());
            let now = self.shared.member(call, usable).await?;
            if now.id != member.id {
                // Between the two the phase may have been closed, and this fence is from before.
                return Err(Error::lost(LostReason::SessionEnded));
            }
            let top = grant.to.as_ref().or(grant.from.as_ref());
            let lease =
                top.cloned().map(|lease| Lease { deadline: self.bound(grant.until, member), ..lease });
            request.usable(call, lease.ok_or_else(|| Error::lost(LostReason::Taken))?)
        };
        match outcome.await {
            Ok(lease) => {
                let until = lease.deadline.saturating_add(request.ttl());
                self.shared.grants.put(lease.owner, Grant { until, ..grant }, call.now());
                Ok(lease)
            }
            Err(error) => {
                self.give_back(call, request, grant.from.as_ref(), grant.to.as_ref()).await;
                // Whatever it was, the grant existed, and whoever asked must not be told that nothing changed.
                match error.kind() {
                    ErrorKind::Lost => Err(error),
                    _ => Err(Error::lost(LostReason::SessionEnded).with_source(error)),
                }
            }
        }
    }
}
