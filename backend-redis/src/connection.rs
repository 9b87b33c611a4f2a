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
    AsyncConnectionConfig, ErrorKind as Said, Pipeline, ProtocolVersion, PushInfo, RedisConnectionInfo,
    RedisError, ServerErrorKind, Value,
    aio::MultiplexedConnection,
    io::tcp::socket2::{SockRef, TcpKeepalive},
};
use tokio::{
    net::{TcpStream, UnixStream},
    sync::watch,
    task::JoinHandle,
};

use crate::{
    config::{Address, RedisConfig},
    error::{self, Phase},
    wire::{Answer, Script},
};

/// So many requests in a row without an answer are evidence: the other side is not there any more, or behind something
/// that swallows what is sent to it.
const SILENCES: u32 = 2;

/// An answer that did not come within less than this is no evidence.
const LEAST_PATIENCE: Duration = Duration::from_millis(20);

/// Never more than this on the way to a server that does not take it.
const USER_TIMEOUT: Duration = Duration::from_secs(10);

type Push = Arc<dyn Fn(PushInfo) + Send + Sync>;

/// The one connection of its kind that a backend has. Connects on first use; calls that arrive meanwhile share the
/// attempt.
pub(crate) struct Connection {
    config: RedisConfig,
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

type Attempt = Result<Arc<Link>, (ErrorKind, String, Option<RedisError>)>;

/// What greetings told about the server.
#[derive(Debug, Default)]
pub(crate) struct Learnt {
    forgets: AtomicBool,
}

impl Learnt {
    /// Says whether a restart of the server loses what it acknowledged, as far as anybody looked.
    pub(crate) fn forgets(&self) -> bool {
        self.forgets.load(Ordering::Relaxed)
    }

    pub(crate) fn set_forgets(&self, forgets: bool) {
        self.forgets.store(forgets, Ordering::Relaxed);
    }
}

impl Connection {
    pub(crate) fn new(config: RedisConfig, learnt: Arc<Learnt>) -> Self {
        Self { config, push: None, slot: Mutex::default(), learnt }
    }

