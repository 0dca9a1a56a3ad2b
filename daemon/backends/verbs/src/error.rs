//! Errors of this backend, and how an errno of a verbs call becomes an [`HcaError`].

use std::fmt;
use std::io;
use std::net::Ipv6Addr;

use gdrd_hal::{Gid, HcaError, PostError};
use rustix::io::Errno;
use thiserror::Error;

/// Why there are no RDMA devices at all.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum AbsentError {
    /// The library is not on this machine.
    #[error("{name} cannot be loaded: {reason}; install rdma-core (libibverbs1, ibverbs-providers) to use RDMA")]
    NoLibrary {
        /// The library.
        name: &'static str,
        /// What the dynamic loader said.
        reason: String,
    },
    /// The library is too old.
    #[error("libibverbs has no function {name}: {reason}; rdma-core 34 or later has it")]
    NoFunction {
        /// The function.
        name: &'static str,
        /// What the dynamic loader said.
        reason: String,
    },
    /// The library is there and lists no devices, because the kernel has no RDMA core or it cannot be asked.
    #[error("libibverbs lists no devices: {reason}; load ib_uverbs and a driver of an RDMA device")]
    NoList {
        /// What the library said.
        reason: String,
    },
}

/// errno now, as the verbs that return a pointer leave it.
pub(crate) fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// The errno of a call that returns 0, an errno, or -1 with errno set; manual pages and providers differ in it.
pub(crate) fn status(returned: i32) -> Result<(), i32> {
    match returned {
        0 => Ok(()),
        negative if negative < 0 => Err(errno()),
        errno => Err(errno),
    }
}

/// Who knows whether a device is still there.
pub(crate) trait Presence: fmt::Debug {
    /// Whether it answers no more. May ask the driver.
    fn has_gone(&self) -> bool;
}

/// A device that does not open is not there.
#[derive(Debug)]
pub(crate) struct Opening;

impl Presence for Opening {
    fn has_gone(&self) -> bool {
        true
    }
}

/// Whether an errno is what a device that was taken away gives, among others (EIO and ENODEV of `ib_uverbs_ioctl` and
/// `ib_uverbs_write`, ENXIO of `ib_uverbs_open`, drivers/infiniband/core/uverbs_ioctl.c and uverbs_main.c).
pub(crate) fn may_be_gone(errno: i32) -> bool {
    matches!(Errno::from_raw_os_error(errno), Errno::NODEV | Errno::IO | Errno::NXIO)
}

/// One failed call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Failed<'a> {
    pub(crate) hca: &'a str,
    pub(crate) device: &'a dyn Presence,
    pub(crate) call: &'static str,
    /// What ENOMEM is short of.
    pub(crate) resource: &'static str,
}

impl Failed<'_> {
    /// The failure with this errno.
    pub(crate) fn with(self, errno: i32) -> HcaError {
        let hca = self.hca.to_owned();
        let reason = io::Error::from_raw_os_error(errno).to_string();
        match Errno::from_raw_os_error(errno) {
            Errno::NOMEM | Errno::AGAIN | Errno::NOSPC => HcaError::Exhausted {
                hca,
                call: self.call,
                what: format!("{}: {reason} (locked memory is bounded by RLIMIT_MEMLOCK)", self.resource),
            },
            Errno::OPNOTSUPP | Errno::NOSYS | Errno::PROTONOSUPPORT => {
                HcaError::Unsupported { hca, what: format!("{}: {reason}", self.call) }
            }
            // A DMA mapping, the exporter of a dma-buf and a firmware command end in EIO too, on behalf of one caller. Whoever
            // hears `Gone` takes the device from all, so the device is asked.
            _ if may_be_gone(errno) && self.device.has_gone() => {
                HcaError::Gone { hca, reason: format!("{}: {reason}", self.call) }
            }
            _ => HcaError::Driver { hca, call: self.call, errno, reason },
        }
    }

    /// A refusal of the caller's argument.
    pub(crate) fn invalid(self, reason: impl Into<String>) -> HcaError {
        HcaError::Invalid { hca: self.hca.to_owned(), call: self.call, reason: reason.into() }
    }
}

