//! Histories: recording what clients, stores and resources did, and judging it afterwards.
//!
//! A [`Recorder`] collects [`Event`]s, in memory and on disk; a [`History`] reads the files of several processes
//! together; [`check`] judges it under [`Rules`] and returns a [`Report`], which names each broken [`Property`] with
//! the events that break it. [`timeline`] draws it for people. [`wgl`] searches small histories exhaustively and
//! keeps the fast checkers honest.
//!
//! # Example
//! ```
//! use lockcore_conformance::history::{Answer, Call, History, Recorder, Rules, check};
//! # use std::time::Duration;
//! # use lockcore::{Stamp, backend::{BootClock, Owner}, Fence};
//! # let owner = Owner::random().digest();
//! let recorder = Recorder::new();
//! let alice = recorder.client("alice");
//! let ttl = Duration::from_secs(5);
//!
//! let op = alice.invoke("order/42", Call::Acquire { owner, ttl, wait: None });
//! op.sent();
//! let deadline = BootClock::read().saturating_add(ttl / 2);
//! op.ok(Answer::granted(Stamp::new(Fence::MIN, owner), deadline, Some(ttl)));
//!
//! let report = check(&recorder.history(), &Rules::default());
//! assert!(report.passed(), "{report}");
//! ```

mod check;
mod event;
mod file;
mod property;
mod recorder;
mod report;
mod rules;
mod stream;
pub mod timeline;

pub mod wgl;
mod wire;

pub use check::check;
pub use event::{
    Access, Answer, Call, ClockKind, Ended, Event, FaultClass, Header, Phase, Seen, Verdict, What, Why,
};
pub use file::{History, HistoryError};
pub use property::Property;
pub use recorder::{ClientLog, FaultLog, Pending, Recorder, ResourceLog, StallMeter};
pub use report::{Judged, Outcome, Report, Violation};
pub use rules::{Bounds, Demand, Expect, Rules};
pub use stream::StreamLog;
