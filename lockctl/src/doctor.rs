//! `doctor`: a look at every configured store, before it matters.

use std::{fmt::Write as _, time::Duration};

use lockcore::{
    ClientOptions, LockClient,
    backend::{Capabilities, Consistency, FenceSource, Preflight},
    config::{BackendConfig, BridgeConfig, Config, Demands, RiskConfig},
    migrate::{Bridge, Migration},
};
use serde_json::{Value, json};

use crate::{
    cli::{Doctor, StoreArgs},
    exit,
    failure::{Failure, with_sources},
    file,
    store::{self, Surroundings, Written, bridge_shown, registry},
    voice::{Voice, millis, print},
};

/// So long a store may take for all its answers together.
const PATIENCE: Duration = Duration::from_secs(20);

/// One store or bridge, and the levels that stand on it.
struct Patient {
    name: Option<String>,
    place: Place,
    shown: String,
    namespace: String,
    levels: Vec<(String, RiskConfig)>,
}

/// What a level stands on.
enum Place {
    Store(BackendConfig),
    Bridge { bridge: BridgeConfig, from: BackendConfig, to: BackendConfig },
}

/// What a look came to.
struct Found {
    patient: Patient,
    looked: Result<Look, Failure>,
}

struct Look {
    preflight: Preflight,
    /// Why nobody can start in the phase that the file names.
    closed: Option<String>,
}

/// Looks at all stores at the same time, and says of each what was found.
pub(crate) async fn main(options: &Doctor, written: Written, voice: &Voice) -> Result<u8, Failure> {
    let mut looks = tokio::task::JoinSet::new();
    for (place, patient) in patients(&options.store, written)?.into_iter().enumerate() {
        looks.spawn(async move { (place, look(patient).await) });
    }
    let mut all = Vec::new();
    while let Some(looked) = looks.join_next().await {
        all.push(looked.map_err(|error| Failure::usage(error.to_string()))?);
    }
    all.sort_by_key(|(place, _)| *place);
    let all: Vec<Found> = all.into_iter().map(|(_, found)| found).collect();
    let code = all.iter().map(Found::code).max_by_key(|code| rank(*code)).unwrap_or(0);
    if voice.is_json() {
        let stores: Vec<Value> = all.iter().map(Found::to_json).collect();
        print(&format!("{}\n", json!({ "schema": "lockctl/doctor/1", "code": code, "stores": stores })))?;
    } else {
        let texts: Vec<String> = all.iter().map(|found| found.to_text(voice)).collect();
        print(&texts.join("\n"))?;
    }
    Ok(code)
}

/// What is certainly wrong comes before what could not be seen.
fn rank(code: u8) -> u8 {
    match code {
        0 => 0,
        exit::UNAVAILABLE => 1,
        _ => 2,
    }
}

/// Lists the stores: the one that an option names, or all of the file, or the one that a run would take.
fn patients(args: &StoreArgs, written: Written) -> Result<Vec<Patient>, Failure> {
    let named = args.store.as_ref().is_some_and(|url| !url.is_empty());
    let level = args.risk.as_ref().filter(|risk| !risk.is_empty());
    let path = if named || level.is_some() { None } else { file::find(args, store::variable) };
    let Some(path) = path else {
        let chosen = store::choose(args, written, &Surroundings::of_this_process())?;
        let shown = chosen.shown();
        let of_bridge = chosen.bridge.as_ref().zip(chosen.file.as_ref());
        let place = of_bridge.and_then(|(name, file)| bridge_of(&file.config, name));
        return Ok(vec![Patient {
            name: None,
            place: place.unwrap_or(Place::Store(chosen.backend)),
            shown,
            namespace: chosen.namespace,
            levels: chosen.level.into_iter().collect(),
        }]);
    };
    let file = file::load(&path, &registry())?;
    let namespace = args.namespace.clone().unwrap_or_else(|| file.config.namespace.clone());
    let of = |name: &String, place: Place, shown: String| Patient {
        name: Some(name.clone()),
        place,
        shown,
        namespace: namespace.clone(),
        levels: file
            .config
            .risk
            .iter()
            .filter(|(_, level)| level.backend == *name)
            .map(|(name, level)| (name.clone(), level.clone()))
            .collect(),
    };
    let config = &file.config;
    let stores =
        config.backend.iter().map(|(n, store)| of(n, Place::Store(store.clone()), store.url.to_string()));
    let bridges =
        config.bridge.keys().filter_map(|n| Some(of(n, bridge_of(config, n)?, bridge_shown(n, config))));
    Ok(stores.chain(bridges).collect())
}

