//! `make bench`: what gdrd costs, measured against peers and floors in the same run.
//!
//! Role: each file of `rows` is one measurement and gives one row or more of the table. The frame runs it in rounds,
//! both sides of every comparison inside each round and in alternating order, so that a machine that warms up, slows
//! down or has other work to do favours neither; the figure is the median of the rounds. docs/performance.md keeps the
//! figures and says what limits each.
//!
//! Must not know: the daemon's insides. It starts real daemons and is a client of them, or uses a library that clients
//! use. A daemon that does not start ends the run with its log.
#![forbid(unsafe_code)]

mod frame;
mod machine;
mod other;
mod report;
mod rows;
mod sample;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser};

use frame::World;

#[derive(Debug, Parser)]
#[command(about = "Measures gdrd against peers and floors of the same run")]
struct Arguments {
    #[command(subcommand)]
    other: Option<other::Other>,
    #[command(flatten)]
    bench: Bench,
}

#[derive(Debug, Args)]
struct Bench {
    /// Only rows whose id starts with one of these
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Rounds of every measurement; each measurement's own number by default
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: Option<u32>,
    /// Divides the work of a round, for a first look and for tests: the figures mean little then
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    divide: u32,
    /// Folder of the peers that scripts/bench.sh has built
    #[arg(long, default_value = "target/bench-peers")]
    peers: PathBuf,
    /// Writes the figures as JSON into this file too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Lists the ids of all rows and measures nothing
    #[arg(long)]
    list: bool,
    /// Ends with status 1 when a target is missed
    #[arg(long)]
    strict: bool,
}

fn main() -> anyhow::Result<ExitCode> {
    let arguments = Arguments::parse();
    match arguments.other {
        Some(other) => other.run().map(|()| ExitCode::SUCCESS),
        None => bench(&arguments.bench),
    }
}

fn bench(options: &Bench) -> anyhow::Result<ExitCode> {
    if options.list {
        frame::rows(rows::ALL).for_each(|row| println!("{}", row.id));
        return Ok(ExitCode::SUCCESS);
    }
    let world = World::new(options.divide, options.peers.clone());
    let figures = frame::run(rows::ALL, &world, &options.only, options.rounds)?;
    let machine = machine::Machine::look();
    if let Some(path) = &options.json {
        let text = serde_json::to_string_pretty(&report::as_json(&machine, &figures))?;
        std::fs::write(path, text + "\n")?;
    }
    println!("{}", report::as_table(&machine, &figures));
    let missed = figures.iter().any(|figure| figure.is_kept() == Some(false));
    Ok(if options.strict && missed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_sound() {
        Arguments::command().debug_assert();
    }
}
