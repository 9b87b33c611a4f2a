//! What a backend's author needs, complete: one `use lockcore::backend::*` suffices.
//!
//! A backend keeps six verbs ([`LockBackend`]); the others have bodies. It reports facts (when a request left, what
//! the server granted, which fence); the arithmetic of deadlines, waiting in this process, retries, renewal and
//! clean-up are lockcore's. A backend never reads a wall clock for a deadline, never retries on its own beyond
//! what [`Call::remaining`] allows, and says `Unknown` where a request may have taken effect.

use std::{fmt, sync::Arc, time::Duration};

pub use async_trait::async_trait;

pub use crate::{
    call::{AcquireRequest, Call},
    capabilities::{Capabilities, Consistency, FenceSource, Preflight, Survives, WakeUp},
    clock::{BootClock, Clock, TokioClock},
    deadline::Moment,
    error::{Error, ErrorKind, Result, Verb},
    fence::{Fence, Stamp},
    lease::{Broken, Holder, Lease, LockState, LostReason, Released, Resolution},
    name::LockName,
    owner::{Owner, OwnerDigest},
};

/// A lock service, reduced to the verbs every backend must keep. Six to write, the others have a body.
///
/// It grows without breaking anyone: new verbs come with a body that answers `Unsupported` or does the slow, right
/// thing; new demands on a verb come as fields of [`AcquireRequest`] or [`Call`], behind a capability that starts
/// false.
///
/// # Cancel safety
/// lockcore drops these futures when a caller gives up or a call's time is over. A dropped `acquire` is followed by
/// [`abandon`](Self::abandon) with the same request, on the same backend, which must be right even when the dropped
/// request reaches the server later.
#[async_trait]
pub trait LockBackend: fmt::Debug + Send + Sync + 'static {
    /// Returns the limits and promises of this backend.
    ///
    /// Before a connection stands it answers the widest range; connecting or [`preflight`](Self::preflight) narrows it.
    fn capabilities(&self) -> Capabilities;

    /// Takes the lock, standing behind the holder as long as the request allows. Idempotent per owner.
    ///
    /// # Units
    /// The TTL is rounded up to the backend's granularity; outside `capabilities().ttl` lockcore refuses it, never
    /// stretches it in silence.
    ///
    /// # Errors
    /// `Held` (no waiting asked) or `WaitTimeout`: nothing changed, no place in a queue is left. `Unknown`: the grant
    /// may exist. `Lost`: it was granted, but the answer came too late to use it.
    ///
    /// # Cancel safety
    /// Dropping the future may leave a grant or a place in the queue; lockcore calls [`abandon`](Self::abandon).
    async fn acquire(&self, call: &Call, request: &AcquireRequest) -> Result<Lease>;

    /// Moves the deadline of a live lease; owner and fence stay. Never creates, never shortens what the server has.
    ///
    /// # Errors
    /// `Lost`: the store does not show this very holding. `Unknown`: it may have been renewed; the old deadline
    /// stands.
    async fn renew(&self, call: &Call, lease: &Lease, ttl: Duration) -> Result<Lease>;

    /// Ends this very lease, and nothing else: compared by owner and fence, in one step on the server. Idempotent.
    ///
    /// # Errors
    /// `Unknown`: it may be over; asking again is safe.
    async fn release(&self, call: &Call, lease: &Lease) -> Result<Released>;

    /// Settles an unknown acquire: adopts the grant, or makes sure that it is gone and never comes. Idempotent.
    ///
    /// # Errors
    /// `Unknown` or `Unavailable`: not settled; ask again.
    async fn resolve(&self, call: &Call, request: &AcquireRequest) -> Result<Resolution>;

    /// Looks from outside: holder, highest fence ever granted, waiters. For people, never to decide.
    async fn inspect(&self, call: &Call, name: &LockName) -> Result<LockState>;

    /// Makes sure that nothing of an acquire is left: no grant, no place in a queue, now or later. Idempotent.
    ///
    /// The body resolves, and releases what was adopted.
    ///
    /// # Errors
    /// `Unknown` or `Unavailable`: not sure yet; ask again.
    async fn abandon(&self, call: &Call, request: &AcquireRequest) -> Result<()> {
        match self.resolve(call, request).await {
            Ok(Resolution::Adopted(lease)) => self.release(call, &lease).await.map(drop),
            Ok(Resolution::Gone) => Ok(()),
            // An adopted grant with nothing useful left is over, or nearly: its TTL ends it.
            Err(error) if error.kind() == ErrorKind::Lost => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Looks at the real server and lowers claims. Body: a finding that nobody looked.
    async fn preflight(&self, _call: &Call) -> Result<Preflight> {
        let mut preflight = Preflight::clean(self.capabilities());
        preflight
            .findings
            .push("this backend does not look at its server; the claims are the author's word".into());
        Ok(preflight)
    }

    /// Moves several deadlines, answers in order. Body: one by one.
    async fn renew_many(&self, call: &Call, leases: &[Lease], ttl: Duration) -> Vec<Result<Lease>> {
        let mut answers = Vec::with_capacity(leases.len());
        for lease in leases {
            answers.push(self.renew(call, lease, ttl).await);
        }
        answers
    }

    /// Returns once the store says that this lease is over, before anybody asked. Body: never.
    ///
    /// # Cancel safety
    /// Dropping the future leaves nothing behind.
    async fn ended(&self, _call: &Call, _lease: &Lease) -> LostReason {
        std::future::pending().await
    }

    /// Makes every later grant of the lease's name be above `floor`, in one step with the check that this very holding
    /// is on record. Idempotent. Body: `Unsupported`.
    ///
    /// # Errors
    /// `Lost`: this holding is not on record; nothing was raised.
    async fn raise(&self, _call: &Call, _lease: &Lease, _floor: Fence) -> Result<()> {
        Err(self.unsupported(Verb::Raise))
    }

    /// Makes every later grant of `name` be above `floor`, held or not; returns the floor that now stands. Body:
    /// `Unsupported`.
    async fn raise_fence(&self, _call: &Call, _name: &LockName, _floor: Fence) -> Result<Fence> {
        Err(self.unsupported(Verb::Raise))
    }

    /// Returns a number that no fence granted in this namespace so far exceeds. Body: `Unsupported`.
    async fn high_water(&self, _call: &Call) -> Result<Option<Fence>> {
        Err(self.unsupported(Verb::Migrate))
    }

    /// Takes the lock from its holder and raises the fence above it. `expect` guards a newer holder: when it is given
    /// and the record shows another, nothing changes and the answer is `Held` with that holder. Body: `Unsupported`.
    async fn break_lock(&self, _call: &Call, _name: &LockName, _expect: Option<Stamp>) -> Result<Broken> {
        Err(self.unsupported(Verb::Break))
    }

    /// Lists names the store has a record of, in order, under a prefix and after a name, at most a page. An empty
    /// page is the end. Body: `Unsupported`.
    async fn list(
        &self,
        _call: &Call,
        _prefix: Option<&LockName>,
        _after: Option<&LockName>,
    ) -> Result<Vec<LockName>> {
        Err(self.unsupported(Verb::List))
    }

    /// Reads the record of a migration's phases. Body: `Unsupported`.
    async fn phase_read(&self, _call: &Call) -> Result<Option<PhaseRecord>> {
        Err(self.unsupported(Verb::Migrate))
    }

    /// Replaces the record if it still is `expect`; says whether it did. Body: `Unsupported`.
    async fn phase_cas(
        &self,
        _call: &Call,
        _expect: Option<&PhaseRecord>,
        _new: &PhaseRecord,
    ) -> Result<bool> {
        Err(self.unsupported(Verb::Migrate))
    }

    /// Becomes a member of a phase, if it is open: a lease that binds every acquire. It is renewed like a lock, and a
    /// renewal of one that has ended is `Lost`. The store keeps the phase and [`Call::label`]. Body: `Unsupported`.
    ///
    /// # Errors
    /// `Unavailable`: the phase is not open. `Unknown`: a membership may exist until its TTL ends.
    async fn join(&self, _call: &Call, _phase: &str, _ttl: Duration) -> Result<Lease> {
        Err(self.unsupported(Verb::Migrate))
    }

    /// Ends a membership. Body: `Unsupported`.
    async fn leave(&self, _call: &Call, _member: &Lease) -> Result<Released> {
        Err(self.unsupported(Verb::Migrate))
    }

    /// Lists the members of all phases: who has joined, and has neither left nor expired. Body: `Unsupported`.
    async fn members(&self, _call: &Call) -> Result<Vec<Member>> {
        Err(self.unsupported(Verb::Migrate))
    }

    /// Opens a second connection to the same store, which renewals use from a thread of their own. Body: none; the
    /// first is shared.
    async fn second_connection(&self, _call: &Call) -> Result<Option<Arc<dyn LockBackend>>> {
        Ok(None)
    }

    /// Ends background tasks and connections. Body: nothing to end.
    async fn close(&self) {}

    /// Makes the error of a verb that this backend does not have.
    #[doc(hidden)]
    fn unsupported(&self, verb: Verb) -> Error {
        let backend = self.capabilities().backend;
        Error::new(ErrorKind::Unsupported, "this backend does not do that").about(verb, None, backend)
    }
}

/// Which phases of a migration are open on one side, and the floor of every acquire that begins in them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PhaseRecord {
    /// Names the migration.
    pub migration: String,
    /// Counts the transitions.
    pub epoch: u64,
    /// The phases that may be joined.
    pub open: Vec<String>,
    /// Every acquire demands a fence above this.
    pub floor: Option<Fence>,
}

