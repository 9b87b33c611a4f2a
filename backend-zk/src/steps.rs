//! What the verbs share: sessions of a class, the base of a namespace, from a look to a lease.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, Mutex, PoisonError, Weak,
        atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use lockcore::backend::*;
use zookeeper_client::{Acls, Client};

use crate::{
    config::ZkConfig,
    error::error,
    keys::{Note, Space, beat},
    places::{Held, Node, Place, Places, Stage},
    session::{Session, class, keep},
    wire::{self, Base, Change, Look},
    worker::Worker,
};

/// Leaves room for zxids above any floor.
const FLOOR_LIMIT: i64 = 1 << 62;
/// What an exchange may take where the call has less left; lockcore drops a call that overstays.
const LEAST_PATIENCE: Duration = Duration::from_millis(500);
/// The longest label, in bytes.
const LABEL_LIMIT: usize = 1024;
/// The TTL whose session looks and lists use where there is none yet.
const LOOKING: Duration = Duration::from_secs(6);

/// Everything that the backend and its sessions' keepers share.
pub(crate) struct Inner {
    pub(crate) config: ZkConfig,
    worker: Mutex<Option<Arc<Worker>>>,
    /// By class: the session that new places get.
    pool: Mutex<HashMap<u64, Slot>>,
    pub(crate) places: Places,
    /// By namespace: what this process saw of its base.
    spaces: Mutex<HashMap<String, Met>>,
    /// The highest zxid that any answer showed.
    seen: AtomicI64,
    /// Counts the times that the ensemble was seen to have lost its past.
    life: AtomicU64,
    /// The longest timeout the servers agree to, in milliseconds; 0: not known.
    longest: AtomicU64,
    closed: AtomicBool,
    me: Weak<Inner>,
}

type Slot = Arc<tokio::sync::Mutex<Option<Arc<Session>>>>;

#[derive(Clone, Copy, Debug, Default)]
struct Met {
    /// The life of the ensemble in which the base was last compared with the clock.
    life: Option<u64>,
    /// The highest base seen.
    base: i64,
    /// No fence seen so far is above it.
    high: i64,
}

impl Inner {
    pub(crate) fn new(config: ZkConfig) -> Arc<Self> {
        Arc::new_cyclic(|me| Self {
            me: me.clone(),
            config,
            worker: Mutex::default(),
            pool: Mutex::default(),
            places: Places::default(),
            spaces: Mutex::default(),
            seen: AtomicI64::new(0),
            life: AtomicU64::new(0),
            longest: AtomicU64::new(0),
            closed: AtomicBool::new(false),
        })
    }

    pub(crate) fn space(&self, call: &Call) -> Space {
        Space::new(&self.config.root, call.namespace())
    }

    /// Returns the longest TTL that the servers are known to carry.
    pub(crate) fn longest(&self) -> Option<Duration> {
        Some(self.longest.load(Ordering::Relaxed)).filter(|ms| *ms > 0).map(Duration::from_millis)
    }

