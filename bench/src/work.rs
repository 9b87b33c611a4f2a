//! The same work for every store: rounds of one lock, a hand-off, a crowd, many leases.

use std::time::{Duration, Instant};

use futures_util::{StreamExt, TryStreamExt, stream};
use lockcore::{ClientOptions, Guard, LockClient, Result, backend::LockBackend};
use tokio::task::JoinSet;

use crate::harness::{Bench, Target, micros_each, one_thread, processor_time};

/// Requests of one client that are under way at once while it takes many locks.
const AT_ONCE: usize = 64;
/// So long nothing is counted before all count as waiting.
const QUIET: Duration = Duration::from_millis(300);
/// How long a waiter has to begin its wait; not part of what is measured.
pub(crate) const SETTLE: Duration = Duration::from_millis(20);

/// Takes and gives back one lock so many times.
pub(crate) async fn rounds(client: LockClient, task: usize, rounds: usize) -> Result<()> {
    let lock = client.named(format!("bench/{task}"));
    for _ in 0..rounds {
        lock.acquire().await?.release().await?;
    }
    Ok(())
}

/// Lets each of so many tasks do its work, all at once.
pub(crate) async fn side_by_side<F, E>(tasks: usize, work: impl Fn(usize) -> F) -> std::result::Result<(), E>
where
    F: Future<Output = std::result::Result<(), E>> + Send + 'static,
    E: Send + 'static,
{
    let mut running = JoinSet::new();
    for task in 0..tasks {
        running.spawn(work(task));
    }
    while let Some(done) = running.join_next().await {
        done.expect("no panic")?;
    }
    Ok(())
}

/// Returns the microseconds from the start of a release to the grant for a waiter of another client.
pub(crate) async fn hand_off(from: &LockClient, to: &LockClient) -> Result<f64> {
    let held = from.named("bench/handed").acquire().await?;
    let lock = to.named("bench/handed");
    let waiter = tokio::spawn(async move {
        let guard = lock.acquire().await?;
        Ok::<_, lockcore::Error>((Instant::now(), guard))
    });
    tokio::time::sleep(SETTLE).await;
    assert!(!waiter.is_finished(), "nobody gave the lock up");
    let start = Instant::now();
    held.release().await?;
    let (granted, guard) = waiter.await.expect("no panic")?;
    guard.release().await?;
    Ok(micros_each(granted - start, 1))
}

/// Lets as many clients as there are wait for one lock, each for its turn, and returns how much was counted for each
/// hand-off. `all_wait` looks whether everybody stands in line.
pub(crate) async fn crowd(
    holder: &LockClient,
    waiters: &[LockClient],
    all_wait: impl AsyncFn() -> bool,
    count: impl AsyncFn() -> f64,
) -> Result<f64> {
    let held = holder.named("bench/wanted").acquire().await?;
    let mut running = JoinSet::new();
    for waiter in waiters {
        let lock = waiter.named("bench/wanted");
        running.spawn(async move { lock.acquire().await?.release().await.map(drop) });
    }
    let mut before = f64::NAN;
    loop {
        let now = count().await;
        if all_wait().await && now == before {
            break;
        }
        before = now;
        tokio::time::sleep(QUIET).await;
    }
    held.release().await?;
    while let Some(done) = running.join_next().await {
        done.expect("no panic")?;
    }
    Ok((count().await - before) / waiters.len() as f64)
}

/// A client whose waiters have time for a long line.
pub(crate) fn patient(backend: impl LockBackend) -> LockClient {
    LockClient::with_options(backend, ClientOptions::default().with(|o| o.wait = Duration::from_secs(120)))
}

/// Names of the rows about many leases.
pub(crate) struct Many {
    pub(crate) cpu: &'static str,
    pub(crate) bytes: &'static str,
    pub(crate) messages: &'static str,
    pub(crate) leases: usize,
}

impl Many {
    /// Lets one client hold many leases of 30 s, which it renews, and shows what that costs it, and how many messages a
    /// second the server gets. `messages` counts these.
    pub(crate) fn run<B: LockBackend>(
        &self,
        bench: &mut Bench,
        connect: impl AsyncFnOnce() -> B,
        messages: impl AsyncFn() -> f64,
    ) {
        if !bench.wants_any(&[self.cpu, self.bytes, self.messages]) {
            return;
        }
        let runtime = one_thread();
        let client = LockClient::new(runtime.block_on(connect()));
        // What the first lock of a client starts is no part of one lease more.
        runtime.block_on(rounds(client.clone(), 0, 1)).expect("the store is there");
        let mut guards: Vec<Guard> = Vec::with_capacity(self.leases);
        let memory = allocation_counter::measure(|| {
            let acquires = stream::iter(0..self.leases)
                .map(|i| client.named(["bench", "many", &i.to_string()]).acquire())
                .buffer_unordered(AT_ONCE)
                .try_for_each(|guard| {
                    guards.push(guard);
                    std::future::ready(Ok(()))
                });
            runtime.block_on(acquires).expect("they are free");
        });
        // Two periods of renewal.
        let watched = ClientOptions::default().ttl.mul_f64(2.0 / 3.0);
        let (cpu, count, start) = (processor_time(), runtime.block_on(messages()), Instant::now());
        runtime.block_on(async { tokio::time::sleep(watched).await });
        let took = start.elapsed().as_secs_f64();
        let share = (processor_time() - cpu).as_secs_f64() / took;
        let sent = runtime.block_on(messages()) - count;
        // Cheap because nothing was renewed would be no result.
        assert!(sent > 0.0, "no renewal was sent in two periods");
        assert!(guards.iter().all(|guard| guard.ensure_held().is_ok()), "a lease was lost");
        bench.row(self.cpu, "cores", share, None, Target::Shown);
        bench.row(self.bytes, "bytes", memory.bytes_current as f64 / self.leases as f64, None, Target::Shown);
        bench.row(self.messages, "messages/s", sent / took, None, Target::Shown);
        runtime.block_on(async {
            drop(guards);
            client.close().await;
        });
    }
}
