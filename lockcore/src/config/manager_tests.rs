use std::{sync::Arc, time::Duration};

use super::{tests::Paper, *};
use crate::{
    Attempt, Entry, ErrorKind, EventKind, LockClient, RenewalHome,
    backend::Call,
    backend::{Consistency, FenceSource, LockBackend, async_trait},
    client::ClientOptions,
    error::{Error, Result},
    memory::MemoryBackend,
    migrate::{Migration, Stage},
    sync::LockExt,
};

fn read(text: &str) -> Config {
    toml::from_str(text).unwrap_or_else(|e| panic!("{text}\n{e}"))
}

fn strong() -> MemoryBackend {
    MemoryBackend::default().promising(|c| {
        c.consistency = Consistency::Linearizable;
        c.fence = FenceSource::Durable;
        c.survives.restart = true;
        c.survives.failover = true;
    })
}

/// A store that is away until it is told otherwise.
#[derive(Clone, Default)]
struct Absent {
    store: Arc<std::sync::Mutex<Option<MemoryBackend>>>,
}

#[async_trait]
impl Connector for Absent {
    fn schemes(&self) -> &'static [&'static str] {
        &["absent"]
    }
    async fn connect(&self, _config: &BackendConfig) -> Result<Arc<dyn LockBackend>> {
        match &*self.store.grab() {
            Some(store) => Ok(Arc::new(store.clone())),
            None => Err(Error::new(ErrorKind::Unavailable, "connection refused")),
        }
    }
}

async fn start_error(text: &str, registry: &Registry) -> Error {
    match LockManager::start(&read(text), registry).await {
        Ok(_) => panic!("started:\n{text}"),
        Err(error) => error,
    }
}

#[tokio::test]
async fn a_store_that_does_not_meet_its_level_is_refused_with_all_that_is_missing() {
    let text = "namespace='x'\nbackend.c='memory://'\n[risk.critical]\nbackend='c'\nmax-hold='5m'\n";
    let error = start_error(text, &Registry::new().with(Memory::new())).await;
    assert_eq!(error.kind(), ErrorKind::Misconfigured);
    assert!(
        error.to_string().starts_with(
            "risk level \"critical\" on backend \"c\": consistency: needs Linearizable, has Process; fence: needs \
             Durable, has Volatile; must survive a server restart, does not; must survive a failover, does not"
        ),
        "{error}"
    );
}

#[tokio::test]
async fn every_level_that_is_refused_is_named() {
    let memory = Memory::new();
    let text = "namespace='x'\n[backend]\nc='memory://'\nd='paper://h'\n\
                [risk.critical]\nbackend='c'\nmax-hold='5m'\n[risk.guarded]\nbackend='d'\nmax-hold='5m'\n\
                [risk.efficiency]\nbackend='c'\n[risk.long]\nbackend='c'\nttl='2d'\n";
    let error = start_error(text, &Registry::new().with(memory).with(Paper(&["paper"]))).await;
    assert_eq!(error.kind(), ErrorKind::Misconfigured, "a mistake weighs more than a store that is away");
    let said = error.to_string();
    assert!(said.contains("risk level \"critical\" on backend \"c\": consistency"), "{said}");
    assert!(
        said.contains("risk level \"guarded\" on backend \"d\": connect to paper: it is made of paper"),
        "{said}"
    );
    assert!(
        said.contains("risk level \"long\" on backend \"c\": ttl: needs 2d, accepts 1ms to 1d"),
        "{said}"
    );
    assert!(!said.contains("efficiency"), "{said}");
}

#[tokio::test]
async fn problems_refuse_the_start_before_anything_is_connected() {
    let error = start_error("namespace='x'\n[risk.critical]\nbackend='etcd'\n", &Registry::new()).await;
    assert_eq!(
        error.to_string(),
        "risk.critical.backend: \"etcd\" is not defined; have none; risk.critical.max-hold: is required at this level"
    );
}

