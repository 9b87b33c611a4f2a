//! One acquire, from its first round to its last word: rounds until there is a majority, or no time for another.

use std::{sync::Arc, time::Duration};

use lockcore::backend::*;

use super::{
    RedlockBackend, TIMERS,
    steps::{Shown, Taken},
};
use crate::{
    backend::{check_floor, in_doubt},
    wire::Keys,
};

/// So often a try starts over when nobody got a majority.
const SPLITS: u32 = 5;
/// So close to the end of a wait, no answer would come in time.
const TOO_LATE: Duration = Duration::from_millis(2);

impl RedlockBackend {
    pub(super) async fn take(&self, call: &Call, request: &AcquireRequest) -> Result<Lease> {
        let keys = Arc::new(Keys::new(call.namespace(), request.name()));
        let mut doubt = false;
        let taken = self.take_in_turns(call, request, &keys, &mut doubt).await;
        let taken = taken.map_err(|error| if doubt { in_doubt(error) } else { error });
        // Who is told that it may be granted settles it, and others on the way.
        if taken.as_ref().is_err_and(|error| error.kind().had_no_effect()) {
            self.tell_off(call, request.owner(), &keys);
        }
        taken
    }

    /// `doubt`: a round went unanswered on the way, and what comes at the end does not speak for it.
    async fn take_in_turns(
        &self,
        call: &Call,
        request: &AcquireRequest,
        keys: &Arc<Keys>,
        doubt: &mut bool,
    ) -> Result<Lease> {
        self.check_ttl(request.ttl())?;
        if let Some(floor) = request.floor() {
            check_floor(floor)?;
        }
        let mut spread = request.owner().digest().to_i64() as u64;
        let mut splits = 0;
        // A try is one request to who asks for it, whatever it takes here; a waiter knows that it is many.
        let since = if request.wait_until().is_none() { call.now() } else { Moment::MAX };
        let mut waited = false;
        loop {
            let begun = call.now();
            let attempt = self.attempt(call, request, keys, since).await;
            let (holder, ends, split, error) = match attempt {
                Ok(Attempt::Granted(lease)) => return Ok(lease),
                Ok(Attempt::Held { holder, ends }) => (holder, ends, false, None),
                Ok(Attempt::Split) => (None, None, true, None),
                // A waiter asks so often that a line which is torn down is torn down under a request: it asks again.
                Err(error)
                    if waited
                        && matches!(error.kind(), ErrorKind::Unknown | ErrorKind::Unavailable)
                        && call.remaining() > self.config.poll =>
                {
                    *doubt |= error.kind() == ErrorKind::Unknown;
                    (None, None, false, Some(error))
                }
                Err(error) => return Err(error),
            };
            waited = true;
            spread = spread.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let jitter = |most: Duration| most.mul_f64((spread >> 40) as f64 / (1u64 << 24) as f64);
            let now = call.now();
            // Those who met leave each other room, more each time.
            splits = if split { splits + 1 } else { 0 };
            let took = begun.until(now).max(Duration::from_millis(2));
            let nap = match split {
                true => jitter(took * 2u32.pow(splits.min(6))).min(self.config.poll),
                false => self.config.poll.mul_f64(0.5) + jitter(self.config.poll.mul_f64(0.5)),
            };
            let after_end = Duration::from_millis(1) + jitter(Duration::from_millis(4));
            let wake =
                ends.map_or(Moment::MAX, |ends| ends.saturating_add(after_end)).min(now.saturating_add(nap));
            let Some(end) = request.wait_until() else {
                if split && splits <= SPLITS && wake.saturating_add(took * 2) < call.deadline() {
                    call.clock().sleep_until(wake).await;
                    continue;
                }
                return Err(Error::held_by(ErrorKind::Held, holder));
            };
            // A round that cannot be over in time would only put in doubt what the last one has seen.
            let room = TOO_LATE.max(took * 2);
            let timed_out = |now: Moment| now.saturating_add(room) >= end;
            let is_last = timed_out(now) || timed_out(wake);
            call.clock().sleep_until(if is_last { end } else { wake }).await;
            if is_last {
                return Err(error.unwrap_or_else(|| Error::held_by(ErrorKind::WaitTimeout, holder)));
            }
        }
    }

