//! The verbs.

use std::{sync::atomic::Ordering, time::Duration};

use etcd_client::{
    AlarmAction, AlarmType, Compare, CompareOp, GetOptions, KeyValue, LeaseGrantOptions, PutOptions,
    SortOrder, SortTarget, Txn, TxnOp, WatchStream,
};
use lockcore::backend::*;

use crate::{
    keys::{Space, owner_of},
    steps::*,
};

const BACKEND: &str = "etcd";
const LIST_PAGE: usize = 1000;

#[async_trait]
impl LockBackend for EtcdBackend {
    fn capabilities(&self) -> Capabilities {
        let least = Duration::from_secs(self.least_ttl.load(Ordering::Relaxed));
        Capabilities::weakest(BACKEND).with(|c| {
            c.consistency = Consistency::Linearizable;
            c.fence = FenceSource::ClockBounded;
            c.wake_up = WakeUp::Push;
            c.fair = true;
            c.survives.restart = true;
            c.survives.failover = true;
            c.survives.clock_step = true;
            c.ttl = least..=Duration::from_secs(86_400);
            c.ttl_step = Duration::from_secs(1);
            c.fence_floor = true;
            c.labels = true;
            c.pushes_loss = true;
        })
    }

    async fn acquire(&self, call: &Call, request: &AcquireRequest) -> Result<Lease> {
        let space = Space::new(call.namespace());
        let key = space.place(request.name(), request.owner());
        let answer = self.enqueue(call, request, &space, &key).await;
        match answer {
            // A refusal tells of one request; an earlier one of this acquire may have left a place.
            Err(error)
                if error.kind().had_no_effect()
                    && !matches!(error.kind(), ErrorKind::Held | ErrorKind::WaitTimeout)
                    && self.place(&key).is_some_and(|place| place.alive) =>
            {
                Err(Error::new(ErrorKind::Unknown, "the acquire broke off after its first request")
                    .with_source(error))
            }
            answer => answer,
        }
    }

    async fn renew(&self, call: &Call, lease: &Lease, ttl: Duration) -> Result<Lease> {
        let space = Space::new(call.namespace());
        let (queue, key) = (space.queue(&lease.name), space.place(&lease.name, &lease.owner));
        let Some((id, r)) = self.holding(call, &key, lease).await? else {
            return Err(Error::lost(self.why(call, &space, lease).await));
        };
        let Some(place) = self.adopt(call, &key, id).await? else {
            self.drop_place(&key);
            return Err(Error::lost(LostReason::Taken));
        };
        self.keep(&key, Place { held: Some((lease.fence, r)), ..place });
        // After the keep-alive was answered, never beside it: a look before a revocation proves nothing.
        let look = self.look(call, &space, &queue, &key).await?;
        if !look.is_first() || look.own.as_ref().is_none_or(|own| own.create_revision() != r) {
            let why = self.why(call, &space, lease).await;
            // The keep-alive may have prolonged a lease that carries nothing any more. If this fails, its TTL ends it.
            let _ = self.revoke(call, id).await;
            self.drop_place(&key);
            return Err(Error::lost(why));
        }
        Ok(call.renewed(lease, place.sent, ttl.min(place.granted)))
    }

    async fn release(&self, call: &Call, lease: &Lease) -> Result<Released> {
        let key = Space::new(call.namespace()).place(&lease.name, &lease.owner);
        let mut found = self.holding(call, &key, lease).await;
        if found.is_err() {
            // The next member may know. Without the record there is no lease to revoke.
            found = self.holding(call, &key, lease).await;
        }
        let Some((id, r)) = found? else { return Ok(Released::AlreadyOver) };
        let txn = Txn::new()
            .when([Compare::create_revision(key.clone(), CompareOp::Equal, r)])
            .and_then([TxnOp::delete(key.clone(), None)]);
        let deleted = self.txn(call, txn).await;
        // The lease carries this holding alone, so its end is the holding's, also where the deletion is not settled.
        let revoked = self.revoke(call, id).await;
        if revoked.is_ok() {
            self.drop_place(&key);
        }
        let now = match deleted {
            Ok((now, ..)) => now,
            Err(_) => revoked?,
        };
        Ok(if now { Released::Now } else { Released::AlreadyOver })
    }

