//! Several servers of the test's own that decide together: minorities and majorities that are away, servers that forget,
//! copies of requests that come late, and fences that grow through all of it.

use super::*;
use crate::{RedlockBackend, RedlockConfig, wire::unhex};

struct Group {
    servers: Vec<Server>,
}

impl Group {
    async fn start(count: usize, options: &[&str]) -> Option<Self> {
        let mut servers = Vec::new();
        for _ in 0..count {
            servers.push(Server::with(options).await?);
        }
        Some(Self { servers })
    }

    fn config(&self) -> RedlockConfig {
        RedlockConfig::new(self.servers.iter().map(|server| ("127.0.0.1", server.port)))
    }

    async fn client(&self) -> RedlockBackend {
        RedlockBackend::connect(self.config()).await.unwrap()
    }

    async fn values(&self, key: &str) -> Vec<Option<String>> {
        let mut values = Vec::new();
        for server in &self.servers {
            values.push(server.get(key).await);
        }
        values
    }

    /// Takes a lock so that it is on every server: one that answers late on a busy machine may be left out.
    async fn everywhere(&self, backend: &RedlockBackend, request: &AcquireRequest) -> Lease {
        loop {
            let lease = backend.acquire(&call(), request).await.unwrap();
            let key = keys(request.name().as_str()).lock;
            if self.values(&key).await.iter().all(Option::is_some) {
                return lease;
            }
            backend.release(&call(), &lease).await.unwrap();
        }
    }

    /// Waits until the second round has arrived everywhere: a majority is enough to go on.
    async fn settled(&self, lease: &Lease) {
        let own = wire::own(&lease.owner, lease.fence);
        for server in &self.servers {
            server
                .until("its fence is settled", async |server| {
                    server
                        .get(&keys(lease.name.as_str()).lock)
                        .await
                        .is_some_and(|value| value.starts_with(&own))
                })
                .await;
        }
    }

    /// Waits until what is on the way has ended it everywhere.
    async fn becomes_free(&self, text: &str) {
        for server in &self.servers {
            server.until("it is free", async |server| server.get(&keys(text).lock).await.is_none()).await;
        }
    }

    fn stop(&self, which: &[usize]) {
        which.iter().for_each(|at| self.servers[*at].signal(Signal::STOP));
    }

    fn go_on(&self, which: &[usize]) {
        which.iter().for_each(|at| self.servers[*at].signal(Signal::CONT));
    }
}

async fn three() -> Option<(Group, RedlockBackend)> {
    let group = Group::start(3, &[]).await?;
    let backend = group.client().await;
    Some((group, backend))
}

/// As long as an answer may take where servers are stopped.
fn short() -> Call {
    budget(Duration::from_millis(500))
}

#[tokio::test]
async fn a_grant_is_on_all_servers_with_one_fence_and_a_release_removes_it() {
    let Some((group, backend)) = three().await else { return };
    let request = request("a").labelled("web:1");
    let lease = group.everywhere(&backend, &request).await;
    group.settled(&lease).await;
    let begins = format!("{}|{}|", hex(request.owner()), lease.fence);
    for value in group.values("lockcore::{a}:lock").await {
        let value = value.unwrap();
        assert!(value.starts_with(&begins) && value.ends_with("|web:1"), "{value}");
    }
    for value in group.values("lockcore::{a}:fence").await {
        assert_eq!(value.unwrap(), format!("{}|{}", lease.fence, hex(request.owner())));
    }
    let state = backend.inspect(&call(), &name("a")).await.unwrap();
    let holder = state.holder.unwrap();
    assert_eq!((holder.fence, holder.label.as_deref()), (lease.fence, Some("web:1")));
    assert_eq!(state.last_fence, Some(lease.fence));

    let other = group.client().await;
    let refused = other.acquire(&call(), &self::request("a")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Held, "{refused}");
    assert_eq!(refused.holder().unwrap().fence, lease.fence);
    let renewed = backend.renew(&call(), &lease, TTL * 2).await.unwrap();
    assert!(renewed.deadline > lease.deadline);
    for server in &group.servers {
        server.until("it is renewed", async |server| server.pttl("lockcore::{a}:lock").await > 50_000).await;
    }
    assert_eq!(backend.release(&call(), &renewed).await.unwrap(), Released::Now);
    group.becomes_free("a").await;
    assert_eq!(backend.release(&call(), &renewed).await.unwrap(), Released::AlreadyOver);
    let next = other.acquire(&call(), &self::request("a")).await.unwrap();
    assert!(next.fence > lease.fence);
    let lost = backend.renew(&call(), &renewed, TTL).await.unwrap_err();
    assert_eq!(lost.lost_reason(), Some(LostReason::Taken));
}

