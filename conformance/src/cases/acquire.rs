//! Basics: one holder at a time, in every scope, under fences that grow.

use std::time::Duration;

use lockcore::{Attempt, ErrorKind, Released, backend::AcquireRequest};

use crate::{
    bench::{Bench, assert_refused},
    case::{Outcome, Verdict::Kept, cases},
    history::Demand,
};

cases![
    a01_uncontended_grant,
    a02_contended_try,
    a03_release_then_grant,
    a04_independent_locks,
    a05_no_reentry,
    a06_fences_grow_with_every_grant,
    a07_processes_exclude_each_other[Processes],
];

/// A free lock is granted: owner and fence are on record, the deadline lies ahead and within the TTL, and a release
/// leaves nobody on record.
async fn a01_uncontended_grant(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let alice = bench.client("alice").await;
    let lease = alice.try_acquire(&name).await?;
    let now = bench.now();
    assert!(lease.deadline > now, "granted and over: {lease:?}");
    assert!(now.until(lease.deadline) <= bench.ttl(), "the deadline lies beyond the TTL: {lease:?}");
    assert_eq!(bench.holder(&name).await, Some(lease.owner.digest()), "a second road shows another holder");
    let holder = alice.inspect(&name).await?.holder.expect("`inspect` shows nobody");
    assert_eq!(holder.stamp(), lease.stamp(), "`inspect` shows another holding");
    assert!(holder.remaining <= bench.ttl(), "more is left than was asked: {:?}", holder.remaining);
    assert_eq!(alice.release(&lease).await?, Released::Now);
    assert_eq!(bench.holder(&name).await, None, "a released lock has a holder");
    let seen = alice.inspect(&name).await?;
    assert_eq!(seen.holder, None, "a released lock has a holder");
    assert!(seen.last_fence >= Some(lease.fence), "the highest fence was forgotten: {seen:?}");
    Ok(Kept)
}

/// A try on a held lock is refused, names the holder, leaves nothing, and the holder does not notice.
async fn a02_contended_try(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let (alice, bob) = (bench.client("alice").await, bench.client("bob").await);
    let lease = alice.try_acquire(&name).await?;
    let refused = assert_refused(bob.try_acquire(&name).await, ErrorKind::Held, "a held lock was granted");
    let holder = refused.holder().expect("the refusal does not name the holder");
    assert_eq!(holder.stamp(), lease.stamp(), "the refusal names another holder");
    assert_eq!(bench.holder(&name).await, Some(lease.owner.digest()), "the refusal changed the holder");
    let waiters = alice.inspect(&name).await?.waiters.unwrap_or(0);
    assert_eq!(waiters, 0, "a refused try stands in the queue");
    drop(alice.renew(&lease).await?);
    assert_eq!(alice.release(&lease).await?, Released::Now);
    let next = bob.try_acquire(&name).await?;
    assert!(next.fence > lease.fence, "{:?} after {:?}", next.fence, lease.fence);
    bob.release(&next).await?;
    Ok(Kept)
}

/// A released lock is free at once, and the next grant has the higher fence.
async fn a03_release_then_grant(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let (alice, bob) = (bench.client("alice").await, bench.client("bob").await);
    let first = alice.try_acquire(&name).await?;
    alice.release(&first).await?;
    let second = bob.try_acquire(&name).await?;
    assert!(second.fence > first.fence, "{:?} after {:?}", second.fence, first.fence);
    bob.release(&second).await?;
    Ok(Kept)
}

/// Seventy-five locks are held at once by two clients; releasing one leaves the rest.
async fn a04_independent_locks(bench: Bench) -> Outcome {
    let (alice, bob) = (bench.client("alice").await, bench.client("bob").await);
    let ttl = bench.ttl() * 20;
    let mut leases = Vec::new();
    for n in 0..75 {
        let client = if n < 50 { &alice } else { &bob };
        leases.push(client.ask(&AcquireRequest::new(bench.fresh_name(), ttl), client.budget()).await?);
    }
    let released = leases.remove(7);
    alice.release(&released).await?;
    assert_eq!(bench.holder(&released.name).await, None);
    for lease in &leases {
        assert_eq!(
            bench.holder(&lease.name).await,
            Some(lease.owner.digest()),
            "{} went with another",
            lease.name
        );
    }
    for (n, lease) in leases.iter().enumerate() {
        let client = if n < 49 { &alice } else { &bob };
        assert_eq!(client.release(lease).await?, Released::Now);
    }
    Ok(Kept)
}

/// A lock that this client holds is held for this client, too: no second grant, no second fence.
async fn a05_no_reentry(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let alice = bench.client("alice").await;
    let lease = alice.try_acquire(&name).await?;
    assert_refused(alice.try_acquire(&name).await, ErrorKind::Held, "one client entered twice");
    alice.release(&lease).await?;
    let locks = bench.locks("locks", |_| {}).await;
    let guard = locks.named(&name).acquire().await?;
    assert!(matches!(locks.named(&name).try_acquire().await?, Attempt::Busy(_)), "one client entered twice");
    guard.release().await?;
    Ok(Kept)
}

/// Two hundred grants to four clients: every fence is higher than all before it.
async fn a06_fences_grow_with_every_grant(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let mut clients = Vec::new();
    for who in ["alice", "bob", "carol", "dave"] {
        clients.push(bench.client(who).await);
    }
    let mut last = None;
    for n in 0..200 {
        let client = &clients[bench.draw(n, 4) as usize];
        let lease = client.try_acquire(&name).await?;
        assert!(
            Some(lease.fence) > last,
            "the fence did not grow: grant {n} has {:?} after {last:?}",
            lease.fence
        );
        last = Some(lease.fence);
        client.release(&lease).await?;
    }
    bench.judge(|rules| rules.demand(Demand::Grants(200)).demand(Demand::Releases(200)));
    Ok(Kept)
}

/// A process that holds the lock excludes this one; when it ends in good order, the lock is free.
async fn a07_processes_exclude_each_other(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let mut other = bench.child("other").await;
    let alice = bench.client("alice").await;
    let theirs = other.acquire(&name, Duration::from_secs(5)).await.expect("the lock is free");
    assert_refused(alice.try_acquire(&name).await, ErrorKind::Held, "two processes hold the lock");
    assert!(other.release(&theirs).await, "its own release ended nothing");
    other.leave().await;
    let mine = alice.try_acquire(&name).await?;
    assert!(mine.fence > theirs.fence(), "{:?} after {:?}", mine.fence, theirs.fence());
    alice.release(&mine).await?;
    Ok(Kept)
}
