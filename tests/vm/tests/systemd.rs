//! A guest with Debian's own systemd: gdrd installed and enabled as its installer says, in its own sandbox, with a
//! watchdog that is real.
#![forbid(unsafe_code)]

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::sync::Once;

use common::{Side, join, number, text};
use gdrd_harness::script::Command;
use gdrd_harness::{Puppet, User, wait_until};
use gdrd_vm::{HCA, kernel_holds, run};
use rustix::process::{Pid, Signal, kill_process};

const UNIT: &str = "gdrd.service";
const UNITS: [&str; 3] = ["gdrd.socket", "gdrd-session.socket", UNIT];
const RUNTIME_DIR: &str = "/run/gdrd";
const BUFFER_BYTES: u64 = 2 << 20;
/// The unit's own period would make the test of a hang wait for half a minute.
const DROP_IN: &str = "[Service]\nWatchdogSec=10s\n";

/// What `make install` asks an operator to do, once in the life of the guest; and the service runs.
fn serving() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        run("systemctl", &["is-system-running", "--wait"]);
        make_hca();
        run("systemd-sysusers", &[]);
        run("systemd-tmpfiles", &["--create"]);
        fs::create_dir_all("/etc/systemd/system/gdrd.service.d").expect("the guest's root can be written");
        fs::write("/etc/systemd/system/gdrd.service.d/watchdog.conf", DROP_IN).expect("a drop-in can be written");
        run("systemctl", &["daemon-reload"]);
        run("systemctl", &["enable", "--now", UNITS[0], UNITS[1], UNITS[2]]);
    });
    run("systemctl", &["start", UNITS[0], UNITS[1], UNITS[2]]);
}

/// A soft RoCE device on the only NIC, which udev has named.
fn make_hca() {
    for module in ["virtio_net", "crc32_generic", "ib_uverbs", "rdma_rxe"] {
        run("modprobe", &[module]);
    }
    run("udevadm", &["settle"]);
    let names = fs::read_dir("/sys/class/net").expect("a guest has interfaces");
    let mut names = names.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let netdev = names.find(|name| name != "lo").expect("a guest has a NIC");
    run("ip", &["address", "add", "10.77.0.1/24", "dev", &netdev]);
    run("ip", &["link", "set", &netdev, "mtu", "4200", "up"]);
    run("rdma", &["link", "add", HCA, "type", "rxe", "netdev", &netdev]);
    // The device node and its mode are udev's work.
    run("udevadm", &["settle"]);
}

/// A property of the service (systemctl(1), show).
fn property(name: &str) -> String {
    run("systemctl", &["show", "--value", "--property", name, UNIT]).trim().to_owned()
}

fn main_pid() -> u32 {
    property("MainPID").parse().expect("systemd knows the number of its process")
}

fn signal(pid: u32, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).expect("the service has a process");
    kill_process(pid, signal).expect("its process is there");
}

/// What `/proc` says of the daemon.
fn proc_status(field: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{}/status", main_pid())).expect("the daemon runs");
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    line.map(|value| value.trim().to_owned()).unwrap_or_else(|| unreachable!("no {field} in {status}"))
}

/// Two clients with a queue pair to each other.
fn joined() -> [Side; 2] {
    let mut sides = [(); 2].map(|()| Side::at(RUNTIME_DIR, User::Own, BUFFER_BYTES));
    let [near, far] = &mut sides;
    join(near, far);
    sides
}

/// The first writes content drawn from this seed into the memory of the second. Returns its digest.
fn move_content([near, far]: &mut [Side; 2], seed: u64) -> String {
    near.fill(seed);
    let content = near.digest();
    assert_ne!(far.digest(), content);
    near.write_all_to(&far.blob);
    assert_eq!(far.digest(), content);
    content
}

/// Two clients move content through the daemon of the service.
fn moves_content() {
    move_content(&mut joined(), 7);
}

/// Descriptors in systemd's store.
fn stored() -> u32 {
    property("NFileDescriptorStore").parse().expect("systemd counts what it has stored")
}

/// Leases that the client's tenant has.
fn lease_ids(side: &mut Side) -> BTreeSet<u64> {
    let leases = side.puppet.run(Command::Leases);
    leases.as_array().into_iter().flatten().map(|lease| number(&lease["id"])).collect()
}

/// What a watch of leases tells up to the end of a full state.
fn watched(watcher: &mut Puppet) -> Vec<(String, u64)> {
    let mut events: Vec<(String, u64)> = Vec::new();
    while events.last().is_none_or(|(kind, _)| kind != "synced") {
        let event = watcher.run(Command::NextLeaseEvent);
        events.push((text(&event[0]), number(&event[1])));
    }
    events
}

