//! Names of nodes, and what a place in a queue says of itself.

use lockcore::backend::{LockName, Owner};

/// The nodes of one namespace.
#[derive(Clone, Debug)]
pub(crate) struct Space(String);

impl Space {
    pub(crate) fn new(root: &str, namespace: &str) -> Self {
        Self(format!("{root}/lockcore/@{namespace}"))
    }

    /// The node below which everything of the namespace stands.
    #[cfg(feature = "config")]
    pub(crate) fn top(&self) -> String {
        self.0.clone()
    }

    /// The record of the namespace: the base of its fences.
    pub(crate) fn base(&self) -> String {
        format!("{}/base", self.0)
    }

    pub(crate) fn locks(&self) -> String {
        format!("{}/locks", self.0)
    }

    /// The record of a migration's phases.
    pub(crate) fn phases(&self) -> String {
        format!("{}/phases", self.0)
    }

    /// Where the members of a phase stand, by the name that their leases carry.
    pub(crate) fn members(&self, name: &LockName) -> String {
        format!("{}/members/{}", self.0, escape(name.as_str()))
    }

    pub(crate) fn all_members(&self) -> String {
        format!("{}/members", self.0)
    }

    /// The queue of one lock: a container, which the server removes when it has been empty for a while.
    pub(crate) fn queue(&self, name: &LockName) -> String {
        format!("{}/locks/{}", self.0, escape(name.as_str()))
    }
}

/// The node by which a session proves that it lives.
pub(crate) fn beat(root: &str, session: i64) -> String {
    format!("{}/{session:016x}", beats(root))
}

pub(crate) fn beats(root: &str) -> String {
    format!("{root}/lockcore/sessions")
}

/// Says whether a server accepts a character inside a node's name. Its strings are UTF-16, so everything beyond the
/// first plane falls into the range of surrogates that it refuses.
///
/// # Source
/// ZooKeeper 3.8, `PathUtils.validatePath`.
pub(crate) fn is_plain(c: char) -> bool {
    !matches!(c, '\0'..='\u{1f}' | '\u{7f}'..='\u{9f}' | '\u{e000}'..='\u{f8ff}' | '\u{fff0}'..='\u{10ffff}')
}

/// Writes a lock's name as one node's name. Reversible, so different names never share a node.
fn escape(name: &str) -> String {
    let mut node = String::with_capacity(name.len() + 8);
    let only_dots = matches!(name, "." | "..");
    for c in name.chars() {
        if is_plain(c) && !matches!(c, '/' | '%') && !only_dots {
            node.push(c);
        } else {
            let mut bytes = [0; 4];
            for byte in c.encode_utf8(&mut bytes).bytes() {
                node.push_str(&format!("%{byte:02X}"));
            }
        }
    }
    node
}

/// Reads a lock's name back.
pub(crate) fn unescape(node: &str) -> Option<LockName> {
    let (mut bytes, mut rest) = (Vec::with_capacity(node.len()), node.bytes());
    while let Some(byte) = rest.next() {
        if byte == b'%' {
            let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
            let (high, low) = (digit(rest.next())?, digit(rest.next())?);
            bytes.push((high * 16 + low) as u8);
        } else {
            bytes.push(byte);
        }
    }
    LockName::parse(std::str::from_utf8(&bytes).ok()?).ok()
}

/// The first part of a place's name; the server appends the sequence.
pub(crate) fn stem(owner: &Owner) -> String {
    let digit = |digit: u8| char::from(b"0123456789abcdef"[usize::from(digit)]);
    let digits = owner.expose().iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]);
    digits.chain(['-']).collect()
}

/// Reads owner and sequence out of a place's name. The sequence is signed and wraps; below zero it has a sign.
pub(crate) fn read_node(node: &str) -> Option<(Owner, i32)> {
    let (hex, sequence) = node.split_at_checked(32)?;
    let sequence = sequence.strip_prefix('-')?.parse().ok()?;
    let mut bytes = [0; 16];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(hex.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some((Owner::from_bytes(bytes), sequence))
}

/// What a place says of itself: the base it was granted under, the TTL asked, what the holder calls itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Note {
    pub(crate) base: i64,
    pub(crate) ttl_ms: u64,
    pub(crate) label: String,
}

impl Note {
    pub(crate) fn write(&self) -> Vec<u8> {
        format!("{}:{}:{}", self.base, self.ttl_ms, self.label).into_bytes()
    }

