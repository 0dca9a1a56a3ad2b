//! The journal: what a later daemon must know of this one's sessions and leases, in a file that only grows until it is
//! written anew.
//!
//! Role: frames, checks and the file. What is written when is the state machine's; it never waits for the disk: the file
//! lives beside the sockets, on tmpfs, since the descriptors that give it a meaning end with the kernel as well. A daemon
//! that is killed loses nothing that write(2) took, so nothing is ever synced.
//!
//! A frame is only cut off where a daemon was killed while it wrote the last one, whose effects had not begun then.
//! Anything else that does not fit makes the whole journal worthless: better no session than one that is not so.
//!
//! Must not know: what the records mean.

mod file;
mod frame;

pub(crate) use file::JournalFile;
