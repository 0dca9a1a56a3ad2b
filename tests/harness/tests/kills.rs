//! `kill -9` of a client at every stage of a lease and of a transfer. A stage is reached by a gate: the client has done
//! the step, has said so, and stands still. Afterwards everything is back to where it was, as `/proc` shows it from
//! outside, and as the daemon's own figures say.

mod common;

use common::{BUFFER_BYTES, Side, acquire, make_queue_pair, number, rows, text, write};
use gdrd_harness::script::{Command, Local, Work};
use gdrd_harness::{Daemon, Footprint, Puppet, anonymous_bytes, binary, kill_pid, wait_until};
use serde_json::Value;

/// Rounds of each stage; with all stages more than 200 rounds.
const ROUNDS: usize = 11;

/// Brings a connected client, and the process it works with, to a stage.
type Reach = fn(&mut Puppet, &mut Side);

const STAGES: &[(&str, Reach)] = &[
    ("connected", |_, _| {}),
    ("acquire sent", |victim, _| {
        victim.run(Command::StartAcquire { gpu: "GPU0".into(), size: BUFFER_BYTES });
    }),
    ("acquired", |victim, _| acquired(victim)),
    ("host memory acquired", |victim, _| {
        victim.run(Command::Acquire { buffer: "h".into(), gpu: "GPU0".into(), size: BUFFER_BYTES, host: true });
    }),
    ("mapped", |victim, _| {
        acquired(victim);
        victim.run(Command::Map { buffer: "b".into() });
    }),
    ("filled", |victim, _| {
        acquired(victim);
        victim.run(Command::Fill { buffer: "b".into(), seed: 1 });
    }),
    ("opened as second holder", |victim, peer| {
        let lease_id = number(&peer.lease["lease_id"]);
        victim.run(Command::Open { buffer: "b".into(), lease_id });
    }),
    ("release sent", |victim, _| {
        acquired(victim);
        victim.run(Command::StartRelease { buffer: "b".into() });
    }),
    ("released", |victim, _| {
        acquired(victim);
        victim.run(Command::Release { buffer: "b".into() });
    }),
    ("detached", |victim, _| {
        acquired(victim);
        victim.run(Command::Detach { buffer: "b".into(), ttl_ms: 50 });
    }),
    ("queue pair created", |victim, _| {
        make_queue_pair(victim, "q", "GPU0", 0);
    }),
    ("queue pair connected", connected),
    ("receive posted", |victim, peer| {
        connected(victim, peer);
        post(victim, Work::Recv { local: Local::new("b", 0, 64) });
    }),
    ("mid-transfer", |victim, peer| {
        connected(victim, peer);
        let whole = u32::try_from(BUFFER_BYTES).expect("a buffer fits a request");
        victim.run(Command::Flood { queue_pair: "q".into(), work: write(&peer.blob, 0, whole) });
    }),
    ("mid-transfer as its target", |victim, peer| {
        connected(victim, peer);
        let blob = blob_of(victim);
        let whole = u32::try_from(BUFFER_BYTES).expect("a buffer fits a request");
        peer.puppet.run(Command::Flood { queue_pair: "q".into(), work: write(&blob, 0, whole) });
    }),
    ("completion pending", |victim, peer| {
        peer.poke(0, "00");
        connected(victim, peer);
        victim.run(Command::Poke { buffer: "b".into(), offset: 0, bytes: "ab".into() });
        post(victim, write(&peer.blob, 0, 1));
        wait_until("the write is done, its completion not polled", || match peer.peek(0, 1).as_str() {
            "ab" => Ok(()),
            other => Err(other.to_owned()),
        });
    }),
    ("asleep for a completion", |victim, peer| {
        connected(victim, peer);
        post(victim, Work::Recv { local: Local::new("b", 0, 64) });
        victim.begin(&Command::Completion { queue_pair: "q".into() });
        wait_until("the client's waiting thread runs", || match thread_names(victim.pid()) {
            names if names.iter().any(|name| name == "gdrd-wait") => Ok(()),
            names => Err(names),
        });
    }),
    ("queue pair destroyed", |victim, peer| {
        connected(victim, peer);
        victim.run(Command::Destroy { queue_pair: "q".into() });
    }),
    ("session closed", |victim, peer| {
        connected(victim, peer);
        victim.run(Command::CloseSession);
    }),
];

