//! Binds anew what somebody deletes from the runtime folder: a clean-up of old files, or a hand that slipped, would leave a
//! daemon that nobody reaches, whose folder another one could take, and which leaves the next one nothing.
//!
//! Role: looks when a name that counts goes, and again while what is missing cannot be made. Sockets that systemd handed over
//! are systemd's.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use gdrd_engine::{Engine, EngineError};
use gdrd_server::Rebinding;
use rustix::fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags};
use rustix::io::Errno;
use tokio::io::unix::AsyncFd;
use tracing::{error, warn};

use crate::failure;
use crate::runtime_dir::LOCK_NAME;
use crate::sockets::{Kind, Made, SocketError};

/// Names that go, and the folder itself.
const LOSSES: WatchFlags = WatchFlags::DELETE
    .union(WatchFlags::MOVED_FROM)
    .union(WatchFlags::DELETE_SELF)
    .union(WatchFlags::MOVE_SELF)
    .union(WatchFlags::ONLYDIR);

/// How long after a look that failed the next one comes; doubled with each until the longest.
const RETRY_AFTER: Duration = Duration::from_secs(1);
const MOST_RETRY_AFTER: Duration = Duration::from_secs(60);

const NO_CLIENTS: &str = "clients cannot connect";

/// Keeps the sockets of a folder there.
#[derive(Debug)]
pub(crate) struct SocketsGuard {
    made: Arc<Made>,
    /// Names whose loss counts. Others come and go: a file that is replaced whole is written under another name first.
    names: Vec<&'static str>,
    served: Option<(Rebinding, Engine)>,
}

impl SocketsGuard {
    /// `files` are those that the engine restores.
    pub(crate) fn new(made: Made, files: &[&'static str]) -> Self {
        let names = made.names().chain([LOCK_NAME]).chain(files.iter().copied()).collect();
        Self { made: Arc::new(made), names, served: None }
    }

    /// Whose sockets they are.
    pub(crate) fn serve(&mut self, rebinding: Rebinding, engine: Engine) {
        self.served = Some((rebinding, engine));
    }

    /// Runs for ever.
    pub(crate) async fn run(&self) {
        let mut watch = None;
        let mut pause = RETRY_AFTER;
        loop {
            match self.look_and_wait(&mut watch, &mut pause).await {
                Ok(()) => {}
                Err(error) => {
                    let text = failure::text_of(&error);
                    error!("{text}; the runtime folder is looked at again in {pause:?}");
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(MOST_RETRY_AFTER);
                }
            }
        }
    }

    /// Makes what is missing, and waits for the next loss.
    async fn look_and_wait(&self, watch: &mut Option<Watch>, pause: &mut Duration) -> anyhow::Result<()> {
        let path = self.made.folder().path();
        // Before the look, so that nothing is missed in between.
        let followed = follow(watch, path);
        self.restore().await?;
        if followed.is_err() {
            // There was no folder.
            follow(watch, path).context("watch the runtime folder (inotify(7))")?;
            self.restore().await?;
        }
        *pause = RETRY_AFTER;
        match watch {
            Some(watch) => watch.loss(&self.names).await.context("watch the runtime folder (inotify(7))"),
            None => Ok(()),
        }
    }

    /// Makes what is missing.
    async fn restore(&self) -> anyhow::Result<()> {
        let Some((rebinding, engine)) = &self.served else { return Ok(()) };
        let (made, engine) = (Arc::clone(&self.made), engine.clone());
        let restored = tokio::task::spawn_blocking(move || Restored::of(&made, &engine)).await;
        let Restored { sockets, files } = restored.context("restore the runtime folder")??;
        let mut problem = files.map_err(anyhow::Error::from);
        for (kind, socket) in sockets {
            match socket {
                Ok(socket) => {
                    warn!(socket = kind.name(), "the socket was gone, and is bound anew");
                    match kind {
                        Kind::Grpc => rebinding.grpc(UnixListener::from(socket)).await,
                        Kind::Session => rebinding.session(socket).await,
                    }
                }
                Err(error) => problem = Err(error).context(NO_CLIENTS),
            }
        }
        problem
    }
}

/// What a look has made.
struct Restored {
    sockets: Vec<(Kind, Result<OwnedFd, SocketError>)>,
    files: Result<(), EngineError>,
}

impl Restored {
    /// Blocks on the file system. Nothing is made in a folder that another daemon has taken.
    fn of(made: &Made, engine: &Engine) -> anyhow::Result<Self> {
        if made.folder().renew().context(NO_CLIENTS)? {
            warn!(folder = %made.folder().path().display(), "the lock of the runtime folder was gone");
        }
        let sockets = made.missing().into_iter().map(|kind| (kind, made.bind_again(kind))).collect();
        Ok(Self { sockets, files: engine.restore_files() })
    }
}

/// Watches the folder that has this path now, which may be another one than before.
fn follow(watch: &mut Option<Watch>, path: &Path) -> io::Result<()> {
    let watch = match watch {
        Some(watch) => watch,
        None => watch.insert(Watch::new()?),
    };
    watch.follow(path)
}

/// Hears what goes from one folder.
#[derive(Debug)]
struct Watch {
    inotify: AsyncFd<OwnedFd>,
    folder: Option<i32>,
}

impl Watch {
    fn new() -> io::Result<Self> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        // What took its place is unsafe, for types whose fd may change; an OwnedFd's does not.
        #[allow(deprecated, reason = "sound for an OwnedFd")]
        let inotify = AsyncFd::new(inotify)?;
        Ok(Self { inotify, folder: None })
    }

