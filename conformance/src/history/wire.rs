//! How times, fences and owners are written in JSON: numbers of nanoseconds, a number, hex digits.

macro_rules! form {
    ($name:ident, $optional:ident, $of:ty, $repr:ty, $to:expr, $from:expr) => {
        pub(super) mod $name {
            use super::*;
            pub(in crate::history) fn serialize<S: Serializer>(value: &$of, s: S) -> Result<S::Ok, S::Error> {
                let to: fn(&$of) -> $repr = $to;
                to(value).serialize(s)
            }
            pub(in crate::history) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<$of, D::Error> {
                let from: fn($repr) -> Result<$of, lockcore::Error> = $from;
                from(<$repr>::deserialize(d)?).map_err(D::Error::custom)
            }
        }
        pub(super) mod $optional {
            use super::*;
            pub(in crate::history) fn serialize<S: Serializer>(
                value: &Option<$of>,
                s: S,
            ) -> Result<S::Ok, S::Error> {
                let to: fn(&$of) -> $repr = $to;
                value.as_ref().map(to).serialize(s)
            }
            pub(in crate::history) fn deserialize<'de, D: Deserializer<'de>>(
                d: D,
            ) -> Result<Option<$of>, D::Error> {
                let from: fn($repr) -> Result<$of, lockcore::Error> = $from;
                <Option<$repr>>::deserialize(d)?.map(from).transpose().map_err(D::Error::custom)
            }
        }
    };
}

use std::time::Duration;

use lockcore::{Fence, OwnerDigest, Stamp, backend::Moment};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};

form!(moment, moment_option, Moment, u64, |m| m.as_nanos(), |n| Ok(Moment::from_nanos(n)));
form!(span, span_option, Duration, u64, |d| nanos(*d), |n| Ok(Duration::from_nanos(n)));
form!(fence, fence_option, Fence, i64, |f| f.get(), Fence::new);
form!(owner, owner_option, OwnerDigest, String, |o| o.to_string(), |t| t.parse());
form!(stamp, stamp_option, Stamp, String, |s| s.to_string(), |t| t.parse());

/// Returns nanoseconds, stopping at 584 years.
pub(super) fn nanos(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}
