//! Reads the dependency graph of a workspace from `cargo metadata`. Asks no registry: every crate is there, or we would not run.

use std::path::{Path, PathBuf};

use cargo_metadata::semver::Version;
use cargo_metadata::{DependencyKind, MetadataCommand, PackageId};

/// When a dependency is there: `Normal` also stands for build scripts, whose output ends up in the crate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// In every build.
    Normal,
    /// Only where the crate's own tests, examples and benches are built.
    Dev,
}

/// One crate depends on another, both by package name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrow {
    /// The crate that depends.
    pub from: String,
    /// The crate that is depended upon.
    pub to: String,
    /// When.
    pub kind: Kind,
}

/// One crate of the workspace.
#[derive(Clone, Debug)]
pub struct Member {
    /// Package name.
    pub name: String,
    /// Folder that holds its manifest.
    pub folder: PathBuf,
    /// Root source files of its library and binaries.
    pub roots: Vec<PathBuf>,
}

/// The members of a workspace and every arrow below them, crates from outside included.
#[derive(Clone, Debug)]
pub struct Workspace {
    /// Crates of this workspace.
    pub members: Vec<Member>,
    /// All arrows, in no order.
    pub arrows: Vec<Arrow>,
    /// The least Rust version that the members name.
    pub least_rust: Version,
    /// The least Rust version of each crate from outside that names one, with its name.
    pub foreign_rust: Vec<(String, Version)>,
}

/// Why the graph could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Cargo itself refused.
    #[error("cargo metadata for {root}: {source}")]
    Cargo {
        /// Workspace asked about.
        root: PathBuf,
        /// What cargo said.
        source: cargo_metadata::Error,
    },
    /// Cargo answered without the part asked for.
    #[error("cargo metadata for {root} holds no {what}")]
    Absent {
        /// Workspace asked about.
        root: PathBuf,
        /// The missing part.
        what: &'static str,
    },
}

/// Reads the graph of the workspace at `root` as it is resolved for the platform that compiled this crate: dependencies of
/// other platforms are never built here and may not be on this machine.
///
/// # Errors
/// When cargo cannot be run, or answers something that is no resolved graph.
pub fn read(root: &Path) -> Result<Workspace, Error> {
    let absent = |what| Error::Absent { root: root.to_path_buf(), what };
    let metadata = MetadataCommand::new()
        .manifest_path(root.join("Cargo.toml"))
        .other_options(vec![
            "--offline".into(),
            "--locked".into(),
            "--filter-platform".into(),
            host_triple().ok_or_else(|| absent("host triple"))?,
        ])
        .exec()
        .map_err(|source| Error::Cargo { root: root.to_path_buf(), source })?;
    let resolve = metadata.resolve.as_ref().ok_or_else(|| absent("graph"))?;
    let name = |id: &PackageId| metadata[id].name.to_string();
    let arrows = resolve
        .nodes
        .iter()
        .flat_map(|node| {
            node.deps.iter().flat_map(move |dep| {
                dep.dep_kinds.iter().map(move |info| Arrow {
                    from: name(&node.id),
                    to: name(&dep.pkg),
                    kind: kind_of(info.kind),
                })
            })
        })
        .collect();
    let members = metadata.workspace_packages();
    let least_rust = members.iter().filter_map(|package| package.rust_version.clone()).min();
    let foreign_rust = resolve
        .nodes
        .iter()
        .map(|node| &metadata[&node.id])
        .filter(|package| package.source.is_some())
        .filter_map(|package| Some((package.name.to_string(), package.rust_version.clone()?)))
        .collect();
    Ok(Workspace {
        members: members.into_iter().map(member_of).collect(),
        arrows,
        least_rust: least_rust.ok_or_else(|| absent("rust-version"))?,
        foreign_rust,
    })
}

fn kind_of(kind: DependencyKind) -> Kind {
    match kind {
        DependencyKind::Development => Kind::Dev,
        _ => Kind::Normal,
    }
}

fn member_of(package: &cargo_metadata::Package) -> Member {
    let roots = package
        .targets
        .iter()
        .filter(|target| target.is_lib() || target.is_bin() || target.is_proc_macro() || target.is_cdylib())
        .map(|target| target.src_path.clone().into_std_path_buf())
        .collect();
    Member {
        name: package.name.to_string(),
        folder: package.manifest_path.parent().map(|folder| folder.as_std_path().to_path_buf()).unwrap_or_default(),
        roots,
    }
}

fn host_triple() -> Option<String> {
    let output = std::process::Command::new("rustc").arg("-vV").output().ok()?;
    String::from_utf8(output.stdout).ok()?.lines().find_map(|line| line.strip_prefix("host: ").map(str::to_owned))
}
