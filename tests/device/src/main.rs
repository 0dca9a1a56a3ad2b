//! Checks on a machine with an NVIDIA GPU. `make device-test` builds and runs them; the binaries also run where they were
//! carried to, `gdrd` beside this one.
//!
//! usage: `gdrd-device-test [FILTER…] [--measured FILE] [--gdrd FILE] [--sysfs-root DIR]`
//!
//! Runs the checks whose names have one of the filters in them. Prints a line for each, also for what this machine
//! cannot run and why, and ends in one line 'N passed, N failed'. What was measured goes to the file. `--sysfs-root` is for drivers that are not real: the tree in which the
//! daemon looks for the GPUs that the driver lists, without proof of the right to them.
#![forbid(unsafe_code)]

mod all_gpus;
mod bench;
mod conformance;
mod daemon;
mod host;
mod identity;
mod leases;
mod matrix;
mod pairs;
mod peers;
mod restart;
mod workers;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::Context as _;

use crate::host::Host;

/// One check. Fails by an error or a panic.
type Check = (String, Box<dyn Fn(&Host) -> anyhow::Result<()>>);

/// What was asked for.
#[derive(Debug, Default)]
struct Options {
    filters: Vec<String>,
    measured: Option<PathBuf>,
    gdrd: Option<PathBuf>,
    sysfs_root: Option<PathBuf>,
}

impl Options {
    fn parse(words: Vec<String>) -> anyhow::Result<Self> {
        let mut options = Self::default();
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            let place = match word.as_str() {
                "--measured" => &mut options.measured,
                "--gdrd" => &mut options.gdrd,
                "--sysfs-root" => &mut options.sysfs_root,
                other if other.starts_with("--") => anyhow::bail!("no option {other}"),
                _ => {
                    options.filters.push(word);
                    continue;
                }
            };
            *place = Some(words.next().with_context(|| format!("{word} needs a value"))?.into());
        }
        Ok(options)
    }

    fn wants(&self, name: &str) -> bool {
        self.filters.is_empty() || self.filters.iter().any(|filter| name.contains(filter))
    }
}

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
    let options = match Options::parse(arguments) {
        Ok(options) => options,
        Err(error) => {
            eprintln!("{error:#}");
            return ExitCode::from(2);
        }
    };
    match all(&options) {
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

/// What is measured, and what that proves or disproves.
fn measure(host: &Host) -> anyhow::Result<(String, Vec<(String, bool)>)> {
    let (mut table, mut verdicts) = pairs::run(host).context("pairs of gpus")?;
    println!("{table}");
    let (costs, of_costs) = bench::run(host).context("costs")?;
    println!("{costs}");
    table.push_str(&costs);
    verdicts.extend(of_costs);
    Ok((table, verdicts))
}

fn all(options: &Options) -> anyhow::Result<(u32, u32)> {
    let host = Host::find(options.gdrd.clone(), options.sysfs_root.clone())?;
    println!("{}", host.describe());
    let mut checks: Vec<Check> = Vec::new();
    checks.extend(workers::checks());
    checks.extend(conformance::checks());
    checks.extend(leases::checks());
    checks.extend(identity::checks());
    checks.extend(restart::checks());
    checks.extend(all_gpus::checks());
    checks.extend(matrix::checks(&host));
    checks.extend(pairs::checks(&host));
    for skipped in matrix::skipped(&host).into_iter().chain(pairs::skipped(&host)) {
        println!("skipped {skipped}");
    }
    let (mut passed, mut failed) = (0, 0);
    for (name, check) in checks.iter().filter(|(name, _)| options.wants(name)) {
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
    if let Some(file) = &options.measured {
        match measure(&host) {
            Ok((table, verdicts)) => {
                std::fs::write(file, host.heading() + &table).with_context(|| format!("write {}", file.display()))?;
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
