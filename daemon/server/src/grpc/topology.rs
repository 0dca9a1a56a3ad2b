//! Service `Topology`: what the host is and what follows from it. Open to every local user.

use std::pin::Pin;
use std::sync::Arc;

use futures_util::{Stream, StreamExt};
use gdrd_engine::{Engine, InUse};
use gdrd_proto::v1::{self, topology_server};
use gdrd_topology::TopologyError;
use gdrd_topology::advise::{Destination, advise_path};
use gdrd_topology::model::Host;
use gdrd_topology::place::{PlaceRequest, PlaceSet, default_nics, place, planned};
use gdrd_topology::plan::contract::{GpuPlan, NicPlan, PairPlan, Plan};
use gdrd_topology::plan::explain;
use serde::Serialize;
use tokio::sync::Semaphore;
use tokio_stream::wrappers::WatchStream;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Request, Response, Status};

use crate::status::{bad_argument, status};
use crate::topology::{Topology, View};

/// The service.
#[derive(Debug, Clone)]
pub(crate) struct TopologyService {
    pub(crate) topology: Topology,
    pub(crate) engine: Engine,
    pub(crate) stop: CancellationToken,
    /// Turns of placing, which takes the CPU for a while.
    pub(crate) placing: Arc<Semaphore>,
}

#[tonic::async_trait]
impl topology_server::Topology for TopologyService {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<v1::GetTopologyResponse, Status>> + Send>>;

    async fn get(
        &self,
        _request: Request<v1::GetTopologyRequest>,
    ) -> Result<Response<v1::GetTopologyResponse>, Status> {
        Ok(Response::new(self.topology.current().response().clone()))
    }

    async fn watch(&self, _request: Request<v1::WatchTopologyRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let views = WatchStream::new(self.topology.subscribe());
        let stop = self.stop.clone().cancelled_owned();
        Ok(Response::new(Box::pin(views.map(|view: Arc<View>| Ok(view.response().clone())).take_until(stop))))
    }

    async fn explain(&self, request: Request<v1::ExplainRequest>) -> Result<Response<v1::ExplainResponse>, Status> {
        let gpu = request.into_inner().gpu;
        let view = self.topology.current();
        let explained = explain(view.snapshot(), self.topology.options(), Some(view.plan()), &gpu);
        let explained = explained.map_err(|refusal| of_topology(&refusal))?;
        let winners = explained.winners.into_iter().map(|winner| v1::ExplainCandidate {
            nic: winner.nic,
            level: level(winner.level.as_ref()),
            gbps: winner.bottleneck.map(|narrowest| narrowest.gbps),
            assigned: true,
            reason: shared_by(&winner.gpus),
        });
        let losers = explained.losers.into_iter().map(|loser| v1::ExplainCandidate {
            nic: loser.nic,
            level: level(loser.level.as_ref()),
            gbps: loser.bottleneck.map(|narrowest| narrowest.gbps),
            assigned: false,
            reason: loser.why,
        });
        Ok(Response::new(v1::ExplainResponse {
            generation: view.generation(),
            gpu: explained.gpu,
            summary: explained.reason,
            candidates: winners.chain(losers).collect(),
        }))
    }

    async fn advise_path(
        &self,
        request: Request<v1::AdvisePathRequest>,
    ) -> Result<Response<v1::AdvisePathResponse>, Status> {
        let request = request.into_inner();
        let to = match request.to {
            Some(v1::advise_path_request::To::Gpu(gpu)) => Destination::Gpu(gpu),
            Some(v1::advise_path_request::To::Remote(_)) => Destination::Remote,
            Some(v1::advise_path_request::To::Drive(drive)) => {
                Destination::Drive(Some(drive).filter(|drive| !drive.is_empty()))
            }
            None => return Err(bad_argument("to is missing: want a GPU, a remote host or a drive".to_owned())),
        };
        let view = self.topology.current();
        let advice = advise_path(view.snapshot(), view.plan(), &request.from, &to);
        let advice = advice.map_err(|refusal| of_topology(&refusal))?;
        Ok(Response::new(v1::AdvisePathResponse {
            generation: view.generation(),
            from: advice.from,
            to: advice.to,
            kind: word(&advice.kind),
            via: advice.via,
            level: level(advice.level.as_ref()),
            gbps: advice.gbps,
            reason: advice.reason,
            fallback: advice.fallback.map(|next| v1::PathFallback {
                kind: word(&next.kind),
                via: next.via,
                gbps: next.gbps,
                reason: next.reason,
            }),
        }))
    }

