//! The etcd leases that carry places: which is whose, which are at hand for the next place, and how they live on.

use std::{
    collections::HashMap,
    sync::{Arc, MutexGuard, PoisonError},
    time::Duration,
};

use etcd_client::{
    Compare, CompareOp, GetOptions, KeyValue, LeaseGrantOptions, LeaseTimeToLiveOptions, PutOptions, Txn,
    TxnOp,
};
use futures_util::future;
use lockcore::backend::*;

use crate::{
    error::lease_exists,
    exchange::Repeat,
    keys::Space,
    steps::{EtcdBackend, Look, bound_of, range},
};

/// How much longer than two TTLs a place stays in the table.
const GRACE: Duration = Duration::from_secs(60);
/// How many leases of one TTL are kept at hand.
const AT_HAND: usize = 64;
/// How many TTLs have leases at hand.
const CLASSES: usize = 16;
/// How many leases one keep-alive stream and one look serve. A transaction has 128 operations unless the server's
/// `--max-txn-ops` says otherwise.
pub(crate) const BATCH: usize = 100;
/// How many renewals by a swap of leases, or questions after leases, are under way at once.
pub(crate) const SWAPS: usize = 32;

/// The table of places, and the leases that wait for one.
#[derive(Default)]
pub(crate) struct Leases {
    by_key: HashMap<String, Entry>,
    /// Entries made so far.
    made: u64,
    sweep_at: usize,
    /// By TTL in seconds, the most recently used last.
    at_hand: HashMap<i64, Vec<AtHand>>,
}

struct Entry {
    /// Tells it from an earlier one of the same key, whose requests are not this one's.
    number: u64,
    place: Place,
    /// Requests that named the lease and had no definite answer. While there is one, it may still arrive.
    open: u32,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// Carries this one place and no other, until it is at hand again.
    pub(crate) lease: i64,
    pub(crate) granted: Duration,
    /// The last request that is known to have set the lease's whole TTL.
    pub(crate) sent: Moment,
    /// The grant of the lease was answered.
    pub(crate) alive: bool,
    /// This process made the lease. Another's may be at work elsewhere already: it is never revoked from here.
    pub(crate) ours: bool,
    /// The place was seen in the queue.
    pub(crate) queued: bool,
    /// The fence and the create revision under which the lock was granted.
    pub(crate) held: Option<(Fence, i64)>,
    /// The lease of a swap that had no definite answer: the place hangs on this one or on `lease`.
    pub(crate) next: Option<Next>,
}

/// A lease that is to carry a place from now on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Next {
    lease: i64,
    granted: Duration,
    sent: Moment,
}

/// A lease that carries nothing. It lives on as long as its TTL does.
#[derive(Clone, Copy, Debug)]
struct AtHand {
    lease: i64,
    granted: Duration,
    sent: Moment,
}

/// Counts a request that names the lease of a place, until its definite answer; without one it counts for ever.
pub(crate) struct Naming<'a> {
    backend: &'a EtcdBackend,
    key: &'a str,
    entry: u64,
}

impl Naming<'_> {
    pub(crate) fn answered(self) {
        let mut leases = self.backend.leases();
        if let Some(entry) = leases.by_key.get_mut(self.key).filter(|entry| entry.number == self.entry) {
            entry.open = entry.open.saturating_sub(1);
        }
    }

    /// Counts by what an exchange said.
    pub(crate) fn settle<T>(self, answer: &Result<T>) {
        if answer.as_ref().map_or_else(|error| error.kind().had_no_effect(), |_| true) {
            self.answered();
        }
    }
}

/// How a renewal by one road ended.
pub(crate) enum Renewed {
    /// The lease has this TTL again, counted from then.
    Until(Moment, Duration),
    /// The record does not show this holding.
    Gone,
}

impl EtcdBackend {
    fn leases(&self) -> MutexGuard<'_, Leases> {
        self.leases.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn place(&self, key: &str) -> Option<Place> {
        self.leases().by_key.get(key).map(|entry| entry.place)
    }

    pub(crate) fn places(&self) -> usize {
        self.leases().by_key.len()
    }

