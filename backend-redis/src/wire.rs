//! The atomic steps, one script each: they report what they found and did; they do not decide.
//!
//! # Shape
//! For a lock `order/42` in the namespace `shop`:
//!
//! | key | value | ends |
//! |---|---|---|
//! | `lockcore:shop:{order/42}:lock` | `owner\|fence\|since\|label`: 32 hex digits, a number, microseconds, text | with the TTL |
//! | `lockcore:shop:{order/42}:fence` | `fence\|owner`: the highest fence so far, and whose it is | `fence_margin` after it, never while it is ahead of the server's clock |
//! | `lockcore:shop:{order/42}:gone:<owner>` | `gone` or `broken`: no request of this owner may take the lock any more | when no copy of one can be under way |
//! | `lockcore:shop:{order/42}:free` | a channel: a message says that the lock was given up | |
//! | `lockcore:shop:{order/42}:none` | never exists: what is written there does nothing, and shows that this is a master | |
//!
//! The braces are a hash tag, so all keys of one lock live in one slot. Braces inside the name are written `%7B` and
//! `%7D`, which the text form of a name cannot contain: different names never share a key.
//!
//! # Units
//! `us` is the server's clock in microseconds since 1970, read inside the script. Numbers are doubles in Lua: exact
//! below 2^53, and a fence that would reach 2^53 - 1 is refused. What is stored is formatted by `%.0f`, because `..`
//! would round it; what is answered is an integer of the protocol.
//!
//! # Source
//! Redis 7.0 manual: EVAL, SET, PEXPIRE, Cluster specification (hash tags).

use std::{collections::BTreeSet, sync::OnceLock, time::Duration};

use lockcore::backend::{Call, Error, ErrorKind, Fence, LockName, Moment, Owner, Result};
use redis::Value;

use crate::{
    connection::Link,
    error::{self, Phase},
    greeting,
    pieces::{be_master, keep_fence, read_fence, read_lock, time},
    road::{Done, Request, Trip},
};

/// No fence reaches this: 2^53 - 1, the last number that a script can count to exactly.
pub(crate) const FENCE_LIMIT: i64 = (1 << 53) - 1;

/// A script and the digest that the server knows it by.
pub(crate) struct Script {
    source: &'static str,
    digest: OnceLock<String>,
}

impl Script {
    pub(crate) const fn new(source: &'static str) -> Self {
        Self { source, digest: OnceLock::new() }
    }

    pub(crate) fn source(&self) -> &'static str {
        self.source
    }

    pub(crate) fn digest(&self) -> &str {
        self.digest.get_or_init(|| redis::Script::new(self.source).get_hash().to_owned())
    }
}

// The fence is written before the lock: should the second write fail, a number is lost, not a promise. No `be_master`
// stands before the grant: a server that is out of memory is to refuse it. (KEYS[3] was just seen absent.)
static ACQUIRE: Script = Script::new(concat!(
    r"
local owner, ttl, floor, not_after, margin, label = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6]",
    time!(),
    r"
if us > tonumber(not_after) then return {'late', us} end
if redis.call('EXISTS', KEYS[3]) == 1 then return {'over', us} end",
    read_lock!(),
    r"
if v then
  redis.call('PERSIST', KEYS[3])
  local left = redis.call('PTTL', KEYS[1])
  if v == true then return {'held', us, left, false} end
  local holder, fence = string.match(v, '^(%x+)|(%d+)|%d+|')
  if holder == owner then return {'ok', us, tonumber(fence), left} end
  return {'held', us, left, v}
end
",
    read_fence!("2"),
    r"
local fence = math.max(high + 1, tonumber(floor) + 1, us)
if fence >= 9007199254740991 then return {'full', us} end",
    keep_fence!("2"),
    r"
redis.call('SET', KEYS[1], owner .. '|' .. exact .. '|' .. string.format('%.0f', us) .. '|' .. label, 'PX', ttl)
return {'ok', us, fence, tonumber(ttl)}
"
));

