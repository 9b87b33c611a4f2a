//! Every pair of phases that may live together, with every order of their requests and a fault between any two: each
//! run is replayed from its beginning with another choice, until there is none left.

#![allow(clippy::print_stdout, reason = "how many runs there were is the measure of a search")]

use std::{
    collections::BTreeMap,
    future::poll_fn,
    pin::Pin,
    sync::{Arc, Mutex},
    task::Poll,
    time::Duration,
};

use super::{
    membership::Flaw,
    testbed::{HandClock, Stores, TTL, block_on, name, poll_once},
    *,
};
use crate::{backend::*, memory::MemoryBackend, sync::LockExt};

/// What becomes of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Done,
    RequestLost,
    ReplyLost,
}

/// Which request waits for its turn: of which client, to which store (2: the resource).
type Ask = (usize, usize);

/// Where requests wait until the explorer lets one through.
#[derive(Default)]
struct Gates {
    /// Lets everything through: while the stage is set.
    open: bool,
    waiting: BTreeMap<Ask, Option<Fate>>,
    /// Those of them that change nothing: losing one is no news.
    reads: std::collections::BTreeSet<Ask>,
    log: Vec<String>,
}

#[derive(Clone)]
struct Gate {
    store: MemoryBackend,
    gates: Arc<Mutex<Gates>>,
    ask: Ask,
}

async fn turn(gates: &Mutex<Gates>, ask: Ask, what: &str) -> Fate {
    if gates.grab().open {
        return Fate::Done;
    }
    poll_fn(|_| {
        let mut gates = gates.grab();
        if matches!(what, "phase_read" | "inspect" | "members" | "list" | "high_water") {
            gates.reads.insert(ask);
        } else {
            gates.reads.remove(&ask);
        }
        match gates.waiting.entry(ask).or_insert(None).take() {
            Some(fate) => {
                gates.waiting.remove(&ask);
                gates.log.push(format!("{ask:?} {what} {fate:?}"));
                Poll::Ready(fate)
            }
            None => Poll::Pending,
        }
    })
    .await
}

impl Gate {
    async fn pass<T>(&self, what: &str, effect: impl Future<Output = Result<T>>) -> Result<T> {
        let lost = || Err(Error::new(ErrorKind::Unknown, "lost on the way"));
        // A call that is given up takes no turn any more.
        struct Leaves<'a>(&'a Gate);
        impl Drop for Leaves<'_> {
            fn drop(&mut self) {
                self.0.gates.grab().waiting.remove(&self.0.ask);
            }
        }
        let leaves = Leaves(self);
        let fate = turn(&self.gates, self.ask, what).await;
        drop(leaves);
        match fate {
            Fate::Done => effect.await,
            Fate::RequestLost => lost(),
            Fate::ReplyLost => {
                drop(effect.await);
                lost()
            }
        }
    }
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Gate").field(&self.ask).finish()
    }
}

