//! The bench itself: every row can be measured, and is told of in docs/performance.md.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

fn bench(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_gdrd-bench")).args(arguments).output().expect("the bench starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("its output is text")
}

fn ids() -> BTreeSet<String> {
    bench(&["--list"]).lines().map(str::to_owned).collect()
}

#[test]
fn every_row_is_told_of_in_the_document() {
    let document = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs/performance.md");
    let document = std::fs::read_to_string(document).expect("docs/performance.md is there");
    let untold: Vec<_> = ids().into_iter().filter(|id| !document.contains(&format!("`{id}`"))).collect();
    assert_eq!(untold, Vec::<String>::new());
}

#[test]
fn every_row_gives_a_figure_or_names_the_peer_that_is_absent() {
    let folder = tempfile::tempdir().expect("a folder");
    let json = folder.path().join("bench.json");
    // As little work as there can be: that it runs is what is asked here.
    bench(&["--rounds", "1", "--divide", "100000", "--json", json.to_str().expect("a plain path")]);
    let json: Value = serde_json::from_slice(&std::fs::read(json).expect("written")).expect("JSON");
    let rows = json["rows"].as_array().expect("rows");
    assert_eq!(rows.iter().map(|row| row["id"].as_str().expect("an id").to_owned()).collect::<BTreeSet<_>>(), ids());
    for row in rows {
        let found = &row["found"];
        assert!(found["value"].is_number() || found["absent"].is_string(), "{row}");
    }
}
