//! What can be written on the command line: one definition for parsing, `--help`, completions and the manual.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum, ValueHint};

use crate::duration::{self, Wait};

/// The whole command line.
#[derive(Debug, Parser)]
#[command(
    name = "lockctl",
    version,
    about = "Runs commands under a distributed lock, and looks after the locks",
    long_about = "Runs commands under a distributed lock, and looks after the locks.\n\n\
        A lock keeps honest processes out of each other's way. It cannot stop a holder that was paused and wakes up \
        late: hand LOCK_STAMP to the resource and let it refuse what is stale.",
    after_help = EXAMPLES,
    max_term_width = 100,
    propagate_version = true,
    subcommand_required = true,
    arg_required_else_help = true
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// What every sub-command takes.
    #[command(flatten)]
    pub common: Common,
}

const EXAMPLES: &str = "\
Examples:
  lockctl run nightly/report -- /opt/shop/report.sh
  lockctl run --wait 10m --ttl 1m deploy -- ./deploy.sh --all
  lockctl run --wait forever leader/scheduler -- /opt/shop/scheduler
  lockctl inspect nightly/report
  lockctl break nightly/report --expect 42.9f3c52d1a07be664 --reason 'host is gone'

Exit codes of our own: 111 busy, 112 waited in vain, 113 lost, 114 uncertain, 115 store unavailable,
116 set-up refused, 117 hold limit, 125 wrong use, 126 not executable, 127 not found.";

const RUN_EXAMPLES: &str = "\
Examples:
  cron: skip quietly when another run is at it, mail only on trouble
    lockctl run -E 0 --max-hold 2h nightly/report -- /opt/shop/report.sh
  wait up to ten minutes, then give up with 112
    lockctl run --wait 10m deploy -- ./deploy.sh
  a shell line
    lockctl run stock -- sh -c 'fetch && publish \"$LOCK_STAMP\"'

The command gets LOCK_NAME, LOCK_FENCE, LOCK_OWNER_DIGEST, LOCK_STAMP, LOCK_TTL_MS, LOCK_LOSS_FD, LOCK_STATE and,
with --max-hold, LOCK_HOLD_UNTIL. Its exit code is passed on.";

