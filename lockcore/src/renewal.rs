//! The engine: one task renews all leases that one client took on one runtime.

use std::{
    collections::BTreeMap,
    pin::Pin,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::{StreamExt, stream::FuturesUnordered};
use tokio::{runtime::Handle, sync::Notify};

use crate::{
    backend::{Call, LockBackend, Moment},
    client::{Inner, RenewalHome},
    error::{Error, ErrorKind, Result, Verb},
    events::EventKind,
    guard::Held,
    lease::{Lease, LostReason},
    machine::renewal::Event,
    observe,
    sync::LockExt,
};

/// The engines of one client, one for each runtime that acquires.
#[derive(Default)]
pub(crate) struct Engines {
    running: Mutex<Vec<Arc<Engine>>>,
    stopped: AtomicBool,
}

/// Renews the leases of one client on one runtime.
pub(crate) struct Engine {
    runtime: Option<tokio::runtime::Id>,
    leases: Mutex<Leases>,
    changed: Notify,
    /// Ends with its task, which ends with its runtime.
    alive: AtomicBool,
    stopped: AtomicBool,
    numbers: AtomicU64,
}

struct Leases {
    due: BTreeMap<(Moment, u64), Arc<Held>>,
    /// When the task looks next by itself.
    wakes_at: Moment,
    /// The shortest pause between two looks that a lease asked for lately: an engine that has just become idle looks
    /// once more, so that a loop of short locks does not wake it every time.
    pause: Duration,
}

impl Engines {
    /// Returns the engine of this runtime, started if need be.
    pub(crate) fn of(&self, client: &Arc<Inner>, runtime: &Handle) -> Arc<Engine> {
        let own_thread = client.options.renewal == RenewalHome::OwnThread;
        let id = (!own_thread).then(|| runtime.id());
        let mut running = self.running.grab();
        if let Some(engine) = running.iter().find(|e| e.runtime == id && e.alive.load(Ordering::Acquire)) {
            return engine.clone();
        }
        running.retain(|engine| engine.alive.load(Ordering::Acquire));
        let engine = Arc::new(Engine {
            runtime: id,
            leases: Mutex::new(Leases { due: BTreeMap::new(), wakes_at: Moment::MAX, pause: Duration::ZERO }),
            changed: Notify::new(),
            alive: AtomicBool::new(true),
            stopped: AtomicBool::new(self.stopped.load(Ordering::Acquire)),
            numbers: AtomicU64::new(0),
        });
        let work =
            Work { engine: engine.clone(), client: Arc::downgrade(client), backend: client.backend.clone() };
        if own_thread {
            work.on_own_thread(client);
        } else {
            runtime.spawn(work.run());
        }
        running.push(engine.clone());
        engine
    }

    /// Lists the leases that are held.
    pub(crate) fn held(&self) -> Vec<Arc<Held>> {
        let running = self.running.grab().clone();
        running
            .iter()
            .flat_map(|engine| engine.leases.grab().due.values().cloned().collect::<Vec<_>>())
            .collect()
    }

    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        for engine in self.running.grab().iter() {
            engine.stopped.store(true, Ordering::Release);
            engine.changed.notify_one();
        }
    }
}

impl Engine {
    pub(crate) fn next_number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// Takes over a lease. Wakes the task only if it would sleep through the first renewal.
    pub(crate) fn add(&self, held: &Arc<Held>) {
        let wake_at = held.wake_at();
        let mut leases = self.leases.grab();
        leases.pause = held.granted.until(wake_at);
        held.scheduled.store(wake_at.as_nanos(), Ordering::Relaxed);
        leases.due.insert((wake_at, held.number), held.clone());
        if wake_at < leases.wakes_at {
            leases.wakes_at = wake_at;
            drop(leases);
            self.changed.notify_one();
        }
    }

    /// Puts a lease in its place again after its next moment has moved.
    pub(crate) fn reschedule(&self, held: &Arc<Held>) {
        let mut leases = self.leases.grab();
        let key = (Moment::from_nanos(held.scheduled.load(Ordering::Relaxed)), held.number);
        // Not there: its guard has let go meanwhile.
        if leases.due.remove(&key).is_none() {
            return;
        }
        let wake_at = held.wake_at();
        held.scheduled.store(wake_at.as_nanos(), Ordering::Relaxed);
        leases.due.insert((wake_at, held.number), held.clone());
        if wake_at < leases.wakes_at {
            leases.wakes_at = wake_at;
            drop(leases);
            self.changed.notify_one();
        }
    }