#[async_trait]
impl LockBackend for Gate {
    fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }
    async fn acquire(&self, call: &Call, request: &AcquireRequest) -> Result<Lease> {
        self.pass("acquire", self.store.acquire(call, request)).await
    }
    async fn renew(&self, call: &Call, lease: &Lease, ttl: Duration) -> Result<Lease> {
        self.pass("renew", self.store.renew(call, lease, ttl)).await
    }
    async fn release(&self, call: &Call, lease: &Lease) -> Result<Released> {
        self.pass("release", self.store.release(call, lease)).await
    }
    async fn resolve(&self, call: &Call, request: &AcquireRequest) -> Result<Resolution> {
        self.pass("resolve", self.store.resolve(call, request)).await
    }
    async fn inspect(&self, call: &Call, name: &LockName) -> Result<LockState> {
        self.pass("inspect", self.store.inspect(call, name)).await
    }
    async fn abandon(&self, call: &Call, request: &AcquireRequest) -> Result<()> {
        self.pass("abandon", self.store.abandon(call, request)).await
    }
    async fn raise(&self, call: &Call, lease: &Lease, floor: Fence) -> Result<()> {
        self.pass("raise", self.store.raise(call, lease, floor)).await
    }
    async fn raise_fence(&self, call: &Call, name: &LockName, floor: Fence) -> Result<Fence> {
        self.pass("raise_fence", self.store.raise_fence(call, name, floor)).await
    }
    async fn high_water(&self, call: &Call) -> Result<Option<Fence>> {
        self.pass("high_water", self.store.high_water(call)).await
    }
    async fn phase_read(&self, call: &Call) -> Result<Option<PhaseRecord>> {
        self.pass("phase_read", self.store.phase_read(call)).await
    }
    async fn phase_cas(&self, call: &Call, expect: Option<&PhaseRecord>, new: &PhaseRecord) -> Result<bool> {
        self.pass("phase_cas", self.store.phase_cas(call, expect, new)).await
    }
    async fn join(&self, call: &Call, phase: &str, ttl: Duration) -> Result<Lease> {
        self.pass("join", self.store.join(call, phase, ttl)).await
    }
    async fn leave(&self, call: &Call, member: &Lease) -> Result<Released> {
        self.pass("leave", self.store.leave(call, member)).await
    }
    async fn members(&self, call: &Call) -> Result<Vec<Member>> {
        self.pass("members", self.store.members(call)).await
    }
    async fn list(
        &self,
        call: &Call,
        prefix: Option<&LockName>,
        after: Option<&LockName>,
    ) -> Result<Vec<LockName>> {
        self.pass("list", self.store.list(call, prefix, after)).await
    }
}

/// Chooses, and comes back with the next untried choice.
#[derive(Default)]
struct Chooser {
    path: Vec<(usize, usize)>,
    at: usize,
}

impl Chooser {
    fn pick(&mut self, of: usize) -> usize {
        if self.at == self.path.len() {
            self.path.push((0, of));
        }
        let (chosen, known) = self.path[self.at];
        assert_eq!(known, of, "a replay went another way");
        self.at += 1;
        chosen
    }

    /// Goes to the next run; `false` after the last.
    fn next(&mut self) -> bool {
        self.at = 0;
        while let Some((chosen, of)) = self.path.pop() {
            if chosen + 1 < of {
                self.path.push((chosen + 1, of));
                return true;
            }
        }
        false
    }
}

/// What may go wrong in one run.
#[derive(Clone, Copy, Debug, Default)]
struct Budget {
    /// Requests or replies lost, or clients that stop for good.
    faults: u32,
    /// Times that most of a TTL passes.
    pauses: u32,
    /// Records that a store loses.
    losses: u32,
}

/// What the clients did, and what the resource saw.
#[derive(Default)]
struct Book {
    /// Who believes to hold, by its own clock until the deadline.
    holding: BTreeMap<usize, (Lease, Phase)>,
    highest: Option<Fence>,
    written: Option<Fence>,
    lost_a_record: bool,
    broken: Option<String>,
}

struct Scene {
    stores: Stores,
    gates: Arc<Mutex<Gates>>,
    book: Arc<Mutex<Book>>,
}

impl Scene {
    fn begin(&self, client: usize, lease: &Lease, phase: Phase) {
        let book = &mut *self.book.grab();
        let now = self.stores.clock.now();
        let other = book.holding.iter().find(|(_, (lease, _))| now < lease.deadline).map(|(k, _)| *k);
        if let Some(other) = other.filter(|_| !book.lost_a_record) {
            book.broken.get_or_insert(format!("client {client} was granted while client {other} holds"));
        }
        if !book.lost_a_record && book.highest.is_some_and(|highest| lease.fence <= highest) {
            book.broken
                .get_or_insert(format!("client {client} got {} after {:?}", lease.fence, book.highest));
        }
        book.highest = book.highest.max(Some(lease.fence));
        book.holding.insert(client, (lease.clone(), phase));
    }

