//! Three processes close expired orders under a lock per batch. One is frozen between its read and its write until its
//! lease is over and another has done its work. It wakes up, writes, and the database refuses it; without the
//! fence the same schedule gives the stock back twice.
#![allow(clippy::print_stdout)]

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, Stdio},
    sync::mpsc,
    time::{Duration, Instant},
};

use clap::Parser;
use lockcore::{Attempt, ClientOptions, GuardRef, LockClient, Stamp, text::show_duration};
use lockcore_fenced::{Verdict, sqlite::FenceTable};
use rusqlite::{Connection, TransactionBehavior::Immediate, params};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

/// Closes expired orders with several processes, one of which is frozen at the worst moment.
#[derive(Clone, Debug, Parser)]
#[command(name = "order_demo")]
struct Options {
    /// Expired orders in the database.
    #[arg(long, default_value_t = 300, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    orders: u32,
    /// Worker processes.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(2..=50))]
    workers: u32,
    /// How long a lease lives without a renewal: from 200ms to 30s.
    #[arg(long, default_value = "2s", value_parser = ttl)]
    ttl: Duration,
    /// Where the locks are; a SQLite file beside the orders unless given.
    #[arg(long)]
    store: Option<String>,
    /// Runs as a worker; the demo starts them itself.
    #[arg(long, hide = true)]
    worker: Option<String>,
    /// The order database of a worker.
    #[arg(long, hide = true)]
    shop: Option<PathBuf>,
    /// The worker writes without showing its stamp to the database.
    #[arg(long, hide = true)]
    unfenced: bool,
    /// The worker stops before its first write until it hears a line.
    #[arg(long, hide = true)]
    halts: bool,
    /// Keeps runs apart that share a store.
    #[arg(long, hide = true, default_value = "demo")]
    namespace: String,
}

fn ttl(text: &str) -> Result<Duration, String> {
    lockcore_examples::parse_ttl(text, Duration::from_millis(200))
}

type Anything = Box<dyn std::error::Error + Send + Sync>;
const PER_BATCH: u32 = 50;
const ITEMS: u32 = 7;
/// Nothing here takes this long; a demo that hangs says so.
const WATCHDOG: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let options = Options::parse();
    let outcome = match &options.worker {
        Some(name) => work(name, &options),
        None => demonstrate(&options),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("order_demo: {error}");
            ExitCode::FAILURE
        }
    }
}

// ---------------------------------------------------------------------------------------------- the application

