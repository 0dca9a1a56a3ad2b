//! Random sequences of work against a model of a few lines that only knows the rules.
#![forbid(unsafe_code)]

mod support;

use std::collections::{BTreeMap, VecDeque};

use gdrd_hal::{
    Access, LocalSpan, MemoryRegion, MemorySource, Opcode, ReceiveRequest, RemoteSpan, WorkCompletion, WorkRequest,
    WorkStatus,
};
use gdrd_sim::SimHost;
use rand::rngs::SmallRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use support::{End, MEMORY_BYTES, pair, patient_host, request};

const STEPS: usize = 400;
const FIXED_SEEDS: u64 = 25;
/// Posted and not completed, per queue: well below the depth, so that no queue fills up.
const MOST_WAITING: usize = 24;
const PAGE: u64 = 4096;
const MEMORY_LEN: usize = 64 * 1024;

type Done = (u64, WorkStatus, Option<(Opcode, u32, Option<u32>)>);

/// A registration, live or not, as the model knows it.
struct Known {
    side: usize,
    /// Whether it is in the domain of the side's queue pair.
    is_ours: bool,
    offset: u64,
    len: u64,
    iova: u64,
    access: Access,
    lkey: u32,
    rkey: u32,
    handle: Option<Box<dyn MemoryRegion>>,
}

/// One end as the model knows it.
#[derive(Default)]
struct Side {
    memory: Vec<u8>,
    sends: VecDeque<WorkRequest>,
    receives: VecDeque<ReceiveRequest>,
    is_broken: bool,
    done: Vec<Done>,
}

struct Model {
    sides: [Side; 2],
    known: Vec<Known>,
}

impl Model {
    fn find(&self, side: usize, key: u32, is_local: bool, addr: u64, len: u32) -> Option<(&Known, usize)> {
        let named = |known: &&Known| known.side == side && key == if is_local { known.lkey } else { known.rkey };
        let known = self.known.iter().find(named).filter(|known| known.handle.is_some() && known.is_ours)?;
        let (addr, len) = (u128::from(addr), u128::from(len));
        let (start, end) = (u128::from(known.iova), u128::from(known.iova) + u128::from(known.len));
        if addr < start || addr + len > end {
            return None;
        }
        let at = known.offset + u64::try_from(addr - start).ok()?;
        Some((known, usize::try_from(at).ok()?))
    }

    fn local(&self, side: usize, span: LocalSpan, writes: bool) -> Option<usize> {
        let (known, at) = self.find(side, span.lkey, true, span.addr, span.len_bytes)?;
        (!writes || known.access.local_write).then_some(at)
    }

    fn remote(&self, side: usize, span: RemoteSpan, len: u32, right: fn(&Access) -> bool) -> Option<usize> {
        let (known, at) = self.find(side, span.rkey, false, span.addr, len)?;
        right(&known.access).then_some(at)
    }

    fn copy(&mut self, from: usize, at: usize, to: usize, to_at: usize, len: u32) {
        let bytes = self.sides[from].memory[at..at + len as usize].to_vec();
        self.sides[to].memory[to_at..to_at + len as usize].copy_from_slice(&bytes);
    }

    /// What becomes of the request at the head: `None` while it waits.
    fn execute(&mut self, side: usize, work: &WorkRequest) -> Option<Result<u32, WorkStatus>> {
        let (peer, len) = (1 - side, work.local.len_bytes);
        Some(match work.opcode {
            Opcode::Read | Opcode::Flush => self.read(side, work, len),
            Opcode::FetchAdd | Opcode::CompareSwap => self.atomic(side, work),
            opcode => {
                let from = match self.local(side, work.local, false) {
                    Some(at) => at,
                    None if len == 0 => 0,
                    None => return Some(Err(WorkStatus::LocalProtection)),
                };
                if opcode == Opcode::Write {
                    return Some(self.write(side, work, from));
                }
                let receive = *self.sides[peer].receives.front()?;
                let moved = match opcode {
                    Opcode::WriteImm => self.write(side, work, from),
                    _ => self.message(side, from, len, receive),
                };
                if moved.is_ok() {
                    self.sides[peer].receives.pop_front();
                    let recv = if opcode == Opcode::WriteImm { Opcode::RecvWriteImm } else { Opcode::Recv };
                    let imm = (opcode != Opcode::Send).then_some(work.imm);
                    self.sides[peer].done.push((receive.wr_id, WorkStatus::Success, Some((recv, len, imm))));
                }
                moved
            }
        })
    }

