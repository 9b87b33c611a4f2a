//! The clock that tells and wakes: suspend-aware outside of tests, virtual inside them.

use std::{fmt, time::Duration};

use async_trait::async_trait;

use crate::deadline::Moment;

mod timer;

/// Tells the time and wakes by it, both: a clock that only tells cannot be virtual, and a timer that stands still in
/// a suspend rings late.
#[async_trait]
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// Returns now.
    fn now(&self) -> Moment;
    /// Returns at `moment` or later; after a suspend at once, not after the rest of the sleep.
    ///
    /// # Cancel safety
    /// Dropping the future leaves nothing behind.
    async fn sleep_until(&self, moment: Moment);
}

/// `CLOCK_BOOTTIME`: runs while the machine sleeps, and so do its alarms.
///
/// # Units
/// Nanoseconds since boot, the same for all processes of one machine and time namespace. Alarms ring from one thread
/// of the process, started by the first sleep, so they need no timer of the async runtime.
///
/// Elsewhere than on Linux there is no such clock through a portable call: `CLOCK_MONOTONIC` stands in (on macOS it
/// stops in a suspend), and alarms look at it at least every 200 ms.
///
/// # Source
/// clock_gettime(2), timerfd_create(2), Linux man-pages 6.
#[derive(Clone, Copy, Debug, Default)]
pub struct BootClock;

impl BootClock {
    /// Returns now, without the trait.
    pub fn read() -> Moment {
        let time = rustix::time::clock_gettime(timer::CLOCK);
        // A clock since boot is not negative, and 2^64 nanoseconds are 584 years.
        Moment::from_nanos(time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64)
    }
}

#[async_trait]
impl Clock for BootClock {
    fn now(&self) -> Moment {
        Self::read()
    }

    async fn sleep_until(&self, moment: Moment) {
        timer::Alarm::at(moment).await;
    }
}

/// tokio's clock, which a test can pause and which then jumps: for virtual time.
///
/// # Units
/// Nanoseconds since it was started, plus an hour, so that moments before the start exist.
#[derive(Clone, Copy, Debug)]
pub struct TokioClock {
    start: tokio::time::Instant,
}

impl TokioClock {
    const AGE_AT_START: Duration = Duration::from_secs(3600);

    /// Starts the clock. Needs a runtime with time, as every call does.
    pub fn start() -> Self {
        Self { start: tokio::time::Instant::now() }
    }
}

#[async_trait]
impl Clock for TokioClock {
    fn now(&self) -> Moment {
        Moment::from_nanos(0).saturating_add(Self::AGE_AT_START + self.start.elapsed())
    }

    async fn sleep_until(&self, moment: Moment) {
        let since_start = Moment::from_nanos(0).saturating_add(Self::AGE_AT_START).until(moment);
        match self.start.checked_add(since_start) {
            Some(instant) if moment != Moment::MAX => tokio::time::sleep_until(instant).await,
            _ => std::future::pending().await,
        }
    }
}

#[async_trait]
impl<C: Clock + ?Sized> Clock for std::sync::Arc<C> {
    fn now(&self) -> Moment {
        (**self).now()
    }
    async fn sleep_until(&self, moment: Moment) {
        (**self).sleep_until(moment).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_alarm_rings_at_its_moment_and_not_before() {
        let clock = BootClock;
        let start = clock.now();
        let moments: Vec<Moment> =
            [30, 10, 20].map(|ms| start.saturating_add(Duration::from_millis(ms))).to_vec();
        let mut rings = tokio::task::JoinSet::new();
        for moment in moments {
            rings.spawn(async move {
                BootClock.sleep_until(moment).await;
                assert!(BootClock.now() >= moment, "an alarm rang early");
                moment
            });
        }
        let mut order = Vec::new();
        while let Some(moment) = rings.join_next().await {
            order.push(moment.unwrap());
        }
        assert!(order.is_sorted(), "alarms rang out of order: {order:?}");
    }

    #[test]
    fn an_alarm_needs_no_runtime_timer() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let soon = BootClock::read().saturating_add(Duration::from_millis(5));
        runtime.block_on(BootClock.sleep_until(soon));
        assert!(BootClock::read() >= soon);
    }

    #[tokio::test]
    async fn a_dropped_alarm_leaves_nothing() {
        let far = BootClock::read().saturating_add(Duration::from_secs(3600));
        for _ in 0..1000 {
            let sleep = BootClock.sleep_until(far);
            tokio::select! { biased; () = sleep => unreachable!(), () = std::future::ready(()) => {} }
        }
        assert_eq!(timer::pending_at(far), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn virtual_time_jumps() {
        let clock = TokioClock::start();
        let end = clock.now().saturating_add(Duration::from_secs(3600));
        clock.sleep_until(end).await;
        assert_eq!(clock.now(), end);
    }
}
