//! Simulated host: GPU memory as memfd and an HCA that really moves bytes.
#![forbid(unsafe_code)]
