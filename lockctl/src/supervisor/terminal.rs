//! The terminal, handed to the command and taken back, as a shell does it.

use std::io::{Stdin, stdin};

use nix::sys::signal::{SigSet, Signal};
use rustix::{
    process::{Pid, getpgid, getpgrp, getppid, getsid},
    termios::{OptionalActions, Termios, isatty, tcgetattr, tcgetpgrp, tcsetattr, tcsetpgrp},
};

/// The terminal on stdin.
pub(super) struct Terminal {
    stdin: Stdin,
    own_group: Pid,
    /// As it was before the command, for the case that it dies with the terminal in raw mode.
    settings: Option<Termios>,
}

impl Terminal {
    /// Returns the terminal on stdin, if there is one and it is ours to control.
    pub(super) fn on_stdin() -> Option<Self> {
        let stdin = stdin();
        // A terminal that does not control this session cannot be handed over, and sends no signals either.
        (isatty(&stdin) && tcgetpgrp(&stdin).is_ok()).then(|| Self {
            own_group: getpgrp(),
            settings: tcgetattr(&stdin).ok(),
            stdin,
        })
    }

    /// Says whether our group has the terminal: then it can be handed over. A background job must not grab it.
    pub(super) fn is_ours(&self) -> bool {
        tcgetpgrp(&self.stdin) == Ok(self.own_group)
    }

    /// Gives the terminal to a group, if we have it.
    pub(super) fn give(&self, group: Pid) {
        if self.is_ours() {
            self.set_foreground(group);
        }
    }

    /// Takes the terminal back from a group, if that has it.
    pub(super) fn take_back(&self, group: Pid) {
        if tcgetpgrp(&self.stdin) == Ok(group) {
            self.set_foreground(self.own_group);
        }
    }

    /// Puts the settings back that were found at the start, if the terminal is ours.
    pub(super) fn restore(&self) {
        if let Some(settings) = self.settings.as_ref().filter(|_| self.is_ours()) {
            let _ = tcsetattr(&self.stdin, OptionalActions::Drain, settings);
        }
    }

    fn set_foreground(&self, group: Pid) {
        // From the background this call stops its caller, unless the signal is blocked. The terminal may be gone.
        let mut stop = SigSet::empty();
        stop.add(Signal::SIGTTOU);
        let blocked = stop.thread_block();
        let _ = tcsetpgrp(&self.stdin, group);
        if blocked.is_ok() {
            let _ = stop.thread_unblock();
        }
    }
}

/// Says whether somebody could wake us if we stopped: a parent in the same session that is not of our group, which is
/// a shell with job control.
pub(super) fn may_stop() -> bool {
    if super::signals::is_ignored_at_start(rustix::process::Signal::TSTP) {
        return false;
    }
    let (Ok(session), own_group) = (getsid(None), getpgrp()) else { return false };
    let mut above = getppid();
    while let Some(pid) = above {
        if getsid(Some(pid)) != Ok(session) {
            return false;
        }
        if getpgid(Some(pid)) != Ok(own_group) {
            return true;
        }
        above = super::family::parent_of(pid);
    }
    false
}

impl std::fmt::Debug for Terminal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Terminal").field("own_group", &self.own_group).finish_non_exhaustive()
    }
}
