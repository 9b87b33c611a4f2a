//! A backend in one file: what a third party writes, and what `tests/conformance_toy.rs` runs the suite against.
//!
//! One file a lock in a directory of the machine, changed under `flock`. It promises little and says so in its capabilities; what
//! it does not promise, the suite asserts to be refused.

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Seek, Write},
    path::PathBuf,
    time::Duration,
};

use lockcore::{ErrorKind, LockName, LostReason, backend::*};
use rustix::fs::{FlockOperation, flock};

/// Locks in a directory.
#[derive(Clone, Debug)]
pub struct ToyBackend {
    directory: PathBuf,
}

/// What a file has: the newest fence, and who holds under it.
#[derive(Clone, Copy, Debug)]
struct Record {
    fence: Option<Fence>,
    holder: Option<Owner>,
    expires: Moment,
}

impl ToyBackend {
    /// Keeps locks in a directory that exists.
    pub fn new(directory: impl Into<PathBuf>) -> Self {
        Self { directory: directory.into() }
    }

    /// Reads who holds a lock, for the suite's second road.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn holder(&self, namespace: &str, name: &LockName) -> io::Result<Option<Owner>> {
        self.change(namespace, name, |record, now| record.live(now))
    }

    /// Removes the holder, as an operator might.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn steal(&self, namespace: &str, name: &LockName) -> io::Result<()> {
        self.change(namespace, name, |record, _| record.holder = None)
    }

    /// Changes a record under the file's lock: the whole of what is atomic here.
    fn change<T>(
        &self,
        namespace: &str,
        name: &LockName,
        change: impl FnOnce(&mut Record, Moment) -> T,
    ) -> io::Result<T> {
        let path = self.path(namespace, name);
        std::fs::create_dir_all(path.parent().unwrap_or(&self.directory))?;
        let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        flock(&file, FlockOperation::LockExclusive)?;
        let mut record = Record::read(&mut file)?;
        // The clock since boot: the same for all processes of the machine, and nobody can set it.
        let answer = change(&mut record, BootClock::read());
        record.write(&mut file)?;
        Ok(answer)
    }

    /// Any two names give two files. A name may be longer than a file's name, so it is a path of pieces.
    fn path(&self, namespace: &str, name: &LockName) -> PathBuf {
        let hex = |text: &str| text.bytes().map(|byte| format!("{byte:02x}")).collect::<String>();
        let whole = format!("{}-{}", hex(namespace), hex(name.as_str()));
        let mut path = self.directory.clone();
        // Of ASCII alone, so every piece is text.
        path.extend(whole.as_bytes().chunks(200).map(|piece| String::from_utf8_lossy(piece).into_owned()));
        path.with_extension("lock")
    }

    fn ask<T>(
        &self,
        call: &Call,
        name: &LockName,
        change: impl FnOnce(&mut Record, Moment) -> T,
    ) -> Result<T> {
        self.change(call.namespace(), name, change).map_err(|error| {
            // A file that cannot be opened or locked was not changed; one that could not be written may have been.
            let kind = match error.kind() {
                io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied => ErrorKind::Unavailable,
                // Asking again will not mend it; it was not changed, so that a person can look.
                io::ErrorKind::InvalidData => ErrorKind::Misconfigured,
                _ => ErrorKind::Unknown,
            };
            Error::new(kind, "the lock file cannot be used").with_source(error)
        })
    }
}

#[async_trait]
impl LockBackend for ToyBackend {
    fn capabilities(&self) -> Capabilities {
        Capabilities::weakest("toy").with(|c| {
            c.consistency = Consistency::SingleServer;
            c.survives.pause = true;
        })
    }

    async fn acquire(&self, call: &Call, request: &AcquireRequest) -> Result<Lease> {
        loop {
            let sent = call.now();
            let answer = self.ask(call, request.name(), |record, now| record.grant(request, now))??;
            match answer {
                Answer::Granted(fence, ttl) => return request.granted(call, sent, ttl, fence),
                Answer::Held(holder) => match request.wait_until() {
                    None => return Err(Error::held_by(ErrorKind::Held, Some(holder))),
                    Some(end) if call.now() >= end => {
                        return Err(Error::held_by(ErrorKind::WaitTimeout, Some(holder)));
                    }
                    Some(end) => {
                        let look_again = call.now().saturating_add(Duration::from_millis(10));
                        call.clock().sleep_until(look_again.min(end)).await;
                    }
                },
            }
        }
    }

    async fn renew(&self, call: &Call, lease: &Lease, ttl: Duration) -> Result<Lease> {
        let sent = call.now();
        let renewed = self.ask(call, &lease.name, |record, now| {
            let held = record.is_held_by(lease, now);
            if held {
                record.expires = record.expires.max(now.saturating_add(ttl));
            }
            held
        })?;
        if renewed { Ok(call.renewed(lease, sent, ttl)) } else { Err(Error::lost(LostReason::Taken)) }
    }

