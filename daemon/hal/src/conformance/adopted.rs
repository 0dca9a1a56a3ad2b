//! Memory that a client brought along: its owner goes on using it, and registers ranges of it with other rights.
//!
//! The daemon closes an adopted descriptor's duplicates once a range is registered (docs/registrations.md), which
//! `the_fd_may_be_closed_after_registration` and `a_region_keeps_gpu_memory_reachable_after_its_allocation` cover.

use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::Fixture;
use super::rig::{End, MEMORY_BYTES, assert_status, everything, local_in, pair, pattern, register, remote_in, request};
use crate::{Access, MemoryRegion, MemorySource, Opcode, WorkStatus};

const PAGE: u64 = 4096;

fn range<'e>(end: &End<'e>, offset: u64, len_bytes: u64, access: Access) -> Box<dyn MemoryRegion> {
    let source = MemorySource::Host { fd: end.memory.as_fd(), offset, len_bytes };
    end.pd.register(source, access, 0).expect("a range of the memory can be registered")
}

/// A memfd as a client makes one, and as the daemon seals it when it adopts it: no page can vanish under a region.
fn brought_along() -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memory = memfd_create("client", flags).expect("a memfd can be made");
    ftruncate(&memory, MEMORY_BYTES).expect("a memfd can be grown");
    fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL).expect("a memfd takes seals");
    memory
}

pub(super) fn a_range_in_the_middle_of_a_client_s_memory_is_reached_and_no_byte_beside_it(fixture: &dyn Fixture) {
    let (mut a, b) = pair(fixture);
    let memory = brought_along();
    let source = MemorySource::Host { fd: memory.as_fd(), offset: 3 * PAGE, len_bytes: PAGE };
    let region = b.pd.register(source, everything(), 0).expect("a range of the memory can be registered");
    a.fill(0, &pattern(7, 4096));
    a.send(request(1, Opcode::Write, a.local(0, 4096), remote_in(&*region, 0)));
    a.expect(1, WorkStatus::Success);
    let mut content = vec![0; usize::try_from(MEMORY_BYTES).expect("a short length")];
    fixture.read(memory.as_fd(), 0, &mut content);
    assert_eq!(content[3 * 4096..4 * 4096], pattern(7, 4096));
    assert!(content[..3 * 4096].iter().chain(&content[4 * 4096..]).all(|byte| *byte == 0));
    a.send(request(2, Opcode::Write, a.local(0, 64), remote_in(&*region, PAGE - 32)));
    assert_status(fixture, a.next().status, WorkStatus::RemoteAccess, "a write across the end of the range");
}

pub(super) fn what_its_owner_writes_after_registration_is_what_a_peer_reads(fixture: &dyn Fixture) {
    let (mut a, b) = pair(fixture);
    let region = register(&*b.pd, &b.memory, everything());
    for round in 1..=3 {
        b.fill(2 * PAGE, &pattern(round, 512));
        a.send(request(round.into(), Opcode::Read, a.local(0, 512), remote_in(&*region, 2 * PAGE)));
        a.expect(round.into(), WorkStatus::Success);
        assert_eq!(a.content(0, 512), pattern(round, 512), "round {round}");
    }
}

pub(super) fn regions_of_one_range_keep_their_own_rights(fixture: &dyn Fixture) {
    // openucx/ucx#11553: two users of one range with other rights.
    let (mut a, b) = pair(fixture);
    let readable = range(&b, 0, 2 * PAGE, Access { remote_read: true, ..Access::default() });
    let writable = range(&b, PAGE, 2 * PAGE, everything());
    a.fill(0, &pattern(5, 64));
    a.send(request(1, Opcode::Write, a.local(0, 64), remote_in(&*writable, 0)));
    a.expect(1, WorkStatus::Success);
    a.send(request(2, Opcode::Read, a.local(128, 64), remote_in(&*readable, PAGE)));
    a.expect(2, WorkStatus::Success);
    assert_eq!(a.content(128, 64), pattern(5, 64), "both are of one memory");
    a.send(request(3, Opcode::Write, a.local(0, 64), remote_in(&*readable, PAGE)));
    assert_status(fixture, a.next().status, WorkStatus::RemoteAccess, "a write by the readable one's key");
}

pub(super) fn the_end_of_a_region_is_not_that_of_another_over_the_same_bytes(fixture: &dyn Fixture) {
    let (mut a, b) = pair(fixture);
    let (first, second) = (register(&*b.pd, &b.memory, everything()), range(&b, 0, PAGE, everything()));
    let own = register(&*a.pd, &a.memory, everything());
    let from = local_in(&*own, 0, 16);
    a.fill(0, &pattern(9, 16));
    first.deregister().expect("a region can be deregistered");
    a.send(request(1, Opcode::Write, from, remote_in(&*second, 32)));
    a.expect(1, WorkStatus::Success);
    assert_eq!(b.content(32, 16), pattern(9, 16));
}
