//! What a segment promises: ranges, access, seals, and moves that equal a plain byte array's.
#![forbid(unsafe_code)]
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "helpers of tests, whose failures name the line"
)]

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use gdrd_shm::{
    Access, MapOptions, Seals, Segment, SegmentOptions, SharedSlots, SharedU32, SharedU64, ShmError, add_seals, seals,
};
use proptest::prelude::*;
use rustix::fs::MemfdFlags;
use rustix::io::Errno;

const LEN: u64 = 10_000;

fn segment() -> Segment {
    Segment::create("gdrd-test", LEN).expect("a small memfd can be made")
}

fn content(segment: &Segment) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(segment.len_bytes()).unwrap()];
    segment.read_into(0, &mut bytes).unwrap();
    bytes
}

fn again(segment: &Segment, access: Access) -> Result<Segment, ShmError> {
    Segment::map(segment.try_clone_fd().unwrap(), access)
}

fn raw_memfd(len: u64, wanted: Seals) -> OwnedFd {
    let fd = rustix::fs::memfd_create("gdrd-raw", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, len).unwrap();
    add_seals(&fd, wanted).unwrap();
    fd
}

fn errno(result: Result<impl Sized, ShmError>) -> Option<Errno> {
    match result {
        Err(ShmError::Kernel { source, .. }) => Some(source),
        _ => None,
    }
}

#[test]
fn a_new_segment_is_zero_and_keeps_what_is_written_at_any_offset() {
    let segment = segment();
    assert_eq!(segment.len_bytes(), LEN);
    assert!(content(&segment).iter().all(|byte| *byte == 0));
    segment.write_from(4095, b"across a page").unwrap();
    let mut found = [0; 13];
    segment.read_into(4095, &mut found).unwrap();
    assert_eq!(&found, b"across a page");
}

#[test]
fn two_mappings_of_one_descriptor_show_the_same_bytes() {
    let first = segment();
    let second = again(&first, Access::ReadWrite).unwrap();
    first.write_from(17, b"to and").unwrap();
    second.write_from(23, b" fro").unwrap();
    assert_eq!(content(&first), content(&second));
    assert_eq!(&content(&second)[17..27], b"to and fro");
}

#[test]
fn ranges_outside_the_segment_are_refused_and_change_nothing() {
    let (segment, other) = (segment(), segment());
    let outside = |result| assert!(matches!(result, Err(ShmError::OutOfRange { .. })), "{result:?}");
    outside(segment.read_into(LEN - 3, &mut [0; 4]));
    outside(segment.write_from(LEN - 3, &[1; 4]));
    outside(segment.write_from(u64::MAX, &[1; 4]));
    outside(segment.zero(LEN, 1));
    outside(segment.zero(1, u64::MAX));
    outside(segment.copy_to(0, &other, LEN - 3, 4));
    outside(segment.copy_to(LEN - 3, &other, 0, 4));
    outside(segment.copy_within(u64::MAX - 1, 0, 2));
    outside(segment.load_u64(LEN).map(|_| ()));
    outside(segment.atomic_u32(u64::MAX - 3).map(|_| ()));
    assert!(content(&segment).iter().all(|byte| *byte == 0));
    segment.write_from(LEN, &[]).unwrap();
}

#[test]
fn atomics_need_their_alignment_and_act_on_the_shared_bytes() {
    let segment = Arc::new(segment());
    assert_eq!(segment.atomic_u32(2).err(), Some(ShmError::Misaligned { offset: 2, align_bytes: 4 }));
    assert_eq!(segment.atomic_u64(4).err(), Some(ShmError::Misaligned { offset: 4, align_bytes: 8 }));
    SharedU64::new(&segment, 8).unwrap().store(0x0102_0304_0506_0708, Ordering::Relaxed);
    SharedU32::new(&segment, 16).unwrap().fetch_add(5, Ordering::Relaxed);
    assert_eq!(segment.load_u64(8), Ok(0x0102_0304_0506_0708));
    assert_eq!(segment.load_u32(16), Ok(5));
    assert_eq!(content(&segment)[8..16], 0x0102_0304_0506_0708_u64.to_ne_bytes());
}

#[test]
fn a_word_outlives_the_last_other_holder_of_its_segment() {
    let segment = Arc::new(segment());
    let word = SharedU32::new(&segment, 0).unwrap();
    drop(segment);
    word.store(7, Ordering::Relaxed);
    assert_eq!(word.load(Ordering::Relaxed), 7);
}

