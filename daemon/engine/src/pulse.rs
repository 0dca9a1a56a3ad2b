//! A sign of life of the engine, for whoever has a watchdog to feed.
//!
//! A pulse goes to each thread that serves, and is over once the last has let it go. It has no owner: the threads hold it
//! together, so one that hangs, or has ended by a panic, keeps it up for ever.
//!
//! Not asked are the threads for the calls on one HCA (`gdrd-hca-N`): what hangs there is its driver, and the rest serves.

use std::sync::Arc;

use futures_channel::oneshot;

use crate::engine::Engine;

/// A pulse on its way, one clone for each thread.
#[derive(Debug, Clone)]
pub(crate) struct Beat {
    _last: Arc<Last>,
}

/// Tells that the last clone is gone.
#[derive(Debug)]
struct Last(Option<oneshot::Sender<()>>);

impl Drop for Last {
    fn drop(&mut self) {
        if let Some(over) = self.0.take() {
            // Whoever asked may have gone.
            let _ = over.send(());
        }
    }
}

impl Beat {
    /// A pulse, and what comes once nobody has it any more.
    pub(crate) fn new() -> (Self, oneshot::Receiver<()>) {
        let (sender, receiver) = oneshot::channel();
        (Self { _last: Arc::new(Last(Some(sender))) }, receiver)
    }

    /// Clones that there are.
    #[cfg(test)]
    pub(crate) fn held(&self) -> usize {
        Arc::strong_count(&self._last)
    }
}

impl Engine {
    /// Comes back once all that serves has shown that it goes on: the timer and the state that all calls go through, the thread
    /// for events of devices, each broker thread, and one thread for driver calls, unless all are in calls. Wakes
    /// each of them, and takes no lock itself that any may hold across a wait.
    pub async fn pulse(&self) {
        let (beat, over) = Beat::new();
        self.runtime().pulse(beat);
        // It is told in any case.
        let _ = over.await;
    }
}
