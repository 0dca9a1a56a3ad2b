//! `gdrctl capture`: this host's `/sys` in an archive, without what names the host.

use std::path::Path;

use anyhow::{Context as _, anyhow};
use gdrd_topology::sysfs::capture::{Packed, PackingError, capture, pack};
use serde_json::json;

use crate::args::{Capture, Global};
use crate::driver;
use crate::exit::{Outcome, UsageError};
use crate::{file, output};

#[inline(never)]
pub(crate) fn run(global: &Global, options: &Capture) -> anyhow::Result<Outcome> {
    let packed = Packed::by_name(&options.output).map_err(|error| match error {
        PackingError::UnknownName { .. } => anyhow::Error::from(UsageError(format!("--output {error}"))),
        error => error.into(),
    })?;
    // The driver is this machine's own.
    let is_own = options.sysfs_root == Path::new("/");
    let asked = if is_own { driver::ask(global.timeout) } else { Err(anyhow!("the tree is not this machine's")) };
    let taken = capture(&options.sysfs_root, asked.as_ref().ok())
        .with_context(|| format!("capture {}", options.sysfs_root.display()))?;
    let bytes = pack(&taken, packed)?;
    file::write(&options.output, &bytes)?;
    let with_config = taken.with_extended_config;
    let summary = json!({
        "schema": "gdrd.capture/v1",
        "file": options.output.display().to_string(),
        "len_bytes": bytes.len(),
        "functions": taken.functions,
        "functions_with_extended_config": with_config,
        "driver_gpus": asked.as_ref().ok().map(|facts| facts.gpus.len()),
        "warnings": taken.warnings,
    });
    let text = || {
        let mut text = format!(
            "{}: {} KiB, {} PCI functions, {with_config} of them with the configuration space by which ACS is judged\n",
            options.output.display(),
            bytes.len().div_ceil(1024),
            taken.functions,
        );
        if with_config == 0 && taken.functions > 0 {
            text += "note: only root may read more than its first 64 bytes; run it as root to have ACS judged\n";
        }
        match &asked {
            Ok(facts) => text += &format!("nvml tells of {} gpus: uuids replaced, nvlinks, fabric\n", facts.gpus.len()),
            Err(error) => text += &format!("note: without nvlinks and fabric: {error:#}\n"),
        }
        text.extend(taken.warnings.iter().map(|warning| format!("warning: {warning}\n")));
        text
    };
    output::print(global.format, || summary, text)
}
