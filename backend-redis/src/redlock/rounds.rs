//! The rounds of an acquisition, and what takes them back: each asks servers at once, and judges what they answered.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use lockcore::backend::*;

use super::{
    GRACE, RedlockBackend, TIMERS,
    members::{Member, Votes, ask},
    steps::{self, Found, SETTLE, Settled, TAKE, Taken},
};
use crate::wire::{self, CANCEL, FENCE_LIMIT, Keys, RELEASE, decimal, hex, millis};

/// Whoever answers the first round so much later than the others is waited for: a server that is left out keeps nobody
/// else out, until the lease ends.
const JOINING: Duration = Duration::from_millis(20);
/// So often a fence is raised above one that came between the rounds.
const RAISES: u32 = 8;

impl RedlockBackend {
    /// The first round.
    pub(super) async fn take_all(
        &self,
        call: &Call,
        request: &AcquireRequest,
        keys: &Arc<Keys>,
    ) -> Votes<Taken> {
        // Also where nobody has a majority: a server that is silent is not worth more than another try.
        let quorum = self.quorum();
        let enough = |votes: &Votes<Taken>| votes.iter().filter(|(_, vote)| vote.is_ok()).count() >= quorum;
        // Who connects only when the round is over does not take part: nobody would know of it.
        let round = Round::default();
        let over = round.0.clone();
        ask(call, half(call), JOINING, self.all(), enough, |member| {
            let (call, request, keys, over) = (call.clone(), request.clone(), keys.clone(), over.clone());
            async move { take_on(&member, &call, &request, &keys, &over).await }
        })
        .await
    }

    /// The second round, on the servers where the lock is ours; `None`: it found no majority, and reached none.
    ///
    /// # Errors
    /// `Unknown`: it may have.
    pub(super) async fn settle_all(
        &self,
        call: &Call,
        request: &AcquireRequest,
        keys: &Arc<Keys>,
        ours: &[usize],
        mut fence: i64,
    ) -> Result<Option<(Moment, Fence)>> {
        let quorum = self.quorum();
        for _ in 0..RAISES {
            if fence >= FENCE_LIMIT {
                return Err(wire::full());
            }
            if call.remaining().is_zero() {
                break;
            }
            let sent = call.now();
            let yes = |votes: &Votes<Settled>| {
                votes.iter().filter(|(_, vote)| matches!(vote, Ok(Settled::Yes))).count()
            };
            let members = ours.iter().map(|at| self.members[*at].clone());
            let votes = ask(
                call,
                half(call),
                GRACE,
                members,
                |votes| yes(votes) >= quorum,
                |member| {
                    let (call, owner, ttl) = (call.clone(), *request.owner(), request.ttl());
                    let (keys, margin) = (keys.clone(), self.config.fence_margin);
                    async move {
                        let request = steps::settling(&keys, &owner, fence, ttl, margin);
                        let (_, answer) = member.ask(&call, &SETTLE, &request).await?;
                        Settled::read(&answer)
                    }
                },
            );
            let votes = votes.await;
            if yes(&votes) >= quorum {
                return Ok(Some((sent, Fence::new(fence)?)));
            }
            let low = votes.iter().filter_map(|(_, vote)| match vote {
                Ok(Settled::Low(high)) => Some(*high),
                _ => None,
            });
            let missing = ours.len() - votes.len();
            let lost = votes.iter().filter(|(_, vote)| matches!(vote, Err(e) if !e.kind().had_no_effect()));
            match low.max() {
                Some(high) => fence = high + 1,
                None if yes(&votes) + missing + lost.count() >= quorum => {
                    return Err(Error::new(
                        ErrorKind::Unknown,
                        "a majority may have settled the fence, but did not say so in time",
                    ));
                }
                None => break,
            }
        }
        Ok(None)
    }

    /// Takes back what the first round took where it was answered, so that others need not wait for its end. Leaves no mark:
    /// the acquisition may be asked for again.
    ///
    /// It may arrive late, when that was granted. So it ends no lock with a fence: one that a minority has settled ends with
    /// its TTL, and leaves a majority to others.
    pub(super) async fn clean_up(&self, call: &Call, owner: &Owner, keys: &Arc<Keys>, ours: &[usize]) {
        let members = ours.iter().map(|at| self.members[*at].clone());
        let enough = |_: &Votes<bool>| false;
        ask(call, half(call), GRACE, members, enough, |member| {
            let (call, owner, keys) = (call.clone(), *owner, keys.clone());
            async move { give_back(&member, &call, &owner, &keys, Back::Begun).await }
        })
        .await;
    }

