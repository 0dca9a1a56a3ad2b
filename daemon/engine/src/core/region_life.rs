//! The life of a region: what each finished job leads to, and which idle ones give way to others.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use super::allocation::{Allocation, Stage};
use super::region::{Region, RegionKey, RegionStage, Source};
use super::shortage::{Awaited, Starved, error_of};
use super::{Core, Deadline, Effect, Failure, FailureKind, GpuIndex, HcaIndex, Job, RegionId, TenantId, nanos};
use crate::error::EngineError;
use crate::registration::AdoptedKind;

impl Core {
    /// Sees to it that so many new regions of a tenant can be made: what lies idle gives way. Refused when what is held
    /// leaves no room.
    pub(super) fn make_room(
        &mut self,
        tenant: TenantId,
        count: usize,
        missing: &BTreeMap<RegionKey, Vec<Range<u64>>>,
    ) -> Result<(), EngineError> {
        self.make_bar1_room(missing)?;
        let Some(entry) = self.tenants.get(&tenant) else { return Err(EngineError::SessionEnded) };
        let by_quota = entry.quota.max_registrations.saturating_sub(entry.promised_registrations);
        let (reason, what, limit) = match by_quota < self.settings.cache.max_regions {
            true => ("QUOTA_REGISTRATIONS", "the limit on registrations", entry.quota.max_registrations),
            false => ("LIMIT_REGIONS", "the limit on cached registrations", self.settings.cache.max_regions),
        };
        let most = by_quota.min(self.settings.cache.max_regions) as usize;
        let (idle, held) = (entry.idle_regions.len(), entry.held_regions() as usize);
        if held + count > most {
            let used =
                if by_quota < self.settings.cache.max_regions { entry.promised_registrations as usize } else { 0 };
            let (limit, used, asked) = (u64::from(limit), (used + held) as u64, count as u64);
            return Err(EngineError::Limit { reason, what, whom: "the tenant", limit, used, asked });
        }
        let over = (held + idle + count).saturating_sub(most);
        self.evict_oldest(tenant, over);
        Ok(())
    }

    /// Refuses early what a GPU's BAR1 cannot map, with numbers.
    fn make_bar1_room(&mut self, missing: &BTreeMap<RegionKey, Vec<Range<u64>>>) -> Result<(), EngineError> {
        let mut asked: BTreeMap<GpuIndex, BTreeMap<Source, u64>> = BTreeMap::new();
        for source in missing.keys().map(|key| key.source) {
            let Source::Adopted(memory) = source else { continue };
            let Some(adopted) = self.adopted.get(&memory).filter(|a| a.kind == AdoptedKind::DmaBuf) else { continue };
            if let Some(gpu) = adopted.gpu.filter(|_| adopted.regions == 0) {
                asked.entry(gpu).or_default().insert(source, adopted.len_bytes);
            }
        }
        for (gpu, sources) in asked {
            let Some(limit) = self.bar1_budget(gpu) else { continue };
            let asked = sources.values().sum::<u64>();
            let idle = self.idle_on_bar1(gpu);
            let freed: BTreeMap<Source, u64> =
                idle.iter().filter_map(|id| self.regions.get(*id)).map(|r| (r.key.source, self.len_of(r))).collect();
            let used = self.bar1_bytes(gpu);
            if used.saturating_sub(freed.values().sum()).saturating_add(asked) > limit {
                let (reason, what) = ("BAR1_EXHAUSTED", "the BAR1 that registrations may map");
                return Err(EngineError::Limit { reason, what, whom: "the gpu", limit, used, asked });
            }
            if used.saturating_add(asked) > limit {
                self.counters.regions_evicted += idle.len() as u64;
                idle.into_iter().for_each(|id| self.end_region(id));
            }
        }
        Ok(())
    }

    fn bar1_budget(&self, gpu: GpuIndex) -> Option<u64> {
        self.settings.cache.bar1_bytes.or_else(|| self.host.gpu(gpu).and_then(|gpu| gpu.planned.bar1_bytes))
    }

    fn len_of(&self, region: &Region) -> u64 {
        match region.key.source {
            Source::Adopted(memory) => self.adopted.get(&memory).map_or(0, |adopted| adopted.len_bytes),
            Source::Leased(allocation) => self.allocations.get(&allocation).map_or(0, |a| a.len_bytes),
        }
    }

    /// Gives slots to regions that wait for one, and starts them; regions that an idle one holds up wait on.
    pub(super) fn start_waiting_regions(&mut self, tenant: TenantId) {
        loop {
            let Some(entry) = self.tenants.get_mut(&tenant) else { return };
            let Some(id) = entry.waiting_regions.front().copied() else { return };
            if entry.cached_slots >= self.settings.cache.max_regions {
                return;
            }
            let Some((slot, generation)) = entry.slots.take() else { return };
            entry.cached_slots += 1;
            entry.waiting_regions.pop_front();
            let Some(region) = self.regions.get_mut(id) else { return self.unexpected() };
            region.slot = Some((slot, generation));
            self.register_region(id);
        }
    }

