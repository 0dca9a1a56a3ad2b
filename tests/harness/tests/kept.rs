//! Mappings that a client keeps for the next lease of the same memory: used again, never with old content, and let go of
//! when the daemon frees the memory.

use gdrd_client::{AcquireOptions, Buffer, Client, ClientOptions, RuntimeDir, Session};
use gdrd_harness::Daemon;

const MIB: u64 = 1 << 20;

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime")
}

async fn session(daemon: &Daemon, options: ClientOptions) -> (Client, Session) {
    let client = options.runtime_dir(RuntimeDir::new(daemon.runtime_dir())).connect().await.expect("a daemon");
    let session = client.open_session("test").await.expect("a session");
    (client, session)
}

async fn acquire(session: &Session) -> Buffer {
    session.acquire(AcquireOptions::on_gpu("GPU0", 2 * MIB)).await.expect("there is memory")
}

/// A buffer of this memory: the pool lends what was released, as soon as it is zeroed and registered again.
async fn of_memory(session: &Session, allocation_id: u64) -> Buffer {
    loop {
        let buffer = acquire(session).await;
        if buffer.allocation_id() == allocation_id {
            return buffer;
        }
        buffer.release().await.expect("it is held");
    }
}

#[test]
fn memory_that_is_lent_again_is_mapped_where_it_was_and_zeroed() {
    let daemon = Daemon::start();
    runtime().block_on(async {
        let (_client, session) = session(&daemon, ClientOptions::default()).await;
        let buffer = acquire(&session).await;
        let (allocation, address) = (buffer.allocation_id(), buffer.memory().expect("it maps").address());
        buffer.write_from(0, &[0x5a; 4096]).expect("it is long enough");
        buffer.release().await.expect("it is held");
        assert_eq!(session.kept_mappings_bytes(), 2 * MIB);
        for round in 0..3 {
            let again = of_memory(&session, allocation).await;
            assert_eq!(again.memory().expect("it maps").address(), address, "round {round}");
            assert_eq!(session.kept_mappings_bytes() % (2 * MIB), 0);
            let mut seen = [1; 4096];
            again.read_into(0, &mut seen).expect("it is long enough");
            assert_eq!(seen, [0; 4096], "round {round}");
            let fd = again.try_clone_fd().expect("a descriptor");
            let inode = |fd: &std::os::fd::OwnedFd| rustix::fs::fstat(fd).expect("an fd").st_ino;
            again.write_from(0, &[7; 64]).expect("it is long enough");
            let mut by_fd = [0; 64];
            assert_eq!(rustix::io::pread(&fd, &mut by_fd, 0), Ok(64), "{}", inode(&fd));
            assert_eq!(by_fd, [7; 64], "descriptor and mapping are the same memory");
            drop(again);
        }
    });
}

#[test]
fn another_session_of_the_tenant_has_the_memory_whoever_keeps_it_mapped() {
    let daemon = Daemon::start();
    runtime().block_on(async {
        let (_one, first) = session(&daemon, ClientOptions::default()).await;
        let (_two, second) = session(&daemon, ClientOptions::default()).await;
        let buffer = acquire(&first).await;
        buffer.write_from(0, &[0x5a; 64]).expect("it is long enough");
        let allocation = buffer.allocation_id();
        buffer.release().await.expect("it is held");
        let lent = of_memory(&second, allocation).await;
        let mut seen = [1; 64];
        lent.read_into(0, &mut seen).expect("it is long enough");
        assert_eq!(seen, [0; 64]);
        assert_eq!(first.kept_mappings_bytes(), 2 * MIB);
    });
}

#[test]
fn a_drain_has_kept_mappings_let_go_of() {
    let daemon = Daemon::start();
    runtime().block_on(async {
        let (client, session) = session(&daemon, ClientOptions::default()).await;
        let buffers = [acquire(&session).await, acquire(&session).await];
        for buffer in buffers {
            buffer.memory().expect("it maps");
            buffer.release().await.expect("it is held");
        }
        assert_eq!(session.kept_mappings_bytes(), 4 * MIB);
        client.drain("GPU0", false).await.expect("the daemon's own user");
        while session.kept_mappings_bytes() > 0 {
            tokio::task::yield_now().await;
        }
        assert!(session.end().is_none());
    });
}

#[test]
fn nothing_is_kept_where_nothing_may_be_and_after_the_session() {
    let daemon = Daemon::start();
    runtime().block_on(async {
        let (_none, without) = session(&daemon, ClientOptions::default().kept_mappings(0)).await;
        let (_client, with) = session(&daemon, ClientOptions::default()).await;
        for (session, kept) in [(&without, 0), (&with, 2 * MIB)] {
            let buffer = acquire(session).await;
            buffer.memory().expect("it maps");
            drop(buffer);
            assert_eq!(session.kept_mappings_bytes(), kept);
        }
        let held = acquire(&with).await;
        held.memory().expect("it maps");
        with.close();
        with.ended().await;
        while with.kept_mappings_bytes() > 0 {
            tokio::task::yield_now().await;
        }
        drop(held);
        assert_eq!(with.kept_mappings_bytes(), 0);
    });
}
