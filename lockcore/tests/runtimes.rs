//! Runtimes: none, several, starved, ended; and what is said in the log.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use lockcore::{
    Attempt, ClientOptions, ErrorKind, LockClient, LostReason, RenewalHome, State, blocking,
    memory::MemoryBackend,
};

const TTL: Duration = Duration::from_millis(600);

fn short(options: &mut ClientOptions) {
    options.ttl = TTL;
}

fn current_thread() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn spin(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

#[test]
fn a_starved_runtime_loses_its_lease_and_knows_it() {
    // R21, second half: renewal shares the thread with the work.
    let store = MemoryBackend::default();
    let locks = LockClient::with_options(store, ClientOptions::default().with(short));
    current_thread().block_on(async {
        let guard = locks.named("x").acquire().await.unwrap();
        spin(TTL * 2);
        assert_eq!(guard.remaining(), Duration::ZERO, "time left right after the spin");
        assert_eq!(guard.stamp().unwrap_err().lost_reason(), Some(LostReason::Expired));
    });
}

#[test]
fn renewal_on_a_thread_of_its_own_survives_a_starved_runtime() {
    // R21, first half.
    let store = MemoryBackend::default();
    let options = ClientOptions::default().with(short).with(|o| o.renewal = RenewalHome::OwnThread);
    let locks = LockClient::with_options(store.clone(), options);
    let other = LockClient::new(store);
    current_thread().block_on(async {
        let guard = locks.named("x").acquire().await.unwrap();
        spin(TTL * 5);
        guard.stamp().expect("renewed although the runtime was busy");
        assert!(matches!(other.named("x").try_acquire().await.unwrap(), Attempt::Busy(_)));
        guard.release().await.unwrap();
        locks.close().await;
    });
}

#[test]
fn a_client_works_on_one_runtime_after_another() {
    static LOCKS: std::sync::OnceLock<LockClient> = std::sync::OnceLock::new();
    let locks = LOCKS.get_or_init(|| {
        LockClient::with_options(MemoryBackend::default(), ClientOptions::default().with(short))
    });
    let orphan = current_thread().block_on(async { locks.named("orphan").acquire().await.unwrap() });
    for _ in 0..3 {
        current_thread().block_on(async {
            let guard = locks.named("x").acquire().await.unwrap();
            tokio::time::sleep(TTL * 2).await;
            assert_eq!(guard.state(), State::Held, "nobody renews on this runtime");
            guard.release().await.unwrap();
        });
    }
    // Its runtime has ended: it is lost by the clock alone, and its end is no panic.
    assert_eq!(orphan.state(), State::Lost(LostReason::Expired));
    current_thread().block_on(async { assert_eq!(orphan.lost().await, LostReason::Expired) });
    drop(orphan);
}

#[test]
fn a_runtime_without_timers_is_enough() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let locks = LockClient::with_options(MemoryBackend::default(), ClientOptions::default().with(short));
    runtime.block_on(async {
        let guard = locks.named("x").acquire().await.unwrap();
        let waiting = locks.named("x").wait(TTL * 2).acquire().await.unwrap_err();
        assert_eq!(waiting.kind(), ErrorKind::WaitTimeout);
        assert_eq!(guard.state(), State::Held);
    });
}

#[test]
fn a_runtime_that_shuts_down_with_guards_and_waiters_does_not_hang_or_panic() {
    let store = MemoryBackend::default();
    let locks = LockClient::with_options(store.clone(), ClientOptions::default().with(short));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let guards = runtime.block_on(async {
        let mut guards = Vec::new();
        for n in 0..20 {
            guards.push(locks.named(format!("x/{n}")).acquire().await.unwrap());
            tokio::spawn(locks.named(format!("x/{n}")).wait_forever().acquire());
        }
        guards
    });
    let start = Instant::now();
    drop(runtime);
    drop(guards);
    assert!(start.elapsed() < Duration::from_secs(1), "the shutdown hung for {:?}", start.elapsed());
    // What could not be released is free after its TTL.
    current_thread().block_on(async {
        LockClient::new(store).named("x/7").wait(TTL * 4).acquire().await.unwrap().release().await.unwrap();
    });
}

