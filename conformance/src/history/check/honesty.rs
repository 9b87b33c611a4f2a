//! Honesty of failures: no effect where none is claimed (S12), no refusal without a holder (S13).

use std::collections::HashMap;

use lockcore::OwnerDigest;

use super::{Court, index::NEVER};
use crate::history::{
    Call,
    Property::{S12, S13},
    Verdict, What, Why,
    check::who,
    wire::nanos,
};

pub(super) fn check(court: &mut Court<'_>, key: usize) {
    no_effect(court, key);
    no_effect_at_the_resource(court, key);
    if court.rules.closed_world {
        refusals(court, key);
    }
}

/// An acquire that failed shows up nowhere afterwards: not as a grant, not as the holder.
fn no_effect(court: &mut Court<'_>, key: usize) {
    let index = &court.index;
    let view = court.key(key);
    let mut found: Vec<(String, Vec<usize>)> = Vec::new();
    let mut tested = 0;
    let mut failed: HashMap<OwnerDigest, (u64, usize)> = HashMap::new();
    for &number in &view.ops {
        let op = &index.ops[number];
        let Some(Call::Acquire { owner, .. }) = op.call else { continue };
        let fail = op.done.iter().copied().find(|&e| match &index.events[e].what {
            // A waiter whose lease was lost may have left one behind; it does not say that it had no effect.
            What::Fail { why } => *why != Why::Lost,
            _ => false,
        });
        let Some(fail) = fail else { continue };
        tested += 1;
        failed.insert(*owner, (index.ts(fail), fail));
        if let Some((ts, ok, _)) = index.first_ok(number).filter(|(ts, ..)| *ts > index.ts(fail)) {
            let says = format!(
                "{} was told at {} that its acquire had no effect, and at {} that it was granted",
                who(&index.events[fail]),
                index.at(index.ts(fail)),
                index.at(ts)
            );
            found.push((says, vec![fail, ok]));
        }
    }
    for &probe in &view.probes {
        let What::Probe { since, holder: Some(holder), .. } = &index.events[probe].what else { continue };
        let Some(owner) = holder.owner() else { continue };
        if let Some(&(told, fail)) = failed.get(&owner)
            && since.as_nanos() > told
        {
            let says = format!(
                "{} was told at {} that its acquire had no effect, and the store shows it as the holder at {}",
                who(&index.events[fail]),
                index.at(told),
                index.at(index.ts(probe))
            );
            found.push((says, vec![fail, probe]));
        }
    }
    court.tested(S12, tested);
    for (says, events) in found {
        court.violation(S12, key, says, &events);
    }
}

/// A write that failed is not among what the resource accepted.
fn no_effect_at_the_resource(court: &mut Court<'_>, key: usize) {
    let index = &court.index;
    let view = court.key(key);
    let mut failed: HashMap<&str, usize> = HashMap::new();
    for &number in &view.ops {
        let op = &index.ops[number];
        if !matches!(op.call, Some(Call::Write { .. })) {
            continue;
        }
        // Only if every attempt failed: one that got through excuses the others.
        let all = op.done.iter().all(|&e| matches!(index.events[e].what, What::Fail { .. }));
        if let Some(&fail) = op.done.first().filter(|_| all && op.done.len() == op.invokes.len()) {
            failed.insert(index.op_names[number], fail);
        }
    }
    let mut found: Vec<(String, Vec<usize>)> = Vec::new();
    for &event in &view.resources {
        let (What::Resource { verdict: Verdict::Accepted, stamp, .. }, op) =
            (&index.events[event].what, index.events[event].op.as_str())
        else {
            continue;
        };
        if let Some(&fail) = failed.get(op) {
            let says = format!(
                "{} was told that its write {op} under {stamp} had no effect, and the resource has accepted it",
                who(&index.events[fail])
            );
            found.push((says, vec![fail, event]));
        }
    }
    court.tested(S12, failed.len());
    for (says, events) in found {
        court.violation(S12, key, says, &events);
    }
}