/// Two connections of one backend each know whose they are: neither asks anew because of the other.
#[tokio::test]
async fn a_second_connection_asks_once_whose_it_is() {
    let Some((group, backend)) = three().await else { return };
    let second = backend.second_connection(&call()).await.unwrap().unwrap();
    for server in &group.servers {
        let _: () = server.raw(&["CONFIG", "RESETSTAT"]).await.unwrap();
    }
    let lease = group.everywhere(&backend, &request("a")).await;
    group.settled(&lease).await;
    for backend in [&second, &(Arc::new(backend) as Arc<dyn LockBackend>)] {
        let _ = backend.renew(&call(), &lease, TTL).await.unwrap();
        let _ = backend.renew(&call(), &lease, TTL).await.unwrap();
    }
    for server in &group.servers {
        let stats: String = server.raw(&["INFO", "commandstats"]).await.unwrap();
        assert!(!stats.contains("cmdstat_info"), "{stats}");
    }
}

#[tokio::test]
async fn a_minority_that_is_away_is_no_loss() {
    let Some(mut group) = Group::start(5, &[]).await else { return };
    group.servers[1].kill();
    group.servers[4].kill();
    let backend = group.client().await;
    let lease = backend.acquire(&call(), &request("a")).await.unwrap();
    let refused = group.client().await.acquire(&call(), &request("a")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Held, "{refused}");
    let lease = backend.renew(&call(), &lease, TTL).await.unwrap();
    assert_eq!(backend.release(&call(), &lease).await.unwrap(), Released::Now);
    let next = backend.acquire(&call(), &request("a")).await.unwrap();
    assert!(next.fence > lease.fence);
}

#[tokio::test]
async fn a_server_that_is_silent_delays_nothing_and_is_cleared_when_it_goes_on() {
    let Some((group, backend)) = three().await else { return };
    let warm = backend.acquire(&call(), &request("a")).await.unwrap();
    backend.release(&call(), &warm).await.unwrap();
    group.becomes_free("a").await;
    group.stop(&[2]);
    let begun = Instant::now();
    let request = request("a");
    let lease = backend.acquire(&call(), &request).await.unwrap();
    assert!(begun.elapsed() < Duration::from_secs(5), "it waited for a server that is silent");
    assert_eq!(backend.release(&call(), &lease).await.unwrap(), Released::Now);
    group.go_on(&[2]);
    // The request and its undoing arrive in either order.
    group.servers[2]
        .until("nothing is left", async |server| {
            server.get(&gone("a", &request)).await.is_some()
                && server.get("lockcore::{a}:lock").await.is_none()
        })
        .await;
    let next = backend.acquire(&call(), &self::request("a")).await.unwrap();
    assert!(next.fence > lease.fence);
}

#[tokio::test]
async fn a_majority_that_cannot_be_reached_is_unavailable_and_nothing_is_left_on_the_rest() {
    let Some((mut group, backend)) = three().await else { return };
    let held = group.everywhere(&backend, &request("b")).await;
    group.settled(&held).await;
    group.servers[0].kill();
    group.servers[1].kill();
    // A connection that is found dead may have been sent on.
    let _ = backend.acquire(&short(), &request("c")).await.unwrap_err();
    let refused = backend.acquire(&short(), &request("a")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused:?}");
    assert!(refused.to_string().contains("fewer than 2 of the 3 servers"), "{refused}");
    assert_eq!(group.servers[2].get("lockcore::{a}:lock").await, None);
    let doubt = backend.renew(&short(), &held, TTL).await.unwrap_err();
    assert_eq!(doubt.kind(), ErrorKind::Unknown, "one server was renewed: {doubt:?}");
    let doubt = backend.release(&short(), &held).await.unwrap_err();
    assert_eq!(doubt.kind(), ErrorKind::Unavailable, "{doubt:?}");
    let refused = RedlockBackend::connect(group.config()).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused:?}");
}

