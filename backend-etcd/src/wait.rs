//! How an acquire takes its place in the queue, and how it learns that its turn has come.

use std::time::Duration;

use etcd_client::{Compare, CompareOp, PutOptions, Txn, TxnOp};
use lockcore::backend::*;

use crate::{
    exchange::Repeat,
    keys::Space,
    leases::Place,
    steps::{EtcdBackend, Look, Watched, base_of, bound_of, write_value},
};

/// Between two tries of a waiter that the cluster does not answer.
const PAUSE: Duration = Duration::from_millis(100);
/// How often a lease that ended before its first use is replaced in one acquire.
const LEASES: usize = 3;

/// What one look at the queue, and what it led to, tells a waiter.
enum Turn {
    Granted(Lease),
    /// The place is gone, or the record: stand at the end again.
    Again,
    /// Nothing yet.
    Waits,
}

/// One acquire in the queue.
struct Waiter<'a> {
    backend: &'a EtcdBackend,
    call: &'a Call,
    request: &'a AcquireRequest,
    space: &'a Space,
    queue: String,
    key: &'a str,
    place: Place,
    watched: Option<Watched>,
}

impl EtcdBackend {
    pub(crate) async fn enqueue(
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
        let mut ended = 0;
        loop {
            let base = self.meet(call, space).await?;
            let place = self.grant(call, key, request.ttl(), began.take()).await?;
            let options = PutOptions::new().with_lease(place.lease);
            let put = TxnOp::put(key, write_value(base, label), Some(options));
            let free = match request.wait_until() {
                None => Compare::create_revision(queue.clone(), CompareOp::Equal, 0).with_prefix(),
                Some(_) => Compare::create_revision(key, CompareOp::Equal, 0),
            };
            let recorded = Compare::create_revision(space.base(), CompareOp::Greater, 0);
            let mut ops = vec![put];
            // Where nobody was there before, the first place is the own: no second look through the queue, in which the
            // server passes every place since the last compaction.
            let first = if request.wait_until().is_none() { key } else { &queue };
            ops.extend(Self::gets(space, first, key));
            let txn = Txn::new().when([free, recorded]).and_then(ops).or_else(Self::gets(space, &queue, key));
            let naming = self.naming(key);
            let answer = self.txn_or_gone(call, txn, Repeat::Never).await;
            if let Some(naming) = naming {
                naming.settle(&answer);
            }
            let Some((put, revision, answers)) = answer? else {
                // One that was at hand may have ended on the server since.
                self.drop_place(key);
                ended += 1;
                if ended == LEASES {
                    return Err(Error::new(
                        ErrorKind::Unavailable,
                        "leases end before they are used; the cluster is too slow for this TTL",
                    ));
                }
                continue;
            };
            let look = self.read_look(space, revision, &answers, usize::from(put));
            let mut waiter = Waiter {
                backend: self,
                call,
                request,
                space,
                queue: queue.clone(),
                key,
                place,
                watched: None,
            };
            if let Some(lease) = waiter.wait(look).await? {
                return Ok(lease);
            }
        }
    }
}