impl PhaseRecord {
    /// Starts a record with no phase open.
    pub fn new(migration: impl Into<String>, epoch: u64) -> Self {
        Self { migration: migration.into(), epoch, open: Vec::new(), floor: None }
    }

    /// Writes it as one text, for stores that keep texts: a line each for epoch, floor, migration and every open phase. Equal
    /// records have equal texts.
    pub fn to_text(&self) -> String {
        let floor = self.floor.map_or_else(|| "-".into(), |floor| floor.to_string());
        let mut text = format!("{}\n{floor}\n{}", self.epoch, escape(&self.migration));
        for phase in &self.open {
            text.push('\n');
            text.push_str(&escape(phase));
        }
        text
    }

    /// Reads what [`to_text`](Self::to_text) wrote.
    ///
    /// # Errors
    /// `Misconfigured`: it is something else.
    pub fn from_text(text: &[u8]) -> Result<Self> {
        let read = || {
            let mut lines = std::str::from_utf8(text).ok()?.split('\n');
            let epoch = lines.next()?.parse().ok()?;
            let floor = match lines.next()? {
                "-" => None,
                floor => Some(floor.parse().ok()?),
            };
            let migration = unescape(lines.next()?)?;
            let open = lines.map(unescape).collect::<Option<_>>()?;
            Some(Self { migration, epoch, open, floor })
        };
        read().ok_or_else(|| {
            Error::new(ErrorKind::Misconfigured, "the record of the phases holds something that is not ours")
        })
    }
}