    async fn resolve(&self, call: &Call, request: &AcquireRequest) -> Result<Resolution> {
        let space = Space::new(call.namespace());
        let (queue, key) = (space.queue(request.name()), space.place(request.name(), request.owner()));
        self.meet(call, &space).await?;
        let place = match self.lease_of(call, &key).await? {
            Some(id) => self.adopt(call, &key, id).await?,
            None => None,
        };
        if let Some(place) = place {
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
                            self.leave(call, &key).await?;
                        }
                        return Err(error);
                    }
                }
            }
        }
        self.leave(call, &key).await?;
        Ok(Resolution::Gone)
    }

    async fn abandon(&self, call: &Call, request: &AcquireRequest) -> Result<()> {
        let key = Space::new(call.namespace()).place(request.name(), request.owner());
        self.leave(call, &key).await.map(drop)
    }

    async fn inspect(&self, call: &Call, name: &LockName) -> Result<LockState> {
        let space = Space::new(call.namespace());
        let all = GetOptions::new().with_prefix().with_sort(SortTarget::Create, SortOrder::Ascend);
        let ops = [TxnOp::get(space.queue(name), Some(all)), TxnOp::get(space.base(), None)];
        let (_, revision, answers) = self.txn(call, Txn::new().and_then(ops)).await?;
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
        let key = space.place(&lease.name, &lease.owner);
        let held = self.place(&key).and_then(|place| place.held).map(|(_, r)| r);
        loop {
            if let Ok((mut stream, _)) = self.watch(PATIENCE, std::slice::from_ref(&key)).await {
                let look = key.clone();
                let found = self
                    .members
                    .ask(PATIENCE, |client| async move { client.kv_client().get(look, None).await })
                    .await;
                if let Ok(Ok(found)) = found {
                    let now = found.kvs().first().map(KeyValue::create_revision);
                    if now.is_none_or(|now| held.is_some_and(|r| r != now)) {
                        return self.why(call, &space, lease).await;
                    }
                    let _ = stream.message().await;
                    continue;
                }
            }
            call.clock().sleep_until(call.now().saturating_add(Duration::from_millis(500))).await;
        }
    }

    async fn high_water(&self, call: &Call) -> Result<Option<Fence>> {
        let base = Space::new(call.namespace()).base();
        let (_, revision, answers) = self.txn(call, Txn::new().and_then([TxnOp::get(base, None)])).await?;
        range(&answers, 0).first().map(|record| fence(base_of(record)?, revision)).transpose()
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
            self.txn(call, Txn::new().and_then([TxnOp::get(space.places(), Some(all))])).await?;
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
        let (queue, key) = (space.queue(&lease.name), space.place(&lease.name, &lease.owner));
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
            if let (Some(expect), Some(holder)) = (expect, &holder)
                && holder.stamp() != expect
            {
                return Err(Error::held_by(ErrorKind::Held, Some(holder.clone())));
            }
            let r = first.create_revision();
            let mut ops = vec![TxnOp::delete(first.key(), None), put];
            if let (Some(owner), Some(holder)) = (owner_of(first.key()), &holder) {
                // Goes with the lease, so it is there as long as the holder may ask, and no longer.
                let options = PutOptions::new().with_lease(first.lease());
                let mark = space.mark(name, &owner);
                ops.push(TxnOp::put(mark, holder.fence.to_string(), Some(options)));
            }
            let same = Compare::create_revision(first.key(), CompareOp::Equal, r);
            let (done, revision, _) =
                self.txn(call, Txn::new().when([same, unchanged]).and_then(ops)).await?;
            if done {
                self.saw(&space, base + 1, revision, r);
                return Ok(Broken::new(holder, fence(base + 1, r)?));
            }
        }
    }

    async fn preflight(&self, call: &Call) -> Result<Preflight> {
        self.high_water(call).await?;
        let mut findings = Vec::new();
        for (at, endpoint) in self.members.endpoints().iter().enumerate() {
            let asked = tokio::time::timeout(bound_of(call), async {
                self.members.client(at).await?.maintenance_client().status().await
            });
            match asked.await {
                Ok(Ok(status)) => {
                    if revokes_live_leases(status.version()) {
                        findings.push(format!(
                            "{endpoint} runs etcd {}: a leader that was stopped and goes on may end live leases; \
                             use 3.4.31, 3.5.13 or later",
                            status.version()
                        ));
                    }
                    if status.is_learner() {
                        findings.push(format!(
                            "{endpoint} is a learner and serves no locks; name voting members"
                        ));
                    }
                }
                _ => findings.push(format!("{endpoint} does not answer; start it, or take it off the list")),
            }
        }
        let alarms = self
            .members
            .ask(bound_of(call), |client| async move {
                client.maintenance_client().alarm(AlarmAction::Get, AlarmType::None, None).await
            })
            .await;
        match alarms {
            Ok(Ok(answer)) => findings.extend(answer.alarms().iter().map(|alarm| {
                format!(
                    "member {:x} raises the alarm {:?}; clear its cause",
                    alarm.member_id(),
                    alarm.alarm()
                )
            })),
            _ => findings.push("alarms cannot be read; allow it, or look by hand".into()),
        }
        let (id, options) = {
            let id = random_lease()?;
            (id, LeaseGrantOptions::new().with_id(id))
        };
        let granted = self
            .members
            .ask(bound_of(call), |client| async move { client.lease_client().grant(1, Some(options)).await })
            .await?;
        if let Ok(granted) = granted {
            let least = granted.ttl().max(1).unsigned_abs();
            self.revoke(call, id).await?;
            self.least_ttl.store(least, Ordering::Relaxed);
            if least > 1 {
                findings.push(format!(
                    "the shortest TTL is {least} s, one and a half election timeouts; shorter ones are refused"
                ));
            }
        }
        let mut preflight = Preflight::clean(self.capabilities());
        preflight.findings = findings;
        Ok(preflight)
    }

    async fn close(&self) {
        self.members.close();
    }
}