// Never creates and never shortens.
pub(crate) static RENEW: Script = Script::new(concat!(
    be_master!("3"),
    time!(),
    read_lock!(),
    r"
local own, ttl = ARGV[1], tonumber(ARGV[2])
if type(v) == 'string' and string.sub(v, 1, #own) == own then
  local left = redis.call('PTTL', KEYS[1])
  if left < 0 then return {'ok', us, ttl} end
  if left < ttl then
    redis.call('PEXPIRE', KEYS[1], ttl)
    left = ttl
  end
  return {'ok', us, left}
end
if KEYS[2] ~= KEYS[1] and redis.call('GET', KEYS[2]) == 'broken' then return {'broken', us} end
if v then return {'taken', us} end
return {'none', us}
"
));

// PUBLISH by pcall: a user who may not use the channel still ends leases, and waiters find out by looking.
pub(crate) static RELEASE: Script = Script::new(concat!(
    be_master!("3"),
    time!(),
    read_lock!(),
    r"
local own, not_after = ARGV[1], tonumber(ARGV[2])
local ended = 0
if type(v) == 'string' and string.sub(v, 1, #own) == own then
  redis.call('DEL', KEYS[1])
  redis.pcall('PUBLISH', ARGV[3], '')
  ended = 1
end
if not_after >= us then
  redis.call('SET', KEYS[2], 'gone', 'PXAT', string.format('%.0f', math.floor(not_after / 1000) + 1))
end
return {'ok', us, ended}
"
));

// The mark stays until no copy of the acquire can run: by the clock that copies are checked against, and for the time
// that a copy sent just now could have been given.
pub(crate) static CANCEL: Script = Script::new(concat!(
    be_master!("3"),
    time!(),
    read_lock!(),
    r"
local owner, adopt, not_after, ttl = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
if type(v) == 'string' then
  local holder, fence = string.match(v, '^(%x+)|(%d+)|%d+|')
  if holder == owner then
    if adopt == '1' then return {'ok', us, tonumber(fence), redis.call('PTTL', KEYS[1])} end
    redis.call('DEL', KEYS[1])
    redis.pcall('PUBLISH', ARGV[5], '')
  end
end
local till = math.max(not_after, us + ttl * 1000)
redis.call('SET', KEYS[2], 'gone', 'PXAT', string.format('%.0f', math.floor(till / 1000) + 1))
return {'gone', us}
"
));

pub(crate) static RAISE: Script = Script::new(concat!(
    be_master!("4"),
    time!(),
    read_lock!(),
    r"
local own, fence, floor, margin = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
if type(v) ~= 'string' or string.sub(v, 1, #own) ~= own then
  if redis.call('GET', KEYS[3]) == 'broken' then return {'broken', us} end
  if v then return {'taken', us} end
  return {'none', us}
end
",
    read_fence!("2"),
    r"
if floor >= 9007199254740990 then return {'full', us} end
fence = math.max(high, fence, floor)
local owner = string.match(own, '^%x+')",
    keep_fence!("2"),
    r"
return {'ok', us}
"
));

pub(crate) static RAISE_FENCE: Script = Script::new(concat!(
    be_master!("2"),
    time!(),
    read_fence!("1"),
    r"
local fence, margin, owner = tonumber(ARGV[1]), tonumber(ARGV[2]), ''
if fence >= 9007199254740990 then return {'full', us} end
if fence <= high then return {'ok', us, high} end",
    keep_fence!("1"),
    r"
return {'ok', us, fence}
"
));

// A break is a grant to nobody. It takes the lock only from the holder that was seen (an empty `own`: from nobody), and
// leaves that holder a mark, which tells it why, and stops copies of its acquire.
static BREAK: Script = Script::new(concat!(
    be_master!("4"),
    time!(),
    read_lock!(),
    r"
local own, margin, owner = ARGV[1], tonumber(ARGV[2]), ''
if own == '' then
  if v then return {'changed', us} end
elseif type(v) ~= 'string' or string.sub(v, 1, #own) ~= own then
  return {'changed', us}
end
",
    read_fence!("2"),
    r"
local fence = math.max(high + 1, us)
if fence >= 9007199254740991 then return {'full', us} end",
    keep_fence!("2"),
    r"
if own ~= '' then
  local left = redis.call('PTTL', KEYS[1])
  if left < 0 then left = 86400000 end
  redis.call('SET', KEYS[3], 'broken', 'PX', left + 1000)
  redis.call('DEL', KEYS[1])
  redis.pcall('PUBLISH', ARGV[3], '')
end
return {'ok', us, fence}
"
));

pub(crate) static INSPECT: Script = Script::new(concat!(
    time!(),
    read_lock!(),
    read_fence!("2"),
    r"
local left = redis.call('PTTL', KEYS[1])
if v == true then return {'held', us, left, false, high} end
return {v and 'held' or 'none', us, left, v, high}
"
));

/// The keys of one lock.
#[derive(Clone, Debug)]
pub(crate) struct Keys {
    base: String,
    pub(crate) lock: String,
    pub(crate) fence: String,
    pub(crate) channel: String,
}

impl Keys {
    pub(crate) fn new(namespace: &str, name: &LockName) -> Self {
        let name = name.as_str();
        // Nearly no name has braces, and a copy costs more than the look.
        let base = match name.contains(['{', '}']) {
            false => format!("lockcore:{namespace}:{{{name}}}:"),
            true => {
                format!("lockcore:{namespace}:{{{}}}:", name.replace('{', "%7B").replace('}', "%7D"))
            }
        };
        Self {
            lock: format!("{base}lock"),
            fence: format!("{base}fence"),
            channel: format!("{base}free"),
            base,
        }
    }

    pub(crate) fn gone(&self, owner: &str) -> String {
        format!("{}gone:{owner}", self.base)
    }

    /// A key that never exists.
    pub(crate) fn none(&self) -> String {
        format!("{}none", self.base)
    }

    /// Matches the lock and fence keys of a namespace, and no mark. A namespace has no character that means something
    /// in a pattern.
    pub(crate) fn pattern(namespace: &str) -> String {
        format!("lockcore:{namespace}:{{*}}:[lf]*")
    }

    /// Matches the fence keys of a namespace.
    pub(crate) fn fences(namespace: &str) -> String {
        format!("lockcore:{namespace}:{{*}}:fence")
    }

    /// Reads the name back from a lock or fence key.
    pub(crate) fn name(namespace: &str, key: &[u8]) -> Option<LockName> {
        let key = std::str::from_utf8(key).ok()?;
        let rest = key.strip_prefix("lockcore:")?.strip_prefix(namespace)?.strip_prefix(":{")?;
        let name = rest.strip_suffix("}:lock").or_else(|| rest.strip_suffix("}:fence"))?;
        // A brace inside means that the key is somebody else's.
        if name.contains(['{', '}']) {
            return None;
        }
        LockName::parse(&name.replace("%7B", "{").replace("%7D", "}")).ok()
    }
}

/// What the lock's value says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) owner: Owner,
    pub(crate) fence: Fence,
    /// When it was granted, by the server's clock in microseconds.
    pub(crate) since: u64,
    pub(crate) label: Option<String>,
}

impl Record {
    fn read(value: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(value).ok()?;
        let mut parts = text.splitn(4, '|');
        let owner = unhex(parts.next()?)?;
        let fence = Fence::new(parts.next()?.parse().ok()?).ok()?;
        let since = parts.next()?.parse().ok()?;
        let label = parts.next()?;
        let label = (!label.is_empty()).then(|| label.to_owned());
        Some(Self { owner, fence, since, label })
    }

    /// Returns the beginning of the value, which no other grant has.
    pub(crate) fn own(&self) -> String {
        own(&self.owner, self.fence)
    }
}

pub(crate) fn own(owner: &Owner, fence: Fence) -> String {
    format!("{}|{fence}|", hex(owner))
}

pub(crate) fn hex(owner: &Owner) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut text = String::with_capacity(32);
    for byte in owner.expose() {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
    text
}

pub(crate) fn unhex(text: &str) -> Option<Owner> {
    let mut bytes = [0; 16];
    if text.len() != 32 || !text.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()?;
    }
    Some(Owner::from_bytes(bytes))
}

/// The answer of a script: a word, the server's time, and what the word brings along.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) word: Vec<u8>,
    /// The server's clock, in microseconds.
    pub(crate) us: u64,
    pub(crate) rest: Vec<Value>,
}

impl Answer {
    pub(crate) fn read(value: Value) -> Result<Self> {
        let Value::Array(parts) = value else { return Err(unreadable()) };
        let mut parts = parts.into_iter();
        match (parts.next(), parts.next()) {
            (Some(Value::BulkString(word)), Some(Value::Int(us))) => {
                let us = u64::try_from(us).map_err(|_| unreadable())?;
                Ok(Self { word, us, rest: parts.collect() })
            }
            _ => Err(unreadable()),
        }
    }

    pub(crate) fn int(&self, at: usize) -> Result<i64> {
        match self.rest.get(at) {
            Some(Value::Int(n)) => Ok(*n),
            _ => Err(unreadable()),
        }
    }

    pub(crate) fn fence(&self, at: usize) -> Result<Fence> {
        Fence::new(self.int(at)?)
    }

    /// What PTTL said: nothing is left of a key that does not end.
    pub(crate) fn left(&self, at: usize) -> Result<Duration> {
        Ok(u64::try_from(self.int(at)?).map_or(Duration::MAX, Duration::from_millis))
    }

    fn record(&self, at: usize) -> Option<Record> {
        match self.rest.get(at) {
            Some(Value::BulkString(value)) => Record::read(value),
            _ => None,
        }
    }
}

/// It was done, or not: the answer is no help.
pub(crate) fn unreadable() -> Error {
    Error::new(ErrorKind::Unknown, "the server's answer is not one of ours")
}

pub(crate) fn alien() -> Error {
    Error::new(
        ErrorKind::Misconfigured,
        "the fence key of this lock holds something that is not ours; find out whose it is and remove it, or use another \
         namespace",
    )
}

pub(crate) fn full() -> Error {
    Error::new(
        ErrorKind::Invalid,
        "the fence would reach 2^53 - 1, the largest number that the server counts exactly",
    )
}

/// What an acquire found.
#[derive(Debug)]
pub(crate) enum Acquired {
    /// It is ours, since now or since an earlier copy of the request.
    Ours {
        fence: Fence,
        left: Duration,
        /// Why it does not count: too few replicas have it.
        short: Option<Error>,
    },
    /// Somebody else has it; no record where what is there is not ours.
    Held { record: Option<Record>, left: Duration, us: u64 },
    /// The request came after its time.
    Late,
    /// The acquisition was given up, or broken, before the request came.
    Over,
}

/// The changing part of an acquire.
pub(crate) struct Ask<'a> {
    pub(crate) owner: &'a Owner,
    pub(crate) ttl: Duration,
    pub(crate) floor: Option<Fence>,
    pub(crate) not_after: u64,
    pub(crate) margin: Duration,
    pub(crate) label: Option<&'a str>,
}

