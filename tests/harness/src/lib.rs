//! Starts daemons and clients for tests that drive real processes, and looks at them from outside.
//!
//! Role: a [`Daemon`] is a real `gdrd` in a folder of its own. A [`Puppet`] is a client process that does what a test
//! tells it, one command at a time: between two commands it stands still, so a test kills it at an exact stage and
//! never by guessing a time. A [`Footprint`] is what `/proc` shows of a process, without asking it.
//!
//! Owner of state: each of these owns its process and ends it when dropped.
//!
//! It must not know the daemon's insides: what it sees is what any process of the host could see. Waits have one
//! generous bound, [`PATIENCE`], which only a hang reaches.
#![forbid(unsafe_code)]

mod binaries;
mod daemon;
mod footprint;
mod lines;
mod process;
mod puppet_handle;
pub mod script;
mod users;

use std::time::Duration;

pub use binaries::{binary, puppet_binary};
pub use daemon::{Daemon, DaemonOptions};
pub use footprint::{Footprint, anonymous_bytes};
pub use lines::Lines;
pub use process::{kill_pid, wait_until};
pub use puppet_handle::{CommandFailed, Puppet};
pub use users::{Program, User, as_root_of_a_user_namespace};

/// How long any one wait may take before it counts as a hang. Far beyond what a loaded machine needs.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// Ends the test with what went wrong. A harness that cannot do its part has no caller to hand an error to.
#[allow(clippy::panic, reason = "this is the one place where the harness fails a test")]
pub(crate) fn fail(what: std::fmt::Arguments<'_>) -> ! {
    panic!("{what}")
}
