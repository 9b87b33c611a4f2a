//! A brute-force search for a legal order, to keep the fast checks honest: exponential, for small histories only.
//!
//! The model is a mutex with fences whose leases may expire at any moment. A call that is known to have had its
//! effect must find a point between its invocation and its answer; a call without an answer may find one or not.
//! A plain mutex would be the wrong model: with expiry it calls legal takeovers violations.
//!
//! # Source
//! J. Wing, C. Gong, "Testing and verifying concurrent objects" (1993); G. Lowe, "Testing for linearizability"
//! (2017) for the memo of states.

use std::collections::{HashMap, HashSet};

use super::{Answer, Call, History, What, Why};

/// What the search found for one name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// A legal order exists.
    Legal,
    /// None exists.
    Illegal,
    /// The budget was used up.
    Inconclusive,
}

/// How far a search goes.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Budget {
    /// Calls that overlap without a quiet moment between them; at most 64.
    pub calls: usize,
    /// States.
    pub states: usize,
}

impl Default for Budget {
    fn default() -> Self {
        Self { calls: 60, states: 2_000_000 }
    }
}

/// Searches a legal order for one name of a history.
///
/// Only acquires, renewals, releases and refusals count; breaks are not in the model.
pub fn search(history: &History, key: &str, budget: Budget) -> Found {
    let mut calls = calls(history, key);
    calls.sort_by_key(|c| (c.inv, c.ok));
    let mut states: HashSet<State> = HashSet::from([State { highest: 0, holder: Holder::Nobody }]);
    let mut left = budget.states;
    let mut rest = calls.as_slice();
    while !rest.is_empty() {
        // Cut where everything has been answered: what comes before is over before what comes after.
        let mut until = rest[0].ok;
        let cut = rest.iter().position(|c| {
            let quiet = c.inv > until;
            until = until.max(c.ok);
            quiet
        });
        let (part, later) = rest.split_at(cut.unwrap_or(rest.len()));
        if part.len() > budget.calls.min(64) {
            return Found::Inconclusive;
        }
        let mut ends = HashSet::new();
        let mut seen = HashSet::new();
        for &state in &states {
            if !explore(part, 0, state, &mut seen, &mut ends, &mut left) {
                return Found::Inconclusive;
            }
        }
        if ends.is_empty() {
            return Found::Illegal;
        }
        states = ends;
        rest = later;
    }
    Found::Legal
}

