//! One file a verb. Each gets what was typed, prints, and says how the run ends. Those that speak with a daemon are never inlined:
//! their frames would cost the verbs that do not a page fault a page.

pub(crate) mod bench;
pub(crate) mod buffers;
pub(crate) mod capture;
pub(crate) mod completions;
pub(crate) mod drain;
pub(crate) mod explain;
pub(crate) mod export;
pub(crate) mod gpu_memory;
pub(crate) mod man;
pub(crate) mod path;
pub(crate) mod place;
pub(crate) mod plan;
pub(crate) mod probe;
pub(crate) mod queue_pairs;
pub(crate) mod stats;
pub(crate) mod status;
pub(crate) mod topo;
