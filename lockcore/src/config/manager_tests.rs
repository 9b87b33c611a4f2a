use std::{future::poll_fn, sync::Arc, task::Poll, time::Duration};

use super::{tests::Paper, *};
use crate::{
    Attempt, Entry, EventKind, LockClient, RenewalHome,
    backend::*,
    client::ClientOptions,
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
async fn a_refusal_names_the_configured_stores_that_would_do() {
    let memory = Memory::new();
    memory.insert("strong", MemoryBackend::default().promising(|c| c.fence = FenceSource::Durable));
    let text = r#"
        namespace = "t"
        [backend]
        weak = "memory://weak"
        also-weak = "memory://also-weak"
        strong = "memory://strong"
        [risk.guarded]
        backend = "weak"
        ttl = "30s"
        max-hold = "1h"
    "#;
    let error = start_error(text, &Registry::new().with(memory)).await;
    let told = error.to_string();
    assert!(
        told.ends_with("; of the backends that are configured, this level would be kept on strong"),
        "{told}"
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

/// A connection to a memory store that tells when it is closed.
#[derive(Clone, Debug)]
struct Told {
    store: MemoryBackend,
    closed: Arc<tokio::sync::watch::Sender<u32>>,
}

impl Told {
    fn new() -> Self {
        Self { store: MemoryBackend::default(), closed: Arc::new(tokio::sync::watch::channel(0).0) }
    }
}

#[async_trait]
impl Connector for Told {
    fn schemes(&self) -> &'static [&'static str] {
        &["told"]
    }
    async fn connect(&self, _config: &BackendConfig) -> Result<Arc<dyn LockBackend>> {
        Ok(Arc::new(self.clone()))
    }
}

#[async_trait]
impl LockBackend for Told {
    fn capabilities(&self) -> Capabilities {
        self.store.capabilities()
    }
    async fn acquire(&self, call: &Call, request: &AcquireRequest) -> Result<Lease> {
        self.store.acquire(call, request).await
    }
    async fn renew(&self, call: &Call, lease: &Lease, ttl: Duration) -> Result<Lease> {
        self.store.renew(call, lease, ttl).await
    }
    async fn release(&self, call: &Call, lease: &Lease) -> Result<Released> {
        self.store.release(call, lease).await
    }
    async fn resolve(&self, call: &Call, request: &AcquireRequest) -> Result<Resolution> {
        self.store.resolve(call, request).await
    }
    async fn inspect(&self, call: &Call, name: &LockName) -> Result<LockState> {
        self.store.inspect(call, name).await
    }
    async fn close(&self) {
        self.closed.send_modify(|closed| *closed += 1);
    }
}

const ONE: &str = "namespace='x'\nbackend.c='told://'\n[risk.own]\nbackend='c'\n";

#[tokio::test]
async fn a_reload_holds_for_what_begins_later_and_leaves_what_is_held() {
    let told = Told::new();
    let registry = Registry::new().with(told.clone());
    let before = format!("{ONE}ttl='600ms'\n[lock.'pay/*']\nttl='700ms'\n");
    let manager = LockManager::start(&read(&before), &registry).await.unwrap();
    let client = manager.level("own").unwrap();
    let (stored, spoken) = (client.named("pay/2"), client.named("pay/3").ttl(Duration::from_secs(9)));
    let mut events = client.events();
    let held = client.named("pay/1").acquire().await.unwrap();
    let mut waits = Box::pin(client.named("pay/1").wait_forever().acquire());
    let is_waiting = poll_fn(|cx| Poll::Ready(waits.as_mut().poll(cx).is_pending())).await;
    assert!(is_waiting, "two holders");
    let waiter = tokio::spawn(waits);
    while !matches!(events.next().await.unwrap().kind, EventKind::Granted { .. }) {}

    let after = format!("{ONE}ttl='50s'\nwait='1s'\n[lock.'pay/*']\nttl='70s'\nmax-hold='5m'\n");
    manager.reload(&read(&after)).await.unwrap();
    // Whoever had the client and the lock before has the new numbers, and the code's own words stand.
    for (lock, ttl) in [(&stored, 70), (&spoken, 9), (&client.named("refund/1"), 50)] {
        let guard = lock.acquire().await.unwrap();
        let left = guard.remaining();
        assert!(left > Duration::from_secs(ttl) * 9 / 10 && left <= Duration::from_secs(ttl), "{left:?}");
        guard.release().await.unwrap();
    }
    let error = client.named("pay/1").try_acquire().await.unwrap();
    assert!(matches!(error, Attempt::Busy(Some(_))), "{error:?}");

    // The old lease is renewed where it is, and the same events tell.
    let owner = held.lease().owner.digest();
    let end = held.lease().deadline;
    while held.lease().deadline <= end {
        let event = events.next().await.unwrap();
        assert!(event.owner != owner || !matches!(event.kind, EventKind::Lost { .. }), "{event:?}");
    }
    let mut closed = told.closed.subscribe();
    assert_eq!(*closed.borrow(), 0, "closed under a lease");
    held.release().await.unwrap();
    // Who waited there goes on there.
    let next = waiter.await.unwrap().unwrap();
    assert!(next.remaining() < Duration::from_secs(1), "{:?}", next.remaining());
    assert_eq!(*closed.borrow(), 0, "closed under the lease of a waiter");
    drop(next);
    closed.wait_for(|closed| *closed == 1).await.unwrap();
    stored.run(async |_| -> Result<()> { Ok(()) }).await.unwrap();

    manager.close().await;
    assert_eq!(*closed.borrow(), 2);
    let error = manager.reload(&read(&after)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
}

#[tokio::test]
async fn a_level_that_has_not_changed_keeps_its_connection() {
    let told = Told::new();
    let registry = Registry::new().with(told.clone());
    let text = format!("{ONE}[risk.other]\nbackend='c'\n");
    let manager = LockManager::start(&read(&text), &registry).await.unwrap();
    let own = manager.level("own").unwrap();
    // One is new, one was never asked for and goes, and one is as it was.
    manager.reload(&read(&format!("{ONE}[risk.third]\nbackend='c'\n"))).await.unwrap();
    assert_eq!(*told.closed.borrow(), 1);
    assert!(Arc::ptr_eq(own.current(), manager.level("own").unwrap().current()), "it was connected anew");
    manager.level("third").unwrap().named("x").run(async |_| -> Result<()> { Ok(()) }).await.unwrap();
    assert_eq!(manager.level("other").unwrap_err().kind(), ErrorKind::Misconfigured);
    own.close().await;
    manager.reload(&read(&format!("{ONE}ttl='9s'\n[risk.third]\nbackend='c'\n"))).await.unwrap();
    let error = own.named("x").acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "a reload opened what its user had closed: {error}");
    manager.close().await;
}

#[tokio::test]
async fn a_reload_that_is_refused_changes_nothing_and_says_all_that_is_wrong() {
    let memory = Memory::new();
    let registry = Registry::new().with(memory.clone());
    let (migration, call) = begin(&memory).await;
    let store = "[risk.plain]\nbackend='old'\nttl='20s'\n";
    let text = moving("from") + store;
    let manager = LockManager::start(&read(&text), &registry).await.unwrap();
    let (own, plain) = (manager.level("own").unwrap(), manager.level("plain").unwrap());
    let to_new = text.replace("backend='old'\n", "backend='new'\n");
    let to_bridge = text.replace("backend='old'\n", "backend='moving'\n");
    for (what, text, why) in [
        (
            "another namespace",
            text.replace("'shop'", "'shop-2'"),
            "namespace: stays \"shop\" until a restart",
        ),
        ("a level that is in use", moving("from"), "risk.plain: is in use"),
        ("another store", to_new, "risk.plain.backend: would go from memory://old to memory://new"),
        ("a bridge", to_bridge, "risk.plain.backend: would go from a store to a bridge"),
        (
            "two phases on",
            text.replace("'from'\n[risk", "'to'\n[risk"),
            "from phase `from` to `to`, which do not exclude",
        ),
        (
            "a phase that is not open",
            text.replace("'from'\n[risk", "'both'\n[risk"),
            "the phase `both` of the migration",
        ),
        (
            "a demand",
            text.replace(store, &format!("{store}require={{ fence='durable' }}\n")),
            "fence: needs Durable",
        ),
        ("a mistake", text.replace("ttl='20s'", "ttl='0s'"), "risk.own.ttl"),
    ] {
        let error = manager.reload(&read(&text)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Misconfigured, "{what}: {error}");
        assert!(error.to_string().contains(why), "{what}: {error}");
    }
    for client in [&own, &plain] {
        let guard = client.named("still/here").acquire().await.unwrap();
        assert!(guard.remaining() > Duration::from_secs(15));
        guard.release().await.unwrap();
    }
    let members = migration.status(&call).await.unwrap().members;
    assert_eq!(members.len(), 1, "a reload that was refused left a member: {members:?}");
    manager.close().await;
}

#[tokio::test]
async fn a_process_follows_its_bridge_to_the_next_phase_without_a_restart() {
    let memory = Memory::new();
    let registry = Registry::new().with(memory.clone());
    let (migration, call) = begin(&memory).await;
    let manager = LockManager::start(&read(&moving("from")), &registry).await.unwrap();
    let locks = manager.level("own").unwrap();
    let held = locks.named("x").acquire().await.unwrap();
    migration.step(&call, Stage::FromBoth).await.unwrap();
    manager.reload(&read(&moving("both"))).await.unwrap();

    let other = locks.named("y").acquire().await.unwrap();
    let name = LockName::parse("y").unwrap();
    let now = crate::backend::BootClock::read();
    assert_eq!(memory.store("new").holder(&name, now), Some(other.lease().owner), "not taken on both");
    assert!(matches!(locks.named("x").try_acquire().await.unwrap(), Attempt::Busy(Some(_))), "two holders");
    // The old phase is not left before its last lease has ended.
    let refused = migration.step(&call, Stage::Both).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Held, "{refused}");
    let before = held.fence();
    held.release().await.unwrap();
    let gone = async {
        while migration.status(&call).await.unwrap().members.iter().any(|(_, m)| m.phase == "from") {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), gone).await.expect("the old phase was not left");
    migration.step(&call, Stage::Both).await.unwrap();
    let again = locks.named("x").acquire().await.unwrap();
    assert!(again.fence() > before);
    other.release().await.unwrap();
    again.release().await.unwrap();
    manager.close().await;
    assert!(migration.status(&call).await.unwrap().members.is_empty());
}

#[tokio::test]
async fn closing_ends_what_is_held_from_before_a_reload() {
    let told = Told::new();
    let registry = Registry::new().with(told.clone());
    let manager = LockManager::start(&read(ONE), &registry).await.unwrap();
    let client = manager.level("own").unwrap();
    let held = client.named("x").acquire().await.unwrap();
    let watch = held.watch();
    manager.reload(&read(&format!("{ONE}ttl='9s'\n"))).await.unwrap();
    let newer = client.named("y").acquire().await.unwrap();
    let closing = tokio::spawn({
        let client = client.clone();
        async move { client.close().await }
    });
    assert_eq!(watch.lost().await, crate::LostReason::Closed);
    assert_eq!(newer.lost().await, crate::LostReason::Closed);
    closing.await.unwrap();
    let now = crate::backend::BootClock::read();
    for name in ["x", "y"] {
        assert_eq!(
            told.store.holder(&LockName::parse(name).unwrap(), now),
            None,
            "{name} was not given back"
        );
    }
}
