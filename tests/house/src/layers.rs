//! The layer table: which crate of the workspace may use which, and what must never stand anywhere below it.
//! `ARCHITECTURE.md` gives the reasons. A crate that is not in the table is itself a finding.

use std::collections::BTreeSet;

use crate::workspace::{Arrow, Kind};

/// What one crate may use.
#[derive(Clone, Copy, Debug)]
pub struct Layer {
    /// The crate.
    pub name: &'static str,
    /// Crates of this workspace that it may depend on.
    pub uses: &'static [&'static str],
    /// Crates of this workspace that its tests may depend on as well.
    pub tests_use: &'static [&'static str],
    /// Crates, ours or not, that may not stand anywhere below it, at any depth; its tests are free.
    pub shuns: &'static [&'static str],
}

/// Crates that bind the hardware libraries at link time; clients must start where those are absent.
const HARDWARE_BINDINGS: &[&str] = &["rdma-sys", "rdma-mummy-sys", "cudarc", "nvml-wrapper"];
/// A library for others: no runtime.
const RUNTIME: &[&str] = &["tokio"];
/// A pure core: no runtime, and no idea of how its words travel.
const RUNTIME_AND_WIRE: &[&str] = &["tokio", "tonic", "prost"];

/// The table of this workspace.
pub const LAYERS: &[Layer] = &[
    Layer { name: "gdrd-topology", uses: &[], tests_use: &[], shuns: RUNTIME },
    Layer { name: "gdrd-shm", uses: &[], tests_use: &[], shuns: RUNTIME_AND_WIRE },
    Layer { name: "gdrd-ring", uses: &["gdrd-shm"], tests_use: &[], shuns: RUNTIME_AND_WIRE },
    Layer { name: "gdrd-stream", uses: &[], tests_use: &[], shuns: &["tonic", "prost"] },
    Layer { name: "gdrd-proto", uses: &[], tests_use: &[], shuns: &[] },
    Layer { name: "gdrd-hal", uses: &["gdrd-topology"], tests_use: &[], shuns: RUNTIME_AND_WIRE },
    Layer {
        name: "gdrd-sim",
        uses: &["gdrd-hal", "gdrd-topology", "gdrd-shm"],
        tests_use: &[],
        shuns: RUNTIME_AND_WIRE,
    },
    Layer { name: "gdrd-verbs", uses: &["gdrd-hal", "gdrd-topology"], tests_use: &[], shuns: RUNTIME_AND_WIRE },
    Layer {
        name: "gdrd-cuda",
        uses: &["gdrd-hal", "gdrd-topology"],
        tests_use: &["gdrd-sim"],
        shuns: RUNTIME_AND_WIRE,
    },
    Layer {
        name: "gdrd-nvml",
        uses: &["gdrd-hal", "gdrd-topology"],
        tests_use: &["gdrd-fake-driver"],
        shuns: RUNTIME_AND_WIRE,
    },
    Layer {
        name: "gdrd-engine",
        uses: &["gdrd-hal", "gdrd-topology", "gdrd-ring", "gdrd-shm"],
        tests_use: &["gdrd-sim"],
        shuns: RUNTIME_AND_WIRE,
    },
    Layer {
        name: "gdrd-server",
        uses: &["gdrd-engine", "gdrd-topology", "gdrd-proto", "gdrd-ring", "gdrd-stream"],
        tests_use: &["gdrd-sim", "gdrd-hal", "gdrd-shm"],
        shuns: &["gdrd-sim"],
    },
    Layer {
        name: "gdrd",
        uses: &[
            "gdrd-topology",
            "gdrd-hal",
            "gdrd-sim",
            "gdrd-verbs",
            "gdrd-cuda",
            "gdrd-nvml",
            "gdrd-engine",
            "gdrd-server",
        ],
        tests_use: &["gdrd-harness", "gdrd-client", "gdrd-proto"],
        shuns: &["gdrd-client", "gdrctl"],
    },
    Layer { name: "gdrd-client-sys", uses: &[], tests_use: &[], shuns: RUNTIME_AND_WIRE },
    Layer {
        name: "gdrd-client",
        uses: &["gdrd-client-sys", "gdrd-proto", "gdrd-ring", "gdrd-shm", "gdrd-stream"],
        tests_use: &["gdrd-harness"],
        shuns: HARDWARE_BINDINGS,
    },
    Layer {
        name: "gdrctl",
        uses: &["gdrd-client", "gdrd-topology", "gdrd-shm"],
        tests_use: &["gdrd-harness"],
        shuns: HARDWARE_BINDINGS,
    },
    Layer {
        name: "gdrd-harness",
        uses: &["gdrd-client", "gdrd-proto", "gdrd-ring", "gdrd-shm", "gdrd-topology"],
        tests_use: &[],
        shuns: HARDWARE_BINDINGS,
    },
    Layer {
        name: "gdrd-bench",
        uses: &["gdrd-client", "gdrd-harness", "gdrd-ring", "gdrd-shm", "gdrd-topology"],
        tests_use: &[],
        shuns: HARDWARE_BINDINGS,
    },
    Layer {
        name: "gdrd-device-test",
        uses: &["gdrd-client", "gdrd-client-sys", "gdrd-cuda", "gdrd-hal", "gdrd-nvml", "gdrd-sim", "gdrd-topology"],
        tests_use: &["gdrd-fake-driver", "gdrd-harness"],
        shuns: &["gdrd-engine", "gdrd-server"],
    },
    // Stands in for the driver's libraries; only tests know it.
    Layer { name: "gdrd-fake-driver", uses: &[], tests_use: &[], shuns: RUNTIME_AND_WIRE },
    Layer { name: "gdrd-house", uses: &[], tests_use: &[], shuns: RUNTIME },
    // Runs inside of virtual machines.
    Layer {
        name: "gdrd-vm",
        uses: &["gdrd-hal", "gdrd-verbs"],
        tests_use: &["gdrd-harness", "gdrd-proto", "gdrd-shm"],
        shuns: &[],
    },
];

