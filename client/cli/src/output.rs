//! Printing: tables for people, one JSON document for programs. Colours on a terminal only.

use std::io::Write as _;

use anstyle::{AnsiColor, Style};
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use gdrd_topology::words::is_unsafe;
use serde_json::Value;

use crate::args::Format;
use crate::exit::Outcome;

/// Prints `json` or what `text` makes, by the format that was asked for.
pub(crate) fn print(
    format: Format,
    json: impl FnOnce() -> Value,
    text: impl FnOnce() -> String,
) -> anyhow::Result<Outcome> {
    match format {
        Format::Json => write(&format!("{:#}\n", json()))?,
        _ => write(&text())?,
    }
    Ok(Outcome::Done)
}

/// Writes text to stdout, without its colours where that is no terminal.
pub(crate) fn write(text: &str) -> std::io::Result<()> {
    let mut out = anstream::stdout().lock();
    out.write_all(text.as_bytes())?;
    if !text.ends_with('\n') {
        out.write_all(b"\n")?;
    }
    out.flush()
}

/// Tells what is wrong with an answer, beside it.
pub(crate) fn warn(text: &str) {
    let yellow = Style::new().fg_color(Some(AnsiColor::Yellow.into()));
    anstream::eprintln!("{yellow}warning{yellow:#}: {text}");
}

/// Which columns hold numbers.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Column {
    /// Text, to the left.
    Left(&'static str),
    /// A number, to the right.
    Right(&'static str),
}

/// Rows under headings, as wide as the terminal allows.
pub(crate) fn table(columns: &[Column], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    let names = columns.iter().map(|column| match column {
        Column::Left(name) | Column::Right(name) => *name,
    });
    table.set_header(names);
    // Names come from inputs: a control character in one would end the row or reach the terminal.
    let shown = |cell: String| cell.replace(is_unsafe, "?");
    table.add_rows(rows.into_iter().map(|row| row.into_iter().map(shown)));
    for (index, column) in columns.iter().enumerate() {
        if let Some(drawn) = table.column_mut(index) {
            drawn.set_padding((0, 2));
            drawn.set_cell_alignment(match column {
                Column::Left(_) => CellAlignment::Left,
                Column::Right(_) => CellAlignment::Right,
            });
        }
    }
    let lines: Vec<String> = table.lines().map(|line| line.trim_end().to_owned()).collect();
    lines.join("\n") + "\n"
}

/// A length as people read it: 2 MiB.
pub(crate) fn bytes(len_bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = len_bytes;
    let mut unit = 0;
    while value >= 1024 && value.is_multiple_of(1024) && unit + 1 < UNITS.len() {
        value /= 1024;
        unit += 1;
    }
    format!("{value} {}", UNITS[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_numbers_stand_right() {
        let rows = [vec!["a".into(), "7".into()], vec!["long".into(), "1234".into()]];
        let text = table(&[Column::Left("NAME"), Column::Right("N")], rows);
        assert_eq!(text, "NAME     N\na        7\nlong  1234\n");
    }

    #[test]
    fn control_characters_of_a_cell_reach_no_terminal() {
        let rows = [vec!["a\u{9b}2J\tb\nc\u{1b}[m\u{202e}d".into()]];
        assert_eq!(table(&[Column::Left("NAME")], rows), "NAME\na?2J?b?c?[m?d\n");
    }

    #[test]
    fn lengths_keep_their_exact_value() {
        assert_eq!(bytes(2 << 20), "2 MiB");
        assert_eq!(bytes(1536), "1536 B");
        assert_eq!(bytes(0), "0 B");
    }
}
