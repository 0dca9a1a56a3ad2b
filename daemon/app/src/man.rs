//! `gdrd man`: the manual pages of the daemon and its keeper, section 8 as man-pages(7) has daemons.

use std::path::Path;

use anyhow::Context as _;
use clap::CommandFactory as _;
use clap_mangen::Man;

use crate::arguments::Arguments;

const SECTION: &str = "8";

pub(crate) fn write(dir: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(dir).with_context(|| format!("make folder {}", dir.display()))?;
    let mut daemon = Arguments::command().disable_help_subcommand(true);
    daemon.build();
    let shown = daemon.get_subcommands().filter(|command| !command.is_hide_set()).cloned().collect::<Vec<_>>();
    for command in shown.into_iter().chain([daemon]) {
        let page = Man::new(command).section(SECTION);
        page.generate_to(dir).with_context(|| format!("write manual pages into {}", dir.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_daemon_and_its_keeper_have_pages_and_what_is_hidden_has_none() {
        let dir = tempfile::tempdir().expect("a folder");
        write(dir.path()).expect("written");
        let mut names: Vec<_> = std::fs::read_dir(dir.path()).expect("it is there").flatten().collect();
        names.sort_by_key(std::fs::DirEntry::file_name);
        let names: Vec<_> = names.iter().map(|entry| entry.file_name().into_string().expect("UTF-8")).collect();
        assert_eq!(names, ["gdrd-keeper.8", "gdrd.8"]);
        let page = std::fs::read_to_string(dir.path().join("gdrd.8")).expect("text");
        assert!(page.contains("gdrd 8") && page.contains("gdrd\\-keeper(8)"), "{page}");
    }
}
