//! What a case is given: names, clients, a resource, time, and roads around the code under test.

mod child;
mod client;
mod door;
mod foreign;
mod register;
mod service;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use lockcore::{
    ClientOptions, LockClient, LockName,
    backend::{Capabilities, Clock, LockBackend, Moment, OwnerDigest, WakeUp},
};

pub use child::{Child, ChildLease, child_main};
pub use client::Client;
pub(crate) use client::assert_refused;
pub use foreign::Foreign;
#[doc(hidden)]
pub use register::Flaw;
pub use register::Register;
pub use service::{Servers, Service, Wire};

use crate::history::{Bounds, ClockKind, FaultClass, FaultLog, Recorder, Rules};

/// Nothing that is awaited here takes this long; a case that hangs says what it waited for.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(20);

/// The stage of one case: a store, a history, and the means to act.
#[derive(Clone, Debug)]
pub struct Bench {
    pub(crate) stage: Arc<Stage>,
}

pub(crate) struct Stage {
    pub(crate) service: Arc<dyn Service>,
    pub(crate) recorder: Recorder,
    pub(crate) rules: std::sync::Mutex<Rules>,
    pub(crate) capabilities: Capabilities,
    pub(crate) seed: u64,
    /// The seed decides what happens: [`Bench::draw`] was asked.
    pub(crate) drew: AtomicBool,
    pub(crate) namespace: String,
    pub(crate) measures: std::sync::Mutex<Vec<(&'static str, f64, &'static str)>>,
    door: Arc<door::Door>,
    names: AtomicU64,
}

impl std::fmt::Debug for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Stage").field("namespace", &self.namespace).finish_non_exhaustive()
    }
}

impl Bench {
    pub(crate) async fn new(service: Arc<dyn Service>, seed: u64) -> Self {
        let kind = if service.virtual_time() { ClockKind::Virtual } else { ClockKind::Boot };
        let recorder = Recorder::builder()
            .clock(service.clock(), kind)
            .build()
            // Only a file can fail.
            .expect("memory needs no file");
        let capabilities = service.connect().await.capabilities();
        let rules = Rules::complete().with(|r| {
            r.bounds = bounds(&capabilities, service.virtual_time());
            // A waiter's later looks are requests that only the backend sees, so an answer may come long after `sent`.
            r.queue = true;
        });
        let namespace = service.namespace(seed);
        Self {
            stage: Arc::new(Stage {
                service,
                recorder,
                rules: std::sync::Mutex::new(rules),
                capabilities,
                seed,
                drew: AtomicBool::new(false),
                namespace,
                measures: std::sync::Mutex::default(),
                door: Arc::default(),
                names: AtomicU64::new(0),
            }),
        }
    }

    /// Returns a name that no other case and no other call of this case has.
    pub fn fresh_name(&self) -> LockName {
        let number = self.stage.names.fetch_add(1, Ordering::Relaxed);
        LockName::from_segments(["case", &format!("{:x}-{number}", self.stage.seed)])
            .expect("a short, plain name")
    }

    /// Returns a namespace beside the case's own.
    pub fn namespace_beside(&self, word: &str) -> String {
        self.stage.service.namespace_beside(self.stage.seed, word)
    }

    /// Opens a connection, through proxies or behind the suite's door where the service offers no wire of its own.
    async fn connect(&self) -> Arc<dyn LockBackend> {
        let (service, door) = (self.stage.service.clone(), self.stage.door.clone());
        if service.wire().is_some() {
            return service.connect().await;
        }
        let lines: Vec<_> = service.servers().into_iter().map(|server| door.open_line(server)).collect();
        let backend = if lines.is_empty() {
            service.connect().await
        } else {
            let addresses: Vec<_> = lines.iter().map(|line| line.address()).collect();
            service.connect_through(&addresses).await
        };
        Arc::new(door::Behind { door, service, lines, backend })
    }

    /// Connects a client that speaks the backend's own verbs and records what it does.
    pub async fn client(&self, name: &str) -> Client {
        Client::new(self, name, self.connect().await)
    }

    /// As [`client`](Self::client), on a connection that no fault of the [`wire`](Self::wire) meets where proxies make them.
    pub async fn unharmed(&self, name: &str) -> Client {
        if self.stage.service.servers().is_empty() {
            return self.client(name).await;
        }
        Client::new(self, name, self.stage.service.connect().await)
    }

