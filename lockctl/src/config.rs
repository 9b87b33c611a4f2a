//! `config`: what the file says wrong, and what would be used.

use std::path::PathBuf;

use serde_json::json;

use crate::{
    cli::{Config, ConfigCommand, NumberArgs, StoreArgs},
    duration::{Wait, show},
    exit,
    failure::Failure,
    file,
    numbers::Numbers,
    store::{self, Surroundings, Written, registry},
    voice::{Voice, millis, print},
};

/// Checks or shows.
pub(crate) fn main(options: &Config, written: Written, voice: &Voice) -> Result<u8, Failure> {
    match &options.command {
        ConfigCommand::Check { file, store } => check(file.clone(), store, voice),
        ConfigCommand::Show { store, numbers } => show_settings(store, numbers, written, voice),
    }
}

/// Writes every problem on a line of its own; 125 if there is one.
fn check(named: Option<PathBuf>, args: &StoreArgs, voice: &Voice) -> Result<u8, Failure> {
    let path = named.or_else(|| file::find(args, store::variable)).ok_or_else(|| {
        Failure::usage(
            "there is no configuration file: neither $XDG_CONFIG_HOME/lockctl/config.toml nor \
             /etc/lockctl/config.toml exists; name one",
        )
    })?;
    let (_, problems) =
        file::read(&path, &registry()).map_err(|error| Failure::usage(file::cannot_read(&path, &error)))?;
    let mut text = String::new();
    for found in &problems {
        let line = if voice.is_json() {
            json!({
                "schema": "lockctl/problem/1",
                "file": path.display().to_string(),
                "line": found.line,
                "path": found.problem.path,
                "message": found.problem.message,
            })
            .to_string()
        } else {
            found.show(&path)
        };
        text.push_str(&line);
        text.push('\n');
    }
    if problems.is_empty() {
        voice.progress(format_args!("{} has no problem", path.display()));
    }
    print(&text)?;
    Ok(if problems.is_empty() { 0 } else { exit::USAGE })
}

/// Writes the settings that a `run` with these options would use.
fn show_settings(
    args: &StoreArgs,
    numbers: &NumberArgs,
    written: Written,
    voice: &Voice,
) -> Result<u8, Failure> {
    let store = store::choose(args, written, &Surroundings::of_this_process())?;
    let numbers = Numbers::of(numbers, &store, None)?;
    let text = if voice.is_json() {
        let wait = match numbers.wait {
            Wait::No => json!(0),
            Wait::For(budget) => json!(millis(budget)),
            Wait::Forever => json!("forever"),
        };
        let whole = json!({
            "schema": "lockctl/config/1",
            "file": store.file.as_ref().map(|file| file.path.display().to_string()),
            "store": store.shown(),
            "user": store.backend.user,
            "password_file": store.backend.password_file,
            "namespace": store.namespace,
            "risk": store.level.as_ref().map(|(name, _)| name),
            "wait_ms": wait,
            "ttl_ms": millis(numbers.ttl),
            "max_hold_ms": numbers.max_hold.map(millis),
            "kill_after_ms": millis(numbers.kill_after),
            "lock_delay_ms": millis(numbers.lock_delay),
        });
        format!("{whole}\n")
    } else {
        let path =
            |path: Option<&PathBuf>| path.map_or("(none)".to_owned(), |path| path.display().to_string());
        let rows = [
            ("file", path(store.file.as_ref().map(|file| &file.path))),
            ("store", store.shown()),
            ("user", store.backend.user.clone().unwrap_or_else(|| "(none)".into())),
            ("password", store.password_source()),
            ("namespace", if store.namespace.is_empty() { "(none)".into() } else { store.namespace.clone() }),
            ("risk", store.level.as_ref().map_or("(none)".into(), |(name, _)| name.clone())),
            (
                "wait",
                match numbers.wait {
                    Wait::No => "0".into(),
                    Wait::For(budget) => show(budget),
                    Wait::Forever => "forever".into(),
                },
            ),
            ("ttl", show(numbers.ttl)),
            ("max-hold", numbers.max_hold.map_or("(none)".into(), show)),
            ("kill-after", show(numbers.kill_after)),
            ("lock-delay", show(numbers.lock_delay)),
        ];
        rows.iter().map(|(key, value)| format!("{key:<11} {value}\n")).collect()
    };
    print(&text)?;
    Ok(0)
}
