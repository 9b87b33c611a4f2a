//! Three servers of the test's own: what a holder and a queue live through when one of them dies or stops.

mod common;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
    time::Duration,
};

use common::*;
use lockcore::backend::*;
use lockcore_zk::{ZkBackend, ZkConfig};
use rustix::process::Signal;

async fn backend(ensemble: &Ensemble) -> Arc<ZkBackend> {
    let backend = Arc::new(ZkBackend::lazy(ZkConfig::parse(&ensemble.addresses()).unwrap()).unwrap());
    eventually("the ensemble serves", async || backend.high_water(&call()).await.is_ok()).await;
    backend
}

/// Counts alone inside a lock until told to stop, through whatever happens; returns how often.
fn counts(
    backend: Arc<ZkBackend>,
    resource: Arc<AtomicI64>,
    inside: Arc<AtomicI64>,
    total: Arc<AtomicI64>,
    stop: Arc<AtomicBool>,
) -> tokio::task::JoinHandle<u32> {
    tokio::spawn(async move {
        let mut counted = 0;
        while !stop.load(Ordering::SeqCst) {
            let end = BootClock.now().saturating_add(Duration::from_secs(2));
            let asked = request_of("hot", Duration::from_secs(3)).waiting_until(end);
            let Ok(held) = backend.acquire(&call_of(Duration::from_secs(2)), &asked).await else {
                while backend.abandon(&call_of(Duration::from_secs(1)), &asked).await.is_err() {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                continue;
            };
            if BootClock.now() < held.deadline {
                let others = inside.fetch_add(1, Ordering::SeqCst);
                let before = resource.swap(held.fence.get(), Ordering::SeqCst);
                // Nothing is awaited inside, so the lease outlives this by far or the process stood still.
                inside.fetch_sub(1, Ordering::SeqCst);
                if BootClock.now() < held.deadline {
                    assert_eq!(others, 0, "alone inside");
                    assert!(held.fence.get() > before, "{} after {before}", held.fence);
                }
                counted += 1;
                total.fetch_add(1, Ordering::SeqCst);
            }
            let mut tries = 0;
            while tries < 20 && backend.release(&call_of(Duration::from_secs(1)), &held).await.is_err() {
                tokio::time::sleep(Duration::from_millis(20)).await;
                tries += 1;
            }
        }
        counted
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hand_offs_go_on_in_order_of_fences_while_leaders_die_and_stop() {
    let Some(mut ensemble) = Ensemble::start(3) else { return };
    let (resource, inside, total) = (Arc::default(), Arc::default(), Arc::<AtomicI64>::default());
    let stop = Arc::<AtomicBool>::default();
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(counts(
            backend(&ensemble).await,
            Arc::clone(&resource),
            Arc::clone(&inside),
            total.clone(),
            stop.clone(),
        ));
    }
    let moves = async |what: &str| {
        let before = total.load(Ordering::SeqCst);
        eventually(what, async || total.load(Ordering::SeqCst) > before + 50).await;
    };
    moves("they count").await;
    let leader = ensemble.leader();
    ensemble.kill(leader);
    moves("they count after the leader died").await;
    ensemble.restart(leader);
    let leader = ensemble.leader();
    ensemble.signal(leader, Signal::STOP);
    moves("they count while the leader stands still").await;
    ensemble.signal(leader, Signal::CONT);
    moves("they count after it goes on").await;
    let follower = (ensemble.leader() + 1) % 3;
    ensemble.signal(follower, Signal::STOP);
    moves("they count while a follower stands still").await;
    ensemble.signal(follower, Signal::CONT);
    stop.store(true, Ordering::SeqCst);
    for client in clients {
        assert!(client.await.unwrap() > 0, "one of them never got its turn");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_keeps_its_lock_when_the_leader_dies() {
    let Some(mut ensemble) = Ensemble::start(3) else { return };
    let (holder, other) = (backend(&ensemble).await, backend(&ensemble).await);
    let ttl = Duration::from_secs(8);
    let mut held = holder.acquire(&call(), &request_of("kept", ttl)).await.unwrap();
    let leader = ensemble.leader();
    ensemble.kill(leader);
    eventually("it is renewed by the new leader", async || {
        match holder.renew(&call_of(Duration::from_secs(2)), &held, ttl).await {
            Ok(renewed) => {
                let moved = renewed.deadline > held.deadline;
                held = renewed;
                moved
            }
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::Unknown | ErrorKind::Unavailable), "{error:?}");
                false
            }
        }
    })
    .await;
    let mut refused = None;
    eventually("the other is told", async || {
        let answer = other.acquire(&call_of(Duration::from_secs(2)), &request_of("kept", ttl)).await;
        refused = answer.err().filter(|error| error.kind() == ErrorKind::Held);
        refused.is_some()
    })
    .await;
    assert_eq!(refused.unwrap().holder().unwrap().stamp(), held.stamp());
    assert_eq!(holder.release(&call(), &held).await.unwrap(), Released::Now);
    let next = other.acquire(&call(), &request_of("kept", ttl)).await.unwrap();
    assert!(next.fence > held.fence);
}

/// The follower that took a renewal dies before it has told its leader that the session was heard.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_node_ends_before_its_leases_deadline_when_a_follower_dies_after_a_renewal() {
    let Some(mut ensemble) = Ensemble::start(3) else { return };
    // A session of 3072 ms carries this TTL.
    let (ttl, timeout) = (Duration::from_millis(2300), Duration::from_millis(3072));
    let watcher = backend(&ensemble).await;
    let mut judged = 0;
    for round in 0..5_usize {
        let leader = ensemble.leader();
        let follower = (leader + 1 + round % 2) % 3;
        let line = line_to(ensemble.address(follower));
        let holder = ZkBackend::lazy(ZkConfig::new([&line.address().to_string()])).unwrap();
        let asked = request_of(&format!("touch/{round}"), ttl);
        let Ok(held) = holder.acquire(&call(), &asked).await else { continue };
        // A silence that the client library still bears, and then one write that is answered.
        let Ok(held) = holder.renew(&call(), &held, ttl).await else { continue };
        let began = BootClock.now();
        line.hold(Direction::ToServer, true);
        BootClock.sleep_until(began.saturating_add(timeout.mul_f64(0.37))).await;
        line.hold(Direction::ToServer, false);
        let renewed = holder.renew(&call(), &held, ttl).await;
        ensemble.kill(follower);
        judged += u32::from(renewed.is_ok());
        let deadline = renewed.map_or(held.deadline, |lease| lease.deadline);
        while BootClock.now() < deadline {
            let state = watcher.inspect(&call_of(Duration::from_secs(1)), asked.name()).await;
            let now = BootClock.now();
            if let Ok(state) = state
                && now < deadline
            {
                let left = now.until(deadline);
                assert!(
                    state.holder.is_some(),
                    "round {round}: its node is gone {left:?} before the deadline"
                );
            }
        }
        ensemble.restart(follower);
    }
    assert!(judged >= 3, "only {judged} rounds could be judged");
}
