//! `gdrctl buffers --by-gpu`: whose the memory of each GPU is.

use gdrd_client::v1;
use serde_json::{Value, json};

use crate::args::Global;
use crate::exit::Outcome;
use crate::host;
use crate::output::{self, Column};

#[inline(never)]
pub(crate) fn run(global: &Global) -> anyhow::Result<Outcome> {
    let gpus = host::block_on(async { Ok(host::connect(global).await?.gpu_memory().await?) })?;
    let json = || json!({ "schema": "gdrd.gpu-memory/v1", "gpus": gpus.iter().map(as_json).collect::<Vec<_>>() });
    output::print(global.format, json, || as_text(&gpus))
}

fn as_json(gpu: &v1::GpuMemoryUse) -> Value {
    let driver = gpu.driver.as_ref().map(|driver| {
        json!({
            "total_bytes": driver.total_bytes,
            "reserved_bytes": driver.reserved_bytes,
            "used_bytes": driver.used_bytes,
            "context_bytes": driver.context_bytes,
            "others_bytes": driver.others_bytes,
            "bar1_total_bytes": driver.bar1_total_bytes,
            "bar1_used_bytes": driver.bar1_used_bytes,
            "bar1_used_at_start_bytes": driver.bar1_used_at_start_bytes,
        })
    });
    json!({
        "gpu": gpu.name,
        "gpu_uuid": gpu.gpu_uuid,
        "unavailable": gpu.unavailable,
        "leased_bytes": gpu.leased_bytes,
        "ready_bytes": gpu.ready_bytes,
        "clean_bytes": gpu.clean_bytes,
        "changing_bytes": gpu.changing_bytes,
        "driver": driver,
    })
}

/// Whole MiB, as nvidia-smi prints them.
fn mib(bytes: u64) -> String {
    (bytes >> 20).to_string()
}

fn as_text(gpus: &[v1::GpuMemoryUse]) -> String {
    if gpus.is_empty() {
        return "there is no gpu\n".to_owned();
    }
    let columns = [
        Column::Left("MiB OF"),
        Column::Right("USED"),
        Column::Right("= LEASED"),
        Column::Right("+ READY"),
        Column::Right("+ CLEAN"),
        Column::Right("+ CHANGING"),
        Column::Right("+ CONTEXTS"),
        Column::Right("+ OTHERS"),
        Column::Right("TOTAL"),
        Column::Right("BAR1"),
        Column::Right("AT START"),
        Column::Left("NOT SERVED BECAUSE"),
    ];
    output::table(&columns, gpus.iter().map(row))
}

fn row(gpu: &v1::GpuMemoryUse) -> Vec<String> {
    let of = |told: fn(&v1::GpuDriverMemory) -> Option<u64>| {
        gpu.driver.as_ref().and_then(told).map_or_else(|| "?".to_owned(), mib)
    };
    vec![
        gpu.name.clone(),
        of(|driver| Some(driver.used_bytes)),
        mib(gpu.leased_bytes),
        mib(gpu.ready_bytes),
        mib(gpu.clean_bytes),
        mib(gpu.changing_bytes),
        of(|driver| Some(driver.context_bytes)),
        of(|driver| Some(driver.others_bytes)),
        of(|driver| Some(driver.total_bytes)),
        of(|driver| driver.bar1_used_bytes),
        of(|driver| driver.bar1_used_at_start_bytes),
        gpu.unavailable.clone().unwrap_or_default(),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_driver_does_not_tell_is_absent_and_no_zero() {
        let gpu = v1::GpuMemoryUse { name: "GPU0".to_owned(), leased_bytes: 2 << 20, ..Default::default() };
        assert_eq!(as_json(&gpu)["driver"], Value::Null);
        assert_eq!(row(&gpu)[..3], ["GPU0", "?", "2"]);
        assert_eq!(as_text(&[]), "there is no gpu\n");
    }
}
