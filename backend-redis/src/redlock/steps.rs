//! The atomic steps of one of several servers that decide together: they report, they do not decide.
//!
//! # Shape
//! The keys of a single server, with one value more: `owner|0|since|label` is a lock whose fence is not settled yet.

use std::time::Duration;

use lockcore::backend::{Error, Fence, Owner, Result};
use redis::Value;

use crate::{
    pieces::{be_master, keep_fence, read_fence, read_lock, time},
    road::Request,
    wire::{self, Answer, Keys, Script, decimal, hex, millis, unhex},
};

// The first round: takes the lock without a fence, and tells the highest so far and whether it is the asking owner's.
pub(crate) static TAKE: Script = Script::new(concat!(
    r"
local owner, ttl, not_after, label = ARGV[1], ARGV[2], ARGV[3], ARGV[4]",
    time!(),
    r"
if us > tonumber(not_after) then return {'late', us} end
if redis.call('EXISTS', KEYS[3]) == 1 then return {'over', us} end",
    read_lock!(),
    r"
local own, ours = 0, 0
if v then
  redis.call('PERSIST', KEYS[3])
  local holder, fence = nil, nil
  if v ~= true then holder, fence = string.match(v, '^(%x+)|(%d+)|%d+|') end
  if holder ~= owner then
    local left = redis.call('PTTL', KEYS[1])
    if v == true then return {'held', us, left, false} end
    return {'held', us, left, v}
  end
  own = tonumber(fence)
end
",
    read_fence!("2"),
    r"
local left = tonumber(ttl)
if v then
  left = redis.call('PTTL', KEYS[1])
else
  redis.call('SET', KEYS[1], owner .. '|0|' .. string.format('%.0f', us) .. '|' .. label, 'PX', ttl)
end
if own > 0 and high == own then ours = 1 end
return {'ok', us, high, own, ours, left}
"
));

// The second round: settles the fence, only where the lock still is the owner's, and only above every other fence. Either
// alone is not enough: a late copy of the first round may have taken the lock again.
pub(crate) static SETTLE: Script = Script::new(concat!(
    be_master!("3"),
    time!(),
    read_lock!(),
    r"
local owner, fence, ttl, margin = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local holder, rest
if type(v) == 'string' then holder, rest = string.match(v, '^(%x+)|%d+|(%d+|.*)$') end
if holder ~= owner then return {'none', us} end
",
    read_fence!("2"),
    r"
if high > fence then return {'low', us, high} end
if high == fence and string.match(redis.call('GET', KEYS[2]), '|(%x*)$') ~= owner then return {'low', us, high} end",
    keep_fence!("2"),
    r"
local left = math.max(redis.call('PTTL', KEYS[1]), ttl)
redis.call('SET', KEYS[1], owner .. '|' .. exact .. '|' .. rest, 'PX', string.format('%.0f', left))
return {'ok', us, left}
"
));

// The end of a break: the fence is above the holder's on a majority already.
pub(crate) static CUT: Script = Script::new(concat!(
    be_master!("3"),
    time!(),
    read_lock!(),
    r"
local own = ARGV[1]
if type(v) == 'string' and string.sub(v, 1, #own) == own then
  local left = redis.call('PTTL', KEYS[1])
  if left < 0 then left = 86400000 end
  redis.call('SET', KEYS[2], 'broken', 'PX', left + 1000)
  redis.call('DEL', KEYS[1])
  return {'ok', us, 1}
end
return {'ok', us, 0}
"
));

/// What one server shows of a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Shown {
    pub(crate) owner: Owner,
    /// `None`: not settled yet.
    pub(crate) fence: Option<Fence>,
    /// By that server's clock, in microseconds.
    pub(crate) since: u64,
    pub(crate) label: Option<String>,
}

impl Shown {
    pub(crate) fn read(value: Option<&Value>) -> Option<Self> {
        let Some(Value::BulkString(value)) = value else { return None };
        let mut parts = std::str::from_utf8(value).ok()?.splitn(4, '|');
        let owner = unhex(parts.next()?)?;
        let fence = match parts.next()?.parse::<i64>().ok()? {
            0 => None,
            fence => Some(Fence::new(fence).ok()?),
        };
        let since = parts.next()?.parse().ok()?;
        let label = parts.next()?;
        Some(Self { owner, fence, since, label: (!label.is_empty()).then(|| label.to_owned()) })
    }
}

