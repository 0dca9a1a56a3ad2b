//! `gdrd`: the daemon. What it does, in order; each step is a module of its own.
#![forbid(unsafe_code)]

mod arguments;
mod config;
mod daemon;
mod failure;
mod gpus;
mod hardware;
mod health;
mod inherited;
mod iommu;
mod keeper;
mod locked_memory;
mod logging;
mod man;
mod notify;
mod numa;
mod probes;
mod rdma;
mod reprobe;
mod rescan;
mod runtime_dir;
mod simulated;
mod sockets;
mod sockets_guard;
mod store;
mod uevents;
mod worker;

use std::ffi::OsString;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::Parser;
use gdrd_engine::{Continuity, Engine, EngineConfig, GpuProof, Hardware, HugePages, NumaCpus, SessionResumed};
use gdrd_server::{Backend, Backends, HostFacts, Server, ServerConfig};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::arguments::{Arguments, Other};
use crate::config::Config;
use crate::failure::Misconfigured;
use crate::hardware::{Machine, Origin};
use crate::inherited::Inherited;
use crate::probes::ProbeFile;
use crate::rescan::Rescan;
use crate::runtime_dir::{RuntimeDir, RuntimeDirError};
use crate::sockets_guard::SocketsGuard;
use crate::store::{Promise, Store};