/// Asks once. `None`: it was sent on, or refused for now, and is to be asked anew.
pub(crate) async fn acquire(
    trip: &mut Trip<'_>,
    call: &Call,
    keys: &Keys,
    ask: &Ask<'_>,
) -> Result<Option<(Moment, Acquired)>> {
    let owner = hex(ask.owner);
    let gone = keys.gone(&owner);
    let floor = ask.floor.map_or(0, Fence::get);
    let args: [&[u8]; 6] = [
        owner.as_bytes(),
        &decimal(millis(ask.ttl)),
        &decimal(floor.unsigned_abs()),
        &decimal(ask.not_after),
        &decimal(millis(ask.margin)),
        ask.label.unwrap_or_default().as_bytes(),
    ];
    let Some(done) = trip.step(call, &ACQUIRE, &[&keys.lock, &keys.fence, &gone], &args, true).await? else {
        return Ok(None);
    };
    let Done { sent, answer, short } = done;
    let acquired = match &*answer.word {
        b"ok" => Acquired::Ours { fence: answer.fence(0)?, left: answer.left(1)?, short },
        b"held" => Acquired::Held { left: answer.left(0)?, record: answer.record(1), us: answer.us },
        b"late" => Acquired::Late,
        b"over" => Acquired::Over,
        b"alien" => return Err(alien()),
        b"full" => return Err(full()),
        _ => return Err(unreadable()),
    };
    Ok(Some((sent, acquired)))
}

