//! What registrations and adopted memory leave to be done when they are dropped, in the background and many at a time.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use gdrd_proto::v1;
use gdrd_proto::v1::registrations_client::RegistrationsClient;
use tokio::runtime::Handle;
use tonic::transport::Channel;

use crate::calls::{CallContext, Token};

/// Registrations that one call ends; what the daemon takes at the most.
const AT_ONCE: usize = 4096;

/// The way back to the daemon. It keeps no session open.
pub(crate) struct Parting {
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
    pub(crate) fn new(channel: Channel, token: Token, context: CallContext, runtime: Handle) -> Arc<Self> {
        Arc::new(Self { channel, token, context, runtime, registrations: Mutex::default() })
    }

    /// Ends a registration some time soon.
    pub(crate) fn deregister(self: &Arc<Self>, id: u64) {
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
            let request = v1::DeregisterRequest { registration_ids: ids.to_vec() };
            let request = self.context.session_request(&self.token, request);
            // Nobody is left to tell; what is refused now ends with the session.
            let _ = RegistrationsClient::new(self.channel.clone()).deregister(request).await;
        }
    }

    /// Gives up adopted memory some time soon.
    pub(crate) fn disown(self: &Arc<Self>, memory_id: u64) {
        let parting = Arc::clone(self);
        self.runtime.spawn(async move {
            let request = parting.context.session_request(&parting.token, v1::DisownRequest { memory_id });
            let _ = RegistrationsClient::new(parting.channel.clone()).disown(request).await;
        });
    }
}
