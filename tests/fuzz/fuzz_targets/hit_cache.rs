//! The client's hit cache against a plain list, played from the fuzzer's bytes.
#![no_main]
#![allow(dead_code, reason = "the client uses more of the cache than the driver does")]

// The cache's own source in the place of the client, which would bring its whole RPC stack along: minutes of building.
extern crate self as gdrd_client;

#[path = "../../../client/rust/tests/hits/driver.rs"]
mod driver;
#[path = "../../../client/rust/src/hits/mod.rs"]
mod hits;

pub use hits::{EntryId, Hit, HitCache, NotInserted, Region};

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    driver::drive(data);
});
