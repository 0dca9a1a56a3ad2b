//! Which files of a tree are captured, and how the text of each is replaced.

use std::net::IpAddr;

use super::config_space::{EXTENDED, HEADER_BYTES, MAX_BYTES, redact};
use super::pseudonym::Pseudonyms;
use super::{Copier, Entry};
use crate::bdf::Bdf;
use crate::driver_file::{self, DRIVER_FILE, MAX_DRIVER_BYTES};
use crate::error::TopologyError;
use crate::model::{DriverFacts, PciClass};
use crate::sysfs::pci::device_path;
use crate::sysfs::place::steps;
use crate::sysfs::tree::{MAX_ENTRIES, Tree};
use crate::sysfs::vpd::Vpd;
use crate::sysfs::{driver, fabric};

const PCI: &str = "sys/bus/pci/devices";
/// Attributes of a function. `resource` holds where its BARs are and how large they are.
const FUNCTION: [&str; 16] = [
    "uevent",
    "class",
    "vendor",
    "device",
    "subsystem_vendor",
    "subsystem_device",
    "revision",
    "numa_node",
    "local_cpulist",
    "current_link_speed",
    "current_link_width",
    "max_link_speed",
    "max_link_width",
    "resource",
    "sriov_numvfs",
    "sriov_totalvfs",
];
/// Kernel parameters that bear on peer traffic.
const PARAMETERS: [&str; 6] = ["iommu", "intel_iommu", "amd_iommu", "pci", "pcie_acs_override", "pcie_aspm"];
/// Lines of `/proc/cpuinfo` that say what kind a CPU is.
const CPU_KIND: [&str; 6] = ["vendor_id", "cpu family", "model", "model name", "CPU implementer", "cpu"];
const MODULES: [&str; 5] = ["nvidia_peermem", "nv_peer_mem", "amdgpu", "nvidia", "mlx5_core"];

/// Functions that lead to GPUs, NICs and drives, or are such: the hundreds of others of a host are left out.
pub(super) fn functions(copier: &mut Copier<'_>) -> Result<(), TopologyError> {
    let names = copier.tree.list(PCI)?.unwrap_or_default();
    let id = |name: &String, file: &str| copier.tree.quiet_text(&format!("{PCI}/{name}/{file}"));
    let has_data_direct = names
        .iter()
        .any(|name| id(name, "device").as_deref() == Some("0x2100") && id(name, "vendor").as_deref() == Some("0x15b3"));
    for name in names {
        let entry = format!("{PCI}/{name}");
        let Ok(bdf) = name.parse::<Bdf>() else { continue };
        let target = copier.tree.target(&entry);
        let folder = target.clone().unwrap_or_else(|| entry.clone());
        if !is_wanted(copier.tree, &folder) {
            continue;
        }
        if let Some(target) = target {
            copier.link_to(&entry, &target);
        }
        function(copier, &folder, bdf);
        if has_data_direct {
            vital_product_data(copier, &folder);
        }
    }
    copier.folder("sys/bus/pci");
    Ok(())
}

fn is_wanted(tree: &Tree, folder: &str) -> bool {
    let text = tree.quiet_text(&format!("{folder}/class"));
    let class = text.and_then(|text| u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()).map(PciClass);
    // Of an unreadable class nothing can be said, so it is kept.
    let Some(class) = class else { return true };
    let (base, subclass) = (class.subclass() >> 8, class.subclass());
    let kinds = [PciClass::SERIAL_INFINIBAND, PciClass::NVME, PciClass::BRIDGE_PCI, PciClass::NVSWITCH];
    kinds.contains(&subclass) || matches!(base, NETWORK | DISPLAY | ACCELERATOR) || is_gpu_id(tree, folder)
}

const NETWORK: u32 = 0x02;
const DISPLAY: u32 = 0x03;
const ACCELERATOR: u32 = 0x12;

/// NVIDIA lists data-direct and DMA functions of its NICs, and some of its GPUs, under odd classes.
fn is_gpu_id(tree: &Tree, folder: &str) -> bool {
    let vendor = tree.quiet_text(&format!("{folder}/vendor"));
    vendor.is_some_and(|vendor| vendor == "0x10de" || vendor == "0x15b3")
}