    pub(crate) fn worker(&self) -> Result<Arc<Worker>> {
        let mut worker = self.worker.lock().unwrap_or_else(PoisonError::into_inner);
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Closed, "the backend was closed"));
        }
        if let Some(worker) = &*worker {
            return Ok(worker.clone());
        }
        Ok(worker.insert(Arc::new(Worker::start()?)).clone())
    }

    /// Returns the session for new places of this TTL.
    pub(crate) async fn session(&self, call: &Call, ttl: Duration) -> Result<Arc<Session>> {
        if let Some(longest) = self.longest().filter(|longest| *longest < ttl) {
            return Err(too_long(ttl, longest));
        }
        let mut class = class(ttl);
        if let Some(longest) = self.longest() {
            class = class.min(u64::try_from(longest.as_millis()).unwrap_or(u64::MAX));
        }
        let slot: Slot = {
            let mut pool = self.pool.lock().unwrap_or_else(PoisonError::into_inner);
            pool.entry(class).or_default().clone()
        };
        let waited = tokio::time::timeout(bound_of(call), slot.lock()).await;
        let mut slot =
            waited.map_err(|_| Error::new(ErrorKind::Unavailable, "no session came up in time"))?;
        if let Some(session) = &*slot
            && !session.is_over()
        {
            if session.is_fresh() {
                session.uses();
                return Ok(session.clone());
            }
            if !session.is_connected() && self.places.of_session(session).0 > 0 {
                // It may come back, and others live by it. If it turns out to be over, a new one takes its place.
                match session.ready(bound_of(call)).await {
                    Ok(_) if session.is_fresh() => return Ok(session.clone()),
                    Err(error) if !session.is_over() => return Err(error),
                    _ => {}
                }
            }
        }
        // A session that was silent for too long would give short leases; a new one begins with the leader's own touch.
        // The old one closes with the last place that stands on it.
        let session = self.open(call, Duration::from_millis(class)).await?;
        *slot = Some(session.clone());
        if session.timeout < ttl {
            return Err(too_long(ttl, session.timeout));
        }
        Ok(session)
    }

    /// Returns a session that is connected, for a look or a step that needs no place.
    pub(crate) async fn any_session(&self, call: &Call) -> Result<Arc<Session>> {
        let slots: Vec<Slot> =
            self.pool.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect();
        for slot in slots {
            if let Ok(slot) = slot.try_lock()
                && let Some(session) = slot.as_ref().filter(|session| session.is_connected())
            {
                session.uses();
                return Ok(session.clone());
            }
        }
        let ttl = self.longest().map_or(LOOKING, |longest| longest.min(LOOKING));
        match self.session(call, ttl).await {
            Err(refused) if refused.kind() == ErrorKind::Invalid => {
                // The servers' limit was not known; now it is.
                self.session(call, self.longest().map_or(LOOKING, |longest| longest.min(LOOKING))).await
            }
            answer => answer,
        }
    }

    async fn open(&self, call: &Call, asked: Duration) -> Result<Arc<Session>> {
        let worker = self.worker()?;
        let bound = self.config.connect_timeout;
        let mut connector = Client::connector().with_session_timeout(asked).with_fail_eagerly();
        let mut acls = Acls::anyone_all();
        if let (Some(user), Some(password)) = (&self.config.user, &self.config.password) {
            connector = connector.with_auth("digest", format!("{user}:{password}").as_bytes());
            acls = Acls::creator_all();
        }
        #[cfg(feature = "tls")]
        if self.config.secure {
            connector = connector.with_tls(self.config.tls.read()?);
        }
        // Each address says how it is spoken to.
        let scheme = if self.config.secure { "tcp+tls://" } else { "tcp://" };
        let servers: Vec<String> =
            self.config.servers.iter().map(|server| format!("{scheme}{server}")).collect();
        let servers = servers.join(",");
        let clock = call.clock_arc();
        let connect = clock.now();
        let mut connecting = worker.spawn(async move { connector.connect(&servers).await });
        let client = match tokio::time::timeout(bound, &mut connecting).await {
            Ok(Ok(Ok(client))) => client,
            Ok(Ok(Err(said))) => {
                // Nothing of ours was sent, so nothing is unknown.
                let said = error(said);
                return Err(match said.kind() {
                    ErrorKind::Unknown => unreachable_now().with_source(said),
                    _ => said,
                });
            }
            Ok(Err(_)) => return Err(unreachable_now()),
            Err(_) => {
                connecting.abort();
                return Err(Error::new(ErrorKind::Unavailable, "no session came up in time"));
            }
        };
        let path = beat(&self.config.root, client.session_id().0);
        worker.serves(client.state_watcher());
        let session = Arc::new(Session::new(client, clock, connect, path, acls));
        if session.timeout < asked {
            let ms = u64::try_from(session.timeout.as_millis()).unwrap_or(u64::MAX);
            self.longest.store(ms, Ordering::Relaxed);
        }
        session.make_beat(bound.min(session.timeout)).await?;
        drop(worker.spawn(keep(self.me.clone(), Arc::downgrade(&session))));
        Ok(session)
    }

    /// Lets no new place on a session.
    pub(crate) fn retire(&self, session: &Arc<Session>) {
        let slots: Vec<Slot> =
            self.pool.lock().unwrap_or_else(PoisonError::into_inner).values().cloned().collect();
        for slot in slots {
            if let Ok(mut slot) = slot.try_lock()
                && slot.as_ref().is_some_and(|known| Arc::ptr_eq(known, session))
            {
                *slot = None;
            }
        }
    }
}

