//! The checks of `make device-test` that a machine without a GPU can run: this binary and the daemon over a driver that is
//! not real, with two GPUs. It proves the way through daemon, workers and clients, and the checks themselves; nothing about
//! a real driver.

use std::path::Path;
use std::process::Command;

use gdrd_fake_driver::{FakeDriver, FakeGpu};
use gdrd_harness::binary;
use gdrd_topology::profile;
use gdrd_topology::sysfs::build::build;

/// A host with GPUs at the addresses of the fake's.
fn write_tree(root: &Path, gpus: &[u8]) {
    let mut text = "gdrd-host-profile 1\nname fake\nnuma 0 cpus=0-3 distances=10\n".to_owned();
    for gpu in gpus {
        text += &format!("root pci0000:{gpu:02x}\n");
        text += &format!("pci 0000:{gpu:02x}:00.0 10de:2335 030200 pci0000:{gpu:02x} 32x16 driver=nvidia\n");
    }
    let snapshot = profile::snapshot(&text, None, &gdrd_topology::assemble::ReadOptions::default()).expect("a profile");
    build(&snapshot.host, root).expect("a tree can be written");
}

/// Runs checks, and returns what they printed once they have all passed.
fn run(filters: &[&str]) -> String {
    let folder = tempfile::tempdir().expect("a folder");
    let driver = FakeDriver::install(folder.path(), &[FakeGpu::switched(6), FakeGpu::switched(7)]).expect("laid in");
    let root = folder.path().join("root");
    std::fs::create_dir(&root).expect("a folder");
    write_tree(&root, &[6, 7]);
    let path = std::env::var("PATH").unwrap_or_default();
    let output = Command::new(env!("CARGO_BIN_EXE_gdrd-device-test"))
        .args(filters)
        .arg("--gdrd")
        .arg(binary("gdrd"))
        .arg("--sysfs-root")
        .arg(&root)
        .env("LD_LIBRARY_PATH", driver.library_path())
        .env("PATH", format!("{}:{path}", driver.library_path().display()))
        .output()
        .expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let passed = text.lines().filter(|line| line.starts_with("ok ")).count();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(passed >= filters.len(), "{passed} checks for {filters:?}:\n{text}");
    text
}

#[test]
fn leased_memory_is_used_from_another_gpu() {
    run(&["read and written from another", "opened to a peer"]);
}

#[test]
fn drains_and_killed_workers_give_all_memory_back() {
    run(&["drain frees the device", "content outlive a worker", "closed give all memory back"]);
}
