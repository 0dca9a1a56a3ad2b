//! `gdrctl path`: how data should go from a GPU to somewhere else, and why.

use gdrd_client::v1;
use gdrd_topology::TopologyError;
use gdrd_topology::advise::{Destination, Fallback, PathAdvice, advise_path};
use gdrd_topology::model::Snapshot;
use gdrd_topology::plan::{PlanOptions, plan};
use gdrd_topology::words;
use serde::Serialize;
use serde_json::json;

use crate::args::{Global, PathTo};
use crate::exit::Outcome;
use crate::{output, source};

/// `gdrd.path/v1`.
#[derive(Debug, Serialize)]
struct View {
    schema: &'static str,
    generation: u64,
    from: String,
    to: String,
    kind: String,
    via: Vec<String>,
    level: Option<String>,
    gbps: Option<f64>,
    reason: String,
    /// What is left where this way does not work.
    fallback: Option<Next>,
}

#[derive(Debug, Serialize)]
struct Next {
    kind: String,
    via: Vec<String>,
    gbps: Option<f64>,
    reason: String,
}

const SCHEMA: &str = "gdrd.path/v1";

pub(crate) fn run(global: &Global, options: &PathTo) -> anyhow::Result<Outcome> {
    let view = view(global, options)?;
    output::print(global.format, || json!(view), || as_text(&view))
}

/// What is typed for the far end. A name that is neither word nor drive is a GPU's: `GPU1`, a UUID, an address.
fn destination(to: &str) -> Destination {
    let device = to.strip_prefix("/dev/").unwrap_or(to);
    match to {
        "remote" => Destination::Remote,
        "drive" => Destination::Drive(None),
        _ if device.starts_with("nvme") => Destination::Drive(Some(device.to_owned())),
        _ => Destination::Gpu(to.to_owned()),
    }
}

fn view(global: &Global, options: &PathTo) -> anyhow::Result<View> {
    let to = destination(&options.to);
    if let Some(snapshot) = source::by_itself(&options.input)? {
        return Ok(own(&snapshot, &options.from, &to)?);
    }
    let request = v1::AdvisePathRequest { from: options.from.clone(), to: Some(wire(to.clone())) };
    match source::ask(global, async |client| client.advise_path(request.clone()).await)? {
        Some(answer) => Ok(of_daemon(answer)),
        None => Ok(own(&source::live(&options.input)?, &options.from, &to)?),
    }
}

fn wire(to: Destination) -> v1::advise_path_request::To {
    match to {
        Destination::Gpu(name) => v1::advise_path_request::To::Gpu(name),
        Destination::Remote => v1::advise_path_request::To::Remote(v1::RemoteHost {}),
        Destination::Drive(name) => v1::advise_path_request::To::Drive(name.unwrap_or_default()),
    }
}

/// A kind as the library serializes it.
fn word(kind: &impl Serialize) -> String {
    json!(kind).as_str().unwrap_or_default().to_owned()
}

fn own(snapshot: &Snapshot, from: &str, to: &Destination) -> Result<View, TopologyError> {
    let plan = plan(snapshot, &PlanOptions::default());
    let PathAdvice { from, to, kind, via, level, gbps, reason, fallback } = advise_path(snapshot, &plan, from, to)?;
    let next = |next: Fallback| Next { kind: word(&next.kind), via: next.via, gbps: next.gbps, reason: next.reason };
    Ok(View {
        schema: SCHEMA,
        generation: snapshot.generation,
        from,
        to,
        kind: word(&kind),
        via,
        level: level.map(|level| level.to_string()),
        gbps,
        reason,
        fallback: fallback.map(next),
    })
}

fn of_daemon(answer: v1::AdvisePathResponse) -> View {
    let next = |next: v1::PathFallback| Next { kind: next.kind, via: next.via, gbps: next.gbps, reason: next.reason };
    View {
        schema: SCHEMA,
        generation: answer.generation,
        from: answer.from,
        to: answer.to,
        kind: answer.kind,
        via: answer.via,
        level: Some(answer.level).filter(|level| !level.is_empty()),
        gbps: answer.gbps,
        reason: answer.reason,
        fallback: answer.fallback.map(next),
    }
}

fn line(kind: &str, via: &[String], gbps: Option<f64>) -> String {
    let via = if via.is_empty() { String::new() } else { format!(" by {}", via.join(", ")) };
    let gbps = gbps.map_or_else(String::new, |gbps| format!(", about {} Gbit/s", words::gbps(gbps)));
    format!("{kind}{via}{gbps}")
}

fn as_text(view: &View) -> String {
    let mut text = format!("{} -> {}: {}\n", view.from, view.to, line(&view.kind, &view.via, view.gbps));
    text += &format!("  why: {}\n", view.reason);
    if let Some(next) = &view.fallback {
        text += &format!("  else: {} ({})\n", line(&next.kind, &next.via, next.gbps), next.reason);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use gdrd_topology::assemble::ReadOptions;
    use std::path::Path;

    fn asked(from: &str, to: &str) -> Result<View, TopologyError> {
        own(&source::own(Path::new("dgx-a100"), &ReadOptions::default()).unwrap(), from, &destination(to))
    }

    #[test]
    fn each_far_end_has_its_way() {
        for (to, kind) in [
            ("GPU0", "same-gpu"),
            ("GPU7", "nvlink"),
            ("0000:0f:00.0", "nvlink"),
            ("remote", "gpudirect-rdma"),
            ("drive", "gpudirect-storage"),
            ("/dev/nvme3n1", "bounce"),
        ] {
            let view = asked("GPU0", to).unwrap();
            assert_eq!(view.kind, kind, "{to}");
            assert!(as_text(&view).contains("why: "), "{to}");
        }
        assert_eq!(asked("GPU0", "remote").unwrap().fallback.unwrap().kind, "staged");
    }

    #[test]
    fn unknown_ends_are_named() {
        for (from, to) in [("GPU99", "remote"), ("GPU0", "GPU99"), ("GPU0", "nvme99")] {
            assert!(asked(from, to).unwrap_err().to_string().contains("99"));
        }
    }
}
