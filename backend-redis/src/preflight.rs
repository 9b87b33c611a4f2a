//! A look at the real servers: what they do not keep lowers what is claimed.

use std::{sync::Arc, time::Duration};

use lockcore::backend::{Call, Capabilities, Consistency, FenceSource, Preflight, Result};

use crate::{
    cluster::SLOTS,
    config::{Address, RedisConfig},
    connection::Connection,
    greeting::{self, Learnt},
    replicas::Wait,
    road::{Node, Road},
};

/// Clocks of servers that can take over for each other differ by no more than this.
const CLOCKS: Duration = Duration::from_millis(100);

/// What a server says about itself. `None`: it may not be asked.
#[derive(Debug, Default)]
struct Facts {
    persistence: Option<String>,
    fsync: Option<String>,
    memory: Option<String>,
    replication: Option<String>,
    server: Option<String>,
    guard: Option<String>,
}

/// Looks at every server that decides about locks, and at the clocks of those that may take over.
pub(crate) async fn look(
    call: &Call,
    config: &Arc<RedisConfig>,
    road: &Road,
    learnt: &Learnt,
    claims: Capabilities,
) -> Result<Preflight> {
    let mut preflight = Preflight::clean(claims);
    let nodes = road.masters(call).await?;
    let mut forgets = false;
    let mut clocks: Vec<(String, u64)> = Vec::new();
    for node in &nodes {
        let facts = ask(call, node).await?;
        let keeps = greeting::keeps(facts.persistence.as_deref(), facts.fsync.as_deref());
        forgets |= !keeps;
        learnt.saw_replicas(number(&facts.replication, "connected_slaves").unwrap_or(0));
        let link = node.link(call).await?;
        clocks.push((node.name(), link.server_time(call.now())));
        for place in facts.replicas() {
            match clock(call, config, &place).await {
                Some(us) => clocks.push((format!("{}:{}", place.0, place.1), us)),
                None => preflight.findings.push(format!(
                    "the clock of the replica {}:{} cannot be asked for; it must be that of its master, or leases end at \
                     another time after it takes over",
                    place.0, place.1
                )),
            }
        }
        let before = preflight.findings.len();
        preflight = facts.judge(config, preflight, keeps);
        if nodes.len() > 1 {
            for finding in &mut preflight.findings[before..] {
                *finding = format!("{}: {finding}", node.name());
            }
        }
    }
    learnt.set_forgets(forgets);
    let known = learnt.replicas();
    if let Some(wait) = Wait::demanded(config, known)
        && !wait.covers(known)
    {
        preflight.lower(
            format!(
                "not all of the {known} replicas are waited for; if one that has not got a lock takes over, the lock is \
                 forgotten; set wait-replicas to {known} to rule that out"
            ),
            |c| c.survives.failover = false,
        );
    }
    judge_clocks(&mut preflight, clocks);
    if let Road::Many(cluster) = road
        && let missing @ 1.. = usize::from(SLOTS).saturating_sub(cluster.covered())
    {
        preflight.lower(
            format!(
                "{missing} of {SLOTS} slots of the Cluster have no node, and locks in them cannot be taken; see \
                 redis-cli --cluster fix"
            ),
            |c| c.survives.failover = false,
        );
    }
    if let Address::Sentinel { sentinels, .. } = &config.address
        && sentinels.len() < 3
    {
        preflight.findings.push(format!(
            "{} Sentinels are given; name all of them, at least three, so that one which is away is no loss",
            sentinels.len()
        ));
    }
    Ok(preflight)
}

/// Looks at one of several servers that decide together; returns its clock. `delayed`: one that was restarted grants
/// nothing for a while.
pub(crate) async fn look_at_member(
    call: &Call,
    config: &RedisConfig,
    node: &Node,
    learnt: &Learnt,
    delayed: bool,
    preflight: &mut Preflight,
) -> Result<u64> {
    let facts = ask(call, node).await?;
    let keeps = greeting::keeps(facts.persistence.as_deref(), facts.fsync.as_deref());
    learnt.set_forgets(!keeps);
    let before = preflight.findings.len();
    *preflight = facts.judge(config, preflight.clone(), keeps || delayed);
    for finding in &mut preflight.findings[before..] {
        *finding = format!("{}: {finding}", node.name());
    }
    let link = node.link(call).await?;
    Ok(link.server_time(call.now()))
}

/// Names servers whose clock runs ahead of the others': fences follow it.
pub(crate) fn judge_clocks_of_members(preflight: &mut Preflight, clocks: &[(String, u64)]) {
    let (Some(first), Some(last)) =
        (clocks.iter().min_by_key(|(_, us)| *us), clocks.iter().max_by_key(|(_, us)| *us))
    else {
        return;
    };
    let apart = Duration::from_micros(last.1 - first.1);
    if apart <= CLOCKS {
        return;
    }
    let finding = format!(
        "the clocks of {} and {} are {apart:.0?} apart; fences follow the later one, and servers that forget may repeat \
         fences by that much; let a time service set them",
        first.0, last.0
    );
    let forget = !preflight.capabilities.survives.restart;
    preflight.lower(finding, |c| {
        if forget {
            c.fence = FenceSource::Volatile;
        }
    });
}

