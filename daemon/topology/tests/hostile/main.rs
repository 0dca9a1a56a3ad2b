//! Hostile inputs: no panic and no hang, whatever the bytes. Replays the corpora of the fuzz targets, and bends
//! their files in small ways.
#![forbid(unsafe_code)]
#![allow(clippy::panic, clippy::unwrap_used, reason = "helpers of tests, whose failures name the line")]

mod driver;

use std::path::PathBuf;

use driver::Seen;
use proptest::prelude::*;

type Target = (&'static str, fn(&[u8]) -> Seen);

/// The fuzz targets by the names of their corpora.
const TARGETS: [Target; 6] = [
    ("nccl_xml", driver::nccl_xml),
    ("topo_m", driver::topo_m),
    ("rocm_topo", driver::rocm_topo),
    ("host_profile", driver::host_profile),
    ("input", driver::input),
    ("tree", driver::tree),
];

/// The files of a corpus, in order of their names.
fn corpus(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/fuzz/corpus").join(target);
    let mut files: Vec<PathBuf> = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files.into_iter().map(|path| (path.clone(), std::fs::read(path).unwrap())).collect()
}

#[test]
fn every_saved_input_of_the_fuzz_targets_passes() {
    for (name, drive) in TARGETS {
        let seen: Vec<Seen> = corpus(name).iter().map(|(_, bytes)| drive(bytes)).collect();
        assert!(seen.iter().any(|seen| matches!(seen, Seen::Read(1.., _))), "{name}: some are read: {seen:?}");
        assert!(seen.contains(&Seen::Refused), "{name}: some are refused: {seen:?}");
    }
}

/// One way to bend a file: bytes taken out, put in, doubled or changed.
#[derive(Clone, Debug)]
enum Bend {
    Cut(prop::sample::Index, usize),
    Insert(prop::sample::Index, Vec<u8>),
    Repeat(prop::sample::Index, usize),
    Set(prop::sample::Index, u8),
}

fn bend() -> impl Strategy<Value = Bend> {
    let words: Vec<&[u8]> = vec![
        b"<pci/>",
        b"GPU0",
        b" X ",
        b"NV18",
        b"\t",
        b"\n",
        b"0000:07:00.0",
        b"-1",
        b"..",
        b"\x1b[",
        b"=",
        b"\"",
        b"\0",
    ];
    let at = any::<prop::sample::Index>;
    prop_oneof![
        (at(), 1..40_usize).prop_map(|(at, count)| Bend::Cut(at, count)),
        (at(), prop::sample::select(words)).prop_map(|(at, word)| Bend::Insert(at, word.to_vec())),
        (at(), 1..80_usize).prop_map(|(at, count)| Bend::Repeat(at, count)),
        (at(), any::<u8>()).prop_map(|(at, byte)| Bend::Set(at, byte)),
    ]
}

fn bent(mut bytes: Vec<u8>, bends: &[Bend]) -> Vec<u8> {
    for bend in bends {
        let at = |index: &prop::sample::Index| index.index(bytes.len() + 1);
        let until = |at: usize, count: usize| (at + count).min(bytes.len());
        match bend {
            Bend::Cut(index, count) => drop(bytes.drain(at(index)..until(at(index), *count))),
            Bend::Insert(index, word) => {
                let at = at(index);
                bytes.splice(at..at, word.iter().copied());
            }
            Bend::Repeat(index, count) => {
                let at = at(index);
                let part = bytes[at..until(at, *count)].to_vec();
                bytes.splice(at..at, part);
            }
            Bend::Set(index, byte) => {
                let at = at(index);
                if let Some(place) = bytes.get_mut(at) {
                    *place = *byte;
                }
            }
        }
    }
    bytes
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_bent_input_breaks_a_reader(
        target in 0..TARGETS.len(),
        file in any::<prop::sample::Index>(),
        bends in prop::collection::vec(bend(), 1..6),
    ) {
        let (name, drive) = TARGETS[target];
        let corpus = corpus(name);
        let (_, bytes) = corpus[file.index(corpus.len())].clone();
        drive(&bent(bytes, &bends));
    }
}
