//! To another GPU of this host. Such traffic never goes through a NIC.

use super::{Fallback, PathAdvice, PathKind, advice, gpu_to_memory, host_memory, lesser, name};
use crate::acs::{PeerAcs, PeerWay};
use crate::level::Level;
use crate::model::{GpuId, Host};

/// What a copy of 1 GiB reaches of the data rate of bonded NVLinks: 395 of 450 GB/s, between two H200 by 18 links of
/// NVLink 4 and NVSwitches, read or written (`docs/measured/nvidia-h200-x2.md`).
const NVLINK_SHARE: f64 = 0.88;
/// What it reaches of the rate of PCIe links, packet headers and flow control off: 50 of 63 GB/s there, through host memory
/// in pieces that come and go at the same time. Peer to peer it was not measured: the driver has no such way there.
const PCIE_SHARE: f64 = 0.8;

fn reached(gbps: Option<f64>, share: f64) -> Option<f64> {
    gbps.map(|gbps| gbps * share)
}

pub(super) fn to_gpu(host: &Host, from: GpuId, to: GpuId) -> PathAdvice {
    let level = host.gpu_level(from, to);
    let bdfs = host.gpu(from).and_then(|gpu| gpu.bdf).zip(host.gpu(to).and_then(|gpu| gpu.bdf));
    let below_nvlink = bdfs.and_then(|(a, b)| host.pci_level(a, b));
    let pcie = bdfs.and_then(|(a, b)| host.pci_bottleneck(a, b)).map(|narrowest| narrowest.gbps);
    let pcie = reached(pcie, PCIE_SHARE);
    let through_memory = reached(lesser(gpu_to_memory(host, from), gpu_to_memory(host, to)), PCIE_SHARE);
    let acs = bdfs.and_then(|(a, b)| host.peer_acs(a, b));
    let staged = || {
        let gbps = through_memory;
        let reason = format!("without peer access: through {}", host_memory(host, from));
        Some(Fallback { kind: PathKind::Staged, via: Vec::new(), gbps, reason })
    };
    let p2p = || Some(Fallback { kind: PathKind::PcieP2p, via: Vec::new(), gbps: pcie, reason: without_nvlink() });
    // GPUs with NVLink need not reach each other by PCIe at all; where no switch joins them, do not count on it.
    let is_below_switch = below_nvlink.is_some_and(|level| level <= Level::Pxb);
    let (kind, gbps, reason, fallback) = match level {
        Some(Level::Same) => (PathKind::SameGpu, None, "one GPU: a copy in its own memory".to_owned(), None),
        Some(Level::NvLink(links)) => {
            let fallback = if is_below_switch { p2p() } else { staged() };
            let gbps = reached(host.nvlink_gbps(from, to), NVLINK_SHARE);
            (PathKind::Nvlink, gbps, joined_directly(host, links.0), fallback)
        }
        Some(level @ (Level::Pix | Level::Pxb)) => {
            (PathKind::PcieP2p, pcie, below_switch(level, acs.as_ref()), staged())
        }
        Some(Level::Phb) => {
            let reason = "PHB: one root bus joins them, peer traffic passes the CPU".to_owned();
            (PathKind::PcieP2p, pcie, reason, staged())
        }
        Some(level) => {
            let memory = host_memory(host, from);
            let why = format!("{level}: peer traffic between root complexes is not to be relied on; through {memory}");
            (PathKind::Staged, through_memory, why, None)
        }
        None => (PathKind::Staged, None, "the place of a GPU is not known".to_owned(), None),
    };
    PathAdvice { level, gbps, fallback, ..advice(host, from, name(host, to), kind, reason) }
}

fn joined_directly(host: &Host, links: u8) -> String {
    match (links, host.gpu_link_noun()) {
        (1, word) => format!("1 {word} joins them"),
        (links, word) => format!("{links} bonded {word}s join them"),
    }
}

/// Why peer traffic below one switch is the way, and how far up it goes.
fn below_switch(level: Level, acs: Option<&PeerAcs>) -> String {
    let joined = format!("{level}: a switch joins them");
    match acs {
        None => joined,
        Some(acs) => match acs.state {
            PeerWay::Redirected => format!("{joined}, but {}", acs.reason),
            PeerWay::Direct => format!("{joined}, peer traffic stays below it: {}", acs.reason),
            PeerWay::Unknown => {
                format!("{joined}, peer traffic stays below it unless ACS redirects it: {}", acs.reason)
            }
        },
    }
}

fn without_nvlink() -> String {
    "with NVLink down: PCIe below one switch".to_owned()
}
