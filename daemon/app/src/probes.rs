//! What probes found, kept for the next daemon: a file in the runtime folder.
//!
//! A proof holds while nothing that it rests on has changed: the boot, the driver and firmware of the NIC, the driver of the
//! GPU, both in their places. Where only a link has changed since, it is in doubt, and proven anew. What cannot be read counts
//! as no proof.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use gdrd_engine::{ProbeFigures, ProbeOutcome, Probed, boot_id, read_state_file, replace_state_file};
use gdrd_server::Topology;
use gdrd_topology::model::{Hca, HcaOrigin, Host};
use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use crate::hardware::Machine;
use crate::reprobe::LINK_CHANGED;

const NAME: &str = "gdrd.probes";
/// Longest file that is read; a host with 64 GPUs and NICs, each with each, has less.
const MAX_BYTES: u64 = 4 << 20;

/// The file and what it is compared with.
#[derive(Debug)]
pub(crate) struct ProbeFile {
    path: PathBuf,
    /// Boot and kind of host.
    host: String,
    /// Where devices tell of themselves: `/sys`; nothing for a host that is not this machine.
    sys: Option<PathBuf>,
    machine: Machine,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Kept {
    host: String,
    pairs: Vec<Pair>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Pair {
    gpu: String,
    gpu_is: String,
    hca: String,
    hca_is: String,
    port_num: u8,
    /// How often its links had changed.
    link_changes: u64,
    found: Found,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Found {
    /// As text, which comes back as the same number (`f64::to_string`); JSON's need not.
    Proven {
        gbps: String,
        latency_us: String,
    },
    Failed(String),
    InDoubt,
}

impl ProbeFile {
    /// The file in this folder. `kind` says which host is served; `sys` is where its devices tell of themselves.
    pub(crate) fn new(runtime_dir: &Path, kind: &str, sys: Option<PathBuf>, machine: Machine) -> Self {
        Self { path: runtime_dir.join(NAME), host: format!("{kind}, boot {}", boot_id()), sys, machine }
    }

    /// Takes up what still holds.
    pub(crate) fn restore(&self, topology: &Topology) {
        let kept = match self.read() {
            Ok(Some(kept)) if kept.host == self.host => kept,
            Ok(_) => return,
            Err(error) => return warn!("{}: {error}; nothing counts as proven", self.path.display()),
        };
        let view = topology.current();
        let probed: Vec<_> =
            kept.pairs.into_iter().filter_map(|pair| self.taken_up(pair, &view.snapshot().host)).collect();
        info!(pairs = probed.len(), "what an earlier daemon probed is taken up");
        topology.restore(probed);
    }

    fn taken_up(&self, pair: Pair, host: &Host) -> Option<Probed> {
        let hca = host.hcas.iter().find(|hca| hca.name == pair.hca)?;
        if self.identity_of_gpu(host, &pair.gpu)? != pair.gpu_is || self.identity_of_hca(hca) != pair.hca_is {
            return None;
        }
        let outcome = match pair.found {
            Found::Failed(reason) => ProbeOutcome::Failed(reason),
            Found::Proven { gbps, latency_us } => {
                ProbeOutcome::Proven(ProbeFigures { gbps: gbps.parse().ok()?, latency_us: latency_us.parse().ok()? })
            }
            Found::InDoubt => ProbeOutcome::NotTried(LINK_CHANGED.to_owned()),
        };
        let same_links = self.link_changes(hca) == pair.link_changes;
        let outcome = if same_links { outcome } else { ProbeOutcome::NotTried(LINK_CHANGED.to_owned()) };
        Some(Probed { gpu: pair.gpu, hca: pair.hca, port_num: pair.port_num, outcome })
    }

    /// Writes what is known now, if it differs from what stands there.
    pub(crate) fn save(&self, topology: &Topology) {
        let view = topology.current();
        let host = &view.snapshot().host;
        let pairs = topology.probed().into_iter().filter_map(|probed| self.kept(probed, host)).collect();
        let kept = Kept { host: self.host.clone(), pairs };
        let has_changed = match self.read() {
            Ok(None) => !kept.pairs.is_empty(),
            Ok(Some(before)) => before != kept,
            Err(_) => true,
        };
        if let Err(error) = if has_changed { self.write(&kept) } else { Ok(()) } {
            warn!("{}: {error}; the next daemon knows nothing of these probes", self.path.display());
        }
    }

    fn kept(&self, probed: Probed, host: &Host) -> Option<Pair> {
        let hca = host.hcas.iter().find(|hca| hca.name == probed.hca)?;
        let found = match probed.outcome {
            ProbeOutcome::Proven(ProbeFigures { gbps, latency_us }) => {
                Found::Proven { gbps: gbps.to_string(), latency_us: latency_us.to_string() }
            }
            ProbeOutcome::Failed(reason) => Found::Failed(reason),
            _ => Found::InDoubt,
        };
        Some(Pair {
            gpu_is: self.identity_of_gpu(host, &probed.gpu)?,
            hca_is: self.identity_of_hca(hca),
            link_changes: self.link_changes(hca),
            gpu: probed.gpu,
            hca: probed.hca,
            port_num: probed.port_num,
            found,
        })
    }

    /// Where a GPU is, which it is and under which driver; of a host buffer, nothing. `None` for one that is not there.
    fn identity_of_gpu(&self, host: &Host, name: &str) -> Option<String> {
        if name.is_empty() {
            return Some(String::new());
        }
        let gpu = host.gpus.iter().find(|gpu| gpu.name == name)?;
        let bdf = gpu.bdf.map(|bdf| bdf.to_string()).unwrap_or_default();
        Some(format!("{bdf} {} driver {}", gpu.uuid().unwrap_or_default(), self.machine.driver_version()))
    }

    /// Where an HCA is, which it is, its firmware and its driver.
    fn identity_of_hca(&self, hca: &Hca) -> String {
        let bdf = hca.bdf.map(|bdf| bdf.to_string()).unwrap_or_default();
        let guid = hca.node_guid.unwrap_or(0);
        let own = |attribute: &str| self.attribute(&format!("class/infiniband/{}/{attribute}", hca.name));
        let (firmware, version) = (own("fw_ver"), own("device/driver/module/version"));
        format!("{bdf} {guid:016x} firmware {firmware} driver {version} {}", own("device/driver/module/srcversion"))
    }

    /// How often its links went up or down, by the kernel's own counts: of its interfaces (sysfs-class-net) and, for InfiniBand,
    /// of its ports (sysfs-class-infiniband).
    fn link_changes(&self, hca: &Hca) -> u64 {
        let count = |path: String| self.attribute(&path).parse().unwrap_or(0_u64);
        let below = match &hca.origin {
            HcaOrigin::Soft { netdev: Some(netdev) } if !hca.netdevs.contains(netdev) => Some(netdev),
            _ => None,
        };
        let netdevs = hca.netdevs.iter().chain(below);
        let carriers = netdevs.map(|netdev| count(format!("class/net/{netdev}/carrier_changes")));
        let port = |num: u8| count(format!("class/infiniband/{}/ports/{num}/counters/link_downed", hca.name));
        let links = hca.ports.iter().map(|known| port(known.port_num));
        carriers.chain(links).fold(0, u64::wrapping_add)
    }

    /// An attribute, or nothing: not every device has each.
    fn attribute(&self, path: &str) -> String {
        let text = self.sys.as_ref().and_then(|sys| fs::read_to_string(sys.join(path)).ok());
        text.map(|text| text.trim().to_owned()).unwrap_or_default()
    }

    fn read(&self) -> io::Result<Option<Kept>> {
        let Some(text) = read_state_file(&self.path, MAX_BYTES)? else { return Ok(None) };
        Ok(Some(serde_json::from_slice(&text)?))
    }

    fn write(&self, kept: &Kept) -> io::Result<()> {
        replace_state_file(&self.path, &serde_json::to_vec(kept)?)
    }
}

#[cfg(test)]
mod tests {
    use gdrd_topology::plan::PlanOptions;
    use gdrd_topology::profile;
    use tempfile::TempDir;

    use super::*;

    const HCA: &str = "mlx5_0";

    /// A machine whose device tells of itself.
    fn machine() -> TempDir {
        let folder = tempfile::tempdir().expect("a folder");
        for (path, text) in [
            ("class/infiniband/mlx5_0/fw_ver", "20.35.1012\n"),
            ("class/infiniband/mlx5_0/device/driver/module/srcversion", "533BB7E5866E52F63B9ACCB\n"),
            ("class/infiniband/mlx5_0/ports/1/counters/link_downed", "0\n"),
        ] {
            tell(&folder, path, text);
        }
        folder
    }

    fn tell(sys: &TempDir, path: &str, text: &str) {
        let path = sys.path().join(path);
        fs::create_dir_all(path.parent().expect("below")).expect("a folder");
        fs::write(path, text).expect("a file");
    }

    fn topology() -> Topology {
        Topology::new(profile::builtin("dgx-a100").expect("a built-in profile"), PlanOptions::default())
    }

    fn probed(gpu: &str) -> Probed {
        let outcome = ProbeOutcome::Proven(ProbeFigures { gbps: 191.329_346_643_839_4, latency_us: 0.1 });
        Probed { gpu: gpu.to_owned(), hca: HCA.to_owned(), port_num: 1, outcome }
    }

    fn file(folder: &TempDir, sys: &TempDir) -> ProbeFile {
        ProbeFile::new(folder.path(), "live", Some(sys.path().to_owned()), Machine::default())
    }

    /// What another daemon takes up.
    fn taken_up(file: &ProbeFile) -> Vec<Probed> {
        let topology = topology();
        file.restore(&topology);
        topology.probed()
    }

    fn saved(folder: &TempDir, sys: &TempDir) -> ProbeFile {
        let (file, topology) = (file(folder, sys), topology());
        topology.prove(&[probed("GPU0"), probed("")]);
        file.save(&topology);
        file
    }

    #[test]
    fn what_was_found_is_taken_up_while_nothing_has_changed() {
        let (folder, sys) = (tempfile::tempdir().expect("a folder"), machine());
        let file = saved(&folder, &sys);
        assert_eq!(taken_up(&file), [probed(""), probed("GPU0")]);
    }

    #[test]
    fn another_firmware_driver_or_boot_makes_it_no_proof() {
        for changed in ["fw_ver", "device/driver/module/srcversion"] {
            let (folder, sys) = (tempfile::tempdir().expect("a folder"), machine());
            let file = saved(&folder, &sys);
            tell(&sys, &format!("class/infiniband/mlx5_0/{changed}"), "another\n");
            assert_eq!(taken_up(&file), [], "{changed}");
        }
        let (folder, sys) = (tempfile::tempdir().expect("a folder"), machine());
        let next_boot = ProbeFile { host: "live, boot another".to_owned(), ..saved(&folder, &sys) };
        assert_eq!(taken_up(&next_boot), []);
    }

    #[test]
    fn a_link_that_changed_meanwhile_puts_it_in_doubt_for_this_daemon_and_the_next() {
        let (folder, sys) = (tempfile::tempdir().expect("a folder"), machine());
        let file = saved(&folder, &sys);
        tell(&sys, "class/infiniband/mlx5_0/ports/1/counters/link_downed", "1\n");
        let topology = topology();
        file.restore(&topology);
        let in_doubt = |probed: &[Probed]| probed.iter().all(|p| matches!(p.outcome, ProbeOutcome::NotTried(_)));
        assert!(in_doubt(&topology.probed()) && topology.probed().len() == 2);
        file.save(&topology);
        assert!(in_doubt(&taken_up(&file)), "not probed anew yet");
    }

    #[test]
    fn damaged_file_counts_as_no_proof_and_is_replaced() {
        let (folder, sys) = (tempfile::tempdir().expect("a folder"), machine());
        for damaged in ["", "{", r#"{"host":"","pairs":[],"more":1}"#] {
            fs::write(folder.path().join(NAME), damaged).expect("a file");
            assert_eq!(taken_up(&file(&folder, &sys)), [], "{damaged}");
        }
        assert_eq!(taken_up(&saved(&folder, &sys)).len(), 2);
    }
}
