//! What the tests of real processes share: two connected puppets, and short forms of what they do.
#![allow(dead_code, reason = "each test program uses its part")]

use gdrd_harness::script::{Command, Local, Remote, Work};
use gdrd_harness::{Daemon, Puppet, User};
use serde_json::Value;

/// Size of the buffers of most tests.
pub(crate) const BUFFER_BYTES: u64 = 2 << 20;

/// A puppet with a buffer `b` on a GPU and a queue pair `q` of the GPU's NIC.
pub(crate) struct Side {
    pub(crate) puppet: Puppet,
    pub(crate) lease: Value,
    pub(crate) hca: String,
    pub(crate) endpoint: String,
    /// Its registration as a peer needs it.
    pub(crate) blob: String,
}

impl Side {
    pub(crate) fn new(daemon: &Daemon, gpu: &str) -> Self {
        Self::with(Puppet::connected(daemon), gpu, BUFFER_BYTES)
    }

    pub(crate) fn new_as(daemon: &Daemon, user: User, gpu: &str) -> Self {
        Self::with(Puppet::connected_as(daemon, user), gpu, BUFFER_BYTES)
    }

    pub(crate) fn with(mut puppet: Puppet, gpu: &str, size: u64) -> Self {
        let lease = acquire(&mut puppet, "b", gpu, size);
        let made = make_queue_pair(&mut puppet, "q", gpu, 0);
        let hca = text(&made["hca"]);
        let blob = text(&puppet.run(Command::Remote { buffer: "b".into(), hca: hca.clone() }));
        Self { puppet, lease, hca, endpoint: text(&made["endpoint"]), blob }
    }

    /// The same buffer and a new queue pair, after the daemon was started again.
    pub(crate) fn again(side: Self, gpu: &str) -> Self {
        let Self { mut puppet, lease, .. } = side;
        puppet.run(Command::Destroy { queue_pair: "q".into() });
        let made = make_queue_pair(&mut puppet, "q", gpu, 0);
        let hca = text(&made["hca"]);
        let blob = text(&puppet.run(Command::Remote { buffer: "b".into(), hca: hca.clone() }));
        Self { puppet, lease, hca, endpoint: text(&made["endpoint"]), blob }
    }

    pub(crate) fn connect_to(&mut self, endpoint: &str) {
        let endpoint = endpoint.to_owned();
        self.puppet.run(Command::ConnectQueuePair { queue_pair: "q".into(), endpoint });
    }

    /// Posts one request that makes a completion.
    pub(crate) fn post(&mut self, wr_id: u64, work: Work) {
        let posted = self.try_post(wr_id, vec![work]);
        assert_eq!(posted, Value::from(1));
    }

    pub(crate) fn try_post(&mut self, first_wr_id: u64, work: Vec<Work>) -> Value {
        self.puppet.run(Command::Post { queue_pair: "q".into(), work, first_wr_id, only_last_signaled: false })
    }

    pub(crate) fn completion(&mut self) -> Value {
        self.puppet.run(Command::Completion { queue_pair: "q".into() })
    }

    /// Posts one request and gives the status it ends with.
    pub(crate) fn status_of(&mut self, wr_id: u64, work: Work) -> String {
        self.post(wr_id, work);
        let completion = self.completion();
        assert_eq!(completion["wr_id"], wr_id);
        text(&completion["status"])
    }

    pub(crate) fn poke(&mut self, offset: u64, bytes: &str) {
        self.puppet.run(Command::Poke { buffer: "b".into(), offset, bytes: bytes.into() });
    }

    pub(crate) fn peek(&mut self, offset: u64, len: usize) -> String {
        text(&self.puppet.run(Command::Peek { buffer: "b".into(), offset, len }))
    }

    pub(crate) fn digest(&mut self) -> String {
        text(&self.puppet.run(Command::Digest { buffer: "b".into(), offset: 0, len: BUFFER_BYTES }))
    }
}

/// Two connected sides, in two processes.
pub(crate) fn connected_pair(daemon: &Daemon, gpus: [&str; 2]) -> (Side, Side) {
    let mut sides = (Side::new(daemon, gpus[0]), Side::new(daemon, gpus[1]));
    join(&mut sides.0, &mut sides.1);
    sides
}

pub(crate) fn join(a: &mut Side, b: &mut Side) {
    a.connect_to(&b.endpoint.clone());
    b.connect_to(&a.endpoint.clone());
}

pub(crate) fn acquire(puppet: &mut Puppet, name: &str, gpu: &str, size: u64) -> Value {
    puppet.run(Command::Acquire { buffer: name.into(), gpu: gpu.into(), size, host: false })
}

pub(crate) fn make_queue_pair(puppet: &mut Puppet, name: &str, gpu: &str, depth: u32) -> Value {
    puppet.run(Command::QueuePair { queue_pair: name.into(), gpu: gpu.into(), hca: String::new(), depth })
}

/// A write of `len` bytes at `offset` of `b`, to the same offset at the peer.
pub(crate) fn write(blob: &str, offset: u64, len: u32) -> Work {
    Work::Write { local: Local::new("b", offset, len), remote: Remote::new(blob, offset), imm: None }
}

pub(crate) fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| unreachable!("{value} is no text"), str::to_owned)
}

pub(crate) fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| unreachable!("{value} is no number"))
}

/// How many rows a list has.
pub(crate) fn rows(value: &Value) -> usize {
    value.as_array().map_or_else(|| unreachable!("{value} is no list"), Vec::len)
}
