//! A client that does nothing costs nothing.

use std::time::Duration;

use lockcore::{LockClient, memory::MemoryBackend};

use crate::harness::{Bench, Target, one_thread, processor_time, repeated};

const WATCHED: Duration = Duration::from_secs(1);
const ROUNDS: usize = 5;

pub(crate) fn run(bench: &mut Bench) {
    for (name, leases) in [("idle/cpu", 0), ("idle/cpu/one-lease", 1)] {
        if !bench.wants(name) {
            continue;
        }
        let runtime = one_thread();
        let client = LockClient::new(MemoryBackend::default());
        let guards = runtime.block_on(async {
            // What the first lock of a process starts is running in both cases.
            client.named("bench/first").acquire().await?.release().await?;
            let mut guards = Vec::new();
            for i in 0..leases {
                guards.push(client.named(["bench", &i.to_string()]).acquire().await?);
            }
            Ok::<_, lockcore::Error>(guards)
        });
        let guards = guards.expect("the store is there");
        let used = repeated(ROUNDS, || {
            let before = processor_time();
            runtime.block_on(async { tokio::time::sleep(WATCHED).await });
            (processor_time() - before).as_secs_f64() * 1e3
        });
        bench.row(name, "ms cpu/s", used, None, Target::Below(1.0));
        runtime.block_on(async {
            drop(guards);
            client.close().await;
        });
    }
}
