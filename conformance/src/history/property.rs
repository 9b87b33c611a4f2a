//! The promises, by number, each in one sentence.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

macro_rules! properties {
    ($($id:ident $title:literal $sentence:literal)*) => {
        /// A promise that a history keeps or breaks. `S`: something bad never happens; `L`: something good happens
        /// in time.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[non_exhaustive]
        pub enum Property {
            $(#[doc = concat!($title, ": ", $sentence)] $id,)*
        }

        impl Property {
            /// All of them, in order.
            pub const ALL: &'static [Self] = &[$(Self::$id),*];

            /// Returns the short name.
            pub fn title(self) -> &'static str {
                match self { $(Self::$id => $title,)* }
            }

            /// Returns what is promised.
            pub fn sentence(self) -> &'static str {
                match self { $(Self::$id => $sentence,)* }
            }

            /// Returns the number.
            pub fn id(self) -> &'static str {
                match self { $(Self::$id => stringify!($id),)* }
            }
        }
    };
}

properties! {
    S1 "fence order" "A grant that came after another has the higher fence, and no two grants share one."
    S1q "fence order of waiters" "A grant made after another holding ended has the higher fence, also if its acquire began earlier."
    S2 "exclusion" "Two clients never believe at the same time that they hold the lock."
    S3 "no foreign effect" "A renewal or release of one lease never ends, shortens, extends or hands over another."
    S4 "the resource never goes back" "The resource accepts no older holder, refuses the newest for nothing, and applies each operation once."
    S5 "stale renewal fails" "A renewal that began after a newer grant is not confirmed."
    S6 "no resurrection" "A lease that is over is never renewed, released or granted again."
    S7 "honest deadline" "A deadline counts from before the request left, and from what the server granted."
    S8 "one grant an operation" "An acquire yields at most one grant, with the same fence and owner each time it is told."
    S9 "owners are unique" "No two acquisitions share an owner, and an owner is never shown in full."
    S10 "loss is told" "The application learns of a loss by the deadline, and of none that did not happen."
    S11 "guarded action" "A guard that is asked at or after its deadline does not say yes."
    S12 "honest failure" "A call that says it had no effect had none."
    S13 "no phantom holder" "A try is refused only while somebody could hold the lock; where tries stand in a queue, another that is asking counts."
    S14 "first touch" "A read under a fence shuts older holders out before it returns data."
    S15 "isolation" "What happens to one name changes no other."
    S16 "accounting" "Every answer belongs to one call, and nothing happens after a client was closed."
    L1 "takeover" "A waiter gets the lock soon after a dead holder's lease ran out."
    L2 "wake-up" "A waiter gets the lock soon after a release."
    L3 "no lost wake-up" "Nobody waits at the end while the lock is free."
    L4 "no residue" "Acquires that were given up leave nothing behind."
    L5 "order" "Waiters are served in the order in which they came."
    L6 "wait budget" "An acquire returns when its budget is used up, whatever the network does."
    L7 "steady renewal" "Without a fault a lease stays, with one renewal in flight."
    L8 "politeness" "Waiting and handing over cost a bounded number of requests."
    L9 "shutdown" "Closing a client ends soon and leaves the server as it was."
    L10 "recovery" "Soon after the last fault an uncontended acquire succeeds."
}

impl Property {
    /// Says whether it bounds something from above in time, so that a stalled machine can fail it without fault.
    pub fn is_liveness(self) -> bool {
        self >= Self::L1
    }
}

impl fmt::Display for Property {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.id())
    }
}

impl FromStr for Property {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .iter()
            .copied()
            .find(|p| p.id().eq_ignore_ascii_case(text))
            .ok_or_else(|| format!("{text:?} is not a property; they are S1, S1q, S2 to S16 and L1 to L10"))
    }
}
