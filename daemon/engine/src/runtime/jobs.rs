//! Jobs: driver calls, run on executor threads, each ending in one input.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};

use gdrd_hal::{Access, Endpoint, Hca, PortState, QueuePairConfig, QueuePairState};
use gdrd_ring::{BrokerRing, Geometry, INLINE_MAX_BYTES};
use rustix::event::{EventfdFlags, eventfd};

use super::Runtime;
use super::executor::Lane;
use super::failure::{of_broker, of_gpu, of_hca, of_kernel, of_landing};
use super::host_memory::{HostMemory, Pages};
use super::objects::{Bytes, Memory, Objects, QueuePairObjects, Registered, file_of, possible};
use super::regions::{self, NewRegion};
use crate::broker::{QueuePairLimits, QueuePairSetup};
use crate::core::{
    AllocationId, Failure, FailureKind, GpuIndex, HcaIndex, Input, Job, NewQueuePair, Place, TRANSLATED_PIECE_BYTES,
    TenantId,
};
use crate::ids::{QueuePairId, SlotId};
use crate::keep::Name;
use crate::queue_pair::QueuePairInfo;

/// From this length on a buffer is registered with all of its HCAs at once: below, starting threads costs more than it saves.
const PARALLEL_BYTES: u64 = 64 << 20;

/// What a job may block on.
pub(super) fn lane_of(job: &Job, objects: &Objects) -> Lane {
    match job {
        Job::Allocate { place: Place::Gpu(gpu), .. } => Lane::Gpu(*gpu),
        Job::Allocate { place: Place::Host(_), .. } => Lane::Host,
        Job::Register { targets, .. } => targets.first().map_or(Lane::Host, |(hca, _)| Lane::Hca(*hca)),
        Job::CreateQueuePair { new, .. } => Lane::Hca(new.hca),
        Job::Deregister { allocation } => {
            objects.memory(*allocation).map_or(Lane::Host, |memory| memory.first_hca().map_or(memory.lane, Lane::Hca))
        }
        Job::Scrub { allocation } | Job::Free { allocation } => {
            objects.memory(*allocation).map_or(Lane::Host, |memory| memory.lane)
        }
        Job::RegisterRegion { hca, .. } => Lane::Hca(*hca),
        Job::DeregisterRegion { region } => objects.region(*region).map_or(Lane::Host, |region| Lane::Hca(region.hca)),
        Job::CloseMemory { .. } => Lane::Host,
        Job::ConnectQueuePair { .. } => Lane::Fabric,
        Job::DestroyQueuePair { .. } => Lane::Unbounded,
    }
}

/// Its kind, for people.
pub(super) fn name_of(job: &Job) -> &'static str {
    match job {
        Job::Allocate { .. } => "allocate",
        Job::Register { .. } | Job::RegisterRegion { .. } => "register",
        Job::Deregister { .. } | Job::DeregisterRegion { .. } => "deregister",
        Job::Scrub { .. } => "scrub",
        Job::Free { .. } => "free",
        Job::CreateQueuePair { .. } => "create a queue pair",
        Job::ConnectQueuePair { .. } => "connect a queue pair",
        Job::CloseMemory { .. } => "close adopted memory",
        Job::DestroyQueuePair { .. } => "destroy a queue pair",
    }
}

