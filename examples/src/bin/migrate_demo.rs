//! A fleet of processes moves from one store to another by rolling restarts, and back, without a stop: they hold and
//! wait, one is killed, one is paused, one sleeps through the whole move. The resource looks at every write. Only the
//! configuration changes; the program is the same.
#![allow(clippy::print_stdout)]

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use clap::Parser;
use lockcore::{
    ClientOptions, ErrorKind, LockClient,
    backend::{BootClock, Call, LockBackend},
    config::{Config, LockManager},
    migrate::{Migration, Stage},
    text::show_duration,
};
use lockcore_fenced::sqlite::FenceTable;
use rusqlite::{Connection, OptionalExtension as _, TransactionBehavior::Immediate, params};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

/// Moves a running fleet from one store to another and back, and counts what the resource saw.
#[derive(Clone, Debug, Parser)]
#[command(name = "migrate_demo")]
struct Options {
    /// The store that locks leave; a SQLite file unless given.
    #[arg(long)]
    from: Option<String>,
    /// The store that they go to; another SQLite file unless given.
    #[arg(long)]
    to: Option<String>,
    /// Processes of the fleet.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(3..=20))]
    workers: u32,
    /// How long a lease lives without a renewal; a membership lives three times as long.
    #[arg(long, default_value = "1s", value_parser = ttl)]
    ttl: Duration,
    /// Changes the store in one rolling restart, as one would without a bridge: what goes wrong then.
    #[arg(long)]
    naive: bool,
    /// Runs as a worker; the demo starts them itself.
    #[arg(long, hide = true)]
    worker: Option<String>,
    /// The configuration file of a worker.
    #[arg(long, hide = true)]
    config: Option<PathBuf>,
    /// The resource's database.
    #[arg(long, hide = true)]
    shop: Option<PathBuf>,
}

fn ttl(text: &str) -> Result<Duration, String> {
    lockcore_examples::parse_ttl(text, Duration::from_millis(500))
}

type Anything = Box<dyn std::error::Error + Send + Sync>;
const ACCOUNTS: u32 = 3;
/// Nothing here takes this long; a demo that hangs says so.
const WATCHDOG: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    let options = Options::parse();
    let outcome = match &options.worker {
        Some(name) => work(name, &options),
        None => demonstrate(&options),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("migrate_demo: {error}");
            ExitCode::FAILURE
        }
    }
}

// ---------------------------------------------------------------------------------------------- the application

/// Books on an account, again and again, until it is told to end. It knows a risk level and a file, and no store.
async fn book(name: &str, options: &Options) -> Result<(), Anything> {
    let (Some(config), Some(shop)) = (&options.config, &options.shop) else {
        return Err("a worker needs --config and --shop".into());
    };
    let config: Config = toml::from_str(&std::fs::read_to_string(config)?)?;
    let label = ClientOptions::default().with(|o| o.label = Some(name.into()));
    let manager = LockManager::start_with(&config, &lockcore_examples::registry(), label).await?;
    let locks = manager.level("guarded")?;
    let mut shop = open_shop(shop)?;
    shop.execute("insert into started(worker) values (?1)", [name])?;
    let mut end = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate())?;
    let mut turn = name.bytes().map(u32::from).sum::<u32>();
    loop {
        turn += 1;
        let account = format!("account/{}", turn % ACCOUNTS);
        let begun = Instant::now();
        let guard = tokio::select! {
            biased;
            _ = end.recv() => break,
            guard = locks.named(&account).acquire() => guard,
        };
        let outcome = match &guard {
            Ok(_) => "granted",
            Err(error) if error.kind() == ErrorKind::Misconfigured => {
                note(&shop, name, "closed", begun)?;
                println!("{error}");
                break;
            }
            Err(error) if error.kind() == ErrorKind::WaitTimeout => "busy",
            Err(_) => "failed",
        };
        note(&shop, name, outcome, begun)?;
        let Ok(guard) = guard else { continue };
        let watch = guard.watch();
        for step in 0..3 {
            // From here on the lock is believed in, at this very moment.
            let now = i64::try_from(BootClock::read().as_nanos())?;
            let Ok(stamp) = watch.stamp() else { break };
            // Whether or not the resource will let it through.
            shop.execute(
                "insert into held(account, worker, fence, first, last) values (?1, ?2, ?3, ?4, ?4)
                 on conflict(account, fence, worker) do update set last = excluded.last",
                params![account, name, stamp.fence.get(), now],
            )?;
            let tx = shop.transaction_with_behavior(Immediate)?;
            match FenceTable.admit(&tx, &account, stamp, &step.to_string()) {
                Ok(_) => {
                    tx.execute("update accounts set booked = booked + 1 where name = ?1", [&account])?;
                    tx.execute("insert into writes(at) values (?1)", [now])?;
                    tx.commit()?;
                }
                Err(lockcore_fenced::sqlite::Error::Stale(_)) => {
                    tx.rollback()?;
                    // Still live when the answer is there: then the resource refused the only holder.
                    let live = watch.ensure_held().is_ok();
                    shop.execute("insert into refused(worker, live) values (?1, ?2)", params![name, live])?;
                }
                Err(error) => return Err(error.into()),
            }
            tokio::time::sleep(Duration::from_millis(15)).await;
        }
        // A release that goes unheard is the background's business.
        let _ = guard.release().await;
    }
    manager.close().await;
    Ok(())
}

