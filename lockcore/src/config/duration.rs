//! Durations in serde formats: text with a unit, for optional fields.

use std::{fmt, time::Duration};

use serde::{Deserialize, Deserializer, Serializer, de};

use crate::text::{parse_duration, show_duration};

pub(super) fn serialize<S: Serializer>(
    duration: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match duration {
        Some(duration) => serializer.collect_str(&show_duration(*duration)),
        None => serializer.serialize_none(),
    }
}

pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    Ok(Option::<Text>::deserialize(deserializer)?.map(|text| text.0))
}

struct Text(Duration);

impl<'de> Deserialize<'de> for Text {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // `any`, so that a number is met as a number and refused as one.
        deserializer.deserialize_any(Reader).map(Text)
    }
}

struct Reader;

impl de::Visitor<'_> for Reader {
    type Value = Duration;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a duration with a unit, like \"30s\" or \"250ms\"")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Duration, E> {
        parse_duration(text).map_err(|error| E::custom(error.message()))
    }
}
