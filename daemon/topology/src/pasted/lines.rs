//! Lines of a text as the tool printed them, where the paste holds them as HTML, as strings, or behind what `grep` and `diff`
//! put before each.

use std::borrow::Cow;

/// The text with one line of the tool on each line: rows of HTML tables and what `<br>` ends are lines, their cells are
/// between tabs, and what stands right before each line (`topo.txt:`, `12:`, `+`) goes.
pub(crate) fn plain_lines(text: &str) -> Cow<'_, str> {
    let text = html_lines(text);
    match glued(&text) {
        Some(glue) => Cow::Owned(text.lines().map(|line| glue.off(line).to_owned() + "\n").collect()),
        None => text,
    }
}

/// A matrix within a string of JSON or of a programming language, its line ends and tabs written as `\n` and `\t`, or
/// within a list of strings, each a line.
pub(crate) fn unescaped(text: &str) -> Option<String> {
    const SIGNS: [(&str, &str); 6] =
        [("\\n", "\n"), ("\\t", "\t"), ("\", \"", "\n"), ("\",\"", "\n"), ("', '", "\n"), ("','", "\n")];
    let is_escaped = SIGNS.iter().any(|(written, _)| text.contains(written));
    let unescape = |text: String, (written, sign): &(&str, &str)| text.replace(written, sign);
    let ends = |text: &str| text.replace("[\"", "\n").replace("['", "\n").replace("\"]", "\n").replace("']", "\n");
    (is_escaped && text.contains("GPU0")).then(|| SIGNS.iter().fold(ends(text), unescape))
}

/// What a tag of HTML does to lines.
enum Tag {
    EndsLine,
    EndsCell,
    Row(bool),
}

fn tag(text: &str) -> Option<(Tag, &str)> {
    let (body, after) = split_tag(text)?;
    let is_end = body.starts_with('/');
    let name = body.trim_matches('/').split_whitespace().next()?.to_ascii_lowercase();
    let tag = match (name.as_str(), is_end) {
        ("br", _) | ("p" | "div" | "li", true) => Tag::EndsLine,
        ("td" | "th", true) => Tag::EndsCell,
        ("tr", is_end) => Tag::Row(!is_end),
        _ => return None,
    };
    Some((tag, after))
}

/// What is between `<` and `>`, and what follows. A further `<` begins another tag, so that no text is searched twice.
pub(super) fn split_tag(text: &str) -> Option<(&str, &str)> {
    let body = text.strip_prefix('<')?;
    let (tag, after) = body.split_at_checked(body.find(['<', '>'])?)?;
    Some((tag, after.strip_prefix('>')?))
}

fn html_lines(text: &str) -> Cow<'_, str> {
    let is_of_lines = |(at, _): (usize, &str)| text.get(at..).and_then(tag).is_some();
    if !text.match_indices('<').any(is_of_lines) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len());
    let (mut rest, mut is_in_row, mut is_behind_tag) = (text, false, false);
    while let Some(next) = rest.chars().next() {
        if let Some((tag, after)) = tag(rest) {
            match tag {
                Tag::EndsLine => out.push('\n'),
                Tag::EndsCell => out.push('\t'),
                Tag::Row(begins) => {
                    is_in_row = begins;
                    out.push('\n');
                }
            }
            (rest, is_behind_tag) = (after, true);
        } else if is_in_row && is_behind_tag && next.is_whitespace() {
            // Between the cells of a row line ends mean nothing.
            let after = rest.trim_start();
            let blanks = rest.len() - after.len();
            if !after.starts_with('<') {
                out.push_str(rest.get(..blanks).unwrap_or_default());
            }
            (rest, is_behind_tag) = (after, false);
        } else {
            out.push(next);
            rest = rest.get(next.len_utf8()..).unwrap_or_default();
            is_behind_tag = next == '>';
        }
    }
    Cow::Owned(out)
}

/// What stands right before each line.
enum Glue {
    /// `topo.txt:` of `grep`, with the number of the line if it was asked for one.
    File(String),
    /// `12:` of `grep -n`.
    Number,
    /// `+` of `diff`.
    Sign(char),
}

impl Glue {
    fn off<'a>(&self, line: &'a str) -> &'a str {
        match self {
            Self::File(file) => line.strip_prefix(file.as_str()).map_or(line, |rest| numbered(rest).unwrap_or(rest)),
            Self::Number => numbered(line).unwrap_or(line),
            Self::Sign(sign) => line.strip_prefix(*sign).unwrap_or(line),
        }
    }
}

/// What follows `12:`.
fn numbered(line: &str) -> Option<&str> {
    let rest = line.trim_start_matches(|c: char| c.is_ascii_digit());
    rest.strip_prefix(':').filter(|_| rest.len() < line.len())
}

/// What the row of a GPU has right before its name. What hosts and processes are named by has a blank behind it, or brackets.
fn glued(text: &str) -> Option<Glue> {
    text.lines().find_map(|line| {
        let (before, name) = line.split_at_checked(line.find("GPU")?)?;
        let is_row = name.get(3..)?.starts_with(|c: char| c.is_ascii_digit()) && name.contains(char::is_whitespace);
        let is_plain = |c: char| c.is_alphanumeric() || "._-/:+>".contains(c);
        if before.is_empty() || !is_row || !before.chars().all(is_plain) {
            return None;
        }
        if let ("+" | "-" | ">", Some(sign)) = (before, before.chars().next()) {
            return Some(Glue::Sign(sign));
        }
        let file = before.strip_suffix(':')?.trim_end_matches(|c: char| c.is_ascii_digit());
        match file {
            "" => Some(Glue::Number),
            file if file.ends_with(':') => Some(Glue::File(file.to_owned())),
            _ => Some(Glue::File(before.to_owned())),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_html_are_lines_and_cells_are_between_tabs() {
        for (given, lines) in [
            ("a<br>b<br/>c<BR />d", "a\nb\nc\nd"),
            ("<table><tr><td>a</td><td>b</td></tr><tr><td>c</td></tr>", "<table>\n<td>a\t<td>b\t\n\n<td>c\t\n"),
            ("<tr>\n <td>a</td>\n <td>b</td>\n</tr>", "\n<td>a\t<td>b\t\n"),
            ("<pre>a\n <tree> b</pre>", "<pre>a\n <tree> b</pre>"),
        ] {
            assert_eq!(plain_lines(given), lines, "{given}");
        }
        let open = "<br>".to_owned() + &"<".repeat(1 << 20);
        assert_eq!(plain_lines(&open).len(), open.len() - 3, "and in no time");
    }

    #[test]
    fn what_stands_right_before_lines_goes() {
        for (before, after) in
            [("topo.txt:", ""), ("./a/b.txt:12:", ""), ("12:", ""), ("+", ""), ("node-1: ", "node-1: ")]
        {
            let text = format!("{before}\tGPU0\tNIC0\n{before}GPU0\t X \tPIX\n");
            assert_eq!(plain_lines(&text), format!("{after}\tGPU0\tNIC0\n{after}GPU0\t X \tPIX\n"), "{before}");
        }
    }
}
