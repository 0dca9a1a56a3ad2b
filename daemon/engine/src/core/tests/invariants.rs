//! What must hold after every input, whatever came before.

use std::collections::{BTreeMap, BTreeSet};

use super::hardware::Hardware;
use crate::core::Core;
use crate::core::allocation::Stage;
use crate::core::region::{Region, RegionStage, Source};

pub(super) fn check(core: &Core, hardware: &Hardware) {
    assert_eq!(core.counters.unexpected_inputs, 0, "an input fits no state");
    leases_and_allocations_match(core);
    accounts_match(core);
    pools_match(core);
    clean_pools_match(core);
    nothing_is_left_over(core);
    what_is_kept_is_needed(core);
    waiting_matches(core);
    cache_matches(core, hardware);
    nothing_is_on_a_lost_hca(core);
    if hardware.pending.is_empty() {
        assert!(core.waiting.is_empty(), "acquires wait and nothing is under way: {:?}", core.waiting);
        assert!(core.starved.is_empty());
        assert!(core.batches.is_empty(), "registrations wait and nothing is under way: {:?}", core.batches);
        let live = |r: &Region| r.stage == RegionStage::Live;
        assert!(core.regions.iter().all(|(_, r)| live(r)), "a region is stuck: {:?}", core.regions);
        let at_rest = |stage| matches!(stage, Stage::Clean | Stage::Ready | Stage::Leased | Stage::Revoked);
        assert!(core.allocations.values().all(|a| at_rest(a.stage)), "memory is stuck: {:?}", core.allocations);
    }
}

fn leases_and_allocations_match(core: &Core) {
    let mut seen = BTreeSet::new();
    for (id, lease) in core.leases.iter() {
        assert!(seen.insert(lease.allocation), "one allocation in two leases");
        let allocation = &core.allocations[&lease.allocation];
        assert_eq!(allocation.lease, Some(*id));
        assert!(allocation.is_of(lease.tenant));
        for session in lease.holders.sessions() {
            assert!(core.sessions[&session].holds.contains(id));
            assert_eq!(core.sessions[&session].tenant, lease.tenant);
        }
        assert_eq!(lease.holders.is_empty(), lease.expires_at.is_some(), "a lease without holders has a deadline");
    }
    for (id, session) in &core.sessions {
        for lease in session.holds.iter() {
            assert!(core.leases[&lease].holders.contains(*id));
        }
    }
    for allocation in core.allocations.values() {
        assert!(allocation.lease.is_none_or(|lease| core.leases.contains_key(&lease)));
        assert_eq!(
            matches!(allocation.stage, Stage::Leased | Stage::Remaking),
            (allocation.lease.is_some() && !is_revoked(core, allocation.lease)) || allocation.stage == Stage::Remaking
        );
    }
}

fn is_revoked(core: &Core, lease: Option<crate::ids::LeaseId>) -> bool {
    lease.is_some_and(|lease| core.leases[&lease].is_revoked())
}

fn accounts_match(core: &Core) {
    for (id, tenant) in &core.tenants {
        let owned = || core.allocations.values().filter(|a| a.is_of(*id));
        assert_eq!(tenant.owned_bytes, owned().map(|a| a.len_bytes).sum::<u64>());
        assert_eq!(tenant.allocations as usize, owned().count());
        assert!(tenant.owned_bytes <= tenant.quota.max_bytes, "a tenant owns more than its quota");
        let slots: Vec<_> = owned().flat_map(|a| a.registrations.iter().map(|r| r.slot)).collect();
        assert_eq!(slots.iter().collect::<BTreeSet<_>>().len(), slots.len(), "one slot for two registrations");
        assert_eq!(tenant.lease_slots() as usize, slots.len() + tenant.shedding as usize);
        let leases: Vec<_> = core.leases.values().filter(|lease| lease.tenant == *id).collect();
        assert_eq!(tenant.leases as usize, leases.len());
        let waiting = || core.waiting.values().filter(|(owner, _)| owner == id).map(|(_, key)| key);
        let promised = leases.iter().map(|lease| &lease.key).chain(waiting());
        assert_eq!(tenant.promised_bytes, promised.clone().map(|key| key.len_bytes).sum::<u64>());
        assert_eq!(tenant.promised_registrations, promised.map(|key| key.registrations()).sum::<u32>());
        assert_eq!(tenant.sessions as usize, core.sessions.values().filter(|s| s.tenant == *id).count());
        assert_eq!(tenant.queue_pairs as usize, core.queue_pairs.values().filter(|q| q.tenant == *id).count());
    }
}

