//! Async Rust client of gdrd.
#![forbid(unsafe_code)]
