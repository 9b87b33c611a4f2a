//! What must happen in time (L1 to L10), with the bounds that the rules give, after the last fault has ended.
//!
//! A bound is exceeded only if it can be seen: a waiter that was still waiting when it ended, with nobody else who
//! could have held the lock. A stall of the machine makes such a violation inconclusive.

use super::{
    Court,
    honesty::could_hold,
    index::{Grant, Index, NEVER, span},
};
use crate::history::{
    Answer, Call, Property,
    Property::*,
    What, Why,
    check::{belief, who},
    wire::nanos,
};

/// A violation before it is written down: what it says, what shows it, and when a stall would excuse it.
type Late = (Property, String, Vec<usize>, (u64, u64, u64));

pub(super) fn check(court: &mut Court<'_>, key: usize) {
    let mut found: Vec<Late> = Vec::new();
    if court.rules.closed_world && court.index.healed != NEVER {
        served(court, key, &mut found);
        quiet(court, key, &mut found);
    }
    residue(court, key, &mut found);
    order(court, key, &mut found);
    budget(court, key, &mut found);
    steady(court, key, &mut found);
    polite(court, key, &mut found);
    recovered(court, key, &mut found);
    for (property, says, events, window) in found {
        court.late(property, key, says, &events, window);
    }
}

/// When a lease was over for certain, and how.
struct End {
    at: u64,
    event: usize,
    released: bool,
}

fn sure_end(court: &Court<'_>, grant: &Grant) -> End {
    let index = &court.index;
    // The last moment at which a grant or a renewal can have had its effect, plus the TTL.
    let mut last = (grant.ok, grant.ok_event);
    let mut ttl = grant.ttl;
    for &renew in &grant.renews {
        let op = &index.ops[renew];
        let Some(Call::Renew { ttl: asked, .. }) = op.call else { continue };
        match op.done.first() {
            Some(&event) if matches!(index.events[event].what, What::Fail { .. }) => {}
            Some(&event) => last = last.max((index.ts(event), event)),
            None => last = (NEVER, last.1),
        }
        ttl = ttl.max(nanos(*asked));
    }
    let expiry = last.0.saturating_add(ttl).saturating_add(nanos(court.rules.lock_delay));
    let mut end = End { at: expiry, event: last.1, released: false };
    for &op in grant.releases.iter().chain(&grant.renews) {
        for &event in &index.ops[op].done {
            let at = index.ts(event);
            let (over, released) = match &index.events[event].what {
                What::Ok { answer: Answer { released: Some(now), .. } } => (true, *now),
                What::Fail { why: Why::Lost | Why::NotHeld } => (true, false),
                _ => (false, false),
            };
            if over && at < end.at {
                end = End { at, event, released };
            }
        }
    }
    end
}

/// Says whether an acquire was waiting from `from` to `to`, with a client that could run.
fn waits(index: &Index<'_>, op: usize, from: u64, to: u64) -> bool {
    let op = &index.ops[op];
    let Some(Call::Acquire { wait: Some(wait), .. }) = op.call else { return false };
    let answered = op.done.iter().chain(&op.cancels).map(|&e| index.ts(e)).min().unwrap_or(NEVER);
    !wait.is_zero() && op.inv <= from && answered > to && !index.paused(op.client, from, to)
}

/// Says whether an acquire without a known end may hold between the two.
fn in_doubt(index: &Index<'_>, op: usize, from: u64, to: u64) -> bool {
    let acquire = &index.ops[op];
    let Some(Call::Acquire { ttl, .. }) = acquire.call else { return false };
    if index.first_ok(op).is_some() || acquire.inv > to {
        return false;
    }
    let unsure = |&e: &usize| match &index.events[e].what {
        What::Fail { why } => *why == Why::Lost,
        _ => true,
    };
    let given_up =
        acquire.done.iter().filter(|e| unsure(e)).chain(&acquire.cancels).map(|&e| index.ts(e)).max();
    given_up.is_some_and(|ts| ts.saturating_add(nanos(*ttl)) >= from)
}