#[cfg(feature = "compare")]
const COMPARE_EXAMPLES: &str = "\
Examples:
  lockctl compare --store sqlite=sqlite:///var/lib/shop/locks.db --store redis=redis://redis-a:6379
  lockctl compare --config locks.toml --store main --baseline stores.baseline
  lockctl compare --store redis=redis://redis-a:6379 --baseline stores.baseline --update
  lockctl compare --store redis=redis://redis-a:6379 --format html > stores.html";

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Runs a command while holding a lock
    #[command(after_help = RUN_EXAMPLES, override_usage = "lockctl run [OPTIONS] NAME -- COMMAND [ARG...]")]
    Run(Box<Run>),
    /// Asks, inside a run, whether the lock is still held, and for long enough
    ///
    /// Compares LOCK_STATE with the clock itself and asks nobody, so it is right even while lockctl is stopped. Exits
    /// with 0 when the lock is held for that long, with 113 when it is not, and with 125 when it cannot tell.
    #[command(
        after_help = "Example:\n  lockctl check --for 5s || exit 113\n  psql -v stamp=\"$LOCK_STAMP\" -f publish.sql"
    )]
    Check(Check),
    /// Shows who holds a lock, and its fence
    #[command(
        after_help = "Examples:\n  lockctl inspect nightly/report\n  lockctl inspect --json nightly/report | jq -r .holder.stamp\n  lockctl inspect --watch leader/scheduler"
    )]
    Inspect(Inspect),
    /// Lists the locks that the store has a record of
    #[command(after_help = "Example:\n  lockctl list nightly")]
    List(List),
    /// Takes a lock away from its holder and raises the fence above it
    ///
    /// The command of a broken holder is stopped when its lockctl hears of it; whatever it sends before that is
    /// refused only by a resource that checks the fence.
    #[command(
        after_help = "Example:\n  lockctl break nightly/report --expect \"$(lockctl inspect --json nightly/report | jq -r .holder.stamp)\" --reason 'host is gone'"
    )]
    Break(Break),
    /// Shows or raises the fence of a lock, or brings all fences of a namespace up to the clock
    ///
    /// --seed is for a store that was restored from a backup or wiped: it cannot know which fences it gave out since. What
    /// the resources have seen lies below the time in microseconds, if the store counts from the time; so the next fence
    /// must be above the time of now. Nothing ever goes down.
    #[command(
        after_help = "Examples:\n  lockctl fence nightly/report\n  lockctl fence nightly/report --raise 1000000\n  lockctl fence --seed"
    )]
    Fence(Fence),
    /// Moves locks from one store to another while they are in use, a stage at a time, and back
    ///
    /// A bridge of the configuration file names the two stores. The stores keep where the move stands; the processes keep
    /// to the phase of their own file. Between two stages the fleet is restarted into the next phase.
    #[command(
        after_help = "Examples:\n  lockctl migrate plan\n  lockctl migrate status moving\n  lockctl migrate advance --wait 2m moving\n  lockctl migrate rollback --dry-run moving\n  lockctl migrate status moving --from redis://redis-a:6379 --to etcd://etcd-1:2379 --namespace shop\n\nExits with 111 when somebody is still in a phase that the step closes, with 112 after waiting for that in vain."
    )]
    Migrate(Migrate),
    /// Looks at every configured store: what it cannot keep, and how to put that right
    ///
    /// Exits with 0 when every level of the file is kept, with 116 when one is not or a store refuses us, and with 115 when
    /// a store cannot be reached.
    #[command(
        after_help = "Examples:\n  lockctl doctor\n  lockctl doctor --store redis://redis-a:6379\n  lockctl doctor --json | jq '.stores[].findings'"
    )]
    Doctor(Doctor),
    /// Puts stores to the test, side by side, on the servers that you have
    ///
    /// Plays the cases of the conformance suite against each store, one after the other and within a bound on load, in
    /// namespaces of its own that are removed at the end. Cases that need power over the servers are not run. Exits with 0
    /// when every case ran as expected and nothing differs from the baseline, with 1 when something does, with 115 when a
    /// store could not be asked.
    #[cfg(feature = "compare")]
    #[command(after_help = COMPARE_EXAMPLES)]
    Compare(Box<Compare>),
    /// Checks the configuration file, or shows the settings that would be used
    Config(Config),
    /// Writes a completion script for a shell
    #[command(after_help = "Example:\n  lockctl completions bash > /etc/bash_completion.d/lockctl")]
    Completions(Completions),
    /// Writes the manual page
    #[command(after_help = "Example:\n  lockctl man > /usr/local/share/man/man1/lockctl.1")]
    Man,
}

/// What every sub-command takes.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Everywhere")]
pub struct Common {
    /// Writes JSON: to stdout, for `run` one line an event to stderr
    #[arg(long, global = true)]
    pub json: bool,
    /// Says nothing; the exit code tells
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// Says more
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub verbose: u8,
    /// Colours
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto")]
    pub color: Color,
}

/// When to use colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Color {
    /// On a terminal, unless NO_COLOR is set.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// Which store.
// `conflicts_with` would count a variable in the environment as present, and an exported LOCKCTL_STORE would make
// `--risk` an error: `store::choose` decides, option before environment.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Store")]
pub struct StoreArgs {
    /// Address of the store, like sqlite:///var/lib/shop/locks.db or redis://redis-a:6379; a password is refused here
    #[arg(short, long, value_name = "URL", env = "LOCKCTL_STORE", hide_env_values = true)]
    pub store: Option<OsString>,
    /// Level of the configuration file to use
    #[arg(long, value_name = "LEVEL", env = "LOCKCTL_RISK", hide_env_values = true)]
    pub risk: Option<String>,
    /// Configuration file
    #[arg(short, long, value_name = "FILE", env = "LOCKCTL_CONFIG", hide_env_values = true, value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,
    /// Keeps deployments apart that share a store
    #[arg(long, value_name = "NAME", env = "LOCKCTL_NAMESPACE", hide_env_values = true)]
    pub namespace: Option<String>,
    /// User at the store
    #[arg(long, value_name = "USER")]
    pub user: Option<String>,
    /// File with the password for the store
    #[arg(long, value_name = "FILE", env = "LOCKCTL_PASSWORD_FILE", hide_env_values = true, value_hint = ValueHint::FilePath)]
    pub password_file: Option<PathBuf>,
}