#[test]
fn slots_wrap_at_their_count_and_stay_in_their_range() {
    let segment = Arc::new(segment());
    let slots = SharedSlots::<4>::new(&segment, 64, 8).unwrap();
    slots.write(u32::MAX, &[1, 2, 3, 4]);
    assert_eq!(slots.read(7), [1, 2, 3, 4]);
    assert_eq!(segment.load_u64(64 + 7 * 32), Ok(1));
    assert_eq!(slots.read(8), slots.read(0));
    assert_eq!(SharedSlots::<4>::new(&segment, 64, 3).err(), Some(ShmError::SlotCount { count: 3 }));
    assert!(matches!(SharedSlots::<4>::new(&segment, 4, 8), Err(ShmError::Misaligned { .. })));
    assert!(matches!(SharedSlots::<4>::new(&segment, 0, 1 << 30), Err(ShmError::OutOfRange { .. })));
}

#[test]
fn a_read_only_mapping_reads_and_refuses_every_write() {
    let owner = Arc::new(segment());
    owner.write_from(8, &42_u64.to_ne_bytes()).unwrap();
    let reader = Arc::new(again(&owner, Access::ReadOnly).unwrap());
    assert_eq!(reader.load_u64(8), Ok(42));
    assert_eq!(reader.write_from(0, b"x"), Err(ShmError::ReadOnly));
    assert_eq!(reader.zero(0, 1), Err(ShmError::ReadOnly));
    assert_eq!(owner.copy_to(0, &reader, 0, 1), Err(ShmError::ReadOnly));
    assert_eq!(reader.atomic_u64(8).err(), Some(ShmError::ReadOnly));
    assert_eq!(SharedSlots::<4>::new(&reader, 0, 8).err(), Some(ShmError::ReadOnly));
}

#[test]
fn a_segment_can_neither_shrink_nor_grow_nor_get_more_seals() {
    let segment = segment();
    assert_eq!(seals(&segment), Ok(Seals::SHRINK | Seals::GROW | Seals::SEAL));
    assert_eq!(rustix::fs::ftruncate(&segment, 1), Err(Errno::PERM));
    assert_eq!(rustix::fs::ftruncate(&segment, 1 << 20), Err(Errno::PERM));
    assert_eq!(errno(add_seals(&segment, Seals::FUTURE_WRITE)), Some(Errno::PERM));
    assert_eq!(add_seals(&segment, Seals::SHRINK), Ok(()), "what is there is not asked for again");
}

#[test]
fn shrink_is_sealed_even_if_no_seal_is_asked_for() {
    let segment = SegmentOptions::new(LEN).seals(Seals::empty()).create("gdrd-test").unwrap();
    assert_eq!(seals(&segment), Ok(Seals::SHRINK));
}

#[test]
fn after_future_write_the_maker_still_writes_and_others_only_read() {
    let page = SegmentOptions::new(LEN)
        .seals(Seals::SHRINK | Seals::GROW | Seals::FUTURE_WRITE | Seals::SEAL)
        .create("gdrd-test")
        .unwrap();
    assert_eq!(errno(again(&page, Access::ReadWrite)), Some(Errno::PERM));
    let reader = again(&page, Access::ReadOnly).unwrap();
    page.write_from(0, b"news").unwrap();
    assert_eq!(&content(&reader)[..4], b"news");
}

#[test]
fn foreign_descriptors_are_mapped_only_if_they_cannot_raise_sigbus() {
    let shrinkable = raw_memfd(LEN, Seals::GROW);
    assert_eq!(Segment::map(shrinkable, Access::ReadWrite).err(), Some(ShmError::NotSealed { found: Seals::GROW }));
    let file = tempfile::tempfile().unwrap();
    file.set_len(LEN).unwrap();
    // A temporary file is on tmpfs, which knows seals, or on a file system that knows none.
    let refused = Segment::map(file.into(), Access::ReadOnly);
    assert!(
        matches!(refused, Err(ShmError::NotSealed { .. })) || errno(refused) == Some(Errno::INVAL),
        "a file is no memfd"
    );
    let sealed = raw_memfd(LEN, Seals::SHRINK);
    assert_eq!(Segment::map(sealed, Access::ReadWrite).unwrap().len_bytes(), LEN);
}

#[test]
fn lengths_that_cannot_be_mapped_are_refused() {
    let too_long = |len_bytes, max_bytes| ShmError::Length { len_bytes, max_bytes };
    assert!(matches!(Segment::create("gdrd-test", 0), Err(ShmError::Length { len_bytes: 0, .. })));
    assert!(matches!(Segment::create("gdrd-test", u64::MAX), Err(ShmError::Length { .. })));
    assert!(matches!(
        Segment::map(raw_memfd(0, Seals::SHRINK), Access::ReadOnly),
        Err(ShmError::Length { len_bytes: 0, .. })
    ));
    let bounded = MapOptions::new(Access::ReadOnly).max_len_bytes(LEN - 1).map(raw_memfd(LEN, Seals::SHRINK));
    assert_eq!(bounded.err(), Some(too_long(LEN, LEN - 1)));
}

