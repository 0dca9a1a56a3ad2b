//! Proof of the right to GPUs: open descriptors of their device nodes, sent on the session socket.

use std::os::fd::BorrowedFd;

use gdrd_proto::v1;
use gdrd_proto::v1::client_message;

use super::Session;
use crate::error::ClientError;

impl Session {
    /// Proves the right to GPUs by open descriptors of their device nodes (`/dev/nvidia0`), at most 253 in one call.
    /// Returns the UUIDs of the GPUs that this session may now lease on. Not needed where the daemon runs with
    /// `gpu_proof = "none"`, as a simulated host does.
    ///
    /// # Errors
    /// [`ClientError::InvalidArgument`] when a descriptor names no GPU of this host or there are too many,
    /// [`ClientError::SessionEnded`], [`ClientError::Deadline`], [`ClientError::Io`].
    pub async fn prove_gpus(&self, nodes: &[BorrowedFd<'_>]) -> Result<Vec<String>, ClientError> {
        self.across_restarts(|session| async move { session.prove_once(nodes).await }).await
    }

    async fn prove_once(&self, nodes: &[BorrowedFd<'_>]) -> Result<Vec<String>, ClientError> {
        let (request_id, answer) = self.0.proofs.begin();
        let message = client_message::Message::ProveGpus(v1::ProveGpus { request_id });
        self.send(message, nodes).await?;
        let deadline = self.context().deadline;
        let late = |_| ClientError::Deadline { call: "ProveGpus", deadline };
        match tokio::time::timeout(deadline, answer).await.map_err(late)? {
            Ok(proven) if proven.error.is_empty() => Ok(proven.gpu_uuids),
            Ok(proven) => Err(ClientError::InvalidArgument { what: proven.error }),
            Err(_) => Err(self.unanswered()),
        }
    }
}
