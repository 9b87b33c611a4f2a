//! A master with replicas of the test's own: what is waited for, what a takeover keeps, and what it forgets.

use super::{server::Fleet, *};
use crate::WaitReplicas;

/// A master, so many replicas in step with it, and a backend that waits for them.
async fn fleet(replicas: usize, wait: WaitReplicas) -> Option<(Fleet, RedisBackend)> {
    let fleet = Fleet::start(replicas, &[]).await?;
    let backend = RedisBackend::connect(patient(&fleet, wait)).await.unwrap();
    Some((fleet, backend))
}

fn patient(fleet: &Fleet, wait: WaitReplicas) -> RedisConfig {
    config(&fleet.master).with(|c| {
        c.wait_replicas = wait;
        c.wait_timeout = Duration::from_millis(300);
    })
}

#[tokio::test]
async fn a_grant_that_replicas_acknowledged_outlives_a_takeover_by_any_of_them() {
    let Some((mut fleet, backend)) = fleet(2, WaitReplicas::AtLeast(2)).await else { return };
    assert!(backend.capabilities().survives.failover, "all replicas are waited for");
    let lease = backend.acquire(&call(), &request("a")).await.unwrap();
    let renewed = backend.renew(&call(), &lease, TTL * 2).await.unwrap();
    let [first, second] = &fleet.replicas[..] else { panic!("two replicas") };
    for replica in [first, second] {
        let left = replica.pttl("lockcore::{a}:lock").await;
        assert!(left > 50_000, "the renewal is not there: {left}");
    }
    fleet.master.kill();
    second.promote().await;
    let after = RedisBackend::connect(config(second)).await.unwrap();
    let refused = after.acquire(&call(), &request("a")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Held, "{refused}");
    assert_eq!(refused.holder().unwrap().fence, lease.fence);
    let _ = after.renew(&call(), &renewed, TTL).await.unwrap();
    assert_eq!(after.release(&call(), &renewed).await.unwrap(), Released::Now);
    let next = after.acquire(&call(), &request("a")).await.unwrap();
    assert!(next.fence > lease.fence);
}

#[tokio::test]
async fn a_grant_that_too_few_replicas_acknowledge_is_taken_back() {
    let Some((fleet, backend)) = fleet(1, WaitReplicas::AtLeast(1)).await else { return };
    fleet.replicas[0].promote().await;
    let request = request("a");
    let refused = backend.acquire(&call(), &request).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    assert!(refused.to_string().contains("taken back"), "{refused}");
    let left: Vec<String> = fleet.master.raw(&["KEYS", "*"]).await.unwrap();
    assert_eq!(left, ["lockcore::{a}:fence"], "only a number is used up");

    // The same acquisition, once there is a replica again.
    fleet.replicas[0].follow(&fleet.master).await;
    let lease = backend.acquire(&call(), &request).await.unwrap();
    assert_eq!(
        fleet.replicas[0].get("lockcore::{a}:lock").await,
        fleet.master.get("lockcore::{a}:lock").await
    );
    backend.release(&call(), &lease).await.unwrap();
}

#[tokio::test]
async fn a_grant_that_cannot_be_taken_back_is_unknown() {
    let Some((fleet, backend)) = fleet(1, WaitReplicas::AtLeast(1)).await else { return };
    fleet.replicas[0].promote().await;
    let request = request("a");
    let short = budget(Duration::from_secs(2));
    let acquiring = backend.acquire(&short, &request);
    let stopping = async {
        // The grant is there, and its connection waits for replicas: the server is stopped before it can answer.
        while fleet.master.get("lockcore::{a}:lock").await.is_none() {}
        fleet.master.signal(Signal::STOP);
    };
    let (refused, ()) = tokio::join!(acquiring, stopping);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Unknown);
    fleet.master.signal(Signal::CONT);
    backend.abandon(&call(), &request).await.unwrap();
    assert_eq!(fleet.master.get("lockcore::{a}:lock").await, None);
}

