//! One line of a profile: words, then `key=value` pairs and flags, each taken at most once.

use std::fmt::Display;
use std::str::FromStr;

use crate::bdf::Bdf;
use crate::profile::word::decode;

/// What is wrong with a line of a profile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BadLine {
    /// Line, counted from 1.
    pub line: usize,
    /// What is wrong, naming the word.
    pub message: String,
}

/// The words of a line after its keyword.
#[derive(Debug)]
pub(super) struct Line<'a> {
    keyword: &'a str,
    words: std::collections::VecDeque<&'a str>,
}

impl<'a> Line<'a> {
    /// Splits a line; `None` for blank lines and comments.
    pub(super) fn split(text: &'a str) -> Option<Self> {
        let text = text.split_once('#').map_or(text, |(before, _)| before);
        let mut words: std::collections::VecDeque<&str> = text.split_whitespace().collect();
        let keyword = words.pop_front()?;
        Some(Self { keyword, words })
    }

    pub(super) fn keyword(&self) -> &'a str {
        self.keyword
    }

    /// The next positional word.
    pub(super) fn word(&mut self, what: &str) -> Result<&'a str, String> {
        let is_positional = self.words.front().is_some_and(|word| !word.contains('='));
        self.words.pop_front().filter(|_| is_positional).ok_or_else(|| format!("`{}` wants {what}", self.keyword))
    }

    /// The next positional word as a name.
    pub(super) fn name(&mut self, what: &str) -> Result<String, String> {
        decode(self.word(what)?)
    }

    /// The value of `key=value` as a name.
    pub(super) fn take_name(&mut self, key: &str) -> Result<Option<String>, String> {
        self.take(key).map(decode).transpose()
    }

    /// The next positional word, parsed.
    pub(super) fn parsed<T: FromStr>(&mut self, what: &str) -> Result<T, String> {
        let word = self.word(what)?;
        word.parse().map_err(|_| format!("`{word}` is no {what} in `{}`", self.keyword))
    }

    /// The next positional word as an address, `-` for none.
    pub(super) fn bdf_or_none(&mut self) -> Result<Option<Bdf>, String> {
        match self.word("a PCI address or `-`")? {
            "-" => Ok(None),
            word => word.parse().map(Some).map_err(|e: crate::bdf::ParseBdfError| e.to_string()),
        }
    }

    /// The value of `key=value`, taken out of the line.
    pub(super) fn take(&mut self, key: &str) -> Option<&'a str> {
        let place =
            self.words.iter().position(|word| word.strip_prefix(key).is_some_and(|rest| rest.starts_with('=')))?;
        let word = self.words.remove(place)?;
        word.split_once('=').map(|(_, value)| value)
    }

    /// The value of `key=value`, parsed.
    pub(super) fn take_parsed<T>(&mut self, key: &str) -> Result<Option<T>, String>
    where
        T: FromStr<Err: Display>,
    {
        self.take(key).map(|value| value.parse().map_err(|error| format!("{key}=`{value}`: {error}"))).transpose()
    }

    /// Whether a bare flag stands in the line; takes it out.
    pub(super) fn flag(&mut self, name: &str) -> bool {
        let place = self.words.iter().position(|word| *word == name);
        place.and_then(|place| self.words.remove(place)).is_some()
    }

    /// All words left, for free text.
    pub(super) fn rest(&mut self) -> String {
        let words: Vec<&str> = self.words.drain(..).collect();
        words.join(" ")
    }

    /// Refuses words that nobody took.
    pub(super) fn finish(self) -> Result<(), String> {
        match self.words.front() {
            None => Ok(()),
            Some(word) => Err(format!("`{word}` is not known in `{}`", self.keyword)),
        }
    }
}
