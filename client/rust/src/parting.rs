//! What registrations and adopted memory leave to be done when they are dropped, in the background and many at a time.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use gdrd_proto::v1;
use gdrd_proto::v1::registrations_client::RegistrationsClient;
use gdrd_shm::ForkMark;
use tokio::runtime::Handle;
use tonic::transport::Channel;

use crate::calls::{CallContext, Token};

/// Registrations that one call ends; what the daemon takes at the most.
const AT_ONCE: usize = 4096;

/// How often each call is made: the first may meet the dead connection to a daemon before this one, and to end a thing
/// twice is to end it once.
const TRIES: usize = 2;

/// The way back to the daemon. It keeps no session open.
pub(crate) struct Parting {
    mark: Arc<ForkMark>,
    channel: Channel,
    token: Token,
    context: CallContext,
    runtime: Handle,
    /// Registrations to be ended by the task that the first of them started.
    registrations: Mutex<Vec<u64>>,
}

impl fmt::Debug for Parting {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Parting").finish_non_exhaustive()
    }
}

impl Parting {
    pub(crate) fn new(
        mark: Arc<ForkMark>,
        channel: Channel,
        token: Token,
        context: CallContext,
        runtime: Handle,
    ) -> Arc<Self> {
        Arc::new(Self { mark, channel, token, context, runtime, registrations: Mutex::default() })
    }

    /// Ends a registration some time soon; in a forked child never, since it is the parent's.
    pub(crate) fn deregister(self: &Arc<Self>, id: u64) {
        if !self.mark.is_ours() {
            return;
        }
        let first = {
            let mut waiting = self.registrations.lock().unwrap_or_else(PoisonError::into_inner);
            waiting.push(id);
            waiting.len() == 1
        };
        if first {
            let parting = Arc::clone(self);
            self.runtime.spawn(async move { parting.flush().await });
        }
    }

    async fn flush(&self) {
        let ids = std::mem::take(&mut *self.registrations.lock().unwrap_or_else(PoisonError::into_inner));
        for ids in ids.chunks(AT_ONCE) {
            for _ in 0..TRIES {
                let request = v1::DeregisterRequest { registration_ids: ids.to_vec() };
                let request = self.context.session_request(&self.token, request);
                // Nobody is left to tell; what is refused now ends with the session.
                if RegistrationsClient::new(self.channel.clone()).deregister(request).await.is_ok() {
                    break;
                }
            }
        }
    }

    /// Gives up adopted memory some time soon; in a forked child never.
    pub(crate) fn disown(self: &Arc<Self>, memory_id: u64) {
        if !self.mark.is_ours() {
            return;
        }
        let parting = Arc::clone(self);
        self.runtime.spawn(async move {
            for _ in 0..TRIES {
                let request = parting.context.session_request(&parting.token, v1::DisownRequest { memory_id });
                if RegistrationsClient::new(parting.channel.clone()).disown(request).await.is_ok() {
                    break;
                }
            }
        });
    }
}
