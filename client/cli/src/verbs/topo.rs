//! `gdrctl topo`: the matrix of P2P levels, the PCIe tree, a picture, or all of it for programs.

use anstyle::{AnsiColor, Style};
use gdrd_topology::render::{self, Part};

use crate::args::{Format, Global, Topo};
use crate::exit::{Outcome, UsageError};
use crate::{output, source};

pub(crate) fn run(global: &Global, options: &Topo) -> anyhow::Result<Outcome> {
    if options.tree && !matches!(global.format, Format::Text | Format::Tree) {
        let other = "--tree is --format tree, and another --format was given too".to_owned();
        return Err(UsageError(other).into());
    }
    let topology = source::topology(global, &options.input)?;
    let (snapshot, plan) = (topology.snapshot(), topology.plan());
    let text = match (global.format, options.tree) {
        (Format::Json, _) => render::topo(snapshot, &plan).to_json(),
        (Format::Svg, _) => render::svg(snapshot, &plan),
        (Format::Dot, _) => render::dot(&snapshot.host, &plan),
        (Format::Tree, _) | (Format::Text, true) => render::painted_tree(&snapshot.host, Some(&plan), &paint),
        (Format::Text, false) => render::matrix(&snapshot.host, Some(&plan)),
    };
    output::write(&text)?;
    Ok(Outcome::Done)
}

/// Colours for a terminal; writing takes them away where there is none.
fn paint(part: Part, text: &str) -> String {
    let colour = |colour: AnsiColor| Style::new().fg_color(Some(colour.into()));
    let style = match part {
        Part::Heading => Style::new().bold(),
        Part::Bridge => colour(AnsiColor::Cyan),
        Part::Gpu => colour(AnsiColor::Green).bold(),
        Part::Nic => colour(AnsiColor::Blue).bold(),
        Part::DownNic => colour(AnsiColor::Red),
        Part::Drive => colour(AnsiColor::Magenta),
        Part::Faint => Style::new().dimmed(),
        Part::SlowLink => colour(AnsiColor::Yellow),
    };
    format!("{style}{text}{style:#}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_of_a_tree_has_a_style_that_ends_after_it() {
        for part in [Part::Heading, Part::Gpu, Part::Nic, Part::DownNic, Part::Drive, Part::Faint, Part::SlowLink] {
            let painted = paint(part, "x");
            assert!(painted.starts_with('\u{1b}') && painted.ends_with("x\u{1b}[0m"), "{painted:?}");
        }
    }
}
