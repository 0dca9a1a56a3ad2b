//! `gdrctl plan`: which NICs each GPU should use, as `gdrd.plan/v1` or as a table.

use anstyle::{AnsiColor, Style};
use gdrd_client::v1::MovedGpu;
use gdrd_topology::bandwidth::{self, BandwidthMatch};
use gdrd_topology::level::Level;
use gdrd_topology::model::Host;
use gdrd_topology::plan::contract::{GpuPlan, Plan};
use gdrd_topology::plan::{NicFilter, PlanOptions, plan};
use gdrd_topology::words;
use serde::Serialize;
use serde_json::{Value, json};

use crate::args::{self, Format, Global, Pairing};
use crate::exit::{Outcome, UsageError};
use crate::host;
use crate::output::{self, Column};
use crate::source::{self, Topology};

pub(crate) fn run(global: &Global, options: &args::Plan) -> anyhow::Result<Outcome> {
    if options.apply {
        return apply(global);
    }
    let wishes = wishes(&options.pairing)?;
    let (snapshot, made) = match (source::topology(global, &options.input)?, wishes) {
        (Topology::Daemons(snapshot, plan), None) => (snapshot, plan),
        // What the daemon does not do can still be seen: its host, planned with the wishes.
        (Topology::Daemons(snapshot, _) | Topology::Own(snapshot), wishes) => {
            let made = plan(&snapshot, &wishes.unwrap_or_default());
            (snapshot, made)
        }
    };
    match global.format {
        Format::Json => output::write(&as_json(&snapshot.host, &made)?)?,
        _ => output::write(&(as_text(&made) + &bandwidth_text(&snapshot.host, &made)))?,
    }
    Ok(Outcome::Done)
}

fn apply(global: &Global) -> anyhow::Result<Outcome> {
    let done = host::block_on(async { Ok(host::connect(global).await?.apply_plan().await?) })?;
    let json = || {
        let moved = done.moved.iter().map(|moved| json!({ "gpu": moved.gpu, "from": moved.from, "to": moved.to }));
        let moved: Vec<Value> = moved.collect();
        json!({ "schema": "gdrd.apply/v1", "generation": done.generation, "moved": moved })
    };
    output::print(global.format, json, || {
        if done.moved.is_empty() {
            return "no pairing is better than the one in force\n".to_owned();
        }
        let names = |nics: &[String]| if nics.is_empty() { "no NIC".to_owned() } else { nics.join(",") };
        let line =
            |moved: &MovedGpu| format!("{}: {} instead of {}\n", moved.gpu, names(&moved.to), names(&moved.from));
        done.moved.iter().map(line).collect()
    })
}

/// The plan, and each GPU's link against its NICs, which takes the host to tell.
#[derive(Serialize)]
struct View<'a> {
    #[serde(flatten)]
    plan: &'a Plan,
    bandwidth: Vec<BandwidthMatch>,
}

fn as_json(host: &Host, plan: &Plan) -> serde_json::Result<String> {
    serde_json::to_string_pretty(&View { plan, bandwidth: bandwidth::matches(host, plan) })
}

/// Each GPU's link against its NICs, GPUs of which the same can be said together.
fn bandwidth_text(host: &Host, plan: &Plan) -> String {
    let mut lines: Vec<(String, Vec<String>)> = Vec::new();
    for found in bandwidth::matches(host, plan).into_iter().filter(|found| !found.findings.is_empty()) {
        for finding in found.findings {
            match lines.iter_mut().find(|(known, _)| *known == finding) {
                Some((_, gpus)) => gpus.push(found.gpu.clone()),
                None => lines.push((finding, vec![found.gpu.clone()])),
            }
        }
    }
    let text: Vec<String> =
        lines.into_iter().map(|(finding, gpus)| format!("{}: {finding}\n", gpus.join(","))).collect();
    if text.is_empty() { String::new() } else { format!("\nbandwidth\n{}", text.concat()) }
}

/// What the options ask of the pairing, if anything.
fn wishes(pairing: &Pairing) -> Result<Option<PlanOptions>, UsageError> {
    if pairing.nics.is_none() && pairing.max_level.is_none() {
        return Ok(None);
    }
    let mut wishes = PlanOptions::default();
    if let Some(text) = &pairing.nics {
        let filter: NicFilter = text.parse().map_err(|error| UsageError(format!("--nics: {error}")))?;
        wishes.filter = Some(filter);
    }
    if let Some(text) = &pairing.max_level {
        wishes.max_level = level(text)?;
    }
    Ok(Some(wishes))
}

