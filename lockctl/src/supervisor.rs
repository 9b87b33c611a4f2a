//! Runs a command for as long as a lease stands: starts it, passes signals on, stops it in time, and does not return
//! before its last descendant is gone.
//!
//! Everything is decided by the boot clock and the lease at hand; no step here waits for a store.

use std::{
    ffi::{OsStr, OsString},
    fmt, io,
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::{ffi::OsStrExt, process::CommandExt as _},
    },
    process::Command,
    time::Duration,
};

use lockcore::{
    LostReason,
    backend::{BootClock, Clock, Moment},
};
use rustix::{
    io::Errno,
    process::{Pid, Signal, WaitOptions},
};
use tokio::sync::watch;

use crate::{state_file::StateFile, voice::Voice};

mod course;
mod family;
mod signals;
mod spawn;
mod terminal;

pub(crate) use signals::Signals;

pub(crate) use course::margin;
use course::{Course, Step};
use family::Family;
use terminal::Terminal;

/// What is known of the lease right now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hold {
    /// The command must be gone by then.
    pub deadline: Moment,
    /// How the lease stands.
    pub standing: Standing,
}

/// How the lease stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The last renewal was confirmed.
    Held,
    /// A renewal is unconfirmed.
    Uncertain,
    /// It is over, or was told to end.
    Over(LostReason),
}

/// What to run, and how much time it gets to end.
#[derive(Debug)]
pub struct Job {
    /// The program and its arguments; not empty.
    pub command: Vec<OsString>,
    /// What is added to its environment.
    pub variables: Vec<(&'static str, OsString)>,
    /// Leaves `LOCKCTL_*` in its environment.
    pub pass_config: bool,
    /// Time between TERM and KILL, taken off the end of the lease.
    pub kill_after: Duration,
    /// The command is asked to stop then, whatever the lease.
    pub hold_until: Option<Moment>,
}

/// How the command itself ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// With this code.
    Code(i32),
    /// By this signal.
    Signal(i32),
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Ended {
    /// How the command itself ended; `None` when the system did not tell.
    pub end: Option<End>,
    /// Why the lease was over before the last process was gone, if it was.
    pub over: Option<LostReason>,
    /// Whether the last process was gone before the deadline.
    pub gone_in_time: bool,
}

/// Why the command was not started.
#[derive(Debug)]
pub enum NotStarted {
    /// The lease was over before.
    Over(LostReason),
    /// The system refused to execute it.
    Exec(io::Error),
    /// lockctl could not prepare the start.
    Own(io::Error),
}

impl fmt::Display for NotStarted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Over(reason) => write!(f, "the lock was lost before the command was started: {reason}"),
            Self::Exec(error) | Self::Own(error) => error.fmt(f),
        }
    }
}

/// The pipe that tells the command of the loss.
///
/// Make it before anything else is opened: its reading end keeps its number in the command, and shells like dash can name
/// no descriptor above 9.
#[derive(Debug)]
pub(crate) struct LossPipe {
    reader: OwnedFd,
    writer: OwnedFd,
}

impl LossPipe {
    /// Makes the pipe.
    ///
    /// # Errors
    /// No descriptor is left.
    pub(crate) fn new() -> io::Result<Self> {
        // Both ends are closed on exec; the start opens the reading end again for the command alone.
        let (reader, writer) = io::pipe()?;
        Ok(Self { reader: reader.into(), writer: writer.into() })
    }
}

/// Every variable that a run may set: those of an outer run do not leak into an inner one.
const VARIABLES: [&str; 8] = [
    "LOCK_NAME",
    "LOCK_FENCE",
    "LOCK_OWNER_DIGEST",
    "LOCK_STAMP",
    "LOCK_TTL_MS",
    "LOCK_HOLD_UNTIL",
    "LOCK_LOSS_FD",
    "LOCK_STATE",
];

