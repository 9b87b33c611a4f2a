//! Names: the same limits everywhere, and no two names meet in the store.

use lockcore::{ErrorKind, LockName, Released};

use crate::{
    bench::{Bench, assert_refused},
    case::{Outcome, Verdict::Kept, cases},
};

cases![
    n01_names_up_to_the_limit_work_and_longer_ones_are_refused,
    n02_hostile_names_do_not_meet,
    n03_namespaces_do_not_meet,
    n04_the_extremes_of_waiting_are_no_panic,
];

/// The longest and the shortest name can be locked; empty and longer ones are `Invalid`.
async fn n01_names_up_to_the_limit_work_and_longer_ones_are_refused(bench: Bench) -> Outcome {
    let alice = bench.client("alice").await;
    let longest = LockName::parse(&format!("{:x}{}", bench.stage.seed, "x".repeat(512))[..512])?;
    for name in [longest, LockName::from_segments(vec!["s"; 8])?, LockName::parse("q")?] {
        let lease = alice.try_acquire(&name).await?;
        assert_eq!(
            bench.holder(&name).await,
            Some(lease.owner.digest()),
            "{name:?} is not found by a second road"
        );
        assert_eq!(alice.release(&lease).await?, Released::Now);
    }
    let locks = bench.locks("bob", |_| {}).await;
    for bad in ["".to_owned(), "x".repeat(513), "x".repeat(1 << 20), "a\0b".into(), "a//b".into()] {
        assert_refused(locks.named(bad).acquire().await, ErrorKind::Invalid, "a bad name was taken");
    }
    Ok(Kept)
}

/// Names that an encoding might fold together, or that look like keys of a store, are locked side by side.
async fn n02_hostile_names_do_not_meet(bench: Bench) -> Outcome {
    let alice = bench.client("alice").await;
    let mark = format!("{:x}", bench.stage.seed);
    let hostile = [
        "{}", "}{", "{a}{b}", "a", "A", "a/b", "a%", ".", "..", "*", "?", "[a]", "a:b", "a b", "lock:",
        "fence", "0", "é", "e\u{301}", "🔒", "\u{fffd}", "\\", "'", "\"", "--", "a.b", "a_b", "a-b", "~",
        "$1",
    ];
    let mut names: Vec<LockName> = Vec::new();
    for text in hostile {
        names.push(LockName::from_segments([&mark, text])?);
    }
    names.push(LockName::from_segments([&mark, "a", "b"])?);
    names.push(LockName::from_segments([&mark, "a", "b", "c"])?);
    names.push(LockName::from_segments([&mark])?);
    let ttl = bench.ttl() * 20;
    let mut leases = Vec::new();
    for name in &names {
        let request = lockcore::backend::AcquireRequest::new(name.clone(), ttl);
        match alice.ask(&request, alice.budget()).await {
            Ok(lease) => leases.push(lease),
            Err(error) => panic!("{name:?} meets another name: {error}"),
        }
    }
    for lease in &leases {
        assert_eq!(
            bench.holder(&lease.name).await,
            Some(lease.owner.digest()),
            "{:?} has another's holder",
            lease.name
        );
    }
    for lease in &leases {
        assert_eq!(alice.release(lease).await?, Released::Now, "{:?} went with another", lease.name);
    }
    Ok(Kept)
}

/// The same name in two namespaces is two locks.
async fn n03_namespaces_do_not_meet(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let one = bench.locks("one", |o| o.namespace = bench.namespace_beside("one")).await;
    let two = bench.locks("two", |o| o.namespace = bench.namespace_beside("two")).await;
    // Each namespace is a world of its own; the history knows only names.
    bench.judge(|rules| {
        rules
            .expect(crate::history::Property::S2, crate::history::Expect::NotJudged)
            .expect(crate::history::Property::S1, crate::history::Expect::NotJudged)
            .expect(crate::history::Property::S1q, crate::history::Expect::NotJudged)
            .expect(crate::history::Property::S3, crate::history::Expect::NotJudged)
            .expect(crate::history::Property::S5, crate::history::Expect::NotJudged)
            .expect(crate::history::Property::S6, crate::history::Expect::NotJudged)
    });
    let first = one.named(&name).acquire().await?;
    let second = two.named(&name).wait(bench.ttl()).acquire().await?;
    first.release().await?;
    second.ensure_held()?;
    second.release().await?;
    Ok(Kept)
}

/// Waiting not at all and waiting as long as there is are no mistakes and no panic.
async fn n04_the_extremes_of_waiting_are_no_panic(bench: Bench) -> Outcome {
    let name = bench.fresh_name();
    let locks = bench.locks("alice", |_| {}).await;
    // No time at all is not enough for every network; it ends at once all the same, and leaves nothing.
    match locks.named(&name).wait(std::time::Duration::ZERO).acquire().await {
        Ok(guard) => drop(guard.release().await?),
        Err(error) => assert!(error.kind().is_transient(), "no time to wait is a mistake: {error}"),
    }
    locks.flush().await;
    for lock in [locks.named(&name).wait(std::time::Duration::MAX), locks.named(&name).wait_forever()] {
        lock.acquire().await?.release().await?;
    }
    Ok(Kept)
}
