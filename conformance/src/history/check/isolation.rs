//! Isolation (S15): what happens to one name changes no other.

use lockcore::OwnerDigest;

use super::{Court, index::NEVER};
use crate::history::{Call, Property::S15, What, check::belief};

/// Compares each look at a name with the one before. If nothing was asked of this name meanwhile, and no lease can
/// have run out, they must show the same.
pub(super) fn check(court: &mut Court<'_>) {
    if !court.wants(S15) || court.index.keys.len() < 2 {
        return;
    }
    for key in 0..court.index.keys.len() {
        one(court, key);
    }
}

fn one(court: &mut Court<'_>, key: usize) {
    let index = &court.index;
    let view = court.key(key);
    let mut found = Vec::new();
    let mut tested = 0;
    let mut probes = view.probes.clone();
    probes.sort_by_key(|&p| index.ts(p));
    let busy = busy(court, key);
    for pair in probes.windows(2) {
        let (
            What::Probe { since, holder: before, residue: residue_before, counter: counter_before, .. },
            What::Probe { holder: after, residue: residue_after, counter: counter_after, .. },
        ) = (&index.events[pair[0]].what, &index.events[pair[1]].what)
        else {
            continue;
        };
        let (from, to) = (since.as_nanos(), index.ts(pair[1]));
        let faulty = index.faults.iter().any(|f| f.begin <= to && f.end >= from);
        if faulty || busy.iter().any(|&(begin, end)| begin <= to && end >= from) {
            continue;
        }
        let others = || {
            let mut others: Vec<usize> = Vec::new();
            for (other, view) in index.keys.iter().enumerate() {
                if other != key {
                    let during = |op: &&usize| index.ops[**op].inv <= to && index.ops[**op].last >= from;
                    others.extend(view.ops.iter().filter(during));
                }
            }
            others
        };
        tested += 1;
        let holder_changed = match (before, after) {
            (Some(before), Some(after)) if before.owner() != after.owner() => {
                // A lease may run out by itself.
                before.owner().is_none_or(|owner| to < deadline(court, key, owner))
            }
            _ => false,
        };
        let residue_grew = residue_before.zip(*residue_after).is_some_and(|(a, b)| b > a);
        let counter_changed = counter_before.zip(*counter_after).is_some_and(|(a, b)| a != b);
        let changed = match (holder_changed, residue_grew, counter_changed) {
            (true, ..) => "the holder",
            (_, true, _) => "the number of records",
            (_, _, true) => "the highest fence",
            _ => continue,
        };
        let others = others();
        let names = names(court, &others);
        let says = format!(
            "{changed} changed between {} and {}, while nothing was asked of this name{names}",
            index.at(from),
            index.at(to),
        );
        let mut events = pair.to_vec();
        events.extend(others.iter().filter_map(|&op| index.ops[op].invokes.first().copied()).take(3));
        found.push((says, events));
    }
    court.tested(S15, tested);
    for (says, events) in found {
        court.violation(S15, key, says, &events);
    }
}

fn names(court: &Court<'_>, ops: &[usize]) -> String {
    let mut names: Vec<&str> = ops
        .iter()
        .filter_map(|&op| court.index.ops[op].invokes.first())
        .map(|&event| court.index.events[event].key.as_str())
        .collect();
    names.sort_unstable();
    names.dedup();
    match names.len() {
        0 => String::new(),
        1..=3 => format!("; busy were {}", names.join(", ")),
        n => format!("; busy were {} and {} more", names[..3].join(", "), n - 3),
    }
}

/// When calls on this name were under way, or may still have had an effect.
fn busy(court: &Court<'_>, key: usize) -> Vec<(u64, u64)> {
    let index = &court.index;
    let spans = court.key(key).ops.iter().map(|&number| {
        let op = &index.ops[number];
        let unsure = !op.cancels.is_empty()
            || op.done.iter().any(|&e| matches!(index.events[e].what, What::Unknown { .. }));
        (op.inv, if unsure { NEVER } else { op.last })
    });
    spans.collect()
}

/// Until when an owner's lease cannot have run out; the beginning of time for one that is not in the history.
fn deadline(court: &Court<'_>, key: usize, owner: OwnerDigest) -> u64 {
    let grant =
        court.key(key).grants.iter().find(|g| {
            matches!(court.index.ops[g.op].call, Some(Call::Acquire { .. })) && g.owner == Some(owner)
        });
    grant.map_or(0, |g| {
        let moves = belief::moves(&court.index, g);
        moves.iter().map(|m| m.1).chain(g.deadline).max().unwrap_or(0)
    })
}
