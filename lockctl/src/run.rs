//! `run`: a command under a lock.

use std::{
    cell::OnceCell,
    env,
    ffi::OsString,
    fs,
    io::{self, Write as _},
    path::Path,
    time::{Duration, SystemTime},
};

use lockcore::{
    Attempt, ClientOptions, ErrorKind, EventKind, Events, Guard, GuardRef, Holder, LockClient, LockName,
    LostReason, Released, State, backend::BootClock,
};
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::{
    cli::Run,
    duration::{Wait, show},
    exit,
    failure::{Failure, with_sources},
    numbers::Numbers,
    state_file::{self, StateFile},
    store::{self, Store, Surroundings, Written},
    supervisor::{End, Ended, Hold, Job, LossPipe, NotStarted, Signals, Standing, margin, supervise},
    voice::{Voice, millis},
};

/// How long leaving may take: clean-up at the store, which the lease's end would do anyway.
const LEAVE_WITHIN: Duration = Duration::from_secs(2);

/// Runs the command, and writes the status file.
pub(crate) async fn main(
    options: &Run,
    loss: LossPipe,
    written: Written,
    voice: &Voice,
) -> Result<u8, Failure> {
    let mut report = Report::default();
    let outcome = Box::pin(run(options, loss, written, voice, &mut report)).await;
    let (code, sentence) = match &outcome {
        Ok(code) => (*code, None),
        Err(failure) => (failure.code, Some(failure.sentence.as_str())),
    };
    if let Some(path) = &options.status_file
        && let Err(error) = report.write(path, code, sentence)
    {
        // The code keeps its meaning: whoever reads it knows what became of the command.
        voice.failure(format_args!("cannot write the status file {}: {error}", path.display()));
    }
    outcome
}

async fn run(
    options: &Run,
    loss: LossPipe,
    written: Written,
    voice: &Voice,
    report: &mut Report,
) -> Result<u8, Failure> {
    let name = store::name(&options.name)?;
    report.name = Some(name.clone());
    let store = store::choose(&options.store, written, &Surroundings::of_this_process())?;
    let numbers = Numbers::of(&options.numbers, &store, Some(&name))?;
    report.store = Some(store.shown());
    let directory = state_file::directory(|name| env::var_os(name).filter(|v| !v.is_empty()).map(Into::into))
        .map_err(Failure::usage)?;
    let mut signals =
        Signals::hear().map_err(|error| Failure::usage(format!("cannot hear signals: {error}")))?;

    let client = OnceCell::new();
    let waiting = acquire(options, &name, &numbers, &store, voice, &client);
    let (guard, mut events) = tokio::select! {
        biased;
        signal = signals.next_to_leave() => {
            // The future is gone and with it the place in the queue. What it may have left at the store is cleared
            // away here, unless somebody is in a hurry.
            if let Some(client) = client.get() {
                tokio::select! {
                    _ = tokio::time::timeout(LEAVE_WITHIN, client.close()) => {}
                    _ = signals.next_to_leave() => {}
                }
            }
            let signal = signal.as_raw();
            report.outcome = "interrupted";
            return Err(Failure::new(
                exit::of_signal(signal),
                format!("left the queue for {:?} by signal {signal}; nothing was started", name.as_str()),
            ));
        }
        outcome = waiting => match outcome {
            Ok(granted) => granted,
            Err(mut failure) => {
                // What a request without an answer may have left is cleared away, and a membership is given back.
                if let Some(client) = client.get() {
                    let _ = tokio::time::timeout(LEAVE_WITHIN, client.close()).await;
                }
                report.outcome = outcome_of(failure.code);
                if matches!(failure.code, exit::BUSY | exit::TIMED_OUT)
                    && let Some(code) = options.busy_exit_code
                {
                    failure.code = code;
                }
                return Err(failure);
            }
        }
    };
    let Some(client) = client.get() else { unreachable!("a guard comes from a client") };
    let granted_at = BootClock::read();
    let watch = guard.watch();
    let lease = watch.lease();
    let stamp = lease.stamp();
    report.stamp = Some(stamp.to_string());
    voice.event(
        "granted",
        json!({
            "name": name.as_str(),
            "stamp": stamp.to_string(),
            "fence": stamp.fence.to_string(),
            "store": store.shown(),
            "remaining_ms": millis(granted_at.until(lease.deadline)),
        }),
    );
    voice.detail(format_args!("got {:?} as {stamp} (store {})", name.as_str(), store.shown()));

    let job = Job {
        command: options.command.clone(),
        variables: variables(&name, stamp, &numbers),
        pass_config: options.pass_config,
        kill_after: numbers.kill_after,
        hold_until: numbers.max_hold.map(|cap| granted_at.saturating_add(cap)),
    };
    let (sender, hold) = watch::channel(hold_of(&watch));
    let outcome = match StateFile::new(&directory, &name, stamp) {
        Err(error) => Err(NotStarted::Own(error)),
        Ok(state) => tokio::select! {
            outcome = supervise(&job, hold, &mut signals, loss, state, voice) => outcome,
            () = follow(&watch, &mut events, &sender, voice) => unreachable!("it never ends"),
        },
    };
    let about = format!("{:?} ({stamp}, store {})", name.as_str(), store.shown());
    let ended = match outcome {
        Ok(ended) => ended,
        Err(refusal) => {
            let _ = give_back(guard, client, voice).await;
            let failure = not_started(&refusal, &job, &about);
            report.outcome = outcome_of(failure.code);
            return Err(failure);
        }
    };
    report.command(&ended);
    let released = give_back(guard, client, voice).await;
    conclude(&ended, released, &numbers, &about, report)
}

