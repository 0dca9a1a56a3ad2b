//! Text that people paste: terminals' colour codes, quoting and table bars around what a tool printed.

mod lines;
mod speakers;

pub(crate) use lines::{plain_lines, unescaped};
pub(crate) use speakers::Speakers;

/// A cleaned line without what shells, logs and tools that run on several hosts put before it (a prompt, a date and time,
/// `node-1: ` of pdsh, clush and dsh, `[1,0]<stdout>:` of mpirun), and who of several hosts or processes printed it, if
/// that is among it.
pub(crate) fn split_prefix(line: &str) -> (Option<&str>, &str) {
    let (mut speaker, mut rest) = (None, line);
    loop {
        let trimmed = rest.trim_start();
        let end = trimmed.find(char::is_whitespace).unwrap_or(trimmed.len());
        let (word, after) = trimmed.split_at(end);
        let of_mpirun = word.starts_with('[').then(|| trimmed.find(">:")).flatten().filter(|at| *at < end);
        if let Some((name, after)) = of_mpirun.and_then(|at| trimmed.split_at_checked(at + 2)) {
            (speaker, rest) = (speaker.or(Some(name)), after);
        } else if is_host(word) {
            (speaker, rest) = (speaker.or(Some(word)), after);
        } else if is_time(word) {
            rest = after;
        } else if let Some(after) = after_prompt(trimmed) {
            rest = after;
        } else {
            return (speaker, rest);
        }
    }
}

/// What follows the prompt of a shell: `[root@node-1 ~]$ `, `user@host:~/dir$ `, `(env) root@host:/# `.
fn after_prompt(line: &str) -> Option<&str> {
    let end = ["$ ", "# ", "% ", "> "].iter().filter_map(|sign| line.find(sign)).min()?;
    let (prompt, after) = line.split_at_checked(end)?;
    let is_bracketed = prompt.starts_with('[') && prompt.ends_with(']');
    let is_prompt = is_bracketed || prompt.split_whitespace().any(|word| word.contains('@'));
    (is_prompt && !prompt.contains('\t')).then(|| after.get(2..)).flatten()
}

/// A line as docker compose prints it, `name | line`, without the name. Where a cell follows the
/// bar, the name is that of a row in a table, and stays.
pub(crate) fn without_service(line: &str, is_cell: impl Fn(&str) -> bool) -> &str {
    let Some((name, rest)) = line.split_once('|') else { return line };
    let cleaned = clean(rest);
    let is_first_a_cell = cleaned.split_whitespace().next().is_some_and(is_cell);
    if clean(name).split_whitespace().count() == 1 && !is_first_a_cell { rest } else { line }
}

/// `node-1:` or `[rank0]:`, but not `NIC0:`, which is of a legend.
fn is_host(word: &str) -> bool {
    word.strip_suffix(':').is_some_and(|host| {
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        let is_column = ["NIC", "nic", "NVMe", "GPU"].iter().any(|kind| host.starts_with(kind));
        !is_column && host.starts_with(|c: char| c.is_ascii_alphanumeric()) && !host.contains(':')
    })
}

/// `2026-11-29`, `18:00:00.5`, `2026-11-29T18:00:00Z`.
fn is_time(word: &str) -> bool {
    let of_time = |c: char| c.is_ascii_digit() || ":.-,+TZ/".contains(c);
    let count = |part: char| word.matches(part).count();
    // The domain of a PCI address has four digits.
    let is_address = word.find(':').is_some_and(|at| at >= 4 && !word.contains(['-', 'T']));
    word.starts_with(|c: char| c.is_ascii_digit())
        && !is_address
        && word.chars().all(of_time)
        && (count(':') >= 2 || count('-') == 2 && !word.contains(','))
}

/// Removes escape sequences of terminals (ECMA-48: CSI and OSC), also those of which the paste lost the
/// escape character, control characters other than tab, and what HTML, lists of strings and `cat -A` put. Table bars
/// become blanks.
pub(crate) fn clean(line: &str) -> String {
    let line = without_quotes(line.strip_suffix('$').unwrap_or(line));
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
        if let Some((sign, after)) = markup(rest) {
            out.push(sign);
            rest = after;
            continue;
        }
        rest = rest.get(next.len_utf8()..).unwrap_or_default();
        match next {
            '\t' => out.push('\t'),
            '|' | '\u{a0}' | '\u{2500}'..='\u{256c}' => out.push(' '),
            other if !other.is_control() => out.push(other),
            _ => {}
        }
    }
    out
}

