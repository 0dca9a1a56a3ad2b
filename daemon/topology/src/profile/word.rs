//! Names in a profile: one word each, whatever characters they hold. `%XX` stands for a byte.

use std::fmt::Write;

/// Characters that names have on real hosts and that mean nothing in a line.
fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"._:+/,@~-".contains(&byte)
}

/// A name as one word.
pub(super) fn encode(name: &str) -> String {
    // A lone `-` means none.
    let all_escaped = name == "-";
    let mut word = String::with_capacity(name.len());
    for byte in name.bytes() {
        if is_plain(byte) && !all_escaped {
            word.push(char::from(byte));
        } else {
            // Writing to a String cannot fail.
            let _ = write!(word, "%{byte:02x}");
        }
    }
    word
}

/// The name that a word stands for.
pub(super) fn decode(word: &str) -> Result<String, String> {
    let bad = || format!("`{word}`: `%` wants two hexadecimal digits, of a byte of UTF-8");
    let mut bytes = Vec::with_capacity(word.len());
    let mut rest = word.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        rest = tail;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let (digits, tail) = rest.split_at_checked(2).ok_or_else(bad)?;
        rest = tail;
        let digit = |place: usize| digits.get(place).and_then(|digit| char::from(*digit).to_digit(16));
        let byte = digit(0).zip(digit(1)).and_then(|(high, low)| u8::try_from(high * 16 + low).ok());
        bytes.push(byte.ok_or_else(bad)?);
    }
    String::from_utf8(bytes).map_err(|_| bad())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_name_is_one_word_and_comes_back() {
        for name in ["mlx5_0", "enp1s0f0np0.100@x", "a b", "#", "a=b", "%41", "-", "bond\n0", "ümläut", "\u{0}"] {
            let word = encode(name);
            assert!(!word.contains([' ', '\n', '#', '=']) && word != "-", "{word}");
            assert_eq!(decode(&word).unwrap(), name);
        }
        assert_eq!(encode("mlx5_bond-0"), "mlx5_bond-0");
        for bad in ["%", "%4", "%zz", "%+1", "%ff"] {
            assert!(decode(bad).unwrap_err().contains(bad), "{bad}");
        }
    }
}