    /// Hands what the server says unasked to `push`, which must not block.
    pub(crate) fn listening(config: RedisConfig, push: Push) -> Self {
        Self { config, push: Some(push), slot: Mutex::default(), learnt: Arc::default() }
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
        tokio::spawn(async move {
            let greeted = tokio::time::timeout(config.connect_timeout, greet(&config, push, &learnt, clock));
            let outcome = greeted.await.unwrap_or_else(|_| {
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

fn refused(source: RedisError) -> (ErrorKind, String, Option<RedisError>) {
    let error = error::error(Phase::Connect, source.clone());
    (error.kind(), error.message().to_owned(), Some(source))
}

/// Connects, lets the client library say hello, and asks for the time, the role and how the disk is used.
async fn greet(config: &RedisConfig, push: Option<Push>, learnt: &Learnt, clock: Arc<dyn Clock>) -> Attempt {
    let io = |e: std::io::Error| refused(RedisError::from(e));
    let mut settings = RedisConnectionInfo::default()
        .set_protocol(ProtocolVersion::RESP3)
        .set_db(config.db.into())
        .set_lib_name("lockcore", env!("CARGO_PKG_VERSION"));
    if let Some(user) = &config.user {
        settings = settings.set_username(user);
    }
    if let Some(password) = &config.password {
        settings = settings.set_password(password);
    }
    let mut options = AsyncConnectionConfig::new().set_response_timeout(Some(config.connect_timeout));
    let listens = push.is_some();
    if let Some(push) = push {
        options = options.set_push_sender(move |info: PushInfo| -> Result<(), std::convert::Infallible> {
            push(info);
            Ok(())
        });
    }
    let (mut connection, task) = match &config.address {
        Address::Tcp(host, port) => {
            let stream = TcpStream::connect((host.as_str(), *port)).await.map_err(io)?;
            // Without it a request waits for the acknowledgement of the one before.
            stream.set_nodelay(true).map_err(io)?;
            let socket = SockRef::from(&stream);
            let keepalive =
                TcpKeepalive::new().with_time(Duration::from_secs(10)).with_interval(Duration::from_secs(5));
            socket.set_tcp_keepalive(&keepalive).map_err(io)?;
            #[cfg(target_os = "linux")]
            socket.set_tcp_user_timeout(Some(USER_TIMEOUT)).map_err(io)?;
            let (connection, driver) =
                MultiplexedConnection::new_with_config(&settings, stream, options).await.map_err(refused)?;
            (connection, tokio::spawn(driver))
        }
        Address::Unix(path) => {
            let stream = UnixStream::connect(path).await.map_err(io)?;
            let (connection, driver) =
                MultiplexedConnection::new_with_config(&settings, stream, options).await.map_err(refused)?;
            (connection, tokio::spawn(driver))
        }
    };
    // From here on the task ends with the link, also when the greeting fails.
    let task = Task(task);

    let mut hello = redis::pipe();
    hello.cmd("TIME");
    hello.cmd("ROLE");
    hello.cmd("INFO").arg("persistence");
    hello.cmd("CONFIG").arg("GET").arg("appendfsync");
    let asked = clock.now();
    let replies = connection.send_packed_commands(&hello, 0, 4).await.map_err(refused)?;
    let mut replies = replies.into_iter();
    let mut next = || replies.next().unwrap_or_default();
    let us = match next() {
        Value::ServerError(error) => return Err(refused(error.into())),
        time => server_time(&time).ok_or_else(|| {
            refused(RedisError::from((Said::UnexpectedReturnType, "TIME answered with something else")))
        })?,
    };
    // What a role may not be asked for, its scripts will tell.
    let role = match next() {
        Value::Array(role) => text(role.into_iter().next()),
        _ => None,
    };
    match role.as_deref() {
        Some("slave") if !listens => {
            return Err((
                ErrorKind::Unavailable,
                "the server is a replica; locks are taken at its master".into(),
                None,
            ));
        }
        Some("sentinel") => {
            return Err((
                ErrorKind::Misconfigured,
                "the server is a Sentinel; this backend is given the address of the server itself".into(),
                None,
            ));
        }
        Some(_) | None => {}
    }
    let (persistence, fsync) = (text(Some(next())), config_value(next()));
    learnt.set_forgets(!keeps(persistence.as_deref(), fsync.as_deref()));

    static IDS: AtomicU64 = AtomicU64::new(1);
    Ok(Arc::new(Link {
        id: IDS.fetch_add(1, Ordering::Relaxed),
        connection,
        task,
        condemned: AtomicBool::new(false),
        silences: AtomicU32::new(0),
        seen: Mutex::new((us, asked)),
    }))
}

/// Says whether everything acknowledged is on the disk before the acknowledgement.
pub(crate) fn keeps(persistence: Option<&str>, fsync: Option<&str>) -> bool {
    let appends = persistence.is_some_and(|info| info.lines().any(|line| line.trim() == "aof_enabled:1"));
    appends && fsync == Some("always")
}

pub(crate) fn text(value: Option<Value>) -> Option<String> {
    match value {
        Some(Value::BulkString(bytes)) => String::from_utf8(bytes).ok(),
        Some(Value::SimpleString(text) | Value::VerbatimString { text, .. }) => Some(text),
        _ => None,
    }
}

/// Reads what `CONFIG GET` answered for one name.
pub(crate) fn config_value(value: Value) -> Option<String> {
    match value {
        Value::Map(pairs) => pairs.into_iter().next().and_then(|(_, value)| text(Some(value))),
        Value::Array(items) => text(items.into_iter().nth(1)),
        _ => None,
    }
}

pub(crate) fn server_time(value: &Value) -> Option<u64> {
    let Value::Array(parts) = value else { return None };
    let number = |at: usize| text(parts.get(at).cloned())?.parse::<u64>().ok();
    Some(number(0)? * 1_000_000 + number(1)?)
}

#[derive(Debug)]
struct Task(JoinHandle<()>);

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

    fn saw(&self, us: u64, sent: Moment) {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if sent >= seen.1 {
            *seen = (us, sent);
        }
    }

    /// Runs a script: by its digest, and by its text on a server that does not know it (it was restarted, or its
    /// scripts were flushed). Returns when the request left that was answered.
    pub(crate) async fn run(
        &self,
        call: &Call,
        script: &Script,
        keys: &[&str],
        args: &[&[u8]],
    ) -> Result<(Moment, Answer)> {
        let build = |command: &str, script: &str| {
            let mut command = redis::cmd(command);
            command.arg(script).arg(keys.len()).arg(keys);
            for arg in args {
                command.arg(*arg);
            }
            command
        };
        let (mut sent, mut reply) = self.ask(call, &build("EVALSHA", script.digest())).await;
        if reply.as_ref().is_err_and(|e| e.kind() == Said::Server(ServerErrorKind::NoScript)) {
            (sent, reply) = self.ask(call, &build("EVAL", script.source())).await;
        }
        let answer = Answer::read(reply.map_err(|e| error::error(Phase::Sent, e))?)?;
        self.saw(answer.us, sent);
        Ok((sent, answer))
    }

    /// Runs one script many times in one round trip; answers in order.
    pub(crate) async fn run_many(
        &self,
        call: &Call,
        script: &Script,
        requests: &[(Vec<String>, Vec<Vec<u8>>)],
    ) -> (Moment, Vec<Result<Answer>>) {
        let build = |command: &str, script: &str| {
            let mut pipeline = redis::pipe();
            for (keys, args) in requests {
                pipeline.cmd(command).arg(script).arg(keys.len()).arg(keys).arg(args);
            }
            pipeline
        };
        let is_unknown = |value: &Value| matches!(value, Value::ServerError(e) if e.code() == "NOSCRIPT");
        let (mut sent, mut replies) =
            self.ask_many(call, &build("EVALSHA", script.digest()), requests.len()).await;
        // All or nearly all are unknown then, and each script may run twice.
        if replies.as_ref().is_ok_and(|replies| replies.iter().any(is_unknown)) {
            (sent, replies) = self.ask_many(call, &build("EVAL", script.source()), requests.len()).await;
        }
        let answers = match replies {
            Ok(replies) => replies
                .into_iter()
                .map(|value| match value {
                    Value::ServerError(refusal) => {
                        Err(error::error(Phase::Sent, self.judge(refusal.into(), Duration::ZERO)))
                    }
                    value => Answer::read(value).inspect(|answer| self.saw(answer.us, sent)),
                })
                .collect(),
            Err(e) => requests.iter().map(|_| Err(error::error(Phase::Sent, e.clone()))).collect(),
        };
        (sent, answers)
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
