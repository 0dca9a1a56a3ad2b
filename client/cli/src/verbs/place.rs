//! `gdrctl place`: scored sets of GPUs and NICs for a scheduler, best first.

use anyhow::Context as _;
use gdrd_client::v1;
use serde::Serialize;
use serde_json::json;

use crate::args::{Global, Place};
use crate::exit::Outcome;
use crate::output::{self, Column};
use crate::source;

/// `gdrd.place/v1`.
#[derive(Debug, Serialize)]
struct View {
    schema: &'static str,
    generation: u64,
    placements: Vec<Placement>,
}

#[derive(Debug, Serialize)]
struct Placement {
    gpus: Vec<String>,
    nics: Vec<String>,
    score: f64,
    reason: String,
}

const SCHEMA: &str = "gdrd.place/v1";

pub(crate) fn run(global: &Global, options: &Place) -> anyhow::Result<Outcome> {
    let view = view(global, options)?;
    output::print(global.format, || json!(view), || as_text(&view))
}

fn view(global: &Global, options: &Place) -> anyhow::Result<View> {
    let request = v1::PlaceRequest {
        gpus: options.gpus,
        max_results: options.max_results,
        exclude_gpus: options.exclude.clone(),
    };
    let answer = source::ask(global, async |client| client.place(request.clone()).await)?;
    answer.map(of_daemon).context("no daemon")
}

fn of_daemon(answer: v1::PlaceResponse) -> View {
    let placements = answer.placements.into_iter().map(|placement| Placement {
        gpus: placement.gpus,
        nics: placement.nics,
        score: placement.score,
        reason: placement.reason,
    });
    View { schema: SCHEMA, generation: answer.generation, placements: placements.collect() }
}

fn as_text(view: &View) -> String {
    if view.placements.is_empty() {
        return "no set of free GPUs is large enough\n".to_owned();
    }
    let rows = view.placements.iter().map(|placement| {
        let score = format!("{:.2}", placement.score);
        vec![score, placement.gpus.join(","), placement.nics.join(","), placement.reason.clone()]
    });
    output::table(&[Column::Right("SCORE"), Column::Left("GPUS"), Column::Left("NICS"), Column::Left("WHY")], rows)
}
