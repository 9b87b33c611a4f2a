//! How a waiter learns that its turn has come: the release is pushed, on one connection for all waiters of a backend.
//!
//! A message only says "look now". It may be lost with its connection, so a waiter listens first, looks again, and then
//! sleeps no longer than the holder's lease; who never hears anything only waits longer.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use lockcore::backend::{Call, Error, ErrorKind, Result};
use redis::{PushInfo, PushKind, Value};
use tokio::sync::Notify;

use crate::{
    config::RedisConfig,
    connection::{Connection, Link},
};

/// Channels without a waiter that stay subscribed, because locks that were waited for are waited for again.
const IDLE: usize = 32;

/// The waiters of one backend and the connection that wakes them.
#[derive(Debug)]
pub(crate) struct Pushes {
    connection: Connection,
    routes: Arc<Routes>,
    /// One change of subscriptions at a time, so that giving one up and taking it again cannot cross.
    order: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct Routes(Mutex<HashMap<Arc<str>, Arc<Route>>>);

#[derive(Debug, Default)]
struct Route {
    notify: Notify,
    waiters: AtomicU64,
    /// The connection that the channel is subscribed on; 0: none.
    on: AtomicU64,
}

impl Routes {
    fn map(&self) -> MutexGuard<'_, HashMap<Arc<str>, Arc<Route>>> {
        // The map is whole between any two of its operations.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, info: &PushInfo) {
        match (&info.kind, info.data.first()) {
            (PushKind::Message, Some(Value::BulkString(channel))) => {
                let route = std::str::from_utf8(channel).ok().and_then(|c| self.map().get(c).cloned());
                // One waiter looks; if it leaves without the lock, it passes the word on.
                if let Some(route) = route {
                    route.notify.notify_one();
                }
            }
            // What was said meanwhile is lost: everybody listens anew and looks.
            (PushKind::Disconnection, _) => {
                for route in self.map().values() {
                    route.on.store(0, Ordering::Relaxed);
                    route.notify.notify_waiters();
                    route.notify.notify_one();
                }
            }
            _ => {}
        }
    }
}

impl Pushes {
    pub(crate) fn new(config: &Arc<RedisConfig>) -> Self {
        let routes = Arc::new(Routes::default());
        let routed = routes.clone();
        let connection = Connection::listening(config.clone(), Arc::new(move |info| routed.push(&info)));
        Self { connection, routes, order: tokio::sync::Mutex::new(()) }
    }

    pub(crate) fn close(&self) {
        self.connection.close();
    }

    /// Registers a waiter until the answer is dropped.
    pub(crate) fn register(&self, channel: &str) -> Waiter<'_> {
        let mut map = self.routes.map();
        let (channel, route) = match map.get_key_value(channel) {
            Some((channel, route)) => (channel.clone(), route.clone()),
            None => {
                let channel: Arc<str> = channel.into();
                let route = Arc::<Route>::default();
                map.insert(channel.clone(), route.clone());
                (channel, route)
            }
        };
        // Counted while the map is ours: nobody takes the route for idle.
        route.waiters.fetch_add(1, Ordering::Relaxed);
        Waiter { pushes: self, channel, route, took: false, deaf: false }
    }

    /// Gives up the channels that nobody waits on, once there are too many.
    async fn tidy(&self, call: &Call, link: &Link) -> Result<()> {
        let idle: Vec<Arc<str>> = {
            let mut map = self.routes.map();
            let is_idle = |route: &Route| route.waiters.load(Ordering::Relaxed) == 0;
            if map.values().filter(|route| is_idle(route)).count() <= IDLE {
                return Ok(());
            }
            let idle = map.extract_if(|_, route| is_idle(route));
            let here = idle.filter(|(_, route)| route.on.load(Ordering::Relaxed) == link.id);
            here.map(|(channel, _)| channel).collect()
        };
        if idle.is_empty() { Ok(()) } else { link.unsubscribe(call, &idle).await }
    }
}

/// One registered waiter.
#[derive(Debug)]
pub(crate) struct Waiter<'a> {
    pushes: &'a Pushes,
    channel: Arc<str>,
    route: Arc<Route>,
    took: bool,
    deaf: bool,
}

impl Waiter<'_> {
    /// Says whether releases are heard, as far as is known.
    pub(crate) fn hears(&self) -> bool {
        let standing = self.pushes.connection.standing();
        standing.is_some_and(|link| link.id == self.route.on.load(Ordering::Relaxed))
    }

    /// Subscribes. After `true` the caller looks again before it sleeps: what happened before was not heard.
    pub(crate) async fn listen(&mut self, call: &Call) -> bool {
        if self.deaf || self.hears() {
            return false;
        }
        match self.try_listen(call).await {
            Ok(()) => true,
            Err(error) => {
                // No server will change its access list while this waits.
                self.deaf = !error.kind().is_transient();
                false
            }
        }
    }

    async fn try_listen(&self, call: &Call) -> Result<()> {
        let Ok(_turn) = tokio::time::timeout(call.exchange_timeout(), self.pushes.order.lock()).await else {
            return Err(Error::new(ErrorKind::Unavailable, "other waiters are still being subscribed"));
        };
        let link = self.pushes.connection.link(call).await?;
        if self.route.on.load(Ordering::Relaxed) == link.id {
            return Ok(());
        }
        self.pushes.tidy(call, &link).await?;
        link.subscribe(call, &self.channel).await?;
        self.route.on.store(link.id, Ordering::Relaxed);
        Ok(())
    }

    /// Returns when a release was heard, also one before this was called.
    pub(crate) async fn told(&self) {
        self.route.notify.notified().await;
    }

    /// Says that this waiter has the lock: nobody else needs to look.
    pub(crate) fn took(&mut self) {
        self.took = true;
    }
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let mut map = self.pushes.routes.map();
        let others = self.route.waiters.fetch_sub(1, Ordering::Relaxed) > 1;
        if others && !self.took {
            // A word that came while this waiter was leaving goes on to the next.
            self.route.notify.notify_one();
        } else if !others && self.route.on.load(Ordering::Relaxed) == 0 {
            // Never subscribed, or not any more: nothing comes this way.
            map.remove(&self.channel);
        }
    }
}