    pub(crate) fn read(data: &[u8]) -> Option<Self> {
        let mut parts = std::str::from_utf8(data).ok()?.splitn(3, ':');
        let (base, ttl_ms) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        Some(Self { base, ttl_ms, label: parts.next()?.to_owned() })
    }
}

/// What a break writes into the queue's own node: whom it cut off.
pub(crate) fn mark(owner: &Owner, fence: i64) -> Vec<u8> {
    format!("broken:{}{fence}", stem(owner)).into_bytes()
}

/// One lock's queue as listed: places in order of arrival.
#[derive(Clone, Debug, Default)]
pub(crate) struct Queue(Vec<(Owner, i32, String)>);

impl Queue {
    /// Sorts what the server listed. Nodes that are not ours are passed over.
    ///
    /// The sequence is a 32-bit counter that wraps: it is compared by distance, which is right as long as fewer than
    /// 2^31 places stand between the first and the last.
    pub(crate) fn new(children: Vec<String>) -> Self {
        let mut places: Vec<(Owner, i32, String)> = children
            .into_iter()
            .filter_map(|node| read_node(&node).map(|(owner, sequence)| (owner, sequence, node)))
            .collect();
        if let Some(pivot) = places.first().map(|place| place.1) {
            places.sort_by_key(|place| place.1.wrapping_sub(pivot));
        }
        Self(places)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn first(&self) -> Option<(&Owner, &str)> {
        self.0.first().map(|(owner, _, node)| (owner, node.as_str()))
    }

    pub(crate) fn contains(&self, node: &str) -> bool {
        self.0.iter().any(|place| place.2 == node)
    }

    pub(crate) fn of(&self, owner: &Owner) -> impl Iterator<Item = &str> {
        let owner = *owner;
        self.0.iter().filter(move |place| place.0 == owner).map(|place| place.2.as_str())
    }

    /// The place before this one; `None`: it is the first, or not there.
    pub(crate) fn before(&self, node: &str) -> Option<&str> {
        let at = self.0.iter().position(|place| place.2 == node)?;
        at.checked_sub(1).map(|at| self.0[at].2.as_str())
    }

    pub(crate) fn is_first(&self, node: &str) -> bool {
        self.first().is_some_and(|(_, first)| first == node)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_become_nodes_and_come_back() {
        let space = Space::new("/shop", "prod");
        for text in ["a", "a/b", "a%2Fb", "a%25b", ".", "..", "straße", "🔒/x", "\u{e000}", "\u{fffd}"] {
            let name = LockName::parse(text).unwrap();
            let path = space.queue(&name);
            let node = path.strip_prefix("/shop/lockcore/@prod/locks/").unwrap();
            assert!(!matches!(node, "." | "..") && node.chars().all(|c| is_plain(c) && c != '/'), "{node}");
            assert_eq!(unescape(node), Some(name));
        }
    }

    #[test]
    fn a_sequence_that_wraps_keeps_the_order_of_arrival() {
        let mut order = [i32::MAX - 1, i32::MAX, i32::MIN, i32::MIN + 1, i32::MIN + 2].map(|sequence| {
            let owner = Owner::from_bytes([sequence as u8; 16]);
            format!("{}{sequence:010}", stem(&owner))
        });
        let made = order.clone();
        // Whatever order the server lists them in, each place has the same one before it.
        for turn in 0..order.len() {
            order.rotate_left(1);
            let queue = Queue::new(order.to_vec());
            assert!(queue.is_first(&made[0]), "turn {turn}");
            for pair in made.windows(2) {
                assert_eq!(queue.before(&pair[1]), Some(pair[0].as_str()));
            }
        }
        order.reverse();
        assert!(Queue::new(order.to_vec()).is_first(&made[0]));
        let mut more = made.to_vec();
        more.push(format!("{}{:010}", stem(&Owner::from_bytes([9; 16])), i32::MIN + 3));
        assert!(Queue::new(more).is_first(&made[0]), "a newcomer changed the head");
    }

    #[test]
    fn places_read_back() {
        let owner = Owner::from_bytes([0xa5; 16]);
        assert_eq!(read_node(&format!("{}-2147483648", stem(&owner))), Some((owner, i32::MIN)));
        assert_eq!(read_node("x"), None);
        assert_eq!(read_node(&"ü".repeat(16)), None);
        let note = Note { base: 7, ttl_ms: 1000, label: "web:3:x".into() };
        assert_eq!(Note::read(&note.write()), Some(note));
        assert_eq!(Note::read(b"hello"), None);
    }
}
