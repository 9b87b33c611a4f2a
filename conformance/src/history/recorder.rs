//! Recording: stamps taken around every call, in memory and on disk, by any number of threads and processes.

use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io::{self, Write as _},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use lockcore::{
    Error, Stamp,
    backend::{BootClock, Clock, Moment},
};

use super::{
    Access, Answer, Call, ClockKind, Ended, Event, FaultClass, Header, History, Phase, Rules, StreamLog,
    Verdict, What, Why, file::line,
};

/// Collects events from any number of threads. Clones share one history.
///
/// # Example
/// ```no_run
/// # use lockcore_conformance::history::Recorder;
/// // Several processes may append to the same file.
/// let recorder = Recorder::builder().file("history.jsonl").build()?;
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Recorder {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    clock: Arc<dyn Clock>,
    header: Header,
    /// Unique among the recorders of one boot: a pid may come again, and one process may start two recorders.
    run: String,
    next_op: AtomicU64,
    in_memory: bool,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    events: Vec<Event>,
    file: Option<File>,
    failed: Option<io::Error>,
}

/// Sets up a [`Recorder`].
#[derive(Debug)]
#[must_use = "records nothing until `.build()`"]
pub struct Builder {
    clock: Arc<dyn Clock>,
    kind: ClockKind,
    rules: Option<Rules>,
    about: BTreeMap<String, String>,
    path: Option<PathBuf>,
    in_memory: bool,
}

impl Builder {
    /// Reads stamps on another clock than the one since boot.
    pub fn clock(mut self, clock: Arc<dyn Clock>, kind: ClockKind) -> Self {
        (self.clock, self.kind) = (clock, kind);
        self
    }

    /// Writes down under which rules the history is to be judged.
    pub fn rules(mut self, rules: Rules) -> Self {
        self.rules = Some(rules);
        self
    }

    /// Writes down something about the run: case, backend, seed.
    pub fn about(mut self, what: impl Into<String>, value: impl Into<String>) -> Self {
        self.about.insert(what.into(), value.into());
        self
    }

    /// Appends to a file, besides keeping events in memory.
    pub fn file(mut self, path: impl AsRef<Path>) -> Self {
        self.path = Some(path.as_ref().into());
        self
    }

    /// Keeps nothing in memory: for an application that runs for long.
    pub fn file_only(mut self) -> Self {
        self.in_memory = false;
        self
    }

    /// Starts to record.
    ///
    /// # Errors
    /// The file cannot be opened or written.
    pub fn build(self) -> io::Result<Recorder> {
        let header = Header {
            schema: Header::SCHEMA.into(),
            version: Header::VERSION,
            clock: self.kind,
            pid: std::process::id(),
            boot: boot(),
            rules: self.rules.map(Box::new),
            about: self.about,
        };
        let mut state = State::default();
        if let Some(path) = self.path {
            let mut file = OpenOptions::new().create(true).append(true).open(path)?;
            file.write_all(line(&header).as_bytes())?;
            state.file = Some(file);
        }
        Ok(Recorder {
            shared: Arc::new(Shared {
                clock: self.clock,
                run: format!("{}-{:x}", header.pid, BootClock::read().as_nanos()),
                header,
                next_op: AtomicU64::new(1),
                in_memory: self.in_memory,
                state: Mutex::new(state),
            }),
        })
    }
}

fn boot() -> Option<String> {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok().map(|id| id.trim().to_owned())
}

impl Default for Recorder {
    fn default() -> Self {
        Self::new()
    }
}

impl Recorder {
    /// Starts to record in memory.
    pub fn new() -> Self {
        // Only a file can fail.
        Self::builder().build().expect("memory needs no file")
    }

    /// Sets up a recorder with a file, another clock, or rules.
    pub fn builder() -> Builder {
        Builder {
            clock: Arc::new(BootClock),
            // Elsewhere the boot clock is a stand-in that may stop in a suspend.
            kind: if cfg!(target_os = "linux") { ClockKind::Boot } else { ClockKind::Monotonic },
            rules: None,
            about: BTreeMap::new(),
            path: None,
            in_memory: true,
        }
    }

    /// Returns now, on the recorder's clock.
    pub fn now(&self) -> Moment {
        self.shared.clock.now()
    }

    /// Records for one client.
    pub fn client(&self, name: impl Into<String>) -> ClientLog {
        ClientLog { recorder: self.clone(), name: Arc::from(name.into()) }
    }

    /// Records for one resource that the lock `key` guards.
    pub fn resource(&self, key: impl Into<String>, resource: impl Into<String>) -> ResourceLog {
        ResourceLog { recorder: self.clone(), key: key.into(), resource: resource.into(), next: 1 }
    }

    /// Records the events of a lockcore client as they come out of its event stream.
    pub fn stream(&self, client: impl Into<String>) -> StreamLog {
        StreamLog::new(self.client(client))
    }

