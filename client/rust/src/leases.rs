//! Lists and watches of a tenant's leases and queue pairs.

use std::time::Duration;

use gdrd_proto::v1;
use gdrd_proto::v1::buffers_client::BuffersClient;
use gdrd_proto::v1::lease_event;
use gdrd_proto::v1::queue_pairs_client::QueuePairsClient;
use tonic::{Request, Response, Streaming};

use crate::calls::with_token;
use crate::error::ClientError;
use crate::session::{Lifeline, Session};

/// Most pages that one list may have: a daemon that never ends a list must not fill this process.
const MAX_PAGES: usize = 10_000;
/// The call of a watch.
const CALL: &str = "Buffers.WatchLeases";
/// Longest that the end of a session may come after the refusal of its token.
const END_TIMEOUT: Duration = Duration::from_secs(5);

impl Session {
    /// Every lease that the daemon shows this session: its tenant's, or all for root and gdrd-admin.
    ///
    /// # Errors
    /// [`ClientError::SessionEnded`], [`ClientError::Deadline`], [`ClientError::Refused`], [`ClientError::Unreachable`],
    /// [`ClientError::NotPermitted`], [`ClientError::ConnectionLost`].
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
        let line = self.lifeline().clone();
        let stream = subscribe(&line).await?;
        Ok(LeaseWatch { line, stream: Some(stream), last_sequence: None })
    }
}

async fn subscribe(line: &Lifeline) -> Result<Streaming<v1::LeaseEvent>, ClientError> {
    let deadline = line.context().deadline;
    line.across_restarts(async || {
        let mut client = BuffersClient::new(line.channel());
        // A deadline on the call would end the stream, so it stands on the subscription alone.
        let call = client.watch_leases(with_token(line.token(), Request::new(v1::WatchLeasesRequest {})));
        let answer = tokio::time::timeout(deadline, call).await;
        let answer = answer.map_err(|_| ClientError::Deadline { call: CALL, deadline })?;
        Ok(answer.map_err(|status| line.error(CALL, status))?.into_inner())
    })
    .await
}

