//! The verbs.

use std::{
    sync::{Arc, PoisonError},
    time::Duration,
};

use etcd_client::{Compare, CompareOp, GetOptions, KeyValue, PutOptions, SortOrder, SortTarget, Txn, TxnOp};
use lockcore::backend::*;

use crate::{
    exchange::Repeat,
    keys::{Space, owner_of},
    leases::{BATCH, Renewed, whole_seconds},
    steps::*,
};

const BACKEND: &str = "etcd";
const LIST_PAGE: usize = 1000;
/// How long the leases at hand may take to be given back when the backend is closed.
const FAREWELL: Duration = Duration::from_millis(500);

#[async_trait]
impl LockBackend for EtcdBackend {
    fn capabilities(&self) -> Capabilities {
        let known = self.known();
        Capabilities::weakest(BACKEND).with(|c| {
            c.consistency = Consistency::Linearizable;
            c.fence = FenceSource::Durable;
            c.wake_up = WakeUp::Push;
            c.fair = true;
            c.survives.restart = true;
            c.survives.failover = !known.alone;
            c.survives.clock_step = true;
            c.survives.pause = self.swaps() || !known.revokes_live_leases;
            c.ttl = known.least_ttl..=Duration::from_secs(86_400);
            c.ttl_step = Duration::from_secs(1);
            c.fence_floor = true;
            c.labels = true;
            c.lock_delay = true;
            c.pushes_loss = true;
            c.renew_batch = BATCH;
        })
    }

    async fn acquire(&self, call: &Call, request: &AcquireRequest) -> Result<Lease> {
        within_limit(request).map_err(|e| e.about(Verb::Acquire, Some(request.name()), BACKEND))?;
        let space = Space::new(call.namespace());
        let key = space.place(request.name(), request.owner());
        let answer = self.enqueue(call, request, &space, &key).await;
        if let Err(error) = &answer
            && error.kind().had_no_effect()
            && !matches!(error.kind(), ErrorKind::Held | ErrorKind::WaitTimeout)
        {
            // A refusal tells of one request; an earlier one of this acquire may have left a place.
            if self.may_stand(&key) {
                return answer.map_err(|error| {
                    Error::new(ErrorKind::Unknown, "the acquire broke off after its first request")
                        .with_source(error)
                });
            }
            if !self.put_at_hand(&key) {
                self.drop_place(&key);
            }
        }
        answer
    }

    async fn renew(&self, call: &Call, lease: &Lease, ttl: Duration) -> Result<Lease> {
        let space = Space::new(call.namespace());
        let key = self.key_of(&space, lease);
        // Counted before the table is read: until this is answered, a release does not give the etcd lease to another lock.
        let naming = self.naming(&key);
        let known = self.place(&key);
        let holding = self.holding(call, &key, lease).await;
        let answer = match holding {
            Ok(Some((id, r))) => {
                let longer = known.is_some_and(|place| {
                    i64::try_from(place.granted.as_secs()).unwrap_or(0) < whole_seconds(ttl)
                });
                if self.swaps() || longer {
                    self.renew_by_swap(call, &key, id, (lease.fence, r), ttl).await
                } else {
                    self.renew_by_keep_alive(call, &key, id, (lease.fence, r)).await
                }
            }
            Ok(None) => Ok(Renewed::Gone),
            Err(error) => Err(error),
        };
        if let Some(naming) = naming {
            naming.settle(&answer);
        }
        match answer? {
            Renewed::Until(sent, granted) => Ok(call.renewed(lease, sent, ttl.min(granted))),
            Renewed::Gone => Err(self.gone(call, &space, &key, lease).await),
        }
    }

