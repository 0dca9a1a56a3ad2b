//! A simulated host with a broker, and clients that speak to it by real rings.

use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Weak};
use std::time::Duration;

use gdrd_hal::{
    Access, Gid, GidEntry, GidType, Hca, LinkLayer, MemoryRegion, MemorySource, PortState, ProtectionDomain,
    QueuePair as HalQueuePair, QueuePairConfig, QueuePairType,
};
use gdrd_ring::{
    BrokerRing, ClientRing, Completion, Geometry, LocalSpan, Operation, RemoteSpan, Source, Status, Submission,
    SubmissionFlags, Wake,
};
use gdrd_shm::Segment;
use gdrd_sim::{Provider, SimHca, SimHost, SimOptions, SimPort, SimSpec, Timing};
use rustix::event::{EventfdFlags, eventfd};

use crate::broker::{
    Broker, BrokerEvent, Config, FlushLanding, HcaIndex, QueuePairLimits, QueuePairSetup, Share, SlotEntry, SlotTable,
};
use crate::{QueuePairId, SlotId, Traffic};

/// Against a test that hangs; far above what any wait here takes.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);
/// Depth of each queue.
pub(super) const DEPTH: u32 = 16;
const SLOTS: u32 = 64;

pub(super) struct World {
    pub(super) host: SimHost,
    pub(super) hcas: Vec<Arc<dyn Hca>>,
    pub(super) broker: Broker,
    pub(super) events: Receiver<BrokerEvent>,
}

fn hca(provider: Provider, index: u8) -> SimHca {
    let mut gid = [0; 16];
    gid[15] = index + 1;
    let entry = GidEntry { gid_index: 3, gid: Gid(gid), gid_type: GidType::RoceV2 };
    SimHca {
        name: format!("mlx5_{index}"),
        capabilities: provider.capabilities(),
        ports: vec![SimPort {
            state: PortState::Active,
            link_layer: LinkLayer::Ethernet,
            rate_gbps: 100.0,
            lid: 0,
            mtu_bytes: 4096,
            gids: vec![entry],
        }],
    }
}

impl World {
    pub(super) fn new() -> Self {
        Self::with(Config { spin: Duration::from_micros(5), ..Config::default() })
    }

    pub(super) fn with(config: Config) -> Self {
        Self::of(Provider::Mlx5, config)
    }

    pub(super) fn of(provider: Provider, config: Config) -> Self {
        let spec = SimSpec { gpus: Vec::new(), hcas: vec![hca(provider, 0), hca(provider, 1)] };
        let timing = Timing { retry_exceeded: Duration::from_millis(5), receiver_not_ready: None };
        let options = SimOptions { timing, ..SimOptions::default() };
        let host = SimHost::with_options(spec, options).expect("the host is sound");
        let (tell, events) = channel();
        let broker = Broker::start(config, move |event| drop(tell.send(event))).expect("threads start");
        Self { hcas: host.hcas(), host, broker, events }
    }

    pub(super) fn tenant(&self, hca: u16) -> Tenant {
        let pd = self.hcas[usize::from(hca)].alloc_pd().expect("a domain");
        let landing = Arc::new(FlushLanding::register(&*pd).expect("a page"));
        let (slots, share) = (Arc::new(SlotTable::new(SLOTS)), Arc::new(Share::new(Traffic::default())));
        Tenant { pd, landing, slots, share, hca: HcaIndex(hca) }
    }

    pub(super) fn client(&self, tenant: &Tenant, id: u64) -> Client {
        self.client_with(tenant, id, DEPTH)
    }

    pub(super) fn client_with(&self, tenant: &Tenant, id: u64, depth: u32) -> Client {
        let device = &self.hcas[usize::from(tenant.hca.0)];
        let geometry = Geometry::new(depth, depth).expect("small");
        let reservation = self.broker.reserve(tenant.hca, &**device, geometry, None).expect("room");
        let config = QueuePairConfig {
            qp_type: QueuePairType::Rc,
            send_depth: depth,
            recv_depth: depth,
            inline_bytes: 56,
            port_num: 1,
        };
        let parts = tenant.pd.create_queue_pair(reservation.cq(), &config).expect("a queue pair");
        parts.control.to_init().expect("fresh");
        let control = Arc::downgrade(&parts.control);
        let ring = BrokerRing::create(geometry).expect("memory");
        let client = ClientRing::open(ring.fd().try_clone_to_owned().expect("dup")).expect("our own ring");
        let doorbell = eventfd(0, EventfdFlags::CLOEXEC).expect("eventfd");
        let setup = QueuePairSetup {
            id: QueuePairId(id),
            ring,
            doorbell: doorbell.try_clone().expect("dup"),
            parts,
            slots: Arc::clone(&tenant.slots),
            share: Arc::clone(&tenant.share),
            limits: QueuePairLimits::new(&device.capabilities(), &config),
            landing: Some(Arc::clone(&tenant.landing)),
        };
        self.broker.attach(reservation, setup).expect("attached");
        Client { id: QueuePairId(id), ring: client, doorbell, control }
    }

