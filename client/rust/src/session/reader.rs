//! The task that reads the session socket, and hands what comes to whom it is for.

use std::sync::Arc;

use gdrd_proto::v1;
use gdrd_proto::v1::{client_message, daemon_message};
use gdrd_ring::GenerationReader;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::SessionEnd;
use super::calls::Calls;
use super::deliveries::{Deliveries, Delivery, Subject};
use super::questions::Questions;
use super::socket::{Packet, SessionSocket};
use crate::error::ClientError;
use crate::kept::{Kept, KeptMappings};
use crate::parting::Parting;

/// The task that reads the session socket to its end.
pub(super) struct Reader {
    pub(super) socket: Arc<SessionSocket>,
    pub(super) calls: Arc<Calls>,
    pub(super) deliveries: Deliveries,
    pub(super) proofs: Questions<v1::GpusProven>,
    pub(super) adoptions: Questions<v1::Adopted>,
    pub(super) kept: Arc<KeptMappings>,
    pub(super) parting: Arc<Parting>,
    pub(super) page: Arc<GenerationReader>,
    pub(super) resumed: watch::Sender<u64>,
}

impl Reader {
    pub(super) async fn run(self, end: watch::Sender<Option<SessionEnd>>) {
        let ended = loop {
            match self.step().await {
                Ok(None) => {}
                Ok(Some(ended)) => break ended,
                Err(error) => break self.lost(error.to_string()),
            }
        };
        // No NIC takes what the session had.
        self.page.end();
        // First the reason, then the waiters, who look for it.
        end.send_replace(Some(ended));
        self.calls.end();
        self.deliveries.end();
        self.proofs.end();
        self.adoptions.end();
        drop_apart(self.kept.end());
        self.socket.shutdown();
    }

    /// The end that nobody explained.
    fn lost(&self, message: impl Into<String>) -> SessionEnd {
        match self.socket.is_closed_here() {
            true => SessionEnd::closed_by_client(),
            false => SessionEnd::new("CONNECTION_LOST", message),
        }
    }

    async fn step(&self) -> Result<Option<SessionEnd>, ClientError> {
        let Some(Packet { message, fds }) = self.socket.receive().await? else {
            return Ok(Some(self.lost("the daemon closed the session socket")));
        };
        match message {
            daemon_message::Message::Delivery(delivery) => {
                let id = delivery.delivery_id;
                self.deliveries.arrive(id, Delivery::new(delivery, fds));
                self.socket.tell(client_message::Message::Ack(v1::Ack { delivery_id: id })).await?;
                Ok(None)
            }
            daemon_message::Message::Answer(answer) => {
                self.answered(answer, fds).await?;
                Ok(None)
            }
            daemon_message::Message::MemoryGone(gone) => {
                let (unmapped, socket) = (drop_apart(self.kept.forget(&gone.allocation_ids)), Arc::clone(&self.socket));
                tokio::spawn(async move {
                    // A daemon that is not told keeps the next ones to itself; where this fails the session is at its end.
                    let _ = unmapped.await;
                    let _ = socket.tell(client_message::Message::MemoryDropped(v1::MemoryDropped {})).await;
                });
                Ok(None)
            }
            daemon_message::Message::GpusProven(proven) => {
                // Nobody is left to tell where it is not taken.
                let _ = self.proofs.answer(proven.request_id, proven);
                Ok(None)
            }
            daemon_message::Message::Adopted(adopted) => {
                if let Err(adopted) = self.adoptions.answer(adopted.request_id, adopted) {
                    // Its call was given up: the memory goes back.
                    adopted.memories.iter().for_each(|memory| self.parting.disown(memory.memory_id));
                }
                Ok(None)
            }
            daemon_message::Message::Goodbye(goodbye) => {
                Ok(Some(SessionEnd { reason: goodbye.reason, message: goodbye.message }))
            }
            daemon_message::Message::QueuePairFailed(failed) => {
                self.deliveries.fail(failed.queue_pair_id, failed.message);
                Ok(None)
            }
            daemon_message::Message::Resumed(resumed) => {
                let leases = resumed.lease_ids.into_iter().map(Subject::Lease);
                let queue_pairs = resumed.queue_pair_ids.into_iter().map(Subject::QueuePair);
                let queue_pairs: Vec<Subject> = queue_pairs.collect();
                for subject in &queue_pairs {
                    if let Subject::QueuePair(id) = subject {
                        self.deliveries.fail(*id, "the daemon that owned it was started again".to_owned());
                    }
                }
                self.deliveries.resumed(leases.chain(queue_pairs));
                if !resumed.more {
                    self.calls.lose();
                    self.proofs.lose();
                    self.adoptions.lose();
                    // A daemon that was started again has only what is leased.
                    drop_apart(self.kept.forget_all());
                    self.resumed.send_modify(|count| *count += 1);
                }
                Ok(None)
            }
            daemon_message::Message::Welcome(_) => Err(ClientError::protocol("a second welcome")),
        }
    }
}

impl Drop for Reader {
    /// A runtime that ends drops the task where it stands, and nobody hears the daemon any more.
    fn drop(&mut self) {
        self.page.end();
    }
}

/// Unmaps where it may wait for a driver.
fn drop_apart(kept: Vec<Kept>) -> JoinHandle<()> {
    tokio::task::spawn_blocking(move || drop(kept))
}
