//! Links the unwinder into gdrctl rather than loading it at each start.
//!
//! libgcc_s.so is a library more to open, map, bind and initialise (which asks the CPU for its features, slow in guests): a
//! tenth of the time that a run over a captured tree takes. libgcc_eh.a, of every GCC, is the same code.

use std::env;
use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var("CARGO_CFG_TARGET_ENV").as_deref() != Ok("gnu") {
        return;
    }
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
