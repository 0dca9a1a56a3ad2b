//! Adoption: descriptors of this process's memory, sent on the session socket.

use std::os::fd::BorrowedFd;

use gdrd_proto::v1;
use gdrd_proto::v1::client_message;

use super::Session;
use crate::error::ClientError;

impl Session {
    /// Sends memory to be adopted; its numbers and lengths, in the same order.
    pub(crate) async fn send_adoption(
        &self,
        items: Vec<v1::AdoptItem>,
        fds: &[BorrowedFd<'_>],
    ) -> Result<Vec<v1::AdoptedMemory>, ClientError> {
        let asked = items.len();
        let (request_id, answer) = self.0.adoptions.begin();
        let message = client_message::Message::Adopt(v1::Adopt { request_id, items });
        self.send(message, fds).await?;
        let deadline = self.context().deadline;
        let late = |_| ClientError::Deadline { call: "Adopt", deadline };
        let adopted = tokio::time::timeout(deadline, answer).await.map_err(late)?.map_err(|_| self.unanswered())?;
        if !adopted.reason.is_empty() {
            return Err(ClientError::NotAdopted { reason: adopted.reason, message: adopted.message });
        }
        if adopted.memories.len() != asked {
            let got = adopted.memories.len();
            return Err(ClientError::protocol(format!(
                "{asked} pieces of memory were to be adopted, and {got} are said to be"
            )));
        }
        Ok(adopted.memories)
    }
}
