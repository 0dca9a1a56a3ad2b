//! What can go wrong with a segment. Errors name the range or the descriptor's property, and keep
//! the kernel's errno as source.

use rustix::io::Errno;

use crate::seal::Seals;

/// Why a segment could not be made, mapped, sealed or accessed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ShmError {
    /// A range that does not lie in the segment. The caller's fault.
    #[error("range of {len_bytes} bytes at offset {offset} is outside the segment of {segment_len_bytes} bytes")]
    OutOfRange {
        /// Start of the range asked for.
        offset: u64,
        /// Length of the range asked for.
        len_bytes: u64,
        /// Length of the segment.
        segment_len_bytes: u64,
    },
    /// An atomic at an offset that its size does not divide. The caller's fault.
    #[error("offset {offset} is not aligned to {align_bytes} bytes")]
    Misaligned {
        /// Offset asked for.
        offset: u64,
        /// Alignment needed.
        align_bytes: u64,
    },
    /// A write, or a word that could be written, in a segment mapped read-only.
    #[error("the segment is mapped read-only")]
    ReadOnly,
    /// A length that cannot be mapped: zero, more than the address space, or more than allowed.
    #[error("a segment of {len_bytes} bytes cannot be mapped: between 1 and {max_bytes} are allowed")]
    Length {
        /// Length asked for, or found in the descriptor.
        len_bytes: u64,
        /// Longest segment that this call maps.
        max_bytes: u64,
    },
    /// An array of slots whose count is not a power of two.
    #[error("{count} slots: the count must be a power of two")]
    SlotCount {
        /// Count asked for.
        count: u32,
    },
    /// A foreign descriptor that its owner could still shrink, which would raise SIGBUS here.
    #[error("the descriptor has seals {found:?}, F_SEAL_SHRINK is missing; add it before sending")]
    NotSealed {
        /// Seals found.
        found: Seals,
    },
    /// A foreign descriptor on hugetlbfs, whose pages may be gone after a hole was punched.
    #[error("the descriptor is on hugetlbfs, which is mapped only from a trusted sender")]
    HugePagesRefused,
    /// A call to the kernel was refused.
    #[error("{call} on a segment of {len_bytes} bytes")]
    Kernel {
        /// System call, as its man page names it.
        call: &'static str,
        /// Length of the segment, 0 where it is not known yet.
        len_bytes: u64,
        /// What the kernel answered.
        #[source]
        source: Errno,
    },
}