    pub(crate) fn keep(&self, key: &str, place: Place) {
        let mut leases = self.leases();
        match leases.by_key.get_mut(key) {
            Some(entry) => entry.place = place,
            None => {
                leases.made += 1;
                let number = leases.made;
                leases.by_key.insert(key.to_owned(), Entry { number, place, open: 0 });
            }
        }
        if leases.by_key.len() >= leases.sweep_at {
            // The server ended these by itself; a late look at one reads the record.
            let now = place.sent;
            let over = |p: &Place| p.sent.saturating_add(p.granted * 2 + GRACE) < now;
            leases.by_key.retain(|_, entry| !over(&entry.place));
            leases.sweep_at = (2 * leases.by_key.len()).max(64);
        }
    }

    /// Brings a place up to date unless it was let go meanwhile: it must not come back into the table.
    pub(crate) fn update(&self, key: &str, change: impl FnOnce(&mut Place)) {
        if let Some(entry) = self.leases().by_key.get_mut(key) {
            change(&mut entry.place);
        }
    }

    pub(crate) fn drop_place(&self, key: &str) {
        self.leases().by_key.remove(key);
    }

    /// Says that a request is leaving which names the place's lease; `None`: the table knows no such place.
    pub(crate) fn naming<'a>(&'a self, key: &'a str) -> Option<Naming<'a>> {
        self.leases().by_key.get_mut(key).map(|entry| {
            entry.open += 1;
            Naming { backend: self, key, entry: entry.number }
        })
    }

    /// Says whether something of this place may stand in the queue, or come to stand there.
    pub(crate) fn may_stand(&self, key: &str) -> bool {
        self.leases().by_key.get(key).is_some_and(|entry| entry.place.queued || entry.open > 0)
    }

    /// Takes a place whose key is certainly gone off the table, and puts its lease at hand. False: it is not fit for it and
    /// has to be revoked.
    ///
    /// A lease goes back only if every request that named it was answered: one that is still under way could bring the
    /// old key back on a lease that is kept alive for another.
    pub(crate) fn put_at_hand(&self, key: &str) -> bool {
        let mut leases = self.leases();
        let fit = |entry: &Entry| {
            entry.open == 0 && entry.place.alive && entry.place.ours && entry.place.next.is_none()
        };
        let Some(Place { lease, granted, sent, .. }) =
            leases.by_key.get(key).filter(|entry| fit(entry)).map(|entry| entry.place)
        else {
            return false;
        };
        let seconds = i64::try_from(granted.as_secs()).unwrap_or(i64::MAX);
        let classes = leases.at_hand.len();
        if classes >= CLASSES && !leases.at_hand.contains_key(&seconds) {
            // Those of a TTL that nobody asked for in a whole TTL have ended on the server.
            leases.at_hand.retain(|_, class| {
                class.last().is_some_and(|newest| sent < newest.sent.saturating_add(newest.granted))
            });
            if leases.at_hand.len() >= CLASSES {
                return false;
            }
        }
        let class = leases.at_hand.entry(seconds).or_default();
        class.retain(|old| sent < old.sent.saturating_add(old.granted));
        if class.len() >= AT_HAND {
            return false;
        }
        class.push(AtHand { lease, granted, sent });
        leases.by_key.remove(key);
        true
    }

    fn take_at_hand(&self, seconds: i64, now: Moment) -> Option<AtHand> {
        let mut leases = self.leases();
        let class = leases.at_hand.get_mut(&seconds)?;
        // One that is nearly over may be gone by the time it is used.
        class.retain(|at_hand| now < at_hand.sent.saturating_add(at_hand.granted * 3 / 4));
        class.pop()
    }

    /// Ends the leases that are at hand, as far as the cluster answers.
    pub(crate) async fn revoke_at_hand(&self, bound: Duration) {
        let at_hand = std::mem::take(&mut self.leases().at_hand);
        let revokes = at_hand.into_values().flatten().map(|AtHand { lease, .. }| {
            self.members.ask(bound, Repeat::Freely, move |client| async move {
                client.lease_client().revoke(lease).await
            })
        });
        // What this does not reach ends with its TTL.
        let _ = tokio::time::timeout(bound, future::join_all(revokes)).await;
    }

    pub(crate) async fn revoke(&self, call: &Call, lease: i64) -> Result<bool> {
        let answer = self
            .members
            .ask(bound_of(call), Repeat::Never, move |client| async move {
                client.lease_client().revoke(lease).await
            })
            .await?;
        Ok(answer.is_ok())
    }

