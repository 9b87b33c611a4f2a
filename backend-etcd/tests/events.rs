//! What is normal in the life of a cluster: members that lag, learn or know nobody, full disks, tokens that run out.

mod common;
#[path = "common/wire.rs"]
mod wire;

use std::{sync::Arc, time::Duration};

use common::{Member, *};
use etcd_client::{
    AlarmAction, AlarmOptions, AlarmType, Client, CompactionOptions, ConnectOptions, MemberAddOptions,
    Permission,
};
use lockcore::backend::*;
use lockcore_etcd::{EtcdBackend, EtcdConfig};
use wire::Wire;

const TTL: Duration = Duration::from_secs(5);

fn lazy(urls: &[&str]) -> Arc<EtcdBackend> {
    Arc::new(EtcdBackend::lazy(EtcdConfig::new(urls.iter().copied())).unwrap())
}

#[tokio::test]
async fn a_member_that_is_slow_is_served_within_the_budget_and_no_deadline_is_overstated() {
    let Some(server) = Server::start() else { return };
    let wire = Wire::to(&server.url).await;
    let slow = lazy(&[&wire.url]);
    serves(&slow).await;
    wire.delay(Duration::from_millis(150));
    let before = call().now();
    let held = slow.acquire(&call(), &request_of("k", TTL)).await.unwrap();
    assert!(held.deadline <= before.saturating_add(TTL), "counted from before the request");
    let before = call().now();
    let renewed = slow.renew(&call(), &held, TTL).await.unwrap();
    assert!(renewed.deadline > held.deadline && renewed.deadline <= before.saturating_add(TTL));
    assert_eq!(slow.release(&call(), &renewed).await.unwrap(), Released::Now);
    // Slower than the budget allows: nobody knows, and what was asked is settled when the wire is fast again.
    wire.delay(Duration::from_secs(2));
    let asked = request_of("k", TTL);
    let unknown = slow.acquire(&call_of(Duration::from_millis(600)), &asked).await.unwrap_err();
    assert!(matches!(unknown.kind(), ErrorKind::Unknown | ErrorKind::Unavailable), "{unknown:?}");
    wire.delay(Duration::ZERO);
    eventually("it is settled", async || slow.abandon(&call(), &asked).await.is_ok()).await;
    let held = slow.acquire(&call(), &request_of("k", TTL)).await.unwrap();
    slow.release(&call(), &held).await.unwrap();
}

#[tokio::test]
async fn replies_that_are_lost_leave_unknown_and_the_same_owner_finds_its_grant() {
    let Some(server) = Server::start() else { return };
    let wire = Wire::to(&server.url).await;
    let backend = lazy(&[&wire.url, &server.url]);
    let first = backend.acquire(&call(), &request_of("k", TTL)).await.unwrap();
    backend.release(&call(), &first).await.unwrap();
    let asked = request_of("k", TTL);
    wire.hold_replies();
    let unknown = backend.acquire(&call_of(Duration::from_millis(600)), &asked).await.unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::Unknown, "{unknown:?}");
    assert_eq!(server.places().await.len(), 1, "it was done");
    // The other way is tried by the next request.
    let held = backend.acquire(&call(), &asked).await.unwrap();
    let again = backend.acquire(&call(), &asked).await.unwrap();
    assert_eq!(held.stamp(), again.stamp());
    assert_eq!(server.places().await.len(), 1);
    assert_eq!(backend.release(&call(), &held).await.unwrap(), Released::Now);
    wire.deliver();
}

