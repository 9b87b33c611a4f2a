//! Histories: each property with a bad history and its nearest good neighbour, random ones, recorded ones.

#![forbid(unsafe_code)]

mod application;
mod drawing;
mod metamorphic;
mod properties;
mod random;
mod recording;
mod script;
mod verdicts;
