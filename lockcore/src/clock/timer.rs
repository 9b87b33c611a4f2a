//! One thread that wakes tasks by the suspend-aware clock.
//!
//! tokio's timers run on `CLOCK_MONOTONIC` and stand still in a suspend; a lease does not. On Linux the thread waits in
//! `ppoll` on a timerfd of `CLOCK_BOOTTIME` and an eventfd, so it costs nothing while no alarm is due.

use std::{
    collections::BTreeMap,
    pin::Pin,
    sync::{Mutex, MutexGuard, OnceLock, PoisonError},
    task::{Context, Poll, Waker},
};

use crate::deadline::Moment;

#[cfg(target_os = "linux")]
pub(super) const CLOCK: rustix::time::ClockId = rustix::time::ClockId::Boottime;
#[cfg(not(target_os = "linux"))]
pub(super) const CLOCK: rustix::time::ClockId = rustix::time::ClockId::Monotonic;

/// A future that is ready at a moment. Registers at its first poll, leaves when dropped.
pub(super) struct Alarm {
    moment: Moment,
    ticket: Option<u64>,
}

impl Alarm {
    pub(super) fn at(moment: Moment) -> Self {
        Self { moment, ticket: None }
    }
}

impl Future for Alarm {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if super::BootClock::read() >= self.moment {
            return Poll::Ready(());
        }
        if self.moment == Moment::MAX {
            return Poll::Pending;
        }
        let timer = Timer::shared();
        let mut alarms = timer.alarms();
        let ticket = match self.ticket {
            Some(ticket) => ticket,
            None => {
                alarms.next_ticket += 1;
                alarms.next_ticket
            }
        };
        let too_late = alarms.set(self.moment, ticket, cx.waker());
        drop(alarms);
        self.ticket = Some(ticket);
        if too_late {
            timer.look_again();
        }
        Poll::Pending
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket {
            Timer::shared().alarms().due.remove(&(self.moment, ticket));
        }
    }
}

#[derive(Default)]
struct Alarms {
    due: BTreeMap<(Moment, u64), Waker>,
    next_ticket: u64,
    /// When the thread looks again by itself; `None`: not before it is told to.
    looks: Option<Moment>,
}

impl Alarms {
    /// Sets an alarm; says whether the thread would be too late for it.
    ///
    /// The thread stays set to an alarm that was dropped, and looks once for nothing. Most alarms bound an exchange and are
    /// dropped long before they are due, each a little later than the last: waking the thread for every one of them costs
    /// more than the exchange's own processor time.
    fn set(&mut self, moment: Moment, ticket: u64, waker: &Waker) -> bool {
        match self.due.entry((moment, ticket)) {
            // Rang between the look at the clock and here, or still waits: the waker may have changed.
            std::collections::btree_map::Entry::Occupied(mut waiting) => {
                waiting.get_mut().clone_from(waker);
            }
            std::collections::btree_map::Entry::Vacant(place) => {
                place.insert(waker.clone());
            }
        }
        self.looks.is_none_or(|looks| moment < looks)
    }

    /// Takes out what is due, and returns when to look again. Who sets an alarm from now on goes by that.
    fn look(&mut self, now: Moment, ready: &mut Vec<Waker>) -> Option<Moment> {
        while let Some(first) = self.due.first_entry() {
            if first.key().0 > now {
                break;
            }
            ready.push(first.remove());
        }
        self.looks = self.due.first_key_value().map(|((moment, _), _)| *moment);
        self.looks
    }
}

struct Timer {
    alarms: Mutex<Alarms>,
    bell: Bell,
}

impl Timer {
    fn shared() -> &'static Timer {
        static SHARED: OnceLock<&'static Timer> = OnceLock::new();
        SHARED.get_or_init(|| {
            // Once a process, for its whole life.
            let timer: &'static Timer =
                Box::leak(Box::new(Timer { alarms: Mutex::default(), bell: Bell::new() }));
            std::thread::Builder::new()
                .name("lockcore-clock".into())
                .spawn(move || timer.run())
                .expect("the system starts one thread");
            timer
        })
    }

    fn alarms(&self) -> MutexGuard<'_, Alarms> {
        // Nothing below panics while it holds the lock, except an allocation failure, which aborts.
        self.alarms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look_again(&self) {
        self.bell.ring();
    }

    fn run(&self) {
        let mut ready = Vec::new();
        loop {
            let next = self.alarms().look(super::BootClock::read(), &mut ready);
            for waker in ready.drain(..) {
                waker.wake();
            }
            self.bell.wait(next);
        }
    }
}

