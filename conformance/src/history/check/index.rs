//! A history sorted into calls, grants, faults and names: what every validator reads.

use std::collections::{BTreeMap, HashMap};

use lockcore::{OwnerDigest, Stamp};

use crate::history::{Answer, Call, Event, FaultClass, History, Phase, What, wire::nanos};

/// One logical operation, with all its transmissions and outcomes. Event numbers index [`Index::events`].
#[derive(Debug)]
pub(in crate::history) struct Op<'h> {
    pub(in crate::history) client: usize,
    /// What was asked first; `None` for an answer without a question.
    pub(in crate::history) call: Option<&'h Call>,
    pub(in crate::history) invokes: Vec<usize>,
    pub(in crate::history) sents: Vec<usize>,
    pub(in crate::history) done: Vec<usize>,
    pub(in crate::history) cancels: Vec<usize>,
    pub(in crate::history) queued: Option<u64>,
    /// The first invocation.
    pub(in crate::history) inv: u64,
    /// The last event; the end of time for an operation that is still open.
    pub(in crate::history) last: u64,
}

impl Op<'_> {
    pub(in crate::history) fn is_renew(&self) -> bool {
        matches!(self.call, Some(Call::Renew { .. }))
    }

    pub(in crate::history) fn is_acquire(&self) -> bool {
        matches!(self.call, Some(Call::Acquire { .. }))
    }
}

/// A grant: the first `ok` of an acquire, and everything about its lease.
#[derive(Debug)]
pub(in crate::history) struct Grant {
    pub(in crate::history) op: usize,
    pub(in crate::history) fence: i64,
    pub(in crate::history) owner: Option<OwnerDigest>,
    pub(in crate::history) client: usize,
    pub(in crate::history) inv: u64,
    pub(in crate::history) ok: u64,
    pub(in crate::history) ok_event: usize,
    pub(in crate::history) deadline: Option<u64>,
    /// What the server granted, or else what was asked.
    pub(in crate::history) ttl: u64,
    pub(in crate::history) renews: Vec<usize>,
    pub(in crate::history) releases: Vec<usize>,
    pub(in crate::history) checks: Vec<usize>,
    /// Losses that were told, without those on purpose.
    pub(in crate::history) losses: Vec<usize>,
    /// Endings on purpose that were told.
    pub(in crate::history) endings: Vec<usize>,
}

impl Grant {
    pub(in crate::history) fn is(&self, fence: i64, owner: Option<OwnerDigest>) -> bool {
        self.fence == fence && (owner.is_none() || self.owner.is_none() || self.owner == owner)
    }
}

/// One name's part of the history.
#[derive(Debug, Default)]
pub(in crate::history) struct KeyView<'h> {
    pub(in crate::history) name: &'h str,
    pub(in crate::history) ops: Vec<usize>,
    /// In the order of their `ok`.
    pub(in crate::history) grants: Vec<Grant>,
    pub(in crate::history) resources: Vec<usize>,
    pub(in crate::history) probes: Vec<usize>,
}

/// A fault from beginning to end.
#[derive(Debug)]
pub(in crate::history) struct FaultSpan<'h> {
    pub(in crate::history) name: &'h str,
    pub(in crate::history) target: &'h str,
    pub(in crate::history) key: &'h str,
    pub(in crate::history) class: FaultClass,
    pub(in crate::history) begin: u64,
    /// The end of time for a fault that lasts.
    pub(in crate::history) end: u64,
    pub(in crate::history) event: usize,
}

impl FaultSpan<'_> {
    pub(in crate::history) fn words(&self) -> String {
        match self.target {
            "" => self.name.to_owned(),
            target => format!("{} of {target}", self.name),
        }
    }
}

/// One client of one process.
#[derive(Debug)]
pub(in crate::history) struct Client<'h> {
    pub(in crate::history) name: &'h str,
    pub(in crate::history) pid: u32,
    pub(in crate::history) last: u64,
    /// When it had closed, and by which event.
    pub(in crate::history) closed: Option<(u64, usize)>,
}

