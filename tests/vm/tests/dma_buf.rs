//! One guest: memory that a client brings as a dma-buf. Without the module of dma-buf/, soft RoCE cannot register one, and
//! says so; with it, RDMA reaches the client's own memory, and nothing holds that once the client is gone.
#![forbid(unsafe_code)]

mod common;

use std::fs;
use std::path::Path;

use common::{Side, daemon_of, join, text};
use gdrd_harness::script::{Command, Local, Remote, Work};
use gdrd_harness::{DaemonOptions, Puppet, User, wait_until};
use gdrd_vm::{HCA, kernel_holds, run};

const BUFFER_BYTES: u64 = 2 << 20;
const LAUNCHER: &str = "/gdrd/dma-buf/dmabuf-exec";
/// Of a libibverbs that asks the kernel.
const LIBRARIES: &str = "/gdrd/dma-buf";
const MODULE: &str = "rxe_dmabuf";

/// A client process with a dma-buf of its own, made by this exporter, adopted as `m`.
fn owner(runtime_dir: &str, exporter: &str) -> Puppet {
    let mut puppet = Puppet::start_by(LAUNCHER, &[exporter, &BUFFER_BYTES.to_string()]);
    puppet.run(Command::Connect { runtime_dir: runtime_dir.to_owned() });
    puppet.run(Command::AdoptInherited { memory: "m".into() });
    puppet
}

fn range(offset: u64, len: u64) -> Command {
    Command::RegisterRange { memory: "m".into(), offset, len, hca: HCA.into() }
}

/// How many dma-bufs there are in the whole guest (drivers/dma-buf/dma-buf.c, dma_buf_debug_show).
fn dma_bufs() -> usize {
    const BUFINFO: &str = "/sys/kernel/debug/dma_buf/bufinfo";
    if !Path::new(BUFINFO).exists() {
        run("mount", &["-t", "debugfs", "debugfs", "/sys/kernel/debug"]);
    }
    let told = fs::read_to_string(BUFINFO).expect("the guest's kernel has debugfs");
    let of = |line: &str| line.strip_prefix("Total ")?.split_once(" objects")?.0.parse().ok();
    let count = told.lines().find_map(of);
    count.unwrap_or_else(|| unreachable!("no count in {told}"))
}

#[test]
fn a_dma_buf_is_refused_with_errno_where_nobody_can_register_it_and_host_memory_serves_instead() {
    let daemon = daemon_of(DaemonOptions::default());
    let mut near = Side::new(&daemon, User::Own, BUFFER_BYTES);
    let mut far = Side::new(&daemon, User::Own, BUFFER_BYTES);
    join(&mut near, &mut far);
    let mut owner = owner(&daemon.runtime_dir_text(), "udmabuf");
    assert_eq!(dma_bufs(), 1);
    let refused = owner.refused(range(0, BUFFER_BYTES));
    assert_eq!(refused.reason, "UNSUPPORTED", "{refused:?}");
    for part in ["dma-buf: not on this HCA", HCA, "os error 95", "memfd"] {
        assert!(refused.message.contains(part), "{part} in {refused:?}");
    }
    let told = run("gdrctl", &["--runtime-dir", &daemon.runtime_dir_text(), "status"]);
    assert!(told.contains(HCA), "refused for one memory, the device serves: {told}");

    owner.run(Command::Adopt { memory: "h".into(), size: BUFFER_BYTES, gpu: String::new() });
    let memfd = Command::RegisterRange { memory: "h".into(), offset: 0, len: BUFFER_BYTES, hca: HCA.into() };
    let blob = text(&owner.run(memfd));
    near.poke(0, "0badcafe");
    let write = Work::Write { local: Local::new("b", 0, 4), remote: Remote::new(&blob, 64), imm: None };
    assert_eq!(near.status_of(1, write), "SUCCESS");
    assert_eq!(owner.run(Command::PeekAdopted { memory: "h".into(), offset: 64, len: 4 }), "0badcafe");
    drop(owner);
    wait_until("the refused dma-buf is let go", || if dma_bufs() == 0 { Ok(()) } else { Err(dma_bufs()) });
}

#[test]
fn rdma_reaches_dma_bufs_of_a_client_and_nothing_holds_them_after_it() {
    run("modprobe", &[MODULE]);
    let regions = kernel_holds(HCA, "mr");
    let daemon = daemon_of(DaemonOptions::default().library_path(Path::new(LIBRARIES)));
    let mut near = Side::new(&daemon, User::Own, BUFFER_BYTES);
    let mut far = Side::new(&daemon, User::Own, BUFFER_BYTES);
    join(&mut near, &mut far);
    for (seed, exporter) in [(1, "udmabuf"), (2, "heap")] {
        let mut owner = owner(&daemon.runtime_dir_text(), exporter);
        let whole = text(&owner.run(range(0, BUFFER_BYTES)));
        // In the middle, and off all boundaries.
        let part = text(&owner.run(range(1_234_567, 100_000)));
        near.fill(seed);
        near.write_all_to(&whole);
        if exporter == "udmabuf" {
            let seen = owner.run(Command::DigestKept { kept: "m".into() });
            assert_eq!(seen[0], near.digest(), "in the memory that the client sees");
        }
        let read = Work::Read { local: Local::new("b", 0, 100_000), remote: Remote::new(&part, 0) };
        let wanted = near.peek(1_234_567, 64);
        assert_eq!(near.status_of(1, read), "SUCCESS", "{exporter}");
        assert_eq!(near.peek(0, 64), wanted, "{exporter}: one region shows what another has written");

        assert_eq!(dma_bufs(), 1);
        owner.kill();
        // A region holds its buffer.
        wait_until("the dma-buf of the killed client to go", || if dma_bufs() == 0 { Ok(()) } else { Err(dma_bufs()) });
        let write = Work::Write { local: Local::new("b", 0, 64), remote: Remote::new(&whole, 0), imm: None };
        assert_eq!(near.status_of(2, write), "REM_ACCESS_ERR");
        let [n, f] = [(); 2].map(|()| Side::new(&daemon, User::Own, BUFFER_BYTES));
        (near, far) = (n, f);
        join(&mut near, &mut far);
    }
    drop((near, far));
    assert!(daemon.stop().success());
    assert_eq!(kernel_holds(HCA, "mr"), regions);
    // Which the kernel refuses while anything of it is in use.
    run("rmmod", &[MODULE]);
}

#[test]
fn an_eio_of_one_registration_takes_the_device_from_nobody() {
    const EIO: &str = "5";
    run("modprobe", &[MODULE]);
    let daemon = daemon_of(DaemonOptions::default().library_path(Path::new(LIBRARIES)));
    let mut near = Side::new(&daemon, User::Own, BUFFER_BYTES);
    let mut far = Side::new(&daemon, User::Own, BUFFER_BYTES);
    join(&mut near, &mut far);
    let mut owner = owner(&daemon.runtime_dir_text(), "udmabuf");
    fs::write(format!("/sys/module/{MODULE}/parameters/fail"), EIO).expect("the module is loaded");
    let refused = owner.refused(range(0, BUFFER_BYTES));
    assert_eq!(refused.reason, "DRIVER_FAILED", "{refused:?}");
    assert!(refused.message.contains("errno 5"), "{refused:?}");
    near.write_all_to(&far.blob);
    assert_eq!(far.digest(), near.digest());
    owner.run(range(0, BUFFER_BYTES));
    drop((owner, near, far));
    assert!(daemon.stop().success());
    run("rmmod", &[MODULE]);
}
