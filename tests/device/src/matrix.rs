//! What the daemon says of NVLinks and levels, against what nvidia-smi prints on the same machine.

use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, ensure};
use gdrd_topology::assemble::ReadOptions;
use gdrd_topology::level::Level;
use gdrd_topology::model::{GpuId, Host as Model, NvLink, NvLinkEnd};
use gdrd_topology::{profile, read_text};

use crate::Check;
use crate::daemon::{CONFIG, Daemon, connect, runtime};
use crate::host::Host;

pub(crate) fn checks(host: &Host) -> Vec<Check> {
    let check = |name: &str, check: fn(&Host) -> anyhow::Result<()>| -> Check { (name.to_owned(), Box::new(check)) };
    let mut checks = vec![check("active nvlinks of each gpu are those of nvidia-smi nvlink -s", links_are_those_shown)];
    if host.report.gpus.len() > 1 {
        checks.push(check("levels of all pairs of gpus are those of nvidia-smi topo -m", levels_are_those_shown));
    }
    checks
}

/// Why some are not run.
pub(crate) fn skipped(host: &Host) -> Option<String> {
    let reason = "there is one gpu here, and a pair needs two";
    (host.report.gpus.len() < 2).then(|| format!("levels of all pairs of gpus: {reason}"))
}

/// What nvidia-smi prints. It fails for a machine without NVLinks, and prints that too.
fn printed(words: &[&str]) -> anyhow::Result<String> {
    let output = Command::new("nvidia-smi").args(words).output().context("run nvidia-smi")?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The host as the daemon tells it.
fn told(host: &Host) -> anyhow::Result<Model> {
    let daemon = Daemon::start(host, CONFIG)?;
    let topology = runtime()?
        .block_on(async { Ok::<_, anyhow::Error>(connect(&daemon.runtime_dir()).await?.topology().await?) })?;
    Ok(profile::snapshot(&topology.host_profile, None, &ReadOptions::default())?.host)
}

/// UUID and active links of each GPU: `GPU 0: NVIDIA H200 (UUID: GPU-…)`, then `Link 0: 26.562 GB/s` or `<inactive>`.
fn links_in(text: &str) -> Vec<(String, usize)> {
    let mut found: Vec<(String, usize)> = Vec::new();
    for line in text.lines().map(str::trim) {
        if let Some((_, uuid)) = line.split_once("(UUID: ") {
            found.push((uuid.trim_end_matches(')').to_owned(), 0));
        } else if line.starts_with("Link ") && line.ends_with("GB/s") {
            found.last_mut().into_iter().for_each(|(_, links)| *links += 1);
        }
    }
    found
}

fn links_are_those_shown(host: &Host) -> anyhow::Result<()> {
    let text = printed(&["nvlink", "-s"])?;
    let (told, shown) = (told(host)?, links_in(&text));
    ensure!(told.gpus.len() == host.report.gpus.len(), "{} gpus of {}", told.gpus.len(), host.report.gpus.len());
    for (id, gpu) in (0..).map(GpuId).zip(&told.gpus) {
        let uuid = &gpu.uuid.as_ref().context("a gpu without its uuid")?.value;
        // Links of a pair are told once; those to the CPU are no NVLinks to nvidia-smi.
        let is_own = |link: &&NvLink| link.gpu == id || link.end == NvLinkEnd::Gpu(id);
        let own = told.nvlinks.iter().filter(is_own).filter(|link| link.end != NvLinkEnd::Cpu);
        let links: usize = own.map(|link| usize::from(link.links)).sum();
        let shown = shown.iter().find(|(of, _)| of == uuid).map_or(0, |(_, links)| *links);
        ensure!(links == shown, "{uuid} has {links} links, nvidia-smi shows {shown}:\n{text}");
        println!("  {uuid}: {links} links");
    }
    Ok(())
}

fn levels_are_those_shown(host: &Host) -> anyhow::Result<()> {
    let text = printed(&["topo", "-m"])?;
    let told = told(host)?;
    let shown = read_text(&text, Path::new("nvidia-smi topo -m"), &ReadOptions::default())?.host;
    ensure!(told.gpus.len() == shown.gpus.len(), "{} gpus, nvidia-smi shows {}", told.gpus.len(), shown.gpus.len());
    for a in (0..).map(GpuId).take(told.gpus.len()) {
        for b in (0..).map(GpuId).take(told.gpus.len()).filter(|b| *b != a) {
            let (ours, theirs) = (told.gpu_level(a, b), shown.gpu_level(a, b));
            let words = |level: Option<Level>| level.map_or("none".to_owned(), |level| level.to_string());
            let (ours, theirs) = (words(ours), words(theirs));
            ensure!(ours == theirs && ours != "none", "{a:?} and {b:?} are {ours}, nvidia-smi shows {theirs}:\n{text}");
            println!("  GPU{} to GPU{}: {ours}", a.0, b.0);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn active_links_are_counted_by_gpu() {
        let text = "GPU 0: NVIDIA H200 (UUID: GPU-aa)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\n\t Link 2: 26.562 GB/s\n\
                    GPU 1: NVIDIA H200 (UUID: GPU-bb)\nNVML: Unable to retrieve NVLink information as all links are inActive\n";
        assert_eq!(links_in(text), [("GPU-aa".to_owned(), 2), ("GPU-bb".to_owned(), 0)]);
        assert_eq!(links_in(""), []);
    }
}
