//! How a waiter learns that its turn may have come.

use std::time::Duration;

use lockcore::backend::{Moment, Result};
use tokio::task::JoinHandle;
use zookeeper_client::SessionState;

use crate::{error::error, session::Session, worker::Worker};

/// Ends a task with the future that waits for it.
struct Ends<T>(JoinHandle<T>);

impl<T> Drop for Ends<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Watches one node and returns when it is gone or changed, when the connection was lost or came back, or at the moment
/// at the latest. Whatever it was, the caller looks again.
///
/// One node has one waiter behind it, so a hand-off wakes nobody else.
pub(crate) async fn changed(
    worker: &Worker,
    session: &Session,
    bound: Duration,
    path: &str,
    until: Moment,
) -> Result<()> {
    let bound = session.ready(bound).await?;
    let mut state = session.client.state_watcher();
    let (stat, watcher) =
        session.ask(bound, session.client.check_and_watch_stat(path)).await?.map_err(error)?;
    if stat.is_none() {
        return Ok(());
    }
    // The client library panics where its own task is gone; here that is one more reason to look.
    let mut event = Ends(worker.spawn(async move {
        watcher.changed().await;
    }));
    tokio::select! {
        _ = &mut event.0 => {}
        () = flap(&mut state) => {}
        () = session.clock.sleep_until(until) => {}
    }
    Ok(())
}

/// Returns at the first change of the session's state; a session that is over says nothing more.
async fn flap(state: &mut zookeeper_client::StateWatcher) {
    let now = state.peek_state();
    if now == SessionState::Disconnected || now.is_terminated() {
        return;
    }
    state.changed().await;
}
