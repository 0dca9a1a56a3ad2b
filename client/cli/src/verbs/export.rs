//! `gdrctl export`: the pairing in the words of other software.

use gdrd_topology::export::{Env, GpuEnv, env, mooncake_matrix, nameless, nccl_topo};
use gdrd_topology::plan::contract::Plan;
use gdrd_topology::{profile, words};
use serde_json::json;

use crate::args::{Export, Exported, Format, Global};
use crate::exit::{Outcome, UsageError};
use crate::{file, output, source};

pub(crate) fn run(global: &Global, options: &Export) -> anyhow::Result<Outcome> {
    check(global, options)?;
    let topology = source::topology(global, &options.input)?;
    let (host, plan) = (&topology.snapshot().host, topology.plan());
    let text = match options.what {
        Exported::NcclTopo => nccl_topo(host)?,
        Exported::Mooncake => mooncake_matrix(host, &plan)?,
        Exported::Profile => {
            if let Some(nameless) = nameless(host, |_| true) {
                output::warn(&nameless);
            }
            profile::render(host)
        }
        Exported::Env => {
            let made = env(host, &plan, options.topo_file.as_deref());
            env_text(global.format, &made, gpu_of(&made, &plan, options)?)
        }
    };
    match &options.output {
        Some(path) => file::write(path, &text)?,
        None => output::write(&text)?,
    }
    Ok(Outcome::Done)
}

fn check(global: &Global, options: &Export) -> Result<(), UsageError> {
    let is_env = options.what == Exported::Env;
    if !is_env && (options.gpu.is_some() || options.rank.is_some() || options.topo_file.is_some()) {
        return Err(UsageError("--gpu, --rank and --topo-file are of gdrctl export env".to_owned()));
    }
    if !is_env && global.format == Format::Json {
        return Err(UsageError(
            "--format json is of gdrctl export env; the others have a form of their own".to_owned(),
        ));
    }
    let is_plain = |text: &String| text.bytes().all(|byte| byte.is_ascii_graphic() && !b"'\"\\$`".contains(&byte));
    match &options.topo_file {
        Some(path) if path.is_empty() => Err(UsageError("--topo-file names no file".to_owned())),
        Some(path) if !is_plain(path) => {
            Err(UsageError(format!("--topo-file {path}: a path that needs quotes in a shell cannot be exported")))
        }
        _ => Ok(()),
    }
}

/// The GPU whose variables are asked for, if one is.
fn gpu_of<'a>(made: &'a Env, plan: &Plan, options: &Export) -> Result<Option<&'a GpuEnv>, UsageError> {
    let (wanted, found) = match (&options.gpu, options.rank) {
        (None, None) => return Ok(None),
        (Some(name), _) => {
            let gpu = plan.gpu(name).map(|gpu| &gpu.name);
            (format!("GPU {name}"), made.gpus.iter().find(|own| Some(&own.gpu) == gpu))
        }
        (None, Some(rank)) => (format!("local rank {rank}"), made.gpus.get(rank)),
    };
    found
        .map(Some)
        .ok_or_else(|| UsageError(format!("no {wanted}: this host has {}", words::counted(made.gpus.len(), "GPU"))))
}

/// Lines that a shell sources. Values hold no quotes, which the library sees to; some shells expand a word that
/// begins with `=`, so they are quoted all the same.
fn env_text(format: Format, made: &Env, gpu: Option<&GpuEnv>) -> String {
    if format == Format::Json {
        return match gpu {
            None => format!("{:#}\n", json!(made)),
            Some(gpu) => {
                let one =
                    json!({ "schema": made.schema, "gpu": gpu.gpu, "rank": gpu.rank, "variables": made.of(Some(gpu)) });
                format!("{one:#}\n")
            }
        };
    }
    let export =
        |variable: &gdrd_topology::export::Variable| format!("export {}='{}'\n", variable.name, variable.value);
    let mut text: String = made.notes.iter().map(|note| format!("# {note}\n")).collect();
    text.extend(made.of(gpu).iter().map(export));
    if gpu.is_none() {
        for gpu in &made.gpus {
            text += &format!("# {} (local rank {}); gdrctl export env --rank {}\n", gpu.gpu, gpu.rank, gpu.rank);
            text.extend(gpu.variables.iter().map(|variable| format!("# {}={}\n", variable.name, variable.value)));
        }
    }
    text
}
