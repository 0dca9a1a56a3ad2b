//! What can be typed: verbs, options, help texts. The manual pages and completions are made from this.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::deferred::Deferred;

const EXIT_CODES: &str = "Exit codes:
  0  done
  1  failed: the answer could not be had, or a check did not hold
  2  wrong usage: an option, value or input that cannot be used
  3  no daemon: nobody listens
  4  the daemon refused, or its socket is closed to this user; the message has the reason in brackets
  5  nothing fits: place found no set of free devices

Environment:
  GDRD_RUNTIME_DIR  folder of the daemon's sockets
  NO_COLOR          no colours, also on a terminal";

/// Shows and tests how GPUs and RDMA NICs of this host belong together, and what gdrd has lent.
#[derive(Debug, Parser)]
#[command(name = "gdrctl", version, after_help = EXIT_CODES, propagate_version = true)]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) verb: Verb,
}

/// Options of every verb.
#[derive(Debug, Clone, Args)]
pub(crate) struct Global {
    /// How to print: text for people, json for programs; of topo also tree, svg and dot
    #[arg(long, global = true, value_enum, default_value_t = Format::Text)]
    pub(crate) format: Format,
    /// Folder of the daemon's sockets, instead of looking for it
    #[arg(long, global = true, value_name = "DIR")]
    pub(crate) runtime_dir: Option<PathBuf>,
    /// Longest time to wait for any one answer of the daemon, in seconds
    #[arg(long, global = true, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub(crate) timeout: Duration,
}

/// How to print.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// For people
    Text,
    /// For programs: one document with a "schema"
    Json,
    /// topo only: the PCIe tree, in colours on a terminal
    Tree,
    /// topo only: a picture
    Svg,
    /// topo only: a graph for Graphviz
    Dot,
}

impl Format {
    /// Whether it is one that only pictures of a host have.
    pub(crate) fn is_picture(self) -> bool {
        matches!(self, Self::Tree | Self::Svg | Self::Dot)
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Verb {
    /// Show the host's GPUs, NICs and what lies between them
    #[command(after_help = "Examples:
  gdrctl topo                       the matrix of this host
  gdrctl topo --format tree         the PCIe tree
  gdrctl topo --format svg > a.svg  a picture for a ticket
  gdrctl topo --input ./sys-copy    a captured /sys of another host
  nvidia-smi topo -m | gdrctl topo --input -
  gdrctl topo --input dgx-a100      a built-in profile")]
    Topo(Deferred<Topo>),
    /// Show which NICs each GPU should use
    #[command(after_help = "Examples:
  gdrctl plan
  gdrctl plan --format json | jq -r '.gpus[] | \"\\(.name) \\(.assigned | join(\",\"))\"'
  gdrctl plan --nics '^mlx5_4,mlx5_5' --max-level PXB
  gdrctl plan --apply                    adopt a better pairing that a warning told of")]
    Plan(Deferred<Plan>),
    /// Explain why a GPU has the NICs it has
    #[command(after_help = "Examples:
  gdrctl explain GPU0
  gdrctl explain 0000:07:00.0 --input ./sys-copy")]
    Explain(Deferred<Explain>),
    /// Show how data should go from a GPU to another, to a remote host or to a drive, and why
    #[command(after_help = "Examples:
  gdrctl path GPU0 GPU3
  gdrctl path GPU0 remote
  gdrctl path GPU0 drive                 the nearest drive
  gdrctl path GPU0 nvme2n1 --input ./sys-copy")]
    Path(Deferred<PathTo>),
    /// Write the pairing in the words of other software
    #[command(after_help = "Examples:
  gdrctl export nccl-topo -o /etc/gdrd/nccl-topo.xml
  eval \"$(gdrctl export env --rank $LOCAL_RANK --topo-file /etc/gdrd/nccl-topo.xml)\"
  gdrctl export mooncake > nic_priority_matrix.json
  gdrctl export profile --input ./host.tar.zst > machine.host")]
    Export(Deferred<Export>),
    /// Copy what this host's /sys tells of GPUs, NICs and drives into an archive to send to others
    #[command(
        after_help = "Serial numbers, GUIDs, MACs, IP addresses and the host name are replaced, equal ones by equal ones. As root the
archive holds the PCI configuration space by which ACS is judged.

Example:
  sudo gdrctl capture -o host.tar.zst && gdrctl topo --input host.tar.zst"
    )]
    Capture(Deferred<Capture>),
    /// Propose sets of GPUs and NICs for a job
    #[command(after_help = "Examples:
  gdrctl place --gpus 4
  gdrctl place --gpus 2 --exclude GPU0,GPU1 --format json
  gdrctl place --gpus 8 --exclusive")]
    Place(Deferred<Place>),
    /// List the leased buffers: your own, or all as root or gdrd-admin
    #[command(after_help = "Examples:
  gdrctl buffers
  gdrctl buffers --by-gpu --format json | jq '.gpus[].driver.used_bytes'")]
    Buffers(Deferred<Buffers>),
    /// List the queue pairs: your own, or all as root or gdrd-admin
    QueuePairs,
    /// Show the daemon's counters and gauges
    Stats(Deferred<Stats>),
    /// Show what the daemon is, which backends it has, and why others are absent
    Status,
    /// Have the daemon let go of GPUs, or serve them again: for root and gdrd-admin
    #[command(
        after_help = "Leases on a drained GPU are revoked and nothing new is lent there; a revoked lease keeps its memory
until its holder releases it. The daemon then has no process and no device file of the GPU open. Calls under way on
the GPU are waited for 3 s; those that still are then are named, and the exit code is 1.

It lasts until --resume, also over a restart of the daemon, but not of the host.

Examples:
  gdrctl drain GPU0
  gdrctl drain --all
  gdrctl drain GPU0 --resume"
    )]
    Drain(Deferred<Drain>),
    /// Prove that NICs move memory of GPUs and of the host, by transfers with checked content (for administrators)
    #[command(
        after_help = "Every pair is tried by a loopback in the NIC: random bytes go into the memory and are read back. What is
