//! Drives one acquire: the seat in this process, the requests to the store, and what is left when nobody waits for
//! the answer any more.

use std::{sync::Arc, time::Duration};

use tokio::runtime::Handle;

use crate::{
    backend::{AcquireRequest, Call, Lease, Moment},
    client::{Bounded, InUse, Inner},
    error::{Error, ErrorKind, Result, Verb},
    events::EventKind,
    fence::Fence,
    guard::{Grant, Guard, Held},
    lease::Holder,
    machine::acquire::{Acquire, Event, Step},
    name::LockName,
    observe,
    queue::{Ask, Place, Seat, Stage},
};

/// How long beyond its budget an acquire waits for the backend's own last word.
const GRACE: Duration = Duration::from_millis(80);

/// The numbers of one acquire, as a [`Lock`](crate::Lock) has them.
#[derive(Clone, Debug)]
pub(crate) struct Numbers {
    pub(crate) ttl: Duration,
    pub(crate) delay: Duration,
    pub(crate) margin: Duration,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) floor: Option<Fence>,
}

/// How long to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Not at all.
    Try,
    /// Until then.
    Until(Moment),
}

impl Numbers {
    fn check(&self, client: &Inner, name: &LockName) -> Result<()> {
        let refuse = |kind, message: String| Err(client.error(kind, message, Verb::Acquire, Some(name)));
        let promised = &client.capabilities;
        if self.ttl.is_zero() {
            return refuse(ErrorKind::Invalid, "a TTL of zero is over before it begins".into());
        }
        let on_server = self.ttl.saturating_add(self.delay);
        if !promised.ttl.contains(&on_server) {
            let (least, most) = (promised.ttl.start(), promised.ttl.end());
            let what = if self.delay.is_zero() { "a TTL" } else { "TTL and lock-delay together" };
            return refuse(
                ErrorKind::Invalid,
                format!(
                    "{what} must be from {least:?} to {most:?} on {}, not {on_server:?}",
                    promised.backend
                ),
            );
        }
        if self.margin >= self.ttl {
            return refuse(
                ErrorKind::Invalid,
                format!("a stop margin of {:?} leaves nothing of a TTL of {:?}", self.margin, self.ttl),
            );
        }
        if self.max_hold.is_some_and(|cap| cap <= self.margin) {
            return refuse(ErrorKind::Invalid, "the longest hold must be longer than the stop margin".into());
        }
        if self.floor.is_some() && !promised.fence_floor {
            return refuse(ErrorKind::Unsupported, format!("{} honours no fence floor", promised.backend));
        }
        if !self.delay.is_zero() && !promised.lock_delay {
            return refuse(ErrorKind::Unsupported, format!("{} keeps no lock-delay", promised.backend));
        }
        Ok(())
    }
}

/// Takes a lock.
///
/// # Cancel safety
/// Dropping the future leaves the queue of this process at once, and what it may have left in the store is cleared
/// away in the background.
pub(crate) async fn acquire(in_use: InUse, name: LockName, numbers: Numbers, wait: Wait) -> Result<Guard> {
    // Dropped last: what is left to be cleared away has begun by then.
    let client = in_use.client().clone();
    client.check_options(Verb::Acquire)?;
    numbers.check(&client, &name)?;
    let Ok(runtime) = Handle::try_current() else {
        return Err(client.error(
            ErrorKind::Misconfigured,
            "there is no tokio runtime here; use `lockcore::blocking` on ordinary threads",
            Verb::Acquire,
            Some(&name),
        ));
    };
    let closed = || client.error(ErrorKind::Closed, "the client was closed", Verb::Acquire, Some(&name));
    if client.is_closing() {
        return Err(closed());
    }
    let start = client.now();
    let exchange = client.exchange(numbers.ttl);
    let end = match wait {
        Wait::Try => start.saturating_add(client.options.call_timeout),
        Wait::Until(end) => end,
    };
    let seat = match take_seat(&client, &name, wait, end).await {
        Bounded::Done(seat) => seat?,
        Bounded::Late => {
            return Err(Error::held_by(ErrorKind::WaitTimeout, None).about(
                Verb::Acquire,
                Some(&name),
                client.capabilities.backend,
            ));
        }
        Bounded::Closing => return Err(closed()),
    };

    let mut request = AcquireRequest::new(name, numbers.ttl.saturating_add(numbers.delay));
    if let Wait::Until(end) = wait {
        request = request.waiting_until(end);
    }
    if let Some(floor) = numbers.floor {
        request = request.above(floor);
    }
    if client.capabilities.labels {
        request = request.labelled(client.label.clone());
    }
    let asked = Asked {
        client: client.clone(),
        runtime: runtime.clone(),
        request,
        delay: numbers.delay,
        open: false,
    };
    client.tell(asked.request.name(), asked.request.owner().digest(), || EventKind::AcquireStarted {
        ttl: numbers.ttl,
        wait: (wait != Wait::Try).then(|| start.until(end)),
    });
    let (lease, asked) = ask_store(&client, asked, exchange, end, wait).await?;
    let (fence, deadline, digest) = (lease.fence, lease.deadline, lease.owner.digest());
    client.tell(&lease.name, digest, || EventKind::Granted {
        fence,
        deadline,
        waited: start.until(client.now()),
    });
    observe::granted(client.about(&lease.name, digest), fence, start.until(client.now()));
    asked.settled();
    Ok(Guard::new(Held::start(
        client.clone(),
        Grant {
            lease,
            ttl: numbers.ttl,
            delay: numbers.delay,
            margin: numbers.margin,
            max_hold: numbers.max_hold,
            seat,
            in_use,
            runtime,
        },
    )))
}

