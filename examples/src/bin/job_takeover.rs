//! A long task with checkpoints, taken over from whoever stopped: the second worker begins at the first one's
//! last step. The first read raises the floor, so the former worker cannot write a checkpoint any more when it wakes.
//! Run with the URL of a store to try another than a SQLite file.
#![allow(clippy::print_stdout)]

use std::{
    sync::{Arc, Mutex, mpsc},
    time::Duration,
};

use lockcore::{ErrorKind, GuardRef, LockClient, LockName};
use lockcore_fenced::Fenced;

type Anything = Box<dyn std::error::Error + Send + Sync>;
/// The last finished step. In a program of several processes this is a row behind `sqlite::FenceTable`.
type Checkpoint = Arc<Mutex<Fenced<u32>>>;
const TASK: &str = "task/reindex";
const STEP: Duration = Duration::from_millis(50);
const STEPS: u32 = 6;
const STOPS_IN: u32 = 3;

#[derive(Debug, thiserror::Error)]
enum WorkError {
    #[error(transparent)]
    Lock(#[from] lockcore::Error),
    #[error(transparent)]
    Stale(#[from] lockcore_fenced::Stale),
}

/// What the first worker does to the story: it stops in the middle of a step, and tells what became of it.
struct Pause {
    stopped: mpsc::Sender<()>,
    go_on: mpsc::Receiver<()>,
    outcome: mpsc::Sender<String>,
}

/// One step, on a blocking thread. Nobody can interrupt a thread: it asks.
fn crunch(step: u32, held: &GuardRef, saved: &Checkpoint, pause: Option<&Pause>) -> Result<(), WorkError> {
    for _slice in 0..5 {
        held.ensure_held()?;
        std::thread::sleep(STEP / 5);
    }
    let stamp = held.stamp()?;
    if let Some(pause) = pause {
        // The lock has just said yes. From here to the write anything may happen, and here it does.
        let _ = pause.stopped.send(());
        let _ = pause.go_on.recv();
    }
    let written = save(saved, stamp, step);
    if let Some(pause) = pause {
        let outcome = written.as_ref().map_or_else(ToString::to_string, |()| "was let through".to_owned());
        let _ = pause.outcome.send(outcome);
    }
    Ok(written?)
}

fn save(saved: &Checkpoint, stamp: lockcore::Stamp, step: u32) -> Result<(), lockcore_fenced::Stale> {
    let mut saved = saved.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    // A retry of the same step is a duplicate, which is as good.
    saved.write(stamp, &format!("step-{step}"), |at| *at = step).map(drop)
}

async fn work(
    who: &'static str,
    locks: LockClient,
    saved: Checkpoint,
    mut pause: Option<Pause>,
) -> Result<u32, WorkError> {
    locks
        .named(TASK)
        .ttl(Duration::from_millis(1500))
        .wait(Duration::from_secs(20))
        .run(async |held| {
            let stamp = held.stamp()?;
            // Reading raises the floor: the former worker is out before this one has written anything.
            let mut at = *saved.lock().unwrap_or_else(std::sync::PoisonError::into_inner).read(stamp)?;
            println!("{who}: begins after step {at}, fence {}", held.fence());
            while at < STEPS {
                held.ensure_held_for(STEP)?; // do not begin what cannot be finished
                let (step, saved) = (at + 1, saved.clone());
                let stops = if step == STOPS_IN { pause.take() } else { None };
                held.run_blocking(move |held| crunch(step, held, &saved, stops.as_ref())).await?;
                at = step;
                println!("{who}: step {at}");
            }
            Ok(at)
        })
        .await
}

#[tokio::main]
async fn main() -> Result<(), Anything> {
    let directory = tempfile::tempdir()?;
    let store = std::env::args().nth(1).unwrap_or_else(|| lockcore_examples::sqlite_in(directory.path()));
    let saved = Checkpoint::default();
    let ann = LockClient::new(lockcore_examples::connect(&store).await?);
    let bob = LockClient::new(lockcore_examples::connect(&store).await?);

    let (stopped, has_stopped) = mpsc::channel();
    let (go_on, may_go_on) = mpsc::channel();
    let (outcome, came_of_it) = mpsc::channel();
    let pause = Pause { stopped, go_on: may_go_on, outcome };
    let first = tokio::spawn(work("ann", ann.clone(), saved.clone(), Some(pause)));
    tokio::task::spawn_blocking(move || has_stopped.recv_timeout(Duration::from_secs(30))).await??;
    println!("-- ann stops in step {STOPS_IN}; an operator gives the task to somebody else");
    let name = LockName::parse(TASK)?;
    let holder = bob.named(&name).inspect().await?.holder.ok_or("nobody has the task")?;
    let (backend, call) = bob.backend()?;
    backend.break_lock(&call, &name, Some(holder.stamp())).await?;

    let reached = work("bob", bob.clone(), saved.clone(), None).await?;

    println!("-- ann wakes up");
    go_on.send(())?;
    let late =
        tokio::task::spawn_blocking(move || came_of_it.recv_timeout(Duration::from_secs(30))).await??;
    println!("ann: {late}");
    let ended = first.await?;
    println!("ann: {}", ended.as_ref().map_or_else(ToString::to_string, |at| format!("reached {at}")));
    ann.close().await;
    bob.close().await;

    let at = *saved.lock().unwrap_or_else(std::sync::PoisonError::into_inner).peek();
    println!("the checkpoint is {at}");
    let told = match ended {
        Err(WorkError::Lock(e)) => e.kind() == ErrorKind::Lost,
        Err(WorkError::Stale(_)) => true,
        Ok(_) => false,
    };
    if (reached, at) == (STEPS, STEPS) && late.starts_with("stale fence") && told {
        Ok(())
    } else {
        Err("the task was to be finished by bob alone, and ann to be told".into())
    }
}