/// A line that is one string of a list, `"…",`, without its quotes. Those of a row of quoted cells stay.
fn without_quotes(line: &str) -> &str {
    let element = line.trim().trim_start_matches(['[', '-', ' ']).trim_end_matches([',', ']']);
    ['"', '\'']
        .into_iter()
        .find_map(|sign| element.strip_prefix(sign)?.strip_suffix(sign).filter(|body| !body.contains(sign)))
        .unwrap_or(line)
}

/// What a named character or a tag of HTML stands for, or the `^I` of `cat -A`, and what follows it.
fn markup(text: &str) -> Option<(char, &str)> {
    const SIGNS: [(&str, char); 9] = [
        ("&nbsp;", ' '),
        ("&#160;", ' '),
        ("&#xa0;", ' '),
        ("&#9;", '\t'),
        ("&Tab;", '\t'),
        ("&lt;", '<'),
        ("&gt;", '>'),
        ("&amp;", '&'),
        ("^I", '\t'),
    ];
    const TAGS: [&str; 16] = [
        "pre", "code", "span", "table", "thead", "tbody", "tr", "td", "th", "p", "br", "div", "html", "body", "b",
        "strong",
    ];
    let sign = SIGNS.iter().find_map(|(name, sign)| Some((*sign, text.strip_prefix(name)?)));
    sign.or_else(|| {
        let (tag, after) = lines::split_tag(text)?;
        let name = tag.trim_matches('/').split_whitespace().next()?;
        TAGS.iter().any(|tag| tag.eq_ignore_ascii_case(name)).then_some((' ', after))
    })
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
    fn prefixes_of_hosts_and_times_go() {
        for (given, left) in [
            ("node-1: GPU0\tX", " GPU0\tX"),
            ("node-1: \tGPU0", " \tGPU0"),
            ("[1,0]<stdout>:GPU0\tX", "GPU0\tX"),
            ("[1,0]<stdout>:\tGPU0", "\tGPU0"),
            ("[1,0]<stdout>: GPU0", " GPU0"),
            ("2026-11-29T18:00:00.5Z node-1: GPU0", " GPU0"),
            ("2026-11-29 18:00:00,123 GPU0", " GPU0"),
            ("NIC0: mlx5_0", "NIC0: mlx5_0"),
            ("0-15,32-47\t0", "0-15,32-47\t0"),
            ("\tGPU0\tX", "\tGPU0\tX"),
            ("[rank0]: GPU0\tX", " GPU0\tX"),
            ("[pod/a] GPU0", "[pod/a] GPU0"),
            ("[root@node-1 my dir]$ GPU0\tX", "GPU0\tX"),
            ("(env) user@node-1:~/a b# GPU0\tX", "GPU0\tX"),
            ("GPU0\tX\tPIX # near", "GPU0\tX\tPIX # near"),
            ("", ""),
        ] {
            assert_eq!(split_prefix(given).1, left, "{given:?}");
        }
    }

    #[test]
    fn escape_sequences_go_and_text_stays() {
        for (given, left) in [
            ("\u{1b}[4mGPU0\tGPU1\u{1b}[0m", "GPU0\tGPU1"),
            ("[4mGPU0[0m", "GPU0"),
            ("\u{1b}]0;title\u{7}GPU0", "GPU0"),
            ("\u{1b}]0;title\u{1b}\\GPU0", "GPU0"),
            ("GPU[0]\t\t: x", "GPU[0]\t\t: x"),
            ("| GPU0 | X |\r", "  GPU0   X  "),
            ("<td>GPU0</td><td class=\"a\">X</td>", " GPU0  X "),
            ("&nbsp;GPU0&#9;X^IPIX$", " GPU0\tX\tPIX"),
            ("[1,0]<stdout>: a < b && c", "[1,0]<stdout>: a < b && c"),
            ("│ GPU0 │ X │", "  GPU0   X  "),
            ("\u{1b}", ""),
            ("\u{1b}[", "["),
            ("[12", "[12"),
        ] {
            assert_eq!(clean(given), left, "{given:?}");
        }
    }
}