#[tokio::test]
async fn a_compaction_and_a_cut_watch_leave_a_waiter_where_it_is() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let held = backend.acquire(&call(), &request("k")).await.unwrap();
    let wire = Wire::to(&server.url).await;
    let waiter = lazy(&[&wire.url, &server.url]);
    let asked = request("k").waiting_until(Moment::MAX);
    let waits = tokio::spawn({
        let (waiter, asked) = (waiter.clone(), asked.clone());
        async move { waiter.acquire(&call_of(Duration::from_secs(60)), &asked).await }
    });
    eventually("it stands in the queue", async || server.places().await.len() == 2).await;
    let mut admin = server.admin().await;
    let mut newest = 0;
    for at in 0..20 {
        newest = admin.put("unrelated", at.to_string(), None).await.unwrap().header().unwrap().revision();
    }
    admin.compact(newest, Some(CompactionOptions::new().with_physical())).await.unwrap();
    // The end of the wire ends its connections' tasks with the replies held: the watch is silent from here on.
    wire.hold_replies();
    assert_eq!(server.places().await.len(), 2, "one place each");
    backend.release(&call(), &held).await.unwrap();
    let next = tokio::time::timeout(WATCHDOG, waits).await.expect("in time").unwrap().unwrap();
    assert!(next.fence > held.fence);
    assert_eq!(server.places().await.len(), 1, "one place, once");
    assert_eq!(waiter.release(&call(), &next).await.unwrap(), Released::Now);
}

#[tokio::test]
async fn a_learner_and_a_member_without_a_leader_refuse_and_another_is_asked() {
    let Some(server) = Server::start() else { return };
    // A member whose two others have died knows no leader, as one does that is cut off from them.
    let Some(mut partitioned) = Cluster::start(3) else { return };
    partitioned.is_whole().await;
    partitioned.members[1].kill();
    partitioned.members[2].kill();
    let lonely = &partitioned.members[0];
    let alone = lazy(&[&lonely.url]);
    eventually("it says that it knows no leader", async || {
        let none = alone.acquire(&call_of(Duration::from_secs(1)), &request("k")).await.unwrap_err();
        none.kind() == ErrorKind::Unavailable
    })
    .await;

    // A learner, added to the living cluster.
    let peer = free();
    let options = MemberAddOptions::new().with_is_learner();
    server.admin().await.member_add([peer.clone()], Some(options)).await.unwrap();
    let others = format!("m0={}", server.peer());
    let dir = tempfile::tempdir().unwrap();
    let learner =
        Member::spawn_at(dir.path(), "learner", &peer, &others, &["--initial-cluster-state", "existing"]);
    let studies = lazy(&[&learner.url]);
    let mut said = None;
    eventually("the learner refuses", async || {
        said = studies.acquire(&call_of(Duration::from_secs(1)), &request("k")).await.err();
        said.as_ref().is_some_and(|error| {
            error.kind() == ErrorKind::Unavailable
                && std::error::Error::source(error).is_some_and(|said| said.to_string().contains("learner"))
        })
    })
    .await;
    let preflight = lazy(&[&server.url, &learner.url]).preflight(&call()).await.unwrap();
    assert!(preflight.findings.iter().any(|f| f.contains("is a learner")), "{:?}", preflight.findings);

    // Both refuse before anything is done, so the very call goes on to the third.
    let all = lazy(&[&lonely.url, &learner.url, &server.url]);
    let held = all.acquire(&call(), &request("k")).await.unwrap();
    assert_eq!(all.release(&call(), &held).await.unwrap(), Released::Now);
    assert_eq!(server.places().await, [""; 0]);
}

