//! `gdrctl place`: scored sets of GPUs and NICs for a scheduler, best first.

use gdrd_client::v1;
use gdrd_topology::TopologyError;
use gdrd_topology::model::Snapshot;
use gdrd_topology::place::{PlaceRequest, default_nics, place, planned};
use gdrd_topology::plan::{PlanOptions, plan};
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
    /// Why there is none, if so.
    reason: Option<String>,
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
    output::print(global.format, || json!(view), || as_text(&view))?;
    // A scheduler asks by the exit code alone.
    Ok(if view.placements.is_empty() { Outcome::NothingFits } else { Outcome::Done })
}

fn view(global: &Global, options: &Place) -> anyhow::Result<View> {
    if let Some(snapshot) = source::by_itself(&options.input)? {
        return Ok(own(&snapshot, options)?);
    }
    let request = v1::PlaceRequest {
        gpus: options.gpus,
        max_results: options.max_results,
        exclude_gpus: options.exclude.clone(),
        nics: options.nics,
        exclude_nics: options.exclude_nics.clone(),
        nvlink: options.nvlink,
        same_switch: options.same_switch,
        same_numa: options.same_numa,
        exclusive: options.exclusive,
    };
    match source::ask(global, async |client| client.place(request.clone()).await)? {
        Some(answer) => Ok(of_daemon(answer)),
        None => Ok(own(&source::live(&options.input)?, options)?),
    }
}

fn own(snapshot: &Snapshot, options: &Place) -> Result<View, TopologyError> {
    let count = |number: u32| usize::try_from(number).unwrap_or(usize::MAX);
    let plan_options = PlanOptions::default();
    let gpus = count(options.gpus);
    let plan = plan(snapshot, &plan_options);
    let request = PlaceRequest {
        gpus,
        nics: options.nics.map_or_else(|| default_nics(&plan, gpus), count),
        busy_gpus: options.exclude.clone(),
        busy_nics: options.exclude_nics.clone(),
        planned: planned(&plan),
        nvlink: options.nvlink,
        same_switch: options.same_switch,
        same_numa: options.same_numa,
        max_sets: count(options.max_results),
        // Only a daemon has drained or lent any.
        ..PlaceRequest::default()
    };
    let found = place(snapshot, &plan_options, &request)?;
    let placements = found.sets.into_iter().map(|set| Placement {
        gpus: set.gpus,
        nics: set.nics,
        score: set.score,
        reason: set.reasons.join("; "),
    });
    let placements: Vec<Placement> = placements.collect();
    let reason = found.reason.filter(|_| placements.is_empty());
    Ok(View { schema: SCHEMA, generation: snapshot.generation, placements, reason })
}

fn of_daemon(answer: v1::PlaceResponse) -> View {
    let placements = answer.placements.into_iter().map(|placement| Placement {
        gpus: placement.gpus,
        nics: placement.nics,
        score: placement.score,
        reason: placement.reason,
    });
    let reason = (!answer.reason.is_empty()).then_some(answer.reason);
    View { schema: SCHEMA, generation: answer.generation, placements: placements.collect(), reason }
}

fn as_text(view: &View) -> String {
    if view.placements.is_empty() {
        let reason = view.reason.as_deref().unwrap_or("no set of free GPUs is large enough");
        return format!("none: {reason}\n");
    }
    let rows = view.placements.iter().map(|placement| {
        let score = format!("{:.2}", placement.score);
        vec![score, placement.gpus.join(","), placement.nics.join(","), placement.reason.clone()]
    });
    output::table(&[Column::Right("SCORE"), Column::Left("GPUS"), Column::Left("NICS"), Column::Left("WHY")], rows)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::Input;
    use gdrd_topology::assemble::ReadOptions;
    use std::path::Path;

    fn placed(gpus: u32, exclude: &[&str]) -> Result<View, TopologyError> {
        let exclude = exclude.iter().map(|gpu| (*gpu).to_owned()).collect();
        let options = Place {
            gpus,
            nics: None,
            exclude,
            exclude_nics: Vec::new(),
            nvlink: false,
            same_switch: false,
            same_numa: false,
            exclusive: false,
            max_results: 8,
            input: Input::default(),
        };
        own(&source::own(Path::new("dgx-a100"), &ReadOptions::default()).unwrap(), &options)
    }

    #[test]
    fn sets_have_the_size_asked_for_and_leave_out_what_is_excluded() {
        let view = placed(2, &["GPU0"]).unwrap();
        assert!(!view.placements.is_empty());
        for placement in &view.placements {
            assert_eq!(placement.gpus.len(), 2);
            assert!(!placement.gpus.contains(&"GPU0".to_owned()));
        }
        let scores: Vec<f64> = view.placements.iter().map(|placement| placement.score).collect();
        assert!(scores.is_sorted_by(|a, b| a >= b), "{scores:?}");
    }

    #[test]
    fn more_gpus_than_there_are_is_none_with_its_reason_and_an_unknown_name_an_error() {
        let view = placed(9, &[]).unwrap();
        assert!(view.placements.is_empty() && as_text(&view).starts_with("none: "), "{view:?}");
        assert!(placed(1, &["GPU99"]).is_err());
    }
}
