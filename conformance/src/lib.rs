//! Conformance suite for lock backends: records what happens, and judges it.

#![forbid(unsafe_code)]

pub mod history;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
