//! Text that people paste: terminals' colour codes, quoting and table bars around what a tool printed.

/// Removes escape sequences of terminals (ECMA-48: CSI and OSC), also those of which the paste lost the
/// escape character, and control characters other than tab. Table bars become blanks.
pub(crate) fn clean(line: &str) -> String {
    let mut out = String::with_capacity(line.len());
    let mut rest = line;
    while let Some(next) = rest.chars().next() {
        let escaped = rest.strip_prefix('\u{1b}');
        let after = escaped
            .and_then(|after| sequence(after).or_else(|| operating_system_command(after)))
            .or_else(|| colour(rest));
        if let Some(after) = after {
            rest = after;
            continue;
        }
        rest = rest.get(next.len_utf8()..).unwrap_or_default();
        match next {
            '\t' => out.push('\t'),
            '|' | '\u{a0}' => out.push(' '),
            other if !other.is_control() => out.push(other),
            _ => {}
        }
    }
    out
}

/// What follows `[ parameters final`.
fn sequence(text: &str) -> Option<&str> {
    let body = text.strip_prefix('[')?;
    let end = body.find(|c: char| !matches!(c, '\u{20}'..='\u{3f}'))?;
    let last = body.get(end..)?.chars().next()?;
    matches!(last, '\u{40}'..='\u{7e}').then(|| body.get(end + last.len_utf8()..)).flatten()
}

/// What follows `] … BEL` or `] … ESC \`.
fn operating_system_command(text: &str) -> Option<&str> {
    let body = text.strip_prefix(']')?;
    let bell = body.find('\u{7}').map(|at| at + 1);
    let terminator = body.find("\u{1b}\\").map(|at| at + 2);
    let end = [bell, terminator].into_iter().flatten().min()?;
    body.get(end..)
}

/// What follows `[4m`: colours whose escape character was lost on the way.
fn colour(text: &str) -> Option<&str> {
    let body = text.strip_prefix('[')?;
    let end = body.find(|c: char| !c.is_ascii_digit() && c != ';')?;
    body.get(end..)?.strip_prefix('m')
}

/// The one number of a list such as `0`, `0-1` or `0,8,252-255`; `None` if there are several or none.
pub(crate) fn sole_number(list: &str) -> Option<u16> {
    list.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escape_sequences_go_and_text_stays() {
        for (given, left) in [
            ("\u{1b}[4mGPU0\tGPU1\u{1b}[0m", "GPU0\tGPU1"),
            ("[4mGPU0[0m", "GPU0"),
            ("\u{1b}]0;title\u{7}GPU0", "GPU0"),
            ("\u{1b}]0;title\u{1b}\\GPU0", "GPU0"),
            ("GPU[0]\t\t: x", "GPU[0]\t\t: x"),
            ("| GPU0 | X |\r", "  GPU0   X  "),
            ("\u{1b}", ""),
            ("\u{1b}[", "["),
            ("[12", "[12"),
        ] {
            assert_eq!(clean(given), left, "{given:?}");
        }
    }
}
