//! Levels that an input states itself: names for addresses, and the NVLinks they speak of.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::bdf::Bdf;
use crate::level::Level;
use crate::model::{GivenLevel, GpuId, Host, NvLink, NvLinkEnd};
use crate::source::SourceKind;

/// Most NVLinks that one GPU has, of any generation (18 from Hopper on).
const MAX_NVLINKS: u32 = 18;

/// Keeps the stated levels, by name, and concludes NVLinks from them where the input lists none.
pub(super) fn settle(host: &mut Host, listed: Vec<GivenLevel>) {
    let by_address: BTreeMap<Bdf, String> =
        host.gpus.iter().filter_map(|gpu| Some((gpu.bdf?, gpu.name.clone()))).collect();
    let name = |text: String| text.parse().ok().and_then(|bdf| by_address.get(&bdf).cloned()).unwrap_or(text);
    let named = listed.into_iter().map(|given| {
        let (a, b) = (name(given.a), name(given.b));
        let (a, b) = if a <= b { (a, b) } else { (b, a) };
        GivenLevel { a, b, ..given }
    });
    host.given_levels = named.collect();
    host.given_levels.sort_by(|one, other| (&one.a, &one.b).cmp(&(&other.a, &other.b)));
    host.given_levels.dedup_by(|later, first| later.a == first.a && later.b == first.b);
    if host.nvlinks.is_empty() {
        host.nvlinks = nvlinks(host);
    }
}

/// NVLinks of GPU pairs whose level is NV#. More links than a GPU has can only be those to switches, which
/// the levels count once for each peer.
fn nvlinks(host: &Host) -> Vec<NvLink> {
    let place = |name: &str| host.gpus.iter().position(|gpu| gpu.name == name).map(GpuId);
    let mut pairs: BTreeMap<(GpuId, GpuId), (u8, SourceKind)> = BTreeMap::new();
    for given in &host.given_levels {
        if let (Level::NvLink(Reverse(links)), Some(a), Some(b)) = (given.level, place(&given.a), place(&given.b))
            && a != b
        {
            pairs.insert((a.min(b), a.max(b)), (links, given.source));
        }
    }
    let mut links_of: BTreeMap<GpuId, (u32, u8, SourceKind)> = BTreeMap::new();
    for ((a, b), (links, source)) in &pairs {
        for gpu in [a, b] {
            let entry = links_of.entry(*gpu).or_insert((0, 0, *source));
            entry.0 = entry.0.saturating_add(u32::from(*links));
            entry.1 = entry.1.max(*links);
        }
    }
    let is_switched = links_of.values().any(|(sum, _, _)| *sum > MAX_NVLINKS);
    let link = |gpu, end, links, source| NvLink { gpu, end, links, link_gbps: None, source };
    if is_switched {
        let to_switch = |(gpu, (_, most, source))| link(gpu, NvLinkEnd::Switch, most, source);
        links_of.into_iter().map(to_switch).collect()
    } else {
        pairs.into_iter().map(|((a, b), (links, source))| link(a, NvLinkEnd::Gpu(b), links, source)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::assemble::{ReadOptions, assemble};
    use crate::model::{NamedGpu, NvLinkKind, RawHost};

    fn host(gpus: usize, links: impl Fn(usize, usize) -> Level) -> Host {
        let mut raw = RawHost::new(SourceKind::TopoM);
        let name = |gpu: usize| format!("GPU{gpu}");
        raw.named_gpus = (0..gpus).map(|gpu| NamedGpu { name: name(gpu), numa: None }).collect();
        // From the far end first: the order of an input says nothing.
        for (a, b) in (0..gpus).rev().flat_map(|a| (0..gpus).map(move |b| (a, b))) {
            raw.given_levels.push(GivenLevel { a: name(a), b: name(b), level: links(a, b), source: SourceKind::TopoM });
        }
        assemble(raw, &ReadOptions::default())
    }

    #[test]
    fn more_links_than_a_gpu_has_are_links_to_switches() {
        let switched = host(8, |_, _| Level::nvlink(18));
        assert_eq!(switched.nvlink_kind(), Some(NvLinkKind::Switched));
        assert_eq!(switched.gpu_level(GpuId(0), GpuId(7)), Some(Level::nvlink(18)));
        let meshed = host(4, |_, _| Level::nvlink(4));
        assert_eq!(meshed.nvlink_kind(), Some(NvLinkKind::FullMesh));
        assert_eq!(meshed.nvlinks_between(GpuId(3), GpuId(0)), 4);
    }

    #[test]
    fn a_gpu_that_lost_its_links_keeps_its_pci_level() {
        let host = host(4, |a, b| if a == 2 || b == 2 { Level::Node } else { Level::nvlink(18) });
        assert_eq!(host.gpu_level(GpuId(2), GpuId(0)), Some(Level::Node));
        assert_eq!(host.gpu_level(GpuId(3), GpuId(0)), Some(Level::nvlink(18)));
        assert_eq!(host.given_levels.len(), 10);
    }
}
