//! The way from a lock to the server that decides about it, and around what stands in that way.

use std::{fmt, sync::Arc, time::Duration};

use futures_util::future::join_all;
use lockcore::backend::{Call, Clock, Error, ErrorKind, Moment, Result};
use redis::{RedisError, ServerErrorKind, Value};

use crate::{
    cluster::{self, Cluster, Sign},
    config::{Address, RedisConfig},
    connection::{Connection, How, Link, Ran},
    error::{self, Phase},
    greeting::Learnt,
    replicas::{Lanes, Lent, Wait},
    wire::{Answer, Script},
};

/// So often one request is sent on before something is wrong.
const TURNS: u32 = 16;
/// Between two requests to a server that said: not now.
const PAUSE: Duration = Duration::from_millis(20);

/// One server, and the connections to it.
pub(crate) struct Node {
    config: Arc<RedisConfig>,
    /// Of a Cluster, where it is.
    place: Option<(String, u16)>,
    connection: Connection,
    /// For writes that wait for replicas.
    lanes: Arc<Lanes>,
    learnt: Arc<Learnt>,
}

impl Node {
    pub(crate) fn new(config: &Arc<RedisConfig>, place: Option<(String, u16)>, learnt: &Arc<Learnt>) -> Self {
        Self {
            connection: Connection::new(config.clone(), place.clone(), learnt.clone()),
            lanes: Arc::new(Lanes::new(config, place.as_ref(), learnt)),
            config: config.clone(),
            place,
            learnt: learnt.clone(),
        }
    }

    /// Returns the connection that everybody shares.
    pub(crate) async fn link(&self, call: &Call) -> Result<Arc<Link>> {
        self.connection.link(call).await
    }

    pub(crate) async fn connect(&self, patience: Duration, clock: Arc<dyn Clock>) -> Result<()> {
        self.connection.connect(patience, clock.clone()).await?;
        match Wait::demanded(&self.config, self.learnt.replicas()) {
            Some(_) => self.lanes.connect(patience, clock).await,
            None => Ok(()),
        }
    }

    /// Returns a connection, for a call alone where it waits for replicas.
    async fn lend(&self, call: &Call, waits: bool) -> Result<Lent> {
        match waits {
            true => self.lanes.lend(call).await,
            false => self.link(call).await.map(Lent::from),
        }
    }

    pub(crate) fn is_up(&self) -> bool {
        self.connection.standing().is_some()
    }

    /// Names it to people.
    pub(crate) fn name(&self) -> String {
        match (&self.place, &self.config.address) {
            (Some((host, port)), _) | (None, Address::Tcp(host, port)) => format!("{host}:{port}"),
            (None, Address::Unix(path)) => path.display().to_string(),
            (None, Address::Sentinel { master, .. }) => format!("the master {master}"),
            (None, Address::Cluster(_)) => "the Cluster".to_owned(),
        }
    }

    fn host(&self) -> &str {
        self.place.as_ref().map_or("", |(host, _)| host)
    }

    pub(crate) fn close(&self) {
        self.connection.close();
        self.lanes.close();
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node")
            .field("name", &self.name())
            .field("connection", &self.connection)
            .finish_non_exhaustive()
    }
}

/// All servers of one backend.
#[derive(Debug)]
pub(crate) enum Road {
    /// One decides about every lock.
    One(Arc<Node>),
    /// Which one decides, the lock's slot says.
    Many(Cluster),
}

impl Road {
    pub(crate) fn new(config: &Arc<RedisConfig>, learnt: &Arc<Learnt>) -> Self {
        match &config.address {
            Address::Cluster(seeds) => {
                Self::Many(Cluster::new(config.clone(), seeds.clone(), learnt.clone()))
            }
            Address::Tcp(..) | Address::Unix(_) | Address::Sentinel { .. } => {
                Self::One(Arc::new(Node::new(config, None, learnt)))
            }
        }
    }

    /// Makes a first connection.
    pub(crate) async fn connect(&self, config: &RedisConfig, clock: Arc<dyn Clock>) -> Result<()> {
        let patience = config.connect_timeout.saturating_add(Duration::from_millis(100));
        match self {
            Self::One(node) => node.connect(patience, clock).await,
            Self::Many(cluster) => {
                let mut last = Error::new(ErrorKind::Misconfigured, "a Cluster has nodes");
                let Address::Cluster(seeds) = &config.address else { return Err(last) };
                let end = clock.now().saturating_add(patience);
                for (seed, left) in seeds.iter().zip((1..=seeds.len()).rev()) {
                    // One that is silent must not use up the time of the others.
                    let share = clock.now().until(end) / u32::try_from(left).unwrap_or(u32::MAX);
                    match cluster.node(seed).connect(share, clock.clone()).await {
                        Ok(()) => return Ok(()),
                        Err(error) => last = error,
                    }
                }
                Err(last)
            }
        }
    }

