//! The operator's side: where a migration stands, and the steps between its stages.

use std::{fmt, sync::Arc};

use super::{Phase, membership::in_time};
use crate::{backend::*, text::show_label};

/// Where a migration stands: which phases may be joined. Each stage is one step from its neighbours; none is skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Stage {
    /// The stores know of no migration.
    Plain,
    /// `from` is open.
    From,
    /// `from` and `both` are open.
    FromBoth,
    /// `both` is open.
    Both,
    /// `both` and `to` are open.
    BothTo,
    /// `to` is open.
    To,
}

impl Stage {
    const ALL: [Self; 6] = [Self::Plain, Self::From, Self::FromBoth, Self::Both, Self::BothTo, Self::To];

    /// Returns its name in messages and JSON.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::From => "from",
            Self::FromBoth => "from+both",
            Self::Both => "both",
            Self::BothTo => "both+to",
            Self::To => "to",
        }
    }

    /// Lists the phases that may be joined.
    pub const fn open(self) -> &'static [Phase] {
        match self {
            Self::Plain => &[],
            Self::From => &[Phase::From],
            Self::FromBoth => &[Phase::From, Phase::Both],
            Self::Both => &[Phase::Both],
            Self::BothTo => &[Phase::Both, Phase::To],
            Self::To => &[Phase::To],
        }
    }

    /// Returns the stage nearer to the new store; `None` at the end.
    pub fn next(self) -> Option<Self> {
        Self::ALL.get(self as usize + 1).copied()
    }

    /// Returns the stage nearer to the old store; `None` at the beginning, and at the first stage: a migration that was
    /// begun stays on record.
    pub fn previous(self) -> Option<Self> {
        match self {
            Self::Plain | Self::From => None,
            _ => Self::ALL.get(self as usize - 1).copied(),
        }
    }

    fn opens(self, side: Side) -> Vec<String> {
        let used = |phase: &&Phase| match side {
            Side::From => phase.on_from(),
            Side::To => phase.on_to(),
        };
        self.open().iter().filter(used).map(|phase| phase.as_str().to_owned()).collect()
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// One of the two stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// The store that locks leave.
    From,
    /// The store that they go to.
    To,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::From => "`from`",
            Self::To => "`to`",
        })
    }
}

/// What the two stores know of a migration.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Status {
    /// The stage. Where a step has begun and is not over, the stage that its end or its undoing starts from.
    pub stage: Stage,
    /// No step is under way.
    pub settled: bool,
    /// Counts the changes of the old store's record.
    pub epoch: u64,
    /// What every fence of the old store is above.
    pub floor_from: Option<Fence>,
    /// What every fence of the new store is above.
    pub floor_to: Option<Fence>,
    /// Who has joined, at which store; a member of `both` stands at both.
    pub members: Vec<(Side, Member)>,
}

impl Status {
    /// Returns where the next step towards the new store leads: the end of a step that was begun, or the next stage.
    /// `None` at the end.
    pub fn forward(&self) -> Option<Stage> {
        let went_back = |(_, member): &(Side, Member)| rank(&member.phase) > self.furthest();
        match self.settled || self.in_the_way(self.stage).any(went_back) {
            true => self.stage.next(),
            false => Some(self.stage),
        }
    }

    /// Returns where the next step towards the old store leads. `None` at the beginning.
    pub fn backward(&self) -> Option<Stage> {
        let went_on = |(_, member): &(Side, Member)| rank(&member.phase) < self.nearest();
        match self.settled || self.in_the_way(self.stage).any(went_on) {
            true => self.stage.previous(),
            false => Some(self.stage),
        }
    }

    fn furthest(&self) -> Option<usize> {
        self.stage.open().last().and_then(|phase| rank(phase.as_str()))
    }

    fn nearest(&self) -> Option<usize> {
        self.stage.open().first().and_then(|phase| rank(phase.as_str()))
    }

    /// Lists who must leave before a stage is reached: the members of phases that are not open in it.
    pub fn in_the_way(&self, stage: Stage) -> impl Iterator<Item = &(Side, Member)> {
        self.members.iter().filter(move |(_, m)| !stage.open().iter().any(|phase| phase.as_str() == m.phase))
    }
}

