//! The exchanges that the verbs are made of.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError, atomic::AtomicU64},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use etcd_client::{
    Compare, CompareOp, GetOptions, KeyValue, LeaseGrantOptions, PutOptions, SortOrder, SortTarget, Txn,
    TxnOp, TxnOpResponse, WatchFilterType, WatchOptions, WatchStream,
};
use lockcore::backend::*;

use crate::{
    config::EtcdConfig,
    error::lease_exists,
    exchange::Members,
    keys::{Space, owner_of},
};

/// Leaves room for create revisions above any floor.
const FLOOR_LIMIT: i64 = 1 << 62;
/// How long one exchange may take where no call bounds it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
/// What an exchange may take where the call has less left; lockcore drops a call that overstays.
const LEAST_PATIENCE: Duration = Duration::from_millis(500);
/// How much longer than two TTLs a place stays in the table.
const GRACE: Duration = Duration::from_secs(60);

/// Locks on an etcd cluster.
///
/// # Units
/// TTLs are whole seconds, rounded up. A fence is the namespace's base plus the create revision of the holder's key.
pub struct EtcdBackend {
    pub(crate) members: Members,
    /// By key: which lease carries a place. On a miss the record tells.
    places: Mutex<Places>,
    /// By namespace: what this process saw of its base.
    spaces: Mutex<HashMap<String, Met>>,
    /// What the server grants at least, in seconds.
    pub(crate) least_ttl: AtomicU64,
}

#[derive(Default)]
struct Places {
    by_key: HashMap<String, Place>,
    sweep_at: usize,
}

#[derive(Clone, Copy, Debug, Default)]
struct Met {
    /// The life of the cluster in which the base was last compared with the clock.
    life: Option<u64>,
    /// The highest base seen, and a revision at which it stood.
    base: i64,
    at: i64,
    /// No fence seen so far is above it.
    high: i64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// Carries this one place and no other, ever.
    pub(crate) lease: i64,
    pub(crate) granted: Duration,
    /// The last request that is known to have set the lease's whole TTL.
    pub(crate) sent: Moment,
    /// The grant of the lease was answered.
    pub(crate) alive: bool,
    /// The fence and the create revision under which the lock was granted.
    pub(crate) held: Option<(Fence, i64)>,
}

/// One state of the cluster: own place, first place, the place before the own, base.
pub(crate) struct Look {
    pub(crate) revision: i64,
    pub(crate) own: Option<KeyValue>,
    pub(crate) first: Option<KeyValue>,
    pub(crate) base: Option<KeyValue>,
}

impl Look {
    pub(crate) fn is_first(&self) -> bool {
        matches!((&self.own, &self.first), (Some(own), Some(first)) if own.key() == first.key())
    }
}

impl std::fmt::Debug for EtcdBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let places = self.places.lock().unwrap_or_else(PoisonError::into_inner).by_key.len();
        f.debug_struct("EtcdBackend")
            .field("members", &self.members)
            .field("places", &places)
            .finish_non_exhaustive()
    }
}

impl EtcdBackend {
    /// Makes a backend that connects when a call needs it.
    ///
    /// # Errors
    /// `Misconfigured`: the configuration cannot work.
    pub fn lazy(config: EtcdConfig) -> Result<Self> {
        config.check()?;
        Ok(Self {
            members: Members::new(config),
            places: Mutex::default(),
            spaces: Mutex::default(),
            least_ttl: AtomicU64::new(1),
        })
    }

