//! The built-in profiles come to life: GPU memory, registration, and bytes moved between two GPUs.
#![forbid(unsafe_code)]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use gdrd_hal::{
    Access, CompletionQueue, GpuUuid, Hca, LocalSpan, MAX_INLINE_BYTES, MemorySource, Opcode, ProtectionDomain,
    QueuePairConfig, QueuePairParts, QueuePairType, ReceiveRequest, RemoteSpan, WorkCompletion, WorkRequest,
    WorkStatus,
};
use gdrd_sim::{GRANULARITY_BYTES, SimHost};

struct End {
    cq: Box<dyn CompletionQueue>,
    pd: Arc<dyn ProtectionDomain>,
    queue_pair: QueuePairParts,
}

fn end_on(hca: &dyn Hca) -> End {
    let cq = hca.create_cq(64).expect("depth 64 is allowed");
    let pd = hca.alloc_pd().expect("domains are free");
    let config =
        QueuePairConfig { qp_type: QueuePairType::Rc, send_depth: 16, recv_depth: 16, inline_bytes: 0, port_num: 1 };
    let queue_pair = pd.create_queue_pair(cq.id(), &config).expect("mlx5 has RC");
    queue_pair.control.to_init().expect("it is in RESET");
    End { cq, pd, queue_pair }
}

fn connect(a: &End, b: &End) {
    let endpoint = |end: &End| end.queue_pair.control.endpoint().expect("it is in INIT");
    let (at_a, at_b) = (endpoint(a), endpoint(b));
    a.queue_pair.control.connect(&at_b).expect("a is in INIT");
    b.queue_pair.control.connect(&at_a).expect("b is in INIT");
}

fn one_completion(end: &mut End) -> WorkCompletion {
    let mut out = [WorkCompletion::EMPTY; 2];
    assert_eq!(end.cq.poll(&mut out).expect("the queue is sound"), 1);
    out[0]
}

#[test]
fn bytes_written_on_one_gpu_arrive_in_the_memory_of_another() {
    let host = gdrd_topology::profile::builtin("dgx-a100").unwrap().host;
    let sim = SimHost::from_host(&host).unwrap();
    let facts = sim.gpu_facts().gpus().unwrap();
    assert_eq!(facts.len(), 8);
    let memory = sim.gpu_memory();
    let allocate = |uuid: &GpuUuid| memory.allocate(uuid, GRANULARITY_BYTES).unwrap();
    let (from, to) = (allocate(&facts[0].uuid), allocate(&facts[1].uuid));
    let hcas = sim.hcas();
    let (mut a, mut b) = (end_on(&*hcas[0]), end_on(&*hcas[1]));
    connect(&a, &b);
    let register = |end: &End, allocation: &dyn gdrd_hal::GpuAllocation| {
        let fd = allocation.dma_buf_fd().unwrap();
        let source = MemorySource::DmaBuf { fd, offset: 0, len_bytes: GRANULARITY_BYTES };
        end.pd.register(source, Access::DATA, 0).unwrap()
    };
    let (source, target) = (register(&a, &*from), register(&b, &*to));

    let sent: Vec<u8> = (0..=255).collect();
    let file =
        |allocation: &dyn gdrd_hal::GpuAllocation| File::from(allocation.memory_fd().try_clone_to_owned().unwrap());
    file(&*from).write_all_at(&sent, 0).unwrap();
    let request = WorkRequest {
        wr_id: 7,
        opcode: Opcode::Write,
        signaled: true,
        fence: false,
        local: LocalSpan { lkey: source.lkey(), addr: source.iova(), len_bytes: 256 },
        remote: RemoteSpan { rkey: target.rkey(), addr: target.iova() + 4096 },
        imm: 0,
        operand: 0,
        compare: 0,
        inline_len: 0,
        inline: [0; MAX_INLINE_BYTES],
    };
    a.queue_pair.work.post_send(&[request]).unwrap();
    let done = one_completion(&mut a);
    assert_eq!((done.wr_id, done.status), (7, WorkStatus::Success));
    let mut received = vec![0; 256];
    file(&*to).read_exact_at(&mut received, 4096).unwrap();
    assert_eq!(received, sent);

    let landing = LocalSpan { lkey: target.lkey(), addr: target.iova(), len_bytes: 256 };
    b.queue_pair.work.post_recv(&[ReceiveRequest { wr_id: 8, local: landing }]).unwrap();
    a.queue_pair.work.post_send(&[WorkRequest { opcode: Opcode::Send, ..request }]).unwrap();
    let received = one_completion(&mut b);
    assert_eq!((received.wr_id, received.status, received.byte_len), (8, WorkStatus::Success, 256));
    to.scrub().unwrap();
    let mut content = vec![1; 8192];
    file(&*to).read_exact_at(&mut content, 0).unwrap();
    assert!(content.iter().all(|byte| *byte == 0));
}
