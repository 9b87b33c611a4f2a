//! Soak: everything that may go wrong between client and store, at random, and then peace. The history is the judge.

use std::{cell::RefCell, rc::Rc, time::Duration};

use lockcore::{Attempt, LockClient, LockName, Verb};

use crate::{
    bench::{Bench, Register},
    case::{Outcome, Verdict::Kept, cases},
    history::{Demand, FaultClass, Verdict},
};

cases![j17_random_faults_break_nothing_and_then_it_heals];

/// Six clients count at three resources while requests and replies are lost, held, late and cut; every count that the
/// resource took is there exactly once, and after the last fault everybody gets the lock.
async fn j17_random_faults_break_nothing_and_then_it_heals(bench: Bench) -> Outcome {
    let (turns, faults) = if bench.stage.service.virtual_time() { (40, 120) } else { (5, 12) };
    let places: Vec<_> = (0..3)
        .map(|_| {
            let name = bench.fresh_name();
            let register = Rc::new(RefCell::new(bench.register(&name)));
            (name, register)
        })
        .collect();
    let tasks = tokio::task::LocalSet::new();
    let mut counted = Vec::new();
    for who in 0..6_u64 {
        let locks = bench.locks(&format!("client-{who}"), |_| {}).await;
        let (bench, places) = (bench.clone(), places.clone());
        counted.push(tasks.spawn_local(async move {
            let mut accepted = 0;
            for turn in 0..turns {
                let lot = who * 1000 + turn;
                let (name, register) = &places[bench.draw(lot, 3) as usize];
                accepted += i64::from(count_once(&bench, &locks, name, register, lot).await);
            }
            accepted
        }));
    }
    let trouble = bench.clone();
    tasks.spawn_local(async move {
        for n in 0..faults {
            one_fault(&trouble, 100_000 + 10 * n).await;
        }
    });
    tasks.await;
    bench.wire().heal();
    let mut accepted = 0;
    for task in counted {
        accepted += task.await.expect("the task lives");
    }
    let values: i64 = places.iter().map(|(_, register)| register.borrow().value()).sum();
    assert_eq!(values, accepted, "counts were lost or doubled");
    let last = bench.client("last").await;
    for (name, register) in &places {
        let lease = last.acquire(name, bench.ttl() * 20).await?;
        let seen = register.borrow_mut().read(lease.stamp()).expect("the holder was refused");
        assert_eq!(register.borrow_mut().write(lease.stamp(), "last", seen + 1), Verdict::Accepted);
        last.release(&lease).await?;
    }
    bench.judge(|rules| rules.demand(Demand::Grants(turns)).demand(Demand::AcceptedVerdicts(turns)));
    Ok(Kept)
}

/// One turn of one client: read, think, write. Says whether the resource took the write.
async fn count_once(
    bench: &Bench,
    locks: &LockClient,
    name: &LockName,
    register: &RefCell<Register>,
    lot: u64,
) -> bool {
    let guard = match locks.named(name).wait(bench.ttl() * 2).try_acquire().await {
        Ok(Attempt::Granted(guard)) => guard,
        _ => {
            bench.pass(bench.ttl().mul_f64(0.1 * bench.draw(lot, 10) as f64)).await;
            return false;
        }
    };
    let Ok(stamp) = guard.stamp() else { return false };
    let Some(seen) = register.borrow_mut().read(stamp) else { return false };
    // Some think longer than their lease lasts when its renewals do not get through, and write without a look.
    bench.pass(bench.ttl().mul_f64(0.15 * bench.draw(lot + 1, 16) as f64)).await;
    let took = register.borrow_mut().write(stamp, &format!("op-{lot}"), seen + 1) == Verdict::Accepted;
    match bench.draw(lot + 2, 3) {
        0 => drop(guard),
        _ => drop(guard.release().await),
    }
    took
}

/// One fault from the bag, for a while.
async fn one_fault(bench: &Bench, lot: u64) {
    let wire = bench.wire();
    let verb = [Verb::Acquire, Verb::Renew, Verb::Release, Verb::Resolve][bench.draw(lot, 4) as usize];
    let span = bench.ttl().mul_f64(0.1 * bench.draw(lot + 1, 20) as f64);
    let begin = |what: &str| bench.recorder().fault(what, "wire", "", FaultClass::A1, "by the wire");
    let fault = match bench.draw(lot + 2, 6) {
        0 => {
            let fault = begin("lose a request");
            wire.lose_request(verb);
            fault
        }
        1 => {
            let fault = begin("lose a reply");
            wire.lose_reply(verb);
            fault
        }
        2 => {
            let fault = begin("hold replies");
            wire.hold_replies(verb);
            bench.pass(span).await;
            wire.deliver();
            fault
        }
        3 => {
            let fault = begin("late replies");
            wire.delay_replies(span);
            bench.pass(span).await;
            wire.delay_replies(Duration::ZERO);
            fault
        }
        4 => {
            let fault = begin("cut");
            wire.cut(true);
            bench.pass(span).await;
            wire.cut(false);
            fault
        }
        _ => {
            let fault = begin("refuse");
            wire.refuse(true);
            bench.pass(span / 4).await;
            wire.refuse(false);
            fault
        }
    };
    bench.pass(bench.ttl().mul_f64(0.1 * bench.draw(lot + 3, 10) as f64)).await;
    fault.end("by the wire");
}