/// Runs a job to its end. A backend that panics fails the job, not the thread.
pub(super) fn run(runtime: &Runtime, job: Job) -> Input {
    match job {
        Job::Allocate { allocation, place, len_bytes, ahead } => {
            Input::Allocated { allocation, result: guarded(|| allocate(runtime, allocation, place, len_bytes, ahead)) }
        }
        Job::Register { allocation, tenant, targets, access, keep } => Input::Registered {
            allocation,
            result: guarded(|| {
                let iovas = register(runtime, allocation, tenant, &targets, access)?;
                runtime.keep_memory(allocation, keep);
                Ok(iovas)
            }),
        },
        Job::Deregister { allocation } => {
            Input::Deregistered { allocation, result: guarded(|| deregister(runtime, allocation)) }
        }
        Job::Scrub { allocation } => Input::Scrubbed { allocation, result: guarded(|| scrub(runtime, allocation)) },
        Job::Free { allocation } => {
            let memory = runtime.objects.remove_memory(allocation);
            let names = memory.as_ref().and_then(|memory| memory.names());
            // What is freed has no registration left; what a panic leaves behind is the kernel's.
            let _ = guarded(|| {
                drop(memory);
                Ok(())
            });
            runtime.unkeep_memory(names);
            Input::Freed { allocation }
        }
        Job::CreateQueuePair { queue_pair, tenant, new, keep, .. } => Input::QueuePairCreated {
            queue_pair,
            result: guarded(|| create_queue_pair(runtime, queue_pair, tenant, &new, keep)),
        },
        Job::ConnectQueuePair { queue_pair, hca, remote } => {
            Input::QueuePairConnected { queue_pair, result: guarded(|| connect(runtime, queue_pair, hca, &remote)) }
        }
        Job::RegisterRegion { region, tenant, source, hca, range, access } => {
            let new = NewRegion { id: region, tenant, source, hca, range, access };
            let mut cost_ns = 0;
            let result = guarded(|| regions::register(runtime, &new, &mut cost_ns));
            Input::RegionRegistered { region, result, cost_ns }
        }
        Job::DeregisterRegion { region } => {
            Input::RegionDeregistered { region, result: guarded(|| regions::deregister(runtime, region)) }
        }
        Job::CloseMemory { memory } => {
            drop(runtime.objects.remove_adopted(memory));
            Input::MemoryClosed { memory }
        }
        // Not a job for a thread: the broker does it.
        Job::DestroyQueuePair { queue_pair } => Input::QueuePairDestroyed { queue_pair },
    }
}

fn guarded<T>(job: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    // What the job was working on is dropped or replaced whole, whatever state the panic left it in.
    catch_unwind(AssertUnwindSafe(job)).unwrap_or_else(|_| Err(bug("a backend panicked")))
}

pub(super) fn bug(message: &str) -> Failure {
    Failure { kind: FailureKind::Bug, hca: None, message: message.to_owned() }
}

fn allocate(
    runtime: &Runtime,
    allocation: AllocationId,
    place: Place,
    len_bytes: u64,
    ahead: bool,
) -> Result<(), Failure> {
    let (bytes, lane) = match place {
        Place::Gpu(gpu) => (allocate_on_gpu(runtime, gpu, len_bytes, ahead)?, Lane::Gpu(gpu)),
        Place::Host(node) => {
            let pages = Pages { node: runtime.own_node(node), huge: runtime.config.pool.host_huge_pages };
            let memory = HostMemory::allocate(len_bytes, pages).map_err(|error| of_kernel("allocate", &error))?;
            (Bytes::Host(memory), Lane::Host)
        }
    };
    runtime.objects.insert_memory(allocation, Memory::new(bytes, lane));
    Ok(())
}

fn allocate_on_gpu(runtime: &Runtime, gpu: GpuIndex, len_bytes: u64, ahead: bool) -> Result<Bytes, Failure> {
    let memory = runtime.gpu_memory.as_ref().ok_or_else(|| bug("gpu memory without a backend"))?;
    let uuid = {
        let state = runtime.state();
        state.core.host().gpu(gpu).map(|gpu| gpu.planned.uuid.clone()).ok_or_else(|| bug("unknown gpu"))?
    };
    if ahead {
        // Jobs come first: what nobody waits for leaves them the headroom.
        let usage = memory.usage(&uuid).map_err(|error| of_gpu(&error))?;
        let (free, pool) = (usage.free_bytes, &runtime.config.pool);
        let headroom = pool.headroom_bytes.max(usage.total_bytes / 100 * u64::from(pool.headroom_percent));
        if free < len_bytes.saturating_add(headroom) {
            let message = format!("{free} bytes are free on gpu {uuid}, {headroom} are kept for jobs");
            return Err(Failure { kind: FailureKind::OutOfMemory, hca: None, message });
        }
    }
    memory.allocate(&uuid, len_bytes).map(Bytes::Gpu).map_err(|error| of_gpu(&error))
}