/// Connects and acquires, within one budget.
async fn acquire(
    options: &Run,
    name: &LockName,
    numbers: &Numbers,
    store: &Store,
    voice: &Voice,
    slot: &OnceCell<LockClient>,
) -> Result<(Guard, Events), Failure> {
    let start = std::time::Instant::now();
    let budget = match numbers.wait {
        Wait::No => Some(Duration::ZERO),
        Wait::For(budget) => Some(budget),
        Wait::Forever => None,
    };
    let backend = store.connect_within(budget).await?;
    let margin = margin(numbers.kill_after);
    let client_options = ClientOptions::default().with(|o| {
        o.namespace = store.namespace.clone();
        o.label = Some(options.label.clone().unwrap_or_else(default_label).into());
        o.lock_delay = numbers.lock_delay;
    });
    let client = slot.get_or_init(|| LockClient::with_options(backend, client_options));
    store.check_level(client).await?;
    let events = client.events();
    let mut lock = client.named(name).ttl(numbers.ttl).stop_margin(margin);
    if let Some(cap) = numbers.max_hold {
        // The command is asked to stop at the limit; the grace comes on top.
        lock = lock.max_hold(cap + margin);
    }
    if let Some(floor) = options.above {
        lock = lock.above(floor);
    }
    let granted = match numbers.wait {
        Wait::No => match lock.try_acquire().await {
            Ok(Attempt::Granted(guard)) => Ok(guard),
            Ok(Attempt::Busy(holder)) => {
                return Err(Failure::new(exit::BUSY, busy_sentence(name, holder.as_ref(), store)));
            }
            Err(error) => Err(error),
        },
        Wait::For(budget) => {
            let lock = lock.wait(budget.saturating_sub(start.elapsed()));
            with_notice(lock.acquire(), client, name, store, voice).await
        }
        Wait::Forever => with_notice(lock.wait_forever().acquire(), client, name, store, voice).await,
    };
    match granted {
        Ok(guard) => Ok((guard, events)),
        Err(error) if error.kind() == ErrorKind::WaitTimeout => Err(Failure::new(
            exit::TIMED_OUT,
            format!("waited in vain; {}", busy_sentence(name, error.holder(), store)),
        )),
        Err(error) if error.kind() == ErrorKind::Held => {
            Err(Failure::new(exit::BUSY, busy_sentence(name, error.holder(), store)))
        }
        Err(error) => Err(Failure::store(&error, store.shown())),
    }
}

/// Waits, and tells somebody who watches what is waited for.
async fn with_notice<T>(
    acquire: impl Future<Output = T>,
    client: &LockClient,
    name: &LockName,
    store: &Store,
    voice: &Voice,
) -> T {
    let notice = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let holder = client.named(name).inspect().await.ok().and_then(|state| state.holder);
        voice.event(
            "waiting",
            json!({ "name": name.as_str(), "holder": holder.as_ref().map(|h| h.stamp().to_string()) }),
        );
        voice.progress(format_args!("waiting; {}", busy_sentence(name, holder.as_ref(), store)));
        std::future::pending::<()>().await;
    };
    tokio::select! {
        biased;
        granted = acquire => granted,
        () = notice => unreachable!("it never ends"),
    }
}