fn escape(text: &str) -> String {
    text.replace('%', "%25").replace('\n', "%0A")
}

fn unescape(text: &str) -> Option<String> {
    let mut parts = text.split('%');
    let mut whole = parts.next()?.to_owned();
    for part in parts {
        let (c, rest) = match part.strip_prefix("0A") {
            Some(rest) => ('\n', rest),
            None => ('%', part.strip_prefix("25")?),
        };
        whole.push(c);
        whole.push_str(rest);
    }
    Some(whole)
}

/// One process that takes part in a migration, as its store shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Member {
    /// The phase that it joined.
    pub phase: String,
    /// Tells it from others; the owner of its membership.
    pub owner: OwnerDigest,
    /// What it calls itself, where the store keeps it.
    pub label: Option<String>,
    /// How long it stays without a renewal, where the store tells.
    pub remaining: Option<Duration>,
}

impl Member {
    /// Starts from what every store knows.
    pub fn new(phase: impl Into<String>, owner: OwnerDigest) -> Self {
        Self { phase: phase.into(), owner, label: None, remaining: None }
    }

    /// Adds what this store knows besides.
    #[must_use]
    pub fn with(mut self, add: impl FnOnce(&mut Self)) -> Self {
        add(&mut self);
        self
    }
}

// Each forward returns the inner boxed future: an `async fn` here would allocate twice a call. The lifetimes are the
// ones that `async_trait` writes.
macro_rules! forward_verbs {
    ($($verb:ident<$($l:lifetime),*>($($arg:ident: $type:ty),*) -> $answer:ty;)*) => {$(
        fn $verb<'life0, 'life1, $($l,)* 'async_trait>(
            &'life0 self,
            call: &'life1 Call,
            $($arg: $type),*
        ) -> BoxFuture<'async_trait, $answer>
        where
            'life0: 'async_trait,
            'life1: 'async_trait,
            $($l: 'async_trait,)*
            Self: 'async_trait,
        {
            (**self).$verb(call, $($arg),*)
        }
    )*};
}