    /// Renews a lease by a stream of its own, so no answer to another request is taken for this one's.
    ///
    /// A copy that comes late only prolongs a lease; it is not counted among the requests that can bring a key back.
    pub(crate) async fn keep_alive(&self, call: &Call, lease: i64) -> Result<bool> {
        let answer = self
            .members
            .ask(bound_of(call), Repeat::Freely, move |client| async move {
                client.lease_client().keep_alive(lease).await.map(drop)
            })
            .await?;
        Ok(answer.is_ok())
    }

    /// Finds a lease for a place: the one it has, one at hand, or a new one. Asking again after no answer is the same grant.
    pub(crate) async fn grant(
        &self,
        call: &Call,
        key: &str,
        ttl: Duration,
        began: Option<Moment>,
    ) -> Result<Place> {
        let seconds = whole_seconds(ttl);
        // What an acquire sends after its start counts from its start.
        let sent = || began.unwrap_or_else(|| call.now());
        loop {
            let known = self.place(key);
            if let Some(place) = known.filter(|p| p.alive) {
                // Asking again for what was granted prolongs nothing.
                if place.held.is_some() && call.now() < place.sent.saturating_add(place.granted / 2) {
                    return Ok(place);
                }
                let sent = sent();
                if self.keep_alive(call, place.lease).await? {
                    let place = Place { sent, ..place };
                    self.keep(key, place);
                    return Ok(place);
                }
                self.drop_place(key);
                continue;
            }
            if known.is_none()
                && let Some(at_hand) = self.take_at_hand(seconds.max(self.least_seconds()), call.now())
            {
                let Some(AtHand { lease, granted, sent }) = self.freshen(call, at_hand, sent()).await? else {
                    continue;
                };
                let place = Place::new(lease, granted, sent, true);
                self.keep(key, place);
                return Ok(place);
            }
            let sent = sent();
            let lease = known.map_or_else(|| self.draw_lease(), |place| Ok(place.lease))?;
            let place = Place::new(lease, Duration::from_secs(seconds.unsigned_abs()), sent, false);
            self.keep(key, place);
            let options = LeaseGrantOptions::new().with_id(lease);
            let answer = self
                .members
                .ask(bound_of(call), Repeat::Never, |client| {
                    let options = options.clone();
                    async move { client.lease_client().grant(seconds, Some(options)).await }
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

    /// Prolongs a lease at hand that has lost a good part of its TTL, and makes sure that it still carries nothing. `None`:
    /// it is not to be used.
    async fn freshen(&self, call: &Call, at_hand: AtHand, sent: Moment) -> Result<Option<AtHand>> {
        if sent < at_hand.sent.saturating_add(at_hand.granted / 10) {
            return Ok(Some(at_hand));
        }
        let lease = at_hand.lease;
        let keys = self.members.ask(bound_of(call), Repeat::Freely, move |client| async move {
            let options = LeaseTimeToLiveOptions::new().with_keys();
            client.lease_client().time_to_live(lease, Some(options)).await
        });
        let (lives, keys) = future::join(self.keep_alive(call, lease), keys).await;
        let idle = matches!(&keys, Ok(Ok(answer)) if answer.ttl() > 0 && answer.keys().is_empty());
        match lives {
            Ok(true) if idle => Ok(Some(AtHand { sent, ..at_hand })),
            Ok(_) => Ok(None),
            // For the lock this is no request at all.
            Err(error) if error.kind() == ErrorKind::Unknown => {
                Err(Error::new(ErrorKind::Unavailable, "the cluster did not answer").with_source(error))
            }
            Err(error) => Err(error),
        }
    }

    async fn record(&self, call: &Call, key: &str) -> Result<Option<KeyValue>> {
        let (_, _, answers) = self.txn_freely(call, Txn::new().and_then([TxnOp::get(key, None)])).await?;
        Ok(range(&answers, 0).into_iter().next())
    }

    /// Returns the value of a key.
    pub(crate) async fn value(&self, call: &Call, key: &str) -> Result<Option<Vec<u8>>> {
        Ok(self.record(call, key).await?.map(|record| record.value().to_vec()))
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
        let noted =
            crate::steps::read_value(record.value()).0.and_then(|base| crate::steps::fence(base, r).ok());
        Ok((noted == Some(lease.fence)).then_some((record.lease(), r)))
    }

    /// Asks the server what a lease was granted; `None`: it is gone.
    async fn granted_to(&self, call: &Call, lease: i64) -> Result<Option<Duration>> {
        let answer = self
            .members
            .ask(bound_of(call), Repeat::Freely, move |client| async move {
                client.lease_client().time_to_live(lease, None).await
            })
            .await?;
        let lives = answer.ok().filter(|answer| answer.ttl() > 0);
        Ok(lives.map(|answer| Duration::from_secs(answer.granted_ttl().unsigned_abs())))
    }

    /// Renews an etcd lease and learns what it was granted, for a place that the table may not know.
    pub(crate) async fn adopt(&self, call: &Call, key: &str, lease: i64) -> Result<Option<Place>> {
        let known = self.place(key).filter(|place| place.lease == lease);
        let granted = match known.filter(|place| place.alive) {
            Some(place) => place.granted,
            None => match self.granted_to(call, lease).await? {
                Some(granted) => granted,
                None => return Ok(None),
            },
        };
        let sent = call.now();
        if !self.keep_alive(call, lease).await? {
            return Ok(None);
        }
        let Some(known) = known else {
            let found = Place { ours: false, queued: true, ..Place::new(lease, granted, sent, true) };
            self.keep(key, found);
            return Ok(Some(found));
        };
        let place = Place { granted, sent, alive: true, ..known };
        self.update(key, |known| (known.granted, known.sent, known.alive) = (granted, sent, true));
        Ok(Some(place))
    }

    /// Prolongs the lease of a holding, then looks whether the holding is still there.
    pub(crate) async fn renew_by_keep_alive(
        &self,
        call: &Call,
        key: &str,
        mut id: i64,
        (fence, r): (Fence, i64),
    ) -> Result<Renewed> {
        loop {
            let adopted = self.adopt(call, key, id).await?;
            // After the keep-alive was answered, never beside it: a look before a revocation proves nothing.
            let found = self.holdings(call, &[key]).await?.pop().flatten();
            let Some((_, carrier)) = found.filter(|(at, _)| *at == r) else { return Ok(Renewed::Gone) };
            match adopted {
                Some(place) if carrier == id => {
                    self.update(key, |known| (known.held, known.queued) = (Some((fence, r)), true));
                    return Ok(Renewed::Until(place.sent, place.granted));
                }
                // Another connection has swapped the lease.
                _ if carrier != id => id = carrier,
                // The lease ended between the two.
                _ => return Ok(Renewed::Gone),
            }
        }
    }

    /// Puts a holding on a new lease: two writes, which no leader of the past can undo or confirm.
    ///
    /// The create revision stays, and with it place and fence. A copy that comes late finds the place on another lease and
    /// changes nothing.
    ///
    /// # Source
    /// etcd issues 12528 and 15247, fixed in 3.4.31 and 3.5.13.
    pub(crate) async fn renew_by_swap(
        &self,
        call: &Call,
        key: &str,
        mut id: i64,
        (fence, r): (Fence, i64),
        ttl: Duration,
    ) -> Result<Renewed> {
        loop {
            let known = self.place(key).filter(|place| place.lease == id);
            let mut place = known.unwrap_or(Place {
                ours: false,
                queued: true,
                held: Some((fence, r)),
                ..Place::new(id, Duration::ZERO, call.now(), true)
            });
            if place.granted.is_zero() {
                match self.granted_to(call, id).await? {
                    Some(granted) => place.granted = granted,
                    // Ended, or swapped meanwhile: the record tells.
                    None => match self.holdings(call, &[key]).await?.pop().flatten() {
                        Some((at, carrier)) if at == r && carrier != id => {
                            id = carrier;
                            continue;
                        }
                        _ => return Ok(Renewed::Gone),
                    },
                }
            }
            // The new lease is never shorter than the old: a renewal takes nothing away that was promised before.
            let seconds = whole_seconds(ttl.max(place.granted));
            // One that was left open may have come through; asking again for it settles that.
            let asked_before = place.next;
            let next = match place.next {
                Some(next) => next,
                None => match self.next_lease(call, key, place, seconds).await? {
                    Some(next) => next,
                    None => continue,
                },
            };
            place.next = Some(next);
            match known {
                Some(_) => self.update(key, |known| *known = place),
                None => self.keep(key, place),
            }
            let same = [
                Compare::create_revision(key, CompareOp::Equal, r),
                Compare::lease(key, CompareOp::Equal, id),
            ];
            let options = PutOptions::new().with_lease(next.lease).with_ignore_value();
            let txn = Txn::new()
                .when(same)
                .and_then([TxnOp::put(key, "", Some(options))])
                .or_else([TxnOp::get(key, Some(GetOptions::new().with_keys_only()))]);
            let answer = self.txn_or_gone(call, txn, Repeat::Never).await?;
            let carrier = match &answer {
                Some((true, ..)) => Some(next.lease),
                Some((_, _, answers)) => range(answers, 0)
                    .first()
                    .filter(|record| record.create_revision() == r)
                    .map(KeyValue::lease),
                // The next lease ended before it was used.
                None => {
                    self.update(key, |known| known.next = None);
                    continue;
                }
            };
            let Some(carrier) = carrier else { return Ok(Renewed::Gone) };
            if carrier != next.lease {
                // Another connection has swapped the lease meanwhile.
                if place.ours {
                    let _ = self.revoke(call, id).await;
                }
                self.update(key, |known| {
                    *known = Place { ours: false, next: None, lease: carrier, ..place };
                });
                id = carrier;
                continue;
            }
            let Next { lease, granted, sent } = next;
            self.update(key, |known| {
                *known = Place { lease, granted, sent, ours: true, next: None, ..place };
            });
            if place.ours {
                // Carries nothing any more. If this fails, its TTL ends it.
                let _ = self.revoke(call, id).await;
            }
            if asked_before.is_some() && call.now() > sent.saturating_add(granted / 6) {
                id = lease;
                continue;
            }
            return Ok(Renewed::Until(sent, granted));
        }
    }

    /// Grants the lease that is to carry a place next; `None`: somebody else's, choose another.
    async fn next_lease(&self, call: &Call, key: &str, place: Place, seconds: i64) -> Result<Option<Next>> {
        let (lease, sent) = (self.draw_lease()?, call.now());
        let options = LeaseGrantOptions::new().with_id(lease);
        let answer = self
            .members
            .ask(bound_of(call), Repeat::Never, |client| {
                let options = options.clone();
                async move { client.lease_client().grant(seconds, Some(options)).await }
            })
            .await?;
        let Ok(answer) = answer else { return Ok(None) };
        let granted = Duration::from_secs(answer.ttl().max(1).unsigned_abs());
        let next = Next { lease, granted, sent };
        self.update(key, |known| {
            if known.lease == place.lease {
                known.next = Some(next);
            }
        });
        Ok(Some(next))
    }

    /// Looks at holdings, ordered behind every write before: create revision and lease of each key that exists.
    async fn holdings(&self, call: &Call, keys: &[&str]) -> Result<Vec<Option<(i64, i64)>>> {
        let space = Space::new(call.namespace());
        let gets = keys.iter().map(|key| TxnOp::get(*key, Some(GetOptions::new().with_keys_only())));
        let (_, answers) = self.snapshot(call, &space, gets).await?;
        let found = |at| range(&answers, at).first().map(|record| (record.create_revision(), record.lease()));
        Ok((1..=keys.len()).map(found).collect())
    }

    /// Renews holdings that the table knows: one keep-alive stream, then one look.
    pub(crate) async fn renew_batch(
        &self,
        call: &Call,
        batch: &[(&Lease, String, Place, i64)],
    ) -> Result<Vec<Renewed>> {
        let ids: Vec<i64> = batch.iter().map(|(_, _, place, _)| place.lease).collect();
        let sent = call.now();
        let lives = self
            .members
            .ask(bound_of(call), Repeat::Freely, |client| keep_all_alive(client, ids.clone()))
            .await?
            .map_err(crate::error::error)?;
        let keys: Vec<&str> = batch.iter().map(|(_, key, ..)| key.as_str()).collect();
        let found = self.holdings(call, &keys).await?;
        let renewed = batch.iter().zip(lives).zip(found).map(|(((_, key, place, r), lives), found)| {
            if !lives || found != Some((*r, place.lease)) {
                return Renewed::Gone;
            }
            self.update(key, |known| {
                if known.lease == place.lease {
                    known.sent = known.sent.max(sent);
                }
            });
            Renewed::Until(sent, place.granted)
        });
        Ok(renewed.collect())
    }

    /// Renews many, each by exchanges of its own, some at a time.
    pub(crate) async fn renew_each(
        &self,
        call: &Call,
        leases: &[Lease],
        ttl: Duration,
    ) -> Vec<Result<Lease>> {
        let mut answers = Vec::with_capacity(leases.len());
        for some in leases.chunks(SWAPS) {
            answers.extend(future::join_all(some.iter().map(|lease| self.renew(call, lease, ttl))).await);
        }
        answers
    }

    /// Returns the lease of a place, whoever made it.
    pub(crate) async fn lease_of(&self, call: &Call, key: &str) -> Result<Option<i64>> {
        if let Some(place) = self.place(key) {
            return Ok(Some(place.lease));
        }
        Ok(self.record(call, key).await?.map(|record| record.lease()))
    }

    /// Ends the lease of a place, and with it the place, also one that a late request would make.
    pub(crate) async fn leave_queue(&self, call: &Call, key: &str) -> Result<bool> {
        let known = self.place(key);
        if let Some(place) = known.filter(|place| place.ours) {
            let mut gone = self.revoke(call, place.lease).await?;
            if let Some(next) = place.next {
                gone |= self.revoke(call, next.lease).await?;
            }
            if place.held.is_none() {
                self.drop_place(key);
                return Ok(gone);
            }
        }
        // Another connection's lease may serve another place by now: only the key is ours to end.
        let Some(record) = self.record(call, key).await? else {
            self.drop_place(key);
            return Ok(false);
        };
        let txn = Txn::new()
            .when([Compare::create_revision(key, CompareOp::Equal, record.create_revision())])
            .and_then([TxnOp::delete(key, None)]);
        let (gone, ..) = self.txn(call, txn).await?;
        self.drop_place(key);
        Ok(gone)
    }

    pub(crate) fn queued(&self, key: &str, place: &mut Place, look: &Look) {
        if look.own.is_some() && !place.queued {
            place.queued = true;
            self.keep(key, *place);
        }
    }

    fn draw_lease(&self) -> Result<i64> {
        #[cfg(test)]
        if let Some(lease) = self.draws.lock().unwrap_or_else(PoisonError::into_inner).pop() {
            return Ok(lease);
        }
        random_lease()
    }
}

impl Place {
    /// Returns the lease of a swap that is not settled.
    pub(crate) fn next_lease(&self) -> Option<i64> {
        self.next.map(|next| next.lease)
    }

    pub(crate) fn new(lease: i64, granted: Duration, sent: Moment, alive: bool) -> Self {
        Self { lease, granted, sent, alive, ours: true, queued: false, held: None, next: None }
    }
}

/// Keeps leases alive over one stream. The server answers a stream's requests one by one and in order, so the n-th answer
/// is the n-th request's; a stream that is short of one is given up whole, and nothing of it counts.
async fn keep_all_alive(
    client: Arc<etcd_client::Client>,
    ids: Vec<i64>,
) -> std::result::Result<Vec<bool>, etcd_client::Error> {
    let mut lives = Vec::with_capacity(ids.len());
    while let Some(first) = ids.get(lives.len()) {
        let (mut keeper, mut answers) = match client.lease_client().keep_alive(*first).await {
            Ok(stream) => stream,
            Err(said) if crate::error::lease_is_gone(&said) => {
                lives.push(false);
                continue;
            }
            Err(said) => return Err(said),
        };
        lives.push(true);
        let rest = &ids[lives.len()..];
        for id in rest {
            keeper.id = *id;
            keeper.keep_alive().await?;
        }
        for id in rest {
            match answers.message().await? {
                Some(answer) if answer.id() == *id => lives.push(answer.ttl() > 0),
                _ => {
                    let text = "the stream ended before its last answer".to_owned();
                    return Err(etcd_client::Error::LeaseKeepAliveError(text));
                }
            }
        }
    }
    Ok(lives)
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::EtcdConfig;

    #[test]
    fn an_answer_to_a_request_of_an_earlier_entry_counts_for_nothing() {
        let backend = EtcdBackend::lazy(EtcdConfig::new(["http://127.0.0.1:1"])).unwrap();
        let call = Call::for_tests(Arc::new(BootClock), Duration::from_secs(10));
        let place = |lease| Place::new(lease, Duration::from_secs(5), call.now(), true);
        backend.keep("k", place(1));
        let earlier = backend.naming("k").unwrap();
        // Its lease ended, and the same owner stands on another.
        backend.drop_place("k");
        backend.keep("k", place(2));
        let naming = backend.naming("k").unwrap();
        earlier.answered();
        assert!(backend.may_stand("k"), "the request that is under way is forgotten");
        assert!(!backend.put_at_hand("k"), "its lease went to another lock");
        naming.answered();
        assert!(backend.put_at_hand("k"));
    }
}