/// The whole history, sorted.
#[derive(Debug)]
pub(in crate::history) struct Index<'h> {
    pub(in crate::history) history: &'h History,
    pub(in crate::history) events: &'h [Event],
    pub(in crate::history) start: u64,
    pub(in crate::history) end: u64,
    pub(in crate::history) ops: Vec<Op<'h>>,
    pub(in crate::history) op_names: Vec<&'h str>,
    pub(in crate::history) clients: Vec<Client<'h>>,
    pub(in crate::history) keys: Vec<KeyView<'h>>,
    pub(in crate::history) faults: Vec<FaultSpan<'h>>,
    pub(in crate::history) missed: u64,
    /// Begin and end, in the order of their ends.
    stalls: Vec<(u64, u64)>,
    /// When the last fault was over; the end of time while one lasts.
    pub(in crate::history) healed: u64,
}

pub(in crate::history) const NEVER: u64 = u64::MAX;

impl<'h> Index<'h> {
    pub(in crate::history) fn new(history: &'h History) -> Self {
        let events = &history.events;
        let mut index = Self {
            history,
            events,
            start: history.start().as_nanos(),
            end: events.last().map_or(0, |e| e.ts.as_nanos()),
            ops: Vec::new(),
            op_names: Vec::new(),
            clients: Vec::new(),
            keys: Vec::new(),
            faults: Vec::new(),
            missed: 0,
            stalls: Vec::new(),
            healed: 0,
        };
        let mut by_name: BTreeMap<&str, KeyView<'h>> = BTreeMap::new();
        let mut ops: HashMap<&str, usize> = HashMap::new();
        let mut clients: HashMap<(u32, &str), usize> = HashMap::new();
        let mut leases: Vec<usize> = Vec::new();

        for (at, event) in events.iter().enumerate() {
            let ts = event.ts.as_nanos();
            let client = *clients.entry((event.pid, &event.client)).or_insert_with(|| {
                let (name, pid) = (event.client.as_str(), event.pid);
                index.clients.push(Client { name, pid, last: ts, closed: None });
                index.clients.len() - 1
            });
            // What the test bench says about a client, or a stall, is no sign of the client's life.
            if !matches!(event.what, What::Fault { .. } | What::Note { .. } | What::Missed { .. }) {
                index.clients[client].last = ts;
            }
            if !event.key.is_empty() {
                by_name
                    .entry(&event.key)
                    .or_insert_with(|| KeyView { name: &event.key, ..KeyView::default() });
            }
            match &event.what {
                What::Invoke { .. } | What::Sent { .. } | What::Queued => {}
                What::Ok { .. } | What::Fail { .. } | What::Unknown { .. } => {}
                What::Lost { .. } => leases.push(at),
                What::Resource { .. } => {
                    by_name.entry(&event.key).or_default().resources.push(at);
                    continue;
                }
                What::Probe { .. } => {
                    by_name.entry(&event.key).or_default().probes.push(at);
                    continue;
                }
                What::Fault { .. } => {
                    index.fault(at, event);
                    continue;
                }
                What::Stall { ns } => {
                    index.stalls.push((ts.saturating_sub(nanos(*ns)), ts));
                    continue;
                }
                What::Missed { count } => {
                    index.missed += count;
                    continue;
                }
                What::Note { .. } => continue,
            }
            if matches!(event.what, What::Lost { .. }) {
                continue;
            }
            let number = *ops.entry(&event.op).or_insert_with(|| {
                index.ops.push(Op {
                    client,
                    call: None,
                    invokes: Vec::new(),
                    sents: Vec::new(),
                    done: Vec::new(),
                    cancels: Vec::new(),
                    queued: None,
                    inv: ts,
                    last: ts,
                });
                index.op_names.push(&event.op);
                if !event.key.is_empty() {
                    by_name.entry(&event.key).or_default().ops.push(index.ops.len() - 1);
                }
                index.ops.len() - 1
            });
            let op = &mut index.ops[number];
            op.last = ts;
            match &event.what {
                What::Invoke { call: Call::Cancel } => op.cancels.push(at),
                What::Invoke { call } => {
                    op.invokes.push(at);
                    op.call.get_or_insert(call);
                }
                What::Sent { .. } => op.sents.push(at),
                What::Queued => op.queued = op.queued.or(Some(ts)),
                _ => {
                    op.done.push(at);
                    if matches!(event.what, What::Ok { .. }) && op.call == Some(&Call::Close) {
                        index.clients[client].closed.get_or_insert((ts, at));
                    }
                }
            }
        }
        for op in &mut index.ops {
            if op.done.len() + op.cancels.len() < op.invokes.len() {
                op.last = NEVER;
            }
        }
        index.keys = by_name.into_values().collect();
        for key in 0..index.keys.len() {
            index.find_grants(key);
        }
        index.attach_losses(&leases);
        index.healed = index.faults.iter().map(|f| f.end).max().unwrap_or(0);
        index.stalls.sort_by_key(|s| s.1);
        index
    }

