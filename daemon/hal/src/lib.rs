//! Narrow hardware traits and the conformance suite every backend passes.
#![forbid(unsafe_code)]
