//! The thread on which the file is used: SQLite blocks, tasks must not.
//!
//! One thread and one queue a backend. The order of the queue is a promise: what is abandoned after an acquire was
//! dropped runs after it, so nothing of it can come later.

use std::{
    process,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::Duration,
};

use lockcore::backend::{Call, Error, ErrorKind, Moment, Result};
use tokio::sync::oneshot;

use super::{
    config::SqliteConfig,
    error::Failure,
    open::{self, Opened},
    place::{FileId, FileSystem, Place},
    wire::{self, Store, be_patient},
};

/// How often a backend looks for idle rows, and how many go in one transaction: few, so nobody waits for long.
const COLLECT_EVERY: Duration = Duration::from_secs(3600);
const COLLECT_PAGE: i64 = 128;

/// Why a job did not give an answer.
pub(super) enum Stop {
    /// SQLite said no.
    Failed(Failure),
    /// We did.
    Refused(Error),
}

impl From<Failure> for Stop {
    fn from(failure: Failure) -> Self {
        Self::Failed(failure)
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Refused(error)
    }
}

/// Whether a job still has a purpose when nobody waits for its answer any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Asker {
    /// It has not.
    MayLeave,
    /// It has: it ends something.
    CleansUp,
}

type Job = Box<dyn FnOnce(&mut Desk) + Send>;

/// What the thread has before it.
pub(super) struct Desk {
    pub(super) store: Store,
    config: SqliteConfig,
    file: FileId,
    /// Ends of channels that are dropped once the file is closed.
    closers: Vec<oneshot::Sender<()>>,
}

impl Desk {
    /// Says whether the path still leads to the file that is open.
    pub(super) fn file_is_in_place(&self) -> bool {
        FileId::of(&self.config.path).is_ok_and(|file| file == self.file)
    }

    /// Deletes all rows that were idle for longer than the configured time.
    pub(super) fn collect(&mut self) -> Result<usize, Failure> {
        let idle = i64::try_from(self.config.idle.as_secs()).unwrap_or(i64::MAX);
        let before = (wire::micros_since_1970() / 1_000_000).saturating_sub(idle);
        let mut total = 0;
        loop {
            let deleted = self.store.collect(before, COLLECT_PAGE)?;
            total += deleted;
            if deleted < COLLECT_PAGE as usize {
                return Ok(total);
            }
        }
    }

    // A failure is no news: the next hour tries again, and the calls meet it themselves.
    fn collect_when_due(&mut self) {
        be_patient(self.config.busy);
        let now = wire::micros_since_1970() / 1_000_000;
        let due = self.store.collected().is_ok_and(|last| now.saturating_sub(last) >= 86_400);
        if due {
            let _ = self.collect();
        }
    }
}

/// A handle on the thread. The thread ends when the last handle is gone or one is closed.
#[derive(Debug)]
pub(super) struct Worker {
    queue: Sender<Job>,
    closed: Arc<AtomicBool>,
    process: u32,
    busy: Duration,
    /// What the file lies on.
    pub(super) place: FileSystem,
}

impl Worker {
    /// Starts the thread and opens the file on it.
    ///
    /// # Errors
    /// As for [`open::open`].
    pub(super) async fn start(config: SqliteConfig) -> Result<Self> {
        let (queue, jobs) = channel();
        let (ready, opened) = oneshot::channel();
        let closed = Arc::new(AtomicBool::new(false));
        let busy = config.busy;
        let flag = closed.clone();
        thread::Builder::new()
            .name("lockcore-sqlite".into())
            .spawn(move || work(config, ready, &jobs, &flag))
            .map_err(|e| Error::new(ErrorKind::Unavailable, "no thread could be started").with_source(e))?;
        let place = opened.await.unwrap_or_else(|_| Err(gone()))?;
        Ok(Self { queue, closed, process: process::id(), busy, place: place.file_system })
    }