/// Lowers what clocks that differ cannot keep: another server ends leases by its own.
fn judge_clocks(preflight: &mut Preflight, clocks: Vec<(String, u64)>) {
    let (Some(first), Some(last)) =
        (clocks.iter().min_by_key(|(_, us)| *us), clocks.iter().max_by_key(|(_, us)| *us))
    else {
        return;
    };
    let apart = Duration::from_micros(last.1 - first.1);
    if apart > CLOCKS {
        preflight.lower(
            format!(
                "the clocks of {} and {} are {apart:.0?} apart; after a failover leases end early or late by that, and \
                 fences may repeat; let a time service set them",
                first.0, last.0
            ),
            |c| c.survives.failover = false,
        );
    }
}

async fn ask(call: &Call, node: &Node) -> Result<Facts> {
    let link = node.link(call).await?;
    let mut questions = redis::pipe();
    questions.cmd("INFO").arg("persistence");
    questions.cmd("CONFIG").arg("GET").arg("appendfsync");
    questions.cmd("INFO").arg("memory");
    questions.cmd("INFO").arg("replication");
    questions.cmd("INFO").arg("server");
    questions.cmd("CONFIG").arg("GET").arg("min-replicas-to-write");
    let mut answers = link.commands(call, &questions, questions.len()).await?.into_iter();
    let mut next = || answers.next().unwrap_or_default();
    Ok(Facts {
        persistence: greeting::text(Some(next())),
        fsync: greeting::config_value(next()),
        memory: greeting::text(Some(next())),
        replication: greeting::text(Some(next())),
        server: greeting::text(Some(next())),
        guard: greeting::config_value(next()),
    })
}

/// Asks a replica for the time, on a connection for this alone. It is told apart from its master by nobody.
async fn clock(call: &Call, config: &Arc<RedisConfig>, place: &(String, u16)) -> Option<u64> {
    let connection = Connection::looking(config.clone(), place.clone());
    let link = connection.link(call).await.ok();
    let us = link.map(|link| link.server_time(call.now()));
    connection.close();
    us
}

impl Facts {
    /// Returns where the connected replicas are.
    fn replicas(&self) -> Vec<(String, u16)> {
        let Some(info) = &self.replication else { return Vec::new() };
        let place = |line: &str| {
            let (name, facts) = line.trim_end().split_once(':')?;
            name.strip_prefix("slave")?.parse::<u32>().ok()?;
            let fact =
                |wanted: &str| facts.split(',').find_map(|fact| fact.strip_prefix(wanted)?.strip_prefix('='));
            Some((fact("ip")?.to_owned(), fact("port")?.parse().ok()?))
        };
        info.lines().filter_map(place).collect()
    }

    /// Returns the name and the version. Valkey goes on saying 7.2 where programs look for the Redis that it came from.
    fn version(&self) -> Option<String> {
        let valkey = fact(&self.server, "valkey_version").map(|version| format!("Valkey {version}"));
        valkey.or_else(|| Some(format!("Redis {}", fact(&self.server, "redis_version")?)))
    }

