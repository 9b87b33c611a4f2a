//! The verbs.

use std::{sync::Arc, time::Duration};

use futures_util::future;
use lockcore::backend::*;

use crate::{
    config::ZkConfig,
    keys::{Space, stem, unescape},
    places::{Claim, Held, Node, Place, Stage, key},
    preflight,
    session::Session,
    steps::*,
    wait,
    wire::{self, Change, Look},
};

const BACKEND: &str = "zookeeper";
const LIST_PAGE: usize = 1000;
/// What the names of memberships begin with.
const PHASE: &str = "phase";
/// Between two tries of a waiter that has no session.
const PAUSE: Duration = Duration::from_millis(100);

/// Locks on a ZooKeeper ensemble.
///
/// # Units
/// TTLs are milliseconds; the server keeps a session for a third longer. A fence is the namespace's base plus the zxid
/// that created the holder's node.
#[derive(Debug)]
pub struct ZkBackend {
    pub(crate) inner: Arc<Inner>,
}

impl ZkBackend {
    /// Makes a backend that connects when a call needs it.
    ///
    /// # Errors
    /// `Misconfigured`: the configuration cannot work.
    pub fn lazy(config: ZkConfig) -> Result<Self> {
        config.check()?;
        Ok(Self { inner: Inner::new(config) })
    }
}

#[async_trait]
impl LockBackend for ZkBackend {
    fn capabilities(&self) -> Capabilities {
        let longest = self.inner.longest().unwrap_or(Duration::from_secs(86_400));
        Capabilities::weakest(BACKEND).with(|c| {
            c.consistency = Consistency::Linearizable;
            c.fence = FenceSource::ClockBounded;
            c.wake_up = WakeUp::Push;
            c.fair = true;
            c.survives.restart = true;
            c.survives.failover = true;
            c.survives.clock_step = true;
            c.survives.pause = true;
            c.ttl = Duration::from_millis(50).min(longest)..=longest;
            c.fence_floor = true;
            c.labels = true;
            c.lock_delay = true;
            c.pushes_loss = true;
            c.renew_batch = 1024;
        })
    }

    async fn acquire(&self, call: &Call, request: &AcquireRequest) -> Result<Lease> {
        within_limit(request).map_err(|e| e.about(Verb::Acquire, Some(request.name()), BACKEND))?;
        let space = self.inner.space(call);
        let queue = space.queue(request.name());
        let key = key(&queue, request.owner());
        let mut stay = Stay { inner: &self.inner, key: &key, call, ttl: request.ttl(), armed: true };
        let answer = self.enqueue(call, request, &space, &queue, &key).await;
        stay.armed = answer.is_err();
        match answer {
            // A refusal tells of one request; an earlier one of this acquire may have left a place.
            Err(error)
                if error.kind().had_no_effect()
                    && !matches!(error.kind(), ErrorKind::Held | ErrorKind::WaitTimeout)
                    && self.inner.places.get(&key).is_some() =>
            {
                Err(Error::new(ErrorKind::Unknown, "the acquire broke off after its first request")
                    .with_source(error))
            }
            answer => answer,
        }
    }

    async fn renew(&self, call: &Call, lease: &Lease, ttl: Duration) -> Result<Lease> {
        self.renew_many(call, std::slice::from_ref(lease), ttl).await.swap_remove(0)
    }

    async fn release(&self, call: &Call, lease: &Lease) -> Result<Released> {
        let inner = &self.inner;
        let (queue, key) = self.standing_of(call, lease);
        let known = inner.places.get(&key).filter(|place| !place.session.is_over());
        let over = |stood| if stood { Released::Now } else { Released::AlreadyOver };
        match known.as_ref().and_then(|place| place.held) {
            Some(held) if held.fence == lease.fence => inner.leave(call, &key).await.map(over),
            Some(_) => Ok(Released::AlreadyOver),
            None => {
                let session = inner.any_session(call).await?;
                let Some(node) = inner.on_record(call, &session, &queue, lease).await? else {
                    return Ok(Released::AlreadyOver);
                };
                let stood = session.delete(bound_of(call), &format!("{queue}/{}", node.name)).await?;
                inner.places.remove(&key);
                Ok(over(stood))
            }
        }
    }