    /// Writes, if the client's clock still allows it. Whoever is on record must not be refused.
    fn write(&self, client: usize) {
        let now = self.stores.clock.now();
        let mut book = self.book.grab();
        let Some((lease, phase)) = book.holding.get(&client).cloned() else { return };
        if now >= lease.deadline {
            return;
        }
        let on =
            |used: bool, store: &MemoryBackend| !used || store.holder(&lease.name, now) == Some(lease.owner);
        let on_record = on(phase.on_from(), &self.stores.old) && on(phase.on_to(), &self.stores.new);
        if book.written.is_some_and(|highest| lease.fence < highest) {
            if on_record {
                let seen = book.written;
                book.broken.get_or_insert(format!(
                    "client {client}, on record with {}, was refused: {seen:?}",
                    lease.fence
                ));
            }
            return;
        }
        book.written = Some(lease.fence);
    }

    fn end(&self, client: usize) {
        self.book.grab().holding.remove(&client);
    }
}

/// Acquires, writes, renews if asked to, writes, releases; then again.
async fn holder(scene: Arc<Scene>, client: usize, bridge: Bridge, turns: u32, renews: bool) {
    let call = scene.stores.call();
    for _ in 0..turns {
        let request = AcquireRequest::new(name("x"), TTL);
        let lease = match bridge.acquire(&call, &request).await {
            Ok(lease) => lease,
            Err(error) if error.kind() == ErrorKind::Held => continue,
            // As lockcore does: what is unknown is settled, what is of no use is cleared away.
            Err(error) => match error.kind() {
                ErrorKind::Unknown => match bridge.resolve(&call, &request).await {
                    Ok(Resolution::Adopted(lease)) => lease,
                    Ok(Resolution::Gone) => continue,
                    Err(_) => {
                        let _ = bridge.abandon(&call, &request).await;
                        continue;
                    }
                },
                _ => {
                    let _ = bridge.abandon(&call, &request).await;
                    continue;
                }
            },
        };
        scene.begin(client, &lease, bridge.phase());
        turn(&scene.gates, (client, 2), "write").await;
        scene.write(client);
        if renews {
            match bridge.renew(&call, &lease, TTL).await {
                Ok(renewed) => {
                    if let Some((held, _)) = scene.book.grab().holding.get_mut(&client) {
                        *held = renewed;
                    }
                }
                Err(error) if error.kind() == ErrorKind::Lost => {
                    scene.end(client);
                    continue;
                }
                Err(_) => {}
            }
            turn(&scene.gates, (client, 2), "write").await;
            scene.write(client);
        }
        scene.end(client);
        let _ = bridge.release(&call, &lease).await;
    }
}

type Client = Pin<Box<dyn Future<Output = ()>>>;

