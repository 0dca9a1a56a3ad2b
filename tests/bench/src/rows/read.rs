//! Reading and pairing a captured host, from exec to exit, against hwloc on the same tree; and what a host costs that is
//! as large as any, so that the cost is seen to grow with the devices and no faster.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use gdrd_harness::binary;
use tempfile::TempDir;

use crate::frame::{Group, Measurement, Row, Sample, Start, Target, Turn, World};
use crate::sample::median;

/// Runs of each side in a round, a capture.
const RUNS: u32 = 24;
/// Faster than hwloc by so much.
const TIMES: f64 = 3.0;
/// Functions of the large host: as many as sixteen full buses of virtual functions.
const FUNCTIONS: u32 = 4096;

const fn row(id: &'static str, what: &'static str) -> Row {
    let against = "hwloc's I/O objects of the same tree";
    Row { id, what, against, unit: "ms", target: Target::FasterTimes(TIMES) }
}

/// The captures that hwloc can load: it refuses those without CPU folders.
const CAPTURES: [&str; 10] = [
    "hwloc-8ve-2hca-plx",
    "hwloc-qib-2iohub",
    "hwloc-mlx4-mic-2socket",
    "hwloc-fake-4package-qib",
    "hwloc-pcidomain32bits",
    "hwloc-dgx-gb10",
    "hwloc-offline-cpu0-node0",
    "ghw-xeon-l5640-sriov",
    "ghw-kvm-p100-numa-minus1",
    "ghw-arm64-vm-4pci",
];

pub(crate) const GROUP: Group = Group {
    rows: &[
        row("read-8ve-2hca-plx", "gdrctl plan of 28 functions behind switches, exec to exit"),
        row("read-qib-2iohub", "37 functions behind two I/O hubs"),
        row("read-mlx4-mic", "137 functions of two sockets"),
        row("read-4package-qib", "30 functions of four sockets"),
        row("read-pcidomain32bits", "9 functions, one domain of 32 bits"),
        row("read-dgx-gb10", "no function"),
        row("read-offline-cpu0", "no function, CPU 0 off line"),
        row("read-xeon-l5640", "82 functions, eight of them virtual"),
        row("read-kvm-p100", "29 functions of a guest"),
        row("read-arm64-vm", "4 functions of a guest"),
    ],
    rounds: 7,
    start: |world| match world.peer("hwloc_io") {
        Some(hwloc) => Ok(Start::Ready(Box::new(Captures::unpack(hwloc, world.scaled(RUNS))?))),
        None => Ok(Start::Absent("hwloc is not installed".to_owned())),
    },
};

pub(crate) const LARGE: Group = Group {
    rows: &[Row {
        id: "read-4096",
        what: "gdrctl plan of a made-up tree of 4,096 functions, exec to exit",
        against: "a quarter of them, four times",
        unit: "ms",
        target: Target::AtMost(50.0),
    }],
    rounds: 7,
    start: |world| Ok(Start::Ready(Box::new(Large::make(world)?))),
};

struct Captures {
    trees: Vec<TempDir>,
    hwloc: PathBuf,
    runs: u32,
}

impl Captures {
    fn unpack(hwloc: PathBuf, runs: u32) -> anyhow::Result<Self> {
        let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cases/sysfs");
        let unpack = |name: &str| {
            let folder = tempfile::tempdir()?;
            let archive = cases.join(format!("{name}.tar.xz"));
            let tar = Command::new("tar").arg("-xJf").arg(&archive).arg("-C").arg(folder.path()).status();
            ensure!(tar.context("run tar")?.success(), "unpack {}", archive.display());
            anyhow::Ok(folder)
        };
        let trees = CAPTURES.iter().map(|name| unpack(name)).collect::<Result<_, _>>()?;
        Ok(Self { trees, hwloc, runs })
    }
}

impl Measurement for Captures {
    fn round(&mut self, turn: Turn) -> anyhow::Result<Vec<Sample>> {
        let Self { trees, hwloc, runs } = self;
        let sample = |tree: &TempDir| {
            let root = root_of(tree.path())?;
            let mut peer = Command::new(&*hwloc);
            peer.env("HWLOC_FSROOT", &root).env("HWLOC_COMPONENTS", "linux,stop");
            let mut pair = (plan(&root), peer);
            let (mut ours, mut theirs) = (Vec::new(), Vec::new());
            for _ in 0..*runs {
                let (one, other) = turn.both(&mut pair, |pair| time(&mut pair.0), |pair| time(&mut pair.1))?;
                ours.push(one);
                theirs.push(other);
            }
            Ok(Sample::against(ms(median(ours)), ms(median(theirs))))
        };
        trees.iter().map(sample).collect()
    }
}

