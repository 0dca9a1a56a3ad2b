//! What a hostile input can make the readers hold. Alone in its binary: it looks at the whole process.
#![allow(clippy::panic, clippy::unwrap_used, reason = "helpers of tests, which clippy does not know as such")]

mod common;

use std::io::{self, Read};
use std::path::Path;

use common::memory::{MAX_MEMORY_KB, peak_kb, stream};
use gdrd_topology::assemble::ReadOptions;
use gdrd_topology::read_stream;
use tar::{EntryType, Header};

fn entry(kind: EntryType, name: &str, content: &[u8]) -> Vec<u8> {
    let mut header = Header::new_gnu();
    header.set_path(name).unwrap();
    header.set_entry_type(kind);
    header.set_size(content.len().try_into().unwrap());
    header.set_cksum();
    let padding = content.len().next_multiple_of(512) - content.len();
    [header.as_bytes().as_slice(), content, &vec![0; padding]].concat()
}

#[test]
fn no_input_makes_the_readers_hold_more_than_64_mib() {
    let inputs: Vec<(&str, Box<dyn Read>)> = vec![
        (
            "a million files",
            Box::new(stream(1_000_000, |n| entry(EntryType::Regular, &format!("sys/class/net/{n}"), b""))),
        ),
        (
            "long names in deep folders",
            Box::new(stream(200_000, |n| {
                entry(EntryType::Directory, &format!("sys/{}/{n:050}", "d/".repeat(10)), b"")
            })),
        ),
        ("pages", Box::new(stream(50_000, |n| entry(EntryType::Regular, &format!("sys/devices/{n}"), &[b'7'; 4096])))),
        ("one large header", Box::new(stream(2, |_| entry(EntryType::XHeader, "x", &vec![b'a'; 60 << 10])))),
        ("text without end", Box::new(io::repeat(b'a'))),
        ("elements without end", Box::new(b"<system>".chain(stream(usize::MAX, |_| b"<pci/>".to_vec())))),
        ("rows without end", Box::new(stream(usize::MAX, |n| format!("GPU{n} X SYS\n").into_bytes()))),
        (
            "a full text of elements",
            Box::new(stream(1, |_| format!("<system>{}</system>", "<a/>".repeat(1 << 19)).into_bytes())),
        ),
        (
            "a full text of functions",
            Box::new(stream(1, |_| {
                let lines: String =
                    (0..60_000).map(|n| format!("pci {n:04x}:00:00.0 10de:2335 030200 ? 16x16\n")).collect();
                format!("gdrd-host-profile 1\n{lines}").into_bytes()
            })),
        ),
    ];
    for (name, input) in inputs {
        let outcome = read_stream(input, Path::new(name), &ReadOptions::default());
        let peak = peak_kb();
        assert!(peak < MAX_MEMORY_KB, "{name}: {peak} kB, {:?}", outcome.map(|snapshot| snapshot.host.functions.len()));
    }
}
