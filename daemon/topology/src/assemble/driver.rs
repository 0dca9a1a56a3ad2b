//! What a GPU driver tells, laid over what another input says of the same host.
//!
//! Who is believed: the driver for what it alone can know (identity, memory, NVLinks, fabric, slices); sysfs for the place
//! in the tree and the PCIe links, which it reads for all devices alike, and the driver only where sysfs has none.
//! Where both tell one thing and differ, the host carries a warning.

use std::collections::BTreeMap;

use crate::bdf::Bdf;
use crate::link::Link;
use crate::model::{DriverFacts, FabricState, GpuFacts, GpuId, Host, NvLink, NvLinkEnd, NvLinkRemote};
use crate::source::{SourceKind, Sourced};

/// Name of the kernel driver whose GPUs NVML lists.
const NVIDIA_DRIVER: &str = "nvidia";

/// Lays `driver` over an assembled host.
pub(super) fn lay_over(host: &mut Host, driver: &DriverFacts, warnings: &mut Vec<String>) {
    let who = name_of(driver.source);
    warnings.extend(driver.warnings.iter().map(|warning| format!("{who}: {warning}")));
    for facts in &driver.gpus {
        let Some(id) = gpu_at(host, facts.bdf) else {
            warnings.push(format!("{}: a gpu for {who}, but {} does not list it", facts.bdf, others(host)));
            continue;
        };
        link(host, facts, who, warnings);
        gpu(host, id, facts, driver.source, warnings);
    }
    unlisted(host, driver, warnings);
    nvlinks(host, driver, warnings);
    fabric(host, warnings);
}

fn name_of(source: SourceKind) -> &'static str {
    match source {
        SourceKind::Nvml => "nvml",
        _ => "the gpu driver",
    }
}

/// What listed the functions, for messages.
fn others(host: &Host) -> &'static str {
    let source = host.functions.first().map(|function| function.source);
    if matches!(source, Some(SourceKind::Live | SourceKind::Sysfs)) { "sysfs" } else { "the input" }
}

fn gpu_at(host: &Host, bdf: Bdf) -> Option<GpuId> {
    host.gpus.iter().position(|gpu| gpu.bdf == Some(bdf)).map(GpuId)
}

fn gpu(host: &mut Host, id: GpuId, facts: &GpuFacts, source: SourceKind, warnings: &mut Vec<String>) {
    let Some(gpu) = host.gpus.get_mut(id.0) else { return };
    let mut differs = |what: &str, was: String, is: String| {
        warnings.push(format!("{}: {what} is {was} in the input, {is} for {}", facts.bdf, name_of(source)));
    };
    let detail = &facts.detail;
    take(&mut gpu.uuid, facts.uuid.as_ref(), source, |was, is| differs("uuid", was.clone(), is.clone()));
    take(&mut gpu.product, detail.product.as_ref(), source, |_, _| {});
    // Drivers keep some memory back, and count differently whether that is part of it.
    take(&mut gpu.memory_bytes, detail.memory_bytes.as_ref(), source, |_, _| {});
    take(&mut gpu.device_node, facts.device_node.as_ref(), source, |was, is| {
        differs("device node", was.to_string(), is.to_string());
    });
    take(&mut gpu.bar1_bytes, detail.bar1_bytes.as_ref(), source, |was, is| {
        differs("bar1 size", was.to_string(), is.to_string());
    });
    take(&mut gpu.fabric, detail.fabric.as_ref(), source, |_, _| {});
    take(&mut gpu.mig, detail.mig.as_ref(), source, |_, _| {});
}

/// Puts in what the driver tells; `differs` hears of another value from another input.
fn take<T: Clone + PartialEq>(
    slot: &mut Option<Sourced<T>>,
    told: Option<&T>,
    source: SourceKind,
    differs: impl FnOnce(&T, &T),
) {
    let Some(told) = told else { return };
    if let Some(before) = slot.as_ref().filter(|before| before.value != *told) {
        differs(&before.value, told);
    }
    *slot = Some(Sourced::new(told.clone(), source));
}

/// The PCIe link: sysfs counts, the driver fills what it lacks. Speeds now are not compared: an idle GPU lowers its own, and
/// the two were not read at one time. Nor are the best ones: the driver's is of GPU and host together.
fn link(host: &mut Host, facts: &GpuFacts, who: &str, warnings: &mut Vec<String>) {
    let others = others(host);
    let Ok(place) = host.functions.binary_search_by_key(&facts.bdf, |function| function.bdf) else { return };
    let Some(function) = host.functions.get_mut(place) else { return };
    let (known, told) = (function.link, facts.detail.link);
    if let Some((known, told)) = known.current.zip(told.current).filter(|(known, told)| known.width != told.width) {
        let (known, told) = (known.width.lanes(), told.width.lanes());
        warnings.push(format!("{}: pcie x{told} for {who}, x{known} in {others}", facts.bdf));
    }
    if let Some((best, told)) = known.max.zip(told.current).filter(|(best, told)| told.speed > best.speed) {
        let (best, told) = (best.speed, told.speed);
        warnings.push(format!("{}: pcie at {told} GT/s for {who}, at most {best} GT/s in {others}", facts.bdf));
    }
    function.link = Link { current: known.current.or(told.current), max: known.max.or(told.max) };
}

