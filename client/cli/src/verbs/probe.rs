//! `gdrctl probe`: the daemon proves which NICs move which memory.

use gdrd_client::v1::ProbedPair;
use serde_json::{Value, json};

use crate::args::{Global, Probe};
use crate::exit::Outcome;
use crate::host;
use crate::output::{self, Column};

#[inline(never)]
pub(crate) fn run(global: &Global, options: &Probe) -> anyhow::Result<Outcome> {
    let (gpu, nic) = (options.gpu.as_deref().unwrap_or_default(), options.nic.as_deref().unwrap_or_default());
    let pairs = host::block_on(async {
        let daemon = host::connect(global).await?;
        Ok(if options.known { daemon.probed(gpu, nic).await? } else { daemon.probe(gpu, nic).await? })
    })?;
    let nothing = if options.known { "nothing has been probed" } else { "no NIC with an active port was found" };
    output::print(global.format, || as_json(&pairs), || as_text(&pairs, nothing))?;
    let has_failed = pairs.iter().any(|pair| pair.state == "failed");
    // Asked for a proof, and there is none.
    let has_none = !options.known && pairs.iter().all(|pair| pair.state == "not-tried");
    Ok(if has_failed || has_none { Outcome::Failed } else { Outcome::Done })
}

/// `gpu` is null for a host buffer.
fn as_json(pairs: &[ProbedPair]) -> Value {
    let row = |pair: &ProbedPair| {
        json!({
            "gpu": Some(&pair.gpu).filter(|gpu| !gpu.is_empty()),
            "nic": pair.hca,
            "port_num": pair.port_num,
            "state": pair.state,
            "reason": pair.reason,
            "gbps": pair.gbps,
            "latency_us": pair.latency_us,
        })
    };
    json!({ "schema": "gdrd.probe/v1", "pairs": pairs.iter().map(row).collect::<Vec<_>>() })
}

fn as_text(pairs: &[ProbedPair], nothing: &str) -> String {
    let figure = |figure: Option<f64>| figure.map_or_else(|| "-".to_owned(), |figure| format!("{figure:.1}"));
    let rows = pairs.iter().map(|pair| {
        let memory = if pair.gpu.is_empty() { "host" } else { pair.gpu.as_str() };
        vec![
            memory.to_owned(),
            format!("{}:{}", pair.hca, pair.port_num),
            pair.state.clone(),
            figure(pair.gbps),
            figure(pair.latency_us),
            pair.reason.clone(),
        ]
    });
    let columns = [
        Column::Left("MEMORY"),
        Column::Left("NIC:PORT"),
        Column::Left("STATE"),
        Column::Right("GBIT/S"),
        Column::Right("US"),
        Column::Left("WHY"),
    ];
    match pairs {
        [] => format!("{nothing}\n"),
        _ => output::table(&columns, rows),
    }
}