/// Runs one order of things to its end.
fn run(
    chooser: &mut Chooser,
    mut budget: Budget,
    scene: &Scene,
    mut clients: Vec<Option<Client>>,
    mut look: impl FnMut(),
) -> Option<String> {
    for _ in 0..10_000 {
        scene.stores.clock.forget_alarms();
        for client in &mut clients {
            if client.as_mut().is_some_and(|client| poll_once(client).is_some()) {
                *client = None;
            }
        }
        look();
        if let Some(broken) = scene.book.grab().broken.clone() {
            return Some(broken);
        }
        if clients.iter().all(Option::is_none) {
            return None;
        }
        let asks: Vec<Ask> = scene.gates.grab().waiting.keys().copied().collect();
        let mut actions: Vec<Action> = asks.iter().map(|ask| Action::Let(*ask, Fate::Done)).collect();
        if actions.is_empty() {
            assert!(scene.stores.clock.ring(), "nobody waits for anything");
            continue;
        }
        if budget.faults > 0 {
            let reads = scene.gates.grab().reads.clone();
            for ask in asks.iter().filter(|ask| ask.1 < 2 && !reads.contains(ask)) {
                actions.push(Action::Let(*ask, Fate::RequestLost));
                actions.push(Action::Let(*ask, Fate::ReplyLost));
            }
            actions.extend((0..clients.len()).filter(|k| clients[*k].is_some()).map(Action::Stop));
        }
        if budget.pauses > 0 {
            actions.push(Action::Pause);
        }
        if budget.losses > 0 {
            actions.extend([Action::Lose(0), Action::Lose(1)]);
        }
        match actions[chooser.pick(actions.len())] {
            Action::Let(ask, fate) => {
                budget.faults -= u32::from(fate != Fate::Done);
                scene.gates.grab().waiting.insert(ask, Some(fate));
            }
            Action::Stop(client) => {
                budget.faults -= 1;
                clients[client] = None;
                scene.gates.grab().waiting.retain(|ask, _| ask.0 != client);
                scene.gates.grab().log.push(format!("client {client} stops"));
                // It does nothing any more, and its own clock ends what it held.
            }
            Action::Pause => {
                budget.pauses -= 1;
                scene.stores.pass(TTL * 6 / 10);
                scene.gates.grab().log.push("time passes".into());
            }
            Action::Lose(side) => {
                budget.losses -= 1;
                scene.book.grab().lost_a_record = true;
                [&scene.stores.old, &scene.stores.new][side].steal(&name("x"));
                scene.gates.grab().log.push(format!("store {side} loses its record"));
            }
        }
    }
    Some("it never ends".into())
}

#[derive(Clone, Copy, Debug)]
enum Action {
    Let(Ask, Fate),
    Stop(usize),
    Pause,
    Lose(usize),
}

/// Explores two clients; returns how many runs there were, or the first that broke a promise.
fn pair(phases: [Phase; 2], flaw: Flaw, budget: Budget, turns: u32, renews: bool) -> Result<u64, String> {
    let until = match phases {
        [Phase::From, _] | [_, Phase::From] => 1,
        _ => 3,
    };
    let stages = [Stage::From, Stage::FromBoth, Stage::Both, Stage::BothTo];
    let mut chooser = Chooser::default();
    let mut runs = 0;
    loop {
        runs += 1;
        let scene = Arc::new(Scene {
            stores: Stores::new(),
            gates: Arc::new(Mutex::new(Gates { open: true, ..Gates::default() })),
            book: Arc::default(),
        });
        let clock: HandClock = scene.stores.clock.clone();
        block_on(&clock, scene.stores.steps(&stages[..=until]));
        // The new side's numbers are ahead, or behind: the fence must carry over either way.
        if runs % 2 == 0 {
            let far = Fence::new(50).expect("a fence");
            block_on(&clock, scene.stores.new.raise_fence(&scene.stores.call(), &name("x"), far)).unwrap();
        }
        let mut clients: Vec<Option<Client>> = Vec::new();
        for (client, phase) in phases.into_iter().enumerate() {
            let side = |side: usize, store: &MemoryBackend| -> Arc<dyn LockBackend> {
                Arc::new(Gate { store: store.clone(), gates: scene.gates.clone(), ask: (client, side) })
            };
            let (old, new) = (side(0, &scene.stores.old), side(1, &scene.stores.new));
            let bridge = Bridge::new("moving", phase, old, new).unwrap().flawed(flaw);
            let bridge = bridge.with_membership(Duration::from_secs(3600)).unwrap();
            block_on(&clock, bridge.preflight(&scene.stores.call())).unwrap();
            clients.push(Some(Box::pin(holder(scene.clone(), client, bridge, turns, renews))));
        }
        scene.gates.grab().open = false;
        if let Some(broken) = run(&mut chooser, budget, &scene, clients, || {}) {
            let log = scene.gates.grab().log.join("\n  ");
            return Err(format!("{phases:?}, {flaw:?}, run {runs}: {broken}\n  {log}"));
        }
        if !chooser.next() {
            return Ok(runs);
        }
    }
}