/// A refusal needs somebody who could hold while it was decided. The spans in which somebody could are widened
/// whenever something is not known, so this finds no false alarm, and not every violation.
fn refusals(court: &mut Court<'_>, key: usize) {
    let index = &court.index;
    let view = court.key(key);
    let mut spans = could_hold(court, key);
    spans.sort_unstable();
    // Joined, so that one search answers each refusal.
    let mut joined: Vec<(u64, u64)> = Vec::new();
    for (from, to) in spans {
        match joined.last_mut() {
            Some(last) if from <= last.1 => last.1 = last.1.max(to),
            _ => joined.push((from, to)),
        }
    }
    let mut found: Vec<(String, Vec<usize>)> = Vec::new();
    let mut tested = 0;
    for &number in &view.ops {
        let op = &index.ops[number];
        if !op.is_acquire() {
            continue;
        }
        for &event in &op.done {
            if !matches!(index.events[event].what, What::Fail { why: Why::Held }) {
                continue;
            }
            let refused = index.ts(event);
            let asked = op.invokes.iter().rev().find(|&&i| i < event || index.ts(i) < refused);
            let Some(&asked) = asked else { continue };
            tested += 1;
            let first = joined.partition_point(|s| s.1 < index.ts(asked));
            if joined.get(first).is_none_or(|s| s.0 > refused) {
                let says = format!(
                    "{} was refused between {} and {} because somebody holds it; nobody could",
                    who(&index.events[event]),
                    index.at(index.ts(asked)),
                    index.at(refused)
                );
                found.push((says, vec![asked, event]));
            }
        }
    }
    court.tested(S13, tested);
    for (says, events) in found {
        court.violation(S13, key, says, &events);
    }
}

/// Returns the spans in which somebody could hold, as widely as the history allows.
pub(super) fn could_hold(court: &Court<'_>, key: usize) -> Vec<(u64, u64)> {
    let index = &court.index;
    let view = court.key(key);
    let residue = court.rules.bounds.residue.map_or(NEVER, nanos);
    let mut spans = Vec::new();
    // The next grant with a higher fence ends this one for certain.
    let mut by_fence: Vec<(i64, u64)> = view.grants.iter().map(|g| (g.fence, g.ok)).collect();
    by_fence.sort_unstable();
    let mut earliest = NEVER;
    let mut ends: HashMap<i64, u64> = HashMap::new();
    for chunk in by_fence.chunk_by(|a, b| a.0 == b.0).rev() {
        ends.insert(chunk[0].0, earliest);
        earliest = chunk.iter().map(|g| g.1).fold(earliest, u64::min);
    }
    for grant in &view.grants {
        let mut to = ends.get(&grant.fence).copied().unwrap_or(NEVER);
        for &release in &grant.releases {
            // Over already, or ended now: after the answer this lease holds no more.
            let over = index.ops[release].done.iter().find(|&&e| {
                matches!(index.events[e].what, What::Ok { .. } | What::Fail { why: Why::NotHeld | Why::Lost })
            });
            to = over.map_or(to, |&e| to.min(index.ts(e)));
        }
        spans.push((grant.inv, to));
    }
    for &number in &view.ops {
        let op = &index.ops[number];
        match op.call {
            Some(Call::Acquire { .. }) if index.first_ok(number).is_none() => {
                let honest = op.last != NEVER
                    && op.cancels.is_empty()
                    && op
                        .done
                        .iter()
                        .all(|&e| matches!(&index.events[e].what, What::Fail { why } if *why != Why::Lost));
                if !honest {
                    spans.push((op.inv, NEVER));
                } else if court.rules.queue {
                    // A place in the queue refuses a try, and is cleared away a little after its owner gave up.
                    spans.push((op.inv, op.last.saturating_add(if residue == NEVER { 0 } else { residue })));
                }
            }
            // A break may raise the fence by a record that looks like a holder.
            Some(Call::Break { .. }) => spans.push((op.inv, op.last)),
            _ => {}
        }
    }
    spans
}
