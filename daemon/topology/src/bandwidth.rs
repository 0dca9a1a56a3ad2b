//! Bandwidth matching: what a GPU's link, its NICs and the switch above them carry, side by side, and what of
//! it is wasted because its counterpart is narrower.

use serde::{Deserialize, Serialize};

use crate::bdf::Bdf;
use crate::level::Level;
use crate::model::{GpuId, HcaId, Host, PciRole};
use crate::path::link_gbps;
use crate::plan::contract::Plan;
use crate::together::{Part, Way, together};
use crate::words::{counted, gbps};

/// Rates that differ by less than this share are called matched: encodings and flow control take as much.
const MATCHED_SHARE: f64 = 0.05;

/// One GPU against its NICs. All rates in Gbit/s, one direction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct BandwidthMatch {
    /// Name of the GPU.
    pub gpu: String,
    /// The GPU's side of the way to its first NIC.
    pub gpu_gbps: Option<f64>,
    /// Its NICs.
    pub nics: Vec<NicBandwidth>,
    /// What its NICs can move for it together, those that others use too by their even share.
    pub usable_gbps: Option<f64>,
    /// The way out of the highest switch above it.
    pub uplink: Option<Uplink>,
    /// The comparison in words, what is wasted first.
    pub findings: Vec<String>,
}

/// A NIC of a GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NicBandwidth {
    /// Its name.
    pub name: String,
    /// Rate of its fastest usable port.
    pub rate_gbps: Option<f64>,
    /// Narrowest link on its side of the way.
    pub link_gbps: Option<f64>,
    /// What other functions of its slot that other GPUs are given leave it of the slot's link; absent without such.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot_gbps: Option<f64>,
    /// GPUs that use it.
    pub gpus: usize,
}

/// The link of a switch towards the CPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Uplink {
    /// The switch's upstream port.
    pub bdf: Bdf,
    /// What it carries.
    pub gbps: f64,
    /// GPUs below it, and what their links carry together.
    pub gpus: usize,
    /// NICs below it that GPUs are given.
    pub nics: usize,
    /// What these NICs' ports and links carry together up to it; `None` if of one nothing is known.
    pub nics_gbps: Option<f64>,
}

/// Compares every GPU of a plan with its NICs. GPUs without a place in the tree are left out.
#[must_use]
pub fn matches(host: &Host, plan: &Plan) -> Vec<BandwidthMatch> {
    plan.gpus.iter().filter_map(|gpu| of_gpu(host, plan, &gpu.name)).collect()
}

/// Compares one GPU of a plan, by name, with its NICs.
#[must_use]
pub fn of_gpu(host: &Host, plan: &Plan, gpu: &str) -> Option<BandwidthMatch> {
    let planned = plan.gpu(gpu)?;
    let id = host.find_gpu(&planned.name)?;
    let bdf = host.gpu(id)?.bdf?;
    let ids: Vec<HcaId> = planned.assigned.iter().filter_map(|name| host.find_hca(name)).collect();
    let nics: Vec<NicBandwidth> = ids.iter().filter_map(|nic| nic_bandwidth(host, plan, id, *nic)).collect();
    let gpu_gbps = gpu_side(host, id, ids.first().copied());
    let brought = brought(host, id, &ids, &nics);
    let mut found = BandwidthMatch {
        gpu: planned.name.clone(),
        gpu_gbps,
        usable_gbps: [brought, gpu_gbps.filter(|_| brought.is_some())].into_iter().flatten().min_by(f64::total_cmp),
        uplink: uplink(host, plan, bdf),
        nics,
        findings: Vec::new(),
    };
    let is_below = ids.first().is_some_and(|nic| host.gpu_hca_level(id, *nic).is_some_and(|near| near <= Level::Pxb));
    found.findings = findings(&found, brought, is_below);
    Some(found)
}