#[tokio::test]
async fn a_majority_whose_answers_are_lost_is_unknown_and_cleared_everywhere() {
    let Some((group, backend)) = three().await else { return };
    group.stop(&[0, 1]);
    let request = request("a");
    let doubt = backend.acquire(&short(), &request).await.unwrap_err();
    assert_eq!(doubt.kind(), ErrorKind::Unknown, "{doubt:?}");
    assert_eq!(
        group.servers[2].get("lockcore::{a}:lock").await,
        None,
        "the server that answered was not cleared"
    );
    let unsettled = backend.abandon(&short(), &request).await.unwrap_err();
    assert!(matches!(unsettled.kind(), ErrorKind::Unknown | ErrorKind::Unavailable), "{unsettled:?}");
    group.go_on(&[0, 1]);
    backend.abandon(&call(), &request).await.unwrap();
    for server in &group.servers {
        server.until("it is told off", async |server| server.get(&gone("a", &request)).await.is_some()).await;
    }
    group.becomes_free("a").await;
    let lease = backend.acquire(&call(), &self::request("a")).await.unwrap();
    assert_eq!(backend.release(&call(), &lease).await.unwrap(), Released::Now);
}

/// Writes what a client leaves that has taken one server in its first round.
async fn part(server: &Server, text: &str) {
    let value = format!("{}|0|1|", hex(request(text).owner()));
    let _: () = server.raw(&["SET", &keys(text).lock, &value, "PX", "60000"]).await.unwrap();
}

#[tokio::test]
async fn a_vote_that_nobody_won_is_held_cleaned_up_and_won_later() {
    let Some((group, backend)) = three().await else { return };
    part(&group.servers[0], "a").await;
    part(&group.servers[1], "a").await;
    let refused = backend.acquire(&call(), &request("a")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Held, "{refused:?}");
    assert!(refused.holder().is_none(), "nobody has a majority");
    assert_eq!(group.servers[2].get("lockcore::{a}:lock").await, None);
    for server in &group.servers[..2] {
        let _: i64 = server.raw(&["PEXPIRE", "lockcore::{a}:lock", "100"]).await.unwrap();
    }
    let (call, request) = waiting("a", WATCHDOG);
    let lease = in_time(backend.acquire(&call, &request)).await.unwrap();
    assert_eq!(backend.release(&self::call(), &lease).await.unwrap(), Released::Now);
    // One part alone hinders nobody.
    part(&group.servers[1], "a").await;
    let lease = backend.acquire(&self::call(), &self::request("a")).await.unwrap();
    assert_eq!(backend.release(&self::call(), &lease).await.unwrap(), Released::Now);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_meet_hand_over_with_strictly_growing_fences() {
    let Some(group) = Group::start(3, &[]).await else { return };
    let held = Arc::new(AtomicBool::new(false));
    let last = Arc::new(Mutex::new(0));
    let mut clients = tokio::task::JoinSet::new();
    for _ in 0..6 {
        let (backend, held, last) = (group.client().await, held.clone(), last.clone());
        clients.spawn(async move {
            for _ in 0..8 {
                let (call, request) = waiting("a", WATCHDOG);
                let lease = backend.acquire(&call, &request).await.unwrap();
                assert!(!held.swap(true, Ordering::SeqCst), "two hold it");
                {
                    let mut last = last.lock().unwrap();
                    assert!(lease.fence.get() > *last, "{} after {last}", lease.fence);
                    *last = lease.fence.get();
                }
                tokio::task::yield_now().await;
                held.store(false, Ordering::SeqCst);
                assert_eq!(backend.release(&self::call(), &lease).await.unwrap(), Released::Now);
            }
        });
    }
    while let Some(done) = in_time(clients.join_next()).await {
        done.unwrap();
    }
    group.becomes_free("a").await;
}

#[tokio::test]
async fn a_waiter_with_an_unanswered_round_ends_in_doubt() {
    let Some((mut group, backend)) = three().await else { return };
    let held = group.everywhere(&backend, &AcquireRequest::new(name("a"), WATCHDOG * 5)).await;
    group.settled(&held).await;
    let (call, request) = waiting("a", Duration::from_secs(2));
    let fault = async {
        let until = async |is: fn(usize) -> bool| {
            while !is(backend.in_doubt(request.owner())) {
                tokio::task::yield_now().await;
            }
        };
        // Between two rounds: the next one is sent to servers that stand.
        until(|requests| requests > 0).await;
        until(|requests| requests == 0).await;
        group.stop(&[0, 1]);
        until(|requests| requests >= 2).await;
        // The round that is under way is not answered; those after it find nobody.
        group.servers[0].kill();
        group.servers[1].kill();
    };
    let (ended, ()) = in_time(async { tokio::join!(backend.acquire(&call, &request), fault) }).await;
    let error = ended.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unknown, "{error:?}");
}

