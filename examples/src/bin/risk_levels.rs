//! A backend by risk, from a TOML file: the code names a risk level, and the file says which store stands behind it.
//! A store that does not keep what its level demands is refused at start; a file that is read again ends no lease.
//! Run with the URL of a store to put the guarded level on another than a SQLite file.
#![allow(clippy::print_stdout)]

use std::time::Duration;

use lockcore::config::{Config, LockManager};
use lockcore_examples::registry;

type Anything = Box<dyn std::error::Error + Send + Sync>;

/// The file of an application: one level for work that is only a waste when it is done twice, one whose resource
/// checks fences.
fn file(store: &str, hold: &str) -> String {
    format!(
        "namespace = \"shop\"\n\n[backend]\nscratch = \"memory://scratch\"\nshop = {store:?}\n\n\
         [risk.efficiency]\nbackend = \"scratch\"\nttl = \"10s\"\n\n\
         [risk.guarded]\nbackend = \"shop\"\nttl = \"10s\"\nmax-hold = {hold:?}\n"
    )
}

#[tokio::main]
async fn main() -> Result<(), Anything> {
    let directory = tempfile::tempdir()?;
    let store = std::env::args().nth(1).unwrap_or_else(|| lockcore_examples::sqlite_in(directory.path()));
    let (text, registry) = (file(&store, "1h"), registry());
    println!("{text}");
    let manager = LockManager::start(&toml::from_str::<Config>(&text)?, &registry).await?;

    // Once, at start: a typing error shows then.
    let (thumbnails, orders) = (manager.level("efficiency")?, manager.level("guarded")?);
    let drawn = thumbnails.named("thumbnail/7").run(async |_| -> lockcore::Result<u32> { Ok(1) }).await?;
    println!("efficiency: drew {drawn} thumbnail");
    let order = orders.named("order/42").wait(Duration::from_secs(5)).acquire().await?;
    println!("guarded: order/42 under fence {}", order.fence());

    // The file is changed while the lock is held.
    manager.reload(&toml::from_str::<Config>(&file(&store, "2h"))?).await?;
    println!("read again: order/42 is still held under fence {}", order.stamp()?.fence);
    order.release().await?;

    // Money on a store that forgets with its process.
    let risky = format!("{text}\n[risk.critical]\nbackend = \"scratch\"\nttl = \"10s\"\nmax-hold = \"1h\"\n");
    match LockManager::start(&toml::from_str::<Config>(&risky)?, &registry).await {
        Ok(_) => return Err("a critical level started on a store that forgets".into()),
        Err(refused) => println!("critical: {refused}"),
    }
    manager.close().await;
    Ok(())
}