/// The numbers of a run.
#[derive(Clone, Debug, Args)]
pub struct NumberArgs {
    /// How long to wait for the lock: 0, a duration like 90s, or forever (default: 0)
    #[arg(short, long, value_name = "D", env = "LOCKCTL_WAIT", hide_env_values = true, value_parser = duration::parse_wait)]
    pub wait: Option<Wait>,
    /// How long the lease lives without a renewal (default: 30s)
    #[arg(long, value_name = "D", env = "LOCKCTL_TTL", hide_env_values = true, value_parser = duration::parse)]
    pub ttl: Option<Duration>,
    /// Stops the command after this
    #[arg(long, value_name = "D", env = "LOCKCTL_MAX_HOLD", hide_env_values = true, value_parser = duration::parse)]
    pub max_hold: Option<Duration>,
    /// Time between TERM and KILL, taken off the end of the lease (default: a quarter of the TTL, at most 10s)
    #[arg(long, value_name = "D", env = "LOCKCTL_KILL_AFTER", hide_env_values = true, value_parser = duration::parse)]
    pub kill_after: Option<Duration>,
    /// Nobody gets the lock for this long after an unclean end (default: 0)
    #[arg(long, value_name = "D", env = "LOCKCTL_LOCK_DELAY", hide_env_values = true, value_parser = duration::parse)]
    pub lock_delay: Option<Duration>,
}

/// Options of `run`.
#[derive(Debug, Args)]
pub struct Run {
    /// Lock to hold, like nightly/report
    pub name: OsString,
    /// Command and its arguments, after `--`; passed on byte for byte, no shell in between
    #[arg(last = true, required = true, num_args = 1.., value_name = "COMMAND", value_hint = ValueHint::CommandWithArguments)]
    pub command: Vec<OsString>,
    /// How long, for everything.
    #[command(flatten)]
    pub numbers: NumberArgs,
    /// Exit code when someone else has the lock (default: 111, or 112 after waiting)
    #[arg(short = 'E', long, value_name = "N")]
    pub busy_exit_code: Option<u8>,
    /// What others read about this holder (default: user@host:pid)
    #[arg(long, value_name = "TEXT", env = "LOCKCTL_LABEL", hide_env_values = true)]
    pub label: Option<String>,
    /// Demands a fence above N
    #[arg(long, value_name = "N")]
    pub above: Option<lockcore::Fence>,
    /// Writes the outcome to a file as JSON at the end: tells a command's own 113 from ours
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub status_file: Option<PathBuf>,
    /// Leaves LOCKCTL_* in the command's environment, for a nested lockctl
    #[arg(long)]
    pub pass_config: bool,
    /// Which store.
    #[command(flatten)]
    pub store: StoreArgs,
}

/// Options of `check`.
#[derive(Debug, Args)]
pub struct Check {
    /// How long the lock must still be held (default: 0)
    #[arg(long = "for", value_name = "D", value_parser = duration::parse)]
    pub need: Option<Duration>,
}

/// Options of `inspect`.
#[derive(Debug, Args)]
pub struct Inspect {
    /// Lock to look at
    pub name: OsString,
    /// Goes on, and writes again whenever something changes
    #[arg(long)]
    pub watch: bool,
    /// Writes nothing; exits with 0 when somebody holds the lock, with 1 when it is free
    #[arg(long, conflicts_with = "watch")]
    pub test: bool,
    /// Which store.
    #[command(flatten)]
    pub store: StoreArgs,
}

