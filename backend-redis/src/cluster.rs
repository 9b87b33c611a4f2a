//! A Cluster: which node decides about a slot, and what its redirections say.
//!
//! Requests are sent once. Where a node sends them on (`MOVED`, `ASK`) or refuses (`TRYAGAIN`, `CLUSTERDOWN`), it did
//! nothing, and they are sent anew; what was lost on the way is `Unknown` as with a single server.
//!
//! # Source
//! Redis Cluster specification (Redis 7.0 manual): redirections, ASKING, hash tags.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use lockcore::backend::{Call, Error, ErrorKind, Result};
use redis::{RedisError, ServerErrorKind, Value};

use crate::{
    config::RedisConfig,
    error::{self, Phase},
    greeting::{Learnt, text},
    replicas::Wait,
    road::Node,
};

pub(crate) const SLOTS: u16 = 16_384;

/// Host and port of a node.
type Place = (String, u16);

/// First slot, last slot, who decides about them.
type Range = (u16, u16, Place);

/// The nodes of a Cluster, as far as they are known.
pub(crate) struct Cluster {
    config: Arc<RedisConfig>,
    seeds: Vec<Place>,
    learnt: Arc<Learnt>,
    known: Mutex<Known>,
    /// One look at the slots at a time.
    looking: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct Known {
    nodes: HashMap<Place, Arc<Node>>,
    slots: Vec<Range>,
    /// Counts looks; something speaks against the map of this look.
    look: u64,
    doubted: bool,
    closed: bool,
}

/// What a refusal of a node says about where to go.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Sign {
    /// The slot is another node's, for good.
    Moved(Place),
    /// This request is another node's, this once.
    Ask(Place),
    /// Not now.
    Later,
    /// Nothing.
    None,
}

impl Sign {
    pub(crate) fn read(refusal: &RedisError, asked: &str) -> Self {
        let redirection = || {
            let (place, _) = refusal.redirect_node()?;
            let (host, port) = place.rsplit_once(':')?;
            // A node that does not know its own name means the one that was asked.
            let host = if host.is_empty() { asked } else { host.trim_matches(['[', ']']) };
            Some((host.to_owned(), port.parse().ok()?))
        };
        match refusal.kind() {
            redis::ErrorKind::Server(ServerErrorKind::Moved) => {
                redirection().map_or(Self::Later, Self::Moved)
            }
            redis::ErrorKind::Server(ServerErrorKind::Ask) => redirection().map_or(Self::Later, Self::Ask),
            redis::ErrorKind::Server(
                ServerErrorKind::TryAgain
                | ServerErrorKind::ClusterDown
                | ServerErrorKind::BusyLoading
                | ServerErrorKind::MasterDown
                | ServerErrorKind::ReadOnly,
            ) => Self::Later,
            _ => Self::None,
        }
    }
}

