//! Why the daemon could not start or go on: as text, and as exit code.

use std::error::Error;
use std::fmt;
use std::io::{self, Write as _};

use gdrd_hal::text_with_causes;

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

/// The error with its causes.
pub(crate) fn text_of(error: &anyhow::Error) -> String {
    text_with_causes(error.as_ref())
}

/// Prints it, and gives the code of the process that ends with it.
pub(crate) fn report(error: &anyhow::Error) -> i32 {
    // Where nobody can read it, the code says it alone.
    let _ = writeln!(io::stderr(), "gdrd: {}", text_of(error));
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

    #[test]
    fn only_what_was_asked_for_is_a_usage_error() {
        let wrong = anyhow!(Misconfigured::because(anyhow!("no such profile").context("--sim x")));
        assert_eq!(text_of(&wrong), "--sim x: no such profile");
        assert_eq!(exit_code(&wrong.context("start")), EXIT_USAGE);
        assert_eq!(exit_code(&anyhow!("no descriptors")), EXIT_FAILURE);
    }
}