#[tokio::test]
async fn a_cluster_without_space_says_nothing_certain_and_still_releases() {
    let Some(server) = Server::with(&["--quota-backend-bytes", "1048576"]) else { return };
    let backend = server.backend().await;
    let held = backend.acquire(&call(), &request_of("k", Duration::from_secs(60))).await.unwrap();
    let mut admin = server.admin().await;
    let full = async { while admin.put("fill", vec![7_u8; 64 << 10], None).await.is_ok() {} };
    tokio::time::timeout(WATCHDOG, full).await.expect("it is full in time");
    // The quota is looked at behind the write, so the refusal proves nothing.
    let unknown = backend.acquire(&call_of(Duration::from_secs(2)), &request("other")).await.unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::Unknown, "{unknown:?}");
    let preflight = backend.preflight(&call()).await.unwrap();
    assert!(preflight.findings.iter().any(|f| f.contains("Nospace")), "{:?}", preflight.findings);
    // Renewals and releases write nothing new.
    let held = backend.renew(&call(), &held, Duration::from_secs(60)).await.unwrap();
    assert_eq!(backend.release(&call(), &held).await.unwrap(), Released::Now);
    // Room is made, the alarm is taken off, and locks are granted again.
    let newest = admin.delete("fill", None).await.unwrap().header().unwrap().revision();
    admin.compact(newest, Some(CompactionOptions::new().with_physical())).await.unwrap();
    admin.defragment().await.unwrap();
    let raised = admin.alarm(AlarmAction::Get, AlarmType::None, None).await.unwrap();
    let mut by = AlarmOptions::new();
    by.with_member(raised.alarms()[0].member_id());
    admin.alarm(AlarmAction::Deactivate, AlarmType::Nospace, Some(by)).await.unwrap();
    let mut next = None;
    eventually("locks are granted again", async || {
        next = backend.acquire(&call(), &request("k")).await.ok();
        next.is_some()
    })
    .await;
    assert!(next.unwrap().fence > held.fence);
}

/// Turns on users: `root`, and `locks`, who may use the locks' prefix.
async fn with_users(server: &Server) -> Client {
    let mut admin = server.admin().await;
    admin.user_add("root", "r00t", None).await.unwrap();
    admin.role_add("root").await.unwrap();
    admin.user_grant_role("root", "root").await.unwrap();
    admin.user_add("locks", "s3cret", None).await.unwrap();
    admin.role_add("locks").await.unwrap();
    admin.role_grant_permission("locks", Permission::read_write("lockcore/").with_prefix()).await.unwrap();
    admin.user_grant_role("locks", "locks").await.unwrap();
    admin.auth_enable().await.unwrap();
    let options = ConnectOptions::new().with_user("root", "r00t").with_auto_token_refresh(true);
    Client::connect([&server.url], Some(options)).await.unwrap()
}

fn as_user(server: &Server, password: &str) -> Arc<EtcdBackend> {
    as_user_at(&[&server.url], password)
}

fn as_user_at(urls: &[&str], password: &str) -> Arc<EtcdBackend> {
    let config = EtcdConfig::new(urls.iter().copied()).with(|c| {
        c.user = Some("locks".into());
        c.password = Some(password.into());
    });
    Arc::new(EtcdBackend::lazy(config).unwrap())
}

async fn server_lease(root: &mut Client, part: &str) -> i64 {
    let options = etcd_client::GetOptions::new().with_prefix();
    let found = root.get("lockcore/", Some(options)).await.unwrap();
    let mut of = found.kvs().iter().filter(|kv| String::from_utf8_lossy(kv.key()).contains(part));
    of.next().expect("the place exists").lease()
}

