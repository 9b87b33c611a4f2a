//! The record of a migration's phases, and the memberships that bind to it.

use std::{sync::PoisonError, time::Duration};

use etcd_client::{Compare, CompareOp, GetOptions, PutOptions, Txn, TxnOp};
use futures_util::future;
use lockcore::backend::*;

use crate::{
    keys::{Space, owner_of},
    leases::SWAPS,
    steps::{EtcdBackend, fence, range},
};

impl EtcdBackend {
    /// Returns the record, and the revision that last changed it.
    pub(crate) async fn read_phase(&self, call: &Call) -> Result<Option<(PhaseRecord, i64)>> {
        let space = Space::new(call.namespace());
        let (_, answers) = self.snapshot(call, &space, [TxnOp::get(space.phase(), None)]).await?;
        let Some(record) = range(&answers, 1).into_iter().next() else { return Ok(None) };
        Ok(Some((PhaseRecord::from_text(record.value())?, record.mod_revision())))
    }

    /// Replaces the record. Its floor goes into the namespace's base before, so that it holds for who knows of no migration,
    /// too.
    pub(crate) async fn replace_phase(
        &self,
        call: &Call,
        expect: Option<&PhaseRecord>,
        new: &PhaseRecord,
    ) -> Result<bool> {
        let space = Space::new(call.namespace());
        let key = space.phase();
        if let Some(floor) = new.floor {
            let found = self.read_phase(call).await?;
            if found.map(|(record, _)| record).as_ref() != expect {
                return Ok(false);
            }
            self.raise_base(call, &space, floor).await?;
        }
        let same = match expect {
            None => Compare::create_revision(key.clone(), CompareOp::Equal, 0),
            // Equal records have equal texts.
            Some(record) => Compare::value(key.clone(), CompareOp::Equal, record.to_text()),
        };
        let txn = Txn::new().when([same]).and_then([TxnOp::put(key, new.to_text(), None)]);
        Ok(self.txn(call, txn).await?.0)
    }

    /// Lists who is in which phase, behind every write before: whoever joined before the record was changed is seen.
    pub(crate) async fn read_members(&self, call: &Call) -> Result<Vec<Member>> {
        let space = Space::new(call.namespace());
        let all = GetOptions::new().with_prefix();
        let (_, answers) = self.snapshot(call, &space, [TxnOp::get(space.members(), Some(all))]).await?;
        let found = range(&answers, 1);
        let mut members = Vec::with_capacity(found.len());
        for some in found.chunks(SWAPS) {
            let left = future::join_all(some.iter().map(|record| self.left_of(call, record.lease()))).await;
            for (record, left) in some.iter().zip(left) {
                let (Some(phase), Some(owner)) = (space.phase_of(record.key()), owner_of(record.key()))
                else {
                    continue;
                };
                let label = String::from_utf8_lossy(record.value()).into_owned();
                members.push(Member::new(phase.as_str(), owner.digest()).with(|member| {
                    member.label = Some(label).filter(|label| !label.is_empty());
                    // One that ends just now is told all the same: the next look shows it no more.
                    member.remaining = left.ok();
                }));
            }
        }
        members.sort_by(|one, other| (&one.phase, &one.label).cmp(&(&other.phase, &other.label)));
        Ok(members)
    }

    /// Becomes a member of a phase: a key with a lease of its own, made only while the record that opens the phase stands.
    pub(crate) async fn enter(&self, call: &Call, phase: &str, ttl: Duration) -> Result<Lease> {
        let space = Space::new(call.namespace());
        let Ok(name) = LockName::parse(phase) else {
            return Err(Error::new(ErrorKind::Invalid, "a phase is named like a lock"));
        };
        let request = AcquireRequest::new(name, ttl);
        let key = space.member(request.name(), request.owner());
        loop {
            let Some((_, at)) =
                self.read_phase(call).await?.filter(|(r, _)| r.open.iter().any(|p| p == phase))
            else {
                self.give_up(call, &key).await;
                return Err(Error::new(ErrorKind::Unavailable, format!("the phase {phase:?} is not open")));
            };
            let place = self.grant(call, &key, ttl, Some(call.now())).await?;
            let options = PutOptions::new().with_lease(place.lease);
            let put = TxnOp::put(key.clone(), call.label(), Some(options));
            let txn = Txn::new()
                .when([
                    Compare::mod_revision(space.phase(), CompareOp::Equal, at),
                    Compare::create_revision(key.clone(), CompareOp::Equal, 0),
                ])
                .and_then([put]);
            let naming = self.naming(&key);
            let answer = self.txn(call, txn).await;
            if let Some(naming) = naming {
                naming.settle(&answer);
            }
            let (done, r, _) = match answer {
                Ok(answer) => answer,
                Err(error) => {
                    self.give_up(call, &key).await;
                    return Err(error);
                }
            };
            if !done {
                continue;
            }
            let fence = fence(0, r)?;
            self.update(&key, |place| (place.held, place.queued) = (Some((fence, r)), true));
            let memberships = || self.memberships.lock().unwrap_or_else(PoisonError::into_inner);
            memberships().insert(*request.owner(), key.clone());
            let lease = request.granted(call, place.sent, place.granted, fence);
            if lease.is_err() {
                memberships().remove(request.owner());
                self.give_up(call, &key).await;
            }
            return lease;
        }
    }

    /// Ends what an attempt to join may have left. If this fails, its TTL does.
    async fn give_up(&self, call: &Call, key: &str) {
        if self.place(key).is_some() && !self.put_at_hand(key) {
            let _ = self.leave_queue(call, key).await;
        }
    }
}
