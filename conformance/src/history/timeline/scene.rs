//! What there is to draw, before it has a form: lanes, spans and rows of one lock.

use std::collections::{BTreeMap, HashMap};

use crate::history::{
    Access, Answer, Call, Event, History, Phase, Property, Report, Verdict, What,
    check::{
        belief,
        index::{Grant, Index, NEVER, at, span},
    },
};

/// A client or a resource.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Lane {
    pub(super) name: String,
    pub(super) is_resource: bool,
}

/// What a row is about, for its mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    Asks,
    Granted,
    Renewed,
    Released,
    DeadlinePassed,
    Lost,
    Failed,
    Unknown,
    GaveUp,
    Accepted,
    Duplicate,
    Stale,
    Fault,
    Probe,
    Other,
}

/// One thing to tell.
#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) ts: u64,
    /// `None`: it concerns nobody alone.
    pub(super) lane: Option<usize>,
    pub(super) mark: Mark,
    pub(super) words: String,
    /// Numbers of the findings that it is evidence of.
    pub(super) shows: Vec<usize>,
}

/// A span in a lane.
#[derive(Clone, Debug)]
pub(super) struct Span {
    pub(super) lane: usize,
    pub(super) from: u64,
    pub(super) to: u64,
}

/// A span in which a client believed.
#[derive(Clone, Debug)]
pub(super) struct Held {
    pub(super) span: Span,
    pub(super) fence: i64,
}

/// A fault, or a stall.
#[derive(Clone, Debug)]
pub(super) struct Trouble {
    pub(super) name: String,
    pub(super) from: u64,
    pub(super) to: u64,
}

/// One lock's part of a history.
#[derive(Clone, Debug)]
pub(super) struct Scene {
    pub(super) key: String,
    pub(super) start: u64,
    /// When the recording ends.
    pub(super) end: u64,
    pub(super) lanes: Vec<Lane>,
    pub(super) held: Vec<Held>,
    pub(super) pending: Vec<Span>,
    pub(super) troubles: Vec<Trouble>,
    pub(super) rows: Vec<Row>,
    /// Property, title and sentence of what was found on this lock.
    pub(super) findings: Vec<(Property, String)>,
}

impl Scene {
    pub(super) fn new(history: &History, report: Option<&Report>, key: &str) -> Self {
        let index = Index::new(history);
        let mut lanes: BTreeMap<(bool, u32, String), usize> = BTreeMap::new();
        let mut names: Vec<Lane> = Vec::new();
        let of_key = |e: &Event| e.key == key;
        for event in history.events.iter().filter(|e| of_key(e)) {
            let Some((is_resource, pid, name)) = lane_of(event) else { continue };
            lanes.entry((is_resource, pid, name.clone())).or_insert_with(|| {
                names.push(Lane { name, is_resource });
                names.len() - 1
            });
        }
        // Clients first, in the order in which they appear; resources after them.
        let mut order: Vec<usize> = (0..names.len()).collect();
        order.sort_by_key(|&l| (names[l].is_resource, l));
        let mut place = vec![0; names.len()];
        for (to, &from) in order.iter().enumerate() {
            place[from] = to;
        }
        let lane = |event: &Event| lane_of(event).and_then(|id| lanes.get(&id)).map(|&l| place[l]);
        let mut scene = Self {
            key: key.to_owned(),
            start: index.start,
            end: index.end,
            lanes: order.iter().map(|&l| names[l].clone()).collect(),
            held: Vec::new(),
            pending: Vec::new(),
            troubles: Vec::new(),
            rows: Vec::new(),
            findings: Vec::new(),
        };
        scene.tell_apart();

        let findings: Vec<_> = report
            .iter()
            .flat_map(|r| r.violations.iter().chain(&r.expected))
            .filter(|v| v.key == key || v.key.is_empty())
            .collect();
        scene.findings =
            findings.iter().map(|v| (v.property, format!("{}: {}", v.property.title(), v.says))).collect();
        let mut by_moment: HashMap<u64, Vec<usize>> = HashMap::new();
        for (number, finding) in findings.iter().enumerate() {
            for event in &finding.events {
                by_moment.entry(event.ts.as_nanos()).or_default().push(number);
            }
        }
        let shows = |event: &Event| -> Vec<usize> {
            let mut shows = by_moment.get(&event.ts.as_nanos()).cloned().unwrap_or_default();
            shows.retain(|&f| findings[f].events.contains(event));
            shows.dedup();
            shows
        };

        let view = index.keys.iter().find(|k| k.name == key);
        for grant in view.iter().flat_map(|v| &v.grants) {
            scene.believe(&index, grant, lane(&history.events[grant.ok_event]));
        }
        for &op in view.iter().flat_map(|v| &v.ops) {
            let op = &index.ops[op];
            let Some(lane) = op.invokes.first().and_then(|&e| lane(&history.events[e])) else { continue };
            scene.pending.push(Span { lane, from: op.inv, to: op.last.min(index.end) });
        }
        for fault in index.faults.iter().filter(|f| f.key.is_empty() || f.key == key) {
            let (from, to) = (fault.begin, fault.end.min(index.end));
            scene.troubles.push(Trouble { name: fault.words(), from, to });
        }
        for event in &history.events {
            let everybodys =
                event.key.is_empty() && !matches!(event.what, What::Invoke { .. } | What::Ok { .. });
            let own_close = event.key.is_empty() && lane(event).is_some();
            if !(of_key(event) || everybodys || own_close) {
                continue;
            }
            let Some((mark, words)) = words(&index, event) else { continue };
            let (ts, lane, shows) = (event.ts.as_nanos(), lane(event), shows(event));
            scene.rows.push(Row { ts, lane, mark, words, shows });
        }
        // Simultaneous rows stay in the order of the history; what follows from a deadline comes after them.
        scene.rows.sort_by_key(|r| (r.ts, r.mark == Mark::DeadlinePassed));
        scene
    }