    async fn renew_many(&self, call: &Call, leases: &[Lease], ttl: Duration) -> Vec<Result<Lease>> {
        if self.swaps() {
            return self.renew_each(call, leases, ttl).await;
        }
        let space = Space::new(call.namespace());
        let mut answers: Vec<Option<Result<Lease>>> = leases.iter().map(|_| None).collect();
        // What the table knows goes together; the rest, one by one.
        let (mut together, mut apart) = (Vec::new(), Vec::new());
        for (at, lease) in leases.iter().enumerate() {
            let key = self.key_of(&space, lease);
            let known = self.place(&key).filter(|place| place.granted >= ttl);
            match known.and_then(|place| Some((place, place.held.filter(|held| held.0 == lease.fence)?.1))) {
                Some((place, r)) => together.push((at, (lease, key, place, r))),
                None => apart.push(at),
            }
        }
        for some in together.chunks(BATCH) {
            let batch: Vec<_> = some.iter().map(|(_, item)| item.clone()).collect();
            let namings: Vec<_> = batch.iter().filter_map(|(_, key, ..)| self.naming(key)).collect();
            let renewed = self.renew_batch(call, &batch).await;
            for naming in namings {
                naming.settle(&renewed);
            }
            match renewed {
                Ok(renewed) => {
                    for ((at, (lease, ..)), renewed) in some.iter().zip(renewed) {
                        match renewed {
                            Renewed::Until(sent, granted) => {
                                answers[*at] = Some(Ok(call.renewed(lease, sent, ttl.min(granted))));
                            }
                            // Asked alone, it is told apart from a lease that was swapped, and why it is over.
                            Renewed::Gone => apart.push(*at),
                        }
                    }
                }
                Err(error) => {
                    let (kind, text) = (error.kind(), error.to_string());
                    for (at, _) in some {
                        answers[*at] = Some(Err(Error::new(kind, text.clone())));
                    }
                }
            }
        }
        let rest: Vec<Lease> = apart.iter().map(|at| leases[*at].clone()).collect();
        for (at, answer) in apart.into_iter().zip(self.renew_each(call, &rest, ttl).await) {
            answers[at] = Some(answer);
        }
        let missing = || Err(Error::new(ErrorKind::Unknown, "the renewal was not answered"));
        answers.into_iter().map(|answer| answer.unwrap_or_else(missing)).collect()
    }

    async fn release(&self, call: &Call, lease: &Lease) -> Result<Released> {
        let key = self.key_of(&Space::new(call.namespace()), lease);
        let mut found = self.holding(call, &key, lease).await;
        if found.is_err() {
            // The next member may know. Without the record there is no lease to revoke.
            found = self.holding(call, &key, lease).await;
        }
        let Some((_, r)) = found? else { return Ok(Released::AlreadyOver) };
        let delete = || {
            Txn::new()
                .when([Compare::create_revision(key.clone(), CompareOp::Equal, r)])
                .and_then([TxnOp::delete(key.clone(), None)])
        };
        let mut deleted = self.txn(call, delete()).await.map(|(now, ..)| now);
        if matches!(deleted, Ok(true)) && self.put_at_hand(&key) {
            return Ok(Released::Now);
        }
        if let Some(place) = self.place(&key).filter(|place| place.ours) {
            // The lease carries this holding alone, so its end is the holding's, also where the deletion is not settled.
            let mut revoked = self.revoke(call, place.lease).await;
            if let (Ok(_), Some(next)) = (&revoked, place.next_lease()) {
                revoked = self.revoke(call, next).await;
            }
            match (&deleted, revoked) {
                (Ok(_), Ok(_)) => self.drop_place(&key),
                (Ok(_), Err(_)) => {}
                (Err(_), Ok(true)) => {
                    self.drop_place(&key);
                    deleted = Ok(true);
                }
                // The holding may hang on a lease that another connection gave it.
                (Err(_), Ok(false)) => {
                    deleted = self.txn(call, delete()).await.map(|(now, ..)| now);
                    self.drop_place(&key);
                }
                (Err(_), Err(error)) => deleted = Err(error),
            }
        } else if deleted.is_ok() {
            self.drop_place(&key);
        }
        Ok(if deleted? { Released::Now } else { Released::AlreadyOver })
    }