/// Becomes the one task of this process that deals with the store for this name. A try goes on without the seat
/// where another task only asks: the store tells both.
async fn take_seat(
    client: &Inner,
    name: &LockName,
    wait: Wait,
    end: Moment,
) -> Bounded<Result<Option<Seat>>> {
    let about = |error: Error| error.about(Verb::Acquire, Some(name), client.capabilities.backend);
    let mut place: Place = match wait {
        Wait::Try => match client.queue.try_sit(name) {
            Ask::Occupied(Stage::Holding(held)) => {
                let Some(held) = held.upgrade() else { return Bounded::Done(Ok(None)) };
                return Bounded::Done(Err(about(Error::held_by(ErrorKind::Held, Some(held.seen())))));
            }
            // Our own release is under way: one round trip, and then the store tells who has it.
            Ask::Occupied(Stage::Leaving) => match client.queue.sit(name, usize::MAX) {
                Ask::Waiting(place) => place,
                Ask::Taken(seat) => return Bounded::Done(Ok(Some(seat))),
                Ask::Occupied(_) | Ask::Full => return Bounded::Done(Ok(None)),
            },
            Ask::Taken(seat) => return Bounded::Done(Ok(Some(seat))),
            Ask::Occupied(Stage::Asking) | Ask::Waiting(_) | Ask::Full => return Bounded::Done(Ok(None)),
        },
        Wait::Until(_) => match client.queue.sit(name, client.options.max_local_waiters) {
            Ask::Taken(seat) => return Bounded::Done(Ok(Some(seat))),
            Ask::Waiting(place) => place,
            Ask::Occupied(_) | Ask::Full => {
                let bound = client.options.max_local_waiters;
                let message = format!("{bound} tasks of this client already wait for it");
                return Bounded::Done(Err(client.error(
                    ErrorKind::Overloaded,
                    message,
                    Verb::Acquire,
                    Some(name),
                )));
            }
        },
    };
    match client.until(end, true, place.seat()).await {
        Bounded::Done(seat) => Bounded::Done(Ok(Some(seat))),
        Bounded::Late if wait == Wait::Try => {
            Bounded::Done(Err(about(Error::held_by(ErrorKind::Held, None))))
        }
        Bounded::Late => Bounded::Late,
        Bounded::Closing => Bounded::Closing,
    }
}

/// A request that may have left something in the store. Dropped while open, it is cleared away in the background.
struct Asked {
    client: Arc<Inner>,
    runtime: Handle,
    request: AcquireRequest,
    delay: Duration,
    open: bool,
}

impl Asked {
    fn settled(mut self) {
        self.open = false;
    }

    /// Ends this operation, clearing away what it left, and begins the next with a new owner.
    fn anew(&mut self) {
        let next = self.request.renamed();
        let old = std::mem::replace(&mut self.request, next);
        self.client.abandon(&self.runtime, old, self.delay);
        self.open = false;
    }
}

impl Drop for Asked {
    fn drop(&mut self) {
        if self.open {
            self.client.tell(self.request.name(), self.request.owner().digest(), || EventKind::NotGranted {
                kind: ErrorKind::Unknown,
            });
            self.client.abandon(&self.runtime, self.request.clone(), self.delay);
        }
    }
}

