//! Jobs that fail: what is given up to try once more, and who is told when that does not help.

use std::collections::BTreeSet;

use super::allocation::{Owner, Stage};
use super::{AllocationId, Core, Effect, Failure, FailureKind, Job, Place, RegionId};
use crate::error::EngineError;

/// What waits until others have made room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Starved {
    Allocation(AllocationId),
    Region(RegionId),
}

/// What makes room by its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Awaited {
    Allocation(AllocationId),
    Region(RegionId),
}

impl Core {
    /// There is no memory behind it: once idle memory has made room it is tried again, else it is forgotten.
    pub(super) fn allocation_failed(&mut self, id: AllocationId, failure: &Failure) {
        self.counters.allocation_failures += 1;
        // Idle memory has descriptors too.
        let short = matches!(failure.kind, FailureKind::OutOfMemory | FailureKind::OutOfDescriptors);
        if short && self.starve(id, failure) {
            return;
        }
        let kept = self.drop_failed(id, failure);
        let Some(allocation) = self.allocations.remove(&id) else { return };
        self.forget_allocation(&allocation);
        match (&allocation.owner, allocation.place) {
            (Some(owner), _) if kept => self.growth_failed(owner, allocation.ahead, failure),
            (None, Place::Gpu(gpu)) => self.clean_failed(gpu, allocation.len_bytes),
            _ => {}
        }
        self.after_freed(id, allocation.owner.as_ref().map(|owner| owner.tenant));
    }

    /// Gives up idle memory or registrations on the device that ran out, and lets `id` wait until they are freed.
    /// False when there is nothing to give up, nobody waits, or it was tried already.
    pub(super) fn starve(&mut self, id: AllocationId, failure: &Failure) -> bool {
        let Some(allocation) = self.allocations.get_mut(&id) else { return false };
        if allocation.ahead || allocation.retried || !allocation.kept {
            return false;
        }
        allocation.retried = true;
        let (place, needed) = (allocation.place, allocation.len_bytes);
        let mut waits_for = BTreeSet::new();
        let mut bytes = 0;
        let mut idle = Vec::new();
        for (other, a) in self.allocations.iter().filter(|(other, a)| **other != id && a.is_on(failure, place)) {
            if a.is_leaving() && a.stage != Stage::Starved {
                waits_for.insert(Awaited::Allocation(*other));
                bytes += a.len_bytes;
            } else if a.stage == Stage::Clean || a.stage == Stage::Ready {
                idle.push((a.since, *other, a.len_bytes));
            }
        }
        idle.sort_unstable();
        for (_, other, len_bytes) in idle {
            if bytes >= needed {
                break;
            }
            bytes += len_bytes;
            waits_for.insert(Awaited::Allocation(other));
            self.counters.idle_dropped += 1;
            self.give_up(other);
        }
        if let Some(hca) = failure.hca {
            waits_for.extend(self.give_up_idle_on(hca));
        }
        if waits_for.is_empty() {
            return false;
        }
        if let Some(allocation) = self.allocations.get_mut(&id) {
            allocation.stage = Stage::Starved;
        }
        self.starved.insert(Starved::Allocation(id), waits_for);
        true
    }

    /// Tries again what waited for `freed` last of all.
    pub(super) fn retry_starved(&mut self, freed: Awaited) {
        let mut fed = Vec::new();
        for (id, waits_for) in &mut self.starved {
            if waits_for.remove(&freed) && waits_for.is_empty() {
                fed.push(*id);
            }
        }
        for fed in fed {
            self.starved.remove(&fed);
            let id = match fed {
                Starved::Allocation(id) => id,
                Starved::Region(id) => {
                    self.feed_region(id);
                    continue;
                }
            };
            let Some(allocation) = self.allocations.get_mut(&id) else { continue };
            if allocation.registrations.is_empty() {
                allocation.stage = Stage::Allocating;
                let (place, len_bytes) = (allocation.place, allocation.len_bytes);
                self.effect(Effect::Start(Job::Allocate { allocation: id, place, len_bytes, ahead: false }));
            } else {
                self.register(id);
            }
        }
    }

