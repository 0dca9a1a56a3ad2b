//! Which NIC may be given to which GPU, and how good it would be: everything the choice rests on.

use std::collections::BTreeMap;

use crate::bdf::Bdf;
use crate::level::Level;
use crate::model::{GpuId, Hca, HcaId, HcaOrigin, Host, LinkLayer, PciClass, PortState};
use crate::pair::Ways;
use crate::plan::PlanOptions;

/// How near a NIC is to a GPU, nearest first. Equal keys are equally near.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Nearness {
    /// Software devices come after all hardware.
    pub(super) is_soft: bool,
    /// `Sys` for unknown levels, which `has_no_level` puts after it.
    pub(super) level: Level,
    pub(super) has_no_level: bool,
    /// NUMA distance where the level leaves it open.
    pub(super) numa: u16,
}

/// Reasons why a NIC comes after its equals, worst first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Demotion {
    pub(super) default_route: bool,
    pub(super) odd_link_layer: bool,
    /// No port tells its link layer, and the PCI class is another than that of most.
    pub(super) odd_class: bool,
    pub(super) odd_rate: bool,
    /// Often a front-end or storage adapter, which leads to another network at whatever rate.
    pub(super) odd_device: bool,
}

impl Demotion {
    /// Weight among equals; 0 is none.
    pub(super) fn weight(&self) -> u64 {
        let flags = [self.odd_device, self.odd_rate, self.odd_link_layer || self.odd_class, self.default_route];
        flags.into_iter().enumerate().map(|(bit, flag)| u64::from(flag) << bit).sum()
    }

    /// Whether it no longer counts as an equal of its neighbours.
    pub(super) fn is_apart(&self) -> bool {
        self.weight() > 0
    }

    pub(super) fn reasons(&self) -> Vec<&'static str> {
        let all = [
            (self.default_route, "carries the default route"),
            (self.odd_link_layer, "has another link layer than most"),
            (self.odd_class, "is of another PCI class than most"),
            (self.odd_rate, "has another rate than most"),
            (self.odd_device, "is of another kind than most"),
        ];
        all.into_iter().filter(|(flag, _)| *flag).map(|(_, reason)| reason).collect()
    }
}

/// A NIC as the choice sees it.
#[derive(Clone, Debug)]
pub(super) struct Candidate {
    /// Why it is never given automatically; `None` if it may be.
    pub(super) exclusion: Option<String>,
    /// Whether the exclusion may pass without the host being rebuilt: a port that is down.
    pub(super) is_transient: bool,
    pub(super) demotion: Demotion,
    /// Place among equals: the operator's rail, else after those, in PCI order.
    pub(super) order: (u32, usize),
}

/// All NICs and all pairs of a host.
#[derive(Debug)]
pub(super) struct Candidates {
    pub(super) nics: Vec<Candidate>,
    /// By GPU, then HCA.
    pub(super) nearness: Vec<Vec<Nearness>>,
}

impl Candidates {
    pub(super) fn of(host: &Host, ways: &Ways<'_>, options: &PlanOptions) -> Self {
        let exclusions = exclusions(host, options);
        let gpus = (0..host.gpus.len()).map(GpuId);
        let rows = gpus.map(|gpu| (0..host.hcas.len()).map(|hca| nearness(host, ways, gpu, HcaId(hca))).collect());
        let nearness: Vec<Vec<Nearness>> = rows.collect();
        let most = Most::of(host, &equals(host, &exclusions, &nearness));
        let nics = host.hcas.iter().zip(exclusions).enumerate().map(|(place, (hca, exclusion))| Candidate {
            is_transient: exclusion.as_ref().is_some_and(|(_, transient)| *transient),
            exclusion: exclusion.map(|(reason, _)| reason),
            demotion: most.demotion(host, hca),
            order: (options.rails.get(&hca.name).copied().unwrap_or(u32::MAX), place),
        });
        Self { nics: nics.collect(), nearness }
    }

    /// Whether each HCA may be given automatically.
    pub(super) fn usable(host: &Host, options: &PlanOptions) -> Vec<bool> {
        exclusions(host, options).iter().map(Option::is_none).collect()
    }

    pub(super) fn nic(&self, id: HcaId) -> Option<&Candidate> {
        self.nics.get(id.0)
    }

    pub(super) fn nearness(&self, gpu: GpuId, hca: HcaId) -> Option<Nearness> {
        self.nearness.get(gpu.0)?.get(hca.0).copied()
    }

