//! The exchanges that the verbs are made of.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use etcd_client::{
    Compare, CompareOp, Error as Said, GetOptions, KeyValue, PutOptions, SortOrder, SortTarget, Txn, TxnOp,
    TxnOpResponse, WatchFilterType, WatchOptions, WatchStream,
};
use lockcore::backend::*;

use crate::{
    config::{EtcdConfig, Renewal},
    exchange::{Members, Post, Repeat},
    keys::{Space, owner_of},
    leases::{Leases, Place},
};

/// Leaves room for create revisions above any floor.
const FLOOR_LIMIT: i64 = 1 << 62;
/// How long one exchange may take where no call bounds it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);
/// What an exchange may take where the call has less left; lockcore drops a call that overstays.
const LEAST_PATIENCE: Duration = Duration::from_millis(500);
/// Locks on an etcd cluster.
///
/// # Units
/// TTLs are whole seconds, rounded up. A fence is the namespace's base plus the create revision of the holder's key.
pub struct EtcdBackend {
    pub(crate) members: Members,
    /// By key: which lease carries a place. On a miss the record tells.
    pub(crate) leases: Arc<Mutex<Leases>>,
    /// By namespace: what this process saw of its base.
    spaces: Mutex<HashMap<String, Met>>,
    /// Memberships of this process in phases of a migration, by owner.
    pub(crate) memberships: Arc<Mutex<HashMap<Owner, String>>>,
    pub(crate) known: Arc<Mutex<Known>>,
    /// Leases to draw next, the last first.
    #[cfg(test)]
    pub(crate) draws: Mutex<Vec<i64>>,
}

/// What a preflight learnt of the cluster.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known {
    /// What the server grants at least.
    pub(crate) least_ttl: Duration,
    /// A stopped leader that goes on may end live leases.
    pub(crate) revokes_live_leases: bool,
    /// One voting member alone.
    pub(crate) alone: bool,
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

/// One state of the cluster: own place, first place, base, and the place before the own if that was asked for.
pub(crate) struct Look {
    pub(crate) revision: i64,
    pub(crate) own: Option<KeyValue>,
    pub(crate) first: Option<KeyValue>,
    pub(crate) base: Option<KeyValue>,
    pub(crate) before: Option<String>,
}

impl Look {
    pub(crate) fn is_first(&self) -> bool {
        matches!((&self.own, &self.first), (Some(own), Some(first)) if own.key() == first.key())
    }
}

impl std::fmt::Debug for EtcdBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EtcdBackend")
            .field("members", &self.members)
            .field("places", &self.places())
            .finish_non_exhaustive()
    }
}

/// A watch, the connection it is on, and the revision from which on it misses nothing.
pub(crate) struct Watched {
    pub(crate) stream: WatchStream,
    pub(crate) post: Post,
    pub(crate) from: i64,
}

impl EtcdBackend {
    /// Makes a backend that connects when a call needs it.
    ///
    /// # Errors
    /// `Misconfigured`: the configuration cannot work.
    pub fn lazy(config: EtcdConfig) -> Result<Self> {
        config.check()?;
        let known = Known { least_ttl: Duration::from_secs(1), revokes_live_leases: false, alone: false };
        Ok(Self {
            members: Members::new(config),
            leases: Arc::default(),
            spaces: Mutex::default(),
            memberships: Arc::default(),
            known: Arc::new(Mutex::new(known)),
            #[cfg(test)]
            draws: Mutex::default(),
        })
    }

    /// Makes one with connections of its own, which knows the same leases.
    pub(crate) fn beside(&self) -> Self {
        Self {
            members: Members::new(self.members.config().clone()),
            leases: self.leases.clone(),
            spaces: Mutex::default(),
            memberships: self.memberships.clone(),
            known: self.known.clone(),
            #[cfg(test)]
            draws: Mutex::default(),
        }
    }