/// Runs the command while the lease stands. Call it on the main thread, on a current-thread runtime.
///
/// The caller gives the lock back afterwards: when this returns, no process of the command is left.
///
/// # Errors
/// Nothing was started, and why.
///
/// # Cancel safety
/// Not cancel safe: a dropped future leaves the command behind.
pub(crate) async fn supervise(
    job: &Job,
    mut hold: watch::Receiver<Hold>,
    signals: &mut Signals,
    loss: LossPipe,
    mut state: StateFile,
    voice: &Voice,
) -> Result<Ended, NotStarted> {
    let mut course = Course::new(job.kill_after, job.hold_until);
    let mut seen = *hold.borrow_and_update();
    // Nothing is started after the loss.
    if course.look(BootClock::read(), &seen).is_some() {
        return Err(NotStarted::Over(course.over().unwrap_or(LostReason::Expired)));
    }
    state.write(seen.deadline, course.stop_at(&seen)).map_err(NotStarted::Own)?;
    let mut run = Run::start(job, loss, &state)?;

    let mut heard: Option<Signal> = None;
    let mut sweep = Duration::from_millis(5);
    let mut complained = false;
    loop {
        // The clock before anything else: after a stop of this very process, nothing of what was heard meanwhile may
        // come before the question whether the lease still stands.
        let now = BootClock::read();
        let hold_now = *hold.borrow_and_update();
        if hold_now != seen {
            if hold_now.deadline != seen.deadline
                && course.over().is_none()
                && let Err(error) = state.write(hold_now.deadline, course.stop_at(&hold_now))
            {
                // The file then shows an earlier deadline: `check` errs on the safe side.
                voice.detail(format_args!("cannot write {}: {error}", state.path().display()));
            }
            if hold_now.standing == Standing::Uncertain && seen.standing == Standing::Held {
                voice.uncertain(now.until(hold_now.deadline));
            }
            seen = hold_now;
        }
        let was_over = course.over();
        if let Some(step) = course.look(now, &seen) {
            if let (None, Some(reason)) = (was_over, course.over()) {
                run.close_loss_pipe();
                state.end(reason);
                voice.lost(reason, now.until(seen.deadline));
            }
            run.act(step, Signal::TERM, voice);
        } else if let (None, Some(reason)) = (was_over, course.over()) {
            // A stop was asked before: the command has its TERM, and now less time.
            run.close_loss_pipe();
            state.end(reason);
            voice.lost(reason, now.until(seen.deadline));
        }
        match heard.take() {
            None | Some(Signal::CHILD) => {}
            Some(signal @ (Signal::TERM | Signal::INT)) => {
                let step = course.asked(now);
                run.act(step, signal, voice);
            }
            Some(Signal::CONT) => run.resume(),
            Some(other) => run.pass_on(other),
        }

        if run.reap() {
            break;
        }
        if run.take_stop() {
            run.suspend();
        }
        let next_look = if course.is_killing() {
            // Whoever is born while its parents are killed is killed at the next turn.
            run.act_quietly(Signal::KILL);
            if now > seen.deadline && !complained {
                complained = true;
                voice.still_there(&run.family.members().iter().map(|m| m.pid).collect::<Vec<_>>());
            }
            sweep = (sweep * 2).min(Duration::from_millis(200));
            now.saturating_add(sweep)
        } else if run.must_poll() {
            course.next_look(&seen).min(now.saturating_add(Duration::from_millis(100)))
        } else {
            course.next_look(&seen)
        };
        tokio::select! {
            biased;
            () = BootClock.sleep_until(next_look) => {}
            signal = signals.next() => heard = Some(signal),
            () = changed(&mut hold) => {}
        }
    }
    let gone_at = BootClock::read();
    run.finish();
    Ok(Ended { end: run.end, over: course.over(), gone_in_time: gone_at <= seen.deadline })
}

async fn changed(hold: &mut watch::Receiver<Hold>) {
    if hold.changed().await.is_err() {
        // Nobody renews any more: what is left is the clock.
        std::future::pending::<()>().await;
    }
}

/// A command under way.
struct Run {
    leader: Pid,
    end: Option<End>,
    is_stopped: bool,
    family: Family,
    terminal: Option<Terminal>,
    loss: Option<OwnedFd>,
}

