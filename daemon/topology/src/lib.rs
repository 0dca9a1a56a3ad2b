//! PCIe topology of a host, P2P levels, GPU-NIC pairing and advice.
//!
//! A library of its own: no unsafe, no tokio, no knowledge of buffers or leases.
//!
//! # Reading a host
//! Every input gives the same [`model::Snapshot`] `{ generation, source, host }`, immutable:
//! - [`read_live`] reads this machine, [`read_root`] a captured tree, [`read_input`] any file or folder by what
//!   it is (captured trees and archives of them, NCCL topology XML, profiles, pasted matrices of nvidia-smi and
//!   rocm-smi), [`read_stream`] the same from a stream, each with [`assemble::ReadOptions`] (`gpu_ids`,
//!   `nccl_topology` from [`read_nccl_topology`]).
//! - [`profile::builtin`]`("dgx-a100")`, [`profile::builtin_names`], [`profile::snapshot`] for text of the
//!   host profile format (docs/host-profile.md), [`profile::render`] to write one, [`sysfs::build::build`] to
//!   write a sysfs tree of it.
//!
//! # The model
//! [`model::Host`] has `gpus` (in PCI order, named `GPU0`…, with `uuid()`, `memory_bytes`, `device_node`,
//! `bdf`, `numa`), `hcas` (verbs name, `ports` with `port_num`, `state`, `link_layer`, `rate_gbps`, `gids`;
//! `card`, `bond`, `origin`), `netdevs`, `drives`, `nvlinks`, `functions` (the PCI tree) and `warnings`.
//! [`model::GpuId`] and [`model::HcaId`] are places in these lists and hold for one snapshot only;
//! [`model::Host::find_gpu`] takes name, uuid or address, [`model::Host::find_hca`] name or address.
//!
//! # Questions
//! - [`model::Host::gpu_hca_level`], `gpu_level`, `hca_level`: [`level::Level`], `None` where nothing is known.
//! - [`model::Host::nvlink_kind`], `nvlinks_between`, `gpu_hca_bottleneck`, `gdr`.
//! - [`plan::plan`]`(&snapshot, &PlanOptions)` pairs GPUs and NICs and gives [`plan::contract::Plan`], which is
//!   the JSON contract `gdrd.plan/v1` (`to_json`); [`plan::replan`] keeps the pairs of a plan before;
//!   [`plan::explain`] tells why each NIC won or lost. Names and addresses only, so plans outlive snapshots.
//! - [`place::place`]`(&snapshot, &options, &PlaceRequest)`: scored sets of free GPUs and NICs.
//! - [`advise::advise_path`]`(&snapshot, &plan, "GPU0", &Destination)`: NVLink, P2P, GPUDirect or staged, and why.
//! - [`bandwidth::matches`]: each GPU's link against its NICs and the switch above, and what is wasted.
//! - [`render::matrix`], [`render::tree`]: text; [`render::svg`]: a picture; [`render::topo`]: JSON `gdrd.topo/v1`.
//! - [`words`]: numbers as all texts have them, and characters that no text may have. [`export`]: the pairing in the words of NCCL, UCX, NVSHMEM, Mooncake and PyTorch.
//! - [`sysfs::capture`]: a tree of this machine to send to others, with all that names it replaced.
//!
//! # Adding a reader
//! A reader is a module that fills a [`model::RawHost`] with what its input lists and hands it to
//! [`assemble::assemble`], which concludes roles, GPUs, cards and bonds the same way for all inputs.
//! Inputs without addresses state levels by name in `given_levels`.
#![forbid(unsafe_code)]

pub mod acs;
pub mod advise;
pub mod assemble;
pub mod bandwidth;
pub mod bdf;
pub mod driver_file;
pub mod error;
pub mod export;
mod foreign;
pub mod gdr;
mod guid;
pub mod level;
pub mod link;
pub mod model;
pub mod nccl_xml;
mod pair;
mod pasted;
pub mod path;
mod paths;
pub mod place;
pub mod plan;
pub mod profile;
mod read;
pub mod render;
pub mod rocm_topo;
pub mod source;
pub mod sysfs;
mod together;
pub mod topo_m;
pub mod words;

pub use error::TopologyError;
pub use read::{read_input, read_live, read_nccl_topology, read_root, read_stream, read_text};