#[derive(Debug, thiserror::Error)]
enum ScanError {
    #[error(transparent)]
    Lock(#[from] lockcore::Error),
    #[error(transparent)]
    Fence(#[from] lockcore_fenced::sqlite::Error),
    #[error(transparent)]
    Sql(#[from] rusqlite::Error),
    #[error(transparent)]
    Pipe(#[from] std::io::Error),
}

/// What a worker is given besides its lock.
#[derive(Clone)]
struct Job {
    name: String,
    shop: PathBuf,
    fenced: bool,
}

/// Closes one batch, and says what the database said: on this thread, because `run` has let go of it when the lease is
/// over, and then nobody hears its result.
fn close_batch(job: &Job, batch: u32, held: &GuardRef, halt: bool) -> Result<(), ScanError> {
    match try_close(job, batch, held, halt) {
        Ok((_, 0)) => Ok(()),
        Ok((stamp, orders)) => Ok(say(&format!("closed {batch} {stamp} {orders}"))?),
        Err(ScanError::Fence(lockcore_fenced::sqlite::Error::Stale(stale))) => {
            Ok(say(&format!("refused {batch} {} {}", stale.presented, stale.floor))?)
        }
        Err(error) => Err(error),
    }
}

/// Reads what has expired, and then, in one transaction, closes it and gives the stock back.
fn try_close(job: &Job, batch: u32, held: &GuardRef, halt: bool) -> Result<(Stamp, usize), ScanError> {
    let mut shop = Connection::open(&job.shop)?;
    shop.busy_timeout(Duration::from_secs(10))?;
    let expired: Vec<(u32, u32, u32)> = shop
        .prepare("select id, item, quantity from orders where batch = ?1 and state = 'expired'")?
        .query_map([batch], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?
        .collect::<Result<_, _>>()?;
    // The lock says yes here. What happens between this line and the write, no lock can know.
    let stamp = held.stamp()?;
    if halt {
        say(&format!("halts {batch} {stamp} {}", expired.len()))?;
        std::io::stdin().lock().read_line(&mut String::new())?;
        say(&format!("woke {batch} {stamp} {}", if held.ensure_held().is_ok() { "held" } else { "lost" }))?;
    }
    let tx = shop.transaction_with_behavior(Immediate)?;
    if job.fenced && FenceTable.admit(&tx, &format!("orders/{batch}"), stamp, "close")? == Verdict::Duplicate
    {
        return Ok((stamp, 0));
    }
    for (id, item, quantity) in &expired {
        tx.execute("update orders set state = 'closed' where id = ?1", [id])?;
        tx.execute("update stock set n = n + ?2 where item = ?1", [item, quantity])?;
        tx.execute(
            "insert into closings(order_id, worker, fence) values (?1, ?2, ?3)",
            params![id, job.name, stamp.fence.get()],
        )?;
    }
    tx.commit()?;
    Ok((stamp, expired.len()))
}

/// A worker: goes through the batches that have expired orders, and skips those that another worker has.
async fn scan(locks: &LockClient, job: &Job, mut halt: bool) -> Result<(), Anything> {
    loop {
        let open = open_batches(&job.shop)?;
        if open.is_empty() {
            return Ok(());
        }
        let mut progress = false;
        for batch in open {
            let (mine, stops) = (job.clone(), std::mem::take(&mut halt));
            let ran = locks
                .named(["orders", &batch.to_string()])
                .try_run(async |held| -> Result<_, ScanError> {
                    // Somebody may have closed it since we looked.
                    if !open_batches(&mine.shop)?.contains(&batch) {
                        return Ok(());
                    }
                    say(&format!("granted {batch} {}", held.stamp()?))?;
                    // rusqlite blocks: the whole transaction goes to a blocking thread, and the watcher goes with it.
                    held.run_blocking(move |held| close_batch(&mine, batch, held, stops)).await
                })
                .await;
            match ran {
                Ok(Attempt::Granted(())) => progress = true,
                Ok(Attempt::Busy(_)) => {}
                // `run` drops a body whose lease is over; its thread goes on to its write.
                Err(ScanError::Lock(error)) if error.kind() == lockcore::ErrorKind::Lost => {
                    say(&format!("lost {batch}"))?;
                }
                Err(error) => return Err(error.into()),
            }
        }
        if !progress {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

fn open_batches(shop: &Path) -> Result<Vec<u32>, rusqlite::Error> {
    let shop = Connection::open(shop)?;
    shop.busy_timeout(Duration::from_secs(10))?;
    let mut query =
        shop.prepare("select distinct batch from orders where state = 'expired' order by batch")?;
    query.query_map([], |row| row.get(0))?.collect()
}

fn work(name: &str, options: &Options) -> Result<(), Anything> {
    // A worker ends with the demo that started it, however that ends.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    let (Some(shop), Some(store)) = (&options.shop, &options.store) else {
        return Err("a worker needs --shop and --store".into());
    };
    let job = Job { name: name.into(), shop: shop.clone(), fenced: !options.unfenced };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
        let settings = ClientOptions::default().with(|o| {
            o.namespace = options.namespace.clone();
            o.ttl = options.ttl;
            o.label = Some(name.into());
        });
        let locks = LockClient::with_options(lockcore_examples::connect(store).await?, settings);
        scan(&locks, &job, options.halts).await?;
        locks.close().await;
        Ok(())
    })
}

fn say(line: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    out.flush()
}

// --------------------------------------------------------------------------------------------------- the schedule

fn demonstrate(options: &Options) -> Result<(), Anything> {
    let directory = tempfile::tempdir()?;
    let store = options.store.clone().unwrap_or_else(|| lockcore_examples::sqlite_in(directory.path()));
    println!(
        "{} expired orders, {} workers, one lock a batch of {PER_BATCH}, TTL {}.\n\
         Each worker reads a batch, then closes it and gives the stock back in one transaction.\n",
        options.orders,
        options.workers,
        show_duration(options.ttl)
    );
    println!("With the fence: the database compares stamps (fence.owner) in the same transaction.");
    let fenced = Run::new(options, directory.path(), &store, true)?.play(options.workers)?;
    println!("\nThe same schedule without the fence: the database takes what comes.");
    let bare = Run::new(options, directory.path(), &store, false)?.play(options.workers)?;

    println!("\n                        closed once   closed twice   stock   stale writes refused");
    for (what, outcome) in [("with the fence", &fenced), ("without the fence", &bare)] {
        println!(
            "  {what:<20} {:>12} {:>14}   {:<7} {:>20}",
            outcome.once,
            outcome.twice,
            if outcome.surplus == 0 { "right".to_owned() } else { format!("{:+}", outcome.surplus) },
            outcome.refused
        );
    }
    let mut wrong = Vec::new();
    if fenced.once != options.orders || fenced.twice != 0 {
        wrong.push("with the fence, not every order was closed exactly once");
    }
    if fenced.surplus != 0 {
        wrong.push("with the fence, the stock is wrong");
    }
    if fenced.refused == 0 {
        wrong.push("with the fence, no stale write was refused: the schedule did not do its work");
    }
    if bare.twice == 0 || bare.surplus == 0 {
        wrong.push("without the fence, nothing was closed twice: the schedule did not do its work");
    }
    if wrong.is_empty() {
        println!(
            "\nA lease is not safety: the worker believed in its lock until it was frozen. The fence stopped it."
        );
        return Ok(());
    }
    Err(wrong.join("; ").into())
}

/// What the database shows at the end.
struct Outcome {
    once: u32,
    twice: u32,
    /// Stock given back beyond what the orders held.
    surplus: i64,
    refused: usize,
}

/// One line of a worker.
struct Line {
    at: Instant,
    worker: usize,
    words: Vec<String>,
}

struct Run {
    fenced: bool,
    shop: PathBuf,
    expected: i64,
    start: Instant,
    workers: Vec<(String, Child)>,
    lines: mpsc::Receiver<Line>,
    sender: mpsc::Sender<Line>,
    refused: usize,
    command: Vec<String>,
}

impl Run {
    fn new(options: &Options, directory: &Path, store: &str, fenced: bool) -> Result<Self, Anything> {
        let kind = if fenced { "fenced" } else { "bare" };
        let shop = directory.join(format!("shop-{kind}.db"));
        let expected = fill(&shop, options.orders)?;
        let (sender, lines) = mpsc::channel();
        let mut command: Vec<String> = ["--store", store, "--shop"].map(String::from).to_vec();
        command.push(shop.display().to_string());
        // A namespace of its own: a shared store keeps nothing that another run could trip over.
        let namespace = format!("demo-{}-{kind}", std::process::id());
        command.extend([
            "--namespace".into(),
            namespace,
            "--ttl".into(),
            show_duration(options.ttl).to_string(),
        ]);
        if !fenced {
            command.push("--unfenced".into());
        }
        let mut run = Self {
            fenced,
            shop,
            expected,
            start: Instant::now(),
            workers: Vec::new(),
            lines,
            sender,
            refused: 0,
            command,
        };
        run.start_worker(true)?;
        Ok(run)
    }

    fn start_worker(&mut self, halts: bool) -> Result<(), Anything> {
        let place = self.workers.len();
        let name = worker_name(place);
        let mut command = Command::new(std::env::current_exe()?);
        command.args(&self.command).args(["--worker", &name]).stdin(Stdio::piped()).stdout(Stdio::piped());
        if halts {
            command.arg("--halts");
        }
        let mut child = command.spawn()?;
        let output = child.stdout.take().ok_or("a worker without an output")?;
        let sender = self.sender.clone();
        std::thread::spawn(move || {
            for text in BufReader::new(output).lines().map_while(Result::ok) {
                let words = text.split(' ').map(String::from).collect();
                // The demo has ended: nobody listens any more.
                let _ = sender.send(Line { at: Instant::now(), worker: place, words });
            }
        });
        self.workers.push((name, child));
        Ok(())
    }

    fn play(mut self, workers: u32) -> Result<Outcome, Anything> {
        // 1. The first worker has read a batch and is about to write.
        let halted = self.until(0, "halts")?;
        let batch = halted.words.get(1).cloned().unwrap_or_default();
        // 2. It is frozen there. The line that lets it go on waits in its pipe.
        let pid = Pid::from_child(&self.workers[0].1);
        kill_process(pid, Signal::STOP)?;
        waitid(WaitId::Pid(pid), WaitIdOptions::STOPPED)?;
        self.tell(Instant::now(), 0, "is frozen (SIGSTOP) between its read and its write");
        if let Some(input) = &mut self.workers[0].1.stdin {
            writeln!(input, "go on")?;
        }
        // 3. The others take turns; when the lease is over, one of them takes the batch and does the work.
        for _ in 1..workers {
            self.start_worker(false)?;
        }
        loop {
            let line = self.next()?;
            if line.words[0] == "closed" && line.words.get(1) == Some(&batch) {
                break;
            }
        }
        // 4. The first wakes up and writes.
        self.tell(Instant::now(), 0, "wakes up (SIGCONT) and goes on where it was");
        kill_process(pid, Signal::CONT)?;
        if self.fenced {
            self.until(0, "refused")?;
        }
        // 5. Everybody ends.
        for place in 0..self.workers.len() {
            let status = self.workers[place].1.wait()?;
            if !status.success() {
                return Err(format!("{} ended with {status}", self.workers[place].0).into());
            }
        }
        while let Ok(line) = self.lines.recv_timeout(Duration::from_millis(100)) {
            self.show(&line);
        }
        self.judge()
    }

    fn until(&mut self, worker: usize, what: &str) -> Result<Line, Anything> {
        loop {
            let line = self.next()?;
            if line.worker == worker && line.words[0] == what {
                return Ok(line);
            }
        }
    }

    fn next(&mut self) -> Result<Line, Anything> {
        let begun = Instant::now();
        loop {
            if let Ok(line) = self.lines.recv_timeout(Duration::from_millis(200)) {
                self.show(&line);
                return Ok(line);
            }
            for (name, worker) in &mut self.workers {
                if let Some(status) = worker.try_wait()?.filter(|status| !status.success()) {
                    return Err(format!("{name} ended with {status}").into());
                }
            }
            if begun.elapsed() > WATCHDOG {
                return Err("no worker has said anything for a minute".into());
            }
        }
    }

    fn show(&mut self, line: &Line) {
        let word = |n: usize| line.words.get(n).map_or("", String::as_str);
        let fence = |n: usize| word(n).split('.').next().unwrap_or("").to_owned();
        let text = match word(0) {
            "granted" => format!("holds batch {} under fence {}", word(1), fence(2)),
            "halts" => format!("has read {} orders of batch {} and asked its lock: held", word(3), word(1)),
            "woke" => format!("asks its lock again: {}; its write is on the way all the same", word(3)),
            "closed" => format!("closed {} orders of batch {} (fence {})", word(3), word(1), fence(2)),
            "lost" => format!("is told that its lease on batch {} is over", word(1)),
            "refused" => {
                self.refused += 1;
                format!("REFUSED by the database: fence {} is stale, it has seen {}", fence(2), fence(3))
            }
            _ => line.words.join(" "),
        };
        self.tell(line.at, line.worker, &text);
    }

    fn tell(&self, at: Instant, worker: usize, text: &str) {
        let since = at.saturating_duration_since(self.start);
        println!("  {:>6.3} s  {:<6} {text}", since.as_secs_f64(), worker_name(worker));
    }

    fn judge(self) -> Result<Outcome, Anything> {
        let shop = Connection::open(&self.shop)?;
        let mut times: BTreeMap<u32, u32> = BTreeMap::new();
        let mut query = shop.prepare("select count(*) from closings group by order_id")?;
        for count in query.query_map([], |row| row.get::<_, u32>(0))? {
            *times.entry(count?).or_default() += 1;
        }
        let stock: i64 = shop.query_row("select sum(n) from stock", [], |row| row.get(0))?;
        let once = times.remove(&1).unwrap_or(0);
        Ok(Outcome {
            once,
            twice: times.values().sum(),
            surplus: stock - self.expected,
            refused: self.refused,
        })
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        for (_, child) in &mut self.workers {
            // Ended already, or no longer wanted.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn worker_name(place: usize) -> String {
    const NAMES: [&str; 6] = ["ann", "bob", "carol", "dave", "eve", "frank"];
    NAMES.get(place).map_or_else(|| format!("w{place}"), |name| (*name).to_owned())
}

/// Writes the order database; returns the stock that is right when every order was closed once.
fn fill(path: &Path, orders: u32) -> Result<i64, Anything> {
    let mut shop = Connection::open(path)?;
    shop.pragma_update(None, "journal_mode", "wal")?;
    FenceTable.create(&shop)?;
    shop.execute_batch(
        "create table orders(id integer primary key, batch int, item int, quantity int, state text);
         create table stock(item integer primary key, n int);
         create table closings(order_id int, worker text, fence int);",
    )?;
    let tx = shop.transaction()?;
    let mut expected = 0;
    for item in 0..ITEMS {
        tx.execute("insert into stock values (?1, 100)", [item])?;
        expected += 100;
    }
    for id in 0..orders {
        let quantity = id % 5 + 1;
        expected += i64::from(quantity);
        tx.execute(
            "insert into orders values (?1, ?2, ?3, ?4, 'expired')",
            [id, id / PER_BATCH, id % ITEMS, quantity],
        )?;
    }
    tx.commit()?;
    Ok(expected)
}