/// GPUs that run on the driver's kernel module, but that it does not tell of.
fn unlisted(host: &Host, driver: &DriverFacts, warnings: &mut Vec<String>) {
    let told = |bdf: Bdf| driver.gpus.iter().any(|facts| facts.bdf == bdf);
    for bdf in host.gpus.iter().filter_map(|gpu| gpu.bdf) {
        let function = host.function(bdf);
        let is_driven = function.is_some_and(|function| function.driver.as_deref() == Some(NVIDIA_DRIVER));
        if is_driven && driver.source == SourceKind::Nvml && !told(bdf) {
            warnings.push(format!(
                "{bdf}: driven by {NVIDIA_DRIVER}, but nvml does not list it: lost, or not allowed to this process"
            ));
        }
    }
}

/// Links of a pair of ends, as its near and its far end count them.
type Counted = BTreeMap<(GpuId, NvLinkEnd), (Vec<u8>, Option<f64>)>;

/// NVLinks: of GPUs whose driver tells them, its answer alone counts.
fn nvlinks(host: &mut Host, driver: &DriverFacts, warnings: &mut Vec<String>) {
    let who = name_of(driver.source);
    let mut told: Vec<GpuId> = Vec::new();
    let mut counted = Counted::new();
    for facts in &driver.gpus {
        let Some((near, bundles)) = gpu_at(host, facts.bdf).zip(facts.detail.nvlinks.as_ref()) else { continue };
        told.push(near);
        for bundle in bundles {
            let (gpu, end) = match bundle.remote {
                NvLinkRemote::Switch => (near, NvLinkEnd::Switch),
                NvLinkRemote::Cpu => (near, NvLinkEnd::Cpu),
                NvLinkRemote::Gpu(bdf) => match gpu_at(host, bdf).filter(|far| *far != near) {
                    Some(far) => (near.min(far), NvLinkEnd::Gpu(near.max(far))),
                    None => {
                        warnings.push(format!("{}: nvlinks to {bdf}, which is no other gpu of this host", facts.bdf));
                        continue;
                    }
                },
            };
            let entry = counted.entry((gpu, end)).or_default();
            entry.0.push(bundle.links);
            entry.1 = entry.1.or(bundle.link_gbps);
        }
    }
    let is_told = |link: &NvLink| match link.end {
        NvLinkEnd::Gpu(far) => told.contains(&link.gpu) || told.contains(&far),
        NvLinkEnd::Switch => told.contains(&link.gpu),
        // A driver may tell of NVLinks alone, and another input of NVLink-C2C.
        NvLinkEnd::Cpu => counted.contains_key(&(link.gpu, link.end)),
    };
    let (before, kept): (Vec<NvLink>, Vec<NvLink>) = host.nvlinks.drain(..).partition(is_told);
    host.nvlinks = kept;
    for ((gpu, end), (counts, link_gbps)) in counted {
        let links = counts.iter().copied().min().unwrap_or_default();
        if counts.iter().any(|count| *count != links) {
            warnings.push(format!("{}: the two ends count {counts:?} active nvlinks for {who}", of(host, gpu, end)));
        }
        host.nvlinks.push(NvLink { gpu, end, links, link_gbps, source: driver.source });
    }
    for link in before {
        let now = host.nvlinks.iter_mut().find(|now| now.gpu == link.gpu && now.end == link.end);
        let links = now.as_ref().map_or(0, |now| now.links);
        if let Some(now) = now {
            now.link_gbps = now.link_gbps.or(link.link_gbps);
        }
        if links != link.links {
            let pair = of(host, link.gpu, link.end);
            warnings.push(format!("{pair}: {} nvlinks in the input, {links} for {who}", link.links));
        }
    }
    host.nvlinks.sort_by_key(|link| (link.gpu, link.end));
}

/// A pair of ends for messages.
fn of(host: &Host, gpu: GpuId, end: NvLinkEnd) -> String {
    let name = |id| host.gpu(id).map_or("a gpu", |gpu| gpu.name.as_str());
    match end {
        NvLinkEnd::Gpu(far) => format!("{} to {}", name(gpu), name(far)),
        NvLinkEnd::Switch => format!("{} to the switches", name(gpu)),
        NvLinkEnd::Cpu => format!("{} to the cpu", name(gpu)),
    }
}

/// What keeps NVLinks to switches from carrying traffic, told once for GPUs in one state.
fn fabric(host: &Host, warnings: &mut Vec<String>) {
    let mut waiting: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for gpu in &host.gpus {
        let Some(fabric) = gpu.fabric.as_ref().map(|fabric| &fabric.value) else { continue };
        for problem in &fabric.problems {
            warnings.push(format!("{}: nvlink fabric: {problem}", gpu.name));
        }
        if fabric.state != FabricState::Completed {
            waiting.entry(fabric.state.to_string()).or_default().push(&gpu.name);
        }
    }
    for (state, gpus) in waiting {
        warnings.push(format!(
            "registration with the nvlink fabric is {state} for {}: its links carry no traffic before it is completed; \
             look at nvidia-fabricmanager",
            gpus.join(", ")
        ));
    }
}
