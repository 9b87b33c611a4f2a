//! Lost, held and late answers between a backend and its store: on the wire where proxies stand on it, or else at the
//! backend's door.
//!
//! The door knows which verb is under way and the proxy knows bytes. Together they lose a reply after its effect for any
//! store: each piece of an answer is held until a look by the second road says whether the effect is there.
//!
//! At the door alone, what the library, `resolve`, `abandon` and a repeated request make of a fault is tested on the real
//! store all the same. What the backend makes of its own connection is not; cases about that need a wire.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use lockcore::backend::*;
use tokio::sync::Notify;

use super::{Service, Wire};
use crate::faultline::{Direction, Fate, Faultline, Judge, Reply};

/// The switches, shared by all clients of a case.
#[derive(Debug, Default)]
pub(crate) struct Door {
    switches: Mutex<Switches>,
    changed: Notify,
    lines: Mutex<Vec<Weak<Faultline>>>,
}

#[derive(Debug, Default)]
struct Switches {
    lost_requests: Vec<Verb>,
    lost_replies: Vec<Verb>,
    held: Vec<Verb>,
    held_requests: Vec<Verb>,
    one_way: [bool; 2],
    delay: Duration,
    cut: bool,
    refuse: bool,
}

impl Door {
    fn switches(&self) -> MutexGuard<'_, Switches> {
        self.switches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Switches)) {
        change(&mut self.switches());
        self.changed.notify_waiters();
    }

    async fn until(&self, open: impl Fn(&Switches) -> bool) {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            // Enabled before the look, so that a change after it is heard.
            changed.as_mut().enable();
            if open(&self.switches()) {
                return;
            }
            changed.await;
        }
    }

    /// Opens a proxy before a server, in the state that the switches are in.
    pub(crate) fn open_line(&self, server: SocketAddr) -> Arc<Faultline> {
        let line = Arc::new(Faultline::start(server).expect("the loopback has a free port"));
        {
            let s = self.switches();
            line.hold(Direction::ToServer, s.cut || s.one_way[Direction::ToServer as usize]);
            line.hold(Direction::ToClient, s.cut || s.one_way[Direction::ToClient as usize]);
            line.delay(Direction::ToClient, s.delay);
            line.refuse(s.refuse);
        }
        self.lines.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::downgrade(&line));
        line
    }

    fn each_line(&self, act: impl Fn(&Faultline)) {
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().filter_map(Weak::upgrade).for_each(|line| act(&line));
    }

    fn has_lines(&self) -> bool {
        !self.lines.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Lets a request through and its reply back, or not.
    async fn pass<T>(&self, call: &Call, verb: Verb, exchange: impl Future<Output = Result<T>>) -> Result<T> {
        let (lost_request, lost_reply) = {
            let mut s = self.switches();
            (use_up(&mut s.lost_requests, verb), use_up(&mut s.lost_replies, verb))
        };
        if self.switches().cut {
            // It went into the cut: the backend counts from when it sends, so a request cannot wait here and go on.
            self.until(|s| !s.cut).await;
            return Err(Error::new(ErrorKind::Unknown, "the line was cut at the door"));
        }
        if self.switches().refuse {
            return Err(Error::new(ErrorKind::Unavailable, "refused at the door"));
        }
        if lost_request {
            return Err(Error::new(ErrorKind::Unknown, "the request was lost at the door"));
        }
        let answer = exchange.await;
        self.until(|s| !s.cut && !s.held.contains(&verb)).await;
        let delay = self.switches().delay;
        if !delay.is_zero() {
            call.clock().sleep_until(call.now().saturating_add(delay)).await;
        }
        if lost_reply {
            return Err(Error::new(ErrorKind::Unknown, "the reply was lost at the door"));
        }
        answer
    }
}

fn use_up(armed: &mut Vec<Verb>, verb: Verb) -> bool {
    armed.iter().position(|v| *v == verb).map(|at| armed.swap_remove(at)).is_some()
}

impl Wire for Door {
    fn lose_request(&self, verb: Verb) {
        self.change(|s| s.lost_requests.push(verb));
    }
    fn lose_reply(&self, verb: Verb) {
        self.change(|s| s.lost_replies.push(verb));
    }
    fn hold_replies(&self, verb: Verb) {
        self.change(|s| s.held.push(verb));
    }
    fn deliver(&self) {
        self.each_line(Faultline::deliver);
        self.change(|s| s.held.clear());
    }
    fn delay_replies(&self, by: Duration) {
        self.each_line(|line| line.delay(Direction::ToClient, by));
        self.change(|s| s.delay = by);
    }
    fn cut(&self, on: bool) {
        self.each_line(|line| line.cut(on));
        self.change(|s| s.cut = on);
    }
    fn refuse(&self, on: bool) {
        self.each_line(|line| line.refuse(on));
        self.change(|s| s.refuse = on);
    }
    fn hold_request(&self, verb: Verb) -> bool {
        let offered = self.has_lines();
        if offered {
            self.change(|s| s.held_requests.push(verb));
        }
        offered
    }
    fn one_way(&self, direction: Direction, on: bool) -> bool {
        self.each_line(|line| line.hold(direction, on));
        self.change(|s| s.one_way[direction as usize] = on);
        self.has_lines()
    }
    fn reset(&self) -> bool {
        self.each_line(Faultline::reset);
        self.has_lines()
    }
    fn heal(&self) {
        self.each_line(Faultline::heal);
        self.change(|s| *s = Switches::default());
    }
}

