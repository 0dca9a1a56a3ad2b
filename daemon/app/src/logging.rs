//! Where events go: standard error, as text or JSON. rkeys and tokens have no printable form, so none gets here.

use std::io::IsTerminal;

use thiserror::Error;
use tracing_subscriber::EnvFilter;

use crate::config::LogFormat;

/// Why nothing can be logged.
#[derive(Debug, Error)]
#[non_exhaustive]
pub(crate) enum LogError {
    /// The filter is none.
    #[error("log filter {filter:?}: {problem}")]
    Filter {
        /// As given.
        filter: String,
        /// What is wrong with it.
        problem: String,
    },
    /// Another subscriber is there.
    #[error("logging: {0}")]
    Subscriber(String),
}

/// A filter that parses.
///
/// # Errors
/// `Filter`.
pub(crate) fn filter(text: &str) -> Result<EnvFilter, LogError> {
    let problem = |error: tracing_subscriber::filter::ParseError| error.to_string();
    EnvFilter::try_new(text).map_err(|error| LogError::Filter { filter: text.to_owned(), problem: problem(error) })
}

/// Starts logging for the whole process.
///
/// # Errors
/// `Subscriber`.
pub(crate) fn start(filter: EnvFilter, format: LogFormat) -> Result<(), LogError> {
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let started = match format {
        LogFormat::Text => builder.with_ansi(std::io::stderr().is_terminal()).try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
    started.map_err(|error| LogError::Subscriber(error.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_are_checked_before_they_are_used() {
        assert!(filter("warn,gdrd_engine=debug").is_ok());
        let message = filter("gdrd_engine=loud").expect_err("no level").to_string();
        assert!(message.contains("gdrd_engine=loud"), "{message}");
    }
}