#[tokio::test]
async fn a_level_is_a_client_with_the_numbers_of_the_file() {
    let memory = Memory::new();
    memory.insert("s", strong());
    let text = "namespace='shop'\n[backend]\nc='memory://cache'\ns='memory://s'\n\
                [risk.efficiency]\nbackend='c'\nwhen-unavailable='allow-open'\nttl='7s'\nwait='1s'\n\
                [risk.critical]\nbackend='s'\nmax-hold='5m'\nttl='15s'\nstop-margin='2s'\n\
                [lock.'payout/*']\nttl='3s'\nmax-hold='2m'\nlock-delay='5s'\nstop-margin='1s'\nwait='4s'\n";
    let options = ClientOptions::default().with(|o| o.label = Some("shop-1".into()));
    let manager =
        LockManager::start_with(&read(text), &Registry::new().with(memory.clone()), options).await.unwrap();
    let options = |client: &LockClient| client.inner.options.clone();

    let cache = options(&manager.level("efficiency").unwrap());
    assert_eq!(
        (cache.ttl, cache.wait, cache.max_hold),
        (Duration::from_secs(7), Duration::from_secs(1), None)
    );
    assert!(cache.allow_open && !cache.warn_unused_fence);
    assert_eq!((cache.renewal, cache.label.as_deref()), (RenewalHome::Shared, Some("shop-1")));

    let critical = manager.level("critical").unwrap();
    let set = options(&critical);
    assert_eq!(set.namespace, "shop");
    assert_eq!((set.ttl, set.stop_margin), (Duration::from_secs(15), Duration::from_secs(2)));
    assert_eq!(set.max_hold, Some(Duration::from_secs(300)));
    assert!(!set.allow_open && set.warn_unused_fence);
    assert_eq!(set.renewal, RenewalHome::OwnThread);

    let shown = format!("{:?}", critical.named("payout/7"));
    for number in ["ttl: 3s", "max_hold: Some(120s)", "delay: 5s", "margin: 1s", "wait: For(4s)"] {
        assert!(shown.contains(number), "{number} in {shown}");
    }
    let shown = format!("{:?}", critical.named("payout/7").ttl(Duration::from_secs(9)));
    assert!(shown.contains("ttl: 9s"), "the code has the last word: {shown}");
    assert!(format!("{:?}", critical.named("refund/7")).contains("ttl: 15s"));

    let guard = critical.named("payout/7").acquire().await.unwrap();
    let lock = LockName::parse("payout/7").unwrap();
    let on_record = memory.store("s").holder(&lock, crate::backend::BootClock::read());
    assert!(on_record.is_some(), "the level's store is the one of its URL");
    guard.release().await.unwrap();
    manager.close().await;
    let error = critical.named("payout/7").acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
}

#[tokio::test]
async fn levels_of_one_registry_share_a_store_and_not_a_connection() {
    let text = "namespace='x'\nbackend.c='memory://c'\n[risk.a]\nbackend='c'\n[risk.b]\nbackend='c'\n";
    let manager = LockManager::start(&read(text), &Registry::new().with(Memory::new())).await.unwrap();
    let (a, b) = (manager.level("a").unwrap(), manager.level("b").unwrap());
    let guard = a.named("n").acquire().await.unwrap();
    assert!(matches!(b.named("n").try_acquire().await.unwrap(), Attempt::Busy(Some(_))));
    drop(guard);
    a.close().await;
    assert!(matches!(b.named("n").try_acquire().await.unwrap(), Attempt::Granted(_)), "b lives on");
    manager.close().await;
}

#[tokio::test]
async fn a_strict_level_does_not_start_without_its_store() {
    let text = "namespace='x'\nbackend.c='absent://h'\n[risk.efficiency]\nbackend='c'\n";
    let error = start_error(text, &Registry::new().with(Absent::default())).await;
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(error.to_string().contains("\"c\": connect to absent: connection refused"), "{error}");
}

#[tokio::test]
async fn a_lazy_level_starts_without_its_store_and_finds_it_later() {
    let absent = Absent::default();
    let text = "namespace='x'\nbackend.c='absent://h'\n[risk.efficiency]\nbackend='c'\nstart='lazy'\nwait='50ms'\n\
                when-unavailable='allow-open'\n";
    let manager = LockManager::start(&read(text), &Registry::new().with(absent.clone())).await.unwrap();
    let client = manager.level("efficiency").unwrap();
    let error = client.named("n").acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(matches!(client.named("n").acquire_or_open().await.unwrap(), Entry::Open(_)));

    *absent.store.grab() = Some(MemoryBackend::default());
    let mut events = client.events();
    let guard = client.named("n").acquire().await.unwrap();
    assert!(matches!(events.next().await.unwrap().kind, EventKind::AcquireStarted { .. }));
    let error = client.named("m").ttl(Duration::from_secs(2 * 86_400)).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "the real range holds once it is known: {error}");
    guard.release().await.unwrap();
    manager.close().await;
}

