//! A job on one of N machines: all of them start it, one runs it, the others learn who is at it and go home.
//! `try_run` does not wait; its answer is `Granted` with the body's value or `Busy` with the holder.
//! Run with the URL of a store to try another than a SQLite file.
#![allow(clippy::print_stdout)]

use std::time::Duration;

use lockcore::{Attempt, ClientOptions, LockClient};
use tokio::sync::watch;

type Anything = Box<dyn std::error::Error + Send + Sync>;
const MACHINES: usize = 3;

/// One machine: its own connection, its own client, the same lock.
async fn machine(name: String, store: String, turned_away: watch::Sender<usize>) -> Result<bool, Anything> {
    let backend = lockcore_examples::connect(&store).await?;
    let options = ClientOptions::default().with(|o| o.label = Some(name.as_str().into()));
    let locks = LockClient::with_options(backend, options);

    let ran = locks
        .named("report/nightly")
        .ttl(Duration::from_secs(10))
        .max_hold(Duration::from_secs(3600))
        .try_run(async |held| -> lockcore::Result<()> {
            println!("{name}: builds the report under fence {}", held.fence());
            // The report takes as long as the others need to ask; a quick job would be free again when they come.
            let mut away = turned_away.subscribe();
            let _ = away.wait_for(|away| *away == MACHINES - 1).await;
            println!("{name}: done");
            Ok(())
        })
        .await?;

    // The last line of a program: what was dropped is released, not left to its TTL.
    locks.close().await;
    match ran {
        Attempt::Granted(()) => Ok(true),
        Attempt::Busy(holder) => {
            let holder = holder.ok_or("the store did not say who has it")?;
            println!(
                "{name}: not tonight, {} is at it",
                holder.label.as_deref().unwrap_or("another machine")
            );
            turned_away.send_modify(|away| *away += 1);
            Ok(false)
        }
    }
}

#[tokio::main]
async fn main() -> Result<(), Anything> {
    let directory = tempfile::tempdir()?;
    let store = std::env::args().nth(1).unwrap_or_else(|| lockcore_examples::sqlite_in(directory.path()));
    let (turned_away, _) = watch::channel(0);

    let machines: Vec<_> = (1..=MACHINES)
        .map(|n| tokio::spawn(machine(format!("machine-{n}"), store.clone(), turned_away.clone())))
        .collect();
    let mut reports = 0;
    for machine in machines {
        reports += usize::from(tokio::time::timeout(Duration::from_secs(30), machine).await???);
    }
    println!("{reports} report from {MACHINES} machines");
    if reports == 1 { Ok(()) } else { Err("one report was wanted".into()) }
}