fn pools_match(core: &Core) {
    for (id, tenant) in &core.tenants {
        for (key, pool) in &tenant.pools {
            let of = || {
                core.allocations
                    .iter()
                    .filter(|(_, a)| a.owner.as_ref().is_some_and(|o| o.tenant == *id && o.key == *key))
            };
            let ready: BTreeSet<_> = of().filter(|(_, a)| a.stage == Stage::Ready).map(|(id, _)| *id).collect();
            assert_eq!(ready, pool.ready.iter().copied().collect());
            assert_eq!(ready.len(), pool.ready.len());
            assert_eq!(pool.coming as usize, of().filter(|(_, a)| a.kept).count());
            assert_eq!(pool.leased as usize, of().filter(|(_, a)| a.lease.is_some()).count());
            assert!(pool.ready.is_empty() || pool.waiters.is_empty(), "acquires wait beside ready buffers");
            assert!(pool.ready.is_empty() || pool.has_timer(), "ready buffers would never age");
        }
        let pooled: usize = tenant.pools.values().map(|pool| pool.waiters.len()).sum();
        assert_eq!(pooled, core.waiting.values().filter(|(owner, _)| owner == id).count());
    }
    for allocation in core.allocations.values().filter(|a| a.kept || a.stage == Stage::Ready) {
        if let Some(owner) = &allocation.owner {
            assert!(core.tenants[&owner.tenant].pools.contains_key(&owner.key), "a pool in use is forgotten");
        }
    }
}

fn clean_pools_match(core: &Core) {
    let mut bytes = BTreeMap::new();
    for ((gpu, len_bytes), pool) in &core.clean {
        let of = || {
            core.allocations
                .values()
                .filter(|a| a.owner.is_none() && a.len_bytes == *len_bytes && a.place == crate::core::Place::Gpu(*gpu))
        };
        assert_eq!(pool.ready.len(), of().filter(|a| a.stage == Stage::Clean).count());
        assert_eq!(pool.coming as usize, of().filter(|a| a.kept).count());
        assert!(pool.ready.is_empty() || pool.has_timer(), "clean memory would never age");
        *bytes.entry(*gpu).or_insert(0) += len_bytes * (pool.ready.len() as u64 + u64::from(pool.coming));
    }
    assert!(bytes.values().all(|bytes| *bytes <= core.settings.pool.clean_max_bytes));
}

fn nothing_is_left_over(core: &Core) {
    for (id, tenant) in &core.tenants {
        assert!(tenant.is_alive() || !core.allocations.values().any(|a| a.is_kept_for(*id)), "kept for nobody");
        let used = tenant.is_alive() || tenant.allocations > 0 || tenant.queue_pairs > 0 || tenant.shedding > 0;
        let used = used || tenant.memories > 0 || tenant.regions > 0;
        assert!(used, "a tenant is remembered for nothing");
        assert_eq!(tenant.ending, !tenant.is_alive());
    }
    assert_eq!(core.tenants.len(), core.tenant_ids.len());
}

/// Names of living things alone, each of one thing.
fn what_is_kept_is_needed(core: &Core) {
    let of_memory = core.allocations.values().filter_map(|a| a.names).flatten();
    let of_sessions = core.sessions.values().filter_map(|session| session.socket);
    let of_tenants = core.tenants.values().filter_map(|tenant| tenant.page);
    let of_rings = core.queue_pairs.values().filter_map(|entry| entry.ring);
    let names: Vec<_> = of_memory.chain(of_sessions).chain(of_tenants).chain(of_rings).collect();
    assert_eq!(names.iter().copied().collect::<BTreeSet<_>>().len(), names.len(), "one name for two things");
    assert_eq!(names.into_iter().collect::<BTreeSet<_>>(), *core.names());
}

fn waiting_matches(core: &Core) {
    for (id, session) in &core.sessions {
        for call in &session.waiting {
            let (tenant, key) = &core.waiting[call];
            let pool = &core.tenants[tenant].pools[key];
            assert!(pool.waiters.iter().any(|waiter| waiter.call == *call && waiter.session == *id));
        }
    }
    assert_eq!(core.waiting.len(), core.sessions.values().map(|session| session.waiting.len()).sum::<usize>());
}

