//! A picture of a host, for a ticket: NUMA nodes, host bridges and switches as nested frames, in them drives,
//! NICs and GPUs in three rows, a line for each pair of the plan, NVLinks below. What is too wide for a page goes on in a
//! second band below the first.
//!
//! Plain SVG 1.1 without scripts, styles or fonts of its own. Bounded by the host it draws.

mod frame;
mod links;

use std::fmt::{self, Write};

use crate::model::{GpuId, HcaId, Host, Snapshot};
use crate::plan::contract::Plan;
use crate::words::counted;
use frame::{Cell, CellKind, Frame};

/// Colours of pairs, told apart by eyes of all kinds (after Okabe and Ito).
const PAIR_COLOURS: [&str; 8] =
    ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#5d6d7e"];

const CELL_WIDTH: f64 = 108.0;
const CELL_HEIGHT: f64 = 50.0;
const GAP: f64 = 10.0;
/// Height of a frame's title.
const TITLE: f64 = 38.0;
/// Between the rows of NICs and GPUs, where the pairs are drawn.
const PAIR_SPACE: f64 = 74.0;
const MARGIN: f64 = 20.0;
const HEAD: f64 = 62.0;
const LEGEND: f64 = 46.0;
/// Least width of a picture, for its legend.
const MIN_WIDTH: f64 = 920.0;
/// Width from which on a picture goes on in another band: wider ones are no longer read once they are scaled to a page.
const BAND_WIDTH: f64 = 2000.0;
/// Width of one character of small text, about.
pub(super) const CHARACTER: f64 = 6.3;

/// A snapshot with the pairs of a plan, as SVG.
#[must_use]
pub fn svg(snapshot: &Snapshot, plan: &Plan) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = Picture::new(snapshot, plan).draw(&mut out);
    out
}

/// Heights of the rows that all frames share.
#[derive(Debug, Clone, Copy)]
struct Rows {
    drives: f64,
    nics: f64,
    gpus: f64,
    bottom: f64,
}

impl Rows {
    fn of(top: &[Frame]) -> Self {
        let depth = top.iter().map(Frame::depth).max().unwrap_or(0);
        let has = |kind: CellKind| top.iter().any(|frame| frame.has(kind));
        // Few frames lie in one another, so the count is far below where a float loses whole numbers.
        #[expect(clippy::cast_precision_loss, reason = "a depth")]
        let depth = depth as f64;
        let drives = HEAD + depth * TITLE + GAP;
        let nics = if has(CellKind::Drive) { drives + CELL_HEIGHT + GAP } else { drives };
        let gpus = if has(CellKind::Nic) { nics + CELL_HEIGHT + PAIR_SPACE } else { nics };
        Self { drives, nics, gpus, bottom: gpus + CELL_HEIGHT + GAP + depth * GAP }
    }

    fn y(self, kind: CellKind) -> f64 {
        match kind {
            CellKind::Drive => self.drives,
            CellKind::Nic => self.nics,
            CellKind::Gpu => self.gpus,
        }
    }
}

struct Picture<'a> {
    snapshot: &'a Snapshot,
    host: &'a Host,
    plan: &'a Plan,
    frames: Vec<Frame>,
    rows: Rows,
}

impl<'a> Picture<'a> {
    fn new(snapshot: &'a Snapshot, plan: &'a Plan) -> Self {
        let host = &snapshot.host;
        let mut frames = frame::frames(host);
        let rows = Rows::of(&frames);
        frames.iter_mut().for_each(|frame| _ = frame.place(0.0));
        let mut picture = Self { snapshot, host, plan, frames, rows };
        picture.fill_bands();
        picture
    }

    /// Gives each outermost frame its band and its place there.
    fn fill_bands(&mut self) {
        let height = self.rows.bottom - HEAD + self.links_height() + 2.0 * GAP;
        // Arcs between bands would run through everything.
        let limit = if self.has_arcs() { f64::INFINITY } else { BAND_WIDTH };
        let (mut x, mut below) = (MARGIN, 0.0);
        for frame in &mut self.frames {
            if x > MARGIN && x + frame.width > limit {
                (x, below) = (MARGIN, below + height);
            }
            frame.lower(below);
            x += frame.place(x) + GAP;
        }
    }

