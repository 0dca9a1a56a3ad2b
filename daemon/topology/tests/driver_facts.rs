//! What a GPU driver tells, laid over the tree of the same host.

use gdrd_topology::assemble::ReadOptions;
use gdrd_topology::link::{Link, LinkRate, LinkSpeed, LinkWidth};
use gdrd_topology::model::{
    DriverFacts, Fabric, FabricState, GpuDetail, GpuFacts, GpuId, Host, Mig, MigSlice, NvLinkBundle, NvLinkEnd,
    NvLinkKind, NvLinkRemote,
};
use gdrd_topology::source::SourceKind;
use gdrd_topology::sysfs::build::build;
use gdrd_topology::{profile, read_root};

/// The built-in DGX A100.
fn machine() -> Host {
    profile::builtin("dgx-a100").expect("it is built in").host
}

/// What a driver that agrees with the profile tells.
fn told(host: &Host) -> DriverFacts {
    let gpus = (0..host.gpus.len()).filter_map(|place| host.gpu_facts(GpuId(place))).collect();
    DriverFacts { source: SourceKind::Nvml, gpus, warnings: Vec::new() }
}

/// The tree of the machine, with `driver` laid over it.
fn read(host: &Host, driver: Option<DriverFacts>) -> Host {
    let folder = tempfile::tempdir().expect("a folder");
    build(host, folder.path()).expect("a tree");
    read_root(folder.path(), &ReadOptions { driver, ..ReadOptions::default() }).expect("it is a tree").host
}

fn merged(change: impl FnOnce(&mut DriverFacts)) -> Host {
    let host = machine();
    let mut driver = told(&host);
    change(&mut driver);
    read(&host, Some(driver))
}

fn warned(host: &Host, words: &[&str]) -> bool {
    host.warnings.iter().any(|warning| words.iter().all(|word| warning.contains(word)))
}

fn rate(generation: u32, lanes: u8) -> Option<LinkRate> {
    Some(LinkRate { speed: LinkSpeed::from_generation(generation)?, width: LinkWidth::from_lanes(lanes)? })
}

#[test]
fn sysfs_alone_knows_no_nvlinks_and_the_driver_adds_what_only_it_knows() {
    let machine = machine();
    let alone = read(&machine, None);
    assert_eq!((alone.nvlink_kind(), alone.gpus[0].memory_bytes.as_ref()), (None, None));
    assert_eq!(alone.gpus[0].uuid(), machine.gpus[0].uuid(), "as the driver's files in /proc have it");
    let both = read(&machine, Some(told(&machine)));
    assert_eq!(both.nvlink_kind(), Some(NvLinkKind::Switched));
    assert_eq!(both.nvlinks_between(GpuId(0), GpuId(7)), 12);
    assert_eq!(both.gpus[3].uuid(), machine.gpus[3].uuid());
    let memory = both.gpus[3].memory_bytes.as_ref().expect("it is told");
    assert_eq!((memory.value, memory.source), (40 << 30, SourceKind::Nvml));
    assert_eq!(both.warnings, alone.warnings, "they agree");
    assert_eq!(both.functions, alone.functions, "and the tree is that of sysfs");
}

#[test]
fn addresses_join_whatever_their_padding() {
    let padded: gdrd_topology::bdf::Bdf = "00000000:07:00.0".parse().expect("as nvml writes it");
    assert_eq!(merged(|_| {}).gpus[0].bdf, Some(padded));
}

#[test]
fn a_narrower_link_for_the_driver_is_warned_of_and_sysfs_counts() {
    let host = merged(|driver| driver.gpus[0].detail.link = Link { current: rate(4, 8), max: rate(4, 16) });
    assert!(warned(&host, &["0000:07:00.0", "x8 for nvml", "x16 in sysfs"]), "{:?}", host.warnings);
    let link = host.function("0000:07:00.0".parse().expect("an address")).expect("it is listed").link;
    assert_eq!(link.current, rate(4, 16));
}