    async fn release(&self, call: &Call, lease: &Lease) -> Result<Released> {
        self.ask(call, &lease.name, |record, now| {
            if !record.is_held_by(lease, now) {
                return Released::AlreadyOver;
            }
            record.holder = None;
            Released::Now
        })
    }

    async fn resolve(&self, call: &Call, request: &AcquireRequest) -> Result<Resolution> {
        let sent = call.now();
        let found = self.ask(call, request.name(), |record, now| {
            let mine = record.live(now).as_ref() == Some(request.owner());
            mine.then_some((record.fence, now.until(record.expires)))
        })?;
        match found {
            Some((Some(fence), left)) => request.granted(call, sent, left, fence).map(Resolution::Adopted),
            // A call on a file does not come late: what is not there now will not be.
            _ => Ok(Resolution::Gone),
        }
    }

    async fn inspect(&self, call: &Call, name: &LockName) -> Result<LockState> {
        self.ask(call, name, |record, now| {
            LockState::default().with(|state| {
                state.last_fence = record.fence;
                state.holder = record.seen(now);
            })
        })
    }
}

/// What an acquire found.
enum Answer {
    Granted(Fence, Duration),
    Held(Holder),
}

impl Record {
    fn live(&self, now: Moment) -> Option<Owner> {
        self.holder.filter(|_| now < self.expires)
    }

    fn is_held_by(&self, lease: &Lease, now: Moment) -> bool {
        self.live(now) == Some(lease.owner) && self.fence == Some(lease.fence)
    }

    fn seen(&self, now: Moment) -> Option<Holder> {
        let (owner, fence) = (self.live(now)?, self.fence?);
        Some(Holder::new(owner.digest(), fence, now.until(self.expires)))
    }

    /// Grants, or says who has it. The same owner is told its own grant again: a retry is no second grant.
    fn grant(&mut self, request: &AcquireRequest, now: Moment) -> Result<Answer> {
        Ok(match self.seen(now) {
            Some(holder) if self.holder == Some(*request.owner()) => {
                Answer::Granted(holder.fence, holder.remaining)
            }
            Some(holder) => Answer::Held(holder),
            None => {
                // Beyond the largest number this is an error, never a small number again.
                let fence = Fence::new(self.fence.map_or(0, Fence::get).saturating_add(1))?;
                if Some(fence) == self.fence {
                    return Err(Error::new(ErrorKind::Invalid, "the fence has reached the largest number"));
                }
                *self = Self {
                    fence: Some(fence),
                    holder: Some(*request.owner()),
                    expires: now.saturating_add(request.ttl()),
                };
                Answer::Granted(fence, request.ttl())
            }
        })
    }

    /// Reads 8 bytes of fence, 8 of deadline, and 16 of owner, zero for nobody; an empty file is a new lock. Anything
    /// else is no lock file: to take it for a new one would begin the fences anew.
    fn read(file: &mut File) -> io::Result<Self> {
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)?;
        let damaged = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        if bytes.is_empty() {
            return Ok(Self { fence: None, holder: None, expires: Moment::from_nanos(0) });
        }
        let length = bytes.len();
        let bytes = <[u8; 32]>::try_from(bytes)
            .map_err(|_| damaged(format!("the lock file is damaged: it has {length} bytes, not 32")))?;
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|n| bytes[at + n]));
        let owner: [u8; 16] = std::array::from_fn(|n| bytes[16 + n]);
        let fence = match number(0) {
            0 => None,
            some => {
                let fence = i64::try_from(some).ok().and_then(|number| Fence::new(number).ok());
                Some(fence.ok_or_else(|| damaged(format!("the lock file is damaged: {some} is no fence")))?)
            }
        };
        let holder = (owner != [0; 16]).then(|| Owner::from_bytes(owner));
        Ok(Self { fence, expires: Moment::from_nanos(number(8)), holder })
    }

    fn write(&self, file: &mut File) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(32);
        bytes.extend(self.fence.map_or(0, Fence::get).to_le_bytes());
        bytes.extend(self.expires.as_nanos().to_le_bytes());
        bytes.extend(self.holder.map_or([0; 16], |owner| *owner.expose()));
        file.rewind()?;
        file.write_all(&bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, sync::Arc};

    use super::*;

    #[tokio::test]
    async fn a_damaged_lock_file_is_refused_and_left_as_it_is() {
        let directory = tempfile::tempdir().unwrap();
        let (store, name) = (ToyBackend::new(directory.path()), LockName::parse("x").unwrap());
        let call = Call::for_tests(Arc::new(BootClock), Duration::from_secs(5));
        let path = store.path("", &name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        // Half a record, and a whole one whose fence is no number of ours.
        for damaged in [vec![7; 20], vec![0xff; 32]] {
            fs::write(&path, &damaged).unwrap();
            let request = AcquireRequest::new(name.clone(), Duration::from_secs(5));
            let error = store.acquire(&call, &request).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Misconfigured, "{error}");
            let source = std::error::Error::source(&error).unwrap();
            assert!(source.to_string().contains("damaged"), "{source}");
            assert_eq!(fs::read(&path).unwrap(), damaged, "what a person must look at is gone");
        }
    }
}
