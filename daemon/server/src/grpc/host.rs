//! Service `Host`: what the daemon is and how much it does. Open to every local user: nothing here names a tenant.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gdrd_engine::{Drained, Engine, ProbeOutcome, Probed, UnderWay};
use gdrd_proto::v1::{self, host_server};
use gdrd_topology::plan::Move;
use tonic::{Code, Request, Response, Status};

use super::caller;
use crate::admission::Admission;
use crate::proofs::PROVEN;
use crate::session::version::{DAEMON_VERSION, VERSIONS};
use crate::status::{of_engine, status};
use crate::topology::Topology;

/// One hardware backend and whether it is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backend {
    /// sim, verbs, cuda or nvml.
    pub name: &'static str,
    /// Whether it serves.
    pub present: bool,
    /// Why it is absent, or what it found.
    pub reason: String,
}

/// Every backend a daemon knows of. Clones are one.
#[derive(Debug, Clone, Default)]
pub struct Backends(Arc<Mutex<Vec<Backend>>>);

impl Backends {
    /// These.
    #[must_use]
    pub fn new(backends: Vec<Backend>) -> Self {
        Self(Arc::new(Mutex::new(backends)))
    }

    /// What they are now.
    #[must_use]
    pub fn list(&self) -> Vec<Backend> {
        self.lock().clone()
    }