fn note(shop: &Connection, worker: &str, outcome: &str, begun: Instant) -> rusqlite::Result<()> {
    let waited = i64::try_from(begun.elapsed().as_micros()).unwrap_or(i64::MAX);
    let insert = "insert into acquires(worker, outcome, waited) values (?1, ?2, ?3)";
    shop.execute(insert, params![worker, outcome, waited]).map(drop)
}

fn work(name: &str, options: &Options) -> Result<(), Anything> {
    // A worker ends with the demo that started it, however that ends.
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(book(name, options))
}

fn open_shop(path: &Path) -> rusqlite::Result<Connection> {
    let shop = Connection::open(path)?;
    shop.busy_timeout(Duration::from_secs(20))?;
    shop.pragma_update(None, "synchronous", "normal")?;
    Ok(shop)
}

fn fill(path: &Path) -> Result<Connection, Anything> {
    let shop = open_shop(path)?;
    shop.pragma_update(None, "journal_mode", "wal")?;
    FenceTable.create(&shop)?;
    shop.execute_batch(
        "create table accounts(name text primary key, booked int);
         create table held(account text, worker text, fence int, first int, last int, primary key(account, fence, worker));
         create table writes(at int);
         create table refused(worker text, live int);
         create table acquires(worker text, outcome text, waited int);
         create table started(worker text);",
    )?;
    for account in 0..ACCOUNTS {
        shop.execute("insert into accounts values (?1, 0)", [format!("account/{account}")])?;
    }
    Ok(shop)
}

// ------------------------------------------------------------------------------------------------ the operator

fn demonstrate(options: &Options) -> Result<(), Anything> {
    let directory = tempfile::tempdir()?;
    let url = |given: &Option<String>, file: &str| {
        given.clone().unwrap_or_else(|| format!("sqlite://{}/{file}.db", directory.path().display()))
    };
    let (from, to) = (url(&options.from, "old"), url(&options.to, "new"));
    println!(
        "{} processes book on {ACCOUNTS} accounts, one lock an account, TTL {}.\nfrom {from}\nto   {to}\n",
        options.workers,
        show_duration(options.ttl)
    );
    let shop = directory.path().join("shop.db");
    let watcher = fill(&shop)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut fleet = Fleet {
        options: options.clone(),
        directory: directory.path().to_owned(),
        urls: [from, to],
        namespace: format!("demo-{}", std::process::id()),
        shop,
        watcher,
        workers: Vec::new(),
        sleeper: None,
        started: 0,
        start: Instant::now(),
    };
    let story = if options.naive { fleet.naive() } else { runtime.block_on(fleet.story()) };
    fleet.end()?;
    story?;
    let seen = fleet.judge()?;
    seen.print();
    if options.naive {
        println!("\nWithout the bridge, who was restarted and who was not did not exclude each other.");
        return if seen.double > 0 { Ok(()) } else { Err("nothing went wrong; run it again".into()) };
    }
    if seen.wrong() {
        return Err("a promise was broken".into());
    }
    println!("\nThe fleet moved and came back while it worked; no write of a live holder was refused.");
    Ok(())
}

struct Fleet {
    options: Options,
    directory: PathBuf,
    urls: [String; 2],
    namespace: String,
    shop: PathBuf,
    watcher: Connection,
    workers: Vec<(String, Child)>,
    /// The one that sleeps through the move.
    sleeper: Option<(String, Child)>,
    started: u32,
    start: Instant,
}

