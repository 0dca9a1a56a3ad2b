//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Parser;

use crate::config::LogFormat;
use crate::worker::WorkerCommand;

/// Exit codes, as `--help` and the README give them.
const EXIT_CODES: &str = "Exit codes:
  0  ended as asked
  1  could not start or failed while it ran
  2  wrong arguments or configuration, or a profile, script or tree that cannot be used; nothing was done";

/// Lends registered GPU buffers and queue pairs to local processes.
#[derive(Debug, Parser)]
#[command(name = "gdrd", version, after_help = EXIT_CODES)]
pub(crate) struct Arguments {
    /// Simulate a host: a built-in profile (see --list-profiles) or the path of a host profile
    #[arg(long, value_name = "PROFILE", conflicts_with = "sysfs_root")]
    pub(crate) sim: Option<String>,

    /// Print the names of the built-in profiles and exit
    #[arg(long)]
    pub(crate) list_profiles: bool,

    /// What goes wrong on the simulated host, and when: a fault script
    #[arg(long, value_name = "FILE", requires = "sim")]
    pub(crate) fault_script: Option<PathBuf>,

    /// Read topology below DIR, which holds a captured `sys`, instead of this machine's /sys; nothing is served then, but
    /// with --sim-hca the GPUs that this machine's driver lists
    #[arg(long, value_name = "DIR")]
    pub(crate) sysfs_root: Option<PathBuf>,

    /// Add this many simulated HCAs that move real GPU memory by copies on the device, for machines without a NIC
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u8).range(1..=16), conflicts_with = "sim")]
    pub(crate) sim_hca: Option<u8>,

    /// Configuration file; without it every key has its default
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// Check the configuration, and the profile and fault script of a simulation; say whether they are valid and exit
    #[arg(long)]
    pub(crate) check_config: bool,

    /// Folder of the sockets; default: $RUNTIME_DIRECTORY, else /run/gdrd for root, else $XDG_RUNTIME_DIR/gdrd
    #[arg(long, value_name = "DIR")]
    pub(crate) runtime_dir: Option<PathBuf>,

    /// What is logged, such as `info` or `warn,gdrd_engine=debug`; over the configuration
    #[arg(long, value_name = "FILTER")]
    pub(crate) log: Option<String>,

    /// How it is logged: text or json; over the configuration
    #[arg(long, value_name = "FORMAT")]
    pub(crate) log_format: Option<LogFormat>,

    #[command(subcommand)]
    pub(crate) command: Option<Other>,
}

/// What else this binary is.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum Other {
    /// Start the daemon, keep its memory and sessions, and start it again with them when it dies: where there is no
    /// systemd
    Keeper {
        /// Arguments of the daemon
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
        daemon: Vec<OsString>,
    },
    /// Write the manual pages into a folder
    #[command(hide = true)]
    Man { dir: PathBuf },
    /// What the keeper starts: takes kept descriptors and becomes the daemon
    #[command(hide = true)]
    KeeperChild {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        daemon: Vec<OsString>,
    },
    /// Where the GPU driver's library lives
    #[command(subcommand, hide = true)]
    Worker(WorkerCommand),
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn arguments_are_consistent() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn fault_script_needs_a_simulated_host() {
        assert!(Arguments::try_parse_from(["gdrd", "--fault-script", "x"]).is_err());
        assert!(Arguments::try_parse_from(["gdrd", "--sim", "dgx-a100", "--fault-script", "x"]).is_ok());
    }

    #[test]
    fn simulated_host_and_captured_host_exclude_each_other() {
        assert!(Arguments::try_parse_from(["gdrd", "--sim", "dgx-a100", "--sysfs-root", "/x"]).is_err());
    }
}
