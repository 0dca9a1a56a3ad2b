//! What the tests with daemons share: a client process with a host buffer and a queue pair on soft RoCE.
#![allow(dead_code, reason = "each test program uses its part")]

pub(crate) mod peer;
pub(crate) mod perftest;

use gdrd_harness::script::{Command, Local, Remote, Work};
use gdrd_harness::{Daemon, DaemonOptions, Puppet, User, wait_until};
use gdrd_vm::pci::{Function, functions};
use gdrd_vm::run;
use serde_json::Value;

/// One write of at most this many bytes.
pub(crate) const CHUNK_BYTES: u32 = 1 << 20;

/// A client process with buffer `b` and queue pair `q`.
pub(crate) struct Side {
    pub(crate) puppet: Puppet,
    pub(crate) lease_id: u64,
    pub(crate) len_bytes: u64,
    pub(crate) endpoint: String,
    /// Its registration as a peer needs it.
    pub(crate) blob: String,
}

impl Side {
    pub(crate) fn new(daemon: &Daemon, user: User, len_bytes: u64) -> Self {
        Self::at(&daemon.runtime_dir_text(), user, len_bytes)
    }

    /// With the daemon whose sockets are in this folder.
    pub(crate) fn at(runtime_dir: &str, user: User, len_bytes: u64) -> Self {
        Self::on(gdrd_vm::HCA, runtime_dir, user, len_bytes)
    }

    /// On this HCA.
    pub(crate) fn on(hca: &str, runtime_dir: &str, user: User, len_bytes: u64) -> Self {
        let mut puppet = Puppet::start_as(user);
        puppet.run(Command::Connect { runtime_dir: runtime_dir.to_owned() });
        let hca = hca.to_owned();
        let lease = puppet.run(Command::AcquireHost { buffer: "b".into(), hca: hca.clone(), size: len_bytes });
        Self::with(puppet, &hca, number(&lease["lease_id"]), len_bytes)
    }

    /// With a new queue pair for a buffer that it has.
    fn with(mut puppet: Puppet, hca: &str, lease_id: u64, len_bytes: u64) -> Self {
        let make = Command::QueuePair { queue_pair: "q".into(), gpu: String::new(), hca: hca.into(), depth: 128 };
        let endpoint = text(&puppet.run(make)["endpoint"]);
        let blob = text(&puppet.run(Command::Remote { buffer: "b".into(), hca: hca.into() }));
        Self { puppet, lease_id, len_bytes, endpoint, blob }
    }

    /// The same buffer with its new keys, and a new queue pair, once the daemon was started again so often.
    pub(crate) fn again(self, restarts: u64) -> Self {
        let Self { mut puppet, lease_id, len_bytes, .. } = self;
        puppet.run(Command::AwaitRestart { restarts });
        let lease = puppet.run(Command::Refresh { buffer: "b".into() });
        assert_eq!(number(&lease["lease_id"]), lease_id);
        puppet.run(Command::Destroy { queue_pair: "q".into() });
        Self::with(puppet, gdrd_vm::HCA, lease_id, len_bytes)
    }

    pub(crate) fn connect_to(&mut self, endpoint: &str) {
        let connect = || Command::ConnectQueuePair { queue_pair: "q".into(), endpoint: endpoint.to_owned() };
        // For a second or two after its link came up, a port's own address is not in use yet (duplicate address
        // detection, RFC 4862 section 5.4), and nobody answers for it.
        wait_until("the peer's address is in use", || match self.puppet.try_run(connect()) {
            Err(refused) if refused.reason == "PEER_UNREACHABLE" => Err(refused),
            result => Ok(result),
        })
        .expect("the queue pair connects");
    }

    pub(crate) fn post(&mut self, first_wr_id: u64, work: Vec<Work>) {
        let wanted = work.len();
        let command = Command::Post { queue_pair: "q".into(), work, first_wr_id, only_last_signaled: false };
        assert_eq!(self.puppet.run(command), Value::from(wanted));
    }

    pub(crate) fn completion(&mut self) -> Value {
        self.puppet.run(Command::Completion { queue_pair: "q".into() })
    }

