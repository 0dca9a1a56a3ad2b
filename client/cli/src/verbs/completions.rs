//! `gdrctl completions`: a shell's completion script.

use clap::CommandFactory as _;

use crate::args::{Arguments, Completions};
use crate::exit::Outcome;
use crate::output;

pub(crate) fn run(options: &Completions) -> anyhow::Result<Outcome> {
    let mut script = Vec::new();
    clap_complete::generate(options.shell, &mut Arguments::command(), "gdrctl", &mut script);
    output::write(&String::from_utf8(script)?)?;
    Ok(Outcome::Done)
}
