//! `gdrctl drain`: the daemon lets go of GPUs, or serves them again.

use std::collections::BTreeMap;

use gdrd_client::v1;
use serde_json::json;

use crate::args::{Drain, Global};
use crate::exit::Outcome;
use crate::host;
use crate::output;

#[inline(never)]
pub(crate) fn run(global: &Global, options: &Drain) -> anyhow::Result<Outcome> {
    let gpu = options.gpu.as_deref().unwrap_or_default();
    let (gpus, under_way, unserved) = host::block_on(async {
        let client = host::connect(global).await?;
        let v1::DrainResponse { gpu_uuids: gpus, under_way } = client.drain(gpu, options.resume).await?;
        let all = if options.resume && !gpus.is_empty() { client.gpu_memory().await? } else { Vec::new() };
        let unserved = all.into_iter().filter(|gpu| gpus.contains(&gpu.gpu_uuid));
        let unserved = unserved.filter_map(|gpu| Some((gpu.gpu_uuid, gpu.unavailable?)));
        let unserved: BTreeMap<String, String> = unserved.collect();
        Ok((gpus, under_way, unserved))
    })?;
    let done = if options.resume { "resumed" } else { "drained" };
    let json = || {
        if !options.resume {
            let call = |call: &v1::CallsUnderWay| json!({ "gpu_uuid": call.gpu_uuid, "call": call.call, "buffers": call.buffers });
            let under_way: Vec<_> = under_way.iter().map(call).collect();
            return json!({ "schema": "gdrd.drain/v1", "drained": &gpus, "under_way": under_way });
        }
        let reason = |(gpu, reason)| json!({ "gpu_uuid": gpu, "reason": reason });
        let unserved: Vec<_> = unserved.iter().map(reason).collect();
        json!({ "schema": "gdrd.drain/v1", "resumed": &gpus, "unserved": unserved })
    };
    let printed = output::print(global.format, json, || {
        if gpus.is_empty() {
            return format!("no gpu was {done}\n");
        }
        let line = |gpu: &String| match (still(&under_way, gpu), unserved.get(gpu)) {
            (calls, _) if !calls.is_empty() => format!("{done} {gpu}, with calls still under way: {calls}\n"),
            (_, Some(reason)) => format!("{done} {gpu}, which is not served: {reason}\n"),
            (_, None) => format!("{done} {gpu}\n"),
        };
        gpus.iter().map(line).collect()
    })?;
    Ok(if under_way.is_empty() { printed } else { Outcome::Failed })
}

/// What is under way on a GPU.
fn still(under_way: &[v1::CallsUnderWay], gpu: &str) -> String {
    let calls = under_way.iter().filter(|call| call.gpu_uuid == gpu);
    let calls: Vec<String> = calls.map(|call| format!("{} ({})", call.call, call.buffers)).collect();
    calls.join(", ")
}