/// Majorities that share only one server, and fences far ahead of every clock, which therefore are no help.
#[tokio::test]
async fn fences_grow_from_majority_to_majority_without_the_clocks() {
    let Some((group, backend)) = three().await else { return };
    let ahead = i64::try_from(server_us(&group.servers[0]).await).unwrap() + 3_600_000_000;
    let floor = backend.raise_fence(&call(), &name("a"), Fence::new(ahead).unwrap()).await.unwrap();
    let mut last = floor;
    for round in 0..12 {
        let away = round % 3;
        group.stop(&[away]);
        // New connections, because the old ones still wait for the server that is stopped.
        let lease = backend.acquire(&call(), &request("a")).await.unwrap();
        assert!(lease.fence > last, "round {round}: {} after {last}", lease.fence);
        last = lease.fence;
        assert_eq!(backend.release(&call(), &lease).await.unwrap(), Released::Now);
        group.go_on(&[away]);
    }
    assert!(last.get() < ahead + 1000, "the clocks were no help");
    assert!(backend.high_water(&call()).await.unwrap().unwrap() >= last);
}

async fn server_us(server: &Server) -> u64 {
    let time: Vec<String> = server.raw(&["TIME"]).await.unwrap();
    time[0].parse::<u64>().unwrap() * 1_000_000 + time[1].parse::<u64>().unwrap()
}

/// The second round comes after the lock has expired and somebody else was granted it; then a late copy of the first takes
/// the lock on one server again, and the second round comes once more.
#[tokio::test]
async fn a_late_second_round_settles_nothing_where_the_lock_is_not_its_own_or_the_fence_is_low() {
    let Some((group, backend)) = three().await else { return };
    let old = request("a");
    group.becomes_free("a").await;
    let taken = backend.first_round(&call(), &old).await;
    assert_eq!(taken, 3);
    let fence = i64::try_from(server_us(&group.servers[0]).await).unwrap();
    for server in &group.servers {
        let _: () = server.raw(&["DEL", "lockcore::{a}:lock"]).await.unwrap();
    }
    let new = backend.acquire(&call(), &request("a")).await.unwrap();
    assert!(new.fence.get() >= fence);
    assert_eq!(backend.second_round(&call(), &old, fence).await, [None, None, None], "the lock is another's");
    assert_eq!(backend.second_round(&call(), &old, new.fence.get() + 9).await, [None, None, None]);

    backend.release(&call(), &new).await.unwrap();
    group.becomes_free("a").await;
    let taken = backend.first_round(&call(), &old).await;
    assert_eq!(taken, 3, "a late copy takes it again");
    let high = Some(new.fence.get());
    assert_eq!(backend.second_round(&call(), &old, fence).await, [high; 3], "the fence is not above");
    assert_eq!(
        backend.second_round(&call(), &old, new.fence.get()).await,
        [high; 3],
        "the same is not above"
    );
    backend.abandon(&call(), &old).await.unwrap();
    let next = backend.acquire(&call(), &request("a")).await.unwrap();
    assert!(next.fence > new.fence);
}

/// An attempt that found no majority is cleaned up; the same owner asks again and is granted before that arrives.
#[tokio::test]
async fn a_clean_up_that_comes_late_ends_no_grant() {
    let Some((group, backend)) = three().await else { return };
    let request = request("a");
    assert_eq!(backend.first_round(&call(), &request).await, 3);
    backend.clean_up_late(&call(), request.owner(), request.name()).await;
    group.becomes_free("a").await;
    let lease = group.everywhere(&backend, &request).await;
    group.settled(&lease).await;
    backend.clean_up_late(&call(), request.owner(), request.name()).await;
    let begins = wire::own(&lease.owner, lease.fence);
    for value in group.values("lockcore::{a}:lock").await {
        assert!(value.as_ref().is_some_and(|value| value.starts_with(&begins)), "{value:?}");
    }
    assert_eq!(backend.release(&call(), &lease).await.unwrap(), Released::Now);
    group.becomes_free("a").await;
}

