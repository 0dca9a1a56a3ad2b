//! Numbers as sentences and tables have them, and what of a text from outside may stand in them, the same everywhere.

/// A rate in Gbit/s for people: whole, below 40 with one digit after the point where that is not zero.
#[must_use]
pub fn gbps(gbps: f64) -> String {
    let text = if gbps < 39.95 { format!("{gbps:.1}") } else { format!("{gbps:.0}") };
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}

/// Whether a character would do something to a terminal or to the order of what stands there: controls (C0, C1) and the
/// embeddings, overrides and isolates of bidirectional text (Unicode Standard Annex 9, 2).
#[must_use]
pub fn is_unsafe(c: char) -> bool {
    c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// `1 NIC`, `2 NICs`. The noun's plural ends in s.
#[must_use]
pub fn counted(count: usize, noun: &str) -> String {
    if count == 1 { format!("1 {noun}") } else { format!("{count} {noun}s") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_as_short_as_they_are_told_apart_by() {
        for (rate, text) in [
            (252.061_538, "252"),
            (100.0, "100"),
            (52.06, "52"),
            (39.96, "40"),
            (31.507_69, "31.5"),
            (15.75, "15.8"),
            (12.5, "12.5"),
            (25.0, "25"),
            (0.0, "0"),
        ] {
            assert_eq!(gbps(rate), text, "{rate}");
        }
    }

    #[test]
    fn one_is_no_plural() {
        assert_eq!([0, 1, 2].map(|count| counted(count, "free GPU")), ["0 free GPUs", "1 free GPU", "2 free GPUs"]);
    }
}
