//! What the resource answers: accepted, duplicate, stale.

use lockcore::Stamp;

/// Let through. `Duplicate`: applied before by the same holder; report success, do not apply again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a duplicate must not be applied again"]
pub enum Verdict {
    /// New: apply it.
    Accepted,
    /// The same operation of the same holder.
    Duplicate,
}

/// A newer holder has been here. An error and not a verdict, so that `?` leaves the transaction unfinished.
///
/// It is also the answer to an equal fence of another owner: a store that lost acknowledged writes may grant one
/// fence twice, and then the first of the two to reach the resource goes on, while the other has to acquire again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("stale fence {presented}: the resource has seen {floor}")]
#[non_exhaustive]
pub struct Stale {
    /// What was presented.
    pub presented: Stamp,
    /// What the resource has seen.
    pub floor: Stamp,
}

/// Where a write was refused, for the counter.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place {
    Register,
    Sql,
}

/// The one rule: a stamp passes a floor when its fence is higher, or when it is that very stamp.
pub(crate) fn passes(stamp: Stamp, floor: Option<Stamp>) -> bool {
    floor.is_none_or(|floor| stamp.fence > floor.fence || stamp == floor)
}

/// Judges without counting.
pub(crate) fn check(presented: Stamp, floor: Option<Stamp>) -> Result<(), Stale> {
    match floor {
        Some(floor) if !passes(presented, Some(floor)) => Err(Stale { presented, floor }),
        _ => Ok(()),
    }
}

/// Counts a refusal on its way out.
pub(crate) fn counted(stale: Stale, place: Place) -> Stale {
    #[cfg(feature = "metrics")]
    metrics::counter!(
        "lock_stale_refused_total",
        "resource" => match place {
            Place::Register => "register",
            Place::Sql => "sql",
        }
    )
    .increment(1);
    #[cfg(not(feature = "metrics"))]
    let _ = place;
    stale
}
