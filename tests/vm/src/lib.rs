//! What the tests inside of a guest share: its soft RoCE device, its memory, its place among the guests.
//!
//! Must not know: how guests are made (the scripts beside this crate).
#![forbid(unsafe_code)]

pub mod monitor;
pub mod pci;

use std::os::fd::OwnedFd;
use std::process::Command;
use std::sync::Arc;

use gdrd_hal::Hca;
use gdrd_verbs::{Options, Verbs};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

/// The soft RoCE device that guest-init.sh makes.
pub const HCA: &str = "rxe0";
/// The network interface below it.
pub const NETDEV: &str = "eth0";

/// The guest's soft RoCE device, opened anew.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn open_hca() -> Arc<dyn Hca> {
    open_hca_with(&Options::default())
}

/// The guest's soft RoCE device, opened anew with these settings.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn open_hca_with(options: &Options) -> Arc<dyn Hca> {
    open(HCA, options)
}

/// The device of this name, opened anew.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn open_hca_named(name: &str) -> Arc<dyn Hca> {
    open(name, &Options::default())
}

fn open(name: &str, options: &Options) -> Arc<dyn Hca> {
    let verbs = Verbs::load().expect("the guest has libibverbs");
    let devices = verbs.open_devices(options).expect("the guest has RDMA devices");
    assert!(devices.unusable.is_empty(), "{:?}", devices.unusable);
    let found = devices.hcas.into_iter().find(|hca| hca.name() == name);
    found.unwrap_or_else(|| unreachable!("no device {name}"))
}

/// Zeroed host memory that cannot shrink.
///
/// # Panics
/// When the guest has none left.
#[must_use]
pub fn host_memory(len_bytes: u64) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let memory = memfd_create("vm-test", flags).expect("a memfd can be made");
    ftruncate(&memory, len_bytes).expect("a memfd can be grown");
    fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW).expect("a fresh memfd takes seals");
    memory
}

/// Number of this guest, from 1.
///
/// # Panics
/// Outside of a guest.
#[must_use]
pub fn node() -> u8 {
    let node = std::env::var("GDRD_VM_NODE").expect("guest-init.sh tells the guest its number");
    node.parse().expect("the number of a guest is a number")
}

/// Runs `ip` with these arguments.
///
/// # Panics
/// When it fails.
pub fn ip(arguments: &[&str]) {
    run("ip", arguments);
}

/// What a program prints that must succeed.
///
/// # Panics
/// When it fails.
pub fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output();
    let output = output.unwrap_or_else(|error| unreachable!("the guest has no {program}: {error}"));
    let (said, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} {arguments:?}: {}: {said}{error}", output.status);
    said.into_owned()
}

/// How many objects of this kind (`pd`, `cq`, `qp`, `mr`, `ctx`) the kernel holds on a device (rdma-resource(8)). A few
/// are its own.
///
/// # Panics
/// When it does not say.
#[must_use]
pub fn kernel_holds(hca: &str, kind: &str) -> u64 {
    let shown = run("rdma", &["resource", "show", hca]);
    let mut words = shown.split_whitespace();
    let count = words.by_ref().find(|word| *word == kind).and_then(|_| words.next());
    count.and_then(|count| count.parse().ok()).unwrap_or_else(|| unreachable!("no {kind} in {shown:?}"))
}
