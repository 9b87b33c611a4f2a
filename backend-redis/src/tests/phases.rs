//! A migration's phases on servers of the test's own: the record, who has joined, and bridges to another store and back.

use lockcore::{
    memory::MemoryBackend,
    migrate::{Bridge, Migration, Phase, Stage},
};
use lockcore_conformance::faultline::{Direction, Faultline};
use lockcore_sql::{SqliteBackend, SqliteConfig};

use super::{
    server::{ClusterOf, Fleet},
    *,
};
use crate::{RedlockBackend, RedlockConfig, WaitReplicas, cluster::slot, phases::PhaseKeys};

fn record(epoch: u64, open: &[&str]) -> PhaseRecord {
    let mut record = PhaseRecord::new("moving", epoch);
    record.open = open.iter().map(|phase| (*phase).to_owned()).collect();
    record
}

async fn open(backend: &RedisBackend, phases: &[&str]) -> PhaseRecord {
    let record = record(1, phases);
    assert!(backend.phase_cas(&call(), None, &record).await.unwrap());
    record
}

#[tokio::test]
async fn a_record_is_replaced_only_as_it_was_read() {
    let Some((server, backend)) = start().await else { return };
    let other = RedisBackend::connect(config(&server)).await.unwrap();
    assert_eq!(backend.phase_read(&call()).await.unwrap(), None);
    let first = record(1, &["from"]);
    assert!(backend.phase_cas(&call(), None, &first).await.unwrap());
    assert!(!other.phase_cas(&call(), None, &record(1, &["to"])).await.unwrap());
    let mut second = record(2, &["from", "both"]);
    second.floor = Some(Fence::new(9_000_000_000_000_001).unwrap());
    assert!(other.phase_cas(&call(), Some(&first), &second).await.unwrap());
    assert!(!backend.phase_cas(&call(), Some(&first), &record(3, &[])).await.unwrap());
    assert_eq!(backend.phase_read(&call()).await.unwrap(), Some(second));
    assert_eq!(server.get("lockcore::{phases}:record").await.unwrap(), "2|9000000000000001|moving,from,both");
    assert_eq!(server.pttl("lockcore::{phases}:record").await, -1, "a record ends");
    let elsewhere = call().in_namespace("shop").unwrap();
    assert_eq!(backend.phase_read(&elsewhere).await.unwrap(), None);
    // It is no lock.
    assert!(backend.list(&call(), None, None).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_phase_is_joined_while_it_is_open_and_keeps_its_members_when_it_closes() {
    let Some((server, backend)) = start().await else { return };
    let refused = backend.join(&call(), "from", TTL).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "nobody has begun a migration: {refused}");
    let opened = open(&backend, &["from", "both"]).await;
    let one = backend.join(&call().labelled("web-1|a,b"), "from", TTL).await.unwrap();
    let two = backend.join(&call(), "both", TTL * 2).await.unwrap();
    for closed in ["to", "fro", "", "from,both"] {
        let refused = backend.join(&call(), closed, TTL).await.unwrap_err();
        assert!(matches!(refused.kind(), ErrorKind::Unavailable | ErrorKind::Invalid), "{closed}: {refused}");
    }
    let members = backend.members(&call()).await.unwrap();
    let seen: Vec<_> = members.iter().map(|m| (m.phase.as_str(), m.owner, m.label.as_deref())).collect();
    assert_eq!(seen, [("both", two.owner.digest(), None), ("from", one.owner.digest(), Some("web-1|a,b"))]);
    let left: Vec<Duration> = members.iter().filter_map(|member| member.remaining).collect();
    assert!(left[0] > TTL && left[0] <= TTL * 2 && left[1] <= TTL, "{left:?}");

    // Closed: who is in stays until it leaves.
    assert!(backend.phase_cas(&call(), Some(&opened), &record(2, &[])).await.unwrap());
    let longer = backend.renew(&call(), &one, TTL * 3).await.unwrap();
    assert!(longer.deadline > one.deadline);
    let shorter = backend.renew(&call(), &longer, Duration::from_secs(1)).await.unwrap();
    assert_eq!(shorter.deadline, longer.deadline, "a renewal shortened it");
    let many = backend.renew_many(&call(), &[longer.clone(), two.clone()], TTL * 3).await;
    assert!(many.iter().all(Result::is_ok), "{many:?}");
    let left = backend.members(&call()).await.unwrap()[1].remaining.unwrap();
    assert!(left > TTL * 2, "{left:?}");
    assert_eq!(backend.leave(&call(), &one).await.unwrap(), Released::Now);
    assert_eq!(backend.leave(&call(), &one).await.unwrap(), Released::AlreadyOver);
    let lost = backend.renew(&call(), &one, TTL).await.unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::Lost, "{lost}");
    assert_eq!(backend.members(&call()).await.unwrap().len(), 1);
    assert_eq!(backend.leave(&call(), &two).await.unwrap(), Released::Now);
    let all: Vec<String> = server.raw(&["KEYS", "*"]).await.unwrap();
    assert_eq!(all, ["lockcore::{phases}:record"]);
}

