//! Starts daemons and clients for tests that drive real processes.
#![forbid(unsafe_code)]