impl EtcdBackend {
    async fn enqueue(
        &self,
        call: &Call,
        request: &AcquireRequest,
        space: &Space,
        key: &str,
    ) -> Result<Lease> {
        let queue = space.queue(request.name());
        let label = request.label().unwrap_or_default();
        // A deadline counts from the start of the acquire, unless the lease was renewed since.
        let mut began = Some(call.now());
        'enqueue: loop {
            let base = self.meet(call, space).await?;
            let mut place = self.grant(call, key, request.ttl(), began.take()).await?;
            let options = PutOptions::new().with_lease(place.lease);
            let put = TxnOp::put(key, write_value(base, label), Some(options));
            let free = match request.wait_until() {
                None => Compare::create_revision(queue.clone(), CompareOp::Equal, 0).with_prefix(),
                Some(_) => Compare::create_revision(key, CompareOp::Equal, 0),
            };
            let recorded = Compare::create_revision(space.base(), CompareOp::Greater, 0);
            let mut ops = vec![put];
            ops.extend(Self::gets(space, &queue, key));
            let txn = Txn::new().when([free, recorded]).and_then(ops).or_else(Self::gets(space, &queue, key));
            let (put, revision, answers) = self.txn(call, txn).await?;
            let mut look = self.read_look(space, revision, &answers, usize::from(put));
            let mut watched: Option<WatchStream> = None;
            loop {
                if look.base.is_none() {
                    // Somebody removed the record: make it again, above all that was seen.
                    self.forget(space);
                    self.leave(call, key).await?;
                    continue 'enqueue;
                }
                if let Some(own) = &look.own
                    && own.lease() != place.lease
                {
                    // An earlier request of this acquire, by another connection, made the place.
                    let ours = place.lease;
                    let theirs = self.adopt(call, key, own.lease()).await?;
                    self.revoke(call, ours).await?;
                    match theirs {
                        Some(theirs) => place = theirs,
                        None => self.drop_place(key),
                    }
                    if theirs.is_none() {
                        continue 'enqueue;
                    }
                }
                if look.is_first() {
                    match self.granted(call, request, space, &look, place).await? {
                        Some(lease) => return Ok(lease),
                        None => {
                            look = self.look(call, space, &queue, key).await?;
                            continue;
                        }
                    }
                }
                let over = request.wait_until().is_none_or(|end| call.now() >= end);
                if over {
                    let base = look.base.as_ref().map_or(Ok(0), base_of)?;
                    let holder = match &look.first {
                        Some(first) => self.holder(call, first, base).await.unwrap_or(None),
                        None => None,
                    };
                    self.leave(call, key).await?;
                    let kind =
                        if request.wait_until().is_some() { ErrorKind::WaitTimeout } else { ErrorKind::Held };
                    return Err(Error::held_by(kind, holder));
                }
                // The place is gone: stand at the end of the queue again, with a new lease.
                let Some(own) = &look.own else {
                    self.leave(call, key).await?;
                    continue 'enqueue;
                };
                if watched.is_none() {
                    let before = self.predecessor(call, &queue, own.create_revision()).await?;
                    let keys: Vec<String> = std::iter::once(key.to_owned()).chain(before).collect();
                    let (stream, from) = self.watch(bound_of(call), &keys).await?;
                    watched = Some(stream);
                    loop {
                        look = self.look(call, space, &queue, key).await?;
                        if look.revision >= from {
                            break;
                        }
                    }
                    continue;
                }
                let fresh_until = place.sent.saturating_add(place.granted / 3);
                let until = request.wait_until().map_or(fresh_until, |end| end.min(fresh_until));
                if let Some(stream) = &mut watched {
                    tokio::select! {
                        _ = stream.message() => watched = None,
                        () = call.clock().sleep_until(until) => {}
                    }
                }
                if call.now() >= fresh_until {
                    let sent = call.now();
                    if !self.keep_alive(call, place.lease).await? {
                        self.drop_place(key);
                        continue 'enqueue;
                    }
                    place.sent = sent;
                    self.keep(key, place);
                }
                look = self.look(call, space, &queue, key).await?;
            }
        }
    }
}

fn no_record() -> Error {
    Error::new(ErrorKind::Unavailable, "the namespace's record is gone")
}

/// Says whether a stopped leader of this version may end leases that were renewed elsewhere.
///
/// # Source
/// etcd changelog 3.4.31, 3.5.13: "fix leases wrongly revoked by the leader".
fn revokes_live_leases(version: &str) -> bool {
    let mut parts = version.split(['.', '-', '+']).map(|part| part.parse::<u32>().unwrap_or(0));
    let mut next = || parts.next().unwrap_or(0);
    match (next(), next(), next()) {
        (3, 4, patch) => patch < 31,
        (3, 5, patch) => patch < 13,
        (major, minor, _) => (major, minor) < (3, 4),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_versions_are_known() {
        for (version, old) in [
            ("3.4.23", true),
            ("3.4.31", false),
            ("3.5.12", true),
            ("3.5.13", false),
            ("3.5.0-rc.1", true),
            ("3.6.0", false),
            ("3.3.27", true),
        ] {
            assert_eq!(revokes_live_leases(version), old, "{version}");
        }
    }
}