/// The engine's journal, in the runtime folder: it means something as long as the kept descriptors do.
const JOURNAL_NAME: &str = "gdrd.journal";
/// Which GPUs are drained, in the runtime folder: a reset of the host is a reset of its GPUs.
const DRAINS_NAME: &str = "gdrd.drained";

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match &arguments.command {
        Some(Other::Worker(command)) => return worker::run(command),
        Some(Other::Keeper { daemon }) => return run_keeper(&arguments, daemon),
        Some(Other::Man { dir }) => {
            return man::write(dir).map_or_else(|error| fail(&error), |()| ExitCode::SUCCESS);
        }
        Some(Other::KeeperChild { daemon }) => {
            return keeper::become_daemon(daemon).map_or_else(|error| fail(&error), |()| ExitCode::FAILURE);
        }
        None => {}
    }
    if arguments.list_profiles {
        return say(&gdrd_topology::profile::builtin_names().join("\n"));
    }
    let config = match configure(&arguments) {
        Ok(config) => config,
        Err(error) => return fail(&error.into()),
    };
    if arguments.check_config {
        let checked = hardware::check_simulation(&arguments, &config);
        return checked.map_or_else(|error| fail(&error.into()), |()| say("the configuration is valid"));
    }
    match run(&arguments, &config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

/// What was asked for, on standard output.
fn say(text: &str) -> ExitCode {
    let said = writeln!(std::io::stdout(), "{text}").context("standard output");
    said.map_or_else(|error| fail(&error), |()| ExitCode::SUCCESS)
}

fn run_keeper(arguments: &Arguments, daemon: &[OsString]) -> ExitCode {
    let kept = configure(arguments).map_err(Into::into).and_then(|config| {
        logging::start(logging::filter(&config.log.filter)?, config.log.format)?;
        raise_descriptor_limit();
        keeper::run(daemon)
    });
    kept.unwrap_or_else(|error| fail(&error))
}

fn fail(error: &anyhow::Error) -> ExitCode {
    u8::try_from(failure::report(error)).map_or(ExitCode::FAILURE, ExitCode::from)
}

/// The configuration with the arguments over it, valid as a whole. Has no effect.
fn configure(arguments: &Arguments) -> Result<Config, Misconfigured> {
    let config = arguments.config.as_deref().map(Config::read).transpose();
    let mut config = config.map_err(Misconfigured::because)?.unwrap_or_default();
    if let Some(filter) = &arguments.log {
        config.log.filter.clone_from(filter);
    }
    if let Some(format) = arguments.log_format {
        config.log.format = format;
    }
    logging::filter(&config.log.filter).map_err(Misconfigured::because)?;
    Ok(config)
}

fn run(arguments: &Arguments, config: &Config) -> anyhow::Result<()> {
    // First of all: what is opened before could be taken for one of them.
    let Inherited { activated, kept, closed } = Inherited::take(std::env::var("LISTEN_FDS").ok())?;
    logging::start(logging::filter(&config.log.filter)?, config.log.format)?;
    for name in closed {
        warn!(name, "a descriptor that this daemon was started with means nothing to it and is closed");
    }
    let is_root = rustix::process::geteuid().is_root();
    let folder = runtime_dir::locate(arguments.runtime_dir.clone(), |name| std::env::var_os(name), is_root);
    let folder = folder.map_err(of_runtime_dir)?;
    let chosen = hardware::choose(arguments, config)?;
    // The folder stays taken until the end: the engine works on files in it as long as it gives back.
    let runtime_dir = Arc::new(RuntimeDir::claim(folder).map_err(of_runtime_dir)?);
    let descriptors = raise_descriptor_limit();

    let store = find_store(kept.len())?;
    let most_kept = store.as_ref().map(|store| store.most);
    let journal = runtime_dir.path().join(JOURNAL_NAME);
    let continuity = store.map(|store| Continuity { keeper: Arc::new(store), journal, kept });
    let limits = (lendable(descriptors), most_kept);
    // A simulated host's nodes are not this machine's.
    let nodes = match chosen.sim_profile.is_empty() {
        true => numa::nodes(&chosen.hardware.plan.hca_nodes),
        false => Vec::new(),
    };
    // Before anything of an earlier daemon is taken up: what cannot start leaves that to the next try.
    let listening = activated.complete(&runtime_dir)?;
    let runtime = daemon::runtime()?;
    let options = config.topology.read_options()?;
    let is_simulated = !chosen.sim_profile.is_empty() || chosen.machine.has_sim_hcas();
    let mut settings = engine_settings(config, chosen.gpu_proof, nodes, is_simulated);
    settings.drains = Some(runtime_dir.path().join(DRAINS_NAME));
    let (engine, resumed) = start_engine(settings, chosen.hardware, limits, continuity)?;
    let facts = HostFacts {
        backends: Backends::new(chosen.backends),
        sim_profile: chosen.sim_profile,
        runtime_dir: runtime_dir.path().display().to_string(),
    };
    for Backend { name, present, reason } in facts.backends.list() {
        info!(present, "{name}: {reason}");
    }
    let probes = Arc::new(probe_file(runtime_dir.path(), &chosen.origin, &facts.sim_profile, chosen.machine.clone()));
    probes.restore(&chosen.topology);
    chosen.topology.note_drained(|| engine.drained_gpus());
    let topology = chosen.topology.clone();
    let status = status(&facts, &chosen.topology);
    let rescan = Rescan {
        origin: chosen.origin,
        machine: chosen.machine,
        options,
        interval: Duration::from_secs(config.topology.rescan_interval_s),
        topology: chosen.topology.clone(),
        engine: engine.clone(),
        backends: facts.backends.clone(),
        reprobe: Arc::default(),
        probes: Arc::clone(&probes),
    };
    let server =
        ServerConfig { engine: engine.clone(), topology: chosen.topology, facts, limits: config.server(), resumed };

    let mut guard = SocketsGuard::new(listening.made, &[JOURNAL_NAME, DRAINS_NAME]);
    let served = runtime.block_on(async {
        let stop = CancellationToken::new();
        let server = Server::new(listening.sockets, server, stop.clone())?;
        guard.serve(server.rebinding(), engine.clone());
        daemon::serve(server, stop, (rescan, &guard), &status).await
    });
    probes.save(&topology);
    if daemon::leaves_all(&served, engine.keeps()) {
        // A last try, if there was no room before; what fails is told.
        let _ = engine.restore_files();
        // As if killed, which is what the next daemon knows how to go on from: nothing is told, closed or given back.
        std::process::exit(served.map_or_else(|error| failure::report(&error), |_left| 0));
    }
    drop(guard);
    daemon::end(runtime);
    engine.shutdown();
    info!("ended");
    served.map(|_ended| ())
}

/// Whoever keeps descriptors of this process, if anyone does.
fn find_store(kept: usize) -> anyhow::Result<Option<Store>> {
    let [told, unproven] = ["FDSTORE", "GDRD_FDSTORE"].map(|name| std::env::var(name).ok());
    let promise = Promise::of(told.as_deref(), unproven.as_deref());
    let store = Store::find(std::env::var_os("NOTIFY_SOCKET").as_deref(), promise);
    let store = store.context("connect to the descriptor store")?;
    if store.is_none() && promise.is_some() {
        warn!("nobody keeps descriptors of this process: sessions and leases end with it");
    }
    if store.is_none() && kept > 0 {
        warn!(count = kept, "descriptors of an earlier daemon are closed: none are kept now");
    }
    Ok(store)
}

fn of_runtime_dir(error: RuntimeDirError) -> anyhow::Error {
    if error.is_usage() { Misconfigured::because(error).into() } else { error.into() }
}

fn engine_settings(config: &Config, gpu_proof: GpuProof, nodes: Vec<NumaCpus>, is_simulated: bool) -> EngineConfig {
    let (policy, warnings) = config.policy(rustix::process::geteuid().as_raw());
    for warning in warnings {
        info!("{warning}");
    }
    let mut settings = config.engine(policy, gpu_proof);
    settings.broker.nodes = nodes;
    if is_simulated {
        // A simulated HCA touches the memory itself, and where a client has punched a hole there may be no huge page for it.
        settings.pool.host_huge_pages = HugePages::Off;
    }
    settings
}

fn probe_file(runtime_dir: &Path, origin: &Origin, sim_profile: &str, machine: Machine) -> ProbeFile {
    let (kind, sys) = match origin {
        Origin::Simulated => (format!("simulated {sim_profile}"), None),
        Origin::Live => ("live".to_owned(), Some(PathBuf::from("/sys"))),
        Origin::Captured(root) => (format!("captured {}", root.display()), None),
    };
    ProbeFile::new(runtime_dir, &kind, sys, machine)
}

fn start_engine(
    mut engine: EngineConfig,
    hardware: Hardware,
    (descriptors, most_kept): (u32, Option<u32>),
    continuity: Option<Continuity>,
) -> anyhow::Result<(Engine, Vec<SessionResumed>)> {
    engine.limits.max_descriptors = descriptors;
    engine.limits.max_kept_descriptors = most_kept.unwrap_or(u32::MAX);
    let Some(continuity) = continuity else {
        let engine = Engine::start(engine, hardware).context("start the engine")?;
        return Ok((engine, Vec::new()));
    };
    info!(most_kept, kept = continuity.kept.len(), "sessions and leases outlive this process: descriptors are kept");
    let (engine, resumed) = Engine::take_up(engine, hardware, continuity).context("start the engine")?;
    if !resumed.is_empty() {
        info!(sessions = resumed.len(), "sessions of the daemon before go on");
    }
    Ok((engine, resumed))
}

/// One line on what is served, for the log and for `systemctl status`.
fn status(facts: &HostFacts, topology: &gdrd_server::Topology) -> String {
    let view = topology.current();
    let plan = view.plan();
    let backends = facts.backends.list();
    let present: Vec<_> = backends.iter().filter(|backend| backend.present).map(|backend| backend.name).collect();
    let what = match facts.sim_profile.as_str() {
        "" if present.is_empty() => "topology only, no hardware backend".to_owned(),
        "" => format!("backends {}", present.join(", ")),
        profile => format!("simulated host {profile}"),
    };
    format!("{what}: {} gpus, {} nics, sockets in {}", plan.gpus.len(), plan.nics.len(), facts.runtime_dir)
}

/// Of the descriptors the daemon may have, those that leases, queue pairs and sessions may take: three quarters, so
/// that anyone can still connect, ask and be refused.
fn lendable(descriptors: u32) -> u32 {
    descriptors - descriptors / 4
}

/// Every lease, ring and session costs descriptors; what the system allows is taken whole. Returns how many that is.
fn raise_descriptor_limit() -> u32 {
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        warn!(%error, "the limit of descriptors stays as it is");
    }
    getrlimit(Resource::Nofile).current.and_then(|most| u32::try_from(most).ok()).unwrap_or(u32::MAX)
}