    fn write(&mut self, side: usize, work: &WorkRequest, from: usize) -> Result<u32, WorkStatus> {
        let len = work.local.len_bytes;
        if len > 0 {
            let to = self.remote(1 - side, work.remote, len, |access| access.remote_write);
            self.copy(side, from, 1 - side, to.ok_or(WorkStatus::RemoteAccess)?, len);
        }
        Ok(len)
    }

    fn read(&mut self, side: usize, work: &WorkRequest, len: u32) -> Result<u32, WorkStatus> {
        if len == 0 {
            return if work.opcode == Opcode::Read { Ok(0) } else { Err(WorkStatus::LocalLength) };
        }
        let from = self.remote(1 - side, work.remote, len, |access| access.remote_read);
        let from = from.ok_or(WorkStatus::RemoteAccess)?;
        let to = self.local(side, work.local, true).ok_or(WorkStatus::LocalProtection)?;
        self.copy(1 - side, from, side, to, len);
        Ok(len)
    }

    fn atomic(&mut self, side: usize, work: &WorkRequest) -> Result<u32, WorkStatus> {
        if work.local.len_bytes != 8 {
            return Err(WorkStatus::LocalLength);
        }
        if !work.remote.addr.is_multiple_of(8) {
            return Err(WorkStatus::RemoteInvalidRequest);
        }
        let at = self.remote(1 - side, work.remote, 8, |access| access.remote_atomic);
        let at = at.ok_or(WorkStatus::RemoteAccess)?;
        let word = &mut self.sides[1 - side].memory[at..at + 8];
        let old = u64::from_ne_bytes(word.try_into().expect("eight bytes were taken"));
        let new = match work.opcode {
            Opcode::FetchAdd => old.wrapping_add(work.operand),
            _ if old == work.compare => work.operand,
            _ => old,
        };
        word.copy_from_slice(&new.to_ne_bytes());
        let to = self.local(side, work.local, true).ok_or(WorkStatus::LocalProtection)?;
        self.sides[side].memory[to..to + 8].copy_from_slice(&old.to_ne_bytes());
        Ok(8)
    }

    /// A send into a receive; where that cannot take it, the receive's own end is told first.
    fn message(&mut self, side: usize, from: usize, len: u32, receive: ReceiveRequest) -> Result<u32, WorkStatus> {
        let peer = 1 - side;
        let (own, told) = match self.local(peer, receive.local, true) {
            _ if len > receive.local.len_bytes => (WorkStatus::LocalLength, WorkStatus::RemoteInvalidRequest),
            Some(to) => {
                self.copy(side, from, peer, to, len);
                return Ok(len);
            }
            None if receive.local.len_bytes == 0 => return Ok(len),
            None => (WorkStatus::LocalProtection, WorkStatus::RemoteOperation),
        };
        self.sides[peer].receives.pop_front();
        self.sides[peer].done.push((receive.wr_id, own, None));
        Err(told)
    }

    /// Executes what can be executed, as after each post.
    fn run(&mut self, side: usize) {
        while let Some(work) = self.sides[side].sends.front().copied() {
            let Some(result) = self.execute(side, &work) else { return };
            self.sides[side].sends.pop_front();
            match result {
                Ok(len) if work.signaled => {
                    self.sides[side].done.push((work.wr_id, WorkStatus::Success, Some((work.opcode, len, None))));
                }
                Ok(_) => {}
                Err(status) => {
                    self.sides[side].done.push((work.wr_id, status, None));
                    self.fail(side, true);
                    let is_remote = !matches!(status, WorkStatus::LocalProtection | WorkStatus::LocalLength);
                    if is_remote {
                        self.fail(1 - side, false);
                    }
                }
            }
        }
    }

    /// A requester flushes its sends first, a responder its receives.
    fn fail(&mut self, side: usize, sends_first: bool) {
        let side = &mut self.sides[side];
        side.is_broken = true;
        let sends: Vec<_> = side.sends.drain(..).map(|work| work.wr_id).collect();
        let receives: Vec<_> = side.receives.drain(..).map(|work| work.wr_id).collect();
        let order = if sends_first { [sends, receives] } else { [receives, sends] };
        side.done.extend(order.concat().into_iter().map(|wr_id| (wr_id, WorkStatus::Flushed, None)));
    }
}

struct Run {
    random: SmallRng,
    host: SimHost,
    ends: [End; 2],
    model: Model,
    next_id: u64,
    /// How often each way to complete was seen.
    tally: BTreeMap<String, u64>,
}

