//! What this process has in queues: by whom, on which session, and until when.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use lockcore::backend::{Fence, Moment, Owner};

use crate::{
    keys::{Note, stem},
    session::Session,
};

/// One place in a queue, from before its node is asked for until the node is known to be gone.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) session: Arc<Session>,
    /// The node of the queue.
    pub(crate) queue: String,
    pub(crate) owner: Owner,
    pub(crate) stage: Stage,
    pub(crate) held: Option<Held>,
    /// The keeper of the session removes the node from then on.
    pub(crate) until: Moment,
}

#[derive(Clone, Debug)]
pub(crate) enum Stage {
    /// The node was asked for; whether it stands is not known.
    Asked,
    Stands(Node),
    /// The keeper is removing it: nobody may count on it any more.
    Leaving,
}

/// A node that was seen to stand.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    /// Its name inside the queue.
    pub(crate) name: String,
    pub(crate) czxid: i64,
    pub(crate) note: Note,
    /// The version of its data.
    pub(crate) version: i32,
}

/// The grant that a place has led to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub(crate) fence: Fence,
    /// What the deadline of the grant was counted from.
    pub(crate) sent: Moment,
    pub(crate) ttl: Duration,
}

impl Place {
    /// Begins a place, before its node is asked for.
    pub(crate) fn asked(session: &Arc<Session>, queue: &str, owner: Owner) -> Self {
        let (session, queue) = (session.clone(), queue.to_owned());
        Self { session, queue, owner, stage: Stage::Asked, held: None, until: Moment::MAX }
    }

    /// Returns the whole path of the node, where it is known.
    pub(crate) fn path(&self) -> Option<String> {
        match &self.stage {
            Stage::Stands(node) => Some(format!("{}/{}", self.queue, node.name)),
            Stage::Asked | Stage::Leaving => None,
        }
    }
}

/// A place that the keeper has to remove.
#[derive(Debug)]
pub(crate) struct Due {
    pub(crate) key: String,
    pub(crate) queue: String,
    pub(crate) owner: Owner,
}

/// What a request finds of earlier requests of its acquire.
pub(crate) enum Claim {
    Nothing,
    Known,
    /// The keeper is removing what an earlier request left.
    Leaving,
    /// It was given up; a late copy must not bring it back.
    GivenUp,
}

#[derive(Debug, Default)]
pub(crate) struct Places(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    by_key: HashMap<String, Place>,
    given_up: HashMap<String, Moment>,
}

/// Names a place: its queue and its owner.
pub(crate) fn key(queue: &str, owner: &Owner) -> String {
    format!("{queue}/{}", stem(owner))
}

impl Places {
    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn len(&self) -> usize {
        self.table().by_key.len()
    }

    pub(crate) fn get(&self, key: &str) -> Option<Place> {
        self.table().by_key.get(key).cloned()
    }

    /// Looks for what earlier requests left, and keeps the keeper from removing it.
    pub(crate) fn claim(&self, key: &str, now: Moment) -> Claim {
        let mut table = self.table();
        table.given_up.retain(|_, until| now < *until);
        if table.given_up.contains_key(key) {
            return Claim::GivenUp;
        }
        match table.by_key.get_mut(key) {
            None => Claim::Nothing,
            Some(Place { stage: Stage::Leaving, .. }) => Claim::Leaving,
            // A grant is over at its deadline, whoever asks again; where there is none, the request keeps it.
            Some(place) => {
                if place.held.is_none() {
                    place.until = Moment::MAX;
                }
                Claim::Known
            }
        }
    }

    pub(crate) fn insert(&self, key: &str, place: Place) {
        self.table().by_key.insert(key.to_owned(), place);
    }

    pub(crate) fn clear(&self) {
        self.table().by_key.clear();
    }

    pub(crate) fn remove(&self, key: &str) -> Option<Place> {
        self.table().by_key.remove(key)
    }

    /// Takes note of what was learnt of a place, unless the keeper is removing it.
    pub(crate) fn learn(&self, key: &str, learn: impl FnOnce(&mut Place)) -> bool {
        match self.table().by_key.entry(key.to_owned()) {
            Entry::Occupied(mut entry) if !matches!(entry.get().stage, Stage::Leaving) => {
                learn(entry.get_mut());
                true
            }
            _ => false,
        }
    }

    /// Lets the keeper remove a place from then on, unless it is already to go earlier.
    pub(crate) fn ends(&self, key: &str, at: Moment) {
        if let Some(place) = self.table().by_key.get_mut(key) {
            place.until = place.until.min(at);
        }
    }

    /// Refuses copies of an acquire that was given up, as long as one may still be under way.
    pub(crate) fn give_up(&self, key: &str, until: Moment) {
        self.table().given_up.insert(key.to_owned(), until);
    }

    pub(crate) fn is_given_up(&self, key: &str) -> bool {
        self.table().given_up.contains_key(key)
    }

    /// Says whether a node of this session is one that a place stands for.
    pub(crate) fn claims(&self, path: &str) -> bool {
        let Some(end) = path.rfind('/').map(|slash| slash + 34).filter(|end| path.is_char_boundary(*end))
        else {
            return false;
        };
        path.len() > end && self.table().by_key.contains_key(&path[..end])
    }

    /// Takes the places of a session whose time has come; who takes them asks again at `retry`.
    pub(crate) fn due(&self, session: &Session, now: Moment, retry: Moment) -> Vec<(Due, Option<String>)> {
        let mut due = Vec::new();
        for (key, place) in &mut self.table().by_key {
            if place.session.id == session.id && place.until <= now {
                let path = place.path();
                place.stage = Stage::Leaving;
                place.until = retry;
                due.push((Due { key: key.clone(), queue: place.queue.clone(), owner: place.owner }, path));
            }
        }
        due
    }

    /// Counts the places of a session, and says when the first of them is due.
    pub(crate) fn of_session(&self, session: &Session) -> (usize, Moment) {
        let table = self.table();
        let of = table.by_key.values().filter(|place| place.session.id == session.id);
        of.fold((0, Moment::MAX), |(count, first), place| (count + 1, first.min(place.until)))
    }

    /// Forgets places of a session that is over: its nodes end with it. Grants stay known for a while, so that their
    /// holders can be told.
    pub(crate) fn session_ended(&self, session: &Session, now: Moment) -> usize {
        let mut table = self.table();
        table.by_key.retain(|_, place| {
            place.session.id != session.id
                || (place.held.is_some() && now < place.until.saturating_add(KNOWN))
        });
        table.by_key.values().filter(|place| place.session.id == session.id).count()
    }
}

/// How long past its end a grant of an ended session stays known.
const KNOWN: Duration = Duration::from_secs(30);
