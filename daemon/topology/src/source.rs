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
    /// File or folder, or the name of a built-in profile; `None` for the live host.
    pub path: Option<PathBuf>,
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