    /// Draws the belief of one grant, and tells when it ended by itself.
    fn believe(&mut self, index: &Index<'_>, grant: &Grant, lane: Option<usize>) {
        let Some(lane) = lane else { return };
        let stop = belief::stop(index, grant);
        for belief in belief::beliefs(index, grant) {
            self.held
                .push(Held { span: Span { lane, from: belief.from, to: belief.to }, fence: grant.fence });
            if belief.to < stop && belief.to <= index.end {
                let words = format!("reaches its deadline under fence {}", grant.fence);
                let (ts, mark) = (belief.to, Mark::DeadlinePassed);
                self.rows.push(Row { ts, lane: Some(lane), mark, words, shows: Vec::new() });
            }
        }
    }

    /// Adds a number to lanes of one name in several processes.
    fn tell_apart(&mut self) {
        let mut seen: BTreeMap<String, u32> = BTreeMap::new();
        for lane in &mut self.lanes {
            let count = seen.entry(lane.name.clone()).or_default();
            *count += 1;
            if *count > 1 {
                lane.name = format!("{} ({count})", lane.name);
            }
        }
    }

    /// Keeps at most `most` rows: those around the first finding, or the first ones. Returns how many were left out.
    pub(super) fn crop(&mut self, most: usize) -> usize {
        let rows = self.rows.len();
        if rows <= most {
            return 0;
        }
        let first = self.rows.iter().position(|r| !r.shows.is_empty()).unwrap_or(0);
        let from = first.saturating_sub(most / 2).min(rows - most);
        self.rows = self.rows.drain(from..from + most).collect();
        let (from, to) = (self.rows[0].ts, self.rows[most - 1].ts);
        let clip = |span: &mut Span| {
            (span.from, span.to) = (span.from.max(from), span.to.min(to));
            span.from <= span.to
        };
        self.pending.retain_mut(clip);
        self.held.retain_mut(|h| clip(&mut h.span));
        self.troubles.retain_mut(|t| {
            (t.from, t.to) = (t.from.max(from), t.to.min(to));
            t.from <= t.to
        });
        self.end = to;
        rows - most
    }

    /// Writes a moment from the start of the history.
    pub(super) fn at(&self, ts: u64) -> String {
        at(self.start, ts)
    }
}

fn lane_of(event: &Event) -> Option<(bool, u32, String)> {
    match &event.what {
        What::Resource { resource, .. } => {
            let name = if resource.is_empty() { "resource" } else { resource };
            Some((true, 0, name.to_owned()))
        }
        What::Fault { .. }
        | What::Probe { .. }
        | What::Stall { .. }
        | What::Missed { .. }
        | What::Note { .. } => None,
        _ if event.client.is_empty() => None,
        _ => Some((false, event.pid, event.client.clone())),
    }
}