proven or has failed stands in the plan (gdr) from then on. Without options each GPU is tried with its
assigned NICs, and a host buffer with each NIC.

Exit code 1: a pair has failed, or none could be tried.

Examples:
  gdrctl probe
  gdrctl probe --gpu GPU0 --nic mlx5_3 --timeout 120"
    )]
    Probe(Deferred<Probe>),
    /// Measure leases, latency, bandwidth and idle cost against floors of the same run
    #[command(
        after_help = "It leases buffers and makes queue pairs at the daemon it finds, so run it on an idle host or on a
simulated one (gdrd --sim dgx-a100). Every figure is a ratio to a floor measured in the same run.

Examples:
  gdrctl bench
  gdrctl bench --only lease,latency --rounds 1000 --format json"
    )]
    Bench(Deferred<Bench>),
    /// The other process of a bench
    #[command(hide = true)]
    BenchPeer(Deferred<BenchPeer>),
    /// Print a completion script
    #[command(after_help = "Example:
  gdrctl completions bash > /etc/bash_completion.d/gdrctl")]
    Completions(Deferred<Completions>),
    /// Write the manual pages
    Man(Deferred<Man>),
}

/// What to list.
#[derive(Debug, Clone, Args)]
pub(crate) struct Buffers {
    /// Whose the memory of each GPU is, for everyone: it adds up to what nvidia-smi shows as used
    #[arg(long)]
    pub(crate) by_gpu: bool,
}

/// Which GPUs to drain.
#[derive(Debug, Clone, Args)]
#[command(group = clap::ArgGroup::new("which").required(true).args(["gpu", "all"]))]
pub(crate) struct Drain {
    /// The GPU, by name, UUID or PCI address
    #[arg(value_name = "GPU")]
    pub(crate) gpu: Option<String>,
    /// All GPUs
    #[arg(long)]
    pub(crate) all: bool,
    /// Serve them again
    #[arg(long)]
    pub(crate) resume: bool,
}