impl Cluster {
    pub(crate) fn new(config: Arc<RedisConfig>, seeds: Vec<Place>, learnt: Arc<Learnt>) -> Self {
        Self { config, seeds, learnt, known: Mutex::default(), looking: tokio::sync::Mutex::new(()) }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // It is whole between any two of its operations.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the node of a place, known or new.
    pub(crate) fn node(&self, place: &Place) -> Arc<Node> {
        let mut known = self.known();
        if let Some(node) = known.nodes.get(place) {
            return node.clone();
        }
        let node = Arc::new(Node::new(&self.config, Some(place.clone()), &self.learnt));
        if known.closed {
            node.close();
        }
        known.nodes.insert(place.clone(), node.clone());
        node
    }

    /// Returns the node that decides about a slot, as far as is known; looks first where nothing is.
    pub(crate) async fn owner(&self, call: &Call, slot: u16) -> Result<Arc<Node>> {
        let look = {
            let known = self.known();
            if let Some(place) = known.owner(slot).filter(|_| !known.doubted) {
                let place = place.clone();
                drop(known);
                return Ok(self.node(&place));
            }
            known.look
        };
        let looked = self.look(call, look).await;
        let place = self.known().owner(slot).cloned();
        match (place, looked) {
            // What was known before is better than nothing: the node itself will say.
            (Some(place), _) => Ok(self.node(&place)),
            (None, Err(error)) => Err(error),
            (None, Ok(())) => Err(Error::new(
                ErrorKind::Unavailable,
                "no node of the Cluster decides about the slot of this lock",
            )),
        }
    }

    /// Returns what the configuration demands of the replicas of any node.
    pub(crate) fn demand(&self) -> Option<Wait> {
        Wait::demanded(&self.config, self.learnt.replicas())
    }

    /// Returns the nodes that decide about any slot.
    pub(crate) async fn masters(&self, call: &Call) -> Result<Vec<Arc<Node>>> {
        let look = self.known().look;
        self.look(call, look).await?;
        let mut places: Vec<Place> = self.known().slots.iter().map(|(_, _, place)| place.clone()).collect();
        places.sort_unstable();
        places.dedup();
        Ok(places.iter().map(|place| self.node(place)).collect())
    }

    /// Counts the slots that a node decides about.
    pub(crate) fn covered(&self) -> usize {
        self.known().slots.iter().map(|(first, last, _)| usize::from(last - first) + 1).sum()
    }

    /// Takes the word of a node that a slot is another's.
    pub(crate) fn moved(&self, slot: u16, place: Place) {
        let mut known = self.known();
        known.doubted = true;
        let at = known.slots.partition_point(|(first, ..)| *first <= slot);
        let Some((first, last, _)) = at.checked_sub(1).map(|at| known.slots[at].clone()) else { return };
        if slot > last {
            return;
        }
        let old = known.slots.remove(at - 1).2;
        let mut parts = vec![(slot, slot, place)];
        if first < slot {
            parts.insert(0, (first, slot - 1, old.clone()));
        }
        if slot < last {
            parts.push((slot + 1, last, old));
        }
        known.slots.splice(at - 1..at - 1, parts);
    }

    /// Takes what speaks against the map.
    pub(crate) fn doubt(&self) {
        self.known().doubted = true;
    }

    /// Asks nodes in turn for the slots, unless somebody did since `seen`.
    async fn look(&self, call: &Call, seen: u64) -> Result<()> {
        let patience = call.exchange_timeout();
        let Ok(_turn) = tokio::time::timeout(patience, self.looking.lock()).await else {
            return Err(Error::new(
                ErrorKind::Unavailable,
                "the slots of the Cluster are still being asked for",
            ));
        };
        let mut places = {
            let known = self.known();
            if known.look != seen {
                return Ok(());
            }
            known.nodes.keys().cloned().collect::<Vec<_>>()
        };
        // Those that a connection stands to answer at once.
        places.sort_by_key(|place| !self.known().nodes.get(place).is_some_and(|node| node.is_up()));
        places.extend(self.seeds.iter().cloned());
        let mut last = Error::new(ErrorKind::Unavailable, "no node of the Cluster can be reached");
        for place in places {
            if call.remaining().is_zero() {
                break;
            }
            // One that is silent must not use up the time of the others.
            let share = call.exchange_timeout() / 2;
            let asked = tokio::time::timeout(share, self.ask(call, &place)).await;
            let silent = |_| Err(Error::new(ErrorKind::Unavailable, "a node of the Cluster did not answer"));
            match asked.unwrap_or_else(silent) {
                Ok(slots) => {
                    let mut known = self.known();
                    known.slots = slots;
                    known.look += 1;
                    known.doubted = false;
                    // Nodes that have left take their connections along, once nobody uses them.
                    let Known { nodes, slots, .. } = &mut *known;
                    nodes.retain(|place, _| {
                        self.seeds.contains(place) || slots.iter().any(|(.., owner)| owner == place)
                    });
                    return Ok(());
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    async fn ask(&self, call: &Call, place: &Place) -> Result<Vec<Range>> {
        let link = self.node(place).link(call).await?;
        let mut question = redis::pipe();
        question.cmd("CLUSTER").arg("SLOTS");
        let answers = link.commands(call, &question, 1).await.map_err(|error| {
            // It only asked.
            let kind = match error.kind() {
                ErrorKind::Unknown => ErrorKind::Unavailable,
                kind => kind,
            };
            Error::new(kind, error.message().to_owned())
        })?;
        let answer = match answers.into_iter().next().unwrap_or_default() {
            Value::ServerError(refusal) => {
                let refusal = RedisError::from(refusal);
                if refusal.detail().is_some_and(|says| says.contains("cluster support disabled")) {
                    return Err(Error::new(
                        ErrorKind::Misconfigured,
                        format!(
                            "{}:{} is no node of a Cluster; write redis:// for a single server",
                            place.0, place.1
                        ),
                    ));
                }
                let error = error::error(Phase::Sent, refusal);
                let kind = if error.kind().had_no_effect() { error.kind() } else { ErrorKind::Unavailable };
                return Err(Error::new(kind, error.message().to_owned()));
            }
            answer => answer,
        };
        let (slots, replicas) = read_slots(answer, &place.0).ok_or_else(|| {
            Error::new(ErrorKind::Unavailable, "CLUSTER SLOTS answered with something else")
        })?;
        self.learnt.saw_replicas(replicas);
        Ok(slots)
    }

    pub(crate) fn close(&self) {
        let mut known = self.known();
        known.closed = true;
        known.nodes.values().for_each(|node| node.close());
    }
}

impl Known {
    fn owner(&self, slot: u16) -> Option<&Place> {
        let at = self.slots.partition_point(|(first, ..)| *first <= slot).checked_sub(1)?;
        let (_, last, place) = &self.slots[at];
        (slot <= *last).then_some(place)
    }
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = self.known();
        f.debug_struct("Cluster")
            .field("slots", &known.slots)
            .field("look", &known.look)
            .finish_non_exhaustive()
    }
}

/// Reads the answer of `CLUSTER SLOTS`: the ranges in order, and the most replicas that one has.
fn read_slots(answer: Value, asked: &str) -> Option<(Vec<Range>, u32)> {
    let Value::Array(ranges) = answer else { return None };
    let (mut slots, mut replicas) = (Vec::new(), 0);
    for range in ranges {
        let Value::Array(range) = range else { return None };
        let mut range = range.into_iter();
        let (Some(Value::Int(first)), Some(Value::Int(last))) = (range.next(), range.next()) else {
            return None;
        };
        let Some(Value::Array(master)) = range.next() else { return None };
        let mut master = master.into_iter();
        // A node that does not know its own name means the one that was asked.
        let host = match text(master.next()) {
            Some(host) if !host.is_empty() && host != "?" => host,
            _ => asked.to_owned(),
        };
        let Some(Value::Int(port)) = master.next() else { return None };
        let (first, last) = (u16::try_from(first).ok()?, u16::try_from(last).ok()?);
        if first > last || last >= SLOTS {
            return None;
        }
        replicas = replicas.max(u32::try_from(range.count()).unwrap_or(u32::MAX));
        slots.push((first, last, (host, u16::try_from(port).ok()?)));
    }
    slots.sort_unstable();
    Some((slots, replicas))
}

/// Computes the slot of a key: of what stands in its first braces, or of all of it.
pub(crate) fn slot(key: &str) -> u16 {
    let tagged = key.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map(|(tag, _)| tag);
    let hashed = tagged.filter(|tag| !tag.is_empty()).unwrap_or(key);
    // CRC16, CCITT (XMODEM).
    let crc = hashed.bytes().fold(0u16, |crc, byte| {
        (0..8).fold(crc ^ (u16::from(byte) << 8), |crc, _| match crc & 0x8000 {
            0 => crc << 1,
            _ => (crc << 1) ^ 0x1021,
        })
    });
    crc % SLOTS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster(slots: Vec<Range>) -> Cluster {
        let cluster = Cluster::new(Arc::new(RedisConfig::cluster([("a", 1)])), Vec::new(), Arc::default());
        cluster.known().slots = slots;
        cluster
    }

    fn place(host: &str) -> Place {
        (host.to_owned(), 1)
    }

    #[test]
    fn slots_are_those_of_the_specification() {
        assert_eq!(slot("123456789"), 0x31c3);
        assert_eq!(slot("foo"), 12_182);
        assert_eq!(slot("{user1000}.following"), slot("{user1000}.followers"));
        assert_eq!(slot("foo{}{bar}"), slot("foo{}{bar}"));
        assert_ne!(slot("foo{}{bar}"), slot("bar"));
        assert_eq!(slot("foo{{bar}}zap"), slot("{bar"));
        assert_eq!(slot("foo{bar}{zap}"), slot("bar"));
    }

    #[test]
    fn a_moved_slot_is_moved_alone() {
        let cluster = cluster(vec![(0, 10, place("a")), (20, 30, place("b"))]);
        cluster.moved(5, place("c"));
        cluster.moved(20, place("c"));
        cluster.moved(30, place("c"));
        cluster.moved(15, place("c"));
        let known = cluster.known();
        assert!(known.doubted);
        let owner = |slot| known.owner(slot).map(|(host, _)| host.as_str());
        assert_eq!([4, 5, 6, 10].map(owner), [Some("a"), Some("c"), Some("a"), Some("a")]);
        assert_eq!([20, 21, 29, 30].map(owner), [Some("c"), Some("b"), Some("b"), Some("c")]);
        assert_eq!([11, 15, 19, 31].map(owner), [None; 4]);
    }

    #[test]
    fn redirections_are_read() {
        let read = |line: &str| {
            let value = redis::parse_redis_value(format!("-{line}\r\n").as_bytes()).unwrap();
            Sign::read(&value.extract_error().unwrap_err(), "asked")
        };
        assert_eq!(read("MOVED 3999 10.0.0.1:6381"), Sign::Moved(("10.0.0.1".into(), 6381)));
        assert_eq!(read("MOVED 3999 :6381"), Sign::Moved(("asked".into(), 6381)));
        assert_eq!(read("ASK 3999 ::1:6381"), Sign::Ask(("::1".into(), 6381)));
        assert_eq!(read("ASK"), Sign::Later);
        assert_eq!(read("TRYAGAIN Multiple keys request during rehashing of slot"), Sign::Later);
        assert_eq!(read("CLUSTERDOWN Hash slot not served"), Sign::Later);
        assert_eq!(read("NOPERM no"), Sign::None);
    }
}