    fn judge(&self, config: &RedisConfig, mut preflight: Preflight, keeps: bool) -> Preflight {
        preflight.server = self.version().or(preflight.server);
        if !keeps {
            let why = match (self.persistence.is_some(), self.fsync.as_deref()) {
                (false, _) => {
                    "the server does not let this user read INFO, so nobody knows what a restart loses"
                }
                (true, None) => {
                    "the server does not let this user read appendfsync, so nobody knows what a restart loses"
                }
                (true, Some(_)) => {
                    "a restart of the server loses what it granted last, and with it held locks; set appendonly yes and \
                     appendfsync always, or keep the server down for the longest TTL before it starts again"
                }
            };
            preflight.lower(why, |c| c.survives.restart = false);
        }
        match fact(&self.memory, "maxmemory").zip(fact(&self.memory, "maxmemory_policy")) {
            None => preflight.findings.push("the server does not tell its memory policy; it must be noeviction".into()),
            Some(("0", _) | (_, "noeviction")) => {}
            Some((_, policy)) => preflight.lower(
                format!(
                    "the server removes keys when its memory is full ({policy}), and with them held locks; set \
                     maxmemory-policy noeviction"
                ),
                |c| c.consistency = Consistency::Replicated,
            ),
        }
        let replicas = number(&self.replication, "connected_slaves");
        let demanded = Wait::demanded(config, replicas.unwrap_or(0));
        let waits = demanded.is_some();
        if let Some((wait, connected)) =
            demanded.zip(replicas).filter(|(wait, connected)| wait.replicas > *connected)
        {
            preflight.lower(
                format!(
                    "{} replicas must acknowledge each grant and {connected} are connected, so no lock can be taken; connect \
                     more, or demand fewer (wait-replicas)",
                    wait.replicas
                ),
                |c| c.survives.failover = false,
            );
        }
        let is_cluster = matches!(config.address, Address::Cluster(_));
        match (fact(&self.replication, "role"), replicas) {
            (Some("slave"), _) => preflight.lower(
                "the server is a replica and refuses every lock; use the address of its master",
                |c| c.consistency = Consistency::Replicated,
            ),
            (Some(_), Some(0)) if is_cluster => preflight
                .lower("the node has no replica; while it is away, so are the locks in its slots", |c| {
                    c.survives.failover = false
                }),
            (Some(_), Some(0)) => {}
            (Some(_), Some(_)) if waits => {
                preflight.capabilities.consistency = Consistency::Replicated;
            }
            (Some(_), Some(replicas)) => {
                preflight.lower(
                    format!(
                        "the server has {replicas} replicas; if one of them takes over, locks that were granted last are \
                         forgotten, and only the fence stops their holders; wait for replicas (wait-replicas) to be \
                         refused instead"
                    ),
                    |c| {
                        c.consistency = Consistency::Replicated;
                        c.survives.failover = false;
                    },
                );
                if self.guard.as_deref() == Some("0") {
                    preflight.lower(
                        "a master that is cut off from its replicas goes on granting while another takes over; set \
                         min-replicas-to-write 1 and min-replicas-max-lag 10, or wait for replicas (wait-replicas)",
                        |c| c.survives.failover = false,
                    );
                }
            }
            _ => preflight.findings.push("the server does not tell its role; it must be a master".into()),
        }
        if fact(&self.server, "redis_mode") == Some("cluster") && !is_cluster {
            preflight.lower(
                "the server is a node of a Cluster and refuses most locks; write redis+cluster:// to use all of it",
                |c| c.consistency = Consistency::Replicated,
            );
        }
        preflight
    }
}

/// Reads one line of what INFO says.
fn fact<'a>(info: &'a Option<String>, name: &str) -> Option<&'a str> {
    info.as_deref()?.lines().find_map(|line| line.trim_end().strip_prefix(name)?.strip_prefix(':'))
}

fn number(info: &Option<String>, name: &str) -> Option<u32> {
    fact(info, name)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clean() -> Preflight {
        Preflight::clean(Capabilities::weakest("redis").with(|c| {
            c.survives.failover = true;
            c.survives.restart = true;
            c.fence = FenceSource::ClockBounded;
        }))
    }

    fn clocks(apart: u64) -> Vec<(String, u64)> {
        vec![("a:1".into(), 1_000_000), ("b:2".into(), 1_000_000 + apart), ("c:3".into(), 1_000_001)]
    }

    #[test]
    fn clocks_that_differ_lower_what_a_takeover_keeps() {
        let mut near = clean();
        judge_clocks(&mut near, clocks(90_000));
        assert!(near.findings.is_empty() && near.capabilities.survives.failover);
        let mut far = clean();
        judge_clocks(&mut far, clocks(3_000_000));
        assert!(!far.capabilities.survives.failover);
        let finding = &far.findings[0];
        assert!(finding.contains("a:1") && finding.contains("b:2") && finding.contains("3s"), "{finding}");
    }

    #[test]
    fn clocks_of_members_that_differ_lower_the_fence_where_members_forget() {
        let mut keeps = clean();
        judge_clocks_of_members(&mut keeps, &clocks(3_000_000));
        assert_eq!((keeps.findings.len(), keeps.capabilities.fence), (1, FenceSource::ClockBounded));
        let mut forgets = clean();
        forgets.capabilities.survives.restart = false;
        judge_clocks_of_members(&mut forgets, &clocks(3_000_000));
        assert_eq!(forgets.capabilities.fence, FenceSource::Volatile);
    }

    #[test]
    fn replicas_are_read_from_what_a_master_says() {
        let facts = Facts {
            replication: Some(
                "role:master\r\nconnected_slaves:2\r\nslave0:ip=10.0.0.1,port=6380,state=online,offset=1,lag=0\r\n\
                 slave1:ip=::1,port=6381,state=wait_bgsave,offset=0,lag=0\r\nslave_repl_offset:3\r\n"
                    .into(),
            ),
            ..Facts::default()
        };
        assert_eq!(facts.replicas(), [("10.0.0.1".to_owned(), 6380), ("::1".to_owned(), 6381)]);
        assert_eq!(number(&facts.replication, "connected_slaves"), Some(2));
    }
}
