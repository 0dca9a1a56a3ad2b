//! A topology over the facts of another input, as NCCL lays NCCL_TOPO_FILE over `/sys`.
//!
//! NCCL looks each device up by address in the text first and walks `/sys` upwards only where the text has
//! no element above it (`ncclTopoGetXmlFromSys`, nccl:src/graph/xml.cc); devices that the host does not have
//! are trimmed. NICs are looked up by name.

use std::collections::{BTreeMap, BTreeSet};

use crate::bdf::Bdf;
use crate::model::{NvLinkRemote, PciFunction, RawHost, RawNvLink, Upstream};
use crate::nccl_xml::{NcclTopology, whole};
use crate::source::{SourceKind, Sourced};

const SOURCE: SourceKind = SourceKind::NcclXml;

pub(super) fn lay_over(topology: &NcclTopology, raw: &mut RawHost) {
    let places: BTreeMap<Bdf, usize> = raw.functions.iter().enumerate().map(|(at, f)| (f.bdf, at)).collect();
    let topology = with_addresses_of_host(topology, raw, &places);
    let kept = kept(&topology, &places, &mut raw.warnings);
    let before: Vec<Upstream> = raw.functions.iter().map(|function| function.upstream).collect();
    for (pci, _) in topology.pcis.iter().zip(&kept).filter(|(_, kept)| **kept) {
        let listed = whole::function(&topology, pci);
        match places.get(&pci.bdf).and_then(|at| raw.functions.get_mut(*at)) {
            Some(function) => replace_place(function, listed),
            None => raw.functions.push(listed),
        }
    }
    place_other_functions(raw, &before, &places);
    place_nets_of_cpus(&topology, raw);
    raw.cpu = raw.cpu.take().or_else(|| topology.cpu_kind.clone());
    for node in topology.numa_nodes() {
        if raw.numa_nodes.iter().all(|known| known.id != node.id) {
            raw.numa_nodes.push(node);
        }
    }
    let is_here = |bdf: &Bdf| places.contains_key(bdf);
    raw.stated_gpus.extend(topology.pcis.iter().filter(|pci| pci.has_gpu).map(|pci| pci.bdf).filter(is_here));
    if raw.nvlinks.is_empty() {
        let both_here =
            |link: &RawNvLink| is_here(&link.gpu) && !matches!(&link.remote, NvLinkRemote::Gpu(far) if !is_here(far));
        raw.nvlinks = whole::nvlinks(&topology).into_iter().filter(both_here).collect();
    }
    if raw.hcas.is_none() {
        // Without class/infiniband the text is the only list of NICs there is.
        let listed = whole::hcas(&topology, &mut raw.warnings);
        raw.hcas = listed.map(|hcas| hcas.into_iter().filter(|hca| hca.bdf.as_ref().is_some_and(is_here)).collect());
    }
    raw.warnings.extend(topology.warnings.iter().map(|warning| format!("NCCL topology: {warning}")));
}

/// All functions of one device.
fn slot(bdf: Bdf) -> Bdf {
    Bdf { function: 0, ..bdf }
}

/// A text written for a kind of machine may name a NIC right and its address wrong: the name counts.
fn with_addresses_of_host(topology: &NcclTopology, raw: &RawHost, places: &BTreeMap<Bdf, usize>) -> NcclTopology {
    let mut topology = topology.clone();
    let listed: BTreeSet<Bdf> = topology.pcis.iter().map(|pci| slot(pci.bdf)).collect();
    for net in &topology.nets {
        let hca = raw.hcas.iter().flatten().find(|hca| hca.name == net.name);
        let actual = hca.and_then(|hca| hca.bdf).filter(|bdf| !listed.contains(&slot(*bdf)));
        let pci = net.pci.and_then(|place| topology.pcis.get_mut(place));
        if let (Some(actual), Some(pci)) = (actual, pci)
            && !places.contains_key(&pci.bdf)
        {
            pci.bdf = actual;
        }
    }
    topology
}

/// Which elements the host has: its own functions, and switches with such below them.
fn kept(topology: &NcclTopology, places: &BTreeMap<Bdf, usize>, warnings: &mut Vec<String>) -> Vec<bool> {
    let mut kept: Vec<bool> = topology.pcis.iter().map(|pci| places.contains_key(&pci.bdf)).collect();
    // Parents come before what is below them, so from the end each is settled before its parent.
    for (at, pci) in topology.pcis.iter().enumerate().rev() {
        let is_kept = kept.get(at).copied().unwrap_or(false);
        if let Some(parent) = pci.parent.and_then(|parent| kept.get_mut(parent)) {
            *parent |= is_kept;
        }
    }
    for (pci, _) in topology.pcis.iter().zip(&kept).filter(|(pci, kept)| !**kept && !pci.has_children) {
        warnings.push(format!("{}: in the NCCL topology but not on this host, left out", pci.bdf));
    }
    kept
}

/// Place, link and NUMA node from the text; what the function is from the host, where it tells.
fn replace_place(function: &mut PciFunction, listed: PciFunction) {
    function.upstream = listed.upstream;
    function.source = SOURCE;
    if listed.link.max.is_some() {
        // Virtual functions and bridges report made-up speeds, which is why such texts exist.
        function.link = listed.link;
    }
    function.numa = listed.numa.or(function.numa.take());
    function.vendor = function.vendor.or(listed.vendor);
    function.device = function.device.or(listed.device);
    function.subsystem = function.subsystem.or(listed.subsystem);
    function.class = function.class.or(listed.class);
}

/// NCCL knows a NIC by function 0 alone, so its other functions go where that one went.
fn place_other_functions(raw: &mut RawHost, before: &[Upstream], places: &BTreeMap<Bdf, usize>) {
    let firsts: Vec<Option<(Upstream, Option<Sourced<crate::model::NumaId>>)>> = raw
        .functions
        .iter()
        .zip(before)
        .map(|(function, own)| {
            let at = *places.get(&slot(function.bdf))?;
            let first = raw.functions.get(at)?;
            let moved_away = first.source == SOURCE && function.source != SOURCE && before.get(at) == Some(own);
            (moved_away && function.bdf.function != 0).then(|| (first.upstream, first.numa.clone()))
        })
        .collect();
    for (function, first) in raw.functions.iter_mut().zip(firsts) {
        if let Some((upstream, numa)) = first {
            function.upstream = upstream;
            function.numa = numa;
            function.source = SOURCE;
        }
    }
}

/// NICs that the text hangs right below a `cpu` element.
fn place_nets_of_cpus(topology: &NcclTopology, raw: &mut RawHost) {
    for net in topology.nets.iter().filter(|net| net.pci.is_none()) {
        let bdf = raw.hcas.iter().flatten().find(|hca| hca.name == net.name).and_then(|hca| hca.bdf);
        let function = raw.functions.iter_mut().find(|function| bdf.is_some() && Some(function.bdf) == bdf);
        if let Some(function) = function.filter(|function| function.source != SOURCE) {
            function.upstream = Upstream::Root(topology.root(net.cpu));
            function.numa = topology.numa(net.cpu).map(|numa| Sourced::new(numa, SOURCE)).or(function.numa.take());
            function.source = SOURCE;
        }
    }
}