    pub(crate) fn place(&self, key: &str) -> Option<Place> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner).by_key.get(key).copied()
    }

    pub(crate) fn keep(&self, key: &str, place: Place) {
        let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        places.by_key.insert(key.to_owned(), place);
        if places.by_key.len() >= places.sweep_at {
            // The server ended these by itself; a late look at one reads the record.
            let now = place.sent;
            let over = |p: &Place| p.sent.saturating_add(p.granted * 2 + GRACE) < now;
            places.by_key.retain(|_, p| !over(p));
            places.sweep_at = (2 * places.by_key.len()).max(64);
        }
    }

    pub(crate) fn drop_place(&self, key: &str) {
        self.places.lock().unwrap_or_else(PoisonError::into_inner).by_key.remove(key);
    }

    /// Remembers the base that stood at a revision, and that fences up to the one of `newest` may be out.
    ///
    /// A base below one of an earlier revision tells of a restore, even where revisions have caught up since.
    pub(crate) fn saw(&self, space: &Space, base: i64, at: i64, newest: i64) {
        let mut spaces = self.spaces.lock().unwrap_or_else(PoisonError::into_inner);
        let met = spaces.entry(space.base()).or_default();
        if base < met.base && at >= met.at {
            met.life = None;
            return;
        }
        if base > met.base {
            (met.base, met.at) = (base, at);
        }
        met.high = met.high.max(base.saturating_add(newest));
    }

    pub(crate) async fn txn(&self, call: &Call, txn: Txn) -> Result<(bool, i64, Vec<TxnOpResponse>)> {
        let before = self.members.seen();
        let answer = self
            .members
            .ask(bound_of(call), |client| async move { client.kv_client().txn(txn).await })
            .await?
            .map_err(|_| Error::new(ErrorKind::Unavailable, "the lease ended before the request arrived"))?;
        let revision = answer.header().map_or(0, etcd_client::ResponseHeader::revision);
        if revision < before {
            // Only a restore takes back what was seen before the request left.
            self.members.begin_life(revision);
            return Err(Error::new(ErrorKind::Unknown, "the cluster went back to an earlier revision"));
        }
        self.members.sees(revision);
        Ok((answer.succeeded(), revision, answer.op_responses()))
    }

    pub(crate) async fn revoke(&self, call: &Call, lease: i64) -> Result<bool> {
        let answer = self
            .members
            .ask(bound_of(call), |client| async move { client.lease_client().revoke(lease).await })
            .await?;
        Ok(answer.is_ok())
    }

    /// Renews a lease by a stream of its own, so no answer to another request is taken for this one's.
    pub(crate) async fn keep_alive(&self, call: &Call, lease: i64) -> Result<bool> {
        let answer =
            self.members
                .ask(bound_of(call), |client| async move {
                    client.lease_client().keep_alive(lease).await.map(drop)
                })
                .await?;
        Ok(answer.is_ok())
    }

    /// Grants the lease of a place; asking again after no answer is the same grant.
    pub(crate) async fn grant(
        &self,
        call: &Call,
        key: &str,
        ttl: Duration,
        began: Option<Moment>,
    ) -> Result<Place> {
        let seconds = whole_seconds(ttl);
        loop {
            let known = self.place(key);
            if let Some(place) = known.filter(|p| p.alive) {
                // Asking again for what was granted prolongs nothing.
                if place.held.is_some() && call.now() < place.sent.saturating_add(place.granted / 2) {
                    return Ok(place);
                }
                let sent = call.now();
                if self.keep_alive(call, place.lease).await? {
                    let place = Place { sent, ..place };
                    self.keep(key, place);
                    return Ok(place);
                }
                self.drop_place(key);
                continue;
            }
            let sent = began.unwrap_or_else(|| call.now());
            let lease = known.map_or_else(random_lease, |place| Ok(place.lease))?;
            let granted = Duration::from_secs(seconds.unsigned_abs());
            let place = Place { lease, granted, sent, alive: false, held: None };
            self.keep(key, place);
            let options = LeaseGrantOptions::new().with_id(lease);
            let answer = self
                .members
                .ask(bound_of(call), |client| async move {
                    client.lease_client().grant(seconds, Some(options)).await
                })
                .await?;
            match answer {
                Ok(answer) => {
                    let granted = Duration::from_secs(answer.ttl().max(1).unsigned_abs());
                    let place = Place { granted, alive: true, ..place };
                    self.keep(key, place);
                    return Ok(place);
                }
                // An earlier copy of this grant came through; the next turn renews it, which also dates it.
                Err(said) if lease_exists(&said) && known.is_some() => {
                    self.keep(key, Place { alive: true, ..place });
                }
                // Somebody else's: choose another.
                Err(_) => self.drop_place(key),
            }
        }
    }

    /// Brings the base up to the clock, once in each life of the cluster that this process sees; returns it.
    ///
    /// A snapshot that is restored takes the base back with the keys. The clock does not go back with them, nor does
    /// what this process saw. A wrong clock only pushes fences ahead: the base never goes down.
    pub(crate) async fn meet(&self, call: &Call, space: &Space) -> Result<i64> {
        let key = space.base();
        loop {
            let life = self.members.life();
            let met = {
                let spaces = self.spaces.lock().unwrap_or_else(PoisonError::into_inner);
                spaces.get(&key).copied().unwrap_or_default()
            };
            if met.life == Some(life) {
                return Ok(met.base);
            }
            let one = GetOptions::new().with_prefix().with_limit(1).with_keys_only();
            let ops = [TxnOp::get(key.clone(), None), TxnOp::get(space.places(), Some(one))];
            let (_, revision, answers) = self.txn(call, Txn::new().and_then(ops)).await?;
            let record = range(&answers, 0).into_iter().next();
            let micros = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
            let clock = i64::try_from(micros).unwrap_or(0).saturating_sub(revision);
            let least = clock.max(met.high).clamp(0, FLOOR_LIMIT);
            let (compares, base, old) = match &record {
                None if !range(&answers, 1).is_empty() => {
                    return Err(Error::new(
                        ErrorKind::Misconfigured,
                        "the namespace's record is missing beside keys of locks; restore it, or remove the keys",
                    ));
                }
                None => {
                    let nothing = Compare::create_revision(space.places(), CompareOp::Equal, 0).with_prefix();
                    (vec![Compare::create_revision(key.clone(), CompareOp::Equal, 0), nothing], least, None)
                }
                Some(record) => {
                    let old = base_of(record)?;
                    let same = Compare::mod_revision(key.clone(), CompareOp::Equal, record.mod_revision());
                    (vec![same], least.max(old), Some(old))
                }
            };
            let mut at = revision;
            if old != Some(base) {
                let put = TxnOp::put(key.clone(), base.to_string(), None);
                let (done, revision, _) = self.txn(call, Txn::new().when(compares).and_then([put])).await?;
                if !done {
                    continue;
                }
                at = revision;
            }
            let mut spaces = self.spaces.lock().unwrap_or_else(PoisonError::into_inner);
            let met = spaces.entry(key).or_default();
            // Another task may have seen a higher one meanwhile.
            if base >= met.base {
                *met = Met { life: met.life, base, at, high: met.high.max(base.saturating_add(at)) };
            }
            met.life = Some(life);
            return Ok(met.base);
        }
    }

    /// Makes the next acquire read the record again.
    pub(crate) fn forget(&self, space: &Space) {
        let mut spaces = self.spaces.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(met) = spaces.get_mut(&space.base()) {
            met.life = None;
        }
    }

    pub(crate) fn gets(space: &Space, queue: &str, key: &str) -> Vec<TxnOp> {
        vec![TxnOp::get(key, None), TxnOp::get(queue, Some(first_of())), TxnOp::get(space.base(), None)]
    }

    /// Takes one snapshot, ordered behind every write before it.
    pub(crate) async fn look(&self, call: &Call, space: &Space, queue: &str, key: &str) -> Result<Look> {
        let mut not_taken = vec![TxnOp::delete(space.nothing(), None)];
        not_taken.extend(Self::gets(space, queue, key));
        let txn = Txn::new()
            .when([Compare::create_revision(key, CompareOp::Greater, 0)])
            .and_then(Self::gets(space, queue, key))
            .or_else(not_taken);
        let (found, revision, answers) = self.txn(call, txn).await?;
        Ok(self.read_look(space, revision, &answers, usize::from(!found)))
    }

    pub(crate) fn read_look(
        &self,
        space: &Space,
        revision: i64,
        answers: &[TxnOpResponse],
        from: usize,
    ) -> Look {
        let one = |at| range(answers, from + at).into_iter().next();
        let look = Look { revision, own: one(0), first: one(1), base: one(2) };
        if let Some(base) = look.base.as_ref().and_then(|record| base_of(record).ok()) {
            self.saw(space, base, revision, revision);
        }
        look
    }

    /// Turns a look that shows the own place first into a lease. `None`: things moved; look again.
    ///
    /// The key's value names the base of the grant, so that the fence can be read from the record at any time. Where it
    /// names another, or a floor asks for a higher one, one transaction brings both up to date.
    pub(crate) async fn granted(
        &self,
        call: &Call,
        request: &AcquireRequest,
        space: &Space,
        look: &Look,
        place: Place,
    ) -> Result<Option<Lease>> {
        let (Some(own), Some(record)) = (&look.own, &look.base) else { return Ok(None) };
        let (r, base) = (own.create_revision(), base_of(record)?);
        if self.meet(call, space).await? > base {
            return Ok(None);
        }
        let above = |fence: Fence| request.floor().is_none_or(|floor| fence > floor);
        if let Some((fence, _)) = place.held.filter(|(fence, at)| *at == r && above(*fence)) {
            return request.granted(call, place.sent, place.granted, fence).map(Some);
        }
        let mut target = base;
        if let Some(floor) = request.floor().filter(|_| fence(base, r).is_ok_and(|fence| !above(fence))) {
            target = above_floor(floor, r)?;
        }
        let (noted, label) = read_value(own.value());
        if target != base || noted != Some(base) {
            let value = write_value(target, &label);
            let mut puts =
                vec![TxnOp::put(own.key(), value, Some(PutOptions::new().with_lease(own.lease())))];
            if target != base {
                puts.push(TxnOp::put(space.base(), target.to_string(), None));
            }
            let txn = Txn::new()
                .when([
                    Compare::create_revision(own.key(), CompareOp::Equal, r),
                    Compare::mod_revision(space.base(), CompareOp::Equal, record.mod_revision()),
                ])
                .and_then(puts);
            let (done, revision, _) = self.txn(call, txn).await?;
            if !done {
                return Ok(None);
            }
            self.saw(space, target, revision, r);
        }
        let fence = fence(target, r)?;
        self.keep(&String::from_utf8_lossy(own.key()), Place { held: Some((fence, r)), ..place });
        request.granted(call, place.sent, place.granted, fence).map(Some)
    }

    /// Watches keys from now on; returns the revision from which on nothing is missed.
    pub(crate) async fn watch(&self, bound: Duration, keys: &[String]) -> Result<(WatchStream, i64)> {
        let keys = keys.to_vec();
        self.members
            .ask(bound, |client| async move {
                let options = || Some(WatchOptions::new().with_filters([WatchFilterType::NoPut]));
                let mut stream = client.watch_client().watch(keys[0].clone(), options()).await?;
                for key in &keys[1..] {
                    stream.watch(key.clone(), options()).await?;
                }
                let (mut from, mut made) = (0, 0);
                while made < keys.len() {
                    let Some(message) = stream.message().await? else { break };
                    made += usize::from(message.created());
                    from = message.header().map_or(0, etcd_client::ResponseHeader::revision).max(from);
                    if message.canceled() || !message.events().is_empty() {
                        break;
                    }
                }
                Ok((stream, from))
            })
            .await?
            .map_err(crate::error::error)
    }

    pub(crate) async fn predecessor(&self, call: &Call, queue: &str, r: i64) -> Result<Option<String>> {
        let options = GetOptions::new()
            .with_prefix()
            .with_max_create_revision(r - 1)
            .with_sort(SortTarget::Create, SortOrder::Descend)
            .with_limit(1)
            .with_keys_only();
        let (_, _, answers) = self.txn(call, Txn::new().and_then([TxnOp::get(queue, Some(options))])).await?;
        Ok(range(&answers, 0).first().map(|kv| String::from_utf8_lossy(kv.key()).into_owned()))
    }

    async fn record(&self, call: &Call, key: &str) -> Result<Option<KeyValue>> {
        let (_, _, answers) = self.txn(call, Txn::new().and_then([TxnOp::get(key, None)])).await?;
        Ok(range(&answers, 0).into_iter().next())
    }

    /// Returns the etcd lease and the create revision of this very holding, by the table or the record.
    pub(crate) async fn holding(&self, call: &Call, key: &str, lease: &Lease) -> Result<Option<(i64, i64)>> {
        if let Some(place) = self.place(key)
            && let Some((fence, r)) = place.held
        {
            return Ok((fence == lease.fence).then_some((place.lease, r)));
        }
        let Some(record) = self.record(call, key).await? else { return Ok(None) };
        let r = record.create_revision();
        let noted = read_value(record.value()).0.and_then(|base| fence(base, r).ok());
        Ok((noted == Some(lease.fence)).then_some((record.lease(), r)))
    }

    /// Renews an etcd lease and learns what it was granted, for a place that the table may not know.
    pub(crate) async fn adopt(&self, call: &Call, key: &str, lease: i64) -> Result<Option<Place>> {
        let known = self.place(key).filter(|place| place.lease == lease);
        let granted = match known.filter(|place| place.alive) {
            Some(place) => place.granted,
            None => {
                let answer = self
                    .members
                    .ask(bound_of(call), |client| async move {
                        client.lease_client().time_to_live(lease, None).await
                    })
                    .await?;
                match answer {
                    Ok(answer) if answer.ttl() > 0 => {
                        Duration::from_secs(answer.granted_ttl().unsigned_abs())
                    }
                    _ => return Ok(None),
                }
            }
        };
        let sent = call.now();
        if !self.keep_alive(call, lease).await? {
            return Ok(None);
        }
        let held = known.and_then(|place| place.held);
        let place = Place { lease, granted, sent, alive: true, held };
        self.keep(key, place);
        Ok(Some(place))
    }

    /// Returns the lease of a place, whoever holds it.
    pub(crate) async fn lease_of(&self, call: &Call, key: &str) -> Result<Option<i64>> {
        if let Some(place) = self.place(key) {
            return Ok(Some(place.lease));
        }
        Ok(self.record(call, key).await?.map(|record| record.lease()))
    }

    /// Ends the lease of a place, and with it the place, also one that a late request would make.
    pub(crate) async fn leave(&self, call: &Call, key: &str) -> Result<bool> {
        let Some(lease) = self.lease_of(call, key).await? else { return Ok(false) };
        let gone = self.revoke(call, lease).await?;
        self.drop_place(key);
        Ok(gone)
    }

    /// Says why a holding is over, from the mark that a break leaves on the broken lease.
    pub(crate) async fn why(&self, call: &Call, space: &Space, lease: &Lease) -> LostReason {
        let mark = self.record(call, &space.mark(&lease.name, &lease.owner)).await.ok().flatten();
        let noted = mark.and_then(|mark| std::str::from_utf8(mark.value()).ok()?.parse::<Fence>().ok());
        if noted == Some(lease.fence) { LostReason::Broken } else { LostReason::Taken }
    }

    pub(crate) async fn holder(&self, call: &Call, first: &KeyValue, base: i64) -> Result<Option<Holder>> {
        let (Some(owner), lease) = (owner_of(first.key()), first.lease()) else { return Ok(None) };
        let left = self
            .members
            .ask(
                bound_of(call),
                |client| async move { client.lease_client().time_to_live(lease, None).await },
            )
            .await?
            // The server tells whole seconds, rounded down; what is left is less than one more.
            .map_or(0, |answer| (answer.ttl().max(-1) + 1).min(answer.granted_ttl()));
        let (noted, label) = read_value(first.value());
        let label = Some(label).filter(|text| !text.is_empty());
        let left = Duration::from_secs(left.unsigned_abs());
        let fence = fence(noted.unwrap_or(base), first.create_revision())?;
        let holder = Holder::new(owner.digest(), fence, left);
        Ok(Some(holder.with(|h| h.label = label)))
    }
}

