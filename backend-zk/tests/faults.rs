//! What goes wrong around a holder and a queue, against a real ZooKeeper.

mod common;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
    time::{Duration, Instant},
};

use common::*;
use lockcore::backend::*;
use lockcore_zk::{ZkBackend, ZkConfig};
use rustix::process::Signal;

const TTL: Duration = Duration::from_secs(2);

/// Asks until the backend is sure that nothing of an acquire is left, or has adopted it.
async fn settle(backend: &ZkBackend, asked: &AcquireRequest) -> Resolution {
    let mut settled = None;
    eventually("the acquire is settled", async || {
        match backend.resolve(&call_of(Duration::from_secs(1)), asked).await {
            Ok(resolution) => settled = Some(resolution),
            Err(error) => assert!(
                matches!(error.kind(), ErrorKind::Unknown | ErrorKind::Unavailable | ErrorKind::Lost),
                "{error:?}"
            ),
        }
        settled.is_some()
    })
    .await;
    settled.unwrap()
}

#[tokio::test]
async fn a_create_whose_reply_was_lost_is_found_and_adopted_once() {
    let Some(server) = Server::start() else { return };
    let line = line_to(&server.address);
    let backend = backend_at(&line.address().to_string()).await;
    // The session is there, and so is the queue.
    let warm = backend.acquire(&call(), &request_of("lost", TTL)).await.unwrap();
    backend.release(&call(), &warm).await.unwrap();
    for again in [true, false] {
        let asked = request_of("lost", TTL);
        line.hold(Direction::ToClient, true);
        let unknown = backend.acquire(&call_of(Duration::from_millis(300)), &asked).await.unwrap_err();
        assert_eq!(unknown.kind(), ErrorKind::Unknown, "{unknown:?}");
        eventually("the node stands", async || {
            server.places().await.iter().any(|path| path.contains(&hex(&asked)))
        })
        .await;
        line.reset();
        line.hold(Direction::ToClient, false);
        let mut lease = None;
        if again {
            eventually("it is adopted", async || {
                lease = backend.acquire(&call_of(Duration::from_secs(1)), &asked).await.ok();
                lease.is_some()
            })
            .await;
        } else if let Resolution::Adopted(adopted) = settle(&backend, &asked).await {
            lease = Some(adopted);
        }
        let lease = lease.expect("what stands is adopted");
        let (_, stat) = server.place_of(&hex(&asked)).await;
        assert_eq!(backend.acquire(&call(), &asked).await.unwrap().fence, lease.fence, "one grant");
        assert!(stat.ephemeral_owner != 0);
        assert_eq!(backend.release(&call(), &lease).await.unwrap(), Released::Now);
    }
}

#[tokio::test]
async fn an_acquire_cut_at_any_moment_ends_as_one_node_or_none_and_blocks_nobody() {
    let Some(server) = Server::start() else { return };
    let line = line_to(&server.address);
    let (backend, other) = (backend_at(&line.address().to_string()).await, server.backend().await);
    // The session is there, and so is the queue.
    let warm = backend.acquire(&call(), &request("cut")).await.unwrap();
    backend.release(&call(), &warm).await.unwrap();
    let (mut adopted, mut gone) = (0, 0);
    for round in 0..60_u64 {
        let asked = request("cut");
        let (mine, same) = (backend.clone(), asked.clone());
        let acquire =
            tokio::spawn(async move { mine.acquire(&call_of(Duration::from_millis(400)), &same).await });
        // Before, during and after the create; some with the reply on its way, some with the request.
        match round % 3 {
            0 => line.hold(Direction::ToClient, true),
            1 => line.hold(Direction::ToServer, true),
            _ => {}
        }
        if round % 6 == 0 {
            // At least in these the create has come through, however slow the machine is.
            eventually("the node stands", async || !server.places().await.is_empty()).await;
        } else {
            tokio::time::sleep(Duration::from_micros(150 * (round % 20))).await;
        }
        line.reset();
        line.hold(Direction::ToClient, false);
        line.hold(Direction::ToServer, false);
        let lease = match acquire.await.unwrap() {
            Ok(lease) => Some(lease),
            Err(_) => match settle(&backend, &asked).await {
                Resolution::Adopted(lease) => Some(lease),
                _ => None,
            },
        };
        let places = server.places().await;
        match lease {
            Some(lease) => {
                adopted += 1;
                assert_eq!(places.len(), 1, "round {round}: {places:?}");
                eventually("it is released", async || backend.release(&call(), &lease).await.is_ok()).await;
            }
            None => {
                gone += 1;
                assert_eq!(places, [""; 0], "round {round}");
            }
        }
        let waiting = request("cut").waiting_until(BootClock.now().saturating_add(Duration::from_secs(5)));
        let next = other.acquire(&call(), &waiting).await.expect("nobody is in the way");
        other.release(&call(), &next).await.unwrap();
    }
    assert!(adopted > 0 && gone > 0, "{adopted} adopted, {gone} gone");
}