impl Waiter<'_> {
    /// Waits until the place is first; `None`: it is gone, stand at the end of the queue again.
    async fn wait(&mut self, first: Look) -> Result<Option<Lease>> {
        let mut look = Some(first);
        loop {
            let turn = match look.take() {
                Some(look) => self.turn(look).await,
                None => match self.look().await {
                    Ok(look) => self.turn(look).await,
                    Err(error) => Err(error),
                },
            };
            match turn {
                Ok(Turn::Granted(lease)) => return Ok(Some(lease)),
                Ok(Turn::Again) => return Ok(None),
                Ok(Turn::Waits) => {}
                Err(error) => self.rides_out(error).await?,
            }
        }
    }

    async fn look(&self) -> Result<Look> {
        self.backend.look(self.call, self.space, &self.queue, self.key).await
    }

    /// A waiter outlives a member that does not answer and a cluster that has too much in hand, as long as its lease may
    /// live: then the place may still be there.
    async fn rides_out(&mut self, error: Error) -> Result<()> {
        let over = self.place.sent.saturating_add(self.place.granted);
        let transient =
            matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::Unknown | ErrorKind::Overloaded);
        let waits = self.request.wait_until().is_some_and(|end| self.call.now() < end);
        if !transient || !waits || self.call.now() >= over {
            return Err(error);
        }
        self.watched = None;
        self.call.clock().sleep_until(self.call.now().saturating_add(PAUSE)).await;
        Ok(())
    }

    /// Decides by one look; where there is nothing to decide, waits until there may be.
    async fn turn(&mut self, look: Look) -> Result<Turn> {
        let (backend, call) = (self.backend, self.call);
        if look.base.is_none() {
            // Somebody removed the record: make it again, above all that was seen.
            backend.forget(self.space);
            backend.leave_queue(call, self.key).await?;
            return Ok(Turn::Again);
        }
        backend.queued(self.key, &mut self.place, &look);
        if let Some(own) = &look.own
            && own.lease() != self.place.lease
        {
            // An earlier request of this acquire, by another connection, made the place.
            let ours = self.place;
            let theirs = backend.adopt(call, self.key, own.lease()).await?;
            if ours.ours {
                backend.revoke(call, ours.lease).await?;
            }
            match theirs {
                Some(theirs) => self.place = theirs,
                None => {
                    backend.drop_place(self.key);
                    return Ok(Turn::Again);
                }
            }
        }
        if look.is_first() {
            let half = self.place.sent.saturating_add(self.place.granted / 2);
            if self.request.wait_until().is_some() && call.now() >= half {
                // The cluster was silent for a while: what is left would be little, or nothing.
                return self.stays_alive().await;
            }
            let granted = backend.granted(call, self.request, self.space, &look, self.place).await?;
            return Ok(granted.map_or(Turn::Waits, Turn::Granted));
        }
        if self.request.wait_until().is_none_or(|end| call.now() >= end) {
            return Err(self.refused(look).await?);
        }
        let Some(own) = &look.own else {
            backend.leave_queue(call, self.key).await?;
            return Ok(Turn::Again);
        };
        if self.watched.is_none() {
            return self.watch(own.create_revision()).await;
        }
        self.sleep().await
    }

    /// Leaves the queue, and says who has the lock.
    async fn refused(&self, look: Look) -> Result<Error> {
        let base = look.base.as_ref().map_or(Ok(0), base_of)?;
        let holder = match &look.first {
            Some(first) => self.backend.holder(self.call, first, base).await.unwrap_or(None),
            None => None,
        };
        // Without a place, and with no request under way that could make one, the lease is as good as new.
        if look.own.is_some() || !self.backend.put_at_hand(self.key) {
            self.backend.leave_queue(self.call, self.key).await?;
        }
        let kind = if self.request.wait_until().is_some() { ErrorKind::WaitTimeout } else { ErrorKind::Held };
        Ok(Error::held_by(kind, holder))
    }

    /// Watches the place before the own, and the own; then makes sure that nothing happened before the watch began.
    async fn watch(&mut self, r: i64) -> Result<Turn> {
        let (backend, call) = (self.backend, self.call);
        let look = backend.look_before(call, self.space, &self.queue, self.key, r).await?;
        let Some(before) = look.before else { return Ok(Turn::Waits) };
        let keys = [self.key.to_owned(), before];
        let watched = backend.watch(bound_of(call), &keys).await?;
        loop {
            // Also of a member that lags behind: what it shows must not be older than the watch.
            let look = backend.look_before(call, self.space, &self.queue, self.key, r).await?;
            if look.revision < watched.from {
                continue;
            }
            let there = look.own.as_ref().is_some_and(|own| own.create_revision() == r)
                && look.before.as_ref() == Some(&keys[1]);
            if there {
                self.watched = Some(watched);
                return self.sleep().await;
            }
            return Ok(Turn::Waits);
        }
    }

    /// Sleeps until something may have changed, and keeps the lease alive.
    async fn sleep(&mut self) -> Result<Turn> {
        let (backend, call) = (self.backend, self.call);
        let fresh_until = self.place.sent.saturating_add(self.place.granted / 3);
        let until = self.request.wait_until().map_or(fresh_until, |end| end.min(fresh_until));
        if let Some(watched) = &mut self.watched {
            let post = watched.post;
            tokio::select! {
                // An event, or the end of the watch, for whatever reason.
                _ = watched.stream.message() => self.watched = None,
                () = backend.members.moved_from(post) => self.watched = None,
                () = call.clock().sleep_until(until) => {}
            }
        }
        if call.now() >= fresh_until { self.stays_alive().await } else { Ok(Turn::Waits) }
    }

    /// Prolongs the lease of the place; what holds afterwards, the next look tells.
    async fn stays_alive(&mut self) -> Result<Turn> {
        let sent = self.call.now();
        if !self.backend.keep_alive(self.call, self.place.lease).await? {
            self.backend.drop_place(self.key);
            return Ok(Turn::Again);
        }
        self.place.sent = sent;
        self.backend.update(self.key, |place| place.sent = sent);
        Ok(Turn::Waits)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::EtcdConfig;

    #[tokio::test]
    async fn a_waiter_outlives_whatever_may_pass_and_nothing_else() {
        let backend = EtcdBackend::lazy(EtcdConfig::new(["http://127.0.0.1:1"])).unwrap();
        let call = Call::for_tests(Arc::new(BootClock), Duration::from_secs(10));
        let space = Space::new(call.namespace());
        let ttl = Duration::from_secs(60);
        let request = AcquireRequest::new(LockName::parse("k").unwrap(), ttl).waiting_until(Moment::MAX);
        let waiter = |place| Waiter {
            backend: &backend,
            call: &call,
            request: &request,
            space: &space,
            queue: space.queue(request.name()),
            key: "k",
            place,
            watched: None,
        };
        let mut alive = waiter(Place::new(1, ttl, call.now(), true));
        for (kind, rides) in [
            (ErrorKind::Overloaded, true),
            (ErrorKind::Unavailable, true),
            (ErrorKind::Unknown, true),
            (ErrorKind::Unauthorized, false),
            (ErrorKind::Misconfigured, false),
        ] {
            assert_eq!(alive.rides_out(Error::new(kind, "no")).await.is_ok(), rides, "{kind:?}");
        }
        let mut over = waiter(Place::new(1, Duration::ZERO, call.now(), true));
        let error = over.rides_out(Error::new(ErrorKind::Overloaded, "no")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Overloaded);
    }
}
