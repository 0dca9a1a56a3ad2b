//! Registration: ranges, rights, keys, wire addresses.

use std::collections::HashSet;
use std::fs::File;
use std::os::fd::AsFd;

use super::Fixture;
use super::rig::{MEMORY_BYTES, everything, pair, pattern, register, remote_in, request, whole};
use crate::{Access, HcaError, MemoryRegion, MemorySource, Opcode, ProtectionDomain, WorkStatus};

const PAGE: u64 = 4096;

fn domain(fixture: &dyn Fixture) -> std::sync::Arc<dyn ProtectionDomain> {
    fixture.hcas()[0].alloc_pd().expect("a protection domain can be made")
}

fn assert_invalid(result: Result<Box<dyn MemoryRegion>, HcaError>, what: &str) {
    let error = result.err();
    assert!(matches!(error, Some(HcaError::Invalid { .. })), "{what}: {error:?}");
}

pub(super) fn a_region_tells_what_it_was_made_with(fixture: &dyn Fixture) {
    let memory = fixture.host_memory(MEMORY_BYTES);
    let source = MemorySource::Host { fd: memory.as_fd(), offset: PAGE, len_bytes: 3 * PAGE };
    let region = domain(fixture).register(source, everything(), 0).expect("a range inside the memory is fine");
    assert_eq!(region.len_bytes(), 3 * PAGE);
    assert_eq!(region.access(), everything());
    assert!(region.iova().checked_add(region.len_bytes()).is_some());
    region.deregister().expect("a region can be deregistered");
}

pub(super) fn registering_nothing_or_past_the_end_is_refused(fixture: &dyn Fixture) {
    let memory = fixture.host_memory(MEMORY_BYTES);
    let pd = domain(fixture);
    for (offset, len_bytes) in [
        (0, 0),
        (0, MEMORY_BYTES + 1),
        (PAGE, MEMORY_BYTES),
        (MEMORY_BYTES, 1),
        (MEMORY_BYTES, PAGE),
        (1 << 62, PAGE),
        (u64::MAX - PAGE + 1, PAGE),
        (u64::MAX - PAGE + 1, 2 * PAGE),
        (0, u64::MAX),
    ] {
        let source = MemorySource::Host { fd: memory.as_fd(), offset, len_bytes };
        assert_invalid(pd.register(source, everything(), 0), &format!("{len_bytes} bytes at {offset}"));
    }
}

pub(super) fn remote_write_or_atomic_without_local_write_is_refused(fixture: &dyn Fixture) {
    let memory = fixture.host_memory(MEMORY_BYTES);
    let pd = domain(fixture);
    for access in [
        Access { remote_write: true, ..Access::default() },
        Access { remote_atomic: true, remote_read: true, ..Access::default() },
    ] {
        assert_invalid(pd.register(whole(&memory), access, 0), &format!("{access:?}"));
    }
}

pub(super) fn host_memory_must_be_a_sealed_memfd(fixture: &dyn Fixture) {
    let pd = domain(fixture);
    let device = File::open("/dev/null").expect("there is a /dev/null");
    let source = MemorySource::Host { fd: device.as_fd(), offset: 0, len_bytes: PAGE };
    assert_invalid(pd.register(source, everything(), 0), "/dev/null");
    let flags = rustix::fs::MemfdFlags::CLOEXEC | rustix::fs::MemfdFlags::ALLOW_SEALING;
    let unsealed = rustix::fs::memfd_create("unsealed", flags).expect("a memfd can be made");
    rustix::fs::ftruncate(&unsealed, PAGE).expect("a memfd can be grown");
    let source = MemorySource::Host { fd: unsealed.as_fd(), offset: 0, len_bytes: PAGE };
    assert_invalid(pd.register(source, everything(), 0), "a memfd that can shrink");
}

pub(super) fn keys_are_never_those_of_the_region_before(fixture: &dyn Fixture) {
    let memory = fixture.host_memory(MEMORY_BYTES);
    let pd = domain(fixture);
    let mut before = None;
    for _ in 0..100 {
        let region = register(&*pd, &memory, everything());
        let keys = (region.lkey(), region.rkey());
        if let Some((lkey, rkey)) = before.replace(keys) {
            assert_ne!(keys.0, lkey);
            assert_ne!(keys.1, rkey);
        }
    }
}

pub(super) fn keys_differ_between_live_regions(fixture: &dyn Fixture) {
    let memory = fixture.host_memory(MEMORY_BYTES);
    let (pd, other) = (domain(fixture), domain(fixture));
    let domains = [&pd, &other];
    let regions: Vec<_> = (0..64).map(|index| register(&**domains[index % 2], &memory, everything())).collect();
    let lkeys: HashSet<_> = regions.iter().map(|region| region.lkey()).collect();
    let rkeys: HashSet<_> = regions.iter().map(|region| region.rkey()).collect();
    assert_eq!((lkeys.len(), rkeys.len()), (64, 64));
}

