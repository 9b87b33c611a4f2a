//! `man` and `completions`: made from the definitions of the command line, so they cannot lag behind.

use clap::CommandFactory;
use clap_mangen::{
    Man,
    roff::{Roff, bold, roman},
};

use crate::{
    cli::{Cli, Completions},
    failure::Failure,
    voice::print,
};

/// Writes a completion script.
pub(crate) fn completions(options: &Completions) -> Result<u8, Failure> {
    let mut script = Vec::new();
    clap_complete::generate(options.shell, &mut Cli::command(), "lockctl", &mut script);
    print(&String::from_utf8_lossy(&script))?;
    Ok(0)
}

/// Writes the manual page: one page for all sub-commands.
pub(crate) fn man() -> Result<u8, Failure> {
    print(&String::from_utf8_lossy(&page()?))?;
    Ok(0)
}

fn page() -> std::io::Result<Vec<u8>> {
    let mut command = Cli::command();
    command.build();
    let mut text = Vec::new();
    let man = Man::new(command.clone());
    man.render_title(&mut text)?;
    man.render_name_section(&mut text)?;
    man.render_synopsis_section(&mut text)?;
    man.render_description_section(&mut text)?;
    for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
        render_sub_command(sub, &mut text)?;
    }
    table("EXIT STATUS", &EXIT_STATUS, &mut text)?;
    table("ENVIRONMENT OF THE COMMAND", &VARIABLES, &mut text)?;
    table("ENVIRONMENT", &ENVIRONMENT, &mut text)?;
    table("FILES", &FILES, &mut text)?;
    man.render_extra_section(&mut text)?;
    man.render_version_section(&mut text)?;
    Ok(text)
}

fn render_sub_command(sub: &clap::Command, text: &mut Vec<u8>) -> std::io::Result<()> {
    let mut roff = Roff::new();
    roff.control("SH", [format!("LOCKCTL {}", sub.get_name().to_uppercase()).as_str()]);
    let mut sub = sub.clone();
    let usage = sub.render_usage().to_string();
    roff.text([bold(usage.trim_start_matches("Usage: "))]);
    roff.control("PP", []);
    if let Some(about) = sub.get_long_about().or_else(|| sub.get_about()) {
        roff.text([roman(about.to_string())]);
    }
    for inner in sub.get_subcommands().filter(|inner| inner.get_name() != "help") {
        roff.control("TP", []);
        roff.text([bold(inner.get_name())]);
        roff.text([roman(inner.get_about().map(ToString::to_string).unwrap_or_default())]);
    }
    for argument in sub.get_arguments().filter(|argument| !argument.is_hide_set()) {
        roff.control("TP", []);
        roff.text([bold(spelling(argument))]);
        let mut help = argument.get_help().map(ToString::to_string).unwrap_or_default();
        if let Some(variable) = argument.get_env() {
            help.push_str(&format!(" [{}]", variable.to_string_lossy()));
        }
        roff.text([roman(help)]);
    }
    if let Some(examples) = sub.get_after_help() {
        roff.control("PP", []);
        roff.control("nf", []);
        roff.text([roman(examples.to_string())]);
        roff.control("fi", []);
    }
    roff.to_writer(text)
}

fn spelling(argument: &clap::Arg) -> String {
    let mut words = Vec::new();
    if let Some(short) = argument.get_short() {
        words.push(format!("-{short}"));
    }
    if let Some(long) = argument.get_long() {
        words.push(format!("--{long}"));
    }
    let value = argument.get_value_names().and_then(|names| names.first()).map(ToString::to_string);
    match (words.is_empty(), value) {
        (true, value) => value.unwrap_or_else(|| argument.get_id().to_string().to_uppercase()),
        (false, Some(value)) if argument.get_action().takes_values() => {
            format!("{} {value}", words.join(", "))
        }
        (false, _) => words.join(", "),
    }
}

fn table(title: &str, rows: &[(&str, &str)], text: &mut Vec<u8>) -> std::io::Result<()> {
    let mut roff = Roff::new();
    roff.control("SH", [title]);
    for (key, meaning) in rows {
        roff.control("TP", []);
        roff.text([bold(*key)]);
        roff.text([roman(*meaning)]);
    }
    roff.to_writer(text)
}