    async fn resolve(&self, call: &Call, request: &AcquireRequest) -> Result<Resolution> {
        let inner = &self.inner;
        let space = inner.space(call);
        let queue = space.queue(request.name());
        let key = key(&queue, request.owner());
        let began = call.now();
        if let Some(place) = self.standing(call, &key).await? {
            while let Stage::Stands(node) = &place.stage {
                let mut look =
                    wire::look(&place.session, bound_of(call), &space.base(), &queue, Some(&node.name))
                        .await?;
                look.sent = began;
                if !look.queue.is_first(&node.name) || look.own.is_none() {
                    break;
                }
                match inner.granted(call, request, &space, &place, &look, &key).await {
                    Ok(Some(lease)) => return Ok(Resolution::Adopted(lease)),
                    Ok(None) => {}
                    Err(error) => {
                        if error.kind() == ErrorKind::Lost {
                            self.abandon(call, request).await?;
                        }
                        return Err(error);
                    }
                }
            }
        }
        self.abandon(call, request).await?;
        Ok(Resolution::Gone)
    }

    async fn abandon(&self, call: &Call, request: &AcquireRequest) -> Result<()> {
        let inner = &self.inner;
        let queue = inner.space(call).queue(request.name());
        let key = key(&queue, request.owner());
        // Copies come from this process alone, and none is under way longer than its call.
        let now = call.now();
        inner.places.give_up(&key, now.saturating_add(request.ttl()).max(call.deadline()));
        let known = inner.places.get(&key);
        let settled = match known {
            Some(place) if !place.session.is_over() => {
                inner.leave(call, &key).await?;
                true
            }
            Some(_) => false,
            // Nothing was sent by this process, or all of it has been removed.
            None => return self.remove_foreign(call, &queue, request.owner()).await,
        };
        if !settled {
            // The session is over and its nodes with it, as soon as the ensemble has noticed.
            self.remove_foreign(call, &queue, request.owner()).await?;
            inner.places.remove(&key);
        }
        Ok(())
    }

    async fn inspect(&self, call: &Call, name: &LockName) -> Result<LockState> {
        let inner = &self.inner;
        let space = inner.space(call);
        let queue = space.queue(name);
        let session = inner.any_session(call).await?;
        loop {
            // Behind a write of our own, so that what was acknowledged to anybody before is seen.
            let zxid = session.write_beat(bound_of(call)).await?;
            let look = wire::look(&session, bound_of(call), &space.base(), &queue, None).await?;
            let Some(record) = look.base else {
                return Ok(LockState::default().with(|state| state.waiters = Some(0)));
            };
            let Some(first) = look.queue.first() else {
                // Nothing keeps the fences of a free lock one by one; none of them is above this.
                let bound = fence(record.base, zxid)?;
                return Ok(LockState::default().with(|state| {
                    state.waiters = Some(0);
                    state.last_fence = Some(bound);
                }));
            };
            let Some((holder, _)) = inner.holder(call, &session, &queue, first).await? else { continue };
            return Ok(LockState::default().with(|state| {
                state.last_fence = Some(holder.fence);
                state.holder = Some(holder);
                state.waiters = u32::try_from(look.queue.len() - 1).ok();
            }));
        }
    }

