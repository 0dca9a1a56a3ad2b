//! The reference: writes of perftest between the same two devices.

use std::fs;
use std::io::Write as _;
use std::process::{Child, Command, Stdio};

use gdrd_harness::wait_until;
use gdrd_vm::HCA;

use super::peer::Peer;

/// One of its programs, and what is done beside it.
pub(crate) struct Perftest {
    program: &'static str,
    pub(crate) len_bytes: u32,
    pub(crate) rounds: u32,
    /// Requests under way at once.
    pub(crate) window: u32,
    /// Place of its result in the line of results.
    column: usize,
}

impl Perftest {
    /// Its result is MiB/s.
    pub(crate) const BANDWIDTH: Self =
        Self { program: "ib_write_bw", len_bytes: 65_536, rounds: 400, window: 64, column: 3 };
    /// Its result is µs, typically, of half of a write each way.
    pub(crate) const LATENCY: Self = Self { program: "ib_write_lat", len_bytes: 8, rounds: 500, window: 1, column: 4 };

    fn start(&self, peer: Option<&str>) -> Child {
        let gid_index = ipv4_gid_index().to_string();
        let (len, rounds) = (self.len_bytes.to_string(), self.rounds.to_string());
        let arguments = ["-d", HCA, "-x", &gid_index, "-s", &len, "-n", &rounds, "-F"];
        let mut command = Command::new(self.program);
        command.args(arguments).args(peer).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().unwrap_or_else(|error| unreachable!("{}: {error}", self.program))
    }

    /// The side that is written to.
    pub(crate) fn serve(&self, peer: &mut Peer) {
        let child = self.start(None);
        let output = child.wait_with_output().expect("it is a child of this process");
        assert!(output.status.success(), "{}: {}", self.program, String::from_utf8_lossy(&output.stderr));
        peer.tell("served");
    }

    /// The side that writes, and its result.
    pub(crate) fn ask(&self, peer: &mut Peer, address: &str) -> f64 {
        // It gives up where nobody listens yet.
        let told = wait_until("perftest ends well", || {
            let output = self.start(Some(address)).wait_with_output().expect("it is a child of this process");
            let told = String::from_utf8_lossy(&output.stdout).into_owned();
            if output.status.success() { Ok(told) } else { Err(told) }
        });
        assert_eq!(peer.hear(), "served");
        let first = self.len_bytes.to_string();
        let fields = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let results = told.lines().map(fields).find(|fields| fields.first() == Some(&first));
        let result = results.and_then(|fields| fields.get(self.column)?.parse().ok());
        result.unwrap_or_else(|| unreachable!("no result in {told}"))
    }
}

/// The row of the device's IPv4 address, which is one of RoCE v2 after one of v1.
pub(crate) fn ipv4_gid_index() -> u32 {
    let row = |index: &u32| {
        let gid = fs::read_to_string(format!("/sys/class/infiniband/{HCA}/ports/1/gids/{index}"));
        gid.is_ok_and(|gid| gid.starts_with("0000:0000:0000:0000:0000:ffff:"))
    };
    (0..16).find(row).expect("the device has the guest's address")
}

/// Prints what was measured past the test's own output, which nobody sees of a test that passes.
pub(crate) fn print_ratio(test: &Perftest, reference: f64, total_ns: u64, median_ns: u64) {
    let line = if test.window > 1 {
        let bytes = f64::from(test.len_bytes) * f64::from(test.rounds);
        let own = bytes / f64::from(1 << 20) / seconds(total_ns);
        format!("writes of {} bytes: {own:.1} MiB/s, {:.2} of {}'s", test.len_bytes, own / reference, test.program)
    } else {
        let (own, reference) = (seconds(median_ns) * 1e6, 2.0 * reference);
        let (len, program) = (test.len_bytes, test.program);
        format!(
            "a write of {len} bytes: {own:.0} µs to its completion, {:.2} of both ways of {program}",
            own / reference
        )
    };
    let mut out = std::io::stdout();
    writeln!(out, "\n== figure: {line}").expect("the output is open");
}

#[allow(clippy::cast_precision_loss, reason = "times of seconds at most")]
fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}
