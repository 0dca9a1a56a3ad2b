//! Looks at fds that a client sent as proof of its right to GPUs: are they device nodes, and which?
//!
//! The fds are the client's: looking at one, and even closing it, can wait for a file system that the client runs
//! itself (FUSE). So both happen on threads that may block, a bounded number of them and of each user's, and the session
//! waits a bounded time. Fds that were never received are the kernel's to let go of, which waits for nobody.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gdrd_engine::DeviceNumber;
use rustix::fs::{FileType, fstat, major, minor};
use tokio::sync::{Semaphore, oneshot};

use crate::limits::{MAX_PROOFS_AT_ONCE, MAX_PROOFS_OF_USER_AT_ONCE, MAX_PROOFS_WAITING_OF_USER};

/// Where proofs are looked at.
#[derive(Debug, Clone)]
pub(super) struct Proofs {
    places: Arc<Semaphore>,
    users: Arc<Mutex<HashMap<u32, User>>>,
}

/// One user's part of it.
#[derive(Debug)]
struct User {
    /// Looked at or waiting for a place.
    held: usize,
    places: Arc<Semaphore>,
}

impl Proofs {
    pub(super) fn new() -> Self {
        Self { places: Arc::new(Semaphore::new(MAX_PROOFS_AT_ONCE)), users: Arc::default() }
    }

    /// Whether more of this user's fds may be taken in.
    pub(super) fn has_room(&self, uid: u32) -> bool {
        self.users().get(&uid).is_none_or(|user| user.held < MAX_PROOFS_WAITING_OF_USER)
    }

    /// The device numbers of these fds, all of which are closed by then.
    ///
    /// # Errors
    /// A sentence for the client that says which fd is no device node.
    pub(super) async fn look_at(&self, uid: u32, fds: Vec<OwnedFd>) -> Result<Vec<DeviceNumber>, String> {
        let looked = self.apart(uid, move || {
            let numbers = device_numbers(&fds);
            drop(fds);
            numbers
        });
        looked.await.unwrap_or_else(|| Err("the daemon is shutting down".to_owned()))
    }

    /// Closes fds, whenever there is a place for it.
    pub(super) fn close(&self, uid: u32, fds: Vec<OwnedFd>) {
        drop(self.begin(uid, move || drop(fds)));
    }

    /// Runs what looks at a client's fds, and drops them, on a thread that may block; `None` when the daemon stops.
    /// Whoever gives up waiting leaves them to be dropped there all the same.
    pub(super) async fn apart<T: Send + 'static>(
        &self,
        uid: u32,
        look: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        self.begin(uid, look).await.ok()
    }

    fn begin<T: Send + 'static>(&self, uid: u32, look: impl FnOnce() -> T + Send + 'static) -> oneshot::Receiver<T> {
        let (tell, told) = oneshot::channel();
        let (held, of_user) = self.hold(uid);
        let places = Arc::clone(&self.places);
        // A task of its own: what is dropped with a caller that gave up would be dropped where nothing may block.
        tokio::spawn(async move {
            let places = (of_user.acquire_owned().await, places.acquire_owned().await);
            let looked = tokio::task::spawn_blocking(move || {
                if tell.is_closed() {
                    drop(look);
                } else {
                    // Whoever waited may have given up meanwhile.
                    let _ = tell.send(look());
                }
                drop((places, held));
            });
            // It panics where `look` does, and is told as a daemon that stops.
            let _ = looked.await;
        });
        told
    }

    fn hold(&self, uid: u32) -> (Held, Arc<Semaphore>) {
        let mut users = self.users();
        let user = users
            .entry(uid)
            .or_insert_with(|| User { held: 0, places: Arc::new(Semaphore::new(MAX_PROOFS_OF_USER_AT_ONCE)) });
        user.held += 1;
        (Held { proofs: self.clone(), uid }, Arc::clone(&user.places))
    }

    fn users(&self) -> MutexGuard<'_, HashMap<u32, User>> {
        self.users.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One proof of a user; the count goes down when it is dropped.
struct Held {
    proofs: Proofs,
    uid: u32,
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut users = self.proofs.users();
        if let Some(user) = users.get_mut(&self.uid) {
            user.held = user.held.saturating_sub(1);
            if user.held == 0 {
                users.remove(&self.uid);
            }
        }
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

    #[tokio::test]
    async fn one_user_whose_fds_hang_holds_up_no_other_and_not_who_gives_up() {
        let proofs = Proofs::new();
        let (hang, hung) = std::sync::mpsc::channel::<()>();
        let hung = Arc::new(Mutex::new(hung));
        let mut waiting = Vec::new();
        while proofs.has_room(1) {
            let hung = Arc::clone(&hung);
            // Ends with the sender.
            waiting.push(proofs.begin(1, move || hung.lock().expect("no panic held it").recv()));
        }
        assert_eq!(waiting.len(), MAX_PROOFS_WAITING_OF_USER);
        assert!(proofs.has_room(2));
        assert_eq!(proofs.apart(2, || 7).await, Some(7));
        drop((waiting, hang));
        while !proofs.users().is_empty() {
            tokio::task::yield_now().await;
        }
    }

    #[test]
    fn anything_else_is_named_by_its_place() {
        let message = device_numbers(&[open("/dev/null"), open("/proc/self/status")]).expect_err("a file");
        assert!(message.starts_with("fd 1 of the proof is no character device"), "{message}");
        assert!(device_numbers(&[]).is_err());
    }
}
