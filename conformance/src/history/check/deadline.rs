//! Deadlines: honest ones (S7), and guards that keep to them (S11).

use super::{
    Court,
    index::{Grant, Index, NEVER, span},
};
use crate::history::{
    Call,
    Property::{S7, S11},
    What,
    check::{belief, who},
    wire::nanos,
};

pub(super) fn check(court: &mut Court<'_>, key: usize) {
    if court.wants(S7) {
        clock(court, key);
        for grant in 0..court.key(key).grants.len() {
            honest(court, key, grant);
        }
        probed(court, key);
    }
    for grant in 0..court.key(key).grants.len() {
        guarded(court, key, grant);
    }
}

fn clock(court: &mut Court<'_>, key: usize) {
    if !court.index.history.clock_runs_in_suspend() && !court.key(key).grants.is_empty() {
        let says = "stamps and deadlines were read on a clock that stops in a suspend".to_owned();
        court.violation(S7, key, says, &[court.key(key).grants[0].ok_event]);
    }
}

/// From where a deadline may count at the latest.
struct Sent {
    at: u64,
    event: usize,
    /// The request itself is in the history, not just the invocation.
    requested: bool,
    /// The client may have read its clock later, by what a busy machine makes of it.
    loose: bool,
}

/// Returns the request that an answer belongs to.
fn sent(index: &Index<'_>, op: usize, answered: usize) -> Option<Sent> {
    let op = &index.ops[op];
    let attempt = index.events[answered].attempt;
    let before = |e: &&usize| index.ts(**e) <= index.ts(answered);
    let own = |e: &&usize| attempt != 0 && index.events[**e].attempt == attempt;
    let sents = || op.sents.iter().rev().filter(before);
    let event = *sents()
        .find(own)
        .or_else(|| sents().next())
        .or_else(|| op.invokes.iter().rev().filter(before).find(|e| own(e)))
        .or_else(|| op.invokes.iter().rev().find(before))?;
    let (requested, wire) = match index.events[event].what {
        What::Sent { wire } => (true, wire),
        _ => (false, false),
    };
    Some(Sent { at: index.ts(event), event, requested, loose: !wire })
}

fn honest(court: &mut Court<'_>, key: usize, grant: usize) {
    let rules = court.rules;
    let index = &court.index;
    let grant = &court.key(key).grants[grant];
    let mut hard: Vec<(String, Vec<usize>)> = Vec::new();
    let mut soft: Vec<(String, Vec<usize>, u64, u64, u64)> = Vec::new();
    let mut tested = 0;

    // The grant and its renewals, by the time of the answer.
    let mut answers: Vec<(u64, usize, usize)> = vec![(grant.ok, grant.ok_event, grant.op)];
    answers.extend(grant.renews.iter().filter_map(|&op| {
        let (ts, event, _) = index.first_ok(op)?;
        Some((ts, event, op))
    }));
    answers.sort_unstable();

    let mut standing: Option<(u64, u64, u64, usize)> = None;
    for &(ok, event, op) in &answers {
        let Some(answer) = index.ok(event) else { continue };
        let Some(deadline) = answer.deadline.map(|m| m.as_nanos()) else { continue };
        let (asked, waited) = match index.ops[op].call {
            Some(Call::Acquire { ttl, wait, .. }) => (*ttl, wait.is_some_and(|w| !w.is_zero())),
            Some(Call::Renew { ttl, .. }) => (*ttl, false),
            _ => continue,
        };
        let is_acquire = index.ops[op].is_acquire();
        let ttl = nanos(answer.ttl_eff.map_or(asked, |granted| granted.min(asked)));
        let by = who(&index.events[event]);
        tested += 1;

        if let Some(sent) = sent(index, op, event) {
            let usable = (ttl as f64 * (1.0 - rules.drift)) as u64;
            // A waiter is granted by a later request than the one that the history shows, if that is only its
            // invocation, or if it stands in a queue on the server.
            let unseen = waited && sent.loose && (rules.queue || !sent.requested);
            let from = if unseen { ok } else { sent.at };
            let slack = if sent.loose { nanos(rules.send_slack) } else { 0 };
            let latest = from.saturating_add(usable);
            // A renewal that confirms less than what stands keeps the deadline that stands.
            let kept = standing.is_some_and(|(_, before, ..)| deadline <= before);
            if deadline > latest.saturating_add(slack) && !kept {
                let says = format!(
                    "{by} took {} for its deadline under fence {}: the request left at {} and {} were granted, so it \
                     must stop by {}",
                    index.at(deadline),
                    grant.fence,
                    index.at(from),
                    span(ttl),
                    index.at(latest),
                );
                let events = vec![sent.event, event];
                if sent.loose {
                    soft.push((says, events, sent.at, ok, ttl))
                } else {
                    hard.push((says, events))
                }
            }
        }
        let left = deadline.saturating_sub(ok);
        let least = if is_acquire { nanos(rules.min_remaining) } else { 0 };
        if left == 0 || left < least {
            let says = format!(
                "{by} was told at {} that it holds fence {} until {}: that leaves {}, too little to be a success",
                index.at(ok),
                grant.fence,
                index.at(deadline),
                span(left),
            );
            // The client judged a moment before the stamp; a stall between the two is not its fault.
            soft.push((says, vec![event], ok.saturating_sub(ttl), ok, ttl));
        }
        if let Some((before_ok, before, before_ttl, before_event)) = standing
            && before_ttl == ttl
            && deadline < before
            && before_ok < index.ops[op].inv
        {
            let says = format!(
                "a renewal moved the deadline of fence {} back from {} to {}",
                grant.fence,
                index.at(before),
                index.at(deadline)
            );
            hard.push((says, vec![before_event, event]));
        }
        if standing.is_none_or(|(_, before, ..)| before <= deadline) {
            standing = Some((ok, deadline, ttl, event));
        }
    }
    court.tested(S7, tested);
    for (says, events) in hard {
        court.violation(S7, key, says, &events);
    }
    for (says, events, from, to, ttl) in soft {
        court.late(S7, key, says, &events, (from, to, ttl));
    }
}

