//! Which functions are one adapter, and which RDMA devices are below one bond.

use std::collections::{BTreeMap, BTreeSet};

use crate::bdf::Bdf;
use crate::model::{Hca, Host};

/// Fills `card`, `bond` and `is_bond_slave` of every HCA.
pub(super) fn group(host: &mut Host) {
    let cards = cards(host);
    let bonds = bonds(host);
    let devices_per_bond = devices_per_bond(&host.hcas, &bonds);
    for (place, hca) in host.hcas.iter_mut().enumerate() {
        hca.card = cards.get(&place).copied();
        hca.bond = bonds.get(&place).cloned();
        // RoCE LAG leaves one RDMA device for the whole bond. Where several are left, each is a slave.
        hca.is_bond_slave =
            hca.bond.as_ref().is_some_and(|bond| devices_per_bond.get(bond).is_some_and(|count| *count > 1));
    }
}

/// Functions of one slot are one adapter; a virtual function belongs to its physical one's.
fn slot(host: &Host, bdf: Bdf) -> Bdf {
    let physical = host.function(bdf).and_then(|f| f.physical_function);
    Bdf { function: 0, ..physical.unwrap_or(bdf) }
}

/// Adapter of each HCA by place: the lowest address of an HCA on it. Adapters that reach the host by two
/// slots (socket direct) share their system image GUID.
fn cards(host: &Host) -> BTreeMap<usize, Bdf> {
    let image = trusted_image_guids(&host.hcas);
    let mut key_of_image: BTreeMap<u64, Bdf> = BTreeMap::new();
    let mut key_of_slot: BTreeMap<Bdf, Bdf> = BTreeMap::new();
    let mut lowest: BTreeMap<Bdf, Bdf> = BTreeMap::new();
    let mut keys = Vec::new();
    // HCAs come in PCI order, so the first of a group names it.
    for (place, hca) in host.hcas.iter().enumerate() {
        let Some(bdf) = hca.bdf else { continue };
        let slot = slot(host, bdf);
        let by_image = hca
            .sys_image_guid
            .filter(|guid| image.contains(guid))
            .map(|guid| *key_of_image.entry(guid).or_insert(slot));
        let key = *key_of_slot.entry(slot).or_insert(by_image.unwrap_or(slot));
        let first = lowest.entry(key).or_insert(bdf);
        *first = (*first).min(bdf);
        keys.push((place, key));
    }
    keys.into_iter().filter_map(|(place, key)| Some((place, *lowest.get(&key)?))).collect()
}

/// Adapter GUIDs that can be believed: captures often have all GUIDs replaced by one value, which shows
/// in several devices having one *node* GUID.
fn trusted_image_guids(hcas: &[Hca]) -> BTreeSet<u64> {
    let mut nodes: BTreeSet<u64> = BTreeSet::new();
    let distinct = hcas.iter().filter_map(|hca| hca.node_guid).all(|guid| nodes.insert(guid));
    if !distinct || nodes.is_empty() {
        return BTreeSet::new();
    }
    hcas.iter().filter_map(|hca| hca.sys_image_guid).collect()
}

/// Bond above each HCA by place, from the masters of its interfaces.
fn bonds(host: &Host) -> BTreeMap<usize, String> {
    let is_bond = |name: &String| host.netdevs.iter().any(|netdev| netdev.name == *name && netdev.is_bond);
    let mut bonds = BTreeMap::new();
    for (place, hca) in host.hcas.iter().enumerate() {
        let masters = host
            .netdevs
            .iter()
            .filter(|netdev| hca.bdf.is_some() && netdev.bdf == hca.bdf)
            .filter_map(|netdev| netdev.master.as_ref());
        if let Some(bond) = masters.into_iter().find(|master| is_bond(master)) {
            bonds.insert(place, bond.clone());
        }
    }
    bonds
}

fn devices_per_bond(hcas: &[Hca], bonds: &BTreeMap<usize, String>) -> BTreeMap<String, usize> {
    let mut count = BTreeMap::new();
    for (place, _) in hcas.iter().enumerate() {
        if let Some(bond) = bonds.get(&place) {
            *count.entry(bond.clone()).or_insert(0) += 1;
        }
    }
    count
}