    /// Posts one request and gives the status that it ends with.
    pub(crate) fn status_of(&mut self, wr_id: u64, work: Work) -> String {
        self.post(wr_id, vec![work]);
        let completion = self.completion();
        assert_eq!(number(&completion["wr_id"]), wr_id);
        text(&completion["status"])
    }

    /// Writes the whole buffer to the same places of the peer's.
    pub(crate) fn write_all_to(&mut self, blob: &str) {
        let chunks = self.len_bytes / u64::from(CHUNK_BYTES);
        let write = |chunk: u64| {
            let offset = chunk * u64::from(CHUNK_BYTES);
            Work::Write { local: Local::new("b", offset, CHUNK_BYTES), remote: Remote::new(blob, offset), imm: None }
        };
        self.post(0, (0..chunks).map(write).collect());
        for chunk in 0..chunks {
            let completion = self.completion();
            assert_eq!((number(&completion["wr_id"]), text(&completion["status"])), (chunk, "SUCCESS".into()));
        }
    }

    pub(crate) fn fill(&mut self, seed: u64) {
        self.puppet.run(Command::Fill { buffer: "b".into(), seed });
    }

    pub(crate) fn poke(&mut self, offset: u64, bytes: &str) {
        self.puppet.run(Command::Poke { buffer: "b".into(), offset, bytes: bytes.into() });
    }

    pub(crate) fn peek(&mut self, offset: u64, len: usize) -> String {
        text(&self.puppet.run(Command::Peek { buffer: "b".into(), offset, len }))
    }

    pub(crate) fn digest(&mut self) -> String {
        text(&self.puppet.run(Command::Digest { buffer: "b".into(), offset: 0, len: self.len_bytes }))
    }
}

/// NICs below PCIe switches: that of the wire sits on the root bus itself.
pub(crate) fn nics() -> Vec<Function> {
    functions("0x0200").into_iter().filter(|nic| nic.root() != "pci0000:00").collect()
}

/// Puts a soft RoCE device on a NIC, and waits for its link.
pub(crate) fn make_rxe(nic: &Function, name: &str) {
    let netdev = wait_until("the driver makes an interface", || nic.netdevs().pop().ok_or(nic));
    run("ip", &["link", "set", &netdev, "up"]);
    run("rdma", &["link", "add", name, "type", "rxe", "netdev", &netdev]);
    wait_until("the link comes up", || {
        let state = std::fs::read_to_string(format!("/sys/class/infiniband/{name}/ports/1/state"));
        if state.as_ref().is_ok_and(|state| state.contains("ACTIVE")) { Ok(()) } else { Err(state) }
    });
}

/// A daemon on the guest's own hardware that lets everyone lease.
pub(crate) fn daemon() -> Daemon {
    daemon_with("")
}

/// Configuration that waits seconds for a peer: a guest whose emulator gets no CPU answers late, and a test that wants an answer
/// must not take that for a dead one.
pub(crate) const PATIENT: &str = "[verbs]\nack_timeout = 18\n";

/// The same where faults are waited for: two seconds.
pub(crate) const FIRM: &str = "[verbs]\nack_timeout = 16\n";

/// Configuration with which soft RoCE never gives up.
pub(crate) const ENDLESS: &str = "[verbs]\nretry_count = 7\n";

/// The same with more configuration.
pub(crate) fn daemon_with(more: &str) -> Daemon {
    start(DaemonOptions::default(), more)
}

/// The same with other options.
pub(crate) fn daemon_of(options: DaemonOptions) -> Daemon {
    start(options, "")
}

fn start(options: DaemonOptions, more: &str) -> Daemon {
    let config = format!("{more}\n[[policy.lease]]\nwho = \"anyone\"\n");
    let daemon = options.hardware().config(&config).start();
    assert!(daemon.log().contains(gdrd_vm::HCA), "{}", daemon.log());
    daemon
}

pub(crate) fn join(a: &mut Side, b: &mut Side) {
    a.connect_to(&b.endpoint.clone());
    b.connect_to(&a.endpoint.clone());
}

pub(crate) fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| unreachable!("{value} is no text"), str::to_owned)
}

pub(crate) fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| unreachable!("{value} is no number"))
}
