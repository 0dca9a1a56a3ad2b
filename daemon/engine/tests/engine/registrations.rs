//! Adopted memory and registrations of its ranges, on a simulated host: what others have reported of their caches, with
//! a real driver's answers.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::thread;

use gdrd_engine::{
    Access, AcquireRequest, AdoptRequest, EngineConfig, EngineError, HostPlan, LeaseId, MemoryId, MemoryPlace,
    MemoryRef, Merging, RangeRequest, RegisterRequest, RegisteredRange, SessionId,
};
use gdrd_ring::{LocalSpan, RemoteSpan, Status};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::wire::{Client, local, remote, write};
use crate::world::{MIB, World, config, hca, plan, read};

/// Host memory of a client.
pub(crate) fn memfd(len_bytes: u64) -> OwnedFd {
    memfd_named("a client's", len_bytes)
}

fn memfd_named(name: &str, len_bytes: u64) -> OwnedFd {
    let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a memfd");
    ftruncate(&fd, len_bytes).expect("a length");
    fd
}

/// What stands for the dma-buf of a client's own GPU memory on a simulated host.
pub(crate) fn device_memory(len_bytes: u64) -> OwnedFd {
    let fd = memfd_create("gdrd-sim-gpu-of-a-client", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
    let fd = fd.expect("a memfd");
    ftruncate(&fd, len_bytes).expect("a length");
    gdrd_shm::add_seals(&fd, gdrd_shm::Seals::SHRINK | gdrd_shm::Seals::GROW).expect("it takes seals");
    fd
}

pub(crate) fn again(fd: &OwnedFd) -> OwnedFd {
    fd.try_clone().expect("a descriptor")
}

pub(crate) fn asked(fd: OwnedFd) -> AdoptRequest {
    AdoptRequest { fd, other_mapping: None, gpu: Some("GPU0".to_owned()) }
}

pub(crate) fn adopt(world: &World, session: SessionId, fd: OwnedFd) -> MemoryId {
    world.engine.adopt(session, asked(fd)).expect("the memory is adopted").id
}

fn request(memory: MemoryRef, ranges: &[(u64, u64)]) -> RegisterRequest {
    let range = |(offset, len_bytes): &(u64, u64)| RangeRequest { memory, offset: *offset, len_bytes: *len_bytes };
    RegisterRequest {
        ranges: ranges.iter().map(range).collect(),
        access: Access::DATA,
        hcas: vec!["mlx5_0".to_owned()],
        merging: Merging::None,
        piece_bytes: 0,
    }
}

pub(crate) fn try_register(
    world: &World,
    session: SessionId,
    memory: MemoryId,
    ranges: &[(u64, u64)],
) -> Result<Vec<RegisteredRange>, EngineError> {
    let request = request(MemoryRef::Adopted(memory), ranges);
    Ok(world.engine.register(session, request).wait()?.keep())
}

pub(crate) fn register(world: &World, session: SessionId, memory: MemoryId, range: (u64, u64)) -> RegisteredRange {
    try_register(world, session, memory, &[range]).expect("it is registered").remove(0)
}

fn span_of(range: &RegisteredRange, offset: u64, len_bytes: u32) -> LocalSpan {
    let part = &range.parts[0];
    let (slot, generation) = (part.registration.slot.0, part.registration.generation.0);
    LocalSpan { slot, generation, offset: part.slot_offset + offset, len_bytes }
}

pub(crate) fn remote_of(range: &RegisteredRange, offset: u64) -> RemoteSpan {
    let registration = &range.parts[0].registration;
    RemoteSpan { rkey: registration.rkey.0, iova: registration.iova + offset }
}

/// How many descriptors of memfds of this name the process has; other tests of it have some of other names.
fn descriptors_of(name: &str) -> usize {
    let links = std::fs::read_dir("/proc/self/fd").expect("procfs").flatten();
    let memory = format!("/memfd:{name} ");
    // A descriptor may be closed between listing and looking.
    let targets = links.filter_map(|link| std::fs::read_link(link.path()).ok());
    targets.filter(|target| target.to_string_lossy().starts_with(&memory)).count()
}

/// Regions that an HCA has, in whatever state.
pub(crate) fn regions(world: &World) -> u64 {
    world.stat("gdrd_cache_regions")
}

#[test]
fn a_queue_pair_of_another_tenant_writes_into_adopted_memory_and_out_of_it() {
    let world = World::new();
    let (near, far) = (world.session(1), world.session(2));
    let fd = memfd(4 * MIB);
    let memory = adopt(&world, far, again(&fd));
    let range = register(&world, far, memory, (MIB + 77, MIB));
    let (lease, ours) = world.acquire(near).keep();
    let (mut a, mut b) = (Client::new(&world, near, "mlx5_0"), Client::new(&world, far, "mlx5_0"));
    Client::connect(&world, (near, &a), (far, &b));
    let bytes: Vec<u8> = (0..=250).cycle().take(64 << 10).collect();
    crate::world::write(&ours, 0, &bytes);
    a.post(1, write(local(&lease, "mlx5_0", 0, 64 << 10), remote_of(&range, 5)));
    a.expect(1, Status::Success);
    let at = usize::try_from(MIB).expect("small") + 77 + 5;
    assert_eq!(read(&fd, 2 * MIB)[at..at + bytes.len()], bytes);
    b.post(2, write(span_of(&range, 5, 64 << 10), remote(&lease, "mlx5_0", MIB)));
    b.expect(2, Status::Success);
    assert_eq!(read(&ours, 2 * MIB)[1 << 20..(1 << 20) + bytes.len()], bytes);
}

#[test]
fn nothing_reaches_memory_that_was_given_up() {
    let world = World::new();
    let (near, far) = (world.session(1), world.session(2));
    let fd = memfd(MIB);
    let memory = adopt(&world, far, again(&fd));
    let range = register(&world, far, memory, (0, MIB));
    let (lease, _memory) = world.acquire(near).keep();
    let (mut a, mut b) = (Client::new(&world, near, "mlx5_0"), Client::new(&world, far, "mlx5_0"));
    Client::connect(&world, (near, &a), (far, &b));
    world.engine.disown(far, memory).wait().expect("it is given up");
    assert_eq!((regions(&world), world.stat("gdrd_adopted_memories")), (0, 0));
    b.post(1, write(span_of(&range, 0, 64), remote(&lease, "mlx5_0", 0)));
    b.expect(1, Status::Stale);
    a.post(2, write(local(&lease, "mlx5_0", 0, 64), remote_of(&range, 0)));
    a.expect(2, Status::RemAccessErr);
}

#[test]
fn descriptors_are_as_many_after_as_before_and_one_while_memory_is_adopted() {
    // ofiwg/libfabric#10708, ROCm/rocm-systems#9692: a descriptor for each registration, kept.
    let mut config = config();
    config.cache.max_idle_regions = 0;
    let world = World::with(config);
    let session = world.session(1);
    let ours = memfd_named("counted", 8 * MIB);
    assert_eq!(descriptors_of("counted"), 1);
    for _ in 0..20 {
        let memory = adopt(&world, session, again(&ours));
        assert_eq!(descriptors_of("counted"), 2, "that which was sent");
        let ranges: Vec<_> = (0..4).map(|index| (index * 2 * MIB, MIB)).collect();
        let on_two = RegisterRequest {
            hcas: vec!["mlx5_0".to_owned(), "mlx5_1".to_owned()],
            ..request(MemoryRef::Adopted(memory), &ranges)
        };
        let registered = world.engine.register(session, on_two).wait().expect("it is registered").keep();
        // A simulated region has one in the place of the kernel's own reference.
        assert_eq!((regions(&world), descriptors_of("counted")), (8, 2 + 8));
        let ids = registered.iter().map(|range| range.id).collect();
        assert_eq!(world.engine.deregister(session, ids), Ok(4));
        world.until("the regions to end", || regions(&world) == 0);
        assert_eq!(descriptors_of("counted"), 2, "it can be registered again");
        world.engine.disown(session, memory).wait().expect("given up");
        assert_eq!(descriptors_of("counted"), 1, "closed by the answer");
    }
}

#[test]
fn what_is_no_memory_is_refused_with_the_alternative() {
    let world = World::new();
    let session = world.session(1);
    let unsealable = memfd_create("x", MemfdFlags::CLOEXEC).expect("a memfd");
    ftruncate(&unsealable, MIB).expect("a length");
    let (_, on_gpu) = world.acquire(session).keep();
    let host = gdrd_engine::AcquireRequest {
        place: gdrd_engine::MemoryPlace::Host { near_gpu: Some("GPU0".to_owned()) },
        ..crate::world::request("GPU0", MIB)
    };
    let (_, lent) = world.try_acquire(session, host).expect("a host buffer").keep();
    let empty = memfd(0);
    let renamed = again(&lent);
    let cases: [(OwnedFd, &str); 7] = [
        (File::open("/dev/null").expect("it opens").into(), "cuMemGetHandleForAddressRange"),
        (rustix::pipe::pipe().expect("a pipe").0, "memfd"),
        (unsealable, "MFD_ALLOW_SEALING"),
        (empty, "no bytes"),
        (lent, "register ranges of the lease"),
        (on_gpu, "register ranges of the lease"),
        (File::open(format!("/proc/self/fd/{}", renamed.as_raw_fd())).expect("it opens").into(), "of lease"),
    ];
    for (fd, told) in cases {
        let refused = world.engine.adopt(session, asked(fd)).expect_err(told);
        assert_eq!(refused.reason(), "MEMORY_NOT_ADOPTABLE", "{refused}");
        assert!(refused.to_string().contains(told), "{refused}");
    }
    assert_eq!(world.stat("gdrd_adopted_memories"), 0);
}

#[test]
fn memory_of_a_lease_is_adopted_by_nobody_while_the_daemon_has_it() {
    let world = World::new();
    let (owner, other) = (world.session(1), world.session(2));
    let (info, fd) = world.acquire(owner).keep();
    let adopt = |session| world.engine.adopt(session, asked(again(&fd)));
    let refused = adopt(owner).expect_err("its own").to_string();
    assert!(refused.contains(&format!("of lease {};", info.id.0)), "{refused}");
    // Another tenant that was given the descriptor is told no more than that.
    let refused = adopt(other).expect_err("of another tenant").to_string();
    assert!(refused.contains("that this daemon lends") && !refused.contains(&info.id.to_string()), "{refused}");
    // Released, it waits zeroed for the tenant's next lease: what would be adopted now would see that one.
    world.release(owner, info.id);
    world.settle();
    assert_eq!(adopt(owner).expect_err("the pool's").reason(), "MEMORY_NOT_ADOPTABLE");
    // Freed, it is the client's alone.
    world.engine.close_session(owner, "test");
    world.until("the buffer to go", || world.gpu_used(0) == 0);
    adopt(other).expect("nobody else has it");
}

#[test]
fn what_clients_share_with_the_daemon_is_adopted_by_nobody() {
    let world = World::new();
    let opened = world.open_session(1);
    let queue_pair = world.engine.create_queue_pair(opened.session, crate::wire::wanted("mlx5_0")).wait().expect("one");
    let (_info, ring, _doorbell) = queue_pair.keep();
    for fd in [opened.generation_page, ring] {
        let refused = world.engine.adopt(opened.session, asked(fd)).expect_err("it is the daemon's");
        assert_eq!(refused.reason(), "MEMORY_NOT_ADOPTABLE");
        assert!(refused.to_string().contains("memory of the daemon"), "{refused}");
    }
}

#[test]
fn what_is_reached_by_an_export_that_cannot_be_told_goes_to_no_other_tenant() {
    // With a real driver each export of CUDA memory is another file. Here the client's stands for one of its lease's memory.
    let world = World::new();
    let (owner, other) = (world.session(1), world.session(2));
    let (info, fd) = world.acquire(owner).keep();
    let export = adopt(&world, owner, device_memory(info.size_bytes));
    register(&world, owner, export, (0, MIB));
    world.release(owner, info.id);
    world.settle();
    let inode = |fd: &OwnedFd| rustix::fs::fstat(fd).expect("stat").st_ino;
    for _ in 0..8 {
        assert_ne!(inode(&world.acquire(other).keep().1), inode(&fd), "memory that may be reached crossed tenants");
    }
    assert_eq!(inode(&world.acquire(owner).keep().1), inode(&fd), "its tenant has it again");
    // The end of the session ends the export.
    world.engine.close_session(owner, "test");
    world.until("everything to go", || world.stat("gdrd_adopted_memories") == 0);
    assert_eq!(regions(&world), 0);
}

#[test]
fn adopted_host_memory_cannot_be_resized_any_more() {
    let world = World::new();
    let session = world.session(1);
    let fd = memfd(MIB);
    adopt(&world, session, again(&fd));
    assert!(ftruncate(&fd, 0).is_err() && ftruncate(&fd, 2 * MIB).is_err());
}

#[test]
fn a_full_hca_drops_idle_regions_and_tries_once_more() {
    // ofiwg/libfabric#6663, NVIDIA/nccl#563: -12 while unused entries could be dropped.
    let world = World::new();
    let session = world.session(1);
    let memory = adopt(&world, session, memfd(64 * MIB));
    let idle: Vec<_> = (0..4).map(|index| register(&world, session, memory, (index * 2 * MIB, MIB)).id).collect();
    assert_eq!(world.engine.deregister(session, idle), Ok(4));
    world.sim.inject_text("register on mlx5_0: fail enomem times 1").expect("a script");
    register(&world, session, memory, (32 * MIB, MIB));
    assert_eq!(world.stat("gdrd_cache_evicted_total"), 4);
    world.sim.inject_text("register on mlx5_0: fail enomem times 1").expect("a script");
    let refused = try_register(&world, session, memory, &[(40 * MIB, MIB)]).expect_err("nothing idle is left");
    assert_eq!(refused.reason(), "HCA_EXHAUSTED");
    // rootless-containers/usernetes#373, NVIDIA/nvidia-container-toolkit#2037: which limit it may be is in the message.
    assert!(refused.to_string().contains("RLIMIT_MEMLOCK"), "{refused}");
}

#[test]
fn a_batch_that_fails_half_way_leaves_nothing_half_made() {
    let world = World::new();
    let session = world.session(1);
    let memory = adopt(&world, session, memfd(64 * MIB));
    world.sim.inject_text("register on mlx5_0 after 5: fail eio times 1").expect("a script");
    let ranges: Vec<_> = (0..12).map(|index| (index * 4 * MIB, MIB)).collect();
    let refused = try_register(&world, session, memory, &ranges).expect_err("one of them fails");
    assert_eq!(refused.reason(), "DRIVER_FAILED");
    assert_eq!(world.stat("gdrd_registered_ranges"), 0);
    let all = try_register(&world, session, memory, &ranges).expect("the next one works");
    assert_eq!(all.len(), 12);
}

#[test]
fn frees_and_deregistrations_of_two_threads_leave_nothing() {
    // Mellanox/nv_peer_memory#14, #53, #92, #120: the callback of a free races with a deregistration.
    let world = World::new();
    let session = world.session(1);
    for _ in 0..300 {
        let memory = adopt(&world, session, memfd(64 << 10));
        let range = register(&world, session, memory, (0, 64 << 10));
        let ended = thread::scope(|scope| {
            let ender = scope.spawn(|| world.engine.deregister(session, vec![range.id]));
            world.engine.disown(session, memory).wait().expect("given up");
            ender.join().expect("it does not panic").expect("done either way")
        });
        assert!(ended <= 1);
        assert_eq!((regions(&world), world.stat("gdrd_adopted_memories")), (0, 0));
    }
}

#[test]
fn the_end_of_a_session_gives_back_all_it_had_adopted() {
    let world = World::new();
    let session = world.session(1);
    for _ in 0..3 {
        let memory = adopt(&world, session, memfd(MIB));
        register(&world, session, memory, (0, MIB));
    }
    world.engine.close_session(session, "test");
    world.until("everything to go", || regions(&world) == 0 && world.stat("gdrd_tenants") == 0);
    assert_eq!((world.stat("gdrd_adopted_bytes"), world.stat("gdrd_registered_ranges")), (0, 0));
}

#[test]
fn a_range_of_a_revoked_lease_is_refused_with_the_reason() {
    let world = World::new();
    let session = world.session(1);
    let lease = world.lease(session);
    world
        .engine
        .drain_gpus(&gdrd_engine::Viewer::Peer(crate::world::peer(0)), "GPU0")
        .expect("an administrator drains");
    let request = request(MemoryRef::Lease(lease), &[(4096, 4096)]);
    let refused = world.engine.register(session, request).wait().expect_err("revoked").to_string();
    assert!(refused.contains("(gpu GPU-0 was drained by an administrator; "), "{refused}");
}

#[test]
fn a_range_of_a_lease_with_other_rights_is_registered_and_ends_with_it() {
    let world = World::new();
    let session = world.session(1);
    let (lease, _memory) = world.acquire(session).keep();
    let strict = Access { relaxed_ordering: false, ..Access::DATA };
    let request = RegisterRequest { access: strict, ..request(MemoryRef::Lease(lease.id), &[(4096, 4096)]) };
    let ranges = world.engine.register(session, request.clone()).wait().expect("registered").keep();
    assert_eq!(ranges[0].parts[0].registration.access, strict);
    assert_eq!(world.engine.lookup(session, ranges[0].id).as_ref(), Ok(&ranges[0]));
    world.release(session, lease.id);
    world.settle();
    assert_eq!(regions(&world), 0);
    let gone = world.engine.register(session, request).wait().expect_err("the lease has ended");
    assert_eq!(gone, EngineError::UnknownLease { lease: lease.id.0 });
    assert!(world.engine.lookup(session, ranges[0].id).is_err());
    let never = RegisterRequest {
        ranges: vec![RangeRequest { memory: MemoryRef::Lease(LeaseId(9999)), offset: 0, len_bytes: 1 }],
        ..strict_request()
    };
    assert_eq!(world.engine.register(session, never).wait().expect_err("no such lease").reason(), "LEASE_UNKNOWN");
}

fn strict_request() -> RegisterRequest {
    request(MemoryRef::Lease(LeaseId(0)), &[])
}

#[test]
fn registrations_that_nobody_takes_are_taken_back() {
    let world = World::new();
    let session = world.session(1);
    let memory = adopt(&world, session, memfd(MIB));
    let grant = world.engine.register(session, request(MemoryRef::Adopted(memory), &[(0, MIB)])).wait();
    drop(grant.expect("it is registered"));
    assert_eq!(world.stat("gdrd_registered_ranges"), 0);
}

#[test]
fn evictions_under_use_by_many_threads_end_no_registration_that_is_held() {
    let mut config = crate::world::config();
    config.cache.max_idle_regions = 2;
    let world = World::with(config);
    let (near, far) = (world.session(1), world.session(2));
    let fd = memfd(16 * MIB);
    let memory = adopt(&world, far, again(&fd));
    let held = register(&world, far, memory, (0, MIB));
    let (lease, _ours) = world.acquire(near).keep();
    let (mut a, b) = (Client::new(&world, near, "mlx5_0"), Client::new(&world, far, "mlx5_0"));
    Client::connect(&world, (near, &a), (far, &b));
    thread::scope(|scope| {
        for worker in 0..3_u64 {
            let world = &world;
            scope.spawn(move || {
                for round in 0..100 {
                    let start = (2 + (worker * 100 + round) % 13) * MIB;
                    let range = register(world, far, memory, (start, 4096));
                    assert_eq!(world.engine.deregister(far, vec![range.id]), Ok(1));
                }
            });
        }
        for wr_id in 0..100 {
            a.post(wr_id, write(local(&lease, "mlx5_0", 0, 4096), remote_of(&held, 0)));
            a.expect(wr_id, Status::Success);
        }
    });
    assert!(world.stat("gdrd_cache_evicted_total") > 0);
    world.until("idle regions to be few", || regions(&world) <= 3);
}

#[test]
fn a_lent_fd_of_memory_is_looked_at_before_anything_else() {
    // A descriptor that is open for reading alone cannot be sealed.
    let world = World::new();
    let session = world.session(1);
    let fd = memfd(MIB);
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd.as_fd()));
    let read_only: OwnedFd = File::open(path).expect("it opens").into();
    let refused = world.engine.adopt(session, asked(read_only)).expect_err("read-only");
    assert!(refused.to_string().contains("open for writing"), "{refused}");
}

