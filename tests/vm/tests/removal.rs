//! A guest on a kernel that lets a device go while it is open: a NIC is pulled out from under its leases and put back.
#![forbid(unsafe_code)]

mod common;

use std::path::Path;

use common::{Side, daemon_with, join, make_rxe, nics, number, text};
use gdrd_harness::script::{Command, Local, Remote, Work};
use gdrd_harness::{Daemon, Puppet, User, wait_until};
use gdrd_vm::monitor::Monitor;
use gdrd_vm::pci::Function;
use gdrd_vm::{kernel_holds, run};

const STAYS: &str = "stays";
const GOES: &str = "goes";
const USER_OF_WHAT_STAYS: User = User::Uid(1001);
const USER_OF_WHAT_GOES: User = User::Uid(1002);
const BUFFER_BYTES: u64 = 2 << 20;
const ROUNDS: usize = 3;

/// The NIC of the last switch, by the name that the emulator knows it by.
const NIC: &str = "nic3";
const NIC_AGAIN: &str = "e1000e,id=nic3,netdev=net3,bus=port3,mac=52:54:00:00:01:03,romfile=";

fn pair(daemon: &Daemon, hca: &str, user: User) -> [Side; 2] {
    let [mut near, mut far] = [(); 2].map(|()| Side::on(hca, &daemon.runtime_dir_text(), user, BUFFER_BYTES));
    join(&mut near, &mut far);
    [near, far]
}

fn write(far: &Side) -> Work {
    Work::Write { local: Local::new("b", 0, 64), remote: Remote::new(&far.blob, 0), imm: None }
}

fn is_there(hca: &str) -> bool {
    Path::new("/sys/class/infiniband").join(hca).exists()
}

/// Reads later snapshots until one has such NICs; the one that stays is in each.
fn watch_until(watcher: &mut Puppet, generation: &mut u64, wanted: impl Fn(&[&str]) -> bool) {
    loop {
        let snapshot = watcher.run(Command::NextTopology);
        let next = number(&snapshot["generation"]);
        assert!(next > *generation, "{next} after {generation}");
        *generation = next;
        let hcas: Vec<&str> =
            snapshot["hcas"].as_array().into_iter().flatten().filter_map(|name| name.as_str()).collect();
        assert!(hcas.contains(&STAYS), "{hcas:?}");
        if wanted(&hcas) {
            return;
        }
    }
}

/// What the kernel holds on an HCA.
fn held(hca: &str) -> [u64; 4] {
    ["ctx", "pd", "qp", "mr"].map(|kind| kernel_holds(hca, kind))
}

#[test]
fn a_nic_pulled_out_takes_what_was_leased_on_it_and_serves_again_once_it_is_back() {
    for module in ["e1000e", "igb"] {
        run("modprobe", &[module]);
    }
    let nic = || -> Function { nics().pop().expect("the last switch has a NIC") };
    let stays = nics().swap_remove(0);
    make_rxe(&stays, STAYS);
    make_rxe(&nic(), GOES);
    let address = nic().address;
    let mut monitor = Monitor::own();
    let before_all = held(STAYS);
    // Events alone: looking again by the clock would find all of it too.
    let daemon = daemon_with("[topology]\nrescan_interval_s = 0\n");
    let mut watcher = Puppet::connected(&daemon);
    let mut generation = number(&watcher.run(Command::NextTopology)["generation"]);
    let [mut lucky, lucky_far] = pair(&daemon, STAYS, USER_OF_WHAT_STAYS);
    let mut before = None;
    for round in 0..ROUNDS {
        let [mut unlucky, unlucky_far] = pair(&daemon, GOES, USER_OF_WHAT_GOES);
        assert_eq!(unlucky.status_of(1, write(&unlucky_far)), "SUCCESS", "round {round}");
        unlucky.puppet.run(Command::WatchLeases);

        monitor.command(&format!("device_del {NIC}"));
        wait_until("the device goes", || if is_there(GOES) { Err("there") } else { Ok(()) });
        let told = wait_until("the lease is revoked", || {
            let event = unlucky.puppet.run(Command::NextLeaseEvent);
            if event[0] == "revoked" { Ok(event) } else { Err(event) }
        });
        assert!(told[1] == unlucky.lease_id || told[1] == unlucky_far.lease_id, "{told}");
        let posted = Command::Post {
            queue_pair: "q".into(),
            work: vec![write(&unlucky_far)],
            first_wr_id: 2,
            only_last_signaled: false,
        };
        if unlucky.puppet.try_run(posted).is_ok() {
            let status = text(&unlucky.completion()["status"]);
            assert!(["WR_FLUSH_ERR", "FATAL_ERR", "STALE"].contains(&status.as_str()), "{status}");
        }
        let gone =
            unlucky.puppet.refused(Command::AcquireHost { buffer: "c".into(), hca: GOES.into(), size: BUFFER_BYTES });
        assert_eq!(gone.reason, "DEVICE_LOST", "{gone:?}");
        watch_until(&mut watcher, &mut generation, |hcas| !hcas.contains(&GOES));
        lucky.poke(0, "0badcafe");
        assert_eq!(lucky.status_of(1, write(&lucky_far)), "SUCCESS", "the other NIC's user is undisturbed");
        drop((unlucky, unlucky_far));

        // Until the guest has let go of it, the emulator has it still.
        wait_until("the NIC is put back", || monitor.try_command(&format!("device_add {NIC_AGAIN}")));
        let back = wait_until("the NIC is back", || nics().pop().filter(|nic| nic.address == address).ok_or(()));
        make_rxe(&back, GOES);
        wait_until("the device is served again", || {
            let told = run("gdrctl", &["--runtime-dir", &daemon.runtime_dir_text(), "status"]);
            if told.contains(GOES) { Ok(()) } else { Err(told) }
        });
        watch_until(&mut watcher, &mut generation, |hcas| hcas.contains(&GOES));
        wait_until("the sessions on what went have ended", || {
            let told = run("gdrctl", &["--runtime-dir", &daemon.runtime_dir_text(), "stats"]);
            let sessions = told.lines().find_map(|line| line.strip_prefix("gdrd_sessions ")).map(str::trim);
            // The watcher's and the two of the undisturbed tenant.
            if sessions.is_some_and(|value| value.starts_with('3')) { Ok(()) } else { Err(told) }
        });
        let kept = daemon.footprint();
        let before = *before.get_or_insert((kept.fd_count(), kept.threads));
        // Fewer is well: threads without work end, and the first round may have been seen before its last ones did.
        wait_until("what the device's life left to go", || {
            let now = daemon.footprint();
            if now.fd_count() <= before.0 && now.threads <= before.1 { Ok(()) } else { Err(now) }
        });
    }
    drop((lucky, lucky_far));
    assert!(daemon.stop().success());
    // Nor on the one that came back, last of all while nobody used it.
    assert_eq!([STAYS, GOES].map(held), [before_all; 2]);
}
