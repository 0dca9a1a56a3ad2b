//! GPU memory by fd.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use super::Fixture;
use super::rig::pattern;
use crate::{GpuAllocation, GpuMemory, GpuMemoryError, GpuUuid, KeptMemory};

fn parts(fixture: &dyn Fixture) -> (Arc<dyn GpuMemory>, GpuUuid, u64) {
    let (memory, gpu) = fixture.gpu().expect("the case needs a gpu");
    let granularity_bytes = memory.capabilities().granularity_bytes;
    (memory, gpu, granularity_bytes)
}

fn allocate(memory: &dyn GpuMemory, gpu: &GpuUuid, len_bytes: u64) -> Box<dyn GpuAllocation> {
    memory.allocate(gpu, len_bytes).expect("the fixture's gpu has memory")
}

fn content(fixture: &dyn Fixture, fd: impl AsFd, len_bytes: u64) -> Vec<u8> {
    let mut bytes = vec![1; usize::try_from(len_bytes).expect("allocations of the suite are small")];
    fixture.read(fd.as_fd(), 0, &mut bytes);
    bytes
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

pub(super) fn lengths_off_the_granularity_are_refused(fixture: &dyn Fixture) {
    let (memory, gpu, granule) = parts(fixture);
    assert!(granule > 0);
    for len_bytes in [0, 1, granule - 1, granule + 1, 3 * granule / 2, u64::MAX] {
        let error = memory.allocate(&gpu, len_bytes).err();
        let told = matches!(error, Some(GpuMemoryError::BadLength { len_bytes: len, granularity_bytes, .. })
            if len == len_bytes && granularity_bytes == granule);
        assert!(told, "{len_bytes} bytes: {error:?}");
    }
    for granules in [1, 3] {
        let allocation = allocate(&*memory, &gpu, granules * granule);
        assert_eq!((allocation.len_bytes(), allocation.gpu()), (granules * granule, &gpu));
    }
}

pub(super) fn unknown_gpus_are_refused(fixture: &dyn Fixture) {
    let (memory, _, granule) = parts(fixture);
    let nobody = GpuUuid("GPU-00000000-dead-beef-0000-000000000000".to_owned());
    assert!(matches!(memory.allocate(&nobody, granule), Err(GpuMemoryError::UnknownGpu { .. })));
    assert!(matches!(memory.usage(&nobody), Err(GpuMemoryError::UnknownGpu { .. })));
}

pub(super) fn memory_is_zero_at_birth(fixture: &dyn Fixture) {
    let (memory, gpu, granule) = parts(fixture);
    for _ in 0..3 {
        let allocation = allocate(&*memory, &gpu, 2 * granule);
        assert!(is_zero(&content(fixture, allocation.memory_fd(), 2 * granule)));
        // Left behind for the next one, should the driver hand the same pages out again.
        fixture.write(allocation.memory_fd(), 0, &pattern(1, 4096));
        fixture.write(allocation.memory_fd(), 2 * granule - 4096, &pattern(2, 4096));
    }
}

pub(super) fn memory_can_be_used_by_its_fd(fixture: &dyn Fixture) {
    let (memory, gpu, granule) = parts(fixture);
    let allocation = allocate(&*memory, &gpu, granule);
    let imported = allocation.memory_fd().try_clone_to_owned().expect("the test process has a descriptor left");
    fixture.write(imported.as_fd(), granule - 4096, &pattern(3, 4096));
    let bytes = content(fixture, allocation.memory_fd(), granule);
    let start = bytes.len() - 4096;
    assert!(bytes[start..] == pattern(3, 4096) && is_zero(&bytes[..start]));
}

pub(super) fn allocations_do_not_overlap(fixture: &dyn Fixture) {
    let (memory, gpu, granule) = parts(fixture);
    let allocations: Vec<_> = (0..4).map(|_| allocate(&*memory, &gpu, granule)).collect();
    let len = usize::try_from(granule).expect("allocations of the suite are small");
    for (seed, allocation) in (1..).zip(&allocations) {
        fixture.write(allocation.memory_fd(), 0, &vec![seed; len]);
    }
    for (seed, allocation) in (1..).zip(&allocations) {
        assert!(content(fixture, allocation.memory_fd(), granule).iter().all(|byte| *byte == seed));
    }
}

pub(super) fn a_scrub_zeroes_every_byte_for_all_holders(fixture: &dyn Fixture) {
    let (memory, gpu, granule) = parts(fixture);
    let len_bytes = 2 * granule;
    let allocation = allocate(&*memory, &gpu, len_bytes);
    let held = allocation.memory_fd().try_clone_to_owned().expect("the test process has a descriptor left");
    let len = usize::try_from(len_bytes).expect("allocations of the suite are small");
    // All of it, then a few bytes here and there, then nothing but the last one.
    fixture.write(held.as_fd(), 0, &vec![0xff; len]);
    allocation.scrub().expect("a healthy gpu can scrub");
    assert!(is_zero(&content(fixture, &held, len_bytes)));
    for offset in [0, 4095, granule - 1, granule, len_bytes - 1] {
        fixture.write(held.as_fd(), offset, &[0xff]);
    }
    allocation.scrub().expect("a healthy gpu can scrub");
    assert!(is_zero(&content(fixture, &held, len_bytes)));
    fixture.write(held.as_fd(), len_bytes - 1, &[0xff]);
    allocation.scrub().expect("a healthy gpu can scrub");
    assert!(is_zero(&content(fixture, &held, len_bytes)));
    fixture.write(held.as_fd(), 0, &[7]);
    assert_eq!(content(fixture, allocation.memory_fd(), 1), [7], "it is still the same memory");
}

pub(super) fn memory_lives_while_an_fd_is_held(fixture: &dyn Fixture) {
    let (memory, gpu, granule) = parts(fixture);
    let allocation = allocate(&*memory, &gpu, granule);
    fixture.write(allocation.memory_fd(), 100, &pattern(1, 1000));
    let held = allocation.memory_fd().try_clone_to_owned().expect("the test process has a descriptor left");
    drop(allocation);
    let other = allocate(&*memory, &gpu, granule);
    let bytes = content(fixture, &held, granule);
    assert!(bytes[100..1100] == pattern(1, 1000) && is_zero(&bytes[1100..]));
    assert!(is_zero(&content(fixture, other.memory_fd(), granule)));
}

pub(super) fn usage_counts_allocations(fixture: &dyn Fixture) {
    let (memory, gpu, granule) = parts(fixture);
    let usage = || memory.usage(&gpu).expect("a healthy gpu tells its usage");
    let before = usage();
    assert!(before.free_bytes <= before.total_bytes);
    let allocations: Vec<_> = (0..4).map(|_| allocate(&*memory, &gpu, granule)).collect();
    let during = usage();
    assert_eq!(during.total_bytes, before.total_bytes);
    // Drivers take a little more for themselves.
    assert!(during.free_bytes <= before.free_bytes - 4 * granule, "{before:?}, then {during:?}");
    drop(allocations);
    assert!(usage().free_bytes >= during.free_bytes + 4 * granule, "{during:?}, then {:?}", usage());
}

pub(super) fn out_of_memory_tells_the_numbers(fixture: &dyn Fixture) {
    let (memory, gpu, granule) = parts(fixture);
    let total_bytes = memory.usage(&gpu).expect("a healthy gpu tells its usage").total_bytes;
    let asked = (total_bytes / granule + 1) * granule;
    let error = memory.allocate(&gpu, asked).err();
    let told = matches!(error, Some(GpuMemoryError::OutOfMemory { len_bytes, free_bytes, .. })
        if len_bytes == asked && free_bytes < asked && free_bytes > 0);
    assert!(told, "{error:?}");
    drop(allocate(&*memory, &gpu, granule));
}

pub(super) fn a_dma_buf_comes_where_the_capability_says_so(fixture: &dyn Fixture) {
    let (memory, gpu, granule) = parts(fixture);
    let allocation = allocate(&*memory, &gpu, granule);
    assert_eq!(allocation.dma_buf_fd().is_some(), memory.capabilities().dma_buf);
}

pub(super) fn memory_goes_on_from_its_kept_descriptors(fixture: &dyn Fixture) {
    let (memory, gpu, granule) = parts(fixture);
    let keep = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().expect("the test process has a descriptor left");
    let first = allocate(&*memory, &gpu, 2 * granule);
    fixture.write(first.memory_fd(), granule, &pattern(3, 1000));
    let held = keep(first.memory_fd());
    let kept = || KeptMemory { memory: keep(first.memory_fd()), dma_buf: first.dma_buf_fd().map(keep) };
    let refused = memory.import(&gpu, 2 * granule - 1, kept()).err();
    assert!(matches!(refused, Some(GpuMemoryError::BadLength { .. })), "{refused:?}");
    let (unknown, again) = (GpuUuid("GPU-nowhere".to_owned()), kept());
    assert!(matches!(memory.import(&unknown, granule, kept()).err(), Some(GpuMemoryError::UnknownGpu { .. })));
    drop(first);
    let second = memory.import(&gpu, 2 * granule, again).expect("the memory is still there");
    assert_eq!((second.gpu(), second.len_bytes()), (&gpu, 2 * granule));
    assert_eq!(second.dma_buf_fd().is_some(), memory.capabilities().dma_buf);
    assert!(content(fixture, second.memory_fd(), 2 * granule)[granule_at(granule)..][..1000] == pattern(3, 1000));
    fixture.write(second.memory_fd(), 0, &[9]);
    assert_eq!(content(fixture, &held, 1), [9], "it is the same memory");
    second.scrub().expect("a healthy gpu can scrub");
    assert!(is_zero(&content(fixture, &held, 2 * granule)));
}

fn granule_at(granule: u64) -> usize {
    usize::try_from(granule).expect("a granule fits into memory")
}
