//! What reading a host can end with.

use std::path::PathBuf;

/// Why an input gave no host at all. Parts that are merely missing or unreadable become warnings in the
/// model instead.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// The input cannot be opened or read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// The reason given by the kernel.
        #[source]
        source: std::io::Error,
    },
    /// The folder holds no sysfs tree.
    #[error("{} holds no sysfs tree: expected sys/bus, sys/class or sys/devices below it", path.display())]
    NotSysfs {
        /// The folder.
        path: PathBuf,
    },
    /// The input is larger than a reader accepts.
    #[error("{} has more than {limit} {unit}", path.display())]
    TooLarge {
        /// The file or folder.
        path: PathBuf,
        /// The bound that was hit.
        limit: usize,
        /// What was counted.
        unit: &'static str,
    },
    /// A host profile does not parse.
    #[error("{}", at_line(path.as_deref(), *line, message))]
    Profile {
        /// The file, if it came from one.
        path: Option<PathBuf>,
        /// Line, counted from 1.
        line: usize,
        /// What is wrong with it.
        message: String,
    },
    /// The content is not what its kind should have.
    #[error("{}", bad_input(path.as_deref(), what, message))]
    BadInput {
        /// The file, if it came from one.
        path: Option<PathBuf>,
        /// The kind of input that it was taken for.
        what: &'static str,
        /// What is wrong with it.
        message: String,
    },
    /// The kind of input cannot be told from its content.
    #[error("{}: {reason}", path.display())]
    UnknownInput {
        /// The file.
        path: PathBuf,
        /// What was looked for.
        reason: &'static str,
    },
    /// No built-in profile has this name.
    #[error("no built-in profile `{name}`; there are: {}", known.join(", "))]
    NoSuchProfile {
        /// The name asked for.
        name: String,
        /// The names there are.
        known: Vec<&'static str>,
    },
    /// A request names a device that the host does not have.
    #[error("no {what} `{name}` on this host")]
    NoSuchDevice {
        /// Kind of device.
        what: &'static str,
        /// The name asked for.
        name: String,
    },
    /// A request is about a drive, and none is known of the host.
    #[error(
        "no drive is known of this host: they are listed by class/nvme of /sys, of captures and of host profiles, \
         and not by NCCL XML or pasted matrices"
    )]
    NoDrive,
    /// A request contradicts itself or the host.
    #[error("{message}")]
    BadRequest {
        /// What is wrong, naming the value.
        message: String,
    },
}

fn bad_input(path: Option<&std::path::Path>, what: &str, message: &str) -> String {
    match path {
        Some(path) => format!("{}, read as {what}: {message}", path.display()),
        None => format!("{what}: {message}"),
    }
}

fn at_line(path: Option<&std::path::Path>, line: usize, message: &str) -> String {
    match path {
        Some(path) => format!("{} line {line}: {message}", path.display()),
        None => format!("profile line {line}: {message}"),
    }
}