    fn fault(&mut self, at: usize, event: &'h Event) {
        let What::Fault { name, target, phase, class, .. } = &event.what else { return };
        let ts = event.ts.as_nanos();
        match phase {
            Phase::Begin => self.faults.push(FaultSpan {
                name,
                target,
                key: &event.key,
                class: *class,
                begin: ts,
                end: NEVER,
                event: at,
            }),
            Phase::End => {
                let open =
                    self.faults.iter_mut().rev().find(|f| {
                        f.end == NEVER && f.name == name && f.target == target && f.key == event.key
                    });
                if let Some(open) = open {
                    open.end = ts;
                }
            }
        }
    }

    fn find_grants(&mut self, key: usize) {
        let mut grants = Vec::new();
        let ops = &self.keys[key].ops;
        for &number in ops {
            let op = &self.ops[number];
            let Some(Call::Acquire { owner, ttl, .. }) = op.call else { continue };
            let first = op.done.iter().copied().find(|&e| self.granted(e).is_some());
            let Some((event, answer)) = first.and_then(|e| Some((e, self.granted(e)?))) else { continue };
            let Some(fence) = answer.fence else { continue };
            grants.push(Grant {
                op: number,
                fence: fence.get(),
                owner: answer.owner.or(Some(*owner)),
                client: op.client,
                inv: op.inv,
                ok: self.ts(event),
                ok_event: event,
                deadline: answer.deadline.map(|m| m.as_nanos()),
                ttl: nanos(answer.ttl_eff.unwrap_or(*ttl).min(*ttl)),
                renews: Vec::new(),
                releases: Vec::new(),
                checks: Vec::new(),
                losses: Vec::new(),
                endings: Vec::new(),
            });
        }
        grants.sort_by_key(|g| (g.ok, g.fence));
        let by_fence = by_fence(&grants);
        for &number in ops {
            let op = &self.ops[number];
            let (fence, owner) = match op.call {
                Some(
                    Call::Renew { fence, owner, .. }
                    | Call::Release { fence, owner }
                    | Call::Check { fence, owner },
                ) => (fence.get(), *owner),
                _ => continue,
            };
            let Some(grant) = find(&by_fence, &grants, fence, owner) else { continue };
            match op.call {
                Some(Call::Renew { .. }) => grants[grant].renews.push(number),
                Some(Call::Release { .. }) => grants[grant].releases.push(number),
                _ => grants[grant].checks.push(number),
            }
        }
        self.keys[key].grants = grants;
    }

    fn attach_losses(&mut self, losses: &[usize]) {
        let names: HashMap<&str, usize> = self.keys.iter().enumerate().map(|(i, k)| (k.name, i)).collect();
        let mut by_key: HashMap<usize, HashMap<i64, Vec<usize>>> = HashMap::new();
        for &at in losses {
            let What::Lost { fence, owner, why } = &self.events[at].what else { continue };
            let Some(&key) = names.get(self.events[at].key.as_str()) else { continue };
            let by_fence = by_key.entry(key).or_insert_with(|| by_fence(&self.keys[key].grants));
            if let Some(grant) = find(by_fence, &self.keys[key].grants, fence.get(), *owner) {
                let grant = &mut self.keys[key].grants[grant];
                if why.on_purpose() { grant.endings.push(at) } else { grant.losses.push(at) }
            }
        }
    }

