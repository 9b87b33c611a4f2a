//! The cases, one file a topic. The ids are names: letters stand for topics, and an id
//! keeps its meaning.

#![deny(dead_code)]

mod acquire;
mod cancel;
mod clocks;
mod config;
mod expiry;
mod faults;
mod lost_replies;
mod migration;
mod names;
mod operators;
mod ownership;
mod partition;
mod pause;
mod renewal;
mod scale;
mod servers;
mod soak;
mod stale_fence;
mod waiting;

use crate::case::Case;

/// Lists all cases, topic by topic.
pub(crate) fn all() -> impl Iterator<Item = &'static Case> {
    [
        acquire::CASES,
        ownership::CASES,
        expiry::CASES,
        pause::CASES,
        stale_fence::CASES,
        renewal::CASES,
        waiting::CASES,
        cancel::CASES,
        lost_replies::CASES,
        partition::CASES,
        faults::CASES,
        servers::CASES,
        soak::CASES,
        clocks::CASES,
        config::CASES,
        names::CASES,
        scale::CASES,
        operators::CASES,
        migration::CASES,
    ]
    .into_iter()
    .flatten()
}
