//! Names of keys and the value of a place in the queue.

use lockcore::backend::{LockName, Owner};

/// The keys of one namespace. A name is escaped and ends with a colon, which no escaped name contains: the places of
/// one lock are never a prefix of another's.
#[derive(Clone, Debug)]
pub(crate) struct Space(String);

impl Space {
    pub(crate) fn new(namespace: &str) -> Self {
        Self(format!("lockcore/{namespace}/"))
    }

    /// What all keys of the namespace begin with.
    #[cfg(feature = "config")]
    pub(crate) fn all(&self) -> String {
        self.0.clone()
    }

    /// The record of the namespace: the base of its fences.
    pub(crate) fn base(&self) -> String {
        format!("{}base", self.0)
    }

    /// A key that is never written. Its deletion orders a transaction that reads behind every write before it.
    pub(crate) fn nothing(&self) -> String {
        format!("{}nothing", self.0)
    }

    pub(crate) fn places(&self) -> String {
        format!("{}q/", self.0)
    }

    pub(crate) fn queue(&self, name: &LockName) -> String {
        let escaped = name.as_str().replace('%', "%25").replace(':', "%3A");
        format!("{}{escaped}:", self.places())
    }

    pub(crate) fn place(&self, name: &LockName, owner: &Owner) -> String {
        let mut key = self.queue(name);
        for byte in owner.expose() {
            key.extend(
                [byte >> 4, byte & 15].map(|digit| char::from(b"0123456789abcdef"[usize::from(digit)])),
            );
        }
        key
    }

    /// The mark of a break, tied to the lease that was broken.
    pub(crate) fn mark(&self, name: &LockName, owner: &Owner) -> String {
        self.place(name, owner).replacen("/q/", "/broken/", 1)
    }

    /// The record of a migration's phases.
    pub(crate) fn phase(&self) -> String {
        format!("{}phase", self.0)
    }

    pub(crate) fn members(&self) -> String {
        format!("{}member/", self.0)
    }

    /// A membership in a phase.
    pub(crate) fn member(&self, phase: &LockName, owner: &Owner) -> String {
        self.place(phase, owner).replacen("/q/", "/member/", 1)
    }

    /// Reads the name out of the key of a place.
    pub(crate) fn name_of(&self, key: &[u8]) -> Option<LockName> {
        name_below(&self.places(), key)
    }

    /// Reads the phase out of the key of a membership.
    pub(crate) fn phase_of(&self, key: &[u8]) -> Option<LockName> {
        name_below(&self.members(), key)
    }
}

fn name_below(prefix: &str, key: &[u8]) -> Option<LockName> {
    let (escaped, _) = std::str::from_utf8(key).ok()?.strip_prefix(prefix)?.rsplit_once(':')?;
    LockName::parse(&escaped.replace("%3A", ":").replace("%25", "%")).ok()
}

/// Reads the owner out of the key of a place, or of a membership.
pub(crate) fn owner_of(key: &[u8]) -> Option<Owner> {
    let text = std::str::from_utf8(key).ok()?;
    let (_, hex) = text.rsplit_once(':')?;
    if hex.len() != 32 || !hex.is_ascii() {
        return None;
    }
    let mut bytes = [0; 16];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&hex[2 * at..2 * at + 2], 16).ok()?;
    }
    Some(Owner::from_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_queue_is_a_prefix_of_another_and_keys_read_back() {
        let space = Space::new("prod");
        let owner = Owner::from_bytes([0xa5; 16]);
        let names = ["a", "a/b", "ab", "a/b/c"].map(|n| LockName::parse(n).unwrap());
        for one in &names {
            let key = space.place(one, &owner);
            assert_eq!(space.name_of(key.as_bytes()).as_ref(), Some(one));
            assert_eq!(owner_of(key.as_bytes()), Some(owner));
            let member = space.member(one, &owner);
            assert_eq!(
                (space.phase_of(member.as_bytes()).as_ref(), space.name_of(member.as_bytes())),
                (Some(one), None)
            );
            for other in names.iter().filter(|other| *other != one) {
                assert!(!space.queue(other).starts_with(&space.queue(one)), "{one} {other}");
            }
        }
    }
}
