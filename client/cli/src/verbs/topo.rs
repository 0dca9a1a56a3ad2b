//! `gdrctl topo`: the matrix of P2P levels, the PCIe tree, or all of it for programs.

use gdrd_topology::render;

use crate::args::{Format, Global, Topo};
use crate::exit::Outcome;
use crate::{output, source};

pub(crate) fn run(global: &Global, options: &Topo) -> anyhow::Result<Outcome> {
    let topology = source::topology(global, &options.input)?;
    let snapshot = topology.snapshot();
    let text = match (global.format, options.tree) {
        (Format::Json, _) => render::topo(snapshot, &topology.plan()).to_json(),
        (Format::Text, true) => render::tree(&snapshot.host, Some(&topology.plan())),
        (Format::Text, false) => render::matrix(&snapshot.host, Some(&topology.plan())),
    };
    output::write(&text)?;
    Ok(Outcome::Done)
}
