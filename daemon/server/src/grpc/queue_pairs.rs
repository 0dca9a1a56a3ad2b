//! Service `QueuePairs`: brokered queue pairs. Decides nothing; the engine does.

use gdrd_engine::{
    DirectGrant, Endpoint, Engine, Gid, LeaseId, LinkLayer, QueuePairId, QueuePairInfo, QueuePairRequest, QueuePairType,
};
use gdrd_proto::v1::{self, queue_pairs_server};
use tonic::{Code, Request, Response, Status};

use super::{caller, page};
use crate::session::{Parcel, Sessions};
use crate::status::{bad_argument, of_engine, status};

/// The service.
#[derive(Debug, Clone)]
pub(crate) struct QueuePairs {
    pub(crate) engine: Engine,
    pub(crate) sessions: Sessions,
}

#[tonic::async_trait]
impl queue_pairs_server::QueuePairs for QueuePairs {
    async fn create(&self, request: Request<v1::CreateQueuePairRequest>) -> Result<Response<v1::QueuePair>, Status> {
        let session = caller::session(&self.engine, &request)?;
        let wanted = queue_pair_request(request.into_inner())?;
        let grant = self.engine.create_queue_pair(session, wanted).await.map_err(|refusal| of_engine(&refusal))?;
        // No wait from here to the answer: a call cancelled earlier drops the grant, which the engine takes back.
        let (info, ring, doorbell) = grant.keep();
        let parcel = Parcel::Ring { queue_pair: info.id, ring, doorbell };
        let delivery_id = self.sessions.deliver(session, parcel).map_err(|refusal| of_engine(&refusal))?;
        Ok(Response::new(v1::QueuePair { delivery_id, ..queue_pair(&info) }))
    }

    async fn connect(
        &self,
        request: Request<v1::ConnectQueuePairRequest>,
    ) -> Result<Response<v1::ConnectQueuePairResponse>, Status> {
        let session = caller::session(&self.engine, &request)?;
        let v1::ConnectQueuePairRequest { queue_pair_id, remote } = request.into_inner();
        let remote = remote.ok_or_else(|| bad_argument("remote is missing; pass the endpoint of the other side"))?;
        let remote = endpoint_from_wire(&remote)?;
        let connected = self.engine.connect_queue_pair(session, QueuePairId(queue_pair_id), remote).await;
        connected.map_err(|refusal| of_engine(&refusal))?;
        Ok(Response::new(v1::ConnectQueuePairResponse {}))
    }

    async fn destroy(
        &self,
        request: Request<v1::DestroyQueuePairRequest>,
    ) -> Result<Response<v1::DestroyQueuePairResponse>, Status> {
        let session = caller::session(&self.engine, &request)?;
        let queue_pair = QueuePairId(request.into_inner().queue_pair_id);
        self.engine.destroy_queue_pair(session, queue_pair).await.map_err(|refusal| of_engine(&refusal))?;
        Ok(Response::new(v1::DestroyQueuePairResponse {}))
    }

    async fn open_direct(
        &self,
        request: Request<v1::OpenDirectRequest>,
    ) -> Result<Response<v1::DirectContext>, Status> {
        let session = caller::session(&self.engine, &request)?;
        let v1::OpenDirectRequest { hca, lease_ids } = request.into_inner();
        let engine = self.engine.clone();
        let open = move || engine.open_direct(session, &hca, &lease_ids.into_iter().map(LeaseId).collect::<Vec<_>>());
        // It waits for the driver.
        let opened = tokio::task::spawn_blocking(open).await;
        let opened = opened.map_err(|error| status(Code::Internal, "INTERNAL", error.to_string()))?;
        let DirectGrant { hca, context, pd_handle, regions } = opened.map_err(|refusal| of_engine(&refusal))?;
        let parcel = Parcel::Context { hca: hca.to_string(), context };
        let delivery_id = self.sessions.deliver(session, parcel).map_err(|refusal| of_engine(&refusal))?;
        let region = |region: gdrd_engine::DirectRegion| v1::DirectRegion {
            lease_id: region.lease.0,
            mr_handle: region.mr_handle,
            rkey: region.rkey.0,
            iova: region.iova,
            size_bytes: region.len_bytes,
        };
        let regions = regions.into_iter().map(region).collect();
        Ok(Response::new(v1::DirectContext { hca: hca.to_string(), pd_handle, regions, delivery_id }))
    }

    async fn list(
        &self,
        request: Request<v1::ListQueuePairsRequest>,
    ) -> Result<Response<v1::ListQueuePairsResponse>, Status> {
        let viewer = caller::viewer(&self.engine, &request)?;
        let v1::ListQueuePairsRequest { page_size, page_token } = request.into_inner();
        let start = page::start(&page_token)?.map(QueuePairId);
        let found = self.engine.list_queue_pairs(&viewer, start, page_size).map_err(|refusal| of_engine(&refusal))?;
        let rows = found.queue_pairs.iter().map(|info| (info.id.0, queue_pair(info))).collect();
        let (queue_pairs, next_page_token) = page::cut(rows, found.next.map(|id| id.0));
        Ok(Response::new(v1::ListQueuePairsResponse { queue_pairs, next_page_token }))
    }
}