pub(super) fn pieces_of_one_memory_are_registered_at_once_and_each_opens_its_own_bytes(fixture: &dyn Fixture) {
    const PIECE: u64 = MEMORY_BYTES / 4;
    let (mut a, b) = pair(fixture);
    let memory = fixture.host_memory(MEMORY_BYTES);
    let (pd, source) = (&b.pd, &memory);
    let pieces: Vec<Box<dyn MemoryRegion>> = std::thread::scope(|scope| {
        let one = |offset: u64| {
            let source = MemorySource::Host { fd: source.as_fd(), offset, len_bytes: PIECE };
            pd.register(source, everything(), offset).expect("a piece of the memory can be registered")
        };
        let running: Vec<_> = (0..4).map(|piece| scope.spawn(move || one(piece * PIECE))).collect();
        running.into_iter().map(|one| one.join().expect("a registration does not panic")).collect()
    });
    // The wire address goes on from piece to piece; only the key changes.
    a.fill(0, b"in each");
    for (number, piece) in (0..).zip(&pieces) {
        assert_eq!(piece.iova(), number * PIECE);
        a.send(request(number, Opcode::Write, a.local(0, 7), remote_in(&**piece, PIECE - 7)));
        a.expect(number, WorkStatus::Success);
        let mut landed = [0; 7];
        fixture.read(memory.as_fd(), (number + 1) * PIECE - 7, &mut landed);
        assert_eq!(&landed, b"in each");
    }
    a.send(request(9, Opcode::Write, a.local(0, 7), remote_in(&*pieces[0], PIECE - 6)));
    a.expect(9, WorkStatus::RemoteAccess);
}

pub(super) fn the_fd_may_be_closed_after_registration(fixture: &dyn Fixture) {
    let (mut a, b) = pair(fixture);
    let memory = fixture.host_memory(MEMORY_BYTES);
    let kept = memory.try_clone().expect("the test process has a descriptor left");
    let region = register(&*b.pd, &memory, everything());
    drop(memory);
    a.fill(0, b"after close");
    a.send(request(1, Opcode::Write, a.local(0, 11), remote_in(&*region, PAGE)));
    a.expect(1, WorkStatus::Success);
    let mut landed = [0; 11];
    fixture.read(kept.as_fd(), PAGE, &mut landed);
    assert_eq!(&landed, b"after close");
}

pub(super) fn the_iova_asked_for_holds(fixture: &dyn Fixture) {
    let (mut a, b) = pair(fixture);
    a.fill(0, &pattern(1, 16));
    for iova in [0, 0x1000, 0x7fff_1234_5000, u64::MAX - MEMORY_BYTES - PAGE + 1] {
        let region = b.pd.register(whole(&b.memory), everything(), iova).expect("an aligned iova is honoured");
        assert_eq!(region.iova(), iova);
        a.send(request(iova, Opcode::Write, a.local(0, 16), remote_in(&*region, 32)));
        a.expect(iova, WorkStatus::Success);
        assert_eq!(b.content(32, 16), pattern(1, 16));
        b.fill(32, &[0; 16]);
    }
}

pub(super) fn an_iova_that_wraps_is_refused(fixture: &dyn Fixture) {
    let memory = fixture.host_memory(MEMORY_BYTES);
    let pd = domain(fixture);
    for iova in [u64::MAX - PAGE + 1, u64::MAX - MEMORY_BYTES + PAGE + 1] {
        assert_invalid(pd.register(whole(&memory), everything(), iova), &format!("iova {iova:#x}"));
    }
}

pub(super) fn an_iova_at_another_place_in_its_page_is_refused(fixture: &dyn Fixture) {
    let memory = fixture.host_memory(MEMORY_BYTES);
    let pd = domain(fixture);
    assert_invalid(pd.register(whole(&memory), everything(), 8), "iova 8 for offset 0");
    let source = MemorySource::Host { fd: memory.as_fd(), offset: 512, len_bytes: PAGE };
    assert_invalid(pd.register(source, everything(), 0), "iova 0 for offset 512");
    let region = pd.register(source, everything(), 7 * PAGE + 512).expect("the place in the page agrees");
    assert_eq!(region.iova(), 7 * PAGE + 512);
}

pub(super) fn the_provider_sets_the_iova(fixture: &dyn Fixture) {
    let (mut a, b) = pair(fixture);
    // An address no provider picks by itself: it is the caller's wish, and not heard.
    let region = b.pd.register(whole(&b.memory), everything(), PAGE).expect("the wish is ignored, not refused");
    assert_ne!(region.iova(), PAGE);
    a.fill(0, &pattern(1, 16));
    a.send(request(1, Opcode::Write, a.local(0, 16), remote_in(&*region, 8)));
    a.expect(1, WorkStatus::Success);
    assert_eq!(b.content(8, 16), pattern(1, 16));
}

pub(super) fn host_memory_is_no_dma_buf(fixture: &dyn Fixture) {
    let memory = fixture.host_memory(MEMORY_BYTES);
    let source = MemorySource::DmaBuf { fd: memory.as_fd(), offset: 0, len_bytes: MEMORY_BYTES };
    assert_invalid(domain(fixture).register(source, everything(), 0), "a memfd as dma-buf");
}

pub(super) fn dma_bufs_are_refused_where_the_capability_says_so(fixture: &dyn Fixture) {
    let (memory, gpu) = fixture.gpu().expect("the case needs a gpu");
    let len_bytes = memory.capabilities().granularity_bytes;
    let allocation = memory.allocate(&gpu, len_bytes).expect("the fixture's gpu has memory");
    let fd = allocation.dma_buf_fd().expect("the case needs dma-bufs");
    let result = domain(fixture).register(MemorySource::DmaBuf { fd, offset: 0, len_bytes }, everything(), 0);
    assert!(matches!(result, Err(HcaError::Unsupported { .. })));
}