impl Inner {
    pub(crate) fn seen(&self) -> i64 {
        self.seen.load(Ordering::Acquire)
    }

    /// Takes note of the zxid of a write that left when `before` was the highest seen.
    pub(crate) fn wrote(&self, before: i64, zxid: i64) {
        if zxid > 0 && zxid < before {
            // Only an ensemble that lost its past counts anew.
            self.seen.store(zxid, Ordering::Release);
            self.life.fetch_add(1, Ordering::AcqRel);
        } else {
            self.seen.fetch_max(zxid, Ordering::AcqRel);
        }
    }

    fn met(&self, space: &Space) -> Met {
        let spaces = self.spaces.lock().unwrap_or_else(PoisonError::into_inner);
        spaces.get(&space.base()).copied().unwrap_or_default()
    }

    /// Remembers a base that stood, and that fences up to the one of `newest` may be out.
    pub(crate) fn saw(&self, space: &Space, base: i64, newest: i64) {
        let mut spaces = self.spaces.lock().unwrap_or_else(PoisonError::into_inner);
        let met = spaces.entry(space.base()).or_default();
        met.base = met.base.max(base);
        met.high = met.high.max(base.saturating_add(newest));
    }

    /// Makes the next acquire read the record again.
    pub(crate) fn forget(&self, space: &Space) {
        let mut spaces = self.spaces.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(met) = spaces.get_mut(&space.base()) {
            met.life = None;
        }
    }

    /// Compares the base of a namespace with the clock once in each life of the ensemble, and returns the base.
    ///
    /// An ensemble that was set up anew begins its zxids anew; the clock outdoes what it granted before. A wrong clock
    /// only pushes fences ahead.
    pub(crate) async fn meet(&self, call: &Call, session: &Session, space: &Space) -> Result<i64> {
        let (path, bound) = (space.base(), bound_of(call));
        loop {
            let life = self.life.load(Ordering::Acquire);
            let met = self.met(space);
            if met.life == Some(life) {
                return Ok(met.base);
            }
            let record = wire::read_base(session, bound, &path).await?;
            let micros = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
            let clock = i64::try_from(micros).unwrap_or(0).saturating_sub(self.seen());
            let least = clock.max(met.high).clamp(0, FLOOR_LIMIT);
            let base = match record {
                None => {
                    if self.has_places(session, bound, space).await? {
                        if wire::read_base(session, bound, &path).await?.is_some() {
                            continue;
                        }
                        return Err(Error::new(
                            ErrorKind::Misconfigured,
                            "the namespace's record is missing beside nodes of locks; restore it, or remove the nodes",
                        ));
                    }
                    let before = self.seen();
                    match wire::make_base(session, bound, &path, least).await? {
                        None => {
                            session.make_all(bound, &space.locks()).await?;
                            continue;
                        }
                        Some((false, _)) => continue,
                        Some((true, zxid)) => self.wrote(before, zxid),
                    }
                    least
                }
                Some(old) if old.base >= least => old.base,
                Some(old) => {
                    let before = self.seen();
                    let base = Some((path.as_str(), old, least));
                    match wire::change(session, bound, Change { base, ..Change::default() }).await? {
                        None => continue,
                        Some(zxid) => self.wrote(before, zxid),
                    }
                    least
                }
            };
            let mut spaces = self.spaces.lock().unwrap_or_else(PoisonError::into_inner);
            let met = spaces.entry(path.clone()).or_default();
            met.base = if met.life.is_none() { base } else { met.base.max(base) };
            met.life = Some(life);
            return Ok(met.base);
        }
    }