/// L1 and L2: somebody who waits is granted soon after a lease is over.
fn served(court: &mut Court<'_>, key: usize, found: &mut Vec<Late>) {
    let bounds = court.rules.bounds.clone();
    if bounds.takeover.is_none() && bounds.wake.is_none() {
        return;
    }
    let mut tested = [0, 0];
    let index = &court.index;
    let view = court.key(key);
    let acquires: Vec<usize> = view.ops.iter().copied().filter(|&op| index.ops[op].is_acquire()).collect();
    let grants: Vec<u64> = view.grants.iter().map(|g| g.ok).collect();
    for (at, grant) in view.grants.iter().enumerate() {
        let end = sure_end(court, grant);
        let (property, bound) = if end.released { (L2, bounds.wake) } else { (L1, bounds.takeover) };
        let Some(bound) = bound.map(nanos) else { continue };
        let from = end.at.max(index.healed);
        let due = from.saturating_add(bound);
        if due > index.end {
            continue;
        }
        tested[usize::from(end.released)] += 1;
        // Grants are sorted by their answers: the next one tells whether somebody was served.
        if grants.get(at + 1).is_some_and(|&ok| ok <= due) {
            continue;
        }
        if acquires.iter().any(|&op| in_doubt(index, op, end.at, due)) {
            continue;
        }
        let Some(&waiter) = acquires.iter().find(|&&op| waits(index, op, from, due)) else { continue };
        let invoked = index.ops[waiter].invokes[0];
        let how = if end.released { "was released" } else { "had run out" };
        let says = format!(
            "fence {} {how} by {}, and {} was still waiting {} later",
            grant.fence,
            index.at(end.at),
            who(&index.events[invoked]),
            span(bound)
        );
        found.push((property, says, vec![end.event, invoked], (from, due, bound)));
    }
    court.tested(L1, tested[0]);
    court.tested(L2, tested[1]);
}

/// L3: at the end nobody waits for a lock that is free.
fn quiet(court: &mut Court<'_>, key: usize, found: &mut Vec<Late>) {
    let Some(bound) = court.rules.bounds.quiet.map(nanos) else { return };
    let index = &court.index;
    let view = court.key(key);
    let free =
        view.grants.iter().map(|g| sure_end(court, g).at).fold(index.healed.max(index.start), u64::max);
    let mut tested = 0;
    for &op in &view.ops {
        if !index.ops[op].is_acquire() {
            continue;
        }
        tested += 1;
        let from = free.max(index.ops[op].inv);
        let due = from.saturating_add(bound);
        let doubt = || view.ops.iter().any(|&other| in_doubt(index, other, free, index.end));
        if index.ops[op].last == NEVER && due < index.end && waits(index, op, from, index.end) && !doubt() {
            let invoked = index.ops[op].invokes[0];
            let says = format!(
                "{} still waits at the end, {}, though the lock is free since {}: a wake-up was lost",
                who(&index.events[invoked]),
                index.at(index.end),
                index.at(free)
            );
            found.push((L3, says, vec![invoked], (from, index.end, bound)));
        }
    }
    court.tested(L3, tested);
}

/// L4: no more records than acquires that may still have one.
fn residue(court: &mut Court<'_>, key: usize, found: &mut Vec<Late>) {
    let Some(bound) = court.rules.bounds.residue.map(nanos) else { return };
    let index = &court.index;
    let view = court.key(key);
    let acquires = view.ops.iter().filter(|&&op| index.ops[op].is_acquire());
    let (mut begins, mut ends): (Vec<u64>, Vec<u64>) = acquires
        .map(|&op| {
            let op = &index.ops[op];
            (op.inv, op.last.saturating_add(bound))
        })
        .unzip();
    begins.sort_unstable();
    ends.sort_unstable();
    let mut tested = 0;
    for &probe in &view.probes {
        let What::Probe { since, residue: Some(residue), .. } = &index.events[probe].what else { continue };
        let (since, until) = (since.as_nanos(), index.ts(probe));
        if since < index.healed.saturating_add(bound) {
            continue;
        }
        tested += 1;
        let allowed = begins.partition_point(|&b| b <= until) - ends.partition_point(|&e| e < since);
        if *residue > allowed as u64 {
            let says = format!(
                "{residue} records are left at {}, and {allowed} acquires could still have one",
                index.at(until)
            );
            found.push((L4, says, vec![probe], (since.saturating_sub(bound), until, bound)));
        }
    }
    court.tested(L4, tested);
}

