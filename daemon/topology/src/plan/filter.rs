//! Operator filters in the syntax of NCCL_IB_HCA.

use std::fmt;
use std::str::FromStr;

/// Which HCAs and ports may be used.
///
/// `mlx5_0,mlx5_1` names prefixes, `=mlx5_0:1,mlx5_1:1` whole names and ports, and a leading `^` excludes
/// what follows: `^mlx5_4`, `^=mlx5_4:1`. (NCCL user guide, environment variables, NCCL_IB_HCA.)
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NicFilter {
    excludes: bool,
    exact: bool,
    entries: Vec<Entry>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    name: String,
    port_num: Option<u8>,
}

/// A filter that does not follow the syntax.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("NIC filter: `{entry}` {reason}")]
pub struct BadFilter {
    entry: String,
    reason: &'static str,
}

impl FromStr for NicFilter {
    type Err = BadFilter;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        let (excludes, text) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
        let (exact, text) = text.strip_prefix('=').map_or((false, text), |rest| (true, rest));
        let entries = text.split(',').map(str::trim).filter(|word| !word.is_empty()).map(entry);
        let entries = entries.collect::<Result<Vec<_>, _>>()?;
        if entries.is_empty() {
            return Err(BadFilter { entry: text.to_owned(), reason: "names no HCA" });
        }
        Ok(Self { excludes, exact, entries })
    }
}

fn entry(word: &str) -> Result<Entry, BadFilter> {
    let bad = |reason| BadFilter { entry: word.to_owned(), reason };
    let (name, port_num) = match word.split_once(':') {
        None => (word, None),
        Some((name, port_num)) => {
            let number: Option<u8> = port_num.parse().ok().filter(|number| *number > 0);
            (name, Some(number.ok_or_else(|| bad("has no port number of 1-255 after the colon"))?))
        }
    };
    if name.is_empty() || name.starts_with(['^', '=']) {
        return Err(bad("is no name; `^` and `=` stand once, at the beginning"));
    }
    Ok(Entry { name: name.to_owned(), port_num })
}

impl NicFilter {
    /// Whether a port of an HCA may be used.
    #[must_use]
    pub fn allows_port(&self, name: &str, port_num: u8) -> bool {
        let is_listed = self
            .entries
            .iter()
            .any(|entry| self.names(entry, name) && entry.port_num.is_none_or(|listed| listed == port_num));
        is_listed != self.excludes
    }

    /// Whether an HCA of which no port is known may be used: by its name alone.
    #[must_use]
    pub fn allows_name(&self, name: &str) -> bool {
        let is_listed =
            self.entries.iter().any(|entry| self.names(entry, name) && (entry.port_num.is_none() || !self.excludes));
        is_listed != self.excludes
    }

    fn names(&self, entry: &Entry, name: &str) -> bool {
        if self.exact { entry.name == name } else { name.starts_with(&entry.name) }
    }
}

impl fmt::Display for NicFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let words: Vec<String> = self
            .entries
            .iter()
            .map(|entry| match entry.port_num {
                Some(port_num) => format!("{}:{port_num}", entry.name),
                None => entry.name.clone(),
            })
            .collect();
        let marks = [if self.excludes { "^" } else { "" }, if self.exact { "=" } else { "" }];
        write!(f, "{}{}", marks.concat(), words.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_follow_nccl_ib_hca() {
        for (filter, name, port_num, allowed) in [
            ("mlx5", "mlx5_3", 1, true),
            ("mlx5_1", "mlx5_10", 1, true),
            ("=mlx5_1", "mlx5_10", 1, false),
            ("=mlx5_1", "mlx5_1", 2, true),
            ("=mlx5_1:1", "mlx5_1", 2, false),
            ("^mlx5_1", "mlx5_10", 1, false),
            ("^=mlx5_1", "mlx5_10", 1, true),
            ("^=mlx5_1:2,mlx5_0", "mlx5_1", 1, true),
            ("^=mlx5_1:2,mlx5_0", "mlx5_1", 2, false),
            ("mlx5_0:1,mlx5_1:1", "mlx5_1", 1, true),
        ] {
            let parsed: NicFilter = filter.parse().unwrap();
            assert_eq!(parsed.allows_port(name, port_num), allowed, "{filter} {name}:{port_num}");
            assert_eq!(parsed.to_string(), filter);
        }
    }

    #[test]
    fn malformed_filters_name_the_entry() {
        for bad in ["", "^", "=", "^=", "mlx5_0:0", "mlx5_0:x", "mlx5_0,^mlx5_1", ":1", "=^mlx5_0"] {
            let error = bad.parse::<NicFilter>().unwrap_err().to_string();
            assert!(error.starts_with("NIC filter: "), "{bad}: {error}");
        }
    }
}
