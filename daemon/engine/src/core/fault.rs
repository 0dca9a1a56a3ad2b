//! Devices that are lost: what was on them, and who is told.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::allocation::Stage;
use super::host::loss;
use super::{AllocationId, CallId, Change, Core, Effect, GpuIndex, HcaIndex, Place, TenantId};
use crate::error::EngineError;
use crate::ids::{LeaseId, QueuePairId, SlotId};

impl Core {
    /// Ends a call that nobody waits for any more.
    pub(super) fn cancel(&mut self, call: CallId) {
        if self.waiting.contains_key(&call) {
            return self.stop_waiting(call, EngineError::Cancelled);
        }
        if self.cancel_batch(call) {
            return;
        }
        // A queue pair being made for it is destroyed when it is there; other calls end by themselves.
        let making: Option<QueuePairId> =
            self.queue_pairs.iter().find(|(_, entry)| entry.is_made_for(call)).map(|(id, _)| *id);
        if let Some(queue_pair) = making {
            self.end_queue_pair(queue_pair);
        }
    }

    /// Kinds of calls that are under way on memory of a GPU, and on how many pieces.
    pub(crate) fn under_way_on(&self, index: GpuIndex) -> BTreeMap<&'static str, u32> {
        let mut calls = BTreeMap::new();
        for allocation in self.allocations.values().filter(|allocation| allocation.place == Place::Gpu(index)) {
            let call = match allocation.stage {
                Stage::Allocating => "allocate",
                Stage::Registering | Stage::Remaking => "register",
                Stage::Quiescing => "requests of queue pairs",
                Stage::Deregistering => "deregister",
                Stage::Scrubbing => "scrub",
                Stage::Freeing => "free",
                Stage::Clean | Stage::Ready | Stage::Leased | Stage::Revoked | Stage::Starved => continue,
            };
            *calls.entry(call).or_insert(0) += 1;
        }
        calls
    }

    pub(super) fn gpu_lost(&mut self, index: GpuIndex, message: String) {
        let Some(gpu) = self.host.gpu_mut(index) else { return self.unexpected() };
        if gpu.lost.is_some() {
            return;
        }
        let uuid = &gpu.planned.uuid;
        // An error of a call says it too.
        let message = message.strip_prefix(&format!("gpu {uuid} is lost: ")).map(str::to_owned).unwrap_or(message);
        let cause = loss(uuid, &message);
        gpu.lost = Some(message);
        self.counters.gpus_lost += 1;
        self.fail_waiters(|place, _| place == Place::Gpu(index), &cause);
        let on_it: Vec<(AllocationId, Option<LeaseId>)> = self
            .allocations
            .iter()
            .filter(|(_, allocation)| allocation.place == Place::Gpu(index))
            .map(|(id, allocation)| (*id, allocation.lease))
            .collect();
        for (allocation, lease) in on_it {
            match lease {
                Some(lease) => self.revoke(lease, &cause),
                None => self.give_up(allocation),
            }
        }
    }

    pub(super) fn hca_gone(&mut self, index: HcaIndex, message: String) {
        let Some(hca) = self.host.hcas.get_mut(usize::from(index.0)) else { return self.unexpected() };
        if hca.gone.is_some() {
            return;
        }
        let name = Arc::clone(&hca.name);
        let message = message.strip_prefix(&format!("{name} is gone: ")).map(str::to_owned).unwrap_or(message);
        let cause = format!("hca {name} is gone: {message}");
        hca.gone = Some(message);
        self.counters.hcas_lost += 1;
        self.effect(Effect::NicDown { hca: name, port_num: 0 });
        self.fail_waiters(|_, hcas| hcas.contains(&index), &cause);
        let on_it: Vec<(AllocationId, Option<LeaseId>)> = self
            .allocations
            .iter()
            .filter(|(_, a)| a.owner.as_ref().is_some_and(|owner| owner.key.hcas.contains(&index)))
            .map(|(id, allocation)| (*id, allocation.lease))
            .collect();
        for (allocation, lease) in on_it {
            match lease {
                Some(lease) => self.lose_registration(lease, allocation, index, &cause),
                None => self.give_up(allocation),
            }
        }
        self.lose_regions(index);
        let queue_pairs: Vec<QueuePairId> =
            self.queue_pairs.iter().filter(|(_, entry)| entry.hca == index).map(|(id, _)| *id).collect();
        for queue_pair in queue_pairs {
            self.queue_pair_failed(queue_pair, cause.clone());
        }
        self.effect(Effect::ForgetHca { hca: index });
    }

    /// A lease goes on with what registrations it has left; without any it is revoked.
    fn lose_registration(&mut self, lease: LeaseId, id: AllocationId, hca: HcaIndex, cause: &str) {
        let Some(allocation) = self.allocations.get_mut(&id) else { return };
        match allocation.stage {
            Stage::Leased => {}
            // The job that makes its registrations anew makes all or none, and knows nothing of this.
            Stage::Remaking => return self.revoke(lease, cause),
            _ => return,
        }
        let Some(at) = allocation.registrations.iter().position(|r| r.hca == hca) else { return };
        if allocation.registrations.len() == 1 {
            return self.revoke(lease, cause);
        }
        let slot = allocation.registrations.remove(at).slot;
        let generation = self.generation();
        let Some(lease_entry) = self.leases.get_mut(&lease) else { return self.unexpected() };
        lease_entry.generation = generation;
        let tenant = lease_entry.tenant;
        self.record_lease(lease);
        let Some(entry) = self.tenants.get_mut(&tenant) else { return self.unexpected() };
        let slot_generation = entry.slots.retire(slot);
        entry.shedding += 1;
        self.effect(Effect::Retire { tenant, slots: vec![(slot, slot_generation)] });
        self.effect(Effect::Shed { tenant, allocation: id, hca, slot });
        if self.watched
            && let Some(info) = self.lease_info(lease)
        {
            self.effect(Effect::Tell { tenant, change: Change::Rekeyed(info) });
        }
    }

    pub(super) fn shed(&mut self, tenant: TenantId, slot: SlotId) {
        let Some(entry) = self.tenants.get_mut(&tenant).filter(|entry| entry.shedding > 0) else {
            return self.unexpected();
        };
        entry.shedding -= 1;
        entry.slots.give_back(slot);
        self.counters.deregistrations += 1;
        self.feed(tenant);
        self.settle_tenant(tenant);
    }

    pub(super) fn port_down(&mut self, index: HcaIndex, port_num: u8) {
        let Some(hca) = self.host.hca(index) else { return self.unexpected() };
        let hca = Arc::clone(&hca.name);
        self.effect(Effect::NicDown { hca, port_num });
    }

    /// Fails the acquires that wait at pools of lost devices.
    fn fail_waiters(&mut self, lost: impl Fn(Place, &[HcaIndex]) -> bool, cause: &str) {
        let calls: Vec<CallId> =
            self.waiting.iter().filter(|(_, (_, key))| lost(key.place, &key.hcas)).map(|(call, _)| *call).collect();
        for call in calls {
            self.stop_waiting(call, EngineError::DeviceLost { problem: cause.to_owned() });
        }
    }
}
