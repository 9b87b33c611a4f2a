//! Compiles the clock shim, a library that is loaded into servers under test: see `clockshim/shim.rs`.

use std::{env, fs, path::PathBuf, process::Command};

fn main() {
    println!("cargo::rerun-if-changed=clockshim/shim.rs");
    println!("cargo::rerun-if-changed=build.rs");
    let variable = |name: &str| env::var(name).unwrap_or_default();
    let library = PathBuf::from(variable("OUT_DIR")).join("clockshim.so");
    let known = variable("CARGO_CFG_TARGET_OS") == "linux"
        && variable("CARGO_CFG_TARGET_ENV") == "gnu"
        && ["x86_64", "aarch64"].contains(&variable("CARGO_CFG_TARGET_ARCH").as_str());
    if known {
        let mut compile = Command::new(variable("RUSTC"));
        compile.args(["--edition", "2024", "--crate-type", "cdylib", "--crate-name", "clockshim"]);
        compile.args(["-Copt-level=s", "-Cpanic=abort", "-Clto", "-Cstrip=symbols"]);
        compile.args(["--target", &variable("TARGET")]).arg("-o").arg(&library).arg("clockshim/shim.rs");
        if let Ok(linker) = env::var("RUSTC_LINKER") {
            compile.arg(format!("-Clinker={linker}"));
        }
        if compile.status().is_ok_and(|status| status.success()) {
            return;
        }
        println!(
            "cargo::warning=the clock shim was not compiled: cases that step a server's clock are not run"
        );
    }
    // An empty library says that there is none.
    fs::write(library, []).expect("the output directory can be written");
}
