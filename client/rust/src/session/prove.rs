//! Proof of the right to GPUs: open descriptors of their device nodes, sent on the session socket.

use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gdrd_proto::v1;
use gdrd_proto::v1::client_message;
use tokio::sync::oneshot;

use super::Session;
use crate::error::ClientError;

#[derive(Debug, Default)]
struct State {
    ended: bool,
    waiting: HashMap<u64, oneshot::Sender<v1::GpusProven>>,
}

/// Proofs that were sent and not yet answered.
#[derive(Debug, Clone, Default)]
pub(super) struct Proofs {
    state: Arc<Mutex<State>>,
    last_id: Arc<AtomicU64>,
}

impl Proofs {
    fn begin(&self) -> (u64, oneshot::Receiver<v1::GpusProven>) {
        let id = self.last_id.fetch_add(1, Ordering::Relaxed) + 1;
        let (sender, receiver) = oneshot::channel();
        let mut state = self.lock();
        // Those whose caller has given up are dropped here, so the table holds live callers only.
        state.waiting.retain(|_, waiting| !waiting.is_closed());
        if !state.ended {
            state.waiting.insert(id, sender);
        }
        (id, receiver)
    }

    pub(super) fn answer(&self, proven: v1::GpusProven) {
        if let Some(waiting) = self.lock().waiting.remove(&proven.request_id) {
            let _ = waiting.send(proven);
        }
    }

    pub(super) fn end(&self) {
        let mut state = self.lock();
        state.ended = true;
        state.waiting.clear();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No holder of this lock can panic between two changes that belong together.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Session {
    /// Proves the right to GPUs by open descriptors of their device nodes (`/dev/nvidia0`), at most 253 in one call.
    /// Returns the UUIDs of the GPUs that this session may now lease on. Not needed where the daemon runs with
    /// `gpu_proof = "none"`, as a simulated host does.
    ///
    /// # Errors
    /// [`ClientError::InvalidArgument`] when a descriptor names no GPU of this host or there are too many,
    /// [`ClientError::SessionEnded`], [`ClientError::Deadline`], [`ClientError::Io`].
    pub async fn prove_gpus(&self, nodes: &[BorrowedFd<'_>]) -> Result<Vec<String>, ClientError> {
        let (request_id, answer) = self.0.proofs.begin();
        let message = client_message::Message::ProveGpus(v1::ProveGpus { request_id });
        self.0.socket.send(message, nodes).await?;
        let deadline = self.0.context.deadline;
        let late = |_| ClientError::Deadline { call: "ProveGpus", deadline };
        match tokio::time::timeout(deadline, answer).await.map_err(late)? {
            Ok(proven) if proven.error.is_empty() => Ok(proven.gpu_uuids),
            Ok(proven) => Err(ClientError::InvalidArgument { what: proven.error }),
            Err(_) => Err(self.ended().await.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn answers_find_their_question_and_the_end_finds_the_rest() {
        let proofs = Proofs::default();
        let ((first, first_answer), (_, second_answer)) = (proofs.begin(), proofs.begin());
        proofs.answer(v1::GpusProven { request_id: first, gpu_uuids: vec!["GPU-1".into()], error: String::new() });
        assert_eq!(first_answer.await.unwrap().gpu_uuids, ["GPU-1"]);
        proofs.answer(v1::GpusProven { request_id: 99, ..Default::default() });
        proofs.end();
        assert!(second_answer.await.is_err());
        assert!(proofs.begin().1.await.is_err());
    }

    #[tokio::test]
    async fn questions_that_were_given_up_leave_no_entry() {
        let proofs = Proofs::default();
        drop(proofs.begin());
        let (_, _answer) = proofs.begin();
        assert_eq!(proofs.lock().waiting.len(), 1);
    }
}
