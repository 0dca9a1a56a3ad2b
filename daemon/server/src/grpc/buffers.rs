//! Service `Buffers`: leases in, leases out. Decides nothing; the engine does.

use std::pin::Pin;
use std::time::Duration;

use futures_util::stream::unfold;
use futures_util::{Stream, StreamExt};
use gdrd_engine::{Engine, Generation, LeaseEvent, LeaseEventKind, LeaseGrant, LeaseId, SessionId};
use gdrd_proto::v1::{self, buffers_server, lease_event};
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use super::{caller, page};
use crate::leases::{self, lease};
use crate::session::{Parcel, Sessions};
use crate::status::{bad_argument, of_engine};

/// The service.
#[derive(Debug, Clone)]
pub(crate) struct Buffers {
    pub(crate) engine: Engine,
    pub(crate) sessions: Sessions,
    pub(crate) stop: CancellationToken,
}

impl Buffers {
    /// Hands a grant over: its fd by the session socket, the rest as the answer. There is no wait between the two, so
    /// a call cancelled earlier drops the grant, which the engine takes back.
    fn hand_over(&self, session: SessionId, grant: LeaseGrant) -> Result<Response<v1::Lease>, Status> {
        let (info, memory) = grant.keep();
        let parcel = Parcel::Memory { lease: info.id, memory };
        let delivery_id = self.sessions.deliver(session, parcel).map_err(|refusal| of_engine(&refusal))?;
        Ok(Response::new(v1::Lease { delivery_id, ..leases::lease(&info) }))
    }
}

#[tonic::async_trait]
impl buffers_server::Buffers for Buffers {
    type WatchLeasesStream = Pin<Box<dyn Stream<Item = Result<v1::LeaseEvent, Status>> + Send>>;

    async fn acquire(&self, request: Request<v1::AcquireRequest>) -> Result<Response<v1::Lease>, Status> {
        let session = caller::session(&self.engine, &request)?;
        let call = leases::acquire(&self.engine, session, request.into_inner())?;
        self.hand_over(session, call.await.map_err(|refusal| of_engine(&refusal))?)
    }

    async fn open(&self, request: Request<v1::OpenRequest>) -> Result<Response<v1::Lease>, Status> {
        let session = caller::session(&self.engine, &request)?;
        self.hand_over(session, leases::open(&self.engine, session, request.into_inner())?)
    }

    async fn get(&self, request: Request<v1::GetLeaseRequest>) -> Result<Response<v1::Lease>, Status> {
        let session = caller::session(&self.engine, &request)?;
        let id = LeaseId(request.into_inner().lease_id);
        let info = self.engine.lease(session, id).map_err(|refusal| of_engine(&refusal))?;
        Ok(Response::new(lease(&info)))
    }

    async fn release(&self, request: Request<v1::ReleaseRequest>) -> Result<Response<v1::ReleaseResponse>, Status> {
        let session = caller::session(&self.engine, &request)?;
        leases::release(&self.engine, session, request.into_inner()).map(Response::new)
    }

    async fn detach(&self, request: Request<v1::DetachRequest>) -> Result<Response<v1::DetachResponse>, Status> {
        let session = caller::session(&self.engine, &request)?;
        let v1::DetachRequest { lease_id, ttl } = request.into_inner();
        let ttl =
            ttl.ok_or_else(|| bad_argument("ttl is missing; say how long the lease may live without a session"))?;
        let normalised = (0..1_000_000_000).contains(&ttl.nanos);
        let ttl = Duration::try_from(ttl).ok().filter(|_| normalised);
        let ttl = ttl.ok_or_else(|| bad_argument("ttl is negative or not normalised"))?;
        self.engine.detach(session, LeaseId(lease_id), ttl).map_err(|refusal| of_engine(&refusal))?;
        Ok(Response::new(v1::DetachResponse {}))
    }