    pub(crate) fn known(&self) -> Known {
        *self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn least_seconds(&self) -> i64 {
        i64::try_from(self.known().least_ttl.as_secs()).unwrap_or(1)
    }

    pub(crate) fn swaps(&self) -> bool {
        self.members.config().renewal == Renewal::Swap
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

    /// Sends a transaction that changes something.
    pub(crate) async fn txn(&self, call: &Call, txn: Txn) -> Result<Answered> {
        let gone = || Error::new(ErrorKind::Unavailable, "the lease ended before the request arrived");
        self.txn_or_gone(call, txn, Repeat::Never).await?.ok_or_else(gone)
    }

    /// Sends a transaction that only looks.
    pub(crate) async fn txn_freely(&self, call: &Call, txn: Txn) -> Result<Answered> {
        let odd = || Error::new(ErrorKind::Unavailable, "the cluster refused a look");
        self.txn_or_gone(call, txn, Repeat::Freely).await?.ok_or_else(odd)
    }

    /// Sends a transaction; `None`: a lease it names is gone, so nothing was done.
    pub(crate) async fn txn_or_gone(
        &self,
        call: &Call,
        txn: Txn,
        repeat: Repeat,
    ) -> Result<Option<Answered>> {
        let before = self.members.seen();
        let answer = self
            .members
            .ask(bound_of(call), repeat, |client| {
                let txn = txn.clone();
                async move { client.kv_client().txn(txn).await }
            })
            .await?;
        let Ok(answer) = answer else { return Ok(None) };
        let header = answer.header();
        let (revision, term) = header.map_or((0, 0), |header| (header.revision(), header.raft_term()));
        if !self.members.saw(before, revision, term) {
            return Err(Error::new(ErrorKind::Unknown, "the cluster went back to an earlier revision"));
        }
        Ok(Some((answer.succeeded(), revision, answer.op_responses())))
    }

    /// Deletes every key of a scratch namespace; says how many there were.
    #[cfg(feature = "config")]
    pub(crate) async fn sweep(&self, call: &Call) -> Result<u64> {
        let all = etcd_client::DeleteOptions::new().with_prefix();
        let below = Space::new(call.scratch()?).all();
        let (_, _, answers) =
            self.txn_freely(call, Txn::new().and_then([TxnOp::delete(below, Some(all))])).await?;
        Ok(match answers.first() {
            Some(TxnOpResponse::Delete(deleted)) => deleted.deleted().unsigned_abs(),
            _ => 0,
        })
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
            let (_, revision, answers) = self.txn_freely(call, Txn::new().and_then(ops)).await?;
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
        self.look_before(call, space, queue, key, 0).await
    }

    /// Takes one snapshot with the last place before create revision `r` in it.
    pub(crate) async fn look_before(
        &self,
        call: &Call,
        space: &Space,
        queue: &str,
        key: &str,
        r: i64,
    ) -> Result<Look> {
        let mut gets = Self::gets(space, queue, key);
        if r > 0 {
            let before = GetOptions::new()
                .with_prefix()
                .with_max_create_revision(r - 1)
                .with_sort(SortTarget::Create, SortOrder::Descend)
                .with_limit(1)
                .with_keys_only();
            gets.push(TxnOp::get(queue, Some(before)));
        }
        let (revision, answers) = self.snapshot(call, space, gets).await?;
        Ok(self.read_look(space, revision, &answers, 1))
    }

    /// Reads one state, ordered behind every write before; returns its revision, and the answers from the second on.
    pub(crate) async fn snapshot(
        &self,
        call: &Call,
        space: &Space,
        gets: impl IntoIterator<Item = TxnOp>,
    ) -> Result<(i64, Vec<TxnOpResponse>)> {
        // The deletion of a key that never exists makes this an entry of the log, and no new revision.
        let ops: Vec<_> = std::iter::once(TxnOp::delete(space.nothing(), None)).chain(gets).collect();
        let (_, revision, answers) = self.txn_freely(call, Txn::new().and_then(ops)).await?;
        Ok((revision, answers))
    }

    /// Raises the base, so that every later grant of any name is above a floor.
    pub(crate) async fn raise_base(&self, call: &Call, space: &Space, floor: Fence) -> Result<()> {
        self.meet(call, space).await?;
        loop {
            let earliest = TxnOp::get(space.places(), Some(first_of().with_keys_only()));
            let (revision, answers) =
                self.snapshot(call, space, [TxnOp::get(space.base(), None), earliest]).await?;
            let Some(record) = range(&answers, 1).into_iter().next() else { return Err(no_record()) };
            // Who stands in a queue may not have read its fence yet. Nobody comes to stand before it.
            let next = range(&answers, 2).first().map_or(revision + 1, KeyValue::create_revision);
            let base = above_floor(floor, next)?;
            if base <= base_of(&record)? {
                return Ok(());
            }
            let unchanged = Compare::mod_revision(space.base(), CompareOp::Equal, record.mod_revision());
            let put = TxnOp::put(space.base(), base.to_string(), None);
            let (done, revision, _) = self.txn(call, Txn::new().when([unchanged]).and_then([put])).await?;
            if done {
                self.saw(space, base, revision, next - 1);
                return Ok(());
            }
        }
    }

    pub(crate) fn read_look(
        &self,
        space: &Space,
        revision: i64,
        answers: &[TxnOpResponse],
        from: usize,
    ) -> Look {
        let one = |at| range(answers, from + at).into_iter().next();
        let before = one(3).map(|kv| String::from_utf8_lossy(kv.key()).into_owned());
        let look = Look { revision, own: one(0), first: one(1), base: one(2), before };
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
            let key = String::from_utf8_lossy(own.key());
            let naming = self.naming(&key);
            let answer = self.txn(call, txn).await;
            if let Some(naming) = naming {
                naming.settle(&answer);
            }
            let (done, revision, _) = answer?;
            if !done {
                return Ok(None);
            }
            self.saw(space, target, revision, r);
        }
        let fence = fence(target, r)?;
        let held = Place { held: Some((fence, r)), queued: true, ..place };
        self.keep(&String::from_utf8_lossy(own.key()), held);
        request.granted(call, place.sent, place.granted, fence).map(Some)
    }

    /// Watches keys from now on.
    pub(crate) async fn watch(&self, bound: Duration, keys: &[String]) -> Result<Watched> {
        let (post, made) = self
            .members
            .ask_at(bound, Repeat::Freely, |client| async move {
                let options = || Some(WatchOptions::new().with_filters([WatchFilterType::NoPut]));
                let mut stream = client.watch_client().watch(keys[0].clone(), options()).await?;
                for key in &keys[1..] {
                    stream.watch(key.clone(), options()).await?;
                }
                let (mut from, mut made) = (0, 0);
                while made < keys.len() {
                    let Some(message) = stream.message().await? else {
                        return Err(Said::WatchError("the stream ended before it began".into()));
                    };
                    made += usize::from(message.created());
                    from = message.header().map_or(0, etcd_client::ResponseHeader::revision).max(from);
                    if message.canceled() {
                        let reason = message.cancel_reason();
                        return Err(Said::WatchError(format!("canceled: {reason}")));
                    }
                    if !message.events().is_empty() {
                        break;
                    }
                }
                Ok((stream, from))
            })
            .await?;
        let (stream, from) = made.map_err(crate::error::error)?;
        Ok(Watched { stream, post, from })
    }

    /// Says why a holding is over, from the mark that a break leaves on the broken lease.
    pub(crate) async fn why(&self, call: &Call, space: &Space, lease: &Lease) -> LostReason {
        let mark = self.value(call, &space.mark(&lease.name, &lease.owner)).await.ok().flatten();
        let noted = mark.and_then(|mark| std::str::from_utf8(&mark).ok()?.parse::<Fence>().ok());
        if noted == Some(lease.fence) { LostReason::Broken } else { LostReason::Taken }
    }

    /// Asks what is left of a lease, rounded up to seconds; nothing of one that is gone.
    pub(crate) async fn left_of(&self, call: &Call, lease: i64) -> Result<Duration> {
        let left = self
            .members
            .ask(bound_of(call), Repeat::Freely, move |client| async move {
                client.lease_client().time_to_live(lease, None).await
            })
            .await?
            // The server tells whole seconds, rounded down; what is left is less than one more.
            .map_or(0, |answer| (answer.ttl().max(-1) + 1).min(answer.granted_ttl()));
        Ok(Duration::from_secs(left.max(0).unsigned_abs()))
    }

    pub(crate) async fn holder(&self, call: &Call, first: &KeyValue, base: i64) -> Result<Option<Holder>> {
        let Some(owner) = owner_of(first.key()) else { return Ok(None) };
        let left = self.left_of(call, first.lease()).await?;
        let (noted, label) = read_value(first.value());
        let label = Some(label).filter(|text| !text.is_empty());
        let fence = fence(noted.unwrap_or(base), first.create_revision())?;
        let holder = Holder::new(owner.digest(), fence, left);
        Ok(Some(holder.with(|h| h.label = label)))
    }
}

/// Whether the compares held, the revision, and the answers.
pub(crate) type Answered = (bool, i64, Vec<TxnOpResponse>);

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

pub(crate) fn no_record() -> Error {
    Error::new(ErrorKind::Unavailable, "the namespace's record is gone")
}

pub(crate) fn fence(base: i64, revision: i64) -> Result<Fence> {
    Fence::new(base.saturating_add(revision))
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