fn acquired(victim: &mut Puppet) {
    acquire(victim, "b", "GPU0", BUFFER_BYTES);
}

fn connected(victim: &mut Puppet, peer: &mut Side) {
    acquired(victim);
    let made = make_queue_pair(victim, "q", "GPU0", 0);
    let of_peer = make_queue_pair(&mut peer.puppet, "q", "GPU1", 0);
    let endpoint = text(&of_peer["endpoint"]);
    victim.run(Command::ConnectQueuePair { queue_pair: "q".into(), endpoint });
    peer.connect_to(&text(&made["endpoint"]));
}

fn post(victim: &mut Puppet, work: Work) {
    let command = Command::Post { queue_pair: "q".into(), work: vec![work], first_wr_id: 0, only_last_signaled: false };
    assert_eq!(victim.run(command), 1);
}

/// The victim's registration with the HCA of GPU0's queue pair.
fn blob_of(victim: &mut Puppet) -> String {
    let made = make_queue_pair(victim, "probe", "GPU0", 0);
    text(&victim.run(Command::Remote { buffer: "b".into(), hca: text(&made["hca"]) }))
}

fn thread_names(pid: u32) -> Vec<String> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let names = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("comm")).ok());
    names.map(|name| name.trim().to_owned()).collect()
}

/// A process with one lease and no queue pair, which lives through all rounds.
fn living_peer(daemon: &Daemon) -> Side {
    let mut peer = Side::new(daemon, "GPU1");
    peer.puppet.run(Command::Destroy { queue_pair: "q".into() });
    peer
}

/// One round: to the stage, kill, and until the daemon's lists show the peer's lease alone.
fn kill_at(daemon: &Daemon, peer: &mut Side, name: &str, reach: Reach) {
    let mut victim = Puppet::connected(daemon);
    reach(&mut victim, peer);
    victim.kill();
    // The peer ends its side, where it has one.
    let _ = peer.puppet.try_run(Command::Destroy { queue_pair: "q".into() });
    wait_until(&format!("all came back after a kill when {name}"), || {
        let leases = peer.puppet.run(Command::Leases);
        let queue_pairs = peer.puppet.run(Command::QueuePairs);
        let alone = rows(&leases) == 1 && number(&leases[0]["holders"]) == 1 && rows(&queue_pairs) == 0;
        if alone { Ok(()) } else { Err((leases, queue_pairs)) }
    });
}

/// Anonymous memory that may have come in all rounds together, from what an allocator keeps: 20 KiB a round.
const MOST_GROWTH_BYTES: u64 = 4 << 20;