/// One call, as the model sees it.
#[derive(Clone, Copy, Debug)]
struct Timed {
    inv: u64,
    /// The end of time for a call without an answer.
    ok: u64,
    does: Does,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Does {
    /// A grant of this fence.
    Grant(i64),
    /// A grant that nobody saw: it may have happened, under a fence between two others.
    MaybeGrant,
    /// A confirmed renewal.
    Renew(i64),
    /// A release that ended the lease.
    Release(i64),
    /// A release that may have ended it.
    MaybeRelease(i64),
    /// The store said that this lease is over.
    Over(i64),
    /// Somebody holds.
    Held,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Holder {
    Nobody,
    Fence(i64),
    /// The holder of a grant that nobody saw.
    Unseen,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct State {
    highest: i64,
    holder: Holder,
}

impl State {
    /// Applies one call; `None` where it cannot happen here. Expiry needs no step of its own: it matters only where
    /// a call says that a lease is over, or where the next is granted.
    fn apply(self, does: Does) -> Option<Self> {
        let freed = Self { holder: Holder::Nobody, ..self };
        match does {
            Does::Grant(fence) if fence > self.highest => {
                Some(Self { highest: fence, holder: Holder::Fence(fence) })
            }
            Does::MaybeGrant => Some(Self { holder: Holder::Unseen, ..self }),
            Does::Renew(fence) if self.holder == Holder::Fence(fence) => Some(self),
            Does::Release(fence) if self.holder == Holder::Fence(fence) => Some(freed),
            Does::MaybeRelease(fence) if self.holder == Holder::Fence(fence) => Some(freed),
            Does::Over(fence) if self.holder == Holder::Fence(fence) => Some(freed),
            Does::Over(_) => Some(self),
            Does::Held if self.holder != Holder::Nobody => Some(self),
            _ => None,
        }
    }
}

/// Visits all orders of the calls that are not in `done`. Returns false when the budget is used up.
fn explore(
    calls: &[Timed],
    done: u64,
    state: State,
    seen: &mut HashSet<(u64, State)>,
    ends: &mut HashSet<State>,
    left: &mut usize,
) -> bool {
    let mut stack = vec![(done, state)];
    while let Some((done, state)) = stack.pop() {
        if !seen.insert((done, state)) {
            continue;
        }
        let Some(less) = left.checked_sub(1) else { return false };
        *left = less;
        let open = || calls.iter().enumerate().filter(move |(at, _)| done & 1 << at == 0);
        if open().all(|(_, c)| c.does.is_optional()) {
            ends.insert(state);
        }
        // A grant that is left behind by a higher fence will not find its point any more.
        if open().any(|(_, c)| matches!(c.does, Does::Grant(fence) if fence <= state.highest)) {
            continue;
        }
        // A call may come next unless another had been answered before it was invoked.
        let first_answer = open().map(|(_, c)| c.ok).min().unwrap_or(u64::MAX);
        for (at, call) in open() {
            if call.inv <= first_answer
                && let Some(next) = state.apply(call.does)
            {
                stack.push((done | 1 << at, next));
            }
        }
    }
    true
}

impl Does {
    fn is_optional(self) -> bool {
        matches!(self, Self::MaybeGrant | Self::MaybeRelease(_))
    }
}

/// Reads the calls of one name, on its own and not through the index that the fast checks use.
fn calls(history: &History, key: &str) -> Vec<Timed> {
    #[derive(Default)]
    struct Raw<'h> {
        call: Option<&'h Call>,
        inv: u64,
        end: Option<(u64, &'h What)>,
    }
    let mut raw: HashMap<&str, Raw<'_>> = HashMap::new();
    for event in history.events.iter().filter(|e| e.key == key) {
        let ts = event.ts.as_nanos();
        match &event.what {
            What::Invoke { call: Call::Cancel } => {}
            What::Invoke { call } => {
                let entry = raw.entry(&event.op).or_default();
                if entry.call.is_none() {
                    (entry.call, entry.inv) = (Some(call), ts);
                }
            }
            what @ (What::Ok { .. } | What::Fail { .. } | What::Unknown { .. }) => {
                let entry = raw.entry(&event.op).or_default();
                // A recovery says more than the answer that never came.
                if !matches!(entry.end, Some((_, What::Ok { .. } | What::Fail { .. }))) {
                    entry.end = Some((ts, what));
                }
            }
            _ => {}
        }
    }
    let timed = raw.into_values().filter_map(|raw| {
        let (does, ok) = match (raw.call?, raw.end) {
            (Call::Acquire { .. }, Some((ok, What::Ok { answer }))) => (Does::Grant(answer.fence?.get()), ok),
            (Call::Acquire { .. }, Some((ok, What::Fail { why: Why::Held }))) => (Does::Held, ok),
            (Call::Acquire { .. }, Some((_, What::Fail { .. }))) => return None,
            (Call::Acquire { .. }, _) => (Does::MaybeGrant, u64::MAX),
            (Call::Renew { fence, .. }, Some((ok, What::Ok { .. }))) => (Does::Renew(fence.get()), ok),
            (Call::Release { fence, .. }, Some((ok, What::Ok { answer })))
                if *answer != (Answer { released: Some(false), ..Answer::default() }) =>
            {
                (Does::Release(fence.get()), ok)
            }
            (Call::Release { fence, .. }, Some((ok, What::Ok { .. }))) => (Does::Over(fence.get()), ok),
            (
                Call::Renew { fence, .. } | Call::Release { fence, .. },
                Some((ok, What::Fail { why: Why::Lost | Why::NotHeld })),
            ) => (Does::Over(fence.get()), ok),
            (Call::Release { .. }, Some((_, What::Fail { .. }))) => return None,
            (Call::Release { fence, .. }, _) => (Does::MaybeRelease(fence.get()), u64::MAX),
            _ => return None,
        };
        Some(Timed { inv: raw.inv, ok, does })
    });
    timed.collect()
}
