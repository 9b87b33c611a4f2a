//! What the tests of the client share: a store in memory, and clients on virtual time.
#![allow(dead_code, unreachable_pub)]

use std::time::Duration;

use lockcore::{ClientOptions, LockClient, LockName, TokioClock, memory::MemoryBackend};

pub const SECOND: Duration = Duration::from_secs(1);
pub const TTL: Duration = Duration::from_secs(30);

/// A store and the one clock that all clients of a test share.
pub struct World {
    pub store: MemoryBackend,
    pub clock: TokioClock,
}

impl World {
    pub fn new() -> Self {
        Self { store: MemoryBackend::default(), clock: TokioClock::start() }
    }

    pub fn client(&self) -> LockClient {
        self.client_with(|_| {})
    }

    pub fn client_with(&self, change: impl FnOnce(&mut ClientOptions)) -> LockClient {
        LockClient::with_clock(self.store.clone(), ClientOptions::default().with(change), self.clock)
    }

    pub fn now(&self) -> lockcore::backend::Moment {
        lockcore::backend::Clock::now(&self.clock)
    }

    pub fn is_held(&self, lock: &str) -> bool {
        self.store.holder(&name(lock), self.now()).is_some()
    }

    /// Lets everything that is ready run, without letting time pass.
    pub async fn settle(&self) {
        for _ in 0..50 {
            tokio::task::yield_now().await;
        }
    }
}

pub fn name(text: &str) -> LockName {
    LockName::parse(text).unwrap()
}

pub async fn pass(time: Duration) {
    tokio::time::sleep(time).await;
}

/// Polls a future once.
pub async fn poll_once<F: Future + Unpin>(future: &mut F) -> std::task::Poll<F::Output> {
    std::future::poll_fn(|cx| std::task::Poll::Ready(std::pin::Pin::new(&mut *future).poll(cx))).await
}