/// Descriptors of host buffers that any process has, systemd among them (proc_pid_fd(5)).
fn buffer_descriptors() -> usize {
    let folders =
        fs::read_dir("/proc").expect("the guest has it").filter_map(|entry| Some(entry.ok()?.path().join("fd")));
    // A process may end meanwhile.
    let descriptors = folders.filter_map(|folder| fs::read_dir(folder).ok()).flatten();
    let links = descriptors.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
    links.filter(|link| link.to_string_lossy().starts_with("/memfd:gdrd-host")).count()
}

/// Waits until another process than `before` serves.
fn await_another(before: u32) {
    wait_until("systemd starts another daemon", || {
        let now = (property("ActiveState"), main_pid());
        if now.0 == "active" && now.1 != before && now.1 != 0 { Ok(()) } else { Err(now) }
    });
}

#[test]
fn the_installed_unit_serves_the_devices_of_this_host_from_within_its_sandbox() {
    serving();
    assert_eq!((property("ActiveState"), property("Type")), ("active".into(), "notify".into()));
    assert!(property("StatusText").contains("verbs"), "{}", property("StatusText"));
    moves_content();
    let told = run("gdrctl", &["status"]);
    assert!(told.contains(&format!("serves {HCA}")), "{told}");

    let owner = fs::read_to_string("/etc/passwd").expect("it is there");
    let uid = owner.lines().find_map(|line| line.strip_prefix("gdrd:x:")?.split(':').next());
    assert_eq!(proc_status("Uid").split_whitespace().next(), uid, "not root");
    let none = "0000000000000000";
    for capabilities in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(proc_status(capabilities), none, "{capabilities}");
    }
    assert_eq!((proc_status("NoNewPrivs"), proc_status("Seccomp")), ("1".into(), "2".into()));
    let mounts = fs::read_to_string(format!("/proc/{}/mountinfo", main_pid())).expect("the daemon runs");
    // Fields 5 and 6 of proc_pid_mountinfo(5): mount point and its options.
    let root = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>()).rfind(|fields| fields[4] == "/");
    assert!(root.is_some_and(|fields| fields[5].split(',').any(|option| option == "ro")), "{mounts}");
    // Its own count of what a service may still do: 0 nothing, 10 everything.
    run("systemd-analyze", &["security", "--threshold=40", UNIT]);
}

#[test]
fn a_client_of_the_socket_starts_the_service() {
    serving();
    run("systemctl", &["stop", UNIT]);
    assert_eq!((property("ActiveState"), property("Result")), ("inactive".into(), "success".into()));
    assert_eq!(kernel_holds(HCA, "ctx"), 0, "what it held is gone");
    moves_content();
    assert_eq!(property("ActiveState"), "active");
}

#[test]
fn a_daemon_that_hangs_is_ended_by_the_watchdog_and_another_goes_on_with_its_leases() {
    serving();
    let mut sides = joined();
    let content = move_content(&mut sides, 7);
    let before = main_pid();
    signal(before, Signal::STOP);
    await_another(before);
    let journal = run("journalctl", &["--no-pager", "--unit", UNIT]);
    assert!(journal.contains("Watchdog timeout"), "{journal}");
    // Asserts that each has the lease that it had.
    sides = sides.map(|side| side.again(1));
    assert_eq!(sides.each_mut().map(Side::digest), [content.clone(), content]);
    moves_content();
}

#[test]
fn more_than_may_be_locked_is_refused_with_the_limit_and_what_fits_is_lent() {
    const LARGE_BYTES: u64 = 64 << 20;
    const LIMITED: &str = "/etc/systemd/system/gdrd.service.d/memlock.conf";
    let restart = || {
        run("systemctl", &["daemon-reload"]);
        run("systemctl", &["restart", UNIT]);
    };
    serving();
    fs::write(LIMITED, "[Service]\nLimitMEMLOCK=32M\n").expect("a drop-in can be written");
    restart();
    // As user gdrd, without capabilities.
    let said = run("journalctl", &["--no-pager", "--unit", UNIT]);
    assert!(
        said.contains("registrations of more than 33554432 bytes together are refused by RLIMIT_MEMLOCK"),
        "{said}"
    );
    let mut puppet = Puppet::start();
    puppet.run(Command::Connect { runtime_dir: RUNTIME_DIR.into() });
    let acquire = |buffer: &str, size| Command::AcquireHost { buffer: buffer.into(), hca: HCA.into(), size };
    puppet.run(acquire("fits", BUFFER_BYTES));
    let refused = puppet.refused(acquire("large", LARGE_BYTES));
    assert!(refused.message.contains("RLIMIT_MEMLOCK") && !refused.reason.is_empty(), "{refused:?}");
    let regions = run("rdma", &["resource", "show", "mr"]);
    assert!(!regions.contains(&format!("mrlen {LARGE_BYTES}")), "nothing of the refused one is left: {regions}");
    assert!(regions.contains(&format!("mrlen {BUFFER_BYTES}")), "{regions}");
    moves_content();

    fs::remove_file(LIMITED).expect("it was written");
    restart();
    let mut puppet = Puppet::start();
    puppet.run(Command::Connect { runtime_dir: RUNTIME_DIR.into() });
    puppet.run(acquire("large", LARGE_BYTES));
}

