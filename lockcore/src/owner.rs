//! Who holds a lock: the secret, and the digest that may be shown.

use std::{fmt, str::FromStr};

use crate::error::{Error, ErrorKind, Result};

/// Identifies one acquisition: 128 random bits, kept across the retries of that acquisition and never reused.
///
/// A secret, because whoever has it can release. It lives behind the backend door; `Debug` prints the digest.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Owner([u8; 16]);

impl Owner {
    /// Draws a new owner from the system's random numbers.
    pub fn random() -> Self {
        let mut bytes = [0; 16];
        // The system's generator does not fail on a running system; a predictable owner would be worse than a panic.
        getrandom::fill(&mut bytes).expect("the system has random numbers");
        Self(bytes)
    }

    /// Takes back what [`expose`](Self::expose) gave, for a backend that reads its records.
    pub fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Returns the secret, for a backend to store and compare.
    pub fn expose(&self) -> &[u8; 16] {
        &self.0
    }

    /// Returns what may be stored and logged in the open.
    pub fn digest(&self) -> OwnerDigest {
        // 128 bits folded to 64: 2^64 owners share each digest, so a digest says nothing about which of them it is.
        let low = u64::from_le_bytes(self.0[..8].try_into().expect("eight bytes"));
        let high = u64::from_le_bytes(self.0[8..].try_into().expect("eight bytes"));
        OwnerDigest(mix(mix(low ^ 0x9e37_79b9_7f4a_7c15).wrapping_add(mix(high ^ 0xc2b2_ae3d_27d4_eb4f))))
    }
}

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "owner {}", self.digest())
    }
}

/// The public face of an owner: 64 bits, 16 hex digits. Tells holders apart, proves nothing.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OwnerDigest(u64);

impl OwnerDigest {
    /// Returns the bits for a signed 64-bit column.
    pub fn to_i64(self) -> i64 {
        self.0 as i64
    }

    /// Reads them back.
    pub fn from_i64(bits: i64) -> Self {
        Self(bits as u64)
    }
}

impl fmt::Display for OwnerDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for OwnerDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for OwnerDigest {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        let well_formed = text.len() == 16 && text.bytes().all(|b| b.is_ascii_hexdigit());
        match u64::from_str_radix(text, 16) {
            Ok(bits) if well_formed => Ok(Self(bits)),
            _ => Err(Error::new(
                ErrorKind::Invalid,
                format!("{text:?} is not an owner digest (16 hex digits)"),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owners_and_their_digests_are_distinct() {
        let mut owners = std::collections::HashSet::new();
        let mut digests = std::collections::HashSet::new();
        for _ in 0..100_000 {
            let owner = Owner::random();
            assert!(owners.insert(owner));
            assert!(digests.insert(owner.digest()), "two of 100,000 owners share a digest");
        }
    }

    #[test]
    fn debug_shows_the_digest_only() {
        let owner = Owner::from_bytes(*b"sixteen byte key");
        let shown = format!("{owner:?}");
        assert_eq!(shown, format!("owner {}", owner.digest()));
        assert!(!shown.contains("7369787465656e"), "the secret shows in {shown}");
        assert_eq!(owner.digest().to_string().parse::<OwnerDigest>().unwrap(), owner.digest());
        assert_eq!(OwnerDigest::from_i64(owner.digest().to_i64()), owner.digest());
    }
}
