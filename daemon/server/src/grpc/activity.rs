//! What a gRPC connection is used for: calls in flight, and since when there is none.
//!
//! A connection holds one of a bounded number of places, so that one which says nothing must give it up: soon if it never
//! made a call, after a while if its last call has ended. A call lasts until its answer is sent whole, as a watch does.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::BodyExt as _;
use tokio::time::{Instant, Sleep, sleep_until};
use tonic::body::Body;
use tonic::codegen::http::{Request, Response};
use tonic::codegen::{BoxFuture, Service};
use tower::Layer;

use super::connection::Caller;

/// How long a connection may be without a call.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    /// Before its first one.
    pub(crate) first: Duration,
    /// After its last one.
    pub(crate) idle: Duration,
}

/// Calls of one connection. Clones are one.
#[derive(Debug, Clone)]
pub(crate) struct Calls(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    in_flight: u32,
    /// By when a call must begin, while there is none.
    until: Instant,
    has_begun: bool,
    idle: Duration,
}

impl Calls {
    pub(crate) fn new(patience: Patience) -> Self {
        let until = Instant::now() + patience.first;
        Self(Arc::new(Mutex::new(State { in_flight: 0, until, has_begun: false, idle: patience.idle })))
    }

    fn begin(&self) -> Call {
        let mut state = self.lock();
        state.in_flight += 1;
        state.has_begun = true;
        Call(self.clone())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change leaves it whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call in flight until it is dropped.
#[derive(Debug)]
struct Call(Calls);

impl Drop for Call {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.in_flight = state.in_flight.saturating_sub(1);
        state.until = Instant::now() + state.idle;
    }
}

/// Wakes a connection when it has been without a call for too long.
#[derive(Debug)]
pub(crate) struct Watch {
    calls: Calls,
    timer: Pin<Box<Sleep>>,
}

impl Watch {
    /// Must be called within the runtime.
    pub(crate) fn new(calls: Calls) -> Self {
        let timer = Box::pin(sleep_until(calls.lock().until));
        Self { calls, timer }
    }

    /// Whether there ever was a call.
    pub(crate) fn has_begun(&self) -> bool {
        self.calls.lock().has_begun
    }

    /// Gives the connection more time for another call.
    pub(crate) fn wait_more(&mut self, time: Duration) {
        let until = Instant::now() + time;
        self.calls.lock().until = until;
        self.timer.as_mut().reset(until);
    }

    /// Ready once there has been no call for too long. It looks again only when the connection could be over: a call costs
    /// no timer.
    pub(crate) fn poll_over(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        while self.timer.as_mut().poll(cx).is_ready() {
            let now = Instant::now();
            let next = {
                let state = self.calls.lock();
                match state.in_flight {
                    0 if state.until <= now => return Poll::Ready(()),
                    0 => state.until,
                    _ => now + state.idle,
                }
            };
            self.timer.as_mut().reset(next);
        }
        Poll::Pending
    }
}

/// Counts each call on its connection.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CountCalls;

impl<S> Layer<S> for CountCalls {
    type Service = Counting<S>;

    fn layer(&self, inner: S) -> Counting<S> {
        Counting(inner)
    }
}

/// Services whose calls are counted.
#[derive(Debug, Clone)]
pub(crate) struct Counting<S>(S);

impl<S> Service<Request<Body>> for Counting<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Response<Body>, Infallible>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let call = request.extensions().get::<Caller>().map(|caller| caller.calls.begin());
        let answer = self.0.call(request);
        Box::pin(async move {
            let answer = answer.await?;
            Ok(answer.map(|body| {
                Body::new(body.map_frame(move |frame| {
                    // It goes with the body.
                    let _ = &call;
                    frame
                }))
            }))
        })
    }
}