const EXIT_STATUS: [(&str, &str); 14] = [
    ("0-255", "the command's own; it ran to its end, under the lock"),
    (
        "1",
        "of lockctl inspect --test: nobody holds the lock; of lockctl compare: a case fails, or a cell differs from the \
         baseline",
    ),
    ("128+n", "ended by signal n: the command, or lockctl while it waited"),
    ("111", "someone else has the lock, and no waiting was asked; nothing ran"),
    ("112", "the wait budget is used up; nothing ran"),
    (
        "113",
        "lost: the store showed another holder, or none, or an operator broke the lock. The command was stopped, or this \
         was found out at the release. Somebody else may have run at the same time: look at the data",
    ),
    (
        "114",
        "uncertain: the store could not be asked until the deadline, and the command was stopped before it. As far as \
         the store keeps its promises, nobody else held the lock meanwhile: run it again",
    ),
    ("115", "the store is unavailable, or the outcome of the acquire is unknown; nothing ran"),
    ("116", "the set-up was refused: level not met, credentials, a fence that went back; nothing ran"),
    ("117", "the hold limit was reached; the command was stopped"),
    ("125", "wrong use, bad configuration, lockctl's own failure; nothing ran"),
    ("126", "the command was found, but cannot be executed"),
    ("127", "the command was not found"),
    ("--status-file", "tells a command's own code from one of ours"),
];

const VARIABLES: [(&str, &str); 8] = [
    ("LOCK_NAME", "the lock"),
    ("LOCK_FENCE", "the fence, decimal"),
    ("LOCK_OWNER_DIGEST", "who holds it: 16 hex digits"),
    ("LOCK_STAMP", "FENCE.DIGEST: what to hand to a database, a header, a message"),
    ("LOCK_TTL_MS", "how long the lease lives without a renewal"),
    ("LOCK_HOLD_UNTIL", "when the command is asked to stop; only with --max-hold"),
    ("LOCK_LOSS_FD", "number of a pipe that ends when the lock is over, or lockctl is gone, also by SIGKILL"),
    ("LOCK_STATE", "file with the present deadline on the clock since boot; read by lockctl check"),
];

const ENVIRONMENT: [(&str, &str); 11] = [
    ("LOCKCTL_STORE", "as --store; may hold a password"),
    ("LOCKCTL_RISK, LOCKCTL_CONFIG, LOCKCTL_NAMESPACE", "as the options of these names"),
    ("LOCKCTL_PASSWORD_FILE", "as --password-file"),
    ("LOCKCTL_WAIT, LOCKCTL_TTL, LOCKCTL_MAX_HOLD", "as the options of these names"),
    ("LOCKCTL_KILL_AFTER, LOCKCTL_LABEL, LOCKCTL_LOCK_DELAY", "as the options of these names"),
    ("LOCKCTL_*", "are taken out of the command's environment, unless --pass-config is given"),
    ("NO_COLOR", "no colours, unless --color always is given"),
    ("STATE_DIRECTORY, XDG_STATE_HOME, HOME", "where the default store is, in this order"),
    ("RUNTIME_DIRECTORY, XDG_RUNTIME_DIR, TMPDIR", "where LOCK_STATE is, in this order"),
    ("XDG_CONFIG_HOME", "where the configuration file is"),
    (
        "KUBERNETES_SERVICE_HOST, container",
        "show that this is a container, where the default store is refused",
    ),
];

const FILES: [(&str, &str); 3] = [
    (
        "$XDG_CONFIG_HOME/lockctl/config.toml, /etc/lockctl/config.toml",
        "configuration; the first that exists, never one of the working directory",
    ),
    (
        "$XDG_STATE_HOME/lockctl/locks.db",
        "the default store: excludes the processes of this user on this machine",
    ),
    ("/var/lib/lockctl/locks.db", "the default store of root"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_names_every_option_and_every_code() {
        let text = String::from_utf8(page().unwrap()).unwrap().replace("\\-", "-").replace("\\", "");
        let mut command = Cli::command();
        command.build();
        for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
            assert!(
                text.contains(&format!("LOCKCTL {}", sub.get_name().to_uppercase())),
                "{}",
                sub.get_name()
            );
            for argument in sub.get_arguments() {
                assert!(text.contains(&spelling(argument)), "{} {}", sub.get_name(), spelling(argument));
            }
        }
        for code in ["111", "112", "113", "114", "115", "116", "117", "125", "126", "127"] {
            assert!(text.contains(&format!(".TP\nfB{code}fR")), "{code}");
        }
    }
}
