//! What a service grants, and what can be seen of it from outside.

use std::{fmt, time::Duration};

use crate::{
    deadline::Moment,
    fence::{Fence, Stamp},
    name::LockName,
    owner::{Owner, OwnerDigest},
    text::show_label,
};

/// What the service granted: who, until when, and under which fence.
///
/// Made only by [`AcquireRequest::granted`](crate::backend::AcquireRequest::granted) and
/// [`Call::renewed`](crate::backend::Call::renewed).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
#[must_use = "a dropped lease still blocks every waiter until its deadline"]
pub struct Lease {
    /// The lock this lease is on.
    pub name: LockName,
    /// The holder: one acquisition, never reused. Secret.
    pub owner: Owner,
    /// Stop using the resource by then. Counted from before the request was sent, on a clock that runs during
    /// suspend: it may come early, never late.
    pub deadline: Moment,
    /// Greater than the fence of every earlier lease on `name`.
    pub fence: Fence,
}

impl Lease {
    pub(crate) fn new(name: LockName, owner: Owner, deadline: Moment, fence: Fence) -> Self {
        Self { name, owner, deadline, fence }
    }

    /// Returns what travels to the resource.
    pub fn stamp(&self) -> Stamp {
        Stamp::new(self.fence, self.owner.digest())
    }
}

/// Why a lease is over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LostReason {
    /// The guard was released or dropped on purpose: what a watcher sees, no incident.
    Released,
    /// The deadline (less the stop margin) passed before a renewal was confirmed. Until the deadline nobody else
    /// had it, as far as the store keeps its promises.
    Expired,
    /// The store shows another holder, or none. Somebody else may have had it at the same time.
    Taken,
    /// The session that carried it is gone.
    SessionEnded,
    /// An operator broke it.
    Broken,
    /// It reached its longest hold.
    HoldLimit,
    /// The client was closed, or the application shuts down.
    Closed,
}

impl LostReason {
    pub(crate) const fn sentence(self) -> &'static str {
        match self {
            Self::Released => "the lease was released",
            Self::Expired => "the deadline passed before a renewal was confirmed",
            Self::Taken => "the store shows another holder, or none",
            Self::SessionEnded => "the session that carried the lease is gone",
            Self::Broken => "an operator broke the lock",
            Self::HoldLimit => "the lease reached its longest hold",
            Self::Closed => "the client was closed, or the application shuts down",
        }
    }

    /// Says whether the store itself told that the lease is over, so that somebody else may already hold the lock.
    pub fn is_gone_from_store(self) -> bool {
        matches!(self, Self::Taken | Self::SessionEnded | Self::Broken)
    }
}

impl fmt::Display for LostReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.sentence())
    }
}

/// Who has it, seen from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Holder {
    /// Digest of the owner.
    pub owner: OwnerDigest,
    /// The fence it got.
    pub fence: Fence,
    /// What is left on the server.
    pub remaining: Duration,
    /// How long it has been held, where the store knows.
    pub since: Option<Duration>,
    /// What the holder calls itself, where the store keeps it.
    pub label: Option<String>,
}

impl Holder {
    /// Starts from what every store knows.
    pub fn new(owner: OwnerDigest, fence: Fence, remaining: Duration) -> Self {
        Self { owner, fence, remaining, since: None, label: None }
    }

    /// Adds what this store knows besides.
    #[must_use]
    pub fn with(mut self, add: impl FnOnce(&mut Self)) -> Self {
        add(&mut self);
        self
    }

    /// Returns fence and owner digest: what `break` expects.
    pub fn stamp(&self) -> Stamp {
        Stamp::new(self.fence, self.owner)
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.label {
            Some(label) => write!(f, "held by {} ({})", show_label(label), self.owner)?,
            None => write!(f, "held by {}", self.owner)?,
        }
        write!(f, " with {:?}, ", self.fence)?;
        match self.remaining {
            d if d < Duration::from_secs(10) => write!(f, "{:.1} s left", d.as_secs_f64()),
            d => write!(f, "{} s left", d.as_secs()),
        }
    }
}

/// One name, seen from outside. `Default`; fields are set one by one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockState {
    /// The holder, if any.
    pub holder: Option<Holder>,
    /// The highest fence ever granted, also while nobody holds.
    pub last_fence: Option<Fence>,
    /// Waiters in the store, where it has a queue.
    pub waiters: Option<u32>,
}

impl LockState {
    /// Sets fields in one expression.
    #[must_use]
    pub fn with(mut self, set: impl FnOnce(&mut Self)) -> Self {
        set(&mut self);
        self
    }
}

/// What a release found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Released {
    /// This call ended the lease.
    Now,
    /// It was over already.
    AlreadyOver,
}

/// How an unknown acquire turned out.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Resolution {
    /// It was granted and is live.
    Adopted(Lease),
    /// It was not, and never will be.
    Gone,
}

/// What a forced break removed, and the floor that every later grant is above.
///
/// A break is itself a grant: its floor lies above the broken fence and below the next one, so an operator can write
/// it to the resource and shut the old holder out before anybody acquires.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Broken {
    /// The holder that was cut off.
    pub holder: Option<Holder>,
    /// The floor.
    pub floor: Fence,
}

impl Broken {
    /// Joins the two.
    pub fn new(holder: Option<Holder>, floor: Fence) -> Self {
        Self { holder, floor }
    }
}