    /// Runs a job in its turn, again and again while another process has the file and `end` has not come; returns when it
    /// was asked for, and the answer.
    ///
    /// A job that comes up after `end` does nothing, and neither does one whose asker is gone, unless it cleans up.
    ///
    /// # Errors
    /// What the job says. `Unavailable`: its time was over before it ran. `Closed`: the backend was closed before it
    /// ran. `Unknown`: the thread died.
    pub(super) async fn ask<T, J>(
        &self,
        call: &Call,
        end: Moment,
        asker: Asker,
        job: J,
    ) -> Result<(Moment, T)>
    where
        T: Send + 'static,
        J: Fn(&mut Desk) -> Result<T, Stop> + Clone + Send + 'static,
    {
        // Also where the file was busy at first: what a store needs to answer is the holder's to bear, here as elsewhere.
        let sent = call.now();
        loop {
            let (call_there, job_there, busy) = (call.clone(), job.clone(), self.busy);
            let (reply, answer) = oneshot::channel();
            self.send(Box::new(move |desk| {
                if asker == Asker::MayLeave && reply.is_closed() {
                    return;
                }
                let left = call_there.now().until(end);
                let outcome = if left.is_zero() && call_there.now() > end {
                    Err(Stop::Refused(late()))
                } else {
                    be_patient(busy.min(left));
                    match job_there(desk) {
                        // A full disk must not end leases: what changes a row needs no room once the log starts anew.
                        Err(Stop::Failed(failure)) if failure.is_full() => match desk.store.make_room() {
                            Ok(true) => job_there(desk),
                            Ok(false) | Err(_) => Err(Stop::Failed(failure)),
                        },
                        outcome => outcome,
                    }
                };
                let _ = reply.send(outcome);
            }))?;
            match self.wait(answer).await? {
                Ok(answer) => return Ok((sent, answer)),
                Err(Stop::Failed(failure)) if failure.is_busy() && call.now() < end => {}
                Err(Stop::Failed(failure)) => return Err(failure.into()),
                Err(Stop::Refused(error)) => return Err(error),
            }
        }
    }

    /// Puts a job into the queue that nobody waits for.
    pub(super) fn leave(&self, call: &Call, job: impl FnOnce(&mut Desk) + Send + 'static) {
        let left = self.busy.min(call.remaining());
        // A closed backend has nothing to clean up with; the TTL does it.
        let _ = self.send(Box::new(move |desk| {
            be_patient(left);
            job(desk);
        }));
    }

    /// Ends the thread after what is queued, and waits until the file is closed.
    pub(super) async fn close(&self) {
        let (reply, answer) = oneshot::channel::<()>();
        let closed = self.closed.clone();
        let asked = self.send(Box::new(move |desk| {
            closed.store(true, Ordering::Release);
            desk.closers.push(reply);
        }));
        if asked.is_ok() {
            let _ = answer.await;
        }
    }

    fn send(&self, job: Job) -> Result<()> {
        if self.process != process::id() {
            return Err(Error::new(
                ErrorKind::Misconfigured,
                "this process was forked off the one that opened the file; open it anew after a fork",
            ));
        }
        if self.closed.load(Ordering::Acquire) {
            return Err(closed());
        }
        self.queue.send(job).map_err(|_| self.end())
    }

    async fn wait<T>(&self, answer: oneshot::Receiver<T>) -> Result<T> {
        answer.await.map_err(|_| self.end())
    }

    // A closed thread drops what is queued unrun; a thread that died may have died in a commit.
    fn end(&self) -> Error {
        if self.closed.load(Ordering::Acquire) { closed() } else { gone() }
    }
}

fn work(
    config: SqliteConfig,
    ready: oneshot::Sender<Result<Place>>,
    jobs: &Receiver<Job>,
    closed: &AtomicBool,
) {
    let Opened { store, place, file } = match open::open(&config) {
        Ok(opened) => opened,
        Err(error) => {
            let _ = ready.send(Err(error));
            return;
        }
    };
    let mut desk = Desk { store, config, file, closers: Vec::new() };
    if ready.send(Ok(place)).is_err() {
        return;
    }
    let mut first = true;
    while !closed.load(Ordering::Acquire) {
        // Short-lived processes must collect, too, but not before their first call.
        let nap = if first { Duration::from_millis(200) } else { COLLECT_EVERY };
        match jobs.recv_timeout(nap) {
            Ok(job) => job(&mut desk),
            Err(RecvTimeoutError::Timeout) => {
                first = false;
                desk.collect_when_due();
            }
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    let Desk { store, closers, .. } = desk;
    drop(store);
    drop(closers);
}

fn late() -> Error {
    Error::new(ErrorKind::Unavailable, "the call was over before its turn came; nothing was sent to the file")
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the backend was closed")
}

fn gone() -> Error {
    Error::new(ErrorKind::Unknown, "the thread that uses the file is gone")
}
