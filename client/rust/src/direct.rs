//! Direct mode: a verbs context of the session's own, to import and make queue pairs in.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use gdrd_proto::v1;
use gdrd_proto::v1::queue_pairs_client::QueuePairsClient;

use crate::buffer::Buffer;
use crate::error::ClientError;
use crate::finish::FinishOnDrop;
use crate::session::{Session, Subject};

pub use gdrd_client_sys::verbs::{ImportedContext, VerbsError};

/// A context that the daemon opened for this session alone, with regions of its buffers.
#[derive(Debug)]
pub struct DirectContext {
    context: OwnedFd,
    told: v1::DirectContext,
}

impl Session {
    /// Has the daemon open a context of this session's own on an HCA, with a region for each of these buffers; called again, it
    /// gives the same context with more regions. They end with their leases, and all of it with the session.
    ///
    /// # Errors
    /// [`ClientError::Refused`] with reason `UNSUPPORTED` where the provider cannot (all but mlx5) or the daemon may not: a
    /// brokered queue pair does the same there. Otherwise as [`Session::create_queue_pair`].
    pub async fn open_direct(&self, hca: &str, buffers: &[&Buffer]) -> Result<DirectContext, ClientError> {
        let session = self.clone();
        let lease_ids = buffers.iter().map(|buffer| buffer.lease_id()).collect();
        let wanted = v1::OpenDirectRequest { hca: hca.to_owned(), lease_ids };
        let call = async move {
            let expected = session.expect_delivery().await?;
            let answer = QueuePairsClient::new(session.channel()).open_direct(session.request(wanted)).await;
            let told = answer.map_err(|status| session.error("QueuePairs.OpenDirect", status))?.into_inner();
            let (mut delivery, _) = session.claim(expected, told.delivery_id, Subject::Contexts).await?;
            let context = delivery.take("context");
            let context = context.ok_or_else(|| ClientError::protocol("a context came without its descriptor"))?;
            Ok(DirectContext { context, told })
        };
        FinishOnDrop::new(self.runtime(), call).await
    }
}

impl DirectContext {
    /// Name of the HCA.
    #[must_use]
    pub fn hca(&self) -> &str {
        &self.told.hca
    }

    /// Handle of its protection domain, for ibv_import_pd(3).
    #[must_use]
    pub fn pd_handle(&self) -> u32 {
        self.told.pd_handle
    }

    /// A region for each buffer asked for, in that order.
    #[must_use]
    pub fn regions(&self) -> &[v1::DirectRegion] {
        &self.told.regions
    }

    /// Imports context, protection domain and regions into this process. Needs libibverbs and sight of the device here.
    ///
    /// # Errors
    /// [`VerbsError::Absent`] without libibverbs, [`VerbsError::Refused`] with what it said.
    pub fn import(&self) -> Result<ImportedContext, VerbsError> {
        let regions: Vec<u32> = self.told.regions.iter().map(|region| region.mr_handle).collect();
        ImportedContext::import(self.context.as_fd(), self.told.pd_handle, &regions)
    }
}

impl AsFd for DirectContext {
    /// For ibv_import_device(3) of the caller's own.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.context.as_fd()
    }
}