#[tokio::test]
async fn a_client_that_dies_between_the_rounds_costs_a_gap_and_a_ttl() {
    let Some((group, backend)) = three().await else { return };
    let dead = AcquireRequest::new(name("a"), Duration::from_millis(400));
    group.becomes_free("a").await;
    assert_eq!(backend.first_round(&call(), &dead).await, 3);
    let refused = backend.acquire(&call(), &request("a")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Held);
    let (call, request) = waiting("a", WATCHDOG);
    let lease = in_time(backend.acquire(&call, &request)).await.unwrap();
    assert_eq!(backend.release(&self::call(), &lease).await.unwrap(), Released::Now);
    group.becomes_free("a").await;
}

#[tokio::test]
async fn an_unanswered_acquire_is_adopted_finished_or_gone_for_good() {
    let Some((group, backend)) = three().await else { return };
    // On a majority.
    let first = request("a");
    let lease = backend.acquire(&call(), &first).await.unwrap();
    let Resolution::Adopted(adopted) = backend.resolve(&call(), &first).await.unwrap() else {
        panic!("gone")
    };
    assert_eq!(adopted.fence, lease.fence);
    assert!(adopted.deadline <= lease.deadline.saturating_add(Duration::from_millis(50)));
    assert_eq!(backend.release(&call(), &adopted).await.unwrap(), Released::Now);

    // The fence reached one server only: it is the one that is finished.
    let second = request("a");
    group.becomes_free("a").await;
    assert_eq!(backend.first_round(&call(), &second).await, 3);
    let fence = lease.fence.get() + 5_000_000;
    let value = group.servers[1].get("lockcore::{a}:lock").await.unwrap();
    let value = value.replacen("|0|", &format!("|{fence}|"), 1);
    let _: () = group.servers[1].raw(&["SET", "lockcore::{a}:lock", &value, "KEEPTTL"]).await.unwrap();
    let own = format!("{fence}|{}", hex(second.owner()));
    let _: () = group.servers[1].raw(&["SET", "lockcore::{a}:fence", &own]).await.unwrap();
    let Resolution::Adopted(finished) = backend.resolve(&call(), &second).await.unwrap() else {
        panic!("gone")
    };
    assert_eq!(finished.fence.get(), fence);
    assert_eq!(backend.release(&call(), &finished).await.unwrap(), Released::Now);

    // Nothing but the first round, on a majority: it is finished. On a minority: it is gone.
    let third = request("a");
    group.becomes_free("a").await;
    assert_eq!(backend.first_round(&call(), &third).await, 3);
    let Resolution::Adopted(begun) = backend.resolve(&call(), &third).await.unwrap() else { panic!("gone") };
    assert!(begun.fence > finished.fence);
    assert_eq!(backend.release(&call(), &begun).await.unwrap(), Released::Now);
    let third = request("a");
    group.becomes_free("a").await;
    assert_eq!(backend.first_round(&call(), &third).await, 3);
    for server in &group.servers[1..] {
        let _: () = server.raw(&["DEL", "lockcore::{a}:lock"]).await.unwrap();
    }
    assert!(matches!(backend.resolve(&call(), &third).await.unwrap(), Resolution::Gone));
    group.becomes_free("a").await;
    group.becomes_free("a").await;
    assert_eq!(backend.first_round(&call(), &third).await, 0, "it came after all");
    let next = backend.acquire(&call(), &request("a")).await.unwrap();
    assert!(next.fence > finished.fence);
}

#[tokio::test]
async fn asked_again_the_same_owner_is_told_the_same_grant_also_after_a_raise() {
    let Some((_group, backend)) = three().await else { return };
    let request = request("a");
    let lease = backend.acquire(&call(), &request).await.unwrap();
    let again = backend.acquire(&call(), &request).await.unwrap();
    assert_eq!(again.fence, lease.fence);
    let floor = Fence::new(lease.fence.get() + 60_000_000).unwrap();
    assert_eq!(backend.raise_fence(&call(), &name("a"), floor).await.unwrap(), floor);
    let again = backend.acquire(&call(), &request).await.unwrap();
    assert_eq!(again.fence, lease.fence, "one acquisition was told two fences");
    let renewed = backend.renew(&call(), &lease, TTL).await.unwrap();
    backend.release(&call(), &renewed).await.unwrap();
    let next = backend.acquire(&call(), &self::request("a")).await.unwrap();
    assert!(next.fence > floor);
}

