//! House rules that run as tests: layers, unsafe, licences.
#![forbid(unsafe_code)]
