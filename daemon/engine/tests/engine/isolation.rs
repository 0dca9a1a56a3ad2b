//! What one tenant can see of another: nothing.

use gdrd_engine::{Access, LeaseId, LeaseState, MemoryPlace};
use gdrd_hal::MemorySource;

use crate::world::{MIB, World, config, read, request, write};

fn inode(fd: impl std::os::fd::AsFd) -> u64 {
    rustix::fs::fstat(fd).expect("stat").st_ino
}

#[test]
fn a_second_session_of_the_tenant_opens_a_lease_and_keeps_it_alive() {
    let world = World::new();
    let (first, second) = (world.session(1), world.session(1));
    let (info, memory) = world.acquire(first).keep();
    write(&memory, 100, b"hello");
    let (opened, other) = world.engine.open(second, info.id).expect("the same tenant").keep();
    assert_eq!(opened.registrations, info.registrations);
    assert_eq!(opened.holders, 2);
    assert_eq!(&read(&other, 200)[100..105], b"hello");
    world.engine.close_session(first, "test");
    write(&other, 0, b"still here");
    assert_eq!(world.stat("gdrd_leases"), 1);
    world.release(second, info.id);
    assert_eq!(world.stat("gdrd_leases"), 0);
}

#[test]
fn another_tenants_lease_is_as_unknown_as_one_that_never_was() {
    let world = World::new();
    let (mine, other) = (world.session(1), world.session(2));
    let lease = world.lease(mine);
    let never = LeaseId(u64::MAX);
    let of = |lease: LeaseId| {
        let errors = [
            world.engine.open(other, lease).map(drop),
            world.engine.release(other, lease, None),
            world.engine.detach(other, lease, std::time::Duration::from_secs(1)),
        ];
        errors.map(|error| error.expect_err("not theirs").to_string().replace(&lease.to_string(), "N"))
    };
    assert_eq!(of(lease), of(never));
    assert_eq!(world.stat("gdrd_leases"), 1);
}

#[test]
fn the_same_user_in_another_scope_is_another_tenant() {
    let world = World::new();
    let lease = world.lease(world.session(1));
    let mut elsewhere = crate::world::peer(1);
    elsewhere.scope = "unit/other.scope".to_owned();
    let session = world.engine.open_session(elsewhere, "test").expect("it opens").session;
    assert_eq!(world.engine.open(session, lease).expect_err("not theirs").reason(), "LEASE_UNKNOWN");
}

#[test]
fn kept_descriptors_and_mappings_never_see_another_tenants_bytes() {
    let world = World::new();
    let nosy = world.session(1);
    let mut kept = Vec::new();
    for _ in 0..8 {
        let (info, memory) = world.acquire(nosy).keep();
        kept.push((gdrd_shm::Segment::map(memory.try_clone().expect("dup"), gdrd_shm::Access::ReadWrite), memory));
        world.release(nosy, info.id);
    }
    world.settle();
    // The nosy tenant ends, too: nothing of its memory may come back in anyone's hands.
    world.engine.close_session(nosy, "test");
    world.until("its buffers to go", || world.gpu_used(0) == 0);
    let victim = world.session(2);
    for _ in 0..16 {
        let (info, memory) = world.acquire(victim).keep();
        assert!(read(&memory, info.size_bytes).iter().all(|byte| *byte == 0));
        assert!(kept.iter().all(|(_, theirs)| inode(theirs) != inode(&memory)), "memory crossed tenants");
        write(&memory, 0, &[0x5e; 4096]);
        for (mapping, theirs) in &kept {
            let mapping = mapping.as_ref().expect("mapped");
            let mut seen = [0; 4096];
            mapping.read_into(0, &mut seen).expect("in range");
            assert!(!seen.contains(&0x5e), "another tenant's bytes are seen through a kept mapping");
            assert!(!read(theirs, 4096).contains(&0x5e), "another tenant's bytes are seen through a kept descriptor");
            // What is written through a kept mapping reaches nobody else either.
            mapping.write_from(0, &[0x66; 64]).expect("in range");
        }
        assert!(!read(&memory, 4096).contains(&0x66));
        world.release(victim, info.id);
    }
}

#[test]
fn no_hca_reaches_a_buffer_after_its_release() {
    let world = World::new();
    let session = world.session(1);
    let (info, _memory) = world.acquire(session).keep();
    let before = world.stat("gdrd_registrations");
    assert_eq!(before, info.registrations.len() as u64);
    world.release(session, info.id);
    world.settle();
    // Registered anew: as many as before, all with other keys.
    assert_eq!(world.stat("gdrd_registrations"), before);
    assert_eq!(world.stat("gdrd_deregistrations_total"), before);
}

#[test]
fn pools_of_one_tenant_do_not_serve_another() {
    let mut config = config();
    config.pool.ready_target_per_class = 2;
    let world = World::with(config);
    let (one, two) = (world.session(1), world.session(2));
    let (info, memory) = world.acquire(one).keep();
    world.release(one, info.id);
    world.settle();
    let (_, other) = world.acquire(two).keep();
    assert_ne!(inode(&memory), inode(&other));
    assert_eq!(world.stat("gdrd_acquires_warm_total"), 0);
}

