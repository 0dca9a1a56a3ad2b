//! The daemon starts on hosts without RDMA or GPU libraries: it names none of them to the dynamic loader.
#![forbid(unsafe_code)]

use std::process::Command;

#[test]
fn no_hardware_library_is_needed_to_start() {
    let output = Command::new("readelf").args(["--dynamic", "--wide", env!("CARGO_BIN_EXE_gdrd")]).output();
    let output = output.expect("readelf of package binutils, which the compiler needs too");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let shown = String::from_utf8_lossy(&output.stdout);
    let needed: Vec<&str> = shown.lines().filter(|line| line.contains("(NEEDED)")).collect();
    assert!(needed.iter().any(|line| line.contains("libc.so")), "{shown}");
    for library in ["ibverbs", "rdmacm", "mlx5", "cuda", "nvidia"] {
        assert!(!needed.iter().any(|line| line.contains(library)), "{library}: {needed:?}");
    }
}