#[tokio::test]
async fn a_raise_is_the_holders_alone_and_a_break_takes_the_lock_from_the_holder_that_was_seen() {
    let Some((group, backend)) = three().await else { return };
    let lease = backend.acquire(&call(), &request("a")).await.unwrap();
    let floor = Fence::new(lease.fence.get() + 60_000_000).unwrap();
    backend.raise(&call(), &lease, floor).await.unwrap();
    let stranger = Stamp::new(lease.fence, request("a").owner().digest());
    let refused = backend.break_lock(&call(), &name("a"), Some(stranger)).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Held, "{refused}");
    let broken = backend.break_lock(&call(), &name("a"), Some(lease.stamp())).await.unwrap();
    assert!(broken.floor > floor, "{:?}", broken.floor);
    assert_eq!(broken.holder.unwrap().fence, lease.fence);
    group.becomes_free("a").await;
    let lost = backend.renew(&call(), &lease, TTL).await.unwrap_err();
    assert_eq!(lost.lost_reason(), Some(LostReason::Broken), "{lost}");
    let lost = backend.raise(&call(), &lease, floor).await.unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::Lost, "{lost}");
    let next = backend.acquire(&call(), &request("a")).await.unwrap();
    assert!(next.fence > broken.floor, "a break's number was granted");
    let free = backend.break_lock(&call(), &name("b"), None).await.unwrap();
    assert!(free.holder.is_none());
    assert_eq!(backend.list(&call(), None, None).await.unwrap(), [name("a"), name("b")]);
}

#[tokio::test]
async fn a_lock_that_one_server_lost_is_held_and_one_that_a_majority_lost_is_lost() {
    let Some((group, backend)) = three().await else { return };
    let one = group.everywhere(&backend, &request("a")).await;
    let two = group.everywhere(&backend, &request("b")).await;
    group.settled(&one).await;
    group.settled(&two).await;
    let delete = async |server: usize, key: &str| {
        let _: () = group.servers[server].raw(&["DEL", key]).await.unwrap();
    };
    delete(0, "lockcore::{a}:lock").await;
    delete(0, "lockcore::{b}:lock").await;
    delete(1, "lockcore::{b}:lock").await;
    let mut many = backend.renew_many(&call(), &[one.clone(), two], TTL).await.into_iter();
    let _ = many.next().unwrap().unwrap();
    let lost = many.next().unwrap().unwrap_err();
    assert_eq!(lost.lost_reason(), Some(LostReason::Taken), "{lost}");
    assert_eq!(group.servers[0].get("lockcore::{a}:lock").await, None, "a renewal created it");
    let refused = group.client().await.acquire(&call(), &request("a")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Held, "{refused}");
    assert_eq!(backend.release(&call(), &one).await.unwrap(), Released::Now);
}

#[tokio::test]
async fn renewals_of_many_are_decided_each_by_its_own_majority() {
    let Some((group, backend)) = three().await else { return };
    let kept = group.everywhere(&backend, &request("a")).await;
    let lost = group.everywhere(&backend, &request("b")).await;
    group.settled(&kept).await;
    group.settled(&lost).await;
    for server in &group.servers[..2] {
        let _: () = server.raw(&["DEL", "lockcore::{b}:lock"]).await.unwrap();
    }
    // Whoever waited for it would do so for longer than the watchdog.
    group.stop(&[2]);
    let patient = budget(WATCHDOG * 4);
    let answers = in_time(backend.renew_many(&patient, &[kept, lost], TTL)).await;
    let kinds: Vec<_> = answers.iter().map(|answer| answer.as_ref().map_err(Error::kind).err()).collect();
    assert_eq!(kinds, [None, Some(ErrorKind::Lost)], "{answers:?}");
}

#[tokio::test]
async fn one_server_that_refuses_for_good_does_not_speak_for_all() {
    let Some((mut group, _)) = three().await else { return };
    let lock = async |server: &Server| {
        let _: () = server.raw(&["CONFIG", "SET", "requirepass", "s3cret"]).await.unwrap();
    };
    lock(&group.servers[0]).await;
    group.servers[1].kill();
    let backend = RedlockBackend::lazy(group.config()).unwrap();
    let refused = backend.acquire(&short(), &request("a")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "the other may come back: {refused}");
    assert!(refused.to_string().contains("credentials"), "{refused}");
    lock(&group.servers[2]).await;
    let backend = RedlockBackend::lazy(group.config()).unwrap();
    let refused = backend.acquire(&short(), &request("a")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unauthorized, "{refused}");
}

