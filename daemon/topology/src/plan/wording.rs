//! Reasons and warnings of a plan, in words.

use std::collections::{BTreeMap, BTreeSet};

use crate::acs::PeerAcs;
use crate::bdf::Bdf;
use crate::level::{Level, Meeting};
use crate::model::{GpuId, HcaId, HcaOrigin, Upstream};
use crate::plan::Pairing;

/// Most names that one sentence lists.
const MAX_NAMES: usize = 8;

fn list(names: &[String]) -> String {
    match names.get(..MAX_NAMES) {
        Some(first) if names.len() > MAX_NAMES => format!("{} and {} more", first.join(", "), names.len() - MAX_NAMES),
        _ => names.join(", "),
    }
}

/// A level in a sentence.
pub(super) fn level_word(level: Option<Level>) -> String {
    level.map_or_else(|| "at an unknown place".to_owned(), |level| level.to_string())
}

impl Pairing<'_> {
    /// Why a GPU has these NICs, or none.
    pub(super) fn reason(&self, gpu: GpuId) -> String {
        let assigned = self.choice.of_gpu(gpu);
        if self.choice.pinned.contains(&gpu) {
            let names: Vec<String> = assigned.iter().map(|nic| self.name(*nic)).collect();
            return format!(
                "pinned by the operator to {}",
                if names.is_empty() { "no NIC".to_owned() } else { list(&names) }
            );
        }
        match assigned.first() {
            None => self.reason_for_none(gpu),
            Some(first) => self.reason_for_some(gpu, *first, assigned),
        }
    }

    fn reason_for_some(&self, gpu: GpuId, first: HcaId, assigned: &[HcaId]) -> String {
        let level = self.host.gpu_hca_level(gpu, first);
        let names: Vec<String> = assigned.iter().map(|nic| self.name(*nic)).collect();
        let nearest = self.candidates.nearest(gpu, |_, nic| nic.exclusion.is_none());
        if let Some(nearer) = nearest.first().filter(|_| !nearest.contains(&first)) {
            let nearer_level = level_word(self.host.gpu_hca_level(gpu, *nearer));
            let (kept, nearer) = (list(&names), self.name(*nearer));
            return format!(
                "{kept} ({}) kept from the plan before; {nearer} would be nearer ({nearer_level})",
                level_word(level)
            );
        }
        let equals = self.equals(gpu, first);
        if level.is_none() && equals.len() > 1 {
            let why = "the input does not tell how near any NIC is";
            return format!("{why}: {} of those that other GPUs leave", list(&names));
        }
        let mut words = match equals.len() {
            0 | 1 => format!("{} is the nearest NIC ({})", list(&names), level_word(level)),
            n if n == assigned.len() => format!("{} are the nearest NICs ({})", list(&names), level_word(level)),
            n => format!("{} of {n} equally near NICs ({})", list(&names), level_word(level)),
        };
        if self.candidates.nearness(gpu, first).is_some_and(|near| near.is_soft) {
            words += "; software RDMA, since no hardware NIC may be used";
        }
        let others: BTreeSet<GpuId> =
            assigned.iter().flat_map(|nic| self.choice.users(*nic)).filter(|g| *g != gpu).collect();
        if !others.is_empty() {
            words += &format!("; shared with {}, as every nearest NIC is taken", list(&self.gpu_names(others)));
        } else if equals.len() > assigned.len() {
            let rivals = equals.iter().flat_map(|nic| self.choice.users(*nic)).filter(|g| *g != gpu).collect();
            let rivals = self.gpu_names(rivals);
            if !rivals.is_empty() {
                words += &format!("; spread evenly over this GPU and {}", list(&rivals));
            }
        }
        if let Some(bridge) = self.deeper_bridge(gpu, first, &equals) {
            words += &format!("; {} meets the GPU at the deepest common bridge, {bridge}", self.name(first));
        }
        let demoted = assigned.iter().filter_map(|nic| Some((*nic, self.candidates.nic(*nic)?.demotion.reasons())));
        for (nic, reasons) in demoted.filter(|(_, reasons)| !reasons.is_empty()) {
            words += &format!("; {} {}", self.name(nic), reasons.join(" and "));
        }
        if let Some(acs) = assigned.iter().find_map(|nic| self.redirected(gpu, *nic)) {
            words += &format!("; {}", acs.reason);
        }
        words
    }

    /// Where the paths of a GPU and a NIC meet.
    pub(super) fn meeting(&self, gpu: GpuId, nic: HcaId) -> Option<Meeting> {
        let ends = self.host.gpu(gpu)?.bdf.zip(self.host.hca(nic)?.bdf)?;
        self.host.meeting(ends.0, ends.1)
    }

    /// The bridge below which a NIC is nearer than others that count as its equals, if there is such a one.
    fn deeper_bridge(&self, gpu: GpuId, nic: HcaId, equals: &[HcaId]) -> Option<Bdf> {
        let depth = |nic: HcaId| self.meeting(gpu, nic).map(|meeting| meeting.depth);
        let own = depth(nic)?;
        let is_deepest = equals.iter().all(|other| depth(*other).is_none_or(|depth| depth <= own));
        let is_told = equals.iter().any(|other| depth(*other).is_some_and(|depth| depth < own));
        self.meeting(gpu, nic)?.bridge.filter(|_| is_deepest && is_told)
    }

    fn gpu_names(&self, gpus: BTreeSet<GpuId>) -> Vec<String> {
        gpus.into_iter().filter_map(|gpu| self.host.gpu(gpu)).map(|gpu| gpu.name.clone()).collect()
    }

    /// NICs as near as this one that may be given.
    pub(super) fn equals(&self, gpu: GpuId, nic: HcaId) -> Vec<HcaId> {
        let near = self.candidates.nearness(gpu, nic);
        let all = (0..self.host.hcas.len()).map(HcaId);
        let may = |id: &HcaId| self.candidates.nic(*id).is_some_and(|nic| nic.exclusion.is_none());
        all.filter(|id| may(id) && self.candidates.nearness(gpu, *id) == near).collect()
    }

    fn reason_for_none(&self, gpu: GpuId) -> String {
        if self.host.hcas.is_empty() {
            return "no RDMA NIC on this host".to_owned();
        }
        let nearest = self.candidates.nearest(gpu, |_, nic| nic.exclusion.is_none());
        if let Some(nic) = nearest.first() {
            let level = level_word(self.host.gpu_hca_level(gpu, *nic));
            return format!("nearest NIC {} is {level}, beyond max_level {}", self.name(*nic), self.options.max_level);
        }
        let excluded = self.host.hcas.iter().zip(&self.candidates.nics);
        let excluded =
            excluded.map(|(hca, nic)| format!("{} ({})", hca.name, nic.exclusion.as_deref().unwrap_or("unknown")));
        format!("no NIC may be used: {}", list(&excluded.collect::<Vec<_>>()))
    }

    /// What the reader of the plan should know.
    pub(super) fn warnings(&self) -> Vec<String> {
        let mut warnings = self.host.warnings.clone();
        warnings.extend(self.choice.bad_pins.iter().cloned());
        warnings.extend(self.unknown_rails());
        warnings.extend(self.left_out());
        warnings.extend(self.far_pairs());
        warnings.extend(self.redirected_pairs());
        warnings.extend(self.host.slow_links());
        if self.is_flat() {
            warnings.push(
                "the PCI tree is flat: no switch is visible, so that levels do not tell which NIC is near which GPU"
                    .to_owned(),
            );
        }
        warnings
    }

    /// Rails of NICs that this host does not have: a name mistyped there would be lost without a word.
    fn unknown_rails(&self) -> Option<String> {
        let unknown = self.options.rails.keys().filter(|name| self.host.hcas.iter().all(|hca| hca.name != **name));
        let names: Vec<String> = unknown.cloned().collect();
        let are = if names.len() == 1 { "no NIC of that name" } else { "no NICs of these names" };
        (!names.is_empty()).then(|| format!("rails of {}: {are} on this host", list(&names)))
    }

    /// NICs that are never given automatically, those of one reason together, in order of the first.
    fn left_out(&self) -> Vec<String> {
        let mut by_reason: Vec<(&str, Vec<String>)> = Vec::new();
        for (hca, nic) in self.host.hcas.iter().zip(&self.candidates.nics) {
            let Some(reason) = nic.exclusion.as_deref() else { continue };
            match by_reason.iter_mut().find(|(known, _)| *known == reason) {
                Some((_, names)) => names.push(hca.name.clone()),
                None => by_reason.push((reason, vec![hca.name.clone()])),
            }
        }
        let one = |(reason, names): (&str, Vec<String>)| {
            let are = if names.len() == 1 { "is" } else { "are" };
            format!("{} {are} not assigned: {reason}", list(&names))
        };
        by_reason.into_iter().map(one).collect()
    }

    fn redirected(&self, gpu: GpuId, nic: HcaId) -> Option<PeerAcs> {
        self.host.gpu_hca_acs(gpu, nic).filter(PeerAcs::is_redirected)
    }

    /// One warning for all pairs whose traffic ACS sends up.
    fn redirected_pairs(&self) -> Option<String> {
        let gpus = (0..self.host.gpus.len()).map(GpuId);
        let pairs = gpus.flat_map(|gpu| self.choice.of_gpu(gpu).iter().map(move |nic| (gpu, *nic)));
        let gpu_name = |gpu: GpuId| self.host.gpu(gpu).map_or_else(String::new, |gpu| gpu.name.clone());
        let name = |(gpu, nic): (GpuId, HcaId)| format!("{}-{}", gpu_name(gpu), self.name(nic));
        let redirected: Vec<(GpuId, HcaId)> =
            pairs.filter(|(gpu, nic)| self.redirected(*gpu, *nic).is_some()).collect();
        let (gpu, nic) = *redirected.first()?;
        let reason = self.redirected(gpu, nic)?.reason;
        let names: Vec<String> = redirected.into_iter().map(name).collect();
        Some(format!(
            "{}: no traffic stays below the switch ({reason}); where no guest needs the isolation, turn ReqRedir and \
             CmpltRedir off in these ports (kernel parameter pci=disable_acs_redir=)",
            list(&names)
        ))
    }

    /// One warning for all pairs of a level beyond a switch, and one for each NIC that should not be used.
    fn far_pairs(&self) -> Vec<String> {
        let is_flat = self.is_flat();
        let mut far = Vec::new();
        let mut by_level: BTreeMap<Option<Level>, Vec<String>> = BTreeMap::new();
        for (gpu, device) in (0..).map(GpuId).zip(&self.host.gpus) {
            for nic in self.choice.of_gpu(gpu) {
                let pair = format!("{}-{}", device.name, self.name(*nic));
                by_level.entry(self.host.gpu_hca_level(gpu, *nic)).or_default().push(pair);
                far.extend(
                    self.unusable(*nic)
                        .map(|why| format!("{}: {} is assigned, but {why}", device.name, self.name(*nic))),
                );
            }
        }
        // Of a flat tree the levels say nothing, so that one warning for all is enough.
        let is_told = |level: &Option<Level>| !(is_flat && *level == Some(Level::Phb));
        let is_far = |level: &Option<Level>| level.is_none_or(|level| level > Level::Pxb);
        for (level, pairs) in by_level.into_iter().filter(|(level, _)| is_told(level) && is_far(level)) {
            let so = if level.is_some() { ": no switch joins them, traffic passes the CPU" } else { "" };
            far.push(format!("{}: {}{so}", list(&pairs), level_word(level)));
        }
        far
    }

    /// Why a NIC that a GPU was given by a pin or keeps from before should not be used.
    fn unusable(&self, nic: HcaId) -> Option<&str> {
        self.candidates.nic(nic)?.exclusion.as_deref()
    }

    /// Several GPUs and NICs, all directly on root buses: a guest that hides the switches.
    fn is_flat(&self) -> bool {
        let hardware = self.host.hcas.iter().filter(|hca| hca.origin == HcaOrigin::Hardware).map(|hca| hca.bdf);
        let bdfs: Vec<_> = self.host.gpus.iter().map(|gpu| gpu.bdf).chain(hardware).collect();
        let on_root =
            |bdf| self.host.function(bdf).is_some_and(|function| matches!(function.upstream, Upstream::Root(_)));
        !self.host.gpus.is_empty() && bdfs.len() > 2 && bdfs.iter().all(|bdf| bdf.is_some_and(on_root))
    }
}
