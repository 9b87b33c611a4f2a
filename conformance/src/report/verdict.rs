//! The words for what a case found. There are seven, and `not run` is never a pass.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

use crate::history::Property;

/// What became of one case on one profile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
#[non_exhaustive]
pub enum Verdict {
    /// The promise was kept.
    Holds,
    /// The case expects these properties to break; they did, and the resource stayed right.
    Breaks(Vec<Property>),
    /// These properties may break here; a run may show it or not.
    MayBreak(Vec<Property>),
    /// The backend refuses what the case asks, by a typed error, and the case checked that.
    Unsupported,
    /// The case does not apply to this store, by design.
    NotApplicable,
    /// The case could not be run here. Never a pass.
    NotRun,
    /// Something else than what is expected.
    Fails,
}

impl Verdict {
    /// Ranks verdicts for a summary: the worse, the greater. What ran says more than what did not.
    pub fn rank(&self) -> u8 {
        match self {
            Self::NotApplicable => 0,
            Self::NotRun => 1,
            Self::Unsupported => 2,
            Self::Holds => 3,
            Self::MayBreak(_) => 4,
            Self::Breaks(_) => 5,
            Self::Fails => 6,
        }
    }

    /// Returns the word without the properties.
    pub fn word(&self) -> &'static str {
        match self {
            Self::Holds => "holds",
            Self::Breaks(_) => "breaks",
            Self::MayBreak(_) => "may break",
            Self::Unsupported => "unsupported",
            Self::NotApplicable => "n/a",
            Self::NotRun => "not run",
            Self::Fails => "FAILS",
        }
    }

    /// Says whether the case was put to the test.
    pub fn ran(&self) -> bool {
        !matches!(self, Self::NotApplicable | Self::NotRun)
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.word())?;
        if let Self::Breaks(properties) | Self::MayBreak(properties) = self {
            let ids: Vec<_> = properties.iter().map(|p| p.id()).collect();
            write!(f, " ({})", ids.join(", "))?;
        }
        Ok(())
    }
}

impl FromStr for Verdict {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (word, inside) = match text.trim().strip_suffix(')').and_then(|t| t.split_once(" (")) {
            Some((word, inside)) => (word, inside),
            None => (text.trim(), ""),
        };
        let properties = || {
            let ids = inside.split(',').map(|id| id.trim().parse::<Property>());
            ids.collect::<Result<Vec<_>, _>>()
        };
        match word {
            "breaks" => Ok(Self::Breaks(properties()?)),
            "may break" => Ok(Self::MayBreak(properties()?)),
            _ if !inside.is_empty() => Err(format!("{text:?} is not a verdict")),
            "holds" => Ok(Self::Holds),
            "unsupported" => Ok(Self::Unsupported),
            "n/a" => Ok(Self::NotApplicable),
            "not run" => Ok(Self::NotRun),
            "FAILS" => Ok(Self::Fails),
            _ => Err(format!("{text:?} is not a verdict")),
        }
    }
}

impl From<Verdict> for String {
    fn from(verdict: Verdict) -> Self {
        verdict.to_string()
    }
}

impl TryFrom<String> for Verdict {
    type Error = String;
    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_as_they_are_written() {
        for verdict in [
            Verdict::Holds,
            Verdict::Breaks(vec![Property::S1, Property::S2]),
            Verdict::MayBreak(vec![Property::L1]),
            Verdict::Unsupported,
            Verdict::NotApplicable,
            Verdict::NotRun,
            Verdict::Fails,
        ] {
            assert_eq!(verdict.to_string().parse(), Ok(verdict));
        }
        for wrong in ["", "hold", "holds (S2)", "breaks", "breaks ()", "breaks (S99)", "pass"] {
            assert!(wrong.parse::<Verdict>().is_err(), "{wrong}");
        }
    }
}