#[tokio::test]
async fn a_request_that_was_given_up_on_its_way_leaves_nothing_even_when_it_lands_later() {
    let Some(server) = Server::start() else { return };
    let line = line_to(&server.address);
    let backend = backend_at(&line.address().to_string()).await;
    let long = Duration::from_secs(10);
    let _warm = backend.acquire(&call(), &request_of("warm", long)).await.unwrap();
    for _ in 0..5 {
        let asked = request_of("late", long);
        line.hold(Direction::ToServer, true);
        let late = backend.acquire(&call_of(Duration::from_millis(100)), &asked).await;
        assert_eq!(late.unwrap_err().kind(), ErrorKind::Unknown);
        // Nothing can be settled yet, and nobody claims that it was.
        assert!(backend.abandon(&call_of(Duration::from_millis(100)), &asked).await.is_err());
        line.hold(Direction::ToServer, false);
        eventually("it is cleared away", async || {
            backend.abandon(&call_of(Duration::from_secs(1)), &asked).await.is_ok()
        })
        .await;
        assert!(!server.places().await.iter().any(|path| path.contains("late")), "it landed and stays");
    }
}

#[tokio::test]
async fn what_nobody_abandons_is_swept_by_its_session() {
    let Some(server) = Server::start() else { return };
    let line = line_to(&server.address);
    let backend = backend_at(&line.address().to_string()).await;
    let ttl = Duration::from_millis(1500);
    let warm = backend.acquire(&call(), &request_of("forgotten", ttl)).await.unwrap();
    backend.release(&call(), &warm).await.unwrap();
    let asked = request_of("forgotten", ttl);
    line.hold(Direction::ToClient, true);
    // Its future is dropped after the request has left.
    let call = call();
    let _ = tokio::time::timeout(Duration::from_millis(150), backend.acquire(&call, &asked)).await;
    line.hold(Direction::ToClient, false);
    eventually("the node stood", async || {
        server.places().await.iter().any(|path| path.contains(&hex(&asked)))
    })
    .await;
    eventually("the node is gone", async || {
        !server.places().await.iter().any(|path| path.contains(&hex(&asked)))
    })
    .await;
}

#[tokio::test]
async fn a_session_that_the_server_ended_takes_its_leases_and_the_next_acquire_gets_another() {
    let Some(server) = Server::start() else { return };
    let line = line_to(&server.address);
    let backend = backend_at(&line.address().to_string()).await;
    let ttl = Duration::from_millis(600);
    let asked = request_of("ends", ttl);
    let held = backend.acquire(&call(), &asked).await.unwrap();
    let waiting = request_of("other", ttl).waiting_until(Moment::MAX);
    let blocker = server.backend().await;
    let blocked = blocker.acquire(&call(), &request_of("other", Duration::from_secs(30))).await.unwrap();
    let waiter = waits(&backend, waiting.clone(), 1).await;
    let (_, before) = server.place_of(&hex(&waiting)).await;
    let ended = tokio::spawn({
        let (backend, held) = (backend.clone(), held.clone());
        async move { backend.ended(&call(), &held).await }
    });
    line.refuse(true);
    line.reset();
    eventually("the server ended the session", async || server.places().await.len() == 1).await;
    assert!(BootClock.now() >= held.deadline, "the server ended the session before the lease's deadline");
    line.refuse(false);
    assert_eq!(ended.await.unwrap(), LostReason::SessionEnded);
    let lost = backend.renew(&call(), &held, ttl).await.unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::Lost);
    let mut again = None;
    eventually("it is granted again", async || {
        again = backend.acquire(&call(), &request_of("ends", ttl)).await.ok();
        again.is_some()
    })
    .await;
    assert!(again.unwrap().fence > held.fence);
    eventually("the waiter stands on a new session", async || {
        server.places().await.iter().any(|path| path.contains(&hex(&waiting)))
            && server.place_of(&hex(&waiting)).await.1.ephemeral_owner != before.ephemeral_owner
    })
    .await;
    assert_eq!(blocker.release(&call(), &blocked).await.unwrap(), Released::Now);
    let next = waiter.await.unwrap().unwrap();
    assert!(next.fence > blocked.fence);
}

