//! What one line of a paste says: a header, a row, names of a legend.

use crate::level::Level;

/// A device of the header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Column {
    /// `GPU0`, `NIC0`, or the device's own name in older versions.
    pub(super) name: String,
}

impl Column {
    pub(super) fn is_gpu(&self) -> bool {
        numbered(&self.name, "GPU")
    }

    /// A drive of `nvidia-smi topo -m -nvme`.
    pub(super) fn is_drive(&self) -> bool {
        is_drive(&self.name)
    }

    pub(super) fn is_mig(&self) -> bool {
        is_mig(&self.name)
    }
}

/// A line that begins as a row does.
pub(super) struct RawRow {
    pub(super) name: String,
    pub(super) levels: Vec<String>,
    pub(super) rest: String,
    /// How the row is broken within a word, if the line behind it shows that.
    pub(super) broken: Option<String>,
}

impl RawRow {
    pub(super) fn has_x(&self) -> bool {
        self.x().is_some()
    }

    /// Place of the X, which is that of the row's own column.
    pub(super) fn x(&self) -> Option<usize> {
        self.levels.iter().position(|word| level(word) == Some(Level::Same))
    }
}

/// `GPU0  X  OK  CNS`: a row of `nvidia-smi topo -p2p`, by the words of its legend.
pub(super) fn is_p2p_row(line: &str) -> bool {
    const STATES: [&str; 7] = ["OK", "CNS", "GNS", "TNS", "NS", "DR", "U"];
    let mut words = line.split_whitespace().skip_while(|word| is_prefix(word));
    if !words.next().is_some_and(|name| numbered(name, "GPU")) {
        return false;
    }
    let cells: Vec<&str> = words.collect();
    let is_state = |word: &&str| STATES.contains(word);
    cells.iter().any(is_state) && cells.iter().all(|word| *word == "X" || is_state(word))
}

/// `GPU` or `NIC` and a number.
pub(super) fn numbered(name: &str, kind: &str) -> bool {
    let digits = name.strip_prefix(kind);
    digits.is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()))
}

/// `NVMe0`, also by the name of the device.
pub(super) fn is_drive(name: &str) -> bool {
    name.split_at_checked(4).is_some_and(|(kind, rest)| {
        kind.eq_ignore_ascii_case("nvme") && rest.starts_with(|first: char| first.is_ascii_digit())
    })
}

/// A header of drives alone: newer drivers print these columns as a matrix of their own behind the first.
pub(super) fn drive_header(line: &str) -> Option<Vec<Column>> {
    let columns: Vec<Column> = line.split_whitespace().map(|word| Column { name: word.to_owned() }).collect();
    (!columns.is_empty() && columns.iter().all(Column::is_drive)).then_some(columns)
}

/// An instance of a GPU: `GPU0-MIG0`, or `MIG 0/7/0` as [`join_mig`] joins it.
fn is_mig(word: &str) -> bool {
    let kind = word
        .strip_prefix("GPU")
        .map_or(word, |rest| rest.trim_start_matches(|c: char| "-:/".contains(c) || c.is_ascii_digit()));
    kind.strip_prefix("MIG").is_some_and(|rest| {
        rest.bytes().any(|byte| byte.is_ascii_digit())
            && rest.bytes().all(|byte| byte.is_ascii_digit() || b"-:/.".contains(&byte))
    })
}

/// Makes one word of `MIG 0/7/0`.
pub(super) fn join_mig(line: String) -> String {
    if !line.contains("MIG ") {
        return line;
    }
    let mut out = String::with_capacity(line.len());
    let mut rest = line.as_str();
    while let Some((before, after)) = rest.split_once("MIG ") {
        out.push_str(before);
        let number = after.trim_start_matches(' ');
        let is_instance = number.starts_with(|c: char| c.is_ascii_digit());
        out.push_str(if is_instance { "MIG-" } else { "MIG " });
        rest = number;
    }
    out + rest
}

/// A name that a column can have: devices all have a number in theirs.
fn is_device(word: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.' | '+');
    is_mig(word)
        || word.starts_with(|c: char| c.is_ascii_alphabetic())
            && word.chars().all(plain)
            && word.bytes().any(|byte| byte.is_ascii_digit())
            && level(word).is_none()
}

/// A name of capitals alone, as people who retype a matrix give a NIC (`HSN`).
fn is_capitals(word: &str) -> bool {
    word.len() > 1 && word.bytes().all(|byte| byte.is_ascii_uppercase()) && level(word).is_none()
}

/// What a cell says. `SOC` is what versions before 2017 print for SYS.
pub(super) fn level(word: &str) -> Option<Level> {
    match word {
        "SOC" => Some(Level::Sys),
        word => Level::parse(word),
    }
}

pub(super) fn is_cell(word: &str) -> bool {
    level(word).is_some() || matches!(word, "N/A" | "-" | "--" | "?")
}

