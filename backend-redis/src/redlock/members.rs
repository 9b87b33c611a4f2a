//! The servers that decide together, and how all of them are asked at once.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use lockcore::backend::{Call, Error, ErrorKind, Moment, Result};
use tokio::sync::mpsc;

use crate::{
    connection::{How, Link},
    error::{self, Phase},
    greeting::{self, Learnt},
    operations::Operations,
    road::{Node, Request, lend},
    wire::{Answer, Script},
};

/// What is known of one server, by all connections to it.
#[derive(Debug, Default)]
pub(crate) struct Known {
    /// Requests to it that have no answer.
    pub(crate) operations: Operations,
    pub(crate) learnt: Arc<Learnt>,
}

#[derive(Clone, Debug)]
struct Identity {
    link: u64,
    run: String,
    /// Before this it grants nothing: it may have forgotten what it granted before it was started.
    ready: Moment,
}

/// One of the servers.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) at: usize,
    pub(crate) node: Arc<Node>,
    pub(crate) known: Arc<Known>,
    restart_delay: Duration,
    /// Whose the connection is.
    identity: Mutex<Option<Identity>>,
}

impl Member {
    pub(crate) fn new(at: usize, node: Node, known: Arc<Known>, restart_delay: Duration) -> Self {
        Self { at, node: Arc::new(node), known, restart_delay, identity: Mutex::default() }
    }

    /// Connects, and asks a new connection whose it is.
    pub(crate) async fn link(&self, call: &Call) -> Result<Arc<Link>> {
        let link = self.node.link(call).await?;
        if self.identity().is_some_and(|identity| identity.link == link.id) {
            return Ok(link);
        }
        let asked = call.now();
        let answer = link.command(call, redis::cmd("INFO").arg("server")).await;
        let info = match answer {
            Ok(info) => greeting::text(Some(info)).unwrap_or_default(),
            // It only asked.
            Err(error) if error.kind() == ErrorKind::Unknown => {
                return Err(Error::new(ErrorKind::Unavailable, error.message().to_owned()));
            }
            Err(error) => return Err(error),
        };
        let fact = |name: &str| {
            info.lines()
                .find_map(|line| line.trim_end().strip_prefix(name)?.strip_prefix(':').map(str::to_owned))
        };
        let (Some(run), Some(uptime)) =
            (fact("run_id"), fact("uptime_in_seconds").and_then(|uptime| uptime.parse().ok()))
        else {
            return Err(Error::new(
                ErrorKind::Misconfigured,
                "the server does not tell which one it is; its user must be allowed INFO",
            ));
        };
        // It counts the turns of its clock's second, of which the first may have been a moment.
        let uptime = Duration::from_secs(uptime).saturating_sub(Duration::from_secs(1));
        let ready = asked.saturating_add(self.restart_delay.saturating_sub(uptime));
        let identity = Identity { link: link.id, run, ready };
        *self.identity.lock().unwrap_or_else(PoisonError::into_inner) = Some(identity);
        Ok(link)
    }

    fn identity(&self) -> Option<Identity> {
        self.identity.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns which run of which server this is, once it was asked.
    pub(crate) fn run_id(&self) -> Option<String> {
        self.identity().map(|identity| identity.run)
    }

    /// Refuses new grants of a server that was started so lately that what it forgot may still be held.
    pub(crate) fn check_ready(&self, now: Moment) -> Result<()> {
        match self.identity() {
            Some(identity) if now < identity.ready => Err(Error::new(
                ErrorKind::Unavailable,
                format!(
                    "{} was started lately, and may have forgotten what is still held; it is asked again in {:.1?}",
                    self.node.name(),
                    now.until(identity.ready)
                ),
            )),
            _ => Ok(()),
        }
    }

    pub(crate) async fn run(
        &self,
        call: &Call,
        script: &Script,
        keys: &[&str],
        args: &[&[u8]],
    ) -> Result<(Moment, Answer)> {
        let link = self.link(call).await?;
        self.run_on(&link, call, script, keys, args).await
    }

    /// Runs a script with what was put together for it.
    pub(crate) async fn ask(
        &self,
        call: &Call,
        script: &Script,
        request: &Request,
    ) -> Result<(Moment, Answer)> {
        let (keys, args) = lend(request);
        self.run(call, script, &keys, &args).await
    }

    pub(crate) async fn run_on(
        &self,
        link: &Link,
        call: &Call,
        script: &Script,
        keys: &[&str],
        args: &[&[u8]],
    ) -> Result<(Moment, Answer)> {
        let (sent, ran) = link.script(call, script, keys, args, How::default()).await;
        let answer = Answer::read(ran.map_err(|refusal| error::error(Phase::Sent, refusal))?.value)?;
        link.saw(answer.us, sent);
        Ok((sent, answer))
    }
}

/// What servers answered, each with its place in the list; who is missing did not answer in time.
pub(crate) type Votes<T> = Vec<(usize, Result<T>)>;

/// Asks servers at once, each by a task of its own: a request that has left is carried through although nobody waits for
/// its answer any more, so that a server which is only slow is not left out.
///
/// Returns when all have answered, when the patience is over, or soon after the answers are `enough`: after twice the time
/// that took, and a grace.
pub(crate) async fn ask<T, F>(
    call: &Call,
    patience: Duration,
    grace: Duration,
    members: impl IntoIterator<Item = Arc<Member>>,
    enough: impl Fn(&Votes<T>) -> bool,
    step: impl Fn(Arc<Member>) -> F,
) -> Votes<T>
where
    T: Send + 'static,
    F: Future<Output = Result<T>> + Send + 'static,
{
    let (tell, mut told) = mpsc::unbounded_channel();
    for member in members {
        let (tell, at, work) = (tell.clone(), member.at, step(member));
        tokio::spawn(async move {
            // Who asked may have left.
            let _ = tell.send((at, work.await));
        });
    }
    drop(tell);
    let begun = call.now();
    let mut votes = Vec::new();
    let mut end = begun.saturating_add(patience);
    let mut is_enough = false;
    loop {
        let vote = tokio::select! {
            biased;
            vote = told.recv() => vote,
            () = call.clock().sleep_until(end) => None,
        };
        let Some(vote) = vote else { return votes };
        votes.push(vote);
        if !is_enough && enough(&votes) {
            is_enough = true;
            let now = call.now();
            end = end.min(now.saturating_add(begun.until(now) + grace));
        }
    }
}