/// Five servers; the lock is on three of them, and the one that both majorities share is started again, empty.
async fn amnesia(restart_delay: Duration) -> Option<(Lease, Result<Lease>, RedlockBackend, Group)> {
    let mut group = Group::start(5, &[]).await?;
    let config = group.config().with(|c| c.restart_delay = restart_delay);
    // Servers count whole seconds since they were started.
    for server in &group.servers {
        let old = i64::try_from(restart_delay.as_secs()).unwrap();
        server
            .until("it is old enough", async |server| {
                let info: String = server.raw(&["INFO", "server"]).await.unwrap();
                let uptime = info.lines().find_map(|line| line.strip_prefix("uptime_in_seconds:")).unwrap();
                uptime.trim().parse::<i64>().unwrap() > old
            })
            .await;
    }
    let ttl = if restart_delay.is_zero() { TTL } else { restart_delay };
    let old = RedlockBackend::connect(config.clone()).await.unwrap();
    let new = RedlockBackend::connect(config).await.unwrap();
    group.stop(&[3, 4]);
    let first = AcquireRequest::new(name("a"), ttl);
    let lease = old.acquire(&call(), &first).await.unwrap();
    group.servers[2].restart().await;
    group.stop(&[0, 1]);
    group.go_on(&[3, 4]);
    // What was under way to them arrives, and is told off.
    for at in [3, 4] {
        old.tell_off_on(&call(), at, &first).await;
    }
    let second = new.acquire(&budget(Duration::from_millis(800)), &AcquireRequest::new(name("a"), ttl)).await;
    group.go_on(&[0, 1]);
    Some((lease, second, old, group))
}

/// The documented break: a server that forgets lets two majorities hold one lock. The fence tells them apart, by the clock.
#[tokio::test]
async fn a_server_that_forgets_breaks_exclusion_and_the_fence_still_grows() {
    let Some((first, second, old, _group)) = amnesia(Duration::ZERO).await else { return };
    let second = second.unwrap();
    let now = BootClock::read();
    assert!(now < first.deadline && now < second.deadline, "both believe that they hold it");
    assert!(second.fence > first.fence);
    let lost = old.renew(&call(), &first, TTL).await.unwrap_err();
    assert_eq!(lost.kind(), ErrorKind::Lost, "{lost}");
}

#[tokio::test]
async fn a_server_that_was_started_lately_grants_nothing_where_that_is_asked_for() {
    let Some((first, second, old, _group)) = amnesia(Duration::from_secs(3)).await else { return };
    let refused = second.unwrap_err();
    assert!(matches!(refused.kind(), ErrorKind::Unavailable | ErrorKind::Unknown), "{refused:?}");
    let capabilities = old.capabilities();
    assert_eq!(*capabilities.ttl.end(), Duration::from_secs(3));
    assert!(capabilities.survives.restart);
    let longer = AcquireRequest::new(name("b"), Duration::from_secs(4));
    assert_eq!(old.acquire(&call(), &longer).await.unwrap_err().kind(), ErrorKind::Invalid);
    drop(first);
}

#[tokio::test]
async fn what_cannot_decide_together_is_refused() {
    let Some((group, _)) = three().await else { return };
    let port = |at: usize| group.servers[at].port;
    for (servers, says) in [
        (vec![("127.0.0.1", port(0)), ("127.0.0.1", port(1))], "odd number"),
        (vec![("127.0.0.1", port(0))], "odd number"),
        (vec![("127.0.0.1", port(0)), ("127.0.0.1", port(1)), ("127.0.0.1", port(0))], "one server twice"),
        (
            vec![("127.0.0.1", port(0)), ("127.0.0.1", port(1)), ("localhost", port(0))],
            "voice would count twice",
        ),
    ] {
        let refused = RedlockBackend::connect(RedlockConfig::new(servers)).await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Misconfigured, "{refused}");
        assert!(refused.to_string().contains(says), "{refused}");
    }
    let waiting = group.config().with(|c| c.servers[0].wait_replicas = crate::WaitReplicas::Majority);
    assert!(RedlockBackend::lazy(waiting).is_err());
    let url = RedlockConfig::from_url("redlock://locks:s3cret@a,b:1,[::1]/2").unwrap();
    assert_eq!(url.servers.iter().map(|server| server.db).collect::<Vec<_>>(), [2, 2, 2]);
    assert!(!format!("{url:?}").contains("s3cret"));
    for bad in ["redlock://:s3cret@a,b,c/x", "redis://:s3cret@a,b,c", "redlock://:s3cret@a,b,c?poll=1s"] {
        let refused = RedlockConfig::from_url(bad).unwrap_err();
        assert!(!format!("{refused:?}").contains("s3cret"), "{refused:?}");
    }
}