#[tokio::test]
async fn a_silent_line_is_unknown_in_bounds_and_the_lease_goes_on_afterwards() {
    let Some(server) = Server::start() else { return };
    let line = line_to(&server.address);
    let backend = backend_at(&line.address().to_string()).await;
    let long = Duration::from_secs(10);
    let held = backend.acquire(&call(), &request_of("silent", long)).await.unwrap();
    line.hold(Direction::ToServer, true);
    let began = Instant::now();
    let unknown = backend.renew(&call_of(Duration::from_millis(700)), &held, long).await.unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::Unknown, "{unknown:?}");
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    line.reset();
    line.hold(Direction::ToServer, false);
    let mut renewed = None;
    eventually("the session is back", async || {
        renewed = backend.renew(&call_of(Duration::from_secs(1)), &held, long).await.ok();
        renewed.is_some()
    })
    .await;
    assert!(renewed.unwrap().deadline >= held.deadline);
    assert_eq!(backend.release(&call(), &held).await.unwrap(), Released::Now);
}

#[tokio::test]
async fn a_waiter_keeps_its_place_over_a_cut_line_and_gets_its_turn() {
    let Some(server) = Server::start() else { return };
    let line = line_to(&server.address);
    let (backend, other) = (backend_at(&line.address().to_string()).await, server.backend().await);
    let long = Duration::from_secs(20);
    let held = other.acquire(&call(), &request_of("turn", long)).await.unwrap();
    let waiting = request_of("turn", long).waiting_until(Moment::MAX);
    let waiter = waits(&backend, waiting.clone(), 1).await;
    let (before, _) = server.place_of(&hex(&waiting)).await;
    for _ in 0..3 {
        line.reset();
        eventually("it is connected again", async || {
            let seen = backend.inspect(&call_of(Duration::from_secs(1)), waiting.name()).await;
            line.connections() > 0 && seen.is_ok_and(|state| state.waiters == Some(1))
        })
        .await;
    }
    line.refuse(true);
    line.reset();
    // It is told of nothing while it is away.
    assert_eq!(other.release(&call(), &held).await.unwrap(), Released::Now);
    line.refuse(false);
    let next = waiter.await.unwrap().unwrap();
    assert!(next.fence > held.fence);
    assert_eq!(server.place_of(&hex(&waiting)).await.0, before, "it stands where it stood");
    assert_eq!(backend.release(&call(), &next).await.unwrap(), Released::Now);
}

#[tokio::test]
async fn a_holder_whose_node_is_removed_is_told_before_its_deadline() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let long = Duration::from_secs(30);
    let asked = request_of("h", long);
    let held = backend.acquire(&call(), &asked).await.unwrap();
    let ended = tokio::spawn({
        let (backend, held) = (backend.clone(), held.clone());
        async move { backend.ended(&call(), &held).await }
    });
    let (path, _) = server.place_of(&hex(&asked)).await;
    server.admin().await.delete(&path, None).await.unwrap();
    let reason = tokio::time::timeout(Duration::from_secs(10), ended).await.expect("in time").unwrap();
    assert_eq!(reason, LostReason::Taken);
    let lost = backend.renew(&call(), &held, long).await.unwrap_err();
    assert_eq!(lost.lost_reason(), Some(LostReason::Taken));
    assert_eq!(backend.release(&call(), &held).await.unwrap(), Released::AlreadyOver);
}

#[tokio::test]
async fn a_waiter_whose_node_is_removed_queues_again_behind_the_others() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let long = Duration::from_secs(20);
    let held = backend.acquire(&call(), &request_of("w", long)).await.unwrap();
    let removed = request_of("w", long).waiting_until(Moment::MAX);
    let ticket = hex(&removed);
    let second = waits(&backend, removed, 1).await;
    let third = waits(&backend, request_of("w", long).waiting_until(Moment::MAX), 2).await;
    let (old, _) = server.place_of(&ticket).await;
    server.admin().await.delete(&old, None).await.unwrap();
    eventually("it stands in the queue again", async || {
        let places = server.places().await;
        places.len() == 3 && places.iter().any(|path| path.contains(&ticket) && *path != old)
    })
    .await;
    backend.release(&call(), &held).await.unwrap();
    let third = third.await.unwrap().unwrap();
    assert!(third.fence > held.fence);
    assert!(!second.is_finished());
    backend.release(&call(), &third).await.unwrap();
    let second = second.await.unwrap().unwrap();
    assert!(second.fence > third.fence);
    let _live = backend.renew(&call(), &second, long).await.unwrap();
}

