//! Durations on the command line: a number and its unit, because a misread unit costs a night.

use std::time::Duration;

/// How long an acquire may wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Not at all: one try.
    No,
    /// As long as this.
    For(Duration),
    /// Until it is granted.
    Forever,
}

/// Reads `250ms`, `30s`, `1h30m`, `1m 30s`, or `0`.
///
/// # Units
/// `ms`, `s`, `m`, `h`, `d`, each at most once, largest first. Only zero stands alone.
///
/// # Errors
/// A sentence that says what to write.
pub fn parse(text: &str) -> Result<Duration, String> {
    const UNITS: [(&str, u64); 5] =
        [("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)];
    let trimmed = text.trim();
    if trimmed.is_empty() {
        return Err("empty; write a number and a unit, like 30s".into());
    }
    if trimmed.bytes().all(|b| b.is_ascii_digit()) {
        return match trimmed.bytes().all(|b| b == b'0') {
            true => Ok(Duration::ZERO),
            false => Err(format!("a unit is missing: write {trimmed}s for seconds, {trimmed}m for minutes")),
        };
    }
    let (mut rest, mut millis, mut allowed) = (trimmed, 0u64, 0usize);
    while !rest.is_empty() {
        let digits = rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let (number, after) = rest.split_at(digits);
        let after = after.trim_start();
        let letters = after.len() - after.trim_start_matches(|c: char| c.is_ascii_alphabetic()).len();
        let (unit, next) = after.split_at(letters);
        if number.is_empty() {
            return Err("not a duration; write whole numbers with units, like 250ms, 30s or 1h30m".into());
        }
        let Some(at) = UNITS.iter().position(|(name, _)| *name == unit) else {
            return Err(match unit {
                "" => format!("a unit is missing after {number}: one of ms, s, m, h, d"),
                _ => format!("{unit:?} is not a unit; one of ms, s, m, h, d"),
            });
        };
        if at < allowed {
            return Err("units go from large to small, each once, like 1h30m".into());
        }
        allowed = at + 1;
        millis = number
            .parse::<u64>()
            .ok()
            .and_then(|n| n.checked_mul(UNITS[at].1))
            .and_then(|n| n.checked_add(millis))
            .ok_or("too long; the limit is 2^64 milliseconds")?;
        rest = next.trim_start();
    }
    Ok(Duration::from_millis(millis))
}

/// Reads a wait budget: `0`, a duration, or `forever`.
///
/// # Errors
/// As [`parse`].
pub fn parse_wait(text: &str) -> Result<Wait, String> {
    if text.trim() == "forever" {
        return Ok(Wait::Forever);
    }
    match parse(text) {
        Ok(Duration::ZERO) => Ok(Wait::No),
        Ok(budget) => Ok(Wait::For(budget)),
        Err(why) => Err(format!("{why}; or 0, or forever")),
    }
}

/// Writes a duration for people: one decimal below ten seconds, whole units above.
pub(crate) fn show(d: Duration) -> String {
    let (s, ms) = (d.as_secs(), d.subsec_millis());
    match s {
        0 => format!("{ms}ms"),
        1..=9 if ms >= 100 => format!("{s}.{}s", ms / 100),
        1..=119 => format!("{s}s"),
        120..=7199 => format!("{}m{}s", s / 60, s % 60),
        _ => format!("{}h{}m", s / 3600, s % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_with_units_are_read() {
        for (text, millis) in [
            ("250ms", 250),
            ("30s", 30_000),
            ("1h30m", 5_400_000),
            ("1m 30s", 90_000),
            ("1d", 86_400_000),
            (" 2 s ", 2000),
            ("0", 0),
            ("0s", 0),
        ] {
            assert_eq!(parse(text), Ok(Duration::from_millis(millis)), "{text:?}");
        }
        assert_eq!(parse_wait("forever"), Ok(Wait::Forever));
        assert_eq!(parse_wait("0"), Ok(Wait::No));
        assert_eq!(parse_wait("10s"), Ok(Wait::For(Duration::from_secs(10))));
    }

    #[test]
    fn a_bare_number_is_refused_with_what_to_write() {
        assert!(parse("10").unwrap_err().contains("write 10s for seconds"));
        assert!(parse("1m30").unwrap_err().contains("unit is missing"));
    }

    #[test]
    fn what_is_not_a_duration_is_refused() {
        for text in ["", "s", "-1s", "1.5s", "1x", "30s1m", "1s1s", "99999999999999999999s", "é", "1 000s"] {
            assert!(parse(text).is_err(), "{text:?} was read");
        }
    }
}