    /// Asks all servers once.
    /// `since`: from when the deadline counts at the latest, for a try.
    async fn attempt(
        &self,
        call: &Call,
        request: &AcquireRequest,
        keys: &Arc<Keys>,
        since: Moment,
    ) -> Result<Attempt> {
        let owner = request.owner();
        let now = call.now();
        let votes = self.take_all(call, request, keys).await;
        if let Err(error) = self.are_different() {
            self.cancel(call, request).await?;
            return Err(error);
        }

        let mut ours = Vec::new();
        let mut before: Vec<(i64, Duration)> = Vec::new();
        let (mut highest, mut settled, mut clock) = (0, 0, 0);
        let mut held: Vec<(Option<&Shown>, Duration, u64)> = Vec::new();
        for (at, vote) in &votes {
            match vote {
                Ok(Taken::Ours { high, own, settled: is_settled, left, us }) => {
                    ours.push(*at);
                    before.extend(own.map(|fence| (fence.get(), *left)));
                    settled = settled.max(own.map_or(0, Fence::get));
                    highest = highest.max(if *is_settled { 0 } else { *high });
                    clock = clock.max(i64::try_from(*us).unwrap_or(i64::MAX));
                }
                Ok(Taken::Held { shown, left, us }) => held.push((shown.as_ref(), *left, *us)),
                Ok(Taken::Late | Taken::Over) | Err(_) => {}
            }
        }
        // It was granted to an earlier request: the same is told again, with what is left.
        let mut lefts: Vec<Duration> =
            before.iter().filter(|(fence, _)| *fence == settled).map(|(_, left)| *left).collect();
        if let Some(at) = lefts.len().checked_sub(self.quorum()) {
            lefts.sort_unstable();
            let left = lefts[at].saturating_sub(TIMERS);
            return request.granted(call, now.min(since), left, Fence::new(settled)?).map(Attempt::Granted);
        }
        if ours.len() >= self.quorum() {
            let floor = request.floor().map_or(0, Fence::get);
            // A fence of an earlier request serves as well, unless somebody came between.
            let fence = match settled > highest.max(floor) {
                true => settled,
                false => (highest + 1).max(settled + 1).max(floor + 1).max(clock),
            };
            match self.settle_all(call, request, keys, &ours, fence).await {
                Ok(Some((sent, fence))) => {
                    let left = request.ttl().saturating_sub(TIMERS);
                    match request.granted(call, sent.min(since), left, fence) {
                        Ok(lease) => return Ok(Attempt::Granted(lease)),
                        // It is on record; who asked gives it back, or asks again.
                        Err(error) => return Err(error),
                    }
                }
                Ok(None) => {}
                // It may be settled on a majority.
                Err(error) if !error.kind().had_no_effect() => return Err(error),
                Err(error) => {
                    self.clean_up(call, owner, keys, &ours).await;
                    return Err(error);
                }
            }
        }

        self.clean_up(call, owner, keys, &ours).await;
        let holder = self.holder_of(&held);
        let mut ends: Vec<Duration> = held.iter().map(|(_, left, _)| *left).collect();
        ends.sort_unstable();
        // When so many leases have ended that a majority can be had; not before the next look, where servers are away.
        let needed = self.quorum().saturating_sub(votes.len() - held.len()).saturating_sub(1);
        let ends = ends.get(needed).map(|left| now.saturating_add(*left));
        if held.len() >= self.veto() {
            // Nobody else can have a majority where several have parts of it.
            let split = holder.is_none() && held.iter().all(|(shown, ..)| shown.is_some());
            return Ok(if split { Attempt::Split } else { Attempt::Held { holder, ends } });
        }
        if !held.is_empty() && ours.len() + held.len() >= self.quorum() {
            return Ok(Attempt::Split);
        }
        let over = votes.iter().filter(|(_, vote)| matches!(vote, Ok(Taken::Over))).count();
        if over >= self.veto() {
            return Err(Error::new(
                ErrorKind::Unavailable,
                "this acquisition was given up before it arrived",
            ));
        }
        let late = votes.iter().filter(|(_, vote)| matches!(vote, Ok(Taken::Late))).count();
        if late >= self.veto() {
            let ended = request.wait_until().is_some_and(|end| call.now() >= end);
            return Err(match ended {
                true => Error::held_by(ErrorKind::WaitTimeout, None),
                false => Error::new(ErrorKind::Unavailable, "the request reached the servers after its time"),
            });
        }
        Err(self.too_few(&votes, self.quorum()))
    }
}

enum Attempt {
    Granted(Lease),
    Held {
        holder: Option<Holder>,
        ends: Option<Moment>,
    },
    /// Nobody has a majority.
    Split,
}
