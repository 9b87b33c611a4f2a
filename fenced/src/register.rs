//! The rule itself, without a store.

use std::collections::BTreeSet;

use lockcore::Stamp;

use crate::stale::{Place, Stale, Verdict, check, counted, passes};

/// The rule itself, without a store: a floor, and the operations of its holder and of the holder before it.
///
/// For a resource that lives in one process. Whoever calls it holds the mutex around it for the whole of check and
/// effect; [`Fenced`](crate::Fenced) does that by construction.
///
/// # Shape
/// Three questions, in this order: was this very operation of this very holder applied before (`Duplicate`, also
/// when the holder is a former one: a retry after a takeover learns that it *was* applied), is the fence older than
/// the floor or the floor of another owner (`Stale`), else `Accepted`, and the floor moves up.
///
/// # Units
/// Memory is bounded by what two holders wrote: the newest, and the last one before it that wrote anything. None of
/// the newest holder's operations is dropped by itself, because its retry would then be applied twice; a holder
/// that stays for months drops them with [`forget`](Self::forget). Retries of holders further back are `Stale`.
///
/// # Example
/// ```
/// use lockcore_fenced::{Fence, OwnerDigest, Register, Stamp, Verdict};
///
/// let alice = Stamp::new(Fence::new(41)?, OwnerDigest::from_i64(1));
/// let bob = Stamp::new(Fence::new(42)?, OwnerDigest::from_i64(2));
/// let mut register = Register::default();
///
/// assert_eq!(register.admit(alice, "pay/7").unwrap(), Verdict::Accepted);
/// register.touch(bob).unwrap(); // bob only reads, and alice is out
/// assert!(register.admit(alice, "pay/8").is_err());
/// assert_eq!(register.admit(alice, "pay/7").unwrap(), Verdict::Duplicate);
/// # Ok::<(), lockcore::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Register {
    floor: Option<Stamp>,
    /// Operations of the floor's holder.
    newest: BTreeSet<String>,
    /// The last holder below the floor that wrote, and its operations.
    former: Option<(Stamp, BTreeSet<String>)>,
}

impl Register {
    /// Raises the floor: before a read that a later write depends on.
    ///
    /// # Errors
    /// `Stale`: a newer holder, or another one with the same fence, has been here; nothing changed.
    pub fn touch(&mut self, stamp: Stamp) -> Result<(), Stale> {
        self.checked(stamp)?;
        self.raise(stamp);
        Ok(())
    }

    /// Judges one write; `op` names it in the caller's own terms and is the same when the caller retries.
    ///
    /// `Accepted` is recorded at once, so apply the write before anybody else can look. When that fails,
    /// [`forget`](Self::forget) the operation, or its retry will be taken for a duplicate.
    ///
    /// # Errors
    /// `Stale`: a newer holder, or another one with the same fence, has been here; nothing changed.
    pub fn admit(&mut self, stamp: Stamp, op: &str) -> Result<Verdict, Stale> {
        let verdict = self.judge(stamp, op)?;
        if verdict == Verdict::Accepted {
            self.raise(stamp);
            self.record(op);
        }
        Ok(verdict)
    }

    /// Returns the highest stamp seen.
    pub fn floor(&self) -> Option<Stamp> {
        self.floor
    }

    /// Says whether a write under `stamp` would be let through right now. Raises nothing and promises nothing.
    ///
    /// # Errors
    /// `Stale`: it would be refused.
    pub fn peek(&self, stamp: Stamp) -> Result<(), Stale> {
        check(stamp, self.floor)
    }

    /// Forgets one operation, and says whether it was known: because applying it failed, or because its retry can
    /// no longer come.
    ///
    /// A retry that comes after all is applied again if its holder is still the newest.
    pub fn forget(&mut self, stamp: Stamp, op: &str) -> bool {
        self.ops_of(stamp).is_some_and(|ops| ops.remove(op))
    }

    /// Lists the recorded operations with their holders: with the floor, all that a resource must save to go on
    /// refusing after a restart.
    pub fn operations(&self) -> impl Iterator<Item = (Stamp, &str)> {
        let former = self.former.iter().flat_map(|(stamp, ops)| ops.iter().map(|op| (*stamp, op.as_str())));
        let newest =
            self.floor.into_iter().flat_map(|stamp| self.newest.iter().map(move |op| (stamp, op.as_str())));
        former.chain(newest)
    }

    /// Takes back what was saved of [`floor`](Self::floor) and [`operations`](Self::operations).
    ///
    /// The floor is never below a saved operation, in whatever order and state the two were written.
    pub fn restore<S: Into<String>>(
        floor: Option<Stamp>,
        operations: impl IntoIterator<Item = (Stamp, S)>,
    ) -> Self {
        let mut saved: Vec<(Stamp, String)> =
            operations.into_iter().map(|(stamp, op)| (stamp, op.into())).collect();
        saved.sort_by_key(|(stamp, _)| stamp.fence);
        let mut register = Self::default();
        for (stamp, op) in saved {
            register.raise(stamp);
            if register.floor == Some(stamp) {
                register.record(&op);
            }
        }
        if let Some(floor) = floor {
            register.raise(floor);
        }
        register
    }

    pub(crate) fn judge(&self, stamp: Stamp, op: &str) -> Result<Verdict, Stale> {
        if self.knows(stamp, op) {
            return Ok(Verdict::Duplicate);
        }
        self.checked(stamp).map(|()| Verdict::Accepted)
    }

    fn checked(&self, stamp: Stamp) -> Result<(), Stale> {
        check(stamp, self.floor).map_err(|stale| counted(stale, Place::Register))
    }

    pub(crate) fn raise(&mut self, stamp: Stamp) {
        if self.floor == Some(stamp) || !passes(stamp, self.floor) {
            return;
        }
        if let Some(former) = self.floor.replace(stamp) {
            let ops = std::mem::take(&mut self.newest);
            if !ops.is_empty() {
                self.former = Some((former, ops));
            }
        }
    }

    /// Records an operation of the floor's holder.
    pub(crate) fn record(&mut self, op: &str) {
        self.newest.insert(op.to_owned());
    }

    fn knows(&self, stamp: Stamp, op: &str) -> bool {
        match &self.former {
            Some((former, ops)) if *former == stamp => ops.contains(op),
            _ => self.floor == Some(stamp) && self.newest.contains(op),
        }
    }

    fn ops_of(&mut self, stamp: Stamp) -> Option<&mut BTreeSet<String>> {
        if self.floor == Some(stamp) {
            return Some(&mut self.newest);
        }
        self.former.as_mut().filter(|(former, _)| *former == stamp).map(|(_, ops)| ops)
    }
}
