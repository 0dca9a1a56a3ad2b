//! A test's handle of a puppet.

use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::process::{ChildStdin, Stdio};

use rustix::process::Signal;
use serde_json::Value;

use crate::daemon::Daemon;
use crate::lines::Lines;
use crate::process::Process;
use crate::script::{Command, Reply};
use crate::users::{Program, User};
use crate::{PATIENCE, fail, puppet_binary};

/// A command that a puppet could not do, which may be what a test wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandFailed {
    /// The error and its causes, joined by colons.
    pub message: String,
    /// The daemon's stable reason string, empty for errors of the client.
    pub reason: String,
}

/// A client process that does one command at a time. Killed when dropped.
#[derive(Debug)]
pub struct Puppet {
    process: Process,
    stdin: ChildStdin,
    replies: Lines,
    /// It starts itself again to hold a socket, so its file stays.
    _program: Program,
}

impl Puppet {
    /// Starts a puppet of this process's user, without a session.
    #[must_use]
    pub fn start() -> Self {
        Self::start_as(User::Own)
    }

    /// Starts a puppet of another user, without a session.
    #[must_use]
    pub fn start_as(user: User) -> Self {
        let program = user.program(&puppet_binary());
        Self::spawn(user.command(&program), program)
    }

    /// Starts a puppet of this process's user by another program, which is given these arguments and then the puppet's path,
    /// and becomes it.
    #[must_use]
    pub fn start_by(launcher: &str, arguments: &[&str]) -> Self {
        let mut command = std::process::Command::new(launcher);
        command.args(arguments).arg(puppet_binary());
        Self::spawn(command, User::Own.program(&puppet_binary()))
    }

    fn spawn(mut spawn: std::process::Command, program: Program) -> Self {
        spawn.stdin(Stdio::piped()).stdout(Stdio::piped());
        let child = spawn.spawn().unwrap_or_else(|error| fail(format_args!("start gdrd-puppet by {spawn:?}: {error}")));
        let mut process = Process::new(child, "gdrd-puppet");
        let (stdin, stdout) = (process.child().stdin.take(), process.child().stdout.take());
        let stdin = stdin.expect("stdin was asked for as a pipe");
        let stdout = OwnedFd::from(stdout.expect("stdout was asked for as a pipe"));
        Self { process, stdin, replies: Lines::new(stdout), _program: program }
    }

    /// Starts a puppet with a session at `daemon`.
    #[must_use]
    pub fn connected(daemon: &Daemon) -> Self {
        Self::connected_as(daemon, User::Own)
    }

    /// Starts a puppet of another user with a session at `daemon`.
    #[must_use]
    pub fn connected_as(daemon: &Daemon, user: User) -> Self {
        let mut puppet = Self::start_as(user);
        puppet.run(Command::Connect { runtime_dir: daemon.runtime_dir_text() });
        puppet
    }

    /// Its process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Has the puppet do `command`.
    ///
    /// # Errors
    /// What the puppet says.
    ///
    /// # Panics
    /// When the puppet dies or hangs.
    pub fn try_run(&mut self, command: Command) -> Result<Value, CommandFailed> {
        self.begin(&command);
        self.answer(&command)
    }

    /// Has the puppet do `command`, which must succeed.
    ///
    /// # Panics
    /// When it does not.
    pub fn run(&mut self, command: Command) -> Value {
        self.begin(&command);
        self.answer(&command).unwrap_or_else(|failed| fail(format_args!("{command:?}: {failed:?}")))
    }

    /// Has the puppet do `command`, which must fail.
    ///
    /// # Panics
    /// When it does not.
    pub fn refused(&mut self, command: Command) -> CommandFailed {
        match self.try_run(command.clone()) {
            Ok(value) => fail(format_args!("{command:?} was to fail, and answered {value}")),
            Err(failed) => failed,
        }
    }

    /// Sends `command` without waiting for its answer, which [`Puppet::answer`] then gives.
    pub fn begin(&mut self, command: &Command) {
        let mut line = serde_json::to_string(command).expect("a command is plain data");
        line.push('\n');
        let sent = self.stdin.write_all(line.as_bytes());
        sent.unwrap_or_else(|error| fail(format_args!("{command:?} to a puppet: {error}")));
    }

    /// The answer to a command that was begun.
    ///
    /// # Errors
    /// What the puppet says.
    ///
    /// # Panics
    /// When the puppet dies or hangs.
    pub fn answer(&mut self, command: &Command) -> Result<Value, CommandFailed> {
        let line = match self.replies.next(PATIENCE) {
            Ok(Some(line)) => line,
            Ok(None) => fail(format_args!("the puppet died doing {command:?}: {}", self.process.wait())),
            Err(error) => fail(format_args!("no answer to {command:?}: {error}")),
        };
        match serde_json::from_str(&line) {
            Ok(Reply::Done(value)) => Ok(value),
            Ok(Reply::Failed { message, reason }) => Err(CommandFailed { message, reason }),
            Err(error) => fail(format_args!("answer to {command:?}: {error} in {line}")),
        }
    }

    /// Kills it where it stands, and reaps it.
    pub fn kill(mut self) {
        self.process.signal(Signal::KILL);
        self.process.wait();
    }
}
