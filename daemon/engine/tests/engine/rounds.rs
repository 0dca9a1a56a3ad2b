//! Acquire and release, over and over.

use std::sync::Arc;

use crate::world::{MIB, World, config, read, request, write};

#[test]
fn a_lease_has_a_registration_on_each_paired_hca() {
    let world = World::new();
    let session = world.session(1);
    let (info, memory) = world.acquire(session).keep();
    let hcas: Vec<&str> = info.registrations.iter().map(|r| &*r.hca).collect();
    assert_eq!(hcas, ["mlx5_0", "mlx5_1"]);
    for registration in &info.registrations {
        assert_ne!(registration.rkey.0, 0);
        assert_eq!((registration.iova, registration.len_bytes), (0, 2 * MIB));
        assert_eq!(registration.generation.0, 1);
    }
    assert!(read(&memory, info.size_bytes).iter().all(|byte| *byte == 0));
}

#[test]
fn a_released_buffer_comes_back_zeroed_with_other_keys_and_a_later_generation() {
    let world = World::new();
    let session = world.session(1);
    let (first, memory) = world.acquire(session).keep();
    write(&memory, 0, &[7; 4096]);
    write(&memory, 2 * MIB - 8, &[7; 8]);
    world.release(session, first.id);
    world.settle();
    let (second, again) = world.acquire(session).keep();
    assert_eq!(world.stat("gdrd_acquires_warm_total"), 1);
    let inode = |fd: &std::os::fd::OwnedFd| rustix::fs::fstat(fd).expect("stat").st_ino;
    assert_eq!(inode(&memory), inode(&again), "the pool lends the same memory again");
    assert!(read(&again, second.size_bytes).iter().all(|byte| *byte == 0));
    for (before, after) in first.registrations.iter().zip(&second.registrations) {
        assert_eq!(before.slot, after.slot);
        assert!(after.generation > before.generation);
        assert_ne!(before.rkey, after.rkey);
    }
}

#[test]
fn many_rounds_leave_only_the_pool() {
    let mut config = config();
    config.pool.ready_target_per_class = 4;
    let world = World::with(config);
    let session = world.session(1);
    for _ in 0..500 {
        let lease = world.lease(session);
        world.release(session, lease);
    }
    world.settle();
    assert_eq!(world.bytes("leased"), 0);
    assert_eq!(world.gpu_used(0), world.bytes("ready") + world.bytes("clean"));
    assert_eq!(world.stat("gdrd_leases_started_total"), 500);
    assert_eq!(world.stat("gdrd_unexpected_inputs_total"), 0);
    world.engine.close_session(session, "test");
    world.until("the tenant to go", || world.stat("gdrd_tenants") == 0);
    assert_eq!((world.gpu_used(0), world.stat("gdrd_registrations")), (world.bytes("clean"), 0));
}

#[test]
fn acquires_from_many_threads_wait_for_buffers_and_all_are_served() {
    let world = Arc::new(World::new());
    let threads: Vec<_> = (0..8)
        .map(|uid| {
            let world = Arc::clone(&world);
            std::thread::spawn(move || {
                // Four tenants of two sessions each.
                let session = world.session(1 + uid % 4);
                for _ in 0..50 {
                    let (info, memory) = world.acquire(session).keep();
                    assert!(read(&memory, 4096).iter().all(|byte| *byte == 0));
                    write(&memory, 0, &[u8::try_from(uid).expect("small"); 4096]);
                    world.release(session, info.id);
                }
                world.engine.close_session(session, "test");
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("the rounds succeed");
    }
    world.until("the tenants to go", || world.stat("gdrd_tenants") == 0);
    assert_eq!(world.gpu_used(0), 0);
    assert_eq!(world.stat("gdrd_unexpected_inputs_total"), 0);
}

#[test]
fn sizes_are_rounded_up_to_their_class() {
    let world = World::new();
    let session = world.session(1);
    for (asked, given) in [(1, 2 * MIB), (2 * MIB + 1, 4 * MIB), (5 * MIB, 8 * MIB)] {
        let (info, memory) = world.try_acquire(session, request("GPU1", asked)).expect("a buffer").keep();
        assert_eq!(info.size_bytes, given);
        assert_eq!(rustix::fs::fstat(&memory).expect("stat").st_size.cast_unsigned(), given);
    }
}
