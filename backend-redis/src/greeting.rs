//! The beginning of a connection: a socket, the client library's hello, and a few questions.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    time::Duration,
};

use lockcore::backend::{Clock, Error, ErrorKind};
use redis::{
    AsyncConnectionConfig, ErrorKind as Said, ProtocolVersion, PushInfo, RedisConnectionInfo, RedisError,
    Value,
    aio::MultiplexedConnection,
    io::tcp::socket2::{SockRef, TcpKeepalive},
};
use tokio::net::{TcpStream, UnixStream};

use crate::{
    config::{Address, RedisConfig},
    connection::{Attempt, Link, Push, Task},
    error::{self, Phase},
    sentinel,
};

/// Never more than this on the way to a server that does not take it.
const USER_TIMEOUT: Duration = Duration::from_secs(10);

/// What greetings told about the servers of one backend.
#[derive(Debug, Default)]
pub(crate) struct Learnt {
    forgets: AtomicBool,
    replicas: AtomicU32,
    /// The newest master that a Sentinel named.
    epoch: AtomicU64,
}

impl Learnt {
    /// Says whether a restart of a server loses what it acknowledged, as far as anybody looked.
    pub(crate) fn forgets(&self) -> bool {
        self.forgets.load(Ordering::Relaxed)
    }

    pub(crate) fn set_forgets(&self, forgets: bool) {
        self.forgets.store(forgets, Ordering::Relaxed);
    }

    /// Returns the most replicas that any server had, as far as anybody looked.
    pub(crate) fn replicas(&self) -> u32 {
        self.replicas.load(Ordering::Relaxed)
    }

    pub(crate) fn saw_replicas(&self, replicas: u32) {
        self.replicas.fetch_max(replicas, Ordering::Relaxed);
    }

    /// Starts to count again from an epoch.
    pub(crate) fn forget_epoch(&self, epoch: u64) {
        self.epoch.store(epoch, Ordering::Relaxed);
    }

    /// Takes the epoch of a master; says whether no newer one is known.
    pub(crate) fn saw_epoch(&self, epoch: u64) -> bool {
        self.epoch.fetch_max(epoch, Ordering::Relaxed) <= epoch
    }
}

/// How a connection fails to come up.
pub(crate) type Refusal = (ErrorKind, String, Option<RedisError>);

pub(crate) fn refused(source: RedisError) -> Refusal {
    let error = error::error(Phase::Connect, source.clone());
    (error.kind(), error.message().to_owned(), Some(source))
}

fn plain(error: &Error) -> Refusal {
    (error.kind(), error.message().to_owned(), None)
}

/// Who speaks at a connection.
pub(crate) fn settings(user: Option<&str>, password: Option<&str>, db: u32) -> RedisConnectionInfo {
    let mut settings = RedisConnectionInfo::default()
        .set_protocol(ProtocolVersion::RESP3)
        .set_db(db.into())
        .set_lib_name("lockcore", env!("CARGO_PKG_VERSION"));
    if let Some(user) = user {
        settings = settings.set_username(user);
    }
    if let Some(password) = password {
        settings = settings.set_password(password);
    }
    settings
}

/// Opens a TCP connection, with TLS where the configuration says so, and lets the client library say hello.
pub(crate) async fn open_tcp(
    config: &RedisConfig,
    host: &str,
    port: u16,
    settings: &RedisConnectionInfo,
    options: AsyncConnectionConfig,
) -> Result<(MultiplexedConnection, Task), Refusal> {
    let io = |e: std::io::Error| refused(RedisError::from(e));
    let stream = TcpStream::connect((host, port)).await.map_err(io)?;
    // Without it a request waits for the acknowledgement of the one before.
    stream.set_nodelay(true).map_err(io)?;
    let socket = SockRef::from(&stream);
    let keepalive =
        TcpKeepalive::new().with_time(Duration::from_secs(10)).with_interval(Duration::from_secs(5));
    socket.set_tcp_keepalive(&keepalive).map_err(io)?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(USER_TIMEOUT)).map_err(io)?;
    #[cfg(feature = "tls")]
    if config.tls {
        let stream = crate::tls::wrap(config, host, stream).await?;
        let (connection, driver) =
            MultiplexedConnection::new_with_config(settings, stream, options).await.map_err(refused)?;
        return Ok((connection, Task(tokio::spawn(driver))));
    }
    #[cfg(not(feature = "tls"))]
    let _ = config;
    let (connection, driver) =
        MultiplexedConnection::new_with_config(settings, stream, options).await.map_err(refused)?;
    Ok((connection, Task(tokio::spawn(driver))))
}

