//! What the real cluster can keep: versions, members, alarms, permissions, the shortest TTL.

use std::{sync::PoisonError, time::Duration};

use etcd_client::{AlarmAction, AlarmType, Compare, CompareOp, LeaseGrantOptions, Txn, TxnOp};
use futures_util::future;
use lockcore::backend::*;

use crate::{
    exchange::Repeat,
    keys::Space,
    leases::random_lease,
    steps::{EtcdBackend, Known, bound_of},
};

impl EtcdBackend {
    pub(crate) async fn assess(&self, call: &Call) -> Result<Preflight> {
        self.may_write(call).await?;
        let mut findings = Vec::new();
        let mut known = Known { revokes_live_leases: false, alone: false, ..self.known() };
        let (mut led, mut server) = (false, None);
        let endpoints = &self.members.config().endpoints;
        let asked = (0..endpoints.len()).map(|at| {
            tokio::time::timeout(bound_of(call), async move {
                self.members.client(at).await?.maintenance_client().status().await
            })
        });
        for (endpoint, status) in endpoints.iter().zip(future::join_all(asked).await) {
            let Ok(Ok(status)) = status else {
                // Its version is what it may be.
                known.revokes_live_leases = true;
                findings.push(format!(
                    "{endpoint} does not answer, and nothing says that its version keeps live leases over a leader's \
                     pause; start it, or take it off the list"
                ));
                continue;
            };
            server.get_or_insert_with(|| format!("etcd {}", status.version()));
            if revokes_live_leases(status.version()) {
                known.revokes_live_leases = true;
                let cure = if self.swaps() { "renewals by swap keep clear of it" } else { "renew by swap" };
                findings.push(format!(
                    "{endpoint} runs etcd {}: a leader that was stopped and goes on may end live leases; use 3.4.31, \
                     3.5.13 or later; {cure}",
                    status.version()
                ));
            }
            if status.is_learner() {
                findings.push(format!("{endpoint} is a learner and serves no locks; name voting members"));
            } else if status.leader() == 0 {
                findings.push(format!("{endpoint} knows no leader; look at its connections to the others"));
            }
            led |= status.leader() != 0;
        }
        if !led {
            findings.push("no member that answers knows a leader".into());
        }
        let voters = self.count_voters(call).await;
        judge_members(voters, endpoints.len(), &mut known, &mut findings);
        self.read_alarms(call, &mut findings).await;
        self.probe_least_ttl(call, &mut known, &mut findings).await?;
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = known;
        let mut preflight = Preflight::clean(self.capabilities());
        preflight.findings = findings;
        preflight.server = server;
        Ok(preflight)
    }

    /// Asks for what a lock needs, without doing it: a majority answers, and the user may write below the prefix.
    async fn may_write(&self, call: &Call) -> Result<()> {
        let nothing = Space::new(call.namespace()).nothing();
        // The permissions of the branch that is not taken are looked at, too. It writes by a deletion, which a cluster
        // without space does not refuse.
        let txn = Txn::new()
            .when([Compare::create_revision(nothing.clone(), CompareOp::Greater, 0)])
            .and_then([TxnOp::delete(nothing.clone(), None)])
            .or_else([TxnOp::get(nothing, None)]);
        self.txn_freely(call, txn).await.map(drop)
    }

    /// Counts the members that vote; `None`: the list cannot be read.
    async fn count_voters(&self, call: &Call) -> Option<usize> {
        let members = self
            .members
            .ask(bound_of(call), Repeat::Freely, |client| async move {
                client.cluster_client().member_list().await
            })
            .await;
        let members = members.ok()?.ok()?;
        Some(members.members().iter().filter(|member| !member.is_learner()).count())
    }

    async fn read_alarms(&self, call: &Call, findings: &mut Vec<String>) {
        let alarms = self
            .members
            .ask(bound_of(call), Repeat::Freely, |client| async move {
                client.maintenance_client().alarm(AlarmAction::Get, AlarmType::None, None).await
            })
            .await;
        match alarms {
            Ok(Ok(answer)) => findings.extend(answer.alarms().iter().map(|alarm| {
                format!(
                    "member {:x} raises the alarm {:?}; clear its cause",
                    alarm.member_id(),
                    alarm.alarm()
                )
            })),
            _ => findings.push("alarms cannot be read; allow it, or look by hand".into()),
        }
    }