/// Every way in which a workspace with these `members` and `arrows` breaks `table`, one sentence each, sorted.
#[must_use]
pub fn violations(table: &[Layer], members: &[&str], arrows: &[Arrow]) -> Vec<String> {
    let mut found = BTreeSet::new();
    for member in members {
        match table.iter().find(|layer| layer.name == *member) {
            Some(layer) => {
                found.extend(wrong_arrows(layer, members, arrows));
                found.extend(shunned_below(layer, arrows));
            }
            None => {
                found.insert(format!("{member} has no entry in the layer table"));
            }
        }
    }
    let gone = table.iter().filter(|layer| !members.contains(&layer.name));
    found.extend(gone.map(|layer| format!("{} is in the layer table but not in the workspace", layer.name)));
    found.into_iter().collect()
}

fn wrong_arrows(layer: &Layer, members: &[&str], arrows: &[Arrow]) -> Vec<String> {
    arrows
        .iter()
        .filter(|arrow| arrow.from == layer.name && members.contains(&arrow.to.as_str()))
        .filter_map(|arrow| {
            let to = arrow.to.as_str();
            let allowed = layer.uses.contains(&to);
            match arrow.kind {
                Kind::Normal if !allowed => Some(format!("{} may not use {to}", layer.name)),
                Kind::Dev if !allowed && !layer.tests_use.contains(&to) => {
                    Some(format!("the tests of {} may not use {to}", layer.name))
                }
                _ => None,
            }
        })
        .collect()
}

/// Walks the normal arrows from `layer` down and names each shunned crate with the one that brings it in.
fn shunned_below(layer: &Layer, arrows: &[Arrow]) -> Vec<String> {
    let mut found = Vec::new();
    let mut seen = BTreeSet::from([layer.name]);
    let mut open = vec![layer.name];
    while let Some(from) = open.pop() {
        for arrow in arrows.iter().filter(|a| a.from == from && a.kind == Kind::Normal) {
            let to = arrow.to.as_str();
            if layer.shuns.contains(&to) {
                found.push(format!("{} may not stand on {to}, brought in by {from}", layer.name));
            }
            if seen.insert(to) {
                open.push(to);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[Layer] = &[
        Layer { name: "low", uses: &[], tests_use: &["fake"], shuns: &["runtime"] },
        Layer { name: "fake", uses: &["low"], tests_use: &[], shuns: &[] },
    ];

    fn arrow(from: &str, to: &str, kind: Kind) -> Arrow {
        Arrow { from: from.into(), to: to.into(), kind }
    }

    #[test]
    fn allowed_arrows_and_test_arrows_pass() {
        let arrows =
            [arrow("fake", "low", Kind::Normal), arrow("low", "fake", Kind::Dev), arrow("low", "serde", Kind::Normal)];
        assert_eq!(violations(TABLE, &["low", "fake"], &arrows), Vec::<String>::new());
    }

    #[test]
    fn an_arrow_against_the_table_is_caught() {
        let arrows = [arrow("low", "fake", Kind::Normal)];
        assert_eq!(violations(TABLE, &["low", "fake"], &arrows), ["low may not use fake"]);
    }

    #[test]
    fn a_test_arrow_against_the_table_is_caught() {
        let table = [TABLE[1], Layer { tests_use: &[], ..TABLE[0] }];
        let arrows = [arrow("low", "fake", Kind::Dev)];
        assert_eq!(violations(&table, &["low", "fake"], &arrows), ["the tests of low may not use fake"]);
    }

    #[test]
    fn a_shunned_crate_is_caught_at_any_depth_and_its_bringer_named() {
        let arrows = [
            arrow("low", "helper", Kind::Normal),
            arrow("helper", "runtime", Kind::Normal),
            arrow("runtime", "helper", Kind::Normal),
        ];
        assert_eq!(
            violations(TABLE, &["low", "fake"], &arrows),
            ["low may not stand on runtime, brought in by helper"]
        );
    }

    #[test]
    fn a_shunned_crate_used_by_tests_alone_passes() {
        let arrows = [arrow("low", "runtime", Kind::Dev)];
        assert_eq!(violations(TABLE, &["low", "fake"], &arrows), Vec::<String>::new());
    }

    #[test]
    fn unknown_and_vanished_crates_are_caught() {
        assert_eq!(
            violations(TABLE, &["low", "new"], &[]),
            ["fake is in the layer table but not in the workspace", "new has no entry in the layer table"]
        );
    }
}
