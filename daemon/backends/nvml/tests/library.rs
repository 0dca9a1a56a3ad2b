//! The questions and the watch, asked of a library that stands in for NVML.

use std::sync::mpsc::channel;

use gdrd_fake_driver::{FakeDriver, FakeGpu};
use gdrd_nvml::{FarEnd, GpuReport, HealthEvent, Links, NvmlError, Report, read_from, watch};
use tempfile::TempDir;

fn driver(gpus: &[FakeGpu]) -> (TempDir, FakeDriver) {
    let folder = tempfile::tempdir().expect("a folder");
    let driver = FakeDriver::install(folder.path(), gpus).expect("it is laid in");
    (folder, driver)
}

fn report(gpus: &[FakeGpu]) -> Report {
    let (_folder, driver) = driver(gpus);
    read_from(Some(driver.nvml().as_os_str())).expect("the library starts")
}

fn bare(number: u8) -> FakeGpu {
    FakeGpu { words: Vec::new(), ..FakeGpu::switched(number) }
}

fn links(gpu: &GpuReport) -> &[Links] {
    &gpu.nvlinks
}

#[test]
fn links_to_switches_are_one_bundle_with_the_published_rate() {
    let report = report(&[FakeGpu::switched(6), FakeGpu::switched(7)]);
    assert_eq!(report.gpus.len(), 2, "{report:?}");
    for gpu in &report.gpus {
        assert_eq!(links(gpu), [Links { far: FarEnd::Switch, links: 18, link_gbps: Some(200) }]);
        assert!(gpu.skip_reason().is_none());
    }
    assert_eq!(report.gpus[0].bdf, "00000000:06:00.0");
    assert_eq!(report.warnings, Vec::<String>::new());
}

#[test]
fn links_between_gpus_name_their_far_ends() {
    let report = report(&[
        bare(6).word("links=00000000:07:00.0/4").word("links=00000000:08:00.0/2"),
        bare(7).word("links=00000000:06:00.0/4"),
        bare(8).word("links=00000000:06:00.0/2"),
    ]);
    let far = |bdf: &str, links| Links { far: FarEnd::Gpu { bdf: bdf.to_owned() }, links, link_gbps: Some(200) };
    assert_eq!(links(&report.gpus[0]), [far("00000000:07:00.0", 4), far("00000000:08:00.0", 2)]);
    assert_eq!(links(&report.gpus[2]), [far("00000000:06:00.0", 2)]);
}

#[test]
fn gpus_without_links_fabric_or_mig_are_told_without() {
    let report = report(&[bare(6).word("has_mig=0")]);
    let gpu = &report.gpus[0];
    assert!(links(gpu).is_empty() && gpu.mig.is_none(), "{gpu:?}");
    let fact = gpu.fact(None).expect("its address parses");
    assert_eq!((fact.detail.fabric, fact.detail.mig), (None, None));
}

#[test]
fn modes_and_losses_are_reasons_and_take_no_other_gpu_with_them() {
    let report = report(&[
        bare(6).word("mode=3"),
        bare(7).word("mode=2"),
        bare(8).word("mig=1"),
        bare(9).word("lost=1"),
        bare(10),
    ]);
    let reasons: Vec<Option<String>> = report.gpus.iter().map(GpuReport::skip_reason).collect();
    let told = |place: usize, word: &str| reasons[place].as_deref().is_some_and(|reason| reason.contains(word));
    assert!(told(0, "exclusive") && told(1, "prohibited") && told(2, "mig") && told(3, "driver says"), "{reasons:?}");
    assert_eq!(reasons[4], None);
}

#[test]
fn a_library_that_is_not_there_is_an_error_with_what_to_do() {
    let error = read_from(Some("/nowhere/libnvidia-ml.so.1".as_ref())).expect_err("there is none");
    assert!(matches!(error, NvmlError::Start(_)) && error.to_string().contains("install"), "{error}");
}

#[test]
fn xid_and_ecc_events_are_told_until_the_listener_has_enough() {
    let (_folder, driver) = driver(&[FakeGpu::switched(6), FakeGpu::switched(7)]);
    let (sender, events) = channel();
    let uuid = FakeGpu::switched(7).uuid;
    let library = driver.nvml();
    let watching = std::thread::spawn(move || {
        watch(Some(library.as_os_str()), &uuid, |event| {
            sender.send(event.clone()).is_ok() && *event != HealthEvent::UncorrectedEcc
        })
    });
    // One of the other GPU is none of this watch's.
    driver.raise_xid(0, 13).expect("the folder is writable");
    driver.raise_xid(1, 79).expect("the folder is writable");
    assert_eq!(events.recv().expect("it is told"), HealthEvent::Xid(Some(79)));
    driver.raise_ecc(1).expect("the folder is writable");
    assert_eq!(events.recv().expect("it is told"), HealthEvent::UncorrectedEcc);
    watching.join().expect("no panic").expect("it ends as asked");
}

#[test]
fn a_gpu_that_is_not_there_cannot_be_watched() {
    let (_folder, driver) = driver(&[FakeGpu::switched(6)]);
    let error = watch(Some(driver.nvml().as_os_str()), "GPU-none", |_| true).expect_err("there is none");
    assert!(matches!(error, NvmlError::Watch(_)), "{error}");
}
