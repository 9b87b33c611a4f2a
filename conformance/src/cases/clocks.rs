//! Clocks: the wall clock of a client moves nothing. Where a server's decides, its steps cost exclusion or time, and the
//! resource keeps out whom it must.

use lockcore::{
    ErrorKind, LostReason, State,
    backend::{AcquireRequest, Lease},
};

use crate::{
    bench::{Bench, Client, Register, assert_refused},
    case::{Outcome, Verdict::Kept, cases},
    history::{Demand, Expect, FaultClass, Property, Verdict},
};

cases![
    k01_a_server_clock_that_jumps_ahead_lets_nobody_past_the_resource[Servers, ServerClock],
    k02_a_server_clock_that_jumps_back_costs_time_and_no_fence[Servers, ServerClock],
    k03_deadlines_are_on_the_clock_since_boot,
    k04_one_clock_of_several_that_jumps_lets_nobody_past_the_resource[Servers, ServerClock, Members],
    k05_a_suspend_counts[VirtualTime],
];

/// Seconds that a clock is set ahead: longer than any lease of these cases.
const AHEAD: i64 = 600;

/// Seconds that a clock is set back.
const BACK: i64 = -3600;

/// The wall clocks of all servers jump past the end of a lease. Where leases do not follow that clock, it is held on;
/// elsewhere another is granted the lock, above the old fence, and the resource lets the old holder in no more.
async fn k01_a_server_clock_that_jumps_ahead_lets_nobody_past_the_resource(bench: Bench) -> Outcome {
    let (name, alice, bob) = (bench.fresh_name(), bench.client("alice").await, bench.client("bob").await);
    let mut register = bench.register(&name);
    let long = AcquireRequest::new(name.clone(), bench.ttl() * 40);
    let lease = alice.ask(&long, alice.budget()).await?;
    assert_eq!(register.write(lease.stamp(), "alice/1", 1), Verdict::Accepted);
    for server in 0..bench.servers().count() {
        set_ahead(&bench, server, AHEAD).await;
    }
    let answer = bob.try_acquire(&name).await;
    if bench.capabilities().survives.clock_step {
        assert_refused(
            answer,
            ErrorKind::Held,
            "a lock that outlives a step of the clock was granted to another",
        );
        let renewed = alice.renew_for(&lease, long.ttl()).await?;
        assert_eq!(register.write(renewed.stamp(), "alice/2", 2), Verdict::Accepted);
        alice.release(&renewed).await?;
        return Ok(Kept);
    }
    two_believe(&bench, &bob, &mut register, &lease, &answer?).await?;
    Ok(Kept)
}

/// The wall clocks of all servers jump back while a client that died still holds. Where leases do not follow that clock, the
/// next is granted the lock after the TTL; elsewhere an operator has to break it. Fences go on growing in either.
async fn k02_a_server_clock_that_jumps_back_costs_time_and_no_fence(bench: Bench) -> Outcome {
    let (name, alice, bob) = (bench.fresh_name(), bench.client("alice").await, bench.client("bob").await);
    let mut register = bench.register(&name);
    let first = alice.try_acquire(&name).await?;
    assert_eq!(register.write(first.stamp(), "alice/1", 1), Verdict::Accepted);
    for server in 0..bench.servers().count() {
        set_ahead(&bench, server, BACK).await;
    }
    let answer = bob.acquire(&name, bench.ttl() * 8).await;
    let next = if bench.capabilities().survives.clock_step {
        answer?
    } else {
        assert_refused(
            answer,
            ErrorKind::WaitTimeout,
            "a lease that outlives its TTL was granted to another",
        );
        let left = bob.inspect(&name).await?.holder.expect("alice is on record").stamp();
        bob.break_lock(&name, Some(left)).await?;
        bench.judge(|rules| rules.expect(Property::L1, Expect::Breaks));
        bob.try_acquire(&name).await?
    };
    assert!(next.fence > first.fence, "the fence fell behind: {:?} after {:?}", next.fence, first.fence);
    assert_eq!(register.write(next.stamp(), "bob/1", 2), Verdict::Accepted);
    let late = register.write(first.stamp(), "alice/2", 3);
    assert_eq!(late, Verdict::Stale, "the stale fence was let through");
    bob.release(&next).await?;
    Ok(Kept)
}