#[test]
fn a_faster_link_than_sysfs_allows_is_warned_of_and_a_slower_one_is_only_idle() {
    let faster = merged(|driver| driver.gpus[0].detail.link.current = rate(5, 16));
    assert!(warned(&faster, &["0000:07:00.0", "32 GT/s for nvml", "at most 16 GT/s"]), "{:?}", faster.warnings);
    let idle = merged(|driver| driver.gpus[0].detail.link.current = rate(1, 16));
    assert_eq!(idle.warnings, merged(|_| {}).warnings);
}

#[test]
fn the_driver_fills_links_that_sysfs_lacks() {
    let mut bare = machine();
    bare.functions.iter_mut().for_each(|function| function.link = Link::default());
    let host = read(&bare, Some(told(&machine())));
    let link = |bdf: &str| host.function(bdf.parse().expect("an address")).expect("it is listed").link;
    assert_eq!(link("0000:07:00.0"), Link { current: rate(4, 16), max: rate(4, 16) });
    assert_eq!(link("0000:05:00.0"), Link::default(), "it tells of gpus alone");
}

#[test]
fn gpus_that_only_one_side_knows_are_warned_of() {
    let host = merged(|driver| {
        driver.gpus[0].bdf.bus = 0xee;
    });
    assert!(warned(&host, &["0000:ee:00.0", "a gpu for nvml, but sysfs does not list it"]), "{:?}", host.warnings);
    let mut driven = machine();
    driven.functions.iter_mut().for_each(|function| function.driver = Some("nvidia".to_owned()));
    let mut driver = told(&driven);
    driver.gpus.remove(2);
    let host = read(&driven, Some(driver));
    assert!(warned(&host, &["0000:47:00.0", "nvml does not list it"]), "{:?}", host.warnings);
}

#[test]
fn a_function_that_its_driver_calls_a_gpu_is_one_whatever_its_class_and_place() {
    let flat = "gdrd-host-profile 1\nroot pci0000:00\npci 0000:00:05.0 10de:2335 030000 pci0000:00 -\n";
    let host = profile::snapshot(flat, None, &ReadOptions::default()).expect("a profile").host;
    assert_eq!(host.gpus, []);
    let bdf = host.functions[0].bdf;
    let gpus = vec![GpuFacts { bdf, uuid: Some("GPU-1".into()), device_node: None, detail: GpuDetail::default() }];
    let driver = Some(DriverFacts { source: SourceKind::Nvml, gpus, warnings: vec!["gpu 1: lost".into()] });
    let options = ReadOptions { driver, ..ReadOptions::default() };
    let host = profile::snapshot(flat, None, &options).expect("a profile").host;
    assert_eq!(host.gpus.len(), 1);
    assert_eq!(host.gpus[0].uuid(), Some("GPU-1"));
    assert!(warned(&host, &["nvml: gpu 1: lost"]), "{:?}", host.warnings);
}

/// Two GPUs that count the links between them.
fn pair(there: u8, back: u8) -> Host {
    merged(|driver| {
        let (a, b) = (driver.gpus[0].bdf, driver.gpus[1].bdf);
        let bundle = |bdf, links| vec![NvLinkBundle { remote: NvLinkRemote::Gpu(bdf), links, link_gbps: Some(200.0) }];
        driver.gpus.iter_mut().for_each(|gpu| gpu.detail.nvlinks = Some(Vec::new()));
        driver.gpus[0].detail.nvlinks = Some(bundle(b, there));
        driver.gpus[1].detail.nvlinks = Some(bundle(a, back));
    })
}

#[test]
fn links_told_by_both_ends_are_one_bundle() {
    let host = pair(4, 4);
    assert_eq!(host.nvlinks.len(), 1);
    assert_eq!((host.nvlinks[0].end, host.nvlinks[0].links), (NvLinkEnd::Gpu(GpuId(1)), 4));
    assert_eq!(host.nvlink_gbps(GpuId(1), GpuId(0)), Some(800.0));
    assert_eq!(host.nvlink_kind(), Some(NvLinkKind::Linear));
}

#[test]
fn the_fewer_counts_where_the_ends_differ() {
    let host = pair(4, 3);
    assert_eq!(host.nvlinks_between(GpuId(0), GpuId(1)), 3);
    assert!(warned(&host, &["GPU0 to GPU1", "[4, 3]"]), "{:?}", host.warnings);
}

