//! The lines of a profile that say what the driver of a GPU knows: `gpu`, `fabric`, `mig`, `slice`.

use std::fmt::Write;

use crate::assemble::{GpuIds, is_gpu};
use crate::bdf::Bdf;
use crate::model::{DeviceNode, Fabric, FabricState, Gpu, GpuDetail, GpuFacts, Host, Mig, MigSlice};
use crate::profile::line::Line;
use crate::profile::word::encode;
use crate::profile::write::{key, name_key};

/// Reads `gpu BDF …`; the flag says whether it counts as GPU whatever its class.
pub(super) fn gpu(line: &mut Line<'_>) -> Result<(GpuFacts, bool), String> {
    let facts = GpuFacts {
        bdf: line.parsed("PCI address (DDDD:BB:DD.F)")?,
        uuid: line.take_name("uuid")?,
        device_node: line.take("dev").map(device_node).transpose()?,
        detail: GpuDetail {
            product: line.take_name("product")?,
            memory_bytes: line.take("memory").map(bytes).transpose()?,
            bar1_bytes: line.take("bar1").map(bytes).transpose()?,
            ..GpuDetail::default()
        },
    };
    Ok((facts, line.flag("stated")))
}

/// Reads `fabric BDF STATE …` into the facts of its GPU.
pub(super) fn fabric(line: &mut Line<'_>, gpus: &mut Vec<GpuFacts>) -> Result<(), String> {
    let gpu = described(line, gpus)?;
    let word = line.word("a state of the fabric")?;
    let state = FabricState::parse(word).ok_or_else(|| format!("`{word}` is no state of the nvlink fabric"))?;
    let (cluster_uuid, clique_id) = (line.take_name("cluster")?, line.take_parsed("clique")?);
    let mut problems = Vec::new();
    while let Some(problem) = line.take_name("problem")? {
        problems.push(problem);
    }
    gpu.detail.fabric = Some(Fabric { state, cluster_uuid, clique_id, problems });
    Ok(())
}

/// Reads `mig BDF on` or `off` into the facts of its GPU.
pub(super) fn mig(line: &mut Line<'_>, gpus: &mut Vec<GpuFacts>) -> Result<(), String> {
    let gpu = described(line, gpus)?;
    let enabled = match line.word("`on` or `off`")? {
        "on" => true,
        "off" => false,
        word => return Err(format!("`{word}` is neither `on` nor `off`")),
    };
    gpu.detail.mig.get_or_insert_with(Mig::default).enabled = enabled;
    Ok(())
}

/// Reads `slice BDF UUID GI CI …` into the facts of its GPU.
pub(super) fn slice(line: &mut Line<'_>, gpus: &mut Vec<GpuFacts>) -> Result<(), String> {
    let gpu = described(line, gpus)?;
    let slice = MigSlice {
        uuid: line.name("a uuid")?,
        gpu_instance: line.parsed("GPU instance")?,
        compute_instance: line.parsed("compute instance")?,
        profile: line.take_name("profile")?,
        memory_bytes: line.take("memory").map(bytes).transpose()?,
    };
    gpu.detail.mig.get_or_insert_with(Mig::default).slices.push(slice);
    Ok(())
}

/// The facts of the GPU whose address is the next word.
fn described<'a>(line: &mut Line<'_>, gpus: &'a mut Vec<GpuFacts>) -> Result<&'a mut GpuFacts, String> {
    let bdf: Bdf = line.parsed("PCI address (DDDD:BB:DD.F)")?;
    let place = gpus.iter().position(|gpu| gpu.bdf == bdf).unwrap_or_else(|| {
        gpus.push(GpuFacts { bdf, uuid: None, device_node: None, detail: GpuDetail::default() });
        gpus.len() - 1
    });
    gpus.get_mut(place).ok_or_else(|| format!("gpu {bdf} is not described"))
}

/// `40GiB`, `143771MiB` or plain bytes.
fn bytes(word: &str) -> Result<u64, String> {
    let units = [("GiB", 30), ("MiB", 20), ("KiB", 10)];
    let (number, shift) = units
        .iter()
        .find_map(|(unit, shift)| word.strip_suffix(unit).map(|number| (number, *shift)))
        .unwrap_or((word, 0));
    let count: Option<u64> = number.parse().ok();
    count
        .and_then(|count| count.checked_mul(1_u64 << shift))
        .ok_or_else(|| format!("`{word}` is no size such as 40GiB"))
}

fn device_node(word: &str) -> Result<DeviceNode, String> {
    let numbers = word
        .strip_prefix("char:")
        .and_then(|rest| rest.split_once(':'))
        .and_then(|(major, minor)| major.parse().ok().zip(minor.parse().ok()));
    numbers
        .map(|(major, minor)| DeviceNode { major, minor })
        .ok_or_else(|| format!("dev=`{word}` is no device node such as char:195:0"))
}

/// Writes the lines of a GPU with an address; none where all follows from the PCI function.
pub(super) fn write(out: &mut String, host: &Host, gpu: &Gpu) -> std::fmt::Result {
    let Some(bdf) = gpu.bdf else { return Ok(()) };
    // One that the operator's ids made a GPU stays one for whoever reads this without them.
    let by_rule = host.function(bdf).is_some_and(|function| is_gpu(function, &GpuIds::default()));
    let keys = [
        name_key("uuid", gpu.uuid()),
        key("memory", gpu.memory_bytes.as_ref().map(|bytes| size(bytes.value))),
        key("dev", gpu.device_node.as_ref().map(|node| node.value.to_string())),
        name_key("product", gpu.product.as_ref().map(|product| product.value.as_str())),
        key("bar1", gpu.bar1_bytes.as_ref().map(|bytes| size(bytes.value))),
        if by_rule { String::new() } else { " stated".to_owned() },
    ]
    .concat();
    if !keys.is_empty() {
        writeln!(out, "gpu {bdf}{keys}")?;
    }
    if let Some(fabric) = gpu.fabric.as_ref().map(|fabric| &fabric.value) {
        let problems: String = fabric.problems.iter().map(|problem| name_key("problem", Some(problem))).collect();
        let cluster = name_key("cluster", fabric.cluster_uuid.as_deref());
        let clique = key("clique", fabric.clique_id.map(|id| id.to_string()));
        writeln!(out, "fabric {bdf} {}{cluster}{clique}{problems}", fabric.state)?;
    }
    let Some(mig) = gpu.mig.as_ref().map(|mig| &mig.value) else { return Ok(()) };
    writeln!(out, "mig {bdf} {}", if mig.enabled { "on" } else { "off" })?;
    for slice in &mig.slices {
        let MigSlice { uuid, gpu_instance, compute_instance, profile, memory_bytes } = slice;
        let (profile, memory) = (name_key("profile", profile.as_deref()), key("memory", memory_bytes.map(size)));
        writeln!(out, "slice {bdf} {} {gpu_instance} {compute_instance}{profile}{memory}", encode(uuid))?;
    }
    Ok(())
}

fn size(bytes: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let exact = units.iter().find(|(shift, _)| bytes > 0 && bytes.is_multiple_of(1 << shift));
    exact.map_or_else(|| bytes.to_string(), |(shift, unit)| format!("{}{unit}", bytes >> shift))
}