/// A failure to set out for this address: where the kernel found no neighbour or no route, that is told apart.
pub(crate) fn toward(gid: Gid, error: HcaError) -> HcaError {
    match error {
        HcaError::Driver { hca, errno, reason, .. }
            if matches!(
                Errno::from_raw_os_error(errno),
                Errno::TIMEDOUT | Errno::HOSTUNREACH | Errno::NETUNREACH | Errno::ADDRNOTAVAIL
            ) =>
        {
            HcaError::Unreachable { hca, gid: Ipv6Addr::from(gid.0), reason }
        }
        other => other,
    }
}

/// What a refused post means (ibv_post_send(3): EINVAL for a bad request or state, ENOMEM for a full queue).
pub(crate) fn post_error(errno: i32) -> PostError {
    match Errno::from_raw_os_error(errno) {
        Errno::NOMEM | Errno::AGAIN | Errno::NOSPC => PostError::Full,
        Errno::NODEV | Errno::IO | Errno::NXIO => PostError::Gone,
        _ => PostError::Unsupported,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Present;

    impl Presence for Present {
        fn has_gone(&self) -> bool {
            false
        }
    }

    const FAILED: Failed<'_> = Failed { hca: "rxe0", device: &Present, call: "ibv_reg_mr", resource: "memory regions" };
    const OF_ONE_THAT_WENT: Failed<'_> = Failed { device: &Opening, ..FAILED };

    #[test]
    fn each_kind_of_errno_is_told_apart_and_kept() {
        assert!(matches!(FAILED.with(Errno::NOMEM.raw_os_error()), HcaError::Exhausted { .. }));
        assert!(matches!(FAILED.with(Errno::OPNOTSUPP.raw_os_error()), HcaError::Unsupported { .. }));
        let odd = FAILED.with(524);
        assert!(matches!(odd, HcaError::Driver { errno: 524, .. }), "{odd}");
        assert!(odd.to_string().contains("rxe0") && odd.to_string().contains("ibv_reg_mr"), "{odd}");
    }

    #[test]
    fn an_address_that_nothing_leads_to_is_told_from_a_driver_that_fails() {
        let gid = Gid([0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        for errno in [Errno::TIMEDOUT, Errno::HOSTUNREACH, Errno::NETUNREACH, Errno::ADDRNOTAVAIL] {
            let error = toward(gid, FAILED.with(errno.raw_os_error()));
            assert!(matches!(error, HcaError::Unreachable { .. }), "{error}");
            assert!(error.to_string().contains("fe80::1"), "{error}");
        }
        assert!(matches!(toward(gid, FAILED.with(524)), HcaError::Driver { errno: 524, .. }));
        assert!(matches!(toward(gid, OF_ONE_THAT_WENT.with(Errno::IO.raw_os_error())), HcaError::Gone { .. }));
    }

    #[test]
    fn a_device_is_gone_when_it_answers_no_more_and_not_for_the_errno_of_one_call() {
        for errno in [Errno::IO, Errno::NODEV, Errno::NXIO].map(Errno::raw_os_error) {
            let of_one_call = FAILED.with(errno);
            assert!(matches!(of_one_call, HcaError::Driver { errno: kept, .. } if kept == errno), "{of_one_call}");
            assert!(matches!(OF_ONE_THAT_WENT.with(errno), HcaError::Gone { .. }), "{errno}");
        }
        // Nobody is asked about what no device says that is gone.
        assert!(matches!(OF_ONE_THAT_WENT.with(Errno::NOMEM.raw_os_error()), HcaError::Exhausted { .. }));
    }

    #[test]
    fn a_missing_library_is_named_with_what_to_install() {
        let error = AbsentError::NoLibrary { name: "libibverbs.so.1", reason: "no such file".to_owned() };
        assert!(error.to_string().contains("rdma-core"), "{error}");
    }

    #[test]
    fn both_ways_of_returning_an_errno_are_understood() {
        assert_eq!(status(0), Ok(()));
        assert_eq!(status(22), Err(22));
        assert!(status(-1).is_err());
    }
}
