//! The checks of `make device-test` that a machine without a GPU can run: this binary and the daemon over a driver that is
//! not real, with two GPUs. It proves the way through daemon, workers and clients, and the checks themselves; nothing about
//! a real driver.

use std::fs::Permissions;
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use gdrd_client::{AcquireOptions, Client, ClientOptions, RuntimeDir};
use gdrd_fake_driver::{FakeDriver, FakeGpu};
use gdrd_harness::{PATIENCE, binary};
use gdrd_topology::assemble::ReadOptions;
use gdrd_topology::model::{GpuId, NvLinkKind};
use gdrd_topology::sysfs::build::build;
use gdrd_topology::sysfs::capture::{Packed, capture, pack};
use gdrd_topology::{driver_file, profile, read_stream};
use tempfile::TempDir;

/// A host with GPUs at the addresses of the fake's.
fn write_tree(root: &Path, gpus: &[u8]) {
    let mut text = "gdrd-host-profile 1\nname fake\nnuma 0 cpus=0-3 distances=10\n".to_owned();
    for gpu in gpus {
        text += &format!("root pci0000:{gpu:02x}\n");
        text += &format!("pci 0000:{gpu:02x}:00.0 10de:2335 030200 pci0000:{gpu:02x} 32x16 driver=nvidia\n");
    }
    let snapshot = profile::snapshot(&text, None, &ReadOptions::default()).expect("a profile");
    build(&snapshot.host, root).expect("a tree can be written");
}

/// A fake driver, and the tree that has its GPUs.
struct Machine {
    _folder: TempDir,
    driver: FakeDriver,
    root: PathBuf,
}

impl Machine {
    fn new(gpus: &[FakeGpu]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let driver = FakeDriver::install(folder.path(), gpus).expect("laid in");
        let root = folder.path().join("root");
        std::fs::create_dir(&root).expect("a folder");
        let bus = |gpu: &FakeGpu| gpu.bdf.split(':').nth(1).and_then(|bus| u8::from_str_radix(bus, 16).ok());
        write_tree(&root, &gpus.iter().map(|gpu| bus(gpu).expect("an address")).collect::<Vec<_>>());
        Self { _folder: folder, driver, root }
    }

    /// With an older driver, which lacks a function.
    fn without(mut self, symbol: &str) -> Self {
        self.driver = self.driver.without(symbol).expect("the driver has it");
        self
    }

    /// Runs one of the other processes of a check; what it said, and why it failed.
    fn peer(&self, role: &str, folder: &Path, gpu: &str, input: &str) -> Result<String, String> {
        let mut command = self.command(env!("CARGO_BIN_EXE_gdrd-device-test"));
        command.args(["peer", role]).arg(folder).args([gpu, &(2_u64 << 20).to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        // Refused where it has ended before it listens.
        let _ = child.stdin.take().expect("it is piped").write_all(input.as_bytes());
        let output = child.wait_with_output().expect("it runs");
        let told = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        if output.status.success() { Ok(told(&output.stdout)) } else { Err(told(&output.stderr)) }
    }

    /// A program that finds the driver.
    fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let path = std::env::var("PATH").unwrap_or_default();
        let mut command = Command::new(program);
        command
            .env("LD_LIBRARY_PATH", self.driver.library_path())
            .env("PATH", format!("{}:{path}", self.driver.library_path().display()));
        command
    }

    /// Runs checks, all of which pass, and returns what they say.
    fn check(&self, filters: &[&str]) -> String {
        let text = self.run(filters);
        let passed = text.lines().filter(|line| line.starts_with("ok ")).count();
        assert!(text.ends_with(" 0 failed\n"), "{text}");
        assert!(passed >= filters.len(), "{passed} checks for {filters:?}:\n{text}");
        text
    }

    /// Runs checks, and returns what they say.
    fn run(&self, filters: &[&str]) -> String {
        let output = self
            .command(env!("CARGO_BIN_EXE_gdrd-device-test"))
            .args(filters)
            .arg("--gdrd")
            .arg(binary("gdrd"))
            .arg("--sysfs-root")
            .arg(&self.root)
            .output()
            .expect("it runs");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(output.status.success(), text.ends_with(" 0 failed\n"), "{text}");
        text
    }

    /// A daemon that serves its GPUs.
    fn daemon(&self, config: &str) -> Daemon {
        let folder = tempfile::tempdir().expect("a folder");
        let child = self.daemon_in(folder.path(), config).spawn().expect("it starts");
        Daemon { child, folder }
    }

    /// What starts it, with files in that folder.
    fn daemon_in(&self, folder: &Path, config: &str) -> Command {
        let file = folder.join("gdrd.toml");
        let own = rustix::process::geteuid().as_raw();
        let policy = format!("[policy]\nadmins = [\"uid:{own}\"]\n");
        std::fs::write(&file, format!("gpu_proof = \"none\"\n{config}\n{policy}")).expect("a file can be written");
        let mut command = self.command(binary("gdrd"));
        command.args(["--sim-hca", "2", "--log", "error", "--sysfs-root"]).arg(&self.root);
        command.arg("--config").arg(file).arg("--runtime-dir").arg(folder.join("run")).stdin(Stdio::null());
        command
    }
}

struct Daemon {
    child: Child,
    folder: TempDir,
}

impl Daemon {
    fn run_dir(&self) -> PathBuf {
        self.folder.path().join("run")
    }