    fn follow(&mut self, path: &Path) -> io::Result<()> {
        let folder = inotify::add_watch(self.inotify.get_ref(), path, LOSSES)?;
        if let Some(before) = self.folder.replace(folder).filter(|before| *before != folder) {
            // One that was deleted is gone already.
            let _ = inotify::remove_watch(self.inotify.get_ref(), before);
        }
        Ok(())
    }

    /// Waits until the folder, or one of these names in it, goes.
    async fn loss(&self, names: &[&str]) -> io::Result<()> {
        loop {
            let mut ready = self.inotify.readable().await?;
            let lost = self.take_losses(names)?;
            ready.clear_ready();
            if lost {
                return Ok(());
            }
        }
    }

    /// Takes all events. Whether one of them counts.
    fn take_losses(&self, names: &[&str]) -> io::Result<bool> {
        let mut bytes = [MaybeUninit::uninit(); 4096];
        let mut events = Reader::new(self.inotify.get_ref(), &mut bytes);
        let mut lost = false;
        loop {
            let event = match events.next() {
                Ok(event) => event,
                Err(Errno::AGAIN) => return Ok(lost),
                Err(errno) => return Err(errno.into()),
            };
            let counts = match event.file_name() {
                Some(name) => names.iter().any(|counting| counting.as_bytes() == name.to_bytes()),
                None => !event.events().contains(ReadFlags::IGNORED),
            };
            // Events that were too many stand for any.
            lost |= event.events().contains(ReadFlags::QUEUE_OVERFLOW) || (Some(event.wd()) == self.folder && counts);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[tokio::test]
    async fn only_the_loss_of_a_name_that_counts_or_of_the_folder_that_is_followed_is_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, moved) = (folder.path().join("run"), folder.path().join("moved"));
        let file = |name: &str| fs::write(path.join(name), "").expect("written");
        fs::create_dir(&path).expect("made");
        let mut watch = Watch::new().expect("inotify");
        watch.follow(&path).expect("it is there");
        let lost = |watch: &Watch| watch.take_losses(&["gdrd.sock", "gdrd.drained"]).expect("it is read");
        file("gdrd.drained.new");
        fs::remove_file(path.join("gdrd.drained.new")).expect("it is there");
        file("gdrd.drained.new");
        fs::rename(path.join("gdrd.drained.new"), path.join("gdrd.drained")).expect("it is there");
        assert!(!lost(&watch), "a file replaced whole is no loss");
        fs::remove_file(path.join("gdrd.drained")).expect("it is there");
        assert!(lost(&watch));
        assert!(!lost(&watch), "it is told once");
        fs::rename(&path, &moved).expect("it is ours");
        assert!(lost(&watch));
        fs::create_dir(&path).expect("made");
        watch.follow(&path).expect("it is there");
        fs::write(moved.join("gdrd.sock"), "").expect("written");
        fs::remove_file(moved.join("gdrd.sock")).expect("it is there");
        assert!(!lost(&watch), "the one that was moved away is not followed any more");
        fs::remove_dir(&path).expect("it is empty");
        assert!(lost(&watch));
    }
}
