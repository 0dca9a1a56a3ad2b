//! Compiles the .proto files without a `protoc` on the machine: protox parses them in Rust.

use std::error::Error;
use std::path::PathBuf;

use prost::Message as _;

const FILES: [&str; 6] = ["topology", "buffers", "registrations", "queue_pairs", "host", "session"];

fn main() -> Result<(), Box<dyn Error>> {
    let root = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR")?).join("..");
    let files: Vec<PathBuf> = FILES.iter().map(|name| root.join(format!("gdrd/v1/{name}.proto"))).collect();
    for file in &files {
        println!("cargo:rerun-if-changed={}", file.display());
    }
    let descriptors = protox::compile(&files, [&root])?;
    let out = PathBuf::from(std::env::var("OUT_DIR")?);
    std::fs::write(out.join("descriptors.bin"), descriptors.encode_to_vec())?;
    // Without its own transport helpers, a generated `connect` would clash with the Connect call.
    tonic_prost_build::configure().build_transport(false).compile_fds(descriptors)?;
    Ok(())
}