/// Says in words what an event is; `None` for one that only repeats another.
fn words(index: &Index<'_>, event: &Event) -> Option<(Mark, String)> {
    let when = |m: lockcore::backend::Moment| index.at(m.as_nanos());
    let long = |d: std::time::Duration| span(u64::try_from(d.as_nanos()).unwrap_or(NEVER));
    Some(match &event.what {
        What::Invoke { call } => match call {
            Call::Acquire { ttl, wait, .. } => {
                let wait = match wait {
                    Some(wait) if wait.as_secs() > 86_400 * 365 => "waits for ever".to_owned(),
                    Some(wait) if !wait.is_zero() => format!("waits up to {}", long(*wait)),
                    _ => "tries once".to_owned(),
                };
                (Mark::Asks, format!("acquires for {}, {wait}", long(*ttl)))
            }
            Call::Resolve => (Mark::Asks, "asks how its acquire ended".into()),
            Call::Renew { fence, .. } => (Mark::Asks, format!("renews fence {fence}")),
            Call::Release { fence, .. } => (Mark::Released, format!("releases fence {fence}")),
            Call::Break { stamp } => (Mark::Asks, format!("breaks {stamp}")),
            Call::Cancel => (Mark::GaveUp, "gives up".into()),
            Call::Check { fence, .. } => (Mark::Asks, format!("asks its guard about fence {fence}")),
            Call::Read { fence } => (Mark::Asks, format!("reads under fence {fence}")),
            Call::Write { fence, .. } => (Mark::Asks, format!("writes under fence {fence}")),
            Call::Close => (Mark::Other, "closes".into()),
        },
        What::Sent { wire } => {
            let how = if *wire { "on the wire" } else { "sent" };
            (Mark::Other, format!("request {} {how}", event.attempt.max(1)))
        }
        What::Queued => (Mark::Other, "stands in the queue".into()),
        What::Ok { answer } => ok(answer, &when),
        What::Fail { why } => (Mark::Failed, format!("is told: {}", why.words())),
        What::Unknown { cause } if cause.is_empty() => (Mark::Unknown, "gets no answer".into()),
        What::Unknown { cause } => (Mark::Unknown, format!("gets no answer ({cause})")),
        What::Lost { fence, why, .. } => {
            let mark = if why.on_purpose() { Mark::Other } else { Mark::Lost };
            (mark, format!("is told that fence {fence} is over: {}", why.words()))
        }
        What::Resource { stamp, access, verdict, value, .. } => {
            let did = if *access == Access::Read { "read" } else { "write" };
            let value = value.map_or(String::new(), |v| format!(", value {v}"));
            let (mark, verdict) = match verdict {
                Verdict::Accepted => (Mark::Accepted, "accepts"),
                Verdict::Duplicate => (Mark::Duplicate, "has already applied"),
                Verdict::Stale => (Mark::Stale, "refuses as stale"),
            };
            (mark, format!("{verdict} a {did} of {stamp}{value}"))
        }
        What::Fault { name, target, phase, class, .. } => {
            let of = if target.is_empty() { String::new() } else { format!(" of {target}") };
            let phase = if *phase == Phase::Begin { "begins" } else { "ends" };
            (Mark::Fault, format!("fault {name}{of} {phase} ({class:?})"))
        }
        What::Probe { holder, residue, .. } => {
            let mut words = match holder {
                Some(holder) => format!("the store shows: held by {holder}"),
                None => "the store was looked at".to_owned(),
            };
            if let Some(residue) = residue {
                words.push_str(&format!(", {residue} more records"));
            }
            (Mark::Probe, words)
        }
        What::Stall { ns } => (Mark::Fault, format!("the process stalled for {}", long(*ns))),
        What::Missed { count } => (Mark::Fault, format!("{count} events are missing here")),
        What::Note { text } => (Mark::Other, text.clone()),
    })
}

fn ok(answer: &Answer, when: &dyn Fn(lockcore::backend::Moment) -> String) -> (Mark, String) {
    match answer {
        Answer { fence: Some(fence), deadline: Some(deadline), .. } => {
            (Mark::Granted, format!("is granted fence {fence}, until {}", when(*deadline)))
        }
        Answer { fence: Some(fence), .. } => (Mark::Granted, format!("is granted fence {fence}")),
        Answer { deadline: Some(deadline), .. } => {
            (Mark::Renewed, format!("has its lease renewed, until {}", when(*deadline)))
        }
        Answer { released: Some(true), .. } => (Mark::Other, "has released".into()),
        Answer { released: Some(false), .. } => (Mark::Other, "finds nothing to release: it was over".into()),
        Answer { held: Some(true), .. } => (Mark::Other, "is told yes, it still holds".into()),
        Answer { held: Some(false), .. } => (Mark::Other, "is told no, it no longer holds".into()),
        Answer { value: Some(value), .. } => (Mark::Other, format!("has the answer: {value}")),
        _ => (Mark::Other, "has the answer".into()),
    }
}
