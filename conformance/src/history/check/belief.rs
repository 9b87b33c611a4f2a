//! Exclusion (S2): no two clients believe at the same time that they hold the lock.

use super::{
    Court,
    index::{Grant, Index},
};
use crate::history::{Property::S2, check::who};

/// A span in which a holder may use the resource.
#[derive(Clone, Copy, Debug)]
pub(in crate::history) struct Belief {
    pub(in crate::history) from: u64,
    /// Not included.
    pub(in crate::history) to: u64,
}

/// Returns when a holder believes: from the answer to the first of deadline, release and loss. The deadline moves
/// only when the answer of a renewal has arrived, so there may be holes.
pub(in crate::history) fn beliefs(index: &Index<'_>, grant: &Grant) -> Vec<Belief> {
    let stop = stop(index, grant);
    let mut moves = moves(index, grant);
    moves.retain(|(ts, _)| *ts < stop);
    let mut spans = vec![Belief { from: grant.ok, to: grant.deadline.unwrap_or(grant.ok) }];
    for (ts, deadline) in moves {
        // There is always a last span.
        let last = spans.len() - 1;
        if ts <= spans[last].to {
            spans[last].to = deadline.max(ts);
        } else {
            spans.push(Belief { from: ts, to: deadline });
        }
    }
    for span in &mut spans {
        span.to = span.to.min(stop);
    }
    spans.retain(|s| s.from < s.to);
    spans
}

/// Returns when the holder stopped believing for good.
pub(in crate::history) fn end(index: &Index<'_>, grant: &Grant) -> u64 {
    beliefs(index, grant).last().map_or(grant.ok, |b| b.to)
}

/// Returns when the holder gave up or was told: a release invoked, a loss, an end on purpose.
pub(in crate::history) fn stop(index: &Index<'_>, grant: &Grant) -> u64 {
    let releases = grant.releases.iter().map(|&op| index.ops[op].inv);
    let told = grant.losses.iter().chain(&grant.endings).map(|&event| index.ts(event));
    releases.chain(told).min().unwrap_or(u64::MAX)
}

/// Returns when and to where confirmed renewals moved the deadline, by the time of the answer.
pub(in crate::history) fn moves(index: &Index<'_>, grant: &Grant) -> Vec<(u64, u64)> {
    let mut moves: Vec<_> = grant
        .renews
        .iter()
        .filter_map(|&op| {
            let (ts, _, answer) = index.first_ok(op)?;
            Some((ts, answer.deadline?.as_nanos()))
        })
        .collect();
    moves.sort_unstable();
    moves
}

pub(super) fn check(court: &mut Court<'_>, key: usize) {
    let index = &court.index;
    let view = court.key(key);
    let mut spans: Vec<(Belief, usize)> = Vec::new();
    for (at, grant) in view.grants.iter().enumerate() {
        spans.extend(beliefs(index, grant).into_iter().map(|belief| (belief, at)));
    }
    spans.sort_by_key(|(belief, grant)| (belief.from, belief.to, *grant));
    let mut found: Vec<(String, Vec<usize>)> = Vec::new();
    // The latest end so far. Beliefs of one grant do not overlap, so where it is this grant's own, every end is past.
    let mut latest: Option<(u64, usize)> = None;
    for &(belief, at) in &spans {
        if let Some((end, other)) = latest
            && other != at
            && belief.from < end
        {
            let (a, b) = (&view.grants[other], &view.grants[at]);
            let until = end.min(belief.to);
            let says = format!(
                "{} (fence {}) and {} (fence {}) both believed that they held it from {} to {}",
                who(&index.events[a.ok_event]),
                a.fence,
                who(&index.events[b.ok_event]),
                b.fence,
                index.at(belief.from),
                index.at(until),
            );
            found.push((says, vec![a.ok_event, b.ok_event]));
        }
        if latest.is_none_or(|(end, _)| end < belief.to) {
            latest = Some((belief.to, at));
        }
    }
    court.tested(S2, spans.len());
    for (says, events) in found {
        court.violation(S2, key, says, &events);
    }
}