/// What ends the daemon's process and leaves the service.
fn killed() {
    signal(main_pid(), Signal::KILL);
}

fn restarted() {
    run("systemctl", &["restart", UNIT]);
}

#[test]
fn leases_and_content_outlive_a_killed_and_a_restarted_daemon() {
    serving();
    let mut sides = joined();
    let mut content = move_content(&mut sides, 1);
    let leases: BTreeSet<_> = sides.iter().map(|side| side.lease_id).collect();
    let mut watcher = Puppet::start();
    watcher.run(Command::Connect { runtime_dir: RUNTIME_DIR.into() });
    watcher.run(Command::WatchLeases);
    watched(&mut watcher);
    for (restarts, end) in (1..).zip([killed, restarted, killed]) {
        assert!(stored() > 0);
        let before = main_pid();
        end();
        await_another(before);
        // Asserts that each has the lease that it had.
        sides = sides.map(|side| side.again(restarts));
        for side in &mut sides {
            assert_eq!(side.digest(), content, "restart {restarts}");
            assert_eq!(lease_ids(side), leases, "restart {restarts}");
        }
        let events = watched(&mut watcher);
        let of = |wanted: &str| events.iter().filter(|(kind, _)| kind == wanted).map(|(_, id)| *id).collect();
        let (present, ended): (BTreeSet<_>, [BTreeSet<_>; 2]) = (of("present"), [of("revoked"), of("released")]);
        assert_eq!((present, ended), (leases.clone(), Default::default()), "{events:?}");
        let [near, far] = &mut sides;
        join(near, far);
        content = move_content(&mut sides, 1 + restarts);
    }
    for side in &mut sides {
        side.puppet.run(Command::Release { buffer: "b".into() });
    }
    assert_eq!(lease_ids(&mut sides[0]), BTreeSet::new());
}

#[test]
fn hundreds_of_leases_come_back_at_once() {
    const LEASES: u32 = 200;
    const SMALL_BYTES: u64 = 64 << 10;
    serving();
    let mut puppet = Puppet::start();
    puppet.run(Command::Connect { runtime_dir: RUNTIME_DIR.into() });
    for place in 0..LEASES {
        let buffer = place.to_string();
        puppet.run(Command::AcquireHost { buffer: buffer.clone(), hca: HCA.into(), size: SMALL_BYTES });
        puppet.run(Command::Poke { buffer, offset: 0, bytes: format!("{place:08x}") });
    }
    assert!(stored() >= LEASES, "each has a descriptor in the store");
    let before = main_pid();
    killed();
    await_another(before);
    puppet.run(Command::AwaitRestart { restarts: 1 });
    for place in 0..LEASES {
        let buffer = place.to_string();
        puppet.run(Command::Refresh { buffer: buffer.clone() });
        let content = puppet.run(Command::Peek { buffer, offset: 0, len: 4 });
        assert_eq!(text(&content), format!("{place:08x}"));
    }
}

#[test]
fn a_stopped_service_keeps_nothing_and_starts_with_nothing() {
    serving();
    let mut sides = joined();
    move_content(&mut sides, 7);
    assert!(stored() > 0 && buffer_descriptors() > 0);
    run("systemctl", &["stop", UNIT]);
    wait_until("systemd closes what it has stored", || match stored() {
        0 => Ok(()),
        count => Err(count),
    });
    assert_eq!(kernel_holds(HCA, "ctx"), 0);
    for side in &mut sides {
        assert_eq!(text(&side.puppet.run(Command::SessionEnd)), "CONNECTION_LOST");
    }
    drop(sides);
    // What clients had mapped goes with them; a descriptor would hold the memory for ever.
    wait_until("nobody has a buffer any more", || match buffer_descriptors() {
        0 => Ok(()),
        count => Err(count),
    });

    run("systemctl", &["start", UNIT]);
    let mut sides = joined();
    let leases: BTreeSet<_> = sides.iter().map(|side| side.lease_id).collect();
    assert_eq!(lease_ids(&mut sides[0]), leases, "of before none is left");
    move_content(&mut sides, 8);
}