/// Whether a holding is on record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing<T> {
    /// It is.
    Ours(T),
    /// Somebody else's is.
    Taken,
    /// None is.
    None,
    /// It was broken.
    Broken,
}

impl<T> Standing<T> {
    pub(crate) fn read(answer: &Answer, ours: impl FnOnce() -> Result<T>) -> Result<Self> {
        match &*answer.word {
            b"ok" => ours().map(Self::Ours),
            b"taken" => Ok(Self::Taken),
            b"none" => Ok(Self::None),
            b"broken" => Ok(Self::Broken),
            b"alien" => Err(alien()),
            b"full" => Err(full()),
            _ => Err(unreadable()),
        }
    }
}

/// Puts a renewal together, for one alone and for many in a row. `in_cluster`: by the lock's key alone, which a node has or
/// has not while the slot moves.
pub(crate) fn renewal(keys: Keys, owner: &Owner, fence: Fence, ttl: Duration, in_cluster: bool) -> Request {
    let (gone, none) = (keys.gone(&hex(owner)), keys.none());
    let names = match in_cluster {
        true => vec![keys.lock; 3],
        false => vec![keys.lock, gone, none],
    };
    (names, vec![own(owner, fence).into_bytes(), decimal(millis(ttl))])
}

pub(crate) fn read_renewal(answer: &Answer) -> Result<Standing<Duration>> {
    Standing::read(answer, || answer.left(0))
}

