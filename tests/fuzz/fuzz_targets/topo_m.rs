//! Target `topo_m` of the readers' driver.
#![no_main]
#![allow(dead_code, reason = "each target uses one of the driver's functions")]

#[path = "../../../daemon/topology/tests/hostile/driver.rs"]
mod driver;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    driver::topo_m(data);
});
