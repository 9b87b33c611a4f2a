//! A Cluster of the test's own: every slot, a takeover, and slots that move.

use super::{server::ClusterOf, *};
use crate::{WaitReplicas, cluster::slot};

async fn cluster(replicas: usize) -> Option<(ClusterOf, RedisBackend)> {
    let cluster = ClusterOf::start(3, replicas).await?;
    // One node suffices; the others are learnt.
    let backend = RedisBackend::connect(RedisConfig::cluster(cluster.places().split_off(2))).await.unwrap();
    Some((cluster, backend))
}

fn slot_of(text: &str) -> u16 {
    slot(&keys(text).lock)
}

#[tokio::test]
async fn locks_in_every_part_of_the_cluster_are_taken_renewed_listed_and_released() {
    let Some((cluster, backend)) = cluster(0).await else { return };
    let mut leases = Vec::new();
    for n in 0..60 {
        leases.push(backend.acquire(&call(), &request(&format!("n/{n:02}"))).await.unwrap());
    }
    let owners: std::collections::HashSet<usize> =
        (0..60).map(|n| cluster.owner(slot_of(&format!("n/{n:02}")))).collect();
    assert_eq!(owners.len(), 3, "every master has locks");
    let refused = backend.acquire(&call(), &request("n/07")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Held);

    for (lease, renewed) in leases.iter().zip(backend.renew_many(&call(), &leases, TTL * 2).await) {
        let renewed = renewed.unwrap();
        assert_eq!((renewed.fence, &renewed.name), (lease.fence, &lease.name));
        assert!(renewed.deadline > lease.deadline);
    }
    let listed = backend.list(&call(), Some(&name("n")), None).await.unwrap();
    assert_eq!(listed.len(), 60);
    assert!(listed.is_sorted());
    let highest = leases.iter().map(|lease| lease.fence).max().unwrap();
    assert!(backend.high_water(&call()).await.unwrap().unwrap() >= highest);

    let broken = backend.break_lock(&call(), &name("n/07"), Some(leases[7].stamp())).await.unwrap();
    assert!(broken.floor > leases[7].fence);
    let lost = backend.renew(&call(), &leases[7], TTL).await.unwrap_err();
    assert_eq!(lost.lost_reason(), Some(LostReason::Broken), "{lost}");
    for (n, lease) in leases.iter().enumerate() {
        let ended = backend.release(&call(), lease).await.unwrap();
        assert_eq!(ended, if n == 7 { Released::AlreadyOver } else { Released::Now });
    }
    let preflight = backend.preflight(&call()).await.unwrap();
    assert_eq!(preflight.capabilities.consistency, Consistency::Replicated);
    assert!(preflight.findings.iter().any(|finding| finding.contains("no replica")), "{preflight:?}");
}

#[tokio::test]
async fn a_node_that_is_silent_costs_no_renewal_of_the_others() {
    let Some((cluster, backend)) = cluster(0).await else { return };
    let away = cluster.owner(slot_of("n/0"));
    let mut leases = Vec::new();
    for n in 0..12 {
        leases.push(backend.acquire(&call(), &request(&format!("n/{n}"))).await.unwrap());
    }
    // Its group is the first that is asked.
    cluster.nodes[away].signal(Signal::STOP);
    let short = budget(Duration::from_millis(600));
    let answers = backend.renew_many(&short, &leases, TTL * 2).await;
    assert!(short.now() < short.deadline(), "the answers came when the call was over");
    cluster.nodes[away].signal(Signal::CONT);
    for (lease, answer) in leases.iter().zip(answers) {
        match answer {
            Ok(renewed) => assert!(renewed.deadline > lease.deadline),
            Err(error) => {
                assert_eq!(cluster.owner(slot_of(lease.name.as_str())), away, "{error}");
                assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
            }
        }
    }
}

#[tokio::test]
async fn a_first_node_that_is_silent_leaves_time_for_the_others() {
    let Some((cluster, _)) = cluster(0).await else { return };
    // It takes connections and never says a word.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = ("127.0.0.1".to_owned(), silent.local_addr().unwrap().port());
    let nodes = [silent, cluster.places().remove(0)];
    let config = RedisConfig::cluster(nodes).with(|c| c.recheck = WATCHDOG * 4);
    let backend = RedisBackend::connect(config).await.unwrap();
    // Nor does who listens for a release wait for it.
    let held = backend.acquire(&call(), &AcquireRequest::new(name("a"), WATCHDOG * 5)).await.unwrap();
    let (call_w, request_w) = waiting("a", WATCHDOG);
    let release = async {
        let channel = keys("a").channel;
        cluster.nodes[0]
            .until("somebody listens", async |node| {
                let count: Vec<redis::Value> = node.raw(&["PUBSUB", "NUMSUB", &channel]).await.unwrap();
                count[1] == redis::Value::Int(1)
            })
            .await;
        backend.release(&call(), &held).await.unwrap();
    };
    let (next, ()) = in_time(async { tokio::join!(backend.acquire(&call_w, &request_w), release) }).await;
    assert!(next.unwrap().fence > held.fence);
}

