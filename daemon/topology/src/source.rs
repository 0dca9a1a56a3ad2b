//! Where a fact comes from. Every device and every merged fact carries its source.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Kind of input that a fact was read from. Prints as in the `source.kind` of gdrd.plan/v1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum SourceKind {
    /// The `/sys` of this machine.
    Live,
    /// A captured sysfs tree.
    Sysfs,
    /// A host profile.
    Profile,
    /// NCCL topology XML.
    NcclXml,
    /// Text of `nvidia-smi topo -m`.
    TopoM,
    /// Text of `rocm-smi --showtopo`.
    RocmTopo,
    /// The NVIDIA management library.
    Nvml,
    /// The operator's configuration.
    Operator,
    /// Concluded from other facts, such as a NUMA node taken from the bridge above.
    Derived,
}

/// Where a snapshot was read from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// Kind of input.
    pub kind: SourceKind,
    /// File or folder, or the name of a built-in profile; `None` for the live host. Printed with what is no
    /// text in it replaced.
    #[serde(serialize_with = "as_text")]
    pub path: Option<PathBuf>,
}

fn as_text<S: serde::Serializer>(path: &Option<PathBuf>, serializer: S) -> Result<S::Ok, S::Error> {
    match path {
        Some(path) => serializer.collect_str(&path.display()),
        None => serializer.serialize_none(),
    }
}

/// A value and the input that gave it, for facts that more than one input can give.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sourced<T> {
    /// The fact.
    pub value: T,
    /// Who said so.
    pub source: SourceKind,
}

impl<T> Sourced<T> {
    /// A value with its source.
    pub fn new(value: T, source: SourceKind) -> Self {
        Self { value, source }
    }
}
