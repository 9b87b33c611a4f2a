//! A move between two stores in memory and back, by the real clock: what backends go through with their servers.

use std::sync::Arc;

use lockcore::{backend::LockBackend, memory::MemoryBackend};
use lockcore_conformance::crossing;

#[tokio::test]
async fn locks_cross_from_memory_to_memory_and_return() {
    let [from, to] = [(), ()].map(|()| MemoryBackend::default());
    let connect = |store: MemoryBackend| async move || Arc::new(store.clone()) as Arc<dyn LockBackend>;
    crossing::crosses_and_returns(connect(from), connect(to)).await;
}
