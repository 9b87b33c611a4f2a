//! What the client and the guard add to the verbs of the in-memory store.

use std::{hint::black_box, time::Instant};

use lockcore::{LockClient, LockName, Result, backend::AcquireRequest, memory::MemoryBackend};
use tokio::runtime::Runtime;

use crate::harness::{Bench, ROUNDS, Target, alternate, micros_each, one_thread};

const PAIRS: usize = 20_000;
const COUNTED: usize = 1_000;

pub(crate) fn run(bench: &mut Bench) {
    let target = Target::Below(5.0);
    if bench.wants("memory/acquire-release") {
        let (ours, limit) = measure(&one_thread());
        bench.row("memory/acquire-release", "us", ours, Some(limit), target);
    }
    if bench.wants("memory/acquire-release/2-workers") {
        let two = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("a runtime can be built");
        let (ours, limit) = measure(&two);
        bench.row("memory/acquire-release/2-workers", "us", ours, Some(limit), target);
    }
    if bench.wants("memory/allocations") {
        let runtime = one_thread();
        let client = LockClient::new(MemoryBackend::default());
        // The first acquire starts what all later ones share.
        runtime.block_on(guards(client.clone(), 1)).expect("the store is there");
        let ours = allocation_counter::measure(|| {
            runtime.block_on(guards(client.clone(), COUNTED)).expect("the store is there");
        });
        let limit = allocation_counter::measure(|| {
            runtime.block_on(verbs(client.clone(), COUNTED)).expect("the store is there");
        });
        let each = |counted: allocation_counter::AllocationInfo| counted.count_total as f64 / COUNTED as f64;
        bench.row("memory/allocations", "allocations", each(ours), Some(each(limit)), Target::Shown);
    }
}

fn measure(runtime: &Runtime) -> (f64, f64) {
    let client = LockClient::new(MemoryBackend::default());
    alternate(
        ROUNDS,
        || {
            let start = Instant::now();
            let pairs = runtime.spawn(guards(client.clone(), PAIRS));
            runtime.block_on(pairs).expect("no panic").expect("the store is there");
            micros_each(start.elapsed(), PAIRS)
        },
        || {
            let start = Instant::now();
            let pairs = runtime.spawn(verbs(client.clone(), PAIRS));
            runtime.block_on(pairs).expect("no panic").expect("the store is there");
            micros_each(start.elapsed(), PAIRS)
        },
    )
}

async fn guards(client: LockClient, pairs: usize) -> Result<()> {
    let lock = client.named("bench/one");
    for _ in 0..pairs {
        let guard = lock.acquire().await?;
        black_box(guard.fence());
        guard.release().await?;
    }
    Ok(())
}

async fn verbs(client: LockClient, pairs: usize) -> Result<()> {
    let name = LockName::parse("bench/raw")?;
    let (backend, call) = client.backend()?;
    for _ in 0..pairs {
        let request = AcquireRequest::new(name.clone(), std::time::Duration::from_secs(30));
        let lease = backend.acquire(&call, &request).await?;
        black_box(lease.fence);
        backend.release(&call, &lease).await?;
    }
    Ok(())
}
