//! Words of a line as the tool printed them, where a paste has changed them: run together, in small letters, in quotes, with
//! commas for tabs, or with another sign for the X.
//!
//! A terminal that wraps at a tab stop drops the blanks of the tab, so that copying joins two cells of every line at the
//! same place (`NODENODE`, `NIC8NIC9`): cells left so would shift all that follow.

use std::borrow::Cow;

use crate::topo_m::line::{is_cell, level, numbered};

/// The line with such words put right; everything else stays, blanks and tabs too.
pub(super) fn apart(line: &str) -> Cow<'_, str> {
    let line = if line.contains(['"', ',', ';']) { Cow::Owned(joined_x(line)) } else { Cow::Borrowed(line) };
    let has_small_x = line.split_whitespace().any(|word| word == "x");
    let has_affinity = line.contains("Affinity") || line.contains("affinity");
    let mend = |word| mended(word, has_small_x, has_affinity);
    if line.split_whitespace().all(|word| mend(word).is_none()) {
        return line;
    }
    let mut out = String::with_capacity(line.len() + 8);
    for piece in line.split_inclusive(char::is_whitespace) {
        let word = piece.trim_end();
        match mend(word) {
            Some(mended) => {
                out.push_str(&mended);
                out.push_str(piece.get(word.len()..).unwrap_or_default());
            }
            None => out.push_str(piece),
        }
    }
    Cow::Owned(out)
}

/// The X of a cell without the blanks that the tool puts around it, where other signs end the cell.
fn joined_x(line: &str) -> String {
    [",", ";", "\""]
        .iter()
        .fold(line.to_owned(), |line, sign| line.replace(&format!("{sign} X {sign}"), &format!("{sign}X{sign}")))
}

/// What stands for a word; `None` for the word itself.
fn mended(word: &str, has_small_x: bool, has_affinity: bool) -> Option<String> {
    if matches!(word, "✕" | "✖" | "×" | "╳") {
        return Some("X".to_owned());
    }
    if !word.is_ascii() {
        return None;
    }
    let unquoted = word.trim_matches('"');
    if unquoted.len() < word.len() && !word.contains([',', ';']) {
        return Some(mended(unquoted, has_small_x, has_affinity).unwrap_or_else(|| unquoted.to_owned()));
    }
    let capitals = word.to_ascii_uppercase();
    let plain = capitals.trim_end_matches(':');
    if capitals != word && (numbered(plain, "GPU") || numbered(plain, "NIC") || has_small_x && is_cell(plain)) {
        return Some(capitals);
    }
    if word.contains([',', ';']) {
        let cells = cells(word);
        let is_row = cells.len() > 2 && cells.iter().any(|cell| level(cell).is_some());
        return (is_row || has_affinity && cells.iter().any(|cell| numbered(cell, "GPU"))).then(|| cells.join("\t"));
    }
    let pieces = levels(word).or_else(|| names(word))?;
    Some(pieces.join(" "))
}

/// The cells of a line of comma-separated values, without their quotes. The commas of a list of CPUs, between digits,
/// separate none; such a list ascends, so that the next cell begins where it does not (`0-23,0,N/A`).
fn cells(word: &str) -> Vec<&str> {
    let number = |digits: &str| digits.parse::<u32>().ok();
    let is_no_digit = |c: char| !c.is_ascii_digit();
    let mut cells = Vec::new();
    let mut begin = 0;
    for (at, sign) in word.match_indices([',', ';']) {
        let (before, after) = (word.get(begin..at).unwrap_or_default(), word.get(at + 1..).unwrap_or_default());
        let last = before.rsplit(is_no_digit).next().and_then(number);
        let next = after.split(is_no_digit).next().and_then(number);
        if sign == "," && last.zip(next).is_some_and(|(last, next)| last < next) {
            continue;
        }
        cells.push(before.trim_matches('"'));
        begin = at + 1;
    }
    cells.push(word.get(begin..).unwrap_or_default().trim_matches('"'));
    cells
}