    async fn probe_least_ttl(
        &self,
        call: &Call,
        known: &mut Known,
        findings: &mut Vec<String>,
    ) -> Result<()> {
        let id = random_lease()?;
        let options = LeaseGrantOptions::new().with_id(id);
        let granted = self
            .members
            .ask(bound_of(call), Repeat::Never, |client| {
                let options = options.clone();
                async move { client.lease_client().grant(1, Some(options)).await }
            })
            .await;
        match granted {
            Ok(Ok(granted)) => {
                let least = granted.ttl().max(1).unsigned_abs();
                self.revoke(call, id).await?;
                known.least_ttl = Duration::from_secs(least);
                if least > 1 {
                    findings.push(format!(
                        "the shortest TTL is {least} s, one and a half election timeouts; shorter ones are refused"
                    ));
                }
            }
            // A cluster without space refuses leases, which is a finding and no reason to give up.
            Ok(Err(error)) => findings.push(format!("no lease is granted: {error}")),
            Err(error) => findings.push(format!("no lease is granted: {error}")),
        }
        Ok(())
    }
}

/// Notes what the number of voting members means. What is not known counts as what would be worst.
fn judge_members(voters: Option<usize>, named: usize, known: &mut Known, findings: &mut Vec<String>) {
    let Some(voters) = voters else {
        (known.alone, known.revokes_live_leases) = (true, true);
        findings.push(
            "the list of members cannot be read, so no failover and no pause of a leader is known to be survived; allow \
             it, or look by hand"
                .into(),
        );
        return;
    };
    known.alone = voters <= 1;
    if voters == 1 {
        findings.push("the cluster is one member: while it is away, no lock can be taken; use three".into());
    } else if voters % 2 == 0 {
        findings
            .push(format!("{voters} voting members bear no more deaths than {}", voters.saturating_sub(1)));
    }
    if named < voters {
        known.revokes_live_leases = true;
        findings.push(format!(
            "{named} of {voters} voting members are named; name all, or the others are of no use here and their versions \
             unknown"
        ));
    }
}

/// Says whether a stopped leader of this version may end leases that were renewed elsewhere.
///
/// # Source
/// etcd changelog 3.4.31, 3.5.13: "fix leases wrongly revoked by the leader".
fn revokes_live_leases(version: &str) -> bool {
    let mut parts = version.split(['.', '-', '+']).map(|part| part.parse::<u32>().unwrap_or(0));
    let mut next = || parts.next().unwrap_or(0);
    match (next(), next(), next()) {
        (3, 4, patch) => patch < 31,
        (3, 5, patch) => patch < 13,
        (major, minor, _) => (major, minor) < (3, 4),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_of_the_members_lowers_the_claims() {
        for (voters, named, alone, revokes) in [
            (Some(3), 3, false, false),
            (Some(1), 1, true, false),
            (Some(3), 2, false, true),
            (Some(0), 1, true, false),
            (None, 3, true, true),
        ] {
            let mut known =
                Known { least_ttl: Duration::from_secs(1), revokes_live_leases: false, alone: false };
            let mut findings = Vec::new();
            judge_members(voters, named, &mut known, &mut findings);
            assert_eq!((known.alone, known.revokes_live_leases), (alone, revokes), "{voters:?} {named}");
            assert_eq!(findings.is_empty(), voters == Some(3) && named == 3, "{findings:?}");
        }
    }

    #[test]
    fn old_versions_are_known() {
        for (version, old) in [
            ("3.4.23", true),
            ("3.4.31", false),
            ("3.5.12", true),
            ("3.5.13", false),
            ("3.5.0-rc.1", true),
            ("3.6.0", false),
            ("3.3.27", true),
        ] {
            assert_eq!(revokes_live_leases(version), old, "{version}");
        }
    }
}
