//! Where real providers differ, the simulation takes the side that forgives least; and it leaves nothing behind.
#![forbid(unsafe_code)]

mod support;

use gdrd_hal::{Access, MemorySource, Opcode, PostError, WorkStatus};
use gdrd_sim::GRANULARITY_BYTES;
use support::{MEMORY_BYTES, connect, ends, pair, patient_host, register, request, spec};

#[test]
fn an_lkey_is_no_rkey_and_an_rkey_no_lkey() {
    let host = patient_host();
    let (mut a, b) = pair(&host);
    let mut write = a.write(1, &b, 0, 8);
    write.remote.rkey = b.region.lkey();
    a.send(write);
    assert_eq!(a.next(), (1, WorkStatus::RemoteAccess));
    let (mut a, b) = pair(&host);
    let mut write = a.write(2, &b, 0, 8);
    write.local.lkey = a.region.rkey();
    a.send(write);
    assert_eq!(a.next(), (2, WorkStatus::LocalProtection));
}

#[test]
fn a_peer_that_knows_another_sequence_number_gets_no_answer() {
    for wrong_side in 0..2 {
        let timing = gdrd_sim::Timing { retry_exceeded: std::time::Duration::from_millis(1), receiver_not_ready: None };
        let host = support::host_with(timing);
        let (mut a, b) = ends(&host);
        let (mut at_a, mut at_b) = (a.control.endpoint().unwrap(), b.control.endpoint().unwrap());
        [&mut at_a, &mut at_b][wrong_side].psn ^= 1;
        a.control.connect(&at_b).unwrap();
        b.control.connect(&at_a).unwrap();
        let write = a.write(1, &b, 0, 8);
        a.send(write);
        assert_eq!(a.next(), (1, WorkStatus::RetryExceeded));
    }
}

#[test]
fn an_endpoint_with_numbers_of_more_than_24_bits_is_refused() {
    let host = patient_host();
    let (a, b) = ends(&host);
    let at_b = b.control.endpoint().unwrap();
    for bad in
        [gdrd_hal::Endpoint { qp_num: 1 << 24, ..at_b.clone() }, gdrd_hal::Endpoint { psn: u32::MAX, ..at_b.clone() }]
    {
        assert!(matches!(a.control.connect(&bad), Err(gdrd_hal::HcaError::Invalid { .. })));
    }
    connect(&a, &b);
}

#[test]
fn completions_of_a_destroyed_queue_pair_are_gone_and_its_place_is_clean() {
    let host = patient_host();
    let hca = &host.hcas()[0];
    let b = support::End::new(&host.hcas()[1]);
    b.control.to_init().unwrap();
    let mut a = support::End::new(hca);
    a.control.to_init().unwrap();
    connect(&a, &b);
    connect(&b, &a);
    for wr_id in 0..40 {
        let write = a.write(wr_id, &b, 0, 8);
        a.send(write);
    }
    let config = gdrd_hal::QueuePairConfig {
        qp_type: gdrd_hal::QueuePairType::Rc,
        send_depth: 8,
        recv_depth: 8,
        inline_bytes: 0,
        port_num: 1,
    };
    let new = a.pd.create_queue_pair(a.cq.id(), &config).unwrap();
    let old = (std::mem::replace(&mut a.control, new.control), std::mem::replace(&mut a.work, new.work));
    drop(old);
    assert_eq!(a.completed(), [], "nobody polls a completion of a queue pair that is no more");
    // A third one takes the place of the first, with all its slots.
    let third = a.pd.create_queue_pair(a.cq.id(), &config).unwrap();
    let peer = support::End::new(&host.hcas()[1]);
    third.control.to_init().unwrap();
    peer.control.to_init().unwrap();
    third.control.connect(&peer.control.endpoint().unwrap()).unwrap();
    peer.control.connect(&third.control.endpoint().unwrap()).unwrap();
    let mut work = third.work;
    for round in 0..3 {
        let batch: Vec<_> = (0..8).map(|wr_id| a.write(wr_id, &peer, 0, 8)).collect();
        work.post_send(&batch).unwrap();
        assert_eq!(work.post_send(&batch[..1]), Err((0, PostError::Full)), "round {round}");
        assert_eq!(a.completed().len(), 8);
    }
}

fn mappings_of_gpu_memory() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("there is a /proc");
    maps.lines().filter(|line| line.contains("gdrd-sim-gpu:STRICT")).count()
}

fn descriptors_of_gpu_memory() -> usize {
    let fds = std::fs::read_dir("/proc/self/fd").expect("there is a /proc");
    let links = fds.filter_map(|fd| std::fs::read_link(fd.ok()?.path()).ok());
    links.filter(|link| link.to_string_lossy().contains("gdrd-sim-gpu:STRICT")).count()
}

