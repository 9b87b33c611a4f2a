//! Configuration: what cannot work is refused before anything is sent.

use std::time::Duration;

use lockcore::{ErrorKind, Fence};

use crate::{
    bench::{Bench, assert_refused},
    case::{Outcome, Verdict::Kept, cases},
};

cases![
    m01_timing_that_cannot_work_is_refused,
    m02_promises_that_are_false_are_refused,
    m03_preflight_answers
];

/// TTLs outside of what is promised, a margin that leaves nothing, a drift of one: refused, and nobody holds.
async fn m01_timing_that_cannot_work_is_refused(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let locks = bench.locks("alice", |_| {}).await;
    let (least, most) = bench.capabilities().ttl.clone().into_inner();
    let lock = locks.named(&name);
    for (what, bad) in [
        ("a TTL below the least", lock.clone().ttl(least / 2)),
        ("a TTL of zero", lock.clone().ttl(Duration::ZERO)),
        ("a TTL above the most", lock.clone().ttl(most + Duration::from_secs(1))),
        ("an endless TTL", lock.clone().ttl(Duration::MAX)),
        ("a margin of the whole TTL", lock.clone().stop_margin(bench.ttl())),
    ] {
        assert_refused(bad.acquire().await, ErrorKind::Invalid, what);
    }
    let drifting = bench.locks("bob", |o| o.drift = 1.0).await;
    assert_refused(drifting.named(&name).acquire().await, ErrorKind::Misconfigured, "a drift of one");
    assert_eq!(bench.holder(&name).await, None);
    Ok(Kept)
}

/// What the capabilities deny is `Unsupported`, typed and before the store is asked.
async fn m02_promises_that_are_false_are_refused(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let locks = bench.locks("alice", |_| {}).await;
    let above = locks.named(&name).above(Fence::MIN).acquire().await;
    match bench.capabilities().fence_floor {
        true => drop(above?.release().await?),
        false => drop(assert_refused(above, ErrorKind::Unsupported, "an unpromised floor")),
    }
    Ok(Kept)
}

/// Preflight looks at the store and answers claims that are not stronger than the capabilities.
async fn m03_preflight_answers(bench: Bench) -> Outcome {
    let locks = bench.locks("alice", |_| {}).await;
    let preflight = locks.preflight().await?;
    let (claimed, stands) = (bench.capabilities(), &preflight.capabilities);
    assert!(
        stands.consistency <= claimed.consistency && stands.fence <= claimed.fence,
        "preflight claims more: {preflight:?}"
    );
    Ok(Kept)
}
