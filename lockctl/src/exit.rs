//! Exit codes: they stand in the manual and never change meaning.

use lockcore::{Error, ErrorKind, LostReason};

/// Someone else has it, and no waiting was asked.
pub const BUSY: u8 = 111;
/// The wait budget is used up.
pub const TIMED_OUT: u8 = 112;
/// The lock was lost while the command ran; somebody else may have had it at the same time.
pub const LOST: u8 = 113;
/// The store could not be asked until the deadline; the command was gone before it.
pub const UNCERTAIN: u8 = 114;
/// The store cannot be asked, or the outcome of the acquire is unknown.
pub const UNAVAILABLE: u8 = 115;
/// The set-up was refused: level, credentials, a fence that went back.
pub const REFUSED: u8 = 116;
/// The hold limit was reached.
pub const HOLD_LIMIT: u8 = 117;
/// Wrong use, bad configuration, lockctl's own failure.
pub const USAGE: u8 = 125;
/// The command was found, but cannot be executed.
pub const NOT_EXECUTABLE: u8 = 126;
/// The command was not found.
pub const NOT_FOUND: u8 = 127;

/// Returns the code for an end by a signal.
pub fn of_signal(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

/// Returns the code for an error of a store, where no command ran.
pub fn of_error(error: &Error) -> u8 {
    match error.kind() {
        ErrorKind::Held => BUSY,
        ErrorKind::WaitTimeout => TIMED_OUT,
        // A grant that came too late to be used is an acquire without a result.
        ErrorKind::Lost
        | ErrorKind::Unknown
        | ErrorKind::Unavailable
        | ErrorKind::Overloaded
        | ErrorKind::Closed => UNAVAILABLE,
        ErrorKind::Unsupported
        | ErrorKind::Unauthorized
        | ErrorKind::Misconfigured
        | ErrorKind::FenceRegression => REFUSED,
        ErrorKind::Invalid => USAGE,
        // The kinds may grow. A new one is a refusal until somebody has thought about it: nothing ran.
        _ => REFUSED,
    }
}

/// Returns the code for a lease that ended under the command, by why, and by whether the last process was gone before
/// the deadline.
pub(crate) fn of_loss(reason: LostReason, gone_in_time: bool) -> u8 {
    match reason {
        LostReason::Expired if gone_in_time => UNCERTAIN,
        LostReason::HoldLimit if gone_in_time => HOLD_LIMIT,
        // Told by the store, or outlived: somebody else may have had the lock at the same time.
        _ => LOST,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_of_our_own_differs_from_the_others() {
        let mut codes = vec![
            BUSY,
            TIMED_OUT,
            LOST,
            UNCERTAIN,
            UNAVAILABLE,
            REFUSED,
            HOLD_LIMIT,
            USAGE,
            NOT_EXECUTABLE,
            NOT_FOUND,
        ];
        codes.sort_unstable();
        codes.dedup();
        assert_eq!(codes.len(), 10);
    }

    #[test]
    fn a_lease_that_the_command_outlived_is_lost_and_not_uncertain() {
        assert_eq!(of_loss(LostReason::Expired, true), UNCERTAIN);
        assert_eq!(of_loss(LostReason::Expired, false), LOST);
        assert_eq!(of_loss(LostReason::HoldLimit, true), HOLD_LIMIT);
        assert_eq!(of_loss(LostReason::HoldLimit, false), LOST);
        assert_eq!(of_loss(LostReason::Broken, true), LOST);
        assert_eq!(of_loss(LostReason::Taken, true), LOST);
    }

    #[test]
    fn a_signal_adds_128() {
        assert_eq!(of_signal(9), 137);
        assert_eq!(of_signal(15), 143);
    }
}
