//! Topology as a stream that outlives the daemon: after a loss it subscribes again and goes on.

use std::time::Duration;

use gdrd_proto::v1;
use gdrd_proto::v1::topology_client::TopologyClient;
use tonic::transport::Channel;
use tonic::{Request, Streaming};

use crate::calls::CallContext;
use crate::error::ClientError;

/// First and longest pause between two tries to subscribe again.
const RETRY_FIRST: Duration = Duration::from_millis(50);
const RETRY_LONGEST: Duration = Duration::from_secs(5);

/// Snapshots as they come.
#[derive(Debug)]
pub struct TopologyWatch {
    channel: Channel,
    context: CallContext,
    stream: Option<Streaming<v1::GetTopologyResponse>>,
}

impl TopologyWatch {
    pub(crate) fn new(channel: Channel, context: CallContext) -> Self {
        Self { channel, context, stream: None }
    }

    /// The next snapshot; the first call gives the current one. While the daemon is away it waits for it to come back,
    /// then gives the current snapshot again, whose generation may be lower: a restarted daemon counts anew.
    /// Cancel-safe.
    ///
    /// # Errors
    /// [`ClientError::Refused`] when the daemon refuses the watch.
    pub async fn next(&mut self) -> Result<v1::GetTopologyResponse, ClientError> {
        let mut pause = RETRY_FIRST;
        loop {
            match self.try_next().await {
                Ok(snapshot) => return Ok(snapshot),
                Err(error @ ClientError::Refused { .. }) => return Err(error),
                Err(_) => {
                    self.stream = None;
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(RETRY_LONGEST);
                }
            }
        }
    }

    async fn try_next(&mut self) -> Result<v1::GetTopologyResponse, ClientError> {
        const CALL: &str = "Topology.Watch";
        if self.stream.is_none() {
            let mut client = TopologyClient::new(self.channel.clone());
            // A deadline on the call would end the stream, so it stands on the subscription alone.
            let subscribed = client.watch(Request::new(v1::WatchTopologyRequest {}));
            let deadline = self.context.deadline;
            let answer = tokio::time::timeout(deadline, subscribed).await;
            let answer = answer.map_err(|_| ClientError::Deadline { call: CALL, deadline })?;
            self.stream = Some(answer.map_err(|status| self.context.error(CALL, status))?.into_inner());
        }
        let stream = self.stream.as_mut().ok_or_else(|| ClientError::protocol("no stream"))?;
        match stream.message().await.map_err(|status| self.context.error(CALL, status))? {
            Some(snapshot) => Ok(snapshot),
            None => Err(ClientError::protocol("the topology watch ended")),
        }
    }
}