    /// The nearest NICs of a GPU among those that `allows`, in order of place.
    pub(super) fn nearest(&self, gpu: GpuId, allows: impl Fn(HcaId, &Candidate) -> bool) -> Vec<HcaId> {
        let row = self.nearness.get(gpu.0).map_or(&[][..], Vec::as_slice);
        let allowed = || {
            row.iter().zip(&self.nics).enumerate().filter_map(|(place, (near, nic))| {
                allows(HcaId(place), nic).then_some((*near, nic.order, HcaId(place)))
            })
        };
        let Some(best) = allowed().map(|(near, _, _)| near).min() else { return Vec::new() };
        let mut nearest: Vec<_> = allowed().filter(|(near, _, _)| *near == best).collect();
        nearest.sort_by_key(|(_, order, _)| *order);
        nearest.into_iter().map(|(_, _, id)| id).collect()
    }

    /// HCAs that carry rails, in their order: the nearest of some GPU when all links are up, without those
    /// that come after their equals.
    pub(super) fn compute_nics(&self) -> Vec<HcaId> {
        let gpus = (0..self.nearness.len()).map(GpuId);
        let may = |nic: &Candidate| nic.exclusion.is_none() || nic.is_transient;
        let nics = gpus.flat_map(|gpu| self.nearest(gpu, |_, nic| may(nic)));
        nics.filter(|id| self.nic(*id).is_some_and(|nic| !nic.demotion.is_apart())).collect()
    }
}

/// NICs that stand to choice: usable hardware that is nearest to some GPU. What is far from all of them has no say in what
/// is usual; on a host without GPUs all have.
fn equals<'a>(host: &'a Host, exclusions: &[Option<(String, bool)>], nearness: &[Vec<Nearness>]) -> Vec<&'a Hca> {
    let may = |place: &usize| {
        exclusions.get(*place).is_some_and(Option::is_none) && host.hcas.get(*place).is_some_and(|hca| !is_soft(hca))
    };
    let usable: Vec<usize> = (0..host.hcas.len()).filter(may).collect();
    let nearest = |row: &Vec<Nearness>| usable.iter().filter_map(|place| row.get(*place)).min().copied();
    let best: Vec<Option<Nearness>> = nearness.iter().map(nearest).collect();
    let is_near = |place: &&usize| {
        let of_gpu = nearness.iter().zip(&best).any(|(row, best)| best.is_some() && row.get(**place) == best.as_ref());
        of_gpu || nearness.is_empty()
    };
    usable.iter().filter(is_near).filter_map(|place| host.hcas.get(*place)).collect()
}

fn is_soft(hca: &Hca) -> bool {
    matches!(hca.origin, HcaOrigin::Soft { .. })
}

/// NUMA distance of ACPI for the same node, and what stands for one that is not known.
const LOCAL_DISTANCE: u16 = 10;
const REMOTE_DISTANCE: u16 = 20;
const UNKNOWN_DISTANCE: u16 = u16::MAX;

fn nearness(host: &Host, ways: &Ways<'_>, gpu: GpuId, hca: HcaId) -> Nearness {
    let level = ways.pair(gpu, hca).and_then(|pair| pair.level());
    // Bridges of one physical switch are partitions of it: how many there are says nothing of the way.
    let is_one_switch = level == Some(Level::Pxb) && host.shares_one_switch(gpu, hca);
    let level = if is_one_switch { Some(Level::Pix) } else { level };
    let numa = match level {
        // Below one switch the node says nothing more, and functions of one card may even disagree.
        Some(Level::Phb | Level::Node | Level::Sys) | None => numa_distance(host, gpu, hca),
        Some(Level::Same | Level::NvLink(_) | Level::Pix | Level::Pxb) => 0,
    };
    Nearness {
        is_soft: host.hca(hca).is_some_and(is_soft),
        level: level.unwrap_or(Level::Sys),
        has_no_level: level.is_none(),
        numa,
    }
}

fn numa_distance(host: &Host, gpu: GpuId, hca: HcaId) -> u16 {
    let sole = host.sole_numa_node();
    let gpu = host.gpu(gpu).and_then(|gpu| gpu.numa).or(sole);
    let hca = host.hca(hca).and_then(|hca| hca.numa).or(sole);
    let (Some(from), Some(to)) = (gpu, hca) else { return UNKNOWN_DISTANCE };
    if from == to {
        return LOCAL_DISTANCE;
    }
    let place = host.numa_nodes.iter().position(|node| node.id == to);
    let row = host.numa_nodes.iter().find(|node| node.id == from);
    let known = place.zip(row).and_then(|(place, row)| row.distances.get(place).copied());
    known.unwrap_or(REMOTE_DISTANCE).clamp(LOCAL_DISTANCE + 1, UNKNOWN_DISTANCE - 1)
}