    async fn connect(&mut self) -> Client {
        let since = Instant::now();
        loop {
            assert!(since.elapsed() < PATIENCE, "the daemon does not answer");
            assert!(self.child.try_wait().expect("it is our child").is_none(), "the daemon has ended");
            let options = ClientOptions::default().runtime_dir(RuntimeDir::new(self.folder.path().join("run")));
            if let Ok(client) = options.connect().await {
                return client;
            }
            tokio::task::yield_now().await;
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn two_switched() -> Machine {
    Machine::new(&[FakeGpu::switched(6), FakeGpu::switched(7)])
}

#[test]
fn leased_memory_is_used_from_another_gpu() {
    two_switched().check(&["read and written from another", "opened to a peer", "through host memory"]);
}

#[test]
fn leased_memory_is_found_by_address_and_not_adopted() {
    two_switched().check(&["adopted by nobody"]);
}

#[test]
fn nvlinks_and_levels_are_held_against_what_nvidia_smi_prints() {
    let told = two_switched().check(&["nvidia-smi nvlink -s", "nvidia-smi topo -m"]);
    assert!(told.contains("18 links") && told.contains("GPU1 to GPU0: NV18") && !told.contains("skipped"), "{told}");
    let joined = |number: u8, other: &str| {
        let words = vec![format!("links={other}/4")];
        FakeGpu { words, ..FakeGpu::switched(number) }
    };
    let direct = Machine::new(&[joined(6, "00000000:07:00.0"), joined(7, "00000000:06:00.0")]);
    let told = direct.check(&["nvidia-smi nvlink -s", "nvidia-smi topo -m"]);
    assert!(told.matches(": 4 links").count() == 2 && told.contains("GPU0 to GPU1: NV4"), "{told}");
    // A tool that shows one link less.
    let machine = two_switched();
    let smi = machine.driver.library_path().join("nvidia-smi");
    std::fs::rename(&smi, smi.with_extension("real")).expect("the folder is writable");
    std::fs::write(&smi, "#!/bin/sh\n\"$0.real\" \"$@\" | grep -v 'Link 17:' | sed s/NV18/NV17/\n").expect("writable");
    std::fs::set_permissions(&smi, Permissions::from_mode(0o755)).expect("it is ours");
    let told = machine.run(&["nvidia-smi nvlink -s", "nvidia-smi topo -m"]);
    assert_eq!(told.matches("FAILED").count(), 2, "{told}");
}

#[test]
fn with_one_gpu_the_checks_of_pairs_say_that_they_are_skipped_and_why() {
    let told = Machine::new(&[FakeGpu::switched(6)]).check(&["nvidia-smi nvlink -s"]);
    let skipped: Vec<&str> = told.lines().filter(|line| line.starts_with("skipped ")).collect();
    assert_eq!(skipped.len(), 2, "{told}");
    assert!(skipped.iter().all(|line| line.contains("a pair needs two")), "{told}");
}

#[test]
fn drains_and_killed_workers_give_all_memory_back() {
    two_switched().check(&["drain frees the device", "content outlive a worker", "closed give all memory back"]);
}

#[test]
fn memory_that_was_freed_is_told_from_what_is_at_its_address_next() {
    two_switched().check(&["memory of cuMemAlloc", "memory of cuMemCreate", "seen to be, and comes back"]);
}

#[tokio::test]
async fn adopted_memory_that_was_freed_is_no_hit_and_gives_way_to_what_is_there_now() {
    // openucx/ucx#4269 and #5910, ofiwg/libfabric#8081.
    let machine = two_switched();
    let mut daemon = machine.daemon("");
    let client = daemon.connect().await;
    let gpu = client.topology().await.expect("a topology").plan.expect("a plan").gpus.remove(0).uuid.expect("a uuid");
    let output = machine
        .command(env!("CARGO_BIN_EXE_gdrd-device-test"))
        .args(["peer", "freer"])
        .arg(daemon.folder.path().join("run"))
        .args([&gpu, &(4_u64 << 20).to_string()])
        .output()
        .expect("it runs");
    let told = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{told}{}", String::from_utf8_lossy(&output.stderr));
    let lines: Vec<&str> = told.lines().collect();
    assert_eq!(lines[..3], ["hit", "miss", "miss"], "as it is, freed, and used again");
    assert!(lines[3].contains("was freed; adopt what is there now"), "{}", lines[3]);
    assert_eq!(lines[4], "hit");
    assert!(lines[5].contains("was freed while it was adopted"), "{}", lines[5]);
    assert_eq!(lines[6..], ["done"]);
}

#[tokio::test]
async fn a_post_from_gpu_memory_waits_for_the_work_that_fills_it_unless_it_says_otherwise() {
    let gpus = [FakeGpu::switched(6).word("late=1"), FakeGpu::switched(7).word("late=1")];
    let machine = Machine::new(&gpus);
    let mut daemon = machine.daemon("");
    daemon.connect().await;
    let told = machine.peer("poster", &daemon.run_dir(), &gpus[0].uuid, "").expect("it posts");
    // Of a lease, of memory of its own that was adopted, and of a range of the lease.
    let lines: Vec<&str> = told.lines().collect();
    assert_eq!(lines, ["old", "new", "new"].repeat(3));
}

#[test]
fn leases_on_all_gpus_are_accounted_for_and_survive_what_is_killed() {
    two_switched().check(&[
        "adds up to what",
        "killed on all gpus",
        "daemon killed with leases",
        "daemon killed under a keeper",
        "out of memory tells",
    ]);
}

#[tokio::test]
async fn a_gpu_whose_driver_reports_a_fatal_xid_is_lost_and_no_other_is() {
    let machine = two_switched();
    let mut daemon = machine.daemon("[topology]\nrescan_interval_s = 0\n");
    let client = daemon.connect().await;
    let session = client.open_session("xid").await.expect("a session");
    let lease = |gpu: &str| session.acquire(AcquireOptions::on_gpu(gpu, 2 << 20));
    let (kept, _other) = (lease("GPU0").await.expect("memory"), lease("GPU1").await.expect("memory"));
    machine.driver.raise_xid(0, 79).expect("the folder is writable");
    let error = loop {
        match lease("GPU0").await {
            Ok(buffer) => buffer.release().await.expect("it is held"),
            Err(error) => break error,
        }
    };
    assert_eq!(error.reason(), Some("DEVICE_LOST"), "{error}");
    lease("GPU1").await.expect("the other gpu serves");
    // What was lent on it is revoked, and the topology says why, without a rescan at an interval.
    let told = loop {
        let plan = client.topology().await.expect("a topology").plan.unwrap_or_default();
        if let Some(told) = plan.warnings.iter().find(|warning| warning.contains("xid 79")) {
            break told.clone();
        }
        tokio::task::yield_now().await;
    };
    assert!(told.contains(kept.gpu_uuid()), "{told}");
    // An administrator who forgets the reset is told; the driver answers all along.
    machine.driver.take_to_mend(0, 1).expect("the folder is writable");
    client.drain("GPU0", false).await.expect("root drains");
    client.drain("GPU0", true).await.expect("root resumes");
    let error = lease("GPU0").await.expect_err("it was not reset");
    assert!(["xid 79", "a reset of the gpu"].iter().all(|told| error.to_string().contains(told)), "{error}");
    // Drained in between, for a reset.
    client.drain("GPU0", false).await.expect("root drains");
    machine.driver.take_to_mend(0, 0).expect("the folder is writable");
    client.drain("GPU0", true).await.expect("root resumes");
    lease("GPU0").await.expect("it serves again");
}

#[tokio::test]
async fn a_gpu_that_no_worker_watches_is_lost_by_what_the_driver_says_when_it_is_asked() {
    let machine = two_switched();
    machine.driver.count_ecc_errors(1, 3).expect("the folder is writable");
    let mut daemon = machine.daemon("[topology]\nrescan_interval_s = 0\n");
    let client = daemon.connect().await;
    let session = client.open_session("unwatched").await.expect("a session");
    let told = async |gpu: usize| loop {
        let gpus = client.gpu_memory().await.expect("it is asked");
        if let Some(reason) = gpus.get(gpu).and_then(|gpu| gpu.unavailable.clone()) {
            break reason;
        }
    };
    machine.driver.take_to_mend(0, 1).expect("the folder is writable");
    assert!(told(0).await.contains("a reset of the gpu"));
    let error = session.acquire(AcquireOptions::on_gpu("GPU0", 2 << 20)).await.expect_err("it needs a reset");
    assert_eq!(error.reason(), Some("DEVICE_LOST"), "{error}");
    session.acquire(AcquireOptions::on_gpu("GPU1", 2 << 20)).await.expect("errors of before are no news");
    machine.driver.count_ecc_errors(1, 5).expect("the folder is writable");
    assert!(told(1).await.contains("2 uncorrected ecc errors more"));
    let error = session.acquire(AcquireOptions::on_gpu("GPU1", 2 << 20)).await.expect_err("its memory is bad");
    assert_eq!(error.reason(), Some("DEVICE_LOST"), "{error}");
}

#[tokio::test]
async fn a_gpu_that_the_driver_tells_of_no_more_is_not_served_by_a_resume() {
    let machine = two_switched();
    let mut daemon = machine.daemon("[topology]\nrescan_interval_s = 0\n");
    let client = daemon.connect().await;
    let session = client.open_session("gone").await.expect("a session");
    client.drain("GPU1", false).await.expect("root drains");
    let gpus = machine.driver.library_path().join("gpus");
    let told = std::fs::read_to_string(&gpus).expect("it is described");
    let (first, _) = told.split_once('\n').expect("a line for each");
    std::fs::write(&gpus, first).expect("the folder is writable");
    client.drain("GPU1", true).await.expect("root resumes");
    let error = session.acquire(AcquireOptions::on_gpu("GPU1", 2 << 20)).await.expect_err("it is not there");
    assert!(error.to_string().contains("tells of it no more"), "{error}");
    client.drain("GPU1", false).await.expect("root drains");
    std::fs::write(&gpus, told).expect("the folder is writable");
    client.drain("GPU1", true).await.expect("root resumes");
    session.acquire(AcquireOptions::on_gpu("GPU1", 2 << 20)).await.expect("it is back");
}

#[test]
fn a_driver_without_a_function_is_told_by_its_name_in_daemon_and_client() {
    let machine = two_switched().without("cuMemGetHandleForAddressRange");
    let folder = tempfile::tempdir().expect("a folder");
    // Simulated HCAs were asked for over GPU memory, so it ends.
    let output = machine.daemon_in(folder.path(), "").output().expect("it runs");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && told.contains("cuMemGetHandleForAddressRange: libcuda has no such"), "{told}");
    assert!(told.contains("upgrade the nvidia driver"), "{told}");
    let gpu = FakeGpu::switched(6).uuid;
    let machine = two_switched().without("cuMemSetAccess");
    let error = machine.peer("maker", Path::new("-"), &gpu, "make\n").expect_err("a function is missing");
    assert!(error.contains("cuMemSetAccess is not in") && error.contains("CUDA 11.7"), "{error}");
    // What is missing and not needed by all is told by who needs it.
    let error = two_switched().peer("memops", Path::new("-"), &gpu, "").expect_err("it is of CUDA 12.1");
    assert!(error.contains("cuCtxSetFlags"), "{error}");
}

#[test]
fn memory_is_exported_by_pcie_too_where_the_gpu_is_coherent_and_not_asked_for_so_elsewhere() {
    let exported = |gpu: FakeGpu| {
        let uuid = gpu.uuid.clone();
        Machine::new(&[gpu]).peer("exporter", Path::new("-"), &uuid, "").expect("it exports")
    };
    assert_eq!(exported(FakeGpu::switched(6)), "one way\n");
    assert_eq!(exported(FakeGpu::switched(6).word("coherent=1")), "two ways\n");
}

#[tokio::test]
async fn a_gpu_that_does_not_reach_another_is_told_so_and_what_to_do() {
    let machine = Machine::new(&[FakeGpu::switched(6).word("peers=0"), FakeGpu::switched(7)]);
    let mut daemon = machine.daemon("");
    let session = daemon.connect().await.open_session("no way").await.expect("a session");
    let buffer = session.acquire(AcquireOptions::on_gpu("GPU0", 2 << 20)).await.expect("memory");
    let lease = format!("{}\n", buffer.lease_id());
    let error = machine.peer("mapper", &daemon.run_dir(), &FakeGpu::switched(7).uuid, &lease).expect_err("no peers");
    let told = format!("gpu {} does not reach the memory of gpu {}", FakeGpu::switched(7).uuid, buffer.gpu_uuid());
    assert!(error.contains(&told) && error.contains("copy through host memory"), "{error}");
}

#[test]
fn a_capture_with_what_the_driver_tells_is_the_same_host_again() {
    let machine = two_switched();
    let output = machine.command(binary("gdrd")).args(["worker", "facts"]).output().expect("it runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let facts = driver_file::from_text(&String::from_utf8_lossy(&output.stdout)).expect("facts");
    let taken = capture(&machine.root, Some(&facts)).expect("the tree can be captured");
    let archive = pack(&taken, Packed::Zstd).expect("it can be packed");
    let again = read_stream(&archive[..], Path::new("fake.tar.zst"), &ReadOptions::default()).expect("it reads back");
    assert_eq!(again.host.nvlink_kind(), Some(NvLinkKind::Switched));
    assert_eq!(again.host.gpu_level(GpuId(0), GpuId(1)).map(|level| level.to_string()).as_deref(), Some("NV18"));
    assert_eq!(again.host.nvlink_gbps(GpuId(0), GpuId(1)), Some(3600.0));
}

#[tokio::test]
async fn gpus_that_cannot_be_served_are_told_and_skipped() {
    let machine = Machine::new(&[FakeGpu::switched(6).word("mode=3"), FakeGpu::switched(7)]);
    let mut daemon = machine.daemon("");
    let client = daemon.connect().await;
    let status = client.status().await.expect("a status");
    let cuda = status.backends.iter().find(|backend| backend.name == "cuda").expect("a backend");
    assert!(cuda.present && cuda.reason.contains("1 of 2"), "{cuda:?}");
    let session = client.open_session("modes").await.expect("a session");
    let refused = session.acquire(AcquireOptions::on_gpu("GPU0", 2 << 20)).await.expect_err("it is exclusive");
    assert!(refused.to_string().contains("exclusive"), "{refused}");
    session.acquire(AcquireOptions::on_gpu("GPU1", 2 << 20)).await.expect("the other gpu serves");
}