fn level(text: &str) -> Result<Level, UsageError> {
    match text.to_ascii_uppercase().as_str() {
        "PIX" => Ok(Level::Pix),
        "PXB" => Ok(Level::Pxb),
        "PHB" => Ok(Level::Phb),
        "NODE" => Ok(Level::Node),
        "SYS" => Ok(Level::Sys),
        _ => Err(UsageError(format!("--max-level {text}: not one of PIX, PXB, PHB, NODE, SYS"))),
    }
}

fn as_text(plan: &Plan) -> String {
    let columns = [
        Column::Left("GPU"),
        Column::Left("BDF"),
        Column::Right("NUMA"),
        Column::Left("NICS"),
        Column::Left("LEVEL"),
        Column::Right("GBIT/S"),
        Column::Left("WHY"),
    ];
    let mut text = match plan.gpus.as_slice() {
        [] => "no GPU was found\n".to_owned(),
        gpus => output::table(&columns, gpus.iter().map(row)),
    };
    let yellow = Style::new().fg_color(Some(AnsiColor::Yellow.into()));
    for warning in &plan.warnings {
        text += &format!("{yellow}warning{yellow:#}: {warning}\n");
    }
    text
}

fn row(gpu: &GpuPlan) -> Vec<String> {
    let unknown = || "-".to_owned();
    let nearest = gpu.assigned.first().and_then(|name| gpu.nics.iter().find(|nic| nic.name == *name));
    let assigned = if gpu.assigned.is_empty() { unknown() } else { gpu.assigned.join(",") };
    vec![
        gpu.name.clone(),
        gpu.bdf.map_or_else(unknown, |bdf| bdf.to_string()),
        gpu.numa.map_or_else(unknown, |numa| numa.to_string()),
        assigned,
        nearest.and_then(|nic| nic.level).map_or_else(unknown, |level| level.to_string()),
        nearest.and_then(|nic| nic.gbps).map_or_else(unknown, words::gbps),
        if gpu.drained { format!("drained; else {}", gpu.reason) } else { gpu.reason.clone() },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use gdrd_topology::assemble::ReadOptions;
    use std::path::Path;

    fn dgx(nics: Option<&str>, max_level: Option<&str>) -> Plan {
        let pairing = Pairing { nics: nics.map(Into::into), max_level: max_level.map(Into::into) };
        let wishes = wishes(&pairing).unwrap().unwrap_or_default();
        plan(&source::own(Path::new("dgx-a100"), &ReadOptions::default()).unwrap(), &wishes)
    }

    #[test]
    fn every_gpu_has_a_row_and_a_nic() {
        let text = as_text(&dgx(None, None));
        assert!((0..8).all(|gpu| text.contains(&format!("GPU{gpu} "))), "{text}");
    }

    #[test]
    fn what_the_links_waste_is_said_once_for_all_gpus_it_is_true_of() {
        let host = source::own(Path::new("dgx-a100"), &ReadOptions::default()).unwrap().host;
        let text = bandwidth_text(&host, &dgx(None, None));
        let all = (0..8).map(|gpu| format!("GPU{gpu}")).collect::<Vec<_>>().join(",");
        assert!(text.contains(&format!("{all}: link of 252 Gbit/s against NIC of 200: 52")), "{text}");
    }

    #[test]
    fn the_json_is_the_plan_and_what_the_links_waste() {
        let host = source::own(Path::new("dgx-a100"), &ReadOptions::default()).unwrap().host;
        let text = as_json(&host, &dgx(None, None)).unwrap();
        assert!(text.starts_with("{\n  \"schema\": \"gdrd.plan/v1\",\n"), "{text}");
        let view: serde_json::Value = serde_json::from_str(&text).unwrap();
        let first = &view["bandwidth"][0];
        assert_eq!((&first["gpu"], &first["usable_gbps"]), (&"GPU0".into(), &200.0.into()));
        assert!(first["gpu_gbps"].as_f64().is_some_and(|gbps| (gbps - 252.0).abs() < 1.0), "{first}");
        assert!(first["uplink"]["gbps"].is_number() && first["findings"].is_array(), "{first}");
    }

    #[test]
    fn a_filter_takes_nics_away() {
        let all = dgx(None, None);
        let first = all.gpus[0].assigned[0].clone();
        let without = dgx(Some(&format!("^={first}")), None);
        assert!(without.gpus.iter().all(|gpu| !gpu.assigned.contains(&first)));
    }

    #[test]
    fn a_wrong_level_or_filter_is_a_usage_error() {
        for (nics, max_level) in [(None, Some("NVL")), (Some(""), None)] {
            let pairing = Pairing { nics: nics.map(Into::into), max_level: max_level.map(Into::into) };
            assert!(wishes(&pairing).is_err());
        }
        assert!(matches!(level("pxb"), Ok(Level::Pxb)));
    }
}