    /// Starts towards the server that has a key.
    pub(crate) fn to(&self, key: &str) -> Trip<'_> {
        let slot = match self {
            Self::One(_) => 0,
            Self::Many(_) => cluster::slot(key),
        };
        Trip {
            road: self,
            slot,
            sent_on: None,
            lent: None,
            turns: 0,
            wrong: None,
            is_cluster: matches!(self, Self::Many(_)),
        }
    }

    /// Returns every server that decides about locks.
    pub(crate) async fn masters(&self, call: &Call) -> Result<Vec<Arc<Node>>> {
        match self {
            Self::One(node) => Ok(vec![node.clone()]),
            Self::Many(cluster) => cluster.masters(call).await,
        }
    }

    pub(crate) fn close(&self) {
        match self {
            Self::One(node) => node.close(),
            Self::Many(cluster) => cluster.close(),
        }
    }
}

/// A script that was run, and answered.
#[derive(Debug)]
pub(crate) struct Done {
    /// When the request left that was answered.
    pub(crate) sent: Moment,
    pub(crate) answer: Answer,
    /// Why what it wrote does not count yet: too few replicas have it.
    pub(crate) short: Option<Error>,
}

impl Done {
    /// Returns the answer of something that only counts where replicas have it; it stays in doubt where they do not. What
    /// did nothing needs no replica.
    pub(crate) fn acknowledged(self) -> Result<Answer> {
        match self.short {
            // Also where the server refused to wait: what it did before that is there.
            Some(short) if self.answer.word == b"ok" => Err(Error::new(
                ErrorKind::Unknown,
                format!("it was written, but it may be forgotten: {}", short.message()),
            )),
            Some(_) | None => Ok(self.answer),
        }
    }
}

/// One request on its way, perhaps sent on from server to server.
#[derive(Debug)]
pub(crate) struct Trip<'a> {
    road: &'a Road,
    slot: u16,
    /// By `ASK`, for the next request alone.
    sent_on: Option<Arc<Node>>,
    lent: Option<(Arc<Node>, Lent)>,
    turns: u32,
    /// Why it was asked anew, first.
    wrong: Option<Error>,
    /// Keys that need not be there are better left out: a slot that moves is only asked for keys that are.
    pub(crate) is_cluster: bool,
}

