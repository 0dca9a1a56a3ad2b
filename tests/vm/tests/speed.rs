//! One guest with two CPUs: what the broker adds to a queue pair, against the same by verbs in one process, and against
//! two processes that only pass a word back and forth; and what 10,000 live leases cost, whose descriptors few machines
//! give. Prints times and asserts none: an emulated CPU is no measure, and who reads them knows how busy the host was.
#![forbid(unsafe_code)]

mod common;

use std::io::Write as _;
use std::process::{Command as Process, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::perftest::ipv4_gid_index;
use common::{Side, daemon, join, number};
use gdrd_harness::script::{Command, Local, Remote, Work};
use gdrd_harness::{DaemonOptions, PATIENCE, User};
use gdrd_shm::{Segment, pingpong};
use gdrd_vm::{HCA, run};

const BUFFER_BYTES: u64 = 2 << 20;
/// Of the simulated host that a daemon serves without hardware: what the broker itself takes in this machine.
const SIMULATED_HCA: &str = "mlx5_0";
/// Each side of a comparison is measured so often, in turn with the other; the middle counts.
const TURNS: usize = 3;

/// What is measured: length, rounds, most under way at once.
#[derive(Clone, Copy)]
struct Writes {
    len_bytes: u32,
    rounds: u32,
    window: u32,
}

const SMALL: Writes = Writes { len_bytes: 8, rounds: 500, window: 1 };
const LARGE: Writes = Writes { len_bytes: 65_536, rounds: 100, window: 16 };

/// Nanoseconds of all, and of the median.
type Timed = (u64, u64);

fn direct(writes: Writes) -> Timed {
    let Writes { len_bytes, rounds, window } = writes;
    let row = ipv4_gid_index();
    let [row, len, rounds, window] = [row, len_bytes, rounds, window].map(|number| number.to_string());
    let told = run("direct", &[HCA, &row, &len, &rounds, &window]);
    let mut numbers = told.split_whitespace().map(|number| number.parse().expect("direct prints numbers"));
    numbers.next().zip(numbers.next()).expect("direct prints two numbers")
}

/// Has a thread poll until it is dropped.
struct Poller(Arc<AtomicBool>);

impl Poller {
    fn start() -> Self {
        let ended = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&ended);
        std::thread::spawn(move || {
            while !seen.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
        });
        Self(ended)
    }
}

impl Drop for Poller {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The same while another polls on the other CPU, as the broker's thread does: the kernel's threads then share a CPU.
fn direct_beside_another(writes: Writes) -> Timed {
    let _poller = Poller::start();
    direct(writes)
}

fn brokered(near: &mut Side, far: &Side, writes: Writes) -> Timed {
    let Writes { len_bytes, rounds, window } = writes;
    let work = Work::Write { local: Local::new("b", 0, len_bytes), remote: Remote::new(&far.blob, 0), imm: None };
    let timed = near.puppet.run(Command::TimeWork { queue_pair: "q".into(), work, rounds, window, polling: true });
    (number(&timed["total_ns"]), number(&timed["median_ns"]))
}

/// The median round trip of one word between two processes.
fn ping_pong() -> u64 {
    const ROUNDS: u32 = 2000;
    let segment = Segment::create("vm-speed", pingpong::SEGMENT_LEN_BYTES).expect("memory is left");
    let other_end = segment.try_clone_fd().expect("a descriptor is left");
    let mut other = Process::new("gdrctl");
    other.args(["bench-peer", &ROUNDS.to_string()]).stdin(Stdio::from(other_end));
    let mut other = other.spawn().expect("gdrctl is there");
    let times = pingpong::measure(&segment, ROUNDS, PATIENCE).expect("the segment is long enough");
    let mut times: Vec<Duration> = times.expect("the other process answers");
    assert!(other.wait().is_ok_and(|status| status.success()));
    times.sort_unstable();
    u64::try_from(times[times.len() / 2].as_nanos()).unwrap_or(u64::MAX)
}

fn median(mut values: Vec<u64>) -> u64 {
    values.sort_unstable();
    values[values.len() / 2]
}

#[test]
fn the_broker_is_measured_beside_verbs_of_ones_own() {
    let daemon = daemon();
    let [mut near, mut far] = [(); 2].map(|()| Side::new(&daemon, User::Own, BUFFER_BYTES));
    join(&mut near, &mut far);
    brokered(&mut near, &far, SMALL);
    let simulated = DaemonOptions::default().config("[[policy.lease]]\nwho = \"anyone\"\n").start();
    let [mut sim_near, mut sim_far] =
        [(); 2].map(|()| Side::on(SIMULATED_HCA, &simulated.runtime_dir_text(), User::Own, BUFFER_BYTES));
    join(&mut sim_near, &mut sim_far);
    let (mut words, mut own, mut lent) = (Vec::new(), [Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    let (mut alone, mut crowded) = (Vec::new(), Vec::new());
    for _ in 0..TURNS {
        words.push(ping_pong());
        alone.push(brokered(&mut sim_near, &sim_far, SMALL).1);
        own[0].push(direct(SMALL).1);
        crowded.push(direct_beside_another(SMALL).1);
        lent[0].push(brokered(&mut near, &far, SMALL).1);
        own[1].push(direct(LARGE).0);
        lent[1].push(brokered(&mut near, &far, LARGE).0);
    }
    let ([own_ns, own_total], [lent_ns, lent_total]) = (own.map(median), lent.map(median));
    let [word_ns, alone_ns, crowded_ns] = [words, alone, crowded].map(median);
    let more_ns = i128::from(lent_ns) - i128::from(own_ns);
    let mut out = std::io::stdout();
    let share = own_total * 100 / lent_total.max(1);
    writeln!(
        out,
        "\n== figure: an 8-byte write takes {lent_ns} ns brokered, {own_ns} ns by verbs: {more_ns} ns more, where a word \
         each way takes {word_ns} ns (at most 3 of these are aimed at)\n== figure: between simulated NICs, which the \
         broker moves the bytes for, the same write takes {alone_ns} ns; by verbs while another polls on the second CPU, \
         {crowded_ns} ns\n== figure: writes of 64 KiB reach {share} % of \
         the bandwidth of verbs (95 % are aimed at)"
    )
    .expect("the output is open");
    drop((near, far, sim_near, sim_far));
    assert!(daemon.stop().success() && simulated.stop().success());
}

#[test]
fn ten_thousand_leases_are_held_and_acquires_beside_them_are_measured() {
    let told = run("gdrd-bench", &["--only", "live-leases", "--rounds", "5"]);
    let rows: Vec<&str> = told.lines().filter(|line| line.starts_with("| live-leases")).collect();
    writeln!(std::io::stdout(), "\n== figure: simulated, by gdrd-bench:\n{}", rows.join("\n"))
        .expect("the output is open");
    let held = rows.iter().find(|row| row.starts_with("| live-leases-held "));
    assert!(held.is_some_and(|row| row.contains("kept")), "{told}");
}
