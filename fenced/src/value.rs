//! A value in memory behind the rule.

use lockcore::Stamp;

use crate::{
    register::Register,
    stale::{Stale, Verdict},
};

/// A value in memory that can only be reached with a stamp.
///
/// Put it into a `Mutex`: the methods take `&mut self`, so that check and effect are one step.
///
/// # Example
/// ```
/// use lockcore_fenced::{Fence, Fenced, OwnerDigest, Stamp, Verdict};
///
/// let alice = Stamp::new(Fence::new(41)?, OwnerDigest::from_i64(1));
/// let bob = Stamp::new(Fence::new(42)?, OwnerDigest::from_i64(2));
/// let mut checkpoint = Fenced::new(0);
///
/// assert_eq!(checkpoint.write(alice, "step-1", |at| *at = 1).unwrap(), Verdict::Accepted);
/// assert_eq!(*checkpoint.read(bob).unwrap(), 1); // from here on alice is out
/// assert!(checkpoint.write(alice, "step-2", |at| *at = 2).is_err());
/// # Ok::<(), lockcore::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Fenced<T> {
    register: Register,
    value: T,
}

impl<T> Fenced<T> {
    /// Wraps a value.
    pub fn new(value: T) -> Self {
        Self { register: Register::default(), value }
    }

    /// Wraps a value that was saved together with its register.
    pub fn restore(value: T, register: Register) -> Self {
        Self { register, value }
    }

    /// Reads, and refuses older holders from then on.
    ///
    /// # Errors
    /// `Stale`: a newer holder, or another one with the same fence, has been here.
    pub fn read(&mut self, stamp: Stamp) -> Result<&T, Stale> {
        self.register.touch(stamp)?;
        Ok(&self.value)
    }

    /// Writes once per `op`. The operation counts as done when `apply` has returned; if it panics, it does not.
    ///
    /// # Errors
    /// `Stale`: a newer holder, or another one with the same fence, has been here; `apply` did not run.
    pub fn write(&mut self, stamp: Stamp, op: &str, apply: impl FnOnce(&mut T)) -> Result<Verdict, Stale> {
        let verdict = self.register.judge(stamp, op)?;
        if verdict == Verdict::Accepted {
            // The floor first: even a write that fails half-way keeps older holders out.
            self.register.raise(stamp);
            apply(&mut self.value);
            self.register.record(op);
        }
        Ok(verdict)
    }

    /// Looks without a stamp: raises nothing, and what is seen may be overwritten at once. Not for decisions.
    pub fn peek(&self) -> &T {
        &self.value
    }

    /// Returns the floor and the operations, to be saved with the value.
    pub fn register(&self) -> &Register {
        &self.register
    }

    /// Forgets one operation whose retry can no longer come; see [`Register::forget`].
    pub fn forget(&mut self, stamp: Stamp, op: &str) -> bool {
        self.register.forget(stamp, op)
    }
}