/// One migration, for the operator: `lockctl migrate` is this.
///
/// # Shape
/// A record on each store, which says what phases may be joined there. The old store's orders the steps: its epoch is
/// odd while one is under way. Whoever takes a step changes the new store's record first with what it read before,
/// so two operators cannot open `from` and `to` at the same time, and one that was stopped in a step changes nothing
/// when it wakes up.
#[derive(Clone, Debug)]
pub struct Migration {
    name: Arc<str>,
    from: Arc<dyn LockBackend>,
    to: Arc<dyn LockBackend>,
}

type Records = (Option<PhaseRecord>, Option<PhaseRecord>);

impl Migration {
    /// Names a migration between two stores. Sends nothing.
    ///
    /// # Errors
    /// `Invalid`: the name is not 1 to 64 bytes of `A-Z a-z 0-9 . _ -`.
    pub fn new(name: &str, from: Arc<dyn LockBackend>, to: Arc<dyn LockBackend>) -> Result<Self> {
        check_name(name)?;
        Ok(Self { name: name.into(), from, to })
    }

    /// Looks where it stands.
    ///
    /// # Errors
    /// `Misconfigured`: a store is part of another migration, or the records do not fit together. `Unsupported`: a store
    /// keeps no phases.
    pub async fn status(&self, call: &Call) -> Result<Status> {
        let records = self.records(call).await?;
        let (stage, settled) = place(&records)?;
        let mut members = Vec::new();
        for (side, store) in [(Side::From, &self.from), (Side::To, &self.to)] {
            let call = call.beside(call.exchange());
            members.extend(in_time(&call, store.members(&call)).await?.into_iter().map(|m| (side, m)));
        }
        let (from, to) = records;
        Ok(Status {
            stage,
            settled,
            epoch: from.as_ref().map_or(0, |record| record.epoch),
            floor_from: from.and_then(|record| record.floor),
            floor_to: to.and_then(|record| record.floor),
            members,
        })
    }