    fn draw(&self, out: &mut String) -> fmt::Result {
        let right = self.frames.iter().map(|frame| frame.x + frame.width).fold(0.0, f64::max);
        let width = (right + MARGIN).max(MIN_WIDTH);
        let links = self.links_height();
        let below = self.frames.last().map_or(0.0, |frame| frame.below);
        let height = below + self.rows.bottom + links + LEGEND + MARGIN;
        writeln!(
            out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width:.0}\" height=\"{height:.0}\" \
             viewBox=\"0 0 {width:.0} {height:.0}\" font-family=\"Helvetica, Arial, sans-serif\">"
        )?;
        writeln!(out, "<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>")?;
        self.head(out)?;
        self.frames.iter().try_for_each(|frame| self.frame(out, frame, 0))?;
        self.nvlinks(out)?;
        self.pairs(out)?;
        self.frames.iter().try_for_each(|frame| self.cells(out, frame))?;
        self.legend(out, below + self.rows.bottom + links + GAP)?;
        writeln!(out, "</svg>")
    }

    fn head(&self, out: &mut String) -> fmt::Result {
        let name = self.host.name.as_deref().unwrap_or("this host");
        let (gpus, nics, drives) = (self.host.gpus.len(), self.host.hcas.len(), self.host.drives.len());
        let kind = serde_json::to_value(self.snapshot.source.kind).unwrap_or_default();
        let kind = kind.as_str().unwrap_or("unknown").to_owned();
        let nvlink = self.plan.nvlink.kind.map(|kind| serde_json::to_value(kind).unwrap_or_default());
        let nvlink = nvlink
            .as_ref()
            .and_then(|kind| kind.as_str())
            .map_or_else(String::new, |kind| format!(" · {}: {kind}", self.host.gpu_link_word()));
        text(out, MARGIN, 28.0, 18.0, "#1a1a1a", "start", true, name)?;
        let line = format!(
            "{} · {} · {}{nvlink} · read from {kind}, generation {}",
            counted(gpus, "GPU"),
            counted(nics, "NIC"),
            counted(drives, "drive"),
            self.snapshot.generation
        );
        text(out, MARGIN, 47.0, 12.0, "#555555", "start", false, &line)
    }

    fn frame(&self, out: &mut String, frame: &Frame, depth: u32) -> fmt::Result {
        let inset = f64::from(depth);
        let top = frame.below + HEAD + inset * TITLE;
        let bottom = frame.below + self.rows.bottom - inset * GAP;
        let (fill, stroke) = frame.colours();
        writeln!(
            out,
            "<rect x=\"{:.1}\" y=\"{top:.1}\" width=\"{:.1}\" height=\"{:.1}\" rx=\"6\" fill=\"{fill}\" \
             stroke=\"{stroke}\"><title>{}</title></rect>",
            frame.x,
            frame.width,
            bottom - top,
            escaped(&format!("{} {}", frame.title, frame.note))
        )?;
        let y = top + 17.0;
        text(out, frame.x + 8.0, y, 11.0, "#333333", "start", true, &frame.title)?;
        if !frame.note.is_empty() {
            text(out, frame.x + 8.0, y + 14.0, 10.0, "#666666", "start", false, &frame.note)?;
        }
        frame.frames.iter().try_for_each(|inner| self.frame(out, inner, depth + 1))
    }

    fn cells(&self, out: &mut String, frame: &Frame) -> fmt::Result {
        frame.cells.iter().try_for_each(|cell| self.cell(out, cell))?;
        frame.frames.iter().try_for_each(|inner| self.cells(out, inner))
    }

    fn cell(&self, out: &mut String, cell: &Cell) -> fmt::Result {
        let (x, y) = (cell.x, cell.below + self.rows.y(cell.kind));
        let is_used = cell.kind != CellKind::Nic || self.users(cell) > 0;
        let (fill, stroke) = match cell.kind {
            CellKind::Gpu => ("#e9f5dc", "#5a8f22"),
            CellKind::Nic if is_used => ("#dfecf9", "#2f6ca8"),
            CellKind::Nic => ("#f4f4f4", "#9a9a9a"),
            CellKind::Drive => ("#f7f1e3", "#a38b58"),
        };
        let (stroke, weight) = if cell.is_slow { ("#e08a00", 2.5) } else { (stroke, 1.2) };
        writeln!(
            out,
            "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{CELL_WIDTH}\" height=\"{CELL_HEIGHT}\" rx=\"4\" \
             fill=\"{fill}\" stroke=\"{stroke}\" stroke-width=\"{weight}\"><title>{}</title></rect>",
            escaped(&cell.lines.join("\n"))
        )?;
        let middle = x + CELL_WIDTH / 2.0;
        let colours = ["#1a1a1a", "#555555", if cell.is_bad { "#c0281c" } else { "#555555" }];
        for (place, (line, colour)) in cell.lines.iter().zip(colours).enumerate() {
            let is_name = place == 0;
            let (size, most) = if is_name { (12.5, NAME_CHARACTERS) } else { (10.0, TEXT_CHARACTERS) };
            let dy = [17.0, 30.0, 43.0].get(place).copied().unwrap_or(0.0);
            text(out, middle, y + dy, size, colour, "middle", is_name, &clipped(line, most))?;
        }
        Ok(())
    }

    fn users(&self, cell: &Cell) -> usize {
        let name = cell.lines.first();
        self.plan.nics.iter().find(|nic| Some(&nic.name) == name).map_or(0, |nic| nic.gpus.len())
    }

    fn find(&self, kind: CellKind, place: usize) -> Option<&Cell> {
        self.frames.iter().find_map(|frame| frame.find(kind, place))
    }

    fn gpu_cell(&self, gpu: GpuId) -> Option<&Cell> {
        self.find(CellKind::Gpu, gpu.0)
    }

    fn nic_cell(&self, nic: HcaId) -> Option<&Cell> {
        self.find(CellKind::Nic, nic.0)
    }

    fn legend(&self, out: &mut String, y: f64) -> fmt::Result {
        let mut x = MARGIN;
        let boxes = [
            ("#e9f5dc", "#5a8f22", "GPU"),
            ("#dfecf9", "#2f6ca8", "NIC of a pair"),
            ("#f4f4f4", "#9a9a9a", "NIC left out"),
            ("#f7f1e3", "#a38b58", "drive"),
            ("#ffffff", "#e08a00", "link below its maximum"),
        ];
        for (fill, stroke, label) in boxes {
            writeln!(
                out,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"14\" height=\"14\" rx=\"2\" fill=\"{fill}\" stroke=\"{stroke}\"/>"
            )?;
            text(out, x + 19.0, y + 11.0, 10.5, "#333333", "start", false, label)?;
            x += 34.0 + frame::text_width(label);
        }
        let lines = [("", "pair below one switch"), (" stroke-dasharray=\"5 4\"", "pair by way of the CPU")];
        for (dash, label) in lines {
            writeln!(out, "<path d=\"M{x:.1} {:.1} h24\" stroke=\"#0072b2\" stroke-width=\"2\"{dash}/>", y + 7.0)?;
            text(out, x + 29.0, y + 11.0, 10.5, "#333333", "start", false, label)?;
            x += 44.0 + frame::text_width(label);
        }
        Ok(())
    }
}

