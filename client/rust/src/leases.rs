//! Lists and watches of a tenant's leases and queue pairs.

use gdrd_proto::v1;
use gdrd_proto::v1::buffers_client::BuffersClient;
use gdrd_proto::v1::lease_event;
use gdrd_proto::v1::queue_pairs_client::QueuePairsClient;
use tonic::{Request, Response, Streaming};

use crate::calls::with_token;
use crate::error::ClientError;
use crate::session::{Session, WeakSession};

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

    /// The leases of the tenant as they are now, then every change, for as long as the session lives: also across restarts of
    /// the daemon.
    ///
    /// # Errors
    /// As [`Session::leases`].
    pub async fn watch_leases(&self) -> Result<LeaseWatch, ClientError> {
        let stream = self.subscribe_to_leases().await?;
        Ok(LeaseWatch { session: self.downgrade(), stream: Some(stream), last_sequence: None })
    }

    async fn subscribe_to_leases(&self) -> Result<Streaming<v1::LeaseEvent>, ClientError> {
        const CALL: &str = "Buffers.WatchLeases";
        let deadline = self.context().deadline;
        self.across_restarts(|session| async move {
            let mut client = BuffersClient::new(session.channel());
            // A deadline on the call would end the stream, so it stands on the subscription alone.
            let call = client.watch_leases(with_token(session.token(), Request::new(v1::WatchLeasesRequest {})));
            let answer = tokio::time::timeout(deadline, call).await;
            let answer = answer.map_err(|_| ClientError::Deadline { call: CALL, deadline })?;
            Ok(answer.map_err(|status| session.error(CALL, status))?.into_inner())
        })
        .await
    }
}

/// Events of a tenant's leases. It does not keep the session alive.
#[derive(Debug)]
pub struct LeaseWatch {
    session: WeakSession,
    /// `None` where the full state is to be asked for again.
    stream: Option<Streaming<v1::LeaseEvent>>,
    last_sequence: Option<u64>,
}

impl LeaseWatch {
    /// The next event; `None` once the session has ended. `resync` says that events were lost, in a restart of the daemon or
    /// because they were not taken in time: forget what the ones before told, the full state and `synced` follow.
    /// Cancel-safe.
    ///
    /// # Errors
    /// [`ClientError::Refused`]; [`ClientError::Unreachable`], [`ClientError::ConnectionLost`] and [`ClientError::Deadline`] where
    /// the daemon does not come back in time, after which this may be called again; [`ClientError::Protocol`] when a
    /// number was skipped.
    pub async fn next(&mut self) -> Result<Option<v1::LeaseEvent>, ClientError> {
        let stream = match &mut self.stream {
            Some(stream) => stream,
            None => match self.subscribe().await? {
                Some(stream) => self.stream.insert(stream),
                None => return Ok(None),
            },
        };
        let event = match stream.message().await {
            Ok(Some(event)) => event,
            Ok(None) => return Ok(self.lost()),
            Err(status) => match self.session.upgrade().map(|session| session.error("Buffers.WatchLeases", status)) {
                None | Some(ClientError::SessionEnded { .. }) => return Ok(None),
                Some(error) if error.is_lost_connection() => return Ok(self.lost()),
                Some(error) => return Err(error),
            },
        };
        let got = event.sequence;
        if let Some(last) = self.last_sequence.replace(got)
            && got != last.wrapping_add(1)
        {
            return Err(ClientError::protocol(format!("lease event {got} follows {last}")));
        }
        if matches!(event.event, Some(lease_event::Event::Resync(_))) {
            // The daemon ends the stream with it.
            self.forget();
        }
        Ok(Some(event))
    }

    async fn subscribe(&self) -> Result<Option<Streaming<v1::LeaseEvent>>, ClientError> {
        let Some(session) = self.session.upgrade() else { return Ok(None) };
        match session.subscribe_to_leases().await {
            Err(ClientError::SessionEnded { .. }) => Ok(None),
            subscribed => subscribed.map(Some),
        }
    }

    /// What is told where the stream broke: as the daemon tells of events that it had no room for.
    fn lost(&mut self) -> Option<v1::LeaseEvent> {
        let sequence = self.last_sequence.map_or(0, |last| last.wrapping_add(1));
        self.forget();
        let is_over = self.session.upgrade().is_none_or(|session| session.end().is_some());
        let event = Some(lease_event::Event::Resync(v1::Resync {}));
        (!is_over).then_some(v1::LeaseEvent { sequence, event })
    }

    fn forget(&mut self) {
        self.stream = None;
        self.last_sequence = None;
    }
}
