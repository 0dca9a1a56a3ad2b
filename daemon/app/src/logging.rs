//! Where events go: standard error, as text or JSON. Our own rkeys and tokens have no printable form; libraries that
//! carry them as headers are kept to news.

use std::io::IsTerminal;

use thiserror::Error;
use tracing::Level;
use tracing_subscriber::filter::filter_fn;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _};

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

/// Libraries through whose hands session tokens go, as headers. The present ones print none; no later one gets the chance.
const CARRIERS: [&str; 5] = ["h2", "hyper", "hyper_util", "tonic", "tower"];

/// Whether an event may be written, whatever the operator's filter says.
fn shows_no_secret(target: &str, level: Level) -> bool {
    let of = target.split("::").next().unwrap_or_default();
    level <= Level::INFO || !CARRIERS.contains(&of)
}

/// Starts logging for the whole process.
///
/// # Errors
/// `Subscriber`.
pub(crate) fn start(filter: EnvFilter, format: LogFormat) -> Result<(), LogError> {
    let secrets = filter_fn(|event| shows_no_secret(event.target(), *event.level()));
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let registry = tracing_subscriber::registry().with(filter);
    let started = match format {
        LogFormat::Text => {
            registry.with(lines.with_ansi(std::io::stderr().is_terminal()).with_filter(secrets)).try_init()
        }
        LogFormat::Json => registry.with(lines.json().with_filter(secrets)).try_init(),
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

    #[test]
    fn libraries_that_carry_tokens_write_no_more_than_news() {
        assert!(!shows_no_secret("h2::codec::framed_read", Level::DEBUG));
        assert!(!shows_no_secret("h2", Level::TRACE));
        assert!(shows_no_secret("h2::server", Level::WARN));
        assert!(shows_no_secret("gdrd_engine::runtime", Level::TRACE));
    }
}
