//! The generation page: numbers only rise, clients only read.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "helpers of tests, whose failures name the line")]

use gdrd_ring::{GenerationError, GenerationReader, GenerationWriter, MAX_SLOTS, OpenError};
use gdrd_shm::{Access, Segment};

fn reader_of(writer: &GenerationWriter) -> GenerationReader {
    GenerationReader::open(writer.client_fd().unwrap()).unwrap()
}

#[test]
fn a_reader_sees_each_bump_of_its_slot_alone() {
    let writer = GenerationWriter::create(4).unwrap();
    let reader = reader_of(&writer);
    assert_eq!((reader.slots(), writer.slots()), (4, 4));
    assert_eq!(reader.current(3), Some(0), "never used");
    assert_eq!(writer.bump(3), Ok(1));
    assert_eq!(writer.bump(3), Ok(2));
    assert_eq!((reader.current(3), writer.current(3)), (Some(2), Some(2)));
    assert_eq!((0..3).map(|slot| reader.current(slot)).collect::<Vec<_>>(), [Some(0); 3]);
}

#[test]
fn a_generation_never_falls() {
    let writer = GenerationWriter::create(1).unwrap();
    assert_eq!(writer.set(0, 7), Ok(()));
    assert_eq!(writer.set(0, 7), Ok(()));
    assert_eq!(writer.set(0, 6), Err(GenerationError::NotNewer { slot: 0, current: 7, asked: 6 }));
    assert_eq!(writer.current(0), Some(7));
    assert_eq!(writer.bump(0), Ok(8));
}

#[test]
fn slots_outside_the_page_do_not_exist() {
    let writer = GenerationWriter::create(2).unwrap();
    let reader = reader_of(&writer);
    let none = GenerationError::NoSuchSlot { slot: 2, slots: 2 };
    assert_eq!(writer.bump(2), Err(none.clone()));
    assert!(writer.set(u32::MAX, 1).is_err());
    assert_eq!(writer.set(2, 1), Err(none));
    assert_eq!((writer.current(2), reader.current(2), reader.current(u32::MAX)), (None, None, None));
    assert!(GenerationWriter::create(0).is_err());
    assert!(GenerationWriter::create(MAX_SLOTS + 1).is_err());
}

#[test]
fn what_a_client_gets_cannot_be_written() {
    let writer = GenerationWriter::create(2).unwrap();
    let fd = || writer.client_fd().unwrap();
    assert!(Segment::map(fd(), Access::ReadWrite).is_err());
    assert!(Segment::map(fd(), Access::ReadOnly).is_ok());
    assert_eq!(rustix::fs::ftruncate(writer.fd(), 0), Err(rustix::io::Errno::PERM), "sealed");
    assert_eq!(rustix::io::write(fd(), b"forged"), Err(rustix::io::Errno::BADF));
    let mode = rustix::fs::fstat(fd()).unwrap().st_mode;
    assert_eq!(mode & 0o777, 0o600, "other users cannot open it anew through /proc");
}

#[test]
fn the_next_daemon_goes_on_with_a_page_that_was_kept() {
    let first = GenerationWriter::create(4).unwrap();
    let reader = reader_of(&first);
    first.set(2, 9).unwrap();
    let kept = first.fd().try_clone_to_owned().unwrap();
    drop(first);
    let second = GenerationWriter::adopt(kept).unwrap();
    assert_eq!((second.slots(), second.current(2)), (4, Some(9)));
    second.bump(2).unwrap();
    assert_eq!(reader.current(2), Some(10), "the mapping that the client has had all along");
}

#[test]
fn a_reader_opens_only_a_page_of_its_version_and_size() {
    let open = |offset, bytes: &[u8]| {
        let page = Segment::create("gdrd-test", 64 + 2 * 8).unwrap();
        page.write_from(0, b"gdrd-gen").unwrap();
        page.write_from(8, &1_u32.to_ne_bytes()).unwrap();
        page.write_from(12, &2_u32.to_ne_bytes()).unwrap();
        page.write_from(offset, bytes).unwrap();
        GenerationReader::open(page.try_clone_fd().unwrap())
    };
    assert_eq!(open(64, &5_u64.to_ne_bytes()).unwrap().current(0), Some(5));
    assert!(matches!(open(0, b"x"), Err(OpenError::NotOurs { what: "generation page", .. })));
    assert!(matches!(open(8, &9_u32.to_ne_bytes()), Err(OpenError::Version { found: 9, known: 1, .. })));
    assert!(matches!(open(12, &3_u32.to_ne_bytes()), Err(OpenError::Size { needed: 88, found: 80, .. })));
    assert!(matches!(open(12, &u32::MAX.to_ne_bytes()), Err(OpenError::Size { .. })));
    let tiny = Segment::create("gdrd-test", 4).unwrap();
    assert!(matches!(GenerationReader::open(tiny.try_clone_fd().unwrap()), Err(OpenError::Segment { .. })));
}
