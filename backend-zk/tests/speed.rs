//! How fast it is beside the bare requests that it cannot do without, through the same client library.
//!
//! Not part of a normal run: `cargo test --release -p lockcore-zk --test speed -- --ignored --nocapture`.

mod common;

use std::time::{Duration, Instant};

use common::*;
use lockcore::backend::*;
use zookeeper_client::{Acls, Client, CreateMode};

const ROUNDS: u32 = 2000;

fn say(line: &str) {
    std::io::Write::write_all(&mut std::io::stderr(), format!("{line}\n").as_bytes()).unwrap();
}

/// One round as bare as it can be: a place, a look, and the place goes.
async fn bare(client: &Client, queue: &str, owner: u64) {
    let options = CreateMode::EphemeralSequential.with_acls(Acls::anyone_all());
    let prefix = format!("{queue}/{owner:032x}-");
    let made = client.create(&prefix, b"0:20000:", &options);
    let (listed, base) = (client.list_children(queue), client.get_data("/bare"));
    let (_, sequence) = made.await.unwrap();
    listed.await.unwrap();
    base.await.unwrap();
    client.delete(&format!("{prefix}{sequence}"), None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "measures"]
async fn rounds_beside_bare_requests() {
    let Some(server) = Server::start() else { return };
    let backend = server.backend().await;
    let client = server.admin().await;
    // The same requests by a session that is served on a thread apart, as the backend's are.
    let apart = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let (handle, address) = (apart.handle().clone(), server.address.clone());
    std::thread::spawn(move || apart.block_on(std::future::pending::<()>()));
    let far = handle.spawn(async move { Client::connect(&address).await.unwrap() }).await.unwrap();
    let (plain, container) = (CreateMode::Persistent, CreateMode::Container);
    client.create("/bare", b"0", &plain.with_acls(Acls::anyone_all())).await.unwrap();
    for tasks in [1, 64] {
        let rounds = ROUNDS / if tasks == 1 { 1 } else { 16 };
        let mut best = [Duration::MAX; 3];
        for _ in 0..4 {
            for (client, best) in [&client, &far].into_iter().zip(&mut best) {
                let began = Instant::now();
                let mut running = Vec::new();
                for task in 0..tasks {
                    let (client, queue) = (client.clone(), format!("/bare-{task}"));
                    let _ = client.create(&queue, b"", &container.with_acls(Acls::anyone_all())).await;
                    running.push(tokio::spawn(async move {
                        for round in 0..rounds {
                            bare(&client, &queue, round.into()).await;
                        }
                    }));
                }
                for task in running {
                    task.await.unwrap();
                }
                *best = (*best).min(began.elapsed());
            }
            let began = Instant::now();
            let mut running = Vec::new();
            for task in 0..tasks {
                let backend = backend.clone();
                running.push(tokio::spawn(async move {
                    for _ in 0..rounds {
                        let asked = request_of(&format!("ours/{task}"), Duration::from_secs(20));
                        let held = backend.acquire(&call(), &asked).await.unwrap();
                        assert_eq!(backend.release(&call(), &held).await.unwrap(), Released::Now);
                    }
                }));
            }
            for task in running {
                task.await.unwrap();
            }
            best[2] = best[2].min(began.elapsed());
        }
        let each = best.map(|took| took / (rounds * tasks));
        let ratio = |to: usize| best[to].as_secs_f64() / best[2].as_secs_f64();
        let [bare, apart, ours] = each;
        let (near, far) = (ratio(0), ratio(1));
        say(&format!(
            "{tasks} tasks: bare {bare:?}, bare on a thread apart {apart:?}, ours {ours:?} a round; ratios {near:.2}, {far:.2}"
        ));
    }
}
