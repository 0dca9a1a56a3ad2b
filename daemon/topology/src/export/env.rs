//! Environment variables by which communication libraries take this host's pairing.
//!
//! Syntax, by variable:
//! - `NCCL_IB_HCA`: `=name:port,…`, the `=` for whole names (NCCL user guide, environment variables).
//! - `NCCL_SOCKET_IFNAME`: `=name` (the same). `GLOO_SOCKET_IFNAME`, `TP_SOCKET_IFNAME`: the plain name (PyTorch,
//!   `docs/source/distributed.md`, and its tensorpipe backend).
//! - `NCCL_TOPO_FILE`: path of NCCL topology XML.
//! - `UCX_NET_DEVICES`: `name:port,…` (UCX FAQ, `docs/source/faq.rst`).
//! - `NVSHMEM_HCA_PE_MAPPING`: `name:port:count,…` for consecutive PEs, with `NVSHMEM_ENABLE_NIC_PE_MAPPING=1` and
//!   without `NVSHMEM_HCA_LIST`, which goes before (NVSHMEM, `env_defs.h`).
//! - `DEEP_EP_DEVICE_TO_HCA_MAPPING`: `device:name:port,…` by CUDA ordinal, its successor for DeepEP, whose
//!   groups of one PE a GPU defeat the counting (deepseek-ai/DeepEP#466).
//!
//! GPUs count in PCI order, as CUDA does with `CUDA_DEVICE_ORDER=PCI_BUS_ID`; rank means local rank.

use serde::{Deserialize, Serialize};

use super::is_placeholder;
use crate::model::{Hca, HcaOrigin, Host, PortState};
use crate::plan::contract::{GpuPlan, Plan};

/// Name and version of the JSON form.
pub const ENV_SCHEMA: &str = "gdrd.env/v1";

/// Variables for a host and for each of its GPUs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Env {
    /// Always [`ENV_SCHEMA`].
    pub schema: String,
    /// For every process of the host.
    pub host: Vec<Variable>,
    /// For the process of one GPU, in addition; what is in both lists goes by this one.
    pub gpus: Vec<GpuEnv>,
    /// What could not be said, and why.
    pub notes: Vec<String>,
}

/// Variables for the process of one GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuEnv {
    /// Name of the GPU.
    pub gpu: String,
    /// Its place in PCI order.
    pub rank: usize,
    /// The variables.
    pub variables: Vec<Variable>,
}

/// One variable.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Variable {
    /// Its name.
    pub name: String,
    /// Its value; without blanks, quotes and control characters.
    pub value: String,
}

fn variable(name: &str, value: impl Into<String>) -> Variable {
    Variable { name: name.to_owned(), value: value.into() }
}

/// Names that every library and shell takes as they are.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-.".contains(&byte))
}

/// A NIC as `name` and the port to use.
struct Endpoint<'a> {
    name: &'a str,
    port_num: u8,
}

/// The active ports of a NIC, else its first: a port that is down now may be up when the job starts.
fn endpoints<'a>(hca: &'a Hca) -> Vec<Endpoint<'a>> {
    let active: Vec<u8> =
        hca.ports.iter().filter(|port| port.state == PortState::Active).map(|port| port.port_num).collect();
    let first = hca.ports.first().map_or(1, |port| port.port_num);
    let ports = if active.is_empty() { vec![first] } else { active };
    ports.into_iter().map(|port_num| Endpoint { name: &hca.name, port_num }).collect()
}

struct Writer<'a> {
    host: &'a Host,
    notes: Vec<String>,
}

/// The variables of a plan. `topo_file` is where the NCCL topology XML of this host is kept, if anywhere.
#[must_use]
pub fn env(host: &Host, plan: &Plan, topo_file: Option<&str>) -> Env {
    let mut writer = Writer { host, notes: Vec::new() };
    let mut shared = Vec::new();
    shared.extend(writer.nccl_of_host(plan));
    shared.extend(topo_file.map(|path| variable("NCCL_TOPO_FILE", path)));
    shared.extend(writer.nvshmem(plan));
    shared.extend(writer.sockets());
    let of_gpu = |(rank, gpu): (usize, &GpuPlan)| GpuEnv { gpu: gpu.name.clone(), rank, variables: writer.of_gpu(gpu) };
    let gpus = plan.gpus.iter().enumerate().map(of_gpu).collect();
    Env { schema: ENV_SCHEMA.to_owned(), host: shared, gpus, notes: writer.notes }
}