/// Options of `list`.
#[derive(Debug, Args)]
pub struct List {
    /// Only names at or below this one
    pub prefix: Option<OsString>,
    /// Which store.
    #[command(flatten)]
    pub store: StoreArgs,
}

/// Options of `break`.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("whom").required(true).args(["expect", "anyone"]))]
pub struct Break {
    /// Lock to take away
    pub name: OsString,
    /// Only from this holder: FENCE.DIGEST, as `inspect` shows it
    #[arg(long, value_name = "STAMP")]
    pub expect: Option<lockcore::Stamp>,
    /// From whoever has it
    #[arg(long)]
    pub anyone: bool,
    /// Why; part of the record
    #[arg(long, value_name = "TEXT")]
    pub reason: String,
    /// Which store.
    #[command(flatten)]
    pub store: StoreArgs,
}

/// Options of `fence`.
#[derive(Debug, Args)]
pub struct Fence {
    /// Lock to look at
    #[arg(required_unless_present = "seed", conflicts_with = "seed")]
    pub name: Option<OsString>,
    /// Makes every later fence be above N
    #[arg(long, value_name = "N", conflicts_with = "seed")]
    pub raise: Option<lockcore::Fence>,
    /// Makes every later fence of every lock in the namespace be above the time in microseconds
    #[arg(long)]
    pub seed: bool,
    /// Which store.
    #[command(flatten)]
    pub store: StoreArgs,
}

/// Options of `migrate`.
#[derive(Debug, Args)]
pub struct Migrate {
    /// What to do.
    #[command(subcommand)]
    pub command: MigrateCommand,
}

/// What to do with a migration.
#[derive(Debug, Subcommand)]
pub enum MigrateCommand {
    /// Shows all stages, where the move stands, and what the stores would not keep
    Plan(MigrateArgs),
    /// Shows the stage, and who is in which phase
    Status(MigrateArgs),
    /// Takes the next step towards the new store
    Advance(MigrateStep),
    /// Takes a step back towards the old store, or undoes one that was begun
    Rollback(MigrateStep),
}

/// Which migration.
#[derive(Clone, Debug, Args)]
pub struct MigrateArgs {
    /// Bridge of the configuration file (default: the only one); with --from and --to, the migration's name
    pub bridge: Option<String>,
    /// Address of the store that locks leave, where no file names it; a password is refused here
    #[arg(long, value_name = "URL", requires_all = ["to", "bridge", "namespace"])]
    pub from: Option<OsString>,
    /// Address of the store that they go to
    #[arg(long, value_name = "URL", requires = "from")]
    pub to: Option<OsString>,
    /// Configuration file
    #[arg(short, long, value_name = "FILE", env = "LOCKCTL_CONFIG", hide_env_values = true, value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,
    /// Keeps deployments apart that share a store (default: as the file says)
    #[arg(long, value_name = "NAME", env = "LOCKCTL_NAMESPACE", hide_env_values = true)]
    pub namespace: Option<String>,
}

/// One step.
#[derive(Clone, Debug, Args)]
pub struct MigrateStep {
    /// Which migration.
    #[command(flatten)]
    pub which: MigrateArgs,
    /// How long to wait for those who are still in a phase that closes: 0, a duration like 90s, or forever (default: 0)
    #[arg(short, long, value_name = "D", value_parser = duration::parse_wait)]
    pub wait: Option<Wait>,
    /// Says what the step would do, and changes nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Why; part of the record
    #[arg(long, value_name = "TEXT", default_value = "")]
    pub reason: String,
    /// Adds the record of the step to a file, a line of JSON each
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub record: Option<PathBuf>,
}

/// Options of `doctor`.
#[derive(Debug, Args)]
pub struct Doctor {
    /// Which store.
    #[command(flatten)]
    pub store: StoreArgs,
}