#[test]
fn threads_without_a_runtime_take_locks_and_keep_them() {
    let store = MemoryBackend::default();
    let options = ClientOptions::default().with(short);
    let mine = store.clone();
    let locks = blocking::LockClient::connect(async move || Ok(mine), options).unwrap();
    let fence = locks
        .run("x", |held| -> lockcore::Result<_> {
            std::thread::sleep(TTL * 3);
            Ok(held.stamp()?.fence)
        })
        .unwrap();
    let guard = locks.acquire("x").unwrap();
    assert!(guard.fence() > fence);
    let refused = locks.acquire_lock(&locks.named("x").wait(Duration::from_millis(20))).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::WaitTimeout);
    locks.release(guard).unwrap();
    // A guard that is simply dropped on a thread is released, too.
    drop(locks.acquire("y").unwrap());
    locks.close();
    assert_eq!(locks.acquire("x").unwrap_err().kind(), ErrorKind::Closed);
    current_thread().block_on(async {
        let others = LockClient::new(store);
        assert!(matches!(others.named("y").try_acquire().await.unwrap(), Attempt::Granted(_)));
        let inside =
            blocking::LockClient::connect(async || Ok(MemoryBackend::default()), ClientOptions::default());
        assert_eq!(inside.unwrap_err().kind(), ErrorKind::Misconfigured, "a blocking call inside a runtime");
    });
}

/// Collects what is logged while it is installed on this thread.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    fn of(work: impl FnOnce()) -> String {
        let log = Self::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::TRACE)
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, work);
        let bytes = log.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }
}

#[test]
fn a_guard_that_is_dropped_at_once_is_warned_about_and_a_used_one_is_not() {
    let locks = LockClient::new(MemoryBackend::default());
    let log = Log::of(|| {
        current_thread().block_on(async {
            let _ = locks.named("dropped/at-once").acquire().await.unwrap();
            let fence = locks.named("used").acquire().await.unwrap().fence();
            assert_eq!(fence.get(), 1);
            locks.flush().await;
        });
    });
    let warned: Vec<_> = log.lines().filter(|line| line.contains("dropped unused")).collect();
    assert!(warned.len() == 1 && warned[0].contains("dropped/at-once"), "{log}");
}

#[test]
fn a_fence_that_nobody_read_is_warned_about_once_a_name() {
    let options = ClientOptions::default().with(|o| o.warn_unused_fence = true);
    let locks = LockClient::with_options(MemoryBackend::default(), options);
    let log = Log::of(|| {
        current_thread().block_on(async {
            for _ in 0..3 {
                locks.named("x").run(async |_| -> lockcore::Result<()> { Ok(()) }).await.unwrap();
            }
            locks.named("y").run(async |held| -> lockcore::Result<_> { held.stamp() }).await.unwrap();
        });
    });
    assert_eq!(log.matches("nobody read its fence").count(), 1, "{log}");
}

#[test]
fn no_log_line_and_no_debug_shows_an_owner() {
    let store = MemoryBackend::default();
    let locks = LockClient::with_options(store.clone(), ClientOptions::default().with(short));
    let mut secrets = Vec::new();
    let mut shown = String::new();
    let log = Log::of(|| {
        current_thread().block_on(async {
            let mut events = locks.events();
            let guard = locks.named("x").acquire().await.unwrap();
            secrets.push(*guard.lease().owner.expose());
            tokio::time::sleep(TTL).await;
            store.faults().lose_before(lockcore::Verb::Renew, 1);
            tokio::time::sleep(TTL).await;
            shown += &format!("{guard:?} {:?} {:?} {:?}", guard.watch(), guard.lease(), guard.stamp());
            store.steal(guard.name());
            guard.lost().await;
            while let Some(event) = events.try_next() {
                shown += &format!("{event:?}");
            }
            shown += &format!("{:?} {locks:?}", guard.ensure_held());
        });
    });
    assert!(log.contains("granted") && log.contains("was not confirmed") && log.contains("is lost"), "{log}");
    for secret in secrets {
        let hex: String = secret.iter().map(|byte| format!("{byte:02x}")).collect();
        let list = format!("{secret:?}");
        for text in [&log, &shown] {
            assert!(!text.contains(&hex) && !text.contains(&list), "an owner shows in {text}");
        }
    }
}

#[test]
fn an_idle_client_uses_no_cpu() {
    fn cpu() -> Duration {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    }
    let locks = LockClient::with_options(MemoryBackend::default(), ClientOptions::default().with(short));
    current_thread().block_on(async {
        locks.named("x").acquire().await.unwrap().release().await.unwrap();
        // The engine looks once more after the last lease, then sleeps for good.
        tokio::time::sleep(TTL).await;
        let before = cpu();
        tokio::time::sleep(Duration::from_millis(500)).await;
        let used = cpu() - before;
        assert!(used < Duration::from_millis(5), "half an idle second took {used:?} of CPU");
    });
}
