//! Links gdrctl so that it starts fast: a run over a captured tree is mostly its start.
//!
//! - The unwinder is linked in rather than loaded. libgcc_s.so is a library more to open, map, bind and initialise (which
//!   asks the CPU for its features, slow in guests): a tenth of such a run. libgcc_eh.a, of every GCC, is the same code.
//! - It has a fixed address. A position-independent executable has 13,000 pointers to correct at each start, on 50 pages
//!   copied for it: another tenth. What is given up is a random address of gdrctl's own code; its libraries, stack and heap
//!   keep theirs, it has no privilege to lose, and gdrd itself stays position-independent.

use std::env;
use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var("CARGO_CFG_TARGET_ENV").as_deref() != Ok("gnu") {
        return;
    }
    println!("cargo::rustc-link-arg-bins=-no-pie");
    // Cross builds name their own compiler by the linker; without one of this name libgcc_s.so does as ever.
    let is_native = env::var("HOST").ok() == env::var("TARGET").ok();
    let asked = Command::new("cc").arg("-print-file-name=libgcc_eh.a").output().ok().filter(|_| is_native);
    let Some(output) = asked else { return };
    let path = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    // The bare name comes back where there is none.
    if let Some(folder) = Path::new(&path).parent().filter(|_| Path::new(&path).is_file()) {
        println!("cargo::rustc-link-search=native={}", folder.display());
        println!("cargo::rustc-link-lib=static:-bundle=gcc_eh");
    }
}