    /// No registration was made. The memory is freed; a waiter fails unless more is coming.
    pub(super) fn registration_failed(&mut self, id: AllocationId, failure: &Failure) {
        self.counters.registration_failures += 1;
        if matches!(failure.kind, FailureKind::Exhausted | FailureKind::OutOfMemory) && self.starve(id, failure) {
            return;
        }
        let kept = self.drop_failed(id, failure);
        let Some(allocation) = self.allocations.get(&id) else { return };
        let (owner, ahead) = (allocation.owner.clone(), allocation.ahead);
        self.release_slots(id);
        self.start_freeing(id);
        if let Some(owner) = owner.filter(|_| kept) {
            self.growth_failed(&owner, ahead, failure);
        }
    }

    /// Takes what failed off its pool's account; true when the pool still counted on it.
    pub(super) fn drop_failed(&mut self, id: AllocationId, failure: &Failure) -> bool {
        let kept = self.allocations.get(&id).is_some_and(|a| a.kept);
        self.note_lost(id, failure);
        self.uncount(id);
        kept
    }

    /// A buffer that was on its way will not come.
    pub(super) fn growth_failed(&mut self, owner: &Owner, ahead: bool, failure: &Failure) {
        if ahead {
            self.block_pool(owner.tenant, &owner.key);
        } else {
            let error = match failure.kind {
                FailureKind::OutOfMemory => self.out_of_memory(owner, failure),
                _ => error_of(failure),
            };
            self.fail_one_unserved(owner.tenant, &owner.key, error);
        }
        // Whoever came to count on one made ahead, or on one that was to come back, gets one made for it.
        self.balance(owner.tenant, &owner.key);
    }

    /// What a tenant is told of memory that ran out: what there is of it in its own hands, in those of others together,
    /// and in pools, which have been given up as far as they could be.
    fn out_of_memory(&self, owner: &Owner, failure: &Failure) -> EngineError {
        let (mut own, mut others, mut pooled) = (0, 0, 0);
        for allocation in self.allocations.values().filter(|allocation| allocation.place == owner.key.place) {
            let holder = allocation.lease.as_ref().and(allocation.owner.as_ref());
            let of = match (holder, allocation.stage) {
                (Some(holder), _) if holder.tenant == owner.tenant => &mut own,
                (Some(_), _) => &mut others,
                (None, Stage::Allocating | Stage::Starved) => continue,
                (None, _) => &mut pooled,
            };
            *of += allocation.len_bytes;
        }
        let problem = format!(
            "{}; leases of this tenant hold {own} bytes there, those of others {others}, pools {pooled}; \
             the rest is in use outside of gdrd, see 'gdrctl buffers --by-gpu'",
            failure.message
        );
        EngineError::OutOfMemory { problem }
    }

    /// A job found its device lost: so is everything else on it.
    pub(super) fn note_lost(&mut self, id: AllocationId, failure: &Failure) {
        if failure.kind != FailureKind::Lost {
            return;
        }
        let place = self.allocations.get(&id).map(|a| a.place);
        match (failure.hca, place) {
            (Some(hca), _) => self.hca_gone(hca, failure.message.clone()),
            (None, Some(Place::Gpu(gpu))) => self.gpu_lost(gpu, failure.message.clone()),
            (None, _) => {}
        }
    }
}

/// The error that a caller gets for a failed job.
pub(crate) fn error_of(failure: &Failure) -> EngineError {
    let problem = failure.message.clone();
    match failure.kind {
        FailureKind::OutOfMemory => EngineError::OutOfMemory { problem },
        FailureKind::OutOfDescriptors => EngineError::OutOfDescriptors { problem },
        FailureKind::PortsDown => EngineError::PortsDown { problem },
        FailureKind::Exhausted => EngineError::HcaExhausted { problem },
        FailureKind::Unsupported => EngineError::Unsupported { problem },
        FailureKind::Lost => EngineError::DeviceLost { problem },
        FailureKind::Unreachable => EngineError::PeerUnreachable { problem },
        FailureKind::Invalid | FailureKind::Driver => EngineError::Driver { problem },
        FailureKind::Bug => EngineError::Internal { problem },
    }
}
