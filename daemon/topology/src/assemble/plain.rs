//! Names of a host made safe to print: none holds a control character, whatever the input held.
//!
//! The one place for it: what is printed later (tables, trees, pictures, sentences) is made of these.

use std::collections::BTreeSet;

use crate::model::{HcaOrigin, Host};
use crate::words::is_unsafe;

/// Puts a question mark for each control character (C0, DEL, C1), which would end a row or reach a terminal, and for each that turns
/// the order of what is read (Unicode UAX #9, explicit directional formatting).
pub(super) fn make(host: &mut Host) {
    optional(&mut host.name);
    host.peer_memory_modules.iter_mut().for_each(text);
    host.numa_nodes.iter_mut().for_each(|node| optional(&mut node.cpus));
    host.functions.iter_mut().for_each(|function| optional(&mut function.driver));
    if let Some(kernel) = &mut host.kernel {
        text(&mut kernel.release);
    }
    for gpu in &mut host.gpus {
        text(&mut gpu.name);
        gpu.uuid.iter_mut().chain(&mut gpu.product).for_each(|fact| text(&mut fact.value));
        if let Some(fabric) = &mut gpu.fabric {
            optional(&mut fabric.value.cluster_uuid);
            fabric.value.problems.iter_mut().for_each(text);
        }
        for slice in gpu.mig.iter_mut().flat_map(|mig| &mut mig.value.slices) {
            text(&mut slice.uuid);
            optional(&mut slice.profile);
        }
    }
    let mut names = BTreeSet::new();
    for hca in &mut host.hcas {
        text(&mut hca.name);
        // Two may have differed in nothing but what cannot be printed.
        while !names.insert(hca.name.clone()) {
            hca.name.push('?');
        }
        optional(&mut hca.sub_function);
        optional(&mut hca.bond);
        hca.netdevs.iter_mut().for_each(text);
        hca.ports.iter_mut().flat_map(|port| &mut port.gids).for_each(|gid| optional(&mut gid.netdev));
        if let HcaOrigin::Soft { netdev } = &mut hca.origin {
            optional(netdev);
        }
    }
    for netdev in &mut host.netdevs {
        text(&mut netdev.name);
        optional(&mut netdev.master);
    }
    for drive in &mut host.drives {
        text(&mut drive.name);
        optional(&mut drive.transport);
        optional(&mut drive.netdev);
    }
    for given in &mut host.given_levels {
        text(&mut given.a);
        text(&mut given.b);
    }
    // Found by search: their order goes by the names.
    host.given_levels.sort_by(|x, y| (&x.a, &x.b).cmp(&(&y.a, &y.b)));
    host.warnings.iter_mut().for_each(text);
}

fn text(text: &mut String) {
    if text.contains(is_unsafe) {
        *text = text.replace(is_unsafe, "?");
    }
}

fn optional(field: &mut Option<String>) {
    field.iter_mut().for_each(text);
}
