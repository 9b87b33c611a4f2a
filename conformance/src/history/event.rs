//! What a history is made of: one event a line, three outcomes for every call.

use std::{collections::BTreeMap, fmt, str::FromStr, time::Duration};

use lockcore::{ErrorKind, Fence, LostReason, OwnerDigest, Released, Stamp, backend::Moment};
use serde::{Deserialize, Serialize};

use super::wire;

/// One thing that happened, seen from the side that recorded it.
///
/// # Shape
/// One JSON object a line: `{"ts":…,"pid":…,"client":"alice","key":"order/42","op":"4711-1","attempt":1,"ev":"ok",…}`.
/// The owner appears as its digest only.
///
/// # Units
/// Moments and durations are nanoseconds; moments count from boot, on a clock that runs during suspend. A stamp is
/// read immediately before a call leaves and immediately after it returned, so an interval is never too narrow.
/// Equal stamps count as concurrent.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// When.
    #[serde(with = "wire::moment")]
    pub ts: Moment,
    /// The process.
    pub pid: u32,
    /// Who, within the process; empty for the test bench itself.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub client: String,
    /// The lock, or the lock that guards the resource.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub key: String,
    /// The logical operation: unique in the run, the same for all transmissions of one call and for its recovery.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub op: String,
    /// Counts transmissions, from 1; 0 where nothing was transmitted.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub attempt: u32,
    /// What.
    #[serde(flatten)]
    pub what: What,
}

fn is_zero(n: &u32) -> bool {
    *n == 0
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "ev", rename_all = "snake_case")]
#[non_exhaustive]
pub enum What {
    /// A call begins.
    Invoke {
        /// Which.
        #[serde(flatten)]
        call: Call,
    },
    /// A request left the client.
    Sent {
        /// The stamp was taken when bytes passed, thus after the client read its own clock. Otherwise the client
        /// announced the request and read its clock a moment later.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        wire: bool,
    },
    /// A waiter is in the queue, confirmed by a look at the store.
    Queued,
    /// The call did what was asked.
    Ok {
        /// What came back.
        #[serde(flatten)]
        answer: Answer,
    },
    /// The call ended without effect, provably.
    Fail {
        /// Why.
        why: Why,
    },
    /// The call may have had its effect, or may have it later.
    Unknown {
        /// What the client saw.
        #[serde(default)]
        cause: String,
    },
    /// The application was told that its lease is over.
    Lost {
        /// The lease.
        #[serde(with = "wire::fence")]
        fence: Fence,
        /// Whose.
        #[serde(default, with = "wire::owner_option", skip_serializing_if = "Option::is_none")]
        owner: Option<OwnerDigest>,
        /// Why.
        why: Ended,
    },
    /// The resource judged an operation. Written by the resource, in its own order.
    Resource {
        /// Which resource, where a lock guards several.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        resource: String,
        /// The place in the resource's order.
        rseq: u64,
        /// What was presented.
        #[serde(with = "wire::stamp")]
        stamp: Stamp,
        /// Reading or writing.
        #[serde(default)]
        access: Access,
        /// The judgement.
        verdict: Verdict,
        /// The floor afterwards, where the resource told.
        #[serde(default, with = "wire::stamp_option", skip_serializing_if = "Option::is_none")]
        floor: Option<Stamp>,
        /// The value afterwards, where it is a number.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        value: Option<i64>,
    },
    /// A fault begins or ends.
    Fault {
        /// `pause`, `kill`, `cut`, `restart`, `delete`, … A `kill` of class A1 has no end that matters: its target
        /// never runs again.
        name: String,
        /// Whom it hits: the name of a client, a process as `pid 4711`, or a server.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        target: String,
        /// Which end.
        phase: Phase,
        /// What it can do to a promise.
        class: FaultClass,
        /// How it was seen to work.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        confirmed_by: String,
    },
    /// A look at the store on a connection that no fault touches.
    Probe {
        /// When the question left; `ts` is when the answer had come.
        #[serde(with = "wire::moment")]
        since: Moment,
        /// Who holds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        holder: Option<Seen>,
        /// What the holder has left on the server.
        #[serde(default, with = "wire::span_option", skip_serializing_if = "Option::is_none")]
        remaining: Option<Duration>,
        /// Records of this key beside the holder's: places in a queue, left-overs.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        residue: Option<u64>,
        /// All records and sessions of the library on the server.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        records: Option<u64>,
        /// The server's clock, in nanoseconds of its own count.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        server_time: Option<u64>,
        /// The highest fence that the store remembers.
        #[serde(default, with = "wire::fence_option", skip_serializing_if = "Option::is_none")]
        counter: Option<Fence>,
    },
    /// This process did not run for a while; found by the recorder itself.
    Stall {
        /// How long. The stall ends at `ts`.
        #[serde(with = "wire::span")]
        ns: Duration,
    },
    /// Events are missing here: a reader was too slow, or a line is torn.
    Missed {
        /// How many at least.
        count: u64,
    },
    /// Something for people.
    Note {
        /// What.
        text: String,
    },
}