#[test]
fn nothing_is_left_of_a_region_or_an_allocation_whatever_queue_pairs_remember() {
    let mut spec = spec();
    // A name of its own, to be told apart from the memory of tests that run beside this one.
    spec.gpus[0].name = "STRICT0".to_owned();
    let host = gdrd_sim::SimHost::new(spec.clone()).unwrap();
    let memory = host.gpu_memory();
    let uuid = &spec.gpus[0].uuid;
    let before = memory.usage(uuid).unwrap();
    let (mut a, b) = pair(&host);
    for round in 0..10 {
        let allocation = memory.allocate(uuid, GRANULARITY_BYTES).unwrap();
        let fd = allocation.dma_buf_fd().unwrap();
        let source = MemorySource::DmaBuf { fd, offset: 0, len_bytes: GRANULARITY_BYTES };
        let region = b.pd.register(source, Access::DATA, 0).unwrap();
        let remote = gdrd_hal::RemoteSpan { rkey: region.rkey(), addr: region.iova() };
        a.send(request(round, Opcode::Write, a.span(0, 64), remote));
        assert_eq!(a.next(), (round, WorkStatus::Success));
        assert_eq!(mappings_of_gpu_memory(), 1);
        drop(region);
        assert_eq!(mappings_of_gpu_memory(), 0);
        drop(allocation);
        assert_eq!(descriptors_of_gpu_memory(), 0);
        assert_eq!(memory.usage(uuid).unwrap(), before);
    }
}

#[test]
fn gpu_memory_and_host_memory_are_told_apart() {
    let host = patient_host();
    let pd = host.hcas()[0].alloc_pd().unwrap();
    let allocation = host.gpu_memory().allocate(&spec().gpus[0].uuid, GRANULARITY_BYTES).unwrap();
    let fd = allocation.memory_fd();
    let as_host = MemorySource::Host { fd, offset: 0, len_bytes: GRANULARITY_BYTES };
    assert!(matches!(pd.register(as_host, Access::DATA, 0), Err(gdrd_hal::HcaError::Invalid { .. })));
}

#[test]
fn a_client_that_holds_gpu_memory_cannot_keep_it_from_being_scrubbed() {
    use rustix::fs::OFlags;
    let host = patient_host();
    let allocation = host.gpu_memory().allocate(&spec().gpus[0].uuid, GRANULARITY_BYTES).unwrap();
    let held = support::file(&allocation.memory_fd());
    std::os::unix::fs::FileExt::write_all_at(&held, &[0xff; 4096], 4096).unwrap();
    // With O_APPEND, pwrite(2) ignores its offset; the flag belongs to the open file, which a client shares.
    rustix::fs::fcntl_setfl(&held, OFlags::APPEND).unwrap();
    assert!(rustix::fs::ftruncate(&held, 0).is_err(), "sealed");
    allocation.scrub().unwrap();
    let mut content = [1; 8192];
    std::os::unix::fs::FileExt::read_exact_at(&held, &mut content, 0).unwrap();
    assert_eq!(content, [0; 8192]);
}

#[test]
fn memory_without_write_seal_is_needed_only_for_local_write() {
    use gdrd_shm::{Seals, SegmentOptions};
    let host = patient_host();
    let pd = host.hcas()[0].alloc_pd().unwrap();
    let options = SegmentOptions::new(MEMORY_BYTES).seals(Seals::FUTURE_WRITE | Seals::GROW);
    let segment = options.create("read-only for others").unwrap();
    let fd = segment.try_clone_fd().unwrap();
    let readable = Access { remote_read: true, ..Access::default() };
    assert!(pd.register(support::source(&fd), readable, 0).is_ok());
    assert!(matches!(pd.register(support::source(&fd), Access::DATA, 0), Err(gdrd_hal::HcaError::Invalid { .. })));
    drop(register(&*pd, &support::memory()));
}

#[test]
fn an_address_that_two_hcas_have_leads_to_the_one_with_the_queue_pair() {
    let mut spec = spec();
    spec.hcas[0].ports[0].gids = spec.hcas[1].ports[0].gids.clone();
    let host = gdrd_sim::SimHost::new(spec).unwrap();
    let (mut a, mut b) = pair(&host);
    let write = a.write(1, &b, 0, 8);
    a.send(write);
    assert_eq!(a.next(), (1, WorkStatus::Success));
    let write = b.write(2, &a, 0, 8);
    b.send(write);
    assert_eq!(b.next(), (2, WorkStatus::Success));
}

#[test]
fn a_wait_longer_than_time_itself_is_a_wait_without_end() {
    let endless = std::time::Duration::MAX;
    let host = support::host_with(gdrd_sim::Timing { retry_exceeded: endless, receiver_not_ready: Some(endless) });
    let (mut a, mut b) = pair(&host);
    a.send(a.message(1));
    assert_eq!(a.completed(), []);
    b.receive(2);
    assert_eq!(a.completed(), [(1, WorkStatus::Success)]);
}
