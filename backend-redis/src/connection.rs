//! One connection to the server, made when it is needed and replaced when there is evidence against it.

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use lockcore::backend::{Call, Clock, Error, ErrorKind, Moment, Result, Verb};
use redis::{
    ErrorKind as Said, Pipeline, PushInfo, RedisError, ServerErrorKind, Value, aio::MultiplexedConnection,
};
use tokio::{sync::watch, task::JoinHandle};

use crate::{
    config::RedisConfig,
    error::{self, Phase},
    greeting::{Learnt, greet},
    replicas::Wait,
    wire::Script,
};

/// So many requests in a row without an answer are evidence: the other side is not there any more, or behind something
/// that swallows what is sent to it.
const SILENCES: u32 = 2;

/// An answer that did not come within less than this is no evidence.
const LEAST_PATIENCE: Duration = Duration::from_millis(20);

pub(crate) type Push = Arc<dyn Fn(PushInfo) + Send + Sync>;

/// The one connection of its kind that a backend has. Connects on first use; calls that arrive meanwhile share the
/// attempt.
pub(crate) struct Connection {
    config: Arc<RedisConfig>,
    /// Of a Cluster, the node.
    node: Option<(String, u16)>,
    push: Option<Push>,
    slot: Mutex<Slot>,
    learnt: Arc<Learnt>,
}

#[derive(Default)]
struct Slot {
    link: Option<Arc<Link>>,
    /// The attempt that is under way. Its task ends with the runtime it was started on; the sender is dropped then.
    attempt: Option<watch::Receiver<Option<Attempt>>>,
    closed: bool,
}

/// How an attempt to connect ended; a failure is told to several callers.
pub(crate) type Attempt = Result<Arc<Link>, (ErrorKind, String, Option<RedisError>)>;

impl Connection {
    pub(crate) fn new(config: Arc<RedisConfig>, node: Option<(String, u16)>, learnt: Arc<Learnt>) -> Self {
        Self { config, node, push: None, slot: Mutex::default(), learnt }
    }

    /// Hands what the server says unasked to `push`, which must not block.
    pub(crate) fn listening(config: Arc<RedisConfig>, push: Push) -> Self {
        Self { config, node: None, push: Some(push), slot: Mutex::default(), learnt: Arc::default() }
    }

    /// For a look at one place, whatever answers there.
    pub(crate) fn looking(config: Arc<RedisConfig>, place: (String, u16)) -> Self {
        let push: Push = Arc::new(|_| {});
        Self { config, node: Some(place), push: Some(push), slot: Mutex::default(), learnt: Arc::default() }
    }

    /// Returns the connection that stands, if one does.
    pub(crate) fn standing(&self) -> Option<Arc<Link>> {
        self.slot().link.as_ref().filter(|link| link.is_usable()).cloned()
    }

    /// Returns a connection, making one if none stands, within the time of one exchange.
    ///
    /// # Errors
    /// Nothing was sent: never `Unknown`.
    pub(crate) async fn link(&self, call: &Call) -> Result<Arc<Link>> {
        if call.remaining().is_zero() {
            return Err(Error::new(ErrorKind::Unavailable, "the call was over before anything was sent"));
        }
        // The usual way, without a timer.
        if let Some(link) = self.standing() {
            return Ok(link);
        }
        self.connect(call.exchange_timeout(), call.clock_arc()).await
    }