/// What a client asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "verb", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Call {
    /// Take the lock.
    Acquire {
        /// For whom.
        #[serde(with = "wire::owner")]
        owner: OwnerDigest,
        /// For how long.
        #[serde(with = "wire::span")]
        ttl: Duration,
        /// The budget; `None`: try once.
        #[serde(default, with = "wire::span_option", skip_serializing_if = "Option::is_none")]
        wait: Option<Duration>,
    },
    /// Find out how an acquire without an answer ended, under the same `op`.
    Resolve,
    /// Move a deadline.
    Renew {
        /// Of which lease.
        #[serde(with = "wire::fence")]
        fence: Fence,
        /// Whose.
        #[serde(default, with = "wire::owner_option", skip_serializing_if = "Option::is_none")]
        owner: Option<OwnerDigest>,
        /// For how long, from now.
        #[serde(with = "wire::span")]
        ttl: Duration,
    },
    /// End a lease.
    Release {
        /// Which.
        #[serde(with = "wire::fence")]
        fence: Fence,
        /// Whose.
        #[serde(default, with = "wire::owner_option", skip_serializing_if = "Option::is_none")]
        owner: Option<OwnerDigest>,
    },
    /// Take the lock from its holder, as an operator.
    Break {
        /// Who is expected to hold.
        #[serde(with = "wire::stamp")]
        stamp: Stamp,
    },
    /// Give up the call with the same `op`.
    Cancel,
    /// Ask the guard whether the lease may still be used.
    Check {
        /// Which.
        #[serde(with = "wire::fence")]
        fence: Fence,
        /// Whose.
        #[serde(default, with = "wire::owner_option", skip_serializing_if = "Option::is_none")]
        owner: Option<OwnerDigest>,
    },
    /// Read the resource.
    Read {
        /// Under which fence.
        #[serde(with = "wire::fence")]
        fence: Fence,
    },
    /// Write the resource.
    Write {
        /// Under which fence.
        #[serde(with = "wire::fence")]
        fence: Fence,
        /// What.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        value: Option<i64>,
    },
    /// Close the client.
    Close,
}

/// What an `ok` brings; each call fills what it has.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Answer {
    /// Acquire, break: the fence.
    #[serde(default, with = "wire::fence_option", skip_serializing_if = "Option::is_none")]
    pub fence: Option<Fence>,
    /// Acquire: whose.
    #[serde(default, with = "wire::owner_option", skip_serializing_if = "Option::is_none")]
    pub owner: Option<OwnerDigest>,
    /// Acquire, renew: the local deadline that now stands.
    #[serde(default, with = "wire::moment_option", skip_serializing_if = "Option::is_none")]
    pub deadline: Option<Moment>,
    /// Acquire, renew: what the server granted, without a lock-delay.
    #[serde(default, with = "wire::span_option", skip_serializing_if = "Option::is_none")]
    pub ttl_eff: Option<Duration>,
    /// Acquire, renew: what the server said it has left.
    #[serde(default, with = "wire::span_option", skip_serializing_if = "Option::is_none")]
    pub remaining: Option<Duration>,
    /// Release: this call ended the lease (true), or it was over already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub released: Option<bool>,
    /// Check: the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub held: Option<bool>,
    /// Read, write: the value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<i64>,
}

