//! Why the daemon could not start or go on: as text, and as exit code.

use std::error::Error;
use std::fmt;

/// Wrong arguments or configuration; clap's own code for usage errors.
const EXIT_USAGE: i32 = 2;
const EXIT_FAILURE: i32 = 1;

/// What arguments or configuration ask for cannot be had, however often it is tried: a person must change them.
#[derive(Debug)]
pub(crate) struct Misconfigured(Box<dyn Error + Send + Sync>);

impl Misconfigured {
    /// Puts the blame for a failure on what was asked for.
    pub(crate) fn because(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self(error.into())
    }
}

impl fmt::Display for Misconfigured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Error for Misconfigured {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.0.source()
    }
}

/// The error with its causes. Libraries differ in whether a message repeats its cause; here each is said once.
pub(crate) fn text_of(error: &anyhow::Error) -> String {
    let mut causes = error.chain().map(ToString::to_string);
    let mut text = causes.next().unwrap_or_default();
    for cause in causes {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

/// Prints it, and gives the code of the process that ends with it.
pub(crate) fn report(error: &anyhow::Error) -> i32 {
    eprintln!("gdrd: {}", text_of(error));
    exit_code(error)
}

fn exit_code(error: &anyhow::Error) -> i32 {
    let is_usage = error.chain().any(|cause| cause.is::<Misconfigured>());
    if is_usage { EXIT_USAGE } else { EXIT_FAILURE }
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("socket /x: {source}")]
    struct Repeats {
        source: std::io::Error,
    }

    #[test]
    fn a_cause_that_a_message_repeats_is_said_once() {
        let source = std::io::Error::from_raw_os_error(13);
        let error = anyhow!(Repeats { source }).context("listen");
        assert_eq!(text_of(&error), "listen: socket /x: Permission denied (os error 13)");
        assert_eq!(text_of(&anyhow!("b").context("a")), "a: b");
    }

    #[test]
    fn only_what_was_asked_for_is_a_usage_error() {
        let wrong = anyhow!(Misconfigured::because(anyhow!("no such profile").context("--sim x")));
        assert_eq!(text_of(&wrong), "--sim x: no such profile");
        assert_eq!(exit_code(&wrong.context("start")), EXIT_USAGE);
        assert_eq!(exit_code(&anyhow!("no descriptors")), EXIT_FAILURE);
    }
}