/// Connects, lets the client library say hello, and asks for the time, the role and how the disk is used. `node`: of a
/// Cluster, this one.
pub(crate) async fn greet(
    config: &RedisConfig,
    node: Option<&(String, u16)>,
    push: Option<Push>,
    learnt: &Learnt,
    clock: Arc<dyn Clock>,
) -> Attempt {
    if let Some((host, port)) = node {
        return greet_tcp(config, host, *port, push, learnt, clock).await;
    }
    match &config.address {
        Address::Tcp(host, port) => greet_tcp(config, host, *port, push, learnt, clock).await,
        Address::Unix(path) => {
            let io = |e: std::io::Error| refused(RedisError::from(e));
            let stream = UnixStream::connect(path).await.map_err(io)?;
            let (settings, options) = words(config, push.clone())?;
            let (connection, driver) =
                MultiplexedConnection::new_with_config(&settings, stream, options).await.map_err(refused)?;
            hello(config, connection, Task(tokio::spawn(driver)), push.is_some(), learnt, clock).await
        }
        Address::Sentinel { sentinels, master } => {
            sentinel::greet(config, sentinels, master, push, learnt, clock).await
        }
        // Any node hears what is published on any other.
        Address::Cluster(nodes) => {
            let mut last = (ErrorKind::Misconfigured, "a Cluster has nodes".to_owned(), None);
            let end = clock.now().saturating_add(config.connect_timeout);
            for ((host, port), left) in nodes.iter().zip((1..=nodes.len()).rev()) {
                // One that is silent must not use up the time of the others.
                let share = clock.now().until(end) / u32::try_from(left).unwrap_or(u32::MAX);
                let greeting = greet_tcp(config, host, *port, push.clone(), learnt, clock.clone());
                match tokio::time::timeout(share, greeting).await {
                    Ok(Ok(link)) => return Ok(link),
                    Ok(Err(refusal)) => last = refusal,
                    Err(_) => {
                        let silent = format!("the node {host}:{port} did not greet within {share:.1?}");
                        last = (ErrorKind::Unavailable, silent, None);
                    }
                }
            }
            Err(last)
        }
    }
}

/// Greets the server at one address.
pub(crate) async fn greet_tcp(
    config: &RedisConfig,
    host: &str,
    port: u16,
    push: Option<Push>,
    learnt: &Learnt,
    clock: Arc<dyn Clock>,
) -> Attempt {
    let (settings, options) = words(config, push.clone())?;
    let (connection, task) = open_tcp(config, host, port, &settings, options).await?;
    hello(config, connection, task, push.is_some(), learnt, clock).await
}

fn words(
    config: &RedisConfig,
    push: Option<Push>,
) -> Result<(RedisConnectionInfo, AsyncConnectionConfig), Refusal> {
    let password = config.current_password().map_err(|error| plain(&error))?;
    let settings = settings(config.user.as_deref(), password.as_deref(), config.db);
    let mut options = AsyncConnectionConfig::new().set_response_timeout(Some(config.connect_timeout));
    if let Some(push) = push {
        options = options.set_push_sender(move |info: PushInfo| -> Result<(), std::convert::Infallible> {
            push(info);
            Ok(())
        });
    }
    Ok((settings, options))
}

/// The task ends with the link, also when the greeting fails.
async fn hello(
    config: &RedisConfig,
    mut connection: MultiplexedConnection,
    task: Task,
    listens: bool,
    learnt: &Learnt,
    clock: Arc<dyn Clock>,
) -> Attempt {
    let mut hello = redis::pipe();
    hello.cmd("TIME");
    hello.cmd("ROLE");
    hello.cmd("INFO").arg("persistence");
    hello.cmd("CONFIG").arg("GET").arg("appendfsync");
    if config.wait_fsync {
        hello.cmd("COMMAND").arg("INFO").arg("WAITAOF");
    }
    let asked = clock.now();
    let replies = connection.send_packed_commands(&hello, 0, hello.len()).await.map_err(refused)?;
    let mut replies = replies.into_iter();
    let mut next = || replies.next().unwrap_or_default();
    let time = next();
    // What a role may not be asked for, its scripts will tell.
    let (role, replicas) = match next() {
        Value::Array(role) => {
            let mut role = role.into_iter();
            let name = text(role.next());
            let replicas = match role.nth(1) {
                Some(Value::Array(replicas)) => u32::try_from(replicas.len()).unwrap_or(u32::MAX),
                _ => 0,
            };
            (name, replicas)
        }
        _ => (None, 0),
    };
    match role.as_deref() {
        // A node of a Cluster sends on what it does not decide.
        Some("slave") if !listens && !matches!(config.address, Address::Cluster(_)) => {
            return Err((
                ErrorKind::Unavailable,
                "the server is a replica; locks are taken at its master".into(),
                None,
            ));
        }
        Some("sentinel") => {
            return Err((
                ErrorKind::Misconfigured,
                "the server is a Sentinel; write redis+sentinel://host/name-of-the-master".into(),
                None,
            ));
        }
        Some("master") => learnt.saw_replicas(replicas),
        Some(_) | None => {}
    }
    let us = match time {
        Value::ServerError(error) => return Err(refused(error.into())),
        time => server_time(&time).ok_or_else(|| {
            refused(RedisError::from((Said::UnexpectedReturnType, "TIME answered with something else")))
        })?,
    };
    let (persistence, fsync) = (text(Some(next())), config_value(next()));
    let forgets = !keeps(persistence.as_deref(), fsync.as_deref());
    // One node that forgets is enough; a single server may have been told to keep what it forgot before.
    learnt.set_forgets(forgets || (matches!(config.address, Address::Cluster(_)) && learnt.forgets()));
    if config.wait_fsync {
        let appends = persistence.is_some_and(|info| info.lines().any(|line| line.trim() == "aof_enabled:1"));
        match next() {
            Value::ServerError(error) => return Err(refused(error.into())),
            Value::Array(known) if matches!(known.first(), Some(Value::Array(_))) => {}
            _ => {
                return Err((
                    ErrorKind::Misconfigured,
                    "the server cannot wait for its disk; wait_fsync needs Redis 7.2 or later".into(),
                    None,
                ));
            }
        }
        if !appends {
            return Err((
                ErrorKind::Misconfigured,
                "the server writes nothing that could be waited for; wait_fsync needs appendonly yes".into(),
                None,
            ));
        }
    }
    Ok(Arc::new(Link::new(connection, task, us, asked)))
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
