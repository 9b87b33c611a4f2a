//! The queue inside this process: ten thousand tasks that want one name are one waiter in the store.
//!
//! Whoever has the [`Seat`] of a name may stand in the store's queue or hold the lock; the others wait here, in order
//! of arrival. It belongs to one client and its clones.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, Weak},
};

use tokio::sync::oneshot;

use crate::{lease::Holder, name::LockName, sync::LockExt};

/// The names that somebody in this process has or wants.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    names: Mutex<HashMap<LockName, Row>>,
}

#[derive(Debug)]
struct Row {
    stage: Stage,
    waiting: BTreeMap<u64, oneshot::Sender<()>>,
    next: u64,
}

/// What the one with the seat does.
#[derive(Clone)]
pub(crate) enum Stage {
    /// It asks the store, or stands in its queue.
    Asking,
    /// It holds the lock: who, as seen from outside.
    Holding(Weak<dyn Seen>),
    /// It gives the lock back.
    Leaving,
}

/// A holder that can be looked at.
pub(crate) trait Seen: Send + Sync {
    /// Returns what a refused try is told.
    fn seen(&self) -> Holder;
}

impl std::fmt::Debug for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Asking => "Asking",
            Self::Holding(_) => "Holding",
            Self::Leaving => "Leaving",
        })
    }
}

/// The right to deal with the store for one name. Dropping it passes it on.
#[derive(Debug)]
pub(crate) struct Seat {
    queue: Arc<Queue>,
    name: LockName,
}

/// What asking for a seat gave.
#[derive(Debug)]
pub(crate) enum Ask {
    /// It was free.
    Taken(Seat),
    /// Somebody here has it, and does this.
    Occupied(Stage),
    /// A place in the queue; awaiting it gives the seat.
    Waiting(Place),
    /// Too many wait already.
    Full,
}

impl Queue {
    /// Takes the seat if it is free, without waiting.
    pub(crate) fn try_sit(self: &Arc<Self>, name: &LockName) -> Ask {
        let mut names = self.names.grab();
        match names.get(name) {
            Some(row) => Ask::Occupied(row.stage.clone()),
            None => {
                names.insert(name.clone(), Row::new());
                Ask::Taken(self.seat(name))
            }
        }
    }

    /// Takes the seat, or a place in the queue of at most `bound`.
    pub(crate) fn sit(self: &Arc<Self>, name: &LockName, bound: usize) -> Ask {
        let mut names = self.names.grab();
        let Some(row) = names.get_mut(name) else {
            names.insert(name.clone(), Row::new());
            return Ask::Taken(self.seat(name));
        };
        if row.waiting.len() >= bound {
            return Ask::Full;
        }
        let (call, called) = oneshot::channel();
        let number = row.next;
        row.next += 1;
        row.waiting.insert(number, call);
        Ask::Waiting(Place { queue: self.clone(), name: name.clone(), number, called, seated: false })
    }

    fn seat(self: &Arc<Self>, name: &LockName) -> Seat {
        Seat { queue: self.clone(), name: name.clone() }
    }

    /// Counts the tasks of this process that wait for a name.
    #[cfg(test)]
    pub(crate) fn waiting(&self, name: &LockName) -> usize {
        self.names.grab().get(name).map_or(0, |row| row.waiting.len())
    }
}

impl Row {
    fn new() -> Self {
        Self { stage: Stage::Asking, waiting: BTreeMap::new(), next: 0 }
    }
}

impl Seat {
    /// Says what the one with the seat does now.
    pub(crate) fn stage(&self, stage: Stage) {
        if let Some(row) = self.queue.names.grab().get_mut(&self.name) {
            row.stage = stage;
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut names = self.queue.names.grab();
        let Some(row) = names.get_mut(&self.name) else { return };
        row.stage = Stage::Asking;
        // A waiter that was dropped has left the map, or its call fails here.
        while let Some((_, call)) = row.waiting.pop_first() {
            if call.send(()).is_ok() {
                return;
            }
        }
        names.remove(&self.name);
    }
}

/// A place in the queue of this process.
#[derive(Debug)]
pub(crate) struct Place {
    queue: Arc<Queue>,
    name: LockName,
    number: u64,
    called: oneshot::Receiver<()>,
    seated: bool,
}

impl Place {
    /// Waits for the seat.
    ///
    /// # Cancel safety
    /// Dropping the place leaves the queue; a seat that was on its way goes to the next.
    pub(crate) async fn seat(&mut self) -> Seat {
        // The sender is dropped only when it was used: it leaves the map by `pop_first` or by our own drop.
        let _ = (&mut self.called).await;
        self.seated = true;
        self.queue.seat(&self.name)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.seated {
            return;
        }
        let was_waiting = self
            .queue
            .names
            .grab()
            .get_mut(&self.name)
            .and_then(|row| row.waiting.remove(&self.number))
            .is_some();
        if !was_waiting {
            // Called, and gone before it heard: pass the seat on.
            drop(self.queue.seat(&self.name));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name() -> LockName {
        LockName::parse("x").unwrap()
    }

    fn place(queue: &Arc<Queue>) -> Place {
        match queue.sit(&name(), 100) {
            Ask::Waiting(place) => place,
            other => panic!("no place in the queue: {other:?}"),
        }
    }

    #[tokio::test]
    async fn seats_are_given_in_order_and_to_nobody_who_left() {
        let queue = Arc::new(Queue::default());
        let Ask::Taken(first) = queue.sit(&name(), 100) else { panic!("the seat was not free") };
        let (mut a, b, mut c) = (place(&queue), place(&queue), place(&queue));
        drop(b);
        drop(first);
        let seat = a.seat().await;
        assert!(matches!(queue.try_sit(&name()), Ask::Occupied(Stage::Asking)));
        drop(seat);
        drop(c.seat().await);
        assert!(queue.names.grab().is_empty(), "a row was left behind");
    }

    #[tokio::test]
    async fn a_seat_on_its_way_to_a_dropped_waiter_goes_to_the_next() {
        let queue = Arc::new(Queue::default());
        let Ask::Taken(first) = queue.sit(&name(), 100) else { panic!("the seat was not free") };
        let (a, mut b) = (place(&queue), place(&queue));
        drop(first); // calls `a`
        drop(a); // which has not heard
        drop(b.seat().await);
        assert!(queue.names.grab().is_empty());
    }

    #[test]
    fn the_queue_is_bounded() {
        let queue = Arc::new(Queue::default());
        let _first = queue.sit(&name(), 1);
        let _second = queue.sit(&name(), 1);
        assert!(matches!(queue.sit(&name(), 1), Ask::Full));
        assert_eq!(queue.waiting(&name()), 1);
    }
}