    /// Lets go of a lease.
    pub(crate) fn remove(&self, held: &Held) {
        let mut leases = self.leases.grab();
        let key = (Moment::from_nanos(held.scheduled.load(Ordering::Relaxed)), held.number);
        leases.due.remove(&key);
    }
}

/// The task's own side.
struct Work {
    engine: Arc<Engine>,
    client: Weak<Inner>,
    backend: Arc<dyn LockBackend>,
}

/// Says that the task has ended, however it ended.
struct Alive(Arc<Engine>);

impl Drop for Alive {
    fn drop(&mut self) {
        self.0.alive.store(false, Ordering::Release);
    }
}

type Job = Pin<Box<dyn Future<Output = ()> + Send>>;

impl Work {
    /// Without a thread or a runtime the engine counts as ended: the next acquire tries anew, and until then leases end
    /// at their deadline, by the clock.
    fn on_own_thread(mut self, client: &Arc<Inner>) {
        let call = client.call(client.options.call_timeout);
        let alive = Alive(self.engine.clone());
        // A thread that could not be started drops what it was given, and with it the sign of life.
        let _ = std::thread::Builder::new().name("lockcore-renewal".into()).spawn(move || {
            let _alive = alive;
            let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
                return;
            };
            runtime.block_on(async {
                // Without a second connection the first is shared, which a busy runtime may hold up.
                if let Ok(Some(own)) = self.backend.second_connection(&call).await {
                    self.backend = own;
                }
                self.run().await;
            });
        });
    }

    async fn run(self) {
        let _alive = Alive(self.engine.clone());
        let Some(clock) = self.client.upgrade().map(|client| client.clock.clone()) else { return };
        let Some(closing) = self.client.upgrade().map(|client| client.closing.clone()) else { return };
        let mut jobs: FuturesUnordered<Job> = FuturesUnordered::new();
        let mut told_closing = false;
        loop {
            if self.engine.stopped.load(Ordering::Acquire) && jobs.is_empty() {
                return;
            }
            let next = self.look(&mut jobs);
            tokio::select! {
                biased;
                () = self.engine.changed.notified() => {}
                Some(()) = jobs.next(), if !jobs.is_empty() => {}
                () = closing.cancelled(), if !told_closing => {
                    told_closing = true;
                    // The application shuts down: holders are told and get to finish.
                    let held: Vec<_> = self.engine.leases.grab().due.values().cloned().collect();
                    for held in held {
                        held.step(Event::Ended(LostReason::Closed));
                    }
                }
                () = clock.sleep_until(next) => {}
            }
        }
    }

    /// Steps all leases that are due, starts what they ask for, and returns when to look again.
    fn look(&self, jobs: &mut FuturesUnordered<Job>) -> Moment {
        let Some(client) = self.client.upgrade() else { return Moment::MAX };
        let now = client.now();
        let mut renew: BTreeMap<(Duration, Duration), Vec<Arc<Held>>> = BTreeMap::new();
        let mut late = None;
        let mut leases = self.engine.leases.grab();
        let batch = client.capabilities.renew_batch;
        let mut again = Vec::new();
        while let Some(first) = leases.due.first_entry() {
            // Where the store renews many at once, those that are nearly due come along.
            let early = if batch > 1 { first.get().ttl / 30 } else { Duration::ZERO };
            if first.key().0 > now.saturating_add(early) {
                break;
            }
            let ((due, _), held) = first.remove_entry();
            if due.until(now) > held.ttl / 12 {
                late = late.max(Some((due.until(now), held.number)));
                client.tell(&held.name, held.owner.digest(), || EventKind::Late { by: due.until(now) });
            }
            let todo = held.step(Event::Tick { early });
            if todo.renew {
                renew.entry((held.ttl, held.delay)).or_default().push(held.clone());
            }
            if client.capabilities.pushes_loss && held.start_watching(now) {
                jobs.push(Box::pin(watch_for_loss(self.backend.clone(), held.clone())));
            }
            again.push(held);
        }
        for held in &again {
            let wake_at = held.wake_at();
            held.scheduled.store(wake_at.as_nanos(), Ordering::Relaxed);
            // An ended lease stays in the map, due never, until its guard lets go: closing finds it there.
            leases.due.insert((wake_at, held.number), held.clone());
        }
        let next = leases.due.first_key_value().map_or(Moment::MAX, |((moment, _), _)| *moment);
        leases.wakes_at = if next == Moment::MAX && !leases.pause.is_zero() {
            now.saturating_add(std::mem::take(&mut leases.pause))
        } else {
            next
        };
        let wakes_at = leases.wakes_at;
        drop(leases);
        if let Some(((by, _), held)) = late.zip(again.first()) {
            observe::late(held.about(), by);
        }
        if let Some(oldest) = again.iter().map(|held| held.granted).min() {
            observe::oldest_hold(client.capabilities.backend, oldest.until(now));
        }
        for (_, due) in renew {
            for batch in due.chunks(batch.max(1)) {
                let (client, backend, batch) = (client.clone(), self.backend.clone(), batch.to_vec());
                jobs.push(Box::pin(async move {
                    // The leases have been told; there is nobody else to tell.
                    let _ = renew_batch(&client, &*backend, &batch).await;
                    for held in &batch {
                        held.reschedule();
                    }
                }));
            }
        }
        wakes_at
    }
}