    /// Records that a fault begins; call [`FaultLog::end`] when a probe has seen its end.
    pub fn fault(
        &self,
        name: impl Into<String>,
        target: impl Into<String>,
        key: impl Into<String>,
        class: FaultClass,
        confirmed_by: impl Into<String>,
    ) -> FaultLog {
        let log = FaultLog {
            recorder: self.clone(),
            name: name.into(),
            target: target.into(),
            key: key.into(),
            class,
        };
        log.record(Phase::Begin, confirmed_by.into());
        log
    }

    /// Records a look at the store: `since` was read before the question left.
    pub fn probe(&self, key: impl Into<String>, since: Moment, fill: impl FnOnce(&mut What)) {
        let mut what = What::Probe {
            since,
            holder: None,
            remaining: None,
            residue: None,
            records: None,
            server_time: None,
            counter: None,
        };
        fill(&mut what);
        self.record(Event { key: key.into(), ..self.event(what) });
    }

    /// Records something for people.
    pub fn note(&self, text: impl Into<String>) {
        self.record(self.event(What::Note { text: text.into() }));
    }

    /// Watches for stalls of this process until the meter is dropped: a thread sleeps 5 ms at a time and records
    /// when it woke later than `least`.
    ///
    /// # Errors
    /// The system has no thread left.
    pub fn meter_stalls(&self, least: Duration) -> io::Result<StallMeter> {
        const STEP: Duration = Duration::from_millis(5);
        let (stop, stopped) = mpsc::channel::<()>();
        let recorder = self.clone();
        // The clock since boot, also when the history runs on another: a stall is a matter of the machine.
        let thread = thread::Builder::new().name("stall meter".into()).spawn(move || {
            loop {
                let before = BootClock::read();
                if stopped.recv_timeout(STEP) != Err(mpsc::RecvTimeoutError::Timeout) {
                    return;
                }
                let late = before.until(BootClock::read()).saturating_sub(STEP);
                if late >= least {
                    recorder.record(recorder.event(What::Stall { ns: late }));
                }
            }
        })?;
        Ok(StallMeter { stop: Some(stop), thread: Some(thread) })
    }

    /// Records an event as it is.
    pub fn record(&self, event: Event) {
        let mut state = self.lock();
        if let Some(file) = &mut state.file
            && let Err(error) = file.write_all(line(&event).as_bytes())
        {
            // The first error tells why; a history with a hole must not look whole, so nothing more is written.
            state.failed = Some(error);
            state.file = None;
        }
        if self.shared.in_memory {
            state.events.push(event);
        }
    }

    /// Returns what this process has recorded so far.
    pub fn history(&self) -> History {
        History::new(vec![self.shared.header.clone()], self.lock().events.clone())
    }

    /// Says whether everything has reached the file.
    ///
    /// # Errors
    /// The first error of a write; nothing was written after it.
    pub fn flushed(&self) -> io::Result<()> {
        let mut state = self.lock();
        match state.failed.take() {
            Some(error) => Err(error),
            None => state.file.as_mut().map_or(Ok(()), |file| file.flush()),
        }
    }

    fn event(&self, what: What) -> Event {
        Event {
            ts: self.now(),
            pid: self.shared.header.pid,
            client: String::new(),
            key: String::new(),
            op: String::new(),
            attempt: 0,
            what,
        }
    }