    async fn renew_many(&self, call: &Call, leases: &[Lease], ttl: Duration) -> Vec<Result<Lease>> {
        let mut answers: Vec<Option<Result<Lease>>> = leases.iter().map(|_| None).collect();
        let mut by_session: Vec<(Arc<Session>, Vec<Renewing<'_>>)> = Vec::new();
        let mut foreign = Vec::new();
        for (at, lease) in leases.iter().enumerate() {
            let (queue, key) = self.standing_of(call, lease);
            match self.held(call, &key, lease) {
                Ok((place, path)) => {
                    let of = by_session.iter_mut().find(|(session, _)| Arc::ptr_eq(session, &place.session));
                    let session = place.session.clone();
                    let renewing = Renewing { at, lease, place, path };
                    match of {
                        Some((_, places)) => places.push(renewing),
                        None => by_session.push((session, vec![renewing])),
                    }
                }
                Err(Some(error)) => answers[at] = Some(Err(error)),
                Err(None) => foreign.push((at, lease, queue)),
            }
        }
        // Side by side: a session that is silent takes nothing of the others' time.
        let by_session = by_session.iter().map(|(session, places)| self.renew_on(call, session, places, ttl));
        let foreign = foreign
            .iter()
            .map(async |(at, lease, queue)| (*at, Err::<Lease, _>(self.not_ours(call, queue, lease).await)));
        let (by_session, foreign) = tokio::join!(future::join_all(by_session), future::join_all(foreign));
        for (at, answer) in by_session.into_iter().flatten().chain(foreign) {
            answers[at] = Some(answer);
        }
        let unanswered = || Err(Error::new(ErrorKind::Unknown, "the renewal was not answered"));
        answers.into_iter().map(|answer| answer.unwrap_or_else(unanswered)).collect()
    }

    async fn ended(&self, call: &Call, lease: &Lease) -> LostReason {
        let inner = &self.inner;
        let (queue, key) = self.standing_of(call, lease);
        let again = Duration::from_millis(500);
        loop {
            let place =
                inner.places.get(&key).filter(|p| p.held.is_some_and(|held| held.fence == lease.fence));
            let Some(place) = place else {
                // Made by another process, or over: the record tells.
                if let Ok(session) = inner.any_session(call).await
                    && let Ok(None) = inner.on_record(call, &session, &queue, lease).await
                {
                    return inner.why(call, &session, &queue, lease).await;
                }
                call.clock().sleep_until(call.now().saturating_add(again)).await;
                continue;
            };
            if place.session.is_over() {
                return LostReason::SessionEnded;
            }
            if let (Some(path), Ok(worker)) = (place.path(), inner.worker()) {
                let patience = place.session.timeout;
                let until = Moment::MAX;
                match wait::changed(&worker, &place.session, patience, &path, until).await {
                    Ok(()) => {
                        if let Ok(None) = place.session.stat(patience, &path).await {
                            return inner.why(call, &place.session, &queue, lease).await;
                        }
                    }
                    Err(_) => place.session.settled(call.now().saturating_add(again)).await,
                }
            } else {
                call.clock().sleep_until(call.now().saturating_add(again)).await;
            }
        }
    }

    async fn high_water(&self, call: &Call) -> Result<Option<Fence>> {
        let inner = &self.inner;
        let (space, session) = (inner.space(call), inner.any_session(call).await?);
        let zxid = session.write_beat(bound_of(call)).await?;
        let Some(record) = wire::read_base(&session, bound_of(call), &space.base()).await? else {
            return Ok(None);
        };
        // An ensemble that lost its past may show less than was granted; the clock does not.
        let base = inner.meet(call, &session, &space).await?.max(record.base);
        fence(base, zxid).map(Some)
    }

    async fn list(
        &self,
        call: &Call,
        prefix: Option<&LockName>,
        after: Option<&LockName>,
    ) -> Result<Vec<LockName>> {
        let session = self.inner.any_session(call).await?;
        session.write_beat(bound_of(call)).await?;
        let listed = wire::list(&session, bound_of(call), &self.inner.space(call).locks()).await?;
        let mut names: Vec<LockName> = listed
            .map_or_else(Vec::new, |(nodes, _)| nodes)
            .iter()
            .filter_map(|node| unescape(node))
            .filter(|name| prefix.is_none_or(|prefix| name.is_under(prefix)))
            .filter(|name| after.is_none_or(|after| name > after))
            .collect();
        names.sort();
        names.truncate(LIST_PAGE);
        Ok(names)
    }

    async fn raise(&self, call: &Call, lease: &Lease, floor: Fence) -> Result<()> {
        let inner = &self.inner;
        let space = inner.space(call);
        let (queue, base) = (space.queue(&lease.name), space.base());
        let session = inner.any_session(call).await?;
        loop {
            let Some(node) = inner.on_record(call, &session, &queue, lease).await? else {
                return Err(Error::lost(inner.why(call, &session, &queue, lease).await));
            };
            let look = wire::look(&session, bound_of(call), &base, &queue, Some(&node.name)).await?;
            if !look.queue.is_first(&node.name) {
                return Err(Error::lost(inner.why(call, &session, &queue, lease).await));
            }
            let record = recorded(&look)?;
            // Who comes later has a zxid above this one.
            let target = above_floor(floor, node.czxid + 1)?;
            if target <= record.base {
                return Ok(());
            }
            let path = format!("{queue}/{}", node.name);
            let before = inner.seen();
            let change =
                Change { base: Some((&base, record, target)), stands: Some(&path), ..Change::default() };
            if let Some(zxid) = wire::change(&session, bound_of(call), change).await? {
                inner.wrote(before, zxid);
                inner.saw(&space, target, node.czxid);
                return Ok(());
            }
        }
    }

    async fn raise_fence(&self, call: &Call, name: &LockName, floor: Fence) -> Result<Fence> {
        let inner = &self.inner;
        let space = inner.space(call);
        let (queue, base) = (space.queue(name), space.base());
        let session = inner.any_session(call).await?;
        inner.meet(call, &session, &space).await?;
        loop {
            let zxid = session.write_beat(bound_of(call)).await?;
            let look = wire::look(&session, bound_of(call), &base, &queue, None).await?;
            let record = recorded(&look)?;
            // The first in the queue may not have read its fence yet, so it counts as one who comes later.
            let next = match look.queue.first() {
                Some((_, first)) => match wire::read_node(&session, bound_of(call), &queue, first).await? {
                    Some((node, _)) => node.czxid,
                    None => continue,
                },
                None => zxid + 1,
            };
            let target = record.base.max(above_floor(floor, next)?);
            let stands = fence(target, next - 1);
            if target == record.base {
                return stands;
            }
            let before = inner.seen();
            let change = Change { base: Some((&base, record, target)), ..Change::default() };
            if let Some(zxid) = wire::change(&session, bound_of(call), change).await? {
                inner.wrote(before, zxid);
                inner.saw(&space, target, next - 1);
                return stands;
            }
        }
    }

    async fn break_lock(&self, call: &Call, name: &LockName, expect: Option<Stamp>) -> Result<Broken> {
        let inner = &self.inner;
        let space = inner.space(call);
        let (queue, base) = (space.queue(name), space.base());
        let session = inner.any_session(call).await?;
        inner.meet(call, &session, &space).await?;
        loop {
            session.write_beat(bound_of(call)).await?;
            let look = wire::look(&session, bound_of(call), &base, &queue, None).await?;
            let record = recorded(&look)?;
            let before = inner.seen();
            let raise = Some((base.as_str(), record, record.base + 1));
            let Some(first) = look.queue.first() else {
                let change = Change { base: raise, ..Change::default() };
                let Some(zxid) = wire::change(&session, bound_of(call), change).await? else { continue };
                inner.wrote(before, zxid);
                inner.saw(&space, record.base + 1, zxid);
                // Who came between the look and the write has an earlier zxid and counts as a holder.
                let look = wire::look(&session, bound_of(call), &base, &queue, None).await?;
                if let Some((_, first)) = look.queue.first() {
                    match wire::read_node(&session, bound_of(call), &queue, first).await? {
                        Some((node, _)) if node.czxid > zxid => {}
                        _ => continue,
                    }
                }
                return Ok(Broken::new(None, fence(record.base + 1, zxid)?));
            };
            let Some((holder, node)) = inner.holder(call, &session, &queue, first).await? else { continue };
            if expect.is_some_and(|expect| holder.stamp() != expect) {
                return Err(Error::held_by(ErrorKind::Held, Some(holder)));
            }
            let path = format!("{queue}/{}", node.name);
            let change = Change {
                base: raise,
                delete: Some(&path),
                mark: Some((&queue, first.0, holder.fence.get())),
                ..Change::default()
            };
            if let Some(zxid) = wire::change(&session, bound_of(call), change).await? {
                inner.wrote(before, zxid);
                inner.saw(&space, record.base + 1, node.czxid);
                return Ok(Broken::new(Some(holder), fence(record.base + 1, node.czxid)?));
            }
        }
    }

    async fn phase_read(&self, call: &Call) -> Result<Option<PhaseRecord>> {
        let session = self.inner.any_session(call).await?;
        session.write_beat(bound_of(call)).await?;
        let read = wire::read(&session, bound_of(call), &self.inner.space(call).phases()).await?;
        read.map(|(data, _)| PhaseRecord::from_text(&data)).transpose()
    }

    async fn phase_cas(&self, call: &Call, expect: Option<&PhaseRecord>, new: &PhaseRecord) -> Result<bool> {
        let inner = &self.inner;
        let (space, bound) = (inner.space(call), bound_of(call));
        let (path, session) = (space.phases(), inner.any_session(call).await?);
        inner.meet(call, &session, &space).await?;
        loop {
            session.write_beat(bound).await?;
            let found = wire::read(&session, bound, &path).await?;
            let now = found.as_ref().map(|(data, _)| PhaseRecord::from_text(data)).transpose()?;
            if now.as_ref() != expect {
                return Ok(false);
            }
            // Before the record, so that it holds for who knows of no migration, too.
            if let Some(floor) = new.floor {
                inner.raise_base(call, &session, &space, floor).await?;
            }
            let version = found.map(|(_, stat)| stat.version);
            // Where somebody was faster, the next turn finds out what stands there.
            if wire::write(&session, bound, &path, new.to_text().as_bytes(), version).await? {
                return Ok(true);
            }
        }
    }

    async fn join(&self, call: &Call, phase: &str, ttl: Duration) -> Result<Lease> {
        let inner = &self.inner;
        let (space, bound) = (inner.space(call), bound_of(call));
        let name = LockName::from_segments([PHASE, phase])?;
        let request = AcquireRequest::new(name, ttl).labelled(call.label());
        let queue = space.members(request.name());
        let key = key(&queue, request.owner());
        let began = call.now();
        let session = inner.session(call, ttl).await?;
        let base = inner.meet(call, &session, &space).await?;
        let (note, stem) = (note(&request, base)?, stem(request.owner()));
        let mut stay = Stay { inner, key: &key, call, ttl, armed: true };
        inner.places.insert(&key, Place::asked(&session, &queue, *request.owner()));
        let mut turn = 0;
        let node = loop {
            let before = inner.seen();
            let entered = wire::enter(&session, bound, &space.base(), &queue, &stem, &note, turn > 0).await?;
            match entered {
                Some((node, _)) => {
                    inner.wrote(before, node.czxid);
                    break node;
                }
                None if turn < 4 => {
                    session.make_all(bound, &space.all_members()).await?;
                    turn += 1;
                }
                None => {
                    inner.places.remove(&key);
                    return Err(Error::new(
                        ErrorKind::Unavailable,
                        "the phase's node was removed again and again",
                    ));
                }
            }
        };
        // Read behind the node: who closes the phase afterwards finds it there.
        let record = wire::read(&session, bound, &space.phases()).await?;
        let record = record.map(|(data, _)| PhaseRecord::from_text(&data)).transpose()?;
        if !inner.stands(&key, &node) {
            return Err(Error::new(ErrorKind::Unknown, "the membership was given up meanwhile"));
        }
        if record.is_none_or(|record| !record.open.iter().any(|open| open == phase)) {
            inner.leave(call, &key).await?;
            return Err(Error::new(ErrorKind::Unavailable, format!("the phase {phase:?} is not open")));
        }
        let (sent, ttl) = session.dated(began, ttl);
        let fence = fence(base, node.czxid)?;
        let lease = request.granted(call, sent, ttl, fence)?;
        inner.places.learn(&key, |place| {
            place.held = Some(Held { fence, sent, ttl });
            place.until = lease.deadline;
        });
        stay.armed = false;
        Ok(lease)
    }

    async fn leave(&self, call: &Call, member: &Lease) -> Result<Released> {
        self.release(call, member).await
    }

    async fn members(&self, call: &Call) -> Result<Vec<Member>> {
        let inner = &self.inner;
        let (all, session) = (inner.space(call).all_members(), inner.any_session(call).await?);
        // Behind a write of our own: who joined before the record was changed is seen.
        session.write_beat(bound_of(call)).await?;
        let phases =
            wire::list(&session, bound_of(call), &all).await?.map_or_else(Vec::new, |(nodes, _)| nodes);
        let mut members = Vec::new();
        for node in phases {
            let Some(name) = unescape(&node) else { continue };
            let Some(phase) = name.as_str().strip_prefix(PHASE).and_then(|rest| rest.strip_prefix('/'))
            else {
                continue;
            };
            let listed = wire::members(&session, bound_of(call), &format!("{all}/{node}")).await?;
            members.extend(listed.into_iter().map(|(owner, note)| {
                // What is left of another's session is not told.
                Member::new(phase, owner.digest())
                    .with(|member| member.label = Some(note.label).filter(|label| !label.is_empty()))
            }));
        }
        members.sort_by(|one, other| (&one.phase, &one.label).cmp(&(&other.phase, &other.label)));
        Ok(members)
    }

    async fn preflight(&self, call: &Call) -> Result<Preflight> {
        let inner = &self.inner;
        let session = inner.any_session(call).await?;
        let (mut findings, mut server) = (Vec::new(), None);
        if inner.longest().is_none() {
            // A session of a day: nobody grants it, and the answer names the servers' limit.
            let day = Duration::from_secs(86_400);
            if let Err(error) = inner.session(call, day).await
                && error.kind() != ErrorKind::Invalid
            {
                findings.push(format!("the longest session is unknown: {error}"));
            }
        }
        inner.meet(call, &session, &inner.space(call)).await?;
        session.write_beat(bound_of(call)).await?;
        if let Err(error) = wire::probe_container(&session, bound_of(call), &inner.config.root).await {
            findings.push(format!(
                "nodes of kind container cannot be made ({error}); use ZooKeeper 3.6 or later, and leave \
                 zookeeper.extendedTypesEnabled and the access list of the root alone"
            ));
        }
        if inner.config.secure {
            findings.push(
                "versions, modes, ticks and limits of the servers are unknown behind TLS; look by hand"
                    .into(),
            );
        } else {
            findings.extend(preflight::look(&inner.config.servers, bound_of(call), &mut server).await);
        }
        let mut preflight = Preflight::clean(self.capabilities());
        preflight.findings = findings;
        preflight.server = server;
        Ok(preflight)
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}

impl ZkBackend {
    /// Removes every node of a scratch namespace; says how many there were.
    #[cfg(feature = "config")]
    pub(crate) async fn sweep(&self, call: &Call) -> Result<u64> {
        call.scratch()?;
        let session = self.inner.any_session(call).await?;
        session.write_beat(bound_of(call)).await?;
        let (mut removed, mut seen, mut nodes) = (0, 0, vec![self.inner.space(call).top()]);
        // Each node before those that stand below it; then removed from the last on.
        while seen < nodes.len() {
            let node = nodes[seen].clone();
            if let Some((below, _)) = wire::list(&session, bound_of(call), &node).await? {
                nodes.extend(below.into_iter().map(|child| format!("{node}/{child}")));
            }
            seen += 1;
        }
        for node in nodes.iter().rev() {
            removed += u64::from(session.delete(bound_of(call), node).await?);
        }
        Ok(removed)
    }

    async fn enqueue(
        &self,
        call: &Call,
        request: &AcquireRequest,
        space: &Space,
        queue: &str,
        key: &str,
    ) -> Result<Lease> {
        let inner = &self.inner;
        let base = space.base();
        let waits = request.wait_until();
        // A deadline counts from the start of the acquire, unless it waited since.
        let (began, mut waited) = (call.now(), false);
        let mut stood = false;
        'enqueue: loop {
            let (place, mut node, mut look) = match self.enter(call, request, space, queue, key).await {
                Ok(entered) => entered,
                Err(error) => {
                    stood |= error.kind() == ErrorKind::Unknown;
                    if !self.goes_on(call, request, key, stood, &error).await {
                        return Err(error);
                    }
                    continue;
                }
            };
            stood = true;
            if !waited {
                look.sent = began;
            }
            let session = &place.session;
            let mut refused = 0;
            loop {
                let step = async {
                    if look.base.is_none() {
                        // Somebody removed the record: make it again, above all that was seen.
                        inner.forget(space);
                        inner.leave(call, key).await?;
                        return Ok(Next::Enqueue);
                    }
                    let Some(own) = &look.own else {
                        // Somebody removed the place: stand at the end of the queue again.
                        inner.places.remove(key);
                        return Ok(Next::Enqueue);
                    };
                    node = own.clone();
                    if look.queue.is_first(&node.name) {
                        let granted = inner.granted(call, request, space, &place, &look, key).await?;
                        return Ok(granted.map_or(Next::Look, Next::Granted));
                    }
                    if waits.is_none_or(|end| call.now() >= end) {
                        let holder = match look.queue.first() {
                            Some(first) => inner.holder(call, session, queue, first).await?,
                            None => None,
                        };
                        if holder.is_none() && waits.is_none() && refused < 2 {
                            // It went while we asked for its name: the lock may be ours.
                            refused += 1;
                            return Ok(Next::Look);
                        }
                        inner.leave(call, key).await?;
                        let kind = if waits.is_some() { ErrorKind::WaitTimeout } else { ErrorKind::Held };
                        return Err(Error::held_by(kind, holder.map(|(holder, _)| holder)));
                    }
                    let Some(before) = look.queue.before(&node.name) else { return Ok(Next::Look) };
                    waited = true;
                    let worker = inner.worker()?;
                    let net = call.now().saturating_add(session.timeout / 4);
                    let until = waits.map_or(net, |end| end.min(net));
                    wait::changed(&worker, session, bound_of(call), &format!("{queue}/{before}"), until)
                        .await?;
                    Ok(Next::Look)
                };
                let next = match step.await {
                    Ok(Next::Look) => wire::look(session, bound_of(call), &base, queue, Some(&node.name))
                        .await
                        .map(|seen| {
                            look = if waited { seen } else { Look { sent: began, ..seen } };
                            Next::Wait
                        }),
                    next => next,
                };
                match next {
                    Ok(Next::Granted(lease)) => return Ok(lease),
                    Ok(Next::Enqueue) => continue 'enqueue,
                    Ok(Next::Look | Next::Wait) => {}
                    Err(error) => {
                        if !self.goes_on(call, request, key, stood, &error).await {
                            return Err(error);
                        }
                        if session.is_over() {
                            continue 'enqueue;
                        }
                        match wire::look(session, bound_of(call), &base, queue, Some(&node.name)).await {
                            Ok(seen) => look = seen,
                            Err(_) => continue 'enqueue,
                        }
                    }
                }
            }
        }
    }

    /// Says whether a waiter goes on after this error: its place may stand, and the connection may come back. Where the place
    /// went with its session, it queues again, by a new one as soon as that can be had.
    async fn goes_on(
        &self,
        call: &Call,
        request: &AcquireRequest,
        key: &str,
        stood: bool,
        error: &Error,
    ) -> bool {
        let Some(end) = request.wait_until() else { return false };
        if !matches!(error.kind(), ErrorKind::Unknown | ErrorKind::Unavailable) || call.now() >= end {
            return false;
        }
        let soon = |pause| call.now().saturating_add(pause).min(end);
        match self.inner.places.get(key) {
            Some(place) if place.session.is_over() => {}
            // Not in a circle: what failed on a connection that stands may fail again at once.
            Some(place) if place.session.is_connected() => {
                call.clock().sleep_until(soon(place.session.pace())).await;
            }
            Some(place) => place.session.settled(end).await,
            // Given up, or never there.
            None if !stood || self.inner.places.is_given_up(key) => return false,
            None => call.clock().sleep_until(soon(PAUSE)).await,
        }
        call.now() < end
    }

    /// Stands in the queue: with the place that an earlier request made, or with a new one.
    async fn enter(
        &self,
        call: &Call,
        request: &AcquireRequest,
        space: &Space,
        queue: &str,
        key: &str,
    ) -> Result<(Place, Node, Look)> {
        let inner = &self.inner;
        let base = space.base();
        match inner.places.claim(key, call.now()) {
            Claim::GivenUp => {
                return Err(Error::new(
                    ErrorKind::Unavailable,
                    "this acquisition was given up before it arrived",
                ));
            }
            Claim::Leaving => {
                return Err(Error::new(
                    ErrorKind::Unavailable,
                    "what an earlier request left is being removed",
                ));
            }
            Claim::Known => {
                if let Some(place) = self.standing(call, key).await?
                    && let Stage::Stands(node) = &place.stage
                {
                    let node = node.clone();
                    let look =
                        wire::look(&place.session, bound_of(call), &base, queue, Some(&node.name)).await?;
                    return Ok((place, node, look));
                }
                // No request of this acquire has left anything: begin again, on a session that is good.
                inner.places.remove(key);
            }
            Claim::Nothing => {}
        }
        let session = inner.session(call, request.ttl()).await?;
        let known = inner.meet(call, &session, space).await?;
        let note = note(request, known)?;
        let mut place = Place::asked(&session, queue, *request.owner());
        let stem = stem(request.owner());
        for turn in 0.. {
            inner.places.insert(key, place.clone());
            let before = inner.seen();
            let entered = wire::enter(&session, bound_of(call), &base, queue, &stem, &note, turn > 0).await?;
            match entered {
                Some((node, look)) => {
                    inner.wrote(before, node.czxid);
                    place.stage = Stage::Stands(node.clone());
                    if !inner.stands(key, &node) {
                        return Err(Error::new(ErrorKind::Unknown, "the place was given up meanwhile"));
                    }
                    return Ok((place, node, look));
                }
                // Between two steps somebody removed the queue, as the server does with one that is empty.
                None => {
                    inner.places.remove(key);
                    if turn > 0 {
                        // What is above it is missing, too: perhaps all of the namespace. Its record comes first.
                        inner.forget(space);
                        inner.meet(call, &session, space).await?;
                        session.make_all(bound_of(call), &space.locks()).await?;
                    }
                    if call.remaining().is_zero() {
                        break;
                    }
                }
            }
        }
        Err(Error::new(ErrorKind::Unavailable, "the queue's node was removed again and again"))
    }

    /// Finds out whether the node of a place stands, after whatever became of its request. `None`: there is none.
    async fn standing(&self, call: &Call, key: &str) -> Result<Option<Place>> {
        let inner = &self.inner;
        let Some(mut place) = inner.places.get(key) else { return Ok(None) };
        if place.session.is_over() {
            // Its nodes end with it: they are never adopted.
            return Ok(None);
        }
        match &place.stage {
            Stage::Stands(_) => return Ok(Some(place)),
            Stage::Leaving => {
                return Err(Error::new(
                    ErrorKind::Unavailable,
                    "what an earlier request left is being removed",
                ));
            }
            Stage::Asked => {}
        }
        let nodes = wire::nodes_of(&place.session, bound_of(call), &place.queue, &place.owner).await?;
        let mut stands = None;
        for name in nodes {
            let found = wire::read_node(&place.session, bound_of(call), &place.queue, &name).await?;
            let Some((node, stat)) = found else { continue };
            if stands.is_none() && crate::session::is_own(&place.session, &stat) {
                stands = Some(node);
            } else {
                // A second ticket of one owner would stand in its own way.
                place.session.delete(bound_of(call), &format!("{}/{name}", place.queue)).await?;
            }
        }
        let Some(node) = stands else { return Ok(None) };
        if !inner.stands(key, &node) {
            return Err(Error::new(ErrorKind::Unavailable, "what an earlier request left is being removed"));
        }
        place.stage = Stage::Stands(node);
        Ok(Some(place))
    }

    /// Removes what another process, or a session that is over, left under an owner.
    async fn remove_foreign(&self, call: &Call, queue: &str, owner: &Owner) -> Result<()> {
        let session = self.inner.any_session(call).await?;
        for node in wire::nodes_of(&session, bound_of(call), queue, owner).await? {
            session.delete(bound_of(call), &format!("{queue}/{node}")).await?;
        }
        Ok(())
    }

    /// Returns the queue and the key of a lease: a lock's, unless it is a membership of this process.
    fn standing_of(&self, call: &Call, lease: &Lease) -> (String, String) {
        let space = self.inner.space(call);
        let queue = space.queue(&lease.name);
        let locks = key(&queue, &lease.owner);
        if self.inner.places.get(&locks).is_none() {
            let members = space.members(&lease.name);
            let member = key(&members, &lease.owner);
            if self.inner.places.get(&member).is_some() {
                return (members, member);
            }
        }
        (queue, locks)
    }

    /// Finds the place of a lease that may be renewed. `Err(None)`: this process knows of none.
    fn held(
        &self,
        call: &Call,
        key: &str,
        lease: &Lease,
    ) -> std::result::Result<(Place, String), Option<Error>> {
        let Some(place) = self.inner.places.get(key) else { return Err(None) };
        match place.held {
            Some(held) if held.fence == lease.fence => {}
            Some(_) => return Err(Some(Error::lost(LostReason::Taken))),
            None => return Err(None),
        }
        if place.session.is_over() {
            return Err(Some(Error::lost(LostReason::SessionEnded)));
        }
        match place.path() {
            Some(path) if call.now() < place.until => Ok((place, path)),
            _ => Err(Some(Error::lost(LostReason::Expired))),
        }
    }

    /// Says what is known of a lease that no session of this process carries.
    async fn not_ours(&self, call: &Call, queue: &str, lease: &Lease) -> Error {
        let record = async {
            let session = self.inner.any_session(call).await?;
            match self.inner.on_record(call, &session, queue, lease).await? {
                Some(_) => Ok(None),
                None => Ok(Some(self.inner.why(call, &session, queue, lease).await)),
            }
        };
        match record.await {
            Ok(Some(why)) => Error::lost(why),
            Ok(None) => Error::new(
                ErrorKind::Unsupported,
                "another session carries this lease, and only that one can renew it",
            ),
            Err(error) => error,
        }
    }

    /// Renews what stands on one session: by one heartbeat, and a look at each node behind it.
    async fn renew_on(
        &self,
        call: &Call,
        session: &Arc<Session>,
        places: &[Renewing<'_>],
        ttl: Duration,
    ) -> Vec<(usize, Result<Lease>)> {
        let paths: Vec<String> = places.iter().map(|renewing| renewing.path.clone()).collect();
        let sent = call.now();
        let proven = wire::prove(session, bound_of(call), &paths).await;
        if proven.is_err() && session.is_over() {
            let over = |renewing: &Renewing<'_>| (renewing.at, Err(Error::lost(LostReason::SessionEnded)));
            return places.iter().map(over).collect();
        }
        let found = match proven {
            Ok(found) => found,
            Err(error) => return places.iter().map(|renewing| (renewing.at, Err(same(&error)))).collect(),
        };
        let renewed = places.iter().zip(found).map(async |(Renewing { at, lease, place, .. }, found)| {
            let renewed = match found {
                Ok(found) => {
                    let stands = found.is_some_and(|(_, stat)| crate::session::is_own(session, &stat));
                    self.renewed(call, lease, ttl, sent, place, stands).await
                }
                Err(error) => Err(error),
            };
            (*at, renewed)
        });
        future::join_all(renewed).await
    }

    /// Dates a renewal that the session's heartbeat and a look behind it have proven, or not.
    async fn renewed(
        &self,
        call: &Call,
        lease: &Lease,
        ttl: Duration,
        sent: Moment,
        place: &Place,
        stands: bool,
    ) -> Result<Lease> {
        let inner = &self.inner;
        let key = key(&place.queue, &lease.owner);
        if !stands {
            let why = inner.why(call, &place.session, &place.queue, lease).await;
            inner.places.remove(&key);
            return Err(Error::lost(why));
        }
        let (from, ttl) = place.session.dated(sent, ttl);
        let renewed = call.renewed(lease, from, ttl);
        let until = renewed.deadline.saturating_add(call.lock_delay());
        let stays = inner.places.learn(&key, |place| place.until = place.until.max(until));
        // The keeper was faster: it took the lease at its old end.
        if stays { Ok(renewed) } else { Err(Error::lost(LostReason::Expired)) }
    }
}

/// One lease of a batch that is renewed, and where it stands.
struct Renewing<'a> {
    at: usize,
    lease: &'a Lease,
    place: Place,
    path: String,
}

/// Tells one more lease what became of the request that it shared.
fn same(error: &Error) -> Error {
    let same = Error::new(error.kind(), error.message().to_owned());
    match std::error::Error::source(error) {
        Some(source) => same.with_source(source.to_string()),
        None => same,
    }
}

/// What follows a step of a waiter.
enum Next {
    Granted(Lease),
    Look,
    Wait,
    Enqueue,
}