/// L5: who was in the queue before another came is served before it.
fn order(court: &mut Court<'_>, key: usize, found: &mut Vec<Late>) {
    struct Waiter {
        came: u64,
        queued: Option<u64>,
        ok: u64,
        invoked: usize,
    }
    let index = &court.index;
    let fair = court.rules.bounds.fair;
    let mut waiters: Vec<Waiter> = Vec::new();
    for &number in &court.key(key).ops {
        let op = &index.ops[number];
        if !op.is_acquire() || op.inv < index.healed {
            continue;
        }
        let ok = match index.first_ok(number) {
            Some((ok, ..)) => ok,
            None if op.last == NEVER => NEVER,
            None => continue,
        };
        waiters.push(Waiter { came: op.inv, queued: op.queued, ok, invoked: op.invokes[0] });
    }
    let mut queued: Vec<usize> = (0..waiters.len()).filter(|&w| waiters[w].queued.is_some()).collect();
    queued.sort_by_key(|&w| waiters[w].queued);
    let mut coming: Vec<usize> = (0..waiters.len()).filter(|&w| waiters[w].ok != NEVER).collect();
    coming.sort_by_key(|&w| waiters[w].came);
    let mut bypasses = 0;
    let mut before = queued.into_iter().peekable();
    let mut latest: Option<usize> = None;
    for &w in &coming {
        while let Some(earlier) = before.next_if(|&e| waiters[e].queued < Some(waiters[w].came)) {
            if latest.is_none_or(|l| waiters[l].ok < waiters[earlier].ok) {
                latest = Some(earlier);
            }
        }
        let Some(earlier) = latest.filter(|&l| waiters[l].ok > waiters[w].ok) else { continue };
        bypasses += 1;
        if fair {
            let (a, b) = (&waiters[earlier], &waiters[w]);
            let says = format!(
                "{} was in the queue at {}, before {} came at {}, and was overtaken",
                who(&index.events[a.invoked]),
                index.at(a.queued.unwrap_or(a.came)),
                who(&index.events[b.invoked]),
                index.at(b.came)
            );
            // Order is a matter of the store; no stall excuses it.
            found.push((L5, says, vec![a.invoked, b.invoked], (0, 0, NEVER)));
        }
    }
    let tested = coming.len();
    if fair {
        court.tested(L5, tested);
    }
    court.judged.bypasses += bypasses;
}

/// L6: an acquire returns when its budget is used up.
fn budget(court: &mut Court<'_>, key: usize, found: &mut Vec<Late>) {
    let bounds = &court.rules.bounds;
    let (slack, timeout) = (bounds.wait_slack.map(nanos), bounds.call_timeout.map(nanos));
    let index = &court.index;
    let mut tested = 0;
    for &number in &court.key(key).ops {
        let op = &index.ops[number];
        let Some(Call::Acquire { wait, .. }) = op.call else { continue };
        let (Some(&invoked), allowed) = (
            op.invokes.first(),
            match wait.filter(|w| !w.is_zero()) {
                Some(wait) => slack.map(|slack| nanos(wait).saturating_add(slack)),
                None => timeout,
            },
        ) else {
            continue;
        };
        let Some(allowed) = allowed else { continue };
        tested += 1;
        let due = op.inv.saturating_add(allowed);
        if due == NEVER {
            continue;
        }
        // A client that was paused meanwhile returns when it runs again.
        let resumed = index.resumed(op.client, op.inv, due);
        if resumed == NEVER {
            continue;
        }
        let due = due.max(resumed.saturating_add(slack.unwrap_or(allowed)));
        let returned = op.done.iter().chain(&op.cancels).map(|&e| index.ts(e)).min();
        let seen = returned.unwrap_or(index.end);
        if seen > due {
            let (by, from) = (who(&index.events[invoked]), index.at(op.inv));
            let says = match returned {
                Some(ts) => format!(
                    "{by} gave an acquire {} at {from}, and it returned at {}",
                    span(allowed),
                    index.at(ts)
                ),
                None => format!("{by} gave an acquire {} at {from}, and it never returned", span(allowed)),
            };
            let events: Vec<usize> =
                [Some(invoked), op.done.first().copied()].into_iter().flatten().collect();
            found.push((L6, says, events, (op.inv, seen, allowed)));
        }
    }
    court.tested(L6, tested);
}

