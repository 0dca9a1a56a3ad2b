//! Whose lines count of a text in which those of several hosts or processes are mixed.

use std::collections::BTreeSet;

/// Whose lines count of a text in which those of several hosts are mixed: of the first that has a line of what the tool printed.
#[derive(Default)]
pub(crate) struct Speakers {
    first: Option<String>,
    others: BTreeSet<String>,
}

/// Most other hosts that a warning names.
const MAX_SPEAKERS: usize = 4;

impl Speakers {
    /// Whether a line counts. The first of whom a line is of what is read, as `is_read` tells, is listened to alone.
    pub(crate) fn listens_to(&mut self, speaker: Option<&str>, is_read: impl FnOnce() -> bool) -> bool {
        let Some(speaker) = speaker else { return true };
        match &self.first {
            Some(first) if first == speaker => true,
            Some(_) => {
                if self.others.len() < MAX_SPEAKERS && is_read() {
                    self.others.insert(speaker.to_owned());
                }
                false
            }
            None => {
                if is_read() {
                    self.first = Some(speaker.to_owned());
                }
                true
            }
        }
    }

    /// That there are others.
    pub(crate) fn warning(&self) -> Option<String> {
        let first = self.first.as_ref().filter(|_| !self.others.is_empty())?;
        let name = |speaker: &String| speaker.trim_end_matches(':').to_owned();
        let others: Vec<String> = self.others.iter().map(name).collect();
        Some(format!("the text has lines of {} too: those of {} count", others.join(", "), name(first)))
    }
}