#[tokio::test]
async fn a_membership_that_ended_is_lost_and_is_listed_no_more() {
    let Some((server, backend)) = start().await else { return };
    open(&backend, &["from"]).await;
    let stays = backend.join(&call(), "from", TTL).await.unwrap();
    let ends = backend.join(&call(), "from", Duration::from_millis(40)).await.unwrap();
    in_time(async { while backend.members(&call()).await.unwrap().len() > 1 {} }).await;
    let lost = backend.renew(&call(), &ends, TTL).await.unwrap_err();
    assert_eq!(lost.lost_reason(), Some(LostReason::Expired), "{lost}");
    assert_eq!(backend.leave(&call(), &ends).await.unwrap(), Released::AlreadyOver);
    // Those that nobody ended go with the next that joins, and the last with the hash.
    let ends = backend.join(&call(), "from", Duration::from_millis(40)).await.unwrap();
    in_time(async { while backend.members(&call()).await.unwrap().len() > 1 {} }).await;
    let fields = async || server.raw::<Vec<String>>(&["HKEYS", "lockcore::{phases}:members"]).await.unwrap();
    assert!(fields().await.contains(&hex(&ends.owner)));
    let _ = backend.join(&call(), "from", TTL).await.unwrap();
    assert!(!fields().await.contains(&hex(&ends.owner)));
    let kept = server.pttl("lockcore::{phases}:members").await;
    assert!((20_000..=31_000).contains(&kept), "the hash is kept for {kept} ms");
    backend.leave(&call(), &stays).await.unwrap();
}

#[tokio::test]
async fn what_a_member_has_asked_for_is_granted_nothing_when_its_membership_is_over() {
    let Some((server, operator)) = start().await else { return };
    open(&operator, &["from"]).await;
    let line = Faultline::start(([127, 0, 0, 1], server.port).into()).unwrap();
    let config = RedisConfig::new("127.0.0.1", line.address().port());
    let backend = RedisBackend::connect(config).await.unwrap();
    let member = backend.join(&call(), "from", Duration::from_millis(300)).await.unwrap();
    let (call_w, request) = waiting("a", WATCHDOG);
    let stopped = async {
        line.hold(Direction::ToServer, true);
        while !backend.is_in_doubt(request.owner()) {
            tokio::task::yield_now().await;
        }
        while !operator.members(&call()).await.unwrap().is_empty() {}
        line.hold(Direction::ToServer, false);
    };
    // Not before the line is held.
    let asked = async { backend.acquire(&call_w, &request).await };
    let ((), refused) = in_time(async { tokio::join!(stopped, asked) }).await;
    let refused = refused.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    assert_eq!(server.get("lockcore::{a}:lock").await, None);
    assert_eq!(server.get("lockcore::{a}:fence").await, None, "it was granted");
    let lost = backend.renew(&call(), &member, TTL).await.unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::Lost, "{lost}");
    // Who is no member any more is bound by nothing here.
    let _ = backend.acquire(&call(), &self::request("a")).await.unwrap();
}

#[tokio::test]
async fn a_standing_connection_to_a_replica_says_nothing_about_phases() {
    let Some(server) = Server::start().await else { return };
    for verb in 0..6 {
        let backend = RedisBackend::connect(config(&server)).await.unwrap();
        let found = backend.phase_read(&call()).await.unwrap();
        let next = record(found.as_ref().map_or(1, |found| found.epoch + 1), &["from"]);
        assert!(backend.phase_cas(&call(), found.as_ref(), &next).await.unwrap());
        let member = backend.join(&call(), "from", TTL).await.unwrap();
        let _: String = server.raw(&["REPLICAOF", "127.0.0.1", "1"]).await.unwrap();
        let call = call();
        let error = match verb {
            0 => backend.phase_read(&call).await.map(drop),
            1 => backend.phase_cas(&call, Some(&next), &record(99, &[])).await.map(drop),
            2 => backend.join(&call, "to", TTL).await.map(drop),
            3 => backend.renew(&call, &member, Duration::from_secs(1)).await.map(drop),
            4 => backend.leave(&call, &member).await.map(drop),
            _ => backend.members(&call).await.map(drop),
        }
        .expect_err("a replica answered");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{verb}: {error}");
        let _: String = server.raw(&["REPLICAOF", "NO", "ONE"]).await.unwrap();
    }
}