/// Counts the alarms that wait for exactly this moment.
#[cfg(test)]
pub(super) fn pending_at(moment: Moment) -> usize {
    Timer::shared().alarms().due.keys().filter(|(m, _)| *m == moment).count()
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::{Alarms, Moment};

    #[test]
    fn the_thread_is_woken_for_an_alarm_before_its_next_look_and_for_no_other() {
        let at = Moment::from_nanos;
        let (mut alarms, mut ready) = (Alarms::default(), Vec::new());
        let mut look = |alarms: &mut Alarms, now| {
            ready.clear();
            let next = alarms.look(at(now), &mut ready);
            (next, ready.len())
        };
        let set = |alarms: &mut Alarms, moment, ticket| alarms.set(at(moment), ticket, Waker::noop());
        assert!(set(&mut alarms, 10, 1), "it sleeps without an end");
        assert_eq!(look(&mut alarms, 0), (Some(at(10)), 0));
        assert!(!set(&mut alarms, 10, 1), "it looks at that very moment");
        assert!(!set(&mut alarms, 20, 2));
        // The alarm that it is set to goes, and the next one is later: it looks in time.
        alarms.due.remove(&(at(10), 1));
        assert!(!set(&mut alarms, 15, 3));
        assert!(set(&mut alarms, 9, 4));
        assert_eq!(look(&mut alarms, 8), (Some(at(9)), 0));
        alarms.due.remove(&(at(9), 4));
        assert_eq!(look(&mut alarms, 9), (Some(at(15)), 0), "once for nothing");
        assert_eq!(look(&mut alarms, 21), (None, 2));
        assert!(set(&mut alarms, 30, 5), "nothing is due, so it sleeps without an end");
    }
}

#[cfg(target_os = "linux")]
use linux::Bell;
#[cfg(not(target_os = "linux"))]
use portable::Bell;

#[cfg(target_os = "linux")]
mod linux {
    use rustix::{
        event::{EventfdFlags, PollFd, PollFlags, eventfd, poll},
        fd::OwnedFd,
        io::{read, write},
        time::{
            Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
            timerfd_settime,
        },
    };

    use super::Moment;

    /// What the thread waits on: an alarm of the boot clock, or a ring.
    pub(super) struct Bell {
        alarm: OwnedFd,
        ring: OwnedFd,
    }

    impl Bell {
        pub(super) fn new() -> Self {
            // Two descriptors a process; without them no lease can be bounded, so there is no way to go on.
            let alarm =
                timerfd_create(TimerfdClockId::Boottime, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK);
            let ring = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
            Self {
                alarm: alarm.expect("the system has a timerfd for the boot clock"),
                ring: ring.expect("the system has an eventfd"),
            }
        }

        pub(super) fn ring(&self) {
            // Full means that a ring is already pending.
            let _ = write(&self.ring, &1u64.to_ne_bytes());
        }

        pub(super) fn wait(&self, next: Option<Moment>) {
            let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
            let it_value = next.map_or(zero, |moment| {
                // All-zero disarms; a moment at boot itself is in the past, where one nanosecond is as good.
                let nanos = moment.as_nanos().max(1);
                Timespec { tv_sec: (nanos / 1_000_000_000) as i64, tv_nsec: (nanos % 1_000_000_000) as _ }
            });
            let spec = Itimerspec { it_interval: zero, it_value };
            // An absolute time on a valid descriptor: cannot fail.
            let _ = timerfd_settime(&self.alarm, TimerfdTimerFlags::ABSTIME, &spec);
            let mut fds = [PollFd::new(&self.alarm, PollFlags::IN), PollFd::new(&self.ring, PollFlags::IN)];
            // EINTR is one more look.
            let _ = poll(&mut fds, None);
            let mut count = [0; 8];
            let _ = read(&self.alarm, &mut count);
            let _ = read(&self.ring, &mut count);
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod portable {
    use std::{
        sync::{Condvar, Mutex, PoisonError},
        time::Duration,
    };

    use super::Moment;

    /// What the thread waits on. A condition variable may stand still in a suspend, so it never waits long.
    pub(super) struct Bell {
        rung: Mutex<bool>,
        changed: Condvar,
    }

    impl Bell {
        pub(super) fn new() -> Self {
            Self { rung: Mutex::new(false), changed: Condvar::new() }
        }

        pub(super) fn ring(&self) {
            *self.rung.lock().unwrap_or_else(PoisonError::into_inner) = true;
            self.changed.notify_one();
        }

        pub(super) fn wait(&self, next: Option<Moment>) {
            let rung = self.rung.lock().unwrap_or_else(PoisonError::into_inner);
            let mut rung = match next {
                None => self.changed.wait_while(rung, |rung| !*rung).unwrap_or_else(PoisonError::into_inner),
                Some(next) => {
                    let nap = super::super::BootClock::read().until(next).min(Duration::from_millis(200));
                    self.changed
                        .wait_timeout_while(rung, nap, |rung| !*rung)
                        .unwrap_or_else(PoisonError::into_inner)
                        .0
                }
            };
            *rung = false;
        }
    }
}
