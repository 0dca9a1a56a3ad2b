//! Memory that clients bring along, in real processes: adopted, registered, written to by others, looked up by address
//! without a call, and gone with its client.

mod common;

use common::{Side, join, text, write};
use gdrd_client::{AdoptOptions, Client, ClientOptions, RangeOf, RegisterOptions, RuntimeDir, Session};
use gdrd_harness::script::Command;
use gdrd_harness::{Daemon, wait_until};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

const MIB: u64 = 1 << 20;

fn memfd(len_bytes: u64) -> std::os::fd::OwnedFd {
    let fd = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a memfd");
    ftruncate(&fd, len_bytes).expect("a length");
    fd
}

async fn client(daemon: &Daemon) -> Client {
    let options = ClientOptions::default().runtime_dir(RuntimeDir::new(daemon.runtime_dir()));
    options.connect().await.expect("the daemon is there")
}

async fn session(daemon: &Daemon) -> (Client, Session) {
    let client = client(daemon).await;
    let session = client.open_session("test").await.expect("a session");
    (client, session)
}

/// A figure of the daemon, over all of its labels.
async fn figure(client: &Client, name: &str) -> f64 {
    let stats = client.stats().await.expect("figures");
    stats.iter().filter(|stat| stat.name == name).map(|stat| stat.value).sum()
}

#[test]
fn another_process_writes_into_adopted_memory_and_a_killed_owner_leaves_nothing() {
    let daemon = Daemon::start();
    let (mut near, mut owner) = (Side::new(&daemon, "GPU0"), Side::new(&daemon, "GPU1"));
    join(&mut near, &mut owner);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let client = runtime.block_on(client(&daemon));
    let hca = owner.hca.clone();
    owner.puppet.run(Command::Adopt { memory: "m".into(), size: 4 * MIB, gpu: "GPU1".into() });
    let register = Command::RegisterRange { memory: "m".into(), offset: MIB + 3, len: MIB, hca };
    let blob = text(&owner.puppet.run(register));
    near.poke(64, "00112233445566778899");
    assert_eq!(near.status_of(1, write(&blob, 64, 10)), "SUCCESS");
    let peek = Command::PeekAdopted { memory: "m".into(), offset: MIB + 3 + 64, len: 10 };
    assert_eq!(text(&owner.puppet.run(peek)), "00112233445566778899");
    let adopted = || runtime.block_on(figure(&client, "gdrd_adopted_bytes"));
    assert!(adopted() > 0.0, "the daemon holds the adopted memory");
    owner.puppet.kill();
    wait_until("the daemon holds nothing of the killed process", || {
        let held = runtime.block_on(async {
            [
                figure(&client, "gdrd_adopted_memories").await,
                figure(&client, "gdrd_adopted_bytes").await,
                figure(&client, "gdrd_cache_regions").await,
                figure(&client, "gdrd_registered_ranges").await,
            ]
        });
        if held == [0.0; 4] { Ok(()) } else { Err(held) }
    });
    assert_eq!(near.status_of(2, write(&blob, 64, 10)), "RETRY_EXC_ERR");
}

#[test]
fn memory_that_was_given_up_is_reached_by_nobody() {
    let daemon = Daemon::start();
    let (mut near, mut owner) = (Side::new(&daemon, "GPU0"), Side::new(&daemon, "GPU1"));
    join(&mut near, &mut owner);
    let hca = owner.hca.clone();
    owner.puppet.run(Command::Adopt { memory: "m".into(), size: MIB, gpu: "GPU1".into() });
    let blob = text(&owner.puppet.run(Command::RegisterRange { memory: "m".into(), offset: 0, len: MIB, hca }));
    owner.puppet.run(Command::Disown { memory: "m".into() });
    assert_eq!(near.status_of(1, write(&blob, 0, 8)), "REM_ACCESS_ERR");
}

#[tokio::test]
async fn a_hit_needs_no_call_and_a_miss_makes_one() {
    let daemon = Daemon::start();
    let (client, session) = session(&daemon).await;
    let memory = session.adopt(AdoptOptions::memfd(memfd(4 * MIB)).near("GPU0")).await.expect("adopted");
    let base = memory.memory().expect("mapped").address();
    assert!(session.registration(base, 64).is_none());
    let hit = session.registration_or_register(base + 100, 4000).await.expect("registered");
    assert_eq!(hit.span().expect("short").len_bytes, 4000);
    drop(hit);
    let asked = figure(&client, "gdrd_cache_asked_total").await;
    let inner = session.registration(base + 200, 64).expect("within the first");
    assert_eq!(inner.span().expect("short").offset, 200);
    assert_eq!(figure(&client, "gdrd_cache_asked_total").await, asked, "a hit is no call");
    assert!(session.registration_or_register(base + 4 * MIB, 1).await.is_err(), "beyond the memory");
    drop(inner);
    memory.disown().await.expect("given up");
    assert!(session.registration(base + 100, 64).is_none(), "nobody finds what is gone");
    assert_eq!(figure(&client, "gdrd_cache_regions").await, 0.0);
}