/// What a reply is about: it counts as lost or held only once this is there.
enum Effect<'a> {
    /// This owner holds the lock.
    Holds(&'a LockName, &'a Owner),
    /// This owner does not hold it.
    Gone(&'a LockName, &'a Owner),
    /// Whatever the request does.
    Any,
}

/// A backend behind the door.
pub(crate) struct Behind {
    pub(crate) door: Arc<Door>,
    pub(crate) service: Arc<dyn Service>,
    /// The proxies of this client, one a server; none where the store has no wire.
    pub(crate) lines: Vec<Arc<Faultline>>,
    pub(crate) backend: Arc<dyn LockBackend>,
}

impl std::fmt::Debug for Behind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Behind").field("backend", &self.backend).finish_non_exhaustive()
    }
}

impl Behind {
    async fn pass<T>(
        &self,
        call: &Call,
        verb: Verb,
        effect: Effect<'_>,
        exchange: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        // A lease is dated from when its request left, which the history has noted by now.
        self.service.admit(!matches!(verb, Verb::Acquire | Verb::Renew)).await;
        if self.lines.is_empty() {
            return self.door.pass(call, verb, exchange).await;
        }
        let (lost_request, lost_reply, held_request, held) = {
            let mut s = self.door.switches();
            (
                use_up(&mut s.lost_requests, verb),
                use_up(&mut s.lost_replies, verb),
                use_up(&mut s.held_requests, verb),
                s.held.contains(&verb),
            )
        };
        if lost_request {
            self.lines.iter().for_each(|line| line.lose_next_request());
            let answer = exchange.await;
            self.lines.iter().for_each(|line| {
                line.spare_next_request();
            });
            return answer;
        }
        if held_request {
            self.lines.iter().for_each(|line| line.hold_requests_of_now());
        }
        match (lost_reply, held) {
            (true, _) => self.judged(Fate::Lose, &effect, exchange).await,
            (_, true) => self.judged(Fate::Hold, &effect, exchange).await,
            _ => exchange.await,
        }
    }

    /// Gives a fate to the reply behind which the effect stands, and lets pass those before it.
    async fn judged<T>(
        &self,
        fate: Fate,
        effect: &Effect<'_>,
        exchange: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let mut judges: Vec<_> = self.lines.iter().map(|line| Some(line.judge())).collect();
        let mut exchange = std::pin::pin!(exchange);
        loop {
            let (line, reply) = tokio::select! {
                biased;
                (line, reply) = next_reply(&mut judges) => (line, reply),
                answer = &mut exchange => return answer,
            };
            // Over several servers that do not agree among themselves the effect is there with the last of a majority, and
            // every reply counts.
            let agree = self.capabilities().consistency == Consistency::Linearizable;
            if (self.lines.len() > 1 && !agree) || self.is_there(effect).await {
                reply.decide(fate);
                if fate == Fate::Lose {
                    // Once: the next attempt gets its answer.
                    judges[line] = None;
                }
            } else {
                reply.decide(Fate::Pass);
            }
        }
    }

    async fn is_there(&self, effect: &Effect<'_>) -> bool {
        match effect {
            Effect::Holds(name, owner) => self.service.holder(name).await == Some(owner.digest()),
            Effect::Gone(name, owner) => self.service.holder(name).await != Some(owner.digest()),
            Effect::Any => true,
        }
    }
}

/// Waits for bytes on any line that is still judged; says on which.
async fn next_reply(judges: &mut [Option<Judge>]) -> (usize, Reply) {
    std::future::poll_fn(|cx| {
        for (line, judge) in judges.iter_mut().enumerate() {
            if let Some(judge) = judge
                && let std::task::Poll::Ready(reply) = std::pin::pin!(judge.next()).poll(cx)
            {
                return std::task::Poll::Ready((line, reply));
            }
        }
        std::task::Poll::Pending
    })
    .await
}

// A verb left out here would fall back to its body, and the real one would go untested.
#[deny(clippy::missing_trait_methods)]
#[async_trait]
impl LockBackend for Behind {
    fn capabilities(&self) -> Capabilities {
        self.backend.capabilities()
    }

    async fn acquire(&self, call: &Call, request: &AcquireRequest) -> Result<Lease> {
        let effect = Effect::Holds(request.name(), request.owner());
        let lease = self.pass(call, Verb::Acquire, effect, self.backend.acquire(call, request)).await?;
        // The backend judged its answer before the door held it up; a late one is no more use than from a slow wire.
        if self.lines.is_empty() && call.now() >= lease.deadline {
            return Err(Error::lost(LostReason::Expired));
        }
        Ok(lease)
    }