/// Longest name in a cell, and longest text below it.
const NAME_CHARACTERS: usize = 14;
const TEXT_CHARACTERS: usize = 20;

fn clipped(line: &str, most: usize) -> String {
    if line.chars().count() <= most {
        return line.to_owned();
    }
    line.chars().take(most - 1).chain(['…']).collect()
}

#[expect(clippy::too_many_arguments, reason = "each is an attribute of the one element")]
fn text(
    out: &mut String,
    x: f64,
    y: f64,
    size: f64,
    colour: &str,
    anchor: &str,
    is_bold: bool,
    line: &str,
) -> fmt::Result {
    let weight = if is_bold { " font-weight=\"bold\"" } else { "" };
    writeln!(
        out,
        "<text x=\"{x:.1}\" y=\"{y:.1}\" font-size=\"{size}\" fill=\"{colour}\" text-anchor=\"{anchor}\"{weight}>{}</text>",
        escaped(line)
    )
}

/// Text as XML has it; characters that XML does not allow are left out.
fn escaped(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out += "&amp;",
            '<' => out += "&lt;",
            '>' => out += "&gt;",
            '"' => out += "&quot;",
            '\n' => out.push('\n'),
            character if character.is_control() || matches!(character, '\u{fffe}' | '\u{ffff}') => {}
            character => out.push(character),
        }
    }
    out
}
