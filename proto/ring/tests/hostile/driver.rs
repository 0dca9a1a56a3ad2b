//! Plays a hostile client from a string of bytes, and checks the broker after each step. The fuzz target and the
//! ordinary tests run this same file.

use gdrd_ring::{BrokerRing, Completion, Corrupt, Geometry, Queue, Status, Submitted, abi};
use gdrd_shm::{Access, Segment};

/// Words that the two sides share.
const WORDS: [u64; 8] = [
    abi::SUBMISSION_TAIL,
    abi::SUBMISSION_HEAD,
    abi::COMPLETION_TAIL,
    abi::COMPLETION_HEAD,
    abi::BROKER_SLEEPING,
    abi::CLIENT_WAITING,
    abi::WAKE_COUNT,
    abi::STATE,
];

struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn chunk(&mut self, len: usize) -> &[u8] {
        let (first, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        first
    }
}

struct Stage {
    broker: BrokerRing,
    /// The client's mapping: everything in it may be overwritten.
    client: Segment,
    open: Vec<Submitted>,
    corrupt: Option<Corrupt>,
}

/// What a run saw, for tests that want to know that it went deep.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seen {
    /// Requests taken.
    pub(crate) requests: u32,
    /// Entries refused.
    pub(crate) refused: u32,
    /// Whether the ring ended as corrupt.
    pub(crate) corrupt: bool,
}

/// Runs `data`: two bytes of depths, then steps.
pub(crate) fn drive(data: &[u8]) -> Seen {
    let mut bytes = Bytes(data);
    let mut seen = Seen::default();
    let Some([sq_depth, rq_depth]) = bytes.take() else { return seen };
    let geometry =
        Geometry::new(u32::from(sq_depth % 8) + 1, u32::from(rq_depth % 8)).expect("small depths are allowed");
    let broker = BrokerRing::create(geometry).expect("a small segment can be made");
    let fd = broker.fd().try_clone_to_owned().expect("a descriptor is left");
    let client = Segment::map(fd, Access::ReadWrite).expect("the broker's segment is sealed");
    let mut stage = Stage { broker, client, open: Vec::new(), corrupt: None };
    while let Some([step]) = bytes.take() {
        if stage.step(step, &mut bytes, &mut seen).is_none() {
            break;
        }
        stage.check();
    }
    seen.corrupt = stage.corrupt.is_some();
    stage.broker.close().expect("closing reads nothing of the client's");
    seen
}

impl Stage {
    /// One step; `None` when the bytes are used up.
    fn step(&mut self, step: u8, bytes: &mut Bytes<'_>, seen: &mut Seen) -> Option<()> {
        match step % 10 {
            0 => {
                let [word] = bytes.take()?;
                let value: [u8; 4] = bytes.take()?;
                self.put(WORDS[usize::from(word) % WORDS.len()], &value);
            }
            1 => {
                let place = u64::from(u16::from_le_bytes(bytes.take()?)) % self.client.len_bytes();
                let [len] = bytes.take()?;
                let room = usize::try_from(self.client.len_bytes() - place).expect("a ring is small");
                let chunk = bytes.chunk(usize::from(len).min(room)).to_vec();
                self.put(place, &chunk);
            }
            2 => {
                let [slot, opcode, flags] = bytes.take()?;
                let entry = abi::RINGS_OFFSET + u64::from(slot) % 8 * 128;
                if entry + 128 <= self.client.len_bytes() {
                    self.put(entry, &[opcode % 11, flags]);
                }
            }
            3 | 4 => self.take(seen),
            5 => self.end_oldest(true),
            6 => self.end_oldest(false),
            7 => {
                self.broker.publish().expect("a futex wake needs nothing of the client");
            }
            8 => self.sleep(),
            _ => {
                // An honest step: one more submission, all completions read.
                self.advance(abi::SUBMISSION_TAIL);
                let tail = self.client.load_u32(abi::COMPLETION_TAIL).expect("the word is there");
                self.put(abi::COMPLETION_HEAD, &tail.to_ne_bytes());
            }
        }
        Some(())
    }

    fn put(&self, offset: u64, bytes: &[u8]) {
        self.client.write_from(offset, bytes).expect("the driver keeps to the segment");
    }

    fn advance(&self, offset: u64) {
        let value = self.client.load_u32(offset).expect("the word is there");
        self.put(offset, &value.wrapping_add(1).to_ne_bytes());
    }

    fn take(&mut self, seen: &mut Seen) {
        match self.broker.take() {
            Ok(None) => {}
            Ok(Some(submitted)) => {
                match submitted {
                    Submitted::Request(_) => seen.requests += 1,
                    Submitted::Refused { .. } => seen.refused += 1,
                }
                self.open.push(submitted);
            }
            Err(corrupt) => self.ended(corrupt),
        }
    }

    fn ended(&mut self, corrupt: Corrupt) {
        let first = *self.corrupt.get_or_insert(corrupt);
        assert_eq!(first, corrupt, "the first violation stays the answer");
    }

    /// Ends the oldest request; there always is a slot for its completion.
    fn end_oldest(&mut self, with_completion: bool) {
        if self.open.is_empty() {
            assert!(self.broker.retire(Queue::Send).is_err());
            return;
        }
        let submitted = self.open.remove(0);
        if with_completion {
            let (wr_id, opcode) = match submitted {
                Submitted::Request(request) => (request.wr_id, gdrd_ring::CompletionOpcode::of(&request.operation)),
                Submitted::Refused { wr_id, opcode, .. } => (wr_id, opcode),
            };
            assert_eq!(opcode.queue(), submitted.queue());
            let completion = Completion::new(wr_id, opcode, Status::Refused, 1);
            self.broker.complete(&completion).expect("the request was taken");
        } else {
            self.broker.retire(submitted.queue()).expect("the request was taken");
        }
    }

    fn sleep(&mut self) {
        match self.broker.prepare_sleep() {
            Ok(true) => {
                assert_eq!(self.broker.take(), Ok(None), "who may sleep has nothing to take");
                self.broker.finish_sleep();
            }
            Ok(false) => {}
            Err(corrupt) => self.ended(corrupt),
        }
    }

    fn check(&self) {
        let count = |queue| {
            let open = self.open.iter().filter(|submitted| submitted.queue() == queue).count();
            u32::try_from(open).expect("a ring is small")
        };
        let geometry = self.broker.geometry();
        for (queue, depth) in [(Queue::Send, geometry.sq_depth()), (Queue::Receive, geometry.rq_depth())] {
            assert_eq!(self.broker.outstanding(queue), count(queue));
            assert!(self.broker.outstanding(queue) <= depth, "more than the depth was admitted");
        }
    }
}
