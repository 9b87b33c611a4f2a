//! The atomic steps, one function each; they report, they do not decide.

use std::time::Duration;

use lockcore::backend::{Error, ErrorKind, Moment, Owner, Result};
use zookeeper_client::{CreateMode, Error as Said, MultiReadResult, MultiWriteError, Stat};

use crate::{
    error::error,
    keys::{Note, Queue, mark},
    places::Node,
    session::Session,
};

type Answer<T> = std::result::Result<T, Said>;

/// The base of a namespace's fences and the version of its record.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Base {
    pub(crate) base: i64,
    pub(crate) version: i32,
}

/// One look, in an order that makes it sound: who stands in the queue, then the base, then whether the own node stands.
///
/// What is granted by it was granted under a base that was read while the own node was first and stood.
#[derive(Debug)]
pub(crate) struct Look {
    pub(crate) queue: Queue,
    pub(crate) base: Option<Base>,
    pub(crate) own: Option<Node>,
    /// When it left.
    pub(crate) sent: Moment,
}

/// Makes a place and looks, in one exchange. `None`: the queue's own node is missing.
pub(crate) async fn enter(
    session: &Session,
    bound: Duration,
    base: &str,
    queue: &str,
    stem: &str,
    note: &Note,
    with_queue: bool,
) -> Result<Option<(Node, Look)>> {
    let bound = session.ready(bound).await?;
    let client = &session.client;
    let (prefix, data) = (format!("{queue}/{stem}"), note.write());
    let container = CreateMode::Container.with_acls(session.acls);
    let options = CreateMode::EphemeralSequential.with_acls(session.acls);
    let sent = session.clock.now();
    // Requests leave in the order of these lines and are answered in it.
    let parent = with_queue.then(|| client.create(queue, b"", &container));
    let made = client.create(&prefix, &data, &options);
    // The own node's name is not known yet: a second list shows whether it stands.
    let parts = [Part::Children(queue), Part::Data(base), Part::Children(queue)];
    let read = read_all(session, parts.into_iter())?;
    let (parent, made, read) = session
        .ask(bound, async {
            let parent = match parent {
                Some(parent) => Some(parent.await),
                None => None,
            };
            (parent, made.await, read.await)
        })
        .await?;
    let (stat, sequence) = match made {
        Ok(made) => made,
        Err(Said::NoNode) => {
            return match parent {
                None | Some(Ok(_) | Err(Said::NodeExists | Said::NoNode)) => Ok(None),
                Some(Err(said)) => Err(error(said)),
            };
        }
        Err(said) => return Err(error(said)),
    };
    session.wrote(sent);
    let name = format!("{stem}{sequence}");
    let node = Node { name, czxid: stat.czxid, note: note.clone(), version: stat.version };
    let mut read = read.map_err(error)?.into_iter();
    let (listed, record) = (children(read.next())?, record_of(data_of(read.next())?)?);
    let own = children(read.next())?.contains(&node.name).then(|| node.clone());
    Ok(Some((node, Look { queue: listed, base: record, own, sent })))
}

/// Looks from a place.
pub(crate) async fn look(
    session: &Session,
    bound: Duration,
    base: &str,
    queue: &str,
    own: Option<&str>,
) -> Result<Look> {
    let bound = session.ready(bound).await?;
    let sent = session.clock.now();
    let path = own.map(|own| format!("{queue}/{own}"));
    let parts = [Part::Children(queue), Part::Data(base)].into_iter();
    let read = read_all(session, parts.chain(path.as_deref().map(Part::Data)))?;
    let mut read = session.ask(bound, read).await?.map_err(error)?.into_iter();
    let (listed, record) = (children(read.next())?, record_of(data_of(read.next())?)?);
    let own = match own {
        Some(name) => data_of(read.next())?.map(|(data, stat)| made_of(name, &data, &stat)),
        None => None,
    };
    Ok(Look { queue: listed, base: record, own, sent })
}