/// What the server itself says that the holder has left: a client that counts what it asked for, and not what it
/// got, believes longer than the server does.
fn probed(court: &mut Court<'_>, key: usize) {
    let view = court.key(key);
    let index = &court.index;
    let mut found: Vec<(String, Vec<usize>)> = Vec::new();
    let mut tested = 0;
    for &probe in &view.probes {
        let What::Probe { since, holder: Some(holder), remaining: Some(remaining), .. } =
            &index.events[probe].what
        else {
            continue;
        };
        let (since, until) = (since.as_nanos(), index.ts(probe));
        let Some(owner) = holder.owner() else { continue };
        let Some(grant) = view.grants.iter().find(|g| g.owner == Some(owner)) else { continue };
        // A renewal that was under way, or came later, may have moved the end after the look.
        let quiet = |op: &&usize| {
            let op = &index.ops[**op];
            let answered = op.done.first().map_or(NEVER, |&e| index.ts(e));
            answered < since
        };
        if grant.ok > since || !grant.renews.iter().all(|op| quiet(&op) || index.ops[*op].inv > until) {
            continue;
        }
        let moves = belief::moves(index, grant);
        let deadline = moves
            .iter()
            .filter(|(ts, _)| *ts < since)
            .map(|(_, deadline)| *deadline)
            .chain(grant.deadline)
            .max();
        let Some(deadline) = deadline else { continue };
        tested += 1;
        let server_end = until
            .saturating_add(nanos(*remaining))
            .saturating_add(nanos(court.rules.server_grain))
            .saturating_sub(nanos(court.rules.lock_delay));
        if deadline > server_end {
            let says = format!(
                "{} believes in fence {} until {}, the server drops it by {}: it granted less than was counted",
                who(&index.events[grant.ok_event]),
                grant.fence,
                index.at(deadline),
                index.at(server_end),
            );
            found.push((says, vec![grant.ok_event, probe]));
        }
    }
    court.tested(S7, tested);
    for (says, events) in found {
        court.violation(S7, key, says, &events);
    }
}

/// S11: a guard that is asked at or after its deadline, or after it was told of a loss, does not say yes.
fn guarded(court: &mut Court<'_>, key: usize, grant: usize) {
    let margin = nanos(court.rules.stop_margin);
    let index = &court.index;
    let grant = &court.key(key).grants[grant];
    let mut found: Vec<(String, Vec<usize>)> = Vec::new();
    let mut tested = 0;
    for &check in &grant.checks {
        let asked = index.ops[check].inv;
        let Some((said, event, answer)) = index.first_ok(check) else { continue };
        if answer.held != Some(true) {
            continue;
        }
        tested += 1;
        let deadline = known_deadline(index, grant, said);
        let by = who(&index.events[event]);
        let told = grant.losses.iter().chain(&grant.endings).copied().find(|&e| index.ts(e) < asked);
        let invoked = index.ops[check].invokes.first().copied().unwrap_or(event);
        if let Some(told) = told {
            let says = format!(
                "the guard of {by} said at {} that fence {} holds, after it had told at {} that it is over",
                index.at(said),
                grant.fence,
                index.at(index.ts(told))
            );
            found.push((says, vec![told, invoked, event]));
        } else if let Some(deadline) = deadline
            && asked >= deadline.saturating_sub(margin)
        {
            let says = format!(
                "the guard of {by} was asked at {} and said that fence {} holds; its deadline was {}",
                index.at(asked),
                grant.fence,
                index.at(deadline)
            );
            found.push((says, vec![grant.ok_event, invoked, event]));
        }
    }
    court.tested(S11, tested);
    for (says, events) in found {
        court.violation(S11, key, says, &events);
    }
}

/// Returns the latest deadline that a guard can know by `by`. The stamp of a renewal's answer is taken after the
/// guard has it, so a renewal under way may be known already.
fn known_deadline(index: &Index<'_>, grant: &Grant, by: u64) -> Option<u64> {
    let renewed = grant.renews.iter().filter(|&&op| index.ops[op].inv <= by).filter_map(|&op| {
        let (_, _, answer) = index.first_ok(op)?;
        Some(answer.deadline?.as_nanos())
    });
    renewed.chain(grant.deadline).max()
}
