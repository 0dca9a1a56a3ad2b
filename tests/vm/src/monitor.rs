//! The monitors of the emulators, which do to a guest what hands do to a machine.

use std::fs::File;
use std::io::{Read as _, Write as _};

/// A monitor behind a serial port.
#[derive(Debug)]
pub struct Monitor {
    port: File,
    commands: u32,
}

/// Added to the number of a command by the monitor itself: the sum stands in no echo of what it was sent.
const MARK: u32 = 1_000_000;

impl Monitor {
    /// That of this guest.
    ///
    /// # Panics
    /// Outside of a guest.
    #[must_use]
    pub fn own() -> Self {
        Self::at("/dev/ttyS2")
    }

    /// That of the other guest.
    ///
    /// # Panics
    /// Outside of a guest.
    #[must_use]
    pub fn of_peer() -> Self {
        Self::at("/dev/ttyS3")
    }

    fn at(path: &str) -> Self {
        let port = File::options().read(true).write(true).open(path).expect("guests have four serial ports");
        let mut monitor = Self { port, commands: 0 };
        // While the guest had this port open but not raw yet, its terminal may have echoed the monitor's greeting into
        // the line that a first command would end.
        let _refused = monitor.try_command("");
        monitor
    }

    /// Gives a command and awaits its end.
    ///
    /// # Panics
    /// When the port cannot be used, or the monitor refuses.
    pub fn command(&mut self, command: &str) {
        self.try_command(command).unwrap_or_else(|refusal| unreachable!("{command}: {refusal}"));
    }

    /// Gives a command that ends the emulator, and so has no answer.
    ///
    /// # Panics
    /// When the port cannot be used.
    pub fn last_command(&mut self, command: &str) {
        self.port.write_all(format!("{command}\n").as_bytes()).expect("the monitor listens");
    }

    /// Gives a command and awaits its end.
    ///
    /// # Errors
    /// What the monitor says in refusal. Commands that tests need print nothing else.
    ///
    /// # Panics
    /// When the port cannot be used.
    pub fn try_command(&mut self, command: &str) -> Result<(), String> {
        self.commands += 1;
        let lines = format!("{command}\nprint /d {MARK}+{}\n", self.commands);
        self.port.write_all(lines.as_bytes()).expect("the monitor listens");
        let done = (MARK + self.commands).to_string();
        let mut told = String::new();
        while !told.contains(&done) {
            let mut bytes = [0; 256];
            let got = self.port.read(&mut bytes).expect("the monitor answers");
            told.push_str(&String::from_utf8_lossy(bytes.get(..got).unwrap_or_default()));
        }
        let refused = |line: &&str| REFUSALS.iter().any(|refusal| line.starts_with(refusal));
        told.lines().find(refused).map_or(Ok(()), |line| Err(line.to_owned()))
    }
}

/// How a line begins that says that a command was not done (monitor/hmp.c of QEMU).
const REFUSALS: [&str; 2] = ["Error", "unknown command"];