/// Of each NIC why it is never given automatically, and whether that may pass by itself.
fn exclusions(host: &Host, options: &PlanOptions) -> Vec<Option<(String, bool)>> {
    let crowded = crowded(host);
    let of = |(place, hca)| exclusion(host, hca, options).or_else(|| Some((crowded.get(&place)?.clone(), false)));
    host.hcas.iter().enumerate().map(of).collect()
}

/// Most ports and physical functions that adapters have: four.
const MAX_OF_ONE_CARD: usize = 4;

/// A matrix shows no virtual functions as such. More NICs than one adapter has ports, each PIX to all others and to no
/// one else, are taken for one adapter with its virtual functions: all but one share its wire.
fn crowded(host: &Host) -> BTreeMap<usize, String> {
    let mut groups: BTreeMap<Vec<usize>, Vec<usize>> = BTreeMap::new();
    let unplaced: Vec<usize> =
        (0..host.hcas.len()).filter(|place| host.hcas.get(*place).is_some_and(|hca| hca.bdf.is_none())).collect();
    if unplaced.len() <= MAX_OF_ONE_CARD || host.given_levels.is_empty() {
        return BTreeMap::new();
    }
    for place in &unplaced {
        let is_near =
            |other: &usize| other == place || host.hca_level(HcaId(*place), HcaId(*other)) == Some(Level::Pix);
        groups.entry(unplaced.iter().copied().filter(is_near).collect()).or_default().push(*place);
    }
    let mut reasons = BTreeMap::new();
    for (near, members) in groups.into_iter().filter(|(near, members)| near == members && near.len() > MAX_OF_ONE_CARD)
    {
        let name = |place: &usize| host.hcas.get(*place).map_or("", |hca| hca.name.as_str());
        // A bond is made of physical functions.
        let first = members.iter().min_by_key(|place| (!name(place).contains("bond"), **place)).copied();
        for place in members.iter().filter(|place| Some(**place) != first) {
            let (count, whole) = (near.len(), first.as_ref().map_or("", name));
            let reason = format!(
                "one of {count} NICs as near to each other as functions of one adapter, taken for a virtual function beside {whole}"
            );
            reasons.insert(*place, reason);
        }
    }
    reasons
}

/// Why a NIC is never given automatically, and whether that may pass by itself.
fn exclusion(host: &Host, hca: &Hca, options: &PlanOptions) -> Option<(String, bool)> {
    let lasting = |reason: String| Some((reason, false));
    if hca.origin == HcaOrigin::Socket {
        return lasting("no RDMA".to_owned());
    }
    if let Some(filter) = &options.filter {
        let allows = |port_num: u8| filter.allows_port(&hca.name, port_num);
        let allowed = if hca.ports.is_empty() {
            filter.allows_name(&hca.name)
        } else {
            hca.ports.iter().any(|port| allows(port.port_num))
        };
        if !allowed {
            return lasting(format!("the filter `{filter}` leaves it out"));
        }
    }
    if hca.has_uverbs == Some(false) {
        return lasting("this system has no uverbs device of it".to_owned());
    }
    if hca.is_bond_slave {
        let bond = hca.bond.as_deref().unwrap_or("a bond");
        return lasting(format!("it is a slave of {bond}"));
    }
    if let Some(reason) = virtual_function(host, hca).or_else(|| sub_function(host, hca)) {
        return lasting(reason);
    }
    down(hca, options).map(|reason| (reason, true))
}

/// No port carries traffic. Ports of unknown state count as usable.
fn down(hca: &Hca, options: &PlanOptions) -> Option<String> {
    let allowed = |port_num: u8| options.filter.as_ref().is_none_or(|filter| filter.allows_port(&hca.name, port_num));
    let ports: Vec<_> = hca.ports.iter().filter(|port| allowed(port.port_num)).collect();
    let usable = |state: PortState| matches!(state, PortState::Active | PortState::Unknown);
    if ports.is_empty() || ports.iter().any(|port| usable(port.state)) {
        return None;
    }
    let states: Vec<String> = ports.iter().map(|port| format!("port {} is {}", port.port_num, port.state)).collect();
    Some(states.join(", "))
}

/// Drivers that hand a function to a guest or to user space.
const PASS_THROUGH_DRIVERS: [&str; 4] = ["vfio-pci", "pci-stub", "xen-pciback", "uio_pci_generic"];

