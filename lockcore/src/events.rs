//! What a client does, as it happens: for a history, a dashboard, an application's own reactions.

use std::time::Duration;

use crate::{
    deadline::Moment,
    error::ErrorKind,
    fence::Fence,
    lease::{LostReason, Released},
    name::LockName,
    owner::OwnerDigest,
};

/// One thing that happened to one acquisition.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Event {
    /// When, on the client's clock: read before a request leaves and after its answer was taken.
    pub at: Moment,
    /// The lock.
    pub lock: LockName,
    /// Which acquisition.
    pub owner: OwnerDigest,
    /// What.
    pub kind: EventKind,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventKind {
    /// Somebody asked for the lock. `wait`: `None` for a try.
    AcquireStarted {
        /// The TTL asked for.
        ttl: Duration,
        /// The budget.
        wait: Option<Duration>,
    },
    /// A request is about to leave for the store.
    Asked {
        /// Counts from 1 for this owner.
        attempt: u32,
    },
    /// The store granted it.
    Granted {
        /// The fence.
        fence: Fence,
        /// The local deadline.
        deadline: Moment,
        /// From the start of the acquire.
        waited: Duration,
    },
    /// The acquire ended without a grant. `Unknown` means that the store may still show one for a while.
    NotGranted {
        /// How.
        kind: ErrorKind,
    },
    /// A renewal is about to leave.
    RenewStarted {
        /// The fence.
        fence: Fence,
    },
    /// The store confirmed it.
    Renewed {
        /// The fence.
        fence: Fence,
        /// The deadline that now stands.
        deadline: Moment,
        /// From sending to answer.
        took: Duration,
    },
    /// The store did not confirm it. `Lost` is final, anything else is tried again.
    RenewFailed {
        /// The fence.
        fence: Fence,
        /// How.
        kind: ErrorKind,
    },
    /// The holder was told that the lease is over.
    Lost {
        /// The fence.
        fence: Fence,
        /// Why.
        reason: LostReason,
    },
    /// A release is about to leave.
    ReleaseStarted {
        /// The fence.
        fence: Fence,
    },
    /// The store answered it.
    Released {
        /// The fence.
        fence: Fence,
        /// What it found.
        released: Released,
    },
    /// The store did not answer it; it goes on in the background until the deadline.
    ReleaseFailed {
        /// The fence.
        fence: Fence,
        /// How.
        kind: ErrorKind,
    },
    /// What an acquire without an answer may have left was cleared away.
    Abandoned,
    /// Renewals run later than planned: the runtime is busy.
    Late {
        /// By how much.
        by: Duration,
    },
    /// This reader was too slow.
    Missed {
        /// So many events.
        count: u64,
    },
}

impl Event {
    pub(crate) fn missed(count: u64) -> Self {
        // No lock is called this: the reader missed events of several.
        let lock = LockName::parse("missed").expect("a constant, valid name");
        Self {
            at: Moment::from_nanos(0),
            lock,
            owner: OwnerDigest::from_i64(0),
            kind: EventKind::Missed { count },
        }
    }
}