/// Events of a tenant's leases. It does not keep the session alive.
#[derive(Debug)]
pub struct LeaseWatch {
    line: Lifeline,
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
        let line = self.line.clone();
        // The stream is the tenant's, and goes on after this session.
        tokio::select! {
            biased;
            _ = line.ended() => Ok(None),
            event = self.event() => match event {
                Err(ClientError::SessionEnded { .. }) => Ok(None),
                // The daemon forgets a token before it closes the session's socket.
                Err(error) if error.reason() == Some("SESSION_TOKEN_INVALID") => {
                    tokio::time::timeout(END_TIMEOUT, line.ended()).await.map_or(Err(error), |_| Ok(None))
                }
                event => event,
            },
        }
    }

    async fn event(&mut self) -> Result<Option<v1::LeaseEvent>, ClientError> {
        let stream = match &mut self.stream {
            Some(stream) => stream,
            None => self.stream.insert(subscribe(&self.line).await?),
        };
        let event = match stream.message().await {
            Ok(Some(event)) => event,
            Ok(None) => return Ok(self.lost()),
            Err(status) => match self.line.error(CALL, status) {
                error if error.is_lost_connection() => return Ok(self.lost()),
                error => return Err(error),
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

    /// What is told where the stream broke: as the daemon tells of events that it had no room for.
    fn lost(&mut self) -> Option<v1::LeaseEvent> {
        let sequence = self.last_sequence.map_or(0, |last| last.wrapping_add(1));
        self.forget();
        let event = Some(lease_event::Event::Resync(v1::Resync {}));
        (!self.line.is_over()).then_some(v1::LeaseEvent { sequence, event })
    }

    fn forget(&mut self) {
        self.stream = None;
        self.last_sequence = None;
    }
}

#[cfg(test)]
mod tests {
    use hyper_util::rt::TokioIo;
    use tonic::codec::{Codec as _, EncodeBody, SingleMessageCompressionOverride};
    use tonic::codegen::tokio_stream::{self, Stream};
    use tonic::transport::{Channel, Endpoint};
    use tonic_prost::ProstCodec;

    use super::*;
    use crate::session::tests::{opened, say_goodbye};

    fn stream_of(events: impl Stream<Item = v1::LeaseEvent> + Send + 'static) -> Streaming<v1::LeaseEvent> {
        let mut codec = ProstCodec::<v1::LeaseEvent, v1::LeaseEvent>::default();
        let told = tokio_stream::StreamExt::map(events, Ok);
        let uncompressed = SingleMessageCompressionOverride::Disable;
        let body = EncodeBody::new_server(codec.encoder(), told, None, uncompressed, None);
        Streaming::new_request(codec.decoder(), body, None, None)
    }

    fn watch_of(session: &Session, stream: Option<Streaming<v1::LeaseEvent>>) -> LeaseWatch {
        LeaseWatch { line: session.lifeline().clone(), stream, last_sequence: None }
    }

    /// A way to a daemon that takes no connection.
    fn deaf_daemon() -> Channel {
        type Connected = Result<TokioIo<gdrd_stream::Stream>, std::io::Error>;
        let connector = tower::service_fn(|_| std::future::pending::<Connected>());
        Endpoint::from_static("http://localhost").connect_with_connector_lazy(connector)
    }

    /// Both kinds of wait: for an event, and for a stream.
    async fn ends(how: impl AsyncFn(Session, &std::os::fd::OwnedFd)) {
        for is_subscribed in [true, false] {
            let (session, daemon, _page) = opened().await;
            let mut watch = watch_of(&session, is_subscribed.then(|| stream_of(tokio_stream::pending())));
            watch.line.set_channel(deaf_daemon());
            let (told, ()) = tokio::join!(watch.next(), how(session, &daemon));
            assert_eq!(told.unwrap(), None);
            assert_eq!(watch.next().await.unwrap(), None, "also when asked again");
        }
    }

    #[tokio::test]
    async fn a_session_that_is_closed_ends_its_watch() {
        ends(async |session, _| {
            tokio::task::yield_now().await;
            session.close();
            session.ended().await;
        })
        .await;
    }

    #[tokio::test]
    async fn a_goodbye_of_the_daemon_ends_the_watch() {
        ends(async |session, daemon| {
            tokio::task::yield_now().await;
            say_goodbye(daemon);
            session.ended().await;
        })
        .await;
    }

    #[tokio::test]
    async fn the_last_drop_of_a_session_ends_its_watch() {
        ends(async |session, _| {
            tokio::task::yield_now().await;
            drop(session);
        })
        .await;
    }

    #[tokio::test]
    async fn a_watch_tells_no_event_after_the_end_of_its_session() {
        let (session, _daemon, _page) = opened().await;
        let event = |sequence| v1::LeaseEvent { sequence, event: Some(lease_event::Event::Synced(v1::Synced {})) };
        let mut watch = watch_of(&session, Some(stream_of(tokio_stream::iter((0..).map(event)))));
        assert_eq!(watch.next().await.unwrap(), Some(event(0)));
        session.close();
        session.ended().await;
        assert_eq!(watch.next().await.unwrap(), None);
    }

    #[tokio::test]
    async fn a_refused_token_is_the_end_of_the_session_where_that_follows() {
        let (session, daemon, _page) = opened().await;
        let mut codec = ProstCodec::<v1::LeaseEvent, v1::LeaseEvent>::default();
        let mut status = tonic::Status::unauthenticated("no session has it");
        status.metadata_mut().insert(crate::calls::REASON_KEY, "SESSION_TOKEN_INVALID".parse().unwrap());
        let refused = tokio_stream::once(Err(status));
        let body = EncodeBody::new_client(codec.encoder(), refused, None, None);
        let stream = Streaming::new_request(codec.decoder(), body, None, None);
        let mut watch = watch_of(&session, Some(stream));
        let (told, ()) = tokio::join!(watch.next(), async {
            tokio::task::yield_now().await;
            say_goodbye(&daemon);
        });
        assert_eq!(told.unwrap(), None);
    }
}
