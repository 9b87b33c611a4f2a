//! The rows of the comparison, and which case feeds which.

use serde::Serialize;

use crate::case::Case;

/// One row: something that a user of locks asks about a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Row {
    /// Short, stable name.
    pub id: &'static str,
    /// Title.
    pub title: &'static str,
    /// The question.
    pub asks: &'static str,
    /// What can be said where all its cases hold; a cell may know better.
    #[serde(skip)]
    pub(crate) holds: &'static str,
    /// Begins the sentence about a break: what was done to the store.
    #[serde(skip)]
    pub(crate) fault: &'static str,
    /// Cases by catalogue id; an id is never used for something else.
    #[serde(skip)]
    ids: &'static [&'static str],
}

macro_rules! rows {
    ($($id:literal $title:literal $asks:literal $holds:literal $fault:literal [$($case:literal)*];)*) => {
        impl Row {
            /// All rows, in the order of the table.
            pub const ALL: &'static [Self] = &[$(Self {
                id: $id, title: $title, asks: $asks, holds: $holds, fault: $fault, ids: &[$($case),*],
            }),*];
        }
    };
}

rows! {
    "exclusion" "Exclusion" "Can two clients hold it at once?"
        "It was never granted to two clients at once, and no count was lost at the resource."
        "Without any fault" ["a01" "a02" "a03" "g06"];
    "scope" "Scope" "What does one lock cover, and can a client enter twice?"
        "Names are independent of each other, and no client enters twice."
        "With several names" ["a04" "a05" "a07"];
    "fence" "Fence" "Where does the fence come from, and does it always grow?"
        "It grew with every grant."
        "Over many grants" ["a06" "e05" "e06"];
    "fence-after-loss" "Fence after data loss" "Does the fence still grow after the store forgot?"
        "It still grew after the store had lost its data."
        "After the store lost its data" ["j02" "o03"];
    "expiry" "Expiry" "How exactly does a lease end?"
        "Nobody was granted it before the holder's own deadline."
        "At the end of a lease" ["c02"];
    "takeover" "Takeover" "How soon is a silent or dead holder followed?"
        "A waiter followed after the end of the lease, under a higher fence."
        "After the holder fell silent" ["c01" "c06" "d06"];
    "deadline" "Honest deadline" "Does a holder ever think it has longer than it has?"
        "A deadline counts from before the request left, and a late answer is no grant."
        "With slow answers" ["c04" "c05"];
    "holder-paused" "Holder paused" "What if the holder stops and wakes up too late?"
        "A holder that stopped past its deadline was refused, by the store and by the resource."
        "After a pause of the holder" ["d01" "d02" "d03" "d04"];
    "stale-write" "Stale write" "Does the resource refuse an earlier holder?"
        "The resource refused every earlier holder, also after a mere read and after a restart."
        "At the resource" ["e01" "e02" "e03" "e04"];
    "stale-release" "Stale release" "Can a release hit somebody else?"
        "A release by anybody but the holder ended nothing."
        "After a stale release" ["b01" "b02" "b03" "b04" "b05"];
    "stale-renew" "Stale renewal" "Can a renewal come too late, or create a lock?"
        "A renewal that came too late was refused, and created nothing."
        "After a stale renewal" ["f07" "f08"];
    "renewal" "Renewal" "Does a holder keep it for as long as it works?"
        "A guard kept it for many TTLs and over a lost renewal, and told a loss at the deadline."
        "While it was renewed" ["f01" "f02" "f03" "f04" "f05" "f06" "f09" "f10" "d05"];
    "waiting" "Waiting" "How does a waiter learn that its turn has come?"
        "No wake-up was lost, and a wait ended with its budget."
        "While clients waited" ["g01" "g02" "g03" "g05" "g07" "g09" "g10"];
    "fairness" "Fairness" "Is the first to come the first to be served?"
        "Waiters were served in the order in which they came."
        "While clients waited" ["g04"];
    "cancellation" "Cancellation" "What does a dropped future leave behind?"
        "No lease and no place in the queue was left, wherever the future was dropped."
        "After a cancelled call" ["h01" "h02" "h03" "h04" "h05"];
    "lost-replies" "Lost replies" "What if the answer never comes?"
        "A grant whose answer was lost was recovered, or told as unknown; it never became a second one."
        "After a lost reply" ["i01" "i02" "i03" "i04" "i05" "i06" "i07" "i08"];
    "restart" "Restart" "Does a held lock outlive a restart of the server?"
        "It did, or its holder learnt the loss in time."
        "After a restart that forgot it" ["j01" "j02" "j16"];
    "failover" "Failover" "Does a held lock outlive a change of the leading server?"
        "It did, or its holder learnt the loss in time."
        "After a failover that lost it" ["j03" "j04" "j05" "j06" "j07" "j10"];
    "quorum" "Store away" "What if the store, or a majority of it, does not answer?"
        "It was told as unavailable, neither as busy nor as granted, and it was well again afterwards."
        "While the store was away" ["j11" "j15"];
    "session" "Session lost" "What if the server closes the holder's session?"
        "The holder was told at once."
        "After the server closed the session" ["j12"];
    "removal" "Eviction, deletion" "What if the record is evicted or deleted?"
        "The store kept it, or refused honestly."
        "After its record was removed" ["j08" "j09"];
    "server-clock" "Server's clock" "What does a step of the server's clock do?"
        "A step of the server's clock changed nothing."
        "After a step of the server's clock" ["k01" "k02" "k04"];
    "client-clock" "Client's clock" "What does a step or a suspend of the client do?"
        "The wall clock of a client moves nothing, and a suspend counts."
        "After a step of the client's clock" ["k03" "k05"];
    "partition" "Partition" "What if only one direction of the network works?"
        "The holder lost it at its deadline, and nobody had it earlier."
        "During a partition" ["j13" "j14"];
    "server-stall" "Server stalled" "What if the server stops and goes on?"
        "Nobody believed wrongly, and everybody recovered."
        "After a stall of the server" ["d07"];
    "ttl" "TTLs" "Which TTLs are there, and are they honoured?"
        "A deadline counts the TTL that was asked for; the server keeps it no shorter."
        "With odd TTLs" ["c03"];
    "soak" "Everything at once" "What do random faults in a row do?"
        "Random faults broke no promise, and afterwards it healed."
        "Under random faults" ["j17"];
    "cost" "Cost" "Does it stay cheap with many locks, waiters and rounds?"
        "Many leases were all renewed, and rounds with cancellations left nothing."
        "Under load" ["g08" "l01" "l02"];
    "keys" "Names" "Which names are possible?"
        "Long and hostile names work, and never meet another."
        "With hostile names" ["n01" "n02" "n03" "n04"];
    "configuration" "Configuration" "What must be set up, and is a mistake told?"
        "What cannot work was refused before anything was sent, and no secret shows."
        "With a mistake in the set-up" ["m01" "m02" "m03" "b06"];
    "operators" "Operators" "What can be seen and broken from outside?"
        "A look shows the truth and changes nothing, and a break never hits a newer holder."
        "After an operator's break" ["p01" "p02" "p03" "p04"];
    "migration" "Migration" "Can a lock move to another store without a smaller fence?"
        "The fence can be raised above that of another store."
        "During a migration" ["o01" "o02" "o04" "o05" "o06"];
}

impl Row {
    /// Returns the rows that a case feeds.
    pub(crate) fn of(case: &Case) -> impl Iterator<Item = &'static Self> {
        Self::ALL.iter().filter(|row| row.has(case.name()))
    }

    /// Says whether a case of this name feeds it.
    pub(crate) fn has(&self, case: &str) -> bool {
        self.ids.contains(&case.split('_').next().unwrap_or_default())
    }

    /// Returns the row of a name.
    pub fn by_id(id: &str) -> Option<&'static Self> {
        Self::ALL.iter().find(|row| row.id == id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cases;

    #[test]
    fn every_case_feeds_a_row() {
        let without: Vec<_> = cases::all().filter(|case| Row::of(case).next().is_none()).collect();
        assert!(without.is_empty(), "name their ids in a row of `rows!`: {without:?}");
    }

    #[test]
    fn rows_have_names_of_their_own() {
        for (at, row) in Row::ALL.iter().enumerate() {
            assert!(
                Row::ALL[..at].iter().all(|other| other.id != row.id && other.title != row.title),
                "{row:?}"
            );
        }
    }
}