    /// Takes one step: to a neighbour of the stage it stands at, or to that stage itself, to end a step that was begun.
    ///
    /// What the stage does not have open is closed first, which stands whatever follows; then members of those phases
    /// must be gone. At an end of the way every name's fence is carried over to the store that is left alone.
    ///
    /// # Errors
    /// `Held`: somebody is still in a phase that closes; step again when [`status`](Self::status) shows nobody in the
    /// way, or step back. `Invalid`: the stage is not a neighbour. `Unavailable`: nothing was changed; a store
    /// is away, or another operator was faster. `Unknown`: the step has begun, and may have gone further than told; look, then
    /// step again, which is safe.
    ///
    /// # Cancel safety
    /// A step that was begun is ended, or undone, by the next one.
    pub async fn step(&self, call: &Call, goal: Stage) -> Result<Status> {
        let (from, to) = self.records(call).await?;
        let (stage, settled) = place(&(from.clone(), to.clone()))?;
        if stage == goal && settled {
            return self.status(call).await;
        }
        let near = stage == goal || stage.next() == Some(goal) || stage.previous() == Some(goal);
        if !near || goal == Stage::Plain {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!("the migration is at {stage}, and {goal} is not one step away"),
            ));
        }
        let shut = |record: &Option<PhaseRecord>, side| {
            let allowed = goal.opens(side);
            let mut open = record.as_ref().map_or_else(Vec::new, |record| record.open.clone());
            open.retain(|phase| allowed.contains(phase));
            open
        };

        // The old store's record says that a step is under way; nothing is open that the goal does not have open. The
        // records were read before: whoever changed one since has the turn.
        let closing = self.next(&from, 1, shut(&from, Side::From));
        self.replace(call, &self.from, from.as_ref(), &closing).await?;
        let other = self.next(&to, 2, shut(&to, Side::To));
        let ended = async {
            self.replace(call, &self.to, to.as_ref(), &other).await?;
            self.end_step(call, goal, closing, other, from.is_some()).await
        };
        ended.await.map_err(begun)
    }

    /// Ends a step whose phases are closed in both records.
    async fn end_step(
        &self,
        call: &Call,
        goal: Stage,
        closing: PhaseRecord,
        mut other: PhaseRecord,
        began_before: bool,
    ) -> Result<Status> {
        let status = self.status(call).await?;
        let left: Vec<String> = status
            .in_the_way(goal)
            .map(|(_, member)| {
                let label = member.label.as_deref().unwrap_or("(no label)");
                format!("{} ({}) in `{}`", show_label(label), member.owner, member.phase)
            })
            .collect();
        if !left.is_empty() {
            return Err(Error::new(
                ErrorKind::Held,
                format!("{goal} is not reached while others are in a phase that closes: {}", left.join(", ")),
            ));
        }

        // Taken when nobody is left who could be granted more by the rules of a closed phase.
        let (mut floor_from, mut floor_to) = (closing.floor, other.floor);
        if goal >= Stage::Both {
            // Also where the old store has granted nothing: from now on `to` may have been open.
            floor_to = floor_to.max(self.high(call, &self.from).await?).max(Some(Fence::MIN));
        } else if floor_to.is_some() {
            // Only now can `to` have been open. On the way there the old store's fences are left alone: what is
            // raised stays raised.
            floor_from = floor_from.max(self.high(call, &self.to).await?);
        }
        if goal == Stage::To {
            self.carry_over(call, &self.from, &self.to, floor_to).await?;
        }
        if goal == Stage::From && began_before {
            self.carry_over(call, &self.to, &self.from, floor_from).await?;
        }
        let before = other.clone();
        other = self.next(&Some(other), 2, goal.opens(Side::To));
        other.floor = floor_to;
        self.replace(call, &self.to, Some(&before), &other).await?;
        let mut open = self.next(&Some(closing.clone()), 0, goal.opens(Side::From));
        open.floor = floor_from;
        self.replace(call, &self.from, Some(&closing), &open).await?;
        self.status(call).await
    }

    async fn records(&self, call: &Call) -> Result<Records> {
        // The new side's first: what a step then changes with what it read here is refused if the old side's has
        // changed in between.
        let mut seen = None;
        loop {
            let call = &call.beside(call.exchange());
            let to = in_time(call, self.to.phase_read(call)).await?;
            let from = in_time(call, self.from.phase_read(call)).await?;
            for (side, record) in [(Side::From, &from), (Side::To, &to)] {
                if let Some(record) = record {
                    check_part(side, record, &self.name)?;
                }
            }
            let records = (from, to);
            // Between the two looks another operator may have ended a step. Records that fit no stage are told of when they
            // have stood still.
            if place(&records).is_ok() || seen.as_ref() == Some(&records) {
                return Ok(records);
            }
            seen = Some(records);
        }
    }

    /// Follows a record with the next of a parity: 0 even, 1 odd, 2 whichever.
    fn next(&self, record: &Option<PhaseRecord>, parity: u64, open: Vec<String>) -> PhaseRecord {
        let mut next = PhaseRecord::new(&*self.name, record.as_ref().map_or(0, |record| record.epoch) + 1);
        if parity < 2 && next.epoch % 2 != parity {
            next.epoch += 1;
        }
        next.open = open;
        next.floor = record.as_ref().and_then(|record| record.floor);
        next
    }

    async fn replace(
        &self,
        call: &Call,
        store: &Arc<dyn LockBackend>,
        expect: Option<&PhaseRecord>,
        new: &PhaseRecord,
    ) -> Result<()> {
        let mut unheard = None;
        for _ in 0..3 {
            let call = call.beside(call.exchange());
            match in_time(&call, store.phase_cas(&call, expect, new)).await {
                Ok(true) => return Ok(()),
                Ok(false) if unheard.is_none() => break,
                Ok(false) => {}
                Err(error) if error.kind() == ErrorKind::Unknown => unheard = Some(error),
                Err(error) => return Err(error),
            }
            // Two operators who write the same record are told apart by the next one: only one of them replaces it.
            match in_time(&call, store.phase_read(&call)).await {
                Ok(found) if found.as_ref() == Some(new) => return Ok(()),
                Ok(found) if found.as_ref() != expect => break,
                Ok(_) | Err(_) => {}
            }
        }
        match unheard {
            Some(error) => Err(Error::new(
                ErrorKind::Unknown,
                "a record of the migration may have been changed; look where it stands, then step again",
            )
            .with_source(error)),
            None => Err(Error::new(
                ErrorKind::Unavailable,
                "another operator changed the migration meanwhile; look where it stands, then step again",
            )),
        }
    }

    async fn high(&self, call: &Call, store: &Arc<dyn LockBackend>) -> Result<Option<Fence>> {
        let call = call.beside(call.exchange());
        in_time(&call, store.high_water(&call)).await
    }

    /// Raises on one store the fence of every name that the other knows, so that a plain client keeps to it.
    async fn carry_over(
        &self,
        call: &Call,
        source: &Arc<dyn LockBackend>,
        goal: &Arc<dyn LockBackend>,
        floor: Option<Fence>,
    ) -> Result<()> {
        let Some(floor) = floor else { return Ok(()) };
        let mut after: Option<LockName> = None;
        loop {
            let page = call.beside(call.exchange());
            let names = in_time(&page, source.list(&page, None, after.as_ref())).await?;
            let Some(last) = names.last().cloned() else { return Ok(()) };
            for name in &names {
                let one = call.beside(call.exchange());
                in_time(&one, goal.raise_fence(&one, name, floor)).await?;
            }
            after = Some(last);
        }
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }
}