    async fn list(&self, request: Request<v1::ListLeasesRequest>) -> Result<Response<v1::ListLeasesResponse>, Status> {
        let viewer = caller::viewer(&self.engine, &request)?;
        let v1::ListLeasesRequest { page_size, page_token } = request.into_inner();
        let start = page::start(&page_token)?.map(LeaseId);
        let found = self.engine.list_leases(&viewer, start, page_size).map_err(|refusal| of_engine(&refusal))?;
        let rows = found.leases.iter().map(|info| (info.id.0, keyless(lease(info)))).collect();
        let (leases, next_page_token) = page::cut(rows, found.next.map(|id| id.0));
        Ok(Response::new(v1::ListLeasesResponse { leases, next_page_token }))
    }

    async fn watch_leases(
        &self,
        request: Request<v1::WatchLeasesRequest>,
    ) -> Result<Response<Self::WatchLeasesStream>, Status> {
        let viewer = caller::viewer(&self.engine, &request)?;
        let events = self.engine.watch_leases(&viewer).map_err(|refusal| of_engine(&refusal))?;
        let stop = self.stop.clone().cancelled_owned();
        Ok(Response::new(Box::pin(told(events).map(Ok).take_until(stop))))
    }
}

/// rkeys are for whom the lease was granted to; lists and watches show none, whatever the engine filled in.
fn keyless(mut lease: v1::Lease) -> v1::Lease {
    for registration in &mut lease.registrations {
        registration.rkey = 0;
    }
    lease
}

/// Events in their wire form. A resync is the last one, wherever it comes from.
fn told(events: impl Stream<Item = LeaseEvent> + Unpin) -> impl Stream<Item = v1::LeaseEvent> {
    unfold(Some(events), async |events| {
        let mut events = events?;
        let event = lease_event(events.next().await?);
        let is_last = matches!(event.event, Some(lease_event::Event::Resync(_)));
        Some((event, (!is_last).then_some(events)))
    })
}

fn lease_event(event: LeaseEvent) -> v1::LeaseEvent {
    use lease_event::Event;
    let ended = |lease: LeaseId, generation: Generation, reason: String| v1::LeaseEnded {
        lease_id: lease.0,
        generation: generation.0,
        reason,
    };
    let wire = match event.kind {
        LeaseEventKind::Present(info) => Event::Present(keyless(lease(&info))),
        LeaseEventKind::Synced => Event::Synced(v1::Synced {}),
        LeaseEventKind::Acquired(info) => Event::Acquired(keyless(lease(&info))),
        LeaseEventKind::Released { lease, generation, reason } => {
            Event::Released(ended(lease, generation, reason.to_owned()))
        }
        LeaseEventKind::Revoked { lease, generation, reason } => Event::Revoked(ended(lease, generation, reason)),
        LeaseEventKind::Rekeyed(info) => Event::Rekeyed(lease(&info)),
        LeaseEventKind::NicDown { hca, port_num } => {
            Event::NicDown(v1::NicDown { hca: hca.to_string(), port_num: u32::from(port_num) })
        }
        LeaseEventKind::Resync => Event::Resync(v1::Resync {}),
        // An event that this wire has no word for is one the client misses.
        _ => Event::Resync(v1::Resync {}),
    };
    v1::LeaseEvent { sequence: event.sequence, event: Some(wire) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_watch_ends_with_its_resync() {
        let kinds = [LeaseEventKind::Synced, LeaseEventKind::Resync, LeaseEventKind::Synced];
        let events = kinds.into_iter().zip(1..).map(|(kind, sequence)| LeaseEvent { sequence, kind });
        // More may come, and nothing needs to for the end to be seen.
        let events = futures_util::stream::iter(events).chain(futures_util::stream::pending());
        let told: Vec<_> = told(events).map(|event| event.event).collect().await;
        let wanted = [lease_event::Event::Synced(v1::Synced {}), lease_event::Event::Resync(v1::Resync {})];
        assert_eq!(told, wanted.map(Some));
    }
}
