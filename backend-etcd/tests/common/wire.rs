//! A wire between a client and one member, on which a test holds what it likes.

#![allow(dead_code, reason = "no test file uses all of it")]

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::Notify,
};

/// Forwards connections to one address until it is dropped.
pub(crate) struct Wire {
    pub(crate) url: String,
    state: Arc<State>,
    accepts: tokio::task::JoinHandle<()>,
}

#[derive(Default)]
struct State {
    /// From a request that contains this on, its connection is held in this direction.
    hold: Mutex<Option<Vec<u8>>>,
    /// Replies are held.
    deaf: AtomicBool,
    /// Each piece comes this much later, in both directions.
    delay: Mutex<Duration>,
    held: AtomicUsize,
    /// Connections taken so far.
    taken: AtomicUsize,
    changed: Notify,
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.accepts.abort();
    }
}

impl Wire {
    pub(crate) async fn to(url: &str) -> Self {
        let target = url.rsplit('/').next().unwrap().to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(State::default());
        let accepts = tokio::spawn({
            let state = state.clone();
            async move {
                while let Ok((client, _)) = listener.accept().await {
                    state.taken.fetch_add(1, Ordering::AcqRel);
                    let Ok(server) = TcpStream::connect(&target).await else { continue };
                    let (from_client, to_client) = client.into_split();
                    let (from_server, to_server) = server.into_split();
                    tokio::spawn(pump(from_client, to_server, state.clone(), true));
                    tokio::spawn(pump(from_server, to_client, state.clone(), false));
                }
            }
        });
        Self { url, state, accepts }
    }

    /// Holds every connection from the request on that contains these bytes.
    pub(crate) fn hold(&self, bytes: &str) {
        *self.state.hold.lock().unwrap_or_else(PoisonError::into_inner) = Some(bytes.into());
    }

    /// Returns once a request is held.
    pub(crate) async fn holds(&self) {
        loop {
            let mut changed = std::pin::pin!(self.state.changed.notified());
            changed.as_mut().enable();
            if self.state.held.load(Ordering::Acquire) > 0 {
                return;
            }
            changed.await;
        }
    }

    /// Delivers what is held, and holds nothing more.
    pub(crate) fn deliver(&self) {
        *self.state.hold.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.state.deaf.store(false, Ordering::Release);
        self.state.changed.notify_waiters();
    }

    /// Holds every reply.
    pub(crate) fn hold_replies(&self) {
        self.state.deaf.store(true, Ordering::Release);
    }

    /// Returns how many connections were made so far.
    pub(crate) fn connections(&self) -> usize {
        self.state.taken.load(Ordering::Acquire)
    }

    /// Lets everything come later.
    pub(crate) fn delay(&self, by: Duration) {
        *self.state.delay.lock().unwrap_or_else(PoisonError::into_inner) = by;
    }
}

async fn pump(
    mut from: tokio::net::tcp::OwnedReadHalf,
    mut to: tokio::net::tcp::OwnedWriteHalf,
    state: Arc<State>,
    up: bool,
) {
    let mut buffer = vec![0; 1 << 16];
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        let piece = &buffer[..read];
        let delay = *state.delay.lock().unwrap_or_else(PoisonError::into_inner);
        if !delay.is_zero() {
            tokio::time::sleep(delay).await;
        }
        let mut told = false;
        loop {
            let mut changed = std::pin::pin!(state.changed.notified());
            changed.as_mut().enable();
            let held = if up {
                let hold = state.hold.lock().unwrap_or_else(PoisonError::into_inner);
                hold.as_ref().is_some_and(|needle| {
                    told || piece.windows(needle.len()).any(|window| window == needle.as_slice())
                })
            } else {
                state.deaf.load(Ordering::Acquire)
            };
            if !held {
                break;
            }
            if !told && up {
                told = true;
                state.held.fetch_add(1, Ordering::AcqRel);
                state.changed.notify_waiters();
            }
            changed.await;
        }
        if to.write_all(piece).await.is_err() {
            return;
        }
    }
    let _ = to.shutdown().await;
}