/// `name:port` of each, joined by commas.
fn list(endpoints: &[Endpoint<'_>]) -> String {
    let words: Vec<String> = endpoints.iter().map(|end| format!("{}:{}", end.name, end.port_num)).collect();
    words.join(",")
}

impl<'a> Writer<'a> {
    /// NICs by name that verbs has under this name and every library can be told of.
    fn hcas<'n>(&self, names: impl Iterator<Item = &'n String>) -> Vec<&'a Hca> {
        let verbs = |hca: &&Hca| {
            let has_verbs = !matches!(hca.origin, HcaOrigin::Assumed | HcaOrigin::Socket);
            has_verbs && is_plain(&hca.name) && !is_placeholder(hca)
        };
        names.filter_map(|name| self.host.hcas.iter().find(|hca| hca.name == *name)).filter(verbs).collect()
    }

    fn nccl_of_host(&mut self, plan: &Plan) -> Option<Variable> {
        let given: Vec<String> =
            plan.nics.iter().filter(|nic| !nic.gpus.is_empty()).map(|nic| nic.name.clone()).collect();
        let hcas = self.hcas(given.iter());
        if let Some(nameless) = super::nameless(self.host, |hca| given.contains(&hca.name)) {
            self.notes.push(format!("{nameless}; left out"));
        } else if hcas.len() < given.len() {
            self.notes.push("NICs without a verbs name that can be written are left out".to_owned());
        }
        let ends: Vec<Endpoint<'_>> = hcas.into_iter().flat_map(endpoints).collect();
        (!ends.is_empty()).then(|| variable("NCCL_IB_HCA", format!("={}", list(&ends))))
    }

    fn of_gpu(&self, gpu: &GpuPlan) -> Vec<Variable> {
        let ends: Vec<Endpoint<'_>> = self.hcas(gpu.assigned.iter()).into_iter().flat_map(endpoints).collect();
        if ends.is_empty() {
            return Vec::new();
        }
        vec![variable("NCCL_IB_HCA", format!("={}", list(&ends))), variable("UCX_NET_DEVICES", list(&ends))]
    }

    /// One NIC a PE: NVSHMEM takes no more.
    fn nvshmem(&mut self, plan: &Plan) -> Vec<Variable> {
        let first = |gpu: &'_ GpuPlan| self.hcas(gpu.assigned.iter()).into_iter().flat_map(endpoints).next();
        let ends: Option<Vec<Endpoint<'_>>> = plan.gpus.iter().map(first).collect();
        let Some(ends) = ends.filter(|ends| !ends.is_empty()) else {
            self.notes
                .push("NVSHMEM counts PEs from the first GPU, and not every GPU has a NIC: not mapped".to_owned());
            return Vec::new();
        };
        let mut runs: Vec<(String, usize)> = Vec::new();
        for end in &ends {
            let name = format!("{}:{}", end.name, end.port_num);
            match runs.last_mut() {
                Some((last, count)) if *last == name => *count += 1,
                _ => runs.push((name, 1)),
            }
        }
        let mapping: Vec<String> = runs.iter().map(|(name, count)| format!("{name}:{count}")).collect();
        let by_device: Vec<String> =
            ends.iter().enumerate().map(|(place, end)| format!("{place}:{}:{}", end.name, end.port_num)).collect();
        vec![
            variable("NVSHMEM_ENABLE_NIC_PE_MAPPING", "1"),
            variable("NVSHMEM_HCA_PE_MAPPING", mapping.join(",")),
            variable("DEEP_EP_DEVICE_TO_HCA_MAPPING", by_device.join(",")),
        ]
    }

    /// Bootstrap traffic leaves by the default route, by the bond where its interface belongs to one.
    fn sockets(&mut self) -> Vec<Variable> {
        let routed = self.host.netdevs.iter().find(|netdev| netdev.has_default_route);
        let name = routed.map(|netdev| netdev.master.as_ref().unwrap_or(&netdev.name)).filter(|name| is_plain(name));
        let Some(name) = name else {
            self.notes
                .push("no interface is known to have the default route: socket interfaces are not set".to_owned());
            return Vec::new();
        };
        vec![
            variable("NCCL_SOCKET_IFNAME", format!("={name}")),
            variable("GLOO_SOCKET_IFNAME", name.clone()),
            variable("TP_SOCKET_IFNAME", name.clone()),
        ]
    }
}

impl Env {
    /// The variables of the host, or of one GPU with those of the host that it does not replace.
    #[must_use]
    pub fn of(&self, gpu: Option<&GpuEnv>) -> Vec<Variable> {
        let own = gpu.map(|gpu| gpu.variables.clone()).unwrap_or_default();
        let is_replaced = |shared: &&Variable| own.iter().any(|variable| variable.name == shared.name);
        let shared = self.host.iter().filter(|shared| !is_replaced(shared)).cloned();
        own.iter().cloned().chain(shared).collect()
    }
}
