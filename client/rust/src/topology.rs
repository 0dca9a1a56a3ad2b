//! Topology as a stream that outlives the daemon: after a loss it subscribes again and goes on.

use std::time::Duration;

use gdrd_proto::v1;
use gdrd_proto::v1::topology_client::TopologyClient;
use tonic::transport::Channel;
use tonic::{Request, Streaming};

use crate::calls::{CONNECTIONS_EXHAUSTED, CallContext};
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
    /// and while this user has as many connections as it may for one to be free, then gives the current snapshot again, whose generation may be lower: a restarted daemon counts anew.
    /// Cancel-safe.
    ///
    /// # Errors
    /// [`ClientError::Refused`] when the daemon refuses the watch, [`ClientError::NotPermitted`] when this user may not
    /// connect.
    pub async fn next(&mut self) -> Result<v1::GetTopologyResponse, ClientError> {
        let mut pause = RETRY_FIRST;
        loop {
            match self.try_next().await {
                Ok(snapshot) => return Ok(snapshot),
                Err(error) if is_final(&error) => return Err(error),
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

/// Whether waiting does not help.
fn is_final(error: &ClientError) -> bool {
    let is_refused = matches!(error, ClientError::Refused { .. } | ClientError::NotPermitted { .. });
    is_refused && error.reason() != Some(CONNECTIONS_EXHAUSTED)
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use gdrd_stream::Stream;
    use hyper_util::rt::TokioIo;
    use tonic::transport::Endpoint;

    use super::*;

    /// A watch whose connections all fail in this way, and the number of them.
    fn failing(kind: io::ErrorKind, message: &'static str) -> (TopologyWatch, Arc<AtomicU32>) {
        let tries = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&tries);
        let connector = tower::service_fn(move |_| {
            counted.fetch_add(1, Ordering::Relaxed);
            async move { Err::<TokioIo<Stream>, _>(io::Error::new(kind, message)) }
        });
        let channel = Endpoint::from_static("http://localhost").connect_with_connector_lazy(connector);
        let context = CallContext { deadline: Duration::from_secs(30), socket: "/nowhere".into() };
        (TopologyWatch::new(channel, context), tries)
    }

    #[tokio::test]
    async fn a_socket_closed_to_this_user_ends_the_wait() {
        let (mut watch, _) = failing(io::ErrorKind::PermissionDenied, "closed");
        assert_eq!(watch.next().await.unwrap_err().reason(), Some("SOCKET_NOT_PERMITTED"));
    }

    #[tokio::test]
    async fn a_daemon_that_is_away_is_waited_for() {
        let (mut watch, tries) = failing(io::ErrorKind::ConnectionRefused, "away");
        tokio::select! {
            told = watch.next() => panic!("{told:?}"),
            () = async { while tries.load(Ordering::Relaxed) < 3 { tokio::task::yield_now().await } } => {}
        }
    }

    #[test]
    fn one_connection_too_many_is_waited_for_and_other_refusals_are_not() {
        let refused = |reason: &str| ClientError::Refused {
            call: "Topology.Watch",
            code: tonic::Code::ResourceExhausted,
            reason: reason.to_owned(),
            message: String::new(),
        };
        assert!(!is_final(&refused(CONNECTIONS_EXHAUSTED)));
        assert!(is_final(&refused("STREAMS_EXHAUSTED")) && is_final(&refused("")));
    }
}
