//! Builds the library and the tool with the system's C compiler.

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo::rerun-if-changed=src");
    println!("cargo::rerun-if-env-changed=CC");
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    // Its functions call each other directly, so that one can be taken away.
    compile(&["-shared", "-fPIC", "-Wl,-Bsymbolic"], &["common.c", "nvml.c", "cuda.c"], &out.join("driver.so"))?;
    compile(&[], &["common.c", "smi.c"], &out.join("nvidia-smi"))
}

fn compile(flags: &[&str], sources: &[&str], to: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let sources = sources.iter().map(|source| Path::new("src").join(source));
    let status = Command::new(&compiler)
        .args(["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"])
        .args(flags)
        .args(sources)
        .arg("-o")
        .arg(to)
        .arg("-ldl")
        .status()
        .map_err(|error| format!("run {compiler}: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("{compiler} ended with {status}").into()) }
}
