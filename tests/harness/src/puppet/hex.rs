//! Bytes as text.

use anyhow::{Context as _, ensure};

/// Two digits a byte.
pub(crate) fn encode(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The bytes again.
pub(crate) fn decode(text: &str) -> anyhow::Result<Vec<u8>> {
    ensure!(text.len().is_multiple_of(2) && text.is_ascii(), "{text} is no hex");
    let pairs = (0..text.len()).step_by(2).map(|at| text.get(at..at + 2).unwrap_or_default());
    pairs.map(|pair| u8::from_str_radix(pair, 16).with_context(|| format!("{pair} is no hex"))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_back() {
        assert_eq!(encode(&[0, 0xff, 0x1a]), "00ff1a");
        assert_eq!(decode("00ff1a").unwrap(), [0, 0xff, 0x1a]);
        assert!(decode("0").is_err() && decode("zz").is_err());
    }
}