#[tokio::test]
async fn a_lazy_level_refuses_a_store_that_turns_out_too_weak() {
    let absent = Absent::default();
    let text = "namespace='x'\nbackend.c='absent://h'\n[risk.own]\nbackend='c'\nstart='lazy'\n\
                require={ fence='durable' }\n";
    let manager = LockManager::start(&read(text), &Registry::new().with(absent.clone())).await.unwrap();
    *absent.store.grab() = Some(MemoryBackend::default());
    let error = manager.level("own").unwrap().named("n").acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Misconfigured);
    assert!(error.to_string().contains("fence: needs Durable, has Volatile"), "{error}");
    manager.close().await;
}

fn moving(phase: &str) -> String {
    format!(
        "namespace='shop'\n[backend]\nold='memory://old'\nnew='memory://new'\n\
         [bridge.moving]\nfrom='old'\nto='new'\nphase='{phase}'\n\
         [risk.own]\nbackend='moving'\nttl='20s'\n"
    )
}

async fn begin(memory: &Memory) -> (Migration, Call) {
    let stores = ["old", "new"].map(|name| Arc::new(memory.store(name)) as Arc<dyn LockBackend>);
    let [old, new] = stores.clone();
    let migration = Migration::new("moving", old.clone(), new).unwrap();
    let options = ClientOptions::default().with(|o| o.namespace = "shop".into());
    let (_, call) = LockClient::with_options(old, options).backend().unwrap();
    migration.step(&call, Stage::From).await.unwrap();
    (migration, call)
}

#[tokio::test]
async fn a_level_on_a_bridge_starts_in_an_open_phase_and_in_no_other() {
    let memory = Memory::new();
    let registry = Registry::new().with(memory.clone());
    let error = start_error(&moving("from"), &registry).await;
    assert_eq!(error.kind(), ErrorKind::Misconfigured);
    assert!(error.to_string().contains("lockctl migrate advance moving"), "{error}");

    let (migration, call) = begin(&memory).await;
    let manager = LockManager::start(&read(&moving("from")), &registry).await.unwrap();
    let guard = manager.level("own").unwrap().named("x").acquire().await.unwrap();
    let members = migration.status(&call).await.unwrap().members;
    let here = format!(":{}", std::process::id());
    assert!(members.len() == 1 && members[0].1.label.as_ref().unwrap().ends_with(&here), "{members:?}");
    guard.release().await.unwrap();
    manager.close().await;
    assert!(migration.status(&call).await.unwrap().members.is_empty(), "closing left no trace of leaving");
    let error = start_error(&moving("to"), &registry).await;
    assert!(error.to_string().contains("the phase `to` of the migration \"moving\" is not open"), "{error}");
}

#[tokio::test]
async fn a_level_is_compared_with_the_weaker_side_of_its_bridge() {
    let memory = Memory::new();
    memory.insert("new", strong());
    let (migration, call) = begin(&memory).await;
    let registry = Registry::new().with(memory);
    let text = moving("from").replace("[risk.own]", "[risk.critical]\nmax-hold='5m'");
    let error = start_error(&text, &registry).await;
    assert!(
        error.to_string().starts_with(
            "risk level \"critical\" on backend \"moving\": consistency: needs Linearizable, has Process; fence: needs"
        ),
        "{error}"
    );
    assert!(
        migration.status(&call).await.unwrap().members.is_empty(),
        "a level that was refused is a member"
    );
}

#[tokio::test]
async fn a_lazy_level_on_a_bridge_waits_for_both_stores() {
    let absent = Absent::default();
    let memory = Memory::new();
    let (migration, call) = begin(&memory).await;
    let text = moving("from").replace("memory://old", "absent://old") + "start='lazy'\n";
    let registry = Registry::new().with(memory.clone()).with(absent.clone());
    let manager = LockManager::start(&read(&text), &registry).await.unwrap();
    let locks = manager.level("own").unwrap();
    let error = locks.named("x").try_acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    *absent.store.grab() = Some(memory.store("old"));
    locks.named("x").run(async |_| -> Result<()> { Ok(()) }).await.unwrap();
    assert_eq!(migration.status(&call).await.unwrap().members.len(), 1);
    manager.close().await;
}