#[tokio::test]
async fn phases_that_are_somebody_elses_are_named_and_left_alone() {
    let Some((server, backend)) = start().await else { return };
    let _: i64 = server.raw(&["LPUSH", "lockcore::{phases}:record", "x"]).await.unwrap();
    let _: i64 = server.raw(&["LPUSH", "lockcore::{phases}:members", "x"]).await.unwrap();
    let new = record(1, &["from"]);
    let refused = [
        backend.phase_read(&call()).await.map(drop),
        backend.phase_cas(&call(), None, &new).await.map(drop),
        backend.join(&call(), "from", TTL).await.map(drop),
        backend.members(&call()).await.map(drop),
    ];
    for refused in refused {
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::Misconfigured);
    }
    let _: () = server.raw(&["SET", "lockcore::{phases}:record", "mine"]).await.unwrap();
    assert_eq!(backend.phase_read(&call()).await.unwrap_err().kind(), ErrorKind::Misconfigured);
    assert!(!backend.phase_cas(&call(), None, &new).await.unwrap());
    assert_eq!(backend.join(&call(), "from", TTL).await.unwrap_err().kind(), ErrorKind::Misconfigured);
    assert_eq!(server.get("lockcore::{phases}:record").await.as_deref(), Some("mine"));
}

#[tokio::test]
async fn a_membership_that_replicas_acknowledged_outlives_a_takeover_and_one_they_lack_is_taken_back() {
    let Some(mut fleet) = Fleet::start(1, &[]).await else { return };
    let patient = config(&fleet.master).with(|c| {
        c.wait_replicas = WaitReplicas::AtLeast(1);
        c.wait_timeout = Duration::from_millis(300);
    });
    let backend = RedisBackend::connect(patient).await.unwrap();
    let opened = open(&backend, &["from"]).await;
    let member = backend.join(&call(), "from", TTL).await.unwrap();
    fleet.replicas[0].promote().await;
    let refused = backend.join(&call(), "from", TTL).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    assert!(refused.to_string().contains("taken back"), "{refused}");
    assert_eq!(backend.members(&call()).await.unwrap().len(), 1);
    let doubt = backend.renew(&call(), &member, TTL * 2).await.unwrap_err();
    assert_eq!(doubt.kind(), ErrorKind::Unknown, "{doubt}");
    let doubt = backend.phase_cas(&call(), Some(&opened), &record(2, &[])).await.unwrap_err();
    assert_eq!(doubt.kind(), ErrorKind::Unknown, "{doubt}");

    fleet.master.kill();
    let after = RedisBackend::connect(config(&fleet.replicas[0])).await.unwrap();
    assert_eq!(after.phase_read(&call()).await.unwrap(), Some(opened));
    assert_eq!(after.members(&call()).await.unwrap().len(), 1);
    let _ = after.renew(&call(), &member, TTL).await.unwrap();
}

