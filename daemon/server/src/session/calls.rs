//! Calls that come by the session socket: the same ones as on gRPC, without its cost.
//!
//! Role: answers at once what can be, keeps what must wait, one task a session. How many acquires of a session may wait
//! is bounded by the engine. Must not know: what is allowed.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::stream::{FuturesUnordered, StreamExt};
use gdrd_engine::{Engine, EngineError, LeaseGrant, SessionId};
use gdrd_proto::v1::{self, answer, call, daemon_message};
use tonic::{Code, Status};

use super::channel::{Channel, Parcel};
use crate::leases;
use crate::status::{bad_argument, of_engine, reason_of};

type Waiting = Pin<Box<dyn Future<Output = (u64, Result<LeaseGrant, Status>)> + Send>>;

/// Calls of one session. Dropped, those that wait are withdrawn.
pub(super) struct Calls {
    engine: Engine,
    session: SessionId,
    waiting: FuturesUnordered<Waiting>,
}

impl Calls {
    pub(super) fn new(engine: Engine, session: SessionId) -> Self {
        Self { engine, session, waiting: FuturesUnordered::new() }
    }

    /// Takes a call, and answers it unless it has to wait.
    pub(super) fn begin(&self, channel: &Channel, call: v1::Call) {
        // The client is woken first, and then whoever clears up behind it.
        let _held_back = self.engine.hold_back();
        let v1::Call { request_id, timeout_ms, call, .. } = call;
        let granted = match call {
            Some(call::Call::Acquire(wanted)) => match leases::acquire(&self.engine, self.session, wanted) {
                Ok(mut acquire) => match (&mut acquire).now_or_never() {
                    Some(granted) => granted.map_err(|refusal| of_engine(&refusal)),
                    None => return self.wait(request_id, timeout_ms, acquire),
                },
                Err(status) => Err(status),
            },
            Some(call::Call::Open(wanted)) => leases::open(&self.engine, self.session, wanted),
            Some(call::Call::Release(wanted)) => {
                return match leases::release(&self.engine, self.session, wanted) {
                    Ok(released) => tell(channel, request_id, answer::Answer::Released(released)),
                    Err(status) => refuse(channel, request_id, &status),
                };
            }
            None => Err(bad_argument("a call of an unknown kind; upgrade the daemon")),
        };
        hand_over(channel, request_id, granted);
    }

    /// Answers the next call that has waited for long enough; never ends where none waits.
    pub(super) async fn next(&mut self, channel: &Channel) {
        match self.waiting.next().await {
            Some((request_id, granted)) => hand_over(channel, request_id, granted),
            None => std::future::pending().await,
        }
    }

    fn wait(
        &self,
        request_id: u64,
        timeout_ms: u32,
        acquire: impl Future<Output = Result<LeaseGrant, EngineError>> + Send + 'static,
    ) {
        self.waiting.push(Box::pin(async move {
            let granted = match timeout_ms {
                0 => Ok(acquire.await),
                timeout_ms => tokio::time::timeout(Duration::from_millis(timeout_ms.into()), acquire).await,
            };
            let granted = granted.map_err(|_| Status::new(Code::DeadlineExceeded, "the time for the call is over"));
            (request_id, granted.and_then(|granted| granted.map_err(|refusal| of_engine(&refusal))))
        }));
    }
}

/// Sends the lease with its fd, as the next delivery. A session that cannot be sent to is ending, and takes its leases
/// with it.
fn hand_over(channel: &Channel, request_id: u64, granted: Result<LeaseGrant, Status>) {
    match granted {
        Ok(grant) => {
            let (info, memory) = grant.keep();
            // The client knows its tenant, and a cgroup's path would not fit every packet.
            let lease = Box::new(v1::Lease { tenant: String::new(), ..leases::lease(&info) });
            let _ = channel.deliver(Parcel::Lease { request_id, lease, memory });
        }
        Err(status) => refuse(channel, request_id, &status),
    }
}

fn refuse(channel: &Channel, request_id: u64, status: &Status) {
    let (code, reason) = (i32::from(status.code()), reason_of(status).to_owned());
    let message = status.message().to_owned();
    tell(channel, request_id, answer::Answer::Refused(v1::Refused { code, reason, message }));
}

fn tell(channel: &Channel, request_id: u64, answer: answer::Answer) {
    channel.answer(daemon_message::Message::Answer(v1::Answer { request_id, answer: Some(answer) }));
}