#[tokio::test]
async fn a_full_server_among_three_is_no_loss_and_two_are() {
    let Some((group, backend)) = three().await else { return };
    let fill = async |at: usize| {
        let _: () = group.servers[at].raw(&["CONFIG", "SET", "maxmemory", "1"]).await.unwrap();
    };
    fill(0).await;
    let lease = backend.acquire(&call(), &request("a")).await.unwrap();
    fill(1).await;
    let refused = backend.acquire(&call(), &request("b")).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Unavailable, "{refused}");
    assert!(refused.to_string().contains("memory is full"), "{refused}");
    group.becomes_free("b").await;
    let lease = backend.renew(&call(), &lease, TTL).await.unwrap();
    assert_eq!(backend.release(&call(), &lease).await.unwrap(), Released::Now);
}

#[tokio::test]
async fn preflight_names_servers_that_forget_or_have_replicas() {
    let Some((group, backend)) = three().await else { return };
    let preflight = backend.preflight(&call()).await.unwrap();
    assert!(!preflight.capabilities.survives.restart);
    assert_eq!(preflight.capabilities.consistency, Consistency::Replicated);
    assert_eq!(preflight.findings.len(), 3, "{preflight:?}");
    for server in &group.servers {
        let _: () =
            server.raw(&["CONFIG", "SET", "appendonly", "yes", "appendfsync", "always"]).await.unwrap();
    }
    let preflight = backend.preflight(&call()).await.unwrap();
    assert!(preflight.findings.is_empty(), "{preflight:?}");
    assert!(preflight.capabilities.survives.restart);
    assert_eq!(preflight.capabilities.consistency, Consistency::SingleServer);
    let Some(replica) = Server::start().await else { return };
    replica.follow(&group.servers[0]).await;
    let preflight = backend.preflight(&call()).await.unwrap();
    assert!(preflight.findings.iter().any(|finding| finding.contains("1 replicas")), "{preflight:?}");
    assert!(!preflight.capabilities.survives.failover);
}

#[tokio::test]
async fn an_acquire_dropped_at_any_poll_leaves_nothing_after_it_was_abandoned() {
    let Some((group, backend)) = three().await else { return };
    for polls in 0..12 {
        let request = request("a");
        let call = call();
        {
            let mut acquiring = pin!(backend.acquire(&call, &request));
            let mut left = polls;
            poll_fn(|context| {
                if left == 0 || acquiring.as_mut().poll(context).is_ready() {
                    return Poll::Ready(());
                }
                left -= 1;
                Poll::Pending
            })
            .await;
        }
        backend.abandon(&call, &request).await.unwrap();
        let mark = gone("a", &request);
        for server in &group.servers {
            server.until("it is told off", async |server| server.get(&mark).await.is_some()).await;
        }
        group.becomes_free("a").await;
    }
}

#[tokio::test]
async fn a_client_runs_its_work_while_servers_come_and_go() {
    let Some((mut group, backend)) = three().await else { return };
    let locks = LockClient::new(backend);
    let guard = locks.named("a").ttl(Duration::from_secs(2)).acquire().await.unwrap();
    let mut events = locks.events();
    let mut renewals = 0;
    for away in [0, 1, 2] {
        group.stop(&[away]);
        loop {
            match in_time(events.next()).await.map(|event| event.kind) {
                Some(EventKind::Renewed { .. }) => break renewals += 1,
                Some(EventKind::Lost { .. }) | None => panic!("lost while {away} was away"),
                Some(_) => {}
            }
        }
        group.go_on(&[away]);
    }
    assert_eq!(renewals, 3);
    assert!(guard.ensure_held().is_ok());
    guard.release().await.unwrap();
    group.servers[0].kill();
    let guard = locks.named("a").ttl(Duration::from_secs(2)).acquire().await.unwrap();
    guard.release().await.unwrap();
    let owner = unhex("00000000000000000000000000000000").unwrap();
    assert!(group.servers[1].get(&keys("a").gone(&hex(&owner))).await.is_none());
}