    async fn resolve(&self, call: &Call, request: &AcquireRequest) -> Result<Resolution> {
        let began = call.now();
        let space = Space::new(call.namespace());
        let (queue, key) = (space.queue(request.name()), space.place(request.name(), request.owner()));
        self.meet(call, &space).await?;
        let place = match self.lease_of(call, &key).await? {
            Some(id) => self.adopt(call, &key, id).await?,
            None => None,
        };
        if let Some(mut place) = place {
            // Counted from before the first request of this call, not from its keep-alive alone: early, never late.
            place.sent = place.sent.min(began);
            loop {
                let look = self.look(call, &space, &queue, &key).await?;
                if !look.is_first() {
                    break;
                }
                match self.granted(call, request, &space, &look, place).await {
                    Ok(Some(lease)) => return Ok(Resolution::Adopted(lease)),
                    Ok(None) => {}
                    Err(error) => {
                        if error.kind() == ErrorKind::Lost {
                            self.leave_queue(call, &key).await?;
                        }
                        return Err(error);
                    }
                }
            }
        }
        self.leave_queue(call, &key).await?;
        Ok(Resolution::Gone)
    }

    async fn abandon(&self, call: &Call, request: &AcquireRequest) -> Result<()> {
        let key = Space::new(call.namespace()).place(request.name(), request.owner());
        self.leave_queue(call, &key).await.map(drop)
    }

    async fn inspect(&self, call: &Call, name: &LockName) -> Result<LockState> {
        let space = Space::new(call.namespace());
        let all = GetOptions::new().with_prefix().with_sort(SortTarget::Create, SortOrder::Ascend);
        let ops = [TxnOp::get(space.queue(name), Some(all)), TxnOp::get(space.base(), None)];
        let (_, revision, answers) = self.txn_freely(call, Txn::new().and_then(ops)).await?;
        let (places, records) = (range(&answers, 0), range(&answers, 1));
        let Some(record) = records.first() else {
            return Ok(LockState::default().with(|state| state.waiters = Some(0)));
        };
        let base = base_of(record)?;
        let Some(first) = places.first() else {
            // Nothing keeps the fences of a free lock one by one; none of them is above this.
            let bound = fence(base, revision)?;
            return Ok(LockState::default().with(|state| {
                state.waiters = Some(0);
                state.last_fence = Some(bound);
            }));
        };
        let holder = self.holder(call, first, base).await?;
        Ok(LockState::default().with(|state| {
            state.last_fence = holder.as_ref().map(|holder| holder.fence);
            state.holder = holder;
            state.waiters = u32::try_from(places.len() - 1).ok();
        }))
    }

    async fn ended(&self, call: &Call, lease: &Lease) -> LostReason {
        let space = Space::new(call.namespace());
        let key = self.key_of(&space, lease);
        let held = self.place(&key).and_then(|place| place.held).map(|(_, r)| r);
        loop {
            if let Ok(mut watched) = self.watch(PATIENCE, std::slice::from_ref(&key)).await {
                let look = key.as_str();
                let found = self
                    .members
                    .ask(PATIENCE, Repeat::Freely, |client| async move {
                        client.kv_client().get(look, None).await
                    })
                    .await;
                if let Ok(Ok(found)) = found {
                    let now = found.kvs().first().map(KeyValue::create_revision);
                    if now.is_none_or(|now| held.is_some_and(|r| r != now)) {
                        return self.why(call, &space, lease).await;
                    }
                    tokio::select! {
                        _ = watched.stream.message() => {}
                        () = self.members.moved_from(watched.post) => {}
                    }
                    continue;
                }
            }
            call.clock().sleep_until(call.now().saturating_add(Duration::from_millis(500))).await;
        }
    }

    async fn high_water(&self, call: &Call) -> Result<Option<Fence>> {
        let space = Space::new(call.namespace());
        let (revision, answers) = self.snapshot(call, &space, [TxnOp::get(space.base(), None)]).await?;
        let Some(record) = range(&answers, 1).into_iter().next() else { return Ok(None) };
        // A snapshot that was restored may show less than was granted; the clock does not.
        let base = self.meet(call, &space).await?.max(base_of(&record)?);
        fence(base, revision).map(Some)
    }

