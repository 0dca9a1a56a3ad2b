//! Where the topology comes from: the input that was named, else the daemon, else this host's own `/sys`.

use std::io::IsTerminal as _;
use std::path::Path;
use std::time::Duration;

use anyhow::Context as _;
use gdrd_client::{ClientError, v1};
use gdrd_topology::assemble::{GpuIds, ReadOptions};
use gdrd_topology::model::Snapshot;
use gdrd_topology::plan::contract::Plan;
use gdrd_topology::plan::{PlanOptions, plan};
use gdrd_topology::{profile, read_input, read_live, read_stream};
use serde_json::{Value, json};

use crate::args::{Global, Input};
use crate::driver;
use crate::exit::UsageError;
use crate::host;

/// A topology, and who said it.
pub(crate) enum Topology {
    /// Read by this process.
    Own(Snapshot),
    /// The daemon's, with the plan that is in force there.
    Daemons(Snapshot, Plan),
}

impl Topology {
    pub(crate) fn snapshot(&self) -> &Snapshot {
        match self {
            Self::Own(snapshot) | Self::Daemons(snapshot, _) => snapshot,
        }
    }

    /// The plan in force at the daemon, else a new one.
    pub(crate) fn plan(&self) -> Plan {
        match self {
            Self::Own(snapshot) => plan(snapshot, &PlanOptions::default()),
            Self::Daemons(_, plan) => plan.clone(),
        }
    }
}

/// Gets the topology from where the options say.
pub(crate) fn topology(global: &Global, input: &Input) -> anyhow::Result<Topology> {
    if let Some(snapshot) = by_itself(input)? {
        return Ok(Topology::Own(snapshot));
    }
    let asked = ask(global, async |client| client.topology().await)?;
    match asked {
        Some(answer) => daemons(answer),
        None => live(input).map(Topology::Own),
    }
}