pub(crate) async fn renew(
    trip: &mut Trip<'_>,
    call: &Call,
    keys: &Keys,
    owner: &Owner,
    fence: Fence,
    ttl: Duration,
) -> Result<Standing<Duration>> {
    if trip.is_cluster {
        let request = renewal(keys.clone(), owner, fence, ttl, true);
        let answer = trip.ask(call, &RENEW, &request, true).await?.acknowledged()?;
        if let found @ Standing::Ours(_) = read_renewal(&answer)? {
            return Ok(found);
        }
        // The mark of a break was not looked at.
    }
    let request = renewal(keys.clone(), owner, fence, ttl, false);
    let answer = trip.ask(call, &RENEW, &request, true).await?.acknowledged()?;
    read_renewal(&answer)
}

/// Puts a release together, of what begins with `own`. `not_after`: no request of this owner takes anything until then.
pub(crate) fn giving_back(keys: &Keys, owner: &Owner, own: String, not_after: Option<u64>) -> Request {
    let names = vec![keys.lock.clone(), keys.gone(&hex(owner)), keys.none()];
    (names, vec![own.into_bytes(), decimal(not_after.unwrap_or(0)), keys.channel.clone().into_bytes()])
}

/// Ends a holding; says whether it was on record. `not_after` is for an acquisition that had an unanswered request.
pub(crate) async fn release(
    trip: &mut Trip<'_>,
    call: &Call,
    keys: &Keys,
    owner: &Owner,
    fence: Fence,
    not_after: Option<u64>,
) -> Result<bool> {
    let mut request = giving_back(keys, owner, own(owner, fence), not_after);
    if trip.is_cluster && not_after.is_none() {
        request.0 = vec![keys.lock.clone(); 3];
    }
    let done = trip.ask(call, &RELEASE, &request, false).await?;
    Ok(done.answer.int(0)? == 1)
}

/// Puts the end of an acquisition together.
pub(crate) fn cancelling(
    keys: &Keys,
    owner: &Owner,
    adopt: bool,
    not_after: Option<u64>,
    ttl: Duration,
) -> Request {
    let hex = hex(owner);
    let names = vec![keys.lock.clone(), keys.gone(&hex), keys.none()];
    let adopt = if adopt { b"1" } else { b"0" }.to_vec();
    let (not_after, ttl) = (decimal(not_after.unwrap_or(0)), decimal(millis(ttl)));
    (names, vec![hex.into_bytes(), adopt, not_after, ttl, keys.channel.clone().into_bytes()])
}

/// Ends an acquisition for good, or adopts what it was granted.
pub(crate) async fn cancel(
    trip: &mut Trip<'_>,
    call: &Call,
    keys: &Keys,
    owner: &Owner,
    adopt: bool,
    not_after: Option<u64>,
    ttl: Duration,
) -> Result<Option<(Fence, Duration)>> {
    let request = cancelling(keys, owner, adopt, not_after, ttl);
    let done = trip.ask(call, &CANCEL, &request, adopt).await?;
    match &*done.answer.word {
        // What is adopted counts as little as a grant that replicas do not have.
        b"ok" => {
            let answer = done.acknowledged()?;
            Ok(Some((answer.fence(0)?, answer.left(1)?)))
        }
        b"gone" => Ok(None),
        _ => Err(unreadable()),
    }
}

