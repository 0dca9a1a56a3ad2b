//! Generated code of the gdrd.v1 API.
#![forbid(unsafe_code)]
