//! `gdrctl man`: the manual pages, one for the program and one a verb.

use anyhow::Context as _;
use clap::CommandFactory as _;

use crate::args::{Arguments, Man};
use crate::exit::Outcome;

pub(crate) fn run(options: &Man) -> anyhow::Result<Outcome> {
    let dir = &options.dir;
    std::fs::create_dir_all(dir).with_context(|| format!("make folder {}", dir.display()))?;
    clap_mangen::generate_to(Arguments::command(), dir)
        .with_context(|| format!("write manual pages into {}", dir.display()))?;
    Ok(Outcome::Done)
}