    async fn renew(&self, call: &Call, lease: &Lease, ttl: Duration) -> Result<Lease> {
        self.pass(call, Verb::Renew, Effect::Any, self.backend.renew(call, lease, ttl)).await
    }

    async fn release(&self, call: &Call, lease: &Lease) -> Result<Released> {
        let effect = Effect::Gone(&lease.name, &lease.owner);
        self.pass(call, Verb::Release, effect, self.backend.release(call, lease)).await
    }

    async fn resolve(&self, call: &Call, request: &AcquireRequest) -> Result<Resolution> {
        self.pass(call, Verb::Resolve, Effect::Any, self.backend.resolve(call, request)).await
    }

    async fn inspect(&self, call: &Call, name: &LockName) -> Result<LockState> {
        self.pass(call, Verb::Inspect, Effect::Any, self.backend.inspect(call, name)).await
    }

    async fn abandon(&self, call: &Call, request: &AcquireRequest) -> Result<()> {
        self.pass(call, Verb::Resolve, Effect::Any, self.backend.abandon(call, request)).await
    }

    async fn preflight(&self, call: &Call) -> Result<Preflight> {
        self.pass(call, Verb::Preflight, Effect::Any, self.backend.preflight(call)).await
    }

    async fn renew_many(&self, call: &Call, leases: &[Lease], ttl: Duration) -> Vec<Result<Lease>> {
        let batch = async { Ok(self.backend.renew_many(call, leases, ttl).await) };
        match self.pass(call, Verb::Renew, Effect::Any, batch).await {
            Ok(answers) => answers,
            Err(error) => {
                leases.iter().map(|_| Err(Error::new(error.kind(), error.message().to_owned()))).collect()
            }
        }
    }

    async fn ended(&self, call: &Call, lease: &Lease) -> LostReason {
        let reason = self.backend.ended(call, lease).await;
        if self.lines.is_empty() {
            self.door.until(|s| !s.cut).await;
        }
        reason
    }

    async fn raise(&self, call: &Call, lease: &Lease, floor: Fence) -> Result<()> {
        self.pass(call, Verb::Raise, Effect::Any, self.backend.raise(call, lease, floor)).await
    }

    async fn raise_fence(&self, call: &Call, name: &LockName, floor: Fence) -> Result<Fence> {
        self.pass(call, Verb::Raise, Effect::Any, self.backend.raise_fence(call, name, floor)).await
    }

    async fn high_water(&self, call: &Call) -> Result<Option<Fence>> {
        self.pass(call, Verb::Migrate, Effect::Any, self.backend.high_water(call)).await
    }

    async fn break_lock(&self, call: &Call, name: &LockName, expect: Option<Stamp>) -> Result<Broken> {
        self.pass(call, Verb::Break, Effect::Any, self.backend.break_lock(call, name, expect)).await
    }

    async fn list(
        &self,
        call: &Call,
        prefix: Option<&LockName>,
        after: Option<&LockName>,
    ) -> Result<Vec<LockName>> {
        self.pass(call, Verb::List, Effect::Any, self.backend.list(call, prefix, after)).await
    }

    async fn phase_read(&self, call: &Call) -> Result<Option<PhaseRecord>> {
        self.pass(call, Verb::Migrate, Effect::Any, self.backend.phase_read(call)).await
    }

    async fn phase_cas(&self, call: &Call, expect: Option<&PhaseRecord>, new: &PhaseRecord) -> Result<bool> {
        self.pass(call, Verb::Migrate, Effect::Any, self.backend.phase_cas(call, expect, new)).await
    }

    async fn join(&self, call: &Call, phase: &str, ttl: Duration) -> Result<Lease> {
        self.pass(call, Verb::Migrate, Effect::Any, self.backend.join(call, phase, ttl)).await
    }

    async fn leave(&self, call: &Call, member: &Lease) -> Result<Released> {
        self.pass(call, Verb::Migrate, Effect::Any, self.backend.leave(call, member)).await
    }

    async fn members(&self, call: &Call) -> Result<Vec<Member>> {
        self.pass(call, Verb::Migrate, Effect::Any, self.backend.members(call)).await
    }

    async fn second_connection(&self, call: &Call) -> Result<Option<Arc<dyn LockBackend>>> {
        let second =
            self.pass(call, Verb::Connect, Effect::Any, self.backend.second_connection(call)).await?;
        let (door, service, lines) = (self.door.clone(), self.service.clone(), self.lines.clone());
        Ok(second.map(|backend| Arc::new(Self { door, service, lines, backend }) as Arc<dyn LockBackend>))
    }

    async fn close(&self) {
        self.backend.close().await;
    }

    fn unsupported(&self, verb: Verb) -> Error {
        self.backend.unsupported(verb)
    }
}
