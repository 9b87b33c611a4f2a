//! `migrate`: moves locks from one store to another, a stage at a time.

use std::{
    fs::OpenOptions,
    io::Write as _,
    path::Path,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use lockcore::{
    ClientOptions, ErrorKind, LockClient,
    backend::{Call, LockBackend, Member},
    config::BackendConfig,
    migrate::{Migration, Side, Stage, Status},
    text::show_label,
};
use serde_json::{Value, json};

use crate::{
    cli::{Migrate, MigrateArgs, MigrateCommand, MigrateStep, StoreArgs},
    duration::{Wait, show},
    exit,
    failure::Failure,
    file,
    run::default_label,
    store::{bridge_shown, registry, url_of_option, variable},
    voice::{Voice, millis, print},
};

/// The stores tell nobody who leaves a phase: so often it is looked at while a step waits.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// Shows where a migration stands, or takes a step.
pub(crate) async fn main(options: &Migrate, voice: &Voice) -> Result<u8, Failure> {
    match &options.command {
        MigrateCommand::Plan(which) => Opened::new(which).await?.plan(voice).await,
        MigrateCommand::Status(which) => Opened::new(which).await?.status(voice).await,
        MigrateCommand::Advance(step) => Opened::new(&step.which).await?.step(step, true, voice).await,
        MigrateCommand::Rollback(step) => Opened::new(&step.which).await?.step(step, false, voice).await,
    }
}

/// Both stores of a bridge, opened.
struct Opened {
    migration: Migration,
    stores: [(Side, String, Arc<dyn LockBackend>); 2],
    client: LockClient,
    namespace: String,
    shown: String,
}

/// What is opened: from a file, or from the command line.
struct Chosen {
    name: String,
    from: BackendConfig,
    to: BackendConfig,
    namespace: String,
    shown: String,
}

impl Chosen {
    fn new(which: &MigrateArgs) -> Result<Self, Failure> {
        match (&which.from, &which.to, &which.bridge, &which.namespace) {
            (Some(from), Some(to), Some(name), Some(namespace)) => {
                let (from, to) = (url_of_option("--from", from)?, url_of_option("--to", to)?);
                let shown = format!("bridge {name} from {from} to {to}");
                let (from, to) = (BackendConfig::new(from), BackendConfig::new(to));
                Ok(Self { name: name.clone(), from, to, namespace: namespace.clone(), shown })
            }
            _ => Self::of_file(which),
        }
    }

    fn of_file(which: &MigrateArgs) -> Result<Self, Failure> {
        let args = StoreArgs {
            store: None,
            risk: None,
            config: which.config.clone(),
            namespace: None,
            user: None,
            password_file: None,
        };
        let registry = registry();
        let path = file::find(&args, variable).ok_or_else(|| {
            Failure::usage(
                "a bridge is looked up in a configuration file, and there is none; name one with --config",
            )
        })?;
        let file = file::load(&path, &registry)?;
        let bridges = &file.config.bridge;
        let all = || bridges.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
        let (name, bridge) = match &which.bridge {
            Some(name) => bridges.get_key_value(name).ok_or_else(|| {
                Failure::usage(format!("{} has no bridge {name:?}; it has {}", path.display(), all()))
            })?,
            None => match (bridges.len(), bridges.first_key_value()) {
                (1, Some(only)) => only,
                (0, _) => return Err(Failure::usage(format!("{} has no bridge", path.display()))),
                _ => {
                    return Err(Failure::usage(format!(
                        "{} has several bridges; name one: {}",
                        path.display(),
                        all()
                    )));
                }
            },
        };
        // A file with a name that leads nowhere has been refused.
        let store = |store: &str| file.config.backend[store].clone();
        Ok(Self {
            name: name.clone(),
            from: store(&bridge.from),
            to: store(&bridge.to),
            namespace: which.namespace.clone().unwrap_or_else(|| file.config.namespace.clone()),
            shown: bridge_shown(name, &file.config),
        })
    }
}

impl Opened {
    async fn new(which: &MigrateArgs) -> Result<Self, Failure> {
        let Chosen { name, from, to, namespace, shown } = Chosen::new(which)?;
        let registry = registry();
        let open = async |side: Side, backend: &BackendConfig| {
            let opened = registry.connect(backend).await.map_err(|e| Failure::store(&e, &backend.url))?;
            Ok::<_, Failure>((side, backend.url.to_string(), opened))
        };
        let stores = [open(Side::From, &from).await?, open(Side::To, &to).await?];
        let migration = Migration::new(&name, stores[0].2.clone(), stores[1].2.clone())
            .map_err(|error| Failure::usage(error.message().to_owned()))?;
        let options = ClientOptions::default().with(|o| {
            o.namespace.clone_from(&namespace);
            o.label = Some(default_label().into());
        });
        let client = LockClient::with_options(stores[0].2.clone(), options);
        Ok(Self { migration, stores, client, namespace, shown })
    }

    fn call(&self) -> Result<Call, Failure> {
        self.client.backend().map(|(_, call)| call).map_err(|error| self.failure(&error))
    }

    fn failure(&self, error: &lockcore::Error) -> Failure {
        Failure::store(error, &self.shown)
    }

    async fn look(&self) -> Result<Status, Failure> {
        self.migration.status(&self.call()?).await.map_err(|error| self.failure(&error))
    }

    async fn status(&self, voice: &Voice) -> Result<u8, Failure> {
        let status = self.look().await?;
        if voice.is_json() {
            print(&format!("{}\n", self.json(&status)))?;
            return Ok(0);
        }
        let settled = if status.settled { "" } else { ", a step is under way" };
        let mut text = format!(
            "{} (namespace {}): {}{settled}\n",
            self.migration.name(),
            if self.namespace.is_empty() { "(none)" } else { &self.namespace },
            voice.bold(status.stage.as_str())
        );
        for (side, url, _) in &self.stores {
            let floor = match side {
                Side::From => status.floor_from,
                Side::To => status.floor_to,
            };
            let floor = floor.map_or("(none)".into(), |floor| floor.to_string());
            text += &format!("  {:<6} {url}, floor {floor}\n", word(*side));
        }
        for line in members(&status.members) {
            text += &format!("  {line}\n");
        }
        if status.members.is_empty() {
            text += "  nobody is in any phase\n";
        }
        for (what, goal) in [("advance", status.forward()), ("rollback", status.backward())] {
            if let Some(goal) = goal {
                let way = status.in_the_way(goal).count();
                let way = if way == 0 { String::new() } else { format!(", {way} in the way") };
                text += &format!("  {what:<8} leads to {goal}{way}\n");
            }
        }
        print(&text)?;
        Ok(0)
    }

    async fn plan(&self, voice: &Voice) -> Result<u8, Failure> {
        let status = self.look().await?;
        let call = self.call()?;
        let mut findings = Vec::new();
        let mut ttl = Duration::ZERO..=Duration::MAX;
        for (side, url, store) in &self.stores {
            let found = store.preflight(&call).await.map_err(|error| Failure::store(&error, url))?;
            findings.extend(found.findings.iter().map(|finding| format!("{}: {finding}", word(*side))));
            let has = found.capabilities;
            if !has.fence_floor {
                findings.push(format!("{}: honours no fence floor, so locks cannot move", word(*side)));
            }
            ttl = (*ttl.start()).max(*has.ttl.start())..=(*ttl.end()).min(*has.ttl.end());
        }
        let stages = [Stage::From, Stage::FromBoth, Stage::Both, Stage::BothTo, Stage::To];
        if voice.is_json() {
            let mut whole = self.json(&status);
            whole["schema"] = "lockctl/migrate-plan/1".into();
            whole["ttl_ms"] = json!([millis(*ttl.start()), millis(*ttl.end())]);
            whole["findings"] = json!(findings);
            whole["stages"] = stages
                .iter()
                .map(|stage| {
                    let open: Vec<&str> = stage.open().iter().map(|phase| phase.as_str()).collect();
                    let state = state(&status, *stage);
                    json!({ "stage": stage.as_str(), "open": open, "state": state, "then": then(*stage, true) })
                })
                .collect();
            print(&format!("{whole}\n"))?;
            return Ok(0);
        }
        let mut text = format!("{}\n", self.shown);
        for stage in stages {
            let mark = state(&status, stage);
            let name = if stage == status.stage { voice.bold(stage.as_str()) } else { stage.to_string() };
            let pad = " ".repeat(9 - stage.as_str().len());
            text += &format!("  {mark:<5} {name}{pad} {}\n", then(stage, true));
            for line in members_in_the_way(&status, stage) {
                text += &format!("        in the way: {line}\n");
            }
        }
        text += &format!("TTLs from {} to {} suit both stores\n", show(*ttl.start()), show(*ttl.end()));
        for finding in &findings {
            text += &format!("{finding}\n");
        }
        print(&text)?;
        Ok(0)
    }

    async fn step(&self, options: &MigrateStep, forward: bool, voice: &Voice) -> Result<u8, Failure> {
        let before = self.look().await?;
        let goal = if forward { before.forward() } else { before.backward() };
        let Some(goal) = goal else {
            let end = if forward { "there is nothing beyond it" } else { "there is nothing before it" };
            return Err(Failure::usage(format!("the migration is at {}; {end}", before.stage)));
        };
        if options.dry_run {
            return self.rehearse(&before, goal, voice);
        }
        let wait = options.wait.unwrap_or(Wait::No);
        let end = match wait {
            Wait::No => Some(Instant::now()),
            Wait::For(budget) => Instant::now().checked_add(budget),
            Wait::Forever => None,
        };
        let after = loop {
            match self.migration.step(&self.call()?, goal).await {
                Ok(after) => break after,
                Err(error) if error.kind() == ErrorKind::Held => {
                    if !self.until_clear(goal, end, voice).await? {
                        let code = if wait == Wait::No { exit::BUSY } else { exit::TIMED_OUT };
                        return Err(Failure::new(
                            code,
                            format!(
                                "{}; what closes is closed, and `advance` goes on from here as `rollback` undoes it ({})",
                                error.message(),
                                self.shown
                            ),
                        ));
                    }
                }
                Err(error) => return Err(self.failure(&error)),
            }
        };
        let record = json!({
            "schema": "lockctl/migrate-step/1",
            "at": humantime::format_rfc3339_millis(SystemTime::now()).to_string(),
            "by": default_label(),
            "reason": options.reason,
            "bridge": self.migration.name(),
            "namespace": self.namespace,
            "from": self.stores[0].1,
            "to": self.stores[1].1,
            "before": before.stage.as_str(),
            "after": after.stage.as_str(),
            "epoch": after.epoch.to_string(),
            "floor_from": after.floor_from.map(|floor| floor.to_string()),
            "floor_to": after.floor_to.map(|floor| floor.to_string()),
        });
        // Taken is taken: a file that cannot be written does not make the step undone.
        let kept = options.record.as_ref().map(|path| append(path, &record));
        if voice.is_json() {
            print(&format!("{record}\n"))?;
        } else {
            print(&format!(
                "{} -> {}\n{}\n",
                before.stage,
                voice.bold(after.stage.as_str()),
                then(after.stage, forward)
            ))?;
        }
        match (kept, &options.record) {
            (Some(Err(error)), Some(path)) => Err(Failure::usage(format!(
                "the step was taken, and its record could not be written to {}: {error}",
                path.display()
            ))),
            _ => Ok(0),
        }
    }

    /// Looks until nobody is in the way of a goal any more; says whether that came in time.
    async fn until_clear(&self, goal: Stage, end: Option<Instant>, voice: &Voice) -> Result<bool, Failure> {
        let mut told = Vec::new();
        loop {
            let status = self.look().await?;
            let way = members(&status.in_the_way(goal).cloned().collect::<Vec<_>>());
            if way.is_empty() {
                return Ok(true);
            }
            let left = end.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Ok(false);
            }
            let who: Vec<_> = status.in_the_way(goal).map(|(side, member)| (*side, member.owner)).collect();
            if told != who {
                voice.progress(format_args!("waiting for {goal}: {}", way.join(", ")));
                told = who;
            }
            tokio::time::sleep(LOOK_AGAIN.min(left)).await;
        }
    }

    fn rehearse(&self, before: &Status, goal: Stage, voice: &Voice) -> Result<u8, Failure> {
        let way: Vec<String> = members_in_the_way(before, goal);
        if voice.is_json() {
            let mut whole = self.json(before);
            whole["schema"] = "lockctl/migrate-dry-run/1".into();
            whole["goal"] = goal.as_str().into();
            whole["in_the_way"] = json!(way);
            print(&format!("{whole}\n"))?;
        } else {
            let mut text = format!("would go from {} to {goal}; nothing was changed\n", before.stage);
            for line in &way {
                text += &format!("  in the way: {line}\n");
            }
            print(&text)?;
        }
        Ok(if way.is_empty() { 0 } else { exit::BUSY })
    }

    fn json(&self, status: &Status) -> Value {
        json!({
            "schema": "lockctl/migrate/1",
            "bridge": self.migration.name(),
            "namespace": self.namespace,
            "from": self.stores[0].1,
            "to": self.stores[1].1,
            "stage": status.stage.as_str(),
            "settled": status.settled,
            "epoch": status.epoch.to_string(),
            "floor_from": status.floor_from.map(|floor| floor.to_string()),
            "floor_to": status.floor_to.map(|floor| floor.to_string()),
            "forward": status.forward().map(Stage::as_str),
            "backward": status.backward().map(Stage::as_str),
            "members": status.members.iter().map(|(side, member)| json!({
                "at": word(*side),
                "phase": member.phase,
                "owner": member.owner.to_string(),
                "label": member.label,
                "remaining_ms": member.remaining.map(millis),
            })).collect::<Vec<_>>(),
        })
    }
}

