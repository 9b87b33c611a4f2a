//! What a bridge remembers of each acquisition: the lease on either side, and the membership that it began under.

use std::{collections::HashMap, sync::Mutex};

use crate::{
    backend::{Lease, Moment, Owner},
    sync::LockExt,
};

/// One acquisition. Without leases it is still being asked for.
#[derive(Clone, Debug)]
pub(super) struct Grant {
    pub(super) from: Option<Lease>,
    pub(super) to: Option<Lease>,
    /// The membership under which it was asked for: it is good under no other.
    pub(super) member: Owner,
    /// From then on nobody asks for it any more.
    pub(super) until: Moment,
}

/// The acquisitions of one bridge.
#[derive(Debug, Default)]
pub(super) struct Grants(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    grants: HashMap<Owner, Grant>,
    /// Entries whose end went unheard are removed when the table has grown beyond this.
    look_at: usize,
}

impl Grants {
    pub(super) fn put(&self, owner: Owner, grant: Grant, now: Moment) {
        let mut table = self.0.grab();
        table.grants.insert(owner, grant);
        if table.grants.len() > table.look_at {
            table.grants.retain(|_, grant| now < grant.until);
            table.look_at = (table.grants.len() * 2).max(64);
        }
    }

    pub(super) fn find(&self, owner: &Owner) -> Option<Grant> {
        self.0.grab().grants.get(owner).cloned()
    }

    pub(super) fn remove(&self, owner: &Owner) {
        self.0.grab().grants.remove(owner);
    }
}