/// L7: without a fault a renewed lease stays, with one renewal at a time.
fn steady(court: &mut Court<'_>, key: usize, found: &mut Vec<Late>) {
    let Some(ttls) = court.rules.bounds.steady_ttls else { return };
    let index = &court.index;
    if index.faulty(index.end) {
        return;
    }
    let view = court.key(key);
    let mut longest: Option<(u64, &Grant)> = None;
    for grant in &view.grants {
        for &loss in &grant.losses {
            let says = format!(
                "{} lost fence {} at {} without any fault",
                who(&index.events[loss]),
                grant.fence,
                index.at(index.ts(loss))
            );
            found.push((L7, says, vec![grant.ok_event, loss], (grant.ok, index.ts(loss), grant.ttl)));
        }
        let mut renews = grant.renews.clone();
        renews.sort_by_key(|&op| index.ops[op].inv);
        let mut busy: Option<(u64, usize)> = None;
        for &renew in &renews {
            let op = &index.ops[renew];
            let invoked = op.invokes[0];
            if let Some((until, before)) = busy
                && op.inv < until
            {
                let says = format!(
                    "{} began a renewal of fence {} at {} while another was under way",
                    who(&index.events[invoked]),
                    grant.fence,
                    index.at(op.inv)
                );
                found.push((L7, says, vec![before, invoked], (0, 0, NEVER)));
            }
            let until = op.done.first().map_or(NEVER, |&e| index.ts(e));
            if busy.is_none_or(|b| b.0 < until) {
                busy = Some((until, invoked));
            }
        }
        let held = belief::end(index, grant).min(index.end).saturating_sub(grant.ok);
        if longest.is_none_or(|(most, _)| most < held) {
            longest = Some((held, grant));
        }
    }
    let mut tested = 0;
    if let Some((held, grant)) = longest {
        tested = 1;
        if held < grant.ttl.saturating_mul(ttls.into()) {
            let says = format!(
                "fence {} was held for {}, less than {ttls} times its TTL of {}",
                grant.fence,
                span(held),
                span(grant.ttl)
            );
            let window = (grant.ok, grant.ok.saturating_add(held), grant.ttl);
            found.push((L7, says, vec![grant.ok_event], window));
        }
    }
    court.tested(L7, tested);
}

/// L8: waiting and handing over cost few requests, and waiters do not knock in step.
fn polite(court: &mut Court<'_>, key: usize, found: &mut Vec<Late>) {
    let bounds = &court.rules.bounds;
    let index = &court.index;
    let view = court.key(key);
    let (mut requests, mut knocks, mut waiters, mut waited) = (0_u64, 0_u64, 0_u64, 0_u64);
    let mut first: Option<usize> = None;
    let mut tested = 0;
    for &number in &view.ops {
        let op = &index.ops[number];
        requests += op.sents.len() as u64;
        let Some(Call::Acquire { wait: Some(wait), .. }) = op.call else { continue };
        if wait.is_zero() || op.sents.is_empty() {
            continue;
        }
        first = first.or(op.invokes.first().copied());
        waiters += 1;
        knocks += op.sents.len() as u64;
        let returned = op.done.iter().chain(&op.cancels).map(|&e| index.ts(e)).min();
        waited += returned.unwrap_or(index.end).saturating_sub(op.inv);
        let gaps: Vec<u64> = op.sents.windows(2).map(|w| index.ts(w[1]) - index.ts(w[0])).collect();
        if bounds.jitter && gaps.len() >= 7 {
            tested += 1;
            let (least, most) = gaps.iter().fold((NEVER, 0), |(a, b), &g| (a.min(g), b.max(g)));
            let mean = gaps.iter().sum::<u64>() / gaps.len() as u64;
            if most - least <= mean / 100 {
                let says = format!(
                    "{} asked {} times, always {} apart: waiters in step knock all at once",
                    index.clients[op.client].name,
                    op.sents.len(),
                    span(mean)
                );
                found.push((
                    L8,
                    says,
                    vec![op.invokes.first().copied().unwrap_or(op.sents[0])],
                    (0, 0, NEVER),
                ));
            }
        }
    }
    if let (Some(budget), Some(first)) = (bounds.requests_per_waiter_second, first) {
        tested += 1;
        let seconds = waited as f64 / 1e9;
        // The first request of each waiter is not waiting yet.
        let allowed = budget * seconds + waiters as f64;
        if knocks as f64 > allowed {
            let says = format!("{waiters} waiters asked {knocks} times in {seconds:.1} s of waiting");
            found.push((L8, says, vec![first], (0, 0, NEVER)));
        }
    }
    if let (Some(budget), Some(grant)) = (bounds.requests_per_grant, view.grants.last()) {
        tested += 1;
        if requests as f64 > budget * view.grants.len() as f64 {
            let says = format!("{} grants took {requests} requests", view.grants.len());
            found.push((L8, says, vec![grant.ok_event], (0, 0, NEVER)));
        }
    }
    court.tested(L8, tested);
}