/// The daemon's figures, as a process without a session sees them.
fn figures(daemon: &Daemon) -> Vec<Value> {
    let mut command = std::process::Command::new(binary("gdrctl"));
    command.args(["stats", "--format", "json", "--runtime-dir"]).arg(daemon.runtime_dir());
    let output = command.output().expect("gdrctl starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let document: Value = serde_json::from_slice(&output.stdout).expect("gdrctl prints JSON");
    document["stats"].as_array().expect("a list of figures").clone()
}

/// Figures that go up and down with the clients. Threads for driver calls are started on need, and some may still be in one.
fn gauges(daemon: &Daemon) -> Vec<Value> {
    let kept = |name: &str| name.ends_with("_total") || name.starts_with("gdrd_executor_");
    figures(daemon).into_iter().filter(|stat| !kept(&text(&stat["name"]))).collect()
}

/// What the daemon itself counts as its own bugs.
fn unexpected(daemon: &Daemon) -> Vec<Value> {
    let bugs = figures(daemon).into_iter().filter(|stat| text(&stat["name"]).contains("unexpected"));
    bugs.filter(|stat| stat["value"] != 0.0).collect()
}

/// What is compared before and after: seen from outside, and told by the daemon.
fn state(daemon: &Daemon) -> (Footprint, Vec<Value>) {
    // The connection that asks must be gone from what is looked at.
    let told = gauges(daemon);
    (daemon.footprint().without_threads(), told)
}

/// Whether the daemon has anything left to do: a session or a lease to end, or a buffer to make or to scrub.
fn is_at_rest(told: &[Value]) -> bool {
    told.iter().all(|stat| {
        let is_busy = match text(&stat["name"]).as_str() {
            "gdrd_sessions" | "gdrd_leases" => true,
            "gdrd_buffer_bytes" => stat["labels"]["state"] == "changing",
            _ => false,
        };
        !is_busy || stat["value"] == 0.0
    })
}

/// The state once nobody is connected and nothing changes any more: at rest, and the same in two looks at different times.
fn settled(daemon: &Daemon) -> (Footprint, Vec<Value>) {
    let mut last = None;
    wait_until("the daemon settles", || {
        let now = state(daemon);
        if last.as_ref() == Some(&now) && is_at_rest(&now.1) {
            return Ok(now);
        }
        last = Some(now);
        Err(last.clone())
    })
}

fn came_back(daemon: &Daemon, before: &(Footprint, Vec<Value>)) {
    wait_until("everything is back to where it was", || {
        let after = state(daemon);
        if after == *before { Ok(()) } else { Err(format!("{after:#?}\nbefore: {before:#?}")) }
    });
}

#[test]
fn two_hundred_killed_clients_leave_nothing_behind() {
    let daemon = Daemon::start();
    // Once through all stages first: what the daemon makes once and keeps is there before the first look.
    let mut peer = living_peer(&daemon);
    for (name, reach) in STAGES {
        kill_at(&daemon, &mut peer, name, *reach);
    }
    drop(peer);
    let before = settled(&daemon);
    let memory_before = anonymous_bytes(daemon.pid()).expect("the daemon lives");
    let mut peer = living_peer(&daemon);
    let mut rounds = 0;
    for _ in 0..ROUNDS {
        for (name, reach) in STAGES {
            kill_at(&daemon, &mut peer, name, *reach);
            rounds += 1;
        }
    }
    assert!(rounds >= 200, "{rounds} rounds");
    // The survivor lost nothing: its memory is its own, and it can still move data.
    let mut other = Side::new(&daemon, "GPU0");
    let mut peer = Side::with(peer.puppet, "GPU1", BUFFER_BYTES);
    common::join(&mut peer, &mut other);
    assert_eq!(peer.status_of(1, write(&other.blob, 0, 64)), "SUCCESS");
    drop((peer, other));
    came_back(&daemon, &before);
    let grown = anonymous_bytes(daemon.pid()).expect("the daemon lives").saturating_sub(memory_before);
    assert!(grown <= MOST_GROWTH_BYTES, "{grown} bytes of anonymous memory came and stayed");
    assert_eq!(unexpected(&daemon), Vec::<Value>::new());
    assert!(daemon.stop().success());
}

#[test]
fn a_killed_parent_gives_everything_back_though_its_child_still_holds_the_socket() {
    let daemon = Daemon::start();
    let mut peer = living_peer(&daemon);
    let round = |peer: &mut Side| {
        let mut victim = Puppet::connected(&daemon);
        connected(&mut victim, peer);
        let child = u32::try_from(number(&victim.run(Command::ForkHolder))).expect("a pid has 32 bits");
        victim.kill();
        peer.puppet.run(Command::Destroy { queue_pair: "q".into() });
        let held = Footprint::of(child).expect("the child lives").fds;
        assert!(held.contains_key("socket"), "the child holds the session socket: {held:?}");
        wait_until("all came back although the child lives", || {
            match (rows(&peer.puppet.run(Command::Leases)), rows(&peer.puppet.run(Command::QueuePairs))) {
                (1, 0) => Ok(()),
                others => Err(others),
            }
        });
        kill_pid(child);
    };
    round(&mut peer);
    drop(peer);
    let before = settled(&daemon);
    let mut peer = living_peer(&daemon);
    for _ in 0..ROUNDS {
        round(&mut peer);
    }
    drop(peer);
    came_back(&daemon, &before);
}
