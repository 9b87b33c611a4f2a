//! The pieces that scripts are put together from.
//!
//! They are no functions of Lua: making a closure costs a script more than a command does, and it would make all of them
//! anew at every call.

/// `us`: the server's clock.
macro_rules! time {
    () => {
        r"
local t = redis.call('TIME')
local us = t[1] * 1000000 + t[2]
"
    };
}

/// Writes nothing, to a key that never exists, which a replica refuses all the same: what a script says after it, a master
/// says. It also counts as the first write, and a server that is out of memory refuses no later one. Not where the lock's
/// key stands in for it: in a Cluster, where a replica runs no script, and where a slot that moves has only keys that are.
macro_rules! be_master {
    ($key:literal) => {
        concat!("if KEYS[", $key, "] ~= KEYS[1] then redis.call('PERSIST', KEYS[", $key, "]) end\n")
    };
}

/// `v`: what the lock's key holds, a string; false: nothing; true: something else, that is not ours.
macro_rules! read_lock {
    () => {
        r"
local v = redis.pcall('GET', KEYS[1])
if type(v) == 'table' then
  if not string.find(v.err, 'WRONGTYPE', 1, true) then return v end
  v = true
end
"
    };
}

/// `high`: the highest fence so far; 0: none. Ends the script where the key is not ours.
macro_rules! read_fence {
    ($key:literal) => {
        concat!(
            "local high = redis.pcall('GET', KEYS[",
            $key,
            r"])
if type(high) == 'table' then
  if not string.find(high.err, 'WRONGTYPE', 1, true) then return high end
  return {'alien', us}
end
if high then
  high = tonumber((string.match(high, '^(%d+)|%x*$')))
  if not high then return {'alien', us} end
else
  high = 0
end
"
        )
    };
}

/// Writes `fence` and its `owner`: for `margin` milliseconds, or without an end while it is ahead of the clock. `exact`
/// is how the number is written.
macro_rules! keep_fence {
    ($key:literal) => {
        concat!(
            r"
local exact = string.format('%.0f', fence)
if fence > us then
  redis.call('SET', KEYS[",
            $key,
            r"], exact .. '|' .. owner)
else
  redis.call('SET', KEYS[",
            $key,
            r"], exact .. '|' .. owner, 'PXAT', string.format('%.0f', math.floor(us / 1000) + margin))
end
"
        )
    };
}

pub(crate) use {be_master, keep_fence, read_fence, read_lock, time};