impl Answer {
    /// Answers an acquire.
    pub fn granted(stamp: Stamp, deadline: Moment, ttl_eff: Option<Duration>) -> Self {
        Self {
            fence: Some(stamp.fence),
            owner: Some(stamp.owner),
            deadline: Some(deadline),
            ttl_eff,
            ..Self::default()
        }
    }

    /// Answers a renewal.
    pub fn renewed(deadline: Moment, ttl_eff: Option<Duration>) -> Self {
        Self { deadline: Some(deadline), ttl_eff, ..Self::default() }
    }

    /// Answers a release.
    pub fn released(released: Released) -> Self {
        Self { released: Some(released == Released::Now), ..Self::default() }
    }

    /// Answers a check.
    pub fn held(held: bool) -> Self {
        Self { held: Some(held), ..Self::default() }
    }
}

/// Why a call had no effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Why {
    /// Someone else has it.
    Held,
    /// The store does not show this very lease; it is over.
    Lost,
    /// A release found nothing of its own.
    NotHeld,
    /// The wait budget is used up.
    WaitTimeout,
    /// An argument is out of range.
    Invalid,
    /// This backend does not do that.
    Unsupported,
    /// Nothing reached the store.
    Unavailable,
    /// Too many waiters in the process.
    Overloaded,
    /// The client was closed.
    Closed,
    /// The store refused the credentials.
    Unauthorized,
    /// The set-up cannot keep what was asked.
    Misconfigured,
    /// The resource has seen a newer holder.
    Stale,
}

impl Why {
    /// Reads an error kind; `None` where the call may have had an effect.
    pub fn from_kind(kind: ErrorKind) -> Option<Self> {
        Some(match kind {
            ErrorKind::Held => Self::Held,
            ErrorKind::WaitTimeout => Self::WaitTimeout,
            ErrorKind::Lost => Self::Lost,
            ErrorKind::Unavailable => Self::Unavailable,
            ErrorKind::Overloaded => Self::Overloaded,
            ErrorKind::Closed => Self::Closed,
            ErrorKind::Unsupported => Self::Unsupported,
            ErrorKind::Invalid => Self::Invalid,
            ErrorKind::Unauthorized => Self::Unauthorized,
            ErrorKind::Misconfigured => Self::Misconfigured,
            // An answer that was refused for its fence, or none at all, may have left a grant behind. A kind that
            // is not known yet is taken for the worst.
            ErrorKind::FenceRegression | ErrorKind::Unknown => return None,
            _ => return None,
        })
    }

    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::Held => "held by another",
            Self::Lost => "lost",
            Self::NotHeld => "not held",
            Self::WaitTimeout => "wait budget used up",
            Self::Invalid => "invalid",
            Self::Unsupported => "unsupported",
            Self::Unavailable => "unavailable",
            Self::Overloaded => "overloaded",
            Self::Closed => "closed",
            Self::Unauthorized => "unauthorized",
            Self::Misconfigured => "misconfigured",
            Self::Stale => "stale",
        }
    }
}

/// Why a lease is over, as the application was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Ended {
    /// Released on purpose: no incident.
    Released,
    /// The deadline came before a renewal was confirmed.
    Expired,
    /// The store shows another holder, or none.
    Taken,
    /// The session is gone.
    SessionEnded,
    /// An operator broke it.
    Broken,
    /// The longest hold was reached.
    HoldLimit,
    /// The client was closed.
    Closed,
    /// Something newer than this recorder.
    Other,
}

impl From<LostReason> for Ended {
    fn from(reason: LostReason) -> Self {
        match reason {
            LostReason::Released => Self::Released,
            LostReason::Expired => Self::Expired,
            LostReason::Taken => Self::Taken,
            LostReason::SessionEnded => Self::SessionEnded,
            LostReason::Broken => Self::Broken,
            LostReason::HoldLimit => Self::HoldLimit,
            LostReason::Closed => Self::Closed,
            _ => Self::Other,
        }
    }
}