/// What to prove.
#[derive(Debug, Clone, Args)]
pub(crate) struct Probe {
    /// Only this GPU, by name, UUID or PCI address
    #[arg(long, value_name = "GPU")]
    pub(crate) gpu: Option<String>,
    /// Only this NIC, by its verbs name
    #[arg(long, value_name = "NIC")]
    pub(crate) nic: Option<String>,
    /// Show what earlier probes found, and probe nothing
    #[arg(long)]
    pub(crate) known: bool,
}

/// Where the topology comes from.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Input {
    /// Read this instead of asking the daemon: a captured /sys (folder or archive), NCCL topology XML, text of nvidia-smi topo -m or rocm-smi, a host profile, or a built-in profile's name; `-` reads any of these but a folder from standard input
    #[arg(long, value_name = "PATH")]
    pub(crate) input: Option<PathBuf>,
    /// More PCI ids that count as GPU, such as 1bcf:001c; what is read by gdrctl itself then, not the daemon's answer
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(crate) gpu_ids: Vec<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Topo {
    #[command(flatten)]
    pub(crate) input: Input,
    /// As --format tree
    #[arg(long)]
    pub(crate) tree: bool,
}

#[derive(Debug, Args)]
pub(crate) struct PathTo {
    /// GPU by name (GPU0), UUID or PCI address
    pub(crate) from: String,
    /// Another GPU, "remote" for another host, "drive" for the nearest drive, or a drive or volume by name
    pub(crate) to: String,
    #[command(flatten)]
    pub(crate) input: Input,
}

/// What to write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Exported {
    /// Topology XML for NCCL_TOPO_FILE
    NcclTopo,
    /// Environment variables for NCCL, UCX, NVSHMEM, DeepEP, Gloo and TensorPipe
    Env,
    /// NIC priority matrix for Mooncake's MC_CUSTOM_TOPO_JSON
    Mooncake,
    /// The host as a profile of gdrd
    Profile,
}

#[derive(Debug, Args)]
pub(crate) struct Export {
    /// What to write
    pub(crate) what: Exported,
    /// File to write instead of standard output
    #[arg(long, short, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// env: for the process of this GPU, by name, UUID or PCI address
    #[arg(long, value_name = "GPU", conflicts_with = "rank")]
    pub(crate) gpu: Option<String>,
    /// env: for the process of this local rank, which is the GPU's place in PCI order
    #[arg(long, value_name = "N")]
    pub(crate) rank: Option<usize>,
    /// env: where the file of nccl-topo is kept, for NCCL_TOPO_FILE
    #[arg(long, value_name = "FILE")]
    pub(crate) topo_file: Option<String>,
    #[command(flatten)]
    pub(crate) input: Input,
}

