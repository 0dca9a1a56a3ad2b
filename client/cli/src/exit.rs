//! Exit codes, and errors as people read them.

use std::process::ExitCode;

use anstyle::{AnsiColor, Style};
use gdrd_client::ClientError;
use gdrd_topology::TopologyError;
use gdrd_topology::words::is_unsafe;

/// How a run ended. The numbers are documented in the help text and stable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// 0
    Done,
    /// 1
    Failed,
    /// 2, as clap's own
    Usage,
    /// 3
    Unreachable,
    /// 4
    Refused,
    /// 5
    NothingFits,
}

impl From<Outcome> for ExitCode {
    fn from(outcome: Outcome) -> Self {
        Self::from(match outcome {
            Outcome::Done => 0,
            Outcome::Failed => 1,
            Outcome::Usage => 2,
            Outcome::Unreachable => 3,
            Outcome::Refused => 4,
            Outcome::NothingFits => 5,
        })
    }
}

/// A value on the command line that cannot be used.
#[derive(Debug)]
pub(crate) struct UsageError(pub(crate) String);

impl std::fmt::Display for UsageError {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

/// Prints an error with its causes, and says how the run ends.
pub(crate) fn report(error: &anyhow::Error) -> Outcome {
    // The reader of our output has seen enough: no failure, and nobody to tell.
    if is_output_closed(error) {
        return Outcome::Done;
    }
    let red = Style::new().bold().fg_color(Some(AnsiColor::Red.into()));
    // Paths and texts of inputs stand in it.
    let text = text_of(error).replace(|c: char| is_unsafe(c) && c != '\n', "?");
    anstream::eprintln!("{red}error{red:#}: {text}");
    outcome_of(error)
}

/// The error and its causes. Of a connection only the first and the last: what lies between are layers of libraries.
fn text_of(error: &anyhow::Error) -> String {
    let mut parts: Vec<String> = Vec::new();
    for cause in error.chain() {
        parts.push(cause.to_string());
        if cause.downcast_ref::<ClientError>().is_some_and(is_of_connection) {
            parts.extend(error.chain().last().map(ToString::to_string));
            break;
        }
    }
    parts.dedup();
    parts.join(": ")
}

/// Whether there was no connection, or no more.
fn is_of_connection(error: &ClientError) -> bool {
    use ClientError::{ConnectionLost, NotPermitted, Unreachable};
    matches!(error, Unreachable { .. } | NotPermitted { .. } | ConnectionLost { .. })
}

fn outcome_of(error: &anyhow::Error) -> Outcome {
    for cause in error.chain() {
        if cause.is::<UsageError>() || cause.is::<TopologyError>() {
            return Outcome::Usage;
        }
        match cause.downcast_ref::<ClientError>() {
            Some(client) if client.is_unreachable() => return Outcome::Unreachable,
            Some(
                ClientError::Refused { .. } | ClientError::SessionRefused { .. } | ClientError::NotPermitted { .. },
            ) => return Outcome::Refused,
            Some(ClientError::InvalidArgument { .. }) => return Outcome::Usage,
            _ => {}
        }
    }
    Outcome::Failed
}

/// A daemon that went away breaks a pipe too.
fn is_output_closed(error: &anyhow::Error) -> bool {
    let is_it = |cause: &std::io::Error| cause.kind() == std::io::ErrorKind::BrokenPipe;
    let is_broken = error.chain().any(|cause| cause.downcast_ref::<std::io::Error>().is_some_and(is_it));
    is_broken && !error.chain().any(|cause| cause.is::<ClientError>())
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    #[test]
    fn kinds_of_errors_have_codes_of_their_own() {
        let absent = ClientError::NoDaemon { looked_in: vec![] };
        assert_eq!(outcome_of(&anyhow!(absent).context("list the buffers")), Outcome::Unreachable);
        let refused = ClientError::SessionRefused { reason: String::new(), message: String::new() };
        assert_eq!(outcome_of(&refused.into()), Outcome::Refused);
        assert_eq!(outcome_of(&UsageError("no such level".into()).into()), Outcome::Usage);
        assert_eq!(outcome_of(&anyhow!("anything")), Outcome::Failed);
    }

    #[test]
    fn a_broken_connection_is_told_by_its_first_and_last_cause() {
        let refused = anyhow!(std::io::Error::other("connection refused")).context("tcp connect").context("transport");
        let error = ClientError::Unreachable { path: "/run/gdrd/gdrd.sock".into(), source: refused.into() };
        let text = text_of(&anyhow!(error).context("list the buffers"));
        let right =
            "list the buffers: gdrd does not answer on /run/gdrd/gdrd.sock; is the daemon running?: connection refused";
        assert_eq!(text, right);
        assert_eq!(text_of(&anyhow!("a").context("b")), "b: a");
    }

    #[test]
    fn a_reader_that_is_gone_is_no_failure() {
        let gone = anyhow!(std::io::Error::from(std::io::ErrorKind::BrokenPipe)).context("print");
        assert!(is_output_closed(&gone));
    }

    #[test]
    fn a_daemon_that_went_away_is_a_failure() {
        let source = std::io::Error::from(std::io::ErrorKind::BrokenPipe);
        let gone = ClientError::Io { what: "send on the session socket".to_owned(), source };
        assert!(!is_output_closed(&anyhow!(gone).context("lease a buffer")));
    }
}
