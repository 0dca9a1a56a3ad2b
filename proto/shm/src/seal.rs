//! Seals of a memfd, memfd_create(2) and fcntl(2) "File Sealing".

use std::os::fd::AsFd;

pub use rustix::fs::SealFlags as Seals;

use crate::error::ShmError;

/// The seals of `fd`.
///
/// # Errors
/// [`ShmError::Kernel`] with `EINVAL` when the file knows no seals, so it is no memfd.
pub fn seals(fd: impl AsFd) -> Result<Seals, ShmError> {
    rustix::fs::fcntl_get_seals(fd).map_err(|source| ShmError::Kernel {
        call: "fcntl(F_GET_SEALS)",
        len_bytes: 0,
        source,
    })
}

/// Adds `wanted` to the seals of `fd`. Those that are there already are not asked for again, so
/// that a file closed by `F_SEAL_SEAL` with all of them is no error.
///
/// # Errors
/// [`ShmError::Kernel`]: `EPERM` when the file is closed to new seals or the descriptor is not
/// writable, `EBUSY` when `F_SEAL_WRITE` meets a writable mapping, `EINVAL` when it is no memfd.
pub fn add_seals(fd: impl AsFd, wanted: Seals) -> Result<(), ShmError> {
    let missing = wanted.difference(seals(&fd)?);
    if missing.is_empty() {
        return Ok(());
    }
    rustix::fs::fcntl_add_seals(fd, missing).map_err(|source| ShmError::Kernel {
        call: "fcntl(F_ADD_SEALS)",
        len_bytes: 0,
        source,
    })
}
