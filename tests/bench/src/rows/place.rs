//! Placement for a scheduler, as it asks: gdrctl from exec to exit, the host read included.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::Command;

use gdrd_harness::binary;
use tempfile::TempDir;

use super::read::{ms, time};
use crate::frame::{Group, Measurement, Row, Sample, Start, Target, Turn};
use crate::sample::median;

/// Runs of each row in a round.
const RUNS: u32 = 24;
/// GPUs of the rack, each with a NIC of its own, in trays of four.
const RACK: u32 = 72;

pub(crate) const GROUP: Group = Group {
    rows: &[
        Row {
            id: "place-8",
            what: "gdrctl place of 4 GPUs and 8 NICs on a host of 8 and 16, exec to exit",
            against: "",
            unit: "ms",
            target: Target::AtMost(5.0),
        },
        Row {
            id: "place-72",
            what: "the same of 8 GPUs and 8 NICs on a rack of 72 and 72",
            against: "",
            unit: "ms",
            target: Target::Shown,
        },
    ],
    rounds: 5,
    start: |world| Ok(Start::Ready(Box::new(Place::make(world.scaled(RUNS))?))),
};

struct Place {
    rack: TempDir,
    runs: u32,
}

impl Place {
    fn make(runs: u32) -> anyhow::Result<Self> {
        let rack = tempfile::tempdir()?;
        std::fs::write(rack.path().join("rack.host"), profile()?)?;
        Ok(Self { rack, runs })
    }
}

impl Measurement for Place {
    fn round(&mut self, _: Turn) -> anyhow::Result<Vec<Sample>> {
        let place = |input: PathBuf, gpus: &str, nics: &str| {
            let mut command = Command::new(binary("gdrctl"));
            command.args(["place", "--gpus", gpus, "--nics", nics, "--input"]).arg(input);
            let times: Result<Vec<_>, _> = (0..self.runs).map(|_| time(&mut command)).collect();
            anyhow::Ok(Sample::alone(ms(median(times?))))
        };
        Ok(vec![place("aws-p5en".into(), "4", "8")?, place(self.rack.path().join("rack.host"), "8", "8")?])
    }
}

/// A rack as one host: what a scheduler of an NVLink domain would see.
fn profile() -> Result<String, std::fmt::Error> {
    let mut text = "gdrd-host-profile 1\nname rack\n".to_owned();
    for place in 0..RACK {
        let (domain, numa) = (place, place / 4);
        writeln!(text, "root pci{domain:04x}:00 numa={numa}")?;
        writeln!(text, "pci {domain:04x}:00:01.0 10de:22b1 060400 pci{domain:04x}:00 64x16")?;
        writeln!(text, "pci {domain:04x}:01:00.0 10de:2941 030200 {domain:04x}:00:01.0 64x16")?;
        writeln!(text, "pci {domain:04x}:00:02.0 10de:22b1 060400 pci{domain:04x}:00 32x16")?;
        writeln!(text, "pci {domain:04x}:02:00.0 15b3:1021 020700 {domain:04x}:00:02.0 32x16")?;
        writeln!(text, "hca mlx5_{place} {domain:04x}:02:00.0")?;
        writeln!(text, "port mlx5_{place} 1 ACTIVE InfiniBand 400")?;
        writeln!(text, "nvlink {domain:04x}:01:00.0 switch 18 gbps=400")?;
    }
    for numa in 0..RACK.div_ceil(4) {
        writeln!(text, "numa {numa} cpus={numa}")?;
    }
    Ok(text)
}