    /// Says whether anybody stands in a queue of the namespace.
    async fn has_places(&self, session: &Session, bound: Duration, space: &Space) -> Result<bool> {
        let locks = space.locks();
        let Some((queues, _)) = wire::list(session, bound, &locks).await? else { return Ok(false) };
        for queue in queues {
            let listed = wire::list(session, bound, &format!("{locks}/{queue}")).await?;
            if listed.is_some_and(|(places, _)| !places.is_empty()) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Raises the base, so that every later grant of any name is above a floor.
    pub(crate) async fn raise_base(
        &self,
        call: &Call,
        session: &Session,
        space: &Space,
        floor: Fence,
    ) -> Result<()> {
        let (path, bound) = (space.base(), bound_of(call));
        loop {
            let zxid = session.write_beat(bound).await?;
            let record = wire::read_base(session, bound, &path).await?.ok_or_else(no_record)?;
            if fence(record.base, 0).is_ok_and(|least| least > floor) {
                return Ok(());
            }
            // Who stands in a queue may not have read its fence yet. Nobody comes to stand before it.
            let next =
                wire::earliest(session, bound, &space.locks()).await?.unwrap_or(zxid + 1).min(zxid + 1);
            let target = above_floor(floor, next)?;
            if target <= record.base {
                return Ok(());
            }
            let before = self.seen();
            let change = Change { base: Some((&path, record, target)), ..Change::default() };
            if let Some(zxid) = wire::change(session, bound, change).await? {
                self.wrote(before, zxid);
                self.saw(space, target, next - 1);
                return Ok(());
            }
        }
    }

    /// Takes note of what a place has come to.
    pub(crate) fn stands(&self, key: &str, node: &Node) -> bool {
        self.places.learn(key, |place| place.stage = Stage::Stands(node.clone()))
    }

    /// Turns a look that shows the own node first into a lease. `None`: things moved; look again.
    ///
    /// The node's note names the base of the grant, so that the fence can be read from the record at any time. Where it
    /// names another, or a floor asks for a higher one, one write brings both up to date.
    pub(crate) async fn granted(
        &self,
        call: &Call,
        request: &AcquireRequest,
        space: &Space,
        place: &Place,
        look: &Look,
        key: &str,
    ) -> Result<Option<Lease>> {
        let (Some(own), Some(record)) = (&look.own, look.base) else { return Ok(None) };
        let session = &place.session;
        if self.meet(call, session, space).await? > record.base {
            // Either this server lags behind the one that told of the higher base, or the record went back. Comparing
            // it with the clock anew tells the two apart: a record that lags cannot be replaced.
            self.forget(space);
            self.meet(call, session, space).await?;
            return Ok(None);
        }
        let above = |fence: Fence| request.floor().is_none_or(|floor| fence > floor);
        let held = self.places.get(key).and_then(|place| place.held);
        if let Some(held) = held.filter(|held| above(held.fence)) {
            return request.granted(call, held.sent, held.ttl, held.fence).map(Some);
        }
        let ttl = request.ttl();
        if !self.freshen(call, session, look.sent, ttl).await? {
            return Ok(None);
        }
        let mut target = record.base;
        if let Some(floor) =
            request.floor().filter(|_| fence(target, own.czxid).is_ok_and(|fence| !above(fence)))
        {
            target = above_floor(floor, own.czxid)?;
        }
        if target != record.base || own.note.base != record.base {
            let note = Note { base: target, ..own.note.clone() };
            let (path, base) = (format!("{}/{}", place.queue, own.name), space.base());
            let before = self.seen();
            let change = Change {
                base: Some((&base, record, target)),
                note: Some((&path, &note, own.version)),
                ..Change::default()
            };
            let Some(zxid) = wire::change(session, bound_of(call), change).await? else { return Ok(None) };
            self.wrote(before, zxid);
        }
        self.saw(space, target, own.czxid);
        let fence = fence(target, own.czxid)?;
        let (sent, ttl) = session.dated(look.sent, ttl);
        let lease = request.granted(call, sent, ttl, fence)?;
        let until = lease.deadline.saturating_add(call.lock_delay());
        let stays = self.places.learn(key, |place| {
            place.held = Some(Held { fence, sent, ttl });
            place.until = until;
        });
        Ok(stays.then_some(lease))
    }

    /// Makes sure that a lease which counts from `sent` has most of its TTL; says whether the look may still be used.
    ///
    /// After a silence one write proves nothing; a second one a quarter of the timeout later does.
    async fn freshen(&self, call: &Call, session: &Session, sent: Moment, ttl: Duration) -> Result<bool> {
        let mut at_once = true;
        loop {
            let (from, ttl) = session.dated(sent, ttl);
            if call.now() < from.saturating_add(ttl.mul_f64(0.6)) {
                return Ok(at_once);
            }
            if !at_once && session.from().saturating_add(session.timeout / 2) > call.now() {
                return Ok(false);
            }
            at_once = false;
            if call.remaining() < session.pace() {
                // What there is must do; `granted` refuses what is of no use.
                return Ok(true);
            }
            session.write_beat(bound_of(call)).await?;
            call.clock().sleep_until(call.now().saturating_add(session.pace())).await;
        }
    }

    /// Removes the node of a place, wherever its request got to; says whether there was one.
    pub(crate) async fn leave(&self, call: &Call, key: &str) -> Result<bool> {
        let Some(place) = self.places.get(key) else { return Ok(false) };
        // From now on it is the keeper's, should this fail.
        self.places.ends(key, call.now());
        if place.session.is_over() {
            self.places.remove(key);
            return Ok(false);
        }
        let bound = bound_of(call);
        let mut stood = false;
        match place.path() {
            Some(path) => stood = place.session.delete(bound, &path).await?,
            None => {
                for node in wire::nodes_of(&place.session, bound, &place.queue, &place.owner).await? {
                    stood |= place.session.delete(bound, &format!("{}/{node}", place.queue)).await?;
                }
            }
        }
        self.places.remove(key);
        Ok(stood)
    }

    /// Reads who has it. `None`: it went meanwhile.
    pub(crate) async fn holder(
        &self,
        call: &Call,
        session: &Session,
        queue: &str,
        first: (&Owner, &str),
    ) -> Result<Option<(Holder, Node)>> {
        let Some((node, _)) = wire::read_node(session, bound_of(call), queue, first.1).await? else {
            return Ok(None);
        };
        let fence = fence(node.note.base, node.czxid)?;
        // What is left of another's session is not told; its TTL is what may be left.
        let holder = Holder::new(first.0.digest(), fence, Duration::from_millis(node.note.ttl_ms));
        let label = Some(node.note.label.clone()).filter(|label| !label.is_empty());
        Ok(Some((holder.with(|h| h.label = label), node)))
    }

    /// Says why a holding is over, from the mark that a break leaves on the queue.
    pub(crate) async fn why(&self, call: &Call, session: &Session, queue: &str, lease: &Lease) -> LostReason {
        let asked = session.ask(bound_of(call), session.client.get_data(queue)).await;
        match asked {
            Ok(Ok((data, _))) if data == crate::keys::mark(&lease.owner, lease.fence.get()) => {
                LostReason::Broken
            }
            _ => LostReason::Taken,
        }
    }

    /// Finds this very holding by the record: its node, and whether the session is one of ours.
    pub(crate) async fn on_record(
        &self,
        call: &Call,
        session: &Session,
        queue: &str,
        lease: &Lease,
    ) -> Result<Option<Node>> {
        for node in wire::nodes_of(session, bound_of(call), queue, &lease.owner).await? {
            if let Some((node, _)) = wire::read_node(session, bound_of(call), queue, &node).await?
                && fence(node.note.base, node.czxid)? == lease.fence
            {
                return Ok(Some(node));
            }
        }
        Ok(None)
    }

    /// Ends sessions and the thread.
    pub(crate) async fn close(&self) {
        let worker = {
            let mut worker = self.worker.lock().unwrap_or_else(PoisonError::into_inner);
            self.closed.store(true, Ordering::Release);
            worker.take()
        };
        self.pool.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.places.clear();
        if let Some(worker) = worker {
            worker.quiet().await;
        }
    }
}

impl fmt::Debug for Inner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZkBackend")
            .field("config", &self.config)
            .field("places", &self.places.len())
            .finish_non_exhaustive()
    }
}