impl Trip<'_> {
    /// Connects to the server that is asked next. `waits`: on a connection of its own.
    ///
    /// # Errors
    /// Nothing was sent: never `Unknown`.
    pub(crate) async fn link(&mut self, call: &Call, wait: bool) -> Result<&Link> {
        // One that was lent already is not asked for again: there are only so many.
        while self.lent.as_ref().is_none_or(|(_, lent)| !lent.is_usable()) {
            self.lent = None;
            let Some(wrong) = self.try_link(call, wait).await? else { break };
            // Another node may decide meanwhile; until one does, nobody can.
            self.pause(call, wrong).await?;
        }
        // It was just set.
        self.lent
            .as_ref()
            .map(|(_, lent)| &***lent)
            .ok_or_else(|| Error::new(ErrorKind::Unavailable, "no connection"))
    }

    async fn try_link(&mut self, call: &Call, wait: bool) -> Result<Option<Error>> {
        let node = match (self.road, &self.sent_on) {
            (_, Some(node)) => node.clone(),
            (Road::One(node), None) => node.clone(),
            (Road::Many(cluster), None) => match cluster.owner(call, self.slot).await {
                Ok(node) => node,
                Err(error) if error.kind() == ErrorKind::Unavailable => return Ok(Some(error)),
                Err(error) => return Err(error),
            },
        };
        match (node.lend(call, wait).await, self.road) {
            (Ok(lent), _) => {
                self.lent = Some((node, lent));
                Ok(None)
            }
            (Err(error), Road::Many(cluster)) if error.kind() == ErrorKind::Unavailable => {
                cluster.doubt();
                self.sent_on = None;
                Ok(Some(error))
            }
            (Err(error), _) => Err(error),
        }
    }

    /// Returns what the configuration demands of replicas.
    pub(crate) fn demand(&self) -> Option<Wait> {
        let node = match (self.road, &self.lent) {
            (_, Some((node, _))) | (Road::One(node), None) => node,
            (Road::Many(cluster), None) => {
                return cluster.demand();
            }
        };
        Wait::demanded(&node.config, node.learnt.replicas())
    }

    /// Runs a script once. `None`: it certainly did nothing, and is to be sent anew, perhaps to another server.
    pub(crate) async fn step(
        &mut self,
        call: &Call,
        script: &Script,
        keys: &[&str],
        args: &[&[u8]],
        wait: bool,
    ) -> Result<Option<Done>> {
        let asking = self.sent_on.is_some();
        let demand = if wait { self.demand() } else { None };
        self.link(call, demand.is_some()).await?;
        let Some((node, lent)) = self.lent.take() else {
            return Err(Error::new(ErrorKind::Unavailable, "no connection"));
        };
        // The greeting may have been the first to tell how many replicas there are.
        let demand = demand.and_then(|_| Wait::demanded(&node.config, node.learnt.replicas()));
        let asking = asking && self.sent_on.is_some();
        let how = How { asking, wait: demand.as_ref() };
        let (sent, ran) = lent.script(call, script, keys, args, how).await;
        self.sent_on = None;
        match ran {
            Ok(Ran { value, acknowledged }) => {
                let answer = Answer::read(value)?;
                lent.saw(answer.us, sent);
                let short = demand.and_then(|demand| demand.judge(acknowledged).err());
                Ok(Some(Done { sent, answer, short }))
            }
            Err(refusal) => {
                drop(lent);
                self.turn(call, &node, refusal).await.map(|()| None)
            }
        }
    }

    /// Runs a script on the server that decides.
    pub(crate) async fn run(
        &mut self,
        call: &Call,
        script: &Script,
        keys: &[&str],
        args: &[&[u8]],
        wait: bool,
    ) -> Result<Done> {
        loop {
            if let Some(done) = self.step(call, script, keys, args, wait).await? {
                return Ok(done);
            }
        }
    }

    /// Runs a script with what was put together for it.
    pub(crate) async fn ask(
        &mut self,
        call: &Call,
        script: &Script,
        request: &Request,
        wait: bool,
    ) -> Result<Done> {
        let (keys, args) = lend(request);
        self.run(call, script, &keys, &args, wait).await
    }

    /// Follows what a refusal says, or gives it back.
    async fn turn(&mut self, call: &Call, node: &Node, refusal: RedisError) -> Result<()> {
        let cluster = match self.road {
            Road::Many(cluster) => cluster,
            // A demoted master: the Sentinels know the new one. The connection is condemned already.
            Road::One(_)
                if refusal.kind() == redis::ErrorKind::Server(ServerErrorKind::ReadOnly)
                    && matches!(node.config.address, Address::Sentinel { .. })
                    && self.turns == 0 =>
            {
                self.turns += 1;
                return Ok(());
            }
            Road::One(_) => return Err(error::error(Phase::Sent, refusal)),
        };
        let sign = Sign::read(&refusal, node.host());
        let error = error::error(Phase::Sent, refusal);
        match sign {
            Sign::None => {
                cluster.doubt();
                return Err(error);
            }
            Sign::Later => {
                cluster.doubt();
                return self
                    .pause(call, Error::new(ErrorKind::Unavailable, error.message().to_owned()))
                    .await;
            }
            Sign::Moved(place) => cluster.moved(self.slot, place),
            Sign::Ask(place) => self.sent_on = Some(cluster.node(&place)),
        }
        self.turns += 1;
        if self.turns > TURNS {
            return Err(Error::new(
                ErrorKind::Unavailable,
                "the nodes of the Cluster send each other's requests around",
            ));
        }
        Ok(())
    }

    /// Waits a little, or gives up with what is wrong where the call has no time for it.
    async fn pause(&mut self, call: &Call, wrong: Error) -> Result<()> {
        // An answer needs time, too.
        if call.remaining() <= PAUSE * 2 {
            // What was wrong first says more than that the time is over.
            return Err(self.wrong.take().unwrap_or(wrong));
        }
        self.wrong.get_or_insert(wrong);
        call.clock().sleep_until(call.now().saturating_add(PAUSE)).await;
        Ok(())
    }
}

/// Keys and arguments of one script.
pub(crate) type Request = (Vec<String>, Vec<Vec<u8>>);

/// Lends them as they are sent.
pub(crate) fn lend(request: &Request) -> (Vec<&str>, Vec<&[u8]>) {
    (request.0.iter().map(String::as_str).collect(), request.1.iter().map(Vec::as_slice).collect())
}