#[tokio::test]
async fn a_holder_survives_a_restart_of_the_server_and_the_other_stays_out() {
    let Some(mut server) = Server::start() else { return };
    let backend = server.backend().await;
    let long = Duration::from_secs(30);
    let held = backend.acquire(&call(), &request_of("s", long)).await.unwrap();
    server.kill();
    let down = backend.acquire(&call_of(Duration::from_secs(2)), &request("x")).await.unwrap_err();
    assert!(matches!(down.kind(), ErrorKind::Unavailable | ErrorKind::Unknown), "{down:?}");
    server.restart();
    let mut renewed = None;
    eventually("it is renewed", async || {
        renewed = backend.renew(&call_of(Duration::from_secs(2)), &held, long).await.ok();
        renewed.is_some()
    })
    .await;
    let renewed = renewed.unwrap();
    assert!(renewed.deadline >= held.deadline && renewed.fence == held.fence);
    assert_eq!(backend.acquire(&call(), &request("s")).await.unwrap_err().kind(), ErrorKind::Held);
    assert_eq!(backend.release(&call(), &renewed).await.unwrap(), Released::Now);
    let next = backend.acquire(&call(), &request("s")).await.unwrap();
    assert!(next.fence > held.fence);
}

#[tokio::test]
async fn a_refused_connection_is_definite() {
    let backend = ZkBackend::lazy(ZkConfig::new(["127.0.0.1:1"])).unwrap();
    let refused = backend.acquire(&call(), &request("u")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused:?}");
}

#[tokio::test]
async fn a_stopped_server_gives_unknown_in_bounds_and_the_acquire_settles_afterwards() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let long = Duration::from_secs(60);
    let held = backend.acquire(&call(), &request_of("held", long)).await.unwrap();
    server.signal(Signal::STOP);
    let asked = request_of("stopped", long);
    let began = Instant::now();
    let bound = Duration::from_millis(700);
    let unknown = backend.acquire(&call_of(bound), &asked).await.unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::Unknown, "{unknown:?}");
    let unknown = backend.renew(&call_of(bound), &held, long).await.unwrap_err();
    assert_eq!(unknown.kind(), ErrorKind::Unknown, "{unknown:?}");
    let took = began.elapsed();
    assert!(took < Duration::from_secs(4), "{took:?}");
    server.signal(Signal::CONT);
    eventually("the acquire settles", async || backend.abandon(&call(), &asked).await.is_ok()).await;
    let next = backend.acquire(&call(), &request("stopped")).await.expect("nothing was left");
    assert_eq!(backend.release(&call(), &next).await.unwrap(), Released::Now);
    assert_eq!(backend.release(&call(), &held).await.unwrap(), Released::Now);
}