    fn new_op(&self) -> String {
        let number = self.shared.next_op.fetch_add(1, Ordering::Relaxed);
        format!("{}-{number}", self.shared.run)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic between two pushes leaves a vector that is whole.
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Records the calls of one client.
#[derive(Clone, Debug)]
pub struct ClientLog {
    recorder: Recorder,
    name: Arc<str>,
}

impl ClientLog {
    /// Records that a call begins, as a new operation. Call it right before the call is made.
    pub fn invoke(&self, key: impl Into<String>, call: Call) -> Pending {
        let op = self.recorder.new_op();
        self.invoke_as(key, op, 1, call)
    }

    /// Records that an operation goes on: a recovery, or a call that the caller numbered.
    pub fn invoke_as(
        &self,
        key: impl Into<String>,
        op: impl Into<String>,
        attempt: u32,
        call: Call,
    ) -> Pending {
        let pending = Pending { log: self.clone(), key: key.into(), op: op.into(), attempt, open: true };
        pending.record(What::Invoke { call });
        pending
    }

    /// Records a call that began at `at`, by its operation: for a caller that learns the operation's name from the
    /// answer.
    pub fn record_call(&self, at: Moment, key: &str, op: &str, call: Call) {
        self.record(at, key.to_owned(), op.to_owned(), 1, What::Invoke { call });
    }

    /// Records success of an operation by its name.
    pub fn record_answer(&self, key: &str, op: &str, answer: Answer) {
        self.record(self.now(), key.to_owned(), op.to_owned(), 1, What::Ok { answer });
    }

    /// Records that the application was told of a loss.
    pub fn lost(&self, key: impl Into<String>, stamp: Stamp, why: Ended) {
        let what = What::Lost { fence: stamp.fence, owner: Some(stamp.owner), why };
        self.record(self.recorder.now(), key.into(), String::new(), 0, what);
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn now(&self) -> Moment {
        self.recorder.now()
    }

    pub(super) fn record(&self, ts: Moment, key: String, op: String, attempt: u32, what: What) {
        let pid = self.recorder.shared.header.pid;
        self.recorder.record(Event { ts, pid, client: self.name.to_string(), key, op, attempt, what });
    }
}

/// A call that has begun. Dropped without an outcome, it records that the caller gave up.
#[derive(Debug)]
#[must_use = "dropping it records that the caller gave up"]
pub struct Pending {
    log: ClientLog,
    key: String,
    op: String,
    attempt: u32,
    open: bool,
}

impl Pending {
    /// Returns the operation's name, for a recovery and for the resource.
    pub fn id(&self) -> &str {
        &self.op
    }

    /// Records that a request is about to leave.
    pub fn sent(&self) {
        self.record(What::Sent { wire: false });
    }

    /// Records that a request has left, as a transport or a proxy saw it.
    pub fn sent_on_wire(&self) {
        self.record(What::Sent { wire: true });
    }

    /// Counts the next transmission.
    pub fn retry(&mut self) {
        self.attempt += 1;
    }

    /// Records that the store shows this waiter in its queue.
    pub fn queued(&self) {
        self.record(What::Queued);
    }

    /// Records success.
    pub fn ok(self, answer: Answer) {
        self.close(What::Ok { answer });
    }

    /// Records a failure without effect.
    pub fn fail(self, why: Why) {
        self.close(What::Fail { why });
    }

    /// Records that nobody knows.
    pub fn unknown(self, cause: impl Into<String>) {
        self.close(What::Unknown { cause: cause.into() });
    }

    /// Records what an error says: a failure without effect, or that nobody knows.
    pub fn error(self, error: &Error) {
        match Why::from_kind(error.kind()) {
            Some(why) => self.fail(why),
            None => self.unknown(error.message()),
        }
    }

    fn close(mut self, what: What) {
        self.open = false;
        self.record(what);
    }

    fn record(&self, what: What) {
        let ts = self.log.recorder.now();
        self.log.record(ts, self.key.clone(), self.op.clone(), self.attempt, what);
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if self.open {
            self.record(What::Invoke { call: Call::Cancel });
        }
    }
}

/// Records the judgements of one resource, in the order in which it is called.
///
/// Call it under the resource's own lock or transaction: its order is what the history is about.
#[derive(Debug)]
pub struct ResourceLog {
    recorder: Recorder,
    key: String,
    resource: String,
    next: u64,
}

impl ResourceLog {
    /// Records one judgement.
    pub fn judged(
        &mut self,
        stamp: Stamp,
        op: impl Into<String>,
        access: Access,
        verdict: Verdict,
        floor: Option<Stamp>,
        value: Option<i64>,
    ) {
        let what = What::Resource {
            resource: self.resource.clone(),
            rseq: self.next,
            stamp,
            access,
            verdict,
            floor,
            value,
        };
        self.next += 1;
        self.recorder.record(Event { key: self.key.clone(), op: op.into(), ..self.recorder.event(what) });
    }

    /// Goes on after a restart of the resource, behind what it had judged before.
    pub fn resume_after(&mut self, rseq: u64) {
        self.next = rseq + 1;
    }
}

/// A fault that goes on.
#[derive(Debug)]
#[must_use = "a fault that never ends keeps everything that comes in time from being judged"]
pub struct FaultLog {
    recorder: Recorder,
    name: String,
    target: String,
    key: String,
    class: FaultClass,
}

impl FaultLog {
    /// Records its end.
    pub fn end(self, confirmed_by: impl Into<String>) {
        self.record(Phase::End, confirmed_by.into());
    }

    fn record(&self, phase: Phase, confirmed_by: String) {
        let what = What::Fault {
            name: self.name.clone(),
            target: self.target.clone(),
            phase,
            class: self.class,
            confirmed_by,
        };
        self.recorder.record(Event { key: self.key.clone(), ..self.recorder.event(what) });
    }
}

/// Watches for stalls until it is dropped.
#[derive(Debug)]
pub struct StallMeter {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Drop for StallMeter {
    fn drop(&mut self) {
        self.stop.take();
        if let Some(thread) = self.thread.take() {
            // A meter that panicked has nothing to add.
            let _ = thread.join();
        }
    }
}
