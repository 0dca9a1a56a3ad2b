//! A hostile client of a ring, played from the fuzzer's bytes.
#![no_main]

#[path = "../../../proto/ring/tests/hostile/driver.rs"]
mod driver;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    driver::drive(data);
});