impl Run {
    fn new(seed: u64) -> Self {
        let host = patient_host();
        let (a, b) = pair(&host);
        let side = || Side { memory: vec![0; MEMORY_LEN], ..Side::default() };
        let model = Model { sides: [side(), side()], known: Vec::new() };
        let mut run = Self {
            random: SmallRng::seed_from_u64(seed),
            host,
            ends: [a, b],
            model,
            next_id: 0,
            tally: BTreeMap::new(),
        };
        for side in [0, 1, 0, 1] {
            run.register(side);
        }
        run
    }

    fn coin(&mut self, one_in: u32) -> bool {
        self.random.random_ratio(1, one_in)
    }

    fn register(&mut self, side: usize) {
        let is_ours = !self.coin(5);
        let pd = match is_ours {
            true => std::sync::Arc::clone(&self.ends[side].pd),
            false => self.ends[side].hca.alloc_pd().expect("domains are free"),
        };
        let offset = self.random.random_range(0..=MEMORY_BYTES);
        let len = self.random.random_range(0..=MEMORY_BYTES);
        let iova = self.random.random_range(0..1 << 40) * PAGE + if self.coin(20) { 1 } else { offset % PAGE };
        let right = |random: &mut SmallRng| random.random_ratio(4, 5);
        let access = Access {
            local_write: right(&mut self.random),
            remote_write: right(&mut self.random),
            remote_read: right(&mut self.random),
            remote_atomic: right(&mut self.random),
            relaxed_ordering: right(&mut self.random),
        };
        let is_valid = len > 0
            && offset + len <= MEMORY_BYTES
            && iova % PAGE == offset % PAGE
            && (access.local_write || !(access.remote_write || access.remote_atomic));
        let fd = std::os::fd::AsFd::as_fd(&self.ends[side].memory);
        let made = pd.register(MemorySource::Host { fd, offset, len_bytes: len }, access, iova);
        assert_eq!(made.is_ok(), is_valid, "{len} bytes at {offset}, iova {iova:#x}, {access:?}");
        if let Ok(handle) = made {
            let (lkey, rkey) = (handle.lkey(), handle.rkey());
            assert_eq!((handle.iova(), handle.len_bytes(), handle.access()), (iova, len, access));
            self.model.known.push(Known { side, is_ours, offset, len, iova, access, lkey, rkey, handle: Some(handle) });
        }
    }

    fn deregister(&mut self) {
        let index = self.random.random_range(0..self.model.known.len().max(1));
        if let Some(known) = self.model.known.get_mut(index) {
            known.handle = None;
        }
    }

    /// Key, address and length of some registration: mostly inside it, sometimes past an end.
    fn place(&mut self, side: usize, is_local: bool, wanted: Option<u32>) -> (u32, u64, u32) {
        let near: Vec<_> = self
            .model
            .known
            .iter()
            .filter(|known| known.side == side && (known.handle.is_some() || known.lkey % 8 == 0))
            .map(|known| (if is_local { known.lkey } else { known.rkey }, known.iova, known.len))
            .collect();
        let Some((key, iova, len)) = near.choose(&mut self.random).copied() else { return (1, 0, 8) };
        let most = len.min(5000);
        let len_bytes = u64::from(wanted.unwrap_or(u32::try_from(self.random.random_range(0..=most)).unwrap_or(0)));
        let room = len.saturating_sub(len_bytes);
        let start = match self.random.random_range(0..40) {
            0 => room + 1,
            1 => u64::MAX,
            2 => self.random.random(),
            3..10 => room,
            _ => self.random.random_range(0..=room) & !7,
        };
        let key = if self.coin(60) { key ^ 0x80 } else { key };
        (key, iova.wrapping_add(start), u32::try_from(len_bytes).unwrap_or(0))
    }

    fn local(&mut self, side: usize, wanted: Option<u32>) -> LocalSpan {
        let (lkey, addr, len_bytes) = self.place(side, true, wanted);
        LocalSpan { lkey, addr, len_bytes }
    }

    fn send(&mut self, side: usize) {
        if self.model.sides[side].sends.len() >= MOST_WAITING {
            return;
        }
        const OPCODES: [Opcode; 8] = [
            Opcode::Write,
            Opcode::WriteImm,
            Opcode::Read,
            Opcode::Send,
            Opcode::SendImm,
            Opcode::FetchAdd,
            Opcode::CompareSwap,
            Opcode::Flush,
        ];
        let opcode = *OPCODES.choose(&mut self.random).expect("there are eight");
        let is_atomic = matches!(opcode, Opcode::FetchAdd | Opcode::CompareSwap);
        let local = self.local(side, is_atomic.then_some(8));
        let (rkey, addr, _) = self.place(1 - side, false, Some(local.len_bytes));
        let mut work = request(self.next_id, opcode, local, RemoteSpan { rkey, addr });
        self.next_id += 1;
        work.signaled = !self.coin(5);
        work.fence = self.coin(5);
        work.imm = self.random.random();
        work.operand = self.random.random_range(0..3);
        work.compare = self.random.random_range(0..3);
        self.ends[side].send(work);
        self.model.sides[side].sends.push_back(work);
        self.model.run(side);
    }

