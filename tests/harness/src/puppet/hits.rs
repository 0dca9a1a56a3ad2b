//! A thread that looks a registration up by its address, again and again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Context as _;
use gdrd_client::Session;

/// Bytes looked up at a time.
const LEN_BYTES: u64 = 64;

/// What such a thread has found.
pub(crate) struct Hits(Arc<AtomicU64>);

impl Hits {
    /// Registers the first bytes at an address and starts a thread named `hits`, which ends at its first miss.
    pub(crate) async fn start(session: &Session, address: u64) -> anyhow::Result<Self> {
        drop(session.registration_or_register(address, LEN_BYTES).await?);
        let (session, found) = (session.clone(), Arc::new(AtomicU64::new(0)));
        let counted = Arc::clone(&found);
        let look = move || {
            while session.registration(address, LEN_BYTES).is_some() {
                counted.fetch_add(1, Ordering::Relaxed);
            }
        };
        std::thread::Builder::new().name("hits".to_owned()).spawn(look).context("start a thread")?;
        Ok(Self(found))
    }

    /// How often it has found it.
    pub(crate) fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
