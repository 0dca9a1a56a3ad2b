//! What archives that unpack to far more than they are can make the readers hold. Alone in its binary: it looks at the whole process.
#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    reason = "helpers of tests, which clippy does not know as such"
)]

mod common;

use std::io::{self, Read, Write};
use std::path::Path;

use common::memory::{MAX_MEMORY_KB, peak_kb, stream};
use gdrd_topology::assemble::ReadOptions;
use gdrd_topology::read_stream;
use tar::Header;

/// The header of a file of 4 GiB - 1, which all that follows belongs to.
fn large_file() -> Vec<u8> {
    let mut header = Header::new_gnu();
    header.set_path("sys/devices/large").unwrap();
    header.set_size(u32::MAX.into());
    header.set_cksum();
    header.as_bytes().to_vec()
}

/// A file of zeros in an xz stream of a window of 64 MiB, as `xz -9` writes it: the smallest window's stream with the size in
/// its block header changed (.xz file format, 3.1 and 5.3.1), since packing with a large one takes as much memory here.
fn xz_of_a_large_window() -> Vec<u8> {
    const HEADER_AT: usize = 12;
    const WINDOW_64_MIB: u8 = 28;
    let mut writer = lzma_rust2::XzWriter::new(Vec::new(), lzma_rust2::XzOptions::with_preset(0)).unwrap();
    writer.write_all(&large_file()).unwrap();
    io::copy(&mut io::repeat(0).take(32 << 20), &mut writer).unwrap();
    let mut packed = writer.finish().unwrap();
    let header = (usize::from(packed[HEADER_AT]) + 1) * 4;
    let (body, checksum) = packed[HEADER_AT..HEADER_AT + header].split_at_mut(header - 4);
    let window = body.windows(2).position(|pair| pair == [0x21, 1]).unwrap() + 2;
    body[window] = WINDOW_64_MIB;
    let mut crc = flate2::Crc::new();
    crc.update(body);
    checksum.copy_from_slice(&crc.sum().to_le_bytes());
    packed
}

/// A Zstandard frame of a window of 2^`window_bits` bytes that never ends: the header of a large file, then blocks of one byte
/// repeated (RFC 8878, 3.1.1).
fn zstd_without_end(window_bits: u8) -> impl Read {
    const MAX_BLOCK: u32 = 128 << 10;
    let block = |kind: u32, size: u32| (size << 3 | kind << 1).to_le_bytes()[..3].to_vec();
    let frame = [0x28, 0xb5, 0x2f, 0xfd, 0, (window_bits - 10) << 3];
    let start = [&frame[..], &block(0, 512), &large_file()].concat();
    io::Cursor::new(start).chain(stream(usize::MAX, move |_| [block(1, MAX_BLOCK), vec![0]].concat()))
}

#[test]
fn no_bomb_makes_the_readers_hold_more_than_64_mib() {
    let bombs: [(&str, Box<dyn Read>, &str); 4] = [
        ("zstd", Box::new(zstd_without_end(20)), "unpacks to more than 268435456 bytes"),
        ("zstd of a large window", Box::new(zstd_without_end(24)), "unpacks to more than 268435456 bytes"),
        ("zstd of a huge window", Box::new(zstd_without_end(30)), "indow"),
        (
            "xz of a large window",
            Box::new(io::Cursor::new(xz_of_a_large_window())),
            "unpacks to more than 25165824 bytes",
        ),
    ];
    for (name, bomb, told) in bombs {
        let refused = read_stream(bomb, Path::new(name), &ReadOptions::default()).unwrap_err().to_string();
        assert!(refused.contains(told), "{name}: {refused}");
        let peak = peak_kb();
        assert!(peak < MAX_MEMORY_KB, "{name}: {peak} kB");
    }
}
