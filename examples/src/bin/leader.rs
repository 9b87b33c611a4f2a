//! A leader with a term: one of N leads, the term is the fence, and every stepping down is orderly.
//! Ann leads and is shut down; Bob leads and an operator breaks his lock; Carol is next. Terms only grow.
//! Run with the URL of a store to try another than a SQLite file.
#![allow(clippy::print_stdout)]

use std::{collections::HashMap, time::Duration};

use lockcore::{CancellationToken, ClientOptions, ErrorKind, Fence, GuardRef, LockClient, LockName};
use tokio::sync::mpsc;

type Anything = Box<dyn std::error::Error + Send + Sync>;
const SEAT: &str = "leader/scheduler";

/// What a candidate tells: it leads, or it has stepped down.
type News = mpsc::UnboundedSender<(&'static str, Fence, bool)>;

/// Leads until told to stop: by shutdown, by loss, by the hold limit; it need not know which.
async fn lead(who: &'static str, held: &GuardRef, news: &News) {
    let (term, stop) = (held.fence(), held.cancellation());
    let _ = news.send((who, term, true));
    let mut beat = tokio::time::interval(Duration::from_millis(50));
    while stop.run_until_cancelled(beat.tick()).await.is_some() {
        // The heartbeat to the followers carries `term`; they refuse a smaller one.
    }
    // `run` goes on with a body that has been told, so there is time to hand things over. Not `select!` between the
    // work and the shutdown: that drops the work in the middle.
    let _ = news.send((who, term, false));
}

async fn campaign(locks: LockClient, who: &'static str, news: News) -> Result<(), lockcore::Error> {
    let seat = locks.named(SEAT).ttl(Duration::from_millis(1500)).wait_forever();
    loop {
        let led = seat.run(async |held| -> lockcore::Result<()> {
            lead(who, &held, &news).await;
            Ok(())
        });
        match led.await {
            Ok(()) => {}
            Err(e) => match e.kind() {
                ErrorKind::Closed => return Ok(()),
                ErrorKind::Lost if e.lost_reason() == Some(lockcore::LostReason::Closed) => return Ok(()),
                ErrorKind::Lost => println!("{who}: deposed ({e})"),
                ErrorKind::Unavailable | ErrorKind::Unknown => println!("{who}: {e}"),
                _ => return Err(e),
            },
        }
    }
}

#[tokio::main]
async fn main() -> Result<(), Anything> {
    let directory = tempfile::tempdir()?;
    let store = std::env::args().nth(1).unwrap_or_else(|| lockcore_examples::sqlite_in(directory.path()));
    let (news, mut told) = mpsc::unbounded_channel();
    let mut campaigns = HashMap::new();
    let mut enter = async |who: &'static str| -> Result<(), Anything> {
        let shutdown = CancellationToken::new();
        let options = ClientOptions::default().with(|o| {
            o.shutdown = shutdown.clone();
            o.label = Some(who.into());
        });
        let locks = LockClient::with_options(lockcore_examples::connect(&store).await?, options);
        campaigns.insert(who, (shutdown, tokio::spawn(campaign(locks, who, news.clone()))));
        Ok(())
    };
    let mut terms = Vec::new();
    let mut next = async |who: Option<&str>, leads: bool| -> Result<&'static str, Anything> {
        loop {
            let heard = tokio::time::timeout(Duration::from_secs(30), told.recv()).await?;
            let (name, term, up) = heard.ok_or("nobody is left")?;
            println!("{name}: {} term {term}", if up { "leads," } else { "steps down from" });
            if up {
                terms.push(term);
            }
            if up == leads && who.is_none_or(|who| who == name) {
                return Ok(name);
            }
        }
    };

    enter("ann").await?;
    next(Some("ann"), true).await?;
    enter("bob").await?;
    enter("carol").await?;

    println!("-- ann's machine shuts down");
    campaigns["ann"].0.cancel();
    let second = next(None, true).await?;

    println!("-- an operator breaks {second}'s lock");
    let operator = LockClient::new(lockcore_examples::connect(&store).await?);
    let seat = LockName::parse(SEAT)?;
    let holder = operator.named(&seat).inspect().await?.holder.ok_or("nobody leads")?;
    // The holder that was looked at, and no other: a newer one would be left alone.
    let (backend, call) = operator.backend()?;
    backend.break_lock(&call, &seat, Some(holder.stamp())).await?;
    next(None, true).await?;

    for (_, (shutdown, campaign)) in campaigns {
        shutdown.cancel();
        campaign.await??;
    }
    operator.close().await;
    println!("terms {terms:?}");
    if terms.len() >= 3 && terms.is_sorted_by(|a, b| a < b) { Ok(()) } else { Err("terms must grow".into()) }
}