    pub(crate) async fn connect(&self, patience: Duration, clock: Arc<dyn Clock>) -> Result<Arc<Link>> {
        let connected = tokio::time::timeout(patience, async {
            loop {
                let mut attempt = {
                    let mut slot = self.slot();
                    if slot.closed {
                        return Err(Error::new(ErrorKind::Closed, "the backend was closed"));
                    }
                    if let Some(link) = slot.link.as_ref().filter(|link| link.is_usable()) {
                        return Ok(link.clone());
                    }
                    // In flight on it are requests that may still be answered; it goes with the last of them.
                    slot.link = None;
                    match &slot.attempt {
                        // One that failed for others, who left before they were told, is no news.
                        Some(attempt)
                            if attempt.has_changed().is_ok()
                                && !matches!(*attempt.borrow(), Some(Err(_))) =>
                        {
                            attempt.clone()
                        }
                        _ => {
                            let attempt = self.begin(clock.clone());
                            slot.attempt = Some(attempt.clone());
                            attempt
                        }
                    }
                };
                // An attempt whose runtime ended says nothing; the next turn begins another.
                let Ok(outcome) = attempt.wait_for(Option::is_some).await.map(|outcome| outcome.clone())
                else {
                    continue;
                };
                let mut slot = self.slot();
                if slot.attempt.as_ref().is_some_and(|current| current.same_channel(&attempt)) {
                    slot.attempt = None;
                }
                match outcome {
                    Some(Ok(link)) if link.is_usable() && !slot.closed => {
                        slot.link.get_or_insert_with(|| link.clone());
                        return Ok(link);
                    }
                    Some(Err((kind, message, source))) => {
                        let error = Error::new(kind, message);
                        return Err(match source {
                            Some(source) => error.with_source(source),
                            None => error,
                        });
                    }
                    Some(Ok(_)) | None => {}
                }
            }
        });
        connected.await.unwrap_or_else(|_| {
            Err(Error::new(ErrorKind::Unavailable, "no connection to the server came up in time"))
        })
    }

    fn begin(&self, clock: Arc<dyn Clock>) -> watch::Receiver<Option<Attempt>> {
        let (done, attempt) = watch::channel(None);
        let (config, push, learnt) = (self.config.clone(), self.push.clone(), self.learnt.clone());
        let node = self.node.clone();
        tokio::spawn(async move {
            let greeting = greet(&config, node.as_ref(), push, &learnt, clock);
            let greeted = tokio::time::timeout(config.connect_timeout, greeting).await;
            let outcome = greeted.unwrap_or_else(|_| {
                let message = format!("the server did not greet within {:?}", config.connect_timeout);
                Err((ErrorKind::Unavailable, message, None))
            });
            // Nobody waits for it any more: the connection goes.
            let _ = done.send(Some(outcome));
            // Until somebody has taken it, which a closed channel would look like.
            done.closed().await;
        });
        attempt
    }

    /// Ends the connection; none is made afterwards.
    pub(crate) fn close(&self) {
        let mut slot = self.slot();
        slot.closed = true;
        slot.attempt = None;
        if let Some(link) = slot.link.take() {
            link.task.abort();
        }
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        // The slot is whole between any two of its operations.
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("standing", &self.standing().map(|link| link.id))
            .finish_non_exhaustive()
    }
}

#[derive(Debug)]
pub(crate) struct Task(pub(crate) JoinHandle<()>);

impl Task {
    fn abort(&self) {
        self.0.abort();
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// What goes around a script.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct How<'a> {
    /// The node of a Cluster that is asked is about to get the slot.
    pub(crate) asking: bool,
    /// Replicas are waited for.
    pub(crate) wait: Option<&'a Wait>,
}

/// What a script answered, and what the server said about its replicas, where it was asked.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) value: Value,
    pub(crate) acknowledged: Option<Value>,
}

/// One connection, from its greeting to its end.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) id: u64,
    connection: MultiplexedConnection,
    task: Task,
    condemned: AtomicBool,
    silences: AtomicU32,
    /// The server's clock in microseconds, and a moment before the request that told it.
    seen: Mutex<(u64, Moment)>,
}

impl Link {
    /// Starts from a connection that was greeted: what its clock said, and a moment before it was asked.
    pub(crate) fn new(connection: MultiplexedConnection, task: Task, us: u64, asked: Moment) -> Self {
        static IDS: AtomicU64 = AtomicU64::new(1);
        Self {
            id: IDS.fetch_add(1, Ordering::Relaxed),
            connection,
            task,
            condemned: AtomicBool::new(false),
            silences: AtomicU32::new(0),
            seen: Mutex::new((us, asked)),
        }
    }

    /// Says whether requests may be sent: nothing speaks against it, and its task runs. The task ends when the server
    /// closes the connection, and with the runtime that it was started on.
    pub(crate) fn is_usable(&self) -> bool {
        !self.condemned.load(Ordering::Relaxed) && !self.task.0.is_finished()
    }