impl Run {
    fn start(job: &Job, loss: LossPipe, state: &StateFile) -> Result<Self, NotStarted> {
        #[cfg(target_os = "linux")]
        // Any process number that is not zero means "on".
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
            .map_err(|error| NotStarted::Own(error.into()))?;
        let family = Family::before_the_command();
        let terminal = Terminal::on_stdin();

        let mut words = job.command.iter();
        let program = words.next().map(OsString::as_os_str).unwrap_or_default();
        let mut command = Command::new(program);
        command.args(words);
        for name in VARIABLES {
            command.env_remove(name);
        }
        if !job.pass_config {
            for (name, _) in std::env::vars_os().filter(|(name, _)| is_ours(name)) {
                command.env_remove(name);
            }
        }
        command.envs(job.variables.iter().map(|(name, value)| (name, value)));
        command.env("LOCK_LOSS_FD", loss.reader.as_raw_fd().to_string());
        command.env("LOCK_STATE", state.path());
        // The name as it was written, also where the search finds the file elsewhere.
        command.arg0(program);

        let foreground = terminal.as_ref().is_some_and(Terminal::is_ours);
        let child = spawn::spawn(&mut command, loss.reader.as_fd(), foreground).map_err(NotStarted::Exec)?;
        let leader = Pid::from_child(&child);
        Ok(Self { leader, end: None, is_stopped: false, family, terminal, loss: Some(loss.writer) })
    }

    /// Asks the command to end, or ends it.
    fn act(&self, step: Step, ask: Signal, voice: &Voice) {
        match step {
            Step::Ask => {
                voice.stopping(ask);
                self.act_quietly(ask);
                // Whoever is stopped must wake to hear it.
                self.act_quietly(Signal::CONT);
            }
            Step::Kill => {
                voice.stopping(Signal::KILL);
                self.act_quietly(Signal::KILL);
            }
        }
    }

    fn act_quietly(&self, signal: Signal) {
        self.family.signal(self.leader, self.end.is_none(), signal);
    }

    /// Passes a signal on to the command's group.
    fn pass_on(&self, signal: Signal) {
        self.family.signal_group(self.leader, self.end.is_none(), signal);
    }

    /// Goes on after a stop.
    fn resume(&self) {
        if let Some(terminal) = &self.terminal {
            terminal.give(self.leader);
        }
        self.pass_on(Signal::CONT);
    }

    /// Collects who has ended; says whether nobody is left.
    fn reap(&mut self) -> bool {
        loop {
            match rustix::process::wait(WaitOptions::NOHANG | WaitOptions::UNTRACED) {
                Ok(Some((pid, status))) if pid == self.leader => {
                    if let Some(code) = status.exit_status() {
                        self.end = Some(End::Code(code));
                    } else if let Some(signal) = status.terminating_signal() {
                        self.end = Some(End::Signal(signal));
                    } else if status.stopped() {
                        self.is_stopped = true;
                    }
                }
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => {
                    return self.family.has_strangers()
                        && self.end.is_some()
                        && self.family.members().is_empty();
                }
                // No child is left. Where orphans do not come to us, the group may still have members.
                Err(_) => return !self.must_poll(),
            }
        }
    }

    /// Says whether the end of the last process comes without a signal to us.
    fn must_poll(&self) -> bool {
        if cfg!(target_os = "linux") {
            self.end.is_some() && self.family.has_strangers()
        } else {
            self.end.is_some() && rustix::process::test_kill_process_group(self.leader).is_ok()
        }
    }

    fn take_stop(&mut self) -> bool {
        std::mem::take(&mut self.is_stopped)
    }

    /// Follows a command that was stopped from the terminal, so that the shell gets its prompt back. The lease is not
    /// renewed meanwhile; on waking, the clock decides whether the command may go on.
    fn suspend(&self) {
        let Some(terminal) = &self.terminal else { return };
        terminal.take_back(self.leader);
        if terminal::may_stop() {
            let _ = rustix::process::kill_current_process_group(Signal::TSTP);
        } else {
            // Nobody could wake us: as the system does for such a group, the stop is not heeded.
            self.resume();
        }
    }

    fn close_loss_pipe(&mut self) {
        self.loss = None;
    }

    fn finish(&mut self) {
        self.close_loss_pipe();
        if let Some(terminal) = &self.terminal {
            terminal.take_back(self.leader);
            if matches!(self.end, Some(End::Signal(_))) {
                terminal.restore();
            }
        }
    }
}

fn is_ours(name: &OsStr) -> bool {
    name.as_bytes().starts_with(b"LOCKCTL_")
}