/// Bounds one exchange. A wait that just ended still has this long to be answered and to leave the queue.
pub(crate) fn bound_of(call: &Call) -> Duration {
    call.exchange_timeout().max(LEAST_PATIENCE)
}

pub(crate) fn first_of() -> GetOptions {
    GetOptions::new().with_prefix().with_sort(SortTarget::Create, SortOrder::Ascend).with_limit(1)
}

pub(crate) fn range(answers: &[TxnOpResponse], at: usize) -> Vec<KeyValue> {
    match answers.get(at) {
        Some(TxnOpResponse::Get(found)) => found.kvs().to_vec(),
        _ => Vec::new(),
    }
}

pub(crate) fn base_of(record: &KeyValue) -> Result<i64> {
    std::str::from_utf8(record.value()).ok().and_then(|text| text.parse().ok()).ok_or_else(|| {
        Error::new(ErrorKind::Misconfigured, "the namespace's record holds something that is not ours")
    })
}

pub(crate) fn fence(base: i64, revision: i64) -> Result<Fence> {
    Fence::new(base.saturating_add(revision))
}

pub(crate) fn whole_seconds(ttl: Duration) -> i64 {
    let up = ttl.as_secs() + u64::from(ttl.subsec_nanos() > 0);
    i64::try_from(up.max(1)).unwrap_or(i64::MAX)
}

pub(crate) fn random_lease() -> Result<i64> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes)
        .map_err(|_| Error::new(ErrorKind::Unavailable, "the system gave no random numbers"))?;
    Ok((i64::from_le_bytes(bytes) & i64::MAX).max(1))
}

/// Returns the smallest base under which a place of create revision `r` has a fence above the floor.
pub(crate) fn above_floor(floor: Fence, r: i64) -> Result<i64> {
    if floor.get() > FLOOR_LIMIT {
        return Err(Error::new(ErrorKind::Invalid, "the floor is above 2^62"));
    }
    Ok(floor.get() + 1 - r)
}

/// Reads the base and the label out of a place's value.
pub(crate) fn read_value(value: &[u8]) -> (Option<i64>, String) {
    let text = String::from_utf8_lossy(value);
    match text.split_once(':') {
        Some((base, label)) => (base.parse().ok(), label.to_owned()),
        None => (None, text.into_owned()),
    }
}

pub(crate) fn write_value(base: i64, label: &str) -> String {
    format!("{base}:{label}")
}
