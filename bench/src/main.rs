//! lockcore measured against the raw protocol of each store, in one run.

#![forbid(unsafe_code)]
// Its output is the table.
#![allow(clippy::print_stdout, clippy::print_stderr)]

mod etcd;
mod harness;
mod idle;
mod leases;
mod memory;
mod queue;
mod redis;
mod servers;
mod sqlite;
mod work;
mod zk;

use std::{path::PathBuf, process::ExitCode};

use harness::{Bench, Report};

const HELP: &str = "\
Measures lockcore against the raw protocol of each store.

Usage: lockcore-bench [FILTER] [--check] [--out FILE]

  FILTER      rows whose name contains it
  --check     fails when a target is missed, or a server that a row needs is not there
  --out FILE  where the report goes, instead of target/bench/report.json

Servers are started for the run, on free ports. LOCK_TEST_SKIP=redis,etcd,zookeeper leaves out the rows of these.";

struct Wanted {
    filter: String,
    check: bool,
    out: PathBuf,
}

fn main() -> ExitCode {
    let wanted = match wanted(std::env::args().skip(1)) {
        Ok(Some(wanted)) => wanted,
        Ok(None) => {
            println!("{HELP}");
            return ExitCode::SUCCESS;
        }
        Err(mistake) => {
            eprintln!("{mistake}\n\n{HELP}");
            return ExitCode::from(2);
        }
    };
    if cfg!(debug_assertions) {
        eprintln!("note: this is a debug build; its numbers mean nothing");
    }
    let mut bench = Bench::new(wanted.filter);
    memory::run(&mut bench);
    sqlite::run(&mut bench);
    redis::run(&mut bench);
    etcd::run(&mut bench);
    zk::run(&mut bench);
    queue::run(&mut bench);
    idle::run(&mut bench);
    leases::run(&mut bench);

    let report = Report::new(bench.into_rows());
    if report.rows.is_empty() {
        eprintln!("no row has that in its name");
        return ExitCode::from(2);
    }
    if let Err(error) = report.write(&wanted.out) {
        eprintln!("{}: {error}", wanted.out.display());
        return ExitCode::FAILURE;
    }
    let (missed, not_run) = (report.missed(), report.not_run());
    let rows = report.rows.len();
    println!("\n{rows} rows, {missed} targets missed, {not_run} not run; {}", wanted.out.display());
    if wanted.check && missed + report.missing() > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn wanted(mut args: impl Iterator<Item = String>) -> Result<Option<Wanted>, String> {
    let out = harness::home().join("report.json");
    let mut wanted = Wanted { filter: String::new(), check: false, out };
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "-h" | "--help" => return Ok(None),
            "--check" => wanted.check = true,
            "--out" => wanted.out = args.next().ok_or("--out needs a file")?.into(),
            "--" => {}
            option if option.starts_with('-') => return Err(format!("unknown option {option}")),
            filter if wanted.filter.is_empty() => wanted.filter = filter.to_owned(),
            more => return Err(format!("one filter is enough, not also {more}")),
        }
    }
    Ok(Some(wanted))
}