fn virtual_function(host: &Host, hca: &Hca) -> Option<String> {
    let bdf = hca.bdf?;
    if is_soft(hca) {
        return None;
    }
    let of = |bdf: Bdf| host.hcas.iter().find(|other| other.bdf == Some(bdf) && !is_soft(other));
    if let Some(physical) = host.function(bdf)?.physical_function {
        let physical = of(physical).filter(|physical| physical.has_uverbs != Some(false))?;
        return Some(format!("it is a virtual function beside its physical one, {}", physical.name));
    }
    let virtual_functions = host.functions.iter().filter(|function| function.physical_function == Some(bdf));
    let in_use = virtual_functions.into_iter().find(|function| {
        let driver = function.driver.as_deref();
        let passed_through = driver.is_some_and(|driver| PASS_THROUGH_DRIVERS.contains(&driver));
        // Bound to the NIC's driver and yet without RDMA device here: it lives in another network namespace.
        let moved_away = driver.is_some()
            && driver == host.function(bdf).and_then(|physical| physical.driver.as_deref())
            && of(function.bdf).is_none();
        passed_through || moved_away
    });
    in_use.map(|function| format!("its virtual function {} is in use elsewhere", function.bdf))
}

fn sub_function(host: &Host, hca: &Hca) -> Option<String> {
    let name = hca.sub_function.as_ref()?;
    let whole = host.hcas.iter().find(|other| other.bdf == hca.bdf && other.sub_function.is_none() && !is_soft(other));
    whole.map(|whole| format!("it is a sub-function ({name}) beside {}", whole.name))
}

/// What most of the usable hardware NICs are like.
#[derive(Debug, Default)]
struct Most {
    link_layer: Option<LinkLayer>,
    rate_mbps: Option<u64>,
    device: Option<(u16, u16)>,
}

impl Most {
    fn of(host: &Host, equals: &[&Hca]) -> Self {
        Self {
            link_layer: majority(equals.iter().map(|hca| link_layer(host, hca)).filter(|l| *l != LinkLayer::Unknown)),
            rate_mbps: majority(equals.iter().filter_map(|hca| rate_mbps(hca))),
            device: majority(equals.iter().filter_map(|hca| device(host, hca))),
        }
    }

    fn demotion(&self, host: &Host, hca: &Hca) -> Demotion {
        let layer = Some(link_layer(host, hca)).filter(|layer| *layer != LinkLayer::Unknown);
        let is_told = hca.link_layer() != LinkLayer::Unknown;
        Demotion {
            default_route: has_default_route(host, hca),
            odd_link_layer: is_told && differs(layer, self.link_layer),
            odd_class: !is_told && differs(layer, self.link_layer),
            odd_rate: differs(rate_mbps(hca), self.rate_mbps),
            odd_device: differs(device(host, hca), self.device),
        }
    }
}

fn differs<T: PartialEq>(own: Option<T>, most: Option<T>) -> bool {
    own.zip(most).is_some_and(|(own, most)| own != most)
}

/// The value that more than half have.
fn majority<T: Ord + Copy>(values: impl Iterator<Item = T>) -> Option<T> {
    let mut counts: BTreeMap<T, usize> = BTreeMap::new();
    for value in values {
        *counts.entry(value).or_insert(0) += 1;
    }
    let all: usize = counts.values().sum();
    counts.into_iter().find(|(_, count)| count * 2 > all).map(|(value, _)| value)
}

/// By its ports, else by the class that the adapter shows in its mode.
fn link_layer(host: &Host, hca: &Hca) -> LinkLayer {
    let by_port = hca.link_layer();
    if by_port != LinkLayer::Unknown {
        return by_port;
    }
    let class = hca.bdf.and_then(|bdf| host.function(bdf)).map_or(0, |function| function.subclass());
    match class {
        PciClass::NET_INFINIBAND => LinkLayer::InfiniBand,
        PciClass::NET_ETHERNET => LinkLayer::Ethernet,
        _ => LinkLayer::Unknown,
    }
}

fn rate_mbps(hca: &Hca) -> Option<u64> {
    hca.rate_gbps().map(super::mbps)
}

fn device(host: &Host, hca: &Hca) -> Option<(u16, u16)> {
    let function = host.function(hca.bdf?)?;
    function.vendor.zip(function.device)
}

fn has_default_route(host: &Host, hca: &Hca) -> bool {
    let mut uppers: Vec<&str> = hca.netdevs.iter().map(String::as_str).collect();
    uppers.extend(hca.bond.as_deref());
    uppers.extend(host.netdevs.iter().filter(|n| hca.netdevs.contains(&n.name)).filter_map(|n| n.master.as_deref()));
    host.netdevs.iter().any(|netdev| netdev.has_default_route && uppers.contains(&netdev.name.as_str()))
}
