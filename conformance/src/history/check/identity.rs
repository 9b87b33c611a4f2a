//! Identity and book-keeping: one grant an operation (S8), unique owners (S9), answers that belong to a call (S16).

use std::collections::HashMap;

use lockcore::{OwnerDigest, Stamp};

use super::{
    Court,
    index::{NEVER, stamp_of},
};
use crate::history::{
    Call,
    Property::{S8, S9, S16},
    What,
    check::who,
};

pub(super) fn check(court: &mut Court<'_>) {
    one_grant(court);
    owners(court);
    accounts(court);
    after_close(court);
    whole_owner_shown(court);
}

fn name_of(court: &Court<'_>, op: usize) -> String {
    let op = &court.index.ops[op];
    let event = op.invokes.first().or(op.done.first());
    event.map_or(String::new(), |&e| court.index.events[e].key.clone())
}

fn one_grant(court: &mut Court<'_>) {
    let index = &court.index;
    let mut found = Vec::new();
    let mut tested = 0;
    for (number, op) in index.ops.iter().enumerate() {
        let Some(Call::Acquire { owner, .. }) = op.call else { continue };
        let mut first: Option<(Stamp, usize)> = None;
        for &event in &op.done {
            let Some(answer) = index.granted(event) else { continue };
            tested += 1;
            let Some(stamp) = stamp_of(answer).or_else(|| Some(Stamp::new(answer.fence?, *owner))) else {
                continue;
            };
            let by = who(&index.events[event]);
            if stamp.owner != *owner {
                let says = format!("{by} asked for owner {owner} and was granted {stamp}");
                found.push((number, says, vec![op.invokes[0], event]));
            }
            match first {
                Some((before, at)) if before != stamp => {
                    let says =
                        format!("one acquire of {by} was granted {before} and then {stamp}: two grants");
                    found.push((number, says, vec![at, event]));
                }
                _ => first = Some((stamp, event)),
            }
        }
    }
    court.tested(S8, tested);
    for (op, says, events) in found {
        court.accuse(S8, &name_of(court, op), says, &events, false);
    }
}

fn owners(court: &mut Court<'_>) {
    let index = &court.index;
    let mut first: HashMap<OwnerDigest, usize> = HashMap::new();
    let mut found = Vec::new();
    let mut tested = 0;
    for (number, op) in index.ops.iter().enumerate() {
        let Some(Call::Acquire { owner, .. }) = op.call else { continue };
        tested += 1;
        let other = *first.entry(*owner).or_insert(number);
        if other != number {
            let (a, b) = (index.ops[other].invokes[0], op.invokes[0]);
            let says = format!(
                "{} and {} acquire as the same owner {owner}: either can release the other's lease",
                who(&index.events[a]),
                who(&index.events[b])
            );
            found.push((number, says, vec![a, b]));
        }
    }
    court.tested(S9, tested);
    for (op, says, events) in found {
        court.accuse(S9, &name_of(court, op), says, &events, false);
    }
}

/// An owner has 128 bits, 32 hex digits. Texts that clients wrote must not show one.
fn whole_owner_shown(court: &mut Court<'_>) {
    let mut found = Vec::new();
    for (at, event) in court.index.events.iter().enumerate() {
        let text = match &event.what {
            What::Unknown { cause } => cause,
            What::Note { text } => text,
            What::Fault { confirmed_by, .. } => confirmed_by,
            _ => continue,
        };
        let shown = text.split(|c: char| !c.is_ascii_hexdigit()).any(|word| word.len() == 32);
        if shown {
            found.push((event.key.clone(), at));
        }
    }
    for (key, at) in found {
        let says =
            "a text shows 32 hex digits in a row: a whole owner, with which anybody can release".to_owned();
        court.accuse(S9, &key, says, &[at], false);
    }
}

/// Every answer belongs to a call that is open.
fn accounts(court: &mut Court<'_>) {
    let index = &court.index;
    let mut found = Vec::new();
    for (number, op) in index.ops.iter().enumerate() {
        // By stamps alone: what happens at one moment may stand in any order.
        let mut moments: Vec<(u64, i64, usize)> = Vec::new();
        moments.extend(op.invokes.iter().map(|&e| (index.ts(e), 1, e)));
        moments.extend(op.done.iter().map(|&e| (index.ts(e), -1, e)));
        moments.sort_by_key(|&(ts, step, _)| (ts, -step));
        let mut open = 0;
        for (_, step, event) in moments {
            open += step;
            if open < 0 {
                open = 0;
                let says = format!(
                    "{} got an answer at {} to a call that it had not made, or that had been answered",
                    who(&index.events[event]),
                    index.at(index.ts(event))
                );
                found.push((number, says, vec![event]));
            }
        }
        // An answer after the caller gave up comes from a future that was dropped.
        if let (Some(&cancel), Some(&done)) = (op.cancels.first(), op.done.last()) {
            let asked_again = op.invokes.iter().any(|&i| index.ts(i) >= index.ts(cancel));
            if index.ts(done) > index.ts(cancel) && !asked_again {
                let says = format!(
                    "{} gave up a call at {} and got its answer at {}",
                    who(&index.events[cancel]),
                    index.at(index.ts(cancel)),
                    index.at(index.ts(done))
                );
                found.push((number, says, vec![cancel, done]));
            }
        }
        if op.is_acquire() {
            for &event in &op.done {
                if index.ok(event).is_some_and(|answer| answer.fence.is_none()) {
                    let says = format!("{} was granted a lease without a fence", who(&index.events[event]));
                    found.push((number, says, vec![event]));
                }
            }
        }
    }
    let tested = index.ops.len();
    court.tested(S16, tested);
    for (op, says, events) in found {
        court.accuse(S16, &name_of(court, op), says, &events, false);
    }
}

fn after_close(court: &mut Court<'_>) {
    let index = &court.index;
    let closed: HashMap<(u32, &str), (u64, usize)> = index
        .clients
        .iter()
        .filter_map(|c| Some(((c.pid, c.name), c.closed?)))
        .filter(|((_, name), _)| !name.is_empty())
        .collect();
    if closed.is_empty() {
        return;
    }
    let mut found = Vec::new();
    for (at, event) in index.events.iter().enumerate() {
        let Some(&(ts, close)) = closed.get(&(event.pid, event.client.as_str())) else { continue };
        let of_the_client = matches!(
            event.what,
            What::Sent { .. } | What::Queued | What::Lost { .. } | What::Ok { .. } | What::Unknown { .. }
        );
        if event.ts.as_nanos() > ts && ts != NEVER && of_the_client {
            let says = format!(
                "{} was closed by {} and still did something at {}",
                event.client,
                index.at(ts),
                index.at(event.ts.as_nanos())
            );
            found.push((event.key.clone(), says, vec![close, at]));
        }
    }
    for (key, says, events) in found {
        court.accuse(S16, &key, says, &events, false);
    }
}