/// Lets the keeper remove the place of an acquire that did not come to its end, should nobody do it before.
pub(crate) struct Stay<'a> {
    pub(crate) inner: &'a Inner,
    pub(crate) key: &'a str,
    pub(crate) call: &'a Call,
    pub(crate) ttl: Duration,
    pub(crate) armed: bool,
}

impl Drop for Stay<'_> {
    fn drop(&mut self) {
        if self.armed {
            self.inner.places.ends(self.key, self.call.now().saturating_add(self.ttl));
        }
    }
}

/// Bounds one exchange. A wait that just ended still has this long to be answered and to leave the queue.
pub(crate) fn bound_of(call: &Call) -> Duration {
    call.exchange_timeout().max(LEAST_PATIENCE)
}

pub(crate) fn fence(base: i64, zxid: i64) -> Result<Fence> {
    Fence::new(base.saturating_add(zxid))
}

/// Refuses a floor that no base can reach, before anything is asked.
pub(crate) fn within_limit(request: &AcquireRequest) -> Result<()> {
    match request.floor() {
        Some(floor) if floor.get() > FLOOR_LIMIT => {
            Err(Error::new(ErrorKind::Invalid, "the floor is above 2^62"))
        }
        _ => Ok(()),
    }
}

/// Returns the smallest base under which a node of this zxid has a fence above the floor.
pub(crate) fn above_floor(floor: Fence, zxid: i64) -> Result<i64> {
    if floor.get() > FLOOR_LIMIT {
        return Err(Error::new(ErrorKind::Invalid, "the floor is above 2^62"));
    }
    Ok(floor.get() + 1 - zxid)
}

