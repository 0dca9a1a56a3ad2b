//! What several NICs carry together: those behind one PCIe link or on one port have it once.

use std::collections::BTreeMap;

use crate::bdf::Bdf;
use crate::model::{GpuId, HcaId, Host, PciFunction};
use crate::path::link_gbps;
use crate::paths::Paths;

/// What data passes on the way, in one direction. Equal parts are one thing that all who pass it share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Part {
    /// A NIC's own port.
    Port(HcaId),
    /// The port of a physical function, which its virtual functions and sub-functions use too.
    SharedPort(Bdf),
    /// The link of an adapter, by its first function: the functions of a device have one link.
    Slot(Bdf),
    /// The link of a bridge on the NIC's side.
    Bridge(Bdf),
    /// What a GPU may use of a NIC that others use too.
    Share(HcaId),
    /// A link on the GPU's side, which data passes the other way.
    GpuSide(Bdf),
    /// The links of a GPU to its CPU.
    ToCpu(GpuId),
}

/// Parts of one NIC's way with what they carry, Gbit/s.
pub(crate) type Way = Vec<(Part, f64)>;

/// What flows along all ways together; `None` if of one nothing is known.
///
/// Ways that have met stay together, as in a tree. There it is most to let each in turn take what is left: no order
/// wastes a part that another order would use.
pub(crate) fn together(ways: &[Way]) -> Option<f64> {
    let mut left: BTreeMap<Part, f64> = BTreeMap::new();
    let mut sum = 0.0;
    for way in ways {
        let room = |(part, gbps): &(Part, f64)| left.get(part).map_or(*gbps, |left| left.min(*gbps));
        let flow = way.iter().map(room).min_by(f64::total_cmp)?;
        for (part, gbps) in way {
            let left = left.entry(*part).or_insert(*gbps);
            *left = (*left - flow).max(0.0);
        }
        sum += flow;
    }
    Some(sum)
}

impl Host {
    /// The port of a NIC, or the one that it shares.
    pub(crate) fn port_part(&self, id: HcaId) -> Option<(Part, f64)> {
        let (hca, gbps) = (self.hca(id)?, self.port_bottleneck(id)?.gbps);
        let physical = hca.bdf.and_then(|bdf| {
            let physical = self.function(bdf)?.physical_function.unwrap_or(bdf);
            let is_virtual = |other: Bdf| self.function(other).is_some_and(|f| f.physical_function == Some(physical));
            // Ports of one function that are two devices of an input are two ports, unless one is a sub-function.
            let is_part = |bdf: Bdf, part: bool| is_virtual(bdf) || (bdf == physical && part);
            let parts = self.hcas.iter().filter_map(|other| Some((other.bdf?, other.sub_function.is_some())));
            parts.into_iter().any(|(bdf, part)| is_part(bdf, part)).then_some(physical)
        });
        Some((physical.map_or(Part::Port(id), Part::SharedPort), gbps))
    }

    /// The slot of a function, by its first function; that of a virtual function is its physical one's. Made-up addresses say
    /// nothing of devices.
    pub(crate) fn slot(&self, bdf: Bdf) -> Bdf {
        let physical = self.function(bdf).and_then(|function| function.physical_function).unwrap_or(bdf);
        if physical.is_invented() { physical } else { Bdf { function: 0, ..physical } }
    }

    /// Links of a NIC's function up to where the way to `near` turns; up to the root without it.
    pub(crate) fn nic_links(&self, nic: Bdf, near: Option<Bdf>) -> Way {
        let part = |function: &PciFunction| {
            let is_own = function.bdf == nic;
            let own = || Part::Slot(self.slot(nic));
            Some((if is_own { own() } else { Part::Bridge(function.bdf) }, link_gbps(function)?))
        };
        match near {
            Some(near) => self.links_towards(nic, near).filter_map(part).collect(),
            None => self.function(nic).into_iter().chain(self.bridges_above(nic)).filter_map(part).collect(),
        }
    }

    /// A NIC's side of the way to a GPU: the port and the links, by its better function.
    pub(crate) fn nic_side(&self, gpu: GpuId, id: HcaId) -> Way {
        let near = self.gpu(gpu).and_then(|gpu| gpu.bdf);
        let links = near.zip(self.function_towards(gpu, id)).map(|(near, nic)| self.nic_links(nic, Some(near)));
        self.port_part(id).into_iter().chain(links.unwrap_or_default()).collect()
    }

    /// What NICs and a GPU carry together without host memory: a switch's uplink counts only for ways that take it.
    pub(crate) fn gpu_hcas_gbps(&self, gpu: GpuId, hcas: &[HcaId]) -> Option<f64> {
        let way = |id: &HcaId| {
            let own = self.function_towards(gpu, *id).map_or_else(Way::new, |nic| self.gpu_side(gpu, nic));
            self.nic_side(gpu, *id).into_iter().chain(own).collect()
        };
        together(&hcas.iter().map(way).collect::<Vec<Way>>())
    }

    /// The function of a NIC with the wider way to a GPU: its own, or the data-direct one.
    fn function_towards(&self, gpu: GpuId, id: HcaId) -> Option<Bdf> {
        let (near, hca) = (self.gpu(gpu)?.bdf?, self.hca(id)?);
        let narrowest = |to: Bdf| self.narrowest_of_gpu(gpu, &Paths::of(self, near, to)?);
        let gbps = |to: Option<Bdf>| to.and_then(narrowest).map_or(0.0, |part| part.gbps);
        hca.data_direct.filter(|direct| gbps(Some(*direct)) > gbps(hca.bdf)).or(hca.bdf)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Bdf = Bdf { domain: 0, bus: 1, device: 0, function: 0 };

    #[test]
    fn what_is_shared_counts_once_and_the_rest_adds_up() {
        let port = |at: usize, gbps: f64| (Part::Port(HcaId(at)), gbps);
        let slot = (Part::Slot(A), 126.0);
        assert_eq!(together(&[vec![port(0, 100.0), slot], vec![port(1, 100.0), slot]]), Some(126.0));
        assert_eq!(together(&[vec![port(0, 50.0), slot], vec![port(1, 50.0), slot], vec![port(2, 9.0)]]), Some(109.0));
        let shared = (Part::SharedPort(A), 100.0);
        assert_eq!(together(&[vec![shared], vec![shared]]), Some(100.0));
        assert_eq!(together(&[vec![port(0, 50.0)], vec![]]), None);
    }
}
