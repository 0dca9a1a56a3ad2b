//! PCIe topology of a host, P2P levels, GPU-NIC pairing and advice.
#![forbid(unsafe_code)]