const PAIRS: [[Phase; 2]; 5] = [
    [Phase::From, Phase::From],
    [Phase::From, Phase::Both],
    [Phase::Both, Phase::Both],
    [Phase::Both, Phase::To],
    [Phase::To, Phase::To],
];

fn explore(what: &str, budget: Budget, turns: u32, renews: bool) {
    for phases in PAIRS {
        let runs =
            pair(phases, Flaw::None, budget, turns, renews).unwrap_or_else(|broken| panic!("{broken}"));
        assert!(runs > 1);
        println!("{what} {phases:?}: {runs} runs");
    }
}

#[test]
fn every_order_with_every_fault_keeps_one_holder_and_growing_fences() {
    explore("a fault", Budget { faults: 1, ..Budget::default() }, 1, false);
}

#[test]
fn every_order_with_leases_that_expire_keeps_one_holder_and_growing_fences() {
    explore("time", Budget { pauses: 2, ..Budget::default() }, 1, false);
}

#[test]
fn every_order_with_renewals_keeps_one_holder_and_growing_fences() {
    explore("renewals", Budget { pauses: 1, ..Budget::default() }, 1, true);
}

#[test]
fn every_order_with_a_lost_record_refuses_nobody_who_is_on_record() {
    explore("a lost record", Budget { losses: 1, ..Budget::default() }, 1, false);
}

/// Two turns a client, and a fault together with time that passes: minutes, so it is asked for by name.
#[test]
#[ignore = "takes minutes: cargo test -p lockcore --release -- --ignored migrate"]
fn every_order_of_longer_stories_keeps_one_holder_and_growing_fences() {
    explore("a fault and time", Budget { faults: 1, pauses: 1, ..Budget::default() }, 1, false);
    explore("a fault and a lost record", Budget { faults: 1, losses: 1, ..Budget::default() }, 1, false);
    explore("two turns", Budget { faults: 1, ..Budget::default() }, 2, false);
}

#[test]
fn verify_then_raise_refuses_a_live_holder_when_the_old_record_is_lost() {
    let budget = Budget { losses: 1, ..Budget::default() };
    let broken = pair([Phase::From, Phase::Both], Flaw::VerifyThenRaise, budget, 1, false);
    assert!(broken.as_ref().is_err_and(|b| b.contains("was refused")), "the flaw was not seen: {broken:?}");
}

#[test]
fn without_the_write_back_fences_go_down() {
    let broken = pair([Phase::From, Phase::Both], Flaw::NoWriteBack, Budget::default(), 1, false);
    assert!(broken.as_ref().is_err_and(|b| b.contains(" after ")), "the flaw was not seen: {broken:?}");
}

