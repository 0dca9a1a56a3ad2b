//! Direct mode as far as it goes without hardware: who is given a context, with what, until when; and what is said where there
//! is none. No real HCA has met it.

mod support;

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, AsRawFd as _, RawFd};

use gdrd_client::{AcquireOptions, ClientError, ClientOptions, QueuePairOptions, RuntimeDir, Session};
use support::{Daemon, Stage, block_on};

fn start(stage: &Stage, profile: &str, direct: bool) -> Daemon {
    let path = stage.path("gdrd.toml");
    std::fs::write(&path, format!("[verbs]\ndirect = {direct}\n")).expect("written");
    stage.start(stage.command(&["--sim", profile, "--config", &path.to_string_lossy()]))
}

async fn session(stage: &Stage) -> Session {
    let options = ClientOptions::default().runtime_dir(RuntimeDir::new(stage.runtime_dir()));
    let client = options.connect().await.expect("it listens");
    client.open_session("test").await.expect("the same user")
}

/// The kernel's number of each eventfd of a process (proc(5), fdinfo).
fn event_fds(pid: String) -> BTreeMap<RawFd, String> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fdinfo")).expect("it runs");
    let id = |entry: std::fs::DirEntry| {
        // Closed meanwhile, it has no file any more.
        let text = std::fs::read_to_string(entry.path()).ok()?;
        let id = text.lines().find_map(|line| line.strip_prefix("eventfd-id:"))?.trim().to_owned();
        Some((entry.file_name().to_str()?.parse().ok()?, id))
    };
    entries.filter_map(|entry| id(entry.ok()?)).collect()
}

fn refused(error: &ClientError, words: &str) {
    assert_eq!(error.reason(), Some("UNSUPPORTED"), "{error}");
    assert!(error.to_string().contains(words) && error.to_string().contains("use a brokered queue pair"), "{error}");
}

#[test]
fn a_session_gets_one_context_with_regions_of_its_buffers_that_end_with_them() {
    let stage = Stage::new();
    let daemon = start(&stage, "dgx-a100", true);
    block_on(async {
        let session = session(&stage).await;
        let buffer = session.acquire(AcquireOptions::on_gpu("GPU0", 2 << 20)).await.expect("a buffer");
        let registration = buffer.registrations().next().expect("registered");
        let hca = registration.hca().to_owned();
        let context = session.open_direct(&hca, &[&buffer]).await.expect("a context");
        assert_eq!(context.hca(), hca);
        let [region] = context.regions() else { unreachable!("{:?}", context.regions()) };
        assert_eq!((region.lease_id, region.size_bytes), (buffer.lease_id(), 2 << 20));
        // What stands for the context of a simulated HCA is none, which an import finds out.
        assert!(context.import().is_err());
        assert!(rustix::io::fcntl_getfd(context.as_fd()).is_ok());

        let other = session.acquire(AcquireOptions::on_gpu("GPU0", 4 << 20)).await.expect("a buffer");
        let more = session.open_direct(&hca, &[&buffer, &other]).await.expect("the same context");
        assert_eq!(more.pd_handle(), context.pd_handle());
        assert_eq!(more.regions()[0], context.regions()[0], "made once");
        assert_ne!(more.regions()[1].mr_handle, region.mr_handle);

        let unknown = session.open_direct("mlx5_99", &[&buffer]).await.expect_err("no such hca");
        assert_eq!(unknown.reason(), Some("HCA_UNKNOWN"), "{unknown}");
        let none = session.open_direct(&hca, &[]).await.expect_err("no lease");
        assert_eq!(none.reason(), Some("BAD_ARGUMENT"), "{none}");
        let stranger = self::session(&stage).await;
        let not_held = stranger.open_direct(&hca, &[&buffer]).await.expect_err("another session's lease");
        assert_eq!(not_held.reason(), Some("LEASE_NOT_HELD"), "{not_held}");

        let (held, ended) = (more.regions()[1], region.mr_handle);
        buffer.release().await.expect("it is held");
        let again = session.acquire(AcquireOptions::on_gpu("GPU0", 2 << 20)).await.expect("a buffer");
        let less = session.open_direct(&hca, &[&other, &again]).await.expect("the same context");
        assert_eq!(less.regions()[0], held, "the other lease's is as it was");
        assert_ne!(less.regions()[1].mr_handle, ended, "it ended with its lease");

        // The context ends with the session: nobody has it any more but this process.
        let own = event_fds("self".to_owned());
        let id = own.get(&context.as_fd().as_raw_fd()).expect("what stands for it is an eventfd").clone();
        let has = || event_fds(daemon.pid().to_string()).values().any(|other| *other == id);
        assert!(has());
        session.close();
        drop(session);
        while has() {
            tokio::task::yield_now().await;
        }
    });
}

#[test]
fn where_it_is_off_or_the_provider_cannot_the_refusal_names_the_brokered_queue_pair_which_works() {
    let off = Stage::new();
    let _off = start(&off, "dgx-a100", false);
    let cannot = Stage::new();
    // It has EFA.
    let _cannot = start(&cannot, "aws-p5en", true);
    block_on(async {
        let session = session(&off).await;
        let buffer = session.acquire(AcquireOptions::on_gpu("GPU0", 2 << 20)).await.expect("a buffer");
        let hca = buffer.registrations().next().expect("registered").hca().to_owned();
        refused(&session.open_direct(&hca, &[&buffer]).await.expect_err("it is off"), "verbs.direct");
        session.create_queue_pair(QueuePairOptions::on_hca(hca)).await.expect("a brokered one");
        let session = self::session(&cannot).await;
        let buffer = session.acquire(AcquireOptions::on_gpu("GPU0", 2 << 20)).await.expect("a buffer");
        let hca = buffer.registrations().next().expect("registered").hca().to_owned();
        refused(&session.open_direct(&hca, &[&buffer]).await.expect_err("it cannot"), "cannot import");
    });
}