/// Levels that one word is made of, if these are several.
fn levels(word: &str) -> Option<Vec<&str>> {
    let mut pieces = Vec::new();
    let mut rest = word;
    while !rest.is_empty() {
        let fixed = ["NODE", "N/A", "SYS", "SOC", "PIX", "PXB", "PHB", "X"];
        let end = fixed.iter().find(|level| rest.starts_with(**level)).map(|level| level.len());
        let end = end.or_else(|| {
            let digits = rest.strip_prefix("NV")?.bytes().take_while(u8::is_ascii_digit).count();
            (digits > 0).then_some(2 + digits)
        })?;
        let (piece, after) = rest.split_at_checked(end)?;
        pieces.push(piece);
        rest = after;
    }
    (pieces.len() > 1 && pieces.iter().any(|piece| *piece != "X")).then_some(pieces)
}

/// Names of columns that one word is made of, if these are several: the letters it begins with, or those of GPUs and NICs,
/// come again right behind a digit.
fn names(word: &str) -> Option<Vec<&str>> {
    let letters = word.split(|c: char| !c.is_ascii_alphabetic()).next().filter(|letters| letters.len() > 1)?;
    let mut pieces = Vec::new();
    let mut begin = 0;
    let starts = word.char_indices().filter(|(at, _)| {
        let rest = word.get(*at..).unwrap_or_default();
        let is_behind_digit = at.checked_sub(1).and_then(|at| word.as_bytes().get(at)).is_some_and(u8::is_ascii_digit);
        is_behind_digit && [letters, "GPU", "NIC"].iter().any(|name| rest.starts_with(name))
    });
    for (at, _) in starts {
        pieces.extend(word.get(begin..at));
        begin = at;
    }
    pieces.extend(word.get(begin..));
    (pieces.len() > 1).then_some(pieces)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_run_together_come_apart_and_others_stay() {
        for (given, right) in [
            ("GPU0\t X \tNODENODE     SYS\t0-31,64-95", "GPU0\t X \tNODE NODE     SYS\t0-31,64-95"),
            ("NIC12 NV18NV4 XPIX SYSX N/AN/A", "NIC12 NV18 NV4 X PIX SYS X N/A N/A"),
            ("NIC8NIC9 GPU7NIC0 mlx5_10mlx5_11 ibp1s0ibp2s0", "NIC8 NIC9 GPU7 NIC0 mlx5_10 mlx5_11 ibp1s0 ibp2s0"),
            (
                "rocep4s0f0 roceP2p1s0f0 mlx5_bond_0 rdmap0s6 XX NODES",
                "rocep4s0f0 roceP2p1s0f0 mlx5_bond_0 rdmap0s6 XX NODES",
            ),
            ("gpu0 x nv4 node sys n/a", "GPU0 X NV4 NODE SYS N/A"),
            ("nic0: mlx5_0", "NIC0: mlx5_0"),
            ("a node of the sys on GPU0", "a node of the sys on GPU0"),
            ("GPU0,X,NODE,0-31,64-95", "GPU0\tX\tNODE\t0-31,64-95"),
            (",GPU0,NIC0,CPU Affinity", "\tGPU0\tNIC0\tCPU Affinity"),
            ("GPU0,X,0-27,56-83,0,N/A", "GPU0\tX\t0-27,56-83\t0\tN/A"),
            ("GPU0,X,NODE,0-71,0,2-17,N/A", "GPU0\tX\tNODE\t0-71\t0,2-17\tN/A"),
            ("\"GPU0\",\" X \",\"PIX\",\"0-7,16\",\"0\"", "GPU0\tX\tPIX\t0-7,16\t0"),
            ("\"GPU0\"\t\" X \"\t\"NODENODE\"\t\"0\"", "GPU0\tX\tNODE NODE\t0"),
            ("of GPU0,GPU1,GPU2", "of GPU0,GPU1,GPU2"),
            ("GPU1 PIX ✕", "GPU1 PIX X"),
            ("", ""),
        ] {
            assert_eq!(apart(given), right, "{given:?}");
        }
    }
}
