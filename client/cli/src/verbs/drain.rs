//! `gdrctl drain`: the daemon lets go of GPUs, or serves them again.

use std::collections::BTreeMap;

use serde_json::json;

use crate::args::{Drain, Global};
use crate::exit::Outcome;
use crate::host;
use crate::output;

#[inline(never)]
pub(crate) fn run(global: &Global, options: &Drain) -> anyhow::Result<Outcome> {
    let gpu = options.gpu.as_deref().unwrap_or_default();
    let (gpus, unserved) = host::block_on(async {
        let client = host::connect(global).await?;
        let gpus = client.drain(gpu, options.resume).await?;
        let all = if options.resume && !gpus.is_empty() { client.gpu_memory().await? } else { Vec::new() };
        let unserved = all.into_iter().filter(|gpu| gpus.contains(&gpu.gpu_uuid));
        let unserved = unserved.filter_map(|gpu| Some((gpu.gpu_uuid, gpu.unavailable?)));
        let unserved: BTreeMap<String, String> = unserved.collect();
        Ok((gpus, unserved))
    })?;
    let done = if options.resume { "resumed" } else { "drained" };
    let json = || {
        if !options.resume {
            return json!({ "schema": "gdrd.drain/v1", "drained": &gpus });
        }
        let reason = |(gpu, reason)| json!({ "gpu_uuid": gpu, "reason": reason });
        let unserved: Vec<_> = unserved.iter().map(reason).collect();
        json!({ "schema": "gdrd.drain/v1", "resumed": &gpus, "unserved": unserved })
    };
    output::print(global.format, json, || {
        if gpus.is_empty() {
            return format!("no gpu was {done}\n");
        }
        let line = |gpu: &String| match unserved.get(gpu) {
            Some(reason) => format!("{done} {gpu}, which is not served: {reason}\n"),
            None => format!("{done} {gpu}\n"),
        };
        gpus.iter().map(line).collect()
    })
}
