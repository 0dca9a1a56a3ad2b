//! Dma-bufs of clients on HCAs that take one kind of mapping, or none.

use gdrd_engine::{AdoptRequest, AdoptedKind};
use gdrd_ring::Status;

use crate::registrations::{adopt, again, asked, device_memory, memfd, regions, register, remote_of, try_register};
use crate::wire::{Client, local, write};
use crate::world::{MIB, World, read};

#[test]
fn the_other_kind_of_mapping_is_tried_and_remembered() {
    // openucx/ucx#11584, ai-dynamo/nixl#1694: error 524 or EFAULT with the kind that was chosen from the GPU alone.
    let world = World::new();
    let session = world.session(1);
    let fd = device_memory(8 * MIB);
    let both = AdoptRequest { other_mapping: Some(again(&fd)), ..asked(again(&fd)) };
    let memory = world.engine.adopt(session, both).expect("both are dma-bufs");
    assert_eq!((memory.kind, memory.len_bytes), (AdoptedKind::DmaBuf, 8 * MIB));
    world.sim.inject_text("register on mlx5_0: fail eio times 1").expect("a script");
    register(&world, session, memory.id, (0, MIB));
    // The second is asked first from here on: were it the first, it would fail, and the other take over unseen.
    world.sim.inject_text("register on mlx5_0: fail eio times 2").expect("a script");
    let refused = try_register(&world, session, memory.id, &[(2 * MIB, MIB)]).expect_err("both kinds fail");
    assert_eq!(refused.reason(), "DRIVER_FAILED");
    register(&world, session, memory.id, (2 * MIB, MIB));
    let host = AdoptRequest { other_mapping: Some(memfd(MIB)), ..asked(memfd(MIB)) };
    assert_eq!(world.engine.adopt(session, host).expect_err("host memory has one").reason(), "MEMORY_NOT_ADOPTABLE");
}

#[test]
fn the_kind_of_mapping_that_an_hca_took_is_tried_first_with_other_memory_of_the_gpu() {
    let world = World::new();
    let (near, far) = (world.session(1), world.session(2));
    let (lease, ours) = world.acquire(near).keep();
    crate::world::write(&ours, 0, &[0x5a; 8]);
    let (mut a, b) = (Client::new(&world, near, "mlx5_0"), Client::new(&world, far, "mlx5_0"));
    Client::connect(&world, (near, &a), (far, &b));
    // Two files for the two mappings of one memory, so that it shows which one was registered.
    let mut taken = |wr_id: u64, gpu: &str| {
        let (first, second) = (device_memory(MIB), device_memory(MIB));
        let both = AdoptRequest { fd: again(&first), other_mapping: Some(again(&second)), gpu: Some(gpu.to_owned()) };
        let memory = world.engine.adopt(far, both).expect("both are dma-bufs");
        let range = register(&world, far, memory.id, (0, MIB));
        a.post(wr_id, write(local(&lease, "mlx5_0", 0, 8), remote_of(&range, 0)));
        a.expect(wr_id, Status::Success);
        [first, second].map(|fd| read(&fd, 1)[0] == 0x5a)
    };
    world.sim.inject_text("register on mlx5_0: fail eio times 1").expect("a script");
    assert_eq!(taken(1, "GPU0"), [false, true], "found out by trying");
    assert_eq!(taken(2, "GPU0"), [false, true], "remembered");
    assert_eq!(taken(3, "GPU1"), [true, false], "another gpu is another pair");
}

#[test]
fn an_hca_without_dma_bufs_says_so_and_what_it_takes() {
    // NVIDIA/nccl#778, microsoft/mscclpp#657: EOPNOTSUPP (95), EINVAL (22), then EFAULT from another path. There is no
    // other path here: an address of another process means nothing to the daemon.
    let world = World::new();
    let session = world.session(1);
    let memory = adopt(&world, session, device_memory(MIB));
    for (errno, reason, is_advised) in
        [("eopnotsupp", "UNSUPPORTED", true), ("einval", "DRIVER_FAILED", true), ("eio", "DRIVER_FAILED", false)]
    {
        world.sim.inject_text(&format!("register on mlx5_0: fail {errno} times 1")).expect("a script");
        let refused = try_register(&world, session, memory, &[(0, MIB)]).expect_err(errno);
        assert_eq!(refused.reason(), reason, "{refused}");
        assert!(refused.to_string().contains("mlx5_0"), "{refused}");
        assert_eq!(is_advised, refused.to_string().contains("memfd"), "{refused}");
    }
    assert_eq!((regions(&world), world.stat("gdrd_registered_ranges")), (0, 0));
}