enum Part<'a> {
    Children(&'a str),
    Data(&'a str),
}

/// Sends one request that the server answers part by part, in this order.
fn read_all<'a>(
    session: &'a Session,
    parts: impl Iterator<Item = Part<'a>>,
) -> Result<impl Future<Output = Answer<Vec<MultiReadResult>>> + Send + 'a> {
    let mut reader = session.client.new_multi_reader();
    for part in parts {
        match part {
            Part::Children(path) => reader.add_get_children(path),
            Part::Data(path) => reader.add_get_data(path),
        }
        .map_err(error)?;
    }
    Ok(reader.commit())
}

/// Reads one node of a queue.
pub(crate) async fn read_node(
    session: &Session,
    bound: Duration,
    queue: &str,
    name: &str,
) -> Result<Option<(Node, Stat)>> {
    let bound = session.ready(bound).await?;
    match session.ask(bound, session.client.get_data(&format!("{queue}/{name}"))).await? {
        Ok((data, stat)) => Ok(Some((made_of(name, &data, &stat), stat))),
        Err(Said::NoNode) => Ok(None),
        Err(said) => Err(error(said)),
    }
}

/// Lists the nodes of one owner, exactly: a write of this session stands before the list, so whatever the session sent
/// before has been decided, also on a connection that is gone.
pub(crate) async fn nodes_of(
    session: &Session,
    bound: Duration,
    queue: &str,
    owner: &Owner,
) -> Result<Vec<String>> {
    session.write_beat(bound).await?;
    let listed = list(session, bound, queue).await?.map_or_else(Vec::new, |(nodes, _)| nodes);
    Ok(Queue::new(listed).of(owner).map(str::to_owned).collect())
}

/// Lists a queue; `None`: there is none.
pub(crate) async fn list(
    session: &Session,
    bound: Duration,
    path: &str,
) -> Result<Option<(Vec<String>, Stat)>> {
    let bound = session.ready(bound).await?;
    match session.ask(bound, session.client.get_children(path)).await? {
        Ok(listed) => Ok(Some(listed)),
        Err(Said::NoNode) => Ok(None),
        Err(said) => Err(error(said)),
    }
}

/// Reads who stands below the node of a phase, and what each says of itself. Who leaves meanwhile is left out.
pub(crate) async fn members(session: &Session, bound: Duration, path: &str) -> Result<Vec<(Owner, Note)>> {
    let listed = list(session, bound, path).await?.map_or_else(Vec::new, |(nodes, _)| nodes);
    let owners: Vec<(Owner, String)> = listed
        .into_iter()
        .filter_map(|node| Some((crate::keys::read_node(&node)?.0, format!("{path}/{node}"))))
        .collect();
    let mut members = Vec::with_capacity(owners.len());
    for part in owners.chunks(PART) {
        let bound = session.ready(bound).await?;
        let read = read_all(session, part.iter().map(|(_, path)| Part::Data(path)))?;
        let read = session.ask(bound, read).await?.map_err(error)?;
        if read.len() != part.len() {
            return Err(no_certain_answer());
        }
        for ((owner, _), one) in part.iter().zip(read) {
            if let Some((data, _)) = data_of(Some(one))? {
                members.push((*owner, Note::read(&data).unwrap_or_default()));
            }
        }
    }
    Ok(members)
}

/// Returns the zxid of the earliest place in any queue; `None`: nobody stands in one.
pub(crate) async fn earliest(session: &Session, bound: Duration, locks: &str) -> Result<Option<i64>> {
    let queues = list(session, bound, locks).await?.map_or_else(Vec::new, |(nodes, _)| nodes);
    let mut earliest: Option<i64> = None;
    for queue in queues {
        let queue = format!("{locks}/{queue}");
        loop {
            let listed = list(session, bound, &queue).await?.map_or_else(Vec::new, |(nodes, _)| nodes);
            let listed = Queue::new(listed);
            let Some((_, first)) = listed.first() else { break };
            // Where it went meanwhile, another is the first.
            if let Some((node, _)) = read_node(session, bound, &queue, first).await? {
                earliest = Some(earliest.map_or(node.czxid, |known| known.min(node.czxid)));
                break;
            }
        }
    }
    Ok(earliest)
}

/// Reads a node; `None`: there is none.
pub(crate) async fn read(session: &Session, bound: Duration, path: &str) -> Result<Option<(Vec<u8>, Stat)>> {
    let bound = session.ready(bound).await?;
    match session.ask(bound, session.client.get_data(path)).await? {
        Ok(read) => Ok(Some(read)),
        Err(Said::NoNode) => Ok(None),
        Err(said) => Err(error(said)),
    }
}

