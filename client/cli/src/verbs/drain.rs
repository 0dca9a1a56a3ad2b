//! `gdrctl drain`: the daemon lets go of GPUs, or serves them again.

use serde_json::json;

use crate::args::{Drain, Global};
use crate::exit::Outcome;
use crate::host;
use crate::output;

#[inline(never)]
pub(crate) fn run(global: &Global, options: &Drain) -> anyhow::Result<Outcome> {
    let gpu = options.gpu.as_deref().unwrap_or_default();
    let gpus = host::block_on(async { Ok(host::connect(global).await?.drain(gpu, options.resume).await?) })?;
    let done = if options.resume { "resumed" } else { "drained" };
    let json = || json!({ "schema": "gdrd.drain/v1", done: &gpus });
    output::print(global.format, json, || {
        if gpus.is_empty() {
            return format!("no gpu was {done}\n");
        }
        gpus.iter().map(|gpu| format!("{done} {gpu}\n")).collect()
    })
}