    fn register_region(&mut self, id: RegionId) {
        let Some(region) = self.regions.get_mut(id) else { return };
        region.stage = RegionStage::Registering;
        let (tenant, access, range) = (region.tenant, region.access, region.range.clone());
        let RegionKey { source, hca, .. } = region.key;
        self.effect(Effect::Start(Job::RegisterRegion { region: id, tenant, source, hca, range, access }));
    }

    pub(super) fn region_registered(&mut self, id: RegionId, result: Result<u64, Failure>, cost_ns: u64) {
        let Some(region) = self.regions.get_mut(id).filter(|r| r.stage == RegionStage::Registering) else {
            return self.unexpected();
        };
        let iova = match result {
            Ok(iova) => iova,
            Err(failure) => return self.region_failed(id, &failure),
        };
        region.stage = RegionStage::Live;
        region.iova = iova;
        region.retried = false;
        let (len_bytes, waiters) = (region.len_bytes(), std::mem::take(&mut region.waiters));
        let (tenant, slot, hca) = (region.tenant, region.slot, region.key.hca);
        self.counters.regions_registered += 1;
        self.costs.note(len_bytes, cost_ns);
        if let Some((slot, generation)) = slot {
            self.effect(Effect::PublishRegion { tenant, region: id, slot, generation });
        }
        // The HCA may have gone while it was made.
        let gone = self.host.usable_hca(hca).err();
        self.tell_waiters(waiters, gone.as_ref());
        if gone.is_some() {
            return self.end_region(id);
        }
        if self.regions.get(id).is_some_and(|region| region.holders == 0) {
            self.rest_region(id);
            self.trim_idle(tenant);
        }
    }

    /// No region was made. Once idle ones have made room it is tried again, else whoever waits for it fails.
    fn region_failed(&mut self, id: RegionId, failure: &Failure) {
        self.counters.region_failures += 1;
        let short = matches!(failure.kind, FailureKind::Exhausted | FailureKind::OutOfMemory);
        if short && self.starve_region(id, failure) {
            return;
        }
        let Some(region) = self.regions.get_mut(id) else { return };
        let (hca, waiters) = (region.key.hca, std::mem::take(&mut region.waiters));
        let error = match failure.kind {
            FailureKind::Invalid => EngineError::BadArgument { what: "ranges", problem: failure.message.clone() },
            _ => error_of(failure),
        };
        self.region_gone(id);
        self.tell_waiters(waiters, Some(&error));
        if failure.kind == FailureKind::Lost {
            self.hca_gone(hca, failure.message.clone());
        }
    }

    /// Gives up idle regions of the HCA, whoever's, and lets `id` wait until they are gone. False when nobody waits for
    /// it, there are none, or it was tried already.
    fn starve_region(&mut self, id: RegionId, failure: &Failure) -> bool {
        let Some(region) = self.regions.get_mut(id).filter(|r| r.holders > 0 && !r.retried && r.found) else {
            return false;
        };
        region.retried = true;
        let hca = failure.hca.unwrap_or(region.key.hca);
        let mut waits_for = self.give_up_idle_on(hca);
        if waits_for.is_empty() {
            waits_for.extend(self.give_up_ready_on(hca));
        }
        if waits_for.is_empty() {
            return false;
        }
        if let Some(region) = self.regions.get_mut(id) {
            region.stage = RegionStage::Waiting;
        }
        self.starved.insert(Starved::Region(id), waits_for);
        true
    }

    /// Ends all idle regions of an HCA; gives those and the ones that are leaving already.
    pub(super) fn give_up_idle_on(&mut self, hca: HcaIndex) -> BTreeSet<Awaited> {
        let on_it = self.regions.iter().filter(|(_, region)| region.key.hca == hca);
        let going: Vec<(RegionId, bool)> = on_it
            .filter(|(_, region)| region.idle.is_some() || region.is_leaving())
            .map(|(id, region)| (id, region.idle.is_some()))
            .collect();
        for (id, _) in going.iter().filter(|(_, idle)| *idle) {
            self.counters.regions_evicted += 1;
            self.end_region(*id);
        }
        going.into_iter().map(|(id, _)| Awaited::Region(id)).collect()
    }

    /// Gives up the buffer that lay ready for longest with a registration on the HCA.
    fn give_up_ready_on(&mut self, hca: HcaIndex) -> Option<Awaited> {
        let on_it = |a: &Allocation| a.stage == Stage::Ready && a.registrations.iter().any(|r| r.hca == hca);
        let ready = self.allocations.iter().filter(|(_, a)| on_it(a)).map(|(id, a)| (a.since, *id)).min();
        let (_, id) = ready?;
        self.counters.idle_dropped += 1;
        self.give_up(id);
        Some(Awaited::Allocation(id))
    }