impl Road {
    /// Runs a script many times, in one round trip for each server, all servers at once; answers in order, and in the time
    /// of one exchange. What a server sends on is asked anew, one by one.
    pub(crate) async fn run_many(
        &self,
        call: &Call,
        script: &Script,
        requests: Vec<Request>,
    ) -> Vec<Result<Answer>> {
        let first_key = |request: &Request| request.0.first().cloned().unwrap_or_default();
        let mut answers: Vec<Option<Result<Answer>>> = requests.iter().map(|_| None).collect();
        // Which server is asked for which of them.
        let mut groups: Vec<(Arc<Node>, Vec<usize>)> = Vec::new();
        for (at, request) in requests.iter().enumerate() {
            let node = match self {
                Self::One(node) => Ok(node.clone()),
                Self::Many(cluster) => cluster.owner(call, cluster::slot(&first_key(request))).await,
            };
            match node {
                Ok(node) => match groups.iter_mut().find(|(known, _)| Arc::ptr_eq(known, &node)) {
                    Some((_, group)) => group.push(at),
                    None => groups.push((node, vec![at])),
                },
                Err(error) => answers[at] = Some(Err(error)),
            }
        }
        let mut requests: Vec<Option<Request>> = requests.into_iter().map(Some).collect();
        // A server that is silent must not cost the answers of the others, which count only before the call is over.
        let end = call.now().saturating_add(call.exchange_timeout().mul_f64(0.95));
        let asked = groups.into_iter().map(|(node, group)| {
            let parts: Vec<Request> = group.iter().filter_map(|at| requests[*at].take()).collect();
            async move {
                let outcome = by(call, end, self.run_group(call, &node, script, &parts)).await;
                (group, parts, outcome)
            }
        });
        let mut again: Vec<(usize, Request)> = Vec::new();
        for (group, parts, outcome) in join_all(asked).await {
            let Some(outcome) = outcome else {
                group.into_iter().for_each(|at| answers[at] = Some(Err(silent())));
                continue;
            };
            for ((at, outcome), request) in group.into_iter().zip(outcome).zip(parts) {
                match outcome {
                    Ok(done) => answers[at] = Some(done.acknowledged()),
                    Err(None) => again.push((at, request)),
                    Err(Some(error)) => answers[at] = Some(Err(error)),
                }
            }
        }
        let asked = again.iter().map(|(at, request)| async move {
            let mut trip = self.to(&first_key(request));
            let done = by(call, end, Box::pin(trip.ask(call, script, request, true))).await;
            (*at, done.unwrap_or_else(|| Err(silent())).and_then(Done::acknowledged))
        });
        for (at, answer) in join_all(asked).await {
            answers[at] = Some(answer);
        }
        let missing = || Err(Error::new(ErrorKind::Unknown, "the server answered too little"));
        answers.into_iter().map(|answer| answer.unwrap_or_else(missing)).collect()
    }

    /// `None` in place of an error: it is to be asked alone, and did nothing so far.
    async fn run_group(
        &self,
        call: &Call,
        node: &Node,
        script: &Script,
        requests: &[Request],
    ) -> Vec<Result<Done, Option<Error>>> {
        let all = |error: &Error| {
            let again = || Some(Error::new(error.kind(), error.message().to_owned()));
            requests.iter().map(|_| Err(again())).collect()
        };
        let demand = Wait::demanded(&node.config, node.learnt.replicas());
        let lent = match node.lend(call, demand.is_some()).await {
            Ok(lent) => lent,
            // Another node may decide meanwhile.
            Err(error) if matches!(self, Self::Many(_)) && error.kind() == ErrorKind::Unavailable => {
                return requests.iter().map(|_| Err(None)).collect();
            }
            Err(error) => return all(&error),
        };
        let demand = demand.and_then(|_| Wait::demanded(&node.config, node.learnt.replicas()));
        let (sent, replies) = lent.scripts(call, script, requests, demand.as_ref()).await;
        let (values, acknowledged) = match replies {
            Ok(replies) => replies,
            Err(refusal) => {
                if let Self::Many(cluster) = self {
                    cluster.doubt();
                }
                return all(&error::error(Phase::Sent, refusal));
            }
        };
        let short = demand.and_then(|demand| demand.judge(acknowledged).err());
        let short = || short.as_ref().map(|short| Error::new(short.kind(), short.message().to_owned()));
        let one = |value| match value {
            Value::ServerError(refusal) => {
                let refusal = RedisError::from(refusal);
                match (self, Sign::read(&refusal, node.host())) {
                    (Self::Many(cluster), sign) if sign != Sign::None => {
                        cluster.doubt();
                        Err(None)
                    }
                    _ => Err(Some(error::error(Phase::Sent, refusal))),
                }
            }
            value => {
                let answer = Answer::read(value).map_err(Some)?;
                lent.saw(answer.us, sent);
                Ok(Done { sent, answer, short: short() })
            }
        };
        values.into_iter().map(one).collect()
    }
}

/// Waits for an answer until then.
async fn by<T>(call: &Call, end: Moment, answer: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        answer = answer => Some(answer),
        () = call.clock().sleep_until(end) => None,
    }
}

fn silent() -> Error {
    Error::new(ErrorKind::Unknown, "the server did not answer in time")
}

/// Says what one of many scripts that ran in one round trip answered.
pub(crate) fn one_of_many(value: Value) -> Result<Answer> {
    match value {
        Value::ServerError(refusal) => Err(error::error(Phase::Sent, refusal.into())),
        value => Answer::read(value),
    }
}
