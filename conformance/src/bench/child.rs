//! A client in a process of its own: it can be stopped, continued and killed, and its heartbeats stop with it.
//!
//! The test binary is started again with [`CHILD`] in its environment and speaks JSON lines. It holds guards, so a
//! lease is renewed for as long as the process runs, and by nothing else.

use std::{
    collections::BTreeMap,
    process::{ExitCode, Stdio},
    sync::Arc,
    time::Duration,
};

use lockcore::{
    ClientOptions, Fence, Guard, LockClient, LockName, OwnerDigest, Stamp,
    backend::{LockBackend, Moment},
};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};

use super::{Bench, WATCHDOG};
use crate::history::{Answer, Call, ClientLog, FaultClass, FaultLog, Why};

/// The variable that makes a test binary a client: the store's address.
pub(crate) const CHILD: &str = "LOCKCORE_CONFORMANCE_CHILD";

#[derive(Debug, Serialize, Deserialize)]
enum Order {
    Acquire {
        name: String,
        ttl: Duration,
        wait: Duration,
    },
    /// Asks the guard, without the network: held, and the stamp to send.
    Stamp {
        fence: i64,
    },
    Release {
        fence: i64,
    },
}

#[derive(Debug, Serialize, Deserialize)]
enum Reply {
    Granted { stamp: String, deadline: u64 },
    Stamp { stamp: String },
    Released { now: bool },
    Error { kind: String, message: String },
}

/// A client in a process of its own.
#[derive(Debug)]
pub struct Child {
    process: tokio::process::Child,
    pid: Pid,
    input: tokio::process::ChildStdin,
    output: Lines<BufReader<tokio::process::ChildStdout>>,
    bench: Bench,
    log: ClientLog,
}

/// What a child was granted.
#[derive(Clone, Debug)]
pub struct ChildLease {
    /// The lock.
    pub name: LockName,
    /// Fence and owner.
    pub stamp: Stamp,
    /// Until when it was granted; renewals move it without telling.
    pub deadline: Moment,
}

impl Child {
    pub(crate) async fn start(bench: &Bench, name: &str, address: &str) -> Self {
        let program = std::env::current_exe().expect("a running program has a path");
        let mut process = tokio::process::Command::new(program)
            .env(CHILD, address)
            .env("LOCKCORE_CONFORMANCE_NAMESPACE", &bench.stage.namespace)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("the test binary starts once more");
        let input = process.stdin.take().expect("piped");
        let output = BufReader::new(process.stdout.take().expect("piped")).lines();
        let pid = Pid::from_raw(process.id().expect("it runs") as i32).expect("a pid is not zero");
        Self { process, pid, input, output, bench: bench.clone(), log: bench.stage.recorder.client(name) }
    }

    async fn send(&mut self, order: &Order) {
        let line = serde_json::to_string(order).expect("plain data") + "\n";
        self.input.write_all(line.as_bytes()).await.expect("the child reads its orders");
        self.input.flush().await.expect("the child reads its orders");
    }

