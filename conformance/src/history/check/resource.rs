//! The resource: it never goes back (S4), and the first touch counts (S14).

use std::collections::{BTreeMap, HashMap};

use lockcore::Stamp;

use super::Court;
use crate::history::{
    Access, Event,
    Property::{S4, S14},
    Verdict, What,
};

/// A judgement of the resource, taken apart.
struct Judgement<'h> {
    at: usize,
    op: &'h str,
    rseq: u64,
    stamp: Stamp,
    access: Access,
    verdict: Verdict,
    floor: Option<Stamp>,
    value: Option<i64>,
}

fn judgement(at: usize, event: &Event) -> Option<(&str, Judgement<'_>)> {
    match &event.what {
        What::Resource { resource, rseq, stamp, access, verdict, floor, value } => Some((
            resource,
            Judgement {
                at,
                op: &event.op,
                rseq: *rseq,
                stamp: *stamp,
                access: *access,
                verdict: *verdict,
                floor: *floor,
                value: *value,
            },
        )),
        _ => None,
    }
}

pub(super) fn check(court: &mut Court<'_>, key: usize) {
    let events = court.index.events;
    let mut resources: BTreeMap<&str, Vec<Judgement<'_>>> = BTreeMap::new();
    for &at in &court.key(key).resources {
        if let Some((resource, judgement)) = judgement(at, &events[at]) {
            resources.entry(resource).or_default().push(judgement);
        }
    }
    for judgements in resources.values_mut() {
        judgements.sort_by_key(|j| j.rseq);
        court.tested(S4, judgements.len());
        let reads = judgements.iter().filter(|j| j.access == Access::Read && j.verdict == Verdict::Accepted);
        court.tested(S14, reads.count());
        one(court, key, judgements);
        if court.rules.counter {
            counter(court, key, judgements);
        }
    }
}

/// The highest stamp that a resource has seen, and where.
type Floor = Option<(Stamp, usize)>;

fn is_behind(stamp: Stamp, floor: Floor) -> bool {
    floor.is_some_and(|(f, _)| stamp.fence < f.fence || stamp.fence == f.fence && stamp.owner != f.owner)
}

fn raise(floor: &mut Floor, stamp: Stamp, at: usize) {
    if floor.is_none_or(|(f, _)| f.fence < stamp.fence) {
        *floor = Some((stamp, at));
    }
}

fn one(court: &mut Court<'_>, key: usize, judgements: &[Judgement<'_>]) {
    // What writes have raised, and what all accepted operations have: the difference is the first touch.
    let (mut written, mut touched): (Floor, Floor) = (None, None);
    let mut applied: HashMap<&str, usize> = HashMap::new();
    let mut told: Floor = None;
    let mut last: Option<(u64, usize)> = None;
    for j in judgements {
        let (stamp, op) = (j.stamp, j.op);
        if let Some((rseq, before)) = last
            && rseq == j.rseq
        {
            let says = format!("the resource put two operations on place {rseq} of its order");
            court.violation(S4, key, says, &[before, j.at]);
        }
        last = Some((j.rseq, j.at));
        match j.verdict {
            Verdict::Accepted => {
                if let Some((floor, before)) = written.filter(|_| is_behind(stamp, written)) {
                    let says = format!(
                        "the resource accepted {stamp} after it had accepted a write of {floor}: an older holder got \
                         through"
                    );
                    court.violation(S4, key, says, &[before, j.at]);
                } else if let Some((floor, before)) = touched.filter(|_| is_behind(stamp, touched)) {
                    let says = format!(
                        "the resource accepted {stamp} after {floor} had read: what the newer holder read is no \
                         longer true"
                    );
                    court.violation(S14, key, says, &[before, j.at]);
                }
                if j.access == Access::Write
                    && !op.is_empty()
                    && let Some(&before) = applied.get(op)
                {
                    let says = format!("operation {op} was applied twice, the second time for {stamp}");
                    court.violation(S4, key, says, &[before, j.at]);
                }
                raise(&mut touched, stamp, j.at);
                if j.access == Access::Write {
                    raise(&mut written, stamp, j.at);
                    applied.insert(op, j.at);
                }
            }
            Verdict::Duplicate => {
                if !applied.contains_key(op) {
                    let says = format!(
                        "operation {op} of {stamp} was taken for a repetition, and was never applied before: a lost \
                         write"
                    );
                    court.violation(S4, key, says, &[j.at]);
                }
            }
            Verdict::Stale => {
                if !is_behind(stamp, touched) {
                    let floor = touched.map_or("nobody".to_owned(), |(floor, _)| floor.to_string());
                    let mut events: Vec<usize> = touched.iter().map(|(_, at)| *at).collect();
                    events.push(j.at);
                    let says = format!(
                        "the resource refused {stamp} as stale, though it had let through nothing newer than {floor}"
                    );
                    court.violation(S4, key, says, &events);
                }
            }
        }
        let Some(floor) = j.floor else { continue };
        if let Some((before, at)) = told
            && floor.fence < before.fence
        {
            let says = format!("the floor of the resource went back from {before} to {floor}");
            court.violation(S4, key, says, &[at, j.at]);
        }
        told = Some((floor, j.at));
        if j.verdict == Verdict::Accepted && floor.fence < stamp.fence {
            let (property, did) = if j.access == Access::Read { (S14, "read") } else { (S4, "write") };
            let says = format!("the {did} of {stamp} was accepted and left the floor at {floor}");
            court.violation(property, key, says, &[j.at]);
        }
    }
}

/// Each accepted write adds one; a read shows the sum. Anything else is a lost update.
fn counter(court: &mut Court<'_>, key: usize, judgements: &[Judgement<'_>]) {
    let mut before: Option<(i64, usize)> = None;
    for j in judgements.iter().filter(|j| j.verdict == Verdict::Accepted) {
        let Some(value) = j.value else { continue };
        let step = i64::from(j.access == Access::Write);
        if let Some((old, at)) = before
            && value != old + step
        {
            let says = format!(
                "the counter stood at {old} and {} by {} left it at {value}: an update was lost",
                if step == 1 { "an increment" } else { "a read" },
                j.stamp
            );
            court.violation(S14, key, says, &[at, j.at]);
        }
        before = Some((value, j.at));
    }
}