impl Fleet {
    /// What one would do: change the URL and restart the processes one after the other.
    fn naive(&mut self) -> Result<(), Anything> {
        for _ in 0..self.options.workers {
            self.begin("old")?;
        }
        self.let_work()?;
        self.tell("the fleet is restarted from the old store onto the new one, one process after the other");
        self.roll("new")?;
        self.let_work()
    }

    async fn story(&mut self) -> Result<(), Anything> {
        for _ in 0..self.options.workers {
            self.begin("old")?;
        }
        self.tell("the fleet works on the old store, without a bridge");
        self.let_work()?;

        let (migration, call) = self.migration().await?;
        for (stage, place) in [
            (Stage::From, Some("from")),
            (Stage::FromBoth, Some("both")),
            (Stage::Both, None),
            (Stage::BothTo, Some("to")),
            (Stage::To, Some("new")),
        ] {
            self.step(&migration, &call, stage).await?;
            if stage == Stage::FromBoth {
                self.fall_asleep()?;
            }
            if let Some(place) = place {
                self.roll(place)?;
                self.let_work()?;
            }
        }
        self.tell("the move is over: the fleet works on the new store, without a bridge");
        self.wake_up()?;

        self.tell("and back: the same steps from the other end");
        self.roll("to")?;
        for (stage, place) in [
            (Stage::BothTo, Some("both")),
            (Stage::Both, None),
            (Stage::FromBoth, Some("from")),
            (Stage::From, Some("old")),
        ] {
            self.step(&migration, &call, stage).await?;
            if let Some(place) = place {
                self.roll(place)?;
                self.let_work()?;
            }
        }
        self.tell("back on the old store, without a bridge");
        Ok(())
    }

    async fn migration(&self) -> Result<(Migration, Call), Anything> {
        let mut stores: Vec<Arc<dyn LockBackend>> = Vec::new();
        for url in &self.urls {
            stores.push(lockcore_examples::connect(url).await?);
        }
        let options = ClientOptions::default().with(|o| {
            o.namespace.clone_from(&self.namespace);
            o.label = Some("operator".into());
        });
        let (_, call) = LockClient::with_options(stores[0].clone(), options).backend()?;
        let (Some(to), Some(from)) = (stores.pop(), stores.pop()) else { return Err("two stores".into()) };
        Ok((Migration::new("moving", from, to)?, call))
    }