fn busy_sentence(name: &LockName, holder: Option<&Holder>, store: &Store) -> String {
    let who = holder.map_or_else(|| "held by somebody else".to_owned(), ToString::to_string);
    format!("{:?} is {who} (store {})", name.as_str(), store.shown())
}

fn hold_of(watch: &GuardRef) -> Hold {
    let standing = match watch.state() {
        State::Held => Standing::Held,
        State::Lost(reason) => Standing::Over(reason),
        // A state that is not known is no reason to believe more than the deadline.
        _ => Standing::Uncertain,
    };
    Hold { deadline: watch.lease().deadline, standing }
}

/// Keeps the supervisor's view of the lease up to date. Never ends.
async fn follow(watch: &GuardRef, events: &mut Events, sender: &watch::Sender<Hold>, voice: &Voice) {
    let publish = |event: Option<&EventKind>| {
        sender.send_if_modified(|hold| {
            let now = hold_of(watch);
            std::mem::replace(hold, now) != now
        });
        if let Some(EventKind::Renewed { deadline, .. }) = event {
            voice.event("renewed", json!({ "remaining_ms": millis(BootClock::read().until(*deadline)) }));
        }
    };
    loop {
        tokio::select! {
            event = events.next() => match event {
                Some(event) => publish(Some(&event.kind)),
                None => break,
            },
            _ = watch.lost() => break,
        }
    }
    // Nothing changes any more but to be over.
    watch.lost().await;
    publish(None);
    std::future::pending().await
}

/// Gives the lock back and closes; what the store answered, if it did.
async fn give_back(guard: Guard, client: &LockClient, voice: &Voice) -> Option<Released> {
    let released = match guard.release().await {
        Ok(released) => {
            voice.event("released", json!({ "already_over": released == Released::AlreadyOver }));
            Some(released)
        }
        Err(error) => {
            voice.event("release_unheard", json!({ "message": error.to_string() }));
            voice.detail(format_args!(
                "the release was not heard, so others wait until the lease ends: {}",
                with_sources(&error)
            ));
            None
        }
    };
    // What is left to be done is clearing away.
    let _ = tokio::time::timeout(LEAVE_WITHIN, client.close()).await;
    released
}

fn not_started(refusal: &NotStarted, job: &Job, about: &str) -> Failure {
    let program = job.command.first().map(|word| word.to_string_lossy().into_owned()).unwrap_or_default();
    match refusal {
        NotStarted::Over(_) => Failure::new(exit::UNAVAILABLE, format!("{refusal}: {about}")),
        NotStarted::Own(error) => Failure::usage(format!("cannot prepare the start of {program:?}: {error}")),
        NotStarted::Exec(error) => match error.kind() {
            io::ErrorKind::NotFound => {
                Failure::new(exit::NOT_FOUND, format!("{program:?}: command not found"))
            }
            io::ErrorKind::WouldBlock | io::ErrorKind::OutOfMemory => {
                Failure::usage(format!("cannot start {program:?}: {error}"))
            }
            _ => Failure::new(exit::NOT_EXECUTABLE, format!("cannot execute {program:?}: {error}")),
        },
    }
}

fn conclude(
    ended: &Ended,
    released: Option<Released>,
    numbers: &Numbers,
    about: &str,
    report: &mut Report,
) -> Result<u8, Failure> {
    let over = match (ended.over, released) {
        // Found out at the release: the store had ended the lease before we did.
        (None, Some(Released::AlreadyOver)) => Some(LostReason::Taken),
        (over, _) => over,
    };
    if let Some(reason) = over {
        let code = exit::of_loss(reason, ended.gone_in_time);
        report.outcome = outcome_of(code);
        let sentence = match code {
            exit::UNCERTAIN => format!(
                "the store could not be asked about {about} until the lease ended; the command was stopped before that: \
                 run it again"
            ),
            exit::HOLD_LIMIT => format!(
                "the command was stopped after its longest hold of {}: {about}",
                show(numbers.max_hold.unwrap_or_default())
            ),
            _ if !ended.gone_in_time => format!(
                "lost {about}: {reason}, and the command was still there; somebody else may have run at the same time: \
                 look at the data"
            ),
            _ => format!(
                "lost {about}: {reason}; somebody else may have run at the same time: look at the data"
            ),
        };
        return Err(Failure::new(code, sentence));
    }
    match ended.end {
        Some(End::Code(code)) => Ok(u8::try_from(code).unwrap_or(u8::MAX)),
        Some(End::Signal(signal)) => Ok(exit::of_signal(signal)),
        None => Err(Failure::usage(format!("the system did not tell how the command ended: {about}"))),
    }
}