    async fn list(
        &self,
        call: &Call,
        prefix: Option<&LockName>,
        after: Option<&LockName>,
    ) -> Result<Vec<LockName>> {
        let space = Space::new(call.namespace());
        let all = GetOptions::new().with_prefix().with_keys_only();
        let (_, _, answers) =
            self.txn_freely(call, Txn::new().and_then([TxnOp::get(space.places(), Some(all))])).await?;
        let mut names: Vec<LockName> = range(&answers, 0)
            .iter()
            .filter_map(|kv| space.name_of(kv.key()))
            .filter(|name| prefix.is_none_or(|prefix| name.is_under(prefix)))
            .filter(|name| after.is_none_or(|after| name > after))
            .collect();
        names.sort();
        names.dedup();
        names.truncate(LIST_PAGE);
        Ok(names)
    }

    async fn raise(&self, call: &Call, lease: &Lease, floor: Fence) -> Result<()> {
        let space = Space::new(call.namespace());
        let (queue, key) = (space.queue(&lease.name), self.key_of(&space, lease));
        let Some((_, r)) = self.holding(call, &key, lease).await? else {
            return Err(Error::lost(self.why(call, &space, lease).await));
        };
        loop {
            let look = self.look(call, &space, &queue, &key).await?;
            let Some(record) = &look.base else { return Err(no_record()) };
            if !look.is_first() || look.own.as_ref().is_none_or(|own| own.create_revision() != r) {
                return Err(Error::lost(self.why(call, &space, lease).await));
            }
            // Who comes later has a create revision above `r`.
            let base = above_floor(floor, r + 1)?;
            if base <= base_of(record)? {
                return Ok(());
            }
            let txn = Txn::new()
                .when([
                    Compare::create_revision(key.clone(), CompareOp::Equal, r),
                    Compare::mod_revision(space.base(), CompareOp::Equal, record.mod_revision()),
                ])
                .and_then([TxnOp::put(space.base(), base.to_string(), None)]);
            let (done, revision, _) = self.txn(call, txn).await?;
            if done {
                self.saw(&space, base, revision, r);
                return Ok(());
            }
        }
    }

    async fn raise_fence(&self, call: &Call, name: &LockName, floor: Fence) -> Result<Fence> {
        let space = Space::new(call.namespace());
        self.meet(call, &space).await?;
        loop {
            let look = self.look(call, &space, &space.queue(name), &space.nothing()).await?;
            let Some(record) = &look.base else { return Err(no_record()) };
            // The first in the queue may not have read its fence yet, so it counts as one who comes later.
            let (next, same) = match &look.first {
                Some(first) => {
                    let r = first.create_revision();
                    (r, Compare::create_revision(first.key(), CompareOp::Equal, r))
                }
                None => {
                    let nobody =
                        Compare::create_revision(space.queue(name), CompareOp::Equal, 0).with_prefix();
                    (look.revision + 1, nobody)
                }
            };
            let old = base_of(record)?;
            let base = old.max(above_floor(floor, next)?);
            let stands = fence(base, next - 1);
            if base == old {
                return stands;
            }
            let unchanged = Compare::mod_revision(space.base(), CompareOp::Equal, record.mod_revision());
            let txn = Txn::new().when([same, unchanged]).and_then([TxnOp::put(
                space.base(),
                base.to_string(),
                None,
            )]);
            let (done, revision, _) = self.txn(call, txn).await?;
            if done {
                self.saw(&space, base, revision, next - 1);
                return stands;
            }
        }
    }