/// Puts a raise by a holder together.
pub(crate) fn raising(keys: &Keys, owner: &Owner, fence: Fence, floor: Fence, margin: Duration) -> Request {
    let names = vec![keys.lock.clone(), keys.fence.clone(), keys.gone(&hex(owner)), keys.none()];
    let numbers = [fence.get().unsigned_abs(), floor.get().unsigned_abs(), millis(margin)].map(decimal);
    let [fence_text, floor, margin] = numbers;
    (names, vec![own(owner, fence).into_bytes(), fence_text, floor, margin])
}

pub(crate) async fn raise(
    trip: &mut Trip<'_>,
    call: &Call,
    keys: &Keys,
    owner: &Owner,
    fence: Fence,
    floor: Fence,
    margin: Duration,
) -> Result<Standing<()>> {
    let request = raising(keys, owner, fence, floor, margin);
    let answer = trip.ask(call, &RAISE, &request, true).await?.acknowledged()?;
    Standing::read(&answer, || Ok(()))
}

/// Puts a raise by nobody together.
pub(crate) fn raising_fence(keys: &Keys, floor: Fence, margin: Duration) -> Request {
    let names = vec![keys.fence.clone(), keys.none()];
    (names, vec![decimal(floor.get().unsigned_abs()), decimal(millis(margin))])
}

pub(crate) fn read_raised(answer: &Answer) -> Result<Fence> {
    match &*answer.word {
        b"ok" => answer.fence(0),
        b"alien" => Err(alien()),
        b"full" => Err(full()),
        _ => Err(unreadable()),
    }
}

pub(crate) async fn raise_fence(
    trip: &mut Trip<'_>,
    call: &Call,
    keys: &Keys,
    floor: Fence,
    margin: Duration,
) -> Result<Fence> {
    let request = raising_fence(keys, floor, margin);
    let answer = trip.ask(call, &RAISE_FENCE, &request, true).await?.acknowledged()?;
    read_raised(&answer)
}

/// Takes the lock from the holder that was seen, or raises the fence of a free one. `None`: it is not as it was seen.
pub(crate) async fn break_lock(
    trip: &mut Trip<'_>,
    call: &Call,
    keys: &Keys,
    seen: Option<&Record>,
    margin: Duration,
) -> Result<Option<Fence>> {
    let own = seen.map(Record::own).unwrap_or_default();
    let gone = keys.gone(&seen.map(|record| hex(&record.owner)).unwrap_or_default());
    let margin = decimal(millis(margin));
    let args: [&[u8]; 3] = [own.as_bytes(), &margin, keys.channel.as_bytes()];
    let keys: [&str; 4] = [&keys.lock, &keys.fence, &gone, &keys.none()];
    let answer = trip.run(call, &BREAK, &keys, &args, true).await?.acknowledged()?;
    match &*answer.word {
        b"ok" => answer.fence(0).map(Some),
        b"changed" => Ok(None),
        b"alien" => Err(alien()),
        b"full" => Err(full()),
        _ => Err(unreadable()),
    }
}

/// One lock, seen from outside.
#[derive(Debug)]
pub(crate) struct Seen {
    /// Something is there, ours or not.
    pub(crate) held: bool,
    pub(crate) record: Option<Record>,
    pub(crate) left: Duration,
    pub(crate) last_fence: Option<Fence>,
    pub(crate) us: u64,
}

pub(crate) async fn inspect(trip: &mut Trip<'_>, call: &Call, keys: &Keys) -> Result<Seen> {
    let answer = trip.run(call, &INSPECT, &[&keys.lock, &keys.fence], &[], false).await?.answer;
    match &*answer.word {
        b"held" | b"none" => {}
        b"alien" => return Err(alien()),
        _ => return Err(unreadable()),
    }
    Ok(Seen {
        held: answer.word != b"none",
        record: answer.record(1),
        left: answer.left(0)?,
        last_fence: match answer.int(2)? {
            0 => None,
            n => Some(Fence::new(n)?),
        },
        us: answer.us,
    })
}