/// Replaces a node's data if it has this version still, or makes the node where there was none.
pub(crate) async fn write(
    session: &Session,
    bound: Duration,
    path: &str,
    data: &[u8],
    version: Option<i32>,
) -> Result<bool> {
    let bound = session.ready(bound).await?;
    let sent = session.clock.now();
    let done = match version {
        Some(_) => session.ask(bound, session.client.set_data(path, data, version)).await?.map(drop),
        None => {
            let options = CreateMode::Persistent.with_acls(session.acls);
            session.ask(bound, session.client.create(path, data, &options)).await?.map(drop)
        }
    };
    match done {
        Ok(()) => {
            session.wrote(sent);
            Ok(true)
        }
        Err(Said::BadVersion | Said::NodeExists | Said::NoNode) => Ok(false),
        Err(said) => Err(error(said)),
    }
}

/// Makes a node as the queues are, and removes it.
pub(crate) async fn probe_container(session: &Session, bound: Duration, root: &str) -> Result<()> {
    let bound = session.ready(bound).await?;
    let path = format!("{root}/lockcore/probe-{:016x}", session.id);
    let options = CreateMode::Container.with_acls(session.acls);
    session.ask(bound, session.client.create(&path, b"", &options)).await?.map_err(error)?;
    session.delete(bound, &path).await.map(drop)
}

pub(crate) async fn read_base(session: &Session, bound: Duration, path: &str) -> Result<Option<Base>> {
    record_of(read(session, bound, path).await?)
}

/// Makes the record of a namespace. `false`: somebody else did; `None`: the nodes above it are missing.
pub(crate) async fn make_base(
    session: &Session,
    bound: Duration,
    path: &str,
    base: i64,
) -> Result<Option<(bool, i64)>> {
    let bound = session.ready(bound).await?;
    let options = CreateMode::Persistent.with_acls(session.acls);
    let sent = session.clock.now();
    match session.ask(bound, session.client.create(path, base.to_string().as_bytes(), &options)).await? {
        Ok((stat, _)) => {
            session.wrote(sent);
            Ok(Some((true, stat.czxid)))
        }
        Err(Said::NodeExists) => Ok(Some((false, 0))),
        Err(Said::NoNode) => Ok(None),
        Err(said) => Err(error(said)),
    }
}

/// What to do beside a change of the base, all or nothing.
#[derive(Debug, Default)]
pub(crate) struct Change<'a> {
    /// The record's path, what it must be, and what it becomes.
    pub(crate) base: Option<(&'a str, Base, i64)>,
    /// A node that must stand.
    pub(crate) stands: Option<&'a str>,
    /// A node that gets another note, with the version it must have.
    pub(crate) note: Option<(&'a str, &'a Note, i32)>,
    /// A node that goes.
    pub(crate) delete: Option<&'a str>,
    /// A queue that is told whom a break cut off.
    pub(crate) mark: Option<(&'a str, &'a Owner, i64)>,
}

/// Changes all or nothing; returns the zxid, or `None` where things were not as expected.
pub(crate) async fn change(session: &Session, bound: Duration, change: Change<'_>) -> Result<Option<i64>> {
    let bound = session.ready(bound).await?;
    let mut writer = session.client.new_multi_writer();
    let write = |writer: &mut zookeeper_client::MultiWriter<'_>| -> Answer<()> {
        if let Some(path) = change.stands {
            writer.add_check_version(path, -1)?;
        }
        if let Some(path) = change.delete {
            writer.add_delete(path, None)?;
        }
        if let Some((path, note, version)) = change.note {
            writer.add_set_data(path, &note.write(), Some(version))?;
        }
        if let Some((path, owner, fence)) = change.mark {
            writer.add_set_data(path, &mark(owner, fence), None)?;
        }
        if let Some((path, old, new)) = change.base {
            if new == old.base {
                writer.add_check_version(path, old.version)?;
            } else {
                writer.add_set_data(path, new.to_string().as_bytes(), Some(old.version))?;
            }
        }
        Ok(())
    };
    write(&mut writer).map_err(error)?;
    let sent = session.clock.now();
    match session.ask(bound, writer.commit()).await? {
        Ok(done) => {
            session.wrote(sent);
            let zxid = done.iter().find_map(|one| match one {
                zookeeper_client::MultiWriteResult::SetData { stat } => Some(stat.mzxid),
                _ => None,
            });
            Ok(Some(zxid.unwrap_or(0)))
        }
        Err(MultiWriteError::OperationFailed { source: Said::NoNode | Said::BadVersion, .. }) => Ok(None),
        Err(said) => Err(error(said.into())),
    }
}