fn function(copier: &mut Copier<'_>, folder: &str, bdf: Bdf) {
    copier.capture.functions += 1;
    copier.copy(folder, &FUNCTION);
    for link in ["physfn", "iommu_group"] {
        copier.link(&format!("{folder}/{link}"));
    }
    if let Some(group) = copier.tree.target(&format!("{folder}/iommu_group")) {
        copier.copy(&group, &["type"]);
    }
    if let Some(driver) = copier.tree.target_name(&format!("{folder}/driver")) {
        copier.link_to(&format!("{folder}/driver"), &format!("sys/bus/pci/drivers/{driver}"));
    }
    let path = format!("{folder}/config");
    let Ok(space) = copier.tree.bytes(&path, MAX_BYTES) else { return };
    if space.len() > HEADER_BYTES {
        copier.capture.with_extended_config += 1;
    }
    if space.len() < HEADER_BYTES {
        copier.tree.warn(&path, format_args!("has {} bytes of the {HEADER_BYTES} of a header of {bdf}", space.len()));
        return;
    }
    let kept = redact(&space, &mut copier.names);
    copier.put(&path, Entry::File(without_trailing_zeros(kept)));
}

/// What NICs and their data-direct functions are joined by, with the serial numbers in it replaced.
fn vital_product_data(copier: &mut Copier<'_>, folder: &str) {
    let is_nic = copier.tree.quiet_text(&format!("{folder}/vendor")).is_some_and(|vendor| vendor == "0x15b3");
    let Some(vpd) = is_nic.then(|| Vpd::read(copier.tree, folder)).flatten() else { return };
    let serial = vpd.serial.as_deref().map(|serial| copier.names.word("serial", serial));
    let vuid = vpd.vuid.as_deref().map(|vuid| match (&vpd.serial, &serial) {
        (Some(old), Some(new)) if vuid.starts_with(old.as_str()) => vuid.replacen(old.as_str(), new, 1),
        _ => copier.names.word("vuid", vuid),
    });
    copier.put(&format!("{folder}/vpd"), Entry::File(Vpd { serial, vuid }.to_bytes()));
}

/// What the NVIDIA driver tells of its GPUs, their UUIDs replaced.
pub(super) fn driver(copier: &mut Copier<'_>) {
    for name in copier.tree.list_or_warn(driver::GPUS) {
        let path = format!("{}/{name}/information", driver::GPUS);
        let kept = |line: &str| {
            let (key, value) = line.split_once(':')?;
            match key.trim() {
                "Model" | "Bus Location" | "Device Minor" => Some(line.to_owned()),
                "GPU UUID" if value.contains("GPU-") && !value.contains('?') => {
                    Some(format!("{key}: \t {}", copier.names.gpu_uuid(value.trim())))
                }
                _ => None,
            }
        };
        let lines: Vec<String> = copier.tree.table(&path).iter().map(String::as_str).filter_map(kept).collect();
        copier.file(&path, &lines.join("\n"));
    }
}

/// What NVML tells of the GPUs, with names that count. Warnings may name anything, and are left out.
pub(super) fn told(copier: &mut Copier<'_>, mut facts: DriverFacts) {
    facts.warnings.clear();
    for gpu in &mut facts.gpus {
        gpu.uuid = gpu.uuid.take().map(|uuid| copier.names.gpu_uuid(&uuid));
        for slice in gpu.detail.mig.iter_mut().flat_map(|mig| &mut mig.slices) {
            slice.uuid = copier.names.word("MIG", &slice.uuid);
        }
        if let Some(fabric) = &mut gpu.detail.fabric {
            fabric.cluster_uuid = fabric.cluster_uuid.take().map(|uuid| copier.names.word("cluster", &uuid));
        }
    }
    let text = driver_file::to_text(&facts);
    if text.len() >= MAX_DRIVER_BYTES {
        copier.tree.warn(DRIVER_FILE, format_args!("{} bytes are too many to be read again", text.len()));
        return;
    }
    copier.file(DRIVER_FILE, &text);
}

/// The end of the space that is zero anyway says nothing; a header stays whole.
fn without_trailing_zeros(mut bytes: Vec<u8>) -> Vec<u8> {
    let used = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    // A first zero of extended space says that there is no capability in it, which must not be lost.
    let least = if bytes.len() > EXTENDED { EXTENDED + HEADER_BYTES } else { 0 };
    bytes.truncate(used.next_multiple_of(HEADER_BYTES).max(least));
    bytes
}

