//! The hit cache against a plain list, by saved inputs of the fuzz target and by random ones.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "helpers of tests, whose failures name the line")]

mod driver;

use std::path::Path;

use driver::{Seen, drive};
use proptest::prelude::*;

/// Corpus of the fuzz target, from the folder of this crate.
const CORPUS: &str = "../../tests/fuzz/corpus/hit_cache";

#[test]
fn every_saved_input_of_the_fuzz_target_passes() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(CORPUS);
    let mut total = Seen::default();
    let mut files = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let seen = drive(&std::fs::read(entry.unwrap().path()).unwrap());
        total.inserted += seen.inserted;
        total.hits += seen.hits;
        total.freed += seen.freed;
        total.held += seen.held;
        total.stale += seen.stale;
        files += 1;
    }
    assert!(files >= 3, "the corpus is there");
    assert!(total.inserted > 0 && total.hits > 0 && total.held > 0, "it reaches all: {total:?}");
    assert!(total.stale > 0 && total.freed > 0, "it reaches all: {total:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_string_of_steps_is_answered_as_a_list_does(data in prop::collection::vec(any::<u8>(), 0..2000)) {
        drive(&data);
    }
}
