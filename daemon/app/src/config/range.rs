//! Ranges of configuration values; the first that is left is the error.

use super::ConfigError;

/// Collects checks.
#[derive(Debug, Default)]
pub(super) struct Ranges {
    first: Option<ConfigError>,
}

impl Ranges {
    /// `value` must be within `least..=most`.
    pub(super) fn within(&mut self, key: &str, value: u64, least: u64, most: u64) {
        if !(least..=most).contains(&value) {
            self.refuse(key, value, format!("{least} to {most} is"));
        }
    }

    /// A list may have so many entries.
    pub(super) fn at_most(&mut self, key: &str, entries: usize, most: usize) {
        if entries > most {
            self.refuse(
                key,
                u64::try_from(entries).unwrap_or(u64::MAX),
                format!("lists of at most {most} entries are"),
            );
        }
    }

    /// A value may not be above that of another key.
    pub(super) fn at_most_other(&mut self, (key, value): (&str, u64), (other, most): (&str, u64)) {
        if value > most {
            self.refuse(key, value, format!("at most {other}, {most}, is"));
        }
    }

    /// A list must have an entry.
    pub(super) fn not_empty(&mut self, key: &str, entries: usize) {
        if entries == 0 {
            self.refuse(key, 0, "lists of at least one entry are".to_owned());
        }
    }

    /// `value` must be a power of two.
    pub(super) fn power_of_two(&mut self, key: &str, value: u32) {
        if !value.is_power_of_two() {
            self.refuse(key, value.into(), "powers of two are".to_owned());
        }
    }

    /// A value that cannot be used for a reason of its own.
    pub(super) fn refuse_text(&mut self, key: &str, value: &str, allowed: String) {
        let error = || ConfigError::Value { key: key.to_owned(), value: value.to_owned(), allowed };
        self.first.get_or_insert_with(error);
    }

    fn refuse(&mut self, key: &str, value: u64, allowed: String) {
        self.refuse_text(key, &value.to_string(), allowed);
    }

    /// # Errors
    /// The first value out of its range.
    pub(super) fn finish(self) -> Result<(), ConfigError> {
        self.first.map_or(Ok(()), Err)
    }
}
