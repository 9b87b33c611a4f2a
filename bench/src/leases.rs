//! Many leases held by one process: what their renewals cost, and what each keeps.

use std::time::{Duration, Instant};

use lockcore::{ClientOptions, LockClient, Verb, memory::MemoryBackend};

use crate::harness::{Bench, Target, one_thread, processor_time};

// A tenth of the leases at a tenth of the TTL: as many renewals a second as 100,000 leases with 30 s.
const LEASES: usize = 10_000;
const TTL: Duration = Duration::from_secs(3);
const WATCHED: Duration = Duration::from_secs(6);

pub(crate) fn run(bench: &mut Bench) {
    let (cpu, bytes) = ("leases/cpu", "leases/bytes-per-lease");
    if !bench.wants(cpu) && !bench.wants(bytes) {
        return;
    }
    let runtime = one_thread();
    let store = MemoryBackend::default();
    let client = LockClient::with_options(store.clone(), ClientOptions::default().with(|o| o.ttl = TTL));
    let mut guards = Vec::new();
    let memory = allocation_counter::measure(|| {
        runtime.block_on(async {
            for i in 0..LEASES {
                guards.push(client.named(["bench", &i.to_string()]).acquire().await.expect("it is free"));
            }
        });
    });
    bench.row(bytes, "bytes", memory.bytes_current as f64 / LEASES as f64, None, Target::Below(1024.0));

    let (before, start) = (processor_time(), Instant::now());
    let renewals = store.requests(Verb::Renew);
    runtime.block_on(async { tokio::time::sleep(WATCHED).await });
    let share = (processor_time() - before).as_secs_f64() / start.elapsed().as_secs_f64();
    let renewals = store.requests(Verb::Renew) - renewals;
    // Cheap because nothing was renewed would be no result.
    assert!(renewals > 0, "no renewal was sent in two TTLs");
    assert!(guards.iter().all(|guard| guard.ensure_held().is_ok()), "a lease was lost");
    bench.row(cpu, "cores", share, None, Target::Below(1.0));
    runtime.block_on(async {
        drop(guards);
        client.close().await;
    });
}