    /// Tries a starved region again.
    pub(super) fn feed_region(&mut self, id: RegionId) {
        if self.regions.get(id).is_some_and(|region| region.stage == RegionStage::Waiting) {
            self.register_region(id);
        }
    }

    /// One holder less; without any it rests, to be found again, unless it cannot be.
    pub(super) fn let_go_of_region(&mut self, id: RegionId) {
        let Some(region) = self.regions.get_mut(id) else { return };
        region.holders -= 1;
        if region.holders > 0 {
            return;
        }
        match region.stage {
            RegionStage::Live => self.rest_region(id),
            // It would be made for nobody.
            RegionStage::Waiting => self.end_region(id),
            _ => {}
        }
    }

    fn rest_region(&mut self, id: RegionId) {
        // It may rest already, or be on its way out, by what those who waited for it did.
        let rests = |region: &&Region| region.stage == RegionStage::Live && region.idle.is_none();
        let Some(region) = self.regions.get(id).filter(rests) else { return };
        let usable = region.found && self.host.usable_hca(region.key.hca).is_ok() && !self.shutting_down;
        let (tenant, len_bytes) = (region.tenant, region.len_bytes());
        if !usable || self.tenants.get(&tenant).is_none_or(|tenant| !tenant.is_alive()) {
            return self.end_region(id);
        }
        self.idle_clock += 1;
        let place = self.idle_clock;
        let at = self.now.saturating_add(nanos(self.settings.cache.idle));
        let Some(region) = self.regions.get_mut(id) else { return };
        region.idle = Some(place);
        let Some(entry) = self.tenants.get_mut(&tenant) else { return };
        entry.idle_regions.insert(place, (id, at));
        entry.idle_bytes += len_bytes;
        if !std::mem::replace(&mut entry.idle_timer, true) {
            self.deadlines.insert((at, Deadline::IdleRegions(tenant)));
        }
    }

    /// Keeps what lies idle within its bounds, the longest unused going first.
    pub(super) fn trim_idle(&mut self, tenant: TenantId) {
        let cache = &self.settings.cache;
        let (most, most_bytes) = (cache.max_idle_regions as usize, cache.max_idle_bytes);
        while let Some(entry) = self.tenants.get(&tenant) {
            if entry.idle_regions.len() <= most && entry.idle_bytes <= most_bytes {
                return;
            }
            self.evict_oldest(tenant, 1);
        }
    }

    fn evict_oldest(&mut self, tenant: TenantId, count: usize) {
        let Some(entry) = self.tenants.get(&tenant) else { return };
        let oldest: Vec<RegionId> = entry.idle_regions.values().take(count).map(|(id, _)| *id).collect();
        self.counters.regions_evicted += oldest.len() as u64;
        oldest.into_iter().for_each(|id| self.end_region(id));
    }

    /// Regions of a tenant may have been idle for long.
    pub(super) fn regions_idle(&mut self, tenant: TenantId) {
        while let Some(entry) = self.tenants.get_mut(&tenant) {
            entry.idle_timer = false;
            let Some((id, at)) = entry.idle_regions.values().next().copied() else { return };
            if at > self.now {
                entry.idle_timer = true;
                self.deadlines.insert((at, Deadline::IdleRegions(tenant)));
                return;
            }
            self.counters.regions_evicted += 1;
            self.end_region(id);
        }
    }

    /// Nobody is left to use what a tenant has idle.
    pub(super) fn end_idle_regions(&mut self, tenant: TenantId) {
        self.evict_oldest(tenant, usize::MAX);
    }

    /// No region of an HCA is of use any more.
    pub(super) fn lose_regions(&mut self, hca: HcaIndex) {
        let on_it: Vec<RegionId> = self.regions.iter().filter(|(_, r)| r.key.hca == hca).map(|(id, _)| id).collect();
        on_it.into_iter().for_each(|id| self.end_region(id));
    }

    /// Ends a region, whoever holds it: nobody finds it, its slot takes no more requests, and once those that it took
    /// are done no HCA reaches its memory.
    pub(super) fn end_region(&mut self, id: RegionId) {
        self.regions.lose(id);
        let Some(region) = self.regions.get_mut(id) else { return };
        let (tenant, stage, len_bytes) = (region.tenant, region.stage, region.len_bytes());
        let (idle, slot, hca) = (region.idle.take(), region.slot, region.key.hca);
        if let (Some(place), Some(entry)) = (idle, self.tenants.get_mut(&tenant)) {
            entry.idle_regions.remove(&place);
            entry.idle_bytes -= len_bytes;
        }
        match (stage, slot) {
            (RegionStage::Live, Some((slot, _))) => self.quiesce_region(id, tenant, slot),
            (RegionStage::Waiting, _) => {
                self.starved.remove(&Starved::Region(id));
                let waiters = self.regions.get_mut(id).map(|r| std::mem::take(&mut r.waiters)).unwrap_or_default();
                let error = self.host.usable_hca(hca).err().unwrap_or(EngineError::Cancelled);
                self.region_gone(id);
                self.tell_waiters(waiters, Some(&error));
            }
            // Being made: ended when that is done. On its way out: nothing to add.
            _ => {}
        }
    }