async fn watch_for_loss(backend: Arc<dyn LockBackend>, held: Arc<Held>) {
    let call = Call::new(held.client.frame(held.client.exchange(held.ttl)), Moment::MAX, 1, held.delay);
    let lease = held.lease();
    tokio::select! {
        reason = backend.ended(&call, &lease) => {
            // Our own release is seen here, too, and changes nothing: the first reason stands.
            held.step(Event::Ended(reason));
        }
        () = held.over() => {}
    }
}

/// Renews one lease now, outside of the schedule.
pub(crate) async fn renew(client: &Arc<Inner>, held: &Arc<Held>) -> Result<()> {
    let answer = renew_batch(client, &*client.backend, std::slice::from_ref(held)).await;
    held.reschedule();
    answer
}

/// Sends one renewal for leases of the same TTL and steps their machines; the first error.
async fn renew_batch(client: &Arc<Inner>, backend: &dyn LockBackend, batch: &[Arc<Held>]) -> Result<()> {
    let Some(first) = batch.first() else { return Ok(()) };
    let (ttl, delay) = (first.ttl, first.delay);
    let exchange = client.exchange(ttl);
    let sent = client.now();
    let call = Call::new(client.frame(exchange), sent.saturating_add(exchange), 1, delay);
    let leases: Vec<Lease> = batch.iter().map(|held| held.lease()).collect();
    for held in batch {
        client.tell(&held.name, held.owner.digest(), || EventKind::RenewStarted { fence: held.fence });
    }
    let answers = match leases.as_slice() {
        [lease] => {
            let answer = backend.renew(&call, lease, ttl + delay);
            vec![client.bounded(Verb::Renew, Some(&lease.name), &call, answer).await]
        }
        leases => {
            let answer = async { Ok(backend.renew_many(&call, leases, ttl + delay).await) };
            client.bounded(Verb::Renew, None, &call, answer).await.unwrap_or_default()
        }
    };
    // Fewer answers than questions, or none in time: what is missing is unknown.
    let unknown =
        || Err(client.error(ErrorKind::Unknown, "the store did not answer in time", Verb::Renew, None));
    let answers = answers.into_iter().chain(std::iter::repeat_with(unknown));
    let mut first_error = None;
    for (held, answer) in batch.iter().zip(answers) {
        if let Err(error) = take_answer(client, held, sent, answer).await {
            first_error.get_or_insert(error);
        }
    }
    first_error.map_or(Ok(()), Err)
}

async fn take_answer(client: &Inner, held: &Arc<Held>, sent: Moment, answer: Result<Lease>) -> Result<()> {
    let (fence, digest) = (held.fence, held.owner.digest());
    match answer {
        Ok(lease) => {
            let took = sent.until(client.now());
            let todo = held.step(Event::Renewed(lease.deadline));
            client.tell(&held.name, digest, || EventKind::Renewed { fence, deadline: lease.deadline, took });
            observe::renewed(held.about(), took);
            if todo.give_back {
                held.take_back().await;
            }
            Ok(())
        }
        Err(error) => {
            client.tell(&held.name, digest, || EventKind::RenewFailed { fence, kind: error.kind() });
            observe::renew_failed(held.about(), &error);
            held.step(match error.kind() {
                ErrorKind::Lost => Event::Ended(error.lost_reason().unwrap_or(LostReason::Taken)),
                _ => Event::Failed,
            });
            Err(about(error, held))
        }
    }
}

fn about(error: Error, held: &Held) -> Error {
    error.about(Verb::Renew, Some(&held.name), held.client.capabilities.backend)
}