/// The folder that holds `sys`: the archive's own, or one below it.
fn root_of(folder: &Path) -> anyhow::Result<PathBuf> {
    if folder.join("sys").is_dir() {
        return Ok(folder.to_owned());
    }
    let mut below = std::fs::read_dir(folder)?.filter_map(Result::ok).map(|entry| entry.path());
    below.find(|path| path.join("sys").is_dir()).with_context(|| format!("no sys in {}", folder.display()))
}

fn plan(input: &Path) -> Command {
    let mut command = Command::new(binary("gdrctl"));
    command.arg("plan").arg("--input").arg(input);
    command
}

/// From exec to exit.
pub(super) fn time(command: &mut Command) -> anyhow::Result<Duration> {
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let begin = Instant::now();
    let status = command.status().with_context(|| format!("run {command:?}"))?;
    let took = begin.elapsed();
    ensure!(status.success(), "{command:?} ended with {status}");
    Ok(took)
}

pub(super) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

struct Large {
    whole: TempDir,
    quarter: TempDir,
    runs: u32,
}

impl Large {
    fn make(world: &World) -> anyhow::Result<Self> {
        let functions = world.scaled(FUNCTIONS);
        Ok(Self { whole: tree_of(functions)?, quarter: tree_of(functions / 4)?, runs: world.scaled(RUNS) })
    }
}

impl Measurement for Large {
    fn round(&mut self, turn: Turn) -> anyhow::Result<Vec<Sample>> {
        let mut pair = (plan(self.whole.path()), plan(self.quarter.path()));
        let (mut whole, mut quarters) = (Vec::new(), Vec::new());
        for _ in 0..self.runs {
            let (one, other) = turn.both(&mut pair, |pair| time(&mut pair.0), |pair| time(&mut pair.1))?;
            whole.push(one);
            quarters.push(other * 4);
        }
        Ok(vec![Sample::against(ms(median(whole)), ms(median(quarters)))])
    }
}

/// A sysfs tree of NICs, GPUs and drives on buses of 32 devices with 8 functions, each bus below a root port.
fn tree_of(functions: u32) -> anyhow::Result<TempDir> {
    const PER_BUS: u32 = 256;
    let folder = tempfile::tempdir()?;
    let sys = folder.path().join("sys");
    std::fs::create_dir_all(sys.join("bus/pci/devices"))?;
    let domains = functions.div_ceil(PER_BUS);
    for domain in 0..domains {
        let root = format!("pci{domain:04x}:00");
        let port = format!("{domain:04x}:00:01.0");
        function(&sys, &root, &port, 0x06_04_00, "8086:352A")?;
        let above = format!("{root}/{port}");
        for place in 0..PER_BUS.min(functions - domain * PER_BUS) - 1 {
            let bdf = format!("{domain:04x}:01:{:02x}.{}", place / 8, place % 8);
            let (class, id) = match place % 64 {
                0 => (0x03_02_00, "10DE:2330"),
                1 => (0x02_07_00, "15B3:1021"),
                2 => (0x01_08_02, "144D:A80A"),
                _ => (0x02_00_00, "15B3:101E"),
            };
            function(&sys, &above, &bdf, class, id)?;
        }
    }
    Ok(folder)
}

fn function(sys: &Path, above: &str, bdf: &str, class: u32, id: &str) -> anyhow::Result<()> {
    let folder = sys.join("devices").join(above).join(bdf);
    std::fs::create_dir_all(&folder)?;
    let uevent = format!("PCI_CLASS={class:X}\nPCI_ID={id}\nPCI_SUBSYS_ID={id}\nPCI_SLOT_NAME={bdf}\n");
    let files = [
        ("uevent", uevent.as_str()),
        ("numa_node", "0\n"),
        ("current_link_speed", "32.0 GT/s PCIe\n"),
        ("current_link_width", "16\n"),
        ("max_link_speed", "32.0 GT/s PCIe\n"),
        ("max_link_width", "16\n"),
    ];
    for (name, text) in files {
        std::fs::write(folder.join(name), text)?;
    }
    let target = format!("../../../devices/{above}/{bdf}");
    std::os::unix::fs::symlink(target, sys.join("bus/pci/devices").join(bdf))?;
    Ok(())
}