fn register(
    runtime: &Runtime,
    allocation: AllocationId,
    tenant: TenantId,
    targets: &[(HcaIndex, SlotId)],
    access: Access,
) -> Result<Vec<u64>, Failure> {
    let memory = runtime.objects.memory(allocation).ok_or_else(|| bug("registration of unknown memory"))?;
    let tenant = runtime.objects.tenant(tenant).ok_or_else(|| bug("registration for an unknown tenant"))?;
    let on = |(index, slot): &(HcaIndex, SlotId)| {
        let hca = hca(runtime, *index)?;
        let source = memory.source().ok_or_else(|| no_dma_buf(*index))?;
        let domain = tenant.domains.on(*index, &*hca).map_err(|error| of_hca(*index, &error))?;
        let made = domain.pd.register(source, possible(access, &*hca), 0);
        let region = made.map_err(|error| in_pieces(runtime, *index, memory.len_bytes(), of_hca(*index, &error)))?;
        Ok(Registered { hca: *index, slot: *slot, region })
    };
    // All or none: where one fails, the others end here.
    let registered: Vec<Registered> = if memory.len_bytes() < PARALLEL_BYTES || targets.len() < 2 {
        targets.iter().map(on).collect::<Result<_, Failure>>()?
    } else {
        // As many at once as a lease has HCAs, which its limit bounds. The caller's thread has nothing else to do.
        std::thread::scope(|scope| {
            let running: Vec<_> = targets.iter().map(|target| scope.spawn(move || on(target))).collect();
            let ended = running.into_iter().map(|one| one.join().unwrap_or_else(|_| Err(bug("a backend panicked"))));
            ended.collect::<Vec<_>>().into_iter().collect::<Result<_, Failure>>()
        })?
    };
    let iovas = registered.iter().map(|registered| registered.region.iova()).collect();
    memory.set_registered(registered);
    Ok(iovas)
}

/// What refuses a long buffer behind a translating IOMMU, with the way around it.
fn in_pieces(runtime: &Runtime, hca: HcaIndex, len_bytes: u64, failure: Failure) -> Failure {
    let is_translated = || runtime.state().core.host().is_translated(hca);
    if failure.kind != FailureKind::Exhausted || len_bytes <= TRANSLATED_PIECE_BYTES || !is_translated() {
        return failure;
    }
    let advice = "an IOMMU translates for this HCA and may refuse regions of more than 1 GiB: lease shorter buffers, or adopt \
                  memory and register it, which is done in pieces";
    Failure { message: format!("{}; {advice}", failure.message), ..failure }
}

pub(super) fn no_dma_buf(hca: HcaIndex) -> Failure {
    let message = "the gpu backend exports no dma-buf that an hca could register".to_owned();
    Failure { kind: FailureKind::Unsupported, hca: Some(hca), message }
}

fn deregister(runtime: &Runtime, allocation: AllocationId) -> Result<(), Failure> {
    let memory = runtime.objects.memory(allocation).ok_or_else(|| bug("deregistration of unknown memory"))?;
    let mut result = Ok(());
    for registered in memory.take_registered() {
        // Every one is ended, whatever became of the one before.
        if let Err(error) = registered.region.deregister() {
            result = Err(of_hca(registered.hca, &error));
        }
    }
    runtime.directs.deregister(allocation).and(result)
}

fn scrub(runtime: &Runtime, allocation: AllocationId) -> Result<(), Failure> {
    let memory = runtime.objects.memory(allocation).ok_or_else(|| bug("scrub of unknown memory"))?;
    match memory.bytes() {
        Bytes::Gpu(allocation) => allocation.scrub().map_err(|error| of_gpu(&error)),
        Bytes::Host(memory) => memory.scrub().map_err(|errno| of_kernel("scrub of a host buffer", &errno)),
    }
}

pub(super) fn hca(runtime: &Runtime, index: HcaIndex) -> Result<Arc<dyn Hca>, Failure> {
    runtime.hcas.get(index).ok_or_else(|| Failure {
        kind: FailureKind::Lost,
        hca: Some(index),
        message: "the hca went away".to_owned(),
    })
}