async fn ask_store(
    client: &Arc<Inner>,
    mut asked: Asked,
    exchange: Duration,
    end: Moment,
    wait: Wait,
) -> Result<(Lease, Asked)> {
    let waits = wait != Wait::Try;
    let seed = asked.request.owner().digest().to_i64() as u64;
    let mut machine = Acquire::new(end, waits, asked.request.ttl(), seed);
    let (mut step, mut sent) = (machine.start(), client.now());
    let mut last: Option<(Error, Option<Holder>)> = None;
    let mut lease = None;
    loop {
        step = match step {
            Step::Ask { attempt, anew } => {
                if anew {
                    asked.anew();
                }
                sent = client.now();
                // A try is one exchange; a waiter stands in the store's queue until its budget ends, and gets a
                // moment more for the backend's own answer.
                let (deadline, patience) = match wait {
                    Wait::Try => {
                        let until = sent.saturating_add(exchange).min(end);
                        (until, until)
                    }
                    Wait::Until(end) => {
                        let until = end.max(sent.saturating_add(Duration::from_millis(1)));
                        (until, until.saturating_add(GRACE))
                    }
                };
                let call = Call::new(client.frame(exchange), deadline, attempt, asked.delay);
                let digest = asked.request.owner().digest();
                client.tell(asked.request.name(), digest, || EventKind::Asked { attempt });
                asked.open = true;
                let answer =
                    client.until(patience, true, client.backend.acquire(&call, &asked.request)).await;
                let event = match answer {
                    Bounded::Done(Ok(granted)) => match check_grant(client, &asked.request, &granted) {
                        Ok(()) => {
                            lease = Some(granted);
                            Event::Granted
                        }
                        Err(error) => {
                            let kind = error.kind();
                            last = Some((error, None));
                            Event::Failed(kind)
                        }
                    },
                    Bounded::Done(Err(error)) => {
                        let (kind, holder) = (error.kind(), error.holder().cloned());
                        last = Some((error, holder));
                        Event::Failed(kind)
                    }
                    Bounded::Late => Event::Silent,
                    Bounded::Closing => {
                        let message = "the client was closed, or the application shuts down";
                        return Err(client.error(
                            ErrorKind::Closed,
                            message,
                            Verb::Acquire,
                            Some(asked.request.name()),
                        ));
                    }
                };
                machine.step(event, sent, client.now())
            }
            Step::Pause(until) => {
                match client.until(Moment::MAX, true, client.clock.sleep_until(until)).await {
                    Bounded::Closing => {
                        let message = "the client was closed, or the application shuts down";
                        return Err(client.error(
                            ErrorKind::Closed,
                            message,
                            Verb::Acquire,
                            Some(asked.request.name()),
                        ));
                    }
                    Bounded::Done(()) | Bounded::Late => machine.step(Event::Woke, sent, client.now()),
                }
            }
            Step::Return => match lease.take() {
                Some(lease) => return Ok((lease, asked)),
                None => Step::GiveUp,
            },
            Step::Fail { .. } | Step::TimedOut | Step::GiveUp => {
                asked.open = !matches!(step, Step::Fail { abandon: false } | Step::TimedOut);
                return Err(failed(client, asked, step, machine.seen(), last));
            }
        };
    }
}

/// Says how an acquire ended. Nothing under way is hidden behind a kind that promises "nothing changed".
fn failed(
    client: &Inner,
    mut asked: Asked,
    step: Step,
    seen: Option<ErrorKind>,
    last: Option<(Error, Option<Holder>)>,
) -> Error {
    let name = asked.request.name().clone();
    let about = |error: Error| error.about(Verb::Acquire, Some(&name), client.capabilities.backend);
    let error = match (step, last) {
        (Step::GiveUp, last) => {
            let error = Error::new(
                ErrorKind::Unknown,
                "the store did not answer; a grant that may exist is being cleared away, and ends with its TTL",
            );
            match last {
                Some((source, _)) => error.with_source(source),
                None => error,
            }
        }
        // Not "no effect": the record stands until it has been given back.
        (_, Some((error, _))) if error.kind() == ErrorKind::Lost => Error::new(
            ErrorKind::Unknown,
            "the store's answer came too late to use the grant, which is given back",
        )
        .with_source(error),
        // The budget ended while the store refused every request: that is what the caller should see.
        (_, Some((error, _))) => error,
        (_, None) => Error::new(seen.unwrap_or(ErrorKind::WaitTimeout), "the store did not grant it in time"),
    };
    let error = about(error);
    let digest = asked.request.owner().digest();
    client.tell(&name, digest, || EventKind::NotGranted { kind: error.kind() });
    observe::not_granted(client.about(&name, digest), &error);
    if asked.open {
        // Told already; what may be left is cleared away.
        asked.open = false;
        asked.client.abandon(&asked.runtime, asked.request.clone(), asked.delay);
    }
    error
}

/// Checks what a backend's author cannot be trusted with: the grant is for this request, and the fence goes up.
fn check_grant(client: &Inner, request: &AcquireRequest, lease: &Lease) -> Result<()> {
    if lease.name != *request.name() || lease.owner != *request.owner() {
        return Err(Error::new(ErrorKind::Unknown, "the backend answered with the lease of another request"));
    }
    if lease.deadline <= client.now() {
        return Err(Error::lost(crate::LostReason::Expired));
    }
    client.fence_seen(&lease.name, lease.fence)
}