#[tokio::test]
async fn a_token_that_runs_out_while_a_lock_is_held_or_waited_for_is_renewed() {
    let Some(server) = Server::with(&["--auth-token-ttl", "1"]) else { return };
    let mut root = with_users(&server).await;
    let (backend, other) = (as_user(&server, "s3cret"), as_user(&server, "s3cret"));
    let held = backend.acquire(&call(), &request_of("k", Duration::from_secs(30))).await.unwrap();
    let asked = request_of("k", Duration::from_secs(30)).waiting_until(Moment::MAX);
    let waits = tokio::spawn({
        let other = other.clone();
        async move { other.acquire(&call_of(Duration::from_secs(60)), &asked).await }
    });
    eventually("it stands in the queue", async || {
        backend.inspect(&call(), &held.name).await.unwrap().waiters == Some(1)
    })
    .await;
    let third = as_user(&server, "s3cret");
    let asked = request_of("e", Duration::from_secs(30));
    let watched = third.acquire(&call(), &asked).await.unwrap();
    let carrier = server_lease(&mut root, &hex(&asked)).await;
    // A token of its own, not used meanwhile, tells when those that are idle have run out.
    let stale = Client::connect([&server.url], Some(ConnectOptions::new().with_user("locks", "s3cret")))
        .await
        .unwrap();
    let begun = call().now();
    tokio::time::timeout(WATCHDOG, async {
        // Each look prolongs the token it shows, so there is one look.
        call().clock().sleep_until(begun.saturating_add(Duration::from_millis(3500))).await;
        let mut stale = stale;
        let said = stale.get("lockcore/", None).await.unwrap_err();
        assert!(said.to_string().contains("invalid auth token"), "{said}");
    })
    .await
    .expect("in time");
    // The first request with the stale token is a watch.
    let ended = tokio::spawn({
        let (third, watched) = (third.clone(), watched.clone());
        async move { third.ended(&call(), &watched).await }
    });
    root.lease_revoke(carrier).await.unwrap();
    let reason = tokio::time::timeout(WATCHDOG, ended).await.expect("the watch is allowed in time").unwrap();
    assert_eq!(reason, LostReason::Taken);
    let held = backend.renew(&call(), &held, Duration::from_secs(30)).await.unwrap();
    assert_eq!(backend.release(&call(), &held).await.unwrap(), Released::Now);
    let next = tokio::time::timeout(WATCHDOG, waits).await.expect("in time").unwrap().unwrap();
    assert!(next.fence > held.fence);

    // A change of users makes older tokens look old: no reason to fail either.
    root.role_add("another").await.unwrap();
    root.user_grant_role("locks", "another").await.unwrap();
    let next = other.renew(&call(), &next, Duration::from_secs(30)).await.unwrap();

    // The role is taken away: that is no loss, and it is said as what it is.
    root.user_revoke_role("locks", "locks").await.unwrap();
    let refused = other.renew(&call(), &next, Duration::from_secs(30)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unauthorized, "{refused:?}");
    let refused = backend.acquire(&call(), &request("k")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unauthorized, "{refused:?}");
    assert_eq!(backend.preflight(&call()).await.unwrap_err().kind(), ErrorKind::Unauthorized);
    root.user_grant_role("locks", "locks").await.unwrap();
    assert_eq!(other.release(&call(), &next).await.unwrap(), Released::Now);
}

#[tokio::test]
async fn a_refusal_that_comes_late_is_an_answer_and_keeps_connection_and_member() {
    let Some(server) = Server::with(&["--quota-backend-bytes", "1048576"]) else { return };
    let (wire, other) = (Wire::to(&server.url).await, Wire::to(&server.url).await);
    let backend = lazy(&[&wire.url, &other.url]);
    let held = backend.acquire(&call(), &request_of("k", Duration::from_secs(60))).await.unwrap();
    let mut admin = server.admin().await;
    let full = async { while admin.put("fill", vec![7_u8; 64 << 10], None).await.is_ok() {} };
    tokio::time::timeout(WATCHDOG, full).await.expect("it is full in time");
    // Longer than the silence after which a member is not asked first any more.
    wire.delay(Duration::from_millis(200));
    for _ in 0..2 {
        let refused = backend.acquire(&call(), &request("other")).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unknown, "{refused:?}");
    }
    assert_eq!((wire.connections(), other.connections()), (1, 0));
    wire.delay(Duration::ZERO);
    assert_eq!(backend.release(&call(), &held).await.unwrap(), Released::Now);
}

#[tokio::test]
async fn many_calls_at_once_dial_one_connection() {
    let Some(server) = Server::start() else { return };
    let _root = with_users(&server).await;
    let wire = Wire::to(&server.url).await;
    // Each connection logs in first, so there is time for the others to dial, too.
    let backend = as_user_at(&[&wire.url], "s3cret");
    let mut rounds = Vec::new();
    for n in 0..20 {
        let backend = backend.clone();
        rounds.push(tokio::spawn(async move {
            let held = backend.acquire(&call(), &request(&format!("k/{n}"))).await.unwrap();
            backend.release(&call(), &held).await.unwrap()
        }));
    }
    for round in rounds {
        assert_eq!(round.await.unwrap(), Released::Now);
    }
    assert_eq!(wire.connections(), 1);
}