    /// Two tenants with a connected queue pair each, on HCA 0 and HCA 1, ids `id` and `id + 1`.
    pub(super) fn pair(&self, id: u64) -> (Side, Side) {
        let (left, right) = (self.tenant(0), self.tenant(1));
        let (a, b) = (self.client(&left, id), self.client(&right, id + 1));
        connect(&a, &b);
        let (buffer_a, buffer_b) = (left.buffer(1, 64 << 10), right.buffer(2, 64 << 10));
        (Side { tenant: left, client: a, buffer: buffer_a }, Side { tenant: right, client: b, buffer: buffer_b })
    }

    /// Detaches and waits for the end.
    pub(super) fn detach(&self, id: QueuePairId) {
        let (tell, told) = channel();
        self.broker.detach(id, move || tell.send(()).expect("waited for"));
        told.recv_timeout(PATIENCE).expect("detaching ends");
    }
}

pub(super) fn connect(a: &Client, b: &Client) {
    let (a, b) = (a.control(), b.control());
    a.connect(&b.endpoint().expect("INIT")).expect("reachable");
    b.connect(&a.endpoint().expect("INIT")).expect("reachable");
}

pub(super) struct Side {
    pub(super) tenant: Tenant,
    pub(super) client: Client,
    pub(super) buffer: Buffer,
}

pub(super) struct Tenant {
    pub(super) pd: Arc<dyn ProtectionDomain>,
    pub(super) landing: Arc<FlushLanding>,
    pub(super) slots: Arc<SlotTable>,
    pub(super) share: Arc<Share>,
    pub(super) hca: HcaIndex,
}

impl Tenant {
    pub(super) fn buffer(&self, slot: u32, len_bytes: u64) -> Buffer {
        self.buffer_with(slot, len_bytes, Access::DATA)
    }

    pub(super) fn buffer_with(&self, slot: u32, len_bytes: u64, access: Access) -> Buffer {
        let segment = Segment::create("test-buffer", len_bytes).expect("memory");
        let source = MemorySource::Host { fd: segment.fd(), offset: 0, len_bytes };
        let region = self.pd.register(source, access, 0).expect("registered");
        let entry = SlotEntry { hca: self.hca, lkey: region.lkey(), iova: region.iova(), len_bytes, access };
        let generation = self.slots.publish(SlotId(slot), entry).expect("free slot").0;
        Buffer { segment, region, slot, generation }
    }
}

pub(super) struct Buffer {
    pub(super) segment: Segment,
    pub(super) region: Box<dyn MemoryRegion>,
    pub(super) slot: u32,
    pub(super) generation: u64,
}

impl Buffer {
    pub(super) fn local(&self, offset: u64, len_bytes: u32) -> LocalSpan {
        LocalSpan { slot: self.slot, generation: self.generation, offset, len_bytes }
    }

    pub(super) fn remote(&self, offset: u64) -> RemoteSpan {
        RemoteSpan { rkey: self.region.rkey(), iova: self.region.iova() + offset }
    }

    pub(super) fn read(&self, offset: u64, len_bytes: usize) -> Vec<u8> {
        let mut bytes = vec![0; len_bytes];
        self.segment.read_into(offset, &mut bytes).expect("in range");
        bytes
    }

    pub(super) fn write(&self, offset: u64, bytes: &[u8]) {
        self.segment.write_from(offset, bytes).expect("in range");
    }
}

pub(super) struct Client {
    pub(super) id: QueuePairId,
    pub(super) ring: ClientRing,
    pub(super) doorbell: OwnedFd,
    control: Weak<dyn HalQueuePair>,
}

impl Client {
    pub(super) fn control(&self) -> Arc<dyn HalQueuePair> {
        self.control.upgrade().expect("attached")
    }

    pub(super) fn is_destroyed(&self) -> bool {
        self.control.strong_count() == 0
    }

    pub(super) fn submit(&mut self, submission: &Submission) {
        self.ring.submit(submission).expect("room");
    }

    pub(super) fn flush(&mut self) {
        if self.ring.flush() == Wake::Needed {
            self.knock();
        }
    }

    pub(super) fn knock(&self) {
        rustix::io::write(&self.doorbell, &1_u64.to_ne_bytes()).expect("an eventfd takes 1");
    }

    pub(super) fn post(&mut self, submission: &Submission) {
        self.submit(submission);
        self.flush();
    }

    pub(super) fn next(&mut self) -> Completion {
        self.ring.wait(Some(PATIENCE)).expect("open").expect("a completion comes")
    }

    /// The next completion, which must be of `wr_id` with `status`.
    pub(super) fn expect(&mut self, wr_id: u64, status: Status) -> Completion {
        let completion = self.next();
        assert_eq!((completion.wr_id, completion.status), (wr_id, status), "{completion:?}");
        completion
    }
}

pub(super) fn request(wr_id: u64, operation: Operation) -> Submission {
    Submission { wr_id, flags: SubmissionFlags::SIGNALED, operation }
}

pub(super) fn silent(wr_id: u64, operation: Operation) -> Submission {
    Submission { flags: SubmissionFlags::empty(), ..request(wr_id, operation) }
}

pub(super) fn write(local: LocalSpan, remote: RemoteSpan) -> Operation {
    Operation::Write { source: Source::Local(local), remote, imm: None }
}

pub(super) fn recv(local: LocalSpan) -> Operation {
    Operation::Recv { local }
}