fn create_queue_pair(
    runtime: &Runtime,
    id: QueuePairId,
    tenant_id: TenantId,
    new: &NewQueuePair,
    keep: Option<Name>,
) -> Result<(), Failure> {
    let index = new.hca;
    let tenant = runtime.objects.tenant(tenant_id).ok_or_else(|| bug("queue pair of an unknown tenant"))?;
    let device = hca(runtime, index)?;
    let device = &*device;
    let failed = |error: &gdrd_hal::HcaError| of_hca(index, error);
    let capabilities = device.capabilities();
    capabilities.check_queue_pair_type(new.qp_type).map_err(|what| {
        let message = format!("{} cannot {what}", device.name());
        Failure { kind: FailureKind::Unsupported, hca: Some(index), message }
    })?;
    let geometry = Geometry::new(new.send_depth, new.recv_depth).map_err(|error| Failure {
        kind: FailureKind::Invalid,
        hca: Some(index),
        message: error.to_string(),
    })?;
    let port_num = port_of(device, index, new.port_num)?;
    let domain = tenant.domains.on(index, device).map_err(|error| failed(&error))?;
    let landing = domain.landing().map_err(|error| of_landing(index, &error))?;
    let numa_node = runtime.plan().hca_nodes.get(device.name()).copied();
    let reservation =
        runtime.broker.reserve(index, device, geometry, numa_node).map_err(|error| of_broker(index, &error))?;
    let inline_bytes = u32::try_from(INLINE_MAX_BYTES).unwrap_or(u32::MAX).min(capabilities.max_inline_bytes);
    let (send_depth, recv_depth) = (new.send_depth, new.recv_depth);
    let config = QueuePairConfig { qp_type: new.qp_type, send_depth, recv_depth, inline_bytes, port_num };
    let parts = domain.pd.create_queue_pair(reservation.cq(), &config).map_err(|error| failed(&error))?;
    parts.control.to_init().map_err(|error| failed(&error))?;
    let endpoint = parts.control.endpoint().map_err(|error| failed(&error))?;
    let ring = BrokerRing::create(geometry).map_err(|error| of_kernel("ring", &error))?;
    let dup = |fd: std::os::fd::BorrowedFd<'_>| fd.try_clone_to_owned().map_err(|error| of_kernel("dup", &error));
    let ring_fd = dup(ring.fd())?;
    let ring_file = file_of(ring.fd());
    runtime.keep_ring(ring.fd(), keep);
    let doorbell =
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| of_kernel("eventfd", &errno))?;
    let limits = QueuePairLimits::new(&capabilities, &config);
    let tenant_key = {
        let state = runtime.state();
        state.core.tenant_key(tenant_id).cloned().ok_or_else(|| bug("queue pair of an unknown tenant"))?
    };
    let info = QueuePairInfo {
        id,
        hca: device.name().into(),
        port_num,
        qp_num: parts.control.qp_num(),
        qp_type: new.qp_type,
        state: QueuePairState::Init,
        endpoint,
        send_depth,
        recv_depth,
        max_inline_bytes: limits.max_inline_bytes,
        tenant: tenant_key,
    };
    let fds = Some((ring_fd, doorbell.try_clone().map_err(|error| of_kernel("dup", &error))?));
    runtime.objects.insert_queue_pair(
        id,
        QueuePairObjects { info, control: Some(Arc::downgrade(&parts.control)), fds, ring_file },
    );
    let (slots, share, landing) = (Arc::clone(&tenant.slots), Arc::clone(&tenant.share), Some(landing));
    let setup = QueuePairSetup { id, ring, doorbell, parts, slots, share, limits, landing };
    runtime.broker.attach(reservation, setup).map_err(|error| {
        runtime.objects.remove_queue_pair(id);
        of_broker(index, &error)
    })
}

/// The port asked for, or the first active one.
fn port_of(device: &dyn Hca, index: HcaIndex, asked: u8) -> Result<u8, Failure> {
    if asked != 0 {
        return Ok(asked);
    }
    let ports = device.ports().map_err(|error| of_hca(index, &error))?;
    let active = ports.iter().find(|port| port.state == PortState::Active);
    active.map(|port| port.port_num).ok_or_else(|| Failure {
        kind: FailureKind::PortsDown,
        hca: Some(index),
        message: format!("{} has no active port", device.name()),
    })
}

fn connect(runtime: &Runtime, id: QueuePairId, hca: HcaIndex, remote: &Endpoint) -> Result<(), Failure> {
    let control = runtime.objects.with_queue_pair(id, |q| q.control.as_ref().and_then(Weak::upgrade)).flatten();
    let Some(control) = control else {
        // Whoever destroyed it has the right to.
        let message = "the queue pair ended while it was being connected".to_owned();
        return Err(Failure { kind: FailureKind::Driver, hca: Some(hca), message });
    };
    control.connect(remote).map_err(|error| of_hca(hca, &error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::tests::queue_pairs::remote;

    #[test]
    fn connecting_has_a_bound_of_its_own() {
        let connect = Job::ConnectQueuePair { queue_pair: QueuePairId(1), hca: HcaIndex(0), remote: remote() };
        assert_eq!(lane_of(&connect, &Objects::default()), Lane::Fabric);
    }
}