#[tokio::test]
async fn a_wrong_password_and_a_missing_user_are_told_and_show_no_secret() {
    let Some(server) = Server::start() else { return };
    let unneeded = as_user(&server, "s3cret").acquire(&call(), &request("k")).await.unwrap_err();
    assert_eq!(unneeded.kind(), ErrorKind::Misconfigured, "{unneeded:?}");
    let _root = with_users(&server).await;
    let wrong = as_user(&server, "wr0ng");
    let refused = wrong.acquire(&call(), &request("k")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unauthorized, "{refused:?}");
    let nobody = lazy(&[&server.url]).acquire(&call(), &request("k")).await.unwrap_err();
    assert_eq!(nobody.kind(), ErrorKind::Unauthorized, "{nobody:?}");
    let right = as_user(&server, "s3cret");
    let held = right.acquire(&call(), &request("k")).await.unwrap();
    let ended = tokio::spawn({
        let (right, held) = (right.clone(), held.clone());
        async move { right.ended(&call(), &held).await }
    });
    right.preflight(&call()).await.unwrap();
    right.break_lock(&call(), &held.name, None).await.unwrap();
    let reason = tokio::time::timeout(WATCHDOG, ended).await.expect("in time").unwrap();
    assert_eq!(reason, LostReason::Broken);
    for shown in [format!("{wrong:?}"), format!("{refused:?}"), format!("{refused}"), format!("{right:?}")] {
        assert!(!shown.contains("wr0ng") && !shown.contains("s3cret"), "{shown}");
    }
}

#[tokio::test]
async fn the_phases_of_a_migration_bind_their_members() {
    let Some(server) = Server::start() else { return };
    let (backend, other) = (server.backend().await, server.backend().await);
    assert_eq!(backend.phase_read(&call()).await.unwrap(), None);
    let closed = backend.join(&call(), "from", TTL).await.unwrap_err();
    assert_eq!(closed.kind(), ErrorKind::Unavailable, "{closed:?}");
    let mut record = PhaseRecord::new("redis to etcd", 1);
    record.open = vec!["from".into(), "both".into()];
    assert!(backend.phase_cas(&call(), None, &record).await.unwrap());
    assert!(!other.phase_cas(&call(), None, &record).await.unwrap(), "it is there already");
    assert_eq!(other.phase_read(&call()).await.unwrap().as_ref(), Some(&record));
    let member = backend.join(&call(), "from", TTL).await.unwrap();
    // It is renewed and left like a lock, and it is none: the name is free for one.
    let lock = other.acquire(&call(), &request("from")).await.unwrap();
    let renewed = backend.renew(&call(), &member, TTL).await.unwrap();
    assert!(renewed.deadline > member.deadline);
    assert_eq!(server.places().await.len(), 2, "{:?}", server.places().await);
    let mut next = PhaseRecord::new("redis to etcd", 2);
    next.open = vec!["both".into()];
    next.floor = Some(lock.fence);
    assert!(!other.phase_cas(&call(), Some(&next), &next).await.unwrap());
    assert!(other.phase_cas(&call(), Some(&record), &next).await.unwrap());
    assert_eq!(backend.join(&call(), "from", TTL).await.unwrap_err().kind(), ErrorKind::Unavailable);
    let both = backend.join(&call(), "both", TTL).await.unwrap();
    assert_eq!(backend.leave(&call(), &renewed).await.unwrap(), Released::Now);
    assert_eq!(backend.leave(&call(), &renewed).await.unwrap(), Released::AlreadyOver);
    assert_eq!(backend.leave(&call(), &both).await.unwrap(), Released::Now);
    other.release(&call(), &lock).await.unwrap();
    assert_eq!(server.places().await, [""; 0]);
}