fn bridge_of(config: &Config, name: &str) -> Option<Place> {
    let bridge = config.bridge.get(name)?;
    let (from, to) = (config.backend.get(&bridge.from)?, config.backend.get(&bridge.to)?);
    Some(Place::Bridge { bridge: bridge.clone(), from: from.clone(), to: to.clone() })
}

async fn look_at(patient: &Patient) -> lockcore::Result<Look> {
    let options = ClientOptions::default().with(|o| o.namespace = patient.namespace.clone());
    let registry = registry();
    let (bridge, from, to) = match &patient.place {
        Place::Store(store) => {
            let backend = registry.connect(store).await?;
            let preflight = LockClient::with_options(backend.clone(), options).preflight().await;
            backend.close().await;
            return Ok(Look { preflight: preflight?, closed: None });
        }
        Place::Bridge { bridge, from, to } => (bridge, from, to),
    };
    let name = patient.levels.first().map(|(_, level)| &level.backend).or(patient.name.as_ref());
    let name = name.map_or("", String::as_str);
    let (from, to) = (registry.connect(from).await?, registry.connect(to).await?);
    let mut joined = Bridge::new(name, bridge.phase, from.clone(), to.clone())?;
    if let Some(ttl) = bridge.membership {
        joined = joined.with_membership(ttl)?;
    }
    let (_, call) = LockClient::with_options(from.clone(), options).backend()?;
    let looked = async {
        // Looked at and not joined: a member would hold up the operator's step.
        let mut preflight = joined.look(&call).await?;
        let stage = Migration::new(name, from.clone(), to.clone())?.status(&call).await?.stage;
        let mut closed = (!stage.open().contains(&bridge.phase)).then(|| {
            let phase = bridge.phase.as_str();
            format!("the phase `{phase}` is not open: the migration is at {stage}; see lockctl migrate status {name}")
        });
        if patient.levels.is_empty() {
            preflight.findings.extend(closed.take());
        }
        Ok(Look { preflight, closed })
    };
    let looked = looked.await;
    from.close().await;
    to.close().await;
    looked
}

async fn look(patient: Patient) -> Found {
    let shown = patient.shown.clone();
    let looked = tokio::time::timeout(PATIENCE, async {
        look_at(&patient).await.map_err(|error| {
            Failure::new(exit::of_error(&error), format!("{} (store {shown})", with_sources(&error)))
        })
    });
    let looked = looked.await.unwrap_or_else(|_| {
        Err(Failure::new(
            exit::UNAVAILABLE,
            format!("no answer within {} s (store {shown})", PATIENCE.as_secs()),
        ))
    });
    Found { patient, looked }
}

impl Found {
    /// Says what each level lacks here; nothing, where the store was not seen.
    fn levels(&self) -> Vec<(&str, Vec<String>)> {
        let Ok(found) = &self.looked else { return Vec::new() };
        let misses = |(name, level): &(String, RiskConfig)| {
            let mut misses = Demands::of(name, level).misses(&found.preflight.capabilities);
            misses.extend(found.closed.clone());
            misses
        };
        self.patient.levels.iter().map(|level| (level.0.as_str(), misses(level))).collect()
    }

    fn code(&self) -> u8 {
        match &self.looked {
            Err(failure) => failure.code,
            Ok(_) if self.levels().iter().any(|(_, misses)| !misses.is_empty()) => exit::REFUSED,
            Ok(_) => 0,
        }
    }