fn outcome_of(code: u8) -> &'static str {
    match code {
        exit::BUSY => "busy",
        exit::TIMED_OUT => "timed-out",
        exit::LOST => "lost",
        exit::UNCERTAIN => "uncertain",
        exit::UNAVAILABLE => "unavailable",
        exit::REFUSED => "refused",
        exit::HOLD_LIMIT => "hold-limit",
        exit::NOT_EXECUTABLE => "not-executable",
        exit::NOT_FOUND => "not-found",
        _ => "failed",
    }
}

fn variables(name: &LockName, stamp: lockcore::Stamp, numbers: &Numbers) -> Vec<(&'static str, OsString)> {
    let mut variables: Vec<(&'static str, OsString)> = vec![
        ("LOCK_NAME", name.as_str().into()),
        ("LOCK_FENCE", stamp.fence.to_string().into()),
        ("LOCK_OWNER_DIGEST", stamp.owner.to_string().into()),
        ("LOCK_STAMP", stamp.to_string().into()),
        ("LOCK_TTL_MS", millis(numbers.ttl).to_string().into()),
    ];
    if let Some(cap) = numbers.max_hold {
        let until = SystemTime::now().checked_add(cap);
        // The calendar ends before some durations do.
        let year_9999 = SystemTime::UNIX_EPOCH + Duration::from_secs(253_402_300_799);
        let until = until.map_or(year_9999, |until| until.min(year_9999));
        variables.push(("LOCK_HOLD_UNTIL", humantime::format_rfc3339_seconds(until).to_string().into()));
    }
    variables
}

pub(crate) fn default_label() -> String {
    let user = env::var("USER").or_else(|_| env::var("LOGNAME")).ok().filter(|user| !user.is_empty());
    let user = user.unwrap_or_else(|| rustix::process::getuid().as_raw().to_string());
    let host = rustix::system::uname();
    format!("{user}@{}:{}", host.nodename().to_string_lossy(), std::process::id())
}

/// What becomes the status file.
#[derive(Debug, Default)]
struct Report {
    name: Option<LockName>,
    store: Option<String>,
    stamp: Option<String>,
    outcome: &'static str,
    command: Option<Value>,
}

impl Report {
    fn command(&mut self, ended: &Ended) {
        self.outcome = "ended";
        self.command = Some(match ended.end {
            Some(End::Code(code)) => json!({ "code": code, "signal": null }),
            Some(End::Signal(signal)) => json!({ "code": null, "signal": signal }),
            None => json!({ "code": null, "signal": null }),
        });
    }

    /// Replaces the file as a whole: whoever waits for it never reads half of it.
    fn write(&self, path: &Path, code: u8, sentence: Option<&str>) -> io::Result<()> {
        let whole = json!({
            "schema": "lockctl/status/1",
            "outcome": if self.outcome.is_empty() { outcome_of(code) } else { self.outcome },
            "exit_code": code,
            "name": self.name.as_ref().map(LockName::as_str),
            "store": self.store,
            "stamp": self.stamp,
            // Null when it did not run.
            "command": self.command,
            "message": sentence,
        });
        let text = format!("{whole}\n");
        // What a link points to is what is meant; a device or a pipe is written to, never replaced.
        let path = &fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
            return fs::OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes());
        }
        let mut draft = path.as_os_str().to_owned();
        draft.push(format!(".{}.draft", std::process::id()));
        fs::write(&draft, text)?;
        fs::rename(&draft, path).inspect_err(|_| {
            let _ = fs::remove_file(&draft);
        })
    }
}
