//! Node-local daemon that lends registered GPU buffers and queue pairs.
#![forbid(unsafe_code)]

fn main() {}
