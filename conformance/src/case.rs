//! The form of a case: one function with a promise as its name, in the file of its topic.

use std::{future::Future, pin::Pin};

use lockcore::backend::{Capabilities, Consistency};

use crate::bench::Bench;

/// What a case found, beside what the checker finds in its history.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The promise was kept.
    Kept,
    /// The backend refuses what the case asks, by a typed error, as its capabilities say.
    Refused,
}

/// The end of a case: a verdict, or an error that nothing in the case expected.
pub type Outcome = Result<Verdict, Unexpected>;

/// An error that a case did not expect.
#[derive(Debug)]
pub struct Unexpected(String);

impl From<lockcore::Error> for Unexpected {
    #[track_caller]
    fn from(error: lockcore::Error) -> Self {
        Self(format!("{}: unexpected {:?}: {error}", std::panic::Location::caller(), error.kind()))
    }
}

impl std::fmt::Display for Unexpected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// What a case needs beyond the verbs. Where it is not offered, the case is *not run*, and the output says why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Need {
    /// A wire between backend and store that can be slowed: [`Service::wire`](crate::Service::wire).
    Wire,
    /// Proxies on the wire: [`Service::servers`](crate::Service::servers).
    Line,
    /// Servers of the case's own: [`Suite::own_servers`](crate::Suite::own_servers).
    Servers,
    /// Several servers that stand in for each other.
    Members,
    /// Servers of the case's own whose wall clock can be stepped: [`Suite::server_clocks`](crate::Suite::server_clocks).
    ServerClock,
    /// A way to remove records behind the back of the code under test: any store but a foreign one.
    Removal,
    /// Grants in order of arrival.
    Fair,
    /// A look at the queue: [`Service::queued`](crate::Service::queued).
    Queue,
    /// Other processes that reach the same store: [`Service::address`](crate::Service::address).
    Processes,
    /// A fence floor.
    Floor,
    /// Time that a test owns.
    VirtualTime,
    /// Time that passes by itself, also for another runtime.
    RealTime,
}

impl Need {
    /// Says what is missing.
    pub(crate) fn missing(self, foreign: bool) -> &'static str {
        match self {
            Self::Wire
            | Self::Line
            | Self::Servers
            | Self::Members
            | Self::ServerClock
            | Self::Removal
            | Self::Processes
                if foreign =>
            {
                "needs control of the server"
            }
            Self::Removal => "its records cannot be removed by a second road",
            Self::Wire => "the wire between backend and store cannot be slowed here",
            Self::Line => "no proxy stands between backend and store",
            Self::Servers => "no case has servers of its own to kill",
            Self::ServerClock => "the clock of its servers cannot be stepped here",
            Self::Members => "no other server stands in for it",
            Self::Fair => "it does not promise an order",
            Self::Queue => "its queue cannot be looked at",
            Self::Processes => "no other process reaches it",
            Self::Floor => "it honours no fence floor",
            Self::VirtualTime => "its time is real",
            Self::RealTime => "its time belongs to one runtime",
        }
    }

    /// Says whether what is missing is missing by design, so that the case does not apply. The rest could be offered, and
    /// the case is *not run* until it is.
    pub(crate) fn by_design(self, capabilities: &Capabilities, embedded: bool) -> bool {
        match self {
            Self::Fair | Self::Floor | Self::Members | Self::RealTime => true,
            Self::Queue => !capabilities.fair,
            Self::Processes => capabilities.consistency == Consistency::Process,
            // No network and no server stand between it and its client.
            Self::Wire | Self::Line | Self::Servers | Self::ServerClock => embedded,
            Self::VirtualTime | Self::Removal => false,
        }
    }
}

pub(crate) type Run = fn(Bench) -> Pin<Box<dyn Future<Output = Outcome>>>;

/// One case: topic, name, needs and body.
#[derive(Clone, Copy)]
pub struct Case {
    pub(crate) topic: &'static str,
    pub(crate) name: &'static str,
    pub(crate) needs: &'static [Need],
    pub(crate) run: Run,
}

impl std::fmt::Debug for Case {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}::{}", self.topic(), self.name)
    }
}

impl Case {
    /// Returns the topic: the name of the file.
    pub fn topic(&self) -> &'static str {
        self.topic.rsplit("::").next().unwrap_or(self.topic)
    }

    /// Returns the name: an id and a promise.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the id of the catalogue, such as `D01`.
    pub fn id(&self) -> String {
        self.name.split('_').next().unwrap_or_default().to_uppercase()
    }
}

/// Lists the cases of a file, with what each needs. A case that is left out is dead code, which does not compile here.
macro_rules! cases {
    ($($name:ident $([$($need:ident),*])?),* $(,)?) => {
        pub(crate) const CASES: &[$crate::case::Case] = &[$(
            $crate::case::Case {
                topic: module_path!(),
                name: stringify!($name),
                needs: &[$($($crate::case::Need::$need),*)?],
                run: |bench| Box::pin($name(bench)),
            }
        ),*];
    };
}
pub(crate) use cases;