    /// Tells servers off that have a request of this acquisition which they did not answer. Nobody waits for them: without
    /// the second round what they may yet take is no grant, and ends with the TTL.
    pub(super) fn tell_off(&self, call: &Call, owner: &Owner, keys: &Arc<Keys>) {
        for member in self.all().filter(|member| member.known.operations.in_doubt(owner).is_some()) {
            let (call, owner, keys) = (call.clone(), *owner, keys.clone());
            tokio::spawn(async move { give_back(&member, &call, &owner, &keys, Back::InDoubt).await });
        }
    }

    /// Makes sure that an acquisition is granted on no majority, now and later.
    pub(super) async fn cancel(&self, call: &Call, request: &AcquireRequest) -> Result<()> {
        let keys = Arc::new(Keys::new(call.namespace(), request.name()));
        let votes = self.on_all(
            call,
            |_| Some(true),
            |member, call| {
                let (owner, ttl, keys) = (*request.owner(), request.ttl(), keys.clone());
                async move {
                    let (_, found) = cancel_on(&member, &call, &owner, ttl, &keys, false).await?;
                    member.known.operations.forget(&owner);
                    Ok(found)
                }
            },
        );
        let votes = votes.await;
        let gone = votes.iter().filter(|(_, vote)| vote.is_ok()).count();
        if gone >= self.veto() { Ok(()) } else { Err(self.too_few(&votes, self.veto())) }
    }

    pub(super) async fn settle(&self, call: &Call, request: &AcquireRequest) -> Result<Option<Lease>> {
        let keys = Arc::new(Keys::new(call.namespace(), request.name()));
        // A fence that reached only some is to be seen, if it can be: it may yet reach the others.
        let says = |(_, found): &(u64, Found)| match found {
            Some((Some(_), _)) => Some(true),
            Some((None, _)) => None,
            None => Some(false),
        };
        let sent = call.now();
        let votes = self.on_all_within(call, half(call), says, |member, call| {
            let (owner, ttl, keys) = (*request.owner(), request.ttl(), keys.clone());
            async move { cancel_on(&member, &call, &owner, ttl, &keys, true).await }
        });
        let votes = votes.await;
        let clock = votes.iter().filter_map(|(_, vote)| i64::try_from(vote.as_ref().ok()?.0).ok()).max();
        let ours: Vec<(usize, Option<Fence>, Duration)> = votes
            .iter()
            .filter_map(|(at, vote)| {
                let (fence, left) = vote.as_ref().ok()?.1?;
                Some((*at, fence, left))
            })
            .collect();
        let settled = ours.iter().filter_map(|(_, fence, _)| *fence).max();
        let mut lefts: Vec<Duration> = ours
            .iter()
            .filter(|(_, fence, _)| fence.is_some() && *fence == settled)
            .map(|(_, _, left)| *left)
            .collect();
        if let (Some(fence), Some(at)) = (settled, lefts.len().checked_sub(self.quorum())) {
            lefts.sort_unstable();
            return request.granted(call, sent, lefts[at].saturating_sub(TIMERS), fence).map(Some);
        }
        if ours.len() >= self.quorum() {
            // It is finished, with the fence that some may have already.
            let floor = request.floor().map_or(0, |floor| floor.get() + 1);
            let fence = settled.map_or_else(|| floor.max(clock.unwrap_or(1)), Fence::get);
            let ours: Vec<usize> = ours.iter().map(|(at, ..)| *at).collect();
            if let Some((_, fence)) = self.settle_all(call, request, &keys, &ours, fence).await? {
                return request.granted(call, sent, request.ttl().saturating_sub(TIMERS), fence).map(Some);
            }
        }
        self.cancel(call, request).await.map(|()| None)
    }
}

/// The first round of one attempt; over when this is dropped.
#[derive(Default)]
struct Round(Arc<AtomicBool>);

impl Drop for Round {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// The rounds one by one, as requests that were held up may arrive.
#[cfg(test)]
impl RedlockBackend {
    /// Says on how many servers the first round takes the lock.
    pub(crate) async fn first_round(&self, call: &Call, request: &AcquireRequest) -> usize {
        let keys = Keys::new(call.namespace(), request.name());
        let mut ours = 0;
        for member in &self.members {
            let taken = take_on(member, call, request, &keys, &AtomicBool::new(false)).await.unwrap();
            ours += usize::from(matches!(taken, Taken::Ours { .. }));
        }
        ours
    }

    /// Returns what the second round finds on each server that does not settle: a fence that is not below, or not the
    /// owner's lock.
    pub(crate) async fn second_round(
        &self,
        call: &Call,
        request: &AcquireRequest,
        fence: i64,
    ) -> Vec<Option<i64>> {
        let keys = Keys::new(call.namespace(), request.name());
        let mut found = Vec::new();
        for member in &self.members {
            let (ttl, margin) = (request.ttl(), self.config.fence_margin);
            let settling = steps::settling(&keys, request.owner(), fence, ttl, margin);
            let (_, answer) = member.ask(call, &SETTLE, &settling).await.unwrap();
            match Settled::read(&answer).unwrap() {
                Settled::Yes => {}
                Settled::NotOurs => found.push(None),
                Settled::Low(high) => found.push(Some(high)),
            }
        }
        found
    }