    async fn hear(&mut self) -> Reply {
        let line = tokio::time::timeout(WATCHDOG, self.output.next_line()).await;
        let line = line.expect("the child answers").expect("its pipe is whole").expect("the child lives");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("the child said {line:?}: {error}"))
    }

    /// Takes a lock, waiting for so long; the error's text when it did not.
    ///
    /// # Errors
    /// What the child's library said.
    pub async fn acquire(&mut self, name: &LockName, wait: Duration) -> Result<ChildLease, String> {
        // The owner is drawn over there: the history learns it from the answer.
        let began = self.bench.now();
        let ttl = self.bench.ttl();
        self.send(&Order::Acquire { name: name.to_string(), ttl, wait }).await;
        match self.hear().await {
            Reply::Granted { stamp, deadline } => {
                let stamp: Stamp = stamp.parse().expect("a stamp");
                let deadline = Moment::from_nanos(deadline);
                let call = Call::Acquire { owner: stamp.owner, ttl, wait: Some(wait) };
                self.log.record_call(began, name.as_str(), &stamp.owner.to_string(), call);
                self.log.record_answer(
                    name.as_str(),
                    &stamp.owner.to_string(),
                    Answer::granted(stamp, deadline, None),
                );
                Ok(ChildLease { name: name.clone(), stamp, deadline })
            }
            Reply::Error { kind, message } => Err(format!("{kind}: {message}")),
            other => panic!("an acquire was answered by {other:?}"),
        }
    }

    /// Asks the child's guard for its stamp, without the network.
    ///
    /// # Errors
    /// What the guard said: `Lost`.
    pub async fn stamp(&mut self, lease: &ChildLease) -> Result<Stamp, String> {
        let pending = self.log.invoke(
            lease.name.as_str(),
            Call::Check { fence: lease.stamp.fence, owner: Some(lease.stamp.owner) },
        );
        self.send(&Order::Stamp { fence: lease.stamp.fence.get() }).await;
        match self.hear().await {
            Reply::Stamp { stamp } => {
                pending.ok(Answer::held(true));
                Ok(stamp.parse().expect("a stamp"))
            }
            Reply::Error { kind, message } => {
                pending.ok(Answer::held(false));
                Err(format!("{kind}: {message}"))
            }
            other => panic!("a check was answered by {other:?}"),
        }
    }

    /// Releases a lease; says whether this ended it.
    pub async fn release(&mut self, lease: &ChildLease) -> bool {
        let (fence, owner) = (lease.stamp.fence, Some(lease.stamp.owner));
        let pending = self.log.invoke(lease.name.as_str(), Call::Release { fence, owner });
        self.send(&Order::Release { fence: fence.get() }).await;
        match self.hear().await {
            Reply::Released { now: true } => {
                pending.ok(Answer { released: Some(true), ..Answer::default() });
                true
            }
            Reply::Released { now: false } => {
                pending.fail(Why::NotHeld);
                false
            }
            other => panic!("a release was answered by {other:?}"),
        }
    }

    /// Stops the process, confirmed by the system.
    pub fn stop(&self) -> FaultLog {
        let fault = self.bench.stage.recorder.fault("pause", self.log.name(), "", FaultClass::A1, "waitid");
        kill_process(self.pid, Signal::STOP).expect("it is our child");
        waitid(WaitId::Pid(self.pid), WaitIdOptions::STOPPED).expect("it is our child");
        fault
    }

    /// Lets it go on.
    pub fn go_on(&self, fault: FaultLog) {
        kill_process(self.pid, Signal::CONT).expect("it is our child");
        fault.end("SIGCONT");
    }

    /// Kills it, confirmed by the system.
    pub async fn kill(mut self) {
        let fault = self.bench.stage.recorder.fault("kill", self.log.name(), "", FaultClass::A1, "waitid");
        self.process.kill().await.expect("it is our child");
        fault.end("reaped");
    }

    /// Lets it end by itself: its guards are dropped and released.
    pub async fn leave(mut self) {
        drop(self.input);
        let ended = tokio::time::timeout(WATCHDOG, self.process.wait()).await;
        assert!(ended.expect("the child ends").expect("it is our child").success(), "the child failed");
    }
}

/// Is a client process if the environment says so; `connect` reaches the store at its address. `None`: it does not.
pub fn child_main(connect: impl AsyncFnOnce(String) -> Arc<dyn LockBackend>) -> Option<ExitCode> {
    let address = std::env::var(CHILD).ok()?;
    // It ends with the test, however that ends.
    let _ = rustix::process::set_parent_process_death_signal(Some(Signal::KILL));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
    runtime.block_on(async {
        let options = ClientOptions::default().with(|o| {
            o.namespace = std::env::var("LOCKCORE_CONFORMANCE_NAMESPACE").unwrap_or_default();
        });
        let locks = LockClient::with_options(connect(address).await, options);
        serve(&locks).await;
        locks.close().await;
    });
    Some(ExitCode::SUCCESS)
}

async fn serve(locks: &LockClient) {
    let mut guards: BTreeMap<i64, Guard> = BTreeMap::new();
    let mut orders = BufReader::new(tokio::io::stdin()).lines();
    let mut out = tokio::io::stdout();
    while let Ok(Some(line)) = orders.next_line().await {
        let Ok(order) = serde_json::from_str::<Order>(&line) else { return };
        let reply = match order {
            Order::Acquire { name, ttl, wait } => match locks.named(name).ttl(ttl).wait(wait).acquire().await
            {
                Ok(guard) => {
                    let lease = guard.lease();
                    let reply = Reply::Granted {
                        stamp: lease.stamp().to_string(),
                        deadline: lease.deadline.as_nanos(),
                    };
                    guards.insert(guard.fence().get(), guard);
                    reply
                }
                Err(error) => refused(&error),
            },
            Order::Stamp { fence } => match guards.get(&fence).map(Guard::stamp) {
                Some(Ok(stamp)) => Reply::Stamp { stamp: stamp.to_string() },
                Some(Err(error)) => refused(&error),
                None => nobody(),
            },
            Order::Release { fence } => match guards.remove(&fence) {
                Some(guard) => match guard.release().await {
                    Ok(released) => Reply::Released { now: released == lockcore::Released::Now },
                    Err(error) => refused(&error),
                },
                None => nobody(),
            },
        };
        let line = serde_json::to_string(&reply).unwrap_or_default() + "\n";
        if out.write_all(line.as_bytes()).await.is_err() || out.flush().await.is_err() {
            return;
        }
    }
}

fn refused(error: &lockcore::Error) -> Reply {
    Reply::Error { kind: format!("{:?}", error.kind()), message: error.to_string() }
}

fn nobody() -> Reply {
    Reply::Error { kind: "Invalid".into(), message: "no such guard".into() }
}

impl ChildLease {
    /// Returns the fence.
    pub fn fence(&self) -> Fence {
        self.stamp.fence
    }

    /// Returns the owner's digest.
    pub fn owner(&self) -> OwnerDigest {
        self.stamp.owner
    }
}