/// Options of `compare`.
#[cfg(feature = "compare")]
#[derive(Debug, Args)]
pub struct Compare {
    /// Store to put to the test: NAME=URL, or the NAME of a backend in the configuration file; may be repeated
    #[arg(short, long = "store", value_name = "NAME=URL", required = true)]
    pub stores: Vec<String>,
    /// Configuration file with the backends that --store names
    #[arg(short, long, value_name = "FILE", env = "LOCKCTL_CONFIG", hide_env_values = true, value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,
    /// Form of what is written to stdout
    #[arg(long, value_name = "FORM", default_value = "text")]
    pub format: Format,
    /// Writes every form into a directory, too, with the histories that are worth a look
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    pub out: Option<PathBuf>,
    /// Compares with the verdicts of an earlier run, and exits with 1 where one has changed
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub baseline: Option<PathBuf>,
    /// Takes the verdicts of this run over into the baseline instead
    #[arg(long, requires = "baseline")]
    pub update: bool,
    /// Plays only cases with this text in their name; may be repeated
    #[arg(long, value_name = "TEXT")]
    pub only: Vec<String>,
    /// Plays the cases with many locks and many clients, too, which are left out for the sake of a server that others use
    #[arg(long)]
    pub heavy: bool,
    /// How many requests may begin in a second, at each store
    #[arg(long, value_name = "N", default_value = "500", value_parser = clap::value_parser!(u32).range(20..))]
    pub rate: u32,
    /// TTL of the cases that wait for its end, at least what the store can do
    #[arg(long, value_name = "D", default_value = "1s", value_parser = duration::parse)]
    pub ttl: Duration,
}

/// Form of a comparison.
#[cfg(feature = "compare")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// A table for a terminal, and what differs.
    Text,
    /// Tables with sentences and numbers.
    Markdown,
    /// Everything, for programs.
    Json,
    /// Tests, for programs that know nothing of locks.
    Junit,
    /// One page that needs nothing else.
    Html,
    /// Annotations for a workflow; the tables go to its summary.
    Github,
}

/// Options of `config`.
#[derive(Debug, Args)]
pub struct Config {
    /// What to do.
    #[command(subcommand)]
    pub command: ConfigCommand,
}

/// What to do with the configuration.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Names every problem of a configuration file, with line and path
    Check {
        /// File to check (default: the one that would be used)
        #[arg(value_hint = ValueHint::FilePath)]
        file: Option<PathBuf>,
        /// Which store.
        #[command(flatten)]
        store: Box<StoreArgs>,
    },
    /// Shows the settings that would be used; secrets are masked
    Show {
        /// Which store.
        #[command(flatten)]
        store: Box<StoreArgs>,
        /// How long, for everything.
        #[command(flatten)]
        numbers: Box<NumberArgs>,
    },
}

/// Options of `completions`.
#[derive(Debug, Args)]
pub struct Completions {
    /// Shell
    pub shell: clap_complete::Shell,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definitions_are_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn nothing_after_the_dashes_is_taken_for_an_option() {
        let cli =
            Cli::try_parse_from(["lockctl", "run", "a", "--ttl", "5s", "--", "printf", "-v", "--ttl", "a b"])
                .unwrap();
        let Command::Run(run) = cli.command else { panic!("not a run") };
        assert_eq!(run.numbers.ttl, Some(Duration::from_secs(5)));
        assert_eq!(run.command, ["printf", "-v", "--ttl", "a b"]);
        assert_eq!(cli.common.verbose, 0);
    }

    #[test]
    fn a_command_without_dashes_is_refused() {
        assert!(Cli::try_parse_from(["lockctl", "run", "a", "true"]).is_err());
        assert!(Cli::try_parse_from(["lockctl", "run", "a"]).is_err());
        assert!(Cli::try_parse_from(["lockctl", "run", "a", "--"]).is_err());
    }

    #[test]
    fn a_break_says_whom() {
        assert!(Cli::try_parse_from(["lockctl", "break", "a", "--reason", "x"]).is_err());
        assert!(Cli::try_parse_from(["lockctl", "break", "a", "--anyone"]).is_err());
        assert!(Cli::try_parse_from(["lockctl", "break", "a", "--anyone", "--reason", "x"]).is_ok());
    }
}