/// L10: a while after the last fault nobody is told any more that the store cannot be reached, and a lock that
/// nobody can hold is granted.
fn recovered(court: &mut Court<'_>, key: usize, found: &mut Vec<Late>) {
    let Some(bound) = court.rules.bounds.recovery.map(nanos) else { return };
    let index = &court.index;
    if index.faults.is_empty() || index.healed == NEVER {
        return;
    }
    let last_fault = index.faults.iter().find(|f| f.end == index.healed).map(|f| f.event);
    let from = index.healed.saturating_add(bound);
    let spans = if court.rules.closed_world { could_hold(court, key) } else { vec![(0, NEVER)] };
    let mut tested = 0;
    for &number in &court.key(key).ops {
        let op = &index.ops[number];
        if !op.is_acquire() || op.inv < from {
            continue;
        }
        tested += 1;
        let Some(&event) = op.done.first() else { continue };
        let ts = index.ts(event);
        let free = || spans.iter().all(|&(begin, end)| end < op.inv || begin > ts);
        let failed = match &index.events[event].what {
            What::Unknown { .. } | What::Fail { why: Why::Unavailable } => true,
            What::Fail { why: Why::WaitTimeout } => free(),
            _ => false,
        };
        if failed {
            let says = format!(
                "{} could not acquire at {}, {} after the last fault had ended",
                who(&index.events[event]),
                index.at(op.inv),
                span(op.inv - index.healed)
            );
            let events = last_fault.into_iter().chain([op.invokes[0], event]).collect();
            found.push((L10, says, events, (op.inv, ts, bound)));
        }
    }
    court.tested(L10, tested);
}

/// L9: closing ends soon, and leaves the server as it was.
pub(super) fn check_clients(court: &mut Court<'_>) {
    let Some(bound) = court.rules.bounds.close.map(nanos) else { return };
    let index = &court.index;
    let mut found: Vec<Late> = Vec::new();
    let (mut tested, mut all_closed) = (0, 0);
    for op in index.ops.iter().filter(|op| op.call == Some(&Call::Close)) {
        tested += 1;
        let closed = op.done.first().map(|&e| index.ts(e));
        all_closed = all_closed.max(closed.unwrap_or(NEVER));
        let seen = closed.unwrap_or(index.end);
        let due = index.resumed(op.client, op.inv, op.inv.saturating_add(bound)).saturating_add(bound);
        if seen > due {
            let says = match closed {
                Some(_) => format!("closing {} took {}", index.clients[op.client].name, span(seen - op.inv)),
                None => format!("closing {} has not ended", index.clients[op.client].name),
            };
            found.push((L9, says, vec![op.invokes[0]], (op.inv, seen, bound)));
        }
    }
    let mut counts = index.events.iter().enumerate().filter_map(|(at, event)| match &event.what {
        What::Probe { since, records: Some(records), .. } => Some((at, since.as_nanos(), *records)),
        _ => None,
    });
    if let Some((first_at, _, first)) = counts.next()
        && let Some((last_at, since, last)) = counts.next_back()
        && tested > 0
        && since > all_closed
        && last > first
    {
        let says =
            format!("the server had {first} records before and has {last} after all clients were closed");
        found.push((L9, says, vec![first_at, last_at], (0, 0, NEVER)));
    }
    court.tested(L9, tested);
    for (property, says, events, window) in found {
        let stalled = court.index.stalled(window.0, window.1, window.2 / 4);
        court.accuse(property, "", says, &events, stalled);
    }
}