    fn receive(&mut self, side: usize) {
        if self.model.sides[side].receives.len() >= MOST_WAITING {
            return;
        }
        let wanted = if self.coin(3) { None } else { Some(5000) };
        let work = ReceiveRequest { wr_id: self.next_id, local: self.local(side, wanted) };
        self.next_id += 1;
        self.ends[side].work.post_recv(&[work]).expect("a queue pair with room takes a receive");
        self.model.sides[side].receives.push_back(work);
        self.model.run(1 - side);
    }

    /// Bytes change from outside, as a CPU or GPU changes them.
    fn scribble(&mut self, side: usize) {
        let at = self.random.random_range(0..MEMORY_LEN - 64);
        let bytes: [u8; 64] = self.random.random();
        self.ends[side].fill(at as u64, &bytes);
        self.model.sides[side].memory[at..at + 64].copy_from_slice(&bytes);
    }

    fn compare(&mut self) {
        for side in [0, 1] {
            let mut out = [WorkCompletion::EMPTY; 128];
            let count = self.ends[side].cq.poll(&mut out).expect("the completion queue is sound");
            let seen = out[..count].iter().map(|done| {
                let more = (done.status == WorkStatus::Success).then_some((done.opcode, done.byte_len, done.imm));
                (done.wr_id, done.status, more)
            });
            let wanted = std::mem::take(&mut self.model.sides[side].done);
            assert_eq!(seen.collect::<Vec<_>>(), wanted, "completions of side {side}");
            for (_, status, more) in wanted {
                let opcode = more.map(|(opcode, ..)| opcode);
                *self.tally.entry(format!("{status:?} {opcode:?}")).or_default() += 1;
            }
            let content = self.ends[side].content(0, MEMORY_LEN);
            assert!(content == self.model.sides[side].memory, "memory of side {side}");
        }
        if self.model.sides.iter().any(|side| side.is_broken) {
            self.reconnect();
        }
    }

    /// New queue pairs over the old memory; what was registered in the old domains goes.
    fn reconnect(&mut self) {
        let (a, b) = pair(&self.host);
        let ends = std::mem::replace(&mut self.ends, [a, b]);
        self.model.known.clear();
        for (side, old) in ends.into_iter().enumerate() {
            self.ends[side].memory = old.memory;
            let model = &mut self.model.sides[side];
            model.sends.clear();
            model.receives.clear();
            model.is_broken = false;
            self.register(side);
            self.register(side);
        }
    }

    fn step(&mut self) {
        let side = usize::from(self.coin(2));
        match self.random.random_range(0..100) {
            0..8 => self.register(side),
            8..12 => self.deregister(),
            12..20 => self.scribble(side),
            20..50 => self.receive(side),
            _ => self.send(side),
        }
        self.compare();
    }
}

fn run(seed: u64) -> BTreeMap<String, u64> {
    let mut run = Run::new(seed);
    for step in 0..STEPS {
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run.step()));
        assert!(result.is_ok(), "seed {seed}, step {step}: see above");
    }
    run.tally
}

#[test]
fn random_work_does_what_the_model_says() {
    let mut tally: BTreeMap<String, u64> = BTreeMap::new();
    for seed in 0..FIXED_SEEDS {
        for (way, count) in run(seed) {
            *tally.entry(way).or_default() += count;
        }
    }
    // The comparison means something only where every way to end was met.
    for opcode in
        ["Write", "WriteImm", "Read", "Send", "SendImm", "FetchAdd", "CompareSwap", "Flush", "Recv", "RecvWriteImm"]
    {
        assert!(tally.contains_key(&format!("Success Some({opcode})")), "{opcode}: {tally:#?}");
    }
    for status in [
        WorkStatus::LocalLength,
        WorkStatus::LocalProtection,
        WorkStatus::Flushed,
        WorkStatus::RemoteAccess,
        WorkStatus::RemoteInvalidRequest,
        WorkStatus::RemoteOperation,
    ] {
        assert!(tally.contains_key(&format!("{status:?} None")), "{status:?}: {tally:#?}");
    }
}

#[test]
fn random_work_of_a_fresh_seed_does_what_the_model_says() {
    // The seed is in the message of a failure.
    run(rand::random());
}