/// Real path of a class entry, captured as the link it is.
fn class_entry(copier: &mut Copier<'_>, entry: &str) -> Option<String> {
    let path = device_path(copier.tree, entry);
    match copier.tree.target(entry) {
        Some(target) => {
            copier.link_to(entry, &target);
            copier.link(&format!("{target}/device"));
            Some(target)
        }
        // Old captures have a folder with a `device` link.
        None => {
            copier.folder(entry);
            path.map(|path| {
                copier.link_to(&format!("{entry}/device"), &path);
                entry.to_owned()
            })
        }
    }
}

pub(super) fn infiniband(copier: &mut Copier<'_>) {
    const CLASS: &str = "sys/class/infiniband";
    if !copier.tree.is_dir(CLASS) {
        return;
    }
    copier.folder(CLASS);
    for name in copier.tree.list_or_warn(CLASS) {
        let Some(path) = class_entry(copier, &format!("{CLASS}/{name}")) else { continue };
        copier.copy(&path, &["fw_ver", "hca_type", "board_id", "node_type"]);
        for guid in ["node_guid", "sys_image_guid"] {
            copier.copy_as(&path, guid, Pseudonyms::guid_text);
        }
        copier.copy_as(&path, "parent", Pseudonyms::interface);
        for port in copier.tree.list_or_warn(&format!("{path}/ports")) {
            hca_port(copier, &format!("{path}/ports/{port}"));
        }
    }
}

fn hca_port(copier: &mut Copier<'_>, port: &str) {
    copier.folder(port);
    copier.copy(port, &["state", "phys_state", "link_layer", "rate", "lid"]);
    for folder in ["gids", "gid_attrs/types", "gid_attrs/ndevs"] {
        copier.folder(&format!("{port}/{folder}"));
    }
    for index in copier.tree.list_or_warn(&format!("{port}/gids")).into_iter().take(MAX_GIDS) {
        let gid = copier.tree.quiet_text(&format!("{port}/gids/{index}")).and_then(|text| text.parse::<IpAddr>().ok());
        let Some(IpAddr::V6(gid)) = gid else { continue };
        // Empty slots are most of the table.
        if gid.octets()[8..].iter().all(|byte| *byte == 0) {
            continue;
        }
        let replaced = copier.names.address(IpAddr::V6(gid));
        let IpAddr::V6(replaced) = replaced else { continue };
        let groups: Vec<String> = replaced.segments().iter().map(|group| format!("{group:04x}")).collect();
        copier.file(&format!("{port}/gids/{index}"), &groups.join(":"));
        copier.copy(&format!("{port}/gid_attrs/types"), &[&index]);
        copier.copy_as(&format!("{port}/gid_attrs/ndevs"), &index, Pseudonyms::interface);
    }
}

/// Most entries of a GID table, as the reader of trees has it.
const MAX_GIDS: usize = crate::sysfs::rdma::MAX_GIDS;

pub(super) fn interfaces(copier: &mut Copier<'_>) {
    const CLASS: &str = "sys/class/net";
    copier.folder(CLASS);
    for name in copier.tree.list_or_warn(CLASS) {
        let entry = format!("{CLASS}/{name}");
        let path = device_path(copier.tree, &entry);
        let is_hardware = path.as_deref().is_some_and(|path| !steps(path).is_empty());
        let is_bond = copier.tree.is_dir(&format!("{entry}/bonding"));
        // Those of containers come and go, and their names may tell whose they are.
        if !(is_hardware || is_bond) {
            continue;
        }
        let Some(path) = class_entry(copier, &entry) else { continue };
        copier.copy(&path, &["operstate", "speed", "mtu", "type", "dev_port"]);
        copier.copy_as(&path, "address", Pseudonyms::hardware_address);
        for id in ["phys_port_id", "phys_switch_id"] {
            copier.copy_as(&path, id, |names, text| names.word("id", text));
        }
        if is_bond {
            copier.folder(&format!("{path}/bonding"));
            copier.copy(&format!("{path}/bonding"), &["mode"]);
        }
        if let Some(master) = copier.tree.target(&format!("{path}/master")) {
            copier.link_to(&format!("{path}/master"), &master);
        }
    }
}

pub(super) fn drives(copier: &mut Copier<'_>) {
    const CLASS: &str = "sys/class/nvme";
    copier.folder(CLASS);
    for name in copier.tree.list_or_warn(CLASS) {
        let Some(path) = class_entry(copier, &format!("{CLASS}/{name}")) else { continue };
        copier.copy(&path, &["transport", "state", "model", "firmware_rev"]);
        copier.copy_as(&path, "serial", |names, text| names.word("serial", text));
        let Some(address) = copier.tree.quiet_text(&format!("{path}/address")) else { continue };
        // The interface is found here: the routes that tell it are not captured.
        let netdev = fabric::netdev_towards(copier.tree, &address);
        let replaced = fabric_address(&mut copier.names, &address, netdev.as_deref());
        copier.file(&format!("{path}/address"), &replaced);
    }
}