#[tokio::test]
async fn a_waiter_is_told_of_a_release_on_another_node() {
    let Some((_cluster, backend)) = cluster(0).await else { return };
    for text in ["a", "b", "c", "d"] {
        let lease = backend.acquire(&call(), &request(text)).await.unwrap();
        let (call, request) = waiting(text, WATCHDOG);
        let waiting = backend.acquire(&call, &request);
        let releasing = async {
            let channel = keys(text).channel;
            _cluster.nodes[2]
                .until("somebody listens", async |node| {
                    // The one connection that listens is to the node that was given.
                    let count: Vec<redis::Value> = node.raw(&["PUBSUB", "NUMSUB", &channel]).await.unwrap();
                    count[1] == redis::Value::Int(1)
                })
                .await;
            backend.release(&self::call(), &lease).await.unwrap();
            Instant::now()
        };
        let (got, released) = in_time(async { tokio::join!(waiting, releasing) }).await;
        let got = got.unwrap();
        println!("handed over {:?} after the release", released.elapsed());
        assert!(got.fence > lease.fence);
    }
}

#[tokio::test]
async fn a_replica_takes_over_and_the_client_finds_it_with_its_lock() {
    let Some((mut cluster, _)) = cluster(1).await else { return };
    let config = RedisConfig::cluster(cluster.places()).with(|c| {
        c.wait_replicas = WaitReplicas::AtLeast(1);
        c.connect_timeout = Duration::from_millis(500);
    });
    let backend = RedisBackend::connect(config).await.unwrap();
    let lease = backend.acquire(&call(), &request("a")).await.unwrap();
    assert!(backend.capabilities().survives.failover);
    let owner = cluster.owner(slot_of("a"));
    cluster.nodes[owner].kill();
    // Nobody waits for a replica that the new master does not have.
    let after = RedisBackend::connect(RedisConfig::cluster(cluster.places())).await.unwrap();
    let begun = Instant::now();
    let renewed = loop {
        match after.renew(&budget(Duration::from_secs(2)), &lease, TTL).await {
            Ok(lease) => break lease,
            Err(error) => {
                assert!(error.kind() != ErrorKind::Lost, "{error:?}");
                assert!(begun.elapsed() < WATCHDOG, "nobody took over: {error:?}");
            }
        }
    };
    println!("followed after {:?}", begun.elapsed());
    let refused = after.acquire(&call(), &request("a")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Held, "{refused}");
    // The client that was there before finds its way, too: it is refused for want of a replica.
    let unsure = backend.renew(&call(), &lease, TTL).await.unwrap_err();
    assert_eq!(unsure.kind(), ErrorKind::Unknown, "{unsure}");
    assert!(unsure.to_string().contains("0 of the 1 replicas"), "{unsure}");
    assert_eq!(after.release(&call(), &renewed).await.unwrap(), Released::Now);
    let next = after.acquire(&call(), &request("a")).await.unwrap();
    assert!(next.fence > lease.fence);
}

