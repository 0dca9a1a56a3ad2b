//! `gdrctl bench`: what gdrd costs, as ratios to floors measured in the same run.
//!
//! Absolute times say more about the machine than about gdrd; a ratio of two medians of one run holds on any.

mod bandwidth;
mod idle;
mod latency;
mod lease;
mod pair;
pub(crate) mod peer;
mod plan;
mod sample;

use anyhow::Context as _;
use clap::ValueEnum as _;
use serde_json::{Value, json};

use crate::args::{Bench, Global, Measurement};
use crate::exit::Outcome;
use crate::host;
use crate::output::{self, Column};

const ALL: [Measurement; 5] =
    [Measurement::Lease, Measurement::Latency, Measurement::Bandwidth, Measurement::Plan, Measurement::Idle];

/// One figure with the bound that it is to keep.
#[derive(Debug, Clone, PartialEq)]
struct Figure {
    name: &'static str,
    value: f64,
    unit: &'static str,
    /// Greatest value allowed; `None` for figures that are only shown.
    most: Option<f64>,
    /// How the rounds of the side that scatters more do ([`sample::Rounds::scatter`]); `None` for what is no ratio.
    scatter: Option<f64>,
    note: String,
}

/// Rounds that scatter more than this were measured while the host did other work. On a quiet one they take up to two times as long by
/// which CPUs they run on.
const MOST_SCATTER: f64 = 4.0;

impl Figure {
    /// Whether the host had other work, so that it says nothing.
    fn is_disturbed(&self) -> bool {
        self.scatter.is_some_and(|scatter| scatter.is_nan() || scatter > MOST_SCATTER)
    }

    fn keeps_bound(&self) -> Option<bool> {
        self.most.filter(|_| !self.is_disturbed()).map(|most| self.value <= most)
    }
}

#[inline(never)]
pub(crate) fn run(global: &Global, options: &Bench) -> anyhow::Result<Outcome> {
    let wanted = if options.only.is_empty() { &ALL[..] } else { &options.only };
    let mut figures = Vec::new();
    // The idle daemon first: nothing of the rest is then still settling.
    for measurement in ALL.iter().rev().filter(|measurement| wanted.contains(measurement)) {
        let measured = match measurement {
            Measurement::Lease => host::block_on(lease::measure(global, options)),
            Measurement::Latency => host::block_on(latency::measure(global, options)),
            Measurement::Bandwidth => host::block_on(bandwidth::measure(global, options)),
            Measurement::Plan => plan::measure(),
            Measurement::Idle => idle::measure(global, options),
        };
        let name = measurement.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
        figures.extend(measured.with_context(|| format!("measure {name}"))?);
    }
    let simulated = simulated_host(global)?;
    output::print(
        global.format,
        || as_json(&figures, simulated.as_deref()),
        || as_text(&figures, simulated.as_deref()),
    )?;
    let is_missed = |figure: &Figure| figure.most.is_some() && figure.keeps_bound() != Some(true);
    Ok(if figures.iter().any(is_missed) { Outcome::Failed } else { Outcome::Done })
}

/// The profile that the daemon simulates, since that is what was measured then.
fn simulated_host(global: &Global) -> anyhow::Result<Option<String>> {
    let status = host::block_on(async { Ok(host::connect(global).await?.status().await?) })?;
    Ok(Some(status.sim_profile).filter(|profile| !profile.is_empty()))
}

fn as_json(figures: &[Figure], simulated: Option<&str>) -> Value {
    let figures = figures.iter().map(|figure| {
        json!({
            "name": figure.name,
            "value": figure.value,
            "unit": figure.unit,
            "most": figure.most,
            "kept": figure.keeps_bound(),
            "scatter": figure.scatter,
            "busy": figure.is_disturbed(),
            "note": figure.note,
        })
    });
    json!({ "schema": "gdrd.bench/v1", "simulated": simulated, "figures": figures.collect::<Vec<_>>() })
}

fn as_text(figures: &[Figure], simulated: Option<&str>) -> String {
    let rows = figures.iter().map(|figure| {
        let bound = figure.most.map(|most| format!("{most}")).unwrap_or_default();
        let kept = match figure.keeps_bound() {
            Some(true) => "kept",
            Some(false) => "NOT KEPT",
            None if figure.is_disturbed() => "BUSY",
            None => "",
        };
        let value = format!("{:.2} {}", figure.value, figure.unit);
        vec![figure.name.to_owned(), value, bound, kept.to_owned(), figure.note.clone()]
    });
    let columns = [
        Column::Left("FIGURE"),
        Column::Right("VALUE"),
        Column::Right("AT MOST"),
        Column::Left(""),
        Column::Left("HOW"),
    ];
    let host = match simulated {
        Some(profile) => format!("measured on the simulated host {profile}: no hardware was involved\n"),
        None => String::new(),
    };
    host + &output::table(&columns, rows) + &busy(figures)
}

/// Says what figures that were measured on a busy host are worth.
fn busy(figures: &[Figure]) -> String {
    let scatter = figures.iter().filter(|figure| figure.is_disturbed()).filter_map(|figure| figure.scatter);
    match scatter.reduce(f64::max) {
        Some(most) => format!(
            "BUSY: this host had other work, so that ratio says nothing: rounds that all do the same took up to {most:.0} times \
             as long as others (p90 of p10; a quiet host stays below {MOST_SCATTER}). Measure again when it is quiet.\n"
        ),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(value: f64, most: Option<f64>) -> Figure {
        Figure { name: "x", value, unit: "×", most, scatter: None, note: String::new() }
    }

    #[test]
    fn a_figure_whose_rounds_scatter_is_neither_kept_nor_missed_and_says_so() {
        let of = |scatter| Figure { scatter: Some(scatter), ..figure(1.0, Some(1.5)) };
        assert_eq!(of(2.0).keeps_bound(), Some(true));
        assert_eq!(busy(&[of(2.0)]), "");
        let disturbed = [of(2.0), of(37.4)];
        assert_eq!(disturbed[1].keeps_bound(), None);
        let text = as_text(&disturbed, None);
        assert!(text.contains("BUSY: ") && text.contains("37 times"), "{text}");
        let document = as_json(&disturbed, None);
        assert_eq!(document["figures"][0]["busy"], false);
        assert_eq!(document["figures"][1]["busy"], true);
        assert_eq!(document["figures"][1]["kept"], Value::Null);
        assert!(of(f64::NAN).is_disturbed());
    }

    #[test]
    fn bounds_are_kept_broken_or_absent() {
        assert_eq!(figure(1.5, Some(1.5)).keeps_bound(), Some(true));
        assert_eq!(figure(1.6, Some(1.5)).keeps_bound(), Some(false));
        assert_eq!(figure(1.6, None).keeps_bound(), None);
    }

    #[test]
    fn a_simulated_host_is_named_in_both_forms() {
        assert!(as_text(&[figure(1.0, None)], Some("dgx-a100")).contains("simulated host dgx-a100"));
        assert_eq!(as_json(&[], Some("dgx-a100"))["simulated"], "dgx-a100");
        assert_eq!(as_json(&[], None)["simulated"], Value::Null);
    }
}
