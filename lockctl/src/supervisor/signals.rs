//! The signals that lockctl hears.

use std::{io, task::Poll};

use rustix::process::Signal;
use tokio::signal::unix::{self, SignalKind};

/// Hears signals. Each has a handler, so that they count for a process with number 1, too.
#[derive(Debug)]
pub(crate) struct Signals {
    heard: Vec<(Signal, unix::Signal)>,
}

impl Signals {
    /// Starts to hear them. What was ignored at the start, as by `nohup` or in the background of a script, stays
    /// ignored for lockctl and the command alike.
    ///
    /// # Errors
    /// The system refused a handler, or the runtime has no signals.
    pub(crate) fn hear() -> io::Result<Self> {
        const ALL: [Signal; 9] = [
            Signal::CHILD,
            Signal::CONT,
            Signal::INT,
            Signal::TERM,
            Signal::HUP,
            Signal::QUIT,
            Signal::USR1,
            Signal::USR2,
            Signal::WINCH,
        ];
        let ignored = ignored_at_start();
        let mut heard = Vec::new();
        for signal in ALL {
            let number = signal.as_raw();
            if signal == Signal::CHILD || !is_in(ignored, signal) {
                heard.push((signal, unix::signal(SignalKind::from_raw(number))?));
            }
        }
        Ok(Self { heard })
    }

    /// Returns the next signal.
    ///
    /// # Cancel safety
    /// Nothing is lost when the future is dropped. Signals of one kind that come together are one.
    pub(crate) async fn next(&mut self) -> Signal {
        std::future::poll_fn(|cx| {
            for (signal, stream) in &mut self.heard {
                if stream.poll_recv(cx).is_ready() {
                    return Poll::Ready(*signal);
                }
            }
            Poll::Pending
        })
        .await
    }

    /// Returns the next signal that asks to leave: INT, TERM, HUP or QUIT.
    ///
    /// # Cancel safety
    /// As [`next`](Self::next).
    pub(crate) async fn next_to_leave(&mut self) -> Signal {
        loop {
            let signal = self.next().await;
            if matches!(signal, Signal::INT | Signal::TERM | Signal::HUP | Signal::QUIT) {
                return signal;
            }
        }
    }
}

/// Says whether a signal that has no handler of ours is ignored.
pub(super) fn is_ignored_at_start(signal: Signal) -> bool {
    is_in(ignored_at_start(), signal)
}

fn is_in(set: u64, signal: Signal) -> bool {
    set & (1 << (signal.as_raw() - 1)) != 0
}

/// Reads which signals are ignored, as bits; none where the system does not tell.
fn ignored_at_start() -> u64 {
    std::fs::read_to_string("/proc/self/status")
        .ok()
        .and_then(|status| {
            let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
            u64::from_str_radix(line.trim(), 16).ok()
        })
        .unwrap_or(0)
}