fn fabric_address(names: &mut Pseudonyms, address: &str, netdev: Option<&str>) -> String {
    if address.parse::<Bdf>().is_ok() {
        return address.to_owned();
    }
    let mut fields: Vec<String> = Vec::new();
    for (key, value) in address.split(',').filter_map(|field| field.split_once('=')) {
        let value = match (key, value.parse()) {
            ("trsvcid", _) => value.to_owned(),
            ("host_iface", _) => continue,
            (_, Ok(ip)) => names.address(ip).to_string(),
            (_, Err(_)) => names.word("address", value),
        };
        fields.push(format!("{key}={value}"));
    }
    fields.extend(netdev.map(|name| format!("host_iface={}", names.interface(name))));
    fields.join(",")
}

pub(super) fn nodes(copier: &mut Copier<'_>) {
    const NODES: &str = "sys/devices/system/node";
    for name in copier.tree.list_or_warn(NODES) {
        let number = name.strip_prefix("node").filter(|number| number.parse::<u16>().is_ok());
        if number.is_some() {
            copier.folder(&format!("{NODES}/{name}"));
            copier.copy(&format!("{NODES}/{name}"), &["cpulist", "cpumap", "distance"]);
        }
    }
    copier.copy(NODES, &["online", "possible", "has_cpu"]);
    copier.copy("sys/devices/system/cpu", &["online", "possible", "present"]);
}

pub(super) fn modules(copier: &mut Copier<'_>) {
    for name in MODULES {
        let folder = format!("sys/module/{name}");
        if copier.tree.is_dir(&folder) {
            copier.folder(&folder);
            copier.copy(&folder, &["version"]);
        }
    }
    for unit in copier.tree.list_or_warn("sys/class/iommu") {
        copier.folder(&format!("sys/class/iommu/{unit}"));
    }
}

/// Default routes without their gateways, and the kernel parameters that bear on peer traffic.
pub(super) fn proc(copier: &mut Copier<'_>) {
    let mut table = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT".to_owned();
    for line in copier.tree.table("proc/net/route").into_iter().take(MAX_ENTRIES) {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let [name, "00000000", _, flags, _, _, metric, "00000000", ..] = words.as_slice() {
            let name = copier.names.interface(name);
            table += &format!("\n{name}\t00000000\t00000000\t{flags}\t0\t0\t{metric}\t00000000\t0\t0\t0");
        }
    }
    copier.file("proc/net/route", &table);
    let mut lines = Vec::new();
    for line in copier.tree.table("proc/net/ipv6_route").into_iter().take(MAX_ENTRIES) {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let [target, "00", .., name] = words.as_slice()
            && target.bytes().all(|digit| digit == b'0')
            && *name != "lo"
        {
            let (zero, name) = ("0".repeat(32), copier.names.interface(name));
            lines.push(format!("{zero} 00 {zero} 00 {zero} 00000400 00000001 00000000 00000003 {name}"));
        }
    }
    if !lines.is_empty() {
        copier.file("proc/net/ipv6_route", &lines.join("\n"));
    }
    let cpu: Vec<String> = copier.tree.table("proc/cpuinfo").into_iter().take_while(|line| !line.is_empty()).collect();
    let is_kind = |line: &&String| CPU_KIND.contains(&line.split_once(':').map_or("", |(key, _)| key).trim());
    let cpu: Vec<&str> = cpu.iter().filter(is_kind).map(String::as_str).collect();
    if !cpu.is_empty() {
        copier.file("proc/cpuinfo", &cpu.join("\n"));
    }
    if let Some(release) = copier.tree.quiet_text("proc/sys/kernel/osrelease") {
        copier.file("proc/sys/kernel/osrelease", &release);
    }
    if let Some(line) = copier.tree.quiet_text("proc/cmdline") {
        let wanted = |word: &&str| PARAMETERS.contains(&word.split_once(['=', '.']).map_or(*word, |(name, _)| name));
        let words: Vec<&str> = line.split_whitespace().filter(wanted).collect();
        copier.file("proc/cmdline", &words.join(" "));
    }
}
