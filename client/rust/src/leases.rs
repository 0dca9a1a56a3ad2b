//! Lists and watches of a tenant's leases and queue pairs.

use gdrd_proto::v1;
use gdrd_proto::v1::buffers_client::BuffersClient;
use gdrd_proto::v1::queue_pairs_client::QueuePairsClient;
use tonic::{Request, Response, Streaming};

use crate::calls::{CallContext, with_token};
use crate::error::ClientError;
use crate::session::Session;

/// Most pages that one list may have: a daemon that never ends a list must not fill this process.
const MAX_PAGES: usize = 10_000;

impl Session {
    /// Every lease that the daemon shows this session: its tenant's, or all for root and gdrd-admin.
    ///
    /// # Errors
    /// [`ClientError::SessionEnded`], [`ClientError::Deadline`], [`ClientError::Refused`],
    /// [`ClientError::Unreachable`].
    pub async fn leases(&self) -> Result<Vec<v1::Lease>, ClientError> {
        let mut leases = Vec::new();
        let mut request = v1::ListLeasesRequest::default();
        for _ in 0..MAX_PAGES {
            let list = |session: Session| {
                let call = session.request(request.clone());
                async move {
                    let answer = BuffersClient::new(session.channel()).list(call).await;
                    answer.map(Response::into_inner).map_err(|status| session.error("Buffers.List", status))
                }
            };
            let page = self.across_restarts(list).await?;
            leases.extend(page.leases);
            if page.next_page_token.is_empty() {
                return Ok(leases);
            }
            request.page_token = page.next_page_token;
        }
        Err(ClientError::protocol("the list of leases has no end"))
    }

    /// Every queue pair that the daemon shows this session.
    ///
    /// # Errors
    /// As [`Session::leases`].
    pub async fn queue_pairs(&self) -> Result<Vec<v1::QueuePair>, ClientError> {
        let mut queue_pairs = Vec::new();
        let mut request = v1::ListQueuePairsRequest::default();
        for _ in 0..MAX_PAGES {
            let list = |session: Session| {
                let call = session.request(request.clone());
                async move {
                    let answer = QueuePairsClient::new(session.channel()).list(call).await;
                    answer.map(Response::into_inner).map_err(|status| session.error("QueuePairs.List", status))
                }
            };
            let page = self.across_restarts(list).await?;
            queue_pairs.extend(page.queue_pairs);
            if page.next_page_token.is_empty() {
                return Ok(queue_pairs);
            }
            request.page_token = page.next_page_token;
        }
        Err(ClientError::protocol("the list of queue pairs has no end"))
    }

    /// The leases of the tenant as they are now, then every change.
    ///
    /// # Errors
    /// As [`Session::leases`].
    pub async fn watch_leases(&self) -> Result<LeaseWatch, ClientError> {
        const CALL: &str = "Buffers.WatchLeases";
        let mut client = BuffersClient::new(self.channel());
        // A deadline on the call would end the stream, so it stands on the subscription alone.
        let call = client.watch_leases(with_token(self.token(), Request::new(v1::WatchLeasesRequest {})));
        let deadline = self.context().deadline;
        let answer = tokio::time::timeout(deadline, call).await;
        let answer = answer.map_err(|_| ClientError::Deadline { call: CALL, deadline })?;
        let stream = answer.map_err(|status| self.error(CALL, status))?.into_inner();
        Ok(LeaseWatch { stream, context: self.context().clone(), last_sequence: None })
    }
}

/// Events of a tenant's leases.
#[derive(Debug)]
pub struct LeaseWatch {
    stream: Streaming<v1::LeaseEvent>,
    context: CallContext,
    last_sequence: Option<u64>,
}

impl LeaseWatch {
    /// The next event; `None` when the daemon ended the stream. After `resync` call [`Session::watch_leases`] again.
    /// Cancel-safe.
    ///
    /// # Errors
    /// [`ClientError::Unreachable`], [`ClientError::Refused`]; [`ClientError::Protocol`] when a number was skipped.
    pub async fn next(&mut self) -> Result<Option<v1::LeaseEvent>, ClientError> {
        let answer = self.stream.message().await;
        let event = answer.map_err(|status| self.context.error("Buffers.WatchLeases", status))?;
        if let Some(event) = &event {
            let got = event.sequence;
            if let Some(last) = self.last_sequence.replace(got)
                && got != last.wrapping_add(1)
            {
                return Err(ClientError::protocol(format!("lease event {got} follows {last}")));
            }
        }
        Ok(event)
    }
}
