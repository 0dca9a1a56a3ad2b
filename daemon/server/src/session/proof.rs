//! Looks at fds that a client sent as proof of its right to GPUs: are they device nodes, and which?
//!
//! The fds are the client's: looking at one, and even closing it, can wait for a file system that the client runs
//! itself (FUSE). So both happen on threads that may block, a bounded number of them, and the session waits a
//! bounded time.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use gdrd_engine::DeviceNumber;
use rustix::fs::{FileType, fstat, major, minor};
use tokio::sync::Semaphore;

use crate::limits::MAX_PROOFS_AT_ONCE;

/// Where proofs are looked at.
#[derive(Debug, Clone)]
pub(super) struct Proofs {
    places: Arc<Semaphore>,
}

impl Proofs {
    pub(super) fn new() -> Self {
        Self { places: Arc::new(Semaphore::new(MAX_PROOFS_AT_ONCE)) }
    }

    /// The device numbers of these fds, all of which are closed by then.
    ///
    /// # Errors
    /// A sentence for the client that says which fd is no device node.
    pub(super) async fn look_at(&self, fds: Vec<OwnedFd>) -> Result<Vec<DeviceNumber>, String> {
        let looked = self.apart(move || {
            let numbers = device_numbers(&fds);
            drop(fds);
            numbers
        });
        looked.await.unwrap_or_else(|| Err("the daemon is shutting down".to_owned()))
    }

    /// Runs what looks at a client's fds, and drops them, on a thread that may block; `None` when the daemon stops.
    pub(super) async fn apart<T: Send + 'static>(&self, look: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let place = Arc::clone(&self.places).acquire_owned().await.ok()?;
        let looked = tokio::task::spawn_blocking(move || {
            let seen = look();
            drop(place);
            seen
        });
        looked.await.ok()
    }
}

fn device_numbers(fds: &[OwnedFd]) -> Result<Vec<DeviceNumber>, String> {
    if fds.is_empty() {
        return Err("no fd came with the proof; attach an open fd of each GPU's device node".to_owned());
    }
    fds.iter().enumerate().map(|(index, fd)| device_number(index, fd)).collect()
}

fn device_number(index: usize, fd: &OwnedFd) -> Result<DeviceNumber, String> {
    let stat = fstat(fd).map_err(|error| format!("fd {index} of the proof: {error}"))?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::CharacterDevice {
        return Err(format!("fd {index} of the proof is no character device; open the GPU's device node"));
    }
    Ok(DeviceNumber { major: major(stat.st_rdev), minor: minor(stat.st_rdev) })
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn open(path: &str) -> OwnedFd {
        File::open(path).expect("it opens").into()
    }

    #[test]
    fn device_nodes_give_their_numbers() {
        // /dev/null is 1:3 on every Linux (Documentation/admin-guide/devices.txt).
        assert_eq!(device_numbers(&[open("/dev/null")]), Ok(vec![DeviceNumber { major: 1, minor: 3 }]));
    }

    #[test]
    fn anything_else_is_named_by_its_place() {
        let message = device_numbers(&[open("/dev/null"), open("/proc/self/status")]).expect_err("a file");
        assert!(message.starts_with("fd 1 of the proof is no character device"), "{message}");
        assert!(device_numbers(&[]).is_err());
    }
}
