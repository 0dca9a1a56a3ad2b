//! Shared-memory segments with checked volatile copies and futex wake.
#![allow(unsafe_code)]
