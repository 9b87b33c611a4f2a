//! How durations are written in files, on command lines and in messages, and how labels are shown.

use std::{fmt, time::Duration};

use crate::error::{Error, ErrorKind, Result};

const UNITS: [(&str, u128); 7] = [
    ("d", 86_400_000_000_000),
    ("h", 3_600_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1_000),
    ("ns", 1),
];

/// Reads a duration: whole numbers with units, largest unit first, like `30s`, `250ms`, `1h30m` or `1m 30s`.
///
/// # Units
/// `d`, `h`, `m`, `s`, `ms`, and `us`, `ns` for completeness. A bare number is refused, because people disagree about
/// its unit; a bare `0` is not, because they agree.
///
/// # Errors
/// `Invalid`, with what to write instead.
///
/// # Example
/// ```
/// use std::time::Duration;
/// use lockcore::text::{parse_duration, show_duration};
///
/// assert_eq!(parse_duration("1m 30s")?, Duration::from_secs(90));
/// assert_eq!(show_duration(Duration::from_secs(90)).to_string(), "1m30s");
/// assert!(parse_duration("30").unwrap_err().to_string().contains("\"30s\""));
/// # Ok::<(), lockcore::Error>(())
/// ```
pub fn parse_duration(text: &str) -> Result<Duration> {
    let trimmed = text.trim();
    if trimmed == "0" {
        return Ok(Duration::ZERO);
    }
    if !trimmed.is_empty() && trimmed.bytes().all(|b| b.is_ascii_digit()) {
        return Err(invalid(format!(
            "{text:?} has no unit; write {:?} for seconds or {:?} for milliseconds",
            format!("{trimmed}s"),
            format!("{trimmed}ms"),
        )));
    }
    let malformed = || {
        invalid(format!(
            "{text:?} is not a duration; write a number and a unit (ms, s, m, h, d), like \"30s\" or \"1h30m\""
        ))
    };
    let too_long = || invalid(format!("the duration {text:?} is too long"));

    let mut nanos: u128 = 0;
    let mut larger_unit = u128::MAX;
    let mut rest = trimmed;
    loop {
        let number_end = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(malformed)?;
        let (number, tail) = rest.split_at(number_end);
        let unit_end = tail.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(unit_end);
        let (_, unit) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(malformed)?;
        if number.is_empty() || *unit >= larger_unit {
            return Err(malformed());
        }
        larger_unit = *unit;
        let number: u128 = number.parse().map_err(|_| too_long())?;
        nanos = number.checked_mul(*unit).and_then(|n| nanos.checked_add(n)).ok_or_else(too_long)?;
        rest = tail.trim_start_matches(' ');
        if rest.is_empty() {
            break;
        }
    }
    let seconds = u64::try_from(nanos / 1_000_000_000).map_err(|_| too_long())?;
    Ok(Duration::new(seconds, (nanos % 1_000_000_000) as u32))
}

/// Shows a duration in the form that [`parse_duration`] reads: `1m30s`, `250ms`, `0s`. Nothing is rounded.
pub fn show_duration(duration: Duration) -> impl fmt::Display {
    Shown(duration)
}

/// Shows a label to people. Control characters, which could forge lines and command terminals, are escaped: whoever wrote it may
/// have kept to no rule.
pub fn show_label(label: &str) -> impl fmt::Display {
    Label(label)
}

struct Label<'a>(&'a str);

impl fmt::Display for Label<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use fmt::Write;
        self.0.chars().try_for_each(|c| match c.is_control() {
            true => write!(f, "{}", c.escape_default()),
            false => f.write_char(c),
        })
    }
}

struct Shown(Duration);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0.as_nanos();
        if rest == 0 {
            return f.write_str("0s");
        }
        for (name, unit) in UNITS {
            if rest >= unit {
                write!(f, "{}{name}", rest / unit)?;
                rest %= unit;
            }
        }
        Ok(())
    }
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_label_forges_no_line_and_commands_no_terminal() {
        let shown = show_label("wéb\nstamp 1\u{1b}]0;owned\u{7}").to_string();
        assert_eq!(shown, "wéb\\nstamp 1\\u{1b}]0;owned\\u{7}");
    }

    #[test]
    fn durations_are_numbers_with_units() {
        for (text, millis) in [
            ("0", 0),
            ("0s", 0),
            ("250ms", 250),
            ("30s", 30_000),
            ("1m30s", 90_000),
            ("1m 30s", 90_000),
            (" 90s ", 90_000),
            ("1h30m", 5_400_000),
            ("2d", 172_800_000),
            ("1d1h1m1s1ms", 90_061_001),
            ("007s", 7_000),
        ] {
            assert_eq!(parse_duration(text).unwrap(), Duration::from_millis(millis), "{text:?}");
        }
    }

    #[test]
    fn what_is_not_a_duration_is_refused_with_what_to_write() {
        for (text, says) in [
            ("30", "\"30\" has no unit; write \"30s\" for seconds or \"30ms\" for milliseconds"),
            (
                "30 sec",
                "\"30 sec\" is not a duration; write a number and a unit (ms, s, m, h, d), like \"30s\"",
            ),
            ("", "is not a duration"),
            (" ", "is not a duration"),
            ("s", "is not a duration"),
            ("1.5s", "is not a duration"),
            ("-1s", "is not a duration"),
            ("1 s", "is not a duration"),
            ("1s1h", "is not a duration"),
            ("1s1s", "is not a duration"),
            ("1m30", "is not a duration"),
            ("1M", "is not a duration"),
            ("1s,", "is not a duration"),
            ("\u{0663}s", "is not a duration"),
            ("99999999999999999999d", "too long"),
            ("340282366920938463463374607431768211456s", "too long"),
        ] {
            let error = parse_duration(text).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.to_string().contains(says), "{text:?}: {error}");
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_the_reader_panic(text in "\\PC*|[0-9dhmsun ]*") {
            let _ = parse_duration(&text);
        }

        #[test]
        fn what_is_shown_is_read_back(seconds: u64, nanos in 0u32..1_000_000_000) {
            let duration = Duration::new(seconds, nanos);
            prop_assert_eq!(parse_duration(&show_duration(duration).to_string()).unwrap(), duration);
        }
    }
}
