//! Durations on the command line, and how they are shown to people.

use std::time::Duration;

use lockcore::text::parse_duration;

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

impl From<Duration> for Wait {
    fn from(budget: Duration) -> Self {
        if budget.is_zero() { Self::No } else { Self::For(budget) }
    }
}

/// Reads `250ms`, `30s`, `1h30m`, `1m 30s`, or `0`.
///
/// # Errors
/// A sentence that says what to write.
pub fn parse(text: &str) -> Result<Duration, String> {
    parse_duration(text).map_err(|error| error.message().to_owned())
}

/// Reads a wait budget: `0`, a duration, or `forever`.
///
/// # Errors
/// As [`parse`].
pub fn parse_wait(text: &str) -> Result<Wait, String> {
    if text.trim() == "forever" {
        return Ok(Wait::Forever);
    }
    parse(text).map(Wait::from).map_err(|why| format!("{why}; or 0, or forever"))
}

/// Writes a duration for people: rounded down to what they want to know.
pub(crate) fn show(d: Duration) -> String {
    let (s, ms) = (d.as_secs(), d.subsec_millis());
    match s {
        0 => format!("{ms}ms"),
        1..=9 if ms >= 100 => format!("{s}.{}s", ms / 100),
        1..=119 => format!("{s}s"),
        120..=7199 if s % 60 == 0 => format!("{}m", s / 60),
        120..=7199 => format!("{}m{}s", s / 60, s % 60),
        _ if s % 3600 < 60 => format!("{}h", s / 3600),
        _ => format!("{}h{}m", s / 3600, s % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wait_is_nothing_a_duration_or_forever() {
        assert_eq!(parse_wait("forever"), Ok(Wait::Forever));
        assert_eq!(parse_wait("0"), Ok(Wait::No));
        assert_eq!(parse_wait("1m 30s"), Ok(Wait::For(Duration::from_secs(90))));
        assert!(parse_wait("10").unwrap_err().contains("\"10s\" for seconds"));
    }

    #[test]
    fn people_read_rounded_durations() {
        for (text, shown) in [
            ("250ms", "250ms"),
            ("1s500ms", "1.5s"),
            ("30s", "30s"),
            ("2m5s", "2m5s"),
            ("2h", "2h"),
            ("3h20m", "3h20m"),
        ] {
            assert_eq!(show(parse(text).unwrap()), shown);
        }
    }
}