    /// Connects a client of the library, whose guards renew; what it does is recorded from its event stream.
    pub async fn locks(&self, name: &str, change: impl FnOnce(&mut ClientOptions)) -> LockClient {
        let backend = self.connect().await;
        self.locks_on(name, backend, change)
    }

    /// As [`locks`](Self::locks), on a backend of the case's own.
    pub fn locks_on(
        &self,
        name: &str,
        backend: Arc<dyn LockBackend>,
        change: impl FnOnce(&mut ClientOptions),
    ) -> LockClient {
        let ttl = self.ttl();
        let options = ClientOptions::default().with(|o| {
            o.namespace = self.stage.namespace.clone();
            o.ttl = ttl;
            o.label = Some(name.into());
            change(o);
        });
        let locks = LockClient::with_clock(backend, options, self.stage.service.clock());
        let (mut log, mut events) = (self.stage.recorder.stream(name), locks.events());
        tokio::spawn(async move { log.follow(&mut events).await });
        locks
    }

    /// Makes a resource that the lock guards, and records its judgements.
    pub fn register(&self, name: &LockName) -> Register {
        let mut register = Register::new(self.stage.recorder.resource(name.as_str(), "register"));
        register.flaw = self.stage.service.flaw();
        register
    }

    /// Returns what the backend promises.
    pub fn capabilities(&self) -> &Capabilities {
        &self.stage.capabilities
    }

    /// Returns the TTL for cases that wait for its end: short, and long enough for a busy machine.
    pub fn ttl(&self) -> Duration {
        self.stage.service.ttl()
    }

    /// Awaits something that must end by a bound, beside a plain timer of that bound: where a busy machine lets both be late,
    /// only work that is later than the timer is too late.
    pub async fn within<T>(&self, bound: Duration, what: &str, work: impl Future<Output = T>) -> T {
        let mut work = std::pin::pin!(work);
        tokio::select! {
            biased;
            done = &mut work => return done,
            () = self.pass(bound) => {}
        }
        // What became due in the same stall gets its turn: one wakes the other.
        for _ in 0..20 {
            if let std::task::Poll::Ready(done) = poll_once(&mut work).await {
                return done;
            }
            tokio::task::yield_now().await;
        }
        panic!("{what} took longer than {bound:?}");
    }

    /// Returns now.
    pub fn now(&self) -> Moment {
        self.stage.recorder.now()
    }

    /// Returns the clock.
    pub fn clock(&self) -> Arc<dyn Clock> {
        self.stage.service.clock()
    }

    /// Lets time pass: the only wait there is for a TTL.
    pub async fn pass(&self, time: Duration) {
        let until = self.now().saturating_add(time);
        self.clock().sleep_until(until).await;
    }

    /// Looks again and again until a look shows what is awaited.
    pub async fn until(&self, what: &str, mut look: impl AsyncFnMut() -> bool) {
        let give_up = self.now().saturating_add(WATCHDOG.max(self.ttl() * 10));
        while !look().await {
            assert!(self.now() < give_up, "waited in vain until {what}");
            self.pass(Duration::from_millis(2)).await;
        }
    }

    /// Asks again and again until the answer is no error.
    pub async fn until_ok<T>(&self, what: &str, mut ask: impl AsyncFnMut() -> lockcore::Result<T>) -> T {
        let mut answer = None;
        self.until(what, async || {
            answer = ask().await.ok();
            answer.is_some()
        })
        .await;
        // `until` ends with an answer or a panic.
        answer.expect("just answered")
    }

    /// Reads who holds, around the code under test.
    pub async fn holder(&self, name: &LockName) -> Option<OwnerDigest> {
        self.stage.service.holder(name).await
    }

    /// Removes the record, as an operator might, and tells the history.
    pub async fn steal(&self, name: &LockName) {
        let fault = self.stage.recorder.fault("delete", "server", name.as_str(), FaultClass::A6, "");
        self.stage.service.steal(name).await;
        fault.end("the record was removed by a second road");
    }

