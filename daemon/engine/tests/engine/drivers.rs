//! What registrations ask of drivers, and what becomes of what drivers say.

use gdrd_engine::{AdoptRequest, HostPlan, PlannedGpu};

use crate::counted;
use crate::registrations::{adopt, again, asked, device_memory, regions, register, try_register};
use crate::world::{MIB, World, config, hca, plan};

#[test]
fn deregistering_asks_no_driver_anything_about_the_memory() {
    // meta-pytorch/torchcomms#1356: the memory is gone when its registration ends, and a question about it fails.
    let (world, calls) = counted::world(config());
    let session = world.session(1);
    let fd = device_memory(MIB);
    let memory = adopt(&world, session, again(&fd));
    let range = register(&world, session, memory, (0, MIB));
    assert!(calls.take().contains(&"register"), "they are noted");
    drop(fd);
    assert_eq!(world.engine.deregister(session, vec![range.id]), Ok(1));
    world.engine.disown(session, memory).wait().expect("given up");
    assert_eq!(regions(&world), 0);
    assert_eq!(calls.take(), ["deregister"]);
}

#[test]
fn whatever_errno_refuses_one_kind_of_mapping_the_other_is_tried() {
    // openucx/ucx#11584: 524 (ENOTSUPP of the kernel) where the direct NIC is down; ai-dynamo/nixl#1694: EFAULT with EFA.
    let world = World::new();
    let session = world.session(1);
    for (word, errno) in [("enotsupp", 524), ("efault", 14)] {
        let fd = device_memory(MIB);
        let both = AdoptRequest { other_mapping: Some(again(&fd)), ..asked(again(&fd)) };
        let memory = world.engine.adopt(session, both).expect("both are dma-bufs").id;
        world.sim.inject_text(&format!("register on mlx5_0: fail {word} times 1")).expect("a script");
        register(&world, session, memory, (0, MIB));
        // Neither: the errno is told, since it is what an operator can look up.
        let alone = adopt(&world, session, device_memory(MIB));
        world.sim.inject_text(&format!("register on mlx5_0: fail {word} times 1")).expect("a script");
        let refused = try_register(&world, session, alone, &[(0, MIB)]).expect_err(word);
        assert_eq!(refused.reason(), "DRIVER_FAILED", "{refused}");
        assert!(refused.to_string().contains(&errno.to_string()), "{refused}");
    }
}

#[test]
fn the_bar1_that_a_gpu_has_bounds_what_is_registered_of_it_and_of_no_other() {
    // Mellanox/nv_peer_memory#101: 500 MB of a GPU with a BAR1 of 256 MiB (T4).
    let small = |gpu: PlannedGpu| PlannedGpu { bar1_bytes: (gpu.name == "GPU0").then_some(256 * MIB), ..gpu };
    let plan = HostPlan { gpus: plan().gpus.into_iter().map(small).collect(), ..plan() };
    let world = World::planned(config(), vec![hca(0), hca(1), hca(2)], plan);
    let session = world.session(1);
    // Nothing of it is touched.
    let memory = adopt(&world, session, device_memory(500 * MIB));
    let refused = try_register(&world, session, memory, &[(0, MIB)]).expect_err("more than its BAR1");
    assert_eq!(refused.reason(), "BAR1_EXHAUSTED");
    assert!(refused.to_string().contains("268435456") && refused.to_string().contains("524288000"), "{refused}");
    let fits = adopt(&world, session, device_memory(256 * MIB));
    register(&world, session, fits, (0, MIB));
    let other = AdoptRequest { gpu: Some("GPU1".to_owned()), ..asked(device_memory(500 * MIB)) };
    let other = world.engine.adopt(session, other).expect("a dma-buf").id;
    register(&world, session, other, (0, MIB));
}