/// The narrowest part of the GPU's own side: up to where the way to the NIC turns, else towards host memory by its own link.
fn gpu_side(host: &Host, gpu: GpuId, nic: Option<HcaId>) -> Option<f64> {
    let towards = nic.and_then(|nic| host.hca(nic)).and_then(|hca| hca.bdf);
    let side = towards.map(|nic| host.gpu_side(gpu, nic)).unwrap_or_default();
    let narrowest = side.into_iter().map(|(_, gbps)| gbps).min_by(f64::total_cmp);
    narrowest.or_else(|| match host.cpu_links(gpu) {
        Some(links) => links.gbps(),
        None => host.function(host.gpu(gpu)?.bdf?).and_then(link_gbps),
    })
}

fn nic_bandwidth(host: &Host, plan: &Plan, gpu: GpuId, nic: HcaId) -> Option<NicBandwidth> {
    let hca = host.hca(nic)?;
    let (near, far) = (host.gpu(gpu)?.bdf?, hca.bdf?);
    let links = host.links_towards(far, near).filter_map(link_gbps);
    let users = plan.nics.iter().find(|planned| planned.name == hca.name).map_or(1, |planned| planned.gpus.len());
    Some(NicBandwidth {
        name: hca.name.clone(),
        rate_gbps: hca.rate_gbps(),
        link_gbps: links.min_by(f64::total_cmp),
        slot_gbps: slot_gbps(host, plan, gpu, nic),
        gpus: users.max(1),
    })
}

/// Functions of one slot have one link. Where other GPUs are given some of them, each has its even part of it, or more
/// where the others cannot take theirs.
fn slot_gbps(host: &Host, plan: &Plan, gpu: GpuId, nic: HcaId) -> Option<f64> {
    let slot = |id: HcaId| host.hca(id).and_then(|hca| hca.bdf).map(|bdf| host.slot(bdf));
    let (own, link) = (slot(nic)?, host.hca(nic)?.bdf.and_then(|bdf| host.function(bdf)).and_then(link_gbps)?);
    let name = &host.gpu(gpu)?.name;
    let given = plan.nics.iter().filter(|planned| !planned.gpus.is_empty() && !planned.gpus.contains(name));
    let others: Vec<HcaId> = given
        .filter_map(|planned| host.find_hca(&planned.name))
        .filter(|other| *other != nic && slot(*other) == Some(own))
        .collect();
    if others.is_empty() {
        return None;
    }
    let taken = others.iter().map(|other| host.hca(*other).and_then(|hca| hca.rate_gbps()));
    let left = taken.sum::<Option<f64>>().map_or(0.0, |taken| link - taken);
    #[expect(clippy::cast_precision_loss, reason = "a count of functions of one slot")]
    let even = link / (others.len() + 1) as f64;
    Some(even.max(left))
}

/// What one GPU gets of its NICs, each by its even share and all within the links they have in common; `None` where no
/// rate is known.
fn brought(host: &Host, gpu: GpuId, ids: &[HcaId], nics: &[NicBandwidth]) -> Option<f64> {
    let way = |id: &HcaId| {
        let name = &host.hca(*id)?.name;
        let own = nics.iter().find(|nic| nic.name == *name).and_then(share)?;
        let side = host.nic_side(gpu, *id).into_iter();
        Some(side.chain([(Part::Share(*id), own)]).collect())
    };
    let known: Vec<Way> = ids.iter().filter_map(way).collect();
    together(&known).filter(|_| !known.is_empty())
}

