//! Points in time on the suspend-aware clock.

use std::time::Duration;

/// A point on the suspend-aware clock of this machine; only durations travel.
///
/// # Units
/// Nanoseconds since boot on `CLOCK_BOOTTIME`, which keeps running while the machine sleeps. `std::time::Instant`
/// does not on Linux (rust-lang/rust 87906).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(u64);

impl Moment {
    /// The end of time.
    pub const MAX: Moment = Moment(u64::MAX);

    /// Makes one from nanoseconds since boot; for implementors of [`Clock`](crate::backend::Clock).
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Returns the nanoseconds since boot.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Returns the time from `self` to `later`, or zero.
    pub fn until(self, later: Moment) -> Duration {
        Duration::from_nanos(later.0.saturating_sub(self.0))
    }

    /// Adds, stopping at the end of time.
    #[must_use]
    pub fn saturating_add(self, d: Duration) -> Moment {
        Moment(self.0.saturating_add(nanos(d)))
    }

    /// Subtracts, stopping at boot.
    #[must_use]
    pub fn saturating_sub(self, d: Duration) -> Moment {
        Moment(self.0.saturating_sub(nanos(d)))
    }
}

fn nanos(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_saturates() {
        let m = Moment::from_nanos(5);
        assert_eq!(m.saturating_add(Duration::MAX), Moment::MAX);
        assert_eq!(m.saturating_sub(Duration::from_secs(1)), Moment::from_nanos(0));
        assert_eq!(m.until(Moment::from_nanos(3)), Duration::ZERO);
        assert_eq!(m.until(Moment::from_nanos(8)), Duration::from_nanos(3));
    }
}
