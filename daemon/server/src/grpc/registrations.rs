//! Service `Registrations`: ranges of adopted and leased memory. Decides nothing; the engine does.

use gdrd_engine::{
    Access, Engine, LeaseId, MemoryId, MemoryRef, Merging, RangeRequest, RegisterRequest, RegisteredPart,
    RegisteredRange, RegistrationId,
};
use gdrd_proto::v1::{self, registrations_server};
use tonic::{Request, Response, Status};

use super::{caller, page};
use crate::leases::registration;
use crate::status::{bad_argument, of_engine};

/// Most registrations that one call ends.
const MAX_ENDED_AT_ONCE: usize = 4096;

/// The service.
#[derive(Debug, Clone)]
pub(crate) struct Registrations {
    pub(crate) engine: Engine,
}

#[tonic::async_trait]
impl registrations_server::Registrations for Registrations {
    async fn register(&self, request: Request<v1::RegisterRequest>) -> Result<Response<v1::RegisterResponse>, Status> {
        let session = caller::session(&self.engine, &request)?;
        let wanted = register_request(request.into_inner())?;
        let grant = self.engine.register(session, wanted).await.map_err(|refusal| of_engine(&refusal))?;
        // No wait from here to the answer: a call cancelled earlier drops the grant, which the engine takes back.
        let ranges = grant.keep().iter().map(registered).collect();
        Ok(Response::new(v1::RegisterResponse { ranges }))
    }

    async fn deregister(
        &self,
        request: Request<v1::DeregisterRequest>,
    ) -> Result<Response<v1::DeregisterResponse>, Status> {
        let session = caller::session(&self.engine, &request)?;
        let ids = request.into_inner().registration_ids;
        if ids.len() > MAX_ENDED_AT_ONCE {
            return Err(bad_argument(format!("{} registrations, at most {MAX_ENDED_AT_ONCE} are allowed", ids.len())));
        }
        let ids = ids.into_iter().map(RegistrationId).collect();
        let ended = self.engine.deregister(session, ids).map_err(|refusal| of_engine(&refusal))?;
        Ok(Response::new(v1::DeregisterResponse { ended }))
    }

    async fn lookup(&self, request: Request<v1::LookupRequest>) -> Result<Response<v1::RegisteredRange>, Status> {
        let session = caller::session(&self.engine, &request)?;
        let id = RegistrationId(request.into_inner().registration_id);
        let found = self.engine.lookup(session, id).map_err(|refusal| of_engine(&refusal))?;
        Ok(Response::new(registered(&found)))
    }

    async fn disown(&self, request: Request<v1::DisownRequest>) -> Result<Response<v1::DisownResponse>, Status> {
        let session = caller::session(&self.engine, &request)?;
        let memory = MemoryId(request.into_inner().memory_id);
        self.engine.disown(session, memory).await.map_err(|refusal| of_engine(&refusal))?;
        Ok(Response::new(v1::DisownResponse {}))
    }

    async fn list(
        &self,
        request: Request<v1::ListRegistrationsRequest>,
    ) -> Result<Response<v1::ListRegistrationsResponse>, Status> {
        let viewer = caller::viewer(&self.engine, &request)?;
        let v1::ListRegistrationsRequest { page_size, page_token } = request.into_inner();
        let start = page::start(&page_token)?.map(RegistrationId);
        let found = self.engine.list_registrations(&viewer, start, page_size);
        let found = found.map_err(|refusal| of_engine(&refusal))?;
        // The engine leaves keys out of lists.
        let row = |range: &RegisteredRange| {
            (range.id.0, v1::RegisteredRange { tenant: range.tenant.to_string(), ..registered(range) })
        };
        let rows = found.registrations.iter().map(row).collect();
        let (registrations, next_page_token) = page::cut(rows, found.next.map(|id| id.0));
        Ok(Response::new(v1::ListRegistrationsResponse { registrations, next_page_token }))
    }
}

fn register_request(request: v1::RegisterRequest) -> Result<RegisterRequest, Status> {
    let merging = match v1::Merging::try_from(request.merging) {
        Ok(v1::Merging::Unspecified | v1::Merging::Near) => Merging::Near,
        Ok(v1::Merging::None) => Merging::None,
        Err(_) => return Err(bad_argument(format!("merging {} is unknown; use NEAR or NONE", request.merging))),
    };
    let access = request.access.map_or(Access::DATA, |access| Access {
        local_write: access.local_write,
        remote_write: access.remote_write,
        remote_read: access.remote_read,
        remote_atomic: access.remote_atomic,
        relaxed_ordering: access.relaxed_ordering,
    });
    let ranges = request.ranges.into_iter().enumerate().map(|(index, range)| range_request(index, range));
    let ranges = ranges.collect::<Result<_, _>>()?;
    Ok(RegisterRequest { ranges, access, hcas: request.hcas, merging, piece_bytes: request.piece_bytes })
}

fn range_request(index: usize, range: v1::Range) -> Result<RangeRequest, Status> {
    let memory = match range.memory {
        Some(v1::range::Memory::MemoryId(id)) => MemoryRef::Adopted(MemoryId(id)),
        Some(v1::range::Memory::LeaseId(id)) => MemoryRef::Lease(LeaseId(id)),
        None => return Err(bad_argument(format!("range {index} names no memory; give memory_id or lease_id"))),
    };
    Ok(RangeRequest { memory, offset: range.offset_bytes, len_bytes: range.length_bytes })
}

fn registered(range: &RegisteredRange) -> v1::RegisteredRange {
    let memory = match range.memory {
        MemoryRef::Adopted(id) => v1::range::Memory::MemoryId(id.0),
        MemoryRef::Lease(id) => v1::range::Memory::LeaseId(id.0),
    };
    let part = |part: &RegisteredPart| v1::RegisteredPart {
        offset_bytes: part.offset,
        slot_offset_bytes: part.slot_offset,
        registration: Some(registration(&part.registration)),
    };
    v1::RegisteredRange {
        registration_id: range.id.0,
        range: Some(v1::Range { memory: Some(memory), offset_bytes: range.offset, length_bytes: range.len_bytes }),
        parts: range.parts.iter().map(part).collect(),
        tenant: String::new(),
    }
}
