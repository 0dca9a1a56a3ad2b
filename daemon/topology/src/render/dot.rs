//! The PCI tree and the pairs as a graph for Graphviz.

use std::collections::BTreeSet;
use std::fmt::{self, Write};

use crate::bdf::Bdf;
use crate::model::{Host, NvLinkEnd, PciRole, Upstream};
use crate::plan::contract::Plan;

/// The tree above GPUs, NICs and drives as `graph`, with pairs as bold and NVLinks as green edges.
#[must_use]
pub fn dot(host: &Host, plan: &Plan) -> String {
    let mut out = String::new();
    // Writing to a String cannot fail.
    let _ = write_all(&mut out, host, plan);
    out
}

fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for character in text.chars() {
        match character {
            '"' | '\\' => out.extend(['\\', character]),
            character if character.is_control() => out.push(' '),
            character => out.push(character),
        }
    }
    out.push('"');
    out
}

/// A node of a device: by address where it has one, so that it joins the tree, else by name.
fn node(bdf: Option<Bdf>, name: &str) -> String {
    quoted(&bdf.map_or_else(|| name.to_owned(), |bdf| bdf.to_string()))
}

fn write_all(out: &mut String, host: &Host, plan: &Plan) -> fmt::Result {
    writeln!(out, "graph host {{\n  rankdir=TB;\n  node [shape=box, fontname=\"Helvetica\"];")?;
    let mut shown: BTreeSet<Bdf> = BTreeSet::new();
    let mut device = |out: &mut String, bdf: Option<Bdf>, name: &str, colour: &str| {
        for function in bdf.iter().flat_map(|bdf| host.function(*bdf).into_iter().chain(host.bridges_above(*bdf))) {
            shown.insert(function.bdf);
        }
        let address = bdf.map_or_else(String::new, |bdf| format!(" {bdf}"));
        let label = quoted(&format!("{name}{address}"));
        writeln!(out, "  {} [label={label}, style=filled, fillcolor=\"{colour}\"];", node(bdf, name))
    };
    host.gpus.iter().try_for_each(|gpu| device(out, gpu.bdf, &gpu.name, "#e9f5dc"))?;
    host.hcas.iter().try_for_each(|hca| device(out, hca.bdf, &hca.name, "#dfecf9"))?;
    host.drives.iter().try_for_each(|drive| device(out, drive.bdf, &drive.name, "#f7f1e3"))?;
    for function in shown.iter().filter_map(|bdf| host.function(*bdf)) {
        let own = node(Some(function.bdf), "");
        if function.role != PciRole::Endpoint {
            writeln!(out, "  {own} [label={}];", quoted(&format!("{} {}", role(function.role), function.bdf)))?;
        }
        let parent = match function.upstream {
            Upstream::Root(root) if root.is_invented() => quoted(&format!("root complex {}", root.bus)),
            Upstream::Root(root) => quoted(&root.to_string()),
            Upstream::Bridge(bridge) => node(Some(bridge), ""),
            Upstream::Unknown => continue,
        };
        let rate = function.link.current.or(function.link.max);
        let label = rate.map_or_else(String::new, |rate| format!(" [label=\"{rate}\"]"));
        writeln!(out, "  {parent} -- {own}{label};")?;
    }
    pairs(out, host, plan)?;
    nvlinks(out, host)?;
    writeln!(out, "}}")
}

fn role(role: PciRole) -> &'static str {
    match role {
        PciRole::RootPort => "root port",
        PciRole::SwitchUpstream | PciRole::Switch => "switch",
        PciRole::SwitchDownstream => "downstream port",
        PciRole::Bridge => "bridge",
        PciRole::Endpoint => "device",
    }
}

fn pairs(out: &mut String, host: &Host, plan: &Plan) -> fmt::Result {
    for gpu in &plan.gpus {
        for name in &gpu.assigned {
            let nic = host.find_hca(name).and_then(|id| host.hca(id));
            let level = gpu.nics.iter().find(|pair| pair.name == *name).and_then(|pair| pair.level);
            let level = level.map_or_else(|| "?".to_owned(), |level| level.to_string());
            let ends = (node(gpu.bdf, &gpu.name), node(nic.and_then(|nic| nic.bdf), name));
            let style = "style=bold, color=\"#0072b2\", constraint=false";
            writeln!(out, "  {} -- {} [label=\"{level}\", {style}];", ends.0, ends.1)?;
        }
    }
    Ok(())
}

fn nvlinks(out: &mut String, host: &Host) -> fmt::Result {
    for link in &host.nvlinks {
        let of = |id| host.gpu(id).map_or_else(String::new, |gpu| node(gpu.bdf, &gpu.name));
        let end = match link.end {
            NvLinkEnd::Switch => quoted("NVLink switch"),
            NvLinkEnd::Cpu => quoted("CPU"),
            NvLinkEnd::Gpu(peer) => of(peer),
        };
        let style = "color=\"#76a52b\", constraint=false";
        writeln!(out, "  {} -- {end} [label=\"NV{}\", {style}];", of(link.gpu), link.links)?;
    }
    Ok(())
}
