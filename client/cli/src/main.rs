//! gdrctl: the command line of gdrd.
//!
//! Role: asks the daemon, or reads a host by itself, and shows the answer to people and to programs. One file a verb.
//!
//! It must not know how the daemon works inside: it has the client library and the topology library, and no more.
#![forbid(unsafe_code)]

mod args;
mod deferred;
mod driver;
mod exit;
mod file;
mod host;
mod output;
mod source;
mod verbs;

use std::process::ExitCode;

use clap::Parser as _;

use crate::args::{Arguments, Format, Verb};
use crate::deferred::Deferred;
use crate::exit::{Outcome, UsageError};

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let outcome = run(arguments).unwrap_or_else(|error| exit::report(&error));
    outcome.into()
}

fn run(arguments: Arguments) -> anyhow::Result<Outcome> {
    let Arguments { global, verb } = arguments;
    if global.format.is_picture() && !matches!(verb, Verb::Topo(_)) {
        return Err(UsageError("--format tree, svg and dot are of gdrctl topo".to_owned()).into());
    }
    if global.format == Format::Json && matches!(verb, Verb::Completions(_) | Verb::Man(_)) {
        return Err(UsageError(
            "--format json is not of completions and man, which have a form of their own".to_owned(),
        )
        .into());
    }
    match verb {
        Verb::Topo(Deferred(topo)) => verbs::topo::run(&global, &topo),
        Verb::Plan(Deferred(plan)) => verbs::plan::run(&global, &plan),
        Verb::Explain(Deferred(explain)) => verbs::explain::run(&global, &explain),
        Verb::Path(Deferred(path)) => verbs::path::run(&global, &path),
        Verb::Export(Deferred(export)) => verbs::export::run(&global, &export),
        Verb::Capture(Deferred(capture)) => verbs::capture::run(&global, &capture),
        Verb::Place(Deferred(place)) => verbs::place::run(&global, &place),
        Verb::Buffers(Deferred(options)) if options.by_gpu => verbs::gpu_memory::run(&global),
        Verb::Buffers(_) => verbs::buffers::run(&global),
        Verb::QueuePairs => verbs::queue_pairs::run(&global),
        Verb::Stats(Deferred(stats)) => verbs::stats::run(&global, &stats),
        Verb::Status => verbs::status::run(&global),
        Verb::Probe(Deferred(probe)) => verbs::probe::run(&global, &probe),
        Verb::Drain(Deferred(drain)) => verbs::drain::run(&global, &drain),
        Verb::Bench(Deferred(bench)) => verbs::bench::run(&global, &bench),
        Verb::BenchPeer(Deferred(peer)) => verbs::bench::peer::run(&peer),
        Verb::Completions(Deferred(completions)) => verbs::completions::run(&completions),
        Verb::Man(Deferred(man)) => verbs::man::run(&man),
    }
}
