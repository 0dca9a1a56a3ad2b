//! Content of buffers: drawn from a seed, digested, counted.

use std::io::Read;

use gdrd_shm::Segment;
use rand::rngs::StdRng;
use rand::{RngCore as _, SeedableRng as _};
use sha2::{Digest as _, Sha256};

/// Bytes handled at once.
const PIECE_BYTES: usize = 64 << 10;

/// Fills the whole memory.
pub(crate) fn fill(memory: &Segment, seed: u64) -> anyhow::Result<()> {
    let mut random = StdRng::seed_from_u64(seed);
    let mut piece = vec![0; PIECE_BYTES];
    let mut offset = 0;
    while offset < memory.len_bytes() {
        let len = usize::try_from(memory.len_bytes() - offset)?.min(PIECE_BYTES);
        let piece = piece.get_mut(..len).unwrap_or_default();
        random.fill_bytes(piece);
        memory.write_from(offset, piece)?;
        offset += len as u64;
    }
    Ok(())
}

/// SHA-256 of all that a reader gives, in hex.
pub(crate) fn digest(mut reader: impl Read) -> anyhow::Result<String> {
    let mut hasher = Sha256::new();
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        match reader.read(&mut piece)? {
            0 => return Ok(crate::hex::encode(hasher.finalize().as_slice())),
            got => hasher.update(piece.get(..got).unwrap_or_default()),
        }
    }
}

/// Bytes that are not zero in what a reader gives.
pub(crate) fn count_nonzero(mut reader: impl Read) -> anyhow::Result<u64> {
    let mut count = 0;
    let mut piece = vec![0; PIECE_BYTES];
    loop {
        match reader.read(&mut piece)? {
            0 => return Ok(count),
            got => count += piece.get(..got).unwrap_or_default().iter().filter(|byte| **byte != 0).count() as u64,
        }
    }
}