fn append(path: &Path, record: &Value) -> std::io::Result<()> {
    OpenOptions::new().create(true).append(true).open(path)?.write_all(format!("{record}\n").as_bytes())
}

fn word(side: Side) -> &'static str {
    match side {
        Side::From => "from",
        Side::To => "to",
    }
}

fn state(status: &Status, stage: Stage) -> &'static str {
    match stage.cmp(&status.stage) {
        std::cmp::Ordering::Less => "done",
        std::cmp::Ordering::Equal if status.settled => "here",
        std::cmp::Ordering::Equal => "begun",
        std::cmp::Ordering::Greater => "",
    }
}

/// Says what to do once a stage is reached, before the next step in the same direction.
fn then(stage: Stage, forward: bool) -> &'static str {
    match (stage, forward) {
        (Stage::From, true) => {
            "restart everything with phase = \"from\"; nothing may be left that uses the old store without the bridge"
        }
        (Stage::FromBoth, true) | (Stage::BothTo, false) => "restart everything with phase = \"both\"",
        (Stage::Both, true) => "nobody is in `from` any more; step on",
        (Stage::BothTo, true) => "restart everything with phase = \"to\"",
        (Stage::To, _) => "the move is over; the levels may name the new store itself",
        (Stage::Both, false) => "nobody is in `to` any more; step back further",
        (Stage::FromBoth, false) => "restart everything with phase = \"from\"",
        (Stage::From, false) => "nobody is in `both` any more; the levels may name the old store itself",
        _ => "",
    }
}

