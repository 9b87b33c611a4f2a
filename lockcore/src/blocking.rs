//! Locks for ordinary threads: the connection and the renewals live on a thread of the library's own.

use std::{
    fmt,
    sync::{Arc, Mutex, mpsc},
    thread::JoinHandle,
};

use tokio::{runtime::Handle, sync::oneshot};

use crate::{
    backend::LockBackend,
    client::ClientOptions,
    error::{Error, ErrorKind, Result, Verb},
    guard::{Busy, Guard, GuardRef},
    lease::{LostReason, Released},
    name::IntoLockName,
    sync::LockExt,
};

/// Takes locks from ordinary threads.
///
/// # Example
/// ```
/// use lockcore::{ClientOptions, blocking::LockClient, memory::MemoryBackend};
///
/// let locks = LockClient::connect(async || Ok(MemoryBackend::default()), ClientOptions::default())?;
/// let fence = locks.run("order/42", |held| -> lockcore::Result<_> { Ok(held.stamp()?.fence) })?;
/// assert_eq!(fence.get(), 1);
/// locks.close();
/// # Ok::<(), lockcore::Error>(())
/// ```
#[derive(Clone)]
pub struct LockClient {
    shared: Arc<Shared>,
}

struct Shared {
    locks: crate::LockClient,
    runtime: Handle,
    thread: Mutex<Option<(oneshot::Sender<()>, JoinHandle<()>)>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Dropping the sender ends the thread; it is not joined, because a drop must not block on the network.
        self.thread.grab().take();
    }
}

fn outside_of_a_runtime() -> Result<()> {
    match Handle::try_current() {
        Err(_) => Ok(()),
        Ok(_) => Err(Error::new(
            ErrorKind::Misconfigured,
            "a blocking call inside an async runtime would stop it; use `lockcore::LockClient` there",
        )),
    }
}

fn gone() -> Error {
    Error::new(ErrorKind::Closed, "the client was closed")
}

impl LockClient {
    /// Connects on a thread of the library's own.
    ///
    /// # Errors
    /// What `connect` answers. `Misconfigured`: inside an async runtime.
    pub fn connect<B, Fut>(
        connect: impl FnOnce() -> Fut + Send + 'static,
        options: ClientOptions,
    ) -> Result<Self>
    where
        B: LockBackend,
        Fut: Future<Output = Result<B>>,
    {
        outside_of_a_runtime()?;
        let (tell, told) = mpsc::channel();
        let (end, ended) = oneshot::channel();
        let thread = std::thread::Builder::new().name("lockcore-blocking".into()).spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = match runtime {
                Ok(runtime) => runtime,
                Err(error) => {
                    let cause = Error::new(ErrorKind::Misconfigured, "no async runtime can be made here");
                    // Nobody waits any more: nothing to do.
                    let _ = tell.send(Err(cause.with_source(error)));
                    return;
                }
            };
            runtime.block_on(async move {
                match connect().await {
                    Ok(backend) => {
                        let locks = crate::LockClient::with_options(backend, options);
                        if tell.send(Ok((locks, Handle::current()))).is_ok() {
                            // An error means that the client was dropped, which ends the thread, too.
                            let _ = ended.await;
                        }
                    }
                    Err(error) => {
                        let _ = tell.send(Err(error));
                    }
                }
            });
        });
        let thread = thread.map_err(|e| {
            Error::new(ErrorKind::Misconfigured, "the system starts no more threads").with_source(e)
        })?;
        let (locks, runtime) = told.recv().map_err(|_| gone())??;
        Ok(Self { shared: Arc::new(Shared { locks, runtime, thread: Mutex::new(Some((end, thread))) }) })
    }

    /// Names a lock, to set its numbers; pass it to [`run_lock`](Self::run_lock) or
    /// [`acquire_lock`](Self::acquire_lock).
    pub fn named(&self, name: impl IntoLockName) -> crate::Lock {
        self.shared.locks.named(name)
    }

    /// Runs `body` under the lock on this thread. Nobody can interrupt a thread: ask `held.stamp()?` between steps.
    ///
    /// # Errors
    /// As [`Lock::run`](crate::Lock::run), except that a body is never dropped.
    pub fn run<T, E: From<Error>>(
        &self,
        name: impl IntoLockName,
        body: impl FnOnce(&GuardRef) -> Result<T, E>,
    ) -> Result<T, E> {
        self.run_lock(&self.named(name), body)
    }

    /// Runs `body` under a lock with numbers of its own.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_lock<T, E: From<Error>>(
        &self,
        lock: &crate::Lock,
        body: impl FnOnce(&GuardRef) -> Result<T, E>,
    ) -> Result<T, E> {
        let guard = self.acquire_lock(lock)?;
        let held = guard.watch();
        let busy = Busy::begin(guard.held());
        let answer = body(&held);
        drop(busy);
        let overtaken = guard.held().overtaken().map(|why| guard.held().lost_error(why));
        let lost = |held: &GuardRef| held.held.lost_error(LostReason::Taken);
        let released = self.release(guard);
        match (answer, overtaken) {
            (Ok(_), Some(error)) => Err(error.into()),
            (Ok(_), None) if matches!(released, Ok(Released::AlreadyOver)) => Err(lost(&held).into()),
            (answer, _) => answer,
        }
    }

    /// Takes the lock; all of the guard's methods but `release`, `renew`, `lost` and `changed` need no runtime.
    ///
    /// # Errors
    /// As [`Lock::acquire`](crate::Lock::acquire).
    pub fn acquire(&self, name: impl IntoLockName) -> Result<Guard> {
        self.acquire_lock(&self.named(name))
    }

    /// Takes a lock with numbers of its own.
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    pub fn acquire_lock(&self, lock: &crate::Lock) -> Result<Guard> {
        self.wait_for(lock.acquire())?
    }

    /// Releases and waits for the store's word.
    ///
    /// # Errors
    /// As [`Guard::release`].
    pub fn release(&self, guard: Guard) -> Result<Released> {
        self.wait_for(guard.release())?
    }

    /// Closes, as the async client does, and ends the thread.
    pub fn close(&self) {
        let locks = self.shared.locks.clone();
        // An error means that it is closed already.
        let _ = self.wait_for(async move { locks.close().await });
        if let Some((end, thread)) = self.shared.thread.grab().take() {
            let _ = end.send(());
            let _ = thread.join();
        }
    }

    fn wait_for<T: Send + 'static>(&self, future: impl Future<Output = T> + Send + 'static) -> Result<T> {
        outside_of_a_runtime()?;
        if self.shared.thread.grab().is_none() {
            return Err(gone().about(Verb::Acquire, None, self.shared.locks.capabilities().backend));
        }
        let (tell, told) = mpsc::channel();
        self.shared.runtime.spawn(async move {
            // Nobody waits any more only if the waiting thread is gone.
            let _ = tell.send(future.await);
        });
        told.recv().map_err(|_| gone())
    }
}

impl fmt::Debug for LockClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("blocking::LockClient").field("locks", &self.shared.locks).finish_non_exhaustive()
    }
}