    /// Says otherwise of the backend of this name.
    pub fn set(&self, now: Backend) {
        if let Some(known) = self.lock().iter_mut().find(|backend| backend.name == now.name) {
            *known = now;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Backend>> {
        // Each change is one store, so a panic elsewhere leaves it whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the daemon tells about itself.
#[derive(Debug, Clone, Default)]
pub struct HostFacts {
    /// Every backend this daemon knows of.
    pub backends: Backends,
    /// Name of the simulated host's profile; empty with hardware.
    pub sim_profile: String,
    /// Folder of the sockets.
    pub runtime_dir: String,
}

/// The service.
#[derive(Debug, Clone)]
pub(crate) struct Host {
    pub(crate) engine: Engine,
    pub(crate) topology: Topology,
    pub(crate) facts: Arc<HostFacts>,
    pub(crate) grpc_connections: Arc<Admission>,
    pub(crate) session_connections: Arc<Admission>,
}

fn bug(error: &dyn std::fmt::Display) -> Status {
    status(Code::Internal, "INTERNAL", error.to_string())
}

#[tonic::async_trait]
impl host_server::Host for Host {
    async fn status(&self, _request: Request<v1::StatusRequest>) -> Result<Response<v1::StatusResponse>, Status> {
        let backend = |backend: &Backend| v1::Backend {
            name: backend.name.to_owned(),
            present: backend.present,
            reason: backend.reason.clone(),
        };
        let drained = self.engine.drained_gpus().into_iter();
        let drained = drained.map(|gpu| v1::DrainedGpu { gpu: gpu.name, gpu_uuid: gpu.uuid.0 });
        Ok(Response::new(v1::StatusResponse {
            daemon_version: DAEMON_VERSION.to_owned(),
            versions: Some(VERSIONS),
            backends: self.facts.backends.list().iter().map(backend).collect(),
            sim_profile: self.facts.sim_profile.clone(),
            topology_generation: self.topology.current().generation(),
            runtime_dir: self.facts.runtime_dir.clone(),
            drained_gpus: drained.collect(),
        }))
    }

    async fn drain(&self, request: Request<v1::DrainRequest>) -> Result<Response<v1::DrainResponse>, Status> {
        let viewer = caller::viewer(&self.engine, &request)?;
        let v1::DrainRequest { gpu, resume } = request.into_inner();
        let (engine, topology) = (self.engine.clone(), self.topology.clone());
        let call = move || {
            let done = match resume {
                true => engine.resume_gpus(&viewer, &gpu).map(|uuids| Drained { uuids, under_way: Vec::new() }),
                false => engine.drain_gpus(&viewer, &gpu),
            };
            topology.note_drained(|| engine.drained_gpus());
            done
        };
        // It waits for the end of the driver's processes.
        let done = tokio::task::spawn_blocking(call).await;
        let Drained { uuids, under_way } = done.map_err(|error| bug(&error))?.map_err(|refusal| of_engine(&refusal))?;
        let under_way = under_way.into_iter().map(|UnderWay { uuid, call, buffers }| v1::CallsUnderWay {
            gpu_uuid: uuid.0,
            call: call.to_owned(),
            buffers,
        });
        let gpu_uuids = uuids.into_iter().map(|uuid| uuid.0).collect();
        Ok(Response::new(v1::DrainResponse { gpu_uuids, under_way: under_way.collect() }))
    }

    async fn apply_plan(
        &self,
        request: Request<v1::ApplyPlanRequest>,
    ) -> Result<Response<v1::ApplyPlanResponse>, Status> {
        let viewer = caller::viewer(&self.engine, &request)?;
        self.engine.require_admin(&viewer, "to apply a plan").map_err(|refusal| of_engine(&refusal))?;
        let topology = self.topology.clone();
        // Large hosts take a while to plan.
        let moved = tokio::task::spawn_blocking(move || topology.adopt()).await.map_err(|error| bug(&error))?;
        let moved = moved.into_iter().map(|Move { gpu, from, to }| v1::MovedGpu { gpu, from, to });
        let generation = self.topology.current().generation();
        Ok(Response::new(v1::ApplyPlanResponse { generation, moved: moved.collect() }))
    }

    async fn gpu_memory(
        &self,
        _request: Request<v1::GpuMemoryRequest>,
    ) -> Result<Response<v1::GpuMemoryResponse>, Status> {
        let engine = self.engine.clone();
        let gpus = tokio::task::spawn_blocking(move || engine.gpu_memory()).await.map_err(|error| bug(&error))?;
        Ok(Response::new(v1::GpuMemoryResponse { gpus: gpus.into_iter().map(gpu_memory).collect() }))
    }

    async fn probe(&self, request: Request<v1::ProbeRequest>) -> Result<Response<v1::ProbeResponse>, Status> {
        if request.get_ref().known {
            return Ok(Response::new(v1::ProbeResponse { pairs: self.known(request.get_ref()) }));
        }
        let viewer = caller::viewer(&self.engine, &request)?;
        let v1::ProbeRequest { gpu, hca, .. } = request.into_inner();
        let engine = self.engine.clone();
        let done = tokio::task::spawn_blocking(move || engine.probe(&viewer, &gpu, &hca)).await;
        let probed = done.map_err(|error| bug(&error))?.map_err(|refusal| of_engine(&refusal))?;
        self.topology.prove(&probed);
        Ok(Response::new(v1::ProbeResponse { pairs: probed.into_iter().map(pair).collect() }))
    }

    async fn stats(&self, _request: Request<v1::StatsRequest>) -> Result<Response<v1::StatsResponse>, Status> {
        let mut stats: Vec<v1::Stat> = self.engine.stats().into_iter().map(stat).collect();
        stats.push(gauge("gdrd_grpc_connections", "Open gRPC connections.", self.grpc_connections.total()));
        let help = "Open connections of the session socket, those without a hello included.";
        stats.push(gauge("gdrd_session_connections", help, self.session_connections.total()));
        for (socket, admission) in [("grpc", &self.grpc_connections), ("session", &self.session_connections)] {
            let help = "Connections refused: their user, or all, had as many as they may.";
            let mut refused = gauge("gdrd_connections_refused_total", help, admission.refused());
            refused.labels.insert("socket".to_owned(), socket.to_owned());
            stats.push(refused);
        }
        Ok(Response::new(v1::StatsResponse { stats }))
    }
}

impl Host {
    /// What earlier probes found of what is asked for, and what they could not try.
    fn known(&self, asked: &v1::ProbeRequest) -> Vec<v1::ProbedPair> {
        let view = self.topology.current();
        let host = &view.snapshot().host;
        let gpu = host.find_gpu(&asked.gpu).and_then(|id| host.gpu(id)).map_or(asked.gpu.as_str(), |gpu| &gpu.name);
        let is_asked = |asked: &str, name: &str| asked.is_empty() || asked == name;
        let probed = self.topology.probed().into_iter().chain(self.topology.untried());
        probed.filter(|found| is_asked(gpu, &found.gpu) && is_asked(&asked.hca, &found.hca)).map(pair).collect()
    }
}

fn gpu_memory(gpu: gdrd_engine::GpuMemoryUse) -> v1::GpuMemoryUse {
    let others_bytes = gpu.others_bytes().unwrap_or_default();
    let driver = gpu.driver.map(|driver| v1::GpuDriverMemory {
        total_bytes: driver.total_bytes,
        reserved_bytes: driver.reserved_bytes,
        used_bytes: driver.used_bytes,
        context_bytes: driver.context_bytes,
        others_bytes,
        bar1_total_bytes: driver.bar1.map(|bar1| bar1.total_bytes),
        bar1_used_bytes: driver.bar1.map(|bar1| bar1.used_bytes),
        bar1_used_at_start_bytes: driver.bar1.map(|bar1| bar1.used_at_start_bytes),
    });
    v1::GpuMemoryUse {
        gpu_uuid: gpu.gpu.0,
        name: gpu.name,
        unavailable: gpu.unavailable,
        leased_bytes: gpu.buffers.leased,
        ready_bytes: gpu.buffers.ready,
        clean_bytes: gpu.buffers.clean,
        changing_bytes: gpu.buffers.changing,
        driver,
    }
}

fn pair(probed: Probed) -> v1::ProbedPair {
    let Probed { gpu, hca, port_num, outcome } = probed;
    let (state, reason, figures) = match outcome {
        ProbeOutcome::Proven(figures) => ("proven", PROVEN.to_owned(), Some(figures)),
        ProbeOutcome::Failed(reason) => ("failed", reason, None),
        ProbeOutcome::NotTried(reason) => ("not-tried", reason, None),
        _ => ("not-tried", "unknown".to_owned(), None),
    };
    v1::ProbedPair {
        gpu,
        hca,
        port_num: u32::from(port_num),
        state: state.to_owned(),
        reason,
        gbps: figures.map(|figures| figures.gbps),
        latency_us: figures.map(|figures| figures.latency_us),
    }
}

fn stat(stat: gdrd_engine::Stat) -> v1::Stat {
    let labels = stat.labels.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    v1::Stat { name: stat.name.to_owned(), labels, value: stat.value, help: stat.help.to_owned() }
}

fn gauge(name: &str, help: &str, value: u32) -> v1::Stat {
    v1::Stat { name: name.to_owned(), labels: HashMap::new(), value: f64::from(value), help: help.to_owned() }
}