fn cache_matches(core: &Core, hardware: &Hardware) {
    for (id, tenant) in &core.tenants {
        let of = || core.regions.iter().filter(|(_, region)| region.tenant == *id);
        assert_eq!(tenant.regions as usize, of().count());
        assert_eq!(tenant.leaving_regions as usize, of().filter(|(_, r)| r.is_leaving()).count());
        assert_eq!(tenant.cached_slots as usize, of().filter(|(_, r)| r.slot.is_some()).count());
        assert!(tenant.cached_slots <= core.settings.cache.max_regions);
        let idle: BTreeMap<_, _> = of().filter_map(|(id, r)| r.idle.map(|place| (place, id))).collect();
        assert_eq!(idle, tenant.idle_regions.iter().map(|(place, (id, _))| (*place, *id)).collect());
        assert_eq!(tenant.idle_bytes, of().filter(|(_, r)| r.idle.is_some()).map(|(_, r)| r.len_bytes()).sum::<u64>());
        assert!(tenant.idle_bytes <= core.settings.cache.max_idle_bytes);
        assert!(idle.is_empty() || tenant.idle_timer, "idle regions would never age");
        let adopted = || core.adopted.values().filter(|adopted| adopted.tenant == *id);
        assert_eq!(tenant.adopted_bytes, adopted().map(|adopted| adopted.len_bytes).sum::<u64>());
        assert_eq!(tenant.memories as usize, adopted().count());
        assert!(tenant.adopted_bytes + tenant.promised_bytes <= tenant.quota.max_bytes, "more than the quota");
    }
    for (id, region) in core.regions.iter() {
        let held = core.registrations.values().flat_map(|registration| &registration.regions);
        assert_eq!(region.holders as usize, held.filter(|held| **held == id).count(), "{id:?} {region:?}");
        assert_eq!(region.idle.is_some(), region.stage == RegionStage::Live && region.holders == 0, "{region:?}");
        assert!(region.idle.is_none() || region.found, "idle and never found");
        assert_eq!(core.regions.covering(region.key, &region.range) == Some(id), region.found);
        if matches!(region.stage, RegionStage::Live | RegionStage::Quiescing) {
            assert!(hardware.regions.contains_key(&id));
        }
    }
    for (id, adopted) in &core.adopted {
        let of = core.regions.iter().filter(|(_, region)| region.key.source == Source::Adopted(*id)).count();
        assert_eq!(adopted.regions as usize, of);
        assert_eq!(core.sessions.get(&adopted.session).is_some_and(|s| s.memories.contains(id)), !adopted.ending);
    }
    for (id, allocation) in core.allocations.iter() {
        let of = core.regions.iter().filter(|(_, region)| region.key.source == Source::Leased(*id)).count();
        assert_eq!(allocation.regions as usize, of);
    }
    for (id, registration) in &core.registrations {
        assert!(core.sessions[&registration.session].registrations.contains(id));
        assert!(core.by_source[&registration.source].contains(id));
    }
    for session in core.sessions.values() {
        let parts = session.registrations.iter().map(|id| core.registrations[id].regions.len()).sum::<usize>();
        assert_eq!(session.parts, parts);
    }
    let held: usize = core.sessions.values().map(|session| session.registrations.len()).sum();
    assert_eq!(held, core.registrations.len());
    assert_eq!(core.by_source.values().map(BTreeSet::len).sum::<usize>(), held);
}

fn nothing_is_on_a_lost_hca(core: &Core) {
    let lost = |hca| core.host.usable_hca(hca).is_err();
    for (id, region) in core.regions.iter().filter(|(_, region)| region.stage == RegionStage::Live) {
        assert!(!lost(region.key.hca), "{id:?} is live on a lost hca");
    }
    for (id, allocation) in core.allocations.iter().filter(|(_, a)| matches!(a.stage, Stage::Leased | Stage::Ready)) {
        assert!(allocation.registrations.iter().all(|r| !lost(r.hca)), "{id:?} is registered with a lost hca");
    }
    for (id, entry) in core.queue_pairs.iter().filter(|(_, entry)| entry.is_shown() && lost(entry.hca)) {
        assert_eq!(entry.state, gdrd_hal::QueuePairState::Err, "queue pair {id} works on a lost hca");
    }
}
