//! The client's hit cache against a plain list, played from the fuzzer's bytes.
#![no_main]

#[path = "../../../client/rust/tests/hits/driver.rs"]
mod driver;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    driver::drive(data);
});