#[tokio::test]
async fn a_renewal_that_too_few_replicas_acknowledge_is_in_doubt_and_moves_no_deadline() {
    let Some((fleet, backend)) = fleet(1, WaitReplicas::Majority).await else { return };
    let lease = backend.acquire(&call(), &request("a")).await.unwrap();
    let other = backend.acquire(&call(), &request("b")).await.unwrap();
    fleet.replicas[0].promote().await;
    let doubt = backend.renew(&call(), &lease, TTL * 2).await.unwrap_err();
    assert_eq!(doubt.kind(), ErrorKind::Unknown, "{doubt}");
    let doubts = backend.renew_many(&call(), &[lease.clone(), other.clone()], TTL * 2).await;
    for doubt in doubts {
        assert_eq!(doubt.unwrap_err().kind(), ErrorKind::Unknown);
    }
    // Also what would be adopted, a raise and a break.
    let unsure = backend.raise(&call(), &lease, lease.fence).await.unwrap_err();
    assert_eq!(unsure.kind(), ErrorKind::Unknown, "{unsure}");
    let unsure = backend.raise_fence(&call(), &name("c"), Fence::new(7).unwrap()).await.unwrap_err();
    assert_eq!(unsure.kind(), ErrorKind::Unknown, "{unsure}");

    fleet.replicas[0].follow(&fleet.master).await;
    let renewed = backend.renew_many(&call(), &[lease, other], TTL * 2).await;
    for lease in renewed {
        let _ = lease.unwrap();
    }
}

#[tokio::test]
async fn what_did_nothing_needs_no_replica() {
    let Some((fleet, backend)) = fleet(1, WaitReplicas::AtLeast(1)).await else { return };
    let over = backend.acquire(&call(), &request("a")).await.unwrap();
    backend.release(&call(), &over).await.unwrap();
    fleet.replicas[0].promote().await;
    let lost = backend.renew(&call(), &over, TTL).await.unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::Lost, "{lost}");
    let many = backend.renew_many(&call(), &[over.clone(), over.clone()], TTL).await;
    assert!(many.iter().all(|lost| lost.as_ref().unwrap_err().kind() == ErrorKind::Lost), "{many:?}");
    let lost = backend.raise(&call(), &over, over.fence).await.unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::Lost, "{lost}");
}

#[tokio::test]
async fn a_user_who_may_not_wait_has_written_all_the_same() {
    let Some((fleet, admin)) = fleet(1, WaitReplicas::AtLeast(1)).await else { return };
    let rules = ["ACL", "SETUSER", "locks", "on", ">pw", "~*", "&*", "+@all", "-wait"];
    let _: String = fleet.master.raw(&rules).await.unwrap();
    let backend = RedisBackend::connect(patient(&fleet, WaitReplicas::AtLeast(1)).with(|c| {
        (c.user, c.password) = (Some("locks".into()), Some("pw".into()));
    }))
    .await
    .unwrap();
    // A grant is taken back, and that is known.
    let refused = backend.acquire(&call(), &request("a")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unauthorized, "{refused}");
    assert_eq!(fleet.master.get("lockcore::{a}:lock").await, None);
    // The others stay.
    let lease = admin.acquire(&call(), &request("a")).await.unwrap();
    let doubt = backend.renew(&call(), &lease, TTL * 2).await.unwrap_err();
    assert_eq!(doubt.kind(), ErrorKind::Unknown, "{doubt}");
    assert!(doubt.to_string().contains("access list"), "{doubt}");
    assert!(fleet.master.pttl("lockcore::{a}:lock").await > 50_000, "it was renewed");
    let doubt = backend.raise_fence(&call(), &name("b"), lease.fence).await.unwrap_err();
    assert_eq!(doubt.kind(), ErrorKind::Unknown, "{doubt}");
    assert!(fleet.master.get("lockcore::{b}:fence").await.is_some());
}

#[tokio::test]
async fn an_unacknowledged_grant_is_not_adopted() {
    let Some((fleet, backend)) = fleet(1, WaitReplicas::AtLeast(1)).await else { return };
    let request = request("a");
    let without = RedisBackend::connect(config(&fleet.master)).await.unwrap();
    fleet.replicas[0].promote().await;
    let _ = without.acquire(&call(), &request).await.unwrap();
    let unsettled = backend.resolve(&call(), &request).await.unwrap_err();
    assert_eq!(unsettled.kind(), ErrorKind::Unknown, "{unsettled}");
    let refused = backend.acquire(&call(), &request).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "a re-ask waits, too: {refused}");
    assert!(matches!(backend.resolve(&call(), &request).await.unwrap(), Resolution::Gone));
}

