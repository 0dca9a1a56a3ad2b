//! Binds anew what somebody deletes from the runtime folder: a clean-up of old files, or a hand that slipped, would leave a
//! daemon that nobody reaches, whose folder another one could take, and which leaves the next one nothing.
//!
//! Role: hears of the folder by inotify(7), and wakes for nothing else. Sockets that systemd handed over are systemd's.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;

use gdrd_engine::Engine;
use gdrd_server::Rebinding;
use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use tokio::io::unix::AsyncFd;
use tracing::{error, info, warn};

use crate::failure;
use crate::runtime_dir::RuntimeDir;
use crate::sockets::{Kind, Made};

/// Names that go, and the folder itself.
const LOSSES: WatchFlags = WatchFlags::DELETE
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::ONLYDIR);

/// Keeps the sockets of a folder there.
#[derive(Debug)]
pub(crate) struct SocketsGuard {
    folder: RuntimeDir,
    made: Made,
    served: Option<(Rebinding, Engine)>,
}

impl SocketsGuard {
    pub(crate) fn new(folder: RuntimeDir, made: Made) -> Self {
        Self { folder, made, served: None }
    }

    /// Whose sockets they are.
    pub(crate) fn serve(&mut self, rebinding: Rebinding, engine: Engine) {
        self.served = Some((rebinding, engine));
    }

    /// Runs for ever. Its end by an error leaves the sockets as they are.
    pub(crate) async fn run(&mut self) {
        if let Err(error) = self.watch().await {
            info!(%error, "sockets that are deleted are not bound anew");
        }
        std::future::pending().await
    }

    async fn watch(&self) -> io::Result<()> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        // What took its place is unsafe, for types whose fd may change; an OwnedFd's does not.
        #[allow(deprecated, reason = "sound for an OwnedFd")]
        let inotify = AsyncFd::new(inotify)?;
        loop {
            // Again after each loss: the folder may be another one. Before the look, so that nothing is missed in between.
            let watch = || inotify::add_watch(inotify.get_ref(), self.folder.path(), LOSSES);
            let watched = watch();
            self.restore().await;
            if watched.is_err() {
                // There was none.
                watch()?;
                self.restore().await;
            }
            let mut ready = inotify.readable().await?;
            drain(inotify.get_ref());
            ready.clear_ready();
        }
    }

    /// Makes what is missing.
    async fn restore(&self) {
        match self.folder.renew() {
            Ok(false) => {}
            Ok(true) => warn!(folder = %self.folder.path().display(), "the lock of the runtime folder was gone"),
            Err(error) => return error!("{}; clients cannot connect", failure::text_of(&error.into())),
        }
        let Some((rebinding, engine)) = &self.served else { return };
        engine.restore_files();
        for kind in self.made.missing() {
            match self.made.bind_again(kind) {
                Ok(socket) => {
                    warn!(socket = kind.name(), "the socket was gone, and is bound anew");
                    match kind {
                        Kind::Grpc => rebinding.grpc(UnixListener::from(socket)).await,
                        Kind::Session => rebinding.session(socket).await,
                    }
                }
                Err(error) => error!("{}; clients cannot connect", failure::text_of(&error.into())),
            }
        }
    }
}

/// Takes all events; what they say is found by looking.
fn drain(inotify: &OwnedFd) {
    let mut bytes = [0; 4096];
    while rustix::io::read(inotify, &mut bytes).is_ok_and(|got| got > 0) {}
}