    async fn place(&self, request: Request<v1::PlaceRequest>) -> Result<Response<v1::PlaceResponse>, Status> {
        let view = self.topology.current();
        let request = request.into_inner();
        let exclusive = request.exclusive;
        let mut request = place_request(request, view.plan())?;
        let (options, engine) = (self.topology.clone(), self.engine.clone());
        // Scoring every set of a large host takes a while, and anyone may ask.
        let turn = Arc::clone(&self.placing).acquire_owned().await.map_err(|_| stopping())?;
        let answer = tokio::task::spawn_blocking(move || {
            leave_out(&engine, exclusive, &view.snapshot().host, &mut request);
            let placed = place(view.snapshot(), options.options(), &request);
            drop(turn);
            placed.map(|placement| (view.generation(), placement))
        });
        let (generation, placement) = answer.await.map_err(|_| stopping())?.map_err(|refusal| of_topology(&refusal))?;
        let set = |set: PlaceSet| v1::Placement {
            gpus: set.gpus,
            nics: set.nics,
            score: set.score,
            reason: set.reasons.join("; "),
        };
        let placements = placement.sets.into_iter().map(set).collect();
        Ok(Response::new(v1::PlaceResponse { generation, placements, reason: placement.reason.unwrap_or_default() }))
    }
}

/// Sets returned unless the request says otherwise.
const DEFAULT_PLACEMENTS: u32 = 8;

fn place_request(request: v1::PlaceRequest, plan: &Plan) -> Result<PlaceRequest, Status> {
    let count = |field: &str, value: u32| {
        usize::try_from(value).map_err(|_| bad_argument(format!("{field} {value} is out of range")))
    };
    let gpus = count("gpus", request.gpus)?;
    let nics = request.nics.map_or(Ok(default_nics(plan, gpus)), |nics| count("nics", nics))?;
    let max_sets = if request.max_results == 0 { DEFAULT_PLACEMENTS } else { request.max_results };
    Ok(PlaceRequest {
        gpus,
        nics,
        busy_gpus: request.exclude_gpus,
        drained_gpus: plan.drained(),
        busy_nics: request.exclude_nics,
        planned: planned(plan),
        nvlink: request.nvlink,
        same_switch: request.same_switch,
        same_numa: request.same_numa,
        max_sets: count("max_results", max_sets)?,
        ..PlaceRequest::default()
    })
}

/// Leaves out what the engine cannot lend, and what it has lent where devices are wanted that nobody uses. The engine may know
/// devices that this snapshot does not have.
fn leave_out(engine: &Engine, exclusive: bool, host: &Host, request: &mut PlaceRequest) {
    request.lost_gpus = engine.lost_gpus();
    request.lost_gpus.retain(|gpu| host.find_gpu(gpu).is_some());
    if exclusive {
        let InUse { gpus, hcas } = engine.in_use();
        let is_told = |gpu: &String| request.lost_gpus.contains(gpu) || request.drained_gpus.contains(gpu);
        request.leased_gpus = gpus.into_iter().filter(|gpu| host.find_gpu(gpu).is_some() && !is_told(gpu)).collect();
        request.leased_nics = hcas.into_iter().filter(|hca| host.find_hca(hca).is_some()).collect();
    }
}

fn stopping() -> Status {
    status(Code::Unavailable, "SHUTTING_DOWN", "the daemon is shutting down")
}

