//! The numbers of a run, each from where it was given: option, environment, lock, level, default.

use std::time::Duration;

use lockcore::LockName;

use crate::{
    cli::NumberArgs,
    duration::{Wait, show},
    failure::Failure,
    store::Store,
};

/// The numbers of a run.
#[derive(Clone, Debug)]
pub(crate) struct Numbers {
    pub(crate) wait: Wait,
    pub(crate) ttl: Duration,
    pub(crate) kill_after: Duration,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) lock_delay: Duration,
}

impl Numbers {
    /// Collects them for a lock, or for none in particular.
    ///
    /// # Errors
    /// 125: they do not fit together.
    pub(crate) fn of(given: &NumberArgs, store: &Store, name: Option<&LockName>) -> Result<Self, Failure> {
        let level = store.level.as_ref().map(|(_, level)| level);
        let lock = store.file.as_ref().zip(name).and_then(|(file, name)| file.config.numbers(name));
        let ttl = given
            .ttl
            .or(lock.and_then(|lock| lock.ttl))
            .or(level.and_then(|level| level.ttl))
            .unwrap_or(Duration::from_secs(30));
        let kill_after = given
            .kill_after
            .or(lock.and_then(|lock| lock.stop_margin))
            .or(level.and_then(|level| level.stop_margin))
            .unwrap_or((ttl / 4).min(Duration::from_secs(10)));
        if ttl < Duration::from_millis(200) {
            return Err(Failure::usage(format!(
                "--ttl {} is too short for a process to be stopped in; write 200ms or more",
                show(ttl)
            )));
        }
        // Renewals come at a third of the TTL. What is left then has to hold the grace and a few late answers.
        if kill_after > ttl / 2 {
            return Err(Failure::usage(format!(
                "--kill-after {} is taken off the end of the lease and leaves too little of --ttl {}; at most half of it",
                show(kill_after),
                show(ttl)
            )));
        }
        let wait = given
            .wait
            .or(lock.and_then(|lock| lock.wait).map(Wait::from))
            .or(level.and_then(|level| level.wait).map(Wait::from))
            .unwrap_or(Wait::No);
        let max_hold =
            given.max_hold.or(lock.and_then(|lock| lock.max_hold)).or(level.and_then(|level| level.max_hold));
        if max_hold.is_some_and(|cap| cap.is_zero()) {
            return Err(Failure::usage(
                "--max-hold is 0, so that nothing could run; leave it out for no limit",
            ));
        }
        let lock_delay = given
            .lock_delay
            .or(lock.and_then(|lock| lock.lock_delay))
            .or(level.and_then(|level| level.lock_delay))
            .unwrap_or_default();
        Ok(Self { wait, ttl, kill_after, max_hold, lock_delay })
    }
}
