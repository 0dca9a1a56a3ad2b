//! Submission and completion rings and the generation page, on shared memory.
#![forbid(unsafe_code)]
