//! Under which rules a history is judged: margins, bounds, and what is expected of each property.

use std::{collections::BTreeMap, time::Duration};

use serde::{Deserialize, Serialize};

use super::{Property, wire};

/// Margins, bounds and expectations. The default assumes nothing that the history itself does not show.
///
/// # Units
/// Durations are nanoseconds in JSON.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
#[non_exhaustive]
pub struct Rules {
    /// The part of a TTL that clients must give up for clocks that run at different rates. Default 0: only a
    /// deadline that is later than the server's own end breaks S7.
    pub drift: f64,
    /// What may lie between the stamp of a request and the client's own reading of the clock. Default 5 ms. Not
    /// used where the stamp was taken on the wire.
    #[serde(with = "wire::span")]
    pub send_slack: Duration,
    /// The least that an acquire may have left when it returns. Default 0.
    #[serde(with = "wire::span")]
    pub min_remaining: Duration,
    /// How long before the deadline a guard stops saying yes, and may report the loss. Default 0.
    #[serde(with = "wire::span")]
    pub stop_margin: Duration,
    /// How long the store keeps a lock closed after an unclean end. Default 0.
    #[serde(with = "wire::span")]
    pub lock_delay: Duration,
    /// The grain of times that a server reports. Default 1 ms.
    #[serde(with = "wire::span")]
    pub server_grain: Duration,
    /// How long after its deadline a lost lease must have been reported. `None`: the history was recorded below the
    /// guards, so nobody reports.
    #[serde(with = "wire::span_option")]
    pub loss_notice: Option<Duration>,
    /// Every client of these names is in the history. Default false, as for the history of one application.
    pub closed_world: bool,
    /// Waiters may stand in a queue on the server, so a pending acquire can refuse a try, and an answer may come long
    /// after its request. Default true, which judges more mildly.
    pub queue: bool,
    /// The resource is a counter: each accepted write adds one.
    pub counter: bool,
    /// Bounds of what must happen in time.
    pub bounds: Bounds,
    /// What is expected of a property; `Holds` where it is not named.
    pub expect: BTreeMap<Property, Expect>,
    /// What must have been seen, lest a history pass because nothing happened.
    pub demands: Vec<Demand>,
}

impl Default for Rules {
    fn default() -> Self {
        Self {
            drift: 0.0,
            send_slack: Duration::from_millis(5),
            min_remaining: Duration::ZERO,
            stop_margin: Duration::ZERO,
            lock_delay: Duration::ZERO,
            server_grain: Duration::from_millis(1),
            loss_notice: None,
            closed_world: false,
            queue: true,
            counter: false,
            bounds: Bounds::default(),
            expect: BTreeMap::new(),
            demands: Vec::new(),
        }
    }
}

impl Rules {
    /// Starts from a history in which every client of a name was recorded.
    pub fn complete() -> Self {
        Self { closed_world: true, ..Self::default() }
    }

    /// Starts from the history of one application, recorded through its guards.
    pub fn application() -> Self {
        Self { loss_notice: Some(Duration::from_millis(250)), ..Self::default() }
    }

    /// Sets fields in one expression.
    #[must_use]
    pub fn with(mut self, set: impl FnOnce(&mut Self)) -> Self {
        set(&mut self);
        self
    }

    /// Expects something of one property.
    #[must_use]
    pub fn expect(mut self, property: Property, expect: Expect) -> Self {
        self.expect.insert(property, expect);
        self
    }

    /// Demands that something was seen.
    #[must_use]
    pub fn demand(mut self, demand: Demand) -> Self {
        self.demands.push(demand);
        self
    }

    /// Returns what is expected of `property`.
    pub fn expectation(&self, property: Property) -> Expect {
        self.expect.get(&property).copied().unwrap_or(Expect::Holds)
    }
}

/// What is expected of a property.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Expect {
    /// It holds; a violation fails the history.
    Holds,
    /// It breaks, by design of the case; a history without the violation fails, because the fault did not bite or
    /// the store has changed.
    Breaks,
    /// It may break; a violation is told and changes nothing.
    May,
    /// It is not judged.
    NotJudged,
}

/// Bounds of what must happen in time, counted after the last fault has ended. `None`: not judged.
///
/// # Units
/// Durations are nanoseconds in JSON.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default, rename_all = "kebab-case", deny_unknown_fields)]
#[non_exhaustive]
pub struct Bounds {
    /// L1: from the end of a dead holder's lease to the next grant.
    #[serde(with = "wire::span_option")]
    pub takeover: Option<Duration>,
    /// L2: from a release to the next grant.
    #[serde(with = "wire::span_option")]
    pub wake: Option<Duration>,
    /// L3: how long somebody may still wait for a free lock at the end of the history.
    #[serde(with = "wire::span_option")]
    pub quiet: Option<Duration>,
    /// L4: from giving up to the last record gone.
    #[serde(with = "wire::span_option")]
    pub residue: Option<Duration>,
    /// L5: waiters are served in order.
    pub fair: bool,
    /// L6: from the end of the wait budget to the return.
    #[serde(with = "wire::span_option")]
    pub wait_slack: Option<Duration>,
    /// L6: how long a try may take.
    #[serde(with = "wire::span_option")]
    pub call_timeout: Option<Duration>,
    /// L7: how many TTLs a renewed lease must have lasted.
    pub steady_ttls: Option<u32>,
    /// L8: requests for each second that a waiter waits.
    pub requests_per_waiter_second: Option<f64>,
    /// L8: requests for each grant, over the whole history of a name.
    pub requests_per_grant: Option<f64>,
    /// L8: pauses between the requests of a waiter differ.
    pub jitter: bool,
    /// L9: how long closing may take.
    #[serde(with = "wire::span_option")]
    pub close: Option<Duration>,
    /// L10: from the end of the last fault to a grant without contention.
    #[serde(with = "wire::span_option")]
    pub recovery: Option<Duration>,
}

impl Bounds {
    /// Sets fields in one expression.
    #[must_use]
    pub fn with(mut self, set: impl FnOnce(&mut Self)) -> Self {
        set(&mut self);
        self
    }
}

/// Something that must have been seen: a history in which nothing happened proves nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum Demand {
    /// At least so many grants.
    Grants(u64),
    /// At least so many confirmed renewals.
    Renewals(u64),
    /// At least so many releases that ended a lease.
    Releases(u64),
    /// At least so many refusals by the resource.
    StaleVerdicts(u64),
    /// At least so many operations accepted by the resource.
    AcceptedVerdicts(u64),
    /// At least so many calls without an answer.
    Unknowns(u64),
    /// Every fault overlaps at least one call.
    FaultsHitCalls,
    /// The property was put to the test at least so many times.
    Judged(Property, u64),
}
