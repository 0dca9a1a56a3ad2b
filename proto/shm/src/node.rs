//! Pages from a chosen NUMA node, by the memory policy of the thread that allocates them.
//!
//! fallocate(2) on a memfd takes its pages by the policy of the calling thread, of hugetlbfs too (mm/shmem.c,
//! fs/hugetlbfs/inode.c): so nothing has to be mapped for mbind(2).

use std::ffi::{c_int, c_long, c_ulong};
use std::ptr;

use rustix::io::Errno;

use crate::error::ShmError;

/// `MPOL_PREFERRED` and `MPOL_BIND` (include/uapi/linux/mempolicy.h).
const PREFERRED: c_int = 1;
const BIND: c_int = 2;
/// The kernel has no more nodes (CONFIG_NODES_SHIFT is at most 10).
const MAX_NODES: usize = 1024;
const WORD_BITS: usize = c_ulong::BITS as usize;
/// One more than the bits of a mask, as both calls want it (set_mempolicy(2), "C library/kernel differences").
const MAX_NODE_ARGUMENT: c_ulong = MAX_NODES as c_ulong + 1;

/// What happens when the node has no page left.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeRule {
    /// Another node's are taken.
    First,
    /// The allocation fails.
    Only,
}

/// Runs `run` while this thread takes new pages from `node`; its policy is as before afterwards. Memory that `run` touches for
/// the first time comes from there too.
///
/// # Errors
/// [`ShmError::Kernel`] when the kernel knows no such node, or lets this process have no policy (containers often forbid it);
/// nothing was run then.
pub fn on_node<T>(node: u32, rule: NodeRule, run: impl FnOnce() -> T) -> Result<T, ShmError> {
    let before = Policy::current()?;
    let mode = match rule {
        NodeRule::First => PREFERRED,
        NodeRule::Only => BIND,
    };
    Policy::of(mode, node)?.set()?;
    let _restored = Restored(before);
    Ok(run())
}

/// A thread's memory policy.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Policy {
    mode: c_int,
    nodes: [c_ulong; MAX_NODES / WORD_BITS],
}

impl Policy {
    fn of(mode: c_int, node: u32) -> Result<Self, ShmError> {
        let mut policy = Self { mode, nodes: [0; MAX_NODES / WORD_BITS] };
        let at = usize::try_from(node).unwrap_or(usize::MAX);
        let word = policy.nodes.get_mut(at / WORD_BITS).ok_or_else(|| refused("set_mempolicy", Errno::INVAL))?;
        *word |= 1 << (at % WORD_BITS);
        Ok(policy)
    }

    fn current() -> Result<Self, ShmError> {
        let mut policy = Self { mode: 0, nodes: [0; MAX_NODES / WORD_BITS] };
        let (mode, nodes, most) = (&raw mut policy.mode, policy.nodes.as_mut_ptr(), MAX_NODE_ARGUMENT);
        let (nowhere, no_flags): (*const u8, c_ulong) = (ptr::null(), 0);
        // SAFETY: get_mempolicy(2) with no flags writes one int and a mask of `most` - 1 bits, both of this value, which
        // outlives the call.
        let returned = unsafe { libc::syscall(libc::SYS_get_mempolicy, mode, nodes, most, nowhere, no_flags) };
        check("get_mempolicy", returned)?;
        Ok(policy)
    }

    fn set(&self) -> Result<(), ShmError> {
        let (mode, nodes, most) = (self.mode, self.nodes.as_ptr(), MAX_NODE_ARGUMENT);
        // SAFETY: set_mempolicy(2) reads a mask of `most` - 1 bits, which this value holds, and changes no memory.
        let returned = unsafe { libc::syscall(libc::SYS_set_mempolicy, mode, nodes, most) };
        check("set_mempolicy", returned)
    }
}

/// Sets the policy back, whatever became of the run.
struct Restored(Policy);

impl Drop for Restored {
    fn drop(&mut self) {
        let restored = self.0.set();
        debug_assert!(restored.is_ok(), "the kernel gave this policy: {restored:?}");
    }
}

fn check(call: &'static str, returned: c_long) -> Result<(), ShmError> {
    if returned == 0 {
        return Ok(());
    }
    let errno = std::io::Error::last_os_error().raw_os_error().unwrap_or(0);
    Err(refused(call, Errno::from_raw_os_error(errno)))
}

fn refused(call: &'static str, source: Errno) -> ShmError {
    ShmError::Kernel { call, len_bytes: 0, source }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;

    /// Whether this process may have policies at all; in some containers none may.
    fn may_choose() -> bool {
        Policy::current().and_then(|policy| policy.set()).is_ok()
    }

    #[test]
    fn the_policy_holds_during_the_run_and_not_after_even_of_one_that_panics() {
        if !may_choose() {
            assert!(on_node(0, NodeRule::First, || ()).is_err());
            return;
        }
        let before = Policy::current().unwrap();
        let during = on_node(0, NodeRule::Only, || Policy::current().unwrap()).unwrap();
        assert_eq!((during.mode, during.nodes[0]), (BIND, 1));
        assert_eq!(Policy::current().unwrap(), before);
        let preferred = on_node(0, NodeRule::First, || Policy::current().unwrap()).unwrap();
        assert_eq!((preferred.mode, preferred.nodes[0]), (PREFERRED, 1));
        assert!(catch_unwind(|| on_node(0, NodeRule::Only, || panic!("in the run"))).is_err());
        assert_eq!(Policy::current().unwrap(), before);
    }

    #[test]
    fn a_node_that_is_not_there_is_refused_and_nothing_runs() {
        for node in [1023, 1024, u32::MAX] {
            let ran = std::cell::Cell::new(false);
            assert!(on_node(node, NodeRule::Only, || ran.set(true)).is_err(), "{node}");
            assert!(!ran.get());
        }
    }
}
