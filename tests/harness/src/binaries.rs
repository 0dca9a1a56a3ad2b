//! Where cargo has put the programs of this workspace.

use std::path::PathBuf;

use crate::fail;

/// The program `name` of this workspace, as built in the profile that the running test was built in.
///
/// # Panics
/// When it is not there, saying what to run.
#[must_use]
pub fn binary(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a running program has a path");
    // Tests run as PROFILE/deps/NAME-HASH, programs as PROFILE/NAME.
    let places = test.ancestors().skip(1).take(2).map(|dir| dir.join(name));
    let found = places.into_iter().find(|path| path.is_file());
    found.unwrap_or_else(|| {
        let dir = test.parent().unwrap_or(&test).display();
        fail(format_args!("{name} is not beside {dir}; run 'cargo build --workspace --bins' first"))
    })
}

/// The client process that tests drive.
#[must_use]
pub fn puppet_binary() -> PathBuf {
    binary("gdrd-puppet")
}
