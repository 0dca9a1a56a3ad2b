//! What clients hold something on, as schedulers are told it.

use std::time::Duration;

use gdrd_engine::{Access, AdoptRequest, InUse, MemoryRef, Merging, RangeRequest, RegisterRequest};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::wire::wanted;
use crate::world::{MIB, World};

fn used(gpus: &[&str], hcas: &[&str]) -> InUse {
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    InUse { gpus: names(gpus), hcas: names(hcas) }
}

#[test]
fn a_lease_uses_its_gpu_and_hcas_until_its_last_holder_is_gone() {
    let world = World::new();
    assert_eq!(world.engine.in_use(), InUse::default());
    let (first, second) = (world.session(1), world.session(1));
    let lease = world.lease(first);
    assert_eq!(world.engine.in_use(), used(&["GPU0"], &["mlx5_0", "mlx5_1"]));
    let _held = world.engine.open(second, lease).expect("of one tenant").keep();
    world.release(first, lease);
    assert_eq!(world.engine.in_use().gpus, ["GPU0"]);
    world.release(second, lease);
    world.settle();
    assert_eq!(world.engine.in_use(), InUse::default(), "what is left is the pool's");
}

#[test]
fn a_detached_lease_is_in_use() {
    let world = World::new();
    let session = world.session(1);
    let lease = world.lease(session);
    world.engine.detach(session, lease, Duration::from_secs(3600)).expect("it is held");
    world.engine.close_session(session, "done");
    assert_eq!(world.engine.in_use().gpus, ["GPU0"]);
}

#[test]
fn adopted_memory_registrations_and_queue_pairs_count() {
    let world = World::new();
    let session = world.session(1);
    let fd = memfd_create("gdrd-sim-gpu-of-a-client", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
    let fd = fd.expect("a memfd");
    ftruncate(&fd, MIB).expect("a length");
    gdrd_shm::add_seals(&fd, gdrd_shm::Seals::SHRINK | gdrd_shm::Seals::GROW).expect("it takes seals");
    let asked = AdoptRequest { fd, other_mapping: None, gpu: Some("GPU1".to_owned()) };
    let memory = world.engine.adopt(session, asked).expect("device memory").id;
    assert_eq!(world.engine.in_use(), used(&["GPU1"], &[]));
    let range = RangeRequest { memory: MemoryRef::Adopted(memory), offset: 0, len_bytes: MIB };
    let request = RegisterRequest {
        ranges: vec![range],
        access: Access::DATA,
        hcas: vec!["mlx5_2".to_owned()],
        merging: Merging::None,
        piece_bytes: 0,
    };
    let _ranges = world.engine.register(session, request).wait().expect("registered").keep();
    assert_eq!(world.engine.in_use(), used(&["GPU1"], &["mlx5_2"]));
    world.engine.disown(session, memory).wait().expect("it is given up");
    assert_eq!(world.engine.in_use(), InUse::default());
    let queue_pair = world.engine.create_queue_pair(session, wanted("mlx5_1")).wait().expect("a queue pair");
    let (info, _ring, _doorbell) = queue_pair.keep();
    assert_eq!(world.engine.in_use(), used(&[], &["mlx5_1"]));
    world.engine.destroy_queue_pair(session, info.id).wait().expect("ours");
    assert_eq!(world.engine.in_use(), InUse::default());
}
