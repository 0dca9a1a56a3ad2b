//! Errors as one line of text, with why.

use std::error::Error;
use std::iter::successors;

/// The error and its causes, joined by colons. Libraries differ in whether a message ends with its cause; here each is said
/// once.
#[must_use]
pub fn text_with_causes(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    for cause in successors(error.source(), |&cause| cause.source()) {
        let cause = cause.to_string();
        // Anywhere else it may stand for something else.
        if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use std::io;

    use thiserror::Error;

    use super::*;

    #[derive(Debug, Error)]
    #[error("socket /x: {source}")]
    struct Repeats {
        source: io::Error,
    }

    #[derive(Debug, Error)]
    #[error("{what}")]
    struct Step {
        what: &'static str,
        #[source]
        source: Box<dyn Error + Send + Sync>,
    }

    #[test]
    fn a_cause_that_a_message_ends_with_is_said_once() {
        let source = Box::new(Repeats { source: io::Error::from_raw_os_error(13) });
        let error = Step { what: "listen", source };
        assert_eq!(text_with_causes(&error), "listen: socket /x: Permission denied (os error 13)");
    }

    #[test]
    fn a_cause_whose_words_stand_elsewhere_in_a_message_is_said() {
        let error = Step { what: "the lost port", source: "lost".into() };
        assert_eq!(text_with_causes(&error), "the lost port: lost");
    }
}