#[tokio::test]
async fn a_slot_that_moves_keeps_its_lock_and_its_fence() {
    let Some((cluster, backend)) = cluster(0).await else { return };
    let (slot, lock) = (slot_of("a").to_string(), keys("a").lock);
    let (from, to) = {
        let owner = cluster.owner(slot_of("a"));
        (&cluster.nodes[owner], &cluster.nodes[(owner + 1) % 3])
    };
    let (from_id, to_id) = (from.id().await, to.id().await);
    let port = to.port.to_string();
    let migrate = async |key: &str| {
        let _: String = from.raw(&["MIGRATE", "127.0.0.1", &port, key, "0", "5000"]).await.unwrap();
    };
    let lease = backend.acquire(&call(), &request("a")).await.unwrap();

    // It begins; the keys are where they were.
    let _: () = to.raw(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]).await.unwrap();
    let _: () = from.raw(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]).await.unwrap();
    let lease = backend.renew(&call(), &lease, TTL).await.unwrap();
    let many = backend.renew_many(&call(), std::slice::from_ref(&lease), TTL).await;
    let lease = many.into_iter().next().unwrap().unwrap();

    // The lock is there, the fence is here: the holder goes on, and nobody else is granted anything.
    migrate(&lock).await;
    let lease = backend.renew(&call(), &lease, TTL).await.unwrap();
    let many = backend.renew_many(&call(), std::slice::from_ref(&lease), TTL).await;
    let lease = many.into_iter().next().unwrap().unwrap();
    let refused = backend.acquire(&budget(Duration::from_millis(300)), &request("a")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    assert!(refused.to_string().contains("moves"), "{refused}");
    assert_eq!(backend.release(&call(), &lease).await.unwrap(), Released::Now);
    let refused = backend.acquire(&budget(Duration::from_millis(300)), &request("a")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");

    // Who has the time gets it when the move is over.
    let (call, request) = (call(), request("a"));
    let mut acquiring = pin!(backend.acquire(&call, &request));
    for _ in 0..10 {
        tokio::select! {
            biased;
            early = &mut acquiring => panic!("the fence was not to be seen: {early:?}"),
            info = from.cluster_info() => assert!(info.contains("cluster_state:ok")),
        }
    }
    let mut moving = pin!(async {
        migrate(&keys("a").fence).await;
        for node in [to, from] {
            let _: () = node.raw(&["CLUSTER", "SETSLOT", &slot, "NODE", &to_id]).await.unwrap();
        }
    });
    let (next, ()) = in_time(async { tokio::join!(&mut acquiring, &mut moving) }).await;
    let next = next.unwrap();
    assert!(next.fence > lease.fence, "the fence was left behind");
    assert!(to.get(&lock).await.is_some());
    assert_eq!(backend.release(&self::call(), &next).await.unwrap(), Released::Now);
}

#[tokio::test]
async fn a_client_with_an_old_map_is_sent_on_once() {
    let Some((cluster, backend)) = cluster(0).await else { return };
    let lease = backend.acquire(&call(), &request("a")).await.unwrap();
    let slot = slot_of("a").to_string();
    let owner = cluster.owner(slot_of("a"));
    let to = &cluster.nodes[(owner + 1) % 3];
    let (from, to_id) = (&cluster.nodes[owner], to.id().await);
    let _: () = to.raw(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from.id().await]).await.unwrap();
    let _: () = from.raw(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]).await.unwrap();
    for key in [keys("a").lock, keys("a").fence] {
        let port = to.port.to_string();
        let _: String = from.raw(&["MIGRATE", "127.0.0.1", &port, &key, "0", "5000"]).await.unwrap();
    }
    for node in [to, from] {
        let _: () = node.raw(&["CLUSTER", "SETSLOT", &slot, "NODE", &to_id]).await.unwrap();
    }
    let _ = backend.renew(&call(), &lease, TTL).await.unwrap();
    let _: () = to.raw(&["CONFIG", "RESETSTAT"]).await.unwrap();
    assert_eq!(backend.release(&call(), &lease).await.unwrap(), Released::Now);
    // Sent on once, by the renewal; the release went straight to the new place.
    let stats: String = to.raw(&["INFO", "commandstats"]).await.unwrap();
    let calls = stats.lines().find(|line| line.starts_with("cmdstat_eval")).unwrap_or_default();
    assert!(calls.contains("calls=1,"), "{stats}");
    let other = backend.acquire(&call(), &request("a")).await.unwrap();
    assert!(other.fence > lease.fence);
}

#[tokio::test]
async fn a_cluster_without_one_of_its_masters_says_that_it_is_down() {
    let Some((mut cluster, backend)) = cluster(0).await else { return };
    let lost = cluster.owner(slot_of("a"));
    let here = (0..100).map(|n| format!("n/{n}")).find(|n| cluster.owner(slot_of(n)) != lost).unwrap();
    let lease = backend.acquire(&call(), &request(&here)).await.unwrap();
    cluster.nodes[lost].kill();
    cluster.nodes[(lost + 1) % 3]
        .until("it is missed", async |node| node.cluster_info().await.contains("cluster_state:fail"))
        .await;
    let short = || budget(Duration::from_millis(500));
    for text in ["a", "b", "c", &here] {
        let refused = backend.acquire(&short(), &request(text)).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused:?}");
    }
    let refused = backend.renew(&short(), &lease, TTL).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused:?}");
    assert!(refused.to_string().contains("Cluster is down"), "{refused}");
}

#[tokio::test]
async fn what_is_no_cluster_and_a_node_taken_for_a_single_server_are_named() {
    let Some(server) = Server::start().await else { return };
    let backend = RedisBackend::lazy(RedisConfig::cluster([("127.0.0.1", server.port)])).unwrap();
    let refused = backend.acquire(&call(), &request("a")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Misconfigured, "{refused:?}");
    assert!(refused.to_string().contains("no node of a Cluster"), "{refused}");

    let Some((cluster, _)) = cluster(0).await else { return };
    let node = &cluster.nodes[(cluster.owner(slot_of("a")) + 1) % 3];
    let backend = RedisBackend::connect(config(node)).await.unwrap();
    let refused = backend.acquire(&call(), &request("a")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Misconfigured);
    assert!(refused.to_string().contains("redis+cluster"), "{refused}");
    let preflight = backend.preflight(&call()).await.unwrap();
    assert!(preflight.findings.iter().any(|finding| finding.contains("redis+cluster")), "{preflight:?}");
}