/// Writes members a line each; one process has a seat at each store that its phase uses.
fn members(all: &[(Side, Member)]) -> Vec<String> {
    all.iter()
        .map(|(side, member)| {
            let label = member.label.as_deref().unwrap_or("(no label)");
            let left = member.remaining.map_or(String::new(), |left| format!(", {} left", show(left)));
            format!("{:<5} {} ({}) at {}{left}", member.phase, show_label(label), member.owner, word(*side))
        })
        .collect()
}

fn members_in_the_way(status: &Status, goal: Stage) -> Vec<String> {
    let near = status.forward() == Some(goal) || status.backward() == Some(goal);
    if !near {
        return Vec::new();
    }
    members(&status.in_the_way(goal).cloned().collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use lockcore::migrate::Phase;

    use super::*;

    #[test]
    fn each_direction_is_told_its_own_next_thing_to_do() {
        assert!(then(Stage::FromBoth, true).contains("phase = \"both\""));
        assert!(then(Stage::BothTo, true).contains("phase = \"to\""));
        assert!(then(Stage::BothTo, false).contains("phase = \"both\""));
        assert!(then(Stage::Both, false).contains("in `to`"));
        assert!(then(Stage::FromBoth, false).contains("phase = \"from\""));
        assert!(then(Stage::From, false).contains("old store"));
    }

    #[test]
    fn every_stage_but_the_first_says_what_is_to_be_done() {
        for stage in [Stage::From, Stage::FromBoth, Stage::Both, Stage::BothTo, Stage::To] {
            assert!(!then(stage, true).is_empty() && !then(stage, false).is_empty());
            assert!(stage.as_str().len() <= 9, "the plan's column is too narrow for {stage}");
        }
        assert_eq!(Stage::To.next(), None);
        assert_eq!(Stage::From.open(), [Phase::From]);
    }
}