/// A lease that a majority has granted while the last server was dead: the clock of one of that majority jumps past its
/// end. Where votes are counted by each server's own clock, another now finds a majority, above the old fence.
async fn k04_one_clock_of_several_that_jumps_lets_nobody_past_the_resource(bench: Bench) -> Outcome {
    let (name, alice, bob) = (bench.fresh_name(), bench.client("alice").await, bench.client("bob").await);
    let mut register = bench.register(&name);
    // The control: a lease that all have granted outlives the jump of one.
    let long = AcquireRequest::new(name.clone(), bench.ttl() * 40);
    let everywhere = alice.ask(&long, alice.budget()).await?;
    set_ahead(&bench, 0, AHEAD).await;
    assert_refused(bob.try_acquire(&name).await, ErrorKind::Held, "one clock of several gave the lock away");
    alice.release(&everywhere).await?;

    let last = bench.servers().count() - 1;
    let fault = bench.kill(last).await;
    let lease = bench.until_ok("a majority grants", async || alice.try_acquire(&name).await).await;
    let lease = bench.until_ok("a majority renews", async || alice.renew_for(&lease, long.ttl()).await).await;
    assert_eq!(register.write(lease.stamp(), "alice/1", 1), Verdict::Accepted);
    bench.servers().restart(last).await;
    fault.end("it was started again");
    set_ahead(&bench, 0, 2 * AHEAD).await;
    let answer = bob.try_acquire(&name).await;
    if bench.capabilities().survives.clock_step {
        assert_refused(
            answer,
            ErrorKind::Held,
            "a lock that outlives a step of the clock was granted to another",
        );
        alice.release(&lease).await?;
        return Ok(Kept);
    }
    two_believe(&bench, &bob, &mut register, &lease, &answer?).await?;
    Ok(Kept)
}

/// Shows that the next holder is above the former one, who still believes, and that the resource knows the difference.
async fn two_believe(
    bench: &Bench,
    bob: &Client,
    register: &mut Register,
    former: &Lease,
    live: &Lease,
) -> lockcore::Result<()> {
    assert!(live.fence > former.fence, "the fence fell behind: {:?} after {:?}", live.fence, former.fence);
    assert_eq!(register.write(live.stamp(), "bob/1", 2), Verdict::Accepted);
    let late = register.write(former.stamp(), "alice/2", 3);
    assert_eq!(late, Verdict::Stale, "the stale fence was let through");
    // Two believe for a while.
    bench.pass(bench.ttl() / 20).await;
    bob.release(live).await?;
    bench.judge(|rules| rules.expect(Property::S2, Expect::Breaks).demand(Demand::StaleVerdicts(1)));
    Ok(())
}

/// Steps the wall clock of one server, for good.
async fn set_ahead(bench: &Bench, server: usize, seconds: i64) {
    let what = format!("clock set {seconds} s ahead");
    let fault = bench.fault(&what, &format!("server {server}"), FaultClass::A4);
    bench.servers().set_clock_ahead(server, seconds).await;
    fault.end("by its shim");
}

/// A deadline lies on the clock that the bench reads, which is the one since boot: a step of the wall clock cannot
/// move it.
async fn k03_deadlines_are_on_the_clock_since_boot(bench: Bench) -> Outcome {
    let (name, alice) = (bench.fresh_name(), bench.client("alice").await);
    let lease = alice.try_acquire(&name).await?;
    let wall = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
    let left = bench.now().until(lease.deadline);
    assert!(left <= bench.ttl() && left > bench.ttl() / 4, "{left:?} are left of {:?}", bench.ttl());
    let nanos = u128::from(lease.deadline.as_nanos());
    assert!(nanos.abs_diff(wall.as_nanos()) > 1_000_000_000_000, "the deadline lies on the wall clock");
    alice.release(&lease).await?;
    Ok(Kept)
}

/// A machine that was suspended past the deadline wakes up without its locks: no timer rang meanwhile, and the first
/// look says so all the same.
async fn k05_a_suspend_counts(bench: Bench) -> Outcome {
    let (name, bob) = (bench.fresh_name(), bench.client("bob").await);
    let mut register = bench.register(&name);
    let locks = bench.locks("alice", |_| {}).await;
    let guard = locks.named(&name).acquire().await?;
    let stale = guard.stamp()?;
    let mut suspend = std::pin::pin!(tokio::time::advance(bench.ttl() * 2));
    // Polled once: the clock has jumped, and no other task ran before the look.
    assert!(crate::bench::poll_once(&mut suspend).await.is_pending());
    let refusal = guard.stamp().expect_err("a stamp after a suspend past the deadline");
    assert_eq!(refusal.lost_reason(), Some(LostReason::Expired), "{refusal}");
    assert_eq!(guard.state(), State::Lost(LostReason::Expired));
    suspend.await;
    let live = bob.acquire(&name, bench.ttl()).await?;
    assert_eq!(register.write(live.stamp(), "bob/1", 1), Verdict::Accepted, "the live holder was refused");
    assert_eq!(register.write(stale, "alice/1", 2), Verdict::Stale, "the stale fence was let through");
    bob.release(&live).await?;
    Ok(Kept)
}
