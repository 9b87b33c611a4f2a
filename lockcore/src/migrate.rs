//! The bridge between two stores: locks move from one to the other while they are in use, and back.
//!
//! A [`Bridge`] is a backend made of two and stands wherever a backend may. A fleet moves by rolling restarts through
//! three [phases](Phase); between two restarts an operator moves the migration one [stage](Stage) on. Neighbouring
//! phases exclude each other's holders, so each restart may take as long as it likes.
//!
//! | stage | open phases | what the step to it does |
//! |---|---|---|
//! | [`Stage::From`] | from | announces the migration; the fleet restarts from the plain store into phase `from` |
//! | [`Stage::FromBoth`] | from, both | the fleet restarts into `both` |
//! | [`Stage::Both`] | both | waits until nobody is in `from`; the new store gets the old one's high water as floor |
//! | [`Stage::BothTo`] | both, to | the fleet restarts into `to` |
//! | [`Stage::To`] | to | waits until nobody is in `both`; every name's fence is carried over; plain stores may follow |
//!
//! The way back is the same list from below, with the stores exchanged.
//!
//! Two things make the steps safe that the first form one thinks of lacks. *Membership binds*: a process joins its
//! phase by a lease, takes no lock without it, and holds none beyond it; so a process that slept through the move
//! cannot wake up into a closed phase. *The namespace has a floor*: a step takes the high water of the store that is
//! left, and every later grant on the other is above it; so a name that nobody locked meanwhile does not start lower.
//!
//! Processes that use one of the stores without a bridge are no members, and no step can see them. The first restart,
//! into phase `from`, must be complete before the step to [`Stage::Both`].

mod bridge;
mod grants;
mod membership;
mod operate;

pub use bridge::Bridge;
#[cfg(feature = "config")]
pub(crate) use membership::MEMBERSHIP;
#[cfg(feature = "config")]
pub(crate) use operate::check_name;
pub use operate::{Migration, Side, Stage, Status};

use crate::capabilities::{Capabilities, Survives};

/// How far a process has come in a move between two stores. Neighbouring phases exclude each other's holders.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "config",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "kebab-case")
)]
#[non_exhaustive]
pub enum Phase {
    /// Locks are taken on the old store, and the move is announced.
    From,
    /// Locks are taken on both.
    Both,
    /// Locks are taken on the new store alone.
    To,
}

impl Phase {
    /// Returns its name in files, records and messages.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::From => "from",
            Self::Both => "both",
            Self::To => "to",
        }
    }

    /// Says whether it excludes the holders of another phase: of itself, and of its neighbours.
    #[cfg(feature = "config")]
    pub(crate) const fn is_beside(self, other: Self) -> bool {
        !matches!((self, other), (Self::From, Self::To) | (Self::To, Self::From))
    }

    const fn on_from(self) -> bool {
        matches!(self, Self::From | Self::Both)
    }

    const fn on_to(self) -> bool {
        matches!(self, Self::Both | Self::To)
    }
}

/// Says what a bridge keeps: of each promise the weaker one.
fn weaker(a: &Capabilities, b: &Capabilities) -> Capabilities {
    Capabilities::weakest("bridge").with(|c| {
        c.consistency = a.consistency.min(b.consistency);
        c.fence = a.fence.min(b.fence);
        c.wake_up = a.wake_up.min(b.wake_up);
        // Who waits on the new side alone stands in another queue.
        c.fair = false;
        c.survives = Survives {
            restart: a.survives.restart && b.survives.restart,
            failover: a.survives.failover && b.survives.failover,
            clock_step: a.survives.clock_step && b.survives.clock_step,
            pause: a.survives.pause && b.survives.pause,
        };
        c.ttl = *a.ttl.start().max(b.ttl.start())..=*a.ttl.end().min(b.ttl.end());
        c.ttl_step = a.ttl_step.max(b.ttl_step);
        c.fence_floor = a.fence_floor && b.fence_floor;
        c.labels = a.labels && b.labels;
        c.lock_delay = a.lock_delay && b.lock_delay;
        c.pushes_loss = a.pushes_loss && b.pushes_loss;
        c.renew_batch = a.renew_batch.min(b.renew_batch);
    })
}

#[cfg(test)]
mod explore;
#[cfg(test)]
mod testbed;
#[cfg(test)]
mod tests;