#[tokio::test]
async fn memberships_are_kept_while_their_slot_moves() {
    let Some(cluster) = ClusterOf::start(3, 0).await else { return };
    let backend = RedisBackend::connect(RedisConfig::cluster(cluster.places())).await.unwrap();
    let keys = PhaseKeys::new("");
    let (number, slot) = (slot(&keys.record), slot(&keys.record).to_string());
    let (from, to) = {
        let owner = cluster.owner(number);
        (&cluster.nodes[owner], &cluster.nodes[(owner + 1) % 3])
    };
    let (from_id, to_id, port) = (from.id().await, to.id().await, to.port.to_string());
    let opened = open(&backend, &["from"]).await;
    let member = backend.join(&call(), "from", TTL).await.unwrap();
    let _: () = to.raw(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]).await.unwrap();
    let _: () = from.raw(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]).await.unwrap();
    let second = backend.join(&call(), "from", TTL).await.unwrap();
    for key in [&keys.members, &keys.record] {
        let member = backend.renew(&call(), &member, TTL).await.unwrap();
        assert_eq!(backend.members(&call()).await.unwrap().len(), 2);
        assert_eq!(backend.phase_read(&call()).await.unwrap().as_ref(), Some(&opened));
        let _: String = from.raw(&["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]).await.unwrap();
        let _ = backend.renew(&call(), &member, TTL).await.unwrap();
    }
    let next = record(2, &["from", "both"]);
    assert!(backend.phase_cas(&call(), Some(&opened), &next).await.unwrap());
    for node in [to, from] {
        let _: () = node.raw(&["CLUSTER", "SETSLOT", &slot, "NODE", &to_id]).await.unwrap();
    }
    assert_eq!(backend.leave(&call(), &second).await.unwrap(), Released::Now);
    let _ = backend.join(&call(), "both", TTL).await.unwrap();
    assert_eq!(backend.members(&call()).await.unwrap().len(), 2);
}

#[tokio::test]
async fn several_servers_that_decide_together_keep_no_phases_and_say_so() {
    let mut servers = Vec::new();
    for _ in 0..3 {
        let Some(server) = Server::start().await else { return };
        servers.push(server);
    }
    let config = RedlockConfig::new(servers.iter().map(|server| ("127.0.0.1", server.port)));
    let redlock = Arc::new(RedlockBackend::connect(config).await.unwrap());
    let migration = Migration::new("moving", redlock, Arc::new(MemoryBackend::default())).unwrap();
    let refused = migration.step(&call(), Stage::From).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unsupported, "{refused}");
    assert!(refused.to_string().contains("decide together"), "{refused}");
}

const WAY: [Stage; 5] = [Stage::From, Stage::FromBoth, Stage::Both, Stage::BothTo, Stage::To];

/// Takes a lock by a bridge in each phase that is open, there and back; every fence is above every earlier one.
async fn pass(old: impl AsyncFn() -> Arc<dyn LockBackend>, new: impl AsyncFn() -> Arc<dyn LockBackend>) {
    let migration = Migration::new("moving", old().await, new().await).unwrap();
    // Each has stores of its own, as each process has.
    let enter = async |phase| Bridge::new("moving", phase, old().await, new().await).unwrap();
    // One lock that is taken all the way, and one that is taken at the ends alone.
    let (mut often, mut seldom) = (None, None);
    let take = async |bridge: &Bridge, text: &str, last: &mut Option<Fence>| {
        let lease = bridge.acquire(&call(), &request(text)).await.unwrap();
        assert!(Some(lease.fence) > *last, "{text} in {:?}: {} after {last:?}", bridge.phase(), lease.fence);
        *last = Some(lease.fence);
        bridge.renew(&call(), &lease, TTL).await.unwrap()
    };
    for stage in WAY.iter().chain(WAY.iter().rev().skip(1)) {
        let status = migration.step(&call(), *stage).await.unwrap();
        assert_eq!((status.stage, status.settled), (*stage, true));
        let mut inside = Vec::new();
        for phase in [Phase::From, Phase::Both, Phase::To] {
            let bridge = enter(phase).await;
            if stage.open().contains(&phase) {
                inside.push(bridge);
                continue;
            }
            let refused = bridge.acquire(&call(), &request("often")).await.unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Misconfigured, "{phase:?} at {stage}: {refused}");
        }
        for bridge in &inside {
            let held = take(bridge, "often", &mut often).await;
            // Neighbouring phases exclude each other.
            for other in &inside {
                let refused = other.acquire(&call(), &request("often")).await.unwrap_err();
                assert_eq!(refused.kind(), ErrorKind::Held, "{refused}");
            }
            assert_eq!(bridge.release(&call(), &held).await.unwrap(), Released::Now);
        }
        if matches!(stage, Stage::From | Stage::To) {
            let held = take(&inside[0], "seldom", &mut seldom).await;
            assert_eq!(inside[0].release(&call(), &held).await.unwrap(), Released::Now);
        }
        let joined = migration.status(&call()).await.unwrap().members;
        for bridge in &inside {
            let phase = bridge.phase().as_str();
            assert!(joined.iter().any(|(_, member)| member.phase == phase), "{phase}: {joined:?}");
            bridge.close().await;
        }
        assert!(migration.status(&call()).await.unwrap().members.is_empty());
    }
}