impl Ended {
    /// Says whether the holder ended it itself.
    pub fn on_purpose(self) -> bool {
        matches!(self, Self::Released | Self::HoldLimit | Self::Closed)
    }

    pub(crate) fn words(self) -> &'static str {
        match self {
            Self::Released => "released",
            Self::Expired => "expired",
            Self::Taken => "taken",
            Self::SessionEnded => "session ended",
            Self::Broken => "broken by an operator",
            Self::HoldLimit => "longest hold reached",
            Self::Closed => "client closed",
            Self::Other => "for another reason",
        }
    }
}

/// How the resource was used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Access {
    /// A read, or a touch that only raises the floor.
    Read,
    /// A write.
    #[default]
    Write,
}

/// What the resource said.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// New, and let through.
    Accepted,
    /// Let through before, not applied again.
    Duplicate,
    /// Refused: a newer holder has been here.
    Stale,
}

/// Which end of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// It begins.
    Begin,
    /// It is over.
    End,
}

/// What a fault can do to a promise: the contract says which promise must stand under which class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum FaultClass {
    /// A client pauses or dies; messages are lost, late, doubled; a partition.
    A1,
    /// A server stops, restarts or changes its leader and keeps what it acknowledged.
    A2,
    /// A server loses what it acknowledged.
    A3,
    /// A server's clock jumps.
    A4,
    /// A client's clock runs wrong beyond the drift margin, or was suspended on a clock that stops.
    A5,
    /// An administrator removes the record.
    A6,
}

impl FaultClass {
    /// Says whether the store itself may forget or drop a live lease.
    pub fn can_end_a_live_lease(self) -> bool {
        matches!(self, Self::A3 | Self::A4 | Self::A6)
    }
}

/// Who holds, as a probe saw it. Text form: `nobody`, a digest, or a stamp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// Nobody.
    Nobody,
    /// This owner; the fence was not to be seen.
    Owner(OwnerDigest),
    /// This owner under this fence.
    Stamp(Stamp),
}

impl Seen {
    /// Returns the owner, if somebody holds.
    pub fn owner(self) -> Option<OwnerDigest> {
        match self {
            Self::Nobody => None,
            Self::Owner(owner) => Some(owner),
            Self::Stamp(stamp) => Some(stamp.owner),
        }
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Nobody => f.write_str("nobody"),
            Self::Owner(owner) => owner.fmt(f),
            Self::Stamp(stamp) => stamp.fmt(f),
        }
    }
}

impl FromStr for Seen {
    type Err = lockcore::Error;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "nobody" => Ok(Self::Nobody),
            _ if text.contains('.') => text.parse().map(Self::Stamp),
            _ => text.parse().map(Self::Owner),
        }
    }
}

impl Serialize for Seen {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Seen {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

/// The first line of a file: what the lines below mean.
///
/// # Shape
/// `{"schema":"lockcore-history","version":1,"clock":"boot","pid":4711,…}`. Every process that appends to the file
/// writes one, so there may be several.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// Always [`Header::SCHEMA`].
    pub schema: String,
    /// Grows when a reader of the older form would misread the newer one.
    pub version: u32,
    /// What the stamps were read on.
    pub clock: ClockKind,
    /// The process.
    pub pid: u32,
    /// Which boot of which machine, where the system tells: stamps of another boot do not compare.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<String>,
    /// Under which rules the history is to be judged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rules: Option<Box<super::Rules>>,
    /// Anything else: case, backend, seed, version.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub about: BTreeMap<String, String>,
}

impl Header {
    /// How a header is told from an event.
    pub const SCHEMA: &'static str = "lockcore-history";
    /// The version that this crate writes, and the newest that it reads.
    pub const VERSION: u32 = 1;
}

/// What stamps were read on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ClockKind {
    /// `CLOCK_BOOTTIME`: runs during suspend, one for all processes of a machine.
    Boot,
    /// A clock of the test's own.
    Virtual,
    /// A clock that stops in a suspend. Deadlines cannot be judged on it.
    Monotonic,
}