#[test]
fn a_long_range_is_registered_in_pieces_where_an_iommu_translates_and_whole_elsewhere() {
    const GIB: u64 = 1 << 30;
    let plan = HostPlan { translated_hcas: ["mlx5_0".to_owned()].into(), ..plan() };
    let world = World::planned(config(), vec![hca(0), hca(1), hca(2)], plan);
    let session = world.session(1);
    // Nothing of it is touched.
    let memory = MemoryRef::Adopted(adopt(&world, session, memfd(5 * GIB / 2)));
    let parts = |hca: &str, piece_bytes: u64| {
        let request =
            RegisterRequest { hcas: vec![hca.to_owned()], piece_bytes, ..request(memory, &[(0, 5 * GIB / 2)]) };
        let ranges = world.engine.register(session, request).wait().expect("registered").keep();
        let lengths: Vec<u64> = ranges[0].parts.iter().map(|part| part.registration.len_bytes).collect();
        let mut rkeys: Vec<u32> = ranges[0].parts.iter().map(|part| part.registration.rkey.0).collect();
        rkeys.sort_unstable();
        rkeys.dedup();
        assert_eq!(rkeys.len(), lengths.len(), "a key each");
        lengths
    };
    assert_eq!(parts("mlx5_1", 0), [5 * GIB / 2]);
    assert_eq!(parts("mlx5_0", GIB / 2), [GIB / 2; 5]);
    assert_eq!(parts("mlx5_0", 0), [GIB, GIB, GIB / 2]);
    assert_eq!(parts("mlx5_0", 2 * GIB), [GIB, GIB, GIB / 2]);
}