fn rank(phase: &str) -> Option<usize> {
    ["from", "both", "to"].iter().position(|known| *known == phase)
}

/// Reads the stage off the two records.
fn place((from, to): &Records) -> Result<(Stage, bool)> {
    let Some(from) = from else {
        return match to {
            None => Ok((Stage::Plain, true)),
            Some(_) => Err(unfit("the old store has no record of the migration, and the new one has")),
        };
    };
    let settled = from.epoch.is_multiple_of(2);
    let to = to.clone().unwrap_or_else(|| PhaseRecord::new(from.migration.clone(), 0));
    let has = |record: &PhaseRecord, phase: Phase| record.open.iter().any(|open| open == phase.as_str());
    let (is_from, is_to) = (has(from, Phase::From), has(&to, Phase::To));
    if is_from && is_to {
        return Err(unfit("the phases `from` and `to` are both open"));
    }
    if settled {
        let whole = |stage: &&Stage| from.open == stage.opens(Side::From) && to.open == stage.opens(Side::To);
        let stage = Stage::ALL[1..].iter().find(whole).copied();
        return stage.map(|stage| (stage, true)).ok_or_else(|| unfit("the records belong to no stage"));
    }
    // Under way: what is closed on one side is closed.
    let stage = match (is_from, has(from, Phase::Both), has(&to, Phase::Both), is_to) {
        (true, true, true, _) => Stage::FromBoth,
        (true, ..) => Stage::From,
        (_, true, true, true) => Stage::BothTo,
        (_, _, _, true) => Stage::To,
        (_, false, _, _) if to.floor.is_none() => Stage::From,
        (_, false, true, _) => Stage::BothTo,
        _ => Stage::Both,
    };
    Ok((stage, false))
}

fn unfit(what: &str) -> Error {
    Error::new(
        ErrorKind::Misconfigured,
        format!("{what}; one of them was restored or wiped, and a person must look before anybody goes on"),
    )
}

/// Refuses the record of another migration.
pub(super) fn check_part(side: Side, record: &PhaseRecord, migration: &str) -> Result<()> {
    if record.migration == migration {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Misconfigured,
        format!(
            "the store at {side} is part of the migration {:?}, not of {migration:?}; a store takes part in one at a time",
            record.migration
        ),
    ))
}

pub(crate) fn check_name(name: &str) -> Result<()> {
    let fits = !name.is_empty()
        && name.len() <= 64
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'));
    if fits {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Invalid,
        format!("the name of a migration is 1 to 64 bytes of `A-Z a-z 0-9 . _ -`, not {name:?}"),
    ))
}

/// Makes an error of a step that has closed its phases at the old store already: it had an effect. Who is in the way is told
/// as that.
fn begun(error: Error) -> Error {
    if error.kind() == ErrorKind::Held || !error.kind().had_no_effect() {
        return error;
    }
    let text = "the step has begun and did not end; look where it stands, then step again";
    Error::new(ErrorKind::Unknown, text).with_source(error)
}