fn queue_pair_request(request: v1::CreateQueuePairRequest) -> Result<QueuePairRequest, Status> {
    let qp_type = match v1::QueuePairType::try_from(request.r#type) {
        Ok(v1::QueuePairType::Unspecified | v1::QueuePairType::Rc) => QueuePairType::Rc,
        Ok(v1::QueuePairType::Ud) => QueuePairType::Ud,
        Err(_) => return Err(bad_argument(format!("type {} is no queue pair type; use RC or UD", request.r#type))),
    };
    Ok(QueuePairRequest {
        hca: request.hca,
        gpu: request.gpu,
        port_num: narrow("port_num", request.port_num)?,
        qp_type,
        send_depth: request.send_depth,
        recv_depth: request.recv_depth,
    })
}

fn queue_pair(info: &QueuePairInfo) -> v1::QueuePair {
    let qp_type = match info.qp_type {
        QueuePairType::Rc => v1::QueuePairType::Rc,
        QueuePairType::Ud => v1::QueuePairType::Ud,
        _ => v1::QueuePairType::Unspecified,
    };
    v1::QueuePair {
        queue_pair_id: info.id.0,
        hca: info.hca.to_string(),
        port_num: u32::from(info.port_num),
        qp_num: info.qp_num,
        r#type: qp_type.into(),
        state: info.state.name().to_owned(),
        endpoint: Some(endpoint_to_wire(&info.endpoint)),
        send_depth: info.send_depth,
        recv_depth: info.recv_depth,
        max_inline_bytes: info.max_inline_bytes,
        delivery_id: 0,
        tenant: info.tenant.to_string(),
        provider_note: String::new(),
    }
}

const INFINIBAND: &str = "InfiniBand";
const ETHERNET: &str = "Ethernet";

fn endpoint_to_wire(endpoint: &Endpoint) -> v1::Endpoint {
    let link_layer = match endpoint.link_layer {
        LinkLayer::InfiniBand => INFINIBAND,
        LinkLayer::Ethernet => ETHERNET,
        _ => "",
    };
    v1::Endpoint {
        qp_num: endpoint.qp_num,
        port_num: u32::from(endpoint.port_num),
        gid: endpoint.gid.0.to_vec(),
        gid_index: u32::from(endpoint.gid_index),
        lid: u32::from(endpoint.lid),
        psn: endpoint.psn,
        mtu_bytes: endpoint.mtu_bytes,
        link_layer: link_layer.to_owned(),
    }
}

fn endpoint_from_wire(endpoint: &v1::Endpoint) -> Result<Endpoint, Status> {
    let gid = endpoint.gid.as_slice().try_into().map(Gid);
    let gid = gid.map_err(|_| bad_argument(format!("remote.gid has {} bytes, a GID has 16", endpoint.gid.len())))?;
    let link_layer = match endpoint.link_layer.as_str() {
        INFINIBAND => LinkLayer::InfiniBand,
        ETHERNET => LinkLayer::Ethernet,
        other => {
            let shown: String = other.chars().take(32).collect();
            return Err(bad_argument(format!("remote.link_layer {shown:?} is neither {INFINIBAND} nor {ETHERNET}")));
        }
    };
    Ok(Endpoint {
        qp_num: endpoint.qp_num,
        port_num: narrow("remote.port_num", endpoint.port_num)?,
        gid,
        gid_index: narrow("remote.gid_index", endpoint.gid_index)?,
        lid: narrow("remote.lid", endpoint.lid)?,
        psn: endpoint.psn,
        mtu_bytes: endpoint.mtu_bytes,
        link_layer,
    })
}

/// A number that has fewer bits in verbs than on the wire.
fn narrow<T: TryFrom<u32>>(field: &str, value: u32) -> Result<T, Status> {
    T::try_from(value).map_err(|_| bad_argument(format!("{field} {value} is out of range")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint() -> Endpoint {
        Endpoint {
            qp_num: 0x123,
            port_num: 1,
            gid: Gid([9; 16]),
            gid_index: 3,
            lid: 7,
            psn: 0x00ff_ffff,
            mtu_bytes: 4096,
            link_layer: LinkLayer::Ethernet,
        }
    }

    #[test]
    fn endpoint_survives_the_wire() {
        let wire = endpoint_to_wire(&endpoint());
        assert_eq!(endpoint_from_wire(&wire).expect("our own words"), endpoint());
    }

    #[test]
    fn endpoint_out_of_range_names_the_field() {
        let wire = endpoint_to_wire(&endpoint());
        let refused = |wire: &v1::Endpoint| endpoint_from_wire(wire).expect_err("out of range").message().to_owned();
        assert!(refused(&v1::Endpoint { port_num: 256, ..wire.clone() }).contains("remote.port_num 256"));
        assert!(refused(&v1::Endpoint { lid: 1 << 16, ..wire.clone() }).contains("remote.lid"));
        assert!(refused(&v1::Endpoint { gid: vec![1; 15], ..wire.clone() }).contains("15 bytes"));
        assert!(refused(&v1::Endpoint { link_layer: "x".repeat(5000), ..wire }).len() < 200);
    }

    #[test]
    fn type_unknown_to_this_build_is_refused() {
        let request = v1::CreateQueuePairRequest { r#type: 99, ..Default::default() };
        assert!(queue_pair_request(request).is_err());
    }
}
