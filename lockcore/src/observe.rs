//! What operators see: log lines, spans and numbers. Without the features these compile to nothing.
//!
//! | metric | kind | labels |
//! |---|---|---|
//! | `lock_acquire_total` | counter | `backend`, `outcome` |
//! | `lock_wait_seconds`, `lock_hold_seconds`, `lock_hold_ttl_ratio` | histogram | `backend` |
//! | `lock_renew_seconds` | histogram | `backend` |
//! | `lock_renew_failures_total` | counter | `backend`, `kind` |
//! | `lock_lost_total` | counter | `backend`, `reason` |
//! | `lock_owner_mismatch_total` | counter | `backend`, `verb` |
//! | `lock_release_unheard_total` | counter | `backend` |
//! | `lock_renewal_late_seconds` | histogram | `backend` |
//! | `lock_worked_after_loss_seconds` | histogram | `backend` |
//! | `lock_dropped_unused_total`, `lock_fence_unused_total`, `lock_opened_total` | counter | `backend` |
//! | `lock_oldest_hold_seconds` | gauge | `backend` |

#![cfg_attr(not(all(feature = "tracing", feature = "metrics")), allow(unused_variables, dead_code))]

use std::time::Duration;

use crate::{
    backend::OwnerDigest,
    error::{Error, ErrorKind, Verb},
    fence::Fence,
    lease::LostReason,
    name::LockName,
};

/// What every line and number carries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct About<'a> {
    pub(crate) backend: &'static str,
    pub(crate) lock: &'a LockName,
    pub(crate) owner: OwnerDigest,
}

macro_rules! line {
    ($level:ident, $about:expr, $($rest:tt)*) => {
        #[cfg(feature = "tracing")]
        tracing::$level!(
            target: "lockcore",
            backend = $about.backend,
            lock = %$about.lock,
            owner = %$about.owner,
            $($rest)*
        );
        #[cfg(not(feature = "tracing"))]
        let _ = &$about;
    };
}

macro_rules! count {
    ($name:literal, $($labels:tt)*) => {
        #[cfg(feature = "metrics")]
        metrics::counter!($name, $($labels)*).increment(1);
    };
}

macro_rules! measure {
    ($name:literal, $about:expr, $value:expr) => {
        #[cfg(feature = "metrics")]
        metrics::histogram!($name, "backend" => $about.backend).record($value);
        #[cfg(not(feature = "metrics"))]
        let _ = &$value;
    };
}

pub(crate) fn granted(about: About<'_>, fence: Fence, waited: Duration) {
    line!(debug, about, %fence, ?waited, "granted");
    count!("lock_acquire_total", "backend" => about.backend, "outcome" => "granted");
    measure!("lock_wait_seconds", about, waited);
}

pub(crate) fn not_granted(about: About<'_>, error: &Error) {
    line!(debug, about, kind = ?error.kind(), %error, "not granted");
    count!("lock_acquire_total", "backend" => about.backend, "outcome" => format!("{:?}", error.kind()));
}

pub(crate) fn renewed(about: About<'_>, took: Duration) {
    line!(trace, about, ?took, "renewed");
    measure!("lock_renew_seconds", about, took);
}

pub(crate) fn renew_failed(about: About<'_>, error: &Error) {
    line!(warn, about, kind = ?error.kind(), %error, "a renewal was not confirmed; it is tried again until the deadline");
    count!("lock_renew_failures_total", "backend" => about.backend, "kind" => format!("{:?}", error.kind()));
    mismatch(about, Verb::Renew, error.kind());
}

fn mismatch(about: About<'_>, verb: Verb, kind: ErrorKind) {
    if kind == ErrorKind::Lost {
        count!("lock_owner_mismatch_total", "backend" => about.backend, "verb" => verb.to_string());
    }
    let _ = (about, verb);
}

pub(crate) fn lost(about: About<'_>, fence: Fence, reason: LostReason) {
    match reason {
        LostReason::Released => {}
        LostReason::HoldLimit | LostReason::Closed => {
            line!(info, about, %fence, ?reason, "the lease is over: {reason}");
        }
        _ => {
            line!(warn, about, %fence, ?reason, "the lease is lost: {reason}");
        }
    }
    count!("lock_lost_total", "backend" => about.backend, "reason" => format!("{reason:?}"));
    let _ = fence;
}

pub(crate) fn over(about: About<'_>, held: Duration, ttl: Duration, after_loss: Option<Duration>) {
    measure!("lock_hold_seconds", about, held);
    measure!("lock_hold_ttl_ratio", about, held.as_secs_f64() / ttl.as_secs_f64().max(f64::MIN_POSITIVE));
    if let Some(after) = after_loss.filter(|d| !d.is_zero()) {
        line!(
            warn,
            about,
            ?after,
            "work went on after the lease was lost; only the fence at the resource stops it"
        );
        measure!("lock_worked_after_loss_seconds", about, after);
    }
}

pub(crate) fn release_unheard(about: About<'_>, error: &Error) {
    line!(info, about, kind = ?error.kind(), %error, "a release was not answered; it goes on in the background");
    count!("lock_release_unheard_total", "backend" => about.backend);
    mismatch(about, Verb::Release, error.kind());
}

pub(crate) fn late(about: About<'_>, by: Duration) {
    line!(
        warn,
        about,
        ?by,
        "renewals run late because the runtime is busy; `ClientOptions::renewal = RenewalHome::OwnThread` moves them to a thread of their own"
    );
    measure!("lock_renewal_late_seconds", about, by);
}

pub(crate) fn dropped_unused(about: About<'_>) {
    line!(
        warn,
        about,
        "a guard was dropped unused right after its grant, which released the lock; bind it to a name (`let _ = …` drops at once) or use `run`"
    );
    count!("lock_dropped_unused_total", "backend" => about.backend);
}

pub(crate) fn fence_unused(about: About<'_>) {
    line!(warn, about, "the lease ended and nobody read its fence; pass `held.stamp()?` to the resource");
    count!("lock_fence_unused_total", "backend" => about.backend);
}

pub(crate) fn opened(about: About<'_>, error: &Error) {
    line!(error, about, %error, "going on WITHOUT the lock, as the options allow");
    count!("lock_opened_total", "backend" => about.backend);
    let _ = error;
}

pub(crate) fn dropped_without_runtime(about: About<'_>) {
    line!(
        warn,
        about,
        "a guard ended while its runtime was shutting down; the lock stays until its TTL ends. Release it, or `close()` the client, before that"
    );
    let _ = about;
}

pub(crate) fn oldest_hold(backend: &'static str, age: Duration) {
    #[cfg(feature = "metrics")]
    metrics::gauge!("lock_oldest_hold_seconds", "backend" => backend).set(age.as_secs_f64());
    let _ = (backend, age);
}
