//! A daemon that is killed, and the one after it.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use gdrd_engine::{Continuity, EngineConfig, Keeper, LeaseState, Name, SessionResumed, Viewer, Watch};
use gdrd_ring::Operation;
use gdrd_sim::SimHost;

use crate::wire::{Client, local};
use crate::world::{MIB, World, config, peer, request};

/// Keeps descriptors for as long as the test holds it.
#[derive(Debug, Default)]
struct Shelf(Mutex<BTreeMap<Name, (OwnedFd, Watch)>>);

impl Shelf {
    fn with<T>(&self, act: impl FnOnce(&mut BTreeMap<Name, (OwnedFd, Watch)>) -> T) -> T {
        act(&mut self.0.lock().expect("no test panics under the lock"))
    }

    /// Another one with the same on it.
    fn copy(&self) -> Self {
        let dup = |(name, (fd, watch)): (&Name, &(OwnedFd, Watch))| (*name, (fd.try_clone().expect("dup"), *watch));
        Self(Mutex::new(self.with(|kept| kept.iter().map(dup).collect())))
    }

    fn len(&self) -> usize {
        self.with(|kept| kept.len())
    }
}

impl Keeper for Shelf {
    fn store(&self, name: Name, fd: BorrowedFd<'_>, watch: Watch) -> io::Result<()> {
        let fd = fd.try_clone_to_owned()?;
        self.with(|kept| drop(kept.insert(name, (fd, watch))));
        Ok(())
    }

    fn remove(&self, name: Name) -> io::Result<()> {
        self.with(|kept| drop(kept.remove(&name)));
        Ok(())
    }

    fn barrier(&self) -> io::Result<()> {
        Ok(())
    }
}

/// A daemon, with what it has kept and written down.
struct Daemon {
    world: World,
    shelf: Arc<Shelf>,
    journal: PathBuf,
    folder: tempfile::TempDir,
}

impl Daemon {
    fn start() -> Self {
        let World { sim, engine } = World::new();
        drop(engine);
        Self::take_up(sim, config(), Shelf::default(), None).0
    }

    fn take_up(
        sim: SimHost,
        config: EngineConfig,
        shelf: Shelf,
        journal: Option<&Path>,
    ) -> (Self, Vec<SessionResumed>) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("journal");
        if let Some(journal) = journal {
            std::fs::copy(journal, &path).expect("the journal is there");
        }
        let kept = shelf.copy().0.into_inner().expect("nobody else has it");
        let kept = kept.into_iter().map(|(name, (fd, _))| (name, fd)).collect();
        let shelf = Arc::new(shelf);
        let keeper: Arc<dyn Keeper> = Arc::<Shelf>::clone(&shelf);
        let (world, resumed) = World::taking_up(sim, config, Continuity { keeper, journal: path.clone(), kept });
        (Self { world, shelf, journal: path, folder }, resumed)
    }

    /// It dies; the next one has these settings, and finds what `left` leaves on the shelf.
    fn killed(self, config: EngineConfig, left: impl FnOnce(&Shelf)) -> (Self, Vec<SessionResumed>) {
        let Self { world: World { sim, engine }, shelf, journal, folder } = self;
        // What it does from here on is another's, and no death leaves more behind.
        let (shelf, at_death) = (shelf.copy(), folder.path().join("at-death"));
        std::fs::copy(journal, &at_death).expect("it has a journal");
        drop(engine);
        left(&shelf);
        Self::take_up(sim, config, shelf, Some(&at_death))
    }

    /// A session whose socket is kept; the other end is its client.
    fn session(&self, uid: u32) -> (gdrd_engine::SessionId, UnixStream) {
        let (ours, client) = UnixStream::pair().expect("a socket");
        let session = self.world.session(uid);
        self.world.engine.keep_session(session, ours.as_fd());
        (session, client)
    }
}

#[test]
fn the_rates_of_a_rule_hold_after_a_restart() {
    let daemon = Daemon::start();
    let (session, _client) = daemon.session(1);
    let mut slow = config();
    slow.policy.leases[0].traffic.operations_per_s = 200;
    let (Daemon { world, .. }, resumed) = daemon.killed(slow, |_| ());
    assert_eq!(resumed.iter().map(|resumed| resumed.session).collect::<Vec<_>>(), [session]);
    world.engine.resume_session(session, &peer(1)).expect("its client is there");
    let (lease, _memory) = world.acquire(session).keep();
    let mut client = Client::new(&world, session, "mlx5_0");
    // The rate has room for two at once, so most of these wait in the ring.
    for wr_id in 0..10 {
        client.post(wr_id, Operation::Recv { local: local(&lease, "mlx5_0", 0, 8) });
    }
    world.until("the rate to hold the tenant back", || world.stat("gdrd_broker_throttled_total") > 0);
}

#[test]
fn nothing_is_kept_of_a_session_whose_client_died_with_the_daemon() {
    let daemon = Daemon::start();
    let (session, _client) = daemon.session(1);
    let _queue_pair = Client::new(&daemon.world, session, "mlx5_0");
    assert_eq!(daemon.shelf.len(), 3, "a socket, a page and a ring");
    let client_died = |shelf: &Shelf| shelf.with(|kept| kept.retain(|_, (_, watch)| *watch == Watch::No));
    let (next, resumed) = daemon.killed(config(), client_died);
    assert!(resumed.is_empty());
    next.world.until("all that was kept to be let go of", || next.shelf.len() == 0);
}

#[test]
fn a_gpu_drained_before_a_restart_stays_so_until_it_is_resumed_and_no_lease_there_is_registered_anew() {
    let daemon = Daemon::start();
    let (session, _client) = daemon.session(1);
    let lease = daemon.world.lease(session);
    // The daemon before died after it had written the drain down, and before anything else.
    let folder = tempfile::tempdir().expect("a folder");
    let drains = folder.path().join("drained");
    let text = |uuids: &str| format!("boot {}\n{uuids}end\n", gdrd_engine::boot_id());
    std::fs::write(&drains, text("GPU-0\nGPU-of-another-time\n")).expect("written");
    let config = EngineConfig { drains: Some(drains.clone()), ..config() };
    let (Daemon { world, .. }, resumed) = daemon.killed(config, |_| ());
    assert_eq!(resumed.len(), 1);
    let admin = Viewer::Peer(peer(0));
    let (leases, registered) = (world.engine.list_leases(&admin, None, 10), world.stat("gdrd_registrations_total"));
    let states: Vec<_> = leases.expect("an administrator").leases.iter().map(|l| (l.id, l.state)).collect();
    assert_eq!((states, registered), (vec![(lease, LeaseState::Revoked)], 0));
    let names = || -> Vec<String> { world.engine.drained_gpus().into_iter().map(|gpu| gpu.name).collect() };
    world.engine.refresh_gpus();
    assert_eq!(names(), ["GPU0"]);
    let refused = world.try_acquire(session, request("GPU0", 2 * MIB)).expect_err("drained");
    assert!(refused.to_string().contains("drained by an administrator"), "{refused}");
    world.engine.resume_gpus(&admin, "").expect("an administrator");
    assert_eq!(names(), [""; 0]);
    assert_eq!(std::fs::read_to_string(&drains).expect("it is there"), text(""));
    world.acquire(session);
}