#[tokio::test]
async fn without_waiting_a_takeover_forgets_the_lock_and_the_fence_still_grows() {
    let Some((mut fleet, backend)) = fleet(1, WaitReplicas::None).await else { return };
    assert!(!backend.capabilities().survives.failover);
    // What is granted from here on reaches no replica.
    fleet.replicas[0].promote().await;
    let old = backend.acquire(&call(), &request("a")).await.unwrap();
    fleet.master.kill();
    let after = RedisBackend::connect(config(&fleet.replicas[0])).await.unwrap();
    let new = after.acquire(&call(), &request("a")).await.unwrap();
    assert!(new.fence > old.fence, "{:?} after {:?}", new.fence, old.fence);
    let lost = after.renew(&call(), &old, TTL).await.unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::Lost, "{lost}");
    assert_eq!(after.release(&call(), &old).await.unwrap(), Released::AlreadyOver);
    let _ = after.renew(&call(), &new, TTL).await.unwrap();
}

#[tokio::test]
async fn what_waits_for_replicas_holds_up_nothing_else() {
    let Some((fleet, _)) = fleet(1, WaitReplicas::None).await else { return };
    let backend = RedisBackend::connect(patient(&fleet, WaitReplicas::AtLeast(1)).with(|c| {
        c.wait_timeout = Duration::from_secs(4);
    }));
    let backend = backend.await.unwrap();
    fleet.replicas[0].promote().await;
    let (call, request, other) = (call(), request("a"), name("b"));
    let mut waiting = pin!(backend.acquire(&call, &request));
    loop {
        tokio::select! {
            biased;
            early = &mut waiting => panic!("no replica can acknowledge it: {early:?}"),
            state = backend.inspect(&call, request.name()) => if state.unwrap().holder.is_some() { break },
        }
    }
    // Its grant waits now; others look meanwhile.
    for _ in 0..100 {
        tokio::select! {
            biased;
            state = backend.inspect(&call, &other) => assert!(state.unwrap().holder.is_none()),
            early = &mut waiting => panic!("it was to wait: {early:?}"),
        }
    }
    assert_eq!(waiting.await.unwrap_err().kind(), ErrorKind::Unavailable);
}

#[tokio::test]
async fn more_writes_than_connections_wait_their_turn() {
    let Some((_fleet, backend)) = fleet(1, WaitReplicas::Majority).await else { return };
    let backend = Arc::new(backend);
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..50 {
        let backend = backend.clone();
        tasks.spawn(async move {
            let lease = backend.acquire(&call(), &request(&format!("n/{n}"))).await.unwrap();
            let _ = backend.renew(&call(), &lease, TTL).await.unwrap();
            assert_eq!(backend.release(&call(), &lease).await.unwrap(), Released::Now);
        });
    }
    while let Some(done) = tasks.join_next().await {
        done.unwrap();
    }
}

#[tokio::test]
async fn a_disk_is_waited_for_only_where_the_server_can() {
    let Some(fleet) = Fleet::start(0, &["--appendonly", "yes"]).await else { return };
    let config = config(&fleet.master).with(|c| c.wait_fsync = true);
    let version: String = fleet.master.raw(&["INFO", "server"]).await.unwrap();
    let version = version.lines().find_map(|line| line.strip_prefix("redis_version:")).unwrap().to_owned();
    let can = version.split('.').map(|n| n.trim().parse::<u32>().unwrap()).collect::<Vec<_>>() >= vec![7, 2];
    match RedisBackend::connect(config).await {
        Ok(backend) => {
            assert!(can, "{version} has no WAITAOF");
            let lease = backend.acquire(&call(), &request("a")).await.unwrap();
            let _ = backend.renew(&call(), &lease, TTL).await.unwrap();
        }
        Err(refused) => {
            assert!(!can, "{version} has WAITAOF: {refused}");
            assert_eq!(refused.kind(), ErrorKind::Misconfigured);
            assert!(refused.to_string().contains("7.2"), "{refused}");
        }
    }
}

