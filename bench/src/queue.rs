//! Many tasks of one process that want one name: one of them waits in the store, the others wait here.

use std::time::Instant;

use lockcore::{ClientOptions, Error, LockClient, LockName, memory::MemoryBackend};
use tokio::task::JoinSet;

use crate::harness::{Bench, Target, one_thread, repeated};

const TASKS: usize = 10_000;
const ROUNDS: usize = 5;

pub(crate) fn run(bench: &mut Bench) {
    let names = ["queue/waiters-in-store", "queue/total", "queue/bytes-per-task", "queue/future"];
    if !names.iter().any(|name| bench.wants(name)) {
        return;
    }
    let mut most_waiters = 0.0f64;
    let mut bytes = Vec::new();
    let total = repeated(ROUNDS, || {
        let round = round();
        most_waiters = most_waiters.max(round.waiters as f64);
        bytes.push(round.bytes_each);
        round.millis
    });
    let bytes = repeated(ROUNDS, || bytes.pop().expect("one a round"));
    bench.row("queue/waiters-in-store", "waiters", most_waiters, None, Target::Exactly(1.0));
    bench.row("queue/total", "ms", total, None, Target::Shown);
    bench.row("queue/bytes-per-task", "bytes", bytes, None, Target::Below(2048.0));
    let client = LockClient::new(MemoryBackend::default());
    let future = size_of_val(&client.named("bench/one").acquire());
    bench.row("queue/future", "bytes", future as f64, None, Target::Below(2048.0));
}

struct Round {
    waiters: usize,
    bytes_each: f64,
    millis: f64,
}

fn round() -> Round {
    let runtime = one_thread();
    let store = MemoryBackend::default();
    let name = LockName::parse("bench/wanted").expect("a name");
    let options = ClientOptions::default().with(|o| o.wait = std::time::Duration::from_secs(120));
    let client = LockClient::with_options(store.clone(), options);
    // Another process has it: a client of its own, so that the queue of this one cannot know.
    let other = LockClient::new(store.clone());

    let held = runtime.block_on(other.named(&name).acquire()).expect("nobody has it");
    let mut tasks = JoinSet::new();
    let memory = allocation_counter::measure(|| {
        runtime.block_on(async {
            for _ in 0..TASKS {
                let client = client.clone();
                let name = name.clone();
                tasks.spawn(async move {
                    let guard = client.named(name).acquire().await?;
                    guard.release().await.map(drop)
                });
            }
            // Once round the run queue: every task has been polled, and waits.
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
        });
    });
    let waiters = store.waiters(&name);
    let start = Instant::now();
    runtime
        .block_on(async {
            held.release().await?;
            while let Some(done) = tasks.join_next().await {
                done.expect("no panic")?;
            }
            Ok::<_, Error>(())
        })
        .expect("every task gets its turn");
    let millis = start.elapsed().as_secs_f64() * 1e3;
    Round { waiters, bytes_each: memory.bytes_current as f64 / TASKS as f64, millis }
}
