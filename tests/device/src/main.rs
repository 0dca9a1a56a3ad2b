//! Checks on a machine with an NVIDIA GPU. `make device-test` builds and runs them; the binaries also run where they were
//! carried to, `gdrd` beside this one.
//!
//! usage: `gdrd-device-test [FILTER] [--measured FILE]`
//!
//! Prints a line for each check and ends in one line 'N passed, N failed'. What was measured goes to FILE.
#![forbid(unsafe_code)]

mod bench;
mod conformance;
mod daemon;
mod host;
mod leases;
mod peers;
mod workers;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context as _;

use crate::host::Host;

/// One check. Fails by an error or a panic.
type Check = (String, Box<dyn Fn(&Host) -> anyhow::Result<()>>);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.first().is_some_and(|first| first == "peer") {
        return match peers::run(arguments.get(1..).unwrap_or_default()) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("peer: {error:#}");
                ExitCode::FAILURE
            }
        };
    }
    let measured = arguments.iter().position(|word| word == "--measured").and_then(|at| arguments.get(at + 1));
    let filter = arguments.first().filter(|first| !first.starts_with("--")).map_or("", String::as_str);
    match all(filter, measured.map(String::as_str)) {
        Ok((passed, failed)) => {
            println!("{passed} passed, {failed} failed");
            if failed == 0 && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
        }
        Err(error) => {
            println!("no check could run: {error:#}");
            println!("0 passed, 1 failed");
            ExitCode::FAILURE
        }
    }
}

fn all(filter: &str, measured: Option<&str>) -> anyhow::Result<(u32, u32)> {
    let host = Host::find()?;
    println!("{}", host.describe());
    let mut checks: Vec<Check> = Vec::new();
    checks.extend(workers::checks());
    checks.extend(conformance::checks());
    checks.extend(leases::checks());
    let (mut passed, mut failed) = (0, 0);
    for (name, check) in checks.iter().filter(|(name, _)| name.contains(filter)) {
        let started = Instant::now();
        let outcome = catch_unwind(AssertUnwindSafe(|| check(&host)));
        let outcome = outcome.unwrap_or_else(|_| Err(anyhow::anyhow!("it panicked, see above")));
        let seconds = started.elapsed().as_secs_f64();
        match outcome {
            Ok(()) => {
                passed += 1;
                println!("ok {name} ({seconds:.2} s)");
            }
            Err(error) => {
                failed += 1;
                println!("FAILED {name} ({seconds:.2} s): {error:#}");
            }
        }
    }
    if let Some(file) = measured {
        let table = bench::run(&host);
        match table {
            Ok((table, verdicts)) => {
                print!("{table}");
                std::fs::write(file, host.heading() + &table).with_context(|| format!("write {file}"))?;
                for (what, holds) in verdicts {
                    println!("{} {what}", if holds { "ok" } else { "FAILED" });
                    *(if holds { &mut passed } else { &mut failed }) += 1;
                }
            }
            Err(error) => {
                failed += 1;
                println!("FAILED measuring: {error:#}");
            }
        }
    }
    Ok((passed, failed))
}