/// What the first round found on one server.
#[derive(Debug)]
pub(crate) enum Taken {
    /// It is ours, since now or since before.
    Ours {
        /// The highest fence there, which is of an earlier request of ours where `settled`.
        high: i64,
        /// Ours, from an earlier request.
        own: Option<Fence>,
        settled: bool,
        left: Duration,
        us: u64,
    },
    /// Somebody else has it; nothing is shown where what is there is not ours.
    Held { shown: Option<Shown>, left: Duration, us: u64 },
    /// The request came after its time.
    Late,
    /// The acquisition was given up, or broken, before the request came.
    Over,
}

impl Taken {
    pub(crate) fn read(answer: &Answer) -> Result<Self> {
        match &*answer.word {
            b"ok" => Ok(Self::Ours {
                high: answer.int(0)?,
                own: match answer.int(1)? {
                    0 => None,
                    fence => Some(Fence::new(fence)?),
                },
                settled: answer.int(2)? == 1,
                left: answer.left(3)?,
                us: answer.us,
            }),
            b"held" => {
                let shown = Shown::read(answer.rest.get(1));
                Ok(Self::Held { left: answer.left(0)?, shown, us: answer.us })
            }
            b"late" => Ok(Self::Late),
            b"over" => Ok(Self::Over),
            b"alien" => Err(wire::alien()),
            _ => Err(wire::unreadable()),
        }
    }
}

/// Puts the second round together.
pub(crate) fn settling(keys: &Keys, owner: &Owner, fence: i64, ttl: Duration, margin: Duration) -> Request {
    let names = vec![keys.lock.clone(), keys.fence.clone(), keys.none()];
    let [fence, ttl, margin] = [fence.unsigned_abs(), millis(ttl), millis(margin)].map(decimal);
    (names, vec![hex(owner).into_bytes(), fence, ttl, margin])
}

/// What the second round did on one server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Settled {
    Yes,
    /// The lock is not ours there any more.
    NotOurs,
    /// A fence is there that is not below.
    Low(i64),
}

impl Settled {
    pub(crate) fn read(answer: &Answer) -> Result<Self> {
        match &*answer.word {
            b"ok" => Ok(Self::Yes),
            b"none" => Ok(Self::NotOurs),
            b"low" => Ok(Self::Low(answer.int(0)?)),
            b"alien" => Err(wire::alien()),
            _ => Err(wire::unreadable()),
        }
    }
}

/// One server's share of a look.
#[derive(Debug)]
pub(crate) struct Seen {
    pub(crate) held: bool,
    pub(crate) shown: Option<Shown>,
    pub(crate) left: Duration,
    pub(crate) high: i64,
    pub(crate) us: u64,
}

impl Seen {
    pub(crate) fn read(answer: &Answer) -> Result<Self> {
        match &*answer.word {
            b"held" | b"none" => {}
            b"alien" => return Err(wire::alien()),
            _ => return Err(wire::unreadable()),
        }
        Ok(Self {
            held: answer.word != b"none",
            shown: Shown::read(answer.rest.get(1)),
            left: answer.left(0)?,
            high: answer.int(2)?,
            us: answer.us,
        })
    }
}

/// What a resolve found on one server: ours, with the fence and what is left; or nothing, and nothing will come.
pub(crate) type Found = Option<(Option<Fence>, Duration)>;

pub(crate) fn read_found(answer: &Answer) -> Result<Found> {
    match &*answer.word {
        b"ok" => {
            let fence = match answer.int(0)? {
                0 => None,
                fence => Some(Fence::new(fence)?),
            };
            Ok(Some((fence, answer.left(1)?)))
        }
        b"gone" => Ok(None),
        _ => Err(wire::unreadable()),
    }
}

/// Says that a majority did not answer, or not as it has to.
pub(crate) fn too_few(
    kind: lockcore::backend::ErrorKind,
    wanted: usize,
    of: usize,
    last: Option<&Error>,
) -> Error {
    let why = last.map_or_else(String::new, |error| format!(": {}", error.message()));
    Error::new(kind, format!("fewer than {wanted} of the {of} servers answered as they must{why}"))
}