#[test]
fn a_long_buffer_is_registered_with_all_of_its_hcas_or_with_none() {
    let world = World::new();
    let session = world.session(1);
    let near = AcquireRequest {
        place: MemoryPlace::Host { near_gpu: Some("GPU0".to_owned()) },
        ..crate::world::request("GPU0", 128 << 20)
    };
    let (lease, memory) = world.try_acquire(session, near.clone()).expect("a buffer").keep();
    let hcas: Vec<&str> = lease.registrations.iter().map(|registration| &*registration.hca).collect();
    assert_eq!(hcas, ["mlx5_0", "mlx5_1"]);
    drop(memory);
    world.sim.inject_text("register on mlx5_1: fail enomem").expect("a script");
    let other = AcquireRequest { signal: true, ..near };
    assert!(world.try_acquire(session, other).is_err());
}

#[test]
fn regions_of_a_sessions_own_context_end_with_their_lease_and_with_the_session() {
    for by_release in [true, false] {
        let world = World::with(EngineConfig { direct: true, ..config() });
        let session = world.session(1);
        let (lease, _memory) =
            world.try_acquire(session, crate::world::request("GPU0", 2 * MIB)).expect("a buffer").keep();
        let grant = world.engine.open_direct(session, "mlx5_0", &[lease.id]).expect("mlx5 can");
        assert_eq!(grant.regions.len(), 1);
        // Told of the lease's own two and of this third one, by the only sign that a simulated driver gives.
        world.sim.inject_text("deregister on mlx5_0 after 1: fail eio").expect("a script");
        if by_release {
            world.engine.release(session, lease.id, None).expect("released");
        } else {
            world.engine.close_session(session, "it is over");
        }
        world.until("the third to be deregistered", || world.stat("gdrd_deregistration_failures_total") == 1);
        assert!(world.engine.open_direct(session, "mlx5_0", &[lease.id]).is_err());
    }
}
