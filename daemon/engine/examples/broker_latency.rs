//! Time of one brokered 8-byte write, from post to completion, both sides busy-polling, against a bare
//! shared-memory ping-pong between two threads measured in the same run. The HCA is simulated, so this is the
//! cost of the broker and the simulator, not of a wire.
//!
//! `cargo run --release -p gdrd-engine --example broker_latency`

use std::error::Error;
use std::hint;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gdrd_engine::broker::{Broker, Config, HcaIndex, QueuePairLimits, QueuePairSetup, Share, SlotEntry, SlotTable};
use gdrd_engine::{QueuePairId, SlotId, Traffic};
use gdrd_hal::{
    Access, Gid, GidEntry, GidType, Hca, LinkLayer, MemorySource, PortState, QueuePair, QueuePairConfig, QueuePairType,
};
use gdrd_ring::{
    BrokerRing, ClientRing, Geometry, InlineData, LocalSpan, Operation, RemoteSpan, Source, Submission, SubmissionFlags,
};
use gdrd_shm::{Segment, pingpong};
use gdrd_sim::{Provider, SimHca, SimHost, SimPort, SimSpec};
use rustix::event::{EventfdFlags, eventfd};

type Outcome<T> = Result<T, Box<dyn Error>>;

const ROUNDS: u32 = 200_000;
const WARM_UP: u32 = 20_000;
const DEPTH: u32 = 128;
const BATCH: u32 = 32;
const PATIENCE: Duration = Duration::from_secs(10);

fn main() -> Outcome<()> {
    let floor = median(floor()?);
    println!("shared-memory ping-pong        p50 {floor:>7.3?}");
    let host = SimHost::new(SimSpec { gpus: Vec::new(), hcas: vec![hca()] })?;
    let device = host.hcas().remove(0);
    // Long spin: what is measured is the busy path.
    let broker = Broker::start(Config { spin: Duration::from_secs(1), ..Config::default() }, |_| ())?;
    let slots = Arc::new(SlotTable::new(16));
    let pd = device.alloc_pd()?;
    let buffer = Segment::create("bench", 1 << 20)?;
    let source = MemorySource::Host { fd: buffer.fd(), offset: 0, len_bytes: 1 << 20 };
    let region = pd.register(source, Access::DATA, 0)?;
    let entry = SlotEntry {
        hca: HcaIndex(0),
        lkey: region.lkey(),
        iova: region.iova(),
        len_bytes: region.len_bytes(),
        access: Access::DATA,
    };
    let generation = slots.publish(SlotId(0), entry)?.0;
    let mut left = client(&broker, &*device, &*pd, &slots, 1)?;
    let right = client(&broker, &*device, &*pd, &slots, 2)?;
    left.control.connect(&right.control.endpoint()?)?;
    right.control.connect(&left.control.endpoint()?)?;
    let remote = RemoteSpan { rkey: region.rkey(), iova: region.iova() + 4096 };
    let local = Source::Local(LocalSpan { slot: 0, generation, offset: 0, len_bytes: 8 });
    let inline = Source::Inline(InlineData::new(&[7; 8])?);
    for (name, source) in [("8-byte write", local), ("8-byte inline write", inline)] {
        let write = Operation::Write { source, remote, imm: None };
        let p50 = median(latency(&mut left.ring, write)?);
        println!("{name:<30} p50 {p50:>7.3?}  {:.2} x the ping-pong", p50.as_secs_f64() / floor.as_secs_f64());
    }
    let each = throughput(&mut left.ring, Operation::Write { source: local, remote, imm: None })?;
    println!("8-byte writes, batches of {BATCH}   each {each:>7.3?}");
    broker.shutdown(true);
    Ok(())
}

fn floor() -> Outcome<Vec<Duration>> {
    let segment = Segment::create("ping-pong", pingpong::SEGMENT_LEN_BYTES)?;
    std::thread::scope(|scope| {
        let echo = scope.spawn(|| pingpong::respond(&segment, ROUNDS, PATIENCE));
        let times = pingpong::measure(&segment, ROUNDS, PATIENCE)?;
        echo.join().map_err(|_| "the echo thread panicked")??;
        Ok(times.ok_or("the echo thread was silent")?)
    })
}

struct Client {
    ring: ClientRing,
    control: Arc<dyn QueuePair>,
    _doorbell: OwnedFd,
}

fn client(
    broker: &Broker,
    device: &dyn Hca,
    pd: &dyn gdrd_hal::ProtectionDomain,
    slots: &Arc<SlotTable>,
    id: u64,
) -> Outcome<Client> {
    let geometry = Geometry::new(DEPTH, DEPTH)?;
    let reservation = broker.reserve(HcaIndex(0), device, geometry, None)?;
    let config = QueuePairConfig {
        qp_type: QueuePairType::Rc,
        send_depth: DEPTH,
        recv_depth: DEPTH,
        inline_bytes: 56,
        port_num: 1,
    };
    let parts = pd.create_queue_pair(reservation.cq(), &config)?;
    parts.control.to_init()?;
    let control = Arc::clone(&parts.control);
    let ring = BrokerRing::create(geometry)?;
    let client = ClientRing::open(ring.fd().try_clone_to_owned()?)?;
    let doorbell = eventfd(0, EventfdFlags::CLOEXEC)?;
    let limits = QueuePairLimits::new(&device.capabilities(), &config);
    let setup = QueuePairSetup {
        id: QueuePairId(id),
        ring,
        doorbell: doorbell.try_clone()?,
        parts,
        slots: Arc::clone(slots),
        share: Arc::new(Share::new(Traffic::default())),
        limits,
        landing: None,
    };
    broker.attach(reservation, setup)?;
    Ok(Client { ring: client, control, _doorbell: doorbell })
}

fn request(wr_id: u32, operation: Operation) -> Submission {
    Submission { wr_id: u64::from(wr_id), flags: SubmissionFlags::SIGNALED, operation }
}

fn latency(ring: &mut ClientRing, operation: Operation) -> Outcome<Vec<Duration>> {
    let mut times = Vec::with_capacity(ROUNDS as usize);
    for round in 0..WARM_UP + ROUNDS {
        let start = Instant::now();
        ring.submit(&request(round, operation))?;
        let _ = ring.flush();
        while ring.poll()?.is_none() {
            hint::spin_loop();
        }
        if round >= WARM_UP {
            times.push(start.elapsed());
        }
    }
    Ok(times)
}

fn throughput(ring: &mut ClientRing, operation: Operation) -> Outcome<Duration> {
    let start = Instant::now();
    let mut ended = 0;
    let mut posted = 0;
    while ended < ROUNDS {
        if posted < ROUNDS && posted - ended <= DEPTH - BATCH {
            for _ in 0..BATCH.min(ROUNDS - posted) {
                ring.submit(&request(posted, operation))?;
                posted += 1;
            }
            let _ = ring.flush();
        }
        while ring.poll()?.is_some() {
            ended += 1;
        }
    }
    Ok(start.elapsed() / ROUNDS)
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

fn hca() -> SimHca {
    let mut gid = [0; 16];
    gid[15] = 1;
    SimHca {
        name: "mlx5_0".to_owned(),
        capabilities: Provider::Mlx5.capabilities(),
        ports: vec![SimPort {
            state: PortState::Active,
            link_layer: LinkLayer::Ethernet,
            rate_gbps: 100.0,
            lid: 0,
            mtu_bytes: 4096,
            gids: vec![GidEntry { gid_index: 0, gid: Gid(gid), gid_type: GidType::RoceV2 }],
        }],
    }
}