/// Two operators who step apart from the middle, and one who undoes.
pub(super) fn operators() {
    let stages = [Stage::From, Stage::FromBoth, Stage::Both];
    let goals: [[&[Stage]; 2]; 3] = [
        [&[Stage::FromBoth], &[Stage::BothTo]],
        [&[Stage::BothTo, Stage::Both], &[Stage::FromBoth]],
        [&[Stage::BothTo], &[Stage::BothTo]],
    ];
    for goals in goals {
        let mut chooser = Chooser::default();
        let mut runs = 0u64;
        loop {
            runs += 1;
            let scene = Arc::new(Scene {
                stores: Stores::new(),
                gates: Arc::new(Mutex::new(Gates { open: true, ..Gates::default() })),
                book: Arc::default(),
            });
            let clock = scene.stores.clock.clone();
            block_on(&clock, scene.stores.steps(&stages));
            let mut clients: Vec<Option<Client>> = Vec::new();
            for (client, goals) in goals.into_iter().enumerate() {
                let side = |side: usize, store: &MemoryBackend| -> Arc<dyn LockBackend> {
                    Arc::new(Records {
                        store: store.clone(),
                        gates: scene.gates.clone(),
                        ask: (client, side),
                        reads: Arc::default(),
                    })
                };
                let (old, new) = (side(0, &scene.stores.old), side(1, &scene.stores.new));
                let migration = Migration::new("moving", old, new).unwrap();
                let call = scene.stores.call();
                clients.push(Some(Box::pin(async move {
                    for goal in goals {
                        let _ = migration.step(&call, *goal).await;
                    }
                })));
            }
            scene.gates.grab().open = false;
            let look = || {
                let opens = |store: &MemoryBackend, phase: &str| {
                    let record = block_on(&clock, store.phase_read(&scene.stores.call())).unwrap();
                    record.is_some_and(|record| record.open.iter().any(|open| open == phase))
                };
                if opens(&scene.stores.old, "from") && opens(&scene.stores.new, "to") {
                    scene.book.grab().broken.get_or_insert("`from` and `to` are open together".into());
                }
            };
            let budget = Budget { faults: u32::from(runs > 0), ..Budget::default() };
            if let Some(broken) = run(&mut chooser, budget, &scene, clients, look) {
                panic!("{goals:?}, run {runs}: {broken}\n  {}", scene.gates.grab().log.join("\n  "));
            }
            // Whatever became of it, a third one ends it.
            scene.gates.grab().open = true;
            block_on(&clock, async {
                let (migration, call) = (scene.stores.migration(), scene.stores.call());
                let status = migration.status(&call).await.unwrap();
                if !status.settled {
                    let ended = migration.step(&call, status.forward().unwrap()).await.unwrap();
                    assert!(ended.settled, "{ended:?}");
                }
            });
            if !chooser.next() {
                break;
            }
        }
        println!("operators {goals:?}: {runs} runs");
    }
}

/// As `Gate`, for the operator: what a step reads first and what it changes take turns; its later looks decide nothing.
#[derive(Clone, Debug)]
struct Records {
    store: MemoryBackend,
    gates: Arc<Mutex<Gates>>,
    ask: Ask,
    reads: Arc<std::sync::atomic::AtomicUsize>,
}

impl std::fmt::Debug for Gates {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(&self.log).finish()
    }
}

#[async_trait]
impl LockBackend for Records {
    fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }
    async fn acquire(&self, call: &Call, request: &AcquireRequest) -> Result<Lease> {
        self.store.acquire(call, request).await
    }
    async fn renew(&self, call: &Call, lease: &Lease, ttl: Duration) -> Result<Lease> {
        self.store.renew(call, lease, ttl).await
    }
    async fn release(&self, call: &Call, lease: &Lease) -> Result<Released> {
        self.store.release(call, lease).await
    }
    async fn resolve(&self, call: &Call, request: &AcquireRequest) -> Result<Resolution> {
        self.store.resolve(call, request).await
    }
    async fn inspect(&self, call: &Call, name: &LockName) -> Result<LockState> {
        self.store.inspect(call, name).await
    }
    async fn high_water(&self, call: &Call) -> Result<Option<Fence>> {
        self.store.high_water(call).await
    }
    async fn phase_read(&self, call: &Call) -> Result<Option<PhaseRecord>> {
        if !self.reads.fetch_add(1, std::sync::atomic::Ordering::Relaxed).is_multiple_of(3) {
            return self.store.phase_read(call).await;
        }
        let gate = Gate { store: self.store.clone(), gates: self.gates.clone(), ask: self.ask };
        gate.phase_read(call).await
    }
    async fn phase_cas(&self, call: &Call, expect: Option<&PhaseRecord>, new: &PhaseRecord) -> Result<bool> {
        let gate = Gate { store: self.store.clone(), gates: self.gates.clone(), ask: self.ask };
        gate.phase_cas(call, expect, new).await
    }
    async fn members(&self, call: &Call) -> Result<Vec<Member>> {
        self.store.members(call).await
    }
}