/// How many keys one step of a scan looks at: a fraction of a millisecond of the server's time.
const SCAN_STEP: usize = 1000;
const LIST_PAGE: usize = 1000;

/// Takes one step over the keys of a pattern: the next cursor, unless it is the end, and keys, some perhaps twice.
async fn scan(
    link: &Link,
    call: &Call,
    pattern: &str,
    cursor: &[u8],
) -> Result<(Option<Vec<u8>>, Vec<Vec<u8>>)> {
    if call.remaining().is_zero() {
        return Err(Error::new(ErrorKind::Unavailable, "the call was over before all keys were seen"));
    }
    let mut command = redis::cmd("SCAN");
    command.arg(cursor).arg("MATCH").arg(pattern).arg("COUNT").arg(SCAN_STEP);
    let not_a_scan = || Error::new(ErrorKind::Unknown, "SCAN answered with something else");
    let Value::Array(parts) = link.command(call, &command).await? else { return Err(not_a_scan()) };
    let mut parts = parts.into_iter();
    let (Some(Value::BulkString(next)), Some(Value::Array(keys))) = (parts.next(), parts.next()) else {
        return Err(not_a_scan());
    };
    let keys = keys.into_iter().filter_map(|key| match key {
        Value::BulkString(key) => Some(key),
        _ => None,
    });
    Ok(((next != b"0").then_some(next), keys.collect()))
}

/// Adds the names that one server knows to a page of the smallest.
pub(crate) async fn names(
    link: &Link,
    call: &Call,
    prefix: Option<&LockName>,
    after: Option<&LockName>,
    page: &mut BTreeSet<LockName>,
) -> Result<()> {
    let pattern = Keys::pattern(call.namespace());
    let mut cursor = Some(b"0".to_vec());
    while let Some(from) = cursor {
        let keys;
        (cursor, keys) = scan(link, call, &pattern, &from).await?;
        for key in keys {
            let name = Keys::name(call.namespace(), &key)
                .filter(|name| prefix.is_none_or(|prefix| name.is_under(prefix)))
                .filter(|name| after.is_none_or(|after| name > after));
            if let Some(name) = name {
                page.insert(name);
                if page.len() > LIST_PAGE {
                    page.pop_last();
                }
            }
        }
    }
    Ok(())
}

/// Removes all keys of a scratch namespace from one server; says how many.
#[cfg(feature = "config")]
pub(crate) async fn sweep(link: &Link, call: &Call) -> Result<u64> {
    let pattern = format!("lockcore:{}:*", call.scratch()?);
    let (mut cursor, mut removed) = (Some(b"0".to_vec()), 0);
    while let Some(from) = cursor {
        let keys;
        (cursor, keys) = scan(link, call, &pattern, &from).await?;
        if keys.is_empty() {
            continue;
        }
        // One by one, because in a Cluster they lie in many slots.
        let mut removals = redis::pipe();
        for key in &keys {
            removals.cmd("UNLINK").arg(key);
        }
        for answer in link.commands(call, &removals, keys.len()).await? {
            match answer {
                Value::Int(count) => removed += u64::try_from(count).unwrap_or(0),
                Value::ServerError(e) if matches!(e.code(), "MOVED" | "ASK" | "TRYAGAIN") => {
                    return Err(Error::new(ErrorKind::Unavailable, "keys move between nodes; ask again"));
                }
                Value::ServerError(e) => {
                    return Err(error::error(Phase::Sent, e.into()));
                }
                _ => return Err(Error::new(ErrorKind::Unknown, "UNLINK answered with something else")),
            }
        }
    }
    Ok(removed)
}