#[test]
fn links_that_the_input_has_otherwise_give_way_with_a_warning() {
    let machine = machine();
    let mut driver = told(&machine);
    for bundle in driver.gpus[5].detail.nvlinks.iter_mut().flatten() {
        bundle.links = 11;
        bundle.link_gbps = None;
    }
    let text = profile::render(&machine);
    let options = ReadOptions { driver: Some(driver), ..ReadOptions::default() };
    let host = profile::snapshot(&text, None, &options).expect("it was written just now").host;
    assert!(warned(&host, &["GPU5 to the switches", "12 nvlinks in the input, 11 for nvml"]), "{:?}", host.warnings);
    assert_eq!(host.nvlinks_between(GpuId(5), GpuId(0)), 11);
    assert_eq!(host.nvlinks_between(GpuId(4), GpuId(0)), 12);
}

#[test]
fn links_to_the_cpu_join_no_gpus() {
    let host = merged(|driver| {
        for gpu in &mut driver.gpus {
            let bundle = NvLinkBundle { remote: NvLinkRemote::Cpu, links: 3, link_gbps: Some(200.0) };
            gpu.detail.nvlinks = Some(vec![bundle]);
        }
    });
    assert_eq!(host.nvlinks.len(), 8);
    assert_eq!(host.nvlinks_between(GpuId(0), GpuId(1)), 0);
    assert_eq!(host.nvlink_gbps(GpuId(0), GpuId(1)), None);
    assert_eq!(host.nvlink_kind(), Some(NvLinkKind::None));
}

fn fabric(state: FabricState, clique_id: u32) -> Fabric {
    Fabric { state, cluster_uuid: Some("c".to_owned()), clique_id: Some(clique_id), problems: Vec::new() }
}

#[test]
fn links_to_switches_carry_nothing_before_the_fabric_is_ready() {
    let host = merged(|driver| {
        driver.gpus.iter_mut().for_each(|gpu| gpu.detail.fabric = Some(fabric(FabricState::Completed, 1)));
        driver.gpus[1].detail.fabric = Some(fabric(FabricState::NotStarted, 1));
        driver.gpus[2].detail.fabric = Some(fabric(FabricState::Completed, 2));
        driver.gpus[3].detail.fabric.as_mut().expect("set above").problems.push("degraded bandwidth".to_owned());
    });
    assert_eq!(host.nvlinks_between(GpuId(0), GpuId(3)), 12);
    assert_eq!(host.nvlinks_between(GpuId(0), GpuId(1)), 0, "not registered");
    assert_eq!(host.nvlinks_between(GpuId(0), GpuId(2)), 0, "another clique");
    assert!(warned(&host, &["not-started for GPU1", "fabricmanager"]), "{:?}", host.warnings);
    assert!(warned(&host, &["GPU3", "degraded bandwidth"]), "{:?}", host.warnings);
}

#[test]
fn all_that_a_driver_tells_survives_the_profile_that_travels_to_clients() {
    let host = merged(|driver| {
        let detail = &mut driver.gpus[0].detail;
        detail.product = Some("NVIDIA A100-SXM4-40GB".to_owned());
        detail.bar1_bytes = Some(64 << 30);
        detail.fabric =
            Some(Fabric { problems: vec!["route recovery".to_owned()], ..fabric(FabricState::Completed, 7) });
        let slice = MigSlice {
            uuid: "MIG-0".to_owned(),
            gpu_instance: 1,
            compute_instance: 0,
            profile: Some("3g.20gb".to_owned()),
            memory_bytes: Some(20 << 30),
        };
        detail.mig = Some(Mig { enabled: true, slices: vec![slice] });
        let cpu = NvLinkBundle { remote: NvLinkRemote::Cpu, links: 2, link_gbps: None };
        detail.nvlinks.get_or_insert_default().push(cpu);
    });
    let again = profile::snapshot(&profile::render(&host), None, &ReadOptions::default()).expect("a profile").host;
    for place in (0..host.gpus.len()).map(GpuId) {
        assert_eq!(again.gpu_facts(place), host.gpu_facts(place));
    }
    assert_eq!(again.nvlinks.len(), host.nvlinks.len());
}