#[tokio::test]
async fn an_address_that_is_used_again_is_registered_again() {
    // openucx/ucx#4269: the key of the memory that was there before must not be found.
    let daemon = Daemon::start();
    let (_client, session) = session(&daemon).await;
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..8 {
        // The kernel gives the same address again and again.
        let memory = session.adopt(AdoptOptions::memfd(memfd(MIB)).near("GPU0")).await.expect("adopted");
        let base = memory.memory().expect("mapped").address();
        assert!(session.registration(base, 64).is_none(), "a hit on what was there before");
        let hit = session.registration_or_register(base, 4096).await.expect("registered");
        let span = hit.span().expect("short");
        assert!(seen.insert((span.slot, span.generation)), "a registration of another memory");
        drop(hit);
        memory.disown().await.expect("given up");
    }
}

#[tokio::test]
async fn buffers_that_are_lent_are_found_by_address_too() {
    let daemon = Daemon::start();
    let (_client, session) = session(&daemon).await;
    let buffer = session.acquire(gdrd_client::AcquireOptions::on_gpu("GPU0", 2 * MIB)).await.expect("a buffer");
    let base = buffer.memory().expect("mapped").address();
    let hit = session.registration_or_register(base + MIB, 64).await.expect("registered");
    assert!(hit.remote().is_ok());
    drop(hit);
    buffer.release().await.expect("released");
    assert!(session.registration(base + MIB, 64).is_none());
}

#[tokio::test]
async fn thousands_of_ranges_are_registered_and_ended_in_one_call_each() {
    let daemon = Daemon::start();
    let (client, session) = session(&daemon).await;
    let memory = session.adopt(AdoptOptions::memfd(memfd(512 * MIB)).near("GPU0")).await.expect("adopted");
    let ranges: Vec<_> = (0..4000).map(|index| RangeOf::adopted(&memory, index * 128 * 1024, 100 * 1024)).collect();
    let registered = session.register(ranges, RegisterOptions::new()).await.expect("registered");
    assert_eq!((registered.len(), figure(&client, "gdrd_cache_regions").await), (4000, 1.0));
    assert!(registered.iter().all(gdrd_client::RegisteredRange::is_current));
    session.deregister_all(registered).await.expect("ended");
    assert_eq!(figure(&client, "gdrd_registered_ranges").await, 0.0);
    let beyond = vec![RangeOf::adopted(&memory, 512 * MIB, 1)];
    let refused = session.register(beyond, RegisterOptions::new()).await.expect_err("beyond the memory");
    assert_eq!(refused.reason(), Some("BAD_ARGUMENT"));
}

#[tokio::test]
async fn dropped_ranges_and_memory_go_back_by_themselves() {
    let daemon = Daemon::start();
    let (client, session) = session(&daemon).await;
    let memory = session.adopt(AdoptOptions::memfd(memfd(64 * MIB)).near("GPU0")).await.expect("adopted");
    let ranges = (0..50).map(|index| RangeOf::adopted(&memory, index * MIB, 4096)).collect();
    drop(session.register(ranges, RegisterOptions::new().apart()).await.expect("registered"));
    drop(memory);
    let mut left = f64::MAX;
    for _ in 0..10_000 {
        left = figure(&client, "gdrd_adopted_memories").await + figure(&client, "gdrd_registered_ranges").await;
        if left == 0.0 {
            return;
        }
        tokio::task::yield_now().await;
    }
    assert_eq!(left, 0.0);
}

#[tokio::test]
async fn what_is_no_memory_is_refused_and_the_session_goes_on() {
    let daemon = Daemon::start();
    let (_client, session) = session(&daemon).await;
    let file = std::fs::File::open("/dev/null").expect("it opens");
    let refused = session.adopt(AdoptOptions::memfd(file.into())).await.expect_err("no memory");
    assert_eq!(refused.reason(), Some("MEMORY_NOT_ADOPTABLE"));
    assert!(refused.to_string().contains("memfd"), "{refused}");
    let two = vec![AdoptOptions::memfd(memfd(MIB)).near("GPU0"), AdoptOptions::memfd(memfd(MIB)).near("GPU99")];
    assert_eq!(session.adopt_all(two).await.expect_err("no such gpu").reason(), Some("GPU_UNKNOWN"));
    session.adopt(AdoptOptions::memfd(memfd(MIB)).near("GPU0")).await.expect("the session goes on");
}
