//! What was heard of a GPU that ends its service, and what it takes to serve it again: that somebody says so, and that the
//! driver, asked after that, finds it well. Many answer all along, and fail the next job.

use std::sync::Mutex;
use std::time::Instant;

use crate::pool::lock;

/// Whether a GPU is lost.
#[derive(Default)]
pub(crate) struct Loss(Mutex<Option<Heard>>);

struct Heard {
    reason: String,
    /// When somebody said that it works again.
    resumed: Option<Instant>,
}

impl Loss {
    /// Bad news. The first is the reason.
    pub(crate) fn hear(&self, reason: &str) {
        let mut heard = lock(&self.0);
        heard.get_or_insert_with(|| Heard { reason: reason.to_owned(), resumed: None }).resumed = None;
    }

    pub(crate) fn resume(&self, now: Instant) {
        if let Some(heard) = &mut *lock(&self.0) {
            heard.resumed = Some(now);
        }
    }

    pub(crate) fn found_well(&self, asked: Instant) {
        lock(&self.0).take_if(|heard| heard.resumed.is_some_and(|resumed| resumed <= asked));
    }

    pub(crate) fn reason(&self) -> Option<String> {
        lock(&self.0).as_ref().map(|heard| heard.reason.clone())
    }
}
