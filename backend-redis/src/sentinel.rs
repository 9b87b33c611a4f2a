//! Sentinels: who is the master now.
//!
//! They are asked at every connect, and a connection is made anew by evidence: the master refuses writes because it was
//! demoted, it does not answer twice in a row, or the connection ends (a Sentinel ends those of a demoted master).
//!
//! # Source
//! Redis 7.0 manual: Guidelines for Sentinel clients.

use std::{sync::Arc, time::Duration};

use lockcore::backend::{Clock, ErrorKind};
use redis::{AsyncConnectionConfig, RedisError, Value};

use crate::{
    config::RedisConfig,
    connection::{Attempt, Push},
    greeting::{Learnt, Refusal, greet_tcp, open_tcp, refused, settings, text},
};

/// What a Sentinel says of a master.
#[derive(Debug, PartialEq, Eq)]
struct Master {
    host: String,
    port: u16,
    replicas: u32,
    epoch: u64,
}

/// Asks Sentinels in turn until one names a master that says so itself.
pub(crate) async fn greet(
    config: &RedisConfig,
    sentinels: &[(String, u16)],
    name: &str,
    push: Option<Push>,
    learnt: &Learnt,
    clock: Arc<dyn Clock>,
) -> Attempt {
    // One that is silent must not use up the time of the others.
    let count = u32::try_from(sentinels.len()).unwrap_or(u32::MAX).max(1);
    let patience = (config.connect_timeout / count).min(Duration::from_secs(1));
    let (mut asked, mut strangers, mut failure) = (0, 0, None::<Refusal>);
    let mut outdated: Vec<Master> = Vec::new();
    for (host, port) in sentinels {
        let answer = tokio::time::timeout(patience, ask(config, host, *port, name)).await;
        let master = match answer {
            Ok(Ok(Some(master))) => master,
            Ok(Ok(None)) => {
                (asked, strangers) = (asked + 1, strangers + 1);
                continue;
            }
            Ok(Err(refusal)) => {
                // A refusal of the credentials is more worth saying than a Sentinel that is away.
                if failure.as_ref().is_none_or(|(kind, ..)| *kind == ErrorKind::Unavailable) {
                    failure = Some(refusal);
                }
                continue;
            }
            Err(_) => {
                let silent = format!("Sentinel {host}:{port} did not answer within {patience:?}");
                failure.get_or_insert((ErrorKind::Unavailable, silent, None));
                continue;
            }
        };
        asked += 1;
        // One that was cut off may still name a master that the others have replaced.
        if !learnt.saw_epoch(master.epoch) {
            outdated.push(master);
            continue;
        }
        match greet_master(config, &master, patience, push.clone(), learnt, clock.clone()).await {
            Ok(link) => return Ok(link),
            Err(refusal) => failure = Some(refusal),
        }
    }
    // Most of them agree on an older one: they were set up anew, and count from the beginning.
    outdated.sort_by_key(|master| std::cmp::Reverse(master.epoch));
    if outdated.len() > sentinels.len() / 2
        && let Some(master) = outdated.first()
    {
        learnt.forget_epoch(master.epoch);
        return greet_master(config, master, patience, push, learnt, clock).await;
    }
    if asked > 0 && asked == strangers {
        let unknown = format!("the Sentinels watch no master with the name {name:?}");
        return Err((ErrorKind::Misconfigured, unknown, None));
    }
    Err(failure.unwrap_or_else(|| {
        (ErrorKind::Unavailable, "the Sentinels that answer name a master that was replaced".into(), None)
    }))
}

/// Greets the server that a Sentinel named; it must say itself that it is a master.
async fn greet_master(
    config: &RedisConfig,
    master: &Master,
    patience: Duration,
    push: Option<Push>,
    learnt: &Learnt,
    clock: Arc<dyn Clock>,
) -> Attempt {
    let greeting = greet_tcp(config, &master.host, master.port, push, learnt, clock);
    let Ok(greeted) = tokio::time::timeout(patience, greeting).await else {
        let silent =
            format!("the master at {}:{} did not greet within {patience:?}", master.host, master.port);
        return Err((ErrorKind::Unavailable, silent, None));
    };
    learnt.saw_replicas(master.replicas);
    greeted
}

/// Asks one Sentinel; `None`: it does not know the name.
async fn ask(config: &RedisConfig, host: &str, port: u16, name: &str) -> Result<Option<Master>, Refusal> {
    let password = config
        .current_sentinel_password()
        .map_err(|error| (error.kind(), error.message().to_owned(), None))?;
    let settings = settings(config.sentinel_user.as_deref(), password.as_deref(), 0);
    let options = AsyncConnectionConfig::new().set_response_timeout(Some(config.connect_timeout));
    let (mut sentinel, _task) = open_tcp(config, host, port, &settings, options).await?;
    let mut questions = redis::pipe();
    questions.cmd("SENTINEL").arg("MASTER").arg(name);
    let answers = sentinel.send_packed_commands(&questions, 0, 1).await.map_err(refused)?;
    let facts = match answers.into_iter().next() {
        Some(Value::ServerError(refusal)) => {
            let refusal = RedisError::from(refusal);
            let says = refusal.detail().unwrap_or_default();
            if says.contains("No such master") {
                return Ok(None);
            }
            // The message of a server that is no Sentinel.
            if says.starts_with("unknown command") {
                let message = format!("{host}:{port} is no Sentinel");
                return Err((ErrorKind::Misconfigured, message, Some(refusal)));
            }
            return Err(refused(refusal));
        }
        Some(facts) => pairs(facts),
        None => Vec::new(),
    };
    let fact = |wanted: &str| facts.iter().find(|(key, _)| key == wanted).map(|(_, value)| value.as_str());
    let number = |wanted: &str| fact(wanted).and_then(|value| value.parse::<u64>().ok());
    let (Some(host), Some(port)) = (fact("ip"), number("port").and_then(|port| u16::try_from(port).ok()))
    else {
        return Err((ErrorKind::Unavailable, "a Sentinel answered with something else".into(), None));
    };
    Ok(Some(Master {
        host: host.to_owned(),
        port,
        replicas: number("num-slaves").and_then(|n| u32::try_from(n).ok()).unwrap_or(0),
        epoch: number("config-epoch").unwrap_or(0),
    }))
}

fn pairs(value: Value) -> Vec<(String, String)> {
    let pair = |key, value| Some((text(Some(key))?, text(Some(value))?));
    match value {
        Value::Map(pairs) => pairs.into_iter().filter_map(|(key, value)| pair(key, value)).collect(),
        Value::Array(items) => {
            let mut items = items.into_iter();
            std::iter::from_fn(|| Some((items.next()?, items.next()?)))
                .filter_map(|(key, value)| pair(key, value))
                .collect()
        }
        _ => Vec::new(),
    }
}
