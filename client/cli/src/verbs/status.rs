//! `gdrctl status`: what the daemon is, which backends it has, and why others are absent.

use gdrd_client::v1;
use serde_json::{Value, json};

use crate::args::Global;
use crate::exit::Outcome;
use crate::host;
use crate::output::{self, Column};

#[inline(never)]
pub(crate) fn run(global: &Global) -> anyhow::Result<Outcome> {
    let status = host::block_on(async { Ok(host::connect(global).await?.status().await?) })?;
    output::print(global.format, || as_json(&status), || as_text(&status))
}

fn as_json(status: &v1::StatusResponse) -> Value {
    let versions = status.versions.unwrap_or_default();
    let backends = status
        .backends
        .iter()
        .map(|backend| json!({ "name": backend.name, "present": backend.present, "reason": backend.reason }));
    let drained = status.drained_gpus.iter().map(|gpu| json!({ "gpu": gpu.gpu, "gpu_uuid": gpu.gpu_uuid }));
    json!({
        "schema": "gdrd.status/v1",
        "daemon_version": status.daemon_version,
        "versions": { "api": versions.api, "ring": versions.ring, "generation_page": versions.generation_page },
        "simulated": Some(&status.sim_profile).filter(|profile| !profile.is_empty()),
        "topology_generation": status.topology_generation,
        "runtime_dir": status.runtime_dir,
        "drained": drained.collect::<Vec<_>>(),
        "backends": backends.collect::<Vec<_>>(),
    })
}

fn as_text(status: &v1::StatusResponse) -> String {
    let simulated = match status.sim_profile.as_str() {
        "" => String::new(),
        profile => format!(", simulated host {profile}"),
    };
    let rows = status.backends.iter().map(|backend| {
        let state = if backend.present { "present" } else { "absent" };
        vec![backend.name.clone(), state.to_owned(), backend.reason.clone()]
    });
    let columns = [Column::Left("BACKEND"), Column::Left("STATE"), Column::Left("REASON")];
    let drained = status.drained_gpus.iter().map(|gpu| {
        format!("drained: {} ({}); 'gdrctl drain {} --resume' serves it again\n", gpu.gpu, gpu.gpu_uuid, gpu.gpu)
    });
    format!(
        "gdrd {} in {}, topology generation {}{simulated}\n{}{}",
        status.daemon_version,
        status.runtime_dir,
        status.topology_generation,
        drained.collect::<String>(),
        output::table(&columns, rows)
    )
}