    /// Counts the waiters that stand in the store's queue; the case needs `Queue`.
    pub async fn queued(&self, name: &LockName) -> u32 {
        self.stage.service.queued(name).await.expect("the case needs `Queue`")
    }

    /// Counts the waiters in the store's queue, if it has one that can be looked at.
    pub async fn queue_of(&self, name: &LockName) -> Option<u32> {
        self.stage.service.queued(name).await
    }

    /// Returns the switches for requests and replies: of the service, or of the proxies before its servers, or else at the
    /// backend's door. What the backend itself makes of a reply that is late is seen only on a wire; such a case needs `Wire`.
    pub fn wire(&self) -> &dyn Wire {
        self.stage.service.wire().unwrap_or(&*self.stage.door)
    }

    /// Returns power over the servers; the case needs `Servers`.
    pub fn servers(&self) -> &dyn Servers {
        self.stage.service.power().expect("the case needs `Servers`")
    }

    /// Kills a server, and tells the history.
    pub async fn kill(&self, server: usize) -> FaultLog {
        let fault = self.fault("kill", &format!("server {server}"), FaultClass::A2);
        self.servers().kill(server).await;
        fault
    }

    /// Stops a server, and tells the history.
    pub async fn stop(&self, server: usize) -> FaultLog {
        let fault = self.fault("pause", &format!("server {server}"), FaultClass::A1);
        self.servers().stop(server).await;
        fault
    }

    /// Begins a fault of the history.
    pub fn fault(&self, what: &str, target: &str, class: FaultClass) -> FaultLog {
        self.stage.recorder.fault(what, target, "", class, "by the suite")
    }

    /// Starts a client in a process of its own; the case needs `Processes`.
    pub async fn child(&self, name: &str) -> Child {
        let address = self.stage.service.address().expect("the case needs `Processes`");
        Child::start(self, name, &address).await
    }

    /// Changes under which rules the checker judges this history.
    pub fn judge(&self, change: impl FnOnce(Rules) -> Rules) {
        let mut rules = self.stage.rules.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        *rules = change(std::mem::take(&mut *rules));
    }

    /// Hands in a number for the report, which shows the least, the median and the greatest of each `what`. It judges
    /// nothing. `unit` is `ms`, `/s` or empty.
    pub fn measure(&self, what: &'static str, value: f64, unit: &'static str) {
        let mut measures = self.stage.measures.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        measures.push((what, value, unit));
    }

    /// Hands in a duration for the report.
    pub fn measure_time(&self, what: &'static str, time: Duration) {
        self.measure(what, time.as_secs_f64() * 1000.0, "ms");
    }

    /// Returns the recorder, for what a case records itself.
    pub fn recorder(&self) -> &Recorder {
        &self.stage.recorder
    }

    /// Draws a number below `limit` from the case's seed; `n` numbers the draw.
    pub fn draw(&self, n: u64, limit: u64) -> u64 {
        self.stage.drew.store(true, Ordering::Relaxed);
        // SplitMix64 of seed and number: the same seed gives the same draws, in whatever order they are made.
        let mut z = self.stage.seed.wrapping_add(n.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit.max(1)
    }
}

/// What must happen in time, once the last fault has ended: generous on a busy machine, exact in virtual time.
fn bounds(capabilities: &Capabilities, virtual_time: bool) -> Bounds {
    let real = |time: Duration| Some(if virtual_time { Duration::from_millis(20) } else { time });
    let wake = match capabilities.wake_up {
        WakeUp::Push => Duration::from_secs(2),
        _ => Duration::from_secs(4),
    };
    Bounds::default().with(|b| {
        b.fair = capabilities.fair;
        b.takeover = real(Duration::from_secs(4));
        b.wake = real(wake);
        b.quiet = real(wake * 2);
        b.wait_slack = Some(Duration::from_millis(if virtual_time { 100 } else { 1000 }));
        b.close = Some(Duration::from_secs(2));
        b.recovery = real(Duration::from_secs(10));
    })
}

/// Polls a future once.
pub(crate) async fn poll_once<F: Future + Unpin>(future: &mut F) -> std::task::Poll<F::Output> {
    std::future::poll_fn(|cx| std::task::Poll::Ready(std::pin::Pin::new(&mut *future).poll(cx))).await
}
