//! The record of a migration's phases, and the memberships that bind to it: the atomic steps, one script each.
//!
//! # Shape
//! For the namespace `shop`:
//!
//! | key | value | ends |
//! |---|---|---|
//! | `lockcore:shop:{phases}:record` | `epoch\|floor\|migration,phase,phase…`: numbers, and the names of the migration and of the phases that are open | never |
//! | `lockcore:shop:{phases}:members` | a hash: owner → `end\|phase\|label`, the end by the server's clock in microseconds | when all its members have ended |
//! | `lockcore:shop:{phases}:none` | never exists, as for a lock | |
//!
//! `%`, `|` and `,` inside a name are escaped, so that a record has one text form and is compared by it. In a Cluster the
//! two keys share a slot, which is not that of a lock: a grant cannot look at them in one step. It is bound by its request
//! instead, which does nothing after the end of the membership that it left under.

use std::{
    collections::HashMap,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use lockcore::backend::{Call, Error, ErrorKind, Fence, Member, Moment, Owner, PhaseRecord, Result};
use redis::Value;

use crate::{
    pieces::{be_master, read_lock, time},
    road::{Done, Trip},
    wire::{Script, decimal, hex, millis, unhex, unreadable},
};

static READ: Script = Script::new(concat!(
    be_master!("2"),
    time!(),
    read_lock!(),
    r"
if v == true then return {'alien', us} end
return {'ok', us, v}
"
));

static REPLACE: Script = Script::new(concat!(
    be_master!("2"),
    time!(),
    read_lock!(),
    r"
if v == true then return {'alien', us} end
if (v or '') ~= ARGV[1] then return {'changed', us} end
redis.call('SET', KEYS[1], ARGV[2])
return {'ok', us}
"
));

/// `m`: what the field of a hash holds. Ends the script where the key is no hash.
macro_rules! read_member {
    ($key:literal) => {
        concat!(
            "local m = redis.pcall('HGET', KEYS[",
            $key,
            r"], ARGV[1])
if type(m) == 'table' then
  if not string.find(m.err, 'WRONGTYPE', 1, true) then return m end
  return {'alien', us}
end
local till, rest = nil, nil
if m then till, rest = string.match(m, '^(%d+)(|.*)$') end
till = tonumber(till)
"
        )
    };
}

/// Writes a member that ends at `till`; the hash stays as long as the last of them.
macro_rules! keep_member {
    ($key:literal) => {
        concat!(
            "redis.call('HSET', KEYS[",
            $key,
            r"], ARGV[1], string.format('%.0f', till) .. rest)
if redis.call('PTTL', KEYS[",
            $key,
            r"]) < ttl + 1000 then redis.call('PEXPIRE', KEYS[",
            $key,
            r"], ttl + 1000) end
return {'ok', us, math.floor((till - us) / 1000)}
"
        )
    };
}

// The look at the record and the membership are one step: who closes the phase finds the member, or keeps it out.
static JOIN: Script = Script::new(concat!(
    be_master!("3"),
    time!(),
    read_lock!(),
    r"
local phase, ttl = ARGV[2], tonumber(ARGV[3])
if not v then return {'closed', us} end
local open = v ~= true and string.match(v, '^%d+|%d+|[^,|]*(,?.*)$')
if not open then return {'alien', us} end
if not string.find(open .. ',', ',' .. phase .. ',', 1, true) then return {'closed', us} end
",
    read_member!("2"),
    r"
local all = redis.call('HGETALL', KEYS[2])
for n = 1, #all, 2 do
  local over = tonumber((string.match(all[n + 1], '^(%d+)|')))
  if over and over <= us then redis.call('HDEL', KEYS[2], all[n]) end
end
till, rest = us + ttl * 1000, '|' .. phase .. '|' .. ARGV[4]
",
    keep_member!("2")
));

// Never creates and never shortens. A phase that is closed keeps its members until they leave.
static STAY: Script = Script::new(concat!(
    be_master!("2"),
    time!(),
    read_member!("1"),
    r"
local ttl = tonumber(ARGV[2])
if not till or till <= us then return {'none', us} end
till = math.max(till, us + ttl * 1000)
",
    keep_member!("1")
));

static LEAVE: Script = Script::new(concat!(
    be_master!("2"),
    time!(),
    read_member!("1"),
    r"
if not m then return {'ok', us, 0} end
redis.call('HDEL', KEYS[1], ARGV[1])
if till and till > us then return {'ok', us, 1} end
return {'ok', us, 0}
"
));

static MEMBERS: Script = Script::new(concat!(
    be_master!("2"),
    time!(),
    r"
local all = redis.pcall('HGETALL', KEYS[1])
if all.err then
  if not string.find(all.err, 'WRONGTYPE', 1, true) then return all end
  return {'alien', us}
end
return {'ok', us, all}
"
));

/// The keys of a namespace's phases.
#[derive(Clone, Debug)]
pub(crate) struct PhaseKeys {
    pub(crate) record: String,
    pub(crate) members: String,
    none: String,
}

impl PhaseKeys {
    pub(crate) fn new(namespace: &str) -> Self {
        let key = |what: &str| format!("lockcore:{namespace}:{{phases}}:{what}");
        Self { record: key("record"), members: key("members"), none: key("none") }
    }

    /// Returns the key that shows whether this is a master: in a Cluster, where a replica runs no script, the first, which
    /// a node has or has not while the slot moves.
    fn none<'a>(&'a self, trip: &Trip<'_>, first: &'a str) -> &'a str {
        if trip.is_cluster { first } else { &self.none }
    }
}

pub(crate) async fn read(trip: &mut Trip<'_>, call: &Call, keys: &PhaseKeys) -> Result<Option<PhaseRecord>> {
    let names = [&keys.record, keys.none(trip, &keys.record)];
    let answer = trip.run(call, &READ, &names, &[], false).await?.answer;
    match (&*answer.word, answer.rest.first()) {
        (b"ok", Some(Value::Nil)) => Ok(None),
        (b"ok", Some(Value::BulkString(text))) => record(text).map(Some).ok_or_else(alien),
        (b"alien", _) => Err(alien()),
        _ => Err(unreadable()),
    }
}

/// Replaces the record if it still is what was expected; says whether it did.
pub(crate) async fn replace(
    trip: &mut Trip<'_>,
    call: &Call,
    keys: &PhaseKeys,
    expect: Option<&PhaseRecord>,
    new: &PhaseRecord,
) -> Result<bool> {
    let (expect, new) = (expect.map(text).unwrap_or_default(), text(new));
    let names = [&keys.record, keys.none(trip, &keys.record)];
    let done = trip.run(call, &REPLACE, &names, &[expect.as_bytes(), new.as_bytes()], true).await?;
    match &*done.acknowledged()?.word {
        b"ok" => Ok(true),
        b"changed" => Ok(false),
        b"alien" => Err(alien()),
        _ => Err(unreadable()),
    }
}

/// What a join found.
#[derive(Debug)]
pub(crate) enum Joined {
    Member {
        /// Why it does not count: too few replicas have it.
        short: Option<Error>,
    },
    /// The phase is not open.
    Closed,
}

/// Adds a member if the phase is open. Members that are over go.
pub(crate) async fn join(
    trip: &mut Trip<'_>,
    call: &Call,
    keys: &PhaseKeys,
    owner: &Owner,
    phase: &str,
    ttl: Duration,
) -> Result<Joined> {
    let (owner, phase, ttl) = (hex(owner), escape(phase), decimal(millis(ttl)));
    let names = [&keys.record, &keys.members, keys.none(trip, &keys.record)];
    let args: [&[u8]; 4] = [owner.as_bytes(), phase.as_bytes(), &ttl, call.label().as_bytes()];
    let Done { answer, short, .. } = trip.run(call, &JOIN, &names, &args, true).await?;
    match &*answer.word {
        b"ok" => Ok(Joined::Member { short }),
        b"closed" => Ok(Joined::Closed),
        b"alien" => Err(alien()),
        _ => Err(unreadable()),
    }
}

/// Moves the end of a membership; says how long it lasts then. `None`: there is none, or it has ended.
pub(crate) async fn stay(
    trip: &mut Trip<'_>,
    call: &Call,
    keys: &PhaseKeys,
    owner: &Owner,
    ttl: Duration,
) -> Result<Option<Duration>> {
    let (owner, ttl) = (hex(owner), decimal(millis(ttl)));
    let names = [&keys.members, keys.none(trip, &keys.members)];
    let done = trip.run(call, &STAY, &names, &[owner.as_bytes(), &ttl], true).await?;
    let answer = done.acknowledged()?;
    match &*answer.word {
        b"ok" => answer.left(0).map(Some),
        b"none" => Ok(None),
        b"alien" => Err(alien()),
        _ => Err(unreadable()),
    }
}

/// Ends a membership; says whether there was one.
pub(crate) async fn leave(trip: &mut Trip<'_>, call: &Call, keys: &PhaseKeys, owner: &Owner) -> Result<bool> {
    let owner = hex(owner);
    let names = [&keys.members, keys.none(trip, &keys.members)];
    let answer = trip.run(call, &LEAVE, &names, &[owner.as_bytes()], false).await?.answer;
    match &*answer.word {
        b"ok" => Ok(answer.int(0)? == 1),
        b"alien" => Err(alien()),
        _ => Err(unreadable()),
    }
}

/// Lists who has joined and is not over.
pub(crate) async fn members(trip: &mut Trip<'_>, call: &Call, keys: &PhaseKeys) -> Result<Vec<Member>> {
    let names = [&keys.members, keys.none(trip, &keys.members)];
    let answer = trip.run(call, &MEMBERS, &names, &[], false).await?.answer;
    match (&*answer.word, answer.rest.first()) {
        (b"ok", Some(Value::Array(fields))) => {
            let (pairs, []) = fields.as_chunks::<2>() else { return Err(unreadable()) };
            let mut members = Vec::new();
            for [owner, value] in pairs {
                // Whose membership it is cannot be told, but somebody may have one.
                let (member, end) = member(owner, value).ok_or_else(alien)?;
                if end > answer.us {
                    let left = Duration::from_micros(end - answer.us);
                    members.push(member.with(|member| member.remaining = Some(left)));
                }
            }
            let order = |member: &Member| (member.phase.clone(), member.label.clone(), member.owner);
            members.sort_by_key(order);
            Ok(members)
        }
        (b"alien", _) => Err(alien()),
        _ => Err(unreadable()),
    }
}

fn text(record: &PhaseRecord) -> String {
    let floor = record.floor.map_or(0, Fence::get);
    let open: String = record.open.iter().map(|phase| format!(",{}", escape(phase))).collect();
    format!("{}|{floor}|{}{open}", record.epoch, escape(&record.migration))
}

fn record(text: &[u8]) -> Option<PhaseRecord> {
    let mut parts = std::str::from_utf8(text).ok()?.splitn(3, '|');
    let (epoch, floor) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    let mut names = parts.next()?.split(',').map(unescape);
    let mut record = PhaseRecord::new(names.next()?, epoch);
    record.floor = if floor == 0 { None } else { Some(Fence::new(floor).ok()?) };
    record.open = names.collect();
    Some(record)
}

fn member(owner: &Value, value: &Value) -> Option<(Member, u64)> {
    let (Value::BulkString(owner), Value::BulkString(value)) = (owner, value) else { return None };
    let owner = unhex(std::str::from_utf8(owner).ok()?)?;
    let mut parts = std::str::from_utf8(value).ok()?.splitn(3, '|');
    let (end, phase, label) = (parts.next()?.parse().ok()?, parts.next()?, parts.next()?);
    let label = Some(label.to_owned()).filter(|label| !label.is_empty());
    Some((Member::new(unescape(phase), owner.digest()).with(|member| member.label = label), end))
}

fn escape(name: &str) -> String {
    name.replace('%', "%25").replace('|', "%7C").replace(',', "%2C")
}

fn unescape(name: &str) -> String {
    name.replace("%7C", "|").replace("%2C", ",").replace("%25", "%")
}

fn alien() -> Error {
    Error::new(
        ErrorKind::Misconfigured,
        "a key of this namespace's phases holds something that is not ours; find out whose it is and remove it, or use \
         another namespace",
    )
}

/// The memberships that one backend has joined, by their owner: until when each binds.
#[derive(Debug, Default)]
pub(crate) struct Memberships {
    map: Mutex<HashMap<Owner, (Box<str>, Moment)>>,
    /// Nearly no backend takes part in a migration, and an acquire only looks here.
    count: AtomicUsize,
}

impl Memberships {
    fn map(&self) -> MutexGuard<'_, HashMap<Owner, (Box<str>, Moment)>> {
        // The map is whole between any two of its operations.
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a membership stands until then, or that it does for longer.
    pub(crate) fn stands(&self, namespace: &str, owner: &Owner, deadline: Moment) {
        let mut map = self.map();
        let (_, known) = map.entry(*owner).or_insert((namespace.into(), deadline));
        *known = deadline.max(*known);
        self.count.store(map.len(), Ordering::Release);
    }

    pub(crate) fn over(&self, owner: &Owner) {
        let mut map = self.map();
        map.remove(owner);
        self.count.store(map.len(), Ordering::Release);
    }

    /// Returns until when what is asked for now may be granted. `None`: no membership binds it, or none does any more, and
    /// whoever joined has to know that.
    pub(crate) fn bound(&self, namespace: &str, now: Moment) -> Option<Moment> {
        if self.count.load(Ordering::Acquire) == 0 {
            return None;
        }
        let map = self.map();
        let here = map.values().filter(|(space, deadline)| **space == *namespace && now < *deadline);
        here.map(|(_, deadline)| *deadline).max()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_has_one_text_form_and_is_read_back() {
        let mut seen = std::collections::HashSet::new();
        for migration in ["moving", "", "a|b", "%7C", "a,b", "%"] {
            for open in
                [vec![], vec![""], vec!["from"], vec!["from", "both"], vec!["from,both"], vec!["a|", "%2C"]]
            {
                for floor in [None, Some(Fence::MIN), Fence::new(9_000_000_000_000_000).ok()] {
                    let mut phases = PhaseRecord::new(migration, u64::MAX);
                    phases.floor = floor;
                    phases.open = open.iter().map(|phase| (*phase).to_owned()).collect();
                    let written = text(&phases);
                    assert_eq!(record(written.as_bytes()), Some(phases), "{written}");
                    assert!(seen.insert(written.clone()), "two records are written {written}");
                }
            }
        }
        for foreign in ["", "x", "1", "1|2", "-1|0|m", "1|x|m", "1|-2|m"] {
            assert_eq!(record(foreign.as_bytes()), None, "{foreign}");
        }
    }

    #[test]
    fn a_membership_binds_its_namespace_until_it_is_over() {
        let memberships = Memberships::default();
        let (owner, at) = (Owner::random(), |ms: u64| Moment::from_nanos(ms * 1_000_000));
        assert_eq!(memberships.bound("shop", at(1)), None);
        memberships.stands("shop", &owner, at(10));
        memberships.stands("shop", &owner, at(5));
        assert_eq!(memberships.bound("shop", at(1)), Some(at(10)), "an older answer came last");
        assert_eq!(memberships.bound("other", at(1)), None);
        assert_eq!(memberships.bound("shop", at(10)), None);
        memberships.over(&owner);
        assert_eq!(memberships.bound("shop", at(1)), None);
    }
}