#[test]
fn host_buffers_near_a_gpu_are_registered_with_its_hcas() {
    let world = World::new();
    let session = world.session(1);
    let mut wanted = request("", 100_000);
    wanted.place = MemoryPlace::Host { near_gpu: Some("GPU1".to_owned()) };
    let (info, memory) = world.try_acquire(session, wanted.clone()).expect("a buffer").keep();
    assert_eq!((info.gpu.clone(), info.size_bytes), (None, 131_072));
    assert_eq!(info.registrations.iter().map(|r| &*r.hca).collect::<Vec<_>>(), ["mlx5_2"]);
    write(&memory, 0, &[9; 1000]);
    world.release(session, info.id);
    world.settle();
    let (_, again) = world.try_acquire(session, wanted.clone()).expect("a buffer").keep();
    assert_eq!(inode(&memory), inode(&again));
    assert!(read(&again, 131_072).iter().all(|byte| *byte == 0));
    wanted.place = MemoryPlace::Host { near_gpu: None };
    assert_eq!(world.try_acquire(session, wanted.clone()).expect_err("no hca").reason(), "BAD_ARGUMENT");
    wanted.hcas = vec!["mlx5_0".to_owned(), "mlx5_0".to_owned()];
    let (info, _) = world.try_acquire(session, wanted).expect("a buffer").keep();
    assert_eq!(info.registrations.len(), 1);
}

#[test]
fn signal_buffers_are_registered_without_relaxed_ordering() {
    let world = World::new();
    let session = world.session(1);
    let mut wanted = request("GPU0", MIB);
    wanted.signal = true;
    let (info, _) = world.try_acquire(session, wanted).expect("a buffer").keep();
    assert!(info.registrations.iter().all(|r| r.access == Access { relaxed_ordering: false, ..Access::DATA }));
}

#[test]
fn a_foreign_domain_cannot_use_a_leases_keys() {
    // The wall between tenants is the protection domain; this pins that the engine makes one for each.
    let world = World::new();
    let (one, two) = (world.acquire(world.session(1)).keep().0, world.acquire(world.session(2)).keep().0);
    assert_ne!(one.tenant, two.tenant);
    let hca = world.sim.hcas().into_iter().next().expect("an hca");
    let pd = hca.alloc_pd().expect("a domain");
    let memory = gdrd_shm::Segment::create("test", 4096).expect("memory");
    let source = MemorySource::Host { fd: memory.fd(), offset: 0, len_bytes: 4096 };
    let region = pd.register(source, Access::DATA, 0).expect("registered");
    let keys = [one.registrations[0].rkey.0, two.registrations[0].rkey.0, region.rkey()];
    assert!(keys[0] != keys[1] && keys[1] != keys[2] && keys[0] != keys[2]);
}

#[test]
fn a_tenants_call_that_the_driver_fails_takes_the_device_from_nobody() {
    let world = World::new();
    let (near, far) = (world.session(1), world.session(2));
    let (theirs, _) = world.acquire(near).keep();
    let mut events = world.watch(1);
    while crate::world::next(&mut events).is_some() {}
    for call in ["register", "deregister", "create-qp", "connect"] {
        world.sim.inject_text(&format!("{call} on mlx5_0: fail eio times 1")).expect("a script");
    }
    let mut wanted = request("GPU0", MIB);
    wanted.hcas = vec!["mlx5_0".to_owned()];
    assert_eq!(world.try_acquire(far, wanted.clone()).expect_err("eio").reason(), "DRIVER_FAILED");
    let asked = crate::wire::wanted("mlx5_0");
    assert_eq!(world.engine.create_queue_pair(far, asked.clone()).wait().expect_err("eio").reason(), "DRIVER_FAILED");
    let (pair, ..) = world.engine.create_queue_pair(far, asked).wait().expect("the next works").keep();
    let refused = world.engine.connect_queue_pair(far, pair.id, pair.endpoint.clone()).wait().expect_err("eio");
    assert_eq!(refused.reason(), "DRIVER_FAILED");
    let (lease, _) = world.try_acquire(far, wanted).expect("the next works").keep();
    world.release(far, lease.id);
    world.until("the driver to fail it", || world.stat("gdrd_deregistration_failures_total") == 1);
    world.settle();

    assert_eq!(world.stat("gdrd_hcas_lost_total"), 0);
    assert_eq!(crate::world::next(&mut events).map(|event| event.kind), None, "the other tenant hears of nothing");
    let listed = world.engine.list_leases(&gdrd_engine::Viewer::Session(near), None, 0).expect("a list").leases;
    assert_eq!((listed[0].state, listed[0].generation), (LeaseState::Held, theirs.generation));
    assert_eq!(listed[0].registrations.len(), 2);
}
