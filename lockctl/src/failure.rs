//! Why a sub-command ends with a code of our own, and the sentence that says so.

use std::fmt;

use crate::exit;

/// A code and a sentence.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: u8,
    pub(crate) sentence: String,
}

impl Failure {
    /// Joins the two.
    pub(crate) fn new(code: u8, sentence: impl Into<String>) -> Self {
        Self { code, sentence: sentence.into() }
    }

    /// Wrong use, bad configuration, our own failure: 125.
    pub(crate) fn usage(sentence: impl Into<String>) -> Self {
        Self::new(exit::USAGE, sentence)
    }

    /// What a store said, with the reasons below it.
    pub(crate) fn store(error: &lockcore::Error, store: impl fmt::Display) -> Self {
        Self::new(exit::of_error(error), format!("{} (store {store})", with_sources(error)))
    }
}

/// Writes an error with everything below it that adds something.
pub(crate) fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut below = error.source();
    while let Some(cause) = below {
        let said = cause.to_string();
        if !text.contains(&said) {
            text.push_str(": ");
            text.push_str(&said);
        }
        below = cause.source();
    }
    text
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::usage(error.to_string())
    }
}
