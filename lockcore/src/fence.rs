//! The number that orders holders, and the stamp that travels with a write.

use std::{fmt, num::NonZeroI64, str::FromStr};

use crate::{
    error::{Error, ErrorKind, Result},
    owner::OwnerDigest,
};

/// Orders the holders of one name: positive, fits a signed 64-bit column, grows with every grant.
///
/// Gaps are normal. Fences of different names, or of stores between which a lock was moved without the bridge,
/// do not compare.
///
/// # Source
/// M. Kleppmann, "How to do distributed locking" (2016): the fencing token, checked by the resource.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Fence(NonZeroI64);

impl Fence {
    /// The smallest fence.
    pub const MIN: Fence = Fence(NonZeroI64::new(1).expect("one is not zero"));
    /// The largest fence.
    pub const MAX: Fence = Fence(NonZeroI64::MAX);

    /// Accepts a positive number.
    ///
    /// # Errors
    /// `Invalid` for zero and below.
    pub fn new(number: i64) -> Result<Self> {
        match NonZeroI64::new(number) {
            Some(n) if number > 0 => Ok(Self(n)),
            _ => Err(Error::new(
                ErrorKind::Invalid,
                format!("a fence is a positive 63-bit number, not {number}"),
            )),
        }
    }

    /// Returns the number.
    pub const fn get(self) -> i64 {
        self.0.get()
    }
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "fence {}", self.0)
    }
}

impl FromStr for Fence {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        text.parse::<i64>()
            .map_err(|e| Error::new(ErrorKind::Invalid, format!("{text:?} is not a fence")).with_source(e))
            .and_then(Self::new)
    }
}

/// Fence and owner digest: what a resource compares and what travels. Text form `42.9f3c52d1a07be664`.
///
/// The digest breaks the tie between equal fences, which a store that lost acknowledged writes may hand out.
///
/// # Example
/// ```
/// use lockcore::Stamp;
///
/// let stamp: Stamp = "42.9f3c52d1a07be664".parse()?;
/// assert_eq!(stamp.fence.get(), 42);
/// assert_eq!(stamp.to_string(), "42.9f3c52d1a07be664");
/// # Ok::<(), lockcore::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Stamp {
    /// The order of the grant.
    pub fence: Fence,
    /// Whose grant it is.
    pub owner: OwnerDigest,
}

impl Stamp {
    /// Joins the two halves, for a resource that keeps two columns.
    pub fn new(fence: Fence, owner: OwnerDigest) -> Self {
        Self { fence, owner }
    }
}

impl fmt::Display for Stamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.fence, self.owner)
    }
}

impl FromStr for Stamp {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let Some((fence, owner)) = text.split_once('.') else {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("{text:?} is not a stamp; one looks like 42.9f3c52d1a07be664"),
            ));
        };
        Ok(Self::new(fence.parse()?, owner.parse()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fences_are_positive_and_reach_the_column_limit() {
        assert!(Fence::new(0).is_err());
        assert!(Fence::new(-1).is_err());
        assert!(Fence::new(i64::MIN).is_err());
        assert_eq!(Fence::new(i64::MAX).unwrap(), Fence::MAX);
        assert_eq!(Fence::new(1).unwrap(), Fence::MIN);
        assert!("9223372036854775808".parse::<Fence>().is_err(), "an overflow is an error, never a wrap");
    }

    #[test]
    fn stamps_survive_their_text_form() {
        for text in ["1.0000000000000000", "9223372036854775807.ffffffffffffffff"] {
            assert_eq!(text.parse::<Stamp>().unwrap().to_string(), text);
        }
        for text in [
            "",
            "1",
            "1.",
            ".00",
            "0.0000000000000000",
            "1.000000000000000",
            "1.00000000000000zz",
            "1.+000000000000000",
        ] {
            assert_eq!(text.parse::<Stamp>().unwrap_err().kind(), ErrorKind::Invalid, "{text:?}");
        }
    }
}