/// Asks the daemon, or gives `None` when there is none and the host is to be read instead.
pub(crate) fn ask<T>(
    global: &Global,
    question: impl AsyncFn(gdrd_client::Client) -> Result<T, ClientError>,
) -> anyhow::Result<Option<T>> {
    let asked = host::block_on(async {
        let client = match host::connect(global).await {
            Ok(client) => client,
            Err(error) => return Ok(Err(error)),
        };
        Ok(question(client).await)
    })?;
    match asked {
        Ok(answer) => Ok(Some(answer)),
        // Who names a daemon wants that one.
        Err(error) if is_none_for_us(&error) && global.runtime_dir.is_none() => {
            anstream::eprintln!("note: {error}; reading /sys of this host instead");
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

/// Whether there is no daemon, or none that this user may ask.
fn is_none_for_us(error: &ClientError) -> bool {
    error.is_unreachable() || matches!(error, ClientError::NotPermitted { .. })
}

/// What this process reads without asking a daemon: the input that was named, or this host where the options ask for
/// what a daemon would not do.
pub(crate) fn by_itself(input: &Input) -> anyhow::Result<Option<Snapshot>> {
    match &input.input {
        Some(path) => own(path, &options(input)?).map(Some),
        None if !input.gpu_ids.is_empty() => live(input).map(Some),
        None => Ok(None),
    }
}

fn options(input: &Input) -> Result<ReadOptions, UsageError> {
    let gpu_ids = GpuIds::parse(input.gpu_ids.iter().map(String::as_str));
    let gpu_ids = gpu_ids.map_err(|error| UsageError(format!("--gpu-ids: {error}")))?;
    Ok(ReadOptions { gpu_ids, ..ReadOptions::default() })
}

/// How long the GPU driver of this host is asked for NVLinks and the like.
const DRIVER_PATIENCE: Duration = Duration::from_secs(10);

/// This host, read by this process.
pub(crate) fn live(input: &Input) -> anyhow::Result<Snapshot> {
    let driver = driver::of_this_host(DRIVER_PATIENCE);
    read_live(&ReadOptions { driver, ..options(input)? }).context("read this host")
}

/// What standard input is called in `--input`, and in messages.
const STDIN: &str = "-";
const STDIN_NAME: &str = "standard input";

/// Standard input, a file, a folder, or a built-in profile. What exists in the file system comes before a profile.
pub(crate) fn own(path: &Path, options: &ReadOptions) -> anyhow::Result<Snapshot> {
    if path == Path::new(STDIN) {
        let stdin = std::io::stdin().lock();
        if stdin.is_terminal() {
            anstream::eprintln!("note: paste the text, then press Enter and Ctrl-D");
        }
        return Ok(read_stream(stdin, Path::new(STDIN_NAME), options)?);
    }
    if path.exists() {
        return Ok(read_input(path, options)?);
    }
    let name = path.to_string_lossy();
    let Some(text) = profile::builtin_text(&name) else {
        let known = profile::builtin_names().join(", ");
        let message = format!("--input {name}: no such file or folder, nor a built-in profile; those are: {known}");
        return Err(UsageError(message).into());
    };
    Ok(profile::snapshot(text, Some(path.to_owned()), options)?)
}

/// The daemon's answer as a topology.
pub(crate) fn daemons(answer: v1::GetTopologyResponse) -> anyhow::Result<Topology> {
    let plan = answer.plan.context("the daemon's topology has no plan")?;
    let plan = plan_of(&plan)?;
    let mut snapshot = profile::snapshot(&answer.host_profile, None, &ReadOptions::default())
        .context("read the host profile that the daemon sent; daemon and gdrctl may be of different versions")?;
    snapshot.generation = answer.generation;
    snapshot.source = plan.source.clone();
    Ok(Topology::Daemons(snapshot, plan))
}

/// The daemon's plan in the form of the contract: both have the same fields.
fn plan_of(plan: &v1::Plan) -> anyhow::Result<Plan> {
    let value = json!({
        "schema": gdrd_topology::plan::contract::SCHEMA,
        "generation": plan.generation,
        "source": plan.source.as_ref().map(|source| json!({ "kind": source.kind, "path": source.path })),
        "gpus": plan.gpus.iter().map(gpu_of).collect::<Vec<_>>(),
        "nics": plan.nics.iter().map(nic_of).collect::<Vec<_>>(),
        "nvlink": { "kind": plan.nvlink_kind },
        "warnings": plan.warnings,
    });
    serde_json::from_value(value).context("read the plan that the daemon sent; it may be of another version")
}

fn gpu_of(gpu: &v1::PlanGpu) -> Value {
    let nics = gpu.nics.iter().map(|path| {
        let gdr = path.gdr.as_ref();
        json!({
            "name": path.name,
            "bdf": path.bdf,
            "level": Some(&path.level).filter(|level| !level.is_empty()),
            "gbps": path.gbps,
            "gdr": {
                "state": gdr.map_or("unknown", |gdr| gdr.state.as_str()),
                "reason": gdr.map_or("", |gdr| gdr.reason.as_str()),
            },
            "acs": path.acs.as_ref().map(|acs| json!({ "state": acs.state, "reason": acs.reason })),
        })
    });
    json!({
        "name": gpu.name,
        "uuid": gpu.uuid,
        "bdf": gpu.bdf,
        "numa": gpu.numa,
        "assigned": gpu.assigned,
        "rail": gpu.rail,
        "reason": gpu.reason,
        "drained": gpu.drained,
        "nics": nics.collect::<Vec<_>>(),
    })
}

fn nic_of(nic: &v1::PlanNic) -> Value {
    let ports = nic.ports.iter().map(|port| {
        json!({
            "port_num": port.port_num,
            "state": port.state,
            "link_layer": port.link_layer,
            "rate_gbps": port.rate_gbps,
        })
    });
    json!({
        "name": nic.name,
        "bdf": nic.bdf,
        "numa": nic.numa,
        "card": nic.card,
        "rate_gbps": nic.rate_gbps,
        "ports": ports.collect::<Vec<_>>(),
        "gpus": nic.gpus,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_built_in_profile_is_an_input_and_an_unknown_name_lists_them() {
        assert!(!own(Path::new("dgx-a100"), &ReadOptions::default()).unwrap().host.gpus.is_empty());
        let error = own(Path::new("no-such-thing"), &ReadOptions::default()).unwrap_err().to_string();
        assert!(error.contains("dgx-a100"), "{error}");
    }

    #[test]
    fn what_exists_comes_before_a_profile_of_the_same_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("dgx-a100");
        std::fs::write(&path, "no profile").unwrap();
        assert!(own(&path, &ReadOptions::default()).is_err());
    }

    #[test]
    fn a_plan_of_the_daemon_reads_as_the_contract() {
        let path = v1::PlanPath { name: "mlx5_0".into(), level: "PIX".into(), gbps: Some(200.0), ..Default::default() };
        let gpu = v1::PlanGpu {
            name: "GPU0".into(),
            bdf: Some("0000:07:00.0".into()),
            nics: vec![path],
            ..Default::default()
        };
        let source = Some(v1::PlanSource { kind: "profile".into(), path: Some("dgx-a100".into()) });
        let plan = v1::Plan { generation: 3, source, gpus: vec![gpu], ..Default::default() };
        let plan = plan_of(&plan).unwrap();
        assert_eq!(plan.gpus[0].nics[0].gbps, Some(200.0));
        let json: Value = serde_json::from_str(&plan.to_json()).unwrap();
        assert_eq!(json["gpus"][0]["nics"][0]["level"], "PIX");
        assert_eq!(json["source"]["kind"], "profile");
    }
}
