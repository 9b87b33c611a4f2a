//! The one step between fork and exec.
//!
//! The only unsafe code of this program: what has to happen in the child, before it becomes the command, can be said
//! to the standard library in no other way.

#![allow(unsafe_code)]

use std::{
    io,
    os::{
        fd::{AsRawFd, BorrowedFd},
        unix::process::CommandExt,
    },
    process::{Child, Command},
};

use nix::sys::signal::{SigSet, Signal as NixSignal};
use rustix::{
    io::{FdFlags, fcntl_setfd},
    process::getpgrp,
    termios::tcsetpgrp,
};

/// Starts the command in a process group of its own: ended by the kernel should lockctl die, with `loss` inherited,
/// and, with `foreground`, as the terminal's foreground group from its first instruction on.
///
/// Call it from the main thread: the kernel takes the *thread* for the parent, and one that ends would take the
/// command with it.
///
/// # Errors
/// What the system said to fork, to the steps in the child, or to exec.
///
/// # Source
/// prctl(2) `PR_SET_PDEATHSIG`, tcsetpgrp(3), Linux man-pages 6.
pub(super) fn spawn(command: &mut Command, loss: BorrowedFd<'_>, foreground: bool) -> io::Result<Child> {
    let loss = loss.as_raw_fd();
    #[cfg(target_os = "linux")]
    let parent = rustix::process::getpid();

    let in_the_child = move || {
        #[cfg(target_os = "linux")]
        {
            use rustix::process::{Signal, getppid, set_parent_process_death_signal};
            set_parent_process_death_signal(Some(Signal::KILL))?;
            // It may have died before the line above: then nobody will tell us.
            if getppid() != Some(parent) {
                return Err(rustix::io::Errno::SRCH.into());
            }
        }
        // SAFETY: the descriptor is open for as long as the caller's borrow lasts, which is longer than the call of
        // `spawn` below; the child has its own copy of the table.
        let loss = unsafe { BorrowedFd::borrow_raw(loss) };
        fcntl_setfd(loss, FdFlags::empty())?;
        if foreground {
            let mut stop = SigSet::empty();
            stop.add(NixSignal::SIGTTOU);
            stop.thread_block()?;
            // A terminal that went away meanwhile does not keep the command from running.
            let _ = tcsetpgrp(rustix::stdio::stdin(), getpgrp());
            stop.thread_unblock()?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec only the calling thread exists, so the closure must not wait for a lock that another
    // thread held. It makes system calls that signal-safety(7) allows or that touch nothing but the kernel, allocates
    // nothing (errors are made from numbers), and keeps no reference into the parent.
    unsafe { command.pre_exec(in_the_child) };
    command.process_group(0).spawn()
}
