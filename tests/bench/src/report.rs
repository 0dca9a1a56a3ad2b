//! The figures as JSON for programs and as a Markdown table for people and for docs/performance.md.

use comfy_table::Table;
use comfy_table::presets::ASCII_MARKDOWN;
use serde_json::{Value, json};

use crate::frame::{Figure, Found, Row, Target};
use crate::machine::Machine;

/// Schema `gdrd.bench-rows/v1`: readers ignore unknown keys.
pub(crate) fn as_json(machine: &Machine, figures: &[Figure]) -> Value {
    let rows = figures.iter().map(|figure| {
        let Figure { row, found } = figure;
        let found = match found {
            Ok(Found { ours, peer, value, least, most }) => {
                json!({ "ours": ours, "peer": peer, "value": value, "least": least, "most": most })
            }
            Err(reason) => json!({ "absent": reason }),
        };
        json!({
            "id": row.id,
            "what": row.what,
            "against": row.against,
            "unit": row.unit,
            "target": target(row),
            "found": found,
            "kept": figure.is_kept(),
        })
    });
    json!({
        "schema": "gdrd.bench-rows/v1",
        "machine": {
            "cpu": machine.cpu,
            "cores": machine.cores,
            "memory_gib": machine.memory_gib,
            "kernel": machine.kernel,
            "load": machine.load,
        },
        "rows": rows.collect::<Vec<_>>(),
    })
}

/// One line a row; the machine above it.
pub(crate) fn as_table(machine: &Machine, figures: &[Figure]) -> String {
    let mut table = Table::new();
    table.load_style(ASCII_MARKDOWN);
    table.set_header(["row", "ours", "peer", "figure", "range", "target", "verdict"]);
    for figure in figures {
        table.add_row(line(figure));
    }
    let Machine { cpu, cores, memory_gib, kernel, load } = machine;
    format!("{cores} cores ({cpu}), {memory_gib} GiB, Linux {kernel}, load {load}\n\n{table}")
}

fn line(figure: &Figure) -> [String; 7] {
    let row = &figure.row;
    let verdict = match figure.is_kept() {
        Some(true) => "kept",
        Some(false) => "MISSED",
        None => "",
    };
    let Ok(Found { ours, peer, value, least, most }) = &figure.found else {
        let reason = figure.found.as_ref().err().cloned().unwrap_or_default();
        return [
            row.id.to_owned(),
            reason,
            String::new(),
            String::new(),
            String::new(),
            target(row),
            "absent".to_owned(),
        ];
    };
    let sign = if is_ratio(row, peer.is_some()) { "×" } else { "" };
    let with_unit = |value: f64| format!("{} {}", number(value), row.unit).trim_end().to_owned();
    [
        row.id.to_owned(),
        with_unit(*ours),
        peer.map(with_unit).unwrap_or_default(),
        format!("{}{sign}", number(*value)),
        format!("{} to {}", number(*least), number(*most)),
        target(row),
        verdict.to_owned(),
    ]
}

fn is_ratio(row: &Row, has_peer: bool) -> bool {
    match row.target {
        Target::AtMostTimes(_) | Target::FasterTimes(_) | Target::AtLeastTimes(_) => true,
        Target::AtMost(_) | Target::AtLeast(_) => false,
        Target::Shown => has_peer,
    }
}

fn target(row: &Row) -> String {
    match row.target {
        Target::AtMostTimes(most) => format!("≤ {most}×"),
        Target::FasterTimes(least) => format!("≥ {least}× faster"),
        Target::AtLeastTimes(least) => format!("≥ {least}×"),
        Target::AtMost(most) => format!("≤ {} {}", number(most), row.unit).trim_end().to_owned(),
        Target::AtLeast(least) => format!("≥ {} {}", number(least), row.unit).trim_end().to_owned(),
        Target::Shown => "shown".to_owned(),
    }
}

/// Three digits or more where they mean something: 0.512, 41.3, 5000000.
fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 1000.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        0.0 => "0".to_owned(),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROW: Row =
        Row { id: "a-row", what: "something", against: "a floor", unit: "ns", target: Target::AtMostTimes(2.5) };

    fn figures() -> Vec<Figure> {
        let found = Found { ours: 1200.0, peer: Some(500.0), value: 2.4, least: 2.2, most: 3.0 };
        let alone = Row { id: "alone", target: Target::AtMost(20.0), unit: "MiB", ..ROW };
        vec![
            Figure { row: ROW, found: Ok(found) },
            Figure { row: alone, found: Ok(Found { ours: 21.0, peer: None, value: 21.0, least: 21.0, most: 21.0 }) },
            Figure { row: ROW, found: Err("no libucs".to_owned()) },
        ]
    }

    #[test]
    fn the_table_has_a_verdict_a_row() {
        let table = as_table(&Machine::look(), &figures());
        let words = |row: usize| -> Vec<String> {
            let line = table.lines().filter(|line| line.starts_with('|')).nth(row + 2).unwrap();
            line.split('|').map(|cell| cell.trim().to_owned()).filter(|cell| !cell.is_empty()).collect()
        };
        assert_eq!(words(0), ["a-row", "1200 ns", "500.0 ns", "2.40×", "2.20 to 3.00", "≤ 2.5×", "kept"]);
        assert_eq!(words(1), ["alone", "21.0 MiB", "21.0", "21.0 to 21.0", "≤ 20.0 MiB", "MISSED"]);
        assert_eq!(words(2), ["a-row", "no libucs", "≤ 2.5×", "absent"]);
    }

    #[test]
    fn json_keeps_what_was_found_and_the_verdict() {
        let json = as_json(&Machine::look(), &figures());
        assert_eq!(json["rows"][0]["found"]["value"], 2.4);
        assert_eq!(json["rows"][0]["kept"], true);
        assert_eq!(json["rows"][1]["kept"], false);
        assert_eq!(json["rows"][2]["found"]["absent"], "no libucs");
        assert_eq!(json["rows"][2]["kept"], Value::Null);
    }
}