    /// Returns the answer of an event that grants a lease.
    pub(in crate::history) fn granted(&self, event: usize) -> Option<&'h Answer> {
        self.ok(event).filter(|answer| answer.fence.is_some())
    }

    /// Returns the answer of an `ok`.
    pub(in crate::history) fn ok(&self, event: usize) -> Option<&'h Answer> {
        match &self.events[event].what {
            What::Ok { answer } => Some(answer),
            _ => None,
        }
    }

    /// Returns the first `ok` of an operation: when, by which event, with what.
    pub(in crate::history) fn first_ok(&self, op: usize) -> Option<(u64, usize, &'h Answer)> {
        let event = *self.ops[op].done.iter().find(|&&e| self.ok(e).is_some())?;
        Some((self.ts(event), event, self.ok(event)?))
    }

    pub(in crate::history) fn ts(&self, event: usize) -> u64 {
        self.events[event].ts.as_nanos()
    }

    /// Writes a moment as people read it: from the start of the history.
    pub(in crate::history) fn at(&self, ts: u64) -> String {
        at(self.start, ts)
    }

    /// Says whether a process stalled for `least` somewhere between the two.
    pub(in crate::history) fn stalled(&self, from: u64, to: u64, least: u64) -> bool {
        let first = self.stalls.partition_point(|s| s.1 < from);
        self.stalls[first..].iter().any(|s| s.0 <= to && s.1 - s.0 > least)
    }

    /// Says whether a client could not run between the two: it was paused or killed.
    pub(in crate::history) fn paused(&self, client: usize, from: u64, to: u64) -> bool {
        self.faults.iter().any(|f| f.begin <= to && f.end >= from && self.hits(f, client))
    }

    /// Returns the end of the last pause of a client that began by `by`.
    pub(in crate::history) fn resumed(&self, client: usize, from: u64, by: u64) -> u64 {
        let pauses = self.faults.iter().filter(|f| f.begin <= by && f.end >= from && self.hits(f, client));
        pauses.map(|f| f.end).fold(from, u64::max)
    }

    fn hits(&self, fault: &FaultSpan<'_>, client: usize) -> bool {
        let client = &self.clients[client];
        fault.target == client.name && !client.name.is_empty()
            || fault.target.strip_prefix("pid ").is_some_and(|p| p.parse() == Ok(client.pid))
    }

    /// Returns a fault under which the store itself may have dropped a live lease of this name by `by`.
    pub(in crate::history) fn store_may_forget(&self, key: &str, by: u64) -> bool {
        self.faults
            .iter()
            .any(|f| f.class.can_end_a_live_lease() && f.begin <= by && (f.key.is_empty() || f.key == key))
    }

    /// Says whether any fault had begun by then.
    pub(in crate::history) fn faulty(&self, by: u64) -> bool {
        self.faults.iter().any(|f| f.begin <= by)
    }
}

fn by_fence(grants: &[Grant]) -> HashMap<i64, Vec<usize>> {
    let mut map: HashMap<i64, Vec<usize>> = HashMap::new();
    for (at, grant) in grants.iter().enumerate() {
        map.entry(grant.fence).or_default().push(at);
    }
    map
}

fn find(
    by_fence: &HashMap<i64, Vec<usize>>,
    grants: &[Grant],
    fence: i64,
    owner: Option<OwnerDigest>,
) -> Option<usize> {
    by_fence.get(&fence)?.iter().copied().find(|&g| grants[g].is(fence, owner))
}

/// Writes a moment from `start` on, to the microsecond.
pub(in crate::history) fn at(start: u64, ts: u64) -> String {
    if ts == NEVER {
        return "the end of time".into();
    }
    let (sign, span) = if ts >= start { ('+', ts - start) } else { ('-', start - ts) };
    format!("{sign}{}.{:06} s", span / 1_000_000_000, span % 1_000_000_000 / 1000)
}

/// Writes a span as people read it.
pub(in crate::history) fn span(ns: u64) -> String {
    match ns {
        0..1_000 => format!("{ns} ns"),
        1_000..1_000_000 => format!("{:.1} µs", ns as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} ms", ns as f64 / 1e6),
        _ => format!("{:.3} s", ns as f64 / 1e9),
    }
}

/// Joins fence and owner, where both are known.
pub(in crate::history) fn stamp_of(answer: &Answer) -> Option<Stamp> {
    Some(Stamp::new(answer.fence?, answer.owner?))
}