    /// Steps, and waits for those who are still in a phase that closes.
    async fn step(&mut self, migration: &Migration, call: &Call, stage: Stage) -> Result<(), Anything> {
        let begun = Instant::now();
        loop {
            match migration.step(call, stage).await {
                Ok(_) => break,
                Err(error) if error.kind() == ErrorKind::Held && begun.elapsed() < WATCHDOG => {
                    self.tell(&format!("the step waits: {}", error.message()));
                }
                Err(error) => return Err(error.into()),
            }
            while migration.status(call).await?.in_the_way(stage).next().is_some() {
                if begun.elapsed() > WATCHDOG {
                    return Err(format!("{stage} is still not reached").into());
                }
                self.look_after()?;
                // Between two looks: no store tells who leaves a phase.
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        self.tell(&format!("stage {stage}"));
        Ok(())
    }

    fn begin(&mut self, place: &str) -> Result<(), Anything> {
        let name = format!("w{}-{place}", self.started);
        self.started += 1;
        let config = self.directory.join(format!("{place}.toml"));
        std::fs::write(&config, self.config(place))?;
        let child = Command::new(std::env::current_exe()?)
            .args(["--worker", &name, "--config"])
            .arg(&config)
            .arg("--shop")
            .arg(&self.shop)
            .stdin(Stdio::null())
            .spawn()?;
        self.workers.push((name.clone(), child));
        self.until(&format!("{name} to start"), |fleet| {
            let seen = "select 1 from started where worker = ?1";
            Ok(fleet.watcher.query_row(seen, [&name], |_| Ok(())).optional()?.is_some())
        })
    }

    fn config(&self, place: &str) -> String {
        let [old, new] = &self.urls;
        let (backend, phase) = match place {
            "old" | "new" => (place, "from"),
            phase => ("moving", phase),
        };
        format!(
            "namespace = {namespace:?}\n[backend]\nold = {old:?}\nnew = {new:?}\n\
             [bridge.moving]\nfrom = \"old\"\nto = \"new\"\nphase = {phase:?}\nmembership = \"{membership}\"\n\
             [risk.guarded]\nbackend = {backend:?}\nttl = \"{ttl}\"\nwait = \"10s\"\nmax-hold = \"30s\"\n",
            namespace = self.namespace,
            membership = show_duration(self.options.ttl * 3),
            ttl = show_duration(self.options.ttl),
        )
    }

    /// Restarts one process after the other. Of those that go, one is killed; of those that stay, one is paused beyond
    /// its TTL.
    fn roll(&mut self, place: &str) -> Result<(), Anything> {
        let old = std::mem::take(&mut self.workers);
        let count = old.len();
        for (at, (name, mut child)) in old.into_iter().enumerate() {
            if at == count / 2 {
                kill_process(Pid::from_child(&child), Signal::KILL)?;
                self.tell(&format!("{name} is killed"));
                child.wait()?;
            } else {
                kill_process(Pid::from_child(&child), Signal::TERM)?;
                let status = child.wait()?;
                if !status.success() {
                    return Err(format!("{name} ended with {status}").into());
                }
            }
            self.begin(place)?;
            if at == 1 {
                let Some((name, paused)) = self.workers.first() else { continue };
                let pid = Pid::from_child(paused);
                self.stop(pid)?;
                self.tell(&format!("{name} is paused for longer than its TTL"));
                // The pause itself, not a wait for an effect.
                std::thread::sleep(self.options.ttl * 3 / 2);
                kill_process(pid, Signal::CONT)?;
            }
        }
        self.tell(&format!("restarted with {}", describe(place)));
        self.look_after()
    }

    /// Lets every process of the fleet write some more.
    fn let_work(&mut self) -> Result<(), Anything> {
        let before = self.writes()?;
        let enough = before + 20 * i64::from(self.options.workers);
        self.until("the fleet to write", |fleet| Ok(fleet.writes()? >= enough))
    }

    /// One process stops in phase `from`, with all it knows, until the move is over.
    fn fall_asleep(&mut self) -> Result<(), Anything> {
        let (name, child) = self.workers.remove(0);
        self.stop(Pid::from_child(&child))?;
        self.tell(&format!("{name} falls asleep in phase `from`"));
        self.sleeper = Some((name, child));
        self.begin("from")
    }

    /// Stops a process outside of its transactions: one that is stopped inside holds a SQLite file for all others, which
    /// is another story.
    fn stop(&self, pid: Pid) -> Result<(), Anything> {
        let files = self.urls.iter().filter_map(|url| url.strip_prefix("sqlite://")).map(PathBuf::from);
        let files: Vec<PathBuf> = files.chain([self.shop.clone()]).collect();
        loop {
            kill_process(pid, Signal::STOP)?;
            waitid(WaitId::Pid(pid), WaitIdOptions::STOPPED)?;
            let free = |file: &PathBuf| -> rusqlite::Result<()> {
                let db = Connection::open(file)?;
                db.busy_timeout(Duration::from_millis(500))?;
                db.execute_batch("begin immediate; rollback")
            };
            if files.iter().all(|file| free(file).is_ok()) {
                return Ok(());
            }
            kill_process(pid, Signal::CONT)?;
            std::thread::sleep(Duration::from_millis(7));
        }
    }

    fn wake_up(&mut self) -> Result<(), Anything> {
        let Some((name, mut child)) = self.sleeper.take() else { return Ok(()) };
        self.tell(&format!("{name} wakes up, goes on, and hears:"));
        kill_process(Pid::from_child(&child), Signal::CONT)?;
        let begun = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if begun.elapsed() > WATCHDOG {
                child.kill()?;
                child.wait()?;
                return Err(format!("{name} goes on in a phase that is closed").into());
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        if status.success() { Ok(()) } else { Err(format!("{name} ended with {status}").into()) }
    }

    fn writes(&self) -> rusqlite::Result<i64> {
        self.watcher.query_row("select count(*) from writes", [], |row| row.get(0))
    }

    fn until(&mut self, what: &str, done: impl Fn(&Self) -> Result<bool, Anything>) -> Result<(), Anything> {
        let begun = Instant::now();
        while !done(self)? {
            if begun.elapsed() > WATCHDOG {
                return Err(format!("waited in vain for {what}").into());
            }
            self.look_after()?;
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    fn look_after(&mut self) -> Result<(), Anything> {
        for (name, child) in &mut self.workers {
            if let Some(status) = child.try_wait()? {
                return Err(format!("{name} ended with {status}").into());
            }
        }
        Ok(())
    }

    fn tell(&self, text: &str) {
        println!("  {:>7.3} s  {text}", self.start.elapsed().as_secs_f64());
    }

    fn end(&mut self) -> Result<(), Anything> {
        for (_, child) in &self.workers {
            // One that has ended already is told below.
            let _ = kill_process(Pid::from_child(child), Signal::TERM);
        }
        for (_, child) in &mut self.workers {
            child.wait()?;
        }
        self.workers.clear();
        Ok(())
    }

    fn judge(&self) -> Result<Seen, Anything> {
        let db = &self.watcher;
        let mut held: BTreeMap<String, Vec<(i64, i64, i64)>> = BTreeMap::new();
        let mut query = db.prepare("select account, first, last, fence from held order by account, first")?;
        let rows = query
            .query_map([], |row| Ok((row.get::<_, String>(0)?, (row.get(1)?, row.get(2)?, row.get(3)?))))?;
        for row in rows {
            let (account, hold) = row?;
            held.entry(account).or_default().push(hold);
        }
        let (mut holds, mut double, mut back) = (0, 0, 0);
        for account in held.values() {
            holds += account.len();
            let (mut last_end, mut highest) = (i64::MIN, 0);
            for (first, last, fence) in account {
                double += usize::from(*first <= last_end);
                back += usize::from(*fence <= highest);
                last_end = last_end.max(*last);
                highest = highest.max(*fence);
            }
        }
        let count = |what: &str| db.query_row(what, [], |row| row.get::<_, i64>(0));
        let mut times = db.prepare("select at from writes order by at")?;
        let times: Vec<i64> = times.query_map([], |row| row.get(0))?.collect::<Result<_, _>>()?;
        let gap = times.windows(2).map(|pair| pair[1] - pair[0]).max().unwrap_or(0);
        let booked = count("select sum(booked) from accounts")?;
        Ok(Seen {
            writes: times.len(),
            booked,
            holds,
            double,
            back,
            refused_live: count("select count(*) from refused where live")?,
            refused_stale: count("select count(*) from refused where not live")?,
            granted: count("select count(*) from acquires where outcome = 'granted'")?,
            busy: count("select count(*) from acquires where outcome = 'busy'")?,
            failed: count("select count(*) from acquires where outcome = 'failed'")?,
            closed: count("select count(*) from acquires where outcome = 'closed'")?,
            longest: count("select coalesce(max(waited), 0) from acquires where outcome = 'granted'")?,
            gap: Duration::from_nanos(gap.unsigned_abs()),
            took: self.start.elapsed(),
        })
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for (_, child) in self.workers.iter_mut().chain(&mut self.sleeper) {
            // Ended already, or no longer wanted.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn describe(place: &str) -> String {
    match place {
        "old" => "the old store alone".into(),
        "new" => "the new store alone".into(),
        phase => format!("phase = \"{phase}\""),
    }
}

/// What the resource saw.
struct Seen {
    writes: usize,
    booked: i64,
    holds: usize,
    double: usize,
    back: usize,
    refused_live: i64,
    refused_stale: i64,
    granted: i64,
    busy: i64,
    failed: i64,
    closed: i64,
    longest: i64,
    gap: Duration,
    took: Duration,
}

impl Seen {
    fn wrong(&self) -> bool {
        self.double > 0
            || self.back > 0
            || self.refused_live > 0
            || i64::try_from(self.writes) != Ok(self.booked)
            || self.closed != 1
    }

    fn print(&self) {
        let asked = self.granted + self.busy + self.failed;
        let share = 100.0 * self.granted as f64 / asked.max(1) as f64;
        println!("\n  holds                          {}", self.holds);
        println!("  writes that were accepted      {} ({} booked)", self.writes, self.booked);
        println!("  double holds                   {}", self.double);
        println!("  fences that went back          {}", self.back);
        println!("  writes of live holders refused {}", self.refused_live);
        println!("  writes of late holders refused {}", self.refused_stale);
        println!(
            "  availability                   {share:.2} % of {asked} acquires were granted, {} busy, {} failed",
            self.busy, self.failed
        );
        println!("  processes sent away            {}", self.closed);
        println!("  longest wait for a lock        {:.1} s", self.longest as f64 / 1e6);
        println!(
            "  longest time without a write   {:.1} s of {:.0} s",
            self.gap.as_secs_f64(),
            self.took.as_secs_f64()
        );
    }
}