/// Pairs of a NIC's or drive's column and its name, free of the quoting and lists that people put around them.
pub(super) fn legend_entries(line: &str) -> Vec<(String, String)> {
    if !line.contains("NIC") && !line.contains("NVMe") {
        return Vec::new();
    }
    let plain = line.replace(['`', '\'', '"', '*', ',', ';'], " ").replace(':', " : ").replace('(', " (");
    let words: Vec<&str> = plain.split_whitespace().collect();
    let entry = |at: usize| {
        let nic = words.get(at).filter(|word| numbered(word, "NIC") || is_drive(word))?;
        words.get(at + 1).filter(|word| **word == ":")?;
        let name = words.get(at + 2)?.trim_end_matches('.');
        // `NIC0: is down` is prose: device names have a number, or stand alone.
        let is_alone = words.get(at + 3).is_none_or(|word| !word.starts_with(|c: char| c.is_ascii_alphanumeric()));
        let is_name = name.starts_with(|c: char| c.is_ascii_alphabetic()) && !numbered(name, "NIC");
        (is_name && (is_device(name) || is_alone)).then(|| ((*nic).to_owned(), name.to_owned()))
    };
    (0..words.len()).filter_map(entry).collect()
}

/// A word that may stand before a row: quoting, a time of day, a log's `[name]`.
fn is_prefix(word: &str) -> bool {
    !word.bytes().any(|byte| byte.is_ascii_alphabetic()) || (word.starts_with('[') && word.ends_with(']'))
}

/// Whether words are a row for certain: a device, then cells of which one is the X and another a level.
fn is_row(words: &[&str]) -> bool {
    let Some((name, cells)) = words.split_first() else { return false };
    let cells = || cells.iter().take_while(|word| is_cell(word)).map(|word| level(word));
    let is_other = |level: Option<Level>| level.is_some_and(|level| level != Level::Same);
    (is_device(name) || is_capitals(name)) && cells().any(|cell| cell == Some(Level::Same)) && cells().any(is_other)
}

/// A device, then levels, then what else the row holds. What a log puts before a row may be anything.
pub(super) fn raw_row(line: &str) -> Option<RawRow> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let first = words.iter().position(|word| !is_prefix(word))?;
    let is_row_at = |at: &usize| words.get(*at..).is_some_and(is_row);
    let at = Some(first).filter(is_row_at).or_else(|| (first..words.len()).find(is_row_at)).unwrap_or(first);
    let name = words.get(at).filter(|name| is_device(name) || is_row_at(&at))?;
    let cells = words.get(at + 1..).unwrap_or_default();
    // A word among levels is a mistyped one; only rows have an X.
    let has_x = cells.contains(&"X");
    let is_mistyped = |place: usize| has_x && cells.get(place + 1).is_some_and(|next| level(next).is_some());
    let levels = cells.iter().enumerate().take_while(|(place, word)| is_cell(word) || is_mistyped(*place));
    let levels: Vec<String> = levels.map(|(_, word)| (*word).to_owned()).collect();
    // `PIX = Connection …` and the like explain levels, they are no row.
    if words.get(at + 2).is_some_and(|word| *word == "=") {
        return None;
    }
    let rest = after_words(line, at + 1 + levels.len());
    let row = trimmed(RawRow { name: (*name).to_owned(), levels, rest: rest.to_owned(), broken: None });
    (!row.levels.is_empty()).then_some(row)
}

/// `N/A` behind the levels is of another column: affinities come last and are no cells.
fn trimmed(mut row: RawRow) -> RawRow {
    while row.levels.last().is_some_and(|word| level(word).is_none()) {
        if let Some(word) = row.levels.pop() {
            row.rest = format!("\t{word}{}", row.rest);
        }
    }
    row
}

/// The line behind its first `count` words, blanks kept.
fn after_words(line: &str, count: usize) -> &str {
    let mut rest = line;
    for _ in 0..count {
        rest = rest.trim_start();
        rest = rest.find(char::is_whitespace).and_then(|end| rest.get(end..)).unwrap_or_default();
    }
    rest
}

/// A line that a narrow terminal broke off: more levels, then the affinities. What follows a line that ends within a
/// word, or with anything but a level, has no known place.
pub(super) fn go_on(row: &mut RawRow, line: &str) {
    let words: Vec<&str> = line.split_whitespace().collect();
    let Some(first) = words.first().filter(|_| words.get(1).is_none_or(|word| *word != "=")) else { return };
    let more: Vec<String> =
        words.iter().take_while(|word| level(word).is_some()).map(|word| (*word).to_owned()).collect();
    let mut behind = row.rest.split_whitespace();
    let (end, is_whole) = match (behind.next(), behind.next()) {
        (None, _) => (row.levels.last().cloned().unwrap_or_default(), true),
        (Some(word), None) => (word.to_owned(), false),
        _ => return,
    };
    let is_line_of_cells = words.get(1).is_none_or(|word| is_cell(word));
    if (!is_whole || more.is_empty()) && is_line_of_cells && is_cell(&format!("{end}{first}")) {
        row.broken.get_or_insert(format!("`{end}` and `{first}`"));
    } else if is_whole && !more.is_empty() {
        row.rest = after_words(line, more.len()).to_owned();
        row.levels.extend(more);
    } else if is_whole {
        row.rest = format!(" {first}");
    }
}

