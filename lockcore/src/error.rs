//! What can go wrong, named after what the caller may do next.

use std::{borrow::Cow, fmt};

use crate::{
    lease::{Holder, LostReason},
    name::LockName,
};

/// `Result` with this crate's error unless another is named.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What is known, and with it what the caller may do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Someone else has it; nothing changed. Wait or give up.
    Held,
    /// The wait budget is used up; nothing changed.
    WaitTimeout,
    /// This lease is over for good. Stop the work.
    Lost,
    /// The call may have taken effect. Act as if not; do not repeat it blindly.
    Unknown,
    /// It certainly had no effect. Retry later.
    Unavailable,
    /// Too many waiters in this process; nothing was sent. Shed load.
    Overloaded,
    /// The client was closed or the application shuts down; nothing is held.
    Closed,
    /// This backend does not do that.
    Unsupported,
    /// An argument is out of range; the message names the limit.
    Invalid,
    /// The store refused the credentials or the permission.
    Unauthorized,
    /// The set-up cannot keep what was asked of it.
    Misconfigured,
    /// The store forgot its past. Stop; a person must look.
    FenceRegression,
}

impl ErrorKind {
    /// Says whether it is certain that nothing changed in the store.
    pub fn had_no_effect(self) -> bool {
        !matches!(self, Self::Unknown | Self::Lost | Self::FenceRegression)
    }

    /// Says whether the same call may succeed later without anybody changing anything.
    pub fn is_transient(self) -> bool {
        matches!(self, Self::Held | Self::WaitTimeout | Self::Unavailable | Self::Overloaded | Self::Unknown)
    }
}

/// One of the things that are asked of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Verb {
    /// Take a lock.
    Acquire,
    /// Move a deadline.
    Renew,
    /// End a lease.
    Release,
    /// Settle an unknown acquire.
    Resolve,
    /// Look from outside.
    Inspect,
    /// Look at the server.
    Preflight,
    /// Raise a fence.
    Raise,
    /// Take a lock from its holder.
    Break,
    /// List names.
    List,
    /// Open a connection.
    Connect,
    /// Move between phases of a migration.
    Migrate,
}

impl fmt::Display for Verb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Acquire => "acquire",
            Self::Renew => "renew",
            Self::Release => "release",
            Self::Resolve => "resolve",
            Self::Inspect => "inspect",
            Self::Preflight => "preflight",
            Self::Raise => "raise",
            Self::Break => "break",
            Self::List => "list",
            Self::Connect => "connect to",
            Self::Migrate => "migrate",
        })
    }
}

/// Why a call failed: eight bytes, `Send + Sync + 'static`, with source chain. `Display` names verb, lock, backend
/// and holder.
pub struct Error(Box<Inner>);

struct Inner {
    kind: ErrorKind,
    message: Cow<'static, str>,
    lost: Option<LostReason>,
    holder: Option<Holder>,
    name: Option<LockName>,
    backend: Option<&'static str>,
    verb: Option<Verb>,
    source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl Error {
    /// Makes an error: where backends start. Lower case, no full stop, no secret.
    pub fn new(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Self {
        Self(Box::new(Inner {
            kind,
            message: message.into(),
            lost: None,
            holder: None,
            name: None,
            backend: None,
            verb: None,
            source: None,
        }))
    }

    /// Makes a `Lost` error.
    pub fn lost(reason: LostReason) -> Self {
        let mut error = Self::new(ErrorKind::Lost, reason.sentence());
        error.0.lost = Some(reason);
        error
    }

    /// Makes a `Held` or `WaitTimeout` error that names the holder.
    pub fn held_by(kind: ErrorKind, holder: Option<Holder>) -> Self {
        let message = match kind {
            ErrorKind::WaitTimeout => "the wait budget is used up",
            _ => "someone else has it",
        };
        let mut error = Self::new(kind, message);
        error.0.holder = holder;
        error
    }

    /// Adds what the client library said.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    /// Says what was being done, to which lock, on which backend. What is already known stays.
    #[must_use]
    pub fn about(mut self, verb: Verb, name: Option<&LockName>, backend: &'static str) -> Self {
        self.0.verb.get_or_insert(verb);
        self.0.backend.get_or_insert(backend);
        if self.0.name.is_none() {
            self.0.name = name.cloned();
        }
        self
    }

    /// Returns what is known; match on this.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Returns why the lease is over, when the kind is `Lost`.
    pub fn lost_reason(&self) -> Option<LostReason> {
        self.0.lost
    }

    /// Returns who has it, when the kind is `Held` or `WaitTimeout` and the store told.
    pub fn holder(&self) -> Option<&Holder> {
        self.0.holder.as_ref()
    }

    /// Returns the lock, where one was named.
    pub fn name(&self) -> Option<&LockName> {
        self.0.name.as_ref()
    }

    /// Returns the backend, where one was asked.
    pub fn backend(&self) -> Option<&'static str> {
        self.0.backend
    }

    /// Returns what was being done.
    pub fn verb(&self) -> Option<Verb> {
        self.0.verb
    }

    /// Returns the sentence alone, without verb, lock, backend and holder.
    pub fn message(&self) -> &str {
        &self.0.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { message, holder, name, backend, verb, .. } = &*self.0;
        if let Some(verb) = verb {
            write!(f, "{verb}")?;
            if let Some(name) = name {
                write!(f, " {:?}", name.as_str())?;
            }
            if let Some(backend) = backend {
                let preposition = if *verb == Verb::Connect { "" } else { "on " };
                write!(f, " {preposition}{backend}")?;
            }
            f.write_str(": ")?;
        } else if let Some(name) = name {
            write!(f, "{:?}: ", name.as_str())?;
        }
        f.write_str(message)?;
        if let Some(holder) = holder {
            write!(f, ": {holder}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}({self}", self.0.kind)?;
        let mut source = std::error::Error::source(self);
        while let Some(cause) = source {
            write!(f, ": {cause}")?;
            source = cause.source();
        }
        f.write_str(")")
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_deref().map(|s| s as _)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{fence::Fence, owner::Owner};

    #[test]
    fn an_error_is_eight_bytes_and_crosses_threads() {
        fn crosses<T: Send + Sync + 'static>() {}
        crosses::<Error>();
        assert_eq!(size_of::<Error>(), 8);
        assert_eq!(size_of::<Result<()>>(), 8);
    }

    #[test]
    fn the_sentence_names_verb_lock_backend_and_holder() {
        let holder = Holder::new(Owner::random().digest(), Fence::new(91).unwrap(), Duration::from_secs(12))
            .with(|h| h.label = Some("web-3:4711".into()));
        let error = Error::held_by(ErrorKind::Held, Some(holder)).about(
            Verb::Acquire,
            Some(&LockName::parse("order/42").unwrap()),
            "memory",
        );
        let text = error.to_string();
        assert!(
            text.starts_with("acquire \"order/42\" on memory: someone else has it: held by web-3:4711"),
            "{text}"
        );
        assert!(text.ends_with("with fence 91, 12 s left"), "{text}");
    }

    #[test]
    fn kinds_say_whether_anything_changed() {
        assert!(ErrorKind::Unavailable.had_no_effect());
        assert!(!ErrorKind::Unknown.had_no_effect());
        assert!(ErrorKind::Unknown.is_transient());
        assert!(!ErrorKind::Invalid.is_transient());
        assert!(!ErrorKind::Lost.is_transient());
    }
}
