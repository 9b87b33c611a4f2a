//! Losses: told in time and only when they happened (S10), and none that another lease's calls have caused (S3).

use super::{
    Court,
    index::{Grant, Index, NEVER, span},
};
use crate::history::{
    Ended,
    Property::{S3, S10},
    What, Why,
    check::{belief, who},
    wire::nanos,
};

pub(super) fn check(court: &mut Court<'_>, key: usize) {
    for grant in 0..court.key(key).grants.len() {
        if court.rules.loss_notice.is_some() {
            told_in_time(court, key, grant);
        }
        told_without_reason(court, key, grant);
    }
    survives(court, key);
}

/// A loss is told by the deadline and a little, counted from when a paused client runs again.
fn told_in_time(court: &mut Court<'_>, key: usize, grant: usize) {
    let notice = nanos(court.rules.loss_notice.unwrap_or_default());
    let index = &court.index;
    let grant = &court.key(key).grants[grant];
    let moves = belief::moves(index, grant);
    let Some(deadline) = moves.iter().map(|m| m.1).chain(grant.deadline).max() else { return };
    let last_ok = moves.last().map_or(grant.ok, |m| m.0);
    let told = grant.losses.iter().chain(&grant.endings).map(|&e| (index.ts(e), e)).min();
    let released = grant.releases.iter().map(|&op| index.ops[op].inv).min().unwrap_or(NEVER);
    let due = index.resumed(grant.client, deadline.max(last_ok), deadline).saturating_add(notice);
    let client = &index.clients[grant.client];
    let closed = client.closed.map_or(NEVER, |c| c.0);
    // A client that was never heard of again may have died, which is no fault of the guard.
    let when = told.map_or(client.last.min(closed), |t| t.0);
    let violated = released >= due && when > due && closed > due && due != NEVER;
    let violation = violated.then(|| {
        let says = match told {
            Some((ts, _)) => format!(
                "{} learnt at {} that fence {} is lost; its deadline was {}",
                client.name,
                index.at(ts),
                grant.fence,
                index.at(deadline)
            ),
            None => format!(
                "{} was never told that fence {} is lost; its deadline was {}",
                client.name,
                grant.fence,
                index.at(deadline)
            ),
        };
        let events: Vec<usize> = [Some(grant.ok_event), told.map(|t| t.1)].into_iter().flatten().collect();
        (says, events, (deadline, when, grant.ttl))
    });
    court.tested(S10, 1);
    if let Some((says, events, window)) = violation {
        court.late(S10, key, says, &events, window);
    }
}

/// A loss that was told although nothing had happened: before the deadline, with a store that forgets nothing.
fn told_without_reason(court: &mut Court<'_>, key: usize, grant: usize) {
    let margin = nanos(court.rules.stop_margin);
    let index = &court.index;
    let view = court.key(key);
    let grant = &view.grants[grant];
    let mut found: Vec<(String, Vec<usize>)> = Vec::new();
    let mut tested = 0;
    for &event in &grant.losses {
        let What::Lost { why, .. } = &index.events[event].what else { continue };
        let ts = index.ts(event);
        let moves = belief::moves(index, grant);
        // What the client knew for certain: answers before the stamp.
        let standing = moves.iter().filter(|m| m.0 < ts).map(|m| m.1).chain(grant.deadline).max();
        let Some(deadline) = standing else { continue };
        tested += 1;
        let early = ts < deadline.saturating_sub(margin);
        match why {
            Ended::Expired if early => {
                let says = format!(
                    "{} was told at {} that fence {} expired, {} before its deadline",
                    who(&index.events[event]),
                    index.at(ts),
                    grant.fence,
                    span(deadline - ts),
                );
                found.push((says, vec![grant.ok_event, event]));
            }
            Ended::Taken | Ended::SessionEnded | Ended::Other if early && !index.faulty(ts) => {
                let says = format!(
                    "{} was told at {} that fence {} is lost ({}), before its deadline {} and without any fault",
                    who(&index.events[event]),
                    index.at(ts),
                    grant.fence,
                    why.words(),
                    index.at(deadline),
                );
                found.push((says, vec![grant.ok_event, event]));
            }
            _ => {}
        }
    }
    court.tested(S10, tested);
    for (says, events) in found {
        court.violation(S10, key, says, &events);
    }
}

/// The other half of S3: a live lease survives the renewals and releases of older ones. It is renewed when it asks
/// for it, a probe shows it, and nobody else is granted.
fn survives(court: &mut Court<'_>, key: usize) {
    let index = &court.index;
    let view = court.key(key);
    // Renewals and releases under their fences, by the moment they began.
    let mut calls: Vec<(u64, i64, usize)> = Vec::new();
    for grant in &view.grants {
        for &op in grant.renews.iter().chain(&grant.releases) {
            calls.push((index.ops[op].inv, grant.fence, op));
        }
    }
    calls.sort_unstable();
    let mut found: Vec<(String, Vec<usize>)> = Vec::new();
    let mut tested = 0;
    for (at, grant) in view.grants.iter().enumerate() {
        let Some(last) = belief::beliefs(index, grant).last().copied() else { continue };
        let first = calls.partition_point(|c| c.0 <= grant.ok);
        let foreign = calls[first..].iter().take_while(|c| c.0 < last.to).find(|c| c.1 < grant.fence);
        let Some(&(began, fence, op)) = foreign else { continue };
        tested += 1;
        let Some((end, event)) = cut_short(index, view, at, began, last.to) else { continue };
        if index.store_may_forget(view.name, end) {
            continue;
        }
        let invoked = index.ops[op].invokes.first().copied().unwrap_or(event);
        let says = format!(
            "{} used the old fence {fence} at {}, and fence {} of {} was gone at {}, before its deadline",
            who(&index.events[invoked]),
            index.at(began),
            grant.fence,
            who(&index.events[grant.ok_event]),
            index.at(end),
        );
        found.push((says, vec![grant.ok_event, invoked, event]));
    }
    court.tested(S3, tested);
    for (says, events) in found {
        court.violation(S3, key, says, &events);
    }
}

/// Returns what shows that a lease ended between `from` and its end `to`, though nobody ended it.
fn cut_short(
    index: &Index<'_>,
    view: &super::KeyView<'_>,
    at: usize,
    from: u64,
    to: u64,
) -> Option<(u64, usize)> {
    let grant: &Grant = &view.grants[at];
    let stop = belief::stop(index, grant);
    let refused = grant.renews.iter().filter_map(|&op| {
        let event = *index.ops[op].done.first()?;
        let lost = matches!(index.events[event].what, What::Fail { why: Why::Lost | Why::NotHeld });
        lost.then(|| (index.ts(event), event))
    });
    let seen = view.probes.iter().filter_map(|&event| match &index.events[event].what {
        What::Probe { since, holder: Some(holder), .. }
            if since.as_nanos() > from && holder.owner() != grant.owner =>
        {
            Some((index.ts(event), event))
        }
        _ => None,
    });
    let taken = view.grants.iter().filter(|g| g.fence > grant.fence).map(|g| (g.ok, g.ok_event));
    refused.chain(seen).chain(taken).filter(|(ts, _)| *ts > from && *ts < to.min(stop)).min()
}