#[test]
fn a_populated_segment_has_its_pages_before_the_first_touch() {
    let segment = SegmentOptions::new(64 << 12).populate(true).create("gdrd-test").unwrap();
    // st_blocks counts 512-byte blocks that tmpfs has allocated, stat(3type).
    assert_eq!(rustix::fs::fstat(&segment).unwrap().st_blocks, (64 << 12) / 512);
    let lazy = SegmentOptions::new(64 << 12).create("gdrd-test").unwrap();
    assert_eq!(rustix::fs::fstat(&lazy).unwrap().st_blocks, 0);
}

#[test]
fn huge_pages_come_from_the_pool_or_the_error_says_that_there_is_none() {
    const HUGE: u64 = 2 << 20;
    match SegmentOptions::new(HUGE).huge_pages(true).create("gdrd-test") {
        Ok(segment) => {
            segment.zero(0, HUGE).unwrap();
            assert_eq!(again(&segment, Access::ReadOnly).err(), Some(ShmError::HugePagesRefused));
            let trusted = MapOptions::new(Access::ReadOnly).allow_huge_pages(true);
            assert_eq!(trusted.map(segment.try_clone_fd().unwrap()).unwrap().len_bytes(), HUGE);
        }
        // No pool; or a kernel without hugetlbfs; or another default size than x86's.
        refused => assert!(matches!(errno(refused), Some(Errno::NOMEM | Errno::NOSYS | Errno::INVAL))),
    }
}

#[test]
fn dropping_a_segment_leaves_neither_mapping_nor_descriptor() {
    const NAME: &str = "gdrd-dropped";
    let traces = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap().matches(NAME).count();
        let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let links = links.filter_map(|entry| std::fs::read_link(entry.path()).ok());
        (maps, links.filter(|link| link.to_string_lossy().contains(NAME)).count())
    };
    let segment = Segment::create(NAME, LEN).unwrap();
    assert_eq!(traces(), (1, 1));
    drop(segment);
    assert_eq!(traces(), (0, 0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn moves_equal_those_of_a_plain_array(
        seed in any::<u8>(),
        moves in prop::collection::vec((0..LEN, 0..LEN, 0..LEN, 0..4_u8), 1..12),
    ) {
        let (first, second) = (segment(), segment());
        let mut model: [Vec<u8>; 2] = [Vec::new(), Vec::new()];
        for (segment, bytes) in [&first, &second].into_iter().zip(&mut model) {
            *bytes = (0..LEN).map(|i| seed.wrapping_mul(31).wrapping_add((i % 251) as u8)).collect();
            segment.write_from(0, bytes).unwrap();
        }
        for (from, to, len, kind) in moves {
            let len = len.min(LEN - from).min(LEN - to);
            let (f, t, n) = (from as usize, to as usize, len as usize);
            match kind {
                0 => {
                    first.copy_to(from, &second, to, len).unwrap();
                    let bytes = model[0][f..f + n].to_vec();
                    model[1][t..t + n].copy_from_slice(&bytes);
                }
                1 => {
                    second.copy_to(from, &first, to, len).unwrap();
                    let bytes = model[1][f..f + n].to_vec();
                    model[0][t..t + n].copy_from_slice(&bytes);
                }
                2 => {
                    first.copy_within(from, to, len).unwrap();
                    model[0].copy_within(f..f + n, t);
                }
                _ => {
                    first.zero(to, len / 8).unwrap();
                    model[0][t..t + n / 8].fill(0);
                }
            }
        }
        prop_assert_eq!(content(&first), &model[0][..]);
        prop_assert_eq!(content(&second), &model[1][..]);
    }

    #[test]
    fn short_aligned_moves_equal_those_of_a_plain_array(from in 0..64_u64, to in 0..64_u64, words in 0..32_u64) {
        let segment = segment();
        let mut model: Vec<u8> = (0..LEN).map(|i| (i % 253) as u8).collect();
        segment.write_from(0, &model).unwrap();
        segment.copy_within(from * 8, to * 8, words * 8).unwrap();
        model.copy_within((from * 8) as usize..((from + words) * 8) as usize, (to * 8) as usize);
        prop_assert_eq!(content(&segment), model);
    }
}