/// The table for topology: what a caller names wrongly is its fault, all else is ours.
fn of_topology(refusal: &TopologyError) -> Status {
    match refusal {
        TopologyError::NoSuchDevice { what: "GPU", .. } => status(Code::NotFound, "GPU_UNKNOWN", refusal.to_string()),
        TopologyError::NoDrive | TopologyError::NoSuchDevice { what: "drive", .. } => {
            status(Code::NotFound, "DRIVE_UNKNOWN", refusal.to_string())
        }
        TopologyError::NoSuchDevice { .. } => status(Code::NotFound, "NIC_UNKNOWN", refusal.to_string()),
        TopologyError::BadRequest { .. } => bad_argument(refusal.to_string()),
        _ => status(Code::Internal, "INTERNAL", refusal.to_string()),
    }
}

fn shared_by(gpus: &[String]) -> String {
    match gpus {
        [] | [_] => "assigned to this GPU alone".to_owned(),
        gpus => format!("assigned, shared by {}", gpus.join(", ")),
    }
}

fn level(level: Option<&impl ToString>) -> String {
    level.map(ToString::to_string).unwrap_or_default()
}

/// A word of gdrd.plan/v1, which is how the model serializes.
fn word(value: &impl Serialize) -> String {
    let value = serde_json::to_value(value).ok();
    value.as_ref().and_then(serde_json::Value::as_str).unwrap_or_default().to_owned()
}

/// A plan on the wire: the fields of gdrd.plan/v1.
pub(crate) fn wire_plan(plan: &Plan) -> v1::Plan {
    v1::Plan {
        generation: plan.generation,
        source: Some(v1::PlanSource {
            kind: word(&plan.source.kind),
            path: plan.source.path.as_ref().map(|path| path.display().to_string()),
        }),
        gpus: plan.gpus.iter().map(wire_gpu).collect(),
        nics: plan.nics.iter().map(wire_nic).collect(),
        nvlink_kind: plan.nvlink.kind.as_ref().map(word),
        warnings: plan.warnings.clone(),
    }
}

fn wire_gpu(gpu: &GpuPlan) -> v1::PlanGpu {
    v1::PlanGpu {
        name: gpu.name.clone(),
        uuid: gpu.uuid.clone(),
        bdf: gpu.bdf.map(|bdf| bdf.to_string()),
        numa: gpu.numa.map(|numa| u32::from(numa.0)),
        assigned: gpu.assigned.clone(),
        rail: gpu.rail,
        reason: gpu.reason.clone(),
        drained: gpu.drained,
        nics: gpu.nics.iter().map(wire_path).collect(),
    }
}

fn wire_path(pair: &PairPlan) -> v1::PlanPath {
    v1::PlanPath {
        name: pair.name.clone(),
        bdf: pair.bdf.map(|bdf| bdf.to_string()),
        level: level(pair.level.as_ref()),
        gbps: pair.gbps,
        gdr: Some(v1::GdrAbility { state: word(&pair.gdr.state), reason: pair.gdr.reason.clone() }),
        acs: pair.acs.as_ref().map(|acs| v1::PeerAcs { state: word(&acs.state), reason: acs.reason.clone() }),
    }
}

fn wire_nic(nic: &NicPlan) -> v1::PlanNic {
    let ports = nic.ports.iter().map(|port| v1::PlanPort {
        port_num: u32::from(port.port_num),
        state: word(&port.state),
        link_layer: word(&port.link_layer),
        rate_gbps: port.rate_gbps,
    });
    v1::PlanNic {
        name: nic.name.clone(),
        bdf: nic.bdf.map(|bdf| bdf.to_string()),
        numa: nic.numa.map(|numa| u32::from(numa.0)),
        card: nic.card.map(|card| card.to_string()),
        rate_gbps: nic.rate_gbps,
        ports: ports.collect(),
        gpus: nic.gpus.clone(),
    }
}
