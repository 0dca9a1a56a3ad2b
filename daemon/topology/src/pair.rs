//! A GPU and an RDMA device, with the paths between them found once for all that is asked of the two. Who asks of many
//! pairs finds the path of each device once too.

use std::rc::Rc;

use crate::acs::PeerAcs;
use crate::level::Level;
use crate::model::{Gpu, GpuId, Hca, HcaId, Host};
use crate::path::Bottleneck;
use crate::paths::{Path, Paths};

/// The path of one device to the root, where it has one.
type Way<'a> = Option<Rc<Path<'a>>>;

/// A GPU and an RDMA device.
#[derive(Debug)]
pub(crate) struct Pair<'a> {
    host: &'a Host,
    gpu: &'a Gpu,
    gpu_id: GpuId,
    hca: &'a Hca,
    id: HcaId,
    /// To the RDMA device's own function.
    own: Option<Paths<'a>>,
    /// To its data-direct function.
    direct: Option<Paths<'a>>,
}

impl<'a> Pair<'a> {
    /// `None` if one of them is not of this host.
    pub(crate) fn of(host: &'a Host, gpu: GpuId, hca: HcaId) -> Option<Self> {
        let (ends, near) = (ways_of(host, host.hca(hca)?), way_of(host, host.gpu(gpu)?));
        Self::with(host, gpu, hca, &near, &ends)
    }

    fn with(host: &'a Host, gpu: GpuId, id: HcaId, near: &Way<'a>, far: &[Way<'a>; 2]) -> Option<Self> {
        let paths = |far: &Way<'a>| Some(Paths::between(Rc::clone(near.as_ref()?), Rc::clone(far.as_ref()?)));
        let ([own, direct], hca) = (far.each_ref().map(paths), host.hca(id)?);
        Some(Self { host, gpu: host.gpu(gpu)?, gpu_id: gpu, hca, id, own, direct })
    }

    /// The level by the better of the paths; `None` where nothing is known.
    pub(crate) fn level(&self) -> Option<Level> {
        let by_tree = |paths: &Option<Paths<'_>>| paths.as_ref().and_then(|paths| self.host.level_on(paths));
        let own = by_tree(&self.own).or_else(|| self.host.given_level(&self.gpu.name, &self.hca.name));
        [own, by_tree(&self.direct)].into_iter().flatten().min()
    }

    /// The narrowest part between the GPU and the wire, by the wider of the paths.
    pub(crate) fn bottleneck(&self) -> Option<Bottleneck> {
        let wider = |a: Bottleneck, b: Bottleneck| if b.gbps > a.gbps { b } else { a };
        let narrowest = |paths| self.host.narrowest_of_gpu(self.gpu_id, paths);
        let links = [&self.own, &self.direct].into_iter().flatten().filter_map(narrowest).reduce(wider);
        links.into_iter().chain(self.host.port_bottleneck(self.id)).reduce(Bottleneck::narrower)
    }

    /// Which way traffic between the two takes, by the nearer of the paths.
    pub(crate) fn acs(&self) -> Option<PeerAcs> {
        let distance = |paths: &&Paths<'_>| {
            let level = self.host.level_on(paths);
            (level.is_none(), level)
        };
        [&self.own, &self.direct].into_iter().flatten().min_by_key(distance)?.acs()
    }
}

/// The paths of all GPUs and RDMA devices of a host.
#[derive(Debug)]
pub(crate) struct Ways<'a> {
    host: &'a Host,
    gpus: Vec<Way<'a>>,
    hcas: Vec<[Way<'a>; 2]>,
}

impl<'a> Ways<'a> {
    pub(crate) fn of(host: &'a Host) -> Self {
        let gpus = host.gpus.iter().map(|gpu| way_of(host, gpu)).collect();
        Self { host, gpus, hcas: host.hcas.iter().map(|hca| ways_of(host, hca)).collect() }
    }

    /// As [`Pair::of`].
    pub(crate) fn pair(&self, gpu: GpuId, hca: HcaId) -> Option<Pair<'a>> {
        Pair::with(self.host, gpu, hca, self.gpus.get(gpu.0)?, self.hcas.get(hca.0)?)
    }
}

fn way_of<'a>(host: &'a Host, gpu: &Gpu) -> Way<'a> {
    Path::of(host, gpu.bdf?)
}

fn ways_of<'a>(host: &'a Host, hca: &Hca) -> [Way<'a>; 2] {
    [hca.bdf, hca.data_direct].map(|end| Path::of(host, end?))
}
