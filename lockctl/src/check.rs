//! `check`: is the lock of this run still held, and for long enough?

use std::{env, path::PathBuf, time::Duration};

use lockcore::backend::BootClock;
use serde_json::json;

use crate::{
    cli::Check,
    duration::show,
    exit,
    failure::Failure,
    state_file,
    voice::{Voice, millis, print},
};

/// Compares the state file with the clock; asks nobody.
pub(crate) fn main(options: &Check, voice: &Voice) -> Result<u8, Failure> {
    let path = env::var_os("LOCK_STATE").map(PathBuf::from).ok_or_else(|| {
        Failure::usage(
            "LOCK_STATE is not set; `lockctl check` is for the command that `lockctl run` has started",
        )
    })?;
    let stamp = env::var("LOCK_STAMP").ok();
    let reading = state_file::read(&path, stamp.as_deref(), BootClock::read()).map_err(Failure::usage)?;
    let need = options.need.unwrap_or_default();
    // Counted to the moment at which the command is asked to stop: what begins now is to end undisturbed.
    let is_held = reading.undisturbed > Duration::ZERO && reading.undisturbed >= need;
    if voice.is_json() {
        let whole = json!({
            "schema": "lockctl/check/1",
            "name": reading.name,
            "stamp": reading.stamp,
            "held": is_held,
            "undisturbed_ms": millis(reading.undisturbed),
            "remaining_ms": millis(reading.remaining),
            "over": reading.over,
        });
        print(&format!("{whole}\n"))?;
    }
    if is_held {
        return Ok(0);
    }
    let name = &reading.name;
    let why = match &reading.over {
        Some(reason) => format!("the lock {name:?} is over: {reason}"),
        None if reading.remaining.is_zero() => format!("the lock {name:?} is over: its deadline has passed"),
        None if reading.undisturbed.is_zero() => {
            format!("the lock {name:?} is about to end, in {}", show(reading.remaining))
        }
        None => format!(
            "the lock {name:?} is held for {} more, and {} are needed",
            show(reading.undisturbed),
            show(need)
        ),
    };
    if voice.is_json() {
        return Ok(exit::LOST);
    }
    Err(Failure::new(exit::LOST, why))
}
