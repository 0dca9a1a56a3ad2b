//! To a drive: by GPUDirect Storage where the drive, or the NIC that an NVMe-oF volume rides on, reaches the
//! GPU without host memory, else through a bounce buffer.

use super::{
    Fallback, PathAdvice, PathKind, advice, echo, gpu_to_memory, host_memory, lesser, level_word, name, state_word,
    works,
};
use crate::acs::PeerAcs;
use crate::error::TopologyError;
use crate::level::Level;
use crate::model::{Drive, GpuId, HcaId, Host};
use crate::plan::contract::Plan;

pub(super) fn to_drive(
    host: &Host,
    plan: &Plan,
    from: GpuId,
    wanted: Option<&str>,
) -> Result<PathAdvice, TopologyError> {
    let drive = match wanted {
        Some(name) => host.drives.iter().find(|drive| is_named(drive, name)),
        None => host.drives.iter().min_by_key(|drive| (level(host, from, drive).is_none(), level(host, from, drive))),
    };
    let missing = || match wanted.filter(|_| !host.drives.is_empty()) {
        Some(name) => TopologyError::NoSuchDevice { what: "drive", name: echo(name) },
        None => TopologyError::NoDrive,
    };
    let drive = drive.ok_or_else(missing)?;
    Ok(if is_over_fabric(drive) { over_fabric(host, plan, from, drive) } else { by_pcie(host, from, drive) })
}

/// A controller by its name, or by that of a volume (`nvme0n1`, `/dev/nvme0n1p2`) on it.
fn is_named(drive: &Drive, wanted: &str) -> bool {
    let wanted = wanted.strip_prefix("/dev/").unwrap_or(wanted);
    let volume = wanted.strip_prefix(drive.name.as_str()).map(|rest| rest.strip_prefix('n').unwrap_or("x"));
    wanted == drive.name || volume.is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()))
}

fn is_over_fabric(drive: &Drive) -> bool {
    drive.netdev.is_some() || drive.transport.as_deref().is_some_and(|transport| transport != "pcie")
}

fn level(host: &Host, from: GpuId, drive: &Drive) -> Option<Level> {
    let gpu = host.gpu(from)?;
    let by_tree = gpu.bdf.zip(drive.bdf).and_then(|(gpu, drive)| host.pci_level(gpu, drive));
    by_tree.or_else(|| host.given_level(&gpu.name, &drive.name))
}

fn by_pcie(host: &Host, from: GpuId, drive: &Drive) -> PathAdvice {
    let bdfs = host.gpu(from).and_then(|gpu| gpu.bdf).zip(drive.bdf);
    let direct = bdfs.and_then(|(gpu, drive)| host.pci_bottleneck(gpu, drive)).map(|narrowest| narrowest.gbps);
    let to_memory = drive.bdf.and_then(|bdf| host.root_bottleneck(bdf)).map(|narrowest| narrowest.gbps);
    let bounced = lesser(gpu_to_memory(host, from), to_memory);
    let memory = host_memory(host, from);
    let level = level(host, from, drive);
    let via = vec![drive.name.clone()];
    let (kind, gbps, reason, fallback) = match level {
        Some(near @ (Level::Pix | Level::Pxb)) => {
            let acs = bdfs.and_then(|(gpu, drive)| host.peer_acs(gpu, drive)).filter(PeerAcs::is_redirected);
            let but = acs.map_or_else(String::new, |acs| format!(", but {}", acs.reason));
            let reason = format!("{near}: a switch joins the GPU and the drive{but}");
            let why = format!("where the file system or driver has no GPUDirect Storage: bounce through {memory}");
            let fallback = Fallback { kind: PathKind::Bounce, via: via.clone(), gbps: bounced, reason: why };
            (PathKind::GpudirectStorage, direct, reason, Some(fallback))
        }
        Some(far) => {
            let reason = format!("{far}: no switch joins the GPU and the drive; bounce through {memory}");
            (PathKind::Bounce, bounced, reason, None)
        }
        None => {
            let reason = "the drive is not on this host's PCI tree, or its place is not known".to_owned();
            (PathKind::Bounce, None, reason, None)
        }
    };
    PathAdvice { via, level, gbps, fallback, ..advice(host, from, drive.name.clone(), kind, reason) }
}