async fn beside(memory: &MemoryBackend) -> Arc<dyn LockBackend> {
    Arc::new(memory.clone())
}

/// Opens a SQLite file, as each process does.
async fn file(directory: &tempfile::TempDir) -> Arc<dyn LockBackend> {
    let config = SqliteConfig::new(directory.path().join("locks.db"));
    Arc::new(SqliteBackend::open(config).await.unwrap())
}

async fn reach(config: &RedisConfig) -> Arc<dyn LockBackend> {
    Arc::new(RedisBackend::connect(config.clone()).await.unwrap())
}

#[tokio::test]
async fn a_bridge_to_a_server_and_back_keeps_fences_growing() {
    let Some(server) = Server::start().await else { return };
    let (memory, config) = (MemoryBackend::default(), config(&server));
    pass(async || beside(&memory).await, async || reach(&config).await).await;
}

#[tokio::test]
async fn a_bridge_from_a_server_and_back_keeps_fences_growing() {
    let Some(server) = Server::start().await else { return };
    let (memory, config) = (MemoryBackend::default(), config(&server));
    pass(async || reach(&config).await, async || beside(&memory).await).await;
}

#[tokio::test]
async fn a_bridge_from_a_file_to_a_server_and_back_keeps_fences_growing() {
    let Some(server) = Server::start().await else { return };
    let (directory, config) = (tempfile::tempdir().unwrap(), config(&server));
    pass(async || file(&directory).await, async || reach(&config).await).await;
}

#[tokio::test]
async fn a_bridge_from_a_server_to_a_file_and_back_keeps_fences_growing() {
    let Some(server) = Server::start().await else { return };
    let (directory, config) = (tempfile::tempdir().unwrap(), config(&server));
    pass(async || reach(&config).await, async || file(&directory).await).await;
}

#[tokio::test]
async fn a_bridge_from_replicas_to_a_cluster_and_back_keeps_fences_growing() {
    let Some(fleet) = Fleet::start(1, &[]).await else { return };
    let Some(cluster) = ClusterOf::start(3, 0).await else { return };
    let replicated = config(&fleet.master).with(|c| c.wait_replicas = WaitReplicas::AtLeast(1));
    let clustered = RedisConfig::cluster(cluster.places());
    pass(async || reach(&replicated).await, async || reach(&clustered).await).await;
}

#[tokio::test]
async fn a_process_that_was_cut_off_while_its_phase_closed_is_granted_nothing() {
    let Some(server) = Server::start().await else { return };
    let (old, new) = (config(&server), MemoryBackend::default());
    let migration = Migration::new("moving", reach(&old).await, Arc::new(new.clone())).unwrap();
    migration.step(&call(), Stage::From).await.unwrap();
    let line = Faultline::start(([127, 0, 0, 1], server.port).into()).unwrap();
    let through = RedisConfig::new("127.0.0.1", line.address().port());
    let ttl = Duration::from_millis(400);
    let request = |text| AcquireRequest::new(name(text), ttl);
    let bridge = Bridge::new("moving", Phase::From, reach(&through).await, Arc::new(new.clone())).unwrap();
    let bridge = bridge.with_membership(ttl * 2).unwrap();
    let lease = bridge.acquire(&call(), &request("a")).await.unwrap();
    line.cut(true);
    let (call_b, request_b) = (call(), request("b"));
    let begun = bridge.acquire(&call_b, &request_b);
    let closed = async {
        migration.step(&call(), Stage::FromBoth).await.unwrap();
        in_time(async {
            while let Err(refused) = migration.step(&call(), Stage::Both).await {
                assert_eq!(refused.kind(), ErrorKind::Held, "{refused}");
            }
        })
        .await;
        line.heal();
    };
    let (refused, ()) = tokio::join!(begun, closed);
    let _ = refused.expect_err("it was granted something while it was cut off");
    let lost = bridge.renew(&call(), &lease, ttl).await.unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::Lost, "{lost}");
    let refused = bridge.acquire(&call(), &request("a")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Misconfigured, "{refused}");
    let both = Bridge::new("moving", Phase::Both, reach(&old).await, Arc::new(new)).unwrap();
    let next = both.acquire(&call(), &request("a")).await.unwrap();
    assert!(next.fence > lease.fence);
    assert_eq!(server.get(&keys("b").fence).await, None, "what was under way was granted");
}
