//! An application records what its own clients tell, in virtual time, and has it judged.

use std::{sync::Arc, time::Duration};

use lockcore::{ClientOptions, ErrorKind, LockClient, LockName, TokioClock, Verb, memory::MemoryBackend};
use lockcore_conformance::history::{
    ClockKind, Demand, FaultClass, History, Property, Recorder, Rules, check,
};

use crate::random::Dice;

/// A store, its clock, and a recorder that listens to every client.
struct World {
    store: MemoryBackend,
    clock: TokioClock,
    recorder: Recorder,
    listeners: Vec<tokio::task::JoinHandle<()>>,
    clients: Vec<LockClient>,
}

impl World {
    fn new() -> Self {
        let clock = TokioClock::start();
        let recorder = Recorder::builder().clock(Arc::new(clock), ClockKind::Virtual).build().unwrap();
        Self { store: MemoryBackend::default(), clock, recorder, listeners: Vec::new(), clients: Vec::new() }
    }

    fn client(&mut self, name: &str) -> LockClient {
        let options = ClientOptions::default().with(|o| o.ttl = Duration::from_secs(3));
        let client = LockClient::with_clock(self.store.clone(), options, self.clock);
        let (mut log, mut events) = (self.recorder.stream(name), client.events());
        self.listeners.push(tokio::spawn(async move { log.follow(&mut events).await }));
        self.clients.push(client.clone());
        client
    }

    async fn history(self) -> History {
        for client in &self.clients {
            client.close().await;
        }
        drop(self.clients);
        for listener in self.listeners {
            listener.await.unwrap();
        }
        self.recorder.history()
    }
}

/// Virtual time stands still while code runs, so nothing lies between a stamp and the client's own reading.
fn rules() -> Rules {
    Rules::application().with(|r| {
        r.closed_world = true;
        r.send_slack = Duration::ZERO;
        r.drift = 0.01;
    })
}

#[tokio::test(start_paused = true)]
async fn what_clients_do_without_faults_is_a_good_history() {
    let mut world = World::new();
    let mut workers = Vec::new();
    for worker in 0..6 {
        let client = world.client(&format!("worker-{worker}"));
        workers.push(tokio::spawn(async move {
            let mut dice = Dice::new(worker);
            for _ in 0..20 {
                let lock = client.named(["order/1", "order/2"][dice.below(2) as usize]);
                let held = lock.wait(Duration::from_secs(600)).acquire().await.unwrap();
                tokio::time::sleep(Duration::from_millis(dice.below(9000))).await;
                held.ensure_held().unwrap();
                if dice.one_in(3) {
                    drop(held);
                } else {
                    held.release().await.unwrap();
                }
            }
        }));
    }
    for worker in workers {
        worker.await.unwrap();
    }
    let history = world.history().await;
    let rules =
        rules().demand(Demand::Grants(120)).demand(Demand::Releases(120)).demand(Demand::Renewals(120));
    let rules = rules.with(|r| {
        r.bounds.takeover = Some(Duration::from_millis(1));
        r.bounds.wake = Some(Duration::from_millis(1));
        r.bounds.quiet = Some(Duration::from_millis(1));
        r.bounds.wait_slack = Some(Duration::from_millis(100));
    });
    let report = check(&history, &rules);
    assert!(report.passed(), "{report}");
}

#[tokio::test(start_paused = true)]
async fn what_clients_do_under_faults_is_a_good_history() {
    for seed in 0..20 {
        let mut world = World::new();
        let faults = world.store.clone();
        let mut workers = Vec::new();
        for worker in 0..5 {
            let client = world.client(&format!("worker-{worker}"));
            workers.push(tokio::spawn(async move {
                let mut dice = Dice::new(100 * seed + worker);
                for _ in 0..15 {
                    let lock = client.named("order/1").wait(Duration::from_secs(20));
                    let held = match dice.one_in(4) {
                        // Some give up while they wait.
                        true => {
                            tokio::time::timeout(Duration::from_millis(dice.below(4000)), lock.acquire())
                                .await
                        }
                        false => Ok(lock.acquire().await),
                    };
                    let Ok(Ok(held)) = held else { continue };
                    tokio::time::sleep(Duration::from_millis(dice.below(6000))).await;
                    if dice.one_in(2) {
                        // A release that is not heard goes on in the background.
                        let _ = held.release().await;
                    }
                }
            }));
        }
        let mut dice = Dice::new(seed);
        for _ in 0..40 {
            tokio::time::sleep(Duration::from_millis(dice.below(4000))).await;
            let fault = world.recorder.fault("messages", "store", "", FaultClass::A1, "switch");
            let verb = [Verb::Acquire, Verb::Renew, Verb::Release][dice.below(3) as usize];
            match dice.below(5) {
                0 => faults.faults().lose_before(verb, 1),
                1 => faults.faults().lose_after(verb, 1),
                2 => faults.faults().refuse_next(verb, 1, ErrorKind::Unavailable),
                3 => {
                    faults.faults().cut(true);
                    tokio::time::sleep(Duration::from_millis(dice.below(5000))).await;
                    faults.faults().cut(false);
                }
                _ => {
                    faults.faults().hold_replies(verb);
                    tokio::time::sleep(Duration::from_millis(dice.below(4000))).await;
                    faults.faults().deliver();
                }
            }
            fault.end("switch");
        }
        for worker in workers {
            worker.await.unwrap();
        }
        let history = world.history().await;
        let rules =
            rules().demand(Demand::Grants(10)).demand(Demand::Unknowns(3)).demand(Demand::Renewals(10));
        let report = check(&history, &rules);
        assert!(
            report.passed(),
            "seed {seed}: {report}\n{}",
            lockcore_conformance::history::timeline::text(&history, Some(&report), "order/1")
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_stolen_lock_shows_in_the_applications_own_history() {
    let mut world = World::new();
    let (alice, bob) = (world.client("alice"), world.client("bob"));
    let first = alice.named("order/1").acquire().await.unwrap();
    world.store.steal(&LockName::parse("order/1").unwrap());
    let second = bob.named("order/1").acquire().await.unwrap();
    assert!(first.fence() < second.fence());
    tokio::time::sleep(Duration::from_secs(10)).await;
    drop((first, second));
    let history = world.history().await;
    let report = check(&history, &rules());
    assert!(report.breaks(Property::S2), "{report}");
    // Alice was told of the loss before her deadline, and the recorder knows of no fault that explains it.
    assert_eq!(report.broken(), [Property::S2, Property::S10], "{report}");
}