/// Proves the session by its heartbeat and reads nodes behind it; `None`: the node is gone. What fails for some nodes alone is
/// their inner error.
///
/// Each node that is there stood when the write was decided, or was made since.
pub(crate) async fn prove(
    session: &Session,
    bound: Duration,
    paths: &[String],
) -> Result<Vec<Result<Option<(Vec<u8>, Stat)>>>> {
    let bound = session.ready(bound).await?;
    let sent = session.clock.now();
    let beat = session.client.set_data(&session.beat, b"", None);
    let mut reads = Vec::new();
    // One answer of the server holds at most a megabyte.
    for part in paths.chunks(PART) {
        reads.push(read_all(session, part.iter().map(|path| Part::Data(path)))?);
    }
    let (beat, reads) = session
        .ask(bound, async {
            let beat = beat.await;
            let mut answers = Vec::with_capacity(reads.len());
            for read in reads {
                answers.push(read.await);
            }
            (beat, answers)
        })
        .await?;
    match beat {
        Ok(_) => session.wrote(sent),
        // Its own node was removed. Making it again proves the session as well, but what was read came before.
        Err(Said::NoNode) => {
            session.make_beat(bound).await?;
            return Err(Error::new(ErrorKind::Unknown, "the heartbeat's node was gone and was made again"));
        }
        Err(said) => return Err(error(said)),
    }
    let mut found = Vec::with_capacity(paths.len());
    for (asked, part) in paths.chunks(PART).zip(reads) {
        match part {
            Ok(part) if part.len() == asked.len() => {
                found.extend(part.into_iter().map(|one| data_of(Some(one))));
            }
            Ok(_) => found.extend(asked.iter().map(|_| Err(no_certain_answer()))),
            Err(said) => found.extend(asked.iter().map(|_| Err(error(said.clone())))),
        }
    }
    Ok(found)
}

const PART: usize = 256;

fn no_certain_answer() -> Error {
    Error::new(ErrorKind::Unknown, "the ensemble gave no certain answer")
}

/// Reads a queue out of an answer; a queue that is missing is empty.
fn children(part: Option<MultiReadResult>) -> Result<Queue> {
    match part {
        Some(MultiReadResult::Children { children }) => Ok(Queue::new(children)),
        Some(MultiReadResult::Error { err: Said::NoNode }) => Ok(Queue::default()),
        Some(MultiReadResult::Error { err }) => Err(error(err)),
        _ => Err(no_certain_answer()),
    }
}

/// Reads a node out of an answer; `None`: there is none.
fn data_of(part: Option<MultiReadResult>) -> Result<Option<(Vec<u8>, Stat)>> {
    match part {
        Some(MultiReadResult::Data { data, stat }) => Ok(Some((data, stat))),
        Some(MultiReadResult::Error { err: Said::NoNode }) => Ok(None),
        Some(MultiReadResult::Error { err }) => Err(error(err)),
        _ => Err(no_certain_answer()),
    }
}

fn record_of(found: Option<(Vec<u8>, Stat)>) -> Result<Option<Base>> {
    let Some((data, stat)) = found else { return Ok(None) };
    let base = std::str::from_utf8(&data).ok().and_then(|text| text.parse().ok()).ok_or_else(|| {
        Error::new(ErrorKind::Misconfigured, "the namespace's record holds something that is not ours")
    })?;
    Ok(Some(Base { base, version: stat.version }))
}

fn made_of(name: &str, data: &[u8], stat: &Stat) -> Node {
    let note = Note::read(data).unwrap_or_default();
    Node { name: name.to_owned(), czxid: stat.czxid, note, version: stat.version }
}