#[derive(Debug, Args)]
pub(crate) struct Capture {
    /// Archive to write: its name ends in .tar.zst, .tar.gz or .tar
    #[arg(long, short, value_name = "FILE")]
    pub(crate) output: PathBuf,
    /// Folder that holds the sys and proc to copy, instead of this host's
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub(crate) sysfs_root: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct Plan {
    /// Have the daemon put in force the pairing that it would make anew, where pairs that stuck are worse; for root and gdrd-admin
    #[arg(long, conflicts_with_all = ["input", "gpu_ids", "nics", "max_level"])]
    pub(crate) apply: bool,
    #[command(flatten)]
    pub(crate) input: Input,
    #[command(flatten)]
    pub(crate) pairing: Pairing,
}

/// What the operator may say about pairing; only for hosts that gdrctl reads by itself.
#[derive(Debug, Clone, Args)]
pub(crate) struct Pairing {
    /// NICs that may be used, as in NCCL_IB_HCA: names by prefix, '=' for whole names, '^' for all but these
    #[arg(long, value_name = "LIST")]
    pub(crate) nics: Option<String>,
    /// Farthest level that is still assigned: PIX, PXB, PHB, NODE or SYS
    #[arg(long, value_name = "LEVEL")]
    pub(crate) max_level: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Explain {
    /// GPU by name (GPU0), UUID or PCI address
    pub(crate) gpu: String,
    #[command(flatten)]
    pub(crate) input: Input,
}

#[derive(Debug, Args)]
pub(crate) struct Place {
    /// How many GPUs the job wants
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) gpus: u32,
    /// How many NICs it wants for them together; without this one a GPU, as far as the host has them
    #[arg(long, value_parser = clap::value_parser!(u32).range(0..=256))]
    pub(crate) nics: Option<u32>,
    /// GPUs that must not be used, by name, UUID or PCI address
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(crate) exclude: Vec<String>,
    /// NICs that must not be used, by name or PCI address
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(crate) exclude_nics: Vec<String>,
    /// Every two GPUs must be joined by NVLink
    #[arg(long)]
    pub(crate) nvlink: bool,
    /// All must hang below one switch
    #[arg(long)]
    pub(crate) same_switch: bool,
    /// All must be on one NUMA node that is known
    #[arg(long)]
    pub(crate) same_numa: bool,
    /// Only GPUs and NICs on which nobody holds a lease, a registration or a queue pair of the daemon
    #[arg(long, conflicts_with_all = ["input", "gpu_ids"])]
    pub(crate) exclusive: bool,
    /// Most sets to propose
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) max_results: u32,
    #[command(flatten)]
    pub(crate) input: Input,
}

#[derive(Debug, Args)]
pub(crate) struct Stats {
    /// Only figures whose name contains this
    #[arg(value_name = "PART")]
    pub(crate) part: Option<String>,
}

/// One measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Measurement {
    /// Acquire and release of 2 MiB against two empty calls
    Lease,
    /// A brokered 8-byte write against bare shared memory
    Latency,
    /// Writes of 64 MiB against a plain copy
    Bandwidth,
    /// The plan of the DGX A100 profile
    Plan,
    /// The idle daemon's memory and wake-ups
    Idle,
}

#[derive(Debug, Args)]
pub(crate) struct Bench {
    /// Only these measurements
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(crate) only: Vec<Measurement>,
    /// Rounds of the lease and latency measurements
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(10..=10_000_000))]
    pub(crate) rounds: u32,
    /// GPU that is written from
    #[arg(long, default_value = "GPU0")]
    pub(crate) from: String,
    /// GPU that is written to
    #[arg(long, default_value = "GPU1")]
    pub(crate) to: String,
    /// How long the daemon is watched while idle, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    pub(crate) idle: Duration,
}

#[derive(Debug, Args)]
pub(crate) struct BenchPeer {
    /// Rounds to answer
    pub(crate) rounds: u32,
}

#[derive(Debug, Args)]
pub(crate) struct Completions {
    /// Shell to complete in
    pub(crate) shell: clap_complete::Shell,
}

#[derive(Debug, Args)]
pub(crate) struct Man {
    /// Folder to write gdrctl.1 and a page a verb into
    pub(crate) dir: PathBuf,
}

fn seconds(text: &str) -> Result<Duration, String> {
    let bad = || format!("'{text}' is no time in seconds: a number above 0, such as 2.5");
    let seconds: f64 = text.parse().map_err(|_| bad())?;
    Duration::try_from_secs_f64(seconds).ok().filter(|time| !time.is_zero()).ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn a_verb_keeps_its_description_when_its_options_are_made() {
        let told = |command: &clap::Command| -> Vec<String> {
            command.get_subcommands().filter_map(|verb| verb.get_about()).map(ToString::to_string).collect()
        };
        let mut command = Arguments::command();
        let before = told(&command);
        command.build();
        assert!(before.len() > 10 && told(&command).starts_with(&before), "{before:?}");
    }

    #[test]
    fn times_are_positive_numbers() {
        assert_eq!(seconds("2.5"), Ok(Duration::from_millis(2500)));
        for text in ["0", "-1", "x", "inf", "NaN", "1e300"] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }
}