/// Looks at all fences of a pattern on one server; at least its time, below which is what was collected.
pub(crate) async fn highest_fence(link: &Link, call: &Call, pattern: &str) -> Result<i64> {
    let (mut cursor, mut highest) = (Some(b"0".to_vec()), 0);
    while let Some(from) = cursor {
        let keys;
        (cursor, keys) = scan(link, call, pattern, &from).await?;
        // One by one, because in a Cluster they lie in many slots.
        let mut looks = redis::pipe();
        for key in &keys {
            looks.cmd("GET").arg(key);
        }
        if keys.is_empty() {
            continue;
        }
        for value in link.commands(call, &looks, keys.len()).await? {
            match &value {
                Value::ServerError(e) if matches!(e.code(), "MOVED" | "ASK" | "TRYAGAIN") => {
                    return Err(Error::new(ErrorKind::Unavailable, "fences move between nodes; ask again"));
                }
                // It is not ours, and no fence was granted by it.
                Value::ServerError(e) if e.code() == "WRONGTYPE" => continue,
                Value::ServerError(e) => return Err(error::error(Phase::Sent, e.clone().into())),
                _ => {}
            }
            let fence = greeting::text(Some(value))
                .and_then(|text| text.split_once('|').and_then(|(fence, _)| fence.parse::<i64>().ok()));
            highest = highest.max(fence.unwrap_or(0));
        }
    }
    // After the walk: a grant that it missed was made before now.
    let time = link.command(call, &redis::cmd("TIME")).await?;
    let us = greeting::server_time(&time)
        .and_then(|us| i64::try_from(us).ok())
        .ok_or_else(|| Error::new(ErrorKind::Unknown, "TIME answered with something else"))?;
    Ok(highest.max(us))
}

/// Rounds up to the millisecond: a TTL below one must not become zero.
pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)
}

pub(crate) fn decimal(n: u64) -> Vec<u8> {
    n.to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name(segments: &[&str]) -> LockName {
        LockName::from_segments(segments).unwrap()
    }

    /// The hash tag as the Cluster specification has it.
    fn tag(key: &str) -> &str {
        let Some(open) = key.find('{') else { return key };
        match key[open + 1..].find('}') {
            Some(0) | None => key,
            Some(len) => &key[open + 1..open + 1 + len],
        }
    }

    #[test]
    fn keys_are_bijective_and_share_one_hash_tag() {
        let names = [
            name(&["a"]),
            name(&["}"]),
            name(&["{"]),
            name(&["{}"]),
            name(&["}x{"]),
            name(&["%7B"]),
            name(&["%"]),
            name(&["a", "b"]),
            name(&["a/b"]),
            name(&["a:lock"]),
            name(&["é🔒"]),
            name(&["*?[x]\\"]),
        ];
        let mut seen = std::collections::HashSet::new();
        for namespace in ["", "shop", "shop.2"] {
            for name in &names {
                let keys = Keys::new(namespace, name);
                let gone = keys.gone(&hex(&Owner::random()));
                for key in [&keys.lock, &keys.fence, &keys.channel, &gone] {
                    assert_eq!(tag(key), tag(&keys.lock), "{key}");
                    assert_ne!(tag(key), key, "{key} has no hash tag");
                    assert!(seen.insert(key.clone()), "two locks share {key}");
                }
                for key in [&keys.lock, &keys.fence] {
                    assert_eq!(Keys::name(namespace, key.as_bytes()).as_ref(), Some(name), "{key}");
                }
                assert_eq!(Keys::name(namespace, gone.as_bytes()), None);
                assert_eq!(Keys::name("other", keys.lock.as_bytes()), None);
            }
        }
    }

    #[test]
    fn records_are_read_and_what_is_not_ours_is_not() {
        let owner = Owner::random();
        let value = format!("{}|42|1700000000000000|web|3", hex(&owner));
        let record = Record::read(value.as_bytes()).unwrap();
        assert_eq!((record.owner, record.fence.get(), record.since), (owner, 42, 1_700_000_000_000_000));
        assert_eq!(record.label.as_deref(), Some("web|3"));
        assert!(value.starts_with(&record.own()));
        for foreign in ["", "x", "1", &hex(&owner), &format!("{}|0|1|", hex(&owner)), "zz|1|1|", "|||"] {
            assert_eq!(Record::read(foreign.as_bytes()), None, "{foreign}");
        }
        assert_eq!(Record::read(&[0xff, 0xfe]), None);
    }

    #[test]
    fn a_ttl_below_a_millisecond_does_not_become_zero() {
        assert_eq!(millis(Duration::from_nanos(1)), 1);
        assert_eq!(millis(Duration::from_millis(20)), 20);
        assert_eq!(millis(Duration::from_micros(20_001)), 21);
    }
}
