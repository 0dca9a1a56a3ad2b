//! `gdrctl stats`: the daemon's counters and gauges.

use std::collections::BTreeMap;

use gdrd_client::v1;
use serde_json::{Value, json};

use crate::args::{Global, Stats};
use crate::exit::Outcome;
use crate::host;
use crate::output::{self, Column};

#[inline(never)]
pub(crate) fn run(global: &Global, options: &Stats) -> anyhow::Result<Outcome> {
    let mut stats = host::block_on(async { Ok(host::connect(global).await?.stats().await?) })?;
    if let Some(part) = &options.part {
        stats.retain(|stat| stat.name.contains(part.as_str()));
    }
    let json = || json!({ "schema": "gdrd.stats/v1", "stats": stats.iter().map(as_json).collect::<Vec<_>>() });
    output::print(global.format, json, || as_text(&stats))
}

fn labels_of(stat: &v1::Stat) -> BTreeMap<&str, &str> {
    stat.labels.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect()
}

fn as_json(stat: &v1::Stat) -> Value {
    json!({ "name": stat.name, "labels": labels_of(stat), "value": stat.value, "help": stat.help })
}

fn as_text(stats: &[v1::Stat]) -> String {
    if stats.is_empty() {
        return "no figure has that name\n".to_owned();
    }
    let rows = stats.iter().map(|stat| {
        let labels: Vec<String> = labels_of(stat).into_iter().map(|(name, value)| format!("{name}={value}")).collect();
        vec![stat.name.clone(), labels.join(" "), stat.value.to_string(), stat.help.clone()]
    });
    output::table(&[Column::Left("NAME"), Column::Left("OF"), Column::Right("VALUE"), Column::Left("MEANING")], rows)
}
