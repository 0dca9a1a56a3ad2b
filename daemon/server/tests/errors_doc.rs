//! docs/errors.md against the sources: every reason that the daemon can give is explained.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// String literals of capitals and underscores, which in these sources are reasons and nothing else.
fn reasons_in(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            reasons_in(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = std::fs::read_to_string(&path).expect("a source");
            let literals = text.split('"');
            found.extend(literals.filter(|literal| is_reason(literal)).map(str::to_owned));
        }
    }
}

fn is_reason(text: &str) -> bool {
    const OTHERS: [&str; 4] = ["RESET", "INIT", "UNKNOWN", "CARGO_PKG_VERSION"];
    let capitals = text.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_');
    capitals && text.len() > 3 && !OTHERS.contains(&text) && !text.starts_with('_')
}

fn reasons_in_doc() -> BTreeSet<String> {
    let text = std::fs::read_to_string(root().join("docs/errors.md")).expect("the document");
    let tables = text.split_once("## Reasons of calls").expect("its tables").1;
    let rows = tables.lines().filter_map(|line| line.strip_prefix("| "));
    rows.filter_map(|row| row.split(' ').next()).filter(|word| is_reason(word)).map(str::to_owned).collect()
}

#[test]
fn every_reason_is_explained() {
    let mut given = BTreeSet::new();
    reasons_in(&root().join("daemon/server/src"), &mut given);
    reasons_in(&root().join("daemon/engine/src"), &mut given);
    let explained = reasons_in_doc();
    let missing: Vec<&String> = given.difference(&explained).collect();
    assert!(missing.is_empty(), "not in docs/errors.md: {missing:?}");
}
