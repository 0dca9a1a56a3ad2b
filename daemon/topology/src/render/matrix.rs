//! The matrix of P2P levels, laid out like that of `nvidia-smi topo -m`.

use std::fmt::Write;

use crate::bandwidth;
use crate::level::Level;
use crate::model::{GpuId, HcaId, Host, NumaId};
use crate::plan::contract::Plan;
use crate::words;

/// A row or column of the matrix.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Device {
    Gpu(GpuId),
    Nic(HcaId),
}

impl Device {
    /// GPUs, then NICs.
    pub(super) fn all(host: &Host) -> Vec<Self> {
        let gpus = (0..host.gpus.len()).map(GpuId).map(Self::Gpu);
        gpus.chain((0..host.hcas.len()).map(HcaId).map(Self::Nic)).collect()
    }

    /// `GPU0`, `NIC0`: NICs are numbered as nvidia-smi does, with a legend.
    fn label(self) -> String {
        match self {
            Self::Gpu(id) => format!("GPU{}", id.0),
            Self::Nic(id) => format!("NIC{}", id.0),
        }
    }

    pub(super) fn level(self, other: Self, host: &Host) -> Option<Level> {
        match (self, other) {
            (Self::Gpu(a), Self::Gpu(b)) => host.gpu_level(a, b),
            (Self::Gpu(gpu), Self::Nic(nic)) | (Self::Nic(nic), Self::Gpu(gpu)) => host.gpu_hca_level(gpu, nic),
            (Self::Nic(a), Self::Nic(b)) => host.hca_level(a, b),
        }
    }
}

const LEGEND: &str = "
Legend:

  X    = the device itself
  SYS  = the path crosses NUMA nodes, or a node is not known
  NODE = different root buses of one NUMA node
  PHB  = one root bus, no common bridge: through the CPU
  PXB  = a common bridge, more than one bridge to a device
  PIX  = a common bridge, at most one bridge to each device
  NV#  = # bonded {link}s
  ?    = the place of a device is not known
";

/// Levels between all GPUs and NICs. With a plan, the NICs of each GPU and what its path carries follow.
#[must_use]
pub fn matrix(host: &Host, plan: Option<&Plan>) -> String {
    let devices = Device::all(host);
    if devices.is_empty() {
        return "no GPU and no RDMA NIC was found\n".to_owned();
    }
    let mut rows = vec![header(&devices)];
    rows.extend(devices.iter().map(|device| row(host, *device, &devices)));
    let mut out = aligned(&rows);
    out += &LEGEND.replace("{link}", host.gpu_link_noun());
    // Writing to a String cannot fail.
    let _ = legends(&mut out, host, plan);
    out
}

fn header(devices: &[Device]) -> Vec<String> {
    let mut cells = vec![String::new()];
    cells.extend(devices.iter().map(|device| device.label()));
    cells.extend(["CPU Affinity".to_owned(), "NUMA Affinity".to_owned()]);
    cells
}

fn row(host: &Host, device: Device, devices: &[Device]) -> Vec<String> {
    let mut cells = vec![device.label()];
    let level = |other: &Device| device.level(*other, host).map_or_else(|| "?".to_owned(), |level| level.to_string());
    cells.extend(devices.iter().map(level));
    if let Device::Gpu(id) = device {
        let numa = host.gpu(id).and_then(|gpu| gpu.numa);
        // The only node has all CPUs, so they are known even where the GPU's node is not told.
        cells.push(cpus(host, numa.or_else(|| host.sole_numa_node())));
        cells.push(numa.map_or_else(|| "N/A".to_owned(), |numa| numa.to_string()));
    }
    cells
}

fn cpus(host: &Host, numa: Option<NumaId>) -> String {
    let node = host.numa_nodes.iter().find(|node| Some(node.id) == numa);
    let cpus = node.and_then(|node| node.cpus.clone()).filter(|cpus| !cpus.is_empty());
    cpus.unwrap_or_else(|| "N/A".to_owned())
}

/// Cells in columns of their own width, two blanks between.
fn aligned(rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = Vec::new();
    for row in rows {
        for (column, cell) in row.iter().enumerate() {
            let width = cell.chars().count();
            match widths.get_mut(column) {
                Some(known) => *known = (*known).max(width),
                None => widths.push(width),
            }
        }
    }
    let mut out = String::new();
    for row in rows {
        let cells = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        out += cells.collect::<Vec<_>>().join("  ").trim_end();
        out.push('\n');
    }
    out
}

fn legends(out: &mut String, host: &Host, plan: Option<&Plan>) -> std::fmt::Result {
    if !host.hcas.is_empty() {
        writeln!(out, "\nNIC Legend:\n")?;
        for (place, hca) in host.hcas.iter().enumerate() {
            writeln!(out, "  NIC{place}: {}", hca.name)?;
        }
    }
    let Some(plan) = plan.filter(|plan| !plan.gpus.is_empty()) else { return Ok(()) };
    writeln!(out, "\nPlan:\n")?;
    for gpu in &plan.gpus {
        let pair = |name: &String| {
            let pair = gpu.nics.iter().find(|pair| pair.name == *name);
            let level = pair.and_then(|pair| pair.level).map_or_else(|| "?".to_owned(), |level| level.to_string());
            let gbps = pair
                .and_then(|pair| pair.gbps)
                .map_or_else(String::new, |gbps| format!(", {} Gbit/s", words::gbps(gbps)));
            format!("{name} ({level}{gbps})")
        };
        let nics: Vec<String> = gpu.assigned.iter().map(pair).collect();
        let nics = if nics.is_empty() { format!("none: {}", gpu.reason) } else { nics.join(", ") };
        writeln!(out, "  {}: {nics}", gpu.name)?;
    }
    let drained = plan.drained();
    if !drained.is_empty() {
        writeln!(out, "\nDrained, and lent to nobody: {}", drained.join(", "))?;
    }
    let matches = bandwidth::matches(host, plan);
    if matches.iter().any(|found| !found.findings.is_empty()) {
        writeln!(out, "\nBandwidth:\n")?;
    }
    for found in matches.iter().filter(|found| !found.findings.is_empty()) {
        writeln!(out, "  {}: {}", found.gpu, found.findings.join("; "))?;
    }
    Ok(())
}