    /// Estimates the server's clock at a moment: never too early, and too late by no more than a round trip, as long as
    /// that clock does not step.
    pub(crate) fn server_time(&self, at: Moment) -> u64 {
        let (us, seen) = *self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let micros = |d: Duration| u64::try_from(d.as_micros()).unwrap_or(u64::MAX);
        // No script counts higher.
        us.saturating_add(micros(seen.until(at)).saturating_add(1))
            .saturating_sub(micros(at.until(seen)))
            .min(1 << 53)
    }

    /// Moves the estimate of the server's clock, as a step of that clock would.
    #[cfg(test)]
    pub(crate) fn misjudge(&self, by: i64) {
        let mut seen = self.seen.lock().unwrap();
        seen.0 = seen.0.saturating_add_signed(by);
    }

    /// Takes what an answer says about the server's clock.
    pub(crate) fn saw(&self, us: u64, sent: Moment) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if sent >= seen.1 {
            *seen = (us, sent);
        }
    }

    /// Runs a script: by its digest, and by its text on a server that does not know it (it was restarted, or its
    /// scripts were flushed). Returns when the request left that was answered.
    pub(crate) async fn script(
        &self,
        call: &Call,
        script: &Script,
        keys: &[&str],
        args: &[&[u8]],
        how: How<'_>,
    ) -> (Moment, Result<Ran, RedisError>) {
        let build = |command: &str, script: &str| {
            let mut command = redis::cmd(command);
            command.arg(script).arg(keys.len()).arg(keys);
            for arg in args {
                command.arg(*arg);
            }
            command
        };
        let (mut sent, mut ran) = self.run(call, build("EVALSHA", script.digest()), how).await;
        if ran.as_ref().is_err_and(|e| e.kind() == Said::Server(ServerErrorKind::NoScript)) {
            (sent, ran) = self.run(call, build("EVAL", script.source()), how).await;
        }
        (sent, ran)
    }

    /// Sends one script with what goes around it: all in one piece, so that nothing of somebody else comes between.
    async fn run(&self, call: &Call, script: redis::Cmd, how: How<'_>) -> (Moment, Result<Ran, RedisError>) {
        if !how.asking && how.wait.is_none() {
            let (sent, reply) = self.ask(call, &script).await;
            return (sent, reply.map(|value| Ran { value, acknowledged: None }));
        }
        let mut pipeline = redis::pipe();
        if how.asking {
            pipeline.cmd("ASKING");
        }
        pipeline.add_command(script);
        if let Some(wait) = how.wait {
            pipeline.add_command(wait.command(call));
        }
        let count = 1 + usize::from(how.asking) + usize::from(how.wait.is_some());
        let (sent, replies) = self.ask_many(call, &pipeline, count).await;
        let ran = replies.and_then(|replies| {
            let mut replies = replies.into_iter().skip(usize::from(how.asking));
            match replies.next().unwrap_or_default() {
                Value::ServerError(refusal) => Err(self.judge(refusal.into(), Duration::ZERO)),
                value => Ok(Ran { value, acknowledged: replies.next() }),
            }
        });
        (sent, ran)
    }

    /// Runs one script many times in one round trip; answers in order, and what the replicas acknowledged of all.
    pub(crate) async fn scripts(
        &self,
        call: &Call,
        script: &Script,
        requests: &[(Vec<String>, Vec<Vec<u8>>)],
        wait: Option<&Wait>,
    ) -> (Moment, Result<(Vec<Value>, Option<Value>), RedisError>) {
        let build = |command: &str, script: &str| {
            let mut pipeline = redis::pipe();
            for (keys, args) in requests {
                pipeline.cmd(command).arg(script).arg(keys.len()).arg(keys).arg(args);
            }
            if let Some(wait) = wait {
                pipeline.add_command(wait.command(call));
            }
            pipeline
        };
        let count = requests.len() + usize::from(wait.is_some());
        let is_unknown = |value: &Value| matches!(value, Value::ServerError(e) if e.code() == "NOSCRIPT");
        let (mut sent, mut replies) = self.ask_many(call, &build("EVALSHA", script.digest()), count).await;
        // All or nearly all are unknown then, and each script may run twice.
        if replies.as_ref().is_ok_and(|replies| replies.iter().any(is_unknown)) {
            (sent, replies) = self.ask_many(call, &build("EVAL", script.source()), count).await;
        }
        let parted = replies.map(|mut replies| {
            let acknowledged = wait.and_then(|_| replies.pop());
            for reply in &replies {
                if let Value::ServerError(refusal) = reply {
                    self.judge(refusal.clone().into(), Duration::ZERO);
                }
            }
            (replies, acknowledged)
        });
        (sent, parted)
    }

    /// Sends one command that is no script.
    pub(crate) async fn command(&self, call: &Call, command: &redis::Cmd) -> Result<Value> {
        self.ask(call, command).await.1.map_err(|e| error::error(Phase::Sent, e))
    }

    /// Sends commands in one round trip; refusals stand among the answers.
    pub(crate) async fn commands(
        &self,
        call: &Call,
        pipeline: &Pipeline,
        count: usize,
    ) -> Result<Vec<Value>> {
        self.ask_many(call, pipeline, count).await.1.map_err(|e| error::error(Phase::Sent, e))
    }

    pub(crate) async fn subscribe(&self, call: &Call, channel: &str) -> Result<()> {
        let (mut connection, watch) = self.exchange(call);
        watch.end(connection.subscribe(channel).await).map_err(|e| error::error(Phase::Sent, e))
    }

    pub(crate) async fn unsubscribe(&self, call: &Call, channels: &[Arc<str>]) -> Result<()> {
        let channels: Vec<&str> = channels.iter().map(|channel| &**channel).collect();
        let (mut connection, watch) = self.exchange(call);
        watch.end(connection.unsubscribe(channels).await).map_err(|e| error::error(Phase::Sent, e))
    }

    async fn ask(&self, call: &Call, command: &redis::Cmd) -> (Moment, Result<Value, RedisError>) {
        let (mut connection, watch) = self.exchange(call);
        let sent = watch.sent;
        let reply = match connection.send_packed_command(command).await {
            Ok(Value::ServerError(refusal)) => Err(refusal.into()),
            reply => reply,
        };
        (sent, watch.end(reply))
    }

    async fn ask_many(
        &self,
        call: &Call,
        pipeline: &Pipeline,
        count: usize,
    ) -> (Moment, Result<Vec<Value>, RedisError>) {
        let (mut connection, watch) = self.exchange(call);
        let sent = watch.sent;
        (sent, watch.end(connection.send_packed_commands(pipeline, 0, count).await))
    }

    fn exchange<'a>(&'a self, call: &'a Call) -> (MultiplexedConnection, Watch<'a>) {
        let patience = call.exchange_timeout();
        let mut connection = self.connection.clone();
        connection.set_response_timeout(patience);
        (connection, Watch { link: self, call, sent: call.now(), patience, over: false })
    }

    /// Takes what speaks against this connection.
    fn judge(&self, error: RedisError, patience: Duration) -> RedisError {
        let demoted = error.kind() == Said::Server(ServerErrorKind::ReadOnly);
        if error.is_timeout() {
            self.silent(patience);
        } else {
            self.silences.store(0, Ordering::Relaxed);
            if demoted || error.is_connection_dropped() {
                self.condemned.store(true, Ordering::Relaxed);
            }
        }
        error
    }

    fn silent(&self, patience: Duration) {
        // The rest of a budget that is nearly over says nothing about the other side.
        if patience < LEAST_PATIENCE {
            return;
        }
        if self.silences.fetch_add(1, Ordering::Relaxed) + 1 >= SILENCES {
            self.condemned.store(true, Ordering::Relaxed);
        }
    }
}

/// Watches one exchange. A caller that gives up when the time is over leaves the same evidence as a timer that rings.
struct Watch<'a> {
    link: &'a Link,
    call: &'a Call,
    sent: Moment,
    patience: Duration,
    over: bool,
}

impl Watch<'_> {
    fn end<T>(mut self, reply: Result<T, RedisError>) -> Result<T, RedisError> {
        self.over = true;
        match reply {
            Ok(value) => {
                self.link.silences.store(0, Ordering::Relaxed);
                Ok(value)
            }
            Err(error) => Err(self.link.judge(error, self.patience)),
        }
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if !self.over && self.sent.until(self.call.now()) >= self.patience.mul_f64(0.9) {
            self.link.silent(self.patience);
        }
    }
}

/// Names what was being done, on this backend.
pub(crate) fn connecting(error: Error) -> Error {
    error.about(Verb::Connect, None, crate::backend::BACKEND)
}
