//! `gdrctl capture`: this host's `/sys` in an archive, without what names the host.

use anyhow::Context as _;
use gdrd_topology::sysfs::capture::{Packed, PackingError, capture, pack};
use serde_json::json;

use crate::args::{Capture, Global};
use crate::exit::{Outcome, UsageError};
use crate::output;
use crate::verbs::export::write_file;

pub(crate) fn run(global: &Global, options: &Capture) -> anyhow::Result<Outcome> {
    let packed = Packed::by_name(&options.output).map_err(|error| match error {
        PackingError::UnknownName { .. } => anyhow::Error::from(UsageError(format!("--output {error}"))),
        error => error.into(),
    })?;
    let taken = capture(&options.sysfs_root).with_context(|| format!("capture {}", options.sysfs_root.display()))?;
    let bytes = pack(&taken, packed)?;
    write_file(&options.output, &bytes)?;
    let with_config = taken.with_extended_config;
    let summary = json!({
        "schema": "gdrd.capture/v1",
        "file": options.output.display().to_string(),
        "len_bytes": bytes.len(),
        "functions": taken.functions,
        "functions_with_extended_config": with_config,
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
        text.extend(taken.warnings.iter().map(|warning| format!("warning: {warning}\n")));
        text
    };
    output::print(global.format, || summary, text)
}
