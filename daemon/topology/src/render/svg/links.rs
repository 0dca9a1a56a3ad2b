//! Lines between devices: the pairs of the plan, and NVLinks.

use std::fmt::{self, Write};

use super::frame::{self, Cell};
use super::{CELL_HEIGHT, CELL_WIDTH, CellKind, GAP, PAIR_COLOURS, PAIR_SPACE, Picture, escaped, text};
use crate::level::Level;
use crate::model::{GpuId, NvLink, NvLinkEnd};
use crate::plan::contract::GpuPlan;
use crate::words::{self, counted};

const NVLINK: &str = "#76a52b";
/// Height of the bar that stands for NVSwitches, with what leads to it.
const SWITCH_HEIGHT: f64 = 56.0;
/// Depth of the shortest arc of a direct link, and how much deeper the longest is.
const SHORT_ARC: f64 = 26.0;
const LONG_ARC: f64 = 120.0;
/// Most direct links that carry their number; of more a picture would be full.
const MAX_LABELS: usize = 12;

impl Picture<'_> {
    pub(super) fn pairs(&self, out: &mut String) -> fmt::Result {
        for (place, gpu) in self.plan.gpus.iter().enumerate() {
            self.pairs_of(out, place, gpu)?;
        }
        Ok(())
    }

    fn pairs_of(&self, out: &mut String, place: usize, gpu: &GpuPlan) -> fmt::Result {
        let Some(cell) = self.gpu_cell(GpuId(place)) else { return Ok(()) };
        let colour = PAIR_COLOURS.get(place % PAIR_COLOURS.len()).copied().unwrap_or("#333333");
        for (number, name) in (0_u8..).zip(&gpu.assigned) {
            let Some(nic) = self.host.find_hca(name).and_then(|id| self.nic_cell(id)) else { continue };
            let users = self.plan.nics.iter().find(|planned| planned.name == *name).map(|planned| &planned.gpus);
            // Counted from the last, so that the line of the leftmost GPU leaves leftmost and none cross.
            let user = users.and_then(|users| users.iter().rev().position(|user| *user == gpu.name)).unwrap_or(0);
            let user = u8::try_from(user).unwrap_or(u8::MAX);
            let pair = gpu.nics.iter().find(|pair| pair.name == *name);
            let level = pair.and_then(|pair| pair.level);
            // Several lines of one device part where they leave it.
            let spread = |number: u8| (f64::from(number) * 14.0) % (CELL_WIDTH / 2.0);
            let (x1, y1) = (cell.x + CELL_WIDTH / 2.0 + spread(number), cell.below + self.rows.gpus);
            let (x2, y2) = (nic.x + CELL_WIDTH / 2.0 - spread(user), nic.below + self.rows.nics + CELL_HEIGHT);
            let bend = PAIR_SPACE * 0.6;
            let dash = if level.is_none_or(|level| level > Level::Pxb) { " stroke-dasharray=\"5 4\"" } else { "" };
            let word = level.map_or_else(|| "?".to_owned(), |level| level.to_string());
            let gbps = pair.and_then(|pair| pair.gbps).map_or_else(String::new, |gbps| format!(", {gbps} Gbit/s"));
            writeln!(
                out,
                "<path d=\"M{x1:.1} {y1:.1} C{x1:.1} {:.1} {x2:.1} {:.1} {x2:.1} {y2:.1}\" fill=\"none\" \
                 stroke=\"{colour}\" stroke-width=\"2.2\"{dash}><title>{}</title></path>",
                y1 - bend,
                y2 + bend,
                escaped(&format!("{} - {name}: {word}{gbps}", gpu.name))
            )?;
            if number == 0 {
                // On the side that the line does not turn to.
                let (dx, anchor) = if x2 < x1 { (5.0, "start") } else { (-5.0, "end") };
                text(out, x1 + dx, y1 - 6.0, 10.0, colour, anchor, true, &word)?;
            }
        }
        Ok(())
    }

    fn switched(&self) -> Vec<&NvLink> {
        self.host.nvlinks.iter().filter(|link| link.links > 0 && link.end == NvLinkEnd::Switch).collect()
    }

    fn direct(&self) -> Vec<(GpuId, GpuId, &NvLink)> {
        let of = |link: &'_ NvLink| match link.end {
            NvLinkEnd::Gpu(peer) if link.links > 0 => Some((link.gpu, peer)),
            _ => None,
        };
        self.host.nvlinks.iter().filter_map(|link| of(link).map(|(a, b)| (a, b, link))).collect()
    }

    /// Whether GPUs are joined directly, which is drawn from one to the other.
    pub(super) fn has_arcs(&self) -> bool {
        !self.direct().is_empty()
    }

    /// Room below the frames of a band for NVLinks.
    pub(super) fn links_height(&self) -> f64 {
        let arcs = self.direct().into_iter().filter_map(|(a, b, _)| self.arc(a, b)).map(|(_, _, depth)| depth);
        let arcs = arcs.fold(0.0, f64::max) * 0.75;
        let switch = if self.switched().is_empty() { 0.0 } else { SWITCH_HEIGHT };
        switch.max(arcs + if arcs > 0.0 { 18.0 } else { 0.0 })
    }

    /// Both ends and the depth of an arc.
    fn arc(&self, a: GpuId, b: GpuId) -> Option<(f64, f64, f64)> {
        let middle = |gpu: GpuId| self.find(CellKind::Gpu, gpu.0).map(|cell| cell.x + CELL_WIDTH / 2.0);
        let (from, to) = (middle(a)?, middle(b)?);
        let last = self.host.gpus.len().saturating_sub(1);
        let (left, right) = (middle(GpuId(0))?, middle(GpuId(last))?);
        let share = ((to - from) / (right - left).abs().max(CELL_WIDTH)).abs().min(1.0);
        Some((from, to, SHORT_ARC + LONG_ARC * share))
    }

    pub(super) fn nvlinks(&self, out: &mut String) -> fmt::Result {
        self.nvswitch(out)?;
        let direct = self.direct();
        let bottom = self.rows.bottom;
        for (a, b, link) in &direct {
            let Some((from, to, depth)) = self.arc(*a, *b) else { continue };
            let gpu = self.rows.gpus + CELL_HEIGHT;
            writeln!(
                out,
                "<path d=\"M{from:.1} {gpu:.1} V{bottom:.1} C{from:.1} {y:.1} {to:.1} {y:.1} {to:.1} {bottom:.1} V{gpu:.1}\" \
                 fill=\"none\" stroke=\"{NVLINK}\" stroke-width=\"2\"><title>{}</title></path>",
                escaped(&format!("GPU{} - GPU{}: {}", a.0, b.0, counted(link.links.into(), "link"))),
                y = bottom + depth,
            )?;
            if direct.len() <= MAX_LABELS {
                let label = format!("NV{}", link.links);
                text(
                    out,
                    f64::midpoint(from, to),
                    bottom + depth * 0.75 + 13.0,
                    10.5,
                    "#4c7411",
                    "middle",
                    true,
                    &label,
                )?;
            }
        }
        if direct.len() > MAX_LABELS {
            let counts = direct.iter().map(|(_, _, link)| link.links);
            let (least, most) = (counts.clone().min().unwrap_or(0), counts.max().unwrap_or(0));
            let links = if least == most { format!("{most}") } else { format!("{least} to {most}") };
            let noun = if most == 1 { "link" } else { "links" };
            let label = format!(
                "{} pairs of GPUs joined directly, {links} {} {noun} each",
                direct.len(),
                self.host.gpu_link_word()
            );
            let y = bottom + self.links_height() - 2.0;
            let x = self.frames.first().map_or(GAP, |frame| frame.x);
            text(out, x, y, 11.0, "#4c7411", "start", true, &label)?;
        }
        Ok(())
    }

    /// A bar below each band: all stand for the same switches.
    fn nvswitch(&self, out: &mut String) -> fmt::Result {
        let links = self.switched();
        let gbps = links.first().and_then(|link| link.link_gbps.map(|gbps| gbps * f64::from(link.links)));
        let gbps = gbps.map_or_else(String::new, |rate| format!(", {} Gbit/s each way a GPU", words::gbps(rate)));
        let ends: Vec<(&Cell, u8)> =
            links.iter().filter_map(|link| Some((self.gpu_cell(link.gpu)?, link.links))).collect();
        let mut bands: Vec<f64> = ends.iter().map(|(cell, _)| cell.below).collect();
        bands.sort_unstable_by(f64::total_cmp);
        bands.dedup();
        for (place, band) in bands.iter().enumerate() {
            let here: Vec<(f64, u8)> = ends
                .iter()
                .filter(|(cell, _)| cell.below.total_cmp(band).is_eq())
                .map(|(cell, links)| (cell.x + CELL_WIDTH / 2.0, *links))
                .collect();
            let label = if place == 0 { format!("NVLink switch{gbps}") } else { "the same NVLink switch".to_owned() };
            self.bar(out, *band, &here, &label)?;
        }
        Ok(())
    }

    fn bar(&self, out: &mut String, band: f64, ends: &[(f64, u8)], label: &str) -> fmt::Result {
        let (left, right) = ends.iter().fold((f64::MAX, f64::MIN), |(l, r), (x, _)| (l.min(*x), r.max(*x)));
        let bar = band + self.rows.bottom + 26.0;
        let gpu = band + self.rows.gpus + CELL_HEIGHT;
        for (x, count) in ends {
            writeln!(out, "<path d=\"M{x:.1} {gpu:.1} V{bar:.1}\" stroke=\"{NVLINK}\" stroke-width=\"3\"/>")?;
            text(out, x + 6.0, bar - 7.0, 10.5, "#4c7411", "start", true, &format!("NV{count}"))?;
        }
        // A GPU alone in its band has a bar as wide as its label.
        let half = (frame::text_width(label) / 2.0 + GAP).max((right - left) / 2.0 + 40.0);
        let middle = f64::midpoint(left, right);
        writeln!(
            out,
            "<rect x=\"{:.1}\" y=\"{bar:.1}\" width=\"{:.1}\" height=\"22\" rx=\"4\" fill=\"#e9f5dc\" stroke=\"{NVLINK}\"/>",
            middle - half,
            2.0 * half
        )?;
        text(out, middle, bar + 15.0, 11.0, "#3d5f0c", "middle", true, label)
    }
}