/// Counts alone inside a lock with growing fences, `rounds` times by each client, while `meanwhile` goes on.
async fn hand_off(server: &Server, clients: usize, rounds: usize) {
    let (resource, inside) = (Arc::new(AtomicI64::new(0)), Arc::new(AtomicI64::new(0)));
    let mut tasks = Vec::new();
    for _ in 0..clients {
        let backend = server.backend().await;
        let (resource, inside) = (resource.clone(), inside.clone());
        tasks.push(tokio::spawn(async move {
            for _ in 0..rounds {
                let asked = request_of("hot", Duration::from_secs(20)).waiting_until(Moment::MAX);
                let held = backend.acquire(&call_of(Duration::from_secs(60)), &asked).await.unwrap();
                assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "alone inside");
                let before = resource.swap(held.fence.get(), Ordering::SeqCst);
                assert!(held.fence.get() > before, "{} after {before}", held.fence);
                inside.fetch_sub(1, Ordering::SeqCst);
                assert_eq!(backend.release(&call(), &held).await.unwrap(), Released::Now);
            }
            backend
        }));
    }
    for task in tasks {
        let backend = task.await.unwrap();
        assert!(format!("{backend:?}").contains("places: 0"), "{backend:?}");
    }
    assert_eq!(server.places().await, [""; 0]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn six_clients_hand_a_lock_off_three_hundred_times_with_growing_fences() {
    let Some(server) = Server::start() else { return };
    hand_off(&server, 6, 50).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cleaner_that_removes_empty_queues_disturbs_nobody() {
    let Some(server) = Server::start() else { return };
    let (admin, stop) = (server.admin().await, Arc::new(AtomicBool::new(false)));
    let cleaner = tokio::spawn({
        let stop = stop.clone();
        async move {
            let mut removed = 0;
            while !stop.load(Ordering::Relaxed) {
                removed += u32::from(admin.delete("/lockcore/@/locks/hot", None).await.is_ok());
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            removed
        }
    });
    let backend = server.backend().await;
    let mut last = None;
    // Alone, so that the queue is empty after every round.
    for _ in 0..150 {
        let held = backend.acquire(&call(), &request_of("hot", TTL)).await.unwrap();
        assert!(Some(held.fence) > last, "{:?} after {last:?}", held.fence);
        last = Some(held.fence);
        backend.release(&call(), &held).await.unwrap();
    }
    hand_off(&server, 4, 30).await;
    stop.store(true, Ordering::Relaxed);
    assert!(cleaner.await.unwrap() > 10, "the cleaner removed hardly anything");
}

#[tokio::test]
async fn an_acquire_dropped_at_any_poll_leaves_nothing_once_abandoned() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let held = backend.acquire(&call(), &request_of("d", Duration::from_secs(60))).await.unwrap();
    let mut longest = 0;
    for polls in 1..=30 {
        for name in ["d", "free"] {
            let asked = request_of(name, Duration::from_secs(60)).waiting_until(Moment::MAX);
            let call = call();
            let mut acquire = Box::pin(backend.acquire(&call, &asked));
            let mut polled = 0;
            // A waiter is not polled again until something happens: the clock ends the round then.
            let dropped = std::future::poll_fn(|cx| {
                if polled == polls {
                    return std::task::Poll::Ready(None);
                }
                polled += 1;
                acquire.as_mut().poll(cx).map(Some)
            });
            let ended = tokio::time::timeout(Duration::from_millis(60), dropped).await;
            longest = longest.max(polled);
            drop(acquire);
            backend.abandon(&call, &asked).await.unwrap();
            drop(ended);
        }
    }
    assert!(longest > 2, "several exchanges were cut: {longest}");
    assert_eq!(server.places().await.len(), 1, "only the holder is left");
    backend.release(&call(), &held).await.unwrap();
    assert!(format!("{backend:?}").contains("places: 0"), "{backend:?}");
}

#[tokio::test]
async fn an_ensemble_that_lost_its_past_never_brings_a_fence_back() {
    let Some(mut server) = Server::start() else { return };
    let backend = server.backend().await;
    let mut highest = 0;
    // A floor takes the fence far ahead of the clock: only what this process saw tells.
    for ahead in [0, 1 << 40, 1 << 50] {
        let floor = Fence::new(highest + ahead + 1).unwrap();
        let held = backend.acquire(&call(), &request_of("k", TTL).above(floor)).await.unwrap();
        assert!(held.fence.get() > highest);
        highest = held.fence.get();
        backend.release(&call(), &held).await.unwrap();
    }
    server.forget();
    let mut next = None;
    eventually("it is granted again", async || {
        let asked = request_of("k", TTL);
        match backend.acquire(&call_of(Duration::from_secs(2)), &asked).await {
            Ok(lease) => next = Some(lease),
            Err(error) => {
                assert!(error.kind().is_transient(), "{error:?}");
                let _ = backend.abandon(&call_of(Duration::from_secs(2)), &asked).await;
            }
        }
        next.is_some()
    })
    .await;
    let next = next.unwrap();
    assert!(next.fence.get() > highest, "{} after {highest}", next.fence);
}

#[tokio::test]
async fn cycles_leave_the_numbers_of_nodes_watches_and_sessions_as_they_were() {
    let Some(server) = Server::start() else { return };
    let cycles = std::env::var("LOCK_TEST_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(1000);
    let (backend, other) = (server.backend().await, server.backend().await);
    let one = async |n: usize| {
        let long = Duration::from_secs(20);
        let held = backend.acquire(&call(), &request_of("c", long)).await.unwrap();
        if n.is_multiple_of(10) {
            let waiting = request_of("c", long).waiting_until(Moment::MAX);
            let (next, released) =
                tokio::join!(async { other.acquire(&call(), &waiting).await.unwrap() }, async {
                    let _ = backend.renew(&call(), &held, long).await.unwrap();
                    backend.release(&call(), &held).await.unwrap()
                });
            assert_eq!(released, Released::Now);
            other.release(&call(), &next).await.unwrap();
        } else {
            backend.release(&call(), &held).await.unwrap();
        }
    };
    let names = ["zk_znode_count", "zk_watch_count", "zk_num_alive_connections", "zk_ephemerals_count"];
    let numbers = || names.map(|name| server.number(name));
    for n in 0..20 {
        one(n).await;
    }
    let before = numbers();
    let began = Instant::now();
    for n in 0..cycles {
        one(n).await;
    }
    let took = began.elapsed();
    eventually("the numbers are as they were", async || numbers() == before).await;
    let each = took / u32::try_from(cycles).unwrap();
    std::io::Write::write_all(&mut std::io::stderr(), format!("{cycles} cycles, {each:?} each\n").as_bytes())
        .unwrap();
}