    fn quiesce_region(&mut self, id: RegionId, tenant: TenantId, slot: crate::ids::SlotId) {
        let Some(entry) = self.tenants.get_mut(&tenant) else { return self.unexpected() };
        let generation = entry.slots.retire(slot);
        entry.leaving_regions += 1;
        let drain_at = self.at(self.settings.drain_ns, Deadline::DrainRegion(id));
        let Some(region) = self.regions.get_mut(id) else { return self.unexpected() };
        region.stage = RegionStage::Quiescing;
        region.slot = Some((slot, generation));
        region.drain_at = drain_at;
        self.effect(Effect::Retire { tenant, slots: vec![(slot, generation)] });
        self.effect(Effect::QuiesceRegion { tenant, region: id, slot });
    }

    pub(super) fn region_quiesced(&mut self, id: RegionId) {
        let Some(region) = self.regions.get_mut(id).filter(|r| r.stage == RegionStage::Quiescing) else {
            return self.unexpected();
        };
        region.stage = RegionStage::Deregistering;
        let overdue = region.drain_at;
        self.deadlines.remove(&(overdue, Deadline::DrainRegion(id)));
        self.effect(Effect::Start(Job::DeregisterRegion { region: id }));
    }

    pub(super) fn region_drain_overdue(&mut self, id: RegionId) {
        let Some(region) = self.regions.get(id).filter(|r| r.stage == RegionStage::Quiescing) else { return };
        let (tenant, slot) = (region.tenant, region.slot);
        self.counters.drains_overdue += 1;
        self.effect(Effect::FlushUsers { tenant, slots: slot.into_iter().map(|(slot, _)| slot).collect() });
    }

    pub(super) fn region_deregistered(&mut self, id: RegionId, result: Result<(), Failure>) {
        let Some(region) = self.regions.get(id).filter(|r| r.stage == RegionStage::Deregistering) else {
            return self.unexpected();
        };
        let RegionKey { hca, source, .. } = region.key;
        if let Some(tenant) = self.tenants.get_mut(&region.tenant) {
            tenant.leaving_regions -= 1;
        }
        self.counters.regions_deregistered += 1;
        if let Err(failure) = &result {
            self.counters.deregistration_failures += 1;
            self.taint(source, failure);
        }
        self.region_gone(id);
        if let Some(failure) = result.err().filter(|failure| failure.kind == FailureKind::Lost) {
            self.hca_gone(hca, failure.message);
        }
    }

    /// A region of the memory could not be ended: the HCA may reach it until the daemon ends.
    fn taint(&mut self, source: Source, failure: &Failure) {
        match source {
            Source::Leased(id) => {
                if let Some(allocation) = self.allocations.get_mut(&id) {
                    allocation.tainted = true;
                    self.uncount(id);
                }
            }
            // An HCA that is gone reaches nothing.
            Source::Adopted(id) if failure.kind != FailureKind::Lost => {
                if let Some(adopted) = self.adopted.get_mut(&id) {
                    adopted.tainted.get_or_insert_with(|| failure.message.clone());
                }
            }
            Source::Adopted(_) => {}
        }
    }

    /// Nothing is left of a region: its slot is free, and so may be what waited for it.
    fn region_gone(&mut self, id: RegionId) {
        let Some(region) = self.regions.remove(id) else { return };
        let tenant = region.tenant;
        if let Some(entry) = self.tenants.get_mut(&tenant) {
            entry.regions -= 1;
            entry.waiting_regions.retain(|waiting| *waiting != id);
            if let Some((slot, _)) = region.slot {
                entry.slots.give_back(slot);
                entry.cached_slots -= 1;
            }
        }
        self.retry_starved(Awaited::Region(id));
        match region.key.source {
            Source::Adopted(memory) => {
                if let Some(adopted) = self.adopted.get_mut(&memory) {
                    adopted.regions -= 1;
                }
                self.close_memory(memory);
            }
            Source::Leased(allocation) => {
                if let Some(entry) = self.allocations.get_mut(&allocation) {
                    entry.regions -= 1;
                }
                self.deregister_if_quiet(allocation);
            }
        }
        self.start_waiting_regions(tenant);
        self.settle_tenant(tenant);
    }
}
