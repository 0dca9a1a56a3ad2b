//! Two buffers on two GPUs and a connected queue pair between them, both ends in this process.

use std::time::Duration;

use anyhow::Context as _;
use gdrd_client::{
    AcquireOptions, Buffer, Completion, LocalSpan, Operation, QueuePair, QueuePairOptions, RemoteSpan, Session, Source,
    Status,
};

use crate::args::Bench;

/// Longest wait for any one completion.
const PATIENCE: Duration = Duration::from_secs(30);

pub(super) struct Pair {
    from: Buffer,
    to: Buffer,
    sender: QueuePair,
    receiver: QueuePair,
}

impl Pair {
    pub(super) async fn make(session: &Session, options: &Bench, len_bytes: u64) -> anyhow::Result<Self> {
        let from = session.acquire(AcquireOptions::on_gpu(&options.from, len_bytes)).await?;
        let to = session.acquire(AcquireOptions::on_gpu(&options.to, len_bytes)).await?;
        let sender = session.create_queue_pair(QueuePairOptions::near_gpu(&options.from)).await?;
        let receiver = session.create_queue_pair(QueuePairOptions::near_gpu(&options.to)).await?;
        sender.connect(receiver.endpoint()).await?;
        receiver.connect(sender.endpoint()).await?;
        Ok(Self { from, to, sender, receiver })
    }

    pub(super) fn local(&self, len_bytes: u32) -> anyhow::Result<LocalSpan> {
        Ok(self.from.registration(self.sender.hca())?.span(0, len_bytes)?)
    }

    pub(super) fn remote(&self, len_bytes: u32) -> anyhow::Result<RemoteSpan> {
        Ok(self.to.registration(self.receiver.hca())?.remote().span(0, len_bytes.into())?)
    }

    /// Posts one write and polls for its completion.
    pub(super) fn write(&self, local: LocalSpan, remote: RemoteSpan) -> anyhow::Result<Completion> {
        self.sender.post(0, Operation::Write { source: Source::Local(local), remote, imm: None })?;
        let completion = self.sender.poll_busy(PATIENCE)?.context("a write made no completion")?;
        anyhow::ensure!(completion.status == Status::Success, "a write ended as {}", completion.status);
        Ok(completion)
    }

    pub(super) fn memories(&self) -> anyhow::Result<(&gdrd_shm::Segment, &gdrd_shm::Segment)> {
        Ok((self.from.memory()?, self.to.memory()?))
    }

    pub(super) async fn give_back(self) -> anyhow::Result<()> {
        self.sender.destroy().await?;
        self.receiver.destroy().await?;
        self.from.release().await?;
        self.to.release().await?;
        Ok(())
    }
}