pub(crate) fn no_record() -> Error {
    Error::new(ErrorKind::Unavailable, "the namespace's record is gone")
}

fn too_long(ttl: Duration, longest: Duration) -> Error {
    Error::new(
        ErrorKind::Invalid,
        format!("the ensemble keeps sessions for {longest:?} at most, not for {ttl:?}"),
    )
}

fn unreachable_now() -> Error {
    Error::new(ErrorKind::Unavailable, "no server can be reached")
}

/// Returns the note of a place that is asked for under a base.
///
/// A request above the server's `jute.maxbuffer` would end the connection of everybody on the session, without a word.
pub(crate) fn note(request: &AcquireRequest, base: i64) -> Result<Note> {
    let label = request.label().unwrap_or_default();
    if label.len() > LABEL_LIMIT {
        let message = format!("a label has {LABEL_LIMIT} bytes at most, not {}", label.len());
        return Err(Error::new(ErrorKind::Invalid, message));
    }
    let ttl_ms = u64::try_from(request.ttl().as_millis()).unwrap_or(u64::MAX);
    Ok(Note { base, ttl_ms, label: label.to_owned() })
}

/// Returns the base of a record that must be there.
pub(crate) fn recorded(look: &Look) -> Result<Base> {
    look.base.ok_or_else(no_record)
}
