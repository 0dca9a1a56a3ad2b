//! `gdrctl explain`: why a GPU has the NICs it has, every candidate and why it lost.

use gdrd_client::{Client, v1};
use gdrd_topology::bandwidth::{self, BandwidthMatch};
use gdrd_topology::plan::{Explanation, PlanOptions, explain, plan};
use gdrd_topology::words;
use serde::Serialize;
use serde_json::json;

use crate::args::{Explain, Global};
use crate::exit::Outcome;
use crate::output::{self, Column};
use crate::source;

/// `gdrd.explain/v1`.
#[derive(Debug, Serialize)]
struct View {
    schema: &'static str,
    generation: u64,
    gpu: String,
    summary: String,
    candidates: Vec<Candidate>,
    /// The GPU's link against its NICs; absent of a GPU without a place in the tree.
    bandwidth: Option<BandwidthMatch>,
}

#[derive(Debug, Serialize)]
struct Candidate {
    nic: String,
    level: Option<String>,
    gbps: Option<f64>,
    assigned: bool,
    reason: String,
}

const SCHEMA: &str = "gdrd.explain/v1";

pub(crate) fn run(global: &Global, options: &Explain) -> anyhow::Result<Outcome> {
    let view = view(global, options)?;
    output::print(global.format, || json!(view), || as_text(&view))
}

fn view(global: &Global, options: &Explain) -> anyhow::Result<View> {
    if let Some(snapshot) = source::by_itself(&options.input)? {
        return own(&snapshot, &options.gpu);
    }
    let question = async |client: Client| Ok((client.explain(&options.gpu).await?, client.topology().await?));
    match source::ask(global, question)? {
        Some((answer, topology)) => {
            let topology = source::daemons(topology)?;
            let bandwidth = bandwidth::of_gpu(&topology.snapshot().host, &topology.plan(), &answer.gpu);
            Ok(of_daemon(answer, bandwidth))
        }
        None => own(&source::live(&options.input)?, &options.gpu),
    }
}

fn own(snapshot: &gdrd_topology::model::Snapshot, gpu: &str) -> anyhow::Result<View> {
    let explanation = explain(snapshot, &PlanOptions::default(), None, gpu)?;
    let Explanation { gpu, reason, winners, losers } = explanation;
    let won = winners.into_iter().map(|winner| Candidate {
        nic: winner.nic,
        level: winner.level.map(|level| level.to_string()),
        gbps: winner.bottleneck.map(|narrowest| narrowest.gbps),
        assigned: true,
        reason: match winner.gpus.as_slice() {
            [_] => "its own".to_owned(),
            users => format!("shared by {}", users.join(", ")),
        },
    });
    let lost = losers.into_iter().map(|loser| Candidate {
        nic: loser.nic,
        level: loser.level.map(|level| level.to_string()),
        gbps: loser.bottleneck.map(|narrowest| narrowest.gbps),
        assigned: false,
        reason: loser.why,
    });
    let candidates = won.chain(lost).collect();
    let bandwidth = bandwidth::of_gpu(&snapshot.host, &plan(snapshot, &PlanOptions::default()), &gpu);
    Ok(View { schema: SCHEMA, generation: snapshot.generation, gpu, summary: reason, candidates, bandwidth })
}

fn of_daemon(answer: v1::ExplainResponse, bandwidth: Option<BandwidthMatch>) -> View {
    let candidates = answer.candidates.into_iter().map(|candidate| Candidate {
        nic: candidate.nic,
        level: Some(candidate.level).filter(|level| !level.is_empty()),
        gbps: candidate.gbps,
        assigned: candidate.assigned,
        reason: candidate.reason,
    });
    View {
        schema: SCHEMA,
        generation: answer.generation,
        gpu: answer.gpu,
        summary: answer.summary,
        candidates: candidates.collect(),
        bandwidth,
    }
}

fn as_text(view: &View) -> String {
    let unknown = || "-".to_owned();
    let rows = view.candidates.iter().map(|candidate| {
        vec![
            if candidate.assigned { "*" } else { "" }.to_owned(),
            candidate.nic.clone(),
            candidate.level.clone().unwrap_or_else(unknown),
            candidate.gbps.map_or_else(unknown, words::gbps),
            candidate.reason.clone(),
        ]
    });
    let columns =
        [Column::Left(""), Column::Left("NIC"), Column::Left("LEVEL"), Column::Right("GBIT/S"), Column::Left("WHY")];
    let findings = view.bandwidth.iter().flat_map(|found| &found.findings);
    let bandwidth: String = findings.map(|finding| format!("bandwidth: {finding}\n")).collect();
    let table = if view.candidates.is_empty() { String::new() } else { output::table(&columns, rows) };
    format!("{}: {}\n{table}{bandwidth}", view.gpu, view.summary)
}

#[cfg(test)]
mod tests {
    use super::*;
    use gdrd_topology::assemble::ReadOptions;
    use std::path::Path;

    #[test]
    fn every_nic_is_a_candidate_and_the_assigned_ones_come_first() {
        let snapshot = source::own(Path::new("dgx-a100"), &ReadOptions::default()).unwrap();
        let mut view = own(&snapshot, "gpu3").unwrap();
        assert_eq!(view.candidates.len(), snapshot.host.hcas.len());
        assert!(view.candidates[0].assigned && view.candidates.iter().all(|candidate| !candidate.reason.is_empty()));
        view.candidates[0].gbps = Some(126.030_769_230_769_24);
        let text = as_text(&view);
        assert!(text.starts_with("GPU3: ") && text.contains(" 126 ") && !text.contains("126.0"), "{text}");
    }

    #[test]
    fn an_unknown_gpu_is_named() {
        let snapshot = source::own(Path::new("dgx-a100"), &ReadOptions::default()).unwrap();
        assert!(own(&snapshot, "GPU99").unwrap_err().to_string().contains("GPU99"));
    }
}
