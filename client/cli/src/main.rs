//! Command line of gdrd.
#![forbid(unsafe_code)]

fn main() {}
