//! The tenure pass: fence order (S1), foreign effects (S3), stale renewals (S5) and resurrections (S6) in one sweep.
//!
//! A lock with fences and leases that may expire at any moment is a fixed order of points: the grant of fence 1, its
//! renewals, its release, the grant of fence 2, and so on. Each point must lie between the invocation and the answer
//! of its call. Such points exist exactly if no call that comes later in that order was answered before an earlier
//! one was invoked, so one sweep from the highest fence down, with the earliest answer seen so far, decides whether
//! the history is linearizable, and names the pair that shows it is not. A call without an answer constrains
//! nothing: the sequence of fences may have gaps, and a release may or may not have happened.

use lockcore::OwnerDigest;

use super::{Court, belief};
use crate::history::{Call, Property, Property::*, What, Why, check::who};

/// One call with a known effect.
#[derive(Clone, Copy, Debug)]
struct Step {
    fence: i64,
    owner: Option<OwnerDigest>,
    kind: Kind,
    inv: u64,
    ok: u64,
    invoked: usize,
    answered: usize,
}

/// The order of steps within one tenure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    Grant,
    Renew,
    Release,
    /// The store said that this lease is over. It bounds its own tenure; the next may have begun long before.
    Over,
}

pub(super) fn check(court: &mut Court<'_>, key: usize) {
    let mut steps = steps(court, key);
    court.tested(S1, steps.iter().filter(|s| s.kind == Kind::Grant).count());
    court.tested(S5, steps.iter().filter(|s| s.kind == Kind::Renew).count());
    court.tested(S3, steps.iter().filter(|s| matches!(s.kind, Kind::Release | Kind::Over)).count());
    steps.sort_by_key(|s| (s.fence, s.owner, s.kind, s.inv));
    sweep(court, key, &steps);
    after_the_end(court, key);
    waiters_in_order(court, key);
}