/// A line that names columns.
pub(super) struct Header {
    pub(super) columns: Vec<Column>,
    /// The last word, if the line ends within it: the paste is cut there, or goes on in the next line.
    pub(super) cut: Option<String>,
}

/// Device columns of a header line. `goes_on` if the line before was one, of which this may be the rest.
pub(super) fn header(line: &str, goes_on: bool) -> Option<Header> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let end = words.iter().position(|word| ["CPU", "Affinity"].iter().any(|end| word.eq_ignore_ascii_case(end)));
    // Words before the first GPU can only be told from prose if the affinities follow.
    let first = words.iter().position(|word| numbered(word, "GPU"));
    let first = first.filter(|first| *first == 0 || end.is_some()).or(goes_on.then_some(0))?;
    let names = words.get(first..end.unwrap_or(words.len()))?;
    let is_whole = end.is_some() && names.first().is_some_and(|name| numbered(name, "GPU"));
    let cut = names.split_last().filter(|(last, before)| end.is_none() && is_cut(last, before));
    let names = cut.map_or(names, |(_, before)| before);
    let is_name = |word: &&str| is_device(word) || is_whole && is_capitals(word);
    let is_header = names.iter().all(is_name) && words.len() > first;
    let columns = || names.iter().map(|name| Column { name: (*name).to_owned() }).collect();
    is_header.then(|| Header { columns: columns(), cut: cut.map(|(last, _)| (*last).to_owned()) })
}

/// Whether the last word of a header is only the beginning of one: `C` of `CPU`, `NI` of a NIC, `NIC1` of `NIC10`.
fn is_cut(last: &str, before: &[&str]) -> bool {
    let Some(previous) = before.last() else { return false };
    let is_begin = |name: &str| name.len() > last.len() && name.starts_with(last);
    let begins_name = ["CPU", "GPU0", "NIC0"].into_iter().chain(before.iter().copied()).any(is_begin);
    let is_word = last.bytes().all(|byte| byte.is_ascii_alphabetic());
    is_word && begins_name || before.contains(&last) && next(previous).is_some_and(|next| is_begin(&next))
}

/// `NIC10` behind `NIC9`.
pub(super) fn next(name: &str) -> Option<String> {
    let kind = ["GPU", "NIC"].into_iter().find(|kind| numbered(name, kind))?;
    let number: usize = name.strip_prefix(kind)?.parse().ok()?;
    Some(format!("{kind}{}", number.checked_add(1)?))
}

/// Whether a line behind a header is what a break within a word left of it: `8 NIC29 NIC30`.
pub(super) fn is_rest_of_header(line: &str) -> bool {
    let mut words = line.split_whitespace();
    let is_number = |word: &str| word.bytes().all(|byte| byte.is_ascii_digit());
    words.next().is_some_and(is_number)
        && words.next().is_some_and(|word| numbered(word, "NIC") || numbered(word, "GPU"))
}

/// What the end of a header says of what stands behind the levels of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// No NUMA affinity, or the header was cut before it.
    Without,
    /// NUMA affinity comes last.
    Numa,
    /// `GPU NUMA ID` follows it, as today's drivers print, so also without a header.
    NumaThenId,
}

impl Ending {
    pub(super) fn of(header: &str) -> Self {
        let capitals = header.to_ascii_uppercase();
        if capitals.contains("GPU NUMA") {
            Self::NumaThenId
        } else if capitals.contains("NUMA") {
            Self::Numa
        } else {
            Self::Without
        }
    }
}

/// NUMA affinity out of what follows the levels: `CPU affinity, NUMA affinity, GPU NUMA ID`. Between tabs a
/// cell may be empty; where a paste lost the tabs the words themselves must tell. Where nothing follows what should not be
/// the last, the line is cut, and the word perhaps too.
pub(super) fn numa_affinity(rest: &str, ending: Ending) -> String {
    let rest = rest.trim_end_matches([' ', '\r']);
    let least = match ending {
        Ending::Without => return String::new(),
        Ending::Numa => 2,
        Ending::NumaThenId => 3,
    };
    if let Some(cells) = rest.trim_start_matches(' ').strip_prefix('\t') {
        let is_whole = cells.split('\t').count() >= least;
        return cells.split('\t').nth(1).filter(|_| is_whole).unwrap_or_default().trim().to_owned();
    }
    let words: Vec<&str> = rest.split_whitespace().collect();
    match words.as_slice() {
        ["N/A", ..] => String::new(),
        // One word behind which the GPU's own node comes; alone it may be the beginning of a list of CPUs.
        [one, "N/A"] if !one.contains(['-', ',']) => (*one).to_owned(),
        [_, numa, ..] if *numa != "N/A" && words.len() >= least => (*numa).to_owned(),
        _ => String::new(),
    }
}