    /// Says on how many servers a request of this acquisition has no answer.
    pub(crate) fn in_doubt(&self, owner: &Owner) -> usize {
        self.members.iter().filter(|member| member.known.operations.in_doubt(owner).is_some()).count()
    }

    /// Takes back on every server what the first round took there, as a clean-up that comes late.
    pub(crate) async fn clean_up_late(&self, call: &Call, owner: &Owner, name: &LockName) {
        let keys = Arc::new(Keys::new(call.namespace(), name));
        let all: Vec<usize> = (0..self.members.len()).collect();
        self.clean_up(call, owner, &keys, &all).await;
        for member in &self.members {
            give_back(member, call, owner, &keys, Back::InDoubt).await.unwrap();
        }
    }

    /// Tells one server off.
    pub(crate) async fn tell_off_on(&self, call: &Call, at: usize, request: &AcquireRequest) {
        let keys = Keys::new(call.namespace(), request.name());
        cancel_on(&self.members[at], call, request.owner(), request.ttl(), &keys, false).await.unwrap();
    }
}

/// Leaves as much time as it takes: for another round, and for taking back what was taken.
fn half(call: &Call) -> Duration {
    call.exchange_timeout().min(call.remaining() / 2)
}

/// What is given back on one server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Back {
    /// What the first round took.
    Begun,
    /// The same, and what of it is still under way takes nothing later.
    InDoubt,
    /// Whatever the owner has, for good.
    All,
}

/// Ends what an owner has on one server; says whether it had.
pub(super) async fn give_back(
    member: &Member,
    call: &Call,
    owner: &Owner,
    keys: &Keys,
    back: Back,
) -> Result<bool> {
    let own = format!("{}|{}", hex(owner), if back == Back::All { "" } else { "0|" });
    let in_doubt = member.known.operations.in_doubt(owner).filter(|_| back != Back::Begun);
    let request = wire::giving_back(keys, owner, own, in_doubt);
    let (_, answer) = member.ask(call, &RELEASE, &request).await?;
    if back != Back::Begun {
        member.known.operations.forget(owner);
    }
    Ok(answer.int(0)? == 1)
}

/// The first round on one server; `over`: too late for it.
async fn take_on(
    member: &Member,
    call: &Call,
    request: &AcquireRequest,
    keys: &Keys,
    over: &AtomicBool,
) -> Result<Taken> {
    let owner = request.owner();
    let mut corrected = false;
    loop {
        let link = member.link(call).await?;
        let now = call.now();
        member.check_ready(now)?;
        let operations = &member.known.operations;
        // No copy runs after the call, nor after the end of what an earlier copy may have taken here. When
        // that is past, none is under way any more.
        let mut first = operations.first_unanswered(owner, now);
        if now >= first.saturating_add(request.ttl()) {
            operations.forget(owner);
            first = now;
        }
        let last = first.saturating_add(request.ttl());
        let not_after = link.server_time(last.min(call.deadline()));
        let hex = hex(owner);
        let gone = keys.gone(&hex);
        let args: [&[u8]; 4] = [
            hex.as_bytes(),
            &decimal(millis(request.ttl())),
            &decimal(not_after),
            request.label().unwrap_or_default().as_bytes(),
        ];
        operations.sends(owner, now, request.ttl(), not_after);
        // After it was noted: either this sees that the round is over, or who clears up sees the note.
        if over.load(Ordering::SeqCst) {
            operations.answered(owner);
            return Err(Error::new(ErrorKind::Unavailable, "the server was not connected to in time"));
        }
        let keys: [&str; 3] = [&keys.lock, &keys.fence, &gone];
        let answer = member.run_on(&link, call, &TAKE, &keys, &args).await;
        if !matches!(&answer, Err(error) if !error.kind().had_no_effect()) {
            operations.answered(owner);
        }
        match Taken::read(&answer?.1)? {
            // The answer corrected the estimate of its clock. It did nothing.
            Taken::Late if !corrected && call.now() < last.min(call.deadline()) => corrected = true,
            taken => return Ok(taken),
        }
    }
}

/// Ends an acquisition on one server, or tells what it has there; and that server's time.
async fn cancel_on(
    member: &Member,
    call: &Call,
    owner: &Owner,
    ttl: Duration,
    keys: &Keys,
    adopt: bool,
) -> Result<(u64, Found)> {
    let request = wire::cancelling(keys, owner, adopt, member.known.operations.in_doubt(owner), ttl);
    let (_, answer) = member.ask(call, &CANCEL, &request).await?;
    Ok((answer.us, steps::read_found(&answer)?))
}