/// The RDMA devices of an interface: its own, those of the bond it is, or of the interface below a VLAN.
fn carriers(host: &Host, netdev: &str) -> Vec<HcaId> {
    let of = |name: &str| -> Vec<HcaId> {
        let carries = |hca: &crate::model::Hca| {
            hca.netdevs.iter().any(|own| own == name)
                || hca.bond.as_deref() == Some(name)
                || hca.ports.iter().flat_map(|port| &port.gids).any(|gid| gid.netdev.as_deref() == Some(name))
        };
        host.hcas.iter().zip(0..).filter(|(hca, _)| carries(hca)).map(|(_, place)| HcaId(place)).collect()
    };
    let own = of(netdev);
    match netdev.split_once('.') {
        Some((below, _)) if own.is_empty() => of(below),
        _ => own,
    }
}

fn over_fabric(host: &Host, plan: &Plan, from: GpuId, drive: &Drive) -> PathAdvice {
    let to = drive.name.clone();
    let transport = drive.transport.as_deref().unwrap_or("an unknown transport");
    let memory = host_memory(host, from);
    let Some(netdev) = drive.netdev.as_deref() else {
        let reason = format!("{to} is reached by {transport}, and not known by which NIC; bounce through {memory}");
        return advice(host, from, to, PathKind::Bounce, reason);
    };
    let Some(nic) = carriers(host, netdev).into_iter().min_by_key(|nic| {
        let level = host.gpu_hca_level(from, *nic);
        (level.is_none(), level)
    }) else {
        let reason =
            format!("{to} is reached by {transport} over {netdev}, which has no RDMA; bounce through {memory}");
        return PathAdvice { via: vec![netdev.to_owned()], ..advice(host, from, to, PathKind::Bounce, reason) };
    };
    let nic_name = host.hca(nic).map_or_else(String::new, |hca| hca.name.clone());
    let level = host.gpu_hca_level(from, nic);
    let gdr = plan_gdr(host, plan, from, &nic_name).unwrap_or_else(|| host.gdr(from, nic));
    let direct = host.gpu_hca_bottleneck(from, nic).map(|narrowest| narrowest.gbps);
    let bounced = lesser(gpu_to_memory(host, from), host.port_bottleneck(nic).map(|port| port.gbps));
    let rides = format!("{to} rides on {nic_name} ({netdev}, {transport}), {} of the GPU", level_word(level));
    let via = vec![nic_name, to.clone()];
    if transport != "rdma" {
        let reason = format!("{rides}; the CPU moves the data of {transport}, bounce through {memory}");
        return PathAdvice { via, level, gbps: bounced, ..advice(host, from, to, PathKind::Bounce, reason) };
    }
    if !works(gdr.state) {
        let reason = format!("{rides}; GPUDirect RDMA is {}: {}", state_word(gdr.state), gdr.reason);
        return PathAdvice { via, level, gbps: bounced, ..advice(host, from, to, PathKind::Bounce, reason) };
    }
    let reason = format!("{rides}; GPUDirect RDMA is {}: {}", state_word(gdr.state), gdr.reason);
    let fallback = Fallback {
        kind: PathKind::Bounce,
        via: via.clone(),
        gbps: bounced,
        reason: format!("where the file system or driver has no GPUDirect Storage: bounce through {memory}"),
    };
    let advice = advice(host, from, to, PathKind::GpudirectStorage, reason);
    PathAdvice { via, level, gbps: direct, fallback: Some(fallback), ..advice }
}

/// What the plan says of the pair; it knows what probing found.
fn plan_gdr(host: &Host, plan: &Plan, from: GpuId, nic: &str) -> Option<crate::gdr::Gdr> {
    let gpu = name(host, from);
    let gpu = plan.gpus.iter().find(|planned| planned.name == gpu)?;
    gpu.nics.iter().find(|pair| pair.name == nic).map(|pair| pair.gdr.clone())
}