#[tokio::test]
async fn a_user_who_may_not_ask_for_commands_is_told_so() {
    let Some(fleet) = Fleet::start(0, &["--appendonly", "yes"]).await else { return };
    let rules = ["ACL", "SETUSER", "locks", "on", ">pw", "~*", "&*", "+@all", "-command"];
    let _: String = fleet.master.raw(&rules).await.unwrap();
    let config = config(&fleet.master).with(|c| {
        c.wait_fsync = true;
        (c.user, c.password) = (Some("locks".into()), Some("pw".into()));
    });
    let refused = RedisBackend::connect(config).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unauthorized, "{refused}");
}

#[tokio::test]
async fn a_flush_of_the_scripts_is_no_reason_to_take_a_grant_back() {
    let Some((fleet, backend)) = fleet(1, WaitReplicas::AtLeast(1)).await else { return };
    let _: () = fleet.master.raw(&["SCRIPT", "FLUSH"]).await.unwrap();
    let lease = backend.acquire(&call(), &request("a")).await.unwrap();
    let _: () = fleet.master.raw(&["SCRIPT", "FLUSH"]).await.unwrap();
    let _ = backend.renew(&call(), &lease, TTL).await.unwrap();
}

#[tokio::test]
async fn preflight_names_replicas_that_are_not_waited_for_and_masters_that_stay_alone() {
    let Some((fleet, backend)) = fleet(2, WaitReplicas::None).await else { return };
    let findings = |preflight: &Preflight| preflight.findings.join("\n");
    let without = backend.preflight(&call()).await.unwrap();
    assert_eq!(without.capabilities.consistency, Consistency::Replicated);
    assert!(findings(&without).contains("2 replicas"), "{without:?}");
    assert!(findings(&without).contains("min-replicas-to-write"), "{without:?}");
    let _: () = fleet.master.raw(&["CONFIG", "SET", "min-replicas-to-write", "1"]).await.unwrap();
    let guarded = backend.preflight(&call()).await.unwrap();
    assert!(!findings(&guarded).contains("min-replicas-to-write"), "{guarded:?}");

    let some = RedisBackend::connect(patient(&fleet, WaitReplicas::Majority)).await.unwrap();
    let some = some.preflight(&call()).await.unwrap();
    assert!(!some.capabilities.survives.failover);
    assert!(findings(&some).contains("wait-replicas to 2"), "{some:?}");
    let all = RedisBackend::connect(patient(&fleet, WaitReplicas::AtLeast(2))).await.unwrap();
    let all = all.preflight(&call()).await.unwrap();
    assert!(all.capabilities.survives.failover, "{all:?}");
    assert!(!findings(&all).contains("replica"), "{all:?}");

    let more = RedisBackend::connect(patient(&fleet, WaitReplicas::AtLeast(3))).await.unwrap();
    let refused = more.acquire(&call(), &request("a")).await.unwrap_err();
    let more = more.preflight(&call()).await.unwrap();
    assert!(!more.capabilities.survives.failover, "{refused}, and yet {more:?}");
    assert!(
        findings(&more).contains("3 replicas must acknowledge each grant and 2 are connected"),
        "{more:?}"
    );
}

/// With `min-replicas-to-write` a master that lost its replicas takes no writes.
#[tokio::test]
async fn a_master_that_must_have_replicas_grants_nothing_without_them() {
    let Some(fleet) = Fleet::start(1, &[]).await else { return };
    let _: () = fleet
        .master
        .raw(&["CONFIG", "SET", "min-replicas-to-write", "1", "min-replicas-max-lag", "1"])
        .await
        .unwrap();
    let good = async |master: &Server, count: &str| {
        let info: String = master.raw(&["INFO", "replication"]).await.unwrap();
        info.contains(&format!("min_slaves_good_slaves:{count}"))
    };
    fleet.master.until("the replica is counted", async |master| good(master, "1").await).await;
    let backend = RedisBackend::connect(config(&fleet.master)).await.unwrap();
    let lease = backend.acquire(&call(), &request("a")).await.unwrap();
    fleet.replicas[0].promote().await;
    fleet.master.until("the replica is counted no more", async |master| good(master, "0").await).await;
    let refused = backend.acquire(&call(), &request("b")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    assert!(refused.to_string().contains("too few replicas"), "{refused}");
    let refused = backend.renew(&call(), &lease, TTL).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
}