/// The highest switch above a GPU whose uplink is known.
fn uplink(host: &Host, plan: &Plan, gpu: Bdf) -> Option<Uplink> {
    let is_switch = |role: PciRole| matches!(role, PciRole::SwitchUpstream | PciRole::Switch);
    let above: Vec<_> = host.bridges_above(gpu).collect();
    let switch = above.iter().rfind(|function| is_switch(function.role))?;
    // The port above shows the same link; the narrower of the two reports counts.
    let own = link_gbps(switch)?;
    let port = above.iter().skip_while(|function| function.bdf != switch.bdf).nth(1).and_then(|port| link_gbps(port));
    let gbps = port.map_or(own, |port| port.min(own));
    let is_below = |bdf: Bdf| host.bridges_above(bdf).any(|bridge| bridge.bdf == switch.bdf);
    let given = plan.nics.iter().filter(|nic| !nic.gpus.is_empty());
    let nics: Vec<Way> = given
        .filter_map(|nic| {
            let bdf = nic.bdf.filter(|bdf| is_below(*bdf))?;
            let links = host.nic_links(bdf, None).into_iter();
            let below = links.take_while(|(part, _)| *part != Part::Bridge(switch.bdf));
            // Without the rate of its port a NIC may bring less than its link.
            let port = nic.rate_gbps.and_then(|_| host.port_part(host.find_hca(&nic.name)?));
            Some(port.map_or_else(Way::new, |port| std::iter::once(port).chain(below).collect()))
        })
        .collect();
    let gpus = host.gpus.iter().filter_map(|gpu| gpu.bdf).filter(|bdf| is_below(*bdf)).count();
    Some(Uplink { bdf: switch.bdf, gbps, gpus, nics: nics.len(), nics_gbps: together(&nics) })
}

/// A GPU's even share of a NIC; `None` where no rate is known.
fn share(nic: &NicBandwidth) -> Option<f64> {
    let known = [nic.rate_gbps, nic.link_gbps].into_iter().flatten().min_by(f64::total_cmp)?;
    let gbps = nic.slot_gbps.map_or(known, |slot| slot.min(known));
    // A count of GPUs of one host is far below where a float loses whole numbers.
    #[expect(clippy::cast_precision_loss, reason = "a count of GPUs")]
    let users = nic.gpus as f64;
    Some(gbps / users)
}

fn is_narrower(a: f64, b: f64) -> bool {
    a < b * (1.0 - MATCHED_SHARE)
}

fn findings(found: &BandwidthMatch, brought: Option<f64>, is_below_switch: bool) -> Vec<String> {
    let mut words = Vec::new();
    for nic in &found.nics {
        if let Some((rate, link)) = nic.rate_gbps.zip(nic.link_gbps).filter(|(rate, link)| is_narrower(*link, *rate)) {
            words.push(format!(
                "{}: port of {} Gbit/s behind a link of {}: {} of the port wasted",
                nic.name,
                gbps(rate),
                gbps(link),
                gbps(rate - link)
            ));
        }
    }
    if let Some((alone, nics)) = found
        .nics
        .iter()
        .filter_map(share)
        .reduce(|sum, share| sum + share)
        .zip(brought)
        .filter(|(alone, nics)| is_narrower(*nics, *alone))
    {
        words.push(format!(
            "NICs of {} Gbit/s on one link or port of {}: {} of them wasted together",
            gbps(alone),
            gbps(nics),
            gbps(alone - nics)
        ));
    }
    if let Some((gpu, nics)) = found.gpu_gbps.zip(brought) {
        let who = if found.nics.len() == 1 { "NIC" } else { "NICs" };
        let both = format!("link of {} Gbit/s against {who} of {}", gbps(gpu), gbps(nics));
        words.push(if is_narrower(gpu, nics) {
            format!("{both}: {} of the {who} wasted", gbps(nics - gpu))
        } else if is_narrower(nics, gpu) {
            format!("{both}: {} of the link unused", gbps(gpu - nics))
        } else {
            format!("link of {} Gbit/s and {who} of {} are matched", gbps(gpu), gbps(nics))
        });
    }
    if let Some(up) = &found.uplink
        && let Some(nics_gbps) = up.nics_gbps.filter(|_| up.nics > 0)
    {
        let who = format!("uplink {} of {} Gbit/s", up.bdf, gbps(up.gbps));
        let load = format!("{} of {}", counted(up.nics, "NIC"), gbps(nics_gbps));
        let wasted = gbps(nics_gbps - up.gbps);
        words.push(match (is_narrower(up.gbps, nics_gbps), is_below_switch) {
            (false, _) => format!("{who} carries {load}, also to host memory"),
            (true, true) => format!(
                "{who} is narrower than {load}: {wasted} wasted for host memory, not between GPU and NIC below it"
            ),
            (true, false) => format!("{who} is narrower than {load}: {wasted} wasted"),
        });
    }
    words
}