    fn to_json(&self) -> Value {
        let found = self.looked.as_ref().ok().map(|looked| &looked.preflight);
        let levels: Vec<Value> = self
            .patient
            .levels
            .iter()
            .map(|(name, _)| {
                let misses = self.levels().into_iter().find(|(level, _)| level == name).map(|(_, m)| m);
                json!({ "level": name, "kept": misses.as_ref().map(Vec::is_empty), "misses": misses })
            })
            .collect();
        json!({
            "name": self.patient.name,
            "store": self.patient.shown,
            "namespace": self.patient.namespace,
            "code": self.code(),
            "error": self.looked.as_ref().err().map(|failure| &failure.sentence),
            "server": found.and_then(|found| found.server.as_ref()),
            "findings": found.map(|found| &found.findings),
            "promises": found.map(|found| promises(&found.capabilities)),
            "levels": levels,
        })
    }

    fn to_text(&self, voice: &Voice) -> String {
        let mut text = String::new();
        let url = &self.patient.shown;
        // What a bridge is called is a part of what is shown of it.
        let title = match (&self.patient.name, &self.patient.place) {
            (Some(name), Place::Store(_)) => format!("{name}: {url}"),
            _ => url.clone(),
        };
        // Writing to a string does not fail.
        let _ = writeln!(text, "{}", voice.bold(&title));
        let found = match &self.looked {
            Err(failure) => {
                let sentence = failure.sentence.trim_end_matches(&format!(" (store {url})")).to_owned();
                let word = if failure.code == exit::UNAVAILABLE { "unreachable" } else { "refused" };
                let _ = writeln!(text, "  {word:<10} {sentence}");
                return text;
            }
            Ok(found) => &found.preflight,
        };
        let _ = writeln!(text, "  {:<10} {}", "server", found.server.as_deref().unwrap_or("(does not say)"));
        let _ = writeln!(text, "  {:<10} {}", "promises", sentence(&found.capabilities));
        for finding in &found.findings {
            let _ = writeln!(text, "  {:<10} {finding}", "finding");
        }
        if found.findings.is_empty() {
            let _ = writeln!(text, "  {:<10} nothing to put right", "findings");
        }
        for (level, misses) in self.levels() {
            if misses.is_empty() {
                let _ = writeln!(text, "  {:<10} {level}: kept", "level");
            }
            for miss in misses {
                let _ = writeln!(text, "  {:<10} {level}: {}: {miss}", "level", voice.bold("not kept"));
            }
        }
        text
    }
}

fn survives(has: &Capabilities) -> Vec<&'static str> {
    let survives = has.survives;
    [
        ("restart", survives.restart),
        ("failover", survives.failover),
        ("clock-step", survives.clock_step),
        ("pause", survives.pause),
    ]
    .into_iter()
    .filter_map(|(what, kept)| kept.then_some(what))
    .collect()
}

fn consistency(has: &Capabilities) -> &'static str {
    match has.consistency {
        Consistency::Process => "process",
        Consistency::Replicated => "replicated",
        Consistency::SingleServer => "single-server",
        Consistency::Linearizable => "linearizable",
        _ => "unknown",
    }
}

fn fence(has: &Capabilities) -> &'static str {
    match has.fence {
        FenceSource::Volatile => "volatile",
        FenceSource::ClockBounded => "clock-bounded",
        FenceSource::Durable => "durable",
        _ => "unknown",
    }
}

fn promises(has: &Capabilities) -> Value {
    json!({
        "consistency": consistency(has),
        "fence": fence(has),
        "fair": has.fair,
        "survives": survives(has),
        "ttl_least_ms": millis(*has.ttl.start()),
        "ttl_most_ms": millis(*has.ttl.end()),
    })
}

/// Says what stands after the look.
fn sentence(has: &Capabilities) -> String {
    let survives = survives(has);
    let survives = if survives.is_empty() { "nothing".into() } else { survives.join(", ") };
    format!("{} store, {} fence; a held lock outlives: {survives}", consistency(has), fence(has))
}