macro_rules! forward {
    ($pointer:ident) => {
        // A verb left out here would silently fall back to its body for every wrapped backend.
        #[deny(clippy::missing_trait_methods)]
        impl<B: LockBackend + ?Sized> LockBackend for $pointer<B> {
            forward_verbs! {
                acquire<'a>(request: &'a AcquireRequest) -> Result<Lease>;
                renew<'a>(lease: &'a Lease, ttl: Duration) -> Result<Lease>;
                release<'a>(lease: &'a Lease) -> Result<Released>;
                resolve<'a>(request: &'a AcquireRequest) -> Result<Resolution>;
                inspect<'a>(name: &'a LockName) -> Result<LockState>;
                abandon<'a>(request: &'a AcquireRequest) -> Result<()>;
                preflight<>() -> Result<Preflight>;
                renew_many<'a>(leases: &'a [Lease], ttl: Duration) -> Vec<Result<Lease>>;
                ended<'a>(lease: &'a Lease) -> LostReason;
                raise<'a>(lease: &'a Lease, floor: Fence) -> Result<()>;
                raise_fence<'a>(name: &'a LockName, floor: Fence) -> Result<Fence>;
                high_water<>() -> Result<Option<Fence>>;
                break_lock<'a>(name: &'a LockName, expect: Option<Stamp>) -> Result<Broken>;
                list<'a, 'b>(prefix: Option<&'a LockName>, after: Option<&'b LockName>) -> Result<Vec<LockName>>;
                phase_read<>() -> Result<Option<PhaseRecord>>;
                phase_cas<'a, 'b>(expect: Option<&'a PhaseRecord>, new: &'b PhaseRecord) -> Result<bool>;
                join<'a>(phase: &'a str, ttl: Duration) -> Result<Lease>;
                leave<'a>(member: &'a Lease) -> Result<Released>;
                members<>() -> Result<Vec<Member>>;
                second_connection<>() -> Result<Option<Arc<dyn LockBackend>>>;
            }
            fn capabilities(&self) -> Capabilities {
                (**self).capabilities()
            }
            fn close<'life0, 'async_trait>(&'life0 self) -> BoxFuture<'async_trait, ()>
            where
                'life0: 'async_trait,
                Self: 'async_trait,
            {
                (**self).close()
            }
            fn unsupported(&self, verb: Verb) -> Error {
                (**self).unsupported(verb)
            }
        }
    };
}

forward!(Arc);
forward!(Box);

type BoxFuture<'a, T> = std::pin::Pin<Box<dyn Future<Output = T> + Send + 'a>>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_reads_back_whatever_its_names_are() {
        for (migration, open) in [
            ("", vec![]),
            ("redis to etcd\n%0A%", vec!["from".to_owned(), "a\nb".into(), String::new(), "%250A".into()]),
        ] {
            let mut record = PhaseRecord::new(migration, 7);
            record.open = open;
            for floor in [None, Some(Fence::MAX)] {
                record.floor = floor;
                assert_eq!(PhaseRecord::from_text(record.to_text().as_bytes()).unwrap(), record);
            }
        }
        for foreign in ["", "not ours", "1\n-", "1\nx\n", "x\n-\n", "1\n-\n%", "1\n-\na\n%41"] {
            let refused = PhaseRecord::from_text(foreign.as_bytes()).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Misconfigured, "{foreign:?}");
        }
        assert!(PhaseRecord::from_text(&[0xff]).is_err());
    }
}