fn steps(court: &Court<'_>, key: usize) -> Vec<Step> {
    let index = &court.index;
    let view = court.key(key);
    let mut steps = Vec::with_capacity(view.ops.len());
    let owner_of = |fence: i64, owner: Option<OwnerDigest>| {
        // Only told apart where two grants share a fence.
        owner.or_else(|| view.grants.iter().find(|g| g.fence == fence).and_then(|g| g.owner))
    };
    for &number in &view.ops {
        let op = &index.ops[number];
        let Some(&invoked) = op.invokes.first() else { continue };
        let step = |fence, owner, kind, answered: usize| Step {
            fence,
            owner,
            kind,
            inv: op.inv,
            ok: index.ts(answered),
            invoked,
            answered,
        };
        match op.call {
            Some(Call::Acquire { owner, .. }) => {
                let mut grants = op.done.iter().filter_map(|&e| Some((e, index.granted(e)?)));
                let Some((first, answer)) = grants.next() else { continue };
                let Some(fence) = answer.fence else { continue };
                let owner = answer.owner.or(Some(*owner));
                steps.push(step(fence.get(), owner, Kind::Grant, first));
                // A recovery that finds the lease live shows the same as a renewal.
                for (again, answer) in grants {
                    let Some(&asked) = op.invokes.iter().rev().find(|&&i| i < again) else { continue };
                    if answer.fence == Some(fence) && asked != invoked {
                        let inv = index.ts(asked);
                        steps.push(Step {
                            inv,
                            invoked: asked,
                            ..step(fence.get(), owner, Kind::Renew, again)
                        });
                    }
                }
            }
            Some(Call::Break { .. }) => {
                // A break takes a fence of its own, above the broken one and below the next.
                if let Some((_, event, answer)) = index.first_ok(number)
                    && let Some(fence) = answer.fence
                {
                    steps.push(step(fence.get(), None, Kind::Grant, event));
                }
            }
            Some(Call::Renew { fence, owner, .. }) => {
                let owner = owner_of(fence.get(), *owner);
                let Some(&end) = op.done.first() else { continue };
                match &index.events[end].what {
                    What::Ok { .. } => steps.push(step(fence.get(), owner, Kind::Renew, end)),
                    What::Fail { why: Why::Lost | Why::NotHeld } => {
                        steps.push(step(fence.get(), owner, Kind::Over, end));
                    }
                    _ => {}
                }
            }
            Some(Call::Release { fence, owner }) => {
                let owner = owner_of(fence.get(), *owner);
                // A release that was asked again ended the lease once, whichever request did it.
                let mut released = false;
                for &end in &op.done {
                    match &index.events[end].what {
                        What::Ok { answer } if answer.released != Some(false) => {
                            if !released {
                                steps.push(step(fence.get(), owner, Kind::Release, end));
                            }
                            released = true;
                        }
                        What::Ok { .. } | What::Fail { why: Why::Lost | Why::NotHeld } => {
                            steps.push(step(fence.get(), owner, Kind::Over, end));
                        }
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    steps
}

/// Walks from the highest fence down. `steps` is sorted by fence, owner, kind.
fn sweep(court: &mut Court<'_>, key: usize, steps: &[Step]) {
    // The earliest answer among all higher fences: nothing of a lower fence may be invoked after it.
    let mut above: Option<Step> = None;
    for fence in steps.chunk_by(|a, b| a.fence == b.fence).rev() {
        shared_fence(court, key, fence);
        for tenure in fence.chunk_by(|a, b| a.owner == b.owner) {
            within(court, key, tenure);
        }
        for step in fence.iter().filter(|s| s.kind != Kind::Over) {
            if let Some(later) = above
                && later.ok < step.inv
            {
                accuse(court, key, *step, later);
            }
        }
        let earliest = fence.iter().filter(|s| s.kind != Kind::Over).min_by_key(|s| s.ok).copied();
        above = match (above, earliest) {
            (Some(a), Some(b)) => Some(if b.ok < a.ok { b } else { a }),
            (a, b) => a.or(b),
        };
    }
}

/// Judges a step of a lower fence that was invoked after a step of a higher one had been answered.
fn accuse(court: &mut Court<'_>, key: usize, low: Step, high: Step) {
    let (by, other) = (client(court, low.invoked), client(court, high.answered));
    let (began, known) = (court.index.at(low.inv), court.index.at(high.ok));
    let (f, g) = (low.fence, high.fence);
    let (property, says) = match low.kind {
        Kind::Grant => (
            S1,
            format!(
                "{by} began to acquire at {began} and got fence {f}, though {other} already had fence {g} at {known}"
            ),
        ),
        Kind::Renew => (
            S5,
            format!(
                "{by} asked at {began} and was told that fence {f} still holds, though {other} already had fence {g} \
                 at {known}"
            ),
        ),
        Kind::Release | Kind::Over => (
            S3,
            format!(
                "{by} released fence {f} at {began} and the store ended a lease for it, though {other} already had \
                 fence {g} at {known}: whose lease was that"
            ),
        ),
    };
    court.violation(property, key, says, &[high.answered, low.invoked, low.answered]);
}

fn shared_fence(court: &mut Court<'_>, key: usize, fence: &[Step]) {
    let mut first: Option<Step> = None;
    for step in fence.iter().filter(|s| s.kind == Kind::Grant) {
        if let Some(first) = first {
            let (a, b) = (client(court, first.answered), client(court, step.answered));
            let says =
                format!("fence {} was granted twice, to {a} and to {b}: it orders nothing", step.fence);
            court.violation(S1, key, says, &[first.answered, step.answered]);
        }
        first = first.or(Some(*step));
    }
}

/// Judges one tenure by itself: grant, renewals, release, and nothing after.
fn within(court: &mut Court<'_>, key: usize, tenure: &[Step]) {
    let earliest = |kind: Kind| tenure.iter().filter(|s| s.kind == kind).min_by_key(|s| s.ok).copied();
    let (release, over) = (earliest(Kind::Release), earliest(Kind::Over));
    let mut releases = 0;
    for step in tenure {
        let (by, began) = (client(court, step.invoked), court.index.at(step.inv));
        let f = step.fence;
        match step.kind {
            Kind::Grant => {
                let own = tenure.iter().filter(|s| s.kind != Kind::Grant).min_by_key(|s| s.ok).copied();
                if let Some(own) = own.filter(|own| own.ok < step.inv) {
                    let says = format!(
                        "fence {f} was used and answered at {} before {by} asked for it at {began}",
                        court.index.at(own.ok)
                    );
                    court.violation(S16, key, says, &[own.answered, step.invoked]);
                }
            }
            Kind::Renew => {
                if let Some(end) = release.filter(|end| end.ok < step.inv) {
                    let says = format!(
                        "{by} asked at {began} and was told that fence {f} still holds, though it had been released by {}",
                        court.index.at(end.ok)
                    );
                    court.violation(S6, key, says, &[end.answered, step.invoked, step.answered]);
                } else if let Some(end) = over.filter(|end| end.ok < step.inv) {
                    let says = format!(
                        "{by} asked at {began} and was told that fence {f} still holds, though the store had said at {} that it is over",
                        court.index.at(end.ok)
                    );
                    court.violation(S6, key, says, &[end.answered, step.invoked, step.answered]);
                }
            }
            Kind::Release => {
                releases += 1;
                if releases > 1 {
                    let says = format!("{by} ended fence {f} at {began} a second time");
                    court.violation(S6, key, says, &[step.invoked, step.answered]);
                } else if let Some(end) = over.filter(|end| end.ok < step.inv) {
                    let says = format!(
                        "{by} ended fence {f} at {began}, though the store had said at {} that it is over",
                        court.index.at(end.ok)
                    );
                    court.violation(S6, key, says, &[end.answered, step.invoked, step.answered]);
                }
            }
            Kind::Over => {}
        }
    }
    let granted = tenure.iter().any(|s| s.kind == Kind::Grant);
    let used = tenure.iter().find(|s| matches!(s.kind, Kind::Renew | Kind::Release));
    if let Some(used) = used.filter(|_| !granted && court.rules.closed_world) {
        let by = client(court, used.invoked);
        let says = format!("{by} renewed or released fence {}, which nobody was granted", used.fence);
        court.violation(S16, key, says, &[used.invoked, used.answered]);
    }
    court.tested(S6, tenure.iter().filter(|s| s.kind != Kind::Grant).count());
}

/// S6 beyond the store's own word: after the application was told of a loss, and after a probe showed that the
/// lease was gone.
fn after_the_end(court: &mut Court<'_>, key: usize) {
    let mut found: Vec<(String, Vec<usize>)> = Vec::new();
    let view = court.key(key);
    let index = &court.index;
    let probes = probes_by_time(court, key);
    for grant in &view.grants {
        if grant.renews.is_empty() {
            continue;
        }
        let lost = grant.losses.iter().copied().min_by_key(|&e| index.ts(e));
        // The first probe that began after the grant was known and shows somebody else, or nobody.
        let first = probes.partition_point(|p| p.0 <= grant.ok);
        let gone = probes[first..].iter().find(|p| p.2 != grant.owner);
        for &renew in &grant.renews {
            let op = &index.ops[renew];
            let Some((ok, event, _)) = index.first_ok(renew) else { continue };
            let by = who(&index.events[event]);
            if let Some(lost) = lost
                && index.ts(lost) < ok
            {
                let says = format!(
                    "{by} was told at {} that fence {} is lost, and at {} that it was renewed",
                    index.at(index.ts(lost)),
                    grant.fence,
                    index.at(ok)
                );
                found.push((says, vec![lost, event]));
            }
            if let Some(&(_, seen, _, probe)) = gone
                && seen < op.inv
            {
                let says = format!(
                    "{by} renewed fence {} at {}, though a look at the store had shown at {} that it is gone",
                    grant.fence,
                    index.at(op.inv),
                    index.at(seen)
                );
                found.push((says, vec![probe, event]));
            }
        }
    }
    for (says, events) in found {
        court.violation(S6, key, says, &events);
    }
}

/// Returns since, until, owner and event of the probes that looked for the holder, by the moment they began.
fn probes_by_time(court: &Court<'_>, key: usize) -> Vec<(u64, u64, Option<OwnerDigest>, usize)> {
    let view = court.key(key);
    let mut probes: Vec<_> = view
        .probes
        .iter()
        .filter_map(|&event| match &court.index.events[event].what {
            What::Probe { since, holder: Some(holder), .. } => {
                Some((since.as_nanos(), court.index.ts(event), holder.owner(), event))
            }
            _ => None,
        })
        .collect();
    probes.sort_by_key(|p| (p.0, p.1));
    probes
}

/// S1q: a waiter that was granted after another holding ended. Its acquire overlaps that holding, so the sweep
/// cannot order the two. But its lease was still good when the answer came; had it been granted first, the other
/// could not have been granted meanwhile.
fn waiters_in_order(court: &mut Court<'_>, key: usize) {
    let property: Property = S1q;
    if !court.wants(property) {
        return;
    }
    let mut found: Vec<(String, Vec<usize>)> = Vec::new();
    let mut tested = 0;
    let view = court.key(key);
    let index = &court.index;
    let mut ends: Vec<(u64, usize)> =
        view.grants.iter().enumerate().map(|(at, g)| (belief::end(index, g), at)).collect();
    ends.sort_unstable();
    let mut ended = ends.into_iter().peekable();
    let mut highest: Option<usize> = None;
    for grant in &view.grants {
        while let Some((_, other)) = ended.next_if(|(end, _)| *end <= grant.ok) {
            if highest.is_none_or(|h| view.grants[h].fence < view.grants[other].fence) {
                highest = Some(other);
            }
        }
        let Some(other) = highest.map(|h| &view.grants[h]) else { continue };
        if other.ok >= grant.ok || other.ok < grant.inv {
            // The sweep judges what does not overlap.
            continue;
        }
        tested += 1;
        let still_good = grant.deadline.unwrap_or(0).min(belief::stop(index, grant)) > grant.ok;
        if other.fence > grant.fence && still_good && !index.store_may_forget(view.name, grant.ok) {
            let says = format!(
                "{} waited while {} held fence {}, and then got fence {} at {}: a later grant with a lower fence",
                who(&index.events[grant.ok_event]),
                who(&index.events[other.ok_event]),
                other.fence,
                grant.fence,
                index.at(grant.ok),
            );
            found.push((says, vec![other.ok_event, grant.ok_event]));
        }
    }
    court.tested(property, tested);
    for (says, events) in found {
        court.violation(property, key, says, &events);
    }
}

fn client(court: &Court<'_>, event: usize) -> String {
    who(&court.index.events[event]).to_owned()
}