    async fn break_lock(&self, call: &Call, name: &LockName, expect: Option<Stamp>) -> Result<Broken> {
        let space = Space::new(call.namespace());
        self.meet(call, &space).await?;
        loop {
            let look = self.look(call, &space, &space.queue(name), &space.nothing()).await?;
            let Some(record) = &look.base else { return Err(no_record()) };
            let base = base_of(record)?;
            let unchanged = Compare::mod_revision(space.base(), CompareOp::Equal, record.mod_revision());
            let put = TxnOp::put(space.base(), (base + 1).to_string(), None);
            let Some(first) = &look.first else {
                let nobody = Compare::create_revision(space.queue(name), CompareOp::Equal, 0).with_prefix();
                let (done, revision, _) =
                    self.txn(call, Txn::new().when([nobody, unchanged]).and_then([put])).await?;
                if done {
                    self.saw(&space, base + 1, revision, revision);
                    return Ok(Broken::new(None, fence(base + 1, revision)?));
                }
                continue;
            };
            let holder = self.holder(call, first, base).await?;
            // A place that cannot be read is not the one that was meant.
            if expect.is_some_and(|expect| holder.as_ref().map(Holder::stamp) != Some(expect)) {
                return Err(Error::held_by(ErrorKind::Held, holder));
            }
            let r = first.create_revision();
            let mut ops = vec![TxnOp::delete(first.key(), None), put];
            if let (Some(owner), Some(holder)) = (owner_of(first.key()), &holder) {
                // Goes with the lease, so it is there as long as the holder may ask, and no longer.
                let options = PutOptions::new().with_lease(first.lease());
                let mark = space.mark(name, &owner);
                ops.push(TxnOp::put(mark, holder.fence.to_string(), Some(options)));
            }
            // Also the lease that the mark goes with must be the place's still: a renewal may have swapped it.
            let same = Compare::mod_revision(first.key(), CompareOp::Equal, first.mod_revision());
            let txn = Txn::new().when([same, unchanged]).and_then(ops);
            let answer = self.txn_or_gone(call, txn, Repeat::Never).await?;
            if let Some((true, revision, _)) = answer {
                self.saw(&space, base + 1, revision, r);
                return Ok(Broken::new(holder, fence(base + 1, r)?));
            }
        }
    }

    async fn preflight(&self, call: &Call) -> Result<Preflight> {
        self.assess(call).await
    }

    async fn phase_read(&self, call: &Call) -> Result<Option<PhaseRecord>> {
        self.read_phase(call).await.map(|found| found.map(|(record, _)| record))
    }

    async fn phase_cas(&self, call: &Call, expect: Option<&PhaseRecord>, new: &PhaseRecord) -> Result<bool> {
        self.replace_phase(call, expect, new).await
    }

    async fn join(&self, call: &Call, phase: &str, ttl: Duration) -> Result<Lease> {
        self.enter(call, phase, ttl).await
    }

    async fn leave(&self, call: &Call, member: &Lease) -> Result<Released> {
        let released = self.release(call, member).await?;
        self.memberships.lock().unwrap_or_else(PoisonError::into_inner).remove(&member.owner);
        Ok(released)
    }

    async fn members(&self, call: &Call) -> Result<Vec<Member>> {
        self.read_members(call).await
    }

    async fn second_connection(&self, _call: &Call) -> Result<Option<Arc<dyn LockBackend>>> {
        Ok(Some(Arc::new(self.beside())))
    }

    async fn close(&self) {
        self.revoke_at_hand(FAREWELL).await;
        self.members.close();
    }
}

impl EtcdBackend {
    /// Returns the key of what a lease is on: a place in a queue, or a membership.
    fn key_of(&self, space: &Space, lease: &Lease) -> String {
        let memberships = self.memberships.lock().unwrap_or_else(PoisonError::into_inner);
        match memberships.get(&lease.owner) {
            Some(key) => key.clone(),
            None => space.place(&lease.name, &lease.owner),
        }
    }

    /// Says why a holding is over, and ends what is left of it.
    async fn gone(&self, call: &Call, space: &Space, key: &str, lease: &Lease) -> Error {
        let why = self.why(call, space, lease).await;
        if let Some(place) =
            self.place(key).filter(|place| place.held.is_some_and(|held| held.0 == lease.fence))
        {
            // A keep-alive may have prolonged a lease that carries nothing any more. If this fails, its TTL ends it.
            if place.ours {
                let _ = self.revoke(call, place.lease).await;
            }
            self.drop_place(key);
        }
        Error::lost(why)
    }
}
